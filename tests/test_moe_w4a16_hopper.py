"""The Hopper bodies of moe_w4a16_gemm: refusals, defaults, results."""

from __future__ import annotations

import dataclasses
import math
import random
from typing import Any

import pytest
import torch

import tkernels
from tests import products
from tkernels import device, moe_w4a16_core, moe_w4a16_wide
from tkernels.moe_gemm_cases import dispatched
from tkernels.moe_w4a16_cases import moe_w4_inputs, moe_w4_problem
from tkernels.ops import moe_gemm
from tkernels.ops.moe_w4a16_gemm import SPEC
from tkernels.registry import Config, KernelSpec, Problem
from tkernels.testing import assert_right, guarded, tensors_of
from tkernels.w4_format import dequantize_w4

SM90 = device.sm_facts(90)
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
FEW = moe_w4_problem(64, 128, 8, 1536, 2048)
MANY = moe_w4_problem(4096, 128, 8, 1536, 2048)
DOWN = moe_w4_problem(4096, 128, 8, 2048, 768, first=False)
CORE: Config = {
    "variant": "core", "BLOCK_M": 16, "BLOCK_N": 32, "BLOCK_K": 64, "SLICES": 2,
    "programs_per_core": 0, "SWAP": True, "PDL": True, "num_warps": 4, "num_stages": 3,
}  # fmt: skip
WIDE: Config = {
    **moe_w4a16_wide.FIXED, "BLOCK_M": 64, "BLOCK_N": 128, "PDL": True, "num_stages": 4,
}  # fmt: skip


# ---- which problems and configs ----------------------------------------------------------------


@pytest.mark.parametrize("body", [moe_w4a16_core, moe_w4a16_wide], ids=["core", "wide"])
@pytest.mark.parametrize(
    ("changed", "facts", "why"),
    [
        ({}, SM90, None),
        ({"dtype": FP16, "scale": FP16, "zero": True}, SM90, None),
        ({"group": 2048}, SM90, None),
        ({"aligned": False}, SM90, "needs aligned rows"),
        ({"k": 2048 + 8, "group": 2048 + 8}, SM90, "K to be a multiple of 32, got 2056"),
        ({}, device.sm_facts(100), "needs an sm90 device, got sm100"),
        ({}, device.sm_facts(80), "needs an sm90 device, got sm80"),
        ({}, device.ascend_facts(), "got ascend910b"),
    ],
)
def test_why_unfit(
    body: Any, changed: dict[str, Any], facts: device.Device, why: str | None
) -> None:
    said = body.why_unfit({**MANY, **changed}, facts)
    assert said is None if why is None else why in str(said)


def test_what_only_one_of_them_refuses() -> None:
    in_32 = {**MANY, "group": 32}
    assert "groups of 64 or more, got 32" in str(moe_w4a16_core.why_unfit(in_32, SM90))
    assert moe_w4a16_wide.why_unfit(in_32, SM90) is None
    wide_scales = {**MANY, "scale": FP32}
    assert moe_w4a16_core.why_unfit(wide_scales, SM90) is None
    said = moe_w4a16_wide.why_unfit(wide_scales, SM90)
    assert "has scales of x's dtype, got torch.float32" in str(said)


@pytest.mark.parametrize(
    ("base", "changed", "why"),
    [
        (CORE, {}, None),
        (CORE, {"BLOCK_M": 128}, "has BLOCK_M of (8, 16, 32, 64), got 128"),
        (CORE, {"BLOCK_N": 256}, "has BLOCK_N of (16, 32, 64, 128), got 256"),
        (CORE, {"num_stages": 1}, "has num_stages of 2 to 8, got 1"),
        (CORE, {"SLICES": 8}, "a warp or more a slice, got 8"),
        (CORE, {"SLICES": 1, "BLOCK_N": 32}, "4 warps have 64 outputs, more than BLOCK_N"),
        (CORE, {"SLICES": 1, "BLOCK_N": 64}, "128 to 1024 columns, got 64"),
        (CORE, {"SLICES": 4, "BLOCK_N": 64}, "at most 6 tiles, got 8"),
        (CORE, {"BLOCK_M": 64, "num_stages": 8, "BLOCK_K": 256}, "shared memory"),
        (CORE, {"BLOCK_M": 64, "BLOCK_K": 128}, "registers a thread"),
        (WIDE, {}, None),
        (WIDE, {"BLOCK_M": 256}, "has BLOCK_M of 16, 32, 64, 128, got 256"),
        (WIDE, {"BLOCK_N": 256}, "variant wide has BLOCK_N 128"),
        (WIDE, {"num_warps": 4}, "variant wide has num_warps 8"),
        (WIDE, {"num_stages": 1}, "num_stages of 2 or more, got 1"),
        (WIDE, {"num_stages": 8}, "shared memory"),
        (WIDE, {"variant": "hopper"}, "variant must be portable, unpacked, core or wide"),
    ],
)
def test_why_illegal(base: Config, changed: Config, why: str | None) -> None:
    said = SPEC.why_illegal({**base, **changed}, MANY, SM90)
    assert said is None if why is None else why in str(said)


