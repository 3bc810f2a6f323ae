"""Weights of 4 or 8 bits to numbers of 16, in registers, where they are multiplied (sm_90).

A word w of 8 codes is two halves of 4: ``w >> 4i & 0x000f000f``, put beside an exponent whose last
bit counts 1, are the codes of columns 8c + i and 8c + 4 + i, a pair of numbers in one register. The
order of terms in a product is free, so product i has every fourth column, 4h + i, of both sides:
codes stay in the lane that read them (``ldmatrix``), and a lane reads 8 neighbours of x at once.

In bf16 codes stay where no exponent is: eight bits there, two codes of them, are as many times
2^-133, since exponents 0 and 1 have one step between numbers. One multiplication and addition makes
(q - zero) / 64 of them, and a word needs one shift instead of three. Sums get 64 times that.

Bytes go the same way, two of them to a product that has every second column: with the sign turned
they are q + 128, eight bits, of which bf16 makes q / 64, and fp16, beside 1024, q. The bits of an
FP8 number (e4m3) but for the sign, at the end of those of a wider exponent, are the same number
times a power of two, also where it is below the normal ones: in fp16 2^-8, which sums are
multiplied by, in bf16 2^-120, of which one multiplication makes 1 / 64.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tkernels import few_rows_hopper as few

if TYPE_CHECKING:
    from tkernels import _triton as gl
    from tkernels import _triton as gluon
else:
    gl, gluon = few.gl, few.gluon

PARTS_OF_ONE = gl.constexpr(64.0)  # in bf16: codes are counted in these
PARTS_OF_FP8 = gl.constexpr(256.0)  # in fp16: FP8 codes are counted in as many parts of one
UNIT = gl.constexpr(65536.0)  # weights of ``_scaled_steps`` are counted in these


def _in_bf16(zero: bool, scaled: bool = False) -> str:
    """PTX from two int16 of four codes each to pairs of (q - zero) / 64 in bf16.

    ``zero``: $5 has, twice, -zero / 64; without it zero is 8. ``scaled``: times what the last
    operand has.
    """
    text = "{.reg .b32 t, l, s0, s1; mov.b32 s0, 0x7f007f00; mov.b32 s1, 0x7d007d00;"
    text += f"mov.b32 l, {'$5' if zero else '0xbe00be00'}; shr.u32 t, $4, 8;"
    for i in range(4):
        text += f"and.b32 ${i}, {('$4', 't')[i // 2]}, {('0x000f000f', '0x00f000f0')[i % 2]};"
        text += f"fma.rn.bf16x2 ${i}, ${i}, s{i % 2}, l;"
        if scaled:
            text += f"mul.rn.bf16x2 ${i}, ${i}, ${5 + zero};"
    return text + "}"


def _in_units() -> str:
    """PTX from two int16 of four codes each to pairs of (q - 8) * scale / UNIT in bf16.

    $5 and $6 have what multiplies codes in their low and in their high place, $7 what stands for
    -8: each an exact multiple of the scale, so that only the weight is rounded.
    """
    text = "{.reg .b32 t; shr.u32 t, $4, 8;"
    for i in range(4):
        text += f"and.b32 ${i}, {('$4', 't')[i // 2]}, {('0x000f000f', '0x00f000f0')[i % 2]};"
        text += f"fma.rn.bf16x2 ${i}, ${i}, ${5 + i % 2}, $7;"
    return text + "}"


def _in_fp16(zero: bool, scaled: bool = False) -> str:
    """PTX from two int16 of four codes each to pairs of q - zero: codes 0, 1, 2 and 3 of both.

    1024 + q, where a code may also stand four bits higher and add 16 q. ``zero``: $5 has, twice,
    -(1024 + zero); without it zero is 8.
    """
    text = "{.reg .b32 t, e, l, h, s;"
    text += f"mov.b32 e, 0x64006400; mov.b32 l, {'$5' if zero else '0xe408e408'};"
    text += "mov.b32 s, 0x2c002c00; mov.b32 h, 0xd480d480;"  # (1024 + 16 q) / 16 - (64 + zero)
    if zero:
        text += "mov.b32 h, 0x63806380; add.rn.f16x2 h, h, l;"
    text += "mov.b32 t, $4;"
    for i in range(4):
        if i == 2:
            text += "shr.u32 t, $4, 8;"
        mask = ("0x000f000f", "0x00f000f0")[i % 2]
        text += f"lop3.b32 ${i}, t, {mask}, e, 0xea;"  # t & mask | e
        text += f"fma.rn.f16x2 ${i}, ${i}, s, h;" if i % 2 else f"add.rn.f16x2 ${i}, ${i}, l;"
        if scaled:
            text += f"mul.rn.f16x2 ${i}, ${i}, ${5 + zero};"
    return text + "}"


def _bytes_in_bf16() -> str:
    """PTX from two int16 of two int8 each to pairs of q / 64 in bf16: low bytes, high bytes."""
    text = "{.reg .b32 t, s, l; mov.b32 s, 0x7f007f00; mov.b32 l, 0xc000c000; shr.u32 t, $2, 8;"
    for i, source in enumerate(("$2", "t")):
        text += f"lop3.b32 ${i}, {source}, 0x00800080, 0x00ff00ff, 0x28;"  # (source ^ 0x80) & 0xff
        text += f"fma.rn.bf16x2 ${i}, ${i}, s, l;"
    return text + "}"


def _bytes_in_fp16() -> str:
    """PTX from two int16 of two int8 each to pairs of q in fp16: low bytes, high bytes."""
    text = "{.reg .b32 t, e, l; mov.b32 e, 0x64646464; mov.b32 l, 0xe480e480;"
    text += "xor.b32 t, $2, 0x80808080;"
    for i, places in enumerate(("0x4240", "0x4341")):  # bytes of t, each below one of e
        text += f"prmt.b32 ${i}, t, e, {places}; add.rn.f16x2 ${i}, ${i}, l;"
    return text + "}"


def _fp8_in_16_bits(fp16: bool) -> str:
    """PTX from two int16 of two e4m3 each to pairs of 16-bit numbers: low bytes, high bytes.

    ``fp16``: times 2^-8; else bf16, times 1/64.
    """
    shift, mask = (1, "0x3f803f80") if fp16 else (4, "0x07f007f0")
    text = "{.reg .b32 t, s, f; shl.b32 t, $2, 8; mov.b32 f, 0x78807880;"  # 2^114
    for i, source in enumerate(("t", "$2")):
        text += f"and.b32 s, {source}, 0x80008000; shr.u32 ${i}, {source}, {shift};"
        text += f"lop3.b32 ${i}, ${i}, {mask}, s, 0xea;"  # $i & mask | s
        if not fp16:
            text += f"mul.rn.bf16x2 ${i}, ${i}, f;"
    return text + "}"


_FP8_IN_BF16, _FP8_IN_FP16 = (gl.constexpr(_fp8_in_16_bits(fp16)) for fp16 in (False, True))
_BF16_BYTES, _FP16_BYTES = gl.constexpr(_bytes_in_bf16()), gl.constexpr(_bytes_in_fp16())
_BF16, _BF16_ZERO = gl.constexpr(_in_bf16(False)), gl.constexpr(_in_bf16(True))
_FP16, _FP16_ZERO = gl.constexpr(_in_fp16(False)), gl.constexpr(_in_fp16(True))
_BF16_ZERO_SCALED = gl.constexpr(_in_bf16(True, True))
_FP16_SCALED, _FP16_ZERO_SCALED = (gl.constexpr(_in_fp16(zero, True)) for zero in (False, True))
_UNITS = gl.constexpr(_in_units())

# fmt: off


@gluon.jit
def _scaled_steps(halves, scale):
    """(q - 8) * scale / UNIT of codes 0, 1, 2 and 3 of int16, in bf16, rounded once.

    That holds for scales from 2^-110 on (weights of smaller ones are multiples of 2^-117) and below
    2^11, from where on weights are infinite or NaN.
    """
    wide = scale.to(gl.float32)
    return gl.inline_asm_elementwise(
        _UNITS, "=&r,=&r,=&r,=&r,r,r,r,r",
        [halves, (wide * (2.0**100) * (2.0**17)).to(gl.bfloat16),
         (wide * (2.0**100) * (2.0**13)).to(gl.bfloat16), (wide * (-8.0 / UNIT)).to(gl.bfloat16)],
        dtype=(gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16), is_pure=True, pack=2)


@gluon.jit
def _scaled_numbers(halves, zero, scale, HAS_ZERO: gl.constexpr):
    """``_numbers`` times ``scale``, rounded."""
    if gl.float16 == scale.dtype:
        if HAS_ZERO:
            numbers = gl.inline_asm_elementwise(
                _FP16_ZERO_SCALED, "=&r,=&r,=&r,=&r,r,r,r", [halves, zero, scale],
                dtype=(gl.float16, gl.float16, gl.float16, gl.float16), is_pure=True, pack=2)
        else:
            numbers = gl.inline_asm_elementwise(
                _FP16_SCALED, "=&r,=&r,=&r,=&r,r,r", [halves, scale],
                dtype=(gl.float16, gl.float16, gl.float16, gl.float16), is_pure=True, pack=2)
    else:  # without zero points _scaled_steps does it at once
        gl.static_assert(HAS_ZERO)
        numbers = gl.inline_asm_elementwise(
            _BF16_ZERO_SCALED, "=&r,=&r,=&r,=&r,r,r,r", [halves, zero, scale],
            dtype=(gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16), is_pure=True, pack=2)
    return numbers


@gluon.jit
def _numbers(halves, zero, HAS_ZERO: gl.constexpr):
    """q - zero of codes 0, 1, 2 and 3 of int16, in the dtype of ``zero``; in bf16 1/64 of it."""
    if gl.float16 == zero.dtype:
        if HAS_ZERO:
            numbers = gl.inline_asm_elementwise(
                _FP16_ZERO, "=&r,=&r,=&r,=&r,r,r", [halves, zero],
                dtype=(gl.float16, gl.float16, gl.float16, gl.float16), is_pure=True, pack=2)
        else:
            numbers = gl.inline_asm_elementwise(
                _FP16, "=&r,=&r,=&r,=&r,r", [halves],
                dtype=(gl.float16, gl.float16, gl.float16, gl.float16), is_pure=True, pack=2)
    elif HAS_ZERO:
        numbers = gl.inline_asm_elementwise(
            _BF16_ZERO, "=&r,=&r,=&r,=&r,r,r", [halves, zero],
            dtype=(gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16), is_pure=True, pack=2)
    else:
        numbers = gl.inline_asm_elementwise(
            _BF16, "=&r,=&r,=&r,=&r,r", [halves],
            dtype=(gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16), is_pure=True, pack=2)
    return numbers


@gluon.jit
def _numbers_of_bytes(halves, DTYPE: gl.constexpr):
    """The two int8 of int16, low and high, as DTYPE; in bf16 1/64 of them."""
    if gl.float16 == DTYPE:
        numbers = gl.inline_asm_elementwise(
            _FP16_BYTES, "=&r,=&r,r", [halves], dtype=(gl.float16, gl.float16), is_pure=True,
            pack=2)
    else:
        numbers = gl.inline_asm_elementwise(
            _BF16_BYTES, "=&r,=&r,r", [halves], dtype=(gl.bfloat16, gl.bfloat16), is_pure=True,
            pack=2)
    return numbers


@gluon.jit
def _numbers_of_fp8(halves, DTYPE: gl.constexpr):
    """The two e4m3 of int16, low and high, as DTYPE: 2^-8 of them in fp16, 1/64 in bf16."""
    if gl.float16 == DTYPE:
        numbers = gl.inline_asm_elementwise(
            _FP8_IN_FP16, "=&r,=&r,r", [halves], dtype=(gl.float16, gl.float16), is_pure=True,
            pack=2)
    else:
        numbers = gl.inline_asm_elementwise(
            _FP8_IN_BF16, "=&r,=&r,r", [halves], dtype=(gl.bfloat16, gl.bfloat16), is_pure=True,
            pack=2)
    return numbers


@gluon.jit
def _less(zeros, DTYPE: gl.constexpr):
    """What ``_numbers`` adds."""
    zeros = zeros.to(gl.float32)
    if gl.float16 == DTYPE:
        less = -1024.0 - zeros
    else:
        less = zeros * (-1.0 / PARTS_OF_ONE)
    return less.to(DTYPE)


@gluon.jit
def _every_fourth(x, right: gl.constexpr):
    """Four right operands [W, C / 4, R] of x [W, R, C]: columns 4h, 4h + 1, 4h + 2 and 4h + 3."""
    w: gl.constexpr = x.shape[0]
    r: gl.constexpr = x.shape[1]
    h: gl.constexpr = x.shape[2] // 4
    even, odd = gl.split(gl.reshape(x, [w, r, 2 * h, 2]))
    x0, x2 = gl.split(gl.reshape(even, [w, r, h, 2]))
    x1, x3 = gl.split(gl.reshape(odd, [w, r, h, 2]))
    return (gl.convert_layout(gl.permute(x0, [0, 2, 1]), right, assert_trivial=True),
            gl.convert_layout(gl.permute(x1, [0, 2, 1]), right, assert_trivial=True),
            gl.convert_layout(gl.permute(x2, [0, 2, 1]), right, assert_trivial=True),
            gl.convert_layout(gl.permute(x3, [0, 2, 1]), right, assert_trivial=True))


@gluon.jit
def _every_second(x, right: gl.constexpr):
    """Two right operands [W, C / 2, R] of x [W, R, C]: columns 2h and 2h + 1."""
    w: gl.constexpr = x.shape[0]
    r: gl.constexpr = x.shape[1]
    h: gl.constexpr = x.shape[2] // 2
    even, odd = gl.split(gl.reshape(x, [w, r, h, 2]))
    return (gl.convert_layout(gl.permute(even, [0, 2, 1]), right, assert_trivial=True),
            gl.convert_layout(gl.permute(odd, [0, 2, 1]), right, assert_trivial=True))
