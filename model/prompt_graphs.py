"""Steps with one prompt as device graphs: a part of it, and tokens of sequences that decode.

    host arrays -> staging -> one copy -> [ network ] -> last tokens' logits

What stands in brackets is one graph for each number of tokens, attention too, which model/pieces.py
has to launch anew. It can stand here, because where tokens of the prompt begin and end, and how
long each sequence is, lie in the device's memory, and how many programs look at them follows from
the most that there can be:

* a step of T tokens takes the smallest size of at least T; the rest is padding, as in pieces.py.
* sequences that decode come first, and are attended to by a launch of their own. It has rows for
  so many; those that are not there have a context of 0 tokens, for which it writes zeros. These
  rows are the prompt's, or padding: the prompt's are written after it.
* the prompt's launch has one sequence, of at most as many tokens as the size.
* programs of rows that are not there end at once, but with 8 KV heads and long tables there are 64
  of each. So a size has a graph for each of a few numbers of rows (``rows_beside``): 0, which has
  the prompt's launch alone, the most that there can be, and 8 and 64 where these are a third of
  that or less. Graphs keep what they compute, ``hidden_states`` of the size; all other memory they
  take turns with. Four of them are few beside the size's pieces, one more than there are layers.

Block tables have all columns that a sequence may ever need. Of the decoding sequences' table as
many rows are copied as there are; what others hold is not read. Attention chooses its body by these
columns and by the size, so steps of few keys may take another than they do launched one by one,
which sums, and rounds, in another way. What it needs of memory follows from them too: the body for
chunks over a quantised cache takes 4 bytes for each number of K that the table has room for (40,960
positions of 8 heads x 128: 160 MiB, once for all graphs).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from model.graph import capture_sizes
from model.kv_cache import AttnMetadata, KVCache, StepArrays, count_of_ones
from model.qwen3 import Model, OverCache, hidden_states, logits_of
from model.staging import Array, Field, Layout, Staging, bytes_of
from tkernels import device

_FEW_BESIDE = (8, 64)  # rows; keys of 8 and fewer are shared out, as they are tiles for few cores


def rows_beside(most: int) -> list[int]:
    """Numbers of decoding sequences for which a size is captured that may have up to ``most``.

    >>> rows_beside(255)
    [0, 8, 64, 255]
    >>> rows_beside(23)
    [0, 23]
    """
    return sorted({0, *(n for n in _FEW_BESIDE if 3 * n <= most), most})


class PromptGraphs:
    """Captured steps with one prompt over one cache.

    Args:
        sizes: numbers of tokens for which steps are captured.
        max_beside: sequences that decode beside the prompt, at most.
        max_blocks: columns of a step's block table, at most.
        max_bytes: device memory that graphs may take. Sizes that go beyond, the smaller ones, are
            given up, and their steps padded to a larger one.

    Attributes:
        sizes: what was captured, ascending.
        num_bytes: what that took of the device's memory.

    Raises:
        ValueError: the largest size alone goes beyond ``max_bytes``.
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
        max_beside: int,
        max_blocks: int,
        max_bytes: int | None = None,
    ) -> None:
        wanted = sorted(set(sizes))
        if not wanted or wanted[0] < 2:
            raise ValueError(f"prompt graphs: expected sizes of 2 tokens or more, got {wanted}")
        self.model, self.ops, self.cache, self.cos_sin_cache = model, ops, cache, cos_sin_cache
        self.max_beside, self.max_blocks = max_beside, max_blocks
        self.launched = 0  # steps, since the start
        layouts = {size: _layout(size, min(max_beside, size), max_blocks) for size in wanted}
        flat = torch.zeros(bytes_of(layouts), dtype=torch.uint8, device=model.norm.device)
        self._staging = Staging(layouts, flat)
        self._made, self.num_bytes = capture_sizes(wanted, self._captured, max_bytes, "tokens")
        self.sizes = sorted(self._made)

    def fits(self, arrays: StepArrays) -> bool:
        """Whether ``logits`` takes such a step: one sequence brings more than a token."""
        count, width = map(int, arrays.block_table.shape)
        if width > self.max_blocks or not 2 <= len(arrays.input_ids) <= self.sizes[-1]:
            return False
        return count - 1 <= self.max_beside and count_of_ones(arrays.new) == count - 1

    @torch.inference_mode()
    def logits(self, arrays: StepArrays, num_logits: int | None) -> torch.Tensor:
        """Launch one step that ``fits``: what ``forward`` returns. Nothing waits for the device.

        At most two steps' inputs may be on their way: a third waits until the first's are taken.
        """
        count, num_seqs = len(arrays.input_ids), len(arrays.context_lens)
        size = next(n for n in self.sizes if n >= count)
        side = self._staging.side(self.launched)
        side.fill(size, _fields_of(arrays))
        num_bytes = self._staging.layouts[size].end_of("beside_table", num_seqs - 1)
        self._staging.copy(side, num_bytes)
        side.event.record()
        made = self._made[size]
        graph, hidden = made[min(rows for rows in made if rows >= num_seqs - 1)]
        graph.replay()
        self.launched += 1
        starts = self._staging.inputs[size]["cu_seqlens_q"]  # of as many as have logits, and more
        return logits_of(self.model, self.ops, hidden[:count], starts, num_logits=num_logits)

    def _captured(self, size: int, pool: Any) -> dict[int, tuple[Any, torch.Tensor]]:
        """Graphs of a size, by rows that decode, and where they leave ``hidden_states``."""
        self._staging.pad(size)
        found = {}
        for rows in reversed(rows_beside(min(self.max_beside, size))):
            # Outside first: kernels are compiled and loaded, configs looked up. It is all padding,
            # so the cache stays as it is.
            self._hidden(size, rows)
            graph = device.new_graph()
            with device.capture(graph, pool=pool):
                hidden = self._hidden(size, rows)
            found[rows] = (graph, hidden)
        return found

    def _hidden(self, size: int, rows: int) -> torch.Tensor:
        at = self._staging.inputs[size]
        meta = _metadata(at["slot_mapping"], at["starts"], size)
        attend = _PromptBeside(self.ops, self.cache, meta, at=at, rows=rows)
        ids, positions = at["input_ids"], at["positions"]
        return hidden_states(self.model, self.ops, ids, positions, self.cos_sin_cache, attend)


