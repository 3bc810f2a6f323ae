"""The body of w4a16_gemm for several rows: refusals, what the compiler makes of it, results.

Without a GPU it is compiled for sm_90.
"""

from __future__ import annotations

import json
import math
import random
import re
from typing import Any

import pytest
import torch

import tkernels
from tests.compiled_for import lines_of
from tests.test_w4a16_gemm_hopper import CHILD
from tkernels import device, w4a16_gemm_rows
from tkernels.ops.w4a16_gemm import SPEC
from tkernels.registry import Config, Problem
from tkernels.testing import assert_right, tensors_of
from tkernels.w4a16_cases import w4_inputs, w4_problem

SM90 = device.sm_facts(90)
BF16, FP16 = torch.bfloat16, torch.float16
BASE: Config = {
    "variant": "rows",
    "BLOCK_M": 16,
    "BLOCK_N": 128,
    "BLOCK_K": 256,
    "SPLIT_K": 4,
    "SLICES": 1,
    "programs_per_core": 0,
    "PDL": True,
    "num_warps": 4,
    "num_stages": 3,
}


@pytest.mark.parametrize(
    ("problem", "why"),
    [
        (w4_problem(16, 48, 4096), None),
        (w4_problem(64, 48, 576, FP16, group=64, zero=True), None),
        (w4_problem(5, 48, 96, group=96), None),
        (w4_problem(5, 48, 4096, group=32), "variant rows has groups of 64 or more, got 32"),
        (w4_problem(5, 48, 200, group=200), "variant rows needs K to be a multiple of 32 up to"),
    ],
)
def test_why_unfit(problem: Problem, why: str | None) -> None:
    said = w4a16_gemm_rows.why_unfit(problem, SM90)
    assert said is None if why is None else why in str(said)


def test_why_unfit_elsewhere() -> None:
    for dev in (device.sm_facts(80), device.sm_facts(100), device.ascend_facts()):
        problem = w4_problem(16, 48, 4096)
        assert f"got {dev.arch}" in str(w4a16_gemm_rows.why_unfit(problem, dev))
        assert SPEC.default_config(problem, dev)["variant"] != "rows"
        assert "rows" not in SPEC.space(dev)["variant"]


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"BLOCK_M": 128}, "BLOCK_M of (8, 16, 32, 64), got 128"),
        ({"BLOCK_N": 512}, "BLOCK_N of (16, 32, 64, 128, 256), got 512"),
        ({"BLOCK_K": 1024}, "BLOCK_K of (128, 256, 512), got 1024"),
        ({"SPLIT_K": 0}, "SPLIT_K must be 1 to 64, got 0"),
        ({"SLICES": 8}, "SLICES must divide the 4 warps, got 8"),
        ({"SLICES": 3}, "SLICES must divide the 4 warps, got 3"),
        ({"num_stages": 1}, "num_stages 2 or more, got 4 and 1"),
        ({"num_warps": 3}, "num_warps must be 1 to 16"),
        ({"num_warps": 16}, "16 to 64 of the outputs, got 8"),
        ({"num_stages": 13}, "bytes of shared memory"),
        ({"BLOCK_N": 64, "SPLIT_K": 1, "num_warps": 2}, "leave 255 registers a thread"),
        ({"programs_per_core": 6}, "leave 80 registers a thread"),
        ({"variant": "row"}, "direct, turned, hopper or rows, got 'row'"),
    ],
)
def test_why_illegal(changed: Config, why: str) -> None:
    problem = w4_problem(16, 12288, 4096)
    assert SPEC.why_illegal(BASE, problem, SM90) is None
    assert why in str(SPEC.why_illegal({**BASE, **changed}, problem, SM90))


