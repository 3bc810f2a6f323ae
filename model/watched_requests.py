"""The engine's requests in the slots of a fallback: the slot of one that runs is its row.

So there is a slot for each that runs, the scheduler's free rows are the free slots, and a slot is
cleared when its request leaves it. A request's verdict does not depend on what else runs:

    prompts     are watched at places that their length decides, however they are cut into chunks.
                (A verdict within a prompt holds from its next chunk on, and where that begins other
                requests decide.)
    preemption  what was seen of a request waits with it, the verdict included. Tokens that are
                computed again are not watched again, and run as they did: in int8, but for those
                behind the verdict. So keys and values become what they were.
    samples     each goes on from what was seen of their prompt.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from model.fallback import PROMPT_ROWS, State, Watch, first_verdict
from model.kv_cache import Ints
from model.scheduler import Request

_NEVER = np.iinfo(np.int32).max


@dataclass
class _Seen:
    """What is known of a request."""

    request: Request
    stride: int  # of its prompt's tokens one in so many is watched
    slot: int = -1  # -1: it waits, with ``state``
    state: State | None = None
    computed: int = 0  # of its tokens, at least once; while it waits
    ends: list[int] = field(default_factory=list)  # of its prompt's chunks, in tokens

    def first_high(self, seen: int) -> int:
        """Its first token that ran in 16 bits, if the verdict came with the watched token ``seen``,
        counted from 1: that after the step of this one."""
        prompt = self.request.prompt_tokens
        in_prompt = -(-prompt // self.stride)
        if seen > in_prompt:  # a step each
            return prompt + seen - in_prompt
        return next(end for end in self.ends if end > (seen - 1) * self.stride)


class WatchedRequests:
    """Who is watched, and where.

    Args:
        num_rows: of the batch.
        most: tokens of a step.
        of_row: the request that has a row.

    Raises:
        ValueError: more requests may run than there are slots.
    """

    def __init__(
        self, watch: Watch, num_rows: int, most: int, of_row: Callable[[int], Request]
    ) -> None:
        if watch.n_slots < num_rows:
            raise ValueError(
                f"engine: expected a runner with a group for each of {num_rows} requests, got "
                f"{watch.n_slots} groups"
            )
        self._watch, self._most, self._of_row = watch, most, of_row
        self._seen: dict[tuple[int, int], _Seen] = {}  # that have run and have not ended
        self._in_slot: dict[int, _Seen] = {}
        self._computed, self._prompt, self._stride = np.zeros((3, num_rows), np.int64)

    def marks(self, rows: Ints, new: Ints, positions: Ints) -> Ints:
        """Of the tokens of a step, which is computed next: as ``Watch.step`` takes them.

        Waits for the device where tokens are computed again.

        Args:
            rows, new: whose tokens, and how many.
            positions: of each token.
        """
        for seen in list(self._in_slot.values()):
            if seen.request.row != seen.slot:
                self._put_away(seen)
        for row in rows.tolist():
            if row not in self._in_slot:
                self._enter(row)
        owner = np.repeat(rows, new)
        ends = positions[np.cumsum(new) - 1] + 1
        again = positions < self._computed[owner]
        marks = np.stack((owner, owner)).astype(np.int32)
        if again.any():
            low_before = np.zeros_like(self._computed)
            for row in np.unique(owner[again]).tolist():
                low_before[row] = self._low_before(row)
            marks[0, again & (positions < low_before[owner])] = -1
        left_out = (positions < self._prompt[owner]) & (positions % self._stride[owner] != 0)
        marks[1, again | left_out] = -1
        of_prompt = (ends - new < self._prompt[rows]) & (ends > self._computed[rows])
        for i in np.flatnonzero(of_prompt).tolist():
            self._in_slot[int(rows[i])].ends.append(int(ends[i]))
        self._computed[rows] = np.maximum(self._computed[rows], ends)
        return marks

    def fork(self, parent: Request, child: Request) -> None:
        """Another sample goes on from the prompt that its parent has just computed."""
        seen = self._seen[_name(parent)]
        self._seen[_name(child)] = _Seen(
            child,
            seen.stride,
            state=self._copy(seen.slot),
            computed=child.prompt_tokens,
            ends=list(seen.ends),
        )

    def leave(self, request: Request) -> dict[str, Any] | None:
        """A request ends, before it leaves its row: ``Watch.told`` of it."""
        seen = self._seen.pop(_name(request), None)
        if seen is None:
            return None
        if seen.slot < 0:
            assert seen.state is not None
            return self._watch.told(seen.state)
        found = self._watch.told(self._watch.state(seen.slot))
        self._clear(seen)
        return found

    def _enter(self, row: int) -> None:
        request = self._of_row(row)
        most = min(request.prompt_tokens, self._most)  # in a chunk
        seen = self._seen.setdefault(_name(request), _Seen(request, -(-most // PROMPT_ROWS)))
        if seen.state is not None:
            self._watch.put(row, seen.state)
            seen.state = None
        seen.slot, self._in_slot[row] = row, seen
        self._computed[row], self._prompt[row] = seen.computed, request.prompt_tokens
        self._stride[row] = seen.stride

    def _put_away(self, seen: _Seen) -> None:
        seen.state, seen.computed = self._copy(seen.slot), int(self._computed[seen.slot])
        self._clear(seen)

    def _clear(self, seen: _Seen) -> None:
        del self._in_slot[seen.slot]
        self._watch.reset(seen.slot)
        seen.slot = -1

    def _copy(self, slot: int) -> State:
        histogram, moments, counters = self._watch.state(slot)
        return histogram.clone(), moments.clone(), counters.clone()

    def _low_before(self, row: int) -> int:
        """Those of its tokens that are computed again run in int8 before this one."""
        verdict = first_verdict(self._watch.state(row))
        return _NEVER if verdict is None else self._in_slot[row].first_high(verdict[0])


def _name(request: Request) -> tuple[int, int]:
    return request.arrival, request.sample
