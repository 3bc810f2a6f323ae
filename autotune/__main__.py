"""Command line of the tuner: ``python -m autotune --kernel paged_attn``."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import importlib.util
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tkernels import config, device
from tkernels.registry import Config, KernelSpec, all_kernels, get

EXAMPLES = """examples:
  python -m autotune --kernel paged_attn --export tuned       tune its bench cases, keep the result
  python -m autotune --kernel paged_attn --shape batch=64,context=4096
  python -m autotune --kernel all --model Qwen3-8B/config.json --batch 1,16,64 --context 1024,8192
  python -m autotune --kernel all --offline --arch ascend910b  no NPU: its compiler and a model
  python -m autotune --status                                 what is tuned, how old, what is stale
  python -m autotune --resume                                 finish what was interrupted
  TKERNELS_CONFIG_DIR=tuned python your_program.py            use what was written

Each config is compiled and run in a process of its own, checked against the PyTorch reference on
poisoned memory, and only then timed. All trials are kept in .autotune/journal.log: a search that
was stopped goes on where it was, and one that is done is not done again.
"""

TRIALS = {"measured": 60, "sm": 120, "ascend910b": 400}
BARE_ARCH = "sm90"  # what a machine without an accelerator searches for


@dataclasses.dataclass(frozen=True)
class Target:
    """What is tuned for, and who runs the trials."""

    dev: device.Device
    offline: bool
    python: str

    @property
    def arch(self) -> str:
        return self.dev.arch


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code (2 for a refused request, 130 for Ctrl-C)."""
    options = _parser().parse_args(argv)
    try:
        return _run(options)
    except (ValueError, device.UnsupportedError) as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(
            "autotune: stopped; all that was measured is kept, and the same command goes on",
            file=sys.stderr,
        )
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m autotune",
        description="Search for the fastest right config of a kernel.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    # fmt: off
    add = parser.add_argument_group("what").add_argument
    add("--kernel", metavar="NAME", help="a kernel, several with commas, or all")
    add("--case", default="", metavar="TEXT", help="only problems whose name has TEXT")
    add("--shape", action="append", default=[], metavar="NAME=N,...",
        help="a problem by its sizes; may be given again")
    add("--model", metavar="PATH", help="problems of a model: its folder or config.json")
    add("--batch", default="1,16,64", metavar="N,...", help="with --model: sequences (1,16,64)")
    add("--context", default="1024,8192", metavar="N,...", help="with --model: tokens (1024,8192)")
    add("--resume", action="store_true", help="finish the searches that were interrupted")
    add("--import", action="append", default=[], dest="modules", metavar="MODULE",
        help="a module that registers kernels of your own")
    add = parser.add_argument_group("how").add_argument
    add("--trials", type=int, metavar="N", help="configs a problem (60; offline more)")
    add("--timeout", type=float, default=math.inf, metavar="S",
        help="seconds a problem (no limit)")
    add("--trial-timeout", type=float, default=60.0, metavar="S",
        help="seconds until a config counts as hung (60)")
    add("--compile-timeout", type=float, default=300.0, metavar="S",
        help="seconds until a compiler counts as hung (300)")
    add("--sampler", default="auto", choices=("auto", "tpe", "random", "exhaustive"),
        help="auto: all legal points where the trials cover them, else TPE and descent")
    add("--seed", type=int, default=0, metavar="N", help="of the sampler (0)")
    add("--jobs", type=int, metavar="N",
        help="processes that compile at once; one of them times (cores, at most 4)")
    add("--offline", action="store_true", help="ask compilers and a model, run nothing")
    add("--arch", metavar="NAME", help="offline: sm90, ascend910b...; or interpret")
    add("--python", metavar="PATH", help="the Python that has the architecture's compiler")
    add("--storage", metavar="WHERE",
        help="journal file or folder, or postgresql://... (.autotune)")
    add = parser.add_argument_group("results").add_argument
    add("--export", type=Path, metavar="DIR", help="write tuned files below DIR")
    add("--merge", type=Path, metavar="DIR",
        help="add the tuned files below DIR to those of --export")
    add("--report", type=Path, metavar="DIR", help="write a page with pictures into DIR")
    add("--table", type=Path, metavar="FILE",
        help="write every config that was tried, and its time, for python -m bench.search_cost")
    add("--status", action="store_true",
        help="say what is tuned, how old it is, what is stale")
    add("--json", action="store_true", help="print results as JSON lines")
    add("--force", action="store_true",
        help="export times of the interpreter, which mean nothing")
    # fmt: on
    return parser


def _run(options: argparse.Namespace) -> int:
    _check_numbers(options)
    for module in options.modules:
        _import(module)
    if options.merge is not None:
        return _merge(options)
    _check_installed()
    if not options.kernel and not options.resume and not options.status and not options.report:
        raise ValueError("autotune: expected --kernel, --resume, --status or --report, got none")
    specs = _specs(options.kernel)
    target = _target(options)
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


def _check_numbers(options: argparse.Namespace) -> None:
    for name in ("trials", "timeout", "jobs", "trial_timeout", "compile_timeout"):
        value = getattr(options, name)
        least = 1 if name in ("trials", "jobs") else 0
        if value is not None and not (value >= least and value > 0):
            words = f"{least} or more" if least else "above 0"
            raise ValueError(f"autotune: --{name.replace('_', '-')} must be {words}, got {value}")
    if options.shape and options.model is not None:
        raise ValueError("autotune: expected --shape or --model, got both")


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


# ---- what for ------------------------------------------------------------------------------------