@pytest.mark.parametrize(
    ("tokens", "first", "variant", "rows"),
    [
        (1, True, "core", 8),
        (64, True, "core", 8),
        (64, False, "core", 8),
        (128, True, "wide", 128),
        (128, False, "core", 16),
        (256, False, "wide", 64),
        (4096, True, "wide", 128),
        (4096, False, "wide", 128),
    ],
)
def test_which_body_is_the_default(tokens: int, first: bool, variant: str, rows: int) -> None:
    n, k = (1536, 2048) if first else (2048, 768)
    config = SPEC.default_config(moe_w4_problem(tokens, 128, 8, n, k, first=first), SM90)
    assert (config["variant"], config["BLOCK_M"]) == (variant, rows)


def test_defaults_are_legal() -> None:
    rng, seen = random.Random(0), set()
    for _ in range(400):
        problem = random_problem(rng)
        config = SPEC.default_config(problem, SM90)
        assert SPEC.why_illegal(config, problem, SM90) is None, (problem, config)
        seen.add(config["variant"])
    assert seen == {"core", "wide", "portable", "unpacked"}


def random_problem(rng: random.Random) -> Problem:
    group = rng.choice((32, 64, 128, 128, 256, 0))
    k = group * rng.choice((1, 2, 3, 6, 9, 16)) or 8 * rng.choice((4, 12, 40, 77, 300))
    dtype = rng.choice((BF16, FP16))
    experts = rng.choice((1, 3, 8, 60, 128, 200))
    first = rng.random() < 0.5
    n = rng.choice((1, 15, 48, 200, 384, 1000))
    return moe_w4_problem(
        rng.choice((1, 3, 9, 33, 100, 300)),
        experts,
        min(experts, rng.choice((1, 2, 8))),
        2 * n if first else n,
        k,
        dtype,
        first=first,
        group=group or k,
        scale=rng.choice((dtype, dtype, FP32)),
        zero=rng.random() < 0.5,
        routing=rng.choice(("uniform", "zipf", "one")),
    )


def random_config(rng: random.Random) -> Config:
    if rng.random() < 0.3:
        return {
            **WIDE,
            "BLOCK_M": rng.choice((16, 32, 64, 128)),
            "BLOCK_N": rng.choice((128, 256)),
            "PDL": rng.random() < 0.7,
            "num_stages": rng.randint(2, 8),
        }
    return {
        **CORE,
        "BLOCK_M": rng.choice((8, 16, 32)),
        "BLOCK_N": rng.choice((16, 32, 64, 128)),
        "BLOCK_K": rng.choice((64, 128, 256)),
        "SLICES": rng.choice((1, 2, 4, 8)),
        "PDL": rng.random() < 0.7,
        "programs_per_core": rng.choice((0, 0, 1, 4)),
        "num_warps": rng.choice((2, 4, 8)),
        "num_stages": rng.randint(2, 8),
    }


def random_problems(seed: int, facts: device.Device) -> list[tuple[Problem, Config]]:
    """Six of any shape, each with a config of one of the bodies that is legal there."""
    rng, found = random.Random(seed), []
    while len(found) < 6:
        problem = random_problem(rng)
        draws = (random_config(rng) for _ in range(2000))
        config = next((c for c in draws if not SPEC.why_illegal(c, problem, facts)), None)
        if config is not None:
            found.append((problem, config))
    return found


