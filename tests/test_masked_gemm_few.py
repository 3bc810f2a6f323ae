"""The body of masked_gemm for few int8 rows: refusals, what the compiler makes of it, results.

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
from tkernels import device, masked_gemm_few
from tkernels.masked_gemm_cases import gemm_inputs, gemm_problem
from tkernels.ops.masked_gemm import SPEC
from tkernels.registry import Config, Problem

SM90 = device.sm_facts(90)
BF16, FP16 = torch.bfloat16, torch.float16
BASE: Config = {
    "variant": "few",
    "BLOCK_M": 8,
    "BLOCK_N": 32,
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
        (gemm_problem(1, 48, 4096), None),
        (gemm_problem(1, 48, 4096, path="masked"), "has int8 rows alone, got path masked"),
        (gemm_problem(1, 48, 4096, path="high"), "has int8 rows alone, got path high"),
        (gemm_problem(1, 48, 4100), "rows that divide by 16 bytes"),
        (gemm_problem(1, 48, (1 << 30) + 16), "at most 1073741824 columns"),
    ],
)
def test_why_unfit(problem: Problem, why: str | None) -> None:
    said = masked_gemm_few.why_unfit(problem, SM90)
    assert said is None if why is None else why in str(said)


def test_why_unfit_elsewhere() -> None:
    for dev in (device.sm_facts(80), device.sm_facts(100), device.ascend_facts()):
        problem = gemm_problem(1, 48, 4096)
        assert f"got {dev.arch}" in str(masked_gemm_few.why_unfit(problem, dev))
        assert SPEC.default_config(problem, dev)["variant"] != "few"
        assert "few" not in SPEC.space(dev)["variant"]


@pytest.mark.parametrize(
    ("problem", "expected"),
    [
        # No multiples of 128 columns, as the narrow body needs; or more tiles than it may have.
        (gemm_problem(1, 12288, 4112), (8, 16, 1, 2)),
        (gemm_problem(8, 4096, 12304), (8, 16, 3, 4)),
        (gemm_problem(3, 128, 12304), (8, 16, 8, 4)),
        (gemm_problem(1, 48, 144), (8, 16, 1, 2)),
        (gemm_problem(1, 151936, 4096), (8, 16, 1, 2)),
        (gemm_problem(1, 12288, 4096), None),
        (gemm_problem(9, 12288, 4112), None),
        (gemm_problem(1, 12288, 4096, path="masked"), None),
    ],
)
def test_what_the_default_is(problem: Problem, expected: tuple[int, ...] | None) -> None:
    chosen = SPEC.default_config(problem, SM90)
    assert SPEC.why_illegal(chosen, problem, SM90) is None
    names = ("BLOCK_M", "BLOCK_N", "SPLIT_K", "num_warps")
    if expected is None:
        assert chosen["variant"] != "few"
    else:
        assert (chosen["variant"], *(chosen[name] for name in names)) == ("few", *expected)


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"BLOCK_M": 128}, "BLOCK_M of (8, 16, 32, 64), got 128"),
        ({"BLOCK_N": 128}, "BLOCK_N of (16, 32, 64), got 128"),
        ({"BLOCK_K": 64}, "BLOCK_K of (128, 256, 512), got 64"),
        ({"GROUP_M": 8}, "variant few has GROUP_M 1"),
        ({"SWAP": True}, "variant few has SWAP False"),
        ({"SPLIT_K": 0}, "SPLIT_K must be 1 to 64, got 0"),
        ({"num_stages": 1}, "num_stages 2 or more, got 4 and 1"),
        ({"num_warps": 3}, "num_warps must be 1 to 16"),
        ({"num_stages": 40}, "bytes of shared memory"),
        ({"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 256, "num_stages": 2}, "255 registers a thread"),
        ({"programs_per_core": 16}, "leave 32 registers a thread"),
    ],
)
def test_why_illegal(changed: Config, why: str) -> None:
    problem = gemm_problem(1, 12288, 4096)
    assert SPEC.why_illegal(BASE, problem, SM90) is None
    assert why in str(SPEC.why_illegal({**BASE, **changed}, problem, SM90))


# ---- what the compiler makes of it -------------------------------------------------------------

# In a process of its own: here Triton is an interpreter, there it must compile.
CHILD = """
import dataclasses, json, sys
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from tkernels import device, offline
from tkernels.ops.masked_gemm import SPEC
from tkernels.masked_gemm_cases import gemm_problem

base, cases = json.loads(sys.stdin.read())
found = []
for m, k, more, changed in cases:
    problem = gemm_problem(m, 96, k, **more)
    with FakeTensorMode(), offline.record_launches() as launches:
        SPEC.launch(
            **SPEC.make_inputs(problem, torch.device("cpu")), config={**base, **changed})
    ptx = offline.compiled_cuda(launches[0], 90).asm["ptx"]
    got = dataclasses.asdict(offline.compile_cuda(launches[0], 90))
    found.append({
        **got, "case": [m, k, more, changed], "names": [x.fn.__name__ for x in launches],
        "products": ptx.count("mma.sync"), "wide": ptx.count("ld.shared.v4"),
        "whole": ptx.count("cp.async.cg.shared.global"), "parts": ptx.count("cp.async.ca")})
