"""The body of w4a16_gemm for few rows: refusals, how it divides work, what is compiled, results.

Without a GPU it is compiled for sm_90.
"""

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
from tkernels import device, integer_decoding, integer_weights_few, w4a16_gemm_core
from tkernels.ops import w4a16_gemm as op
from tkernels.ops.w4a16_gemm import SPEC
from tkernels.registry import Config, Problem
from tkernels.testing import assert_right, tensors_of
from tkernels.w4_format import pack_nibbles
from tkernels.w4a16_cases import w4_inputs, w4_problem

SM90 = device.sm_facts(90)
BF16, FP16 = torch.bfloat16, torch.float16
BASE: Config = {
    "variant": "core",
    "BLOCK_M": 16,
    "BLOCK_N": 32,
    "BLOCK_K": 128,
    "SPLIT_K": 1,
    "SLICES": 4,
    "programs_per_core": 1,
    "PDL": True,
    "num_warps": 8,
    "num_stages": 6,
}


@pytest.mark.parametrize(
    ("problem", "why"),
    [
        (w4_problem(16, 48, 4096), None),
        (w4_problem(5, 48, 4096, group=32), "variant core has groups of 64 or more, got 32"),
        (w4_problem(5, 48, 200, group=200), "variant core needs K to be a multiple of 32, got 200"),
        (w4_problem(5, 48, 1 << 31), "variant core has up to 1073741824 columns, got 2147483648"),
    ],
)
def test_why_unfit(problem: Problem, why: str | None) -> None:
    said = w4a16_gemm_core.why_unfit(problem, SM90)
    assert said is None if why is None else why in str(said)


def test_why_unfit_elsewhere() -> None:
    for dev in (device.sm_facts(80), device.sm_facts(100), device.ascend_facts()):
        problem = w4_problem(16, 12288, 4096)
        assert f"got {dev.arch}" in str(w4a16_gemm_core.why_unfit(problem, dev))
        assert SPEC.default_config(problem, dev)["variant"] != "core"
        assert "core" not in SPEC.space(dev)["variant"]


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"BLOCK_M": 128}, "BLOCK_M of (8, 16, 32, 64), got 128"),
        ({"BLOCK_N": 128}, "BLOCK_N of (16, 32, 64), got 128"),
        ({"BLOCK_K": 512}, "BLOCK_K of (64, 128, 256), got 512"),
        ({"SLICES": 3}, "SLICES of (1, 2, 4, 8), got 3"),
        ({"programs_per_core": 0}, "programs_per_core of (1, 2, 3, 4, 6, 8, 16, 32), got 0"),
        ({"num_warps": 2}, "num_warps of (4, 8, 16), got 2"),
        ({"SPLIT_K": 65}, "SPLIT_K must be 1 to 64, got 65"),
        ({"num_stages": 1}, "num_stages must be 2 or more, got 1"),
        ({"SLICES": 2}, "16 to 64 outputs of a tile, got 8"),
        ({"BLOCK_N": 64, "SLICES": 8, "num_warps": 4}, "16 to 64 outputs of a tile, got 128"),
        ({"BLOCK_K": 256, "SLICES": 8}, "a step has 128 to 1024 columns, got 2048"),
        ({"BLOCK_K": 64, "SLICES": 1, "BLOCK_N": 64, "num_warps": 4}, "got 64"),
        ({"BLOCK_N": 16, "SLICES": 8, "BLOCK_K": 64, "SPLIT_K": 2}, "at most 6 tiles, got 12"),
        ({"num_stages": 6}, "bytes of shared memory, more than 232448"),
        ({"num_stages": 2}, "of shared memory fit a core, which must have one"),
        ({"BLOCK_N": 16, "num_warps": 4, "BLOCK_K": 256, "SLICES": 4, "num_stages": 2}, "too few"),
        ({"BLOCK_N": 64, "SPLIT_K": 3, "BLOCK_K": 64, "num_stages": 4}, "too few for 5 tiles"),
    ],
)
def test_why_illegal(changed: Config, why: str) -> None:
    problem = w4_problem(16, 12288, 4096)
    base = {**BASE, "num_stages": 5}
    assert SPEC.why_illegal(base, problem, SM90) is None
    assert why in str(SPEC.why_illegal({**base, **changed}, problem, SM90))


