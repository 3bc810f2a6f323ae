"""Paged KV cache: tensors, the allocator of blocks, and the metadata of one step.

A sequence owns a list of blocks of ``block_size`` tokens, in any order. Token p of a sequence lies
in slot ``block_ids[p // block_size] * block_size + p % block_size`` (vLLM's names and layout).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from model.config import ModelConfig
from model.kv_quant import KVQuantization
from tkernels.kv_format import NO_SLOT, QuantizedKV, allocate_quantized

BLOCK_SIZE = 16


@dataclass
class KVCache:
    """``k[i]``, ``v[i]``: [num_blocks, block_size, num_kv_heads, head_dim], or quantised."""

    k: tuple[torch.Tensor | QuantizedKV, ...]
    v: tuple[torch.Tensor | QuantizedKV, ...]

    @property
    def quantized(self) -> list[QuantizedKV]:
        """The quantised parts of all layers: none of them, or all."""
        return [part for part in (*self.k, *self.v) if isinstance(part, QuantizedKV)]

    def statistics(self) -> dict[str, Any]:
        """Bytes held, a token's bytes (all layers and heads), and residuals kept and left out."""
        parts = self.quantized
        tensors = [part for part in (*self.k, *self.v) if isinstance(part, torch.Tensor)]
        held = sum(t.nbytes for t in tensors) + sum(part.num_bytes() for part in parts)
        first = parts[0].codes if parts else tensors[0]
        kept = [part.slots != NO_SLOT for part in parts if part.slots is not None]
        dropped = [part.dropped for part in parts if part.dropped is not None]
        return {
            "mode": parts[0].mode if parts else "none",
            "bytes": held,
            "bytes_per_token": held / (first.shape[0] * first.shape[1]),
            "residuals": sum(int(t.sum()) for t in kept),
            "residuals_dropped": sum(int(t.sum()) for t in dropped),
        }


def allocate_cache(
    config: ModelConfig,
    num_blocks: int,
    dtype: torch.dtype,
    device: torch.device,
    quantization: KVQuantization | None = None,
) -> KVCache:
    """An empty cache: only what was written is ever read."""
    if quantization is not None:
        k, v = (
            tuple(
                allocate_quantized(
                    num_blocks,
                    BLOCK_SIZE,
                    config.num_kv_heads,
                    config.head_dim,
                    **quantization.of_layer(i, layer),
                    device=device,
                )
                for layer in range(config.num_layers)
            )
            for i in range(2)
        )
        return KVCache(k, v)
    shape = (config.num_layers, num_blocks, BLOCK_SIZE, config.num_kv_heads, config.head_dim)
    plain_k, plain_v = (torch.empty(shape, dtype=dtype, device=device) for _ in range(2))
    return KVCache(plain_k.unbind(0), plain_v.unbind(0))


