"""How long an Ascend 910B would take for a config, estimated from Huawei's compiler's last IR.

The compiler is the judge of what is possible: a config that it refuses, or takes only after it
switched double buffering off by itself, has no estimate. For the others the estimate is a model:

* A program is followed through the final IR (``offline/hivm.py``): bytes, multiply-adds, vector
  elements and synchronisations of each pipe of its cube and vector cores. Trip counts follow from
  the launch's numbers and lists; a branch on anything else counts one arm.
* A pipe takes the amount over its rate, and some cycles an operation. Where local buffers exist
  twice the pipes of a core overlap, and the busiest counts; elsewhere they follow each other.
* Synchronisations are added. Cube and vector cores overlap where the compiler pipelined them
  (it marks such loops), elsewhere they follow each other.
* Programs go in order to the cores that are free. Up to 160 programs of a launch are followed, of
  long ones fewer, but three at least: at even distances, the first and the last among them. They
  stand for those between them (``followed`` and ``programs`` say how many). The whole takes no less
  than the least bytes of the problem need from memory; what is read again is taken to come from
  L2, at the rate of a core's port.
* ``assumed`` counts the decisions that depend on what only the chip knows; 0 says that all counts
  are exact. A kernel that skips negative slots is counted as if there were none.

Rates. A die of the 910C, which has the cores of the 910B, is published with 376 TFLOPS in bf16 on
24 cube cores and 1.6 TB/s (Zuo et al., "Serving Large Language Models on Huawei CloudMatrix384",
arXiv 2506.12708, section 3); 4096 multiply-adds a cycle (Huawei, Ascend C guide, "Basic
architecture") make that 1.91 GHz. A vector instruction handles 256 bytes (same guide). What is
ASSUMED, because nobody published it: cycles an operation and a synchronisation, 128 bytes a cycle
and core to and from memory, and fp32 at a quarter of the bf16 rate.

Nothing here was compared with a chip. It knows nothing of what L2 holds, of bank conflicts, of how
well pipes really overlap, or of what the library functions do inside. Estimates rank configs; they
are not times, and records that come from them say ``"measured": false``.
"""

from __future__ import annotations

import contextlib
import hashlib
import heapq
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from autotune.offline import hivm
from autotune.records import Answer
from tkernels import device, offline_ascend
from tkernels.offline import Launch, Variant, record_launches, variant_of
from tkernels.offline_ascend import LoweringError, Verdict
from tkernels.registry import Config, KernelSpec, Problem

MODEL = "ascend-pipes-2"

_CLOCK = 376e12 / 24 / 2 / 4096  # cycles a second
_MEMORY = 1.6e12  # bytes a second of the chip
_MACS = {"bf16": 4096, "f16": 4096, "i8": 8192, "f32": 1024}  # a cycle and cube core
_WIDTH = {"MTE2": 128, "MTE3": 128, "FIX": 128, "V": 256}  # bytes a cycle
# Cycles that an operation costs beside what it moves: assumed.
_ISSUE = {"MTE2": 100, "MTE3": 100, "FIX": 100, "V": 20, "M": 50, "S": 200}
_SYNC = {
    "set_flag": 5,
    "wait_flag": 10,
    "pipe_barrier": 20,
    "sync_block_set": 100,
    "sync_block_wait": 300,
}
_LAUNCH_S = 5e-6  # a second kernel costs that at least: assumed
_MOST_FOLLOWED = 160  # programs of a launch
_MOST_STEPS = 100_000  # of all of them together, some seconds

_Given = tuple[tuple[int, ...], list[Any]]  # grid and arguments of a launch


