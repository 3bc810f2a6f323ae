"""The body of masked_gemm with x as a narrow right operand: refusals, compiled code, results.

Without a GPU it is compiled for sm_90, and runs as plain Python.
"""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
import torch

import tkernels
from tests.compiled_for import lines_of
from tests.plain_gluon import Machine
from tkernels import device, masked_gemm_narrow, masked_gemm_stream
from tkernels.masked_gemm_cases import gemm_inputs, gemm_problem
from tkernels.ops.masked_gemm import SPEC
from tkernels.registry import Config, Problem

SM90 = device.sm_facts(90)
BF16, FP16 = torch.bfloat16, torch.float16
BASE: Config = {
    "variant": "narrow",
    "BLOCK_M": 16,
    "BLOCK_N": 96,
    "BLOCK_K": 256,
    "GROUP_M": 1,
    "SPLIT_K": 1,
    "programs_per_core": 0,
    "SWAP": False,
    "PDL": True,
    "num_warps": 4,
    "num_stages": 5,
}


@pytest.mark.parametrize(
    ("problem", "why"),
    [
        (gemm_problem(16, 48, 4096), None),
        (gemm_problem(16, 48, 4096, path="masked"), None),
        (gemm_problem(16, 48, 4112), "columns that divide by 128, got 4112"),
    ],
)
def test_why_unfit(problem: Problem, why: str | None) -> None:
    said = masked_gemm_narrow.why_unfit(problem, SM90)
    assert said is None if why is None else why in str(said)


def test_why_unfit_elsewhere() -> None:
    for dev in (device.sm_facts(80), device.sm_facts(100), device.ascend_facts()):
        said = str(masked_gemm_narrow.why_unfit(gemm_problem(16, 48, 4096), dev))
        assert f"variant narrow needs an sm90 device, got {dev.arch}" in said
        assert "narrow" not in SPEC.space(dev)["variant"]


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"num_stages": 2}, None),
        ({"num_stages": 8}, None),
        ({"num_stages": 9}, "bytes of shared memory"),
        ({"BLOCK_N": 32, "BLOCK_K": 512, "num_stages": 8}, None),
        ({"BLOCK_N": 192, "BLOCK_M": 64, "BLOCK_K": 128, "SPLIT_K": 64}, None),
        ({"BLOCK_N": 32, "BLOCK_K": 512, "num_stages": 10}, "bytes of shared memory"),
        ({"BLOCK_M": 128}, "BLOCK_M of (8, 16, 32, 64), got 128"),
        ({"BLOCK_N": 16}, "BLOCK_N of (32, 64, 96, 128, 192, 256), got 16"),
        ({"BLOCK_K": 64}, "BLOCK_K of (128, 256, 512), got 64"),
        ({"BLOCK_K": 128}, "BLOCK_K must be 256 or more"),
        ({"GROUP_M": 8}, "GROUP_M 1"),
        ({"SWAP": True}, "SWAP False"),
        ({"num_warps": 8}, "num_warps 4"),
        ({"SPLIT_K": 65}, "SPLIT_K must be 1 to 64, got 65"),
        ({"num_stages": 1}, "num_stages of 2 or more, got 1"),
    ],
)
def test_why_illegal(changed: Config, why: str | None) -> None:
    said = SPEC.why_illegal({**BASE, **changed}, gemm_problem(16, 12288, 4096), SM90)
    assert said is None if why is None else why in str(said)


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        # BLOCK_M, BLOCK_N, SPLIT_K, BLOCK_K, num_stages
        ((1, 12288, 4096), (8, 96, 1, 512, 4)),
        ((16, 12288, 4096), (16, 96, 1, 512, 3)),
        ((16, 4096, 12288), (16, 32, 1, 512, 9)),
        ((32, 4096, 12288), (32, 64, 2, 512, 4)),
        ((64, 6144, 4096), (64, 64, 1, 512, 3)),
        ((8, 6144, 4096), (8, 64, 1, 512, 6)),  # 96 programs and no parts, not 128 with parts
        ((16, 2560, 9728), (16, 64, 3, 512, 5)),
        ((16, 19456, 2560), (16, 192, 1, 256, 4)),
        ((64, 12288, 4096), None),  # the streaming body's
        ((65, 6144, 4096), None),
        ((16, 151936, 4096), None),  # more tiles than cores
        ((16, 12288, 4112), None),
    ],
)
def test_what_the_default_is(sizes: tuple[int, int, int], expected: tuple[int, ...] | None) -> None:
    problem = gemm_problem(*sizes)
    chosen = SPEC.default_config(problem, SM90)
    assert SPEC.why_illegal(chosen, problem, SM90) is None
    names = ("BLOCK_M", "BLOCK_N", "SPLIT_K", "BLOCK_K", "num_stages")
    if expected is None:
        assert chosen["variant"] != "narrow"
    else:
        assert (chosen["variant"], *(chosen[name] for name in names)) == ("narrow", *expected)


