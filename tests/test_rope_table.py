"""The cos/sin table equals the factors that transformers' own rotary embeddings compute."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tkernels.rope_table import build_cos_sin_cache

LLAMA = {
    "model_type": "llama",
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rope_theta": 500000.0,
}

SCALINGS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    "yarn-options": {
        "rope_type": "yarn",
        "factor": 8,
        "original_max_position_embeddings": 32,
        "beta_fast": 16.0,
        "beta_slow": 2,
        "truncate": False,
    },
    "yarn-mscale": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "mscale": 1.0,
        "mscale_all_dim": 0.7,
    },
    "yarn-attention": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "attention_factor": 1.25,
    },
    "yarn-no-original": {"rope_type": "yarn", "factor": 4.0},
    "yarn-null-factor": {
        "rope_type": "yarn",
        "factor": None,
        "original_max_position_embeddings": 64,
    },
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}


def spelled(config: dict[str, Any], scaling: dict[str, Any], spelling: str) -> dict[str, Any]:
    """``config`` with ``scaling`` as configs in the wild write it."""
    config = dict(config)
    if spelling == "rope_parameters":
        theta = config.pop("rope_theta")
        return {**config, "rope_parameters": {**scaling, "rope_theta": theta}}
    if spelling == "rope_scaling.type":
        scaling = {"type" if k == "rope_type" else k: v for k, v in scaling.items()}
    return {**config, "rope_scaling": scaling}


SPELLINGS = ["rope_scaling.type", "rope_scaling.rope_type", "rope_parameters"]


def theirs(
    config: dict[str, Any], num_positions: int, family: str = "llama"
) -> tuple[torch.Tensor, Any]:
    """(table, rotary embedding) by transformers: cos | sin of the distinct columns."""
    if family == "llama":
        from transformers.models.llama.configuration_llama import LlamaConfig as Config
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding as Embedding
    else:
        from transformers.models.qwen3.configuration_qwen3 import Qwen3Config as Config
        from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding as Embedding
    fields = {k: dict(v) if isinstance(v, dict) else v for k, v in config.items()}
    embedding = Embedding(Config(**fields))
    cos, sin = embedding(torch.zeros(1), torch.arange(num_positions)[None])
    half = cos.shape[-1] // 2
    return torch.cat((cos[0, :, :half], sin[0, :, :half]), dim=1), embedding


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("num_positions", [100, 300])
def test_equals_transformers(scaling: str, spelling: str, num_positions: int) -> None:
    config = spelled(LLAMA, SCALINGS[scaling], spelling)
    expected, _ = theirs(config, num_positions)
    got = build_cos_sin_cache(config, num_positions)
    assert got.dtype == torch.float32
    assert got.shape == (num_positions, 64)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-6)
    plain = build_cos_sin_cache(LLAMA, num_positions)
    # Guards the test itself: each scaling does something (dynamic only past the trained length).
    inactive = scaling == "default" or (scaling == "dynamic" and num_positions <= 256)
    assert torch.equal(got, plain) == inactive


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_qwen3_yarn_at_full_length(spelling: str) -> None:
    """Qwen3's published YaRN setting, to the last of its 131,072 positions."""
    base = {
        "model_type": "qwen3",
        "hidden_size": 1024,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rope_theta": 1000000,
    }
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    config = spelled(base, scaling, spelling)
    expected, embedding = theirs(config, 131072, "qwen3")
    got = build_cos_sin_cache(config, 131072)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-6)
    assert embedding.attention_scaling > 1.1  # folded into the table:
    assert float(got[0, 0]) == pytest.approx(embedding.attention_scaling)


@pytest.mark.parametrize("scaling", ["linear", "dynamic", "yarn", "llama3"])
@pytest.mark.parametrize("inside", [False, True])
def test_partial_rotary_factor(scaling: str, inside: bool) -> None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.llama.configuration_llama import LlamaConfig

    config = spelled(LLAMA, SCALINGS[scaling], "rope_parameters")
    if inside:
        config["rope_parameters"]["partial_rotary_factor"] = 0.5
    else:
        config["partial_rotary_factor"] = 0.5
    hf = LlamaConfig(**{**config, "rope_parameters": dict(config["rope_parameters"])})
    inv_freq, attention_factor = ROPE_INIT_FUNCTIONS[scaling](hf)
    got = build_cos_sin_cache(config, 200)
    assert got.shape == (200, 32)
    angles = torch.arange(200).float()[:, None] * inv_freq
    expected = torch.cat((angles.cos(), angles.sin()), dim=1) * attention_factor
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-6)


def test_partial_default_covers_the_first_dimensions() -> None:
    config = {"head_dim": 80, "rope_theta": 10000.0, "partial_rotary_factor": 0.4}
    got = build_cos_sin_cache(config, 7)
    assert torch.equal(got, build_cos_sin_cache({"head_dim": 32, "rope_theta": 10000.0}, 7))


