"""What is made of measured rows: the table on screen, a comparison, the README table, a chart."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from bench.rows import OURS, RESULTS, Document, Row, UsageError, load, write_text

README = Path(__file__).resolve().parents[1] / "README.md"
BEGIN, END = "<!-- bench:begin -->", "<!-- bench:end -->"

# ---- on screen -------------------------------------------------------------------------------

_COLUMNS = (
    *("kernel", "case", "cache", "provider", "us", "p20..p80", "GB/s", "TFLOP/s", "roof"),
    *("vs best peer", "method", "config"),
)
_GAIN = "vs default"  # a column where a tuned config served
_NUMBERS = frozenset(
    {"us", "p20..p80", "GB/s", "TFLOP/s", "roof", "vs default", "change", "old us"}
    | {"launches", "call us", "bare us", "over us"}
    | {"batch", "out", "TTFT ms", "ms/token", "p99 ms", "tok/s", "of roof", "same"}
    | {"tokens", "experts", "least", "q10..q90", "of copy", "of torch", "of bf16"}
)


def print_rows(rows: Sequence[Row], file: TextIO) -> None:
    """All rows as a table, in the order measured."""
    header, cells = list(_COLUMNS), [_cells(row) for row in rows]
    if any(row.gain is not None for row in rows):
        at = header.index("vs best peer")
        header.insert(at, _GAIN)
        for row, line in zip(rows, cells, strict=True):
            line.insert(at, "" if row.gain is None else f"{row.gain:.3f}x")
    print_table(header, cells, file)


def _cells(row: Row) -> list[str]:
    versus = "" if row.ratio is None else f"{row.ratio:.2f}x {row.best_peer}"
    config = " ".join(f"{k}={v}" for k, v in (row.config or {}).items())
    return [
        row.kernel,
        row.case,
        row.cache,
        row.provider,
        _us(row.ms),
        f"{_us(row.p20)}..{_us(row.p80)}",
        f"{row.gbps:.1f}",
        f"{row.tflops:.3g}",
        f"{row.roof_share:.1%}",
        versus,
        row.method,
        f"{config} ({row.config_source})" if config else "",
    ]


def _us(ms: float) -> str:
    return f"{1e3 * ms:.2f}"


def print_table(header: Sequence[str], cells: Sequence[Sequence[str]], file: TextIO) -> None:
    """A table with numbers to the right: by rich on a terminal, else as plain aligned text."""
    if file.isatty() and importlib.util.find_spec("rich") is not None:
        from rich.console import Console
        from rich.table import Table

        table = Table()
        for name in header:
            table.add_column(name, justify="right" if name in _NUMBERS else "left")
        for row in cells:
            table.add_row(*row)
        Console(file=file).print(table)
        return
    widths = [max(map(len, column)) for column in zip(header, *cells, strict=True)]
    for row in (header, *cells):
        parts = [
            text.rjust(width) if name in _NUMBERS else text.ljust(width)
            for name, text, width in zip(header, row, widths, strict=True)
        ]
        print("  ".join(parts).rstrip(), file=file)


# ---- before and after ------------------------------------------------------------------------


def within_noise(old: Row, new: Row) -> bool:
    """Whether the two ranges from the 20th to the 80th percentile overlap."""
    return new.p20 <= old.p80 and old.p20 <= new.p80


def compare(old: Sequence[Row], new: Sequence[Row]) -> list[list[str]]:
    """For each row of ``new`` that ``old`` has too: what it is, both times, change and verdict."""
    before = {row.key: row for row in old}
    lines = []
    for row in new:
        was = before.get(row.key)
        if was is None:
            continue
        verdict = "~ noise"
        if not within_noise(was, row):
            verdict = "faster" if row.ms < was.ms else "SLOWER"
        change = f"{100 * (row.ms / was.ms - 1):+.1f}%"
        lines.append([*row.key[:3], row.cache, _us(was.ms), _us(row.ms), change, verdict])
    return lines


def print_comparison(old: Sequence[Row], new: Sequence[Row], file: TextIO) -> None:
    """The comparison as a table, and in words what is not comparable."""
    lines = compare(old, new)
    header = ("kernel", "case", "provider", "cache", "old us", "us", "change", "")
    if lines:
        print_table(header, lines, file)
    print(
        f"{len(lines)} rows compared; '~ noise' where the p20..p80 ranges overlap; "
        f"{len(new) - len(lines)} new, {len({r.key for r in old} - {r.key for r in new})} only in "
        "the old file",
        file=file,
    )
    devices = sorted({r.device for r in old}), sorted({r.device for r in new})
    if devices[0] != devices[1]:
        print(
            f"not the same device: old {', '.join(devices[0])}; new {', '.join(devices[1])}",
            file=file,
        )


# ---- README ----------------------------------------------------------------------------------


def readme_table(folder: Path = RESULTS) -> str:
    """Markdown for README: a table for each card, one line for each of our rows."""
    by_card: dict[tuple[str, str], list[Row]] = {}
    for path in sorted(folder.glob("*.json")):
        for row in load(path).rows:
            if row.provider == OURS:
                by_card.setdefault((row.arch, row.device), []).append(row)
    blocks = [_readme_block_of(*card, rows) for card, rows in sorted(by_card.items())]
    if not blocks:
        return "no results yet"
    legend = (
        "us: median of one call. ratio: time of the best peer over ours, from one run. of roof: "
        "share of the measured copy bandwidth (or bf16 matmul rate) of the card; in a hot cache, "
        "and with int8 products, it may pass 100%. cold: buffers rotate through more than twice "
        "the L2 cache; warm: through less; hot: one set of buffers."
    )
    if any(row.gain is not None for rows in by_card.values() for row in rows):
        legend += (
            " default us: with the heuristic's config, where a tuned one serves; gain: default us "
            "over us, from one run."
        )
    return "\n\n".join([*blocks, legend])


def _readme_block_of(arch: str, card: str, rows: Sequence[Row]) -> str:
    """The table of one card; columns for the default stand where a tuned config served."""
    tuned = any(row.gain is not None for row in rows)
    head, line = ("default us | gain | ", "---: | ---: | ") if tuned else ("", "")
    return "\n".join(
        [
            f"**{card}** ({arch})",
            "",
            f"| kernel | case | cache | us | {head}best peer | peer us | ratio | of roof | date |",
            f"| --- | --- | --- | ---: | {line}--- | ---: | ---: | ---: | --- |",
            *(_readme_line(row, tuned) for row in sorted(rows, key=_case_order)),
        ]
    )


def _case_order(row: Row) -> tuple[str, str, float]:
    return (row.kernel, row.cache, row.ms)


def _readme_line(row: Row, tuned: bool) -> str:
    peer_us, ratio, peer = "", "", row.best_peer
    if row.ratio is not None:
        # From our own row: the peer's row may have been measured again since.
        peer_us, ratio = _us(row.ms * row.ratio), f"{row.ratio:.2f}"
    default: tuple[str, ...] = ("", "") if tuned else ()
    if row.gain is not None:
        default = _us(row.ms * row.gain), f"{row.gain:.3f}"
    cells = [f"`{row.kernel}`", row.case, row.cache, _us(row.ms), *default, peer, peer_us, ratio]
    return f"| {' | '.join([*cells, f'{row.roof_share:.0%}', row.date[:10]])} |"


def readme_block(text: str) -> tuple[str, str, str]:
    """README split into what is before, inside and behind the markers."""
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise UsageError(f"bench: README.md must hold one {BEGIN} and then one {END}, got others")
    before, rest = text.split(BEGIN)
    inside, after = rest.split(END)
    return before + BEGIN, inside, END + after


def update_readme(readme: Path = README, folder: Path = RESULTS) -> None:
    """Write the table made from ``folder`` between the markers of ``readme``."""
    try:
        text = readme.read_text()
    except OSError as error:
        raise UsageError(
            f"bench: {readme} must be a readable file with the markers, got: {error.strerror}"
        ) from None
    before, _, after = readme_block(text)
    write_text(readme, f"{before}\n{readme_table(folder)}\n{after}")


# ---- chart -----------------------------------------------------------------------------------


def check_plot() -> None:
    """Raise where no chart can be drawn."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError("bench: --plot must have matplotlib installed (tkernels[plot]), got none")


