"""Qwen3-MoE in the runner: against ``transformers``, in both layouts, and what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from checkpoints import CPU, EXPERTS, greedy, hf_greedy, load_folder, new_runner, tiny
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode

import tkernels
from model import config as configs
from model import cpu_ops
from model.gguf_file import read_gguf
from model.kv_cache import SequenceState
from model.qwen3 import Linear, Model
from model.sources import open_gguf, open_safetensors
from model.weights import load_model

NAME = "qwen3_moe"
TOLERANCE = 1e-4  # max abs difference of fp32 logits

each_family = pytest.mark.parametrize("family", EXPERTS)


def random_ids(count: int, seed: int = 0) -> list[int]:
    return torch.randint(331, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def all_logits(model: Model, ids: list[int], ops: Any = cpu_ops) -> torch.Tensor:
    return new_runner(model, ops).prefill([SequenceState(list(ids))], all_logits=True)


def assert_equals_transformers(ours: Model, hf: Any, ids: list[int]) -> None:
    """All logits of a prompt, on both sets of operations, and 64 greedy tokens after it."""
    with torch.inference_mode():
        expected = hf(torch.tensor([ids])).logits[0]
    assert expected.abs().max() > 0.5  # a network of zeros would pass anything
    for ops in (cpu_ops, tkernels.reference):
        assert (all_logits(ours, ids, ops) - expected).abs().max() <= TOLERANCE
    assert greedy(ours, ids, 64) == hf_greedy(hf, ids, 64)


# ---- against transformers ------------------------------------------------------------------------


@each_family
def test_random_network_equals_transformers(family: str) -> None:
    assert_equals_transformers(tiny(family).ours, tiny(family).hf, random_ids(50))


@pytest.mark.model
def test_trained_network_equals_transformers(shared: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = shared / "models" / "qwen3-tiny-moe"
    hf = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32).eval()
    text = "def quicksort(xs):\n    if len(xs) < 2:\n        return xs\n"
    ids = AutoTokenizer.from_pretrained(str(folder))(text)["input_ids"]
    assert_equals_transformers(load_folder(folder), hf, ids)


def test_layers_are_those_of_the_config() -> None:
    """Which have experts, how many, and how a token's weights are made."""
    for family, sparse in {
        NAME: [True] * 3,
        "qwen3_moe-every-other": [False, True, False],
        "qwen3_moe-dense-first": [False, True, True],
    }.items():
        model = tiny(family).ours
        assert [layer.experts is not None for layer in model.layers] == sparse
        assert [layer.gate_up_proj is None for layer in model.layers] == sparse
    experts = tiny("qwen3_moe-every-other").ours.layers[1].experts
    assert experts is not None
    assert experts.gate_up_proj.shape == (7, 40, 48)
    assert experts.down_proj.shape == (7, 48, 20)
    assert (experts.top_k, experts.renormalize) == (3, False)


def test_norm_topk_prob_counts() -> None:
    """The tests above would not pass with the other value."""
    ours, ids = tiny(NAME).ours, random_ids(20)
    expected = all_logits(ours, ids)
    experts = [layer.experts for layer in ours.layers if layer.experts is not None]
    try:
        for one in experts:
            one.renormalize = False
        assert (all_logits(ours, ids) - expected).abs().max() > 100 * TOLERANCE
    finally:
        for one in experts:
            one.renormalize = True


def test_bfloat16_agrees_roughly() -> None:
    """Half precision follows the same code: close to fp32, not equal to it."""
    half, ids = load_folder(tiny(NAME).folder, torch.bfloat16), random_ids(20)
    expected, got = all_logits(tiny(NAME).ours, ids), all_logits(half, ids)
    error = (got - expected).norm(dim=1) / expected.norm(dim=1)
    assert 0 < error.median() < 0.05  # of a token whose experts change it is larger


# ---- against itself ------------------------------------------------------------------------------


