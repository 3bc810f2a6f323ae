"""Pictures of a kernel over all its problems, and of all kernels: gains and the roofline."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from autotune.report.drawing import (
    BLACK,
    BLUE,
    GREEN,
    GREY,
    MARKERS,
    MOST_NAMED,
    RED,
    SERIES,
    Picture,
    finished,
    new_figure,
    number,
    plain,
    short,
)
from autotune.report.searched import Searched


def gains(searches: Sequence[Searched]) -> Picture | None:
    """Tuned against default, two bars a problem."""
    known = [s for s in searches if s.gain is not None and s.us and s.default_us]
    if not known:
        return None
    noun = known[0].noun
    figure = new_figure(9.5, 1.7 + 0.62 * len(known))
    axes = figure.subplots()
    for i, s in enumerate(known):
        assert s.us
        assert s.default_us
        assert s.gain is not None
        share = 100 * s.us / s.default_us
        axes.barh(i - 0.19, 100, 0.36, color=GREY, label="default" if i == 0 else None)
        axes.barh(i + 0.19, share, 0.36, color=BLUE, label="tuned" if i == 0 else None)
        axes.text(101, i - 0.19, f"{number(s.default_us)} µs", va="center", fontsize=10)
        kept = "the default stays" if s.config == s.default_config else f"{s.gain:.3f}x"
        words = f"{number(s.us)} µs, {kept}"
        axes.text(max(share, 0) + 1, i + 0.19, words, va="center", fontsize=10, weight="bold")
    axes.set_yticks(range(len(known)), [short(s.case, 38) for s in known])
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    longest = max(100.0, *(100 * s.us / s.default_us for s in known if s.us and s.default_us))
    axes.set_xlim(0, longest * 1.32)
    axes.set_xticks([t for t in (0, 20, 40, 60, 80, 100) if t <= longest])
    axes.set_xlabel(f"{noun} as a share of the default's (%), shorter is better")
    axes.set_title(f"{known[0].kernel} on {known[0].arch}: tuned against default")
    figure.legend(loc="outside lower center", ncols=2, fontsize=10)
    alt = "Tuned against default: " + "; ".join(
        f"{s.case} {number(s.default_us or 0)} to {number(s.us or 0)} µs, {s.gain:.2f} times"
        for s in known
        if s.gain is not None
    )
    caption = (
        "As the model estimates them; nothing was run."
        if known[0].offline
        else "Both measured anew at the end of a search, taking turns."
    )
    return finished(figure, "gains", "Tuned against default", alt + ".", caption)


def roofline(searches: Sequence[Searched]) -> Picture | None:
    """Every config with a number under the roof, and as a share of the roof for each problem."""
    known = [s for s in searches if s.cost is not None and any(t.us for t in s.tried)]
    if not known:
        return None
    roof = known[0].roof
    if roof is None:
        figure = new_figure(9.5, 4.8)
        above = figure.subplots()
    else:
        share_height = 0.9 + 0.34 * len(known)
        figure = new_figure(9.5, 4.6 + share_height)
        above, below = figure.subplots(2, height_ratios=[4.6, share_height])
        _draw_shares(below, known)
    _draw_rates(above, known, named=roof is None and len(known) <= MOST_NAMED)
    where = "every config" + ("" if roof is None else " under the roof")
    above.set_title(f"{known[0].kernel} on {known[0].arch}: {where}")
    for words, edge in (("default", BLACK), ("kept", RED)):
        above.scatter([], [], s=150, marker="_", color=edge, label=words)
    above.legend(loc="best", fontsize=9.5)
    return finished(figure, "roofline", "Roofline", _roof_alt(known), _roof_words(known))


def _look(i: int, count: int) -> dict[str, Any]:
    """Marker and colour of a problem; of too many problems all have one."""
    if count > MOST_NAMED:
        return {"marker": "o", "color": BLUE}
    return {"marker": MARKERS[i % len(MARKERS)], "color": SERIES[i % len(SERIES)]}


def _draw_rates(axes: Any, known: Sequence[Searched], *, named: bool) -> None:
    """Operations a second over operations a byte; of kernels without any, bytes a second."""
    with_flops = all(s.cost is not None and s.cost.flops > 0 for s in known)
    xs: list[float] = []
    ys: list[float] = []
    for i, s in enumerate(known):
        assert s.cost is not None
        work, at = s.cost.bytes / 1e9, s.cost.bytes / 1e6
        if with_flops:
            work, at = s.cost.flops / 1e12, s.cost.flops / s.cost.bytes
        rates = [1e6 * work / t.us for t in s.tried if t.us]
        label = short(s.case, 34) if named else None
        look = _look(i, len(known))
        axes.scatter([at] * len(rates), rates, s=24, alpha=0.5, linewidths=0, label=label, **look)
        xs.append(at)
        ys += rates
        for us, edge in ((s.default_us, BLACK), (s.us, RED)):
            if us:
                axes.scatter([at], [1e6 * work / us], s=230, marker="_", color=edge, zorder=4)
    left, right = min(xs) / 2, max(xs) * 2
    roof = known[0].roof
    if roof is not None:
        along = np.geomspace(left, right, 200)
        limit = np.full_like(along, roof.bytes_per_s / 1e9)
        if with_flops:
            limit = np.minimum(along * roof.bytes_per_s, roof.flops_per_s) / 1e12
        axes.plot(along, limit, color=GREEN, linewidth=2, label="roof")
        ys += [float(limit.min()), float(limit.max())]
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(left, right)
    axes.set_ylim(min(ys) / 1.5, max(ys) * 1.5)
    for axis in (axes.xaxis, axes.yaxis):
        low, high = axis.get_view_interval()
        axis.set_major_locator(LogLocator(subs=(1.0,) if high / low > 50 else (1.0, 2.0, 5.0)))
        axis.set_major_formatter(plain())
        axis.set_minor_locator(NullLocator())
    estimated = "estimated " if known[0].offline else ""
    axes.set_xlabel("operations a byte" if with_flops else "least bytes moved (MB)")
    axes.set_ylabel(f"{estimated}TFLOP/s" if with_flops else f"{estimated}GB/s")


def _draw_shares(axes: Any, known: Sequence[Searched]) -> None:
    """A line a problem: the share of the roof that each config reaches."""
    most = 1.0
    for i, s in enumerate(known):
        shares = [share for t in s.tried if t.us and (share := s.roof_share(t.us)) is not None]
        look = _look(i, len(known))
        axes.scatter(shares, [i] * len(shares), s=24, alpha=0.5, linewidths=0, **look)
        for us, edge in ((s.default_us, BLACK), (s.us, RED)):
            share = s.roof_share(us) if us else None
            if share is not None:
                axes.scatter([share], [i], s=200, marker="|", color=edge, zorder=4, linewidths=2)
        most = max([most, *shares])
    axes.axvline(1, color=GREEN, linewidth=2)
    axes.set_yticks(range(len(known)), [short(s.case, 34) for s in known])
    axes.set_ylim(len(known) - 0.5, -0.5)
    axes.set_xlim(0, most * 1.03)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:.0%}"))
    axes.set_xlabel("share of the roof" + (", estimated" if known[0].offline else ""))


def _roof_alt(known: Sequence[Searched]) -> str:
    shares = [(s.case, s.roof_share(s.us)) for s in known if s.us]
    words = "; ".join(f"{case} at {share:.0%}" for case, share in shares if share is not None)
    return f"Roofline of every config; share of the roof of the kept ones: {words or 'unknown'}."


def _roof_words(known: Sequence[Searched]) -> str:
    roof = known[0].roof
    if roof is None:
        return "No roof is known for this architecture."
    return (
        f"Roof: copy {roof.bytes_per_s / 1e9:,.0f} GB/s, matrix multiplication "
        f"{roof.flops_per_s / 1e12:,.0f} TFLOP/s, {roof.source}. What fits a "
        "cache may pass it."
    )


def overview(groups: Sequence[tuple[str, Sequence[Searched]]]) -> Picture | None:
    """The gains of every page: a dot a problem, a bar at their median."""
    known = [(name, [s.gain for s in own if s.gain is not None]) for name, own in groups]
    known = [(name, found) for name, found in known if found]
    if not known:
        return None
    figure = new_figure(8.5, 1.4 + 0.42 * len(known))
    axes = figure.subplots()
    for i, (_, found) in enumerate(known):
        axes.scatter(found, [i] * len(found), s=42, color=BLUE, alpha=0.6, linewidths=0)
        axes.scatter([statistics.median(found)], [i], s=330, marker="|", color=RED, linewidths=2.5)
    axes.axvline(1, color=BLACK, linestyle="--", linewidth=1)
    axes.set_yticks(range(len(known)), [short(name, 60) for name, _ in known])
    axes.set_ylim(len(known) - 0.5, -0.5)
    low, high = axes.get_xlim()
    axes.set_xlim(min(low, 0.97), max(high, 1.05))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:.4g}x"))
    axes.set_xlabel("gain of tuned over default (1x: no gain)")
    axes.set_title("Gain of every problem")
    alt = "Gains: " + "; ".join(
        f"{name} median {statistics.median(found):.2f} times, best {max(found):.2f}"
        for name, found in known
    )
    return finished(figure, "overview", "Gains", alt + ".", "Dot: a problem. Red bar: the median.")
