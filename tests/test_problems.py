"""Which problems the tuner takes on: bench cases, sizes by hand, what a model launches."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import tkernels
from autotune import problems
from autotune.model_facts import facts_of, read_facts
from autotune.records import label_of
from model.kv_cache import SequenceState
from model.runner import PREFILL_CHUNK, Runner
from tests.checkpoints import tiny
from tkernels import config, device
from tkernels.registry import KernelSpec, Problem, all_kernels, get

SPECS = list(all_kernels().values())
CONFIG = {
    "model_type": "qwen3",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "torch_dtype": "bfloat16",
}


def shapes(kernel: str, *texts: str) -> list[Any]:
    return problems.shape_tasks([get(kernel)], texts, "sm90")


# ---- sizes by hand -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kernel", "case", "text"),
    [
        ("paged_attn", "decode-b64-ctx4096-32/8x128-bf16", "batch=64,context=4096"),
        ("paged_attn", "chunk-2048-ctx8192-32/8x128-bf16", "batch=1,context=8192,query=2048"),
        ("flash_attn", "causal-16x512-32/8x128-bf16", "batch=16,seqlen=512"),
        ("flash_attn", "full-4x4096-32/8x128-bf16", "batch=4,seqlen=4096,causal=false"),
        ("rms_norm", "16384x5120-bf16", "tokens=16384,hidden=5120"),
        ("fused_add_rms_norm", "64x4096-bf16", "tokens=64,hidden=4096"),
        ("silu_and_mul", "64x12288-bf16", "tokens=64,intermediate=12288"),
        ("rope", "qwen3-8b-t64", "tokens=64"),
        ("fused_qk_norm_rope", "qwen3-8b-t8192", "tokens=8192"),
        ("append_paged_kv", "64x8x128-bf16", "tokens=64"),
        ("merge_attn_states", "64x32x128-bf16", "tokens=64"),
    ],
)
def test_a_shape_gives_the_problem_of_the_bench_case(kernel: str, case: str, text: str) -> None:
    [task] = shapes(kernel, text)
    [expected] = [c for c in get(kernel).cases if c.name == case]
    assert dict(task.problem) == dict(expected.problem)
    assert task.key == get(kernel).tuning_key(expected.problem)


def test_every_kernel_has_a_shape() -> None:
    assert [spec.name for spec in SPECS if spec.shape is None] == []


def test_lists_give_the_product_without_repeats() -> None:
    tasks = shapes("paged_attn", "batch=1:16:64,context=1024:8192", "batch=16,context=1024")
    assert len(tasks) == 6
    assert len({task.label for task in tasks}) == 6
    assert tasks[0].case == "batch1-context1024"


@pytest.mark.parametrize(
    ("kernel", "text", "words"),
    [
        ("paged_attn", "contxt=3", "takes batch, context, query=1.*got 'contxt'; did you mean con"),
        ("paged_attn", "batch=2", "must give context, got 'batch=2'"),
        ("paged_attn", "batch=0,context=8", "batch must be a whole number >= 1, got '0'"),
        ("paged_attn", "batch=-1,context=8", "batch must be a whole number >= 1, got '-1'"),
        ("paged_attn", "batch=2,context=8,dtype=int8", "dtype must be one of bf16, fp16, fp32"),
        ("paged_attn", "batch=2,batch=3,context=8", "each name once"),
        ("paged_attn", "batch", "must be name=value,..."),
        ("paged_attn", "batch=2,context=8,query=9", "query must be at most context=8, got 9"),
        ("paged_attn", "batch=2,context=8,num_heads=3", "k_cache must have a number of heads"),
        ("flash_attn", "batch=2,seqlen=8,head_dim=300", "head_dim 1 to 256, got"),
        ("flash_attn", "batch=2,seqlen=8,causal=maybe", "causal must be true or false, got"),
        ("rope", "tokens=4,head_dim=7", "rope"),
    ],
)
def test_shapes_that_are_refused(kernel: str, text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        shapes(kernel, text)
    assert "\n" not in str(caught.value)


def test_unknown_kernel_suggests_the_nearest() -> None:
    with pytest.raises(ValueError, match="got 'page_attn'; did you mean paged_attn"):
        get("page_attn")


def test_bytes_of_inputs_are_known_without_memory() -> None:
    [task] = shapes("rms_norm", "tokens=1000000,hidden=100000")
    assert problems.input_bytes(get("rms_norm"), task.problem) == 2 * (10**11 + 10**5)


# ---- models ------------------------------------------------------------------------------------


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> set[tuple[str, str]]:
    """(kernel, key) of each problem whose config is looked up."""
    found: set[tuple[str, str]] = set()
    explain: Callable[..., Any] = config.explain

    def noting(spec: KernelSpec, problem: Problem, given: Any = None) -> Any:
        found.add((spec.name, label_of(spec.tuning_key(problem))))
        return explain(spec, problem, given)

    config.reload()
    monkeypatch.setattr(config, "explain", noting)
    return found


@pytest.mark.parametrize(
    ("family", "batch", "context", "chunk"),
    [("qwen3", 3, 16, 48), ("llama-bias", 2, 32, 16)],  # prompts in one step, a prompt in two
)
def test_what_a_model_launches_is_what_is_tuned(
    family: str, batch: int, context: int, chunk: int, launched: set[tuple[str, str]]
) -> None:
    """The keys of a real prefill and decode step are those that --model derives, no more."""
    tiny_model = tiny(family)
    runner = Runner(tiny_model.ours, tkernels, num_blocks=32, max_positions=64, prefill_chunk=chunk)
    sequences = [SequenceState(list(range(1, context))) for _ in range(batch)]
    for sequence in sequences:
        sequence.token_ids.append(7)
    runner.prefill(sequences)
    prefill = set(launched)
    for sequence in sequences:  # the step that brings the context to its length plus one
        sequence.token_ids.append(7)
    runner.decode(sequences)
    tasks = problems.model_tasks(
        SPECS, tiny_model.folder, [batch], [context], device.current().arch, chunk=chunk
    )
    derived = {(task.kernel, task.label) for task in tasks}
    one_longer = problems.model_tasks(
        SPECS, tiny_model.folder, [batch], [context + 1], device.current().arch, chunk=chunk
    )
    assert prefill <= derived
    assert launched <= derived | {(task.kernel, task.label) for task in one_longer}
    assert {kernel for kernel, _ in derived} == {kernel for kernel, _ in launched}


def test_the_runners_chunk_is_ours() -> None:
    assert problems.PREFILL_CHUNK == PREFILL_CHUNK


def test_facts_are_read_from_a_folder_or_a_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    facts = read_facts(tmp_path)
    assert facts == read_facts(tmp_path / "config.json") == facts_of(CONFIG)
    assert (facts.head_dim, facts.rotary_dim, facts.qk_norm) == (128, 128, True)
    assert facts.dtype == torch.bfloat16
    llama = {**CONFIG, "model_type": "llama", "head_dim": None, "num_key_value_heads": None}
    assert facts_of(llama).num_kv_heads == 32
    assert not facts_of(llama).qk_norm
    assert facts_of({**llama, "num_attention_heads": 64}).head_dim == 64
    assert facts_of({**CONFIG, "rope_parameters": {"partial_rotary_factor": 0.5}}).rotary_dim == 64


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "must be a config.json or a folder with one, got .*No such file"),
        ("{", "it is not JSON"),
        ("[]", "must hold an object"),
        (json.dumps({**CONFIG, "hidden_size": 0}), "hidden_size must be an integer >= 1, got 0"),
        (json.dumps({**CONFIG, "intermediate_size": "x"}), "intermediate_size must be an integer"),
        (json.dumps({**CONFIG, "num_key_value_heads": 5}), "must be a multiple of num_key_value"),
        (json.dumps({**CONFIG, "torch_dtype": "int8"}), "dtype must be one of bfloat16.*'int8'"),
    ],
)
def test_models_that_cannot_be_read(text: str | None, words: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=f"^autotune: --model.*{words}"):
        problems.model_tasks(SPECS, tmp_path, [1], [16], "sm90")
