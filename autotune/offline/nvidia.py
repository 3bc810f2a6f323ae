"""How long a config would take on an H100, as a compiler and a model see it, with no GPU present.

Each launch of a problem is compiled by Triton and its ptxas; ``sass.py`` reads the machine
code, ``nvidia_work.py`` says what each program has to do. Bounds of a launch, in seconds:

* memory: the bytes that the problem must move, over the measured copy rate; and all bytes that
  loads and stores name, over the rate of the L2 cache, or of the busiest core's way to it.
* compute: products over the rate of the tensor cores that was measured, and instructions over four
  a cycle and core, both on the core that has most to do.
* latency: one warp's way through its program, alone, as ptxas scheduled it and with memory's
  latency, times the rounds of programs that the busiest place of a core gets to run. This is where
  bytes in flight, dependent loads, barriers, the tail of the last wave and spills come in. The way
  of one program with one step stands apart ("ramp"): before it nothing streams.

Ramp and start of a kernel are added. The other three overlap, but not wholly: they join as the n-th
root of the sum of n-th powers. Compute joins by fourth powers. Latency joins memory by sixth powers
where copies run so far ahead that a warp hardly waits for memory; else a program that waits loads
nothing meanwhile, and others of its core fill the gaps: cubes, or powers of 1.5 if it is alone.
Constants are published or measured ones, named below; the powers were chosen by the times of a few
dozen configs.

What the model does not know: what is in L2 when a program runs (as many bytes are read cold as the
problem needs at least, the others hit), so nothing of orders that keep keys in L2 (``SECTION``);
bank conflicts; pages of memory that are opened for little; how warps of one program wait for each
other's unequal ways; the clock under load; values, so also which forward branches are taken (all
guarded work runs). Of a warp-specialised body (``variant`` hopper) it knows the products, a fixed
cost a step and a tile, and how even the tiles are dealt, but not its code: stages make no
difference. It is for ranking. It is not a time.
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
import importlib
import math
import subprocess
from collections.abc import Collection, Hashable, Iterable, Mapping
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from autotune.offline import nvidia_work, sass
from autotune.offline.nvidia_work import Work
from autotune.records import Answer, encode, label_of
from tkernels import device, offline
from tkernels.device import cdiv
from tkernels.registry import Config, KernelSpec, Problem

MODEL = "nvidia-roofline-1"


@dataclasses.dataclass(frozen=True)
class Chip:
    """Rates and limits; the values are those of an H100 SXM (sm_90)."""

    cores: int = 132
    clock: float = 1.7e9  # under load; 1.98e9 at most (data sheet)
    memory: float = 3.03e12  # bytes/s, measured of reading (CONTRIBUTING); a copy: 3.015
    l2: float = 5.5e12  # bytes/s, as published microbenchmarks have it
    core_bytes: float = 64  # a cycle, between one core and L2
    sector: int = 32  # bytes that are moved at least
    products: float = 776e12  # flop/s, attention without softmax (CONTRIBUTING)
    old_products: float = 400e12  # by mma.sync, which reaches 60% of wgmma
    memory_cycles: float = 800  # load latency of what is not in L2, cold address translation too
    l2_cycles: float = 270
    registers: int = 65536
    register_unit: int = 256  # registers are given to a warp in such portions
    warps: int = 64
    programs: int = 32
    shared: int = 228 * 1024  # of a core, of which each program has
    shared_reserve: int = 1024  # for the system
    shared_most: int = 227 * 1024  # that one program may ask for
    start: float = 0.75e-6  # s, of a kernel in a graph that does nothing
    start_overlapped: float = 0.35e-6  # of one that starts while the one before it still runs
    program_start: float = 250  # cycles until a program's first instruction has run, and to end


H100 = Chip()
_AHEAD, _TOGETHER, _ALONE, _COMPUTE = 6.0, 3.0, 1.5, 4.0  # powers by which bounds join
_HARDLY = 0.1  # of its time a warp waits for memory
# Cycles of a warp-specialised body, a step and a tile, besides products: softmax that nothing
# covers, first loads, the end of a tile. From its times with key blocks of 128 and 64, and with
# many short tiles.
_STEP_CYCLES, _TILE_CYCLES = 325, 3600


@dataclasses.dataclass(frozen=True)
class Footprint:
    """What one program of a compiled kernel takes of a core."""

    registers: int  # a thread
    shared_bytes: int
    warps: int


@dataclasses.dataclass(frozen=True)
class Bounds:
    """Seconds of one launch by each bound alone, of its first program's step, and of its start."""

    memory: float
    compute: float
    latency: float  # less ``ramp``
    ramp: float
    launch: float
    power: float = _TOGETHER  # by which latency joins memory

    @property
    def seconds(self) -> float:
        """All of it."""
        streaming = joined(self.power, self.memory, self.latency)
        return self.launch + self.ramp + joined(_COMPUTE, streaming, self.compute)


