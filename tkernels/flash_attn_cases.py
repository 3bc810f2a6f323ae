"""Problems, inputs, costs and peers of ``flash_attn`` for tests, bench and tuner."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tkernels.registry import Case, Cost, Problem


def flash_problem(
    batch: int,
    seqlen_q: int,
    heads: str,
    dtype: torch.dtype,
    *,
    seqlen_k: int | None = None,
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
    sinks: bool = False,
    mask: bool = False,
    padding: bool = False,
    lse: bool = False,
    lengths: Sequence[tuple[int, int]] = (),
    packed_qkv: bool = False,
) -> dict[str, Any]:
    """A problem of ``flash_attn``; ``heads`` is num_heads/num_kv_headsxhead_dim.

    ``lengths``: (queries, keys) of each sequence of a packed batch. ``packed_qkv``: q, k and v are
    views of one tensor. ``mask``: of pairs of a query and a key; ``padding``: of keys.
    """
    counts, head_dim = heads.split("x")
    num_heads, num_kv_heads = counts.split("/")
    most_k = seqlen_q if seqlen_k is None else seqlen_k
    return {
        "batch": len(lengths) or batch,
        "seqlen_q": max(n for n, _ in lengths) if lengths else seqlen_q,
        "seqlen_k": max(n for _, n in lengths) if lengths else most_k,
        "num_heads": int(num_heads),
        "num_kv_heads": int(num_kv_heads),
        "head_dim": int(head_dim),
        "dtype": dtype,
        "causal": causal,
        "window": window,
        "has_mask": mask or padding,
        "varlen": bool(lengths),
        "aligned": int(head_dim) * dtype.itemsize % 16 == 0 and (bool(lengths) or most_k > 0),
        "softcap": softcap,
        "sinks": sinks,
        "padding": padding,
        "lse": lse,
        "lengths": tuple(lengths),
        "packed_qkv": packed_qkv,
    }


def flash_shape(
    *,
    batch: int,
    seqlen: int,
    seqlen_k: int = 0,
    num_heads: int = 32,
    num_kv_heads: int = 8,
    head_dim: int = 128,
    causal: bool = True,
    window: int = 0,
    dtype: torch.dtype = torch.bfloat16,
) -> Problem:
    """Problem of ``batch`` sequences of ``seqlen`` queries; 0: as many keys, no window."""
    heads = f"{num_heads}/{num_kv_heads}x{head_dim}"
    keys, seen = seqlen_k or None, window or None
    return flash_problem(batch, seqlen, heads, dtype, seqlen_k=keys, causal=causal, window=seen)


def flash_inputs(problem: Problem, dev: torch.device) -> dict[str, Any]:
    """Seeded arguments of ``flash_attn`` for ``problem``."""
    generator = torch.Generator(dev).manual_seed(0)
    p, lengths = problem, problem["lengths"]
    heads, kv_heads, dim = p["num_heads"], p["num_kv_heads"], p["head_dim"]

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=dev, dtype=p["dtype"])

    if p["packed_qkv"]:
        qkv = random(p["batch"], p["seqlen_q"], heads + 2 * kv_heads, dim)
        q, k, v = torch.split(qkv, [heads, kv_heads, kv_heads], dim=2)
    elif lengths:
        n_q, n_k = (sum(pair[i] for pair in lengths) for i in (0, 1))
        q, k, v = (random(n, h, dim) for n, h in ((n_q, heads), (n_k, kv_heads), (n_k, kv_heads)))
    else:
        q = random(p["batch"], p["seqlen_q"], heads, dim)
        k, v = (random(p["batch"], p["seqlen_k"], kv_heads, dim) for _ in range(2))
    inputs = {"q": q, "k": k, "v": v, "causal": p["causal"]}
    for i, name in enumerate(("q", "k") if lengths else ()):
        ends = [sum(pair[i] for pair in lengths[:n]) for n in range(len(lengths) + 1)]
        inputs[f"cu_seqlens_{name}"] = torch.tensor(ends, dtype=torch.int32).to(dev)
        inputs[f"max_seqlen_{name}"] = p[f"seqlen_{name}"]
    inputs |= {name: p[name] for name in ("window", "softcap") if p[name] is not None}
    if p["sinks"]:
        inputs["sinks"] = torch.randn(heads, generator=generator, device=dev)
    if p["has_mask"]:
        shape = (p["batch"], 1, 1 if p["padding"] else p["seqlen_q"], p["seqlen_k"])
        inputs["mask"] = torch.rand(shape, generator=generator, device=dev) < 0.6
        inputs["mask"][0, :, 0] = False  # a row, or a sequence, that sees nothing
    return {**inputs, "return_lse": True} if p["lse"] else inputs


def flash_cost(problem: Problem) -> Cost:
    """The two products over the pairs that are seen; each argument and result moved once."""
    p = problem
    pairs = p["lengths"] or [(p["seqlen_q"], p["seqlen_k"])] * p["batch"]
    seen = sum(_seen_keys(n, m, p["causal"], p["window"]) for n, m in pairs)
    n_q, n_k = (sum(pair[i] for pair in pairs) for i in (0, 1))
    rows = 2 * (p["num_heads"] * n_q + p["num_kv_heads"] * n_k)  # q and out, k and v
    moved = rows * p["head_dim"] * p["dtype"].itemsize
    moved += 4 * p["num_heads"] * (n_q * p["lse"] + p["sinks"])
    moved += (n_k if p["padding"] else sum(n * m for n, m in pairs)) * p["has_mask"]
    moved += 8 * (len(pairs) + 1) * p["varlen"]
    # What a mask hides is not known here: it counts as seen.
    return Cost(flops=4 * seen * p["num_heads"] * p["head_dim"], bytes=moved)


def _seen_keys(n: int, m: int, causal: bool, window: int | None) -> int:
    """Pairs of a query and a key that it sees, of n queries and m keys."""
    if not causal:
        return n * m

    def below(last: int) -> int:
        """Keys up to each query's own, where the last query has ``last`` of them."""
        return _triangle(last) - _triangle(last - n)

    return below(m) - (0 if window is None else below(m - window))


