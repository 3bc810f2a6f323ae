"""What a kernel is, in one record: tests, bench and tuner find and use it without knowing it.

A kernel file ends with ``SPEC = register(KernelSpec(...))``. Its public function is decorated with
``@op``; registering the spec also makes the function a ``torch.library`` operator
(``torch.ops.tkernels.<name>``), to which ``@op`` goes while ``torch.compile`` traces. Eager calls
never pass through the dispatcher.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import pkgutil
import typing
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar, cast

import torch

from tkernels.check import describe
from tkernels.device import Device

Config = dict[str, Any]  # constexprs, num_warps/num_stages (GPU) or Ascend knobs, programs_per_core
Problem = Mapping[str, Any]  # host-known facts of one call: sizes, dtypes, flags

_P = ParamSpec("_P")
_R = TypeVar("_R")


@dataclasses.dataclass(frozen=True)
class Case:
    """A named problem. Tags: ``smoke`` and ``edge`` are tested, ``bench`` is timed and tuned."""

    name: str
    problem: Problem
    tags: frozenset[str] = frozenset({"smoke"})

    def __post_init__(self) -> None:
        unknown = self.tags - {"smoke", "edge", "bench"}
        if unknown or not self.tags:
            raise ValueError(
                f"Case {self.name}: tags must be of smoke, edge, bench, got {self.tags}"
            )


@dataclasses.dataclass(frozen=True)
class Cost:
    """The least work that the problem needs: floating-point operations, and bytes moved."""

    flops: int
    bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelSpec:
    """One kernel, described once. Fields with a default are rarely needed."""

    name: str
    launch: Callable[..., Any]  # the public function
    reference: Callable[..., Any]  # same signature, plain PyTorch
    problem_fields: tuple[str, ...]  # names, in order, of the values that launch gives to resolve()
    make_inputs: Callable[[Problem, torch.device], dict[str, Any]]  # seeded keyword arguments
    cases: tuple[Case, ...]
    tuning_key: Callable[[Problem], dict[str, Any]]  # the few bucketed values a config depends on
    space: Callable[[Device], dict[str, list[Any]]]  # config key -> allowed values
    default_config: Callable[[Problem, Device], Config]  # always legal
    why_illegal: Callable[[Config, Problem, Device], str | None]  # None, or the reason in words
    cost: Callable[[Problem], Cost]
    outputs: tuple[str, ...] = ()  # out= arguments, in the order of the returned tensors
    mutates: tuple[str, ...] = ()  # arguments that are written in place
    providers: Callable[[dict[str, Any]], dict[str, Callable[[], Any]]] | None = (
        None  # peers, for bench
    )
    tolerance: float = 1.0  # factor on testing.TOLERANCE, with the reason beside it
    scalar_loop_reason: str = (
        ""  # why an element-by-element loop on Ascend is accepted; "" = it is not
    )


_SPECS: dict[str, KernelSpec] = {}


def register(spec: KernelSpec) -> KernelSpec:
    """Add ``spec`` to the registry and define its torch operator; returns it unchanged."""
    if spec.name in _SPECS:
        raise ValueError(f"register: kernel name {spec.name!r} must be new, got it twice")
    given = spec.launch.__name__
    if given != spec.name:
        raise ValueError(
            f"register: the public function must be named {spec.name!r}, got {given!r}"
        )
    names = [case.name for case in spec.cases]
    if len(set(names)) != len(names):
        raise ValueError(f"register: case names of {spec.name} must be unique, got {names}")
    _SPECS[spec.name] = spec
    _define_torch_op(spec)
    return spec


def get(name: str) -> KernelSpec:
    """The spec called ``name``; loads its file if that has not happened yet."""
    specs = all_kernels() if name not in _SPECS else _SPECS
    if name not in specs:
        raise ValueError(
            f"tkernels: kernel must be one of {', '.join(sorted(specs))}, got {name!r}"
        )
    return specs[name]


def all_kernels() -> dict[str, KernelSpec]:
    """Every kernel in ``tkernels/ops``, by name. For tools: it imports all kernel files."""
    import tkernels.ops

    for module in pkgutil.iter_modules(tkernels.ops.__path__):
        importlib.import_module(f"tkernels.ops.{module.name}")
    return dict(sorted(_SPECS.items()))


# ---- torch.library ---------------------------------------------------------------------------

_SCHEMA_TYPES: dict[Any, str] = {
    torch.Tensor: "Tensor",
    torch.Tensor | None: "Tensor?",
    float: "float",
    float | None: "float?",
    int: "int",
    int | None: "int?",
    bool: "bool",
    torch.dtype: "ScalarType",
    torch.Tensor | float: "Tensor",
}


def _operator_parameters(spec: KernelSpec) -> dict[str, inspect.Parameter]:
    """Parameters of the torch operator: the public ones less ``config`` and the out arguments."""
    hidden = {"config", *spec.outputs}
    signature = inspect.signature(spec.launch)
    return {n: p for n, p in signature.parameters.items() if n not in hidden}


def _schema(spec: KernelSpec) -> str:
    """Schema text such as ``(Tensor x, Tensor weight, *, float eps=1e-06) -> Tensor``."""
    hints = typing.get_type_hints(spec.launch)
    parts: list[str] = []
    for name, p in _operator_parameters(spec).items():
        if p.kind is p.KEYWORD_ONLY and "*" not in parts:
            parts.append("*")
        kind = _SCHEMA_TYPES[hints[name]]
        if name in spec.mutates:
            kind = kind.replace("Tensor", f"Tensor(a{len(parts)}!)")
        parts.append(f"{kind} {name}" + ("" if p.default is p.empty else f"={p.default}"))
    results = hints["return"]
    if results is type(None):
        returned = "()"
    elif results is torch.Tensor:
        returned = "Tensor"
    else:
        returned = "(" + ", ".join("Tensor" for _ in typing.get_args(results)) + ")"
    return f"({', '.join(parts)}) -> {returned}"


def _define_torch_op(spec: KernelSpec) -> None:
    # The reference runs on fake tensors too, so it doubles as the shape function. It must not
    # write to its arguments there: an op that mutates returns nothing, and its fake does nothing.
    def fake(*args: Any, **kwargs: Any) -> Any:
        if spec.mutates:
            return None
        results = spec.reference(*args, **kwargs)
        # A launcher's results are contiguous; the reference's may keep the order of its argument.
        if isinstance(results, torch.Tensor):
            return torch.empty_like(results, memory_format=torch.contiguous_format)
        return tuple(torch.empty_like(r, memory_format=torch.contiguous_format) for r in results)

    eager = inspect.unwrap(spec.launch)  # below @op: the operator must not call itself
    torch.library.custom_op(
        f"tkernels::{spec.name}", eager, mutates_args=spec.mutates, schema=_schema(spec)
    ).register_fake(fake)


def op(fn: Callable[_P, _R]) -> Callable[_P, _R]:
    """Make a launcher public: under ``torch.compile`` it becomes its torch operator.

    The function in between is written out with the launcher's own parameters: passing ``*args,
    **kwargs`` through costs a launch a third of a microsecond.
    """
    parameters = inspect.signature(fn).parameters.values()
    first_keyword = next((p.name for p in parameters if p.kind is p.KEYWORD_ONLY), "")
    taken = ", ".join(("*, " if p.name == first_keyword else "") + p.name for p in parameters)
    passed = ", ".join(f"{p.name}={p.name}" for p in parameters)
    positional = ", ".join(
        f"{p.name}={p.name}" if p.kind is p.KEYWORD_ONLY else p.name for p in parameters
    )
    source = f"lambda {taken}: traced(name, dict({passed})) if compiling() else fn({positional})"
    names = {
        "name": fn.__name__,
        "fn": fn,
        "traced": _traced,
        "compiling": torch.compiler.is_compiling,
    }
    public: Any = functools.wraps(fn)(eval(source, names))
    public.__defaults__ = fn.__defaults__
    public.__kwdefaults__ = fn.__kwdefaults__
    return cast(Callable[_P, _R], public)


def _traced(name: str, given: dict[str, Any]) -> Any:
    """Call the operator; out arguments become copies into them, which the compiler fuses away."""
    if given.pop("config", None) is not None:
        raise ValueError(f"{name}: config must be None inside torch.compile, got one")
    outputs = _SPECS[name].outputs
    wanted = [given.pop(argument, None) for argument in outputs]
    result = getattr(torch.ops.tkernels, name)(**given)
    if not any(out is not None for out in wanted):
        return result
    results = (result,) if isinstance(result, torch.Tensor) else tuple(result)
    for argument, out, r in zip(outputs, wanted, results, strict=True):
        # copy_ would broadcast and convert; the launcher, which never sees it, refuses both.
        if out is not None and (out.shape != r.shape or out.dtype != r.dtype):
            raise ValueError(f"{name}: {argument} must be {describe(r)}, got {describe(out)}")
    if isinstance(result, torch.Tensor):
        return wanted[0].copy_(result)
    return tuple(r if out is None else out.copy_(r) for r, out in zip(result, wanted, strict=True))
