"""Measured rows: what one row holds, and the JSON documents that carry them.

A document is ``{"schema": 1, "roof": {...}, "rows": [...]}``. What ``--json`` writes and what lies
in ``bench/results/<arch>.json`` have this one form, so either can be compared, plotted or saved.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

SCHEMA = 1
RESULTS = Path(__file__).parent / "results"

OURS = "tkernels"  # as a user gets it, with a tuned config where there is one
DEFAULT = "default"  # ours with the heuristic's config; timed where a tuned one serves
Key = tuple[str, str, str, str]


class UsageError(ValueError):
    """The command line asks for something that cannot be done; the message is one sentence."""


def positive(text: str) -> int:
    """A whole number of a command line, from 1 on."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number >= 1, got {text!r}")
    return int(text)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One provider timed on one case. Times are milliseconds of one call."""

    kernel: str
    case: str
    provider: str  # OURS, DEFAULT, "reference" (eager), "compile" (torch.compile of it), or a peer
    ms: float  # median
    p20: float
    p80: float
    method: str  # "graph", "events" or "host clock"
    cache: str  # "cold": the buffers in rotation exceed twice the L2; "warm": they do not; "hot"
    sets: int  # sets of buffers in rotation
    gbps: float  # the problem's least bytes / time
    tflops: float  # the problem's operations / time
    roof_share: float  # least possible time by the measured roof / time; a hot cache may exceed 1
    config: dict[str, Any] | None  # of our kernel; None for the others
    config_source: str  # "shipped", "TKERNELS_CONFIG_DIR", "heuristic", or "" for the others
    best_peer: str  # on our row: the fastest provider but the eager reference, or ""
    ratio: float | None  # on our row: time of best_peer / ours
    device: str
    arch: str
    versions: dict[str, str]
    commit: str  # "" outside a git checkout; "-dirty" behind it where files were changed
    date: str  # UTC
    gain: float | None = None  # on our row: time of "default" / ours, where a tuned config serves

    @property
    def key(self) -> Key:
        """What makes two rows measurements of the same thing."""
        return (self.kernel, self.case, self.provider, self.cache)


@dataclasses.dataclass(frozen=True)
class Document:
    """Rows of one run (or the latest of several), and the roof they were set against."""

    roof: dict[str, float]
    rows: list[Row]


def dumps(document: Document) -> str:
    """JSON text with one row a line, so that a changed row is a changed line."""
    lines = ",\n".join("  " + json.dumps(dataclasses.asdict(row)) for row in document.rows)
    body = f"[\n{lines}\n ]" if lines else "[]"
    return f'{{"schema": {SCHEMA},\n "roof": {json.dumps(document.roof)},\n "rows": {body}}}\n'


def load(path: Path) -> Document:
    """Read a document; raises ``UsageError`` where the file is not one."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not text"
        raise UsageError(
            f"bench: {path} must be a readable result document, got: {reason}"
        ) from None
    try:
        stored = json.loads(text)
        schema = stored["schema"]
        rows = [_row(entry) for entry in stored["rows"]] if schema == SCHEMA else []
        roof = {str(name): float(value) for name, value in stored["roof"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(
            f"bench: {path} must be a result document of python -m bench, got one that does not "
            f"parse: {type(error).__name__}: {error}"
        ) from None
    if schema != SCHEMA:
        raise UsageError(f"bench: {path} must have schema {SCHEMA}, got {schema}")
    return Document(roof, rows)


def _row(entry: Any) -> Row:
    row = Row(**entry)
    for name in ("ms", "p20", "p80", "gbps", "tflops", "roof_share"):
        if not isinstance(getattr(row, name), int | float):
            raise TypeError(f"{name} of a row is {getattr(row, name)!r}, not a number")
    if not row.ms > 0:
        raise ValueError(f"ms of a row is {row.ms!r}, not above 0")
    for name in ("kernel", "case", "provider", "method", "cache", "best_peer", "device", "arch"):
        if not isinstance(getattr(row, name), str):
            raise TypeError(f"{name} of a row is {getattr(row, name)!r}, not a text")
    for name in ("ratio", "gain"):
        value = getattr(row, name)
        if value is not None and not isinstance(value, int | float):
            raise TypeError(f"{name} of a row is {value!r}, not a number")
    if row.config is not None and not isinstance(row.config, dict):
        raise TypeError(f"config of a row is {row.config!r}, not a mapping")
    return row


def write_text(path: Path, text: str) -> None:
    """Write ``path`` so that a reader sees the old or the new text, never half of one."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    except OSError as error:
        raise UsageError(f"bench: {path} must be a writable file, got: {error.strerror}") from None
    try:
        with os.fdopen(handle, "w") as file:
            file.write(text)
        os.chmod(temporary, 0o644)  # mkstemp makes it private
        os.replace(temporary, path)
    except OSError as error:
        Path(temporary).unlink(missing_ok=True)
        raise UsageError(f"bench: {path} must be a writable file, got: {error.strerror}") from None


def check_writable(path: Path) -> None:
    """Raise now, before minutes are spent on measuring, what writing ``path`` would raise."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise UsageError(f"bench: {path} must be a writable file, got: {error.strerror}") from None
    if path.is_dir():
        raise UsageError(f"bench: {path} must be a writable file, got: a folder")


def check_savable(archs: Iterable[str]) -> None:
    """Raise where a result must not be kept: the interpreter's times mean nothing."""
    if "interpret" in archs:
        raise UsageError(
            "bench: --save must be given measurements of an accelerator, got arch 'interpret' "
            "(the interpreter's times mean nothing)"
        )


def save(document: Document, folder: Path = RESULTS) -> list[Path]:
    """Put each row in place of its predecessor in ``folder/<arch>.json``; returns the files."""
    archs = sorted({row.arch for row in document.rows})
    check_savable(archs)
    paths = []
    for arch in archs:
        path = folder / f"{arch}.json"
        latest = {row.key: row for row in load(path).rows} if path.exists() else {}
        latest.update({row.key: row for row in document.rows if row.arch == arch})
        write_text(path, dumps(Document(document.roof, [latest[k] for k in sorted(latest)])))
        paths.append(path)
    return paths
