"""Problems, inputs and costs of ``moe_gemm`` for tests, bench and tuner."""

from __future__ import annotations

import collections
import heapq
import itertools
import math
import random
from collections.abc import Callable
from typing import Any

import torch

from tkernels.registry import Case, Cost, Problem

PATHS = ("int8", "high", "masked")


def moe_gemm_problem(
    tokens: int,
    experts: int,
    k_choices: int,
    n: int,
    k: int,
    dtype: torch.dtype = torch.bfloat16,
    *,
    first: bool = True,
    int8: bool = False,
    path: str = "high",
    quantized: bool = True,
    routing: str = "uniform",
) -> dict[str, Any]:
    """A product of the layer: ``first`` is gate_up with its activation, else down with weights.

    ``n``, ``k``: rows and columns of an expert's weight. ``path``: high, int8 or masked, with int8
    weights; ``quantized``: x comes with its codes. ``routing``: uniform, zipf (an expert's share
    falls with its rank), one (all tokens choose the same experts).
    """
    return {
        "rows": tokens * k_choices,
        "experts": experts,
        "n": n,
        "k": k,
        "dtype": dtype,
        "path": path,
        "int8": int8,
        "silu_and_mul": first,
        "top_k": k_choices if first else 0,
        "aligned": k % 16 == 0,
        "choices": k_choices,
        "quantized": quantized,
        "routing": routing,
    }


def moe_gemm_shape(
    *,
    tokens: int,
    experts: int,
    top_k: int,
    hidden: int,
    intermediate: int,
    down: bool = False,
    w8a8: bool = False,
    w8a16: bool = False,
    dtype: torch.dtype = torch.bfloat16,
) -> Problem:
    """gate_up (or ``down``) of a layer of ``experts`` between ``hidden`` and ``intermediate``."""
    n, k = (hidden, intermediate) if down else (2 * intermediate, hidden)
    return moe_gemm_problem(
        tokens,
        experts,
        top_k,
        n,
        k,
        dtype,
        first=not down,
        int8=w8a8 or w8a16,
        path="int8" if w8a8 else "high",
    )


def choose_experts(tokens: int, experts: int, choices: int, routing: str) -> list[list[int]]:
    """The experts of each token, all different; the same ones on any device."""
    chance = random.Random(1)
    if routing == "zipf":  # Efraimidis and Spirakis: u^(1 / weight), in logarithms

        def rank(expert: int) -> float:
            return math.log(1.0 - chance.random()) * (expert + 1)

        return [heapq.nlargest(choices, range(experts), key=rank) for _ in range(tokens)]
    if routing == "one":
        return [chance.sample(range(experts), choices)] * tokens
    return [chance.sample(range(experts), choices) for _ in range(tokens)]


def dispatched(
    chosen: list[list[int]], experts: int, dev: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """(expert_offsets, sorted_ids) as ``moe_dispatch`` makes them.

    Made of lists: the offline model for Ascend knows what stands in these, and follows it.
    """
    flat = [e for row in chosen for e in row]
    counts = collections.Counter(flat)
    offsets = [0, *itertools.accumulate(counts[e] for e in range(experts))]
    order = sorted(range(len(flat)), key=flat.__getitem__)
    return (
        torch.tensor(offsets, dtype=torch.int32, device=dev),
        torch.tensor(order, dtype=torch.int32, device=dev),
    )


def moe_gemm_inputs(problem: Problem, dev: torch.device) -> dict[str, Any]:
    """Seeded arguments of ``moe_gemm`` for ``problem``."""
    from tkernels.ops.quantize_per_token import quantize_per_token_ref

    p = problem
    generator = torch.Generator(dev).manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=dev)

    tokens = p["rows"] // p["choices"]
    chosen = choose_experts(tokens, p["experts"], p["choices"], p["routing"])
    expert_offsets, sorted_ids = dispatched(chosen, p["experts"], dev)
    e, n, k = p["experts"], p["n"], p["k"]
    x = normal(tokens if p["top_k"] else p["rows"], k).to(p["dtype"])
    inputs: dict[str, Any] = {"x": x, "expert_offsets": expert_offsets, "sorted_ids": sorted_ids}
    if p["int8"]:
        codes = torch.empty((e, n, k), dtype=torch.int8, device=dev)
        scale = torch.empty((e, n), device=dev)
        for i in range(e):
            codes[i], scale[i] = quantize_per_token_ref(normal(n, k) * k**-0.5)
        inputs |= {"weight": codes, "weight_scale": scale}
        if p["path"] != "high" and p["quantized"]:
            inputs["x_q"], inputs["x_scale"] = quantize_per_token_ref(x)
        if p["path"] == "high":
            inputs["high"] = True
        if p["path"] == "masked":  # neighbours differ, and the sign bit is set
            words = (e + 63) // 64
            inputs["mask"] = torch.full((words,), -0x5A5A5A5A5A5A5A5B, device=dev)
    else:
        weight = torch.empty((e, n, k), dtype=p["dtype"], device=dev)
        for i in range(e):
            weight[i] = normal(n, k) * k**-0.5
        inputs["weight"] = weight
    if p["silu_and_mul"]:
        inputs["silu_and_mul"] = True
    else:
        inputs["topk_weights"] = normal(tokens, p["choices"]).softmax(-1)
    if p["top_k"]:
        inputs["top_k"] = p["top_k"]
    return inputs


