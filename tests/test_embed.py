"""Embeddings: those of transformers' hidden states, whatever is packed together; no cache."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import load_folder, make_folder, tiny
from hypothesis import given, settings
from hypothesis import strategies as st

import tkernels
from model import embed as embedding
from model import kv_cache
from model.embed import embed, steps

LENGTHS = (1, 17, 5, 40, 16)


def texts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(331, (n,), generator=generator).tolist() for n in LENGTHS]


@torch.inference_mode()
def expected(
    ids: list[int], pooling: str, bidirectional: bool, name: str = "qwen3"
) -> torch.Tensor:
    network = tiny(name).hf.model
    more: dict[str, Any] = {}
    if bidirectional:  # a mask of what is added to the scores: nothing
        more["attention_mask"] = torch.zeros(1, 1, len(ids), len(ids))
    states = network(torch.tensor([ids]), **more).last_hidden_state[0]
    return states[-1] if pooling == "last" else states.mean(0)


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("pooling", ["last", "mean"])
@pytest.mark.parametrize("name", ["qwen3", "llama-bias"])
def test_equals_transformers(name: str, pooling: str, bidirectional: bool) -> None:
    for most in (2048, 20):
        got = embed(
            tiny(name).ours,
            tkernels.reference,
            texts(),
            pooling=pooling,
            bidirectional=bidirectional,
            normalize=False,
            max_num_batched_tokens=most,
        )
        truth = torch.stack([expected(ids, pooling, bidirectional, name) for ids in texts()])
        assert truth.abs().max() > 0.5
        torch.testing.assert_close(got, truth, rtol=0, atol=1e-4)


def test_directions_differ() -> None:
    causal, both = (
        embed(tiny("qwen3").ours, tkernels.reference, texts(), bidirectional=b)
        for b in (False, True)
    )
    torch.testing.assert_close(causal.norm(dim=-1), torch.ones(5))
    assert float((causal - both)[1:].norm(dim=-1).min()) > 0.1


@pytest.mark.parametrize("bidirectional", [False, True])
def test_kernels_equal_pytorch(bidirectional: bool, dev: torch.device) -> None:
    model = load_folder(tiny("qwen3").folder, device=dev)
    few = [texts()[2], texts()[0], texts()[4][:9]]
    got, truth = (
        embed(model, ops, few, bidirectional=bidirectional, normalize=False)
        for ops in (tkernels, tkernels.reference)
    )
    torch.testing.assert_close(got, truth, rtol=0, atol=1e-4)


def test_no_cache_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError

    monkeypatch.setattr(kv_cache, "allocate_cache", refuse)
    for name in ("append_paged_kv", "append_quantized_kv"):
        monkeypatch.setattr(tkernels.reference, name, refuse)
    assert embed(tiny("qwen3").ours, tkernels.reference, texts()).shape == (5, 72)


@settings(deadline=None)
@given(st.lists(st.integers(1, 50), max_size=20), st.integers(1, 60))
def test_each_text_is_in_one_step(lengths: list[int], most: int) -> None:
    found = steps(lengths, most)
    assert sorted(i for step in found for i in step) == list(range(len(lengths)))
    for step in found:
        assert len(step) == 1 or sum(lengths[i] for i in step) <= most


@pytest.mark.parametrize(
    ("ids", "pooling", "words"),
    [
        ([[1], []], "last", "texts of 1 to 256 tokens, got one of 0"),
        ([[1] * 257], "last", "texts of 1 to 256 tokens, got one of 257"),
        ([[1]], "first", "pooling must be one of last, mean, got 'first'"),
    ],
)
def test_wrong_input_is_named(ids: list[list[int]], pooling: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        embed(tiny("qwen3").ours, tkernels.reference, ids, pooling=pooling)


def test_nothing_to_embed() -> None:
    assert embed(tiny("qwen3").ours, tkernels.reference, []).shape == (0, 72)


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_folder(tmp_path / "m", None)
    prompts, out = tmp_path / "p.txt", tmp_path / "o.jsonl"
    prompts.write_text("a longer one\nb\n\nand the third of them\n")
    argv = ["--model", str(folder), "--prompts", str(prompts), "--out", str(out)]
    assert embedding.main([*argv, "--batch-tokens", "13"]) == 0
    assert "3 texts embedded, 0 had a vector" in capsys.readouterr().err
    whole = out.read_bytes()
    rows = {row["id"]: row["embedding"] for row in map(json.loads, whole.splitlines())}
    assert set(rows) == {1, 2, 4}
    truth = torch.nn.functional.normalize(expected([_id_of(folder, "b")], "last", False), dim=0)
    torch.testing.assert_close(torch.tensor(rows[2]), truth, rtol=0, atol=1e-4)
    out.write_bytes(whole[:-9])  # killed while the last line was written
    assert embedding.main(argv) == 0
    assert "1 texts embedded, 2 had a vector" in capsys.readouterr().err
    again = {row["id"]: row["embedding"] for row in map(json.loads, out.read_bytes().splitlines())}
    torch.testing.assert_close(torch.tensor([*again.values()]), torch.tensor([*rows.values()]))
    assert embedding.main([*argv, "--pooling", "mean"]) == 2
    assert "got other settings or another prompt" in capsys.readouterr().err
    assert embedding.main([*argv, "--batch-tokens", "0"]) == 2


def test_ctrl_c_tells_what_the_file_has(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_folder(tmp_path / "m", None)
    prompts, out = tmp_path / "p.txt", tmp_path / "o.jsonl"
    prompts.write_text("a\nbb\nccc\n")
    real, steps = embedding.embed, iter(range(9))

    def interrupted(*given: Any, **more: Any) -> torch.Tensor:
        if next(steps) == 2:
            raise KeyboardInterrupt
        return real(*given, **more)

    monkeypatch.setattr(embedding, "embed", interrupted)
    argv = ["--model", str(folder), "--prompts", str(prompts), "--out", str(out)]
    assert embedding.main([*argv, "--batch-tokens", "1"]) == 130
    expected = f"interrupted; 2 of 3 prompts are done in {out}; the same command goes on\n"
    assert capsys.readouterr().err.endswith(expected)
    assert out.read_bytes().count(b"\n") == 2


def _id_of(folder: Path, text: str) -> int:
    from model import tokenizer

    (found,) = tokenizer.encode(tokenizer.from_folder(folder), text)
    return found
