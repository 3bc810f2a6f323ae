"""NVIDIA machine code (sm_80 to sm_90) read as far as a time can be told from it.

ptxas has worked out how long each instruction must wait and writes it beside the instruction: 128
bits, of which bits 105 to 125 are the cycles to the next issue, a barrier that the result will
clear, and the barriers to wait for (Jia et al., 2018, arXiv 1804.06826, chapter 2; bit 64 stands
first in the upper word here). So one warp's way through a program can be timed by reading it, given
how long memory takes. Numbers of instructions and fields are those that nvdisasm shows.
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Iterator, Mapping, Sequence

# Lower 9 bits of an instruction; the next 3 say where its operands come from.
_OPCODES = {
    0x03C: "HMMA",
    0x1F0: "HGMMA",
    0x108: "MUFU",
    0x189: "SHFL",
    0x181: "LDG",
    0x186: "STG",
    0x1AE: "LDGSTS",
    0x183: "LDL",
    0x187: "STL",
    0x184: "LDS",
    0x188: "STS",
    0x03B: "LDSM",
    0x044: "STSM",
    0x11D: "BAR",
    0x11A: "DEPBAR",
    0x1AF: "LDGDEPBAR",
    0x1C5: "WARPGROUP",
    0x1C8: "USETMAXREG",
    0x147: "BRA",
    0x149: "BRX",
    0x14D: "EXIT",
}
_WIDTHS = (1, 1, 2, 2, 4, 8, 16, 16)  # bytes a thread, by bits 73 to 75
_TRUE, _NEVER = 7, 15  # predicates
_NO_BARRIER = 7
# Passes of a loop that are walked, and how many, the last of them, stand for the rest. With copies
# n passes ahead times repeat every n passes, and 12 divides by most n.
_INNER_PASSES, _OUTER_PASSES = (16, 12), (3, 1)
_SPIN = 8  # a shorter loop waits for a barrier

# Cycles until a result is there, of what has no fixed latency. Memory is a parameter. Published
# measurements of an H100 (Luo et al., 2024, arXiv 2402.13499), rounded.
_LATENCY = {"MUFU": 24, "SHFL": 24, "LDS": 30, "LDSM": 33, "LDL": 40, "LDGDEPBAR": 4}
_OTHER_LATENCY = 20
_READ = 12  # cycles until the operands of a store have been read
_BAR_SYNC = 30
_HMMA = 8  # at least, between two of one warp: mma.sync reaches 60% of 512 products a cycle


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One instruction; ``target`` is the place that a branch goes to, in instructions."""

    name: str = ""  # "" for what has no part in the model
    always: bool = True  # has no predicate
    width: int = 0  # bytes a thread, of what moves memory
    stall: int = 1
    sets: int = _NO_BARRIER
    sets_read: int = _NO_BARRIER  # barrier that is cleared when its operands have been read
    waits: int = 0  # mask of barriers
    left: int = 0  # groups that a DEPBAR leaves in flight
    columns: int = 0  # N of an HGMMA
    target: int = -1


@dataclasses.dataclass(frozen=True)
class Loop:
    """A loop from ``first`` to its branch at ``last``; ``depth`` 0 has no loop around it."""

    first: int
    last: int
    depth: int
    inner: bool  # has no loop within


@dataclasses.dataclass(frozen=True)
class Program:
    """A kernel's instructions, its loops in order of their ends, and its registers a thread."""

    code: tuple[Instruction, ...]
    loops: tuple[Loop, ...]
    taken: frozenset[
        int
    ]  # forward branches with a predicate that lead to more work than what follows
    registers: int

    @property
    def spill_bytes(self) -> int:
        """Bytes that a thread writes to local memory, each store counted once.

        ptxas' own "bytes spill stores" is up to a few percent less.
        """
        return sum(i.width for i in self.code if i.name == "STL")

    @property
    def specialized(self) -> bool:
        """Whether its warps part into roles, so that no single way through it stands for all."""
        return any(i.name in ("USETMAXREG", "BRX") for i in self.code)


