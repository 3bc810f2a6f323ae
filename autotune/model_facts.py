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
class ModelFacts:
    """Sizes of one decoder layer."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    qk_norm: bool  # q and k are normalised before they are turned (Qwen3)
    dtype: torch.dtype


def read_facts(path: Path) -> ModelFacts:
    """Facts of the model at ``path``, a ``config.json`` or the folder of one.

    Raises ValueError, one sentence with the field, what was expected and what came.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is not JSON"
        raise ValueError(
            f"autotune: --model must be a config.json or a folder with one, got {path}: {reason}"
        ) from None
    if not isinstance(config, dict):
        raise ValueError(f"autotune: --model: {file} must hold an object, got a list or value")
    return facts_of(config)


def facts_of(config: Mapping[str, Any]) -> ModelFacts:
    """Facts of a Hugging Face config (dense models and mixtures of experts)."""
    heads = _size(config, "num_attention_heads")
    kv_heads = _size(config, "num_key_value_heads", heads)
    hidden = _size(config, "hidden_size")
    family = str(config.get("model_type", ""))
    # Qwen3's config class has this default, whatever hidden_size is.
    head_dim = _size(config, "head_dim", 128 if family.startswith("qwen3") else hidden // heads)
    if heads % kv_heads:
        raise ValueError(
            "autotune: --model: num_attention_heads must be a multiple of num_key_value_heads, got "
            f"{heads} and {kv_heads}"
        )
    rope = config.get("rope_parameters") or {}
    share = config.get("partial_rotary_factor") or rope.get("partial_rotary_factor") or 1.0
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")
    if dtype not in _DTYPES:
        raise ValueError(
            f"autotune: --model: dtype must be one of {', '.join(_DTYPES)}, got {dtype!r}"
        )
    return ModelFacts(
        hidden_size=hidden,
        intermediate_size=_size(config, "intermediate_size"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rotary_dim=int(head_dim * share),
        qk_norm=family.startswith("qwen3"),
        dtype=_DTYPES[dtype],
    )


def _size(config: Mapping[str, Any], name: str, otherwise: int | None = None) -> int:
    value = config.get(name)
    if value is None and otherwise is not None:
        return otherwise
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"autotune: --model: {name} must be an integer >= 1, got {value!r}")
    return value