@pytest.mark.parametrize(
    ("changed", "sizes", "steps", "tiles"),
    [
        ({}, (16, 12288, 4096), 4, 1),
        ({"programs_per_core": 1}, (16, 12288, 4096), 4, 3),
        ({"programs_per_core": 1, "SPLIT_K": 12}, (16, 4096, 12288), 4, 3),
        ({"programs_per_core": 1, "SLICES": 2}, (16, 12288, 4096), 2, 3),
        ({"programs_per_core": 1}, (64, 12288, 4096), 4, 12),
        ({"programs_per_core": 2, "SPLIT_K": 3}, (3, 200, 1100), 2, 1),
    ],
)
def test_how_the_work_is_divided(
    changed: Config, sizes: tuple[int, int, int], steps: int, tiles: int
) -> None:
    config, (m, n, k) = {**BASE, **changed}, sizes
    assert w4a16_gemm_rows.steps_of(config, k) == steps
    assert w4a16_gemm_rows.tiles_of(config, m, n, config["programs_per_core"] * 132) == tiles


@pytest.mark.parametrize("m", [2, 8, 16, 32, 64])
@pytest.mark.parametrize(("n", "k"), [(12288, 4096), (4096, 12288), (48, 128)])
def test_its_own_default_is_legal(m: int, n: int, k: int) -> None:
    for group in (64, 128, k):
        problem = w4_problem(m, n, k, group=group, zero=True)
        config = w4a16_gemm_rows.default_config(problem, SM90)
        assert SPEC.why_illegal(config, problem, SM90) is None


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ((2, 4096, 12288), (8, 256, 12, 3)),
        ((8, 12288, 4096), (8, 256, 4, 3)),
        ((9, 4096, 12288), (16, 256, 12, 2)),
        ((16, 12288, 4096), (16, 256, 4, 2)),
        ((16, 6144, 4096), (16, 256, 8, 3)),
        ((16, 5120, 5120), (16, 256, 7, 3)),  # three steps for all but the last
        ((1, 4096, 12288), None),
        ((17, 4096, 12288), None),
        ((16, 1024, 4096), None),  # too few programs
        ((16, 24576, 4096), None),  # more than are held at once
    ],
)
def test_when_it_is_the_default(
    sizes: tuple[int, int, int], expected: tuple[int, ...] | None
) -> None:
    problem = w4_problem(*sizes)
    chosen = SPEC.default_config(problem, SM90)
    assert SPEC.why_illegal(chosen, problem, SM90) is None
    names = ("BLOCK_M", "BLOCK_K", "SPLIT_K", "num_stages")
    if expected is None:
        assert chosen["variant"] != "rows"
        return
    assert (chosen["variant"], *(chosen[name] for name in names)) == ("rows", *expected)
    programs = math.ceil(sizes[1] / chosen["BLOCK_N"]) * chosen["SPLIT_K"]
    assert programs <= 3 * SM90.num_cores
    assert 3 * (w4a16_gemm_rows._bytes_of(chosen, problem) + 1024) <= 228 << 10
    split, k = chosen["SPLIT_K"], sizes[2]
    columns = w4a16_gemm_rows.steps_of(chosen, k) * chosen["BLOCK_K"]
    assert (split - 1) * columns < k <= split * columns  # none without work


@pytest.mark.parametrize("zero", [None, 0, 3, 15, 99])
def test_codes_become_bf16(zero: int | None) -> None:
    """What the PTX says, in exact arithmetic, of every half of a word."""
    text = w4a16_gemm_rows._decoding(zero is not None)
    halves = torch.arange(1 << 16)
    values = {"$4": halves, "t": halves >> 8}
    assert "shr.u32 t, $4, 8;" in text  # what comes from the other half is masked

    def numbers(bits: torch.Tensor) -> torch.Tensor:
        return bits.to(torch.int16).view(BF16).double()

    consts = {
        name: numbers(torch.tensor(int(bits, 16) & 0xFFFF))
        for name, bits in re.findall(r"mov\.b32 (\w+), 0x(\w{8});", text)
    }
    if zero is not None:
        assert "mov.b32 l, $5;" in text
        consts["l"] = torch.tensor(-zero / 64, dtype=BF16).double()
    steps = re.findall(
        r"and\.b32 \$(\d), (\S+), 0x(\w{8});fma\.rn\.bf16x2 \$\1, \$\1, (s\d), l;", text
    )
    assert [int(step[0]) for step in steps] == [0, 1, 2, 3]
    for i, (_, source, mask, factor) in enumerate(steps):
        got = numbers(values[source] & (int(mask, 16) & 0xFFFF)) * consts[factor] + consts["l"]
        codes = halves >> 4 * i & 15
        assert torch.equal(got * 64, (codes - (8 if zero is None else zero)).double())


