"""The only writer of tuned files; ``tkernels.config`` is their reader."""

from __future__ import annotations

import datetime
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from autotune.search import Outcome
from tkernels import config, device


def write(folder: Path, kernel: str, outcomes: list[Outcome]) -> Path:
    """Merge ``outcomes`` into ``<folder>/<arch>/<kernel>.json`` and return its path.

    Entries of other keys stay. Of two outcomes with one key the later wins. A reader never sees
    half a file: it is written beside the old one and renamed.
    """
    path = folder / device.current().arch / f"{kernel}.json"
    stored: dict[str, dict[str, Any]] = {}
    if path.is_file():
        stored = {_label(e["key"]): e for e in json.loads(path.read_text())["entries"]}
    for outcome in outcomes:
        stored[_label(outcome.key)] = _entry(outcome)
    document = {
        "schema": config.SCHEMA,
        "kernel": kernel,
        "arch": device.current().arch,
        "entries": [stored[label] for label in sorted(stored)],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
    with os.fdopen(handle, "w") as file:
        json.dump(document, file, indent=1)
        file.write("\n")
    os.chmod(temporary, 0o644)
    os.replace(temporary, path)
    config.reload()
    return path


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
