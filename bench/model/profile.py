"""What the device did in some steps: time by kernel, and the share in which it did nothing.

    busy   time in which something ran, counted once where several did (their union)
    span   from the first thing's begin to the last one's end
    idle   1 - busy / span

Recording kernels one by one may spread those of a graph apart a little, so idle is at most that.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch

from tkernels import device

Interval = tuple[str, float, float]  # name, begin, end in us


def prepare() -> None:
    """Start the driver's tracing, before graphs are captured."""
    with device.profiled():
        torch.ones(1, device=device.tensor_device())


def union(intervals: Sequence[Interval]) -> float:
    """Microseconds that at least one interval covers.

    >>> union([("a", 0, 2), ("b", 1, 3), ("c", 5, 6)])
    4.0
    """
    total, reached = 0.0, float("-inf")
    for _, begin, end in sorted(intervals, key=lambda one: one[1]):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


def figures(intervals: Sequence[Interval], steps: int) -> dict[str, Any] | None:
    """Microseconds of a step, of ``steps`` recorded ones; the kernels that take most come first.

    None where nothing was recorded, as where the driver's tracing is not allowed.
    """
    if not intervals:
        return None
    times: dict[str, list[float]] = defaultdict(list)
    for name, begin, end in intervals:
        times[name].append(end - begin)
    span = max(end for _, _, end in intervals) - min(begin for _, begin, _ in intervals)
    busy = union(intervals)
    order = sorted(times, key=lambda name: -sum(times[name]))
    return {
        "steps": steps,
        "busy_us": busy / steps,
        "span_us": span / steps,
        "idle_share": 1 - busy / span,
        "kernels": [
            {"name": n, "us": sum(times[n]) / steps, "launches": len(times[n]) / steps}
            for n in order
        ],
    }
