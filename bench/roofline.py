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
    nbytes, n, rounds = (64 << 20, 256, 5) if on_cpu else (2 << 30, 8192, 50)
    source = torch.zeros(nbytes, dtype=torch.uint8, device=dev)
    target = torch.empty_like(source)
    copy = time_ms({"copy": [lambda: target.copy_(source)]}, rounds=rounds)["copy"]
    # Random values: matrices of zeros draw less power and run above the clock of real work.
    a, b = (torch.randn(n, n, device=dev).to(torch.bfloat16) for _ in range(2))
    product = torch.empty_like(a)
    matmul = time_ms({"matmul": [lambda: torch.mm(a, b, out=product)]}, rounds=rounds)["matmul"]
    return Roof(2 * nbytes / copy.ms * 1e3, 2 * n**3 / matmul.ms * 1e3)
