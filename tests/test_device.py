"""Facts of each chip, the one switch that chooses a device, and clear words where there is none."""

from __future__ import annotations

import ast
import concurrent.futures
import importlib.util
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import pytest
import torch

import tkernels
from tests.fresh import run
from tkernels import device
from tkernels.device import UnsupportedError

SM = (80, 86, 89, 90, 100, 103, 120)
ASCEND = ("Ascend910B1", "Ascend910B2", "Ascend910B2C", "Ascend910B3", "Ascend910B4")


def fresh(program: str, chosen: str) -> subprocess.CompletedProcess[str]:
    """Run ``program`` in a new process with TKERNELS_DEVICE set to ``chosen``."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return run(program, {**env, "TKERNELS_DEVICE": chosen})


# ---- facts -------------------------------------------------------------------------------------


@pytest.mark.parametrize("capability", SM)
def test_facts_of_nvidia_chips(capability: int) -> None:
    facts = device.sm_facts(capability)
    assert (facts.type, facts.arch) == ("cuda", f"sm{capability}")
    assert facts.num_cores == facts.num_dot_cores >= 84
    assert facts.registers == 65536
    assert facts.align_bytes == 16
    assert facts.compile_only
    assert facts.dtypes == {torch.float32, torch.float16, torch.bfloat16}
    assert device.offline_facts(facts.arch) == facts


@pytest.mark.parametrize(
    ("capability", "kib"), [(80, 163), (86, 99), (89, 99), (90, 227), (100, 227), (120, 99)]
)
def test_shared_memory_of_nvidia_chips(capability: int, kib: int) -> None:
    assert device.sm_facts(capability).local_mem_bytes == kib * 1024


@pytest.mark.parametrize("name", ASCEND)
def test_facts_of_ascend_chips(name: str) -> None:
    facts = device.ascend_facts(name)
    assert (facts.type, facts.arch, facts.name) == ("npu", "ascend910b", name)
    assert facts.num_cores == 2 * facts.num_dot_cores  # two vector cores beside each cube core
    assert facts.num_dot_cores in (20, 24)
    assert facts.max_programs == 65535
    assert facts.align_bytes == 32
    kib = [
        n // 1024
        for n in (
            facts.local_mem_bytes,
            facts.l1_bytes,
            facts.l0a_bytes,
            facts.l0b_bytes,
            facts.l0c_bytes,
        )
    ]
    assert kib == [192, 512, 64, 64, 128]
    assert facts.compile_only


def test_the_usual_ascend_chip() -> None:
    assert device.offline_facts("ascend910b") == device.ascend_facts("Ascend910B3")


def test_facts_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        device.sm_facts(90).num_cores = 1  # type: ignore[misc]


def test_unknown_hardware_is_refused() -> None:
    with pytest.raises(
        UnsupportedError, match=r"expected a compute capability of sm80, .*, got sm75"
    ):
        device.sm_facts(75)
    with pytest.raises(UnsupportedError, match=r"expected an Ascend chip of .*, got Ascend310P3"):
        device.ascend_facts("Ascend310P3")
    with pytest.raises(
        UnsupportedError, match=r"expected an architecture like sm90 .*, got 'gfx942'"
    ):
        device.offline_facts("gfx942")


def test_unsupported_is_a_runtime_error() -> None:
    assert issubclass(UnsupportedError, RuntimeError)
    assert tkernels.UnsupportedError is UnsupportedError


# ---- this machine ------------------------------------------------------------------------------


def test_current_device_is_what_tests_run_on() -> None:
    facts = device.current()
    assert facts is device.current()  # found once
    assert facts.type == device.KIND
    assert not facts.compile_only
    assert facts.num_cores > 0
    assert torch.empty(1, device=device.tensor_device()).device.type == device.KIND
    if device.KIND == "cpu":
        assert facts.arch == "interpret"
        assert os.environ["TRITON_INTERPRET"] == "1"


@pytest.mark.skipif(device.KIND != "cpu", reason="says what a machine without accelerator answers")
def test_accelerator_calls_on_the_cpu() -> None:
    words = "tkernels: expected an accelerator for this call, got the CPU"
    with pytest.raises(UnsupportedError, match=words):
        device.new_graph()
    for call in (
        device.timing_event, device.event, device.graph_pool, device.memory_free,
        lambda: device.pinned(1),
    ):  # fmt: skip
        with pytest.raises(UnsupportedError, match=words):
            call()
    graph = object()
    with pytest.raises(UnsupportedError, match=words), device.capture(graph):
        pytest.fail("the block ran")
    device.synchronize()  # nothing to wait for, and no error
    assert device.l2_bytes() == 0


def test_no_recording_of_an_npu_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "KIND", "npu")
    words = "expected an NVIDIA GPU or the CPU to profile, got an NPU"
    with pytest.raises(UnsupportedError, match=words), device.profiled():
        pytest.fail("the block ran")


# What torch.npu exports of that which tkernels/device.py takes from it: __all__ of
# torch_npu/npu/__init__.py in the wheel torch-npu 2.14.0.
NPU_NAMES = {
    "Event", "NPUGraph", "current_device", "device_count", "empty_cache", "get_device_name",
    "get_device_properties", "graph", "graph_pool_handle", "is_available", "max_memory_allocated",
    "mem_get_info", "reset_peak_memory_stats", "synchronize",
}  # fmt: skip


def asked_of_the_backend(path: Path) -> set[str]:
    """Names behind ``_backend()``, ``backend`` and ``torch.npu`` in a file."""
    tree = ast.parse(path.read_text())
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and ast.unparse(node.value) in ("_backend()", "backend", "torch.npu")
    }


def test_names_of_torch_npu_exist() -> None:
    asked = asked_of_the_backend(Path(device.__file__)) - {"CUDAGraph"}
    assert asked == NPU_NAMES, "look new names up in the wheel's sources, and add them above"
    spec = importlib.util.find_spec("torch_npu")
    if spec is not None and spec.submodule_search_locations:
        source = Path(spec.submodule_search_locations[0]) / "npu" / "__init__.py"
        exported = next(
            ast.literal_eval(node.value)
            for node in ast.parse(source.read_text()).body
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
        )
        assert set(exported) >= NPU_NAMES


@pytest.mark.gpu
def test_graph_replays_what_it_captured() -> None:
    x = torch.ones(4, device=device.tensor_device())
    y = torch.empty_like(x)
    graph = device.new_graph()
    with device.capture(graph):
        y.copy_(x * 2)
    x.fill_(21.0)
    graph.replay()
    device.synchronize()
    assert y.tolist() == [42.0] * 4


def test_peak_memory_counts_what_was_held() -> None:
    before = device.memory_peak()
    held = torch.ones(64 * 2**20, dtype=torch.uint8, device=device.tensor_device())
    assert device.memory_peak() >= before > 0
    assert int(held[0]) == 1


def test_versions_name_what_a_measurement_depends_on() -> None:
    found = device.versions()
    assert found["torch"] == torch.__version__
    assert found["triton"]


# ---- TKERNELS_DEVICE ---------------------------------------------------------------------------


@pytest.mark.thin(2)
@pytest.mark.parametrize(
    ("chosen", "words"),
    [
        ("gpu", "TKERNELS_DEVICE must be cuda, npu, cpu or compile:<arch>, got 'gpu'"),
        ("compile:sm75", "expected a compute capability of sm80"),
        ("compile:", "expected an architecture like sm90 or ascend910b, got ''"),
        pytest.param(
            "cuda",
            "TKERNELS_DEVICE=cuda, but torch sees no CUDA device",
            marks=pytest.mark.skipif(
                device.KIND == "cuda", reason="this machine has a CUDA device"
            ),
        ),
        pytest.param(
            "npu",
            "TKERNELS_DEVICE=npu, but torch_npu sees no NPU",
            marks=pytest.mark.skipif(device.KIND == "npu", reason="this machine has an NPU"),
        ),
    ],
)
def test_wrong_choice_is_refused(chosen: str, words: str) -> None:
    done = fresh("import tkernels", chosen)
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("tkernels.device.UnsupportedError: tkernels: ")
    assert words in last


@pytest.mark.thin(2)
@pytest.mark.parametrize(
    ("chosen", "kind", "arch"),
    [
        ("cpu", "cpu", "interpret"),
        ("compile:sm90", "cuda", "sm90"),
        ("compile:ascend910b", "npu", "ascend910b"),
    ],
)
def test_choice_is_followed(chosen: str, kind: str, arch: str) -> None:
    """Tensors stay on the CPU, and only the CPU itself turns the interpreter on."""
    done = fresh(
        "import os\n"
        "from tkernels import device as d\n"
        "on = os.environ.get('TRITON_INTERPRET', '-')\n"
        "print(d.KIND, d.current().arch, d.tensor_device(), on)",
        chosen,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [kind, arch, "cpu", "1" if chosen == "cpu" else "-"]


# ---- arithmetic --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("a", "b", "want"), [(0, 4, 0), (1, 4, 1), (4, 4, 1), (5, 4, 2), (9, 1, 9)]
)
def test_cdiv(a: int, b: int, want: int) -> None:
    assert device.cdiv(a, b) == want


def test_next_power_of_2() -> None:
    for exponent in range(1, 60):
        power = 1 << exponent
        assert device.next_power_of_2(power) == power
        assert device.next_power_of_2(power + 1) == 2 * power
        if exponent > 1:
            assert device.next_power_of_2(power - 1) == power
    assert device.next_power_of_2(1) == 1


class _FakeKernel:
    """Stands for a JIT function: counts the launches that derive the variant anew."""

    arg_names: ClassVar[list[str]] = ["x_ptr", "n", "BLOCK"]

    def __init__(self) -> None:
        self.long_way: list[tuple[object, ...]] = []
        self.short_way: list[tuple[object, ...]] = []
        self.grids: list[tuple[int, ...]] = []

    def run(self, *args: object) -> _FakeKernel:
        self.long_way.append(args)
        return self

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        self.grids.append(grid)
        return lambda *args: self.short_way.append(args)


@pytest.mark.skipif(device.KIND != "cpu", reason="the interpreter's launches, not a device's")
def test_threads_may_call_at_once() -> None:
    """Triton's interpreter keeps its state in globals, so launches on it take turns."""
    x, weight = torch.randn(9, 16), torch.rand(16)
    expected = tkernels.rms_norm(x, weight)
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        results = [pool.submit(tkernels.rms_norm, x, weight) for _ in range(40)]
        assert all(torch.equal(result.result(), expected) for result in results)


