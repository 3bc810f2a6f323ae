"""Host code shared by row-wise kernels: how rows lie in memory, and which tiles are legal.

A row-wise kernel sees every tensor as ``[outer, inner, cols]`` with its own two row strides. That
covers plain matrices (outer = 1), per-head norms of a packed projection (outer = tokens, inner =
heads) and everything that collapses to these, without copying and without ``//`` in a vector
address, which Ascend would load one element at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from tkernels.check import (
    FLOAT_DTYPES,
    check_dtype,
    check_last_contiguous,
    check_no_overlap,
    check_tensor,
    describe,
)
from tkernels.config import resolve, why_no_launch
from tkernels.device import Device, Kernel, bind, cdiv, next_power_of_2
from tkernels.registry import Case, Config, KernelSpec, Problem

# The values of resolve() for a row-wise kernel, in order.
ROW_FIELDS = ("n_outer", "n_inner", "n_cols", "dtype")


def check_row_input(op: str, name: str, x: torch.Tensor) -> int:
    """``x`` is [..., n_cols] of floats with contiguous columns; returns n_cols."""
    check_tensor(op, name, x)
    if x.dim() < 1 or x.shape[-1] < 1:
        raise ValueError(f"{op}: {name} must have shape [..., n_cols >= 1], got {describe(x)}")
    check_dtype(op, name, x, FLOAT_DTYPES)
    check_last_contiguous(op, name, x)
    return x.shape[-1]


def check_row_like(op: str, name: str, t: torch.Tensor, x: torch.Tensor) -> None:
    """``t`` has shape, dtype and contiguous columns as ``x``; its row strides are its own."""
    check_tensor(op, name, t)
    if t.shape != x.shape or t.dtype != x.dtype:
        raise ValueError(f"{op}: {name} must be {describe(x)}, got {describe(t)}")
    check_last_contiguous(op, name, t)


def check_row_output(op: str, name: str, t: torch.Tensor, x: torch.Tensor) -> None:
    """As ``check_row_like``, for a tensor that will be written."""
    check_row_like(op, name, t, x)
    check_no_overlap(op, name, t)


def check_weight(op: str, weight: torch.Tensor, n_cols: int, name: str = "weight") -> None:
    """``weight`` is a contiguous vector [n_cols] of floats."""
    check_tensor(op, name, weight)
    if weight.dim() != 1 or weight.shape[0] != n_cols:
        raise ValueError(f"{op}: {name} must have shape [n_cols={n_cols}], got {describe(weight)}")
    check_dtype(op, name, weight, FLOAT_DTYPES)
    check_last_contiguous(op, name, weight)


def row_layout(op: str, names: Sequence[str], tensors: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """``(outer, inner, stride_outer, stride_inner, stride_outer, ...)``, a pair a tensor.

    All tensors have the same leading shape. Raises where no split into two row levels fits.
    """
    shape = tensors[0].shape[:-1]
    # Kernels count the rows of one level, and columns, in 32 bits; a tile may end behind the last.
    most = 2**31 - 2**16
    if math.prod(shape) > most or tensors[0].shape[-1] > most:
        raise ValueError(
            f"{op}: {names[0]} must have at most {most} rows and columns, got "
            f"{describe(tensors[0])}"
        )
    if not shape:
        return (1, 1, *(0 for _ in tensors for _ in (0, 1)))
    if len(shape) == 1:
        return (1, shape[0], *(s for t in tensors for s in (0, t.stride(0))))
    strides = [t.stride()[:-1] for t in tensors]
    for cut in range(len(shape)):
        pairs = [
            (_collapse(shape[:cut], s[:cut]), _collapse(shape[cut:], s[cut:])) for s in strides
        ]
        if all(a is not None and b is not None for a, b in pairs):
            outer, inner = math.prod(shape[:cut]), math.prod(shape[cut:])
            return (outer, inner, *(s for a, b in pairs for s in (a or 0, b or 0)))
    listed = ", ".join(f"{n} {list(t.stride())}" for n, t in zip(names, tensors, strict=True))
    raise ValueError(
        f"{op}: rows must be reachable with two strides for shape {list(tensors[0].shape)}, "
        f"got strides of {listed}; call it on a contiguous copy or a smaller view"
    )


def _collapse(shape: Sequence[int], strides: Sequence[int]) -> int | None:
    """The one stride that walks all of ``shape``, or None where there is no such stride."""
    step: int | None = None
    span = 0
    for n, stride in zip(reversed(shape), reversed(strides), strict=True):
        if n == 1:
            continue
        if step is None:
            step, span = stride, stride * n
        elif stride == span:
            span = stride * n
        else:
            return None
    return step or 0


# What is left to call, with the tensors first: (launch, strides and counts).
RowPlan = tuple[Callable[..., None], tuple[int, ...]]


def plan_rows(
    spec: KernelSpec,
    kernel: Kernel,
    tensors: Mapping[str, torch.Tensor],
    n_cols: int,
    config: Config | None,
) -> RowPlan | None:
    """Launch of a row-wise kernel; None where there are no rows.

    The kernel takes two strides a tensor, in the order of ``tensors``, then ``n_inner,
    n_inner_tiles, n_tiles``, and the constants N_COLS, TWO_LEVELS and ONE_TILE besides its config.
    """
    first = next(iter(tensors.values()))
    if first.numel() == 0:
        return None
    outer, inner, *strides = row_layout(spec.name, list(tensors), list(tensors.values()))
    cfg, max_programs = resolve(spec, (outer, inner, n_cols, first.dtype), config)
    inner_tiles = cdiv(inner, cfg["BLOCK_ROWS"])
    n_tiles = outer * inner_tiles
    programs = min(n_tiles, max_programs)
    constants = {"N_COLS": n_cols, "TWO_LEVELS": outer > 1, "ONE_TILE": programs == n_tiles}
    return bind(kernel, (programs,), **constants, **cfg), (*strides, inner, inner_tiles, n_tiles)


def default_row_config(problem: Problem, dev: Device, *, live: int) -> Config:
    """Heuristic tile for a row-wise kernel that keeps ``live`` fp32 values an element."""
    n_cols, itemsize = problem["n_cols"], problem["dtype"].itemsize
    block_n = next_power_of_2(n_cols)
    if dev.is_npu:
        return _default_npu(problem, dev, block_n, live)
    block_n = min(block_n, 16384)
    # 32 bytes a thread keep enough loads in flight, and more than 8 warps only wait for each other
    # at the reduction (measured: CONTRIBUTING, "Measured facts").
    warps = max(1, min(8, block_n * itemsize // (32 * 32)))
    block_rows = 1
    if warps <= 2:
        per_row = max(1, block_n * itemsize // 16)
        block_rows = max(1, min(32, 128 // per_row, next_power_of_2(problem["n_inner"])))
        warps = max(1, min(4, block_rows * per_row // 32))
    while warps < 32 and block_rows * block_n * live > warps * 32 * 128:
        warps *= 2
    return {
        "BLOCK_ROWS": block_rows,
        "BLOCK_N": block_n,
        "num_warps": warps,
        "programs_per_core": 0,
    }


def _default_npu(problem: Problem, dev: Device, block_n: int, live: int) -> Config:
    # Half of UB, because the compiler doubles the buffers of a loop. Whole rows where they fit.
    budget = dev.local_mem_bytes // 2 // _npu_bytes(problem, live)
    whole = block_n <= budget
    block_n = block_n if whole else min(2048, 1 << (budget.bit_length() - 1))
    rows = max(1, min(16, budget // block_n, next_power_of_2(problem["n_inner"])))
    block_rows = 1 << (rows.bit_length() - 1)
    return {"BLOCK_ROWS": block_rows, "BLOCK_N": block_n, "programs_per_core": 1}


def _npu_bytes(problem: Problem, live: int) -> int:
    """UB bytes an element, as a rule of thumb; Huawei's compiler is the judge."""
    return live * 4 + 3 * int(problem["dtype"].itemsize)


