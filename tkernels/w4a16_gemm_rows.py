"""The body of ``w4a16_gemm`` for several rows on Hopper (sm_90): ``variant`` "rows".

In ``w4a16_gemm_hopper`` each warp has columns of its own, so every 16 or 32 outputs read all of x;
with 16 rows that is more than the weights. Here the warps of a program share x. A program has
BLOCK_N outputs, or several tiles of as many one after the other, and one part of K of SPLIT_K. Its
columns of x go to shared memory once, all asked for at once behind the wait for earlier kernels.
They go by registers, since ``cp.async`` ends in the order in which it began, and so would wait for
the weights that were asked for before; there each lane's 8 columns are put in the order in which
the products take them, so that no warp has to do it again. Weights come by ``cp.async`` into a ring
of stages, the first two of which are asked for ahead of that wait (with all three it took 11.5 us,
not 10.1: 8 rows, 4096 x 12288 on an H200); scales and zero points of all steps go to shared memory
too.

A step has BLOCK_K columns for each of SLICES warps, side by side; the other warps have outputs of
their own. Products and the scaling of sums are as in ``w4a16_gemm_hopper``, and so is decoding in
fp16. In bf16 codes stay where no exponent is: eight bits there, two codes of them, are as many
times 2^-133, since exponents 0 and 1 have one step between numbers. One multiplication and addition
makes (q - zero) / 64 of them, and a word needs one shift instead of three. Sums get 64 times that.

With PDL both kernels of a call let the next one start at once, and read what no kernel writes
before they wait, as there: that of the second one, which adds the parts of a split K in order, lets
the weights of the call behind it come while it waits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tkernels import w4a16_gemm_hopper as w4
from tkernels.device import Device, cdiv, next_power_of_2
from tkernels.masked_gemm_hopper import _as
from tkernels.paged_attn_quantized_hopper import (
    _let_next_kernel_start,
    _wait_for_earlier_kernels,
)
from tkernels.registry import Config, Problem
from tkernels.w4a16_gemm_hopper import _commit, _load_async, _pieces, _steps, _wait

if TYPE_CHECKING:
    from tkernels import _triton as ampere
    from tkernels import _triton as gl
    from tkernels import _triton as gluon
else:
    gl, gluon, ampere = w4.gl, w4.gluon, w4.ampere

CHUNK = gl.constexpr(64)  # columns of x that a product takes
MOST_TILES = 16  # of a program: their scales are asked for one by one
DEFAULT_ROWS = range(2, 17)  # rows for which this body may be the default
AT_ONCE = 3  # programs that a core holds by default

PARTS_OF_ONE = gl.constexpr(64.0)  # in bf16: codes are counted in these


def _decoding(zero: bool) -> str:
    """PTX from two int16 of four codes each to pairs of (q - zero) / 64 in bf16.

    ``zero``: $5 has, twice, -zero / 64; without it zero is 8.
    """
    text = "{.reg .b32 t, l, s0, s1; mov.b32 s0, 0x7f007f00; mov.b32 s1, 0x7d007d00;"
    text += f"mov.b32 l, {'$5' if zero else '0xbe00be00'}; shr.u32 t, $4, 8;"
    for i in range(4):
        text += f"and.b32 ${i}, {('$4', 't')[i // 2]}, {('0x000f000f', '0x00f000f0')[i % 2]};"
        text += f"fma.rn.bf16x2 ${i}, ${i}, s{i % 2}, l;"
    return text + "}"


_BF16, _BF16_ZERO = gl.constexpr(_decoding(False)), gl.constexpr(_decoding(True))

# fmt: off


@gluon.jit
def _numbers(halves, zero, HAS_ZERO: gl.constexpr):
    """q - zero of codes 0, 1, 2 and 3 of int16, in the dtype of ``zero``; in bf16 1/64 of it."""
    if gl.float16 == zero.dtype:
        numbers = _steps(halves, zero, HAS_ZERO)
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
def _less(zeros, DTYPE: gl.constexpr):
    """What ``_numbers`` adds."""
    zeros = zeros.to(gl.float32)
    if gl.float16 == DTYPE:
        less = -1024.0 - zeros  # see w4a16_gemm_hopper
    else:
        less = zeros * (-1.0 / PARTS_OF_ONE)
    return less.to(DTYPE)


@gluon.jit
def _fetch(
    w_s, w_tile, f, stride, n, columns, n_left, k_left, S: gl.constexpr, STAGES: gl.constexpr,
    N: gl.constexpr, STEP: gl.constexpr, UNIT: gl.constexpr, EVEN_K: gl.constexpr,
    EVEN_N: gl.constexpr,
):
    """Start to bring the weights of step f % S of tile f // S, whole rows of it at once.

    ``stride``: numbers between two outputs; UNIT columns lie in one; ``columns`` [SLICES, 1, any]:
    of a step, as multiples of what 16 bytes hold.
    """
    t = f // S
    i = f % S
    at = w_tile + (t * N).to(gl.int64) * stride + i * (STEP // UNIT)
    if EVEN_K and EVEN_N:
        _load_async(w_s.index(f % STAGES), at)
    else:
        ok = (n < n_left - t * N)[None, :, None]
        if not EVEN_K:
            ok = ok & (columns < k_left - i * STEP)  # 16 bytes or none
        _load_async(w_s.index(f % STAGES), at, mask=ok)


@gluon.jit
def _piece_of_x(
    x_ptr, stride_x, row0, n_rows, k_first, n_inner, AT: gl.constexpr, PART: gl.constexpr,
    V: gl.constexpr, H: gl.constexpr, R: gl.constexpr, K: gl.constexpr, SLICES: gl.constexpr,
    EVEN_K: gl.constexpr, lanes: gl.constexpr,
):
    """[PART * SLICES * R, H, CHUNK / H] of x: from chunk AT on, of each the rows for each slice.

    Rows that are not there are zeros, and so are columns.
    """
    q = gl.arange(0, PART * SLICES * R, gl.SliceLayout(1, gl.SliceLayout(2, lanes)))
    h = gl.arange(0, H, gl.SliceLayout(0, gl.SliceLayout(2, lanes)))[None, :, None] * (CHUNK // H)
    c = gl.arange(0, CHUNK // H, gl.SliceLayout(0, gl.SliceLayout(1, lanes)))[None, None, :]
    r = row0 + q % R
    chunk = AT + q // (R * SLICES)
    at = (chunk // (K // CHUNK) * SLICES + q // R % SLICES) * K + chunk % (K // CHUNK) * CHUNK
    there = (r < n_rows)[:, None, None]
    if not EVEN_K:
        there = there & (at[:, None, None] + (h + c // V * V) < n_inner - k_first)
    rows = x_ptr + k_first + r.to(gl.int64) * stride_x * V + at
    return gl.load(rows[:, None, None] + (h + c), mask=there, other=0)


@gluon.jit
def _pieces_of_x(
    x_ptr, stride_x, row0, n_rows, k_first, n_inner, AT: gl.constexpr, PARTS: gl.constexpr,
    PART: gl.constexpr, V: gl.constexpr, H: gl.constexpr, R: gl.constexpr, K: gl.constexpr,
    SLICES: gl.constexpr, EVEN_K: gl.constexpr, lanes: gl.constexpr,
):
    """PARTS of them, all asked for at once."""
    first = gl.tuple([_piece_of_x(
        x_ptr, stride_x, row0, n_rows, k_first, n_inner, AT, PART, V, H, R, K, SLICES, EVEN_K,
        lanes)])
    if PARTS == 1:
        pieces = first
    else:
        pieces = first + _pieces_of_x(
            x_ptr, stride_x, row0, n_rows, k_first, n_inner, AT + PART, PARTS - 1, PART, V, H, R,
            K, SLICES, EVEN_K, lanes)
    return pieces


@gluon.jit
def _as_taken(x, lanes: gl.constexpr):
    """[Q, CHUNK] of x [Q, 2, CHUNK / 2]: its columns in the order in which lanes take them.

    A product takes every fourth one; lane i has, of each half, columns 8i to 8i + 7, and so for
    column j from 0 to 3 the pair 8i + j, 8i + j + 4 of both halves. It reads those of 0 and 1 at
    once, 16 bytes, and those of 2 and 3.
    """
    q: gl.constexpr = x.shape[0]
    x = gl.permute(gl.reshape(x, [q, 2, 4, 2, 2, 2]), [0, 4, 2, 5, 1, 3])
    return gl.convert_layout(gl.reshape(x, [q, CHUNK]), lanes, assert_trivial=True)


@gluon.jit
def _every_fourth(x, right: gl.constexpr):
    """Four right operands [W, 16, R] of [W, R, CHUNK] in that order: columns 4h, 4h + 1.."""
    w: gl.constexpr = x.shape[0]
    r: gl.constexpr = x.shape[1]
    x = gl.permute(gl.reshape(x, [w, r, 2, 4, 2, 2, 2]), [0, 1, 5, 3, 6, 2, 4])
    even, odd = gl.split(gl.reshape(x, [w, r, 16, 2, 2]))
    x0, x2 = gl.split(even)
    x1, x3 = gl.split(odd)
    return (gl.convert_layout(gl.permute(x0, [0, 2, 1]), right, assert_trivial=True),
            gl.convert_layout(gl.permute(x1, [0, 2, 1]), right, assert_trivial=True),
            gl.convert_layout(gl.permute(x2, [0, 2, 1]), right, assert_trivial=True),
            gl.convert_layout(gl.permute(x3, [0, 2, 1]), right, assert_trivial=True))


@gluon.jit
def _of_groups(
    ptr, stride, tile, split, n_cols, n_inner, other: gl.constexpr, Q: gl.constexpr,
    GROUP: gl.constexpr, GROUPS: gl.constexpr, S: gl.constexpr, K: gl.constexpr, N: gl.constexpr,
    SLICES: gl.constexpr, EVEN_K: gl.constexpr, lanes: gl.constexpr,
):
    """[Q, N]: the scales or zero points of a tile in the order in which a program takes them.

    That is, for each step and each group in it, those of each slice.
    """
    q = gl.arange(0, Q, gl.SliceLayout(1, lanes))
    n = tile * N + gl.arange(0, N, gl.SliceLayout(0, lanes))
    there = (n < n_cols)[None, :]
    at = (ptr + n.to(gl.int64) * stride)[None, :]
    if GROUP > 0:
        PIECE: gl.constexpr = K // GROUPS
        piece = q
        if SLICES > 1 and GROUPS > 1:
            piece = (q // (GROUPS * SLICES) * SLICES + q % SLICES) * GROUPS + q // SLICES % GROUPS
        piece = split * (S * SLICES * GROUPS) + piece
        if not EVEN_K or Q > S * SLICES * GROUPS:
            there = there & (piece * PIECE < n_inner)[:, None]
        at = at + (piece * PIECE // GROUP if GROUP > PIECE else piece)[:, None]
    else:
        at = at + (q * 0)[:, None]
        there = there & (q >= 0)[:, None]
    return gl.load(at, mask=there, other=other)


@gluon.jit
def _of_tiles(
    ptr, stride, tile, split, n_cols, n_inner, other: gl.constexpr, T: gl.constexpr,
    Q: gl.constexpr, GROUP: gl.constexpr, GROUPS: gl.constexpr, S: gl.constexpr, K: gl.constexpr,
    N: gl.constexpr, SLICES: gl.constexpr, EVEN_K: gl.constexpr, lanes: gl.constexpr,
):
    """Those of T tiles."""
    first = gl.tuple([_of_groups(
        ptr, stride, tile, split, n_cols, n_inner, other, Q, GROUP, GROUPS, S, K, N, SLICES, EVEN_K,
        lanes)])
    if T == 1:
        tiles = first
    else:
        tiles = first + _of_tiles(
            ptr, stride, tile + 1, split, n_cols, n_inner, other, T - 1, Q, GROUP, GROUPS, S, K, N,
            SLICES, EVEN_K, lanes)
    return tiles


@gluon.jit
def _of_step(s_s, at, layout: gl.constexpr):
    """[SLICES, N] scales or zero points."""
    return s_s.index(at).load(layout)


@gluon.jit
def _put(
    y, bias, tile, row0, split, n_cols, n_rows, out_ptr, part_ptr, stride_o,
    HAS_BIAS: gl.constexpr, R: gl.constexpr, N: gl.constexpr, SPLIT_K: gl.constexpr,
    rows: gl.constexpr,
):
    """Store a tile: results, or what one program of several has of them."""
    n = tile * N + gl.arange(0, N, gl.SliceLayout(1, rows))
    r = row0 + gl.arange(0, R, gl.SliceLayout(0, rows))
    there = (n < n_cols)[:, None] & (r < n_rows)[None, :]
    r = r.to(gl.int64)
    if SPLIT_K > 1:
        parts = part_ptr + ((r + split.to(gl.int64) * n_rows) * n_cols)[None, :]
        gl.store(parts + n[:, None], y, mask=there)
    else:
        if HAS_BIAS:
            y = y + bias.to(gl.float32)[:, None]
        outs = out_ptr + (r * stride_o)[None, :]
        gl.store(outs + n[:, None], y.to(out_ptr.dtype.element_ty), mask=there)


@gluon.jit
def _sum_of_slices(acc, rows: gl.constexpr):
    """[N, R]: the sum of acc [SLICES, N, R] over its slices, which are added in order."""
    if acc.shape[0] == 1:
        y = gl.reshape(acc, [acc.shape[1], acc.shape[2]])
    else:
        y = gl.sum(acc, 0)
    return gl.convert_layout(y, rows)


@gluon.jit(do_not_specialize=["stride_w", "n_rows", "n_m"])
def _w4a16_gemm_rows_kernel(
    x_ptr, w_ptr, s_ptr, z_ptr, bias_ptr, out_ptr, part_ptr,
    stride_x, stride_w,  # in units of 16 bytes
    stride_s, stride_z, stride_o, n_cols, n_inner, n_rows, n_m,
    S: gl.constexpr,  # steps that a tile takes, of K columns for each slice
    T: gl.constexpr,  # tiles of a program
    Q: gl.constexpr,  # scales of an output that a program takes, or more; a power of two
    GROUP: gl.constexpr,  # columns with one scale; 0: a row has one
    HAS_ZERO: gl.constexpr, HAS_BIAS: gl.constexpr, EVEN_K: gl.constexpr, EVEN_N: gl.constexpr,
    PDL: gl.constexpr, R: gl.constexpr, N: gl.constexpr, K: gl.constexpr, SPLIT_K: gl.constexpr,
    STAGES: gl.constexpr, SLICES: gl.constexpr, W: gl.constexpr,
):
    DTYPE: gl.constexpr = x_ptr.dtype.element_ty
    WN: gl.constexpr = W // SLICES  # warps that have outputs of their own
    STEP: gl.constexpr = SLICES * K
    CHUNKS: gl.constexpr = K // CHUNK  # of a step and slice
    GROUPS: gl.constexpr = K // GROUP if (GROUP > 0 and GROUP < K) else 1
    A_GROUP: gl.constexpr = CHUNKS // GROUPS
    sums: gl.constexpr = gl.NVMMADistributedLayout(
        version=[2, 0], warps_per_cta=[SLICES, WN, 1], instr_shape=[1, 16, 8])
    left: gl.constexpr = gl.DotOperandLayout(0, sums, 2)
    right: gl.constexpr = gl.DotOperandLayout(1, sums, 2)
    # A row of a step is fetched by neighbouring lanes: 16 bytes each.
    LANES: gl.constexpr = K // 32
    ACROSS: gl.constexpr = SLICES if SLICES * LANES < 32 else 32 // LANES
    lines: gl.constexpr = gl.BlockedLayout(
        [1, 1, 8], [ACROSS, 32 // (LANES * ACROSS), LANES], [1, W, 1], [2, 0, 1])
    # A lane reads 8 neighbours of x; warps with other outputs read the same.
    eights: gl.constexpr = gl.SliceLayout(1, gl.BlockedLayout(
        [1, 1, 1, 8], [1, 1, 8, 4], [SLICES, WN, 1, 1], [3, 2, 1, 0]))
    codes: gl.constexpr = gl.SwizzledSharedLayout(
        8, 2 if K == 128 else 1, 4 if K == 128 else 8, [2, 1, 0])
    # Eight lanes read 64 bytes of each of two rows: the rows' halves change places by turns.
    turned3: gl.constexpr = gl.SwizzledSharedLayout(32, 1, 2, [2, 1, 0])
    turned2: gl.constexpr = gl.SwizzledSharedLayout(32, 1, 2, [1, 0])
    plain2: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])

    if PDL:
        _let_next_kernel_start()
    split = gl.program_id(0) % SPLIT_K
    place = gl.program_id(0) // SPLIT_K
    row0 = place % n_m * R
    tile0 = place // n_m * T
    k_first = split * (S * STEP)

    slices = gl.arange(0, SLICES, gl.SliceLayout(1, gl.SliceLayout(2, lines)))[:, None, None] * K
    n = gl.arange(0, N, gl.SliceLayout(0, gl.SliceLayout(2, lines)))
    h = gl.arange(0, K // 4, gl.SliceLayout(0, gl.SliceLayout(1, lines)))[None, None, :]
    stride = stride_w.to(gl.int64) * 8
    w_tile = w_ptr.to(gl.pointer_type(gl.int16)) + (tile0 * N).to(gl.int64) * stride + k_first // 4
    w_tile = w_tile + (n.to(gl.int64) * stride)[None, :, None] + (slices // 4 + h)
    columns = slices + h // 8 * 32
    n_left = n_cols - tile0 * N
    k_left = n_inner - k_first
    w_s = gl.allocate_shared_memory(gl.int16, [STAGES, SLICES, N, K // 4], codes)
    AHEAD: gl.constexpr = 2 if STAGES > 2 else STAGES
    for ahead in gl.static_range(AHEAD):
        if ahead < S * T:
            _fetch(w_s, w_tile, n_m * 0 + ahead, stride, n, columns, n_left, k_left, S, STAGES, N,
                   STEP, 4, EVEN_K, EVEN_N)
        _commit()

    QV: gl.constexpr = Q if Q < 8 else 8
    QL: gl.constexpr = Q // QV if Q < 64 else 8
    places: gl.constexpr = gl.BlockedLayout([QV, 1], [QL, 32 // QL], [1, W], [0, 1])
    scales = _of_tiles(
        s_ptr, stride_s, tile0, split, n_cols, n_inner, 0.0, T, Q, GROUP, GROUPS, S, K, N, SLICES,
        EVEN_K, places)
    zeros = scales
    if HAS_ZERO:
        zeros = _of_tiles(
            z_ptr, stride_z, tile0, split, n_cols, n_inner, 8, T, Q, GROUP, GROUPS, S, K, N,
            SLICES, EVEN_K, places)
    if PDL:  # nothing above reads what an earlier kernel may write, or stores
        _wait_for_earlier_kernels()

    lanes3: gl.constexpr = gl.BlockedLayout([1, 2, 8], [8, 1, 4], [W, 1, 1], [2, 1, 0])
    lanes2: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [W, 1], [1, 0])
    PART: gl.constexpr = (S * CHUNKS) & -(S * CHUNKS)  # the largest power of two in it
    PARTS: gl.constexpr = S * CHUNKS // PART
    x_s = gl.allocate_shared_memory(DTYPE, [S * CHUNKS, SLICES, R, CHUNK], turned3)
    x_all = _as(x_s, DTYPE, [PARTS, PART * SLICES * R, CHUNK], turned2)
    pieces = _pieces_of_x(
        x_ptr, stride_x, row0, n_rows, k_first, n_inner, 0, PARTS, PART, 8, 2, R, K, SLICES,
        EVEN_K, lanes3)
    s_s = gl.allocate_shared_memory(s_ptr.dtype.element_ty, [T * Q // SLICES, SLICES, N], plain2)
    s_all = _as(s_s, s_ptr.dtype.element_ty, [T, Q, N], plain2)
    z_s = s_s
    if HAS_ZERO:
        z_s = gl.allocate_shared_memory(DTYPE, [T * Q // SLICES, SLICES, N], plain2)
        z_all = _as(z_s, DTYPE, [T, Q, N], plain2)
    for tile in gl.static_range(T):
        s_all.index(tile).store(scales[tile])
        if HAS_ZERO:
            z_all.index(tile).store(_less(zeros[tile], DTYPE))
    for piece in gl.static_range(PARTS):
        x_all.index(piece).store(_as_taken(pieces[piece], lanes2))
    for ahead in gl.static_range(AHEAD, STAGES):
        if ahead < S * T:
            _fetch(w_s, w_tile, n_m * 0 + ahead, stride, n, columns, n_left, k_left, S, STAGES, N,
                   STEP, 4, EVEN_K, EVEN_N)
        _commit()

    WIDE: gl.constexpr = 2 if N >= 64 else 1
    ACROSS_N: gl.constexpr = N // (32 * WIDE) if N >= 32 else 1
    ALONG: gl.constexpr = W if W < ACROSS_N else ACROSS_N
    rows: gl.constexpr = gl.BlockedLayout([WIDE, 1], [32, 1], [ALONG, W // ALONG], [0, 1])
    nothing = gl.full([SLICES, N, R], 0.0, gl.float32, sums)
    for t in range(T):
        acc = nothing
        bias = split
        if HAS_BIAS and SPLIT_K == 1:
            o = (tile0 + t) * N + gl.arange(0, N, gl.SliceLayout(1, rows))
            bias = gl.load(bias_ptr + o, mask=o < n_cols, other=0.0)
        for i in range(S):
            f = t * S + i
            _wait(STAGES - 2)
            if f > 0:  # all warps are through with the step before: its stage is free
                if STAGES < S * T:  # noqa: SIM102 (a constant; without it all is asked for)
                    if f + STAGES - 1 < S * T:
                        _fetch(w_s, w_tile, f + STAGES - 1, stride, n, columns, n_left, k_left, S,
                               STAGES, N, STEP, 4, EVEN_K, EVEN_N)
                _commit()
            halves = _pieces(w_s.index(f % STAGES).load(left), CHUNKS)
            for p in gl.static_range(GROUPS):
                part = nothing if GROUP > 0 else acc
                if GROUP > 0:
                    of_group = t * (Q // SLICES) + i * GROUPS + p
                else:
                    of_group = t
                less = gl.full([SLICES, N], 0.0, DTYPE, gl.SliceLayout(2, left))
                if HAS_ZERO:
                    less = _of_step(z_s, of_group, gl.SliceLayout(2, left))
                for j in gl.static_range(A_GROUP):
                    half = halves[p * A_GROUP + j]
                    x = x_s.index(i * CHUNKS + (p * A_GROUP + j)).load(eights)
                    w0, w1, w2, w3 = _numbers(
                        half, gl.broadcast(less[:, :, None], half)[0], HAS_ZERO)
                    x0, x1, x2, x3 = _every_fourth(x, right)
                    part = ampere.mma_v2(w1, x1, ampere.mma_v2(w0, x0, part))
                    part = ampere.mma_v2(w3, x3, ampere.mma_v2(w2, x2, part))
                if GROUP > 0:
                    scale = _of_step(s_s, of_group, gl.SliceLayout(2, sums))
                    acc = acc + part * scale.to(gl.float32)[:, :, None]
                else:
                    acc = part
        if GROUP == 0:
            scale = _of_step(s_s, t, gl.SliceLayout(2, sums))
            acc = acc * scale.to(gl.float32)[:, :, None]
        if gl.float16 != DTYPE:
            acc = acc * PARTS_OF_ONE
        _put(
            _sum_of_slices(acc, rows), bias, tile0 + t, row0, split, n_cols, n_rows, out_ptr,
            part_ptr, stride_o, HAS_BIAS, R, N, SPLIT_K, rows)


@gluon.jit(do_not_specialize=["n_rows"])
def _add_rows_kernel(
    bias_ptr, out_ptr, part_ptr, stride_o, n_cols, n_pieces, n_rows,
    HAS_BIAS: gl.constexpr, PDL: gl.constexpr, SPLIT_K: gl.constexpr, PIECE: gl.constexpr,
    W: gl.constexpr,
):
    """Results of what the programs of a tile left, added in order. A program has PIECE of a row."""
    if PDL:
        _let_next_kernel_start()
        _wait_for_earlier_kernels()
    line: gl.constexpr = gl.BlockedLayout([PIECE // (32 * W)], [32], [W], [0])
    row = (gl.program_id(0) // n_pieces).to(gl.int64)
    cols = gl.program_id(0) % n_pieces * PIECE + gl.arange(0, PIECE, line)
    ok = cols < n_cols
    y = gl.full([PIECE], 0.0, gl.float32, line)
    for split in gl.static_range(SPLIT_K):
        parts = part_ptr + (row + n_rows.to(gl.int64) * split) * n_cols
        y = y + gl.load(parts + cols, mask=ok, other=0.0)
    if HAS_BIAS:
        y = y + gl.load(bias_ptr + cols, mask=ok, other=0.0).to(gl.float32)
    gl.store(out_ptr + row * stride_o + cols, y.to(out_ptr.dtype.element_ty), mask=ok)


# fmt: on

# ---- host --------------------------------------------------------------------------------------


def why_unfit(problem: Problem, dev: Device) -> str | None:
    """Reason why this body cannot serve such a problem, whatever the config; None: it can."""
    why = w4.why_unfit(problem, dev)
    return None if why is None else why.replace("variant hopper", "variant rows")


def steps_of(config: Config, k: int) -> int:
    """``S``: steps of a program."""
    return cdiv(cdiv(k, config["BLOCK_K"] * config["SLICES"]), int(config["SPLIT_K"]))


def tiles_of(config: Config, m: int, n: int, programs: int) -> int:
    """``T``: tiles of a program, so that no more than ``programs`` are there (0: one tile)."""
    n_n = cdiv(n, config["BLOCK_N"])
    beside = cdiv(m, config["BLOCK_M"]) * config["SPLIT_K"]
    return cdiv(n_n, max(1, programs // beside)) if programs else 1


def scales_of(config: Config, problem: Problem) -> int:
    """``Q``: scales of an output that a program keeps, a power of two."""
    group, k = problem["group"], problem["k"]
    if group == k:
        return int(config["SLICES"])
    a_step = max(1, config["BLOCK_K"] // group) * config["SLICES"]
    return next_power_of_2(steps_of(config, k) * a_step)


def _bytes_of(config: Config, problem: Problem, tiles: int = 1) -> int:
    """Of shared memory: the stages of weights, x, and scales and zero points of ``tiles``."""
    r, n, k, slices = (config[name] for name in ("BLOCK_M", "BLOCK_N", "BLOCK_K", "SLICES"))
    stages = config["num_stages"] * n * k // 2
    of_a_scale = problem["scale"].itemsize + (2 if problem["zero"] else 0)
    scales = tiles * n * scales_of(config, problem) * of_a_scale
    return int(slices * (stages + 2 * steps_of(config, problem["k"]) * r * k) + scales)


def piece_to_add(m: int, n: int, dev: Device) -> tuple[int, int]:
    """Columns that a program of ``_add_rows_kernel`` has, and its warps."""
    piece = max(128, min(1024, next_power_of_2(n)))
    while piece > 256 and m * cdiv(n, piece) < 4 * dev.num_cores:
        piece //= 2
    return piece, piece // 128


def default_config(problem: Problem, dev: Device) -> Config:
    """Three programs a core, all at once, and stages that fill what x leaves of shared memory.

    From 4096 x 12288 on an H200, 384 programs: of 8 rows with three stages of 256 columns 10.1 us;
    of 16 rows with two of them 12.3, with three, of which a core holds two programs, 14.5, with
    four or five of 128 columns 13.0 and 14.5.
    """
    rows = max(8, next_power_of_2(problem["m"]))
    if rows > 16:  # parts of x of 32 KB; not chosen by what was measured
        rows = min(64, rows)
        split = max(1, min(64, cdiv(problem["k"], 32768 // rows)))
        return _default(rows, 64, 256, split, 3)
    most = max(1, AT_ONCE * dev.num_cores // cdiv(problem["n"], 128))
    # Two steps of 256 columns a program at the least, 1024 columns at the most.
    k = problem["k"]
    split = max(min(most, k // 512), cdiv(k, 1024))
    share = dev.local_mem_bytes // AT_ONCE - 1024
    for block_k, stages in ((256, 3), (256, 2), (128, 4)):
        steps = cdiv(k, block_k)
        even = cdiv(steps, cdiv(steps, min(split, 64)))  # as many steps each, none for nothing
        config = _default(rows, 128, block_k, even, stages)
        if _bytes_of(config, problem) <= share:
            break
    return config


def _default(rows: int, n: int, k: int, split: int, stages: int) -> Config:
    return {
        "BLOCK_M": rows,
        "BLOCK_N": n,
        "BLOCK_K": k,
        "SPLIT_K": split,
        "SLICES": 1,
        "programs_per_core": 0,
        "variant": "rows",
        "PDL": True,
        "num_warps": 4,
        "num_stages": stages,
    }


def is_default(problem: Problem, config: Config, dev: Device) -> bool:
    """Whether its default is that of the operation: by analogy, but for what was timed."""
    return problem["m"] in DEFAULT_ROWS and is_one_wave(problem, config, dev)


def is_one_wave(problem: Problem, config: Config, dev: Device) -> bool:
    """Half of the programs that the chip holds at once are there, or more; none has to wait."""
    programs = cdiv(problem["n"], config["BLOCK_N"]) * config["SPLIT_K"]
    held = AT_ONCE * dev.num_cores
    return bool(held <= 2 * programs <= 2 * held)


def why_no_tiles(config: Config) -> str | None:
    """Reason why there are no such tiles, or warps and stages, whatever the problem."""
    allowed = {
        "BLOCK_M": (8, 16, 32, 64),
        "BLOCK_N": (16, 32, 64, 128, 256),
        "BLOCK_K": (128, 256, 512),
    }
    for name, values in allowed.items():
        if config[name] not in values:
            return f"variant rows has {name} of {values}, got {config[name]}"
    warps, stages = config["num_warps"], config["num_stages"]
    if warps not in (1, 2, 4, 8, 16) or stages < 2:
        return f"num_warps must be 1 to 16 and num_stages 2 or more, got {warps} and {stages}"
    return None


def with_sums(size: int, tiles: int, sums: int) -> int:
    """Bytes of shared memory: ``size``, and ``sums`` on their way to another layout.

    Behind the last tile there is room for these.
    """
    moved = 5 * sums  # there is some padding
    return (max(size, moved) if tiles == 1 else size + moved) + 1024


def x_registers(size: int, warps: int) -> int:
    """Registers of a thread that ``size`` bytes of x take on their way to shared memory."""
    return size // (128 * warps)


def why_illegal(config: Config, problem: Problem, dev: Device) -> str | None:
    """Reason why a config of this body cannot be launched; None: it can."""
    if not 1 <= config["SPLIT_K"] <= 64:
        return f"SPLIT_K must be 1 to 64, got {config['SPLIT_K']}"
    if why := why_no_tiles(config):
        return why
    r, n, k = config["BLOCK_M"], config["BLOCK_N"], config["BLOCK_K"]
    warps, slices = config["num_warps"], config["SLICES"]
    per_core = config["programs_per_core"]
    if slices not in (1, 2, 4, 8, 16) or warps % slices:
        return f"SLICES must divide the {warps} warps, got {slices}"
    if not 16 <= (a_warp := n * slices // warps) <= 64:
        return f"a warp has 16 to 64 of the outputs, got {a_warp}"
    steps = steps_of(config, problem["k"])
    tiles = tiles_of(config, problem["m"], problem["n"], per_core * dev.num_cores)
    if tiles > MOST_TILES:
        return f"a program has at most {MOST_TILES} tiles, got {tiles}"
    numbers = tiles * n * scales_of(config, problem)
    used = with_sums(_bytes_of(config, problem, tiles), tiles, slices * n * r)
    if used > dev.local_mem_bytes:
        return f"the tiles take {used} bytes of shared memory, more than {dev.local_mem_bytes}"
    # Sums, those of a group, a step's codes, x and weights of a product.
    taken = (2 * a_warp * r + a_warp * k // 8) // 32 + r // 2 + a_warp
    on_the_way = x_registers(2 * steps * slices * k * r, warps)
    # Scales and zero points come at that time too: most have a register of their own.
    on_the_way += numbers * (2 if problem["zero"] else 1) // (32 * warps)
    if (left := w4.most_registers(warps, per_core)) < max(64 + taken, 48 + on_the_way):
        return f"{per_core or 1} programs of {warps} warps leave {left} registers a thread, too few"
    return None