def _target(options: argparse.Namespace) -> Target:
    here = device.current()
    asked = options.arch
    if asked == "interpret" or (asked is None and not options.offline and here.arch != "interpret"):
        if asked == "interpret" and here.arch != "interpret":
            raise ValueError(
                f"autotune: --arch interpret needs TKERNELS_DEVICE=cpu, got {here.arch}"
            )
        if here.compile_only:
            raise ValueError(
                f"autotune: the device must be able to run, got compile-only {here.arch} "
                "(--offline asks its compiler)"
            )
        if here.arch == "interpret":
            print("autotune: times of the interpreter mean nothing", file=sys.stderr)
        return Target(here, False, options.python or sys.executable)
    if asked is None and not options.offline:
        print(
            f"autotune: found no accelerator; searching offline for {BARE_ARCH}, with its compiler "
            "and a model instead of a clock (--arch ascend910b for another, --arch interpret to "
            "try the tuner itself)",
            file=sys.stderr,
        )
    arch = asked or (here.arch if here.arch != "interpret" else BARE_ARCH)
    if asked is not None and asked == here.arch and not options.offline and not here.compile_only:
        return Target(here, False, options.python or sys.executable)
    facts = device.offline_facts(arch)
    return Target(facts, True, options.python or _python_for(facts))


def _python_for(facts: device.Device) -> str:
    """The Python whose triton compiles for the chip."""
    if not facts.is_npu:
        return sys.executable
    found = [
        folder / ".venv-ascend" / "bin" / "python"
        for folder in (Path.cwd(), Path(__file__).parents[1])
    ]
    for path in found:
        if path.exists():
            return str(path)
    if importlib.util.find_spec("triton.backends.ascend") is not None:
        return sys.executable
    raise ValueError(
        f"autotune: expected an environment with triton-ascend and ascendnpu-ir, got none at "
        f"{found[0]} (make test-ascend makes it; --python names another)"
    )


def _tasks(
    options: argparse.Namespace, specs: list[KernelSpec], target: Target, storage: Any
) -> list[Any]:
    from autotune import problems, store, tune

    if options.resume:
        names = {spec.name for spec in specs}
        tasks = [
            tune.task_of(study)
            for study in store.all_studies(storage)
            if "outcome" not in study.user_attrs
            and study.user_attrs["arch"] == target.arch
            and study.user_attrs["kernel"] in names
        ]
        if not tasks:
            print(f"autotune: no search for {target.arch} was interrupted", file=sys.stderr)
    elif options.shape:
        tasks = problems.shape_tasks(specs, options.shape, target.arch)
        tasks = _fitting(specs, tasks, target)
    elif options.model is not None:
        batches, contexts = _numbers(options, "batch"), _numbers(options, "context")
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


def _numbers(options: argparse.Namespace, name: str) -> list[int]:
    words = str(getattr(options, name)).split(",")
    if not all(word.strip().isdecimal() and int(word) > 0 for word in words):
        raise ValueError(
            f"autotune: --{name} must be whole numbers above 0 with commas between, got "
            f"{getattr(options, name)!r}"
        )
    return sorted(int(word) for word in words)


# ---- tuning --------------------------------------------------------------------------------------


def _tune_all(
    options: argparse.Namespace, specs: list[KernelSpec], target: Target, storage: Any
) -> int:
    """Tune every chosen problem; returns how many configs computed something wrong."""
    from autotune import export, priors, progress, store, tune
    from autotune.search import Budget

    tasks = _tasks(options, specs, target, storage)
    if options.table is not None and len(tasks) != 1:
        raise ValueError(
            "autotune: --table needs one problem, which --kernel and --case choose, got "
            f"{len(tasks)}"
        )
    by_name = {spec.name: spec for spec in specs}
    folders = [*([options.export] if options.export else []), *config.config_folders()]
    with _workers(options, target) as workers:
        fingerprint = _fingerprinter(target, workers[0])
        setup = tune.Setup(
            dev=target.dev,
            storage=storage,
            budget=Budget(options.trials or _trials(options, target), options.timeout),
            fingerprint=fingerprint,
            workers=workers,
            offline=target.offline,
            sampler=options.sampler,
            seed=options.seed,
            compile_limit=options.compile_timeout,
        )
        wrong = 0
        with progress.Progress(total=len(tasks), offline=target.offline) as watch:
            for task in tasks:
                spec = by_name[task.kernel]
                why_illegal = _legality(spec, task, target.dev)
                first = priors.priors(task, why_illegal, folders, store.all_studies(storage))
                core = spec.space(target.dev)
                space = config.full_space(spec, target.dev)
                outcome = tune.tune(spec, task, setup, first, space, core, why_illegal, watch)
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
    return wrong


def _trials(options: argparse.Namespace, target: Target) -> int:
    """How many configs a problem is given, where the command does not say."""
    if options.sampler == "exhaustive":
        return 10**9
    if not target.offline:
        return TRIALS["measured"]
    return TRIALS[target.arch if target.dev.is_npu else "sm"]


def _legality(spec: KernelSpec, task: Any, dev: device.Device) -> Callable[[Config], str | None]:
    return lambda candidate: spec.why_illegal(candidate, task.problem, dev)


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


def _fingerprinter(target: Target, worker: Any) -> Callable[[KernelSpec], dict[str, Any]]:
    """What two measurements must share to stand in one study, for each kernel."""
    from autotune import fingerprint

    if target.offline:
        facts = {"offline": True, **worker.ask("compilers")["facts"]}
    else:
        facts = fingerprint.chip()
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


if __name__ == "__main__":
    sys.exit(main())