def estimate(spec: KernelSpec, problem: Problem, config: Config) -> Answer:
    """Milliseconds that the model gives to ``config``, or why the compiler does not take it."""
    with _listed_integers() as integers, FakeTensorMode(), record_launches() as launches:
        spec.launch(**spec.make_inputs(problem, torch.device("cpu")), config=config)
    verdicts: list[Verdict] = []
    given: list[_Given] = []
    for launch in launches:
        variant = variant_of(launch)
        try:
            linalg = offline_ascend.lower(variant)
        except LoweringError as error:
            return Answer("does not compile", str(error)[:300])
        verdict = offline_ascend.check(linalg, offline_ascend.options_of(variant))
        if verdict.reason:
            kind = "out of resources" if "overflow" in verdict.reason else "does not compile"
            return Answer(kind, verdict.reason)
        if verdict.degraded:
            return Answer("out of resources", f"fits only with {', '.join(verdict.degraded)}")
        verdicts.append(verdict)
        given.append(_given(launch, variant, integers))
    digest = hashlib.sha256(repr((spec.name, problem, given)).encode())
    for verdict in verdicts:
        digest.update(_program(verdict.hivm).encode())
    ir = digest.hexdigest()[:12]
    if ir not in _answers:  # what is the same to the last operation is followed once
        _answers[ir] = _followed(verdicts, given, spec.cost(problem).bytes / _MEMORY, ir)
    return _answers[ir]


_answers: dict[str, Answer] = {}  # by all that they follow from


def _followed(
    verdicts: Sequence[Verdict], given: Sequence[_Given], least: float, ir: str
) -> Answer:
    """The estimate of launches one after another, which take ``least`` seconds or more."""
    seconds = 0.0
    facts: dict[str, Any] = {"model": MODEL}
    for verdict, (grid, values) in zip(verdicts, given, strict=True):
        try:
            one, its = _launch_seconds(grid, values, verdict)
        except hivm.TooLongError as error:
            return Answer("not estimated", str(error))
        except hivm.CannotFollowError as error:
            return Answer("not estimated", f"its IR cannot be followed: {error}")
        seconds += one
        facts = _worst(facts, its)
    if least > seconds:
        seconds, facts["busiest"] = least, "memory"
    seconds += _LAUNCH_S * len(verdicts)
    return Answer("ok", ms=seconds * 1e3, facts={**facts, "ir": ir})


def _given(launch: Launch, variant: Variant, integers: Mapping[int, list[int]]) -> _Given:
    """(grid, arguments) of a launch: numbers, integers of tensors as far as known, or None."""
    values = (launch.args[name] for name, _ in variant.signature)
    return tuple(launch.grid), [
        integers.get(id(value)) if isinstance(value, torch.Tensor) else value for value in values
    ]


def _program(hivm_text: str) -> str:
    """The module without what the compiler says round it, paths among that."""
    return hivm_text.split("module attributes", 1)[-1].split("\n[ERROR]", 1)[0]


def compilers() -> dict[str, str]:
    """Versions of what an estimate stands on."""
    return {"model": MODEL, "chip": offline_ascend.CHIP, **offline_ascend.compilers()}


