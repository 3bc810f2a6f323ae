"""How many CPU threads a step deserves.

A decode step of a small model is hundreds of parallel regions of some 100 us. On idle cores more
threads make it faster; where another process holds one of them, each region waits for the
scheduler and the step becomes ten times slower. Nothing tells the two apart but trying.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import torch

from model.qwen3 import Model

_BYTES_PER_THREAD = 256 * 2**20
_PROBE_EVERY = 16  # decode steps
_PROBE_LAYERS = 8


def prompt_threads(model: Model, num_tokens: int) -> int:
    """Threads for a prefill: one for each 256 MiB of weights that it works through.

    32 tokens count as one reading of the weights: many tokens at once are bound by arithmetic.
    """
    work = model.bytes_per_step * max(1.0, num_tokens / 32)
    return min(torch.get_num_threads(), 1 + int(work // _BYTES_PER_THREAD))


class DecodeThreads:
    """Threads for decode steps: PyTorch's number or one, by a probe every 16 steps.

    The probe times the widest projection of a few layers both ways, about a tenth of a step.
    """

    def __init__(self, model: Model) -> None:
        self.model, self.steps, self.chosen = model, 0, 1

    def next(self, hidden: torch.Tensor) -> int:
        """Threads for the coming step; ``hidden`` is any [T, H] of its shape and dtype."""
        many = torch.get_num_threads()
        if self.steps % _PROBE_EVERY == 0:
            one_s, many_s = (_probe(self.model, hidden, n) for n in (1, many))
            self.chosen = many if many_s < 0.9 * one_s else 1
        self.steps += 1
        return self.chosen


def _probe(model: Model, hidden: torch.Tensor, threads: int) -> float:
    """Seconds."""
    with cpu_threads(threads):
        start = time.perf_counter()
        for layer in model.layers[:_PROBE_LAYERS]:
            layer.gate_up_proj(hidden)
        return time.perf_counter() - start


@contextlib.contextmanager
def cpu_threads(number: int) -> Iterator[None]:
    """Use this many CPU threads inside the ``with`` block."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
