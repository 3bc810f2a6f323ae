"""Each row times the weights of its expert: the grouped product of a mixture of experts.

    a[p]      = x[sorted_ids[p] // top_k], or x[p] where x is in the order of experts already
    y[p, n]   = sum over k of a[p, k] * weight[e, n, k],  e the expert whose rows p is among
    out[p, n] = silu(y[p, n]) * y[p, N / 2 + n]           with ``silu_and_mul``
    out[p, n] = y[p, n] * topk_weights[sorted_ids[p]]     with ``topk_weights``

x: [T or R, K], bf16, fp16 or fp32; weight: [E, N, K], as ``torch.nn.Linear`` has it, gate rows
before up rows where ``silu_and_mul`` multiplies the two; expert_offsets [E + 1] and sorted_ids [R]
as ``moe_dispatch`` makes them: expert e has the rows from expert_offsets[e] to that of e + 1; out:
[R, N or N / 2] in the order of experts. Sums are fp32, rounded once, behind the activation.

int8 weights (weight_scale: fp32 [E, N]) go the ways of ``masked_gemm``: W8A8 with x_q and x_scale,
or W8A16 (``high``); a bit per expert in ``mask`` keeps sensitive ones in W8A16.

Rows are padded to the tile only in thought: which expert and which rows a tile has is worked out
from the offsets, on the device, so a captured graph serves any routing and an expert without rows
has no tile. Tiles of an expert follow each other, those of the same rows first: where rows are few
the weights are read once, where they are many twice at nearly the same time.

On Ascend rows of tokens and weights of assignments are copied into the order of experts first: that
takes R rows of memory for a call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tkernels import device, moe_gemm_hopper
from tkernels.ascend_options import ASCEND_OPTIONS
from tkernels.check import (
    check_dtype,
    check_last_contiguous,
    check_no_overlap,
    check_own,
    check_shape,
    check_tensor,
    describe,
)
from tkernels.config import planned, resolve, why_no_room
from tkernels.device import Device, bind, bind_described, cdiv, next_power_of_2, tl, triton
from tkernels.moe_gemm_cases import (
    MOE_GEMM_CASES,
    moe_gemm_cost,
    moe_gemm_inputs,
    moe_gemm_peers,
    moe_gemm_shape,
)
from tkernels.ops.masked_gemm import _describer
from tkernels.ops.paged_attn import _has_pdl, _let_next_kernel_start, _wait_for_earlier_kernels
from tkernels.ops.quantize_per_token import quantize_per_token, quantize_per_token_ref
from tkernels.registry import Config, KernelSpec, Problem, op, register

_OP = "moe_gemm"


def moe_gemm_ref(
    x: torch.Tensor,
    weight: torch.Tensor,
    expert_offsets: torch.Tensor,
    sorted_ids: torch.Tensor,
    *,
    weight_scale: torch.Tensor | None = None,
    x_q: torch.Tensor | None = None,
    x_scale: torch.Tensor | None = None,
    topk_weights: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    top_k: int = 0,
    silu_and_mul: bool = False,
    high: bool = False,
    out: torch.Tensor | None = None,
    tickets: torch.Tensor | None = None,
    config: Config | None = None,
) -> torch.Tensor:
    """PyTorch version of ``moe_gemm``: expert by expert; rows of no expert are zero."""
    n_experts, n, _ = weight.shape
    y = x.new_zeros((len(sorted_ids), n // 2 if silu_and_mul else n)) if out is None else out
    if weight_scale is not None and not high and x_q is None:
        x_q, x_scale = quantize_per_token_ref(x)
    ends = expert_offsets.tolist()
    for e in range(n_experts):
        first, end = ends[e], ends[e + 1]
        if first == end:
            continue
        ids = sorted_ids[first:end].long()
        rows = ids // top_k if top_k else torch.arange(first, end, device=x.device)
        runs_high = high or (mask is not None and bool((mask[e >> 6] >> (e & 63)) & 1))
        if weight_scale is None or runs_high:
            sums = x[rows].float() @ weight[e].float().t()
        else:
            assert x_q is not None
            assert x_scale is not None
            # int8 products in fp64 are exact
            sums = (x_q[rows].double() @ weight[e].double().t()).float() * x_scale[rows, None]
        if weight_scale is not None:
            sums = sums * weight_scale[e]
        if silu_and_mul:
            gate, up = sums.chunk(2, -1)
            sums = torch.nn.functional.silu(gate.clamp_min(-1e4)) * up
        if topk_weights is not None:
            sums = sums * topk_weights.flatten()[ids, None]
        y[first:end] = sums.to(y.dtype)
    return y


# ---- kernels ---------------------------------------------------------------------------------
# fmt: off


@triton.jit
def _tiles_of_experts(offsets_ptr, n_experts, BLOCK_M: tl.constexpr, E_P2: tl.constexpr):
    """(row tiles of each expert, those up to and with it), int32 [E_P2]."""
    e = tl.arange(0, E_P2)
    ok = e < n_experts
    first = tl.load(offsets_ptr + e, mask=ok, other=0)
    end = tl.load(offsets_ptr + 1 + e, mask=ok, other=0)
    tiles = (end - first + BLOCK_M - 1) // BLOCK_M
    return tiles, tl.cumsum(tiles, 0)


@triton.jit
def _place(m_tile, tiles, upto, offsets_ptr, n_experts, BLOCK_M: tl.constexpr):
    """(expert, first row, end of the expert's rows) of a row tile."""
    before = upto <= m_tile
    expert = tl.minimum(tl.sum(before.to(tl.int32), 0), n_experts - 1)
    tiles_before = tl.sum(tl.where(before, tiles, 0), 0)
    row0 = tl.load(offsets_ptr + expert) + (m_tile - tiles_before) * BLOCK_M
    return expert, row0, tl.load(offsets_ptr + expert + 1)


@triton.jit
def _expert_sums(
    a_ptr, w_ptr, w_row, up_rows, a_rows, row_ok, stride_a, stride_w, n_cols_left, n_inner,
    ACC: tl.constexpr, SILU: tl.constexpr, EVEN_K: tl.constexpr, EVEN_N: tl.constexpr,
    SWAP: tl.constexpr, TMA: tl.constexpr, ASCEND: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):
    """a[a_rows] @ w[w_row..]^T as ACC [BLOCK_M, BLOCK_N], and the same of the rows ``up_rows`` on.

    ``w_row`` counts rows of all experts' weights; where SILU is not, the second is the first.
    """
    k = tl.arange(0, BLOCK_K)[None, :]
    c = tl.arange(0, BLOCK_N)
    if SWAP:
        acc = tl.zeros([BLOCK_N, BLOCK_M], ACC)
        up = tl.zeros([BLOCK_N, BLOCK_M], ACC)
    else:
        acc = tl.zeros([BLOCK_M, BLOCK_N], ACC)
        up = tl.zeros([BLOCK_M, BLOCK_N], ACC)
    a_tile = a_ptr + a_rows.to(tl.int64)[:, None] * stride_a + k
    a_ok = row_ok[:, None]
    if not TMA:
        w_ptr += w_row.to(tl.int64) * stride_w
        w_tile = w_ptr + c.to(tl.int64)[:, None] * stride_w + k
        u_tile = w_tile + up_rows.to(tl.int64) * stride_w
        w_ok = (c < n_cols_left)[:, None]
    for start in range(0, n_inner, BLOCK_K):
        there = k < n_inner - start  # zero times NaN is NaN: both end at the last column
        if EVEN_K:
            a = tl.load(a_tile + start, mask=a_ok, other=0)
        else:
            a = tl.load(a_tile + start, mask=a_ok & there, other=0)
        if TMA:
            w = w_ptr.load([w_row, start])
        elif EVEN_K and EVEN_N:
            w = tl.load(w_tile + start)
        elif EVEN_K:
            w = tl.load(w_tile + start, mask=w_ok, other=0)
        else:
            w = tl.load(w_tile + start, mask=w_ok & there, other=0)
        acc = _step(a, w, acc, ACC, SWAP, ASCEND)
        if SILU:
            if TMA:
                u = w_ptr.load([w_row + up_rows, start])
            elif EVEN_K and EVEN_N:
                u = tl.load(u_tile + start)
            elif EVEN_K:
                u = tl.load(u_tile + start, mask=w_ok, other=0)
            else:
                u = tl.load(u_tile + start, mask=w_ok & there, other=0)
            up = _step(a, u, up, ACC, SWAP, ASCEND)
    if SWAP:
        acc = tl.trans(acc)
        up = tl.trans(up)
    if not SILU:
        up = acc
    return acc, up


@triton.jit
def _step(a, w, acc, ACC: tl.constexpr, SWAP: tl.constexpr, ASCEND: tl.constexpr):
    if ASCEND and w.dtype != a.dtype:
        w = w.to(tl.float32)
    w = w.to(a.dtype)
    if SWAP:
        acc = tl.dot(w, tl.trans(a), acc, input_precision="ieee", out_dtype=ACC)
    else:
        acc = tl.dot(a, tl.trans(w), acc, input_precision="ieee", out_dtype=ACC)
    return acc


@triton.jit
def _store(
    acc, up, rows, row_ok, source, ids, cols, up_rows, expert_row, ws_ptr, xs_ptr, tw_ptr, out_ptr,
    stride_o, n_out, X_SCALE: tl.constexpr, W_SCALE: tl.constexpr, SILU: tl.constexpr,
    ROW_WEIGHT: tl.constexpr,
):
    """Scales, activation, routing weight; ``expert_row``: of the expert's first weight."""
    col_ok = cols < n_out
    y = acc.to(tl.float32)
    if SILU:
        u = up.to(tl.float32)
    if X_SCALE:
        xs = tl.load(xs_ptr + source, mask=row_ok, other=0.0)[:, None]
        y = y * xs
        if SILU:
            u = u * xs
    if W_SCALE:
        ws_ptr += expert_row.to(tl.int64)
        y = y * tl.load(ws_ptr + cols, mask=col_ok, other=0.0)[None, :]
        if SILU:
            u = u * tl.load(ws_ptr + up_rows + cols, mask=col_ok, other=0.0)[None, :]
    if SILU:
        # As in silu_and_mul: exp(-y) must not leave fp32, and NaN passes.
        y = tl.where(y < -88.0, 0.0, y / (1.0 + tl.exp(-y))) * u
    if ROW_WEIGHT:
        y = y * tl.load(tw_ptr + ids, mask=row_ok, other=0.0)[:, None]
    outs = out_ptr + rows.to(tl.int64)[:, None] * stride_o + cols[None, :]
    tl.store(outs, y.to(out_ptr.dtype.element_ty), mask=row_ok[:, None] & col_ok[None, :])


@triton.jit(do_not_specialize=["n_experts", "n_sources"])
def _moe_gemm_kernel(
    w_ptr, hw_ptr,  # tensor maps of the same weights, where TMA
    xq_ptr, x_ptr, offsets_ptr, ids_ptr, ws_ptr, xs_ptr, tw_ptr, mask_ptr, out_ptr,
    stride_w, stride_xq, stride_x, stride_o, n_weights, n_out, n_inner,
    n_experts, n_sources, n_n,
    LOW: tl.constexpr, HIGH: tl.constexpr,  # the ways that an expert may go
    W_SCALE: tl.constexpr, SILU: tl.constexpr, ROW_WEIGHT: tl.constexpr,
    TOP_K: tl.constexpr,  # 0: x is in the order of experts
    EVEN_K: tl.constexpr, EVEN_N: tl.constexpr, ONE_TILE: tl.constexpr, E_P2: tl.constexpr,
    TMA: tl.constexpr, ASCEND: tl.constexpr, PDL: tl.constexpr, SWAP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    HIGH_K: tl.constexpr,  # numbers of x that are as many bytes as BLOCK_K codes
):
    if PDL:
        _let_next_kernel_start()
        _wait_for_earlier_kernels()
    if ASCEND:
        # Walked by scalars: a prefix sum would need a vector of all experts at once. ``before``:
        # tiles of the experts so far, of which each program has every so manieth.
        programs = tl.num_programs(0)
        before = 0
        for expert in range(n_experts):
            first = tl.load(offsets_ptr + expert)
            end = tl.load(offsets_ptr + expert + 1)
            tiles = tl.cdiv(end - first, BLOCK_M) * n_n
            mine = (tl.program_id(0) + programs - before) % programs
            for tile in range(mine, tiles, programs):
                _moe_gemm_tile(
                    expert, first + tile // n_n * BLOCK_M, end, tile % n_n * BLOCK_N, w_ptr, hw_ptr,
                    xq_ptr, x_ptr, ids_ptr, ws_ptr, xs_ptr, tw_ptr, mask_ptr, out_ptr, stride_w,
                    stride_xq, stride_x, stride_o, n_weights, n_out, n_inner, n_sources, LOW, HIGH,
                    W_SCALE, SILU, ROW_WEIGHT, TOP_K, EVEN_K, EVEN_N, TMA, ASCEND, SWAP, BLOCK_M,
                    BLOCK_N, BLOCK_K, HIGH_K)
            before = (before + tiles) % programs
    else:
        tiles, upto = _tiles_of_experts(offsets_ptr, n_experts, BLOCK_M, E_P2)
        n_tiles = tl.sum(tiles, 0) * n_n
        if ONE_TILE:
            tile = tl.program_id(0)
            if tile < n_tiles:
                expert, row0, end = _place(
                    tile // n_n, tiles, upto, offsets_ptr, n_experts, BLOCK_M)
                _moe_gemm_tile(
                    expert, row0, end, tile % n_n * BLOCK_N, w_ptr, hw_ptr, xq_ptr, x_ptr, ids_ptr,
                    ws_ptr, xs_ptr, tw_ptr, mask_ptr, out_ptr, stride_w, stride_xq, stride_x,
                    stride_o, n_weights, n_out, n_inner, n_sources, LOW, HIGH, W_SCALE, SILU,
                    ROW_WEIGHT, TOP_K, EVEN_K, EVEN_N, TMA, ASCEND, SWAP, BLOCK_M, BLOCK_N, BLOCK_K,
                    HIGH_K)
        else:
            for tile in range(tl.program_id(0), n_tiles, tl.num_programs(0)):
                expert, row0, end = _place(
                    tile // n_n, tiles, upto, offsets_ptr, n_experts, BLOCK_M)
                _moe_gemm_tile(
                    expert, row0, end, tile % n_n * BLOCK_N, w_ptr, hw_ptr, xq_ptr, x_ptr, ids_ptr,
                    ws_ptr, xs_ptr, tw_ptr, mask_ptr, out_ptr, stride_w, stride_xq, stride_x,
                    stride_o, n_weights, n_out, n_inner, n_sources, LOW, HIGH, W_SCALE, SILU,
                    ROW_WEIGHT, TOP_K, EVEN_K, EVEN_N, TMA, ASCEND, SWAP, BLOCK_M, BLOCK_N, BLOCK_K,
                    HIGH_K)


@triton.jit
def _moe_gemm_tile(
    expert, row0, end, col0, w_ptr, hw_ptr, xq_ptr, x_ptr, ids_ptr, ws_ptr, xs_ptr, tw_ptr,
    mask_ptr, out_ptr, stride_w, stride_xq, stride_x, stride_o, n_weights, n_out, n_inner,
    n_sources,
    LOW: tl.constexpr, HIGH: tl.constexpr, W_SCALE: tl.constexpr, SILU: tl.constexpr,
    ROW_WEIGHT: tl.constexpr, TOP_K: tl.constexpr, EVEN_K: tl.constexpr, EVEN_N: tl.constexpr,
    TMA: tl.constexpr, ASCEND: tl.constexpr, SWAP: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, HIGH_K: tl.constexpr,
):
    """The outputs from col0 on of the rows of an expert from row0 to end, as many as a tile has."""
    rows = row0 + tl.arange(0, BLOCK_M)
    cols = col0 + tl.arange(0, BLOCK_N)
    row_ok = rows < end
    ids = rows
    source = rows
    if TOP_K > 0 or (ROW_WEIGHT and not ASCEND):
        ids = tl.load(ids_ptr + rows, mask=row_ok, other=0)
        ids = tl.minimum(tl.maximum(ids, 0), n_sources * max(TOP_K, 1) - 1)
    if TOP_K > 0:
        source = ids // TOP_K
    expert_row = expert * n_weights
    w_row = expert_row + col0
    up_rows = n_out  # gate rows come before up rows
    n_left = n_out - col0
    if LOW and HIGH:
        high = ((tl.load(mask_ptr + (expert >> 6)) >> (expert & 63).to(tl.int64)) & 1).to(tl.int32)
        low_end = (1 - high) * n_inner  # a way not taken has no step
        high_end = high * n_inner
        if ASCEND:
            acc, up = _expert_sums(
                xq_ptr, w_ptr, w_row, up_rows, source, row_ok, stride_xq, stride_w, n_left, low_end,
                tl.int32, SILU, EVEN_K, EVEN_N, SWAP, TMA, ASCEND, BLOCK_M, BLOCK_N,
                BLOCK_K)
            xs = tl.load(xs_ptr + source, mask=row_ok, other=0.0)[:, None]
            acc_high, up_high = _expert_sums(
                x_ptr, hw_ptr, w_row, up_rows, source, row_ok, stride_x, stride_w, n_left, high_end,
                tl.float32, SILU, EVEN_K, EVEN_N, SWAP, TMA, ASCEND, BLOCK_M, BLOCK_N,
                HIGH_K)
            # The way that was not taken has left zeros.
            acc_high = acc_high + acc.to(tl.float32) * xs
            if SILU:
                up_high = up_high + up.to(tl.float32) * xs
            _store(
                acc_high, up_high, rows, row_ok, source, ids, cols, up_rows, expert_row, ws_ptr,
                xs_ptr, tw_ptr, out_ptr, stride_o, n_out, False, W_SCALE, SILU, ROW_WEIGHT)
        else:
            if high == 0:
                acc, up = _expert_sums(
                    xq_ptr, w_ptr, w_row, up_rows, source, row_ok, stride_xq, stride_w, n_left,
                    n_inner, tl.int32, SILU, EVEN_K, EVEN_N, SWAP, TMA, ASCEND, BLOCK_M,
                    BLOCK_N, BLOCK_K)
                _store(
                    acc, up, rows, row_ok, source, ids, cols, up_rows, expert_row, ws_ptr, xs_ptr,
                    tw_ptr, out_ptr, stride_o, n_out, True, W_SCALE, SILU, ROW_WEIGHT)
            else:
                # Names of their own: those of both branches would have to be of one type.
                acc_high, up_high = _expert_sums(
                    x_ptr, hw_ptr, w_row, up_rows, source, row_ok, stride_x, stride_w, n_left,
                    n_inner, tl.float32, SILU, EVEN_K, EVEN_N, SWAP, TMA, ASCEND,
                    BLOCK_M, BLOCK_N, HIGH_K)
                _store(
                    acc_high, up_high, rows, row_ok, source, ids, cols, up_rows, expert_row, ws_ptr,
                    xs_ptr, tw_ptr, out_ptr, stride_o, n_out, False, W_SCALE, SILU, ROW_WEIGHT)
    else:
        if LOW:
            acc, up = _expert_sums(
                xq_ptr, w_ptr, w_row, up_rows, source, row_ok, stride_xq, stride_w, n_left, n_inner,
                tl.int32, SILU, EVEN_K, EVEN_N, SWAP, TMA, ASCEND, BLOCK_M, BLOCK_N,
                BLOCK_K)
        else:
            acc, up = _expert_sums(
                x_ptr, hw_ptr, w_row, up_rows, source, row_ok, stride_x, stride_w, n_left, n_inner,
                tl.float32, SILU, EVEN_K, EVEN_N, SWAP, TMA, ASCEND, BLOCK_M, BLOCK_N,
                HIGH_K)
        _store(
            acc, up, rows, row_ok, source, ids, cols, up_rows, expert_row, ws_ptr, xs_ptr, tw_ptr,
            out_ptr, stride_o, n_out, LOW, W_SCALE, SILU, ROW_WEIGHT)


@triton.jit(do_not_specialize=["n_rows", "n_sources"])
def _gather_rows_kernel(
    x_ptr, ids_ptr, to_ptr, stride_x, n_inner, n_rows, n_sources, TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Rows of tokens in the order of experts."""
    k = tl.arange(0, BLOCK)
    for row in range(tl.program_id(0), n_rows, tl.num_programs(0)):
        source = tl.minimum(tl.maximum(tl.load(ids_ptr + row) // TOP_K, 0), n_sources - 1)
        source_ptr = x_ptr + source.to(tl.int64) * stride_x
        row_ptr = to_ptr + tl.cast(row, tl.int64) * n_inner
        for start in range(0, n_inner, BLOCK):
            there = k < n_inner - start
            tl.store(row_ptr + start + k, tl.load(source_ptr + start + k, mask=there), mask=there)


# fmt: on


@op
def moe_gemm(
    x: torch.Tensor,
    weight: torch.Tensor,
    expert_offsets: torch.Tensor,
    sorted_ids: torch.Tensor,
    *,
    weight_scale: torch.Tensor | None = None,
    x_q: torch.Tensor | None = None,
    x_scale: torch.Tensor | None = None,
    topk_weights: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    top_k: int = 0,
    silu_and_mul: bool = False,
    high: bool = False,
    out: torch.Tensor | None = None,
    tickets: torch.Tensor | None = None,
    config: Config | None = None,
) -> torch.Tensor:
    """Each row times the weights of its expert.

    Args:
        x: bf16, fp16 or fp32, contiguous columns. With ``top_k`` [T, K]: a token's row serves its
            top_k assignments. Without [R, K], in the order of experts.
        weight: [E, N, K], contiguous; of x's dtype, or int8.
        expert_offsets: int32 [E + 1], ascending from 0: the rows of expert e are those from
            expert_offsets[e] to expert_offsets[e + 1].
        sorted_ids: int32 [R]: which assignment (token * top_k + choice) each row is. Rows from
            expert_offsets[E] on belong to no expert.
        weight_scale: fp32 [E, N], with int8 weights and only with them.
        x_q, x_scale: int8 and fp32, x as ``quantize_per_token`` makes it; None makes them here
            where an expert can run low.
        topk_weights: fp32, R elements, contiguous: a factor for each assignment.
        mask: int64 [ceil(E / 64)]: with int8 weights, bit e % 64 of word e // 64 lets expert e have
            unquantised activations (W8A16). It must not change while a call runs.
        top_k: assignments a token, where x is by token; 0 where it is by row.
        silu_and_mul: the first N / 2 outputs are a gate, the others what it multiplies.
        high: with int8 weights and without a mask, all experts run W8A16.
        out: [R, N] or [R, N / 2] of x's dtype, own row stride; it may not share memory with an
            argument. Rows of no expert are left as they are.
        tickets: int32 [1], 0, as ``moe_dispatch`` makes them, for this call alone: what counts the
            tiles that are taken. None makes it here, by a launch more, where it is needed.
        config: launch config; None looks it up.

    Returns:
        ``out``, or a new tensor, whose rows of no expert are undefined. NaN in a row of x stays in
        the rows made from it.

    Raises:
        TypeError, ValueError: an argument of the wrong kind, shape, dtype, stride or device.
    """
    if out is None:
        check_tensor(_OP, "x", x)
        check_tensor(_OP, "weight", weight)
        check_tensor(_OP, "sorted_ids", sorted_ids)
        if weight.dim() != 3:
            raise ValueError(f"{_OP}: weight must have shape [E, N, K], got {describe(weight)}")
        if sorted_ids.dim() != 1:
            raise ValueError(f"{_OP}: sorted_ids must have shape [R], got {describe(sorted_ids)}")
        out = _empty_out(x, weight, expert_offsets, sorted_ids, silu_and_mul=silu_and_mul)
    else:
        check_own(_OP, "out", out, x=x)
    tensors: tuple[torch.Tensor, ...] = (x, weight, expert_offsets, sorted_ids, out)
    present = ""
    if weight_scale is not None:
        tensors, present = (*tensors, weight_scale), present + "w"
    if x_q is not None:
        tensors, present = (*tensors, x_q), present + "q"
    if x_scale is not None:
        tensors, present = (*tensors, x_scale), present + "s"
    if topk_weights is not None:
        tensors, present = (*tensors, topk_weights), present + "t"
    if mask is not None:
        tensors, present = (*tensors, mask), present + "m"
    if tickets is not None:
        tensors, present = (*tensors, tickets), present + "c"
    run = planned(_plan, config, tensors, present, top_k, silu_and_mul, high)
    if run is not None:
        run(x, weight, expert_offsets, sorted_ids, out, weight_scale, x_q, x_scale, topk_weights,
            mask, tickets)  # fmt: skip
    return out


def _empty_out(
    x: torch.Tensor,
    weight: torch.Tensor,
    expert_offsets: torch.Tensor,
    sorted_ids: torch.Tensor,
    *,
    silu_and_mul: bool = False,
    **_: Any,
) -> torch.Tensor:
    """What ``moe_gemm`` with these arguments returns, without values."""
    n = weight.shape[1]
    shape = sorted_ids.shape[0], n // 2 if silu_and_mul else n
    return torch.empty(shape, dtype=x.dtype, device=x.device)


_Run = Callable[..., None]
_NAMES = {
    "w": "weight_scale", "q": "x_q", "s": "x_scale", "t": "topk_weights", "m": "mask",
    "c": "tickets",
}  # fmt: skip


def _plan(
    x: torch.Tensor,
    weight: torch.Tensor,
    expert_offsets: torch.Tensor,
    sorted_ids: torch.Tensor,
    out: torch.Tensor,
    *rest: Any,
    config: Config | None,
) -> _Run | None:
    """What runs such a call, given all its tensors; None where there is nothing to do."""
    *more, present, top_k, silu_and_mul, high = rest
    given = {_NAMES[letter]: t for letter, t in zip(present, more, strict=True)}
    _check(x, weight, expert_offsets, sorted_ids, out, given, top_k, silu_and_mul, high)
    (e, n, k), r = weight.shape, len(sorted_ids)
    if r == 0:
        return None
    int8 = weight.dtype == torch.int8
    path = "masked" if "mask" in given else "int8" if int8 and not high else "high"
    x_q = given.get("x_q")
    read = [weight, *([x] if path != "int8" else []), *([] if x_q is None else [x_q])]
    # Rows that start at multiples of 16 bytes, not all at one: a tensor map can express no other.
    steps = [t.stride(-2) * t.element_size() for t in read]
    aligned = k % 16 == 0 and all(step % 16 == 0 and step > 0 for step in steps)
    values = (r, e, n, k, x.dtype, path, int8, silu_and_mul, top_k, aligned)
    cfg, max_programs = resolve(SPEC, values, config)
    facts = {
        "LOW": path != "high",
        "HIGH": path != "int8",
        "W_SCALE": int8,
        "SILU": silu_and_mul,
        "ROW_WEIGHT": "topk_weights" in given,
        "TOP_K": top_k,
    }
    sizes = (r, e, n, k, len(x), x.element_size())
    strides = (weight.stride(1), k if x_q is None else x_q.stride(0), x.stride(0), out.stride(0))
    if device.current().is_npu:
        run = _gathering(sizes, facts, strides, cfg, max_programs)
    elif cfg["variant"] == "portable":
        run = _bind(sizes, facts, strides, cfg, max_programs)
    else:
        if cfg["variant"] == "hopper":
            fast = moe_gemm_hopper.bind(sizes, facts, strides, cfg)
            plain = {**cfg, **moe_gemm_hopper.PLAIN}
        else:
            fast = _bind(sizes, facts, strides, cfg, max_programs)
            plain = {**cfg, "variant": "portable"}
        run = _by_address(fast, _bind(sizes, facts, strides, plain, max_programs))
    return _quantizing(run) if path != "high" and x_q is None else run


def _quantizing(run: _Run) -> _Run:
    """``run`` with codes and scales of its own making."""

    def quantizing(x: torch.Tensor, *tensors: Any) -> None:
        *front, _, _, weights, mask, tickets = tensors
        run(x, *front, *quantize_per_token(x), weights, mask, tickets)

    return quantizing


def _gathering(
    sizes: tuple[int, int, int, int, int, int],
    facts: dict[str, Any],
    strides: tuple[int, ...],
    config: Config,
    max_programs: int,
) -> _Run:
    """What runs the kernels on what is put into the order of experts before: rows, scales, weights.

    An NPU copies what follows each other at once, but rows of anywhere one by one, and would do so
    again for each tile of columns.
    """
    r, e, n, k, n_sources, size = sizes
    stride_w, stride_xq, stride_x, stride_o = strides
    by_token = facts["TOP_K"] > 0
    options = {name: value for name, value in config.items() if name in ASCEND_OPTIONS}
    copy_rows, copy_scales, copy_weights = (
        bind(
            _gather_rows_kernel,
            (min(r, device.current().num_cores),),
            TOP_K=rows_a_source,
            BLOCK=min(4096, next_power_of_2(width)),
            **options,
        )
        for width, rows_a_source in ((k, facts["TOP_K"]), (1, facts["TOP_K"]), (1, 1))
    )
    if by_token:
        sizes, strides = (r, e, n, k, r, size), (stride_w, k, k, stride_o)
    run = _bind(sizes, {**facts, "TOP_K": 0}, strides, config, max_programs)

    def gathering(x: torch.Tensor, weight: torch.Tensor, *tensors: Any) -> None:
        offsets, ids, out, ws, x_q, xs, weights, *others = tensors
        if by_token and facts["LOW"]:
            codes, scales = x_q.new_empty((r, k)), xs.new_empty((r,))
            copy_rows(x_q, ids, codes, stride_xq, k, r, n_sources)
            copy_scales(xs, ids, scales, 1, 1, r, n_sources)
            x_q, xs = codes, scales
        if by_token and facts["HIGH"]:
            rows = x.new_empty((r, k))
            copy_rows(x, ids, rows, stride_x, k, r, n_sources)
            x = rows
        if weights is not None:
            sorted_weights = weights.new_empty((r,))
            copy_weights(weights, ids, sorted_weights, 1, 1, r, r)
            weights = sorted_weights
        run(x, weight, offsets, ids, out, ws, x_q, xs, weights, *others)

    return gathering


def _by_address(described: _Run, portable: _Run) -> _Run:
    """Tensor maps, and what is read several numbers at a time, need addresses that divide by 16.

    What remains is read a number at a time: ``tickets`` and a chunk's ``topk_weights`` may be parts
    of tensors.
    """
    addressable = not device.current().compile_only

    def run(x: torch.Tensor, weight: torch.Tensor, *tensors: Any) -> None:
        every = 0
        if addressable:
            _, _, out, ws, x_q, *_ = tensors
            every = x.data_ptr() | weight.data_ptr() | out.data_ptr()
            for t in (ws, x_q):
                every |= 0 if t is None else t.data_ptr()
        (portable if every % 16 else described)(x, weight, *tensors)

    return run


def most_tiles(n_rows: int, n_experts: int, block_m: int) -> int:
    """Row tiles at the most: all experts but one have a row, and that one the others."""
    few = min(n_rows, n_experts) - 1
    return few + cdiv(n_rows - few, block_m)


def _bind(
    sizes: tuple[int, int, int, int, int, int],
    facts: dict[str, Any],
    strides: tuple[int, ...],
    config: Config,
    max_programs: int,
) -> _Run:
    """What runs the kernels above, given all tensors of a call like this one."""
    r, e, n, k, n_sources, size = sizes
    dev = device.current()
    cfg = {"PDL": False, "SWAP": False, **config}  # Ascend has neither
    tma = cfg.pop("variant") == "tma"
    block_m, block_n, block_k = (cfg[name] for name in ("BLOCK_M", "BLOCK_N", "BLOCK_K"))
    n_out = n // 2 if facts["SILU"] else n
    n_n = cdiv(n_out, block_n)
    n_tiles = most_tiles(r, e, block_m) * n_n
    programs = min(n_tiles, max_programs * dev.num_dot_cores // dev.num_cores)
    high_step = block_k // size  # BLOCK_K is in bytes of x
    low_step = block_k if facts["LOW"] else high_step
    constants = {
        **facts,
        "EVEN_K": k % max(low_step, high_step) == 0,
        "EVEN_N": n_out % block_n == 0,
        "ONE_TILE": programs == n_tiles and not dev.is_npu,
        "E_P2": 1 if dev.is_npu else next_power_of_2(e),  # there no vector of experts is made
        "TMA": tma,
        "ASCEND": dev.is_npu,
        **cfg,
        "HIGH_K": high_step,
        **device.rounding_each_step(),
        **({"launch_pdl": True} if cfg["PDL"] else {}),
    }
    if tma:
        whole = (e * n, k, strides[0], block_n)
        maps = (
            _describer(*whole, low_step),
            _describer(*whole, high_step if facts["HIGH"] else low_step),
        )
        start = bind_described(_moe_gemm_kernel, (programs,), maps, **constants)
    else:
        start = bind(_moe_gemm_kernel, (programs,), **constants)
    numbers = (*strides, n, n_out, k, e, n_sources, n_n)

    def run(x: torch.Tensor, weight: torch.Tensor, *tensors: Any) -> None:
        offsets, ids, out, ws, x_q, xs, weights, mask, _ = tensors
        # What is not there is stood in for by something that is, and not read.
        x_q, xs, ws, weights, mask = (
            offsets if t is None else t for t in (x_q, xs, ws, weights, mask)
        )
        start(weight, weight, x_q, x, offsets, ids, ws, xs, weights, mask, out, *numbers)

    return run


def _check(
    x: torch.Tensor,
    weight: torch.Tensor,
    expert_offsets: torch.Tensor,
    sorted_ids: torch.Tensor,
    out: torch.Tensor,
    given: dict[str, torch.Tensor],
    top_k: Any,
    silu_and_mul: Any,
    high: Any,
) -> None:
    """All that metadata can tell about the arguments."""
    for name, value in (("silu_and_mul", silu_and_mul), ("high", high)):
        if type(value) is not bool:
            raise TypeError(f"{_OP}: {name} must be a bool, got {describe(value)}")
    if type(top_k) is not int:
        raise TypeError(f"{_OP}: top_k must be an int, got {describe(top_k)}")
    tensors = {
        "x": x, "weight": weight, "expert_offsets": expert_offsets, "sorted_ids": sorted_ids,
        **given, "out": out,
    }  # fmt: skip
    for name, t in tensors.items():
        check_tensor(_OP, name, t)
    check_dtype(_OP, "x", x, (torch.bfloat16, torch.float16, torch.float32))
    check_dtype(_OP, "weight", weight, (x.dtype, torch.int8))
    if x.dim() != 2 or not 1 <= x.shape[1] < 2**17:
        raise ValueError(f"{_OP}: x must have shape [T or R, 1 <= K < 131072], got {describe(x)}")
    k = x.shape[1]
    if weight.dim() != 3 or weight.shape[2] != k or 0 in weight.shape:
        raise ValueError(
            f"{_OP}: weight must have shape [E >= 1, N >= 1, K={k}], got {describe(weight)}"
        )
    e, n, _ = weight.shape
    if e * n >= 2**31 or e > 4096:
        raise ValueError(
            f"{_OP}: weight must have at most 4096 experts and 2^31 rows, got {describe(weight)}"
        )
    if silu_and_mul and n % 2:
        raise ValueError(f"{_OP}: weight must have gate and up rows, got {describe(weight)}")
    check_shape(_OP, "sorted_ids", sorted_ids, R=None)
    r = len(sorted_ids)
    if top_k < 0 or (top_k and len(x) * top_k != r):
        raise ValueError(
            f"{_OP}: top_k must be 0, or R={r} rows divided by the {len(x)} of x, got {top_k}"
        )
    source = "T" if top_k else "R"
    rows = len(x) if top_k else r
    wanted: dict[str, tuple[tuple[torch.dtype, ...], dict[str, int | None]]] = {
        "x": ((x.dtype,), {source: rows, "K": k}),
        "expert_offsets": ((torch.int32,), {"E+1": e + 1}),
        "sorted_ids": ((torch.int32,), {"R": r}),
        "weight_scale": ((torch.float32,), {"E": e, "N": n}),
        "x_q": ((torch.int8,), {source: rows, "K": k}),
        "x_scale": ((torch.float32,), {source: rows}),
        "mask": ((torch.int64,), {"n_words": cdiv(e, 64)}),
        "tickets": ((torch.int32,), {"one": 1}),
        "out": ((x.dtype,), {"R": r, "N": n // 2 if silu_and_mul else n}),
    }
    for name, (dtypes, shape) in wanted.items():
        if name in tensors:
            check_dtype(_OP, name, tensors[name], dtypes)
            check_shape(_OP, name, tensors[name], **shape)
    for name, t in tensors.items():
        check_last_contiguous(_OP, name, t)
    check_no_overlap(_OP, "out", out)
    for name in ("weight", "weight_scale"):
        if name in tensors and not tensors[name].is_contiguous():
            raise ValueError(f"{_OP}: {name} must be contiguous, got {describe(tensors[name])}")
    if (weights := given.get("topk_weights")) is not None:
        check_dtype(_OP, "topk_weights", weights, (torch.float32,))
        if weights.numel() != r or not weights.is_contiguous():
            raise ValueError(
                f"{_OP}: topk_weights must be contiguous with R={r} elements, got "
                f"{describe(weights)}"
            )
    int8 = weight.dtype == torch.int8
    if int8 != ("weight_scale" in given):
        raise ValueError(
            f"{_OP}: weight_scale must be given with int8 weights and only with them, got "
            f"{describe(weight)} and {describe(given.get('weight_scale'))}"
        )
    for name in ("x_q", "x_scale", "mask"):
        if name in given and not int8:
            raise ValueError(f"{_OP}: {name} must be None without int8 weights, got a tensor")
    for one, other in (("x_q", "x_scale"), ("x_scale", "x_q")):
        if other in given and one not in given:
            raise ValueError(f"{_OP}: {one} must be given with {other}, got None")
    if high and ("mask" in given or not int8):
        raise ValueError(f"{_OP}: high must be False with a mask or 16-bit weights, got True")


# ---- facts for tests, bench and tuner --------------------------------------------------------

_FIELDS = (
    "rows", "experts", "n", "k", "dtype", "path", "int8", "silu_and_mul", "top_k", "aligned",
)  # fmt: skip


def _tuning_key(problem: Problem) -> dict[str, Any]:
    p = problem
    per_expert = 1
    while per_expert * p["experts"] < p["rows"]:
        per_expert *= 4
    return {
        # What may run high shares a config, or a mask of ones could add in another order.
        "path": ("w8_" if p["int8"] else "w16_") + ("int8" if p["path"] == "int8" else "high"),
        "aligned": p["aligned"],
        "silu_and_mul": p["silu_and_mul"],
        "few": p["rows"] <= p["experts"],
        "rows_an_expert_up_to": min(per_expert, 1024),
        "n": p["n"],
        "k": p["k"],
    }


def _has_tma(dev: Device) -> bool:
    """Hopper and later; and the interpreter, so that tests go that way."""
    return dev.arch in ("sm90", "sm100", "sm103", "sm120", "interpret")


def _space(dev: Device) -> dict[str, list[Any]]:
    space: dict[str, list[Any]] = {
        "BLOCK_M": [16, 32, 64, 128, 144, 160, 256],
        "BLOCK_N": [16, 32, 64, 128, 256],
        "BLOCK_K": [32, 64, 128, 256, 512],
        "programs_per_core": [0, 1, 2, 4],
        "variant": ["portable"],
    }
    if not dev.registers:
        heights = [16, 32, 64, 128, 256]
        return {
            **space,
            "BLOCK_M": heights,
            "BLOCK_K": [32, 64, 128, 256],
            "programs_per_core": [1],
        }
    if _has_tma(dev):
        space["variant"] = ["portable", "tma", *(["hopper"] if dev.arch == "sm90" else [])]
    return {
        **space,
        "SWAP": [False, True],
        "PDL": [False, True] if _has_pdl(dev) else [False],
        "num_warps": [2, 4, 8],
        "num_stages": [1, 2, 3, 4, 5, 6],
    }


def _default_config(problem: Problem, dev: Device) -> Config:
    p = problem
    per_expert = max(1, p["rows"] // p["experts"])
    rows = min(128, max(16, next_power_of_2(per_expert)))
    n_out = p["n"] // 2 if p["silu_and_mul"] else p["n"]
    config: Config = {
        "BLOCK_M": rows,
        "BLOCK_N": min(64, max(16, next_power_of_2(n_out))),
        "BLOCK_K": 128,
        "variant": "portable",
        "programs_per_core": 1,
    }
    if not dev.registers:  # as much as fits: what is read again comes past a core's port
        columns = 64 if _widens(p) and p["silu_and_mul"] else 128
        columns = min(columns, max(16, next_power_of_2(n_out)))
        return {**config, "BLOCK_N": columns, "BLOCK_K": 256}
    # Measured on an H200 with Qwen3-30B-A3B's sizes.
    few = p["rows"] <= 2 * p["experts"]
    config |= {"variant": "tma" if p["aligned"] and _has_pdl(dev) else "portable",
               "programs_per_core": 0, "SWAP": False, "PDL": _has_pdl(dev), "num_warps": 4,
               "num_stages": 3}  # fmt: skip
    if few:  # a program's latency counts
        config |= {"BLOCK_K": 256, "num_warps": 2, "BLOCK_N": min(32, config["BLOCK_N"])}
        config["num_stages"] = 4 if p["silu_and_mul"] else 5
    elif rows == 16:  # weights are read once: much of them ahead
        config["BLOCK_K"] = 256
    elif rows <= 64:
        config["BLOCK_M"] = 64 if per_expert >= 24 else rows
        if not p["silu_and_mul"] and n_out >= 128:
            config |= {"BLOCK_N": 128, "num_stages": 4}
    else:
        hopper = {**config, **moe_gemm_hopper.FIXED, "BLOCK_M": 144, "num_stages": 4}
        hopper["BLOCK_N"] = 128 if p["silu_and_mul"] else 256
        if _why_illegal(hopper, problem, dev) is None:
            return hopper
        config |= {"BLOCK_N": config["BLOCK_N"] * 2, "num_warps": 8}
    if not p["aligned"]:  # loads of single bytes take registers
        config["BLOCK_K"] = 64
    for name, least in (("num_stages", 2), ("BLOCK_K", 64), ("num_stages", 1), ("BLOCK_N", 32)):
        while config[name] > least and _shared_bytes(config, problem) > dev.local_mem_bytes:
            config[name] = config[name] - 1 if name == "num_stages" else config[name] // 2
    return config


def _shared_bytes(config: Config, problem: Problem) -> int:
    """Stages of all operands, int8 weights made 16-bit ones, and the barriers of tensor maps."""
    m, k = config["BLOCK_M"], config["BLOCK_K"]
    n = config["BLOCK_N"] * (2 if problem["silu_and_mul"] else 1)
    stages = config["num_stages"] * (m + n) * k
    # Codes become x's numbers, of which a step has fewer.
    widened = n * k if _widens(problem) else 0
    return int(max(stages + widened, m * n * 2) + 1024)


def _widens(problem: Problem) -> bool:
    """Whether codes of weights may become x's numbers."""
    return bool(problem["int8"] and problem["path"] != "int8")


def _why_illegal(config: Config, problem: Problem, dev: Device) -> str | None:
    for name, least in (("BLOCK_M", 16), ("BLOCK_N", 16), ("BLOCK_K", 32)):
        odd = config[name] & (config[name] - 1) and config["variant"] != "hopper"
        if config[name] < least or odd:
            return f"{name} must be a power of two from {least} on, got {config[name]}"
    m, n, k = config["BLOCK_M"], config["BLOCK_N"], config["BLOCK_K"]
    both = n * (2 if problem["silu_and_mul"] else 1)
    variant = config["variant"]
    if variant not in ("portable", "tma", "hopper"):
        return f"variant must be portable, tma or hopper, got {variant!r}"
    if not dev.registers:
        if variant != "portable":
            return f"variant {variant} needs an NVIDIA device, got {dev.arch}"
        # Huawei's compiler is the judge; this is what ascendnpu-ir 1.2.0 takes with all features.
        if m * n > 16384 or m * both > (16384 if _widens(problem) else 32768):
            return f"sums of {m} rows and {both} columns overflow UB or L0C"
        if both * k > 65536 or k > 256:
            return f"{both} columns of weights and {k} bytes overflow UB or L1"
        return None
    if variant == "tma" and not (_has_tma(dev) and problem["aligned"]):
        return "variant tma needs sm90 or later, and rows that divide by 16 bytes"
    if variant == "tma" and n > 256:
        return f"variant tma reads 256 rows at most, got {n}"
    if config["PDL"] and not _has_pdl(dev):
        return f"PDL needs sm90 or later, got {dev.arch}"
    if variant == "hopper":
        return moe_gemm_hopper.why_illegal(config, problem, dev)
    if why := why_no_room(config, dev, _shared_bytes(config, problem)):
        return why
    if (registers := m * both // (config["num_warps"] * 32)) > 128:
        return f"the sums alone take {registers} of 255 registers a thread"
    return None


SPEC = register(
    KernelSpec(
        name=_OP,
        launch=moe_gemm,
        reference=moe_gemm_ref,
        problem_fields=_FIELDS,
        make_inputs=moe_gemm_inputs,
        cases=MOE_GEMM_CASES,
        tuning_key=_tuning_key,
        space=_space,
        default_config=_default_config,
        why_illegal=_why_illegal,
        cost=moe_gemm_cost,
        counters=("tickets",),
        outputs=("out",),
        contiguous=("weight", "weight_scale", "topk_weights"),
        empty_results=_empty_out,
        providers=moe_gemm_peers,
        shape=moe_gemm_shape,
    )
)
