"""What stands between a config and its time: the check that every config must pass."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from autotune import measure
from bench import providers
from tkernels import device, testing
from tkernels.registry import KernelSpec, all_kernels, get


@pytest.mark.parametrize("spec", all_kernels().values(), ids=lambda s: s.name)
def test_the_default_passes(spec: KernelSpec) -> None:
    problem = next(case for case in spec.cases if "smoke" in case.tags).problem
    bench = measure.lay_out(spec, problem)
    measure.check(bench, spec.default_config(problem, device.current()))


def failing(**changed: Any) -> str:
    """What is said of ``quantize_per_token`` with another launch; it writes int8 and fp32."""
    spec = dataclasses.replace(get("quantize_per_token"), **changed)
    problem = spec.cases[0].problem
    config = spec.default_config(problem, device.current())
    with pytest.raises(AssertionError) as error:
        measure.check(measure.lay_out(spec, problem), config)
    return str(error.value)


def test_results_that_go_elsewhere_are_found() -> None:
    launch = get("quantize_per_token").launch

    def ignores_out(x: torch.Tensor, out: Any = None, **more: Any) -> Any:
        return launch(x, **more)

    assert failing(launch=ignores_out) == "out= was given and not written to"


def test_integers_that_are_not_written_are_found() -> None:
    launch = get("quantize_per_token").launch

    def skips_a_row(x: torch.Tensor, out: Any = None, **more: Any) -> Any:
        kept = None if out is None else out[2].clone()
        codes, scale = launch(x, out=out, **more)
        if kept is not None:
            codes[2] = kept
        return codes, scale

    assert "out" in failing(launch=skips_a_row)


def test_what_is_prepared_keeps_its_calls_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    """A captured graph reads tensors that only the calls hold."""

    class Call:
        def __call__(self) -> None: ...

    monkeypatch.setattr(device, "tensor_device", lambda: SimpleNamespace(type="cuda"))
    monkeypatch.setattr(testing, "_prepare", lambda *_: (lambda: None, 1, "graph"))
    call = Call()
    there = weakref.ref(call)
    ready = testing.prepared([call])
    del call
    gc.collect()
    assert there() is not None
    assert ready.method == "graph"


def test_the_tuner_and_the_bench_leave_the_same_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many sets, a large table shared; what timing spoils is put back, the table too."""
    rope = get("rope")
    case = next(case for case in rope.cases if "smoke" in case.tags)
    touched = rope.cost(case.problem).bytes

    def make_inputs(problem: Any, dev: torch.device) -> dict[str, Any]:
        inputs = rope.make_inputs(problem, dev)
        table = inputs["cos_sin_cache"]
        more = table.new_zeros(touched // table[0].nbytes + 1, table.shape[1])
        return {**inputs, "cos_sin_cache": torch.cat([table, more])}

    spec = dataclasses.replace(rope, make_inputs=make_inputs)
    monkeypatch.setattr(device, "l2_bytes", lambda: 3 * touched)
    bench = measure.lay_out(spec, case.problem)
    theirs, _, cache = providers.input_sets(spec, case, hot=False)
    assert (len(bench.sets), len(theirs), cache) == (6, 6, "cold")
    assert len({s["q"].data_ptr() for s in bench.sets}) == 6
    assert len({s["cos_sin_cache"].data_ptr() for s in bench.sets}) == 1
    assert bench.sets[0]["cos_sin_cache"] is not bench.inputs["cos_sin_cache"]
    for name in ("q", "cos_sin_cache"):
        bench.sets[5][name].fill_(torch.nan)
    measure.ready(bench, spec.default_config(case.problem, device.current()))
    for name in ("q", "cos_sin_cache"):
        torch.testing.assert_close(bench.sets[5][name], bench.inputs[name])


def test_copies_lie_as_the_first_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """k and v are views of what a projection gave, in the tuner's sets and in the bench's."""
    spec = get("append_paged_kv")
    case = next(case for case in spec.cases if "bench" in case.tags)
    monkeypatch.setattr(device, "l2_bytes", lambda: 2 * spec.cost(case.problem).bytes)
    bench = measure.lay_out(spec, case.problem)
    theirs, _, _ = providers.input_sets(spec, case, hot=False)
    strides = bench.inputs["k"].stride()
    assert strides[0] > bench.inputs["k"][0].numel()
    assert len(bench.sets) == len(theirs) == 4
    assert {s["k"].stride() for s in (*bench.sets, *theirs)} == {strides}
    assert len({s["k"].data_ptr() for s in (*bench.sets, *theirs)}) == 8
