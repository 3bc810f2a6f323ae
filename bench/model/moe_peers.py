"""Others' layers of experts, routing included, on the same weights.

torch           torch._grouped_mm between sorts and gathers, as one writes it by hand. Counting
                by bincount waits for the device, so it can only be launched operation by
                operation, and the host's time is in it
vllm            fused_topk and fused_experts of vLLM: its Triton kernel with its own configs
triton_kernels  Triton's grouped product (matmul_ogs) between its routing and its sum
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from bench.model.moe import Experts, Inputs

Layer = Callable[[Inputs], torch.Tensor]


@dataclass(frozen=True)
class Peer:
    """``make(experts)`` gives the layer of these weights."""

    make: Callable[[Experts], Layer]
    module: str  # to be imported
    formats: tuple[str, ...] = ("bf16",)
    captured: bool = True  # into a graph; False: launched operation by operation

    def why_not(self) -> str | None:
        """Why it cannot be had here."""
        try:
            importlib.import_module(self.module)
        except Exception as error:  # whatever somebody else's package raises
            return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        return None

    def about(self) -> str:
        """Version, and what a package says of itself where it is only part of the original."""
        package = importlib.import_module(self.module.partition(".")[0])
        words = (getattr(package, "__version__", ""), getattr(package, "CARRIED", ""))
        return ": ".join(str(word) for word in words if word)


def _torch(experts: Experts) -> Layer:
    top_k, n_experts = experts.top_k, len(experts.gate_up)
    gate_up, down = experts.gate_up.transpose(1, 2), experts.down.transpose(1, 2)

    def layer(one: Inputs) -> torch.Tensor:
        x = one.x
        weights, ids = torch.topk(one.router_logits.softmax(-1), top_k, dim=-1)
        if experts.renormalize:
            weights = weights / weights.sum(-1, keepdim=True)
        flat = ids.flatten()
        order = flat.argsort(stable=True)
        ends = torch.bincount(flat, minlength=n_experts).cumsum(0).to(torch.int32)
        token = order // top_k
        gate, up = torch._grouped_mm(x[token], gate_up, ends).chunk(2, -1)
        y = torch._grouped_mm(functional.silu(gate) * up, down, ends)
        y = y * weights.flatten()[order, None].to(y.dtype)
        return torch.zeros_like(x).index_add_(0, token, y)

    return layer


def _vllm(experts: Experts) -> Layer:
    fused_moe = importlib.import_module("vllm.model_executor.layers.fused_moe")
    more: dict[str, Any] = {}
    if experts.gate_up_scale is not None and experts.down_scale is not None:
        config = importlib.import_module("vllm.model_executor.layers.fused_moe.config")
        more["quant_config"] = config.int8_w8a8_moe_quant_config(
            w1_scale=experts.gate_up_scale[..., None],
            w2_scale=experts.down_scale[..., None],
            a1_scale=None,
            a2_scale=None,
            per_act_token_quant=True,
        )

    def layer(one: Inputs) -> torch.Tensor:
        weights, ids, *_ = fused_moe.fused_topk(
            one.x, one.router_logits, experts.top_k, experts.renormalize
        )
        y: torch.Tensor = fused_moe.fused_experts(
            one.x, experts.gate_up, experts.down, weights, ids, **more
        )
        return y

    return layer


def _triton_kernels(experts: Experts) -> Layer:
    names = ("matmul_ogs", "swiglu", "tensor", "topk")
    matmul, swiglu, tensor, topk = (
        importlib.import_module(f"triton_kernels.{name}") for name in names
    )
    n_experts, both, hidden = experts.gate_up.shape
    # Its activation takes gate and up from neighbouring columns and multiplies with up + 1.
    gate_up = experts.gate_up.view(n_experts, 2, both // 2, hidden).transpose(1, 2)
    gate_up = gate_up.reshape(n_experts, both, hidden).transpose(1, 2)
    bias = torch.tensor([0.0, -1.0], device=gate_up.device).repeat(n_experts, both // 2)
    down = experts.down.transpose(1, 2)
    specs = matmul.FnSpecs("swiglu", swiglu.swiglu_fn, ("alpha", "limit"), reduction_n=2)
    activation = matmul.FusedActivation(specs, (1.0, None))

    def layer(one: Inputs) -> torch.Tensor:
        logits = one.router_logits
        if not experts.renormalize:
            logits = logits.softmax(-1)
        chosen = topk.topk(logits, experts.top_k, apply_softmax=experts.renormalize)
        load = chosen.mask_metadata.col_sum
        pairs, rows = chosen.mask_metadata.col_sorted_indx, chosen.mask_metadata.row_sorted_indx
        ragged = tensor.make_ragged_tensor_metadata(load, len(pairs))
        weights = chosen.vals.flatten()[pairs]
        routing = matmul.RoutingData(weights, load, n_experts, experts.top_k, ragged)
        h = matmul.matmul_ogs(
            one.x,
            gate_up,
            bias,
            routing,
            gather_indx=matmul.GatherIndx(pairs, rows),
            fused_activation=activation,
        )
        y: torch.Tensor = matmul.matmul_ogs(
            h,
            down,
            None,
            routing,
            scatter_indx=matmul.ScatterIndx(rows, pairs),
            gammas=weights,
        )
        return y

    return layer


PEERS: Mapping[str, Peer] = {
    "torch": Peer(_torch, "torch", captured=False),
    "vllm": Peer(_vllm, "vllm.model_executor.layers.fused_moe", ("bf16", "w8a8")),
    "triton_kernels": Peer(_triton_kernels, "triton_kernels.matmul_ogs"),
}
