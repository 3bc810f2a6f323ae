"""How many trials a search needs: strategies replayed against a table of everything.

    python -m bench.search_cost paged_attn.json --plot cost.png

A table (``bench.tables``) holds the time of every config of one problem, so a strategy can be asked
what it would try, without a device and over many seeds. Counted are the trials, failed ones too,
until the best so far is within 5% and within 2% of the table's best:

* brute force, in the order of the table;
* random, without repetition;
* ours: what ``--ours MODULE:FUNCTION`` names (default: the tuner's own replay), called as
  ``function(space, table, default, trials=, seed=)`` and giving the best so far after each trial.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import itertools
import json
import math
import random
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from bench import tables
from bench.rows import UsageError
from bench.tables import Table

SLACKS = (0.05, 0.02)
OURS = "autotune.search:replay"

# (table, trials, seed) -> best milliseconds after each trial, infinite until one does not fail.
Strategy = Callable[[Table, int, int], Iterable[float]]


@dataclasses.dataclass(frozen=True)
class Cost:
    """Trials of one strategy over seeds, to within ``slack`` of the best; inf: never reached."""

    strategy: str
    slack: float
    trials: tuple[float, ...]

    @property
    def median(self) -> float:
        """Over seeds."""
        return statistics.median(self.trials)

    @property
    def p90(self) -> float:
        """The least number that nine tenths of the seeds do not exceed."""
        return sorted(self.trials)[math.ceil(0.9 * len(self.trials)) - 1]


def brute_force(table: Table, trials: int, seed: int) -> Iterable[float]:
    """The table from its start to its end, whatever the seed."""
    return _best_so_far([ms for _, ms in table.entries[:trials]])


def at_random(table: Table, trials: int, seed: int) -> Iterable[float]:
    """Any config that was not tried yet."""
    order = [ms for _, ms in table.entries]
    random.Random(seed).shuffle(order)
    return _best_so_far(order[:trials])


def _best_so_far(times: Iterable[float | None]) -> Iterable[float]:
    return itertools.accumulate((math.inf if ms is None else ms for ms in times), min)


def ours(replay: Callable[..., Iterable[float]]) -> Strategy:
    """A strategy out of a search's own replay function."""

    def strategy(table: Table, trials: int, seed: int) -> Iterable[float]:
        return replay(table.space, table.entries, table.default, trials=trials, seed=seed)

    return strategy


def trials_to(curve: Iterable[float], goal: float) -> float:
    """How many trials it takes to ``goal``; inf where the curve never gets there."""
    return next((i for i, best in enumerate(curve, 1) if best <= goal), math.inf)


def curves(strategy: Strategy, table: Table, trials: int, seeds: int) -> list[list[float]]:
    """Best so far after each trial, of each seed."""
    return [list(strategy(table, trials, seed)) for seed in range(seeds)]


def costs(table: Table, name: str, runs: Sequence[Sequence[float]]) -> list[Cost]:
    """Trials of a strategy's runs to each slack."""
    goals = [(slack, table.best * (1 + slack)) for slack in SLACKS]
    return [Cost(name, slack, tuple(trials_to(run, goal) for run in runs)) for slack, goal in goals]


def report(table: Table, found: Sequence[Cost]) -> str:
    """A line a strategy and slack; shares are of the table's configs."""
    count = len(table.entries)
    failed = sum(ms is None for _, ms in table.entries)
    lines = [f"{table.name}: {count} configs, {failed} of them fail, best {table.best:.5g} ms"]
    lines.append(
        f"{'strategy':14} {'within':>7} {'median':>8} {'of all':>7} {'p90':>8} {'missed':>7}"
    )
    for cost in found:
        missed = sum(math.isinf(n) for n in cost.trials) / len(cost.trials)
        share = f"{cost.median / count:.1%}" if math.isfinite(cost.median) else "-"
        lines.append(
            f"{cost.strategy:14} {cost.slack:7.0%} {_count(cost.median):>8} {share:>7} "
            f"{_count(cost.p90):>8} {missed:7.0%}"
        )
    return "\n".join(lines)


