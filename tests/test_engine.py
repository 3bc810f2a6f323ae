"""The engine: each answer equals that of the request alone, whatever ran beside it."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from checkpoints import load_folder, make_folder, tiny

import tkernels
from model import tokenizer as tokenizers
from model.engine import GREEDY, Answer, Engine
from model.kv_cache import BLOCK_SIZE, SequenceState
from model.kv_quant import KVQuantization, choose
from model.loop import Limits
from model.qwen3 import Model
from model.runner import Runner
from model.sampler import (
    SamplingParams,
    SamplingRows,
    penalise_repetition,
    request_key,
    restrict,
    sample_rows,
    uniform,
)
from model.threads import cpu_threads

VOCAB = 331
FOREVER = frozenset[int]()
# Two tokens whose logits are nearer than this may change places when steps have other sizes.
TIE = 1e-4
# A number on the edge of two codes may take the other one: what test_kv_quant.py allows.
TIE_QUANTISED = 2e-3


@functools.cache
def model_of(name: str = "qwen3", dtype: torch.dtype = torch.float32) -> Model:
    return load_folder(tiny(name).folder, dtype)


def ids(count: int, seed: int = 0) -> list[int]:
    return torch.randint(VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The networks are so small that a second thread would only be waited for."""
    with cpu_threads(1):
        yield


def quantization(mode: str, tau: float = 0.0085) -> KVQuantization | None:
    config = model_of("qwen3-heads-of-32").config
    return choose(mode, None, tau if "fp4" in mode else None, config)


def new_runner(blocks: int = 64, mode: str = "none", ops: Any = tkernels.reference) -> Runner:
    model = model_of() if mode == "none" else model_of("qwen3-heads-of-32")
    runner = Runner(
        model, ops, num_blocks=blocks, max_positions=256, quantization=quantization(mode)
    )
    for part in (*runner.cache.k, *runner.cache.v):
        if isinstance(part, torch.Tensor):
            part.fill_(torch.nan)  # so that reading a slot that nobody wrote shows
    return runner


def new_engine(
    blocks: int = 64, mode: str = "none", ops: Any = tkernels.reference, **more: Any
) -> Engine:
    return Engine(new_runner(blocks, mode, ops), **more)


def assert_alone(
    answer: Answer,
    prompt: list[int],
    params: SamplingParams = GREEDY,
    mode: str = "none",
    *,
    max_tokens: int | None = None,
    eos: frozenset[int] = FOREVER,
) -> bool:
    """Whether an answer is, token for token, what one-token steps of the request alone give.

    Where it is not, the two tokens must be as good as equal there; nothing is said of the rest.
    """
    runner, sequence = new_runner(16, mode), SequenceState(list(prompt))
    key = request_key(params.seed or 0, answer.sample)
    logits = runner.prefill([sequence])
    for i, token in enumerate(answer.token_ids):
        if params.repetition_penalty != 1:
            logits = logits.clone()
            penalise_repetition(logits[0], sequence.token_ids, params.repetition_penalty)
        expected = int(sample_rows(logits, row_of(params, key, len(sequence.token_ids))))
        if token != expected:
            assert params.temperature == 0, (answer, i)
            gap = float(logits[0, expected] - logits[0, token])
            assert gap < (TIE if mode == "none" else TIE_QUANTISED), (answer, i, expected)
            return False
        if token in eos:
            assert i == len(answer.token_ids) - 1
            assert answer.finish_reason == "eos"
            return True
        sequence.token_ids.append(token)
        if i + 1 < len(answer.token_ids):
            logits = runner.decode([sequence])
    if max_tokens is not None and answer.finish_reason != "cancelled":
        assert (len(answer.token_ids), answer.finish_reason) == (max_tokens, "length")
    return True


def row_of(params: SamplingParams, key: int, position: int) -> SamplingRows:
    return SamplingRows(
        torch.tensor([params.temperature]),
        torch.tensor([params.top_k]),
        torch.tensor([params.top_p]),
        torch.tensor([params.min_p]),
        torch.tensor([key]),
        torch.tensor([position]),
    )


def run_all(engine: Engine) -> dict[tuple[int, int], Answer]:
    found: dict[tuple[int, int], Answer] = {}
    for _ in range(10_000):
        if not engine.has_work():
            break
        for answer in engine.step():
            assert (answer.id, answer.sample) not in found
            found[answer.id, answer.sample] = answer
    assert_nothing_left(engine)
    return found


