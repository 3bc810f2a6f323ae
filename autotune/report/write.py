"""``--report DIR``: an HTML page and PNGs for each kernel, from stored searches.

Every page reads without JavaScript and without a network: pictures are PNGs with words for who
cannot see them. With JavaScript the same data can be opened as Optuna's interactive figures, drawn
by the one ``plotly.min.js`` that lies beside the pages.
"""

from __future__ import annotations

import importlib.util
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import optuna

from autotune.report import interactive
from autotune.report.page import PLOTLY, Html, escape, page, table

if TYPE_CHECKING:
    from autotune.report.drawing import Picture
    from autotune.report.searched import Searched

_MOST_ROWS = 40  # failures listed a problem


def check_ready(folder: Path) -> None:
    """Raise ValueError where no report could be written into ``folder``, before time is spent."""
    for name in ("matplotlib", "plotly"):
        if importlib.util.find_spec(name) is None:
            raise ValueError(
                f"autotune: --report needs {name}, got none; pip install 'tkernels[plot]'"
            )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise _not_writable(folder, error) from None


def write_report(studies: Sequence[optuna.Study], folder: Path) -> Path:
    """Write ``index.html``, a page a kernel and their pictures into ``folder``; returns the index.

    A kernel has a page for each architecture, and one of its own for what was only estimated.
    Files of an earlier report are replaced. Raises ValueError where the folder cannot be written or
    a library for drawing is missing.
    """
    check_ready(folder)
    from autotune.report import drawing, pictures_of_kernel, searched

    groups: dict[tuple[str, str, bool], list[Searched]] = {}
    for study in studies:
        s = searched.read(study)
        groups.setdefault((s.kernel, s.arch, s.offline), []).append(s)
    _write(folder / PLOTLY, interactive.plotly_js())
    entries = []
    taken: set[str] = set()
    with drawing.style():
        for (kernel, arch, offline), own in sorted(groups.items()):
            stem = _free(f"{kernel}-{arch}{'-offline' if offline else ''}", taken)
            title = f"{kernel} on {arch}{', estimated offline' if offline else ''}"
            _write(folder / f"{stem}.html", _kernel_page(title, stem, own, folder))
            entries.append((title, f"{stem}.html", own))
        shown = pictures_of_kernel.overview([(title, own) for title, _, own in entries])
    index = folder / "index.html"
    _write(index, _index_page(entries, shown, folder))
    return index


# ---- pages -------------------------------------------------------------------------------------


def _index_page(
    entries: Sequence[tuple[str, str, Sequence[Searched]]], shown: Picture | None, folder: Path
) -> str:
    from autotune.report.searched import median_gain

    header = ("kernel", "problems", "configs tried", "failed", "wrong", "median gain", "least gain")
    rows = []
    for title, href, own in entries:
        gains = [s.gain for s in own if s.gain is not None]
        rows.append(
            (
                Html(f'<a href="{escape(href)}">{escape(title)}</a>'),
                len(own),
                sum(len(s.tried) for s in own),
                sum(sum(s.failures.values()) for s in own),
                sum(s.failures.get("wrong", 0) for s in own),
                _times(median_gain(own)),
                _times(min(gains, default=None)),
            )
        )
    body = [_picture(shown, "index", folder), table(header, rows)]
    if any(s.offline for _, _, own in entries for s in own):
        body.append(
            "<p>Pages marked “estimated offline” hold what a model says of compiled code. Nothing "
            "was run for them.</p>"
        )
    if not entries:
        body = ["<p>The storage holds no search.</p>"]
    return page("Tuning report", "".join(body))


def _kernel_page(title: str, stem: str, own: Sequence[Searched], folder: Path) -> str:
    from autotune.report import pictures, pictures_of_kernel, searched

    body = ['<p><a href="index.html">All kernels</a></p>']
    if own[0].offline:
        body.append(
            '<p class="note">Nothing on this page was run: every number of microseconds is an '
            "estimate by a stated model of compiled code.</p>"
        )
    if own[0].arch == "interpret":
        body.append(f'<p class="note">{_INTERPRETED}</p>')
    body.append(_summary(own))
    for drawn in (pictures_of_kernel.gains(own), pictures_of_kernel.roofline(own)):
        body.append(_picture(drawn, stem, folder))
    for i, s in enumerate(own):
        here = f"{stem}-{i + 1}"
        shares = searched.importance(s)
        shown = [_picture(p, here, folder) for p in pictures.of_problem(s, shares)]
        body.append(
            f'<section id="p{i + 1}"><h2>{escape(s.case)}</h2>{_facts(s)}{_leaders(s)}'
            f"{''.join(shown)}{_failed(s)}{interactive.figures(s, here)}</section>"
        )
    return page(title, "".join(body))


def _summary(own: Sequence[Searched]) -> str:
    noun = own[0].noun
    header = (
        *("problem", "configs", "failed", f"default, {noun} (µs)", f"kept, {noun} (µs)", "gain"),
        *("of roof", "config"),
    )
    rows = []
    for i, s in enumerate(own):
        share = s.roof_share(s.us) if s.us else None
        kept = "none" if s.config is None else _config(s.config)
        if s.config == s.default_config:
            kept = f"the default: {kept}"
        rows.append(
            (
                Html(f'<a href="#p{i + 1}">{escape(s.case)}</a>'),
                len(s.tried),
                sum(s.failures.values()),
                _us(s.default_us),
                _us(s.us),
                _times(s.gain) + ("" if s.finished else " so far"),
                "" if share is None else f"{share:.0%}",
                kept,
            )
        )
    return table(header, rows)