@pytest.mark.parametrize(
    ("sizes", "expected"),  # parts of K, programs of a core in turn, tiles, steps, stages
    [
        ((16, 12288, 4096), (1, 1, 3, 8, 5)),
        ((1, 12288, 4096), (1, 1, 3, 8, 6)),
        ((8, 4096, 12288), (1, 1, 1, 24, 8)),
        ((16, 4096, 4096), (1, 1, 1, 8, 8)),
        ((16, 24576, 4096), (1, 2, 3, 8, 5)),
        ((8, 24576, 4096), (1, 2, 3, 8, 6)),
        ((16, 1024, 4096), (4, 1, 1, 2, 8)),
        ((32, 12288, 4096), (1, 1, 3, 16, 7)),
        ((1, 151936, 1024), (1, 16, 3, 2, 7)),
        ((16, 48, 128), (1, 1, 1, 1, 8)),
    ],
)
def test_how_the_default_divides_work(
    sizes: tuple[int, int, int], expected: tuple[int, ...]
) -> None:
    problem = w4_problem(*sizes)
    chosen = SPEC.default_config(problem, SM90)
    assert SPEC.why_illegal(chosen, problem, SM90) is None
    (m, n, k), in_turn = sizes, chosen["programs_per_core"]
    found = (
        chosen["SPLIT_K"],
        in_turn,
        integer_weights_few.tiles_of(chosen, m, n, in_turn * SM90.num_cores),
        integer_weights_few.steps_of(chosen, k),
        chosen["num_stages"],
    )
    assert (chosen["variant"], *found) == ("core", *expected)


def test_more_rows_have_another_body() -> None:
    assert SPEC.default_config(w4_problem(33, 12288, 4096), SM90)["variant"] == "wide"


