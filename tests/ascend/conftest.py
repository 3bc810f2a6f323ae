"""The Ascend check has its own environment (``make test-ascend``); elsewhere it steps aside."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os

import pytest

from .cpu_build import missing_tools


def _why_not() -> str:
    """Why these tests cannot run in this environment; "" if they can."""
    try:
        version = importlib.metadata.version("triton-ascend")
    except importlib.metadata.PackageNotFoundError:
        return (
            "triton-ascend is not installed in this environment (make test-ascend brings its own)"
        )
    if importlib.util.find_spec("triton.backends.ascend") is None:
        return f"triton-ascend {version} is installed, but import triton finds another triton"
    return ""


DEVICE = "compile:ascend910b"
WHY_NOT = _why_not()
# Collected by accident, every test here would fail at its imports.
collect_ignore_glob = ["*.py"] if WHY_NOT else []


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--update-table`` rewrites tests/ascend/table.json from what the compiler says now, and
    ``--ask-again`` compares all of it."""
    parser.addoption("--update-table", action="store_true", help="rewrite tests/ascend/table.json")
    parser.addoption(
        "--ask-again", action="store_true", help="ask the compiler also about what the table knows"
    )


def pytest_configure() -> None:
    """Check the device; tests/conftest.py has imported tkernels, so it is too late to choose."""
    given = os.environ.get("TKERNELS_DEVICE", "")
    if not WHY_NOT and given != DEVICE:
        raise pytest.UsageError(
            f"tests/ascend: TKERNELS_DEVICE must be {DEVICE}, got {given!r}; run make test-ascend, "
            f"or TKERNELS_DEVICE={DEVICE} .venv-ascend/bin/python -m pytest tests/ascend"
        )
    if not WHY_NOT and missing_tools():
        raise pytest.UsageError(
            f"tests/ascend: {', '.join(missing_tools())} of LLVM 19 must be installed, got none; "
            "run bash tests/ascend/setup.sh"
        )


def pytest_report_header() -> list[str]:
    """Name the compilers that will be asked."""
    names = ("triton-ascend", "ascendnpu-ir")
    if WHY_NOT:
        return []
    found = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names)
    return [f"tests/ascend: {found}"]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say what is left out: at the end, as a plain ``pytest`` reads this file after its header."""
    if WHY_NOT:
        terminalreporter.write_line(f"tests/ascend: not collected, {WHY_NOT}")


@pytest.fixture(scope="session")
def update_table(request: pytest.FixtureRequest) -> bool:
    """Whether ``--update-table`` was given."""
    return bool(request.config.getoption("--update-table"))
