"""How many CPU threads a prefill deserves; a decode step takes PyTorch's number."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from model.qwen3 import Model

_BYTES_PER_THREAD = 256 * 2**20


def prompt_threads(model: Model, num_tokens: int) -> int:
    """Threads for a prefill: one for each 256 MiB of weights that it works through.

    32 tokens count as one reading of the weights: many tokens at once are bound by arithmetic.
    """
    work = model.bytes_per_step * max(1.0, num_tokens / 32)
    return min(torch.get_num_threads(), 1 + int(work // _BYTES_PER_THREAD))


@contextlib.contextmanager
def cpu_threads(number: int) -> Iterator[None]:
    """Use this many CPU threads inside the ``with`` block."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
