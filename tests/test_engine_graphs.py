"""The engine with captured steps, whole and in pieces: the same answers as without."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import test_engine as plain
import test_engine_soak as soak
from graphs import Launched, stand_in

import tkernels
from model.engine import Answer, Engine
from model.graph import Step
from model.loop import Limits
from model.sampler import SamplingParams
from model.threads import cpu_threads
from tkernels import device

OPS = Launched(tkernels.reference)
WISHES = [
    SamplingParams(),
    SamplingParams(temperature=1.2, seed=3),
    SamplingParams(temperature=2.0, top_k=40, top_p=0.9, min_p=0.01, seed=4),
    SamplingParams(temperature=1.0, repetition_penalty=1.3, seed=5),
    SamplingParams(repetition_penalty=1.5),
]


@pytest.fixture(autouse=True)
def _graphs() -> Iterator[None]:
    if device.KIND != "cpu":
        pytest.skip("the stand-in's tensors are on the CPU")
    with stand_in(), cpu_threads(1):  # a second thread would only be waited for
        yield


def answered(engine: Engine, wishes: list[SamplingParams], n: int) -> list[Answer]:
    """Requests that come while others run, with prompts that end at and beside a block's end."""
    answers: dict[tuple[int, int], Answer] = {}
    for i, params in enumerate(wishes):
        engine.add(
            plain.ids(14 + i, seed=i), params, Limits(9 + 3 * i, plain.FOREVER), n=n if i else 1,
            on_token=(lambda *_: None) if i % 2 else None,
        )  # fmt: skip
        for answer in engine.step() + engine.step():
            answers[answer.id, answer.sample] = answer
    answers |= plain.run_all(engine)
    return [answers[key] for key in sorted(answers)]


@pytest.mark.parametrize(
    ("mode", "n"),
    [
        ("none", 3),
        ("int8_fp4", 1),
        pytest.param("none", 1, marks=pytest.mark.slow),
        pytest.param("int8_fp4", 3, marks=pytest.mark.slow),
    ],
)
def test_answers_are_the_same(mode: str, n: int) -> None:
    sizes: dict[str, Any] = {"max_num_seqs": 8, "max_num_batched_tokens": 24}
    expected = answered(plain.new_engine(64, mode, **sizes), WISHES, n)
    engine = plain.new_engine(64, mode, OPS, graphs=True, **sizes)
    assert engine.graphs is not None
    found = answered(engine, WISHES, n)
    assert engine.graphs.launched > 20
    assert engine.runner.prompts is not None
    assert engine.runner.prompts.launched >= 5
    if mode == "none":
        assert found == expected
    else:  # a number on the edge of two codes may take the other one
        assert [len(a.token_ids) for a in found] == [len(a.token_ids) for a in expected]
        same = sum(a.token_ids == b.token_ids for a, b in zip(found, expected, strict=True))
        assert same > len(found) // 2


def test_the_next_step_is_launched_before_tokens_are_read() -> None:
    engine = plain.new_engine(64, ops=OPS, graphs=True, max_num_seqs=8)
    graphs = engine.graphs
    assert graphs is not None
    read, ahead = graphs.read, []

    def reading(step: Step) -> list[int]:
        ahead.append(graphs.launched - step.number)
        return read(step)

    graphs.read = reading  # type: ignore[method-assign]
    lengths = (20, 25, 30)
    for i, length in enumerate(lengths):
        engine.add(plain.ids(14 + i, seed=i), limits=Limits(length, plain.FOREVER))
    answers = plain.run_all(engine)
    assert [len(a.token_ids) for a in answers.values()] == list(lengths)
    # All but the last; as ends by length are known in time, nothing was launched in vain.
    assert ahead == [1] * (max(lengths) - 2) + [0]
    assert graphs.launched == engine.counts.steps - 1  # that of the prompts is none
    for i in range(3):
        plain.assert_alone(answers[i, 0], plain.ids(14 + i, seed=i))


def test_steps_that_come_otherwise_than_foreseen() -> None:
    """Ends that nobody knew of, requests that come or are cancelled between two steps."""
    engine = plain.new_engine(64, ops=OPS, graphs=True, max_num_seqs=8)
    prompts = [plain.ids(14 + i, seed=i) for i in range(6)]
    (whole,) = plain.new_engine(64).generate(prompts[:1], limits=Limits(30, plain.FOREVER))
    eos = frozenset(whole.token_ids[7:8])
    for i in (0, 1):
        engine.add(prompts[i], limits=Limits(30, eos))
    answers = {}
    for i in range(40):
        if i in (3, 9, 16):
            engine.add(prompts[2 + i // 6], limits=Limits(30, eos))
        if i == 12:
            engine.cancel(1)
        for answer in engine.step():
            answers[answer.id] = answer
    answers |= {number: answer for (number, _), answer in plain.run_all(engine).items()}
    assert answers[0].finish_reason == "eos"
    assert answers[1].finish_reason in ("cancelled", "eos")
    for number, i in enumerate((0, 1, 2, 3, 4)):
        plain.assert_alone(answers[number], prompts[i], eos=eos)


@pytest.mark.slow
@pytest.mark.parametrize(("count", "mode"), [(100, "none"), (30, "int8_fp4")])
def test_soak(count: int, mode: str) -> None:
    engine = soak.run(count, mode, 2, OPS, graphs=True)
    assert engine.graphs is not None
    assert engine.graphs.launched > engine.counts.steps / 4
