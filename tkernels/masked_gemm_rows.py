"""The body of ``masked_gemm`` for several int8 rows on Hopper (sm_90): ``variant`` "rows".

The warps of a program share x_q, which goes to shared memory once. Weights and x_q are multiplied
as they are, so both come from there by ``ldmatrix``, and nothing is permuted. Sums are int32: parts
of K may be added in any order.

A warp has 32 outputs, where a tile has that many, and the warps left over have columns of their
own. Scales of weights, and bias, are read before the wait for earlier kernels, or a tile ahead.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tkernels import device
from tkernels import few_rows_hopper as few
from tkernels.device import Device, cdiv, next_power_of_2
from tkernels.few_rows_hopper import _commit, _load_async, _pieces, _wait
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

# What this body has no choice of.
FIXED: Config = {"variant": "rows", "GROUP_M": 1, "SWAP": False}
# Rows for which this body may be the default, where the narrow one is unfit. Up to 8 it was not
# timed; 32 and 64 take longer than in the portable one.
DEFAULT_ROWS = range(9, 17)
CHUNK = gl.constexpr(64)  # columns of x_q that a product takes
AT_ONCE = 3  # programs that a core holds by default

# fmt: off


@gluon.jit
def _fetch(
    w_s, w_tile, f, stride, n, columns, n_left, k_left, S: gl.constexpr, STAGES: gl.constexpr,
    N: gl.constexpr, STEP: gl.constexpr, EVEN_K: gl.constexpr, EVEN_N: gl.constexpr,
):
    """Start to bring the weights of step f % S of tile f // S, whole rows of it at once.

    ``columns`` [SLICES, 1, any]: of a step, as multiples of the 16 that a copy holds.
    """
    t = f // S
    i = f % S
    at = w_tile + (t * N).to(gl.int64) * stride + i * STEP
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
    R: gl.constexpr, K: gl.constexpr, SLICES: gl.constexpr, EVEN_K: gl.constexpr,
    lanes: gl.constexpr,
):
    """[PART * SLICES * R, CHUNK] of x: from chunk AT on, of each the rows for each slice.

    Rows that are not there are zeros, and so are columns.
    """
    q = gl.arange(0, PART * SLICES * R, gl.SliceLayout(1, lanes))
    c = gl.arange(0, CHUNK, gl.SliceLayout(0, lanes))[None, :]
    r = row0 + q % R
    chunk = AT + q // (R * SLICES)
    at = (chunk // (K // CHUNK) * SLICES + q // R % SLICES) * K + chunk % (K // CHUNK) * CHUNK
    there = (r < n_rows)[:, None]
    if not EVEN_K:
        there = there & (at[:, None] + c // 16 * 16 < n_inner - k_first)
    rows = x_ptr + k_first + r.to(gl.int64) * stride_x * 16 + at
    return gl.load(rows[:, None] + c, mask=there, other=0)


@gluon.jit
def _pieces_of_x(
    x_ptr, stride_x, row0, n_rows, k_first, n_inner, AT: gl.constexpr, PARTS: gl.constexpr,
    PART: gl.constexpr, R: gl.constexpr, K: gl.constexpr, SLICES: gl.constexpr,
    EVEN_K: gl.constexpr, lanes: gl.constexpr,
):
    """PARTS of them, all asked for at once."""
    first = gl.tuple([_piece_of_x(
        x_ptr, stride_x, row0, n_rows, k_first, n_inner, AT, PART, R, K, SLICES, EVEN_K, lanes)])
    if PARTS == 1:
        pieces = first
    else:
        pieces = first + _pieces_of_x(
            x_ptr, stride_x, row0, n_rows, k_first, n_inner, AT + PART, PARTS - 1, PART, R, K,
            SLICES, EVEN_K, lanes)
    return pieces


@gluon.jit
def _sum_of_slices(acc, rows: gl.constexpr):
    """[N, R]: the sum of acc [SLICES, N, R] over its slices, which are added in order."""
    if acc.shape[0] == 1:
        y = gl.reshape(acc, [acc.shape[1], acc.shape[2]])
    else:
        y = gl.sum(acc, 0)
    return gl.convert_layout(y, rows)


@gluon.jit
def _of_outputs(
    ws_ptr, bias_ptr, tile, n_cols, HAS_BIAS: gl.constexpr, N: gl.constexpr, layout: gl.constexpr,
):
    """[N]: scales of a tile's weights, and its bias."""
    n = tile * N + gl.arange(0, N, layout)
    scale = gl.load(ws_ptr + n, mask=n < n_cols, other=0.0)
    bias = scale
    if HAS_BIAS:
        bias = gl.load(bias_ptr + n, mask=n < n_cols, other=0.0).to(gl.float32)
    return scale, bias


