"""The body of ``append_quantized_kv`` with residuals for Hopper (sm_90): ``variant`` "hopper".

Warps go their own ways (``lone_warps_hopper``): each goes through tiles of tokens of some heads, of
K or of V, and where tokens are many there are as many warps as a chip holds at once. A row, that is
a token's head, has 16 channels a lane, so that what is summed over it crosses few lanes, and its
codes are stored 16 bytes a lane. The next tile's numbers, and what the mapping says of it, are on
their way while one is worked on; more on its way was slower (CONTRIBUTING, measured facts), as all
wait in one line. The slots that a tile's places have are asked for ahead of its work and looked at
behind it.

Few rows are outliers or have a place that has a slot already. Their rests are made once more, from
numbers that are read again: a row at a time, by all lanes of the warp, which takes half of the
instructions that the lanes who had them took for all rows of a tile, and no registers before.
Static scales and their inverses, which a program has of one head, lie in shared memory, as
registers are for numbers on their way.

What is asked for a tile ahead stands behind a branch, and the first tile's mapping is looked at in
the loop alone, because ptxas puts loads off to where they are needed if nothing stands between. It
is written in Gluon, where layouts say which lane has what. Codes, scales and rests are those of the
portable body, bit by bit, where all numbers of a row are finite (others are read back as NaN, by
both) and so are static scales, none of which makes a number subnormal; squares are added in another
order, which can tell where a token's error is the threshold but for rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from tkernels import device, few_rows_hopper
from tkernels.append_codes import ROUNDER as _ROUNDER
from tkernels.append_codes import place_of
from tkernels.device import Device, tl
from tkernels.few_rows_hopper import register_options
from tkernels.flash_attn_hopper import is_aligned
from tkernels.kv_format import NO_SLOT
from tkernels.lone_warps_hopper import add_one as _add_one
from tkernels.lone_warps_hopper import first_bit as _first_bit
from tkernels.lone_warps_hopper import of_other as _of_other
from tkernels.lone_warps_hopper import put as _put
from tkernels.lone_warps_hopper import put_16_bytes as _put_16_bytes
from tkernels.lone_warps_hopper import take_32_bytes as _take_32_bytes
from tkernels.lone_warps_hopper import take_one as _take_one
from tkernels.lone_warps_hopper import take_short as _take_short
from tkernels.lone_warps_hopper import warp as _warp
from tkernels.paged_attn_quantized_hopper import (
    _let_next_kernel_start,
    _wait_for_earlier_kernels,
)
from tkernels.registry import Config, Problem

if TYPE_CHECKING:
    from tkernels import _triton as gl
    from tkernels import _triton as gluon
else:
    gl, gluon = few_rows_hopper.gl, few_rows_hopper.gluon

_barrier = getattr(gl, "thread_barrier", None) or gl.barrier  # newer tritons: barrier

CHANNELS = 16  # of a lane
_NO_SLOT = gl.constexpr(NO_SLOT)
_FAR_BELOW = gl.constexpr(-(1 << 31) + 1)

# fmt: off


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _or(a, b):
    return a | b


@gluon.jit
def _larger(a, b):
    """The larger one; NaN where one is."""
    return gl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@gluon.jit
def _larger_sizes(a, b, dtype: gl.constexpr):
    """Of two pairs of numbers of 16 bits: the larger sizes, with any sign; NaN where one is."""
    of_kind: gl.constexpr = "bf16x2" if dtype == gl.bfloat16 else "f16x2"
    return gl.inline_asm_elementwise(
        "max.NaN.xorsign.abs." + of_kind + " $0, $1, $2;", "=r,r,r", [a, b], dtype=gl.int32,
        is_pure=True, pack=1)


@gluon.jit
def _pair(pair, dtype: gl.constexpr):
    """Both numbers of a pair, as fp32."""
    if dtype == gl.bfloat16:
        low = (pair << 16).to(gl.float32, bitcast=True)
        high = (pair & -65536).to(gl.float32, bitcast=True)
    else:
        low = pair.to(gl.int16).to(gl.float16, bitcast=True).to(gl.float32)
        high = (pair >> 16).to(gl.int16).to(gl.float16, bitcast=True).to(gl.float32)
    return low, high


@gluon.jit
def _low_bytes(a, b, c, d):
    """Those of four numbers, side by side."""
    return gl.inline_asm_elementwise(
        "{ .reg .b32 low, high; prmt.b32 low, $1, $2, 0x0040; prmt.b32 high, $3, $4, 0x0040; "
        "prmt.b32 $0, low, high, 0x5410; }",
        "=r,r,r,r,r", [a, b, c, d], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def _inverse(absmax):
    """127 / absmax, to nearest, for 2^-100 <= absmax < inf, without the branches of a division.

    An approximate reciprocal, refined once, times 127, mended twice (Markstein, 1990): exact where
    no step leaves the normal numbers, as a reciprocal of more than 2^126 would.
    """
    divisor = absmax * 6.103515625e-05  # 2^-14
    near = gl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=r,r", [divisor], dtype=gl.float32, is_pure=True, pack=1)
    negated = divisor * -1.0  # part of the instructions that use it, which 0 - x is not
    near = gl.fma(gl.fma(negated, near, gl.full_like(divisor, 1.0)), near, near)
    most = gl.full_like(divisor, 127.0)
    quotient = most * near
    quotient = gl.fma(gl.fma(negated, quotient, most), near, quotient)
    quotient = gl.fma(gl.fma(negated, quotient, most), near, quotient)
    return quotient * 6.103515625e-05


@gluon.jit
def _scale_of(pairs, dtype: gl.constexpr):
    """(scale [R], its inverse [R]) of rows, as ``append_codes.scale_of`` has them."""
    sizes = pairs[0]
    for i in gl.static_range(1, len(pairs)):
        sizes = _larger_sizes(sizes, pairs[i], dtype)
    low, high = _pair(sizes, dtype)
    absmax = gl.reduce(_larger(gl.abs(low), gl.abs(high)), 1, _larger)
    spoilt = absmax * 0.0  # what is not a number is not read back as one
    is_some = absmax >= 7.888609052210118e-31  # 2^-100
    step = gl.full_like(absmax, 0.007874015748031496)  # 1 / 127
    scale = gl.fma(gl.where(is_some, absmax, 0.0), step, spoilt)
    return scale, gl.where(is_some, _inverse(gl.where(is_some, absmax, 1.0)), 0.0)


@gluon.jit
def _rounded(x, inverse, LIMITED: gl.constexpr):
    """As ``append_codes.rounded`` has it."""
    steps = x * inverse
    if LIMITED:
        moved = gl.minimum(gl.maximum(steps, -127.0), 127.0) + _ROUNDER
    else:
        moved = steps + _ROUNDER
    return steps, moved


@gluon.jit
def _codes(rests, unit, CLAMPED: gl.constexpr, MANTISSA: gl.constexpr, LARGEST_CODE: gl.constexpr):
    """Codes of at most four rests, a byte each, in units of their block; kv_format says how.

    Not ``CLAMPED`` where none is more than half a step: then the unit makes of the largest at most
    the largest code, but for rounding.
    """
    word = rests[0].to(gl.int32, bitcast=True) * 0
    for j in gl.static_range(len(rests)):
        small = gl.abs(rests[j]) * unit
        if CLAMPED:
            small = gl.minimum(small, LARGEST_CODE)
        bits = small.to(gl.int32, bitcast=True)
        if MANTISSA == 0:
            nearest = gl.maximum(((bits + 0x400000) >> 23) - 126, 1)
            code = gl.where(small > 0.5, nearest, 0)
        else:  # steps double with the exponent; below 1 they stay (subnormal numbers)
            power = gl.maximum(bits, 0x3F800000) & 0x7F800000
            magic = power + ((23 - MANTISSA) << 23)  # a float whose last bit is one step
            moved = small + magic.to(gl.float32, bitcast=True)
            code = moved.to(gl.int32, bitcast=True) - magic
            code += (power >> (23 - MANTISSA)) - (127 << MANTISSA)
        word = gl.where(rests[j] < 0, word | (8 << (8 * j)), word) + (code << (8 * j))
    return word


@gluon.jit
def _parts(x, N: gl.constexpr):
    """The N parts [R, L] of x [R, L, N]."""
    if N == 1:
        parts = gl.tuple([gl.reshape(x, [x.shape[0], x.shape[1]])])
    else:
        even, odd = gl.split(gl.reshape(x, [x.shape[0], x.shape[1], N // 2, 2]))
        evens, odds = _parts(even, N // 2), _parts(odd, N // 2)
        parts = gl.tuple([])
        for i in gl.static_range(N // 2):
            parts = parts + gl.tuple([evens[i], odds[i]])
    return parts


@gluon.jit
def _of_lane(x, lanes: gl.constexpr, N: gl.constexpr):
    """The N numbers [R, L] that each lane has of x [R, L, N], in their order."""
    parts = _parts(x, N)
    numbers = gl.tuple([])
    for i in gl.static_range(N):
        numbers = numbers + gl.tuple([gl.convert_layout(parts[i], lanes, assert_trivial=True)])
    return numbers


@gluon.jit
def _sixteen(x):
    """x, for each channel of a lane."""
    y = gl.tuple([])
    for _i in gl.static_range(16):
        y = y + gl.tuple([x])
    return y


@gluon.jit
def _which(rows, bits):
    """The bits of rows [R] that are; ``bits`` [R, L] are those of a lane's row.

    Over all lanes it is one instruction, and a branch by it is one that ptxas knows to be a warp's.
    """
    return gl.reduce(gl.reshape(gl.where(rows[:, None], bits, 0), [32]), 0, _or)


@gluon.jit
def _slots_of(
    wanted, slot, head, place, lane, slots_ptr, free_slots_ptr, free_count_ptr, dropped_ptr,
    n_slots,
):
    """Slots [R] of rows: what they have, and new ones where ``wanted``.

    Those are taken from the stack, or counted as dropped where it is empty.
    """
    asks = wanted[:, None] & (lane == 0)
    count = free_count_ptr + gl.where(asks, head[:, None], lane)
    left = _take_one(count, asks)
    top = gl.max(gl.where(asks, left, _FAR_BELOW), 1) - 1
    takes = wanted & (top >= 0)
    stack = free_slots_ptr + head.to(gl.int64) * n_slots
    own = gl.load(stack + gl.minimum(gl.maximum(top, 0), n_slots - 1), mask=takes, other=0)
    missing = asks & (top < 0)[:, None]
    _add_one(count, missing)
    _add_one(dropped_ptr + head[:, None], missing)
    _put(slots_ptr + place, own, takes, "b16")
    return gl.where(takes, own, slot)


@gluon.jit
def _store_rest(
    x_ptr, inverses, slot, head, me, residual_ptr, residual_scale_ptr, n_slots,
    dtype: gl.constexpr, STATIC: gl.constexpr, HEAD_DIM: gl.constexpr,
    RESIDUAL_BLOCK: gl.constexpr, MANTISSA: gl.constexpr, LARGEST_CODE: gl.constexpr,
):
    """A row's rests to its slot of the pool: each lane has some of its channels."""
    N: gl.constexpr = HEAD_DIM // 32
    SHARE: gl.constexpr = RESIDUAL_BLOCK // N  # lanes that share a scale
    rests = gl.tuple([])
    for i in gl.static_range(N // 2):
        low, high = _pair(gl.load(x_ptr + me * (N // 2) + i), dtype)
        low, moved_low = _rounded(low, inverses[2 * i], STATIC)
        high, moved_high = _rounded(high, inverses[2 * i + 1], STATIC)
        rests = rests + gl.tuple([low - (moved_low - _ROUNDER), high - (moved_high - _ROUNDER)])
    largest = gl.abs(rests[0])
    for i in gl.static_range(1, N):
        largest = gl.maximum(largest, gl.abs(rests[i]))
    for i in gl.static_range(4):
        if 1 << i < SHARE:
            other = _of_other(largest.to(gl.int32, bitcast=True), me ^ (1 << i))
            largest = gl.maximum(largest, other.to(gl.float32, bitcast=True))
    amax = largest * (1.0 / LARGEST_CODE)
    exponent = (amax.to(gl.int32, bitcast=True) + 0x7FFFFF) >> 23
    exponent = gl.minimum(gl.maximum(exponent, 1), 253)
    unit = ((254 - exponent) << 23).to(gl.float32, bitcast=True)
    # Whoever wrote the slots may have been wrong: never past the pool.
    to = gl.minimum(slot & 0xFFFF, n_slots - 1).to(gl.int64) + head.to(gl.int64) * n_slots
    to_scale = to * (HEAD_DIM // RESIDUAL_BLOCK) + me // SHARE
    _put(residual_scale_ptr + to_scale, exponent, me % SHARE == 0, "b8")
    # Channel j and j + head_dim / 2 share a byte: lanes of the upper half hand theirs over.
    WIDTH: gl.constexpr = 2 if N == 2 else 4  # bytes that are stored at once
    kind: gl.constexpr = gl.int16 if N == 2 else gl.int32
    residual_ptr = residual_ptr.to(gl.pointer_type(kind), bitcast=True)
    for i in gl.static_range(0, N, WIDTH):
        if N == 2:
            word = _codes(gl.tuple([rests[0], rests[1]]), unit, STATIC, MANTISSA, LARGEST_CODE)
        else:
            four = gl.tuple([rests[i], rests[i + 1], rests[i + 2], rests[i + 3]])
            word = _codes(four, unit, STATIC, MANTISSA, LARGEST_CODE)
        word = word | _of_other(word, me ^ 16) << 4
        to_word = to * (HEAD_DIM // 2 // WIDTH) + (me * N + i) // WIDTH
        _put(residual_ptr + to_word, word, me < 16, "b16" if N == 2 else "b32")


@gluon.jit
def _kept(mapped, n_positions):
    """(whether a token is kept [R], its position [R]; -1 where it is not)."""
    position = mapped.to(gl.int64)
    # Of a number that is known not to be negative both are one comparison.
    kept = (position >= 0) & (position < (n_positions & 0x7FFFFFFF).to(gl.int64))
    return kept, gl.where(kept, position, -1).to(gl.int32)


@gluon.jit(do_not_specialize=[
    "stride_kt", "stride_kh", "stride_vt", "stride_vh", "n_tokens", "n_positions", "n_slots",
    "n_tiles"])
def _append_rests_hopper_kernel(
    k_ptr, v_ptr, k_codes_ptr, k_scale_ptr, k_slots_ptr, k_residual_ptr, k_residual_scale_ptr,
    k_free_slots_ptr, k_free_count_ptr, k_dropped_ptr, k_tau_ptr, v_codes_ptr, v_scale_ptr,
    v_slots_ptr, v_residual_ptr, v_residual_scale_ptr, v_free_slots_ptr, v_free_count_ptr,
    v_dropped_ptr, v_tau_ptr, slot_mapping_ptr,
    stride_kt, stride_kh, stride_vt, stride_vh,  # in units of 16 bytes
    n_tokens, n_positions, n_slots, n_tiles,
    BLOCK_SIZE: gl.constexpr, N_HEADS: gl.constexpr, HEAD_DIM: gl.constexpr,
    STATIC: gl.constexpr, RESIDUAL_BLOCK: gl.constexpr, MANTISSA: gl.constexpr,
    LARGEST_CODE: gl.constexpr, BLOCK_T: gl.constexpr, BLOCK_HEADS: gl.constexpr,
    PDL: gl.constexpr,
):
    DTYPE: gl.constexpr = k_ptr.dtype.element_ty
    W: gl.constexpr = gl.num_warps()
    L: gl.constexpr = HEAD_DIM // 16  # lanes of a row
    R: gl.constexpr = BLOCK_T * BLOCK_HEADS  # of a warp; a lane has a part of one
    lanes: gl.constexpr = gl.BlockedLayout([1, 1], [32 // L, L], [W, 1], [1, 0])
    rows: gl.constexpr = gl.SliceLayout(1, lanes)
    groups: gl.constexpr = N_HEADS // BLOCK_HEADS
    if PDL:
        _let_next_kernel_start()
    # A program stays with its heads, of K or of V. What lies side by side is read at one time.
    # Its warps have tiles of their own.
    of_k = gl.program_id(0) % 2 == 0
    head0 = gl.program_id(0) // 2 % groups * BLOCK_HEADS
    first = gl.program_id(0) // (2 * groups) * W + _warp()
    step = gl.num_programs(0) // (2 * groups) * W
    x_ptr = k_ptr if of_k else v_ptr
    codes_ptr = k_codes_ptr if of_k else v_codes_ptr
    scale_ptr = k_scale_ptr if of_k else v_scale_ptr
    slots_ptr = k_slots_ptr if of_k else v_slots_ptr
    tau_ptr = k_tau_ptr if of_k else v_tau_ptr
    stride_xt = stride_kt if of_k else stride_vt
    stride_xh = stride_kh if of_k else stride_vh
    row = gl.arange(0, R, rows)
    head = head0 + row % BLOCK_HEADS
    lane = gl.arange(0, L, gl.SliceLayout(0, lanes))[None, :]
    me = row[:, None] * L + lane
    bits = (1 << row)[:, None] + gl.full([R, L], 0, gl.int32, lanes)
    x_ptr = x_ptr.to(gl.pointer_type(gl.int32), bitcast=True)
    all_ptr = x_ptr
    token = first * BLOCK_T + row // BLOCK_HEADS
    from_token = token.to(gl.int64) * stride_xt.to(gl.int64) * 4
    from_head = head.to(gl.int64) * stride_xh.to(gl.int64) * 4
    x_ptr = x_ptr + (from_token + from_head)[:, None] + lane * 8
    a_step = (step * BLOCK_T).to(gl.int64) * stride_xt.to(gl.int64) * 4
    codes_ptr = codes_ptr + (head * HEAD_DIM)[:, None] + lane * 16
    if PDL:
        _wait_for_earlier_kernels()
    pairs = _take_32_bytes(x_ptr, (token < n_tokens)[:, None])
    mapped = gl.load(slot_mapping_ptr + token, mask=token < n_tokens, other=-1)
    tau = gl.load(tau_ptr + head)
    most = gl.where(tau < 0, -1.0, tau * tau)
    least = gl.where(tau < 0, -1.0, 0.0)
    if STATIC:  # of one head
        once: gl.constexpr = gl.BlockedLayout([1, 1], [2, 16], [W, 1], [1, 0])
        channel = 16 * gl.arange(0, L, gl.SliceLayout(1, once))[:, None]
        channel += gl.arange(0, 16, gl.SliceLayout(0, once))[None, :]
        scale = gl.load(scale_ptr + head0 * HEAD_DIM + channel)
        usable = scale >= 1.1754943508222875e-38  # 2^-126, as ``append_codes.inverse_of``
        inverse = gl.where(usable, gl.div_rn(1.0, gl.where(usable, scale, 1.0)), 0.0)
        # Lanes of a row read 16 bytes of each 64 at once, from all banks.
        in_turn: gl.constexpr = gl.SwizzledSharedLayout(4, 2, 4, [1, 0])
        scales_s = gl.allocate_shared_memory(gl.float32, [L, 16], in_turn, scale)
        inverses_s = gl.allocate_shared_memory(gl.float32, [L, 16], in_turn, inverse)
        _barrier()
        of_row: gl.constexpr = gl.BlockedLayout([1, 1, 16], [32 // L, L, 1], [W, 1, 1], [2, 1, 0])
        channels: gl.constexpr = gl.SliceLayout(0, of_row)
        N: gl.constexpr = HEAD_DIM // 32
        spread: gl.constexpr = gl.BlockedLayout([1, N], [L, 16 // N], [W, 1], [1, 0])
    for tile in range(first, n_tiles, step):
        x = pairs
        kept, at = _kept(mapped, n_positions)
        here = place_of(at, head, N_HEADS, BLOCK_SIZE)
        held = _take_short(slots_ptr + here, kept)
        if tile + step < n_tiles:
            token, x_ptr = token + step * BLOCK_T, x_ptr + a_step
            pairs = _take_32_bytes(x_ptr, (token < n_tokens)[:, None])
            mapped = gl.load(slot_mapping_ptr + token, mask=token < n_tokens, other=-1)

        if STATIC:
            scales = _of_lane(gl.expand_dims(scales_s.load(channels), 0), lanes, 16)
            inverses = _of_lane(gl.expand_dims(inverses_s.load(channels), 0), lanes, 16)
        else:
            scale, inverse = _scale_of(x, DTYPE)
            same = gl.expand_dims(inverse.to(gl.int32, bitcast=True), 1)
            same += gl.full([R, L], 0, gl.int32, lanes)  # costs nothing, 0.0 would
            inverses = _sixteen(same.to(gl.float32, bitcast=True))
        lost_low = gl.full([R, L], 0.0, gl.float32, lanes)
        lost_high, whole_low, whole_high = lost_low, lost_low, lost_low
        moved = gl.tuple([])
        for i in gl.static_range(8):
            x_low, x_high = _pair(x[i], DTYPE)
            low, moved_low = _rounded(x_low, inverses[2 * i], STATIC)
            high, moved_high = _rounded(x_high, inverses[2 * i + 1], STATIC)
            rest_low, rest_high = low - (moved_low - _ROUNDER), high - (moved_high - _ROUNDER)
            if STATIC:
                rest_low, rest_high = rest_low * scales[2 * i], rest_high * scales[2 * i + 1]
                low, high = x_low, x_high
            lost_low = gl.fma(rest_low, rest_low, lost_low)
            lost_high = gl.fma(rest_high, rest_high, lost_high)
            whole_low = gl.fma(low, low, whole_low)
            whole_high = gl.fma(high, high, whole_high)
            moved = moved + gl.tuple([
                moved_low.to(gl.int32, bitcast=True), moved_high.to(gl.int32, bitcast=True)])
        words = gl.tuple([])
        for i in gl.static_range(4):
            word = _low_bytes(
                moved[4 * i], moved[4 * i + 1], moved[4 * i + 2], moved[4 * i + 3])
            words = words + gl.tuple([word])
        to = codes_ptr + (at.to(gl.int64) * (N_HEADS * HEAD_DIM))[:, None]
        _put_16_bytes(to, words[0], words[1], words[2], words[3], kept[:, None])

        lost = gl.reduce(lost_low + lost_high, 1, _add)
        whole = gl.reduce(whole_low + whole_high, 1, _add)
        # sqrt(lost / whole) > tau, 0 > tau for a token of zeros or without a scale.
        lost, whole = gl.maximum(lost, 0.0), gl.maximum(whole, 0.0)
        outlier = kept & (lost > gl.fma(most, whole, least))
        wanted = outlier & (held == _NO_SLOT)
        rows_left = _which(outlier | (held != _NO_SLOT), bits)
        if rows_left != 0:
            if _which(wanted, bits) != 0:
                held = _slots_of(
                    wanted, held, head, here, lane, slots_ptr,
                    k_free_slots_ptr if of_k else v_free_slots_ptr,
                    k_free_count_ptr if of_k else v_free_count_ptr,
                    k_dropped_ptr if of_k else v_dropped_ptr, n_slots)
                rows_left = _which(held != _NO_SLOT, bits)
            slots = held[:, None] + gl.full([R, L], 0, gl.int32, lanes)
            while rows_left != 0:
                one = _first_bit(rows_left)
                rows_left = rows_left & (rows_left - 1)
                its_lane = me * 0 + one * L
                its_token, its_head = tile * BLOCK_T + one // BLOCK_HEADS, head0 + one % BLOCK_HEADS
                its_x = its_token.to(gl.int64) * stride_xt.to(gl.int64)
                its_x += its_head.to(gl.int64) * stride_xh.to(gl.int64)
                if STATIC:
                    parts = gl.reshape(inverses_s.load(spread), [R, L, N])
                    its_inverses = _of_lane(parts, lanes, N)
                else:
                    its_inverses = _sixteen(
                        _of_other(same, its_lane).to(gl.float32, bitcast=True))
                _store_rest(
                    all_ptr + its_x * 4, its_inverses, _of_other(slots, its_lane), its_head, me,
                    k_residual_ptr if of_k else v_residual_ptr,
                    k_residual_scale_ptr if of_k else v_residual_scale_ptr, n_slots, DTYPE,
                    STATIC, HEAD_DIM, RESIDUAL_BLOCK, MANTISSA, LARGEST_CODE)
        if not STATIC:
            _put(scale_ptr + here, gl.where(held != _NO_SLOT, -scale, scale), kept, "b32")


# fmt: on


def rows_of(head_dim: int) -> int:
    """Rows of a warp's tile: a lane has a part of one."""
    return 32 * CHANNELS // head_dim


def has_body(dev: Device) -> bool:
    return dev.arch == "sm90" and device.is_there(gl)


def why_unfit(problem: Problem, dev: Device) -> str | None:
    """Reason why this body cannot serve such a problem, whatever the config; None: it can."""
    if dev.arch != "sm90":
        return f"variant hopper needs an sm90 device, got {dev.arch}"
    if not device.is_there(gl):
        return "variant hopper needs a triton that has Gluon (3.6 or newer), got none"
    if not problem["residual_block"]:
        return "variant hopper is for caches with residuals"
    if problem["dtype"] not in (torch.bfloat16, torch.float16):
        return f"variant hopper needs bfloat16 or float16, got {problem['dtype']}"
    if problem["head_dim"] not in (64, 128, 256):
        return f"variant hopper has head_dim 64, 128 or 256, got {problem['head_dim']}"
    return None


def bind(
    k: torch.Tensor,
    v: torch.Tensor,
    config: Config,
    max_programs: int,
    constants: dict[str, Any],
    counts: tuple[int, int, int],
) -> tuple[Callable[..., None], tuple[int, ...]]:
    """(launch, numbers behind its tensors) for k and v of such strides.

    ``counts``: tokens, places of a cache, slots of a head's pool.
    """
    groups = 2 * constants["N_HEADS"] // config["BLOCK_HEADS"]  # of heads of K and of V
    n_tiles = device.cdiv(counts[0], config["BLOCK_T"])
    of_all = device.cdiv(n_tiles, config["num_warps"])
    of_a_group = min(of_all, max(1, max_programs // groups))
    # Each step as the reference rounds it: a rest that is not exact has other 4-bit codes.
    launch = device.bind(
        _append_rests_hopper_kernel,
        (groups * of_a_group,),
        **constants,
        **{name: config[name] for name in ("BLOCK_T", "BLOCK_HEADS", "PDL", "num_warps")},
        **register_options(config["num_warps"], max_programs),
        **device.rounding_each_step(),
        **({"launch_pdl": True} if config["PDL"] else {}),
    )
    pieces = 16 // k.element_size()
    strides = (stride // pieces for x in (k, v) for stride in x.stride()[:2])
    return launch, (*strides, *counts, n_tiles)


def can_address(k: torch.Tensor, v: torch.Tensor, n_positions: int) -> bool:
    """Whether strides come in pieces of 16 bytes, and they, places and tokens fit 32 bits."""
    # A warp looks a step past its last tile, and its first may be past all tokens.
    tokens = 3 * (k.shape[0] + (1 << 8))
    counted = (*k.stride()[:2], *v.stride()[:2], n_positions * k.shape[1], tokens)
    return is_aligned(k, v) and max(counted) < 1 << 31


def default_config(problem: Problem, dev: Device) -> Config:
    """As an H200 liked it."""
    dim, cores = problem["head_dim"], dev.num_cores
    tiles = 2 * problem["n_tokens"] * problem["num_kv_heads"] // rows_of(dim)
    warps, heads = 2, 1
    if tiles > 16 * cores:  # several a warp
        warps = 4
    elif not problem["static"]:
        while heads < min(4, rows_of(dim)) and problem["num_kv_heads"] % (2 * heads) == 0:
            heads *= 2
    return {
        "BLOCK_T": rows_of(dim) // heads,
        "variant": "hopper",
        "BLOCK_HEADS": heads,
        "num_warps": warps,
        "programs_per_core": 8,
        "PDL": True,
        **FIXED,
    }


# What the portable body alone can choose.
FIXED: dict[str, Any] = {"STAGES": 1, "BY_TOKEN": False}


def why_illegal(config: Config, problem: Problem, dev: Device) -> str | None:
    """Reason why a config of this body cannot be launched; None: it can."""
    if why := why_unfit(problem, dev):
        return why
    if wrong := [f"{n} {v}" for n, v in FIXED.items() if config.get(n, v) != v]:
        return f"variant hopper has {', '.join(wrong)}"
    rows = rows_of(problem["head_dim"])
    if config["BLOCK_T"] * config["BLOCK_HEADS"] != rows:
        got = f"{config['BLOCK_T']} * {config['BLOCK_HEADS']}"
        return f"variant hopper has BLOCK_T * BLOCK_HEADS of {rows}, got {got}"
    if problem["static"] and config["BLOCK_HEADS"] > 1:
        return f"variant hopper has BLOCK_HEADS 1 with static scales, got {config['BLOCK_HEADS']}"
    most = 32 // config["num_warps"]  # of 64 registers a thread
    if config["programs_per_core"] > most:
        got = config["programs_per_core"]
        return f"variant hopper has programs_per_core of at most {most}, got {got}"
    return None
