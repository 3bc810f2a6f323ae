"""The bodies of masked_gemm for int8 weights and 16-bit rows: refusals, defaults, what is compiled,
results.

Without a GPU they are compiled for sm_90.
"""

from __future__ import annotations

import dataclasses
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
    masked_gemm_w8a16,
)
from tkernels.masked_gemm_cases import gemm_inputs, gemm_problem
from tkernels.ops import masked_gemm as op
from tkernels.ops.masked_gemm import SPEC
from tkernels.registry import Config, Problem
from tkernels.testing import assert_right, tensors_of

SM90 = device.sm_facts(90)
BF16, FP16 = torch.bfloat16, torch.float16
WIDE: Config = {
    **masked_gemm_w8a16.FIXED,
    "BLOCK_M": 64,
    "SPLIT_K": 1,
    "PDL": True,
    "num_warps": 8,
    "num_stages": 6,
}
CORE: Config = {
    **masked_gemm_w8a16.OTHERS,
    "variant": "core",
    "BLOCK_M": 16,
    "BLOCK_N": 32,
    "BLOCK_K": 128,
    "SPLIT_K": 1,
    "programs_per_core": 1,
    "PDL": True,
    "num_warps": 8,
    "num_stages": 4,
}
each_body = pytest.mark.parametrize("base", [WIDE, CORE], ids=["wide", "core"])


def of_8_bits(m: int, n: int, k: int, dtype: torch.dtype = BF16, **more: Any) -> Problem:
    return gemm_problem(m, n, k, dtype, path="high", **more)


@each_body
@pytest.mark.parametrize(
    ("problem", "why"),
    [
        (of_8_bits(64, 48, 4096), None),
        (of_8_bits(1, 1, 16, FP16), None),
        (of_8_bits(64, 48, 4096, high_weight=True), "has int8 weights and rows that all run high"),
        (gemm_problem(64, 48, 4096), "rows that all run high, without a mask"),
        (gemm_problem(64, 48, 4096, path="masked"), "rows that all run high, without a mask"),
        (of_8_bits(64, 48, 40), "needs rows that divide by 16 bytes"),
        (of_8_bits(64, 48, 1 << 31), "columns, got 2147483648"),
    ],
)
def test_why_unfit(base: Config, problem: Problem, why: str | None) -> None:
    said = masked_gemm_w8a16.why_unfit(base["variant"], problem, SM90)
    assert said is None if why is None else why in str(said)


def test_only_wide_counts_outputs() -> None:
    many = of_8_bits(64, 1 << 23, 128)
    assert "4194304 outputs, got 8388608" in str(masked_gemm_w8a16.why_unfit("wide", many, SM90))
    assert masked_gemm_w8a16.why_unfit("core", many, SM90) is None


@each_body
def test_why_unfit_elsewhere(base: Config) -> None:
    for dev in (device.sm_facts(80), device.sm_facts(100), device.ascend_facts()):
        problem, variant = of_8_bits(64, 12288, 4096), base["variant"]
        assert f"got {dev.arch}" in str(masked_gemm_w8a16.why_unfit(variant, problem, dev))
        assert SPEC.default_config(problem, dev)["variant"] not in ("core", "wide")
        assert variant not in SPEC.space(dev)["variant"]
        assert 12 not in SPEC.space(dev).get("num_warps", [])