@dataclasses.dataclass
class Walk:
    """What one warp did on its way: cycles, and sums over all it ran."""

    cycles: float = 0.0
    issued: float = 0.0
    loaded: float = 0.0  # bytes a thread, from global memory
    stored: float = 0.0
    spilled: float = 0.0  # bytes a thread, to and from local memory
    shared: float = 0.0  # bytes a thread, to and from shared memory
    mma: float = 0.0  # HMMA instructions
    wgmma: float = 0.0  # columns of HGMMA instructions, 64 rows x 16 values deep
    special: float = 0.0  # MUFU

    def plus(self, other: Walk, factor: float = 1.0) -> Walk:
        """The sum of both, the other times ``factor``."""
        return Walk(
            *(
                getattr(self, f.name) + factor * getattr(other, f.name)
                for f in dataclasses.fields(self)
            )
        )

    def times(self, factor: float) -> Walk:
        """All of it, ``factor`` times."""
        return Walk().plus(self, factor)


# ---- reading ------------------------------------------------------------------------------------


def read(cubin: bytes) -> Program:
    """The kernel in a cubin (an ELF file with one function)."""
    sections = dict(_sections(cubin))
    text = next(body for name, body in sections.items() if name.startswith(".text."))
    code = [_instruction(text, at) for at in range(0, len(text), 16)]
    return program_of(code, _registers(sections[".nv.info"]))


def program_of(code: Sequence[Instruction], registers: int) -> Program:
    """A program with what its instructions tell of loops and branches."""
    loops = _loops(code)
    return Program(tuple(code), loops, _taken(code, loops), registers)


def _sections(elf: bytes) -> Iterator[tuple[str, bytes]]:
    (start,) = struct.unpack_from("<Q", elf, 40)
    size, count, names_at = struct.unpack_from("<HHH", elf, 58)
    heads = [struct.unpack_from("<IIQQQQIIQQ", elf, start + i * size) for i in range(count)]
    for head in heads:
        name_at = heads[names_at][4] + head[0]
        name = elf[name_at : elf.index(b"\0", name_at)].decode()
        yield name, elf[head[4] : head[4] + head[5]]


def _registers(info: bytes) -> int:
    """The attribute REGCOUNT: format 4, kind 0x2f, 8 bytes (symbol, registers)."""
    at = info.find(b"\x04\x2f\x08\x00")
    if at < 0:
        raise ValueError("sass: .nv.info must have a REGCOUNT, got none")
    return int(struct.unpack_from("<I", info, at + 8)[0])


def _instruction(text: bytes, at: int) -> Instruction:
    low, high = struct.unpack_from("<QQ", text, at)
    control = high >> 41
    name = _OPCODES.get(low & 0x1FF, "")
    never = (low >> 12) & 0xF == _NEVER
    if never or (name == "WARPGROUP" and not low >> 47 & 1):  # its ARRIVE waits for nothing
        name = ""
    target = -1
    if name == "BRA":
        words = (low >> 34) & 0x3FFFFFFF
        words -= (words >> 29) << 30  # signed
        target = at // 16 + 1 + ((words << 8) | ((low >> 16) & 0xFF)) * 4 // 16
    return Instruction(
        name=name,
        always=(low >> 12) & 0xF == _TRUE,
        width=_WIDTHS[(high >> 9) & 7],
        stall=control & 0xF,
        sets=(control >> 5) & 7,
        sets_read=(control >> 8) & 7,
        waits=(control >> 11) & 0x3F,
        left=(high >> 8) & 0x3F if name == "WARPGROUP" else (low >> 38) & 0x3F,
        columns=(((low >> 53) & 0x1F) + 1) * 8,
        target=target,
    )


def _loops(code: Sequence[Instruction]) -> tuple[Loop, ...]:
    spans = {
        i.target: at  # the last branch back to a place ends its loop
        for at, i in enumerate(code)
        if i.name == "BRA" and i.target >= 0 and at - i.target >= _SPIN
    }
    found = []
    for first, last in sorted(spans.items(), key=lambda span: span[1]):
        around = sum(f < first and last < e for f, e in spans.items())
        inner = not any(first < f and e < last for f, e in spans.items())
        found.append(Loop(first, last, around, inner))
    return tuple(found)