def assert_nothing_left(engine: Engine) -> None:
    assert not engine.has_work()
    pool = engine.pool
    assert pool.available == pool.num_pages
    assert not any(pool.owners)
    assert sorted(engine._scheduler._free_rows) == list(range(len(engine.batch.num_tokens)))
    assert not engine._scheduler.running
    engine.runner.release_residuals([*pool.stale, *pool.idle])
    for part in engine.runner.cache.quantized:
        if part.has_residual:
            assert part.dropped is not None
            assert not part.dropped.any()  # else answers would depend on what ran beside them
            assert part.free_slots is not None
            assert part.free_count is not None
            assert part.free_count.tolist() == [part.free_slots.shape[1]] * part.codes.shape[2]


# ---- the same tokens ---------------------------------------------------------------------------

LENGTHS = (1, 15, 16, 17, 40, 70)


@pytest.mark.parametrize("mode", ["none", "int8", "int8_fp4"])
@pytest.mark.parametrize("budget", [8, 33])
def test_greedy_answers_equal_those_alone(mode: str, budget: int) -> None:
    engine = new_engine(64, mode, max_num_seqs=4, max_num_batched_tokens=budget)
    prompts = [ids(n, seed=n) for n in LENGTHS]
    answers = engine.generate(prompts, limits=Limits(12, FOREVER))
    exact = [
        assert_alone(a, p, mode=mode, max_tokens=12) for a, p in zip(answers, prompts, strict=True)
    ]
    assert sum(exact) >= len(exact) - (mode != "none")
    assert_nothing_left(engine)


@pytest.mark.parametrize("mode", ["none", "int8_fp4"])
def test_preempted_answers_equal_those_alone(mode: str) -> None:
    """Room for two of four requests that all grow: pages run out again and again."""
    engine = new_engine(10, mode, max_num_seqs=4, reserve=0.0, prefix_cache=False)
    prompts = [ids(30 + n, seed=n) for n in range(4)]
    answers = engine.generate(prompts, limits=Limits(40, FOREVER))
    assert engine.counts.preemptions >= 2
    # Without prefix cache each preempted token is computed again.
    assert engine.counts.computed_tokens > sum(map(len, prompts)) + 4 * 39
    exact = [
        assert_alone(a, p, mode=mode, max_tokens=40) for a, p in zip(answers, prompts, strict=True)
    ]
    assert sum(exact) >= len(exact) - (mode != "none")
    assert_nothing_left(engine)


def test_a_reserve_of_all_tokens_preempts_nobody() -> None:
    for reserve, preempted in ((1.0, False), (0.0, True)):
        engine = new_engine(12, max_num_seqs=4, reserve=reserve)
        engine.generate([ids(30 + n, seed=n) for n in range(4)], limits=Limits(60, FOREVER))
        assert (engine.counts.preemptions > 0) == preempted


def test_eos_and_context_end_answers() -> None:
    prompt = ids(40)
    (whole,) = new_engine().generate([prompt], limits=Limits(300, FOREVER))
    assert (len(whole.token_ids), whole.finish_reason) == (256 - 40, "length")
    last = whole.token_ids[9]
    at = whole.token_ids.index(last) + 1
    (ended,) = new_engine().generate([prompt], limits=Limits(300, frozenset({last, 330, 329})))
    assert ended.finish_reason == "eos"
    assert ended.token_ids == whole.token_ids[: len(ended.token_ids)]
    assert len(ended.token_ids) <= at


def test_prompts_beside_others_go_in_small_chunks() -> None:
    """Alone a prompt has the whole step; answers stay what they are alone."""
    engine = new_engine(max_num_batched_tokens=64, prompt_tokens_beside=8)
    first = engine.add(ids(60), limits=Limits(12, FOREVER))
    sizes = []

    def step() -> list[Answer]:
        before = engine.counts.computed_tokens
        ended = engine.step()
        sizes.append(engine.counts.computed_tokens - before)
        return ended

    answers = step()
    second = engine.add(ids(50, seed=1), limits=Limits(3, FOREVER))
    while engine.has_work():
        answers += step()
    assert sizes == [60] + [9] * 6 + [3] + [2] * 2 + [1] * 2
    prompts = {first: ids(60), second: ids(50, seed=1)}
    for answer in answers:
        assert_alone(answer, prompts[answer.id])
    with pytest.raises(ValueError, match="prompt_tokens_beside to be None or 1 or more, got 0"):
        new_engine(prompt_tokens_beside=0)


