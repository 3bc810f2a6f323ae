"""Searches that are stored: which were interrupted and go on here, which have ended."""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import optuna

from autotune import export, fingerprint, store, tune
from autotune.options import restrictions
from autotune.records import Outcome, Task, label_of
from autotune.search import Budget
from autotune.space import restricted
from autotune.target import Target, target_for, trials_of
from autotune.tune import Plan
from tkernels import device
from tkernels.registry import KernelSpec

Says = Callable[[str], None]
_NAMED = 3  # searches by name in one sentence; the others are counted


# ---- interrupted ---------------------------------------------------------------------------------


def groups(
    options: argparse.Namespace,
    specs: Sequence[KernelSpec],
    studies: Sequence[optuna.Study],
    says: Says,
) -> list[tuple[Target, list[Plan]]]:
    """What was interrupted and can go on here, by what it is tuned for; says what cannot, and why.

    Each goes on as it was begun (trials, sampler, timeout, ``--only``), unless an option says
    otherwise.
    """
    if options.arch is not None and options.arch != "interpret":
        device.offline_facts(options.arch)  # raises for an architecture that there is not
    left = [s for s in studies if tune.is_unfinished(s) and _is_asked(s, options)]
    by_name = {spec.name: spec for spec in specs}
    out = _LeftOut()
    chosen = []
    for study in left:
        why = _why_apart(study, by_name, studies)
        if why is None:
            chosen.append(study)
        elif why:
            out.add(study, why)
    found: list[tuple[Target, list[Plan]]] = []
    for arch, offline in dict.fromkeys(map(_kind, chosen)):
        group = [study for study in chosen if _kind(study) == (arch, offline)]
        try:
            target = target_for(arch, offline, options.python)
            if arch == "interpret" and options.export is not None and not options.force:
                raise ValueError("times of the interpreter are not exported without --force")
        except (ValueError, device.UnsupportedError) as error:
            for study in group:
                out.add(study, str(error))
            continue
        plans = []
        for study in group:
            plan = plan_of(study, options, target)
            try:
                restricted(by_name[plan.task.kernel].space(target.dev), plan.only)
                plans.append(plan)
            except ValueError as error:  # its kernel has other values by now
                out.add(study, str(error))
        if plans:
            found.append((target, plans))
    if not left:
        which = f" for {options.arch}" if options.arch else ""
        asked = options.kernel or options.case or options.only or options.offline
        which += " of those asked for" if asked else ""
        says(f"autotune: no search{which} was interrupted, in {store.place(options.storage)}")
    unkept = [p for _, plans in found for p in plans if p.study and not _terms(p.study)]
    if unkept and not options.trials:
        trials = " or ".join(str(n) for n in sorted({plan.budget.trials for plan in unkept}))
        says(
            f"autotune: {_count(len(unkept))} begun by a version that did not keep --trials, and "
            f"will try {trials} configs (--trials N for another number): {_names(unkept)}"
        )
    out.tell(says, "not gone on with")
    return found


def plan_of(study: optuna.Study, options: argparse.Namespace, target: Target) -> Plan:
    """How ``study`` goes on: by what the options say, else by what it was begun with."""
    terms = _terms(study)
    begun = terms.get("sampler", "auto")
    sampler = options.sampler or begun
    trials = options.trials
    # An exhaustive search has no number of its own that another sampler could have.
    if trials is None and (sampler == "exhaustive") == (begun == "exhaustive"):
        trials = terms.get("trials")
    seconds = terms.get("seconds") if options.timeout is None else options.timeout
    budget = Budget(trials or trials_of(sampler, target), seconds or math.inf)
    return Plan(tune.task_of(study), budget, sampler, _only(study), study)


def why_other(study: optuna.Study, now: Mapping[str, Any]) -> str | None:
    """Why times of ``study`` and of now cannot be compared: what differs; None where they can."""
    then = study.user_attrs["fingerprint"]
    changed = [n for n in {**then, **now} if then.get(n) != now.get(n)]
    words = [
        f"{name} {then.get(name, 'none')} then, {now.get(name, 'none')} now" for name in changed
    ]
    return ", ".join(words) or None


def _terms(study: optuna.Study) -> Mapping[str, Any]:
    found: Mapping[str, Any] = study.user_attrs.get("terms") or {}
    return found


def _only(study: optuna.Study) -> dict[str, list[str]]:
    return dict(study.user_attrs["fingerprint"].get("only", {}))


def _kind(study: optuna.Study) -> tuple[str, bool]:
    attrs = study.user_attrs
    return attrs["arch"], bool(attrs["fingerprint"].get("offline"))


