"""Shared by tests, bench and tuner: how close is right, guarded buffers, and the one timer."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from tkernels import device, kv_format
from tkernels.registry import KernelSpec, Problem

# (largest relative error of an element, relative error of the whole), by output dtype. An element
# is measured against the larger of its own size and the tensor's root mean square, so that values
# near zero do not dominate. A bf16 value may be two roundings (2 * 2^-8) away from the exact one.
TOLERANCE = {
    torch.float64: (1e-6, 1e-7),
    torch.float32: (1e-5, 2e-6),
    torch.float16: (2e-3, 6e-4),
    torch.bfloat16: (1.6e-2, 5e-3),
}


def assert_close(
    actual: torch.Tensor, truth: torch.Tensor, *, what: str, factor: float = 1.0
) -> None:
    """``actual`` equals ``truth`` within the tolerance of ``actual``'s dtype, times ``factor``.

    ``truth`` is computed in higher precision. The error of an element is judged against its own
    size, or the root mean square of its row (along the last dimension) or of all, if that is more.
    Integers and bools must be equal; NaN and infinities must stand in the same places. Raises
    AssertionError with both errors and the worst element.
    """
    if actual.shape != truth.shape:
        raise AssertionError(f"{what}: shape {list(actual.shape)}, expected {list(truth.shape)}")
    if actual.numel() == 0:
        return
    if not actual.dtype.is_floating_point:
        wrong = int((actual != truth.to(actual.device)).sum())
        if wrong:
            raise AssertionError(f"{what}: {wrong} of {actual.numel()} integers differ")
        return
    count, truth_squares, error_squares, misplaced = 0, 0.0, 0.0, 0
    for a, t in _pieces(actual, truth):
        finite = t.isfinite()
        special = (
            (a.isnan() != t.isnan()) | ((a != t) & ~finite & ~t.isnan()) | (a.isinf() & finite)
        )
        misplaced += int(special.sum())
        count += int(finite.sum())
        truth_squares += float(t[finite].pow(2).sum())
        error_squares += float((a - t)[finite].pow(2).sum())
    if misplaced:
        raise AssertionError(f"{what}: NaN or infinity in the wrong places ({misplaced} elements)")
    if count == 0:
        return
    rms = max(math.sqrt(truth_squares / count), 1e-30)
    overall = math.sqrt(error_squares / count) / rms
    worst, got, expected = 0.0, 0.0, 0.0
    for a, t in _pieces(actual, truth):
        row_rms = torch.where(t.isfinite(), t, 0.0).pow(2).mean(1, keepdim=True).sqrt()
        # Zero divided by zero where both are the same infinity or NaN.
        errors = ((a - t).abs() / t.abs().maximum(row_rms).clamp_min(rms)).nan_to_num(0.0).flatten()
        i = int(errors.argmax())
        if float(errors[i]) > worst:
            worst, got, expected = float(errors[i]), float(a.flatten()[i]), float(t.flatten()[i])
    most, most_overall = (limit * factor for limit in TOLERANCE[actual.dtype])
    if worst > most or overall > most_overall:
        raise AssertionError(
            f"{what}: largest relative error {worst:.2e} (limit {most:.1e}), overall {overall:.2e} "
            f"(limit {most_overall:.1e}); worst element: got {got:.6g}, expected {expected:.6g}"
        )


_PIECE = 2**22  # elements compared at a time: float64 copies of a large result would fill a device


def _pieces(
    actual: torch.Tensor, truth: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Some rows of both as float64; what overflows the dtype of ``actual`` is infinite in truth."""
    most = torch.finfo(actual.dtype).max
    width = actual.shape[-1] if actual.dim() and actual.shape[-1] <= _PIECE else 1
    a, t = actual.detach().reshape(-1, width), truth.detach().reshape(-1, width)
    rows = _PIECE // width
    for start in range(0, len(a), rows):
        exact_a, exact_t = _exact(a[start : start + rows]), _exact(t[start : start + rows])
        exact_t = exact_t.to(exact_a.device)
        yield exact_a, torch.where(exact_t.abs() > most, exact_t.sign() * math.inf, exact_t)