print(json.dumps(found))
"""

COMPILED: list[Any] = [
    (1, 4096, {}, {}),
    (16, 4096, {"bias": True}, {"BLOCK_M": 16}),
    (5, 4096, {}, {"BLOCK_N": 16, "num_warps": 1, "SPLIT_K": 4}),
    (8, 4048, {}, {"BLOCK_K": 256, "num_stages": 2}),  # ends within a step
    (32, 4096, {}, {"BLOCK_M": 32}),
    (1, 4096, {}, {"programs_per_core": 6}),
]


@pytest.mark.slow
def test_compiled_for_sm90() -> None:
    found = json.loads(lines_of(CHILD, given=json.dumps([BASE, COMPILED]))[-1])
    assert len(found) == len(COMPILED)
    for case in found:
        changed = {**BASE, **case["case"][3]}
        rows, outputs, columns = changed["BLOCK_M"], changed["BLOCK_N"], changed["BLOCK_K"]
        stages, warps = changed["num_stages"], changed["num_warps"]
        split = ["_add_parts_kernel"] if changed["SPLIT_K"] > 1 else []
        assert case["names"] == ["_masked_gemm_few_kernel", *split], case
        assert case["spill_bytes"] == 0, case
        assert case["registers"] <= 168, case  # three programs of four warps
        # A step's products once in the program, and nothing in shared memory but its codes.
        assert case["products"] == outputs * rows * columns // (16 * 8 * 32), case
        assert case["wide"] >= outputs * columns // 512, case
        assert case["whole"] == stages * outputs * columns // 512, case
        assert case["parts"] == 0, case
        m, k, *_ = case["case"]
        row = masked_gemm_few.bytes_of_row(changed, {"m": m, "k": k})
        assert case["shared_bytes"] == stages * warps * outputs * columns + row, case


# ---- results, on the GPU -----------------------------------------------------------------------

gpu = pytest.mark.gpu
needs_sm90 = pytest.mark.skipif(
    device.current().arch != "sm90", reason="needs an sm90 GPU; this machine has none"
)


@gpu
@needs_sm90
@pytest.mark.parametrize("seed", range(8))
def test_random_problems_equal_the_reference_bit_for_bit(seed: int, dev: torch.device) -> None:
    """Sums are exact, and what follows is rounded step by step."""
    rng = random.Random(seed)
    for _ in range(20):
        problem = gemm_problem(
            rng.choice((1, 2, 7, 8, 9, 16, 17, 33, 64)),
            rng.choice((1, 15, 16, 17, 48, 200, 1000)),
            16 * rng.choice((1, 3, 8, 25, 64, 97, 256)),
            rng.choice((BF16, FP16)),
            quantized=rng.random() < 0.7,
            bias=rng.random() < 0.5,
        )
        config = {
            **BASE,
            "BLOCK_M": rng.choice((8, 16, 32, 64)),
            "BLOCK_N": rng.choice((16, 32)),
            "BLOCK_K": rng.choice((128, 256)),
            "SPLIT_K": rng.choice((1, 1, 2, 3, 8)),
            "PDL": rng.random() < 0.5,
            "num_warps": rng.choice((1, 2, 4)),
            "num_stages": rng.choice((2, 3, 5)),
        }
        assert SPEC.why_illegal(config, problem, device.current()) is None
        inputs = gemm_inputs(problem, dev)
        got = SPEC.launch(**inputs, config=config)
        expected = tkernels.reference.masked_gemm(**inputs)
        assert torch.equal(got, expected), f"{problem} with {config}"


WAYS: dict[str, Config] = {
    "plain": {},
    "alone": {"num_warps": 1, "BLOCK_N": 16, "num_stages": 2},
    "long": {"BLOCK_M": 16, "BLOCK_K": 512, "BLOCK_N": 16, "num_stages": 2, "SPLIT_K": 2},
    "rows": {"BLOCK_M": 32, "SPLIT_K": 3, "num_warps": 2},
}
each_way = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)


@gpu
@needs_sm90
@each_way
def test_what_is_beside_the_matrices_is_not_read(way: Config, dev: torch.device) -> None:
    """Views of wider matrices, other codes in the columns and rows that are no part of them."""
    m, n, k = 11, 37, 1168  # ends within a step
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
@pytest.mark.parametrize("m", [1, 8, 16])
@pytest.mark.parametrize(("n", "k"), [(12288, 4096), (4096, 12288)])
def test_large_ones(m: int, n: int, k: int, dev: torch.device) -> None:
    problem = gemm_problem(m, n, k)
    inputs, dev_now = gemm_inputs(problem, dev), device.current()
    few = masked_gemm_few.default_config(problem, dev_now)
    expected = tkernels.reference.masked_gemm(**inputs)
    for _ in range(5):
        assert torch.equal(SPEC.launch(**inputs, config=few), expected)


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
