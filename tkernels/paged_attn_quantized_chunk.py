"""The body of ``paged_attn_quantized`` for chunks on Hopper (sm_90): ``variant`` "hopper_chunk".

A launch of its own writes keys and values in 16 bits, each once, and ``paged_attn``'s body for
chunks (``tkernels.paged_attn_hopper``) reads them instead of pages:

    keys     fp16((code + residual) * k_scale)     in units of a power of two that a page shares
             fp16(code + residual)                 where q is fp16, for lse, and static scales
    values   (code + residual) * v_scale           in q's dtype, as a cache in that would have them
             fp16(code + residual)                 for static scales

In the second form a token's scale of keys goes to its scores, in fp32, which takes 40 us of 420
(2048 tokens over 8192); a channel's to q, and that of values to the result. With static scales and
residuals numbers end at 65504 of them, 516 times what calibration saw, where the portable body has
the range of bf16. q is made fp16 in shared memory, each row by a power of two, so that where it
meets no channel's scale nothing is rounded but what is below 2^-14 of the row's largest, and 11
bits are kept where it does. Codes are exact in fp16, with residuals 11 bits are kept, and of whole
products. So a log-sum-exp is that of the portable body for scales of tokens without residuals;
calls that want one of others are left to that body.

Whole products end at 2^-24 of their page's unit. Keys whose scale is 2^23 below the largest of the
page are as exact as in bf16, and smaller ones less, which shows in rows that do not see that
largest, or for which its score is low.

There is room for all keys that the block table could name, of which those in sight are written:
sequence after sequence, in pages of what a step reads, [page, KV head, token, head_dim]. What else
is in a page is zeros, or masked by who reads it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from tkernels import device, paged_attn_hopper
from tkernels import flash_attn_hopper as flash
from tkernels.append_rests import NO_SLOT_ as _NO_SLOT
from tkernels.device import Device, bind, cdiv, tl, triton
from tkernels.ops.fp4_dequant import _values
from tkernels.ops.paged_attn import (
    _hopper_splits,
    _let_next_kernel_start,
    _most_keys,
    _packs_on_hopper,
    _wait_for_earlier_kernels,
    bind_combine,
)
from tkernels.registry import Config, Problem

MIN_ROWS = 256  # of a sequence and KV head, for which its keys are worth to be converted
MOST_BYTES = 512 << 20  # that all keys and values may take in 16 bits
TILE = 16  # tokens of a head that a program converts at a time


# ---- the kernel that converts ------------------------------------------------------------------
# fmt: off


@triton.jit
def _numbers(
    cells, ok, slot, head, n_slots, codes_ptr, residual_ptr, exponents_ptr,
    HEAD_DIM: tl.constexpr, RESIDUAL_BLOCK: tl.constexpr, MANTISSA: tl.constexpr,
    STATIC: tl.constexpr,
):
    """fp32 [T, HEAD_DIM] codes at ``cells``, and residuals where a token's ``slot`` is one."""
    half: tl.constexpr = HEAD_DIM // 2
    d = tl.arange(0, HEAD_DIM)
    codes = tl.load(codes_ptr + cells[:, None] + d[None, :], mask=ok[:, None], other=0)
    numbers = codes.to(tl.float32)
    if RESIDUAL_BLOCK > 0:
        held = slot != _NO_SLOT
        if tl.max(held.to(tl.int32), 0) > 0:
            blocks: tl.constexpr = HEAD_DIM // RESIDUAL_BLOCK
            # Whoever wrote the slots may have been wrong: never past the pool.
            row = tl.minimum(slot.to(tl.int32) & 0xFFFF, n_slots - 1).to(tl.int64)
            row = (row + tl.cast(head, tl.int64) * n_slots)[:, None]
            packed = tl.load(residual_ptr + row * half + (d % half)[None, :], mask=held[:, None],
                             other=0).to(tl.int32)
            exponents = tl.load(exponents_ptr + row * blocks + tl.arange(0, blocks)[None, :],
                                mask=held[:, None], other=0)
            packed = packed >> tl.where(d >= half, 4, 0)[None, :]
            numbers += _values(packed & 15, exponents, MANTISSA, RESIDUAL_BLOCK)
            if STATIC:  # a channel's scale may be anything to a token; fp16 ends at 516 times it
                numbers = tl.minimum(tl.maximum(numbers, -65504.0), 65504.0)
    return numbers


