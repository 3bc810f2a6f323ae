"""The only file that knows a backend: which accelerator this is, its facts, and thin calls into it.

It must be imported before the first ``import triton``: on a machine without an accelerator it turns
on Triton's interpreter, and Triton decides at *its own* import whether ``tl.zeros`` and friends are
interpreted. Kernel files therefore take ``triton`` and ``tl`` from here. Where triton is not
installed both names are stand-ins: every reference still works, and a launch says what is missing.

``TKERNELS_DEVICE`` overrides the choice:

* ``cuda``, ``npu``, ``cpu``: that device (``cpu`` = interpreter).
* ``compile:sm90``, ``compile:ascend910b``: facts of that chip, tensors on the CPU, no interpreter.
  Nothing can be launched, but kernels can be compiled and inspected (tests, offline tuning).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.metadata
import importlib.util
import inspect
import itertools
import os
import shutil
import subprocess
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

__all__ = [
    "KIND",
    "Device",
    "Kernel",
    "UnsupportedError",
    "current",
    "tensor_device",
    "tl",
    "triton",
]


class UnsupportedError(RuntimeError):
    """The operation exists, but not on this device or in this installation."""


@dataclasses.dataclass(frozen=True)
class Device:
    """Facts about one chip, all that launchers, legality rules and search spaces may depend on."""

    type: str  # "cuda" | "npu" | "cpu"
    arch: str  # "sm90", "ascend910b", "interpret": the folder name of tuned configs
    name: str
    num_cores: int  # programs that run side by side: SMs, or vector cores
    num_dot_cores: int  # the same for kernels with tl.dot: SMs, or cube cores
    local_mem_bytes: int  # shared memory a program may use, or the unified buffer (UB)
    registers: int  # 32-bit registers of one core; 0 where the notion does not exist
    max_programs: int
    align_bytes: int
    dtypes: frozenset[torch.dtype]
    l1_bytes: int = 0  # Ascend: L1 and L0 buffers of a cube core
    l0a_bytes: int = 0
    l0b_bytes: int = 0
    l0c_bytes: int = 0
    compile_only: bool = False  # facts only: tensors live on the CPU and nothing can be launched

    @property
    def is_npu(self) -> bool:
        """An Ascend chip: tiles must fit UB, the grid is bounded, warps do not exist."""
        return self.type == "npu"


_FLOATS = frozenset({torch.float32, torch.float16, torch.bfloat16})
_KIB = 1024

# Shared memory per block (opt-in) by compute capability: CUDA C++ Programming Guide, table
# "Technical Specifications per Compute Capability". Used offline; a live card is asked instead.
_SM_SHARED = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 103: 227, 120: 99}
_SM_CORES = {80: 108, 86: 84, 89: 128, 90: 132, 100: 148, 103: 148, 120: 170}

# (cube cores, vector cores) as Huawei's compiler prints them for each chip (ascendnpu-ir 1.2.0).
_ASCEND_CORES = {
    "Ascend910B1": (24, 48),
    "Ascend910B2": (24, 48),
    "Ascend910B2C": (24, 48),
    "Ascend910B3": (20, 40),
    "Ascend910B4": (20, 40),
    "Ascend910B4-1": (20, 40),
}


def sm_facts(capability: int) -> Device:
    """Facts of an NVIDIA chip by compute capability (90 for H100), with no device present."""
    if capability not in _SM_SHARED:
        known = ", ".join(f"sm{c}" for c in _SM_SHARED)
        raise UnsupportedError(
            f"tkernels: expected a compute capability of {known}, got sm{capability}"
        )
    return Device(
        type="cuda",
        arch=f"sm{capability}",
        name=f"sm{capability} (facts only)",
        num_cores=_SM_CORES[capability],
        num_dot_cores=_SM_CORES[capability],
        local_mem_bytes=_SM_SHARED[capability] * _KIB,
        registers=65536,
        max_programs=2**31 - 1,
        align_bytes=16,
        dtypes=_FLOATS,
        compile_only=True,
    )


def ascend_facts(name: str = "Ascend910B3") -> Device:
    """Facts of an Ascend 910B chip by name, with no device present."""
    if name not in _ASCEND_CORES:
        known = ", ".join(_ASCEND_CORES)
        raise UnsupportedError(f"tkernels: expected an Ascend chip of {known}, got {name}")
    cube, vector = _ASCEND_CORES[name]
    return Device(
        type="npu",
        arch="ascend910b",
        name=name,
        num_cores=vector,
        num_dot_cores=cube,
        local_mem_bytes=192 * _KIB,
        registers=0,
        max_programs=65535,
        align_bytes=32,
        dtypes=_FLOATS,
        l1_bytes=512 * _KIB,
        l0a_bytes=64 * _KIB,
        l0b_bytes=64 * _KIB,
        l0c_bytes=128 * _KIB,
        compile_only=True,
    )


# Few programs on purpose, so that tests make each one walk over several tiles.
_INTERPRET = Device(
    type="cpu",
    arch="interpret",
    name="Triton interpreter",
    num_cores=4,
    num_dot_cores=4,
    local_mem_bytes=227 * _KIB,
    registers=65536,
    max_programs=65535,
    align_bytes=16,
    dtypes=_FLOATS,
)


def offline_facts(arch: str) -> Device:
    """``Device`` of an architecture folder name such as ``sm90`` or ``ascend910b``."""
    if arch == "ascend910b":
        return ascend_facts()
    if arch.startswith("sm") and arch[2:].isdecimal():
        return sm_facts(int(arch[2:]))
    raise UnsupportedError(
        f"tkernels: expected an architecture like sm90 or ascend910b, got {arch!r}"
    )


def _npu_available() -> bool:
    if importlib.util.find_spec("torch_npu") is None:
        return False
    importlib.import_module("torch_npu")  # registers torch.npu
    return bool(torch.npu.is_available())  # type: ignore[attr-defined]


def _find_kind() -> tuple[str, str]:
    """(kind, architecture to compile for or ""), from TKERNELS_DEVICE or from what is there."""
    asked = os.environ.get("TKERNELS_DEVICE", "")
    if asked.startswith("compile:"):
        return offline_facts(asked.removeprefix("compile:")).type, asked.removeprefix("compile:")
    if asked not in ("", "cuda", "npu", "cpu"):
        raise UnsupportedError(
            f"tkernels: TKERNELS_DEVICE must be cuda, npu, cpu or compile:<arch>, got {asked!r}"
        )
    if asked == "cuda" and not torch.cuda.is_available():
        raise UnsupportedError("tkernels: TKERNELS_DEVICE=cuda, but torch sees no CUDA device")
    if asked == "npu" and not _npu_available():
        raise UnsupportedError("tkernels: TKERNELS_DEVICE=npu, but torch_npu sees no NPU")
    if asked:
        return asked, ""
    if torch.cuda.is_available():
        return "cuda", ""
    return ("npu" if _npu_available() else "cpu"), ""


KIND, _COMPILE_ARCH = _find_kind()


def _check_one_triton() -> None:
    """triton and triton-ascend overwrite each other's files when installed side by side."""
    homes = []
    for dist in ("triton", "triton-ascend"):
        try:
            homes.append(importlib.metadata.distribution(dist).locate_file("triton"))
        except importlib.metadata.PackageNotFoundError:
            return
    if homes[0] == homes[1]:
        raise ImportError(
            "tkernels: expected one of triton and triton-ascend, got both installed in one "
            "environment, where they overwrite each other; remove both (pip uninstall triton "
            "triton-ascend), then install the one for your device"
        )


