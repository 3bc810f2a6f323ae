"""What ``python -m autotune`` may be asked: its options, and which numbers make sense."""

from __future__ import annotations

import argparse
from pathlib import Path

SAMPLERS = ("auto", "tpe", "random", "exhaustive")

EXAMPLES = """examples:
  python -m autotune --kernel paged_attn --export tuned       tune its bench cases, keep the result
  python -m autotune --kernel paged_attn --shape batch=64,context=4096
  python -m autotune --kernel all --model Qwen3-8B/config.json --batch 1,16,64 --context 1024,8192
  python -m autotune --kernel all --offline --arch ascend910b  no NPU: its compiler and a model
  python -m autotune --status                                 what is tuned, how old, what is stale
  python -m autotune --kernel all --missing --export tuned    tune what is missing or stale
  python -m autotune --resume                                 finish what was interrupted
  python -m autotune --export tuned                           write what was found before
  TKERNELS_CONFIG_DIR=tuned python your_program.py            use what was written

Each config is compiled and run in a process of its own, checked against the PyTorch reference on
poisoned memory, and only then timed. All trials are kept in .autotune/journal.log: a search that
was stopped goes on where it was, and one that is done is not done again.
"""


DEFAULTS = {"batch": "1,16,64", "context": "1024,8192"}  # of --model


def parser() -> argparse.ArgumentParser:
    """The command's parser."""
    made = argparse.ArgumentParser(
        prog="python -m autotune",
        description="Search for the fastest right config of a kernel.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    # fmt: off
    add = made.add_argument_group("what").add_argument
    add("--kernel", metavar="NAME", help="a kernel, several with commas, or all")
    add("--case", default="", metavar="TEXT", help="only problems whose name has TEXT")
    add("--missing", action="store_true",
        help="only bench cases that --status calls missing, or has doubts about; with --status, "
             "show only those")
    add("--shape", action="append", default=[], metavar="NAME=N,...",
        help="a problem by its sizes; may be given again")
    add("--model", metavar="PATH", help="problems of a model: its folder or config.json")
    add("--batch", metavar="N,...", help="with --model: sequences (1,16,64)")
    add("--context", metavar="N,...", help="with --model: tokens (1024,8192)")
    add("--resume", action="store_true",
        help="finish the searches that were interrupted, each as it was begun")
    add("--import", action="append", default=[], dest="modules", metavar="MODULE",
        help="a module that registers kernels of your own")
    add = made.add_argument_group("how").add_argument
    add("--trials", type=int, metavar="N",
        help="configs a problem (60; offline more; --resume: as begun)")
    add("--timeout", type=float, metavar="S",
        help="seconds a problem (no limit)")
    add("--trial-timeout", type=float, default=60.0, metavar="S",
        help="seconds until a config counts as hung (60)")
    add("--compile-timeout", type=float, default=300.0, metavar="S",
        help="seconds until a compiler counts as hung (300)")
    add("--sampler", choices=SAMPLERS,
        help="auto (if none is given): all legal points where the trials cover them, else TPE and "
        "descent")
    add("--only", action="append", default=[], metavar="KEY=VALUE,...",
        help="values of a config key to try; may be given again for other keys")
    add("--seed", type=int, default=0, metavar="N", help="of the sampler (0)")
    add("--jobs", type=int, metavar="N",
        help="processes: one checks and times what the others compile, or does all if it is "
        "alone; offline all compile (cores, at most 16; offline 4; interpreter 1)")
    add("--offline", action="store_true", help="ask compilers and a model, run nothing")
    add("--arch", metavar="NAME",
        help="another one, offline: sm90, ascend910b...; or interpret, to try the tuner")
    add("--python", metavar="PATH", help="the Python that has the architecture's compiler")
    add("--storage", metavar="WHERE",
        help="journal file or folder, or postgresql://... (.autotune)")
    add = made.add_argument_group("results").add_argument
    add("--export", type=Path, metavar="DIR",
        help="write tuned files below DIR; alone: of all searches that ended, trying nothing")
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
    return made


def check(options: argparse.Namespace) -> None:
    """Raise ValueError for numbers and combinations that make no sense."""
    for name in ("trials", "timeout", "jobs", "trial_timeout", "compile_timeout"):
        value = getattr(options, name)
        least = 1 if name in ("trials", "jobs") else 0
        if value is not None and not (value >= least and value > 0):
            words = f"{least} or more" if least else "above 0"
            raise ValueError(f"autotune: --{name.replace('_', '-')} must be {words}, got {value}")
    if options.model is None and (options.batch or options.context):
        raise ValueError("autotune: --batch and --context belong to --model, got none")
    restrictions(options)
    if options.resume and (options.shape or options.model is not None):
        raise ValueError(
            "autotune: --shape and --model belong to a new search, got --resume, which takes its "
            "problems from the storage"
        )
    if options.missing and (options.shape or options.model is not None or options.resume):
        raise ValueError(
            "autotune: --missing chooses among bench cases, got --shape, --model or --resume"
        )
    if options.shape and options.model is not None:
        raise ValueError("autotune: expected --shape or --model, got both")


def restrictions(options: argparse.Namespace) -> dict[str, list[str]]:
    """What ``--only`` says: the words for the allowed values of each key."""
    found: dict[str, list[str]] = {}
    for text in options.only:
        key, equals, values = text.partition("=")
        words = [word.strip() for word in values.split(",")]
        if not equals or not key.strip() or not all(words) or key.strip() in found:
            raise ValueError(
                f"autotune: --only must be KEY=VALUE,... with each key once, got {text!r}"
            )
        found[key.strip()] = words
    return found


def numbers(options: argparse.Namespace, name: str) -> list[int]:
    """The whole numbers of ``--batch`` or ``--context``, ascending."""
    words = (getattr(options, name) or DEFAULTS[name]).split(",")
    if not all(word.strip().isdecimal() and int(word) > 0 for word in words):
        raise ValueError(
            f"autotune: --{name} must be whole numbers above 0 with commas between, got "
            f"{getattr(options, name)!r}"
        )
    return sorted(int(word) for word in words)
