"""Find the fastest right config of a kernel for one problem, with Optuna.

A config that the legality rule refuses is never compiled; one that computes a wrong value never
wins; the winner must beat the default when the two take turns.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Iterator
from typing import Any

import optuna
import torch

from tkernels import device
from tkernels.registry import Case, Config, KernelSpec
from tkernels.testing import assert_right, clone_inputs, tensors_of, time_ms

_NOISE = 1.02  # a gain below this is not worth leaving the default for
_SET_LIMIT = 16


@dataclasses.dataclass
class Tally:
    """What happened to the configs that were tried."""

    measured: int = 0
    illegal: int = 0
    failed: int = 0
    wrong: list[str] = dataclasses.field(default_factory=list)
    stopped: bool = False  # by Ctrl-C: the caller should not go on to the next problem


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The config to keep for a problem, its time and the default's, in milliseconds."""

    case: str
    key: dict[str, Any]
    config: Config
    ms: float
    default_ms: float
    tally: Tally


def tune(
    spec: KernelSpec, case: Case, *, trials: int, seed: int, said: Callable[[str], None]
) -> Outcome:
    """Try ``trials`` configs for ``case`` and time the best against the default.

    Each config is measured once, however often the sampler asks for it. ``said`` receives a line
    for a config that is wrong or fails to launch. Ctrl-C ends the search, not what it found.
    """
    dev = device.current()
    sets = _input_sets(spec, case)
    default = spec.default_config(case.problem, dev)
    space = spec.space(dev)
    tally = Tally()
    seen: dict[str, float] = {}

    def objective(trial: optuna.Trial) -> float:
        config = {name: trial.suggest_categorical(name, space[name]) for name in space}
        label = json.dumps(config, sort_keys=True)
        if label not in seen:
            reason = spec.why_illegal(config, case.problem, dev)
            if reason is not None:
                tally.illegal += 1
                raise optuna.TrialPruned(reason)
            seen[label] = _measure(spec, sets, config, tally, said)
        if seen[label] == float("inf"):
            raise optuna.TrialPruned("failed")
        return seen[label]

    # Most points of a space are illegal and cost nothing: they do not count as trials.
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    sampler = optuna.samplers.TPESampler(seed=seed, multivariate=True)
    study = optuna.create_study(sampler=sampler)
    study.enqueue_trial(default)
    limit = functools.partial(_enough, tally=tally, trials=trials)
    try:
        study.optimize(objective, n_trials=50 * trials, callbacks=[limit])
    except KeyboardInterrupt:
        tally.stopped = True
        said(f"{spec.name} {case.name}: stopped after {tally.measured} configs")
    ranked = sorted((ms, label) for label, ms in seen.items() if ms < float("inf"))
    best = json.loads(ranked[0][1]) if ranked else default
    ms, default_ms = _duel(spec, sets, best, default)
    if best == default or ms * _NOISE > default_ms:
        best, ms = default, default_ms
    return Outcome(case.name, spec.tuning_key(case.problem), best, ms, default_ms, tally)


def _enough(study: optuna.Study, trial: Any, *, tally: Tally, trials: int) -> None:
    if tally.measured + tally.failed + len(tally.wrong) >= trials:
        study.stop()


def _input_sets(spec: KernelSpec, case: Case) -> list[dict[str, Any]]:
    """Enough copies of the inputs to exceed twice the last-level cache, within reason."""
    first = spec.make_inputs(case.problem, device.tensor_device())
    size = sum(t.nbytes for t in first.values() if isinstance(t, torch.Tensor))
    count = min(_SET_LIMIT, 1 + 2 * device.l2_bytes() // max(size, 1))
    return [first, *(clone_inputs(first) for _ in range(count - 1))]


def _calls(spec: KernelSpec, sets: list[dict[str, Any]], config: Config) -> list[Callable[[], Any]]:
    return [functools.partial(spec.launch, **inputs, config=config) for inputs in sets]


def _measure(
    spec: KernelSpec,
    sets: list[dict[str, Any]],
    config: Config,
    tally: Tally,
    said: Callable[[str], None],
) -> float:
    """Milliseconds of a right config; infinity for one that is wrong or does not launch."""
    inputs = clone_inputs(sets[0])
    try:
        results = tensors_of(spec.launch(**inputs, config=config))
        device.synchronize()
        assert_right(spec, sets[0], (*results, *(inputs[name] for name in spec.mutates)))
    except AssertionError as error:
        tally.wrong.append(f"{config}: {error}")
        said(f"WRONG {spec.name} with {config}: {error}")
        return float("inf")
    except Exception as error:  # a compiler may raise anything; what it was is shown
        tally.failed += 1
        said(f"{spec.name} with {config} does not run: {type(error).__name__}: {error}")
        return float("inf")
    tally.measured += 1
    return time_ms({"this": _calls(spec, sets, config)}, rounds=8)["this"].ms


def _duel(
    spec: KernelSpec, sets: list[dict[str, Any]], best: Config, default: Config
) -> tuple[float, float]:
    calls = {"best": _calls(spec, sets, best), "default": _calls(spec, sets, default)}
    times = time_ms(calls, rounds=30)
    return times["best"].ms, times["default"].ms


def bench_cases(spec: KernelSpec) -> Iterator[Case]:
    """The problems to tune for: bench cases, or the smoke ones on the interpreter."""
    tag = "smoke" if device.current().arch == "interpret" else "bench"
    return (case for case in spec.cases if tag in case.tags)
