"""Problems, inputs, costs and peers of ``w8a16_gemm`` for tests, bench and tuner."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tkernels.registry import Case, Cost, Problem
from tkernels.w8_format import dequantize_w8

FP8 = torch.float8_e4m3fn


def w8_problem(
    m: int,
    n: int,
    k: int,
    dtype: torch.dtype = torch.bfloat16,
    *,
    codes: torch.dtype = FP8,
    group: int = 128,
    scale: torch.dtype | None = None,
    bias: bool = False,
) -> dict[str, Any]:
    """A problem of ``w8a16_gemm``: [m, k] times [n, k] transposed, a scale every ``group`` columns.

    ``codes``: dtype of the weight. ``group`` k: a scale a row. ``scale``: its dtype, None fp32 for
    FP8 and that of x for int8, as checkpoints have them.
    """
    return {
        "m": m,
        "n": n,
        "k": k,
        "dtype": dtype,
        "codes": codes,
        "group": group,
        "scale": scale or (torch.float32 if codes == FP8 else dtype),
        "bias": bias,
    }


def w8_shape(
    *,
    tokens: int,
    outputs: int,
    inputs: int,
    group: int = 128,
    fp8: bool = True,
    scale16: bool = False,
    dtype: torch.dtype = torch.bfloat16,
) -> Problem:
    """``tokens`` rows through a layer of ``inputs`` to ``outputs``.

    ``scale16``: scales beside FP8 have 16 bits, too.
    """
    codes, scale = FP8 if fp8 else torch.int8, dtype if scale16 else None
    return w8_problem(tokens, outputs, inputs, dtype, codes=codes, group=group, scale=scale)


def w8_inputs(problem: Problem, dev: torch.device) -> dict[str, Any]:
    """Seeded arguments of ``w8a16_gemm`` for ``problem``."""
    p = problem
    generator = torch.Generator(dev).manual_seed(0)
    m, n, k, groups = p["m"], p["n"], p["k"], p["k"] // p["group"]

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=dev)

    if p["codes"] == FP8:
        # Every finite code: sizes of all powers of two alike, the largest 448.
        bits = torch.randint(0, 0x7F, (n, k), generator=generator, device=dev, dtype=torch.uint8)
        sign = torch.randint(0, 2, (n, k), generator=generator, device=dev, dtype=torch.uint8)
        weight, size = (bits | (sign << 7)).view(FP8), 120.0
    else:
        weight, size = (random(n, k) * 40).round().clamp(-127, 127).to(torch.int8), 40.0
    inputs: dict[str, Any] = {
        "x": random(m, k).to(p["dtype"]),
        "weight": weight,
        "weight_scale": ((random(n, groups).abs() + 0.5) * (k**-0.5 / size)).to(p["scale"]),
    }
    if p["bias"]:
        inputs["bias"] = random(n).to(p["dtype"])
    return inputs


def w8_cost(problem: Problem) -> Cost:
    """One product; each argument moved once."""
    p = problem
    m, n, k, size = p["m"], p["n"], p["k"], p["dtype"].itemsize
    moved = (m * k + m * n) * size + n * k + n * (k // p["group"]) * p["scale"].itemsize
    return Cost(flops=2 * m * n * k, bytes=moved + (n * size if p["bias"] else 0))


def w8_peers(inputs: dict[str, Any]) -> dict[str, Callable[[], Any]]:
    """cuBLAS with the same weights in 16 bits."""
    x, bias = inputs["x"], inputs.get("bias")
    dense = dequantize_w8(inputs["weight"], inputs["weight_scale"]).to(x.dtype)
    return {"cublas": lambda: torch.nn.functional.linear(x, dense, bias)}


_EDGE = frozenset({"edge"})
_BENCH = frozenset({"bench"})
_BF16, _FP16, _FP32, _INT8 = torch.bfloat16, torch.float16, torch.float32, torch.int8
_P = w8_problem

_LAYERS = (  # outputs and inputs: Qwen3-8B's up and down projections; Qwen3-4B's
    (12288, 4096),
    (4096, 12288),
    (9728, 2560),
    (2560, 9728),
)

W8_CASES = (
    Case("5x48x512-int8-bf16", _P(5, 48, 512, codes=_INT8, bias=True)),
    Case("19x40x128-fp8-fp16", _P(19, 40, 128, _FP16)),
    Case("1x1x1-row-fp8-bf16", _P(1, 1, 1, group=1), _EDGE),
    Case("3x33x96-group32-int8-bf16", _P(3, 33, 96, codes=_INT8, group=32, bias=True), _EDGE),
    Case("9x17x192-group64-fp8-fp16", _P(9, 17, 192, _FP16, group=64, scale=_FP16), _EDGE),
    Case("16x65x384-int8-fp32-fp16", _P(16, 65, 384, _FP16, codes=_INT8, scale=_FP32), _EDGE),
    Case("2x31x203-row-fp8-fp16", _P(2, 31, 203, _FP16, group=203), _EDGE),
    Case("70x24x512-group256-fp8-bf16", _P(70, 24, 512, group=256), _EDGE),
    *(
        Case(f"{m}x{n}x{k}-fp8-bf16", _P(m, n, k), _BENCH)
        for n, k in _LAYERS
        for m in ((1, 16, 64, 256, 4096) if n == 12288 else (1, 16, 64))
    ),
    *(
        Case(f"{m}x{n}x{k}-int8-bf16", _P(m, n, k, codes=_INT8), _BENCH)
        for n, k in _LAYERS[:2]
        for m in ((1, 16, 64, 256, 4096) if n == 12288 else (1, 16))
    ),
)