# ---- what the compiler makes of it -------------------------------------------------------------

COMPILED: list[Any] = [
    (16, 4096, "bfloat16", {}, {}),
    (16, 4096, "bfloat16", {}, {"BLOCK_N": 256, "SPLIT_K": 8, "num_warps": 8}),
    (16, 4096, "bfloat16", {}, {"BLOCK_N": 32, "SPLIT_K": 1, "SLICES": 8, "num_warps": 16,
                                "BLOCK_K": 128, "programs_per_core": 1}),
    (5, 4096, "float16", {"zero": True, "bias": True}, {"BLOCK_M": 8, "BLOCK_N": 64, "SPLIT_K": 1}),
    (8, 4064, "bfloat16", {"group": 4064, "zero": True}, {"BLOCK_M": 8, "SLICES": 2}),
    (9, 576, "float16", {"group": 64}, {"BLOCK_K": 128}),
    (13, 4096, "bfloat16", {"group": 512, "zero": True}, {"BLOCK_K": 128, "num_warps": 8}),
    (32, 4096, "bfloat16", {}, {"BLOCK_M": 32}),
    (64, 4096, "bfloat16", {}, {"BLOCK_M": 64, "BLOCK_K": 128, "num_warps": 8}),
    (16, 4096, "bfloat16", {}, {"programs_per_core": 2, "num_warps": 8}),
    (16, 12288, "bfloat16", {}, {"BLOCK_K": 128, "SPLIT_K": 12, "num_stages": 5}),  # a default
    (7, 32, "float16", {"group": 32}, {"SPLIT_K": 1}),  # a row is 16 bytes, the unit of strides
]  # fmt: skip


@pytest.mark.slow
def test_compiled_for_sm90() -> None:
    for case in COMPILED:
        problem = w4_problem(case[0], 96, case[1], getattr(torch, case[2]), **case[3])
        assert SPEC.why_illegal({**BASE, **case[4]}, problem, SM90) is None, case
    found = json.loads(lines_of(CHILD, given=json.dumps([BASE, COMPILED]))[-1])
    assert len(found) == len(COMPILED)
    for case in found:
        changed = {**BASE, **case["case"][4]}
        rows, outputs, columns = changed["BLOCK_M"], changed["BLOCK_N"], changed["BLOCK_K"]
        stages, warps, slices = (changed[k] for k in ("num_stages", "num_warps", "SLICES"))
        split = ["_add_rows_kernel"] if changed["SPLIT_K"] > 1 else []
        assert case["names"] == ["_w4a16_gemm_rows_kernel", *split], case
        assert case["spill_bytes"] <= 8, case  # a number put away ahead of the loop
        # A step's products and codes once in the program, and x as wide as it goes.
        a_warp = outputs * slices // warps
        assert case["products"] == a_warp * rows * columns // (16 * 8 * 16), case
        codes = a_warp * columns // 2 // 512
        assert codes <= case["codes"] <= codes + 16, case  # results change their layout so, too
        steps = w4a16_gemm_rows.steps_of(changed, case["case"][1])
        asked = min(stages, steps) + (stages < steps)
        assert case["whole"] == asked * slices * outputs * columns // 2 // (512 * warps), case
        assert case["parts"] == 0, case
        if changed["programs_per_core"] == 2:
            assert case["registers"] <= 128, case
        if changed["SPLIT_K"] == 12:  # a core holds three programs
            assert case["registers"] <= 168, case
            assert case["shared_bytes"] + 1024 <= (228 << 10) // 3, case


# ---- results, on the GPU -----------------------------------------------------------------------