def touched_experts(problem: Problem) -> float:
    """Experts that have a row, expected, of tokens that choose uniformly (or all the same)."""
    p = problem
    if p["routing"] == "one":
        return float(p["choices"])
    share = p["choices"] / p["experts"]
    tokens = p["rows"] // p["choices"]
    if p["routing"] == "uniform":
        return float(p["experts"] * (1 - (1 - share) ** tokens))
    chosen = choose_experts(tokens, p["experts"], p["choices"], p["routing"])
    return float(len({e for row in chosen for e in row}))


def moe_gemm_cost(problem: Problem) -> Cost:
    """Weights of the experts that have rows, rows in and out, once each."""
    p = problem
    rows, n, k, size = p["rows"], p["n"], p["k"], p["dtype"].itemsize
    weights = touched_experts(p) * (n * k + 4 * n if p["int8"] else n * k * size)
    sources = rows // p["choices"] if p["top_k"] else rows
    codes = p["int8"] and p["path"] != "high" and p["quantized"]
    plain = p["path"] != "int8" or not p["quantized"]
    x = sources * ((k + 4 if codes else 0) + (k * size if plain else 0))
    outputs = rows * (n // 2 if p["silu_and_mul"] else n) * size
    mask = 8 * ((p["experts"] + 63) // 64) if p["path"] == "masked" else 0
    numbers = 4 * (rows if p["silu_and_mul"] else 2 * rows) + 4 * (p["experts"] + 1) + mask
    return Cost(flops=2 * rows * n * k, bytes=int(weights) + x + outputs + numbers)


def moe_gemm_peers(inputs: dict[str, Any]) -> dict[str, Callable[[], Any]]:
    """PyTorch's grouped product, with what it needs before and behind it."""
    x, weight, ids = inputs["x"], inputs["weight"], inputs["sorted_ids"].long()
    if weight.dtype != torch.bfloat16 or not hasattr(torch, "_grouped_mm") or not x.is_cuda:
        return {}
    ends, turned = inputs["expert_offsets"][1:], weight.transpose(1, 2)
    rows = ids // inputs["top_k"] if inputs.get("top_k") else None
    factors = inputs.get("topk_weights")

    def grouped() -> torch.Tensor:
        y = torch._grouped_mm(x if rows is None else x[rows], turned, ends)
        if inputs.get("silu_and_mul"):
            gate, up = y.chunk(2, -1)
            y = torch.nn.functional.silu(gate) * up
        return y if factors is None else y * factors.flatten()[ids, None].to(y.dtype)

    return {"torch": grouped}


_EDGE = frozenset({"edge"})
_BENCH = frozenset({"bench"})
_BF16, _FP16 = torch.bfloat16, torch.float16
_P = moe_gemm_problem


def _layer(tokens: int, **more: Any) -> tuple[tuple[str, Problem], ...]:
    """Both products of a layer of Qwen3-30B-A3B."""
    return (
        (f"gate_up-{tokens}", _P(tokens, 128, 8, 1536, 2048, **more)),
        (f"down-{tokens}", _P(tokens, 128, 8, 2048, 768, first=False, **more)),
    )


# fmt: off
MOE_GEMM_CASES = (
    Case("gate_up-6x5x2-bf16", _P(6, 5, 2, 48, 64, _BF16)),
    Case("down-9x4x3-fp16", _P(9, 4, 3, 40, 32, _FP16, first=False)),
    Case("w8a8-20x6x2-bf16", _P(20, 6, 2, 64, 48, _BF16, int8=True, path="int8")),
    Case("masked-12x7x2-fp16", _P(
        12, 7, 2, 32, 64, _FP16, first=False, int8=True, path="masked"), _EDGE),
    Case("w8a16-8x3x1-bf16", _P(8, 3, 1, 64, 32, _BF16, int8=True), _EDGE),
    Case("one-33x5x2-bf16", _P(33, 5, 2, 36, 40, _BF16, routing="one"), _EDGE),
    Case("1x60x4-bf16", _P(1, 60, 4, 16, 16, _BF16), _EDGE),
    Case("all-3x4x4-fp16", _P(3, 4, 4, 34, 20, _FP16), _EDGE),
    Case("1x1x1-bf16", _P(1, 1, 1, 1, 1, _BF16, first=False), _EDGE),
    Case("w8a8-makes-5x70x3-bf16", _P(
        5, 70, 3, 32, 33, _BF16, int8=True, path="int8", quantized=False), _EDGE),
    *(Case(f"{name}-bf16", p, _BENCH) for t in (1, 64, 512, 4096) for name, p in _layer(t)),
    *(Case(f"{name}-zipf-bf16", p, _BENCH)
      for t in (64, 4096) for name, p in _layer(t, routing="zipf")),
    *(Case(f"{name}-w8a8-bf16", p, _BENCH)
      for t in (64, 4096) for name, p in _layer(t, int8=True, path="int8")),
)
# fmt: on
