"""Steps with one prompt as device graphs: a part of it, and tokens of sequences that decode.

    host arrays -> staging -> one copy -> [ network ] -> last tokens' logits

What stands in brackets is one graph for each number of tokens, attention too, which model/pieces.py
has to launch anew. It can stand here, because where tokens of the prompt begin and end, and how
long each sequence is, lie in the device's memory, and how many programs look at them follows from
the most that there can be:

* a step of T tokens takes the smallest size of at least T; the rest is padding, as in pieces.py.
* sequences that decode come first, and are attended to by a launch of their own. It has rows for
  as many as may run beside the prompt; those that do not have a context of 0 tokens, for which it
  writes zeros. These rows are the prompt's, or padding: the prompt's are written after it.
* the prompt's launch has one sequence, of at most as many tokens as the size. A second graph of a
  size serves steps in which nothing decodes, and has this launch alone.

Block tables have all columns that a sequence may ever need. Of the decoding sequences' table as
many rows are copied as there are; what others hold is not read.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from model.graph import capture_sizes
from model.kv_cache import AttnMetadata, KVCache, StepArrays, count_of_ones
from model.qwen3 import Model, OverCache, hidden_states, logits_of
from tkernels import device

_ALIGNMENT = 64  # bytes between which inputs begin; Triton wants 16
Shape = tuple[int, ...]


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
        layouts = {size: _Layout(size, min(max_beside, size), max_blocks) for size in wanted}
        most = max(layout.num_bytes for layout in layouts.values())
        self._flat = torch.zeros(most, dtype=torch.uint8, device=model.norm.device)
        self._inputs = {size: layout.views(self._flat) for size, layout in layouts.items()}
        self._sides = [_Side(most, layouts) for _ in range(2)]
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
        side = self._sides[self.launched % 2]
        side.event.synchronize()  # the step before the last has taken its inputs
        num_bytes = side.fill(arrays, size)
        self._flat[:num_bytes].copy_(side.flat[:num_bytes], non_blocking=True)
        side.event.record()
        graph, hidden = self._made[size][num_seqs > 1]
        graph.replay()
        self.launched += 1
        at = self._inputs[size]
        meta = _metadata(at["slot_mapping"], at["cu_seqlens_q"][: num_seqs + 1], size)
        return logits_of(self.model, self.ops, hidden[:count], meta, num_logits=num_logits)

    def _captured(self, size: int, pool: Any) -> dict[bool, tuple[Any, torch.Tensor]]:
        """Graphs of a size and where they leave ``hidden_states``: nothing, or some, decode."""
        side = self._sides[0]
        num_bytes = side.pad(size)
        self._flat[:num_bytes].copy_(side.flat[:num_bytes])
        found = {}
        for beside in (False, True)[: 1 + (self.max_beside > 0)]:
            # Outside first: kernels are compiled and loaded, configs looked up. It is all padding,
            # so the cache stays as it is.
            self._hidden(size, beside)
            graph = device.new_graph()
            with device.capture(graph, pool=pool):
                hidden = self._hidden(size, beside)
            found[beside] = (graph, hidden)
        return found

    def _hidden(self, size: int, beside: bool) -> torch.Tensor:
        at = self._inputs[size]
        meta = _metadata(at["slot_mapping"], at["starts"], size)
        attend = _PromptBeside(self.ops, self.cache, meta, at=at, beside=beside)
        ids, positions = at["input_ids"], at["positions"]
        return hidden_states(self.model, self.ops, ids, positions, self.cos_sin_cache, attend)


@dataclass
class _PromptBeside(OverCache):
    """Attention of tokens that decode, at the front, and of a prompt's behind them."""

    at: dict[str, torch.Tensor] | None = None
    beside: bool = True

    def read(self, layer: int, q: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        assert self.at is not None
        at, pages = self.at, (self.cache.k[layer], self.cache.v[layer])
        plain = isinstance(pages[0], torch.Tensor)
        attend = self.ops.paged_attn if plain else self.ops.paged_attn_quantized
        out = torch.empty_like(q) if out is None else out
        if self.beside:
            table, lens = at["beside_table"], at["beside_lens"]
            ones = len(lens)
            attend(q[:ones], *pages, table, lens, max_seqlen_q=1, out=out[:ones])
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
    """What appending and ``logits_of`` want to know; attention has its own."""
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


class _Layout:
    """Where each input of a size begins. The table of what decodes is last, row after row."""

    def __init__(self, size: int, beside: int, max_blocks: int) -> None:
        fields: dict[str, tuple[torch.dtype, Shape, int]] = {  # and what padding has
            "input_ids": (torch.int64, (size,), 0),
            "positions": (torch.int64, (size,), 0),
            "slot_mapping": (torch.int64, (size,), -1),
            "starts": (torch.int32, (2,), 0),  # of the prompt's tokens, and where they end
            "context_len": (torch.int32, (1,), 0),  # of the prompt
            "cu_seqlens_q": (torch.int32, (beside + 2,), 0),  # of all
            "beside_lens": (torch.int32, (beside,), 0),
            "table": (torch.int32, (1, max_blocks), 0),  # of the prompt
            "beside_table": (torch.int32, (beside, max_blocks), 0),
        }
        self.size, self._fields, self._begins, at = size, fields, {}, 0
        for name, (dtype, shape, _) in fields.items():
            self._begins[name] = at
            at += -(-math.prod(shape) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        self.num_bytes = at

    def views(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """The inputs in a buffer of bytes."""
        return {
            name: flat[begin : begin + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
            for (name, begin), (dtype, shape, _) in zip(
                self._begins.items(), self._fields.values(), strict=True
            )
        }

    def padding(self, name: str) -> int:
        return self._fields[name][2]

    def bytes_of(self, beside: int) -> int:
        """From the beginning on, that hold a step with so many sequences that decode."""
        return self._begins["beside_table"] + 4 * beside * self._fields["table"][1][1]


class _Side:
    """Staging of one step on the host; two take turns, so that one is filled while one is read."""

    def __init__(self, num_bytes: int, layouts: dict[int, _Layout]) -> None:
        self.flat = device.pinned(num_bytes).zero_()
        self.event = device.event()
        self._layouts = layouts
        self._arrays = {
            size: {name: t.numpy() for name, t in layout.views(self.flat).items()}
            for size, layout in layouts.items()
        }

    def pad(self, size: int) -> int:
        """No token and no sequence: bytes from the beginning that hold it."""
        layout = self._layouts[size]
        for name, array in self._arrays[size].items():
            array[:] = layout.padding(name)
        return layout.num_bytes

    def fill(self, arrays: StepArrays, size: int) -> int:
        """A step, and padding up to ``size`` tokens: bytes from the beginning that hold it."""
        layout, to = self._layouts[size], self._arrays[size]
        count, (num_seqs, width) = len(arrays.input_ids), arrays.block_table.shape
        ones = num_seqs - 1
        for name in ("input_ids", "positions", "slot_mapping"):
            to[name][:count] = getattr(arrays, name)
            to[name][count:] = layout.padding(name)
        to["starts"][:] = arrays.cu_seqlens_q[-2:]
        to["context_len"][0] = arrays.context_lens[-1]
        to["cu_seqlens_q"][: num_seqs + 1] = arrays.cu_seqlens_q
        to["beside_lens"][:ones], to["beside_lens"][ones:] = arrays.context_lens[:-1], 0
        to["table"][0, :width] = arrays.block_table[-1]
        to["beside_table"][:ones, :width] = arrays.block_table[:-1]
        return layout.bytes_of(ones)
