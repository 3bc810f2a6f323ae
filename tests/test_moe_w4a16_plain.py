"""The Hopper bodies of moe_w4a16_gemm as plain Python: places of tiles, rings, heights of tiles."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tkernels
from tests.plain_copies import CopiesMachine
from tests.plain_warps import WarpsMachine
from tests.test_integer_weights_plain import _stand_ins, _without_pdl
from tkernels import (
    device,
    few_rows_hopper,
    integer_decoding,
    integer_weights_few,
    integer_weights_many,
    moe_w4a16_core,
    moe_w4a16_wide,
)
from tkernels.moe_gemm_cases import dispatched
from tkernels.moe_w4a16_cases import moe_w4_inputs, moe_w4_problem
from tkernels.ops.moe_w4a16_gemm import SPEC
from tkernels.registry import Config, Problem

BF16, FP16 = torch.bfloat16, torch.float16
CPU = torch.device("cpu")
CORE: Config = {
    "variant": "core", "BLOCK_M": 8, "BLOCK_N": 32, "BLOCK_K": 64, "SLICES": 2,
    "programs_per_core": 0, "SWAP": True, "PDL": True, "num_warps": 2, "num_stages": 2,
}  # fmt: skip
WIDE: Config = {**moe_w4a16_wide.FIXED, "BLOCK_M": 16, "PDL": True, "num_stages": 2}
NO_GLUON = pytest.mark.skipif(
    not device.is_there(integer_weights_few.gl), reason="this triton has no Gluon"
)


def exact_inputs(problem: Problem, routing: list[list[int]] | None) -> dict[str, Any]:
    """Small integers and powers of two: nothing depends on the order of a sum."""
    inputs = moe_w4_inputs(problem, CPU)
    generator = torch.Generator().manual_seed(1)
    inputs["x"] = torch.randint(-2, 3, inputs["x"].shape, generator=generator).to(problem["dtype"])
    powers = torch.randint(-3, 1, inputs["weight_scale"].shape, generator=generator)
    inputs["weight_scale"] = torch.exp2(powers.float()).to(problem["scale"])
    if "topk_weights" in inputs:
        powers = torch.randint(-2, 1, inputs["topk_weights"].shape, generator=generator)
        inputs["topk_weights"] = torch.exp2(powers.float())
    if routing is not None:
        offsets, ids = dispatched(routing, problem["experts"], CPU)
        inputs |= {"expert_offsets": offsets, "sorted_ids": ids}
    return inputs


def run(body: Any, inputs: dict[str, Any], problem: Problem, config: Config, programs: int) -> Any:
    """The outputs, amid others that stay, by a body whose ``bind`` is a machine's."""
    r, n_out = problem["rows"], problem["n"] // (2 if problem["silu_and_mul"] else 1)
    out = torch.full((r, n_out + 3), 7.0, dtype=problem["dtype"])[:, :n_out]
    group, k = problem["group"], problem["k"]
    facts = {
        "GROUP": 0 if group == k else group, "HAS_ZERO": problem["zero"],
        "SILU": problem["silu_and_mul"], "ROW_WEIGHT": "topk_weights" in inputs,
        "TOP_K": problem["top_k"],
    }  # fmt: skip
    x = inputs["x"]
    sizes = (r, problem["experts"], problem["n"], k, len(x))
    launch = body.bound(sizes, facts, (x.stride(0), out.stride(0)), config, problem, programs)
    launch(
        x, inputs["weight"], inputs["weight_scale"], inputs["expert_offsets"],
        inputs["sorted_ids"], out, inputs.get("weight_zero"), inputs.get("topk_weights"),
    )  # fmt: skip
    return out


def holds(out: torch.Tensor, inputs: dict[str, Any], problem: Problem) -> None:
    """Of no activation bit for bit; silu's exponential is another one here."""
    expected = tkernels.reference.moe_w4a16_gemm(**inputs)
    end = int(inputs["expert_offsets"][-1])
    if problem["silu_and_mul"]:
        close = {"rtol": 2.0**-7, "atol": 1e-3}
        torch.testing.assert_close(out[:end].float(), expected[:end].float(), **close)
    else:
        assert torch.equal(out[:end], expected[:end])
    assert bool((out[end:] == 7.0).all())
    assert bool((out._base[:, out.shape[1] :] == 7.0).all())