@pytest.mark.parametrize("sizes", [(m, n, k) for m in (1, 7, 64) for n, k in ((1, 128), (48, 256))])
def test_the_default_of_small_ones_is_legal(sizes: tuple[int, int, int]) -> None:
    problem = gemm_problem(*sizes)
    assert SPEC.why_illegal(SPEC.default_config(problem, SM90), problem, SM90) is None


@pytest.mark.parametrize("high_weight", [False, True])
def test_with_a_mask_and_with_high_rows_alone_it_is_the_same(high_weight: bool) -> None:
    """They share a tuned config; also where int8 rows alone are streamed. High rows alone with
    weights of 8 bits have bodies of their own."""
    for m in (1, 16, 64):
        chosen = []
        for path in ("masked", "high"):
            problem = gemm_problem(m, 12288, 4096, path=path, high_weight=high_weight)
            chosen.append(SPEC.default_config(problem, SM90))
            if path == "high" and not high_weight:
                assert chosen.pop()["variant"] == ("core" if m <= 16 else "wide")
                continue
            assert chosen[-1]["variant"] == "narrow"
            for config in (chosen[-1], {**chosen[-1], "num_stages": 2}):
                assert SPEC.why_illegal(config, problem, SM90) is None
            more = {**problem, "m": 65}  # what the high rows would take then has tensor maps
            assert "at most 64 rows" in str(SPEC.why_illegal(chosen[-1], more, SM90))
        assert chosen[0] == chosen[-1]


PLAIN: list[tuple[tuple[int, int, int], Config]] = [
    ((16, 200, 1152), {"num_stages": 2}),  # ends within a tile, and within a step
    ((9, 100, 1024), {"BLOCK_N": 32, "BLOCK_K": 512, "num_stages": 2}),
    ((40, 130, 768), {"BLOCK_M": 16, "BLOCK_N": 64, "BLOCK_K": 128, "num_stages": 3}),
    ((33, 250, 1152), {"BLOCK_M": 64, "BLOCK_N": 192, "SPLIT_K": 3, "num_stages": 2}),
    ((3, 97, 640), {"BLOCK_M": 8, "SPLIT_K": 8, "num_stages": 2}),  # some have no columns
    ((16, 256, 512), {"BLOCK_N": 128, "PDL": False, "BLOCK_K": 128}),
]


