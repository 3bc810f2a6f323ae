"""The body of ``w4a16_gemm`` for few rows on Hopper (sm_90): ``variant`` "hopper".

A program has BLOCK_N outputs and num_warps warps. Each warp has a part of K of its own, and stages
of its own in shared memory: BLOCK_N rows of BLOCK_K / 2 bytes, fetched whole. What a warp waits
for, the others cover; the sums of the warps meet once, at the end. Where these parts are still too
few, SPLIT_K programs share the K of a tile, as in the portable body.

Weights are the left operand of ``mma.sync`` (16 outputs), so that 8 rows of x fill the right one.
A word w of 8 codes is two halves of 4: ``w >> 4i & 0x000f000f``, put beside an exponent whose last
bit counts 1, are the codes of columns 8c + i and 8c + 4 + i, a pair of numbers in one register. The
order of terms in a product is free, so product i has every fourth column, 4h + i, of both sides:
codes stay in the lane that read them (``ldmatrix``), and a lane reads 8 neighbours of x at once.

q - zero is exact in 16 bits, sums are fp32, and a group's sum is scaled in fp32. A lane has two
chunks of 64 columns of x at a time, no more: registers are what bounds the warps on a core.

With PDL a program lets the next kernel start at once, and asks for its first weights, scales and
zero points before it waits for the kernels before, which do not write them. Whoever starts then
waits for this kernel to end, and with it for all earlier ones: every program waits.

It is written in Gluon, where layouts say which warp has which part of K, and which lane which
columns of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tkernels import device
from tkernels import flash_attn_hopper as flash
from tkernels.device import Device, cdiv, next_power_of_2
from tkernels.masked_gemm_hopper import _as
from tkernels.paged_attn_quantized_hopper import (
    _let_next_kernel_start,
    _wait_for_earlier_kernels,
)
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

MOST_COLUMNS = 1 << 30  # of x: they are counted in 32 bits, and a little beyond
FIXED: Config = {"variant": "hopper", "SLICES": 1}  # what this body has no choice of


def _decoding(fp16: bool, zero: bool) -> str:
    """PTX from two int16 of four codes each to pairs of q - zero: codes 0, 1, 2 and 3 of both.

    128 + q in bf16, 1024 + q in fp16, where a code may also stand four bits higher and add 16 q.
    ``zero``: $5 has, twice, -(128 + zero) or -(1024 + zero); without it zero is 8.
    """
    kind, one, less = ("bf16x2", "0x43004300", "0xc308c308")
    if fp16:
        kind, one, less = ("f16x2", "0x64006400", "0xe408e408")
    text = "{.reg .b32 t, e, l, h, s;"
    text += f"mov.b32 e, {one}; mov.b32 l, {'$5' if zero else less};"
    if fp16:  # (1024 + 16 q) / 16 - (64 + zero)
        text += "mov.b32 s, 0x2c002c00; mov.b32 h, 0xd480d480;"
        if zero:
            text += "mov.b32 h, 0x63806380; add.rn.f16x2 h, h, l;"
    text += "mov.b32 t, $4;"
    for i in range(4):
        high = fp16 and i % 2 == 1
        if i and not high:
            text += f"shr.u32 t, $4, {4 * i};"
        mask = "0x00f000f0" if high else "0x000f000f"
        text += f"lop3.b32 ${i}, t, {mask}, e, 0xea;"  # t & mask | e
        text += f"fma.rn.f16x2 ${i}, ${i}, s, h;" if high else f"add.rn.{kind} ${i}, ${i}, l;"
    return text + "}"


_BF16, _BF16_ZERO = gl.constexpr(_decoding(False, False)), gl.constexpr(_decoding(False, True))
_FP16, _FP16_ZERO = gl.constexpr(_decoding(True, False)), gl.constexpr(_decoding(True, True))

# fmt: off


@gluon.jit
def _steps(halves, zero, HAS_ZERO: gl.constexpr):
    """q - zero of codes 0, 1, 2 and 3 of int16, in the dtype of ``zero`` (see ``_decoding``)."""
    if gl.float16 == zero.dtype:
        if HAS_ZERO:
            steps = gl.inline_asm_elementwise(
                _FP16_ZERO, "=&r,=&r,=&r,=&r,r,r", [halves, zero],
                dtype=(gl.float16, gl.float16, gl.float16, gl.float16), is_pure=True, pack=2)
        else:
            steps = gl.inline_asm_elementwise(
                _FP16, "=&r,=&r,=&r,=&r,r", [halves],
                dtype=(gl.float16, gl.float16, gl.float16, gl.float16), is_pure=True, pack=2)
    else:
        if HAS_ZERO:
            steps = gl.inline_asm_elementwise(
                _BF16_ZERO, "=&r,=&r,=&r,=&r,r,r", [halves, zero],
                dtype=(gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16), is_pure=True, pack=2)
        else:
            steps = gl.inline_asm_elementwise(
                _BF16, "=&r,=&r,=&r,=&r,r", [halves],
                dtype=(gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16), is_pure=True, pack=2)
    return steps


@gluon.jit
def _pieces(x, P: gl.constexpr):
    """The P pieces [W, M, C / P] of x [W, M, C], side by side; no number changes its lane."""
    if P == 1:
        pieces = gl.tuple([x])
    else:
        w: gl.constexpr = x.shape[0]
        m: gl.constexpr = x.shape[1]
        c: gl.constexpr = x.shape[2]
        first, second = gl.split(gl.permute(gl.reshape(x, [w, m, 2, c // 2]), [0, 1, 3, 2]))
        first = gl.convert_layout(first, x.type.layout, assert_trivial=True)
        second = gl.convert_layout(second, x.type.layout, assert_trivial=True)
        pieces = _pieces(first, P // 2) + _pieces(second, P // 2)
    return pieces


@gluon.jit
def _per_group(x, P: gl.constexpr, rows: gl.constexpr):
    """The P columns [W, N] of a tensor [W, N, P], with the layout ``rows``."""
    if P == 1:
        columns = gl.tuple([gl.convert_layout(gl.reshape(x, [x.shape[0], x.shape[1]]), rows)])
    elif P == 2:
        first, second = gl.split(x)
        columns = gl.tuple([gl.convert_layout(first, rows, assert_trivial=True),
                            gl.convert_layout(second, rows, assert_trivial=True)])
    else:
        even, odd = gl.split(gl.reshape(x, [x.shape[0], x.shape[1], P // 2, 2]))
        a, c = gl.split(even)
        b, d = gl.split(odd)
        columns = gl.tuple([gl.convert_layout(a, rows, assert_trivial=True),
                            gl.convert_layout(b, rows, assert_trivial=True),
                            gl.convert_layout(c, rows, assert_trivial=True),
                            gl.convert_layout(d, rows, assert_trivial=True)])
    return columns


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
def _fetch(
    w_s, w_tile, step, first, col_ok, n_inner, STAGES: gl.constexpr, K: gl.constexpr,
    EVEN_K: gl.constexpr, EVEN_N: gl.constexpr, lines: gl.constexpr,
):
    """Start to bring the codes of a step, whole rows of it at once."""
    at = w_tile + step * (K // 4)
    if EVEN_K and EVEN_N:
        _load_async(w_s.index(step % STAGES), at)
    else:
        ok = col_ok[None, :, None]
        if not EVEN_K:
            h = gl.arange(0, K // 4, gl.SliceLayout(0, gl.SliceLayout(1, lines)))
            left = n_inner - (first + step * K)
            ok = ok & ((h // 8 * 32)[None, None, :] < left[:, None, None])  # 16 bytes or none
        _load_async(w_s.index(step % STAGES), at, mask=ok)


@gluon.jit
def _of_groups(
    tile, step, first, col_ok, n_inner, other: gl.constexpr, GROUP: gl.constexpr, K: gl.constexpr,
    GROUPS: gl.constexpr, EVEN_K: gl.constexpr, EVEN_N: gl.constexpr, few: gl.constexpr,
):
    """[W, N, GROUPS] of the scales or zero points of a step."""
    g = gl.arange(0, GROUPS, gl.SliceLayout(0, gl.SliceLayout(1, few)))
    if GROUP >= K:
        at = tile + ((first + step * K) // GROUP)[:, None, None]
    else:
        at = tile + step * GROUPS
    ok = col_ok[None, :, None]
    if not EVEN_K:
        left = n_inner - (first + step * K)
        ok = ok & ((g * GROUP)[None, None, :] < left[:, None, None])
    if EVEN_K and EVEN_N:
        numbers = gl.load(at)
    else:
        numbers = gl.load(at, mask=ok, other=other)
    return numbers


@gluon.jit
def _columns_of_x(
    x_tile, at, first, n_inner, EVEN_K: gl.constexpr, C: gl.constexpr, eights: gl.constexpr,
):
    """[W, R, C] of x, from column first + at on."""
    if EVEN_K:
        x = gl.load(x_tile + at)
    else:
        c = gl.arange(0, C, gl.SliceLayout(0, gl.SliceLayout(1, eights)))
        ok = (c // 8 * 8)[None, None, :] < (n_inner - (first + at))[:, None, None]
        x = gl.load(x_tile + at, mask=ok, other=0.0)
    return x


@gluon.jit
def _row_to_shared(
    x_ptr, first, steps, n_inner, S: gl.constexpr, W: gl.constexpr, K: gl.constexpr,
    EVEN_K: gl.constexpr,
):
    """[S, W, 1, K] in shared memory: the columns of a row that each warp takes in each step.

    All are asked for at once: piece after piece, each would wait for the one before. ``first``: the
    first column of the first warp. S: ``steps`` or more, a power of two.
    """
    DTYPE: gl.constexpr = x_ptr.dtype.element_ty
    V: gl.constexpr = 128 // DTYPE.primitive_bitwidth  # that make 16 bytes
    lanes: gl.constexpr = gl.BlockedLayout([1, 1, V], [1, 1, 32], [W, 1, 1], [2, 1, 0])
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    q = gl.arange(0, S * W, gl.SliceLayout(1, gl.SliceLayout(2, lanes)))[:, None, None]
    k = gl.arange(0, K, gl.SliceLayout(0, gl.SliceLayout(1, lanes)))[None, None, :]
    at = first + (q % W * steps + q // W) * K + k
    there = (q // W < steps) & (k < K)
    if not EVEN_K:
        there = there & (at // V * V < n_inner)
    x_s = gl.allocate_shared_memory(DTYPE, [S, W, 1, K], plain)
    _as(x_s, DTYPE, [S * W, 1, K], plain).store(gl.load(x_ptr + at, mask=there, other=0))
    return x_s


@gluon.jit
def _of_row(x_s, step, at: gl.constexpr, C: gl.constexpr, R: gl.constexpr, layout: gl.constexpr):
    """[W, R, C]: columns from ``at`` on of a step's, the same in each row."""
    x = x_s.index(step).slice(at, C, 2).load(layout)
    return x.broadcast_to([x.shape[0], R, C])


