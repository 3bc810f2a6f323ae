"""``append_quantized_kv`` for caches with residuals: the portable body.

A program has one head. It takes some tokens at a time and writes their codes; rests are packed from
registers (or, ``BY_TOKEN``, read again), and only where a token of the tile is an outlier.
"""

from __future__ import annotations

from tkernels.append_codes import (
    ROUNDER,
    as_fp32,
    inverse_of,
    larger_size,
    low_byte,
    place_of,
    rounded,
    scale_of,
)
from tkernels.device import tl, triton
from tkernels.kv_format import NO_SLOT

NO_SLOT_ = tl.constexpr(NO_SLOT)


@triton.jit
def append_rests(
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
