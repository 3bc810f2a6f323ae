"""The body of ``flash_attn`` for Hopper (sm_90): ``variant`` "hopper" of its configs.

One persistent program a core: one warp loads tiles with TMA, two groups of four warps multiply
(wgmma) and take the softmax, each for its own half of BLOCK_M queries. While one group is in its
softmax the other's products run: named barriers pass the tensor core to and fro (FlashAttention 3,
Shah et al., 2024, arXiv 2407.08608, section 3.1), and within a group the product of the next scores
is issued before the last weights meet their values (section 3.2). Key blocks go from last to first,
so that those which must be masked come first. Tiles go longest first within a section of heads
whose keys and values stay in L2.

It is written in Gluon, because plain Triton schedules none of this itself (measured on an H100:
0.62 of cuDNN's speed, and 1.04 to 1.12 with this body).

A tensor map describes [batch, token, head, dim] with its strides, so views of a packed qkv are read
as they are. Rows past a tensor's end arrive as zeros. Rows past a sequence's end in a packed batch
belong to its neighbour: their scores are masked, and their values, which zero times NaN would
spread, are zeroed in shared memory, in the last block alone.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from tkernels import device
from tkernels.device import Device, cdiv, next_power_of_2
from tkernels.registry import Config

if TYPE_CHECKING:
    from tkernels import _triton as gl
    from tkernels import _triton as gluon
    from tkernels import _triton as hopper
else:
    gluon = device.triton_part("triton.experimental.gluon")
    gl = device.triton_part("triton.experimental.gluon.language")
    hopper = device.triton_part("triton.experimental.gluon.language.nvidia.hopper")

# Its name in newer tritons, and in 3.6.
_load_tile = getattr(hopper.tma, "async_load", None) or hopper.tma.async_copy_global_to_shared
_shared: Any = gl.shared_memory_descriptor
_view: Any = getattr(_shared, "reinterpret", None) or _shared._reinterpret

ALL_HEADS = 1 << 16  # as a SECTION: more than there are
BLOCK_M = 128  # queries of a program: 64 for each group of four warps, what one wgmma takes

PAGED = gl.constexpr(2)  # of VARLEN, if queries are packed but keys lie in pages
# Of SCALES, where keys are fp16 without their scales: each key has one, or each channel of keys and
# of values, or each block of keys a power of two.
OF_KEYS, OF_CHANNELS, OF_BLOCKS = gl.constexpr(1), gl.constexpr(2), gl.constexpr(3)
_LOG2E = gl.constexpr(math.log2(math.e))
_LN2 = gl.constexpr(math.log(2.0))
_LEAST = gl.constexpr(2.0**-126)  # factor of scores that are 0 with it, as without


# ---- the kernel: scheduling --------------------------------------------------------------------


@gluon.jit
def _tile_of(tile, n_m, n_batch_heads, section, n_heads):
    """(tile of queries, batch, head): sections of heads, within one the longest tiles first.

    A single section of all heads is dealt to and fro: the program that gets the longest tile of one
    round gets the shortest of the next.
    """
    n_programs = gl.num_programs(0)
    round0 = tile // n_programs * n_programs
    dealt = tile
    if (section >= n_batch_heads) & (tile // n_programs % 2 == 1):
        last = gl.minimum(round0 + n_programs, n_m * n_batch_heads) - 1
        dealt = round0 + last - tile
    per_section = section * n_m
    s = dealt // per_section
    rest = dealt - s * per_section
    width = gl.minimum(section, n_batch_heads - s * section)
    batch_head = s * section + rest % width
    return n_m - 1 - rest // width, batch_head // n_heads, batch_head % n_heads


@gluon.jit
def _sequence(batch, cu_q_ptr, cu_k_ptr, seqlen_q, seqlen_k, VARLEN: gl.constexpr):
    """(index of the tensor maps' first dimension, first query, first key, queries, keys)."""
    q_start = batch * 0
    k_start = q_start
    if VARLEN:
        q_start = gl.load(cu_q_ptr + batch)
        seqlen_q = gl.load(cu_q_ptr + batch + 1) - q_start
        if VARLEN == PAGED:  # cu_k_ptr holds lengths
            seqlen_k = gl.load(cu_k_ptr + batch)
        else:
            k_start = gl.load(cu_k_ptr + batch)
            seqlen_k = gl.load(cu_k_ptr + batch + 1) - k_start
        batch = batch * 0
    return batch, q_start, k_start, seqlen_q, seqlen_k


@gluon.jit
def _key_blocks(
    m, seqlen_q, seqlen_k, window, M: gl.constexpr, N: gl.constexpr,
    CAUSAL: gl.constexpr, WINDOW: gl.constexpr,
):  # fmt: skip
    """First and end of the key blocks that a tile of queries sees; one, masked, where none."""
    end = seqlen_k
    first = seqlen_k * 0
    if CAUSAL:
        end = gl.minimum((m + 1) * M + seqlen_k - seqlen_q, seqlen_k)
    end = gl.maximum((end + N - 1) // N, 1)
    if WINDOW:
        first = gl.maximum(m * M + seqlen_k - seqlen_q - window + 1, 0) // N
        first = gl.minimum(first, end - 1)
    return first, end


@gluon.jit
def _split_of(item, n_tiles, SPLITS: gl.constexpr):
    """(tile, split): all tiles of one split, then those of the next, so that those that run at a
    time share keys."""
    split = item * 0
    if SPLITS > 1:
        split = item // n_tiles
        item -= split * n_tiles
    return item, split


@gluon.jit
def _used(seqlen_k, SPLITS: gl.constexpr, MIN_SHARE: gl.constexpr):
    """How many splits a sequence's keys are shared out to, as the kernel that merges has it."""
    return gl.minimum(gl.maximum((seqlen_k + MIN_SHARE - 1) // MIN_SHARE, 1), SPLITS)


@gluon.jit
def _share(
    first, end, split, seqlen_k, N: gl.constexpr, SPLITS: gl.constexpr, MIN_SHARE: gl.constexpr
):
    """First and end of a split's run of a tile's key blocks; one past all keys, where none."""
    if SPLITS > 1:
        used = _used(seqlen_k, SPLITS, MIN_SHARE)
        count = end - first
        end = first + count * (split + 1) // used
        first += count * split // used
        if first == end:
            first = (seqlen_k + N - 1) // N
            end = first + 1
    return first, end


# ---- the kernel: one warp loads ----------------------------------------------------------------


@gluon.jit
def _load(
    q_desc, k_desc, v_desc, buffers, bars, cu_q_ptr, cu_k_ptr, sizes,
    M: gl.constexpr, N: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
    CAUSAL: gl.constexpr, WINDOW: gl.constexpr, VARLEN: gl.constexpr,
):  # fmt: skip
    q_s, k_s, v_s = buffers
    q_full, q_empty, k_full, k_empty, v_full, v_empty = bars
    max_q, max_k, window, n_heads, group, n_m, n_batch_heads, section, n_tiles = sizes
    done = 0  # tiles of queries
    count = 0  # blocks of keys
    for tile in range(gl.program_id(0), n_tiles, gl.num_programs(0)):
        m, b, h = _tile_of(tile, n_m, n_batch_heads, section, n_heads)
        b, q0, k0, seqlen_q, seqlen_k = _sequence(b, cu_q_ptr, cu_k_ptr, max_q, max_k, VARLEN)
        if m * M < seqlen_q:
            first, end = _key_blocks(m, seqlen_q, seqlen_k, window, M, N, CAUSAL, WINDOW)
            for c in gl.static_range(2):
                hopper.mbarrier.wait(q_empty.index(c), (done & 1) ^ 1)
                hopper.mbarrier.expect(q_full.index(c), M // 2 * D * 2)
                _load_tile(
                    q_desc, [b, q0 + m * M + c * (M // 2), h, 0], q_full.index(c), q_s.index(c)
                )
            for j in range(end - first):
                row = k0 + (end - 1 - j) * N
                stage = count % STAGES
                phase = ((count // STAGES) & 1) ^ 1
                hopper.mbarrier.wait(k_empty.index(stage), phase)
                hopper.mbarrier.expect(k_full.index(stage), N * D * 2)
                _load_tile(k_desc, [b, row, h // group, 0], k_full.index(stage), k_s.index(stage))
                hopper.mbarrier.wait(v_empty.index(stage), phase)
                hopper.mbarrier.expect(v_full.index(stage), N * D * 2)
                _load_tile(v_desc, [b, row, h // group, 0], v_full.index(stage), v_s.index(stage))
                count += 1
            done += 1


# ---- the kernel: two groups of four warps multiply ---------------------------------------------


@gluon.jit
def _take_turn(bar):
    """Wait until the other group passes the tensor core on."""
    gl.inline_asm_elementwise(
        "bar.sync $1, 256; mov.b32 $0, 0;", "=r,r", [gl.to_tensor(bar)],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _pass_turn(bar):
    gl.inline_asm_elementwise(
        "bar.arrive $1, 256; mov.b32 $0, 0;", "=r,r", [gl.to_tensor(bar)],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _capped(s, cap_scale):
    """tanh(s * cap_scale), as exact near zero as elsewhere."""
    x = s * cap_scale
    # By one exponential, whose overflow gives 1 and underflow -1; but near zero the difference has
    # no more than the digits of 1.0, so there it is the series.
    y = 1.0 - 2.0 / (1.0 + gl.exp2(x * (2.0 * _LOG2E)))
    x2 = x * x
    series = 0.13333333 + x2 * (-0.053968254 + x2 * 0.021869489)
    return gl.where(gl.abs(x) < 0.3, x * (1.0 + x2 * (-0.33333333 + x2 * series)), y)


@gluon.jit
def _exponent(m, scale_log2):
    """(maximum, factor, offset): weights of a row are exp2(score * factor - offset).

    Multiplication and subtraction are one instruction, which rounds once, but the offset has been
    rounded before: if it is huge, by so much that weights would overflow. Then the factor is the
    next lower power of two, which rounds nothing; scores that differ at all are so far apart there
    that their weights are 1 and 0 with either factor.
    """
    m = gl.where(m == float("-inf"), 0.0, m)  # -inf - -inf is NaN
    exact = (scale_log2.to(gl.int32, bitcast=True) & 0x7F800000).to(gl.float32, bitcast=True)
    offset = m * scale_log2
    factor = gl.where(gl.maximum(offset, -offset) >= 268435456.0, exact, scale_log2)
    return m, factor, m * factor


@gluon.jit
def _seen(s, cols, last, window, WINDOW: gl.constexpr):
    """Scores of keys that a row may see, else -inf; ``last`` is each row's last one."""
    ok = cols[None, :] <= last[:, None]
    if WINDOW:
        ok = ok & (cols[None, :] > (last - window)[:, None])
    return gl.where(ok, s, float("-inf"))


@gluon.jit
def _zero_rows(tile, n_rows, N: gl.constexpr, D: gl.constexpr):
    """Zero the rows of a tile in shared memory from ``n_rows`` on.

    Both groups do it, before their own use, and write the same.
    """
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    for i in gl.static_range(N // 32):
        if (i + 1) * 32 > n_rows:
            part = tile.slice(i * 32, 32)
            rows = i * 32 + gl.arange(0, 32, gl.SliceLayout(1, layout))
            values = part.load(layout)
            part.store(gl.where((rows < n_rows)[:, None], values, gl.zeros_like(values)))
    hopper.fence_async_shared()


@gluon.jit
def _channels(ptr, first, D: gl.constexpr, HEAD_DIM: gl.constexpr, layout: gl.constexpr):
    d = gl.arange(0, D, gl.SliceLayout(0, layout))
    return gl.load(ptr + first + d, mask=d < HEAD_DIM, other=0.0)


@gluon.jit
def _row_of(row, layout: gl.constexpr, N: gl.constexpr):
    """[1, N] in shared memory as the columns of a tile have it."""
    flat = _view(row, row.dtype, [N], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    return flat.load(gl.SliceLayout(0, layout))


@gluon.jit
def _in_fp16(
    q, channels_ptr, first, M: gl.constexpr, D: gl.constexpr, HEAD_DIM: gl.constexpr,
    SCALED: gl.constexpr,
):  # fmt: skip
    """(queries in fp16, where they lay, and what they count in): rows whose largest is 1 to 2.

    Units are powers of two, so that nothing is rounded but what is 2^-14 of a row's largest, and
    products with channels' scales (SCALED).
    """
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    x = q.load(layout).to(gl.float32)
    if SCALED:
        x = x * _channels(channels_ptr, first, D, HEAD_DIM, layout)[None, :]
    exponent = gl.max(gl.abs(x), 1).to(gl.int32, bitcast=True) >> 23
    exponent = gl.minimum(gl.maximum(exponent, 1), 253)
    inverse = ((254 - exponent) << 23).to(gl.float32, bitcast=True)
    made = _view(q, gl.float16, [M, D], q.layout)
    made.store((x * inverse[:, None]).to(gl.float16))
    hopper.fence_async_shared()
    return made, (exponent << 23).to(gl.float32, bitcast=True)


@gluon.jit
def _attend(
    SIDE: gl.constexpr, buffers, bars, out_ptr, lse_ptr, sinks_ptr, scales_s, k_scales_ptr,
    v_channels_ptr, cu_q_ptr, cu_k_ptr, strides, scale_log2, cap_scale, sizes,
    HEAD_DIM: gl.constexpr,
    M: gl.constexpr, N: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
    CAUSAL: gl.constexpr, WINDOW: gl.constexpr, VARLEN: gl.constexpr, SOFTCAP: gl.constexpr,
    SINKS: gl.constexpr, LSE: gl.constexpr, PACK: gl.constexpr, SPLITS: gl.constexpr,
    MIN_SHARE: gl.constexpr, SCALES: gl.constexpr,
):  # fmt: skip
    """A row is a token and one of PACK heads: token * PACK + head; ``n_heads`` counts packs.

    With SPLITS a tile is computed in parts, and ``out_ptr`` and ``lse_ptr`` are theirs.

    With SCALES keys are fp16 without their scales, so queries become fp16 where they lie. OF_KEYS:
    scores are multiplied by those in ``scales_s``, which come and go with the keys. OF_CHANNELS:
    queries by k_scales_ptr's, and results by v_channels_ptr's, [key heads, HEAD_DIM] each.
    OF_BLOCKS: what scores count in, k_scales_ptr's [batch, key heads, max_k blocks].
    """
    q_s, k_s, v_s = buffers
    q_full, q_empty, k_full, k_empty, v_full, v_empty = bars
    max_q, max_k, window, n_heads, group, n_m, n_batch_heads, section, n_tiles = sizes
    stride_ob, stride_os, stride_oh, stride_lb, stride_ls, stride_lh = strides
    HALF: gl.constexpr = M // 2
    TOKENS: gl.constexpr = M // PACK
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    store_layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    # Four lanes have 32 bytes of a row of parts (fp32), so these are stored as they lie.
    out_layout: gl.constexpr = o_layout if SPLITS > 1 else store_layout
    o_rows: gl.constexpr = gl.SliceLayout(1, o_layout)
    dtype: gl.constexpr = v_s.dtype
    MINE: gl.constexpr = 8 + SIDE  # named barriers; Triton's own stand below 8
    OTHER: gl.constexpr = 9 - SIDE
    done = 0
    count = 0
    q = q_s.index(SIDE).reshape([HALF, D])
    if SIDE == 1:
        _pass_turn(OTHER)
    for item in range(gl.program_id(0), n_tiles, gl.num_programs(0)):
        tile, split = _split_of(item, n_m * n_batch_heads, SPLITS)
        m_tile, b, h = _tile_of(tile, n_m, n_batch_heads, section, n_heads)
        if SCALES == OF_BLOCKS:
            blocks_ptr = k_scales_ptr + (b * (n_heads // group) + h // group) * max_k
        b, q0, _, seqlen_q, seqlen_k = _sequence(b, cu_q_ptr, cu_k_ptr, max_q, max_k, VARLEN)
        there = m_tile * TOKENS < seqlen_q
        if SPLITS > 1:
            there = there & (split < _used(seqlen_k, SPLITS, MIN_SHARE))
        if there:
            first, end = _key_blocks(m_tile, seqlen_q, seqlen_k, window, TOKENS, N, CAUSAL, WINDOW)
            first, end = _share(first, end, split, seqlen_k, N, SPLITS, MIN_SHARE)
            row0 = m_tile * TOKENS + SIDE * (HALF // PACK)  # the first row's token, and each one's
            rows = row0 + gl.arange(0, HALF, gl.SliceLayout(1, s_layout)) // PACK
            cols = gl.arange(0, N, gl.SliceLayout(0, s_layout))
            shift = seqlen_k - seqlen_q  # the last query stands at the last key
            acc = gl.zeros([HALF, D], gl.float32, o_layout)
            zero = gl.zeros([HALF, N], gl.float32, s_layout)

            # The last block of keys: nothing to multiply its weights with is at hand yet.
            stage = count % STAGES
            phase = (count // STAGES) & 1
            n0 = (end - 1) * N
            hopper.mbarrier.wait(q_full.index(SIDE), done & 1)
            row_scale, row_cap, queries = scale_log2, cap_scale, q
            if SCALES:
                channels = h // group * HEAD_DIM
                queries, unit = _in_fp16(
                    q, k_scales_ptr, channels, HALF, D, HEAD_DIM, SCALES == OF_CHANNELS
                )
                unit = gl.convert_layout(unit, gl.SliceLayout(1, s_layout))
                if SOFTCAP:
                    row_cap = (unit * cap_scale)[:, None]
                else:
                    row_scale = unit * scale_log2
            if SCALES == OF_BLOCKS:  # past all keys there is none
                of_block = gl.load(blocks_ptr + n0 // N, mask=n0 < seqlen_k, other=1.0)
            hopper.mbarrier.wait(k_full.index(stage), phase)
            _take_turn(MINE)
            k = k_s.index(stage).reshape([N, D]).permute([1, 0])
            s = hopper.warpgroup_mma(queries, k, zero, use_acc=False, is_async=True)
            _pass_turn(OTHER)
            if SCALES == OF_KEYS:
                key_scales = _row_of(scales_s.index(stage), s_layout, N)
            s = hopper.warpgroup_mma_wait(0, deps=[s])
            hopper.mbarrier.arrive(k_empty.index(stage), count=1)
            if SCALES == OF_KEYS:
                s = s * key_scales[None, :]
            if SOFTCAP:
                s = _capped(s, row_cap * of_block if SCALES == OF_BLOCKS else row_cap)
            if CAUSAL:  # no query stands past the last key, so that the tail is masked too
                s = _seen(s, cols, rows + (shift - n0), window, WINDOW)
            else:
                s = gl.where((cols < seqlen_k - n0)[None, :], s, float("-inf"))
            m = gl.max(s, 1)
            if SCALES == OF_BLOCKS and not SOFTCAP:
                m = m * of_block
            _, factor, offset = _exponent(m, row_scale)
            if SCALES == OF_BLOCKS and not SOFTCAP:
                factor = gl.maximum(factor * of_block, _LEAST)  # -inf * 0 is NaN
            p = gl.exp2(s * factor[:, None] - offset[:, None])
            total = gl.sum(p, 1)
            p = gl.convert_layout(p.to(dtype), p_layout)
            hopper.mbarrier.wait(v_full.index(stage), phase)
            if VARLEN:  # noqa: SIM102 (what is known at compile time stands alone)
                if n0 + N > seqlen_k:
                    _zero_rows(v_s.index(stage).reshape([N, D]), seqlen_k - n0, N, D)

            for _ in range(end - first - 1):
                v_stage = stage
                count += 1
                stage = count % STAGES
                phase = (count // STAGES) & 1
                n0 -= N
                if SCALES == OF_BLOCKS:
                    of_block = gl.load(blocks_ptr + n0 // N)
                hopper.mbarrier.wait(k_full.index(stage), phase)
                _take_turn(MINE)
                k = k_s.index(stage).reshape([N, D]).permute([1, 0])
                s = hopper.warpgroup_mma(queries, k, zero, use_acc=False, is_async=True)
                v = v_s.index(v_stage).reshape([N, D])
                acc = hopper.warpgroup_mma(p, v, acc, is_async=True)
                _pass_turn(OTHER)
                if SCALES == OF_KEYS:
                    key_scales = _row_of(scales_s.index(stage), s_layout, N)
                s = hopper.warpgroup_mma_wait(1, deps=[s])
                hopper.mbarrier.arrive(k_empty.index(stage), count=1)
                if SCALES == OF_KEYS:
                    s = s * key_scales[None, :]
                if SOFTCAP:
                    s = _capped(s, row_cap * of_block if SCALES == OF_BLOCKS else row_cap)
                if CAUSAL:
                    edge = n0 + N - 1 > row0 + shift
                    if WINDOW:
                        edge = edge | (n0 < row0 + HALF // PACK + shift - window)
                    if edge:
                        s = _seen(s, cols, rows + (shift - n0), window, WINDOW)
                m_new = gl.max(s, 1)
                if SCALES == OF_BLOCKS and not SOFTCAP:
                    m_new = m_new * of_block
                m_new = gl.maximum(m, m_new)
                m_now, factor, offset = _exponent(m_new, row_scale)
                of_scores = factor
                if SCALES == OF_BLOCKS and not SOFTCAP:
                    of_scores = gl.maximum(factor * of_block, _LEAST)
                p = gl.exp2(s * of_scores[:, None] - offset[:, None])
                alpha = gl.exp2((m - m_now) * factor)
                total = total * alpha + gl.sum(p, 1)
                m = m_new
                # A wait is a loop, over which ptxas does not lift the next line: without it the
                # product would be waited for before the softmax above.
                hopper.mbarrier.wait(v_full.index(stage), phase)
                acc = hopper.warpgroup_mma_wait(0, deps=[acc])
                hopper.mbarrier.arrive(v_empty.index(v_stage), count=1)
                acc = acc * gl.convert_layout(alpha, o_rows)[:, None]
                p = gl.convert_layout(p.to(dtype), p_layout)

            hopper.mbarrier.arrive(q_empty.index(SIDE), count=1)
            v = v_s.index(stage).reshape([N, D])
            acc = hopper.warpgroup_mma(p, v, acc, is_async=True)
            acc = hopper.warpgroup_mma_wait(0, deps=[acc])
            hopper.mbarrier.arrive(v_empty.index(stage), count=1)
            count += 1
            done += 1

            packed = gl.arange(0, HALF, gl.SliceLayout(1, s_layout)) % PACK
            m_log2 = m * row_scale
            top = m_log2
            if SINKS:
                sink = gl.load(sinks_ptr + (h if PACK == 1 else h * PACK + packed)) * _LOG2E
                top = gl.maximum(top, sink)
            base = gl.where(top == float("-inf"), 0.0, top)
            kept = gl.where(m_log2 == base, 1.0, gl.exp2(m_log2 - base))
            total = total * kept
            if SINKS:
                total += gl.where(sink == base, 1.0, gl.exp2(sink - base))
            if LSE:
                lse_rows = lse_ptr + b.to(gl.int64) * stride_lb + h.to(gl.int64) * PACK * stride_lh
                lse_rows += (q0 + rows).to(gl.int64) * stride_ls + packed * stride_lh + split
                gl.store(lse_rows, (base + gl.log2(total)) * _LN2, mask=rows < seqlen_q)
            share = gl.where(total == 0.0, 0.0, kept / total)
            o = acc * gl.convert_layout(share, o_rows)[:, None]
            if SCALES == OF_CHANNELS:
                o = o * _channels(v_channels_ptr, channels, D, HEAD_DIM, o_layout)[None, :]
            if SPLITS == 1:
                o = gl.convert_layout(o.to(out_ptr.dtype.element_ty), store_layout)
            packed = gl.arange(0, HALF, gl.SliceLayout(1, out_layout)) % PACK
            o_row = row0 + gl.arange(0, HALF, gl.SliceLayout(1, out_layout)) // PACK
            o_col = gl.arange(0, D, gl.SliceLayout(0, out_layout))
            out_rows = out_ptr + b.to(gl.int64) * stride_ob + h.to(gl.int64) * PACK * stride_oh
            out_rows += split * HEAD_DIM
            offsets = (q0 + o_row).to(gl.int64) * stride_os + packed.to(gl.int64) * stride_oh
            ok = (o_row < seqlen_q)[:, None]
            if HEAD_DIM < D:
                ok = ok & (o_col < HEAD_DIM)[None, :]
            gl.store(out_rows + offsets[:, None] + o_col[None, :], o, mask=ok)
    if SIDE == 0:
        _take_turn(MINE)


@gluon.jit(do_not_specialize=["max_q", "max_k", "window", "n_heads", "group", "n_m",
                              "n_batch_heads", "section", "n_tiles"])  # fmt: skip
def _flash_attn_hopper_kernel(
    q_desc,
    k_desc,
    v_desc,
    out_ptr,
    lse_ptr,
    sinks_ptr,
    cu_q_ptr,
    cu_k_ptr,
    scale_log2,  # of the scores (of the softcap, where there is one) times log2(e)
    cap_scale,  # scale / softcap
    stride_ob,
    stride_os,
    stride_oh,
    stride_lb,
    stride_ls,
    stride_lh,
    max_q,
    max_k,
    window,
    n_heads,
    group,  # query heads a key head
    n_m,  # tiles of queries of the longest sequence
    n_batch_heads,
    section,
    n_tiles,
    HEAD_DIM: gl.constexpr,
    M: gl.constexpr,
    N: gl.constexpr,
    D: gl.constexpr,
    STAGES: gl.constexpr,
    CAUSAL: gl.constexpr,
    WINDOW: gl.constexpr,
    VARLEN: gl.constexpr,
    SOFTCAP: gl.constexpr,
    SINKS: gl.constexpr,
    LSE: gl.constexpr,
):
    dtype: gl.constexpr = q_desc.dtype
    bar_layout: gl.constexpr = hopper.mbarrier.MBarrierLayout()
    q_s = gl.allocate_shared_memory(dtype, [2, 1, M // 2, 1, D], q_desc.layout)
    k_s = gl.allocate_shared_memory(dtype, [STAGES, 1, N, 1, D], k_desc.layout)
    v_s = gl.allocate_shared_memory(dtype, [STAGES, 1, N, 1, D], v_desc.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], bar_layout)
    q_empty = gl.allocate_shared_memory(gl.int64, [2, 1], bar_layout)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar_layout)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar_layout)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar_layout)
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar_layout)
    for i in gl.static_range(2):
        hopper.mbarrier.init(q_full.index(i), count=1)
        hopper.mbarrier.init(q_empty.index(i), count=1)
    for i in gl.static_range(STAGES):
        hopper.mbarrier.init(k_full.index(i), count=1)
        hopper.mbarrier.init(k_empty.index(i), count=2)
        hopper.mbarrier.init(v_full.index(i), count=1)
        hopper.mbarrier.init(v_empty.index(i), count=2)
    hopper.fence_async_shared()
    buffers = (q_s, k_s, v_s)
    bars = (q_full, q_empty, k_full, k_empty, v_full, v_empty)
    sizes = (max_q, max_k, window, n_heads, group, n_m, n_batch_heads, section, n_tiles)
    strides = (stride_ob, stride_os, stride_oh, stride_lb, stride_ls, stride_lh)
    # fmt: off
    gl.warp_specialize(
        [
            (_attend, (0, buffers, bars, out_ptr, lse_ptr, sinks_ptr, None, None, None, cu_q_ptr,
                       cu_k_ptr, strides, scale_log2, cap_scale, sizes, HEAD_DIM, M, N, D, STAGES,
                       CAUSAL, WINDOW, VARLEN, SOFTCAP, SINKS, LSE, 1, 1, 1, 0)),
            (_attend, (1, buffers, bars, out_ptr, lse_ptr, sinks_ptr, None, None, None, cu_q_ptr,
                       cu_k_ptr, strides, scale_log2, cap_scale, sizes, HEAD_DIM, M, N, D, STAGES,
                       CAUSAL, WINDOW, VARLEN, SOFTCAP, SINKS, LSE, 1, 1, 1, 0)),
            (_load, (q_desc, k_desc, v_desc, buffers, bars, cu_q_ptr, cu_k_ptr, sizes, M, N, D,
                     STAGES, CAUSAL, WINDOW, VARLEN)),
        ],
        [4, 1], [240, 24])
    # fmt: on


# ---- host --------------------------------------------------------------------------------------


def why_unfit(
    dtype: torch.dtype, head_dim: int, aligned: bool, has_mask: bool, dev: Device
) -> str | None:
    """Reason why this body cannot serve such a problem, whatever the config; None: it can."""
    if dev.arch != "sm90":
        return f"variant hopper needs an sm90 device, got {dev.arch}"
    if not device.is_there(gl):
        return "variant hopper needs a triton that has Gluon (3.6 or newer), got none"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"variant hopper needs bfloat16 or float16, got {dtype}"
    if head_dim % 8 or not 8 <= head_dim <= 256:
        return f"variant hopper needs a head_dim of 8 to 256 that divides by 8, got {head_dim}"
    if not aligned:
        return "variant hopper needs strides of q, k and v that divide by 16 bytes"
    return "variant hopper has no mask argument" if has_mask else None


def is_aligned(*tensors: torch.Tensor) -> bool:
    """Whether tensor maps can express the strides: positive multiples of 16 bytes, 40 bits."""
    return all(
        0 < stride * t.element_size() < 2**40 and stride * t.element_size() % 16 == 0
        for t in tensors
        for stride, size in zip(t.stride()[:-1], t.shape[:-1], strict=True)
        if size > 1
    )


def why_illegal(config: Config, head_dim: int, dev: Device) -> str | None:
    """Reason why a config of this body cannot be launched for such heads; None: it can."""
    n, stages, dim = config["BLOCK_N"], config["num_stages"], _block_dim(head_dim)
    if config["BLOCK_M"] != BLOCK_M:
        return f"variant hopper has BLOCK_M {BLOCK_M}, got {config['BLOCK_M']}"
    # Scores, weights and result stand in the 240 registers that a thread of a group has.
    most = 128 if dim <= 128 else 64
    if n not in (32, 64, 128) or n > most:
        return f"variant hopper needs BLOCK_N of 32 to {most} for head_dim {head_dim}, got {n}"
    if stages < 2:
        return f"variant hopper needs num_stages of 2 or more, got {stages}"
    if config["SECTION"] < 1:
        return f"SECTION must be 1 or more, got {config['SECTION']}"
    used = _shared_bytes(n, stages, dim)
    if used > dev.local_mem_bytes:
        return f"tiles take {used} bytes of shared memory, more than {dev.local_mem_bytes}"
    return None


def default_config(head_dim: int) -> dict[str, int]:
    """The measured best of this body: whole tiles in shared memory, as many as fit."""
    dim = _block_dim(head_dim)
    n = 128 if dim <= 128 else 64
    return {"BLOCK_M": BLOCK_M, "BLOCK_N": n, "num_stages": 4 if dim == 64 else 2, "SECTION": 8}


@functools.lru_cache(4096)
def default_section(
    n_m: int, n_k: int, n_batch_heads: int, group: int, head_dim: int, causal: bool, n_programs: int
) -> int:
    """SECTION by how evenly tiles are dealt to programs, and by whether keys stay in L2.

    ``n_m`` tiles of queries and ``n_k`` of keys a head, BLOCK_M each; ``group`` query heads share
    keys. A tile costs its blocks of keys and about 1.5 more, which predicts the times of all
    sections of a shape but for what L2 misses add (CONTRIBUTING, "Measured facts").
    """
    if n_m * n_batch_heads > 1 << 15:  # many rounds are even, however they are dealt
        return 8
    costs = [1.5 + (max(n_k - i, 1) if causal else n_k) for i in range(n_m)]  # longest first

    def time(section: int) -> float:
        dealt: list[float] = []
        for head in range(0, n_batch_heads, section):
            width = min(section, n_batch_heads - head)
            for cost in costs:
                dealt += [cost] * width
        rounds = [dealt[i : i + n_programs] for i in range(0, len(dealt), n_programs)]
        if section >= n_batch_heads:  # to and fro, see _tile_of
            rounds[1::2] = [r[::-1] for r in rounds[1::2]]
        longest = max(map(sum, itertools.zip_longest(*rounds, fillvalue=0.0)))
        key_bytes = cdiv(min(section, n_batch_heads), group) * n_k * BLOCK_M * head_dim * 4
        if key_bytes <= 24 * 2**20:
            return longest
        # Keys are read again for each tile of queries: too often, where few heads share them.
        return longest * (1 + 0.4 / n_m) * max(1.0, 1.6 / group)

    return min((8, 16, 32, ALL_HEADS), key=time)


def _block_dim(head_dim: int) -> int:
    """Heads are padded with zeros by the tensor map: 64 values are one 128-byte swizzle row."""
    return max(64, next_power_of_2(head_dim))


def _shared_bytes(n: int, stages: int, dim: int) -> int:
    """As the compiler lays it out: q, stages of k and v, the result's way out, barriers."""
    return (
        2 * (BLOCK_M * dim + 2 * stages * n * dim)
        + max(16384, 128 * dim)
        + 40
        + 64 * cdiv(stages, 2)
    )


def bind(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    *,
    n_sequences: int | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    causal: bool,
    window: int | None,
    scale: float,
    softcap: float | None,
    has_sinks: bool,
    config: Config,
) -> Callable[..., None]:
    """``launch(q, k, v, out, lse, sinks, cu_seqlens_q, cu_seqlens_k)`` for tensors like these.

    Dense tensors are [B, S, H, D], and ``n_sequences`` is None; of packed ones it is the number of
    sequences, and they are [T, H, D]. Only metadata is read here; ``out`` and ``lse`` may be meta
    tensors. ``config`` has BLOCK_M, BLOCK_N, num_stages and SECTION. ``scale`` (or ``softcap``)
    must be positive, no tensor empty. Absent tensors (lse, sinks, offsets) are None, here and
    later. ``launch`` needs q, k and v at addresses that divide by 16.
    """
    varlen = n_sequences is not None
    n_batch = q.shape[0] if n_sequences is None else n_sequences
    n_heads, head_dim = q.shape[-2:]
    n, dim = config["BLOCK_N"], _block_dim(head_dim)
    n_m = cdiv(max_seqlen_q, BLOCK_M)
    n_tiles = n_m * n_batch * n_heads
    out_strides = ((0,) if varlen else ()) + out.stride()[:-1]
    lse_strides = (0, 0, 0) if lse is None else ((0,) if varlen else ()) + lse.stride()
    factor = scale if softcap is None else softcap
    numbers = (
        factor * math.log2(math.e),
        1.0 if softcap is None else scale / softcap,
        *out_strides,
        *lse_strides,
        max_seqlen_q,
        max_seqlen_k,
        window or 0,
        n_heads,
        n_heads // k.shape[-2],
        n_m,
        n_batch * n_heads,
        min(config["SECTION"], n_batch * n_heads),
        n_tiles,
    )
    constants = {
        "HEAD_DIM": head_dim,
        "M": BLOCK_M,
        "N": n,
        "D": dim,
        "STAGES": config["num_stages"],
        "CAUSAL": causal,
        "WINDOW": window is not None,
        "VARLEN": varlen,
        "SOFTCAP": softcap is not None,
        "SINKS": has_sinks,
        "LSE": lse is not None,
    }
    boxes = (BLOCK_M // 2, n, n)
    start = device.bind_described(
        _flash_attn_hopper_kernel,
        (min(n_tiles, device.current().num_cores),),
        tuple(_describer(t, box, dim) for t, box in zip((q, k, v), boxes, strict=True)),
        num_warps=4,
        **constants,
    )
    return lambda *tensors: start(*tensors, *numbers)


def _describer(
    like: torch.Tensor, n_rows: int, dim: int, n_heads: int = 1
) -> Callable[[torch.Tensor], Any]:
    """What makes the tensor map's description of a tensor laid out as ``like``.

    It fetches ``dim`` values of ``n_heads`` heads of ``n_rows`` rows at a time.

    Shape and strides are those of ``like``. Their check is ours (``is_aligned``): Triton's takes
    five times as long as the rest.
    """
    shape, strides = list(like.shape), list(like.stride())
    if len(shape) == 3:
        shape, strides = [1, *shape], [strides[0], *strides]
    for i in range(3):  # never stepped over, but a tensor map refuses odd strides here too
        if shape[i] == 1:
            strides[i] = 8 * max(1, strides[i])
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)
    cls = device.triton_part("triton.experimental.gluon.nvidia.hopper").TensorDescriptor

    def describe(tensor: torch.Tensor) -> Any:
        made = cls.__new__(cls)
        made.base, made.shape, made.strides = tensor, shape, strides
        made.block_shape, made.layout = [1, n_rows, n_heads, dim], layout
        return made

    return describe


def _row_describer(n_rows: int, width: int, n: int) -> Callable[[torch.Tensor], Any]:
    """The same of contiguous fp32 [n_rows, width], ``n`` values of a row at a time."""
    layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    cls = device.triton_part("triton.experimental.gluon.nvidia.hopper").TensorDescriptor

    def describe(tensor: torch.Tensor) -> Any:
        made = cls.__new__(cls)
        made.base, made.shape, made.strides = tensor, [n_rows, width], [width, 1]
        made.block_shape, made.layout = [1, n], layout
        return made

    return describe