def test_relaunching_starts_the_compiled_kernel_for_aligned_pointers_only() -> None:
    memory = torch.zeros(64)
    aligned, shifted = memory[:8], memory[1:9]
    assert aligned.data_ptr() % 16 == 0
    kernel = _FakeKernel()
    launch = device.relaunching(
        kernel,  # type: ignore[arg-type]
        (5,),
        {"BLOCK": 32, "num_warps": 4},
        kernel.run,
    )
    launch(shifted, 8)  # its variant serves no aligned call
    launch(aligned, 8)
    assert (len(kernel.long_way), len(kernel.short_way)) == (2, 0)
    launch(aligned, 8)
    launch(shifted, 8)
    launch(aligned, 8)
    assert [a[0] for a in kernel.long_way] == [shifted, aligned, shifted]
    assert kernel.short_way == [(aligned, 8, 32)] * 2
    assert kernel.grids == [(5, 1, 1)]


def test_described_launches_know_which_tensors_are_aligned(monkeypatch: pytest.MonkeyPatch) -> None:
    """A variant for addresses that divide by 16 stores 16 bytes at a time, which no other may."""
    monkeypatch.setattr(device, "KIND", "cuda")
    monkeypatch.setattr(device, "_COMPILE_ARCH", None)
    took: list[tuple[str, int]] = []

    def started(variant: str, *_: object) -> Callable[..., None]:
        return lambda *args: took.append((variant, args[2].data_ptr()))

    monkeypatch.setattr(device, "_described_start", started)
    memory = torch.zeros(64)
    aligned, shifted = memory[:8], memory[1:9]

    class Kernel:
        arg_names: ClassVar[list[str]] = ["desc", "x_ptr", "out_ptr", "n", "BLOCK"]

        def run(
            self, _: object, __: object, out: torch.Tensor, *___: object, **____: object
        ) -> str:
            took.append(("compiled", out.data_ptr()))
            return "odd" if out.data_ptr() % 16 else "even"

    launch = device.bind_described(Kernel(), (5,), (lambda t: t,), BLOCK=32)  # type: ignore[arg-type]
    for out in (aligned, shifted, aligned, shifted):
        launch(memory, memory, out, 8)
    even, odd = aligned.data_ptr(), shifted.data_ptr()
    assert took == [("compiled", even), ("compiled", odd), ("even", even), ("odd", odd)]
