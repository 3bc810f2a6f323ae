"""Record what a launcher would launch, and derive from it what the compiler would be told.

With ``TKERNELS_DEVICE=compile:<arch>`` nothing here needs the chip: a launcher runs to its end on
CPU tensors and leaves a list of launches, which can be compiled and inspected. Needs triton.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import inspect
import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Hashable, Iterator
from pathlib import Path
from typing import Any

import torch

from tkernels import config, device

# Keywords that ``fn[grid](...)`` adds by itself.
_OWN_KEYWORDS = {"grid", "warmup"}

_POINTER_NAMES = {
    torch.bool: "i1",
    torch.uint8: "u8",
    torch.int8: "i8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.float64: "fp64",
}


@dataclasses.dataclass(frozen=True)
class Launch:
    """One ``fn[grid](...)``: every parameter by name in order, and the keywords that are left."""

    fn: Any  # the jit function
    grid: tuple[int, int, int]
    args: dict[str, Any]
    options: dict[str, Any]  # num_warps, num_stages, Ascend knobs


@dataclasses.dataclass(frozen=True)
class Variant:
    """What makes two launches the same program: kernel, argument types, constants, options."""

    fn: Any  # the jit function
    signature: tuple[tuple[str, str], ...]  # run-time parameters in order, e.g. ("x_ptr", "*bf16")
    constants: tuple[tuple[str, Hashable], ...]
    options: tuple[tuple[str, Hashable], ...]


@contextlib.contextmanager
def replaced_run(run: Callable[..., Any]) -> Iterator[Any]:
    """Every launch inside the block calls ``run(kernel, *args, grid=, warmup=, **kwargs)`` instead.

    Gives the original method. Plans hold launches that are already bound, so none may outlive the
    change in either direction.
    """
    cls = _kernel_class()
    original = cls.run
    config.reload()
    cls.run = run
    try:
        yield original
    finally:
        cls.run = original
        config.reload()


def _kernel_class() -> Any:
    """The class whose ``run`` every launch goes through."""
    device.require_triton()
    if device.current().arch == "interpret":
        return importlib.import_module("triton.runtime.interpreter").InterpretedFunction
    return importlib.import_module("triton.runtime.jit").JITFunction


@contextlib.contextmanager
def record_launches(execute: Callable[[Launch], None] | None = None) -> Iterator[list[Launch]]:
    """Catch every launch inside the block instead of launching it; ``execute`` may stand in.

    ``execute`` runs at the moment of the launch, so that a launcher which starts several kernels,
    or uses torch operations between them, sees the values it would see on the device.
    """
    launches: list[Launch] = []

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        launch = _bind(self, args, grid, kwargs)
        launches.append(launch)
        if execute is not None:
            execute(launch)

    with replaced_run(run):
        yield launches


def _bind(fn: Any, args: tuple[Any, ...], grid: Any, kwargs: dict[str, Any]) -> Launch:
    """Give each value its parameter's name, and work out the grid."""
    parameters = set(fn.arg_names)
    bound = inspect.signature(fn.fn).bind(
        *args, **{k: v for k, v in kwargs.items() if k in parameters}
    )
    bound.apply_defaults()
    values = dict(bound.arguments)
    x, y, z = (*(grid(values) if callable(grid) else grid), 1, 1)[:3]
    options = {k: v for k, v in kwargs.items() if k not in parameters | _OWN_KEYWORDS}
    return Launch(fn, (x, y, z), values, options)


def variant_of(launch: Launch) -> Variant:
    """The program that this launch needs, by the rules of triton's own launch path.

    ``tl.constexpr`` parameters, ``None`` and integers equal to 1 are compiled in as constants.
    Triton also passes on which pointers and integers divide by 16. That is left out: the Ascend
    lowering copies it to an attribute that neither it nor bishengir-compile 1.2.0 makes use of
    (the final IR is the same with and without), and it would only multiply the variants.
    """
    signature: list[tuple[str, str]] = []
    constants: list[tuple[str, Hashable]] = []
    for parameter in launch.fn.params:
        value = launch.args[parameter.name]
        folded = type(value) is int and value == 1 and not parameter.do_not_specialize
        if parameter.is_constexpr or value is None or folded:
            constants.append((parameter.name, value))
        else:
            signature.append((parameter.name, type_name(value)))
    return Variant(
        launch.fn, tuple(signature), tuple(constants), tuple(sorted(launch.options.items()))
    )


