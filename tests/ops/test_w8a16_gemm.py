"""What is special to w8a16_gemm: codes of both kinds, groups, scales of blocks, refusals."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import tkernels
from tkernels import device
from tkernels.ops.w8a16_gemm import SPEC
from tkernels.registry import Config, Problem
from tkernels.testing import assert_close
from tkernels.w8_format import dequantize_w8, numbers_of_codes
from tkernels.w8a16_cases import FP8, w8_inputs, w8_problem

pytestmark = pytest.mark.thin(3)

M, N, K = 13, 24, 512
INT8, BF16, FP16, FP32 = torch.int8, torch.bfloat16, torch.float16, torch.float32
SMALL = {"BLOCK_M": 16, "BLOCK_N": 16, "num_warps": 1, "num_stages": 2, "variant": "portable"}
WAYS: dict[str, dict[str, Any]] = {
    "default": {},
    "small": {**SMALL, "BLOCK_K": 32},
    "whole": {**SMALL, "BLOCK_K": 256},
    "split": {**SMALL, "BLOCK_K": 64, "SPLIT_K": 3},
    "persistent": {**SMALL, "BLOCK_K": 128, "programs_per_core": 1},
}
each_way = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
both_codes = pytest.mark.parametrize("codes", [FP8, INT8], ids=["fp8", "int8"])


def config_of(problem: Problem, **changes: Any) -> Config:
    """The default, tiled as is said; what an NPU has none of is left out."""
    space = SPEC.space(device.current())
    config = SPEC.default_config(problem, device.current())
    config |= {n: v for n, v in changes.items() if n in space}
    if device.current().is_npu:
        config["BLOCK_K"] = min(128, config["BLOCK_K"])
    assert SPEC.why_illegal(config, problem, device.current()) is None, config
    return config


def exact_inputs(dev: torch.device, problem: Problem) -> dict[str, Any]:
    """Sums of which every part is a small integer times a power of two: no order rounds.

    FP8 has 1, 1.5, 2 and 3, all with both signs, and zero.
    """
    inputs = w8_inputs(problem, dev)
    p, generator = problem, torch.Generator().manual_seed(1)
    x = torch.randint(-2, 3, (p["m"], p["k"]), generator=generator)
    values = torch.tensor([0.0, 1.0, 1.5, 2.0, 3.0, -1.0, -1.5, -2.0, -3.0])
    values = values.to(FP8).view(torch.uint8) if p["codes"] == FP8 else torch.arange(-4, 5)
    picked = values[torch.randint(0, 9, (p["n"], p["k"]), generator=generator)]
    powers = torch.randint(-3, 1, (p["n"], p["k"] // p["group"]), generator=generator)
    codes = picked.view(FP8) if p["codes"] == FP8 else picked.to(INT8)
    return {
        **inputs,
        "x": x.to(p["dtype"]).to(dev),
        "weight": codes.to(dev),
        "weight_scale": torch.exp2(powers.float()).to(p["scale"]).to(dev),
    }


@each_way
@both_codes
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("group", [32, 128, K])
def test_exact_sums_are_exact(
    way: dict[str, Any], codes: torch.dtype, group: int, dtype: torch.dtype, dev: torch.device
) -> None:
    """Bit for bit: every code is multiplied by its own column of x and its own group's scale."""
    problem = w8_problem(M, N, K, dtype, codes=codes, group=group, bias=True)
    inputs = exact_inputs(dev, problem)
    got = tkernels.w8a16_gemm(**inputs, config=config_of(problem, **way))
    assert torch.equal(got, tkernels.reference.w8a16_gemm(**inputs))