def row_space(dev: Device) -> dict[str, list[int]]:
    """Search space of a row-wise kernel."""
    space = {
        "BLOCK_ROWS": [1, 2, 4, 8, 16, 32],
        "BLOCK_N": [1 << i for i in range(15)],
        "programs_per_core": [0, 1, 2, 4, 8],
    }
    if dev.is_npu:
        return {**space, "programs_per_core": [1]}
    return {**space, "num_warps": [1, 2, 4, 8, 16, 32]}


def why_illegal_rows(config: Config, problem: Problem, dev: Device, *, live: int) -> str | None:
    """Reason why a row tile does not fit ``dev``, or None."""
    if why := why_no_launch(config, dev, "BLOCK_ROWS", "BLOCK_N"):
        return why
    elements = config["BLOCK_ROWS"] * config["BLOCK_N"]
    if dev.is_npu:
        need = elements * _npu_bytes(problem, live)
        if need > dev.local_mem_bytes:
            return f"the tile needs about {need} bytes of UB, {dev.local_mem_bytes} available"
        return None
    warps = config["num_warps"]
    registers = elements * live // (warps * 32)
    if registers > 160:
        return f"about {registers} of 255 registers a thread would hold the tile alone"
    if elements < warps * 32 and warps > 1:
        return f"{warps} warps have nothing to do with {elements} elements"
    return None


