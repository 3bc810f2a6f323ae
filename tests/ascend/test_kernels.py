"""Every registered kernel with its 910B config: lowered, accepted, run on the CPU, recorded."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import math
import os
from collections.abc import Hashable, Set
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tkernels import device
from tkernels import offline_ascend as bisheng
from tkernels.offline import Variant, record_launches, variant_of
from tkernels.offline_ascend import lower, scalar_memory_loops
from tkernels.registry import Case, KernelSpec, all_kernels
from tkernels.testing import (
    assert_right,
    bytes_of,
    clone_inputs,
    guarded,
    may_be_padded,
    poisoned_memory,
    tensors_of,
)

from . import table
from .cpu_build import build
from .run_cpu import execute

SPECS = all_kernels()
CPU = torch.device("cpu")


def _cases(*tags: str) -> list[Any]:
    """Parameters of a test for all cases with one of ``tags``."""
    return [
        pytest.param(spec, case, id=f"{spec.name}-{case.name}")
        for spec in SPECS.values()
        for case in spec.cases
        if case.tags & set(tags)
    ]


each_case = pytest.mark.parametrize(("spec", "case"), _cases("smoke", "edge", "bench"))
each_small_case = pytest.mark.parametrize(("spec", "case"), _cases("smoke", "edge"))
each_smoke_case = pytest.mark.parametrize(("spec", "case"), _cases("smoke"))
each_spec = pytest.mark.parametrize("spec", SPECS.values(), ids=lambda spec: spec.name)


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What became of one program of a kernel."""

    refusal: str
    degraded: tuple[str, ...]
    scalar_loops: str  # a sentence, "" if there are none
    figures: table.Row


ASK_AGAIN = False  # also what the table knows
RIGHT: set[str] = set()  # cases whose values were compared in this run


@functools.cache
def launches_of(kernel: str, case_name: str) -> tuple[tuple[Variant, tuple[int, int, int]], ...]:
    """Program and grid of each launch that ``case_name`` makes; nothing is run.

    The tensors are fake ones, without memory: bench cases are large. A launcher that reads a value
    fails here, as it should (it would make the host wait for the device).
    """
    spec = SPECS[kernel]
    case = next(c for c in spec.cases if c.name == case_name)
    with FakeTensorMode(), record_launches() as launches:
        spec.launch(**spec.make_inputs(case.problem, CPU))
    return tuple((variant_of(launch), launch.grid) for launch in launches)


@functools.cache
def compiled(variant: Variant) -> Compiled:
    """Lower ``variant``; ask Huawei's compiler about it, unless the table has the answer."""
    linalg = lower(variant)
    figures = None if ASK_AGAIN else table.known(variant, linalg)
    if figures is not None:
        loops = figures["scalar_loops"]
        return Compiled("", (), f"{loops} loops" if loops else "", figures)
    verdict = bisheng.check(linalg, bisheng.options_of(variant))
    counts = {
        "load or store memory": scalar_memory_loops(linalg),
        "touch local buffers": bisheng.scalar_loops(verdict.hivm),
    }
    loops = ", ".join(f"{n} loops {what}" for what, n in counts.items() if n)
    return Compiled(verdict.reason, verdict.degraded, loops, table.figures_of(linalg, verdict))


@pytest.fixture(scope="module", autouse=True)
def _compile_ahead(request: pytest.FixtureRequest) -> None:
    """Start the compilers for all chosen tests on all cores; the tests find cached answers."""
    global ASK_AGAIN
    ASK_AGAIN = request.config.getoption("--ask-again") or request.config.getoption(
        "--update-table"
    )
    asked: set[Hashable] = set()
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        for item in request.session.items:
            if not hasattr(item, "callspec"):
                continue
            values: dict[str, Any] = item.callspec.params
            if "spec" not in values:
                continue
            test = getattr(item, "originalname", "")
            for case in [values["case"]] if "case" in values else values["spec"].cases:
                # Whatever goes wrong here is met again, and reported, by the test itself.
                with contextlib.suppress(Exception):
                    for variant, _ in launches_of(values["spec"].name, case.name):
                        linalg, options = lower(variant), bisheng.options_of(variant)
                        new = ASK_AGAIN or table.known(variant, linalg) is None
                        runs = test == "test_values_between_gaps" or (new and test == "test_values")
                        if runs and linalg not in asked:
                            pool.submit(build, linalg)
                            asked.add(linalg)
                        if new and (linalg, options) not in asked:
                            pool.submit(bisheng.check, linalg, options)
                            asked.add((linalg, options))


