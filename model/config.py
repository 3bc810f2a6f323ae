"""``ModelConfig``: what the network needs to know, from a ``config.json`` or from GGUF metadata.

Qwen3 and the Llama family (Llama, Mistral without a sliding window, Qwen2) are one network with
three switches: q/k norm, bias on the projections, tied embeddings. Qwen3-MoE is that network with
experts instead of the MLP in some or all layers. Whatever would make the
network compute something else (another activation, a sliding window, a quantisation that is not
known) is refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from model import awq_gptq, compressed, float8
from model.compressed import Quantization
from tkernels import build_cos_sin_cache

FAMILIES = ("qwen3", "qwen3_moe", "llama", "mistral", "qwen2")


@dataclass(frozen=True)
class Mixture:
    """The experts of a network: a token goes through some of them instead of one MLP."""

    num_experts: int
    num_experts_per_tok: int
    intermediate_size: int  # of one expert
    norm_topk_prob: bool  # the weights of a token's experts add up to 1
    layers: tuple[int, ...]  # that have experts; the others have an MLP

    @property
    def total(self) -> int:
        """Experts of all layers."""
        return len(self.layers) * self.num_experts


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and switches of one network, under the names of ``config.json``."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    qk_norm: bool  # RMSNorm on each head of q and k (Qwen3)
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    rope: Mapping[str, Any]  # the fields that tkernels.build_cos_sin_cache reads
    eos_token_ids: tuple[int, ...] = ()
    dtype: str = "float32"  # as stored
    quantization: Quantization | None = None  # of linear layers in a Hugging Face folder
    mixture: Mixture | None = None  # None: each layer has an MLP

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    def is_sparse(self, layer: int) -> bool:
        """Whether a layer has experts."""
        return self.mixture is not None and layer in self.mixture.layers


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; anything else is an error that names the file."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path.parent}: expected a file {path.name}, got none") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: expected valid JSON, got {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path}: expected a JSON object, got {type(found).__name__}")
    return found


def eos_ids(*sources: Mapping[str, Any]) -> tuple[int, ...]:
    """Every end-of-sequence id of these mappings' ``eos_token_id`` (a number or a list), once."""
    found: list[int] = []
    for source in sources:
        given = source.get("eos_token_id")
        for token in given if isinstance(given, list) else [given]:
            if isinstance(token, int) and token not in found:
                found.append(token)
    return tuple(found)


def from_folder(folder: Path) -> ModelConfig:
    """Config of a Hugging Face folder; eos ids of ``generation_config.json`` come first."""
    generation = folder / "generation_config.json"
    extra = read_json(generation) if generation.exists() else {}
    return from_hf(read_json(folder / "config.json"), eos_ids(extra))


