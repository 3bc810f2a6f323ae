"""One step of the network over the paged cache; the caller chooses which sequences take part."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

import tkernels
from model import cpu_ops
from model.kv_cache import (
    BlockAllocator,
    SequenceState,
    allocate_cache,
    build_metadata,
)
from model.qwen3 import Model, forward
from model.threads import cpu_threads, prompt_threads
from tkernels import build_cos_sin_cache


def operations(kernels: str | None) -> tuple[str, Any]:
    """(``triton`` or ``torch``, the namespace of that name), by default what suits the device.

    Raises:
        ValueError: kernels are asked for and triton is not installed.
    """
    on_cpu = tkernels.device.tensor_device().type == "cpu"
    name = kernels or ("torch" if on_cpu else "triton")
    if name == "torch":
        return name, cpu_ops if on_cpu else tkernels.reference
    try:
        tkernels.device.require_triton()
    except tkernels.UnsupportedError as error:
        raise ValueError(f"--kernels triton: {error}") from None
    return name, tkernels


class Runner:
    """A model with its cache. ``ops`` is ``tkernels`` or ``tkernels.reference``.

    ``num_blocks`` blocks of the cache are shared by all sequences; positions go up to
    ``max_positions`` - 1.
    """

    def __init__(self, model: Model, ops: Any, *, num_blocks: int, max_positions: int) -> None:
        self.model, self.ops = model, ops
        self.device = model.norm.device
        self.cache = allocate_cache(model.config, num_blocks, model.norm.dtype, self.device)
        self.blocks = BlockAllocator(num_blocks)
        self.max_positions = max_positions
        self.cos_sin_cache = build_cos_sin_cache(
            model.config.rope, max_positions, device=self.device
        )

    def prefill(
        self, sequences: Sequence[SequenceState], *, all_logits: bool = False
    ) -> torch.Tensor:
        """Compute all tokens of each sequence that are not in the cache yet.

        Returns:
            Logits fp32 [B, V] of the last token of each sequence; with ``all_logits`` [T, V].
        """
        for s in sequences:
            if len(s.token_ids) == s.num_computed:
                raise ValueError("prefill: expected at least one new token in each sequence, got 0")
        return self._step(sequences, all_logits)

    def decode(self, sequences: Sequence[SequenceState]) -> torch.Tensor:
        """Compute the one new token of each sequence: logits fp32 [B, V]."""
        for s in sequences:
            if len(s.token_ids) != s.num_computed + 1:
                raise ValueError(
                    "decode: expected one new token in each sequence, got "
                    f"{len(s.token_ids) - s.num_computed}"
                )
        return self._step(sequences, all_logits=False)

    @torch.inference_mode()
    def _step(self, sequences: Sequence[SequenceState], all_logits: bool) -> torch.Tensor:
        for s in sequences:
            if len(s.token_ids) > self.max_positions:
                raise ValueError(
                    f"runner: expected at most {self.max_positions} tokens in a sequence, got "
                    f"{len(s.token_ids)}"
                )
            self.blocks.grow(s.block_ids, len(s.token_ids))
        meta = build_metadata(sequences, self.device)
        ids, positions = self._inputs(sequences)
        with cpu_threads(self._cpu_threads(len(sequences), len(ids))):
            logits = forward(
                self.model,
                self.ops,
                ids,
                positions,
                self.cos_sin_cache,
                self.cache,
                meta,
                all_logits=all_logits,
            )
        for s in sequences:
            s.num_computed = len(s.token_ids)
        return logits

    def _inputs(self, sequences: Sequence[SequenceState]) -> tuple[torch.Tensor, torch.Tensor]:
        ids = [t for s in sequences for t in s.token_ids[s.num_computed :]]
        positions = [p for s in sequences for p in range(s.num_computed, len(s.token_ids))]
        both = torch.tensor([ids, positions]).to(self.device, non_blocking=True)
        return both[0], both[1]

    def _cpu_threads(self, num_sequences: int, num_tokens: int) -> int:
        """A number that sizes alone decide: logits differ in their last bits with it."""
        if self.device.type == "cpu" and num_tokens > num_sequences:
            return prompt_threads(self.model, num_tokens)
        return torch.get_num_threads()
