"""Pictures: decode steps under the roof, kernels of a step, and the engine's scenarios."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.rows import UsageError

_BARS = 14


def _figure(height: float, panels: int) -> tuple[Any, list[Any]]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, height * panels), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, list(figure.subplots(panels, 1, squeeze=False)[:, 0])


def _save(figure: Any, path: Path) -> None:
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise UsageError(f"bench: {path} must be a writable picture file, got: {error}") from None


def roof(document: dict[str, Any], path: Path) -> None:
    """Operations a second over operations a byte: each row a point, below the measured roof."""
    figure, (axes,) = _figure(6, 1)
    bandwidth = document["roof"]["copy_gbps"] / 1e3  # TB/s
    peak = document["roof"]["matmul_tflops"]
    found = [(row, row["step_flops"] / row["step_bytes"]) for row in document["rows"]]
    reach = [x for _, x in found] + [peak / bandwidth]
    line = [min(reach) / 2, peak / bandwidth, max(reach) * 2]
    axes.plot(line, [min(peak, x * bandwidth) for x in line], color="black", label="measured roof")
    shapes = list(dict.fromkeys(row["shape"] for row, _ in found))
    variants = list(dict.fromkeys(row["variant"] for row, _ in found))
    for row, intensity in found:
        colour = f"C{shapes.index(row['shape']) % 10}"
        marker = "os^Dvx"[variants.index(row["variant"]) % 6]
        axes.plot([intensity], [row["tflops"]], marker, color=colour)
        axes.annotate(f" {row['batch']}", (intensity, row["tflops"]), fontsize=7)
    for i, shape in enumerate(shapes):
        axes.plot([], [], "o", color=f"C{i % 10}", label=shape)
    for i, variant in enumerate(variants):
        axes.plot([], [], "os^Dvx"[i % 6], color="grey", label=variant)
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="operations a byte of a decode step (numbers: sequences)",
        ylabel="TFLOP/s",
        title=f"{document['device']}: copy {1e3 * bandwidth:.0f} GB/s, matmul {peak:.3g} TFLOP/s",
    )
    axes.legend(fontsize=8)
    _save(figure, path)


def kernels(profiles: Sequence[tuple[str, dict[str, Any]]], path: Path) -> None:
    """Time by kernel in a decode step, a panel for each profile."""
    figure, panels = _figure(4.5, len(profiles))
    for axes, (title, found) in zip(panels, profiles, strict=True):
        shown = found["kernels"][:_BARS]
        rest = found["kernels"][_BARS:]
        names = [f"{_short(k['name'])} x{k['launches']:g}" for k in shown]
        times = [k["us"] for k in shown]
        if rest:
            names.append(f"{len(rest)} others")
            times.append(sum(k["us"] for k in rest))
        axes.barh(range(len(times)), times)
        for i, us in enumerate(times):
            axes.annotate(f" {us:.1f}", (us, i), va="center", fontsize=7)
        axes.set_yticks(range(len(names)), names, fontsize=7)
        axes.invert_yaxis()
        axes.set_xlabel("us of a step")
        axes.set_title(
            f"{title}: {found['busy_us']:.0f} us of kernels in {found['span_us']:.0f} us, "
            f"idle {found['idle_share']:.1%}",
            fontsize=10,
        )
    _save(figure, path)


def _short(name: str) -> str:
    """A kernel's name without what the compiler put around it."""
    plain = re.sub(r"^void |<.*|\(.*", "", name)
    return plain if len(plain) <= 44 else f"{plain[:20]}...{plain[-21:]}"


def scenarios(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """A panel for each: times of steps, of tokens beside a long prompt, of first tokens."""
    kinds = list(dict.fromkeys(row["scenario"] for row in rows))
    figure, panels = _figure(4, len(kinds))
    draw = {"mixed": _mixed, "chunked": _chunked, "prefix": _prefix}
    for axes, kind in zip(panels, kinds, strict=True):
        draw[kind](axes, [row for row in rows if row["scenario"] == kind])
    _save(figure, path)


def _mixed(axes: Any, rows: Sequence[dict[str, Any]]) -> None:
    row = rows[0]
    axes.plot(row["step_ms"], linewidth=0.6)
    axes.set(xlabel="step", ylabel="ms", yscale="log")
    axes.set_title(
        f"mixed: {row['tokens_per_s']:.0f} tok/s, {row['roof_share']:.1%} of the byte roof",
        fontsize=10,
    )


def _chunked(axes: Any, rows: Sequence[dict[str, Any]]) -> None:
    places = range(len(rows))
    axes.bar([p - 0.2 for p in places], [r["before_p99_ms"] for r in rows], 0.4, label="before")
    axes.bar([p + 0.2 for p in places], [r["during_p99_ms"] for r in rows], 0.4, label="during")
    for p, row in zip(places, rows, strict=True):
        axes.annotate(f"{row['ratio']:.1f}x", (p + 0.2, row["during_p99_ms"]), ha="center")
    axes.set_xticks(places, [str(row["step_tokens"]) for row in rows])
    axes.set(xlabel="tokens of a step, at most", ylabel="p99 of a token, ms")
    axes.set_title(f"chunked: a prompt of {rows[0]['long_prompt']} tokens arrives", fontsize=10)
    axes.legend(fontsize=8)


def _prefix(axes: Any, rows: Sequence[dict[str, Any]]) -> None:
    row = rows[0]
    axes.plot(row["ttft_ms"], ".", label="prefix cache")
    axes.plot(row["off_ttft_ms"], ".", label="without")
    axes.set(xlabel="request", ylabel="time to first token, ms", ylim=(0, None))
    axes.set_title(f"prefix: {row['ratio']:.3f} of the first one's", fontsize=10)
    axes.legend(fontsize=8)
