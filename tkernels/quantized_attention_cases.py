"""Problems, inputs, costs and peers of ``paged_attn_quantized`` for tests, bench and tuner."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tkernels.attention_cases import (
    flashinfer_decode,
    paged_cost,
    paged_inputs,
    paged_problem,
    seen_keys,
)
from tkernels.kv_format import MODES, NO_SLOT
from tkernels.registry import Case, Cost, Problem


def problem_of(
    contexts: Sequence[int],
    heads: str,
    dtype: torch.dtype,
    mode: str,
    *,
    residual_block: int = 0,
    mantissa_bits: int = 1,
    outliers: float = 0.25,
    **more: Any,
) -> dict[str, Any]:
    """``paged_problem`` over a cache of ``mode``; ``outliers`` is the share of its tokens.

    ``residual_block``: 0 is 32 where head_dim / 2 has whole blocks of it, and 16 elsewhere.
    """
    assert mode in MODES[1:]
    problem = paged_problem(contexts, heads, dtype, **more)
    del problem["aligned"]
    default = 32 if problem["head_dim"] % 64 == 0 else 16
    return {
        **problem,
        "static": "static" in mode,
        "residual_block": (residual_block or default) if "fp4" in mode else 0,
        "mantissa_bits": mantissa_bits,
        "outliers": outliers,
    }


def shape_of(
    *,
    batch: int,
    context: int,
    query: int = 1,
    num_heads: int = 32,
    num_kv_heads: int = 8,
    head_dim: int = 128,
    block_size: int = 16,
    window: int = 0,
    residuals: bool = False,
    static: bool = False,
    dtype: torch.dtype = torch.bfloat16,
) -> Problem:
    """Problem of ``batch`` sequences of ``context`` tokens, the last ``query`` of them new."""
    if query > context:
        raise ValueError(
            f"paged_attn_quantized: query must be at most context={context}, got {query}"
        )
    return problem_of(
        [context] * batch,
        f"{num_heads}/{num_kv_heads}x{head_dim}",
        dtype,
        "int8" + "_static" * static + "_fp4" * residuals,
        outliers=0.04,
        q_lens=None if query == 1 else [query] * batch,
        block_size=block_size,
        window=window or None,
        poison=False,
    )


def inputs_of(problem: Problem, dev: torch.device) -> dict[str, Any]:
    """Seeded arguments: codes, scales and residuals at random, as attention need not know better.

    What must not be read is NaN (scales, and pool rows of no token) or a slot past the pool.
    """
    p = problem
    # A cache of one channel says which blocks are whose, and what is out of sight.
    small = paged_inputs({**p, "head_dim": 2, "dtype": torch.float32, "poison": p["poison"]}, dev)
    num_blocks, block_size, heads, _ = small["k_cache"].shape
    dim, generator = p["head_dim"], torch.Generator(dev).manual_seed(1)
    n_tokens = small["q"].shape[0]

    def draw(low: int, high: int, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator, device=dev, dtype=dtype)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=dev)

    inputs = {"q": normal(n_tokens, p["num_heads"], dim).to(p["dtype"])}
    for name in ("k", "v"):
        out_of = torch.isnan(small[f"{name}_cache"][..., 0]).transpose(1, 2)  # as scales lie
        codes = draw(-127, 128, num_blocks, block_size, heads, dim, dtype=torch.int8)
        # Codes are uniform, so the numbers have about the size 1.
        scale = (normal(heads, dim) if p["static"] else normal(num_blocks, heads, block_size)).abs()
        scale = (scale + 0.2) / 64
        if not p["static"]:
            scale = torch.where(out_of, math.nan, scale)
        fields = [codes, scale]
        if p["residual_block"]:
            fields += _pool(p, out_of, draw)
            if not p["static"]:
                fields[1] = torch.where(fields[2] != NO_SLOT, -scale, scale)
        else:
            fields += [
                torch.empty(0, dtype=t, device=dev) for t in (torch.int16, *[torch.uint8] * 2)
            ]
        names = ("codes", "scale", "slots", "residual", "residual_scale")
        inputs |= {f"{name}_{f}": t.contiguous() for f, t in zip(names, fields, strict=True)}
    del small["q"], small["k_cache"], small["v_cache"]
    return {**inputs, **small, "mantissa_bits": p["mantissa_bits"]}


def _pool(
    p: Problem, out_of: torch.Tensor, draw: Callable[..., torch.Tensor]
) -> list[torch.Tensor]:
    """(slots, residual, residual_scale): the same number of outliers in each head."""
    (num_blocks, heads, block_size), dim = out_of.shape, p["head_dim"]
    positions = num_blocks * block_size
    n = max(1, round(p["outliers"] * positions))
    n_slots = min(n + 2, 0xFFFF)
    order = torch.stack(
        [draw(0, 2**30, positions, dtype=torch.int64).argsort() for _ in range(heads)]
    )
    # The n first of a random order have slots n - 1, n - 2...: not in the order of positions.
    numbers = torch.arange(positions, device=out_of.device)
    numbers = torch.where(numbers < n, (n - 1 - numbers) % n_slots, NO_SLOT)
    slots = torch.empty_like(order).scatter_(1, order, numbers.expand(heads, -1))
    slots = slots.view(heads, num_blocks, block_size).transpose(0, 1).to(torch.int16)
    slots = torch.where(out_of, torch.tensor(0x7FFE, dtype=torch.int16, device=slots.device), slots)
    # Of the size of a rounding error: steps of up to 0.5, that is 6 units of up to 2^-4.
    residual = draw(0, 256, heads, n_slots, dim // 2, dtype=torch.uint8)
    exponents = draw(119, 124, heads, n_slots, dim // p["residual_block"], dtype=torch.uint8)
    if n_slots > n:
        exponents[:, n:] = 255
    return [slots.contiguous(), residual, exponents]


def cost_of(problem: Problem) -> Cost:
    """As of ``paged_attn``, with a byte a code, scales, and outliers' slots and residuals.

    Without a scale of their own, tokens tell by their slots that they are outliers.
    """
    p = problem
    plain = paged_cost({**p, "dtype": torch.int8})
    rows = 2 * sum(p["q_lens"] or [1] * p["batch"]) * p["num_heads"] * p["head_dim"]
    moved = plain.bytes + rows * (p["dtype"].itemsize - 1)
    vectors = 2 * seen_keys(p) * p["num_kv_heads"]
    moved += 8 * p["num_kv_heads"] * p["head_dim"] if p["static"] else 4 * vectors
    if p["residual_block"]:
        row = p["head_dim"] // 2 + p["head_dim"] // p["residual_block"] + 2 * (not p["static"])
        moved += 2 * vectors * p["static"] + round(p["outliers"] * vectors) * row
    return Cost(flops=plain.flops, bytes=moved)


def peers_of(inputs: dict[str, Any]) -> dict[str, Callable[[], Any]]:
    """FlashInfer over an fp8 cache of the same shape, on decode problems: what people use today."""
    if {"cu_seqlens_q", "window", "softcap", "sinks"} & set(inputs):
        return {}
    fp8 = torch.float8_e4m3fn
    caches = tuple((inputs[f"{name}_codes"].half() / 64).to(fp8) for name in ("k", "v"))
    lens = inputs["context_lens"].tolist()
    return flashinfer_decode(inputs["q"], caches, inputs["block_table"], lens, "flashinfer-fp8")


_EDGE = frozenset({"edge"})
_BENCH = frozenset({"bench"})  # Qwen3 8B: 32 query heads, 8 KV heads, 128 values each
_BF16, _FP16, _FP32 = torch.bfloat16, torch.float16, torch.float32
_LENGTHS = (0, 1, 15, 16, 17, 70)
_P = problem_of


def _decode(batch: int, context: int, mode: str = "int8") -> Case:
    problem = shape_of(
        batch=batch, context=context, residuals="fp4" in mode, static="static" in mode
    )
    return Case(f"decode-b{batch}-ctx{context}-32/8x128-{mode}-bf16", problem, _BENCH)


# fmt: off
CASES = (
    Case("decode-4/2x64-fp4-fp16", _P(_LENGTHS, "4/2x64", _FP16, "int8_fp4", max_context=96)),
    Case("decode-4/2x32-int8-bf16", _P(_LENGTHS, "4/2x32", _BF16, "int8", max_context=96)),
    Case("chunk-2/1x64-fp4-bf16", _P(
        (5, 40, 33, 0, 16), "2/1x64", _BF16, "int8_fp4", q_lens=(5, 7, 3, 0, 16), max_context=100,
        lse=True)),
    Case("static-fp4-4/1x96-bf16", _P(
        (33, 70), "4/1x96", _BF16, "int8_static_fp4", sinks=True, lse=True), _EDGE),
    Case("static-3/3x16-fp16", _P((31, 32, 1), "3/3x16", _FP16, "int8_static"), _EDGE),
    Case("block32-5/1x32-fp4-fp32", _P(
        (31, 32, 33, 0), "5/1x32", _FP32, "int8_fp4", block_size=32, lse=True), _EDGE),
    Case("window-2/2x32-fp4-fp32", _P(
        _LENGTHS, "2/2x32", _FP32, "int8_fp4", window=9, sinks=True, lse=True), _EDGE),
    Case("window-chunk-2/1x32-fp4-bf16", _P(
        (70, 20, 3), "2/1x32", _BF16, "int8_fp4", q_lens=(20, 1, 3), window=18, lse=True), _EDGE),
    Case("all-outliers-8/2x64-e3m0-b16-bf16", _P(
        (70, 20, 3), "8/2x64", _BF16, "int8_fp4", residual_block=16, mantissa_bits=0,
        outliers=1.0, softcap=2.0), _EDGE),
    Case("1x1-1/1x2-int8-fp32", _P((1,), "1/1x2", _FP32, "int8"), _EDGE),
    _decode(64, 4096), _decode(64, 4096, "int8_fp4"),
    _decode(64, 4096, "int8_static"), _decode(64, 4096, "int8_static_fp4"),
    _decode(256, 1024), _decode(256, 1024, "int8_fp4"),
    _decode(1, 32768), _decode(1, 32768, "int8_fp4"),
    _decode(16, 4096), _decode(16, 4096, "int8_fp4"),
    Case("chunk-2048-ctx8192-32/8x128-int8-bf16", shape_of(
        batch=1, context=8192, query=2048), _BENCH),
    Case("chunk-2048-ctx8192-32/8x128-int8_fp4-bf16", shape_of(
        batch=1, context=8192, query=2048, residuals=True), _BENCH),
    Case("chunk-2048-ctx8192-32/8x128-int8_static-bf16", shape_of(
        batch=1, context=8192, query=2048, static=True), _BENCH),
)
# fmt: on
