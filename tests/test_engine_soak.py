"""Many random requests at once on far too few pages: each answer is the one it would have alone."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from test_engine import (
    FOREVER,
    TIE,
    TIE_QUANTISED,
    VOCAB,
    assert_nothing_left,
    new_runner,
    one_thread,
)

import tkernels
from model.engine import Answer, Engine
from model.kv_cache import BLOCK_SIZE, SequenceState
from model.loop import Limits
from model.runner import Runner
from model.sampler import SamplingParams, SamplingRows, draw_scores, request_key

__all__ = ["one_thread"]  # a fixture of all tests


@dataclass
class Wish:
    """One request of the soak, and what becomes of it."""

    prompt: list[int]
    params: SamplingParams
    max_tokens: int
    eos: frozenset[int]
    samples: int
    priority: int

    @property
    def pages(self) -> int:
        return -(-(len(self.prompt) + self.max_tokens) // BLOCK_SIZE) * self.samples


def wishes(count: int, rng: random.Random) -> list[Wish]:
    """Half of the prompts begin with one of five prefixes; a third of the requests is drawn."""
    prefixes = [[rng.randrange(VOCAB) for _ in range(n)] for n in (16, 33, 48, 60, 7)]
    found = []
    for i in range(count):
        prompt = [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 60))]
        if rng.random() < 0.5:
            prompt = rng.choice(prefixes) + prompt
        drawn = SamplingParams(
            temperature=rng.choice((0.7, 1.0, 1.5)),
            top_k=rng.choice((0, 0, 20)),
            top_p=rng.choice((1.0, 1.0, 0.9)),
            seed=i,
        )
        found.append(
            Wish(
                prompt,
                drawn if rng.random() < 0.33 else SamplingParams(),
                rng.choice((1, 10, 30, 90)),
                FOREVER if rng.random() < 0.5 else frozenset(rng.sample(range(VOCAB), 6)),
                rng.choice((1,) * 9 + (3,)),
                rng.randrange(3),
            )
        )
    return found


def soak(engine: Engine, wanted: list[Wish], rng: random.Random) -> list[list[Answer]]:
    """Requests arrive over time; one in twelve is to be cancelled, wherever it is by then."""
    answers: list[list[Answer]] = []
    doomed: dict[int, int] = {}  # by step
    for step in itertools.count():
        if len(answers) == len(wanted) and not engine.has_work():
            return answers
        for wish in wanted[len(answers) : len(answers) + rng.randrange(60)]:
            number = engine.add(
                wish.prompt,
                wish.params,
                Limits(wish.max_tokens, wish.eos),
                n=wish.samples,
                priority=wish.priority,
            )
            assert number == len(answers)
            answers.append([])
            if rng.random() < 0.08:
                doomed[step + rng.randrange(20)] = number
        if step in doomed:
            engine.cancel(doomed[step])
        for answer in engine.step():
            answers[answer.id].append(answer)
    raise AssertionError


def assert_alone(runner: Runner, tie: float, wish: Wish, answer: Answer) -> int:
    """Each token is the one that its request alone would have had there: all in one prefill.

    Returns:
        How many are not, but as good as equal.
    """
    ids = answer.token_ids
    if not ids:
        assert answer.finish_reason == "cancelled"
        return 0
    stopped = ids[-1] in wish.eos
    assert not any(token in wish.eos for token in ids[:-1])
    if answer.finish_reason != "cancelled":
        assert answer.finish_reason == ("eos" if stopped else "length")
        assert stopped or len(ids) == wish.max_tokens
    first = len(wish.prompt)
    sequence = SequenceState([*wish.prompt, *ids[:-1]])
    logits = runner.prefill([sequence], all_logits=True)[first - 1 :]
    runner.release(sequence)
    p, count = wish.params, len(ids)
    rows = SamplingRows(
        torch.full((count,), p.temperature),
        torch.full((count,), p.top_k),
        torch.full((count,), p.top_p),
        torch.full((count,), p.min_p),
        torch.full((count,), request_key(p.seed or 0, answer.sample)),
        torch.arange(first, first + count),
        any_drawn=p.temperature > 0,
    )
    scores = draw_scores(logits, rows)
    taken = torch.tensor(ids)
    gap = scores.amax(-1) - scores.gather(1, taken[:, None])[:, 0]
    assert float(gap.max()) < tie, (answer, gap)
    return int((gap > 0).sum())


def run(count: int, mode: str, seed: int, ops: Any = None, *, graphs: bool = False) -> Engine:
    rng = random.Random(seed)
    wanted = wishes(count, rng)
    pages = max(sum(w.pages for w in wanted) // 10, max(w.pages for w in wanted))
    engine = Engine(
        new_runner(pages, mode, ops or tkernels.reference),
        graphs=graphs,
        max_num_seqs=max(32, count // 5),  # more than the pages would do for
        max_num_batched_tokens=max(300, count // 2),
        reserve=0.1,
    )
    found = soak(engine, wanted, rng)
    assert_nothing_left(engine)
    assert engine.counts.preemptions > count / 100
    assert engine.counts.found_tokens > count
    assert sum(a.finish_reason == "cancelled" for answers in found for a in answers) > count / 100
    alone, ties, tokens = new_runner(16, mode), 0, 0
    tie = TIE if mode == "none" else TIE_QUANTISED
    for wish, answers in zip(wanted, found, strict=True):
        begun = [a.sample for a in answers]
        whole = all(a.finish_reason != "cancelled" for a in answers)
        assert sorted(begun) == list(range(wish.samples if whole else len(begun)))
        for answer in answers:
            ties += assert_alone(alone, tie, wish, answer)
            tokens += len(answer.token_ids)
    assert tokens > 10 * count
    assert ties <= 1 + tokens * (1e-4 if mode == "none" else 1e-3)
    return engine


@pytest.mark.parametrize(("count", "mode"), [(60, "none"), (25, "int8_fp4")])
def test_soak(count: int, mode: str) -> None:
    run(count, mode, 0)


@pytest.mark.slow
@pytest.mark.parametrize(("count", "mode"), [(2000, "none"), (300, "int8_fp4")])
def test_long_soak(count: int, mode: str) -> None:
    run(count, mode, 1)
