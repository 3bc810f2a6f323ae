"""Quantise new keys and values into two ``QuantizedKV`` caches in one pass (tkernels/kv_format.py).

    code  = round_half_even(clamp(x / scale, -127, 127))        to codes[slot // bs, slot % bs]
    scale = absmax(x) / 127 of a token and head, or a given one of a head and channel
    rest  = x / scale - code;  kept as 4-bit block floats in the pool where its share exceeds tau,
                               and then the scale is written as -scale

k, v: [n_tokens, num_kv_heads, head_dim]; codes: [num_blocks, block_size, num_kv_heads, head_dim].
``slot_mapping`` is that of ``append_paged_kv``. The launch in this file takes the tensors of both
caches one by one; ``tkernels.append_quantized_kv``, in tkernels/quantized.py, takes the caches.

A program stays with K or with V. Without residuals it takes the same tokens of several heads
(``tkernels/append_codes.py``). With them it has one head, takes some tokens at a time and writes
their codes; rests are packed from registers (or, ``BY_TOKEN``, read again), and only where a token
of the tile is an outlier. Pool slots come from the head's stack by one atomic subtraction a tile:
which slot a token gets depends on which program is first, and so does which token goes without
where the stack runs empty. What is read back does not, as long as it does not run empty.
"""

from __future__ import annotations

from typing import Any

import torch

from tkernels.append_codes import (
    ROUNDER,
    append_codes,
    as_fp32,
    inverse_of,
    larger_size,
    low_byte,
    place_of,
    rounded,
    scale_of,
)
from tkernels.config import planned, resolve, why_no_launch
from tkernels.device import (
    Device,
    bind,
    cdiv,
    current,
    next_power_of_2,
    rounding_each_step,
    tl,
    triton,
)
from tkernels.kv_format import FORMATS, LARGEST, NO_SLOT, QuantizedKV, append_quantized_ref
from tkernels.ops.paged_attn import _has_pdl, _let_next_kernel_start, _wait_for_earlier_kernels
from tkernels.quantized_cases import (
    CASES,
    MUTATED,
    quantized_compared,
    quantized_cost,
    quantized_inputs,
    quantized_shape,
)
from tkernels.quantized_check import check_caches
from tkernels.registry import Config, KernelSpec, Problem, op, register


def append_quantized_kv_ref(
    k: torch.Tensor,
    v: torch.Tensor,
    k_codes: torch.Tensor,
    k_scale: torch.Tensor,
    k_slots: torch.Tensor,
    k_residual: torch.Tensor,
    k_residual_scale: torch.Tensor,
    k_free_slots: torch.Tensor,
    k_free_count: torch.Tensor,
    k_dropped: torch.Tensor,
    k_tau: torch.Tensor,
    v_codes: torch.Tensor,
    v_scale: torch.Tensor,
    v_slots: torch.Tensor,
    v_residual: torch.Tensor,
    v_residual_scale: torch.Tensor,
    v_free_slots: torch.Tensor,
    v_free_count: torch.Tensor,
    v_dropped: torch.Tensor,
    v_tau: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    mantissa_bits: int = 1,
    config: Config | None = None,
) -> None:
    """PyTorch version of the launch."""
    # fmt: off
    of_k = (
        k_codes, k_scale, k_slots, k_residual, k_residual_scale, k_free_slots, k_free_count,
        k_dropped, k_tau,
    )
    of_v = (
        v_codes, v_scale, v_slots, v_residual, v_residual_scale, v_free_slots, v_free_count,
        v_dropped, v_tau,
    )
    # fmt: on
    for x, tensors in ((k, of_k), (v, of_v)):
        cache = QuantizedKV(*(tensors if tensors[2].numel() else tensors[:2]))
        cache = cache._replace(residual_format=FORMATS[mantissa_bits])
        append_quantized_ref(x, cache, slot_mapping)


