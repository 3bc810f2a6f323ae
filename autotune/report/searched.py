"""A stored search in the form that a report is made of: what was tried, in real values."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution

from autotune import store
from autotune.records import decode, label_of
from tkernels.registry import Config, Cost, get

ABSENT = "-"  # shown where a config lacks a key that others have
_MOST_CHOICES = 16  # values of a key that an axis can name; more numbers than that are a scale
_LEAST_TRIALS = 10  # fewer tell nothing of a key's importance

Value = int | str

optuna.logging.set_verbosity(optuna.logging.ERROR)


@dataclasses.dataclass(frozen=True)
class Tried:
    """One config and what came of it."""

    place: int  # 1, 2, ... in the order tried
    config: Config
    origin: str
    kind: str
    message: str
    us: float | None  # of one call: measured, or a model's estimate
    noise: float | None  # width of the middle 60% of the blocks, as a share
    stopped: bool  # not timed to the end, because others were faster beyond doubt
    facts: Mapping[str, Any]

    @property
    def complete(self) -> bool:
        """Whether ``us`` can be compared with others."""
        return self.kind == "ok" and self.us is not None and not self.stopped


@dataclasses.dataclass(frozen=True)
class Searched:
    """One problem, and all that was tried for it."""

    kernel: str
    arch: str
    case: str
    offline: bool
    fingerprint: Mapping[str, Any]
    default_config: Config
    tried: Sequence[Tried]
    lost: int  # trials whose tuner was killed
    finished: bool
    config: Config | None  # kept at the end; of a search that goes on, the best so far
    us: float | None
    default_us: float | None
    cost: Cost | None  # None where the kernel is not registered here
    roof: Roof | None

    @property
    def noun(self) -> str:
        """What a number of microseconds is: nothing that was not run has a time."""
        return "estimate" if self.offline else "time"

    @property
    def gain(self) -> float | None:
        """The default's microseconds over those of the config that is kept."""
        if self.us is None or self.default_us is None or self.us <= 0:
            return None
        return self.default_us / self.us

    @property
    def ranked(self) -> list[Tried]:
        """Complete ones, fastest first."""
        return sorted((t for t in self.tried if t.complete), key=lambda t: (t.us, t.place))

    @property
    def failures(self) -> dict[str, int]:
        """How many failed, by kind, most first."""
        return dict(Counter(t.kind for t in self.tried if t.kind != "ok").most_common())

    def roof_share(self, us: float) -> float | None:
        """Least microseconds by the roof over ``us``."""
        if self.roof is None or self.cost is None or us <= 0:
            return None
        return self.roof.least_us(self.cost) / us


@dataclasses.dataclass(frozen=True)
class Roof:
    """Rates that a kernel can reach at best, and where they are from."""

    bytes_per_s: float
    flops_per_s: float
    source: str

    def least_us(self, cost: Cost) -> float:
        """The time below which ``cost`` cannot be done at these rates."""
        return 1e6 * max(cost.bytes / self.bytes_per_s, cost.flops / self.flops_per_s)


# ---- from studies ------------------------------------------------------------------------------


def read(study: optuna.Study) -> Searched:
    """What ``study`` holds."""
    attrs = study.user_attrs
    tried, lost = _tried(study)
    default = attrs["default_config"]
    outcome = attrs.get("outcome")
    if outcome is not None:
        config, us = outcome["config"], outcome["ms"] * 1e3
        default_us = outcome["default_ms"] * 1e3
    else:
        complete = [t for t in tried if t.complete]
        best = min(complete, key=lambda t: (t.us, t.place), default=None)
        config, us = (best.config, best.us) if best is not None else (None, None)
        default_us = next((t.us for t in complete if t.config == default), None)
    fingerprint = attrs.get("fingerprint", {})
    return Searched(
        kernel=attrs["kernel"],
        arch=attrs["arch"],
        case=attrs["case"],
        offline=bool(fingerprint.get("offline")),
        fingerprint=fingerprint,
        default_config=default,
        tried=tried,
        lost=lost,
        finished=outcome is not None,
        config=config,
        us=us,
        default_us=default_us,
        cost=_cost(attrs["kernel"], attrs["problem"]),
        roof=roof_of(attrs["arch"], {**fingerprint, **attrs}),
    )


def _tried(study: optuna.Study) -> tuple[list[Tried], int]:
    """Each config once, as ``store.known`` has them, and the number of trials that were lost."""
    found: dict[str, Tried] = {}
    lost = 0
    for trial in study.get_trials(deepcopy=False):
        answer = store.answer_of(trial)
        if answer is None or "config" not in trial.user_attrs:
            continue
        if trial.state == optuna.trial.TrialState.FAIL:
            lost += 1
            continue
        config = trial.user_attrs["config"]
        if label_of(config) in found:
            continue
        found[label_of(config)] = Tried(
            place=len(found) + 1,
            config=config,
            origin=trial.user_attrs.get("origin", "sampler"),
            kind=answer.kind,
            message=answer.message,
            us=None if answer.ms is None or not answer.ms > 0 else answer.ms * 1e3,
            noise=answer.facts.get("noise"),
            stopped="stopped_at" in answer.facts,
            facts=answer.facts,
        )
    return list(found.values()), lost


