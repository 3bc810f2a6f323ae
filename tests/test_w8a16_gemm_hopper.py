"""The Hopper bodies of w8a16_gemm: refusals, defaults, how codes are decoded, results."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import random
import re
from typing import Any

import pytest
import torch

import tkernels
from tests import products
from tests.compiled_for import lines_of
from tests.moved_arguments import amid_others, at_addresses, kept_beside
from tkernels import (
    device,
    integer_decoding,
    integer_weights_few,
    integer_weights_many,
    w8a16_gemm_hopper,
)
from tkernels.ops import w8a16_gemm as op
from tkernels.ops.w8a16_gemm import SPEC
from tkernels.registry import Config, Problem
from tkernels.testing import assert_right, tensors_of
from tkernels.w8_format import numbers_of_codes
from tkernels.w8a16_cases import FP8, w8_inputs, w8_problem

SM90 = device.sm_facts(90)
BF16, FP16, FP32, INT8 = torch.bfloat16, torch.float16, torch.float32, torch.int8
CORE: Config = {
    "variant": "core",
    "BLOCK_M": 16,
    "BLOCK_N": 32,
    "BLOCK_K": 64,
    "SPLIT_K": 1,
    "programs_per_core": 1,
    "PDL": True,
    "num_warps": 8,
    "num_stages": 8,
}
WIDE: Config = {
    **integer_weights_many.FIXED,
    "BLOCK_M": 64,
    "SPLIT_K": 1,
    "PDL": True,
    "num_warps": 8,
    "num_stages": 3,
}
WAYS: dict[str, Config] = {
    "core": CORE,
    "split": {**CORE, "SPLIT_K": 3, "num_stages": 8},
    "eight": {**CORE, "BLOCK_M": 8, "BLOCK_N": 16, "num_stages": 6},
    "long steps": {**CORE, "BLOCK_K": 128, "num_stages": 4},
    "rows": {**CORE, "BLOCK_M": 32, "num_stages": 6},
    "alone": {**CORE, "PDL": False, "num_stages": 9},
    "wide": WIDE,
    "wide, split": {**WIDE, "SPLIT_K": 3, "num_stages": 4},
    "wide, three": {**WIDE, "num_warps": 12, "BLOCK_M": 32, "num_stages": 5},
    "wide, few rows": {**WIDE, "BLOCK_M": 8, "PDL": False},
    "wide, many rows": {**WIDE, "BLOCK_M": 128, "num_stages": 4},
}
each_way = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
both_codes = pytest.mark.parametrize("codes", [FP8, INT8], ids=["fp8", "int8"])
each_dtype = pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])


@pytest.mark.parametrize(
    ("problem", "why"),
    [
        (w8_problem(16, 48, 4096), None),
        (w8_problem(16, 48, 4096, group=4096), None),
        (w8_problem(5, 48, 4096, group=32), "variant core has groups of 64 or more, got 32"),
        (w8_problem(5, 48, 200, group=200), "variant core needs K to be a multiple of 16, got 200"),
    ],
)
def test_why_unfit(problem: Problem, why: str | None) -> None:
    said = w8a16_gemm_hopper.why_unfit("core", problem, SM90)
    assert said is None if why is None else why in str(said)


@pytest.mark.parametrize(
    ("changed", "group", "why"),
    [
        ({}, 64, "variant wide has groups of 128 or more, got 64"),
        ({"BLOCK_M": 256, "num_stages": 2}, 128, "8 warps leave registers for 128 rows"),
        ({"BLOCK_M": 256, "num_stages": 2}, 4096, None),
        ({"BLOCK_M": 128, "num_warps": 12}, 128, "12 warps leave registers for 64 rows"),
        ({"BLOCK_K": 256}, 128, "variant wide has BLOCK_K 128"),
    ],
)
def test_what_wide_cannot_do(changed: Config, group: int, why: str | None) -> None:
    said = SPEC.why_illegal({**WIDE, **changed}, w8_problem(64, 48, 4096, group=group), SM90)
    assert said is None if why is None else why in str(said)


@pytest.mark.parametrize("m", [33, 64, 300, 4096])
def test_default_of_more_rows_is_wide(m: int) -> None:
    for group, variant in ((128, "wide"), (4096, "wide"), (64, "portable")):
        problem = w8_problem(m, 12288, 4096, group=group)
        config = SPEC.default_config(problem, SM90)
        assert config["variant"] == variant
        assert SPEC.why_illegal(config, problem, SM90) is None


def test_elsewhere_the_default_is_portable() -> None:
    for dev in (device.sm_facts(80), device.sm_facts(100), device.ascend_facts()):
        problem = w8_problem(16, 12288, 4096)
        assert f"got {dev.arch}" in str(w8a16_gemm_hopper.why_unfit("core", problem, dev))
        assert SPEC.default_config(problem, dev)["variant"] == "portable"
        assert SPEC.space(dev)["variant"] == ["portable"]


@pytest.mark.parametrize("m", [1, 9, 16])
@pytest.mark.parametrize(("n", "k"), [(12288, 4096), (4096, 12288), (2560, 9728), (40, 256)])
@pytest.mark.parametrize("cores", [78, 114, 132])
def test_default_of_few_rows_is_core_on_every_card(m: int, n: int, k: int, cores: int) -> None:
    dev = dataclasses.replace(SM90, num_cores=cores)
    for group, codes in ((128, FP8), (64, INT8), (k, FP8)):
        problem = w8_problem(m, n, k, codes=codes, group=group)
        config = SPEC.default_config(problem, dev)
        assert config["variant"] == "core"
        assert SPEC.why_illegal(config, problem, dev) is None


def test_odd_addresses_have_the_portable_body(monkeypatch: pytest.MonkeyPatch) -> None:
    """x and weights are copied 16 bytes at a time; scales are not."""
    monkeypatch.setattr(device, "current", lambda: dataclasses.replace(SM90, compile_only=False))
    took = []
    for body in ("hopper", "portable"):
        bound = functools.partial(lambda body, *_: lambda *_: took.append(body), body)
        monkeypatch.setattr(op, f"_bind_{body}", bound)
    inputs = w8_inputs(w8_problem(5, 40, 1024), torch.device("cpu"))
    given = {**inputs, "out": torch.empty(5, 40, dtype=BF16)}
    for name, changed in at_addresses(given):
        run = op._plan(*changed.values(), False, config=CORE)
        assert run is not None
        run(*changed.values(), None)
        assert took.pop() == ("portable" if name in ("x", "weight") else "hopper"), name


@each_dtype
def test_fp8_becomes_16_bits(dtype: torch.dtype) -> None:
    """What the PTX says, one instruction after the other, of every two bytes."""
    text = integer_decoding._fp8_in_16_bits(dtype == FP16)
    halves = torch.arange(1 << 16)  # and another to each
    value: dict[str, Any] = {"$2": halves | halves.flip(0) << 16}

    def read(name: str) -> Any:
        return value[name] if name in value else int(name, 0)

    def numbers(pair: Any) -> torch.Tensor:
        both = torch.stack((pair & 0xFFFF, pair >> 16))
        return (both - (both >> 15 << 16)).to(torch.int16).view(dtype).double()

    for line in text[text.index(";") + 1 : -1].strip(";").split(";"):
        name, to, *operands = re.split(r"[ ,]+", line.strip())
        given = [read(o) for o in operands]
        if name == "mov.b32":
            value[to] = torch.full_like(halves, given[0])
        elif name == "shl.b32":
            value[to] = given[0] << given[1] & 0xFFFFFFFF
        elif name == "shr.u32":
            value[to] = given[0] >> given[1]
        elif name == "and.b32":
            value[to] = given[0] & given[1]
        elif name == "lop3.b32":
            assert given[3] == 0xEA  # a & b | c
            value[to] = given[0] & given[1] | given[2]
        else:
            assert name == "mul.rn.bf16x2", name
            product = (numbers(given[0]) * numbers(given[1])).to(BF16).view(torch.int16).long()
            low, high = product & 0xFFFF
            value[to] = low | high << 16
    parts = 256 if dtype == FP16 else 64
    for i in range(2):
        for j, source in enumerate((halves, halves.flip(0))):
            codes = (source >> 8 * i & 255).to(torch.uint8).view(FP8)
            got = numbers(value[f"${i}"])[j]
            assert torch.equal(got * parts, numbers_of_codes(codes).double())


# ---- what the compiler makes of it -------------------------------------------------------------

# In a process of its own: here Triton is an interpreter, there it must compile.
CHILD = """
import dataclasses, json, sys
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from tkernels import device, offline
from tkernels.ops.w8a16_gemm import SPEC
from tkernels.w8a16_cases import w8_problem

