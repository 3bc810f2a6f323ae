"""The engine with captured steps: the same answers, whatever runs beside them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import test_engine as plain
from graphs import Launched, stand_in

import tkernels
from model.engine import Answer, Engine
from model.loop import Limits
from model.sampler import SamplingParams
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
    with stand_in():
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


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("mode", ["none", "int8_fp4"])
def test_answers_are_the_same(mode: str, n: int) -> None:
    sizes: dict[str, Any] = {"max_num_seqs": 8, "max_num_batched_tokens": 24}
    expected = answered(plain.new_engine(64, mode, **sizes), WISHES, n)
    engine = plain.new_engine(64, mode, OPS, graphs=True, **sizes)
    assert engine.graphs is not None
    found = answered(engine, WISHES, n)
    assert engine.graphs.launched > 20
    if mode == "none":
        assert found == expected
    else:  # a number on the edge of two codes may take the other one
        assert [len(a.token_ids) for a in found] == [len(a.token_ids) for a in expected]
        same = sum(a.token_ids == b.token_ids for a, b in zip(found, expected, strict=True))
        assert same > len(found) // 2
