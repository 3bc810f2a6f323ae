"""Watch activations for what int8 was not calibrated for, and set the bits ``masked_gemm`` reads.

    for each watch w and request slot s, over the rows of this step that belong to s, in order:
        histogram[w, s, bin(x)] += 1          bin(x) = (x - low) * per_bin, cut off at 0 and 511
        moments[w, s, k] += u^(k + 1)         u = (x - centre) * per_spread, k = 0, 1, 2
    and after each ``window`` rows of a slot, its verdict, and histogram and moments start anew:
        KL(histogram / count || reference[w]) > kl_above           reason 1
        |mean(((x - mean) / std)^3)| > skewness_above              reason 2 (both: 3)
    a row with a NaN or an infinity is a verdict at once:          reason 4
    A verdict sets bit s % 64 of mask[s // 64] and ends the watch of s by w until its state is 0.

x: [n_watches, n_rows, n_cols], activations of one step, a row a token; a watch is a place in the
network, usually the input of a layer. row_slot: int32 [n_rows], the slot of a row, -1 for none: it
decides which tokens count, so a long prompt may be sampled. calibration: fp32 [n_watches, 4], (low,
per_bin, centre, per_spread), the last of them above 0, or nothing is watched: zeros mean "none".
reference: fp32 [n_watches, 512], shares of the calibrated histogram, which the outer bins share
with all that lies outside; smoothed by who made it, so that none is 0. KL is in nats.

State, which starts as zeros: histogram int32 [n_watches, n_slots, 512]; moments fp32 [n_watches,
n_slots, 5], the three sums, then KL and skewness of the latest verdict; counters int32 [n_watches,
n_slots, 4], (rows in the window, rows in all, reason, rows in all at the verdict).

One program serves a watch and slot: counts are integers and sums have one order, so nothing depends
on the grid, and what one slot does is not seen by another. Bits are set by an atomic "or", because
64 slots share a word. An NPU has none of 64 bits: there one program serves all.
"""

from __future__ import annotations

from typing import Any

import torch

from tkernels.check import (
    FLOAT_DTYPES,
    check_contiguous,
    check_dtype,
    check_last_contiguous,
    check_no_overlap,
    check_positive,
    check_shape,
    check_tensor,
    describe,
)
from tkernels.config import planned, resolve, why_no_launch
from tkernels.device import Device, bind, current, next_power_of_2, tl, triton
from tkernels.registry import Case, Config, Cost, KernelSpec, Problem, op, register

_OP = "watch_activations"
BINS = 512
_BINS = tl.constexpr(BINS)
_FAR = tl.constexpr(2.0**20)  # spreads from the centre, at most: their cubes are summed in fp32
_LEAST = tl.constexpr(2.0**-100)  # shares of the reference below it count as this


