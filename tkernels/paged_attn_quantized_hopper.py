"""The body of ``paged_attn_quantized`` for decode on Hopper (sm_90): ``variant`` "hopper".

One warp a program, several programs a core: what a warp waits for, the others cover, and nothing
crosses warps. Scores are computed turned, keys by query heads: [BLOCK_N, 16 bytes of a row] times
[.., 8 heads], so the heads that share a KV head fill a tile of 8 where the portable body pads them
to 16, and all that is done to scores, weights and results is half.

Both sides are fp16, into which an int8 code goes in 1.25 instructions (bf16: 2). q is scaled by a
power of two so that its largest number is between 4 and 8; weights p * v_scale are at most 8, in
units of the smallest power of two above all v_scale so far: what that loses of them lies 28 binary
digits below the largest.

A channel's (static) scale is in q, and in the result behind the loop. q * k_scale is two numbers,
each with products of its own: of one, the lse is off by 8e-4 where 8e-5 is allowed, and scores with
a deviation of 15 by so much that bf16 results are, by 2e-2 (in two, 2e-7, and nothing to be seen;
against fp64, scales of channels over three decades). Weights are p, and up to 8 because the maximum
is held 3 below the largest score.

Tokens with residuals are few, and anywhere. A step finds those of its keys by two words of bits and
packs the numbers of their slots into a list of LIST rows, a step before their codes are there, so
that the pool rows come with the codes. Their own products are small:

    scores  += onehot[keys, list] @ (residual[list, :] @ q)
    result  += residual[list, :]^T @ (onehot[list, keys] @ weights)

If there are more than LIST, the rest takes further rounds, in order. Where half of LIST is enough,
as it is nearly always, the other half are zeros that nothing is computed for (FEW).

Residuals of static scales are large where a number is beyond what its scale was made for. There a
residual's unit counts up to 2^12 (e2m1: 24576 steps of a code, e1m2: 7168), and what is larger as
that; 2^14, which 4-bit codes are brought up by, goes to the one-hot matrix and to the residuals of
V, so that fp16 holds the other side.

It is written in Gluon. How codes come apart as even and odd channels is told in the portable body;
here they are also apart by the half of the head that they are in, as residuals are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from tkernels import device
from tkernels import flash_attn_hopper as flash
from tkernels.device import Device
from tkernels.flash_attn_hopper import _capped
from tkernels.kv_format import NO_SLOT
from tkernels.paged_attn_order import _program_at
from tkernels.registry import Config, Problem

if TYPE_CHECKING:
    from tkernels import _triton as ampere
    from tkernels import _triton as gl
    from tkernels import _triton as gluon
else:
    gl, gluon = flash.gl, flash.gluon
    ampere = device.triton_part("triton.experimental.gluon.language.nvidia.ampere")

# Its name in newer tritons, and in 3.6.
_copy = ampere.async_copy
_load_async = getattr(_copy, "async_load", None) or _copy.async_copy_global_to_shared
_commit, _wait = _copy.commit_group, _copy.wait_group

LIST = 16  # rows of the left operand of a product

_LOWEST = gl.constexpr(-3.0e38)
_NO_SLOT = gl.constexpr(NO_SLOT & 0xFFFF)
_LOG2E, _LN2 = gl.constexpr(1.4426950408889634), gl.constexpr(0.6931471805599453)


def _conversion() -> Any:
    """PTX from two int16, of two int8 codes each, to fp16 of the low bytes and of the high.

    The bytes, as code + 128, are put beside an exponent whose last bit counts 1; less 1152.
    """
    text = "{.reg .b32 u, m; xor.b32 u, $2, 0x80808080; mov.b32 m, 0x64806480;"
    for i, pick in enumerate(("0x4240", "0x4341")):
        text += f"prmt.b32 ${i}, u, 0x64646464, {pick}; sub.f16x2 ${i}, ${i}, m;"
    return gl.constexpr(text + "}")


def _decoding(mantissa: int) -> Any:
    """PTX from two int16, of four 4-bit codes each, to fp16 of codes 0, 2, 1 and 3, times 2^-14.

    Magnitudes go to where fp16 has the lowest bits of its exponent and the highest of its fraction,
    signs to bit 15.
    """
    mask = f"0x{(7 << (10 - mantissa)) * 0x10001:x}"
    text = "{.reg .b32 s, t;"
    for out, nibble in ((0, 0), (1, 2), (2, 1), (3, 3)):
        left = 10 - mantissa - 4 * nibble
        text += f"shl.b32 t, $4, {left};" if left >= 0 else f"shr.u32 t, $4, {-left};"
        text += f"and.b32 t, t, {mask}; shl.b32 s, $4, {12 - 4 * nibble};"
        text += f"lop3.b32 ${out}, s, 0x80008000, t, 0xea;"  # s & 0x80008000 | t
    return gl.constexpr(text + "}")


_CODES = _conversion()
_DECODE0, _DECODE1, _DECODE2 = (_decoding(bits) for bits in range(3))

# fmt: off


@gluon.jit
def _wait_for_earlier_kernels():
    gl.inline_asm_elementwise(
        "griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _let_next_kernel_start():
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _codes(pairs):
    """fp16 of the int8 codes in the low and in the high bytes of int16."""
    return gl.inline_asm_elementwise(
        _CODES, "=&r,=&r,r", [pairs], dtype=(gl.float16, gl.float16), is_pure=True, pack=2)


@gluon.jit
def _halves(x, ROWS: gl.constexpr):
    """The upper and the lower half of a matrix (not ROWS: left and right), where no data moves."""
    m: gl.constexpr = x.shape[0]
    n: gl.constexpr = x.shape[1]
    if ROWS:
        parts = gl.permute(gl.reshape(x, [2, m // 2, n]), [1, 2, 0])
    else:
        parts = gl.permute(gl.reshape(x, [m, 2, n // 2]), [0, 2, 1])
    first, second = gl.split(parts)
    return (gl.convert_layout(first, x.type.layout, assert_trivial=True),
            gl.convert_layout(second, x.type.layout, assert_trivial=True))


@gluon.jit
def _stacked(upper, lower):
    """What ``_halves`` took apart."""
    m: gl.constexpr = upper.shape[0]
    n: gl.constexpr = upper.shape[1]
    parts = gl.reshape(gl.permute(gl.join(upper, lower), [2, 0, 1]), [2 * m, n])
    return gl.convert_layout(parts, upper.type.layout, assert_trivial=True)


@gluon.jit
def _right_operand(x, right: gl.constexpr, FEW: gl.constexpr):
    """A result [M, R], in fp16, as the right operand of the next product.

    Each lane hands its numbers of 8 x 8 to where the turned matrix has them; turned once more, in
    name only, they are where a right operand has them. With FEW it has as many zeros behind them.
    """
    m: gl.constexpr = x.shape[0]
    r: gl.constexpr = x.shape[1]
    turned = gl.inline_asm_elementwise(
        "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", "=r,r", [x.to(gl.float16)],
        dtype=gl.float16, is_pure=True, pack=2)
    blocks = gl.permute(gl.reshape(turned, [m // 8, 8, r // 8, 8]), [0, 3, 2, 1])
    blocks = gl.reshape(blocks, [m, r])
    return _whole(blocks, True, FEW, right)


@gluon.jit
def _decoded(words, MANTISSA: gl.constexpr, FACTOR: gl.constexpr):
    """fp16 of the 4-bit codes 0, 2, 1 and 3 of int16, times 2^-14, and FACTOR if that is not 1."""
    text: gl.constexpr = _DECODE0 if MANTISSA == 0 else (_DECODE1 if MANTISSA == 1 else _DECODE2)
    a, b, c, d = gl.inline_asm_elementwise(
        text, "=&r,=&r,=&r,=&r,r", [words],
        dtype=(gl.float16, gl.float16, gl.float16, gl.float16), is_pure=True, pack=2)
    if FACTOR != 1:
        a, b, c, d = a * FACTOR, b * FACTOR, c * FACTOR, d * FACTOR
    return a, b, c, d


@gluon.jit
def _part(x, ROWS: gl.constexpr, FEW: gl.constexpr):
    """With FEW the first half of a matrix' rows (not ROWS: of its columns), where no data moves."""
    m: gl.constexpr = x.shape[0]
    n: gl.constexpr = x.shape[1]
    part = x
    if FEW:
        if ROWS:
            parts = gl.permute(gl.reshape(x, [2, m // 2, n]), [1, 2, 0])
        else:
            parts = gl.permute(gl.reshape(x, [m, 2, n // 2]), [0, 2, 1])
        part, _ = gl.split(parts)
    return part


@gluon.jit
def _whole(x, ROWS: gl.constexpr, FEW: gl.constexpr, layout: gl.constexpr):
    """What ``_part`` is of, if the other half are zeros."""
    m: gl.constexpr = x.shape[0]
    n: gl.constexpr = x.shape[1]
    whole = x
    if FEW:
        both = gl.join(x, gl.full([m, n], 0.0, x.dtype, x.type.layout))
        if ROWS:
            whole = gl.reshape(gl.permute(both, [2, 0, 1]), [2 * m, n])
        else:
            whole = gl.reshape(gl.permute(both, [0, 2, 1]), [m, 2 * n])
    return gl.convert_layout(whole, layout, assert_trivial=True)


@gluon.jit
def _equal(a, b):
    """fp16: 1 where fp16 a and b are equal, else 0."""
    return gl.inline_asm_elementwise(
        "set.eq.f16x2.f16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=gl.float16, is_pure=True, pack=2)


@gluon.jit
def _bits_set(word):
    return gl.inline_asm_elementwise(
        "popc.b32 $0, $1;", "=r,r", [word], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def _pages(pos, columns, table_ptr, BLOCK_SIZE: gl.constexpr, N: gl.constexpr):
    """The pages of keys pos .. pos + N, one after the other."""
    pages = gl.tuple([])
    for i in gl.static_range(N // BLOCK_SIZE if N > BLOCK_SIZE else 1):
        # From the last column on the table may say anything, and there may be none.
        column = gl.minimum(pos // BLOCK_SIZE + i, columns - 1)
        page = gl.load(table_ptr + column, mask=columns > 0, other=0)
        pages = pages + gl.tuple([page])
    return pages


@gluon.jit
def _places(n, pos, pages, BLOCK_SIZE: gl.constexpr, N: gl.constexpr):
    """(page, token in it) of keys pos + n."""
    page = n * 0 + pages[0]
    if N > BLOCK_SIZE:
        for i in gl.static_range(1, N // BLOCK_SIZE):
            page = gl.where(n // BLOCK_SIZE == i, pages[i], page)
        slot = n % BLOCK_SIZE
    else:
        slot = pos % BLOCK_SIZE + n
    return page.to(gl.int64), slot


@gluon.jit
def _fetch(
    stage, pos, pages, low, high, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, k_s, v_s, scales_s,
    HEADS: gl.constexpr, BLOCK_SIZE: gl.constexpr, D: gl.constexpr, N: gl.constexpr,
    STATIC: gl.constexpr,
):
    """Start to bring the codes of keys pos .. pos + N, whole rows at once, and their scales."""
    lanes: gl.constexpr = D // 16
    tile: gl.constexpr = gl.BlockedLayout([1, 8], [32 // lanes, lanes], [1, 1], [1, 0])
    line: gl.constexpr = gl.BlockedLayout([N // 32], [32], [1], [0])
    n = gl.arange(0, N, gl.SliceLayout(1, tile))
    j = gl.arange(0, D // 2, gl.SliceLayout(0, tile))
    page, slot = _places(n, pos, pages, BLOCK_SIZE, N)
    cells = page * (BLOCK_SIZE * HEADS * (D // 2)) + slot * (HEADS * (D // 2))
    at = cells[:, None] + j[None, :]
    _load_async(k_s.index(stage), k_ptr + at)
    _load_async(v_s.index(stage), v_ptr + at)
    if not STATIC:
        n = gl.arange(0, N, line)
        page, slot = _places(n, pos, pages, BLOCK_SIZE, N)
        place = page * (HEADS * BLOCK_SIZE) + slot
        # Codes are numbers wherever they are, scales and slots may be anything out of sight.
        ok = (n < high - pos) & (n >= low - pos)
        _load_async(
            scales_s.index(stage * 2), k_scale_ptr + place, mask=ok)
        _load_async(
            scales_s.index(stage * 2 + 1), v_scale_ptr + place, mask=ok)


@gluon.jit
def _slots(
    pos, pages, low, high, k_slots_ptr, v_slots_ptr, HEADS: gl.constexpr,
    BLOCK_SIZE: gl.constexpr, N: gl.constexpr,
):
    """int32 [N]: slots of keys pos .. pos + N of K and of V, 0xFFFF if none or out of sight."""
    line: gl.constexpr = gl.BlockedLayout([N // 32], [32], [1], [0])
    n = gl.arange(0, N, line)
    page, slot = _places(n, pos, pages, BLOCK_SIZE, N)
    place = page * (HEADS * BLOCK_SIZE) + slot
    ok = (n < high - pos) & (n >= low - pos)
    k_slots = gl.load(k_slots_ptr + place, mask=ok, other=-1).to(gl.int32) & 0xFFFF
    v_slots = gl.load(v_slots_ptr + place, mask=ok, other=-1).to(gl.int32) & 0xFFFF
    return k_slots, v_slots


@gluon.jit
def _held(k_slots, v_slots, N: gl.constexpr):
    """(lower 32 bits, upper 32, bits set): bit n where key n has a residual of K or of V."""
    n = gl.arange(0, N, k_slots.type.layout)
    bit = gl.where((k_slots & v_slots) != _NO_SLOT, 1 << (n & 31), 0)
    if N > 32:
        lower = gl.sum(gl.where(n < 32, bit, 0), 0)
        upper = gl.sum(gl.where(n < 32, 0, bit), 0)
    else:
        lower = gl.sum(bit, 0)
        upper = lower * 0
    return lower, upper, _bits_set(lower) + _bits_set(upper)


@gluon.jit
def _listed(k_slots, v_slots, lower, upper, count, begin, LIST: gl.constexpr):
    """int32 [LIST]: slot | key << 16, of K and of V, of the keys with bits begin, begin + 1 .. set.

    Past the last of them, slot is none and key is one that there is not.
    """
    line: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    nth = begin + gl.arange(0, LIST, line)
    there = nth < count
    below = _bits_set(lower)
    found = gl.where(nth >= below, 32, 0)
    word = gl.where(nth >= below, upper, lower)
    nth = gl.where(nth >= below, nth - below, nth)
    for step in gl.static_range(5):
        here = _bits_set(word & ((1 << (16 >> step)) - 1))
        beyond = here <= nth
        nth = gl.where(beyond, nth - here, nth)
        word = gl.where(beyond, word >> (16 >> step), word)
        found = gl.where(beyond, found + (16 >> step), found)
    nothing: gl.constexpr = 127 << 16 | 0xFFFF
    found = gl.where(there, found, 0)
    of_k = gl.where(there, gl.gather(k_slots, found, 0) | (found << 16), nothing)
    of_v = gl.where(there, gl.gather(v_slots, found, 0) | (found << 16), nothing)
    return of_k, of_v


@gluon.jit
def _fetch_rest(
    stage, packed_k, packed_v, n_slots, k_residual_ptr, v_residual_ptr, k_exponents_ptr,
    v_exponents_ptr, list_s, rest_s, exponents_s, D: gl.constexpr, LIST: gl.constexpr,
):
    """Start to bring the residuals of listed keys, and their exponents, of four blocks each."""
    tile: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [1, 1], [1, 0])
    list_s.index(stage * 2).store(packed_k)
    list_s.index(stage * 2 + 1).store(packed_v)
    j = gl.arange(0, D // 4, gl.SliceLayout(0, tile))
    for side in gl.static_range(2):
        residual_ptr, exponents_ptr = k_residual_ptr, k_exponents_ptr
        packed = packed_k
        if side == 1:
            residual_ptr, exponents_ptr = v_residual_ptr, v_exponents_ptr
            packed = packed_v
        slot = list_s.index(stage * 2 + side).load(gl.SliceLayout(1, tile)) & 0xFFFF
        # Whoever wrote the slots may have been wrong: never past the pool.
        at = gl.minimum(slot, n_slots - 1).to(gl.int64)[:, None] * (D // 4) + j[None, :]
        _load_async(
            rest_s.index(stage * 2 + side), residual_ptr.to(gl.pointer_type(gl.int16)) + at,
            mask=(slot != _NO_SLOT)[:, None] & (j >= 0)[None, :])
        slot = packed & 0xFFFF
        at = gl.minimum(slot, n_slots - 1).to(gl.int64)
        _load_async(
            exponents_s.index(stage * 2 + side), exponents_ptr.to(gl.pointer_type(gl.int32)) + at,
            mask=slot != _NO_SLOT)


@gluon.jit
def _fetch_listed(
    stage, k_slots, v_slots, n_slots, k_residual_ptr, v_residual_ptr, k_exponents_ptr,
    v_exponents_ptr, list_s, rest_s, exponents_s, D: gl.constexpr, N: gl.constexpr,
    LIST: gl.constexpr,
):
    """List the first keys that hold a slot, start to bring what is there, and count them all."""
    lower, upper, count = _held(k_slots, v_slots, N)
    packed_k, packed_v = _listed(k_slots, v_slots, lower, upper, count, 0, LIST)
    _fetch_rest(stage, packed_k, packed_v, n_slots, k_residual_ptr, v_residual_ptr,
                k_exponents_ptr, v_exponents_ptr, list_s, rest_s, exponents_s, D, LIST)
    _commit()
    return count


@gluon.jit
def _fetch_round(
    stage, begin, pos, low, high, columns, k_slots_ptr, v_slots_ptr, table_ptr, n_slots,
    k_residual_ptr, v_residual_ptr, k_exponents_ptr, v_exponents_ptr, list_s, rest_s, exponents_s,
    HEADS: gl.constexpr, BLOCK_SIZE: gl.constexpr, D: gl.constexpr, N: gl.constexpr,
    LIST: gl.constexpr,
):
    """Bring the residuals of the keys with residuals from the one with number ``begin`` on."""
    pages = _pages(pos, columns, table_ptr, BLOCK_SIZE, N)
    k_slots, v_slots = _slots(
        pos, pages, low, high, k_slots_ptr, v_slots_ptr, HEADS, BLOCK_SIZE, N)
    lower, upper, count = _held(k_slots, v_slots, N)
    packed_k, packed_v = _listed(k_slots, v_slots, lower, upper, count, begin, LIST)
    _fetch_rest(stage, packed_k, packed_v, n_slots, k_residual_ptr, v_residual_ptr,
                k_exponents_ptr, v_exponents_ptr, list_s, rest_s, exponents_s, D, LIST)
    _commit()
    _wait(0)


@gluon.jit
def _unit_of(exponents, block: gl.constexpr, STATIC: gl.constexpr):
    """fp32 the unit of block ``block`` of each row, 2^12 at most; not STATIC: 2^14 times it."""
    biased = (exponents >> (8 * block)) & 255
    if STATIC:
        biased = gl.minimum(biased, 127 + 12)
    else:
        biased += 14
    return _power(biased)


@gluon.jit
def _add_scores(
    s, stage, q0, q1, q2, q3, q_rest, list_s, rest_s, exponents_s, scores: gl.constexpr,
    left: gl.constexpr, right: gl.constexpr, LIST: gl.constexpr, N: gl.constexpr,
    MANTISSA: gl.constexpr, STATIC: gl.constexpr, FEW: gl.constexpr,
):
    """``s`` [N, R] and what the residuals of listed keys add to it."""
    part: gl.constexpr = LIST // 2 if FEW else LIST
    zero = gl.full([LIST, s.shape[1]], 0.0, gl.float32, scores)
    rest = _part(zero, True, FEW)
    exponents = exponents_s.index(stage * 2).slice(0, part)
    exponents = exponents.load(gl.SliceLayout(1, rest.type.layout))
    words = _halves(rest_s.index(stage * 2).load(left), False)
    parts = (_halves(q0, True), _halves(q1, True), _halves(q2, True), _halves(q3, True))
    if STATIC:
        rests = (_halves(q_rest[0], True), _halves(q_rest[1], True),
                 _halves(q_rest[2], True), _halves(q_rest[3], True))
    for i in gl.static_range(2):  # of the two blocks of each half
        k0, k1, k2, k3 = _decoded(_part(words[i], True, FEW), MANTISSA, 1)
        lower = ampere.mma_v2(_whole(k0, True, FEW, left), parts[0][i], zero)
        lower = ampere.mma_v2(_whole(k1, True, FEW, left), parts[1][i], lower)
        upper = ampere.mma_v2(_whole(k2, True, FEW, left), parts[2][i], zero)
        upper = ampere.mma_v2(_whole(k3, True, FEW, left), parts[3][i], upper)
        if STATIC:
            lower = ampere.mma_v2(_whole(k0, True, FEW, left), rests[0][i], lower)
            lower = ampere.mma_v2(_whole(k1, True, FEW, left), rests[1][i], lower)
            upper = ampere.mma_v2(_whole(k2, True, FEW, left), rests[2][i], upper)
            upper = ampere.mma_v2(_whole(k3, True, FEW, left), rests[3][i], upper)
        rest += _part(lower, True, FEW) * _unit_of(exponents, i, STATIC)[:, None]
        rest += _part(upper, True, FEW) * _unit_of(exponents, i + 2, STATIC)[:, None]
    same = _part(gl.full([N, LIST], 0.0, gl.float16, left), False, FEW)
    key = list_s.index(stage * 2).slice(0, part).load(gl.SliceLayout(0, same.type.layout)) >> 16
    n = gl.arange(0, N, gl.SliceLayout(1, same.type.layout)).to(gl.float16)
    onehot = _equal(n[:, None] + same, key.to(gl.float16)[None, :] + same)
    if STATIC:
        onehot = onehot * 16384.0  # 2^14
    onehot = _whole(onehot, False, FEW, left)
    return ampere.mma_v2(onehot, _right_operand(rest, right, FEW), s)


@gluon.jit
def _add_results(
    acc0, acc1, acc2, acc3, weights, stage, list_s, rest_s, exponents_s, scores: gl.constexpr,
    left: gl.constexpr, right: gl.constexpr, LIST: gl.constexpr, N: gl.constexpr,
    MANTISSA: gl.constexpr, STATIC: gl.constexpr, FEW: gl.constexpr,
):
    """Results, in four parts [D / 4, R], and what the residuals of listed keys add to them."""
    part: gl.constexpr = LIST // 2 if FEW else LIST
    # A weight of 8 times a unit of e1m2, 1/2, times 2^14 would be beyond fp16.
    halved: gl.constexpr = MANTISSA == 2 and not STATIC
    lift: gl.constexpr = 16384.0 if STATIC else (2.0 if halved else 1)
    same = _part(gl.full([LIST, N], 0.0, gl.float16, left), True, FEW)
    key = list_s.index(stage * 2 + 1).slice(0, part).load(gl.SliceLayout(1, same.type.layout)) >> 16
    n = gl.arange(0, N, gl.SliceLayout(0, same.type.layout)).to(gl.float16)
    onehot = _equal(key.to(gl.float16)[:, None] + same, n[None, :] + same)
    zero = gl.full([LIST, weights.shape[1]], 0.0, gl.float32, scores)
    picked = ampere.mma_v2(_whole(onehot, True, FEW, left), weights, zero)
    picked = _part(picked, True, FEW)
    if halved:
        picked *= 0.5
    exponents = exponents_s.index(stage * 2 + 1).slice(0, part)
    exponents = exponents.load(gl.SliceLayout(1, picked.type.layout))
    words = _halves(rest_s.index(stage * 2 + 1).permute([1, 0]).load(left), True)
    a0, b0 = _halves(acc0, True)
    a1, b1 = _halves(acc1, True)
    a2, b2 = _halves(acc2, True)
    a3, b3 = _halves(acc3, True)
    lower = _right_operand(picked * _unit_of(exponents, 0, STATIC)[:, None], right, FEW)
    upper = _right_operand(picked * _unit_of(exponents, 2, STATIC)[:, None], right, FEW)
    v0, v1, v2, v3 = _decoded(_part(words[0], False, FEW), MANTISSA, lift)
    a0 = ampere.mma_v2(_whole(v0, False, FEW, left), lower, a0)
    a1 = ampere.mma_v2(_whole(v1, False, FEW, left), lower, a1)
    a2 = ampere.mma_v2(_whole(v2, False, FEW, left), upper, a2)
    a3 = ampere.mma_v2(_whole(v3, False, FEW, left), upper, a3)
    lower = _right_operand(picked * _unit_of(exponents, 1, STATIC)[:, None], right, FEW)
    upper = _right_operand(picked * _unit_of(exponents, 3, STATIC)[:, None], right, FEW)
    v0, v1, v2, v3 = _decoded(_part(words[1], False, FEW), MANTISSA, lift)
    b0 = ampere.mma_v2(_whole(v0, False, FEW, left), lower, b0)
    b1 = ampere.mma_v2(_whole(v1, False, FEW, left), lower, b1)
    b2 = ampere.mma_v2(_whole(v2, False, FEW, left), upper, b2)
    b3 = ampere.mma_v2(_whole(v3, False, FEW, left), upper, b3)
    return _stacked(a0, b0), _stacked(a1, b1), _stacked(a2, b2), _stacked(a3, b3)


@gluon.jit
def _power(biased):
    """2^(biased - 127), of int32."""
    return (biased << 23).to(gl.float32, bitcast=True)


@gluon.jit
def _rounded_off(x):
    """fp16 of what fp16 of fp32 x lacks."""
    return (x - x.to(gl.float16).to(gl.float32)).to(gl.float16)


@gluon.jit(do_not_specialize=["n_parts", "window", "n_slots"])
def _paged_attn_quantized_hopper_kernel(
    q_ptr, k_ptr, k_scale_ptr, k_slots_ptr, k_residual_ptr, k_exponents_ptr,
    v_ptr, v_scale_ptr, v_slots_ptr, v_residual_ptr, v_exponents_ptr,
    table_ptr, lens_ptr, sinks_ptr, out_ptr, lse_ptr, part_ptr,
    stride_qt, stride_qh, stride_tb, stride_ot, stride_oh,
    n_parts, n_slots, window, score_scale, cap,
    N_HEADS: gl.constexpr, N_KV_HEADS: gl.constexpr, HEAD_DIM: gl.constexpr,
    BLOCK_SIZE: gl.constexpr, HAS_WINDOW: gl.constexpr, HAS_SINKS: gl.constexpr,
    HAS_LSE: gl.constexpr, HAS_SOFTCAP: gl.constexpr, STATIC: gl.constexpr,
    RESIDUAL_BLOCK: gl.constexpr, MANTISSA: gl.constexpr, R: gl.constexpr, N: gl.constexpr,
    STAGES: gl.constexpr, LIST: gl.constexpr, SPLITS: gl.constexpr, MIN_SHARE: gl.constexpr,
    LONG_FIRST: gl.constexpr, PDL: gl.constexpr,
):
    # LONG_FIRST: 0, or E of _program_at.
    if PDL:
        _wait_for_earlier_kernels()
        _let_next_kernel_start()
    D: gl.constexpr = HEAD_DIM
    H: gl.constexpr = N_KV_HEADS
    PACK: gl.constexpr = N_HEADS // N_KV_HEADS
    scores: gl.constexpr = gl.NVMMADistributedLayout(
        version=[2, 0], warps_per_cta=[1, 1], instr_shape=[16, 8])
    left: gl.constexpr = gl.DotOperandLayout(0, scores, 2)
    right: gl.constexpr = gl.DotOperandLayout(1, scores, 2)
    key_rows: gl.constexpr = gl.SliceLayout(1, scores)
    codes: gl.constexpr = gl.SwizzledSharedLayout(8, 128 // D, D // 16, [1, 0])
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])

    # Neighbours read neighbouring heads of the same tokens.
    tile = gl.program_id(0)
    kv_head = tile % H
    split = tile // H % SPLITS
    seq = tile // (H * SPLITS)
    if LONG_FIRST > 0:
        seq, split, context_len, _ = _program_at(
            tile // H, lens_ptr, gl.num_programs(0) // (H * SPLITS), window, LONG_FIRST,
            BLOCK_SIZE, SPLITS, MIN_SHARE, HAS_WINDOW)
    else:
        context_len = gl.load(lens_ptr + seq)
    low, base = context_len * 0, context_len * 0
    if HAS_WINDOW:
        low = gl.maximum(context_len - window, 0)
        base = low // BLOCK_SIZE * BLOCK_SIZE
    shares = (context_len - base + MIN_SHARE - 1) // MIN_SHARE
    used = gl.minimum(gl.maximum(shares, 1), SPLITS)
    if split < used:
        head0 = kv_head * PACK
        token = seq.to(gl.int64)
        table_ptr += token * stride_tb
        columns = (context_len + BLOCK_SIZE - 1) // BLOCK_SIZE

        # q^T in four parts [D / 4, R]: even and odd channels of either half.
        r = gl.arange(0, R, gl.SliceLayout(0, right))
        j = gl.arange(0, D // 4, gl.SliceLayout(1, right))
        at = q_ptr + token * stride_qt + ((head0 + r) * stride_qh)[None, :] + (2 * j)[:, None]
        ok = (r < PACK)[None, :] & (j >= 0)[:, None]
        q0 = gl.load(at, mask=ok, other=0.0).to(gl.float32)
        q1 = gl.load(at + 1, mask=ok, other=0.0).to(gl.float32)
        q2 = gl.load(at + D // 2, mask=ok, other=0.0).to(gl.float32)
        q3 = gl.load(at + D // 2 + 1, mask=ok, other=0.0).to(gl.float32)
        if STATIC:
            k_channels = k_scale_ptr + kv_head * D + 2 * j
            q0, q1 = q0 * gl.load(k_channels)[:, None], q1 * gl.load(k_channels + 1)[:, None]
            k_channels += D // 2
            q2, q3 = q2 * gl.load(k_channels)[:, None], q3 * gl.load(k_channels + 1)[:, None]
        size = gl.maximum(gl.maximum(gl.abs(q0), gl.abs(q1)), gl.maximum(gl.abs(q2), gl.abs(q3)))
        size = gl.max(gl.max(gl.where(size < float("inf"), size, 0.0), 1), 0)
        exponent = gl.minimum(gl.maximum(size.to(gl.int32, bitcast=True) >> 23, 3), 254)
        up = _power(256 - exponent)  # to between 4 and 8
        factor = _power(exponent - 2) * score_scale
        if STATIC:
            q_rest = (_rounded_off(q0 * up), _rounded_off(q1 * up),
                      _rounded_off(q2 * up), _rounded_off(q3 * up))
        else:
            q_rest = (up, up, up, up)  # nobody looks at it
        q0, q1 = (q0 * up).to(gl.float16), (q1 * up).to(gl.float16)
        q2, q3 = (q2 * up).to(gl.float16), (q3 * up).to(gl.float16)
        k_s = gl.allocate_shared_memory(gl.int16, [STAGES, N, D // 2], codes)
        v_s = gl.allocate_shared_memory(gl.int16, [STAGES, N, D // 2], codes)
        if STATIC:
            scales_s = k_s  # nobody looks at it
        else:
            scales_s = gl.allocate_shared_memory(gl.float32, [STAGES * 2, N], plain)
        words: gl.constexpr = gl.pointer_type(gl.int16)
        k_at = k_ptr.to(words) + kv_head * (D // 2)
        v_at = v_ptr.to(words) + kv_head * (D // 2)
        if not STATIC:
            k_scale_ptr += kv_head * BLOCK_SIZE
            v_scale_ptr += kv_head * BLOCK_SIZE
        k_slots_ptr += kv_head * BLOCK_SIZE
        v_slots_ptr += kv_head * BLOCK_SIZE
        pool = kv_head.to(gl.int64) * n_slots
        k_residual_ptr += pool * (D // 2)
        v_residual_ptr += pool * (D // 2)
        if RESIDUAL_BLOCK > 0:
            k_exponents_ptr += pool * (D // RESIDUAL_BLOCK)
            v_exponents_ptr += pool * (D // RESIDUAL_BLOCK)

        # Blocks of N keys: first, first + used ..
        first = split
        end = (gl.maximum(context_len - base, 0) + N - 1) // N
        if HAS_WINDOW:
            first += (gl.maximum((low - base) // N - split, 0) + used - 1) // used * used
        steps = gl.maximum(end - first + used - 1, 0) // used
        pos, stride = base + first * N, used * N
        if RESIDUAL_BLOCK > 0:
            line: gl.constexpr = gl.SwizzledSharedLayout(8, 256 // D, D // 32, [1, 0])
            rest_s = gl.allocate_shared_memory(gl.int16, [4, LIST, D // 4], line)
            exponents_s = gl.allocate_shared_memory(gl.int32, [4, LIST], plain)
            list_s = gl.allocate_shared_memory(gl.int32, [4, LIST], plain)
            pages = _pages(pos, columns, table_ptr, BLOCK_SIZE, N)
            k_slots, v_slots = _slots(
                pos, pages, low, context_len, k_slots_ptr, v_slots_ptr, H, BLOCK_SIZE, N)
            count = _fetch_listed(
                0, k_slots, v_slots, n_slots, k_residual_ptr, v_residual_ptr, k_exponents_ptr,
                v_exponents_ptr, list_s, rest_s, exponents_s, D, N, LIST)
            pages = _pages(pos + stride, columns, table_ptr, BLOCK_SIZE, N)
            k_slots, v_slots = _slots(
                pos + stride, pages, low, context_len, k_slots_ptr, v_slots_ptr, H, BLOCK_SIZE, N)
            # A table's entry is looked up a step before it is needed, for slots and for codes.
            slot_pages = _pages(pos + 2 * stride, columns, table_ptr, BLOCK_SIZE, N)
        for i in gl.static_range(STAGES - 1):
            pages = _pages(pos + i * stride, columns, table_ptr, BLOCK_SIZE, N)
            if i < steps:
                _fetch(i, pos + i * stride, pages, low, context_len, k_at, v_at, k_scale_ptr,
                       v_scale_ptr, k_s, v_s, scales_s, H, BLOCK_SIZE, D, N, STATIC)
            _commit()
        pages = _pages(pos + (STAGES - 1) * stride, columns, table_ptr, BLOCK_SIZE, N)

        zero = gl.full([D // 4, R], 0.0, gl.float32, scores)
        acc0, acc1, acc2, acc3 = zero, zero, zero, zero
        heads_line: gl.constexpr = gl.SliceLayout(0, scores)
        top = gl.full([R], _LOWEST, gl.float32, heads_line)
        total = gl.full([R], 0.0, gl.float32, heads_line)
        unit = context_len * 0 + 16  # of weights: 2^(unit - 127)
        n = gl.arange(0, N, key_rows)
        for i in range(steps):
            stage = i % STAGES
            if RESIDUAL_BLOCK > 0 and STAGES > 2:
                next_count = _fetch_listed(
                    (i + 1) % 2, k_slots, v_slots, n_slots, k_residual_ptr, v_residual_ptr,
                    k_exponents_ptr, v_exponents_ptr, list_s, rest_s, exponents_s, D, N, LIST)
            if i + STAGES - 1 < steps:
                _fetch((i + STAGES - 1) % STAGES, pos + (STAGES - 1) * stride, pages, low,
                       context_len, k_at, v_at, k_scale_ptr, v_scale_ptr, k_s, v_s, scales_s, H,
                       BLOCK_SIZE, D, N, STATIC)
            _commit()
            pages = _pages(pos + STAGES * stride, columns, table_ptr, BLOCK_SIZE, N)
            if RESIDUAL_BLOCK > 0:
                if STAGES == 2:
                    next_count = _fetch_listed(
                        (i + 1) % 2, k_slots, v_slots, n_slots, k_residual_ptr, v_residual_ptr,
                        k_exponents_ptr, v_exponents_ptr, list_s, rest_s, exponents_s, D, N, LIST)
                k_slots, v_slots = _slots(
                    pos + 2 * stride, slot_pages, low, context_len, k_slots_ptr, v_slots_ptr, H,
                    BLOCK_SIZE, N)
                slot_pages = _pages(pos + 3 * stride, columns, table_ptr, BLOCK_SIZE, N)
                # The groups that may be under way: with two stages codes and residuals of the next
                # keys, with more the codes of the last but one, too.
                _wait(2 if STAGES == 2 else 3)
            else:
                _wait(STAGES - 1)

            s = gl.full([N, R], 0.0, gl.float32, scores)
            if STATIC:
                of_rest = s  # a sum of its own, so that neither waits for the other
            lower_half, upper_half = _halves(k_s.index(stage).load(left), False)
            k0, k1 = _codes(lower_half)
            s = ampere.mma_v2(k1, q1, ampere.mma_v2(k0, q0, s))
            if STATIC:
                of_rest = ampere.mma_v2(k1, q_rest[1], ampere.mma_v2(k0, q_rest[0], of_rest))
            k2, k3 = _codes(upper_half)
            s = ampere.mma_v2(k3, q3, ampere.mma_v2(k2, q2, s))
            if STATIC:
                s += ampere.mma_v2(k3, q_rest[3], ampere.mma_v2(k2, q_rest[2], of_rest))
            if RESIDUAL_BLOCK > 0:
                if count <= LIST // 2:
                    s = _add_scores(s, i % 2, q0, q1, q2, q3, q_rest, list_s, rest_s, exponents_s,
                                    scores, left, right, LIST, N, MANTISSA, STATIC, True)
                else:
                    s = _add_scores(s, i % 2, q0, q1, q2, q3, q_rest, list_s, rest_s, exponents_s,
                                    scores, left, right, LIST, N, MANTISSA, STATIC, False)
                for begin in range(LIST, count, LIST):
                    _fetch_round(i % 2, begin, pos, low, context_len, columns, k_slots_ptr,
                                 v_slots_ptr, table_ptr, n_slots, k_residual_ptr, v_residual_ptr,
                                 k_exponents_ptr, v_exponents_ptr, list_s, rest_s, exponents_s, H,
                                 BLOCK_SIZE, D, N, LIST)
                    s = _add_scores(s, i % 2, q0, q1, q2, q3, q_rest, list_s, rest_s, exponents_s,
                                    scores, left, right, LIST, N, MANTISSA, STATIC, False)

            if STATIC:
                s = s * factor
            else:
                k_scale = gl.abs(scales_s.index(stage * 2).load(key_rows))
                v_scale = gl.abs(scales_s.index(stage * 2 + 1).load(key_rows))
                s = s * (k_scale * factor)[:, None]
            if HAS_SOFTCAP:
                s = _capped(s, 1.0) * cap
            seen = n < context_len - pos
            if HAS_WINDOW:
                seen = seen & (n >= low - pos)
            s = gl.where(seen[:, None], s, float("-inf"))
            if STATIC:  # weights are up to 8 as they come
                new_top = gl.maximum(top, gl.max(s, 0) - 3.0)
            else:
                new_top = gl.maximum(top, gl.max(s, 0))
            p = gl.exp2(s - new_top[None, :])
            shrink = gl.exp2(top - new_top)
            total = total * shrink + gl.sum(p, 0)
            top = new_top
            if STATIC:
                weights = _right_operand(p, right, False)
            else:
                largest = gl.max(v_scale, 0).to(gl.int32, bitcast=True) >> 23
                new_unit = gl.minimum(gl.maximum(unit, largest + 1), 254)
                shrink = shrink * _power(gl.maximum(127 + unit - new_unit, 0))
                unit = new_unit
                weights = p * (v_scale * _power(257 - unit))[:, None]  # up to 8
                weights = _right_operand(weights, right, False)

            acc0, acc1 = acc0 * shrink[None, :], acc1 * shrink[None, :]
            acc2, acc3 = acc2 * shrink[None, :], acc3 * shrink[None, :]
            lower_half, upper_half = _halves(v_s.index(stage).permute([1, 0]).load(left), True)
            v0, v1 = _codes(lower_half)
            acc0, acc1 = ampere.mma_v2(v0, weights, acc0), ampere.mma_v2(v1, weights, acc1)
            v2, v3 = _codes(upper_half)
            acc2, acc3 = ampere.mma_v2(v2, weights, acc2), ampere.mma_v2(v3, weights, acc3)
            if RESIDUAL_BLOCK > 0:
                if count > LIST:  # the first of them have made room for others
                    _fetch_round(i % 2, 0, pos, low, context_len, columns, k_slots_ptr,
                                 v_slots_ptr, table_ptr, n_slots, k_residual_ptr, v_residual_ptr,
                                 k_exponents_ptr, v_exponents_ptr, list_s, rest_s, exponents_s, H,
                                 BLOCK_SIZE, D, N, LIST)
                if count <= LIST // 2:
                    acc0, acc1, acc2, acc3 = _add_results(
                        acc0, acc1, acc2, acc3, weights, i % 2, list_s, rest_s, exponents_s,
                        scores, left, right, LIST, N, MANTISSA, STATIC, True)
                else:
                    acc0, acc1, acc2, acc3 = _add_results(
                        acc0, acc1, acc2, acc3, weights, i % 2, list_s, rest_s, exponents_s,
                        scores, left, right, LIST, N, MANTISSA, STATIC, False)
                for begin in range(LIST, count, LIST):
                    _fetch_round(i % 2, begin, pos, low, context_len, columns, k_slots_ptr,
                                 v_slots_ptr, table_ptr, n_slots, k_residual_ptr, v_residual_ptr,
                                 k_exponents_ptr, v_exponents_ptr, list_s, rest_s, exponents_s, H,
                                 BLOCK_SIZE, D, N, LIST)
                    acc0, acc1, acc2, acc3 = _add_results(
                        acc0, acc1, acc2, acc3, weights, i % 2, list_s, rest_s, exponents_s,
                        scores, left, right, LIST, N, MANTISSA, STATIC, False)
                count = next_count
            pos += stride

        heads = head0 + gl.arange(0, R, heads_line)
        head_ok = heads < head0 + PACK
        whole: gl.constexpr = SPLITS == 1
        if HAS_SINKS and whole:
            sink = gl.load(sinks_ptr + heads, mask=head_ok, other=0.0).to(gl.float32) * _LOG2E
            new_top = gl.maximum(top, sink)
            shrink = gl.exp2(top - new_top)
            acc0, acc1 = acc0 * shrink[None, :], acc1 * shrink[None, :]
            acc2, acc3 = acc2 * shrink[None, :], acc3 * shrink[None, :]
            total = total * shrink + gl.exp2(sink - new_top)
            top = new_top
        nothing = total == 0.0
        total = gl.where(nothing, 1.0, total)
        lse = gl.where(nothing, float("-inf"), (top + gl.log2(total)) * _LN2)
        rows: gl.constexpr = gl.BlockedLayout([1, 4], [256 // D, D // 8], [1, 1], [1, 0])
        r = gl.arange(0, R, gl.SliceLayout(1, rows))
        channel = gl.arange(0, D // 2, gl.SliceLayout(0, rows))
        row_ok = (r < PACK)[:, None] & (channel >= 0)[None, :]
        for half in gl.static_range(2):
            even, odd = (acc0, acc1) if half == 0 else (acc2, acc3)
            if STATIC:
                even, odd = even / total[None, :], odd / total[None, :]
            else:
                even = even * 0.125 / total[None, :] * _power(unit)
                odd = odd * 0.125 / total[None, :] * _power(unit)
            both = gl.join(even, odd)
            both = gl.convert_layout(gl.reshape(gl.permute(both, [1, 0, 2]), [R, D // 2]), rows)
            if STATIC:
                v_channels = v_scale_ptr + kv_head * D + half * (D // 2) + channel
                both = both * gl.load(v_channels)[None, :]
            if whole:
                at = out_ptr + token * stride_ot + ((head0 + r) * stride_oh)[:, None]
                gl.store(at + half * (D // 2) + channel[None, :], both.to(out_ptr.dtype.element_ty),
                         mask=row_ok)
            else:
                part = (token * N_HEADS + head0 + r) * SPLITS + split
                at = part_ptr + part[:, None] * D
                gl.store(at + half * (D // 2) + channel[None, :], both, mask=row_ok)
        results = token * N_HEADS + heads
        if whole:
            if HAS_LSE:
                gl.store(lse_ptr + results, lse, mask=head_ok)
        else:
            part_lse_ptr = part_ptr + n_parts.to(gl.int64) * D
            gl.store(part_lse_ptr + results * SPLITS + split, lse, mask=head_ok)


# fmt: on

# ---- host --------------------------------------------------------------------------------------


def why_unfit(problem: Problem, dev: Device) -> str | None:
    """Reason why this body cannot serve such a problem, whatever the config; None: it can."""
    p = problem
    if dev.arch != "sm90":
        return f"variant hopper needs an sm90 device, got {dev.arch}"
    if not device.is_there(gl):
        return "variant hopper needs a triton that has Gluon (3.6 or newer), got none"
    if p["varlen"]:
        return "variant hopper has one query a sequence"
    if (p["head_dim"], p["residual_block"]) not in ((64, 0), (128, 0), (128, 32)):
        return "variant hopper has head_dim 64 or 128, and with residuals 128, in blocks of 32"
    if p["dtype"] not in (torch.bfloat16, torch.float16):
        return f"variant hopper needs bfloat16 or float16, got {p['dtype']}"
    # q in two numbers is too much for a warp's registers beside residuals.
    most = 8 if p["static"] and p["residual_block"] else 16
    if p["num_heads"] // p["num_kv_heads"] > most:
        return f"variant hopper has at most {most} query heads a KV head here"
    return None


def why_illegal(config: Config, head_dim: int, dev: Device) -> str | None:
    """Reason why a config of this body cannot be launched; None: it can."""
    n, stages = config["BLOCK_N"], config["num_stages"]
    if n not in (32, 64):
        return f"variant hopper has BLOCK_N 32 or 64, got {n}"
    if stages < 2:
        return f"variant hopper needs num_stages of 2 or more, got {stages}"
    if (used := stages * n * 2 * (head_dim + 4) + 4096) > dev.local_mem_bytes:
        return f"tiles take {used} bytes of shared memory, more than {dev.local_mem_bytes}"
    return None