def _triangle(n: int) -> int:
    return n * (n + 1) // 2 if n > 0 else 0


def flash_peers(inputs: dict[str, Any]) -> dict[str, Callable[[], Any]]:
    """PyTorch's fused attentions and FlashInfer, on the plain problems that they share with us."""
    q, k, v, causal = (inputs[name] for name in ("q", "k", "v", "causal"))
    plain = set(inputs) == {"q", "k", "v", "causal"} and q.dim() == 4
    # Where there are more keys than queries, PyTorch's causal is another: the first stand together.
    if not plain or q.dtype == torch.float32 or (causal and q.shape[1] != k.shape[1]):
        return {}
    from torch.nn.attention import SDPBackend

    peers = {
        "cudnn": _sdpa(SDPBackend.CUDNN_ATTENTION, q, k, v, causal),
        "flash": _sdpa(SDPBackend.FLASH_ATTENTION, q, k, v, causal),
    }
    with contextlib.suppress(ImportError):
        import flashinfer

        peers["flashinfer"] = _flashinfer(flashinfer, q, k, v, causal)
    return peers


def _sdpa(
    backend: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool
) -> Callable[[], torch.Tensor]:
    from torch.nn.attention import sdpa_kernel

    q, k, v = (t.transpose(1, 2) for t in (q, k, v))

    def call() -> torch.Tensor:
        with sdpa_kernel(backend):
            result: torch.Tensor = torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=causal, enable_gqa=True
            )
        return result.transpose(1, 2)

    return call


def _flashinfer(
    flashinfer: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool
) -> Callable[[], torch.Tensor]:
    """It takes sequences packed, and plans on the host: at the first call, which is not timed."""
    batch, seqlen_q, heads, dim = q.shape
    scratch = torch.empty(256 << 20, dtype=torch.uint8, device=q.device)
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(scratch, "NHD")
    starts = [torch.arange(batch + 1, dtype=torch.int32) * n for n in (seqlen_q, k.shape[1])]
    packed = [t.flatten(0, 1) for t in (q, k, v)]
    planned = False

    def call() -> torch.Tensor:
        nonlocal planned
        if not planned:
            wrapper.plan(*starts, heads, k.shape[2], dim, causal=causal, q_data_type=q.dtype)
            planned = True
        result: torch.Tensor = wrapper.run(*packed)
        return result

    return call


_EDGE = frozenset({"edge"})
_BENCH = frozenset({"bench"})
_BF16, _FP16, _FP32 = torch.bfloat16, torch.float16, torch.float32
_RAGGED = ((5, 5), (0, 3), (1, 9), (20, 20), (17, 4))

# fmt: off
FLASH_CASES = (
    Case("causal-2x33-4/2x32-bf16", flash_problem(2, 33, "4/2x32", _BF16)),
    Case("full-1x20x37-2/1x64-fp16", flash_problem(
        1, 20, "2/1x64", _FP16, seqlen_k=37, causal=False)),
    Case("packed-6/3x32-bf16", flash_problem(
        0, 0, "6/3x32", _BF16, lengths=_RAGGED, lse=True)),
    Case("qkv-1x19-5/1x16-fp32", flash_problem(
        1, 19, "5/1x16", _FP32, packed_qkv=True), _EDGE),
    Case("window-1x50-2/2x24-fp32", flash_problem(
        1, 50, "2/2x24", _FP32, window=7, sinks=True, lse=True), _EDGE),
    Case("mask-2x18x21-2/1x32-bf16", flash_problem(
        2, 18, "2/1x32", _BF16, seqlen_k=21, causal=False, mask=True, lse=True), _EDGE),
    Case("padding-2x18-2/1x64-fp16", flash_problem(
        2, 18, "2/1x64", _FP16, padding=True, lse=True), _EDGE),
    Case("softcap-1x17x40-3/3x80-bf16", flash_problem(
        1, 17, "3/3x80", _BF16, seqlen_k=40, softcap=2.0), _EDGE),
    Case("more-queries-1x40x12-1/1x16-fp16", flash_problem(
        1, 40, "1/1x16", _FP16, seqlen_k=12, lse=True), _EDGE),
    Case("1x1-1/1x8-fp32", flash_problem(1, 1, "1/1x8", _FP32), _EDGE),
    Case("causal-4x4096-32/8x128-bf16", flash_problem(
        4, 4096, "32/8x128", _BF16), _BENCH),
    Case("causal-1x16384-32/8x128-bf16", flash_problem(
        1, 16384, "32/8x128", _BF16), _BENCH),
    Case("causal-16x512-32/8x128-bf16", flash_problem(
        16, 512, "32/8x128", _BF16), _BENCH),
    Case("full-4x4096-32/8x128-bf16", flash_problem(
        4, 4096, "32/8x128", _BF16, causal=False), _BENCH),
    Case("causal-4x4096-16/8x64-bf16", flash_problem(
        4, 4096, "16/8x64", _BF16), _BENCH),
)
# fmt: on
