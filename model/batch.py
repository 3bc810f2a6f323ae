"""The requests that run, a row each, in arrays that are made once.

A decode step reads and writes whole columns: which tokens come next, where their keys and values
go, how each request samples, which ones have ended. Python looks at a single request only where
something happens to it: it comes or goes, fills a block, or streams its text.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from model.graph import Choice
from model.kv_cache import BLOCK_SIZE, Ints, StepArrays, slots_of
from model.sampler import SamplingParams, SamplingRows


class Batch:
    """Rows for ``max_num_seqs`` requests of at most ``max_positions`` tokens."""

    def __init__(self, max_num_seqs: int, max_positions: int, max_num_batched_tokens: int) -> None:
        rows, blocks = max_num_seqs, -(-max_positions // BLOCK_SIZE)
        self.tokens = np.zeros((rows, max_positions), np.int32)  # prompt and what was generated
        self.block_table = np.zeros((rows, blocks), np.int32)
        self.num_tokens = np.zeros(rows, np.int32)
        self.num_computed = np.zeros(rows, np.int32)  # how many of them are in the cache
        self.num_blocks = np.zeros(rows, np.int32)
        self.target_blocks = np.zeros(rows, np.int32)  # blocks that are kept for it
        self.end = np.zeros(rows, np.int32)  # so many tokens are its last
        self.entry = np.zeros(rows, np.int64)  # a number that no other stay in a row has
        self.special = np.zeros(rows, np.bool_)  # looked at one by one after each token
        self.eos_ids = np.full((rows, 1), -1, np.int32)  # as many columns as the longest list
        self.temperature = np.zeros(rows, np.float32)
        self.top_k = np.zeros(rows, np.int64)
        self.top_p = np.ones(rows, np.float32)
        self.min_p = np.zeros(rows, np.float32)
        self.key = np.zeros(rows, np.int64)
        self._per_token = np.zeros((3, max_num_batched_tokens), np.int64)
        self._table = np.zeros(rows * blocks, np.int32)
        self._per_row = np.zeros((2, rows + 1), np.int32)

    def set_sampling(self, row: int, params: SamplingParams, key: int) -> None:
        self.temperature[row], self.top_k[row] = params.temperature, params.top_k
        self.top_p[row], self.min_p[row] = params.top_p, params.min_p
        self.key[row] = key

    def set_eos(self, row: int, eos_ids: frozenset[int]) -> None:
        """The tokens that end a request; the table widens for the longest list of all."""
        missing = len(eos_ids) - self.eos_ids.shape[1]
        if missing > 0:
            self.eos_ids = np.pad(self.eos_ids, ((0, 0), (0, missing)), constant_values=-1)
        self.eos_ids[row] = -1
        self.eos_ids[row, : len(eos_ids)] = sorted(eos_ids)

    def blocks_of(self, row: int) -> list[int]:
        """The blocks that a row holds, in the order of its tokens."""
        blocks: list[int] = self.block_table[row, : self.num_blocks[row]].tolist()
        return blocks

    def tokens_of(self, row: int) -> Ints:
        return self.tokens[row, : self.num_tokens[row]]

    def step(self, rows: Ints, new: Ints) -> StepArrays:
        """The next ``new[i]`` tokens of the request in ``rows[i]``, in buffers of this object."""
        count, total = len(rows), int(new.sum())
        ids, positions, slots = self._per_token[:, :total]
        starts, context = self._per_row[0, : count + 1], self._per_row[1, :count]
        np.cumsum(new, out=starts[1:])
        owner = np.repeat(np.arange(count), new)
        computed = self.num_computed[rows]
        np.add(computed, new, out=context)
        np.add(np.arange(total), (computed - starts[:-1])[owner], out=positions)
        ids[:] = self.tokens[rows[owner], positions]
        slots[:] = slots_of(self.block_table, rows[owner], positions)
        width = -(-int(context.max()) // BLOCK_SIZE)
        table = self._table[: count * width].reshape(count, width)
        # Past a row's own blocks stand those of requests before it: numbers of blocks as well.
        table[:] = self.block_table[rows, :width]
        return StepArrays(ids, positions, slots, table, context, starts)

    def choice(self, rows: Ints) -> Choice:
        """How the next token of each row is drawn, for a captured step."""
        return Choice(
            self.temperature[rows], self.top_k[rows], self.top_p[rows], self.min_p[rows],
            self.key[rows],
        )  # fmt: skip

    def sampling(self, rows: Ints, keys: Ints, device: torch.device) -> SamplingRows:
        """How the next token of each row is drawn; ``keys`` take the place of the rows' own."""

        def put(values: Any) -> torch.Tensor:
            return torch.from_numpy(values).to(device, non_blocking=True)

        drawn = self.temperature[rows] > 0
        narrowed = (self.top_k[rows] > 0) | (self.top_p[rows] < 1) | (self.min_p[rows] > 0)
        return SamplingRows(
            put(self.temperature[rows]),
            put(self.top_k[rows]),
            put(self.top_p[rows]),
            put(self.min_p[rows]),
            put(keys),
            put(self.num_tokens[rows].astype(np.int64)),
            any_drawn=bool(drawn.any()),
            any_narrowed=bool((drawn & narrowed).any()),
        )
