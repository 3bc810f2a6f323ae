"""skinny_linear of 2 to 64 rows on Hopper: refusals, choices, what is compiled, results.

Without a GPU it is compiled for sm_90.
"""

from __future__ import annotations

import dataclasses
import json
import math
import random
from typing import Any

import pytest
import torch

import tkernels
from tests import products
from tests.compiled_for import lines_of
from tests.moved_arguments import amid_others, kept_beside
from tkernels import device, integer_weights_few, skinny_linear_rows
from tkernels.ops.skinny_linear import SPEC
from tkernels.registry import Config, Problem
from tkernels.skinny_linear_facts import linear_inputs, linear_problem
from tkernels.testing import assert_right, tensors_of

SM90 = device.sm_facts(90)
BF16, FP16 = torch.bfloat16, torch.float16
CORE: Config = {
    "variant": "core", "BLOCK_M": 16, "BLOCK_N": 32, "BLOCK_K": 64, "SPLIT_K": 1,
    "programs_per_core": 1, "SWAP": False, "AHEAD": False, "PDL": True, "num_warps": 8,
    "num_stages": 6,
}  # fmt: skip
STREAM: Config = {
    "variant": "stream", "BLOCK_M": 64, "BLOCK_N": 96, "BLOCK_K": 256, "SPLIT_K": 1,
    "programs_per_core": 0, "SWAP": False, "AHEAD": False, "PDL": True, "num_warps": 4,
    "num_stages": 5,
}  # fmt: skip
each_body = pytest.mark.parametrize("base", [CORE, STREAM], ids=["core", "stream"])
LAYERS = [  # outputs and inputs of Qwen3-0.6B, 4B and 8B
    *((4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072)),
    *((6144, 2560), (2560, 4096), (19456, 2560), (2560, 9728)),
    *((6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288)),
]


@each_body
@pytest.mark.parametrize(
    ("problem", "why"),
    [
        (linear_problem(16, 48, 4096), None),
        (linear_problem(2, 1, 16, FP16, bias=True), None),
        (linear_problem(1, 48, 4096), "has two rows or more, got 1"),
        (linear_problem(16, 48, 4096, normed=True), "has products alone, and a bias"),
        (linear_problem(16, 48, 4096, gated=True), "has products alone, and a bias"),
        (linear_problem(16, 48, 4096, residual=True), "has products alone, and a bias"),
        (linear_problem(16, 48, 4096, torch.float32), "has 16-bit numbers, got torch.float32"),
        (linear_problem(16, 48, 4095), "needs rows that divide by 16 bytes"),
    ],
)
def test_why_unfit(base: Config, problem: Problem, why: str | None) -> None:
    variant = base["variant"]
    said = skinny_linear_rows.why_unfit(variant, problem, SM90)
    assert said is None if why is None else f"variant {variant} {why}" == said
    if why is not None:
        assert SPEC.default_config(problem, SM90)["variant"] not in ("core", "stream")


def test_core_wants_whole_copies() -> None:
    problem = linear_problem(16, 48, 1000)
    said = skinny_linear_rows.why_unfit("core", problem, SM90)
    assert "needs K to be a multiple of 16, got 1000" in str(said)
    assert skinny_linear_rows.why_unfit("stream", problem, SM90) is None
    assert not skinny_linear_rows.takes_product(16, 48, 1000, BF16, SM90)


@each_body
def test_why_unfit_elsewhere(base: Config) -> None:
    for dev in (device.sm_facts(80), device.sm_facts(100), device.ascend_facts()):
        problem, variant = linear_problem(16, 4096, 4096), base["variant"]
        assert f"got {dev.arch}" in str(skinny_linear_rows.why_unfit(variant, problem, dev))
        assert SPEC.default_config(problem, dev)["variant"] not in ("core", "stream")
        assert variant not in SPEC.space(dev)["variant"]
        assert not skinny_linear_rows.takes_product(16, 4096, 4096, BF16, dev)


@pytest.mark.parametrize(
    ("base", "changed", "why"),
    [
        (CORE, {"SWAP": True}, "variant core has SWAP False"),
        (CORE, {"BLOCK_K": 512}, "variant core has BLOCK_K of (64, 128, 256), got 512"),
        (CORE, {"num_warps": 2}, "variant core has num_warps of (4, 8, 16), got 2"),
        (CORE, {"SPLIT_K": 65}, "SPLIT_K must be 1 to 64, got 65"),
        (CORE, {"num_stages": 2}, "fit a core, which must have one"),
        (STREAM, {"AHEAD": True}, "variant stream has AHEAD False"),
        (STREAM, {"BLOCK_N": 48}, "variant stream has BLOCK_N of (64, 96, 128, 192, 256), got 48"),
        (STREAM, {"SPLIT_K": 0}, "SPLIT_K must be 1 to 64, got 0"),
        (STREAM, {"num_stages": 9}, "bytes of shared memory, more than 232448"),
    ],
)
def test_why_illegal(base: Config, changed: Config, why: str) -> None:
    problem = linear_problem(16, 4096, 4096)
    assert SPEC.why_illegal(base, problem, SM90) is None
    assert why in str(SPEC.why_illegal({**base, **changed}, problem, SM90))


