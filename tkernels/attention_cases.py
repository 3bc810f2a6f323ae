"""Problems, inputs, costs and peers of ``paged_attn`` for tests, bench and tuner."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import Any

import torch

from tkernels.device import cdiv
from tkernels.registry import Case, Cost, Problem


def paged_problem(
    contexts: Sequence[int],
    heads: str,
    dtype: torch.dtype,
    *,
    q_lens: Sequence[int] | None = None,
    block_size: int = 16,
    max_context: int = 0,
    window: int | None = None,
    softcap: float | None = None,
    sinks: bool = False,
    lse: bool = False,
    poison: bool = True,
) -> dict[str, Any]:
    """A problem of ``paged_attn``; ``heads`` is num_heads/num_kv_headsxhead_dim.

    ``q_lens``: tokens of each sequence in q; None: one each, without cu_seqlens_q. ``max_context``:
    what the table has room for, if more than the longest context. ``poison``: all that must not be
    read is NaN or no block at all.
    """
    counts, head_dim = heads.split("x")
    num_heads, num_kv_heads = counts.split("/")
    return {
        "batch": len(contexts),
        "max_seqlen_q": 1 if q_lens is None else max(q_lens),
        "num_heads": int(num_heads),
        "num_kv_heads": int(num_kv_heads),
        "head_dim": int(head_dim),
        "block_size": block_size,
        "max_blocks": cdiv(max(max_context, *contexts, 1), block_size),
        "window": window,
        "varlen": q_lens is not None,
        "aligned": int(head_dim) * dtype.itemsize % 16 == 0,
        "dtype": dtype,
        "contexts": tuple(contexts),
        "q_lens": None if q_lens is None else tuple(q_lens),
        "softcap": softcap,
        "sinks": sinks,
        "lse": lse,
        "poison": poison,
    }


def paged_shape(
    *,
    batch: int,
    context: int,
    query: int = 1,
    num_heads: int = 32,
    num_kv_heads: int = 8,
    head_dim: int = 128,
    block_size: int = 16,
    window: int = 0,
    dtype: torch.dtype = torch.bfloat16,
) -> Problem:
    """Problem of ``batch`` sequences of ``context`` tokens, the last ``query`` of them new."""
    if query > context:
        raise ValueError(f"paged_attn: query must be at most context={context}, got {query}")
    if batch * cdiv(context, block_size) > 2**24:  # a list of them is made on the host
        raise ValueError(
            f"paged_attn: batch * context must be at most 2**24 blocks of {block_size}, got "
            f"{batch} * {context}"
        )
    return paged_problem(
        [context] * batch,
        f"{num_heads}/{num_kv_heads}x{head_dim}",
        dtype,
        q_lens=None if query == 1 else [query] * batch,
        block_size=block_size,
        window=window or None,
        poison=False,
    )


def paged_inputs(problem: Problem, dev: torch.device) -> dict[str, Any]:
    """Seeded arguments; the blocks of the pool are dealt to the sequences in random order."""
    p, q_lens, block_size = problem, problem["q_lens"], problem["block_size"]
    generator = torch.Generator(dev).manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=dev, dtype=p["dtype"])

    blocks = [cdiv(n, block_size) for n in p["contexts"]]
    num_blocks = max(1, sum(blocks)) + 2 * p["poison"]
    order = list(range(num_blocks))
    Random(0).shuffle(order)
    ends = [sum(blocks[:b]) for b in range(len(blocks) + 1)]
    # No block has such a number: whoever reads it leaves the pool.
    unused = [2**31 - 1 if p["poison"] else 0]
    table = [
        order[ends[b] : ends[b + 1]] + unused * (p["max_blocks"] - n) for b, n in enumerate(blocks)
    ]
    pool = (num_blocks, block_size, p["num_kv_heads"], p["head_dim"])
    caches = normal(*pool), normal(*pool)
    if p["poison"]:
        for place, slots in _out_of_sight(p, order, ends):
            for cache in caches:
                cache[place, slots] = math.nan
    n_tokens = p["batch"] if q_lens is None else sum(q_lens)
    inputs = {
        "q": normal(n_tokens, p["num_heads"], p["head_dim"]),
        "k_cache": caches[0],
        "v_cache": caches[1],
        "block_table": torch.tensor(table, dtype=torch.int32).to(dev),
        "context_lens": torch.tensor(p["contexts"], dtype=torch.int32).to(dev),
    }
    if q_lens is not None:
        starts = [sum(q_lens[:b]) for b in range(len(q_lens) + 1)]
        inputs["cu_seqlens_q"] = torch.tensor(starts, dtype=torch.int32).to(dev)
        inputs["max_seqlen_q"] = p["max_seqlen_q"]
    inputs |= {name: p[name] for name in ("window", "softcap") if p[name] is not None}
    if p["sinks"]:
        inputs["sinks"] = torch.randn(p["num_heads"], generator=generator, device=dev)
    return {**inputs, "return_lse": True} if p["lse"] else inputs


def _out_of_sight(p: Problem, order: list[int], ends: list[int]) -> Iterator[tuple[int, slice]]:
    """(block, slots) that no token may read: free blocks, ends of last ones, before windows."""
    block_size = p["block_size"]
    for free in range(ends[-1], len(order)):
        yield order[free], slice(None)
    for b, context_len in enumerate(p["contexts"]):
        n = 1 if p["q_lens"] is None else p["q_lens"][b]
        low = 0 if p["window"] is None else max(0, context_len - n - p["window"] + 1)
        low = low if n else context_len
        for i in range(ends[b + 1] - ends[b]):
            seen = slice(max(0, low - i * block_size), max(0, context_len - i * block_size))
            yield order[ends[b] + i], slice(0, min(seen.start, block_size))
            yield order[ends[b] + i], slice(seen.stop, None)


def paged_cost(problem: Problem) -> Cost:
    """Keys and values that any token sees are read once, q is, and the results written."""
    p, window, block_size = problem, problem["window"], problem["block_size"]
    q_lens = p["q_lens"] or [1] * p["batch"]
    keys, blocks, pairs = seen_keys(p), 0, 0
    for n, context_len in zip(q_lens, p["contexts"], strict=True):
        if n == 0:
            continue
        most = context_len if window is None else window
        low = max(0, context_len - n - most + 1)
        blocks += cdiv(context_len, block_size) - low // block_size
        pairs += sum(max(0, min(context_len - n + i + 1, most)) for i in range(n))
    tokens, heads = sum(q_lens), p["num_heads"]
    rows = 2 * tokens * heads + 2 * keys * p["num_kv_heads"]
    words = blocks + p["batch"] + (p["batch"] + 1) * p["varlen"]
    words += heads * p["sinks"] + tokens * heads * p["lse"]
    return Cost(
        flops=4 * pairs * heads * p["head_dim"],
        bytes=rows * p["head_dim"] * p["dtype"].itemsize + 4 * words,
    )


def seen_keys(problem: Problem) -> int:
    """Keys that any token sees, of all sequences."""
    p, keys = problem, 0
    for n, context_len in zip(p["q_lens"] or [1] * p["batch"], p["contexts"], strict=True):
        low = 0 if p["window"] is None else max(0, context_len - n - p["window"] + 1)
        keys += context_len - low if n else 0
    return keys


def paged_peers(inputs: dict[str, Any]) -> dict[str, Callable[[], Any]]:
    """FlashInfer, planned beforehand, on the plain problems that it shares with us."""
    plain = {"q", "k_cache", "v_cache", "block_table", "context_lens"}
    varlen = "cu_seqlens_q" in inputs
    if set(inputs) - {"cu_seqlens_q", "max_seqlen_q"} != plain:
        return {}
    q, table, lens = inputs["q"], inputs["block_table"], inputs["context_lens"].tolist()
    caches = (inputs["k_cache"], inputs["v_cache"])
    _, block_size, kv_heads, head_dim = caches[0].shape
    if not _suits_flashinfer(q, head_dim, lens):
        return {}
    if not varlen:
        return flashinfer_decode(q, caches, table, lens, "flashinfer")
    with contextlib.suppress(ImportError):
        import flashinfer

        scratch = torch.empty(256 << 20, dtype=torch.uint8, device=q.device)
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(scratch, "NHD")
        # fmt: off
        wrapper.plan(inputs["cu_seqlens_q"].cpu(), *_pages(table, lens, block_size), q.shape[1],
                     kv_heads, head_dim, block_size, causal=True, q_data_type=q.dtype,
                     kv_data_type=q.dtype)
        # fmt: on
        return {"flashinfer": lambda: wrapper.run(q, caches)}
    return {}


def flashinfer_decode(
    q: torch.Tensor, caches: Any, table: torch.Tensor, lens: list[int], name: str
) -> dict[str, Callable[[], Any]]:
    """FlashInfer's two modes of decode over caches of one dtype, by ``name`` and ``name``-mma."""
    _, block_size, kv_heads, head_dim = caches[0].shape
    peers: dict[str, Callable[[], Any]] = {}
    if not _suits_flashinfer(q, head_dim, lens):
        return peers
    with contextlib.suppress(ImportError):
        import flashinfer

        scratch = torch.empty(256 << 20, dtype=torch.uint8, device=q.device)
        for mode, tensor_cores in ((name, False), (f"{name}-mma", True)):
            decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
                scratch, "NHD", use_tensor_cores=tensor_cores
            )
            # fmt: off
            decode.plan(*_pages(table, lens, block_size), q.shape[1], kv_heads, head_dim,
                        block_size, q_data_type=q.dtype, kv_data_type=caches[0].dtype)
            # fmt: on
            peers[mode] = _bound(decode, q, caches)
    return peers


