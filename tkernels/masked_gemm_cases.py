"""Problems, inputs, costs and peers of ``masked_gemm`` for tests, bench and tuner."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tkernels.registry import Case, Cost, Problem

PATHS = ("int8", "high", "masked")


def gemm_problem(
    m: int,
    n: int,
    k: int,
    dtype: torch.dtype = torch.bfloat16,
    *,
    path: str = "int8",
    high_weight: bool = False,
    quantized: bool = True,
    bias: bool = False,
    words: int = 1,
    groups: str = "mixed",
) -> dict[str, Any]:
    """A problem of ``masked_gemm``: [m, k] times [n, k] transposed.

    ``path``: int8, high, or masked. ``high_weight``: the high path has 16-bit weights of its own.
    ``quantized``: x comes with its codes. ``words``: of the mask. ``groups``: which rows run high,
    "none", "all", "mixed" (neighbours differ), or "layer" (one bit decides for all).
    """
    return {
        "m": m,
        "n": n,
        "k": k,
        "dtype": dtype,
        "path": path,
        "high_weight": high_weight,
        "aligned": k % 16 == 0,
        "quantized": quantized,
        "bias": bias,
        "words": words,
        "groups": groups,
    }


def gemm_shape(
    *,
    tokens: int,
    outputs: int,
    inputs: int,
    masked: bool = False,
    high: bool = False,
    high_weight: bool = False,
    quantized: bool = True,
    dtype: torch.dtype = torch.bfloat16,
) -> Problem:
    """``tokens`` rows through a layer of ``inputs`` to ``outputs``; of masked ones none runs high.

    ``high``: all run in 16 bits, without a mask.
    """
    path = "masked" if masked else "high" if high else "int8"
    return gemm_problem(
        tokens,
        outputs,
        inputs,
        dtype,
        path=path,
        high_weight=high_weight,
        quantized=quantized,
        groups="none" if masked else "mixed",
    )


def gemm_inputs(problem: Problem, dev: torch.device) -> dict[str, Any]:
    """Seeded arguments of ``masked_gemm`` for ``problem``."""
    from tkernels.ops.quantize_per_token import quantize_per_token_ref

    p = problem
    generator = torch.Generator(dev).manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=dev)

    m, n, k = p["m"], p["n"], p["k"]
    x = random(m, k).to(p["dtype"])
    weight, weight_scale = quantize_per_token_ref(random(n, k) * k**-0.5)
    inputs: dict[str, Any] = {"x": x, "weight": weight, "weight_scale": weight_scale}
    if p["quantized"] and p["path"] != "high":
        inputs["x_q"], inputs["x_scale"] = quantize_per_token_ref(x)
    if p["high_weight"]:
        inputs["high_weight"] = (random(n, k) * k**-0.5).to(p["dtype"])
    if p["bias"]:
        inputs["bias"] = random(n).to(p["dtype"])
    if p["path"] == "high":
        inputs["high"] = True
    if p["path"] == "masked":
        inputs |= _mask(p, dev)
    return inputs


def _mask(problem: Problem, dev: torch.device) -> dict[str, torch.Tensor]:
    """Rows in groups over all words; a bit pattern with the sign bit of each word set."""
    words, groups = problem["words"], problem["groups"]
    pattern = {"none": 0, "all": -1, "layer": 1, "mixed": -0x5A5A5A5A5A5A5A5B}[groups]
    mask = torch.full((words,), pattern, dtype=torch.int64, device=dev)
    if groups == "layer":
        return {"mask": mask}
    step = max(1, 64 * words // max(1, problem["m"]))
    group = torch.arange(problem["m"], dtype=torch.int32, device=dev) * step % (64 * words)
    return {"mask": mask, "row_group": group}


def gemm_reads(problem: Problem) -> set[str]:
    """Names of the arguments that rows running these ways need."""
    p = problem
    one_way = {"none": {"int8"}, "all": {"high"}, "layer": {"high"}, "mixed": {"int8", "high"}}
    ways = one_way[p["groups"]] if p["path"] == "masked" else {p["path"]}
    names = set()
    if "int8" in ways:
        names |= {"weight", "weight_scale", *(("x_q", "x_scale") if p["quantized"] else ("x",))}
    if "high" in ways:
        names |= {"x", *(("high_weight",) if p["high_weight"] else ("weight", "weight_scale"))}
    if p["path"] == "masked":
        names |= {"mask"} if p["groups"] == "layer" else {"mask", "row_group"}
    return names | ({"bias"} if p["bias"] else set())


def gemm_cost(problem: Problem) -> Cost:
    """One product, which of a mixed one is more; each argument that is needed moved once."""
    p = problem
    m, n, k, size = p["m"], p["n"], p["k"], p["dtype"].itemsize
    sizes = {
        "x": m * k * size, "weight": n * k, "weight_scale": 4 * n, "x_q": m * k, "x_scale": 4 * m,
        "high_weight": n * k * size, "bias": n * size, "mask": 8 * p["words"], "row_group": 4 * m,
    }  # fmt: skip
    moved = m * n * size + sum(sizes[name] for name in gemm_reads(p))
    return Cost(flops=2 * m * n * k, bytes=moved)


def gemm_peers(inputs: dict[str, Any]) -> dict[str, Callable[[], Any]]:
    """cuBLAS in 16 bits, and its int8 product: alone, and with the scales applied behind it."""
    x, weight, weight_scale = (inputs[name] for name in ("x", "weight", "weight_scale"))
    dense = inputs.get("high_weight")
    if dense is None:
        dense = (weight.float() * weight_scale[:, None]).to(x.dtype)
    bias = inputs.get("bias")
    peers: dict[str, Callable[[], Any]] = {
        "cublas": lambda: torch.nn.functional.linear(x, dense, bias)
    }
    x_q, x_scale = inputs.get("x_q"), inputs.get("x_scale")
    # What torch._int_mm takes.
    if x_q is None or x_scale is None or len(x) <= 16 or x.shape[1] % 8 or len(weight) % 8:
        return peers

    def scaled() -> torch.Tensor:
        y = torch._int_mm(x_q, weight.t()).float() * x_scale[:, None] * weight_scale
        result: torch.Tensor = (y if bias is None else y + bias).to(x.dtype)
        return result

    peers["int_mm"] = lambda: torch._int_mm(x_q, weight.t())
    peers["int_mm+scales"] = scaled
    return peers


_EDGE = frozenset({"edge"})
_BENCH = frozenset({"bench"})
_BF16, _FP16 = torch.bfloat16, torch.float16
_P = gemm_problem

# fmt: off
GEMM_CASES = (
    Case("masked-5x48x64-bf16", _P(
        5, 48, 64, _BF16, path="masked", high_weight=True, bias=True, words=2)),
    Case("int8-33x40x96-fp16", _P(33, 40, 96, _FP16, quantized=False)),
    Case("high-3x33x40-bf16", _P(3, 33, 40, _BF16, path="high", bias=True), _EDGE),
    Case("high-w16-17x64x100-fp16", _P(
        17, 64, 100, _FP16, path="high", high_weight=True), _EDGE),
    Case("int8-1x1x1-bf16", _P(1, 1, 1, _BF16), _EDGE),
    Case("int8-16x65x257-bf16", _P(16, 65, 257, _BF16, bias=True), _EDGE),
    Case("masked-70x31x130-fp16", _P(
        70, 31, 130, _FP16, path="masked", quantized=False), _EDGE),
    Case("none-18x32x64-bf16", _P(18, 32, 64, _BF16, path="masked", groups="none"), _EDGE),
    Case("all-18x32x64-bf16", _P(18, 32, 64, _BF16, path="masked", groups="all"), _EDGE),
    Case("layer-7x24x48-fp16", _P(
        7, 24, 48, _FP16, path="masked", groups="layer", high_weight=True), _EDGE),
    Case("int8-8192x8192x8192-bf16", _P(8192, 8192, 8192), _BENCH),
    Case("int8-4096x12288x4096-bf16", _P(4096, 12288, 4096), _BENCH),
    Case("int8-4096x4096x12288-bf16", _P(4096, 4096, 12288), _BENCH),
    Case("int8-64x12288x4096-bf16", _P(64, 12288, 4096), _BENCH),
    Case("int8-16x12288x4096-bf16", _P(16, 12288, 4096), _BENCH),
    Case("int8-1x12288x4096-bf16", _P(1, 12288, 4096), _BENCH),
    Case("int8-16x4096x12288-bf16", _P(16, 4096, 12288), _BENCH),
    Case("quantizes-16x12288x4096-bf16", _P(16, 12288, 4096, quantized=False), _BENCH),
    Case("none-8192x8192x8192-bf16", _P(
        8192, 8192, 8192, path="masked", groups="none"), _BENCH),
    Case("none-16x12288x4096-bf16", _P(
        16, 12288, 4096, path="masked", groups="none"), _BENCH),
    Case("none-64x12288x4096-bf16", _P(
        64, 12288, 4096, path="masked", groups="none"), _BENCH),
    *(
        Case(f"w8a16-{m}x{n}x{k}-bf16", _P(m, n, k, path="high"), _BENCH)
        for m, n, k in (
            (1, 12288, 4096), (16, 12288, 4096), (16, 4096, 4096), (64, 12288, 4096),
            (256, 12288, 4096), (1024, 12288, 4096), (4096, 12288, 4096),
        )
    ),
)
# fmt: on
