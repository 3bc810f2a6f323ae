"""A translated function of the IR, cut down to what its counts depend on, as Python text.

Three things make a program of millions of operations one of some thousand steps, all of them exact:

* Most of an IR is arithmetic on addresses, on which no count depends. It is left out.
* A loop whose turns all count the same is run once, and its counts are multiplied.
* What another inner loop counts is kept by the integers that it reads, and not found out again.
"""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Iterator


@dataclasses.dataclass(frozen=True)
class Assign:
    """Variables that are set at once, each with the Python text of its value."""

    pairs: tuple[tuple[str, str], ...]


@dataclasses.dataclass(frozen=True)
class Count:
    """One execution of operation number ``place``; ``elements`` is "" where it is always alike."""

    place: int
    elements: str


@dataclasses.dataclass
class Loop:
    variable: str
    bounds: tuple[str, str, str]
    body: list[Step] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Branch:
    condition: str
    then: list[Step] = dataclasses.field(default_factory=list)
    other: list[Step] = dataclasses.field(default_factory=list)


Step = Assign | Count | Loop | Branch


def python_of(steps: list[Step], ops: int) -> tuple[str, list[int], int]:
    """Text of ``run(given, times, elements, program, sub_block, state)``, each op's block, blocks.

    ``times`` counts the executions of a block, which are those of all operations in it.
    """
    needed: set[str] = set()
    before = -1
    while len(needed) > before:
        before = len(needed)
        _collect(steps, needed)
    writer = _Writer(_cut(steps, needed), ops)
    head = "def run(given, times, elements, program, sub_block, state):"
    return "\n".join([head, *writer.lines]), writer.block_of, writer.blocks


# ---- what counts depend on ---------------------------------------------------------------------


def _names(text: str) -> Iterator[str]:
    yield from re.findall(r"\bv_\w+", text)


def _matters(steps: list[Step], needed: set[str]) -> bool:
    """Whether a block counts something, or sets what is needed."""
    return bool(_cut(steps, needed))


def _collect(steps: list[Step], needed: set[str]) -> None:
    """Add the variables on which counts depend, as far as ``needed`` tells already."""
    for step in reversed(steps):
        if isinstance(step, Assign):
            for name, text in step.pairs:
                if name in needed:
                    needed.update(_names(text))
        elif isinstance(step, Count):
            needed.update(_names(step.elements))
        elif isinstance(step, Loop) and _matters(step.body, needed):
            needed.update(_names(" ".join(step.bounds)))
            _collect(step.body, needed)
        elif isinstance(step, Branch) and _matters(step.then + step.other, needed):
            needed.update(_names(step.condition))
            _collect(step.then, needed)
            _collect(step.other, needed)


def _cut(steps: list[Step], needed: set[str]) -> list[Step]:
    """``steps`` without those that count nothing and set nothing that is needed."""
    kept: list[Step] = []
    for step in steps:
        if isinstance(step, Assign):
            pairs = tuple(pair for pair in step.pairs if pair[0] in needed)
            if pairs:
                kept.append(Assign(pairs))
        elif isinstance(step, Loop):
            body = _cut(step.body, needed)
            if body:
                kept.append(Loop(step.variable, step.bounds, body))
        elif isinstance(step, Branch):
            then, other = _cut(step.then, needed), _cut(step.other, needed)
            if then or other:
                kept.append(Branch(step.condition, then, other))
        else:
            kept.append(step)
    return kept


def _flat(steps: list[Step]) -> Iterator[Step]:
    """All steps, those of inner blocks too, in the order of the text."""
    for step in steps:
        yield step
        if isinstance(step, Loop):
            yield from _flat(step.body)
        elif isinstance(step, Branch):
            yield from _flat(step.then)
            yield from _flat(step.other)


def _read(step: Step) -> list[str]:
    """Variables that a step reads by itself."""
    if isinstance(step, Assign):
        return [name for _, text in step.pairs for name in _names(text)]
    if isinstance(step, Loop):
        return list(_names(" ".join(step.bounds)))
    return list(_names(step.elements if isinstance(step, Count) else step.condition))


