"""The runner against ``transformers``, and against itself: cached, batched, on the kernels."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import (
    CPU,
    FAMILIES,
    greedy,
    hf_greedy,
    load_folder,
    new_runner,
    smollm2,
    tiny,
)

import tkernels
from model import calibrate_kv, cpu_ops, kv_quality, qwen3
from model import config as configs
from model.gguf_file import read_gguf
from model.kv_cache import SequenceState, build_metadata
from model.kv_quant import choose
from model.perplexity import perplexity, read_text
from model.runner import Runner
from model.sources import open_gguf
from model.threads import cpu_threads, prompt_threads
from model.weights import load_model
from tkernels import skinny_linear_rows

TOLERANCE = 1e-4  # max abs difference of fp32 logits

each_family = pytest.mark.parametrize("family", FAMILIES)


def random_ids(vocab: int, count: int, seed: int = 0) -> list[int]:
    return torch.randint(vocab, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def assert_equals_transformers(ours: Any, hf: Any, ids: list[int]) -> None:
    """All logits of a prompt, and 64 greedy tokens after it."""
    with torch.inference_mode():
        expected = hf(torch.tensor([ids])).logits[0]
    got = new_runner(ours).prefill([SequenceState(list(ids))], all_logits=True)
    assert expected.abs().max() > 0.5  # a network of zeros would pass anything
    assert (got - expected).abs().max() <= TOLERANCE
    assert greedy(ours, ids, 64) == hf_greedy(hf, ids, 64)


# ---- against transformers ----------------------------------------------------------------------


@each_family
def test_random_network_equals_transformers(family: str) -> None:
    # 90 tokens: past the 64 that the scaled RoPE variants were "trained" on.
    assert_equals_transformers(tiny(family).ours, tiny(family).hf, random_ids(331, 90))


@pytest.mark.model
def test_trained_qwen3_equals_transformers(shared: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = shared / "models" / "qwen3-tiny-dense"
    hf = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32).eval()
    text = "def quicksort(xs):\n    if len(xs) < 2:\n        return xs\n"
    ids = AutoTokenizer.from_pretrained(str(folder))(text)["input_ids"]
    assert_equals_transformers(load_folder(folder), hf, ids)


@pytest.mark.model
@pytest.mark.slow
def test_smollm2_equals_transformers() -> None:
    """Logits, tokens, and the perplexity of 2,048 tokens of pydoc's topics."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = smollm2()
    file = read_gguf(path)
    config = configs.from_gguf(file.metadata, frozenset(file.tensors))
    ours = load_model(config, open_gguf(file, config), dtype=torch.float32, device=CPU)
    where = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    hf = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(**where)
    question = [{"role": "user", "content": "Explain what a CPU cache does."}]
    text = tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True)
    assert_equals_transformers(ours, hf, tokenizer(text)["input_ids"])

    ids = tokenizer(read_text(None))["input_ids"][:2048]
    with torch.inference_mode():
        loss = hf(torch.tensor([ids]), labels=torch.tensor([ids])).loss
    assert perplexity(ours, tkernels.reference, ids) == pytest.approx(math.exp(loss), rel=1e-3)


def test_bfloat16_agrees_roughly() -> None:
    """Half precision follows the same code: close to fp32, not equal to it."""
    half = load_folder(tiny("qwen3").folder, torch.bfloat16)
    ids = random_ids(331, 20)
    got = new_runner(half).prefill([SequenceState(ids)])
    expected = new_runner(tiny("qwen3").ours).prefill([SequenceState(ids)])
    assert got.dtype == torch.float32
    error = (got - expected).norm() / expected.norm()
    assert 0 < error < 0.05


# ---- against itself ----------------------------------------------------------------------------