@gluon.jit(do_not_specialize=["n_rows", "n_m", "steps"])
def _w4a16_gemm_hopper_kernel(
    x_ptr, w_ptr, s_ptr, z_ptr, bias_ptr, out_ptr, part_ptr,
    stride_x, stride_w,  # in units of 16 bytes
    stride_s, stride_z, stride_o, n_cols, n_inner, n_rows, n_m,
    steps,  # of K columns, that a warp takes
    S: gl.constexpr,  # as many or more, where there is one row; else 0
    GROUP: gl.constexpr,  # columns with one scale; 0: a row has one
    HAS_ZERO: gl.constexpr, HAS_BIAS: gl.constexpr, EVEN_K: gl.constexpr, EVEN_N: gl.constexpr,
    PDL: gl.constexpr, R: gl.constexpr, N: gl.constexpr, K: gl.constexpr, SPLIT_K: gl.constexpr,
    STAGES: gl.constexpr, W: gl.constexpr,
):
    DTYPE: gl.constexpr = x_ptr.dtype.element_ty
    ONE: gl.constexpr = 1024.0 if gl.float16 == DTYPE else 128.0  # see _decoding
    # A step has GROUPS scales, each of them for A_GROUP chunks of columns.
    CHUNK: gl.constexpr = 64  # 16 halves of words: what a product takes
    GROUPS: gl.constexpr = K // GROUP if (GROUP > 0 and GROUP < K) else 1
    A_GROUP: gl.constexpr = K // GROUPS // CHUNK
    WHOLE: gl.constexpr = GROUP if GROUP > 0 else 1 << 30
    LANES: gl.constexpr = K // 32  # that fetch a row, 16 bytes each
    sums: gl.constexpr = gl.NVMMADistributedLayout(
        version=[2, 0], warps_per_cta=[W, 1, 1], instr_shape=[1, 16, 8])
    left: gl.constexpr = gl.DotOperandLayout(0, sums, 2)
    right: gl.constexpr = gl.DotOperandLayout(1, sums, 2)
    lines: gl.constexpr = gl.BlockedLayout([1, 1, 8], [1, 32 // LANES, LANES], [W, 1, 1], [2, 1, 0])
    eights: gl.constexpr = gl.BlockedLayout([1, 1, 8], [1, 8, 4], [W, 1, 1], [2, 1, 0])
    few: gl.constexpr = gl.BlockedLayout([1, 1, GROUPS], [1, 8, 4], [W, 1, 1], [2, 1, 0])
    codes: gl.constexpr = gl.SwizzledSharedLayout(
        8, 2 if K == 128 else 1, 4 if K == 128 else 8, [2, 1, 0])

    if PDL:
        _let_next_kernel_start()
    split = gl.program_id(0) % SPLIT_K
    place = gl.program_id(0) // SPLIT_K
    row0 = place % n_m * R
    col0 = place // n_m * N

    # The first column of each warp, as each of the layouts below has it.
    first = split * W + gl.arange(0, W, gl.SliceLayout(1, gl.SliceLayout(2, lines)))
    first = first * steps
    n = gl.arange(0, N, gl.SliceLayout(0, gl.SliceLayout(2, lines)))
    h = gl.arange(0, K // 4, gl.SliceLayout(0, gl.SliceLayout(1, lines)))
    ok = n < n_cols - col0
    w_tile = w_ptr.to(gl.pointer_type(gl.int16)) + col0.to(gl.int64) * stride_w * 8
    w_tile = w_tile + (n.to(gl.int64) * stride_w * 8)[None, :, None]
    w_tile = w_tile + (first * (K // 4))[:, None, None] + h[None, None, :]
    first = first * K
    w_s = gl.allocate_shared_memory(gl.int16, [STAGES, W, N, K // 4], codes)
    for i in gl.static_range(STAGES - 1):
        if i < steps:
            _fetch(w_s, w_tile, i, first, ok, n_inner, STAGES, K, EVEN_K, EVEN_N, lines)
        _commit()

    s_first = split * W + gl.arange(0, W, gl.SliceLayout(1, gl.SliceLayout(2, few)))
    s_first = s_first * steps
    n = gl.arange(0, N, gl.SliceLayout(0, gl.SliceLayout(2, few)))
    g = gl.arange(0, GROUPS, gl.SliceLayout(0, gl.SliceLayout(1, few)))
    s_ok = n < n_cols - col0
    s_tile = s_ptr + col0.to(gl.int64) * stride_s
    z_tile = z_ptr + col0.to(gl.int64) * stride_z
    s_tile = s_tile + (n.to(gl.int64) * stride_s)[None, :, None] + g[None, None, :]
    z_tile = z_tile + (n.to(gl.int64) * stride_z)[None, :, None] + g[None, None, :]
    if GROUPS > 1:
        s_tile = s_tile + (s_first * GROUPS)[:, None, None]
        z_tile = z_tile + (s_first * GROUPS)[:, None, None]
    s_first = s_first * K
    scales = _of_groups(
        s_tile, 0, s_first, s_ok, n_inner, 0.0, WHOLE, K, GROUPS, EVEN_K, EVEN_N, few)
    zeros = scales
    if HAS_ZERO:
        zeros = _of_groups(
            z_tile, 0, s_first, s_ok, n_inner, 8, WHOLE, K, GROUPS, EVEN_K, EVEN_N, few)
    if PDL:  # nothing above reads what an earlier kernel may write, or stores
        _wait_for_earlier_kernels()

    x_first = split * W + gl.arange(0, W, gl.SliceLayout(1, gl.SliceLayout(2, eights)))
    x_first = x_first * (steps * K)
    r = gl.arange(0, R, gl.SliceLayout(0, gl.SliceLayout(2, eights)))
    c = gl.arange(0, CHUNK, gl.SliceLayout(0, gl.SliceLayout(1, eights)))
    # Rows that are not there are the last one once more: no result of theirs is stored.
    r = gl.minimum(row0 + r, n_rows - 1).to(gl.int64)
    x_tile = x_ptr + (r * stride_x * 8)[None, :, None]
    x_tile = x_tile + x_first[:, None, None] + c[None, None, :]

    if S > 0:
        x_s = _row_to_shared(x_ptr, split * (W * steps * K), steps, n_inner, S, W, K, EVEN_K)

    nothing = gl.full([W, N, R], 0.0, gl.float32, sums)
    acc = nothing
    for i in range(steps):
        if i + STAGES - 1 < steps:
            _fetch(w_s, w_tile, i + STAGES - 1, first, ok, n_inner, STAGES, K, EVEN_K, EVEN_N,
                   lines)
        _commit()
        if S == 0:
            x_next = _columns_of_x(x_tile, i * K, x_first, n_inner, EVEN_K, CHUNK, eights)
        _wait(STAGES - 1)
        halves = _pieces(w_s.index(i % STAGES).load(left), K // CHUNK)
        scale = _per_group(scales, GROUPS, gl.SliceLayout(2, sums))
        zero = _per_group(zeros, GROUPS, gl.SliceLayout(2, left))
        if GROUP > 0:  # those of the next step, which come from afar
            ahead = gl.minimum(i + 1, steps - 1)
            scales = _of_groups(
                s_tile, ahead, s_first, s_ok, n_inner, 0.0, WHOLE, K, GROUPS, EVEN_K, EVEN_N, few)
            if HAS_ZERO:
                zeros = _of_groups(
                    z_tile, ahead, s_first, s_ok, n_inner, 8, WHOLE, K, GROUPS, EVEN_K, EVEN_N, few)
        for p in gl.static_range(GROUPS):
            part = nothing if GROUP > 0 else acc
            less = gl.full([W, N], 0.0, DTYPE, gl.SliceLayout(2, left))
            if HAS_ZERO:
                less = (-ONE - zero[p].to(gl.float32)).to(DTYPE)
            for j in gl.static_range(A_GROUP):
                if S > 0:
                    x = _of_row(x_s, i, (p * A_GROUP + j) * CHUNK, CHUNK, R, eights)
                else:
                    x = x_next
                if S == 0 and (p * A_GROUP + j + 1) * CHUNK < K:
                    x_next = _columns_of_x(
                        x_tile, i * K + (p * A_GROUP + j + 1) * CHUNK, x_first, n_inner, EVEN_K,
                        CHUNK, eights)
                half = halves[p * A_GROUP + j]
                w0, w1, w2, w3 = _steps(half, gl.broadcast(less[:, :, None], half)[0], HAS_ZERO)
                x0, x1, x2, x3 = _every_fourth(x, right)
                part = ampere.mma_v2(w1, x1, ampere.mma_v2(w0, x0, part))
                part = ampere.mma_v2(w3, x3, ampere.mma_v2(w2, x2, part))
            if GROUP > 0:
                acc = acc + part * scale[p].to(gl.float32)[:, :, None]
            else:
                acc = part

    if GROUP == 0:
        scale = _per_group(scales, GROUPS, gl.SliceLayout(2, sums))
        acc = acc * scale[0].to(gl.float32)[:, :, None]
    rows: gl.constexpr = gl.BlockedLayout([1, 1], [32, 1], [W, 1], [0, 1])
    y = gl.convert_layout(gl.sum(acc, 0), rows)
    n = col0 + gl.arange(0, N, gl.SliceLayout(1, rows))
    r = row0 + gl.arange(0, R, gl.SliceLayout(0, rows))
    there = (n < n_cols)[:, None] & (r < n_rows)[None, :]
    r = r.to(gl.int64)
    if SPLIT_K > 1:
        parts = part_ptr + ((r + split.to(gl.int64) * n_rows) * n_cols)[None, :]
        gl.store(parts + n[:, None], y, mask=there)
    else:
        if HAS_BIAS:
            bias = gl.load(bias_ptr + n, mask=n < n_cols, other=0.0)
            y = y + bias.to(gl.float32)[:, None]
        outs = out_ptr + (r * stride_o)[None, :]
        gl.store(outs + n[:, None], y.to(out_ptr.dtype.element_ty), mask=there)


# fmt: on

# ---- host --------------------------------------------------------------------------------------


def why_unfit(problem: Problem, dev: Device) -> str | None:
    """Reason why this body cannot serve such a problem, whatever the config; None: it can."""
    group, k = problem["group"], problem["k"]
    if dev.arch != "sm90":
        return f"variant hopper needs an sm90 device, got {dev.arch}"
    if not device.is_there(gl):
        return "variant hopper needs a triton that has Gluon (3.6 or newer), got none"
    if k % 32 or k > MOST_COLUMNS:
        return f"variant hopper needs K to be a multiple of 32 up to {MOST_COLUMNS}, got {k}"
    if group != k and group < 64:
        return f"variant hopper has groups of 64 or more, got {group}"
    return None


def fits(strides: tuple[int, ...]) -> bool:
    """Whether rows of x and of the weights, with these strides, start at multiples of 16 bytes."""
    return strides[0] % 8 == 0 and strides[1] % 4 == 0


def default_config(problem: Problem, dev: Device) -> Config:
    """Tiles and warps so that all programs run at once, and stages that fill shared memory.

    From 79 configs on an H200, of 12288 x 4096 and 4096 x 12288 with 1 and 16 rows, and of one row,
    once it went through shared memory, from 86 and 125.
    """
    m, n, k = problem["m"], problem["n"], problem["k"]
    alone = one_row(problem, dev)
    if alone is not None and problem["group"] * 4 >= alone["BLOCK_K"]:
        return {**alone, "num_stages": 3, **FIXED}
    rows = max(8, next_power_of_2(m))
    steps = cdiv(k, 256)
    block_n = 32 if cdiv(n, 32) >= dev.num_cores // 2 else 16
    tiles = cdiv(n, block_n)
    warps = 1
    while warps < 4 and 2 * warps <= steps:
        warps *= 2
    # Programs that a core holds at once, each with two steps a warp or more.
    at_once = 4 if rows == 8 else 3
    most = max(1, min(steps // (2 * warps), at_once * dev.num_cores // tiles))
    split = max(s for s in (1, 2, 3, 4, 6, 8) if s <= most)
    whole = rows == 8 and split == 1 and k >= 512 * warps and problem["group"] * 4 >= 512
    return {
        "BLOCK_M": rows,
        "BLOCK_N": block_n,
        "BLOCK_K": 512 if whole else 256,
        "SPLIT_K": split,
        "programs_per_core": 3 if rows == 16 and split == 1 else 0,
        "PDL": True,
        "num_warps": warps,
        "num_stages": 2 if whole else 3,
        **FIXED,
    }


def why_illegal(config: Config, problem: Problem, dev: Device) -> str | None:
    """Reason why a config of this body cannot be launched; None: it can."""
    if wrong := [f"{name} {value}" for name, value in FIXED.items() if config[name] != value]:
        return f"variant hopper has {', '.join(wrong)}"
    r, n, k = config["BLOCK_M"], config["BLOCK_N"], config["BLOCK_K"]
    allowed = {"BLOCK_M": (8, 16, 32, 64), "BLOCK_N": (16, 32, 64), "BLOCK_K": (128, 256, 512)}
    for name, values in allowed.items():
        if config[name] not in values:
            return f"variant hopper has {name} of {values}, got {config[name]}"
    if problem["group"] * 4 < min(k, problem["k"]):
        return f"a step of {k} columns has more than four groups of {problem['group']}"
    warps, stages, per_core = (
        config[name] for name in ("num_warps", "num_stages", "programs_per_core")
    )
    if warps not in (1, 2, 4, 8, 16) or stages < 2:
        return f"num_warps must be 1 to 16 and num_stages 2 or more, got {warps} and {stages}"
    used = max(stages * n * k // 2, 4 * n * r) * warps + 1024 + bytes_of_row(config, problem, 2)
    if used > dev.local_mem_bytes:
        return f"the tiles take {used} bytes of shared memory, more than {dev.local_mem_bytes}"
    if n * r > 1024:
        return f"the sums of {n} outputs and {r} rows take more than 64 registers a thread"
    if (left := most_registers(warps, per_core)) < 48 + n * r // 16:
        return f"{per_core} programs of {warps} warps leave {left} registers a thread, too few"
    return None


def one_row(problem: Problem, dev: Device) -> Config | None:
    """What the bodies for few rows take for one row whose tiles give each core some; else None."""
    k, block_n, block_k = problem["k"], 16, 512
    if problem["m"] > 1 or cdiv(problem["n"], block_n) < dev.num_cores or k < 2 * block_k:
        return None
    warps = 2 if k <= 8192 else 4
    if steps_in_shared(1, cdiv(k, block_k * warps), block_k) == 0:
        return None
    return {
        "BLOCK_M": 8,
        "BLOCK_N": block_n,
        "BLOCK_K": block_k,
        "SPLIT_K": 1,
        "programs_per_core": 0,
        "PDL": True,
        "num_warps": warps,
    }


def steps_in_shared(rows: int, steps: int, block_k: int) -> int:
    """``S`` of the bodies for few rows: a single one is held there, if registers can bring it."""
    return next_power_of_2(steps) if rows == 1 and steps * block_k <= 4096 else 0


def bytes_of_row(config: Config, problem: Problem, size: int) -> int:
    """Of shared memory that it takes, with ``size`` bytes a column."""
    block_k, warps = int(config["BLOCK_K"]), int(config["num_warps"])
    steps = cdiv(cdiv(problem["k"], block_k), warps * config["SPLIT_K"])
    return steps_in_shared(problem["m"], steps, block_k) * block_k * warps * size


def most_registers(warps: int, per_core: int) -> int:
    """Registers of a thread where a core shall hold ``per_core`` programs (0: one)."""
    return min(255, 65536 // (32 * warps * max(1, per_core)) // 8 * 8)


def register_options(warps: int, max_programs: int) -> dict[str, int]:
    """Launch keyword for ``most_registers``, from the programs that a chip shall hold at most."""
    dev = device.current()
    if max_programs == dev.max_programs:
        return {}
    return {"maxnreg": most_registers(warps, max_programs // dev.num_cores)}