@triton.jit
def _append_quantized_kv_kernel(
    k_ptr,
    v_ptr,
    k_codes_ptr,
    k_scale_ptr,
    k_slots_ptr,
    k_residual_ptr,
    k_residual_scale_ptr,
    k_free_slots_ptr,
    k_free_count_ptr,
    k_dropped_ptr,
    k_tau_ptr,
    v_codes_ptr,
    v_scale_ptr,
    v_slots_ptr,
    v_residual_ptr,
    v_residual_scale_ptr,
    v_free_slots_ptr,
    v_free_count_ptr,
    v_dropped_ptr,
    v_tau_ptr,
    slot_mapping_ptr,
    stride_kt,
    stride_kh,
    stride_vt,
    stride_vh,
    n_tokens,
    n_positions,
    n_slots,
    n_tiles,
    BLOCK_SIZE: tl.constexpr,  # tokens a cache block; a constant, because it divides
    N_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    STATIC: tl.constexpr,
    RESIDUAL_BLOCK: tl.constexpr,  # channels that share a residual scale; 0: no residuals
    MANTISSA: tl.constexpr,
    LARGEST_CODE: tl.constexpr,
    ORDERED: tl.constexpr,  # a program has all tokens of a head, in order
    CLAMPED: tl.constexpr,  # addresses of masked lanes lie inside, too
    ONE_TILE: tl.constexpr,  # a program has one tile, so it need not loop
    BLOCK_D: tl.constexpr,  # channels of a row, as a power of two; with residuals of half a row
    BLOCK_T: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,  # of a program, which lie side by side; 1 with residuals or STATIC
    STAGES: tl.constexpr,  # tiles that are on their way to a program, by copies ahead; 1: no copies
    BY_TOKEN: tl.constexpr,  # residuals are made of one token at a time, which is read again
    PDL: tl.constexpr,
):
    if PDL:
        _let_next_kernel_start()
        _wait_for_earlier_kernels()
    # A program stays with its heads, of K or of V. What lies side by side is read at one time.
    groups: tl.constexpr = N_HEADS // BLOCK_HEADS
    step = tl.num_programs(0) // (2 * groups)  # programs of a group
    of_k = tl.program_id(0) % 2 == 0
    head, first = tl.program_id(0) // 2 % groups * BLOCK_HEADS, tl.program_id(0) // (2 * groups)
    # fmt: off
    if not CLAMPED:  # one code for K and V, half as much; Ascend takes no pointer that was chosen
        x_ptr = k_ptr if of_k else v_ptr
        codes_ptr = k_codes_ptr if of_k else v_codes_ptr
        scale_ptr = k_scale_ptr if of_k else v_scale_ptr
        slots_ptr = k_slots_ptr if of_k else v_slots_ptr
        residual_ptr = k_residual_ptr if of_k else v_residual_ptr
        residual_scale_ptr = k_residual_scale_ptr if of_k else v_residual_scale_ptr
        free_slots_ptr = k_free_slots_ptr if of_k else v_free_slots_ptr
        free_count_ptr = k_free_count_ptr if of_k else v_free_count_ptr
        dropped_ptr = k_dropped_ptr if of_k else v_dropped_ptr
        tau_ptr = k_tau_ptr if of_k else v_tau_ptr
        # One may be of 32 bits and the other of 64, which a choice cannot be among.
        stride_xt = tl.cast(stride_kt, tl.int64) if of_k else tl.cast(stride_vt, tl.int64)
        stride_xh = tl.cast(stride_kh, tl.int64) if of_k else tl.cast(stride_vh, tl.int64)
        _append_side(
            head, first, n_tiles, step, x_ptr, codes_ptr, scale_ptr, slots_ptr,
            residual_ptr, residual_scale_ptr, free_slots_ptr,
            free_count_ptr, dropped_ptr, tau_ptr, slot_mapping_ptr, stride_xt,
            stride_xh, n_tokens, n_positions, n_slots, BLOCK_SIZE, N_HEADS, HEAD_DIM, STATIC,
            RESIDUAL_BLOCK, MANTISSA, LARGEST_CODE, ORDERED, CLAMPED, ONE_TILE, BLOCK_D, BLOCK_T,
            BLOCK_HEADS, STAGES, BY_TOKEN)
    elif of_k:
        _append_side(
            head, first, n_tiles, step, k_ptr, k_codes_ptr, k_scale_ptr, k_slots_ptr,
            k_residual_ptr, k_residual_scale_ptr, k_free_slots_ptr,
            k_free_count_ptr, k_dropped_ptr, k_tau_ptr, slot_mapping_ptr, stride_kt,
            stride_kh, n_tokens, n_positions, n_slots, BLOCK_SIZE, N_HEADS, HEAD_DIM, STATIC,
            RESIDUAL_BLOCK, MANTISSA, LARGEST_CODE, ORDERED, CLAMPED, ONE_TILE, BLOCK_D, BLOCK_T,
            BLOCK_HEADS, STAGES, BY_TOKEN)
    else:
        _append_side(
            head, first, n_tiles, step, v_ptr, v_codes_ptr, v_scale_ptr, v_slots_ptr,
            v_residual_ptr, v_residual_scale_ptr, v_free_slots_ptr,
            v_free_count_ptr, v_dropped_ptr, v_tau_ptr, slot_mapping_ptr, stride_vt,
            stride_vh, n_tokens, n_positions, n_slots, BLOCK_SIZE, N_HEADS, HEAD_DIM, STATIC,
            RESIDUAL_BLOCK, MANTISSA, LARGEST_CODE, ORDERED, CLAMPED, ONE_TILE, BLOCK_D, BLOCK_T,
            BLOCK_HEADS, STAGES, BY_TOKEN)
    # fmt: on


