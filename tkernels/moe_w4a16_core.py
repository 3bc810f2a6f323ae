"""``moe_w4a16_gemm`` on Hopper (sm_90): ``variant`` "core".

The steps are those of ``integer_weights_few``: outputs stand left in ``mma.sync``, 8 to 64 rows of
an expert right, codes become numbers in the lane that read them. What is here is where tiles lie.

A program has BLOCK_N outputs of BLOCK_M rows of an expert, or as many gates and what they multiply,
and as much of K as there is. Weights are what is read, so a core holds several programs: one looks
up its expert and waits for memory while others multiply. Tiles of an expert's outputs follow each
other. A program takes every ``programs``-th tile, or has one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from tkernels import device
from tkernels import few_rows_hopper as few
from tkernels import integer_weights_few as body
from tkernels.device import Device, bind, cdiv, next_power_of_2
from tkernels.integer_weights_few import _sum_of_slices, _sums_of_tiles
from tkernels.ops.moe_gemm import most_tiles
from tkernels.paged_attn_quantized_hopper import _let_next_kernel_start, _wait_for_earlier_kernels
from tkernels.registry import Config, Problem

if TYPE_CHECKING:
    from tkernels import _triton as gl
    from tkernels import _triton as gluon
else:
    gl, gluon = few.gl, few.gluon

BITS = 4

# fmt: off


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _tiles_of_experts(offsets_ptr, n_experts, R: gl.constexpr, E: gl.constexpr):
    """(row tiles of each expert, those up to and with it), the same in each warp."""
    layout: gl.constexpr = gl.BlockedLayout([max(E // 32, 1)], [32], [gl.num_warps()], [0])
    e = gl.arange(0, E, layout)
    ok = e < n_experts
    first = gl.load(offsets_ptr + e, mask=ok, other=0)
    end = gl.load(offsets_ptr + 1 + e, mask=ok, other=0)
    tiles = (end - first + R - 1) // R
    return tiles, gl.associative_scan(tiles, 0, _add)


@gluon.jit
def _place(m_tile, tiles, upto, offsets_ptr, n_experts, R: gl.constexpr):
    """(expert, first row, end of the expert's rows) of a row tile."""
    before = upto <= m_tile
    expert = gl.minimum(gl.sum(before.to(gl.int32), 0), n_experts - 1)
    tiles_before = gl.sum(gl.where(before, tiles, 0), 0)
    row0 = gl.load(offsets_ptr + expert) + (m_tile - tiles_before) * R
    return expert, row0, gl.load(offsets_ptr + expert + 1)


@gluon.jit(do_not_specialize=["stride_w", "n_experts", "n_sources"])
def _moe_w4a16_core_kernel(
    x_ptr, w_ptr, s_ptr, z_ptr, offsets_ptr, ids_ptr, tw_ptr, out_ptr,
    stride_x, stride_w,  # in units of 16 bytes
    stride_s, stride_o, n_weights, n_out, n_inner, n_n, n_experts, n_sources,
    S: gl.constexpr,  # steps of a tile, of K columns for each slice
    HERE: gl.constexpr,  # times N outputs a tile
    Q: gl.constexpr,  # scales of an output; a power of two
    GROUP: gl.constexpr,  # columns with one scale; 0: a row has one
    HAS_ZERO: gl.constexpr, SILU: gl.constexpr, ROW_WEIGHT: gl.constexpr,
    TOP_K: gl.constexpr,  # 0: x is in the order of experts
    EVEN_K: gl.constexpr, EVEN_N: gl.constexpr, PDL: gl.constexpr,
    E: gl.constexpr, R: gl.constexpr, N: gl.constexpr, K: gl.constexpr, STAGES: gl.constexpr,
    SLICES: gl.constexpr, W: gl.constexpr,
):
    T: gl.constexpr = 2 * HERE if SILU else HERE
    BESIDE: gl.constexpr = N if N < 32 else 32
    rows: gl.constexpr = gl.BlockedLayout([1, 1], [BESIDE, 32 // BESIDE], [1, W], [0, 1])
    if PDL:
        _let_next_kernel_start()
        _wait_for_earlier_kernels()
    tiles, upto = _tiles_of_experts(offsets_ptr, n_experts, R, E)
    n_tiles = gl.sum(tiles, 0) * n_n
    stride = stride_w.to(gl.int64) * 8
    for place in range(gl.program_id(0), n_tiles, gl.num_programs(0)):
        expert, row0, end = _place(place // n_n, tiles, upto, offsets_ptr, n_experts, R)
        tile0 = place % n_n * HERE
        first = (expert * n_weights).to(gl.int64)
        w_first = w_ptr.to(gl.pointer_type(gl.int16)) + (first + tile0 * N) * stride
        at_s = first * stride_s
        sums_s = _sums_of_tiles(
            x_ptr, w_first, s_ptr + at_s, z_ptr + at_s, ids_ptr, stride_x, stride, stride_s,
            stride_s, tile0, row0, end, 0, n_out, n_inner, n_sources, S, T, HERE, Q, 4, GROUP,
            HAS_ZERO, EVEN_K, EVEN_N, False, TOP_K, R, N, K, STAGES, SLICES, W)
        # Results lie so that lanes store neighbours.
        r = row0 + gl.arange(0, R, gl.SliceLayout(0, rows))
        row_ok = r < end
        if ROW_WEIGHT:
            ids = gl.load(ids_ptr + r, mask=row_ok, other=0)
            ids = gl.minimum(gl.maximum(ids, 0), n_sources * max(TOP_K, 1) - 1)
            weights = gl.load(tw_ptr + ids, mask=row_ok, other=0.0)
        for tile in gl.static_range(HERE):
            y = _sum_of_slices(sums_s, tile, rows)
            if SILU:
                # As in silu_and_mul: exp(-y) must not leave fp32, and NaN passes.
                up = _sum_of_slices(sums_s, HERE + tile, rows)
                y = gl.where(y < -88.0, 0.0, y / (1.0 + gl.exp(-y))) * up
            if ROW_WEIGHT:
                y = y * weights[None, :]
            n = (tile0 + tile) * N + gl.arange(0, N, gl.SliceLayout(1, rows))
            outs = out_ptr + (r.to(gl.int64) * stride_o)[None, :] + n[:, None]
            ok = (n < n_out)[:, None] & row_ok[None, :]
            gl.store(outs, y.to(out_ptr.dtype.element_ty), mask=ok)


# fmt: on

# ---- host --------------------------------------------------------------------------------------


def why_unfit(problem: Problem, dev: Device) -> str | None:
    """Reason why this body cannot serve such a problem, whatever the config; None: it can."""
    group, k = problem["group"], problem["k"]
    if why := body.why_unfit(k, dev):
        return why
    if not problem["aligned"] or k % 32:
        return f"variant core needs aligned rows and K to be a multiple of 32, got {k}"
    if group != k and group < 64:
        return f"variant core has groups of 64 or more, got {group}"
    return None


def _outputs(config: Config) -> int:
    """``N``: outputs that all warps of a slice have of a tile, sixteen each."""
    return int(16 * config["num_warps"] // config["SLICES"])


def _tiles(config: Config, problem: Problem) -> int:
    """``T``: how many N outputs a program has at once, gates and others."""
    return int(config["BLOCK_N"] // _outputs(config) * (2 if problem["silu_and_mul"] else 1))


def _as_few(config: Config) -> Config:
    return {**config, "SPLIT_K": 1}


def shared_bytes(config: Config, problem: Problem) -> int:
    """Of shared memory: stages of weights and x, scales and zero points; then sums of slices."""
    r, k, slices = (config[name] for name in ("BLOCK_M", "BLOCK_K", "SLICES"))
    outputs = _tiles(config, problem) * _outputs(config)
    stages = config["num_stages"] * slices * k * (outputs * BITS // 8 + 2 * r)
    of_a_scale = problem["scale"].itemsize + (2 if problem["zero"] else 0)
    scales = outputs * body.scales_of(_as_few(config), problem) * of_a_scale
    return int(max(stages + scales, 4 * outputs * slices * r) + 1024)


def per_core(config: Config, problem: Problem, dev: Device) -> int:
    """Programs that a core has room for: of shared memory, and 64 registers a thread at least."""
    used = shared_bytes(config, problem) + 1024
    room = (dev.local_mem_bytes + 1024) // used
    return int(max(1, min(room, 65536 // (32 * config["num_warps"] * _registers(config, problem)))))


def _registers(config: Config, problem: Problem) -> int:
    """An estimate of what a thread needs: sums, those of a group, codes and x of two steps."""
    tiles, r, k = _tiles(config, problem), config["BLOCK_M"], config["BLOCK_K"]
    codes = tiles * 16 * k * BITS // 1024
    taken = 2 * tiles * 16 * r // 32 + 2 * codes + r * k // 32 + 64
    of_step = max(1, k // problem["group"]) - 1
    return int(taken + of_step * tiles * 2 * (4 if problem["zero"] else 2))


def why_illegal(config: Config, problem: Problem, dev: Device) -> str | None:
    """Reason why a config of this body cannot be launched for a problem; None: it can."""
    if why := why_unfit(problem, dev):
        return why
    allowed = {
        "BLOCK_M": (8, 16, 32, 64),
        "BLOCK_N": (16, 32, 64, 128),
        "BLOCK_K": (64, 128, 256),
        "SLICES": (1, 2, 4, 8),
        "num_warps": (2, 4, 8),
    }
    for name, values in allowed.items():
        if config[name] not in values:
            return f"variant core has {name} of {values}, got {config[name]}"
    if not 2 <= config["num_stages"] <= 8:
        return f"variant core has num_stages of 2 to 8, got {config['num_stages']}"
    slices, k = config["SLICES"], config["BLOCK_K"]
    if slices > config["num_warps"]:
        return f"variant core has a warp or more a slice, got {slices} slices"
    if (n := _outputs(config)) > config["BLOCK_N"]:
        return f"{config['num_warps']} warps have {n} outputs, more than BLOCK_N"
    if not 128 <= slices * k <= 1024:
        return f"a step has 128 to 1024 columns, got {slices * k}"
    if (tiles := _tiles(config, problem)) > body.MOST_TILES:
        return f"a program has at most {body.MOST_TILES} tiles, got {tiles}"
    used = shared_bytes(config, problem)
    if used > dev.local_mem_bytes:
        return f"the tiles take {used} bytes of shared memory, more than {dev.local_mem_bytes}"
    if (taken := _registers(config, problem)) > 255:
        return f"{tiles} tiles of {config['BLOCK_M']} rows take {taken} of 255 registers a thread"
    # Scales and zero points come at a time when there is little else.
    outputs = tiles * n
    numbers = outputs * body.scales_of(_as_few(config), problem) * (2 if problem["zero"] else 1)
    if numbers > 128 * 32 * config["num_warps"]:
        return f"{numbers} scales and zero points of a tile do not fit registers"
    return None


def default_config(problem: Problem, dev: Device) -> Config:
    """Forms that took the least time on an H200 (CONTRIBUTING, "Measured facts")."""
    per_expert = problem["rows"] // problem["experts"]
    config: Config = {
        "BLOCK_M": 8,
        "BLOCK_N": 64,
        "BLOCK_K": 128,
        "SLICES": 1,
        "programs_per_core": 0,
        "variant": "core",
        "SWAP": True,
        "PDL": True,
        "num_warps": 2,
        "num_stages": 6,
    }
    if 2 * problem["rows"] <= problem["experts"]:  # a program's latency counts
        config |= {"SLICES": 4, "num_warps": 4, "BLOCK_N": 32, "BLOCK_K": 64}
        if problem["silu_and_mul"]:
            config |= {"BLOCK_N": 16, "BLOCK_K": 128, "num_stages": 3}
    elif problem["silu_and_mul"]:
        config |= {"SLICES": 2, "num_warps": 4, "BLOCK_N": 32}
    elif per_expert >= 8:
        config |= {"BLOCK_M": 16, "num_warps": 4, "BLOCK_N": 128}
    while why_illegal(config, problem, dev) is not None and config["num_stages"] > 2:
        config["num_stages"] -= 1
    return config


def bound(
    sizes: tuple[int, int, int, int, int],
    facts: dict[str, Any],
    strides: tuple[int, int],
    config: Config,
    problem: Problem,
    max_programs: int,
) -> Callable[..., None]:
    """What multiplies: ``run(x, weight, scale, offsets, ids, out, zero, weights)``.

    ``sizes``: rows, experts, N, K, rows of x; ``strides``: of rows of x and of out.
    """
    r, e, n, k, n_sources = sizes
    n_out = n // 2 if facts["SILU"] else n
    outputs, warps, slices = _outputs(config), config["num_warps"], config["SLICES"]
    steps = body.steps_of(_as_few(config), k)
    n_n = cdiv(n_out, config["BLOCK_N"])
    start = bind(
        _moe_w4a16_core_kernel,
        (min(most_tiles(r, e, config["BLOCK_M"]) * n_n, max_programs),),
        **facts,
        EVEN_K=k == steps * slices * config["BLOCK_K"],
        EVEN_N=n_out % config["BLOCK_N"] == 0,
        PDL=config["PDL"],
        S=steps,
        HERE=config["BLOCK_N"] // outputs,
        Q=body.scales_of(_as_few(config), problem),
        E=next_power_of_2(e),
        R=config["BLOCK_M"],
        N=outputs,
        K=config["BLOCK_K"],
        STAGES=config["num_stages"],
        SLICES=slices,
        W=warps,
        num_warps=warps,
        maxnreg=few.most_registers(warps, per_core(config, problem, device.current())),
        **({"launch_pdl": True} if config["PDL"] else {}),
    )
    groups = k // problem["group"]
    numbers = (strides[0] // 8, k // 32, groups, strides[1], n, n_out, k, n_n, e, n_sources)

    def run(
        x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, offsets: torch.Tensor,
        ids: torch.Tensor, out: torch.Tensor, zero: Any, weights: Any,
    ) -> None:  # fmt: skip
        # What is not there is stood in for by something that is, and not read.
        zero, weights = (offsets if t is None else t for t in (zero, weights))
        start(x, weight, scale, zero, offsets, ids, weights, out, *numbers)

    return run