@NO_GLUON
@pytest.mark.parametrize(
    ("sizes", "changed", "more"),
    [
        ((13, 5, 2, 96, 384), {}, {}),
        ((13, 5, 2, 70, 640), {"programs": 3, "num_stages": 3}, {"zero": True}),
        ((20, 3, 1, 40, 1152), {"BLOCK_K": 128, "BLOCK_M": 16}, {"first": False}),
        (
            (9, 4, 3, 100, 320),
            {"SLICES": 4, "num_warps": 8, "BLOCK_N": 64, "PDL": False},
            {"first": False, "dtype": FP16, "group": 64, "zero": True},
        ),
        ((44, 20, 2, 256, 256), {"BLOCK_K": 128, "num_stages": 6, "num_warps": 4}, {}),
        (
            (44, 20, 2, 256, 128),
            {"SLICES": 1, "BLOCK_K": 128, "BLOCK_N": 64, "num_stages": 6},
            {"first": False, "group": 64},
        ),
        ((7, 3, 1, 33, 96), {}, {"first": False, "group": 96, "scale": torch.float32}),
        ((1, 60, 4, 16, 128), {"BLOCK_N": 16, "num_warps": 2}, {"routing": "zipf"}),
    ],
)
def test_few_rows(
    sizes: tuple[int, ...], changed: Config, more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {**CORE, **changed}
    programs = config.pop("programs", 1 << 30)
    problem = moe_w4_problem(*sizes, **more)
    assert SPEC.why_illegal(config, problem, device.sm_facts(90)) is None
    tokens, experts, choices = sizes[:3]
    routing = [[(t * t + c) % (experts - 1) for c in range(choices)] for t in range(tokens)]
    inputs = exact_inputs(problem, routing if experts > choices + 1 else None)
    modules = [moe_w4a16_core, integer_weights_few, few_rows_hopper, integer_decoding]
    machine = CopiesMachine(monkeypatch, modules, set())
    monkeypatch.setattr(moe_w4a16_core, "bind", machine.bind)
    for name, value in _stand_ins(problem["dtype"]).items():
        if hasattr(integer_weights_few, name):
            monkeypatch.setattr(integer_weights_few, name, value)
    out = run(moe_w4a16_core, inputs, problem, config, programs)
    machine.ended()
    holds(out, inputs, problem)


@pytest.mark.skipif(not device.INTERPRETED, reason="x is turned by Triton's interpreter")
@pytest.mark.parametrize(
    ("sizes", "changed", "more"),
    [
        ((20, 5, 2, 192, 384), {}, {}),
        ((70, 3, 1, 300, 160), {"BLOCK_M": 64, "programs": 2}, {"first": False, "group": 32}),
        ((128, 20, 2, 256, 256), {"BLOCK_M": 128, "num_stages": 4}, {}),
        ((128, 20, 2, 256, 128), {"BLOCK_M": 64, "num_stages": 6}, {"first": False, "group": 64}),
        (
            (150, 4, 1, 130, 416),
            {"BLOCK_M": 128, "num_stages": 3},
            {"first": False, "dtype": FP16, "group": 32, "zero": True},
        ),
        ((9, 3, 1, 2, 96), {"BLOCK_M": 32}, {"group": 96, "zero": True}),
        ((40, 7, 2, 280, 128), {"BLOCK_M": 32, "programs": 3, "PDL": False}, {"first": False}),
    ],
)
def test_many_rows(
    sizes: tuple[int, ...], changed: Config, more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three orders of what happens at once; tiles of all heights."""
    problem = moe_w4_problem(*sizes, **more)
    config = {**WIDE, "BLOCK_N": 128 if problem["silu_and_mul"] else 256, **changed}
    programs = config.pop("programs", 132)
    assert SPEC.why_illegal(config, problem, device.sm_facts(90)) is None
    tokens, experts, choices = sizes[:3]
    routing = [[(t * t + c) % (experts - 1) for c in range(choices)] for t in range(tokens)]
    inputs = exact_inputs(problem, routing if experts > choices + 1 else None)
    turn = moe_w4a16_wide._turn_rows_kernel
    for seed in range(3):
        with monkeypatch.context() as patch:
            modules = [moe_w4a16_wide, moe_w4a16_core, integer_weights_many]
            WarpsMachine(patch, modules, set(), seed)
            patch.setattr(moe_w4a16_wide, "_turn_rows_kernel", turn)
            patch.setattr(moe_w4a16_wide, "bind", _without_pdl)
            for name, value in _stand_ins(problem["dtype"]).items():
                for module in (integer_weights_many, moe_w4a16_wide):
                    if hasattr(module, name):
                        patch.setattr(module, name, value)
            out = run(moe_w4a16_wide, inputs, problem, config, programs)
        holds(out, inputs, problem)
