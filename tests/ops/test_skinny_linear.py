"""What is special to skinny_linear and fused_add_rms_norm_linear: bodies, rows apart."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import tkernels
from tkernels import device
from tkernels.ops import fused_add_rms_norm_linear as fused
from tkernels.ops import skinny_linear as plain
from tkernels.registry import Config
from tkernels.skinny_linear_facts import linear_problem
from tkernels.testing import assert_right, clone_inputs, guarded, poisoned_memory

pytestmark = pytest.mark.thin(2)
M, N, K = 3, 21, 200
SPECS = [plain.SPEC, fused.SPEC]
WAYS: dict[str, Config] = {
    "vector": {"variant": "vector", "BLOCK_M": 1, "BLOCK_N": 4, "BLOCK_K": 64},
    "ahead": {"variant": "vector", "BLOCK_M": 1, "BLOCK_N": 4, "BLOCK_K": 64, "AHEAD": True},
    "dot": {"variant": "dot", "BLOCK_M": 16, "BLOCK_N": 16, "BLOCK_K": 64},
    "swapped": {"variant": "dot", "BLOCK_M": 8, "BLOCK_N": 64, "BLOCK_K": 64, "SWAP": True},
    "persistent": {"variant": "vector", "BLOCK_M": 1, "BLOCK_N": 2, "programs_per_core": 1},
}
each_way = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
each_spec = pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)


def config_of(spec: Any, problem: dict[str, Any], changes: Config) -> Config:
    """The changes to a default, less what this device has none of."""
    default = spec.default_config(problem, device.current())
    fixed = {"AHEAD": False, "SWAP": False, "BLOCK_K": 64, "num_stages": 1}
    fixed["num_warps"] = 1 if changes["variant"] == "vector" else 4
    config = {n: {**fixed, **changes}.get(n, v) for n, v in default.items()}
    assert spec.why_illegal(config, problem, device.current()) is None, config
    return config


@each_spec
@each_way
@pytest.mark.parametrize("gated", [False, True])
def test_bodies(spec: Any, way: Config, gated: bool, dev: torch.device) -> None:
    """Several steps, ends within tiles; nothing behind the ends of rows is read or written."""
    problem = linear_problem(M, N, K, torch.float16, gated=gated, bias=True)
    inputs = spec.make_inputs(problem, dev)
    padded = {n: guarded(v).tensor if getattr(v, "ndim", 0) == 2 else v for n, v in inputs.items()}
    with poisoned_memory():
        got = spec.launch(**padded, config=config_of(spec, problem, way))
    assert_right(spec, inputs, got if isinstance(got, tuple) else (got,))


@each_spec
def test_ahead_changes_no_bit(spec: Any, dev: torch.device) -> None:
    problem = linear_problem(1, N, K)
    inputs = spec.make_inputs(problem, dev)
    results = [
        spec.launch(**inputs, config=config_of(spec, problem, WAYS[way]))
        for way in ("vector", "ahead")
    ]
    for one, other in zip(*(r if isinstance(r, tuple) else (r,) for r in results), strict=True):
        assert torch.equal(one, other)


@each_spec
@each_way
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.filterwarnings("ignore:invalid value")  # of NumPy, in the interpreter
def test_a_bad_row_stays_alone(spec: Any, way: Config, value: float, dev: torch.device) -> None:
    problem = linear_problem(M, N, K)
    inputs = spec.make_inputs(problem, dev)
    config = config_of(spec, problem, way)
    before = spec.launch(**clone_inputs(inputs), config=config)
    inputs["x"][1, 70] = value
    after = spec.launch(**inputs, config=config)
    for one, other in zip(
        *(r if isinstance(r, tuple) else (r,) for r in (before, after)), strict=True
    ):
        assert torch.equal(one[[0, 2]], other[[0, 2]])
    first = after[0] if isinstance(after, tuple) else after
    assert not first[1].isfinite().any()


def test_the_sum_may_not_replace_what_others_read(dev: torch.device) -> None:
    inputs = fused.SPEC.make_inputs(linear_problem(M, N, K), dev)
    for name in ("x", "residual"):
        with pytest.raises(
            ValueError, match=rf"residual_out must be a tensor of its own.*got {name}"
        ):
            tkernels.fused_add_rms_norm_linear(**inputs, residual_out=inputs[name])


@each_spec
def test_no_result_replaces_what_others_read(spec: Any, dev: torch.device) -> None:
    """Where the sizes would let it."""
    inputs = spec.make_inputs(linear_problem(16, 16, 16), dev)
    for name in {"x", "residual", "weight"} & set(inputs):
        with pytest.raises(ValueError, match=rf" out must be a tensor of its own.*got {name}$"):
            spec.launch(**inputs, out=inputs[name])


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
    config = {**plain.SPEC.default_config(problem, chip), **config, **changes}
    why = str(plain.SPEC.why_illegal(config, problem, chip))
    assert "registers a thread would hold the tile" in why or "too much code" in why
    smaller = {**config, "BLOCK_K": 32, "num_warps": 4}
    assert plain.SPEC.why_illegal(smaller, problem, chip) is None


@pytest.mark.slow
@each_spec
@pytest.mark.parametrize("way", ["vector", "dot"])
def test_rows_past_2_to_the_31(spec: Any, way: str, dev: torch.device) -> None:
    """Rows 2^30 numbers apart, of which there are three, and six of weights."""
    problem = linear_problem(3, 3, 8, torch.float16, gated=True)
    inputs = spec.make_inputs(problem, dev)

    def far(t: torch.Tensor) -> torch.Tensor:
        rows, columns = t.shape
        memory = torch.empty((rows - 1) * 2**30 + columns, dtype=t.dtype, device=dev)
        return memory.as_strided(t.shape, (2**30, 1)).copy_(t)

    given = {n: far(v) if getattr(v, "ndim", 0) == 2 else v for n, v in inputs.items()}
    given["out"] = far(torch.zeros(3, 3, dtype=torch.float16, device=dev))
    if "residual" in inputs:
        given["residual_out"] = far(inputs["x"])
    got = spec.launch(**given, config=config_of(spec, problem, WAYS[way]))
    assert_right(spec, inputs, got if isinstance(got, tuple) else (got,))


@pytest.mark.parametrize("way", ["vector", "dot"])
def test_large_values_in_fp16(way: str, dev: torch.device) -> None:
    """Rows that leave fp16 when they are multiplied by the norm's weight before they are scaled."""
    problem = linear_problem(2, N, K, torch.float16)
    inputs = fused.SPEC.make_inputs(problem, dev)
    inputs["x"] *= 6000
    inputs["norm_weight"] = inputs["norm_weight"] * 12
    config = config_of(fused.SPEC, problem, WAYS[way])
    assert_right(fused.SPEC, inputs, tkernels.fused_add_rms_norm_linear(**inputs, config=config))
