"""The body of ``masked_gemm`` for large tiles on Hopper (sm_90): ``variant`` "hopper".

One persistent program a core: one warp loads tiles with TMA, two groups of four warps multiply
(wgmma), each its own 64 rows of a tile with all BLOCK_N columns, and leave the tensor core no gap:
a step is waited for when the next one has been issued, the groups are not in step, and the loader
is STAGES steps ahead, over the ends of tiles too. Triton's own schedule waits for each step, and
halves the width of an instruction.

The high path takes the same buffers and as many bytes a step: 64 columns of 16 bits instead of 128
of 8. Where its weights are int8 (W8A16) the groups bring them to registers, widen them there and
multiply the transposed tile, because only the left operand may come from registers.

It is written in Gluon. What rows run high is decided by each part of a program for itself; none
writes what another reads for that. A mask of one word is read once, and where it is zero no
row_group is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from tkernels import device
from tkernels.device import Device, cdiv
from tkernels.registry import Config

if TYPE_CHECKING:
    from tkernels import _triton as gl
    from tkernels import _triton as gluon
    from tkernels import _triton as hopper
else:
    gluon = device.triton_part("triton.experimental.gluon")
    gl = device.triton_part("triton.experimental.gluon.language")
    hopper = device.triton_part("triton.experimental.gluon.language.nvidia.hopper")

# Their names in newer tritons, and in 3.6.
_load_tile = getattr(hopper.tma, "async_load", None) or hopper.tma.async_copy_global_to_shared
_shared = gl.shared_memory_descriptor
_as = getattr(_shared, "reinterpret", None) or _shared._reinterpret

BLOCK_M = 128  # rows of a program: 64 for each group of four warps, what one wgmma takes
BLOCK_K = 128  # bytes of a row a step: one row of a swizzled tile

# fmt: off


@gluon.jit
def _place(tile, n_m, n_n, GROUP_M: gl.constexpr, M: gl.constexpr, N: gl.constexpr):
    """(first row, first column): GROUP_M tiles of rows go through the columns together."""
    first_m = tile // (GROUP_M * n_n) * GROUP_M
    width = gl.minimum(n_m - first_m, GROUP_M)
    within = tile % (GROUP_M * n_n)
    return (first_m + within % width) * M, within // width * N


@gluon.jit
def _bits(mask_ptr, group_ptr, word, n_words, rows, n_rows, ONE_WORD: gl.constexpr):
    """int32: 1 where a row runs high; 0 past the last row."""
    group = gl.load(group_ptr + rows, mask=rows < n_rows, other=-1)
    inside = (group >= 0) & (group < n_words * 64)
    if ONE_WORD:
        words = word
    else:
        words = gl.load(mask_ptr + (gl.minimum(gl.maximum(group, 0), n_words * 64 - 1) >> 6))
    bit = ((words >> (group & 63).to(gl.int64)) & 1).to(gl.int32)
    return gl.where(inside, bit, 0)


@gluon.jit
def _steps(
    mask_ptr, group_ptr, word, n_words, row0, n_rows, n_inner, M: gl.constexpr,
    WARPS: gl.constexpr, LOW: gl.constexpr, HIGH: gl.constexpr, HAS_GROUP: gl.constexpr,
    ONE_WORD: gl.constexpr,
):
    """(steps of the low path, steps of the high path) of a tile; none where no row takes it."""
    low = (n_inner + 127) // 128
    high = (n_inner + 63) // 64
    if LOW and HIGH:
        n = gl.minimum(n_rows - row0, M)
        n_high = n * 0
        if HAS_GROUP:
            # Each warp has all rows, so that they are counted without leaving it.
            layout: gl.constexpr = gl.BlockedLayout([M // 32], [32], [WARPS], [0])
            if ONE_WORD:
                if word != 0:
                    rows = row0 + gl.arange(0, M, layout)
                    n_high = gl.sum(
                        _bits(mask_ptr, group_ptr, word, n_words, rows, n_rows, ONE_WORD), 0)
            else:
                rows = row0 + gl.arange(0, M, layout)
                n_high = gl.sum(
                    _bits(mask_ptr, group_ptr, word, n_words, rows, n_rows, ONE_WORD), 0)
        else:
            n_high = n * (word & 1).to(gl.int32)
        low = gl.where(n_high == n, 0, low)
        high = gl.where(n_high == 0, 0, high)
    return low, high


# ---- one warp loads ----------------------------------------------------------------------------


@gluon.jit
def _load(
    xq_desc, w_desc, x_desc, hw_desc, buffers, bars, mask_ptr, group_ptr, sizes,
    M: gl.constexpr, N: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr,
    LOW: gl.constexpr, HIGH: gl.constexpr, HIGH_SCALE: gl.constexpr, HAS_GROUP: gl.constexpr,
    ONE_WORD: gl.constexpr,
):
    xq_s, w_s, x_s, hw_s = buffers
    full, empty = bars
    n_rows, n_inner, n_words, n_m, n_n, n_tiles = sizes
    word = n_words.to(gl.int64)
    if LOW and HIGH:
        word = gl.load(mask_ptr)
    count = 0
    for tile in range(gl.program_id(0), n_tiles, gl.num_programs(0)):
        row0, col0 = _place(tile, n_m, n_n, GROUP_M, M, N)
        low, high = _steps(
            mask_ptr, group_ptr, word, n_words, row0, n_rows, n_inner, M, 1, LOW, HIGH, HAS_GROUP,
            ONE_WORD)
        if LOW:
            for j in range(low):
                stage = count % STAGES
                hopper.mbarrier.wait(empty.index(stage), ((count // STAGES) & 1) ^ 1)
                hopper.mbarrier.expect(full.index(stage), (M + N) * 128)
                for side in gl.static_range(2):
                    _load_tile(
                        xq_desc, [row0 + side * (M // 2), j * 128], full.index(stage),
                        xq_s.index(stage * 2 + side))
                _load_tile(w_desc, [col0, j * 128], full.index(stage), w_s.index(stage))
                count += 1
        if HIGH:
            for j in range(high):
                stage = count % STAGES
                hopper.mbarrier.wait(empty.index(stage), ((count // STAGES) & 1) ^ 1)
                if HIGH_SCALE:
                    hopper.mbarrier.expect(full.index(stage), M * 128 + N * 64)
                else:
                    hopper.mbarrier.expect(full.index(stage), (M + N) * 128)
                for side in gl.static_range(2):
                    _load_tile(
                        x_desc, [row0 + side * (M // 2), j * 64], full.index(stage),
                        x_s.index(stage * 2 + side))
                if HIGH_SCALE:
                    _load_tile(hw_desc, [col0, j * 64], full.index(stage), hw_s.index(stage * 2))
                else:
                    _load_tile(hw_desc, [col0, j * 64], full.index(stage), hw_s.index(stage))
                count += 1


# ---- two groups of four warps multiply ---------------------------------------------------------


@gluon.jit
def _put(
    y, rows0, col0, mixed, bias_ptr, out_ptr, mask_ptr, group_ptr, word, n_words, stride_o, n_rows,
    n_cols, WANT: gl.constexpr, HALF: gl.constexpr, N: gl.constexpr, layout: gl.constexpr,
    store_layout: gl.constexpr, TURNED: gl.constexpr, HAS_BIAS: gl.constexpr,
    CHOOSE: gl.constexpr, HAS_GROUP: gl.constexpr, ONE_WORD: gl.constexpr,
):
    """Store a group's part of a tile, of a mixed one the rows whose bit is WANT."""
    if HAS_BIAS:
        col_dim: gl.constexpr = 1 if TURNED else 0
        cols = col0 + gl.arange(0, N, gl.SliceLayout(col_dim, layout))
        bias = gl.load(bias_ptr + cols, mask=cols < n_cols, other=0.0).to(gl.float32)
        y = y + gl.expand_dims(bias, col_dim)
    y = y.to(out_ptr.dtype.element_ty)
    if TURNED:
        y = y.permute([1, 0])
    # Within each warp: its rows, or columns, are the same in both layouts.
    y = gl.convert_layout(y, store_layout)
    o_rows = rows0 + gl.arange(0, HALF, gl.SliceLayout(1, store_layout))
    o_cols = col0 + gl.arange(0, N, gl.SliceLayout(0, store_layout))
    ok = o_rows < n_rows
    if CHOOSE and HAS_GROUP:  # noqa: SIM102 (without groups a tile is never mixed)
        if mixed:
            ok = ok & (
                _bits(mask_ptr, group_ptr, word, n_words, o_rows, n_rows, ONE_WORD) == WANT)
    outs = out_ptr + (o_rows.to(gl.int64) * stride_o)[:, None] + o_cols[None, :]
    gl.store(outs, y, mask=ok[:, None] & (o_cols < n_cols)[None, :])


