"""The body of ``masked_gemm`` for up to 64 rows of int8 on Hopper (sm_90): ``variant`` "narrow".

As in ``masked_gemm_stream`` weights and x come by TMA into a ring of stages, and a stage is filled
again as soon as it has been multiplied. There x stands in the 64 rows that an instruction takes,
and a tensor map fills those that are not there with zeros, which takes its time: with 16 rows that
body takes longer than with 64. Here weights are the left operand (64 outputs an instruction) and x
is the right one, with 8, 16, 32 or 64 rows: what is there, up to a power of two, is all that comes.

A tile has BLOCK_N outputs. Tensors have powers of two, so of 96 an instruction takes 128, of 32 it
takes 64; those beyond are whatever shared memory has, and are not stored.

Sums are int32, so programs with different outputs start at different columns and go round, and
parts of K may be added in any order. A thread has few outputs and few rows: their scales and bias
are in registers, the outputs' ahead of the wait for earlier kernels, as the ring's first weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tkernels import device
from tkernels import masked_gemm_hopper as large
from tkernels import masked_gemm_stream as stream
from tkernels.device import Device, cdiv, next_power_of_2
from tkernels.masked_gemm_hopper import _as, _describer, _load_tile
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
OUTPUTS = (32, 64, 96, 128, 192, 256)  # of a tile

# fmt: off


@gluon.jit
def _ask_for_weights(
    w_desc, w_s, bar, slot, col0, k, there, N: gl.constexpr, M: gl.constexpr, BOX: gl.constexpr,
    R: gl.constexpr, P: gl.constexpr,
):
    """Start to bring a step's weights, if it is ``there``, and expect x too."""
    hopper.mbarrier.expect(bar, P * 128 * (N + R), pred=there)
    for p in gl.static_range(P):
        for part in gl.static_range(N // BOX):
            _load_tile(
                w_desc, [col0 + part * BOX, k + p * 128], bar,
                w_s.index((slot * P + p) * (M // BOX) + part), pred=there)


@gluon.jit
def _ask_for_x(x_desc, x_s, bar, slot, row0, k, there, P: gl.constexpr):
    for p in gl.static_range(P):
        _load_tile(x_desc, [row0, k + p * 128], bar, x_s.index(slot * P + p), pred=there)


@gluon.jit(do_not_specialize=["n_rows", "n_inner", "n_m", "n_steps"])
def _masked_gemm_narrow_kernel(
    w_desc, xq_desc,
    ws_ptr, xs_ptr, bias_ptr, out_ptr, part_ptr,
    stride_o, n_cols, n_rows, n_inner, n_m,
    n_steps,  # that a program takes
    HAS_BIAS: gl.constexpr, PDL: gl.constexpr,
    R: gl.constexpr,  # rows of x
    N: gl.constexpr,  # outputs of a tile
    M: gl.constexpr,  # outputs that instructions take: a power of two
    BOX: gl.constexpr,  # outputs that come at a time
    P: gl.constexpr,  # panels of a stage: 128 bytes of each row
    SPLIT_K: gl.constexpr, STAGES: gl.constexpr,
):
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, R, 32])
    of_outputs: gl.constexpr = gl.SliceLayout(1, sums)
    of_rows: gl.constexpr = gl.SliceLayout(0, sums)
    of8: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)

    if PDL:
        _let_next_kernel_start()
    split = gl.program_id(0) % SPLIT_K
    place = gl.program_id(0) // SPLIT_K
    row0 = place % n_m * R
    tile = place // n_m
    col0 = tile * N
    k_first = split * n_steps * (P * 128)
    count = gl.minimum((n_inner + (P * 128 - 1)) // (P * 128) - split * n_steps, n_steps)
    count = gl.maximum(count, 0)
    turn = tile % gl.maximum(count, 1)

    w_s = gl.allocate_shared_memory(gl.int8, [STAGES * P * (M // BOX), BOX, 128], of8)
    tiles = _as(w_s, gl.int8, [STAGES * P, M, 128], of8)
    x_s = gl.allocate_shared_memory(gl.int8, [STAGES * P, R, 128], of8)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], hopper.mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        hopper.mbarrier.init(full.index(i), count=1)
    hopper.fence_async_shared()
    _barrier()

    # No earlier kernel writes weights, their scales or bias.
    for i in gl.static_range(STAGES):
        k = _column(i, turn, count, k_first, P * 128)
        _ask_for_weights(w_desc, w_s, full.index(i), i, col0, k, i < count, N, M, BOX, R, P)
    if SPLIT_K == 1:
        o = col0 + gl.arange(0, M, of_outputs)
        scale = gl.load(ws_ptr + o, mask=o < n_cols, other=0.0)
        if HAS_BIAS:
            bias = gl.load(bias_ptr + o, mask=o < n_cols, other=0.0).to(gl.float32)
    if PDL:  # nothing above reads what an earlier kernel may write, or stores
        _wait_for_earlier_kernels()
    for i in gl.static_range(STAGES):
        k = _column(i, turn, count, k_first, P * 128)
        _ask_for_x(xq_desc, x_s, full.index(i), i, row0, k, i < count, P)
    if SPLIT_K == 1:
        r = row0 + gl.arange(0, R, of_rows)
        x_scale = gl.load(xs_ptr + r, mask=r < n_rows, other=0.0)

    acc = gl.zeros([M, R], gl.int32, sums)
    for j in range(count):
        slot = j % STAGES
        bar = full.index(slot)
        hopper.mbarrier.wait(bar, (j // STAGES) & 1)
        for p in gl.static_range(P):
            x = x_s.index(slot * P + p).permute([1, 0])
            acc = hopper.warpgroup_mma(tiles.index(slot * P + p), x, acc, is_async=True)
        acc = hopper.warpgroup_mma_wait(0, deps=[acc])
        if j + STAGES < count:
            _barrier()  # all warps are through with the stage
            k = _column(j + STAGES, turn, count, k_first, P * 128)
            _ask_for_weights(w_desc, w_s, bar, slot, col0, k, True, N, M, BOX, R, P)
            _ask_for_x(xq_desc, x_s, bar, slot, row0, k, True, P)

    # A thread stores 16 bytes at a time.
    WIDE: gl.constexpr = 4 if SPLIT_K > 1 else 8
    LANES: gl.constexpr = M // WIDE if M < 32 * WIDE else 32
    lines: gl.constexpr = gl.BlockedLayout([WIDE, 1], [LANES, 32 // LANES], [1, 4], [0, 1])
    n = gl.arange(0, M, gl.SliceLayout(1, lines))
    r = row0 + gl.arange(0, R, gl.SliceLayout(0, lines))
    there = (n < gl.minimum(n_cols - col0, N))[:, None] & (r < n_rows)[None, :]
    n = col0 + n
    r = r.to(gl.int64)
    if SPLIT_K > 1:
        parts = part_ptr + ((r + split.to(gl.int64) * n_rows) * n_cols)[None, :] + n[:, None]
        gl.store(parts, gl.convert_layout(acc, lines), mask=there)
    else:
        y = acc.to(gl.float32) * x_scale[None, :]
        y = y * scale[:, None]
        if HAS_BIAS:
            y = y + bias[:, None]
        y = gl.convert_layout(y.to(out_ptr.dtype.element_ty), lines)
        gl.store(out_ptr + (r * stride_o)[None, :] + n[:, None], y, mask=there)


# fmt: on

# ---- host --------------------------------------------------------------------------------------


def why_unfit(problem: Problem, dev: Device) -> str | None:
    """Reason why this body cannot serve such a problem, whatever the config; None: it can."""
    if problem["path"] != "int8":
        return f"variant narrow has int8 rows alone, got path {problem['path']}"
    why = stream.why_unfit(problem, dev)
    return None if why is None else why.replace("variant stream", "variant narrow")


def taken(block_n: int) -> int:
    """Outputs that instructions take for a tile of ``block_n``."""
    return max(64, next_power_of_2(block_n))


def shared_bytes(config: Config) -> int:
    """Bytes of shared memory that a program takes at the most."""
    m, r = taken(config["BLOCK_N"]), config["BLOCK_M"]
    ring = config["num_stages"] * config["BLOCK_K"] * (m + r)
    return int(max(ring, 5 * m * r) + 1024)  # sums on their way to another layout; barriers


def why_illegal(config: Config, problem: Problem, dev: Device) -> str | None:
    """Reason why a config of this body cannot be launched; None: it can."""
    if wrong := [f"{name} {value}" for name, value in FIXED.items() if config[name] != value]:
        return f"variant narrow has {', '.join(wrong)}"
    allowed = {"BLOCK_M": (8, 16, 32, 64), "BLOCK_N": OUTPUTS, "BLOCK_K": (128, 256, 512)}
    for name, values in allowed.items():
        if config[name] not in values:
            return f"variant narrow has {name} of {values}, got {config[name]}"
    if config["num_stages"] < 2:
        return f"variant narrow needs num_stages of 2 or more, got {config['num_stages']}"
    if not 1 <= config["SPLIT_K"] <= 64:
        return f"SPLIT_K must be 1 to 64, got {config['SPLIT_K']}"
    if (used := shared_bytes(config)) > dev.local_mem_bytes:
        return f"the tiles take {used} bytes of shared memory, more than {dev.local_mem_bytes}"
    return None


def bind(
    sizes: tuple[int, int, int], has_bias: bool, strides: tuple[int, ...], config: Config
) -> Callable[..., None]:
    """``launch(w, x_q, weight_scale, x_scale, bias, out, part)``, all but ``part`` as they are.

    ``strides``: of w, x_q and out, in numbers. ``part``: int32 [SPLIT_K, m, n], where SPLIT_K is
    more than 1.
    """
    m, n, k = sizes
    rows, block_n, splits = config["BLOCK_M"], config["BLOCK_N"], config["SPLIT_K"]
    box = min(block_n & -block_n, 128)
    start = device.bind_described(
        _masked_gemm_narrow_kernel,
        (cdiv(m, rows) * cdiv(n, block_n) * splits,),
        (
            _describer((n, k, strides[0]), box, 128, 8, 128),
            _describer((m, k, strides[1]), rows, 128, 8, 128),
        ),
        num_warps=4,
        HAS_BIAS=has_bias,
        PDL=config["PDL"],
        R=rows,
        N=block_n,
        M=taken(block_n),
        BOX=box,
        P=config["BLOCK_K"] // 128,
        SPLIT_K=splits,
        STAGES=config["num_stages"],
        **device.rounding_each_step(),
        **({"launch_pdl": True} if config["PDL"] else {}),
    )
    numbers = (strides[2], n, m, k, cdiv(m, rows), cdiv(cdiv(k, config["BLOCK_K"]), splits))
    return lambda *tensors: start(*tensors, *numbers)
