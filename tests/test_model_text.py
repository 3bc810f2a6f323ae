"""Sampling against transformers' logits processors; tokenisers; text that comes piece by piece."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import smollm2, tiny
from hypothesis import given, settings
from hypothesis import strategies as st

import tkernels
from model import tokenizer as tokenizers
from model.gguf_file import read_gguf
from model.loop import Limits, generate
from model.sampler import SamplingParams, penalise_repetition, request_key, restrict, sample

VOCAB = 50


def random_logits(rows: int = 4) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(3)) * 4


# ---- sampler -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.7),
        SamplingParams(temperature=1.3, top_k=5),
        SamplingParams(temperature=1.0, top_k=1),
        SamplingParams(temperature=1.0, top_k=500),
        SamplingParams(temperature=0.9, top_p=0.6),
        SamplingParams(temperature=1.0, top_p=1e-4),
        SamplingParams(temperature=1.5, min_p=0.1),
        SamplingParams(temperature=1.0, min_p=1.0),
        SamplingParams(temperature=0.6, top_k=20, top_p=0.95, min_p=0.02),
    ],
)
def test_restrict_equals_transformers(params: SamplingParams) -> None:
    from transformers import (
        LogitsProcessorList,
        MinPLogitsWarper,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    chain = LogitsProcessorList([TemperatureLogitsWarper(params.temperature)])
    if params.top_k:
        chain.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        chain.append(TopPLogitsWarper(params.top_p))
    if params.min_p:
        chain.append(MinPLogitsWarper(params.min_p))
    logits = random_logits()
    ids = torch.zeros(4, 1, dtype=torch.long)
    assert torch.equal(restrict(logits, params), chain(ids, logits))


def test_repetition_penalty_equals_transformers() -> None:
    from transformers import RepetitionPenaltyLogitsProcessor

    logits, history = random_logits(1), [3, 3, 8, 49]
    expected = RepetitionPenaltyLogitsProcessor(1.4)(torch.tensor([history]), logits.clone())
    got = logits.clone()
    penalise_repetition(got[0], history, 1.4)
    assert torch.equal(got, expected)
    assert not torch.equal(got, logits)


def test_greedy_takes_the_likeliest_after_the_penalty() -> None:
    logits = torch.tensor([[1.0, 4.0, 3.9], [-1.0, -5.0, -2.0]])
    nothing = [0, 0]
    assert sample(logits, SamplingParams(), [[1], [0]], nothing) == [1, 0]
    assert sample(logits, SamplingParams(repetition_penalty=3.0), [[1], [0]], nothing) == [2, 2]
    assert logits[0, 1] == 4  # the caller's logits are left alone


def test_draws_follow_the_distribution() -> None:
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]]))
    params, key = SamplingParams(temperature=1.0, top_k=3), request_key(0, 0)
    drawn = torch.tensor([sample(logits, params, [range(n)], [key])[0] for n in range(4000)])
    shares = torch.bincount(drawn, minlength=4) / 4000
    expected = torch.tensor([0.5, 0.3, 0.15, 0.0]) / 0.95
    assert (shares - expected).abs().max() < 0.03
    assert shares[3] == 0


def test_seed_fixes_a_request_whatever_its_neighbours() -> None:
    logits, params = random_logits(3), SamplingParams(temperature=1.0)

    def draws(rows: list[int]) -> list[list[int]]:
        keys = [request_key(10 + r, 0) for r in rows]
        return [sample(logits[rows], params, [range(n)] * len(rows), keys) for n in range(20)]

    together, alone = draws([0, 1, 2]), draws([1])
    assert [step[1] for step in together] == [step[0] for step in alone]
    assert len({step[1] for step in together}) > 1


@pytest.mark.parametrize(
    ("field", "value"),
    [("temperature", -0.1), ("top_k", -1), ("top_p", 0.0), ("top_p", 1.1), ("min_p", -0.1),
     ("repetition_penalty", 0.0), ("temperature", float("nan"))],
)  # fmt: skip
def test_sampling_refuses(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"sampling: {field} must be .*, got {value}"):
        SamplingParams(**{field: value})


# ---- tokeniser of a GGUF file ------------------------------------------------------------------

TEXT = (
    "Hello, world! It's 2024-11-28;  I'll pay $1,234.56 (or 3/4?).\n\n\tdef f(x):\n\t\treturn x**2"
    "\r\n naïve café — “quoted” … Ünïcödé 日本語のテキスト 한국어 العربية 😀👩‍👩‍👧 \u200b e\u0301\n"
    "<|im_start|>user\nhi<|im_end|>\n <repo_name>x   \n   trailing  "
)


@pytest.fixture(scope="module")
def ours() -> Any:
    return tokenizers.from_gguf(smollm2(), read_gguf(smollm2()).metadata)


@pytest.mark.model
@pytest.mark.slow
def test_gguf_tokenizer_equals_transformers(ours: Any) -> None:
    """Vocabulary, merges, special tokens, template; ids on varied text.

    transformers ignores ``tokenizer.ggml.pre`` = smollm, which cuts digits off before all else; so
    ids are compared with its tokeniser set to that rule, and without it on text where it is idle.
    """
    from pydoc_data.topics import topics

    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(str(smollm2().parent), gguf_file=smollm2().name)
    assert ours.get_vocab() == theirs.get_vocab()
    assert ours.chat_template == theirs.chat_template
    for token in ("bos_token", "eos_token", "unk_token", "pad_token"):
        assert getattr(ours, token) == getattr(theirs, token)
    question = [{"role": "user", "content": TEXT}]
    assert tokenizers.encode_chat(ours, TEXT) == list(
        theirs.apply_chat_template(question, add_generation_prompt=True)["input_ids"]
    )
    assert tokenizers.encode(ours, TEXT) == theirs(TEXT)["input_ids"]
    text = "\n".join(topics.values())
    ids = tokenizers.encode(ours, text)
    assert ids[:2048] == theirs(text)["input_ids"][:2048]
    theirs.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    assert ids == theirs(text)["input_ids"]


@pytest.mark.model
def test_gguf_tokenizer_round_trip(ours: Any) -> None:
    ids = tokenizers.encode(ours, TEXT)
    assert ours.decode(ids) == TEXT
    assert ours.decode(ids, skip_special_tokens=True) == TEXT.replace("<|im_start|>", "").replace(
        "<|im_end|>", ""
    ).replace("<repo_name>", "")


def test_gguf_tokenizer_fields() -> None:
    """A tiny hand-made vocabulary: merges, a control and a user-defined token, a first token."""
    metadata = {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": ["a", "b", "ab", "<s>", "<think>", "e", "é", "Ã©"],
        "tokenizer.ggml.token_type": [1, 1, 1, 3, 4, 1, 1, 1],
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.bos_token_id": 3, "tokenizer.ggml.add_bos_token": True,
    }  # fmt: skip
    made = tokenizers.from_gguf(Path("none.gguf"), metadata)
    assert tokenizers.encode(made, "aba<think>b<s>") == [3, 2, 0, 4, 1, 3]
    assert made.decode([3, 2, 4], skip_special_tokens=True) == "ab<think>"
    assert made.bos_token == "<s>"
    assert made.chat_template is None


# ---- text piece by piece -----------------------------------------------------------------------


class Bytes:
    """A tokeniser whose tokens are single bytes: every character of more than one is split."""

    def decode(self, ids: list[int], **_: object) -> str:
        return bytes(ids).decode("utf-8", errors="replace")


def pieces(tokenizer: Any, ids: list[int], stop: tuple[str, ...] = ()) -> tuple[list[str], bool]:
    detokenizer = tokenizers.Detokenizer(tokenizer, stop)
    found = []
    for token in ids:
        found.append(detokenizer.push(token))
        if detokenizer.stopped:
            return found, True
    return [*found, detokenizer.finish()], detokenizer.stopped


@given(st.text(max_size=40))
@settings(max_examples=200, deadline=None)
def test_pieces_are_whole_characters(text: str) -> None:
    found, _ = pieces(Bytes(), list(text.encode("utf-8", errors="replace")))
    assert "".join(found) == text.encode("utf-8", errors="replace").decode()
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in found)


@pytest.mark.model
def test_pieces_of_a_real_tokenizer(ours: Any) -> None:
    found, _ = pieces(ours, tokenizers.encode(ours, TEXT))
    assert "".join(found) == ours.decode(tokenizers.encode(ours, TEXT), skip_special_tokens=True)
    assert not any("\ufffd" in piece for piece in found)
    assert len([p for p in found if p]) > 60  # it streams


def test_invalid_bytes_come_out_once_they_are_certain() -> None:
    found, _ = pieces(Bytes(), [0x61, 0xE2, 0x82, 0x62])
    assert "".join(found) == "a\ufffdb"
    found, _ = pieces(Bytes(), [0x61, 0xE2])
    assert found == ["a", "", "\ufffd"]


@given(
    st.text("ab.", max_size=30),
    st.lists(st.text("ab.", min_size=1, max_size=4), max_size=3),
)
@settings(max_examples=300, deadline=None)
def test_stop_strings(text: str, stops: list[str]) -> None:
    """Everything before the stop string that is complete first, and nothing of it."""
    found, stopped = pieces(Bytes(), list(text.encode()), tuple(stops))
    ends = [(text.find(s) + len(s), text.find(s)) for s in stops if s in text]
    first = min((end for end, _ in ends), default=None)
    assert stopped == (first is not None)
    cut = min(start for end, start in ends if end == first) if ends else len(text)
    assert "".join(found) == text[:cut]


# ---- generate ----------------------------------------------------------------------------------


class Numbers:
    """Token 12 reads "<12>"."""

    def decode(self, ids: list[int], **_: object) -> str:
        return "".join(f"<{i}>" for i in ids)


def run(prompts: list[list[int]], limits: Limits, **options: Any) -> Any:
    params = options.pop("params", SamplingParams())
    ops = tkernels.reference
    return generate(tiny("qwen3").ours, ops, Numbers(), prompts, params, limits, **options)


def test_batches_equal_single_prompts() -> None:
    prompts = [[1, 2, 3], [9], list(range(40)), [5, 5], [8, 1]]
    limits = Limits(12, frozenset())
    alone = [run([p], limits)[0][0].token_ids for p in prompts]
    for batch_size in (2, 8):
        replies, times = run(prompts, limits, batch_size=batch_size)
        assert [r.token_ids for r in replies] == alone
        assert {r.finish_reason for r in replies} == {"length"}
    assert times.prefill_tokens == 48
    assert (len(times.decode_steps_s), times.decode_tokens) == (11, 55)


def test_a_reply_ends_at_each_eos_id_or_stop_string() -> None:
    ids = run([[1, 2, 3]], Limits(20, frozenset()))[0][0].token_ids
    third = ids.index(ids[2])
    reply = run([[1, 2, 3]], Limits(20, frozenset({330, ids[2]})))[0][0]
    assert (reply.finish_reason, reply.token_ids) == ("eos", ids[: third + 1])
    stop = f"<{ids[4]}>"
    reply = run([[1, 2, 3]], Limits(20, frozenset(), (stop,)))[0][0]
    assert (reply.finish_reason, stop in reply.text) == ("stop", False)
    assert reply.text == Numbers().decode(ids).partition(stop)[0]


def test_a_reply_ends_at_the_context() -> None:
    reply = run([list(range(250))], Limits(100, frozenset()))[0][0]
    assert (reply.finish_reason, len(reply.token_ids)) == ("length", 6)  # 256 in all
    with pytest.raises(ValueError, match="fewer tokens than the context of 256, got 256"):
        run([[1] * 256], Limits(1, frozenset()))
    with pytest.raises(ValueError, match="at least one token, got an empty one"):
        run([[1], []], Limits(1, frozenset()))


def test_streamed_text_is_the_reply() -> None:
    heard: dict[int, str] = {0: "", 1: ""}
    done: list[int] = []

    def on_text(index: int, piece: str) -> None:
        heard[index] += piece

    limits = Limits(9, frozenset(), ("never",))
    replies, _ = run([[1], [2, 3]], limits, on_text=on_text, on_done=done.append)
    assert [heard[0], heard[1]] == [r.text for r in replies]
    assert sorted(done) == [0, 1]
    assert replies[0].text == Numbers().decode(replies[0].token_ids)


def test_interrupt_keeps_what_was_done() -> None:
    def on_text(index: int, piece: str) -> None:
        raise KeyboardInterrupt

    replies, times = run([[1], [2]], Limits(9, frozenset()), batch_size=1, on_text=on_text)
    assert [r.finish_reason for r in replies] == ["interrupted", "interrupted"]
    assert len(replies[0].token_ids) == 1
    assert replies[1].token_ids == []
    assert times.first_token_s is not None


def test_seeded_sampling_repeats() -> None:
    def draw(seed: int | None) -> list[list[int]]:
        params = SamplingParams(temperature=1.0, seed=seed)
        return [r.token_ids for r in run([[1], [1]], Limits(12, frozenset()), params=params)[0]]

    assert draw(4) == draw(4)
    assert draw(4)[0] != draw(4)[1]  # prompt i draws with seed + i
    assert draw(5)[0] == draw(4)[1]
    assert draw(None) != draw(None)