def _set(step: Step) -> list[str]:
    if isinstance(step, Assign):
        return [name for name, _ in step.pairs]
    return [step.variable] if isinstance(step, Loop) else []


# ---- text --------------------------------------------------------------------------------------


class _Writer:
    def __init__(self, steps: list[Step], ops: int) -> None:
        every = list(_flat(steps))
        self.times_set = collections.Counter(name for step in every for name in _set(step))
        self.reads = collections.Counter(name for step in every for name in _read(step))
        self.lines: list[str] = []
        self.block_of = [0] * ops
        self.blocks = 0
        self.block(steps, 1, "1", False)

    def emit(self, depth: int, text: str) -> None:
        self.lines.append("    " * depth + text)

    def block(self, steps: list[Step], depth: int, factor: str, inner: bool) -> None:
        """Write a block that counts ``factor`` times; ``inner``: it stands in a loop that turns."""
        own = self.blocks
        self.blocks += 1
        counts = any(isinstance(step, Count) for step in steps)
        self.emit(depth, f"times[{own}] += {factor}" if counts else "pass")
        for step in steps:
            if isinstance(step, Assign):
                names, values = zip(*step.pairs, strict=True)
                self.emit(depth, f"{', '.join(names)} = {', '.join(values)}")
            elif isinstance(step, Count):
                self.block_of[step.place] = own
                if step.elements:
                    self.emit(depth, f"elements[{step.place}] += {factor} * ({step.elements})")
            elif isinstance(step, Branch):
                self.emit(depth, f"if truth(state, {step.condition}):")
                self.block(step.then, depth + 1, factor, inner)
                self.emit(depth, "else:")
                self.block(step.other, depth + 1, factor, inner)
            else:
                self.loop(step, depth, factor, inner)

    def loop(self, loop: Loop, depth: int, factor: str, inner: bool) -> None:
        bounds = ", ".join(loop.bounds)
        if self.alike(loop):
            turns = f"turns{self.blocks}"
            self.emit(depth, f"{turns} = {factor} * len(trips({bounds}))")
            self.emit(depth, f"if {turns}:")
            self.block(loop.body, depth + 1, turns, inner)
            return
        free = self.free(loop)
        places = [step.place for step in _flat(loop.body) if isinstance(step, Count)]
        if not inner or free is None or not places:
            self.emit(depth, f"for {loop.variable} in steps(state, {bounds}):")
            self.block(loop.body, depth + 1, factor, True)
            return
        first = self.blocks
        kept = f"kept{first}"
        span = f"{min(places)}, {max(places) + 1}"
        key = "".join(f", {name}" for name in [*free, *([factor] if factor != "1" else [])])
        self.emit(depth, f"{kept} = recall(state, times, elements, {span}, ({first}{key},))")
        self.emit(depth, f"if {kept} is not None:")
        self.emit(depth + 1, f"for {loop.variable} in steps(state, {bounds}):")
        self.block(loop.body, depth + 2, factor, True)
        self.emit(depth + 1, f"keep(state, times, elements, {first}, {self.blocks}, {kept})")

    def alike(self, loop: Loop) -> bool:
        """Whether nothing in a loop depends on its turn."""
        body = list(_flat(loop.body))
        varying = {loop.variable, *self.carried(body)}
        return not any(varying.intersection([*_read(step), *_set(step)]) for step in body)

    def carried(self, body: list[Step]) -> set[str]:
        """Variables that a body sets and that were set before it, too."""
        inside = collections.Counter(name for step in body for name in _set(step))
        return {name for name, n in inside.items() if n < self.times_set[name]}

    def free(self, loop: Loop) -> list[str] | None:
        """Integers that a loop gets from outside; None if it gives some back, or reads memory."""
        body = list(_flat(loop.body))
        inside = {loop.variable, *(name for step in body for name in _set(step))}
        reads = collections.Counter(name for step in [loop, *body] for name in _read(step))
        gives = any(reads[name] != self.reads[name] for name in inside)
        texts = [text for step in body if isinstance(step, Assign) for _, text in step.pairs]
        if gives or any("load(" in text for text in texts):
            return None
        return sorted((set(reads) - inside) | self.carried(body))
