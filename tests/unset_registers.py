"""Uniform registers that machine code reads though nothing has written them on the way there.

ptxas can compute what two branches share in one of them alone: of a kernel whose branches began
with the same addresses of ``wgmma`` each, the second took what lay in the registers (ptxas 12.8).

A copy of such a register is as unset as that is, and no harm until it is read. What is not seen: a
write behind a guard counts, and so does what comes back from an ordinary register.
"""

from __future__ import annotations

import dataclasses
import re
import subprocess
import tempfile

from tkernels import device

_LABEL = re.compile(r"\s*(\.L_x_\d+):")
_LINE = re.compile(r"\s*/\*([0-9a-f]+)\*/\s+(?:(@!?U?P\w+)\s+)?(\S+)\s*(.*?)\s*;")
_ENDS = ("EXIT", "RET", "BPT", "KILL")
_PAIR = re.compile(r"\.64|UIMAD\.WIDE")  # writes two registers


@dataclasses.dataclass
class _Line:
    place: str
    text: str
    reads: frozenset[int]
    writes: frozenset[int]
    copies: bool
    falls: bool  # the next line may follow
    targets: tuple[str, ...]


def _line(place: str, guard: str | None, op: str, rest: str) -> _Line:
    operands = [operand.strip() for operand in rest.split(",")]
    writes: set[int] = set()
    if op == "ELECT":  # a predicate, and the lane that it holds in
        writes, rest = {int(n) for n in re.findall(r"UR(\d+)", rest)}, ""
    elif re.match(r"U|R2UR|S2UR|REDUX|CS2UR|LDCU", op) and re.fullmatch(r"UR\d+", operands[0]):
        first = int(operands[0][2:])
        writes = {first, first + 1} if _PAIR.search(op) else {first}
        rest = ", ".join(operands[1:])
    # Of a product whose left operand is in registers the pair before has none.
    described = {int(n) + i for n in re.findall(r"gdesc\[UR(\d+)\]", rest) for i in (2, 3)}
    rest = re.sub(r"g?desc\[UR\d+\]", "", rest)
    reads = described | {int(n) for n in re.findall(r"UR(\d+)", rest)}
    branches = op.startswith(("BRA", "BRX"))
    certain = guard is None and not re.search(r"(^|\s)!?U?P\d", rest.split("`")[0])
    falls = not (branches or op.startswith(_ENDS)) or not certain
    falls = falls or ".DIV" in op
    targets = tuple(re.findall(r"\.L_x_\d+", rest)) if branches else ()
    copies = op in ("MOV", "UMOV")
    return _Line(place, f"{op} {rest}", frozenset(reads), frozenset(writes), copies, falls, targets)


def unset(sass: str) -> list[str]:
    """Lines of a program, as nvdisasm writes it, that read what no line before them has written."""
    lines: list[_Line] = []
    labels: dict[str, int] = {}
    for text in sass.splitlines():
        if label := _LABEL.match(text):
            labels[label[1]] = len(lines)
        elif line := _LINE.match(text):
            lines.append(_line(*line.groups()))
    if not lines:  # another way to write programs would have nothing found in it
        raise ValueError(f"unset: expected lines as nvdisasm writes them, got {sass[:100]!r}")
    known: list[frozenset[int] | None] = [frozenset(), *[None] * (len(lines) - 1)]
    todo = [0]
    while todo:
        i = todo.pop()
        line, before = lines[i], known[i]
        assert before is not None
        spoilt = line.copies and not line.reads <= before
        after = before - line.writes if spoilt else before | line.writes
        following = [labels[t] for t in line.targets if t in labels]
        for j in following + ([i + 1] if line.falls else []):
            if j >= len(lines):
                continue
            there = known[j]
            both = after if there is None else there & after
            if both != there:
                known[j] = both
                todo.append(j)
    return [
        f"{line.place}: {line.text}"
        for line, before in zip(lines, known, strict=True)
        if before is not None and line.reads - before and not line.copies
    ]


def unset_in(cubin: bytes) -> list[str]:
    """``unset`` of a compiled kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [device.triton.knobs.nvidia.nvdisasm.path, "-c", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return unset(text)
