"""What the commands share: options, the network, the result document, and progress on stderr."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import gc
import importlib.util
import json
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from bench import report, roofline, rows, run
from bench.model import profile
from bench.model.shapes import (
    FP8,
    PUBLISHED,
    SHAPES,
    config_of,
    parameters,
    quantised,
    random_model,
)
from bench.rows import UsageError
from model.checkpoint import Checkpoint, open_checkpoint
from model.config import ModelConfig
from model.generate import add_kv_options
from model.kv_quant import KVQuantization, choose
from model.quantize_plan import SCHEMES
from model.qwen3 import Model
from model.runner import choose_dtype
from model.weights import load_model
from tkernels import device

Tell = Callable[[str], None]
SCHEMA = 1


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", type=Path, metavar="PATH", help="a checkpoint instead of random weights")
    choices = (*SCHEMES, FP8)
    add("--weights", choices=choices, help="random ones, as model.quantize has them; fp8: as Qwen")
    add_kv_options(parser)
    add("--dtype", choices=("bfloat16", "float16", "float32"), help="default: float32 on a CPU")
    add_run_options(parser, rounds=3)
    add("--plot", type=Path, metavar="FILE.png", help="draw the figures")


def add_run_options(parser: argparse.ArgumentParser, *, rounds: int) -> None:
    add = parser.add_argument
    usual = "(default %(default)s)"
    add("--rounds", type=rows.positive, default=rounds, metavar="N", help=f"counted runs {usual}")
    add("--seed", type=int, default=0, help=f"of weights and inputs {usual}")
    add("--json", type=Path, metavar="FILE", help="write all figures, as soon as there are some")


def check(args: argparse.Namespace, *pictures: Path | None) -> None:
    """Refuse what can be refused before minutes are spent on measuring."""
    if device.current().compile_only:
        raise UsageError(
            "bench: TKERNELS_DEVICE must name a device that can launch kernels, got compile-only "
            f"{device.current().arch}"
        )
    if getattr(args, "model", None) and args.weights:
        raise UsageError(
            "bench: --weights must stand without --model, whose weights it has, got both"
        )
    if args.seed < 0:
        raise UsageError(f"bench: --seed must be 0 or more, got {args.seed}")
    if args.json:
        rows.check_writable(args.json)
    for picture in pictures:
        if picture is not None:
            report.check_plot()
            rows.check_writable(picture)


def numbers(option: str, text: str) -> list[int]:
    """Whole numbers from 1 on, with commas between them, each once."""
    words = text.split(",")
    if not all(word.isdigit() and int(word) for word in words):
        raise UsageError(f"bench: {option} must be whole numbers >= 1 like 1,16, got {text!r}")
    return list(dict.fromkeys(map(int, words)))


def words(option: str, text: str, known: tuple[str, ...]) -> list[str]:
    """Names with commas between them, each known and once."""
    found = list(dict.fromkeys(text.split(",")))
    for name in found:
        if name not in known:
            raise UsageError(f"bench: {option} must be of {', '.join(known)}, got {name!r}")
    return found


# ---- the network -------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Target:
    """A network to measure, of which nothing is on the device yet."""

    name: str
    config: ModelConfig
    dtype: torch.dtype
    quantization: KVQuantization | None
    checkpoint: Checkpoint | None  # None: random weights

    def load(self, seed: int) -> Model:
        where = device.tensor_device()
        if self.checkpoint is None:
            return random_model(self.config, seed=seed, dtype=self.dtype, device=where)
        return load_model(self.config, self.checkpoint.source, dtype=self.dtype, device=where)

    @property
    def weight_bytes(self) -> int:
        """Of the device's memory; of a quantised checkpoint at most that."""
        return parameters(self.config) * self.dtype.itemsize