def test_kernels_equal_pytorch(dev: torch.device) -> None:
    """Decode beside chunks of prompts, shared pages and a fork, on the kernels."""
    model = load_folder(tiny("qwen3").folder, device=dev)
    prefix = ids(17)
    found = []
    for ops in (tkernels.reference, tkernels):
        runner = Runner(model, ops, num_blocks=16, max_positions=64)
        engine = Engine(runner, max_num_seqs=4, max_num_batched_tokens=19)
        engine.add([*prefix, 5], limits=Limits(3, FOREVER))
        engine.add(prefix, SamplingParams(temperature=1, seed=3), Limits(2, FOREVER), n=2)
        answers = run_all(engine)
        assert engine.counts.found_tokens == 16
        assert engine.counts.steps == 3
        found.append({key: a.token_ids for key, a in answers.items()})
        assert set(answers) == {(0, 0), (1, 0), (1, 1)}
    assert found[0] == found[1]


# ---- shared prefixes ---------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["none", "int8_fp4"])
def test_prefix_cache_changes_nothing(mode: str) -> None:
    prefix = ids(50)
    prompts = [[*prefix, *ids(n, seed=n)] for n in (0, 1, 14, 20)] + [prefix[:33], prefix[:32]]
    found = []
    for on in (True, False):
        engine = new_engine(64, mode, max_num_seqs=3, max_num_batched_tokens=40, prefix_cache=on)
        found.append(engine.generate(prompts, limits=Limits(16, FOREVER)))
        assert (engine.counts.found_tokens >= 4 * 32) == on
    for answer, other, prompt in zip(*found, prompts, strict=True):
        if answer.token_ids != other.token_ids:  # then both are as good, which is looked at
            assert not assert_alone(answer, prompt, mode=mode) or not assert_alone(
                other, prompt, mode=mode
            )


def test_64_requests_compute_a_shared_prefix_once() -> None:
    model = model_of()
    prefix = ids(2000)
    runner = Runner(model, tkernels.reference, num_blocks=125 + 64 * 2, max_positions=2100)
    engine = Engine(runner, max_num_seqs=64, max_num_batched_tokens=512)
    prompts = [[*prefix, *ids(5, seed=i)] for i in range(64)]
    answers = engine.generate(prompts, limits=Limits(2, FOREVER))
    assert engine.counts.computed_tokens == 2000 + 64 * 5 + 64
    assert engine.counts.found_tokens == 63 * 2000
    (alone,) = Engine(
        Runner(model, tkernels.reference, num_blocks=130, max_positions=2100), prefix_cache=False
    ).generate(prompts[40:41], limits=Limits(2, FOREVER))
    assert alone.token_ids == answers[40].token_ids
    assert_nothing_left(engine)


def test_a_second_turn_finds_the_first() -> None:
    """Pages that decoding filled are found as those of prompts are."""
    engine = new_engine()
    prompt = ids(20)
    (first,) = engine.generate([prompt], limits=Limits(30, FOREVER))
    second = [*prompt, *first.token_ids, *ids(3, seed=9)]
    (answer,) = engine.generate([second], limits=Limits(5, FOREVER))
    assert engine.counts.found_tokens == 48
    assert assert_alone(answer, second, max_tokens=5)


# ---- samples -----------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["none", "int8", "int8_fp4"])
@pytest.mark.parametrize("length", [3, 16, 37])
def test_samples_share_a_prompt(mode: str, length: int) -> None:
    engine = new_engine(64, mode, max_num_seqs=8)
    params, prompt = SamplingParams(temperature=1.0, seed=5), ids(length)
    answers = engine.generate([prompt], params, Limits(20, FOREVER), n=4)
    assert [a.sample for a in answers] == [0, 1, 2, 3]
    assert len({tuple(a.token_ids) for a in answers}) == 4
    again = 3 * (length % BLOCK_SIZE) if mode == "int8_fp4" else 0
    assert engine.counts.computed_tokens == length + 4 * 19 + again
    for answer in answers:
        if mode == "none":
            assert_alone(answer, prompt, params, mode, max_tokens=20)
    assert_nothing_left(engine)


def test_greedy_samples_are_the_same() -> None:
    engine = new_engine()
    answers = engine.generate([ids(21)], limits=Limits(20, FOREVER), n=3)
    assert len({tuple(a.token_ids) for a in answers}) == 1
    assert assert_alone(answers[0], ids(21), max_tokens=20)


