"""The body of ``paged_attn`` for chunks of a prompt on Hopper (sm_90): ``variant`` "hopper".

It is flash_attn's (``tkernels.flash_attn_hopper``): the same two groups of warps multiply and take
the softmax. Only the warp that loads is another: it asks the block table where BLOCK_N keys are and
fetches them a page at a time with TMA, 64 values (a swizzle row) of its tokens each, to where the
tile of all of them would have them. Pages past the context are not looked up: a tensor map gives
zeros for a block that does not exist.

Blocks are at most what a step loads: 128 tokens, or 64 where head_dim is above 128; larger ones are
left to the portable body.

A tile is BLOCK_M tokens of one query head or, with PACK_HEADS, BLOCK_M rows: tokens, times the
query heads that share a KV head. A few tiles leave most of the chip idle, so the keys of each may
be dealt to SPLITS programs, as the portable body does it, and its second kernel merges the parts.
But here each has a run of blocks, so that neighbours in the block table come in one line of cache;
the length must be known first in any case.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from tkernels import device
from tkernels import flash_attn_hopper as flash
from tkernels.device import Device, cdiv
from tkernels.flash_attn_hopper import (
    BLOCK_M,
    OF_BLOCKS,
    OF_KEYS,
    PAGED,
    _attend,
    _block_dim,
    _describer,
    _key_blocks,
    _load_tile,
    _row_describer,
    _share,
    _split_of,
    _tile_of,
    _used,
    _view,
)
from tkernels.paged_attn_quantized_hopper import _let_next_kernel_start, _wait_for_earlier_kernels
from tkernels.registry import Config

if TYPE_CHECKING:
    from tkernels import _triton as gl
    from tkernels import _triton as gluon
    from tkernels import _triton as hopper
else:
    gl, gluon, hopper = flash.gl, flash.gluon, flash.hopper

SPLITS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 20, 24, 32)  # to choose from
MIN_SHARE = 256  # keys: two blocks, where the cost of a program is one or two more


@gluon.jit
def _load_pages(
    tile, desc, pages, head, bar, PAGE: gl.constexpr, N: gl.constexpr, D: gl.constexpr,
    MORE: gl.constexpr,
):  # fmt: skip
    """Fetch N keys (or values) of one head: [pages, 1, PAGE, 1, 64] for each 64 of D values.

    MORE bytes are fetched with them.
    """
    n_pages: gl.constexpr = N // PAGE
    parts = _view(tile, desc.dtype, [D // 64 * n_pages, 1, PAGE, 1, 64], desc.layout)
    hopper.mbarrier.expect(bar, N * D * 2 + MORE)
    for part in gl.static_range(D // 64):
        for i in gl.static_range(n_pages):
            place = parts.index(part * n_pages + i)
            _load_tile(desc, [pages[i], 0, head, part * 64], bar, place)


@gluon.jit
def _load(
    q_desc, k_desc, v_desc, scales_desc, buffers, scales_s, bars, cu_q_ptr, lens_ptr, table_ptr,
    stride_tb, sizes,
    M: gl.constexpr, N: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, PAGE: gl.constexpr,
    WINDOW: gl.constexpr, PACK: gl.constexpr, SPLITS: gl.constexpr, MIN_SHARE: gl.constexpr,
):  # fmt: skip
    q_s, k_s, v_s = buffers
    q_full, q_empty, k_full, k_empty, v_full, v_empty = bars
    _, _, window, n_heads, group, n_m, n_batch_heads, section, n_tiles = sizes
    TOKENS: gl.constexpr = M // PACK
    HALF: gl.constexpr = TOKENS // 2
    done = 0  # tiles of queries
    count = 0  # blocks of keys
    for item in range(gl.program_id(0), n_tiles, gl.num_programs(0)):
        tile, split = _split_of(item, n_m * n_batch_heads, SPLITS)
        m, b, h = _tile_of(tile, n_m, n_batch_heads, section, n_heads)
        q0 = gl.load(cu_q_ptr + b)
        seqlen_q = gl.load(cu_q_ptr + b + 1) - q0
        there = m * TOKENS < seqlen_q
        if SPLITS > 1:
            seqlen_k = gl.load(lens_ptr + b)
            there = there & (split < _used(seqlen_k, SPLITS, MIN_SHARE))
        if there:
            if SPLITS == 1:
                seqlen_k = gl.load(lens_ptr + b)
            columns = (seqlen_k + PAGE - 1) // PAGE
            if table_ptr is not None:
                row_ptr = table_ptr + b.to(gl.int64) * stride_tb
            first, end = _key_blocks(m, seqlen_q, seqlen_k, window, TOKENS, N, True, WINDOW)
            first, end = _share(first, end, split, seqlen_k, N, SPLITS, MIN_SHARE)
            for c in gl.static_range(2):
                hopper.mbarrier.wait(q_empty.index(c), (done & 1) ^ 1)
                hopper.mbarrier.expect(q_full.index(c), M // 2 * D * 2)
                token = q0 + m * TOKENS + c * HALF
                _load_tile(q_desc, [0, token, h * PACK, 0], q_full.index(c), q_s.index(c))
            for j in range(end - first):
                column = (end - 1 - j) * (N // PAGE)
                pages = gl.tuple([])
                for i in gl.static_range(N // PAGE):
                    if table_ptr is not None:
                        page = gl.load(row_ptr + column + i, mask=column + i < columns, other=-1)
                    else:
                        page = gl.where(column + i < columns, b * stride_tb + column + i, -1)
                    pages = pages + gl.tuple([page])
                stage = count % STAGES
                phase = ((count // STAGES) & 1) ^ 1
                hopper.mbarrier.wait(k_empty.index(stage), phase)
                # fmt: off
                _load_pages(
                    k_s.index(stage), k_desc, pages, h // group, k_full.index(stage), PAGE, N, D,
                    0 if scales_desc is None else N * 4)
                if scales_desc is not None:
                    row = b * (n_heads // group) + h // group
                    _load_tile(
                        scales_desc, [row, (end - 1 - j) * N], k_full.index(stage),
                        scales_s.index(stage))
                hopper.mbarrier.wait(v_empty.index(stage), phase)
                _load_pages(
                    v_s.index(stage), v_desc, pages, h // group, v_full.index(stage), PAGE, N, D,
                    0)
                # fmt: on
                count += 1
            done += 1


@gluon.jit(do_not_specialize=["max_q", "window", "n_heads", "group", "n_m", "n_batch_heads",
                              "section", "n_tiles", "n_parts"])  # fmt: skip
def _paged_attn_hopper_kernel(
    q_desc,
    k_desc,
    v_desc,
    scales_desc,  # of keys, or None
    table_ptr,  # None: sequences lie one after the other, with stride_tb pages each
    lens_ptr,
    cu_q_ptr,
    out_ptr,
    lse_ptr,
    sinks_ptr,
    k_scales_ptr,  # of keys' channels or of blocks, or None
    v_channels_ptr,
    scale_log2,  # of the scores (of the softcap, where there is one) times log2(e)
    cap_scale,  # scale / softcap
    stride_tb,
    stride_os,
    stride_oh,
    stride_ls,
    stride_lh,
    max_q,
    window,  # None: there is none
    n_heads,  # as tiles have them: packs of heads, where a tile has several
    group,  # such heads a key head
    n_m,  # tiles of queries of the longest sequence
    n_batch_heads,
    section,
    n_tiles,  # times SPLITS
    n_parts,  # results, with SPLITS, before out_ptr has their log-sum-exps; lse_ptr is None then
    HEAD_DIM: gl.constexpr,
    M: gl.constexpr,
    N: gl.constexpr,
    D: gl.constexpr,
    PAGE: gl.constexpr,
    STAGES: gl.constexpr,
    SOFTCAP: gl.constexpr,
    SINKS: gl.constexpr,
    LSE: gl.constexpr,
    PACK: gl.constexpr,
    SPLITS: gl.constexpr,
    MIN_SHARE: gl.constexpr,
    SCALES: gl.constexpr,
    PDL: gl.constexpr,
):
    if PDL:
        _let_next_kernel_start()
        _wait_for_earlier_kernels()
    if SPLITS > 1:
        lse_ptr = out_ptr + n_parts.to(gl.int64) * HEAD_DIM
    dtype: gl.constexpr = q_desc.dtype
    bar_layout: gl.constexpr = hopper.mbarrier.MBarrierLayout()
    q_s = gl.allocate_shared_memory(dtype, [2, 1, M // 2 // PACK, PACK, D], q_desc.layout)
    k_s = gl.allocate_shared_memory(k_desc.dtype, [STAGES, 1, N, 1, D], k_desc.layout)
    v_s = gl.allocate_shared_memory(v_desc.dtype, [STAGES, 1, N, 1, D], v_desc.layout)
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
    nothing = max_q * 0
    WINDOW: gl.constexpr = window is not None
    if window is None:
        window = nothing
    scales_s = q_full  # stands in for none, and is not read
    if scales_desc is not None:
        scales_s = gl.allocate_shared_memory(gl.float32, [STAGES, 1, N], scales_desc.layout)
    n_blocks = nothing
    if SCALES == OF_BLOCKS:
        n_blocks = stride_tb
    sizes = (max_q, n_blocks, window, n_heads, group, n_m, n_batch_heads, section, n_tiles)
    strides = (nothing, stride_os, stride_oh, nothing, stride_ls, stride_lh)
    # fmt: off
    gl.warp_specialize(
        [
            (_attend, (0, buffers, bars, out_ptr, lse_ptr, sinks_ptr, scales_s, k_scales_ptr,
                       v_channels_ptr, cu_q_ptr, lens_ptr, strides, scale_log2, cap_scale, sizes,
                       HEAD_DIM, M, N, D, STAGES, True, WINDOW, PAGED, SOFTCAP, SINKS, LSE, PACK,
                       SPLITS, MIN_SHARE, SCALES)),
            (_attend, (1, buffers, bars, out_ptr, lse_ptr, sinks_ptr, scales_s, k_scales_ptr,
                       v_channels_ptr, cu_q_ptr, lens_ptr, strides, scale_log2, cap_scale, sizes,
                       HEAD_DIM, M, N, D, STAGES, True, WINDOW, PAGED, SOFTCAP, SINKS, LSE, PACK,
                       SPLITS, MIN_SHARE, SCALES)),
            (_load, (q_desc, k_desc, v_desc, scales_desc, buffers, scales_s, bars, cu_q_ptr,
                     lens_ptr, table_ptr, stride_tb, sizes, M, N, D, STAGES, PAGE, WINDOW, PACK,
                     SPLITS, MIN_SHARE)),
        ],
        [4, 1], [240, 24])
    # fmt: on


# ---- host --------------------------------------------------------------------------------------


def default_config(head_dim: int, block_size: int) -> Config:
    """Tiles like flash_attn's, of whole blocks."""
    config = flash.default_config(head_dim)
    del config["SECTION"]
    return {**config, "BLOCK_N": max(config["BLOCK_N"], block_size)}