@each_family
def test_cached_equals_uncached(family: str) -> None:
    """Token by token, in two chunks, or all at once: the same logits."""
    model, ids = tiny(family).ours, random_ids(25)
    whole = all_logits(model, ids)

    runner, sequence = new_runner(model, cpu_ops), SequenceState(ids[:1])
    stepped = [runner.prefill([sequence])]
    for token in ids[1:]:
        sequence.token_ids.append(token)
        stepped.append(runner.decode([sequence]))
    torch.testing.assert_close(torch.cat(stepped), whole, rtol=0, atol=TOLERANCE)

    runner, sequence = new_runner(model, cpu_ops), SequenceState(ids[:17])
    first = runner.prefill([sequence], all_logits=True)
    sequence.token_ids.extend(ids[17:])
    second = runner.prefill([sequence], all_logits=True)
    torch.testing.assert_close(torch.cat((first, second)), whole, rtol=0, atol=TOLERANCE)


@each_family
def test_batch_equals_one_by_one(family: str) -> None:
    model = tiny(family).ours
    prompts = [random_ids(n, seed=n) for n in (1, 16, 21)]
    batched = [SequenceState(list(p)) for p in prompts]
    runner = new_runner(model, cpu_ops)
    rows = [runner.prefill(batched)]
    for s in batched:
        s.token_ids.append(5)
    rows.append(runner.decode(batched))
    for i, prompt in enumerate(prompts):
        alone, sequence = new_runner(model, cpu_ops), SequenceState(list(prompt))
        torch.testing.assert_close(rows[0][i], alone.prefill([sequence])[0], rtol=0, atol=TOLERANCE)
        sequence.token_ids.append(5)
        torch.testing.assert_close(rows[1][i], alone.decode([sequence])[0], rtol=0, atol=TOLERANCE)


def test_kernels_equal_references(dev: torch.device) -> None:
    model = load_folder(tiny("qwen3_moe-every-other").folder, device=dev)
    prompts = [random_ids(n, seed=n) for n in (3, 18)]
    results = []
    for ops in (tkernels, tkernels.reference):
        runner = new_runner(model, ops)
        sequences = [SequenceState(list(p)) for p in prompts]
        rows = [runner.prefill(sequences)]
        for s in sequences:
            s.token_ids.append(5)
        rows.append(runner.decode(sequences))
        results.append(torch.cat(rows))
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=TOLERANCE)


# ---- the operation on a CPU ----------------------------------------------------------------------


