"""The tuner's offline model: counts are those of the tensors, what does not fit has no estimate."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from autotune.offline import ascend as ascend_model
from autotune.offline import hivm
from tkernels import config, device, offline_ascend
from tkernels.offline import record_launches, variant_of
from tkernels.registry import Config, KernelSpec, Problem, all_kernels, get

RMS = get("rms_norm")
ROWS = RMS.shape(tokens=203, hidden=1024) if RMS.shape else {}
each_spec = pytest.mark.parametrize("spec", all_kernels().values(), ids=lambda spec: spec.name)


def default(spec: KernelSpec, problem: Problem) -> Config:
    return spec.default_config(problem, device.current())


def totals(spec: KernelSpec, problem: Problem) -> dict[str, int]:
    """What all programs of a vector kernel do together."""
    with FakeTensorMode(), record_launches() as launches:
        spec.launch(**spec.make_inputs(problem, torch.device("cpu")))
    [launch] = launches
    variant = variant_of(launch)
    verdict = offline_ascend.check(
        offline_ascend.lower(variant), offline_ascend.options_of(variant)
    )
    [function] = hivm.functions(verdict.hivm)
    given = (launch.args[name] for name, _ in variant.signature)
    values = [None if isinstance(value, torch.Tensor) else value for value in given]
    found: dict[str, int] = {}
    for program in range(launch.grid[0]):
        for name, count in function.follow(values, launch.grid, program).totals().items():
            found[name] = found.get(name, 0) + count
    return found


def test_bytes_that_are_counted_are_those_of_the_tensors() -> None:
    found = totals(RMS, ROWS)
    rows = 203 * 1024 * 2
    assert found["MTE3 bytes"] == rows
    weights = found["MTE2 bytes"] - rows  # read once by each program
    assert weights > 0
    assert weights % (1024 * 2) == 0


def test_positions_of_a_rotation_are_counted_too() -> None:
    spec = get("rope")
    assert spec.shape is not None
    found = totals(spec, spec.shape(tokens=37, num_heads=4, num_kv_heads=2, head_dim=64))
    heads = 37 * 6 * 64 * 2
    assert found["MTE3 bytes"] == heads
    assert found["MTE2 bytes"] >= heads + 37 * 64 * 4


@each_spec
def test_every_default_has_an_estimate(spec: KernelSpec) -> None:
    case = next(case for case in spec.cases if "bench" in case.tags)
    answer = ascend_model.estimate(spec, case.problem, default(spec, case.problem))
    assert answer.ok, answer
    assert answer.ms is not None
    least = spec.cost(case.problem).bytes / 1.6e12  # the chip's memory cannot be beaten
    assert answer.ms * 1e-3 > least
    assert answer.facts["model"] == ascend_model.MODEL
    assert answer.facts["ub_bytes"] > 0


def test_lengths_decide_the_estimate_of_attention() -> None:
    spec = get("paged_attn")
    assert spec.shape is not None
    times = []
    for context in (512, 4096):
        problem = spec.shape(batch=8, context=context)
        answer = ascend_model.estimate(spec, problem, default(spec, problem))
        assert answer.ms is not None
        times.append(answer.ms)
    assert 4 < times[1] / times[0] < 9


def test_what_does_not_fit_has_no_estimate(monkeypatch: pytest.MonkeyPatch) -> None:
    """The legality rule would prune it; the compiler is asked all the same."""
    too_large = {**default(RMS, ROWS), "BLOCK_ROWS": 64, "BLOCK_N": 1024}
    assert RMS.why_illegal(too_large, ROWS, device.current()) is not None
    monkeypatch.setattr(config, "why_unusable", lambda *args: None)
    answer = ascend_model.estimate(RMS, ROWS, too_large)
    assert answer.kind == "out of resources"
    assert "ub overflow, requires" in answer.message


def test_what_fits_only_without_double_buffers_must_ask_for_that(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The compiler would switch them off by itself, and the config would not say so."""
    assert RMS.shape is not None
    wide = RMS.shape(tokens=203, hidden=8192)
    tight = {"BLOCK_ROWS": 2, "BLOCK_N": 8192, "programs_per_core": 1}
    monkeypatch.setattr(config, "why_unusable", lambda *args: None)
    answer = ascend_model.estimate(RMS, wide, tight)
    assert answer.kind == "out of resources"
    assert "fits only with" in answer.message
    assert "enable-auto-multi-buffer to false" in answer.message
    asked = ascend_model.estimate(RMS, wide, {**tight, "multibuffer": False})
    assert asked.ok, asked
    assert asked.facts["double_buffered"] == 0


def test_facts_say_what_was_assumed() -> None:
    """Slots of a cache are not given to the model; lengths of attention are."""
    for name, assumed in [("append_paged_kv", True), ("paged_attn", False), ("rope", False)]:
        spec = get(name)
        problem = next(case for case in spec.cases if "bench" in case.tags).problem
        answer = ascend_model.estimate(spec, problem, default(spec, problem))
        assert (answer.facts["assumed"] > 0) == assumed, (name, answer)
        assert answer.facts["followed"] == min(answer.facts["programs"], 160)


def test_options_reach_the_compiler_and_those_without_effect_change_nothing() -> None:
    plain = ascend_model.estimate(RMS, ROWS, default(RMS, ROWS))
    single = ascend_model.estimate(RMS, ROWS, {**default(RMS, ROWS), "multibuffer": False})
    mixed = ascend_model.estimate(RMS, ROWS, {**default(RMS, ROWS), "tile_mix_cube_loop": 2})
    assert plain.facts["double_buffered"] > 0
    assert single.facts["double_buffered"] == 0
    assert single.ms > plain.ms  # type: ignore[operator]
    assert mixed is plain  # one program, followed once
    assert plain.facts["ir"] != single.facts["ir"]


def test_one_program_on_other_lengths_is_another_point() -> None:
    """Lengths are data: the code is the same, and what it does is not."""
    spec = get("paged_attn")
    assert spec.shape is not None
    short, long = (spec.shape(batch=8, context=context) for context in (3000, 4096))
    config = default(spec, long)
    answers = [ascend_model.estimate(spec, problem, config) for problem in (short, long)]
    assert answers[0].facts["ir"] != answers[1].facts["ir"]
    assert answers[0].ms < answers[1].ms  # type: ignore[operator]


@each_spec
def test_options_reach_the_launch_of_every_kernel(spec: KernelSpec) -> None:
    problem = spec.cases[0].problem
    chosen = {**default(spec, problem), "multibuffer": False, "set_workspace_multibuffer": 2}
    with FakeTensorMode(), record_launches() as launches:
        spec.launch(**spec.make_inputs(problem, torch.device("cpu")), config=chosen)
    options = dict(offline_ascend.options_of(variant_of(launches[0])))
    assert options == {"multibuffer": False, "set_workspace_multibuffer": 2}


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("multibuffer", True, r"multibuffer must be one of \[False\], got True"),
        ("tile_mix_cube_loop", 3, r"tile_mix_cube_loop must be one of \[2, 4\], got 3"),
        ("sync_solver", False, "unknown key sync_solver"),
    ],
)
def test_other_options_are_refused(name: str, value: object, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        config.explain(RMS, ROWS, {**default(RMS, ROWS), name: value})