def watch_activations_ref(
    x: torch.Tensor,
    row_slot: torch.Tensor,
    calibration: torch.Tensor,
    reference: torch.Tensor,
    histogram: torch.Tensor,
    moments: torch.Tensor,
    counters: torch.Tensor,
    mask: torch.Tensor,
    *,
    window: int = 64,
    kl_above: float = 0.02,
    skewness_above: float = 3.0,
    config: Config | None = None,
) -> None:
    """PyTorch version of ``watch_activations``: the same counts. It waits for the device."""
    real = moments.dtype
    slots = row_slot.tolist()
    n_slots = histogram.shape[1]
    for w in range(x.shape[0]):
        low, per_bin, centre, per_spread = calibration[w].float()
        if not bool(per_spread > 0):
            continue
        for row, slot in enumerate(slots):
            if not 0 <= slot < n_slots or int(counters[w, slot, 2]):
                continue
            values = x[w, row].float()
            seen, total, _, _ = counters[w, slot].tolist()
            reason, total = 4, total + 1
            if bool(values.isfinite().all()):
                reason, seen = 0, seen + 1
                place = ((values - low) * per_bin).clamp(0, BINS - 1).long()
                histogram[w, slot] += torch.bincount(place, minlength=BINS).int()
                u = ((values - centre) * per_spread).clamp(-(2.0**20), 2.0**20).to(real)
                moments[w, slot, :3] += torch.stack([u.sum(), (u * u).sum(), (u * u * u).sum()])
                if seen >= window:
                    kl, skewness = _verdict(
                        histogram[w, slot], reference[w], moments[w, slot], seen * x.shape[2]
                    )
                    moments[w, slot, :3] = 0
                    moments[w, slot, 3], moments[w, slot, 4] = kl, skewness
                    histogram[w, slot] = 0
                    reason, seen = int(kl > kl_above) + 2 * int(abs(skewness) > skewness_above), 0
            found = [seen, total, reason, total if reason else 0]
            counters[w, slot] = torch.tensor(found, device=counters.device, dtype=torch.int32)
            if reason:
                mask[slot // 64] |= torch.tensor(1, device=mask.device) << slot % 64


def _verdict(
    counts: torch.Tensor, reference: torch.Tensor, sums: torch.Tensor, count: int
) -> tuple[float, float]:
    p = counts.to(sums.dtype) / count
    q = reference.to(sums.dtype).clamp_min(2.0**-100)
    kl = torch.where(p > 0, p * (p.clamp_min(2.0**-100).log() - q.log()), 0).sum()
    mean, square, cube = sums[:3] / count
    variance = square - mean * mean
    third = cube - 3 * mean * square + 2 * mean * mean * mean
    skewness = torch.where(variance > 1e-12, third / variance.clamp_min(1e-12) ** 1.5, 0)
    return float(kl), float(skewness)


# ---- kernel ----------------------------------------------------------------------------------
# fmt: off


@triton.jit(do_not_specialize=["n_rows", "n_slots", "n_tasks"])
def _watch_activations_kernel(
    x_ptr, row_slot_ptr, calibration_ptr, reference_ptr, histogram_ptr, moments_ptr, counters_ptr,
    mask_ptr, kl_above, skewness_above, stride_w, stride_r, n_rows, n_slots, n_tasks,
    N_COLS: tl.constexpr, WINDOW: tl.constexpr,
    ASCEND: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
):
    for task in range(tl.program_id(0), n_tasks, tl.num_programs(0)):
        watch = task // n_slots
        slot = task % n_slots
        per_spread = tl.load(calibration_ptr + watch * 4 + 3)
        ended = tl.load(counters_ptr + task * 4 + 2)
        if (ended == 0) & (per_spread > 0):
            _watch_slot(
                x_ptr + tl.cast(watch, tl.int64) * stride_w, row_slot_ptr,
                reference_ptr + watch * _BINS,
                histogram_ptr + tl.cast(task, tl.int64) * _BINS,
                moments_ptr + task * 5, counters_ptr + task * 4, mask_ptr + slot // 64,
                tl.load(calibration_ptr + watch * 4), tl.load(calibration_ptr + watch * 4 + 1),
                tl.load(calibration_ptr + watch * 4 + 2), per_spread,
                kl_above, skewness_above, stride_r, n_rows, slot,
                N_COLS, WINDOW, ASCEND, BLOCK_R, BLOCK_N)


@triton.jit
def _watch_slot(
    x_ptr, row_slot_ptr, reference_ptr, histogram_ptr, moments_ptr, counters_ptr, mask_ptr,
    low, per_bin, centre, per_spread, kl_above, skewness_above, stride_r, n_rows, slot,
    N_COLS: tl.constexpr, WINDOW: tl.constexpr,
    ASCEND: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
):
    """The rows of one slot in one watch."""
    bins = tl.arange(0, _BINS)
    counts = tl.load(histogram_ptr + bins)
    sum1 = tl.load(moments_ptr)
    sum2 = tl.load(moments_ptr + 1)
    sum3 = tl.load(moments_ptr + 2)
    seen = tl.load(counters_ptr)
    total = tl.load(counters_ptr + 1)
    reason = total * 0
    for first in range(0, n_rows, BLOCK_R):
        rows = first + tl.arange(0, BLOCK_R)
        named = tl.load(row_slot_ptr + rows, mask=rows < n_rows, other=-1)
        mine = tl.where(named == slot, rows, n_rows)
        row = tl.min(mine, 0)
        steps = BLOCK_R
        if not ASCEND:  # whose estimates need to know how long a loop is
            steps = tl.sum((named == slot).to(tl.int32), 0)
        for _ in range(steps):
            if (reason == 0) & (row < n_rows):
                xs = x_ptr + row.to(tl.int64) * stride_r
                new, add1, add2, add3, spoilt = _row(
                    xs, low, per_bin, centre, per_spread, N_COLS, ASCEND, BLOCK_N)
                total += 1
                if spoilt == 0:
                    counts += new
                    sum1 += add1
                    sum2 += add2
                    sum3 += add3
                    seen += 1
                else:
                    reason += 4
                if seen >= WINDOW:
                    kl, skewness = _judge(counts, sum1, sum2, sum3, reference_ptr, seen * N_COLS)
                    reason += tl.where(kl > kl_above, 1, 0)
                    reason += tl.where(tl.abs(skewness) > skewness_above, 2, 0)
                    tl.store(moments_ptr + 3, kl)
                    tl.store(moments_ptr + 4, skewness)
                    counts = counts * 0
                    sum1 = sum1 * 0
                    sum2 = sum2 * 0
                    sum3 = sum3 * 0
                    seen = seen * 0
            mine = tl.where(mine == row, n_rows, mine)
            row = tl.min(mine, 0)
    tl.store(histogram_ptr + bins, counts)
    tl.store(moments_ptr, sum1)
    tl.store(moments_ptr + 1, sum2)
    tl.store(moments_ptr + 2, sum3)
    tl.store(counters_ptr, seen)
    tl.store(counters_ptr + 1, total)
    if reason != 0:
        tl.store(counters_ptr + 2, reason)
        tl.store(counters_ptr + 3, total)
        bit = tl.cast(1, tl.int64) << (slot % 64).to(tl.int64)
        if ASCEND:  # the only program
            tl.store(mask_ptr, tl.load(mask_ptr) | bit)
        else:
            tl.atomic_or(mask_ptr, bit, sem="relaxed")


@triton.jit
def _row(
    xs, low, per_bin, centre, per_spread, N_COLS: tl.constexpr, ASCEND: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """(counts a bin, three sums, 0 unless a value is NaN or infinite) of a row."""
    bins = tl.arange(0, _BINS)
    counts = tl.zeros([_BINS], tl.int32)
    sum1 = 0.0
    sum2 = 0.0
    sum3 = 0.0
    spoilt = 0
    for start in range(0, N_COLS, BLOCK_N):
        column = start + tl.arange(0, BLOCK_N)
        ok = column < N_COLS
        x = tl.load(xs + column, mask=ok, other=0.0).to(tl.float32)
        good = tl.abs(x) < float("inf")  # not NaN either
        spoilt += tl.sum(tl.where(good, 0, 1), 0)
        x = tl.where(good, x, 0.0)
        place = tl.minimum(tl.maximum((x - low) * per_bin, 0.0), 511.0).to(tl.int32)
        place = tl.where(ok, place, 0)
        if ASCEND:  # it compares in fp32
            same = place.to(tl.float32)[None, :] == bins.to(tl.float32)[:, None]
            counts += tl.sum(tl.where(same, 1.0, 0.0), 1).to(tl.int32)
        else:
            counts += tl.histogram(place, _BINS)
        u = tl.minimum(tl.maximum((x - centre) * per_spread, -_FAR), _FAR)
        u = tl.where(ok, u, 0.0)
        sum1 += tl.sum(u, 0)
        sum2 += tl.sum(u * u, 0)
        sum3 += tl.sum(u * u * u, 0)
    padding: tl.constexpr = (N_COLS + BLOCK_N - 1) // BLOCK_N * BLOCK_N - N_COLS
    if padding > 0:
        counts -= tl.where(bins == 0, padding, 0)
    return counts, sum1, sum2, sum3, spoilt


@triton.jit
def _judge(counts, sum1, sum2, sum3, reference_ptr, count):
    """(KL, skewness) of a window."""
    share = 1.0 / count.to(tl.float32)
    p = counts.to(tl.float32) * share
    q = tl.maximum(tl.load(reference_ptr + tl.arange(0, _BINS)), _LEAST)
    kl = tl.sum(tl.where(p > 0, p * (tl.log(tl.maximum(p, _LEAST)) - tl.log(q)), 0.0), 0)
    mean = sum1 * share
    square = sum2 * share
    variance = square - mean * mean
    third = sum3 * share - 3.0 * mean * square + 2.0 * mean * mean * mean
    safe = tl.maximum(variance, 1e-12)
    skewness = tl.where(variance > 1e-12, third / (safe * tl.sqrt(safe)), 0.0)
    return kl, skewness


# fmt: on


@op
def watch_activations(
    x: torch.Tensor,
    row_slot: torch.Tensor,
    calibration: torch.Tensor,
    reference: torch.Tensor,
    histogram: torch.Tensor,
    moments: torch.Tensor,
    counters: torch.Tensor,
    mask: torch.Tensor,
    *,
    window: int = 64,
    kl_above: float = 0.02,
    skewness_above: float = 3.0,
    config: Config | None = None,
) -> None:
    """Take the activations of a step into the watch; requests gone bad get their bit in ``mask``.

    Args:
        x: [n_watches, n_rows, n_cols], fp32, bf16 or fp16, contiguous columns, any other strides.
        row_slot: int32 [n_rows], contiguous. Rows of a slot that is not there are skipped.
        calibration: fp32 [n_watches, 4], contiguous: low, per_bin, centre, per_spread.
        reference: fp32 [n_watches, 512], contiguous: shares, above 0.
        histogram: int32 [n_watches, n_slots, 512], contiguous. Written, as all below are.
        moments: fp32 [n_watches, n_slots, 5], contiguous.
        counters: int32 [n_watches, n_slots, 4], contiguous.
        mask: int64 [n_words], contiguous, a bit for each slot. Bits are set, never cleared.
        window: rows between two verdicts.
        kl_above: nats.
        skewness_above: of either sign.
        config: launch config; None looks it up.

    Raises:
        TypeError, ValueError: an argument of the wrong kind, shape, dtype, stride or device.
    """
    tensors = x, row_slot, calibration, reference, histogram, moments, counters, mask
    for name, value in (("kl_above", kl_above), ("skewness_above", skewness_above)):
        check_positive(_OP, name, value)
    plan = planned(_plan, config, tensors, window)
    if plan is not None:
        launch, numbers = plan
        launch(*tensors, float(kl_above), float(skewness_above), *numbers)


def _plan(
    x: torch.Tensor,
    row_slot: torch.Tensor,
    calibration: torch.Tensor,
    reference: torch.Tensor,
    histogram: torch.Tensor,
    moments: torch.Tensor,
    counters: torch.Tensor,
    mask: torch.Tensor,
    window: int,
    config: Config | None,
) -> Any:
    """(launch, numbers); None where there is nothing to watch."""
    state = {"histogram": histogram, "moments": moments, "counters": counters, "mask": mask}
    facts = {"row_slot": row_slot, "calibration": calibration, "reference": reference}
    _check(x, {**facts, **state}, window)
    n_watches, n_rows, n_cols = x.shape
    n_slots = histogram.shape[1]
    if not n_rows or not n_slots or not n_watches:
        return None
    cfg, max_programs = resolve(SPEC, (n_watches, n_rows, n_slots, n_cols, x.dtype), config)
    n_tasks = n_watches * n_slots
    ascend = current().is_npu
    launch = bind(
        _watch_activations_kernel,
        (1 if ascend else min(n_tasks, max_programs),),
        N_COLS=n_cols,
        WINDOW=window,
        ASCEND=ascend,
        **cfg,
    )
    return launch, (x.stride(0), x.stride(1), n_rows, n_slots, n_tasks)


def _check(x: torch.Tensor, others: dict[str, torch.Tensor], window: int) -> None:
    for name, t in {"x": x, **others}.items():
        check_tensor(_OP, name, t)
    check_shape(_OP, "x", x, n_watches=None, n_rows=None, n_cols=None)
    check_dtype(_OP, "x", x, FLOAT_DTYPES)
    check_last_contiguous(_OP, "x", x)
    n_watches, n_rows, n_cols = x.shape
    if n_cols < 1:
        raise ValueError(
            f"{_OP}: x must have shape [n_watches, n_rows, n_cols >= 1], got {describe(x)}"
        )
    if n_rows > 2**31 - 2**16:  # counted in 32 bits
        raise ValueError(f"{_OP}: x must have at most {2**31 - 2**16} rows, got {describe(x)}")
    if type(window) is not int or not 1 <= window <= (2**31 - 1) // n_cols:
        raise ValueError(
            f"{_OP}: window must be an int of at least 1, and window * n_cols below 2^31, got "
            f"{describe(window)} and {n_cols} columns"
        )
    check_shape(_OP, "histogram", others["histogram"], n_watches=None, n_slots=None, bins=BINS)
    n_slots = others["histogram"].shape[1]
    n_words = -(-n_slots // 64)
    wanted: dict[str, tuple[torch.dtype, dict[str, int | None]]] = {
        "row_slot": (torch.int32, {"n_rows": n_rows}),
        "calibration": (torch.float32, {"n_watches": n_watches, "values": 4}),
        "reference": (torch.float32, {"n_watches": n_watches, "bins": BINS}),
        "histogram": (torch.int32, {"n_watches": n_watches, "n_slots": None, "bins": BINS}),
        "moments": (torch.float32, {"n_watches": n_watches, "n_slots": n_slots, "sums": 5}),
        "counters": (torch.int32, {"n_watches": n_watches, "n_slots": n_slots, "counts": 4}),
        "mask": (torch.int64, {"n_words": None}),
    }
    for name, (dtype, shape) in wanted.items():
        check_dtype(_OP, name, others[name], (dtype,))
        check_shape(_OP, name, others[name], **shape)
        check_contiguous(_OP, name, others[name])
        check_no_overlap(_OP, name, others[name])
    if len(others["mask"]) < n_words:
        raise ValueError(
            f"{_OP}: mask must have {n_words} or more words for {n_slots} slots, got "
            f"{describe(others['mask'])}"
        )
    if n_watches * n_slots >= 2**28:
        raise ValueError(
            f"{_OP}: histogram must have fewer than 2^28 watches and slots, got "
            f"{describe(others['histogram'])}"
        )


# ---- facts for tests, bench and tuner --------------------------------------------------------

_FIELDS = ("n_watches", "n_rows", "n_slots", "n_cols", "dtype")


def watch_problem(
    rows: int, slots: int, cols: int, dtype: torch.dtype, *, watches: int = 1
) -> dict[str, Any]:
    """Problem of a step of ``rows`` tokens of up to ``slots`` requests."""
    return dict(zip(_FIELDS, (watches, rows, slots, cols, dtype), strict=True))


def _shape(
    *, tokens: int, hidden: int, watches: int = 1, dtype: torch.dtype = torch.bfloat16
) -> Problem:
    """A decode step of ``tokens`` requests."""
    return watch_problem(tokens, tokens, hidden, dtype, watches=watches)


def _make_inputs(problem: Problem, dev: torch.device) -> dict[str, Any]:
    """Gaussian rows and windows that are full, a row before it, or further from it.

    Row r is of slot 5 r + 1 (mod the slots), every seventh of none. Slot 1 has outliers, slot 2 a
    lopsided history, slot 3 a NaN, slot 4 ended before.
    """
    w, rows, slots, cols = (problem[name] for name in _FIELDS[:4])
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(w, rows, cols, generator=generator)
    row_slot = (torch.arange(rows) * 5 + 1) % slots
    row_slot[6::7] = -1
    x *= torch.where(row_slot == 1, 50.0, 1.0)[:, None]
    x[..., cols // 2] += torch.where(row_slot == 3, torch.nan, 0.0)
    shares = torch.special.ndtr(torch.linspace(-4, 4, BINS + 1)).diff() + 1e-5
    reference = (shares / shares.sum()).repeat(w, 1)
    histogram = torch.zeros(w, slots, BINS, dtype=torch.int32)
    moments = torch.zeros(w, slots, 5)
    seen = torch.tensor([63, 62, 10])[torch.arange(slots) % 3]
    for slot in range(slots):
        past = torch.randn((63, 62, 10)[slot % 3] * cols, generator=generator)
        past = past.exp() if slot == 2 else past
        place = ((past + 4) * (BINS / 8)).clamp(0, BINS - 1).long()
        counts = torch.zeros(BINS, dtype=torch.int32)
        histogram[:, slot] = counts.index_add_(0, place, torch.ones_like(place, dtype=torch.int32))
        moments[:, slot, :3] = torch.stack([past.sum(), past.square().sum(), past.pow(3).sum()])
    counters = torch.zeros(w, slots, 4, dtype=torch.int32)
    counters[..., 0], counters[..., 1] = seen, seen + 64
    counters[:, 4:5, 2], counters[:, 4:5, 3] = 1, 64
    mask = torch.zeros(-(-slots // 64) + 2, dtype=torch.int64)  # two to spare
    mask[0] = 16
    calibration = torch.tensor([[-4.0, BINS / 8, 0.0, 1.0]]).repeat(w, 1)
    found = {
        "x": x.to(problem["dtype"]),
        "row_slot": row_slot.int(),
        "calibration": calibration,
        "reference": reference,
        "histogram": histogram,
        "moments": moments,
        "counters": counters,
        "mask": mask,
    }
    return {name: t.to(dev) for name, t in found.items()}


def _tuning_key(problem: Problem) -> dict[str, Any]:
    bucket = 1
    while bucket < min(problem["n_rows"], 4096):
        bucket *= 4
    return {
        "n_cols": problem["n_cols"],
        "itemsize": problem["dtype"].itemsize,
        "rows_up_to": bucket,
    }


def _space(dev: Device) -> dict[str, list[Any]]:
    space: dict[str, list[Any]] = {
        "BLOCK_R": [16, 32, 64, 128, 256],
        "BLOCK_N": [64, 128, 256, 512, 1024, 2048, 4096, 8192],
        "programs_per_core": [0, 1, 2, 4],
    }
    if not dev.registers:
        return {**space, "BLOCK_N": [16, 32], "programs_per_core": [1]}
    return {**space, "num_warps": [1, 2, 4, 8, 16]}


def _default_config(problem: Problem, dev: Device) -> Config:
    rows = min(128, max(16, next_power_of_2(problem["n_rows"])))
    if not dev.registers:  # each bin is compared with each value
        return {"BLOCK_R": rows, "BLOCK_N": 16, "programs_per_core": 1}
    block_n = min(2048, max(64, next_power_of_2(problem["n_cols"])))
    warps = max(1, min(8, block_n // 256))
    return {"BLOCK_R": rows, "BLOCK_N": block_n, "num_warps": warps, "programs_per_core": 0}


def _why_illegal(config: Config, problem: Problem, dev: Device) -> str | None:
    if why := why_no_launch(config, dev, "BLOCK_R", "BLOCK_N"):
        return why
    if config["BLOCK_R"] < 2 or config["BLOCK_N"] < 2:
        return "BLOCK_R and BLOCK_N must be 2 or more"
    if not dev.registers:
        most = 16384  # comparisons at once
        at_once = BINS * config["BLOCK_N"]
        return f"{at_once} comparisons at once are more than {most}" if at_once > most else None
    if (values := config["BLOCK_N"] // (config["num_warps"] * 32)) > 64:
        return f"{values} values a thread are more than 64"
    if config["BLOCK_R"] > 4096:
        return f"{config['BLOCK_R']} rows looked through at once are more than 4096"
    return None


def _cost(problem: Problem) -> Cost:
    w, rows, slots, cols = (problem[name] for name in _FIELDS[:4])
    state = w * slots * (BINS + 5 + 4) * 4 + 8 * (-(-slots // 64) + 2)  # read and written
    n = w * rows * cols
    return Cost(
        flops=9 * n,
        bytes=n * problem["dtype"].itemsize + 4 * rows + w * (BINS + 4) * 4 + 2 * state,
    )


_EDGE = frozenset({"edge"})
_BENCH = frozenset({"bench"})
_BF16, _FP16, _FP32 = torch.bfloat16, torch.float16, torch.float32
_P = watch_problem

SPEC = register(
    KernelSpec(
        name=_OP,
        launch=watch_activations,
        reference=watch_activations_ref,
        problem_fields=_FIELDS,
        make_inputs=_make_inputs,
        cases=(
            Case("2x21x5x40-fp32", _P(21, 5, 40, _FP32, watches=2)),
            Case("8x6x96-bf16", _P(8, 6, 96, _BF16)),
            Case("1x1x1-fp32", _P(1, 1, 1, _FP32), _EDGE),
            Case("3x70x64-fp16", _P(3, 70, 64, _FP16), _EDGE),
            Case("33x2x65-bf16", _P(33, 2, 65, _BF16), _EDGE),
            *(
                Case(f"{w}x{t}x{c}-bf16", _P(t, t, c, _BF16, watches=w), _BENCH)
                for w, t, c in ((1, 8, 12288), (4, 64, 12288))
            ),
        ),
        tuning_key=_tuning_key,
        space=_space,
        default_config=_default_config,
        why_illegal=_why_illegal,
        cost=_cost,
        mutates=("histogram", "moments", "counters", "mask"),
        shape=_shape,
    )
)