def require_triton() -> None:
    """Raise ``UnsupportedError`` where no kernel can be launched because triton is absent."""
    if importlib.util.find_spec("triton") is None:
        raise UnsupportedError(
            "tkernels: expected triton to be installed to launch a kernel, got none; install "
            "tkernels[cuda] or tkernels[npu], or call tkernels.reference for the PyTorch version"
        )


class _MissingTriton(types.ModuleType):
    """Stands for triton and triton.language where triton is absent; complains at launch only."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _MissingTriton(f"{self.__name__}.{name}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _MissingTriton(self.__name__)  # e.g. @triton.jit

    def run(self, *args: Any, **kwargs: Any) -> Any:
        return self[kwargs["grid"]]

    def __getitem__(self, grid: Any) -> Any:
        require_triton()


if TYPE_CHECKING:
    from tkernels import _triton as tl
    from tkernels import _triton as triton
    from tkernels._triton import Kernel
else:
    Kernel = Any
    _check_one_triton()
    if KIND == "cpu" and not _COMPILE_ARCH:
        if "triton" in sys.modules:
            _zeros = getattr(sys.modules.get("triton.language"), "zeros", None)
            if type(_zeros).__name__ == "JITFunction":
                raise ImportError(
                    "tkernels: expected to be imported before triton on a machine without an "
                    "accelerator (its interpreter is chosen at import), got triton already "
                    "imported; move 'import tkernels' up or set TRITON_INTERPRET=1"
                )
        os.environ["TRITON_INTERPRET"] = "1"
    if importlib.util.find_spec("triton") is None:
        triton, tl = _MissingTriton("triton"), _MissingTriton("triton.language")
    else:
        triton = importlib.import_module("triton")
        tl = importlib.import_module("triton.language")


def triton_part(name: str) -> Any:
    """Module ``name`` of triton, or a stand-in like those above where this triton has none."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if not str(error.name).startswith("triton"):
            raise
        return _MissingTriton(name)


