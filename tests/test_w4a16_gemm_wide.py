"""The body of w4a16_gemm for many rows: refusals, its default, what is compiled, results.

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
from tkernels import device, integer_decoding, integer_weights_many, w4a16_gemm_wide
from tkernels.ops import w4a16_gemm as op
from tkernels.ops.w4a16_gemm import SPEC
from tkernels.registry import Config, Problem
from tkernels.testing import assert_right, tensors_of
from tkernels.w4a16_cases import w4_inputs, w4_problem

SM90 = device.sm_facts(90)
BF16, FP16 = torch.bfloat16, torch.float16
BASE: Config = {
    **w4a16_gemm_wide.FIXED,
    "BLOCK_M": 64,
    "SPLIT_K": 1,
    "PDL": True,
    "num_warps": 8,
    "num_stages": 8,
}


@pytest.mark.parametrize(
    ("problem", "why"),
    [
        (w4_problem(64, 48, 4096), None),
        (w4_problem(64, 48, 4096, group=32, zero=True), None),
        (w4_problem(64, 48, 4096, group=4096, scale=torch.float32), None),
        (w4_problem(64, 48, 4096, scale=torch.float32), "scales of x's dtype, got torch.float32"),
        (w4_problem(64, 48, 200, group=200), "needs K to be a multiple of 32, got 200"),
        (w4_problem(64, 48, 1 << 31), "up to 67107840 columns, got 2147483648"),
        (w4_problem(33, 1, 65535 * 1024), None),
        (w4_problem(33, 1, 65535 * 1024 + 128), "up to 67107840 columns, got 67107968"),
        (w4_problem(64, 1 << 23, 128), "variant wide has up to 4194304 outputs, got 8388608"),
    ],
)
def test_why_unfit(problem: Problem, why: str | None) -> None:
    said = w4a16_gemm_wide.why_unfit(problem, SM90)
    assert said is None if why is None else why in str(said)


def test_why_unfit_elsewhere() -> None:
    for dev in (device.sm_facts(80), device.sm_facts(100), device.ascend_facts()):
        problem = w4_problem(128, 12288, 4096)
        assert f"got {dev.arch}" in str(w4a16_gemm_wide.why_unfit(problem, dev))
        assert SPEC.default_config(problem, dev)["variant"] != "wide"
        assert "wide" not in SPEC.space(dev)["variant"]
        assert 12 not in SPEC.space(dev).get("num_warps", [])


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"BLOCK_M": 16}, "BLOCK_M of 32 or more, got 16"),
        ({"BLOCK_M": 512}, "BLOCK_M of 8, 16, 32, 64, 128, 256, got 512"),
        ({"BLOCK_N": 128}, "variant wide has BLOCK_N 64"),
        ({"BLOCK_K": 256}, "variant wide has BLOCK_K 128"),
        ({"SLICES": 2}, "variant wide has SLICES 1"),
        ({"programs_per_core": 2}, "variant wide has programs_per_core 1"),
        ({"num_warps": 4}, "two or three groups of 4 warps, got 4 warps"),
        ({"SPLIT_K": 33}, "SPLIT_K must be at most 32, a step each, got 33"),
        ({"num_stages": 1}, "num_stages of 2 or more, got 1"),
        ({"num_stages": 10}, "bytes of shared memory, more than 232448"),
        ({"BLOCK_M": 256, "num_warps": 12, "num_stages": 2}, "no registers for 256 rows"),
    ],
)
def test_why_illegal(changed: Config, why: str) -> None:
    problem = w4_problem(64, 12288, 4096)
    assert SPEC.why_illegal(BASE, problem, SM90) is None
    assert why in str(SPEC.why_illegal({**BASE, **changed}, problem, SM90))


def test_other_bodies_have_no_twelve_warps() -> None:
    problem = w4_problem(64, 12288, 4096)
    for m in (1, 64, 4096):
        config = SPEC.default_config(w4_problem(m, 12288, 4096), SM90)
        if config["variant"] != "wide":
            assert SPEC.why_illegal({**config, "num_warps": 12}, problem, SM90) is not None
    portable = {**op._portable_config(problem, SM90), "num_warps": 12}
    assert "num_warps must be 1 to 16" in str(SPEC.why_illegal(portable, problem, SM90))


@pytest.mark.parametrize(
    ("sizes", "expected"),  # rows, groups, parts of K, stages
    [
        ((33, 12288, 4096), (64, 3, 2, 7)),
        ((64, 12288, 4096), (64, 2, 1, 8)),
        ((64, 4096, 4096), (64, 2, 4, 8)),
        ((128, 12288, 4096), (64, 3, 1, 7)),
        ((256, 12288, 4096), (128, 3, 1, 5)),
        ((1024, 12288, 4096), (256, 2, 1, 3)),
        ((2048, 12288, 4096), (256, 2, 1, 3)),
        ((64, 48, 128), (64, 2, 1, 8)),
        ((9, 12288, 4096), (32, 3, 2, 8)),
    ],
)
def test_how_the_default_divides_work(
    sizes: tuple[int, int, int], expected: tuple[int, ...]
) -> None:
    problem = w4_problem(*sizes)
    chosen = w4a16_gemm_wide.default_config(problem, SM90)
    assert SPEC.why_illegal(chosen, problem, SM90) is None
    found = (chosen["BLOCK_M"], chosen["num_warps"] // 4, chosen["SPLIT_K"], chosen["num_stages"])
    assert (chosen["variant"], *found) == ("wide", *expected)


def test_who_has_other_bodies() -> None:
    for m, variant in ((32, "core"), (33, "wide"), (2048, "wide"), (2049, "unpacked")):
        assert SPEC.default_config(w4_problem(m, 12288, 4096), SM90)["variant"] == variant
    for m, variant in ((33, "core"), (64, "core"), (65, "turned"), (129, "unpacked")):
        kept = w4_problem(m, 12288, 4096, scale=torch.float32)
        chosen = SPEC.default_config(kept, SM90)
        assert chosen["variant"] == variant
        assert SPEC.why_illegal(chosen, kept, SM90) is None


@pytest.mark.parametrize("m", [33, 64, 100, 300, 2048])
@pytest.mark.parametrize(("n", "k"), [(12288, 4096), (4096, 12288), (40, 96), (151936, 1024)])
@pytest.mark.parametrize("cores", [78, 114, 132])
def test_default_is_legal_on_every_card(m: int, n: int, k: int, cores: int) -> None:
    dev = dataclasses.replace(SM90, num_cores=cores)
    for group, zero in ((32, False), (128 if k % 128 == 0 else 32, True), (k, True)):
        problem = w4_problem(m, n, k, group=group, zero=zero)
        config = SPEC.default_config(problem, dev)
        assert config["variant"] == "wide"
        assert SPEC.why_illegal(config, problem, dev) is None


def test_odd_addresses_have_the_portable_body(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights are copied 16 bytes at a time; x is copied first, from wherever it lies."""
    monkeypatch.setattr(device, "current", lambda: dataclasses.replace(SM90, compile_only=False))
    took = []

    def bound(body: str, *_: Any) -> Any:
        return lambda *_: took.append(body)

    monkeypatch.setattr(op, "_bind_portable", functools.partial(bound, "portable"))
    monkeypatch.setattr(w4a16_gemm_wide, "bound", functools.partial(bound, "wide"))
    inputs = w4_inputs(w4_problem(65, 40, 1024), torch.device("cpu"))
    given = {name: inputs[name] for name in ("x", "weight", "weight_scale")}
    given["out"] = torch.empty(65, 40, dtype=BF16)
    for name, changed in at_addresses(given):
        run = op._plan(*changed.values(), False, False, config=BASE)
        assert run is not None
        run(*changed.values(), None, None)
        assert took.pop() == ("portable" if name == "weight" else "wide"), name


