"""Pictures of one search: each function returns a ``Picture``, or None where there is none."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence

import matplotlib
import numpy as np
from matplotlib.collections import LineCollection
from matplotlib.ticker import FuncFormatter, MaxNLocator

from autotune.report.drawing import (
    BLACK,
    BLUE,
    GREEN,
    GREY,
    MOST_NAMED,
    ORANGE,
    RED,
    SKY,
    Picture,
    colour_scale,
    finished,
    label_bar,
    new_figure,
    number,
    scale,
    short,
)
from autotune.report.searched import Searched, Tried, Value, shown, values_of, varied

_ORIGINS: dict[str, tuple[str, str, str]] = {  # name: colour, marker, words
    "default": (BLACK, "D", "default"),
    "stored": (ORANGE, "s", "stored before"),
    "neighbour": (ORANGE, "P", "of a neighbour"),
    "exhaustive": (SKY, "o", "exhaustive"),
    "random": (GREY, "v", "random"),
    "sampler": (BLUE, "o", "sampler (TPE)"),
    "descent": (GREEN, "^", "descent from the best"),
}
_MOST_CELLS = 24  # values of a key that a table of pairs has room for


def history(s: Searched) -> Picture | None:
    """Every config in the order tried, and the best so far."""
    if not s.tried:
        return None
    figure = new_figure(9, 4.2)
    axes = figure.subplots()
    timed = [t for t in s.tried if t.us is not None]
    for origin, (colour, marker, words) in _ORIGINS.items():
        own = [t for t in timed if t.origin == origin]
        for group, filled in (([t for t in own if t.complete], True), (own, False)):
            group = [t for t in group if t.complete == filled]
            if group:
                axes.scatter(
                    [t.place for t in group],
                    [t.us or math.nan for t in group],
                    s=34,
                    marker=marker,
                    color=colour if filled else "none",
                    edgecolors=colour,
                    label=words if filled else f"{words}, not to the end",
                    zorder=3,
                )
    best = _best_so_far(s)
    if best:
        last = len(s.tried)
        xs, ys = [*(place for place, _ in best), last], [*(us for _, us in best), best[-1][1]]
        axes.step(xs, ys, where="post", color=BLUE, linewidth=1.6, label="best so far")
    if s.default_us is not None:
        axes.axhline(s.default_us, color=BLACK, linestyle="--", linewidth=1)
    failed = [t.place for t in s.tried if t.us is None]
    if failed:
        axes.scatter(
            failed,
            [0.02] * len(failed),
            transform=axes.get_xaxis_transform(),
            marker="x",
            color=RED,
            s=30,
            label="failed",
            clip_on=False,
            zorder=3,
        )
    if timed:
        scale(axes.yaxis, [t.us for t in timed if t.us is not None])
    else:
        axes.set_yticks([])
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlim(0.2, len(s.tried) + 0.8)
    axes.set_xlabel("configs, in the order tried")
    axes.set_ylabel(f"{s.noun} of one call (µs)")
    axes.set_title(f"{s.kernel}, {short(s.case)}: search history")
    figure.legend(loc="outside right upper", fontsize=10)
    alt = f"Search history: {len(s.tried)} configs tried, {len(failed)} of them without a number"
    if best:
        alt += f"; the best {s.noun} fell from {number(best[0][1])} to {number(best[-1][1])} µs"
        alt += f", reached with config {best[-1][0]}"
    caption = "Dashed: the default. Hollow: stopped early because others were faster."
    return finished(figure, "history", "Search history", alt + ".", caption)


def _best_so_far(s: Searched) -> list[tuple[int, float]]:
    """(place, microseconds) of each config that was faster than all before it."""
    steps: list[tuple[int, float]] = []
    for t in s.tried:
        if t.complete and t.us is not None and (not steps or t.us < steps[-1][1]):
            steps.append((t.place, t.us))
    return steps


def importances(s: Searched, shares: Mapping[str, float]) -> Picture | None:
    """Bars of the importance of each key."""
    if not shares:
        return None
    figure = new_figure(7.5, 1.3 + 0.36 * len(shares))
    axes = figure.subplots()
    names = list(shares)
    bars = axes.barh(range(len(names)), [shares[n] for n in names], 0.65, color=BLUE)
    axes.bar_label(bars, [f"{shares[n]:.0%}" for n in names], padding=4)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set_xlim(0, 1.15 * max(shares.values()))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:.0%}"))
    axes.set_xlabel(f"share of what decides the {s.noun}")
    axes.set_title(f"{s.kernel}, {short(s.case)}: importance of each key")
    alt = "Importance: " + ", ".join(f"{n} {share:.0%}" for n, share in shares.items()) + "."
    caption = (
        "PED-ANOVA of Optuna: how much the values of a key among the fastest tenth differ from "
        "those among all complete configs. Few configs make it rough."
    )
    return finished(figure, "importance", "Importance of each key", alt, caption)


def parallel(s: Searched) -> Picture | None:
    """Every complete config as a line through the values of its keys."""
    axes_of = varied(s)
    ranked = s.ranked
    if not axes_of or not ranked:
        return None
    wide = max(len(name) for name in axes_of) > 9
    figure = new_figure(max(7.0, 1.8 + 1.25 * len(axes_of)), 4.9 if wide else 4.6)
    axes = figure.subplots()
    names = list(axes_of)
    spread = random.Random(0)
    us = [t.us for t in ranked if t.us is not None]
    norm = colour_scale(us[0], us[-1])
    colours = matplotlib.colormaps["cividis_r"]
    lines = [
        [(i, _height(axes_of[n], shown(t.config, n), spread)) for i, n in enumerate(names)]
        for t in reversed(ranked)
    ]
    drawn = colours(norm(us[::-1]))
    axes.add_collection(LineCollection(lines, colors=drawn, linewidths=1, alpha=0.75))
    marked = [(ranked[0].config, RED, "-", "best")]
    if s.default_config != ranked[0].config:
        marked.append((s.default_config, BLACK, "--", "default"))
    if s.config is not None and s.config not in (ranked[0].config, s.default_config):
        marked.append((s.config, GREEN, "-.", "kept (measured anew)"))
    for config, colour, dash, words in marked:
        ys = [_height(axes_of[n], shown(config, n), None) for n in names]
        axes.plot(range(len(names)), ys, color=colour, linestyle=dash, linewidth=2.4, label=words)
    for i, name in enumerate(names):
        axes.axvline(i, color="#555555", linewidth=0.8, zorder=1)
        for value in _named(axes_of[name]):
            axes.text(
                i + 0.04,
                _height(axes_of[name], value, None),
                str(value),
                fontsize=9,
                va="center",
                bbox={"facecolor": "white", "alpha": 0.75, "edgecolor": "none", "pad": 0.6},
            )
    axes.set_xticks(range(len(names)), names)
    if wide:
        axes.tick_params(axis="x", rotation=15)
    axes.set_yticks([])
    axes.set_xlim(-0.15, len(names) - 1 + 0.6)
    axes.grid(visible=False)
    axes.spines[["left", "bottom"]].set_visible(False)
    axes.set_title(f"{s.kernel}, {short(s.case)}: complete configs, a line each")
    bar = figure.colorbar(matplotlib.cm.ScalarMappable(norm, colours), ax=axes, pad=0.02)
    label_bar(bar, f"{s.noun} of one call (µs)")
    figure.legend(loc="outside lower center", ncols=3, fontsize=10)
    best = ", ".join(f"{n} {shown(ranked[0].config, n)}" for n in names)
    alt = f"Parallel coordinates of {len(ranked)} configs over {len(names)} keys; best: {best}."
    return finished(figure, "parallel", "Configs side by side", alt, _single_words(s))


def _height(values: Sequence[Value], value: Value, spread: random.Random | None) -> float:
    """Place of a value on its axis, from 0 to 1; a little off it, so that lines stay apart."""
    if value not in values:
        return 0.5
    step = 1 / (len(values) - 1)
    off = 0.0 if spread is None else spread.uniform(-0.12, 0.12) * step
    return values.index(value) * step + off


def _named(values: Sequence[Value], most: int = 12) -> Sequence[Value]:
    """Values that are written at an axis: all, or evenly some of many."""
    if len(values) <= most:
        return values
    places = {round(i * (len(values) - 1) / (most - 1)) for i in range(most)}
    return [values[i] for i in sorted(places)]


def _single_words(s: Searched) -> str:
    single = [f"{name}={values[0]}" for name, values in values_of(s).items() if len(values) == 1]
    return f"The same in all: {', '.join(single)}." if single else ""


def slices(s: Searched) -> Picture | None:
    """For each key, every complete config over the key's value, and the best of each value."""
    keys = varied(s)
    complete = s.ranked
    if not keys or len(complete) < 2:
        return None
    columns = min(3, len(keys))
    lines = math.ceil(len(keys) / columns)
    width, height = 3.4 * columns + 0.6, 0.7 + 2.5 * lines
    # Its frames have one size; to let matplotlib find it out takes longer than all else.
    figure = new_figure(width, height, layout="none")
    figure.subplots_adjust(0.85 / width, 0.45 / height, 1 - 0.1 / width, 1 - 0.75 / height)
    figure.subplots_adjust(wspace=0.08, hspace=0.42)
    grid = figure.subplots(lines, columns, squeeze=False, sharey=True)
    spread = random.Random(0)
    us = [t.us for t in complete if t.us is not None]
    alts = []
    for axes, (name, values) in zip(grid.flat, keys.items(), strict=False):
        own = [shown(t.config, name) for t in complete]
        at = [values.index(value) + spread.uniform(-0.15, 0.15) for value in own]
        axes.plot(at, us, "o", color=BLUE, alpha=0.45, markersize=4.5)
        best = dict(zip(reversed(own), reversed(us), strict=True))  # the fastest come first
        ordered = [v for v in values if v in best]
        axes.plot(
            [values.index(v) for v in ordered],
            [best[v] for v in ordered],
            "_-",
            color=RED,
            linewidth=1.3,
            markersize=11,
            markeredgewidth=2,
        )
        named = _named(values, 7)
        axes.set_xticks([values.index(v) for v in named], [short(str(v), 12) for v in named])
        if sum(len(str(v)) for v in named) > 26:
            axes.tick_params(axis="x", rotation=30)
        axes.set_xlim(-0.5, len(values) - 0.5)
        axes.set_title(name, fontsize=11)
        axes.grid(axis="x", visible=False)
        alts.append(f"{name} {min(best, key=lambda v: best[v])}")
    for axes in grid.flat[len(keys) :]:
        axes.set_visible(False)
    scale(grid.flat[0].yaxis, us)
    figure.supylabel(f"{s.noun} of one call (µs)", fontsize=11, x=0.15 / width)
    title = f"{s.kernel}, {short(s.case)}: key by key"
    figure.suptitle(title, fontsize=12, ha="left", x=0.15 / width, y=1 - 0.12 / height)
    alt = f"{s.noun.capitalize()} over the value of each key; lowest at {', '.join(alts)}."
    caption = "A dot is a complete config; the red line joins the best of each value."
    return finished(figure, "slices", "Key by key", alt, caption)


