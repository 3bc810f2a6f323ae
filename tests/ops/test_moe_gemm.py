"""What is special to moe_gemm: rows of each expert, what is never read, bits, far addresses."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import tkernels
from tkernels import device
from tkernels.moe_gemm_cases import moe_gemm_inputs, moe_gemm_problem
from tkernels.offline import record_launches
from tkernels.ops.moe_gemm import SPEC, most_tiles
from tkernels.registry import Config
from tkernels.testing import assert_close, guarded, poisoned_memory

pytestmark = pytest.mark.thin(3)

T, E, TOP_K, N, K = 9, 5, 2, 48, 64
INTERPRETED = device.KIND == "cpu"


def problem_of(**more: Any) -> dict[str, Any]:
    sizes = {"tokens": T, "experts": E, "k_choices": TOP_K, "n": N, "k": K, "dtype": torch.float16}
    return moe_gemm_problem(**{**sizes, **more})


def inputs_of(dev: torch.device, **more: Any) -> dict[str, Any]:
    return moe_gemm_inputs(problem_of(**more), dev)


def dispatched(ids: list[list[int]], experts: int, dev: torch.device) -> dict[str, torch.Tensor]:
    """What ``moe_dispatch`` makes of the experts of tokens; numbers past the last are elsewhere."""
    everywhere = max(experts, 1 + max(map(max, ids)))
    here = torch.arange(everywhere, dtype=torch.int32, device=dev)
    here[experts:] = -1
    offsets, rows, _ = tkernels.reference.moe_dispatch(
        torch.tensor(ids, dtype=torch.int32, device=dev), num_experts=everywhere, expert_map=here,
        num_local_experts=experts,
    )  # fmt: skip
    return {"expert_offsets": offsets, "sorted_ids": rows}


def config_of(problem: dict[str, Any], **changes: Any) -> Config:
    """The default, tiled as is said; what a device has none of is left out."""
    default = SPEC.default_config(problem, device.current())
    space = SPEC.space(device.current())
    config = {**default, **{n: v for n, v in changes.items() if n in space}}
    if config["variant"] not in space["variant"]:
        config["variant"] = "portable"
    assert SPEC.why_illegal(config, problem, device.current()) is None, config
    return config


def run(**inputs: Any) -> torch.Tensor:
    """Results that nothing was written to would be NaN."""
    with poisoned_memory():
        return tkernels.moe_gemm(**inputs)


def assert_right(got: torch.Tensor, inputs: dict[str, Any], rows: int | None = None) -> None:
    """Equal to the reference in fp32, in the first ``rows`` rows."""
    precise = {
        n: v.float() if getattr(v, "dtype", None) == torch.float16 else v for n, v in inputs.items()
    }
    precise.pop("config", None)
    truth = tkernels.reference.moe_gemm(**precise)
    assert_close(got[:rows], truth[:rows], what="moe_gemm")


SMALL = {"BLOCK_M": 16, "BLOCK_N": 16, "BLOCK_K": 32, "num_stages": 2, "variant": "portable"}
WAYS: dict[str, dict[str, Any]] = {
    "default": {},
    "small": SMALL,
    "swapped": {**SMALL, "SWAP": True},
    "tma": {**SMALL, "variant": "tma", "BLOCK_N": 32},
    "persistent": {**SMALL, "programs_per_core": 1},
}
each_way = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
each_product = pytest.mark.parametrize("first", [True, False], ids=["gate_up", "down"])
FORMATS: dict[str, dict[str, Any]] = {
    "w16": {},
    "w8a8": {"int8": True, "path": "int8"},
    "w8a16": {"int8": True},
}
each_format = pytest.mark.parametrize("kind", FORMATS.values(), ids=FORMATS)


# ---- which rows --------------------------------------------------------------------------------


@each_way
@each_product
def test_rows_of_no_expert_are_left_alone(
    way: dict[str, Any], first: bool, dev: torch.device
) -> None:
    """Whatever stands in sorted_ids there, and round out."""
    problem = problem_of(first=first)
    ids = [[t % 9, (t + 4) % 9] for t in range(T)]  # experts 5 to 8 live elsewhere
    inputs = {**moe_gemm_inputs(problem, dev), **dispatched(ids, E, dev)}
    there = int(inputs["expert_offsets"][-1])
    assert E < there < T * TOP_K
    strays = torch.tensor([-1, 2**31 - 1, -(2**31), T * TOP_K], device=dev).int()
    inputs["sorted_ids"][there:] = strays.repeat(5)[: T * TOP_K - there]
    out = guarded(torch.full((T * TOP_K, N // 2 if first else N), 77.0, device=dev).half())
    config = config_of(problem, **way)
    got = run(**inputs, out=out.tensor, config=config)
    assert got is out.tensor
    out.check("out")
    assert bool((got[there:] == 77).all())
    assert_right(got, inputs, there)


@each_product
def test_numbers_of_no_assignment_spoil_their_rows_alone(first: bool, dev: torch.device) -> None:
    """Nothing is read where they would lie."""
    inputs = inputs_of(dev, first=first)
    right = run(**inputs)
    inputs["sorted_ids"][[0, 3]] = torch.tensor([2**30, -5], device=dev).int()
    got = run(**inputs)
    others = [p for p in range(len(right)) if p not in (0, 3)]
    assert torch.equal(got[others], right[others])


@each_product
@pytest.mark.parametrize(("experts", "choices"), [(60, 4), (160, 3), (1, 1), (5, 5), (3, 1)])
def test_numbers_of_experts(experts: int, choices: int, first: bool, dev: torch.device) -> None:
    inputs = inputs_of(dev, tokens=4, experts=experts, k_choices=choices, first=first)
    assert_right(run(**inputs), inputs)


@each_way
@pytest.mark.parametrize("expert", [0, 2, E - 1])
def test_all_on_one_expert(expert: int, way: dict[str, Any], dev: torch.device) -> None:
    """More rows than a tile has, for one; for the others, whose weights are NaN, none."""
    problem = problem_of(tokens=37, k_choices=1)
    inputs = {**moe_gemm_inputs(problem, dev), **dispatched([[expert]] * 37, E, dev)}
    inputs["weight"][[e for e in range(E) if e != expert]] = math.nan
    assert_right(run(**inputs, config=config_of(problem, **way)), inputs)


@each_format
@each_product
def test_weights_of_experts_without_rows_are_not_read(
    kind: dict[str, Any], first: bool, dev: torch.device
) -> None:
    inputs = inputs_of(dev, first=first, **kind)
    inputs |= dispatched([[1, 3] if t % 2 else [3, 1] for t in range(T)], E, dev)
    expected = run(**inputs)
    assert_right(expected, inputs)
    idle = [0, 2, 4]
    if kind:
        inputs["weight_scale"][idle] = math.nan
        inputs["weight"][idle] = 99
    else:
        inputs["weight"][idle] = math.nan
    assert torch.equal(run(**inputs), expected)


def test_no_tokens(dev: torch.device) -> None:
    inputs = inputs_of(dev)
    none = {
        "x": inputs["x"][:0],
        "sorted_ids": inputs["sorted_ids"][:0],
        "expert_offsets": torch.zeros_like(inputs["expert_offsets"]),
    }
    out = torch.empty(0, N // 2, dtype=torch.float16, device=dev)
    assert tkernels.moe_gemm(**{**inputs, **none}, out=out) is out
    assert tkernels.moe_gemm(**{**inputs, **none}).shape == (0, N // 2)


def test_no_token_for_these_experts(dev: torch.device) -> None:
    inputs = inputs_of(dev) | dispatched([[7, 8]] * T, E, dev)
    out = torch.full((T * TOP_K, N // 2), 77.0, dtype=torch.float16, device=dev)
    assert bool((run(**inputs, out=out) == 77).all())


@pytest.mark.parametrize("block_m", [16, 144])
def test_tiles_are_never_more_than_programs(block_m: int) -> None:
    """``most_tiles`` is reached, and not exceeded, by rows dealt in any way."""
    for rows in range(1, 60):
        for experts in range(1, 6):
            few = min(rows, experts)
            worst = [1] * (few - 1) + [rows - few + 1]
            tiles = [-(-n // block_m) for n in worst]
            assert most_tiles(rows, experts, block_m) == sum(tiles)
            even = [rows // experts + (e < rows % experts) for e in range(experts)]
            assert sum(-(-n // block_m) for n in even) <= sum(tiles)


# ---- which numbers -----------------------------------------------------------------------------


@each_way
@each_product
@each_format
def test_bad_numbers_stay_in_their_rows(
    kind: dict[str, Any], first: bool, way: dict[str, Any], dev: torch.device
) -> None:
    problem = problem_of(first=first, quantized=False, **kind)
    inputs = moe_gemm_inputs(problem, dev)
    config = config_of(problem, **way)
    before = run(**inputs, config=config)
    inputs["x"][3, K - 1] = math.nan
    inputs["x"][8, 0] = math.inf
    got = run(**inputs, config=config)
    token = inputs["sorted_ids"] // TOP_K if first else torch.arange(len(got), device=dev)
    spoilt = (token == 3) | (token == 8)
    assert not got[spoilt].isfinite().all(1).any()
    assert torch.equal(got[~spoilt], before[~spoilt])


def test_zero_scales(dev: torch.device) -> None:
    inputs = inputs_of(dev, int8=True, path="int8", first=False)
    inputs["weight_scale"][2, 6] = 0
    inputs["x_scale"][4] = 0
    got = run(**inputs)
    assert bool((got[4] == 0).all())
    first, end = inputs["expert_offsets"][2:4].tolist()
    assert first < end
    assert bool((got[first:end, 6] == 0).all())
    assert_right(got, inputs)


@each_product
def test_weights_of_assignments(first: bool, dev: torch.device) -> None:
    """Behind the activation too; zeros, and a shape of its own."""
    inputs = inputs_of(dev, first=first)
    weights = torch.randn(T * TOP_K, device=dev)
    weights[5] = 0
    inputs["topk_weights"] = weights
    got = run(**inputs)
    assert_right(got, inputs)
    assert bool((got[inputs["sorted_ids"] == 5] == 0).all())


def test_gates_of_any_size(dev: torch.device) -> None:
    """exp(-y) must not leave fp32; sums of -inf times an up of zero are NaN, as 0 * inf is not."""
    x = torch.tensor([[-200.0, 1], [200, 1], [-60, 1], [0, 1]], device=dev)
    weight = torch.tensor([[[1.0, 0], [0, 1]]], device=dev)
    inputs = {"x": x, "weight": weight, "silu_and_mul": True, "top_k": 1}
    inputs |= dispatched([[0]] * 4, 1, dev)
    expected = torch.nn.functional.silu(x[:, :1].double()).float()
    assert_close(run(**inputs), expected, what="silu")


# ---- which bits --------------------------------------------------------------------------------


@each_way
@each_product
@each_format
def test_the_same_bits_on_every_run(
    kind: dict[str, Any], first: bool, way: dict[str, Any], dev: torch.device
) -> None:
    problem = problem_of(first=first, **kind)
    inputs, config = moe_gemm_inputs(problem, dev), config_of(problem, **way)
    expected = run(**inputs, config=config)
    assert_right(expected, inputs)
    for _ in range(1 if INTERPRETED else 20):
        assert torch.equal(run(**inputs, config=config), expected)


@each_way
def test_a_row_does_not_depend_on_the_others(way: dict[str, Any], dev: torch.device) -> None:
    """The batch cut to one token: the same bits."""
    problem = problem_of()
    inputs, config = moe_gemm_inputs(problem, dev), config_of(problem, **way)
    whole = run(**inputs, config=config)
    ids = torch.empty(T * TOP_K, dtype=torch.int64, device=dev)
    counts = inputs["expert_offsets"].diff()
    ids[inputs["sorted_ids"].long()] = torch.arange(E, device=dev).repeat_interleave(counts)
    for token in (0, 4):
        chosen = ids.view(T, TOP_K)[token].tolist()
        one = inputs | {"x": inputs["x"][token : token + 1]} | dispatched([chosen], E, dev)
        got = run(**one, config=config)
        for row, choice in enumerate(one["sorted_ids"].tolist()):
            place = int((inputs["sorted_ids"] == token * TOP_K + choice).nonzero())
            assert torch.equal(got[row], whole[place])


@each_way
@each_product
def test_codes_made_here_are_those_of_quantize_per_token(
    first: bool, way: dict[str, Any], dev: torch.device
) -> None:
    problem = problem_of(first=first, int8=True, path="int8", quantized=False)
    inputs, config = moe_gemm_inputs(problem, dev), config_of(problem, **way)
    codes, scale = tkernels.quantize_per_token(inputs["x"])
    given = run(**inputs, x_q=codes, x_scale=scale, config=config)
    assert torch.equal(run(**inputs, config=config), given)


def test_codes_are_all_that_w8a8_reads(dev: torch.device) -> None:
    inputs = inputs_of(dev, int8=True, path="int8")
    expected = run(**inputs)
    inputs["x"].fill_(math.nan)
    assert torch.equal(run(**inputs), expected)


def word(*bits: int) -> int:
    """An int64 with these bits set; the last one is its sign."""
    value = sum(1 << b for b in bits)
    return value - (1 << 64) if value >> 63 else value


@each_way
@each_product
def test_each_expert_has_the_bits_of_its_own_way(
    way: dict[str, Any], first: bool, dev: torch.device
) -> None:
    """Experts beyond the first word, its sign bit, no bit and all of them."""
    experts = 70
    problem = problem_of(
        tokens=9, experts=experts, n=32, k=32, int8=True, path="masked", first=first
    )
    inputs, config = moe_gemm_inputs(problem, dev), config_of(problem, **way)
    chosen = [0, 1, 31, 32, 62, 63, 64, 65, 69]
    inputs |= dispatched([[chosen[t], chosen[(t + 4) % 9]] for t in range(9)], experts, dev)
    del inputs["mask"]
    low = run(**inputs, config=config)
    high = run(**inputs, high=True, config=config)
    assert not (low == high).all(1).any()
    counts = inputs["expert_offsets"].diff()
    expert = torch.arange(experts, device=dev).repeat_interleave(counts)
    for words in ((0, 0), (-1, -1), (word(1, 32, 63), word(0, 5)), (word(63), word(1))):
        mask = torch.tensor(words, dtype=torch.int64, device=dev)
        runs_high = ((mask[expert >> 6] >> (expert & 63)) & 1).bool()
        got = run(**inputs, mask=mask, config=config)
        assert torch.equal(got, torch.where(runs_high[:, None], high, low)), words


def test_all_that_may_run_high_share_a_config() -> None:
    """Or a mask with all bits set could add in another order than ``high`` does."""
    for case in SPEC.cases:
        if not case.problem["int8"]:
            continue
        high, masked = ({**case.problem, "path": path} for path in ("high", "masked"))
        assert SPEC.tuning_key(high) == SPEC.tuning_key(masked)
        for facts in (device.sm_facts(90), device.sm_facts(80), device.ascend_facts()):
            assert SPEC.default_config(high, facts) == SPEC.default_config(masked, facts)


@each_product
def test_fp32(first: bool, dev: torch.device) -> None:
    inputs = inputs_of(dev, first=first, dtype=torch.float32)
    assert_right(run(**inputs), inputs)


# ---- which addresses ---------------------------------------------------------------------------


def variants(inputs: dict[str, Any], **more: Any) -> list[bool]:
    """Whether each launch of the products reads weights by tensor maps; nothing is run."""
    with record_launches() as launches:
        tkernels.moe_gemm(**inputs, **more)
    return [x.args["TMA"] for x in launches if x.fn.__name__ == "_moe_gemm_kernel"]


@pytest.mark.skipif(device.current().is_npu, reason="an NPU has no tensor maps")
@each_product
def test_addresses_that_no_tensor_map_has_go_the_portable_way(
    first: bool, dev: torch.device
) -> None:
    problem = problem_of(first=first)
    inputs = moe_gemm_inputs(problem, dev)
    config = config_of(problem, **WAYS["tma"])
    if config["variant"] != "tma":
        pytest.skip("this device has no tensor maps")
    assert variants(inputs, config=config) == [True]
    wide = torch.zeros(len(inputs["x"]), K + 8, dtype=torch.float16, device=dev)
    for name, value in (("x", wide[:, 1 : K + 1]), ("weight", inputs["weight"])):
        moved = value
        if name == "weight":
            memory = torch.zeros(value.numel() + 1, dtype=torch.float16, device=dev)
            moved = memory[1:].view(value.shape)
        moved.copy_(inputs[name])
        shifted = {**inputs, name: moved}
        assert variants(shifted, config=config) == [False]
        assert_right(run(**shifted, config=config), inputs)
    assert variants(inputs, config=config) == [True]


@pytest.mark.skipif(device.current().is_npu, reason="an NPU has no tensor maps")
def test_scales_of_weights_at_such_addresses_do_too(dev: torch.device) -> None:
    """They are read two at a time, by a kernel that was compiled for others."""
    problem = problem_of(int8=True, path="int8")
    inputs = moe_gemm_inputs(problem, dev)
    config = config_of(problem, **WAYS["tma"])
    if config["variant"] != "tma":
        pytest.skip("this device has no tensor maps")
    assert variants(inputs, config=config) == [True]
    scale = inputs["weight_scale"]
    moved = torch.zeros(scale.numel() + 1, device=dev)[1:].view(scale.shape).copy_(scale)
    assert variants({**inputs, "weight_scale": moved}, config=config) == [False]
    assert_right(run(**{**inputs, "weight_scale": moved}, config=config), inputs)


def test_tickets_are_one_number(dev: torch.device) -> None:
    inputs = inputs_of(dev)
    tickets = torch.zeros(2, dtype=torch.int32, device=dev)
    assert_right(run(**inputs, tickets=tickets[1:]), inputs)
    for wrong in (tickets, tickets[:0], tickets[:1].long()):
        with pytest.raises(ValueError, match=r"moe_gemm: tickets must (have|be)"):
            tkernels.moe_gemm(**inputs, tickets=wrong)


@each_format
@each_product
@pytest.mark.parametrize("k", [33, 36, 40])
def test_rows_that_16_bytes_do_not_divide(
    k: int, first: bool, kind: dict[str, Any], dev: torch.device
) -> None:
    problem = problem_of(k=k, first=first, **kind)
    assert SPEC.default_config(problem, device.current())["variant"] == "portable"
    inputs = moe_gemm_inputs(problem, dev)
    assert_right(run(**inputs), inputs)
    if not device.current().is_npu:
        config = {**config_of(problem, **SMALL), "variant": "tma"}
        with pytest.raises(ValueError, match=r"variant tma needs .* rows that divide by 16 bytes"):
            tkernels.moe_gemm(**inputs, config=config)


@each_product
def test_rows_past_2_31_elements(first: bool, dev: torch.device) -> None:
    """Row numbers and strides fit 32 bits, their products do not. Few pages are ever touched."""
    inputs = inputs_of(dev, tokens=3 if first else 2, k_choices=1 if first else 2, first=first)
    rows = len(inputs["sorted_ids"])
    far = [
        torch.empty(2**30 * (rows - 1) + 64, dtype=torch.float16, device=dev).as_strided(
            (rows, n), (2**30, 1)
        )
        for n in (K, N // 2 if first else N)
    ]
    far[0].copy_(inputs["x"])
    got = tkernels.moe_gemm(**{**inputs, "x": far[0]}, out=far[1])
    assert_right(got, inputs)


def test_weights_past_2_31_elements(dev: torch.device) -> None:
    experts, n, k = 4096, 2056, 256
    weight = torch.empty((experts, n, k), dtype=torch.int8, device=dev)
    assert weight.numel() > 2**31
    scale = torch.zeros(experts, n, device=dev)
    weight[-1] = torch.randint(-127, 128, (n, k), device=dev)
    scale[-1] = torch.rand(n, device=dev)
    inputs = {"x": torch.randn(2, k, device=dev).half(), "weight": weight, "weight_scale": scale}
    inputs |= dispatched([[experts - 1]] * 2, experts, dev) | {"top_k": 1}
    assert_right(run(**inputs), inputs)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("aligned", [True, False])
def test_more_results_than_2_31(aligned: bool, dev: torch.device) -> None:
    rows, n, k = 2**17 + 300, 2**14 + 8, 64
    inputs = inputs_of(dev, tokens=rows, experts=3, k_choices=1, n=n, k=k, first=False)
    if not aligned:
        inputs["x"] = torch.nn.functional.pad(inputs["x"], (1, 8))[:, 1 : k + 1]
    got = tkernels.moe_gemm(**inputs)
    assert got.numel() > 2**31
    for here in (slice(0, 200), slice(rows - 200, rows)):
        expert = 0 if here.start == 0 else 2
        sums = inputs["x"][here].float() @ inputs["weight"][expert].float().t()
        weights = inputs["topk_weights"].flatten()[inputs["sorted_ids"][here].long()]
        assert_close(got[here], sums * weights[:, None], what="moe_gemm")


@pytest.mark.gpu
@each_product
@each_format
@pytest.mark.parametrize("tokens", [T, 700])
def test_a_captured_graph_follows_the_routing(
    tokens: int, kind: dict[str, Any], first: bool, dev: torch.device
) -> None:
    """Captured once; offsets and ids change in place, from even to all on one expert."""
    inputs = inputs_of(dev, tokens=tokens, n=256, k=512, first=first, **kind)
    out = torch.full((tokens * TOP_K, 128 if first else 256), 77.0, device=dev).half()
    tkernels.moe_gemm(**inputs, out=out)
    graph = device.new_graph()
    with device.capture(graph):
        tkernels.moe_gemm(**inputs, out=out)
    for ids in (
        [[t % E, (t + 1) % E] for t in range(tokens)],
        [[3, 9]] * tokens,
        [[0, 4]] * tokens,
        [[8, 9]] * tokens,
        [[2 if t else 8, 1] for t in range(tokens)],
    ):
        for name, value in dispatched(ids, E, dev).items():
            inputs[name].copy_(value)
        out.fill_(77)
        graph.replay()
        device.synchronize()
        there = int(inputs["expert_offsets"][-1])
        assert bool((out[there:] == 77).all())
        eager = tkernels.moe_gemm(**inputs)
        assert torch.equal(out[:there], eager[:there])
        if there:
            assert_right(out, inputs, there)


# ---- refusals ----------------------------------------------------------------------------------

HALF = torch.float16


@pytest.mark.parametrize(
    ("kind", "changes", "words"),
    [
        ("w8a8", {"x_scale": None}, "x_scale must be given with x_q, got None"),
        ("w8a8", {"x_q": None}, "x_q must be given with x_scale, got None"),
        ("w8a8", {"weight_scale": None}, "weight_scale must be given with int8 weights and only"),
        ("w8a8", {"weight_scale": torch.zeros(E, N + 1)}, r"weight_scale must have shape \[E=5, N"),
        ("w8a8", {"mask": torch.zeros(2).long()}, r"mask must have shape \[n_words=1\], got int64"),
        ("w8a8", {"mask": torch.zeros(1).int()}, "mask must be int64, got int32"),
        ("w8a8", {"mask": torch.zeros(1).long(), "high": True}, "high must be False with a mask"),
        ("w16", {"mask": torch.zeros(1).long()}, "mask must be None without int8 weights, got a"),
        ("w16", {"x_q": torch.zeros(T, K).char()}, "x_q must be None without int8 weights, got a"),
        ("w16", {"high": True}, "high must be False with a mask or 16-bit weights, got True"),
        ("w16", {"high": 1}, "high must be a bool, got 1"),
        ("w16", {"silu_and_mul": 1}, "silu_and_mul must be a bool, got 1"),
        ("w16", {"top_k": 2.0}, r"top_k must be an int, got 2\.0"),
        ("w16", {"top_k": True}, "top_k must be an int, got True"),
        ("w16", {"top_k": -1}, "top_k must be 0, or R=18 rows divided by the 9 of x, got -1"),
        ("w16", {"top_k": 3}, "top_k must be 0, or R=18 rows divided by the 9 of x, got 3"),
        ("w16", {"top_k": 0}, r"x must have shape \[R=18, K=64\], got float16 \[9, 64\]"),
        ("w16", {"weight": torch.zeros(E, N, K)}, "weight must be float16 or int8, got float32"),
        ("w16", {"weight": torch.zeros(E, 47, K).half()}, "weight must have gate and up rows, got"),
        ("w16", {"weight": torch.zeros(E, N, K + 1).half()}, r"weight must have shape .*K=64\], g"),
        ("w16", {"weight": torch.zeros(0, N, K).half()}, r"weight must have shape \[E >= 1"),
        ("w16", {"weight": torch.zeros(E, K, N).half().mT}, "weight must "),
        ("w16", {"weight": torch.zeros(E, N, 2 * K).half()[..., :K]}, "weight must be contiguous"),
        ("w16", {"expert_offsets": torch.zeros(E).int()}, r"expert_offsets must have shape \[E"),
        ("w16", {"expert_offsets": torch.zeros(E + 1).long()}, "expert_offsets must be int32, got"),
        ("w16", {"sorted_ids": torch.zeros(3, 6).int()}, r"sorted_ids must have shape \[R\], got"),
        ("w16", {"topk_weights": torch.zeros(T)}, "topk_weights must be contiguous with R=18 elem"),
        ("w16", {"out": torch.zeros(T * TOP_K, N).half()}, r"out must have shape \[R=18, N=24\]"),
        ("w16", {"x": torch.zeros(T, 0).half()}, r"x must have shape \[T or R, 1 <= K < 131072\]"),
    ],
)  # fmt: skip
def test_refusals(kind: str, changes: dict[str, Any], words: str, dev: torch.device) -> None:
    inputs = inputs_of(dev, **FORMATS[kind])
    moved = {n: v.to(dev) if isinstance(v, torch.Tensor) else v for n, v in changes.items()}
    with pytest.raises((ValueError, TypeError), match=rf"^moe_gemm: {words}") as caught:
        tkernels.moe_gemm(**{**inputs, **moved})
    assert "\n" not in str(caught.value)


def test_more_experts_than_a_program_counts_are_refused(dev: torch.device) -> None:
    inputs = inputs_of(dev)
    weight = torch.zeros(1, 1, 1, dtype=HALF, device=dev).expand(4097, 2, K)
    with pytest.raises(ValueError, match=r"^moe_gemm: weight must have at most 4096 experts and"):
        tkernels.moe_gemm(**{**inputs, "weight": weight})


def test_more_terms_than_int32_holds_are_refused(dev: torch.device) -> None:
    inputs = inputs_of(dev)
    x = torch.zeros(1, 1, dtype=HALF, device=dev).expand(T, 2**17)
    with pytest.raises(ValueError, match=r"^moe_gemm: x must have shape .* K < 131072"):
        tkernels.moe_gemm(**{**inputs, "x": x})


def test_rows_that_are_one_row_go_to_no_tensor_map(dev: torch.device) -> None:
    """An expanded x: 0 is no stride that a tensor map can express."""
    inputs, tma = inputs_of(dev), config_of(problem_of(), variant="tma")
    if tma["variant"] != "tma":
        pytest.skip("this device has no tensor maps")
    assert_close(run(**inputs, config=tma), tkernels.reference.moe_gemm(**inputs), what="moe_gemm")
    inputs["x"] = inputs["x"][:1].expand(T, K)
    with pytest.raises(ValueError, match="rows that divide by 16 bytes"):
        run(**inputs, config=tma)
    assert_close(run(**inputs), tkernels.reference.moe_gemm(**inputs), what="moe_gemm")