def test_samples_without_room_wait() -> None:
    """More samples than rows, and than pages: they start as others end."""
    engine = new_engine(10, max_num_seqs=2)
    params, prompt = SamplingParams(temperature=1.0, seed=5), ids(37)
    answers = engine.generate([prompt], params, Limits(30, FOREVER), n=5)
    assert len(answers) == 5
    for answer in answers:
        assert_alone(answer, prompt, params, max_tokens=30)
    assert_nothing_left(engine)


def test_a_sample_may_end_at_once() -> None:
    engine = new_engine()
    params = SamplingParams(temperature=1.0, seed=5)
    answers = engine.generate([ids(20)], params, Limits(1, FOREVER), n=3)
    assert [len(a.token_ids) for a in answers] == [1, 1, 1]
    assert_nothing_left(engine)


# ---- sampling ----------------------------------------------------------------------------------


def test_each_request_has_parameters_of_its_own() -> None:
    settings = [
        SamplingParams(),
        SamplingParams(temperature=0.7, seed=1),
        SamplingParams(temperature=1.5, top_k=5, seed=2),
        SamplingParams(temperature=1.5, top_p=0.6, seed=3),
        SamplingParams(temperature=2.0, min_p=0.2, top_k=50, seed=4),
        SamplingParams(repetition_penalty=1.7),
        SamplingParams(temperature=1.0, repetition_penalty=1.3, seed=2**63 - 1),
    ]
    prompts = [ids(10 + i, seed=i) for i in range(len(settings))]
    engine = new_engine(max_num_seqs=5, max_num_batched_tokens=16)
    answers = engine.generate(prompts, settings, Limits(15, FOREVER))
    for answer, prompt, params in zip(answers, prompts, settings, strict=True):
        assert_alone(answer, prompt, params, max_tokens=15)


def test_without_a_seed_answers_differ() -> None:
    engine = new_engine()
    answers = engine.generate([ids(5)] * 2, SamplingParams(temperature=2.0), Limits(20, FOREVER))
    assert answers[0].token_ids != answers[1].token_ids


def test_drawn_tokens_follow_softmax() -> None:
    """100,000 positions of one row against its probabilities, narrowed and not."""
    logits = torch.tensor([[2.0, 1.0, 0.5, 0.0, -1.0, -3.0]])
    count = 100_000
    for params in (
        SamplingParams(temperature=0.8),
        SamplingParams(temperature=2.0, top_k=3),
        SamplingParams(temperature=1.0, top_p=0.8),
        SamplingParams(temperature=1.0, min_p=0.15),
    ):
        one = row_of(params, request_key(7, 0), 0)
        many = [t.expand(count) for t in vars(one).values() if isinstance(t, torch.Tensor)]
        rows = replace(SamplingRows(*many), position=torch.arange(count))
        drawn = sample_rows(logits.expand(count, -1), rows)
        got = torch.bincount(drawn, minlength=6) / count
        expected = restrict(logits, params).softmax(-1)[0]
        assert (got[expected == 0] == 0).all()
        assert (got - expected).abs().max() < 0.006  # 4 standard deviations
        pairs = torch.stack((drawn[:-1], drawn[1:]))  # one position tells nothing of the next
        first = torch.bincount(pairs[1][pairs[0] == 0], minlength=6) / (pairs[0] == 0).sum()
        assert (first - expected).abs().max() < 0.01


def test_uniform_numbers() -> None:
    keys = torch.tensor([request_key(s, i) for s in range(8) for i in range(8)])
    u = uniform(keys, torch.arange(64) + 5, 4096).double()
    assert u.min() > 0
    assert u.max() <= 1
    assert float((u.mean(1) - 0.5).abs().max()) < 4 * (1 / 12 / 4096) ** 0.5
    assert float(torch.corrcoef(u).fill_diagonal_(0).abs().max()) < 5 / 4096**0.5
    ordered = u.flatten().sort().values
    even = (torch.arange(u.numel()) + 0.5) / u.numel()
    assert float((ordered - even).abs().max()) < 2 / u.numel() ** 0.5  # Kolmogorov and Smirnov
    assert torch.equal(u[3:4], uniform(keys[3:4], torch.tensor([8]), 4096).double())


# ---- order, priorities, cancelling -------------------------------------------------------------


