"""Problems, inputs, costs and peers of ``moe_w4a16_gemm`` for tests, bench and tuner."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tkernels.moe_gemm_cases import choose_experts, dispatched, touched_experts
from tkernels.registry import Case, Cost, Problem
from tkernels.w4_format import dequantize_w4, pack_nibbles


def moe_w4_problem(
    tokens: int,
    experts: int,
    k_choices: int,
    n: int,
    k: int,
    dtype: torch.dtype = torch.bfloat16,
    *,
    first: bool = True,
    group: int = 128,
    scale: torch.dtype | None = None,
    zero: bool = False,
    routing: str = "uniform",
) -> dict[str, Any]:
    """A product of the layer: ``first`` is gate_up with its activation, else down with weights.

    ``n``, ``k``: rows and columns of an expert's weight, with a scale every ``group`` columns;
    ``scale``: its dtype, None that of x; ``zero``: with zero points; ``routing``: as in
    ``moe_gemm_problem``.
    """
    return {
        "rows": tokens * k_choices,
        "experts": experts,
        "n": n,
        "k": k,
        "group": group,
        "dtype": dtype,
        "scale": scale or dtype,
        "zero": zero,
        "silu_and_mul": first,
        "top_k": k_choices if first else 0,
        "aligned": k % 32 == 0,
        "choices": k_choices,
        "routing": routing,
    }


def moe_w4_shape(
    *,
    tokens: int,
    experts: int,
    top_k: int,
    hidden: int,
    intermediate: int,
    down: bool = False,
    group: int = 128,
    zero: bool = False,
    dtype: torch.dtype = torch.bfloat16,
) -> Problem:
    """gate_up (or ``down``) of a layer of ``experts`` between ``hidden`` and ``intermediate``."""
    n, k = (hidden, intermediate) if down else (2 * intermediate, hidden)
    return moe_w4_problem(
        tokens, experts, top_k, n, k, dtype, first=not down, group=group, zero=zero
    )


def moe_w4_inputs(problem: Problem, dev: torch.device) -> dict[str, Any]:
    """Seeded arguments of ``moe_w4a16_gemm`` for ``problem``."""
    p = problem
    generator = torch.Generator(dev).manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=dev)

    tokens = p["rows"] // p["choices"]
    chosen = choose_experts(tokens, p["experts"], p["choices"], p["routing"])
    expert_offsets, sorted_ids = dispatched(chosen, p["experts"], dev)
    e, n, k, groups = p["experts"], p["n"], p["k"], p["k"] // p["group"]
    weight = torch.empty((e, n, k // 8), dtype=torch.int32, device=dev)
    for i in range(e):  # of all at once the integers would fill a chip
        weight[i] = pack_nibbles((normal(n, k) * 3 + 8).round().clamp(0, 15))
    inputs: dict[str, Any] = {
        "x": normal(tokens if p["top_k"] else p["rows"], k).to(p["dtype"]),
        "weight": weight,
        "weight_scale": ((normal(e, n, groups).abs() + 0.5) * k**-0.5 / 3).to(p["scale"]),
        "expert_offsets": expert_offsets,
        "sorted_ids": sorted_ids,
    }
    if p["zero"]:
        zero = (normal(e, n, groups) * 2 + 8).round().clamp(0, 15)
        inputs["weight_zero"] = zero.to(torch.int8)
    if p["silu_and_mul"]:
        inputs["silu_and_mul"] = True
    else:
        inputs["topk_weights"] = normal(tokens, p["choices"]).softmax(-1)
    if p["top_k"]:
        inputs["top_k"] = p["top_k"]
    return inputs


def moe_w4_cost(problem: Problem) -> Cost:
    """Weights of the experts that have rows, rows in and out, once each."""
    p = problem
    rows, n, k, size = p["rows"], p["n"], p["k"], p["dtype"].itemsize
    of_a_group = p["scale"].itemsize + (1 if p["zero"] else 0)
    weights = touched_experts(p) * (n * k // 2 + n * (k // p["group"]) * of_a_group)
    sources = rows // p["choices"] if p["top_k"] else rows
    outputs = rows * (n // 2 if p["silu_and_mul"] else n) * size
    numbers = 4 * (rows if p["silu_and_mul"] else 2 * rows) + 4 * (p["experts"] + 1)
    return Cost(flops=2 * rows * n * k, bytes=int(weights) + sources * k * size + outputs + numbers)


def moe_w4_peers(inputs: dict[str, Any]) -> dict[str, Callable[[], Any]]:
    """``moe_gemm`` with the same weights in bf16."""
    from tkernels.ops.moe_gemm import moe_gemm

    packed = {name: inputs[name] for name in ("weight", "weight_scale")}
    if inputs["x"].dtype != torch.bfloat16:
        return {}
    zero = inputs.get("weight_zero")
    e, n, words = packed["weight"].shape
    dense = torch.empty((e, n, 8 * words), dtype=torch.bfloat16, device=packed["weight"].device)
    for i in range(e):
        of_one = (packed["weight"][i], packed["weight_scale"][i], None if zero is None else zero[i])
        dense[i] = dequantize_w4(*of_one)
    others = {
        name: value
        for name, value in inputs.items()
        if name not in ("weight", "weight_scale", "weight_zero")
    }
    return {"bf16": lambda: moe_gemm(weight=dense, **others)}


_EDGE = frozenset({"edge"})
_BENCH = frozenset({"bench"})
_BF16, _FP16, _FP32 = torch.bfloat16, torch.float16, torch.float32
_P = moe_w4_problem


def _layer(tokens: int) -> tuple[tuple[str, Problem], ...]:
    """Both products of a layer of Qwen3-30B-A3B."""
    return (
        (f"gate_up-{tokens}", _P(tokens, 128, 8, 1536, 2048)),
        (f"down-{tokens}", _P(tokens, 128, 8, 2048, 768, first=False)),
    )


# fmt: off
MOE_W4_CASES = (
    Case("gate_up-6x5x2-bf16", _P(6, 5, 2, 48, 512)),
    Case("down-9x4x3-zero-fp16", _P(9, 4, 3, 40, 128, _FP16, first=False, group=64, zero=True)),
    Case("group32-7x3x2-bf16", _P(7, 3, 2, 36, 96, group=32), _EDGE),
    Case("row-zero-5x6x2-bf16", _P(5, 6, 2, 34, 200, group=200, zero=True), _EDGE),
    Case("fp32-scale-8x3x1-fp16", _P(8, 3, 1, 30, 384, _FP16, scale=_FP32), _EDGE),
    Case("k32-1x60x4-bf16", _P(1, 60, 4, 16, 32, group=32), _EDGE),
    Case("odd-11x4x2-zero-fp16", _P(
        11, 4, 2, 33, 64, _FP16, first=False, group=32, zero=True), _EDGE),
    Case("one-33x5x2-bf16", _P(33, 5, 2, 32, 256, group=256, routing="one"), _EDGE),
    Case("1x1x1-bf16", _P(1, 1, 1, 1, 8, first=False, group=8), _EDGE),
    *(Case(f"{name}-bf16", p, _BENCH) for t in (1, 16, 64, 512, 4096) for name, p in _layer(t)),
)
# fmt: on
