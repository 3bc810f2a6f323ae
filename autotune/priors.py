"""Configs that are tried first, because they served this problem or one like it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import optuna

from autotune import export
from autotune.records import Task, label_of
from autotune.space import WhyIllegal
from tkernels.config import nearest_arch
from tkernels.registry import Config

_NEIGHBOURS = 3


def priors(
    task: Task,
    why_illegal: WhyIllegal,
    folders: Iterable[Path],
    studies: Iterable[optuna.Study],
) -> list[tuple[Config, str]]:
    """(config, origin): what is stored for ``task``, then what the nearest problems use.

    Looked for in the tuned files below ``folders`` and in the finished ``studies`` of the storage.
    Of other architectures only the nearest counts, for the same problem.
    """
    folders = list(folders)
    entries = [
        (entry["key"], entry["config"])
        for folder in folders
        for entry in _entries(folder / task.arch / f"{task.kernel}.json")
    ]
    entries += [
        (s.user_attrs["key"], s.user_attrs["outcome"]["config"])
        for s in studies
        if s.user_attrs["kernel"] == task.kernel
        and s.user_attrs["arch"] == task.arch
        and s.user_attrs.get("outcome")
    ]
    stored = [(config, "stored") for key, config in entries if key == task.key]
    others = sorted(
        ((key_distance(key, task.key), label_of(config), config) for key, config in entries),
        key=lambda entry: entry[:2],
    )
    near = [(config, "neighbour") for far, _, config in others if 0 < far < math.inf]
    near += [(config, "neighbour") for config in _of_nearest_arch(task, folders)]
    found: list[tuple[Config, str]] = []
    for config, origin in [*stored, *near]:
        if len(found) >= len(stored) + _NEIGHBOURS:
            break
        if all(config != other for other, _ in found) and _is_legal(config, why_illegal):
            found.append((config, origin))
    return found


def measured_in(task: Task, folders: Iterable[Path]) -> Path | None:
    """The first file that has a measured entry for ``task``, on whichever chip."""
    for folder in folders:
        path = folder / task.arch / f"{task.kernel}.json"
        if any(entry["key"] == task.key and entry["measured"] for entry in _entries(path)):
            return path
    return None


def _is_legal(config: Config, why_illegal: WhyIllegal) -> bool:
    try:
        return why_illegal(config) is None
    except (TypeError, ValueError, KeyError, AttributeError, ArithmeticError):
        return False  # edited by hand, or of another version: keys missing, names for numbers


def key_distance(a: Mapping[str, Any], b: Mapping[str, Any]) -> float:
    """How unlike two keys are: a factor of two in a number counts one, another name two."""
    if a.keys() != b.keys():
        return math.inf
    return sum(_unlikeness(a[name], b[name]) for name in a)


def _unlikeness(a: Any, b: Any) -> float:
    if a == b:
        return 0.0
    if type(a) is int and type(b) is int and a >= 0 and b >= 0:
        return abs(math.log2((a + 1) / (b + 1)))
    return 2.0


def _of_nearest_arch(task: Task, folders: list[Path]) -> list[Config]:
    archs = {
        file.parent.name
        for folder in folders
        for file in folder.glob(f"*/{task.kernel}.json")
        if file.parent.name != task.arch
    }
    nearest = nearest_arch(task.arch, sorted(archs))
    if nearest is None:
        return []
    return [
        entry["config"]
        for folder in folders
        for entry in _entries(folder / nearest / f"{task.kernel}.json")
        if entry["key"] == task.key
    ]


def _entries(path: Path) -> list[dict[str, Any]]:
    try:
        return list(export.stored_entries(path).values())
    except (ValueError, OSError):  # the lookup says what is wrong with it, when it is used
        return []
