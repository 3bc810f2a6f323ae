"""Hugging Face transformers as a peer: its own network over the tensors of ours, nothing copied.

``generate`` runs it, greedily, as its users do: with its own growing cache, or with a static one,
for which it compiles the decode step itself (``torch.compile``, mode "reduce-overhead").
"""

from __future__ import annotations

import importlib.util
import time
from typing import Any

import torch

from bench.model.decode import Prompts, Sample
from bench.rows import UsageError
from model.config import to_hf
from model.qwen3 import Linear, Model
from tkernels import device

NAMES = ("transformers", "transformers-compile")


def check() -> None:
    """Raise where transformers is not installed."""
    if importlib.util.find_spec("transformers") is None:
        raise UsageError("bench: --peer transformers must find transformers installed, got none")


def build(model: Model) -> Any:
    """transformers' network whose parameters are ours, or views of them.

    Raises:
        ValueError: a weight of ours is quantised, or transformers asks for other tensors.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    dtype = model.norm.dtype
    # Without an end of sequence, so that nothing ends before its tokens are there.
    fields = to_hf(model.config) | {"eos_token_id": None, "dtype": str(dtype).partition(".")[2]}
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    with torch.device("meta"):
        network = AutoModelForCausalLM.from_config(config, dtype=dtype)
    try:
        found = network.load_state_dict(_state(model), strict=False, assign=True)
    except RuntimeError as error:
        raise ValueError(f"transformers: expected tensors of its own shapes, got {error}") from None
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    if wrong := (set(found.missing_keys) - tied) | set(found.unexpected_keys):
        raise ValueError(f"transformers: expected its own names of tensors, got {sorted(wrong)[0]}")
    network.tie_weights()
    # What is not stored is computed when it is made, which on the device meta gives nothing.
    rotary = type(network.model.rotary_emb)(config=config)
    network.model.rotary_emb = rotary.to(model.norm.device)
    return network.eval()


def _state(model: Model) -> dict[str, torch.Tensor]:
    """Our tensors under the names of transformers 5, cut along their rows where ours are joined."""
    c = model.config
    state = {
        "model.embed_tokens.weight": _plain(model.embed_tokens),
        "model.norm.weight": model.norm,
    }
    if not c.tie_word_embeddings:
        state["lm_head.weight"] = _plain(model.lm_head.weight)
    for i, layer in enumerate(model.layers):
        at = f"model.layers.{i}."
        qkv = (("q_proj", c.q_size), ("k_proj", c.kv_size), ("v_proj", c.kv_size))
        state |= _cut(f"{at}self_attn.", layer.qkv_proj, qkv)
        state |= _cut(f"{at}self_attn.", layer.o_proj, (("o_proj", c.hidden_size),))
        for name in ("input_layernorm", "post_attention_layernorm"):
            state[f"{at}{name}.weight"] = getattr(layer, name)
        if layer.q_norm is not None and layer.k_norm is not None:
            state[f"{at}self_attn.q_norm.weight"] = layer.q_norm
            state[f"{at}self_attn.k_norm.weight"] = layer.k_norm
        if layer.experts is not None:
            state[f"{at}mlp.gate.weight"] = layer.experts.router
            state[f"{at}mlp.experts.gate_up_proj"] = _plain(layer.experts.gate_up_proj)
            state[f"{at}mlp.experts.down_proj"] = _plain(layer.experts.down_proj)
        if layer.gate_up_proj is not None and layer.down_proj is not None:
            both = ("gate_proj", c.intermediate_size), ("up_proj", c.intermediate_size)
            state |= _cut(f"{at}mlp.", layer.gate_up_proj, both)
            state |= _cut(f"{at}mlp.", layer.down_proj, (("down_proj", c.hidden_size),))
    return state


def _cut(
    prefix: str, linear: Linear, parts: tuple[tuple[str, int], ...]
) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    sizes = [rows for _, rows in parts]
    for name, tensor in (("weight", linear.weight), ("bias", linear.bias)):
        if tensor is not None:
            pieces = torch.split(_plain(tensor), sizes)
            found |= {
                f"{prefix}{part}.{name}": p for (part, _), p in zip(parts, pieces, strict=True)
            }
    return found


def _plain(weight: Any) -> torch.Tensor:
    if not isinstance(weight, torch.Tensor):
        raise ValueError(f"transformers: expected weights of floats, got {type(weight).__name__}")
    return weight


def run(network: Any, prompts: Prompts, output: int, *, static: bool) -> Sample:
    """``output`` tokens of each reply; ``static`` asks for the cache whose step is compiled."""
    from transformers import CompileConfig, StoppingCriteria

    seconds: list[float] = []

    class Clock(StoppingCriteria):  # type: ignore[misc]
        """Called after each token; never stops."""

        last = 0.0

        def __call__(self, input_ids: Any, scores: Any, **_: object) -> Any:
            device.synchronize()
            now = time.perf_counter()
            seconds.append(now - self.last)
            self.last = now
            return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)

    ids = torch.tensor(prompts, device=network.device)
    clock, more = Clock(), {}
    if static:
        more["cache_implementation"] = "static"
        if ids.device.type != "cpu":  # where transformers compiles nothing
            more["compile_config"] = CompileConfig(mode="reduce-overhead")
    device.synchronize()
    clock.last = time.perf_counter()
    found = network.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=output,
        do_sample=False,
        stopping_criteria=[clock],
        **more,
    )
    return Sample(seconds, found[:, ids.shape[1] :].t().tolist())


def forget_compiled() -> None:
    """Throw compiled steps and their graphs away, whose batch and weights are done with."""
    torch.compiler.reset()
