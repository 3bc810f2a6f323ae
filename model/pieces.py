"""Steps with prompts as pieces of device graphs: all but attention's read of the pages.

    host arrays -> staging -> one copy -> [ embed, qkv, append ] attention [ o, mlp, qkv, append ]
                                          attention ... [ o, mlp, norm ] -> last tokens' logits

What stands in brackets is captured, once for each number of tokens. What attention launches depends
on how many sequences there are and how long they are, so it is launched anew, with the step's own
metadata, and writes to a buffer that the piece behind it reads. That is a launch or two a layer
instead of ten, which is what a step of few tokens takes of the host's time.

* a step of T tokens takes the smallest size of at least T. Tokens that are too many are padding:
  id 0 at position 0, whose slot -1 writes nothing. No operation of a piece lets one row see
  another; attention neither reads nor writes rows of padding, so what an earlier step left in
  them, NaN too, comes no further than to rows of padding.
* all keys are read from the pages, also those of prompts that begin in the step.
* which kernels a piece launches follows from its size alone.

Queries and attention's results lie in two buffers that all layers and sizes share; all else is in
one pool of memory, in which sizes and pieces use again what the others do.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from model.graph import capture_sizes
from model.kv_cache import AttnMetadata, KVCache, StepArrays, apart
from model.qwen3 import Model, OverCache, hidden_states, logits_of
from model.staging import Field, Layout, Staging, bytes_of
from tkernels import device

# Sizes are multiples of it, so that inputs begin at addresses that divide by 64.
_UNIT = 16
_TOKEN_FIELDS = {"input_ids": 0, "positions": 0, "slot_mapping": -1}  # what padding has
# Weight bytes of a layer times tokens. An H200's host took 0.34 ms to launch a layer; in that time
# the device multiplies this much at 500 TFLOP/s, a byte a token being two operations on half a
# weight. With more tokens launches wait for the device anyway, and padding would only cost.
_HOST_BOUND = 170e9


def token_sizes(most: int) -> list[int]:
    """Sizes to capture for steps of up to ``most`` tokens; from 192 on padding is a fifth at most.

    >>> token_sizes(500)
    [16, 32, 64, 96, 128, 192, 256, 320, 384, 448, 512]
    """
    most = -(-most // _UNIT) * _UNIT
    small, octaves = (16, 32, 64, 96, 128, 192), (256 << i for i in range(most.bit_length()))
    usual = (*small, *(first // 4 * quarter for first in octaves for quarter in range(4, 8)))
    return [n for n in usual if n < most] + [most]


def most_tokens(model: Model) -> int:
    """Steps of more tokens take the device longer than launching them takes the host."""
    beside = model.norm.nbytes + model.lm_head.weight.nbytes
    a_layer = (model.bytes_per_step - beside) / len(model.layers)
    return max(_UNIT, int(_HOST_BOUND / a_layer))


@dataclass(frozen=True)
class _Pieces:
    """Of one size: one more than layers, and where the last leaves what ``hidden_states`` gives."""

    graphs: list[Any]
    hidden: torch.Tensor  # [size, H]


class StepPieces:
    """Captured pieces of steps over one cache.

    Args:
        sizes: numbers of tokens for which pieces are captured, multiples of 16.
        max_seqs: sequences of a step, at most.
        max_blocks: columns of a step's block table, at most.
        max_bytes: device memory that graphs may take. Sizes that go beyond, the smaller ones, are
            given up, and their steps padded to a larger one.

    Attributes:
        sizes: what was captured, ascending.
        num_bytes: what that took of the device's memory.

    Raises:
        ValueError: the largest size alone goes beyond ``max_bytes``, or the device limits graphs.
    """

    @torch.inference_mode()
    def __init__(
        self,
        model: Model,
        ops: Any,
        cache: KVCache,
        cos_sin_cache: torch.Tensor,
        *,
        sizes: Iterable[int],
        max_seqs: int,
        max_blocks: int,
        max_bytes: int | None = None,
    ) -> None:
        wanted = sorted(set(sizes))
        if not wanted or wanted[0] < 1 or any(n % _UNIT for n in wanted):
            raise ValueError(f"pieces: expected sizes that {_UNIT} divides, got {wanted}")
        if device.most_graphs() is not None:
            raise ValueError(
                "pieces: expected a device with as many graphs as there is memory for, got one "
                f"that keeps {device.most_graphs()}"
            )
        self.model, self.ops, self.cache = model, ops, cache
        self.cos_sin_cache, self.max_seqs, self.max_blocks = cos_sin_cache, max_seqs, max_blocks
        self.launched = 0  # steps, since the start
        on, largest = model.norm.device, wanted[-1]
        config = model.config
        heads = (largest, config.num_heads, config.head_dim)
        self._q = torch.zeros(heads, dtype=model.norm.dtype, device=on)
        self._attended = torch.zeros_like(self._q)
        layouts = {size: _layout(size, max_seqs, max_blocks) for size in wanted}
        flat = torch.zeros(bytes_of(layouts), dtype=torch.uint8, device=on)
        self._staging = Staging(layouts, flat)
        self._made, self.num_bytes = capture_sizes(wanted, self._captured, max_bytes, "tokens")
        self.sizes = sorted(self._made)

    def fits(self, arrays: StepArrays) -> bool:
        """Whether ``logits`` takes such a step."""
        count, width = arrays.block_table.shape
        fitting = count <= self.max_seqs and width <= self.max_blocks
        return fitting and len(arrays.input_ids) <= self.sizes[-1]

    @torch.inference_mode()
    def logits(self, arrays: StepArrays, num_logits: int | None) -> torch.Tensor:
        """Launch one step that ``fits``: what ``forward`` returns. Nothing waits for the device.

        At most two steps' inputs may be on their way: a third waits until the first's are taken.
        """
        count = len(arrays.input_ids)
        size = next(n for n in self.sizes if n >= count)
        meta = self._put(arrays, size)
        over = OverCache(self.ops, self.cache, meta)
        q, attended = self._q[:count], self._attended[:count]
        first, *behind = self._made[size].graphs
        first.replay()
        for layer, graph in enumerate(behind):
            over.read(layer, q, attended)
            graph.replay()
        self.launched += 1
        hidden = self._made[size].hidden[:count]
        return logits_of(self.model, self.ops, hidden, meta.cu_seqlens_q, num_logits=num_logits)

    def _put(self, arrays: StepArrays, size: int) -> AttnMetadata:
        """Bring a step's arrays, and padding up to ``size``, to the device in one copy."""
        staging, (num_seqs, width) = self._staging, map(int, arrays.block_table.shape)
        side = staging.side(self.launched)
        side.fill(size, {name: getattr(arrays, name) for name in _TOKEN_FIELDS})
        context, starts, table = _of_sequences(side.arrays[size]["words"], num_seqs, width)
        context[:], starts[:] = arrays.context_lens, arrays.cu_seqlens_q
        table[:] = arrays.block_table
        num_words = _table_at(num_seqs) + num_seqs * width
        staging.copy(side, staging.layouts[size].end_of("words", num_words))
        side.event.record()
        at = staging.inputs[size]
        context, starts, table = _of_sequences(at["words"], num_seqs, width)
        return AttnMetadata(
            slot_mapping=at["slot_mapping"],
            block_table=table,
            context_lens=context,
            cu_seqlens_q=starts,
            max_seqlen_q=int(arrays.new.max()),
            starts_here=False,  # so that the pages are read
            sdpa=None,
            apart=apart(arrays, starts),
        )

    def _captured(self, size: int, pool: Any) -> _Pieces:
        self._staging.pad(size)
        # Outside first: kernels are compiled and loaded, configs looked up. It is all padding, so
        # the cache stays as it is.
        self._hidden(size, lambda _: None)
        with _Captures(pool) as captures:
            hidden = self._hidden(size, lambda _: captures.cut())
        return _Pieces(captures.graphs, hidden)

    def _hidden(self, size: int, at_attention: Callable[[int], None]) -> torch.Tensor:
        """``hidden_states`` of the inputs of a size, with a call (of the layer) for attention."""
        at = self._staging.inputs[size]
        meta = _metadata_of_appending(at["slot_mapping"])
        attend = _Between(
            OverCache(self.ops, self.cache, meta, self._q[:size]),
            self._attended[:size],
            at_attention,
        )
        ids, positions = at["input_ids"], at["positions"]
        return hidden_states(self.model, self.ops, ids, positions, self.cos_sin_cache, attend)


