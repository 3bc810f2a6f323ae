"""Decode steps of the loop's batch by graphs, each launched before the ids of the last are read.

Which sequences take part in a step is known one step late: one that the token now on its way ends
takes part once more, and what comes of that is thrown away. It writes to its own blocks, which are
given back after it, in the order of the device's work. Sequences that end by their length are known
in time. So the device never waits for the host, unless the host takes longer than a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from model.graph import Choice, DecodeGraphs, Step
from model.kv_cache import BLOCK_SIZE, SequenceState
from model.runner import Runner
from model.sampler import SamplingParams, sample


class Ahead:
    """Tokens of a runner's sequences, by graphs.

    With a repetition penalty, which needs all tokens so far, and with a watch, whose reports would
    count the token too many, a step is launched when the last one is done with.
    """

    def __init__(self, runner: Runner, graphs: DecodeGraphs, params: SamplingParams) -> None:
        self._runner, self._graphs, self._params = runner, graphs, params
        self._penalises = params.repetition_penalty != 1
        self._runs_ahead = not self._penalises and runner.watch is None
        self._step: Step | None = None
        self._rows: list[SequenceState] = []  # of the step that was launched last

    def tokens(
        self, sequences: Sequence[SequenceState], keys: Sequence[int], ending: Sequence[bool]
    ) -> list[int]:
        """The next token of each sequence; ``ending``: those that end with it for certain."""
        places = {id(s): i for i, s in enumerate(self._rows)} if self._step else {}
        step, self._step = self._step, None
        if step is None or any(id(s) not in places for s in sequences):
            step = self._launch(sequences, keys, [s.token_ids[-1] for s in sequences])
            places = {id(s): i for i, s in enumerate(sequences)}
        if self._penalises:
            return sample(step.logits(), self._params, [s.token_ids for s in sequences], keys)
        rows = [places[id(s)] for s in sequences]
        going = [i for i, ends in enumerate(ending) if not ends]
        if self._runs_ahead and going:
            chosen = [-1 - rows[i] for i in going]  # not read yet
            following = [sequences[i] for i in going]
            self._step = self._launch(following, [keys[i] for i in going], chosen)
        found = step.ids()
        return [found[row] for row in rows]

    def _launch(
        self, sequences: Sequence[SequenceState], keys: Sequence[int], ids: list[int]
    ) -> Step:
        """Compute the token after those that are in the cache of each sequence."""
        inputs = step_inputs(self._runner, sequences)
        for s in sequences:
            s.num_computed += 1
        self._rows = list(sequences)
        return self._graphs.decode(
            np.array(ids),
            **inputs,
            choice=None if self._penalises else choice_of(self._params, keys),
            logits=self._penalises,
        )


def step_inputs(runner: Runner, sequences: Sequence[SequenceState]) -> dict[str, Any]:
    """What ``DecodeGraphs.decode`` wants of a token after those in the cache, which gets room."""
    positions = np.array([s.num_computed for s in sequences])
    for s in sequences:
        runner.blocks.grow(s.block_ids, s.num_computed + 1)
    table = np.zeros((len(sequences), max(len(s.block_ids) for s in sequences)), np.int32)
    for row, s in zip(table, sequences, strict=True):
        row[: len(s.block_ids)] = s.block_ids
    blocks = table[np.arange(len(table)), positions // BLOCK_SIZE].astype(np.int64)
    return {
        "positions": positions,
        "slot_mapping": blocks * BLOCK_SIZE + positions % BLOCK_SIZE,
        "block_table": table,
        "context_lens": positions + 1,
        "groups": None if runner.watch is None else np.array([s.group for s in sequences]),
    }


def kind_of(params: SamplingParams) -> str:
    """The kind of graph that ``Ahead`` wants."""
    return "logits" if params.repetition_penalty != 1 else choice_of(params, [0]).kind


def choice_of(params: SamplingParams, keys: Sequence[int]) -> Choice:
    """How requests of one ``SamplingParams`` choose."""
    count = len(keys)
    return Choice(
        np.full(count, params.temperature, np.float32),
        np.full(count, params.top_k),
        np.full(count, params.top_p, np.float32),
        np.full(count, params.min_p, np.float32),
        np.array(keys, np.int64),
    )
