"""What all pictures of a report share: colours, scales, and the PNG with its words.

Colours are Okabe and Ito's, which colour-blind people tell apart; no meaning hangs on colour alone.
"""

from __future__ import annotations

import dataclasses
import io
import math
from collections.abc import Sequence
from typing import Any

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

BLUE, ORANGE, GREEN, RED = "#0072B2", "#E69F00", "#009E73", "#D55E00"
SKY, PINK, GREY, BLACK = "#56B4E9", "#CC79A7", "#8A8A8A", "#000000"
SERIES = (BLUE, ORANGE, GREEN, RED, SKY, PINK, GREY, "#B8A800", BLACK)
MARKERS = "osD^vP*Xh"
MOST_NAMED = 9  # series with a name of their own in a legend

_STYLE = {
    "font.size": 11,
    "axes.titlesize": 12,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#DDDDDD",
    "legend.frameon": False,
    "text.parse_math": False,  # a dollar sign in a name is a dollar sign
    "svg.fonttype": "none",
}
_DPI = 110


@dataclasses.dataclass(frozen=True)
class Picture:
    """A drawn PNG, its title, what it shows in words for who cannot see it, and how to read it."""

    name: str  # of the file, without .png
    title: str
    alt: str
    caption: str
    png: bytes


def new_figure(width: float, height: float, layout: Any = "constrained") -> Figure:
    """An empty figure of so many inches."""
    return Figure(figsize=(width, height), dpi=_DPI, layout=layout)


def finished(figure: Figure, name: str, title: str, alt: str, caption: str = "") -> Picture:
    """``figure`` as a PNG, with its words."""
    engine = figure.get_layout_engine()
    if engine is not None:  # savefig would draw once more to find a renderer for it
        engine.execute(figure)
        figure.set_layout_engine("none")
    buffer = io.BytesIO()
    FigureCanvasAgg(figure).print_png(buffer, metadata={"Software": None})
    return Picture(name, title, alt, caption, buffer.getvalue())


def style() -> Any:
    """The context in which the functions below draw."""
    return matplotlib.rc_context(_STYLE)


def number(value: float) -> str:
    """Three significant digits without an exponent, for people."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:,.{digits}f}"


def short(text: str, most: int = 44) -> str:
    """``text`` cut in its middle, where it is too long for an axis."""
    if len(text) <= most:
        return text
    return f"{text[: most // 2]}…{text[-(most // 2 - 1) :]}"


def colour_scale(low: float, high: float) -> Any:
    """Colours over a range: even in factors where it is wide."""
    if high / low < 3:
        return matplotlib.colors.Normalize(low, max(high, low * 1.001))
    return matplotlib.colors.LogNorm(low, high)


def label_bar(bar: Any, words: str) -> None:
    """Words and plain numbers beside a colour bar."""
    bar.set_label(words)
    bar.ax.yaxis.set_major_formatter(plain())
    bar.ax.yaxis.set_minor_locator(NullLocator())
    if bar.norm.vmax / bar.norm.vmin >= 3:
        bar.ax.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))


def plain() -> FuncFormatter:
    """Ticks as plain numbers, never as powers of ten."""
    return FuncFormatter(lambda value, _: f"{value:,.9f}".rstrip("0").rstrip("."))


def scale(axis: Any, values: Sequence[float]) -> None:
    """Logarithmic where the values span much, with ticks that are plain numbers."""
    if max(values) / min(values) < 3:
        axis.set_major_formatter(plain())
        return
    axis.axes.set_yscale("log") if axis.axis_name == "y" else axis.axes.set_xscale("log")
    wide = max(values) / min(values) > 300
    axis.set_major_locator(LogLocator(subs=(1.0,) if wide else (1.0, 2.0, 5.0)))
    axis.set_major_formatter(plain())
    axis.set_minor_locator(NullLocator())
