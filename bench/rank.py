"""How well a model ranks configs, judged by measured times of the same ones.

    python -m bench.rank --measured rope.json --model rope-model.json

Both are tables (``bench.tables``) of one problem. Told are Spearman's rank correlation over the
configs that both have a time for, and regrets: how much slower than the best measured one is the
config that the model puts first, and the fastest of the five that it puts first. Where the model
cannot tell configs apart, the mean over all orders of them counts.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from bench import tables
from bench.rows import UsageError
from bench.tables import Entries, label
from tkernels.registry import Config


@dataclasses.dataclass(frozen=True)
class Ranking:
    """A model against measured times of ``configs`` configs."""

    configs: int
    spearman: float  # NaN where one side cannot tell any two apart
    regret: float  # of the model's first choice; 0.03: 3% slower than the best
    regret_of_five: float
    default_regret: float  # of the default, to compare with; NaN where it was not measured
    unseen_failures: int  # failed, though the model had a time
    false_failures: int  # the model said they fail, and they ran


def rank(model: Entries, measured: Entries, default: Config | None = None) -> Ranking:
    """Compare two tables of one problem. Needs three configs with both times."""
    from scipy.stats import spearmanr

    told, seen = dict(_by_label(model)), dict(_by_label(measured))
    common = [name for name in told if name in seen]
    pairs = _pairs(told, seen)
    if len(pairs) < 3:
        raise UsageError(f"the tables must share 3 configs with times, got {len(pairs)}")
    best = min(s for _, s in pairs)
    varied = all(len(set(side)) > 1 for side in zip(*pairs, strict=True))
    of_default = seen.get(label(default)) if default is not None else None
    return Ranking(
        configs=len(pairs),
        spearman=float(spearmanr(*zip(*pairs, strict=True))[0]) if varied else math.nan,
        regret=expected_best(pairs, 1) / best - 1,
        regret_of_five=expected_best(pairs, 5) / best - 1,
        default_regret=of_default / best - 1 if of_default else math.nan,
        unseen_failures=sum(told[n] is not None and seen[n] is None for n in common),
        false_failures=sum(told[n] is None and seen[n] is not None for n in common),
    )


def _by_label(entries: Entries) -> Iterator[tuple[str, float | None]]:
    return ((label(config), ms) for config, ms in entries)


def _pairs(
    told: Mapping[str, float | None], seen: Mapping[str, float | None]
) -> list[tuple[float, float]]:
    """Both times of each config that has both."""
    both = ((t, seen.get(name)) for name, t in told.items())
    return [(t, s) for t, s in both if t is not None and s is not None]


def expected_best(pairs: Sequence[tuple[float, float]], count: int) -> float:
    """Least measured time among the ``count`` configs that the model puts first.

    ``pairs`` are (model's, measured) times. Of configs that the model holds for equal, each is as
    likely to be among the first ones as the other.
    """
    order = sorted(pairs)
    count = min(count, len(order))
    edge = order[count - 1][0]
    sure = [s for t, s in order if t < edge]
    tied = sorted(s for t, s in order if t == edge)
    free = count - len(sure)
    total = math.comb(len(tied), free)
    least = min(sure, default=math.inf)
    # The i-th fastest of the tied is the fastest drawn where the others come from those behind it.
    return sum(
        min(least, s) * math.comb(len(tied) - i - 1, free - 1) / total for i, s in enumerate(tied)
    )


def plot(model: Entries, measured: Entries, title: str, path: Path) -> None:
    """Measured over estimated times, both logarithmic."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise UsageError("--plot needs matplotlib (extra 'plot')") from None
    pairs = _pairs(dict(_by_label(model)), dict(_by_label(measured)))
    figure = Figure(figsize=(5, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.scatter([t for t, _ in pairs], [s for _, s in pairs], s=8, alpha=0.5)
    axes.axline((min(t for t, _ in pairs),) * 2, slope=1, color="grey", linewidth=0.8)
    axes.set(xscale="log", yscale="log", xlabel="model, ms", ylabel="measured, ms", title=title)
    figure.savefig(path, dpi=150)


def report(name: str, found: Ranking) -> str:
    """One line."""
    return (
        f"{name}: {found.configs} configs, Spearman {found.spearman:.3f}, first choice "
        f"{found.regret:+.1%}, best of five {found.regret_of_five:+.1%}, default "
        f"{found.default_regret:+.1%}; failed unforeseen {found.unseen_failures}, "
        f"foreseen wrongly {found.false_failures}"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Exit codes: 0 done, 2 cannot be done."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.rank", description=(__doc__ or "").split("\n")[0]
    )
    add = parser.add_argument
    add("--measured", type=Path, required=True, metavar="TABLE.json")
    add("--model", type=Path, required=True, metavar="TABLE.json")
    add("--plot", type=Path, metavar="FILE.png", help="measured over estimated times")
    args = parser.parse_args(argv)
    try:
        measured, model = tables.read(args.measured), tables.read(args.model)
        found = rank(model.entries, measured.entries, measured.default)
        print(report(measured.name, found))
        if args.plot:
            plot(model.entries, measured.entries, measured.name, args.plot)
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
