"""What is special to skinny_linear: bodies, rows apart, what may be one tensor."""

from __future__ import annotations

import math

import pytest
import torch

import tkernels
from tkernels import device
from tkernels.ops.skinny_linear import SPEC
from tkernels.registry import Config, Problem
from tkernels.skinny_linear_facts import linear_problem, portable_config
from tkernels.testing import assert_right, clone_inputs, guarded, poisoned_memory

pytestmark = pytest.mark.thin(2)
M, N, K = 3, 21, 200
WAYS: dict[str, Config] = {
    "vector": {"variant": "vector", "BLOCK_M": 1, "BLOCK_N": 4, "BLOCK_K": 64},
    "ahead": {"variant": "vector", "BLOCK_M": 1, "BLOCK_N": 4, "BLOCK_K": 64, "AHEAD": True},
    "dot": {"variant": "dot", "BLOCK_M": 16, "BLOCK_N": 16, "BLOCK_K": 64},
    "swapped": {"variant": "dot", "BLOCK_M": 8, "BLOCK_N": 64, "BLOCK_K": 64, "SWAP": True},
    "persistent": {"variant": "vector", "BLOCK_M": 1, "BLOCK_N": 2, "programs_per_core": 1},
}
each_way = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
each_norm = pytest.mark.parametrize("normed", [False, True], ids=["plain", "normed"])


def config_of(problem: Problem, changes: Config) -> Config:
    """The changes to a default, less what this device has none of."""
    default = SPEC.default_config(problem, device.current())
    fixed = {"AHEAD": False, "SWAP": False, "BLOCK_K": 64, "num_stages": 1}
    fixed["num_warps"] = 1 if changes["variant"] == "vector" else 4
    config = {n: {**fixed, **changes}.get(n, v) for n, v in default.items()}
    assert SPEC.why_illegal(config, problem, device.current()) is None, config
    return config


@each_norm
@each_way
@pytest.mark.parametrize("gated", [False, True])
def test_bodies(normed: bool, way: Config, gated: bool, dev: torch.device) -> None:
    """Several steps, ends within tiles; nothing behind the ends of rows is read or written."""
    problem = linear_problem(
        M, N, K, torch.float16, gated=gated, normed=normed, bias=True, residual=True
    )
    inputs = SPEC.make_inputs(problem, dev)
    padded = {n: guarded(v).tensor if getattr(v, "ndim", 0) == 2 else v for n, v in inputs.items()}
    with poisoned_memory():
        got = tkernels.skinny_linear(**padded, config=config_of(problem, way))
    assert_right(SPEC, inputs, (got,))


@each_norm
def test_ahead_changes_no_bit(normed: bool, dev: torch.device) -> None:
    problem = linear_problem(1, N, K, normed=normed)
    inputs = SPEC.make_inputs(problem, dev)
    one, other = (
        tkernels.skinny_linear(**inputs, config=config_of(problem, WAYS[way]))
        for way in ("vector", "ahead")
    )
    assert torch.equal(one, other)


@each_norm
@each_way
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.filterwarnings("ignore:invalid value")  # of NumPy, in the interpreter
def test_a_bad_row_stays_alone(normed: bool, way: Config, value: float, dev: torch.device) -> None:
    problem = linear_problem(M, N, K, normed=normed, residual=True)
    inputs = SPEC.make_inputs(problem, dev)
    config = config_of(problem, way)
    before = tkernels.skinny_linear(**clone_inputs(inputs), config=config)
    inputs["x"][1, 70] = value
    after = tkernels.skinny_linear(**inputs, config=config)
    assert torch.equal(before[[0, 2]], after[[0, 2]])
    assert not after[1].isfinite().any()


@each_way
def test_the_sum_may_replace_what_is_added(way: Config, dev: torch.device) -> None:
    problem = linear_problem(M, N, K, residual=True)
    inputs = SPEC.make_inputs(problem, dev)
    config = config_of(problem, way)
    apart = tkernels.skinny_linear(**inputs, config=config)
    got = tkernels.skinny_linear(**inputs, out=inputs["residual"], config=config)
    assert got is inputs["residual"]
    assert torch.equal(got, apart)


