"""transformers' mixture of experts with a linear layer a matrix, and what files hold of those."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from checkpoints import tiny
from safetensors.torch import load_file
from torch import nn

from model.compressed import unpack
from model.quantized_matrix import Int4Experts, Int8Experts, PackedMatrix
from model.qwen3 import Experts, Model

NAME = "qwen3_moe"  # three layers of 5 experts, 2 a token


def ids(n: int, seed: int = 0) -> list[int]:
    return torch.randint(0, 331, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


def experts_of(model: Model, layer: int) -> Experts:
    found = model.layers[layer].experts
    assert found is not None
    return found


def values(weight: torch.Tensor | Int8Experts | Int4Experts) -> torch.Tensor:
    if isinstance(weight, Int8Experts):
        return weight.codes.float() * weight.scale[..., None]
    if isinstance(weight, Int4Experts):
        zeros = [None] * len(weight.packed) if weight.zero is None else weight.zero
        each = zip(weight.packed, weight.scale, zeros, strict=True)
        return torch.stack(
            [
                PackedMatrix(packed, scale, 4, 8 * packed.shape[1], zero).values(torch.float32)
                for packed, scale, zero in each
            ]
        )
    return weight


def stored_weights(folder: Path) -> dict[str, torch.Tensor]:
    """Weights of all quantised matrices by their names, from the files alone."""
    tensors = load_file(folder / "model.safetensors")
    found = {}
    for name in tensors:
        layer, _, part = name.rpartition(".")
        if part == "weight_scale":
            packed, size = (tensors.get(f"{layer}.weight_{x}") for x in ("packed", "shape"))
            if packed is None or size is None:
                codes = tensors[f"{layer}.weight"]
            else:
                k = int(size[1])
                codes = unpack(packed, 8 if 4 * packed.shape[1] >= k else 4, k)
            groups = tensors[name].shape[1]
            grouped = codes.float().view(len(codes), groups, -1) * tensors[name][..., None]
            found[layer] = grouped.view(codes.shape)
    return found


class Unstacked(nn.ModuleList):
    """transformers' experts of a layer, a module with three linear layers each."""

    def __init__(self, stacked: Any) -> None:
        super().__init__()
        for gate_up, down in zip(stacked.gate_up_proj.data, stacked.down_proj.data, strict=True):
            expert = nn.ModuleDict()
            for weight, name in zip((*gate_up.chunk(2), down), ("gate", "up", "down"), strict=True):
                linear = nn.Linear(*weight.shape[::-1], bias=False)
                linear.weight.data.copy_(weight)
                expert[f"{name}_proj"] = linear
            self.append(expert)

    def forward(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x)
        for e, expert in enumerate(self):
            token, slot = (chosen == e).nonzero(as_tuple=True)
            if len(token):
                h = nn.functional.silu(expert["gate_proj"](x[token])) * expert["up_proj"](x[token])
                out.index_add_(0, token, expert["down_proj"](h) * weights[token, slot, None])
        return out


def unstacked(name: str = NAME) -> Any:
    """transformers' network, with linear layers for experts as published checkpoints name them."""
    hf = copy.deepcopy(tiny(name).hf)
    for layer in hf.model.layers:
        if hasattr(layer.mlp, "experts"):
            layer.mlp.experts = Unstacked(layer.mlp.experts)
    return hf


@torch.inference_mode()
def hf_logits(hf: Any, tokens: list[int]) -> torch.Tensor:
    found: torch.Tensor = hf(torch.tensor([tokens])).logits[0]
    return found


def rounded(_: Any, inputs: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
    """Inputs of a linear layer as int8 codes with a scale a token have them."""
    (x,) = inputs
    scale = x.abs().amax(-1, keepdim=True) / 127
    return ((x / scale).round() * scale,)