def _is_asked(study: optuna.Study, options: argparse.Namespace) -> bool:
    """Whether the options leave ``study`` in: by kernel, case, architecture, --offline, --only."""
    arch, offline = _kind(study)
    names = None if options.kernel in (None, "all") else options.kernel.split(",")
    only = {name: sorted(words) for name, words in restrictions(options).items()}
    return (
        (names is None or study.user_attrs["kernel"] in [name.strip() for name in names])
        and options.case in study.user_attrs["case"]
        and options.arch in (None, arch)
        and (offline or not options.offline)
        and (not only or only == _only(study))
    )


def _why_apart(
    study: optuna.Study,
    by_name: Mapping[str, KernelSpec],
    studies: Sequence[optuna.Study],
) -> str | None:
    """Why nothing may be added to ``study``; "" where that need not be said: a later one is."""
    kernel = study.user_attrs["kernel"]
    if kernel not in by_name:
        return f"no kernel {kernel} is registered (--import names its module)"
    source = fingerprint.kernel_hash(by_name[kernel])
    key = _key_now(study, by_name[kernel])
    same_source = study.user_attrs["fingerprint"].get("kernel_hash") == source
    if same_source and key == study.user_attrs["key"]:
        return None
    wanted = _problem(study, key)
    for other in studies:
        attrs = other.user_attrs
        same = attrs["fingerprint"].get("kernel_hash") == source
        if same and _problem(other, attrs["key"]) == wanted:
            return ""
    what = "its tuning key has" if same_source else "the kernel has"
    return f"{what} changed since; --kernel begins anew"


def _key_now(study: optuna.Study, spec: KernelSpec) -> Mapping[str, Any]:
    """The key that a launch would look up for the problem of ``study``."""
    try:
        return spec.tuning_key(tune.task_of(study).problem)
    except (KeyError, TypeError):  # the kernel's problems had other fields
        return {}


def _problem(study: optuna.Study, key: Mapping[str, Any]) -> tuple[Any, ...]:
    return (study.user_attrs["kernel"], *_kind(study), label_of(key), label_of(_only(study)))


# ---- ended ---------------------------------------------------------------------------------------


def ended(
    options: argparse.Namespace,
    specs: Sequence[KernelSpec],
    studies: Sequence[optuna.Study],
    says: Says,
) -> list[Outcome]:
    """The outcome to export of each problem and chip that was searched; says what is left out."""
    by_name = {spec.name: spec for spec in specs}
    out = _LeftOut()
    best: dict[str, tuple[export.Entry, Outcome]] = {}
    for study in studies:
        outcome = tune.stored_outcome(study, tune.task_of(study), Budget(0))
        if outcome is None or not _is_asked(study, options):
            continue
        why = _why_apart(study, by_name, studies)
        if why is None and outcome.task.arch == "interpret" and not options.force:
            why = "times of the interpreter mean nothing (--force writes them all the same)"
        if why is not None:
            if why:
                out.add(study, why)
            continue
        outcome = with_facts(outcome, study.user_attrs["fingerprint"])
        entry = export.entry_of(outcome)
        place = f"{outcome.task.kernel}/{outcome.task.arch}/{export.identity(entry)}"
        if place not in best or export.better(best[place][0], entry) is entry:
            best[place] = entry, outcome
    out.tell(says, "not exported")
    return [outcome for _, outcome in best.values()]


def with_facts(outcome: Outcome, facts: Mapping[str, Any]) -> Outcome:
    """``outcome`` with what it was measured with, or estimated by, for its record."""
    if outcome.measured is not None:
        return dataclasses.replace(outcome, measured={**facts, **outcome.measured})
    return dataclasses.replace(outcome, estimate={**facts, **(outcome.estimate or {})})


# ---- sentences -----------------------------------------------------------------------------------


class _LeftOut:
    """Searches that nothing is done with, by the reason."""

    def __init__(self) -> None:
        self._by_why: dict[str, list[optuna.Study]] = {}

    def add(self, study: optuna.Study, why: str) -> None:
        self._by_why.setdefault(why, []).append(study)

    def tell(self, says: Says, what: str) -> None:
        """A sentence a reason."""
        for why, studies in self._by_why.items():
            says(left_out([tune.task_of(study) for study in studies], why, what))


def left_out(tasks: Sequence[Task], why: str, what: str = "not gone on with") -> str:
    """The sentence that names searches that nothing is done with."""
    return (
        f"autotune: {_count(len(tasks))} {what} ({_named(tasks)}): {why.removeprefix('autotune: ')}"
    )


def _count(number: int) -> str:
    return "1 search was" if number == 1 else f"{number} searches were"


def _names(plans: Sequence[Plan]) -> str:
    return _named([plan.task for plan in plans])


def _named(tasks: Sequence[Task]) -> str:
    names = [f"{task.kernel} {task.case} for {task.arch}" for task in tasks]
    more = [f"{len(names) - _NAMED} more"] if len(names) > _NAMED else []
    return ", ".join([*names[:_NAMED], *more])
