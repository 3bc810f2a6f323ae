"""Who takes part in a step of the engine, and whose pages they use. Nothing here is computed.

Requests are in the order of (priority, arrival): those that run, and those that wait. A request
that runs has a row of the batch, and pages for all tokens that it has so far.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from model.batch import Batch
from model.kv_cache import BLOCK_SIZE, Ints
from model.loop import Limits
from model.pages import PagePool, digests
from model.sampler import SamplingParams, request_key
from model.tokenizer import Detokenizer

OnToken = Callable[[int, int, str], None]  # (sample, token, text that is certain by now)


@dataclass
class Counts:
    """Sums over all steps."""

    steps: int = 0
    computed_tokens: int = 0  # that the network worked on, those computed again included
    found_tokens: int = 0  # that were in the cache when a request (re)started
    attended_tokens: int = 0  # in the cache, whose keys and values a step's requests see
    new_tokens: int = 0
    preemptions: int = 0


@dataclass(order=True)
class Request:
    """One sample on its way. In order: who goes first."""

    priority: int
    arrival: int  # the request's number too
    sample: int
    tokens: Ints = field(compare=False)  # all that are known, while it does not run
    prompt_tokens: int = field(compare=False)
    params: SamplingParams = field(compare=False)
    limits: Limits = field(compare=False)
    end: int = field(compare=False)  # so many tokens are its last
    seed: int = field(compare=False)
    samples: int = field(compare=False)  # that start when the prompt is computed, this one included
    detokenizer: Detokenizer | None = field(compare=False)
    on_token: OnToken | None = field(compare=False)
    text: str = field(default="", compare=False)
    names: list[bytes] = field(default_factory=list, compare=False)  # digests of its full pages
    row: int = field(default=-1, compare=False)  # of the batch; -1: it waits
    over: bool = field(default=False, compare=False)

    @property
    def special(self) -> bool:
        """Whether the next token has to be looked at on its own, in Python."""
        listened = self.on_token is not None or bool(self.limits.stop)
        return listened or self.samples > 1 or self.params.repetition_penalty != 1

    @property
    def key(self) -> int:
        return request_key(self.seed, self.sample)


class Scheduler:
    """Requests that wait and that run, over ``pool`` and ``batch``; see the engine for the rest."""

    def __init__(
        self,
        pool: PagePool,
        batch: Batch,
        max_num_batched_tokens: int,
        reserve: float,
        prompt_tokens_beside: int | None = None,
    ) -> None:
        self.pool, self.batch, self.reserve = pool, batch, reserve
        self.max_num_batched_tokens = max_num_batched_tokens
        self.prompt_tokens_beside = prompt_tokens_beside
        self.counts = Counts()
        self.running: list[Request] = []  # in order
        self.waiting: list[Request] = []  # a heap; what was cancelled stays until it comes up
        self._of_row: list[Request | None] = [None] * len(batch.num_tokens)
        self._free_rows = list(range(len(batch.num_tokens)))[::-1]
        self._rows: Ints | None = None  # of what runs, in order
        self._entries = itertools.count(1)

    def wait(self, request: Request) -> None:
        heapq.heappush(self.waiting, request)

    def of_row(self, row: int) -> Request:
        """The request that has a row."""
        request = self._of_row[row]
        assert request is not None
        return request

    def schedule(self) -> tuple[Ints, Ints]:
        """Rows and how many of their next tokens. Their pages are there."""
        batch, budget = self.batch, self.max_num_batched_tokens
        # A step that had to take pages away from a request gives none to another.
        may_start = self._grow()
        if may_start:
            self._preempt_for_better()
        rows = self._running_rows()
        left = batch.num_tokens[rows] - batch.num_computed[rows]
        decoding = left == 1
        prompts, missing = rows[~decoding], left[~decoding]
        going = self._longest_first(rows[decoding])
        budget -= int(decoding.sum())
        if self.prompt_tokens_beside is not None and decoding.any():
            budget = min(budget, self.prompt_tokens_beside)
        chunks = np.clip(budget - (np.cumsum(missing) - missing), 0, missing)
        budget -= int(chunks.sum())
        rows = np.concatenate((going, prompts[chunks > 0]))
        new = np.concatenate((np.ones_like(going), chunks[chunks > 0]))
        self._publish(rows, new)
        while budget and (may_start or not self.running):
            request = self._next_waiting()
            if request is None or not self._fits(request):
                break
            row = self._start(request)
            count = min(int(batch.num_tokens[row] - batch.num_computed[row]), budget)
            budget -= count
            rows, new = np.append(rows, row), np.append(new, count)
            self._publish(rows[-1:], new[-1:])
        return rows, new

    def _longest_first(self, rows: Ints) -> Ints:
        """Attention takes up sequences in order, and those that begin last should not last long."""
        longest: Ints = rows[np.argsort(-self.batch.num_tokens[rows], kind="stable")]
        return longest

    def _running_rows(self) -> Ints:
        if self._rows is None:
            self._rows = np.array([r.row for r in self.running], dtype=np.int64)
        return self._rows

    def _grow(self) -> bool:
        """A page for each running request whose next token needs one, the first in order first.

        False when requests had to be preempted for that.
        """
        batch, rows, enough = self.batch, self._running_rows(), True
        short = batch.num_tokens[rows] > batch.num_blocks[rows] * BLOCK_SIZE
        for row in rows[short]:
            while self._of_row[row] is not None and self.pool.available == 0:
                self._preempt(self.running[-1])  # perhaps the request itself
                enough = False
            if self._of_row[row] is not None:
                batch.block_table[row, batch.num_blocks[row]] = self.pool.take(1)[0]
                batch.num_blocks[row] += 1
        return enough

    def look_ahead(self, rows: Ints) -> Ints:
        """Rows of the step behind one in which each of ``rows`` gets a token, as far as is known.

        Those that do not end by their length, with a page for the token where they need one. None,
        if another request is going to start, or pages do not suffice.
        """
        batch = self.batch
        going = rows[batch.num_tokens[rows] + 1 < batch.end[rows]]
        request = self._next_waiting()
        if request is not None and (len(going) < len(rows) or self._fits(request)):
            return going[:0]
        short = going[batch.num_tokens[going] >= batch.num_blocks[going] * BLOCK_SIZE]
        if len(short) > self.pool.available:
            return going[:0]
        batch.block_table[short, batch.num_blocks[short]] = self.pool.take(len(short))
        batch.num_blocks[short] += 1
        return going

    def _preempt_for_better(self) -> None:
        """Make room for the next waiting request, of those that are of a worse priority."""
        request = self._next_waiting()
        if request is None or not self._worse(request) or self._fits(request):
            return
        rows = [r.row for r in self._worse(request)]
        held = self.batch.num_blocks[rows]
        kept = np.maximum(self.batch.target_blocks[rows] - held, 0)
        if self._wanted(request) > self._spare() + int((held + kept).sum()):
            return  # even all of their pages would not do
        while self._worse(request) and not self._fits(request):
            self._preempt(self.running[-1])

    def _worse(self, request: Request) -> list[Request]:
        """Running requests that may be preempted for this one: the last ones in order."""
        return [r for r in self.running if r.priority > request.priority]

    def _next_waiting(self) -> Request | None:
        while self.waiting and self.waiting[0].over:
            heapq.heappop(self.waiting)
        return self.waiting[0] if self.waiting else None

    def target(self, request: Request) -> int:
        """Pages to keep for a request, ``reserve`` decides for how many tokens to come."""
        length = len(request.tokens)
        last = length + math.ceil(self.reserve * (request.end - 1 - length))
        return pages_of(max(last, length))

    def _found(self, request: Request) -> list[int]:
        """Pages in the cache with its first tokens; one token at least is left to compute."""
        if not self.pool.prefix_cache:
            return []
        request.names = digests(request.tokens, BLOCK_SIZE, request.names)
        return self.pool.find(request.names[: (len(request.tokens) - 1) // BLOCK_SIZE])

    def _spare(self) -> int:
        """Pages that are neither taken nor kept for running requests."""
        rows, batch = self._running_rows(), self.batch
        kept = np.maximum(batch.target_blocks[rows] - batch.num_blocks[rows], 0).sum()
        return self.pool.available - int(kept)

    def _wanted(self, request: Request) -> int:
        """Pages to keep for a request and the samples that will go on from its prompt."""
        target = self.target(request)
        more = (request.samples - 1) * (target - request.prompt_tokens // BLOCK_SIZE)
        return min(target + more, self.pool.num_pages)

    def _fits(self, request: Request) -> bool:
        if not self._free_rows:
            return False
        held = sum(self.pool.owners[page] > 0 for page in self._found(request))
        return self._wanted(request) - held <= self._spare()

    def _start(self, request: Request) -> int:
        """Give the first waiting request, which fits, a row, and pages for the tokens it has."""
        heapq.heappop(self.waiting)
        found = self._found(request)
        self.pool.share(found)
        blocks = found + self.pool.take(pages_of(len(request.tokens)) - len(found))
        self._enter(request, blocks, len(found) * BLOCK_SIZE, self._wanted(request))
        self.counts.found_tokens += len(found) * BLOCK_SIZE
        return request.row

    def _enter(self, request: Request, blocks: list[int], computed: int, target: int) -> None:
        """A request begins to run with these blocks, of which so many tokens are computed."""
        row, batch = self._free_rows.pop(), self.batch
        request.row, self._of_row[row] = row, request
        bisect.insort(self.running, request)
        self._rows = None
        batch.tokens[row, : len(request.tokens)] = request.tokens
        batch.block_table[row, : len(blocks)] = blocks
        batch.num_tokens[row], batch.num_computed[row] = len(request.tokens), computed
        batch.num_blocks[row], batch.target_blocks[row] = len(blocks), target
        batch.end[row], batch.entry[row] = request.end, next(self._entries)
        batch.set_sampling(row, request.params, request.key)
        batch.set_eos(row, request.limits.eos_ids)
        batch.special[row] = request.special

    def fork(self, parent: Request, child: Request) -> int | None:
        """A sample goes on from its parent's prompt, which is computed, if there is room; else it
        waits.

        Returns:
            Where it got a page of its own, that the prompt's last page has to be copied to.
        """
        blocks, whole = self.batch.blocks_of(parent.row), parent.prompt_tokens // BLOCK_SIZE
        target = self.target(child)
        if not self._free_rows or target - whole > self._spare():
            self.wait(child)
            return None
        self.pool.share(blocks[:whole])
        last = self.pool.take(pages_of(parent.prompt_tokens) - whole)
        self._enter(child, blocks[:whole] + last, whole * BLOCK_SIZE, target)
        return last[0] if last else None

    def leave(self, request: Request) -> None:
        """A request no longer runs: its tokens are kept, its pages given back."""
        row = request.row
        request.tokens = self.batch.tokens_of(row).copy()
        self.pool.give(self.batch.blocks_of(row))
        self.running.remove(request)
        self._rows = None
        self._of_row[row], request.row = None, -1
        self._free_rows.append(row)

    def _preempt(self, request: Request) -> None:
        self.leave(request)
        self.wait(request)
        self.counts.preemptions += 1

    def _publish(self, rows: Ints, new: Ints) -> None:
        """Pages that this step fills are found from now on."""
        if not self.pool.prefix_cache:
            return
        batch = self.batch
        before = batch.num_computed[rows] // BLOCK_SIZE
        after = (batch.num_computed[rows] + new) // BLOCK_SIZE
        for i in np.flatnonzero(after > before):
            request = self.of_row(rows[i])
            if len(request.names) < after[i]:
                tokens = batch.tokens[rows[i], : after[i] * BLOCK_SIZE]
                request.names = digests(tokens, BLOCK_SIZE, request.names)
            for j in range(before[i], after[i]):
                self.pool.publish(int(batch.block_table[rows[i], j]), request.names[j])


def pages_of(tokens: int) -> int:
    """How many pages hold so many tokens."""
    return -(-tokens // BLOCK_SIZE)