def _exact(tensor: torch.Tensor) -> torch.Tensor:
    """The values as float64, on the tensor's own device where that has such numbers."""
    return tensor.double() if device.HAS_FLOAT64 else tensor.cpu().double()


@dataclasses.dataclass(frozen=True)
class Guarded:
    """A tensor surrounded by sentinel elements that nobody may write."""

    tensor: torch.Tensor
    buffer: torch.Tensor
    before: torch.Tensor

    def check(self, what: str) -> None:
        """Raise AssertionError if an element outside ``tensor`` changed."""
        now, then = self.buffer.clone(), self.before.clone()
        for copy in (now, then):
            copy.as_strided(
                self.tensor.shape, self.tensor.stride(), self.tensor.storage_offset()
            ).zero_()
        bits = torch.int64 if now.element_size() == 8 else _BITS[now.element_size()]
        changed = int((now.view(bits) != then.view(bits)).sum())
        if changed:
            raise AssertionError(f"{what}: {changed} elements outside the tensor were written")


_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32}


def guarded(
    values: torch.Tensor, *, padding: int = 3, band: int = 64, fill: float = math.nan
) -> Guarded:
    """Copy of ``values`` with gaps of ``padding`` columns behind each row and ``band`` elements at
    both ends, all filled with NaN (integers: a large odd number)."""
    shape = list(values.shape)
    row = (shape[-1] if shape else 1) + padding
    count = 2 * band + math.prod(shape[:-1]) * row
    sentinel: float | int = fill if values.dtype.is_floating_point else 111
    buffer = torch.full((count,), sentinel, dtype=values.dtype, device=values.device)
    strides, step = [1], row
    for n in reversed(shape[:-1]):
        strides.insert(0, step)
        step *= n
    tensor = buffer.as_strided(shape, strides[len(strides) - len(shape) :], band)
    tensor.copy_(values)
    return Guarded(tensor, buffer, buffer.clone())


# Arguments that are asked to be contiguous, which the contract tests hold.
_CONTIGUOUS = {"cos_sin_cache", *kv_format.FIELDS}
_CONTIGUOUS |= {"calibration", "reference", "histogram", "moments", "counters"}
_CONTIGUOUS |= {f"{which}_{field}" for which in "kv" for field in kv_format.FIELDS}


def may_be_padded(spec: KernelSpec, name: str, value: Any) -> bool:
    """Whether the argument ``name`` may be a ``guarded`` tensor."""
    contiguous = name in _CONTIGUOUS or name in spec.contiguous
    return isinstance(value, torch.Tensor) and value.dim() >= 2 and not contiguous


@contextlib.contextmanager
def poisoned_memory() -> Iterator[None]:
    """torch.empty and its kin hand out NaN (integers: the largest), so what is unwritten shows."""
    # torch.use_deterministic_algorithms does this, and imports torch's compiler (two seconds).
    before = torch.are_deterministic_algorithms_enabled()
    torch._C._set_deterministic_algorithms(True, warn_only=False)
    try:
        yield
    finally:
        torch._C._set_deterministic_algorithms(before, warn_only=False)


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The values of ``tensor`` as bytes, in which NaN equals itself and -0 is not 0."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def tensors_of(result: Any) -> tuple[torch.Tensor, ...]:
    """What an operation returned, as a tuple."""
    if result is None:
        return ()
    return (result,) if isinstance(result, torch.Tensor) else tuple(result)


def without_nan(t: torch.Tensor) -> torch.Tensor:
    """``t`` with 7 for NaN, which equals nothing; of FP8, with which PyTorch does little, bytes."""
    return t.view(torch.uint8) if t.dtype == torch.float8_e4m3fn else t.nan_to_num(7.0)


