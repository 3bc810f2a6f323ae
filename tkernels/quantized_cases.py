"""Problems, inputs, costs and comparison of ``append_quantized_kv`` for tests, bench and tuner."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tkernels.device import cdiv
from tkernels.kv_format import (
    FIELDS,
    FORMATS,
    NO_SLOT,
    QuantizedKV,
    allocate_quantized,
    dequantize_cache,
    fields,
)
from tkernels.registry import Case, Cost, Problem

_WRITTEN = [field for field in FIELDS if field not in ("free_slots", "tau")]
MUTATED = tuple(f"{which}_{field}" for which in "kv" for field in _WRITTEN)


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
    scattered: bool = True,
) -> dict[str, Any]:
    """Problem of ``tokens`` new tokens; the last four only concern the inputs made from it."""
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
        "scattered": scattered,
    }


def quantized_shape(
    *,
    tokens: int,
    num_kv_heads: int = 8,
    head_dim: int = 128,
    block_size: int = 16,
    residuals: bool = True,
    static: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    scattered: bool = False,
) -> Problem:
    """Keys and values of ``tokens`` new tokens: of prompts, which fill whole blocks, or
    ``scattered``, as those of a decode step are."""
    mode = "int8" + "_static" * static + "_fp4" * residuals
    return quantized_problem(
        tokens, num_kv_heads, head_dim, dtype, mode, block_size=block_size, scattered=scattered
    )


def quantized_inputs(problem: Problem, dev: torch.device) -> dict[str, Any]:
    """k and v as views of a packed qkv; of each head one token in ``outlier_every`` has an outlier
    channel.

    K and V differ in all that they have: numbers, outlier tokens, static scales, thresholds and the
    order of free slots.
    """
    tokens, heads, dim = problem["n_tokens"], problem["num_kv_heads"], problem["head_dim"]
    num_blocks, bits = cdiv(2 * tokens, problem["block_size"]), problem.get("mantissa_bits", 1)
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(tokens, 4 * heads, dim, generator=generator)
    # Each head has its own outlier tokens, as many as a cache's pool is made for.
    every = problem.get("outlier_every", 25)
    token, head = torch.arange(tokens)[:, None], torch.arange(heads)
    caches: dict[str, torch.Tensor] = {}
    for i, which in enumerate("kv"):
        found = (token + 7 * head + i) % every == 0
        qkv[:, (2 + i) * heads :][:, :heads, dim // 3 + i * (dim > 1)][found] = 60.0
        cache = _empty_cache(problem, num_blocks, FORMATS[bits], 1.0 + 0.25 * i, dev)
        if cache.free_slots is not None and i:
            cache.free_slots.copy_(cache.free_slots.flip(1))
        caches |= {f"{which}_{n}": t for n, t in zip(FIELDS, fields(cache), strict=True)}
    size = problem["block_size"]
    if problem.get("scattered", True):
        slots = torch.randperm(num_blocks * size, generator=generator)[:tokens]
    else:
        blocks = torch.randperm(num_blocks, generator=generator)[:, None]
        slots = (blocks * size + torch.arange(size)).flatten()[:tokens]
    if problem.get("skip_every", 0):
        slots[:: problem["skip_every"]] = -1
    qkv = qkv.to(problem["dtype"]).to(dev)
    return {
        "k": qkv[:, 2 * heads : 3 * heads],
        "v": qkv[:, 3 * heads :],
        **caches,
        "slot_mapping": slots.to(dev),
        "mantissa_bits": bits,
    }


def _empty_cache(
    problem: Problem, num_blocks: int, residual_format: str, factor: float, dev: torch.device
) -> QuantizedKV:
    """With thresholds and static scales ``factor`` times what the inputs want."""
    heads, dim = problem["num_kv_heads"], problem["head_dim"]
    static, residuals = problem["static"], problem["residual_block"] > 0
    of_residuals: dict[str, Any] = {
        # Where one channel of 128 is large the error is 0.02, and 0.008 elsewhere.
        "tau": 0.5 * factor if static else 0.0125 * factor * (dim / 128) ** 0.5,
        "outlier_share": 1.0,
        "residual_format": residual_format,
        "residual_block": problem["residual_block"],
    }
    return allocate_quantized(
        num_blocks, problem["block_size"], heads, dim,
        mode="int8" + "_static" * static + "_fp4" * residuals,
        static_scale=torch.full((heads, dim), 4.0 * factor / 127) if static else None,
        device=dev,
        **(of_residuals if residuals else {}),
    )  # fmt: skip


def quantized_compared(written: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """What the caches hold; not in which of a pool's slots. (One format reads all: they differ
    in what a code means, and equal codes are equal in any.)"""
    return tuple(
        t for which in "kv" for t in _held({field: written[f"{which}_{field}"] for field in FIELDS})
    )


def _held(cache: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    codes, scale, slots = cache["codes"], cache["scale"], cache["slots"]
    if not slots.numel():
        return codes, scale
    whole = QuantizedKV(*(cache[field] for field in FIELDS))  # type: ignore[arg-type]  # tensors all
    read = dequantize_cache(whole)
    return codes, scale, read, slots != NO_SLOT, cache["free_count"], cache["dropped"]


def quantized_cost(problem: Problem) -> Cost:
    """Reads k and v once, writes codes and scales; what outliers add is left out."""
    heads, dim = problem["num_kv_heads"], problem["head_dim"]
    vectors = problem["n_tokens"] * heads
    of_one = vectors * dim * (problem["dtype"].itemsize + 1)
    of_one += 4 * heads * dim if problem["static"] else 4 * vectors
    if problem["residual_block"]:  # the slots that tokens have, and thresholds
        of_one += 2 * vectors + 4 * heads
    return Cost(flops=0, bytes=2 * of_one + 8 * problem["n_tokens"])


_EDGE = frozenset({"edge"})
_BENCH = frozenset({"bench"})  # Qwen3 8B: 8 heads x 128
_P = quantized_problem
_BF16 = torch.bfloat16

CASES = (
    Case("9x2x64-fp4-bf16", _P(9, 2, 64, _BF16, "int8_fp4", outlier_every=3)),
    Case("5x3x32-int8-fp16", _P(5, 3, 32, torch.float16, "int8", skip_every=3)),
    Case(
        "7x2x96-static-fp4-block3-fp32",
        _P(7, 2, 96, torch.float32, "int8_static_fp4", block_size=3, outlier_every=2),
        _EDGE,
    ),
    Case(
        "6x2x64-e3m0-b16-bf16",
        _P(6, 2, 64, _BF16, "int8_fp4", residual_block=16, mantissa_bits=0, outlier_every=2),
        _EDGE,
    ),
    Case("1x1x1-int8-bf16", _P(1, 1, 1, _BF16, "int8", block_size=1), _EDGE),
    Case("3x5x33-static-bf16", _P(3, 5, 33, _BF16, "int8_static"), _EDGE),
    Case(
        "13x8x96-int8-block3-fp32",
        _P(13, 8, 96, torch.float32, "int8", block_size=3, skip_every=5, scattered=False),
        _EDGE,
    ),
    # A decode step's tokens lie apart, those of prompts fill blocks; scattered, a token's scale of
    # 4 bytes takes 32 of memory. The tuner takes the first of two with one key.
    Case("64x8x128-int8-bf16", _P(64, 8, 128, _BF16, "int8"), _BENCH),
    Case("64x8x128-fp4-bf16", _P(64, 8, 128, _BF16, "int8_fp4"), _BENCH),
    *(
        Case(f"{n}x8x128-{label}-blocks-bf16", _P(n, 8, 128, _BF16, mode, scattered=False), _BENCH)
        for n, label, mode in (
            (512, "int8", "int8"),
            (512, "fp4", "int8_fp4"),
            (4096, "int8", "int8"),
            (4096, "fp4", "int8_fp4"),
            (4096, "static-fp4", "int8_static_fp4"),
        )
    ),
    Case("4096x8x128-int8-bf16", _P(4096, 8, 128, _BF16, "int8"), _BENCH),
)
