"""How a model's KV cache is quantised: the mode, and what calibration found.

A calibration is a safetensors file that ``python -m model.calibrate_kv`` writes: of L layers, Hk KV
heads and D channels

    k_scale, v_scale            fp32 [L, Hk, D]  a channel's absmax / 127, for the static modes
    k_tau, v_tau                fp32 [L, Hk]     error above which a token is an outlier, dynamic
    k_tau_static, v_tau_static  fp32 [L, Hk]     the same with static scales

and, as text, the share of outlier tokens that the taus were chosen for.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from model.config import ModelConfig
from tkernels.kv_format import MODES

FORMAT = "tkernels-kv-scales-1"
SHARE = 0.04  # of tokens are outliers on the text of the calibration
# Without a calibration: errors depend on the model, so this one is only for the worst of tokens.
DEFAULT_TAU = 0.014


@dataclass(frozen=True)
class KVQuantization:
    """A mode other than "none", and what it needs of ``calibrate_kv``; K's first, then V's."""

    mode: str
    scales: tuple[torch.Tensor, torch.Tensor] | None  # fp32 [L, Hk, D]
    taus: tuple[torch.Tensor, torch.Tensor] | None  # fp32 [L, Hk]

    def of_layer(self, which: int, layer: int) -> dict[str, Any]:
        """What ``allocate_quantized`` is told for K (``which`` 0) or V (1) of a layer."""
        return {
            "mode": self.mode,
            "tau": None if self.taus is None else self.taus[which][layer],
            "static_scale": None if self.scales is None else self.scales[which][layer],
        }


def choose(
    mode: str, path: Path | None, tau: float | None, config: ModelConfig
) -> KVQuantization | None:
    """What ``--kv-cache``, ``--kv-scales`` and ``--kv-tau`` ask for; None is an unquantised cache.

    Raises:
        ValueError: something that the mode needs is missing, does not fit the model, or is given
            and would not be used.
    """
    if mode not in MODES:
        raise ValueError(f"--kv-cache must be one of {', '.join(MODES)}, got {mode!r}")
    if tau is not None and not 0 <= tau < 1:
        raise ValueError(f"--kv-tau must be from 0 to below 1, got {tau}")
    for given, option, wanted in (
        (path, "--kv-scales", mode not in ("none", "int8")),
        (tau, "--kv-tau", "fp4" in mode),
    ):
        if given is not None and not wanted:
            raise ValueError(f"{option} has no use with --kv-cache {mode}, got {given}")
    if mode == "none":
        return None
    static = "static" in mode
    if path is not None and tau is not None and not static:
        raise ValueError(
            f"expected one of --kv-scales and --kv-tau with --kv-cache {mode}, got both"
        )
    if "fp4" in mode and config.head_dim % 32:
        raise ValueError(
            f"--kv-cache {mode} needs a model whose head_dim divides by 32, got {config.head_dim}"
        )
    if static and path is None:
        raise ValueError(
            f"--kv-cache {mode} needs --kv-scales FILE, which python -m model.calibrate_kv "
            "writes, got none"
        )
    found = load(path, config) if path is not None else {}
    scales = (found["k_scale"], found["v_scale"]) if static else None
    if "fp4" not in mode:
        return KVQuantization(mode, scales, None)
    if tau is None and found:
        end = "_static" if static else ""
        return KVQuantization(mode, scales, (found[f"k_tau{end}"], found[f"v_tau{end}"]))
    same = torch.full((config.num_layers, config.num_kv_heads), DEFAULT_TAU if tau is None else tau)
    return KVQuantization(mode, scales, (same, same))


def shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of a calibration's tensors for a model."""
    heads = (config.num_layers, config.num_kv_heads)
    taus = {f"{x}_tau{end}": heads for x in "kv" for end in ("", "_static")}
    return {**{f"{x}_scale": (*heads, config.head_dim) for x in "kv"}, **taus}


def save(path: Path, tensors: Mapping[str, torch.Tensor], *, share: float, tokens: int) -> None:
    """Write a calibration."""
    from safetensors.torch import save_file

    facts = {"format": FORMAT, "share": str(share), "tokens": str(tokens)}
    save_file({name: t.float().contiguous() for name, t in tensors.items()}, path, metadata=facts)


def load(path: Path, config: ModelConfig) -> dict[str, torch.Tensor]:
    """The tensors of a calibration of this model.

    Raises:
        ValueError: no such file, no calibration, or one of a model of other sizes.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            found_format = (file.metadata() or {}).get("format")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise ValueError(f"--kv-scales {path}: expected a safetensors file, got {error}") from None
    if found_format != FORMAT:
        raise ValueError(f"--kv-scales {path}: expected format {FORMAT}, got {found_format!r}")
    for name, shape in shapes(config).items():
        got = tuple(tensors[name].shape) if name in tensors else None
        if got != shape:
            raise ValueError(
                f"--kv-scales {path}: expected {name} of shape {list(shape)} for this model, got "
                f"{'none' if got is None else list(got)}"
            )
        least = float(tensors[name].min()) if tensors[name].isfinite().all() else math.nan
        if not (least > 0 if name.endswith("scale") else least >= 0):
            raise ValueError(
                f"--kv-scales {path}: expected finite numbers above 0 in {name}, got "
                f"{'others' if math.isnan(least) else least}"
            )
    return tensors