@pytest.mark.parametrize(
    ("base", "changed", "why"),
    [
        (WIDE, {"BLOCK_M": 24}, "BLOCK_M of 8, 16, 32, 64, 128, 256, got 24"),
        (WIDE, {"BLOCK_N": 128}, "variant wide has BLOCK_N 64"),
        (WIDE, {"BLOCK_K": 256}, "variant wide has BLOCK_K 128"),
        (WIDE, {"GROUP_M": 2}, "variant wide has GROUP_M 1"),
        (WIDE, {"SWAP": True}, "variant wide has SWAP False"),
        (WIDE, {"num_warps": 4}, "two or three groups of 4 warps, got 4 warps"),
        (WIDE, {"SPLIT_K": 33}, "SPLIT_K must be at most 32, a step each, got 33"),
        (WIDE, {"num_stages": 8}, "bytes of shared memory, more than 232448"),
        (CORE, {"GROUP_M": 2}, "variant core has GROUP_M 1"),
        (CORE, {"SWAP": True}, "variant core has SWAP False"),
        (CORE, {"BLOCK_K": 512}, "variant core has BLOCK_K of (64, 128, 256), got 512"),
        (CORE, {"num_stages": 1}, "num_stages must be 2 or more, got 1"),
        (CORE, {"BLOCK_N": 64, "num_warps": 12}, "SLICES of (1, 2, 4, 8), got 3"),
        (CORE, {"BLOCK_N": 16, "num_warps": 16}, "SLICES of (1, 2, 4, 8), got 16"),
        (CORE, {"BLOCK_K": 64, "num_stages": 2}, "fit a core, which must have one"),
    ],
)
def test_why_illegal(base: Config, changed: Config, why: str) -> None:
    problem = of_8_bits(8, 4096, 4096)
    assert SPEC.why_illegal(base, problem, SM90) is None
    assert why in str(SPEC.why_illegal({**base, **changed}, problem, SM90))


def test_other_bodies_have_no_twelve_warps() -> None:
    for path in ("int8", "masked"):
        for m in (1, 8, 16, 64, 128, 4096):
            problem = gemm_problem(m, 12288, 4096, path=path)
            config = {**SPEC.default_config(problem, SM90), "num_warps": 12}
            assert SPEC.why_illegal(config, problem, SM90) is not None


@pytest.mark.parametrize(
    ("sizes", "expected"),  # rows of a tile, parts of K, stages; columns of a slice, or warps
    [
        ((1, 12288, 4096), ("core", 8, 1, 6, 64)),
        ((16, 12288, 4096), ("core", 16, 1, 5, 64)),
        ((1, 4096, 4096), ("core", 8, 1, 7, 128)),
        ((16, 4096, 12288), ("core", 16, 1, 5, 128)),
        ((32, 4096, 4096), ("core", 32, 1, 7, 64)),
        ((17, 12288, 4096), ("wide", 32, 1, 8, 8)),
        ((64, 12288, 4096), ("wide", 64, 1, 6, 8)),
        ((128, 12288, 4096), ("wide", 64, 1, 5, 12)),
        ((256, 12288, 4096), ("wide", 128, 1, 3, 12)),
        ((4096, 12288, 4096), ("wide", 128, 1, 3, 12)),
        ((1024, 4096, 4096), ("wide", 256, 1, 2, 8)),
        ((64, 4096, 4096), ("wide", 64, 4, 6, 8)),
    ],
)
def test_how_the_default_divides_work(
    sizes: tuple[int, int, int], expected: tuple[Any, ...]
) -> None:
    problem = of_8_bits(*sizes)
    chosen = SPEC.default_config(problem, SM90)
    assert SPEC.why_illegal(chosen, problem, SM90) is None
    last = chosen["BLOCK_K"] if chosen["variant"] == "core" else chosen["num_warps"]
    found = (chosen["BLOCK_M"], chosen["SPLIT_K"], chosen["num_stages"], last)
    assert (chosen["variant"], *found) == expected


@pytest.mark.parametrize("m", [1, 9, 16, 32, 64, 100, 300, 2048, 100000])
@pytest.mark.parametrize(("n", "k"), [(12288, 4096), (4096, 12288), (40, 96), (151936, 1024)])
@pytest.mark.parametrize("cores", [78, 114, 132])
def test_default_is_legal_on_every_card(m: int, n: int, k: int, cores: int) -> None:
    dev = dataclasses.replace(SM90, num_cores=cores)
    config = SPEC.default_config(of_8_bits(m, n, k), dev)
    assert config["variant"] in (("core", "wide") if m <= 32 else ("wide",))
    assert SPEC.why_illegal(config, of_8_bits(m, n, k), dev) is None
    space = SPEC.space(dev)
    assert all(value in space[name] for name, value in config.items()), config