def _suits_flashinfer(q: torch.Tensor, head_dim: int, lens: list[int]) -> bool:
    return q.dtype != torch.float32 and head_dim in (64, 128, 256) and 0 not in lens


def _pages(
    table: torch.Tensor, lens: list[int], block_size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Where each sequence's pages end, all pages, and the tokens of each last page."""
    blocks = [cdiv(n, block_size) for n in lens]
    ends = torch.tensor([sum(blocks[:b]) for b in range(len(blocks) + 1)], dtype=torch.int32)
    last = torch.tensor([(n - 1) % block_size + 1 for n in lens], dtype=torch.int32)
    return ends, torch.cat([table[b, :n] for b, n in enumerate(blocks)]), last


def _bound(wrapper: Any, q: torch.Tensor, caches: Any) -> Callable[[], Any]:
    return lambda: wrapper.run(q, caches)


_EDGE = frozenset({"edge"})
_BENCH = frozenset({"bench"})  # Qwen3 8B: 32 query heads, 8 KV heads, 128 values each
_BF16, _FP16, _FP32 = torch.bfloat16, torch.float16, torch.float32
_8B = "32/8x128"
_LENGTHS = (0, 1, 15, 16, 17, 70)


def _decode(batch: int, context: int) -> Case:
    problem = paged_shape(batch=batch, context=context)
    return Case(f"decode-b{batch}-ctx{context}-{_8B}-bf16", problem, _BENCH)


# fmt: off
PAGED_CASES = (
    Case("decode-4/2x32-bf16", paged_problem(_LENGTHS, "4/2x32", _BF16, max_context=96)),
    Case("chunk-2/1x64-fp16", paged_problem(
        (5, 40, 33, 0, 16), "2/1x64", _FP16, q_lens=(5, 7, 3, 0, 16), max_context=100, lse=True)),
    Case("block32-5/1x16-fp32", paged_problem(
        (31, 32, 33, 0), "5/1x16", _FP32, block_size=32, lse=True), _EDGE),
    Case("window-2/2x24-fp32", paged_problem(
        _LENGTHS, "2/2x24", _FP32, window=9, sinks=True, lse=True), _EDGE),
    Case("window-chunk-2/1x32-bf16", paged_problem(
        (70, 20, 3), "2/1x32", _BF16, q_lens=(20, 1, 3), window=18, sinks=True, lse=True), _EDGE),
    Case("softcap-24/1x32-fp16", paged_problem(
        (17, 0, 50), "24/1x32", _FP16, softcap=2.0, sinks=True, lse=True), _EDGE),
    Case("wide-3/3x80-bf16", paged_problem((33, 1), "3/3x80", _BF16), _EDGE),
    Case("one-token-chunks-2/1x16-bf16", paged_problem(
        (1, 16, 17), "2/1x16", _BF16, q_lens=(1, 1, 1)), _EDGE),
    Case("1x1-1/1x8-fp32", paged_problem((1,), "1/1x8", _FP32), _EDGE),
    _decode(64, 4096),
    _decode(256, 1024),
    _decode(1, 4096),
    _decode(1, 32768),
    _decode(16, 4096),
    Case(f"decode-mixed-b64-128+8192-{_8B}-bf16", paged_problem(
        (128, 8192) * 32, _8B, _BF16, poison=False), _BENCH),
    Case(f"chunk-2048-ctx8192-{_8B}-bf16", paged_shape(
        batch=1, context=8192, query=2048), _BENCH),
)
# fmt: on
