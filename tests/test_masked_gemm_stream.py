"""The body of masked_gemm for up to 64 rows: refusals, what the compiler makes of it, results.

Without a GPU it is compiled for sm_90.
"""

from __future__ import annotations

import json
import random
import types
from typing import Any

import pytest
import torch

import tkernels
from tests.compiled_for import lines_of
from tests.plain_gluon import Machine
from tkernels import device, masked_gemm_hopper, masked_gemm_stream
from tkernels.masked_gemm_cases import gemm_inputs, gemm_problem
from tkernels.ops.masked_gemm import SPEC, runs_high_ref
from tkernels.registry import Config, Problem
from tkernels.testing import assert_close

SM90 = device.sm_facts(90)
BF16, FP16 = torch.bfloat16, torch.float16
BASE: Config = {
    "variant": "stream",
    "BLOCK_M": 64,
    "BLOCK_N": 96,
    "BLOCK_K": 128,
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
        (gemm_problem(64, 48, 4096), None),
        (gemm_problem(64, 48, 4096, path="masked"), None),
        (gemm_problem(64, 48, 4096, path="high", high_weight=True), None),
        (gemm_problem(64, 48, 4100), "variant stream needs rows that divide by 16 bytes"),
    ],
)
def test_why_unfit(problem: Problem, why: str | None) -> None:
    said = masked_gemm_stream.why_unfit(problem, SM90)
    assert said is None if why is None else why in str(said)


@pytest.mark.parametrize(
    ("sizes", "more", "splits"),
    [
        ((64, 12288, 4096), {}, 1),
        ((17, 4096, 12304), {}, 3),  # no multiple of 128 columns, as the narrow body needs
        ((64, 6144, 4112), {}, 2),
        ((64, 6144, 4096), {}, None),  # the narrow one's, as parts would have to be added
        ((32, 12288, 4096), {}, None),
        ((16, 12288, 4112), {}, None),  # another body's
        ((65, 12288, 4096), {}, None),
        ((64, 24576, 4096), {}, None),  # more tiles than cores
        ((64, 1024, 2048), {}, None),  # too few programs
        ((64, 12288, 4096), {"path": "masked", "groups": "none"}, None),  # not timed
        ((64, 12288, 4096), {"path": "high"}, None),
    ],
)
def test_when_it_is_the_default(
    sizes: tuple[int, int, int], more: dict[str, Any], splits: int | None
) -> None:
    problem = gemm_problem(*sizes, **more)
    chosen = SPEC.default_config(problem, SM90)
    assert SPEC.why_illegal(chosen, problem, SM90) is None
    assert (chosen["variant"] == "stream") is (splits is not None)
    assert splits in (None, chosen["SPLIT_K"])


def test_why_unfit_elsewhere() -> None:
    for dev in (device.sm_facts(80), device.sm_facts(100), device.ascend_facts()):
        problem = gemm_problem(64, 48, 4096)
        said = str(masked_gemm_stream.why_unfit(problem, dev))
        assert f"variant stream needs an sm90 device, got {dev.arch}" in said
        assert SPEC.default_config(problem, dev)["variant"] != "stream"
        assert "stream" not in SPEC.space(dev)["variant"]
        assert 96 not in SPEC.space(dev)["BLOCK_N"]


@pytest.mark.parametrize(
    ("path", "changed", "why"),
    [
        ("int8", {"num_stages": 11}, None),
        ("int8", {"BLOCK_N": 192, "num_stages": 6, "SPLIT_K": 64}, None),
        ("int8", {"BLOCK_M": 16}, "variant stream has BLOCK_M 64"),
        ("int8", {"BLOCK_N": 32}, "BLOCK_N of (64, 96, 128, 192, 256), got 32"),
        ("int8", {"BLOCK_K": 512}, "BLOCK_K of (128, 256), got 512"),
        ("int8", {"GROUP_M": 8}, "GROUP_M 1"),
        ("int8", {"SWAP": True}, "SWAP False"),
        ("int8", {"num_warps": 8}, "num_warps 4"),
        ("int8", {"programs_per_core": 2}, "programs_per_core 0"),
        ("int8", {"SPLIT_K": 0}, "SPLIT_K must be 1 to 64, got 0"),
        ("int8", {"num_stages": 1}, "num_stages of 2 or more, got 1"),
        ("int8", {"num_stages": 12}, "bytes of shared memory"),
        ("masked", {"num_stages": 10}, None),
        ("masked", {"num_stages": 11}, "bytes of shared memory"),
    ],
)
def test_why_illegal(path: str, changed: Config, why: str | None) -> None:
    problem = gemm_problem(64, 12288, 4096, path=path)
    said = SPEC.why_illegal({**BASE, **changed}, problem, SM90)
    assert said is None if why is None else why in str(said)


