"""Problems, inputs, costs and peers of ``w4a16_gemm`` for tests, bench and tuner."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tkernels.registry import Case, Cost, Problem
from tkernels.w4_format import dequantize_w4, pack_nibbles


def w4_problem(
    m: int,
    n: int,
    k: int,
    dtype: torch.dtype = torch.bfloat16,
    *,
    group: int = 128,
    scale: torch.dtype | None = None,
    zero: bool = False,
    bias: bool = False,
) -> dict[str, Any]:
    """A problem of ``w4a16_gemm``: [m, k] times [n, k] transposed, a scale every ``group`` columns.

    ``group`` k: a scale a row. ``scale``: its dtype, None that of x. ``zero``: with zero points.
    """
    return {
        "m": m,
        "n": n,
        "k": k,
        "dtype": dtype,
        "group": group,
        "scale": scale or dtype,
        "zero": zero,
        "bias": bias,
    }


def w4_shape(
    *,
    tokens: int,
    outputs: int,
    inputs: int,
    group: int = 128,
    zero: bool = False,
    dtype: torch.dtype = torch.bfloat16,
) -> Problem:
    """``tokens`` rows through a layer of ``inputs`` to ``outputs``."""
    return w4_problem(tokens, outputs, inputs, dtype, group=group, zero=zero)


def w4_inputs(problem: Problem, dev: torch.device) -> dict[str, Any]:
    """Seeded arguments of ``w4a16_gemm`` for ``problem``."""
    p = problem
    generator = torch.Generator(dev).manual_seed(0)
    m, n, k, groups = p["m"], p["n"], p["k"], p["k"] // p["group"]

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=dev)

    q = (random(n, k) * 3 + 8).round().clamp(0, 15)
    inputs: dict[str, Any] = {
        "x": random(m, k).to(p["dtype"]),
        "weight": pack_nibbles(q),
        "weight_scale": ((random(n, groups).abs() + 0.5) * k**-0.5 / 3).to(p["scale"]),
    }
    if p["zero"]:
        inputs["weight_zero"] = (random(n, groups) * 2 + 8).round().clamp(0, 15).to(torch.int8)
    if p["bias"]:
        inputs["bias"] = random(n).to(p["dtype"])
    return inputs


def w4_cost(problem: Problem) -> Cost:
    """One product; each argument moved once."""
    p = problem
    m, n, k, size = p["m"], p["n"], p["k"], p["dtype"].itemsize
    of_a_group = p["scale"].itemsize + (1 if p["zero"] else 0)
    moved = (m * k + m * n) * size + n * k // 2 + n * (k // p["group"]) * of_a_group
    return Cost(flops=2 * m * n * k, bytes=moved + (n * size if p["bias"] else 0))


def w4_peers(inputs: dict[str, Any]) -> dict[str, Callable[[], Any]]:
    """cuBLAS with the same weights in 16 bits."""
    x, bias = inputs["x"], inputs.get("bias")
    dense = dequantize_w4(inputs["weight"], inputs["weight_scale"], inputs.get("weight_zero"))
    dense = dense.to(x.dtype)
    return {"cublas": lambda: torch.nn.functional.linear(x, dense, bias)}


_EDGE = frozenset({"edge"})
_BENCH = frozenset({"bench"})
_BF16, _FP16, _FP32 = torch.bfloat16, torch.float16, torch.float32
_P = w4_problem

W4_CASES = (
    Case("5x48x512-bf16", _P(5, 48, 512, bias=True)),
    Case("19x40x128-zero-fp16", _P(19, 40, 128, _FP16, zero=True)),
    Case("1x1x8-row-bf16", _P(1, 1, 8, group=8), _EDGE),
    Case("3x33x96-group32-bf16", _P(3, 33, 96, group=32, bias=True), _EDGE),
    Case("9x17x192-group64-zero-fp16", _P(9, 17, 192, _FP16, group=64, zero=True), _EDGE),
    Case("16x65x384-fp32-fp16", _P(16, 65, 384, _FP16, scale=_FP32), _EDGE),
    Case("2x31x200-row-zero-fp16", _P(2, 31, 200, _FP16, group=200, zero=True), _EDGE),
    Case("70x24x512-group256-bf16", _P(70, 24, 512, group=256), _EDGE),
    Case("1x12288x4096-bf16", _P(1, 12288, 4096), _BENCH),
    Case("16x12288x4096-bf16", _P(16, 12288, 4096), _BENCH),
    Case("1x4096x12288-bf16", _P(1, 4096, 12288), _BENCH),
    Case("16x4096x12288-bf16", _P(16, 4096, 12288), _BENCH),
    Case("16x4096x4096-bf16", _P(16, 4096, 4096), _BENCH),
    Case("32x12288x4096-bf16", _P(32, 12288, 4096), _BENCH),
    Case("64x12288x4096-bf16", _P(64, 12288, 4096), _BENCH),
    Case("128x12288x4096-bf16", _P(128, 12288, 4096), _BENCH),
    Case("256x12288x4096-bf16", _P(256, 12288, 4096), _BENCH),
    Case("1024x12288x4096-bf16", _P(1024, 12288, 4096), _BENCH),
    Case("4096x12288x4096-bf16", _P(4096, 12288, 4096), _BENCH),
)