def _facts(s: Searched) -> str:
    state = "finished" if s.finished else "not finished"
    words = [f"{len(s.tried)} configs, {state}"]
    if s.lost:
        words.append(f"{s.lost} trials lost with a tuner that was killed")
    apart = ("offline", "roof")
    words += [f"{name} {value}" for name, value in s.fingerprint.items() if name not in apart]
    return f"<p>{escape('; '.join(words))}.</p>"


def _leaders(s: Searched) -> str:
    """The table of the best configs, and the default."""
    from autotune.report.pictures import leaders
    from autotune.report.searched import shown, values_of

    best = leaders(s)
    if not best:
        return "<p>No config has a number yet.</p>"
    values = values_of(s)
    keys = [name for name, tried in values.items() if len(tried) > 1]
    facts = [n for n in ("registers", "spills", "shared_bytes") if any(n in t.facts for t in best)]
    noun = s.noun
    header = (
        *("rank", f"{noun} (µs)", "noise", "against default", "of roof", "found by"),
        *(*keys, *(name.replace("_", " ") for name in facts)),
    )
    places = {t.place: i + 1 for i, t in enumerate(s.ranked)}
    rows = []
    for t in best:
        share = s.roof_share(t.us) if t.us else None
        against = s.default_us / t.us if s.default_us and t.us else None
        kept = " (kept)" if t.config == s.config else ""
        rows.append(
            (
                f"{places[t.place]}{kept}",
                _us(t.us),
                "" if t.noise is None else f"{t.noise:.1%}",
                _times(against),
                "" if share is None else f"{share:.0%}",
                t.origin,
                *(shown(t.config, name) for name in keys),
                *(t.facts.get(name, "") for name in facts),
            )
        )
    same = [f"{n}={tried[0]}" for n, tried in values.items() if len(tried) == 1]
    words = f"<p>The same in all: {escape(', '.join(same))}.</p>" if same and keys else ""
    ranks = "" if s.offline else _RANKS
    return f"<h3>Best configs</h3>{table(header, rows)}{words}{ranks}"


_INTERPRETED = "The interpreter ran the kernel on a CPU: its times say nothing of any device."
_RANKS = (
    "<p>Ranks are by the first measurement. At the end the best are measured anew, taking turns "
    "with the default; the kept one is the simplest of those that are as fast. Noise: width of the "
    "middle 60% of the blocks of a measurement.</p>"
)


def _failed(s: Searched) -> str:
    """Kinds of failures, how many, and what was said."""
    failed = [t for t in s.tried if t.kind != "ok"]
    if not failed:
        return ""
    first = sorted(failed, key=lambda t: t.kind != "wrong")
    rows = [(t.kind, t.message, _config(t.config)) for t in first[:_MOST_ROWS]]
    more = len(failed) - len(rows)
    words = f"<p>And {more} more.</p>" if more else ""
    wrong = s.failures.get("wrong", 0)
    loud = f'<p class="wrong">{wrong} configs computed something WRONG.</p>' if wrong else ""
    listed = table(("kind", "message", "config"), rows)
    return (
        f"{loud}<details><summary>{len(failed)} configs that failed</summary>{listed}{words}"
        "</details>"
    )


# ---- files and words ---------------------------------------------------------------------------


def _picture(picture: Picture | None, stem: str, folder: Path) -> str:
    """Write the PNG, return the HTML that shows it."""
    if picture is None:
        return ""
    name = f"{_file_name(stem)}-{picture.name}.png"
    _write(folder / name, picture.png)
    caption = f"<figcaption>{escape(picture.caption)}</figcaption>" if picture.caption else ""
    width, height = (int.from_bytes(picture.png[at : at + 4], "big") for at in (16, 20))
    return (
        f"<h3>{escape(picture.title)}</h3>"
        f'<figure><img src="{escape(name)}" alt="{escape(picture.alt)}" width="{width}" '
        f'height="{height}" loading="lazy">{caption}</figure>'
    )


def _free(name: str, taken: set[str]) -> str:
    """A file name from ``name`` that is not in ``taken``; it is added."""
    stem = _file_name(name)
    while stem in taken:
        stem += "-2"
    taken.add(stem)
    return stem


def _file_name(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip(".-") or "kernel"


def _config(config: dict[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in config.items())


def _us(us: float | None) -> str:
    from autotune.report.drawing import number

    return "" if us is None else number(us)


def _times(gain: float | None) -> str:
    return "" if gain is None else f"{gain:.3f}x"


def _write(path: Path, content: str | bytes) -> None:
    try:
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    except OSError as error:
        raise _not_writable(path.parent, error) from None


def _not_writable(folder: Path, error: OSError) -> ValueError:
    return ValueError(
        f"autotune: --report must be a writable folder, got {folder}: {error.strerror}"
    )