def type_name(value: Any) -> str:
    """Triton's name of a run-time argument's type: ``*bf16`` for a tensor, ``i32``, ``fp32``..."""
    if isinstance(value, torch.Tensor):
        return "*" + _POINTER_NAMES[value.dtype]
    if isinstance(value, bool):
        return "i1"
    if isinstance(value, int):
        if -(2**31) <= value < 2**31:
            return "i32"
        return "u64" if value >= 2**63 else "i64"
    if isinstance(value, float):
        return "fp32"
    if hasattr(value, "block_shape"):  # a description of a tensor, to be read by TMA
        dtype = _POINTER_NAMES[value.base.dtype]
        layout = f",{value.layout!r}" if hasattr(value, "layout") else ""  # Gluon's say theirs
        return f"tensordesc<{dtype}{value.block_shape}{layout}>"
    raise TypeError(
        f"expected a tensor, its descriptor, bool, int or float as kernel argument, got {value!r}"
    )


@dataclasses.dataclass(frozen=True)
class Resources:
    """What ptxas says of a compiled kernel: a thread's registers, spilled and shared bytes."""

    registers: int
    spill_bytes: int
    shared_bytes: int


def compile_cuda(launch: Launch, capability: int) -> Resources:
    """Compile ``launch`` for an NVIDIA chip, with no GPU present, by triton's own ptxas."""
    compiled = compiled_cuda(launch, capability)
    chip = f"sm_{capability}a" if capability >= 90 else f"sm_{capability}"
    log = _ptxas_log(compiled.asm["ptx"], chip)
    return Resources(
        registers=_number(r"Used (\d+) registers", log),
        spill_bytes=_number(r"(\d+) bytes spill stores", log),
        shared_bytes=int(compiled.metadata.shared),
    )


def compiled_cuda(launch: Launch, capability: int) -> Any:
    """What ``triton.compile`` makes of ``launch`` for an NVIDIA chip, with no GPU present.

    Pointers and integers that divide by 16 are declared so, as a launch does: without that loads
    are not vectorised, and the program is another one.
    """
    compiler = importlib.import_module("triton.backends.compiler")
    source = importlib.import_module("triton.compiler").ASTSource
    if launch.fn.is_gluon():
        source = importlib.import_module("triton.experimental.gluon._runtime").GluonASTSource
    signature, constants, attributes = arguments_of(launch)
    return device.triton.compile(
        source(fn=launch.fn, signature=signature, constexprs=constants, attrs=attributes),
        target=compiler.GPUTarget(device.sm_facts(capability).type, capability, 32),
        options=dict(launch.options),
    )


def arguments_of(
    launch: Launch,
) -> tuple[dict[str, str], dict[tuple[int], Any], dict[tuple[int], list[list[Any]]]]:
    """(types by name, constants and attributes by place) as triton's launch path on CUDA has them.

    Two launches of one kernel with the same options and these are one program.
    """
    signature: dict[str, str] = {}
    constants: dict[tuple[int], Any] = {}
    attributes: dict[tuple[int], list[list[Any]]] = {}
    for i, parameter in enumerate(launch.fn.params):
        value = launch.args[parameter.name]
        special = type(value) is int and not parameter.do_not_specialize
        if parameter.is_constexpr or value is None or (special and value == 1):
            signature[parameter.name] = "constexpr"
            constants[(i,)] = value
            continue
        signature[parameter.name] = type_name(value)
        if isinstance(value, torch.Tensor) or (special and value % 16 == 0):
            attributes[(i,)] = [["tt.divisibility", 16]]
    return signature, constants, attributes


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    if found is None:
        raise RuntimeError(f"ptxas: expected {pattern!r} in its report, got {text[-300:]!r}")
    return int(found.group(1))


def _ptxas_log(ptx: str, chip: str) -> str:
    # Triton ships two assemblers; the older one refuses newer PTX.
    nvidia = importlib.import_module("triton").knobs.nvidia
    log = ""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ptx"
        path.write_text(ptx)
        for tool in (nvidia.ptxas, nvidia.ptxas_blackwell):
            command = [tool.path, "-v", f"--gpu-name={chip}", str(path), "-o", os.devnull]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            log += done.stderr
            if done.returncode == 0:
                return done.stderr
    raise RuntimeError(f"ptxas: expected to accept the kernel for {chip}, got: {log[-500:]}")
