"""What ``python -m autotune`` does with its options: tune, report, merge, or say what is tuned."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune.options import check, numbers
from autotune.process import WorkerError
from autotune.target import Target, shown_device, target_of, trials_of
from tkernels import config, device
from tkernels.registry import KernelSpec, all_kernels, get

if TYPE_CHECKING:
    from autotune.tune import Plan


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
    asked = (options.kernel, options.resume, options.status, options.report, options.export)
    if not any(asked):
        raise ValueError(
            "autotune: expected --kernel, --resume, --status, --report or --export, got none"
        )
    if not options.kernel and not options.resume:
        _check_no_search(options)
    specs = _specs(options.kernel)
    if options.status:
        return _status(options, specs)
    if options.report is not None:
        from autotune import report

        report.check_ready(options.report)
    wrong = 0
    if options.kernel or options.resume:
        wrong = _search(options, specs)
    elif options.export is not None:
        _export(options, specs)
    if options.report is not None:
        _report(options, specs)
    return 1 if wrong else 0


def _check_no_search(options: argparse.Namespace) -> None:
    """Raise ValueError for what only a search can be told, e.g. where --kernel was forgotten."""
    for name in ("shape", "model", "missing", "trials", "timeout", "table"):
        if getattr(options, name) and not (name == "missing" and options.status):
            raise ValueError(f"autotune: --{name} belongs to a search, got no --kernel to search")


def _search(options: argparse.Namespace, specs: list[KernelSpec]) -> int:
    """Do what is asked, or go on with what is stored; returns how much was wrong, or failed."""
    from autotune import resume, searches, store

    if options.resume:
        storage = store.open_storage(options.storage)
        groups = resume.groups(options, specs, store.all_studies(storage), _says)
        for target, _ in groups:
            _check_export(options, specs, target)
    else:
        target = target_of(options)
        if target.python == sys.executable:
            device.require_triton()
        _check_export(options, specs, target)
        storage = store.open_storage(options.storage)
        groups = [(target, _plans(options, specs, target))]
    return searches.tune_all(options, specs, groups, storage)


def _check_export(options: argparse.Namespace, specs: list[KernelSpec], target: Target) -> None:
    """Raise now, before minutes are spent on a search, what would be raised after it."""
    if options.export is None:
        return
    if target.arch == "interpret" and not options.force:
        raise ValueError(
            "autotune: --export needs an accelerator, got the interpreter, whose times mean "
            "nothing (--force writes them all the same)"
        )
    from autotune import export

    export.check_writable(options.export, [spec.name for spec in specs], target.arch)


def _says(line: str) -> None:
    print(line, file=sys.stderr)


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


def _plans(options: argparse.Namespace, specs: list[KernelSpec], target: Target) -> list[Plan]:
    """The searches that the options ask for."""
    from autotune.options import restrictions
    from autotune.search import Budget
    from autotune.space import restricted
    from autotune.tune import Plan

    only = restrictions(options)
    for spec in specs:
        restricted(spec.space(target.dev), only)  # before anything is started
    sampler = options.sampler or "auto"
    trials = options.trials or trials_of(sampler, target)
    budget = Budget(trials, math.inf if options.timeout is None else options.timeout)
    return [Plan(task, budget, sampler, only) for task in _tasks(options, specs, target)]


def _tasks(options: argparse.Namespace, specs: list[KernelSpec], target: Target) -> list[Any]:
    from autotune import problems

    if options.shape:
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
    if options.missing:
        due = _due(options, specs, target)
        chosen = [task for task in chosen if (task.kernel, task.label) in due]
        if not chosen:
            _says(f"autotune: nothing is missing or stale for {target.arch}")
    return chosen


def _due(
    options: argparse.Namespace, specs: list[KernelSpec], target: Target
) -> set[tuple[str, str]]:
    """(kernel, label) of the bench cases without an entry that is sure to be of today's kernel."""
    from autotune import status
    from autotune.records import label_of

    rows = status.status(_folders(options), specs, target.dev)
    # A model's estimate is none where times can be measured.
    wanted = ("measured", "offline") if target.offline else ("measured",)
    return {
        (row.kernel, label_of(row.key))
        for row in rows
        if row.bench and (row.stale or row.state not in wanted)
    }


def _folders(options: argparse.Namespace) -> list[Path]:
    """Where tuned files are looked for, what the command itself writes first."""
    return [*([options.export] if options.export else []), *config.config_folders()]


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


# ---- results -------------------------------------------------------------------------------------


def _merge(options: argparse.Namespace) -> int:
    from autotune import export

    if options.export is None:
        raise ValueError("autotune: --merge needs --export DIR, the folder to add to, got none")
    for path in export.merge(options.merge, options.export):
        print(f"wrote {path}")
    return 0


def _export(options: argparse.Namespace, specs: list[KernelSpec]) -> None:
    """Write tuned files of the searches that ended; nothing is tried."""
    from autotune import export, resume, store

    studies = store.all_studies(store.open_storage(options.storage))
    left_out: list[str] = []
    outcomes = resume.ended(options, specs, studies, left_out.append)
    for line in left_out:
        _says(line)
    if not outcomes:
        place = store.place(options.storage)
        if left_out:
            raise ValueError(f"autotune: nothing was written, as no other search ended in {place}")
        raise ValueError(
            "autotune: --export needs a search that ended, or --kernel to begin one, got none in "
            f"{place}"
        )
    for path in dict.fromkeys(export.write(options.export, outcome) for outcome in outcomes):
        _says(f"wrote {path}")
    _says(f"autotune: {export.how_to_use(options.export)}")


def _report(options: argparse.Namespace, specs: list[KernelSpec]) -> None:
    from autotune import report, store

    names = {spec.name for spec in specs}
    found = store.all_studies(store.open_storage(options.storage))
    studies = [s for s in found if s.user_attrs["kernel"] in names]
    if not studies:
        raise ValueError("autotune: --report needs searches in the storage, got none")
    _says(f"wrote {report.write_report(studies, options.report)}")


def _status(options: argparse.Namespace, specs: list[KernelSpec]) -> int:
    from autotune import status

    folders = _folders(options)
    for line in status.unread(folders[:-1]):  # the last is what is shipped
        _says(f"autotune: {line}")
    rows = status.status(folders, specs, shown_device(options))
    shown = [r for r in rows if r.stale or r.state == "missing"] if options.missing else rows
    status.show(shown, of=rows, as_json=options.json)
    return 0