class _Between(OverCache):
    """What stands for attention between pieces: nothing is launched, its results are a buffer."""

    def __init__(
        self, over: OverCache, attended: torch.Tensor, at_attention: Callable[[int], None]
    ) -> None:
        super().__init__(over.ops, over.cache, over.meta, over.q_out)
        self._attended, self._at_attention = attended, at_attention

    def read(self, layer: int, q: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        assert self.q_out is not None
        if q.data_ptr() != self.q_out.data_ptr():
            raise RuntimeError("pieces: expected q to be where attention will look for it")
        self._at_attention(layer)
        return self._attended


class _Captures:
    """A capture that ``cut`` ends, and begins another one."""

    def __init__(self, pool: Any) -> None:
        self.graphs: list[Any] = []
        self._pool, self._running = pool, contextlib.ExitStack()

    def cut(self) -> None:
        self._running.close()
        self._begin()

    def _begin(self) -> None:
        graph = device.new_graph()
        self._running.enter_context(device.capture(graph, pool=self._pool))
        self.graphs.append(graph)

    def __enter__(self) -> _Captures:
        self._begin()
        return self

    def __exit__(self, *error: Any) -> bool | None:
        return self._running.__exit__(*error)


def _layout(size: int, max_seqs: int, max_blocks: int) -> Layout:
    """``words`` has what is known of sequences, as many and as long as those of a step are."""
    tokens = {name: Field(torch.int64, (size,), pad) for name, pad in _TOKEN_FIELDS.items()}
    num_words = _table_at(max_seqs) + max_seqs * max_blocks
    return Layout({**tokens, "words": Field(torch.int32, (num_words,), None)})


def _of_sequences(words: Any, count: int, width: int) -> Iterator[Any]:
    """context_lens [B], cu_seqlens_q [B + 1], block_table [B, width]: each begins at 64 bytes."""
    starts, table = _padded(count), _table_at(count)
    yield words[:count]
    yield words[starts : starts + count + 1]
    yield words[table : table + count * width].reshape(count, width)


def _table_at(count: int) -> int:
    """The word at which the block table of so many sequences begins."""
    return _padded(count) + _padded(count + 1)


def _padded(words: int) -> int:
    return -(-words // 16) * 16


def _metadata_of_appending(slot_mapping: torch.Tensor) -> AttnMetadata:
    """Of a step whose attention is not computed: where keys and values go, and nothing else."""
    nothing = slot_mapping[:0]
    return AttnMetadata(
        slot_mapping=slot_mapping,
        block_table=nothing,
        context_lens=nothing,
        cu_seqlens_q=nothing,
        max_seqlen_q=0,  # not 1: appending and attention are no single launch
        starts_here=False,
        sdpa=None,
    )