def _taken(code: Sequence[Instruction], loops: Sequence[Loop]) -> frozenset[int]:
    """Branches to the longer of two ways to the end; what lies in a loop counts many times."""
    found = set()
    ahead = [0] * (len(code) + 1)  # instructions from here to the end
    for at in reversed(range(len(code))):
        i, following = code[at], ahead[at + 1]
        if i.name == "EXIT" and i.always:
            following = 0
        elif i.name == "BRA" and at < i.target < len(code):
            if i.always:
                following = ahead[i.target]
            elif ahead[i.target] > following:
                found.add(at)
                following = ahead[i.target]
        depth = sum(loop.first <= at <= loop.last for loop in loops)
        ahead[at] = following + 100**depth
    return frozenset(found)


# ---- walking ------------------------------------------------------------------------------------


def walk(program: Program, trips: Mapping[int, int], memory: float) -> Walk:
    """One warp's way, alone on its core: ``trips`` of each loop (by place of its branch), cycles of
    a load.

    All guarded work is done: of two ways the longer one is taken.
    """
    code = program.code
    ends = {loop.last: loop for loop in program.loops}
    barriers = [0.0] * 8
    copies: list[float] = []  # when each group of asynchronous copies has arrived
    open_copy = products = 0.0
    total = Walk()
    passes: dict[int, list[Walk]] = {}
    now, at, budget = 0.0, 0, 1000 * len(code)
    while at < len(code):
        i, budget = code[at], budget - 1
        assert budget > 0, "sass: this program has no end"
        for b in range(6):
            if i.waits >> b & 1:
                now = max(now, barriers[b])
        total.issued += 1
        name, latency = i.name, 0.0
        if name:
            if name == "LDG":
                latency = memory
                total.loaded += i.width
            elif name == "LDGSTS":
                open_copy = now + memory
                total.loaded += i.width
            elif name == "LDGDEPBAR":
                copies.append(open_copy)
            elif name == "DEPBAR" and len(copies) > i.left:
                now = max(now, copies[-1 - i.left])
            elif name == "STG":
                total.stored += i.width
            elif name in ("LDL", "STL"):
                total.spilled += i.width
            elif name in ("LDS", "STS", "STSM", "LDSM"):
                total.shared += i.width
            elif name == "BAR":
                now += _BAR_SYNC
            elif name == "MUFU":
                total.special += 1
            elif name == "HMMA":
                total.mma += 1
                now += max(0, _HMMA - i.stall)
            elif name == "HGMMA":
                total.wgmma += i.columns
                products = max(products, now) + i.columns / 2
            elif name == "WARPGROUP" and i.left == 0:
                now = max(now, products)
            latency = latency or _LATENCY.get(name, 0)
        if i.sets != _NO_BARRIER:
            barriers[i.sets] = max(barriers[i.sets], now + (latency or _OTHER_LATENCY))
        if i.sets_read != _NO_BARRIER:
            barriers[i.sets_read] = max(barriers[i.sets_read], now + _READ)
        now += max(i.stall, 1)
        total.cycles = now
        if name == "EXIT" and i.always:
            break
        if name != "BRA":
            at += 1
        elif at in ends:
            at, now = _turn(ends[at], trips.get(at, 1), passes, total, now, barriers, copies)
        elif i.target > at and (i.always or at in program.taken):
            at = i.target
        else:
            at += 1
    return total


def _turn(
    loop: Loop,
    trips: int,
    passes: dict[int, list[Walk]],
    total: Walk,
    now: float,
    barriers: list[float],
    copies: list[float],
) -> tuple[int, float]:
    """(where to go on, cycles) at the end of a loop; the rest of many trips is added at once."""
    done = passes.setdefault(loop.last, [])
    done.append(dataclasses.replace(total))
    passes_walked, last = _INNER_PASSES if loop.inner else _OUTER_PASSES
    if len(done) < min(trips, passes_walked):
        return loop.first, now
    rest = trips - len(done)
    if rest > 0:
        one = done[-1].plus(done[-1 - last], -1.0).times(1 / last)
        summed = total.plus(one, rest)
        total.__dict__.update(summed.__dict__)
        passed = one.cycles * rest
        now += passed
        barriers[:] = [time + passed for time in barriers]
        copies[:] = [time + passed for time in copies]
    passes[loop.last] = []
    return loop.last + 1, now
