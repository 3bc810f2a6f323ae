"""What ``python -m autotune`` does with its options: tune, report, merge, or say what is tuned."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import importlib.util
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from autotune.options import check, numbers
from autotune.process import WorkerError
from autotune.target import Target, target_of, trials_of
from tkernels import config, device
from tkernels.registry import Config, KernelSpec, all_kernels, get


def run(options: argparse.Namespace) -> int:
    """The exit code: 0, 1 where a config was wrong or a problem failed, 2 for a refused request."""
    try:
        return _run(options)
    except WorkerError as error:
        print(
            f"autotune: the worker must start and answer (--python), got {error.kind}: {error}",
            file=sys.stderr,
        )
    except OSError as error:
        print(
            f"autotune: expected files to be readable and writable, got: {error}", file=sys.stderr
        )
    except (ValueError, device.UnsupportedError) as error:
        print(error, file=sys.stderr)
    return 2


def _run(options: argparse.Namespace) -> int:
    check(options)
    for module in options.modules:
        _import(module)
    if options.merge is not None:
        return _merge(options)
    _check_installed()
    if not options.kernel and not options.resume and not options.status and not options.report:
        raise ValueError("autotune: expected --kernel, --resume, --status or --report, got none")
    specs = _specs(options.kernel)
    target = target_of(options)
    if options.status:
        return _status(options, specs, target)
    if target.python == sys.executable:
        device.require_triton()
    if options.export is not None:
        if target.arch == "interpret" and not options.force:
            raise ValueError(
                "autotune: --export needs an accelerator, got the interpreter, whose times mean "
                "nothing (--force writes them all the same)"
            )
        from autotune import export

        export.check_writable(options.export, [spec.name for spec in specs], target.arch)
    if options.report is not None:
        from autotune import report

        report.check_ready(options.report)
    from autotune import store

    storage = store.open_storage(options.storage)
    if options.report is not None and not options.kernel and not options.resume:
        return _report(options, storage, specs)
    wrong = _tune_all(options, specs, target, storage)
    if options.report is not None:
        _report(options, storage, specs)
    return 1 if wrong else 0


def _check_installed() -> None:
    for name in ("optuna", "rich", "scipy"):
        if importlib.util.find_spec(name) is None:
            raise ValueError(
                f"autotune: expected {name} to be installed, got none; pip install 'tkernels[tune]'"
            )


def _import(module: str) -> None:
    sys.path.insert(0, str(Path.cwd()))
    try:
        importlib.import_module(module)
    except ImportError as error:
        raise ValueError(f"autotune: --import must be a module, got {module}: {error}") from None


def _specs(names: str | None) -> list[KernelSpec]:
    if names in (None, "all"):
        return list(all_kernels().values())
    return [get(name.strip()) for name in str(names).split(",")]


def _tasks(
    options: argparse.Namespace, specs: list[KernelSpec], target: Target, storage: Any
) -> list[Any]:
    from autotune import problems, store, tune

    if options.resume:
        names = {spec.name for spec in specs}
        left = [
            tune.task_of(study)
            for study in store.all_studies(storage)
            if not study.user_attrs.get("outcome") and study.user_attrs["kernel"] in names
        ]
        tasks = [task for task in left if task.arch == target.arch]
        if not tasks:
            print(f"autotune: no search for {target.arch} was interrupted", file=sys.stderr)
        for arch in sorted({task.arch for task in left} - {target.arch}):
            count = sum(task.arch == arch for task in left)
            print(
                f"autotune: {count} for {arch} were interrupted; --arch {arch} goes on with them",
                file=sys.stderr,
            )
    elif options.shape:
        tasks = problems.shape_tasks(specs, options.shape, target.arch)
        tasks = _fitting(specs, tasks, target)
    elif options.model is not None:
        batches, contexts = numbers(options, "batch"), numbers(options, "context")
        path = Path(options.model)
        tasks = problems.model_tasks(specs, path, batches, contexts, target.arch)
        if options.kernel != "all":
            for name in sorted({spec.name for spec in specs} - {task.kernel for task in tasks}):
                print(f"autotune: {path} does not launch {name}; left out", file=sys.stderr)
        tasks = _fitting(specs, tasks, target)
    else:
        tasks = [task for spec in specs for task in problems.bench_tasks(spec, target.arch)]
    chosen = [task for task in tasks if options.case in task.case]
    if tasks and not chosen:
        names_ = ", ".join(task.case for task in tasks)
        raise ValueError(f"autotune: --case must be part of one of {names_}, got {options.case!r}")
    return chosen


def _fitting(specs: list[KernelSpec], tasks: list[Any], target: Target) -> list[Any]:
    """The tasks whose inputs the device has memory for; the others are named."""
    from autotune import problems

    if target.offline:
        return tasks
    by_name = {spec.name: spec for spec in specs}
    whys = [problems.why_too_large(by_name[task.kernel], task.problem) for task in tasks]
    for task, why in zip(tasks, whys, strict=True):
        if why is not None:
            print(f"autotune: {task.kernel} {task.case} is left out: {why}", file=sys.stderr)
    fitting = [task for task, why in zip(tasks, whys, strict=True) if why is None]
    if not fitting:
        raise ValueError(
            "autotune: expected a problem that fits into the device's memory, got none"
        )
    return fitting


# ---- tuning --------------------------------------------------------------------------------------


def _tune_all(
    options: argparse.Namespace, specs: list[KernelSpec], target: Target, storage: Any
) -> int:
    """Tune every chosen problem; returns how many configs were wrong, or problems failed."""
    from autotune import export, priors, progress, store, tune
    from autotune.options import restrictions
    from autotune.search import Budget
    from autotune.space import restricted

    only = restrictions(options)
    for spec in specs:
        restricted(spec.space(target.dev), only)  # before anything is started
    tasks = _tasks(options, specs, target, storage)
    if options.table is not None and len(tasks) != 1:
        raise ValueError(
            "autotune: --table needs one problem, which --kernel and --case choose, got "
            f"{len(tasks)}"
        )
    if not tasks:
        return 0
    by_name = {spec.name: spec for spec in specs}
    folders = [*([options.export] if options.export else []), *config.config_folders()]
    with _workers(options, target) as workers:
        fingerprint = _fingerprinter(target, workers[0], only)
        setup = tune.Setup(
            dev=target.dev,
            storage=storage,
            budget=Budget(options.trials or trials_of(options, target), options.timeout),
            fingerprint=fingerprint,
            workers=workers,
            offline=target.offline,
            sampler=options.sampler,
            seed=options.seed,
            compile_limit=options.compile_timeout,
        )
        wrong = failed = 0
        with progress.Progress(total=len(tasks), offline=target.offline) as watch:
            for task in tasks:
                spec = by_name[task.kernel]
                core = restricted(spec.space(target.dev), only)
                space = restricted(config.full_space(spec, target.dev), only)
                why_illegal = _legality(spec, task, target.dev, space if only else None)
                first = priors.priors(task, why_illegal, folders, store.all_studies(storage))
                try:
                    outcome = tune.tune(spec, task, setup, first, space, core, why_illegal, watch)
                except tune.DefaultFailedError as error:
                    watch.says(str(error))
                    failed += 1
                    continue
                if options.table is not None:
                    found = store.open_study(storage, task, fingerprint(spec), {})
                    options.table.write_text(json.dumps(_table(found), indent=1) + "\n")
                outcome = _with_facts(outcome, fingerprint(spec))
                wrong += len(outcome.wrong)
                if options.json:
                    print(json.dumps(_row(outcome)), flush=True)
                else:
                    progress.print_outcome(outcome, offline=target.offline)
                if options.export is not None:  # one by one, so that a crash loses one at most
                    watch.says(f"wrote {export.write(options.export, outcome)}")
    if tasks and options.export is None and target.arch != "interpret":
        print(
            "autotune: kept in the storage; --export DIR writes files for TKERNELS_CONFIG_DIR "
            "without trying anything again",
            file=sys.stderr,
        )
    if failed:
        print(f"autotune: {failed} of {len(tasks)} problems could not be tuned", file=sys.stderr)
    return wrong + failed


def _legality(
    spec: KernelSpec, task: Any, dev: device.Device, part: Mapping[str, list[Any]] | None
) -> Callable[[Config], str | None]:
    """Why a config is not tried: the kernel's reasons, or that it is not in the asked part."""
    from autotune.space import has_all

    default = spec.default_config(task.problem, dev)

    def why_illegal(candidate: Config) -> str | None:
        if part is not None and candidate != default and not has_all(part, candidate):
            return "not what --only allows"
        return spec.why_illegal(candidate, task.problem, dev)

    return why_illegal