def from_hf(config: Mapping[str, Any], more_eos_ids: tuple[int, ...] = ()) -> ModelConfig:
    """Config from the mapping in a ``config.json``.

    Raises:
        ValueError: one sentence that names the field, what was expected and what came.
    """
    family = config.get("model_type")
    if family not in FAMILIES:
        named = config.get("architectures")
        raise ValueError(
            f"config.json: model_type must be one of {', '.join(FAMILIES)}, got {family!r} "
            f"(architectures={named!r})"
        )
    _refuse_variants(config)
    heads = _size(config, "num_attention_heads")
    kv_heads = (
        heads if config.get("num_key_value_heads") is None else _size(config, "num_key_value_heads")
    )
    hidden = _size(config, "hidden_size")
    if config.get("head_dim") is not None:
        head_dim = _size(config, "head_dim")
    elif family == "qwen3":
        head_dim = 128  # the default of Qwen3's config class, whatever hidden_size is
    elif hidden % heads:
        raise ValueError(
            "config.json: hidden_size must be a multiple of num_attention_heads where head_dim is "
            f"not given, got {hidden} and {heads}"
        )
    else:
        head_dim = hidden // heads
    attention_bias = bool(config.get("attention_bias", False))
    stored = config.get("quantization_config")
    return _checked(
        ModelConfig(
            model_type=family,
            vocab_size=_size(config, "vocab_size"),
            hidden_size=hidden,
            intermediate_size=_size(config, "intermediate_size"),
            num_layers=_size(config, "num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            rms_norm_eps=_eps(config.get("rms_norm_eps", 1e-6)),
            max_position_embeddings=_size(config, "max_position_embeddings"),
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            qk_norm=family in ("qwen3", "qwen3_moe"),
            qkv_bias=attention_bias or family == "qwen2",  # Qwen2 has it without saying so
            o_bias=attention_bias and family in ("llama", "qwen3", "qwen3_moe"),
            mlp_bias=bool(config.get("mlp_bias", False)) and family == "llama",
            rope={**config, "head_dim": head_dim},
            eos_token_ids=tuple(dict.fromkeys((*more_eos_ids, *eos_ids(config)))),
            dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32"),
            quantization=None if stored is None else _quantization(stored),
            mixture=_mixture(config) if family == "qwen3_moe" else None,
        )
    )


def _quantization(stored: Any) -> Quantization:
    if isinstance(stored, Mapping) and stored.get("quant_method") in awq_gptq.METHODS:
        return awq_gptq.parse(stored)
    if isinstance(stored, Mapping) and stored.get("quant_method") == compressed.FINE_GRAINED:
        return float8.parse(stored)
    return compressed.parse(stored)


def _mixture(config: Mapping[str, Any]) -> Mixture | None:
    """The experts of Qwen3-MoE; None where each layer is left to an MLP.

    What may be absent has the default of the config class of ``transformers``.
    """
    # Published files say num_experts; transformers 5 writes num_local_experts.
    named = "num_local_experts" if config.get("num_experts") is None else "num_experts"
    if config.get(named) is None:
        raise ValueError("config.json: num_experts must be an integer >= 1, got None")
    experts, chosen = _size(config, named), _size(config, "num_experts_per_tok")
    if chosen > experts:
        raise ValueError(
            f"config.json: num_experts_per_tok must be at most {named}={experts}, got {chosen}"
        )
    renormalize = config.get("norm_topk_prob", False)
    if not isinstance(renormalize, bool):
        raise ValueError(f"config.json: norm_topk_prob must be true or false, got {renormalize!r}")
    layers = _size(config, "num_hidden_layers")
    step = _size({"decoder_sparse_step": 1, **config}, "decoder_sparse_step")
    given = config.get("mlp_only_layers")
    dense = [] if given is None else given
    if not isinstance(dense, list) or not all(
        type(layer) is int and 0 <= layer < layers for layer in dense
    ):
        raise ValueError(
            f"config.json: mlp_only_layers must be a list of layers from 0 to {layers - 1}, got "
            f"{given!r}"
        )
    width = _size(config, "moe_intermediate_size")
    sparse = tuple(i for i in range(layers) if (i + 1) % step == 0 and i not in dense)
    return Mixture(experts, chosen, width, renormalize, sparse) if sparse else None


def _refuse_variants(config: Mapping[str, Any]) -> None:
    """Fields under which the published code computes something that this network does not."""
    family = config["model_type"]
    if config.get("hidden_act", "silu") != "silu":
        raise ValueError(f"config.json: hidden_act must be 'silu', got {config['hidden_act']!r}")
    # Qwen configs carry a window size that only counts when use_sliding_window is true.
    used = config.get("use_sliding_window", False) if family.startswith("qwen") else True
    window = config.get("sliding_window")
    if used and window is not None and window < config.get("max_position_embeddings", 0):
        raise ValueError(
            f"config.json: expected attention to the whole context, got sliding_window={window}"
        )
    for layer in config.get("layer_types") or ():
        if layer != "full_attention" and (used or not family.startswith("qwen")):
            raise ValueError(
                f"config.json: every entry of layer_types must be 'full_attention', got {layer!r}"
            )


def _size(config: Mapping[str, Any], name: str) -> int:
    value = config.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"config.json: {name} must be an integer >= 1, got {value!r}")
    return value


