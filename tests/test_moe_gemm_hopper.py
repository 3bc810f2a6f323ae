"""The Hopper body of moe_gemm: refusals, rows of tiles, what the compiler makes of it, results.

Without a GPU it is compiled for sm_90.
"""

from __future__ import annotations

import json
import random
import types
from typing import Any

import numpy as np
import pytest
import torch

import tkernels
from tests.compiled_for import lines_of
from tkernels import device
from tkernels import moe_gemm_hopper as hopper
from tkernels.moe_gemm_cases import moe_gemm_inputs, moe_gemm_problem
from tkernels.ops.moe_gemm import SPEC
from tkernels.registry import Config, Problem
from tkernels.testing import assert_close, guarded

SM90 = device.sm_facts(90)
BF16 = torch.bfloat16
MANY = moe_gemm_problem(4096, 128, 8, 1536, 2048)
DOWN = moe_gemm_problem(4096, 128, 8, 2048, 768, first=False)


# ---- which problems and configs ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "facts", "why"),
    [
        ({}, SM90, None),
        ({"int8": True, "path": "int8"}, SM90, None),
        ({"dtype": torch.float16}, SM90, None),
        ({"dtype": torch.float32}, SM90, "needs 8- or 16-bit numbers, got torch.float32"),
        ({"aligned": False}, SM90, "rows whose bytes divide by 128"),
        ({"k": 2048 + 32}, SM90, "rows whose bytes divide by 128"),
        ({"k": 2048 + 64, "int8": True, "path": "int8"}, SM90, "rows whose bytes divide by 128"),
        ({"int8": True}, SM90, "no int8 weights with 16-bit activations"),
        ({"int8": True, "path": "masked"}, SM90, "no int8 weights with 16-bit activations"),
        ({}, device.sm_facts(100), "needs an sm90 device, got sm100"),
        ({}, device.sm_facts(80), "needs an sm90 device, got sm80"),
        ({}, device.ascend_facts(), "got ascend910b"),
    ],
)
def test_why_unfit(changed: dict[str, Any], facts: device.Device, why: str | None) -> None:
    said = hopper.why_unfit({**MANY, **changed}, facts)
    assert said is None if why is None else why in str(said)


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({}, None),
        ({"BLOCK_M": 160, "num_stages": 4}, None),
        ({"BLOCK_M": 160, "num_stages": 5}, "shared memory"),
        ({"BLOCK_M": 128}, "has BLOCK_M 144 or 160, got 128"),
        ({"BLOCK_K": 256}, "variant hopper has BLOCK_K 128"),
        ({"BLOCK_N": 256}, "has 128 outputs a tile, got BLOCK_N 256"),
        ({"num_stages": 1}, "num_stages of 2 or more, got 1"),
        ({"num_stages": 6}, "shared memory"),
        ({"SWAP": False}, "variant hopper has SWAP True"),
        ({"num_warps": 8}, "variant hopper has num_warps 4"),
        ({"programs_per_core": 1}, "variant hopper has programs_per_core 0"),
    ],
)
def test_why_illegal(changed: dict[str, Any], why: str | None) -> None:
    default = SPEC.default_config(MANY, SM90)
    assert default["variant"] == "hopper"
    said = SPEC.why_illegal({**default, **changed}, MANY, SM90)
    assert said is None if why is None else why in str(said)


def test_more_stages_than_steps_are_refused() -> None:
    short = {**MANY, "k": 128}
    config = {**SPEC.default_config(MANY, SM90), "num_stages": 4}
    assert "as many steps of 128 bytes as stages, got 4" in str(
        SPEC.why_illegal(config, short, SM90)
    )
    default = SPEC.default_config(short, SM90)
    assert default["variant"] != "hopper"
    assert SPEC.why_illegal(default, short, SM90) is None


def test_many_rows_an_expert_go_there_on_sm90_alone() -> None:
    for problem in (MANY, DOWN):
        for int8 in ({}, {"int8": True, "path": "int8"}):
            many = {**problem, **int8}
            assert SPEC.default_config(many, SM90)["variant"] == "hopper"
            for other in (device.sm_facts(80), device.sm_facts(120), device.ascend_facts()):
                assert SPEC.default_config(many, other)["variant"] != "hopper"
            for unfit in ({"rows": 512}, {"rows": 8}, {"aligned": False}, {"k": 2048 + 32}):
                assert SPEC.default_config({**many, **unfit}, SM90)["variant"] != "hopper"


# ---- which rows a tile has ---------------------------------------------------------------------


class _Array(np.ndarray[Any, Any]):
    """Numbers with what the functions below ask a tensor for."""

    type = types.SimpleNamespace(layout=None)

    def to(self, kind: Any) -> _Array:
        return self.astype(kind)


