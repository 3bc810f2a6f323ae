"""What is special to masked_gemm: which rows run high, bit for bit; bad numbers; ways to tile."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import tkernels
from tkernels import device
from tkernels.masked_gemm_cases import gemm_inputs, gemm_problem
from tkernels.ops.masked_gemm import SPEC, _bind, runs_high_ref
from tkernels.registry import Config
from tkernels.testing import assert_close

pytestmark = pytest.mark.thin(2)

M, N, K = 21, 40, 96
INTERPRETED = device.KIND == "cpu"


def inputs_of(dev: torch.device, **more: Any) -> dict[str, Any]:
    return gemm_inputs(gemm_problem(M, N, K, **more), dev)


def word(*bits: int) -> int:
    """An int64 with these bits set; the last one is its sign."""
    value = sum(1 << b for b in bits)
    return value - (1 << 64) if value >> 63 else value


def mask_of(dev: torch.device, *words: int) -> torch.Tensor:
    return torch.tensor(words, dtype=torch.int64, device=dev)


def config_of(dev: torch.device, **changes: Any) -> Config:
    """The default for masked rows, tiled as is said; what an NPU has none of is left out."""
    problem = gemm_problem(M, N, K, path="masked")
    default = SPEC.default_config(problem, device.current())
    space = SPEC.space(device.current())
    config = {**default, **{n: v for n, v in changes.items() if n in space}}
    if config["variant"] not in space["variant"]:
        config["variant"] = "portable"
    if device.current().is_npu:
        config["BLOCK_M"] = min(64, config["BLOCK_M"])
    assert SPEC.why_illegal(config, problem, device.current()) is None, config
    return config


SMALL = {"BLOCK_M": 16, "BLOCK_N": 32, "BLOCK_K": 32, "num_stages": 2}
WAYS: dict[str, dict[str, Any]] = {
    "default": {},
    "small": {**SMALL, "GROUP_M": 2},
    "split": {**SMALL, "SPLIT_K": 3},
    "swapped": {**SMALL, "SWAP": True},
    "tma": {**SMALL, "variant": "tma", "BLOCK_M": 32},
    "persistent": {**SMALL, "programs_per_core": 1},
    "hopper": {
        "variant": "hopper", "BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 128, "num_stages": 3,
        "num_warps": 4, "PDL": False,
    },
}  # fmt: skip
each_way = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
each_high = pytest.mark.parametrize("high_weight", [False, True], ids=["w8a16", "w16a16"])


@each_way
@each_high
def test_each_row_has_the_bits_of_its_own_way(
    way: dict[str, Any], high_weight: bool, dev: torch.device
) -> None:
    """No mask, all bits clear, all set, and a mixture: a row knows nothing of the others."""
    inputs = inputs_of(dev, high_weight=high_weight, bias=True)
    config = config_of(dev, **way)
    low = tkernels.masked_gemm(**inputs, config=config)
    high = tkernels.masked_gemm(**inputs, high=True, config=config)
    assert not torch.equal(low, high)
    group = torch.arange(M, dtype=torch.int32, device=dev)
    for mask in (mask_of(dev, 0), mask_of(dev, -1), mask_of(dev, word(0, 3, 4, 17, 20))):
        got = tkernels.masked_gemm(**inputs, mask=mask, row_group=group, config=config)
        chosen = runs_high_ref(mask, group, M)
        assert torch.equal(got, torch.where(chosen[:, None], high, low))


@each_high
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("grouped", [False, True])
def test_high_rows_behind_those_in_int8(
    splits: int, grouped: bool, high_weight: bool, dev: torch.device
) -> None:
    """What the narrow body launches behind itself: it stores the high rows, and no others."""
    inputs = inputs_of(dev, high_weight=high_weight, bias=True)
    config = config_of(dev, **{**SMALL, "SPLIT_K": splits})
    high = tkernels.masked_gemm(**inputs, high=True, config=config)
    given = {name: inputs.get(name) for name in ("x_q", "x_scale", "high_weight", "bias")}
    strides = (K, K, K, K, N)
    facts = {
        "LOW": True, "HIGH": True, "HIGH_SCALE": not high_weight, "HAS_BIAS": True,
        "HAS_GROUP": grouped, "ONE_WORD": True,
    }  # fmt: skip
    launch = {name: value for name, value in config.items() if name != "programs_per_core"}
    most = device.current().max_programs
    run = _bind((M, N, K), facts, strides, 1, launch, most, only_high=True)
    group = torch.arange(M, dtype=torch.int32, device=dev)
    for bits in (word(), -1, word(0, 3, 4, 17, 20)):
        out = torch.full((M, N), 5.0, dtype=inputs["x"].dtype, device=dev)
        mask = mask_of(dev, bits)
        run(
            inputs["x"], inputs["weight"], inputs["weight_scale"], out, *given.values(), mask,
            group if grouped else None,
        )  # fmt: skip
        chosen = runs_high_ref(mask, group if grouped else None, M)
        assert torch.equal(out, torch.where(chosen[:, None], high, 5.0))


@each_way
def test_low_rows_equal_the_reference_bit_for_bit(way: dict[str, Any], dev: torch.device) -> None:
    """The sums are exact, and what follows is rounded step by step."""
    inputs = inputs_of(dev, bias=True)
    got = tkernels.masked_gemm(**inputs, config=config_of(dev, **way))
    assert torch.equal(got, tkernels.reference.masked_gemm(**inputs))


@pytest.mark.parametrize(
    ("words", "groups"),
    [
        ((word(5, 63),), (5, 63, 62, 6)),  # requests: their slots
        ((0, word(0, 31, 32), word(63)), (64, 95, 96, 191, 190, 63, 97)),  # more than one word
        ((word(0), word(0)), (0, 64, 128, -1, -64, 2**31 - 1, -(2**31))),  # no such bit
    ],
)
def test_groups_choose_by_their_bit(
    words: tuple[int, ...], groups: tuple[int, ...], dev: torch.device
) -> None:
    inputs = inputs_of(dev)
    mask = mask_of(dev, *words)
    numbers = [groups[i % len(groups)] for i in range(M)]
    expected = [0 <= g < 64 * len(words) and bool(words[g // 64] >> g % 64 & 1) for g in numbers]
    assert any(expected)
    assert not all(expected)
    group = torch.tensor(numbers, dtype=torch.int64, device=dev).to(torch.int32)
    got = tkernels.masked_gemm(**inputs, mask=mask, row_group=group)
    low, high = (
        tkernels.masked_gemm(**inputs, high=h, config=config_of(dev)) for h in (0 > 1, True)
    )
    for i, way in enumerate(expected):
        assert torch.equal(got[i], (high if way else low)[i]), (i, numbers[i])


def test_runs_of_tokens(dev: torch.device) -> None:
    """Group = token index >> 6: 64 tokens share a bit, whichever tiles they fall into."""
    tokens = 200
    inputs = gemm_inputs(gemm_problem(tokens, 16, 32), dev)
    group = (torch.arange(tokens, device=dev) >> 6).to(torch.int32)
    got = tkernels.masked_gemm(**inputs, mask=mask_of(dev, word(1, 3)), row_group=group)
    low = tkernels.reference.masked_gemm(**inputs)
    same = (got == low).all(1)
    assert same[:64].all()
    assert same[128:192].all()
    assert not same[64:128].any()
    assert not same[192:].any()


def test_a_layer_follows_bit_0_of_its_word(dev: torch.device) -> None:
    inputs = inputs_of(dev)
    config = config_of(dev)
    low, high = (tkernels.masked_gemm(**inputs, high=h, config=config) for h in (False, True))
    layers = mask_of(dev, 0, 1, word(1, 63), -1)  # a word a layer
    for layer, expected in enumerate((low, high, low, high)):
        got = tkernels.masked_gemm(**inputs, mask=layers[layer : layer + 1], config=config)
        assert torch.equal(got, expected), layer


@each_way
def test_a_bit_flipped_between_two_calls(way: dict[str, Any], dev: torch.device) -> None:
    inputs = inputs_of(dev)
    config = config_of(dev, **way)
    mask = mask_of(dev, 0)
    group = torch.arange(M, dtype=torch.int32, device=dev) // 7
    call = {**inputs, "mask": mask, "row_group": group, "config": config}
    before = tkernels.masked_gemm(**call)
    mask.fill_(word(1))
    flipped = tkernels.masked_gemm(**call)
    rows = group == 1
    assert torch.equal(flipped[~rows], before[~rows])
    assert not (flipped[rows] == before[rows]).all(1).any()
    mask.zero_()
    assert torch.equal(tkernels.masked_gemm(**call), before)


@pytest.mark.gpu
def test_a_captured_graph_follows_the_mask(dev: torch.device) -> None:
    inputs = inputs_of(dev)
    mask = mask_of(dev, 0)
    group = torch.arange(M, dtype=torch.int32, device=dev) // 7
    low = tkernels.masked_gemm(**inputs, mask=mask, row_group=group)
    graph = device.new_graph()
    with device.capture(graph):
        got = tkernels.masked_gemm(**inputs, mask=mask, row_group=group)
    for bits in (0, word(2), 0, word(0, 1)):
        mask.fill_(bits)
        graph.replay()
        device.synchronize()
        assert torch.equal((got != low).any(1), runs_high_ref(mask, group, M))


@pytest.mark.gpu
@each_high
@pytest.mark.parametrize("words", [1, 3])
@pytest.mark.parametrize("block_n", [128, 256])
def test_many_tiles_of_the_hopper_body(
    high_weight: bool, words: int, block_n: int, dev: torch.device
) -> None:
    """Several tiles a program, steps past K, rows and columns past the ends; every kind of tile."""
    if device.current().arch != "sm90":
        pytest.skip("the body is for sm90")
    m, n, k = 1500, 4000, 1040
    problem = gemm_problem(m, n, k, high_weight=high_weight, bias=True)
    inputs = gemm_inputs(problem, dev)
    config = {**config_of(dev, **WAYS["hopper"]), "BLOCK_N": block_n, "GROUP_M": 4}
    low, high = (tkernels.masked_gemm(**inputs, high=h, config=config) for h in (False, True))
    assert torch.equal(low, tkernels.reference.masked_gemm(**inputs))
    assert_close(high, tkernels.reference.masked_gemm(**inputs, high=True).float(), what="high")
    # 200 rows a group: tiles of one way and of both.
    group = (torch.arange(m, device=dev) // 200 * (64 * words // 8)).to(torch.int32)
    mask = mask_of(dev, *[word(0, 8, 24, 48, 63)] * words)
    chosen = runs_high_ref(mask, group, m)
    assert chosen.any()
    assert not chosen.all()
    for _ in range(10):
        got = tkernels.masked_gemm(**inputs, mask=mask, row_group=group, config=config)
        assert torch.equal(got, torch.where(chosen[:, None], high, low))


def test_codes_made_here_are_those_of_quantize_per_token(dev: torch.device) -> None:
    inputs = inputs_of(dev, quantized=False)
    codes, scale = tkernels.quantize_per_token(inputs["x"])
    given = tkernels.masked_gemm(**inputs, x_q=codes, x_scale=scale)
    assert torch.equal(tkernels.masked_gemm(**inputs), given)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@each_way
def test_bad_activations_spoil_their_row_alone(
    value: float, way: dict[str, Any], dev: torch.device
) -> None:
    inputs = inputs_of(dev, quantized=False, bias=True)
    config = config_of(dev, **way)
    group = torch.arange(M, dtype=torch.int32, device=dev)
    call = {**inputs, "mask": mask_of(dev, word(2, 5)), "row_group": group, "config": config}
    before = tkernels.masked_gemm(**call)
    inputs["x"][3, 7] = value  # runs low
    inputs["x"][5, K - 1] = value  # runs high
    got = tkernels.masked_gemm(**call)
    assert got[3].isnan().all()
    assert not got[5].isfinite().any()
    others = [i for i in range(M) if i not in (3, 5)]
    assert torch.equal(got[others], before[others])


def test_zero_rows_and_zero_scales(dev: torch.device) -> None:
    inputs = inputs_of(dev, quantized=False, bias=True)
    inputs["x"][4] = 0
    inputs["weight_scale"][6] = 0
    bias = inputs["bias"]
    for high in (False, True):
        got = tkernels.masked_gemm(**inputs, high=high)
        assert torch.equal(got[4], bias)
        assert torch.equal(got[:, 6], bias[6].expand(M))


def test_only_the_chosen_way_is_read(dev: torch.device) -> None:
    """Arguments of the way that no row takes may be anything."""
    inputs = inputs_of(dev, high_weight=True)
    config = config_of(dev)
    low, high = (tkernels.masked_gemm(**inputs, high=h, config=config) for h in (False, True))
    nan = {name: torch.full_like(inputs[name], math.nan) for name in ("x", "high_weight")}
    for mask in (None, mask_of(dev, 0)):
        got = tkernels.masked_gemm(**{**inputs, **nan}, mask=mask, config=config)
        assert torch.equal(got, low)
    spoilt = {
        "weight_scale": torch.full_like(inputs["weight_scale"], math.nan),
        "x_scale": torch.full_like(inputs["x_scale"], math.nan),
        "weight": torch.full_like(inputs["weight"], 99),
    }
    got = tkernels.masked_gemm(**{**inputs, **spoilt}, mask=mask_of(dev, 1), config=config)
    assert torch.equal(got, high)


def test_sums_are_exact_where_fp32_would_not_be(dev: torch.device) -> None:
    """The largest codes 2047 times: more than 2^24, and one odd term more."""
    k = 2048
    codes = torch.full((2, k), 127, dtype=torch.int8, device=dev)
    weight = torch.full((16, k), -128, dtype=torch.int8, device=dev)
    weight[:, -1] = 1
    total = -127 * 128 * (k - 1) + 127
    ones = torch.ones(16, device=dev)
    x = torch.zeros(2, k, dtype=torch.float16, device=dev)
    # A scale that takes the leading part away would need fp64; the last bits show after it.
    got = tkernels.masked_gemm(x, weight, ones * 2.0**-12, x_q=codes, x_scale=ones[:2])
    assert torch.equal(got, torch.full_like(got, float(torch.tensor(total).float()) * 2.0**-12))


@each_way
def test_the_same_bits_again(way: dict[str, Any], dev: torch.device) -> None:
    inputs = inputs_of(dev, path="masked", bias=True)
    config = config_of(dev, **way)
    first = tkernels.masked_gemm(**inputs, config=config)
    assert all(
        torch.equal(first, tkernels.masked_gemm(**inputs, config=config))
        for _ in range(1 if INTERPRETED else 20)
    )


def test_all_that_may_run_high_share_a_config() -> None:
    """Or a mask with all bits set could add in another order than no mask does."""
    for case in SPEC.cases:
        if case.problem["path"] == "int8":
            continue
        high, masked = ({**case.problem, "path": path} for path in ("high", "masked"))
        alone = not case.problem["high_weight"]  # on sm90 in bodies of their own
        assert (SPEC.tuning_key(high) == SPEC.tuning_key(masked)) != alone
        for facts in (device.sm_facts(90), device.sm_facts(80), device.ascend_facts()):
            if facts.arch != "sm90" or not alone or not case.problem["aligned"]:
                assert SPEC.default_config(high, facts) == SPEC.default_config(masked, facts)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"x_scale": None}, "x_scale must be given with x_q, got None"),
        ({"x_q": None}, "x_q must be given with x_scale, got None"),
        ({"mask": None}, "mask must be given with row_group, got None"),
        ({"high": True}, "high must be False with a mask, got True"),
        ({"high": 1}, "high must be a bool, got 1"),
        ({"mask": torch.zeros(0, dtype=torch.int64)}, "mask must have one word or more, got int64"),
        ({"mask": torch.zeros(1, dtype=torch.int32)}, "mask must be int64, got int32"),
        ({"high_weight": torch.zeros(N, K)}, "high_weight must be bfloat16, got float32"),
        ({"row_group": torch.zeros(M + 1, dtype=torch.int32)}, r"row_group must have shape \[M=21"),
        ({"weight": torch.zeros(N, K + 1, dtype=torch.int8)}, "weight must have shape .*K=96"),
    ],
)
def test_refusals(changes: dict[str, Any], words: str, dev: torch.device) -> None:
    inputs = inputs_of(dev, path="masked")
    moved = {n: v.to(dev) if isinstance(v, torch.Tensor) else v for n, v in changes.items()}
    with pytest.raises((ValueError, TypeError), match=rf"^masked_gemm: {words}"):
        tkernels.masked_gemm(**{**inputs, **moved})


def test_more_terms_than_int32_holds_are_refused(dev: torch.device) -> None:
    k = 2**17
    x = torch.zeros(1, 1, dtype=torch.bfloat16, device=dev).expand(1, k)
    with pytest.raises(ValueError, match="x must have at most 131071 columns"):
        tkernels.masked_gemm(x, torch.zeros(1, k, dtype=torch.int8, device=dev), x[0, :1].float())
