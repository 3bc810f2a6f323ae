"""``--status``: for each kernel and case, what is tuned, how old it is, what makes it doubtful."""

from __future__ import annotations

import dataclasses
import datetime
import json
import math
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from autotune import fingerprint, problems
from autotune.records import label_of
from tkernels import config, device
from tkernels.device import Device
from tkernels.registry import Config, KernelSpec, Problem, all_kernels

Entry = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Row:
    """One case of a kernel (or an entry that is of no case), and the entry that serves it."""

    kernel: str
    case: str
    arch: str
    key: dict[str, Any]
    state: str  # "measured", "offline" (a model's estimate), or "missing"
    bench: bool  # one of the kernel's own cases; False: only in a file (--shape, --model)
    file: str = ""
    date: str = ""
    age_days: int | None = None
    gain: float | None = None  # the default's time (or estimate) over the config's
    config: Config | None = None
    stale: tuple[str, ...] = ()  # why the entry is doubtful or not used, a phrase each


def status(
    folders: Sequence[Path],
    specs: Sequence[KernelSpec],
    dev: Device,
    facts: Mapping[str, Any] | None = None,
    today: datetime.date | None = None,
) -> list[Row]:
    """Rows of every kernel's cases on ``dev``, then of entries for other problems.

    ``facts`` are what measurements made now would be recorded with; where ``dev`` is not the device
    that is here, only the kernel's source can be compared. ``today`` is for tests. Nothing raises
    for a file that cannot be read: its cases are missing, and say why.
    """
    if facts is None:
        facts = _facts_here() if _is_here(dev) else {}
    now = today or datetime.datetime.now(datetime.timezone.utc).date()
    return [row for spec in specs for row in _rows_of(spec, folders, dev, facts, now)]


def _is_here(dev: Device) -> bool:
    return dev == device.current() and not dev.compile_only and dev.arch != "interpret"


def _facts_here() -> dict[str, Any]:
    driver = device.health().get("driver")
    return {**fingerprint.chip(), **({"driver": driver} if driver else {})}


def _rows_of(
    spec: KernelSpec,
    folders: Sequence[Path],
    dev: Device,
    facts: Mapping[str, Any],
    today: datetime.date,
) -> Iterator[Row]:
    files, refused = _files(spec.name, folders, dev.arch)
    source = fingerprint.kernel_hash(spec)
    served: set[str] = set()
    for task in problems.bench_tasks(spec, dev.arch):
        served.add(task.label)
        blank = Row(spec.name, task.case, dev.arch, task.key, "missing", True, stale=refused)
        found = _serving(spec, task.problem, task.key, files, dev, facts)
        if found is None:
            yield blank
            continue
        entry, path, why, passed = found
        doubts = [*passed, *_doubts(entry, path, dev, facts, source)]
        yield _filled(blank, entry, path, why, doubts, today)
    for path, entries in files:
        for entry in entries:
            if label_of(entry["key"]) not in served:
                case = str(_record(entry).get("case", ""))
                blank = Row(spec.name, case, dev.arch, entry["key"], "missing", False)
                doubts = _doubts(entry, path, dev, facts, source)
                if config.is_of_another_version(spec, entry["key"]):
                    doubts.insert(0, "not used: its key is of another version")
                yield _filled(blank, entry, path, None, doubts, today)


def _filled(
    blank: Row,
    entry: Entry,
    path: Path,
    why: str | None,
    doubts: list[str],
    today: datetime.date,
) -> Row:
    date = str(_record(entry).get("date", ""))
    illegal = [f"not legal now, the heuristic serves: {why}"] if why is not None else []
    return dataclasses.replace(
        blank,
        state="measured" if entry["measured"] else "offline",
        file=str(path),
        date=date,
        age_days=_days(date, today),
        gain=_gain(entry),
        config=entry["config"],
        stale=(*blank.stale, *illegal, *doubts),
    )


