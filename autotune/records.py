"""What the parts of the tuner hand to each other: problems, answers about configs, outcomes."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

import torch

from tkernels.registry import Config, Problem

# What may become of a config other than a time. "illegal" is known before anything is compiled.
FAILURES = (
    "illegal",
    "does not compile",
    "out of resources",  # registers, shared memory, UB...: known to the compiler alone
    "not estimated",  # it compiles; offline, the model cannot say how long it takes
    "does not run",
    "out of memory",
    "wrong",  # computed something else than the reference
    "slow",  # many times slower than the best: not timed to the end
    "hung",  # its process was stopped
    "crashed",  # its process died
    "device fault",  # its process lost the device
)


@dataclasses.dataclass(frozen=True)
class Task:
    """One problem to tune, on one architecture; ``key`` is what its entry will be found by."""

    kernel: str
    case: str  # name for people
    problem: Problem
    key: dict[str, Any]
    arch: str

    @property
    def label(self) -> str:
        """Text that is equal for two tasks with one entry."""
        return label_of(self.key)


@dataclasses.dataclass(frozen=True)
class Answer:
    """What became of one config: a time (or, offline, an estimate of one), or why there is none."""

    kind: str  # "ok", or one of FAILURES
    message: str = ""  # of a failure, one line
    ms: float | None = None  # milliseconds: median of ``blocks``, or what a model says
    blocks: tuple[float, ...] = ()  # median of each block of a measurement
    facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # JSON: registers, clocks...

    @property
    def ok(self) -> bool:
        """Whether there is a time."""
        return self.kind == "ok"

    @property
    def timed(self) -> bool:
        """Whether the time is of a whole measurement: one that was stopped early cannot win."""
        return self.ok and self.ms is not None and "stopped_at" not in self.facts


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The end of a search: the config to keep, and what is known of it and of the default."""

    task: Task
    config: Config
    ms: float
    default_config: Config
    default_ms: float
    trials: int  # configs that were measured or failed in trying
    failures: Mapping[str, int]  # how many a kind
    wrong: tuple[str, ...]  # configs that computed something else, with the error
    measured: Mapping[str, Any] | None  # device, versions, date, noise; None: a model's estimate
    estimate: Mapping[str, Any] | None  # the model's name, the compiler, what it found

    @property
    def gain(self) -> float:
        """Time of the default over time of the config that is kept."""
        return self.default_ms / self.ms


def label_of(value: Mapping[str, Any]) -> str:
    """Text of a key or a config that does not depend on the order of its fields."""
    return json.dumps(dict(value), sort_keys=True)


def encode(value: Any) -> Any:
    """A problem as JSON: a dtype becomes its name, ``torch.bfloat16``; a tuple becomes a list."""
    if isinstance(value, torch.dtype):
        return str(value)
    if isinstance(value, Mapping):
        return {name: encode(v) for name, v in value.items()}
    if isinstance(value, list | tuple):
        return [encode(v) for v in value]
    return value


def decode(value: Any) -> Any:
    """The reverse of ``encode``."""
    if isinstance(value, str) and value.startswith("torch."):
        return getattr(torch, value.removeprefix("torch."))
    if isinstance(value, dict):
        return {name: decode(v) for name, v in value.items()}
    if isinstance(value, list):
        return tuple(decode(v) for v in value)
    return value
