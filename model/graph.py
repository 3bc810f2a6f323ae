"""The decode step as device graphs: captured once for each batch size, then replayed.

    host arrays -> staging -> one copy -> [ network -> choice of tokens ] -> one copy -> ids

What stands in brackets is the graph: what was launched at its capture, with the addresses, sizes
and launch configs of then. So

* inputs lie in buffers that are made once. A step of n sequences takes the smallest captured size
  of at least n; the rows that are too many are padding: slot -1 writes nothing, a context of 0
  tokens reads nothing.
* the block table always has ``max_blocks`` columns, by which attention chooses how to split its
  work, so a graph serves every context. Columns and rows that a step does not fill keep what an
  earlier one left there; nothing reads them.
* a graph is kept for each (size, kind), and whatever else decides which kernels run (dtypes, the
  cache's mode, shapes) never changes. Kinds say how tokens are chosen, see ``KINDS``.
* a step may take its input ids from the step before, on the device: the host launches it without
  having read them, and prepares inputs while the device computes. What a step chose lies in one
  buffer with the ids that the host gives, and the host says from which place of it each row takes
  its id: one launch, wherever they come from.

Sizes are captured from the largest on, in one pool of memory, in which each graph uses again what
the others do. A step allocates nothing.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch

import tkernels
from model.fallback import Step as WatchedOps
from model.fallback import Watch
from model.kv_cache import AttnMetadata, KVCache
from model.qwen3 import Model, forward
from model.sampler import SamplingRows, sample_rows
from model.staging import ALIGNMENT, Array, Field, Layout, Staging, bytes_of
from tkernels import check, device

_T = TypeVar("_T")

# How tokens are chosen: the likeliest; drawn; drawn of what top-k, top-p and min-p leave. Each
# serves what those before it do. "logits": not at all, the caller gets the logits.
KINDS = ("greedy", "drawn", "narrowed", "logits")

# Inputs of a step, a row a sequence: dtype of each and what padding has in it.
_FIELDS: dict[str, tuple[torch.dtype, int | None]] = {
    "input_ids": (torch.int64, 0),
    "places": (torch.int64, 0),  # in ``DecodeGraphs._words``, of each row's input id
    "positions": (torch.int64, 0),
    "slot_mapping": (torch.int64, -1),
    "key": (torch.int64, 0),
    "top_k": (torch.int64, 0),
    "temperature": (torch.float32, 0),
    "top_p": (torch.float32, 1),
    "min_p": (torch.float32, 0),
    "context_lens": (torch.int32, 0),
    "groups": (torch.int32, -1),
    "block_table": (torch.int32, None),
}
_WORDS = ALIGNMENT // 8  # in int64


@dataclass(frozen=True)
class Choice:
    """How the next token of each row is chosen, on the host: arrays [B], as in ``SamplingRows``."""

    temperature: Array
    top_k: Array
    top_p: Array
    min_p: Array
    key: Array

    @property
    def kind(self) -> str:
        drawn = self.temperature > 0
        narrowed = drawn & ((self.top_k > 0) | (self.top_p < 1) | (self.min_p > 0))
        return "narrowed" if narrowed.any() else "drawn" if drawn.any() else "greedy"


def obstacle(ops: Any, *, routing: bool = False) -> str | None:
    """What ``DecodeGraphs`` would need and does not find, as "expected ..., got ..."."""
    if device.tensor_device().type == "cpu":
        return "expected an accelerator, got the CPU"
    if ops is not tkernels:
        return "expected --kernels triton, got torch"
    if check.DEBUG:
        return "expected TKERNELS_DEBUG to be off, as it reads values on the host, got it on"
    return "expected no --moe-stats, which would count padding, got it" if routing else None


def batch_sizes(most: int, limit: int | None = None) -> list[int]:
    """Sizes to capture for batches of up to ``most``, at most ``limit`` of them.

    >>> batch_sizes(20)
    [1, 2, 4, 8, 16, 20]
    >>> batch_sizes(20, 3)
    [2, 8, 20]
    """
    usual = (1, 2, 4, *range(8, 65, 8), *range(80, 257, 16), *range(288, most, 32))
    sizes = [n for n in usual if n < most] + [most]
    every = 1 if limit is None else -(-len(sizes) // limit)
    return sizes[::-1][::every][::-1]


def capture_sizes(
    sizes: Iterable[int], capture: Callable[[int, Any], _T], max_bytes: int | None, unit: str
) -> tuple[dict[int, _T], int]:
    """What ``capture(size, pool)`` gives of each size, the largest first, and bytes that this took.

    Sizes that go beyond ``max_bytes`` of the device's memory, the smaller ones, are left out.

    Raises:
        ValueError: the largest alone goes beyond; ``unit`` is what sizes count.
    """
    made: dict[int, _T] = {}
    pool, start, used = device.graph_pool(), device.memory_free(), 0
    gc.collect()
    gc.freeze()  # each capture collects garbage, which takes long where there are many objects
    try:
        for size in sorted(sizes, reverse=True):
            found = capture(size, pool)
            now = start - device.memory_free()
            if max_bytes is not None and now > max_bytes:
                if made:
                    break
                raise ValueError(
                    f"graph: expected to take at most {max_bytes} bytes, got {now} after "
                    f"capturing {size} {unit}"
                )
            made[size], used = found, now
    finally:
        gc.unfreeze()
    return made, used


class Step:
    """A step that was launched."""

    def __init__(self, graphs: DecodeGraphs, number: int, count: int, kind: str) -> None:
        self._graphs, self.number, self.count, self.kind = graphs, number, count, kind

    def ids(self) -> list[int]:
        """Wait for the step: the token of each sequence.

        Raises:
            RuntimeError: there are none, or two more steps were launched, which took their place.
        """
        if self.kind == "logits":
            raise RuntimeError("graph: expected logits to be asked for, got a question for ids")
        return self._graphs.read(self)

    def logits(self) -> torch.Tensor:
        """Logits fp32 [count, V], which stay until the next step."""
        if self.kind != "logits" or self.number != self._graphs.launched:
            raise RuntimeError("graph: expected the newest step, of kind logits, got another")
        return self._graphs.last_logits[: self.count]


class DecodeGraphs:
    """Captured decode steps over one cache.

    Args:
        sizes: numbers of sequences for which a graph is captured.
        max_blocks: columns of the block table; a sequence has no more blocks.
        kinds: ways of choosing tokens for which graphs are captured.
        watch: of a runner with fallback; steps then take ``groups``.
        max_bytes: device memory that graphs may take. Sizes that go beyond, the smaller ones, are
            given up (``sizes`` tells what is left), and their steps padded to a larger one.

    Attributes:
        sizes: what was captured, ascending.
        num_bytes: what that took of the device's memory.

    Raises:
        ValueError: the largest size alone goes beyond ``max_bytes``, or the device keeps fewer
            graphs than these.
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
        max_blocks: int,
        kinds: Sequence[str] = ("greedy",),
        watch: Watch | None = None,
        max_bytes: int | None = None,
    ) -> None:
        wanted = sorted(set(sizes), reverse=True)
        if not wanted or wanted[-1] < 1 or not set(kinds) <= set(KINDS) or not kinds:
            raise ValueError(
                f"graph: expected sizes of 1 or more and kinds of {', '.join(KINDS)}, got {wanted} "
                f"and {list(kinds)}"
            )
        limit = device.most_graphs()
        if limit is not None and len(wanted) * len(kinds) > limit:
            raise ValueError(
                f"graph: expected at most {limit} graphs on this device, got {len(wanted)} sizes "
                f"of {len(kinds)} kinds"
            )
        self.model, self.ops, self.cache, self.watch = model, ops, cache, watch
        self.cos_sin_cache, self.max_blocks = cos_sin_cache, max_blocks
        self.launched = 0  # steps, since the start
        self._before = (0, "logits")  # rows and kind of the last of them
        largest, on = wanted[0], model.norm.device
        # Padding's id, which is 0; what the last step chose; the inputs, of which ids are first.
        begin = _WORDS + math.ceil(largest / _WORDS) * _WORDS
        layouts = {rows: _layout(rows, max_blocks) for rows in wanted}
        num_words = begin + bytes_of(layouts) // 8
        self._words = torch.zeros(num_words, dtype=torch.int64, device=on)
        self._ids = self._words[_WORDS : _WORDS + largest]
        self._staging = Staging(layouts, self._words[begin:].view(torch.uint8))
        # Ids of the two newest steps, on the host.
        self._chosen = [device.pinned(largest * 8).view(torch.int64) for _ in range(2)]
        self._row_places = begin + np.arange(largest)  # of ids that the host gives
        self._cu_seqlens_q = torch.arange(largest + 1, dtype=torch.int32, device=on)
        if "logits" in kinds:
            self.last_logits = torch.empty(largest, model.config.vocab_size, device=on)
        made, self.num_bytes = capture_sizes(
            wanted,
            lambda rows, pool: {kind: self._captured(rows, kind, pool) for kind in kinds},
            max_bytes,
            "sequences",
        )
        self._graphs = {(rows, kind): one for rows, of in made.items() for kind, one in of.items()}
        self.sizes = sorted({rows for rows, _ in self._graphs})
        self._kinds = [kind for kind in KINDS if kind in kinds]

    @torch.inference_mode()
    def decode(
        self,
        input_ids: Array,
        positions: Array,
        slot_mapping: Array,
        block_table: Array,
        context_lens: Array,
        choice: Choice | None = None,
        *,
        groups: Array | None = None,
        logits: bool = False,
    ) -> Step:
        """Launch one step of B sequences; nothing waits for the device.

        At most two steps may be on their way: a third waits until the first has ended.

        Args:
            input_ids: int64 [B], the new token of each sequence; -1 - i stands for what the step
                before, whose ids need not have been read, chose for its row i.
            positions: int64 [B], where that token stands.
            slot_mapping: int64 [B], where its key and value go.
            block_table: int32 [B, up to max_blocks].
            context_lens: int32 [B], tokens in the cache after this step.
            choice: how the next tokens are chosen; None is the likeliest.
            groups: int32 [B], places in the mask of requests, with ``watch``.
            logits: no tokens are chosen, ``Step.logits`` has the logits.
        """
        count, width = block_table.shape
        if not 1 <= count <= self.sizes[-1] or width > self.max_blocks:
            raise ValueError(
                f"graph: expected a block table of up to {self.sizes[-1]} sequences and "
                f"{self.max_blocks} blocks, got {count} and {width}"
            )
        if (groups is None) != (self.watch is None):
            raise ValueError("graph: expected groups with a watch and only then, got otherwise")
        known, kind = self._before
        if int(input_ids.min()) < (0 if kind == "logits" else -known):
            raise ValueError(
                f"graph: expected input ids of 0 and more, or -1 to -{known} for what the step "
                f"before chose (kind {kind}), got {int(input_ids.min())}"
            )
        kind = self._serving("logits" if logits else "greedy" if choice is None else choice.kind)
        rows = next(size for size in self.sizes if size >= count)
        side = self._staging.side(self.launched)
        places = np.where(input_ids < 0, _WORDS - 1 - input_ids, self._row_places[:count])
        given = {"input_ids": input_ids, "positions": positions, "slot_mapping": slot_mapping}
        given |= {"context_lens": context_lens, "block_table": block_table, "places": places}
        given |= {} if choice is None or logits else vars(choice)
        given |= {} if groups is None else {"groups": groups}
        if wrong := [name for name, values in given.items() if len(values) != count]:
            raise ValueError(
                f"graph: expected inputs of {count} sequences, as block_table has, got others in "
                f"{', '.join(wrong)}"
            )
        side.fill(rows, given)
        self._staging.copy(side, self._staging.layouts[rows].num_bytes)
        self._graphs[rows, kind].replay()
        if kind != "logits":
            chosen = self._chosen[self.launched % 2]
            chosen[:count].copy_(self._ids[:count], non_blocking=True)
        side.event.record()
        self.launched += 1
        self._before = (count, kind)
        return Step(self, self.launched, count, kind)

    def read(self, step: Step) -> list[int]:
        """See ``Step.ids``."""
        if step.number + 2 <= self.launched:
            raise RuntimeError(
                "graph: expected ids to be read before two more steps are launched, got "
                f"{self.launched - step.number}"
            )
        before = step.number - 1
        self._staging.side(before)  # waits
        return [int(t) for t in self._chosen[before % 2][: step.count].tolist()]

    def _serving(self, kind: str) -> str:
        """The captured kind that costs least and chooses as ``kind`` does."""
        fine = [k for k in self._kinds if KINDS.index(k) >= KINDS.index(kind)]
        if not fine or (kind != "logits" and fine[0] == "logits"):
            raise ValueError(f"graph: expected a kind of {', '.join(self._kinds)}, got {kind}")
        return fine[0]

    def _captured(self, rows: int, kind: str, pool: Any) -> Any:
        self._staging.pad(rows)
        # Outside first: kernels are compiled and loaded, configs looked up. It is all padding, so
        # the cache stays as it is.
        self._compute(rows, kind)
        graph = device.new_graph()
        with device.capture(graph, pool=pool):
            self._compute(rows, kind)
        return graph

    def _compute(self, rows: int, kind: str) -> None:
        """The step, from the buffers of inputs to ``_ids`` or ``last_logits``."""
        at = self._staging.inputs[rows]
        ops = self.ops
        if self.watch is not None:  # a decode step is watched in all its rows
            ops = WatchedOps(self.watch, ops, at["groups"], at["groups"])
        meta = AttnMetadata(
            slot_mapping=at["slot_mapping"],
            block_table=at["block_table"],
            context_lens=at["context_lens"],
            cu_seqlens_q=self._cu_seqlens_q[: rows + 1],
            max_seqlen_q=1,
            starts_here=False,
            sdpa=None,
        )
        logits = forward(
            self.model,
            ops,
            self._words.index_select(0, at["places"]),
            at["positions"],
            self.cos_sin_cache,
            self.cache,
            meta,
            num_logits=None,  # a token a sequence: all of them
        )
        if self.watch is not None:
            ops.end()
        if kind == "logits":
            self.last_logits[:rows].copy_(logits)
            return
        if kind == "greedy":  # 16-bit logits rank, and tie, as they do in fp32
            torch.argmax(logits, dim=-1, out=self._ids[:rows])
            return
        sampling = SamplingRows(
            at["temperature"],
            at["top_k"],
            at["top_p"],
            at["min_p"],
            at["key"],
            at["positions"] + 1,
            any_narrowed=kind == "narrowed",
        )
        sample_rows(logits.float(), sampling, out=self._ids[:rows])


def _layout(rows: int, max_blocks: int) -> Layout:
    return Layout(
        {
            name: Field(dtype, (rows, max_blocks) if name == "block_table" else (rows,), padding)
            for name, (dtype, padding) in _FIELDS.items()
        }
    )