def test_both_keys_that_agree() -> None:
    scaling = SCALINGS["yarn"]
    both = {**LLAMA, "rope_scaling": scaling, "rope_parameters": {**scaling, "rope_theta": 5e5}}
    one = {**LLAMA, "rope_scaling": scaling}
    assert torch.equal(build_cos_sin_cache(both, 9), build_cos_sin_cache(one, 9))


def test_first_llama_configs_have_no_theta() -> None:
    config = {k: v for k, v in LLAMA.items() if k != "rope_theta"}
    expected = build_cos_sin_cache({**LLAMA, "rope_theta": 10000.0}, 5)
    assert torch.equal(build_cos_sin_cache(config, 5), expected)
    assert torch.equal(theirs(config, 5)[0], expected)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"rope_scaling": {"type": "longrope", "factor": 2.0}},
            "rope_type must be one of default, linear, dynamic, yarn, llama3, got 'longrope'",
        ),
        ({"rope_scaling": {"type": "mrope"}}, "got 'mrope'"),
        (
            {"rope_scaling": {"type": "default", "mrope_section": [8, 12, 12]}},
            r"positions must be one number a token, got mrope_section=\[8, 12, 12\]",
        ),
        (
            {"rope_scaling": {"type": "linear", "rope_type": "yarn", "factor": 2.0}},
            "rope_type and type must agree, got 'yarn' and 'linear'",
        ),
        ({"rope_scaling": {"factor": 2.0}}, "rope_type must be given where a scaling factor is"),
        ({"rope_scaling": {"type": "linear"}}, "linear scaling needs factor, but the rope fields"),
        ({"rope_scaling": {"type": "dynamic"}}, "dynamic scaling needs factor"),
        ({"rope_scaling": {"type": "yarn"}}, "YaRN scaling needs factor"),
        (
            {"rope_scaling": {"type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}},
            "llama3 scaling needs high_freq_factor",
        ),
        (
            {
                "rope_scaling": {
                    "type": "llama3",
                    "factor": 8.0,
                    "low_freq_factor": 4.0,
                    "high_freq_factor": 4.0,
                }
            },
            "high_freq_factor must be above low_freq_factor, got 4.0 and 4.0",
        ),
        (
            {"rope_scaling": {"type": "linear", "factor": "4"}},
            "factor must be a number > 0, got '4'",
        ),
        ({"rope_scaling": "linear"}, "rope_scaling must be a mapping or null, got 'linear'"),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
            r"got one per layer type \(full_attention\)",
        ),
        (
            {"rope_parameters": {"rope_theta": 1e4}, "rope_scaling": {"rope_theta": 1e6}},
            "rope_parameters and rope_scaling must agree, got rope_theta=10000.0 and 1000000.0",
        ),
        ({"rope_theta": None, "model_type": "qwen3"}, "rope_theta must be given"),
        ({"rope_theta": -1.0}, "rope_theta must be a number > 0, got -1.0"),
        ({"hidden_size": None}, "a config without head_dim needs hidden_size"),
        ({"partial_rotary_factor": 0.05}, r"must be even and in \[2, head_dim\], got 64 \* 0.05"),
        ({"head_dim": 64.5}, "head_dim must be a whole number, got 64.5"),
        ({"rope_theta": float("inf")}, "rope_theta must be at most 1e[+]30, got inf"),
        ({"rope_theta": 10**400}, "rope_theta must be at most 1e[+]30, got 1000"),
        ({"rope_scaling": {"type": ["yarn"], "factor": 2.0}}, r"one of .*, got \['yarn'\]"),
        (
            {"rope_theta": 1.0, "rope_scaling": {"type": "yarn", "factor": 2.0}},
            "rope_theta must be above 1 for YaRN scaling, got 1.0",
        ),
        ({"head_dim": 65}, r"must be even and in \[2, head_dim\], got 65 \* 1.0 = 65"),
        (
            {"max_position_embeddings": None, "rope_scaling": {"type": "yarn", "factor": 2.0}},
            "YaRN scaling without original_max_position_embeddings needs max_position_embeddings",
        ),
    ],
)
def test_errors(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=f"build_cos_sin_cache: .*{words}"):
        build_cos_sin_cache({**LLAMA, **change}, 4)


@pytest.mark.parametrize("bad", [None, [], object()])
def test_config_is_a_mapping(bad: Any) -> None:
    with pytest.raises(TypeError, match=r"build_cos_sin_cache: hf_config must be a mapping"):
        build_cos_sin_cache(bad, 4)


@pytest.mark.parametrize("bad", [0, -3, True, 2.0])
def test_num_positions(bad: Any) -> None:
    with pytest.raises(ValueError, match="num_positions must be an int >= 1, got"):
        build_cos_sin_cache(LLAMA, bad)


def test_device() -> None:
    assert build_cos_sin_cache(LLAMA, 2, device="meta").device.type == "meta"
