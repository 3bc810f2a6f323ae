"""Which config to try next, and what is known when the budget is spent.

In turn: the configs that are good by experience (the default, what is stored, what neighbouring
problems use); every legal point, where the budget covers them all; else some random legal points,
Optuna's multivariate TPE, and a descent from the best that tries one step in each key. A config is
tried once, whoever asks for it again gets the answer that is known.
"""

from __future__ import annotations

import dataclasses
import math
import random
import threading
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import optuna
from optuna.trial import TrialState

from autotune import store
from autotune.records import Answer, label_of
from autotune.space import (
    MOST_POINTS_READ,
    Parameters,
    Space,
    WhyIllegal,
    config_of,
    legal_points,
    neighbours,
    plainness,
    size,
)
from tkernels.registry import Config

EXHAUSTIVE_LIMIT = 500  # legal points; more than that is left to the sampler
_PATIENCE = 25  # points of the sampler that are illegal or known, until a random one is taken
_RANDOM_TRIES = 20_000

optuna.logging.set_verbosity(optuna.logging.ERROR)


@dataclasses.dataclass(frozen=True)
class Budget:
    """When a search ends: after ``trials`` configs or ``seconds``, whatever comes first."""

    trials: int
    seconds: float = math.inf


@dataclasses.dataclass(frozen=True)
class Proposal:
    """A config to try, and the trial that will keep what comes of it."""

    trial: optuna.Trial
    config: Config
    origin: str  # "default", "stored", "neighbour", "exhaustive", "random", "sampler", "descent"