def target(name: str, args: argparse.Namespace, kernels: str) -> Target:
    """The network of ``--model``, or else of this shape."""
    with as_usage():
        checkpoint = open_checkpoint(args.model) if args.model else None
        config = config_of(name) if checkpoint is None else checkpoint.config
        if args.weights:
            config = quantised(config, args.weights)
        usual = "float32" if device.tensor_device().type == "cpu" else "bfloat16"
        dtype = choose_dtype(args.dtype, usual, kernels, config)
        quantization = choose(args.kv_cache, args.kv_scales, args.kv_tau, config)
    shown = name + (f"-{args.weights}" if args.weights else "")
    if checkpoint is not None:
        shown = checkpoint.path.name
    return Target(shown, config, getattr(torch, dtype), quantization, checkpoint)


@contextlib.contextmanager
def as_usage() -> Iterator[None]:
    """What the runner says of a wrong option or checkpoint ends the command with that sentence."""
    try:
        yield
    except ValueError as error:
        raise UsageError(f"bench: {error}") from None


def shapes(asked: str | None) -> list[str]:
    """The shapes of ``--shape``; without it all published ones, on the CPU a tiny one."""
    if asked is not None:
        return words("--shape", asked, tuple(SHAPES))
    return ["tiny"] if device.tensor_device().type == "cpu" else list(PUBLISHED)


def free_bytes() -> float:
    """Of the device's memory, once what nobody holds has been given back; unbounded on the CPU."""
    gc.collect()
    return device.memory_free() if device.memory_bytes() else math.inf


# ---- what is kept ------------------------------------------------------------------------------


class Document:
    """Figures of one run of a command, written anew whenever there are more of them."""

    def __init__(self, command: str, args: argparse.Namespace, path: Path | None) -> None:
        facts = device.current()
        self.roof, self._path = roofline.measured(), path
        self.failures: list[str] = []
        self.rows: list[dict[str, Any]] = []
        self.interrupted = False
        self._head = {
            "schema": SCHEMA,
            "command": command,
            "settings": {n: str(v) if isinstance(v, Path) else v for n, v in vars(args).items()},
            "device": facts.name,
            "arch": facts.arch,
            "versions": device.versions(),
            "health": device.health(),
            "commit": run.commit(),
            "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "roof": self.roof.as_dict(),
        }

    def as_dict(self) -> dict[str, Any]:
        found = {"rows": self.rows, "failures": self.failures, "interrupted": self.interrupted}
        return self._head | found

    def write(self) -> None:
        if self._path:
            rows.write_text(self._path, json.dumps(self.as_dict(), indent=1) + "\n")

    def add(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        self.write()

    def fail(self, what: str, error: Exception) -> None:
        """Something of ours, or a peer, could not be measured; the rest still is."""
        lines = str(error).strip().splitlines()
        self.failures.append(f"{what}: {type(error).__name__}: {lines[0] if lines else ''}")
        print(f"bench: FAILED {self.failures[-1]}", file=sys.stderr, flush=True)
        self.write()

    @property
    def roof_line(self) -> str:
        """What "of roof" refers to, and what times of a CPU are worth."""
        nothing = "on a CPU these times mean nothing\n" if device.KIND == "cpu" else ""
        return nothing + (
            f"of roof: bytes of a step (weights once, keys and values read) over this run's own "
            f"copy bandwidth, {self.roof.bytes_per_s / 1e9:.0f} GB/s read plus written, over the "
            "step's time"
        )


def start_profiler(tell: Tell) -> bool:
    """Whether steps can be recorded here. To be asked when nothing is left to be timed."""
    try:
        profile.prepare()
    except (device.UnsupportedError, RuntimeError) as error:
        tell(f"no profile: {error}")
        return False
    return True


@contextlib.contextmanager
def progress(total: int) -> Iterator[tuple[Tell, Callable[[], None]]]:
    """(say what is done now, one of ``total`` is done): a bar on a terminal, else lines."""
    if not (sys.stderr.isatty() and importlib.util.find_spec("rich") is not None):
        yield lambda text: print(f"bench: {text}", file=sys.stderr, flush=True), lambda: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=total)
        yield (
            lambda text: bar.update(task, description=text, refresh=True),
            lambda: bar.advance(task),
        )
