"""The body of ``moe_gemm`` for many rows an expert on Hopper (sm_90): ``variant`` "hopper".

One persistent program a core, as in ``masked_gemm_hopper``: a loader runs STAGES steps ahead, over
the ends of tiles too, and two groups of four warps multiply (wgmma). What bounds such a product is
what the cores read from L2, and an expert's number of rows is no multiple of anything. So the tile
is turned: 256 weights stand where an instruction takes 64 a time, rows of x where it takes any
number: 128 to a tile, TAIL more where that saves an expert a tile, and 64, or 64 and TAIL, where an
expert has no more left.

Weights come by TMA. A group has 64 of the gate and the 64 of the up rows that these meet, so that a
thread holds both sums. Rows of x in the order of experts come by TMA too; rows of tokens are
gathered by the loader's four warps (cp.async), on the same barrier.

16-bit weights, or W8A8: bytes are the same, a step has 128 of each row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from tkernels import device
from tkernels.device import Device, cdiv, next_power_of_2
from tkernels.masked_gemm_hopper import _as, _describer, _load_tile
from tkernels.paged_attn_quantized_hopper import _let_next_kernel_start, _wait_for_earlier_kernels
from tkernels.registry import Config, Problem

if TYPE_CHECKING:
    from tkernels import _triton as gl
    from tkernels import _triton as gluon
    from tkernels import _triton as hopper
else:
    gluon = device.triton_part("triton.experimental.gluon")
    gl = device.triton_part("triton.experimental.gluon.language")
    hopper = device.triton_part("triton.experimental.gluon.language.nvidia.hopper")
_ampere = device.triton_part("triton.experimental.gluon.language.nvidia.ampere")
_async_copy = _ampere.async_copy
_barrier = getattr(gl, "thread_barrier", None) or gl.barrier  # newer tritons: barrier
_gather = getattr(_async_copy, "async_load", None) or _async_copy.async_copy_global_to_shared

BLOCK_K = 128  # bytes of a row a step: one row of a swizzled tile

# fmt: off


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _tiles(count, TAIL: gl.constexpr):
    """How many tiles ``count`` rows make.

    TAIL = 16 or 32 more rows cost a tile about a quarter of what 128 do, as the instruction's other
    operand is read all the same: they are taken where that saves a tile, and by no more tiles than
    must.
    """
    plain = (count + 127) // 128
    tall = (count + 127 + TAIL) // (128 + TAIL)
    tailed = (gl.maximum(count - 128 * tall, 0) + TAIL - 1) // TAIL
    return gl.where(4 * tall + tailed < 4 * plain, tall, plain)


@gluon.jit
def _tiles_of_experts(offsets_ptr, n_experts, TAIL: gl.constexpr, E: gl.constexpr):
    """(row tiles of each expert, which of all is its first), the same in each warp.

    Experts stand in their own order. With those of few rows last, whose weights take the most time
    to bring, memory would be what the end waits for, and idle before.
    """
    layout: gl.constexpr = gl.BlockedLayout([max(E // 32, 1)], [32], [gl.num_warps()], [0])
    e = gl.arange(0, E, layout)
    ok = e < n_experts
    first = gl.load(offsets_ptr + e, mask=ok, other=0)
    end = gl.load(offsets_ptr + 1 + e, mask=ok, other=0)
    tiles = _tiles(end - first, TAIL)
    return tiles, gl.associative_scan(tiles, 0, _add) - tiles


@gluon.jit
def _place(m_tile, tiles, begin, offsets_ptr, n_experts, TAIL: gl.constexpr):
    """(expert, first row, end) of a row tile; past the last one, any."""
    here = (begin <= m_tile) & (m_tile < begin + tiles)
    e = gl.arange(0, tiles.shape[0], tiles.type.layout)
    expert = gl.minimum(gl.sum(gl.where(here, e, 0), 0), n_experts - 1)
    tile = m_tile - gl.sum(gl.where(here, begin, 0), 0)
    first = gl.load(offsets_ptr + expert)
    end = gl.load(offsets_ptr + expert + 1)
    row0, height = _rows_of_tile(tile, end - first, TAIL)
    row0 = gl.minimum(first + row0, end)
    return expert, row0, gl.minimum(row0 + height, end)


@gluon.jit
def _rows_of_tile(tile, count, TAIL: gl.constexpr):
    """(first row, rows at the most) of one of an expert's tiles: the first ones have a tail."""
    tailed = (gl.maximum(count - 128 * _tiles(count, TAIL), 0) + TAIL - 1) // TAIL
    return tile * 128 + gl.minimum(tile, tailed) * TAIL, gl.where(tile < tailed, 128 + TAIL, 128)


