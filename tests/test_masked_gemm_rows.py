"""The body of masked_gemm for several int8 rows: refusals, what the compiler makes of it, results.

Without a GPU it is compiled for sm_90.
"""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
import torch

import tkernels
from tests.compiled_for import lines_of
from tests.test_masked_gemm_few import CHILD
from tkernels import device, masked_gemm_rows
from tkernels.masked_gemm_cases import gemm_inputs, gemm_problem
from tkernels.ops.masked_gemm import SPEC
from tkernels.registry import Config, Problem

SM90 = device.sm_facts(90)
BF16, FP16 = torch.bfloat16, torch.float16
BASE: Config = {
    "variant": "rows",
    "BLOCK_M": 16,
    "BLOCK_N": 64,
    "BLOCK_K": 128,
    "GROUP_M": 1,
    "SPLIT_K": 1,
    "programs_per_core": 0,
    "SWAP": False,
    "PDL": True,
    "num_warps": 4,
    "num_stages": 3,
}


@pytest.mark.parametrize(
    ("problem", "why"),
    [
        (gemm_problem(16, 48, 4096), None),
        (gemm_problem(16, 48, 4096, path="masked"), "has int8 rows alone, got path masked"),
        (gemm_problem(16, 48, 4096, path="high"), "has int8 rows alone, got path high"),
        (gemm_problem(16, 48, 4100), "rows that divide by 16 bytes"),
    ],
)
def test_why_unfit(problem: Problem, why: str | None) -> None:
    said = masked_gemm_rows.why_unfit(problem, SM90)
    assert said is None if why is None else why in str(said)


def test_why_unfit_elsewhere() -> None:
    for dev in (device.sm_facts(80), device.sm_facts(100), device.ascend_facts()):
        problem = gemm_problem(16, 48, 4096)
        assert f"got {dev.arch}" in str(masked_gemm_rows.why_unfit(problem, dev))
        assert SPEC.default_config(problem, dev)["variant"] != "rows"
        assert "rows" not in SPEC.space(dev)["variant"]


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"BLOCK_M": 128}, "BLOCK_M of (8, 16, 32, 64), got 128"),
        ({"BLOCK_N": 512}, "BLOCK_N of (16, 32, 64, 128, 256), got 512"),
        ({"BLOCK_K": 64}, "BLOCK_K of (128, 256, 512), got 64"),
        ({"GROUP_M": 8}, "variant rows has GROUP_M 1"),
        ({"SWAP": True}, "variant rows has SWAP False"),
        ({"SPLIT_K": 0}, "SPLIT_K must be 1 to 64, got 0"),
        ({"num_stages": 1}, "num_stages 2 or more, got 4 and 1"),
        ({"num_warps": 3}, "num_warps must be 1 to 16"),
        ({"num_warps": 1, "BLOCK_N": 128}, "16 to 64 of the outputs, got 128"),
        ({"num_stages": 12}, "bytes of shared memory"),
        ({"num_warps": 1, "BLOCK_N": 32, "BLOCK_K": 512}, "leave 255 registers a thread"),
        ({"programs_per_core": 16}, "leave 32 registers a thread"),
    ],
)
def test_why_illegal(changed: Config, why: str) -> None:
    problem = gemm_problem(16, 12288, 4096)
    assert SPEC.why_illegal(BASE, problem, SM90) is None
    assert why in str(SPEC.why_illegal({**BASE, **changed}, problem, SM90))


@pytest.mark.parametrize(
    ("block_n", "warps", "slices"), [(16, 4, 4), (32, 8, 8), (64, 4, 2), (128, 4, 1), (256, 4, 1)]
)
def test_how_the_warps_are_divided(block_n: int, warps: int, slices: int) -> None:
    config = {**BASE, "BLOCK_N": block_n, "num_warps": warps}
    assert masked_gemm_rows.slices_of(config) == slices
    assert masked_gemm_rows.steps_of(config, 4096) == 32 // slices


@pytest.mark.parametrize("m", [2, 8, 16, 32, 64])
@pytest.mark.parametrize(("n", "k"), [(12288, 4096), (4096, 12288), (48, 128)])
def test_its_own_default_is_legal(m: int, n: int, k: int) -> None:
    problem = gemm_problem(m, n, k)
    assert SPEC.why_illegal(masked_gemm_rows.default_config(problem, SM90), problem, SM90) is None