@pytest.mark.parametrize("m", [1, 9, 16, 32, 64])
@pytest.mark.parametrize(("n", "k"), [(12288, 4096), (4096, 12288), (2048, 2048), (40, 96)])
@pytest.mark.parametrize("cores", [78, 114, 132])
def test_default_is_legal_on_every_card(m: int, n: int, k: int, cores: int) -> None:
    """And programs have a core each: of two on one, both take twice as long."""
    dev = dataclasses.replace(SM90, num_cores=cores)
    for group, zero in ((128, False), (64, True), (k, True)):
        if k % group:
            continue
        scale = torch.float32 if zero else None
        problem = w4_problem(m, n, k, group=group, zero=zero, scale=scale)
        config = w4a16_gemm_core.default_config(problem, dev)
        assert w4a16_gemm_core.why_illegal(config, problem, dev) is None
        assert 2 * w4a16_gemm_core.shared_bytes(config, problem, dev) > dev.local_mem_bytes
        programs = config["programs_per_core"] * cores
        tiles = integer_weights_few.tiles_of(config, m, n, programs)
        rows = -(-m // config["BLOCK_M"])
        assert rows * -(-n // (tiles * config["BLOCK_N"])) * config["SPLIT_K"] <= programs
        columns = integer_weights_few.steps_of(config, k) * config["BLOCK_K"] * config["SLICES"]
        assert columns * config["SPLIT_K"] >= k


def test_odd_addresses_have_the_portable_body(monkeypatch: pytest.MonkeyPatch) -> None:
    """x and weights are copied 16 bytes at a time; scales are not."""
    monkeypatch.setattr(device, "current", lambda: dataclasses.replace(SM90, compile_only=False))
    took = []
    for body, binds in (("core", "_bind_hopper"), ("portable", "_bind_portable")):
        bound = functools.partial(lambda body, *_: lambda *_: took.append(body), body)
        monkeypatch.setattr(op, binds, bound)
    inputs = w4_inputs(w4_problem(5, 40, 1024), torch.device("cpu"))
    given = {name: inputs[name] for name in ("x", "weight", "weight_scale")}
    given["out"] = torch.empty(5, 40, dtype=BF16)
    for name, changed in at_addresses(given):
        run = op._plan(*changed.values(), False, False, config=BASE)
        assert run is not None
        run(*changed.values(), None, None)
        assert took.pop() == ("portable" if name in ("x", "weight") else "core"), name


@pytest.mark.parametrize("zero", [None, 0, 3, 15, 99])
def test_codes_become_bf16(zero: int | None) -> None:
    """What the PTX says, in exact arithmetic, of every half of a word."""
    text = integer_decoding._in_bf16(zero is not None)
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


def _run_ptx(text: str, word: int, less: int) -> list[list[float]]:
    """What these few instructions of PTX make of a word: four pairs of numbers."""
    value = {"$4": word, "$5": less}

    def read(name: str) -> int:
        return value[name] if name in value else int(name, 0)

    def halves(bits: int) -> torch.Tensor:
        pair = torch.tensor([bits & 0xFFFF, bits >> 16], dtype=torch.int32)
        return pair.to(torch.int16).view(FP16).double()

    def bits_of(pair: torch.Tensor) -> int:
        low, high = (int(v) & 0xFFFF for v in pair.to(FP16).view(torch.int16))
        return low | high << 16

    for line in text[text.index(";") + 1 : -1].strip(";").split(";"):
        name, to, *operands = re.split(r"[ ,]+", line.strip())
        given = [read(o) for o in operands]
        if name == "mov.b32":
            value[to] = given[0]
        elif name == "shr.u32":
            value[to] = given[0] >> given[1]
        elif name == "lop3.b32":
            assert given[3] == 0xEA  # a & b | c
            value[to] = given[0] & given[1] | given[2]
        elif name == "add.rn.f16x2":
            value[to] = bits_of(halves(given[0]) + halves(given[1]))
        elif name == "fma.rn.f16x2":
            value[to] = bits_of(halves(given[0]) * halves(given[1]) + halves(given[2]))
        else:
            raise AssertionError(name)
    return [halves(value[f"${i}"]).tolist() for i in range(4)]


@pytest.mark.parametrize("has_zero", [False, True])
def test_codes_become_fp16(has_zero: bool) -> None:
    """Pairs of numbers of a word, by the instructions one after the other."""
    text = integer_decoding._in_fp16(has_zero)
    rng = random.Random(0)
    for zero in range(16) if has_zero else [8]:
        one = torch.tensor(-1024.0 - zero, dtype=FP16)
        less = (int(one.view(torch.int16)) & 0xFFFF) * 0x10001
        for _ in range(32):
            word = rng.getrandbits(32)
            q = [word >> 4 * j & 15 for j in range(8)]
            expected = [[float(q[i] - zero), float(q[4 + i] - zero)] for i in range(4)]
            assert _run_ptx(text, word, less) == expected


def test_products_of_every_fourth_column_add_up() -> None:
    """Code i of the two halves of a word, in their order, meets columns 4h + i of x."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randint(0, 16, (5, 96), generator=generator)
    x = torch.randint(-4, 5, (3, 96), generator=generator)
    halves = pack_nibbles(q).view(torch.int16).long()
    total = sum(x[:, i::4] @ ((halves >> 4 * i) & 15).t() for i in range(4))
    assert torch.equal(torch.as_tensor(total), x @ q.t())


# ---- what the compiler makes of it -------------------------------------------------------------

# In a process of its own: here Triton is an interpreter, there it must compile.
CHILD = """
import dataclasses, json, sys
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from tkernels import device, offline
from tkernels.ops.w4a16_gemm import SPEC
from tkernels.w4a16_cases import w4_problem

base, cases = json.loads(sys.stdin.read())
found = []
for m, n, k, dtype, more, changed in cases:
    problem = w4_problem(m, n, k, getattr(torch, dtype), **more)
    with FakeTensorMode(), offline.record_launches() as launches:
        SPEC.launch(
            **SPEC.make_inputs(problem, torch.device("cpu")), config={**base, **changed})
    ptx = offline.compiled_cuda(launches[0], 90).asm["ptx"]
    got = dataclasses.asdict(offline.compile_cuda(launches[0], 90))
    found.append({
        **got, "case": [m, n, k, dtype, more, changed], "names": [x.fn.__name__ for x in launches],
        "products": ptx.count("mma.sync"),
        "whole": ptx.count("cp.async.cg.shared.global"), "parts": ptx.count("cp.async.ca")})
print(json.dumps(found))
"""

COMPILED: list[Any] = [  # rows, outputs, K, dtype, of the problem, of the config
    (16, 12288, 4096, "bfloat16", {}, {"num_stages": 5}),  # a default
    (16, 12288, 4096, "bfloat16", {}, {"BLOCK_K": 64, "SLICES": 8, "num_stages": 5}),
    (12, 12288, 4096, "float16", {"zero": True, "bias": True}, {"num_stages": 4}),
    (8, 12288, 4096, "bfloat16", {"group": 64}, {"BLOCK_M": 8, "num_stages": 6}),
    (16, 12000, 4064, "bfloat16", {"group": 4064, "zero": True}, {"num_stages": 4}),
    (
        32,
        4096,
        12288,
        "bfloat16",
        {},
        {"BLOCK_M": 32, "BLOCK_K": 64, "SPLIT_K": 3, "num_stages": 7},
    ),
    (7, 40, 32, "float16", {"group": 32}, {"BLOCK_M": 8, "num_stages": 8}),
]


@pytest.mark.slow
def test_compiled_for_sm90() -> None:
    for case in COMPILED:
        problem = w4_problem(*case[:3], getattr(torch, case[3]), **case[4])
        assert SPEC.why_illegal({**BASE, **case[5]}, problem, SM90) is None, case
    found = json.loads(lines_of(CHILD, given=json.dumps([BASE, COMPILED]))[-1])
    assert len(found) == len(COMPILED)
    for case in found:
        changed = {**BASE, **case["case"][5]}
        m, n, k, *_ = case["case"]
        split = ["_add_rows_kernel"] if changed["SPLIT_K"] > 1 else []
        assert case["names"] == ["_integer_weights_core_kernel", *split], case
        assert case["spill_bytes"] <= 16, case  # numbers put away ahead of the loop
        assert 2 * case["shared_bytes"] > SM90.local_mem_bytes, case  # a core has one
        # Two steps are in the program, one behind the other, where there are two.
        rows, columns, slices = changed["BLOCK_M"], changed["BLOCK_K"], changed["SLICES"]
        tiles = integer_weights_few.tiles_of(changed, m, n, SM90.num_cores)
        steps = integer_weights_few.steps_of(changed, k)
        outputs = tiles * changed["BLOCK_N"] * slices // changed["num_warps"]
        products = outputs * rows * columns // (16 * 8 * 16)
        assert case["products"] == (2 - steps % 2) * products, case
        # Copies of 16 bytes alone: of the stages that are there, and once in the loop, each step.
        step = slices * columns
        copies = tiles * changed["BLOCK_N"] * step // 2 + rows * step * 2
        refilled = (2 - steps % 2) if changed["num_stages"] < steps else 0
        asked = min(changed["num_stages"], steps) + refilled
        assert case["whole"] == asked * copies // (16 * 32 * changed["num_warps"]), case
        assert case["parts"] == 0, case


# ---- results, on the GPU -----------------------------------------------------------------------

gpu = pytest.mark.gpu
needs_sm90 = pytest.mark.skipif(
    device.current().arch != "sm90", reason="needs an sm90 GPU; this machine has none"
)
WAYS: dict[str, Config] = {
    "plain": {},
    "split": {"BLOCK_K": 64, "SLICES": 8, "SPLIT_K": 3, "num_stages": 5},
    "eight": {"BLOCK_M": 8, "BLOCK_N": 16, "SLICES": 8, "num_stages": 5},
    "one slice": {"BLOCK_K": 128, "SLICES": 1, "BLOCK_N": 64, "num_warps": 4, "num_stages": 16},
    "narrow": {"BLOCK_K": 64, "SLICES": 2, "num_warps": 4, "num_stages": 22},
    "wide": {"BLOCK_M": 32, "BLOCK_K": 64, "num_stages": 7},
    "tiles": {"BLOCK_N": 16, "BLOCK_K": 64, "SLICES": 8, "SPLIT_K": 2, "num_stages": 6},
    "many warps": {"BLOCK_K": 64, "SLICES": 8, "num_warps": 16},
}


def test_ways_are_legal() -> None:
    """On the problems below, where most of them ask for stages again, with one to three tiles."""
    tiles, rings = set(), []
    long = ((13, 2200, 8704), (13, 2200, 9088), (16, 1000, 8192), (13, 24, 8192), (11, 37, 9376))
    for m, n, k in (*long, (3, 17, 640)):
        for way in WAYS.values():
            group = k if k == 9376 else 128
            problem, config = w4_problem(m, n, k, group=group, zero=True), {**BASE, **way}
            assert SPEC.why_illegal(config, problem, SM90) is None, (problem, way)
            if (m, n, k) not in long:
                continue
            tiles.add(integer_weights_few.tiles_of(config, m, n, SM90.num_cores))
            rings.append(integer_weights_few.steps_of(config, k) > config["num_stages"])
    assert tiles == {1, 2, 3}
    assert 5 * sum(rings) >= 4 * len(rings)


each_way = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)


def random_problems(seed: int, facts: device.Device) -> list[tuple[Problem, Config]]:
    """Eight of any shape, each with a config of any that is legal there."""
    rng, found = random.Random(seed), []
    for _ in range(8):
        group = rng.choice((64, 128, 128, 256, 512, 0))
        k = group * rng.choice((1, 2, 3, 9, 16, 47, 96)) or 32 * rng.choice((1, 3, 40, 301))
        dtype = rng.choice((BF16, FP16))
        problem = w4_problem(
            rng.choice((1, 2, 7, 8, 9, 16, 17, 33, 64)),
            rng.choice((1, 15, 17, 48, 200, 1000, 5000, 12288, 24576)),
            k,
            dtype,
            group=group or k,
            scale=rng.choice((dtype, torch.float32)),
            zero=rng.random() < 0.5,
            bias=rng.random() < 0.5,
        )
        draws = (random_config(rng) for _ in range(20000))
        found.append((problem, next(c for c in draws if not SPEC.why_illegal(c, problem, facts))))
    return found


def random_config(rng: random.Random) -> Config:
    return {
        **BASE,
        "BLOCK_M": rng.choice((8, 16, 16, 32, 64)),
        "BLOCK_N": rng.choice((16, 32, 64)),
        "BLOCK_K": rng.choice((64, 128, 256)),
        "SPLIT_K": rng.choice((1, 1, 2, 3, 8)),
        "SLICES": rng.choice((1, 2, 4, 8)),
        "PDL": rng.random() < 0.7,
        "programs_per_core": rng.choice((1, 1, 2, 8)),
        "num_warps": rng.choice((4, 8, 16)),
        "num_stages": rng.randint(2, 16),
    }


def test_random_problems_ask_for_stages_again() -> None:
    """What is drawn: rings that are refilled, some of several tiles, and of odd steps."""
    tiles, odd = [], 0
    for problem, config in (each for seed in range(12) for each in random_problems(seed, SM90)):
        steps = integer_weights_few.steps_of(config, problem["k"])
        if steps > config["num_stages"]:
            programs = config["programs_per_core"] * SM90.num_cores
            tiles.append(integer_weights_few.tiles_of(config, problem["m"], problem["n"], programs))
            odd += steps % 2
    assert len(tiles) >= 15
    assert sum(each > 1 for each in tiles) >= 3
    assert odd >= 3


@gpu
@needs_sm90
@pytest.mark.parametrize("seed", range(12))
def test_random_problems_and_configs(seed: int, dev: torch.device) -> None:
    products.are_right(SPEC, random_problems(seed, device.current()), dev)


@gpu
@needs_sm90
@each_way
@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
def test_exact_sums_are_exact(
    way: Config, zero: bool, dtype: torch.dtype, dev: torch.device
) -> None:
    """Bit for bit, from small integers and powers of two: nothing is rounded, or left out."""
    k = 9088 if zero else 8704  # more steps than stages, so stages are asked for again; odd, even
    inputs = w4_inputs(w4_problem(13, 2200, k, dtype, zero=zero), dev)
    generator = torch.Generator().manual_seed(1)
    x = torch.randint(-2, 3, (13, k), generator=generator)
    powers = torch.randint(-3, 1, (2200, k // 128), generator=generator)
    inputs["x"] = x.to(dtype).to(dev)
    inputs["weight_scale"] = torch.exp2(powers.float()).to(dtype).to(dev)
    got = SPEC.launch(**inputs, config={**BASE, **way})
    assert torch.equal(got, tkernels.reference.w4a16_gemm(**inputs))


@gpu
@needs_sm90
@each_way
def test_what_is_beside_the_matrices_is_not_read(way: Config, dev: torch.device) -> None:
    """Views of wider matrices, NaN in the columns and rows that are no part of them."""
    m, n, k = 11, 37, 9376  # ends within a step, at 160 of its columns
    inputs = w4_inputs(w4_problem(m, n, k, group=k, bias=True, zero=True), dev)
    config = {**BASE, **way}
    expected = SPEC.launch(**inputs, config=config)
    assert_right(SPEC, inputs, tensors_of(expected))
    amid = amid_others(inputs, expected)
    SPEC.launch(**amid, config=config)
    assert torch.equal(amid["out"], expected)
    assert kept_beside(amid["out"])


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
    inputs = w4_inputs(w4_problem(13, 24, 8192), dev)
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
    inputs = w4_inputs(w4_problem(16, 1000, 8192, bias=True), dev)
    config = {**BASE, **way}
    first = SPEC.launch(**inputs, config=config)
    for _ in range(20):
        assert torch.equal(first, SPEC.launch(**inputs, config=config))


@gpu
@needs_sm90
@pytest.mark.parametrize("m", [1, 8, 16, 32, 64])
@pytest.mark.parametrize(
    ("n", "k"), [(12288, 4096), (4096, 12288), (1024, 3072), (48, 128), (151936, 1024)]
)
def test_large_ones(m: int, n: int, k: int, dev: torch.device) -> None:
    problem = w4_problem(m, n, k)
    inputs = w4_inputs(problem, dev)
    config = w4a16_gemm_core.default_config(problem, device.current())
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