def is_there(part: Any) -> bool:
    """Whether ``triton_part`` found the module."""
    return not isinstance(part, _MissingTriton)


# Whether kernels run in Triton's interpreter.
INTERPRETED = KIND == "cpu" and not _COMPILE_ARCH and is_there(triton)


def _cuda_device() -> Device:
    if torch.version.hip:
        raise UnsupportedError(
            "tkernels: expected an NVIDIA GPU, got an AMD one (ROCm build of torch)"
        )
    p = torch.cuda.get_device_properties(torch.cuda.current_device())
    facts = sm_facts(p.major * 10 + p.minor)
    shared = getattr(p, "shared_memory_per_block_optin", facts.local_mem_bytes)
    return dataclasses.replace(
        facts,
        name=p.name,
        num_cores=p.multi_processor_count,
        num_dot_cores=p.multi_processor_count,
        local_mem_bytes=int(shared),
        compile_only=False,
    )


def _npu_device() -> Device:
    facts = ascend_facts(str(torch.npu.get_device_name()))  # type: ignore[attr-defined]
    # The table holds the chip's full counts; the driver knows what this card has.
    live = triton.runtime.driver.active.utils.get_device_properties(0)
    return dataclasses.replace(
        facts,
        num_cores=int(live.get("num_vectorcore", facts.num_cores)),
        num_dot_cores=int(live.get("num_aicore", facts.num_dot_cores)),
        compile_only=False,
    )


@functools.cache
def current() -> Device:
    """The device that kernels launch on. Unknown hardware raises ``UnsupportedError``."""
    if _COMPILE_ARCH:
        return offline_facts(_COMPILE_ARCH)
    if KIND == "cuda":
        return _cuda_device()
    return _npu_device() if KIND == "npu" else _INTERPRET


@functools.cache
def tensor_device() -> torch.device:
    """Where tensors for this device live (the CPU for the interpreter and for compile-only)."""
    return torch.device("cpu" if _COMPILE_ARCH else KIND)


def _backend() -> Any:
    """torch.cuda or torch.npu, which share the names used below."""
    if tensor_device().type == "cpu":
        raise UnsupportedError("tkernels: expected an accelerator for this call, got the CPU")
    return torch.cuda if KIND == "cuda" else torch.npu  # type: ignore[attr-defined]


HAS_FLOAT64 = KIND != "npu"  # whether tensors of the device can be float64
MULTI_DEVICE = tensor_device().type != "cpu" and _backend().device_count() > 1


def current_index() -> int:
    """Index of the device that a launch goes to (only worth asking when MULTI_DEVICE)."""
    return int(_backend().current_device())


def synchronize() -> None:
    """Wait for queued work; nothing to wait for on the CPU."""
    if tensor_device().type != "cpu":
        _backend().synchronize()


def empty_cache() -> None:
    """Give memory that no tensor holds back to the device: other processes may want it."""
    if tensor_device().type != "cpu":
        _backend().empty_cache()


def timing_event() -> Any:
    """A device event that records time (``record()``, ``elapsed_time(other)`` in milliseconds)."""
    return _backend().Event(enable_timing=True)


def event() -> Any:
    """A device event (``record()``, ``synchronize()``), without time."""
    return _backend().Event()


def pinned(num_bytes: int) -> torch.Tensor:
    """uint8 [num_bytes] of the host that the device copies from and to while the host goes on."""
    _backend()
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)


def new_graph() -> Any:
    """An empty CUDAGraph or NPUGraph; ``capture`` fills it, ``.replay()`` runs it."""
    backend = _backend()
    return backend.CUDAGraph() if KIND == "cuda" else backend.NPUGraph()