@pytest.mark.skipif(not device.is_there(masked_gemm_narrow.gl), reason="this triton has no Gluon")
@pytest.mark.parametrize(("sizes", "changed"), PLAIN)
@pytest.mark.parametrize("bias", [False, True])
def test_as_plain_python(
    sizes: tuple[int, int, int], changed: Config, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem, config = gemm_problem(*sizes, bias=bias), {**BASE, **changed}
    assert SPEC.why_illegal(config, problem, SM90) is None
    inputs = gemm_inputs(problem, torch.device("cpu"))
    machine = Machine(
        monkeypatch,
        [masked_gemm_narrow, masked_gemm_stream],
        {"w0_desc", "w1_desc", "ws_ptr", "bias_ptr"},
    )
    m, n, _ = sizes
    splits = config["SPLIT_K"]
    weight, x_q = inputs["weight"], inputs["x_q"]
    out = torch.full((m, n + 3), 7.0, dtype=inputs["x"].dtype)[:, :n]
    part = torch.full((splits, m, n), 7, dtype=torch.int32)
    strides = (weight.stride(0), x_q.stride(0), out.stride(0))
    run = masked_gemm_narrow.bind(sizes, bias, strides, config)
    ws, xs = inputs["weight_scale"], inputs["x_scale"]
    run(weight, weight, x_q, ws, xs, inputs.get("bias", ws), out, part)
    assert bool((out._base[:, n:] == 7.0).all())
    got = out
    if splits > 1:
        y = part.sum(0).float() * xs[:, None] * ws
        got = (y + inputs["bias"].float() if bias else y).to(out.dtype)
    assert torch.equal(got, tkernels.reference.masked_gemm(**inputs))
    assert (machine.triggers > 0) is config["PDL"]


# ---- what the compiler makes of it -------------------------------------------------------------

# In a process of its own: here Triton is an interpreter, there it must compile.
CHILD = r"""
import dataclasses, json, re, sys
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from tkernels import offline
from tkernels.masked_gemm_cases import gemm_problem
from tkernels.ops.masked_gemm import SPEC

base, cases = json.loads(sys.stdin.read())
found = []
for m, bias, changed in cases:
    problem = gemm_problem(m, 400, 4096, bias=bias)
    with FakeTensorMode(), offline.record_launches() as launches:
        SPEC.launch(
            **SPEC.make_inputs(problem, torch.device("cpu")), config={**base, **changed})
    ptx = offline.compiled_cuda(launches[0], 90).asm["ptx"]
    found.append({
        **dataclasses.asdict(offline.compile_cuda(launches[0], 90)),
        "case": [m, bias, changed], "names": [x.fn.__name__ for x in launches],
        "programs": launches[0].grid[0],
        "int8": re.findall(r"wgmma[.]mma_async\S*m64n(\d+)k32[.]s32[.]s8[.]s8", ptx),
        "events": re.findall(
            r"griddepcontrol[.]\w+|cp[.]async[.]bulk[.]tensor[.]3d|(?:ld|st)[.]global", ptx)})
print(json.dumps(found))
"""

COMPILED: list[Any] = [
    (16, True, {}),
    (16, False, {"BLOCK_N": 32, "BLOCK_K": 512, "num_stages": 8}),
    (16, False, {"BLOCK_N": 64, "SPLIT_K": 2, "PDL": False}),
    (64, True, {"BLOCK_M": 64, "BLOCK_N": 192, "num_stages": 3}),
    (8, False, {"BLOCK_M": 8, "BLOCK_N": 256, "BLOCK_K": 128}),
]


@pytest.mark.slow
def test_compiled_for_sm90() -> None:
    found = json.loads(lines_of(CHILD, given=json.dumps([BASE, COMPILED]))[-1])
    assert len(found) == len(COMPILED)
    for case in found:
        m, _, changed = case["case"]
        config = {**BASE, **changed}
        assert SPEC.why_illegal(config, gemm_problem(m, 400, 4096), SM90) is None, case
        splits, stages = config["SPLIT_K"], config["num_stages"]
        adding = ["_add_int8_rows_kernel"] * (splits > 1)
        assert case["names"] == ["_masked_gemm_narrow_kernel", *adding], case
        assert case["programs"] == -(-400 // config["BLOCK_N"]) * splits
        assert case["spill_bytes"] == 0, case
        shared = masked_gemm_narrow.shared_bytes(config)
        assert shared - 2048 <= case["shared_bytes"] <= shared, case
        # As narrow as there are rows; a step's products once in the program.
        parts = [n for n in masked_gemm_narrow.PARTS[config["BLOCK_N"]] if n]
        count = sum(4 * (config["BLOCK_K"] // 128) * max(1, n // 64) for n in parts)
        assert case["int8"] == [str(config["BLOCK_M"])] * count, case
        # Weights of all stages, and no x, are asked for ahead of the wait: a copy a part each.
        events = case["events"]
        copies = "cp.async.bulk.tensor.3d"
        assert events.count(copies) == (stages + 1) * (len(parts) + 1), case
        if config["PDL"]:
            before = events[: events.index("griddepcontrol.wait")]
            assert events.index("griddepcontrol.launch_dependents") == 0, case
            assert before.count(copies) == stages * len(parts), case
            assert "st.global" not in before, case
        else:
            assert not {e for e in events if e.startswith("griddepcontrol")}, case


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
            "BLOCK_M": rng.choice((8, 16, 32, 64)),
            "BLOCK_N": rng.choice(tuple(masked_gemm_narrow.PARTS)),
            "BLOCK_K": rng.choice((128, 256, 512)),
            "SPLIT_K": rng.choice((1, 1, 2, 3, 8)),
            "PDL": rng.random() < 0.7,
            "num_stages": rng.choice((2, 3, 5, 9)),
        }
        if SPEC.why_illegal(config, problem, device.current()) is None:
            return config


@gpu
@needs_sm90
@pytest.mark.parametrize("seed", range(12))
def test_random_ones_equal_the_reference_bit_for_bit(seed: int, dev: torch.device) -> None:
    """Sums are exact, and what follows is rounded step by step."""
    rng = random.Random(seed)
    for _ in range(8):
        problem = gemm_problem(
            rng.choice((1, 7, 16, 17, 33, 64, 65, 150)),
            rng.choice((1, 15, 48, 96, 97, 200, 1000, 5000)),
            128 * rng.choice((1, 3, 8, 25, 64, 97)),
            rng.choice((BF16, FP16)),
            bias=rng.random() < 0.5,
            quantized=rng.random() < 0.7,
        )
        config = random_config(rng, problem)
        inputs = gemm_inputs(problem, dev)
        got = SPEC.launch(**inputs, config=config)
        expected = tkernels.reference.masked_gemm(**inputs)
        assert torch.equal(got, expected), f"{problem} with {config}"


WAYS: dict[str, Config] = {
    "plain": {},
    "small": {"BLOCK_N": 32, "num_stages": 2},
    "split": {"BLOCK_N": 64, "SPLIT_K": 2, "BLOCK_K": 512},
    "no part": {"SPLIT_K": 8, "num_stages": 2},  # some have no columns
}
each_way = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)


@gpu
@needs_sm90
@pytest.mark.parametrize("high_weight", [False, True], ids=["w8a16", "w16a16"])
@pytest.mark.parametrize(
    "sizes", [(1, 200, 1152), (16, 12288, 4096), (40, 300, 4096), (64, 96, 12288)]
)
@pytest.mark.parametrize("stages", [0, 2], ids=["default", "two stages"])
def test_each_row_has_the_bits_of_its_own_way(
    sizes: tuple[int, int, int], high_weight: bool, stages: int, dev: torch.device
) -> None:
    """As without a mask where that is clear, as with ``high=True`` where set; in a graph too."""
    problem = gemm_problem(*sizes, path="masked", high_weight=high_weight, bias=True)
    inputs = {n: t for n, t in gemm_inputs(problem, dev).items() if n not in ("mask", "row_group")}
    config = SPEC.default_config(problem, device.current())
    assert config["variant"] == "narrow"
    config = {**config, "num_stages": stages or config["num_stages"]}
    low = SPEC.launch(**inputs, config=config)
    assert torch.equal(low, tkernels.reference.masked_gemm(**inputs))
    high = SPEC.launch(**inputs, high=True, config=config)
    assert not torch.equal(low, high)
    group = torch.arange(sizes[0], dtype=torch.int32, device=dev) % 23
    mask, out = torch.zeros(1, dtype=torch.int64, device=dev), torch.empty_like(low)
    call = {**inputs, "mask": mask, "row_group": group, "out": out, "config": config}
    SPEC.launch(**call)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        SPEC.launch(**call)
    for bits in (0, -1, 0b10011000000100010010001, 0):
        mask.fill_(bits)
        out.fill_(torch.nan)
        graph.replay()
        chosen = ((bits >> group.cpu()) & 1).bool().to(dev)
        assert torch.equal(out, torch.where(chosen[:, None], high, low))


@gpu
@needs_sm90
@each_way
def test_what_is_beside_the_matrices_is_not_read(way: Config, dev: torch.device) -> None:
    """Views of wider matrices, other codes in the columns and rows that are no part of them."""
    m, n, k = 11, 2197, 1152  # ends within a step
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
@pytest.mark.parametrize(
    ("n", "k", "changed"),
    [
        (12288, 4096, {"num_stages": 7}),
        (4096, 12288, {"BLOCK_N": 32, "BLOCK_K": 512, "num_stages": 8}),
        (4096, 12288, {"BLOCK_N": 64, "BLOCK_K": 512, "SPLIT_K": 2}),
    ],
)
@pytest.mark.parametrize("m", [5, 16])
def test_large_ones(m: int, n: int, k: int, changed: Config, dev: torch.device) -> None:
    inputs = gemm_inputs(gemm_problem(m, n, k), dev)
    expected = tkernels.reference.masked_gemm(**inputs)
    for _ in range(5):
        assert torch.equal(SPEC.launch(**inputs, config={**BASE, **changed}), expected)


@gpu
@needs_sm90
@each_way
def test_a_chain_is_what_it_is_one_by_one(way: Config, dev: torch.device) -> None:
    """Each product reads what the one before writes, NaN until then; no bit depends on PDL."""
    size, steps = 2048, 12
    inputs = gemm_inputs(gemm_problem(16, size, size), dev)
    given = {"weight": inputs["weight"], "weight_scale": inputs["weight_scale"]}

    def chain(pdl: bool) -> torch.Tensor:
        rows = torch.full((steps + 1, 16, size), torch.nan, dtype=BF16, device=dev)
        rows[0] = inputs["x"]
        for i in range(steps):
            config = {**BASE, **way, "PDL": pdl}
            SPEC.launch(rows[i], **given, out=rows[i + 1], config=config)
        return rows

    expected = chain(False)
    assert bool(expected.isfinite().all())
    for _ in range(5):
        assert torch.equal(chain(True), expected)


@gpu
@needs_sm90
@pytest.mark.parametrize("name", ["x_q", "weight", "weight_scale", "x_scale"])
@pytest.mark.parametrize("splits", [1, 3])
def test_it_reads_whatever_lies_at_odd_addresses(name: str, splits: int, dev: torch.device) -> None:
    inputs = gemm_inputs(gemm_problem(5, 40, 1024, bias=True), dev)
    kept = inputs[name]
    step = max(1, 4 // kept.element_size())
    moved = torch.zeros(kept.numel() + step, dtype=kept.dtype, device=dev)[step:]
    changed = {**inputs, name: moved.view(kept.shape).copy_(kept)}
    assert changed[name].data_ptr() % 16
    for config in ({**BASE, "SPLIT_K": splits}, {**BASE, "SPLIT_K": splits, "BLOCK_K": 512}):
        config["num_stages"] = 3
        got = SPEC.launch(**changed, config=config)
        assert torch.equal(got, tkernels.reference.masked_gemm(**inputs))