found = []
for m, n, k, dtype, codes, group, changed in json.loads(sys.stdin.read()):
    problem = w8_problem(m, n, k, getattr(torch, dtype), codes=getattr(torch, codes), group=group)
    with FakeTensorMode(), offline.record_launches() as launches:
        SPEC.launch(**SPEC.make_inputs(problem, torch.device("cpu")), config=changed)
    found.append([dataclasses.asdict(offline.compile_cuda(one, 90)) for one in launches])
print(json.dumps(found))
"""
COMPILED: list[Any] = [  # rows, outputs, K, dtype, codes, group, config; None: the default
    (16, 12288, 4096, "bfloat16", "float8_e4m3fn", 128, None),
    (16, 12288, 4096, "float16", "int8", 4096, None),
    (1, 9728, 2560, "float16", "float8_e4m3fn", 128, None),
    (32, 4096, 4096, "bfloat16", "int8", 64, None),
    (16, 2560, 9728, "bfloat16", "float8_e4m3fn", 128, WAYS["split"]),
    (64, 12288, 4096, "bfloat16", "float8_e4m3fn", 128, None),
    (4096, 12288, 4096, "bfloat16", "float8_e4m3fn", 128, None),
    (256, 4096, 4096, "float16", "int8", 128, {**WIDE, "num_warps": 12, "num_stages": 5}),
    (64, 4096, 4096, "float16", "float8_e4m3fn", 4096, None),
]


@pytest.mark.slow
def test_compiled_for_sm90() -> None:
    found = json.loads(lines_of(CHILD, given=json.dumps(COMPILED))[-1])
    assert len(found) == len(COMPILED)
    for case, launches in zip(COMPILED, found, strict=True):
        assert [one["spill_bytes"] for one in launches] == [0] * len(launches), case


# ---- results, on the GPU -----------------------------------------------------------------------

gpu = pytest.mark.gpu
needs_sm90 = pytest.mark.skipif(
    device.current().arch != "sm90", reason="needs an sm90 GPU; this machine has none"
)
K = 1280  # more than a step, and a part of one where steps have 512 columns


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_ways_are_legal(way: Config) -> None:
    for k, group in ((K, 64), (K, 128), (K, 256), (1200, 1200), (8192, 128)):
        if group == 64 and way["variant"] == "wide":
            continue
        problem = w8_problem(13, 2200, k, codes=INT8, group=group, scale=FP32)
        assert SPEC.why_illegal(way, problem, SM90) is None, (k, group)


def exact_inputs(problem: Problem, dev: torch.device) -> dict[str, Any]:
    """Sums of which every part is a small integer times a power of two: no order rounds."""
    inputs = w8_inputs(problem, dev)
    generator = torch.Generator().manual_seed(1)
    x = torch.randint(-2, 3, inputs["x"].shape, generator=generator)
    codes = torch.randint(-4, 5, inputs["weight"].shape, generator=generator)
    powers = torch.randint(-3, 1, inputs["weight_scale"].shape, generator=generator)
    inputs["x"] = x.to(problem["dtype"]).to(dev)
    inputs["weight"] = codes.float().to(problem["codes"]).to(dev)
    inputs["weight_scale"] = torch.exp2(powers.float()).to(problem["scale"]).to(dev)
    return inputs


@gpu
@needs_sm90
@each_way
@both_codes
@each_dtype
@pytest.mark.parametrize("group", [64, 128, 256, K])
def test_exact_sums_are_exact(
    way: Config, codes: torch.dtype, dtype: torch.dtype, group: int, dev: torch.device
) -> None:
    """Bit for bit, with scales of 32 bits and of 16, with a bias and without."""
    if group == 64 and way["variant"] == "wide":
        pytest.skip("wide has groups of 128 or more")
    for scale in (FP32, BF16, FP16):
        problem = w8_problem(
            13, 2200, K, dtype, codes=codes, group=group, scale=scale, bias=scale == dtype
        )
        inputs = exact_inputs(problem, dev)
        got = SPEC.launch(**inputs, config=way)
        assert torch.equal(got, tkernels.reference.w8a16_gemm(**inputs))


@gpu
@needs_sm90
@each_way
@both_codes
@each_dtype
def test_every_code(way: Config, codes: torch.dtype, dtype: torch.dtype, dev: torch.device) -> None:
    """Output n of row r is code 16 n + r, as one column of x is 1; again and again."""
    bits = torch.arange(256, dtype=torch.uint8).view(16, 16).repeat(138, 1)[:2200]
    weight = bits.repeat(1, 32).view(codes).to(dev)  # K = 512, parts of which are split
    x = torch.zeros(16, 512, dtype=dtype, device=dev)
    for r in range(16):
        x[r, r + 16 * (2 * r % 32)] = 1
    scale = torch.ones(2200, 1, device=dev)
    got = SPEC.launch(x, weight, scale, config=way).float().cpu().t()
    assert torch.equal(got, numbers_of_codes(bits.view(codes)))


@gpu
@needs_sm90
@each_way
@each_dtype
@pytest.mark.parametrize("scale", [2.0**-100, 2.0**-30, 2.0**40])
def test_fp32_scales_need_not_fit_16_bits(
    way: Config, dtype: torch.dtype, scale: float, dev: torch.device
) -> None:
    """Sums that fp16 cannot hold are infinite or 0 in the reference, too."""
    inputs = exact_inputs(w8_problem(13, 2200, K, dtype), dev)
    inputs["weight_scale"] *= scale
    got = SPEC.launch(**inputs, config=way)
    assert torch.equal(got, tkernels.reference.w8a16_gemm(**inputs))


@gpu
@needs_sm90
@each_way
@both_codes
@pytest.mark.parametrize("k", [1200, 1280])
def test_what_is_beside_the_matrices_is_not_read(
    way: Config, codes: torch.dtype, k: int, dev: torch.device
) -> None:
    """Views of wider matrices, NaN in the columns and rows that are no part of them."""
    group = 128 if k % 128 == 0 else k
    inputs = w8_inputs(w8_problem(11, 2197, k, codes=codes, group=group, bias=True), dev)
    padded = torch.full((2200, k + 48), 99, dtype=INT8, device=dev)[:2197, :k]
    padded.copy_(inputs["weight"].view(INT8))
    expected = SPEC.launch(**inputs, config=way)
    assert_right(SPEC, inputs, tensors_of(expected))
    amid = amid_others(inputs, expected)
    amid["weight"] = padded.view(codes)
    SPEC.launch(**amid, config=way)
    assert torch.equal(amid["out"], expected)
    assert kept_beside(amid["out"])


@gpu
@needs_sm90
@each_way
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_bad_activations_spoil_their_row_alone(
    way: Config, value: float, dev: torch.device
) -> None:
    inputs = w8_inputs(w8_problem(13, 2200, K), dev)
    inputs["weight"].view(torch.uint8).clamp_(min=1)  # no code is zero
    inputs["weight"].view(torch.uint8)[inputs["weight"].view(torch.uint8) == 0x80] = 1
    products.spoils_its_row_alone(SPEC, inputs, way, value)


@gpu
@needs_sm90
@each_way
@both_codes
def test_the_same_bits_again(way: Config, codes: torch.dtype, dev: torch.device) -> None:
    inputs = w8_inputs(w8_problem(16, 2200, 8192, codes=codes, bias=True), dev)
    products.has_the_same_bits_again(SPEC, inputs, way)


@gpu
@needs_sm90
@both_codes
@pytest.mark.parametrize("m", [1, 8, 16, 32, 64, 256])
@pytest.mark.parametrize(
    ("n", "k"), [(12288, 4096), (4096, 12288), (9728, 2560), (2560, 9728), (48, 128)]
)
def test_large_ones(m: int, n: int, k: int, codes: torch.dtype, dev: torch.device) -> None:
    inputs = w8_inputs(w8_problem(m, n, k, codes=codes), dev)
    assert_right(SPEC, inputs, tensors_of(SPEC.launch(**inputs)))


def random_problems(seed: int, facts: device.Device) -> list[tuple[Problem, Config]]:
    """Eight of any shape, each with a config of any that is legal there."""
    rng, found = random.Random(seed), []
    for _ in range(8):
        group = rng.choice((64, 128, 128, 256, 512, 0))
        k = group * rng.choice((2, 9, 47, 96)) or 16 * rng.choice((1, 75, 301, 601))
        dtype = rng.choice((BF16, FP16))
        problem = w8_problem(
            rng.choice((1, 2, 7, 8, 9, 16, 17, 33, 64, 300)),
            rng.choice((1, 15, 17, 48, 200, 1000, 5000, 12288)),
            k,
            dtype,
            codes=rng.choice((FP8, INT8)),
            group=group or k,
            scale=rng.choice((dtype, FP32)),
            bias=rng.random() < 0.5,
        )
        draws = (random_config(rng) for _ in range(20000))
        found.append((problem, next(c for c in draws if not SPEC.why_illegal(c, problem, facts))))
    return found


def random_config(rng: random.Random) -> Config:
    if rng.random() < 0.4:
        return {
            **WIDE,
            "BLOCK_M": rng.choice((8, 16, 32, 64, 128, 256)),
            "SPLIT_K": rng.choice((1, 1, 2, 3, 8)),
            "PDL": rng.random() < 0.7,
            "num_warps": rng.choice((8, 12)),
            "num_stages": rng.randint(2, 8),
        }
    return {
        **CORE,
        "BLOCK_M": rng.choice((8, 16, 16, 32, 64)),
        "BLOCK_N": rng.choice((16, 32, 64)),
        "BLOCK_K": rng.choice((64, 128, 256)),
        "SPLIT_K": rng.choice((1, 1, 2, 3, 8)),
        "PDL": rng.random() < 0.7,
        "programs_per_core": rng.choice((1, 1, 2, 8)),
        "num_warps": rng.choice((4, 8, 16)),
        "num_stages": rng.randint(2, 8),
    }


def test_random_problems_ask_for_stages_again() -> None:
    again = 0
    for problem, config in (each for seed in range(12) for each in random_problems(seed, SM90)):
        if config["variant"] == "wide":
            continue
        steps = integer_weights_few.steps_of(integer_weights_few.with_slices(config), problem["k"])
        again += steps > config["num_stages"]
    assert again >= 5


@gpu
@needs_sm90
@pytest.mark.parametrize("seed", range(12))
def test_random_problems_and_configs(seed: int, dev: torch.device) -> None:
    products.are_right(SPEC, random_problems(seed, device.current()), dev)