def graph_pool() -> Any:
    """Memory that several graphs take turns with: ``pool`` of ``capture``."""
    return _backend().graph_pool_handle()


def most_graphs() -> int | None:
    """How many graphs may be kept at a time; None: as many as there is memory for.

    Each graph of an NPU keeps streams, of which a chip has 2048 (vLLM-Ascend plans with 1800, and
    its users met "no stream resource" where many sizes were captured). How many one of ours keeps
    has not been measured, so the number is small.
    """
    return 32 if KIND == "npu" else None


@contextlib.contextmanager
def capture(graph: Any, *, pool: Any = None) -> Iterator[None]:
    """Record what is launched inside the ``with`` block into ``graph``."""
    with _backend().graph(graph, pool=pool):
        yield


@contextlib.contextmanager
def profiled() -> Iterator[list[tuple[str, float, float]]]:
    """Records what runs inside the ``with`` block; the list is filled when the block has ended.

    Its entries are (name, begin, end), in microseconds of one clock: kernels and copies of the
    device, in replayed graphs too. On the CPU they are operators of PyTorch that no other called.
    The first use starts the driver's tracing, which stays and slows launches down: to be done when
    nothing is left to be timed, and before the graphs are captured that are recorded.

    Raises:
        UnsupportedError: no recording is known here for this kind of device.
    """
    if KIND == "npu":
        raise UnsupportedError("tkernels: expected an NVIDIA GPU or the CPU to profile, got an NPU")
    from torch.autograd import DeviceType  # type: ignore[attr-defined]
    from torch.profiler import ProfilerActivity, profile

    on_cpu = tensor_device().type == "cpu"
    activity, wanted = (
        (ProfilerActivity.CPU, DeviceType.CPU)
        if on_cpu
        else (ProfilerActivity.CUDA, DeviceType.CUDA)
    )
    if not on_cpu:
        # Torn down after a recording, tracing may crash in the next one where there are graphs
        # (torch/profiler/profiler.py, which sees to it for the graphs of torch.compile alone).
        os.environ["TEARDOWN_CUPTI"] = "0"
    found: list[tuple[str, float, float]] = []
    synchronize()
    with profile(activities=[activity]) as recorder:
        yield found
        synchronize()
    found += (
        (e.name, float(e.time_range.start), float(e.time_range.end))
        for e in recorder.events() or ()
        if e.device_type == wanted and e.cpu_parent is None
    )


def memory_peak(*, reset: bool = False) -> int:
    """Peak bytes: of the allocator on an accelerator, of the process (resident set) on the CPU."""
    if tensor_device().type == "cpu":
        import resource  # not on Windows, where only this figure is missing

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _KIB
    peak = int(_backend().max_memory_allocated())
    if reset:
        _backend().reset_peak_memory_stats()
    return peak


def l2_bytes() -> int:
    """Bytes of last-level cache that a cold-cache timing must push out; 0 on the CPU."""
    if tensor_device().type == "cpu":
        return 0
    if KIND == "npu":
        return 192 * 1024 * _KIB
    return int(torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size)


def child_environment(arch: str = "") -> dict[str, str]:
    """Environment of a child process with this device, or one that compiles for ``arch``."""
    environment = dict(os.environ)
    if arch:
        environment["TKERNELS_DEVICE"] = f"compile:{arch}"
        environment.pop("TRITON_INTERPRET", None)  # this process may have set it for itself
    return environment


def host_cores() -> int:
    """Processor cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def identity() -> str:
    """Text that tells this device from the others of this host."""
    if KIND != "cuda" or _COMPILE_ARCH:
        return f"{current().name} {0 if tensor_device().type == 'cpu' else current_index()}"
    return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)


def memory_bytes() -> int:
    """Bytes of the device's own memory; 0 on the CPU."""
    if tensor_device().type == "cpu":
        return 0
    return int(_backend().get_device_properties(_backend().current_device()).total_memory)


def memory_free() -> int:
    """Bytes that could be allocated: nobody's, and those the allocator keeps. Waits for work."""
    _backend().empty_cache()
    return int(_backend().mem_get_info()[0])


