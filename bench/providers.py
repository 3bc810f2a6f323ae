"""Who is timed, on what: sets of inputs, and for each provider one call on each set.

Enough sets take turns that together they exceed twice the L2 cache, so each call finds its data in
memory, as a layer of a model does; with ``hot`` one set is used over and over. Ours writes into
preallocated outputs. A peer that allocates its result keeps it until its next turn: otherwise the
allocator would hand every call of a captured graph the same block, which then never leaves the
cache.
"""

from __future__ import annotations

import dis
import functools
import importlib
import math
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from bench.rows import DEFAULT, OURS
from tkernels import device, testing
from tkernels.registry import Case, Config, KernelSpec

Inputs = dict[str, Any]
Outs = dict[str, torch.Tensor]
Call = Callable[[], Any]
Calls = dict[str, list[Call]]

BUILT_IN = (OURS, DEFAULT, "reference", "compile")

_COMPARED = 1 << 22  # elements of an output that are compared before timing


# ---- inputs ----------------------------------------------------------------------------------


def input_sets(spec: KernelSpec, case: Case, hot: bool) -> tuple[list[Inputs], list[Outs], str]:
    """Input sets, the preallocated outputs of each, and the cache they leave: cold, warm or hot."""
    inputs = spec.make_inputs(case.problem, device.tensor_device())
    results = testing.tensors_of(spec.reference(**testing.clone_inputs(inputs)))
    sets, cache = testing.rotating_sets(spec, case.problem, inputs, results, hot=hot)
    shapes = dict(zip(spec.outputs, results, strict=False))
    outs = [
        {n: torch.empty_like(t, memory_format=torch.contiguous_format) for n, t in shapes.items()}
        for _ in sets
    ]
    return sets, outs, cache


# ---- calls ------------------------------------------------------------------------------------


def provider_calls(
    spec: KernelSpec,
    sets: Sequence[Inputs],
    outs: Sequence[Outs],
    wanted: Sequence[str] | None,
    default: Config | None = None,
) -> tuple[Calls, dict[str, str]]:
    """Calls of each wanted provider, one a set; and the reason for each that is wrong or fails.

    ``default`` is the heuristic's config where a tuned one serves; ours is then timed with it, too.
    """
    calls: Calls = {}
    wrong: dict[str, str] = {}
    truth = testing.truth_of(spec, sets[0])
    for name in BUILT_IN:
        if wanted is not None and name not in wanted:
            continue
        if name == "compile" and device.tensor_device().type == "cpu":
            continue
        if name == DEFAULT and default is None:
            continue
        fn = _built_in(spec, name, default)
        buffers = outs if name in (OURS, DEFAULT) else [{}] * len(sets)
        why = _why_wrong(spec, fn, sets[0], buffers[0], truth)
        if why is not None:
            wrong[name] = why
            continue
        calls[name] = [
            _keeping(functools.partial(fn, **inputs, **out))
            for inputs, out in zip(sets, buffers, strict=True)
        ]
    if spec.providers is None:
        return calls, wrong
    peers = [spec.providers(inputs) for inputs in sets]
    for name, first in peers[0].items():
        if wanted is not None and name not in wanted:
            continue
        why = _failure(first)
        if why is not None:
            wrong[name] = why
            continue
        calls[name] = [_keeping(p[name]) for p in peers]
    return calls, wrong


def _built_in(spec: KernelSpec, name: str, default: Config | None) -> Callable[..., Any]:
    if name == OURS:
        return spec.launch
    if name == DEFAULT:
        return functools.partial(spec.launch, config=default)
    if name == "reference":
        return spec.reference
    torch._dynamo.reset()  # past eight shapes it would fall back to eager without a word
    return torch.compile(spec.reference, fullgraph=True, dynamic=False)


def _keeping(fn: Call) -> Call:
    """``fn`` whose latest result stays alive, so that the next call cannot reuse its memory."""
    kept: Any = None

    def call() -> None:
        nonlocal kept
        kept = fn()

    return call


def _failure(fn: Call) -> str | None:
    """Why ``fn`` fails when called, or None. A peer may raise anything; it is reported."""
    try:
        fn()
        device.synchronize()
    except device.UnsupportedError as error:
        return f"does not exist here: {error}"
    except Exception as error:
        return f"failed: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    return None


def _why_wrong(
    spec: KernelSpec,
    fn: Callable[..., Any],
    inputs: Inputs,
    outs: Mapping[str, torch.Tensor],
    truth: Sequence[torch.Tensor],
) -> str | None:
    """Why ``fn`` on a copy of ``inputs`` fails or differs from ``truth``, or None."""
    own = testing.clone_inputs(inputs)
    results: Any = None

    def run() -> None:
        nonlocal results
        results = fn(**own, **outs)

    failure = _failure(run)
    if failure is not None:
        return failure
    got = (*testing.tensors_of(results), *testing.written_by(spec, own))
    try:
        names = testing.result_names(spec, inputs)
        for name, actual, expected in zip(names, got, truth, strict=True):
            for a, t in _samples(actual, expected):
                testing.assert_close(a, t, what=name, factor=spec.tolerance)
    except AssertionError as error:
        return f"is wrong: {error}"
    return None


def _samples(
    actual: torch.Tensor, expected: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The pair itself, or some rows of a large one: comparing all takes longer than timing.

    A step without a common factor with the number of heads visits each in turn. The full comparison
    of these cases is a test (``test_bench_case_is_right``).
    """
    if actual.shape != expected.shape or actual.numel() <= _COMPARED:
        yield actual, expected
        return
    step, width = math.ceil(actual.numel() / _COMPARED), actual.shape[-1]
    while actual.dim() > 1 and math.gcd(step, actual.shape[-2]) > 1:
        step += 1
    yield actual.reshape(-1, width)[::step], expected.reshape(-1, width)[::step]


# ---- peers that are not here ------------------------------------------------------------------


def missing_peers(spec: KernelSpec) -> dict[str, str]:
    """Top-level packages that the spec's peers import and that fail here, with the reason."""
    failed: dict[str, str] = {}
    for name in sorted(_imports(spec.providers)) if spec.providers else ():
        try:
            importlib.import_module(name)
        except ImportError as error:
            failed.setdefault(name.split(".")[0], str(error))
    return failed


def _imports(fn: Callable[..., Any]) -> set[str]:
    """Modules imported in the body of ``fn``, of functions inside it and of ours that it calls."""
    found: set[str] = set()
    seen: set[types.CodeType] = set()
    queue = [(fn.__code__, fn.__globals__)] if isinstance(fn, types.FunctionType) else []
    while queue:
        code, names = queue.pop()
        if code in seen:
            continue
        seen.add(code)
        found |= {str(i.argval) for i in dis.get_instructions(code) if i.opname == "IMPORT_NAME"}
        queue += [(c, names) for c in code.co_consts if isinstance(c, types.CodeType)]
        for name in code.co_names:
            called = names.get(name)
            if isinstance(called, types.FunctionType) and called.__module__.startswith("tkernels"):
                queue.append((called.__code__, called.__globals__))
    return found