def test_no_result_replaces_what_others_read(dev: torch.device) -> None:
    """Where the sizes would let it."""
    inputs = SPEC.make_inputs(linear_problem(16, 16, 16, normed=True), dev)
    for name in ("x", "weight"):
        with pytest.raises(ValueError, match=rf" out must be a tensor of its own.*got {name}$"):
            tkernels.skinny_linear(**inputs, out=inputs[name])


TOO_LARGE: dict[str, tuple[torch.dtype, Config]] = {
    # Compiled for sm_90 they spilt 250 bytes or more, up to 12 kB, and took up to half a minute.
    "k": (torch.bfloat16, {"BLOCK_N": 32, "BLOCK_K": 2048}),
    "warp": (torch.bfloat16, {"BLOCK_M": 32, "BLOCK_N": 32, "BLOCK_K": 256, "num_warps": 1}),
    "swapped": (torch.bfloat16, {"BLOCK_M": 8, "BLOCK_K": 512, "num_warps": 1, "SWAP": True}),
    "fp32": (torch.float32, {"BLOCK_M": 64, "BLOCK_N": 32, "BLOCK_K": 64, "num_warps": 1}),
    "code": (torch.float32, {"BLOCK_M": 32, "BLOCK_N": 64, "BLOCK_K": 64, "num_warps": 2}),
}


@pytest.mark.parametrize(("dtype", "changes"), TOO_LARGE.values(), ids=TOO_LARGE)
def test_tiles_that_registers_do_not_hold(dtype: torch.dtype, changes: Config) -> None:
    problem, chip = linear_problem(16, 4096, 4096, dtype), device.sm_facts(90)
    config = {"BLOCK_M": 16, "BLOCK_N": 64, "num_warps": 4, "num_stages": 1, "SWAP": False}
    config = {**portable_config(problem, chip), **config, **changes}
    why = str(SPEC.why_illegal(config, problem, chip))
    assert "registers a thread would hold the tile" in why or "too much code" in why
    smaller = {**config, "BLOCK_K": 32, "num_warps": 4}
    assert SPEC.why_illegal(smaller, problem, chip) is None


@pytest.mark.slow
@each_norm
@pytest.mark.parametrize("way", ["vector", "dot"])
def test_rows_past_2_to_the_31(normed: bool, way: str, dev: torch.device) -> None:
    """Rows 2^30 numbers apart, of which there are three, and six of weights."""
    problem = linear_problem(3, 3, 8, torch.float16, gated=True, normed=normed, residual=True)
    inputs = SPEC.make_inputs(problem, dev)

    def far(t: torch.Tensor) -> torch.Tensor:
        rows, columns = t.shape
        memory = torch.empty((rows - 1) * 2**30 + columns, dtype=t.dtype, device=dev)
        return memory.as_strided(t.shape, (2**30, 1)).copy_(t)

    given = {n: far(v) if getattr(v, "ndim", 0) == 2 else v for n, v in inputs.items()}
    given["out"] = far(torch.zeros(3, 3, dtype=torch.float16, device=dev))
    got = tkernels.skinny_linear(**given, config=config_of(problem, WAYS[way]))
    assert_right(SPEC, inputs, (got,))


@pytest.mark.parametrize("way", ["vector", "dot"])
def test_large_values_in_fp16(way: str, dev: torch.device) -> None:
    """Rows that leave fp16 when they are multiplied by the norm's weight before they are scaled."""
    problem = linear_problem(2, N, K, torch.float16, normed=True)
    inputs = SPEC.make_inputs(problem, dev)
    inputs["x"] *= 6000
    inputs["norm_weight"] = inputs["norm_weight"] * 12
    config = config_of(problem, WAYS[way])
    assert_right(SPEC, inputs, (tkernels.skinny_linear(**inputs, config=config),))
