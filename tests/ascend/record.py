"""Record what a launcher would launch, and derive from it what the compiler would be told.

Nothing here depends on a chip: with ``JITFunction.run`` replaced, a launcher runs to its end on
CPU tensors and leaves a list of launches.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Callable, Hashable, Iterator
from typing import Any
from unittest import mock

import torch
from triton.runtime.jit import JITFunction

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

    fn: JITFunction
    grid: tuple[int, int, int]
    args: dict[str, Any]
    options: dict[str, Any]  # num_warps, num_stages, Ascend knobs


@dataclasses.dataclass(frozen=True)
class Variant:
    """What makes two launches the same program: kernel, argument types, constants, options."""

    fn: JITFunction
    signature: tuple[tuple[str, str], ...]  # run-time parameters in order, e.g. ("x_ptr", "*bf16")
    constants: tuple[tuple[str, Hashable], ...]
    options: tuple[tuple[str, Hashable], ...]


@contextlib.contextmanager
def record_launches(execute: Callable[[Launch], None] | None = None) -> Iterator[list[Launch]]:
    """Catch every launch inside the block instead of launching it; ``execute`` may stand in.

    ``execute`` runs at the moment of the launch, so that a launcher which starts several kernels,
    or uses torch operations between them, sees the values it would see on the device.
    """
    launches: list[Launch] = []

    def run(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        launch = _bind(self, args, grid, kwargs)
        launches.append(launch)
        if execute is not None:
            execute(launch)

    with mock.patch.object(JITFunction, "run", run):
        yield launches


def _bind(fn: JITFunction, args: tuple[Any, ...], grid: Any, kwargs: dict[str, Any]) -> Launch:
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
    raise TypeError(f"expected a tensor, bool, int or float as kernel argument, got {value!r}")