def test_tiles_are_their_parts() -> None:
    for outputs, parts in masked_gemm_stream.PARTS.items():
        assert sum(parts) == outputs
        assert all(part & (part - 1) == 0 for part in parts)
    assert set(masked_gemm_stream.PARTS) <= set(SPEC.space(SM90)["BLOCK_N"])


@pytest.mark.parametrize(("turn", "count"), [(0, 7), (3, 7), (6, 7), (0, 1)])
def test_a_program_goes_round_all_its_columns(
    turn: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``_column`` as plain Python."""
    plain = types.SimpleNamespace(where=lambda c, a, b: a if c else b)
    monkeypatch.setattr(masked_gemm_stream, "gl", plain)
    starts = [masked_gemm_stream._column.fn(j, turn, count, 1000, 128) for j in range(count)]
    assert starts[0] == 1000 + turn * 128
    assert sorted(starts) == [1000 + 128 * j for j in range(count)]


# ---- results, as plain Python ------------------------------------------------------------------

# (rows, outputs, columns), config
PLAIN: list[Any] = [
    ((64, 200, 1168), {}),
    ((16, 96, 640), {"num_stages": 11, "PDL": False}),  # stages that no step needs
    ((70, 250, 1040), {"BLOCK_N": 192, "SPLIT_K": 3, "num_stages": 2}),
    ((5, 130, 528), {"BLOCK_N": 64, "BLOCK_K": 256, "SPLIT_K": 5}),  # a part without columns
    ((33, 300, 784), {"BLOCK_N": 256, "BLOCK_K": 256, "num_stages": 2}),
    ((64, 128, 16), {"BLOCK_N": 128}),
]


def run_plainly(
    problem: Problem, config: Config, monkeypatch: pytest.MonkeyPatch
) -> tuple[torch.Tensor, torch.Tensor, Machine]:
    """(what the body computes, without adding parts of K: these; what was expected; the machine)"""
    inputs = gemm_inputs(problem, torch.device("cpu"))
    machine = Machine(
        monkeypatch,
        [masked_gemm_stream, masked_gemm_hopper],
        {"w0_desc", "w1_desc", "hw0_desc", "hw1_desc", "ws_ptr", "bias_ptr"},
    )
    m, n, k, splits = problem["m"], problem["n"], problem["k"], config["SPLIT_K"]
    x, weight, mask = inputs["x"], inputs["weight"], inputs.get("mask")
    hw = inputs.get("high_weight", weight)
    path = problem["path"]
    x_q, xs = inputs.get("x_q", x), inputs.get("x_scale", inputs["weight_scale"])
    out = torch.full((m, n + 3), 7.0, dtype=x.dtype)[:, :n]
    part = torch.full((splits, m, n), 7, dtype=torch.int32)
    facts = {
        "LOW": path != "high",
        "HIGH": path != "int8",
        "HIGH_SCALE": not problem["high_weight"],
        "HAS_BIAS": "bias" in inputs,
        "HAS_GROUP": "row_group" in inputs,
        "ONE_WORD": mask is not None and len(mask) == 1,
    }
    strides = tuple(t.stride(0) for t in (weight, x_q, hw, x, out))
    words = 0 if mask is None else len(mask)
    run = masked_gemm_stream.bind((m, n, k), facts, strides, words, config)
    w, x_q = (weight, x_q) if path != "high" else (hw, x)
    ws = inputs["weight_scale"]
    more = [ws if t is None else t for t in (inputs.get("bias"), mask, inputs.get("row_group"))]
    run(w, w, x_q, hw, hw, x, ws, xs, *more, out, part)
    assert bool((out._base[:, n:] == 7.0).all())
    expected = tkernels.reference.masked_gemm(**inputs)
    return (out if splits == 1 else part), expected, machine


@pytest.mark.skipif(not device.is_there(masked_gemm_stream.gl), reason="this triton has no Gluon")
@pytest.mark.parametrize(("sizes", "changed"), PLAIN)
def test_int8_as_plain_python(
    sizes: tuple[int, int, int], changed: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem, config = gemm_problem(*sizes, bias=True), {**BASE, **changed}
    assert SPEC.why_illegal(config, problem, SM90) is None
    got, expected, machine = run_plainly(problem, config, monkeypatch)
    if config["SPLIT_K"] > 1:
        inputs = gemm_inputs(problem, torch.device("cpu"))
        y = got.sum(0).float() * inputs["x_scale"][:, None] * inputs["weight_scale"]
        got = (y + inputs["bias"].float()).to(expected.dtype)
    assert torch.equal(got, expected)
    assert (machine.triggers > 0) is config["PDL"]


@pytest.mark.skipif(not device.is_there(masked_gemm_stream.gl), reason="this triton has no Gluon")
@pytest.mark.parametrize(
    ("sizes", "changed"),
    [
        ((64, 200, 1168), {"num_stages": 3}),
        ((70, 250, 1040), {"BLOCK_N": 192, "BLOCK_K": 256, "SPLIT_K": 2, "num_stages": 2}),
    ],
)
@pytest.mark.parametrize("groups", ["mixed", "none", "all", "layer", "high"])
@pytest.mark.parametrize("high_weight", [False, True])
def test_masks_as_plain_python(
    sizes: tuple[int, int, int], changed: Config, groups: str, high_weight: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    how = {"path": "high"} if groups == "high" else {"path": "masked", "groups": groups}
    problem = gemm_problem(*sizes, bias=True, high_weight=high_weight, words=2, **how)
    config = {**BASE, **changed}
    assert SPEC.why_illegal(config, problem, SM90) is None
    got, expected, _ = run_plainly(problem, config, monkeypatch)
    if config["SPLIT_K"] > 1:
        inputs = gemm_inputs(problem, torch.device("cpu"))
        high = got.view(torch.float32).sum(0)
        high = high if high_weight else high * inputs["weight_scale"]
        if groups != "high":
            low = got.sum(0).float() * inputs["x_scale"][:, None] * inputs["weight_scale"]
            high = torch.where(_runs_high(inputs)[:, None], high, low)
        got = (high + inputs["bias"].float()).to(expected.dtype)
    assert_close(got, expected.float(), what=f"{problem}")


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
for m, k, more, changed in cases:
    problem = gemm_problem(m, 400, k, **more)
    with FakeTensorMode(), offline.record_launches() as launches:
        SPEC.launch(
            **SPEC.make_inputs(problem, torch.device("cpu")), config={**base, **changed})
    ptx = offline.compiled_cuda(launches[0], 90).asm["ptx"]
    found.append({
        **dataclasses.asdict(offline.compile_cuda(launches[0], 90)),
        "case": [m, k, more, changed], "names": [x.fn.__name__ for x in launches],
        "programs": launches[0].grid[0],
        "int8": re.findall(r"wgmma[.]mma_async\S*m64n(\d+)k32[.]s32[.]s8[.]s8", ptx),
        "bf16": re.findall(r"wgmma[.]mma_async\S*m64n(\d+)k16[.]f32[.]bf16[.]bf16", ptx),
        "events": re.findall(
            r"griddepcontrol[.]\w+|cp[.]async[.]bulk[.]tensor|wgmma[.]wait_group|"
            r"(?:ld|st)[.]global", ptx)})
print(json.dumps(found))
"""

COMPILED: list[Any] = [
    (64, 4096, {"bias": True}, {}),
    (16, 4096, {}, {"num_stages": 11, "PDL": False}),
    (64, 4096, {}, {"BLOCK_N": 192, "BLOCK_K": 256, "num_stages": 3, "SPLIT_K": 2}),
    (64, 4096, {"bias": True}, {"BLOCK_N": 256}),
    (64, 4096, {"path": "masked"}, {"BLOCK_N": 192, "num_stages": 3}),
    (64, 4096, {"path": "masked"}, {"SPLIT_K": 3}),
    (64, 4096, {"path": "masked", "high_weight": True}, {}),
    (64, 4096, {"path": "high"}, {"BLOCK_N": 128}),
]


@pytest.mark.slow
def test_compiled_for_sm90() -> None:
    found = json.loads(lines_of(CHILD, given=json.dumps([BASE, COMPILED]))[-1])
    assert len(found) == len(COMPILED)
    for case in found:
        m, k, more, changed = case["case"]
        config, problem = {**BASE, **changed}, gemm_problem(m, 400, k, **more)
        assert SPEC.why_illegal(config, problem, SM90) is None, case
        path, splits, stages = problem["path"], config["SPLIT_K"], config["num_stages"]
        adding = "_add_int8_rows_kernel" if path == "int8" else "_add_parts_kernel"
        assert case["names"] == ["_masked_gemm_stream_kernel", *[adding] * (splits > 1)], case
        assert case["programs"] == -(-400 // config["BLOCK_N"]) * splits
        assert case["spill_bytes"] == 0, case
        shared = masked_gemm_stream.shared_bytes(config, problem)
        assert shared - 10240 <= case["shared_bytes"] <= shared, case
        # A step's products once in the program, each as wide as its part of a tile.
        parts = [n for n in masked_gemm_stream.PARTS[config["BLOCK_N"]] if n]
        panels = config["BLOCK_K"] // 128
        if path == "high":
            assert case["int8"] == [], case
        else:
            narrow = [min(n, 128) for n in parts for _ in range(4 * panels * max(1, n // 128))]
            assert sorted(map(int, case["int8"])) == sorted(narrow), case
        if path == "int8":
            assert case["bf16"] == [], case
        else:
            assert sorted(map(int, case["bf16"])) == sorted(parts * 4 * panels), case
        # The next kernel may start at once. Weights of all stages, and no x, are asked for ahead of
        # the wait.
        events = case["events"]
        if config["PDL"]:
            wait = events.index("griddepcontrol.wait")
            before = events[:wait]
            assert events.index("griddepcontrol.launch_dependents") == 0, case
            assert before.count("cp.async.bulk.tensor") == stages * panels * len(parts), case
            assert "st.global" not in before, case
            assert events[wait:].count("cp.async.bulk.tensor") >= stages * panels, case
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
            "BLOCK_N": rng.choice(tuple(masked_gemm_stream.PARTS)),
            "BLOCK_K": rng.choice((128, 128, 256)),
            "SPLIT_K": rng.choice((1, 1, 2, 3, 8)),
            "PDL": rng.random() < 0.7,
            "num_stages": rng.choice((2, 3, 5, 9)),
        }
        if SPEC.why_illegal(config, problem, device.current()) is None:
            return config


def random_problem(rng: random.Random, path: str, **more: Any) -> Problem:
    return gemm_problem(
        rng.choice((1, 7, 16, 17, 33, 64, 65, 150)),
        rng.choice((1, 15, 48, 96, 97, 200, 1000, 5000)),
        16 * rng.choice((1, 3, 8, 25, 64, 97, 256)),
        rng.choice((BF16, FP16)),
        path=path,
        bias=rng.random() < 0.5,
        **more,
    )


@gpu
@needs_sm90
@pytest.mark.parametrize("seed", range(12))
def test_random_int8_equals_the_reference_bit_for_bit(seed: int, dev: torch.device) -> None:
    """Sums are exact, and what follows is rounded step by step."""
    rng = random.Random(seed)
    for _ in range(8):
        problem = random_problem(rng, "int8", quantized=rng.random() < 0.7)
        config = random_config(rng, problem)
        inputs = gemm_inputs(problem, dev)
        got = SPEC.launch(**inputs, config=config)
        expected = tkernels.reference.masked_gemm(**inputs)
        assert torch.equal(got, expected), f"{problem} with {config}"


@gpu
@needs_sm90
@pytest.mark.parametrize("seed", range(8))
def test_each_row_of_a_mask_is_what_it_is_alone(seed: int, dev: torch.device) -> None:
    """Low rows as without a mask, high ones as with ``high=True``, whatever the others do."""
    rng = random.Random(100 + seed)
    for _ in range(6):
        more = {"high_weight": rng.random() < 0.5, "words": rng.choice((1, 3))}
        groups = rng.choice(("mixed", "mixed", "none", "all", "layer"))
        problem = random_problem(rng, "masked", groups=groups, **more)
        config = random_config(rng, problem)
        inputs = gemm_inputs(problem, dev)
        what = f"{problem} with {config}"
        plain = {name: t for name, t in inputs.items() if name not in ("mask", "row_group")}
        low = SPEC.launch(**plain, config=config)
        high = SPEC.launch(**plain, high=True, config=config)
        assert torch.equal(low, tkernels.reference.masked_gemm(**plain)), what
        assert_close(high, tkernels.reference.masked_gemm(**plain, high=True).float(), what=what)
        runs_high = _runs_high(inputs)
        got = SPEC.launch(**inputs, config=config)
        assert torch.equal(got, torch.where(runs_high[:, None], high, low)), what


def _runs_high(inputs: dict[str, Any]) -> torch.Tensor:
    return runs_high_ref(inputs["mask"], inputs.get("row_group"), len(inputs["x"]))


WAYS: dict[str, Config] = {
    "plain": {},
    "few stages": {"num_stages": 2, "BLOCK_N": 64},
    "split": {"BLOCK_N": 192, "SPLIT_K": 3, "num_stages": 3},
    "panels": {"BLOCK_K": 256, "SPLIT_K": 2, "num_stages": 4},
    "no part": {"BLOCK_K": 256, "SPLIT_K": 8, "num_stages": 2},  # some have no columns
}
each_way = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)


@gpu
@needs_sm90
@each_way
def test_what_is_beside_the_matrices_is_not_read(way: Config, dev: torch.device) -> None:
    """Views of wider matrices, other codes in the columns and rows that are no part of them."""
    m, n, k = 11, 2197, 1168  # ends within a step
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
def test_what_no_row_needs_may_be_nan(dev: torch.device) -> None:
    inputs = gemm_inputs(
        gemm_problem(64, 200, 512, path="masked", groups="none", high_weight=True), dev
    )
    expected = SPEC.launch(**inputs, config=BASE)
    for name in ("x", "high_weight"):
        inputs[name] = torch.full_like(inputs[name], torch.nan)
    assert torch.equal(SPEC.launch(**inputs, config=BASE), expected)


@gpu
@needs_sm90
@pytest.mark.parametrize("m", [16, 64])
@pytest.mark.parametrize(("n", "k", "splits"), [(12288, 4096, 1), (4096, 12288, 3)])
@pytest.mark.parametrize("stages", [5, 11])
def test_large_ones(m: int, n: int, k: int, splits: int, stages: int, dev: torch.device) -> None:
    inputs = gemm_inputs(gemm_problem(m, n, k), dev)
    config = {**BASE, "SPLIT_K": splits, "num_stages": stages}
    expected = tkernels.reference.masked_gemm(**inputs)
    for _ in range(5):
        assert torch.equal(SPEC.launch(**inputs, config=config), expected)


@gpu
@needs_sm90
@each_way
def test_a_chain_is_what_it_is_one_by_one(way: Config, dev: torch.device) -> None:
    """Each product reads what the one before writes, NaN until then; no bit depends on PDL."""
    size, steps = 2048, 12
    inputs = gemm_inputs(gemm_problem(64, size, size), dev)
    given = {"weight": inputs["weight"], "weight_scale": inputs["weight_scale"]}

    def chain(pdl: bool) -> torch.Tensor:
        rows = torch.full((steps + 1, 64, size), torch.nan, dtype=BF16, device=dev)
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
    for config in ({**BASE, "SPLIT_K": splits}, {**BASE, "SPLIT_K": splits, "BLOCK_K": 256}):
        got = SPEC.launch(**changed, config=config)
        assert torch.equal(got, tkernels.reference.masked_gemm(**inputs))