class Search:
    """One study being worked on by this process; threads share it, other processes may join."""

    def __init__(
        self,
        study: optuna.Study,
        space: Space,
        why_illegal: WhyIllegal,
        priors: Sequence[tuple[Config, str]],
        budget: Budget,
        *,
        core: Space | None = None,
        sampler: str = "auto",
        seed: int = 0,
    ) -> None:
        """``core``: the part of ``space`` that is tried exhaustively, or that the sampler draws
        from; only descents leave it (default: all of it)."""
        self.study = study
        self.space = space
        self.why_illegal = why_illegal
        self.budget = budget
        self.rejected: Counter[str] = Counter()  # reasons of illegal points, as the formula gives
        self._priors = list(priors)
        self._default = self._priors[0][0] if self._priors else {}
        self._again = self._default_again(study)
        self._core = core or space
        self._parameters = Parameters(self._core, why_illegal)
        self._random = random.Random(seed)
        self._sampler = sampler
        self._lock = threading.RLock()
        self._began = time.monotonic()
        self._stopped = False
        self.exhausted = False  # every legal point that the search would try has been tried
        self._all = self._points_to_exhaust(sampler)

    @staticmethod
    def _default_again(study: optuna.Study) -> set[str]:
        """Label of the default, where it failed before: without it there is no comparison."""
        label = label_of(study.user_attrs.get("default_config", {}))
        before = store.known(study).get(label)
        return {label} if before is not None and not before[1].ok else set()

    def _points_to_exhaust(self, sampler: str) -> list[Config] | None:
        if sampler not in ("auto", "exhaustive"):
            return None
        limit = min(EXHAUSTIVE_LIMIT, self.budget.trials) if sampler == "auto" else MOST_POINTS_READ
        found = legal_points(self._core, self.why_illegal, limit=limit)
        if found is None and sampler == "exhaustive":
            raise ValueError(
                "autotune: --sampler exhaustive needs a space of at most "
                f"{MOST_POINTS_READ} points, got {size(self._core)}"
            )
        return found

    # ---- what is known ----

    def known(self) -> dict[str, tuple[Config, Answer]]:
        """Everything that was tried, by label of the config; also by other processes."""
        table = store.known(self.study)
        for label in self._again:
            table.pop(label, None)
        return table

    def allowed(self, config: Config) -> bool:
        """Whether ``config`` may be kept: what was tried before may have left the space since."""
        return set(config) <= set(self.space) and self.why_illegal(config) is None

    def best(self) -> tuple[Config, float] | None:
        """The fastest config that was timed to the end; of equal ones the simplest."""
        timed = [
            (answer.ms or math.inf, plainness(config, self._default), config)
            for config, answer in self.known().values()
            if answer.timed and self.allowed(config)
        ]
        if not timed:
            return None
        ms, _, config = min(timed, key=lambda entry: entry[:2])
        return config, ms

    def stop(self) -> None:
        """No more proposals; what is being tried may end."""
        self._stopped = True

    # ---- what to try ----

    def let_go(self) -> None:
        """End the search, and this process's trials with it: nobody must wait for them."""
        self.stop()
        with self._lock:  # nobody is about to begin one
            store.let_go(self.study)

    def next(self) -> Proposal | None:
        """The next config to try, or None when the search is over."""
        with self._lock:
            misses = 0
            while not self._is_over():
                proposed = self._propose(misses)
                if proposed is _EXHAUSTED:
                    self.exhausted = self._all is not None and not store.in_work(self.study)
                    return None
                trial, config, origin = self._ask(proposed)
                why = self._why_not(trial, config)
                if why is None:
                    self._again.discard(label_of(config))
                    trial.set_user_attr("origin", origin)
                    return Proposal(trial, config, origin)
                misses += 1
            return None

    def tell(self, proposal: Proposal, answer: Answer) -> None:
        """Keep what came of a proposal. A time that is none (NaN, zero...) is a failure."""
        trial = proposal.trial
        if answer.ok and not (answer.ms is not None and 0 < answer.ms < math.inf):
            answer = Answer("does not run", f"its time is {answer.ms}", facts=answer.facts)
        try:
            for name in ("kind", "message", "ms"):
                if getattr(answer, name) not in (None, ""):
                    trial.set_user_attr(name, getattr(answer, name))
            if answer.facts:
                trial.set_user_attr("facts", dict(answer.facts))
            if answer.timed:
                self.study.tell(trial, answer.ms)
            else:  # samplers learn from a pruned trial that here is nothing; of a failed one not
                self.study.tell(trial, state=TrialState.PRUNED)
        except (ValueError, optuna.exceptions.UpdateFinishedTrialError):
            pass  # another host took this one for dead, and failed its trial

    @property
    def out_of_time(self) -> bool:
        """Whether the search ended for another reason than its number of trials."""
        return self._stopped or time.monotonic() - self._began > self.budget.seconds

    @property
    def planned(self) -> int:
        """Configs that will be tried at most, as far as is known; a descent may add a few."""
        if self._all is None:
            return self.budget.trials
        return min(self.budget.trials, max(len(self._all), len(self._taken())))

    def _is_over(self) -> bool:
        if self.out_of_time:
            return True
        return len(self._taken()) >= self.budget.trials

    def _propose(self, misses: int) -> Any:
        """(config, origin) to try; None to let the sampler choose; _EXHAUSTED at the end."""
        taken = self._taken()
        while self._priors:
            config, origin = self._priors.pop(0)
            if label_of(config) not in taken:
                return config, origin
        if self._all is not None:
            for config in self._all:
                if label_of(config) not in taken:
                    return config, "exhaustive"
            return self._descent(taken) or _EXHAUSTED
        if self._sampler == "random" or misses >= _PATIENCE or len(taken) < self._startup():
            return self._random_point(taken)
        return self._by_turns(taken)

    def _taken(self) -> set[str]:
        """Labels of what was tried or is being tried.

        In this order: what ends between the two reads is in the second, and is not tried again.
        """
        at_work = store.in_work(self.study)
        return at_work | set(self.known())

    def _startup(self) -> int:
        """How many are tried before the sampler has enough to learn from."""
        return min(12, max(4, self.budget.trials // 5))

    def _by_turns(self, taken: set[str]) -> Any:
        """A descent from the best, in turn with the sampler; after the middle, descents first.

        The default is the work of people and lies near the best as a rule; elsewhere only the
        sampler looks.
        """
        late = len(taken) >= self.budget.trials // 2
        if late or len(taken) % 2:
            return self._descent(taken)
        return None

    def _descent(self, taken: set[str]) -> tuple[Config, str] | None:
        """A config one step from the best that nobody has tried; None at a local optimum."""
        best = self.best()
        if best is None:
            return None
        for config in neighbours(best[0], self.space):
            if label_of(config) not in taken and self.why_illegal(config) is None:
                return config, "descent"
        return None

    def _random_point(self, taken: set[str]) -> Any:
        names = list(self._core)
        for _ in range(_RANDOM_TRIES):
            values = {name: self._random.choice(self._core[name]) for name in names}
            config = config_of(values)
            if label_of(config) not in taken and self.why_illegal(config) is None:
                return config, "random"
        return _EXHAUSTED

    def _ask(self, proposed: tuple[Config, str] | None) -> tuple[optuna.Trial, Config, str]:
        if proposed is not None:
            config, origin = proposed
            numbers = self._parameters.numbers(config)
            self.study.enqueue_trial(
                numbers or {},
                user_attrs={"config": config, "origin": origin, "owner": store.owner()},
            )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # heartbeats outside of optimize(): autotune.store
            trial = self.study.ask()
            trial.set_user_attr("owner", store.owner())
            if "config" not in trial.user_attrs:
                config = self._parameters.suggest(trial)
                trial.set_user_attr("config", config)  # now: who asks next must see it
                return trial, config, "sampler"
            config = trial.user_attrs["config"]
            if self._parameters.numbers(config) is not None:
                self._parameters.suggest(trial)  # so that the sampler learns from it
            return trial, config, trial.user_attrs["origin"]

    def _why_not(self, trial: optuna.Trial, config: Config) -> str | None:
        """Why this config is not tried: illegal, known, or being tried; the trial is ended then."""
        label = label_of(config)
        reason = self.why_illegal(config)
        if reason is not None:
            self.rejected[reason] += 1
            trial.set_user_attr("illegal", reason)
            self.study.tell(trial, state=TrialState.PRUNED)
            return reason
        at_work = store.in_work(self.study, but=trial.number)
        known = self.known().get(label)  # read after that: as in _taken
        if known is not None and known[1].timed:
            self.study.tell(trial, known[1].ms)
            return "known"
        if known is not None or label in at_work:
            self.study.tell(trial, state=TrialState.PRUNED)
            return "known" if known is not None else "in work"
        return None


_EXHAUSTED: Any = object()


def new_sampler(seed: int) -> optuna.samplers.BaseSampler:
    """TPE that takes keys together, those of each variant apart."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        return optuna.samplers.TPESampler(
            seed=seed, multivariate=True, group=True, constant_liar=True, n_startup_trials=4
        )


def new_pruner() -> optuna.pruners.BasePruner:
    """Stops a timing once its blocks are slower than those of the best beyond doubt."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        return optuna.pruners.WilcoxonPruner(p_threshold=0.1, n_startup_steps=4)


# ---- replays -----------------------------------------------------------------------------------


def replay(
    space: Space,
    table: Sequence[tuple[Config, float | None]],
    default: Config,
    *,
    trials: int,
    seed: int,
    priors: Sequence[Config] = (),
    sampler: str = "tpe",
) -> Iterator[float]:
    """The best time so far after each trial, when ``table`` answers instead of a device.

    What the table lacks is illegal; a time of None is a failure. For measuring how many trials a
    search needs (``python -m bench.search_cost``).
    """
    times = {label_of(config): ms for config, ms in table}

    def why_illegal(config: Config) -> str | None:
        return None if label_of(config) in times else "not in the table"

    study = optuna.create_study(sampler=new_sampler(seed))
    first = [(default, "default"), *((config, "neighbour") for config in priors)]
    search = Search(study, space, why_illegal, first, Budget(trials), sampler=sampler, seed=seed)
    best = math.inf
    while (proposal := search.next()) is not None:
        ms = times[label_of(proposal.config)]
        answer = Answer("does not run") if ms is None else Answer("ok", ms=ms)
        search.tell(proposal, answer)
        best = min(best, answer.ms if answer.ms is not None else math.inf)
        yield best


def failures_of(table: Mapping[str, tuple[Config, Answer]]) -> dict[str, int]:
    """How many configs failed, by kind."""
    return dict(Counter(a.kind for _, a in table.values() if not a.ok))