@triton.jit
def _append_side(
    head,
    first,
    n_tiles,
    step,
    x_ptr,
    codes_ptr,
    scale_ptr,
    slots_ptr,
    residual_ptr,
    residual_scale_ptr,
    free_slots_ptr,
    free_count_ptr,
    dropped_ptr,
    tau_ptr,
    slot_mapping_ptr,
    stride_xt,
    stride_xh,
    n_tokens,
    n_positions,
    n_slots,
    BLOCK_SIZE: tl.constexpr,
    N_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    STATIC: tl.constexpr,
    RESIDUAL_BLOCK: tl.constexpr,
    MANTISSA: tl.constexpr,
    LARGEST_CODE: tl.constexpr,
    ORDERED: tl.constexpr,
    CLAMPED: tl.constexpr,
    ONE_TILE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    STAGES: tl.constexpr,
    BY_TOKEN: tl.constexpr,
):
    """K's part, or V's: tiles ``first``, ``first + step`` .. of the heads from ``head`` on."""
    if ONE_TILE:
        n_tiles, step = first + 1, 1
    # fmt: off
    if RESIDUAL_BLOCK == 0:
        append_codes(
            head, first, n_tiles, step, x_ptr, codes_ptr, scale_ptr, slot_mapping_ptr, stride_xt,
            stride_xh, n_tokens, n_positions, BLOCK_SIZE, N_HEADS, HEAD_DIM, STATIC, CLAMPED,
            BLOCK_D, BLOCK_T, BLOCK_HEADS, STAGES)
    else:
        _append_with_rests(
            head, first, n_tiles, step, x_ptr, codes_ptr, scale_ptr, slots_ptr, residual_ptr,
            residual_scale_ptr, free_slots_ptr, free_count_ptr, dropped_ptr, tau_ptr,
            slot_mapping_ptr, stride_xt, stride_xh, n_tokens, n_positions, n_slots, BLOCK_SIZE,
            N_HEADS, HEAD_DIM, STATIC, RESIDUAL_BLOCK, MANTISSA, LARGEST_CODE, ORDERED, CLAMPED,
            BLOCK_D, BLOCK_T, STAGES, BY_TOKEN)
    # fmt: on


