"""Problems, inputs and costs of ``skinny_linear`` and ``fused_add_rms_norm_linear``."""

from __future__ import annotations

from typing import Any

import torch

from tkernels.registry import Cost, Problem


def linear_problem(
    m: int,
    n: int,
    k: int,
    dtype: torch.dtype = torch.bfloat16,
    *,
    gated: bool = False,
    bias: bool = False,
) -> dict[str, Any]:
    """Problem of ``m`` rows of ``k`` columns to ``n``."""
    return {"m": m, "n": n, "k": k, "dtype": dtype, "gated": gated, "bias": bias}


def linear_shape(
    *,
    tokens: int,
    outputs: int,
    inputs: int,
    silu_and_mul: bool = False,
    dtype: torch.dtype = torch.bfloat16,
) -> Problem:
    """``tokens`` rows through a layer of ``inputs`` to ``outputs`` columns of the result."""
    return linear_problem(tokens, outputs, inputs, dtype, gated=silu_and_mul)


def linear_inputs(problem: Problem, dev: torch.device) -> dict[str, Any]:
    """Seeded operands, such that results are about 1."""
    p = problem
    generator = torch.Generator(dev).manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=dev)

    rows = p["n"] * (2 if p["gated"] else 1)
    inputs: dict[str, Any] = {
        "x": random(p["m"], p["k"]).to(p["dtype"]),
        "weight": (random(rows, p["k"]) * p["k"] ** -0.5).to(p["dtype"]),
    }
    if p["bias"]:
        inputs["bias"] = random(rows).to(p["dtype"])
    if p["gated"]:
        inputs["silu_and_mul"] = True
    return inputs


def linear_cost(problem: Problem, *, norm: bool = False) -> Cost:
    """Weights once, rows in and out once."""
    p = problem
    m, n, k, size = p["m"], p["n"], p["k"], p["dtype"].itemsize
    rows = n * (2 if p["gated"] else 1)
    moved = rows * k + m * k * (3 if norm else 1) + m * n + (rows if p["bias"] else 0)
    return Cost(flops=2 * m * rows * k, bytes=(moved + (k if norm else 0)) * size)