# ---- files -------------------------------------------------------------------------------------


def _files(
    kernel: str, folders: Sequence[Path], arch: str
) -> tuple[list[tuple[Path, list[Entry]]], tuple[str, ...]]:
    """Entries of each file that has this kernel, and a phrase for each file that is refused."""
    found: list[tuple[Path, list[Entry]]] = []
    refused: list[str] = []
    has = [file.parent.name for folder in folders for file in folder.glob(f"*/{kernel}.json")]
    if arch not in has:
        arch = config.nearest_arch(arch, has) or arch
    for folder in dict.fromkeys(folders):
        path = folder / arch / f"{kernel}.json"
        if not path.exists():
            continue
        try:
            entries = config.read_file(path)
        except ValueError as error:
            refused.append(f"{path} is left out: {error}")
            continue
        try:
            found.append((path, [_checked(entry) for entry in entries]))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            refused.append(f"{path} is not as the tuner writes it: {error!r}")
    return found, tuple(refused)


def unread(folders: Sequence[Path]) -> list[str]:
    """A line for each file of these folders that no lookup will ever read, by its place or name."""
    names, found = all_kernels(), []
    for folder in folders:
        for path in sorted((*folder.glob("*.json"), *folder.glob("*/*.json"))):
            if path.parent == folder:
                why = "expected it in a folder of its architecture: <arch>/<kernel>.json"
            elif path.stem not in names:
                why = "expected the name of a kernel (--import registers those of your own)"
            elif not _is_arch(path.parent.name):
                why = "expected a folder named as an architecture: sm90, ascend910b, ..."
            else:
                continue
            found.append(f"{path} is not read: {why}")
    return found


def _is_arch(name: str) -> bool:
    try:
        return bool(name == "interpret" or device.offline_facts(name))
    except device.UnsupportedError:
        return False


def _checked(entry: Any) -> Entry:
    """``entry`` with every field that is read below; raises where it has another form."""
    record = entry["measured"] or entry.get("estimate", {})
    return {
        **entry,
        "measured": dict(record) if entry["measured"] else False,
        "estimate": {} if entry["measured"] else dict(record),
    }


def _serving(
    spec: KernelSpec,
    problem: Problem,
    key: Mapping[str, Any],
    files: Sequence[tuple[Path, list[Entry]]],
    dev: Device,
    facts: Mapping[str, Any],
) -> tuple[Entry, Path, str | None, list[str]] | None:
    """The entry that a launch would take, as ``tkernels.config`` looks it up; with why it cannot.

    Where no entry is legal, the first one. With it, a phrase for each that a launch would warn of.
    """
    first: tuple[Entry, Path, str | None, list[str]] | None = None
    passed: list[str] = []
    for path, entries in files:
        own = [entry for entry in entries if entry["key"] == key]
        for entry in sorted(own, key=lambda e: _unlikeness(e, dev, facts)):
            why = _why_unusable(spec, entry["config"], problem, dev)
            if why is None:
                return entry, path, None, passed
            first = first or (entry, path, why, [])
            cores = config.chip_of(dict(entry)).get("num_cores", dev.num_cores)
            if path.parent.name == dev.arch and cores == dev.num_cores:
                passed.append(f"an entry in {path} is left out: {why}")
    return first


def _unlikeness(entry: Entry, dev: Device, facts: Mapping[str, Any]) -> float:
    """How far the chip of an entry is from ``dev``; estimates, which have no chip, come last."""
    chip = config.chip_of(dict(entry))
    own = {"num_cores": dev.num_cores, "memory_gib": facts.get("memory_gib", 0)}
    known = [name for name in chip if own[name] > 0 and chip[name] > 0]
    return sum(abs(math.log2(own[n] / chip[n])) for n in known) if chip else math.inf


def _why_unusable(spec: KernelSpec, found: Any, problem: Problem, dev: Device) -> str | None:
    try:
        return config.why_unusable(spec, found, problem, dev)
    except (TypeError, ValueError, ArithmeticError) as error:  # edited by hand
        return f"{type(error).__name__}: {error}"


