"""What a person sees while the tuner works: a line that changes on a terminal, else plain lines."""

from __future__ import annotations

import sys
import time
from collections import Counter
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from autotune.records import Answer, Outcome, Task, label_of
from autotune.search import Proposal, Search
from autotune.tune import Watch

_QUIET_S = 15  # without a terminal a line comes that often


class Progress(Watch):
    """Shows trial, best so far, gain over the default, failures by kind and the time left."""

    def __init__(self, *, total: int, offline: bool = False) -> None:
        self._console = Console(stderr=True)
        self._live = Live(
            console=self._console, auto_refresh=False, transient=True, redirect_stdout=False
        )
        self._total = total
        self._done = 0
        self._unit = "us (estimated)" if offline else "us"
        self._task: Task | None = None
        self._searching: Search | None = None
        self._began = 0.0
        self._tried = 0
        self._said = 0.0
        self._default: float | None = None
        self._failures: Counter[str] = Counter()

    def __enter__(self) -> Progress:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self._live.stop()

    def begins(self, task: Task, searching: Search) -> None:
        self._task, self._searching = task, searching
        self._began, self._tried = time.monotonic(), 0
        self._said = self._began
        table = searching.known()
        self._failures = Counter(a.kind for _, a in table.values() if not a.ok)
        default = table.get(label_of(searching.study.user_attrs["default_config"]))
        self._default = default[1].ms if default else None
        if table:
            self.says(f"{task.kernel} {task.case}: goes on after {len(table)} configs")
        self._show()

    def tried(self, proposal: Proposal, answer: Answer) -> None:
        self._tried += 1
        if proposal.origin == "default":
            self._default = answer.ms
        if not answer.ok:
            self._failures[answer.kind] += 1
        if answer.kind in ("wrong", "crashed", "hung", "device fault", "out of memory"):
            assert self._task is not None
            loud = "WRONG" if answer.kind == "wrong" else answer.kind
            self.says(f"{loud}: {self._task.kernel} with {proposal.config}: {answer.message}")
        self._show()

    def says(self, line: str) -> None:
        self._console.print(Text(line), soft_wrap=True)

    def ends(self, outcome: Outcome) -> None:
        self._done += 1
        self._task = None
        self._show()

    def _show(self) -> None:
        if self._console.is_terminal:
            self._live.update(self._picture(), refresh=True)
        elif self._task is not None and time.monotonic() - self._said > _QUIET_S:
            self._said = time.monotonic()
            place, *words = self._words()
            self.says(f"{place} {', '.join(word for word in words if word)}")

    def _picture(self) -> Table:
        table = Table.grid(padding=(0, 2))
        if self._task is None or self._searching is None:
            table.add_row(f"{self._done} of {self._total} problems done")
            return table
        table.add_row(*(Text(word) for word in self._words()))
        return table

    def _words(self) -> list[str]:
        assert self._task is not None
        assert self._searching is not None
        known = self._searching.known()
        return [
            f"[{self._done + 1}/{self._total}]",
            f"{self._task.kernel} {self._task.case}",
            f"config {len(known)} of {self._searching.planned}",
            self._best(known),
            f"{self._time_left(len(known))} left",
            ", ".join(f"{count} {kind}" for kind, count in sorted(self._failures.items())),
        ]

    def _best(self, known: Any) -> str:
        best = self._searching.best() if self._searching is not None else None
        if best is None:
            return ""
        gain = f", {self._default / best[1]:.3f}x the default" if self._default else ""
        return f"best {best[1] * 1e3:.2f} {self._unit}{gain}"

    def _time_left(self, known: int) -> str:
        assert self._searching is not None
        spent = time.monotonic() - self._began
        left = self._searching.budget.seconds - spent
        if self._tried:
            left = min(left, (self._searching.planned - known) * spent / self._tried)
        return "?" if left == float("inf") else f"{max(0, round(left))} s"


def outcome_line(outcome: Outcome, *, offline: bool) -> str:
    """One line that says what a search found."""
    counts = ", ".join(f"{n} {kind}" for kind, n in sorted(outcome.failures.items()))
    failed = f"; {counts}" if counts else ""
    what = "estimated " if offline else ""
    kept = "the default stays" if outcome.config == outcome.default_config else str(outcome.config)
    return (
        f"{outcome.task.kernel} {outcome.task.case}: {what}{outcome.ms * 1e3:.2f} us, "
        f"{outcome.gain:.3f}x the default ({outcome.trials} configs{failed}): {kept}"
    )


def print_outcome(outcome: Outcome, *, offline: bool) -> None:
    """``outcome_line`` on standard output."""
    print(outcome_line(outcome, offline=offline), flush=True, file=sys.stdout)