@gluon.jit(do_not_specialize=["stride_w", "n_rows", "n_m"])
def _masked_gemm_rows_kernel(
    w_ptr, xq_ptr, ws_ptr, xs_ptr, bias_ptr, out_ptr, part_ptr,
    stride_w, stride_xq,  # in units of 16 bytes
    stride_o, n_cols, n_inner, n_rows, n_m,
    S: gl.constexpr,  # steps that a tile takes, of K columns for each slice
    T: gl.constexpr,  # tiles of a program
    HAS_BIAS: gl.constexpr, EVEN_K: gl.constexpr, EVEN_N: gl.constexpr, PDL: gl.constexpr,
    R: gl.constexpr, N: gl.constexpr, K: gl.constexpr, SPLIT_K: gl.constexpr,
    STAGES: gl.constexpr, SLICES: gl.constexpr, W: gl.constexpr,
):
    STEP: gl.constexpr = SLICES * K
    CHUNKS: gl.constexpr = K // CHUNK
    sums: gl.constexpr = gl.NVMMADistributedLayout(
        version=[2, 0], warps_per_cta=[SLICES, W // SLICES, 1], instr_shape=[1, 16, 8])
    left: gl.constexpr = gl.DotOperandLayout(0, sums, 4)
    right: gl.constexpr = gl.DotOperandLayout(1, sums, 4)
    # A row of a step is fetched by neighbouring lanes: 16 bytes each.
    LANES: gl.constexpr = K // 16
    ACROSS: gl.constexpr = SLICES if SLICES * LANES < 32 else 32 // LANES
    lines: gl.constexpr = gl.BlockedLayout(
        [1, 1, 16], [ACROSS, 32 // (LANES * ACROSS), LANES], [1, W, 1], [2, 0, 1])
    codes: gl.constexpr = gl.SwizzledSharedLayout(16, 1, 8, [2, 1, 0])
    turned3: gl.constexpr = gl.SwizzledSharedLayout(16, 2, 4, [2, 1, 0])
    turned2: gl.constexpr = gl.SwizzledSharedLayout(16, 2, 4, [1, 0])
    plain1: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])

    if PDL:
        _let_next_kernel_start()
    split = gl.program_id(0) % SPLIT_K
    place = gl.program_id(0) // SPLIT_K
    row0 = place % n_m * R
    tile0 = place // n_m * T
    k_first = split * (S * STEP)

    slices = gl.arange(0, SLICES, gl.SliceLayout(1, gl.SliceLayout(2, lines)))[:, None, None] * K
    n = gl.arange(0, N, gl.SliceLayout(0, gl.SliceLayout(2, lines)))
    k = gl.arange(0, K, gl.SliceLayout(0, gl.SliceLayout(1, lines)))[None, None, :]
    stride = stride_w.to(gl.int64) * 16
    w_tile = w_ptr + (tile0 * N).to(gl.int64) * stride + k_first
    w_tile = w_tile + (n.to(gl.int64) * stride)[None, :, None] + (slices + k)
    columns = slices + k // 16 * 16
    n_left = n_cols - tile0 * N
    k_left = n_inner - k_first
    w_s = gl.allocate_shared_memory(gl.int8, [STAGES, SLICES, N, K], codes)
    for ahead in gl.static_range(STAGES):
        if ahead < S * T:
            _fetch(w_s, w_tile, n_m * 0 + ahead, stride, n, columns, n_left, k_left, S, STAGES, N,
                   STEP, EVEN_K, EVEN_N)
        _commit()
    # No earlier kernel writes these either, and at the end nothing would cover the way to them.
    WIDE: gl.constexpr = 2 if N >= 64 else 1
    ACROSS_N: gl.constexpr = N // (32 * WIDE) if N >= 32 else 1
    ALONG: gl.constexpr = W if W < ACROSS_N else ACROSS_N
    rows: gl.constexpr = gl.BlockedLayout([WIDE, 1], [32, 1], [ALONG, W // ALONG], [0, 1])
    outputs: gl.constexpr = gl.SliceLayout(1, rows)
    if SPLIT_K == 1:
        scale, bias = _of_outputs(ws_ptr, bias_ptr, tile0, n_cols, HAS_BIAS, N, outputs)
    if PDL:  # nothing above reads what an earlier kernel may write, or stores
        _wait_for_earlier_kernels()

    lanes2: gl.constexpr = gl.BlockedLayout([1, 16], [8, 4], [W, 1], [1, 0])
    line: gl.constexpr = gl.BlockedLayout([1], [32], [W], [0])
    PART: gl.constexpr = (S * CHUNKS) & -(S * CHUNKS)  # the largest power of two in it
    PARTS: gl.constexpr = S * CHUNKS // PART
    pieces = _pieces_of_x(
        xq_ptr, stride_xq, row0, n_rows, k_first, n_inner, 0, PARTS, PART, R, K, SLICES, EVEN_K,
        lanes2)
    if SPLIT_K == 1:
        r = row0 + gl.arange(0, R, line)
        x_scale = gl.load(xs_ptr + r, mask=r < n_rows, other=0.0)
        xs_s = gl.allocate_shared_memory(gl.float32, [R], plain1, x_scale)
    x_s = gl.allocate_shared_memory(gl.int8, [S * CHUNKS, SLICES, R, CHUNK], turned3)
    x_all = _as(x_s, gl.int8, [PARTS, PART * SLICES * R, CHUNK], turned2)
    for piece in gl.static_range(PARTS):
        x_all.index(piece).store(pieces[piece])

    for t in range(T):
        acc = gl.full([SLICES, N, R], 0, gl.int32, sums)
        for i in range(S):
            f = t * S + i
            _wait(STAGES - 2)
            if f > 0:  # all warps are through with the step before: its stage is free
                if STAGES < S * T:  # noqa: SIM102 (a constant; without it all is asked for)
                    if f + STAGES - 1 < S * T:
                        _fetch(w_s, w_tile, f + STAGES - 1, stride, n, columns, n_left, k_left, S,
                               STAGES, N, STEP, EVEN_K, EVEN_N)
                _commit()
            weights = _pieces(w_s.index(f % STAGES).load(left), CHUNKS)
            for j in gl.static_range(CHUNKS):
                columns_of_x = x_s.index(i * CHUNKS + j).permute([0, 2, 1]).load(right)
                acc = ampere.mma_v2(weights[j], columns_of_x, acc)
        whole = _sum_of_slices(acc, rows)
        o = (tile0 + t) * N + gl.arange(0, N, outputs)
        m = row0 + gl.arange(0, R, gl.SliceLayout(0, rows))
        there = (o < n_cols)[:, None] & (m < n_rows)[None, :]
        m = m.to(gl.int64)
        if SPLIT_K > 1:
            parts = part_ptr + ((m + split.to(gl.int64) * n_rows) * n_cols)[None, :]
            gl.store(parts + o[:, None], whole, mask=there)
        else:
            y = whole.to(gl.float32) * xs_s.load(gl.SliceLayout(0, rows))[None, :]
            y = y * scale[:, None]
            if HAS_BIAS:
                y = y + bias[:, None]
            outs = out_ptr + (m * stride_o)[None, :]
            gl.store(outs + o[:, None], y.to(out_ptr.dtype.element_ty), mask=there)
            if T > 1:
                scale, bias = _of_outputs(
                    ws_ptr, bias_ptr, tile0 + t + 1, n_cols, HAS_BIAS, N, outputs)


@gluon.jit(do_not_specialize=["n_rows"])
def _add_int8_rows_kernel(
    ws_ptr, xs_ptr, bias_ptr, out_ptr, part_ptr, stride_o, n_cols, n_pieces, n_rows,
    HAS_BIAS: gl.constexpr, PDL: gl.constexpr, SPLIT_K: gl.constexpr, PIECE: gl.constexpr,
    W: gl.constexpr,
):
    """Results of what the programs of a tile left. A program has PIECE of a row."""
    line: gl.constexpr = gl.BlockedLayout([PIECE // (32 * W)], [32], [W], [0])
    if PDL:
        _let_next_kernel_start()
    row = gl.program_id(0) // n_pieces
    scale, bias = _of_outputs(
        ws_ptr, bias_ptr, gl.program_id(0) % n_pieces, n_cols, HAS_BIAS, PIECE, line)
    if PDL:
        _wait_for_earlier_kernels()
    cols = gl.program_id(0) % n_pieces * PIECE + gl.arange(0, PIECE, line)
    ok = cols < n_cols
    whole = gl.full([PIECE], 0, gl.int32, line)
    row64 = row.to(gl.int64)
    for split in gl.static_range(SPLIT_K):
        parts = part_ptr + (row64 + n_rows.to(gl.int64) * split) * n_cols
        whole = whole + gl.load(parts + cols, mask=ok, other=0)
    y = whole.to(gl.float32) * gl.load(xs_ptr + row) * scale
    if HAS_BIAS:
        y = y + bias
    gl.store(out_ptr + row64 * stride_o + cols, y.to(out_ptr.dtype.element_ty), mask=ok)


# fmt: on

# ---- host --------------------------------------------------------------------------------------


def why_unfit(problem: Problem, dev: Device) -> str | None:
    """Reason why this body cannot serve such a problem, whatever the config; None: it can."""
    if dev.arch != "sm90":
        return f"variant rows needs an sm90 device, got {dev.arch}"
    if not device.is_there(gl):
        return "variant rows needs a triton that has Gluon (3.6 or newer), got none"
    if problem["path"] != "int8":
        return f"variant rows has int8 rows alone, got path {problem['path']}"
    if not problem["aligned"]:
        return "variant rows needs rows that divide by 16 bytes"
    return None


def slices_of(config: Config) -> int:
    """``SLICES``: parts of a step, each for warps of its own."""
    warps, block_n = int(config["num_warps"]), int(config["BLOCK_N"])
    return warps // max(1, min(warps, block_n // 32))


def steps_of(config: Config, k: int) -> int:
    """``S``: steps of a program."""
    return cdiv(cdiv(k, config["BLOCK_K"] * slices_of(config)), int(config["SPLIT_K"]))


def tiles_of(config: Config, m: int, n: int, programs: int) -> int:
    """``T``: tiles of a program, so that no more than ``programs`` are there (0: one tile)."""
    n_n = cdiv(n, config["BLOCK_N"])
    beside = cdiv(m, config["BLOCK_M"]) * config["SPLIT_K"]
    return cdiv(n_n, max(1, programs // beside)) if programs else 1


def default_config(problem: Problem, dev: Device) -> Config:
    """Three programs a core, all at once, with three stages of 128 columns.

    With 16 rows on an H200, 384 programs: 4096 x 12288 15.7 us (portable 16.1), 12288 x 4096 15.3
    (17.1).
    """
    most = max(1, AT_ONCE * dev.num_cores // cdiv(problem["n"], 128))
    k = problem["k"]
    split = min(64, max(min(most, k // 512), cdiv(k, 1024)))
    steps = cdiv(k, 128)
    return {
        "BLOCK_M": min(64, max(8, next_power_of_2(problem["m"]))),
        "BLOCK_N": 128,
        "BLOCK_K": 128,
        "SPLIT_K": cdiv(steps, cdiv(steps, split)),  # as many steps each, none for nothing
        "programs_per_core": 0,
        "PDL": True,
        "num_warps": 4,
        "num_stages": 3,
        **FIXED,
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
    if wrong := [f"{name} {value}" for name, value in FIXED.items() if config[name] != value]:
        return f"variant rows has {', '.join(wrong)}"
    if not 1 <= config["SPLIT_K"] <= 64:
        return f"SPLIT_K must be 1 to 64, got {config['SPLIT_K']}"
    if why := why_no_tiles(config):
        return why
    r, n, k = config["BLOCK_M"], config["BLOCK_N"], config["BLOCK_K"]
    warps, stages, slices = config["num_warps"], config["num_stages"], slices_of(config)
    per_core = config["programs_per_core"]
    if not 16 <= (a_warp := n * slices // warps) <= 64:
        return f"a warp has 16 to 64 of the outputs, got {a_warp}"
    steps = steps_of(config, problem["k"])
    tiles = tiles_of(config, problem["m"], problem["n"], per_core * dev.num_cores)
    tile = slices * (stages * n * k + steps * r * k) + 4 * r
    used = with_sums(tile, tiles, slices * n * r)
    if used > dev.local_mem_bytes:
        return f"the tiles take {used} bytes of shared memory, more than {dev.local_mem_bytes}"
    # Sums, a step's weights, x of a product.
    taken = (a_warp * r + a_warp * k // 4) // 32 + r // 2
    on_the_way = x_registers(steps * slices * k * r, warps)
    if (left := few.most_registers(warps, per_core)) < max(64 + taken, 48 + on_the_way):
        return f"{per_core or 1} programs of {warps} warps leave {left} registers a thread, too few"
    return None