def operands(tokens: int, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Of ``fused_moe`` with six experts of 10, three a token."""
    return {
        "x": torch.randn(tokens, 16).to(dtype),
        "router_logits": torch.randn(tokens, 6).to(dtype),
        "gate_up_weight": torch.randn(6, 20, 16).to(dtype),
        "down_weight": torch.randn(6, 16, 10).to(dtype),
        "top_k": 3,
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize("tokens", [0, 1, 2, 37])
def test_cpu_operation_equals_reference(
    tokens: int, renormalize: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = operands(tokens, dtype)
    given["router_logits"][:, 4] = given["router_logits"][:, 2]  # ties: the first one counts
    ids = [torch.full((tokens, 3), -1, dtype=torch.int32) for _ in range(2)]
    expected = tkernels.reference.fused_moe(**given, renormalize=renormalize, topk_ids_out=ids[0])
    monkeypatch.setattr(cpu_ops, "_ROWS_AT_ONCE", 5)
    got = cpu_ops.fused_moe(**given, renormalize=renormalize, topk_ids_out=ids[1])
    assert got.dtype == dtype
    assert torch.equal(ids[0], ids[1])
    near = {"rtol": 0, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 0.03, "atol": 0.5}
    torch.testing.assert_close(got, expected, **near)


def test_cpu_operation_reads_chosen_experts_alone() -> None:
    given = operands(1)
    ids = torch.empty(1, 3, dtype=torch.int32)
    expected = cpu_ops.fused_moe(**given, topk_ids_out=ids)
    others = [e for e in range(6) if e not in ids[0].tolist()]
    given["gate_up_weight"][others] = given["down_weight"][others] = torch.nan
    assert torch.equal(cpu_ops.fused_moe(**given), expected)


class _Largest(TorchDispatchMode):
    """Keeps the numbers of the largest tensor that an operation makes, views aside."""

    most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, tuple | list) else (out,):
            if isinstance(t, torch.Tensor) and not func.is_view:
                self.most = max(self.most, t.numel())
        return out


def test_cpu_operation_keeps_few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a long prompt nothing is made with rows for each token and expert but ids and weights."""
    monkeypatch.setattr(cpu_ops, "_ROWS_AT_ONCE", 8)
    given = operands(300)
    given["gate_up_weight"] = torch.randn(6, 2000, 16)
    given["down_weight"] = torch.randn(6, 16, 1000)
    with _Largest() as seen:
        cpu_ops.fused_moe(**given)
    assert 0 < seen.most <= 8 * 2000  # one for all would have 300 * 3 * 2000


# ---- figures -------------------------------------------------------------------------------------


@each_family
def test_bytes_of_a_step_are_those_of_chosen_experts(family: str) -> None:
    hf, config = tiny(family).hf, tiny(family).ours.config
    assert config.mixture is not None
    total = 0
    for name, p in hf.named_parameters():
        count = p.numel()
        if ".experts." in name:
            count = count // config.mixture.num_experts * config.mixture.num_experts_per_tok
        if "embed_tokens" not in name or config.tie_word_embeddings:
            total += 4 * count
    assert tiny(family).ours.bytes_per_step == total


# ---- files ---------------------------------------------------------------------------------------


@pytest.fixture
def stacked(tmp_path: Path) -> Path:
    """A copy with the experts of a layer in one tensor, free to be damaged."""
    tiny(NAME).hf.save_pretrained(tmp_path, save_original_format=False)
    names = load_file(tmp_path / "model.safetensors").keys()
    assert "model.layers.1.mlp.experts.gate_up_proj" in names
    assert not any("experts.0" in name for name in names)
    return tmp_path


def assert_same_weights(got: Model, expected: Model) -> None:
    assert torch.equal(got.embed_tokens, expected.embed_tokens)
    for one, other in zip(got.layers, expected.layers, strict=True):
        for name, value in vars(one).items():
            wanted = getattr(other, name)
            if name == "experts":
                assert value.top_k == wanted.top_k
                assert value.renormalize == wanted.renormalize
                for part in ("router", "gate_up_proj", "down_proj"):
                    assert torch.equal(getattr(value, part), getattr(wanted, part))
            elif isinstance(value, torch.Tensor):
                assert torch.equal(value, wanted)
            elif isinstance(value, Linear):
                assert torch.equal(value.weight, wanted.weight)


def test_both_layouts_are_one_network(stacked: Path) -> None:
    source = open_safetensors(tiny(NAME).folder)
    assert "model.layers.1.mlp.experts.4.up_proj.weight" in source.shapes
    assert_same_weights(load_folder(stacked), tiny(NAME).ours)


def rewrite(folder: Path, change: dict[str, torch.Tensor | None]) -> None:
    path = folder / "model.safetensors"
    tensors = {n: t for n, t in (load_file(path) | change).items() if t is not None}
    save_file(tensors, path, metadata={"format": "pt"})


def set_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


DOWN = "model.layers.1.mlp.experts.down_proj"


@pytest.mark.parametrize(
    ("change", "fields", "message"),
    [
        ({DOWN: None}, {}, r"layers\.1\.mlp\.experts\.0\.down_proj\.weight, got none .*5 of"),
        ({}, {"num_local_experts": 6}, r"experts\.5\.gate_proj\.weight, got none .*9 of"),
        ({}, {"num_local_experts": 4}, r"mlp\.gate\.weight of shape \[4, 72\], got \[5, 72\]"),
        ({}, {"moe_intermediate_size": 27}, r"of shape \[27, 72\], got \[28, 72\]"),
        ({}, {"mlp_only_layers": [0]}, r"expected tensor model\.layers\.0\.mlp\.gate_proj\.weight"),
        ({DOWN: torch.ones(5, 72)}, {}, r"down_proj of shape \[E, H, I\], got \[5, 72\]"),
        (
            {"model.layers.1.mlp.experts.gate_up_proj": torch.ones(5, 55, 72)},
            {},
            r"of shape \[E, 2 I, H\], got \[5, 55, 72\]",
        ),
        (
            {DOWN: torch.full((5, 72, 28), torch.nan)},
            {},
            r"got 2016 NaN or Inf in .*1\.mlp\.experts\.0\.down_proj",
        ),
        (
            {"model.layers.1.mlp.gate.weight": None},
            {},
            r"expected tensor model\.layers\.1\.mlp\.gate\.weight",
        ),
    ],
)
def test_experts_that_do_not_fit(
    change: dict[str, Any], fields: dict[str, Any], message: str, stacked: Path
) -> None:
    rewrite(stacked, change)
    set_config(stacked, **fields)
    with pytest.raises(ValueError, match=message):
        load_folder(stacked)


CONFIG = {
    "model_type": "qwen3_moe", "vocab_size": 32, "hidden_size": 16, "intermediate_size": 24,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "max_position_embeddings": 64, "rope_theta": 1e4, "num_experts": 6, "num_experts_per_tok": 2,
    "moe_intermediate_size": 12, "norm_topk_prob": True,
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_experts": 0}, "num_experts must be an integer >= 1, got 0"),
        ({"num_experts": None}, "num_experts must be an integer >= 1, got None"),
        ({"num_experts_per_tok": 7}, "num_experts_per_tok must be at most num_experts=6, got 7"),
        ({"num_experts_per_tok": 0}, "num_experts_per_tok must be an integer >= 1, got 0"),
        (
            {"moe_intermediate_size": "12"},
            "moe_intermediate_size must be an integer >= 1, got '12'",
        ),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step must be an integer >= 1, got 0"),
        (
            {"mlp_only_layers": [4]},
            r"mlp_only_layers must be a list of layers from 0 to 3, got \[4",
        ),
        ({"mlp_only_layers": 1}, "mlp_only_layers must be a list of layers from 0 to 3, got 1"),
        ({"norm_topk_prob": 1}, "norm_topk_prob must be true or false, got 1"),
    ],
)
def test_config_refuses_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        configs.from_hf(CONFIG | change)