@each_family
def test_cached_equals_uncached(family: str) -> None:
    """Token by token, in two chunks, or all at once: the same logits."""
    model, ids = tiny(family).ours, random_ids(331, 41)
    whole = new_runner(model).prefill([SequenceState(list(ids))], all_logits=True)

    runner, sequence = new_runner(model), SequenceState(ids[:1])
    stepped = [runner.prefill([sequence])]
    for token in ids[1:]:
        sequence.token_ids.append(token)
        stepped.append(runner.decode([sequence]))
    torch.testing.assert_close(torch.cat(stepped), whole, rtol=0, atol=TOLERANCE)

    runner, sequence = new_runner(model), SequenceState(ids[:17])
    first = runner.prefill([sequence], all_logits=True)
    sequence.token_ids.extend(ids[17:])
    second = runner.prefill([sequence], all_logits=True)
    torch.testing.assert_close(torch.cat((first, second)), whole, rtol=0, atol=TOLERANCE)


@each_family
def test_batch_of_mixed_lengths_equals_one_by_one(family: str) -> None:
    """Prompts around the block size, then decode steps in which some sequences have left."""
    model = tiny(family).ours
    prompts = [random_ids(331, n, seed=n) for n in (1, 15, 16, 17, 40)]
    batched = [SequenceState(list(p)) for p in prompts]
    runner = new_runner(model)
    poison(runner.cache)
    rows = [runner.prefill(batched)]
    for step in range(3):
        batched = batched[: 5 - step]
        for s in batched:
            s.token_ids.append((7 * len(s.token_ids)) % 331)
        rows.append(runner.decode(batched))

    for i, prompt in enumerate(prompts):
        alone, sequence = new_runner(model), SequenceState(list(prompt))
        torch.testing.assert_close(rows[0][i], alone.prefill([sequence])[0], rtol=0, atol=TOLERANCE)
        for step in range(min(3, 5 - i)):
            sequence.token_ids.append((7 * len(sequence.token_ids)) % 331)
            torch.testing.assert_close(
                rows[1 + step][i], alone.decode([sequence])[0], rtol=0, atol=TOLERANCE
            )


def test_prefill_beside_decode() -> None:
    """One step may bring a new prompt for one sequence and one token for another."""
    model = tiny("qwen3").ours
    old, new = random_ids(331, 30, seed=1), random_ids(331, 20, seed=2)
    runner = new_runner(model)
    poison(runner.cache)
    running = SequenceState(old[:-1])
    runner.prefill([running])
    running.token_ids.append(old[-1])
    both = runner.prefill([running, SequenceState(list(new))])
    for row, ids in zip(both, (old, new), strict=True):
        alone = new_runner(model).prefill([SequenceState(list(ids))])[0]
        torch.testing.assert_close(row, alone, rtol=0, atol=TOLERANCE)


def test_released_blocks_hide_nothing() -> None:
    """A sequence in blocks that another one used, in another order, is not disturbed by it."""
    model = tiny("llama-bias").ours
    runner = new_runner(model, num_blocks=6)
    first, second = (SequenceState(random_ids(331, n, seed=n)) for n in (48, 33))
    runner.prefill([first])
    runner.prefill([second])
    with pytest.raises(ValueError, match="expected 1 free blocks of 16 tokens, got 0"):
        runner.prefill([SequenceState([1])])
    runner.blocks.release(first.block_ids)
    third = SequenceState(random_ids(331, 35, seed=9))
    got = runner.prefill([third])
    expected = new_runner(model).prefill([SequenceState(list(third.token_ids))])
    torch.testing.assert_close(got, expected, rtol=0, atol=TOLERANCE)


def test_steps_refuse_wrong_sequences() -> None:
    runner = new_runner(tiny("qwen3").ours)
    sequence = SequenceState([1, 2, 3])
    with pytest.raises(ValueError, match="expected one new token in each sequence, got 3"):
        runner.decode([sequence])
    runner.prefill([sequence])
    with pytest.raises(ValueError, match="at least one new token in each sequence, got 0"):
        runner.prefill([sequence])
    with pytest.raises(ValueError, match="at most 256 tokens in a sequence, got 257"):
        runner.prefill([SequenceState([1] * 257)])