class _Pointer:
    """To an element of a list, or elements."""

    def __init__(self, values: list[int], place: Any = 0) -> None:
        self.values, self.place = values, place

    def __add__(self, other: Any) -> _Pointer:
        return _Pointer(self.values, self.place + other)


def _load(pointer: _Pointer, mask: Any = True, other: int = 0) -> Any:
    inside = np.minimum(pointer.place, len(pointer.values) - 1)
    found = np.where(mask, np.array(pointer.values)[inside], other)
    return found.view(_Array) if found.ndim else int(found)


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """The functions of the kernel as plain Python over numpy."""
    numbers = types.SimpleNamespace(
        minimum=np.minimum,
        maximum=np.maximum,
        where=lambda *given: np.where(*given).view(_Array),
        sum=lambda x, axis: int(np.sum(x)),
        int32=np.int32,
        load=_load,
        arange=lambda first, last, layout: np.arange(first, last),
        associative_scan=lambda x, axis, fn: np.cumsum(x).view(_Array),
        BlockedLayout=lambda *args: None,
        num_warps=lambda: 4,
    )
    monkeypatch.setattr(hopper, "gl", numbers)
    for name in ("_tiles", "_tiles_of_experts", "_place", "_rows_of_tile"):
        monkeypatch.setattr(hopper, name, getattr(hopper, name).fn)


def _counts() -> list[list[int]]:
    chance = random.Random(0)
    found = [
        [0],
        [1],
        [128],
        [129],
        [20000],
        [0, 0, 7, 0],
        [144, 288, 289, 0, 127, 256, 272, 20000],
    ]
    for experts in (3, 7, 60, 160):
        found.append([chance.choice([0, 0, 1, chance.randrange(700)]) for _ in range(experts)])
    found.append(list(range(1, 130)))
    return found


