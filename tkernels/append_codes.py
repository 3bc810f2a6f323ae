"""``append_quantized_kv`` for caches without residuals: rows of several heads, whole.

A program takes the same tokens of several heads. Where these lie side by side, as in a packed qkv
and in the cache, it reads and writes runs of whole tokens; and it takes fewer programs, of which a
chip starts about one in 1.2 ns under programmatic dependent launch (CONTRIBUTING, measured facts).
What both bodies make of a number and of a place is here, too.
"""

from __future__ import annotations

from tkernels.device import tl, triton


@triton.jit
def append_codes(
    head,
    first,
    n_tiles,
    step,
    x_ptr,
    codes_ptr,
    scale_ptr,
    slot_mapping_ptr,
    stride_xt,
    stride_xh,
    n_tokens,
    n_positions,
    BLOCK_SIZE: tl.constexpr,
    N_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    STATIC: tl.constexpr,
    CLAMPED: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Tiles ``first``, ``first + step`` .. of the tokens of ``BLOCK_HEADS`` heads from ``head`` on.

    A row is a token's head; the heads of a token are rows that follow each other.
    """
    row = tl.arange(0, BLOCK_T * BLOCK_HEADS)
    column = tl.arange(0, BLOCK_D)[None, :]
    inside = column < HEAD_DIM
    read_column = column
    if CLAMPED:  # Ascend reads for masked lanes, too
        read_column = tl.minimum(column, HEAD_DIM - 1)
    head = tl.cast(head, tl.int64)
    x_ptr += head * stride_xh
    if BLOCK_HEADS > 1:
        head += row % BLOCK_HEADS
    if STATIC:
        scale = tl.load(scale_ptr + head * HEAD_DIM + read_column, mask=inside, other=0.0)
        inverse = inverse_of(scale)
    for tile in tl.range(first, n_tiles, step, num_stages=STAGES):
        tokens = tile * BLOCK_T + row // BLOCK_HEADS
        there = tokens < n_tokens
        # Read before the places are known to be some, so that the loads do not wait for each other.
        position = tl.load(slot_mapping_ptr + tokens, mask=there, other=-1).to(tl.int64)
        if CLAMPED:
            tokens = tl.minimum(tokens, n_tokens - 1)
        cells = x_ptr + tokens.to(tl.int64)[:, None] * stride_xt + read_column
        if BLOCK_HEADS > 1:
            cells += (row % BLOCK_HEADS).to(tl.int64)[:, None] * stride_xh
        x = as_fp32(tl.load(cells, mask=there[:, None] & inside, other=0.0))
        kept = (position >= 0) & (position < n_positions)
        position = tl.where(kept, position, 0)
        if not STATIC:
            scale, inverse = scale_of(tl.abs(x))
        _, moved = rounded(x, inverse, STATIC)
        cells = codes_ptr + (position * N_HEADS + head)[:, None] * HEAD_DIM + column
        tl.store(cells, low_byte(moved), mask=kept[:, None] & inside)
        if not STATIC:
            tl.store(scale_ptr + place_of(position, head, N_HEADS, BLOCK_SIZE), scale, mask=kept)


# ---- what both bodies make of a number and of a place ------------------------------------------

# 1.5 * 2^23, whose last bit is 1: a sum with it is rounded to the nearest whole number, half to
# even, and its low byte is that number.
ROUNDER = tl.constexpr(12582912.0)


@triton.jit
def scale_of(sizes):
    """(scale [rows], its inverse [rows, 1]) of rows whose numbers have ``sizes`` [rows, n]."""
    absmax = tl.reduce(sizes, 1, _larger)
    spoilt = absmax * 0.0  # what is not a number is not read back as one
    absmax = tl.where(absmax < 7.888609052210118e-31, 0.0, absmax)  # 2^-100
    scale = absmax * 0.007874015748031496 + spoilt  # 1 / 127
    divisor = tl.where(absmax > 0, absmax, 1.0)
    inverse = tl.where(absmax > 0, tl.div_rn(127.0, divisor), 0.0)
    return scale, inverse[:, None]


@triton.jit
def inverse_of(scale):
    """1 / scale, one division a channel and tile; 0 where that is no normal number."""
    usable = scale >= 1.1754943508222875e-38  # 2^-126
    return tl.where(usable, tl.div_rn(1.0, tl.where(usable, scale, 1.0)), 0.0)


@triton.jit
def rounded(x, inverse, LIMITED: tl.constexpr):
    """(x in steps, the same beside ``ROUNDER``: that rounded); ``LIMITED``: may be beyond 127."""
    steps = x * inverse
    if LIMITED:
        return steps, tl.minimum(tl.maximum(steps, -127.0), 127.0) + ROUNDER
    return steps, steps + ROUNDER


@triton.jit
def _larger(a, b):
    """The larger one; NaN where one is."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def larger_size(a, b):
    """The larger absolute value; NaN where one is."""
    return _larger(tl.abs(a), tl.abs(b))


@triton.jit
def as_fp32(x):
    """x as fp32; of bf16 by its bits, one instruction a number where a conversion takes two."""
    if x.dtype == tl.bfloat16:
        return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    return x.to(tl.float32)


@triton.jit
def place_of(position, head, N_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Where a position >= 0 and head are in [num_blocks, num_kv_heads, block_size]."""
    if BLOCK_SIZE & (BLOCK_SIZE - 1) == 0:
        inside = position & (BLOCK_SIZE - 1)
    else:
        inside = position % BLOCK_SIZE
    return (position - inside) * N_HEADS + inside + head * BLOCK_SIZE


@triton.jit
def low_byte(x):
    return x.to(tl.int32, bitcast=True).to(tl.int8)
