"""The body of ``masked_gemm`` for few rows in int8 on Hopper (sm_90): ``variant`` "few".

Weights are read once, and that is all the time there is. Each warp of a program has a part of K of
its own, with stages of its own in shared memory, and the sums of the warps meet at the end; they
are int32, so their order makes no difference. The first weights are asked for before the kernel
that makes x_q has ended.

Weights are the left operand of ``mma.sync`` (16 outputs, 32 columns), x_q the right one (8 rows). A
lane reads 16 neighbouring bytes at a time of both. An instruction takes 4 of them from each of four
lanes; as the order of terms is free, instruction j takes bytes 4j to 4j + 3 of each lane's 16.
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
FIXED: Config = {"variant": "few", "GROUP_M": 1, "SWAP": False}

# fmt: off


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


@gluon.jit
def _fetch(
    w_s, w_tile, step, first, col_ok, n_inner, STAGES: gl.constexpr, K: gl.constexpr,
    EVEN_K: gl.constexpr, EVEN_N: gl.constexpr, lines: gl.constexpr,
):
    """Start to bring the codes of a step, whole rows of it at once."""
    at = w_tile + step * K
    if EVEN_K and EVEN_N:
        _load_async(w_s.index(step % STAGES), at)
    else:
        ok = col_ok[None, :, None]
        if not EVEN_K:
            k = gl.arange(0, K, gl.SliceLayout(0, gl.SliceLayout(1, lines)))
            left = n_inner - (first + step * K)
            ok = ok & ((k // 16 * 16)[None, None, :] < left[:, None, None])  # 16 bytes or none
        _load_async(w_s.index(step % STAGES), at, mask=ok)


@gluon.jit
def _by_fours(x):
    """Of each 64 columns of x [W, M, C] the first 4 of each 16, the next 4 of each, and so on."""
    w: gl.constexpr = x.shape[0]
    m: gl.constexpr = x.shape[1]
    c: gl.constexpr = x.shape[2]
    x = gl.permute(gl.reshape(x, [w, m, c // 64, 4, 4, 4]), [0, 1, 2, 4, 3, 5])
    return gl.reshape(x, [w, m, c])


@gluon.jit(do_not_specialize=["n_rows", "n_m", "steps"])
def _masked_gemm_few_kernel(
    w_ptr, xq_ptr, ws_ptr, xs_ptr, bias_ptr, out_ptr, part_ptr,
    stride_w, stride_xq,  # in units of 16 bytes
    stride_o, n_cols, n_inner, n_rows, n_m,
    steps,  # of K columns, that a warp takes
    S: gl.constexpr,  # as many or more, where there is one row; else 0
    HAS_BIAS: gl.constexpr, EVEN_K: gl.constexpr, EVEN_N: gl.constexpr, PDL: gl.constexpr,
    R: gl.constexpr, N: gl.constexpr, K: gl.constexpr, SPLIT_K: gl.constexpr,
    STAGES: gl.constexpr, W: gl.constexpr,
):
    CHUNK: gl.constexpr = 64  # columns of x that are read at once
    LANES: gl.constexpr = K // 16  # that fetch a row, 16 bytes each
    sums: gl.constexpr = gl.NVMMADistributedLayout(
        version=[2, 0], warps_per_cta=[W, 1, 1], instr_shape=[1, 16, 8])
    left: gl.constexpr = gl.DotOperandLayout(0, sums, 4)
    right: gl.constexpr = gl.DotOperandLayout(1, sums, 4)
    lines: gl.constexpr = gl.BlockedLayout(
        [1, 1, 16], [1, 32 // LANES, LANES], [W, 1, 1], [2, 1, 0])
    units: gl.constexpr = gl.BlockedLayout([1, 1, 16], [1, 8, 4], [W, 1, 1], [2, 1, 0])
    # Eight lanes read 64 bytes of each of two rows: the rows' halves change places by turns.
    codes: gl.constexpr = gl.SwizzledSharedLayout(64, 1, 2, [2, 1, 0])

    if PDL:
        _let_next_kernel_start()
    split = gl.program_id(0) % SPLIT_K
    place = gl.program_id(0) // SPLIT_K
    row0 = place % n_m * R
    col0 = place // n_m * N

    first = split * W + gl.arange(0, W, gl.SliceLayout(1, gl.SliceLayout(2, lines)))
    first = first * (steps * K)
    n = gl.arange(0, N, gl.SliceLayout(0, gl.SliceLayout(2, lines)))
    k = gl.arange(0, K, gl.SliceLayout(0, gl.SliceLayout(1, lines)))
    ok = n < n_cols - col0
    w_tile = w_ptr + col0.to(gl.int64) * stride_w * 16
    w_tile = w_tile + (n.to(gl.int64) * stride_w * 16)[None, :, None]
    w_tile = w_tile + first[:, None, None] + k[None, None, :]
    w_s = gl.allocate_shared_memory(gl.int8, [STAGES, W, N, K], codes)
    for i in gl.static_range(STAGES - 1):
        if i < steps:
            _fetch(w_s, w_tile, i, first, ok, n_inner, STAGES, K, EVEN_K, EVEN_N, lines)
        _commit()
    # No earlier kernel writes these either, and at the end nothing would cover the way to them.
    rows: gl.constexpr = gl.BlockedLayout([1, 1], [32, 1], [W, 1], [0, 1])
    n = col0 + gl.arange(0, N, gl.SliceLayout(1, rows))
    if SPLIT_K == 1:
        scale = gl.load(ws_ptr + n, mask=n < n_cols, other=0.0)
        if HAS_BIAS:
            bias = gl.load(bias_ptr + n, mask=n < n_cols, other=0.0)
    if PDL:  # nothing above reads what an earlier kernel may write, or stores
        _wait_for_earlier_kernels()

    x_first = split * W + gl.arange(0, W, gl.SliceLayout(1, gl.SliceLayout(2, units)))
    x_first = x_first * (steps * K)
    r = gl.arange(0, R, gl.SliceLayout(0, gl.SliceLayout(2, units)))
    c = gl.arange(0, CHUNK, gl.SliceLayout(0, gl.SliceLayout(1, units)))
    # Rows that are not there are the last one once more: no result of theirs is stored.
    r = gl.minimum(row0 + r, n_rows - 1).to(gl.int64)
    x_tile = xq_ptr + (r * stride_xq * 16)[None, :, None]
    x_tile = x_tile + x_first[:, None, None] + c[None, None, :]

    if S > 0:
        x_s = _row_to_shared(xq_ptr, split * (W * steps * K), steps, n_inner, S, W, K, EVEN_K)

    acc = gl.full([W, N, R], 0, gl.int32, sums)
    for i in range(steps):
        if i + STAGES - 1 < steps:
            _fetch(w_s, w_tile, i + STAGES - 1, first, ok, n_inner, STAGES, K, EVEN_K, EVEN_N,
                   lines)
        _commit()
        if S == 0:
            x_next = _columns_of_x(x_tile, i * K, x_first, n_inner, EVEN_K, CHUNK, units)
        _wait(STAGES - 1)
        weights = gl.convert_layout(
            _by_fours(w_s.index(i % STAGES).load(units)), left, assert_trivial=True)
        weights = _pieces(weights, K // CHUNK)
        for j in gl.static_range(K // CHUNK):
            if S > 0:
                x = _of_row(x_s, i, j * CHUNK, CHUNK, R, units)
            else:
                x = x_next
            if S == 0 and (j + 1) * CHUNK < K:
                x_next = _columns_of_x(
                    x_tile, i * K + (j + 1) * CHUNK, x_first, n_inner, EVEN_K, CHUNK, units)
            x = gl.convert_layout(
                gl.permute(_by_fours(x), [0, 2, 1]), right, assert_trivial=True)
            acc = ampere.mma_v2(weights[j], x, acc)

    whole = gl.convert_layout(gl.sum(acc, 0), rows)
    r = row0 + gl.arange(0, R, gl.SliceLayout(0, rows))
    there = (n < n_cols)[:, None] & (r < n_rows)[None, :]
    r64 = r.to(gl.int64)
    if SPLIT_K > 1:
        parts = part_ptr + ((r64 + split.to(gl.int64) * n_rows) * n_cols)[None, :]
        gl.store(parts + n[:, None], whole, mask=there)
    else:
        y = whole.to(gl.float32) * gl.load(xs_ptr + r, mask=r < n_rows, other=0.0)[None, :]
        y = y * scale[:, None]
        if HAS_BIAS:
            y = y + bias.to(gl.float32)[:, None]
        outs = out_ptr + (r64 * stride_o)[None, :]
        gl.store(outs + n[:, None], y.to(out_ptr.dtype.element_ty), mask=there)


# fmt: on

# ---- host --------------------------------------------------------------------------------------


def why_unfit(problem: Problem, dev: Device) -> str | None:
    """Reason why this body cannot serve such a problem, whatever the config; None: it can."""
    if dev.arch != "sm90":
        return f"variant few needs an sm90 device, got {dev.arch}"
    if not device.is_there(gl):
        return "variant few needs a triton that has Gluon (3.6 or newer), got none"
    if problem["path"] != "int8":
        return f"variant few has int8 rows alone, got path {problem['path']}"
    if not problem["aligned"]:
        return "variant few needs rows that divide by 16 bytes"
    if problem["k"] > few.MOST_COLUMNS:
        return f"variant few has at most {few.MOST_COLUMNS} columns, got {problem['k']}"
    return None


def default_config(problem: Problem, dev: Device) -> Config:
    """Tiles and warps so that all programs run at once, and stages that fill shared memory.

    From 66 configs on an H200, of one row 88 and 125; from 9 rows on the portable body is faster.
    """
    m, n, k = problem["m"], problem["n"], problem["k"]
    if (alone := one_row(problem, dev)) is not None:
        return {**alone, "num_stages": 2 if alone["num_warps"] == 2 else 3, **FIXED}
    rows = max(8, next_power_of_2(m))
    steps = cdiv(k, 128)
    block_n = 16
    tiles = cdiv(n, block_n)
    warps = 2
    while warps < 4 and 2 * warps <= steps:
        warps *= 2
    most = max(1, min(steps // (2 * warps), 6 * dev.num_cores // tiles))
    split = max(s for s in (1, 2, 3, 4, 6, 8) if s <= most)
    return {
        "BLOCK_M": rows,
        "BLOCK_N": block_n,
        "BLOCK_K": 128,
        "SPLIT_K": split,
        "programs_per_core": 0,
        "PDL": True,
        "num_warps": warps,
        "num_stages": max(2, min(4, cdiv(steps, warps * split) + 1)),
        **FIXED,
    }


def why_illegal(config: Config, problem: Problem, dev: Device) -> str | None:
    """Reason why a config of this body cannot be launched; None: it can."""
    if wrong := [f"{name} {value}" for name, value in FIXED.items() if config[name] != value]:
        return f"variant few has {', '.join(wrong)}"
    allowed = {"BLOCK_M": (8, 16, 32, 64), "BLOCK_N": (16, 32, 64), "BLOCK_K": (128, 256, 512)}
    for name, values in allowed.items():
        if config[name] not in values:
            return f"variant few has {name} of {values}, got {config[name]}"
    r, n, k = config["BLOCK_M"], config["BLOCK_N"], config["BLOCK_K"]
    warps, stages = config["num_warps"], config["num_stages"]
    if warps not in (1, 2, 4, 8, 16) or stages < 2:
        return f"num_warps must be 1 to 16 and num_stages 2 or more, got {warps} and {stages}"
    if not 1 <= config["SPLIT_K"] <= 64:
        return f"SPLIT_K must be 1 to 64, got {config['SPLIT_K']}"
    used = max(stages * n * k, 4 * n * r) * warps + 1024 + bytes_of_row(config, problem)
    if used > dev.local_mem_bytes:
        return f"the tiles take {used} bytes of shared memory, more than {dev.local_mem_bytes}"
    if (taken := (r * n + n * k // 4) // 32) > 128:
        return f"the sums and a step's weights take {taken} of 255 registers a thread"
    per_core = config["programs_per_core"]
    if (left := few.most_registers(warps, per_core)) < 32 + taken:
        return f"{per_core} programs of {warps} warps leave {left} registers a thread, too few"
    return None


def one_row(problem: Problem, dev: Device) -> Config | None:
    """What this body takes for one row whose tiles give each core some; else None."""
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
    """``S``: steps of a single row, held in shared memory if registers can bring it; else 0."""
    return next_power_of_2(steps) if rows == 1 and steps * block_k <= 4096 else 0


def bytes_of_row(config: Config, problem: Problem) -> int:
    """Of shared memory that it takes."""
    block_k, warps = int(config["BLOCK_K"]), int(config["num_warps"])
    steps = cdiv(cdiv(problem["k"], block_k), warps * config["SPLIT_K"])
    return steps_in_shared(problem["m"], steps, block_k) * block_k * warps
