"""The Hopper body of w4a16_gemm: refusals, its arithmetic, what the compiler makes of it, results.

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
from tkernels import device, w4a16_gemm_hopper
from tkernels.ops.w4a16_gemm import SPEC
from tkernels.registry import Config, Problem
from tkernels.testing import assert_right, tensors_of
from tkernels.w4_format import pack_nibbles
from tkernels.w4a16_cases import w4_inputs, w4_problem

SM90 = device.sm_facts(90)
BF16, FP16 = torch.bfloat16, torch.float16
BASE: Config = {
    "variant": "hopper",
    "BLOCK_M": 8,
    "BLOCK_N": 16,
    "BLOCK_K": 256,
    "SPLIT_K": 1,
    "SLICES": 1,
    "programs_per_core": 0,
    "PDL": True,
    "num_warps": 4,
    "num_stages": 3,
}


@pytest.mark.parametrize(
    ("problem", "why"),
    [
        (w4_problem(1, 48, 4096), None),
        (w4_problem(64, 48, 576, FP16, group=64, zero=True), None),
        (w4_problem(1, 48, 96, group=96), None),
        (w4_problem(1, 48, 4096, group=32), "groups of 64 or more, got 32"),
        (w4_problem(1, 48, 200, group=200), "a multiple of 32 up to"),
        (w4_problem(1, 48, 1 << 31, group=128), "a multiple of 32 up to"),
    ],
)
def test_why_unfit(problem: Problem, why: str | None) -> None:
    said = w4a16_gemm_hopper.why_unfit(problem, SM90)
    assert said is None if why is None else why in str(said)


def test_why_unfit_elsewhere() -> None:
    for dev in (device.sm_facts(80), device.sm_facts(100), device.ascend_facts()):
        problem = w4_problem(1, 48, 4096)
        assert f"got {dev.arch}" in str(w4a16_gemm_hopper.why_unfit(problem, dev))
        assert SPEC.default_config(problem, dev)["variant"] != "hopper"
        assert "hopper" not in SPEC.space(dev)["variant"]


@pytest.mark.parametrize(
    ("problem", "expected"),
    [
        (w4_problem(1, 12288, 4096), (8, 16, 1, 2)),
        (w4_problem(16, 16384, 4096), (16, 32, 1, 4)),
        (w4_problem(16, 12288, 4096), None),
        (w4_problem(1, 4096, 12288), (8, 16, 1, 4)),
        (w4_problem(3, 128, 12288), (8, 16, 6, 4)),
        (w4_problem(1, 48, 128), (8, 16, 1, 1)),
        (w4_problem(17, 12288, 4096), None),
        (w4_problem(1, 12288, 4096, group=32), None),
    ],
)
def test_what_the_default_is(problem: Problem, expected: tuple[int, ...] | None) -> None:
    chosen = SPEC.default_config(problem, SM90)
    assert SPEC.why_illegal(chosen, problem, SM90) is None
    names = ("BLOCK_M", "BLOCK_N", "SPLIT_K", "num_warps")
    if expected is None:
        assert chosen["variant"] != "hopper"
    else:
        assert (chosen["variant"], *(chosen[name] for name in names)) == ("hopper", *expected)


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"BLOCK_M": 128}, "BLOCK_M of (8, 16, 32, 64), got 128"),
        ({"BLOCK_N": 128}, "BLOCK_N of (16, 32, 64), got 128"),
        ({"BLOCK_K": 1024}, "BLOCK_K of (128, 256, 512), got 1024"),
        ({"SLICES": 2}, "variant hopper has SLICES 1"),
        ({"SPLIT_K": 0}, "SPLIT_K must be 1 to 64"),
        ({"num_stages": 1}, "num_stages 2 or more, got 4 and 1"),
        ({"num_warps": 3}, "num_warps must be 1 to 16"),
        ({"num_stages": 40}, "bytes of shared memory"),
        ({"BLOCK_M": 64, "BLOCK_N": 32}, "more than 64 registers"),
        ({"programs_per_core": 16}, "leave 32 registers a thread"),
        ({"variant": "hoper"}, "direct, turned, hopper or rows, got 'hoper'"),
    ],
)
def test_why_illegal(changed: Config, why: str) -> None:
    problem = w4_problem(1, 12288, 4096)
    assert SPEC.why_illegal(BASE, problem, SM90) is None
    assert why in str(SPEC.why_illegal({**BASE, **changed}, problem, SM90))


def test_a_step_has_four_groups_at_most() -> None:
    problem = w4_problem(1, 48, 4096, group=64)
    assert SPEC.why_illegal(BASE, problem, SM90) is None
    why = SPEC.why_illegal({**BASE, "BLOCK_K": 512}, problem, SM90)
    assert why == "a step of 512 columns has more than four groups of 64"


# ---- its arithmetic ----------------------------------------------------------------------------


def _run_ptx(text: str, word: int, less: int, dtype: torch.dtype) -> list[list[float]]:
    """What these few instructions of PTX make of a word: four pairs of numbers."""
    value = {"$4": word, "$5": less}

    def read(name: str) -> int:
        return value[name] if name in value else int(name, 0)

    def halves(bits: int) -> torch.Tensor:
        pair = torch.tensor([bits & 0xFFFF, bits >> 16], dtype=torch.int32)
        return pair.to(torch.int16).view(dtype).double()

    def bits_of(pair: torch.Tensor) -> int:
        low, high = (int(v) & 0xFFFF for v in pair.to(dtype).view(torch.int16))
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
        elif name in ("add.rn.bf16x2", "add.rn.f16x2"):
            value[to] = bits_of(halves(given[0]) + halves(given[1]))
        elif name == "fma.rn.f16x2":
            value[to] = bits_of(halves(given[0]) * halves(given[1]) + halves(given[2]))
        else:
            raise AssertionError(name)
    return [halves(value[f"${i}"]).tolist() for i in range(4)]


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("has_zero", [False, True])
def test_ptx_makes_pairs_of_numbers_of_codes(dtype: torch.dtype, has_zero: bool) -> None:
    text = w4a16_gemm_hopper._decoding(dtype == FP16, has_zero)
    rng = random.Random(0)
    for zero in range(16) if has_zero else [8]:
        one = torch.tensor(-(1024.0 if dtype == FP16 else 128.0) - zero, dtype=dtype)
        less = (int(one.view(torch.int16)) & 0xFFFF) * 0x10001
        for _ in range(32):
            word = rng.getrandbits(32)
            q = [word >> 4 * j & 15 for j in range(8)]
            expected = [[float(q[i] - zero), float(q[4 + i] - zero)] for i in range(4)]
            assert _run_ptx(text, word, less, dtype) == expected


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
for m, k, dtype, more, changed in cases:
    problem = w4_problem(m, 96, k, getattr(torch, dtype), **more)
    with FakeTensorMode(), offline.record_launches() as launches:
        SPEC.launch(
            **SPEC.make_inputs(problem, torch.device("cpu")), config={**base, **changed})
    ptx = offline.compiled_cuda(launches[0], 90).asm["ptx"]
    got = dataclasses.asdict(offline.compile_cuda(launches[0], 90))
    found.append({
        **got, "case": [m, k, dtype, more, changed], "names": [x.fn.__name__ for x in launches],
        "products": ptx.count("mma.sync"), "codes": ptx.count("ldmatrix"),
        "whole": ptx.count("cp.async.cg.shared.global"), "parts": ptx.count("cp.async.ca")})
print(json.dumps(found))
"""

