"""The only writer of tuned files; ``tkernels.config`` is their reader."""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from autotune.search import Outcome
from tkernels import config, device


def write(folder: Path, kernel: str, outcomes: list[Outcome]) -> Path:
    """Merge ``outcomes`` into ``<folder>/<arch>/<kernel>.json`` and return its path.

    Entries of other keys stay, those too that another process writes at the same time. Of two
    outcomes with one key the later wins. A reader never sees half a file: it is written beside the
    old one and renamed. Raises ValueError where the folder cannot be written or the file that is
    there is not a tuned file.
    """
    path = folder / device.current().arch / f"{kernel}.json"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _alone_in(path.parent):
            stored = _stored(path)
            for outcome in outcomes:
                stored[_label(outcome.key)] = _entry(outcome)
            document = {
                "schema": config.SCHEMA,
                "kernel": kernel,
                "arch": device.current().arch,
                "entries": [stored[label] for label in sorted(stored)],
            }
            _replace(path, json.dumps(document, indent=1) + "\n")
    except OSError as error:
        raise ValueError(
            f"autotune: --export must be a writable folder, got {path}: {error.strerror}"
        ) from None
    config.reload()
    return path


def check_writable(folder: Path, kernels: list[str]) -> None:
    """Raise now what ``write`` would raise after the search."""
    place = folder / device.current().arch
    try:
        place.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=place):
            pass
        for kernel in kernels:
            _stored(place / f"{kernel}.json")
    except OSError as error:
        raise ValueError(
            f"autotune: --export must be a writable folder, got {place}: {error.strerror}"
        ) from None


@contextlib.contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Wait until no other process is between reading and replacing a file of ``folder``."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _stored(path: Path) -> dict[str, dict[str, Any]]:
    """Entries of a tuned file by the label of their key; none where there is no file."""
    if not path.exists():
        return {}
    try:
        document = json.loads(path.read_text())
        schema, entries = document["schema"], {_label(e["key"]): e for e in document["entries"]}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"autotune: {path} must be a tuned file to add to, got {error!r}"
        ) from None
    if schema != config.SCHEMA:
        raise ValueError(f"autotune: {path} must have schema {config.SCHEMA}, got {schema!r}")
    return entries


def _replace(path: Path, text: str) -> None:
    handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
    try:
        with os.fdopen(handle, "w") as file:
            file.write(text)
        os.chmod(temporary, 0o644)  # mkstemp makes it private
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def _label(key: dict[str, Any]) -> str:
    return json.dumps(key, sort_keys=True)


def _entry(outcome: Outcome) -> dict[str, Any]:
    return {
        "key": outcome.key,
        "config": outcome.config,
        "ms": round(outcome.ms, 6),
        "default_ms": round(outcome.default_ms, 6),
        "trials": outcome.tally.measured,
        "measured": {
            "case": outcome.case,
            "device": device.current().name,
            "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
            **device.versions(),
        },
    }