def test_others_split_nothing() -> None:
    for problem in (linear_problem(4, 4096, 4096, residual=True), linear_problem(1, 4096, 4096)):
        config = {**SPEC.default_config(problem, SM90), "SPLIT_K": 2}
        assert "SPLIT_K" in str(SPEC.why_illegal(config, problem, SM90))


@pytest.mark.parametrize(
    ("sizes", "expected"),  # outputs of a tile, columns, parts of K
    [
        ((4, 4096, 4096), ("core", 32, 64, 1)),
        ((16, 4096, 12288), ("core", 32, 64, 1)),
        ((16, 2560, 9728), ("core", 32, 64, 3)),
        ((8, 6144, 2560), ("core", 16, 64, 1)),
        ((16, 6144, 2560), ("core", 32, 64, 1)),
        ((17, 19456, 2560), ("stream", 192, 256, 1)),
        ((64, 6144, 4096), ("stream", 64, 256, 1)),
        ((64, 2560, 9728), ("stream", 64, 256, 3)),
    ],
)
def test_how_the_default_divides_work(
    sizes: tuple[int, int, int], expected: tuple[Any, ...]
) -> None:
    chosen = SPEC.default_config(linear_problem(*sizes), SM90)
    assert tuple(chosen[x] for x in ("variant", "BLOCK_N", "BLOCK_K", "SPLIT_K")) == expected


@pytest.mark.parametrize("m", [2, 3, 8, 9, 16, 17, 33, 64])
@pytest.mark.parametrize("cores", [78, 114, 132])
def test_default_is_legal_on_every_card(m: int, cores: int) -> None:
    dev = dataclasses.replace(SM90, num_cores=cores)
    space = SPEC.space(dev)
    for n, k in (*LAYERS, (8, 16), (48, 64), (100, 100000)):
        problem = linear_problem(m, n, k)
        config = SPEC.default_config(problem, dev)
        assert config["variant"] == ("core" if m <= 16 else "stream")
        assert SPEC.why_illegal(config, problem, dev) is None
        assert all(value in space[name] for name, value in config.items()), config


def test_which_products_it_takes() -> None:
    """Those of layers; others have PyTorch's."""

    def taken(m: int, n: int, k: int, dtype: torch.dtype = BF16) -> bool:
        return skinny_linear_rows.takes_product(m, n, k, dtype, SM90)

    assert all(taken(m, n, k) for m in (2, 16, 64) for n, k in LAYERS)
    assert taken(16, 4096, 4096, FP16)
    assert not taken(1, 4096, 4096)
    assert not taken(65, 4096, 4096)
    assert not taken(16, 4096, 4096, torch.float32)
    assert not taken(16, 151936, 2560)  # 742 MiB
    assert not taken(16, 4096, 4092)
    for strides, fit in (((64, 64), True), ((72, 8), True), ((64, 0), False), ((65, 64), False)):
        assert skinny_linear_rows.is_aligned(64, *strides) is fit


def test_prompts_are_not_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """They have any number of rows; a decode step's have few, and are asked for again and again."""
    asked: list[int] = []
    monkeypatch.setattr(skinny_linear_rows, "_takes", lambda m, *_: asked.append(m) or True)
    weight = torch.empty(64, 64, dtype=BF16)
    for m in (2, 64, 65, 4096):
        taken = skinny_linear_rows.takes(torch.empty(m, 64, dtype=BF16), weight)
        assert taken is (m <= 64)
    assert asked == [2, 64]


def test_expanded_rows_go_to_no_tensor_map(dev: torch.device) -> None:
    inputs = linear_inputs(linear_problem(5, 32, 64), dev)
    for name in ("x", "weight"):
        rows = len(inputs[name])
        changed = {**inputs, name: inputs[name][:1].expand(rows, 64)}
        assert_right(SPEC, changed, tensors_of(SPEC.launch(**changed)))


# ---- what the compiler makes of it -------------------------------------------------------------