def clone_inputs(inputs: Mapping[str, Any], *, precise: bool = False) -> dict[str, Any]:
    """Copies of all tensors; with ``precise``, floating-point ones as float32 (float64 stays)."""

    def copy(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if precise and value.dtype in (torch.float16, torch.bfloat16):
            return value.float()
        return copied(value)

    return {name: copy(value) for name, value in inputs.items()}


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that lies as ``tensor`` does: ``clone`` would move the rows of a view together."""
    if 0 in tensor.stride():
        return tensor.clone()
    strided = torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
    )
    return strided.copy_(tensor)


def written_by(spec: KernelSpec, after: Mapping[str, Any]) -> tuple[torch.Tensor, ...]:
    """What is compared of the arguments that a call mutated, ``after`` it."""
    return spec.compared(after) if spec.compared else tuple(after[n] for n in spec.mutates)


def truth_of(spec: KernelSpec, inputs: Mapping[str, Any]) -> tuple[torch.Tensor, ...]:
    """The reference's results on float32 copies of ``inputs``, then what it wrote to them."""
    precise = clone_inputs(inputs, precise=True)
    results = tensors_of(spec.reference(**precise))
    return (*results, *written_by(spec, precise))


def result_names(spec: KernelSpec, inputs: Mapping[str, Any]) -> tuple[str, ...]:
    """Names for the tensors of ``truth_of``, for messages."""
    lse = ("lse",) if inputs.get("return_lse") else ()
    results = (*(spec.outputs or ("result",) * (not spec.mutates)), *lse)
    if spec.compared is None:
        return (*results, *spec.mutates)
    return (*results, *(f"state[{i}]" for i in range(len(written_by(spec, inputs)))))


def assert_right(spec: KernelSpec, inputs: Mapping[str, Any], got: Sequence[torch.Tensor]) -> None:
    """``got`` (results, then mutated arguments) matches the reference."""
    truth = truth_of(spec, inputs)
    count = len(got) - len(spec.mutates)
    written = written_by(spec, {**inputs, **dict(zip(spec.mutates, got[count:], strict=True))})
    got = (*got[:count], *written)
    assert len(got) == len(truth), (spec.name, len(got), len(truth))
    for name, actual, expected in zip(result_names(spec, inputs), got, truth, strict=True):
        assert_close(actual, expected, what=f"{spec.name}: {name}", factor=spec.tolerance)


# ---- timing ----------------------------------------------------------------------------------

_MEMORY_CAP = 8 << 30  # bytes in rotation, all candidates together; less on a small device
_MAX_SETS = 8192


def rotating_sets(
    spec: KernelSpec,
    problem: Problem,
    first: dict[str, Any],
    results: Sequence[torch.Tensor],
    *,
    hot: bool = False,
    most: int = _MAX_SETS,
) -> tuple[list[dict[str, Any]], str]:
    """``first`` and copies of it that take turns, at most ``most``, and the cache that this leaves.

    A tensor larger than all that a call moves is a table of which few rows are read (cos and sin of
    all positions): the sets share it, as the layers of a model do.
    """
    touched = spec.cost(problem).bytes
    own = {
        name: value
        for name, value in first.items()
        if isinstance(value, torch.Tensor) and (name in spec.mutates or value.nbytes <= touched)
    }
    per_set = sum(t.nbytes for t in (*own.values(), *results))
    count, cache = set_count(touched, per_set, device.l2_bytes(), hot=hot)
    more = min(count, most) - 1
    return [first, *({**first, **clone_inputs(own)} for _ in range(more))], cache


def set_count(touched: int, per_set: int, l2_bytes: int, *, hot: bool) -> tuple[int, str]:
    """How many sets take turns, ``per_set`` bytes of each its own, and what cache this gives.

    Together they are twice the cache, so that each call finds its data in memory, as a layer of a
    model does; ``hot`` is one set, used over and over. It is "warm" where sets cannot be so many,
    or share most of what a call reads (a few experts of many, always the same).
    """
    if hot or l2_bytes == 0:
        return 1, "hot"
    needed = math.ceil(2 * l2_bytes / max(touched, 1))
    # Outputs exist once for each of a handful of candidates: leave room for four times a set.
    room = min(_MEMORY_CAP, device.memory_bytes() // 4 or _MEMORY_CAP)
    affordable = max(1, min(_MAX_SETS, room // max(4 * per_set, 1)))
    count = min(needed, affordable)
    different = touched + (count - 1) * min(per_set, touched)
    return count, "cold" if count == needed and 2 * different >= 3 * l2_bytes else "warm"


@dataclasses.dataclass(frozen=True)
class Timing:
    """Milliseconds of one call: median, 20th and 80th percentile; and how it was measured."""

    ms: float
    p20: float
    p80: float
    method: str


def summarise(samples: Sequence[float], method: str) -> Timing:
    """Median and percentiles of ``samples`` (milliseconds)."""
    ordered = sorted(samples)
    last = len(ordered) - 1
    return Timing(
        statistics.median(ordered),
        ordered[round(0.2 * last)],
        ordered[round(0.8 * last)],
        method,
    )


def time_ms(
    calls: Mapping[str, Sequence[Callable[[], Any]]],
    *,
    rounds: int = 30,
    min_ms: float = 1.0,
) -> dict[str, Timing]:
    """Time several candidates against each other, interleaved.

    ``calls`` gives for each candidate a list of equivalent calls on different buffers; going round
    them keeps the cache cold where the buffers together exceed it. On an accelerator the calls are
    captured into a graph (one replay lasts at least ``min_ms``) and replayed ``rounds`` times, the
    candidates taking turns, so that clock and temperature drift hit all alike. A candidate that
    cannot be captured is timed with events round the same loop, and its ``method`` says so.
    """
    ready = {name: prepared(fns, min_ms=min_ms) for name, fns in calls.items()}
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, candidate in ready.items():
            samples[name].append(candidate.sample())
    return {name: summarise(samples[name], ready[name].method) for name in calls}


@dataclasses.dataclass(frozen=True)
class Prepared:
    """Calls that are compiled and captured; ``sample()`` runs them: milliseconds of one call."""

    sample: Callable[[], float]
    method: str
    calls: Sequence[Callable[[], Any]]  # a graph reads tensors that only they keep alive


def prepared(
    fns: Sequence[Callable[[], Any]], *, min_ms: float = 1.0, capture: bool = True
) -> Prepared:
    """Make equivalent calls ready to be timed, as ``time_ms`` describes it.

    Without ``capture`` no graph is tried: calls that wait for the device, with the host's time.
    """
    if device.tensor_device().type == "cpu":
        return _prepared_on_host(fns)
    run, count, method = _prepare(list(fns), min_ms, capture)
    return Prepared(lambda: _elapsed_ms(run) / count, method, fns)


def _prepared_on_host(fns: Sequence[Callable[[], Any]]) -> Prepared:
    fns[0]()
    turn = itertools.cycle(fns)

    def sample() -> float:
        fn = next(turn)
        start = time.perf_counter()
        fn()
        return 1e3 * (time.perf_counter() - start)

    return Prepared(sample, "host clock", fns)


def _prepare(
    fns: list[Callable[[], Any]], min_ms: float, capture: bool
) -> tuple[Callable[[], Any], int, str]:
    """(function that runs all calls, how many calls that is, method)."""
    for fn in fns:
        fn()  # compile and allocate outside the measurement
    device.synchronize()
    # The length of a graph is set by what a graph takes: an eager loop would time the host.
    sequence = fns * math.ceil(_FIRST_CALLS / len(fns))
    run, method = _captured(sequence) if capture else _one_by_one(sequence)
    run()
    each = _elapsed_ms(run) / len(sequence)
    repeats = math.ceil(min(min_ms / max(each, 1e-5), _MOST_CALLS) / len(fns))
    if method == "graph" and repeats * len(fns) > len(sequence):
        sequence = fns * repeats
        run, method = _captured(sequence)
        run()
    device.synchronize()
    return run, len(sequence), method


_FIRST_CALLS = 16
_MOST_CALLS = 2000


def _captured(sequence: list[Callable[[], Any]]) -> tuple[Callable[[], Any], str]:
    graph = device.new_graph()
    try:
        with device.capture(graph):
            for fn in sequence:
                fn()
    except RuntimeError:
        device.synchronize()
        return _one_by_one(sequence)
    return graph.replay, "graph"


def _one_by_one(sequence: list[Callable[[], Any]]) -> tuple[Callable[[], Any], str]:
    return (lambda: [fn() for fn in sequence]), "events"


def _elapsed_ms(run: Callable[[], Any]) -> float:
    start, end = device.timing_event(), device.timing_event()
    start.record()
    run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))
