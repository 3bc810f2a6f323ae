"""The committed table of what Huawei's compiler made of each kernel: ``table.json``.

One row a compiled variant: bytes of UB, L1 and L0C in use, element-by-element loops, loops in all,
double-buffered local buffers. It is compared exactly, so that a change of any of these figures is
seen in review; ``--update-table`` rewrites it.

``text`` is a hash of the lowered kernel. The same compiler says the same of the same text, so what
is in the table need not be asked again (``--ask-again`` asks): half the time of these tests.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import itertools
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tkernels import offline_ascend as bisheng
from tkernels.offline import Variant
from tkernels.offline_ascend import CHIP, Verdict, scalar_memory_loops

PATH = Path(__file__).with_name("table.json")
FIGURES = ("ub", "l1", "l0c", "scalar_loops", "loops", "double_buffered")

Row = dict[str, Any]


def versions() -> dict[str, str]:
    """The chip and the packages that the figures belong to."""
    packages = ("triton-ascend", "ascendnpu-ir")
    return {"chip": CHIP, **{name: importlib.metadata.version(name) for name in packages}}


def row(kernel: str, case: str, variant: Variant, figures: Row) -> Row:
    """The table row of one accepted variant; ``case`` is the first case that needs it."""
    return {"kernel": kernel, "case": case, **_identity(variant), **figures}


def known(variant: Variant, linalg: str) -> Row | None:
    """Figures that these versions of the compilers gave for this text, or None."""
    found = known_rows().get(json.dumps(_identity(variant)))
    return found if found is not None and found["text"] == text_hash(linalg) else None


@functools.cache
def known_rows() -> dict[str, Row]:
    """Figures by identity; none of them if the table belongs to other versions."""
    stored_versions, stored = load()
    if stored_versions != versions():
        return {}
    identity = ("jit", "types", "constants", "options")
    return {
        json.dumps({name: one[name] for name in identity}): {n: one[n] for n in ("text", *FIGURES)}
        for one in stored
        if "text" in one
    }


def text_hash(linalg: str) -> str:
    """Of a lowered kernel."""
    return hashlib.sha256(linalg.encode()).hexdigest()[:16]


def _identity(variant: Variant) -> Row:
    return {
        "jit": variant.fn.__name__,
        "types": _types(kind for _, kind in variant.signature),
        "constants": {name: _plain(value) for name, value in variant.constants},
        "options": dict(bisheng.options_of(variant)),
    }


def figures_of(linalg: str, verdict: Verdict) -> Row:
    """What the compiler said of an accepted kernel."""
    return {
        "text": text_hash(linalg),
        "ub": verdict.ub,
        "l1": verdict.l1,
        "l0c": verdict.l0c,
        "scalar_loops": max(scalar_memory_loops(linalg), bisheng.scalar_loops(verdict.hivm)),
        "loops": bisheng.loops(verdict.hivm),
        "double_buffered": verdict.double_buffered,
    }


def _types(kinds: Iterable[str]) -> str:
    """Run-time argument types with runs counted: ``3 *bf16, 8 i32, fp32``."""
    runs = ((kind, len(list(group))) for kind, group in itertools.groupby(kinds))
    return ", ".join(kind if n == 1 else f"{n} {kind}" for kind, n in runs)


def _plain(value: Any) -> Any:
    """``value`` as JSON can hold it."""
    return value if isinstance(value, bool | int | float | str | None) else str(value)


def label(one: Row) -> str:
    """What identifies a row, in words: kernel, jit function, types, constants, options."""
    settings = {**one["constants"], **one["options"]}
    text = " ".join(f"{name}={value}" for name, value in settings.items())
    return f"{one['kernel']}: {one['jit']}({one['types']}) {text}"


def load() -> tuple[dict[str, str], list[Row]]:
    """Versions and rows of the committed table; empty where there is none."""
    if not PATH.exists():
        return {}, []
    stored = json.loads(PATH.read_text())
    return stored["versions"], stored["rows"]


def save(rows: Iterable[Row]) -> None:
    """Write the table, a row a line, in an order that does not depend on the order of the tests."""
    lines = ",\n".join("  " + json.dumps(one) for one in sorted(rows, key=label))
    PATH.write_text(f'{{"versions": {json.dumps(versions())},\n "rows": [\n{lines}\n]}}\n')


def replace_kernel(kernel: str, rows: list[Row]) -> None:
    """Put ``rows`` in the place of all rows of ``kernel`` and write the table."""
    save([one for one in load()[1] if one["kernel"] != kernel] + rows)


def differences(kernel: str, now: list[Row]) -> list[str]:
    """What the committed table has wrong about ``kernel``, a line each; empty if nothing."""
    stored_versions, stored = load()
    if stored_versions != versions():
        return [f"table.json belongs to {stored_versions or 'nothing'}, installed is {versions()}"]
    before = {label(one): one for one in stored if one["kernel"] == kernel}
    after = {label(one): one for one in now}
    found = [f"new: {name} (case {after[name]['case']})" for name in after.keys() - before.keys()]
    found += [f"gone: {name}" for name in before.keys() - after.keys()]
    for name in before.keys() & after.keys():
        changes = [
            f"{figure} {before[name][figure]} -> {after[name][figure]}"
            for figure in FIGURES
            if before[name][figure] != after[name][figure]
        ]
        if changes:
            found.append(f"{name} (case {after[name]['case']}): {', '.join(changes)}")
    return sorted(found)
