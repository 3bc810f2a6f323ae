"""The engine with a fallback: each request has the verdict, and the answer, that it has alone."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import load_folder, make_folder
from graphs import Launched, stand_in

import tkernels
from model import calibrate_watch, cpu_ops, fallback, generate, quantize, watched_requests
from model.engine import Answer, Engine
from model.fallback import Calibration
from model.kv_cache import SequenceState
from model.loop import Limits
from model.qwen3 import Linear, Model
from model.runner import Runner
from model.scheduler import Request
from model.threads import cpu_threads
from model.watched_requests import WatchedRequests
from tkernels import device

WINDOW = 16
BAD = 330  # a token whose embedding is one row of an up projection: outliers in down_proj's input
COUNT = 14  # new tokens of each request


def ids(count: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(BAD, (count,), generator=generator).tolist()


# The verdict of the bad request comes with its 16th token, which is its fifth new one.
PROMPTS = [ids(9, 1), [BAD] * 8 + ids(3, 2), ids(20, 3), ids(3, 4)]
FAULTY = 1


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = make_folder(tmp_path_factory.mktemp("base") / "m", None, "llama-32")
    out = tmp_path_factory.mktemp("w8a8") / "m"
    argv = ["--model", str(base), "--scheme", "w8a8", "--out", str(out), "--json"]
    assert quantize.main(argv) == 0
    return out


@pytest.fixture(scope="module")
def model(folder: Path) -> Model:
    found = load_folder(folder)
    table = found.embed_tokens
    assert isinstance(table, torch.Tensor)
    found.lm_head = Linear(table.clone())  # it has been the same
    gate_up: Any = found.layers[0].gate_up_proj
    row = gate_up.weight.codes[len(gate_up.weight.codes) // 2 + 3].float()
    table[BAD] = row / found.layers[0].post_attention_layernorm * 10
    return found


@pytest.fixture(scope="module")
def calibration(model: Model) -> Calibration:
    made = calibrate_watch.calibrate(model, cpu_ops, ids(192, 0), (0, 2))
    return dataclasses.replace(made, kl_above=0.12, skewness_above=1e9)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(fallback, "WINDOW", WINDOW)
    with cpu_threads(1):
        yield


@dataclasses.dataclass
class Alone:
    """What a request does that nothing runs beside: tokens, report, keys of the last layer."""

    tokens: list[int]
    report: dict[str, Any] | None
    keys: torch.Tensor


def runner_of(model: Model, calibration: Calibration | None, **more: Any) -> Runner:
    sizes: dict[str, Any] = {"num_blocks": 32, "max_positions": 64, "num_groups": 4, **more}
    return Runner(model, sizes.pop("ops", cpu_ops), fallback=calibration, **sizes)


@pytest.fixture(scope="module")
def alone(model: Model, calibration: Calibration) -> Any:
    @functools.cache
    def one(prompt: tuple[int, ...], watched: bool = True) -> Alone:
        runner = runner_of(model, calibration if watched else None)
        sequence = SequenceState(list(prompt))
        logits = runner.prefill([sequence])
        for i in range(COUNT):
            sequence.token_ids.append(int(logits.argmax()))
            if i + 1 < COUNT:
                logits = runner.decode([sequence])
        report = runner.watch.report(sequence) if runner.watch is not None else None
        keys = keys_of(runner, sequence.block_ids, sequence.num_computed)
        return Alone(sequence.token_ids[len(prompt) :], report, keys)

    return lambda prompt, watched=True: one(tuple(prompt), watched)


def keys_of(runner: Runner, blocks: list[int], count: int) -> torch.Tensor:
    cache = runner.cache.k[-1]
    assert isinstance(cache, torch.Tensor)
    return cache[blocks].flatten(0, 1)[:count].clone()


def engine_of(model: Model, calibration: Calibration, **more: Any) -> Engine:
    given = {name: more.pop(name) for name in ("num_blocks", "ops") if name in more}
    return Engine(runner_of(model, calibration, **given), **{"max_num_seqs": 4, **more})


def answers_of(engine: Engine, prompts: list[list[int]], n: int = 1) -> list[Answer]:
    return engine.generate(prompts, limits=Limits(COUNT, frozenset()), n=n)


def assert_as_alone(answers: list[Answer], prompts: list[list[int]], alone: Any) -> None:
    for answer, prompt in zip(answers, prompts, strict=True):
        expected = alone(prompt)
        assert answer.token_ids == expected.tokens
        assert_told_alike(answer.fallback, expected.report)


def assert_told_alike(one: dict[str, Any] | None, other: dict[str, Any] | None) -> None:
    """But for rounding."""
    figures = ("kl", "skewness")
    assert one == (
        other
        and {
            name: pytest.approx(value, rel=1e-3, abs=1e-4) if name in figures else value
            for name, value in other.items()
        }
    )


def assert_clean(engine: Engine) -> None:
    watch = engine.runner.watch
    assert watch is not None
    assert not engine.has_work()
    assert not any(
        part.any() for part in (watch.histogram, watch.moments, watch.counters, watch.mask)
    )
    assert engine.watched is not None
    assert not engine.watched._seen
    assert not engine.watched._in_slot


def test_alone_only_the_faulty_request_falls_back(alone: Any) -> None:
    """What the other tests compare with; and 16 bits make a difference."""
    reports = [alone(prompt).report for prompt in PROMPTS]
    assert [r is not None for r in reports] == [i == FAULTY for i in range(len(PROMPTS))]
    faulty = PROMPTS[FAULTY]
    assert reports[FAULTY]["token"] == WINDOW
    low = alone(faulty, watched=False).keys
    assert torch.equal(alone(faulty).keys[:WINDOW], low[:WINDOW])
    assert float((alone(faulty).keys - low)[WINDOW:].abs().max()) > 1e-2


@pytest.mark.parametrize("budget", [4, 7, 64])
def test_answers_and_verdicts_equal_those_alone(
    model: Model, calibration: Calibration, alone: Any, budget: int
) -> None:
    engine = engine_of(model, calibration, max_num_batched_tokens=budget)
    assert_as_alone(answers_of(engine, PROMPTS), PROMPTS, alone)
    assert_clean(engine)


def test_slots_are_used_again_clean(model: Model, calibration: Calibration, alone: Any) -> None:
    """One slot; a cancelled request leaves it clean, too."""
    engine = engine_of(model, calibration, max_num_seqs=1)
    prompts = [PROMPTS[FAULTY], *PROMPTS]
    assert_as_alone(answers_of(engine, prompts), prompts, alone)
    number = engine.add(PROMPTS[FAULTY], limits=Limits(COUNT, frozenset()))
    for _ in range(9):
        assert engine.step() == []
    assert engine.runner.watch is not None
    assert int(engine.runner.watch.mask) == 1
    engine.cancel(number)
    (answer,) = engine.step()
    assert answer.fallback is not None
    assert answer.fallback["token"] == WINDOW
    assert_clean(engine)


@pytest.mark.parametrize("steps", [2, 5, 6, 7, 11])
@pytest.mark.parametrize("beside", [False, True])
def test_a_verdict_outlives_preemption(
    model: Model, calibration: Calibration, alone: Any, steps: int, beside: bool
) -> None:
    """Preempted before, at and after the verdict, and again later, into the same row or another.

    Keys that were computed again are those of the request alone: of int8, then of 16 bits.
    """
    engine = engine_of(model, calibration, max_num_batched_tokens=64)
    prompts = [PROMPTS[FAULTY], *(PROMPTS[2:3] if beside else [])]
    limits = Limits(COUNT, frozenset())
    numbers = [engine.add(prompt, limits=limits) for prompt in prompts]
    scheduler, found, compared = engine._scheduler, dict[int, Answer](), 0
    rows = set()
    for step in range(40):
        if step in (steps, steps + 2):
            for request in list(scheduler.running):
                scheduler._preempt(request)
        for answer in engine.step():
            found[answer.id] = answer
        for request in scheduler.running:
            if request.arrival == numbers[0]:
                rows.add(request.row)
                count = int(engine.batch.num_computed[request.row])
                keys = keys_of(engine.runner, engine.batch.blocks_of(request.row), count)
                expected = alone(prompts[0]).keys[:count]
                torch.testing.assert_close(keys, expected, rtol=0, atol=1e-4)
                compared += 1
    assert compared >= COUNT - 2
    assert len(rows) == 1 + beside
    assert_as_alone([found[n] for n in numbers], prompts, alone)
    assert_clean(engine)


def test_a_preempted_request_that_is_cancelled_tells(
    model: Model, calibration: Calibration
) -> None:
    """Before the engine has put away what was seen of it, and after."""
    for waits in (False, True):
        engine = engine_of(model, calibration, max_num_seqs=1)
        number = engine.add(PROMPTS[FAULTY], limits=Limits(COUNT, frozenset()))
        for _ in range(9):
            engine.step()
        engine._scheduler._preempt(engine._scheduler.running[0])
        if waits:
            engine.add(PROMPTS[0], limits=Limits(1, frozenset()), priority=-1)
            engine.step()
        engine.cancel(number)
        answers = {answer.id: answer for answer in engine.step()}
        assert (answers[number].fallback or {}).get("token") == WINDOW
        assert_clean(engine)


def test_pages_that_run_out_change_nothing(
    model: Model, calibration: Calibration, alone: Any
) -> None:
    engine = engine_of(model, calibration, num_blocks=4, reserve=0.0, max_num_batched_tokens=16)
    prompts = [PROMPTS[i] for i in (FAULTY, 2, FAULTY, 0)]
    answers = answers_of(engine, prompts)
    assert engine.counts.preemptions > 0
    assert_as_alone(answers, prompts, alone)
    assert_clean(engine)


@pytest.mark.parametrize("rows", [1, 2, 4])
def test_samples_begin_with_what_was_seen_of_the_prompt(
    model: Model, calibration: Calibration, alone: Any, rows: int
) -> None:
    """Also those that find no row, and compute the prompt again."""
    engine = engine_of(model, calibration, max_num_seqs=rows)
    prompts = [PROMPTS[FAULTY], ids(17, 5), [BAD] * 18]
    answers = answers_of(engine, prompts, n=2)
    assert_as_alone(answers, [p for p in prompts for _ in range(2)], alone)
    assert answers[4].fallback is not None  # within the prompt
    assert answers[4].fallback["token"] == WINDOW
    assert_clean(engine)


def test_no_pages_are_found(model: Model, calibration: Calibration) -> None:
    """A request that left int8 has other keys than its tokens say."""
    engine = engine_of(model, calibration)
    answers_of(engine, [ids(40, 1)] * 2)
    assert engine.counts.found_tokens == 0


@pytest.mark.skipif(device.KIND != "cpu", reason="the stand-in's tensors are on the CPU")
def test_captured_steps_watch_too(model: Model, calibration: Calibration, alone: Any) -> None:
    with stand_in():
        engine = engine_of(
            model, calibration, graphs=True, ops=Launched(tkernels.reference), max_num_seqs=2
        )
        assert engine.graphs is not None
        prompts = PROMPTS[:3]
        assert_as_alone(answers_of(engine, prompts), prompts, alone)
        assert engine.graphs.launched > COUNT
        assert_clean(engine)


@pytest.mark.skipif(device.KIND != "cpu", reason="the stand-in's tensors are on the CPU")
def test_a_prompts_last_token_is_captured_only_if_it_is_watched(
    model: Model, calibration: Calibration, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a prompt of eight tokens, watched is every second one; the last one has its own step."""
    monkeypatch.setattr(watched_requests, "PROMPT_ROWS", 4)
    with stand_in():
        engine = engine_of(
            model,
            calibration,
            graphs=True,
            ops=Launched(tkernels.reference),
            max_num_seqs=1,
            max_num_batched_tokens=7,
        )
        assert engine.graphs is not None
        assert engine.runner.watch is not None
        engine.add(ids(8, 1), limits=Limits(COUNT, frozenset()))
        found = []
        for _ in range(4):
            engine.step()
            seen = int(engine.runner.watch.counters[0, 0, 1])
            found.append((seen, engine.graphs.launched))
        assert found == [(4, 0), (4, 0), (5, 1), (6, 2)]


