"""Tune one problem from start to end: the study, the workers, the final duel, the outcome."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import math
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import optuna

from autotune import choose, problems, search, store
from autotune.process import Worker, WorkerError, alone_on, beside_others_on
from autotune.records import Answer, Outcome, Task, decode, label_of
from autotune.search import Budget, Proposal, Search
from autotune.space import Space
from tkernels import device
from tkernels.device import Device
from tkernels.registry import Config, KernelSpec

_BLOCKS = 8  # of a timing that is not stopped early
_CHECKS = 3  # of the winner, after all that it ran
_CAP = 3.0  # times slower than the best: not timed further
_SETS_TO_MEASURE = 5  # of inputs too large for more copies; references and results among them
_SETS_TO_COMPILE = 2  # for a moment
_WAIT_S = 15  # after that it is said that others are waited for


@dataclasses.dataclass(frozen=True)
class Setup:
    """How a search is run."""

    dev: Device  # whose config is sought
    storage: optuna.storages.BaseStorage
    budget: Budget
    fingerprint: Mapping[str, Any]  # what two searches must share to be one study
    workers: Sequence[Worker]  # the first measures
    offline: bool = False
    sampler: str = "auto"
    seed: int = 0
    compile_limit: float = 300.0
    measuring: threading.Lock = dataclasses.field(default_factory=threading.Lock)


@dataclasses.dataclass(frozen=True)
class Plan:
    """One search to do: its problem, how far and how it is searched."""

    task: Task
    budget: Budget
    sampler: str = "auto"
    only: Mapping[str, Sequence[str]] = dataclasses.field(default_factory=dict)
    study: optuna.Study | None = None  # the one to go on with; None: it may be new


class DefaultFailedError(ValueError):
    """The default config of a problem cannot be measured, so there is nothing to compare with."""

    def __init__(self, searching: Search, why: str) -> None:
        attrs = searching.study.user_attrs
        super().__init__(
            f"autotune: the default config of {attrs['kernel']} {attrs['case']} must run to be "
            f"compared with, got: {why}"
        )


class Watch:
    """Told of what happens; ``autotune.progress`` shows it."""

    def begins(self, task: Task, searching: Search) -> None:
        """A problem is taken on."""

    def tried(self, proposal: Proposal, answer: Answer) -> None:
        """A config was tried."""

    def says(self, line: str) -> None:
        """Something to know, now."""

    def ends(self, outcome: Outcome) -> None:
        """A problem is done."""


def begin(spec: KernelSpec, task: Task, setup: Setup) -> optuna.Study:
    """The study of ``task``, made if it is new, with how it is searched: for ``--resume``."""
    study = store.open_study(
        setup.storage,
        task,
        setup.fingerprint,
        spec.default_config(task.problem, setup.dev),
        search.new_sampler(setup.seed),
        search.new_pruner(),
    )
    seconds = setup.budget.seconds
    terms: dict[str, Any] | None = {
        "trials": setup.budget.trials,
        "seconds": seconds if seconds < math.inf else None,  # JSON has no infinity
        "sampler": setup.sampler,
    }
    if stored_outcome(study, task, setup.budget) is not None:  # no more is asked for than is there
        terms = study.user_attrs["outcome"].get("terms")
    if study.user_attrs.get("terms") != terms:
        study.set_user_attr("terms", terms)
    return study


def is_unfinished(study: optuna.Study) -> bool:
    """Whether a search was begun, or asked for, and did not end."""
    outcome = study.user_attrs.get("outcome")
    return not outcome or outcome.get("terms") != study.user_attrs.get("terms")


def tune(
    spec: KernelSpec,
    task: Task,
    setup: Setup,
    priors: Sequence[tuple[Config, str]],
    space: Space,
    core: Space,
    why_illegal: Callable[[Config], str | None],
    watch: Watch,
) -> Outcome:
    """Search for the config of ``task``; what was found before, by anyone, counts.

    Raises KeyboardInterrupt on Ctrl-C, DefaultFailedError where not even the default runs. Both
    leave the study as far as it came.
    """
    default = spec.default_config(task.problem, setup.dev)
    study = begin(spec, task, setup)
    finished = stored_outcome(study, task, setup.budget)
    if finished is not None and set(finished.config) <= set(space):
        watch.ends(finished)
        return finished
    if study.user_attrs.get("outcome"):  # of a smaller budget: this one is not done
        study.set_user_attr("outcome", None)
    first = [(default, "default"), *priors]
    searching = Search(
        study,
        space,
        why_illegal,
        first,
        setup.budget,
        core=core,
        sampler=setup.sampler,
        seed=setup.seed,
    )
    watch.begins(task, searching)
    for worker in setup.workers:
        worker.open(task)
    setup = dataclasses.replace(setup, workers=_that_fit(spec, task, setup))
    _run(searching, setup, default, watch)
    outcome = stored_outcome(study, task, setup.budget)  # by another process that joined
    if outcome is None:
        outcome = _outcome(searching, task, setup, default)
        study.set_user_attr("outcome", _kept(outcome, searching, study))
    watch.ends(outcome)
    return outcome


def _kept(outcome: Outcome, searching: Search, study: optuna.Study) -> dict[str, Any]:
    fields = {f.name: getattr(outcome, f.name) for f in dataclasses.fields(Outcome)}
    del fields["task"]
    terms = study.user_attrs.get("terms")
    return {**fields, "exhausted": searching.exhausted, "terms": terms}


def stored_outcome(study: optuna.Study, task: Task, budget: Budget) -> Outcome | None:
    """The outcome of a search that ended with at least this budget, or tried all there is."""
    kept = study.user_attrs.get("outcome")
    if kept is None or (kept["trials"] < budget.trials and not kept["exhausted"]):
        return None
    fields = {f.name: kept[f.name] for f in dataclasses.fields(Outcome) if f.name != "task"}
    return Outcome(task=task, **{**fields, "wrong": tuple(fields["wrong"])})


# ---- trials ------------------------------------------------------------------------------------


def _that_fit(spec: KernelSpec, task: Task, setup: Setup) -> Sequence[Worker]:
    """The workers to use: each that compiles makes its inputs, beside those of the first."""
    if setup.offline or len(setup.workers) == 1:
        return setup.workers
    left = problems.sets_that_fit(spec, task.problem) - _SETS_TO_MEASURE
    return setup.workers[: 1 + max(0, left) // _SETS_TO_COMPILE]


def _run(searching: Search, setup: Setup, default: Config, watch: Watch) -> None:
    """Try configs until the search is over, one thread a worker.

    Of several workers the first measures what the others have compiled, unless none measures.
    """
    errors: list[BaseException] = []

    def work(worker: Worker) -> None:
        while not errors and (proposal := _next_or_none(searching, watch)) is not None:
            with store.alive(searching.study, proposal.trial):
                answer = try_config(worker, proposal, searching, setup)
            if errors and not answer.ok:
                return  # it was let go
            searching.tell(proposal, answer)
            watch.tried(proposal, answer)
            if proposal.config == default and not answer.ok:
                raise DefaultFailedError(searching, f"{answer.kind}: {answer.message}")

    def prepare(worker: Worker) -> None:
        with setup.measuring, contextlib.suppress(WorkerError):  # told when a config needs it
            _lay_out(worker)

    def run(part: Callable[[Worker], None], worker: Worker) -> None:
        try:
            part(worker)
        except BaseException as error:
            errors.append(error)
            searching.stop()

    try:
        if len(setup.workers) == 1:
            run(work, setup.workers[0])
        else:
            parts = [work if setup.offline else prepare, *[work] * (len(setup.workers) - 1)]
            threads = [
                threading.Thread(target=run, args=args, daemon=True)
                for args in zip(parts, setup.workers, strict=True)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                while thread.is_alive():
                    thread.join(0.2)  # a plain join would not see Ctrl-C
        if errors:
            raise errors[0]
    except BaseException as error:
        errors.append(error)
        searching.let_go()
        raise


def _next_or_none(searching: Search, watch: Watch) -> Proposal | None:
    """The next proposal; waits where only what others are at is missing, for they may die of it."""
    since = time.monotonic()
    while (proposal := searching.next()) is None:
        at_work = len(store.in_work(searching.study))
        if searching.out_of_time or not at_work:
            return None
        if time.monotonic() - since > _WAIT_S:
            since = time.monotonic()
            watch.says(f"waiting for {at_work} configs that others are at")
        time.sleep(0.2)
        store.reap(searching.study)
    return proposal


def try_config(worker: Worker, proposal: Proposal, searching: Search, setup: Setup) -> Answer:
    """Compile, check and time one config, or ask the model about it.

    A ``worker`` other than the one that measures compiles ahead: into the compiler's cache.
    """
    config = proposal.config
    try:
        if setup.offline:
            got = worker.ask("estimate", config=config, limit=setup.compile_limit)
            return Answer("ok", ms=got["ms"], facts=got["facts"])
        measurer = setup.workers[0]
        if worker is not measurer:
            _compile_ahead(worker, config, setup)
        with setup.measuring:
            _lay_out(measurer)
            compiled = measurer.ask("compile", config=config, limit=setup.compile_limit)
            with alone_on(device.identity()):
                measurer.ask("check", config=config)
                return _time(measurer, proposal, searching, compiled["facts"])
    except WorkerError as failed:
        return Answer(failed.kind, failed.message)
    except optuna.exceptions.UpdateFinishedTrialError:  # another host took this one for lost
        return Answer("crashed", "its trial was failed by another tuner")


def _compile_ahead(worker: Worker, config: Config, setup: Setup) -> None:
    """Raises ``WorkerError`` where ``config`` does not compile.

    What may be no fault of the config is left to the one that measures to find, or not.
    """
    try:
        _lay_out(worker, "make_inputs")
    except WorkerError:
        return
    try:
        worker.ask("compile", config=config, limit=setup.compile_limit)
    except WorkerError as failed:
        if failed.kind != "out of memory":
            raise


def _lay_out(worker: Worker, what: str = "lay_out") -> None:
    """Have ``worker`` ready for requests about configs; only what may disturb a timing waits."""
    worker.start()
    if not worker.laid_out:
        with beside_others_on(device.identity()):
            worker.lay_out(what)


def _time(
    worker: Worker, proposal: Proposal, searching: Search, facts: Mapping[str, Any]
) -> Answer:
    begun = worker.ask("begin", config=proposal.config)
    known = {**facts, "method": begun["method"]}
    best = searching.best()
    if best is not None and begun["ms"] > _CAP * best[1]:
        share = begun["ms"] / best[1]
        return Answer("slow", f"{share:.1f} times the best", begun["ms"], (), known)
    blocks: list[float] = []
    for step in range(_BLOCKS):
        blocks.append(worker.ask("block")["ms"])
        proposal.trial.report(blocks[-1], step)
        if searching.out_of_time:
            break
        if step + 1 < _BLOCKS and proposal.trial.should_prune():
            known["stopped_at"] = step + 1
            break
    known["noise"] = round(choose.noise(blocks), 4)
    return Answer("ok", "", statistics.median(blocks), tuple(blocks), known)


# ---- the end -----------------------------------------------------------------------------------


def _outcome(searching: Search, task: Task, setup: Setup, default: Config) -> Outcome:
    table = searching.known()
    if label_of(default) not in table:
        raise DefaultFailedError(searching, f"a --timeout of {setup.budget.seconds:g} s before it")
    allowed = {label: entry for label, entry in table.items() if searching.allowed(entry[0])}
    configs = choose.leaders(allowed, default)
    default_answer = table[label_of(default)][1]
    measured: dict[str, Any] | None = None
    estimate: dict[str, Any] | None = None
    failed: list[str] = []
    if setup.offline:
        # Leaders have an estimate, and a default without one has ended the search.
        times = [float(table[label_of(config)][1].ms or math.inf) for config in configs]
        place = choose.by_estimates(configs, times)
        ms, default_ms = times[place], times[0]
        facts = table[label_of(configs[place])][1].facts
        estimate = {**_now(), **facts}
        programs = {answer.facts["ir"] for _, answer in table.values() if "ir" in answer.facts}
        if programs:
            estimate["distinct"] = len(programs)  # final programs of all configs that were tried
    else:
        configs, samples = _duel(configs, searching, setup)
        place, failed = _choose(configs, samples, searching, setup)
        ms, default_ms = statistics.median(samples[place]), statistics.median(samples[0])
        measured = {
            **_now(),
            "method": default_answer.facts.get("method", ""),
            "noise": round(choose.noise(samples[place]), 4),
        }
        with contextlib.suppress(WorkerError):
            measured |= setup.workers[0].ask("health")["facts"]
    wrong = tuple(
        f"{config}: {answer.message}" for config, answer in table.values() if answer.kind == "wrong"
    )
    return Outcome(
        task=task,
        config=configs[place],
        ms=ms,
        default_config=default,
        default_ms=default_ms,
        trials=len(table),
        failures=search.failures_of(table),
        wrong=(*wrong, *failed),
        measured=measured,
        estimate=estimate,
    )


def _choose(
    configs: list[Config], samples: list[list[float]], searching: Search, setup: Setup
) -> tuple[int, list[str]]:
    """Place of the config to keep, and what turned out wrong when the winner was checked again.

    A config that is right by chance, or most of the time, has run hundreds of times by now.
    """
    worker = setup.workers[0]
    failed: list[str] = []
    left = list(range(len(configs)))
    while True:
        winner = left[choose.by_samples([configs[i] for i in left], [samples[i] for i in left])]
        try:
            _lay_out(worker)
            with alone_on(device.identity()):
                for _ in range(_CHECKS):
                    worker.ask("check", config=configs[winner])
            return winner, failed
        except WorkerError as error:
            failed.append(f"{configs[winner]}: {error.message}")
            if winner == 0:
                raise DefaultFailedError(searching, f"{error.kind}: {error.message}") from None
            left.remove(winner)


def _duel(
    configs: list[Config], searching: Search, setup: Setup
) -> tuple[list[Config], list[list[float]]]:
    """Times of the leaders and the default taken in turns; who fails now is left out."""
    worker = setup.workers[0]
    while True:
        try:
            _lay_out(worker)
            with alone_on(device.identity()):
                got = worker.ask(
                    "duel", configs=configs, rounds=choose.ROUNDS, limit=setup.compile_limit
                )
            return configs, got["samples"]
        except WorkerError as failed:
            if len(configs) == 1:
                raise DefaultFailedError(searching, f"{failed.kind}: {failed.message}") from None
            configs = configs[:-1]  # the slowest leader first; together they may need too much


def _now() -> dict[str, str]:
    return {"date": datetime.datetime.now(datetime.timezone.utc).date().isoformat()}


def task_of(study: optuna.Study) -> Task:
    """The problem that a stored study is about."""
    attrs = study.user_attrs
    return Task(
        attrs["kernel"], attrs["case"], decode(attrs["problem"]), attrs["key"], attrs["arch"]
    )
