"""Products of 16-bit rows and weights of 4 or 8 bits on Hopper (sm_90): ``variant`` "wide".

Weights become 16-bit numbers in registers, and go from there to the tensor core: the left operand
of ``wgmma`` may lie in registers, so outputs stand left and BLOCK_M rows of x right. A program has
64 outputs for each of its groups of four warps, two or three, which share x; one more warp loads
weights and x with TMA, STAGES steps of 128 columns ahead, over the ends of tiles too.

``integer_decoding`` says how codes become numbers in the lane that read them. It puts every fourth
column in one product, of weights of 8 bits every second, so a small kernel lays x out like that
first (each 128 columns, [32, 4], as [4, 32]); the loader has asked for its first weights by then.

Products and decoding overlap little, however the groups take turns (they share the ports of the
register file), so decoding does as little as can be. A step of two groups, 64 rows and 4 bits took
930 cycles of an H200, 690 with nothing decoded and 380 with nothing multiplied; a product of 64 x
64 x 16 takes 43 there, not 32, as its left operand has to come. Hence a weight's scale is
multiplied in by the instruction that decodes it,

    w = round((q - 8) * scale)                  bf16 without zero points: rounded once
    w = round(round(q - zero) * scale)          else; q - zero is exact

to x's dtype, as dequantised weights of 16 bits are rounded. (There scales are below 2^11: see
``integer_decoding``.) A scale a row is left to the sums, which are fp32, and so are those of groups
of weights of 8 bits, of 128 columns or more: each step then has a sum of its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from tkernels import device
from tkernels import masked_gemm_hopper as masked
from tkernels.device import Device, bind, cdiv, tl, triton
from tkernels.integer_decoding import (
    PARTS_OF_FP8,
    UNIT,
    _less,
    _numbers,
    _numbers_of_bytes,
    _numbers_of_fp8,
    _scaled_numbers,
    _scaled_steps,
)
from tkernels.masked_gemm_hopper import _as, _describer, _load_tile
from tkernels.ops.paged_attn import _let_next_kernel_start as _next_may_start
from tkernels.ops.paged_attn import _wait_for_earlier_kernels as _earlier_have_ended
from tkernels.paged_attn_quantized_hopper import (
    _let_next_kernel_start,
    _wait_for_earlier_kernels,
)
from tkernels.registry import Config

if TYPE_CHECKING:
    from tkernels import _triton as gl
    from tkernels import _triton as gluon
    from tkernels import _triton as hopper
else:
    gl, gluon, hopper = masked.gl, masked.gluon, masked.hopper

STEP = 128  # columns of a step
OUTPUTS = 64  # of a group of four warps: what one wgmma takes
MOST_OUTPUTS = 1 << 22  # so that places in a tile of 256 rows are counted in 32 bits
_BLOCKS = 8  # of 128 columns, that a program turns
MOST_COLUMNS = 65535 * _BLOCKS * STEP  # of x: a grid's second axis has up to 65535 programs
ROWS = (8, 16, 32, 64, 128, 256)

# What this body has no choice of.
FIXED: Config = {
    "variant": "wide",
    "BLOCK_N": OUTPUTS,  # of a group
    "BLOCK_K": STEP,
    "programs_per_core": 1,
}

# fmt: off


# ---- x is turned -------------------------------------------------------------------------------


@triton.jit
def _turn_kernel(
    x_ptr, out_ptr, stride_x, n_inner, n_out, EVERY: tl.constexpr, PDL: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Part of a row of x, each 128 columns of it as [128 / EVERY, EVERY] transposed."""
    SIDE: tl.constexpr = 128 // EVERY
    if PDL:
        _next_may_start()
        _earlier_have_ended()
    row = tl.program_id(0).to(tl.int64)
    to = tl.program_id(1) * (BLOCKS * 128) + tl.arange(0, BLOCKS * 128)
    place = to // 128 * 128 + to % SIDE * EVERY + to % 128 // SIDE
    x = tl.load(x_ptr + row * stride_x + place, mask=place < n_inner, other=0.0)
    tl.store(out_ptr + row * n_out + to, x, mask=to < n_out)


# ---- one warp loads ----------------------------------------------------------------------------