@pytest.mark.parametrize(("few_rows", "bodies"), [(0, False), (2, False), (0, True)])
@pytest.mark.parametrize("family", ["qwen3", "llama-bias"])
def test_kernels_equal_references(
    family: str, few_rows: int, bodies: bool, dev: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same runner on ``tkernels`` and on its references; few rows take kernels of their own,
    and several products may."""
    monkeypatch.setattr(qwen3, "FEW_ROWS", few_rows)
    monkeypatch.setattr(skinny_linear_rows, "takes", lambda x, weight: bodies)
    called: list[str] = []
    for name in ("skinny_linear", "rms_norm", "fused_add_rms_norm", "silu_and_mul"):
        kernel = getattr(tkernels, name)
        monkeypatch.setattr(
            tkernels, name, lambda *a, n=name, k=kernel, **b: called.append(n) or k(*a, **b)
        )
    model = load_folder(tiny(family).folder, device=dev)
    for layer in model.layers:
        for linear in (layer.qkv_proj, layer.o_proj, layer.gate_up_proj, layer.down_proj):
            linear.weight = linear.weight.contiguous()
    model.lm_head.weight = model.lm_head.weight.contiguous()
    prompts = [random_ids(331, n, seed=n) for n in (3, 18)]
    results = []
    for ops in (tkernels, tkernels.reference):
        runner = new_runner(model, ops)
        sequences = [SequenceState(list(p)) for p in prompts]
        rows = [runner.prefill(sequences)]
        for s in sequences:
            s.token_ids.append(5)
        called.clear()
        rows.append(runner.decode(sequences))
        results.append(torch.cat(rows))
        if ops is tkernels:
            layers = len(model.layers)
            product = ["skinny_linear"] * bodies
            add = ["fused_add_rms_norm"]
            layer = [*product, *product, *add, *product, "silu_and_mul", *product, *add]
            apart = [*layer * layers, *product]
            fused = ["skinny_linear"] * 4 * layers + ["rms_norm", "skinny_linear"]
            assert called == (fused if few_rows else ["rms_norm", *apart])
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("family", ["qwen3", "llama-bias"])
def test_keys_appended_in_passing(
    family: str, dev: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks of up to so many tokens and decode steps have a launch less, and the same logits; a
    decode step of so many sequences two less."""
    called: list[str] = []
    one, two = "fused_qk_norm_rope_append_attn", "fused_qk_norm_rope_append"
    for name in (one, two, "append_paged_kv", "flash_attn", "paged_attn"):
        kernel = getattr(tkernels, name)
        monkeypatch.setattr(
            tkernels, name, lambda *a, n=name, k=kernel, **b: called.append(n) or k(*a, **b)
        )
    whole = load_folder(tiny(family).folder, device=dev)
    model = dataclasses.replace(whole, layers=whole.layers[:1])
    ids = random_ids(331, 20)
    results = []
    for rows, decode_rows in ((0, 1), (3, 0), (3, 1)):
        monkeypatch.setattr(qwen3, "APPENDED_ROWS", rows)
        monkeypatch.setattr(qwen3, "FUSED_DECODE_ROWS", decode_rows)
        runner, sequence = new_runner(model, tkernels), SequenceState([])
        called.clear()
        for begin, end in ((0, 5), (5, 8), (8, 12)):
            sequence.token_ids.extend(ids[begin:end])
            results.append(runner.prefill([sequence]))
        sequence.token_ids.append(7)
        results.append(runner.decode([sequence]))
        apart, joined = ["append_paged_kv", "paged_attn"], rows and family == "qwen3"
        few = [two, "paged_attn"] if joined else apart
        last = [one] if joined and decode_rows else few
        assert called == ["append_paged_kv", "flash_attn", *few, *apart, *last]
    for i, row in enumerate(results):
        torch.testing.assert_close(row, results[i % 4], rtol=0, atol=TOLERANCE)


def test_keys_that_others_need_are_not_appended_in_passing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By attention outside of the pages, by a cache that quantises, by operations that watch."""
    monkeypatch.setattr(qwen3, "APPENDED_ROWS", 4)
    model = tiny("qwen3-heads-of-32").ours
    runner = new_runner(model, tkernels)
    quantization = choose("int8", None, None, model.config)
    quantized = Runner(model, tkernels, num_blocks=4, max_positions=64, quantization=quantization)
    new, old = (SequenceState([1, 2, 3][: n + 1], n, [0]) for n in (0, 2))
    sdpa = build_metadata([old], [1], CPU, sdpa=True)
    pages, start = (build_metadata([s], [1], CPU, sdpa=False) for s in (old, new))
    tap = calibrate_kv.Tap(tkernels, 1, None)
    errors = kv_quality.AttentionErrors(tkernels, None, {})

    def appends(ops: Any, cache: Any, meta: Any, rows: int = 4) -> bool:
        return qwen3.OverCache(ops, cache, meta).appends_in_passing(0, rows)

    monkeypatch.setattr(qwen3, "FUSED_DECODE_ROWS", 2)
    chunk = build_metadata([SequenceState([1, 2, 3, 4], 2, [0])], [2], CPU, sdpa=False)
    for ops, meta, rows, expected in (
        (tkernels, pages, 2, True),
        (tkernels, pages, 3, False),
        (tkernels, chunk, 2, False),
        (cpu_ops, pages, 2, False),
    ):
        assert qwen3.OverCache(ops, runner.cache, meta).in_one_launch(rows) == expected
    assert appends(tkernels, runner.cache, pages)
    assert not appends(tkernels, runner.cache, pages, rows=5)
    assert not appends(tkernels, runner.cache, sdpa)
    assert not appends(tkernels, runner.cache, start)
    assert not appends(tkernels, quantized.cache, pages)
    for ops in (tap, errors, cpu_ops):
        assert not appends(ops, runner.cache, pages)


@pytest.mark.parametrize("family", ["qwen3", "llama-bias"])
def test_cpu_operations_equal_references(family: str) -> None:
    """The short forms of one-token steps, on the same runner as the plain ones."""
    prompts = [random_ids(331, n, seed=n) for n in (3, 18)]
    results = []
    for ops in (cpu_ops, tkernels.reference):
        runner = new_runner(tiny(family).ours, ops)
        poison(runner.cache)
        sequences = [SequenceState(list(p)) for p in prompts]
        rows = [runner.prefill(sequences)]
        for step in (sequences[:1], sequences, sequences[1:]):
            for s in step:
                s.token_ids.append(5)
            rows.append(runner.decode(step))
        results.append(torch.cat(rows))
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=TOLERANCE)


def test_cpu_operations_take_what_they_cannot_shorten() -> None:
    """Partial rotary heads, results elsewhere and other dtypes go to the reference."""
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(9, 8, generator=generator)
    positions = torch.tensor([3])
    for dtype, rotary in ((torch.float32, 8), (torch.bfloat16, 16), (torch.float32, 16)):
        q, k = (torch.randn(1, n, 16, generator=generator).to(dtype) for n in (4, 2))
        cache = torch.cat((table, table), dim=1)[:, :rotary].contiguous()
        expected = tkernels.reference.rope(q, k, cache, positions)
        cpu_ops.rope(q, k, cache, positions, q_out=q, k_out=k)
        torch.testing.assert_close((q, k), expected)
    x, residual = (torch.randn(1, 16, generator=generator).bfloat16() for _ in range(2))
    weight = torch.randn(16, generator=generator).bfloat16()
    torch.testing.assert_close(
        cpu_ops.fused_add_rms_norm(x, residual, weight, eps=1e-6),
        tkernels.reference.fused_add_rms_norm(x, residual, weight, eps=1e-6),
    )


def poison(cache: Any) -> None:
    """Fill a cache with NaN, so that reading a slot that nobody wrote shows."""
    for layer in (*cache.k, *cache.v):
        layer.fill_(torch.nan)


def test_prompt_threads_grow_with_the_work() -> None:
    small, before = tiny("qwen3").ours, torch.get_num_threads()
    assert prompt_threads(small, 2) == 1
    assert prompt_threads(small, 10**6) == before
    with cpu_threads(1):
        assert torch.get_num_threads() == 1
        assert prompt_threads(small, 10**6) == 1
    assert torch.get_num_threads() == before
