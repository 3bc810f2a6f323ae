"""Follow the last IR that Huawei's compiler prints (HIVM), and count what it would do.

That IR is a complete schedule: which bytes go where, which vector and cube instructions run on
what, and every synchronisation between the pipes of a core. Its loops and branches depend on
integers alone, so a program of it is followed by running just those: each function is translated to
Python, in which integer arithmetic stays and a ``hivm.hir`` operation is a counter. Trip counts are
the real ones, as far as the integers in the kernel's arguments are given.

Statements on which no count depends are left out first (``hivm_slice.py``). What is not followed:
values of floating point, integers that a core computes from them, and integer tensors whose values
are not given. A branch on such counts its first arm, and the smaller of a known and an unknown
number is taken to be the known one; ``Work.assumed`` says how often that was done. A loop of
unknown length is refused.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

from autotune.offline.hivm_python import Op, Translated, Translator
from autotune.offline.hivm_values import CannotFollowError, State, TooLongError, unknown

__all__ = ["PIPES", "CannotFollowError", "Function", "TooLongError", "Work", "functions"]

PIPES = ("MTE2", "MTE3", "FIX", "V", "M", "S")


@dataclasses.dataclass(frozen=True)
class Work:
    """What one program does on one core: executions and elements of each operation."""

    ops: tuple[Op, ...]
    runs: tuple[int, ...]
    elements: tuple[int, ...]
    assumed: int = 0  # decisions that were made without knowing; 0: all counts are exact
    steps: int = 0  # turns of loops that were followed for it

    def totals(self) -> dict[str, int]:
        """``{"MTE2 bytes": ..., "MTE2 ops": ..., "M macs bf16": ..., "sync set_flag": ...}``."""
        found: Counter[str] = Counter()
        for op, runs, elements in zip(self.ops, self.runs, self.elements, strict=True):
            if op.pipe == "sync":
                found[f"sync {op.name}"] += runs
                continue
            unit = {"M": f"macs {op.kinds[0]}" if op.kinds else "macs", "S": "accesses"}
            name = unit.get(op.pipe, "bytes")
            found[f"{op.pipe} {name}"] += elements * (op.itemsize if name == "bytes" else 1)
            found[f"{op.pipe} ops"] += runs
        return {name: count for name, count in found.items() if count}


class Function(Translated):
    """A device function of the module, ready to be followed."""

    def follow(
        self, values: Sequence[Any], grid: Sequence[int], program: int, sub_block: int = 0
    ) -> Work:
        """Run program number ``program`` of ``grid``.

        ``values``: of the kernel's run-time arguments, in order: numbers, flat sequences of
        integers for tensors that are read by number, None for all others.
        """
        given = [None, None, None, *values, *grid]
        if len(given) != self.arguments:
            raise CannotFollowError(
                f"{self.name} takes {self.arguments} arguments, got {len(given)}"
            )
        times, elements = [0] * self.blocks, [0] * len(self.ops)
        state = State(kept=self.kept)
        self.run(given, times, elements, program, sub_block, state)
        runs = tuple(times[block] for block in self.block_of)
        full = [
            n * op.elements if op.elements is not None else e
            for op, n, e in zip(self.ops, runs, elements, strict=True)
        ]
        for op, amount in zip(self.ops, full, strict=True):
            if unknown(amount):
                raise CannotFollowError(f"a {op.name} of a size that only the chip knows")
        return Work(self.ops, runs, tuple(full), state.assumed, state.steps)


@functools.lru_cache(maxsize=32)
def functions(hivm: str) -> tuple[Function, ...]:
    """The device functions of the last HIVM module: one for vector kernels, two for mixed ones."""
    lines = hivm.splitlines()
    found_maps = (re.match(r"(#map\d*) = affine_map<(.*)>", line) for line in lines)
    maps = {m.group(1): m.group(2) for m in found_maps if m}
    found = []
    starts = [i for i, line in enumerate(lines) if re.match(r"\s*func\.func ", line)]
    for start, end in itertools.pairwise([*starts, len(lines)]):
        head = lines[start]
        if "hacc.function_kind<DEVICE>" in head:
            translated = Translator(maps, head, lines[start + 1 : end]).translated()
            found.append(Function(**vars(translated)))
    if not found:
        raise CannotFollowError("expected a device function in the IR, got none")
    return tuple(found)
