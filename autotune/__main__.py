"""Command line of the tuner: ``python -m autotune --kernel rms_norm``."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from tkernels import device
from tkernels.registry import KernelSpec, all_kernels, get

EXAMPLES = """examples:
  python -m autotune --kernel rms_norm                 measure, print, keep nothing
  python -m autotune --kernel all --export ./tuned     write ./tuned/<arch>/<kernel>.json
  TKERNELS_CONFIG_DIR=./tuned python your_program.py   use what was written

Each config is checked against the PyTorch reference before it is timed. Configs are tried in this
process: one that crashes the device ends the run.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code (2 for a refused request, 130 for Ctrl-C)."""
    parser = argparse.ArgumentParser(
        prog="python -m autotune",
        description="Search for the fastest right config of a kernel on this device.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--kernel", required=True, metavar="NAME", help="a kernel, or all")
    parser.add_argument("--case", default="", metavar="TEXT", help="only cases whose name has TEXT")
    parser.add_argument("--trials", type=int, default=40, metavar="N", help="configs a case (40)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the sampler (0)")
    parser.add_argument("--export", type=Path, metavar="DIR", help="write tuned files below DIR")
    parser.add_argument("--json", action="store_true", help="print the outcomes as JSON lines")
    options = parser.parse_args(argv)
    try:
        return _run(options)
    except (ValueError, device.UnsupportedError) as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("autotune: stopped; what was exported by then is kept", file=sys.stderr)
        return 130


def _run(options: argparse.Namespace) -> int:
    if options.trials < 1:
        raise ValueError(f"autotune: --trials must be 1 or more, got {options.trials}")
    specs = list(all_kernels().values()) if options.kernel == "all" else [get(options.kernel)]
    dev = device.current()
    if dev.compile_only:
        raise ValueError(f"autotune: the device must be able to run, got compile-only {dev.arch}")
    if dev.arch == "interpret":
        from tkernels.interpreter import correct_bfloat16

        correct_bfloat16()
        print("no accelerator: times of the interpreter mean nothing", file=sys.stderr)
        if options.export is not None:
            raise ValueError("autotune: --export needs an accelerator, got the interpreter")
    if importlib.util.find_spec("optuna") is None:
        raise ValueError(
            "autotune: expected optuna to be installed, got none; pip install 'tkernels[tune]'"
        )
    if options.export is not None:
        from autotune import export

        export.check_writable(options.export, [spec.name for spec in specs])
    wrong = sum(_tune_kernel(spec, options) for spec in specs)
    return 1 if wrong else 0


def _tune_kernel(spec: KernelSpec, options: argparse.Namespace) -> int:
    """Tune all chosen cases of a kernel; returns how many configs computed wrong values."""
    from autotune import export, search

    wrong = 0
    cases = [c for c in search.bench_cases(spec) if options.case in c.name]
    if not cases:
        names = ", ".join(c.name for c in search.bench_cases(spec))
        raise ValueError(f"autotune: --case must be part of one of {names}, got {options.case!r}")
    for case in cases:
        outcome = search.tune(
            spec,
            case,
            trials=options.trials,
            seed=options.seed,
            said=lambda line: print(line, file=sys.stderr),
        )
        wrong += len(outcome.tally.wrong)
        if options.json:
            row = {"kernel": spec.name, **dataclasses.asdict(outcome)}
            print(json.dumps(row), flush=True)
        else:
            tally = outcome.tally
            gain = outcome.default_ms / outcome.ms
            print(
                f"{spec.name} {case.name}: {outcome.ms * 1e3:.2f} us, {gain:.3f}x the default "
                f"({tally.measured} measured, {tally.illegal} illegal, {tally.failed} failed, "
                f"{len(tally.wrong)} wrong) {outcome.config}",
                flush=True,
            )
        if options.export is not None:  # case by case, so that a later crash loses one at most
            path = export.write(options.export, spec.name, [outcome])
            print(f"wrote {path}", file=sys.stderr)
        if outcome.tally.stopped:
            raise KeyboardInterrupt
    return wrong


if __name__ == "__main__":
    sys.exit(main())
