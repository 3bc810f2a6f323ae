"""Follow the last IR that Huawei's compiler prints (HIVM), and count what it would do.

That IR is a complete schedule: which bytes go where, which vector and cube instructions run on
what, and every synchronisation between the pipes of a core. Its loops and branches depend on
integers alone, so a program of it is followed by running just those: each function is translated to
Python, in which integer arithmetic stays and a ``hivm.hir`` operation is a counter. Trip counts are
the real ones, as far as the integers in the kernel's arguments are given.

What is not followed: values of floating point, and integers that a core computes from them (none of
our kernels branches on such). A branch on an unknown counts its first arm.
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
from autotune.offline.hivm_values import MOST_STEPS, CannotFollowError, TooLongError

__all__ = ["PIPES", "CannotFollowError", "Function", "TooLongError", "Work", "functions"]

PIPES = ("MTE2", "MTE3", "FIX", "V", "M", "S")


@dataclasses.dataclass(frozen=True)
class Work:
    """What one program does on one core: executions and elements of each operation."""

    ops: tuple[Op, ...]
    runs: tuple[int, ...]
    elements: tuple[int, ...]

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
        runs, elements = [0] * len(self.ops), [0] * len(self.ops)
        self.run(given, runs, elements, program, sub_block, [MOST_STEPS])
        full = [
            n * op.elements if op.elements is not None else e
            for op, n, e in zip(self.ops, runs, elements, strict=True)
        ]
        return Work(self.ops, tuple(runs), tuple(full))


@functools.lru_cache(maxsize=256)
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
