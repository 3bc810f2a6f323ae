"""Checkpoint files: what is read from configs, safetensors and GGUF, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from checkpoints import CPU, load_folder, new_runner, tiny
from safetensors.torch import load_file, save_file

from model import block_matrix
from model import config as configs
from model.block_matrix import BlockMatrix
from model.checkpoint import open_checkpoint
from model.gguf_file import blocks, dequantised, read_gguf
from model.kv_cache import SequenceState
from model.sources import open_gguf
from model.weights import load_model

QWEN3 = {
    "model_type": "qwen3", "vocab_size": 32, "hidden_size": 16, "intermediate_size": 24,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "max_position_embeddings": 64, "rope_theta": 1e4,
}  # fmt: skip


# ---- config.json -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gpt2"}, "must be one of qwen3, qwen3_moe, llama, mistral, qwen2, got"),
        ({"model_type": "qwen2_moe"}, "got 'qwen2_moe'"),
        ({"hidden_act": "gelu"}, "hidden_act must be 'silu', got 'gelu'"),
        ({"quantization_config": {"quant_method": "hqq"}}, "got quantization_config .*'hqq'"),
        ({"use_sliding_window": True, "sliding_window": 32}, "got sliding_window=32"),
        ({"use_sliding_window": True, "layer_types": ["sliding_attention"]}, "sliding_attention"),
        ({"model_type": "mistral", "sliding_window": 32}, "got sliding_window=32"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "rope_type must be one of .*'longrope'"),
        ({"num_key_value_heads": 3}, "multiple of num_key_value_heads, got 4 and 3"),
        ({"num_attention_heads": 0}, "num_attention_heads must be an integer >= 1, got 0"),
        ({"vocab_size": "32"}, "vocab_size must be an integer >= 1, got '32'"),
        ({"rms_norm_eps": None}, "rms_norm_eps must be a number > 0, got None"),
        ({"eos_token_id": [3, 99]}, "eos_token_id must be below vocab_size=32, got 99"),
        ({"model_type": "llama", "head_dim": None, "hidden_size": 18}, "got 18 and 4"),
    ],
)
def test_config_refuses_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        configs.from_hf(QWEN3 | change)


def test_config_keeps_every_eos_id(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3 | {"eos_token_id": 3}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 3]}))
    assert configs.from_folder(tmp_path).eos_token_ids == (5, 3)


def test_window_that_is_not_used_is_fine() -> None:
    config = configs.from_hf(QWEN3 | {"use_sliding_window": False, "sliding_window": 4})
    assert config.num_layers == 2


# ---- safetensors -------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of a checkpoint in one file, free to be damaged."""
    tensors = {}
    for path in sorted(tiny("qwen3").folder.glob("*.safetensors")):
        tensors |= load_file(path)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    shutil.copy(tiny("qwen3").folder / "config.json", tmp_path)
    return tmp_path


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """The same in shards with an index."""
    return Path(shutil.copytree(tiny("qwen3").folder, tmp_path / "shards"))