def test_requests_start_in_order_and_none_overtakes() -> None:
    """A long request that does not fit holds back the short one behind it."""
    engine = new_engine(8, max_num_seqs=4)
    first = engine.add(ids(60), limits=Limits(20, FOREVER))
    long = engine.add(ids(80), limits=Limits(20, FOREVER))
    short = engine.add(ids(5), limits=Limits(3, FOREVER))
    order = [a for a, _ in run_all(engine)]
    assert order == [first, short, long] or order == [first, long, short]
    assert order[0] == first


def test_sequences_that_decode_are_taken_up_longest_first() -> None:
    engine = new_engine(max_num_seqs=4)
    lengths = [5, 40, 17, 17]
    numbers = [engine.add(ids(n, seed=n), limits=Limits(9, FOREVER)) for n in lengths]
    engine.step()
    rows, new = engine._scheduler.schedule()
    assert new.tolist() == [1] * 4
    assert engine.batch.num_tokens[rows].tolist() == [41, 18, 18, 6]
    arrivals = [engine._scheduler.of_row(row).arrival for row in rows]
    assert arrivals == [numbers[i] for i in (1, 2, 3, 0)]  # equal ones in order


def test_a_better_priority_goes_first_and_preempts() -> None:
    engine = new_engine(10, max_num_seqs=4)
    slow = engine.add(ids(60), limits=Limits(40, FOREVER), priority=1)
    waiting = engine.add(ids(60, seed=1), limits=Limits(40, FOREVER), priority=1)
    for _ in range(5):
        engine.step()
    urgent = engine.add(ids(60, seed=2), limits=Limits(40, FOREVER))
    answers = run_all(engine)
    assert [i for i, _ in answers] == [urgent, slow, waiting]
    assert engine.counts.preemptions == 1
    for (number, _), answer in answers.items():
        prompt = ids(60, seed={slow: 0, waiting: 1, urgent: 2}[number])
        assert assert_alone(answer, prompt, max_tokens=40)


def test_cancelled_requests_give_everything_back() -> None:
    engine = new_engine(10, max_num_seqs=1)
    running = engine.add(ids(20), limits=Limits(50, FOREVER))
    waiting = engine.add(ids(20, seed=1), limits=Limits(50, FOREVER))
    kept = engine.add(ids(20, seed=2), limits=Limits(5, FOREVER))
    for _ in range(4):
        assert engine.step() == []
    engine.cancel(running)
    engine.cancel(waiting)
    answers = run_all(engine)
    assert [answers[i, 0].finish_reason for i in (running, waiting, kept)] == [
        "cancelled",
        "cancelled",
        "length",
    ]
    assert [len(answers[i, 0].token_ids) for i in (running, waiting, kept)] == [4, 0, 5]
    assert_alone(answers[running, 0], ids(20))
    engine.cancel(kept)  # has ended
    engine.cancel(99)  # never was
    assert_nothing_left(engine)


def test_a_listener_hears_each_token_and_may_cancel() -> None:
    engine = new_engine()
    heard: list[tuple[int, int, str]] = []

    def listen(sample: int, token: int, text: str) -> None:
        heard.append((sample, token, text))
        if len(heard) == 3:
            engine.cancel(number)

    number = engine.add(ids(20), limits=Limits(50, FOREVER), on_token=listen)
    (answer,) = run_all(engine).values()
    assert answer.finish_reason == "cancelled"
    assert [(0, t, "") for t in answer.token_ids] == heard
    assert len(heard) == 3


def test_text_is_streamed_and_stops(tmp_path: Any) -> None:
    tokenizer = tokenizers.from_folder(make_folder(tmp_path / "m", None))
    prompt = ids(20)
    (plain,) = new_engine(tokenizer=tokenizer).generate([prompt], limits=Limits(40, FOREVER))
    assert plain.text == tokenizer.decode(plain.token_ids, skip_special_tokens=True)
    stop = plain.text[10:13]
    engine = new_engine(tokenizer=tokenizer)
    pieces: list[str] = []
    limits = Limits(40, FOREVER, (stop,))
    number = engine.add(prompt, limits=limits, on_token=lambda s, t, text: pieces.append(text))
    quiet = engine.add(prompt, limits=limits)
    answers = run_all(engine)
    assert answers[number, 0].finish_reason == answers[quiet, 0].finish_reason == "stop"
    assert answers[number, 0].text == plain.text[: plain.text.index(stop)] == "".join(pieces)
    assert answers[quiet, 0].text == answers[number, 0].text
    assert answers[quiet, 0].token_ids == plain.token_ids[: len(answers[quiet, 0].token_ids)]


