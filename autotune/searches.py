"""Do the searches that a command asks for, one after the other, and tell what came of them."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from autotune import export, fingerprint, priors, progress, resume, store, tune
from autotune.process import Worker, WorkerError
from autotune.records import Task
from autotune.space import has_all, restricted
from autotune.target import Target
from autotune.tune import Plan
from tkernels import config, device
from tkernels.registry import Config, KernelSpec


def tune_all(
    options: argparse.Namespace,
    specs: list[KernelSpec],
    groups: list[tuple[Target, list[Plan]]],
    storage: Any,
) -> int:
    """Do every search; returns how many configs were wrong, or problems failed."""
    count = sum(len(plans) for _, plans in groups)
    if options.table is not None and count != 1 and not (options.missing and count == 0):
        raise ValueError(
            f"autotune: --table needs one problem, which --kernel and --case choose, got {count}"
        )
    done = _Done()
    for target, plans in groups:
        if options.resume:
            how = "offline" if target.offline else "on this device"
            number = "1 search" if len(plans) == 1 else f"{len(plans)} searches"
            says(f"autotune: going on with {number} for {target.arch}, {how}")
            if target.arch == "interpret":
                says("autotune: times of the interpreter mean nothing")
        if plans:
            with _workers(options, target) as workers:
                _tune_group(options, specs, target, plans, storage, workers, done)
    if done.kept and options.export is None:
        interpreted = all(target.arch == "interpret" for target, _ in groups)
        says(
            "autotune: no tuned files were written; the results are kept in "
            f"{store.place(options.storage)}; this writes them below tuned/: "
            f"{_export_command(options, interpreted)}"
        )
    elif done.kept:
        says(f"autotune: {export.how_to_use(options.export)}")
    if done.failed:
        says(f"autotune: {done.failed} of {count} problems could not be tuned")
    return done.wrong + done.failed


@dataclasses.dataclass
class _Done:
    """What came of a command's searches."""

    kept: int = 0  # results in the storage
    wrong: int = 0  # configs
    failed: int = 0  # problems without a result


def _tune_group(
    options: argparse.Namespace,
    specs: list[KernelSpec],
    target: Target,
    plans: list[Plan],
    storage: Any,
    workers: list[Any],
    done: _Done,
) -> None:
    """Do the searches for one target, one after the other."""
    by_name = {spec.name: spec for spec in specs}
    folders = [*([options.export] if options.export else []), *config.config_folders()]
    try:
        facts = _facts(target, workers[0])
    except WorkerError as error:
        if not options.resume:
            raise
        says(resume.left_out([p.task for p in plans], f"no compiler answers: {error}"))
        done.failed += len(plans)
        return
    ready = []
    for plan in plans:
        own = _fingerprint(by_name[plan.task.kernel], facts, plan.only)
        why = resume.why_other(plan.study, own) if plan.study is not None else None
        if why is not None:
            says(resume.left_out([plan.task], f"{why}; --kernel begins anew"))
            continue
        setup = tune.Setup(
            dev=target.dev,
            storage=storage,
            budget=plan.budget,
            fingerprint=own,
            workers=workers,
            offline=target.offline,
            sampler=plan.sampler,
            seed=options.seed,
            compile_limit=options.compile_timeout,
        )
        tune.begin(by_name[plan.task.kernel], plan.task, setup)  # all now: --resume knows of all
        ready.append((plan, setup))
    if target.offline:
        _say_measured([plan.task for plan, _ in ready], folders)
    with progress.Progress(total=len(ready), offline=target.offline) as watch:
        for plan, setup in ready:
            task, spec = plan.task, by_name[plan.task.kernel]
            core = restricted(spec.space(target.dev), plan.only)
            space = restricted(config.full_space(spec, target.dev), plan.only)
            why_illegal = _legality(spec, task, target.dev, space if plan.only else None)
            first = priors.priors(task, why_illegal, folders, store.all_studies(storage))
            try:
                outcome = tune.tune(spec, task, setup, first, space, core, why_illegal, watch)
            except tune.DefaultFailedError as error:
                watch.says(str(error))
                done.failed += 1
                continue
            if options.table is not None:
                found = store.open_study(storage, task, setup.fingerprint, {})
                options.table.write_text(json.dumps(_table(found), indent=1) + "\n")
            outcome = resume.with_facts(outcome, setup.fingerprint)
            done.kept += 1
            done.wrong += len(outcome.wrong)
            if options.json:
                print(json.dumps(_row(outcome)), flush=True)
            else:
                progress.print_outcome(outcome, offline=target.offline)
            if options.export is not None:  # one by one, so that a crash loses one at most
                watch.says(f"wrote {export.write(options.export, outcome)}")


