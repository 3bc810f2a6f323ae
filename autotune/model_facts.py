"""The sizes of a model, from its ``config.json``, that decide what its layers launch."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclasses.dataclass(frozen=True)
class ByteCodes:
    """Linear layers in 8 bits that ``w8a16_gemm`` multiplies."""

    group: int  # inputs that share a scale; 0: all of a layer
    fp8: bool

    def group_of(self, inputs: int) -> int | None:
        """The same for so many inputs; None: the layer is dequantised."""
        if not 0 < self.group < inputs:
            return inputs
        return None if inputs % self.group else self.group


@dataclasses.dataclass(frozen=True)
class ModelFacts:
    """Sizes of the decoder layers."""

    hidden_size: int
    vocab_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    qk_norm: bool  # q and k are normalised before they are turned (Qwen3)
    mlps: tuple[tuple[int, int], ...]  # (rows a token, width) of what goes through silu_and_mul
    windows: tuple[int | None, ...]  # each kind of attention: its sliding window, None for all keys
    dtype: torch.dtype
    # (all, chosen by a token, width of one) where fused_moe has them
    experts: tuple[int, int, int] | None = None
    quantised: bool = False  # its linear layers are not of 16 bits
    quantised_experts: bool = False  # nor are the experts, in no layer
    byte_codes: ByteCodes | None = None  # what its linear layers are of, where these have a kernel


def read_facts(path: Path) -> ModelFacts:
    """Facts of the model at ``path``, a ``config.json`` or the folder of one.

    Raises ValueError, one sentence with the field, what was expected and what came.
    """
    if path.suffix == ".gguf":
        raise ValueError(
            f"autotune: --model must be a config.json or a folder with one, got {path}; the "
            "config.json of the checkpoint that a GGUF file was made from has the same sizes"
        )
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or "it is not JSON"
        raise ValueError(
            f"autotune: --model must be a config.json or a folder with one, got {path}: {reason}"
        ) from None
    if not isinstance(config, dict):
        raise ValueError(f"autotune: --model: {file} must hold an object, got a list or value")
    return facts_of(config)


def facts_of(config: Mapping[str, Any]) -> ModelFacts:
    """Facts of a Hugging Face config: dense models and mixtures of experts.

    Of a model that sees more than text, the part that reads text (``text_config``).
    """
    if "hidden_size" not in config and isinstance(config.get("text_config"), Mapping):
        whole = {name: config[name] for name in ("dtype", "torch_dtype") if name in config}
        config = whole | dict(config["text_config"])
    if config.get("kv_lora_rank") is not None:
        raise ValueError(
            "autotune: --model must have attention with heads of keys and values, got one with "
            f"latent attention (kv_lora_rank={config['kv_lora_rank']!r})"
        )
    heads = _size(config, "num_attention_heads")
    kv_heads = _size(config, "num_key_value_heads", heads)
    hidden = _size(config, "hidden_size")
    if heads % kv_heads:
        raise ValueError(
            "autotune: --model: num_attention_heads must be a multiple of num_key_value_heads, got "
            f"{heads} and {kv_heads}"
        )
    qwen3 = str(config.get("model_type", "")).startswith("qwen3")
    head_dim = _head_dim(config, hidden, heads, qwen3)
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")
    if dtype not in _DTYPES:
        raise ValueError(
            f"autotune: --model: dtype must be one of {', '.join(_DTYPES)}, got {dtype!r}"
        )
    quantization = config.get("quantization_config")
    byte_codes = None if dtype == "float32" else _byte_codes(quantization)
    return ModelFacts(
        hidden_size=hidden,
        vocab_size=_size(config, "vocab_size", 151936),  # Qwen3's
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rotary_dim=_rotary_dim(config, head_dim),
        qk_norm=qwen3,
        mlps=_mlps(config),
        windows=_windows(config),
        dtype=_DTYPES[dtype],
        experts=_fused_experts(config),
        quantised=_multiplies_codes(quantization) or byte_codes is not None,
        quantised_experts=_quantises_experts(quantization),
        byte_codes=byte_codes,
    )


def _head_dim(config: Mapping[str, Any], hidden: int, heads: int, qwen3: bool) -> int:
    if config.get("head_dim") is not None:
        return _size(config, "head_dim")
    if qwen3:
        return 128  # the default of Qwen3's config class, whatever hidden_size is
    if hidden % heads:
        raise ValueError(
            "autotune: --model: hidden_size must be a multiple of num_attention_heads where "
            f"head_dim is not given, got {hidden} and {heads}"
        )
    return hidden // heads


def _rotary_dim(config: Mapping[str, Any], head_dim: int) -> int:
    places = [config.get("rope_parameters"), config.get("rope_scaling"), config]
    for place in places:
        if place is not None and not isinstance(place, Mapping):
            raise ValueError(
                f"autotune: --model: rope_parameters and rope_scaling must be objects, got {place}"
            )
    given = [place.get("partial_rotary_factor") for place in places if place is not None]
    share = next((one for one in given if one is not None), 1.0)
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
        raise ValueError(
            f"autotune: --model: partial_rotary_factor must be a number in (0, 1], got {share!r}"
        )
    return int(head_dim * share)


def _mlps(config: Mapping[str, Any]) -> tuple[tuple[int, int], ...]:
    """Of a mixture of experts: the chosen experts of each token, and the one that all share.

    Where ``fused_moe`` has the experts, the MLPs of the other layers, if there are any.
    """
    act = config.get("hidden_act") or config.get("hidden_activation") or "silu"
    if act not in ("silu", "swish"):
        return ()
    if _fused_experts(config):
        mixed = _size(config, "decoder_sparse_step", 1) > 1 or config.get("mlp_only_layers")
        return ((1, _size(config, "intermediate_size")),) if mixed else ()
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    if not any(config.get(name) for name in names):
        return ((1, _size(config, "intermediate_size")),)
    width = "moe_intermediate_size" if config.get("moe_intermediate_size") else "intermediate_size"
    experts = (_size(config, "num_experts_per_tok"), _size(config, width))
    if not config.get("shared_expert_intermediate_size"):
        return (experts,)
    return experts, (1, _size(config, "shared_expert_intermediate_size"))


def _fused_experts(config: Mapping[str, Any]) -> tuple[int, int, int] | None:
    """Experts of the one architecture whose mixture the runner computes with ``fused_moe``."""
    if config.get("model_type") != "qwen3_moe":
        return None
    named = "num_local_experts" if config.get("num_experts") is None else "num_experts"
    names = (named, "num_experts_per_tok", "moe_intermediate_size")
    experts, chosen, width = (_size(config, name) for name in names)
    return experts, chosen, width


def _multiplies_codes(given: Any) -> bool:
    """Whether there is a ``quantization_config`` of layers, and experts, that stay as stored.

    Of fp8, and of GPTQ's 8 bits in groups, the runner dequantises experts as it reads them, and
    linear layers that are no ``_byte_codes``.
    """
    if not isinstance(given, Mapping):
        return given is not None
    form, method = given.get("format"), given.get("quant_method")
    if method == "gptq":  # other layers may have other bits
        groups = given.get("bits") == 8 and given.get("group_size", 128) != -1
        return not groups or bool(given.get("dynamic"))
    return method != "fp8" and form not in ("float-quantized", "naive-quantized")


def _byte_codes(given: Any) -> ByteCodes | None:
    """Of a ``quantization_config`` with one scheme for all layers that have any."""
    if not isinstance(given, Mapping):
        return None
    method, group, fp8 = given.get("quant_method"), None, True
    if method == "fp8":
        size = given.get("weight_block_size")
        group = size[1] if isinstance(size, list) and len(size) == 2 else None
    elif method == "gptq":
        fits = given.get("bits") == 8 and given.get("sym", True) is True
        group, fp8 = given.get("group_size", 128) if fits else None, False
    elif method == "compressed-tensors":
        group, fp8 = _group_of_scheme(given)
    whole = group == 0 and fp8
    if type(group) is not int or not (whole or (group >= 32 and group & (group - 1) == 0)):
        return None
    return ByteCodes(group, fp8)


def _group_of_scheme(given: Mapping[str, Any]) -> tuple[Any, bool]:
    """(inputs that share a scale, 0 for all, None for other schemes; whether it is FP8)."""
    groups = given.get("config_groups")
    schemes = list(groups.values()) if isinstance(groups, Mapping) else []
    weights = schemes[0].get("weights") if len(schemes) == 1 else None
    if not isinstance(weights, Mapping):
        return None, False
    form = schemes[0].get("format") or given.get("format")
    if form in ("float-quantized", "naive-quantized"):
        block = weights.get("block_structure")
        return block[1] if isinstance(block, list) and len(block) == 2 else 0, True
    packed = form == "pack-quantized" and weights.get("num_bits") == 8
    return weights.get("group_size") if packed else None, False


def _quantises_experts(given: Any) -> bool:
    """Whether a ``quantization_config`` is there and leaves no experts out by their name."""
    ignored = given.get("ignore") if isinstance(given, Mapping) else None
    return _multiplies_codes(given) and "experts" not in str(ignored)


def _windows(config: Mapping[str, Any]) -> tuple[int | None, ...]:
    """Windows of the layers, each once, under the rules of ``transformers``."""
    if config.get("sliding_window") is None:
        return (None,)
    window = _size(config, "sliding_window")
    kinds = config.get("layer_types")
    if isinstance(kinds, list):
        by_kind = {"full_attention": None, "sliding_attention": window}
        return tuple(size for kind, size in by_kind.items() if kind in kinds)
    if str(config.get("model_type", "")).startswith("qwen"):
        # Its configs carry a size that only counts where this is set, and then for upper layers.
        return (None, window) if config.get("use_sliding_window") else (None,)
    limit = config.get("max_position_embeddings")
    return (None,) if isinstance(limit, int) and window >= limit else (window,)


def _size(config: Mapping[str, Any], name: str, otherwise: int | None = None) -> int:
    value = config.get(name)
    if value is None and otherwise is not None:
        return otherwise
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"autotune: --model: {name} must be an integer >= 1, got {value!r}")
    return value
