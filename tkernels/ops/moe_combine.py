"""Each token's sum over the rows that its experts made: the end of a mixture of experts.

    out[t] = sum over j = 0..top_k-1, in this order, of y[positions[t, j]]

y: [R, H], fp32, bf16 or fp16; positions: int32 [T, top_k], as ``moe_dispatch`` gives them; out:
[T, H], dtype of y. The sum is taken in fp32 and rounded once. A position outside 0..R-1, such as -1
for an expert that lives elsewhere, is of no row and adds nothing; a token without any gets zeros.
The weights of the experts are in y already (``moe_gemm`` multiplies by them in passing).

A program has some columns of one token. It reads the token's positions first, then all the rows,
then adds: the rows are independent, so all are on their way at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tkernels import device
from tkernels.check import (
    FLOAT_DTYPES,
    check_dtype,
    check_last_contiguous,
    check_no_overlap,
    check_shape,
    check_tensor,
    describe,
    new_output,
)
from tkernels.config import planned, resolve, why_no_launch
from tkernels.device import Device, bind, cdiv, next_power_of_2, tl, triton
from tkernels.ops.paged_attn import _has_pdl, _let_next_kernel_start, _wait_for_earlier_kernels
from tkernels.registry import Case, Config, Cost, KernelSpec, Problem, op, register

_OP = "moe_combine"
_MOST_UNROLLED = 16  # rows whose loads are written out; more come in a loop
# Rows are read once. Those that moe_gemm wrote last are in cache yet, and stay until they are read.
_EVICTION = "evict_first"


def moe_combine_ref(
    y: torch.Tensor,
    positions: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    config: Config | None = None,
) -> torch.Tensor:
    """PyTorch version of ``moe_combine``: one expert of all tokens after the other."""
    total = torch.zeros(positions.shape[0], y.shape[1], dtype=torch.float32, device=y.device)
    if y.shape[0]:
        for at in positions.long().unbind(1):
            there = (at >= 0) & (at < y.shape[0])
            rows = y[torch.where(there, at, 0)].float()
            total = total + torch.where(there[:, None], rows, 0.0)
    return total.to(y.dtype) if out is None else out.copy_(total)


# ---- kernels ---------------------------------------------------------------------------------
# fmt: off


@triton.jit
def _row(at, y_ptr, stride_y, column, start, n_rows, H: tl.constexpr, EVICTION: tl.constexpr):
    """fp32 numbers of row ``at`` of y, 0 where it is no row of it."""
    there = (at >= 0) & (at < n_rows)
    row = tl.where(there, at, 0).to(tl.int64)
    # The mask is a number of columns: so loads stay whole, on Ascend too.
    columns = tl.where(there, H - start, 0)
    y = tl.load(
        y_ptr + row * stride_y + start + column, mask=column < columns, other=0.0,
        eviction_policy=EVICTION)
    return y.to(tl.float32)


@triton.jit
def _moe_combine_tile(
    tile, y_ptr, positions_ptr, out_ptr, stride_y, stride_p, stride_o, n_rows, n_parts,
    TOP_K: tl.constexpr, H: tl.constexpr, UNROLLED: tl.constexpr, EVICTION: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    token = tl.cast(tile // n_parts, tl.int64)
    start = tile % n_parts * BLOCK_H
    column = tl.arange(0, BLOCK_H)
    mine = positions_ptr + token * stride_p
    total = tl.zeros([BLOCK_H], tl.float32)
    if UNROLLED:
        for j in tl.static_range(TOP_K):
            total += _row(tl.load(mine + j), y_ptr, stride_y, column, start, n_rows, H, EVICTION)
    else:
        for j in range(TOP_K):
            total += _row(tl.load(mine + j), y_ptr, stride_y, column, start, n_rows, H, EVICTION)
    outs = out_ptr + token * stride_o + start + column
    tl.store(outs, total.to(out_ptr.dtype.element_ty), mask=column < H - start)


@triton.jit(do_not_specialize=["n_rows", "n_tiles"])
def _moe_combine_kernel(
    y_ptr, positions_ptr, out_ptr, stride_y, stride_p, stride_o, n_rows, n_parts, n_tiles,
    TOP_K: tl.constexpr, H: tl.constexpr, UNROLLED: tl.constexpr,
    ONE_TILE: tl.constexpr,  # a program has one tile, so it need not loop
    EVICTION: tl.constexpr,  # of rows: they are read once
    PDL: tl.constexpr, BLOCK_H: tl.constexpr,
):
    if PDL:
        _let_next_kernel_start()
        _wait_for_earlier_kernels()
    if ONE_TILE:
        _moe_combine_tile(
            tl.program_id(0), y_ptr, positions_ptr, out_ptr, stride_y, stride_p, stride_o, n_rows,
            n_parts, TOP_K, H, UNROLLED, EVICTION, BLOCK_H)
    else:
        for tile in range(tl.program_id(0), n_tiles, tl.num_programs(0)):
            _moe_combine_tile(
                tile, y_ptr, positions_ptr, out_ptr, stride_y, stride_p, stride_o, n_rows, n_parts,
                TOP_K, H, UNROLLED, EVICTION, BLOCK_H)


# fmt: on


@op
def moe_combine(
    y: torch.Tensor,
    positions: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    config: Config | None = None,
) -> torch.Tensor:
    """Add up each token's rows of y.

    Args:
        y: [R, H], fp32, bf16 or fp16, contiguous columns, any row stride. Rows that no position
            names are not read.
        positions: int32 [T, top_k], contiguous columns, any row stride. Numbers outside 0..R-1 are
            of no row.
        out: [T, H], dtype of y, contiguous columns, any row stride, written and returned. It must
            not share memory with the others.
        config: launch config; None looks it up.

    Returns:
        out: zeros for a token without any row.

    Raises:
        TypeError, ValueError: an argument of the wrong kind, shape, dtype, stride or device.
    """
    if out is None:
        _check_inputs(y, positions)
        out = new_output(_OP, y, (positions.shape[0], y.shape[1]), name="y")
    plan = planned(_plan, config, (y, positions, out))
    if plan is not None:
        launch, numbers = plan
        launch(y, positions, out, *numbers)
    return out


def _check_inputs(y: torch.Tensor, positions: torch.Tensor) -> None:
    check_tensor(_OP, "y", y)
    check_dtype(_OP, "y", y, FLOAT_DTYPES)
    if y.dim() != 2 or y.shape[1] < 1:
        raise ValueError(f"{_OP}: y must have shape [R, H >= 1], got {describe(y)}")
    check_last_contiguous(_OP, "y", y)
    check_tensor(_OP, "positions", positions)
    check_dtype(_OP, "positions", positions, (torch.int32,))
    if positions.dim() != 2 or positions.shape[1] < 1:
        raise ValueError(
            f"{_OP}: positions must have shape [T, top_k >= 1], got {describe(positions)}"
        )
    check_last_contiguous(_OP, "positions", positions)


def _zero(y: torch.Tensor, positions: torch.Tensor, out: torch.Tensor) -> None:
    """Where y has no rows."""
    out.zero_()


def _plan(
    y: torch.Tensor, positions: torch.Tensor, out: torch.Tensor, config: Config | None
) -> tuple[Callable[..., None], tuple[int, ...]] | None:
    """(launch, strides and counts); None where there are no tokens."""
    _check_inputs(y, positions)
    (n_rows, h), (n_tokens, top_k) = y.shape, positions.shape
    check_tensor(_OP, "out", out)
    check_dtype(_OP, "out", out, (y.dtype,))
    check_shape(_OP, "out", out, T=n_tokens, H=h)
    check_last_contiguous(_OP, "out", out)
    check_no_overlap(_OP, "out", out)
    most = 2**31 - 2**16  # rows and columns are counted in 32 bits
    if max(n_rows, h) > most:
        raise ValueError(f"{_OP}: y must have at most {most} rows and columns, got {describe(y)}")
    if n_tokens == 0:
        return None
    if n_rows == 0:
        return _zero, ()
    cfg, max_programs = resolve(SPEC, (n_tokens, top_k, h, y.dtype), config)
    n_parts = cdiv(h, cfg["BLOCK_H"])
    n_tiles = n_tokens * n_parts
    if n_tiles > most:
        raise ValueError(
            f"{_OP}: positions must have at most {most // n_parts} rows with {h} columns of y, got "
            f"{describe(positions)}"
        )
    programs = min(n_tiles, max_programs)
    cfg.setdefault("PDL", False)  # Ascend has none
    launch = bind(
        _moe_combine_kernel,
        (programs,),
        TOP_K=top_k,
        H=h,
        UNROLLED=top_k <= _MOST_UNROLLED,
        ONE_TILE=programs == n_tiles,
        EVICTION="" if device.current().is_npu else _EVICTION,
        **cfg,
        **({"launch_pdl": True} if cfg["PDL"] else {}),
    )
    strides = y.stride(0), positions.stride(0), out.stride(0)
    return launch, (*strides, n_rows, n_parts, n_tiles)


# ---- facts for tests, bench and tuner --------------------------------------------------------


def combine_problem(
    n_tokens: int,
    top_k: int,
    h: int,
    dtype: torch.dtype = torch.bfloat16,
    *,
    n_rows: int | None = None,
) -> dict[str, Any]:
    """Problem of ``n_rows`` rows (a row for each position, where not given), each read once."""
    rows = n_tokens * top_k if n_rows is None else n_rows
    return {"n_tokens": n_tokens, "top_k": top_k, "h": h, "dtype": dtype, "n_rows": rows}


def _shape(
    *, tokens: int, hidden: int = 2048, top_k: int = 8, dtype: torch.dtype = torch.bfloat16
) -> Problem:
    """``tokens`` tokens of ``top_k`` experts each, all of which live here."""
    return combine_problem(tokens, top_k, hidden, dtype)


def _make_inputs(problem: Problem, dev: torch.device) -> dict[str, Any]:
    """Gaussian rows in random places; places that are left over are -1, every other one R or so."""
    p = problem
    generator = torch.Generator().manual_seed(0)
    y = torch.randn(p["n_rows"], p["h"], generator=generator).to(p["dtype"])
    places = p["n_tokens"] * p["top_k"]
    positions = torch.full((places,), -1, dtype=torch.int32)
    order = torch.randperm(places, generator=generator)
    positions[order[: p["n_rows"]]] = torch.arange(p["n_rows"], dtype=torch.int32)
    positions[order[p["n_rows"] :: 2]] = p["n_rows"] + 3
    return {"y": y.to(dev), "positions": positions.view(p["n_tokens"], p["top_k"]).to(dev)}


def _tuning_key(problem: Problem) -> dict[str, Any]:
    bucket = 1
    while bucket < min(problem["n_tokens"], 16384):
        bucket *= 4
    return {
        "h": problem["h"],
        "top_k": problem["top_k"],
        "itemsize": problem["dtype"].itemsize,
        "tokens_up_to": bucket,
    }


def _space(dev: Device) -> dict[str, list[Any]]:
    space: dict[str, list[Any]] = {
        "BLOCK_H": [16, 32, 64, 128, 256, 512, 1024, 2048, 4096],
        "programs_per_core": [0, 1, 2, 4, 8],
    }
    if dev.is_npu:
        return {**space, "programs_per_core": [1]}
    return {
        **space,
        "num_warps": [1, 2, 4, 8],
        "PDL": [False, True] if _has_pdl(dev) else [False],
    }


def _default_config(problem: Problem, dev: Device) -> Config:
    p = problem
    h, size = max(16, next_power_of_2(p["h"])), p["dtype"].itemsize
    if dev.is_npu:
        return {"BLOCK_H": min(h, 4096), "programs_per_core": 1}
    # 16 bytes of each row a thread, so that all rows of a token are on their way at once; for few
    # tokens narrow tiles, which leaves none of the cores without one.
    block_h = min(h, 128 * 16 // size)
    while block_h > 256 and p["n_tokens"] * cdiv(p["h"], block_h) < dev.num_cores:
        block_h //= 2
    warps = max(1, min(4, block_h * size // (32 * 16)))
    return {
        "BLOCK_H": block_h,
        "programs_per_core": 0,
        "num_warps": warps,
        "PDL": _has_pdl(dev),
    }


def _why_illegal(config: Config, problem: Problem, dev: Device) -> str | None:
    if why := why_no_launch(config, dev, "BLOCK_H"):
        return why
    block_h, size = config["BLOCK_H"], problem["dtype"].itemsize
    if dev.is_npu:
        at_once = min(problem["top_k"], _MOST_UNROLLED)
        need = block_h * (at_once * (size + 4) + 4 + size)
        if need > 2 * dev.local_mem_bytes:
            return f"the tile needs about {need} bytes of UB, {dev.local_mem_bytes} available"
        return None
    if config["PDL"] and not _has_pdl(dev):
        return f"PDL needs sm90 or later, got {dev.arch}"
    threads = 32 * config["num_warps"]
    at_once = min(problem["top_k"], _MOST_UNROLLED)
    if (registers := block_h * (at_once * size // 4 + 1) // threads) > 192:
        return f"about {registers} of 255 registers a thread would hold the rows alone"
    if block_h < threads and config["num_warps"] > 1:
        return f"{config['num_warps']} warps have nothing to do with {block_h} columns"
    return None


def _cost(problem: Problem) -> Cost:
    p = problem
    moved = (p["n_rows"] + p["n_tokens"]) * p["h"] * p["dtype"].itemsize
    return Cost(flops=p["n_rows"] * p["h"], bytes=moved + 4 * p["n_tokens"] * p["top_k"])


def _peers(inputs: dict[str, Any]) -> dict[str, Callable[[], Any]]:
    """Gathered and added, which needs a row for each position."""
    y, positions = inputs["y"], inputs["positions"]
    if len(y) != positions.numel():
        return {}
    at = positions.long()
    return {"torch": lambda: y[at].sum(1)}


_EDGE = frozenset({"edge"})
_BENCH = frozenset({"bench"})
_P = combine_problem
_BF16, _FP16, _FP32 = torch.bfloat16, torch.float16, torch.float32

# fmt: off
SPEC = register(
    KernelSpec(
        name=_OP,
        launch=moe_combine,
        reference=moe_combine_ref,
        problem_fields=("n_tokens", "top_k", "h", "dtype"),
        make_inputs=_make_inputs,
        cases=(
            Case("t6-k3-h64-6rows-bf16", _P(6, 3, 64, _BF16, n_rows=6)),
            Case("t5-k8-h300-fp32", _P(5, 8, 300, _FP32)),
            Case("t1-k1-h1-fp16", _P(1, 1, 1, _FP16), _EDGE),
            Case("t2-k20-h33-bf16", _P(2, 20, 33, _BF16), _EDGE),
            Case("t3-k2-h4100-fp16", _P(3, 2, 4100, _FP16, n_rows=2), _EDGE),
            Case("t4-k16-h128-none-fp32", _P(4, 16, 128, _FP32, n_rows=0), _EDGE),
            *(Case(f"t{t}-k8-h2048-bf16", _P(t, 8, 2048), _BENCH) for t in (1, 64, 512, 4096)),
        ),
        tuning_key=_tuning_key,
        space=_space,
        default_config=_default_config,
        why_illegal=_why_illegal,
        cost=_cost,
        outputs=("out",),
        providers=_peers,
        shape=_shape,
    )
)
# fmt: on
