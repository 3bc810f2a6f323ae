"""A decode step's attention in one kernel: ``fused_qk_norm_rope_append``, then ``paged_attn``.

    q, k, v = the heads of qkv[b], q and k normed and rotated      [Hq, D], [Hk, D], [Hk, D]
    k_cache, v_cache at slot_mapping[b] = k, v
    out[b] = softmax(scale * q @ keys^T) @ values      keys, values: of the sequence's tokens so far

qkv: [B, (Hq + 2 Hk) D], one token a sequence; caches: [num_blocks, block_size, Hk, D]. In a decode
step of one sequence nearly all the time of the separate kernels is waiting: for launches, and for
loads that need what others brought. Here nothing but qkv itself waits for the kernel that makes it.

A program takes a sequence, a KV head with its query heads, and a share of the keys, dealt out as in
``paged_attn``, whose second kernel merges the shares. The keys before the new token are in the
cache since an earlier step, so before the program waits (``PDL``) it reads the length, the table,
the factors, and its first BLOCK_N keys and values into registers. The new key and value never come
from the cache: the program whose turn it would be starts its softmax with them, and stores them.
Rotation pairs dimension d with d + D / 2, so q and k are two halves, and a score is two products.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from tkernels import attention, check, device, rotary
from tkernels.attention_cases import paged_cost, paged_inputs, paged_problem, paged_shape
from tkernels.check import check_shape, check_tensor, describe
from tkernels.config import planned, resolve, why_no_launch, why_no_room
from tkernels.device import Device, bind, cdiv, next_power_of_2, tl, triton
from tkernels.ops import append_paged_kv as append
from tkernels.ops import fused_qk_norm_rope as norm_rope
from tkernels.ops import fused_qk_norm_rope_append as norm_rope_append
from tkernels.ops import paged_attn as paged
from tkernels.ops.fused_qk_norm_rope_append import under_name
from tkernels.ops.paged_attn import (
    _LOWEST,
    _finish,
    _has_pdl,
    _let_next_kernel_start,
    _sequence,
    _wait_for_earlier_kernels,
)
from tkernels.ops.rope import load_factors, load_pairs
from tkernels.registry import Case, Config, Cost, KernelSpec, Problem, op, register

_OP = "fused_qk_norm_rope_append_attn"


def fused_qk_norm_rope_append_attn_ref(
    qkv: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    positions: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    *,
    num_heads: int,
    num_kv_heads: int,
    eps: float = 1e-6,
    scale: float | None = None,
    out: torch.Tensor | None = None,
    config: Config | None = None,
) -> torch.Tensor:
    """PyTorch version of ``fused_qk_norm_rope_append_attn``. It reads lengths."""
    q = norm_rope_append.fused_qk_norm_rope_append_ref(
        qkv,
        q_weight,
        k_weight,
        cos_sin_cache,
        positions,
        k_cache,
        v_cache,
        slot_mapping,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        eps=eps,
    )
    attended = paged.paged_attn_ref(
        q, k_cache, v_cache, block_table, context_lens, scale=scale, out=out
    )
    assert isinstance(attended, torch.Tensor)
    return attended


# ---- kernel ----------------------------------------------------------------------------------
# fmt: off


@triton.jit
def _load_keys(
    block, end,  # block of BLOCK_N keys, of which those before ``end`` are read
    table_ptr, k_ptr, v_ptr, stride_kb, stride_ks, stride_vb, stride_vs, max_blocks,
    HEAD_DIM: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, FIRST: tl.constexpr,
):
    """Both halves of the keys, and the values; zeros from ``end`` on."""
    n = tl.arange(0, BLOCK_N)
    start = block * BLOCK_N
    # The table is read without knowing ``end``, so that the two loads do not wait for each other.
    if BLOCK_N <= BLOCK_SIZE:
        column = start // BLOCK_SIZE
        if FIRST:  # may lie past the end of the table
            page = tl.load(table_ptr + column, mask=column < max_blocks, other=0).to(tl.int64)
        else:
            page = tl.load(table_ptr + column).to(tl.int64)
        slot = (start % BLOCK_SIZE + n).to(tl.int64)
    else:
        column = start // BLOCK_SIZE + n // BLOCK_SIZE
        page = tl.load(table_ptr + column, mask=column < max_blocks, other=0).to(tl.int64)
        slot = (n % BLOCK_SIZE).to(tl.int64)
    there = (n < end - start)[:, None]
    half: tl.constexpr = HEAD_DIM // 2
    pairs = tl.arange(0, BLOCK_HALF)[None, :]
    d = tl.arange(0, BLOCK_D)[None, :]
    k_rows = k_ptr + (page * stride_kb + slot * stride_ks)[:, None]
    v_rows = v_ptr + (page * stride_vb + slot * stride_vs)[:, None]
    k_a = tl.load(k_rows + pairs, mask=there & (pairs < half), other=0.0)
    k_b = tl.load(k_rows + half + pairs, mask=there & (pairs < half), other=0.0)
    v = tl.load(v_rows + d, mask=there & (d < HEAD_DIM), other=0.0)
    return k_a, k_b, v


@triton.jit
def _attend_keys(
    acc, top, total, q_a, q_b, k_a, k_b, v, block, end, score_scale, BLOCK_N: tl.constexpr
):
    """The softmax so far, and the keys of a block before ``end``."""
    s = tl.dot(q_a, tl.trans(k_a), input_precision="ieee")
    s = tl.dot(q_b, tl.trans(k_b), s, input_precision="ieee") * score_scale
    s = tl.where((tl.arange(0, BLOCK_N) <= end - 1 - block * BLOCK_N)[None, :], s, float("-inf"))
    new_top = tl.maximum(top, tl.max(s, 1))
    p = tl.math.exp2(s - new_top[:, None])
    shrink = tl.math.exp2(top - new_top)
    acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
    total = total * shrink + tl.sum(p, 1)  # across warps, behind the product that does not need it
    return acc, new_top, total


@triton.jit
def _attend_blocks(
    acc, top, total, q_a, q_b, first, n_blocks, step, end, score_scale,
    table_ptr, k_ptr, v_ptr, stride_kb, stride_ks, stride_vb, stride_vs, max_blocks,
    HEAD_DIM: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
):
    for block in range(first, n_blocks, step):
        k_a, k_b, v = _load_keys(
            block, end, table_ptr, k_ptr, v_ptr, stride_kb, stride_ks, stride_vb, stride_vs,
            max_blocks, HEAD_DIM, BLOCK_HALF, BLOCK_D, BLOCK_SIZE, BLOCK_N, False)
        acc, top, total = _attend_keys(
            acc, top, total, q_a, q_b, k_a, k_b, v, block, end, score_scale, BLOCK_N)
    return acc, top, total


@triton.jit
def _normed_and_turned(a, b, weight_a, weight_b, cos, sin, eps, HEAD_DIM: tl.constexpr):
    scale = tl.rsqrt(tl.sum(a * a + b * b, axis=1) / HEAD_DIM + eps)[:, None]
    a, b = a * scale * weight_a, b * scale * weight_b
    return a * cos - b * sin, b * cos + a * sin


@triton.jit
def _attn_tile(
    tile, qkv_ptr, q_weight_ptr, k_weight_ptr, cos_sin_ptr, positions_ptr, k_cache_ptr,
    v_cache_ptr, slot_ptr, table_ptr, lens_ptr, out_ptr, part_ptr, k_new_ptr, v_new_ptr,
    stride_xt, stride_kb, stride_ks, stride_kh, stride_vb, stride_vs, stride_vh, stride_tb,
    stride_ot, stride_oh, max_pos, n_slots, max_blocks, n_parts, score_scale, eps,
    N_HEADS: tl.constexpr, N_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_HALF: tl.constexpr,
    BLOCK_D: tl.constexpr, K_ROWS: tl.constexpr, EARLY: tl.constexpr,
    BLOCK_N: tl.constexpr, SPLITS: tl.constexpr, MIN_SHARE: tl.constexpr, PDL: tl.constexpr,
):
    group: tl.constexpr = N_HEADS // N_KV_HEADS
    half: tl.constexpr = HEAD_DIM // 2
    kv_head = tile % N_KV_HEADS
    split = tile // N_KV_HEADS % SPLITS
    seq = tile // (N_KV_HEADS * SPLITS)
    token = tl.cast(seq, tl.int64)
    kv_head64 = tl.cast(kv_head, tl.int64)
    table_ptr += token * stride_tb
    k_cache_ptr += kv_head64 * stride_kh
    v_cache_ptr += kv_head64 * stride_vh

    # Before the wait: all that the kernel just before does not write.
    slot = tl.load(slot_ptr + token).to(tl.int64)
    position = tl.load(positions_ptr + token)
    context_len, _, _, _, used = _sequence(
        seq, lens_ptr, lens_ptr, 0, BLOCK_SIZE, SPLITS, MIN_SHARE, False, False)
    old = tl.maximum(context_len - 1, 0)  # keys in the cache since an earlier step
    if EARLY:
        k_a, k_b, v = _load_keys(
            split, tl.where(split < used, old, 0), table_ptr, k_cache_ptr, v_cache_ptr, stride_kb,
            stride_ks, stride_vb, stride_vs, max_blocks, HEAD_DIM, BLOCK_HALF, BLOCK_D, BLOCK_SIZE,
            BLOCK_N, True)
    one_row = tl.full([1, 1], 1, tl.int1)
    q_weight_a, q_weight_b = load_pairs(q_weight_ptr, one_row, 1, half, BLOCK_HALF, False)
    k_weight_a, k_weight_b = load_pairs(k_weight_ptr, one_row, 1, half, BLOCK_HALF, False)
    cos, sin = load_factors(cos_sin_ptr, position, max_pos, half, BLOCK_HALF)
    # The new key is that of the program whose turn comes behind the last block of old ones.
    n_blocks = (old + BLOCK_N - 1) // BLOCK_N
    is_mine = (context_len > 0) & (split == n_blocks % used)
    stored = is_mine & (slot >= 0) & (slot < n_slots)
    rows = tl.arange(0, BLOCK_M)
    heads = kv_head * group + rows
    row_ok = rows < group
    k_rows = tl.arange(0, K_ROWS)[:, None]  # all of them the new key
    pairs = tl.arange(0, BLOCK_HALF)[None, :]
    d = tl.arange(0, BLOCK_D)[None, :]
    x = qkv_ptr + token * stride_xt
    x_k = x + (N_HEADS + kv_head) * HEAD_DIM
    x_v = x + (N_HEADS + N_KV_HEADS + kv_head) * HEAD_DIM
    page, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    k_at = k_new_ptr + kv_head64 * stride_kh + page * stride_kb + offset * stride_ks + pairs
    v_at = v_new_ptr + kv_head64 * stride_vh + page * stride_vb + offset * stride_vs + d
    if PDL:
        _wait_for_earlier_kernels()

    if split < used:
        q_a, q_b = load_pairs(
            x + heads[:, None] * HEAD_DIM, row_ok[:, None], BLOCK_M, half, BLOCK_HALF, False)
        new_a, new_b = load_pairs(
            x_k + k_rows * 0, k_rows < tl.where(is_mine, K_ROWS, 0), K_ROWS, half, BLOCK_HALF,
            False)
        new_v = tl.load(x_v + d, mask=d < tl.where(is_mine, HEAD_DIM, 0), other=0.0)
        q_a, q_b = _normed_and_turned(q_a, q_b, q_weight_a, q_weight_b, cos, sin, eps, HEAD_DIM)
        new_a, new_b = _normed_and_turned(
            new_a, new_b, k_weight_a, k_weight_b, cos, sin, eps, HEAD_DIM)
        dtype: tl.constexpr = qkv_ptr.dtype.element_ty
        q_a, q_b, new_a, new_b = q_a.to(dtype), q_b.to(dtype), new_a.to(dtype), new_b.to(dtype)

        k_ok = (k_rows < 1) & (pairs < tl.where(stored, half, 0))
        tl.store(k_at + k_rows * 0, new_a, mask=k_ok)
        tl.store(k_at + k_rows * 0 + half, new_b, mask=k_ok)
        tl.store(v_at, new_v, mask=d < tl.where(stored, HEAD_DIM, 0))

        # The softmax begins with the new key, whose weight is 1, or with nothing.
        score = q_a.to(tl.float32) * new_a.to(tl.float32)
        score = tl.sum(score + q_b.to(tl.float32) * new_b.to(tl.float32), 1) * score_scale
        score = tl.where(is_mine, score, _LOWEST)
        top = tl.where(score < _LOWEST, _LOWEST, score)  # NaN stays NaN, and spreads below
        total = tl.full([BLOCK_M], 0.0, tl.float32) + tl.where(is_mine, 1.0, 0.0)
        acc = tl.broadcast_to(new_v.to(tl.float32), [BLOCK_M, BLOCK_D])
        if EARLY:
            acc, top, total = _attend_keys(
                acc, top, total, q_a, q_b, k_a, k_b, v, split, old, score_scale, BLOCK_N)
            if split + used < n_blocks:  # else a pipelined loop costs what it does before it ends
                acc, top, total = _attend_blocks(
                    acc, top, total, q_a, q_b, split + used, n_blocks, used, old, score_scale,
                    table_ptr, k_cache_ptr, v_cache_ptr, stride_kb, stride_ks, stride_vb,
                    stride_vs, max_blocks, HEAD_DIM, BLOCK_HALF, BLOCK_D, BLOCK_SIZE, BLOCK_N)
        else:
            total *= tl.math.exp2(score - top)
            acc, top, total = _attend_blocks(
                acc, top, total, q_a, q_b, split, n_blocks, used, old, score_scale,
                table_ptr, k_cache_ptr, v_cache_ptr, stride_kb, stride_ks, stride_vb,
                stride_vs, max_blocks, HEAD_DIM, BLOCK_HALF, BLOCK_D, BLOCK_SIZE, BLOCK_N)

        out, lse = _finish(acc, top, total, out_ptr, heads, row_ok, False)
        ok = row_ok[:, None] & (d < HEAD_DIM)
        if SPLITS == 1:
            o_rows = token * stride_ot + heads.to(tl.int64) * stride_oh
            tl.store(out_ptr + o_rows[:, None] + d, out.to(out_ptr.dtype.element_ty), mask=ok)
        else:
            parts = (token * N_HEADS + heads) * SPLITS + split
            part_lse_ptr = part_ptr + n_parts.to(tl.int64) * HEAD_DIM
            tl.store(part_ptr + parts[:, None] * HEAD_DIM + d, out, mask=ok)
            tl.store(part_lse_ptr + parts, lse, mask=row_ok)


@triton.jit(do_not_specialize=["max_pos", "n_slots", "max_blocks", "n_parts", "n_tiles"])
def _fused_qk_norm_rope_append_attn_kernel(
    qkv_ptr, q_weight_ptr, k_weight_ptr, cos_sin_ptr, positions_ptr, k_cache_ptr, v_cache_ptr,
    slot_ptr, table_ptr, lens_ptr, out_ptr, part_ptr,
    k_new_ptr, v_new_ptr,  # the caches, to write to: Ascend overlaps no loads with stores to one
    stride_xt, stride_kb, stride_ks, stride_kh, stride_vb, stride_vs, stride_vh, stride_tb,
    stride_ot, stride_oh, max_pos, n_slots, max_blocks, n_parts, n_tiles, score_scale, eps,
    N_HEADS: tl.constexpr, N_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,  # query heads of a KV head, padded
    BLOCK_HALF: tl.constexpr, BLOCK_D: tl.constexpr,
    K_ROWS: tl.constexpr,  # how often a program norms the new key
    EARLY: tl.constexpr,  # the first keys of a program are read before its queries
    ONE_TILE: tl.constexpr,  # a program has one tile, so it need not loop
    BLOCK_N: tl.constexpr, SPLITS: tl.constexpr, MIN_SHARE: tl.constexpr, PDL: tl.constexpr,
):
    if PDL:
        _let_next_kernel_start()
    if ONE_TILE:
        _attn_tile(
            tl.program_id(0), qkv_ptr, q_weight_ptr, k_weight_ptr, cos_sin_ptr, positions_ptr,
            k_cache_ptr, v_cache_ptr, slot_ptr, table_ptr, lens_ptr, out_ptr, part_ptr, k_new_ptr,
            v_new_ptr, stride_xt,
            stride_kb, stride_ks, stride_kh, stride_vb, stride_vs, stride_vh, stride_tb, stride_ot,
            stride_oh, max_pos, n_slots, max_blocks, n_parts, score_scale, eps, N_HEADS,
            N_KV_HEADS, HEAD_DIM, BLOCK_SIZE, BLOCK_M, BLOCK_HALF, BLOCK_D, K_ROWS, EARLY, BLOCK_N,
            SPLITS, MIN_SHARE, PDL)
    else:
        for tile in range(tl.program_id(0), n_tiles, tl.num_programs(0)):
            _attn_tile(
                tile, qkv_ptr, q_weight_ptr, k_weight_ptr, cos_sin_ptr, positions_ptr, k_cache_ptr,
                v_cache_ptr, slot_ptr, table_ptr, lens_ptr, out_ptr, part_ptr, k_new_ptr, v_new_ptr,
                stride_xt,
                stride_kb, stride_ks, stride_kh, stride_vb, stride_vs, stride_vh, stride_tb,
                stride_ot, stride_oh, max_pos, n_slots, max_blocks, n_parts, score_scale, eps,
                N_HEADS, N_KV_HEADS, HEAD_DIM, BLOCK_SIZE, BLOCK_M, BLOCK_HALF, BLOCK_D, K_ROWS,
                EARLY, BLOCK_N, SPLITS, MIN_SHARE, PDL)


# fmt: on


@op
def fused_qk_norm_rope_append_attn(
    qkv: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    positions: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    *,
    num_heads: int,
    num_kv_heads: int,
    eps: float = 1e-6,
    scale: float | None = None,
    out: torch.Tensor | None = None,
    config: Config | None = None,
) -> torch.Tensor:
    """Norm and rotate q and k of a projection, put k and v into a paged cache, attend to that.

    One token a sequence, its last one. With ``PDL`` all arguments but qkv are read before kernels
    of this library that were launched just before have ended. So whatever wrote to the caches, the
    tables or the positions must have been followed by another kernel, launched in the ordinary way
    as PyTorch does, that stands before this one: a decode step has such kernels at both its ends,
    a prefill whose ``append_paged_kv`` comes just before this call has none.

    Args:
        qkv: [B, (num_heads + 2 * num_kv_heads) * D], fp32, bf16 or fp16, columns contiguous, any
            token stride: q heads, k heads, v heads. D is even and at most 256.
        q_weight: [D], contiguous, fp32, bf16 or fp16 (it may differ from ``qkv``).
        k_weight: [D], the dtype of ``q_weight``.
        cos_sin_cache: fp32 [max_pos, D], contiguous; cosines, then sines: the whole head turns,
            dimension i with i + D / 2.
        positions: [B], int32 or int64, contiguous, each in [0, max_pos). Others give the factors of
            the nearest valid position; TKERNELS_DEBUG refuses them.
        k_cache: [num_blocks, block_size, num_kv_heads, D] of the dtype of ``qkv``, block_size a
            power of two from 16 on; any strides but the last. Written.
        v_cache: shape and dtype of ``k_cache``, own strides. Written.
        slot_mapping: [B], int32 or int64: the slot of position context_lens[b] - 1 by block_table,
            which no other sequence has in its table; or, for padding, below 0. The new token sees
            itself, and its slot is not read.
        block_table: int32 [B, max_blocks], the blocks of each sequence in order. Its row stride is
            free. Columns past a sequence's length may say anything.
        context_lens: int32 [B], tokens of each sequence, the new one included; at most max_blocks *
            block_size. 0 stands for padding: zeros in ``out``, and nothing stored.
        num_heads: q heads, a multiple of ``num_kv_heads``.
        num_kv_heads: k heads (and v heads), >= 1.
        eps: added to the mean square; > 0.
        scale: factor of the scores; None is D ** -0.5.
        out: where to write, [B, num_heads, D] of the dtype of ``qkv``, token and head strides are
            free; must not overlap an input.
        config: launch config; None looks it up.

    Returns:
        ``out``; a new contiguous tensor where None was given.

    Raises:
        TypeError, ValueError: an argument of the wrong kind, shape, dtype, stride or device.
    """
    if out is None:
        out = under_name(_OP, norm_rope._new_heads, qkv, q_weight, "num_heads", num_heads)
    if k_cache is v_cache:
        raise check.one_for_both(_OP, "v_cache", "k_cache")
    new = (qkv, q_weight, k_weight, cos_sin_cache, positions)
    tensors = (*new, k_cache, v_cache, slot_mapping, block_table, context_lens, out)
    run = planned(_plan, config, tensors, num_heads, num_kv_heads, eps, scale)
    if run is not None:
        if check.DEBUG:
            _check_values(*tensors)
        run(*tensors)
    return out


def _check_values(*tensors: torch.Tensor) -> None:
    """What the kernel relies on. It reads values: for TKERNELS_DEBUG only."""
    qkv, _, _, cos_sin_cache, positions, k_cache, _, slots, block_table, context_lens, _ = tensors
    rotary.check_positions(_OP, positions, cos_sin_cache.shape[0])
    under_name(_OP, append._check_slots, slots, k_cache.shape[0] * k_cache.shape[1])
    paged.check_values(_OP, qkv, k_cache, block_table, context_lens, None, 1, None)
    if block_table.shape[1] == 0:  # so all contexts are
        return
    expected = _last_slots(block_table, context_lens, k_cache.shape[1])
    wrong = (slots >= 0) & (slots != expected) & (context_lens > 0)
    if bool(wrong.any()):
        b = int(wrong.nonzero()[0])
        raise ValueError(
            f"{_OP}: slot_mapping must hold the slot of each sequence's last token by block_table, "
            f"{int(expected[b])} at {b}, got {int(slots[b])}"
        )


def _plan(
    qkv: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    positions: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    out: torch.Tensor,
    num_heads: int,
    num_kv_heads: int,
    eps: float,
    scale: float | None,
    config: Config | None,
) -> Any:
    """What runs such a call, given all its tensors; None where there is nothing to do."""
    new = (qkv, q_weight, k_weight, cos_sin_cache, positions, k_cache, v_cache, slot_mapping)
    sizes = (num_heads, num_kv_heads)
    batch, head_dim, rotary_dim, num_blocks, block_size = under_name(
        _OP, norm_rope_append.check_inputs, *new, *sizes, eps
    )
    if rotary_dim != head_dim or head_dim > attention.MAX_HEAD_DIM:
        raise ValueError(
            f"{_OP}: cos_sin_cache must have shape [max_pos, head_dim={head_dim}] of at most "
            f"{attention.MAX_HEAD_DIM} columns, got {describe(cos_sin_cache)}"
        )
    if num_heads % num_kv_heads:
        raise ValueError(
            f"{_OP}: num_heads must be a multiple of num_kv_heads={num_kv_heads}, got {num_heads}"
        )
    check_tensor(_OP, "context_lens", context_lens)
    check_shape(_OP, "context_lens", context_lens, batch=batch)
    q = qkv.view(batch, num_heads + 2 * num_kv_heads, head_dim)[:, :num_heads]
    under_name(_OP, paged._check, q, k_cache, v_cache, block_table, context_lens, out, {}, 1)
    attention.check_options(_OP, scale, None, None, causal=True)
    if batch == 0:
        return None
    max_blocks = block_table.shape[1]
    values = (batch, *sizes, head_dim, block_size, max_blocks, qkv.dtype)
    cfg, max_programs = resolve(SPEC, values, config)
    cfg.setdefault("PDL", False)  # Ascend has none
    dev, splits = device.current(), cfg["SPLITS"]
    block_m, block_half, block_d = _tile_sizes(*sizes, head_dim)
    n_tiles = batch * num_kv_heads * splits
    programs = min(n_tiles, max_programs * dev.num_dot_cores // dev.num_cores)
    shared = {
        "N_HEADS": num_heads,
        "HEAD_DIM": head_dim,
        "BLOCK_D": block_d,
        "BLOCK_SIZE": block_size,
    }
    options = {**device.rounding_each_step(), **({"launch_pdl": True} if cfg["PDL"] else {})}
    attend = bind(
        _fused_qk_norm_rope_append_attn_kernel,
        (programs,),
        **shared,
        N_KV_HEADS=num_kv_heads,
        BLOCK_M=block_m,
        BLOCK_HALF=block_half,
        # Every row of the queries has a new key of its own, or threads would have to pass it on.
        K_ROWS=block_m if dev.registers else 1,
        EARLY=bool(dev.registers),  # Ascend overlaps loads with what a loop computes
        ONE_TILE=programs == n_tiles,
        **cfg,
        **options,
    )
    combine, n_merges, n_parts = None, 0, 0
    if splits > 1:
        n_parts = batch * num_heads * splits
        absent = {"MULTI": False, "HAS_WINDOW": False, "HAS_SINKS": False, "HAS_LSE": False}
        combine, n_merges = paged.bind_combine(
            {**shared, **absent}, batch * num_heads, cfg, max_programs, options
        )
    strides = (qkv.stride(0), *k_cache.stride()[:3], *v_cache.stride()[:3], block_table.stride(0))
    scale = head_dim**-0.5 if scale is None else scale
    counts = (cos_sin_cache.shape[0], num_blocks * block_size, max_blocks, n_parts, n_tiles)
    numbers = (*strides, *out.stride()[:2], *counts, scale * math.log2(math.e), float(eps))
    merge_numbers = (*out.stride()[:2], n_parts, 0, 1, n_merges)

    def run(*tensors: torch.Tensor) -> None:
        lens, out = tensors[-2:]
        if combine is None:
            attend(*tensors, out, *tensors[5:7], *numbers)
            return
        # Results of head_dim numbers each, then their lse.
        part = torch.empty(n_parts * (head_dim + 1), dtype=torch.float32, device=out.device)
        attend(*tensors, part, *tensors[5:7], *numbers)
        combine(lens, lens, out, out, out, part, *merge_numbers)

    return run


def _tile_sizes(num_heads: int, num_kv_heads: int, head_dim: int) -> tuple[int, int, int]:
    """(BLOCK_M, BLOCK_HALF, BLOCK_D): a product has 16 rows, columns and terms at least."""
    sizes = (num_heads // num_kv_heads, cdiv(head_dim, 2), head_dim)
    block_m, block_half, block_d = (max(16, next_power_of_2(n)) for n in sizes)
    return block_m, block_half, block_d


# ---- facts for tests, bench and tuner --------------------------------------------------------

_FIELDS = (
    "batch",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "block_size",
    "max_blocks",
    "dtype",
)


def _norm_rope_problem(problem: Problem) -> Problem:
    """That of the first operation."""
    p = problem
    sizes = (p["batch"], p["num_heads"], p["num_kv_heads"], p["head_dim"], p["dtype"])
    return norm_rope_append.norm_rope_append_problem(*sizes, block_size=p["block_size"])


def _shape(
    *,
    batch: int,
    context: int,
    num_heads: int = 32,
    num_kv_heads: int = 8,
    head_dim: int = 128,
    block_size: int = 16,
    dtype: torch.dtype = torch.bfloat16,
) -> Problem:
    """Problem of ``batch`` sequences of ``context`` tokens, the last one new."""
    return paged_shape(
        batch=batch,
        context=context,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        dtype=dtype,
    )


def _make_inputs(problem: Problem, dev: torch.device) -> dict[str, Any]:
    """Inputs of the two operations; with ``poison`` the slots of new tokens hold NaN, too."""
    pages = paged_inputs(problem, dev)
    caches = {n: pages[n] for n in ("k_cache", "v_cache")}
    tables = {n: pages[n] for n in ("block_table", "context_lens")}
    slots = _last_slots(**tables, block_size=problem["block_size"])
    there = [b for b, context in enumerate(problem["contexts"]) if context]
    if problem["poison"]:
        page, offset = slots[there] // problem["block_size"], slots[there] % problem["block_size"]
        for cache in caches.values():
            cache[page, offset] = math.nan
    given = norm_rope._make_inputs(_norm_rope_problem(problem), dev)
    del given["interleaved"]
    return {**given, **caches, "slot_mapping": slots, **tables}


def _last_slots(
    block_table: torch.Tensor, context_lens: torch.Tensor, block_size: int
) -> torch.Tensor:
    """Int64 [B], the slot of each sequence's last token; -1 where it has none."""
    last = (context_lens.long() - 1).clamp(min=0)
    pages = block_table.gather(1, (last // block_size)[:, None])[:, 0].long()
    return torch.where(context_lens > 0, pages * block_size + last % block_size, -1)


def _tuning_key(problem: Problem) -> dict[str, Any]:
    p = problem
    return {
        "head_dim": p["head_dim"],
        "itemsize": p["dtype"].itemsize,
        "block_size": p["block_size"],
        "group": p["num_heads"] // p["num_kv_heads"],
        "batch_kv_heads": next_power_of_2(p["batch"] * p["num_kv_heads"]),
        "keys": next_power_of_2(max(1, p["max_blocks"] * p["block_size"])),
    }


_SPLITS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 24, 32, 48, 64, 96, 128)


def _space(dev: Device) -> dict[str, list[Any]]:
    space: dict[str, list[Any]] = {
        "BLOCK_N": [16, 32, 64, 128],
        "SPLITS": list(_SPLITS),
        "MIN_SHARE": [16, 32, 64, 128, 256, 512, 2048],
        "programs_per_core": [0, 1, 2, 4],
    }
    if not dev.registers:
        return space
    return {
        **space,
        "PDL": [False, True] if _has_pdl(dev) else [False],
        "num_warps": [1, 2, 4, 8],
        "num_stages": [1, 2, 3, 4],
    }


def _default_config(problem: Problem, dev: Device) -> Config:
    p = problem
    tiles = p["batch"] * p["num_kv_heads"]
    keys = max(1, p["max_blocks"] * p["block_size"])
    splits, share = paged._default_splits(tiles, keys, dev.num_dot_cores)
    if share == 64:  # few tiles: a block each where there are programs for it
        most = paged._largest_power_of_2(max(1, min(128, 2 * dev.num_dot_cores // tiles)))
        splits = min(n for n in _SPLITS if n >= min(most, cdiv(keys, share)))
    config: Config = {
        "BLOCK_N": p["block_size"],
        "SPLITS": splits,
        "MIN_SHARE": share,
        "programs_per_core": 1,
    }
    if not dev.registers:
        return config
    # Four warps: a half of a head of 128 has fewer factors than threads, so Triton loads them where
    # they are needed. 64 keys are the least share, so that of a short sequence all are read early.
    warps = 4 if _widths(problem)[0] <= 32 else 8
    config |= {"BLOCK_N": 64, "PDL": _has_pdl(dev), "num_warps": warps, "num_stages": 3}
    config["programs_per_core"] = 0
    while config["BLOCK_N"] > 16 and (
        _early_registers(config, problem) > 64
        or _shared_bytes({**config, "num_stages": 1}, problem) > dev.local_mem_bytes
    ):
        config["BLOCK_N"] //= 2
    while config["num_stages"] > 1 and _shared_bytes(config, problem) > dev.local_mem_bytes // 2:
        config["num_stages"] -= 1
    return config


def _widths(problem: Problem) -> tuple[int, int, int]:
    """(BLOCK_M, numbers of a key, numbers of a value)."""
    sizes = (problem["num_heads"], problem["num_kv_heads"], problem["head_dim"])
    block_m, block_half, block_d = _tile_sizes(*sizes)
    return block_m, 2 * block_half, block_d


def _early_registers(config: Config, problem: Problem) -> int:
    """Registers of a thread that hold keys and values until the queries come."""
    row_bytes: int = sum(_widths(problem)[1:]) * problem["dtype"].itemsize
    return int(config["BLOCK_N"]) * row_bytes // (4 * 32 * int(config["num_warps"]))


def _shared_bytes(config: Config, problem: Problem) -> int:
    """Of queries, of keys and values in the loop, and of weights."""
    (block_m, key, value), size = _widths(problem), int(problem["dtype"].itemsize)
    stages, n = int(config["num_stages"]), int(config["BLOCK_N"])
    return (block_m * (key + n) + n * stages * (key + value)) * size


def _why_illegal(config: Config, problem: Problem, dev: Device) -> str | None:
    if why := why_no_launch(config, dev, "BLOCK_N"):
        return why
    if config["BLOCK_N"] < 16 or config["SPLITS"] < 1 or config["MIN_SHARE"] < 1:
        return "BLOCK_N must be 16 or more, SPLITS and MIN_SHARE 1 or more"
    if dev.is_npu:
        if config["BLOCK_N"] != problem["block_size"]:
            return f"BLOCK_N must be the block_size {problem['block_size']}, a page a step"
        block_m, key, value = _widths(problem)
        tile = max(block_m, config["BLOCK_N"]) * (key + value) * problem["dtype"].itemsize
        return "tiles of keys and values overflow UB" if tile > 4 * 128 * 128 else None
    if config["PDL"] and not _has_pdl(dev):
        return f"PDL needs sm90 or later, got {dev.arch}"
    if why := why_no_room(config, dev, _shared_bytes(config, problem)):
        return why
    block_m, key, value = _widths(problem)
    registers = _early_registers(config, problem)
    registers += block_m * (key + value) // (32 * config["num_warps"])
    return (
        f"the tiles would hold {registers} of 255 registers a thread" if registers > 200 else None
    )


def _cost(problem: Problem) -> Cost:
    """That of the two operations, but q stays in the kernel, and so do the new K and V."""
    first, p = norm_rope_append._cost(_norm_rope_problem(problem)), problem
    older = {**p, "contexts": tuple(max(n - 1, 0) for n in p["contexts"])}
    q = p["batch"] * p["num_heads"] * p["head_dim"] * p["dtype"].itemsize
    return Cost(
        flops=first.flops + paged_cost(p).flops,
        bytes=first.bytes + paged_cost(older).bytes - 2 * q,
    )


def _providers(inputs: dict[str, Any]) -> dict[str, Any]:
    """``separate``: our own two operations, q and out preallocated."""
    tables = {n: inputs[n] for n in ("block_table", "context_lens")}
    given = {n: v for n, v in inputs.items() if n not in tables}
    shape = (len(inputs["qkv"]), inputs["num_heads"], len(inputs["q_weight"]))
    q, out = inputs["qkv"].new_empty(shape), inputs["qkv"].new_empty(shape)

    def separate() -> Any:
        norm_rope_append.fused_qk_norm_rope_append(**given, q_out=q)
        return paged.paged_attn(q, inputs["k_cache"], inputs["v_cache"], **tables, out=out)

    return {"separate": separate}


_EDGE, _BENCH = frozenset({"edge"}), frozenset({"bench"})
_BF16, _FP16, _FP32 = torch.bfloat16, torch.float16, torch.float32
_LENGTHS = (0, 1, 15, 16, 17, 70)


def _decode(batch: int, context: int, num_heads: int) -> Case:
    problem = _shape(batch=batch, context=context, num_heads=num_heads)
    return Case(f"decode-b{batch}-ctx{context}-{num_heads}/8x128-bf16", problem, _BENCH)


# fmt: off
SPEC = register(
    KernelSpec(
        name=_OP,
        launch=fused_qk_norm_rope_append_attn,
        reference=fused_qk_norm_rope_append_attn_ref,
        problem_fields=_FIELDS,
        make_inputs=_make_inputs,
        cases=(
            Case("decode-4/2x32-bf16", paged_problem(_LENGTHS, "4/2x32", _BF16, max_context=96)),
            Case("block32-5/1x64-fp16", paged_problem(
                (31, 32, 33, 0), "5/1x64", _FP16, block_size=32)),
            Case("3/3x80-fp32", paged_problem((33, 1), "3/3x80", _FP32), _EDGE),
            Case("long-20/1x16-bf16", paged_problem((150, 2), "20/1x16", _BF16), _EDGE),
            Case("1x1-1/1x2-fp32", paged_problem((1,), "1/1x2", _FP32), _EDGE),
            *(_decode(batch, context, heads) for heads in (16, 32)
              for batch, context in ((1, 384), (1, 4096), (64, 1024))),
        ),
        tuning_key=_tuning_key,
        space=_space,
        default_config=_default_config,
        why_illegal=_why_illegal,
        cost=_cost,
        outputs=("out",),
        mutates=("k_cache", "v_cache"),
        empty_results=norm_rope_append._empty_q,
        providers=_providers,
        shape=_shape,
    )
)
# fmt: on