def test_as_many_slots_as_requests(model: Model, calibration: Calibration) -> None:
    with pytest.raises(ValueError, match="a group for each of 5 requests, got 4 groups"):
        engine_of(model, calibration, max_num_seqs=5)


@pytest.mark.parametrize("slot", [3, 63, 64])
def test_what_was_seen_moves_to_another_slot(
    model: Model, calibration: Calibration, slot: int
) -> None:
    watch = fallback.Watch(calibration, model, 70, model.norm.device)
    for verdict in (False, True):
        watch.reset(slot)
        state = tuple(part.clone() for part in watch.state(5))
        for part in state:
            part[1] = 4
        state[2][1, 2] = int(verdict)
        watch.put(slot, state)  # type: ignore[arg-type]
        assert [bool((watch.mask[i // 64] >> i % 64) & 1) for i in range(70)] == [
            verdict and i == slot for i in range(70)
        ]
        assert watch.histogram.sum() == watch.histogram[1, slot].sum() == 4 * fallback.BINS


def test_long_prompts_are_watched_by_position(model: Model, calibration: Calibration) -> None:
    """Whatever the chunks: of 600 tokens one in three; and where 16 bits begin."""
    watch = fallback.Watch(calibration, model, 2, model.norm.device)
    request = Request.__new__(Request)
    request.arrival, request.sample, request.prompt_tokens, request.row = 0, 0, 600, 1
    watched = WatchedRequests(watch, 2, 2048, lambda row: request)
    seen, at = [], 0
    for count in (100, 1, 250, 249, 1, 1):
        marks = watched.marks(np.array([1]), np.array([count]), np.arange(at, at + count))
        assert marks[0].tolist() == [1] * count
        seen += (at + np.flatnonzero(marks[1] == 1)).tolist()
        at += count
    assert seen == [*range(0, 600, 3), 600, 601]
    kept = watched._in_slot[1]
    assert kept.ends == [100, 101, 351, 600]
    # Tokens 0 (the first), 99, 102 and 597 of the prompt, and new ones.
    firsts = [kept.first_high(n) for n in (1, 34, 35, 200, 201, 202)]
    assert firsts == [100, 100, 351, 600, 601, 602]


# ---- the command ---------------------------------------------------------------------------------


def test_answers_in_a_file_tell(
    folder: Path, calibration: Calibration, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, prompts, out = (tmp_path / name for name in ("watch", "p.txt", "o.jsonl"))
    prompts.write_text("abcdefgh\nab\n")
    # Any window exceeds the limit: a verdict at its end.
    dataclasses.replace(calibration, kl_above=1e-9).save(file, {})
    argv = ["--model", str(folder), "--prompts", str(prompts), "--max-tokens", "12", "--ignore-eos"]
    argv += ["--fallback", str(file)]
    assert generate.main([*argv, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert generate.main([*argv, "--out", str(out)]) == 0
    assert " | 1 of 2 answers fell back" in capsys.readouterr().err
    rows = sorted(map(json.loads, out.read_text().splitlines()), key=lambda row: int(row["id"]))
    answers = [row["answers"][0] for row in rows]
    assert [a["token_ids"] for a in answers] == [r["token_ids"] for r in found["replies"]]
    (told,) = found["stats"]["fallback"]["fell_back"]
    assert told.pop("prompt") == 0
    assert told["token"] == WINDOW
    assert_told_alike(answers[0]["fallback"], told)
    assert answers[1]["fallback"] is None
    # Answers of other settings are not mixed with these.
    assert generate.main([*argv[:-2], "--out", str(out)]) == 2
    assert "got other settings or another prompt" in capsys.readouterr().err