@pytest.fixture
def took(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Of a card that is there: the bodies that calls are sent to, instead of launches."""
    monkeypatch.setattr(device, "current", lambda: dataclasses.replace(SM90, compile_only=False))
    names: list[str] = []
    monkeypatch.setattr(op, "_bind", lambda *_, **__: lambda *_: names.append("portable"))
    bind = lambda *given: lambda *_: names.append(given[3]["variant"])  # noqa: E731
    monkeypatch.setattr(op, "_bind_w8a16", bind)
    return names


def call(problem: Problem, config: Config | None, **changed: torch.Tensor) -> None:
    """One whose arguments lie at multiples of 16 bytes, but for those that are given."""
    inputs = gemm_inputs(problem, torch.device("cpu"))
    given = {name: inputs[name] for name in ("x", "weight", "weight_scale")}
    given["out"] = torch.empty(problem["m"], problem["n"], dtype=problem["dtype"])
    given = dict(next(at_addresses(given))[1]) | changed
    run = op._plan(*given.values(), "", True, config=config)
    assert run is not None
    run(*given.values(), *([None] * 6))


@each_body
def test_odd_addresses_have_the_portable_body(base: Config, took: list[str]) -> None:
    """Weights are copied 16 bytes at a time, and by "core" x is; by "wide" it is copied before."""
    problem = of_8_bits(5, 40, 1024)
    inputs = gemm_inputs(problem, torch.device("cpu"))
    given = {name: inputs[name] for name in ("x", "weight", "weight_scale")}
    given["out"] = torch.empty(5, 40, dtype=BF16)
    portable = ("x", "weight") if base["variant"] == "core" else ("weight",)
    for name, changed in at_addresses(given):
        call(problem, base, **changed)
        assert took.pop() == ("portable" if name in portable else base["variant"]), name


def test_strides_that_no_tensor_map_has(took: list[str]) -> None:
    """One row for all, and rows that start between multiples of 16 bytes, are not aligned."""
    problem = of_8_bits(5, 40, 1024)
    inputs = gemm_inputs(problem, torch.device("cpu"))
    weight, x = inputs["weight"], inputs["x"]
    wider = torch.zeros(40, 1056, dtype=torch.int8)
    for changed in ({}, {"weight": wider[:, :1024]}):
        call(problem, WIDE, **changed)
        assert took.pop() == "wide"
    for changed in (
        {"weight": weight[:1].expand(40, 1024)},
        {"weight": wider.as_strided((40, 1024), (1048, 1))},
        {"x": x[:1].expand(5, 1024)},
    ):
        with pytest.raises(ValueError, match="needs rows that divide by 16 bytes"):
            call(problem, WIDE, **changed)
        call(problem, None, **changed)
        assert took.pop() == "portable"


@pytest.mark.parametrize("high_weight", [False, True])
def test_rows_that_are_one_row_go_to_no_tensor_map(high_weight: bool, dev: torch.device) -> None:
    """Expanded weights, x and codes, on every path: a stride of 0 is no multiple of 16 bytes."""
    for path in ("int8", "high", "masked"):
        problem = gemm_problem(5, 32, 64, path=path, high_weight=high_weight)
        inputs = gemm_inputs(problem, dev)
        for name in ("x", "weight", "x_q", "high_weight"):
            if name in inputs:
                rows = len(inputs[name])
                changed = {**inputs, name: inputs[name][:1].expand(rows, 64)}
                assert_right(SPEC, changed, tensors_of(SPEC.launch(**changed)))


def test_bytes_become_bf16() -> None:
    """What the PTX says, in exact arithmetic, of every pair of bytes."""
    text = integer_decoding._bytes_in_bf16()
    halves = torch.arange(1 << 16)
    assert "shr.u32 t, $2, 8;" in text  # what comes from the other half is masked
    values = {"$2": halves, "t": halves >> 8}

    def numbers(bits: torch.Tensor) -> torch.Tensor:
        return bits.to(torch.int16).view(BF16).double()

    factor, less = (
        numbers(torch.tensor(int(found[1], 16) & 0xFFFF))
        for name in "sl"
        if (found := re.search(rf"mov\.b32 {name}, 0x(\w{{8}});", text))
    )
    steps = re.findall(
        r"lop3\.b32 \$(\d), (\S+), 0x(\w{8}), 0x(\w{8}), 0x28;"
        r"fma\.rn\.bf16x2 \$\1, \$\1, s, l;",
        text,
    )
    assert [int(step[0]) for step in steps] == [0, 1]
    for i, (_, source, flipped, mask) in enumerate(steps):
        bits = (values[source] ^ (int(flipped, 16) & 0xFFFF)) & (int(mask, 16) & 0xFFFF)
        got = numbers(bits) * factor + less
        expected = (halves >> 8 * i & 255).to(torch.int8).double()
        assert torch.equal(got * 64, expected)
        assert torch.equal(got.to(BF16).double(), got)  # nothing is rounded


def test_bytes_become_fp16() -> None:
    text = integer_decoding._bytes_in_fp16()
    halves = torch.arange(1 << 16)
    word = (halves ^ 0x8080) | halves.flip(0) << 16  # what stands in the other half is another's
    e, less = (
        int(found[1], 16)
        for name in "el"
        if (found := re.search(rf"mov\.b32 {name}, 0x(\w{{8}});", text))
    )
    assert "xor.b32 t, $2, 0x80808080;" in text
    steps = re.findall(r"prmt\.b32 \$(\d), t, e, 0x(\w{4}); add\.rn\.f16x2 \$\1, \$\1, l;", text)
    assert [int(step[0]) for step in steps] == [0, 1]
    for i, (_, places) in enumerate(steps):
        result = torch.zeros_like(word)
        for at in range(2):  # the low number of the pair
            which = int(places, 16) >> 4 * at & 15
            byte = word >> 8 * which if which < 4 else torch.full_like(word, e >> 8 * (which - 4))
            result |= (byte & 255) << 8 * at
        number = result.to(torch.int16).view(FP16).double()
        subtracted = torch.tensor(less & 0xFFFF).to(torch.int16).view(FP16).double()
        assert torch.equal(number + subtracted, (halves >> 8 * i & 255).to(torch.int8).double())
        assert int(places, 16) >> 8 == (int(places, 16) & 0xFF) + 0x02  # the high one: two further


# ---- what the compiler makes of it -------------------------------------------------------------

# In a process of its own: here Triton is an interpreter, there it must compile.
CHILD = """
import dataclasses, json, sys
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from tkernels import device, offline
from tkernels.masked_gemm_cases import gemm_inputs, gemm_problem
from tkernels.ops.masked_gemm import SPEC

found = []
for m, n, k, dtype, bias, config in json.loads(sys.stdin.read()):
    problem = gemm_problem(m, n, k, getattr(torch, dtype), path="high", bias=bias)
    with FakeTensorMode(), offline.record_launches() as launches:
        SPEC.launch(**gemm_inputs(problem, torch.device("cpu")), config=config)
    [launch] = [x for x in launches if x.fn.__name__.startswith("_integer_weights")]
    ptx = offline.compiled_cuda(launch, 90).asm["ptx"]
    found.append({
        **dataclasses.asdict(offline.compile_cuda(launch, 90)),
        "names": [x.fn.__name__ for x in launches],
        "products": ptx.count("wgmma.mma_async"), "small": ptx.count("mma.sync"),
        "parts": ptx.count("cp.async.ca")})
print(json.dumps(found))
"""

COMPILED: list[Any] = [  # rows, outputs, K, dtype, bias, config
    (1, 12288, 4096, "bfloat16", False, None),
    (16, 12288, 4096, "bfloat16", False, None),
    (12, 2048, 4000, "float16", True, {**CORE, "SPLIT_K": 2}),
    (32, 4096, 4096, "float16", False, None),
    (64, 12288, 4096, "bfloat16", False, None),
    (256, 12288, 4096, "float16", True, None),
    (1024, 4096, 4096, "bfloat16", False, None),
    (64, 4096, 4000, "bfloat16", True, {**WIDE, "SPLIT_K": 4}),
]


@pytest.mark.slow
def test_compiled_for_sm90() -> None:
    found = json.loads(lines_of(CHILD, given=json.dumps(COMPILED))[-1])
    assert len(found) == len(COMPILED)
    for (m, n, k, dtype, bias, given), got in zip(COMPILED, found, strict=True):
        problem = of_8_bits(m, n, k, getattr(torch, dtype), bias=bias)
        config = given or SPEC.default_config(problem, SM90)
        assert SPEC.why_illegal(config, problem, SM90) is None
        assert got["spill_bytes"] == 0, got
        assert got["parts"] == 0, got  # copies are of 16 bytes
        split = ["_add_rows_kernel"] if config["SPLIT_K"] > 1 else []
        if config["variant"] == "wide":
            assert got["names"] == ["_turn_kernel", "_integer_weights_kernel", *split]
            # Eight products a step of each group.
            assert got["products"] == 2 * config["num_warps"], got
            assert got["small"] == 0
            used = integer_weights_many.shared_bytes(config, 8)
        else:
            assert got["names"] == ["_integer_weights_core_kernel", *split]
            assert got["products"] == 0
            assert got["small"] > 0
            core = integer_weights_few.with_slices(config)
            as_core = masked_gemm_w8a16._as_core(problem)
            used = integer_weights_few.shared_bytes(core, as_core, SM90, 8)
            assert 2 * got["shared_bytes"] > SM90.local_mem_bytes  # a core has one
        assert got["shared_bytes"] <= used <= SM90.local_mem_bytes, got


# ---- results, on the GPU -----------------------------------------------------------------------

gpu = pytest.mark.gpu
needs_sm90 = pytest.mark.skipif(
    device.current().arch != "sm90", reason="needs an sm90 GPU; this machine has none"
)
WAYS: dict[str, Config] = {
    "wide": WIDE,
    "wide split": {**WIDE, "SPLIT_K": 3, "num_stages": 4},
    "wide three": {**WIDE, "num_warps": 12, "num_stages": 5},
    "wide eight rows": {**WIDE, "BLOCK_M": 8, "num_stages": 2},
    "wide most rows": {**WIDE, "BLOCK_M": 256, "num_stages": 2, "PDL": False},
    "core": {**CORE, "BLOCK_K": 64, "num_stages": 8},
    "core split": {**CORE, "BLOCK_K": 64, "SPLIT_K": 3, "num_stages": 9},
    "core eight": {**CORE, "BLOCK_M": 8, "BLOCK_N": 16, "BLOCK_K": 64, "num_stages": 8},
    "core one slice": {
        **CORE, "BLOCK_N": 64, "BLOCK_K": 128, "num_warps": 4, "num_stages": 14,
    },
    "core wide": {**CORE, "BLOCK_M": 32, "BLOCK_K": 64, "num_stages": 7},
}  # fmt: skip
each_way = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)


def test_ways_are_legal() -> None:
    """On the problems below, and their rings are refilled."""
    for m, n, k in ((13, 1000, 8704), (13, 1000, 9088), (11, 37, 9360), (16, 1000, 6144)):
        for way in WAYS.values():
            why = SPEC.why_illegal(way, of_8_bits(m, n, k), SM90)
            assert why is None, (m, n, k, way, why)
            slices = integer_weights_few.with_slices(way)["SLICES"] if "core" in way.values() else 1
            step = way["BLOCK_K"] * slices
            assert k < 8000 or -(-k // (step * way["SPLIT_K"])) > way["num_stages"], (k, way)


def random_problems(seed: int, facts: device.Device) -> list[tuple[Problem, Config]]:
    """Eight of any shape, each with a config of either body that is legal there."""
    rng, found = random.Random(seed), []
    for i in range(8):
        variant = ("core", "wide")[i % 2]
        rows = (1, 2, 7, 8, 9, 16, 17, 33) if variant == "core" else (1, 9, 33, 65, 130, 300, 700)
        problem = of_8_bits(
            rng.choice(rows),
            rng.choice((1, 15, 17, 63, 200, 1000, 5000, 12288)),
            16 * rng.choice((1, 3, 8, 25, 64, 97, 256, 601)),
            rng.choice((BF16, FP16)),
            bias=rng.random() < 0.5,
        )
        draws = (random_config(rng, variant) for _ in range(20000))
        found.append((problem, next(c for c in draws if not SPEC.why_illegal(c, problem, facts))))
    return found


def random_config(rng: random.Random, variant: str) -> Config:
    drawn = {"SPLIT_K": rng.choice((1, 1, 2, 3, 8)), "PDL": rng.random() < 0.7}
    if variant == "wide":
        rows, warps = rng.choice((8, 16, 32, 64, 128, 256)), rng.choice((8, 12))
        stages = rng.randint(2, 8)
        return {**WIDE, **drawn, "BLOCK_M": rows, "num_warps": warps, "num_stages": stages}
    return {
        **CORE,
        **drawn,
        "BLOCK_M": rng.choice((8, 16, 16, 32, 64)),
        "BLOCK_N": rng.choice((16, 32, 64)),
        "BLOCK_K": rng.choice((64, 128, 256)),
        "programs_per_core": rng.choice((1, 1, 2, 8)),
        "num_warps": rng.choice((4, 8, 16)),
        "num_stages": rng.randint(2, 16),
    }


def test_random_problems_are_many() -> None:
    """What is drawn: rings that are refilled, several tiles a program, ends within steps."""
    refilled = several = odd = split = tiles_of_one = 0
    for problem, config in (each for seed in range(12) for each in random_problems(seed, SM90)):
        m, n, k = (problem[name] for name in "mnk")
        split += config["SPLIT_K"] > 1
        odd += k % 128 > 0 and n % 64 > 0
        if config["variant"] == "wide":
            tiles = -(-m // config["BLOCK_M"]) * -(-n // (16 * config["num_warps"]))
            several += tiles * config["SPLIT_K"] > SM90.num_cores
        else:
            core = integer_weights_few.with_slices(config)
            refilled += integer_weights_few.steps_of(core, k) > config["num_stages"]
            programs = config["programs_per_core"] * SM90.num_cores
            tiles_of_one += integer_weights_few.tiles_of(core, m, n, programs) > 1
    assert min(refilled, several, odd, tiles_of_one) >= 4
    assert split >= 20


@gpu
@needs_sm90
@pytest.mark.parametrize("seed", range(12))
def test_random_problems_and_configs(seed: int, dev: torch.device) -> None:
    products.are_right(SPEC, random_problems(seed, device.current()), dev)


@gpu
@needs_sm90
@each_way
@pytest.mark.parametrize("k", [8704, 9088])  # even and odd steps, more than stages
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
def test_exact_sums_are_exact(way: Config, k: int, dtype: torch.dtype, dev: torch.device) -> None:
    """Bit for bit, from small integers and powers of two: nothing is rounded, or left out."""
    inputs = gemm_inputs(of_8_bits(13, 1000, k, dtype), dev)
    generator = torch.Generator().manual_seed(1)
    inputs["x"] = torch.randint(-2, 3, (13, k), generator=generator).to(dtype).to(dev)
    weight = torch.randint(-128, 128, (1000, k), generator=generator)
    inputs["weight"] = weight.to(torch.int8).to(dev)  # -128 too
    inputs["weight_scale"] = torch.exp2(torch.randint(-9, 1, (1000,), generator=generator).float())
    inputs["weight_scale"] = inputs["weight_scale"].to(dev)
    got = SPEC.launch(**inputs, config=way)
    assert torch.equal(got, tkernels.reference.masked_gemm(**inputs))


@gpu
@needs_sm90
@each_way
def test_what_is_beside_the_matrices_is_not_read(way: Config, dev: torch.device) -> None:
    """Views of wider matrices, NaN in the columns and rows that are no part of them."""
    inputs = gemm_inputs(of_8_bits(11, 37, 9360, bias=True), dev)  # ends within a step
    expected = SPEC.launch(**inputs, config=way)
    assert_right(SPEC, inputs, tensors_of(expected))
    amid = amid_others(inputs, expected)
    # Rows of the wider ones start at multiples of 16 bytes too.
    assert amid["weight"].stride(0) % 16 == 8
    amid["weight"] = torch.full((40, 9392), 99, dtype=torch.int8, device=dev)[:37, :9360]
    amid["weight"].copy_(inputs["weight"])
    SPEC.launch(**amid, config=way)
    assert torch.equal(amid["out"], expected)
    assert kept_beside(amid["out"])


@gpu
@needs_sm90
@pytest.mark.parametrize("m", [5, 64])
def test_out_at_any_address(m: int, dev: torch.device) -> None:
    """Also of a plan whose first out was at a multiple of 16 bytes, and stored as such."""
    inputs = gemm_inputs(of_8_bits(m, 12288, 128), dev)
    expected = SPEC.launch(**inputs)
    for past in (0, 1, 0, 1, 4, 4):
        room = torch.full((m * 12288 + 8,), 5.0, dtype=BF16, device=dev)
        out = room[past : past + expected.numel()].view(expected.shape)
        SPEC.launch(**inputs, out=out)
        assert torch.equal(out, expected), past
        assert bool((room[:past] == 5.0).all())
        assert bool((room[past + expected.numel() :] == 5.0).all())


@gpu
@needs_sm90
@pytest.mark.parametrize("m", [5, 64])
def test_arguments_at_any_address(m: int, dev: torch.device) -> None:
    inputs = gemm_inputs(of_8_bits(m, 40, 1024, bias=True), dev)
    for name, kept in inputs.items():
        if not isinstance(kept, torch.Tensor):
            continue
        step = max(1, 4 // kept.element_size())
        moved = torch.zeros(kept.numel() + step, dtype=kept.dtype, device=dev)[step:]
        changed = {**inputs, name: moved.view(kept.shape).copy_(kept)}
        assert changed[name].data_ptr() % 16
        assert_right(SPEC, changed, tensors_of(SPEC.launch(**changed)))


@gpu
@needs_sm90
@each_way
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_bad_activations_spoil_their_row_alone(
    way: Config, value: float, dev: torch.device
) -> None:
    inputs = gemm_inputs(of_8_bits(13, 1000, 8704), dev)
    products.spoils_its_row_alone(SPEC, inputs, way, value)


@gpu
@needs_sm90
@each_way
def test_the_same_bits_again(way: Config, dev: torch.device) -> None:
    inputs = gemm_inputs(of_8_bits(16, 1000, 6144, bias=True), dev)
    products.has_the_same_bits_again(SPEC, inputs, way)


@gpu
@needs_sm90
@pytest.mark.parametrize("m", [1, 8, 16, 32, 64, 256, 1000, 4096])
@pytest.mark.parametrize(
    ("n", "k"), [(12288, 4096), (4096, 12288), (1024, 3072), (48, 128), (151936, 1024)]
)
def test_large_ones(m: int, n: int, k: int, dev: torch.device) -> None:
    """The default; and all rows of a mask, in bodies that add in another order."""
    inputs = gemm_inputs(of_8_bits(m, n, k), dev)
    got = SPEC.launch(**inputs)
    assert_right(SPEC, inputs, tensors_of(got))
    mask = torch.full((1,), -1, dtype=torch.int64, device=dev)
    masked = {**inputs, "high": False, "mask": mask}
    assert_right(SPEC, masked, tensors_of(SPEC.launch(**masked)))
