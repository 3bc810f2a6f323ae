"""The body of skinny_linear for one row on Hopper: what it refuses, what is compiled, results."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
import torch

import tkernels
from tests.compiled_for import lines_of
from tkernels import device, skinny_linear_hopper
from tkernels.ops.skinny_linear import SPEC
from tkernels.registry import Config
from tkernels.skinny_linear_facts import linear_problem
from tkernels.testing import assert_right

SM90 = device.sm_facts(90)
BASE: Config = {
    "BLOCK_N": 4,
    "BLOCK_K": 512,
    "PDL": True,
    "num_warps": 2,
    "num_stages": 3,
    **skinny_linear_hopper.FIXED,
}


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"BLOCK_M": 16}, "has BLOCK_M 1"),
        ({"AHEAD": True}, "has AHEAD False"),
        ({"BLOCK_N": 64}, "BLOCK_N up to 32"),
        ({"BLOCK_K": 128, "num_warps": 1}, "BLOCK_K of 256 to 4096"),
        ({"num_warps": 4}, "4 warps have nothing to do with 512 columns"),
        ({"BLOCK_N": 32, "num_stages": 8}, "bytes of shared memory"),
        ({"BLOCK_N": 32, "BLOCK_K": 1024, "num_warps": 1, "num_stages": 1}, "weights take"),
    ],
)
def test_what_is_illegal(changed: Config, why: str) -> None:
    problem = linear_problem(1, 4096, 4096)
    assert SPEC.why_illegal(BASE, problem, SM90) is None
    one_warp = {**BASE, "num_warps": 1}
    wide = linear_problem(1, 4096, 5120, normed=True)
    assert "x takes 256 of 255" in str(SPEC.why_illegal(one_warp, wide, SM90))
    assert why in str(SPEC.why_illegal({**BASE, **changed}, problem, SM90))


@pytest.mark.parametrize(
    ("problem", "why"),
    [
        (linear_problem(1, 64, 1024, torch.float32), "16-bit numbers"),
        (linear_problem(1, 64, 1020), "rows that divide by 16 bytes"),
    ],
)
def test_what_it_cannot_serve(problem: Any, why: str) -> None:
    assert why in str(skinny_linear_hopper.why_unfit(problem, SM90))
    assert SPEC.default_config(problem, SM90)["variant"] != "hopper"


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("k", [8, 256, 1000, 1024, 2560, 5120, 25600])
def test_defaults_are_legal(k: int, normed: bool, gated: bool) -> None:
    for n in (1, 37, 1024, 151936):
        problem = linear_problem(1, n, k, gated=gated, normed=normed)
        config = SPEC.default_config(problem, SM90)
        assert SPEC.why_illegal(config, problem, SM90) is None
        assert config["num_stages"] >= 1


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("normed", [False, True])
def test_rows_that_no_shared_memory_holds_have_another_default(normed: bool, gated: bool) -> None:
    for n, k in ((1, 131072), (4096, 66560), (4096, 1 << 20)):
        problem = linear_problem(1, n, k, gated=gated, normed=normed)
        config = SPEC.default_config(problem, SM90)
        assert config["variant"] != "hopper"
        assert SPEC.why_illegal(config, problem, SM90) is None


# In a process of its own: here Triton is an interpreter, there it must compile.
CHILD = """
import dataclasses, json, sys
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from tkernels import device, offline
from tkernels.ops.skinny_linear import SPEC

found = {}
for case in SPEC.cases:
    if "bench" not in case.tags or case.problem["m"] > 1:
        continue
    config = SPEC.default_config(case.problem, device.current())
    with FakeTensorMode(), offline.record_launches() as launches:
        SPEC.launch(**SPEC.make_inputs(case.problem, torch.device("cpu")), config=config)
    got = dataclasses.asdict(offline.compile_cuda(launches[0], 90))
    found[case.name] = {**got, "kernel": launches[0].fn.__name__}
print(json.dumps(found))
"""


@pytest.mark.slow
def test_compiled_for_sm90() -> None:
    found = json.loads(lines_of(CHILD)[-1])
    assert len(found) == 13
    for name, got in found.items():
        assert got["spill_bytes"] == 0, name
        assert got["registers"] <= 168, (name, got)
    assert sum(got["kernel"].endswith("_hopper_kernel") for got in found.values()) == 11


# ---- results, on the GPU -----------------------------------------------------------------------

gpu = pytest.mark.gpu
needs_sm90 = pytest.mark.skipif(
    device.current().arch != "sm90", reason="needs an sm90 GPU; this machine has none"
)


@gpu
@needs_sm90
@pytest.mark.parametrize("seed", range(24))
def test_random_configs_of_random_problems(seed: int, dev: torch.device) -> None:
    """All that may be given, rows with what others own between them, ends within tiles."""
    rng = random.Random(seed)
    problem = linear_problem(
        rng.choice((1, 1, 3)),
        rng.choice((1, 7, 40, 129, 1000)),
        8 * rng.choice((1, 31, 64, 129, 320, 1216)),
        rng.choice((torch.bfloat16, torch.float16)),
        **{name: rng.random() < 0.5 for name in ("gated", "normed", "bias", "residual")},
    )
    space = {**SPEC.space(device.current()), "variant": ["hopper"], "PDL": [False, True]}
    space |= {name: [value] for name, value in skinny_linear_hopper.FIXED.items()}
    while True:
        config = {name: rng.choice(values) for name, values in space.items()}
        if SPEC.why_illegal(config, problem, device.current()) is None:
            break
    inputs = SPEC.make_inputs(problem, dev)

    def wider(t: torch.Tensor) -> torch.Tensor:
        memory = torch.full((len(t) + 1, t.shape[1] + 8), torch.nan, dtype=t.dtype, device=dev)
        return memory[: len(t), : t.shape[1]].copy_(t)

    wide = {n: wider(v) if getattr(v, "ndim", 0) == 2 else v for n, v in inputs.items()}
    for given in (inputs, wide):
        got = tkernels.skinny_linear(**given, config=config)
        assert_right(SPEC, inputs, (got,))
        assert torch.equal(got, tkernels.skinny_linear(**given, config=config))


@gpu
@needs_sm90
def test_other_addresses_take_another_body(dev: torch.device) -> None:
    problem = linear_problem(1, 40, 1024, normed=True, residual=True)
    inputs = SPEC.make_inputs(problem, dev)
    for name in ("x", "weight", "norm_weight"):
        kept = inputs[name]
        moved = torch.zeros(kept.numel() + 1, dtype=kept.dtype, device=dev)[1:]
        given = {**inputs, name: moved.view(kept.shape).copy_(kept)}
        assert given[name].data_ptr() % 16
        assert_right(SPEC, inputs, (tkernels.skinny_linear(**given, config=BASE),))