@triton.jit
def _append_with_rests(
    head,
    first,
    n_tiles,
    step,
    x_ptr,
    codes_ptr,
    scale_ptr,
    slots_ptr,
    residual_ptr,
    residual_scale_ptr,
    free_slots_ptr,
    free_count_ptr,
    dropped_ptr,
    tau_ptr,
    slot_mapping_ptr,
    stride_xt,
    stride_xh,
    n_tokens,
    n_positions,
    n_slots,
    BLOCK_SIZE: tl.constexpr,
    N_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    STATIC: tl.constexpr,
    RESIDUAL_BLOCK: tl.constexpr,
    MANTISSA: tl.constexpr,
    LARGEST_CODE: tl.constexpr,
    ORDERED: tl.constexpr,
    CLAMPED: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_T: tl.constexpr,
    STAGES: tl.constexpr,
    BY_TOKEN: tl.constexpr,
):
    """Tiles ``first``, ``first + step`` .. of the tokens of one head, with residuals."""
    half: tl.constexpr = HEAD_DIM // 2
    head64 = tl.cast(head, tl.int64)
    x_ptr += head64 * stride_xh
    # Channel j and j + half share a byte of the residual, so the halves stay apart.
    column = tl.arange(0, BLOCK_H)[None, :]
    inside = column < half
    low_column, high_column = column, column + half
    if CLAMPED:  # Ascend reads for masked lanes, too
        low_column = tl.minimum(column, half - 1)
        high_column = low_column + half
    if STATIC:
        channels = scale_ptr + head64 * HEAD_DIM
        scale_low = tl.load(channels + low_column, mask=inside, other=0.0)
        scale_high = tl.load(channels + high_column, mask=inside, other=0.0)
        inverse_low, inverse_high = inverse_of(scale_low), inverse_of(scale_high)
    tau = tl.load(tau_ptr + head)
    most = tl.where(tau < 0, -1.0, tau * tau)
    for tile in tl.range(first, n_tiles, step, num_stages=STAGES):
        # Read before the places are known to be some, so that the loads do not wait for each other.
        # fmt: off
        position, low, high = _read(
            tile, x_ptr, slot_mapping_ptr, stride_xt, n_tokens, low_column, high_column, inside,
            CLAMPED, BLOCK_T)
        # fmt: on
        kept = (position >= 0) & (position < n_positions)
        position = tl.where(kept, position, 0)
        place = place_of(position, head64, N_HEADS, BLOCK_SIZE)
        slot = tl.load(slots_ptr + place, mask=kept, other=NO_SLOT_).to(tl.int32)
        x_low, x_high = as_fp32(low), as_fp32(high)
        if not STATIC:
            scale, inverse_low = scale_of(larger_size(x_low, x_high))
            inverse_high = inverse_low
        cells = codes_ptr + (position * N_HEADS + head64)[:, None] * HEAD_DIM + column
        # One half after the other, so that fewer numbers wait in registers.
        steps_low, moved_low = rounded(x_low, inverse_low, STATIC)
        tl.store(cells, low_byte(moved_low), mask=kept[:, None] & inside)
        rest_low = steps_low - (moved_low - ROUNDER)
        lost_low, whole_low = rest_low, steps_low
        if STATIC:
            lost_low, whole_low = rest_low * scale_low, x_low
        lost_low, whole_low = lost_low * lost_low, whole_low * whole_low
        steps_high, moved_high = rounded(x_high, inverse_high, STATIC)
        tl.store(cells + half, low_byte(moved_high), mask=kept[:, None] & inside)
        rest_high = steps_high - (moved_high - ROUNDER)
        lost_high, whole_high = rest_high, steps_high
        if STATIC:
            lost_high, whole_high = rest_high * scale_high, x_high
        lost = tl.sum(tl.fma(lost_high, lost_high, lost_low), 1)
        whole = tl.sum(tl.fma(whole_high, whole_high, whole_low), 1)
        # sqrt(lost / whole) > tau, 0 > tau for a token of zeros, without quotient and root.
        is_some = whole > 0
        lost, whole = tl.where(is_some, lost, -tau), tl.where(is_some, whole, 0.0)
        outlier = kept & (lost > most * whole)
        bit = 1
        if BY_TOKEN:
            bit = 1 << tl.arange(0, BLOCK_T)
        found = tl.sum(tl.where(outlier | (kept & (slot != NO_SLOT_)), bit, 0))
        if found != 0:
            # fmt: off
            slot = _slots_of(
                outlier, slot, place, head, slots_ptr, free_slots_ptr, free_count_ptr, dropped_ptr,
                n_slots, ORDERED, BLOCK_T)
            if BY_TOKEN:
                _store_rests_by_token(
                    tile * BLOCK_T, found, head, x_ptr, scale_ptr, slots_ptr, residual_ptr,
                    residual_scale_ptr, slot_mapping_ptr, stride_xt, n_tokens, n_slots,
                    BLOCK_SIZE, N_HEADS, HEAD_DIM, STATIC, RESIDUAL_BLOCK, MANTISSA,
                    LARGEST_CODE, BLOCK_H, BLOCK_T)
            else:
                _store_rest(
                    rest_low, rest_high, slot, kept & (slot != NO_SLOT_), head, residual_ptr,
                    residual_scale_ptr, n_slots, HEAD_DIM, RESIDUAL_BLOCK, MANTISSA,
                    LARGEST_CODE, BLOCK_H, BLOCK_T)
            # fmt: on
        if not STATIC:
            scale = tl.where(slot != NO_SLOT_, -scale, scale)
            tl.store(scale_ptr + place, scale, mask=kept)