class BlockAllocator:
    """A free list of block numbers."""

    def __init__(self, num_blocks: int) -> None:
        self.free_blocks = list(range(num_blocks))[::-1]  # popped from the end: 0, 1, 2, ...

    def grow(self, block_ids: list[int], num_tokens: int) -> None:
        """Append blocks to ``block_ids`` until they hold ``num_tokens``.

        Raises:
            ValueError: too few free blocks; nothing is taken then.
        """
        missing = -(-num_tokens // BLOCK_SIZE) - len(block_ids)
        if missing > len(self.free_blocks):
            raise ValueError(
                f"KV cache: expected {missing} free blocks of {BLOCK_SIZE} tokens, got "
                f"{len(self.free_blocks)}"
            )
        for _ in range(missing):
            block_ids.append(self.free_blocks.pop())

    def release(self, block_ids: list[int]) -> None:
        """Give all blocks of ``block_ids`` back and empty it."""
        self.free_blocks.extend(reversed(block_ids))
        block_ids.clear()


@dataclass
class SequenceState:
    """One sequence: its tokens, its blocks, and how many tokens are in the cache."""

    token_ids: list[int]
    num_computed: int = 0
    block_ids: list[int] = field(default_factory=list)
    group: int = -1  # its place in a mask of requests (model/fallback.py); -1: none

    def slot(self, position: int) -> int:
        return self.block_ids[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE


@dataclass
class AttnMetadata:
    """Everything about one step that attention must know. B sequences, T new tokens in all."""

    slot_mapping: torch.Tensor  # int64 [T], where each new token's K/V go
    block_table: torch.Tensor  # int32 [B, max_blocks]
    context_lens: torch.Tensor  # int32 [B], tokens in the cache after this step
    cu_seqlens_q: torch.Tensor  # int32 [B + 1]
    max_seqlen_q: int
    starts_here: bool  # no sequence has tokens in the cache from before
    sdpa: SdpaIndices | None  # for attention in PyTorch; None: kernels compute it


@dataclass
class SdpaIndices:
    """Indices that the PyTorch attention uses, made once for all layers."""

    # int64 [B, S], slot of each context position; past a sequence's end that of its last token.
    # One sequence in adjoining blocks is a slice instead: read in place, not gathered.
    kv_slots: torch.Tensor | slice
    mask: torch.Tensor | None  # bool [B, 1, L, S], True = may be seen; None: plain causal, or all
    q_rows: torch.Tensor  # int64 [B, L], row of each query in the packed tokens, padded likewise
    q_unpad: torch.Tensor  # int64 [T], row of each packed token in the padded [B * L]


def build_metadata(
    sequences: Sequence[SequenceState], new: Sequence[int], device: torch.device, *, sdpa: bool
) -> AttnMetadata:
    """Metadata of a step that computes the next ``new[i]`` tokens of sequence i.

    Host work on Python numbers only; each result goes to the device in one copy. ``sdpa`` asks for
    the indices of the PyTorch attention too.
    """
    context = [s.num_computed + n for s, n in zip(sequences, new, strict=True)]
    starts = [0]
    for n in new:
        starts.append(starts[-1] + n)
    used = [-(-n // BLOCK_SIZE) for n in context]  # blocks; those of later chunks are not looked at
    max_blocks = max(used)

    def ints(values: object, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype).to(device, non_blocking=True)

    context_lens = ints(context, torch.int32)
    block_table = ints(
        [s.block_ids[:n] + [0] * (max_blocks - n) for s, n in zip(sequences, used, strict=True)],
        torch.int32,
    )
    return AttnMetadata(
        slot_mapping=ints(
            [
                s.slot(p)
                for s, end in zip(sequences, context, strict=True)
                for p in range(s.num_computed, end)
            ]
        ),
        block_table=block_table,
        context_lens=context_lens,
        cu_seqlens_q=ints(starts, torch.int32),
        max_seqlen_q=max(new),
        starts_here=not any(s.num_computed for s in sequences),
        sdpa=_sdpa_indices(sequences, new, context, starts, context_lens, block_table)
        if sdpa
        else None,
    )


def _sdpa_indices(
    sequences: Sequence[SequenceState],
    new: Sequence[int],
    context: list[int],
    starts: list[int],
    context_lens: torch.Tensor,
    block_table: torch.Tensor,
) -> SdpaIndices:
    device, longest_q = context_lens.device, max(new)

    def ints(values: object) -> torch.Tensor:
        return torch.tensor(values).to(device, non_blocking=True)

    key_at = torch.arange(max(context), device=device)
    query_at = torch.arange(longest_q, device=device)
    lengths, begin = ints(new), ints(starts[:-1])
    return SdpaIndices(
        kv_slots=_kv_slots(sequences, key_at, context_lens, block_table),
        mask=_mask(new, context, key_at, query_at, context_lens - lengths),
        q_rows=begin[:, None] + query_at.minimum(lengths[:, None] - 1),  # [B, L]
        q_unpad=ints([b * longest_q + i for b, n in enumerate(new) for i in range(n)]),
    )


def _kv_slots(
    sequences: Sequence[SequenceState],
    key_at: torch.Tensor,
    context_lens: torch.Tensor,
    block_table: torch.Tensor,
) -> torch.Tensor | slice:
    if len(sequences) == 1:
        ids = sequences[0].block_ids[: block_table.shape[1]]
        if ids == list(range(ids[0], ids[0] + len(ids))):
            start = ids[0] * BLOCK_SIZE
            return slice(start, start + len(key_at))
    # Positions past a sequence's end repeat its last one, so that stale slots are never read.
    held = key_at.minimum(context_lens[:, None].long() - 1)  # [B, S]
    return block_table.long().gather(1, held // BLOCK_SIZE) * BLOCK_SIZE + held % BLOCK_SIZE


def _mask(
    new: Sequence[int],
    context: list[int],
    key_at: torch.Tensor,
    query_at: torch.Tensor,
    num_computed: torch.Tensor,
) -> torch.Tensor | None:
    """Which keys each query sees, or None where SDPA needs no mask for it."""
    same = len(set(context)) == 1 and len(set(new)) == 1
    if same and new[0] in (1, context[0]):  # decode, or a whole prompt: plain causal
        return None
    # Query i of a sequence stands at position num_computed + i. Rows of padding are thrown away,
    # but must see something: a row of -inf only would be NaN.
    last_seen = num_computed[:, None] + query_at  # [B, L]
    ends = torch.tensor(context, device=key_at.device)[:, None, None]
    seen = (key_at <= last_seen[..., None]) & (key_at < ends)  # [B, L, S]
    return seen[:, None]