gpu = pytest.mark.gpu
needs_sm90 = pytest.mark.skipif(
    device.current().arch != "sm90", reason="needs an sm90 GPU; this machine has none"
)
WAYS: dict[str, Config] = {
    "plain": {},
    "alone": {"BLOCK_M": 8, "BLOCK_N": 16, "num_warps": 1, "num_stages": 2, "SPLIT_K": 3},
    "tiles": {"BLOCK_N": 16, "SLICES": 2, "num_warps": 2, "programs_per_core": 1, "SPLIT_K": 12},
    "slices": {"BLOCK_N": 32, "SLICES": 8, "num_warps": 16, "BLOCK_K": 128, "SPLIT_K": 1},
    "ahead": {"BLOCK_N": 64, "SPLIT_K": 2, "num_stages": 6, "BLOCK_M": 32, "SLICES": 2},
    "long": {"BLOCK_K": 512, "num_warps": 8, "SPLIT_K": 1, "num_stages": 2, "BLOCK_M": 8},
}
each_way = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)


def random_config(rng: random.Random, problem: Problem) -> Config:
    """A legal one, of any shape."""
    while True:
        config = {
            **BASE,
            "BLOCK_M": rng.choice((8, 16, 16, 32, 64)),
            "BLOCK_N": rng.choice((16, 32, 64, 128, 256)),
            "BLOCK_K": rng.choice((128, 256, 512)),
            "SPLIT_K": rng.choice((1, 1, 2, 3, 8)),
            "SLICES": rng.choice((1, 1, 2, 4, 8)),
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
def test_random_problems_and_configs(seed: int, dev: torch.device) -> None:
    rng = random.Random(seed)
    for _ in range(8):
        group = rng.choice((64, 128, 128, 256, 512, 0))
        k = group * rng.choice((1, 2, 3, 5, 9, 16)) or 32 * rng.choice((1, 3, 17, 40))
        dtype = rng.choice((BF16, FP16))
        problem = w4_problem(
            rng.choice((1, 2, 7, 8, 9, 16, 17, 33, 64)),
            rng.choice((1, 15, 16, 17, 48, 200, 1000, 5000)),
            k,
            dtype,
            group=group or k,
            scale=rng.choice((dtype, torch.float32)),
            zero=rng.random() < 0.5,
            bias=rng.random() < 0.5,
        )
        config = random_config(rng, problem)
        inputs = w4_inputs(problem, dev)
        try:
            assert_right(SPEC, inputs, tensors_of(SPEC.launch(**inputs, config=config)))
        except AssertionError as error:
            raise AssertionError(f"{problem} with {config}: {error}") from None


@gpu
@needs_sm90
@each_way
@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
def test_exact_sums_are_exact(
    way: Config, zero: bool, dtype: torch.dtype, dev: torch.device
) -> None:
    """Bit for bit, from small integers and powers of two: nothing is rounded, or left out."""
    inputs = w4_inputs(w4_problem(13, 2200, 1152, dtype, zero=zero), dev)
    generator = torch.Generator().manual_seed(1)
    x = torch.randint(-2, 3, (13, 1152), generator=generator)
    powers = torch.randint(-3, 1, (2200, 9), generator=generator)
    inputs["x"] = x.to(dtype).to(dev)
    inputs["weight_scale"] = torch.exp2(powers.float()).to(dtype).to(dev)
    got = SPEC.launch(**inputs, config={**BASE, **way})
    assert torch.equal(got, tkernels.reference.w4a16_gemm(**inputs))


@gpu
@needs_sm90
@each_way
def test_what_is_beside_the_matrices_is_not_read(way: Config, dev: torch.device) -> None:
    """Views of wider matrices, NaN in the columns and rows that are no part of them."""
    m, n, k = 11, 37, 1184  # ends within a step, at 32 of its columns
    inputs = w4_inputs(w4_problem(m, n, k, group=k, bias=True, zero=True), dev)
    config = {**BASE, **way}
    expected = SPEC.launch(**inputs, config=config)
    assert_right(SPEC, inputs, tensors_of(expected))
    wide = dict(inputs)
    spoilt_by = (("x", math.nan), ("weight", 0x77777777), ("weight_scale", math.nan))
    for name, spoilt in (*spoilt_by, ("weight_zero", 99)):
        t = inputs[name]
        padded = torch.full((len(t) + 3, t.shape[1] + 40), spoilt, dtype=t.dtype, device=dev)
        padded[: len(t), : t.shape[1]] = t
        wide[name] = padded[: len(t), : t.shape[1]]
    wide["out"] = torch.full((m + 2, n + 5), 5.0, dtype=BF16, device=dev)[:m, :n]
    kept = wide["out"]._base
    SPEC.launch(**wide, config=config)
    assert torch.equal(wide["out"], expected)
    assert bool((kept[m:] == 5.0).all())
    assert bool((kept[:, n:] == 5.0).all())


@gpu
@needs_sm90
@each_way
def test_scales_past_the_last_group_are_not_read(way: Config, dev: torch.device) -> None:
    inputs = w4_inputs(w4_problem(3, 17, 640, zero=True), dev)
    config = {**BASE, **way}
    expected = SPEC.launch(**inputs, config=config)
    assert_right(SPEC, inputs, tensors_of(expected))
    scale = torch.full((17, 8), math.nan, dtype=BF16, device=dev)
    scale[:, :5] = inputs["weight_scale"]
    inputs["weight_scale"] = scale[:, :5]
    assert torch.equal(SPEC.launch(**inputs, config=config), expected)


@gpu
@needs_sm90
@each_way
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_bad_activations_spoil_their_row_alone(
    way: Config, value: float, dev: torch.device
) -> None:
    inputs = w4_inputs(w4_problem(13, 24, 1024), dev)
    config = {**BASE, **way}
    before = SPEC.launch(**inputs, config=config)
    inputs["x"][5, 77] = value
    got = SPEC.launch(**inputs, config=config)
    others = [r for r in range(13) if r != 5]
    assert not got[5].isfinite().all()
    assert torch.equal(got[others], before[others])


@gpu
@needs_sm90
@each_way
def test_the_same_bits_again(way: Config, dev: torch.device) -> None:
    inputs = w4_inputs(w4_problem(16, 1000, 1920, bias=True), dev)
    config = {**BASE, **way}
    first = SPEC.launch(**inputs, config=config)
    for _ in range(20):
        assert torch.equal(first, SPEC.launch(**inputs, config=config))


@gpu
@needs_sm90
@pytest.mark.parametrize("m", [2, 8, 16, 64])
@pytest.mark.parametrize(("n", "k"), [(12288, 4096), (4096, 12288)])
def test_large_ones(m: int, n: int, k: int, dev: torch.device) -> None:
    problem = w4_problem(m, n, k)
    inputs = w4_inputs(problem, dev)
    config = w4a16_gemm_rows.default_config(problem, device.current())
    assert_right(SPEC, inputs, tensors_of(SPEC.launch(**inputs, config=config)))


@gpu
@needs_sm90
def test_it_reads_whatever_lies_at_odd_addresses(dev: torch.device) -> None:
    """Tensors that do not lie at 16 bytes, and strides that do not keep rows there."""
    inputs = w4_inputs(w4_problem(5, 40, 1024, bias=True, zero=True), dev)
    for name, kept in inputs.items():
        step = max(1, 4 // kept.element_size())
        moved = torch.zeros(kept.numel() + step, dtype=kept.dtype, device=dev)[step:]
        changed = {**inputs, name: moved.view(kept.shape).copy_(kept)}
        assert changed[name].data_ptr() % 16
        assert_right(SPEC, changed, tensors_of(SPEC.launch(**changed, config=BASE)))
        if kept.dim() == 2:
            wider = torch.zeros(len(kept), kept.shape[1] + 1, dtype=kept.dtype, device=dev)
            changed = {**inputs, name: wider[:, 1:].copy_(kept)}
            assert_right(SPEC, changed, tensors_of(SPEC.launch(**changed, config=BASE)))
