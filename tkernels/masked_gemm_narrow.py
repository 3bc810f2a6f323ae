"""The body of ``masked_gemm`` for up to 64 rows of int8 on Hopper (sm_90): ``variant`` "narrow".

As in ``masked_gemm_stream`` weights and x come by TMA into a ring of stages, and a stage is filled
again as soon as it has been multiplied. There x stands in the 64 rows that an instruction takes,
and a tensor map fills those that are not there with zeros, which takes its time: with 16 rows that
body takes longer than with 64. Here weights are the left operand (64 outputs an instruction) and x
is the right one, with 8, 16, 32 or 64 rows: what is there, up to a power of two, is all that comes.

Triton puts a barrier ahead of each copy, so a stage comes in two or three of them: a tensor map
shows a matrix as panels of 128 columns, of which a copy takes as many as a stage has.

A tile of 96 outputs is one of 64 and one of 32, as tensors have powers of two. Of 32 outputs two
panels lie one behind the other and make the 64 rows that an instruction takes: times x of the first
panel half of the results are of use, times x of the second the other half, and in the end the two
halves are added.

Sums are int32, so programs with different outputs start at different columns and go round, and
parts of K may be added in any order. A thread has few outputs and few rows: their scales and bias
are in registers, the outputs' ahead of the wait for earlier kernels, as the ring's first weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from tkernels import device
from tkernels import masked_gemm_hopper as large
from tkernels import masked_gemm_stream as stream
from tkernels.device import Device, cdiv, next_power_of_2
from tkernels.masked_gemm_hopper import _as, _load_tile
from tkernels.masked_gemm_stream import _barrier, _column
from tkernels.paged_attn_quantized_hopper import (
    _let_next_kernel_start,
    _wait_for_earlier_kernels,
)
from tkernels.registry import Config, Problem

if TYPE_CHECKING:
    from tkernels import _triton as gl
    from tkernels import _triton as gluon
    from tkernels import _triton as hopper
else:
    gl, gluon, hopper = large.gl, large.gluon, large.hopper

# What this body has no choice of.
FIXED: Config = {
    "variant": "narrow",
    "GROUP_M": 1,
    "SWAP": False,
    "programs_per_core": 0,
    "num_warps": 4,
}
# Outputs of a tile, and the two powers of two that they are.
PARTS = {32: (32, 0), **stream.PARTS}

# Rows for which this body may be the default.
DEFAULT_ROWS = range(1, 65)
# Bytes a nanosecond: what an H200's memory brings, and what a core takes at the most. Where tiles
# have 32 outputs, half of what is multiplied is of no use, and a core takes less.
_CHIP_RATE, _CORE_RATE, _CORE_RATE_OF_32 = 4200.0, 48.0, 36.0
_SPLIT_NS = 600.0  # of the launch that adds parts
_MOST_RING = 220 << 10  # bytes of a program's stages

# fmt: off


@gluon.jit
def _ask_for_weights(
    w0_desc, w1_desc, w0_s, w1_s, bar, slot, col0, panel, there, N0: gl.constexpr,
    N1: gl.constexpr, R: gl.constexpr, P: gl.constexpr,
):
    """Start to bring a step's weights, if it is ``there``, and expect x too."""
    hopper.mbarrier.expect(bar, P * 128 * (N0 + N1 + R), pred=there)
    _load_tile(w0_desc, [panel, col0, 0], bar, w0_s.index(slot), pred=there)
    if N1 > 0:
        _load_tile(w1_desc, [panel, col0 + N0, 0], bar, w1_s.index(slot), pred=there)