def _say_measured(tasks: Sequence[Task], folders: Sequence[Path]) -> None:
    """Say of which problems a search for estimates is of little use."""
    places = [priors.measured_in(task, folders) for task in tasks]
    known = [str(path.parent) for path in places if path is not None]
    if known:
        says(
            f"autotune: {len(known)} of {len(tasks)} problems have been measured "
            f"({', '.join(dict.fromkeys(known))}), which a model's estimate cannot better; "
            "--missing leaves them out of bench cases"
        )


def _export_command(options: argparse.Namespace, interpreted: bool) -> str:
    """The command that writes what is kept in the storage."""
    words = ["python", "-m", "autotune", "--export", "tuned"]
    if options.storage is not None:
        words += ["--storage", store.place(options.storage)]
    words += [word for module in options.modules for word in ("--import", module)]
    words += ["--force"] if interpreted else []
    return shlex.join(words)


def _legality(
    spec: KernelSpec, task: Any, dev: device.Device, part: Mapping[str, list[Any]] | None
) -> Callable[[Config], str | None]:
    """Why a config is not tried: the kernel's reasons, or that it is not in the asked part."""
    default = spec.default_config(task.problem, dev)

    def why_illegal(candidate: Config) -> str | None:
        if part is not None and candidate != default and not has_all(part, candidate):
            return "not what --only allows"
        return spec.why_illegal(candidate, task.problem, dev)

    return why_illegal


@contextlib.contextmanager
def _workers(options: argparse.Namespace, target: Target) -> Iterator[list[Any]]:
    jobs = options.jobs or _default_jobs(target)
    workers = [
        Worker(
            python=target.python,
            arch=target.arch if target.offline else "",
            modules=options.modules,
            limit=options.trial_timeout,
        )
        for _ in range(jobs)
    ]
    try:
        yield workers
    finally:
        for worker in workers:
            worker.close()


def _default_jobs(target: Target) -> int:
    """What is waited for is the compilers, until there are about 16: measuring is that much faster.

    A process takes half a GiB of its device for itself: all of them a quarter of the memory.
    """
    if target.arch == "interpret":
        return 1  # nothing is compiled
    if target.offline:
        return min(4, device.host_cores())
    return max(1, min(16, device.host_cores(), device.memory_bytes() // 2**31))


def _facts(target: Target, worker: Any) -> dict[str, Any]:
    """What times, or estimates, depend on beside the kernel: the chip, versions."""
    if target.offline:
        return {"offline": True, **worker.ask("compilers")["facts"]}
    return fingerprint.chip()


def _fingerprint(
    spec: KernelSpec, facts: Mapping[str, Any], only: Mapping[str, Sequence[str]]
) -> dict[str, Any]:
    """What two searches must share to be one study."""
    found = {"kernel_hash": fingerprint.kernel_hash(spec), **facts}
    if only:  # a search of a part is not to be taken for one of everything
        found["only"] = {name: sorted(words) for name, words in sorted(only.items())}
    return found


def _table(study: Any) -> list[dict[str, Any]]:
    """Every config that was tried; a time of null is a failure, whose kind stands beside it."""
    return [
        {"config": tried, "ms": answer.ms}
        if answer.ok
        else {"config": tried, "ms": None, "failure": answer.kind}
        for tried, answer in store.known(study).values()
    ]


def _row(outcome: Any) -> dict[str, Any]:
    """An outcome as one JSON object."""
    fields = {f.name: getattr(outcome, f.name) for f in dataclasses.fields(outcome)}
    task = fields.pop("task")
    return {
        "kernel": task.kernel,
        "case": task.case,
        "arch": task.arch,
        "key": task.key,
        **fields,
        "gain": round(outcome.gain, 4),
    }


def says(line: str) -> None:
    """Something to know that is no result."""
    print(line, file=sys.stderr)