def rewrite(folder: Path, **changes: torch.Tensor | None) -> None:
    """Set or (None) drop tensors of ``model.safetensors``; dots in names are written __."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for key, value in changes.items():
        tensors.pop(key.replace("__", "."), None)
        if value is not None:
            tensors[key.replace("__", ".")] = value
    save_file(tensors, path, metadata={"format": "pt"})


def set_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_one_file_equals_shards(folder: Path) -> None:
    one, many = load_folder(folder), tiny("qwen3").ours
    assert torch.equal(one.embed_tokens, many.embed_tokens)
    for a, b in zip(one.layers, many.layers, strict=True):
        assert torch.equal(a.qkv_proj.weight, b.qkv_proj.weight)
        assert torch.equal(a.gate_up_proj.weight, b.gate_up_proj.weight)


def test_missing_shard(shards: Path) -> None:
    sorted(shards.glob("*.safetensors"))[0].unlink()
    with pytest.raises(ValueError, match=r"expected a file model-0000\d-of-.*, which it names"):
        load_folder(shards)


def test_truncated_shard(shards: Path) -> None:
    victim = sorted(shards.glob("*.safetensors"))[1]
    victim.write_bytes(victim.read_bytes()[:-100])
    with pytest.raises(ValueError, match=f"{victim.name}: expected a whole safetensors file"):
        load_folder(shards)


def test_index_names_a_tensor_that_is_not_there(shards: Path) -> None:
    index = shards / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["model.extra"] = sorted(content["weight_map"].values())[0]
    index.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"expected tensor model\.extra in model-00001.*got none"):
        load_folder(shards)


def test_index_is_not_json(shards: Path) -> None:
    (shards / "model.safetensors.index.json").write_text("{")
    with pytest.raises(ValueError, match=r"index\.json: expected valid JSON"):
        load_folder(shards)


def test_no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"or model\.safetensors, got neither"):
        load_folder(folder)


def test_no_config(folder: Path) -> None:
    (folder / "config.json").unlink()
    with pytest.raises(ValueError, match=r"expected a file config\.json, got none"):
        load_folder(folder)


def test_missing_tensor(folder: Path) -> None:
    rewrite(folder, model__layers__1__self_attn__k_norm__weight=None)
    with pytest.raises(ValueError, match=r"expected tensor .*1\.self_attn\.k_norm.*1 of 36"):
        load_folder(folder)


def test_unexpected_tensor(folder: Path) -> None:
    rewrite(folder, model__layers__1__self_attn__sinks=torch.zeros(6))
    with pytest.raises(ValueError, match=r"got 1 more, the first model\.layers\.1\..*sinks"):
        load_folder(folder)


def test_wrong_shape(folder: Path) -> None:
    set_config(folder, intermediate_size=99)
    with pytest.raises(ValueError, match=r"of shape \[99, 72\], got \[100, 72\]"):
        load_folder(folder)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_weights_that_are_not_finite(folder: Path, value: float) -> None:
    weight = torch.ones(100, 72)
    weight[3, 4] = value
    rewrite(folder, model__layers__2__mlp__up_proj__weight=weight)
    with pytest.raises(ValueError, match=r"got 1 NaN or Inf in model\.layers\.2\.mlp\.up_proj"):
        load_folder(folder)


def test_large_finite_weights_are_fine(folder: Path) -> None:
    """Their sum overflows fp32, they do not."""
    rewrite(folder, model__norm__weight=torch.full((72,), 3e38))
    assert load_folder(folder).norm[0] == 3e38


def test_untied_without_lm_head(folder: Path) -> None:
    rewrite(folder, lm_head__weight=None)
    with pytest.raises(ValueError, match="because tie_word_embeddings is false, got none"):
        load_folder(folder)
    set_config(folder, tie_word_embeddings=True)
    tied = load_folder(folder)
    assert tied.lm_head.weight is tied.embed_tokens


def test_tied_with_another_lm_head(folder: Path) -> None:
    set_config(folder, tie_word_embeddings=True)
    with pytest.raises(ValueError, match="because tie_word_embeddings is true, got a different"):
        load_folder(folder)
    embed = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    rewrite(folder, lm_head__weight=embed.clone())
    assert load_folder(folder).config.tie_word_embeddings


# ---- GGUF --------------------------------------------------------------------------------------


def llama_cpp_order(rows: np.ndarray, heads: int) -> np.ndarray:
    """The order in which llama.cpp's converter stores the q and k rows of Llama."""
    halves = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(rows.shape))