@gluon.jit
def _item(item, n_m, n_n, n_steps, SPLIT_K: gl.constexpr):
    """(tile of rows, tile of outputs, split, first step, end of steps)."""
    m = item % n_m
    n = item // n_m % n_n
    split = item // (n_m * n_n)
    return m, n, split, split * n_steps // SPLIT_K, (split + 1) * n_steps // SPLIT_K


@gluon.jit
def _load(
    w_desc, x_desc, w_s, x_s, full, empty, sizes,
    BITS: gl.constexpr, R: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr,
    SPLIT_K: gl.constexpr, PDL: gl.constexpr,
):
    """Weights of each group and two halves of x, a step after the other; weights of the first one
    ahead of the wait for earlier kernels."""
    _, _, n_steps, n_m, n_n, n_items = sizes
    STRIDE: gl.constexpr = 16 if BITS == 4 else 128  # words, or bytes, of a step
    count = 0
    for item in range(gl.program_id(0), n_items, gl.num_programs(0)):
        m, n, _, first, end = _item(item, n_m, n_n, n_steps, SPLIT_K)
        for j in range(first, end):
            stage = count % STAGES
            bar = full.index(stage)
            hopper.mbarrier.wait(empty.index(stage), ((count // STAGES) & 1) ^ 1)
            hopper.mbarrier.expect(bar, GROUPS * 64 * 16 * BITS + R * 256)
            for group in gl.static_range(GROUPS):
                at = [(n * GROUPS + group) * 64, j * STRIDE]
                _load_tile(w_desc, at, bar, w_s.index(stage * GROUPS + group))
            if PDL:  # noqa: SIM102 (what is known at compile time stands alone)
                if count == 0:
                    _wait_for_earlier_kernels()
            for half in gl.static_range(2):
                at = [m * R, j * 128 + half * 64]
                _load_tile(x_desc, at, bar, x_s.index(stage * 2 + half))
            count += 1


# ---- groups of four warps decode and multiply --------------------------------------------------


@gluon.jit
def _beside(a, b, layout: gl.constexpr):
    """[N, C] and [N, C] as [N, 2C]; no number changes its lane."""
    n: gl.constexpr = a.shape[0]
    c: gl.constexpr = a.shape[1]
    both = gl.reshape(gl.permute(gl.join(a, b), [0, 2, 1]), [n, 2 * c])
    return gl.convert_layout(both, layout, assert_trivial=True)


@gluon.jit
def _of_step(
    ptr, at, ok, j, n_groups, other: gl.constexpr, GROUP: gl.constexpr, PIECE: gl.constexpr,
):
    """[64] scales or zero points of each group of columns in step j, from its group PIECE on."""
    g = j * 128 // GROUP + PIECE
    values = gl.tuple([gl.load(ptr + at + g, mask=ok & (g < n_groups), other=other)])
    if GROUP * (PIECE + 1) < 128:
        values = values + _of_step(ptr, at, ok, j, n_groups, other, GROUP, PIECE + 1)
    return values


@gluon.jit
def _spread(values, like, GROUP: gl.constexpr, PIECE: gl.constexpr, left: gl.constexpr):
    """[64, 32]: of each number its group's. Four columns stand in one place of 32."""
    spread = gl.broadcast(values[PIECE][:, None], like)[0]
    if GROUP * (PIECE + 1) < 128:
        h = gl.arange(0, 32, gl.SliceLayout(0, left))
        rest = _spread(values, like, GROUP, PIECE + 1, left)
        spread = gl.where((h < GROUP * (PIECE + 1) // 4)[None, :], spread, rest)
    return spread


@gluon.jit
def _operands(
    codes, scales, zeros, dtype: gl.constexpr, BITS: gl.constexpr, GROUP: gl.constexpr,
    HAS_ZERO: gl.constexpr, left: gl.constexpr, FP8: gl.constexpr = False,
):
    """The weights of 128 columns, two left operands [64, 64], from codes int16 [64, 8 * BITS]."""
    if BITS == 8:
        gl.static_assert(not HAS_ZERO)
        if FP8:
            both = _numbers_of_fp8(codes, dtype)
        else:
            both = _numbers_of_bytes(codes, dtype)
    else:
        t0, t1, t2, t3 = _fours(codes, scales, zeros, dtype, GROUP, HAS_ZERO, left)
        both = (_beside(t0, t1, left), _beside(t2, t3, left))
    return both


@gluon.jit
def _fours(
    codes, scales, zeros, dtype: gl.constexpr, GROUP: gl.constexpr, HAS_ZERO: gl.constexpr,
    left: gl.constexpr,
):
    """Every fourth weight, four times [64, 32]."""
    if GROUP > 0:
        scale = _spread(scales, codes, GROUP, 0, left)
        if gl.bfloat16 == dtype and not HAS_ZERO:
            t0, t1, t2, t3 = _scaled_steps(codes, scale)
        else:
            zero = scale
            if HAS_ZERO:
                zero = _less(_spread(zeros, codes, GROUP, 0, left), dtype)
            t0, t1, t2, t3 = _scaled_numbers(codes, zero, scale, HAS_ZERO)
    else:
        zero = gl.full(codes.shape, 0.0, dtype, left)
        if HAS_ZERO:
            zero = gl.broadcast(_less(zeros[0], dtype)[:, None], codes)[0]
        t0, t1, t2, t3 = _numbers(codes, zero, HAS_ZERO)
    return t0, t1, t2, t3


@gluon.jit
def _put(
    acc, row0, out0, split, bias_ptr, out_ptr, part_ptr, stride_o, n_rows, n_cols,
    HAS_BIAS: gl.constexpr, R: gl.constexpr, SPLIT_K: gl.constexpr, layout: gl.constexpr,
):
    """Store what a group has, sums [64, R]: results, or one part of several."""
    o = out0 + gl.arange(0, 64, gl.SliceLayout(1, layout))
    if SPLIT_K > 1:
        # As they lie: lanes of a warp have 32 bytes of a row side by side.
        part_ptr += (split.to(gl.int64) * n_rows + row0) * n_cols
        r = gl.arange(0, R, gl.SliceLayout(0, layout))
        gl.store(part_ptr + (r * n_cols)[None, :] + o[:, None], acc,
                 mask=(r < n_rows - row0)[None, :] & (o < n_cols)[:, None])
    else:
        if HAS_BIAS:
            bias = gl.load(bias_ptr + o, mask=o < n_cols, other=0.0).to(gl.float32)
            acc = acc + bias[:, None]
        # A thread stores 16 bytes at a time; a warp keeps its 16 outputs.
        store: gl.constexpr = gl.BlockedLayout([1, 8], [16, 2], [1, 4], [1, 0])
        y = gl.convert_layout(acc.to(out_ptr.dtype.element_ty).permute([1, 0]), store)
        rows = row0 + gl.arange(0, R, gl.SliceLayout(1, store))
        cols = out0 + gl.arange(0, 64, gl.SliceLayout(0, store))
        at = out_ptr + (rows.to(gl.int64) * stride_o)[:, None] + cols[None, :]
        gl.store(at, y, mask=(rows < n_rows)[:, None] & (cols < n_cols)[None, :])


@gluon.jit
def _multiply(
    SIDE: gl.constexpr, shared, given, sizes, BITS: gl.constexpr, GROUP: gl.constexpr,
    HAS_ZERO: gl.constexpr, HAS_BIAS: gl.constexpr, R: gl.constexpr, GROUPS: gl.constexpr,
    STAGES: gl.constexpr, SPLIT_K: gl.constexpr, FP8: gl.constexpr,
):
    """Group SIDE's 64 outputs of each tile, times the x that all groups share."""
    w_s, x_s, full, empty = shared
    s_ptr, z_ptr, bias_ptr, out_ptr, part_ptr, stride_s, stride_z, stride_o, n_groups = given
    n_cols, n_rows, n_steps, n_m, n_n, n_items = sizes
    dtype: gl.constexpr = x_s.dtype
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, R, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    EVERY: gl.constexpr = GROUP if GROUP > 0 else 1 << 30  # columns with one scale
    APART: gl.constexpr = BITS == 8 and GROUP > 0  # a step's sum is scaled
    scaled: gl.constexpr = layout if APART else left
    count = 0
    for item in range(gl.program_id(0), n_items, gl.num_programs(0)):
        m, n, split, first, end = _item(item, n_m, n_n, n_steps, SPLIT_K)
        out0 = (n * GROUPS + SIDE) * 64
        o = out0 + gl.arange(0, 64, gl.SliceLayout(1, scaled))
        ok = o < n_cols
        at_s = o.to(gl.int64) * stride_s
        at_z = o.to(gl.int64) * stride_z
        # Scales and zero points are asked for two steps ahead.
        scales = _of_step(s_ptr, at_s, ok, first, n_groups, 0.0, EVERY, 0)
        next_scales = _of_step(s_ptr, at_s, ok, first + 1, n_groups, 0.0, EVERY, 0)
        zeros = scales
        next_zeros = scales
        if HAS_ZERO:
            zeros = _of_step(z_ptr, at_z, ok, first, n_groups, 0, EVERY, 0)
            next_zeros = _of_step(z_ptr, at_z, ok, first + 1, n_groups, 0, EVERY, 0)
        acc = gl.zeros([64, R], gl.float32, layout)
        for j in range(first, end):
            stage = count % STAGES
            hopper.mbarrier.wait(full.index(stage), (count // STAGES) & 1)
            codes = w_s.index(stage * GROUPS + SIDE).load(left)
            a, b = _operands(codes, scales, zeros, dtype, BITS, GROUP, HAS_ZERO, left, FP8)
            scale_now = scales[0]
            if GROUP > 0:
                scales = next_scales
                next_scales = _of_step(s_ptr, at_s, ok, j + 2, n_groups, 0.0, EVERY, 0)
                if HAS_ZERO:
                    zeros = next_zeros
                    next_zeros = _of_step(z_ptr, at_z, ok, j + 2, n_groups, 0, EVERY, 0)
            xa = x_s.index(stage * 2).permute([1, 0])
            xb = x_s.index(stage * 2 + 1).permute([1, 0])
            if APART:
                part = gl.zeros([64, R], gl.float32, layout)
                part = hopper.warpgroup_mma(a, xa, part, is_async=True)
                part = hopper.warpgroup_mma(b, xb, part, is_async=True)
                part = hopper.warpgroup_mma_wait(0, deps=[part])
                hopper.mbarrier.arrive(empty.index(stage), count=1)
                acc = acc + part * scale_now.to(gl.float32)[:, None]
            else:
                acc = hopper.warpgroup_mma(a, xa, acc, is_async=True)
                acc = hopper.warpgroup_mma(b, xb, acc, is_async=True)
                acc = hopper.warpgroup_mma_wait(0, deps=[acc])
                hopper.mbarrier.arrive(empty.index(stage), count=1)
            count += 1
        if GROUP == 0:
            n1 = out0 + gl.arange(0, 64, gl.SliceLayout(1, layout))
            scale = gl.load(s_ptr + n1.to(gl.int64) * stride_s, mask=n1 < n_cols, other=0.0)
            acc = acc * scale.to(gl.float32)[:, None]
        if gl.bfloat16 == dtype:
            acc = acc * (UNIT if GROUP > 0 and not HAS_ZERO and BITS == 4 else 64.0)
        elif FP8:
            acc = acc * PARTS_OF_FP8
        _put(acc, m * R, out0, split, bias_ptr, out_ptr, part_ptr, stride_o, n_rows, n_cols,
             HAS_BIAS, R, SPLIT_K, layout)


@gluon.jit(do_not_specialize=["n_rows", "n_m", "n_items"])
def _integer_weights_kernel(
    w_desc, x_desc, s_ptr, z_ptr, bias_ptr, out_ptr, part_ptr,
    stride_s, stride_z, stride_o, n_groups, n_cols, n_steps, n_n, n_rows, n_m, n_items,
    BITS: gl.constexpr,  # of a weight
    GROUP: gl.constexpr,  # columns with one scale; 0: a row has one
    HAS_ZERO: gl.constexpr, HAS_BIAS: gl.constexpr, PDL: gl.constexpr,
    R: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr, SPLIT_K: gl.constexpr,
    FP8: gl.constexpr,  # weights of 8 bits are e4m3, not int8
):
    dtype: gl.constexpr = out_ptr.dtype.element_ty
    WIDTH: gl.constexpr = 16 * BITS  # bytes of a row of a step
    WORD: gl.constexpr = 32 if BITS == 4 else 8
    words: gl.constexpr = gl.NVMMASharedLayout(
        swizzle_byte_width=WIDTH, element_bitwidth=WORD, rank=2)
    halves: gl.constexpr = gl.NVMMASharedLayout(
        swizzle_byte_width=WIDTH, element_bitwidth=16, rank=2)
    rows: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    bar_layout: gl.constexpr = hopper.mbarrier.MBarrierLayout()
    if PDL:
        _let_next_kernel_start()
    codes: gl.constexpr = gl.int32 if BITS == 4 else gl.int8
    w_s = gl.allocate_shared_memory(codes, [STAGES * GROUPS, 64, WIDTH * 8 // WORD], words)
    codes_s = _as(w_s, gl.int16, [STAGES * GROUPS, 64, WIDTH // 2], halves)
    x_s = gl.allocate_shared_memory(dtype, [STAGES * 2, R, 64], rows)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar_layout)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar_layout)
    for i in gl.static_range(STAGES):
        hopper.mbarrier.init(full.index(i), count=1)
        hopper.mbarrier.init(empty.index(i), count=GROUPS)
    hopper.fence_async_shared()
    sizes = (n_cols, n_rows, n_steps, n_m, n_n, n_items)
    shared = (codes_s, x_s, full, empty)
    given = (s_ptr, z_ptr, bias_ptr, out_ptr, part_ptr, stride_s, stride_z, stride_o, n_groups)
    if GROUPS == 2:
        gl.warp_specialize(
            [
                (_multiply, (0, shared, given, sizes, BITS, GROUP, HAS_ZERO, HAS_BIAS, R, GROUPS,
                             STAGES, SPLIT_K, FP8)),
                (_multiply, (1, shared, given, sizes, BITS, GROUP, HAS_ZERO, HAS_BIAS, R, GROUPS,
                             STAGES, SPLIT_K, FP8)),
                (_load, (w_desc, x_desc, w_s, x_s, full, empty, sizes, BITS, R, GROUPS, STAGES,
                         SPLIT_K, PDL)),
            ],
            [4, 1], [240, 24])
    else:
        gl.warp_specialize(
            [
                (_multiply, (0, shared, given, sizes, BITS, GROUP, HAS_ZERO, HAS_BIAS, R, GROUPS,
                             STAGES, SPLIT_K, FP8)),
                (_multiply, (1, shared, given, sizes, BITS, GROUP, HAS_ZERO, HAS_BIAS, R, GROUPS,
                             STAGES, SPLIT_K, FP8)),
                (_multiply, (2, shared, given, sizes, BITS, GROUP, HAS_ZERO, HAS_BIAS, R, GROUPS,
                             STAGES, SPLIT_K, FP8)),
                (_load, (w_desc, x_desc, w_s, x_s, full, empty, sizes, BITS, R, GROUPS, STAGES,
                         SPLIT_K, PDL)),
            ],
            [4, 4, 1], [152, 152, 24])


# fmt: on


# ---- host --------------------------------------------------------------------------------------


def why_unfit(n: int, k: int, dev: Device) -> str | None:
    """Reason why this body cannot serve N outputs and K columns; None: it can."""
    if dev.arch != "sm90":
        return f"variant wide needs an sm90 device, got {dev.arch}"
    if not device.is_there(gl):
        return "variant wide needs a triton that has Gluon (3.6 or newer), got none"
    if k > MOST_COLUMNS:
        return f"variant wide has up to {MOST_COLUMNS} columns, got {k}"
    if n > MOST_OUTPUTS:
        return f"variant wide has up to {MOST_OUTPUTS} outputs, got {n}"
    return None


def shared_bytes(config: Config, bits: int) -> int:
    """Of shared memory: stages of weights and x, and what results go through."""
    groups = config["num_warps"] // 4
    stage = 1024 * bits * groups + 256 * config["BLOCK_M"]
    return int(config["num_stages"] * stage + 2304 * groups)


def why_illegal(config: Config, k: int, dev: Device, bits: int, fixed: Config) -> str | None:
    """Reason why a config of this body cannot be launched; None: it can.

    ``fixed``: what it has no choice of, where it serves.
    """
    if wrong := [f"{name} {v}" for name, v in fixed.items() if config[name] != v]:
        return f"variant wide has {', '.join(wrong)}"
    rows, warps = config["BLOCK_M"], config["num_warps"]
    if rows not in ROWS:
        return f"variant wide has BLOCK_M of {', '.join(map(str, ROWS))}, got {rows}"
    if warps not in (8, 12):
        return f"variant wide has two or three groups of 4 warps, got {warps} warps"
    if rows == 256 and warps == 12:
        return "three groups leave no registers for 256 rows"
    if config["num_stages"] < 2:
        return f"variant wide needs num_stages of 2 or more, got {config['num_stages']}"
    if (most := cdiv(k, STEP)) < config["SPLIT_K"]:
        return f"SPLIT_K must be at most {most}, a step each, got {config['SPLIT_K']}"
    if (used := shared_bytes(config, bits)) > dev.local_mem_bytes:
        return f"the tiles take {used} bytes of shared memory, more than {dev.local_mem_bytes}"
    return None


def why_not_apart(config: Config) -> str | None:
    """Reason why a config has no registers for the sums of a step beside all; None: it has."""
    rows, warps = config["BLOCK_M"], config["num_warps"]
    if rows > (most := 128 if warps == 8 else 64):
        return f"{warps} warps leave registers for {most} rows of scaled sums, got {rows}"
    return None


def default_config(
    sizes: tuple[int, int, int],
    dev: Device,
    bits: int,
    fixed: Config,
    least: int,
    apart: bool = False,
) -> Config:
    """What takes least by ``_work``, with as many stages as fit; ``least``: rows of a tile.

    ``apart``: the sum of a step is scaled (``why_not_apart``).
    """
    m, _, k = sizes
    ways = []
    for r, warps, splits in itertools.product(ROWS, (8, 12), (1, 2, 3, 4, 6, 8)):
        if not least <= r < 2 * max(least, m):
            continue
        way = {**fixed, "BLOCK_M": r, "SPLIT_K": splits, "PDL": True, "num_warps": warps}
        way["num_stages"] = 8
        while shared_bytes(way, bits) > dev.local_mem_bytes:
            way["num_stages"] -= 1
        unfit = why_not_apart(way) if apart else None
        if unfit is None and why_illegal(way, k, dev, bits, fixed) is None:
            ways.append(way)
    return min(ways, key=lambda way: _work(way, sizes, dev, bits))


def _work(config: Config, sizes: tuple[int, int, int], dev: Device, bits: int) -> float:
    """Microseconds by a model of what an H200 took (CONTRIBUTING, "Measured facts")."""
    m, n, k = sizes
    splits = config["SPLIT_K"]
    rows, groups = config["BLOCK_M"], config["num_warps"] // 4
    programs = cdiv(m, rows) * cdiv(n, OUTPUTS * groups) * splits
    steps = cdiv(cdiv(k, STEP), splits)
    a_step = (0.2 + groups * (0.025 + 0.002 * rows)) * (1.15 if config["num_stages"] < 3 else 1)
    at_once = min(programs, dev.num_cores)
    read = at_once * groups * 1024 * bits / 4.2e6  # weights of a step, from memory
    adding = 2.7 + splits * m * n / 5e5 if splits > 1 else 0
    return float(cdiv(programs, dev.num_cores) * steps * max(a_step, read) + adding)


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
    rows, groups, splits = config["BLOCK_M"], config["num_warps"] // 4, config["SPLIT_K"]
    pdl = {"launch_pdl": True} if config["PDL"] else {}
    steps = cdiv(k, STEP)
    wide = steps * STEP  # columns of x turned
    n_m, n_n = cdiv(m, rows), cdiv(n, OUTPUTS * groups)
    items = n_m * n_n * splits
    turn = bind(
        _turn_kernel,
        (m, cdiv(steps, _BLOCKS)),
        EVERY=16 // bits,
        PDL=config["PDL"],
        BLOCKS=_BLOCKS,
        num_warps=4,
        **pdl,
    )
    of_word = 8 if bits == 4 else 1  # weights in a number of theirs
    start = device.bind_described(
        _integer_weights_kernel,
        (min(items, programs),),
        (
            _describer(
                (n, k // of_word, strides[1]), OUTPUTS, STEP // of_word, of_word * bits, 16 * bits
            ),
            _describer((m, wide, wide), rows, 64, 16, 128),
        ),
        BITS=bits,
        **facts,
        PDL=config["PDL"],
        R=rows,
        GROUPS=groups,
        STAGES=config["num_stages"],
        SPLIT_K=splits,
        FP8=fp8,
        num_warps=4,
        **pdl,
    )
    numbers = (*strides[2:5], k // (facts["GROUP"] or k), n, steps, n_n, m, n_m, items)

    def launch(x: torch.Tensor, weight: torch.Tensor, *others: torch.Tensor) -> None:
        turned = torch.empty((m, wide), dtype=x.dtype, device=x.device)
        turn(x, turned, strides[0], k, wide)
        start(weight, turned, *others, *numbers)

    return launch