@pytest.mark.parametrize("tail", [16, 32])
@pytest.mark.parametrize("counts", _counts(), ids=lambda counts: f"{len(counts)}-{sum(counts)}")
def test_tiles_hold_each_row_once(counts: list[int], tail: int, plain: None) -> None:
    """In order, those of an expert after each other; none is empty, or higher than it may be."""
    offsets = [0, *np.cumsum(counts).tolist()]
    power = 1 << (len(counts) - 1).bit_length()
    tiles, begin = hopper._tiles_of_experts(_Pointer(offsets), len(counts), tail, power)
    assert len(tiles) == power
    held: list[list[tuple[int, int]]] = [[] for _ in counts]
    order = []
    for m_tile in range(int(tiles.sum())):
        place = (m_tile, tiles, begin, _Pointer(offsets), len(counts), tail)
        expert, row0, end = hopper._place(*place)
        held[expert].append((int(row0), int(end)))
        order.append(expert)
    assert order == sorted(order)
    for expert, places in enumerate(held):
        rows = [row for row0, end in places for row in range(row0, end)]
        assert rows == list(range(offsets[expert], offsets[expert + 1]))
        heights = [end - row0 for row0, end in places]
        assert all(0 < height <= 128 + tail for height in heights)
        assert heights == sorted(heights, reverse=True)
        assert len(heights) <= -(-counts[expert] // 128)  # a tail saves tiles, and never adds one


@pytest.mark.parametrize("tail", [16, 32])
def test_tails_save_tiles_and_are_no_more_than_must_be(tail: int, plain: None) -> None:
    saved = 0
    for count in range(1, 3000):
        n_tiles = int(hopper._tiles(count, tail))
        firsts = [hopper._rows_of_tile(t, count, tail) for t in range(n_tiles)]
        tailed = sum(int(height) > 128 for _, height in firsts)
        assert 128 * n_tiles + tail * tailed >= count
        if tailed:
            saved += 1
            assert n_tiles < -(-count // 128)
            assert 128 * n_tiles + tail * (tailed - 1) < count
    assert saved > 100


# ---- what the compiler makes of it -------------------------------------------------------------

# In a process of its own: here Triton is an interpreter, there it must compile.
CHILD = """
import itertools, json, re
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from tkernels import device, offline
from tkernels.moe_gemm_cases import moe_gemm_inputs, moe_gemm_problem
from tkernels.ops.moe_gemm import SPEC

for height, first, int8 in itertools.product((144, 160), (True, False), (False, True)):
    sizes = (1536, 2048) if first else (2048, 768)
    problem = moe_gemm_problem(
        4096, 128, 8, *sizes, first=first, int8=int8, path="int8" if int8 else "high")
    config = {**SPEC.default_config(problem, device.sm_facts(90)), "BLOCK_M": height}
    with FakeTensorMode(), offline.record_launches() as launches:
        inputs = moe_gemm_inputs(problem, torch.device("cpu"))
        # A row stride of 8 numbers beyond 16: whole vectors, which the compiler must be told.
        inputs["x"] = torch.nn.functional.pad(inputs["x"], (0, 8))[:, :-8]
        SPEC.launch(**inputs, config=config)
    launch = launches[-1]
    compiled = offline.compiled_cuda(launch, 90)
    ptx = compiled.asm["ptx"]
    mma = r"wgmma[.]mma_async[.]sync[.]aligned[.](m64n[0-9]+)k[0-9]+[.](\\S+)"
    products = re.findall(mma, ptx)
    found = {
        "kernel": launch.fn.__name__,
        "spills": offline.compile_cuda(launch, 90).spill_bytes,
        "shared": compiled.metadata.shared,
        "products": sorted(set(shape for shape, _ in products)),
        "types": sorted(set(kind for _, kind in products)),
        "gathers": len(re.findall(r"cp[.]async[.]c[ag][.]shared", ptx)),
        "tma": len(re.findall(r"cp[.]async[.]bulk[.]tensor", ptx)),
    }
    print(json.dumps([height, first, int8, found]))
"""


_Compiled = dict[tuple[int, bool, bool], dict[str, Any]]


@pytest.fixture(scope="module")
def compiled() -> _Compiled:
    rows = [json.loads(line) for line in lines_of(CHILD) if line.startswith("[")]
    return {(height, first, int8): found for height, first, int8, found in rows}


@pytest.mark.slow
def test_multiplies_main_rows_halves_and_tails(compiled: _Compiled) -> None:
    """128 rows of x, or 64, and a tail stand where an instruction takes any number; rows of tokens
    alone are gathered. Four stages fit, whatever the tail."""
    assert len(compiled) == 8
    for (height, first, int8), found in compiled.items():
        assert found["kernel"] == "_moe_gemm_hopper_kernel"
        assert found["spills"] <= 64, (height, first, int8, found)  # of sums that wait for a tile
        assert found["shared"] <= SM90.local_mem_bytes
        assert found["products"] == sorted(["m64n128", "m64n64", f"m64n{height - 128}"])
        assert found["types"] == ["s32.s8.s8" if int8 else "f32.bf16.bf16"]
        assert (found["gathers"] > 0) is first
        assert found["tma"] > 0


# ---- results -----------------------------------------------------------------------------------


def _config(problem: Problem, height: int, stages: int) -> Config:
    return {
        **SPEC.default_config(MANY, device.current()),
        **hopper.FIXED,
        "BLOCK_M": height,
        "BLOCK_N": 128 if problem["silu_and_mul"] else 256,
        "num_stages": stages,
    }


def _truth(inputs: dict[str, Any]) -> torch.Tensor:
    precise = {
        n: v.float() if isinstance(v, torch.Tensor) and v.dtype == BF16 else v
        for n, v in inputs.items()
    }
    return tkernels.reference.moe_gemm(**precise)


@pytest.mark.gpu
@pytest.mark.parametrize("height", [144, 160])
@pytest.mark.parametrize("int8", [False, True], ids=["w16", "w8a8"])
@pytest.mark.parametrize("first", [True, False], ids=["gate_up", "down"])
@pytest.mark.parametrize("draw", range(12))
def test_random_problems(
    draw: int, first: bool, int8: bool, height: int, dev: torch.device
) -> None:
    """Few and many experts, even and skewed routing, sizes that no tile divides; guard bands."""
    if device.current().arch != "sm90":
        pytest.skip("the body is for sm90")
    chance = random.Random(1000 * draw + height + 2 * first + int8)
    experts = chance.choice([1, 2, 3, 8, 60, 128, 160])
    choices = min(experts, chance.choice([1, 2, 8]))
    tokens = chance.choice([1, 3, 17, 150, 1000, 3000])
    stages = chance.choice([2, 3, 4])
    k = (128 if int8 else 64) * chance.randrange(stages, 13)
    n = chance.choice([16, 130, 256, 500, 768, 1000])
    problem = moe_gemm_problem(
        tokens, experts, choices, n, k, BF16, first=first, int8=int8,
        path="int8" if int8 else "high", routing=chance.choice(["uniform", "zipf", "one"]),
    )  # fmt: skip
    config = _config(problem, height, stages)
    assert SPEC.why_illegal(config, problem, device.current()) is None, (config, problem)
    inputs = moe_gemm_inputs(problem, dev)
    for name in ("x", "x_q"):  # rows at strides of their own, of which tensor maps know
        if name in inputs:
            pad = 16 // inputs[name].element_size()
            inputs[name] = torch.nn.functional.pad(inputs[name], (0, pad))[:, :k]
    rows, n_out = tokens * choices, n // 2 if first else n
    # Rows of 8 more columns: results stay aligned, as the body's own are.
    out = guarded(torch.full((rows, n_out), 77.0, device=dev).to(BF16), padding=-n_out % 8 + 8)
    got = tkernels.moe_gemm(**inputs, out=out.tensor, config=config)
    out.check("out")
    assert_close(got, _truth(inputs), what=f"{problem}")
    first_bits = got.clone()
    for _ in range(5):
        out.tensor.fill_(77)
        again = tkernels.moe_gemm(**inputs, out=out.tensor, config=config)
        assert torch.equal(again, first_bits)
    out.check("out")


@pytest.mark.gpu
@pytest.mark.parametrize("height", [144, 160])
@pytest.mark.parametrize("int8", [False, True], ids=["w16", "w8a8"])
@pytest.mark.parametrize("first", [True, False], ids=["gate_up", "down"])
def test_counts_beside_the_sizes_of_tiles(
    first: bool,
    int8: bool,
    height: int,
    dev: torch.device,
) -> None:
    """Experts in several orders, each row against the reference; results start as NaN."""
    if device.current().arch != "sm90":
        pytest.skip("the body is for sm90")
    counts = [0, 1, 2, 16, 17, 63, 64, 65, 80, 81, 95, 96, 97, 127, 128, 129, 143, 144, 145, 160]
    counts += [161, 192, 193, 272, 288, 289, 320, 321, 448, 0]
    counts[-1] = sum(counts) % 2
    rows = sum(counts)
    chance = random.Random(height + first + 2 * int8)
    k = 512 if int8 else 256
    problem = moe_gemm_problem(
        rows // 2, len(counts), 2, 768, k, BF16, first=first, int8=int8,
        path="int8" if int8 else "high",
    )  # fmt: skip
    inputs, config = moe_gemm_inputs(problem, dev), _config(problem, height, 4)
    out = guarded(torch.full((rows, 384 if first else 768), 77.0, device=dev).to(BF16), padding=8)
    for _ in range(4):
        chance.shuffle(counts)
        order = chance.sample(range(rows), rows)
        offsets = [0, *np.cumsum(counts).tolist()]
        inputs["expert_offsets"] = torch.tensor(offsets, dtype=torch.int32, device=dev)
        inputs["sorted_ids"] = torch.tensor(order, dtype=torch.int32, device=dev)
        out.tensor.fill_(torch.nan)
        got = tkernels.moe_gemm(**inputs, out=out.tensor, config=config)
        out.check("out")
        assert_close(got, _truth(inputs), what=f"{counts}")
        first_bits = got.clone()
        for tickets in (None, torch.zeros(1, dtype=torch.int32, device=dev)):
            again = tkernels.moe_gemm(**inputs, out=out.tensor, tickets=tickets, config=config)
            assert torch.equal(again, first_bits)


@pytest.mark.gpu
@pytest.mark.parametrize("first", [True, False], ids=["gate_up", "down"])
def test_rows_of_no_expert_are_left_alone(first: bool, dev: torch.device) -> None:
    """As where half of the experts live elsewhere: rows from the last offset on."""
    if device.current().arch != "sm90":
        pytest.skip("the body is for sm90")
    problem = moe_gemm_problem(600, 8, 4, 512, 512, BF16, first=first)
    inputs = moe_gemm_inputs(problem, dev)
    there = int(inputs["expert_offsets"][4])
    inputs["expert_offsets"][5:] = there  # experts 4 to 7 have none
    inputs["sorted_ids"][there:] = -1
    inputs["weight"][4:] = torch.nan
    config = _config(problem, 144, 3)
    expected = _truth(inputs)[:there]
    out = torch.full((2400, 256 if first else 512), 77.0, device=dev).to(BF16)
    got = tkernels.moe_gemm(**inputs, out=out, config=config)
    assert_close(got[:there], expected, what="moe_gemm")
    assert bool((got[there:] == 77).all())


@pytest.mark.gpu
def test_nan_stays_in_its_row(dev: torch.device) -> None:
    """Rows of x stand side by side in a product, and those past the end are what lay there."""
    if device.current().arch != "sm90":
        pytest.skip("the body is for sm90")
    problem = moe_gemm_problem(700, 4, 2, 512, 512, BF16)
    inputs, config = moe_gemm_inputs(problem, dev), _config(problem, 144, 3)
    before = tkernels.moe_gemm(**inputs, config=config)
    inputs["x"][[0, 131, 699]] = torch.nan
    got = tkernels.moe_gemm(**inputs, config=config)
    token = inputs["sorted_ids"] // 2
    spoilt = (token == 0) | (token == 131) | (token == 699)
    assert bool(got[spoilt].isnan().all())
    assert torch.equal(got[~spoilt], before[~spoilt])