def test_config_finds_sparse_layers() -> None:
    def layers(**fields: Any) -> tuple[int, ...]:
        mixture = configs.from_hf(CONFIG | fields).mixture
        return () if mixture is None else mixture.layers

    assert layers() == layers(mlp_only_layers=None, decoder_sparse_step=1) == (0, 1, 2, 3)
    assert layers(decoder_sparse_step=2) == (1, 3)
    assert layers(decoder_sparse_step=2, mlp_only_layers=[0, 3]) == (1,)
    assert layers(decoder_sparse_step=5) == ()
    renamed = {name: value for name, value in CONFIG.items() if name != "num_experts"}
    found = configs.from_hf(renamed | {"num_local_experts": 6})
    assert found.mixture == configs.from_hf(CONFIG).mixture
    del renamed["norm_topk_prob"]  # transformers' class has false where the field is absent
    found = configs.from_hf(renamed | {"num_local_experts": 6})
    assert found.mixture is not None
    assert not found.mixture.norm_topk_prob


# ---- GGUF ----------------------------------------------------------------------------------------


def write_gguf(path: Path, kind: Any = gguf.GGMLQuantizationType.F32) -> Path:
    """The random network as llama.cpp's converter writes one: each kind of expert stacked."""
    hf = tiny(NAME).hf
    c = hf.config
    writer = gguf.GGUFWriter(path, "qwen3moe")
    writer.add_vocab_size(c.vocab_size)
    writer.add_context_length(c.max_position_embeddings)
    writer.add_embedding_length(c.hidden_size)
    writer.add_block_count(c.num_hidden_layers)
    writer.add_feed_forward_length(c.intermediate_size)
    writer.add_head_count(c.num_attention_heads)
    writer.add_head_count_kv(c.num_key_value_heads)
    writer.add_key_length(c.head_dim)
    writer.add_layer_norm_rms_eps(c.rms_norm_eps)
    writer.add_rope_freq_base(1e4)
    writer.add_expert_count(5)
    writer.add_expert_used_count(2)
    writer.add_expert_feed_forward_length(28)
    names = {
        "embed_tokens": "token_embd", "lm_head": "output", "norm": "output_norm",
        "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
        "q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output",
        "q_norm": "attn_q_norm", "k_norm": "attn_k_norm", "gate": "ffn_gate_inp",
    }  # fmt: skip
    for name, p in hf.named_parameters():
        values, words = p.detach().numpy(), name.removesuffix(".weight").split(".")
        prefix = f"blk.{words[2]}." if "layers" in words else ""
        if words[-1] == "gate_up_proj":
            for part, rows in zip(("gate", "up"), np.split(values, 2, axis=1), strict=True):
                writer.add_tensor(f"{prefix}ffn_{part}_exps.weight", np.ascontiguousarray(rows))
        elif words[-1] == "down_proj":
            writer.add_tensor(f"{prefix}ffn_down_exps.weight", values)
        else:
            writer.add_tensor(f"{prefix}{names[words[-1]]}.weight", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_gguf_experts_in_blocks_are_read_one_by_one(tmp_path: Path) -> None:
    kind = gguf.GGMLQuantizationType.Q8_0
    values = np.random.default_rng(0).normal(size=(3, 5, 64)).astype(np.float32)
    stored = gguf.quantize(values, kind)
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "qwen3moe")
    writer.add_tensor("blk.2.ffn_up_exps.weight", stored, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    source = open_gguf(read_gguf(tmp_path / "m.gguf"), tiny(NAME).ours.config)
    names = [f"model.layers.2.mlp.experts.{e}.up_proj.weight" for e in range(3)]
    assert source.shapes == dict.fromkeys(names, (5, 64))
    for e, name in enumerate(names):
        expected = torch.from_numpy(gguf.dequantize(stored, kind)[e])
        assert torch.equal(source.read(name), expected)
        found = source.blocks(name)
        assert found is not None
        assert torch.equal(found.values(), expected)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("expert_gating_func", 2, "expert_gating_func must be 1, got 2"),
        ("expert_weights_scale", 2.5, r"expert_weights_scale must be 1\.0, got 2\.5"),
        ("expert_shared_count", 1, "expert_shared_count must be 0, got 1"),
        ("expert_count", None, "num_experts must be an integer >= 1, got None"),
    ],
)
def test_gguf_of_another_mixture_is_refused(
    field: str, value: Any, message: str, tmp_path: Path
) -> None:
    file = read_gguf(write_gguf(tmp_path / "m.gguf"))
    metadata = {**file.metadata, f"qwen3moe.{field}": value}
    with pytest.raises(ValueError, match=message):
        configs.from_gguf(metadata, frozenset(file.tensors))


def test_gguf_equals_its_folder(tmp_path: Path) -> None:
    file = read_gguf(write_gguf(tmp_path / "m.gguf"))
    config = configs.from_gguf(file.metadata, frozenset(file.tensors))
    assert config.mixture == tiny(NAME).ours.config.mixture
    got = load_model(config, open_gguf(file, config), dtype=torch.float32, device=CPU)
    assert_same_weights(got, tiny(NAME).ours)
    again = configs.from_hf(configs.to_hf(config))
    assert again.mixture == config.mixture
    assert re.match("Qwen3Moe", configs.to_hf(config)["architectures"][0])