def write_gguf(path: Path, family: str, kind: Any = gguf.GGMLQuantizationType.F32) -> Path:
    """The tiny checkpoint of a family as llama.cpp would convert it (no tokeniser)."""
    hf = tiny(family).hf
    c = hf.config
    arch = family.split("-")[0]
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(c.num_hidden_layers)
    writer.add_context_length(c.max_position_embeddings)
    writer.add_embedding_length(c.hidden_size)
    writer.add_feed_forward_length(c.intermediate_size)
    writer.add_head_count(c.num_attention_heads)
    writer.add_head_count_kv(c.num_key_value_heads)
    writer.add_key_length(hf.model.layers[0].self_attn.head_dim)
    writer.add_layer_norm_rms_eps(c.rms_norm_eps)
    writer.add_rope_freq_base(c.rope_parameters["rope_theta"])
    writer.add_vocab_size(c.vocab_size)
    writer.add_array("tokenizer.ggml.tokens", [f"t{i}" for i in range(c.vocab_size)])
    writer.add_eos_token_id(7)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[arch.upper()], c.num_hidden_layers)
    for key, tensor in hf.state_dict().items():
        if key == "lm_head.weight" and c.tie_word_embeddings:
            continue
        values = tensor.numpy()
        for part, heads in (("q_proj", c.num_attention_heads), ("k_proj", c.num_key_value_heads)):
            if part in key and arch == "llama":
                values = llama_cpp_order(values, heads)
        name = names.get_name(key, try_suffixes=(".weight", ".bias"))
        if values.ndim == 2 and values.shape[1] % 32 == 0:
            writer.add_tensor(name, gguf.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("family", ["qwen3", "llama-bias", "qwen2"])
def test_gguf_equals_its_folder(family: str, tmp_path: Path) -> None:
    file = read_gguf(write_gguf(tmp_path / "m.gguf", family))
    config = configs.from_gguf(file.metadata, frozenset(file.tensors))
    expected = tiny(family).ours
    assert config.eos_token_ids == (7,)
    assert config.tie_word_embeddings == expected.config.tie_word_embeddings
    got = load_model(config, open_gguf(file, config), dtype=torch.float32, device=CPU)
    ids = list(range(40))
    torch.testing.assert_close(
        new_runner(got).prefill([SequenceState(list(ids))], all_logits=True),
        new_runner(expected).prefill([SequenceState(list(ids))], all_logits=True),
        rtol=0,
        atol=1e-5,
    )


@pytest.mark.parametrize(
    "kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_1", "Q4_K", "Q6_K"]
)
def test_dequantised_is_exact(kind: str) -> None:
    """Bit for bit what the gguf package gives, over random bytes."""
    code = gguf.GGMLQuantizationType[kind]
    per_block, block_bytes = gguf.GGML_QUANT_SIZES[code]
    shape = (5, 512 // per_block, block_bytes)
    raw = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    # Small scales: every fp16 whose high byte is below 0x3c is finite.
    raw[..., 1::2] &= 0x3B
    rows = raw.reshape(5, -1)
    expected = gguf.dequantize(rows, code)
    assert np.isfinite(expected).all()
    assert expected.std() > 0
    assert np.array_equal(dequantised(torch.from_numpy(rows), code).numpy(), expected)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
@pytest.mark.parametrize("sizes", [(70, 31), (7,), (96, 96)])
def test_block_matrix_equals_its_values(kind: str, sizes: tuple[int, ...]) -> None:
    """In blocks or dequantised, few tokens or many, one chunk or several: the same."""
    code = gguf.GGMLQuantizationType[kind]
    weights = [np.random.default_rng(n).normal(size=(n, 96)).astype(np.float32) for n in sizes]
    rows = [torch.from_numpy(gguf.quantize(w, code)) for w in weights]
    parts = [blocks(r, code) for r in rows]
    matrix = block_matrix.stack([p for p in parts if p is not None])
    assert matrix is not None
    expected = torch.cat([dequantised(r, code) for r in rows])
    assert matrix.shape == expected.shape == (sum(sizes), 96)
    assert torch.equal(matrix.values(), expected)
    ids = torch.tensor([0, sum(sizes) - 1, 5, 0])
    assert torch.equal(matrix.rows(ids), expected[ids])
    for tokens in (1, 3, 8, 9):
        x = torch.randn(tokens, 96)
        exact = x.double() @ expected.double().t()
        assert (matrix.multiply(x) - exact).abs().max() < 1e-5 * exact.abs().max()


def test_parts_in_different_formats_are_not_stacked() -> None:
    kinds = (gguf.GGMLQuantizationType.Q4_1, gguf.GGMLQuantizationType.Q8_0)
    values = np.ones((4, 32), dtype=np.float32)
    parts = [blocks(torch.from_numpy(gguf.quantize(values, kind)), kind) for kind in kinds]
    assert block_matrix.stack([p for p in parts if p is not None]) is None
    f16 = gguf.GGMLQuantizationType.F16
    assert blocks(torch.from_numpy(gguf.quantize(values, f16)), f16) is None


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
def test_gguf_in_blocks_equals_dequantised(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole network, prefill and decode."""
    code = gguf.GGMLQuantizationType[kind]
    file = read_gguf(write_gguf(tmp_path / "m.gguf", "llama-32", code))
    config = configs.from_gguf(file.metadata, frozenset(file.tensors))

    def logits() -> torch.Tensor:
        network = load_model(config, open_gguf(file, config), dtype=torch.float32, device=CPU)
        kept = isinstance(network.layers[0].qkv_proj.weight, BlockMatrix)
        assert kept == block_matrix.can_multiply()
        runner, sequence = new_runner(network), SequenceState(list(range(20)))
        rows = [runner.prefill([sequence], all_logits=True)]
        for token in (5, 300):
            sequence.token_ids.append(token)
            rows.append(runner.decode([sequence]))
        return torch.cat(rows)

    in_blocks = logits()
    monkeypatch.setattr(block_matrix, "can_multiply", lambda: False)
    torch.testing.assert_close(in_blocks, logits(), rtol=0, atol=1e-4)


def test_block_scale_that_is_not_finite(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", "llama-32", gguf.GGMLQuantizationType.Q4_1)
    start = read_gguf(path).tensors["blk.1.ffn_up.weight"].start
    with path.open("r+b") as raw:
        raw.seek(start)
        raw.write(np.array([np.nan], dtype=np.float16).tobytes())
    file = read_gguf(path)
    config = configs.from_gguf(file.metadata, frozenset(file.tensors))
    with pytest.raises(ValueError, match=r"got 1 NaN or Inf in model\.layers\.1\.mlp\.up_proj"):
        load_model(config, open_gguf(file, config), dtype=torch.float32, device=CPU)


def test_header_equals_gguf_reader(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", "qwen3", gguf.GGMLQuantizationType.F16)
    ours, theirs = read_gguf(path), gguf.GGUFReader(path)
    fields = {k: f.contents() for k, f in theirs.fields.items() if not k.startswith("GGUF.")}
    assert ours.metadata == fields
    assert len(fields["tokenizer.ggml.tokens"]) == 331
    for t in theirs.tensors:
        assert ours.tensors[t.name].shape == tuple(t.shape[::-1])
        assert ours.rows(t.name).numpy().tobytes() == t.data.tobytes()


@pytest.mark.parametrize("keep", [10, 100, 5000, -1])
def test_truncated_gguf(keep: int, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", "qwen3")
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ValueError, match=r"m\.gguf: expected .*, got "):
        read_gguf(path)


def test_gguf_of_something_else(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"not a model, but long enough")
    with pytest.raises(ValueError, match="expected a file that starts with 'GGUF', got b'not '"):
        read_gguf(path)
    with pytest.raises(ValueError, match=r"a folder or a \.gguf file, got nothing there"):
        open_checkpoint(tmp_path / "absent.gguf")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"general.architecture": "gemma3"}, "one of qwen3, qwen3moe, llama, qwen2, got 'gemma3'"),
        ({"llama.expert_count": 8}, "got a mixture of experts with llama.expert_count=8"),
        ({"llama.rope.scaling.type": "longrope"}, "none, linear or yarn, got 'longrope'"),
        ({"llama.attention.sliding_window": 16}, "got sliding_window=16"),
        ({"llama.embedding_length": None}, "hidden_size must be an integer >= 1, got None"),
    ],
)
def test_gguf_config_refuses_by_name(change: dict[str, Any], message: str) -> None:
    metadata = {
        "general.architecture": "llama", "llama.block_count": 2, "llama.context_length": 64,
        "llama.embedding_length": 16, "llama.feed_forward_length": 24,
        "llama.attention.head_count": 4, "llama.vocab_size": 32,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
    }  # fmt: skip
    assert configs.from_gguf(metadata, frozenset()).num_kv_heads == 4
    with pytest.raises(ValueError, match=message):
        configs.from_gguf(metadata | change, frozenset())
    with pytest.raises(ValueError, match=r"rope_freqs\.weight"):
        configs.from_gguf(metadata, frozenset({"rope_freqs.weight"}))
