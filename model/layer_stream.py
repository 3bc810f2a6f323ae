"""A network computed layer by layer: the weights of one decoder layer are held, never of two.

The tokens' hidden states are kept between layers and weights are not, so a network need not fit the
memory: each layer is read, used for all tokens and dropped. So is the embedding, before the first.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch

import tkernels
from model import weights
from model.config import ModelConfig
from model.kv_cache import BLOCK_SIZE, BlockAllocator, SequenceState, allocate_cache, build_metadata
from model.qwen3 import Layer, Linear, OverCache, _attention
from model.sources import Source

WINDOW = 1024  # tokens that attend to one another, at most
_ROWS = 256  # of logits at once

Tensor = torch.Tensor


@dataclasses.dataclass
class Part:
    """A linear layer of the checkpoint inside a parameter of ours: ``rows`` of ``field``."""

    name: str  # "model.layers.0.self_attn.q_proj"
    field: str  # "qkv_proj"
    rows: slice


def parts(config: ModelConfig, index: int) -> list[Part]:
    """The linear layers of a decoder layer: seven, or the four of attention beside experts."""
    found = []
    for ours, parameter in weights.layer_table(config, index).items():
        field, _, kind = ours.partition(".")
        if kind == "weight" and len(parameter.sources[0][1]) == 2:
            row = 0
            for name, (rows, _) in parameter.sources:
                found.append(Part(name.removesuffix(".weight"), field, slice(row, row + rows)))
                row += rows
    return found


class Tapped(Linear):
    """A projection that tells ``see`` of its input."""

    def __init__(self, linear: Linear, see: Callable[[Tensor], None]) -> None:
        super().__init__(linear.weight, linear.bias)
        self._see = see

    def __call__(self, x: Tensor, ops: Any) -> Tensor:
        self._see(x)
        return super().__call__(x, ops)


class LayerStream:
    """A checkpoint and the tokens ``ids``, cut into windows of at most ``WINDOW``.

    Raises:
        ValueError: the checkpoint does not hold what its config needs.
    """

    def __init__(
        self,
        config: ModelConfig,
        source: Source,
        ops: Any,
        ids: list[int],
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        weights.check_names(config, source)
        self.config, self._source, self._ops, self._ids = config, source, ops, ids
        self._kind: dict[str, Any] = {"dtype": dtype, "device": device}
        longest = min(WINDOW, config.max_position_embeddings)
        self.windows = [ids[i : i + longest] for i in range(0, len(ids), longest)]
        lengths = [len(window) for window in self.windows]
        num_blocks = sum(-(-n // BLOCK_SIZE) for n in lengths)
        blocks = BlockAllocator(num_blocks)
        sequences = [SequenceState(window) for window in self.windows]
        for sequence in sequences:
            blocks.grow(sequence.block_ids, len(sequence.token_ids))
        self._meta = build_metadata(sequences, lengths, device, sdpa=ops is not tkernels)
        one = dataclasses.replace(config, num_layers=1)  # each layer's K and V replace the last's
        self._cache = allocate_cache(one, num_blocks, **self._kind)
        self._positions = torch.cat([torch.arange(n) for n in lengths]).to(device)
        self._table = tkernels.build_cos_sin_cache(config.rope, longest, device=device)

    def embed(self) -> Tensor:
        """Hidden states before the first layer: [T, H]."""
        table = weights.load_outer(self.config, self._source, "embed_tokens", **self._kind)
        return table[torch.tensor(self._ids, device=table.device)].contiguous()

    def load(self, index: int) -> Layer:
        """The parameters of a layer. Drop them before the next one is asked for."""
        return weights.load_layer(self.config, self._source, index, **self._kind)

    def run(self, layer: Layer, hidden: Tensor) -> Tensor:
        """Hidden states [T, H] after ``layer``."""
        config, ops, eps = self.config, self._ops, self.config.rms_norm_eps
        attend = OverCache(ops, self._cache, self._meta)
        qkv, hidden = layer.qkv_proj.behind_norm(None, hidden, layer.input_layernorm, ops, eps=eps)
        attended = _attention(config, layer, ops, qkv, self._positions, self._table, 0, attend)
        x, hidden = layer.o_proj.onto(hidden, attended, ops)
        x, hidden = layer.mlp_behind_norm(x, hidden, ops, eps=eps)
        return hidden if x is None else hidden + x

    def perplexities(self, states: list[Tensor]) -> list[float]:
        """exp of the mean loss of the next token, for hidden states after the last layer."""
        norm = weights.load_outer(self.config, self._source, "norm", **self._kind)
        head = weights.load_outer(self.config, self._source, "lm_head", **self._kind)
        starts, row = [], 0
        for window in self.windows:
            starts.append(row)
            row += len(window)
        last = {start - 1 for start in starts[1:]} | {row - 1}  # of a window: predicts nothing
        rows = torch.tensor([i for i in range(row) if i not in last], device=head.device)
        targets = torch.tensor(self._ids, device=head.device)[rows + 1]
        found = []
        for hidden in states:
            x = self._ops.rms_norm(hidden, norm, eps=self.config.rms_norm_eps)[rows]
            loss = 0.0
            for i in range(0, len(x), _ROWS):
                logits = torch.nn.functional.linear(x[i : i + _ROWS], head).float()
                loss += float(
                    torch.nn.functional.cross_entropy(
                        logits, targets[i : i + _ROWS], reduction="sum"
                    )
                )
            found.append(math.exp(loss / len(x)))
        return found
