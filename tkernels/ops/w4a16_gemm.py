"""A linear layer with weights of 4 bits and activations of 16: W4A16, a further weight format.

    out[m, n] = (sum over k of x[m, k] * (q[n, k] - zero[n, k // group]) * scale[n, k // group])
                + bias[n]

x, out: [M, K] and [M, N], bf16 or fp16; weight: int32 [N, K/8], q of column 8c + j in bits 4j to
4j + 3 of word c, which is how ``compressed-tensors`` packs them; scale, zero: [N, K/group].
``tkernels/w4_format.py`` has the format, and makes it of AWQ's and GPTQ's.

A step of the loop over K takes words as they are: a product of [BLOCK_N, words] by [words, BLOCK_M]
for each of the eight columns in a word, with the x of those columns, so that no nibble changes its
place. q - 8 (q - zero) is exact in 16 bits, sums are fp32, and a group's sum is scaled in fp32:
what is rounded is what a product of x with exact weights would round. ``variant`` "direct", for few
rows, reads x as it lies and takes every eighth column in registers; "turned" has it laid out as
[8, M, K/8] beforehand. ``SLICES`` parts of a step are added by warps of their own. ``variant``
"core", for few rows on Hopper, is ``w4a16_gemm_core``, "wide", for many, ``w4a16_gemm_wide``;
"unpacked", for many on any GPU, ``w4a16_gemm_unpacked``.

Where few rows are, weights are what is read, once: in flight are stages x BLOCK_N x BLOCK_K / 2
bytes a program. Few tiles do not fill a chip: then SPLIT_K programs share the K of a tile, each
leaves its sum (fp32) in a workspace, and a second kernel adds these in order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tkernels import device, w4a16_gemm_core, w4a16_gemm_unpacked, w4a16_gemm_wide
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
from tkernels.device import Device, bind, cdiv, next_power_of_2, tl, triton
from tkernels.ops.paged_attn import _has_pdl, _let_next_kernel_start, _wait_for_earlier_kernels
from tkernels.registry import Config, KernelSpec, Problem, op, register
from tkernels.w4_format import dequantize_w4
from tkernels.w4a16_cases import W4_CASES, w4_cost, w4_inputs, w4_peers, w4_shape

_OP = "w4a16_gemm"


def w4a16_gemm_ref(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    *,
    weight_zero: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    config: Config | None = None,
) -> torch.Tensor:
    """PyTorch version of ``w4a16_gemm``: weights in fp32, and a product."""
    y = x.float() @ dequantize_w4(weight, weight_scale, weight_zero).t()
    if bias is not None:
        y = y + bias.float()
    return y.to(x.dtype) if out is None else out.copy_(y)


# ---- kernels ---------------------------------------------------------------------------------
# fmt: off


def _decoding(j: int, fp16: bool) -> str:
    """PTX from two words to the pair of their nibbles j, less 8, as 16-bit numbers.

    A nibble in the last bits of a number whose last bit counts 1 adds itself: 128 + q in bf16,
    1024 + q in fp16, where it may also stand four bits higher and add 16 q.
    """
    halves, at = "0x5410" if j < 4 else "0x7632", 4 * (j % 4)
    high = fp16 and j % 2 == 1
    text = f"prmt.b32 u, $1, $2, {halves};"
    if shift := at - 4 * high:
        text += f"shr.u32 u, u, {shift};"
    mask, one = "0x00f000f0" if high else "0x000f000f", "0x64006400" if fp16 else "0x43004300"
    text += f"lop3.b32 u, u, {mask}, {one}, 0xea;"
    if high:  # (1024 + 16 q) / 16 - 72
        text += "mov.b32 m, 0x2c002c00; mov.b32 n, 0xd480d480; fma.rn.f16x2 $0, u, m, n;"
    elif fp16:
        text += "mov.b32 m, 0x64086408; sub.rn.f16x2 $0, u, m;"
    else:
        text += "mov.b32 m, 0x43084308; sub.rn.bf16x2 $0, u, m;"
    return "{.reg .b32 u, m, n;" + text + "}"


_BF16_TEXTS = tl.constexpr(tuple(_decoding(j, False) for j in range(8)))
_FP16_TEXTS = tl.constexpr(tuple(_decoding(j, True) for j in range(8)))


@triton.jit
def _steps(
    words, zero, J: tl.constexpr, DTYPE: tl.constexpr, HAS_ZERO: tl.constexpr, ASM: tl.constexpr,
):
    """q - zero of nibble J of words [BLOCK_N, WORDS], in DTYPE. ``zero``: int32 [BLOCK_N]."""
    if ASM:
        if tl.float16 == DTYPE:
            steps = tl.inline_asm_elementwise(
                _FP16_TEXTS[J], "=r,r,r", [words], dtype=tl.float16, is_pure=True, pack=2)
        else:
            steps = tl.inline_asm_elementwise(
                _BF16_TEXTS[J], "=r,r,r", [words], dtype=tl.bfloat16, is_pure=True, pack=2)
        if HAS_ZERO:
            steps = steps - (zero - 8).to(tl.float32).to(DTYPE)[:, None]
    else:
        q = (words >> (4 * J)) & 15
        if HAS_ZERO:
            q = q - zero[:, None]
        else:
            q = q - 8
        steps = q.to(tl.float32).to(DTYPE)
    return steps


@triton.jit
def _with_nibble(
    part, words, zero, x, word, g, J: tl.constexpr, HAS_ZERO: tl.constexpr, ASM: tl.constexpr,
    SWAP: tl.constexpr, PER_GROUP: tl.constexpr,
):
    """``part`` and the product with nibble J of the words; of group g's alone where PER_GROUP."""
    steps = _steps(words, zero, J, x.dtype, HAS_ZERO, ASM)
    if PER_GROUP > 0:
        x = tl.where((word // PER_GROUP == g)[None, :], x, 0.0)
    if SWAP:
        part = tl.dot(steps, tl.trans(x), part, input_precision="ieee")
    else:
        part = tl.dot(x, tl.trans(steps), part, input_precision="ieee")
    return part


@triton.jit
def _product(
    words, zero, x0, x1, x2, x3, x4, x5, x6, x7, word, g,
    HAS_ZERO: tl.constexpr, ASM: tl.constexpr, SWAP: tl.constexpr, PER_GROUP: tl.constexpr,
):
    """Sum over the words [BLOCK_N, WORDS] of q - zero times x; xj [ROWS, WORDS]: columns 8c + j."""
    if SWAP:
        part = tl.zeros([words.shape[0], x0.shape[0]], tl.float32)
    else:
        part = tl.zeros([x0.shape[0], words.shape[0]], tl.float32)
    part = _with_nibble(part, words, zero, x0, word, g, 0, HAS_ZERO, ASM, SWAP, PER_GROUP)
    part = _with_nibble(part, words, zero, x1, word, g, 1, HAS_ZERO, ASM, SWAP, PER_GROUP)
    part = _with_nibble(part, words, zero, x2, word, g, 2, HAS_ZERO, ASM, SWAP, PER_GROUP)
    part = _with_nibble(part, words, zero, x3, word, g, 3, HAS_ZERO, ASM, SWAP, PER_GROUP)
    part = _with_nibble(part, words, zero, x4, word, g, 4, HAS_ZERO, ASM, SWAP, PER_GROUP)
    part = _with_nibble(part, words, zero, x5, word, g, 5, HAS_ZERO, ASM, SWAP, PER_GROUP)
    part = _with_nibble(part, words, zero, x6, word, g, 6, HAS_ZERO, ASM, SWAP, PER_GROUP)
    part = _with_nibble(part, words, zero, x7, word, g, 7, HAS_ZERO, ASM, SWAP, PER_GROUP)
    return part


@triton.jit
def _every_eighth(
    x_ptr, stride_x, x_step, row0, at, n_rows, n_inner,
    DIRECT: tl.constexpr, EVEN_K: tl.constexpr, ROWS: tl.constexpr, WORDS: tl.constexpr,
):
    """Eight tiles [ROWS, WORDS] of x: columns at + 8c + j, for j from 0 to 7."""
    r = tl.arange(0, ROWS)
    word = tl.arange(0, WORDS)
    row_ok = r < n_rows - row0
    left = (n_inner - at) // 8
    if DIRECT:
        j = tl.arange(0, 8)
        x_ptr += row0.to(tl.int64) * stride_x + at
        tile = x_ptr + r.to(tl.int64)[:, None, None] * stride_x
        tile = tile + (8 * word)[None, :, None] + j[None, None, :]
        ok = row_ok[:, None, None]
        if not EVEN_K:
            ok = ok & (word < left)[None, :, None]
        x = tl.load(tile, mask=ok, other=0.0)
        even, odd = tl.split(tl.reshape(x, (ROWS, WORDS, 4, 2)))
        x04, x26 = tl.split(tl.reshape(even, (ROWS, WORDS, 2, 2)))
        x15, x37 = tl.split(tl.reshape(odd, (ROWS, WORDS, 2, 2)))
        x0, x4 = tl.split(x04)
        x1, x5 = tl.split(x15)
        x2, x6 = tl.split(x26)
        x3, x7 = tl.split(x37)
    else:
        x_ptr += row0.to(tl.int64) * stride_x + at // 8
        tile = x_ptr + r.to(tl.int64)[:, None] * stride_x + word[None, :]
        ok = row_ok[:, None]
        if not EVEN_K:
            ok = ok & (word < left)[None, :]
        x0 = tl.load(tile, mask=ok, other=0.0)
        x1 = tl.load(tile + x_step, mask=ok, other=0.0)
        x2 = tl.load(tile + 2 * x_step, mask=ok, other=0.0)
        x3 = tl.load(tile + 3 * x_step, mask=ok, other=0.0)
        x4 = tl.load(tile + 4 * x_step, mask=ok, other=0.0)
        x5 = tl.load(tile + 5 * x_step, mask=ok, other=0.0)
        x6 = tl.load(tile + 6 * x_step, mask=ok, other=0.0)
        x7 = tl.load(tile + 7 * x_step, mask=ok, other=0.0)
    return x0, x1, x2, x3, x4, x5, x6, x7


@triton.jit
def _sliced_sum(
    w_tile, s_tile, x_ptr, stride_x, row0, col_ok, k_first, k_end, n_rows, n_inner,
    GROUP: tl.constexpr, PAIRS: tl.constexpr, EVEN_K: tl.constexpr, EVEN_N: tl.constexpr,
    ASM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, SLICES: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Sums [BLOCK_N, BLOCK_M] over k_first to k_end; a step has a product for each of SLICES parts.

    Products of a batch go to different warps: then each brings only its own columns of x, and of
    all rows of weights, to its registers.
    """
    STEP: tl.constexpr = BLOCK_K // SLICES
    WORDS: tl.constexpr = STEP // 8
    s = tl.arange(0, SLICES)
    r = tl.arange(0, BLOCK_M)
    word = tl.arange(0, WORDS)
    j = tl.arange(0, 8)
    x_ptr += row0.to(tl.int64) * stride_x
    x_tile = x_ptr + (r.to(tl.int64) * stride_x)[None, :, None, None]
    x_tile = x_tile + (s * STEP)[:, None, None, None] + (8 * word)[None, None, :, None]
    x_tile = x_tile + j[None, None, None, :]
    row_ok = (r < n_rows - row0)[None, :, None, None]
    w_tile = w_tile[None, :, :] + (s * WORDS)[:, None, None]
    group = s * 0
    if GROUP > 0:
        group = s * STEP // GROUP
    if PAIRS:
        s_tile = s_tile.to(tl.pointer_type(tl.int32))[None, :] + (group // 2)[:, None]
    else:
        s_tile = s_tile[None, :] + group[:, None]
    acc = tl.zeros([SLICES, w_tile.shape[1], BLOCK_M], tl.float32)
    for start in tl.range(k_first, k_end, BLOCK_K, num_stages=STAGES):
        x_ok = row_ok
        w_ok = col_ok[None, :, None]
        s_ok = col_ok[None, :] & (s >= 0)[:, None]
        if not EVEN_K:
            columns = (s * STEP)[:, None] + (8 * word)[None, :]
            there = columns < n_inner - start
            x_ok = x_ok & there[:, None, :, None]
            w_ok = w_ok & there[:, None, :]
            s_ok = s_ok & (s * STEP < n_inner - start)[:, None]
        if EVEN_K and EVEN_N:
            words = tl.load(w_tile + start // 8)
        else:
            words = tl.load(w_tile + start // 8, mask=w_ok, other=0)
        x = tl.load(x_tile + start, mask=x_ok, other=0.0)
        even, odd = tl.split(tl.reshape(x, (SLICES, BLOCK_M, WORDS, 4, 2)))
        x04, x26 = tl.split(tl.reshape(even, (SLICES, BLOCK_M, WORDS, 2, 2)))
        x15, x37 = tl.split(tl.reshape(odd, (SLICES, BLOCK_M, WORDS, 2, 2)))
        x0, x4 = tl.split(x04)
        x1, x5 = tl.split(x15)
        x2, x6 = tl.split(x26)
        x3, x7 = tl.split(x37)
        part = tl.zeros([SLICES, w_tile.shape[1], BLOCK_M], tl.float32)
        part = _with_nibbles(part, words, x0, 0, ASM)
        part = _with_nibbles(part, words, x1, 1, ASM)
        part = _with_nibbles(part, words, x2, 2, ASM)
        part = _with_nibbles(part, words, x3, 3, ASM)
        part = _with_nibbles(part, words, x4, 4, ASM)
        part = _with_nibbles(part, words, x5, 5, ASM)
        part = _with_nibbles(part, words, x6, 6, ASM)
        part = _with_nibbles(part, words, x7, 7, ASM)
        if PAIRS:
            pair = tl.load(s_tile + start // (2 * GROUP), mask=s_ok, other=0)
            half = tl.where((group % 2 == 0)[:, None], pair, pair >> 16)
            scale = half.to(tl.int16).to(x.dtype, bitcast=True).to(tl.float32)
            part = part * scale[:, :, None]
        elif GROUP > 0:
            scale = tl.load(s_tile + start // GROUP, mask=s_ok, other=0.0).to(tl.float32)
            part = part * scale[:, :, None]
        acc += part
    return tl.sum(acc, 0)


@triton.jit
def _with_nibbles(part, words, x, J: tl.constexpr, ASM: tl.constexpr):
    """``part`` and the products of words [SLICES, BLOCK_N, WORDS] and x [SLICES, ROWS, WORDS]."""
    steps = _steps(words, words, J, x.dtype, False, ASM)
    return tl.dot(steps, tl.permute(x, (0, 2, 1)), part, input_precision="ieee")


@triton.jit
def _put(
    acc, scale, row0, cols, bias_ptr, out_ptr, part_ptr, stride_o, split, n_rows, n_cols,
    ROW_SCALE: tl.constexpr, HAS_BIAS: tl.constexpr, SWAP: tl.constexpr, SPLIT_K: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Store a tile: results, or what one program of several has of them."""
    if SWAP:
        acc = tl.trans(acc)
    if ROW_SCALE:
        acc = acc * scale[None, :]
    rows = row0 + tl.arange(0, ROWS)
    ok = (rows < n_rows)[:, None] & (cols < n_cols)[None, :]
    row64 = rows.to(tl.int64)
    if SPLIT_K > 1:
        parts = part_ptr + (row64 + tl.cast(split, tl.int64) * n_rows)[:, None] * n_cols
        tl.store(parts + cols[None, :], acc, mask=ok)
    else:
        if HAS_BIAS:
            bias = tl.load(bias_ptr + cols, mask=cols < n_cols, other=0.0)
            acc = acc + bias.to(tl.float32)[None, :]
        outs = out_ptr + row64[:, None] * stride_o + cols[None, :]
        tl.store(outs, acc.to(out_ptr.dtype.element_ty), mask=ok)


@triton.jit
def _scaled(part, scale, SWAP: tl.constexpr):
    if SWAP:
        part = part * scale[:, None]
    else:
        part = part * scale[None, :]
    return part


@triton.jit(do_not_specialize=["n_rows", "n_m", "n_n", "n_tiles"])
def _w4a16_gemm_kernel(
    x_ptr, w_ptr, s_ptr, z_ptr, bias_ptr, out_ptr, part_ptr,
    stride_x, stride_w, stride_s, stride_z, stride_o,
    x_step,  # numbers between columns 8c + j and 8c + j + 1 of x, if it is turned
    n_cols, n_inner, split_k,  # columns of x that a program takes
    n_rows, n_m, n_n, n_tiles,
    GROUP: tl.constexpr,  # columns with one scale; 0: a row has one
    HAS_ZERO: tl.constexpr, HAS_BIAS: tl.constexpr,
    PAIRS: tl.constexpr,  # scales of two groups are read as one int32
    EVEN_K: tl.constexpr, EVEN_N: tl.constexpr, ONE_TILE: tl.constexpr,
    DIRECT: tl.constexpr, SWAP: tl.constexpr, ASM: tl.constexpr, PDL: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT_K: tl.constexpr,
    SLICES: tl.constexpr, STAGES: tl.constexpr,
):
    if PDL:
        _let_next_kernel_start()
        _wait_for_earlier_kernels()
    if ONE_TILE:
        _w4a16_gemm_tile(
            tl.program_id(0), x_ptr, w_ptr, s_ptr, z_ptr, bias_ptr, out_ptr, part_ptr, stride_x,
            stride_w, stride_s, stride_z, stride_o, x_step, n_cols, n_inner, split_k, n_rows, n_m,
            n_n, GROUP, HAS_ZERO, HAS_BIAS, PAIRS, EVEN_K, EVEN_N, DIRECT, SWAP, ASM, BLOCK_M,
            BLOCK_N, BLOCK_K, SPLIT_K, SLICES, STAGES)
    else:
        for tile in range(tl.program_id(0), n_tiles, tl.num_programs(0)):
            _w4a16_gemm_tile(
                tile, x_ptr, w_ptr, s_ptr, z_ptr, bias_ptr, out_ptr, part_ptr, stride_x, stride_w,
                stride_s, stride_z, stride_o, x_step, n_cols, n_inner, split_k, n_rows, n_m, n_n,
                GROUP, HAS_ZERO, HAS_BIAS, PAIRS, EVEN_K, EVEN_N, DIRECT, SWAP, ASM, BLOCK_M,
                BLOCK_N, BLOCK_K, SPLIT_K, SLICES, STAGES)


@triton.jit
def _w4a16_gemm_tile(
    tile, x_ptr, w_ptr, s_ptr, z_ptr, bias_ptr, out_ptr, part_ptr, stride_x, stride_w, stride_s,
    stride_z, stride_o, x_step, n_cols, n_inner, split_k, n_rows, n_m, n_n,
    GROUP: tl.constexpr, HAS_ZERO: tl.constexpr, HAS_BIAS: tl.constexpr, PAIRS: tl.constexpr,
    EVEN_K: tl.constexpr, EVEN_N: tl.constexpr, DIRECT: tl.constexpr, SWAP: tl.constexpr,
    ASM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    SPLIT_K: tl.constexpr, SLICES: tl.constexpr, STAGES: tl.constexpr,
):
    # A product takes STEP columns: a group or more of them, 16 words at the least.
    WHOLE: tl.constexpr = SLICES > 1 or (GROUP == 0 or GROUP > BLOCK_K)
    STEP: tl.constexpr = BLOCK_K // SLICES if WHOLE else (GROUP if GROUP > 128 else 128)
    WORDS: tl.constexpr = STEP // 8
    GROUPS: tl.constexpr = STEP // GROUP if GROUP > 0 and GROUP < STEP else 1
    PER_GROUP: tl.constexpr = GROUP // 8 if GROUPS > 1 else 0
    # Sixteen rows of x are two products of eight: one would go to an instruction that wants x in
    # shared memory.
    TWO: tl.constexpr = DIRECT and (BLOCK_M == 16 and SLICES == 1)
    ROWS: tl.constexpr = 8 if TWO else BLOCK_M
    GROUP_M: tl.constexpr = 8  # tiles of rows go through the columns together

    split = tile % SPLIT_K
    place = tile // SPLIT_K
    first_m = place // (GROUP_M * n_n) * GROUP_M
    width = tl.minimum(n_m - first_m, GROUP_M)
    within = place % (GROUP_M * n_n)
    row0 = (first_m + within % width) * BLOCK_M
    col0 = within // width * BLOCK_N
    c = tl.arange(0, BLOCK_N)
    word = tl.arange(0, WORDS)
    col_ok = c < n_cols - col0
    cols = col0 + c
    k_first = split * split_k
    k_end = tl.minimum(k_first + split_k, n_inner)
    col64 = cols.to(tl.int64)
    w_tile = w_ptr + col64[:, None] * stride_w + word[None, :]
    s_tile = s_ptr + col64 * stride_s
    z_tile = z_ptr + col64 * stride_z
    s_pairs = s_tile
    if PAIRS:
        s_pairs = s_tile.to(tl.pointer_type(tl.int32))
    scale = tl.zeros([BLOCK_N], tl.float32)
    zero = tl.full([BLOCK_N], 8, tl.int32)
    pair = zero
    if GROUP == 0:
        scale = tl.load(s_tile, mask=col_ok, other=0.0).to(tl.float32)
        if HAS_ZERO:
            zero = tl.load(z_tile, mask=col_ok, other=0).to(tl.int32)
    if SWAP:
        acc = tl.zeros([BLOCK_N, ROWS], tl.float32)
    else:
        acc = tl.zeros([ROWS, BLOCK_N], tl.float32)
    acc2 = acc
    if SLICES > 1:
        acc = _sliced_sum(
            w_tile, s_tile, x_ptr, stride_x, row0, col_ok, k_first, k_end, n_rows, n_inner,
            GROUP, PAIRS, EVEN_K, EVEN_N, ASM, BLOCK_M, BLOCK_K, SLICES, STAGES)
    else:
        for start in tl.range(k_first, k_end, BLOCK_K, num_stages=STAGES):
            for p in tl.static_range(BLOCK_K // STEP):
                at = start + p * STEP
                w_at = w_tile + at // 8
                if EVEN_K and EVEN_N:
                    words = tl.load(w_at)
                elif EVEN_K:
                    words = tl.load(w_at, mask=col_ok[:, None], other=0)
                else:
                    there = col_ok[:, None] & (word < (n_inner - at) // 8)[None, :]
                    words = tl.load(w_at, mask=there, other=0)
                x0, x1, x2, x3, x4, x5, x6, x7 = _every_eighth(
                    x_ptr, stride_x, x_step, row0, at, n_rows, n_inner, DIRECT, EVEN_K, ROWS, WORDS)
                if TWO:
                    y0, y1, y2, y3, y4, y5, y6, y7 = _every_eighth(
                        x_ptr, stride_x, x_step, row0 + 8, at, n_rows, n_inner, DIRECT, EVEN_K,
                        ROWS, WORDS)
                for g in tl.static_range(GROUPS):
                    if GROUP > 0:
                        group = at // GROUP + g
                        there = col_ok
                        if not EVEN_K:
                            there = there & (c * 0 < n_inner - group * GROUP)
                        if PAIRS:
                            if (p * GROUPS + g) % 2 == 0:
                                pair = tl.load(s_pairs + group // 2, mask=there, other=0)
                                half = pair
                            else:
                                half = pair >> 16
                            scale = half.to(tl.int16).to(s_ptr.dtype.element_ty, bitcast=True)
                            scale = scale.to(tl.float32)
                        else:
                            scale = tl.load(s_tile + group, mask=there, other=0.0).to(tl.float32)
                        if HAS_ZERO:
                            zero = tl.load(z_tile + group, mask=there, other=0).to(tl.int32)
                    part = _product(
                        words, zero, x0, x1, x2, x3, x4, x5, x6, x7, word, g, HAS_ZERO, ASM, SWAP,
                        PER_GROUP)
                    if GROUP > 0:
                        part = _scaled(part, scale, SWAP)
                    acc += part
                    if TWO:
                        part = _product(
                            words, zero, y0, y1, y2, y3, y4, y5, y6, y7, word, g, HAS_ZERO, ASM,
                            SWAP, PER_GROUP)
                        if GROUP > 0:
                            part = _scaled(part, scale, SWAP)
                        acc2 += part
    _put(
        acc, scale, row0, cols, bias_ptr, out_ptr, part_ptr, stride_o, split, n_rows, n_cols,
        GROUP == 0, HAS_BIAS, SWAP, SPLIT_K, ROWS)
    if TWO:
        _put(
            acc2, scale, row0 + 8, cols, bias_ptr, out_ptr, part_ptr, stride_o, split, n_rows,
            n_cols, GROUP == 0, HAS_BIAS, SWAP, SPLIT_K, ROWS)


@triton.jit(do_not_specialize=["n_rows", "n_tiles"])
def _add_kernel(
    bias_ptr, out_ptr, part_ptr, stride_o, n_cols, n_pieces, n_rows, n_tiles,
    HAS_BIAS: tl.constexpr, PDL: tl.constexpr, SPLIT_K: tl.constexpr, PIECE: tl.constexpr,
):
    """Results of what the programs of a tile left, added in order. A program has PIECE of a row."""
    if PDL:
        _let_next_kernel_start()
        _wait_for_earlier_kernels()
    for tile in range(tl.program_id(0), n_tiles, tl.num_programs(0)):
        row = (tile // n_pieces).to(tl.int64)
        cols = tile % n_pieces * PIECE + tl.arange(0, PIECE)
        ok = cols < n_cols
        y = tl.zeros([PIECE], tl.float32)
        for split in tl.static_range(SPLIT_K):
            parts = part_ptr + (row + split * tl.cast(n_rows, tl.int64)) * n_cols
            y += tl.load(parts + cols, mask=ok, other=0.0)
        if HAS_BIAS:
            y = y + tl.load(bias_ptr + cols, mask=ok, other=0.0).to(tl.float32)
        tl.store(out_ptr + row * stride_o + cols, y.to(out_ptr.dtype.element_ty), mask=ok)


# fmt: on


@op
def w4a16_gemm(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    *,
    weight_zero: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    config: Config | None = None,
) -> torch.Tensor:
    """x @ W^T + bias with weights of 4 bits: W[n, k] = (q - zero) * scale of column k's group.

    Matrices have contiguous columns and any row stride; bias is contiguous.

    Args:
        x: [M, K], bf16 or fp16.
        weight: int32 [N, K/8]: q, 0 to 15, of column 8c + j in bits 4j to 4j + 3 of word c, as
            ``compressed-tensors`` packs it. ``tkernels.repack_awq`` and ``repack_gptq`` make it of
            other formats. With ``PDL`` weight, weight_scale and weight_zero are read before kernels
            of this library that were launched before have ended, so those must not write them. A
            kernel of PyTorch that does so has ended by then, as it lets none start early, and so
            have all that were launched before it.
        weight_scale: [N, K/group], of x's dtype or fp32. group is a power of two from 32 on, or K
            (a scale a row).
        weight_zero: int8 [N, K/group]: the q that stands for 0. None: 8 (symmetric weights).
        bias: [N], fp32 or x's dtype.
        out: [M, N] of x's dtype, written and returned; it may not share memory with an argument.
        config: launch config; None looks it up.

    Returns:
        [M, N] of x's dtype. Activations that are NaN or infinite spoil their own rows alone. What
        is rounded, and which memory a call takes, depends on the rows:

        few: products are of exact weights, sums fp32.
        33 to 2048 on Hopper, scales of x's dtype (``variant`` "wide"): weights are rounded to x's
            dtype first, as dequantised ones would be; in bf16 without zero points scales have to be
            below 2048. Takes another copy of x, and parts of sums in fp32 where tiles are few.
        more, and elsewhere from 65, 129 or 257 on, by the size of W ("unpacked"): so are they, and
            the bias; the product is PyTorch's, whose settings hold for it. Takes 128 MiB, or room
            for 256 outputs.

    Raises:
        TypeError, ValueError: an argument of the wrong kind, shape, dtype, stride or device.
    """
    if out is None:
        for name, t in (("x", x), ("weight", weight)):
            check_tensor(_OP, name, t)
        if weight.dim() != 2:
            raise ValueError(f"{_OP}: weight must have shape [N, K/8], got {describe(weight)}")
        out = torch.empty((*x.shape[:-1], len(weight)), dtype=x.dtype, device=x.device)
    else:
        check_own(_OP, "out", out, x=x)
    tensors: tuple[torch.Tensor, ...] = (x, weight, weight_scale, out)
    if weight_zero is not None:
        tensors = (*tensors, weight_zero)
    if bias is not None:
        tensors = (*tensors, bias)
    run = planned(_plan, config, tensors, weight_zero is not None, bias is not None)
    if run is not None:
        run(x, weight, weight_scale, out, weight_zero, bias)
    return out


_Run = Callable[..., None]


def _plan(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    out: torch.Tensor,
    *rest: Any,
    config: Config | None,
) -> _Run | None:
    """What runs such a call, given all its tensors; None where there is nothing to do."""
    *more, has_zero, has_bias = rest
    names = [*(["weight_zero"] if has_zero else []), *(["bias"] if has_bias else [])]
    given = dict(zip(names, more, strict=True))
    _check(x, weight, weight_scale, out, given)
    (m, k), n = x.shape, len(weight)
    if m == 0:
        return None
    group = k // weight_scale.shape[1]
    values = (m, n, k, x.dtype, group, weight_scale.dtype, has_zero)
    cfg, max_programs = resolve(SPEC, values, config)
    zero_stride = given["weight_zero"].stride(0) if has_zero else 0
    strides = (x.stride(0), weight.stride(0), weight_scale.stride(0), zero_stride, out.stride(0))
    facts = {"GROUP": 0 if group == k else group, "HAS_ZERO": has_zero, "HAS_BIAS": has_bias}
    element = weight_scale.element_size()
    if cfg["variant"] in ("direct", "turned"):
        return _bind_portable((m, n, k), facts, strides, element, cfg, max_programs)
    if cfg["variant"] == "unpacked":
        return w4a16_gemm_unpacked.bound((m, n, k), facts, strides, cfg)
    problem = dict(zip(SPEC.problem_fields, values, strict=True))
    other = _portable_config(problem, device.current())
    del other["programs_per_core"]
    every = device.current().max_programs  # the limit that is given is the other body's
    portable = _bind_portable((m, n, k), facts, strides, element, other, every)
    wide = cfg["variant"] == "wide"
    # Spelt out, so that a kernel's hash leads there.
    fits = w4a16_gemm_wide.fits if wide else w4a16_gemm_core.fits
    bound = w4a16_gemm_wide.bound if wide else w4a16_gemm_core.bound
    if not fits((strides[0] if m > 1 else 0, *strides[1:])):
        return portable
    chosen = _bind_hopper(bound, (m, n, k), facts, strides, cfg, max_programs)
    addressable = not device.current().compile_only

    def by_address(x: torch.Tensor, weight: torch.Tensor, *others: Any) -> None:
        # Codes, and x by "core", are copied 16 bytes at a time.
        odd = addressable and (weight.data_ptr() % 16 or (not wide and x.data_ptr() % 16))
        (portable if odd else chosen)(x, weight, *others)

    return by_address


def _bind_portable(
    sizes: tuple[int, int, int],
    facts: dict[str, Any],
    strides: tuple[int, ...],
    element: int,
    config: Config,
    max_programs: int,
) -> _Run:
    """What runs the kernels above, given all tensors; ``element``: bytes of a scale."""
    k = sizes[2]
    group = facts["GROUP"] or k

    def bound(pairs: bool) -> _Run:
        return _bind(sizes, facts, strides, pairs, config, max_programs)

    # Scales of two groups at a time: 4 bytes, which can be copied ahead.
    in_step = config["BLOCK_K"] // group
    if (
        device.current().is_npu
        or element != 2
        or in_step == 0
        or in_step % 2
        or (k // group) % 2
        or strides[2] % 2
    ):
        return bound(False)
    in_pairs, one_by_one = bound(True), bound(False)
    addressable = not device.current().compile_only

    def run(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, *others: Any) -> None:
        odd = addressable and scale.data_ptr() % 4
        (one_by_one if odd else in_pairs)(x, weight, scale, *others)

    return run


def _bind(
    sizes: tuple[int, int, int],
    facts: dict[str, Any],
    strides: tuple[int, ...],
    pairs: bool,
    config: Config,
    max_programs: int,
) -> _Run:
    """What runs the kernels above, given all tensors of a call like this one."""
    m, n, k = sizes
    dev = device.current()
    cfg = {"PDL": False, **config}  # Ascend has none
    direct = cfg.pop("variant") == "direct"
    block_m, block_n, block_k, splits = (
        cfg[name] for name in ("BLOCK_M", "BLOCK_N", "BLOCK_K", "SPLIT_K")
    )
    n_m, n_n = cdiv(m, block_m), cdiv(n, block_n)
    n_tiles = n_m * n_n * splits
    programs = min(n_tiles, max_programs * dev.num_dot_cores // dev.num_cores)
    multiply = bind(
        _w4a16_gemm_kernel,
        (programs,),
        **facts,
        PAIRS=pairs,
        EVEN_K=k % block_k == 0,
        EVEN_N=n % block_n == 0,
        ONE_TILE=programs == n_tiles,
        DIRECT=direct,
        SWAP=not dev.is_npu,
        ASM=_has_asm(dev),
        STAGES=cfg.get("num_stages", 1),
        **cfg,
        **({"launch_pdl": True} if cfg["PDL"] else {}),
    )
    split_k = cdiv(cdiv(k, block_k), splits) * block_k
    stride_x = strides[0] if direct else k // 8
    numbers = (stride_x, *strides[1:], m * (k // 8), n, k, split_k, m, n_m, n_n, n_tiles)
    add, add_numbers = _bind_adding(m, n, facts["HAS_BIAS"], strides[-1], cfg, max_programs)

    def run(
        x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, out: torch.Tensor, zero: Any,
        bias: Any,
    ) -> None:  # fmt: skip
        if not direct:
            x = x.reshape(m, k // 8, 8).permute(2, 0, 1).contiguous()
        part = out
        if add is not None:
            part = torch.empty(splits * m * n, dtype=torch.float32, device=out.device)
        zero, bias = (scale if t is None else t for t in (zero, bias))  # not read
        multiply(x, weight, scale, zero, bias, out, part, *numbers)
        if add is not None:
            add(bias, out, part, *add_numbers)

    return run


def _bind_hopper(
    bound: Callable[..., Callable[..., None]],
    sizes: tuple[int, int, int],
    facts: dict[str, Any],
    strides: tuple[int, ...],
    config: Config,
    max_programs: int,
) -> _Run:
    """The same for ``w4a16_gemm_core`` and ``w4a16_gemm_wide``; ``bound``: theirs."""
    m, n, _ = sizes
    splits = config["SPLIT_K"]
    multiply = bound(sizes, facts, strides, config, max_programs)
    add = w4a16_gemm_core.bound_adding(m, n, facts["HAS_BIAS"], strides[-1], config)

    def run(
        x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, out: torch.Tensor, zero: Any,
        bias: Any,
    ) -> None:  # fmt: skip
        part = out
        if add is not None:
            part = torch.empty(splits * m * n, dtype=torch.float32, device=out.device)
        zero, bias = (scale if t is None else t for t in (zero, bias))  # not read
        multiply(x, weight, scale, zero, bias, out, part)
        if add is not None:
            add(bias, out, part)

    return run


def _has_asm(dev: Device) -> bool:
    """The arithmetic of two bf16 in one register came with sm90."""
    return dev.arch.startswith("sm") and int(dev.arch[2:]) >= 90


def _bind_adding(
    m: int, n: int, has_bias: bool, stride_o: int, config: Config, max_programs: int
) -> tuple[_Run | None, tuple[int, ...]]:
    """What adds the parts of a split K, and its numbers; None without a split."""
    if config["SPLIT_K"] == 1:
        return None, ()
    dev = device.current()
    piece = min(next_power_of_2(n), 1024)
    while dev.registers and piece > 256 and m * cdiv(n, piece) < 4 * dev.num_cores:
        piece //= 2
    n_pieces = cdiv(n, piece)
    add = bind(
        _add_kernel,
        (min(m * n_pieces, max_programs if dev.is_npu else dev.max_programs),),
        HAS_BIAS=has_bias,
        PDL=config["PDL"],
        SPLIT_K=config["SPLIT_K"],
        PIECE=piece,
        **({"num_warps": piece // 128} if dev.registers and piece >= 128 else {}),
        **({"launch_pdl": True} if config["PDL"] else {}),
    )
    return add, (stride_o, n, n_pieces, m, m * n_pieces)


def _check(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    out: torch.Tensor,
    given: dict[str, torch.Tensor],
) -> None:
    """All that metadata can tell about the arguments."""
    tensors = {"x": x, "weight": weight, "weight_scale": weight_scale, **given, "out": out}
    for name, t in tensors.items():
        check_tensor(_OP, name, t)
    check_dtype(_OP, "x", x, (torch.bfloat16, torch.float16))
    if x.dim() != 2 or x.shape[1] == 0 or x.shape[1] % 8:
        raise ValueError(
            f"{_OP}: x must have shape [M, K], K a multiple of 8 from 8 on, got {describe(x)}"
        )
    m, k = x.shape
    check_dtype(_OP, "weight", weight, (torch.int32,))
    if weight.dim() != 2 or weight.shape[1] != k // 8 or len(weight) == 0:
        raise ValueError(
            f"{_OP}: weight must have shape [N >= 1, K/8={k // 8}], got {describe(weight)}"
        )
    n = len(weight)
    most = 2**31 - 2**16  # rows and columns are counted in 32 bits
    if max(m, n, k) > most:
        raise ValueError(f"{_OP}: x must have at most {most} rows and columns, got {describe(x)}")
    groups = weight_scale.shape[1] if weight_scale.dim() == 2 else 0
    group = k // groups if groups and k % groups == 0 else 0
    if group == 0 or (groups > 1 and (group < 32 or group & (group - 1))):
        raise ValueError(
            f"{_OP}: weight_scale must have shape [N={n}, K/group], group a power of two from 32 "
            f"on, or K={k}, got {describe(weight_scale)}"
        )
    wanted: dict[str, tuple[tuple[torch.dtype, ...], dict[str, int | None]]] = {
        "weight_scale": ((x.dtype, torch.float32), {"N": n, "n_groups": groups}),
        "weight_zero": ((torch.int8,), {"N": n, "n_groups": groups}),
        "bias": ((torch.float32, x.dtype), {"N": n}),
        "out": ((x.dtype,), {"M": m, "N": n}),
    }
    for name, (dtypes, shape) in wanted.items():
        if name in tensors:
            check_dtype(_OP, name, tensors[name], dtypes)
            check_shape(_OP, name, tensors[name], **shape)
    for name, t in tensors.items():
        check_last_contiguous(_OP, name, t)
    check_no_overlap(_OP, "out", out)


# ---- facts for tests, bench and tuner --------------------------------------------------------

_FIELDS = ("m", "n", "k", "dtype", "group", "scale", "zero")


def _tuning_key(problem: Problem) -> dict[str, Any]:
    p = problem
    bucket = 8
    while bucket < min(p["m"], 16384):
        # Apart: tiles of 32 to 256 rows once, or twice; and where weights are unpacked, or not yet.
        bucket *= 2 if bucket < 4096 else 4
    group = p["group"]
    return {
        "group": "row" if group == p["k"] else group,
        "zero": p["zero"],
        "fp32_scale": p["scale"] != p["dtype"],
        "m_up_to": bucket,
        "n": p["n"],
        "k": p["k"],
    }


def _space(dev: Device) -> dict[str, list[Any]]:
    space: dict[str, list[Any]] = {
        "BLOCK_M": [8, 16, 32, 64, 128],
        "BLOCK_N": [16, 32, 64, 128, 256],
        "BLOCK_K": [128, 256, 512, 1024],
        "SPLIT_K": [1, 2, 3, 4, 6, 8, 12, 16],
        "SLICES": [1],
        "programs_per_core": [0, 1, 2, 4],
        "variant": ["turned"],
    }
    if not dev.registers:  # a matrix unit and vector units: no threads
        return {**space, "programs_per_core": [1]}
    if dev.arch == "sm90":
        space |= {
            "BLOCK_M": [8, 16, 32, 64, 128, 256],
            "BLOCK_K": [64, 128, 256, 512, 1024],
            "programs_per_core": [0, 1, 2, 3, 4, 6, 8, 16, 32],
        }
    hopper = dev.arch == "sm90"
    return {
        **space,
        "variant": ["direct", "turned", "unpacked", *(["core", "wide"] if hopper else [])],
        "SLICES": [1, 2, 4, 8],
        "PDL": [False, True] if _has_pdl(dev) else [False],
        "num_warps": [1, 2, 4, 8, *([12] if hopper else [])],
        "num_stages": [1, 2, 3, 4, 5, 6, 7, 8],
    }


def _default_config(problem: Problem, dev: Device) -> Config:
    """Those of the Hopper bodies, where they can; of many rows weights are unpacked."""
    core, wide, unpacked = w4a16_gemm_core, w4a16_gemm_wide, w4a16_gemm_unpacked
    for_wide = wide.LEAST_ROWS <= problem["m"] <= wide.MOST_ROWS
    if for_wide and wide.why_unfit(problem, dev) is None:
        return wide.default_config(problem, dev)
    many = problem["m"] >= unpacked.least_rows(problem["n"], problem["k"])
    if many and unpacked.why_unfit(problem, dev) is None:
        return unpacked.default_config(problem)
    if problem["m"] <= core.MOST_ROWS and core.why_unfit(problem, dev) is None:
        config = core.default_config(problem, dev)
        if core.why_illegal(config, problem, dev) is None:
            return config
    return _portable_config(problem, dev)


def _portable_config(problem: Problem, dev: Device) -> Config:
    p = problem
    rows = max(8, next_power_of_2(p["m"]))
    config: Config = {
        "BLOCK_M": max(16, min(128 if dev.registers else 32, rows)),
        "BLOCK_N": 64,
        "BLOCK_K": 128,
        "SPLIT_K": 1,
        "SLICES": 1,
        "variant": "turned",
        "programs_per_core": 1,
    }
    if not dev.registers:
        return config
    config |= {"programs_per_core": 0, "PDL": _has_pdl(dev), "num_warps": 4, "num_stages": 4}
    if rows <= 16:
        # Two groups a step, so that scales come in pairs; and wide tiles, because each warp brings
        # x to its registers. As an H100 liked them (CONTRIBUTING, "Measured facts").
        config |= {"BLOCK_M": rows, "BLOCK_N": 128, "BLOCK_K": 256, "variant": "direct"}
        fill = cdiv(p["n"], 64) * 10 >= dev.num_cores * 9  # narrower tiles fill the chip
        slices = 2 if fill else 4
        sliced = {"BLOCK_N": 64, "BLOCK_K": 128 * slices, "SLICES": slices, "num_warps": slices}
        fits = p["k"] >= 512 * slices and _why_no_slices({**config, **sliced}, p) is None
        if rows == 8 and fits:
            config |= {**sliced, "num_stages": 8 if fill else 6}
    else:
        config |= {"BLOCK_N": 128, "num_warps": 8}
    tiles = cdiv(p["m"], config["BLOCK_M"]) * cdiv(p["n"], config["BLOCK_N"])
    if 2 * tiles < dev.num_cores or (tiles < dev.num_cores and rows > 16):
        most = max(1, p["k"] // (2 * config["BLOCK_K"]))  # two steps a program, at the least
        programs = (1 if config["SLICES"] > 1 else 3) * dev.num_cores
        config["SPLIT_K"] = _largest_split(min(most, 16, programs // tiles))
    if rows <= 16 and config["SLICES"] == 1:
        config["num_stages"] = 6 if config["SPLIT_K"] == 1 else 3
    while config["num_stages"] > 1 and _shared_bytes(config, problem) > dev.local_mem_bytes:
        config["num_stages"] -= 1
    return config


def _largest_split(most: int) -> int:
    return max(s for s in (1, 2, 3, 4, 6, 8, 12, 16) if s <= max(1, most))


def _shared_bytes(config: Config, problem: Problem) -> int:
    """Stages of words, x and scales; a tile of results on its way out."""
    m, n, k = config["BLOCK_M"], config["BLOCK_N"], config["BLOCK_K"]
    slices = config["SLICES"]
    stage = n * k // 2 + 2 * m * k + 4 * n * max(slices, cdiv(k, problem["group"]))
    return int(max(config["num_stages"] * stage, slices * m * n * 4) + 1024)


def _why_no_slices(config: Config, problem: Problem) -> str | None:
    slices, group = config["SLICES"], problem["group"]
    if slices == 1:
        return None
    if config["variant"] != "direct":
        return f"SLICES are for variants direct and core, got {config['variant']}"
    if problem["zero"]:
        return "SLICES are for weights without zero points"
    step = config["BLOCK_K"] // slices
    if step < 128 or (group != problem["k"] and group % step):
        return f"a slice of {step} columns must be 128 or more and of one group of {group}"
    if slices < config.get("num_warps", slices):
        return f"{slices} slices are work for as many warps, got {config['num_warps']}"
    return None


def _why_illegal(config: Config, problem: Problem, dev: Device) -> str | None:
    for name, least in (("BLOCK_M", 8), ("BLOCK_N", 16), ("BLOCK_K", 64)):
        if config[name] < least or config[name] & (config[name] - 1):
            return f"{name} must be a power of two from {least} on, got {config[name]}"
    if not 1 <= config["SPLIT_K"] <= 64:
        return f"SPLIT_K must be 1 to 64, got {config['SPLIT_K']}"
    m, n, k = config["BLOCK_M"], config["BLOCK_N"], config["BLOCK_K"]
    variant = config["variant"]
    if variant == "core":
        unfit = w4a16_gemm_core.why_unfit(problem, dev)
        return unfit or w4a16_gemm_core.why_illegal(config, problem, dev)
    if variant == "wide":
        unfit = w4a16_gemm_wide.why_unfit(problem, dev)
        return unfit or w4a16_gemm_wide.why_illegal(config, problem, dev)
    if variant == "unpacked":
        unfit = w4a16_gemm_unpacked.why_unfit(problem, dev)
        return unfit or w4a16_gemm_unpacked.why_illegal(config, dev)
    if variant not in ("direct", "turned"):
        return f"variant must be direct, turned, unpacked, core or wide, got {variant!r}"
    if k < 128:
        return f"BLOCK_K must be a power of two from 128 on, got {k}"
    if config["SLICES"] not in (1, 2, 4, 8):
        return f"SLICES must be 1, 2, 4 or 8, got {config['SLICES']}"
    if why := _why_no_slices(config, problem):
        return why
    if variant == "direct" and m > 16:
        return f"variant direct has 8 or 16 rows, got {m}"
    if not dev.registers:
        if variant == "direct":
            return f"variant direct needs an NVIDIA device, got {dev.arch}"
        # Huawei's compiler is the judge; tiles of 64 x 64 x 128 take 1% more UB than there is.
        if m < 16 or m * n > 32 * 64 or n * k > 64 * 128:
            return f"tiles of {m} rows, {n} columns and {k} terms overflow UB, or are too small"
        return None
    if config["PDL"] and not _has_pdl(dev):
        return f"PDL needs sm90 or later, got {dev.arch}"
    if why := why_no_room(config, dev, _shared_bytes(config, problem)):
        return why
    if (registers := 2 * m * n * config["SLICES"] // (config["num_warps"] * 32)) > 128:
        return f"the sums of a tile and of a group take {registers} of 255 registers a thread"
    return None


SPEC = register(
    KernelSpec(
        name=_OP,
        launch=w4a16_gemm,
        reference=w4a16_gemm_ref,
        problem_fields=_FIELDS,
        make_inputs=w4_inputs,
        cases=W4_CASES,
        tuning_key=_tuning_key,
        space=_space,
        default_config=_default_config,
        why_illegal=_why_illegal,
        cost=w4_cost,
        outputs=("out",),
        providers=w4_peers,
        shape=w4_shape,
    )
)
