"""The body of ``masked_gemm`` for up to 64 rows on Hopper (sm_90): ``variant`` "stream".

Weights are read once, and to do so is most of the time; but each program reads x too, so with 64
rows and tiles of 64 outputs the cores take twice the weights' bytes from L2, and that decides. Here
a tile has 96 outputs or 192, so that 12288 of them, or 4096 times three parts of K, make about as
many programs as there are cores, one each.

Weights and x come by TMA into a ring of stages. A stage is filled again as soon as it has been
multiplied (wgmma; the 64 rows of x stand where an instruction takes 64), by a thread of the warps
that multiply: there is time enough between two steps. Programs with different outputs start at
different columns and go round, as else all would ask L2 for the same rows of x at once; sums of
int8 products are exact, and those of the high path begin at the first column.

With PDL the ring is filled with weights ahead of the wait for earlier kernels.

Tensors have powers of two, so a tile of 96 is one of 64 and one of 32, with sums apart.

The high path takes the same ring in a second round: 64 columns of 16 bits where there were 128 of
8. Where its weights are int8 (W8A16) they go by registers to a tile of 16 bits, and each step waits
for that. A tile whose rows all run low does without: it asks for the mask while it waits for x.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tkernels import device
from tkernels import masked_gemm_hopper as large
from tkernels.device import Device, cdiv
from tkernels.masked_gemm_hopper import _as, _bits, _describer, _load_tile, _steps
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
_barrier = getattr(gl, "thread_barrier", None) or gl.barrier  # newer tritons: barrier

# What this body has no choice of.
FIXED: Config = {
    "variant": "stream",
    "BLOCK_M": 64,  # what one wgmma takes
    "GROUP_M": 1,
    "SWAP": False,
    "programs_per_core": 0,
    "num_warps": 4,
}
# Outputs of a tile, and the two powers of two that they are.
PARTS = {64: (64, 0), 96: (64, 32), 128: (128, 0), 192: (128, 64), 256: (256, 0)}
# Numbers of rows for which its default is that of the operation, where all run in int8. On an H200
# in us, with the portable default's and cuBLAS' in bf16: 64 rows, 4096 x 12288 14.2 (17.7, 26.9),
# 12288 x 4096 17.1 (18.6, 31.3); 32 rows 15.1 (18.2, 27.0) and 16.3 (18.0, 29.5).
DEFAULT_ROWS = range(17, 65)

# fmt: off


@gluon.jit
def _ask_for_weights(
    w0_desc, w1_desc, w0_s, w1_s, full, slot, col0, k, there, N0: gl.constexpr, N1: gl.constexpr,
    P: gl.constexpr, EACH: gl.constexpr,
):
    """Start to bring a step's weights, if it is ``there``, and expect x too.

    EACH: tiles of this kind that a panel of a stage has.
    """
    columns: gl.constexpr = w0_s.shape[2]
    bar = full.index(slot)
    hopper.mbarrier.expect(bar, P * 128 * (64 + (N0 + N1) // EACH), pred=there)
    for p in gl.static_range(P):
        at = (slot * P + p) * EACH
        _load_tile(w0_desc, [col0, k + p * columns], bar, w0_s.index(at), pred=there)
        if N1 > 0:
            _load_tile(w1_desc, [col0 + N0, k + p * columns], bar, w1_s.index(at), pred=there)


@gluon.jit
def _ask_for_x(x_desc, x_s, full, slot, row0, k, there, P: gl.constexpr):
    columns: gl.constexpr = x_s.shape[2]
    for p in gl.static_range(P):
        _load_tile(
            x_desc, [row0, k + p * columns], full.index(slot), x_s.index(slot * P + p), pred=there)


@gluon.jit
def _column(j, turn, count, k_first, STEP: gl.constexpr):
    """First column of step j of a program that starts ``turn`` steps further on and goes round."""
    step = j + turn
    return k_first + gl.where(step < count, step, step - count) * STEP


@gluon.jit
def _ask_for_first(
    descs, buffers, full, row0, col0, k_first, count, done, N0: gl.constexpr, N1: gl.constexpr,
    P: gl.constexpr, STAGES: gl.constexpr, EACH: gl.constexpr,
):
    """Start to bring the first of ``count`` steps, behind ``done`` of another kind."""
    _barrier()  # all warps are through with those
    step: gl.constexpr = P * buffers[2].shape[2]
    for i in range(gl.minimum(count, STAGES)):
        slot = (done + i) % STAGES
        _ask_for_weights(
            descs[0], descs[1], buffers[0], buffers[1], full, slot, col0, k_first + i * step, True,
            N0, N1, P, EACH)
        _ask_for_x(descs[2], buffers[2], full, slot, row0, k_first + i * step, True, P)


@gluon.jit
def _widened(codes_s, wide_s):
    """Bring int8 weights as 16-bit ones to where the tensor core finds them."""
    layout: gl.constexpr = gl.BlockedLayout([1, 16], [8, 4], [4, 1], [1, 0])
    wide_s.store(codes_s.load(layout).to(wide_s.dtype))


@gluon.jit
def _sums(
    descs, buffers, wide, full, row0, col0, k_first, turn, asked, count, done,
    N0: gl.constexpr, N1: gl.constexpr, P: gl.constexpr, STAGES: gl.constexpr,
    WIDEN: gl.constexpr, ACC: gl.constexpr, layout0: gl.constexpr, layout1: gl.constexpr,
):
    """Products of ``count`` steps, the first of which have been asked for: [64, N0] and [64, N1].

    ``asked``: steps of a round, ``done``: steps that took stages before these.
    """
    w0_desc, w1_desc, x_desc = descs
    w0_s, w1_s, x_s = buffers
    wide0, wide1 = wide
    columns: gl.constexpr = x_s.shape[2]
    EACH: gl.constexpr = 2 if WIDEN else 1
    acc0 = gl.zeros([64, N0], ACC, layout0)
    acc1 = gl.zeros([64, N1 if N1 > 0 else 32], ACC, layout1)
    for j in range(count):
        slot = (done + j) % STAGES
        hopper.mbarrier.wait(full.index(slot), ((done + j) // STAGES) & 1)
        for p in gl.static_range(P):
            at = slot * P + p
            x = x_s.index(at)
            if WIDEN:
                _widened(w0_s.index(at * EACH), wide0)
                if N1 > 0:
                    _widened(w1_s.index(at * EACH), wide1)
                hopper.fence_async_shared()
                _barrier()
                acc0 = hopper.warpgroup_mma(x, wide0.permute([1, 0]), acc0, is_async=True)
                if N1 > 0:
                    acc1 = hopper.warpgroup_mma(x, wide1.permute([1, 0]), acc1, is_async=True)
                    acc0, acc1 = hopper.warpgroup_mma_wait(0, deps=[acc0, acc1])
                else:
                    acc0 = hopper.warpgroup_mma_wait(0, deps=[acc0])
                _barrier()
            else:
                acc0 = hopper.warpgroup_mma(
                    x, w0_s.index(at).permute([1, 0]), acc0, is_async=True)
                if N1 > 0:
                    acc1 = hopper.warpgroup_mma(
                        x, w1_s.index(at).permute([1, 0]), acc1, is_async=True)
        if not WIDEN:
            if N1 > 0:
                acc0, acc1 = hopper.warpgroup_mma_wait(0, deps=[acc0, acc1])
            else:
                acc0 = hopper.warpgroup_mma_wait(0, deps=[acc0])
        if j + STAGES < count:
            _barrier()  # all warps are through with the stage
            k = _column(j + STAGES, turn, asked, k_first, P * columns)
            _ask_for_weights(
                w0_desc, w1_desc, w0_s, w1_s, full, slot, col0, k, True, N0, N1, P, EACH)
            _ask_for_x(x_desc, x_s, full, slot, row0, k, True, P)
    return acc0, acc1


@gluon.jit
def _of_columns(ptr, col0, n_cols, N: gl.constexpr):
    """fp32 [N] for the columns from col0 on, in shared memory."""
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    n = col0 + gl.arange(0, N, gl.BlockedLayout([1], [32], [4], [0]))
    values = gl.load(ptr + n, mask=n < n_cols, other=0.0).to(gl.float32)
    return gl.allocate_shared_memory(gl.float32, [N], plain, values)


@gluon.jit
def _put(
    acc, x_scale, scale_s, bias_s, row0, col0, split, mixed, out_ptr, part_ptr, mask_ptr,
    group_ptr, word, n_words, stride_o, n_rows, n_cols, WANT: gl.constexpr,
    X_SCALE: gl.constexpr, W_SCALE: gl.constexpr, HAS_BIAS: gl.constexpr, CHOOSE: gl.constexpr,
    ONE_WORD: gl.constexpr, SPLIT_K: gl.constexpr,
):
    """Store sums [64, N]: results, or what one of several programs has of them.

    CHOOSE: of a mixed tile the rows whose bit is WANT.
    """
    N: gl.constexpr = acc.shape[1]
    sums: gl.constexpr = acc.type.layout
    # A thread stores 16 bytes at a time; a warp has the rows of its product.
    turned: gl.constexpr = gl.BlockedLayout(
        [4 if N > 32 else 2, 8], [4 if N > 32 else 8, 8 if N > 32 else 4], [4, 1], [1, 0])
    layout: gl.constexpr = sums if SPLIT_K > 1 else turned
    rows = row0 + gl.arange(0, 64, gl.SliceLayout(1, layout))
    cols = col0 + gl.arange(0, N, gl.SliceLayout(0, layout))
    ok = rows < n_rows
    if CHOOSE:  # noqa: SIM102
        if mixed:
            ok = ok & (_bits(mask_ptr, group_ptr, word, n_words, rows, n_rows, ONE_WORD) == WANT)
    there = ok[:, None] & (cols < n_cols)[None, :]
    rows = rows.to(gl.int64)
    if SPLIT_K > 1:
        parts = part_ptr + ((rows + split.to(gl.int64) * n_rows) * n_cols)[:, None]
        gl.store(parts + cols[None, :], acc.to(gl.int32, bitcast=True), mask=there)
    else:
        y = acc.to(gl.float32)
        if X_SCALE:
            y = y * gl.convert_layout(x_scale, gl.SliceLayout(1, sums))[:, None]
        if W_SCALE:
            y = y * scale_s.load(gl.SliceLayout(0, sums))[None, :]
        if HAS_BIAS:
            y = y + bias_s.load(gl.SliceLayout(0, sums))[None, :]
        outs = out_ptr + (rows * stride_o)[:, None] + cols[None, :]
        y = gl.convert_layout(y.to(out_ptr.dtype.element_ty), layout)
        gl.store(outs, y, mask=there)


@gluon.jit(do_not_specialize=["n_rows", "n_inner", "n_words", "n_m", "n_steps"])
def _masked_gemm_stream_kernel(
    w0_desc, w1_desc, xq_desc, hw0_desc, hw1_desc, x_desc,
    ws_ptr, xs_ptr, bias_ptr, mask_ptr, group_ptr, out_ptr, part_ptr,
    stride_o, n_cols, n_rows, n_inner, n_words, n_m,
    n_steps,  # that a program takes of the low path; of the high one twice as many
    LOW: gl.constexpr, HIGH: gl.constexpr, HIGH_SCALE: gl.constexpr, HAS_BIAS: gl.constexpr,
    HAS_GROUP: gl.constexpr, ONE_WORD: gl.constexpr, PDL: gl.constexpr,
    N0: gl.constexpr, N1: gl.constexpr,
    P: gl.constexpr,  # panels of a stage: 128 bytes of each row
    SPLIT_K: gl.constexpr, STAGES: gl.constexpr,
):
    dtype: gl.constexpr = out_ptr.dtype.element_ty
    WIDEN: gl.constexpr = HIGH and HIGH_SCALE
    HAS_SCALE: gl.constexpr = SPLIT_K == 1 and (LOW or HIGH_SCALE)
    ADD_BIAS: gl.constexpr = SPLIT_K == 1 and HAS_BIAS
    CHOOSE: gl.constexpr = LOW and HIGH and HAS_GROUP
    M1: gl.constexpr = N1 if N1 > 0 else 32  # there is no tile without outputs: this one is unused
    WIDTH0: gl.constexpr = N0 if N0 < 128 else 128  # Triton has no wider instruction for int8
    low0: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH0, 32])
    low1: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, M1, 32])
    high0: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N0, 16])
    high1: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, M1, 16])
    of8: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
    of16: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    half: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=8, rank=2)

    if PDL:
        _let_next_kernel_start()
    split = gl.program_id(0) % SPLIT_K
    place = gl.program_id(0) // SPLIT_K
    row0 = place % n_m * 64
    tile = place // n_m
    col0 = tile * (N0 + N1)
    k_first = split * n_steps * (P * 128)
    low_count = gl.minimum((n_inner + (P * 128 - 1)) // (P * 128) - split * n_steps, n_steps)
    low_count = gl.maximum(low_count, 0)
    high_count = gl.minimum((n_inner + (P * 64 - 1)) // (P * 64) - split * 2 * n_steps, 2 * n_steps)
    high_count = gl.maximum(high_count, 0)

    w0_s = gl.allocate_shared_memory(gl.int8, [STAGES * P, N0, 128], of8)
    w1_s = w0_s
    if N1 > 0:
        w1_s = gl.allocate_shared_memory(gl.int8, [STAGES * P, N1, 128], of8)
    xq_s = gl.allocate_shared_memory(gl.int8, [STAGES * P, 64, 128], of8)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], hopper.mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        hopper.mbarrier.init(full.index(i), count=1)
    hopper.fence_async_shared()
    _barrier()
    hw0_s = w0_s
    hw1_s = w1_s
    x_s = xq_s
    wide0 = w0_s
    wide1 = w1_s
    EACH: gl.constexpr = 2 if WIDEN else 1
    if HIGH:
        x_s = _as(xq_s, dtype, [STAGES * P, 64, 64], of16)
        if WIDEN:
            hw0_s = _as(w0_s, gl.int8, [STAGES * P * 2, N0, 64], half)
            wide0 = gl.allocate_shared_memory(dtype, [N0, 64], of16)
            if N1 > 0:
                hw1_s = _as(w1_s, gl.int8, [STAGES * P * 2, N1, 64], half)
                wide1 = gl.allocate_shared_memory(dtype, [N1, 64], of16)
        else:
            hw0_s = _as(w0_s, dtype, [STAGES * P, N0, 64], of16)
            if N1 > 0:
                hw1_s = _as(w1_s, dtype, [STAGES * P, N1, 64], of16)

    # The first weights, which no earlier kernel writes.
    turn = tile % gl.maximum(low_count, 1)
    for i in gl.static_range(STAGES):
        if LOW:
            k = _column(i, turn, low_count, k_first, P * 128)
            _ask_for_weights(
                w0_desc, w1_desc, w0_s, w1_s, full, i, col0, k, i < low_count, N0, N1, P, 1)
        else:
            _ask_for_weights(
                hw0_desc, hw1_desc, hw0_s, hw1_s, full, i, col0, k_first + i * (P * 64),
                i < high_count, N0, N1, P, EACH)
    scale0 = full
    scale1 = full
    bias0 = full
    bias1 = full
    if HAS_SCALE:
        scale0 = _of_columns(ws_ptr, col0, n_cols, N0)
        if N1 > 0:
            scale1 = _of_columns(ws_ptr, col0 + N0, n_cols, N1)
    if ADD_BIAS:
        bias0 = _of_columns(bias_ptr, col0, n_cols, N0)
        if N1 > 0:
            bias1 = _of_columns(bias_ptr, col0 + N0, n_cols, N1)
    if PDL:  # nothing above reads what an earlier kernel may write, or stores
        _wait_for_earlier_kernels()
    for i in gl.static_range(STAGES):
        if LOW:
            k = _column(i, turn, low_count, k_first, P * 128)
            _ask_for_x(xq_desc, xq_s, full, i, row0, k, i < low_count, P)
        else:
            _ask_for_x(x_desc, x_s, full, i, row0, k_first + i * (P * 64), i < high_count, P)

    word = n_words.to(gl.int64)
    if LOW and HIGH:
        word = gl.load(mask_ptr)
    low, high = _steps(
        mask_ptr, group_ptr, word, n_words, row0, n_rows, n_inner, 64, 4, LOW, HIGH, HAS_GROUP,
        ONE_WORD)
    mixed = (low > 0) & (high > 0)
    done = 0
    if LOW:
        x_scale = gl.full([64], 1.0, gl.float32, gl.SliceLayout(1, low0))
        if SPLIT_K == 1:
            rows = row0 + gl.arange(0, 64, gl.SliceLayout(1, low0))
            x_scale = gl.load(xs_ptr + rows, mask=rows < n_rows, other=0.0)
        # Where no row runs low, what has been asked for is taken, and that is all.
        done = gl.where(low > 0, low_count, gl.minimum(low_count, STAGES))
        acc0, acc1 = _sums(
            (w0_desc, w1_desc, xq_desc), (w0_s, w1_s, xq_s), (wide0, wide1), full, row0, col0,
            k_first, turn, low_count, done, 0, N0, N1, P, STAGES, False, gl.int32, low0, low1)
        if low > 0:
            _put(
                acc0, x_scale, scale0, bias0, row0, col0, split, mixed, out_ptr, part_ptr,
                mask_ptr, group_ptr, word, n_words, stride_o, n_rows, n_cols, 0, True, True,
                HAS_BIAS, CHOOSE, ONE_WORD, SPLIT_K)
            if N1 > 0:
                _put(
                    acc1, x_scale, scale1, bias1, row0, col0 + N0, split, mixed, out_ptr, part_ptr,
                    mask_ptr, group_ptr, word, n_words, stride_o, n_rows, n_cols, 0, True, True,
                    HAS_BIAS, CHOOSE, ONE_WORD, SPLIT_K)
    if HIGH:  # noqa: SIM102 (what is known at compile time stands alone)
        if high > 0:
            if LOW:
                _ask_for_first(
                    (hw0_desc, hw1_desc, x_desc), (hw0_s, hw1_s, x_s), full, row0, col0, k_first,
                    high_count, done, N0, N1, P, STAGES, EACH)
            real0, real1 = _sums(
                (hw0_desc, hw1_desc, x_desc), (hw0_s, hw1_s, x_s), (wide0, wide1), full, row0,
                col0, k_first, 0, high_count, high_count, done, N0, N1, P, STAGES, WIDEN,
                gl.float32, high0, high1)
            _put(
                real0, 0, scale0, bias0, row0, col0, split, mixed, out_ptr, part_ptr, mask_ptr,
                group_ptr, word, n_words, stride_o, n_rows, n_cols, 1, False, HIGH_SCALE, HAS_BIAS,
                CHOOSE, ONE_WORD, SPLIT_K)
            if N1 > 0:
                _put(
                    real1, 0, scale1, bias1, row0, col0 + N0, split, mixed, out_ptr, part_ptr,
                    mask_ptr, group_ptr, word, n_words, stride_o, n_rows, n_cols, 1, False,
                    HIGH_SCALE, HAS_BIAS, CHOOSE, ONE_WORD, SPLIT_K)


# fmt: on

# ---- host --------------------------------------------------------------------------------------


def why_unfit(problem: Problem, dev: Device) -> str | None:
    """Reason why this body cannot serve such a problem, whatever the config; None: it can."""
    why = large.why_unfit(problem["aligned"], dev)
    return None if why is None else why.replace("variant hopper", "variant stream")


def default_config(problem: Problem, dev: Device) -> Config | None:
    """Tiles of 96 and parts of K that make about a program a core; None: there are no such."""
    tiles, k = cdiv(problem["m"], 64) * cdiv(problem["n"], 96), problem["k"]
    split = max(1, min(dev.num_cores // tiles, k // 1024))
    if not 3 * dev.num_cores <= 4 * tiles * split <= 4 * dev.num_cores:
        return None
    config = {**FIXED, "BLOCK_N": 96, "BLOCK_K": 256, "SPLIT_K": split, "PDL": True}
    config |= {"num_stages": 5}
    return config if why_illegal(config, problem, dev) is None else None


def shared_bytes(config: Config, problem: Problem) -> int:
    """Bytes of shared memory that a program takes at the most."""
    n, stages = config["BLOCK_N"], config["num_stages"]
    used = stages * config["BLOCK_K"] * (64 + n)
    if problem["path"] != "int8" and not problem["high_weight"]:
        used += 128 * n  # a step's weights, widened
    if problem["path"] == "masked":
        used += 8192  # results on their way to another layout, while the ring is kept
    return int(used + 8 * n + 1024)  # scales, bias, barriers


def why_illegal(config: Config, problem: Problem, dev: Device) -> str | None:
    """Reason why a config of this body cannot be launched; None: it can."""
    if wrong := [f"{name} {value}" for name, value in FIXED.items() if config[name] != value]:
        return f"variant stream has {', '.join(wrong)}"
    for name, values in (("BLOCK_N", tuple(PARTS)), ("BLOCK_K", (128, 256))):
        if config[name] not in values:
            return f"variant stream has {name} of {values}, got {config[name]}"
    if config["num_stages"] < 2:
        return f"variant stream needs num_stages of 2 or more, got {config['num_stages']}"
    if not 1 <= config["SPLIT_K"] <= 64:
        return f"SPLIT_K must be 1 to 64, got {config['SPLIT_K']}"
    if (used := shared_bytes(config, problem)) > dev.local_mem_bytes:
        return f"the tiles take {used} bytes of shared memory, more than {dev.local_mem_bytes}"
    return None


def bind(
    sizes: tuple[int, int, int],
    facts: dict[str, bool],
    strides: tuple[int, ...],
    n_words: int,
    config: Config,
) -> Callable[..., None]:
    """``launch(w, w, x_q, hw, hw, x, weight_scale, .., row_group, out, part)``.

    As in ``masked_gemm_hopper.bind``, but for w and hw, which come once for each part of a tile,
    and ``part``: int32 [SPLIT_K, m, n], where SPLIT_K is more than 1.
    """
    m, n, k = sizes
    n0, n1 = PARTS[config["BLOCK_N"]]
    tall = (n0, n1 or n0)
    splits, low, high = config["SPLIT_K"], facts["LOW"], facts["HIGH"]
    boxes = [_describer((n, k, strides[0]), rows, 128, 8, 128) for rows in tall]
    boxes += [_describer((m, k, strides[1]), 64, 128, 8, 128)]
    if high:  # what no row needs stays a pointer
        # int8 weights of 64 columns fill half a row of the swizzle.
        wide = (64, 8, 64) if facts["HIGH_SCALE"] else (64, 16, 128)
        more = [_describer((n, k, strides[2]), rows, *wide) for rows in tall]
        more += [_describer((m, k, strides[3]), 64, 64, 16, 128)]
        boxes = boxes + more if low else more * 2
    options: dict[str, Any] = {"launch_pdl": True} if config["PDL"] else {}
    start = device.bind_described(
        _masked_gemm_stream_kernel,
        (cdiv(m, 64) * cdiv(n, config["BLOCK_N"]) * splits,),
        tuple(boxes),
        num_warps=4,
        PDL=config["PDL"],
        N0=n0,
        N1=n1,
        P=config["BLOCK_K"] // 128,
        SPLIT_K=splits,
        STAGES=config["num_stages"],
        **facts,
        **device.rounding_each_step(),
        **options,
    )
    n_steps = cdiv(cdiv(k, config["BLOCK_K"]), splits)
    numbers = (strides[4], n, m, k, n_words, cdiv(m, 64), n_steps)
    return lambda *tensors: start(*tensors, *numbers)