@contextlib.contextmanager
def _listed_integers() -> Iterator[dict[int, list[int]]]:
    """Values of the tensors that are made from lists of integers inside the block, by identity.

    Loops depend on such (lengths, tables), and fake tensors, of which alone there is room for
    large problems, have none.
    """
    found: dict[int, list[int]] = {}
    kept: list[torch.Tensor] = []  # or an identity might be given again
    make, move = torch.tensor, torch.Tensor.to

    def making(data: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        made = make(data, *args, **kwargs)
        if isinstance(data, list | tuple) and not made.dtype.is_floating_point:
            found[id(made)] = _flat(data)
            kept.append(made)
        return made

    def moving(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        moved = move(self, *args, **kwargs)
        if id(self) in found and not moved.dtype.is_floating_point:
            found[id(moved)] = found[id(self)]
            kept.append(moved)
        return moved

    with mock.patch.object(torch, "tensor", making), mock.patch.object(torch.Tensor, "to", moving):
        yield found


def _flat(data: Any) -> list[int]:
    if isinstance(data, list | tuple):
        return [value for part in data for value in _flat(part)]
    return [int(data)]


def _launch_seconds(
    grid: Sequence[int], values: Sequence[Any], verdict: Verdict
) -> tuple[float, dict[str, Any]]:
    """Seconds of one launch, and the facts behind it."""
    functions = hivm.functions(verdict.hivm)
    dev = device.ascend_facts()
    mixed = any(f.core == "aic" for f in functions)
    cores = dev.num_dot_cores if mixed else dev.num_cores
    programs = math.prod(grid)
    pipelined = any(f.pipelined for f in functions)
    middle = [f.follow(values, grid, programs // 2) for f in functions]
    sample = chosen(programs, sum(work.steps for work in middle))
    each: list[float] = []
    slowest, busiest, syncs, assumed = 0.0, "", 0, 0
    for program in sample:
        works = [f.follow(values, grid, program) for f in functions]
        parts = [work.totals() for work in works]
        times = [_core_seconds(totals, verdict.double_buffered > 0) for totals in parts]
        both = [seconds for seconds, _ in times]
        seconds = max(both) if pipelined else sum(both)
        each.append(seconds)
        assumed += sum(work.assumed for work in works)
        if seconds >= slowest:
            slowest, busiest = seconds, max(times)[1]
            syncs = sum(n for totals in parts for name, n in totals.items() if "sync" in name)
    facts = {
        "ub_bytes": verdict.ub,
        "l1_bytes": verdict.l1,
        "l0c_bytes": verdict.l0c,
        "double_buffered": verdict.double_buffered,
        "pipelined": pipelined,
        "syncs": syncs,
        "busiest": busiest,
        "assumed": assumed,
        "programs": programs,
        "followed": len(sample),
    }
    return makespan(each, programs, cores), facts


def chosen(programs: int, steps: int) -> list[int]:
    """Numbers of the programs that are followed, each of about ``steps`` steps: all, or some at
    even distances with both ends."""
    most = max(3, min(_MOST_FOLLOWED, _MOST_STEPS // max(1, steps)))
    if programs <= most:
        return list(range(programs))
    return [i * (programs - 1) // (most - 1) for i in range(most)]


def makespan(each: Sequence[float], programs: int, cores: int) -> float:
    """Seconds till the last core is done, where each next program goes to the first free core.

    ``each``: seconds of the programs that were followed, spread evenly over all ``programs``.
    """
    free = [0.0] * min(cores, programs)
    for program in range(programs):
        heapq.heapreplace(free, free[0] + each[program * len(each) // programs])
    return max(free)


def _core_seconds(totals: Mapping[str, int], overlapping: bool) -> tuple[float, str]:
    """Seconds of one core's part of a program, and its busiest pipe."""
    cycles: dict[str, float] = {}
    for pipe in hivm.PIPES:
        ops = totals.get(f"{pipe} ops", 0)
        if ops:
            cycles[pipe] = ops * _ISSUE[pipe] + _amount(totals, pipe)
    if not cycles:
        return 0.0, "S"
    busiest = max(cycles, key=lambda pipe: cycles[pipe])
    body = cycles[busiest] if overlapping else sum(cycles.values())
    syncs = sum(n * _SYNC[name[5:]] for name, n in totals.items() if name.startswith("sync "))
    return (body + syncs) / _CLOCK, busiest


def _amount(totals: Mapping[str, int], pipe: str) -> float:
    """Cycles that a pipe needs for what it moves or computes."""
    if pipe == "M":
        return sum(
            n / _MACS.get(name[7:], 1024) for name, n in totals.items() if name[:6] == "M macs"
        )
    if pipe == "S":
        return 0.0
    return totals.get(f"{pipe} bytes", 0) / _WIDTH[pipe]


def _worst(facts: dict[str, Any], its: dict[str, Any]) -> dict[str, Any]:
    """Facts of several launches: the largest sizes, and the first one's words."""
    found = dict(facts)
    for name, value in its.items():
        if type(value) is int and name in found:
            found[name] = max(found[name], value)
        else:
            found.setdefault(name, value)
    return found