@both_codes
def test_the_definition_in_plain_python(codes: torch.dtype, dev: torch.device) -> None:
    """One row, one column of weights, all that the formula names."""
    inputs = exact_inputs(dev, w8_problem(M, N, K, codes=codes, bias=True))
    got = tkernels.w8a16_gemm(**inputs)
    weight, x = inputs["weight"].cpu()[7].float().tolist(), inputs["x"][4].tolist()
    scale = inputs["weight_scale"][7].tolist()
    total = sum(x[k] * weight[k] * scale[k // 128] for k in range(K))
    expected = torch.tensor(total) + inputs["bias"][7].float().cpu()
    assert got[4, 7].cpu() == expected.to(got.dtype)


@both_codes
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
def test_every_code(codes: torch.dtype, dtype: torch.dtype, dev: torch.device) -> None:
    """Output n of row k is code 64 n + k: x is the unit matrix. NaN codes count as 480."""
    bits = torch.arange(256, dtype=torch.uint8).view(4, 64)
    x = torch.eye(64, dtype=dtype)
    scale = torch.ones(4, 1)
    got = tkernels.w8a16_gemm(x.to(dev), bits.view(codes).to(dev), scale.to(dev)).cpu().t()
    expected = bits.view(codes).float()
    if codes == FP8:
        assert expected.isnan().sum() == 2
        expected = expected.nan_to_num(nan=480.0)
        expected[3, 63] = -480.0
    assert torch.equal(got.float(), expected)
    assert torch.equal(numbers_of_codes(bits.view(codes)), expected)


@pytest.mark.parametrize("rows", [0, 1, 2, 15, 16, 17, 33, 130])
def test_any_number_of_rows(rows: int, dev: torch.device) -> None:
    inputs = w8_inputs(w8_problem(rows, 37, 256, bias=True), dev)
    got = tkernels.w8a16_gemm(**inputs)
    assert got.shape == (rows, 37)
    if rows:
        truth = {**inputs, "x": inputs["x"].float()}
        assert_close(got, tkernels.reference.w8a16_gemm(**truth), what=f"{rows} rows")


@each_way
@both_codes
def test_what_is_beside_the_matrices_is_not_read(
    way: dict[str, Any], codes: torch.dtype, dev: torch.device
) -> None:
    """Views of wider matrices, NaN in the columns and rows that are no part of them."""
    k = 256 + 64 + 7  # ends within a step
    problem = w8_problem(M, 33, k, codes=codes, group=k, bias=True)
    inputs, config = w8_inputs(problem, dev), config_of(problem, **way)
    expected = tkernels.w8a16_gemm(**inputs, config=config)
    assert_close(expected, tkernels.reference.w8a16_gemm(**inputs).float(), what="whole rows")
    wide = dict(inputs)
    wide["weight"] = inputs["weight"].view(torch.uint8)
    for name, spoilt in (("x", math.nan), ("weight", 0x7E), ("weight_scale", math.nan)):
        t = wide[name]
        padded = torch.full((len(t) + 3, t.shape[1] + 40), spoilt, dtype=t.dtype, device=dev)
        padded[: len(t), : t.shape[1]] = t
        wide[name] = padded[: len(t), : t.shape[1]]
    wide["weight"] = wide["weight"].view(codes)
    wide["out"] = torch.full((M + 2, 33 + 5), 5.0, dtype=BF16, device=dev)[:M, :33]
    kept = wide["out"]._base
    tkernels.w8a16_gemm(**wide, config=config)
    assert torch.equal(wide["out"], expected)
    assert bool((kept[M:] == 5.0).all())
    assert bool((kept[:, 33:] == 5.0).all())


@pytest.mark.parametrize("scale", [2.0**-100, 2.0**-30, 2.0**30])
def test_fp32_scales_need_not_fit_16_bits(scale: float, dev: torch.device) -> None:
    inputs = exact_inputs(dev, w8_problem(M, N, K))
    expected = tkernels.reference.w8a16_gemm(**inputs).float() * scale
    inputs["weight_scale"] *= scale
    assert torch.equal(tkernels.w8a16_gemm(**inputs).float(), expected)


@pytest.mark.filterwarnings("ignore:invalid value")  # of NumPy, in the interpreter
@each_way
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_bad_activations_spoil_their_row_alone(
    way: dict[str, Any], value: float, dev: torch.device
) -> None:
    problem = w8_problem(M, N, K)
    inputs, config = w8_inputs(problem, dev), config_of(problem, **way)
    before = tkernels.w8a16_gemm(**inputs, config=config)
    inputs["x"][3, 77] = value
    got = tkernels.w8a16_gemm(**inputs, config=config)
    assert not got[3, (numbers_of_codes(inputs["weight"])[:, 77] != 0)].isfinite().any()
    others = [i for i in range(M) if i != 3]
    assert torch.equal(got[others], before[others])


@pytest.mark.gpu
@pytest.mark.parametrize("m", [1, 16, 64, 1000])
@both_codes
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
def test_large_ones(m: int, codes: torch.dtype, dtype: torch.dtype, dev: torch.device) -> None:
    inputs = w8_inputs(w8_problem(m, 4000, 4096, dtype, codes=codes), dev)
    assert_close(
        tkernels.w8a16_gemm(**inputs),
        tkernels.reference.w8a16_gemm(**inputs).float(),
        what="4000 outputs",
    )


# ---- the format --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n", "k", "block", "group"),
    [(300, 384, (128, 128), 128), (5, 512, (2, 128), 128), (4, 192, (4, 128), 64)],
)
def test_scales_of_blocks_become_rows(n: int, k: int, block: tuple[int, int], group: int) -> None:
    rows, columns = block
    scale = torch.rand(-(-n // rows), -(-k // columns)) + 0.5
    got = tkernels.expand_block_scales(scale, n, k, block)
    assert got.shape == (n, k // group)
    assert got.is_contiguous()
    weight = torch.ones(n, k, dtype=INT8)
    expected = torch.tensor(
        [[float(scale[i // rows, j // columns]) for j in range(k)] for i in range(n)]
    )
    assert torch.equal(dequantize_w8(weight, got), expected)


def test_one_block_across_is_a_scale_a_row() -> None:
    scale = torch.tensor([[0.5], [2.0]])
    got = tkernels.expand_block_scales(scale, 3, 100, (2, 128))
    assert got.tolist() == [[0.5], [0.5], [2.0]]


@pytest.mark.parametrize(
    ("scale", "block", "words"),
    [
        (torch.ones(2, 2), (128, 128), r"scale must have shape \[3, 3\], got float32 \[2, 2\]"),
        (torch.ones(3, 24), (128, 16), "block must have columns that groups of 32 or more"),
        (torch.ones(3, 3), (0, 128), "block must be two integers above 0"),
    ],
)
def test_refused_blocks(scale: torch.Tensor, block: tuple[int, int], words: str) -> None:
    with pytest.raises(ValueError, match=rf"^expand_block_scales: {words}"):
        tkernels.expand_block_scales(scale, 300, 384, block)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"weight": torch.zeros(N, K, dtype=torch.uint8)}, "weight must be int8 or float8_e4m3fn"),
        ({"weight": torch.zeros(N, K // 2, dtype=INT8)}, r"weight must have shape .*K=512\]"),
        ({"weight_scale": torch.ones(N, 32)}, "weight_scale must have shape .* a power of two"),
        ({"weight_scale": torch.ones(N, 3)}, "weight_scale must have shape .* a power of two"),
        ({"weight_scale": torch.ones(N)}, "weight_scale must have shape"),
        (
            {"weight_scale": torch.ones(N, 4).double()},
            "weight_scale must be float32 or bfloat16 or float16",
        ),
        ({"bias": torch.zeros(N + 1)}, r"bias must have shape \[N=24\]"),
        ({"x": torch.zeros(M, K)}, "x must be bfloat16 or float16"),
        ({"x": torch.zeros(M, 0).bfloat16()}, r"x must have shape \[M, K >= 1\]"),
    ],
)
def test_refusals(changes: dict[str, Any], words: str, dev: torch.device) -> None:
    inputs = w8_inputs(w8_problem(M, N, K), dev)
    moved = {n: v.to(dev) for n, v in changes.items()}
    with pytest.raises((ValueError, TypeError), match=rf"^w8a16_gemm: {words}"):
        tkernels.w8a16_gemm(**{**inputs, **moved})