def _cost(kernel: str, problem: Any) -> Cost | None:
    try:
        cost = get(kernel).cost(decode(problem))
    except (ValueError, KeyError):  # a kernel of the user's that was not imported, or changed since
        return None
    return cost if cost.bytes > 0 else None


def roof_of(arch: str, attrs: Mapping[str, Any]) -> Roof | None:
    """The roof that the study tells (``roof``), or the one that the bench measured on this arch."""
    if isinstance(attrs.get("roof"), Mapping):
        return _roof(attrs["roof"], "as the search's records tell")
    path = Path(__file__).parents[2] / "bench" / "results" / f"{arch}.json"  # in a checkout
    try:
        document = json.loads(path.read_text())
        devices = sorted({row["device"] for row in document["rows"]})
        return _roof(document["roof"], f"measured on {', '.join(devices)}")
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _roof(rates: Mapping[str, Any], source: str) -> Roof | None:
    try:
        found = Roof(1e9 * rates["copy_gbps"], 1e12 * rates["matmul_tflops"], source)
    except (KeyError, TypeError):
        return None
    return found if found.bytes_per_s > 0 and found.flops_per_s > 0 else None


# ---- keys and their values ---------------------------------------------------------------------


def values_of(searched: Searched) -> dict[str, list[Value]]:
    """Of each key the values that were tried, in order: numbers ascending, then names."""
    names: dict[str, None] = dict.fromkeys(searched.default_config)
    for t in searched.tried:
        names |= dict.fromkeys(t.config)
    return {
        name: sorted({shown(t.config, name) for t in searched.tried}, key=_order) for name in names
    }


def shown(config: Config, name: str) -> Value:
    """The value of a key as axes and tables show it."""
    value = config.get(name, ABSENT)
    return value if type(value) is int else str(value)


def _order(value: Value) -> tuple[int, int, str]:
    return (0, value, "") if isinstance(value, int) else (1, 0, value)


def varied(searched: Searched) -> dict[str, list[Value]]:
    """``values_of`` the keys that were tried with more than one value."""
    return {name: values for name, values in values_of(searched).items() if len(values) > 1}


# ---- what Optuna can draw ----------------------------------------------------------------------


def real_study(searched: Searched) -> optuna.Study:
    """The complete trials with the values that a config really has, microseconds as the objective.

    The stored study has places in lists of values instead, which no axis should show.
    """
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler())
    distributions = {n: _distribution(values) for n, values in values_of(searched).items()}
    for t in searched.tried:
        if t.complete:
            params = {n: _choice(d, shown(t.config, n)) for n, d in distributions.items()}
            study.add_trial(
                optuna.trial.create_trial(params=params, distributions=distributions, value=t.us)
            )
    return study


def _distribution(values: Sequence[Value]) -> BaseDistribution:
    numbers = [v for v in values if isinstance(v, int)]
    if len(numbers) < len(values):
        return CategoricalDistribution([str(v) for v in values])
    if len(numbers) > _MOST_CHOICES:
        wide = numbers[0] > 0 and numbers[-1] >= 16 * numbers[0]
        return IntDistribution(numbers[0], numbers[-1], log=wide)
    return CategoricalDistribution(numbers)  # an axis of choices names each tile size


def _choice(distribution: BaseDistribution, value: Value) -> Value:
    if isinstance(distribution, CategoricalDistribution) and value not in distribution.choices:
        return str(value)
    return value


def importance(searched: Searched) -> dict[str, float]:
    """Share of each varied key, largest first; nothing where too little was tried to tell.

    By Optuna's PED-ANOVA (Watanabe et al., IJCAI 2023, arXiv 2304.10255): how much the values of a
    key among the fastest tenth differ from those among all. It needs no scikit-learn.
    """
    names = list(varied(searched))
    count = sum(t.complete for t in searched.tried)
    if count < _LEAST_TRIALS or not names:
        return {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        study = real_study(searched)
        names = [n for n in names if not study.trials[0].distributions[n].single()]
        found = optuna.importance.get_param_importances(
            study, evaluator=optuna.importance.PedAnovaImportanceEvaluator(), params=names
        )
    if not all(math.isfinite(share) for share in found.values()) or not any(found.values()):
        return {}
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def median_gain(searches: Sequence[Searched]) -> float | None:
    """Median of the gains that are known."""
    gains = [s.gain for s in searches if s.gain is not None]
    return statistics.median(gains) if gains else None