def test_the_device_is_an_ascend_without_interpreter() -> None:
    facts = device.current()
    assert (facts.type, facts.arch, facts.compile_only) == ("npu", "ascend910b", True)
    assert SPECS, "no kernel is registered"


@each_case
def test_accepted(spec: KernelSpec, case: Case) -> None:
    """It lowers, and the compiler takes it without switching anything off to make it fit."""
    for variant, grid in launches_of(spec.name, case.name):
        name = f"{variant.fn.__name__} {dict(variant.constants)}"
        assert math.prod(grid) <= device.current().max_programs, f"{name}: grid {grid}"
        one = compiled(variant)
        assert one.refusal == "", f"{name}: {one.refusal}"
        assert one.degraded == (), f"{name}: accepted only after {', '.join(one.degraded)}"


@each_case
def test_no_scalar_loop(spec: KernelSpec, case: Case) -> None:
    """No loop over single elements, unless the spec says why one is accepted."""
    for variant, _ in launches_of(spec.name, case.name):
        found = compiled(variant).scalar_loops
        assert spec.scalar_loop_reason or not found, (
            f"{variant.fn.__name__} {dict(variant.constants)}: {found} one element at a time"
        )


@each_small_case
def test_values(spec: KernelSpec, case: Case) -> None:
    """What the lowered kernel computes on the CPU equals the reference; nothing else changes."""
    if not ASK_AGAIN and all(
        table.known(variant, lower(variant)) for variant, _ in launches_of(spec.name, case.name)
    ):
        pytest.skip("the table has it: the same text was run when its row was made (--ask-again)")
    _run_and_compare(spec, spec.make_inputs(case.problem, CPU))
    RIGHT.add(f"{spec.name}/{case.name}")


@each_smoke_case
def test_values_between_gaps(spec: KernelSpec, case: Case) -> None:
    """The same with padded rows, inputs and outputs; the gaps hold NaN and must stay untouched."""
    plain = spec.make_inputs(case.problem, CPU)
    results = tensors_of(spec.reference(**clone_inputs(plain)))
    outs = dict(zip(spec.outputs, (r.new_full(r.shape, 77) for r in results), strict=False))
    padded = {
        name: guarded(value).tensor
        for name, value in {**plain, **outs}.items()
        if may_be_padded(spec, name, value)
    }
    _run_and_compare(spec, {**plain, **padded}, set(outs))


def _run_and_compare(
    spec: KernelSpec, inputs: dict[str, Any], written: Set[str] = frozenset()
) -> None:
    """Run the launch from its lowering; check results, mutated arguments, all others."""
    kept = clone_inputs({k: v for k, v in inputs.items() if k not in written})
    with poisoned_memory(), record_launches(execute):
        results = tensors_of(spec.launch(**inputs))
    assert_right(spec, kept, (*results, *(inputs[name] for name in spec.mutates)))
    for name, before in kept.items():
        if isinstance(before, torch.Tensor) and name not in spec.mutates:
            assert torch.equal(bytes_of(inputs[name]), bytes_of(before)), f"{name} was changed"


@each_spec
def test_table(spec: KernelSpec, update_table: bool) -> None:
    """The committed table says what the compiler says."""
    rows: dict[str, table.Row] = {}
    for case in spec.cases:
        for variant, _ in launches_of(spec.name, case.name):
            one = compiled(variant)
            assert one.refusal == "", f"{case.name}: {one.refusal}"
            assert one.degraded == (), f"{case.name}: {', '.join(one.degraded)}"
            row = table.row(spec.name, case.name, variant, one.figures)
            rows.setdefault(table.label(row), row)
    assert rows, "no case launches a kernel"
    if update_table:
        small = {f"{spec.name}/{c.name}" for c in spec.cases if c.tags & {"smoke", "edge"}}
        assert small <= RIGHT, f"expected right values before a row is made: {small - RIGHT}"
        table.replace_kernel(spec.name, list(rows.values()))
    stale = table.differences(spec.name, list(rows.values()))
    assert not stale, "\n".join(
        ["table.json is stale; judge each line, then run with --update-table and commit:", *stale]
    )


def test_table_holds_no_other_kernels(update_table: bool) -> None:
    """Rows of kernels that were removed are removed, too."""
    _, rows = table.load()
    if update_table:
        rows = [row for row in rows if row["kernel"] in SPECS]
        table.save(rows)
    assert {row["kernel"] for row in rows} - set(SPECS) == set()
