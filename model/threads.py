"""How many CPU threads a piece of work deserves."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from model.qwen3 import Model

_BYTES_PER_THREAD = 256 * 2**20


def step_threads(model: Model, num_tokens: int) -> int:
    """CPU threads for a step of ``num_tokens``: one for each 256 MiB of weights it works through.

    A decode step of a small model is hundreds of parallel regions of some 50 us. A second thread
    gains a tenth there, and where another process holds its core each region waits for it, which
    makes the step ten times slower. 32 tokens count as one reading of the weights, since many
    tokens at once are bound by arithmetic. Never more than PyTorch's own number.
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
