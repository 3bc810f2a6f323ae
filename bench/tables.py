"""Tables of one problem: every config of a kernel with its time, or None where it failed.

The file is JSON, a list of ``{"config": {...}, "ms": 0.041}`` (``"ms": null``: it failed), in the
order in which the space lists them. The entry with ``"default": true``, else the first, is the
kernel's default.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.rows import UsageError
from tkernels.registry import Config

Entries = Sequence[tuple[Config, float | None]]


@dataclasses.dataclass(frozen=True)
class Table:
    """Configs with their milliseconds, and the default's place among them."""

    name: str
    entries: tuple[tuple[Config, float | None], ...]
    default: Config

    @property
    def best(self) -> float:
        """The least time."""
        return min(ms for _, ms in self.entries if ms is not None)

    @property
    def space(self) -> dict[str, list[Any]]:
        """Values that each key takes: numbers in their order, others as they come."""
        names = list(dict.fromkeys(name for config, _ in self.entries for name in config))
        return {name: self._values(name) for name in names}

    def _values(self, name: str) -> list[Any]:
        found: list[Any] = []
        for config, _ in self.entries:
            value = config.get(name)
            if not any(type(value) is type(f) and value == f for f in found):
                found.append(value)
        return sorted(found) if all(type(value) is int for value in found) else found


def label(config: Config) -> str:
    """Text of a config that does not depend on the order of its keys."""
    return json.dumps(config, sort_keys=True)


def read(path: Path) -> Table:
    """The table in ``path``; UsageError, in a sentence, where it holds none."""
    try:
        rows = json.loads(path.read_text())
        entries = tuple((dict(row["config"]), _milliseconds(row["ms"])) for row in rows)
        defaults = [dict(row["config"]) for row in rows if row.get("default")]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(
            f"{path} must be a JSON list of {{'config': ..., 'ms': ...}}, got {error!r}"
        ) from None
    if all(ms is None for _, ms in entries):
        raise UsageError(f"{path} must hold at least one time, got {len(entries)} entries")
    labels = {label(config) for config, _ in entries}
    if len(labels) != len(entries) or len(defaults) > 1:
        raise UsageError(f"{path} must hold each config, and one default, once")
    return Table(path.stem, entries, (defaults or [entries[0][0]])[0])


def _milliseconds(value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not 0 < float(value) < math.inf:
        raise ValueError(f"ms must be null or a positive number, got {value!r}")
    return float(value)