# In a process of its own: here Triton is an interpreter, there it must compile.
CHILD = """
import dataclasses, json, sys
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from tkernels import offline
from tkernels.ops.skinny_linear import SPEC
from tkernels.skinny_linear_facts import linear_inputs, linear_problem

found = []
for m, n, k, dtype, bias in json.loads(sys.stdin.read()):
    problem = linear_problem(m, n, k, getattr(torch, dtype), bias=bias)
    with FakeTensorMode(), offline.record_launches() as launches:
        SPEC.launch(**linear_inputs(problem, torch.device("cpu")))
    ptx = offline.compiled_cuda(launches[0], 90).asm["ptx"]
    found.append({
        **dataclasses.asdict(offline.compile_cuda(launches[0], 90)),
        "names": [x.fn.__name__ for x in launches], "parts": ptx.count("cp.async.ca"),
        "small": ptx.count("mma.sync"), "products": ptx.count("wgmma.mma_async")})
print(json.dumps(found))
"""

COMPILED: list[Any] = [  # rows, outputs, K, dtype, bias
    (8, 4096, 4096, "bfloat16", False),
    (16, 19456, 2560, "bfloat16", False),
    (16, 2560, 9728, "float16", True),
    (3, 1000, 1008, "float16", True),
    (64, 19456, 2560, "bfloat16", False),
    (40, 2560, 9728, "float16", True),
]


@pytest.mark.slow
def test_compiled_for_sm90() -> None:
    found = json.loads(lines_of(CHILD, given=json.dumps(COMPILED))[-1])
    assert len(found) == len(COMPILED)
    for (m, n, k, dtype, bias), got in zip(COMPILED, found, strict=True):
        problem = linear_problem(m, n, k, getattr(torch, dtype), bias=bias)
        config = SPEC.default_config(problem, SM90)
        assert got["spill_bytes"] == 0, got
        assert got["parts"] == 0, got  # copies are of 16 bytes
        kernel = {"core": "_integer_weights_core_kernel", "stream": "_masked_gemm_stream_kernel"}
        split = ["_add_rows_kernel"] if config["SPLIT_K"] > 1 else []
        assert got["names"] == [kernel[config["variant"]], *split], got
        assert (got["small"] > 0, got["products"] > 0) == (m <= 16, m > 16)


# ---- results, on the GPU -----------------------------------------------------------------------

gpu = pytest.mark.gpu
needs_sm90 = pytest.mark.skipif(
    device.current().arch != "sm90", reason="needs an sm90 GPU; this machine has none"
)
WAYS: dict[str, Config] = {
    "core": CORE,
    "core split": {**CORE, "SPLIT_K": 3},
    "core eight": {**CORE, "BLOCK_M": 8, "BLOCK_N": 16, "BLOCK_K": 64, "num_stages": 5},
    "core half": {**CORE, "BLOCK_N": 64, "num_stages": 8},
    "core deep": {**CORE, "BLOCK_K": 128, "num_stages": 4, "PDL": False},
    "stream": STREAM,
    "stream split": {**STREAM, "SPLIT_K": 3, "BLOCK_N": 64, "BLOCK_K": 128},
    "stream wide": {**STREAM, "BLOCK_N": 192, "num_stages": 3, "PDL": False},
}
each_way = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)


def test_ways_are_legal() -> None:
    for m, n, k in ((13, 1000, 6144), (11, 37, 6096), (16, 1000, 6144)):
        for name, way in WAYS.items():
            why = SPEC.why_illegal(way, linear_problem(m, n, k), SM90)
            assert why is None, (m, n, k, name, why)


def random_problems(seed: int, facts: device.Device) -> list[tuple[Problem, Config]]:
    """Eight of any shape, each with a config of either body that is legal there."""
    rng, found = random.Random(seed), []
    for i in range(8):
        variant = ("core", "stream")[i % 2]
        problem = linear_problem(
            rng.choice((2, 7, 8, 9, 16, 33) if variant == "core" else (2, 17, 33, 64, 65, 150)),
            rng.choice((1, 15, 17, 63, 200, 1000, 5000, 19456)),
            (16 if variant == "core" else 8) * rng.choice((1, 3, 8, 25, 64, 97, 256, 601)),
            rng.choice((BF16, FP16)),
            bias=rng.random() < 0.5,
        )
        draws = (random_config(rng, variant) for _ in range(20000))
        found.append((problem, next(c for c in draws if not SPEC.why_illegal(c, problem, facts))))
    return found


def random_config(rng: random.Random, variant: str) -> Config:
    drawn = {"SPLIT_K": rng.choice((1, 1, 2, 3, 8)), "PDL": rng.random() < 0.7}
    if variant == "stream":
        drawn |= {"BLOCK_N": rng.choice((64, 96, 128, 192, 256))}
        return {
            **STREAM, **drawn, "BLOCK_K": rng.choice((128, 256)), "num_stages": rng.randint(2, 9),
        }  # fmt: skip
    return {
        **CORE,
        **drawn,
        "BLOCK_M": rng.choice((8, 16, 16, 32)),
        "BLOCK_N": rng.choice((16, 32, 64)),
        "BLOCK_K": rng.choice((64, 128)),
        "programs_per_core": rng.choice((1, 1, 2, 8)),
        "num_warps": rng.choice((4, 8, 16)),
        "num_stages": rng.randint(2, 12),
    }


