"""``moe_w4a16_gemm`` of many rows an expert on Hopper (sm_90): ``variant`` "wide".

Weights become 16-bit numbers in registers on their way to the tensor core, as in
``integer_weights_many``, whose steps these are: outputs stand left in ``wgmma``, BLOCK_M rows of an
expert right, and every fourth column is in one product.

A program has 256 weights, two groups of four warps 128 each: 64 gates and what these multiply, so
that a thread holds both sums; or twice 64 outputs. While the tensor core has the first of a step,
the group decodes the others. One more warp loads, STAGES steps of 128 columns ahead, over the ends
of tiles too.

Rows of x lie in the order of experts, and turned (each 128 columns of it, [32, 4], as [4, 32]): a
small kernel puts them so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from tkernels import device
from tkernels import integer_weights_many as body
from tkernels import masked_gemm_hopper as masked
from tkernels.device import Device, bind, cdiv, next_power_of_2, tl, triton
from tkernels.integer_decoding import UNIT
from tkernels.integer_weights_many import _of_step, _operands
from tkernels.masked_gemm_hopper import _as, _describer, _load_tile
from tkernels.moe_w4a16_core import _place, _tiles_of_experts
from tkernels.ops.moe_gemm import most_tiles
from tkernels.ops.paged_attn import _let_next_kernel_start as _next_may_start
from tkernels.ops.paged_attn import _wait_for_earlier_kernels as _earlier_have_ended
from tkernels.paged_attn_quantized_hopper import _let_next_kernel_start, _wait_for_earlier_kernels
from tkernels.registry import Config, Problem

if TYPE_CHECKING:
    from tkernels import _triton as gl
    from tkernels import _triton as gluon
    from tkernels import _triton as hopper
else:
    gl, gluon, hopper = masked.gl, masked.gluon, masked.hopper

STEP = body.STEP
_BLOCKS = 8  # of 128 columns, that a program turns
ROWS = (16, 32, 64, 128)

# What this body has no choice of.
FIXED: Config = {
    "variant": "wide",
    "BLOCK_K": STEP,
    "SLICES": 1,
    "programs_per_core": 1,
    "SWAP": True,
    "num_warps": 8,
}

# fmt: off


@triton.jit
def _turn_rows_kernel(
    x_ptr, ids_ptr, tw_ptr, out_ptr, weights_ptr, stride_x, n_inner, n_out, n_sources,
    TOP_K: tl.constexpr, ROW_WEIGHT: tl.constexpr, PDL: tl.constexpr, BLOCKS: tl.constexpr,
):
    """Part of a row of x in the order of experts, each 128 columns of it transposed; its weight."""
    if PDL:
        _next_may_start()
        _earlier_have_ended()
    row = tl.program_id(0).to(tl.int64)
    source = row
    if TOP_K > 0 or ROW_WEIGHT:
        given = tl.load(ids_ptr + row).to(tl.int64)
        given = tl.minimum(tl.maximum(given, 0), n_sources * max(TOP_K, 1) - 1)
        if ROW_WEIGHT:  # noqa: SIM102
            if tl.program_id(1) == 0:
                tl.store(weights_ptr + row, tl.load(tw_ptr + given))
        if TOP_K > 0:
            source = given // TOP_K
    to = tl.program_id(1) * (BLOCKS * 128) + tl.arange(0, BLOCKS * 128)
    place = to // 128 * 128 + to % 32 * 4 + to % 128 // 32
    x = tl.load(x_ptr + source * stride_x + place, mask=place < n_inner, other=0.0)
    tl.store(out_ptr + row * n_out + to, x, mask=to < n_out)


@gluon.jit
def _bring_x(
    high_desc, low_desc, bar, x_s, tile, row0, column, rows, R: gl.constexpr,
):
    """Start to bring two halves of the least of R, R / 2, R / 4.. 16 rows that has all ``rows``.

    Weights of the step count on ``bar``, too.
    """
    if R == 16:
        _bring(high_desc, low_desc, bar, x_s, tile, row0, column, R)
    else:
        if rows <= R // 2:
            _bring_x(high_desc, low_desc, bar, x_s, tile, row0, column, rows, R // 2)
        else:
            _bring(high_desc, low_desc, bar, x_s, tile, row0, column, R)


@gluon.jit
def _bring(high_desc, low_desc, bar, x_s, tile, row0, column, R: gl.constexpr):
    # A map brings what has its own number of rows.
    BOX: gl.constexpr = high_desc.block_shape[0] if high_desc.block_shape[0] <= R else 16
    hopper.mbarrier.expect(bar, 4 * 64 * 64 + R * 256)
    parts_s = _of_height(x_s, BOX)
    most: gl.constexpr = x_s.shape[1] // BOX
    for half in gl.static_range(2):
        for part in gl.static_range(R // BOX):
            at = [row0 + part * BOX, column + half * 64]
            to = parts_s.index((tile + half) * most + part)
            if high_desc.block_shape[0] <= R:
                _load_tile(high_desc, at, bar, to)
            else:
                _load_tile(low_desc, at, bar, to)


@gluon.jit
def _load(
    w_desc, high_desc, low_desc, offsets_ptr, w_s, x_s, full, empty, sizes,
    SILU: gl.constexpr, R: gl.constexpr, STAGES: gl.constexpr, E: gl.constexpr,
):
    """Weights of both groups and two halves of x, a step after the other."""
    n_weights, n_out, n_steps, n_experts, n_n = sizes
    tiles, upto = _tiles_of_experts(offsets_ptr, n_experts, R, E)
    n_tiles = gl.sum(tiles, 0) * n_n
    further = n_out if SILU else 128
    count = 0
    for place in range(gl.program_id(0), n_tiles, gl.num_programs(0)):
        expert, row0, end = _place(place // n_n, tiles, upto, offsets_ptr, n_experts, R)
        w_row = expert * n_weights + place % n_n * (128 if SILU else 256)
        for j in range(n_steps):
            stage = count % STAGES
            bar = full.index(stage)
            hopper.mbarrier.wait(empty.index(stage), ((count // STAGES) & 1) ^ 1)
            _bring_x(high_desc, low_desc, bar, x_s, stage * 2, row0, j * 128, end - row0, R)
            for quarter in gl.static_range(4):
                at = [w_row + quarter // 2 * further + quarter % 2 * 64, j * 16]
                _load_tile(w_desc, at, bar, w_s.index(stage * 4 + quarter))
            count += 1


@gluon.jit
def _of_height(x_s, R: gl.constexpr):
    """Tiles of x as those of R rows, which have as many as fit one after the other."""
    shape: gl.constexpr = [x_s.shape[0] * x_s.shape[1] // R, R, x_s.shape[2]]
    return _as(x_s, x_s.dtype, shape, x_s.layout)


@gluon.jit
def _weighted(acc, s_ptr, at, ok, GROUP: gl.constexpr, HAS_ZERO: gl.constexpr, dtype: gl.constexpr):
    """Sums [64, R] of weights as they are counted: times what they are counted in."""
    if GROUP == 0:
        scale = gl.load(s_ptr + at, mask=ok, other=0.0)
        acc = acc * scale.to(gl.float32)[:, None]
    if gl.bfloat16 == dtype:
        acc = acc * (UNIT if GROUP > 0 and not HAS_ZERO else 64.0)
    return acc


@gluon.jit
def _put(
    y, row0, end, out0, out_ptr, stride_o, n_out, R: gl.constexpr,
):
    """Store [64, R], a thread 16 bytes at a time; a warp keeps its 16 outputs."""
    store: gl.constexpr = gl.BlockedLayout([1, 8], [16, 2], [1, 4], [1, 0])
    y = gl.convert_layout(y.to(out_ptr.dtype.element_ty).permute([1, 0]), store)
    rows = row0 + gl.arange(0, R, gl.SliceLayout(1, store))
    cols = out0 + gl.arange(0, 64, gl.SliceLayout(0, store))
    at = out_ptr + (rows.to(gl.int64) * stride_o)[:, None] + cols[None, :]
    gl.store(at, y, mask=(rows < end)[:, None] & (cols < n_out)[None, :])


@gluon.jit
def _multiply(
    SIDE: gl.constexpr, shared, given, sizes, GROUP: gl.constexpr, HAS_ZERO: gl.constexpr,
    SILU: gl.constexpr, ROW_WEIGHT: gl.constexpr, R: gl.constexpr, STAGES: gl.constexpr,
    E: gl.constexpr,
):
    """Group SIDE's twice 64 weights of each tile, times the x that both groups share."""
    offsets_ptr = given[3]
    _, _, n_steps, n_experts, n_n = sizes
    tiles, upto = _tiles_of_experts(offsets_ptr, n_experts, R, E)
    n_tiles = gl.sum(tiles, 0) * n_n
    count = 0
    for place in range(gl.program_id(0), n_tiles, gl.num_programs(0)):
        expert, row0, end = _place(place // n_n, tiles, upto, offsets_ptr, n_experts, R)
        out0 = place % n_n * (128 if SILU else 256) + SIDE * 64
        _by_height(
            SIDE, expert, row0, end, out0, count, shared, given, sizes, GROUP, HAS_ZERO, SILU,
            ROW_WEIGHT, R, STAGES)
        count += n_steps


@gluon.jit
def _by_height(
    SIDE: gl.constexpr, expert, row0, end, out0, count, shared, given, sizes, GROUP: gl.constexpr,
    HAS_ZERO: gl.constexpr, SILU: gl.constexpr, ROW_WEIGHT: gl.constexpr, R: gl.constexpr,
    STAGES: gl.constexpr,
):
    """``_tile`` of as many rows as there are (``_height``)."""
    if R == 16:
        _tile(SIDE, expert, row0, end, out0, count, shared, given, sizes, GROUP, HAS_ZERO, SILU,
              ROW_WEIGHT, R, STAGES)
    else:
        if end - row0 <= R // 2:
            _by_height(SIDE, expert, row0, end, out0, count, shared, given, sizes, GROUP, HAS_ZERO,
                       SILU, ROW_WEIGHT, R // 2, STAGES)
        else:
            _tile(SIDE, expert, row0, end, out0, count, shared, given, sizes, GROUP, HAS_ZERO,
                  SILU, ROW_WEIGHT, R, STAGES)


@gluon.jit
def _tile(
    SIDE: gl.constexpr, expert, row0, end, out0, count, shared, given, sizes, GROUP: gl.constexpr,
    HAS_ZERO: gl.constexpr, SILU: gl.constexpr, ROW_WEIGHT: gl.constexpr, R: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Outputs from out0 on, and those ``further`` on, of R rows from row0 on."""
    w_s, all_x_s, full, empty = shared
    s_ptr, z_ptr, tw_ptr, _, out_ptr, stride_s, stride_o, n_groups = given
    n_weights, n_out, n_steps, _, _ = sizes
    BESIDE: gl.constexpr = all_x_s.shape[1] // R  # tiles of R rows in the place of a tile
    x_s = _of_height(all_x_s, R)
    dtype: gl.constexpr = x_s.dtype
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, R, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    EVERY: gl.constexpr = GROUP if GROUP > 0 else 1 << 30  # columns with one scale
    further = n_out if SILU else 128
    first = (expert * n_weights).to(gl.int64)
    o = out0 + gl.arange(0, 64, gl.SliceLayout(1, left))
    ok = o < n_out
    ok2 = ok if SILU else o + 128 < n_out
    at = (first + o) * stride_s
    at2 = at + (first * 0 + further) * stride_s
    # Scales and zero points are asked for two steps ahead.
    scales = _of_step(s_ptr, at, ok, 0, n_groups, 0.0, EVERY, 0)
    scales2 = _of_step(s_ptr, at2, ok2, 0, n_groups, 0.0, EVERY, 0)
    next_scales = _of_step(s_ptr, at, ok, 1, n_groups, 0.0, EVERY, 0)
    next_scales2 = _of_step(s_ptr, at2, ok2, 1, n_groups, 0.0, EVERY, 0)
    zeros = scales
    zeros2 = scales
    next_zeros = scales
    next_zeros2 = scales
    if HAS_ZERO:
        zeros = _of_step(z_ptr, at, ok, 0, n_groups, 0, EVERY, 0)
        zeros2 = _of_step(z_ptr, at2, ok2, 0, n_groups, 0, EVERY, 0)
        next_zeros = _of_step(z_ptr, at, ok, 1, n_groups, 0, EVERY, 0)
        next_zeros2 = _of_step(z_ptr, at2, ok2, 1, n_groups, 0, EVERY, 0)
    acc = gl.zeros([64, R], gl.float32, layout)
    acc2 = acc
    for j in range(n_steps):
        stage = count % STAGES
        hopper.mbarrier.wait(full.index(stage), (count // STAGES) & 1)
        xa = x_s.index(stage * 2 * BESIDE).permute([1, 0])
        xb = x_s.index(stage * 2 * BESIDE + BESIDE).permute([1, 0])
        codes = w_s.index(stage * 4 + SIDE).load(left)
        codes2 = w_s.index(stage * 4 + 2 + SIDE).load(left)
        a, b = _operands(codes, scales, zeros, dtype, 4, GROUP, HAS_ZERO, left)
        acc = hopper.warpgroup_mma(a, xa, acc, is_async=True)
        acc = hopper.warpgroup_mma(b, xb, acc, is_async=True)
        a2, b2 = _operands(codes2, scales2, zeros2, dtype, 4, GROUP, HAS_ZERO, left)
        if GROUP > 0:
            scales = next_scales
            scales2 = next_scales2
            next_scales = _of_step(s_ptr, at, ok, j + 2, n_groups, 0.0, EVERY, 0)
            next_scales2 = _of_step(s_ptr, at2, ok2, j + 2, n_groups, 0.0, EVERY, 0)
            if HAS_ZERO:
                zeros = next_zeros
                zeros2 = next_zeros2
                next_zeros = _of_step(z_ptr, at, ok, j + 2, n_groups, 0, EVERY, 0)
                next_zeros2 = _of_step(z_ptr, at2, ok2, j + 2, n_groups, 0, EVERY, 0)
        acc2 = hopper.warpgroup_mma(a2, xa, acc2, is_async=True)
        acc2 = hopper.warpgroup_mma(b2, xb, acc2, is_async=True)
        acc, acc2 = hopper.warpgroup_mma_wait(0, deps=[acc, acc2])
        hopper.mbarrier.arrive(empty.index(stage), count=1)
        count += 1
    n = out0 + gl.arange(0, 64, gl.SliceLayout(1, layout))
    at_n = (first + n) * stride_s
    at_n2 = at_n + (first * 0 + further) * stride_s
    ok_n2 = n < n_out if SILU else n + 128 < n_out
    y = _weighted(acc, s_ptr, at_n, n < n_out, GROUP, HAS_ZERO, dtype)
    up = _weighted(acc2, s_ptr, at_n2, ok_n2, GROUP, HAS_ZERO, dtype)
    if SILU:
        # As in silu_and_mul: exp(-y) must not leave fp32, and NaN passes.
        y = gl.where(y < -88.0, 0.0, y / (1.0 + gl.exp(-y))) * up
    if ROW_WEIGHT:
        r = row0 + gl.arange(0, R, gl.SliceLayout(0, layout))
        weights = gl.load(tw_ptr + r, mask=r < end, other=0.0)[None, :]
        y = y * weights
        up = up * weights
    _put(y, row0, end, out0, out_ptr, stride_o, n_out, R)
    if not SILU:
        _put(up, row0, end, out0 + 128, out_ptr, stride_o, n_out, R)


@gluon.jit(do_not_specialize=["n_steps", "n_experts"])
def _moe_w4a16_wide_kernel(
    w_desc, high_desc, low_desc, s_ptr, z_ptr,
    tw_ptr,  # fp32, in the order of experts
    offsets_ptr, out_ptr, stride_s, stride_o, n_groups, n_weights, n_out, n_steps, n_n, n_experts,
    GROUP: gl.constexpr,  # columns with one scale; 0: a row has one
    HAS_ZERO: gl.constexpr, SILU: gl.constexpr, ROW_WEIGHT: gl.constexpr, PDL: gl.constexpr,
    R: gl.constexpr, STAGES: gl.constexpr, E: gl.constexpr,
):
    dtype: gl.constexpr = out_ptr.dtype.element_ty
    words: gl.constexpr = gl.NVMMASharedLayout(
        swizzle_byte_width=64, element_bitwidth=32, rank=2)
    halves: gl.constexpr = gl.NVMMASharedLayout(
        swizzle_byte_width=64, element_bitwidth=16, rank=2)
    rows: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    bar_layout: gl.constexpr = hopper.mbarrier.MBarrierLayout()
    if PDL:
        _let_next_kernel_start()
        _wait_for_earlier_kernels()
    w_s = gl.allocate_shared_memory(gl.int32, [STAGES * 4, 64, 16], words)
    codes_s = _as(w_s, gl.int16, [STAGES * 4, 64, 32], halves)
    x_s = gl.allocate_shared_memory(dtype, [STAGES * 2, R, 64], rows)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar_layout)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar_layout)
    for i in gl.static_range(STAGES):
        hopper.mbarrier.init(full.index(i), count=1)
        hopper.mbarrier.init(empty.index(i), count=2)
    hopper.fence_async_shared()
    sizes = (n_weights, n_out, n_steps, n_experts, n_n)
    shared = (codes_s, x_s, full, empty)
    given = (s_ptr, z_ptr, tw_ptr, offsets_ptr, out_ptr, stride_s, stride_o, n_groups)
    gl.warp_specialize(
        [
            (_multiply, (0, shared, given, sizes, GROUP, HAS_ZERO, SILU, ROW_WEIGHT, R, STAGES,
                         E)),
            (_multiply, (1, shared, given, sizes, GROUP, HAS_ZERO, SILU, ROW_WEIGHT, R, STAGES,
                         E)),
            (_load, (w_desc, high_desc, low_desc, offsets_ptr, w_s, x_s, full, empty, sizes, SILU,
                     R, STAGES, E)),
        ],
        [4, 1], [232, 40])


# fmt: on

# ---- host --------------------------------------------------------------------------------------


def why_unfit(problem: Problem, dev: Device) -> str | None:
    """Reason why this body cannot serve such a problem, whatever the config; None: it can."""
    n, k = problem["n"], problem["k"]
    if why := body.why_unfit(n, k, dev):
        return why
    if not problem["aligned"] or k % 32:
        return f"variant wide needs aligned rows and K to be a multiple of 32, got {k}"
    if problem["group"] != k and problem["scale"] != problem["dtype"]:
        return f"variant wide has scales of x's dtype, got {problem['scale']}"
    return None


def shared_bytes(config: Config) -> int:
    """Of shared memory: stages of weights and x, and what results go through."""
    return int(config["num_stages"] * (4 * 64 * 64 + 256 * config["BLOCK_M"]) + 4608)


def why_illegal(config: Config, problem: Problem, dev: Device) -> str | None:
    """Reason why a config of this body cannot be launched for a problem; None: it can."""
    if why := why_unfit(problem, dev):
        return why
    fixed = {**FIXED, "BLOCK_N": 128 if problem["silu_and_mul"] else 256}
    if wrong := [f"{name} {v}" for name, v in fixed.items() if config[name] != v]:
        return f"variant wide has {', '.join(wrong)}"
    if config["BLOCK_M"] not in ROWS:
        return f"variant wide has BLOCK_M of {', '.join(map(str, ROWS))}, got {config['BLOCK_M']}"
    if config["num_stages"] < 2:
        return f"variant wide needs num_stages of 2 or more, got {config['num_stages']}"
    if (used := shared_bytes(config)) > dev.local_mem_bytes:
        return f"the tiles take {used} bytes of shared memory, more than {dev.local_mem_bytes}"
    return None


def is_default(problem: Problem) -> bool:
    """Whether experts have so many rows that weights are better decoded once for all of them.

    From an H200 (CONTRIBUTING, "Measured facts").
    """
    least = 8 if problem["silu_and_mul"] else 12
    return bool(problem["rows"] >= least * problem["experts"])


def default_config(problem: Problem) -> Config:
    """Tiles of 128 rows, or as many as there are, and as many stages as fit."""
    many = problem["rows"] >= 64 * problem["experts"]
    rows = 128 if problem["silu_and_mul"] or many else 64
    return {
        **FIXED,
        "BLOCK_M": rows,
        "BLOCK_N": 128 if problem["silu_and_mul"] else 256,
        "PDL": True,
        "num_stages": 4 if rows == 128 else 6,
    }


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
    rows, steps, weighted = config["BLOCK_M"], cdiv(k, STEP), facts["ROW_WEIGHT"]
    across = steps * STEP
    n_n = cdiv(n_out, config["BLOCK_N"])
    pdl = {"launch_pdl": True} if config["PDL"] else {}
    turn = bind(
        _turn_rows_kernel,
        (r, cdiv(steps, _BLOCKS)),
        TOP_K=facts["TOP_K"],
        ROW_WEIGHT=weighted,
        PDL=config["PDL"],
        BLOCKS=_BLOCKS,
        num_warps=4,
        **pdl,
    )
    start = device.bind_described(
        _moe_w4a16_wide_kernel,
        (min(most_tiles(r, e, rows) * n_n, max_programs),),
        (
            _describer((e * n, k // 8, k // 8), 64, STEP // 8, 32, 64),
            _describer((r, across, across), min(64, rows), 64, 16, 128),
            _describer((r, across, across), 16, 64, 16, 128),
        ),
        **{name: value for name, value in facts.items() if name != "TOP_K"},
        PDL=config["PDL"],
        R=rows,
        STAGES=config["num_stages"],
        E=next_power_of_2(e),
        num_warps=4,
        **pdl,
    )
    groups = k // problem["group"]
    numbers = (groups, strides[1], groups, n, n_out, steps, n_n, e)

    def run(
        x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, offsets: torch.Tensor,
        ids: torch.Tensor, out: torch.Tensor, zero: Any, weights: Any,
    ) -> None:  # fmt: skip
        turned = torch.empty((r, across), dtype=x.dtype, device=x.device)
        # What is not there is stood in for by something that is, and not read.
        zero, weights = (offsets if t is None else t for t in (zero, weights))
        ordered = torch.empty(r, dtype=torch.float32, device=x.device) if weighted else weights
        turn(x, ids, weights, turned, ordered, strides[0], k, across, n_sources)
        start(weight, turned, turned, scale, zero, ordered, offsets, out, *numbers)

    return run
