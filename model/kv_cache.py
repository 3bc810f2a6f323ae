"""Paged KV cache: tensors, the allocator of blocks, and the metadata of one step.

A sequence owns a list of blocks of ``block_size`` tokens, in any order. Token p of a sequence lies
in slot ``block_ids[p // block_size] * block_size + p % block_size`` (vLLM's names and layout).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from model.config import ModelConfig
from model.kv_quant import KVQuantization
from model.pages import FreePages
from tkernels.kv_format import NO_SLOT, QuantizedKV, allocate_quantized

BLOCK_SIZE = 16

Ints = npt.NDArray[Any]


@dataclass
class KVCache:
    """``k[i]``, ``v[i]``: [num_blocks, block_size, num_kv_heads, head_dim], or quantised."""

    k: tuple[torch.Tensor | QuantizedKV, ...]
    v: tuple[torch.Tensor | QuantizedKV, ...]

    @property
    def quantized(self) -> list[QuantizedKV]:
        """The quantised parts of all layers: none of them, or all."""
        return [part for part in (*self.k, *self.v) if isinstance(part, QuantizedKV)]

    @property
    def has_residuals(self) -> bool:
        """Whether tokens may have residuals, which lie beside the blocks."""
        return any(part.has_residual for part in self.quantized)

    def copy_block(self, source: int, target: int) -> None:
        """Write what a block holds into another one. Residuals, which belong to one block alone,
        are not copied: not for caches that have any."""
        assert not self.has_residuals
        for part in (*self.k, *self.v):
            if isinstance(part, torch.Tensor):
                part[target] = part[source]
            else:
                part.codes[target] = part.codes[source]
                if not part.is_static:
                    part.scale[target] = part.scale[source]

    def num_residuals(self, blocks: Sequence[int] | None = None) -> torch.Tensor | int:
        """Residuals that tokens in these blocks have, or in all: a number that may lie on the
        device, which nothing waits for."""
        held = [part.slots for part in self.quantized if part.slots is not None]
        if blocks is not None and held:
            chosen = torch.tensor(blocks, dtype=torch.int64, device=held[0].device)
            held = [slots.index_select(0, chosen) for slots in held]
        return sum((slots != NO_SLOT).sum() for slots in held)

    def statistics(self) -> dict[str, Any]:
        """Bytes held, a token's bytes (all layers and heads), and residuals held now and left out
        so far."""
        parts = self.quantized
        tensors = [part for part in (*self.k, *self.v) if isinstance(part, torch.Tensor)]
        held = sum(t.nbytes for t in tensors) + sum(part.num_bytes() for part in parts)
        first = parts[0].codes if parts else tensors[0]
        dropped = [part.dropped for part in parts if part.dropped is not None]
        return {
            "mode": parts[0].mode if parts else "none",
            "bytes": held,
            "bytes_per_token": held / (first.shape[0] * first.shape[1]),
            "residuals": int(self.num_residuals()),
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
    """Free blocks for sequences that come and go as a whole; ``pages.PagePool`` does more."""

    def __init__(self, num_blocks: int) -> None:
        self.free = FreePages(num_blocks)

    def grow(self, block_ids: list[int], num_tokens: int) -> None:
        """Append blocks to ``block_ids`` until they hold ``num_tokens``.

        Raises:
            ValueError: too few free blocks; nothing is taken then.
        """
        missing = -(-num_tokens // BLOCK_SIZE) - len(block_ids)
        if missing > self.free.count:
            raise ValueError(
                f"KV cache: expected {missing} free blocks of {BLOCK_SIZE} tokens, got "
                f"{self.free.count}"
            )
        block_ids.extend(self.free.take(max(0, missing)))

    def release(self, block_ids: list[int]) -> None:
        """Give all blocks of ``block_ids`` back and empty it."""
        self.free.give(block_ids)
        block_ids.clear()


@dataclass
class SequenceState:
    """One sequence: its tokens, its blocks, and how many tokens are in the cache."""

    token_ids: list[int]
    num_computed: int = 0
    block_ids: list[int] = field(default_factory=list)
    group: int = -1  # its place in a mask of requests (model/fallback.py); -1: none


@dataclass
class StepArrays:
    """What one step computes, on the host. B sequences bring T new tokens, packed in order."""

    input_ids: Ints  # int64 [T]
    positions: Ints  # int64 [T]
    slot_mapping: Ints  # int64 [T], where each new token's K/V go
    block_table: Ints  # int32 [B, max_blocks]; past a sequence's own blocks: any that exist
    context_lens: Ints  # int32 [B], tokens in the cache after this step
    cu_seqlens_q: Ints  # int32 [B + 1]

    @property
    def new(self) -> Ints:
        """Int32 [B], new tokens of each sequence."""
        new: Ints = np.diff(self.cu_seqlens_q)
        return new


def step_arrays(sequences: Sequence[SequenceState], new: Sequence[int]) -> StepArrays:
    """A step that computes the next ``new[i]`` tokens of sequence i."""
    context = [s.num_computed + n for s, n in zip(sequences, new, strict=True)]
    used = [-(-n // BLOCK_SIZE) for n in context]  # blocks; those of later chunks are not looked at
    width = max(used)
    table = np.array(
        [s.block_ids[:n] + [0] * (width - n) for s, n in zip(sequences, used, strict=True)],
        dtype=np.int32,
    )
    spans = list(zip(sequences, context, strict=True))
    positions = np.array([p for s, end in spans for p in range(s.num_computed, end)])
    return StepArrays(
        input_ids=np.array([t for s, end in spans for t in s.token_ids[s.num_computed : end]]),
        positions=positions,
        slot_mapping=slots_of(table, np.repeat(np.arange(len(new)), new), positions),
        block_table=table,
        context_lens=np.array(context, dtype=np.int32),
        cu_seqlens_q=np.array([0, *itertools.accumulate(new)], dtype=np.int32),
    )


def slots_of(block_table: Ints, sequence: Ints, positions: Ints) -> Ints:
    """Slot of each position (int64) of the sequence in that row of ``block_table``."""
    blocks: Ints = block_table[sequence, positions // BLOCK_SIZE].astype(np.int64)
    slots: Ints = blocks * BLOCK_SIZE + positions % BLOCK_SIZE
    return slots


@dataclass
class AttnMetadata:
    """Everything about one step that attention must know. B sequences, T new tokens in all."""

    slot_mapping: torch.Tensor  # int64 [T], where each new token's K/V go
    block_table: torch.Tensor  # int32 [B, max_blocks]
    context_lens: torch.Tensor  # int32 [B], tokens in the cache after this step
    cu_seqlens_q: torch.Tensor  # int32 [B + 1]
    max_seqlen_q: int
    starts_here: bool  # no sequence has tokens in the cache from before
    sdpa: tuple[SdpaIndices, ...] | None  # for attention in PyTorch; None: kernels compute it
    apart: Apart | None = None  # sequences that kernels attend to in two launches; None: in one


@dataclass
class Apart:
    """Of a step of kernels: sequences that bring a token each, and behind them chunks of prompts.

    Where a chunk sees many keys its few tiles would take turns at all of them, as tiles of the
    others are enough for all cores, and short; alone its keys are shared out. And where the others
    see many, each of them would cost a tile of rows of which it fills one.
    """

    ones: int  # sequences that bring a token each
    num_blocks: int  # that the longest of them has
    cu_seqlens_q: torch.Tensor  # int32 [B - ones + 1], of the chunks


@dataclass
class SdpaIndices:
    """Indices that the PyTorch attention uses for some sequences, made once for all layers."""

    tokens: slice  # theirs of the packed tokens of the step
    max_seqlen_q: int
    # int64 [B, S], slot of each context position; past a sequence's end that of its last token.
    # One sequence in adjoining blocks is a slice instead: read in place, not gathered.
    kv_slots: torch.Tensor | slice
    mask: torch.Tensor | None  # bool [B, 1, L, S], True = may be seen; None: plain causal, or all
    q_rows: torch.Tensor  # int64 [B, L], row of each query in the packed tokens, padded likewise
    q_unpad: torch.Tensor  # int64 [T], row of each packed token in the padded [B * L]


# Keys of a chunk, or of all others in sum, from which on that is worth a launch of its own.
_MANY_KEYS, _MANY_KEYS_BESIDE = 2048, 32768


def count_of_ones(new: Ints) -> int:
    """How many sequences at the front bring one token."""
    return int(np.argmax(new > 1)) if new.max() > 1 else len(new)


def apart(step: StepArrays, cu_seqlens_q: torch.Tensor) -> Apart | None:
    """Where sequences of a step are attended to apart, from what the host knows of them."""
    ones = count_of_ones(step.new)
    if ones in (0, len(step.new)):
        return None
    beside = step.context_lens[:ones].sum()
    if step.context_lens[ones:].max() < _MANY_KEYS and beside < _MANY_KEYS_BESIDE:
        return None
    num_blocks = -(-int(step.context_lens[:ones].max()) // BLOCK_SIZE)
    return Apart(ones, num_blocks, cu_seqlens_q[ones:] - ones)


def metadata(step: StepArrays, device: torch.device, *, sdpa: bool) -> AttnMetadata:
    """A step's metadata on the device, one copy an array.

    ``sdpa`` asks for the indices of the PyTorch attention too. That pads sequences to the longest,
    so those at the front that bring one token are kept apart from chunks of prompts behind them.
    """

    def put(values: Ints) -> torch.Tensor:
        return torch.from_numpy(values).to(device, non_blocking=True)

    new = step.new
    ones = count_of_ones(new)
    groups = [(0, ones), (ones, len(new))]
    starts = put(step.cu_seqlens_q)
    return AttnMetadata(
        slot_mapping=put(step.slot_mapping),
        block_table=put(step.block_table),
        context_lens=put(step.context_lens),
        cu_seqlens_q=starts,
        max_seqlen_q=int(new.max()),
        starts_here=bool((step.context_lens == new).all()),
        sdpa=tuple(_sdpa_indices(step, device, *group) for group in groups if group[0] < group[1])
        if sdpa
        else None,
        apart=None if sdpa else apart(step, starts),
    )


def build_metadata(
    sequences: Sequence[SequenceState], new: Sequence[int], device: torch.device, *, sdpa: bool
) -> AttnMetadata:
    """Metadata of a step that computes the next ``new[i]`` tokens of sequence i."""
    return metadata(step_arrays(sequences, new), device, sdpa=sdpa)


def _sdpa_indices(step: StepArrays, device: torch.device, first: int, last: int) -> SdpaIndices:
    """Of sequences ``first`` to ``last`` - 1."""
    context, new = step.context_lens[first:last].astype(np.int64), step.new[first:last]
    begin = step.cu_seqlens_q[first:last].astype(np.int64) - step.cu_seqlens_q[first]
    longest = int(new.max())
    # Each query's place in its sequence's new tokens; past their end the last one again.
    places = np.minimum(np.arange(longest), new[:, None] - 1)  # [B, L]
    real = np.arange(longest) < new[:, None]

    def put(values: Ints) -> torch.Tensor:
        return torch.from_numpy(values).to(device, non_blocking=True)

    return SdpaIndices(
        tokens=slice(int(step.cu_seqlens_q[first]), int(step.cu_seqlens_q[last])),
        max_seqlen_q=longest,
        kv_slots=_kv_slots(step.block_table[first:last], context, put),
        mask=_mask(context, new, put),
        q_rows=put(begin[:, None] + places),
        q_unpad=put(np.flatnonzero(real)),
    )


def _kv_slots(
    table: Ints, context: Ints, put: Callable[[Ints], torch.Tensor]
) -> torch.Tensor | slice:
    if len(context) == 1:
        used = table[0, : -(-int(context[0]) // BLOCK_SIZE)]
        if (np.diff(used) == 1).all():
            start = int(used[0]) * BLOCK_SIZE
            return slice(start, start + int(context[0]))
    # Positions past a sequence's end repeat its last one, so that stale slots are never read.
    held = np.minimum(np.arange(context.max()), context[:, None] - 1)  # [B, S]
    return put(slots_of(table, np.arange(len(context))[:, None], held))


def _mask(context: Ints, new: Ints, put: Callable[[Ints], torch.Tensor]) -> torch.Tensor | None:
    """Which keys each query sees, or None where SDPA needs no mask for it."""
    same = (context == context[0]).all() and (new == new[0]).all()
    if same and new[0] in (1, context[0]):  # decode, or a whole prompt: plain causal
        return None
    # Query i of a sequence stands at position num_computed + i. Rows of padding are thrown away,
    # but must see something: a row of -inf only would be NaN.
    key_at = np.arange(context.max())
    last_seen = (context - new)[:, None] + np.arange(new.max())  # [B, L]
    seen = (key_at <= last_seen[..., None]) & (key_at < context[:, None, None])  # [B, L, S]
    return put(seen[:, None])