@pytest.mark.parametrize(
    ("prompt", "limits", "n", "words"),
    [
        ([], Limits(1, FOREVER), 1, "at least one token, got an empty one"),
        ([1] * 256, Limits(1, FOREVER), 1, "fewer tokens than the context of 256, got 256"),
        (
            [1] * 100,
            Limits(30, FOREVER),
            1,
            "fit the cache's 8 blocks of 16 tokens, got 100 and up to 30",
        ),
        (
            [1] * 200,
            Limits(1, FOREVER),
            1,
            "fit the cache's 8 blocks of 16 tokens, got 200 and up to 1",
        ),
        ([1, 331], Limits(1, FOREVER), 1, "token ids from 0 to 330, got 1 to 331"),
        ([1, -1], Limits(1, FOREVER), 1, "token ids from 0 to 330, got -1 to 1"),
        ([1], Limits(0, FOREVER), 1, "n and max_tokens of 1 or more, got 1 and 0"),
        ([1], Limits(1, FOREVER), 0, "n and max_tokens of 1 or more, got 0 and 1"),
        ([1], Limits(1, FOREVER, ("x",)), 1, "a tokenizer for stop texts, got none"),
    ],
)
def test_what_can_never_run_is_refused(
    prompt: list[int], limits: Limits, n: int, words: str
) -> None:
    engine = new_engine(8)
    with pytest.raises(ValueError, match=words):
        engine.add(prompt, limits=limits, n=n)
    assert not engine.has_work()


def test_the_largest_request_that_fits_runs() -> None:
    engine = new_engine(8)
    (answer,) = engine.generate([ids(100)], limits=Limits(29, FOREVER))
    assert len(answer.token_ids) == 29
    (answer,) = engine.generate([ids(100)], limits=Limits(29, FOREVER), n=1)
    assert_nothing_left(engine)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs from 1 to max_num_batched_tokens = 2048, got 0"),
        ({"max_num_batched_tokens": 9}, "from 1 to max_num_batched_tokens = 9, got 64"),
        ({"reserve": 1.5}, "a reserve from 0 to 1, got 1.5"),
    ],
)
def test_settings_are_checked(more: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        new_engine(8, **more)


def test_nobody_else_uses_the_blocks_of_an_engine() -> None:
    engine = new_engine(8)
    with pytest.raises(ValueError, match="expected 1 free blocks of 16 tokens, got 0"):
        engine.runner.prefill([SequenceState([1])])
    with pytest.raises(ValueError, match="expected 8 free blocks of 16 tokens, got 0"):
        Engine(engine.runner)


def test_a_step_that_failed_is_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = new_engine()
    engine.add(ids(20))

    def fail(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(engine.runner, "step", fail)
    with pytest.raises(MemoryError):
        engine.step()
    with pytest.raises(RuntimeError, match="a new engine after a step that failed"):
        engine.step()


def test_nobody_is_preempted_for_what_would_not_fit_all_the_same() -> None:
    """The pages of the request of the same priority stay, and with those of the worse one gone
    there is no room for the next."""
    engine = new_engine(16, max_num_seqs=4)
    engine.add(ids(100), limits=Limits(30, FOREVER))
    engine.add(ids(60, seed=1), limits=Limits(30, FOREVER), priority=1)
    engine.step()
    engine.add(ids(120, seed=2), limits=Limits(30, FOREVER))
    engine.step()
    assert len(engine._scheduler.running) == 2
    assert len(run_all(engine)) == 3
    assert engine.counts.preemptions == 0


def test_a_mixture_of_experts_too() -> None:
    """Which experts a token goes to does not depend on what else is in the step."""
    model = tiny("qwen3_moe").ours
    prompts = [ids(n, seed=n) for n in (5, 30, 18)]

    def answers(budget: int, count: int) -> list[list[int]]:
        found = []
        for start in range(0, 3, count):
            runner = Runner(model, tkernels.reference, num_blocks=16, max_positions=64)
            engine = Engine(runner, max_num_seqs=3, max_num_batched_tokens=budget)
            found += engine.generate(prompts[start : start + count], limits=Limits(8, FOREVER))
        return [answer.token_ids for answer in found]

    assert answers(9, 3) == answers(1000, 1)
