"""Device fixture and seed."""

from __future__ import annotations

import gc
import importlib.util
import os
import signal
import zlib
from collections.abc import Generator
from pathlib import Path

# Workers of pytest-xdist share the cores: each with a thread for every core, most would wait for
# one another. Before torch is imported, and for the processes that tests start.
if "PYTEST_XDIST_WORKER_COUNT" in os.environ:
    _share = max(1, (os.cpu_count() or 1) // int(os.environ["PYTEST_XDIST_WORKER_COUNT"]))
    os.environ.setdefault("OMP_NUM_THREADS", str(_share))

# In the background of a script this process ignores Ctrl-C, and all that it starts would, too.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import pytest
import torch

import tkernels  # before triton: it switches the interpreter on where there is no accelerator
from tests.interpreter_speed import make_faster
from tkernels import check, device

if device.current().arch == "interpret" and importlib.util.find_spec("triton"):
    make_faster()

SHARED = Path(__file__).resolve().parents[2] / "shared"


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def dev() -> torch.device:
    return device.tensor_device()


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values of indices are not looked at: as on an accelerator, in the interpreter too."""
    monkeypatch.setattr(check, "DEBUG", False)


@pytest.fixture
def shared() -> Path:
    """Folder of trained checkpoints and held-out text that lies beside the checkout."""
    if not SHARED.is_dir():
        pytest.skip("the folder 'shared' with checkpoints does not lie beside this checkout")
    return SHARED


def pytest_report_header() -> str:
    facts = device.current()
    return f"tkernels {tkernels.__version__} on {facts.name} ({facts.arch})"


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is imported and collected stays to the end: garbage is looked for beside it only."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # libraries count what is left at the end


@pytest.hookimpl(tryfirst=True)  # before pytest looks at -m
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    _thin(items)
    reasons = {
        "gpu": (device.KIND != "cuda", "needs an NVIDIA GPU; this machine has none"),
        "npu": (device.KIND != "npu", "needs an Ascend NPU; this machine has none"),
    }
    for item in items:
        for marker, (skip, reason) in reasons.items():
            if skip and item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))


def _thin(items: list[pytest.Item]) -> None:
    """Of what is marked ``thin(n)`` about one set of parameters of n is enough where Triton
    interprets; the others are slow. The first of each test, and of each kernel, stays."""
    if device.KIND != "cpu":
        return
    seen: set[tuple[str, str]] = set()
    for item in items:
        marker = item.get_closest_marker("thin")
        if marker is None or not hasattr(item, "callspec"):
            continue
        spec = item.callspec.params.get("spec")
        test = (item.nodeid.partition("[")[0], getattr(spec, "name", ""))
        if test in seen and zlib.crc32(item.nodeid.encode()) % marker.args[0]:
            item.add_marker(pytest.mark.slow)
        seen.add(test)
