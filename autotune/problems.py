"""Which problems are tuned."""

from __future__ import annotations

from autotune.records import Task
from tkernels.registry import KernelSpec


def bench_tasks(spec: KernelSpec, arch: str) -> list[Task]:
    """The bench cases of a kernel; on the interpreter, which is slow, the smoke ones."""
    tag = "smoke" if arch == "interpret" else "bench"
    return [
        Task(spec.name, c.name, c.problem, spec.tuning_key(c.problem), arch)
        for c in spec.cases
        if tag in c.tags
    ]