# ---- problems and inputs of row-wise kernels -------------------------------------------------


def row_problem(rows: int, cols: int, dtype: torch.dtype, *, outer: int = 1) -> dict[str, Any]:
    """Problem of ``outer`` x ``rows`` rows of ``cols`` elements."""
    return {"n_outer": outer, "n_inner": rows, "n_cols": cols, "dtype": dtype}


def norm_shape(*, tokens: int, hidden: int, dtype: torch.dtype = torch.bfloat16) -> Problem:
    """Problem of a norm over the hidden size of ``tokens`` tokens."""
    return row_problem(tokens, hidden, dtype)


def row_tuning_key(problem: Problem) -> dict[str, Any]:
    """Columns, bytes an element, and the row count bucketed to powers of four."""
    n_rows = problem["n_outer"] * problem["n_inner"]
    bucket = 1
    while bucket < min(n_rows, 16384):
        bucket *= 4
    return {
        "n_cols": problem["n_cols"],
        "itemsize": problem["dtype"].itemsize,
        "rows_up_to": bucket,
    }


def norm_cases() -> tuple[Case, ...]:
    """Problems of a kernel that reduces whole rows, up to one that no single tile holds."""
    bf16, fp16, fp32, edge = torch.bfloat16, torch.float16, torch.float32, frozenset({"edge"})
    return (
        Case("5x64-bf16", row_problem(5, 64, bf16)),
        Case("3x1000-fp32", row_problem(3, 1000, fp32)),
        Case("heads-7x3x64-fp16", row_problem(3, 64, fp16, outer=7)),
        Case("2x1-fp16", row_problem(2, 1, fp16), edge),
        Case("1x33-bf16", row_problem(1, 33, bf16), edge),
        Case("2x4097-fp32", row_problem(2, 4097, fp32), edge),
        Case("2x16384-bf16", row_problem(2, 16384, bf16), edge),
        Case("2x20000-fp16", row_problem(2, 20000, fp16), edge),
        *bench_cases(),
    )


def bench_cases() -> tuple[Case, ...]:
    """Hidden sizes of Qwen3 8B (4096) and 14B/32B (5120) at decode and prefill token counts."""
    sizes = ((1, 4096), (64, 4096), (4096, 4096), (16384, 5120))
    return tuple(
        Case(f"{t}x{h}-bf16", row_problem(t, h, torch.bfloat16), frozenset({"bench"}))
        for t, h in sizes
    )


def random_rows(problem: Problem, dev: torch.device, *, seed: int, cols: int = 0) -> torch.Tensor:
    """Normal values [outer, inner, cols] (or [inner, cols] where outer is 1)."""
    outer, inner, n_cols = problem["n_outer"], problem["n_inner"], cols or problem["n_cols"]
    generator = torch.Generator().manual_seed(seed)
    if outer == 1:
        return torch.randn(inner, n_cols, generator=generator).to(problem["dtype"]).to(dev)
    # A gap behind the rows of a group, as heads of a packed projection have; without it the two
    # levels would be one.
    values = torch.randn(outer, inner + 1, n_cols, generator=generator)
    return values.to(problem["dtype"]).to(dev)[:, :inner]


def random_weight(problem: Problem, dev: torch.device) -> torch.Tensor:
    """A norm weight as trained models have it: near one, all different."""
    generator = torch.Generator().manual_seed(99)
    values = 1.0 + 0.2 * torch.randn(problem["n_cols"], generator=generator)
    return values.to(problem["dtype"]).to(dev)