@contextlib.contextmanager
def _workers(options: argparse.Namespace, target: Target) -> Iterator[list[Any]]:
    from autotune.process import Worker

    jobs = options.jobs or (1 if target.arch == "interpret" else min(4, device.host_cores()))
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


def _fingerprinter(
    target: Target, worker: Any, only: Mapping[str, list[str]]
) -> Callable[[KernelSpec], dict[str, Any]]:
    """What two searches must share to be one study, for each kernel."""
    from autotune import fingerprint

    if target.offline:
        facts = {"offline": True, **worker.ask("compilers")["facts"]}
    else:
        facts = fingerprint.chip()
    if only:  # a search of a part is not to be taken for one of everything
        facts["only"] = {name: sorted(words) for name, words in sorted(only.items())}
    return lambda spec: {"kernel_hash": fingerprint.kernel_hash(spec), **facts}


def _with_facts(outcome: Any, facts: dict[str, Any]) -> Any:
    """``outcome`` with what it was measured with, or estimated by, for its record."""
    if outcome.measured is not None:
        return dataclasses.replace(outcome, measured={**facts, **outcome.measured})
    return dataclasses.replace(outcome, estimate={**facts, **outcome.estimate})


def _table(study: Any) -> list[dict[str, Any]]:
    """Every config that was tried; a time of null is a failure, whose kind stands beside it."""
    from autotune import store

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


# ---- results -------------------------------------------------------------------------------------


def _merge(options: argparse.Namespace) -> int:
    from autotune import export

    if options.export is None:
        raise ValueError("autotune: --merge needs --export DIR, the folder to add to, got none")
    for path in export.merge(options.merge, options.export):
        print(f"wrote {path}")
    return 0


def _report(options: argparse.Namespace, storage: Any, specs: list[KernelSpec]) -> int:
    from autotune import report, store

    names = {spec.name for spec in specs}
    studies = [s for s in store.all_studies(storage) if s.user_attrs["kernel"] in names]
    if not studies:
        raise ValueError("autotune: --report needs searches in the storage, got none")
    print(f"wrote {report.write_report(studies, options.report)}", file=sys.stderr)
    return 0


def _status(options: argparse.Namespace, specs: list[KernelSpec], target: Target) -> int:
    from autotune import status

    folders = [*([options.export] if options.export else []), *config.config_folders()]
    status.show(status.status(folders, specs, target.dev), as_json=options.json)
    return 0