def _count(n: float) -> str:
    return f"{n:g}" if math.isfinite(n) else "never"


def plot(table: Table, runs: dict[str, list[list[float]]], path: Path) -> None:
    """Distance from the table's best over trials: median of the seeds, and the middle 80%."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise UsageError("--plot needs matplotlib (extra 'plot')") from None
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for name, many in runs.items():
        length = max(map(len, many))
        padded = [run + run[-1:] * (length - len(run)) for run in many]
        by_trial = [sorted(step) for step in zip(*padded, strict=True)]
        low, middle, high = (
            [100 * (step[int(q * (len(step) - 1))] / table.best - 1) for step in by_trial]
            for q in (0.1, 0.5, 0.9)
        )
        at = range(1, length + 1)
        (line,) = axes.plot(at, middle, label=name)
        axes.fill_between(at, low, high, color=line.get_color(), alpha=0.2, linewidth=0)
    for slack in SLACKS:
        axes.axhline(100 * slack, color="grey", linewidth=0.8, linestyle=":")
    axes.set(xscale="log", xlabel="trials", ylabel="% slower than the table's best", ylim=(0, 60))
    axes.set_title(f"{table.name}: {len(table.entries)} configs")
    axes.legend()
    figure.savefig(path, dpi=150)


def _named(text: str) -> Callable[..., Iterable[float]]:
    module, _, function = text.partition(":")
    try:
        found: Any = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise UsageError(f"--ours must be MODULE:FUNCTION, got {text!r}: {error}") from None
    replay: Callable[..., Iterable[float]] = found
    return replay


def main(argv: Sequence[str] | None = None) -> int:
    """Exit codes: 0 done, 2 cannot be done."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.search_cost", description=(__doc__ or "").split("\n")[0]
    )
    add = parser.add_argument
    add("tables", nargs="+", type=Path, metavar="TABLE.json")
    add("--seeds", type=int, default=50, metavar="N", help="runs of each strategy (default 50)")
    add("--trials", type=int, metavar="N", help="stop ours after N (default: the whole table)")
    add("--ours", default=OURS, metavar="MODULE:FUNCTION", help="'' leaves it out")
    add("--plot", type=Path, metavar="FILE.png", help="best so far over trials, of one table")
    add("--json", type=Path, metavar="FILE", help="write the numbers of trials of each seed")
    args = parser.parse_args(argv)
    try:
        if args.plot and len(args.tables) > 1:
            raise UsageError(f"--plot must come with one table, got {len(args.tables)}")
        if args.seeds < 1 or (args.trials or 1) < 1:
            raise UsageError("--seeds and --trials must be 1 or more")
        strategies: dict[str, Strategy] = {"brute force": brute_force, "random": at_random}
        if args.ours:
            strategies["ours"] = ours(_named(args.ours))
        written = {}
        for path in args.tables:
            table = tables.read(path)
            runs = _runs(strategies, table, args.trials, args.seeds)
            found = [cost for name, many in runs.items() for cost in costs(table, name, many)]
            print(report(table, found))
            written[table.name] = [dataclasses.asdict(cost) for cost in found]
            if args.plot:
                plot(table, runs, args.plot)
        if args.json:
            args.json.write_text(json.dumps(written, indent=1) + "\n")
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _runs(
    strategies: dict[str, Strategy], table: Table, trials: int | None, seeds: int
) -> dict[str, list[list[float]]]:
    """Only what is random is run more than once, and only ours is stopped early."""
    count = len(table.entries)
    return {
        name: curves(
            strategy,
            table,
            min(trials or count, count) if name == "ours" else count,
            1 if strategy is brute_force else seeds,
        )
        for name, strategy in strategies.items()
    }


if __name__ == "__main__":
    sys.exit(main())