def health() -> dict[str, Any]:
    """Clock (MHz), temperature (C) and driver of the device as its own tool tells them, if it does.

    For records: a throttled card measures other times. Never raises.
    """
    if KIND != "cuda" or _COMPILE_ARCH or shutil.which("nvidia-smi") is None:
        return {}
    uuid = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
    command = [
        "nvidia-smi",
        "--query-gpu=clocks.sm,temperature.gpu,driver_version",
        "--format=csv,noheader,nounits",
        f"--id=GPU-{uuid.removeprefix('GPU-')}",
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
        clock, temperature, driver = (word.strip() for word in done.stdout.split(","))
        return {"clock_mhz": int(clock), "temperature_c": int(temperature), "driver": driver}
    except (OSError, ValueError, subprocess.SubprocessError):
        return {}


def versions() -> dict[str, str]:
    """Versions that a measurement depends on, for result rows."""
    found = {"torch": torch.__version__, "triton": str(getattr(triton, "__version__", "absent"))}
    if KIND == "cuda" and not _COMPILE_ARCH:
        found["cuda"] = str(torch.version.cuda)
    return found


def resources_of(compiled: list[Any]) -> dict[str, int]:
    """Registers, spills and shared memory of the programs of one call, the largest of each.

    Loads them onto the device, which is where a program that needs too much is refused. Empty where
    there is nothing to load (the interpreter).
    """
    found: dict[str, int] = {}
    for program in compiled:
        if not hasattr(program, "metadata") or not hasattr(program, "_init_handles"):
            continue
        program._init_handles()
        facts = {
            "registers": getattr(program, "n_regs", None),
            "spills": getattr(program, "n_spills", None),
            "shared_bytes": getattr(program.metadata, "shared", None),
        }
        for name, value in facts.items():
            if type(value) is int:
                found[name] = max(found.get(name, 0), value)
    return found


def bind(kernel: Kernel, grid: tuple[int, ...], **kwargs: Any) -> Callable[..., None]:
    """``kernel[grid](..., **kwargs)`` with the grid and the keywords filled in, to be kept.

    What is called later are tensors, then plain numbers, the same numbers each time but for floats;
    the kernel's constants (``tl.constexpr``) stand behind them in its signature. Tensors may differ
    from call to call, but not in dtype or device.
    """
    first = functools.partial(kernel.run, grid=grid, warmup=False, **kwargs)
    if KIND == "cpu":
        return functools.partial(_one_at_a_time, first)
    if KIND != "cuda" or _COMPILE_ARCH:
        return first
    return relaunching(kernel, grid, kwargs, first)


# Triton's interpreter keeps the running program's number, and patches triton.language, globally.
_interpreter = threading.RLock()


def _one_at_a_time(launch: Callable[..., Any], *args: Any) -> None:
    with _interpreter:
        launch(*args)


def relaunching(
    kernel: Kernel, grid: tuple[int, ...], kwargs: dict[str, Any], first: Callable[..., Any]
) -> Callable[..., None]:
    """``first``, and from its second call on the compiled kernel that it returned.

    A launch through ``JITFunction.run`` derives anew, argument by argument, which of the compiled
    variants to start, and that is most of its cost (measured: CONTRIBUTING, "Measured facts"). The
    variant depends on types, on integers that are 1 or divide by 16, and on pointers that divide by
    16. All but the last are fixed here; a call with another alignment takes the long way.
    """
    again: Callable[..., None] | None = None

    def launch(*args: Any) -> None:
        nonlocal again
        for tensor in args:
            if not isinstance(tensor, torch.Tensor):
                break
            if tensor.data_ptr() % 16:
                first(*args)
                return
        if again is not None:
            again(*args)
            return
        compiled = first(*args)
        if compiled is None or hasattr(compiled, "result"):  # nothing ran, or still compiling
            return
        constants = [kwargs[name] for name in kernel.arg_names[len(args) :]]
        start = compiled[(*grid, 1, 1)[:3]]
        again = (lambda *args: start(*args, *constants)) if constants else start

    return launch


def rounding_each_step() -> dict[str, Any]:
    """Keywords of a launch whose products are rounded before something is added to them.

    Merged into one instruction, which rounds once, x * y - max(x * y) is not 0 at its largest: for
    huge x it is a huge number of either sign, and its exponential infinite or 0 instead of 1.
    """
    return {"enable_fp_fusion": False} if current().registers else {}


def bind_described(
    kernel: Kernel,
    grid: tuple[int, ...],
    describe: tuple[Callable[[torch.Tensor], Any], ...],
    **kwargs: Any,
) -> Callable[..., None]:
    """``bind`` for a kernel that reads its first arguments through tensor maps (Hopper's TMA).

    ``describe[i](tensor)`` is Triton's description of argument i, whose address must divide by 16.
    Of the tensors behind those, each choice of which do not is a variant of its own.
    """
    count = len(describe)

    def first(*args: Any) -> Any:
        return kernel.run(*_described(describe, args), grid=grid, warmup=False, **kwargs)

    if KIND != "cuda" or _COMPILE_ARCH:
        return first
    again: dict[tuple[bool, ...], Callable[..., None]] = {}
    last: int | None = None  # where plain numbers begin

    def launch(*args: Any) -> None:
        nonlocal last
        if last is None:
            tensors = itertools.takewhile(lambda t: isinstance(t, torch.Tensor), args)
            last = sum(1 for _ in tensors)
        every = 0
        for tensor in args[count:last]:
            every |= tensor.data_ptr()
        odd = tuple(t.data_ptr() % 16 > 0 for t in args[count:last]) if every % 16 else ()
        start = again.get(odd)
        if start is not None:
            start(*args)
            return
        compiled = first(*args)
        if compiled is not None and not hasattr(compiled, "result"):  # it ran, see relaunching
            constants = tuple(kwargs[name] for name in kernel.arg_names[len(args) :])
            again[odd] = _described_start(compiled, (*grid, 1, 1)[:3], describe, constants)

    return launch


def _described(
    describe: tuple[Callable[[torch.Tensor], Any], ...], args: tuple[Any, ...]
) -> list[Any]:
    return [make(t) for make, t in zip(describe, args, strict=False)] + list(args[len(describe) :])


_MAPS_LIMIT = 1024  # tensor maps remembered an argument: addresses of activations vary


def _described_start(
    compiled: Any,
    grid: tuple[int, ...],
    describe: tuple[Callable[[torch.Tensor], Any], ...],
    constants: tuple[Any, ...],
) -> Callable[..., None]:
    """What starts ``compiled``, with tensor maps that are kept by address.

    A tensor map is an address and a layout, and the layout is fixed here. Triton encodes all of
    them anew at each launch, in a wrapper of its launcher, which is most of what a launch costs
    (measured: CONTRIBUTING). This goes below the wrapper, as triton 3.6 has it, and through it
    where triton is built otherwise or a profiler asked to be told of launches.
    """
    through = compiled[grid]
    launcher, hooks, active = compiled.run, triton.knobs.runtime, triton.runtime.driver.active

    def slow(*args: Any) -> None:
        through(*_described(describe, args), *constants)

    wrapper: Any = getattr(launcher, "launch", None)
    inside = inspect.getclosurevars(wrapper).nonlocals if inspect.isfunction(wrapper) else {}
    if set(inside) != {"launcher", "tensordesc_indices", "tensordesc_meta"} or (
        launcher.global_scratch_size or launcher.profile_scratch_size
    ):
        return slow
    below, layouts, count = inside["launcher"], inside["tensordesc_meta"], len(describe)
    encode = wrapper.__globals__["make_tensordesc_arg"]
    function, packed = compiled.function, compiled.packed_metadata
    cooperative, dependent = launcher.launch_cooperative_grid, launcher.launch_pdl
    index, stream_of = active.get_current_device(), active.get_current_stream
    maps: list[dict[int, list[Any]]] = [{} for _ in describe]

    def start(*args: Any) -> None:
        if hooks.launch_enter_hook.calls or hooks.launch_exit_hook.calls:
            slow(*args)
            return
        flat: list[Any] = []
        for i in range(count):
            address = args[i].data_ptr()
            encoded = maps[i].get(address)
            if encoded is None:
                if len(maps[i]) >= _MAPS_LIMIT:
                    maps[i].clear()
                encoded = maps[i][address] = encode(describe[i](args[i]), layouts[i])
            flat += encoded
        # fmt: off
        below(*grid, stream_of(index), function, cooperative, dependent, None, None, packed,
              None, None, None, *flat, *args[count:], *constants)
        # fmt: on

    return start


def cdiv(a: int, b: int) -> int:
    """Ceiling division on the host (triton.cdiv without needing triton)."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """Smallest power of two >= n (n >= 1)."""
    return 1 << (n - 1).bit_length()
