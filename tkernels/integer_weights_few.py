"""Products of few 16-bit rows and weights of 4, 8 or 16 bits on Hopper (sm_90): ``variant`` "core".

Weights are what is read; those of 16 bits are numbers as they are, without scales. A core holds one
program, which has T tiles of BLOCK_N outputs at once and as much of K as there is, so that programs
fill the chip (12288 outputs: 128 with three tiles of 32) and parts of K are left to add where
outputs are too few. SLICES of its warps share the columns of a step, BLOCK_K each, side by side;
the other warps have outputs of their own. Slices meet in shared memory at the end, each in its
place, and are added in order.

Weights and x of a step come by ``cp.async`` into a ring of stages, weights of the first one ahead
of the wait for earlier kernels: of more stages they only delay x (with one 9.9 us, with two 10.1,
with three 10.8: 16 rows, 12288 x 4096, H200). A step's numbers go to registers while those of the
step before are multiplied, and its stage is asked for again halfway through. A barrier has to
precede that, which also keeps the compiler from reading ahead of the products alone. It is that
overlap which decides: of 13,000 cycles that the steps took without it, reading x, decoding and the
products had 3,000 each, one after the other, and memory was waited for in 1,500.

A program takes more than half of a core's shared memory, on purpose. Where two fit, those of the
next call lie beside those of this one, so some cores get two of a call and others none, and a call
takes twice as long: 24 us, when 128 programs could choose among 264 places.

Weights are the left operand of ``mma.sync`` (16 outputs), so that 8 rows of x fill the right one;
``integer_decoding`` says how codes become numbers in the lane that read them. Sums are fp32, and a
group's sum is scaled in fp32.

With PDL both kernels of a call let the next one start at once, and read what no kernel writes
before they wait. Whoever starts then waits for this kernel to end, and with it for all earlier
ones: every program waits.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tkernels import device
from tkernels import few_rows_hopper as few
from tkernels.device import Device, bind, cdiv, next_power_of_2
from tkernels.few_rows_hopper import _commit, _load_async, _pieces, _wait
from tkernels.integer_decoding import (
    PARTS_OF_FP8,
    PARTS_OF_ONE,
    _every_fourth,
    _every_second,
    _less,
    _numbers,
    _numbers_of_bytes,
    _numbers_of_fp8,
)
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
    gl, gluon, ampere = few.gl, few.gluon, few.ampere

CHUNK = gl.constexpr(64)  # columns of x that a product takes
AHEAD = gl.constexpr(1)  # stages of weights asked for ahead of the wait for earlier kernels
MOST_TILES = 6  # of a program
MOST_BYTES = 176 * 1024  # of weights of 8 or 16 bits and x in flight: see ``default_config``
IN_TURN = (1, 2, 3, 4, 6, 8, 16, 32)  # programs of a core, one after the other

# fmt: off


@gluon.jit
def _rings(
    T: gl.constexpr, STAGES: gl.constexpr, N: gl.constexpr, C: gl.constexpr, codes: gl.constexpr,
):
    """Stages of each of T tiles: one allocation each, as a write to one waits for reads of it."""
    ring = gl.tuple([gl.allocate_shared_memory(gl.int16, [STAGES, N, C], codes)])
    if T == 1:
        rings = ring
    else:
        rings = ring + _rings(T - 1, STAGES, N, C, codes)
    return rings


@gluon.jit
def _fetch_codes(
    w_s, w_tile, f, stride, n, columns, n_left, k_left, further, EVERY: gl.constexpr,
    T: gl.constexpr, HERE: gl.constexpr, STAGES: gl.constexpr, N: gl.constexpr, STEP: gl.constexpr,
    EVEN_K: gl.constexpr, EVEN_N: gl.constexpr,
):
    """Start to bring the weights of step f, whole rows of it at once.

    HERE of the T tiles follow each other, the next ones ``further`` numbers on.
    """
    for tile in gl.static_range(T):
        at = w_tile + (tile % HERE * N * stride + f * (STEP // EVERY))
        if tile >= HERE:
            at = at + tile // HERE * further
        if EVEN_K and EVEN_N:
            _load_async(w_s[tile].index(f % STAGES), at)
        else:
            ok = (n < n_left - tile % HERE * N)[:, None]
            if not EVEN_K:
                ok = ok & (columns < k_left - f * STEP)  # 16 bytes or none
            _load_async(w_s[tile].index(f % STAGES), at, mask=ok)


@gluon.jit
def _fetch_x(
    x_s, x_step, f, row_ok, columns, k_left, STAGES: gl.constexpr, STEP: gl.constexpr,
    EVEN_K: gl.constexpr,
):
    """Start to bring its columns of x; rows and columns that are not there are zeros."""
    ok = row_ok
    if not EVEN_K:
        ok = ok & (columns < k_left - f * STEP)
    _load_async(x_s.index(f % STAGES), x_step + f * STEP, mask=ok)


@gluon.jit
def _codes_of(
    w_s, stage, TILE: gl.constexpr, T: gl.constexpr, SLICES: gl.constexpr, left: gl.constexpr,
):
    """Left operands [SLICES, N, BLOCK_K / EVERY] of a step, one for each tile."""
    ring = w_s[TILE].index(stage)
    n: gl.constexpr = ring.shape[0]
    c: gl.constexpr = ring.shape[1] // SLICES
    codes = gl.tuple([ring.reshape([n, SLICES, c]).permute([1, 0, 2]).load(left)])
    if TILE + 1 < T:
        codes = codes + _codes_of(w_s, stage, TILE + 1, T, SLICES, left)
    return codes


@gluon.jit
def _x_of(x_s, stage, J: gl.constexpr, CHUNKS: gl.constexpr, eights: gl.constexpr):
    """[SLICES, R, CHUNK] of x, one for each chunk of a step."""
    x = gl.tuple([x_s.index(stage).slice(J * CHUNK, CHUNK, 2).load(eights)])
    if J + 1 < CHUNKS:
        x = x + _x_of(x_s, stage, J + 1, CHUNKS, eights)
    return x


@gluon.jit
def _scales_of(
    s_s, first, AT: gl.constexpr, COUNT: gl.constexpr, GROUPS: gl.constexpr, OF_TILE: gl.constexpr,
    layout: gl.constexpr,
):
    """[SLICES, N] scales or zero points: of tile AT // GROUPS, group AT % GROUPS of a step."""
    scales = gl.tuple([_of_step(s_s, AT // GROUPS * OF_TILE + first + AT % GROUPS, layout)])
    if AT + 1 < COUNT:
        scales = scales + _scales_of(s_s, first, AT + 1, COUNT, GROUPS, OF_TILE, layout)
    return scales


@gluon.jit
def _operands(x, EVERY: gl.constexpr, right: gl.constexpr):
    """Right operands of x [W, R, C]: of every EVERY-th column, one for each number in an int16."""
    if EVERY == 4:
        xs = _every_fourth(x, right)
    elif EVERY == 2:
        xs = _every_second(x, right)
    else:
        whole = gl.convert_layout(gl.permute(x, [0, 2, 1]), right, assert_trivial=True)
        xs = gl.tuple([whole])
    return xs


@gluon.jit
def _products(
    codes, less, xs, parts, EVERY: gl.constexpr, J: gl.constexpr, CHUNKS: gl.constexpr,
    P: gl.constexpr, GROUPS: gl.constexpr, TILE: gl.constexpr, T: gl.constexpr,
    DTYPE: gl.constexpr, HAS_ZERO: gl.constexpr, left: gl.constexpr, FP8: gl.constexpr,
):
    """``parts`` of each tile, and the products with chunk J, which is of group P."""
    half = _pieces(codes[TILE], CHUNKS)[J]
    if EVERY == 1:
        done = gl.tuple([ampere.mma_v2(half.to(DTYPE, bitcast=True), xs[0], parts[TILE])])
    elif EVERY == 2:
        if FP8:
            w0, w1 = _numbers_of_fp8(half, DTYPE)
        else:
            w0, w1 = _numbers_of_bytes(half, DTYPE)
        done = gl.tuple([ampere.mma_v2(w1, xs[1], ampere.mma_v2(w0, xs[0], parts[TILE]))])
    else:
        of_tile = gl.full([half.shape[0], half.shape[1]], 0.0, DTYPE, gl.SliceLayout(2, left))
        if HAS_ZERO:
            of_tile = less[TILE * GROUPS + P]
        w0, w1, w2, w3 = _numbers(half, gl.broadcast(of_tile[:, :, None], half)[0], HAS_ZERO)
        part = ampere.mma_v2(w1, xs[1], ampere.mma_v2(w0, xs[0], parts[TILE]))
        done = gl.tuple([ampere.mma_v2(w3, xs[3], ampere.mma_v2(w2, xs[2], part))])
    if TILE + 1 < T:
        done = done + _products(
            codes, less, xs, parts, EVERY, J, CHUNKS, P, GROUPS, TILE + 1, T, DTYPE, HAS_ZERO,
            left, FP8)
    return done


@gluon.jit
def _scaled(
    sums, parts, scales, P: gl.constexpr, GROUPS: gl.constexpr, TILE: gl.constexpr,
    T: gl.constexpr,
):
    """``sums`` of each tile, and ``parts`` times the scales of group P."""
    scale = scales[TILE * GROUPS + P].to(gl.float32)
    done = gl.tuple([sums[TILE] + parts[TILE] * scale[:, :, None]])
    if TILE + 1 < T:
        done = done + _scaled(sums, parts, scales, P, GROUPS, TILE + 1, T)
    return done


@gluon.jit
def _times(x, T: gl.constexpr):
    """x, T times."""
    y = gl.tuple([x])
    if T > 1:
        y = y + _times(x, T - 1)
    return y


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
def _repeated(x, TIMES: gl.constexpr):
    """[Q * TIMES, N]: each row of x [Q, N] 1, 2, 4.. times."""
    if TIMES > 1:
        twice = gl.permute(gl.join(x, x), [0, 2, 1])
        x = _repeated(gl.reshape(twice, [x.shape[0] * 2, x.shape[1]]), TIMES // 2)
    return x


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
def _sums_of_tiles(
    x_ptr, w_ptr, s_ptr, z_ptr, ids_ptr,
    stride_x,  # in units of 16 bytes
    stride,  # of weights, int64 in units of 2 bytes
    stride_s, stride_z, tile0, row0, end, split, n_cols, n_inner, n_sources,
    S: gl.constexpr, T: gl.constexpr,
    HERE: gl.constexpr,  # tiles that follow each other; T are those, or as many n_cols later
    Q: gl.constexpr, BITS: gl.constexpr, GROUP: gl.constexpr, HAS_ZERO: gl.constexpr,
    EVEN_K: gl.constexpr, EVEN_N: gl.constexpr, PDL: gl.constexpr,
    TOP_K: gl.constexpr,  # how many of ``ids_ptr`` a row of x serves; 0: rows are as they lie
    R: gl.constexpr, N: gl.constexpr, K: gl.constexpr, STAGES: gl.constexpr, SLICES: gl.constexpr,
    W: gl.constexpr, FP8: gl.constexpr = False,
):
    """fp32 [T, SLICES, N, R] in shared memory: what slices have of the products with T tiles.

    ``w_ptr``, of 16-bit numbers: what is read first of tile0; ``s_ptr``, ``z_ptr``: of the matrix,
    of which n_cols rows count; rows of x are those from row0 on that are before ``end``.
    """
    DTYPE: gl.constexpr = x_ptr.dtype.element_ty
    WN: gl.constexpr = W // SLICES  # warps that have outputs of their own
    STEP: gl.constexpr = SLICES * K
    EVERY: gl.constexpr = 16 // BITS  # weights in an int16
    SCALED: gl.constexpr = BITS < 16
    LINE: gl.constexpr = 8 * EVERY  # in 16 bytes
    CHUNKS: gl.constexpr = K // CHUNK  # of a step and slice
    GROUPS: gl.constexpr = K // GROUP if (GROUP > 0 and GROUP < K) else 1
    A_GROUP: gl.constexpr = CHUNKS // GROUPS
    # Slices side by side may have columns of one group: its scale is read once and put down twice.
    ALIKE: gl.constexpr = GROUP // K if (GROUP > K and GROUP // K <= SLICES) else 1
    sums: gl.constexpr = gl.NVMMADistributedLayout(
        version=[2, 0], warps_per_cta=[SLICES, WN, 1], instr_shape=[1, 16, 8])
    left: gl.constexpr = gl.DotOperandLayout(0, sums, 2)
    right: gl.constexpr = gl.DotOperandLayout(1, sums, 2)
    # A row of a step is fetched by neighbouring lanes: 16 bytes each.
    LANES: gl.constexpr = STEP // LINE if STEP < 32 * LINE else 32
    lines: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [W, 1], [1, 0])
    LANES_X: gl.constexpr = K // 8 if K < 256 else 32
    ACROSS: gl.constexpr = SLICES if SLICES * LANES_X < 32 else 32 // LANES_X
    ROWS_X: gl.constexpr = 32 // (LANES_X * ACROSS)
    WARPS_X: gl.constexpr = W if W * ROWS_X < R else (R // ROWS_X if ROWS_X < R else 1)
    lines_x: gl.constexpr = gl.BlockedLayout(
        [1, 1, 8], [ACROSS, ROWS_X, LANES_X], [W // WARPS_X, WARPS_X, 1], [2, 0, 1])
    # A lane reads those neighbours of x whose weights it reads at once; warps with other outputs
    # read the same.
    NEXT: gl.constexpr = 2 * EVERY
    eights: gl.constexpr = gl.SliceLayout(1, gl.BlockedLayout(
        [1, 1, 1, NEXT], [1, 1, 8, 4], [SLICES, WN, 1, 1], [3, 2, 1, 0]))
    # Rows of 64 bytes or more, of which eight lanes read 16 bytes of eight rows, or of one.
    EIGHTS: gl.constexpr = STEP // LINE if STEP < 8 * LINE else 8
    codes_s: gl.constexpr = gl.SwizzledSharedLayout(8, 8 // EIGHTS, EIGHTS, [1, 0])
    # What is read at once is 64 bytes of each of two rows, whose halves change places by turns; or
    # 32 bytes of four.
    turned: gl.constexpr = gl.SwizzledSharedLayout(4 * NEXT, 1, 16 // NEXT, [2, 1, 0])
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])


    k_first = split * (S * STEP)
    further = stride * n_cols
    n = gl.arange(0, N, gl.SliceLayout(1, lines))
    h = gl.arange(0, STEP // EVERY, gl.SliceLayout(0, lines))[None, :]
    w_tile = w_ptr + (n.to(gl.int64) * stride)[:, None] + h
    columns = h // 8 * LINE
    n_left = n_cols - tile0 * N
    k_left = n_inner - k_first
    w_s = _rings(T, STAGES, N, STEP // EVERY, codes_s)
    for ahead in gl.static_range(AHEAD):
        if ahead < S:
            _fetch_codes(w_s, w_tile, row0 * 0 + ahead, stride, n, columns, n_left, k_left, further,
                         EVERY, T, HERE, STAGES, N, STEP, EVEN_K, EVEN_N)
        _commit()

    slices = gl.arange(0, SLICES, gl.SliceLayout(1, gl.SliceLayout(2, lines_x)))[:, None, None] * K
    r = row0 + gl.arange(0, R, gl.SliceLayout(0, gl.SliceLayout(2, lines_x)))[None, :, None]
    c = gl.arange(0, K, gl.SliceLayout(0, gl.SliceLayout(1, lines_x)))[None, None, :]
    x_columns = slices + c
    row_ok = (r < end) & (x_columns >= 0)
    if TOP_K > 0:
        r = gl.load(ids_ptr + r, mask=r < end, other=0)
        r = gl.minimum(gl.maximum(r // TOP_K, 0), n_sources - 1)
    x_step = x_ptr + k_first + r.to(gl.int64) * stride_x * 8 + x_columns
    x_s = gl.allocate_shared_memory(DTYPE, [STAGES, SLICES, R, K], turned)

    QD: gl.constexpr = Q // ALIKE
    QV: gl.constexpr = QD if QD < 8 else 8
    QL: gl.constexpr = QD // QV if QD < 64 else 8
    places: gl.constexpr = gl.BlockedLayout([QV, 1], [QL, 32 // QL], [1, W], [0, 1])
    scales = gl.tuple([split])
    if SCALED:
        scales = _of_tiles(
            s_ptr, stride_s, tile0, split, n_cols, n_inner, 0.0, HERE, QD, GROUP, GROUPS, S,
            K * ALIKE, N, SLICES // ALIKE, EVEN_K, places)
        if T > HERE:
            scales = scales + _of_tiles(
                s_ptr + (stride * 0 + n_cols) * stride_s, stride_s, tile0, split, n_cols, n_inner,
                0.0, HERE, QD, GROUP, GROUPS, S, K * ALIKE, N, SLICES // ALIKE, EVEN_K, places)
    zeros = scales
    if HAS_ZERO:
        zeros = _of_tiles(
            z_ptr, stride_z, tile0, split, n_cols, n_inner, 8, HERE, QD, GROUP, GROUPS, S,
            K * ALIKE, N, SLICES // ALIKE, EVEN_K, places)
        if T > HERE:
            zeros = zeros + _of_tiles(
                z_ptr + (stride * 0 + n_cols) * stride_z, stride_z, tile0, split, n_cols, n_inner,
                8, HERE, QD, GROUP, GROUPS, S, K * ALIKE, N, SLICES // ALIKE, EVEN_K, places)
    if PDL:  # nothing above reads what an earlier kernel may write, or stores
        _wait_for_earlier_kernels()

    for ahead in gl.static_range(STAGES):
        if ahead < S:
            if ahead >= AHEAD:
                _fetch_codes(w_s, w_tile, row0 * 0 + ahead, stride, n, columns, n_left, k_left,
                             further, EVERY, T, HERE, STAGES, N, STEP, EVEN_K, EVEN_N)
            _fetch_x(x_s, x_step, row0 * 0 + ahead, row_ok, x_columns, k_left, STAGES, STEP, EVEN_K)
        _commit()
    OF_TILE: gl.constexpr = Q // SLICES
    s_s = x_s
    if SCALED:
        s_s = gl.allocate_shared_memory(s_ptr.dtype.element_ty, [T * OF_TILE, SLICES, N], plain)
        s_all = _as(s_s, s_ptr.dtype.element_ty, [T, Q, N], plain)
    z_s = s_s
    if HAS_ZERO:
        z_s = gl.allocate_shared_memory(DTYPE, [T * OF_TILE, SLICES, N], plain)
        z_all = _as(z_s, DTYPE, [T, Q, N], plain)
    for tile in gl.static_range(T):
        if SCALED:
            s_all.index(tile).store(_repeated(scales[tile], ALIKE))
        if HAS_ZERO:
            z_all.index(tile).store(_repeated(_less(zeros[tile], DTYPE), ALIKE))

    of_sums: gl.constexpr = gl.SliceLayout(2, sums)
    of_left: gl.constexpr = gl.SliceLayout(2, left)
    nothing = gl.full([SLICES, N, R], 0.0, gl.float32, sums)
    acc = _times(nothing, T)
    _wait(STAGES - 1)
    codes = _codes_of(w_s, 0, 0, T, SLICES, left)
    x = _x_of(x_s, 0, 0, CHUNKS, eights)
    scale = gl.tuple([split])
    if SCALED:
        scale = _scales_of(s_s, 0, 0, T * GROUPS, GROUPS, OF_TILE, of_sums)
    less = scale
    if HAS_ZERO:
        less = _scales_of(z_s, 0, 0, T * GROUPS, GROUPS, OF_TILE, of_left)
    MIDDLE: gl.constexpr = (CHUNKS - 1) // 2
    TWO: gl.constexpr = 2 if S % 2 == 0 else 1  # registers of a step and of the next, by turns
    for first in range(0, S, TWO):
        for u in gl.static_range(TWO):
            f = first + u
            _wait(STAGES - 2)  # the next step is there, and all warps have this one in registers
            of_next = 0
            if GROUP > 0:
                of_next = gl.minimum(f + 1, S - 1) * GROUPS
            next_codes = _codes_of(w_s, (f + 1) % STAGES, 0, T, SLICES, left)
            next_x = _x_of(x_s, (f + 1) % STAGES, 0, CHUNKS, eights)
            next_scale = scale
            if SCALED:
                next_scale = _scales_of(s_s, of_next, 0, T * GROUPS, GROUPS, OF_TILE, of_sums)
            next_less = next_scale
            if HAS_ZERO:
                next_less = _scales_of(z_s, of_next, 0, T * GROUPS, GROUPS, OF_TILE, of_left)
            for p in gl.static_range(GROUPS):
                parts = _times(nothing, T) if GROUP > 0 else acc
                for j in gl.static_range(p * A_GROUP, p * A_GROUP + A_GROUP):
                    xs = _operands(x[j], EVERY, right)
                    parts = _products(
                        codes, less, xs, parts, EVERY, j, CHUNKS, p, GROUPS, 0, T, DTYPE, HAS_ZERO,
                        left, FP8)
                    if j == MIDDLE:
                        if STAGES < S:  # noqa: SIM102 (a constant; without it all is asked for)
                            if f + STAGES < S:
                                _fetch_codes(
                                    w_s, w_tile, f + STAGES, stride, n, columns, n_left, k_left,
                                    further, EVERY, T, HERE, STAGES, N, STEP, EVEN_K, EVEN_N)
                                _fetch_x(x_s, x_step, f + STAGES, row_ok, x_columns, k_left,
                                         STAGES, STEP, EVEN_K)
                        _commit()
                if GROUP > 0:
                    acc = _scaled(acc, parts, scale, p, GROUPS, 0, T)
                else:
                    acc = parts
            codes = next_codes
            x = next_x
            scale = next_scale
            less = next_less
    if GROUP == 0 and SCALED:
        acc = _scaled(_times(nothing, T), acc, scale, 0, GROUPS, 0, T)

    PHASES: gl.constexpr = N // 8 if N < 32 else 4
    spread: gl.constexpr = gl.SwizzledSharedLayout(8, 2, PHASES, [1, 2, 0])
    sums_s = gl.allocate_shared_memory(gl.float32, [T, SLICES, N, R], spread)
    for tile in gl.static_range(T):
        y = acc[tile]
        if gl.float16 != DTYPE and SCALED:
            y = y * PARTS_OF_ONE
        elif FP8:
            y = y * PARTS_OF_FP8
        sums_s.index(tile).store(y)
    return sums_s


@gluon.jit
def _sum_of_slices(sums_s, tile, rows: gl.constexpr):
    """fp32 [N, R] of a tile, its slices added in order."""
    slices: gl.constexpr = sums_s.shape[1]
    n: gl.constexpr = sums_s.shape[2]
    r: gl.constexpr = sums_s.shape[3]
    PHASES: gl.constexpr = n // 8 if n < 32 else 4
    spread: gl.constexpr = gl.SwizzledSharedLayout(8, 2, PHASES, [0, 1])
    of_slices = _as(sums_s.index(tile), gl.float32, [slices, n, r], spread)
    y = of_slices.index(0).load(rows)
    for s in gl.static_range(1, slices):
        y = y + of_slices.index(s).load(rows)
    return y


@gluon.jit(do_not_specialize=["stride_w", "n_rows", "n_m"])
def _integer_weights_core_kernel(
    x_ptr, w_ptr, s_ptr, z_ptr, bias_ptr, out_ptr, part_ptr,
    stride_x, stride_w,  # in units of 16 bytes
    stride_s, stride_z, stride_o, n_cols, n_inner, n_rows, n_m,
    S: gl.constexpr,  # steps of a program, of K columns for each slice
    T: gl.constexpr,  # tiles of a program
    Q: gl.constexpr,  # scales of an output that a program takes, or more; a power of two
    BITS: gl.constexpr,  # of a weight
    GROUP: gl.constexpr,  # columns with one scale; 0: a row has one
    HAS_ZERO: gl.constexpr, HAS_BIAS: gl.constexpr, EVEN_K: gl.constexpr, EVEN_N: gl.constexpr,
    PDL: gl.constexpr, R: gl.constexpr, N: gl.constexpr, K: gl.constexpr, SPLIT_K: gl.constexpr,
    STAGES: gl.constexpr, SLICES: gl.constexpr, W: gl.constexpr,
    FP8: gl.constexpr,  # weights of 8 bits are e4m3, not int8
):
    EVERY: gl.constexpr = 16 // BITS  # weights in an int16
    if PDL:
        _let_next_kernel_start()
    split = gl.program_id(0) % SPLIT_K
    place = gl.program_id(0) // SPLIT_K
    row0 = place % n_m * R
    tile0 = place // n_m * T
    stride = stride_w.to(gl.int64) * 8
    w_first = w_ptr.to(gl.pointer_type(gl.int16)) + (tile0 * N).to(gl.int64) * stride
    w_first = w_first + split * (S * SLICES * K) // EVERY
    sums_s = _sums_of_tiles(
        x_ptr, w_first, s_ptr, z_ptr, x_ptr, stride_x, stride, stride_s, stride_z, tile0, row0,
        n_rows, split, n_cols, n_inner, n_rows, S, T, T, Q, BITS, GROUP, HAS_ZERO, EVEN_K, EVEN_N,
        PDL, 0, R, N, K, STAGES, SLICES, W, FP8)
    # Results lie so that lanes store neighbours; sums come there from where the products left them.
    BESIDE: gl.constexpr = N if N < 32 else 32
    rows: gl.constexpr = gl.BlockedLayout([1, 1], [BESIDE, 32 // BESIDE], [1, W], [0, 1])
    for tile in gl.static_range(T):
        y = _sum_of_slices(sums_s, tile, rows)
        bias = split
        if HAS_BIAS and SPLIT_K == 1:
            o = (tile0 + tile) * N + gl.arange(0, N, gl.SliceLayout(1, rows))
            bias = gl.load(bias_ptr + o, mask=o < n_cols, other=0.0)
        _put(y, bias, tile0 + tile, row0, split, n_cols, n_rows, out_ptr, part_ptr, stride_o,
             HAS_BIAS, R, N, SPLIT_K, rows)


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


def why_unfit(k: int, dev: Device) -> str | None:
    """Reason why this body cannot serve K columns; None: it can."""
    if dev.arch != "sm90":
        return f"variant core needs an sm90 device, got {dev.arch}"
    if not device.is_there(gl):
        return "variant core needs a triton that has Gluon (3.6 or newer), got none"
    if k > few.MOST_COLUMNS:
        return f"variant core has up to {few.MOST_COLUMNS} columns, got {k}"
    return None


def with_slices(config: Config) -> Config:
    """A config of an operation that has no SLICES, with them: a warp has 16 outputs of a tile."""
    return {**config, "SLICES": max(1, config["num_warps"] * 16 // config["BLOCK_N"])}


def steps_of(config: Config, k: int) -> int:
    """``S``: steps of a program."""
    return cdiv(cdiv(k, config["BLOCK_K"] * config["SLICES"]), int(config["SPLIT_K"]))


def tiles_of(config: Config, m: int, n: int, programs: int) -> int:
    """``T``: tiles of a program, so that no more than ``programs`` are there."""
    n_n, beside = cdiv(n, config["BLOCK_N"]), cdiv(m, config["BLOCK_M"]) * config["SPLIT_K"]
    return cdiv(n_n, max(1, programs // beside))


def _tiles(config: Config, problem: Problem, dev: Device) -> int:
    programs = config["programs_per_core"] * dev.num_cores
    return tiles_of(config, problem["m"], problem["n"], programs)


def scales_of(config: Config, problem: Problem) -> int:
    """``Q``: scales of an output that a program keeps, a power of two."""
    group, k = problem["group"], problem["k"]
    if group == k:
        return int(config["SLICES"])
    a_step = max(1, config["BLOCK_K"] // group) * config["SLICES"]
    return next_power_of_2(steps_of(config, k) * a_step)


def shared_bytes(config: Config, problem: Problem, dev: Device, bits: int) -> int:
    """Of shared memory: stages of weights and x, scales and zero points; then sums of slices."""
    r, n, k, slices = (config[name] for name in ("BLOCK_M", "BLOCK_N", "BLOCK_K", "SLICES"))
    tiles = _tiles(config, problem, dev)
    stages = config["num_stages"] * slices * k * (tiles * n * bits // 8 + 2 * r)
    of_a_scale = problem["scale"].itemsize + (2 if problem["zero"] else 0)
    scales = tiles * n * scales_of(config, problem) * of_a_scale
    return int(max(stages + scales, 4 * tiles * slices * n * r) + 1024)


def default_config(problem: Problem, dev: Device, bits: int) -> Config:
    """Programs that have the least to do, and as many stages as fit.

    From an H200 (CONTRIBUTING, "Measured facts"). 12288 x 4096 with 16 rows: 10.2 us with five
    stages, 10.7 with four, 10.5 with slices of 64 columns. Of 8 bits 14.3 with five (160 KB), 14.8
    with seven; 4096 x 4096 6.1 with five (164 KB), 6.3 with seven, 6.3 with slices of 64 columns.
    """
    facts = tuple((name, problem[name]) for name in ("m", "n", "k", "group", "zero", "scale"))
    return dict(_default_config(facts, dev, bits))


@functools.lru_cache(maxsize=1024)
def _default_config(facts: tuple[tuple[str, Any], ...], dev: Device, bits: int) -> Config:
    problem = dict(facts)
    rows = max(8, min(32, next_power_of_2(problem["m"])))
    config: Config = {
        "BLOCK_M": rows,
        "BLOCK_N": 32,
        "BLOCK_K": 64 if rows == 32 or bits == 8 else 128,  # of more, registers have no room
        "SPLIT_K": 1,
        "SLICES": 4,
        "programs_per_core": 1,
        "variant": "core",
        "PDL": True,
        "num_warps": 8,
        "num_stages": 8,
    }
    ways = []
    for in_turn, parts in itertools.product(IN_TURN, (1, 2, 3, 4, 6, 8)):
        way = {**config, "SPLIT_K": parts, "programs_per_core": in_turn}
        if (tiles := _tiles(way, problem, dev)) > 4:
            continue
        if bits == 8 and rows < 32 and tiles == 1:
            way["BLOCK_K"] = 128
        ways.append(_with_stages(way, problem, dev, bits))
    legal = [way for way in ways if why_illegal(way, problem, dev, bits) is None]
    # Fewer stages were not timed: so much of a core has tiles then.
    deep = [way for way in legal if way["num_stages"] >= (5 if bits == 4 else 4)] or legal
    return min(deep, key=lambda way: _work(way, problem, dev, bits), default=config)


def _with_stages(config: Config, problem: Problem, dev: Device, bits: int) -> Config:
    """As many of those that it has as fit; of 8 bits fewer, as more of them only delay x."""
    stages, most = config["num_stages"], dev.local_mem_bytes if bits == 4 else MOST_BYTES
    while stages > 2:
        if shared_bytes({**config, "num_stages": stages}, problem, dev, bits) <= most:
            break
        stages -= 1
    return {**config, "num_stages": stages}


def _work(config: Config, problem: Problem, dev: Device, bits: int) -> float:
    """Of a core, where 512 columns of a tile of 4 bits are 1 and take 0.33 us: a model of what was
    timed."""
    m, n, parts = problem["m"], problem["n"], config["SPLIT_K"]
    tiles = _tiles(config, problem, dev)
    programs = cdiv(m, config["BLOCK_M"]) * cdiv(n, config["BLOCK_N"] * tiles) * parts
    columns = steps_of(config, problem["k"]) * config["BLOCK_K"] * config["SLICES"]
    a_tile = 1.0 if bits == 4 else 1.5  # these wait for memory
    a_program = columns / 512 * (tiles * a_tile + config["BLOCK_M"] / 27) + 2
    adding = (5 if bits == 4 else 8) + parts * (0.25 + m * n / 60000) if parts > 1 else 0
    return float(cdiv(programs, dev.num_cores) * a_program + adding)


def why_illegal(config: Config, problem: Problem, dev: Device, bits: int) -> str | None:
    """Reason why a config of this body cannot be launched; None: it can."""
    allowed = {
        "BLOCK_M": (8, 16, 32, 64),
        "BLOCK_N": (16, 32, 64),
        "BLOCK_K": (64, 128, 256),
        "SLICES": (1, 2, 4, 8),
        "programs_per_core": IN_TURN,
        "num_warps": (4, 8, 16),
    }
    for name, values in allowed.items():
        if config[name] not in values:
            return f"variant core has {name} of {values}, got {config[name]}"
    if config["num_stages"] < 2:
        return f"num_stages must be 2 or more, got {config['num_stages']}"
    r, n, k = config["BLOCK_M"], config["BLOCK_N"], config["BLOCK_K"]
    warps, slices = config["num_warps"], config["SLICES"]
    if slices > warps or not 16 <= (a_warp := n * slices // warps) <= 64:
        return f"a warp has 16 to 64 outputs of a tile, got {n * slices / warps:g}"
    if not 128 <= slices * k <= 1024:
        return f"a step has 128 to 1024 columns, got {slices * k}"
    tiles = _tiles(config, problem, dev)
    if tiles > MOST_TILES:
        return f"a program has at most {MOST_TILES} tiles, got {tiles}"
    used = shared_bytes(config, problem, dev, bits)
    if used > dev.local_mem_bytes:
        return f"the tiles take {used} bytes of shared memory, more than {dev.local_mem_bytes}"
    # 1 KB of a core is the system's for each program.
    if 2 * used <= dev.local_mem_bytes + 1024:
        return f"two programs of {used} bytes of shared memory fit a core, which must have one"
    # Sums, those of a group, and codes and x of two steps; products of decoded weights. A step's
    # scales and zero points beyond one of each tile's outputs.
    codes = tiles * a_warp * k * bits // 1024
    taken = 2 * tiles * a_warp * r // 32 + 2 * codes + r * k // 32 + 64
    of_step = max(1, k // problem["group"]) - 1
    taken += of_step * tiles * a_warp // 8 * (4 if problem["zero"] else 2)
    # Scales and zero points come at a time when there is little else.
    numbers = tiles * n * scales_of(config, problem) * (2 if problem["zero"] else 1)
    if (left := few.most_registers(warps, 1)) < max(taken, 64 + numbers // (32 * warps)):
        return f"{warps} warps leave {left} registers a thread, too few for {tiles} tiles"
    return None


def bound(
    bits: int,
    sizes: tuple[int, int, int],
    facts: dict[str, Any],
    strides: tuple[int, ...],
    config: Config,
    programs: int,
    fp8: bool = False,
) -> Callable[..., None]:
    """What multiplies: ``launch(x, weight, scale, zero, bias, out, part)``.

    ``strides``: of x, weight, scale, zero and out, in numbers; ``programs``: no more than that;
    ``fp8``: weights of 8 bits are e4m3.
    """
    m, n, k = sizes
    splits, slices, warps = (config[name] for name in ("SPLIT_K", "SLICES", "num_warps"))
    n_m = cdiv(m, config["BLOCK_M"])
    steps, tiles = steps_of(config, k), tiles_of(config, m, n, programs)
    start = bind(
        _integer_weights_core_kernel,
        (n_m * cdiv(n, config["BLOCK_N"] * tiles) * splits,),
        BITS=bits,
        **facts,
        EVEN_K=k == steps * slices * config["BLOCK_K"] * splits,
        EVEN_N=n % (config["BLOCK_N"] * tiles) == 0,
        PDL=config["PDL"],
        R=config["BLOCK_M"],
        N=config["BLOCK_N"],
        K=config["BLOCK_K"],
        S=steps,
        T=tiles,
        Q=scales_of(config, {"k": k, "group": facts["GROUP"] or k}),
        SPLIT_K=splits,
        STAGES=config["num_stages"],
        SLICES=slices,
        W=warps,
        FP8=fp8,
        num_warps=warps,
        maxnreg=few.most_registers(warps, 1),
        **({"launch_pdl": True} if config["PDL"] else {}),
    )
    numbers = (
        strides[0] // 8,
        strides[1] // {4: 4, 8: 16, 16: 8}[bits],
        *strides[2:],
        n,
        k,
        m,
        n_m,
    )
    return lambda *tensors: start(*tensors, *numbers)


def bound_adding(
    m: int, n: int, has_bias: bool, stride_o: int, config: Config
) -> Callable[..., None] | None:
    """What adds the parts of a split K: ``launch(bias, out, part)``; None without a split."""
    if config["SPLIT_K"] == 1:
        return None
    piece, warps = few.piece_to_add(m, n, device.current())
    n_pieces = cdiv(n, piece)
    start = bind(
        _add_rows_kernel,
        (m * n_pieces,),
        HAS_BIAS=has_bias,
        PDL=config["PDL"],
        SPLIT_K=config["SPLIT_K"],
        PIECE=piece,
        W=warps,
        num_warps=warps,
        **({"launch_pdl": True} if config["PDL"] else {}),
    )
    return lambda *tensors: start(*tensors, stride_o, n, n_pieces, m)
