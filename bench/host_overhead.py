"""What a public call costs on the host beyond the bare Triton launch.

The launches that a public call makes are recorded once, by replacing the ``run`` method through
which every ``kernel[grid](...)`` goes. Then blocks of public calls and blocks of the recorded
launches take turns. A block is short enough not to fill the launch queue, and the device is waited
for between blocks, outside the time taken.

On the interpreter ``run`` does nothing in both kinds of block, so what remains is the price of
our Python: checks, strides, config lookup (less the checks of values, which are on by default there
and off elsewhere). On an accelerator both kinds really launch.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import gc
import inspect
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from bench import report
from bench.rows import UsageError
from bench.run import case_tag, select
from tkernels import check, device, offline, testing
from tkernels.registry import Case, KernelSpec

_BLOCK = 200  # calls; a CUDA stream queues 1,024 launches before it makes the host wait
_LIMIT_US = 2.0  # what a memoised call may cost over the bare launch

Call = Callable[[], Any]


@dataclasses.dataclass(frozen=True)
class Overhead:
    """Microseconds a call on the host: medians of blocks."""

    kernel: str
    case: str
    launches: int  # kernels that one call starts
    public_us: float
    bare_us: float
    extra_us: float  # median of the differences of neighbouring blocks
    device: str
    real_launch: bool  # False: the launch was replaced by nothing


def measure(spec: KernelSpec, case: Case, *, calls: int = 2000) -> Overhead:
    """Time about ``calls`` public calls of ``spec`` on ``case`` against as many bare launches."""
    real = device.current().arch != "interpret"
    public = public_call(spec, case)
    public()  # compiles
    launches = recorded_launches(public)
    if not launches:
        raise UsageError(f"bench: {spec.name} must launch a Triton kernel on {case.name}, got none")
    bare = launches[0] if len(launches) == 1 else _all(launches)
    blocks = max(3, calls // _BLOCK)
    with contextlib.nullcontext() if real else _nothing_runs():
        pairs = _alternate(public, bare, blocks)
    return Overhead(
        kernel=spec.name,
        case=case.name,
        launches=len(launches),
        public_us=statistics.median(a for a, _ in pairs),
        bare_us=statistics.median(b for _, b in pairs),
        extra_us=statistics.median(a - b for a, b in pairs),
        device=device.current().name,
        real_launch=real,
    )


def public_call(spec: KernelSpec, case: Case) -> Call:
    """The public function bound to inputs and preallocated outputs, as a model calls it."""
    inputs = spec.make_inputs(case.problem, device.tensor_device())
    results = testing.tensors_of(spec.reference(**testing.clone_inputs(inputs)))
    outs = {
        name: torch.empty_like(result, memory_format=torch.contiguous_format)
        for name, result in zip(spec.outputs, results, strict=False)
    }
    parameters = inspect.signature(spec.launch).parameters.values()
    places = [p.name for p in parameters if p.kind is not p.KEYWORD_ONLY]
    positional = [inputs[name] for name in places]
    keywords = {name: value for name, value in {**inputs, **outs}.items() if name not in places}
    return functools.partial(spec.launch, *positional, **keywords)


@contextlib.contextmanager
def _nothing_runs() -> Iterator[None]:
    """Launches do nothing, and values are checked as they are where they do something: not."""
    checked, check.DEBUG = check.DEBUG, False
    try:
        with offline.replaced_run(_nothing):
            yield
    finally:
        check.DEBUG = checked


def _nothing(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
    pass


def recorded_launches(call: Call) -> list[Call]:
    """The bare ``kernel[grid](...)`` launches that ``call`` makes, ready to be made again."""
    launches: list[Call] = []
    original: Any = None

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        launches.append(lambda: self[grid](*args, **kwargs))
        return original(self, *args, grid=grid, warmup=warmup, **kwargs)

    with offline.replaced_run(run) as before:
        original = before
        call()
    return launches


def _all(launches: Sequence[Call]) -> Call:
    def call() -> None:
        for launch in launches:
            launch()

    return call


def _alternate(public: Call, bare: Call, blocks: int) -> list[tuple[float, float]]:
    """Microseconds a call of (public, bare), for each pair of neighbouring blocks."""
    for fn in (public, bare):
        _block_us(fn)  # warm up
    pairs = []
    for i in range(blocks):
        if i % 2:
            b = _block_us(bare)
            pairs.append((_block_us(public), b))
        else:
            pairs.append((_block_us(public), _block_us(bare)))
    return pairs


def _block_us(fn: Call) -> float:
    device.synchronize()
    collecting = gc.isenabled()
    gc.disable()
    try:
        start = time.perf_counter_ns()
        for _ in range(_BLOCK):
            fn()
        spent = time.perf_counter_ns() - start
    finally:
        if collecting:
            gc.enable()
    device.synchronize()
    return spent / _BLOCK / 1e3


def smallest_cases(kernel: str) -> list[tuple[KernelSpec, Case]]:
    """The case of each chosen kernel that moves the fewest bytes: the device must keep up."""
    smallest: dict[str, tuple[KernelSpec, Case]] = {}
    for spec, case in select(kernel, ""):
        known = smallest.get(spec.name)
        if known is None or spec.cost(case.problem).bytes < spec.cost(known[1].problem).bytes:
            smallest[spec.name] = (spec, case)
    return list(smallest.values())


def main(argv: Sequence[str]) -> int:
    """``python -m bench host``."""
    parser = argparse.ArgumentParser(
        prog="python -m bench host",
        description="Host cost of a public call (config lookup memoised) over the bare launch.",
        epilog="example: python -m bench host --kernel rms_norm --calls 10000",
    )
    parser.add_argument("--kernel", default="all", metavar="NAME", help="one kernel, or all")
    parser.add_argument("--calls", type=int, default=2000, metavar="N", help="calls of each kind")
    parser.add_argument("--json", action="store_true", help="print JSON, nothing else")
    args = parser.parse_args(list(argv))
    found = [measure(spec, case, calls=args.calls) for spec, case in smallest_cases(args.kernel)]
    if args.json:
        print(json.dumps([dataclasses.asdict(o) for o in found], indent=1))
        return 0
    header = ("kernel", "case", "launches", "call us", "bare us", "over us", "")
    report.print_table(header, [_cells(o) for o in found], sys.stdout)
    if case_tag() == "smoke":
        print("the launch itself is left out here: this is the Python above it")
    return 0


def _cells(o: Overhead) -> list[str]:
    verdict = "" if not o.real_launch else "ok" if o.extra_us <= _LIMIT_US else "OVER 2 us"
    times = (o.public_us, o.bare_us, o.extra_us)
    return [o.kernel, o.case, str(o.launches), *(f"{t:.2f}" for t in times), verdict]