def test_strides_that_no_tensor_map_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """One row of weights for all outputs, and rows that start between multiples of 16 bytes."""
    took = []

    def bound(body: str, *_: Any) -> Any:
        return lambda *_: took.append(body)

    monkeypatch.setattr(device, "current", lambda: SM90)
    monkeypatch.setattr(op, "_bind_portable", functools.partial(bound, "portable"))
    monkeypatch.setattr(w4a16_gemm_wide, "bound", functools.partial(bound, "wide"))
    inputs = w4_inputs(w4_problem(65, 40, 1024), torch.device("cpu"))
    weight = inputs["weight"]
    wider = torch.zeros(40, 144, dtype=torch.int32)
    for given, body in (
        (weight, "wide"),
        (weight[:1].expand(40, 128), "portable"),
        (wider[:, :128], "wide"),
        (wider.as_strided((40, 128), (142, 1)), "portable"),
    ):
        out = torch.empty(65, 40, dtype=BF16)
        tensors = (inputs["x"], given, inputs["weight_scale"], out)
        run = op._plan(*tensors, False, False, config=BASE)
        assert run is not None
        run(*tensors, None, None)
        assert took.pop() == body, given.stride()


def test_codes_become_scaled_bf16() -> None:
    """What the PTX says, in exact arithmetic, of every half of a word: rounded once, at the end."""
    text = integer_decoding._in_units()
    halves = torch.arange(1 << 16)
    values = {"$4": halves, "t": halves >> 8}
    assert "shr.u32 t, $4, 8;" in text  # what comes from the other half is masked
    steps = re.findall(
        r"and\.b32 \$(\d), (\S+), 0x(\w{8});fma\.rn\.bf16x2 \$\1, \$\1, (\$\d), \$7;", text
    )
    assert [int(step[0]) for step in steps] == [0, 1, 2, 3]
    unit = float(integer_decoding.UNIT.value)
    generator = torch.Generator().manual_seed(0)
    random_scales = torch.randn(20, generator=generator) * 10.0 ** torch.arange(-12, 8).clamp(max=2)
    for scale in [0.0, 1.0, 2040.0, *random_scales.to(BF16).tolist()]:
        wide = torch.tensor(scale, dtype=torch.float32)
        given = {"$5": wide * 2.0**100 * 2.0**17, "$6": wide * 2.0**100 * 2.0**13}
        less = wide * (-8 / unit)
        # As bf16 they are the same numbers: multiples of the scale by powers of two.
        assert all(torch.equal(v.to(BF16).float(), v) for v in (*given.values(), less))
        for i, (_, source, mask, factor) in enumerate(steps):
            bits = values[source] & (int(mask, 16) & 0xFFFF)
            number = bits.to(torch.int16).view(BF16).double()
            got = number * given[factor].double() + less.double()
            codes = halves >> 4 * i & 15
            assert torch.equal(got * unit, (codes - 8).double() * scale)