def default_splits(tiles: int, keys: int, cores: int) -> int:
    """SPLITS of ``tiles`` tiles that see up to ``keys`` keys, at least MIN_SHARE each.

    Programs take turns, so the time is that of the rounds, of which each takes its blocks of keys
    and about two more (the first has nothing to overlap with, results are stored, and merged).
    """

    def time(splits: int) -> float:
        return cdiv(tiles * splits, cores) * (cdiv(cdiv(keys, BLOCK_M), splits) + 2 * (splits > 1))

    return min((n for n in SPLITS if n * MIN_SHARE <= keys or n == 1), key=time)


def why_unfit(
    dtype: torch.dtype, head_dim: int, aligned: bool, window: int | None, dev: Device
) -> str | None:
    """Reason why this body cannot serve such a problem, whatever the config; None: it can."""
    if why := flash.why_unfit(dtype, head_dim, aligned, False, dev):
        return why
    return None if window is None else "variant hopper has no window over pages"


def why_illegal(
    config: Config, head_dim: int, block_size: int, group: int, dev: Device
) -> str | None:
    """Reason why a config of this body cannot be launched for such heads; None: it can."""
    if config["BLOCK_N"] % block_size:
        return f"BLOCK_N must be whole blocks of {block_size}, got {config['BLOCK_N']}"
    if config["PACK_HEADS"] and (BLOCK_M // 2) % group:
        return f"PACK_HEADS needs a number of heads that divides {BLOCK_M // 2}, got {group}"
    if config["SPLITS"] < 1 or config["MIN_SHARE"] < 1:
        return "SPLITS and MIN_SHARE must be 1 or more"
    if config["PDL"] and config["SPLITS"] == 1:
        return "variant hopper has PDL for SPLITS alone"
    return flash.why_illegal({**config, "SECTION": 1}, head_dim, dev)


def bind(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    out: torch.Tensor,
    *,
    max_seqlen_q: int,
    scale: float,
    softcap: float | None,
    has_sinks: bool,
    has_lse: bool,
    config: Config,
    window: int | None = None,
    scales: Any = 0,
) -> Callable[..., None]:
    """``launch(q, k_cache, v_cache, table, lens, cu_seqlens_q, out, lse, sinks)`` of such tensors.

    lse is a contiguous fp32 [n_tokens, num_heads]; absent tensors (lse, sinks) are None. ``launch``
    needs q and the caches at addresses that divide by 16. With SPLITS, out is an fp32 tensor of
    parts instead, [n_tokens, num_heads, SPLITS, head_dim] and then [n_tokens, num_heads, SPLITS]
    log-sum-exps, lse and sinks are None, and the results are yet to be merged.

    With ``scales`` (OF_KEYS, OF_CHANNELS, OF_BLOCKS) keys are fp16 without their scales, values too
    if OF_CHANNELS; blocks are of BLOCK_N tokens, a sequence's those of its row in a table of all;
    and it is ``launch(q, k_cache, v_cache, scales, None, lens, cu_seqlens_q, out, lse, sinks,
    k_scales, v_channels)``, with None for what there is not. ``scales`` are those of keys, fp32
    [batch, kv heads, keys that a row has], ``k_scales`` of blocks as many for each of its blocks.
    """
    (n_tokens, n_heads, head_dim), splits = q.shape, config["SPLITS"]
    n, dim, block_size = config["BLOCK_N"], _block_dim(head_dim), k_cache.shape[1]
    batch, group = block_table.shape[0], n_heads // k_cache.shape[2]
    pack = group if config["PACK_HEADS"] else 1
    n_m = cdiv(max_seqlen_q * pack, BLOCK_M)
    n_batch_heads = batch * (n_heads // pack)
    n_tiles = n_m * n_batch_heads * splits
    n_keys = cdiv(block_table.shape[1] * block_size, BLOCK_M)
    n_programs = device.current().num_cores
    section = n_batch_heads
    if splits == 1:
        section = flash.default_section(
            n_m, max(n_keys, n_m), n_batch_heads, group // pack, head_dim, True, n_programs
        )
    result = splits * head_dim
    factor = scale if softcap is None else softcap
    numbers = (
        factor * math.log2(math.e),
        1.0 if softcap is None else scale / softcap,
        block_table.stride(0),
        *(out.stride()[:2] if splits == 1 else (n_heads * result, result)),
        n_heads * splits,
        splits,
        max_seqlen_q,
        window,
        n_heads // pack,
        group // pack,
        n_m,
        n_batch_heads,
        min(section, n_batch_heads),
        n_tiles,
        n_tokens * n_heads * splits,
    )
    described = [
        _describer(q, BLOCK_M // 2 // pack, dim, pack),
        _describer(k_cache, block_size, 64),
        _describer(v_cache, block_size, 64),
    ]
    if scales == OF_KEYS.value:
        rows = batch * k_cache.shape[2]
        described.append(_row_describer(rows, block_table.shape[1] * block_size, n))
    start = device.bind_described(
        _paged_attn_hopper_kernel,
        (min(n_tiles, n_programs),),
        tuple(described),
        num_warps=4,
        HEAD_DIM=head_dim,
        M=BLOCK_M,
        N=n,
        D=dim,
        PAGE=block_size,
        STAGES=config["num_stages"],
        SOFTCAP=softcap is not None,
        SINKS=has_sinks and splits == 1,
        LSE=has_lse or splits > 1,
        PACK=pack,
        SPLITS=splits,
        MIN_SHARE=config["MIN_SHARE"] if splits > 1 else 1,
        SCALES=scales,
        PDL=config["PDL"],
        **({"launch_pdl": True} if config["PDL"] else {}),
    )
    if scales:
        return lambda *tensors: start(*tensors, *numbers)
    return lambda q, k, v, *tensors: start(q, k, v, None, *tensors, None, None, *numbers)