@gluon.jit
def _multiply(
    tiles, rows, acc, other, slot, N: gl.constexpr, P: gl.constexpr, p: gl.constexpr,
):
    """Add the product of a panel to ``acc``, or, of 32 outputs, where it is odd, to ``other``."""
    x = rows.index(slot * P + p).permute([1, 0])
    if N > 32:
        acc = hopper.warpgroup_mma(tiles.index(slot * P + p), x, acc, is_async=True)
    elif p % 2 == 0:
        acc = hopper.warpgroup_mma(tiles.index(slot * (P // 2) + p // 2), x, acc, is_async=True)
    else:
        other = hopper.warpgroup_mma(tiles.index(slot * (P // 2) + p // 2), x, other, is_async=True)
    return acc, other


@gluon.jit
def _halves(acc, other, lines: gl.constexpr):
    """[32, R]: the first half of acc [64, R] and the second one of other."""
    row = gl.arange(0, 64, gl.SliceLayout(1, acc.type.layout))
    both = gl.where((row < 32)[:, None], acc, other)
    return gl.convert_layout(gl.sum(gl.reshape(both, [2, 32, acc.shape[1]]), 0), lines)


@gluon.jit
def _of_outputs(ptr, col0, n_cols, M: gl.constexpr, layout: gl.constexpr):
    """fp32 [M] from output col0 on."""
    o = col0 + gl.arange(0, M, layout)
    return gl.load(ptr + o, mask=o < n_cols, other=0.0).to(gl.float32)


@gluon.jit
def _put(
    acc, x_scale, scale, bias, row0, col0, split, n_cols, n_rows, out_ptr, part_ptr, stride_o,
    HAS_BIAS: gl.constexpr, SPLIT_K: gl.constexpr,
):
    """Store acc [N, R]: results, or what one program of several has of them."""
    N: gl.constexpr = acc.shape[0]
    R: gl.constexpr = acc.shape[1]
    # A thread stores 16 bytes at a time.
    WIDE: gl.constexpr = 4 if SPLIT_K > 1 else 8
    LANES: gl.constexpr = N // WIDE if N < 32 * WIDE else 32
    lines: gl.constexpr = gl.BlockedLayout([WIDE, 1], [LANES, 32 // LANES], [1, 4], [0, 1])
    n = col0 + gl.arange(0, N, gl.SliceLayout(1, lines))
    r = row0 + gl.arange(0, R, gl.SliceLayout(0, lines))
    there = (n < n_cols)[:, None] & (r < n_rows)[None, :]
    r = r.to(gl.int64)
    if SPLIT_K > 1:
        parts = part_ptr + ((r + split.to(gl.int64) * n_rows) * n_cols)[None, :]
        gl.store(parts + n[:, None], gl.convert_layout(acc, lines), mask=there)
    else:
        x_scale = gl.convert_layout(x_scale, gl.SliceLayout(0, acc.type.layout))
        y = acc.to(gl.float32) * x_scale[None, :]
        y = y * scale[:, None]
        if HAS_BIAS:
            y = y + bias[:, None]
        outs = out_ptr + (r * stride_o)[None, :]
        y = gl.convert_layout(y.to(out_ptr.dtype.element_ty), lines)
        gl.store(outs + n[:, None], y, mask=there)


@gluon.jit(do_not_specialize=["n_rows", "n_panels", "n_m", "n_steps"])
def _masked_gemm_narrow_kernel(
    w0_desc, w1_desc, xq_desc,
    ws_ptr, xs_ptr, bias_ptr, out_ptr, part_ptr,
    stride_o, n_cols, n_rows, n_panels, n_m,
    n_steps,  # that a program takes
    HAS_BIAS: gl.constexpr, PDL: gl.constexpr,
    R: gl.constexpr,  # rows of x
    N0: gl.constexpr, N1: gl.constexpr,  # outputs of a tile
    P: gl.constexpr,  # panels of a stage: 128 columns of each row
    SPLIT_K: gl.constexpr, STAGES: gl.constexpr,
):
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, R, 32])
    small: gl.constexpr = gl.BlockedLayout([1, 2], [32, 1], [1, 4], [0, 1])  # of 32 outputs
    of_outputs0: gl.constexpr = gl.SliceLayout(1, sums if N0 > 32 else small)
    of_outputs1: gl.constexpr = gl.SliceLayout(1, sums if N1 > 32 else small)
    of_rows: gl.constexpr = gl.SliceLayout(0, sums)
    panels: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=3)
    of8: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)

    if PDL:
        _let_next_kernel_start()
    split = gl.program_id(0) % SPLIT_K
    place = gl.program_id(0) // SPLIT_K
    row0 = place % n_m * R
    tile = place // n_m
    col0 = tile * (N0 + N1)
    first = split * n_steps * P
    count = gl.minimum((n_panels + (P - 1)) // P - split * n_steps, n_steps)
    count = gl.maximum(count, 0)
    turn = tile % gl.maximum(count, 1)

    w0_s = gl.allocate_shared_memory(gl.int8, [STAGES, P, N0, 128], panels)
    w1_s = w0_s
    if N1 > 0:
        w1_s = gl.allocate_shared_memory(gl.int8, [STAGES, P, N1, 128], panels)
    x_s = gl.allocate_shared_memory(gl.int8, [STAGES, P, R, 128], panels)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], hopper.mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        hopper.mbarrier.init(full.index(i), count=1)
    hopper.fence_async_shared()
    _barrier()

    # No earlier kernel writes weights, their scales or bias.
    for i in gl.static_range(STAGES):
        _ask_for_weights(
            w0_desc, w1_desc, w0_s, w1_s, full.index(i), i, col0,
            _column(i, turn, count, first, P), i < count, N0, N1, R, P)
    scale0 = col0
    scale1 = col0
    bias0 = col0
    bias1 = col0
    if SPLIT_K == 1:
        scale0 = _of_outputs(ws_ptr, col0, n_cols, N0, of_outputs0)
        if N1 > 0:
            scale1 = _of_outputs(ws_ptr, col0 + N0, n_cols, N1, of_outputs1)
        if HAS_BIAS:
            bias0 = _of_outputs(bias_ptr, col0, n_cols, N0, of_outputs0)
            if N1 > 0:
                bias1 = _of_outputs(bias_ptr, col0 + N0, n_cols, N1, of_outputs1)
    if PDL:  # nothing above reads what an earlier kernel may write, or stores
        _wait_for_earlier_kernels()
    for i in gl.static_range(STAGES):
        _load_tile(
            xq_desc, [_column(i, turn, count, first, P), row0, 0], full.index(i), x_s.index(i),
            pred=i < count)
    x_scale = row0
    if SPLIT_K == 1:
        r = row0 + gl.arange(0, R, of_rows)
        x_scale = gl.load(xs_ptr + r, mask=r < n_rows, other=0.0)

    M0: gl.constexpr = N0 if N0 > 64 else 64  # outputs that instructions take
    M1: gl.constexpr = N1 if N1 > 64 else 64
    tiles0 = _as(w0_s, gl.int8, [STAGES * P * N0 // M0, M0, 128], of8)
    tiles1 = tiles0
    if N1 > 0:
        tiles1 = _as(w1_s, gl.int8, [STAGES * P * N1 // M1, M1, 128], of8)
    rows = _as(x_s, gl.int8, [STAGES * P, R, 128], of8)
    acc0 = gl.zeros([M0, R], gl.int32, sums)
    acc1 = gl.zeros([M1, R], gl.int32, sums)
    other = gl.zeros([64, R], gl.int32, sums)
    for j in range(count):
        slot = j % STAGES
        bar = full.index(slot)
        hopper.mbarrier.wait(bar, (j // STAGES) & 1)
        for p in gl.static_range(P):
            acc0, other = _multiply(tiles0, rows, acc0, other, slot, N0, P, p)
            if N1 > 0:
                acc1, other = _multiply(tiles1, rows, acc1, other, slot, N1, P, p)
        acc0, acc1, other = hopper.warpgroup_mma_wait(0, deps=[acc0, acc1, other])
        if j + STAGES < count:
            _barrier()  # all warps are through with the stage
            panel = _column(j + STAGES, turn, count, first, P)
            _ask_for_weights(
                w0_desc, w1_desc, w0_s, w1_s, bar, slot, col0, panel, True, N0, N1, R, P)
            _load_tile(xq_desc, [panel, row0, 0], bar, x_s.index(slot), pred=True)

    if N0 == 32:
        acc0 = _halves(acc0, other, small)
    _put(
        acc0, x_scale, scale0, bias0, row0, col0, split, n_cols, n_rows, out_ptr, part_ptr,
        stride_o, HAS_BIAS, SPLIT_K)
    if N1 > 0:
        if N1 == 32:
            acc1 = _halves(acc1, other, small)
        _put(
            acc1, x_scale, scale1, bias1, row0, col0 + N0, split, n_cols, n_rows, out_ptr,
            part_ptr, stride_o, HAS_BIAS, SPLIT_K)


# fmt: on

# ---- host --------------------------------------------------------------------------------------


def why_unfit(problem: Problem, dev: Device) -> str | None:
    """Reason why this body cannot serve such a problem, whatever the config; None: it can."""
    if problem["k"] % 128:
        return f"variant narrow needs columns that divide by 128, got {problem['k']}"
    why = stream.why_unfit(problem, dev)
    return None if why is None else why.replace("variant stream", "variant narrow")


def shared_bytes(config: Config) -> int:
    """Bytes of shared memory that a program takes at the most."""
    r, n, k, stages = (config[x] for x in ("BLOCK_M", "BLOCK_N", "BLOCK_K", "num_stages"))
    ring = stages * k * (n + r)
    return int(max(ring, 5 * n * r) + 1024)  # sums on their way to another layout; barriers


def default_config(problem: Problem, dev: Device) -> Config | None:
    """Tiles and parts of K that take the least time, by rates; None: no program a core suffices.

    Chosen so on an H200, 1 to 64 rows of 1024 to 12288 outputs took 1.4% more time than with the
    best of eight configs (10% at the most).
    """
    m, n, k = problem["m"], problem["n"], problem["k"]
    r = max(8, next_power_of_2(m))
    found: list[tuple[float, Config]] = []
    for block_n in PARTS:
        for split in range(1, max(1, k // 512) + 1):
            if cdiv(n, block_n) * split > dev.num_cores:
                break
            # As many stages of 512 columns as there is room for, if that is enough of them.
            block_k, stages = 512, min(9, _MOST_RING // (512 * (block_n + r)))
            if stages < 3:
                block_k, stages = 256, _MOST_RING // (256 * (block_n + r))
            config = {
                **FIXED, "BLOCK_M": r, "BLOCK_N": block_n, "BLOCK_K": block_k, "SPLIT_K": split,
                "num_stages": stages, "PDL": True,
            }  # fmt: skip
            if _why_no_tiles(config, dev) is None:
                found.append((_expected_ns(config, m, n, k), config))
    return min(found, key=lambda pair: pair[0])[1] if found else None


def _expected_ns(config: Config, m: int, n: int, k: int) -> float:
    """What a launch should take, less what all of them do. Half the traffic of parts is hidden."""
    split, outputs = config["SPLIT_K"], config["BLOCK_N"]
    columns = cdiv(k, split * config["BLOCK_K"]) * config["BLOCK_K"]
    rate = _CORE_RATE_OF_32 if outputs == 32 else _CORE_RATE
    # x comes from the cache: a quarter of what weights take.
    of_a_core = columns * (outputs + config["BLOCK_M"] / 4) / rate
    adding = _SPLIT_NS + split * m * n * 4 / _CHIP_RATE if split > 1 else 0.0
    return float(max(n * k / _CHIP_RATE, of_a_core) + adding)


def why_illegal(config: Config, problem: Problem, dev: Device) -> str | None:
    """Reason why a config of this body cannot be launched; None: it can.

    Whatever it is, rows that run high have the tiles of the portable default: so calls with a mask
    and with ``high=True``, which share a tuned config, give them the same bits.
    """
    if problem["path"] != "int8" and problem["m"] > 64:
        return f"variant narrow has at most 64 rows where some may run high, got {problem['m']}"
    return _why_no_tiles(config, dev)


def _why_no_tiles(config: Config, dev: Device) -> str | None:
    """Reason why there are no such tiles, whatever the problem."""
    if wrong := [f"{name} {value}" for name, value in FIXED.items() if config[name] != value]:
        return f"variant narrow has {', '.join(wrong)}"
    allowed = {"BLOCK_M": (8, 16, 32, 64), "BLOCK_N": tuple(PARTS), "BLOCK_K": (128, 256, 512)}
    for name, values in allowed.items():
        if config[name] not in values:
            return f"variant narrow has {name} of {values}, got {config[name]}"
    if 32 in PARTS[config["BLOCK_N"]] and config["BLOCK_K"] < 256:
        return "variant narrow takes 32 outputs of two panels: BLOCK_K must be 256 or more"
    if config["num_stages"] < 2:
        return f"variant narrow needs num_stages of 2 or more, got {config['num_stages']}"
    if not 1 <= config["SPLIT_K"] <= 64:
        return f"SPLIT_K must be 1 to 64, got {config['SPLIT_K']}"
    if (used := shared_bytes(config)) > dev.local_mem_bytes:
        return f"the tiles take {used} bytes of shared memory, more than {dev.local_mem_bytes}"
    return None


def _of_panels(matrix: tuple[int, int, int], box: tuple[int, int]) -> Callable[[torch.Tensor], Any]:
    """What makes the description of [K/128, rows, 128]. ``box``: panels and rows of a copy."""
    rows, cols, stride = matrix
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=3)
    cls = device.triton_part("triton.experimental.gluon.nvidia.hopper").TensorDescriptor

    def describe(tensor: torch.Tensor) -> Any:
        made = cls.__new__(cls)
        made.base, made.shape, made.strides = tensor, [cols // 128, rows, 128], [128, stride, 1]
        made.block_shape, made.layout, made.padding = [*box, 128], layout, "zero"
        return made

    return describe


def bind(
    sizes: tuple[int, int, int], has_bias: bool, strides: tuple[int, ...], config: Config
) -> Callable[..., None]:
    """``launch(w, w, x_q, weight_scale, x_scale, bias, out, part)``.

    w comes once for each part of a tile. ``strides``: of w, x_q and out, in numbers. ``part``:
    int32 [SPLIT_K, m, n], where SPLIT_K is more than 1.
    """
    m, n, k = sizes
    rows, block_n, splits = config["BLOCK_M"], config["BLOCK_N"], config["SPLIT_K"]
    n0, n1 = PARTS[block_n]
    p = config["BLOCK_K"] // 128
    weights, x = (n, k, strides[0]), (m, k, strides[1])
    start = device.bind_described(
        _masked_gemm_narrow_kernel,
        (cdiv(m, rows) * cdiv(n, block_n) * splits,),
        (
            _of_panels(weights, (p, n0)),
            _of_panels(weights, (p, n1 or n0)),
            _of_panels(x, (p, rows)),
        ),
        num_warps=4,
        HAS_BIAS=has_bias,
        PDL=config["PDL"],
        R=rows,
        N0=n0,
        N1=n1,
        P=p,
        SPLIT_K=splits,
        STAGES=config["num_stages"],
        **device.rounding_each_step(),
        **({"launch_pdl": True} if config["PDL"] else {}),
    )
    numbers = (strides[2], n, m, k // 128, cdiv(m, rows), cdiv(cdiv(k, 128 * p), splits))
    return lambda *tensors: start(*tensors, *numbers)
