"""Studies as the tuner leaves them, made up without running anything, for tests of the report."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from typing import Any

import optuna
from optuna.distributions import IntDistribution
from optuna.trial import TrialState

from autotune.records import encode
from tkernels.registry import Config, get

ORIGINS = ("default", "neighbour", "random", "random", "sampler", "descent")
FACTS = {"kernel_hash": "0123456789abcdef", "triton": "3.6.0"}


def problem_of(kernel: str, tag: str = "bench", place: int = 0) -> tuple[str, Mapping[str, Any]]:
    """(name, problem) of one of the kernel's cases."""
    case = [case for case in get(kernel).cases if tag in case.tags][place]
    return case.name, case.problem


def trial(
    config: Config,
    *,
    kind: str = "ok",
    ms: float | None = None,
    origin: str = "sampler",
    message: str = "",
    state: TrialState | None = None,
    facts: Mapping[str, Any] | None = None,
) -> optuna.trial.FrozenTrial:
    """One trial; its parameters are places in lists, as the tuner stores them."""
    attrs: dict[str, Any] = {"config": config, "origin": origin, "kind": kind}
    attrs |= {"message": message} if message else {}
    attrs |= {"ms": ms} if ms is not None else {}
    attrs["facts"] = dict(facts or {})
    complete = kind == "ok" and "stopped_at" not in attrs["facts"]
    if state is None:
        state = TrialState.COMPLETE if complete else TrialState.PRUNED
    blocks = {i: ms * (1 + 0.004 * (i % 3)) for i in range(8)} if ms and kind == "ok" else {}
    return optuna.trial.create_trial(
        state=state,
        value=ms if state == TrialState.COMPLETE else None,
        params={"BLOCK": 0},
        distributions={"BLOCK": IntDistribution(0, 3)},
        user_attrs=attrs,
        intermediate_values=blocks,
    )


def study(
    trials: Sequence[optuna.trial.FrozenTrial],
    *,
    kernel: str = "rms_norm",
    arch: str = "sm90",
    case: str | None = None,
    problem: Mapping[str, Any] | None = None,
    default: Config | None = None,
    offline: bool = False,
    fingerprint: Mapping[str, Any] | None = None,
    outcome: Mapping[str, Any] | None = None,
    **attrs: Any,
) -> optuna.Study:
    """A study of ``trials``."""
    made = optuna.create_study()
    name, own = ("made up", {}) if problem is not None else problem_of(kernel)
    facts = {"offline": True} if offline else {"device": "NVIDIA H100 80GB HBM3"}
    given = {
        "kernel": kernel,
        "arch": arch,
        "case": case if case is not None else name,
        "key": {},
        "problem": encode(problem if problem is not None else own),
        "default_config": default if default is not None else trials[0].user_attrs["config"],
        "fingerprint": {**FACTS, **facts, **(fingerprint or {})},
        **({"outcome": dict(outcome)} if outcome is not None else {}),
        **attrs,
    }
    for key, value in given.items():
        made.set_user_attr(key, value)
    made.add_trials(trials)
    return made


def search(count: int, *, seed: int = 0, base_ms: float = 0.04) -> list[optuna.trial.FrozenTrial]:
    """Trials of a search with every kind of end: its best is BLOCK_N 1024 with 4 warps."""
    chance = random.Random(seed)
    made = []
    for i in range(count):
        config: Config = {
            "BLOCK_ROWS": chance.choice([1, 2, 4, 8]),
            "BLOCK_N": chance.choice([64, 128, 256, 512, 1024, 2048, 4096]),
            "num_warps": chance.choice([1, 2, 4, 8, 16]),
            "programs_per_core": chance.choice([0, 1, 2, 4]),
            "variant": chance.choice(["plain", "hopper"]),
            "num_stages": 2,
        }
        if config["variant"] == "hopper":
            config["PDL"] = chance.random() < 0.5
        off = abs(math.log2(config["BLOCK_N"] / 1024)) + abs(math.log2(config["num_warps"] / 4))
        ms = base_ms * (1 + 0.18 * off + 0.04 * config["BLOCK_ROWS"] + 0.02 * chance.random())
        origin = ORIGINS[min(i, 1)] if i < 2 else ORIGINS[2 + 4 * i // max(count, 1) // 2]
        if i > 2 and i % 9 == 0:
            kind = ("out of resources", "does not compile", "hung", "wrong")[i // 9 % 4]
            made.append(trial(config, kind=kind, message=f"{kind}: 232448 bytes", origin=origin))
        elif i > 2 and i % 7 == 0:
            facts = {"noise": 0.01, "stopped_at": 5}
            made.append(trial(config, ms=2.5 * ms, origin=origin, facts=facts))
        else:
            facts = {"noise": 0.008, "registers": 48, "spills": 0, "shared_bytes": 16384}
            made.append(trial(config, ms=ms, origin=origin, facts=facts))
    return made


def ended(trials: Sequence[optuna.trial.FrozenTrial]) -> dict[str, Any]:
    """The outcome of a search that kept the fastest of ``trials``."""
    timed = [t for t in trials if t.state == TrialState.COMPLETE]
    best = min(timed, key=lambda t: t.value or 0.0)
    return {
        "config": best.user_attrs["config"],
        "ms": best.value,
        "default_config": trials[0].user_attrs["config"],
        "default_ms": trials[0].value,
        "trials": len(trials),
        "failures": {},
        "wrong": [],
        "measured": {},
        "estimate": None,
        "exhausted": False,
    }
