"""What a kernel is, in one record: tests, bench and tuner find and use it without knowing it.

A kernel file ends with ``SPEC = register(KernelSpec(...))``. Its public function is decorated with
``@op``; registering the spec also makes the function a ``torch.library`` operator
(``torch.ops.tkernels.<name>``), to which ``@op`` goes while ``torch.compile`` traces. Eager calls
never pass through the dispatcher.

A function hinted ``-> Tensor | tuple[Tensor, Tensor]`` gives its log-sum-exp where ``return_lse``
asks for it. An operator gives the same number of tensors always: (out, lse), with an empty lse
where nobody asked.
"""

from __future__ import annotations

import dataclasses
import difflib
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
    # Counters that a call sets to 0 or counts up. The torch operator has none and makes its own: a
    # compiler, to which they would be mere inputs, might copy them before they are set.
    counters: tuple[str, ...] = ()
    # What is compared, of the arguments after a call, in place of the mutated ones: for states that
    # say the same in more than one way.
    compared: Callable[[Mapping[str, Any]], tuple[torch.Tensor, ...]] | None = None
    contiguous: tuple[str, ...] = ()  # arguments whose rows may not be padded
    # Empty results of a call, where the reference reads values, of which a traced tensor has none,
    # or where it writes to arguments and returns something, too.
    empty_results: Callable[..., Any] | None = None
    public_module: str = ""  # where the function that users call is, if that is not ``launch``
    providers: Callable[[dict[str, Any]], dict[str, Callable[[], Any]]] | None = (
        None  # peers, for bench
    )
    shape: Callable[..., Problem] | None = None  # a problem of named sizes: autotune --shape
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
    _define_torch_op(spec)
    _SPECS[spec.name] = spec
    return spec


def get(name: str) -> KernelSpec:
    """The spec called ``name``; loads its file if that has not happened yet."""
    specs = all_kernels() if name not in _SPECS else _SPECS
    if name not in specs:
        near = difflib.get_close_matches(name, specs, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ValueError(
            f"tkernels: kernel must be one of {', '.join(sorted(specs))}, got {name!r}{hint}"
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
    int: "SymInt",  # a size of a dynamic shape is one; operators get numbers
    int | None: "SymInt?",
    bool: "bool",
    str: "str",
    torch.dtype: "ScalarType",
    torch.Tensor | float: "Tensor",
}
_OUT_OR_PAIR = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


def may_return_lse(spec: KernelSpec) -> bool:
    """Whether an argument ``return_lse`` decides if one tensor comes back or two."""
    parameters = inspect.signature(spec.launch).parameters
    hint = typing.get_type_hints(spec.launch)["return"]
    asks = "return_lse" in parameters and parameters["return_lse"].default is False
    if asks != (hint == _OUT_OR_PAIR):
        raise ValueError(
            f"register: {spec.name} must have an argument return_lse=False if and only if it "
            f"returns {_OUT_OR_PAIR}, got {inspect.signature(spec.launch)}"
        )
    return asks


def _operator_parameters(spec: KernelSpec) -> dict[str, inspect.Parameter]:
    """Parameters of the torch operator: less ``config``, the out arguments and counters."""
    hidden = {"config", *spec.outputs, *spec.counters}
    signature = inspect.signature(spec.launch)
    return {n: p for n, p in signature.parameters.items() if n not in hidden}


def _schema(spec: KernelSpec) -> str:
    """Schema text such as ``(Tensor x, Tensor weight, *, float eps=1e-06) -> Tensor``.

    Up to the last tensor all may be given by position: torch has no keyword-only tensors.
    """
    hints = typing.get_type_hints(spec.launch)
    parts: list[str] = []
    parameters = list(_operator_parameters(spec).values())
    kinds = [_SCHEMA_TYPES[hints[p.name]] for p in parameters]
    last_tensor = max(i for i, kind in enumerate(kinds) if kind.startswith("Tensor"))
    for i, (p, kind) in enumerate(zip(parameters, kinds, strict=True)):
        if p.kind is p.KEYWORD_ONLY and i > last_tensor and "*" not in parts:
            parts.append("*")
        if p.name in spec.mutates:
            kind = kind.replace("Tensor", f"Tensor(a{len(parts)}!)")
        default = f'"{p.default}"' if isinstance(p.default, str) else p.default
        parts.append(f"{kind} {p.name}" + ("" if p.default is p.empty else f"={default}"))
    results = hints["return"]
    if results is type(None):
        returned = "()"
    elif results is torch.Tensor:
        returned = "Tensor"
    elif may_return_lse(spec):
        returned = "(Tensor, Tensor)"
    else:
        returned = "(" + ", ".join("Tensor" for _ in typing.get_args(results)) + ")"
    return f"({', '.join(parts)}) -> {returned}"


def _define_torch_op(spec: KernelSpec) -> None:
    eager = inspect.unwrap(spec.launch)  # below @op: the operator must not call itself
    names = list(_operator_parameters(spec))
    fake = _fake_out_and_lse if may_return_lse(spec) else _fake

    def named(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        return {**dict(zip(names, args, strict=False)), **kwargs}

    def run(*args: Any, **kwargs: Any) -> Any:
        result = eager(**named(args, kwargs))
        if "return_lse" in names and isinstance(result, torch.Tensor):
            return result, result.new_empty((0,), dtype=torch.float32)
        return result

    torch.library.custom_op(
        f"tkernels::{spec.name}", run, mutates_args=spec.mutates, schema=_schema(spec)
    ).register_fake(lambda *args, **kwargs: fake(spec, named(args, kwargs)))


def _fake(spec: KernelSpec, given: dict[str, Any]) -> Any:
    """Results by metadata: the reference runs on fake tensors too.

    It must not write to its arguments there: an op that mutates returns nothing, or says what.
    """
    if spec.empty_results is not None:
        return spec.empty_results(**given)
    if spec.mutates:
        return None
    results = spec.reference(**given)
    # A launcher's results are contiguous; the reference's may keep the order of its argument.
    if isinstance(results, torch.Tensor):
        return torch.empty_like(results, memory_format=torch.contiguous_format)
    return tuple(torch.empty_like(r, memory_format=torch.contiguous_format) for r in results)


def _fake_out_and_lse(spec: KernelSpec, given: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention's results are shaped like its first argument, q [..., num_heads, head_dim].

    Its reference would read lengths, of which a fake tensor has none.
    """
    q = given[next(iter(_operator_parameters(spec)))]
    lse_shape = q.shape[:-1] if given.get("return_lse") else (0,)
    return q.new_empty(q.shape), q.new_empty(lse_shape, dtype=torch.float32)


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
    spec = _SPECS[name]
    wanted = [given.pop(argument, None) for argument in spec.outputs]
    for argument in spec.counters:
        if (counter := given.pop(argument)) is not None:
            counter.zero_()
    result = getattr(torch.ops.tkernels, name)(**given)
    if result is None:
        return None
    results = [result] if isinstance(result, torch.Tensor) else list(result)
    for i, (argument, out) in enumerate(zip(spec.outputs, wanted, strict=True)):
        if out is None:
            continue
        r = results[i]
        # copy_ would broadcast and convert; the launcher, which never sees it, refuses both.
        if out.shape != r.shape or out.dtype != r.dtype:
            raise ValueError(f"{name}: {argument} must be {describe(r)}, got {describe(out)}")
        results[i] = out.copy_(r)
    if not given.get("return_lse", True):
        del results[1:]  # the operator's empty lse
    return results[0] if len(results) == 1 else tuple(results)