def _eps(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ValueError(f"config.json: rms_norm_eps must be a number > 0, got {value!r}")
    return float(value)


def _checked(config: ModelConfig) -> ModelConfig:
    """The config, once what spans several fields is right too."""
    if config.num_heads % config.num_kv_heads:
        raise ValueError(
            "config.json: num_attention_heads must be a multiple of num_key_value_heads, got "
            f"{config.num_heads} and {config.num_kv_heads}"
        )
    for token in config.eos_token_ids:
        if not 0 <= token < config.vocab_size:
            raise ValueError(
                f"config.json: eos_token_id must be below vocab_size={config.vocab_size}, "
                f"got {token}"
            )
    build_cos_sin_cache(config.rope, 1)  # refuses an unknown scaling type before weights are read
    return config


# ---- GGUF ------------------------------------------------------------------------------------

# GGUF key (below "<architecture>.") -> the same field of config.json.
# Source: the GGUF specification, docs/gguf.md of ggml.
_GGUF_FIELDS = {
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.sliding_window": "sliding_window",
    "context_length": "max_position_embeddings",
    "rope.freq_base": "rope_theta",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}
# What other mixtures have in the same fields: what Qwen3-MoE has, first the default.
_GGUF_EXPERTS = {
    "expert_gating_func": (1,),  # softmax
    "expert_weights_scale": (1.0, 0.0),
    "expert_shared_count": (0,),
    "expert_group_count": (0, 1),
}
# Architecture -> model_type. A GGUF of Mistral calls itself llama.
_GGUF_FAMILIES = {"qwen3": "qwen3", "qwen3moe": "qwen3_moe", "llama": "llama", "qwen2": "qwen2"}


def from_gguf(metadata: Mapping[str, Any], tensor_names: frozenset[str]) -> ModelConfig:
    """Config from the metadata of a GGUF file; tied embeddings and biases show in its tensors."""
    family = metadata.get("general.architecture")
    if family not in _GGUF_FAMILIES:
        raise ValueError(
            f"GGUF: general.architecture must be one of {', '.join(_GGUF_FAMILIES)}, got {family!r}"
        )
    if family != "qwen3moe" and metadata.get(f"{family}.expert_count"):
        raise ValueError(
            "GGUF: expected a dense network, got a mixture of experts with "
            f"{family}.expert_count={metadata[f'{family}.expert_count']}"
        )
    if "rope_freqs.weight" in tensor_names:
        raise ValueError(
            "GGUF: expected RoPE scaling given in the metadata, got a tensor of frequency factors "
            "(rope_freqs.weight, Llama 3.1 scaling); use the checkpoint's Hugging Face folder"
        )
    hf: dict[str, Any] = {"model_type": _GGUF_FAMILIES[family], "rope_theta": 10000.0}
    if family == "qwen3moe":
        for name, usual in _GGUF_EXPERTS.items():
            if (value := metadata.get(f"{family}.{name}", usual[0])) not in usual:
                raise ValueError(f"GGUF: {family}.{name} must be {usual[0]}, got {value!r}")
        # Converters write no field for it; llama.cpp always does it.
        hf["norm_topk_prob"] = metadata.get(f"{family}.expert_weights_norm", True)
    for key, name in _GGUF_FIELDS.items():
        value = metadata.get(f"{family}.{key}")
        if isinstance(value, list):  # one entry a layer
            if len(set(value)) > 1:
                raise ValueError(f"GGUF: {family}.{key} must be one value for all layers")
            value = value[0]
        if value is not None:
            hf[name] = value
    hf["vocab_size"] = metadata.get(f"{family}.vocab_size") or len(
        metadata.get("tokenizer.ggml.tokens", ())
    )
    if not hf.get("head_dim") and hf.get("num_attention_heads"):
        hf["head_dim"] = hf.get("hidden_size", 0) // hf["num_attention_heads"]
    rotary_dim = metadata.get(f"{family}.rope.dimension_count")
    if rotary_dim is not None and rotary_dim != hf.get("head_dim"):
        hf["partial_rotary_factor"] = rotary_dim / hf["head_dim"]
    hf["rope_scaling"] = _gguf_rope_scaling(metadata, family)
    hf["use_sliding_window"] = "sliding_window" in hf
    hf["tie_word_embeddings"] = "output.weight" not in tensor_names
    hf["attention_bias"] = family != "qwen2" and "blk.0.attn_q.bias" in tensor_names
    hf["mlp_bias"] = "blk.0.ffn_up.bias" in tensor_names
    ends = ("eos", "eot", "eom")  # end of sequence, of turn, of message
    hf["eos_token_id"] = [metadata.get(f"tokenizer.ggml.{end}_token_id") for end in ends]
    return from_hf(hf)


def to_hf(config: ModelConfig) -> dict[str, Any]:
    """The fields of a config.json, of a network that was read from a GGUF file."""
    c = config
    named = {
        "qwen3": "Qwen3",
        "qwen3_moe": "Qwen3Moe",
        "llama": "Llama",
        "qwen2": "Qwen2",
        "mistral": "Mistral",
    }
    rope = ("rope_theta", "rope_scaling", "partial_rotary_factor")
    experts: dict[str, Any] = {}
    if c.mixture is not None:
        experts = {
            "num_experts": c.mixture.num_experts,
            "num_experts_per_tok": c.mixture.num_experts_per_tok,
            "moe_intermediate_size": c.mixture.intermediate_size,
            "norm_topk_prob": c.mixture.norm_topk_prob,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [i for i in range(c.num_layers) if not c.is_sparse(i)],
        }
    return {
        "architectures": [f"{named[c.model_type]}ForCausalLM"],
        "model_type": c.model_type,
        "vocab_size": c.vocab_size,
        "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size,
        "num_hidden_layers": c.num_layers,
        "num_attention_heads": c.num_heads,
        "num_key_value_heads": c.num_kv_heads,
        "head_dim": c.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": c.rms_norm_eps,
        "max_position_embeddings": c.max_position_embeddings,
        "tie_word_embeddings": c.tie_word_embeddings,
        "attention_bias": c.qkv_bias and c.model_type != "qwen2",
        "mlp_bias": c.mlp_bias,
        "bos_token_id": None,
        "eos_token_id": list(c.eos_token_ids) or None,
        "dtype": c.dtype,
        **experts,
        **{name: c.rope[name] for name in rope if c.rope.get(name) is not None},
    }


def _gguf_rope_scaling(metadata: Mapping[str, Any], family: str) -> dict[str, Any] | None:
    prefix = f"{family}.rope.scaling."
    kind = metadata.get(f"{prefix}type", "none")
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise ValueError(f"GGUF: {prefix}type must be none, linear or yarn, got {kind!r}")
    scaling = {"rope_type": kind, "factor": metadata.get(f"{prefix}factor")}
    original = metadata.get(f"{prefix}original_context_length")
    if original is not None:
        scaling["original_max_position_embeddings"] = original
    return scaling
