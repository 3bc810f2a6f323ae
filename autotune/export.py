"""The only writer of tuned files; ``tkernels.config`` is their reader.

A file holds one entry for each key and chip. What a model estimated never displaces what was
measured, here or when files of several machines are merged.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import shlex
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from autotune.records import Outcome, label_of
from tkernels import config

Entry = dict[str, Any]


def write(folder: Path, outcome: Outcome) -> Path:
    """Put ``outcome`` into ``<folder>/<arch>/<kernel>.json``; returns the path.

    Entries of other keys and chips stay, also those that another process writes at the same time. A
    reader never sees half a file: it is written beside the old one and renamed. Raises ValueError
    where the folder cannot be written or the file that is there is not a tuned file.
    """
    new = entry_of(outcome)
    path = folder / outcome.task.arch / f"{outcome.task.kernel}.json"

    def put(stored: dict[str, Entry]) -> None:
        old = stored.get(identity(new))
        if old is None or new["measured"] or not old["measured"]:
            stored[identity(new)] = new

    _change(path, outcome.task.kernel, outcome.task.arch, put)
    return path


def how_to_use(folder: Path) -> str:
    """What makes programs use the tuned files below ``folder``."""
    if folder.resolve() == config.config_folders()[-1].resolve():
        return "programs use them from now on: they are the package's own"
    return f"programs use them with TKERNELS_CONFIG_DIR={shlex.quote(str(folder))}"


def merge(source: Path, folder: Path) -> list[Path]:
    """Add the tuned files below ``source`` to those in ``folder``; returns what was written.

    Of two entries for one key and chip the better measured one stays (``better``).
    """
    written = []
    for file in sorted(source.glob("*/*.json")):
        arch, kernel, entries = file.parent.name, file.stem, stored_entries(file)

        def put(stored: dict[str, Entry], entries: Mapping[str, Entry] = entries) -> None:
            for name, entry in entries.items():
                stored[name] = better(stored[name], entry) if name in stored else entry

        path = folder / arch / f"{kernel}.json"
        _change(path, kernel, arch, put)
        written.append(path)
    if not written:
        raise ValueError(
            f"autotune: --merge must be a folder with <arch>/<kernel>.json in it, got {source}"
        )
    return written


def better(a: Entry, b: Entry) -> Entry:
    """The entry to keep of two for one key and chip.

    Measured before estimated. Of one config, or of two versions of the kernel, the newer
    measurement. Of two configs the faster one, where they were timed on the same case; else the one
    that gains more over its default. Estimates of two models cannot be compared: the newer stays.
    """
    if bool(a["measured"]) != bool(b["measured"]):
        return a if a["measured"] else b
    facts_a, facts_b = _facts(a), _facts(b)
    newer = b if facts_b.get("date", "") >= facts_a.get("date", "") else a
    others = ("model", "kernel_hash")
    if a["config"] == b["config"] or any(facts_a.get(n) != facts_b.get(n) for n in others):
        return newer
    if facts_a.get("case") == facts_b.get("case"):
        return a if _time(a) <= _time(b) else b
    return a if _gain(a) >= _gain(b) else b


def _facts(entry: Entry) -> Mapping[str, Any]:
    return entry["measured"] or entry.get("estimate") or {}


def _time(entry: Entry) -> float:
    return float(entry["ms"] if entry["measured"] else entry["estimate"]["us"])


def _gain(entry: Entry) -> float:
    if entry["measured"]:
        return float(entry["default_ms"] / entry["ms"])
    return float(entry["estimate"]["default_us"] / entry["estimate"]["us"])


def identity(entry: Entry) -> str:
    """What two entries must not share: the key, and the chip that a time was measured on."""
    return label_of({"key": entry["key"], "chip": config.chip_of(entry)})


def entry_of(outcome: Outcome) -> Entry:
    """The entry that keeps an outcome."""
    entry: Entry = {"key": outcome.task.key, "config": outcome.config}
    if outcome.measured is not None:
        entry["ms"] = round(outcome.ms, 6)
        entry["default_ms"] = round(outcome.default_ms, 6)
        entry["trials"] = outcome.trials
        entry["measured"] = {"case": outcome.task.case, **outcome.measured}
        return entry
    entry["trials"] = outcome.trials
    entry["measured"] = False
    entry["estimate"] = {
        "case": outcome.task.case,
        "us": round(outcome.ms * 1e3, 3),
        "default_us": round(outcome.default_ms * 1e3, 3),
        **(outcome.estimate or {}),
    }
    return entry


def check_writable(folder: Path, kernels: Iterable[str], arch: str) -> None:
    """Raise now, before minutes are spent on a search, what ``write`` would raise after it."""
    place = folder / arch
    try:
        place.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=place):
            pass
        for kernel in kernels:
            stored_entries(place / f"{kernel}.json")
    except OSError as error:
        raise _not_writable(place, error) from None


def stored_entries(path: Path) -> dict[str, Entry]:
    """Entries of a tuned file by their identity; none where there is no file."""
    if not path.exists():
        return {}
    try:
        entries = config.read_file(path)
    except ValueError as error:
        raise ValueError(f"autotune: {path} must be a tuned file to add to: {error}") from None
    try:
        return {identity(_checked(e)): e for e in entries}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"autotune: {path} must be a tuned file to add to, got {error!r}"
        ) from None


def _checked(entry: Any) -> Entry:
    """``entry``; raises where it lacks what is read here, or has it in another form."""
    record = entry["measured"] or entry["estimate"]
    names = ("ms", "default_ms") if entry["measured"] else ("us", "default_us")
    times = [(entry if entry["measured"] else record)[name] for name in names]
    for name in ("key", "config"):
        if not isinstance(entry[name], dict):
            raise ValueError(f"{name} must be an object, got {entry[name]!r}")
    if not isinstance(record, dict) or not isinstance(record.get("date", ""), str):
        raise ValueError(f"measured and estimate must be objects with a date, got {record!r}")
    if not all(type(t) in (int, float) and 0 < t < math.inf for t in times):
        raise ValueError(f"{names[0]} and {names[1]} must be numbers above 0, got {times}")
    return dict(entry)


def _change(path: Path, kernel: str, arch: str, change: Any) -> None:
    """Let ``change`` edit the entries of a file while nobody else does."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _alone_in(path.parent):
            stored = stored_entries(path)
            change(stored)
            document = {
                "schema": config.SCHEMA,
                "kernel": kernel,
                "arch": arch,
                "entries": [stored[name] for name in sorted(stored)],
            }
            _replace(path, json.dumps(document, indent=1) + "\n")
    except OSError as error:
        raise _not_writable(path, error) from None
    config.reload()


def _not_writable(path: Path, error: OSError) -> ValueError:
    return ValueError(f"autotune: --export must be a writable folder, got {path}: {error.strerror}")


@contextlib.contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Wait until no other process is between reading and replacing a file of ``folder``."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _replace(path: Path, text: str) -> None:
    for torn in path.parent.glob(f".{path.name}.*.tmp"):  # of a process that was killed
        torn.unlink(missing_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)  # mkstemp makes it private
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