def test_random_problems_are_many() -> None:
    """What is drawn: rings that are refilled, several tiles a program, ends within steps."""
    refilled = several = odd = split = 0
    for problem, config in (each for seed in range(12) for each in random_problems(seed, SM90)):
        k = problem["k"]
        split += config["SPLIT_K"] > 1
        odd += k % 64 > 0 and problem["n"] % 64 > 0
        if config["variant"] == "core":
            sliced = integer_weights_few.with_slices(config)
            refilled += integer_weights_few.steps_of(sliced, k) > config["num_stages"]
            several += skinny_linear_rows.core_tiles(config, problem, SM90) > 1
    assert min(refilled, several, odd) >= 4
    assert split >= 20


@gpu
@needs_sm90
@pytest.mark.parametrize("seed", range(12))
def test_random_problems_and_configs(seed: int, dev: torch.device) -> None:
    products.are_right(SPEC, random_problems(seed, device.current()), dev)


@gpu
@needs_sm90
@each_way
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
def test_exact_sums_are_exact(way: Config, dtype: torch.dtype, dev: torch.device) -> None:
    """Bit for bit, from small integers: nothing is rounded, or left out."""
    m, n, k = 13, 1000, 6144
    generator = torch.Generator().manual_seed(1)
    x = torch.randint(-2, 3, (m, k), generator=generator).to(dtype).to(dev)
    weight = torch.randint(-3, 4, (n, k), generator=generator).to(dtype).to(dev)
    bias = torch.randint(-9, 10, (n,), generator=generator).to(dtype).to(dev)
    got = SPEC.launch(x, weight, bias=bias, config=way)
    assert torch.equal(got, tkernels.reference.skinny_linear(x, weight, bias=bias))


@gpu
@needs_sm90
@each_way
def test_what_is_beside_the_matrices_is_not_read(way: Config, dev: torch.device) -> None:
    """Views of wider matrices, NaN in the columns and rows that are no part of them."""
    inputs = linear_inputs(linear_problem(11, 37, 6096, bias=True), dev)  # ends within a step
    expected = SPEC.launch(**inputs, config=way)
    assert_right(SPEC, inputs, tensors_of(expected))
    amid = amid_others(inputs, expected)
    amid["weight"] = torch.full((40, 6136), math.nan, dtype=BF16, device=dev)[:37, :6096]
    amid["weight"].copy_(inputs["weight"])
    assert amid["weight"].stride(0) % 8 == amid["x"].stride(0) % 8 == 0
    SPEC.launch(**amid, config=way)
    assert torch.equal(amid["out"], expected)
    assert kept_beside(amid["out"])


@gpu
@needs_sm90
@pytest.mark.parametrize("m", [5, 64])
def test_arguments_at_any_address(m: int, dev: torch.device) -> None:
    inputs = linear_inputs(linear_problem(m, 4096, 1024, bias=True), dev)
    expected = SPEC.launch(**inputs)
    for name, kept in inputs.items():
        step = 2
        moved = torch.zeros(kept.numel() + step, dtype=kept.dtype, device=dev)[step:]
        changed = {**inputs, name: moved.view(kept.shape).copy_(kept)}
        assert changed[name].data_ptr() % 16
        assert_right(SPEC, changed, tensors_of(SPEC.launch(**changed)))
    for past in (0, 1, 0, 4):
        room = torch.full((m * 4096 + 8,), 5.0, dtype=BF16, device=dev)
        out = room[past : past + expected.numel()].view(expected.shape)
        assert_right(SPEC, inputs, tensors_of(SPEC.launch(**inputs, out=out)))
        assert bool((room[:past] == 5.0).all())
        assert bool((room[past + expected.numel() :] == 5.0).all())


@gpu
@needs_sm90
@each_way
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_bad_activations_spoil_their_row_alone(
    way: Config, value: float, dev: torch.device
) -> None:
    inputs = linear_inputs(linear_problem(13, 1000, 6144), dev)
    products.spoils_its_row_alone(SPEC, inputs, way, value)


@gpu
@needs_sm90
@each_way
def test_the_same_bits_again(way: Config, dev: torch.device) -> None:
    inputs = linear_inputs(linear_problem(16, 1000, 6144, bias=True), dev)
    products.has_the_same_bits_again(SPEC, inputs, way)


@gpu
@needs_sm90
@pytest.mark.parametrize("m", [2, 8, 16, 17, 64])
def test_layers(m: int, dev: torch.device) -> None:
    for n, k in (*LAYERS, (48, 64)):
        inputs = linear_inputs(linear_problem(m, n, k), dev)
        assert_right(SPEC, inputs, tensors_of(SPEC.launch(**inputs)))