COMPILED: list[Any] = [
    (1, 4096, "bfloat16", {}, {}),
    (16, 4096, "bfloat16", {}, {"BLOCK_M": 16, "BLOCK_N": 32}),
    (5, 4096, "float16", {"zero": True, "bias": True}, {"num_warps": 1, "SPLIT_K": 4}),
    (8, 4064, "bfloat16", {"group": 4064, "zero": True}, {}),  # one scale a row; ends in a step
    (8, 576, "float16", {"group": 64}, {"BLOCK_K": 128}),
    (3, 4096, "bfloat16", {"group": 512, "zero": True}, {"BLOCK_K": 512, "num_stages": 2}),
    (32, 4096, "bfloat16", {}, {"BLOCK_M": 32}),
    (1, 4096, "bfloat16", {}, {"programs_per_core": 6}),
]


@pytest.mark.slow
def test_compiled_for_sm90() -> None:
    found = json.loads(lines_of(CHILD, given=json.dumps([BASE, COMPILED]))[-1])
    assert len(found) == len(COMPILED)
    for case in found:
        changed = {**BASE, **case["case"][4]}
        rows, outputs, columns = changed["BLOCK_M"], changed["BLOCK_N"], changed["BLOCK_K"]
        stages, warps = changed["num_stages"], changed["num_warps"]
        split = ["_add_kernel"] if changed["SPLIT_K"] > 1 else []
        assert case["names"] == ["_w4a16_gemm_hopper_kernel", *split], case
        # Where six programs share a core two registers are put away during the loop; ptxas of
        # Triton 3.6 stores them at two places, of which a thread passes one.
        assert case["spill_bytes"] <= (16 if changed["programs_per_core"] else 0), case
        assert case["registers"] <= 168, case  # three programs of four warps
        # A step's products and codes once in the program, and nothing in shared memory but
        # them and a single row.
        assert case["products"] == outputs * rows * columns // (16 * 8 * 16), case
        assert case["codes"] == outputs * columns // 2 // 512, case
        assert case["whole"] == stages * outputs * columns // 2 // 512, case
        assert case["parts"] == 0, case
        m, k, *_ = case["case"]
        row = w4a16_gemm_hopper.bytes_of_row(changed, {"m": m, "k": k}, 2)
        assert case["shared_bytes"] == stages * warps * outputs * columns // 2 + row, case
        if changed["programs_per_core"] == 6:
            assert case["registers"] <= 80, case


