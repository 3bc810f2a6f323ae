"""Quantise new keys, or values, into a ``QuantizedKV`` cache in one pass (tkernels/kv_format.py).

    code  = round_half_even(clamp(x / scale, -127, 127))        to codes[slot // bs, slot % bs]
    scale = absmax(x) / 127 of a token and head, or a given one of a head and channel
    rest  = x / scale - code;  kept as 4-bit block floats in the pool where its share exceeds tau

x: [n_tokens, num_kv_heads, head_dim]; codes: [num_blocks, block_size, num_kv_heads, head_dim].
``slot_mapping`` is that of ``append_paged_kv``. K and V have a cache each and are appended apart.

One program takes some tokens of one head, reads each number once and writes its code; the rest is
packed from registers, and only where a token of the tile is an outlier. Pool slots come from the
head's stack by one atomic subtraction a tile: which slot a token gets depends on which program is
first, and so does which token goes without where the stack runs empty. What is read back does not,
as long as it does not run empty.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tkernels.check import (
    FLOAT_DTYPES,
    INDEX_DTYPES,
    check_contiguous,
    check_dtype,
    check_last_contiguous,
    check_shape,
    check_tensor,
    describe,
    one_for_both,
)
from tkernels.config import planned, resolve
from tkernels.device import (
    Device,
    bind,
    cdiv,
    current,
    next_power_of_2,
    rounding_each_step,
    tl,
    triton,
)
from tkernels.kv_format import (
    FIELDS,
    FORMATS,
    LARGEST,
    MOST_SLOTS,
    NO_SLOT,
    POOL,
    QuantizedKV,
    allocate_quantized,
    append_quantized_ref,
    dequantize_cache,
    fields,
)
from tkernels.registry import Case, Config, Cost, KernelSpec, Problem, op, register


def append_quantized_kv_ref(
    x: torch.Tensor,
    codes: torch.Tensor,
    scale: torch.Tensor,
    slots: torch.Tensor,
    residual: torch.Tensor,
    residual_scale: torch.Tensor,
    free_slots: torch.Tensor,
    free_count: torch.Tensor,
    dropped: torch.Tensor,
    tau: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    mantissa_bits: int = 1,
    config: Config | None = None,
) -> None:
    """PyTorch version of ``append_quantized_kv``."""
    pool = (slots, residual, residual_scale, free_slots, free_count, dropped, tau)
    cache = QuantizedKV(codes, scale, *(pool if slots.numel() else ()))
    append_quantized_ref(x, cache._replace(residual_format=FORMATS[mantissa_bits]), slot_mapping)


@triton.jit
def _append_quantized_kv_kernel(
    x_ptr,
    codes_ptr,
    scale_ptr,
    slots_ptr,
    residual_ptr,
    residual_scale_ptr,
    free_slots_ptr,
    free_count_ptr,
    dropped_ptr,
    tau_ptr,
    slot_mapping_ptr,
    stride_xt,
    stride_xh,
    n_tokens,
    n_positions,
    n_slots,
    n_tiles,
    BLOCK_SIZE: tl.constexpr,  # tokens a cache block; a constant, because it divides
    N_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    STATIC: tl.constexpr,
    RESIDUAL_BLOCK: tl.constexpr,  # channels that share a residual scale; 0: no residuals
    MANTISSA: tl.constexpr,
    LARGEST_CODE: tl.constexpr,
    ORDERED: tl.constexpr,  # a program has all tokens of a head, in order
    CLAMPED: tl.constexpr,  # addresses of masked lanes lie inside, too
    BLOCK_H: tl.constexpr,  # half a head's channels, as a power of two
    BLOCK_T: tl.constexpr,
):
    half: tl.constexpr = (HEAD_DIM + 1) // 2
    for tile in range(tl.program_id(0), n_tiles, tl.num_programs(0)):
        head = tile % N_HEADS
        head64 = head.to(tl.int64)
        tokens = (tile // N_HEADS) * BLOCK_T + tl.arange(0, BLOCK_T)
        position = tl.load(slot_mapping_ptr + tokens, mask=tokens < n_tokens, other=-1)
        position = position.to(tl.int64)
        kept = (position >= 0) & (position < n_positions)
        position = tl.where(kept, position, 0)

        # Channel j and j + half share a byte of the residual, so the halves stay apart.
        column = tl.arange(0, BLOCK_H)[None, :]
        ok_low = kept[:, None] & (column < half)
        ok_high = kept[:, None] & (column + half < HEAD_DIM)
        low_column, high_column = column, column + half
        if CLAMPED:  # Ascend reads for masked lanes, too
            tokens = tl.minimum(tokens, n_tokens - 1)
            low_column = tl.minimum(column, half - 1)
            high_column = tl.minimum(column + half, HEAD_DIM - 1)
        rows = x_ptr + tokens.to(tl.int64)[:, None] * stride_xt + head64 * stride_xh
        low = tl.load(rows + low_column, mask=ok_low, other=0.0).to(tl.float32)
        high = tl.load(rows + high_column, mask=ok_high, other=0.0).to(tl.float32)

        place = (position // BLOCK_SIZE * N_HEADS + head64) * BLOCK_SIZE + position % BLOCK_SIZE
        if STATIC:
            channel = tl.arange(0, BLOCK_H)
            channels = scale_ptr + head64 * HEAD_DIM + channel
            scale_low = tl.load(channels, mask=channel < half, other=1.0)[None, :]
            there = channel + half < HEAD_DIM
            scale_high = tl.load(channels + half, mask=there, other=1.0)[None, :]
            steps_low = tl.where(scale_low > 0, tl.div_rn(low, scale_low), 0.0)
            steps_high = tl.where(scale_high > 0, tl.div_rn(high, scale_high), 0.0)
        else:
            absmax = tl.maximum(tl.max(tl.abs(low), 1), tl.max(tl.abs(high), 1))
            absmax = tl.where(absmax < 7.888609052210118e-31, 0.0, absmax)  # 2^-100
            # Maxima pass NaN by; sums do not. What is not a number is not read back as one.
            spoilt = tl.sum(low * 0.0, 1) + tl.sum(high * 0.0, 1)
            scale = absmax * 0.007874015748031496 + spoilt  # 1 / 127
            tl.store(scale_ptr + place, scale, mask=kept)
            divisor = tl.where(absmax > 0, absmax, 1.0)
            inverse = tl.where(absmax > 0, tl.div_rn(127.0, divisor), 0.0)
            steps_low, steps_high = low * inverse[:, None], high * inverse[:, None]
        code_low, code_high = _rounded(steps_low), _rounded(steps_high)
        cells = codes_ptr + (position * N_HEADS + head64)[:, None] * HEAD_DIM + column
        tl.store(cells, code_low.to(tl.int8), mask=ok_low)
        tl.store(cells + half, code_high.to(tl.int8), mask=ok_high)

        if RESIDUAL_BLOCK > 0:
            rest_low, rest_high = steps_low - code_low, steps_high - code_high
            if STATIC:
                lost = _square_sum(rest_low * scale_low, rest_high * scale_high)
                whole = _square_sum(low, high)
            else:
                lost, whole = _square_sum(rest_low, rest_high), _square_sum(steps_low, steps_high)
            tau = tl.load(tau_ptr + head)
            share = tl.where(whole > 0, tl.div_rn(lost, tl.where(whole > 0, whole, 1.0)), 0.0)
            outlier = kept & (tl.sqrt(share) > tau)
            slot = tl.load(slots_ptr + place, mask=kept, other=NO_SLOT_).to(tl.int32)
            wanted = (outlier & (slot == NO_SLOT_)).to(tl.int32)
            count = tl.sum(wanted)
            if count > 0:
                if ORDERED:  # this program alone has the head
                    free = tl.load(free_count_ptr + head)
                    missing = tl.maximum(count - free, 0)
                    tl.store(free_count_ptr + head, tl.maximum(free - count, 0))
                    tl.store(dropped_ptr + head, tl.load(dropped_ptr + head) + missing)
                else:
                    free = tl.maximum(tl.atomic_add(free_count_ptr + head, -count), 0)
                    missing = tl.maximum(count - free, 0)
                    if missing > 0:
                        tl.atomic_add(free_count_ptr + head, missing)
                        tl.atomic_add(dropped_ptr + head, missing)
                top = free - _running_sum(wanted, BLOCK_T)
                takes = (wanted > 0) & (top >= 0)
                own = (
                    free_slots_ptr + head64 * n_slots + tl.minimum(tl.maximum(top, 0), n_slots - 1)
                )
                slot = tl.where(takes, tl.load(own, mask=takes, other=0), slot)
                tl.store(slots_ptr + place, slot.to(tl.int16), mask=takes)
            holds = kept & (slot != NO_SLOT_)
            if tl.sum(holds.to(tl.int32)) > 0:
                # Whoever wrote the slots may have been wrong: never past the pool.
                row = head64 * n_slots + tl.minimum(slot & 0xFFFF, n_slots - 1).to(tl.int64)
                blocks: tl.constexpr = HEAD_DIM // RESIDUAL_BLOCK
                four_low, exponent_low = _block_floats(
                    rest_low, BLOCK_T, BLOCK_H, RESIDUAL_BLOCK, MANTISSA, LARGEST_CODE
                )
                four_high, exponent_high = _block_floats(
                    rest_high, BLOCK_T, BLOCK_H, RESIDUAL_BLOCK, MANTISSA, LARGEST_CODE
                )
                tl.store(
                    residual_ptr + row[:, None] * half + column,
                    (four_low | (four_high << 4)).to(tl.uint8),
                    mask=holds[:, None] & (column < half),
                )
                which = tl.arange(0, BLOCK_H // RESIDUAL_BLOCK)[None, :]
                exponents = residual_scale_ptr + row[:, None] * blocks + which
                inside = holds[:, None] & (which < blocks // 2)
                tl.store(exponents, exponent_low.to(tl.uint8), mask=inside)
                tl.store(exponents + blocks // 2, exponent_high.to(tl.uint8), mask=inside)


NO_SLOT_ = tl.constexpr(NO_SLOT)


@triton.jit
def _running_sum(x, SIZE: tl.constexpr):
    """tl.cumsum of few numbers, by comparing places: what Ascend makes of cumsum is not run."""
    place = tl.arange(0, SIZE)
    return tl.sum(tl.where(place[None, :] <= place[:, None], x[None, :], 0), 1)


@triton.jit
def _rounded(steps):
    """To the nearest whole number, half to even, at most 127: adding 1.5 * 2^23 rounds."""
    limited = tl.minimum(tl.maximum(steps, -127.0), 127.0)
    return (limited + 12582912.0) - 12582912.0


@triton.jit
def _square_sum(low, high):
    return tl.sum(low * low, 1) + tl.sum(high * high, 1)


@triton.jit
def _block_floats(
    rest,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
    RESIDUAL_BLOCK: tl.constexpr,
    MANTISSA: tl.constexpr,
    LARGEST_CODE: tl.constexpr,
):
    """(codes [BLOCK_T, BLOCK_H], biased exponents [BLOCK_T, blocks]); kv_format says how."""
    n_blocks: tl.constexpr = BLOCK_H // RESIDUAL_BLOCK
    parts = tl.reshape(tl.abs(rest), (BLOCK_T, n_blocks, RESIDUAL_BLOCK))
    amax = tl.max(parts, 2) * (1.0 / LARGEST_CODE)
    exponent = (amax.to(tl.int32, bitcast=True) + 0x7FFFFF) >> 23
    exponent = tl.minimum(tl.maximum(exponent, 1), 253)
    unit = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    small = tl.minimum(parts * unit[:, :, None], LARGEST_CODE)
    small = tl.reshape(small, (BLOCK_T, BLOCK_H))
    bits = small.to(tl.int32, bitcast=True)
    if MANTISSA == 0:
        nearest = tl.maximum(((bits + 0x400000) >> 23) - 126, 1)
        code = tl.where(small > 0.5, nearest, 0)
    else:  # steps double with the exponent; below 1 they stay (subnormal numbers)
        power = tl.maximum(bits >> 23, 127)
        magic = (power + (23 - MANTISSA)) << 23  # a float whose last bit is one step
        moved = small + magic.to(tl.float32, bitcast=True)
        code = ((power - 127) << MANTISSA) + (moved.to(tl.int32, bitcast=True) - magic)
    return tl.where(rest < 0, code | 8, code), exponent


@op
def append_quantized_kv(
    x: torch.Tensor,
    codes: torch.Tensor,
    scale: torch.Tensor,
    slots: torch.Tensor,
    residual: torch.Tensor,
    residual_scale: torch.Tensor,
    free_slots: torch.Tensor,
    free_count: torch.Tensor,
    dropped: torch.Tensor,
    tau: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    mantissa_bits: int = 1,
    config: Config | None = None,
) -> None:
    """Quantise each token's key, or value, into its place of a cache.

    The tensors between x and slot_mapping are ``kv_format.fields(cache)`` of a ``QuantizedKV``, all
    contiguous; without residuals those from ``slots`` on are empty.

    Args:
        x: [n_tokens, num_kv_heads, head_dim], fp32, bf16 or fp16, any token and head strides. A
            vector with a NaN or infinity gets the scale NaN, so that it reads as NaN; static scales
            have no place for that, and its codes there mean nothing.
        codes: int8 [num_blocks, block_size, num_kv_heads, head_dim]. Written.
        scale: fp32 [num_blocks, num_kv_heads, block_size], written; or, for static scales,
            [num_kv_heads, head_dim], read.
        slots: int16 [num_blocks, num_kv_heads, block_size], pool slots, -1 = none. Written.
        residual: uint8 [num_kv_heads, num_slots, head_dim / 2]. Written.
        residual_scale: uint8 [num_kv_heads, num_slots, head_dim / 16 or 32]. Written.
        free_slots: int32 [num_kv_heads, num_slots], a stack of slots.
        free_count: int32 [num_kv_heads], its height. Written.
        dropped: int32 [num_kv_heads], how many residuals found no slot. Written.
        tau: fp32 [num_kv_heads]: a token whose relative error exceeds it is an outlier.
        slot_mapping: [n_tokens], int32 or int64: block * block_size + offset. Places below 0 and
            past the pool are skipped; no two tokens may share one, nor may two launches write
            one place at a time: the slot is then undefined, and a launch on a GPU may hang.
        mantissa_bits: of the 4-bit residual: 2 is E1M2, 1 is E2M1 (FP4), 0 is E3M0.
        config: launch config; None looks it up.

    Raises:
        TypeError, ValueError: an argument of the wrong kind, shape, dtype, stride or device.
    """
    tensors = (
        x, codes, scale, slots, residual, residual_scale, free_slots, free_count, dropped, tau,
        slot_mapping,
    )  # fmt: skip
    plan = planned(_plan, config, tensors, mantissa_bits)
    if plan is not None:
        launch, numbers = plan
        launch(*tensors, *numbers)


def _plan(*given: Any, config: Config | None) -> Any:
    """(launch, strides and counts); None where there is nothing to append."""
    *tensors, mantissa_bits = given
    x, codes = tensors[:2]
    static, residual_block = _check(*given)
    n_tokens, n_heads, head_dim = x.shape
    num_blocks, block_size = codes.shape[:2]
    n_positions = num_blocks * block_size
    if n_tokens == 0 or n_positions == 0:
        return None
    values = (n_tokens, n_heads, head_dim, block_size, x.dtype, static, residual_block)
    cfg, max_programs = resolve(SPEC, values, config)
    n_tiles = cdiv(n_tokens, cfg["BLOCK_T"]) * n_heads
    constants = {
        "BLOCK_SIZE": block_size,
        "N_HEADS": n_heads,
        "HEAD_DIM": head_dim,
        "STATIC": static,
        "RESIDUAL_BLOCK": residual_block,
        "MANTISSA": mantissa_bits,
        "LARGEST_CODE": LARGEST[FORMATS[mantissa_bits]],
        "BLOCK_H": _block_h(head_dim, residual_block),
    }
    # Ascend cannot address by what an atomic operation returns.
    ordered = residual_block > 0 and not current().registers
    constants |= {"ORDERED": ordered, "CLAMPED": not current().registers}
    programs = n_heads if ordered else min(n_tiles, max_programs)
    # Each step as the reference rounds it: a rest that is not exact has other 4-bit codes.
    launch = bind(
        _append_quantized_kv_kernel, (programs,), **constants, **cfg, **rounding_each_step()
    )
    n_slots = tensors[6].shape[-1]
    return launch, (*x.stride()[:2], n_tokens, n_positions, n_slots, n_tiles)


def _block_h(head_dim: int, residual_block: int) -> int:
    return max(next_power_of_2(cdiv(head_dim, 2)), residual_block)


def _check(*given: Any) -> tuple[bool, int]:
    """Refuse what the kernel cannot take; (static scales, channels of a residual block or 0)."""
    name = "append_quantized_kv"
    *tensors, mantissa_bits = given
    x, slot_mapping, cache = tensors[0], tensors[-1], dict(zip(FIELDS, tensors[1:-1], strict=True))
    if cache["free_count"] is cache["dropped"]:
        raise one_for_both(name, "dropped", "free_count")
    check_tensor(name, "x", x)
    for field, t in cache.items():
        check_tensor(name, field, t)
    check_tensor(name, "slot_mapping", slot_mapping)
    if x.dim() != 3 or 0 in x.shape[1:]:
        raise ValueError(
            f"{name}: x must have shape [n_tokens, num_kv_heads >= 1, head_dim >= 1], "
            f"got {describe(x)}"
        )
    check_dtype(name, "x", x, FLOAT_DTYPES)
    check_last_contiguous(name, "x", x)
    n_tokens, n_heads, head_dim = x.shape
    for field, dtype in FIELDS.items():
        check_dtype(name, field, cache[field], (dtype,))
    codes = cache["codes"]
    check_shape(
        name, "codes", codes,
        num_blocks=None, block_size=None, num_kv_heads=n_heads, head_dim=head_dim,
    )  # fmt: skip
    a_place = {"num_blocks": codes.shape[0], "num_kv_heads": n_heads, "block_size": codes.shape[1]}
    static = cache["scale"].dim() == 2
    of_scale = {"num_kv_heads": n_heads, "head_dim": head_dim} if static else a_place
    check_shape(name, "scale", cache["scale"], **of_scale)
    residual_block = 0
    if cache["slots"].numel() or cache["slots"].dim() == 3:
        residual_block = _check_pool(name, cache, a_place, head_dim)
    else:
        held = [field for field in POOL if cache[field].numel()]
        if held:
            raise ValueError(
                f"{name}: slots must have shape [num_blocks, num_kv_heads, block_size] where "
                f"{held[0]} is given, got {describe(cache['slots'])}"
            )
    for field, t in cache.items():
        check_contiguous(name, field, t)
    if type(mantissa_bits) is not int or mantissa_bits not in FORMATS:
        raise ValueError(f"{name}: mantissa_bits must be 0, 1 or 2, got {mantissa_bits!r}")
    check_shape(name, "slot_mapping", slot_mapping, n_tokens=n_tokens)
    check_dtype(name, "slot_mapping", slot_mapping, INDEX_DTYPES)
    check_last_contiguous(name, "slot_mapping", slot_mapping)
    return static, residual_block


def _check_pool(
    name: str, cache: Mapping[str, torch.Tensor], a_place: dict[str, int], head_dim: int
) -> int:
    """The channels of a residual block."""
    check_shape(name, "slots", cache["slots"], **a_place)
    n_heads = a_place["num_kv_heads"]
    if head_dim % 32:
        raise ValueError(
            f"{name}: x must have a head_dim that divides by 32 for residuals, got {head_dim}"
        )
    check_shape(
        name, "residual", cache["residual"],
        num_kv_heads=n_heads, num_slots=None, half_head_dim=head_dim // 2,
    )  # fmt: skip
    num_slots = cache["residual"].shape[1]
    if not 1 <= num_slots <= MOST_SLOTS:
        raise ValueError(
            f"{name}: residual must have from 1 to {MOST_SLOTS} slots, got {num_slots}"
        )
    sizes = [b for b in (16, 32) if head_dim % (2 * b) == 0]
    shapes = [[n_heads, num_slots, head_dim // b] for b in sizes]
    if list(cache["residual_scale"].shape) not in shapes:
        raise ValueError(
            f"{name}: residual_scale must have shape {' or '.join(map(str, shapes))}, "
            f"got {describe(cache['residual_scale'])}"
        )
    check_shape(name, "free_slots", cache["free_slots"], num_kv_heads=n_heads, num_slots=num_slots)
    for field in ("free_count", "dropped", "tau"):
        check_shape(name, field, cache[field], num_kv_heads=n_heads)
    return head_dim // cache["residual_scale"].shape[-1]


# ---- facts for tests, bench and tuner --------------------------------------------------------


def quantized_problem(
    tokens: int,
    heads: int,
    head_dim: int,
    dtype: torch.dtype,
    mode: str,
    *,
    block_size: int = 16,
    residual_block: int | None = None,
    skip_every: int = 0,
    mantissa_bits: int = 1,
    outlier_every: int = 25,
) -> dict[str, Any]:
    """Problem of ``tokens`` new tokens; the last three only concern the inputs made from it."""
    default = 32 if head_dim % 64 == 0 else 16
    return {
        "n_tokens": tokens,
        "num_kv_heads": heads,
        "head_dim": head_dim,
        "block_size": block_size,
        "dtype": dtype,
        "static": "static" in mode,
        "residual_block": (residual_block or default) if "fp4" in mode else 0,
        "skip_every": skip_every,
        "mantissa_bits": mantissa_bits,
        "outlier_every": outlier_every,
    }


def _shape(
    *,
    tokens: int,
    num_kv_heads: int = 8,
    head_dim: int = 128,
    block_size: int = 16,
    residuals: bool = True,
    static: bool = False,
    dtype: torch.dtype = torch.bfloat16,
) -> Problem:
    """Keys, or values, of ``tokens`` new tokens."""
    mode = "int8" + "_static" * static + "_fp4" * residuals
    return quantized_problem(tokens, num_kv_heads, head_dim, dtype, mode, block_size=block_size)


def _make_inputs(problem: Problem, dev: torch.device) -> dict[str, Any]:
    """x as a view of a packed qkv; one token in ``outlier_every`` has an outlier channel."""
    tokens, heads, dim = problem["n_tokens"], problem["num_kv_heads"], problem["head_dim"]
    block_size, every = problem["block_size"], problem.get("outlier_every", 25)
    num_blocks = cdiv(2 * tokens, block_size)
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(tokens, 2 * heads, dim, generator=generator)
    x = qkv[:, heads:]
    head = torch.arange(tokens)[::every] % heads  # each head has its own outlier tokens
    x[torch.arange(tokens)[::every], head, dim // 3] = 60.0
    static, fp4 = problem["static"], problem["residual_block"] > 0
    cache = allocate_quantized(
        num_blocks, block_size, heads, dim,
        mode="int8" + "_static" * static + "_fp4" * fp4,
        # Where one channel of 128 is large the error is 0.02, and 0.008 elsewhere.
        tau=0.5 if static else 0.0135 * (dim / 128) ** 0.5,
        static_scale=torch.full((heads, dim), 4.0 / 127) if static else None,
        outlier_share=1.0,
        residual_format=FORMATS[problem.get("mantissa_bits", 1)],
        residual_block=problem["residual_block"] or None,
        device=dev,
    )  # fmt: skip
    slots = torch.randperm(num_blocks * block_size, generator=generator)[:tokens]
    if problem.get("skip_every", 0):
        slots[:: problem["skip_every"]] = -1
    return {
        "x": qkv.to(problem["dtype"]).to(dev)[:, heads:],
        **dict(zip(FIELDS, fields(cache), strict=True)),
        "slot_mapping": slots.to(dev),
        "mantissa_bits": problem.get("mantissa_bits", 1),
    }


def _compared(written: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """What the cache holds; not in which of the pool's slots. (One format reads all: they differ
    in what a code means, and equal codes are equal in any.)"""
    cache = QuantizedKV(written["codes"], written["scale"])
    if not written["slots"].numel():
        return cache.codes, cache.scale
    full = QuantizedKV(*(written.get(field) for field in FIELDS))  # type: ignore[arg-type]
    held = written["slots"] != NO_SLOT
    assert full.dropped is not None
    assert full.free_count is not None
    return cache.codes, cache.scale, dequantize_cache(full), held, full.free_count, full.dropped


def _tuning_key(problem: Problem) -> dict[str, Any]:
    bucket = 1
    while bucket < min(problem["n_tokens"], 16384):
        bucket *= 4
    return {
        "n_heads": problem["num_kv_heads"],
        "head_dim": problem["head_dim"],
        "itemsize": problem["dtype"].itemsize,
        "static": problem["static"],
        "residuals": problem["residual_block"] > 0,
        "tokens_up_to": bucket,
    }


def _space(dev: Device) -> dict[str, list[Any]]:
    space: dict[str, list[Any]] = {"BLOCK_T": [1, 2, 4, 8, 16, 32, 64]}
    if not dev.registers:  # a vector unit: no threads
        return {**space, "programs_per_core": [1]}
    return {**space, "programs_per_core": [0, 8, 16, 32], "num_warps": [1, 2, 4, 8]}


def _default_config(problem: Problem, dev: Device) -> Config:
    elements = 2 * _block_h(problem["head_dim"], problem["residual_block"])
    if not dev.registers:  # a vector unit: no threads
        return {"BLOCK_T": max(1, min(8, 2048 // elements)), "programs_per_core": 1}
    # A token of 128 channels a warp while that does not fill the chip. Then as an H100 liked them:
    # (channels a tile, warps, programs a core).
    if problem["n_tokens"] * problem["num_kv_heads"] < 64 * dev.num_cores:
        return {"BLOCK_T": 1, "num_warps": max(1, min(8, elements // 512)), "programs_per_core": 0}
    tile, warps, per_core = 2048, 2, 0
    if problem["residual_block"]:
        tile, warps, per_core = (2048, 4, 8) if problem["static"] else (1024, 1, 16)
    block_t = max(1, min(64, tile // elements))
    warps = max(warps, min(8, block_t * elements // 1024))
    return {"BLOCK_T": block_t, "num_warps": warps, "programs_per_core": per_core}


def _why_illegal(config: Config, problem: Problem, dev: Device) -> str | None:
    block_t = config["BLOCK_T"]
    if block_t < 1 or block_t & (block_t - 1):
        return f"BLOCK_T={block_t} is not a power of two"
    elements = block_t * 2 * _block_h(problem["head_dim"], problem["residual_block"])
    if not dev.registers:  # a vector unit: no threads
        if config["programs_per_core"] < 1:
            return "programs_per_core must be 1 or more on an NPU (the grid is bounded)"
        if elements * 40 > dev.local_mem_bytes:  # ten arrays of fp32
            return f"{elements * 40} bytes are in use at once, UB has {dev.local_mem_bytes}"
        return None
    warps = config["num_warps"]
    if warps not in (1, 2, 4, 8, 16, 32):
        return f"num_warps={warps} is not of 1, 2, 4, 8, 16, 32"
    if elements // (32 * warps) > 32:
        return f"{elements // (32 * warps)} channels a thread would not fit its registers"
    return None


def _cost(problem: Problem) -> Cost:
    p = problem
    heads, dim = p["num_kv_heads"], p["head_dim"]
    vectors = p["n_tokens"] * heads
    moved = vectors * dim * (p["dtype"].itemsize + 1) + 8 * p["n_tokens"]
    moved += 4 * heads * dim if p["static"] else 4 * vectors
    if p["residual_block"]:  # the slots that tokens have; what outliers add is left out
        moved += 2 * vectors + 4 * heads
    return Cost(flops=0, bytes=moved)


_EDGE = frozenset({"edge"})
_BENCH = frozenset({"bench"})  # Qwen3 8B: 8 heads x 128
_P = quantized_problem

SPEC = register(
    KernelSpec(
        name="append_quantized_kv",
        launch=append_quantized_kv,
        reference=append_quantized_kv_ref,
        problem_fields=(
            "n_tokens",
            "num_kv_heads",
            "head_dim",
            "block_size",
            "dtype",
            "static",
            "residual_block",
        ),
        make_inputs=_make_inputs,
        cases=(
            Case("9x2x64-fp4-bf16", _P(9, 2, 64, torch.bfloat16, "int8_fp4", outlier_every=3)),
            Case("5x3x32-int8-fp16", _P(5, 3, 32, torch.float16, "int8", skip_every=3)),
            Case(
                "7x2x96-static-fp4-block3-fp32",
                _P(7, 2, 96, torch.float32, "int8_static_fp4", block_size=3, outlier_every=2),
                _EDGE,
            ),
            Case(
                "6x2x64-e3m0-b16-bf16",
                _P(
                    6,
                    2,
                    64,
                    torch.bfloat16,
                    "int8_fp4",
                    residual_block=16,
                    mantissa_bits=0,
                    outlier_every=2,
                ),
                _EDGE,
            ),
            Case("1x1x1-int8-bf16", _P(1, 1, 1, torch.bfloat16, "int8", block_size=1), _EDGE),
            Case("3x5x33-static-bf16", _P(3, 5, 33, torch.bfloat16, "int8_static"), _EDGE),
            Case("64x8x128-fp4-bf16", _P(64, 8, 128, torch.bfloat16, "int8_fp4"), _BENCH),
            Case("4096x8x128-int8-bf16", _P(4096, 8, 128, torch.bfloat16, "int8"), _BENCH),
            Case("4096x8x128-fp4-bf16", _P(4096, 8, 128, torch.bfloat16, "int8_fp4"), _BENCH),
            Case(
                "4096x8x128-static-fp4-bf16",
                _P(4096, 8, 128, torch.bfloat16, "int8_static_fp4"),
                _BENCH,
            ),
        ),
        tuning_key=_tuning_key,
        space=_space,
        default_config=_default_config,
        why_illegal=_why_illegal,
        cost=_cost,
        mutates=(
            "codes",
            "scale",
            "slots",
            "residual",
            "residual_scale",
            "free_count",
            "dropped",
        ),
        compared=_compared,
        scalar_loop_reason="places and pool slots are scattered, one a token",
        shape=_shape,
    )
)