@triton.jit
def _read(
    tile,
    x_ptr,
    slot_mapping_ptr,
    stride_xt,
    n_tokens,
    low_column,
    high_column,
    inside,
    CLAMPED: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """(positions [BLOCK_T], both halves [BLOCK_T, BLOCK_H] of a head) of a tile of tokens."""
    tokens = tile * BLOCK_T + tl.arange(0, BLOCK_T)
    there = tokens < n_tokens
    position = tl.load(slot_mapping_ptr + tokens, mask=there, other=-1).to(tl.int64)
    if CLAMPED:
        tokens = tl.minimum(tokens, n_tokens - 1)
    rows = x_ptr + tokens.to(tl.int64)[:, None] * stride_xt
    low = tl.load(rows + low_column, mask=there[:, None] & inside, other=0.0)
    high = tl.load(rows + high_column, mask=there[:, None] & inside, other=0.0)
    return position, low, high


@triton.jit
def _slots_of(
    outlier,
    slot,
    place,
    head,
    slots_ptr,
    free_slots_ptr,
    free_count_ptr,
    dropped_ptr,
    n_slots,
    ORDERED: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """Pool slots [BLOCK_T]: those that there are, and new ones for outliers without."""
    wanted = (outlier & (slot == NO_SLOT_)).to(tl.int32)
    count = tl.sum(wanted)
    if count > 0:
        if ORDERED:  # this program alone has the head
            free = tl.load(free_count_ptr + head)
            missing = tl.maximum(count - free, 0)
            tl.store(free_count_ptr + head, tl.maximum(free - count, 0))
            tl.store(dropped_ptr + head, tl.load(dropped_ptr + head) + missing)
        else:
            free = tl.maximum(tl.atomic_add(free_count_ptr + head, -count, sem="relaxed"), 0)
            missing = tl.maximum(count - free, 0)
            if missing > 0:
                tl.atomic_add(free_count_ptr + head, missing, sem="relaxed")
                tl.atomic_add(dropped_ptr + head, missing, sem="relaxed")
        top = free - _running_sum(wanted, BLOCK_T)
        takes = (wanted > 0) & (top >= 0)
        stack = free_slots_ptr + tl.cast(head, tl.int64) * n_slots
        own = tl.load(stack + tl.minimum(tl.maximum(top, 0), n_slots - 1), mask=takes, other=0)
        slot = tl.where(takes, own, slot)
        tl.store(slots_ptr + place, slot.to(tl.int16), mask=takes)
    return slot


@triton.jit
def _store_rest(
    rest_low,
    rest_high,
    slot,
    holds,
    head,
    residual_ptr,
    residual_scale_ptr,
    n_slots,
    HEAD_DIM: tl.constexpr,
    RESIDUAL_BLOCK: tl.constexpr,
    MANTISSA: tl.constexpr,
    LARGEST_CODE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """Both halves of the rests [BLOCK_T, BLOCK_H] to the pool, where a token ``holds`` a slot."""
    half: tl.constexpr = HEAD_DIM // 2
    blocks: tl.constexpr = half // RESIDUAL_BLOCK  # of one half
    # Whoever wrote the slots may have been wrong: never past the pool.
    row = tl.minimum(slot & 0xFFFF, n_slots - 1).to(tl.int64)
    row = (row + tl.cast(head, tl.int64) * n_slots)[:, None]
    four_low, exponent_low = _block_floats(
        rest_low, BLOCK_T, BLOCK_H, RESIDUAL_BLOCK, MANTISSA, LARGEST_CODE
    )
    four_high, exponent_high = _block_floats(
        rest_high, BLOCK_T, BLOCK_H, RESIDUAL_BLOCK, MANTISSA, LARGEST_CODE
    )
    column = tl.arange(0, BLOCK_H)[None, :]
    packed = (four_low | (four_high << 4)).to(tl.uint8)
    tl.store(residual_ptr + row * half + column, packed, mask=holds[:, None] & (column < half))
    which = tl.arange(0, BLOCK_H // RESIDUAL_BLOCK)[None, :]
    exponents = residual_scale_ptr + row * (2 * blocks) + which
    inside = holds[:, None] & (which < blocks)
    tl.store(exponents, exponent_low.to(tl.uint8), mask=inside)
    tl.store(exponents + blocks, exponent_high.to(tl.uint8), mask=inside)


@triton.jit
def _store_rests_by_token(
    first,
    found,
    head,
    x_ptr,
    scale_ptr,
    slots_ptr,
    residual_ptr,
    residual_scale_ptr,
    slot_mapping_ptr,
    stride_xt,
    n_tokens,
    n_slots,
    BLOCK_SIZE: tl.constexpr,
    N_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    STATIC: tl.constexpr,
    RESIDUAL_BLOCK: tl.constexpr,
    MANTISSA: tl.constexpr,
    LARGEST_CODE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """Rests of the tokens from ``first`` on that have a bit of ``found``, where they have a slot.

    Numbers and slots are read again: a whole tile's would take the registers of a second program.
    """
    half: tl.constexpr = HEAD_DIM // 2
    low = tl.arange(0, BLOCK_H)[None, :]
    high = low + half
    inside = low < half
    tl.debug_barrier()  # other threads have written the slots
    for i in range(BLOCK_T):
        if (found >> i) & 1:
            # fmt: off
            position, x_low, x_high = _read(
                first + i, x_ptr, slot_mapping_ptr, stride_xt, n_tokens, low, high, inside, False,
                1)
            # fmt: on
            place = place_of(position, tl.cast(head, tl.int64), N_HEADS, BLOCK_SIZE)
            slot = tl.load(slots_ptr + place).to(tl.int32)
            x_low, x_high = as_fp32(x_low), as_fp32(x_high)
            if STATIC:
                channels = scale_ptr + tl.cast(head, tl.int64) * HEAD_DIM
                inverse_low = inverse_of(tl.load(channels + low, mask=inside, other=0.0))
                inverse_high = inverse_of(tl.load(channels + high, mask=inside, other=0.0))
            else:
                _, inverse_low = scale_of(larger_size(x_low, x_high))
                inverse_high = inverse_low
            steps_low, moved_low = rounded(x_low, inverse_low, STATIC)
            steps_high, moved_high = rounded(x_high, inverse_high, STATIC)
            # fmt: off
            _store_rest(
                steps_low - (moved_low - ROUNDER), steps_high - (moved_high - ROUNDER), slot,
                slot != NO_SLOT_, head, residual_ptr, residual_scale_ptr, n_slots, HEAD_DIM,
                RESIDUAL_BLOCK, MANTISSA, LARGEST_CODE, BLOCK_H, 1)
            # fmt: on


NO_SLOT_ = tl.constexpr(NO_SLOT)


@triton.jit
def _running_sum(x, SIZE: tl.constexpr):
    """tl.cumsum of few numbers, by comparing places: what Ascend makes of cumsum is not run."""
    place = tl.arange(0, SIZE)
    return tl.sum(tl.where(place[None, :] <= place[:, None], x[None, :], 0), 1)


@triton.jit
def _block_floats(
    rest,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
    RESIDUAL_BLOCK: tl.constexpr,
    MANTISSA: tl.constexpr,
    LARGEST_CODE: tl.constexpr,
):
    """(codes [BLOCK_T, BLOCK_H], biased exponents [BLOCK_T, blocks]); kv_format says how."""
    n_blocks: tl.constexpr = BLOCK_H // RESIDUAL_BLOCK
    parts = tl.reshape(tl.abs(rest), (BLOCK_T, n_blocks, RESIDUAL_BLOCK))
    amax = tl.max(parts, 2) * (1.0 / LARGEST_CODE)
    exponent = (amax.to(tl.int32, bitcast=True) + 0x7FFFFF) >> 23
    exponent = tl.minimum(tl.maximum(exponent, 1), 253)
    unit = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    small = tl.minimum(parts * unit[:, :, None], LARGEST_CODE)
    small = tl.reshape(small, (BLOCK_T, BLOCK_H))
    bits = small.to(tl.int32, bitcast=True)
    if MANTISSA == 0:
        nearest = tl.maximum(((bits + 0x400000) >> 23) - 126, 1)
        code = tl.where(small > 0.5, nearest, 0)
    else:  # steps double with the exponent; below 1 they stay (subnormal numbers)
        power = tl.maximum(bits >> 23, 127)
        magic = (power + (23 - MANTISSA)) << 23  # a float whose last bit is one step
        moved = small + magic.to(tl.float32, bitcast=True)
        code = ((power - 127) << MANTISSA) + (moved.to(tl.int32, bitcast=True) - magic)
    return tl.where(rest < 0, code | 8, code), exponent


@op
def append_quantized_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_codes: torch.Tensor,
    k_scale: torch.Tensor,
    k_slots: torch.Tensor,
    k_residual: torch.Tensor,
    k_residual_scale: torch.Tensor,
    k_free_slots: torch.Tensor,
    k_free_count: torch.Tensor,
    k_dropped: torch.Tensor,
    k_tau: torch.Tensor,
    v_codes: torch.Tensor,
    v_scale: torch.Tensor,
    v_slots: torch.Tensor,
    v_residual: torch.Tensor,
    v_residual_scale: torch.Tensor,
    v_free_slots: torch.Tensor,
    v_free_count: torch.Tensor,
    v_dropped: torch.Tensor,
    v_tau: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    mantissa_bits: int = 1,
    config: Config | None = None,
) -> None:
    """The launch of ``tkernels.append_quantized_kv``, with the tensors of both caches.

    The tensors between v and slot_mapping are ``kv_format.fields(cache)`` of K's cache, then of
    V's, all contiguous, and V's of the shapes of K's; without residuals those from ``slots`` on are
    empty. All that are written must be different ones.

    Args:
        k: [n_tokens, num_kv_heads, head_dim], fp32, bf16 or fp16, any token and head strides.
        v: shape and dtype of ``k``, own strides.
        k_codes, v_codes: int8 [num_blocks, block_size, num_kv_heads, head_dim]. Written.
        k_scale, v_scale: fp32 [num_blocks, num_kv_heads, block_size], written; or, for static
            scales, [num_kv_heads, head_dim], read.
        k_slots, v_slots: int16 [num_blocks, num_kv_heads, block_size], pool slots, -1 = none.
            Written.
        k_residual, v_residual: uint8 [num_kv_heads, num_slots, head_dim / 2]. Written.
        k_residual_scale, v_residual_scale: uint8 [num_kv_heads, num_slots, head_dim / 16 or 32].
            Written.
        k_free_slots, v_free_slots: int32 [num_kv_heads, num_slots], a stack of slots.
        k_free_count, v_free_count: int32 [num_kv_heads], its height. Written.
        k_dropped, v_dropped: int32 [num_kv_heads], how many residuals found no slot. Written.
        k_tau, v_tau: fp32 [num_kv_heads]: a token whose relative error exceeds it is an outlier.
        slot_mapping: [n_tokens], int32 or int64: block * block_size + offset.
        mantissa_bits: of the 4-bit residual: 2 is E1M2, 1 is E2M1 (FP4), 0 is E3M0.
        config: launch config; None looks it up.

    Raises:
        TypeError, ValueError: an argument of the wrong kind, shape, dtype, stride or device.
    """
    tensors = (
        k, v, k_codes, k_scale, k_slots, k_residual, k_residual_scale, k_free_slots, k_free_count,
        k_dropped, k_tau, v_codes, v_scale, v_slots, v_residual, v_residual_scale, v_free_slots,
        v_free_count, v_dropped, v_tau, slot_mapping,
    )  # fmt: skip
    plan = planned(_plan, config, tensors, mantissa_bits)
    if plan is not None:
        launch, numbers = plan
        launch(*tensors, *numbers)


def _plan(*given: Any, config: Config | None) -> Any:
    """(launch, strides and counts); None where there is nothing to append."""
    *tensors, mantissa_bits = given
    k, v, codes = tensors[:3]
    static, residual_block = check_caches(*given)
    n_tokens, n_heads, head_dim = k.shape
    num_blocks, block_size = codes.shape[:2]
    n_positions = num_blocks * block_size
    if n_tokens == 0 or n_positions == 0:
        return None
    values = (n_tokens, n_heads, head_dim, block_size, k.dtype, static, residual_block)
    cfg, max_programs = resolve(SPEC, values, config)
    cfg = {"PDL": False, "STAGES": 1, "BY_TOKEN": False, "BLOCK_HEADS": 1, **cfg}
    n_tiles = cdiv(n_tokens, cfg["BLOCK_T"])
    groups = 2 * n_heads // cfg["BLOCK_HEADS"]  # of heads of K and of V
    # Ascend cannot address by what an atomic operation returns.
    ordered = residual_block > 0 and not current().registers
    of_a_group = 1 if ordered else min(n_tiles, max(1, max_programs // groups))
    constants = {
        "BLOCK_SIZE": block_size,
        "N_HEADS": n_heads,
        "HEAD_DIM": head_dim,
        "STATIC": static,
        "RESIDUAL_BLOCK": residual_block,
        "MANTISSA": mantissa_bits,
        "LARGEST_CODE": LARGEST[FORMATS[mantissa_bits]],
        "ORDERED": ordered,
        "CLAMPED": not current().registers,
        "ONE_TILE": of_a_group == n_tiles,
        "BLOCK_D": _width(head_dim, residual_block),
    }
    if of_a_group == n_tiles:  # nothing to copy ahead
        cfg["STAGES"] = 1
    # Each step as the reference rounds it: a rest that is not exact has other 4-bit codes.
    launch = bind(
        _append_quantized_kv_kernel,
        (groups * of_a_group,),
        **constants,
        **cfg,
        **rounding_each_step(),
        **({"launch_pdl": True} if cfg["PDL"] else {}),
    )
    n_slots = tensors[7].shape[-1]
    return launch, (*k.stride()[:2], *v.stride()[:2], n_tokens, n_positions, n_slots, n_tiles)


def _width(head_dim: int, residual_block: int) -> int:
    """Channels that are taken at once: a head's, and half of them where residuals pair halves."""
    if not residual_block:
        return next_power_of_2(head_dim)
    return next_power_of_2(head_dim // 2)


def _row(problem: Problem) -> int:
    """Channels that a token's head takes of a tile."""
    width = _width(problem["head_dim"], problem["residual_block"])
    return 2 * width if problem["residual_block"] else width


# ---- facts for tests, bench and tuner --------------------------------------------------------


def _tuning_key(problem: Problem) -> dict[str, Any]:
    bucket = 1
    while bucket < min(problem["n_tokens"], 16384):
        bucket *= 4
    return {
        "n_heads": problem["num_kv_heads"],
        "head_dim": problem["head_dim"],
        "itemsize": problem["dtype"].itemsize,
        "static": problem["static"],
        "residuals": problem["residual_block"] > 0,
        "tokens_up_to": bucket,
    }


def _space(dev: Device) -> dict[str, list[Any]]:
    space: dict[str, list[Any]] = {"BLOCK_T": [1, 2, 4, 8, 16, 32, 64]}
    if not dev.registers:  # a vector unit: no threads
        return {**space, "programs_per_core": [1]}
    return {
        **space,
        "BLOCK_HEADS": [1, 2, 4, 8],
        "programs_per_core": [0, 4, 6, 8, 12, 16, 24, 32],
        "STAGES": [1, 2, 3],
        "BY_TOKEN": [False, True],
        "PDL": [False, True] if _has_pdl(dev) else [False],
        "num_warps": [1, 2, 4, 8, 16],
    }


def _default_config(problem: Problem, dev: Device) -> Config:
    row = _row(problem)
    if not dev.registers:  # a vector unit: no threads
        return {"BLOCK_T": max(1, min(8, 2048 // row)), "programs_per_core": 1}
    static, residuals = problem["static"], problem["residual_block"] > 0
    # As an H200 liked it. Tiles grow until a core has `programs` of them, in these bounds.
    programs, smallest, largest = 4, 512, 4096  # channels
    most_warps, per_core = 8, 0
    if static:  # a channel's scale is divided by once
        largest, most_warps = 2048, 4
    if residuals:
        programs, smallest, most_warps = 8, 128, 2
        largest, per_core = (2048, 0) if static else (1024, 16)
    channels = 2 * problem["n_tokens"] * problem["num_kv_heads"] * row
    tile = next_power_of_2(max(1, channels // (programs * dev.num_cores)))
    rows = max(1, min(largest, max(smallest, tile)) // row)
    heads = 1
    if not static and not residuals:
        while heads < min(8, rows) and problem["num_kv_heads"] % (2 * heads) == 0:
            heads *= 2
    tokens = min(64, rows // heads)
    tile = tokens * heads * row
    # More warps than that only where a single row would not fit their registers.
    warps = max(min(most_warps, tile // 512), min(16, tile // 1024), 1)
    return {
        "BLOCK_T": tokens,
        "BLOCK_HEADS": heads,
        "num_warps": warps,
        "programs_per_core": per_core,
        "STAGES": 1,
        "BY_TOKEN": False,
        "PDL": _has_pdl(dev),
    }


def _why_illegal(config: Config, problem: Problem, dev: Device) -> str | None:
    if why := why_no_launch(config, dev, "BLOCK_T"):
        return why
    if config.get("PDL") and not _has_pdl(dev):
        return f"PDL needs sm90 or later, got {dev.arch}"
    heads = config.get("BLOCK_HEADS", 1)
    if heads < 1 or heads & (heads - 1) or problem["num_kv_heads"] % heads:
        return (
            f"BLOCK_HEADS={heads} is no power of two that divides {problem['num_kv_heads']} heads"
        )
    if heads > 1 and (problem["static"] or problem["residual_block"]):
        return f"BLOCK_HEADS={heads} must be 1 with static scales or residuals"
    elements = config["BLOCK_T"] * heads * _row(problem)
    if not dev.registers:  # a vector unit: no threads
        if elements * 40 > dev.local_mem_bytes:  # ten arrays of fp32
            return f"{elements * 40} bytes are in use at once, UB has {dev.local_mem_bytes}"
        return None
    if config.get("BY_TOKEN") and not problem["residual_block"]:
        return "BY_TOKEN is for residuals"
    if config.get("STAGES", 1) > 1 and not config["programs_per_core"]:
        return "STAGES > 1 needs programs of several tiles, that is programs_per_core > 0"
    if config.get("BY_TOKEN") and config["BLOCK_T"] > 32:
        return f"BLOCK_T={config['BLOCK_T']} tokens have no bits in 32"
    staged = elements * problem["dtype"].itemsize * config.get("STAGES", 1)
    if config.get("STAGES", 1) > 1 and staged > dev.local_mem_bytes // 2:
        return f"{staged} bytes on their way leave no room for a second program"
    a_thread = elements // (32 * config["num_warps"])
    return f"{a_thread} channels a thread would not fit its registers" if a_thread > 32 else None


SPEC = register(
    KernelSpec(
        name="append_quantized_kv",
        launch=append_quantized_kv,
        public_module="tkernels.quantized",
        reference=append_quantized_kv_ref,
        problem_fields=(
            "n_tokens",
            "num_kv_heads",
            "head_dim",
            "block_size",
            "dtype",
            "static",
            "residual_block",
        ),
        make_inputs=quantized_inputs,
        cases=CASES,
        tuning_key=_tuning_key,
        space=_space,
        default_config=_default_config,
        why_illegal=_why_illegal,
        cost=quantized_cost,
        mutates=MUTATED,
        compared=quantized_compared,
        scalar_loop_reason="places and pool slots are scattered, one a token",
        shape=quantized_shape,
    )
)