def joined(power: float, *parts: float) -> float:
    """The norm of ``parts``: their sum for power 1, their maximum for an infinite one."""
    most = max(parts)
    return most * sum((part / most) ** power for part in parts) ** (1 / power) if most else 0.0


# ---- the model: numbers in, numbers out ---------------------------------------------------------


def too_much(need: Footprint, chip: Chip = H100) -> str | None:
    """Why no core could run such a program; None if one can."""
    if need.shared_bytes > chip.shared_most:
        return f"shared memory: {need.shared_bytes} bytes, {chip.shared_most} there"
    if need.registers > 255 or _warp_registers(need, chip) * need.warps > chip.registers:
        taken = need.registers * 32 * need.warps
        return f"registers: {need.registers} a thread, {taken} in all, {chip.registers} there"
    if need.warps > 32:
        return f"threads: {need.warps * 32}, 1024 there"
    return None


def _warp_registers(need: Footprint, chip: Chip) -> int:
    return cdiv(max(need.registers, 1) * 32, chip.register_unit) * chip.register_unit


def occupancy(need: Footprint, chip: Chip = H100) -> int:
    """Programs that a core holds at once; 0 if none fits."""
    if too_much(need, chip):
        return 0
    # Each of the four schedulers has its own registers and warps.
    by_registers = chip.registers // 4 // _warp_registers(need, chip) * 4 // need.warps
    by_shared = chip.shared // (need.shared_bytes + chip.shared_reserve)
    return max(1, min(by_registers, by_shared, chip.warps // need.warps, chip.programs))


def spans(costs: Iterable[float], places: int) -> float:
    """When the last of ``places`` is done, if each takes the next program as it gets free."""
    free = [0.0] * places
    for cost in costs:
        heapq.heapreplace(free, free[0] + cost)
    return max(free)


def time_of(
    need: Footprint,
    one: sass.Walk,
    *,
    ramp_cycles: float,
    exposed: float,
    programs: int,
    uneven: tuple[float, float],
    needed_bytes: float,
    useful: float,
    run: int = 128,
    overlapped: bool,
    chip: Chip = H100,
) -> Bounds:
    """Bounds of a launch whose ``programs`` do ``one`` each on average.

    ``ramp_cycles``: of a program with one step. ``exposed``: share of its time that a warp waits
    for memory. ``uneven``: the busiest place's share over the average one's, of places in cores and
    of cores.
    ``needed_bytes``: what must come from and go to memory. ``useful``: share of the lanes that move
    something. ``run``: bytes of a tile that lie together, up to a cache line of 128.
    """
    threads = 32 * need.warps
    resident = occupancy(need, chip)
    places = min(programs, resident * chip.cores)
    cores = min(programs, chip.cores)
    rounds = programs / places * uneven[0]
    a_core = programs / cores * uneven[1]
    moved = (one.loaded + one.stored) * threads * useful * max(1.0, chip.sector / run)
    local = one.spilled * threads  # in L1, and in L2 when it does not fit
    memory = max(
        needed_bytes * max(1.0, chip.sector / run) / chip.memory,
        programs * moved / chip.l2,
        a_core * (moved + local) / min(chip.core_bytes, run) / chip.clock,
    )
    products = one.mma * need.warps * 4096 * a_core * chip.cores / chip.old_products
    products += one.wgmma * need.warps / 4 * 2048 * a_core * chip.cores / chip.products
    shared = one.shared * threads / 128  # cycles: 128 bytes each
    special = one.special * threads / 16
    issue = one.issued * need.warps / 4
    compute = max(products, a_core * max(issue, shared, special) / chip.clock)
    ramp = (ramp_cycles + chip.program_start) / chip.clock
    latency = max(0.0, rounds * (one.cycles + chip.program_start) / chip.clock - ramp)
    launch = chip.start_overlapped if overlapped else chip.start
    power = _TOGETHER if min(resident * chip.cores, programs) > chip.cores else _ALONE
    power = _AHEAD if exposed < _HARDLY else power
    return Bounds(memory, compute, latency, ramp, launch, power)


def deciding(bounds: Iterable[Bounds]) -> str:
    """Which bound has most of the time."""
    summed = {
        name: sum(getattr(b, name) for b in bounds_list)
        for bounds_list in [list(bounds)]
        for name in ("memory", "compute", "latency", "ramp", "launch")
    }
    summed["latency"] += summed.pop("ramp")
    return max(summed, key=lambda name: summed[name])


# ---- from a config to those numbers ------------------------------------------------------------


def estimate(spec: KernelSpec, problem: Problem, config: Config) -> Answer:
    """Milliseconds by the model, or why there are none.

    For a process with TKERNELS_DEVICE=compile:sm90.
    """
    reason = spec.why_illegal(config, problem, device.current())
    if reason is not None:
        return Answer("illegal", reason)
    if spec.name in nvidia_work.UNCOUNTED:
        return Answer("not estimated", f"how long the loops of {spec.name} are is not modelled")
    launches = _launches(spec, problem, config)
    compiled: list[Compiled] = []
    for launch in launches:
        one = _compile(launch)
        if isinstance(one, str):
            return Answer("does not compile", one)
        reason = too_much(one.need)
        if reason is not None:
            return Answer("out of resources", f"{launch.fn.__name__}: {reason}")
        compiled.append(one)
    needed = float(spec.cost(problem).bytes)
    bounds = []
    for place, (launch, one) in enumerate(zip(launches, compiled, strict=True)):
        work = nvidia_work.of_launch(spec.name, problem, launch)
        bounds.append(_bounds(one, launch, work, needed if place == 0 else 0.0))
    ms = 1e3 * sum(b.seconds for b in bounds)
    if not math.isfinite(ms):
        raise ArithmeticError(f"offline.nvidia: {spec.name} with {config} gave {bounds}")
    main = compiled[0]
    resident = occupancy(main.need)
    facts = {
        "registers": max(c.need.registers for c in compiled),
        "spill_bytes": max(c.program.spill_bytes for c in compiled),
        "shared_bytes": max(c.need.shared_bytes for c in compiled),
        "occupancy": resident,
        "waves": round(math.prod(launches[0].grid) / (resident * H100.cores), 6),
        "bound": deciding(bounds),
        "model": MODEL,
        **compilers(),
    }
    return Answer("ok", ms=ms, facts=facts)


@functools.cache
def compilers() -> dict[str, str]:
    """Versions of what ``estimate`` asks."""
    tool = importlib.import_module("triton").knobs.nvidia.ptxas
    done = subprocess.run([tool.path, "--version"], capture_output=True, text=True, check=True)
    release = done.stdout.split(", V")[-1].split()[0]
    return {"triton": device.versions()["triton"], "ptxas": release}


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A compiled kernel: its code and what it takes."""

    program: sass.Program
    need: Footprint


_inputs: dict[str, tuple[FakeTensorMode, dict[str, Any]]] = {}
_programs: dict[Hashable, Compiled | str] = {}


def _launches(spec: KernelSpec, problem: Problem, config: Config) -> list[offline.Launch]:
    """What the launcher would launch. Its tensors have no memory; those of one problem are kept."""
    label = label_of({"kernel": spec.name, "problem": encode(problem)})
    if label not in _inputs:
        _inputs.clear()
        mode = FakeTensorMode()
        with mode:
            _inputs[label] = mode, spec.make_inputs(problem, torch.device("cpu"))
    mode, inputs = _inputs[label]
    with mode, offline.record_launches() as launches:
        spec.launch(**inputs, config=config)
    return launches


def _compile(launch: offline.Launch) -> Compiled | str:
    """The compiled program of a launch, each distinct one once, or what the compiler says."""
    signature, constants, attributes = offline.arguments_of(launch)
    identity = (
        launch.fn,
        *(
            repr(part)
            for part in (signature, constants, attributes, sorted(launch.options.items()))
        ),
    )
    if identity not in _programs:
        try:
            kernel = offline.compiled_cuda(launch, 90)
        except Exception as error:  # a compiler may raise anything
            cause: BaseException = error
            while cause.__cause__ is not None:  # the outermost shows a source, the innermost why
                cause = cause.__cause__
            line = " ".join(str(cause).split())[-300:]
            _programs[identity] = f"{type(error).__name__}: {line}"
        else:
            program = sass.read(kernel.asm["cubin"])
            warps, shared = int(kernel.metadata.num_warps), int(kernel.metadata.shared)
            _programs[identity] = Compiled(program, Footprint(program.registers, shared, warps))
    return _programs[identity]


def _bounds(one: Compiled, launch: offline.Launch, work: Work, needed: float) -> Bounds:
    if one.program.specialized:
        return _specialized(work, launch, needed)
    chip = H100
    counts = work.of_programs()
    # What is loaded beyond the bytes that are needed comes out of L2.
    walks = _walks(one.program, launch, work, counts, chip.memory_cycles)
    named = sum(n * (walks[pair].loaded + walks[pair].stored) for pair, n in counts.items())
    named *= 32 * one.need.warps * work.useful
    cold = min(1.0, needed / named) if named else 0.0
    memory = chip.l2_cycles + cold * (chip.memory_cycles - chip.l2_cycles)
    costs = _walks(one.program, launch, work, counts, memory)
    mean = sass.Walk()
    for pair, count in counts.items():
        mean = mean.plus(costs[pair], count / work.programs)
    no_wait = _walks(one.program, launch, work, counts, 1.0)
    busy = sum(no_wait[pair].cycles * count for pair, count in counts.items()) / work.programs
    uneven = _uneven(one.need, work, {pair: w.cycles for pair, w in costs.items()})
    return time_of(
        one.need,
        mean,
        exposed=1 - busy / mean.cycles,
        ramp_cycles=_walk(one.program, launch, work, 1, 1, memory).cycles,
        programs=work.programs,
        uneven=uneven,
        needed_bytes=needed,
        useful=work.useful,
        run=work.run,
        overlapped=bool(launch.options.get("launch_pdl")),
    )


def _walks(
    program: sass.Program,
    launch: offline.Launch,
    work: Work,
    pairs: Collection[tuple[int, int]],
    memory: float,
) -> dict[tuple[int, int], sass.Walk]:
    """The way of a program for each (tiles, steps); of many different ones, from three of them.

    A walk is linear in both, but for its first few steps.
    """

    def walk(tiles: int, steps: int) -> sass.Walk:
        return _walk(program, launch, work, tiles, steps, memory)

    if len(pairs) <= 3:
        return {pair: walk(*pair) for pair in pairs}
    few, many = work.masked + 16, work.masked + 28
    base = walk(1, few)
    a_step = walk(1, many).plus(base, -1.0).times(1 / (many - few))
    a_tile = walk(2, 2 * few).plus(base, -1.0).plus(a_step, -float(few))
    idle = walk(0, 0)
    return {
        (tiles, steps): base.plus(a_tile, tiles - 1).plus(a_step, steps - few) if tiles else idle
        for tiles, steps in pairs
    }


def _walk(
    program: sass.Program,
    launch: offline.Launch,
    work: Work,
    tiles: int,
    steps: int,
    memory: float,
) -> sass.Walk:
    if tiles == 0:
        return sass.Walk(cycles=memory)  # it asks what there is to do, and ends
    one_tile = bool(launch.args.get("ONE_TILE", "n_tiles" not in launch.args))
    outer = [] if one_tile else [loop for loop in program.loops if loop.depth == 0]
    inner = [loop for loop in program.loops if loop.inner and loop not in outer]
    a_tile = max(1, round(steps / tiles))
    trips = {loop.last: tiles for loop in outer} | {loop.last: a_tile for loop in inner}
    if work.masked and len(inner) > 1:
        for loop in inner[:-1]:
            trips[loop.last] = max(1, a_tile - work.masked)
        trips[inner[-1].last] = min(a_tile, work.masked)
    return sass.walk(program, trips, memory)


def _uneven(
    need: Footprint, work: Work, cycles: Mapping[tuple[int, int], float]
) -> tuple[float, float]:
    """The busiest place's cycles over the average one's: of all places, and of cores."""
    chip = H100
    found = []
    for places in (occupancy(need) * chip.cores, chip.cores):
        used = min(places, work.programs)
        if len(cycles) == 1:
            found.append(cdiv(work.programs, used) * used / work.programs)
            continue
        order = [cycles[pair] for pair in work.in_order()]
        found.append(spans(order, used) / (sum(order) / used))
    return found[0], found[1]


def _specialized(work: Work, launch: offline.Launch, needed: float) -> Bounds:
    """Of a warp-specialised, persistent body: products, and a cost a step, dealt as they are."""
    chip = H100
    m, n, d = (int(launch.args[name]) for name in ("M", "N", "D"))
    a_step = 4 * m * n * d / (chip.products / chip.cores) + _STEP_CYCLES / chip.clock
    a_tile = _TILE_CYCLES / chip.clock
    compute = max(tiles * a_tile + steps * a_step for tiles, steps in work.in_order())
    ramp = (2 * chip.memory_cycles + chip.program_start) / chip.clock
    return Bounds(needed / chip.memory, compute, 0.0, ramp, chip.start)