@pytest.mark.parametrize(
    ("sizes", "splits"),
    [
        ((9, 4096, 12272), 12),  # no multiple of 128 columns, as the narrow body needs
        ((16, 12288, 4080), 4),
        ((16, 12288, 4096), None),
        ((8, 12288, 4080), None),  # not timed
        ((17, 12288, 4080), None),
        ((16, 1024, 4080), None),  # too few programs
        ((16, 24576, 4096), None),  # more than are held at once
    ],
)
def test_when_it_is_the_default(sizes: tuple[int, int, int], splits: int | None) -> None:
    problem = gemm_problem(*sizes)
    chosen = SPEC.default_config(problem, SM90)
    assert SPEC.why_illegal(chosen, problem, SM90) is None
    assert (chosen["variant"] == "rows") == (splits is not None)
    assert splits in (None, chosen["SPLIT_K"])


# ---- what the compiler makes of it -------------------------------------------------------------

COMPILED: list[Any] = [
    (16, 4096, {"bias": True}, {}),
    (16, 4096, {}, {"BLOCK_N": 32, "num_warps": 8, "programs_per_core": 1}),
    (5, 4096, {}, {"BLOCK_M": 8, "BLOCK_N": 16, "num_warps": 1, "SPLIT_K": 4}),
    (9, 4048, {}, {"BLOCK_K": 256, "BLOCK_N": 128, "SPLIT_K": 4}),  # ends within a step
    (32, 4096, {}, {"BLOCK_M": 32, "SPLIT_K": 2}),
    (64, 4096, {}, {"BLOCK_M": 64, "SPLIT_K": 4, "BLOCK_N": 128, "num_warps": 8}),
    (7, 16, {}, {"num_stages": 2}),  # a row is 16 bytes, the unit of strides
]


@pytest.mark.slow
def test_compiled_for_sm90() -> None:
    for m, k, more, changed in COMPILED:
        problem = gemm_problem(m, 96, k, **more)
        assert SPEC.why_illegal({**BASE, **changed}, problem, SM90) is None, changed
    found = json.loads(lines_of(CHILD, given=json.dumps([BASE, COMPILED]))[-1])
    assert len(found) == len(COMPILED)
    for case in found:
        changed = {**BASE, **case["case"][3]}
        rows, outputs, columns = changed["BLOCK_M"], changed["BLOCK_N"], changed["BLOCK_K"]
        stages, warps = changed["num_stages"], changed["num_warps"]
        slices = masked_gemm_rows.slices_of(changed)
        split = ["_add_int8_rows_kernel"] if changed["SPLIT_K"] > 1 else []
        assert case["names"] == ["_masked_gemm_rows_kernel", *split], case
        assert case["spill_bytes"] == 0, case
        # A step's products once in the program, or twice where the compiler sets the first step
        # apart, and all fetches of weights 16 bytes wide.
        a_warp = outputs * slices // warps
        products = a_warp * rows * columns // (16 * 8 * 32)
        assert case["products"] in (products, 2 * products), case
        steps = masked_gemm_rows.steps_of(changed, case["case"][1])
        asked = min(stages, steps) + (stages < steps)
        assert case["whole"] == asked * slices * outputs * columns // (512 * warps), case
        assert case["parts"] == 0, case


# ---- results, on the GPU -----------------------------------------------------------------------

gpu = pytest.mark.gpu
needs_sm90 = pytest.mark.skipif(
    device.current().arch != "sm90", reason="needs an sm90 GPU; this machine has none"
)


def random_config(rng: random.Random, problem: Problem) -> Config:
    """A legal one, of any shape."""
    while True:
        config = {
            **BASE,
            "BLOCK_M": rng.choice((8, 16, 16, 32, 64)),
            "BLOCK_N": rng.choice((16, 32, 64, 128, 256)),
            "BLOCK_K": rng.choice((128, 256, 512)),
            "SPLIT_K": rng.choice((1, 1, 2, 3, 8)),
            "PDL": rng.random() < 0.7,
            "programs_per_core": rng.choice((0, 0, 1, 2)),
            "num_warps": rng.choice((1, 2, 4, 8, 16)),
            "num_stages": rng.choice((2, 3, 5)),
        }
        if SPEC.why_illegal(config, problem, device.current()) is None:
            return config