@dataclass
class _PromptBeside(OverCache):
    """Attention of ``rows`` tokens that decode, at the front, and of a prompt's behind them."""

    at: dict[str, torch.Tensor] | None = None
    rows: int = 0

    def read(self, layer: int, q: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        assert self.at is not None
        at, pages = self.at, (self.cache.k[layer], self.cache.v[layer])
        plain = isinstance(pages[0], torch.Tensor)
        attend = self.ops.paged_attn if plain else self.ops.paged_attn_quantized
        out = torch.empty_like(q) if out is None else out
        if rows := self.rows:
            table, lens = at["beside_table"][:rows], at["beside_lens"][:rows]
            attend(q[:rows], *pages, table, lens, max_seqlen_q=1, out=out[:rows])
        attended: torch.Tensor = attend(
            q,
            *pages,
            at["table"],
            at["context_len"],
            cu_seqlens_q=at["starts"],
            max_seqlen_q=self.meta.max_seqlen_q,
            out=out,
        )
        return attended


def _metadata(slot_mapping: torch.Tensor, starts: torch.Tensor, size: int) -> AttnMetadata:
    """What appending wants to know; attention has its own."""
    nothing = slot_mapping[:0]
    return AttnMetadata(
        slot_mapping=slot_mapping,
        block_table=nothing,
        context_lens=nothing,
        cu_seqlens_q=starts,
        max_seqlen_q=size,
        starts_here=False,  # so that the pages are read
        sdpa=None,
    )


def _layout(size: int, beside: int, max_blocks: int) -> Layout:
    """The table of what decodes is last, so that no more rows are copied than there are."""
    return Layout(
        {
            "input_ids": Field(torch.int64, (size,)),
            "positions": Field(torch.int64, (size,)),
            "slot_mapping": Field(torch.int64, (size,), -1),
            "starts": Field(torch.int32, (2,)),  # of the prompt's tokens, and where they end
            "context_len": Field(torch.int32, (1,)),  # of the prompt
            "cu_seqlens_q": Field(torch.int32, (beside + 2,), None),  # of all
            "beside_lens": Field(torch.int32, (beside,)),
            "table": Field(torch.int32, (1, max_blocks), None),  # of the prompt
            "beside_table": Field(torch.int32, (beside, max_blocks), None),
        }
    )


def _fields_of(arrays: StepArrays) -> dict[str, Array]:
    """A step in which the last sequence is the prompt."""
    return {
        "input_ids": arrays.input_ids,
        "positions": arrays.positions,
        "slot_mapping": arrays.slot_mapping,
        "starts": arrays.cu_seqlens_q[-2:],
        "context_len": arrays.context_lens[-1:],
        "cu_seqlens_q": arrays.cu_seqlens_q,
        "beside_lens": arrays.context_lens[:-1],
        "table": arrays.block_table[-1:],
        "beside_table": arrays.block_table[:-1],
    }
