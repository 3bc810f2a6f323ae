"""Prefill in chunks: the same results, in bounded memory, with progress."""

from __future__ import annotations

import io
import sys
import types
from typing import Any

import pytest
import torch
from checkpoints import greedy, load_folder, new_runner, tiny
from hypothesis import given
from hypothesis import strategies as st

import tkernels
from model import qwen3
from model.kv_cache import BLOCK_SIZE, SequenceState, build_metadata
from model.loop import Limits, generate
from model.progress import progress
from model.runner import Runner, split_prefill
from model.sampler import SamplingParams

LIMIT = 1e-4  # max abs difference of fp32 logits
CHUNKS = [1, 5, BLOCK_SIZE, BLOCK_SIZE + 1, 1000]


def prompt(count: int, seed: int = 0) -> list[int]:
    return torch.randint(331, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def chunked(chunk: int, ops: Any = tkernels.reference, model: Any = None) -> Runner:
    runner = new_runner(model or tiny("qwen3").ours, ops)
    runner.prefill_chunk = chunk
    for layer in (*runner.cache.k, *runner.cache.v):
        layer.fill_(torch.nan)  # so that reading a slot that nobody wrote shows
    return runner


def close(got: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(got, expected, rtol=0, atol=LIMIT)


# ---- the split ---------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 50), min_size=1, max_size=8), st.integers(1, 60))
def test_split_computes_everything_once_in_order(missing: list[int], limit: int) -> None:
    steps = split_prefill(missing, limit)
    sizes = [sum(count for _, count in step) for step in steps]
    assert all(size == limit for size in sizes[:-1])
    assert 0 < sizes[-1] <= limit
    flat = [i for step in steps for i, count in step for _ in range(count)]
    assert flat == [i for i, count in enumerate(missing) for _ in range(count)]
    for step in steps:  # a sequence stands in a step once, and only the last one may go on
        assert len({i for i, _ in step}) == len(step)


# ---- results -----------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", CHUNKS)
def test_one_prompt(chunk: int) -> None:
    ids = prompt(35)
    whole = chunked(10**6).prefill([SequenceState(list(ids))], all_logits=True)
    runner, sequence = chunked(chunk), SequenceState(list(ids))
    logits = runner.prefill([sequence])
    close(logits, whole[-1:])
    assert sequence.num_computed == 35
    found = []
    for token in greedy(tiny("qwen3").ours, ids, 8):
        found.append(int(logits.argmax()))
        assert found[-1] == token
        sequence.token_ids.append(token)
        logits = runner.decode([sequence])


@pytest.mark.parametrize("chunk", CHUNKS)
def test_mixed_batch(chunk: int) -> None:
    """Prompts round the block size, and a sequence that has tokens in the cache already."""
    lengths = (3, 15, 40, 1, 17, 33)
    runner = chunked(chunk)
    sequences = [SequenceState(prompt(n, seed=n)) for n in lengths]
    old = sequences[2]
    later, old.token_ids = old.token_ids[21:], old.token_ids[:21]
    runner.prefill([old])
    old.token_ids += later
    got = runner.prefill(sequences)
    assert [s.num_computed for s in sequences] == list(lengths)
    for row, n in zip(got, lengths, strict=True):
        alone = chunked(10**6).prefill([SequenceState(prompt(n, seed=n))])
        close(row[None], alone)


def test_all_logits_of_a_mixed_batch_come_in_order() -> None:
    sequences = [[SequenceState(prompt(n, seed=n)) for n in (7, 20, 2)] for _ in range(2)]
    whole = chunked(10**6).prefill(sequences[0], all_logits=True)
    close(chunked(6).prefill(sequences[1], all_logits=True), whole)


def test_kernels_equal_pytorch(dev: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks with and without earlier tokens in one step, then decode, on the kernels alone."""
    model = load_folder(tiny("qwen3").folder, device=dev)
    results = []
    for ops in (tkernels.reference, tkernels):
        if ops is tkernels:
            monkeypatch.setattr(qwen3, "sdpa_attention", None)
        runner = chunked(6, ops, model)
        sequences = [SequenceState(prompt(n, seed=n)) for n in (3, 5, 2)]
        rows = [runner.prefill(sequences)]
        for s in sequences:
            s.token_ids.append(5)
        results.append(torch.cat([*rows, runner.decode(sequences)]))
    close(results[1], results[0])


# ---- memory and progress -----------------------------------------------------------------------


def recording() -> tuple[Any, list[int]]:
    """The references, and the number of rows of each call of the MLP."""
    seen: list[int] = []

    def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
        seen.append(x.shape[0])
        return tkernels.reference.silu_and_mul(x)

    names = {n: getattr(tkernels.reference, n) for n in tkernels.reference.__all__}
    return types.SimpleNamespace(**names | {"silu_and_mul": silu_and_mul}), seen


def test_a_step_holds_a_chunk_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    ops, rows = recording()
    runner = chunked(10, ops)
    head_rows: list[int] = []
    head = runner.model.lm_head

    class Head:
        weight = head.weight

        def __call__(self, x: torch.Tensor, ops: Any) -> torch.Tensor:
            head_rows.append(x.shape[0])
            return head(x, ops)

    monkeypatch.setattr(runner.model, "lm_head", Head())
    got = runner.prefill([SequenceState(prompt(n)) for n in (32, 4, 9)])
    assert got.shape == (3, 331)
    assert set(rows) == {10, 5}
    assert sum(rows) == 45 * runner.model.config.num_layers
    assert head_rows == [2, 1]  # only of sequences that end there


def test_a_short_prompt_is_one_step() -> None:
    ops, rows = recording()
    chunked(41, ops).prefill([SequenceState(prompt(41))])
    assert set(rows) == {41}


def test_progress_is_told() -> None:
    told: list[tuple[int, int]] = []
    sequences = [SequenceState(prompt(n)) for n in (20, 5)]
    chunked(10).prefill(sequences, on_chunk=lambda done, total: told.append((done, total)))
    assert told == [(0, 25), (10, 25), (20, 25), (25, 25)]


def test_refused_before_anything_is_computed() -> None:
    runner = chunked(4)
    fits, long = SequenceState(prompt(8)), SequenceState([*prompt(256), 1])
    with pytest.raises(ValueError, match="at most 256 tokens in a sequence, got 257"):
        runner.prefill([fits, long])
    assert fits.num_computed == 0


def test_interrupted_between_chunks_goes_on_where_it_was() -> None:
    runner, sequence = chunked(10), SequenceState(prompt(25))

    def stop(done: int, total: int) -> None:
        if done == 20:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        runner.prefill([sequence], on_chunk=stop)
    assert sequence.num_computed == 20
    close(runner.prefill([sequence]), chunked(100).prefill([SequenceState(prompt(25))]))


def test_kernels_get_no_indices_of_pytorch() -> None:
    sequence = SequenceState([1, 2, 3], block_ids=[0])
    sizes: Any = ([sequence], [3], torch.device("cpu"))
    assert build_metadata(*sizes, sdpa=False).sdpa is None
    assert build_metadata(*sizes, sdpa=True).sdpa is not None


class Numbers:
    def decode(self, ids: list[int], **_: object) -> str:
        return "".join(f"<{i}>" for i in ids)


def test_generate_in_chunks() -> None:
    prompts = [prompt(n, seed=n) for n in (30, 2, 9)]
    replies, told = [], []
    for chunk in (1000, 7):
        told.clear()
        found, times = generate(
            tiny("qwen3").ours,
            tkernels.reference,
            Numbers(),
            prompts,
            SamplingParams(),
            Limits(5, frozenset()),
            batch_size=2,
            prefill_chunk=chunk,
            on_prefill=lambda done, total: told.append((done, total)),
        )
        replies.append([r.token_ids for r in found])
        assert times.prefill_tokens == 41
    assert replies[0] == replies[1]
    assert told[:3] == [(0, 32), (7, 32), (14, 32)]
    assert told[-1] == (9, 9)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("prompts", "shown"),
    [
        ([30], ["prompt tokens"]),
        ([30, 2], ["prompts", "prompt tokens"]),
        ([7], []),
        ([0, 1], ["prompts"]),
    ],
)
def test_bars(prompts: list[int], shown: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A bar of tokens for a long prompt, one of prompts for several; both only on a terminal."""
    for stream in (Terminal(), io.StringIO()):
        monkeypatch.setattr(sys, "stderr", stream)
        monkeypatch.setenv("TERM", "xterm")
        with progress(prompts, 7) as (on_done, on_prefill):
            if on_prefill is not None:
                for done in range(0, prompts[0], 7):
                    on_prefill(done, prompts[0])
                on_prefill(prompts[0], prompts[0])
            if on_done is not None:
                for i in range(len(prompts)):
                    on_done(i)
        text = stream.getvalue()
        expected = shown if stream.isatty() else []
        for words in ("prompts", "prompt tokens"):
            assert (words in text) == (words in expected), (words, text)