def test_what_is_drawn() -> None:
    """Both bodies, rings that are refilled, programs of several tiles, zero points, any routing."""
    drawn = [each for seed in range(12) for each in random_problems(seed, SM90)]
    wide = [p for p, c in drawn if c["variant"] == "wide"]
    assert 15 <= len(wide) <= len(drawn) - 15
    assert sum(p["zero"] for p in wide) >= 4
    assert sum(c["programs_per_core"] > 0 for _, c in drawn if c["variant"] == "core") >= 5
    refilled = [c for p, c in drawn if c["BLOCK_K"] * c["SLICES"] * c["num_stages"] < p["k"]]
    assert len(refilled) >= 10


# ---- on a GPU ----------------------------------------------------------------------------------

gpu = pytest.mark.gpu
needs_sm90 = pytest.mark.skipif(
    device.current().arch != "sm90", reason="needs an sm90 GPU; this machine has none"
)
WAYS: dict[str, Config] = {
    "core": CORE,
    "core in turn": {**CORE, "programs_per_core": 1, "BLOCK_M": 8},
    "core, one slice": {**CORE, "SLICES": 1, "num_warps": 2, "BLOCK_K": 128, "num_stages": 2},
    "wide": WIDE,
    "wide, 128 rows": {**WIDE, "BLOCK_M": 128, "num_stages": 2},
    "wide, 16 rows": {**WIDE, "BLOCK_M": 16, "PDL": False},
}
each_way = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)


def held_to(way: Config) -> KernelSpec:
    """ "core" has products of exact weights: only "wide" is off by what rounding them costs."""
    return SPEC if way["variant"] == "wide" else dataclasses.replace(SPEC, tolerance=1.0)


def at_home(way: Config, first: bool) -> Config:
    """``way`` for gate_up, or for down, of which "wide" has other tiles."""
    return {**way, "BLOCK_N": 256} if way["variant"] == "wide" and not first else way


@gpu
@needs_sm90
@pytest.mark.parametrize("seed", range(12))
def test_random_problems_and_configs(seed: int, dev: torch.device) -> None:
    for problem, config in random_problems(seed, device.current()):
        products.are_right(held_to(config), [(problem, config)], dev)


@gpu
@needs_sm90
@each_way
@pytest.mark.parametrize("first", [True, False], ids=["gate_up", "down"])
@pytest.mark.parametrize("tokens", [1, 70, 700])
def test_a_layer_of_qwen(way: Config, first: bool, tokens: int, dev: torch.device) -> None:
    n, k = (1536, 2048) if first else (2048, 768)
    problem = moe_w4_problem(tokens, 128, 8, n, k, first=first, routing="zipf")
    products.are_right(held_to(way), [(problem, at_home(way, first))], dev)


@gpu
@needs_sm90
@each_way
@pytest.mark.parametrize("first", [True, False], ids=["gate_up", "down"])
@pytest.mark.parametrize("group", [64, 128])
def test_one_step(way: Config, first: bool, group: int, dev: torch.device) -> None:
    """Tiles of all heights, of whose loop nothing is left where it is known to have one step."""
    problem = moe_w4_problem(300, 20, 2, 256, 128, first=first, group=group, routing="zipf")
    products.are_right(held_to(way), [(problem, at_home(way, first))], dev)


@gpu
@needs_sm90
@pytest.mark.parametrize("first", [True, False], ids=["gate_up", "down"])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
def test_wide_is_the_product_of_rounded_weights(
    first: bool, dtype: torch.dtype, dev: torch.device
) -> None:
    """Within what moe_gemm is held to, a sharper tool than what rounded weights are off by."""
    inputs = moe_w4_inputs(moe_w4_problem(300, 8, 2, 512, 1024, dtype, first=first), dev)
    got = SPEC.launch(**inputs, config=at_home({**WIDE, "BLOCK_M": 128}, first))
    packed, scale = inputs.pop("weight"), inputs.pop("weight_scale")
    inputs["weight"] = torch.stack(
        [dequantize_w4(q, s).to(dtype) for q, s in zip(packed, scale, strict=True)]
    )
    assert_right(moe_gemm.SPEC, inputs, tensors_of(got))