@gpu
@needs_sm90
@pytest.mark.parametrize("seed", range(12))
def test_random_problems_equal_the_reference_bit_for_bit(seed: int, dev: torch.device) -> None:
    """Sums are exact, and what follows is rounded step by step."""
    rng = random.Random(seed)
    for _ in range(8):
        problem = gemm_problem(
            rng.choice((1, 2, 7, 8, 9, 16, 17, 33, 64)),
            rng.choice((1, 15, 16, 17, 48, 200, 1000, 5000)),
            16 * rng.choice((1, 3, 8, 25, 64, 97, 256)),
            rng.choice((BF16, FP16)),
            quantized=rng.random() < 0.7,
            bias=rng.random() < 0.5,
        )
        config = random_config(rng, problem)
        inputs = gemm_inputs(problem, dev)
        got = SPEC.launch(**inputs, config=config)
        expected = tkernels.reference.masked_gemm(**inputs)
        assert torch.equal(got, expected), f"{problem} with {config}"


WAYS: dict[str, Config] = {
    "plain": {},
    "alone": {"num_warps": 1, "BLOCK_N": 16, "num_stages": 2},
    "long": {"BLOCK_K": 512, "BLOCK_N": 16, "num_stages": 2, "SPLIT_K": 2},
    "rows": {"BLOCK_M": 32, "SPLIT_K": 3, "num_warps": 2, "num_stages": 8},
    "tiles": {"BLOCK_N": 16, "num_warps": 2, "programs_per_core": 1, "SPLIT_K": 12},
}
each_way = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)


@gpu
@needs_sm90
@each_way
def test_what_is_beside_the_matrices_is_not_read(way: Config, dev: torch.device) -> None:
    """Views of wider matrices, other codes in the columns and rows that are no part of them."""
    m, n, k = 11, 2197, 1168  # ends within a step
    inputs = gemm_inputs(gemm_problem(m, n, k, bias=True), dev)
    config = {**BASE, **way}
    expected = tkernels.reference.masked_gemm(**inputs)
    wide = dict(inputs)
    for name in ("x_q", "weight"):
        t = inputs[name]
        padded = torch.full((len(t) + 3, k + 48), 77, dtype=torch.int8, device=dev)
        padded[: len(t), :k] = t
        wide[name] = padded[: len(t), :k]
    wide["out"] = torch.full((m + 2, n + 5), 5.0, dtype=BF16, device=dev)[:m, :n]
    kept = wide["out"]._base
    SPEC.launch(**wide, config=config)
    assert torch.equal(wide["out"], expected)
    assert bool((kept[m:] == 5.0).all())
    assert bool((kept[:, n:] == 5.0).all())


@gpu
@needs_sm90
@pytest.mark.parametrize("m", [2, 8, 16, 64])
@pytest.mark.parametrize(("n", "k"), [(12288, 4096), (4096, 12288)])
def test_large_ones(m: int, n: int, k: int, dev: torch.device) -> None:
    problem = gemm_problem(m, n, k)
    inputs = gemm_inputs(problem, dev)
    config = masked_gemm_rows.default_config(problem, device.current())
    expected = tkernels.reference.masked_gemm(**inputs)
    for _ in range(5):
        assert torch.equal(SPEC.launch(**inputs, config=config), expected)


@gpu
@needs_sm90
@pytest.mark.parametrize("name", ["x_q", "weight", "weight_scale", "x_scale"])
def test_it_reads_whatever_lies_at_odd_addresses(name: str, dev: torch.device) -> None:
    inputs = gemm_inputs(gemm_problem(5, 40, 1024, bias=True), dev)
    kept = inputs[name]
    step = max(1, 4 // kept.element_size())
    moved = torch.zeros(kept.numel() + step, dtype=kept.dtype, device=dev)[step:]
    changed = {**inputs, name: moved.view(kept.shape).copy_(kept)}
    assert changed[name].data_ptr() % 16
    got = SPEC.launch(**changed, config=BASE)
    assert torch.equal(got, tkernels.reference.masked_gemm(**inputs))