# ---- results, on the GPU -----------------------------------------------------------------------

gpu = pytest.mark.gpu
needs_sm90 = pytest.mark.skipif(
    device.current().arch != "sm90", reason="needs an sm90 GPU; this machine has none"
)
WAYS: dict[str, Config] = {
    "plain": {},
    "alone": {"num_warps": 1, "num_stages": 2},
    "wide": {"BLOCK_M": 16, "BLOCK_N": 32, "num_warps": 2},
    "short": {"BLOCK_K": 128, "num_warps": 8, "num_stages": 4},
    "long": {"BLOCK_K": 512, "num_warps": 2, "SPLIT_K": 2},
    "rows": {"BLOCK_M": 32, "BLOCK_N": 16, "SPLIT_K": 3},
}
each_way = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)


@gpu
@needs_sm90
@pytest.mark.parametrize("seed", range(8))
def test_random_problems_and_configs(seed: int, dev: torch.device) -> None:
    rng = random.Random(seed)
    for _ in range(20):
        group = rng.choice((64, 128, 128, 256, 512, 0))
        k = group * rng.choice((1, 2, 3, 5, 9, 16)) or 32 * rng.choice((1, 3, 17, 40))
        dtype = rng.choice((BF16, FP16))
        problem = w4_problem(
            rng.choice((1, 2, 7, 8, 9, 16, 17, 33, 64)),
            rng.choice((1, 15, 16, 17, 48, 200, 1000)),
            k,
            dtype,
            group=group or k,
            scale=rng.choice((dtype, torch.float32)),
            zero=rng.random() < 0.5,
            bias=rng.random() < 0.5,
        )
        config = {
            **BASE,
            "BLOCK_M": rng.choice((8, 16, 32)),
            "BLOCK_N": rng.choice((16, 32)),
            "BLOCK_K": rng.choice((128, 256)),
            "SPLIT_K": rng.choice((1, 1, 2, 3, 8)),
            "PDL": rng.random() < 0.5,
            "num_warps": rng.choice((1, 2, 4, 8)),
            "num_stages": rng.choice((2, 3, 5)),
        }
        assert SPEC.why_illegal(config, problem, device.current()) is None
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
    inputs = w4_inputs(w4_problem(13, 40, 1152, dtype, zero=zero), dev)
    generator = torch.Generator().manual_seed(1)
    x = torch.randint(-2, 3, (13, 1152), generator=generator)
    powers = torch.randint(-3, 1, (40, 9), generator=generator)
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
    inputs["x"][12, 77] = value  # the last row, which stands in for those that are not there
    got = SPEC.launch(**inputs, config=config)
    assert not got[12].isfinite().all()
    assert torch.equal(got[:12], before[:12])


@gpu
@needs_sm90
@each_way
def test_the_same_bits_again(way: Config, dev: torch.device) -> None:
    inputs = w4_inputs(w4_problem(16, 1000, 4096, bias=True), dev)
    config = {**BASE, **way}
    first = SPEC.launch(**inputs, config=config)
    for _ in range(20):
        assert torch.equal(first, SPEC.launch(**inputs, config=config))


@gpu
@needs_sm90
@pytest.mark.parametrize("m", [1, 8, 16, 64])
@pytest.mark.parametrize(("n", "k"), [(12288, 4096), (4096, 12288)])
def test_large_ones(m: int, n: int, k: int, dev: torch.device) -> None:
    problem = w4_problem(m, n, k)
    inputs = w4_inputs(problem, dev)
    rows = max(8, m)
    config = {**BASE, "BLOCK_M": min(32, rows), "num_warps": 8}
    for used in (SPEC.default_config(problem, device.current()), config):
        assert_right(SPEC, inputs, tensors_of(SPEC.launch(**inputs, config=used)))


@gpu
@needs_sm90
def test_it_reads_whatever_lies_at_odd_addresses(dev: torch.device) -> None:
    """Weights that do not lie at 16 bytes, and strides that do not keep rows there."""
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