@gpu
@needs_sm90
@each_way
@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
def test_exact_sums_are_exact(
    way: Config, zero: bool, dtype: torch.dtype, dev: torch.device
) -> None:
    """Bit for bit, from small integers and powers of two: nothing is rounded, or left out."""
    problem = moe_w4_problem(90, 5, 2, 300, 1152, dtype, first=False, zero=zero)
    inputs = moe_w4_inputs(problem, dev)
    generator = torch.Generator().manual_seed(1)

    def integers(least: int, most: int, like: torch.Tensor) -> torch.Tensor:
        drawn = torch.randint(least, most, like.shape, generator=generator)
        return drawn.to(dev).to(like.dtype)

    inputs["x"] = integers(-2, 3, inputs["x"])
    inputs["weight_scale"] = torch.exp2(integers(-3, 1, inputs["weight_scale"]).float()).to(dtype)
    inputs["topk_weights"] = torch.exp2(integers(-2, 1, inputs["topk_weights"]))
    got = SPEC.launch(**inputs, config=at_home(way, False))
    assert torch.equal(got, tkernels.reference.moe_w4a16_gemm(**inputs))


@gpu
@needs_sm90
@each_way
@pytest.mark.parametrize("first", [True, False], ids=["gate_up", "down"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_bad_activations_spoil_their_rows_alone(
    way: Config, first: bool, value: float, dev: torch.device
) -> None:
    problem = moe_w4_problem(40, 6, 2, 160, 384, first=first)
    inputs, config = moe_w4_inputs(problem, dev), at_home(way, first)
    before = SPEC.launch(**inputs, config=config)
    inputs["x"][5, 77] = value
    got = SPEC.launch(**inputs, config=config)
    bad = inputs["sorted_ids"] // 2 == 5
    if not first:
        bad = torch.arange(len(got), device=dev) == 5
    assert int(bad.sum()) == (2 if first else 1)
    assert not got[bad].isfinite().any()
    assert torch.equal(got[~bad], before[~bad])


@gpu
@needs_sm90
@each_way
def test_rows_of_no_expert_are_left_as_they_are(way: Config, dev: torch.device) -> None:
    """And nothing beside the outputs is written; experts in the midst have no row."""
    inputs = moe_w4_inputs(moe_w4_problem(50, 7, 2, 96, 256), dev)
    chosen = [[1, 5] if t % 3 else [5, 6] for t in range(50)]
    offsets, ids = dispatched(chosen, 7, dev)
    inputs |= {"expert_offsets": offsets, "sorted_ids": ids}
    expected = SPEC.launch(**inputs, config=way)
    assert_right(SPEC, inputs, tensors_of(expected))
    offsets[6:] = offsets[6] - 3  # the last rows have no expert now
    end = int(offsets[-1])
    held = guarded(torch.full_like(expected, 7.0))
    SPEC.launch(**inputs, config=way, out=held.tensor)
    assert torch.equal(held.tensor[:end], expected[:end])
    assert bool((held.tensor[end:] == 7.0).all())
    held.check("out")


@gpu
@needs_sm90
@each_way
def test_the_same_bits_again(way: Config, dev: torch.device) -> None:
    """Also by a captured graph, whose kernels follow one another, and for another routing."""
    inputs = moe_w4_inputs(moe_w4_problem(60, 9, 3, 256, 512), dev)
    first = SPEC.launch(**inputs, config=way)
    out = torch.full_like(first, math.nan)
    graph = device.new_graph()
    with device.capture(graph):
        for _ in range(20):
            SPEC.launch(**inputs, config=way, out=out)
    graph.replay()
    assert torch.equal(first, out)
    chosen = [[(t * 5 + 1) % 9, (t * 5 + 4) % 9, 8 - t % 2] for t in range(60)]
    chosen = [row if len(set(row)) == 3 else [0, 1, 2] for row in chosen]
    for name, t in zip(("expert_offsets", "sorted_ids"), dispatched(chosen, 9, dev), strict=True):
        inputs[name].copy_(t)
    graph.replay()
    assert torch.equal(SPEC.launch(**inputs, config=way), out)
    assert_right(SPEC, inputs, tensors_of(out))


@gpu
@needs_sm90
@each_way
def test_it_reads_whatever_lies_at_odd_addresses(way: Config, dev: torch.device) -> None:
    inputs = moe_w4_inputs(moe_w4_problem(12, 4, 2, 96, 256, zero=True), dev)
    for name in ("x", "weight", "weight_scale", "weight_zero"):
        t = inputs[name]
        beside = torch.empty(t.numel() + 1, dtype=t.dtype, device=dev)
        inputs[name] = beside[1:].view(t.shape).copy_(t)
    assert_right(SPEC, inputs, tensors_of(SPEC.launch(**inputs, config=way)))
