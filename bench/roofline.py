"""The measured roof of this device: copy bandwidth and bf16 matrix multiplication.

Data sheets promise more than any kernel reaches; these two are what the vendor's own copy and BLAS
do here, now, so a share of them is a share of what can be had.
"""

from __future__ import annotations

import dataclasses
import functools

import torch

from tkernels import device
from tkernels.registry import Cost
from tkernels.testing import time_ms


@dataclasses.dataclass(frozen=True)
class Roof:
    """Bytes a second (read plus written) of a large copy; operations a second of a bf16 matmul."""

    bytes_per_s: float
    flops_per_s: float

    def least_ms(self, cost: Cost) -> float:
        """The time below which ``cost`` cannot be done at these rates."""
        return 1e3 * max(cost.bytes / self.bytes_per_s, cost.flops / self.flops_per_s)

    def as_dict(self) -> dict[str, float]:
        """For the result document."""
        return {"copy_gbps": self.bytes_per_s / 1e9, "matmul_tflops": self.flops_per_s / 1e12}


@functools.cache
def measured() -> Roof:
    """Measure the roof; once a process."""
    dev = device.tensor_device()
    on_cpu = dev.type == "cpu"
    # Large enough to pass any cache by; on a CPU small enough to take well under a second.
    sizes, n, rounds = ((64 << 20,), 256, 5) if on_cpu else (_COPY_BYTES, 8192, 30)
    copy_rate = max(_copy_rate(nbytes, rounds) for nbytes in sizes)
    # Random values: matrices of zeros draw less power and run above the clock of real work.
    a, b = (torch.randn(n, n, device=dev).to(torch.bfloat16) for _ in range(2))
    product = torch.empty_like(a)
    matmul = time_ms({"matmul": [lambda: torch.mm(a, b, out=product)]}, rounds=rounds)["matmul"]
    return Roof(copy_rate, 2 * n**3 / matmul.ms * 1e3)


# The rate depends on the size and on how the driver copies inside a graph; a roof is the best seen.
_COPY_BYTES = (256 << 20, 384 << 20, 1 << 30)


def _copy_rate(nbytes: int, rounds: int) -> float:
    """Bytes a second, read plus written, of a copy of ``nbytes``."""
    source = torch.randn(nbytes // 4, device=device.tensor_device())
    target = torch.empty_like(source)
    timing = time_ms({"copy": [lambda: target.copy_(source)]}, rounds=rounds)["copy"]
    return 2 * nbytes / timing.ms * 1e3
