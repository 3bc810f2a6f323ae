"""SmoothQuant: the outliers of activations moved into the weights behind them.

Xiao et al., 2022, arXiv 2211.10438. The norms before linear layers are divided by a factor a
channel and the columns behind multiplied by it, powers of two, so nothing is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from model.quantize_plan import Plan, expert_layers, joined_layers

if TYPE_CHECKING:
    import torch

    from model.checkpoint import Checkpoint
    from model.config import ModelConfig
    from model.qwen3 import Model


class _NormTap:
    """The operations ``ops``; keeps the largest magnitude of each channel of each norm's output."""

    skinny_linear = None  # norms that it takes along would not be seen

    def __init__(self, ops: Any, num_norms: int) -> None:
        self._ops, self._num_norms, self._calls = ops, num_norms, 0
        self.most: dict[int, torch.Tensor] = {}  # of the norms in order, fp32 [H]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def _see(self, x: torch.Tensor) -> None:
        index = self._calls % self._num_norms
        self._calls += 1
        most = x.abs().amax(0).float()
        self.most[index] = most if index not in self.most else self.most[index].maximum(most)

    def rms_norm(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        x: torch.Tensor = self._ops.rms_norm(*args, **kwargs)
        self._see(x)
        return x

    def fused_add_rms_norm(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        x, residual = self._ops.fused_add_rms_norm(*args, **kwargs)
        self._see(x)
        return x, residual


def activation_maxima(
    model: Model, ops: Any, ids: list[int], on_tokens: Callable[[int, int], None] | None = None
) -> dict[str, torch.Tensor]:
    """The largest magnitude of each channel behind the norms, by the norm's stored name.

    Returns:
        fp32 [H] on the CPU, of both norms of each layer.

    Raises:
        ValueError: an activation is NaN or infinite.
    """
    from model.kv_cache import BLOCK_SIZE, SequenceState
    from model.runner import Runner

    layers = model.config.num_layers
    tap = _NormTap(ops, 2 * layers + 1)  # the last one is before lm_head
    runner = Runner(
        model, tap, num_blocks=-(-len(ids) // BLOCK_SIZE), max_positions=len(ids), prefill_chunk=256
    )
    runner.prefill([SequenceState(list(ids))], on_chunk=on_tokens)
    found = {}
    for index in range(2 * layers):
        norm = "post_attention_layernorm" if index % 2 else "input_layernorm"
        name = f"model.layers.{index // 2}.{norm}.weight"
        found[name] = tap.most[index].cpu()
        if not found[name].isfinite().all():
            raise ValueError(f"--smooth: expected finite activations, got others behind {name}")
    return found


def smoothing_factors(
    checkpoint: Checkpoint, plan: Plan, maxima: Mapping[str, torch.Tensor], alpha: float
) -> dict[str, torch.Tensor]:
    """By a tensor's name: what norms are divided and the columns behind them multiplied by.

    Norms before layers that are not quantised are left out.

    Returns:
        fp32 powers of two, [H]; channels that are always 0 have 1.
    """
    import torch

    factors = {}
    for norm, layers, others in _behind_norms(checkpoint.config, plan):
        most = maxima[norm]
        columns = torch.zeros_like(most)
        for name in layers:
            weight = checkpoint.source.read(f"{name}.weight")
            columns = columns.maximum(weight.float().abs().amax(0))
        wanted = most**alpha / columns ** (1 - alpha)
        usable = (most > 0) & (columns > 0)
        factor = wanted.where(usable, 1.0).log2().round().clamp(-20, 20).exp2()
        factors[norm] = factor
        factors |= {f"{name}.weight": factor for name in (*layers, *others)}
    return factors


def _behind_norms(config: ModelConfig, plan: Plan) -> Iterator[tuple[str, list[str], list[str]]]:
    """(norm, layers behind it, some of which are quantised, others that read it: routers)."""
    norms = {"q_proj": "input_layernorm", "gate_proj": "post_attention_layernorm"}
    for group in joined_layers(config):
        layer, _, first = next(iter(group)).rpartition(".")
        norm = norms.get(first)
        if norm is not None and any(name in plan.schemes for name in group):
            yield f"{layer.rpartition('.')[0]}.{norm}.weight", list(group), []
    for index, matrices in expert_layers(config).items():
        if index in plan.experts:
            layer = f"model.layers.{index}"
            inner = [name for name in matrices if not name.endswith("down_proj")]
            yield f"{layer}.post_attention_layernorm.weight", inner, [f"{layer}.mlp.gate"]