@triton.jit
def _largest_scale(
    first, low, end, head, row_ptr, scale_ptr,
    N_KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, PAGE: tl.constexpr,
):
    """Of the keys from ``first`` on that make a page, those in sight."""
    key = first + tl.arange(0, PAGE)
    ok = (key < end) & (key >= low)
    page = tl.load(row_ptr + key // BLOCK_SIZE, mask=ok, other=0).to(tl.int64)
    place = (page * N_KV_HEADS + head) * BLOCK_SIZE + key % BLOCK_SIZE
    return tl.max(tl.abs(tl.load(scale_ptr + place, mask=ok, other=0.0)), 0)


@triton.jit(do_not_specialize=["n_slots", "window", "columns", "per_sequence"])
def _to_16_bits_kernel(
    k_ptr, k_scale_ptr, k_slots_ptr, k_residual_ptr, k_exponents_ptr,
    v_ptr, v_scale_ptr, v_slots_ptr, v_residual_ptr, v_exponents_ptr,
    table_ptr, lens_ptr, cu_ptr, k_out_ptr, v_out_ptr, scales_out_ptr,
    stride_tb, n_slots, window, columns, per_sequence,
    N_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    PAGE: tl.constexpr, TILE: tl.constexpr, HAS_WINDOW: tl.constexpr, STATIC: tl.constexpr,
    RESIDUAL_BLOCK: tl.constexpr, MANTISSA: tl.constexpr, WHOLE: tl.constexpr, PDL: tl.constexpr,
):
    """TILE tokens of a head at a time: keys, values, and what keys are yet to be multiplied by."""
    if PDL:
        _wait_for_earlier_kernels()
        _let_next_kernel_start()
    seq = tl.program_id(0) // per_sequence
    context_len = tl.load(lens_ptr + seq)
    n_tokens = tl.load(cu_ptr + seq + 1) - tl.load(cu_ptr + seq)
    low = 0
    if HAS_WINDOW:
        low = tl.maximum(context_len - n_tokens - window + 1, 0)
    base = low // PAGE * PAGE
    n_tiles = (tl.maximum(context_len - base, 0) + TILE - 1) // TILE * N_KV_HEADS
    n_tiles = tl.where(n_tokens > 0, n_tiles, 0)  # nobody looks at its keys, which may be anything
    row_ptr = table_ptr + tl.cast(seq, tl.int64) * stride_tb
    for tile in range(tl.program_id(0) % per_sequence, n_tiles, per_sequence):
        # Neighbours read neighbouring heads of the same tokens.
        head = tile % N_KV_HEADS
        start = base + tile // N_KV_HEADS * TILE
        key = start + tl.arange(0, TILE)
        ok = key < context_len
        if HAS_WINDOW:
            ok = ok & (key >= low)
        page = tl.load(row_ptr + key // BLOCK_SIZE, mask=ok, other=0).to(tl.int64)
        slot = key % BLOCK_SIZE
        cells = ((page * BLOCK_SIZE + slot) * N_KV_HEADS + head) * HEAD_DIM
        place = (page * N_KV_HEADS + head) * BLOCK_SIZE + slot
        k_slot, v_slot = slot, slot
        if STATIC:
            k_held, v_held = ok, ok
        else:
            k_scale = tl.load(k_scale_ptr + place, mask=ok, other=0.0)
            v_scale = tl.load(v_scale_ptr + place, mask=ok, other=0.0)
            k_held, v_held = k_scale < 0, v_scale < 0  # (NaN is not below 0, and not lost)
        if RESIDUAL_BLOCK > 0:
            k_slot = tl.load(k_slots_ptr + place, mask=k_held, other=_NO_SLOT)
            v_slot = tl.load(v_slots_ptr + place, mask=v_held, other=_NO_SLOT)
        keys = _numbers(cells, ok, k_slot, head, n_slots, k_ptr, k_residual_ptr, k_exponents_ptr,
                        HEAD_DIM, RESIDUAL_BLOCK, MANTISSA, STATIC)
        values = _numbers(cells, ok, v_slot, head, n_slots, v_ptr, v_residual_ptr, v_exponents_ptr,
                          HEAD_DIM, RESIDUAL_BLOCK, MANTISSA, STATIC)
        d = tl.arange(0, HEAD_DIM)[None, :]
        if not STATIC:
            values = values * tl.abs(v_scale)[:, None]
            scales = scales_out_ptr + (seq * N_KV_HEADS + head) * (columns * (1 if WHOLE else PAGE))
            if WHOLE:
                largest = _largest_scale(start // PAGE * PAGE, low, context_len, head, row_ptr,
                                         k_scale_ptr, N_KV_HEADS, BLOCK_SIZE, PAGE)
                exponent = tl.minimum(tl.maximum(largest.to(tl.int32, bitcast=True) >> 23, 1), 253)
                inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
                keys = keys * (tl.abs(k_scale) * inverse)[:, None]
                if start % PAGE == 0:
                    tl.store(scales + start // PAGE, (exponent << 23).to(tl.float32, bitcast=True))
            else:
                tl.store(scales + key, tl.abs(k_scale))
        out_page = (seq * columns + start // PAGE) * N_KV_HEADS + head
        row = tl.cast(out_page * PAGE + start % PAGE, tl.int64) + tl.arange(0, TILE)
        at = row[:, None] * HEAD_DIM + d
        tl.store(k_out_ptr + at, keys.to(tl.float16))
        tl.store(v_out_ptr + at, values.to(v_out_ptr.dtype.element_ty))


# fmt: on
# ---- host --------------------------------------------------------------------------------------

# What this body has no choice of.
FIXED: Config = {
    "BLOCK_M": flash.BLOCK_M,
    "variant": "hopper_chunk",
    "OUTLIER_SPLITS": 0,
    "CHUNK": 256,
    "LIST": 16,
    "programs_per_core": 0,
    "LONG_FIRST": False,
    "num_warps": 4,
    "outlier_warps": 4,
}


def default_config(problem: Problem, dev: Device) -> Config | None:
    """Tiles and splits as ``paged_attn`` has them; None where this body does not suit.

    On an H200 it was ahead wherever it was tried: by 13% at the least (64 tokens over 8192 keys, 8
    sequences, 32/8 heads, int8) and 2 to 4 times in whole prompts. Rows of a KV head were 256 and
    more there, and keys 2048 and more where ``paged_attn`` would have left 16 bits to the portable
    body.
    """
    group = problem["num_heads"] // problem["num_kv_heads"]
    if why_unfit(problem, dev) or problem["max_seqlen_q"] * group < MIN_ROWS:
        return None
    exact = not problem["static"] and not problem["residual_block"]
    if problem["dtype"] == torch.float16 and not exact:
        return None  # ``takes`` says why
    splits = _hopper_splits(problem, dev)
    if (splits == 0 and _most_keys(problem) < 2048) or (
        splits > 1 and problem["window"] is not None
    ):
        return None
    body = flash.default_config(problem["head_dim"])
    return {
        **FIXED,
        "BLOCK_N": body["BLOCK_N"],
        "SPLITS": max(1, splits),
        "MIN_SHARE": paged_attn_hopper.MIN_SHARE,
        "PACK_HEADS": splits != 1 and _packs_on_hopper(problem),
        "PDL": True,
        "num_stages": body["num_stages"],
    }


def why_unfit(problem: Problem, dev: Device) -> str | None:
    """Reason why this body cannot serve such a problem, whatever the config; None: it can."""
    p = problem
    if not p["varlen"]:
        return "variant hopper_chunk needs cu_seqlens_q"
    if why := flash.why_unfit(p["dtype"], 64, True, False, dev):
        return why
    if p["head_dim"] not in (64, 128, 256):
        return f"variant hopper_chunk has head_dim 64, 128 or 256, got {p['head_dim']}"
    if p["residual_block"] and p["head_dim"] % (2 * p["residual_block"]):
        return (
            f"variant hopper_chunk has whole blocks of residuals in half a head of {p['head_dim']}"
        )
    if (size := _scratch_bytes(p, flash.BLOCK_M)) > MOST_BYTES:
        return (
            f"variant hopper_chunk converts what a block table has room for up to {MOST_BYTES} "
            f"bytes, got {size}"
        )
    return None


def takes(
    q: torch.Tensor, static: bool, residual_block: int, has_lse: bool, least_tokens: int
) -> bool:
    """Whether a call that suits this body is one for it: by q, and by what its results ask.

    Weights, queries or keys of 11 bits would show in a result of 11 bits, or in a log-sum-exp. (A
    config is not refused for that: those of files serve both 16-bit types.)
    """
    exact = not static and not residual_block
    shows = has_lse or q.dtype == torch.float16
    return flash.is_aligned(q) and (exact or not shows) and q.shape[0] >= least_tokens


def why_illegal(config: Config, problem: Problem, dev: Device) -> str | None:
    """Reason why a config of this body cannot be launched; None: it can."""
    if why := why_unfit(problem, dev):
        return why
    if wrong := [f"{n} {v}" for n, v in FIXED.items() if config[n] != v]:
        return f"variant hopper_chunk has {', '.join(wrong)}"
    if config["SPLITS"] > 1 and problem["window"] is not None:
        return "variant hopper_chunk has no window with SPLITS"
    group = problem["num_heads"] // problem["num_kv_heads"]
    as_pages = {**config, "PDL": False}  # which has other reasons there
    scales = 0 if problem["static"] else 4 * config["num_stages"] * config["BLOCK_N"] + 128
    room = dataclasses.replace(dev, local_mem_bytes=dev.local_mem_bytes - scales)
    return paged_attn_hopper.why_illegal(
        as_pages, problem["head_dim"], config["BLOCK_N"], group, room
    )


def _columns(max_blocks: int, block_size: int, page: int) -> int:
    """Pages of ``page`` tokens in a row of the block table."""
    return max(1, cdiv(max_blocks * block_size, page))


def _scratch_bytes(problem: Problem, page: int) -> int:
    """Keys and values in 16 bits, at most."""
    p = problem
    tokens = p["batch"] * _columns(p["max_blocks"], p["block_size"], page) * page
    return int(tokens * p["num_kv_heads"] * p["head_dim"] * 4)


def _pdl_option(pdl: bool) -> dict[str, Any]:
    return {"launch_pdl": True} if pdl else {}


def bind_conversion(
    k_codes: torch.Tensor,
    block_table: torch.Tensor,
    *,
    page: int,
    window: int | None,
    static: bool,
    n_slots: int,
    residual_block: int,
    mantissa_bits: int,
    whole: bool,
    pdl: bool,
) -> Callable[..., None]:
    """``convert(*caches, table, lens, cu_seqlens_q, keys, values, scales)`` of such tensors.

    keys is fp16 [batch * columns, n_kv_heads, page, head_dim], values such in q's dtype and scales
    fp32 [batch, n_kv_heads, columns * page], or of ``whole`` products [batch, n_kv_heads, columns];
    static, values are fp16 and scales anything.
    """
    (batch, max_blocks), dev = block_table.shape, device.current()
    _, block_size, n_kv_heads, head_dim = k_codes.shape
    columns = _columns(max_blocks, block_size, page)
    # Programs of a sequence take turns at its tiles, for a table may have room for many more.
    tiles = columns * page // TILE * n_kv_heads
    per_sequence = min(tiles, max(cdiv(32 * dev.num_cores, batch), 4 * dev.num_cores))
    numbers = (block_table.stride(0), n_slots, window or 0, columns, per_sequence)
    start = bind(
        _to_16_bits_kernel,
        (batch * per_sequence,),
        N_KV_HEADS=n_kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        PAGE=page,
        TILE=TILE,
        HAS_WINDOW=window is not None,
        STATIC=static,
        RESIDUAL_BLOCK=residual_block,
        MANTISSA=mantissa_bits,
        WHOLE=whole,
        PDL=pdl,
        **({"num_warps": 4} if dev.registers else {}),
        **_pdl_option(pdl),
    )
    return lambda *tensors: start(*tensors, *numbers)


def bind_body(
    q: torch.Tensor,
    k_codes: torch.Tensor,
    block_table: torch.Tensor,
    out: torch.Tensor,
    *,
    max_seqlen_q: int,
    scale: float,
    window: int | None,
    softcap: float | None,
    has_sinks: bool,
    has_lse: bool,
    static: bool,
    n_slots: int,
    residual_block: int,
    mantissa_bits: int,
    config: Config,
    max_programs: int,
) -> Callable[..., None]:
    """``run(q, *caches, table, lens, out, lse, cu_seqlens_q, sinks)`` of such tensors.

    The caches are ten tensors, as ``paged_attn_quantized`` has them; ``run`` needs all of them, q
    and out at addresses that divide by 16.
    """
    (n_tokens, n_heads, head_dim), (batch, max_blocks) = q.shape, block_table.shape
    block_size, n_kv_heads = k_codes.shape[1:3]
    page, splits = config["BLOCK_N"], config["SPLITS"]
    whole = not static and not has_lse and q.dtype == torch.bfloat16
    kind = flash.OF_CHANNELS if static else flash.OF_BLOCKS if whole else flash.OF_KEYS
    # fmt: off
    convert = bind_conversion(
        k_codes, block_table, page=page, window=window, static=static, n_slots=n_slots,
        residual_block=residual_block, mantissa_bits=mantissa_bits, whole=whole,
        pdl=config["PDL"])
    # fmt: on
    columns = _columns(max_blocks, block_size, page)
    size = batch * columns * n_kv_heads * page * head_dim
    cells = torch.empty(
        (batch * columns, n_kv_heads, page, head_dim), dtype=torch.float16, device="meta"
    ).transpose(1, 2)
    attend = paged_attn_hopper.bind(
        q,
        cells,
        cells,
        torch.empty((batch, columns), dtype=torch.int32, device="meta"),
        out,
        max_seqlen_q=max_seqlen_q,
        scale=scale,
        softcap=softcap,
        has_sinks=has_sinks,
        has_lse=has_lse,
        config=config,
        window=window,
        scales=kind.value,
    )
    merge, n_merges = None, 0
    if splits > 1:
        shared = {
            "N_HEADS": n_heads,
            "HEAD_DIM": head_dim,
            "BLOCK_D": head_dim,
            "BLOCK_SIZE": page,
            "MULTI": True,
            "HAS_WINDOW": False,
            "HAS_SINKS": has_sinks,
            "HAS_LSE": has_lse,
        }
        options = {**device.rounding_each_step(), **_pdl_option(config["PDL"])}
        merge, n_merges = bind_combine(
            shared, batch * max_seqlen_q * n_heads, config, max_programs, options
        )
    n_parts = n_tokens * n_heads * splits
    merge_numbers = (*out.stride()[:2], n_parts, 0, max_seqlen_q, n_merges)

    # fmt: off
    def run(*tensors: Any) -> None:
        q, *caches, table, lens, out, lse, cu, sinks = tensors
        keys = torch.empty(size, dtype=torch.float16, device=q.device)
        values = torch.empty(size, dtype=torch.float16 if static else q.dtype, device=q.device)
        k_scales, v_channels = caches[1], caches[6]  # static ones are handed on as they are
        if not static:
            n_scales = size // head_dim // (page if whole else 1)
            k_scales = torch.empty(n_scales, dtype=torch.float32, device=q.device)
            v_channels = None
        convert(*caches, table, lens, cu, keys, values, k_scales)
        of_keys, others = (None, k_scales) if whole or static else (k_scales, None)
        given = (q, keys, values, of_keys, None, lens, cu)
        if merge is None:
            attend(*given, out, lse, sinks, others, v_channels)
            return
        part = torch.empty(n_parts * (head_dim + 1), dtype=torch.float32, device=q.device)
        attend(*given, part, None, None, others, v_channels)
        # What is not there is stood in for by something that is, and not read.
        lse, sinks = out if lse is None else lse, q if sinks is None else sinks
        merge(lens, cu, sinks, out, lse, part, *merge_numbers)

    # fmt: on
    return run