@gluon.jit
def _multiply(
    SIDE: gl.constexpr, buffers, bars, ws_ptr, xs_ptr, bias_ptr, mask_ptr, group_ptr, out_ptr,
    stride_o, n_cols, sizes,
    M: gl.constexpr, N: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr,
    LOW: gl.constexpr, HIGH: gl.constexpr, HIGH_SCALE: gl.constexpr, HAS_BIAS: gl.constexpr,
    HAS_GROUP: gl.constexpr, ONE_WORD: gl.constexpr,
):
    xq_s, w_s, x_s, hw_s = buffers
    full, empty = bars
    n_rows, n_inner, n_words, n_m, n_n, n_tiles = sizes
    HALF: gl.constexpr = M // 2
    CHOOSE: gl.constexpr = LOW and HIGH
    dtype: gl.constexpr = out_ptr.dtype.element_ty
    # Triton has no wider one for int8.
    low_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32])
    high_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    turned_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    # A thread stores 16 bytes at a time; a warp has the rows (turned: columns) of its product.
    store_layout: gl.constexpr = gl.BlockedLayout([4, 8], [4, 8], [4, 1], [1, 0])
    turned_store: gl.constexpr = gl.BlockedLayout([1, 8], [16, 2], [1, 4], [1, 0])
    word = n_words.to(gl.int64)
    if LOW and HIGH:
        word = gl.load(mask_ptr)
    count = 0
    for tile in range(gl.program_id(0), n_tiles, gl.num_programs(0)):
        row0, col0 = _place(tile, n_m, n_n, GROUP_M, M, N)
        low, high = _steps(
            mask_ptr, group_ptr, word, n_words, row0, n_rows, n_inner, M, 4, LOW, HIGH, HAS_GROUP,
            ONE_WORD)
        rows0 = row0 + SIDE * HALF
        mixed = (low > 0) & (high > 0)
        if LOW:  # noqa: SIM102 (what is known at compile time stands alone)
            if low > 0:
                # Read ahead of the products: nothing covers the way to them behind these.
                rows = rows0 + gl.arange(0, HALF, gl.SliceLayout(1, low_layout))
                cols = col0 + gl.arange(0, N, gl.SliceLayout(0, low_layout))
                xs = gl.load(xs_ptr + rows, mask=rows < n_rows, other=0.0)
                ws = gl.load(ws_ptr + cols, mask=cols < n_cols, other=0.0)
                acc = gl.zeros([HALF, N], gl.int32, low_layout)
                for j in range(low):
                    stage = count % STAGES
                    hopper.mbarrier.wait(full.index(stage), (count // STAGES) & 1)
                    w = w_s.index(stage).permute([1, 0])
                    acc = hopper.warpgroup_mma(
                        xq_s.index(stage * 2 + SIDE), w, acc, is_async=True)
                    acc = hopper.warpgroup_mma_wait(1, deps=[acc])
                    if j > 0:  # the step before has ended
                        hopper.mbarrier.arrive(empty.index((count - 1) % STAGES), count=1)
                    count += 1
                acc = hopper.warpgroup_mma_wait(0, deps=[acc])
                hopper.mbarrier.arrive(empty.index((count - 1) % STAGES), count=1)
                _put(
                    acc.to(gl.float32) * xs[:, None] * ws[None, :], rows0, col0, mixed, bias_ptr,
                    out_ptr, mask_ptr, group_ptr, word, n_words, stride_o, n_rows, n_cols, 0, HALF,
                    N, low_layout, store_layout, False, HAS_BIAS, CHOOSE, HAS_GROUP, ONE_WORD)
        if HIGH:  # noqa: SIM102
            if high > 0:
                if HIGH_SCALE:
                    outs = col0 + gl.arange(0, N, gl.SliceLayout(1, turned_layout))
                    scale = gl.load(ws_ptr + outs, mask=outs < n_cols, other=0.0)
                    turned = gl.zeros([N, HALF], gl.float32, turned_layout)
                    for _ in range(high):
                        stage = count % STAGES
                        hopper.mbarrier.wait(full.index(stage), (count // STAGES) & 1)
                        codes = hw_s.index(stage * 2).load(gl.DotOperandLayout(0, turned_layout, 2))
                        turned = hopper.warpgroup_mma(
                            codes.to(dtype), x_s.index(stage * 2 + SIDE).permute([1, 0]), turned,
                            is_async=True)
                        turned = hopper.warpgroup_mma_wait(0, deps=[turned])
                        hopper.mbarrier.arrive(empty.index(stage), count=1)
                        count += 1
                    _put(
                        turned * scale[:, None], rows0, col0, mixed, bias_ptr, out_ptr, mask_ptr,
                        group_ptr, word, n_words, stride_o, n_rows, n_cols, 1, HALF, N,
                        turned_layout, turned_store, True, HAS_BIAS, CHOOSE, HAS_GROUP, ONE_WORD)
                else:
                    acc16 = gl.zeros([HALF, N], gl.float32, high_layout)
                    for j in range(high):
                        stage = count % STAGES
                        hopper.mbarrier.wait(full.index(stage), (count // STAGES) & 1)
                        w16 = hw_s.index(stage).permute([1, 0])
                        acc16 = hopper.warpgroup_mma(
                            x_s.index(stage * 2 + SIDE), w16, acc16, is_async=True)
                        acc16 = hopper.warpgroup_mma_wait(1, deps=[acc16])
                        if j > 0:
                            hopper.mbarrier.arrive(empty.index((count - 1) % STAGES), count=1)
                        count += 1
                    acc16 = hopper.warpgroup_mma_wait(0, deps=[acc16])
                    hopper.mbarrier.arrive(empty.index((count - 1) % STAGES), count=1)
                    _put(
                        acc16, rows0, col0, mixed, bias_ptr, out_ptr, mask_ptr, group_ptr, word,
                        n_words, stride_o, n_rows, n_cols, 1, HALF, N, high_layout, store_layout,
                        False, HAS_BIAS, CHOOSE, HAS_GROUP, ONE_WORD)


@gluon.jit(do_not_specialize=["n_rows", "n_inner", "n_words", "n_m", "n_n", "n_tiles"])
def _masked_gemm_hopper_kernel(
    w_desc, xq_desc, hw_desc, x_desc,
    ws_ptr, xs_ptr, bias_ptr, mask_ptr, group_ptr, out_ptr,
    stride_o, n_cols, n_rows, n_inner, n_words, n_m, n_n, n_tiles,
    LOW: gl.constexpr, HIGH: gl.constexpr, HIGH_SCALE: gl.constexpr, HAS_BIAS: gl.constexpr,
    HAS_GROUP: gl.constexpr, ONE_WORD: gl.constexpr,
    M: gl.constexpr, N: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr,
):
    dtype: gl.constexpr = out_ptr.dtype.element_ty
    bytes_layout: gl.constexpr = gl.NVMMASharedLayout(
        swizzle_byte_width=128, element_bitwidth=8, rank=2)
    wide_layout: gl.constexpr = gl.NVMMASharedLayout(
        swizzle_byte_width=128, element_bitwidth=16, rank=2)
    half_layout: gl.constexpr = gl.NVMMASharedLayout(
        swizzle_byte_width=64, element_bitwidth=8, rank=2)
    bar_layout: gl.constexpr = hopper.mbarrier.MBarrierLayout()
    xq_s = gl.allocate_shared_memory(gl.int8, [STAGES * 2, M // 2, 128], bytes_layout)
    w_s = gl.allocate_shared_memory(gl.int8, [STAGES, N, 128], bytes_layout)
    x_s = _as(xq_s, dtype, [STAGES * 2, M // 2, 64], wide_layout)
    if HIGH_SCALE:
        hw_s = _as(w_s, gl.int8, [STAGES * 2, N, 64], half_layout)
    else:
        hw_s = _as(w_s, dtype, [STAGES, N, 64], wide_layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar_layout)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar_layout)
    for i in gl.static_range(STAGES):
        hopper.mbarrier.init(full.index(i), count=1)
        hopper.mbarrier.init(empty.index(i), count=2)
    hopper.fence_async_shared()
    buffers = (xq_s, w_s, x_s, hw_s)
    bars = (full, empty)
    sizes = (n_rows, n_inner, n_words, n_m, n_n, n_tiles)
    gl.warp_specialize(
        [
            (_multiply, (0, buffers, bars, ws_ptr, xs_ptr, bias_ptr, mask_ptr, group_ptr, out_ptr,
                         stride_o, n_cols, sizes, M, N, STAGES, GROUP_M, LOW, HIGH, HIGH_SCALE,
                         HAS_BIAS, HAS_GROUP, ONE_WORD)),
            (_multiply, (1, buffers, bars, ws_ptr, xs_ptr, bias_ptr, mask_ptr, group_ptr, out_ptr,
                         stride_o, n_cols, sizes, M, N, STAGES, GROUP_M, LOW, HIGH, HIGH_SCALE,
                         HAS_BIAS, HAS_GROUP, ONE_WORD)),
            (_load, (xq_desc, w_desc, x_desc, hw_desc, buffers, bars, mask_ptr, group_ptr, sizes,
                     M, N, STAGES, GROUP_M, LOW, HIGH, HIGH_SCALE, HAS_GROUP, ONE_WORD)),
        ],
        [4, 1], [240, 24])


# fmt: on

# ---- host --------------------------------------------------------------------------------------


def why_unfit(aligned: bool, dev: Device) -> str | None:
    """Reason why this body cannot serve such a problem, whatever the config; None: it can."""
    if dev.arch != "sm90":
        return f"variant hopper needs an sm90 device, got {dev.arch}"
    if not device.is_there(gl):
        return "variant hopper needs a triton that has Gluon (3.6 or newer), got none"
    return None if aligned else "variant hopper needs rows that divide by 16 bytes"


def why_illegal(config: Config, dev: Device) -> str | None:
    """Reason why a config of this body cannot be launched; None: it can."""
    n, stages = config["BLOCK_N"], config["num_stages"]
    if config["BLOCK_M"] != BLOCK_M or config["BLOCK_K"] != BLOCK_K:
        return f"variant hopper has BLOCK_M {BLOCK_M} and BLOCK_K {BLOCK_K}"
    if n not in (128, 256):
        return f"variant hopper has BLOCK_N 128 or 256, got {n}"
    if stages < 2:
        return f"variant hopper needs num_stages of 2 or more, got {stages}"
    if (used := stages * (BLOCK_M + n) * BLOCK_K + 16640) > dev.local_mem_bytes:
        return f"tiles take {used} bytes of shared memory, more than {dev.local_mem_bytes}"
    return None


def bind(
    sizes: tuple[int, int, int],
    facts: dict[str, bool],
    strides: tuple[int, ...],
    n_words: int,
    config: Config,
) -> Callable[..., None]:
    """``launch(w, x_q, hw, x, weight_scale, x_scale, bias, mask, row_group, out)``.

    ``strides`` of the rows of w, x_q, hw, x and out, where these are there; ``facts``: the kernel's
    first constants. The first four lie at addresses that divide by 16.
    """
    m, n, k = sizes
    block_n, low, high = config["BLOCK_N"], facts["LOW"], facts["HIGH"]
    n_m, n_n = cdiv(m, BLOCK_M), cdiv(n, block_n)
    half = BLOCK_M // 2
    boxes = [
        _describer((n, k, strides[0]), block_n, 128, 8, 128),
        _describer((m, k, strides[1]), half, 128, 8, 128),
    ]
    if high:
        # int8 weights of 64 columns fill half a row of the swizzle.
        wide = (64, 8, 64) if facts["HIGH_SCALE"] else (64, 16, 128)
        more = [
            _describer((n, k, strides[2]), block_n, *wide),
            _describer((m, k, strides[3]), half, 64, 16, 128),
        ]
        boxes = boxes + more if low else more * 2
    start = device.bind_described(
        _masked_gemm_hopper_kernel,
        (min(n_m * n_n, device.current().num_cores),),
        tuple(boxes),
        num_warps=4,
        M=BLOCK_M,
        N=block_n,
        STAGES=config["num_stages"],
        GROUP_M=config["GROUP_M"],
        **facts,
        **device.rounding_each_step(),
    )
    numbers = (strides[4], n, m, k, n_words, n_m, n_n, n_m * n_n)
    return lambda *tensors: start(*tensors, *numbers)


def _describer(
    matrix: tuple[int, int, int], box_rows: int, box_cols: int, bits: int, swizzle: int
) -> Callable[[torch.Tensor], Any]:
    """What makes a tensor map's description; our own check of strides stands for Triton's."""
    rows, cols, stride = matrix
    layout = gl.NVMMASharedLayout(swizzle_byte_width=swizzle, element_bitwidth=bits, rank=2)
    cls = device.triton_part("triton.experimental.gluon.nvidia.hopper").TensorDescriptor

    def describe(tensor: torch.Tensor) -> Any:
        made = cls.__new__(cls)
        made.base, made.shape, made.strides = tensor, [rows, cols], [stride, 1]
        made.block_shape, made.layout = [box_rows, box_cols], layout
        return made

    return describe