def test_which_scales_steps_take() -> None:
    """All of bf16 from 2^-110 on and below 2^11, as documented; of others not all, or none."""
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(BF16)
    scale = every[every.isfinite() & (every != 0)].float()
    unit = float(integer_decoding.UNIT.value)
    factors = [(scale * 2.0**100 * 2.0**power).to(BF16).double() for power in (17, 13)]
    less = (scale * (-8 / unit)).to(BF16).double()
    right = torch.ones_like(scale, dtype=torch.bool)
    for q in range(16):
        expected = ((q - 8) * scale.double()).to(BF16)
        for factor, place in zip(factors, (1, 16), strict=True):
            code = torch.tensor(place * q, dtype=torch.int16).view(BF16).double()
            # A sum is exact in fp64, and twelve bits.
            right &= ((code * factor + less).to(BF16).double() * unit).to(BF16) == expected
    size = scale.abs()
    documented = (size >= 2.0**-110) & (size < 2.0**11)
    assert bool(right[documented].all())
    assert not bool(right[size >= 2.0**11].any())
    assert not bool(right[size < 2.0**-110].all())


@pytest.mark.parametrize("every", [2, 4])
def test_x_is_turned(every: int) -> None:
    """Every fourth column together, or second, in each 128 of them; zeros behind the last."""
    from tkernels.device import bind

    if device.current().is_npu:
        pytest.skip("variant wide needs an sm90 GPU")
    on = device.tensor_device()
    x = torch.randn(3, 1200, generator=torch.Generator().manual_seed(0)).to(BF16).to(on)
    padded = torch.zeros(3, 1280, dtype=BF16, device=on)
    padded[:, :1200] = x
    out = torch.full((3, 1280), math.nan, dtype=BF16, device=on)
    wider = torch.full((3, 1300), math.nan, dtype=BF16, device=on)
    wider[:, :1200] = x
    options = {"PDL": False, "BLOCKS": 8, "num_warps": 4}
    turn = bind(integer_weights_many._turn_kernel, (3, 2), EVERY=every, **options)
    turn(wider, out, 1300, 1200, 1280)
    expected = padded.view(3, 10, 128 // every, every).transpose(2, 3).reshape(3, 1280)
    assert torch.equal(out, expected)


# ---- what the compiler makes of it -------------------------------------------------------------

# In a process of its own: here Triton is an interpreter, there it must compile.
CHILD = """
import dataclasses, json, re, sys
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
    ptx = offline.compiled_cuda(launches[1], 90).asm["ptx"]
    got = dataclasses.asdict(offline.compile_cuda(launches[1], 90))
    found.append({
        **got, "case": [m, n, k, dtype, more, changed], "names": [x.fn.__name__ for x in launches],
        "products": len(re.findall(r"wgmma.mma_async\\S* *\\{[^}]*\\}, *\\{", ptx)),
        "all_products": ptx.count("wgmma.mma_async"), "ldmatrix": ptx.count("ldmatrix")})
print(json.dumps(found))
"""

COMPILED: list[Any] = [  # rows, outputs, K, dtype, of the problem, of the config
    (64, 12288, 4096, "bfloat16", {}, {}),
    (128, 12288, 4096, "bfloat16", {}, {"num_warps": 12, "num_stages": 7}),
    (256, 12288, 4096, "bfloat16", {}, {"BLOCK_M": 128, "num_warps": 12, "num_stages": 5}),
    (1024, 12288, 4096, "bfloat16", {}, {"BLOCK_M": 256, "num_stages": 3}),
    (64, 4096, 4096, "float16", {"zero": True, "bias": True}, {"SPLIT_K": 4}),
    (64, 4096, 4096, "bfloat16", {"group": 32, "zero": True}, {}),
    (64, 4096, 4064, "bfloat16", {"group": 4064}, {"BLOCK_M": 32}),
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
        split = ["_add_rows_kernel"] if changed["SPLIT_K"] > 1 else []
        assert case["names"] == ["_turn_kernel", "_integer_weights_kernel", *split], case
        assert case["spill_bytes"] <= 16, case
        used = w4a16_gemm_wide.shared_bytes(changed)
        assert case["shared_bytes"] <= used <= SM90.local_mem_bytes, case
        # Eight products a step of each group, all with a left operand of registers.
        assert case["products"] == case["all_products"] == 8 * changed["num_warps"] // 4, case
        assert case["ldmatrix"] == 2 * changed["num_warps"] // 4, case


# ---- results, on the GPU -----------------------------------------------------------------------

gpu = pytest.mark.gpu
needs_sm90 = pytest.mark.skipif(
    device.current().arch != "sm90", reason="needs an sm90 GPU; this machine has none"
)
WAYS: dict[str, Config] = {
    "plain": {},
    "split": {"SPLIT_K": 3, "num_stages": 4},
    "three": {"num_warps": 12, "num_stages": 7},
    "few rows": {"BLOCK_M": 32, "num_stages": 2},
    "many rows": {"BLOCK_M": 128, "num_warps": 12, "num_stages": 4, "SPLIT_K": 2},
    "most rows": {"BLOCK_M": 256, "num_stages": 3, "PDL": False},
}
each_way = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)


def random_problems(seed: int, facts: device.Device) -> list[tuple[Problem, Config]]:
    """Six of any shape, each with a config of any that is legal there."""
    rng, found = random.Random(seed), []
    for _ in range(6):
        group = rng.choice((32, 64, 128, 128, 256, 0))
        k = group * rng.choice((1, 2, 3, 9, 16, 47)) or 32 * rng.choice((1, 3, 40, 301))
        dtype = rng.choice((BF16, FP16))
        problem = w4_problem(
            rng.choice((1, 7, 33, 64, 65, 130, 256, 300, 700)),
            rng.choice((1, 15, 63, 65, 200, 1000, 5000, 12288)),
            k,
            dtype,
            group=group or k,
            scale=rng.choice((dtype, torch.float32)) if group == 0 else dtype,
            zero=rng.random() < 0.5,
            bias=rng.random() < 0.5,
        )
        draws = (random_config(rng) for _ in range(20000))
        found.append((problem, next(c for c in draws if not SPEC.why_illegal(c, problem, facts))))
    return found


def random_config(rng: random.Random) -> Config:
    return {
        **BASE,
        "BLOCK_M": rng.choice((32, 64, 128, 256)),
        "SPLIT_K": rng.choice((1, 1, 2, 3, 8)),
        "PDL": rng.random() < 0.7,
        "num_warps": rng.choice((8, 12)),
        "num_stages": rng.randint(2, 8),
    }


def test_random_problems_are_many() -> None:
    """What is drawn: programs with several tiles, ends within steps, tiles and splits."""
    several = odd = split = 0
    for problem, config in (each for seed in range(12) for each in random_problems(seed, SM90)):
        m, n, k = (problem[name] for name in "mnk")
        tiles = -(-m // config["BLOCK_M"]) * -(-n // (16 * config["num_warps"]))
        several += tiles * config["SPLIT_K"] > SM90.num_cores
        odd += k % 128 > 0 and n % 64 > 0
        split += config["SPLIT_K"] > 1
    assert several >= 5
    assert odd >= 5
    assert split >= 15


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
    k = 1184 if zero else 4096  # groups of 32 that end within a step
    inputs = w4_inputs(w4_problem(70, 2200, k, dtype, zero=zero, group=32), dev)
    generator = torch.Generator().manual_seed(1)
    x = torch.randint(-2, 3, (70, k), generator=generator)
    powers = torch.randint(-3, 1, (2200, k // 32), generator=generator)
    inputs["x"] = x.to(dtype).to(dev)
    inputs["weight_scale"] = torch.exp2(powers.float()).to(dtype).to(dev)
    got = SPEC.launch(**inputs, config={**BASE, **way})
    assert torch.equal(got, tkernels.reference.w4a16_gemm(**inputs))


@gpu
@needs_sm90
@each_way
@pytest.mark.parametrize("group", [32, 128, 1120])
def test_what_is_beside_the_matrices_is_not_read(
    way: Config, group: int, dev: torch.device
) -> None:
    """Views of wider matrices, NaN in the columns and rows that are no part of them."""
    m, n, k = 75, 137, 1120 if group != 128 else 1152
    inputs = w4_inputs(w4_problem(m, n, k, group=group, bias=True, zero=True), dev)
    config = {**BASE, **way}
    expected = SPEC.launch(**inputs, config=config)
    assert_right(SPEC, inputs, tensors_of(expected))
    amid = amid_others(inputs, expected)
    SPEC.launch(**amid, config=config)
    assert torch.equal(amid["out"], expected)
    assert kept_beside(amid["out"])


@gpu
@needs_sm90
def test_out_at_any_address(dev: torch.device) -> None:
    """Also of a plan whose first out was at a multiple of 16 bytes, and stored as such."""
    problem = w4_problem(64, 12288, 128)
    chosen = SPEC.default_config(problem, device.current())
    assert (chosen["variant"], chosen["SPLIT_K"]) == ("wide", 1)
    inputs = w4_inputs(problem, dev)
    expected = SPEC.launch(**inputs)
    for past in (0, 1, 0, 1, 4, 4):
        room = torch.full((64 * 12288 + 8,), 5.0, dtype=BF16, device=dev)
        out = room[past : past + expected.numel()].view(expected.shape)
        SPEC.launch(**inputs, out=out)
        assert torch.equal(out, expected), past
        assert bool((room[:past] == 5.0).all())
        assert bool((room[past + expected.numel() :] == 5.0).all())


@gpu
@needs_sm90
@each_way
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_bad_activations_spoil_their_row_alone(
    way: Config, value: float, dev: torch.device
) -> None:
    inputs = w4_inputs(w4_problem(70, 200, 1024), dev)
    products.spoils_its_row_alone(SPEC, inputs, {**BASE, **way}, value)


@gpu
@needs_sm90
@each_way
def test_the_same_bits_again(way: Config, dev: torch.device) -> None:
    inputs = w4_inputs(w4_problem(300, 5000, 2048, bias=True), dev)
    products.has_the_same_bits_again(SPEC, inputs, {**BASE, **way})


@gpu
@needs_sm90
@pytest.mark.parametrize("scale", [2.0**-60, 2.0**-20, 1.0, 1000.0])
def test_scales_small_and_large(scale: float, dev: torch.device) -> None:
    inputs = w4_inputs(w4_problem(70, 200, 1024), dev)
    inputs["weight_scale"] = (inputs["weight_scale"].float() * scale * 25).to(BF16)
    got = SPEC.launch(**inputs, config=BASE).double()
    expected = tkernels.reference.w4a16_gemm(**inputs).double()
    assert (got - expected).norm() < 4e-3 * expected.norm()


@gpu
@needs_sm90
@pytest.mark.parametrize("m", [33, 64, 128, 256, 1000, 2048])
@pytest.mark.parametrize(
    ("n", "k"), [(12288, 4096), (4096, 12288), (1024, 3072), (48, 128), (151936, 1024)]
)
def test_large_ones(m: int, n: int, k: int, dev: torch.device) -> None:
    problem = w4_problem(m, n, k)
    inputs = w4_inputs(problem, dev)
    assert SPEC.default_config(problem, device.current())["variant"] == "wide"
    assert_right(SPEC, inputs, tensors_of(SPEC.launch(**inputs)))