def pair(s: Searched, shares: Mapping[str, float]) -> Picture | None:
    """The best of each pair of values of the two keys that matter most."""
    keys = {name: values for name, values in varied(s).items() if len(values) <= _MOST_CELLS}
    names = [n for n in shares if n in keys][:2]
    names += [n for n in sorted(keys, key=lambda n: -len(keys[n])) if n not in names]
    if len(names) < 2 or len(s.ranked) < 4:
        return None
    x, y = names[:2]
    table = np.full((len(keys[y]), len(keys[x])), np.nan)
    failed: set[tuple[int, int]] = set()
    for t in s.tried:
        at = keys[y].index(shown(t.config, y)), keys[x].index(shown(t.config, x))
        if t.complete:
            table[at] = np.nanmin([table[at], t.us])
        else:
            failed.add(at)
    figure = new_figure(2.6 + 0.72 * max(4, len(keys[x])), 1.9 + 0.42 * max(3, len(keys[y])))
    axes = figure.subplots()
    low = float(np.nanmin(table))
    norm = colour_scale(low, float(np.nanmax(table)))
    image = axes.imshow(table, cmap="cividis_r", norm=norm, aspect="auto", origin="lower")
    for (row, column), us in np.ndenumerate(table):
        if np.isfinite(us):
            dark = norm(us) > 0.55
            axes.text(
                column,
                row,
                number(us),
                ha="center",
                va="center",
                fontsize=9,
                color="white" if dark else "black",
                weight="bold" if us == low else "normal",
            )
        elif (row, column) in failed:
            axes.text(column, row, "×", ha="center", va="center", color=RED, fontsize=12)
    axes.set_xticks(range(len(keys[x])), [short(str(v), 12) for v in keys[x]])
    axes.set_yticks(range(len(keys[y])), [short(str(v), 12) for v in keys[y]])
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(visible=False)
    axes.set_title(f"{s.kernel}, {short(s.case, 36)}:\nbest of each pair")
    label_bar(figure.colorbar(image, ax=axes), f"best {s.noun} (µs)")
    row, column = np.unravel_index(np.nanargmin(table), table.shape)
    alt = (
        f"Best {s.noun} for each pair of {x} and {y}; lowest {number(low)} µs at "
        f"{x} {keys[x][int(column)]}, {y} {keys[y][int(row)]}."
    )
    caption = "×: only failures or configs that were stopped early. Blank: not tried."
    return finished(figure, "pair", f"{x} with {y}", alt, caption)


