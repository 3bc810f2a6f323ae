"""One layer of experts: its weights, its inputs, and what a call of it must move and compute.

    bytes = experts that tokens go to * bytes of one expert's two matrices (and scales)
    operations = 2 * tokens * top_k * 3 * hidden * intermediate

Tokens, logits and results are left out: of few tokens they are nothing beside the weights, and of
many it is the operations that bound the time.

Several inputs take turns, each with a routing of its own, as layers of a network have: what one
call leaves in the cache is then of little use to the next, and times are of the mean routing.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

import tkernels
from model import compressed
from model.config import Mixture, ModelConfig

FORMATS = ("bf16", "w8a8", "w4a16")
ROUTINGS = ("uniform", "zipf")


@dataclass(frozen=True)
class Experts:
    """Matrices of all experts as ``fused_moe`` takes them, and how tokens are routed to them."""

    top_k: int
    renormalize: bool
    gate_up: torch.Tensor  # [E, 2 I, H], bf16 or int8, or int32 [E, 2 I, H / 8]: 4 bits
    down: torch.Tensor  # [E, H, I], like it
    # With int8 fp32 [E, 2 I] and [E, H], with 4 bits bf16 [E, 2 I, H / group] and [E, H, I / group]
    gate_up_scale: torch.Tensor | None = None
    down_scale: torch.Tensor | None = None

    @property
    def expert_bytes(self) -> int:
        """Of one expert."""
        tensors = (self.gate_up, self.down, self.gate_up_scale, self.down_scale)
        return sum(t.nbytes for t in tensors if t is not None) // len(self.gate_up)

    def flops(self, tokens: int) -> int:
        """Of the products for ``tokens``."""
        each = 8 if self.gate_up.dtype == torch.int32 else 1
        numbers = each * (self.gate_up[0].numel() + self.down[0].numel())
        return 2 * tokens * self.top_k * numbers


@dataclass(frozen=True)
class Inputs:
    """What one call gets."""

    x: torch.Tensor  # bf16 [T, H]
    router_logits: torch.Tensor  # fp32 [T, E]: in 16 bits many would be equal


def mixture_of(config: ModelConfig) -> Mixture:
    """The experts of a network that has some."""
    assert config.mixture is not None
    return config.mixture


def random_experts(config: ModelConfig, seed: int, dev: torch.device) -> Experts:
    """Random bf16 weights, under which numbers keep their size."""
    m, hidden = mixture_of(config), config.hidden_size
    generator = torch.Generator(dev).manual_seed(seed)

    def normal(rows: int, columns: int) -> torch.Tensor:
        weight = torch.empty((m.num_experts, rows, columns), dtype=torch.bfloat16, device=dev)
        return weight.normal_(0, columns**-0.5, generator=generator)

    gate_up, down = normal(2 * m.intermediate_size, hidden), normal(hidden, m.intermediate_size)
    return Experts(m.num_experts_per_tok, m.norm_topk_prob, gate_up, down)


def in_int8(experts: Experts) -> Experts:
    """The same weights as codes with a scale a row."""

    def codes(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        found = torch.empty_like(weight, dtype=torch.int8)
        scale = torch.empty(weight.shape[:2], device=weight.device)
        for i, one in enumerate(weight):  # one at a time: fp32 copies of all would be large
            found[i], scale[i] = tkernels.reference.quantize_per_token(one)
        return found, scale

    (gate_up, gate_up_scale), (down, down_scale) = codes(experts.gate_up), codes(experts.down)
    return dataclasses.replace(
        experts, gate_up=gate_up, down=down, gate_up_scale=gate_up_scale, down_scale=down_scale
    )


def in_int4(experts: Experts) -> Experts:
    """The same weights as codes of 4 bits, with a scale for 128 inputs, or all of a row."""

    def codes(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        k = weight.shape[2]
        scheme = compressed.Scheme(compressed.PACKED, 4, None if k % 128 else 128, False)
        packed, scales = [], []
        for one in weight:  # as above
            found, scale = compressed.quantise(one, scheme, weight.dtype)
            packed.append(compressed.pack(found, 4))
            scales.append(scale)
        return torch.stack(packed), torch.stack(scales)

    (gate_up, gate_up_scale), (down, down_scale) = codes(experts.gate_up), codes(experts.down)
    return dataclasses.replace(
        experts, gate_up=gate_up, down=down, gate_up_scale=gate_up_scale, down_scale=down_scale
    )


def in_format(experts: Experts, name: str) -> Experts:
    """bf16 weights in one of ``FORMATS``."""
    if name == "bf16":
        return experts
    return in_int8(experts) if name == "w8a8" else in_int4(experts)


def inputs(
    config: ModelConfig, tokens: int, routing: str, *, count: int, seed: int, dev: torch.device
) -> list[Inputs]:
    """``count`` inputs of ``tokens``.

    uniform: a token chooses its experts evenly. zipf: the expert of rank r with a share of 1 / r,
    one after another without those that it has (Gumbel noise on the logarithms of the shares makes
    that of a top-k). Which expert has which rank differs from input to input.
    """
    m = mixture_of(config)
    on_host = torch.Generator().manual_seed(seed)  # the same routings on every device
    on_device = torch.Generator(dev).manual_seed(seed)
    found = []
    for _ in range(count):
        noise = torch.empty(tokens, m.num_experts).exponential_(generator=on_host)
        logits = -noise.clamp_min(1e-20).log()  # 0 may be drawn
        if routing == "zipf":
            order = torch.randperm(m.num_experts, generator=on_host)
            logits -= (1.0 + order).log()
        x = torch.empty((tokens, config.hidden_size), dtype=torch.bfloat16, device=dev)
        found.append(Inputs(x.normal_(generator=on_device), logits.to(dev)))
    return found


@dataclass(frozen=True)
class Load:
    """How tokens spread over experts: means over several routings."""

    experts: float  # that have tokens
    most: float  # tokens of the busiest expert over the mean of all

    @classmethod
    def of(cls, given: Sequence[Inputs], config: ModelConfig) -> Load:
        m = mixture_of(config)
        touched, most = [], []
        for one in given:
            chosen = one.router_logits.topk(m.num_experts_per_tok).indices.flatten()
            load = torch.bincount(chosen, minlength=m.num_experts)
            touched.append(int((load > 0).sum()))
            most.append(float(load.max()) / (len(chosen) / m.num_experts))
        return cls(statistics.mean(touched), statistics.mean(most))


def ours(experts: Experts, one: Inputs) -> torch.Tensor:
    """The layer by the library's kernels."""
    return tkernels.fused_moe(one.x, one.router_logits, **_arguments(experts))


def expected(experts: Experts, one: Inputs) -> torch.Tensor:
    """The layer by the reference."""
    return tkernels.reference.fused_moe(one.x, one.router_logits, **_arguments(experts))


def _arguments(experts: Experts) -> dict[str, Any]:
    return {
        "gate_up_weight": experts.gate_up,
        "down_weight": experts.down,
        "gate_up_scale": experts.gate_up_scale,
        "down_scale": experts.down_scale,
        "top_k": experts.top_k,
        "renormalize": experts.renormalize,
    }


def quantile(values: Sequence[float], share: float) -> float:
    """Between the two nearest values where ``share`` falls between them.

    >>> quantile([4.0, 1.0, 3.0, 2.0], 0.5)
    2.5
    """
    ordered = sorted(values)
    at = share * (len(ordered) - 1)
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (at - low) * (ordered[high] - ordered[low])
