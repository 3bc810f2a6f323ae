"""What the device did in some steps: time by kernel, and the share in which it did nothing.

    busy   time in which something ran, counted once where several did (their union)
    span   from the first thing's begin to the last one's end
    idle   1 - busy / span

Where kernels start before the one before has ended (programmatic dependent launch), most of their
time they wait. So a kernel is told the busy time between the end of the one that ended before it
and its own: those times add up to busy.

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


def busy_until(intervals: Sequence[Interval]) -> list[float]:
    """Microseconds that intervals cover, up to the end of each of them, in the order of ends.

    >>> busy_until([("a", 0, 2), ("b", 1, 3), ("c", 5, 6)])
    [2.0, 3.0, 4.0]
    """
    begins = sorted(begin for _, begin, _ in intervals)
    ends = sorted(end for _, _, end in intervals)
    found, total, running, at, now = [], 0.0, 0, 0, 0.0
    for end in ends:
        while at < len(begins) and begins[at] <= end:
            total += (begins[at] - now) * (running > 0)
            now, running, at = begins[at], running + 1, at + 1
        total += (end - now) * (running > 0)
        now, running = end, running - 1
        found.append(total)
    return found


def figures(intervals: Sequence[Interval], steps: int) -> dict[str, Any] | None:
    """Microseconds of a step, of ``steps`` recorded ones; the kernels that take most come first.

    None where nothing was recorded, as where the driver's tracing is not allowed.
    """
    if not intervals:
        return None
    times: dict[str, list[float]] = defaultdict(list)
    reached = busy_until(intervals)
    ended = sorted(intervals, key=lambda one: one[2])
    for (name, _, _), before, until in zip(ended, [0.0, *reached], reached, strict=False):
        times[name].append(until - before)
    span = max(end for _, _, end in intervals) - min(begin for _, begin, _ in intervals)
    busy = reached[-1]
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