def failures(s: Searched) -> Picture | None:
    """Bars of how many configs failed, by kind."""
    counts = s.failures
    if not counts:
        return None
    figure = new_figure(7.5, 1.4 + 0.36 * len(counts))
    axes = figure.subplots()
    kinds = list(counts)
    colours = [RED if kind == "wrong" else ORANGE for kind in kinds]
    bars = axes.barh(range(len(kinds)), [counts[k] for k in kinds], 0.65, color=colours)
    axes.bar_label(bars, padding=4)
    axes.set_yticks(range(len(kinds)), ["WRONG" if k == "wrong" else k for k in kinds])
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlim(0, 1.12 * max(counts.values()))
    axes.set_xlabel(f"configs, of {len(s.tried)} tried")
    axes.set_title(f"{s.kernel}, {short(s.case)}: failures by kind")
    alt = "Failures: " + ", ".join(f"{count} {kind}" for kind, count in counts.items()) + "."
    return finished(figure, "failures", "Failures by kind", alt)


def of_problem(s: Searched, shares: Mapping[str, float]) -> list[Picture]:
    """All pictures of one problem that there is something to see in."""
    drawn = [
        history(s),
        parallel(s),
        importances(s, shares),
        slices(s),
        pair(s, shares),
        failures(s),
    ]
    return [picture for picture in drawn if picture is not None]


def leaders(s: Searched, count: int = MOST_NAMED) -> list[Tried]:
    """The best ``count`` configs, and the default behind them where it is not among them."""
    best = s.ranked[:count]
    rest = [t for t in s.ranked[count:] if t.config == s.default_config]
    return [*best, *rest]
