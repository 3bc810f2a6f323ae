"""Sizes of published networks, random weights of such sizes, and what a decode step must move.

    bytes of a step = weights, each once + bytes of keys and values of a token * tokens attended to

Of weights that are the network without an embedding table of its own; of experts, those that the
step's tokens go to. A step cannot take less than its bytes over the bandwidth of the memory, and
the share of that in its time is what this benchmark calls "of roof".
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import torch

from model import compressed, float8
from model.compressed import Float8, Scheme
from model.config import ModelConfig, from_hf
from model.quantize_plan import describe_plan, make_plan
from model.qwen3 import Model
from model.sources import Source
from model.weights import load_model, named_scheme, stored_tensors

_QWEN3 = {
    "model_type": "qwen3", "vocab_size": 151936, "head_dim": 128, "rms_norm_eps": 1e-6,
    "rope_theta": 1e6, "max_position_embeddings": 40960, "attention_bias": False,
    "hidden_act": "silu", "torch_dtype": "bfloat16",
}  # fmt: skip
_TINY = _QWEN3 | {
    "vocab_size": 320, "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "tie_word_embeddings": True, "max_position_embeddings": 4096,
}  # fmt: skip
_TINY_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


def _qwen3(sizes: tuple[int, int, int], heads: tuple[int, int], *, tied: bool) -> dict[str, Any]:
    """(hidden_size, intermediate_size, layers), (heads, KV heads)."""
    names = ("hidden_size", "intermediate_size", "num_hidden_layers")
    head_names = ("num_attention_heads", "num_key_value_heads")
    named = dict(zip(names, sizes, strict=True)) | dict(zip(head_names, heads, strict=True))
    return {**_QWEN3, **named, "tie_word_embeddings": tied}


# The sizes of each config.json as it was published, in the order of parameters.
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": _qwen3((1024, 3072, 28), (16, 8), tied=True),
    "qwen3-4b": _qwen3((2560, 9728, 36), (32, 8), tied=True),
    "qwen3-8b": _qwen3((4096, 12288, 36), (32, 8), tied=False),
    "qwen3-30b-a3b": {
        **_qwen3((2048, 6144, 48), (32, 4), tied=False),
        "model_type": "qwen3_moe", "num_experts": 128, "num_experts_per_tok": 8,
        "moe_intermediate_size": 768, "norm_topk_prob": True, "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    # To try the commands where there is no accelerator; nobody's network.
    "tiny": _TINY,
    "tiny-moe": _TINY | _TINY_EXPERTS | {"model_type": "qwen3_moe", "norm_topk_prob": True},
}  # fmt: skip
PUBLISHED = tuple(name for name in SHAPES if not name.startswith("tiny"))


def config_of(name: str) -> ModelConfig:
    return from_hf(SHAPES[name])


def parameters(config: ModelConfig) -> int:
    """How many numbers a checkpoint stores; tied embeddings count once."""
    return sum(math.prod(shape) for _, shape in stored_tensors(config))


FP8 = "fp8"  # of ``--weights``


def quantised(config: ModelConfig, scheme: str) -> ModelConfig:
    """The network with its layers as ``python -m model.quantize --scheme`` writes them; "fp8": as
    Qwen publishes them."""
    if scheme == FP8:
        blocks = {"quant_method": "fp8", "weight_block_size": [128, 128]}
        return dataclasses.replace(config, quantization=float8.parse(blocks))
    described = describe_plan(make_plan(config, scheme, ()))
    return dataclasses.replace(config, quantization=compressed.parse(described))


def _float8_deviation() -> float:
    """Of numbers whose codes are equally likely."""
    finite = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    return float(finite.square().mean().sqrt())


def random_model(
    config: ModelConfig, *, seed: int, dtype: torch.dtype, device: torch.device
) -> Model:
    """A network of random weights, made on the device in its dtype, tensor by tensor.

    Matrices have a standard deviation of 0.02, that of the published networks before training;
    norms are 1. Of quantised layers all codes are equally likely, and scales the same. Of memory it
    takes its own, and one tensor (of one expert) more.
    """
    generator = torch.Generator(device=device).manual_seed(seed)
    shapes: dict[str, tuple[int, ...]] = {}
    quantised: dict[str, Scheme] = {}  # by name of a tensor that a quantised layer has
    for name, shape in stored_tensors(config):
        scheme = named_scheme(config, name, shape)
        if scheme is None:
            shapes[name] = shape
            continue
        layer = name.removesuffix(".weight")
        for part, size in scheme.tensors(layer, (shape[0], shape[1])).items():
            shapes[f"{layer}.{part}"], quantised[f"{layer}.{part}"] = size, scheme

    def read(name: str) -> torch.Tensor:
        size = shapes[name]
        if name not in quantised:
            new = torch.empty(size, dtype=dtype, device=device)
            return new.fill_(1) if len(size) == 1 else new.normal_(0, 0.02, generator=generator)
        scheme = quantised[name]
        part = name.rpartition(".")[2]
        if isinstance(scheme, Float8):
            if part == scheme.scales:
                return torch.full(size, 0.02 / _float8_deviation(), dtype=dtype, device=device)
            codes = torch.randint(
                0, 256, size, generator=generator, dtype=torch.uint8, device=device
            )
            codes = torch.where((codes & 127) == 127, codes - 1, codes)  # NaN
            return codes.view(torch.float8_e4m3fn)
        if part == "weight_scale":
            # Codes that are spread evenly have a deviation of their range over 12^0.5.
            return torch.full(size, 0.02 * 12**0.5 / 2**scheme.bits, dtype=dtype, device=device)
        if part == "weight_shape":
            n, packed = shapes[name.replace("weight_shape", "weight_packed")]
            return torch.tensor([n, packed * 32 // scheme.bits])
        kind = torch.int8 if part == "weight" else torch.int32
        low, end = torch.iinfo(kind).min, torch.iinfo(kind).max + 1
        return torch.randint(low, end, size, generator=generator, dtype=kind, device=device)

    return load_model(config, Source(Path("random"), shapes, read), dtype=dtype, device=device)


# ---- what a step moves and computes ------------------------------------------------------------


def expert_bytes(model: Model) -> int:
    """Bytes of one expert; 0 in a network without."""
    for layer in model.layers:
        if layer.experts is not None:
            both = layer.experts.gate_up_proj.nbytes + layer.experts.down_proj.nbytes
            return both // len(layer.experts.router)
    return 0


def weight_bytes(model: Model, experts: float) -> float:
    """Of a step whose tokens go to ``experts`` of them, summed over layers, each read once."""
    mixture = model.config.mixture
    if mixture is None:
        return model.bytes_per_step
    of_one_token = len(mixture.layers) * mixture.num_experts_per_tok
    return model.bytes_per_step + (experts - of_one_token) * expert_bytes(model)


def expected_experts(config: ModelConfig, tokens: int) -> float:
    """Experts of all layers that ``tokens`` go to where each chooses for itself and evenly.

    An estimate: a router that prefers some sends its tokens to fewer.
    """
    m = config.mixture
    if m is None:
        return 0.0
    return m.total * (1 - (1 - m.num_experts_per_tok / m.num_experts) ** tokens)


def step_bytes(weights: float, kv_bytes_per_token: float, attended: float) -> float:
    """What a step reads whose sequences have ``attended`` tokens in the cache together."""
    return weights + kv_bytes_per_token * attended


def step_flops(config: ModelConfig, sequences: int, attended: float) -> float:
    """Of one token of each sequence: 2 a weight that it meets, 4 a channel of attended tokens."""
    mixture = config.mixture
    share = mixture.num_experts_per_tok / mixture.num_experts if mixture is not None else 0.0
    met = sum(
        math.prod(shape) * (share if ".mlp.experts." in name else 1.0)
        for name, shape in stored_tensors(config)
        if len(shape) == 2 and (config.tie_word_embeddings or "embed_tokens" not in name)
    )
    return 2 * met * sequences + 4 * config.q_size * config.num_layers * attended


def kv_bytes_per_token(config: ModelConfig, dtype: torch.dtype) -> int:
    """Of a cache that is not quantised, all layers."""
    return 2 * config.num_layers * config.kv_size * dtype.itemsize