def plot(document: Document, path: Path) -> None:
    """Bars of the share of the roof, grouped by case, a colour for each provider."""
    check_plot()
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = document.rows
    groups = list(dict.fromkeys((row.kernel, row.case, row.cache) for row in rows))
    providers = list(dict.fromkeys(row.provider for row in rows))
    height = 0.8 / max(1, len(providers))
    figure, axes = pyplot.subplots(
        figsize=(9, 1.5 + 0.25 * len(groups) * max(2, len(providers))), layout="constrained"
    )
    for i, provider in enumerate(providers):
        own = [row for row in rows if row.provider == provider]
        at = [groups.index((r.kernel, r.case, r.cache)) + (i + 0.5) * height - 0.4 for r in own]
        axes.barh(at, [100 * r.roof_share for r in own], height, label=provider)
    axes.set_yticks(range(len(groups)), [f"{k}\n{c} {cache}" for k, c, cache in groups])
    axes.invert_yaxis()
    axes.axvline(100, color="black", linewidth=0.8)
    axes.set_xlabel("% of the measured roof")
    axes.set_title(", ".join(sorted({row.device for row in rows})))
    axes.legend()
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise UsageError(f"bench: --plot must be a writable picture file, got: {error}") from None
    finally:
        pyplot.close(figure)
