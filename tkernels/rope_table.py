"""The cos/sin table that ``rope`` reads, from a Hugging Face config.

    table[p] = [cos(p * w_0), ..., cos(p * w_{r-1}) | sin(p * w_0), ..., sin(p * w_{r-1})] * m

w are the inverse frequencies, r = rotary_dim / 2, m the attention factor (1 but for YaRN). Scaling
changes w (and m): linear (position interpolation, arXiv 2306.15595), dynamic NTK, YaRN
(arXiv 2309.00071) and Llama 3.1's piecewise rule. Operations and their order are those of
``transformers``, all in fp32: another order would shift the angle of position 30,000 by 1e-3.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

_OP = "build_cos_sin_cache"
_LARGEST = 1e30  # of any number in a config; fp32 ends at 3e38


def build_cos_sin_cache(
    hf_config: Mapping[str, Any], num_positions: int, *, device: torch.device | str | None = None
) -> torch.Tensor:
    """Table of rotary factors for positions 0 .. num_positions - 1.

    Args:
        hf_config: a ``config.json`` as a mapping. Read are ``head_dim`` (or ``hidden_size`` and
            ``num_attention_heads``), ``rope_theta``, ``partial_rotary_factor``,
            ``max_position_embeddings``, ``original_max_position_embeddings``, and the scaling under
            any of its three spellings: ``rope_scaling.type``, ``rope_scaling.rope_type``,
            ``rope_parameters`` (which may hold ``rope_theta`` and ``partial_rotary_factor`` too).
            Types: default, linear, dynamic, yarn, llama3.
        num_positions: rows, >= 1. With ``dynamic`` scaling a table longer than
            ``max_position_embeddings`` is that of a sequence of ``num_positions`` tokens.
        device: where the table goes; it is computed on the CPU, so it is the same everywhere.

    Returns:
        fp32 [num_positions, rotary_dim]: cosines in the first half of the columns, sines in the
        second, both times the attention factor.

    Raises:
        TypeError: ``hf_config`` is not a mapping.
        ValueError: an unknown scaling type, a missing or contradictory field, an odd rotary_dim.
    """
    given: object = hf_config
    if not isinstance(given, Mapping):
        kind = type(given).__name__
        raise TypeError(
            f"{_OP}: hf_config must be a mapping (of a config object, its to_dict()), got {kind}"
        )
    if isinstance(num_positions, bool) or not isinstance(num_positions, int) or num_positions < 1:
        raise ValueError(f"{_OP}: num_positions must be an int >= 1, got {num_positions!r}")
    fields = _rope_fields(hf_config)
    rope_type = _rope_type(fields)
    rotary_dim = _rotary_dim(hf_config, fields)
    base = _rope_theta(hf_config, fields)
    inv_freq, attention_factor = _TYPES[rope_type](
        hf_config, fields, base, rotary_dim, num_positions
    )
    angles = torch.arange(num_positions, dtype=torch.float32)[:, None] * inv_freq
    table = torch.cat((angles.cos() * attention_factor, angles.sin() * attention_factor), dim=1)
    return table.to(device)


# ---- reading the config ----------------------------------------------------------------------


def _rope_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """The scaling fields, whichever key they stand under; empty where there are none."""
    found: dict[str, Any] = {}
    for key in ("rope_parameters", "rope_scaling"):
        given = config.get(key)
        if given is None:
            continue
        if not isinstance(given, Mapping):
            raise ValueError(f"{_OP}: {key} must be a mapping or null, got {given!r}")
        for name, value in given.items():
            if isinstance(value, Mapping):
                raise ValueError(
                    f"{_OP}: {key} must be one flat mapping for all layers, got one per layer type "
                    f"({', '.join(given)}); pass a config that holds the mapping of one layer type"
                )
            if name in found and found[name] != value:
                raise ValueError(
                    f"{_OP}: rope_parameters and rope_scaling must agree, got {name}="
                    f"{found[name]!r} and {value!r}"
                )
            found[name] = value
    return found


def _rope_type(fields: Mapping[str, Any]) -> str:
    given = [fields[key] for key in ("rope_type", "type") if fields.get(key) is not None]
    for name in given:
        if not isinstance(name, str):
            raise ValueError(f"{_OP}: rope_type must be one of {', '.join(_TYPES)}, got {name!r}")
    names = set(given)
    if len(names) > 1:
        raise ValueError(
            f"{_OP}: rope_type and type must agree, got {fields['rope_type']!r} and "
            f"{fields['type']!r}"
        )
    if not names and fields.get("factor") is not None:
        raise ValueError(
            f"{_OP}: rope_type must be given where a scaling factor is, got only "
            f"{', '.join(fields)}"
        )
    name = names.pop() if names else "default"
    if name not in _TYPES:
        raise ValueError(f"{_OP}: rope_type must be one of {', '.join(_TYPES)}, got {name!r}")
    if fields.get("mrope_section") is not None:
        raise ValueError(
            f"{_OP}: positions must be one number a token, got mrope_section="
            f"{fields['mrope_section']!r} (multimodal RoPE)"
        )
    return name


def _number(
    source: Mapping[str, Any], name: str, needed_by: str, *, where: str = "the rope fields"
) -> float:
    """A required number > 0; an int stays an int."""
    value = source.get(name)
    if value is None:
        raise ValueError(f"{_OP}: {needed_by} needs {name}, but {where} have no such field")
    return _positive(name, value)


def _positive(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ValueError(f"{_OP}: {name} must be a number > 0, got {value!r}")
    if value > _LARGEST:  # JSON as Python reads it knows Infinity, and integers without end
        raise ValueError(f"{_OP}: {name} must be at most {_LARGEST:g}, got {value!r}")
    return value


def _optional(fields: Mapping[str, Any], name: str, default: float) -> float:
    """A number > 0 that may be missing, null or 0, which all mean ``default``."""
    value = fields.get(name)
    return default if value is None or value == 0 else _positive(name, value)


def _rope_theta(config: Mapping[str, Any], fields: Mapping[str, Any]) -> float:
    theta = fields.get("rope_theta")
    if theta is None:
        theta = config.get("rope_theta")
    if theta is None:
        if config.get("model_type") == "llama":
            return 10000.0  # Llama 1 and 2 were published without the field
        raise ValueError(
            f"{_OP}: rope_theta must be given at the top level or in rope_parameters, got neither"
        )
    return _positive("rope_theta", theta)


def _rotary_dim(config: Mapping[str, Any], fields: Mapping[str, Any]) -> int:
    head_dim = config.get("head_dim")
    if head_dim is None:
        where = "the config's fields"
        hidden = _number(config, "hidden_size", "a config without head_dim", where=where)
        heads = _number(config, "num_attention_heads", "a config without head_dim", where=where)
        head_dim = hidden // heads
    share = fields.get("partial_rotary_factor")
    if share is None:
        share = config.get("partial_rotary_factor")
    share = 1.0 if share is None else _positive("partial_rotary_factor", share)
    if int(_positive("head_dim", head_dim)) != head_dim:
        raise ValueError(f"{_OP}: head_dim must be a whole number, got {head_dim!r}")
    rotary_dim = int(head_dim * share)
    if rotary_dim < 2 or rotary_dim % 2 or share > 1:
        raise ValueError(
            f"{_OP}: rotary_dim = head_dim * partial_rotary_factor must be even and in "
            f"[2, head_dim], got {head_dim} * {share} = {rotary_dim}"
        )
    return rotary_dim


def _max_positions(config: Mapping[str, Any], needed_by: str) -> float:
    where = "the config's fields"
    return _number(config, "max_position_embeddings", needed_by, where=where)


def _original_max(config: Mapping[str, Any], fields: Mapping[str, Any], needed_by: str) -> float:
    """Context length of pretraining, the base that YaRN and Llama 3 scale from."""
    for source in (config, fields):
        if source.get("original_max_position_embeddings") is not None:
            return _number(source, "original_max_position_embeddings", needed_by)
    return _max_positions(config, f"{needed_by} without original_max_position_embeddings")


# ---- inverse frequencies by type: (config, fields, base, rotary_dim, num_positions) -----------

_Frequencies = tuple[torch.Tensor, float]


def _pair_powers(base: float | torch.Tensor, rotary_dim: int) -> torch.Tensor:
    """base^(2i / rotary_dim) for the pairs i, fp32 [rotary_dim / 2]."""
    return torch.pow(base, torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim)


def _default(
    config: Mapping[str, Any], fields: Mapping[str, Any], base: float, rotary_dim: int, length: int
) -> _Frequencies:
    return 1.0 / _pair_powers(base, rotary_dim), 1.0


def _linear(
    config: Mapping[str, Any], fields: Mapping[str, Any], base: float, rotary_dim: int, length: int
) -> _Frequencies:
    return 1.0 / _pair_powers(base, rotary_dim) / _number(fields, "factor", "linear scaling"), 1.0


def _dynamic(
    config: Mapping[str, Any], fields: Mapping[str, Any], base: float, rotary_dim: int, length: int
) -> _Frequencies:
    factor = _number(fields, "factor", "dynamic scaling")
    original = _max_positions(config, "dynamic scaling")
    if length <= original:
        return _default(config, fields, base, rotary_dim, length)
    if rotary_dim == 2:
        raise ValueError(f"{_OP}: dynamic scaling needs rotary_dim > 2, got 2")
    # As in the forward pass of transformers, the length is a tensor, so the new base is fp32.
    stretch = (factor * torch.tensor(length) / original) - (factor - 1)
    return 1.0 / _pair_powers(base * stretch ** (rotary_dim / (rotary_dim - 2)), rotary_dim), 1.0


def _yarn(
    config: Mapping[str, Any], fields: Mapping[str, Any], base: float, rotary_dim: int, length: int
) -> _Frequencies:
    if not base > 1:
        raise ValueError(f"{_OP}: rope_theta must be above 1 for YaRN scaling, got {base}")
    original = _original_max(config, fields, "YaRN scaling")
    if "factor" in fields and fields["factor"] is None:  # null: as long as the config says
        factor = _max_positions(config, "YaRN scaling") / original
    else:
        factor = _number(fields, "factor", "YaRN scaling")
    low = _turning_pair(_optional(fields, "beta_fast", 32), base, rotary_dim, original)
    high = _turning_pair(_optional(fields, "beta_slow", 1), base, rotary_dim, original)
    if fields.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    if low == high:
        high += 0.001
    # 1 for pairs that turn fast (kept), 0 for slow ones (interpolated), a ramp between.
    kept = 1 - ((torch.arange(rotary_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(
        0, 1
    )
    powers = _pair_powers(base, rotary_dim)
    inv_freq = 1.0 / (factor * powers) * (1 - kept) + 1.0 / powers * kept
    return inv_freq, _yarn_attention_factor(fields, factor)


def _turning_pair(turns: float, base: float, rotary_dim: int, original: float) -> float:
    """Index (fractional) of the pair that makes ``turns`` full turns within ``original`` tokens."""
    return (rotary_dim * math.log(original / (turns * 2 * math.pi))) / (2 * math.log(base))


def _yarn_attention_factor(fields: Mapping[str, Any], factor: float) -> float:
    """Given, or 0.1 ln(factor) + 1, or the ratio of two such terms (DeepSeek's mscale pair)."""

    def magnitude(mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    if fields.get("attention_factor") is not None:
        return _positive("attention_factor", fields["attention_factor"])
    mscale, all_dim = _optional(fields, "mscale", 0), _optional(fields, "mscale_all_dim", 0)
    return magnitude(mscale) / magnitude(all_dim) if mscale and all_dim else magnitude(1)


def _llama3(
    config: Mapping[str, Any], fields: Mapping[str, Any], base: float, rotary_dim: int, length: int
) -> _Frequencies:
    factor, low, high = (
        _number(fields, name, "llama3 scaling")
        for name in ("factor", "low_freq_factor", "high_freq_factor")
    )
    if not high > low:
        raise ValueError(
            f"{_OP}: high_freq_factor must be above low_freq_factor, got {high} and {low}"
        )
    original = _original_max(config, fields, "llama3 scaling")
    inv_freq = 1.0 / _pair_powers(base, rotary_dim)
    wavelength = 2 * math.pi / inv_freq
    smooth = (original / wavelength - low) / (high - low)
    between = (1 - smooth) * inv_freq / factor + smooth * inv_freq
    scaled = torch.where(wavelength > original / low, inv_freq / factor, between)
    return torch.where(wavelength < original / high, inv_freq, scaled), 1.0


_TYPES: dict[str, Callable[..., _Frequencies]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "llama3": _llama3,
}