# ---- doubts ------------------------------------------------------------------------------------


def _doubts(
    entry: Entry, path: Path, dev: Device, facts: Mapping[str, Any], source: str
) -> list[str]:
    """Why an entry may not be the best any more, a phrase each."""
    record = _record(entry)
    found = [] if path.parent.name == dev.arch else [f"tuned for {path.parent.name}"]
    if record.get("kernel_hash") != source:
        found.append("kernel changed" if "kernel_hash" in record else "kernel's version unknown")
    for name, now in facts.items():
        if name in record and record[name] != now:
            found.append(f"{_WORDS.get(name, name)} {record[name]} then, {now} now")
    return found


_WORDS = {"num_cores": "cores", "memory_gib": "GiB of memory"}


def _record(entry: Entry) -> Mapping[str, Any]:
    found: Mapping[str, Any] = entry["measured"] or entry["estimate"]
    return found


def _gain(entry: Entry) -> float | None:
    record = entry if entry["measured"] else _record(entry)
    names = ("default_ms", "ms") if entry["measured"] else ("default_us", "us")
    default, own = (record.get(name) for name in names)
    if not isinstance(default, int | float) or not isinstance(own, int | float) or own <= 0:
        return None
    return round(default / own, 4)


def _days(date: str, today: datetime.date) -> int | None:
    try:
        return (today - datetime.date.fromisoformat(date[:10])).days
    except ValueError:
        return None


# ---- what is shown -----------------------------------------------------------------------------


def summary(rows: Sequence[Row]) -> str:
    """One line over all rows."""
    cases = [row for row in rows if row.bench]
    counts = {s: sum(r.state == s for r in cases) for s in ("measured", "offline", "missing")}
    gains = [row.gain for row in cases if row.gain is not None]
    words = [
        f"{counts['measured'] + counts['offline']} of {len(cases)} cases tuned "
        f"({counts['measured']} measured, {counts['offline']} offline)",
        f"{counts['missing']} missing",
        f"{sum(bool(row.stale) and row.state != 'missing' for row in rows)} stale",
    ]
    if others := len(rows) - len(cases):
        words.append(f"{others} entries of other problems")
    if gains:
        words.append(f"median gain {statistics.median(gains):.3f}x")
    return ", ".join(words)


def show(
    rows: Sequence[Row],
    *,
    of: Sequence[Row] | None = None,
    as_json: bool = False,
    file: TextIO | None = None,
) -> None:
    """Print rows as a table, and below it the summary of all (``of``), or as JSON lines."""
    of = rows if of is None else of
    file = file or sys.stdout
    if as_json:
        for row in rows:
            print(json.dumps(dataclasses.asdict(row)), file=file)
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title="Tuned configs", title_justify="left")
    for name in ("kernel", "case", "state", "gain", "age", "doubts", "file"):
        table.add_column(name, justify="right" if name in ("gain", "age") else "left")
    for row in rows:
        table.add_row(*(Text(cell) for cell in _cells(row)))
    # A pipe has no width; lines that are cut there could not be read.
    console = Console(file=file, width=None if file.isatty() else 240)
    if rows:
        console.print(table)
    arch = ", ".join(dict.fromkeys(row.arch for row in of))
    console.print(Text(f"{arch}: {summary(of)}" if of else "no kernels"), soft_wrap=True)


def _cells(row: Row) -> tuple[str, ...]:
    gain = "" if row.gain is None else f"{row.gain:.3f}x"
    age = "" if row.age_days is None else f"{row.age_days} d"
    estimated = " (estimate)" if row.state == "offline" and gain else ""
    case = row.case if row.bench else f"{row.case or label_of(row.key)} (other)"
    return (row.kernel, case, row.state, gain + estimated, age, "; ".join(row.stale), row.file)