@gluon.jit
def _tail_at(count, TAIL: gl.constexpr):
    """After how many of a tile's ``count`` rows its tail begins, if it has more."""
    return gl.where(count > 64 + TAIL, 128, 64)


# ---- the loader --------------------------------------------------------------------------------


@gluon.jit
def _sources(
    ids_ptr, row0, end, n_sources, TOP_K: gl.constexpr, ROWS: gl.constexpr, layout: gl.constexpr,
):
    """int32 [ROWS]: which rows of x the rows from row0 on are; -1 past the end."""
    rows = row0 + gl.arange(0, ROWS, layout)
    ids = gl.load(ids_ptr + rows, mask=rows < end, other=0)
    return gl.where(rows < end, gl.minimum(gl.maximum(ids // TOP_K, 0), n_sources - 1), -1)


@gluon.jit
def _both_sources(
    ids_ptr, row0, end, n_sources, TOP_K: gl.constexpr, TAIL: gl.constexpr, layout: gl.constexpr,
):
    """``_sources`` of a tile's 64 or 128 rows, as of 128, and of its tail."""
    tail0 = row0 + _tail_at(end - row0, TAIL)
    main = _sources(ids_ptr, row0, gl.minimum(tail0, end), n_sources, TOP_K, 128, layout)
    return main, _sources(ids_ptr, tail0, end, n_sources, TOP_K, TAIL, layout)


@gluon.jit
def _factors(
    row0, end, xs_ptr, tw_ptr, ids_ptr, n_sources, TOP_K: gl.constexpr, LOW: gl.constexpr,
    ROW_WEIGHT: gl.constexpr, TAIL: gl.constexpr,
):
    """What the sums of a tile's rows are multiplied with, fp32: (their scales, their weights).

    The first 128, and from 128 on those of the tail. They are multiplied where they are told:
    nothing waits for the loads before that.
    """
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    number = gl.arange(0, 256, layout)
    rows = row0 + number + gl.where(number < 128, 0, _tail_at(end - row0, TAIL) - 128)
    ok = rows < end
    scales = gl.full([256], 1.0, gl.float32, layout)
    weights = scales
    if ROW_WEIGHT or (LOW and TOP_K > 0):
        ids = gl.maximum(gl.load(ids_ptr + rows, mask=ok, other=0), 0)
        ids = gl.minimum(ids, n_sources * max(TOP_K, 1) - 1)
    if LOW:
        sources = rows
        if TOP_K > 0:
            sources = ids // TOP_K
        scales = gl.load(xs_ptr + sources, mask=ok, other=0.0)
    if ROW_WEIGHT:
        weights = gl.load(tw_ptr + ids, mask=ok, other=0.0)
    return scales, weights


@gluon.jit
def _message(lane, tile, expert, row0, end):
    """What those who multiply are told of a tile: int32 [32], its first four."""
    place = gl.where(lane == 1, expert, gl.where(lane == 2, row0, end))
    return gl.where(lane == 0, tile, place)


@gluon.jit
def _halves_of(main_s):
    """The same tiles of 128 rows as twice as many of 64."""
    shape: gl.constexpr = [main_s.shape[0] * 2, 64, main_s.shape[2]]
    return _as(main_s, main_s.dtype, shape, main_s.layout)


@gluon.jit
def _issue(
    first, last, count, w_desc, boxes, x_ptr, stride_x, main, tail, w_row, other_half, row0, end,
    buffers, bars, TAIL: gl.constexpr, STAGES: gl.constexpr, GATHERED: gl.constexpr,
):
    """Fetch the steps of a tile from ``first`` to ``last``; returns the steps counted."""
    main_s, tail_s, w_s, _, _, _ = buffers
    full, empty = bars
    main_desc, half_desc, tail_desc = boxes
    step: gl.constexpr = main_s.shape[2]
    rows = end - row0
    tail_at = _tail_at(rows, TAIL)
    has_tail = rows > tail_at
    halves = _halves_of(main_s)
    if GATHERED:
        k = gl.arange(0, step, gl.SliceLayout(0, main.type.layout.parent))[None, :]
        # Strides count units of 16 bytes, so that the compiler knows them to be whole vectors.
        unit: gl.constexpr = 128 // x_ptr.dtype.element_ty.primitive_bitwidth
        main_rows = x_ptr + (gl.maximum(main, 0).to(gl.int64) * stride_x * unit)[:, None] + k
        tail_rows = x_ptr + (gl.maximum(tail, 0).to(gl.int64) * stride_x * unit)[:, None] + k
        main_ok = (main >= 0)[:, None]
        tail_ok = (tail >= 0)[:, None]
    for j in range(first, last):
        stage = count % STAGES
        hopper.mbarrier.wait(empty.index(stage), ((count // STAGES) & 1) ^ 1)
        if GATHERED:
            hopper.mbarrier.expect(full.index(stage), 256 * 128)
        elif rows > 128:
            hopper.mbarrier.expect(full.index(stage), (256 + 128 + TAIL) * 128)
        elif rows > 64 + TAIL:
            hopper.mbarrier.expect(full.index(stage), (256 + 128) * 128)
        elif rows > 64:
            hopper.mbarrier.expect(full.index(stage), (256 + 64 + TAIL) * 128)
        else:
            hopper.mbarrier.expect(full.index(stage), (256 + 64) * 128)
        for half in gl.static_range(2):
            _load_tile(
                w_desc, [w_row + half * other_half, j * step], full.index(stage),
                w_s.index(stage * 2 + half))
        if GATHERED:
            # Rows that are not there leave what was there: rows do not mix.
            _gather(main_s.index(stage), main_rows + j * step, mask=main_ok)
            if has_tail:
                _gather(tail_s.index(stage), tail_rows + j * step, mask=tail_ok)
            _async_copy.mbarrier_arrive(full.index(stage), increment_count=False)
        else:
            if rows > 64 + TAIL:
                _load_tile(main_desc, [row0, j * step], full.index(stage), main_s.index(stage))
            else:
                _load_tile(half_desc, [row0, j * step], full.index(stage), halves.index(stage * 2))
            if has_tail:
                _load_tile(
                    tail_desc, [row0 + tail_at, j * step], full.index(stage), tail_s.index(stage))
        count += 1
    return count


@gluon.jit
def _load(
    w_desc, boxes, x_ptr, offsets_ptr, ids_ptr, xs_ptr, tw_ptr, tickets_ptr, stride_x, buffers,
    bars, sizes,
    TAIL: gl.constexpr, STAGES: gl.constexpr, E: gl.constexpr, SILU: gl.constexpr,
    TOP_K: gl.constexpr, LOW: gl.constexpr, ROW_WEIGHT: gl.constexpr, PDL: gl.constexpr,
):
    if PDL:  # those who multiply wait for what is fetched, and store nothing before
        _wait_for_earlier_kernels()
    _, _, _, _, place_s, factor_s = buffers
    full, empty = bars
    n_weights, n_out, n_steps, n_experts, n_sources, n_n = sizes
    other_half = n_out if SILU else 128
    tiles, begin = _tiles_of_experts(offsets_ptr, n_experts, TAIL, E)
    n_tiles = gl.sum(tiles, 0) * n_n
    lane = gl.arange(0, 32, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    # Eight threads fetch the 128 bytes of a row.
    bits: gl.constexpr = x_ptr.dtype.element_ty.primitive_bitwidth
    layout: gl.constexpr = gl.SliceLayout(
        1, gl.BlockedLayout([1, 128 // bits], [4, 8], [4, 1], [1, 0]))
    count = 0
    parity = 0
    tile = gl.program_id(0)
    expert, row0, end = _place(tile // n_n, tiles, begin, offsets_ptr, n_experts, TAIL)
    scales, weights = _factors(
        row0, end, xs_ptr, tw_ptr, ids_ptr, n_sources, TOP_K, LOW, ROW_WEIGHT, TAIL)
    main = row0
    tail = row0
    if TOP_K > 0:
        main, tail = _both_sources(ids_ptr, row0, end, n_sources, TOP_K, TAIL, layout)
    while tile < n_tiles:
        w_row = expert * n_weights + tile % n_n * (128 if SILU else 256)
        # Those who multiply find the tile's place and factors beside its first step. They have
        # left the tile before the last one when this step's stage is free.
        hopper.mbarrier.wait(empty.index(count % STAGES), ((count // STAGES) & 1) ^ 1)
        place_s.index(parity).store(_message(lane, tile, expert, row0, end))
        if LOW or ROW_WEIGHT:
            factor_s.index(parity).store(scales * weights)
        _barrier()
        parity = 1 - parity
        # Tiles are not equally long: a program takes the next one when it can. Where that is takes
        # a few loads, each of which waits for the one before. A single warp looks between a tile's
        # first steps. Four of them have what they gather in registers, which a second tile would
        # not fit beside.
        if TOP_K == 0:
            this_end = end
            count = _issue(
                0, 1, count, w_desc, boxes, x_ptr, stride_x, main, tail, w_row, other_half, row0,
                this_end, buffers, bars, TAIL, STAGES, False)
            tile = gl.num_programs(0) + gl.atomic_add(tickets_ptr, 1, sem="relaxed")
            count = _issue(
                1, 2, count, w_desc, boxes, x_ptr, stride_x, main, tail, w_row, other_half, row0,
                this_end, buffers, bars, TAIL, STAGES, False)
            expert, row1, end = _place(tile // n_n, tiles, begin, offsets_ptr, n_experts, TAIL)
            count = _issue(
                2, gl.minimum(3, n_steps), count, w_desc, boxes, x_ptr, stride_x, main, tail,
                w_row, other_half, row0, this_end, buffers, bars, TAIL, STAGES, False)
            scales, weights = _factors(
                row1, end, xs_ptr, tw_ptr, ids_ptr, n_sources, TOP_K, LOW, ROW_WEIGHT, TAIL)
            count = _issue(
                3, n_steps, count, w_desc, boxes, x_ptr, stride_x, main, tail, w_row, other_half,
                row0, this_end, buffers, bars, TAIL, STAGES, False)
        else:
            count = _issue(
                0, n_steps, count, w_desc, boxes, x_ptr, stride_x, main, tail, w_row, other_half,
                row0, end, buffers, bars, TAIL, STAGES, True)
            tile = gl.num_programs(0) + gl.atomic_add(tickets_ptr, 1, sem="relaxed")
            expert, row1, end = _place(tile // n_n, tiles, begin, offsets_ptr, n_experts, TAIL)
            scales, weights = _factors(
                row1, end, xs_ptr, tw_ptr, ids_ptr, n_sources, TOP_K, LOW, ROW_WEIGHT, TAIL)
            main, tail = _both_sources(ids_ptr, row1, end, n_sources, TOP_K, TAIL, layout)
        row0 = row1
    # The last message: there is no tile any more.
    hopper.mbarrier.wait(empty.index(count % STAGES), ((count // STAGES) & 1) ^ 1)
    place_s.index(parity).store(_message(lane, -1, 0, 0, 0))
    _barrier()
    hopper.mbarrier.expect(full.index(count % STAGES), 0)
    if TOP_K > 0:
        _async_copy.mbarrier_arrive(full.index(count % STAGES), increment_count=False)


# ---- two groups of four warps multiply ---------------------------------------------------------


@gluon.jit
def _sums(
    SIDE: gl.constexpr, buffers, bars, count, n_steps, ROWS: gl.constexpr, TAILED: gl.constexpr,
    TAIL: gl.constexpr, STAGES: gl.constexpr, GATHERED: gl.constexpr, acc_dtype: gl.constexpr,
    layout: gl.constexpr, tail_layout: gl.constexpr,
):
    """Products of a group's weights, 64 of each half, with the tile's rows, the last in flight.

    Sums of both halves with ROWS rows, 64 or 128, then with TAIL more; these are zeros without
    TAILED.
    """
    main_s, tail_s, w_s, _, _, _ = buffers
    full, empty = bars
    w_sides = _as(w_s, w_s.dtype, [STAGES * 4, 64, w_s.shape[2]], w_s.layout)
    halves = _halves_of(main_s)
    a = gl.zeros([64, ROWS], acc_dtype, layout)
    b = gl.zeros([64, ROWS], acc_dtype, layout)
    c = gl.zeros([64, TAIL], acc_dtype, tail_layout)
    d = gl.zeros([64, TAIL], acc_dtype, tail_layout)
    for j in range(n_steps):
        stage = count % STAGES
        hopper.mbarrier.wait(full.index(stage), (count // STAGES) & 1)
        if GATHERED:  # what threads copied, the tensor core reads another way
            hopper.fence_async_shared()
        first = w_sides.index(stage * 4 + SIDE)
        second = w_sides.index(stage * 4 + 2 + SIDE)
        if ROWS == 64:
            rows = halves.index(stage * 2).permute([1, 0])
        else:
            rows = main_s.index(stage).permute([1, 0])
        a = hopper.warpgroup_mma(first, rows, a, is_async=True)
        b = hopper.warpgroup_mma(second, rows, b, is_async=True)
        if TAILED:
            more = tail_s.index(stage).permute([1, 0])
            c = hopper.warpgroup_mma(first, more, c, is_async=True)
            d = hopper.warpgroup_mma(second, more, d, is_async=True)
            a, b, c, d = hopper.warpgroup_mma_wait(4, deps=[a, b, c, d])
        else:
            a, b = hopper.warpgroup_mma_wait(2, deps=[a, b])
        if j > 0:  # the step before has ended
            hopper.mbarrier.arrive(empty.index((count - 1) % STAGES), count=1)
        count += 1
    return a, b, c, d


@gluon.jit
def _halves(sums, layout: gl.constexpr):
    """[64, 128] as two of [64, 64]: which threads hold what stays."""
    first, second = sums.reshape([64, 2, 64]).permute([0, 2, 1]).split()
    return gl.convert_layout(first, layout), gl.convert_layout(second, layout)


@gluon.jit
def _weight_scales(
    SIDE: gl.constexpr, ws_ptr, weight_row, col0, n_weights, n_out, SILU: gl.constexpr,
    LOW: gl.constexpr, layout: gl.constexpr,
):
    """Of a group's weights of a tile, fp32 [64] of each half; ones where they have none."""
    ones = gl.full([64], 1.0, gl.float32, layout)
    if LOW:
        ws = ws_ptr + weight_row.to(gl.int64)
        cols = SIDE * 64 + col0 + gl.arange(0, 64, layout)
        behind = n_out if SILU else 128
        first = gl.load(ws + cols, mask=cols < n_weights, other=0.0)
        second = gl.load(ws + cols + behind, mask=cols + behind < n_weights, other=0.0)
    else:
        first = ones
        second = ones
    return first, second


@gluon.jit
def _finish(
    SIDE: gl.constexpr, first, second, scales, factors, turn_s, row0, end, col0, out_ptr, stride_o,
    n_out, layout: gl.constexpr, SILU: gl.constexpr, LOW: gl.constexpr, FACTOR: gl.constexpr,
):
    """Scales, activation and routing weights of sums [64, ROWS], turned and stored."""
    a = first.to(gl.float32)
    b = second.to(gl.float32)
    if FACTOR:
        factor = factors.load(gl.SliceLayout(0, layout))[None, :]
    if LOW:
        a = a * gl.convert_layout(scales[0], gl.SliceLayout(1, layout))[:, None]
        b = b * gl.convert_layout(scales[1], gl.SliceLayout(1, layout))[:, None]
    if SILU:
        if LOW:
            a = a * factor
            b = b * factor
        a = _silu(a) * b
        if FACTOR and not LOW:
            a = a * factor
    elif FACTOR:
        a = a * factor
        b = b * factor
    col = col0 + SIDE * 64
    _put(a, turn_s, row0, end, col, out_ptr, stride_o, n_out)
    if not SILU:
        _put(b, turn_s, row0, end, col + 128, out_ptr, stride_o, n_out)


@gluon.jit
def _silu(x):
    """x / (1 + exp(-x)) in seven instructions; 0 for -inf, NaN stays."""
    return gl.inline_asm_elementwise(
        """
        {
        .reg .f32 clamped, power;
        max.NaN.f32 clamped, $1, 0fC61C4000;
        mul.f32 power, clamped, 0fBFB8AA3B;
        ex2.approx.ftz.f32 power, power;
        add.f32 power, power, 0f3F800000;
        rcp.approx.ftz.f32 power, power;
        mul.f32 $0, clamped, power;
        }
        """, "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _put(y, turn_s, row0, end, col, out_ptr, stride_o, n_out):
    """Store [64, ROWS], turned: 64 columns from col on of the rows from row0 on."""
    # Eight threads store the 128 bytes that a row gets.
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    rows = row0 + gl.arange(0, y.shape[1], gl.SliceLayout(1, layout))
    cols = col + gl.arange(0, 64, gl.SliceLayout(0, layout))
    outs = out_ptr + (rows.to(gl.int64) * stride_o)[:, None] + cols[None, :]
    turn_s = turn_s.slice(0, y.shape[1])
    turn_s.store(y.to(out_ptr.dtype.element_ty).permute([1, 0]))
    gl.store(outs, turn_s.load(layout), mask=(rows < end)[:, None] & (cols < n_out)[None, :])


@gluon.jit
def _multiply(
    SIDE: gl.constexpr, ws_ptr, out_ptr, stride_o, buffers, bars, sizes,
    TAIL: gl.constexpr, STAGES: gl.constexpr, SILU: gl.constexpr,
    GATHERED: gl.constexpr, LOW: gl.constexpr, FACTOR: gl.constexpr,
):
    full, empty = bars
    n_weights, n_out, n_steps, _, _, n_n = sizes
    turn_s = buffers[3].index(SIDE)
    inner: gl.constexpr = 32 if LOW else 16
    main_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, inner])
    half_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, inner])
    tail_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TAIL, inner])
    acc_dtype: gl.constexpr = gl.int32 if LOW else gl.float32
    lane = gl.arange(0, 32, gl.BlockedLayout([1], [32], [4], [0]))
    count = 0
    parity = 0
    hopper.mbarrier.wait(full.index(0), 0)
    place = buffers[4].index(0).load(lane.type.layout)
    tile = gl.sum(gl.where(lane == 0, place, 0), 0)
    while tile >= 0:
        factors = buffers[5].index(parity)
        row0 = gl.sum(gl.where(lane == 2, place, 0), 0)
        end = gl.sum(gl.where(lane == 3, place, 0), 0)
        weight_row = gl.sum(gl.where(lane == 1, place, 0), 0) * n_weights
        col0 = tile % n_n * (128 if SILU else 256)
        # Long before they are needed.
        scales = _weight_scales(
            SIDE, ws_ptr, weight_row, col0, n_weights, n_out, SILU, LOW,
            gl.SliceLayout(1, half_layout))
        # Where the activation makes what follows long, it stands there once; elsewhere for each
        # kind of tile, and no sums are moved.
        rows = end - row0
        if rows > 128:
            a, b, c, d = _sums(
                SIDE, buffers, bars, count, n_steps, 128, True, TAIL, STAGES, GATHERED, acc_dtype,
                main_layout, tail_layout)
            a, b, c, d = hopper.warpgroup_mma_wait(0, deps=[a, b, c, d])
            hopper.mbarrier.arrive(empty.index((count + n_steps - 1) % STAGES), count=1)
            a0, a1 = _halves(a, half_layout)
            b0, b1 = _halves(b, half_layout)
            if not SILU:
                _finish(
                    SIDE, a0, b0, scales, factors.slice(0, 64), turn_s, row0, end, col0, out_ptr,
                    stride_o, n_out, half_layout, SILU, LOW, FACTOR)
                _finish(
                    SIDE, a1, b1, scales, factors.slice(64, 64), turn_s, row0 + 64, end, col0,
                    out_ptr, stride_o, n_out, half_layout, SILU, LOW, FACTOR)
                _finish(
                    SIDE, c, d, scales, factors.slice(128, TAIL), turn_s, row0 + 128, end, col0,
                    out_ptr, stride_o, n_out, tail_layout, SILU, LOW, FACTOR)
        elif rows > 64 + TAIL:
            a, b, c, d = _sums(
                SIDE, buffers, bars, count, n_steps, 128, False, TAIL, STAGES, GATHERED, acc_dtype,
                main_layout, tail_layout)
            a, b = hopper.warpgroup_mma_wait(0, deps=[a, b])
            hopper.mbarrier.arrive(empty.index((count + n_steps - 1) % STAGES), count=1)
            a0, a1 = _halves(a, half_layout)
            b0, b1 = _halves(b, half_layout)
            if not SILU:
                _finish(
                    SIDE, a0, b0, scales, factors.slice(0, 64), turn_s, row0, end, col0, out_ptr,
                    stride_o, n_out, half_layout, SILU, LOW, FACTOR)
                _finish(
                    SIDE, a1, b1, scales, factors.slice(64, 64), turn_s, row0 + 64, end, col0,
                    out_ptr, stride_o, n_out, half_layout, SILU, LOW, FACTOR)
        elif rows > 64:
            a0, b0, c, d = _sums(
                SIDE, buffers, bars, count, n_steps, 64, True, TAIL, STAGES, GATHERED, acc_dtype,
                half_layout, tail_layout)
            a0, b0, c, d = hopper.warpgroup_mma_wait(0, deps=[a0, b0, c, d])
            hopper.mbarrier.arrive(empty.index((count + n_steps - 1) % STAGES), count=1)
            a1 = gl.zeros([64, 64], acc_dtype, half_layout)
            b1 = a1
            if not SILU:
                _finish(
                    SIDE, a0, b0, scales, factors.slice(0, 64), turn_s, row0, end, col0, out_ptr,
                    stride_o, n_out, half_layout, SILU, LOW, FACTOR)
                _finish(
                    SIDE, c, d, scales, factors.slice(128, TAIL), turn_s, row0 + 64, end, col0,
                    out_ptr, stride_o, n_out, tail_layout, SILU, LOW, FACTOR)
        else:
            a0, b0, c, d = _sums(
                SIDE, buffers, bars, count, n_steps, 64, False, TAIL, STAGES, GATHERED, acc_dtype,
                half_layout, tail_layout)
            a0, b0 = hopper.warpgroup_mma_wait(0, deps=[a0, b0])
            hopper.mbarrier.arrive(empty.index((count + n_steps - 1) % STAGES), count=1)
            a1 = gl.zeros([64, 64], acc_dtype, half_layout)
            b1 = a1
            if not SILU:
                _finish(
                    SIDE, a0, b0, scales, factors.slice(0, 64), turn_s, row0, end, col0, out_ptr,
                    stride_o, n_out, half_layout, SILU, LOW, FACTOR)
        if SILU:
            _finish(
                SIDE, a0, b0, scales, factors.slice(0, 64), turn_s, row0, end, col0, out_ptr,
                stride_o, n_out, half_layout, SILU, LOW, FACTOR)
            tail_at = _tail_at(rows, TAIL)
            if tail_at == 128:
                _finish(
                    SIDE, a1, b1, scales, factors.slice(64, 64), turn_s, row0 + 64, end, col0,
                    out_ptr, stride_o, n_out, half_layout, SILU, LOW, FACTOR)
            if rows > tail_at:
                _finish(
                    SIDE, c, d, scales, factors.slice(128, TAIL), turn_s, row0 + tail_at, end,
                    col0, out_ptr, stride_o, n_out, tail_layout, SILU, LOW, FACTOR)
        count += n_steps
        parity = 1 - parity
        hopper.mbarrier.wait(full.index(count % STAGES), (count // STAGES) & 1)
        place = buffers[4].index(parity).load(lane.type.layout)
        tile = gl.sum(gl.where(lane == 0, place, 0), 0)


@gluon.jit(do_not_specialize=["n_experts", "n_sources"])
def _moe_gemm_hopper_kernel(
    w_desc, main_desc, half_desc, tail_desc, x_ptr, offsets_ptr, ids_ptr, ws_ptr, xs_ptr, tw_ptr,
    out_ptr,
    tickets_ptr,  # int32, 0: how many tiles programs have taken after their first ones
    stride_x,  # in units of 16 bytes
    stride_o, n_weights, n_out, n_steps, n_n, n_experts, n_sources,
    LOW: gl.constexpr, SILU: gl.constexpr, ROW_WEIGHT: gl.constexpr, TOP_K: gl.constexpr,
    TAIL: gl.constexpr, STAGES: gl.constexpr, E: gl.constexpr, PDL: gl.constexpr,
):
    if PDL:
        _let_next_kernel_start()
    dtype: gl.constexpr = x_ptr.dtype.element_ty
    bits: gl.constexpr = dtype.primitive_bitwidth
    tile_layout: gl.constexpr = gl.NVMMASharedLayout(
        swizzle_byte_width=128, element_bitwidth=bits, rank=2)
    bar_layout: gl.constexpr = hopper.mbarrier.MBarrierLayout()
    main_s = gl.allocate_shared_memory(dtype, [STAGES, 128, 1024 // bits], tile_layout)
    tail_s = gl.allocate_shared_memory(dtype, [STAGES, TAIL, 1024 // bits], tile_layout)
    w_s = gl.allocate_shared_memory(dtype, [STAGES * 2, 128, 1024 // bits], tile_layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar_layout)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar_layout)
    # Those who gather arrive each for itself.
    arrivals: gl.constexpr = 129 if TOP_K > 0 else 1
    for i in gl.static_range(STAGES):
        hopper.mbarrier.init(full.index(i), count=arrivals)
        hopper.mbarrier.init(empty.index(i), count=2)
    hopper.fence_async_shared()
    turned = gl.allocate_shared_memory(
        out_ptr.dtype.element_ty, [2, 64, 64],
        gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))
    # For this tile and the next: its number, expert, first row and end (see _message); what each
    # row is multiplied with.
    place_s = gl.allocate_shared_memory(gl.int32, [2, 32], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    factor_s = gl.allocate_shared_memory(
        gl.float32, [2, 256], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    buffers = (main_s, tail_s, w_s, turned, place_s, factor_s)
    bars = (full, empty)
    sizes = (n_weights, n_out, n_steps, n_experts, n_sources, n_n)
    GATHERED: gl.constexpr = TOP_K > 0
    FACTOR: gl.constexpr = LOW or ROW_WEIGHT
    boxes = (main_desc, half_desc, tail_desc)
    gl.warp_specialize(
        [
            (_multiply, (0, ws_ptr, out_ptr, stride_o, buffers, bars, sizes, TAIL, STAGES, SILU,
                         GATHERED, LOW, FACTOR)),
            (_multiply, (1, ws_ptr, out_ptr, stride_o, buffers, bars, sizes, TAIL, STAGES, SILU,
                         GATHERED, LOW, FACTOR)),
            (_load, (w_desc, boxes, x_ptr, offsets_ptr, ids_ptr, xs_ptr, tw_ptr, tickets_ptr,
                     stride_x, buffers, bars, sizes, TAIL, STAGES, E, SILU, TOP_K, LOW,
                     ROW_WEIGHT, PDL)),
        ],
        [4, 4 if TOP_K > 0 else 1], [216 if TOP_K > 0 else 232, 72 if TOP_K > 0 else 40])


# fmt: on

# ---- host --------------------------------------------------------------------------------------

# What the body has no choice of.
FIXED: Config = {
    "variant": "hopper",
    "BLOCK_K": BLOCK_K,
    "programs_per_core": 0,
    "SWAP": True,
    "num_warps": 4,
}
# What changes where tensors lie at addresses that tensor maps cannot express.
PLAIN: Config = {
    "variant": "portable",
    "BLOCK_M": 128,
    "BLOCK_N": 64,
    "SWAP": False,
    "num_warps": 8,
    "num_stages": 3,
}


def why_unfit(problem: Problem, dev: Device) -> str | None:
    """Reason why this body cannot serve such a problem, whatever the config; None: it can."""
    if dev.arch != "sm90":
        return f"variant hopper needs an sm90 device, got {dev.arch}"
    if not device.is_there(gl):
        return "variant hopper needs a triton that has Gluon (3.6 or newer), got none"
    size = 1 if problem["int8"] else problem["dtype"].itemsize
    if size > 2:
        return f"variant hopper needs 8- or 16-bit numbers, got {problem['dtype']}"
    if not problem["aligned"] or problem["k"] * size % BLOCK_K:
        return f"variant hopper needs aligned rows whose bytes divide by {BLOCK_K}"
    if problem["int8"] and problem["path"] != "int8":
        return "variant hopper has no int8 weights with 16-bit activations"
    return None


def why_illegal(config: Config, problem: Problem, dev: Device) -> str | None:
    """Reason why a config of this body cannot be launched for a problem; None: it can."""
    if why := why_unfit(problem, dev):
        return why
    if wrong := [f"{n} {v}" for n, v in FIXED.items() if config[n] != v]:
        return f"variant hopper has {', '.join(wrong)}"
    outputs = 128 if problem["silu_and_mul"] else 256
    if config["BLOCK_N"] != outputs:
        return f"variant hopper has {outputs} outputs a tile, got BLOCK_N {config['BLOCK_N']}"
    m, stages = config["BLOCK_M"], config["num_stages"]
    if m not in (144, 160):
        return f"variant hopper has BLOCK_M 144 or 160, got {m}"
    if stages < 2:
        return f"variant hopper needs num_stages of 2 or more, got {stages}"
    if problem["k"] * (1 if problem["int8"] else 2) < stages * BLOCK_K:
        return f"variant hopper needs as many steps of {BLOCK_K} bytes as stages, got {stages}"
    if (used := stages * (m + 256) * BLOCK_K + 19456) > dev.local_mem_bytes:
        return f"tiles take {used} bytes of shared memory, more than {dev.local_mem_bytes}"
    return None


def bind(
    sizes: tuple[int, int, int, int, int, int],
    facts: dict[str, Any],
    strides: tuple[int, ...],
    config: Config,
) -> Callable[..., None]:
    """What runs the body, given all tensors of a call in the order of ``moe_gemm``'s own run."""
    r, e, n, k, n_sources, _ = sizes
    low, silu, top_k = facts["LOW"], facts["SILU"], facts["TOP_K"]
    n_out = n // 2 if silu else n
    bits = 8 if low else 16
    step = 1024 // bits
    n_n = cdiv(n_out, config["BLOCK_N"])
    tail = config["BLOCK_M"] - 128
    stride_x = strides[1] if low else strides[2]
    rows = (n_sources, k, stride_x)
    boxes = (
        _describer((e * n, k, strides[0]), 128, step, bits, 128),
        _describer(rows, 128, step, bits, 128),
        _describer(rows, 64, step, bits, 128),
        _describer(rows, tail, step, bits, 128),
    )
    start = device.bind_described(
        _moe_gemm_hopper_kernel,
        (min((min(r, e) + r // config["BLOCK_M"]) * n_n, device.current().num_cores),),
        boxes,
        num_warps=4,
        TAIL=tail,
        STAGES=config["num_stages"],
        E=next_power_of_2(e),
        PDL=config["PDL"],
        LOW=low,
        SILU=silu,
        ROW_WEIGHT=facts["ROW_WEIGHT"],
        TOP_K=top_k,
        **device.rounding_each_step(),
        **({"launch_pdl": True} if config["PDL"] else {}),
    )
    numbers = (stride_x * bits // 128, strides[3], n, n_out, k // step, n_n, e, n_sources)

    def run(x: torch.Tensor, weight: torch.Tensor, *tensors: Any) -> None:
        offsets, ids, out, ws, x_q, xs, weights, _, tickets = tensors
        # What is not there is stood in for by something that is, and not read.
        xs, ws, weights = (offsets if t is None else t for t in (xs, ws, weights))
        source = x_q if low else x
        if tickets is None:
            tickets = torch.zeros(1, dtype=torch.int32, device=x.device)
        given = (offsets, ids, ws, xs, weights, out, tickets)
        start(weight, *[source] * 4, *given, *numbers)

    return run
