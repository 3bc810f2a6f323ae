"""What is special to w4a16_gemm: the format and others made of it; ways to tile; bad numbers."""

from __future__ import annotations

import math
import random
import re
from typing import Any

import pytest
import torch

import tkernels
from tkernels import device, w4a16_gemm_unpacked
from tkernels.ops.w4a16_gemm import SPEC, _decoding, _why_no_slices
from tkernels.registry import Config, Problem
from tkernels.testing import assert_close
from tkernels.w4_format import dequantize_w4, pack_nibbles, unpack_nibbles
from tkernels.w4a16_cases import w4_inputs, w4_problem

pytestmark = pytest.mark.thin(3)

M, N, K = 13, 24, 512
INTERPRETED = device.KIND == "cpu"


def config_of(problem: Problem | None = None, **changes: Any) -> Config:
    """The default for a few rows, tiled as is said; what an NPU has none of is left out.

    So are slices where ``problem`` has none.
    """
    problem = problem or w4_problem(M, N, K)
    default = SPEC.default_config(problem, device.current())
    space = SPEC.space(device.current())
    config = {**default, **{n: v for n, v in changes.items() if n in space}}
    if device.current().is_npu:
        config |= {"variant": "turned", "BLOCK_M": max(16, config["BLOCK_M"]), "BLOCK_K": 128}
    if _why_no_slices(config, problem):
        config["SLICES"] = 1
    assert SPEC.why_illegal(config, problem, device.current()) is None, config
    return config


SMALL = {"BLOCK_N": 16, "num_warps": 1, "num_stages": 2}
WAYS: dict[str, dict[str, Any]] = {
    "default": {},
    "eight": {**SMALL, "variant": "direct", "BLOCK_M": 8, "BLOCK_K": 128},
    "pairs": {**SMALL, "variant": "direct", "BLOCK_M": 8, "BLOCK_K": 256},
    "sixteen": {**SMALL, "variant": "direct", "BLOCK_M": 16, "BLOCK_K": 512},
    "turned": {**SMALL, "variant": "turned", "BLOCK_M": 16, "BLOCK_K": 256},
    "split": {**SMALL, "variant": "direct", "BLOCK_M": 16, "BLOCK_K": 256, "SPLIT_K": 3},
    "slices": {**SMALL, "variant": "direct", "BLOCK_M": 8, "BLOCK_K": 256, "SLICES": 2},
    "sliced": {**SMALL, "variant": "direct", "BLOCK_M": 16, "BLOCK_K": 512, "SLICES": 4,
               "SPLIT_K": 2},
    "unpacked": {**w4a16_gemm_unpacked.FIXED, "BLOCK_N": 16, "BLOCK_K": 128, "num_warps": 1},
    "persistent": {**SMALL, "variant": "turned", "BLOCK_M": 8, "BLOCK_K": 128,
                   "programs_per_core": 1},
}  # fmt: skip
SLOW_THERE = pytest.mark.slow if INTERPRETED else ()
each_way = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)


def exact_inputs(dev: torch.device, *, group: int = 128, **more: Any) -> dict[str, Any]:
    """Sums of which every part is a small integer times a power of two: no order rounds."""
    inputs = w4_inputs(w4_problem(M, N, K, group=group, **more), dev)
    generator = torch.Generator().manual_seed(1)
    x = torch.randint(-2, 3, (M, K), generator=generator)
    powers = torch.randint(-3, 1, (N, K // group), generator=generator)
    inputs["x"] = x.to(inputs["x"].dtype).to(dev)
    inputs["weight_scale"] = torch.exp2(powers.float()).to(inputs["weight_scale"].dtype).to(dev)
    return inputs


# ---- the product -------------------------------------------------------------------------------


@each_way
@pytest.mark.parametrize(
    ("zero", "dtype"), [(False, torch.bfloat16), (True, torch.float16)], ids=["bf16", "zeros-fp16"]
)
@pytest.mark.parametrize(
    "group", [pytest.param(32, marks=SLOW_THERE), 128, pytest.param(256, marks=SLOW_THERE), K]
)
def test_exact_sums_are_exact(
    way: dict[str, Any], zero: bool, group: int, dtype: torch.dtype, dev: torch.device
) -> None:
    """Bit for bit: every nibble is multiplied by its own column of x and its own group's scale."""
    inputs = exact_inputs(dev, group=group, zero=zero, dtype=dtype)
    problem = w4_problem(M, N, K, dtype, group=group, zero=zero)
    got = tkernels.w4a16_gemm(**inputs, config=config_of(problem, **way))
    assert torch.equal(got, tkernels.reference.w4a16_gemm(**inputs))


def test_the_definition_in_plain_python(dev: torch.device) -> None:
    """One row, one column of weights, all that the formula names, without torch."""
    inputs = exact_inputs(dev, zero=True, bias=True)
    got = tkernels.w4a16_gemm(**inputs)
    words, x = inputs["weight"][7].tolist(), inputs["x"][4].tolist()
    scale, zero = inputs["weight_scale"][7].tolist(), inputs["weight_zero"][7].tolist()
    total = 0.0
    for k in range(K):
        q = (words[k // 8] & 0xFFFFFFFF) >> (4 * (k % 8)) & 15
        total += x[k] * (q - zero[k // 128]) * scale[k // 128]
    expected = torch.tensor(total) + inputs["bias"][7].float().cpu()
    assert got[4, 7].cpu() == expected.to(got.dtype)


@pytest.mark.parametrize("rows", [0, 1, 2, 7, 8, 9, 15, 16, 17, 33, 130, 300])
def test_any_number_of_rows(rows: int, dev: torch.device) -> None:
    inputs = w4_inputs(w4_problem(rows, 37, 256, bias=True), dev)
    got = tkernels.w4a16_gemm(**inputs)
    assert got.shape == (rows, 37)
    if rows:
        truth = {**inputs, "x": inputs["x"].float(), "weight_scale": inputs["weight_scale"].float()}
        assert_close(got, tkernels.reference.w4a16_gemm(**truth), what=f"{rows} rows")


@each_way
def test_what_is_beside_the_matrices_is_not_read(way: dict[str, Any], dev: torch.device) -> None:
    """Views of wider matrices, NaN in the columns and rows that are no part of them."""
    k = 256 + 64 + 8  # ends within a step
    problem = w4_problem(M, 33, k, group=k, bias=True)
    inputs, config = w4_inputs(problem, dev), config_of(problem, **way)
    expected = tkernels.w4a16_gemm(**inputs, config=config)
    assert_close(expected, tkernels.reference.w4a16_gemm(**inputs).float(), what="whole rows")
    wide = dict(inputs)
    for name, spoilt in (("x", math.nan), ("weight", 0x77777777), ("weight_scale", math.nan)):
        t = inputs[name]
        padded = torch.full((len(t) + 3, t.shape[1] + 40), spoilt, dtype=t.dtype, device=dev)
        padded[: len(t), : t.shape[1]] = t
        wide[name] = padded[: len(t), : t.shape[1]]
    wide["out"] = torch.full((M + 2, 33 + 5), 5.0, dtype=torch.bfloat16, device=dev)[:M, :33]
    kept = wide["out"]._base
    tkernels.w4a16_gemm(**wide, config=config)
    assert torch.equal(wide["out"], expected)
    assert bool((kept[M:] == 5.0).all())
    assert bool((kept[:, 33:] == 5.0).all())


@each_way
def test_groups_that_end_within_a_step(way: dict[str, Any], dev: torch.device) -> None:
    """Scales past the last group are not read: NaN there would spoil zeros."""
    k, groups = 640, 5
    zero = "SLICES" not in way
    inputs = w4_inputs(w4_problem(3, 17, k, zero=zero), dev)
    expected = tkernels.reference.w4a16_gemm(**inputs)
    scale = torch.full((17, groups + 3), math.nan, dtype=torch.bfloat16, device=dev)
    scale[:, :groups] = inputs["weight_scale"]
    inputs["weight_scale"] = scale[:, :groups]
    got = tkernels.w4a16_gemm(**inputs, config=config_of(**way))
    assert_close(got, expected.float(), what="five groups")


@each_way
def test_scales_at_an_odd_address(way: dict[str, Any], dev: torch.device) -> None:
    """Pairs of scales are read as one number of 4 bytes where that is possible, and only there."""
    inputs = w4_inputs(w4_problem(M, N, K), dev)
    config = config_of(**way)
    expected = tkernels.w4a16_gemm(**inputs, config=config)
    memory = torch.empty(N * K // 128 + 1, dtype=torch.bfloat16, device=dev)
    shifted = memory[1:].view(N, K // 128)
    inputs["weight_scale"] = shifted.copy_(inputs["weight_scale"])
    assert torch.equal(tkernels.w4a16_gemm(**inputs, config=config), expected)


@pytest.mark.filterwarnings("ignore:invalid value")  # of NumPy, in the interpreter
@each_way
@pytest.mark.parametrize(
    ("value", "group"), [pytest.param(math.nan, 32, marks=SLOW_THERE), (math.inf, 128)]
)
def test_bad_activations_spoil_their_row_alone(
    way: dict[str, Any], value: float, group: int, dev: torch.device
) -> None:
    """Of 32 columns a group: what is left out of a product must not be multiplied by zero."""
    problem = w4_problem(M, N, K, group=group)
    inputs = w4_inputs(problem, dev)
    config = config_of(problem, **way)
    before = tkernels.w4a16_gemm(**inputs, config=config)
    inputs["x"][3, 77] = value
    got = tkernels.w4a16_gemm(**inputs, config=config)
    q = unpack_nibbles(inputs["weight"])[:, 77]
    assert not got[3, q != 8].isfinite().any()
    others = [i for i in range(M) if i != 3]
    assert torch.equal(got[others], before[others])


@each_way
def test_the_same_bits_again(way: dict[str, Any], dev: torch.device) -> None:
    inputs = w4_inputs(w4_problem(M, N, K, bias=True), dev)
    config = config_of(**way)
    first = tkernels.w4a16_gemm(**inputs, config=config)
    for _ in range(1 if INTERPRETED else 20):
        assert torch.equal(first, tkernels.w4a16_gemm(**inputs, config=config))


@pytest.mark.gpu
@pytest.mark.parametrize("m", [1, 16, 64, 1000])
@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_large_ones(m: int, zero: bool, dtype: torch.dtype, dev: torch.device) -> None:
    problem = w4_problem(m, 4000, 4096, dtype, zero=zero)
    inputs = w4_inputs(problem, dev)
    assert_close(
        tkernels.w4a16_gemm(**inputs),
        tkernels.reference.w4a16_gemm(**inputs).float(),
        what="4000 outputs",
    )


@pytest.mark.gpu
def test_in_a_captured_graph(dev: torch.device) -> None:
    inputs = w4_inputs(w4_problem(M, N, K), dev)
    expected = tkernels.w4a16_gemm(**inputs)
    x = inputs["x"].clone()
    graph = device.new_graph()
    with device.capture(graph):
        got = tkernels.w4a16_gemm(**inputs)
    inputs["x"].zero_()
    graph.replay()
    device.synchronize()
    assert not got.any()
    inputs["x"].copy_(x)
    graph.replay()
    device.synchronize()
    assert torch.equal(got, expected)


# ---- how nibbles become numbers on a GPU -------------------------------------------------------


def _bits_of(value: float, dtype: torch.dtype) -> int:
    return int(torch.tensor(value, dtype=dtype).view(torch.int16).item()) & 0xFFFF


def _run_ptx(text: str, words: tuple[int, int], dtype: torch.dtype) -> list[float]:
    """What these few instructions of PTX make of two words: two numbers."""
    value = {"$1": words[0], "$2": words[1]}

    def read(name: str) -> int:
        return value[name] if name in value else int(name, 0)

    def halves(bits: int) -> torch.Tensor:
        pair = torch.tensor([bits & 0xFFFF, bits >> 16], dtype=torch.int32)
        return pair.to(torch.int16).view(dtype).double()

    for line in text[text.index(";") + 1 : -1].strip(";").split(";"):
        name, *operands = re.split(r"[ ,]+", line.strip())
        to, given = operands[0], [read(o) for o in operands[1:]]
        if name == "prmt.b32":
            eight = given[0] | given[1] << 32
            value[to] = sum((eight >> 8 * (given[2] >> 4 * i & 7) & 255) << 8 * i for i in range(4))
        elif name == "shr.u32":
            value[to] = given[0] >> given[1]
        elif name == "lop3.b32":
            assert given[3] == 0xEA  # (a & b) | c
            value[to] = given[0] & given[1] | given[2]
        elif name == "mov.b32":
            value[to] = given[0]
        elif name in ("sub.rn.bf16x2", "sub.rn.f16x2"):
            return (halves(given[0]) - halves(given[1])).tolist()
        elif name == "fma.rn.f16x2":
            return (halves(given[0]) * halves(given[1]) + halves(given[2])).tolist()
        else:
            raise AssertionError(name)
    raise AssertionError("no result")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_ptx_makes_numbers_of_nibbles(dtype: torch.dtype) -> None:
    rng = random.Random(0)
    for j in range(8):
        text = _decoding(j, dtype == torch.float16)
        for _ in range(64):
            words = rng.getrandbits(32), rng.getrandbits(32)
            expected = [float((w >> 4 * j & 15) - 8) for w in words]
            assert _run_ptx(text, words, dtype) == expected
    assert _bits_of(136.0, torch.bfloat16) == 0x4308
    assert _bits_of(1032.0, torch.float16) == 0x6408


# ---- formats, from their definitions in plain Python -------------------------------------------


def _matrix(rows: int, cols: int, most: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randint(0, most) for _ in range(cols)] for _ in range(rows)]


def _signed(word: int) -> int:
    return word - (1 << 32) if word >> 31 else word


def _as_int32(words: list[list[int]]) -> torch.Tensor:
    return torch.tensor([[_signed(w) for w in row] for row in words], dtype=torch.int32)


def _packed_along_columns(values: list[list[int]], order: tuple[int, ...]) -> torch.Tensor:
    """Word c: value 8c + order[i] in bits 4i to 4i + 3."""
    return _as_int32(
        [
            [sum(row[c + order[i]] << 4 * i for i in range(8)) for c in range(0, len(row), 8)]
            for row in values
        ]
    )


def _turned(values: list[list[int]]) -> list[list[int]]:
    return [list(column) for column in zip(*values, strict=True)]


IN_ORDER = (0, 1, 2, 3, 4, 5, 6, 7)
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def test_packing_is_that_of_compressed_tensors() -> None:
    """pack_to_int32 of q - 8 with num_bits=4, packed_dim=1: adds 8, the first value lowest."""
    q = _matrix(3, 24, 15, seed=0)
    words = pack_nibbles(torch.tensor(q))
    assert torch.equal(words, _packed_along_columns(q, IN_ORDER))
    assert unpack_nibbles(words).tolist() == q
    scale = torch.tensor([[0.5], [2.0], [-1.0]])
    expected = [
        [(v - 8) * s for v in row] for row, s in zip(q, [0.5, 2.0, -1.0], strict=True)
    ]  # fmt: skip
    assert dequantize_w4(words, scale).tolist() == expected


@pytest.mark.parametrize("n", [5, 8, 19])
def test_zero_points_of_compressed_tensors(n: int) -> None:
    """pack_to_int32 with packed_dim=0: along the outputs, padded with what nobody reads."""
    zero = _matrix(n, 3, 15, seed=1)
    padded = zero + [[9, 9, 9]] * (-n % 8)
    packed = _turned(_packed_along_columns(_turned(padded), IN_ORDER).tolist())
    got = tkernels.unpack_zero_points(torch.tensor(packed, dtype=torch.int32), n)
    assert got.dtype == torch.int8
    assert got.tolist() == zero


@pytest.mark.parametrize("symmetric", [False, True])
def test_repacked_awq_has_the_same_weights(symmetric: bool, dev: torch.device) -> None:
    k, n, group = 64, 16, 32
    q = _matrix(k, n, 15, seed=2)
    zero = [[8] * n] * 2 if symmetric else _matrix(k // group, n, 15, seed=3)
    scales = (torch.rand(k // group, n) + 0.5).half()
    packed = (_packed_along_columns(t, AWQ_ORDER).to(dev) for t in (q, zero))
    weight, scale, got_zero = tkernels.repack_awq(*packed, scales.to(dev))
    assert (got_zero is None) == symmetric
    _assert_same_layer(q, zero, scales, group, (weight, scale, got_zero), dev)


@pytest.mark.parametrize("zero_offset", [0, 1])
def test_repacked_gptq_has_the_same_weights(zero_offset: int, dev: torch.device) -> None:
    k, n, group = 64, 16, 32
    q = _matrix(k, n, 15, seed=4)
    stored = _matrix(k // group, n, 15, seed=5)
    zero = [[z + zero_offset for z in row] for row in stored]
    scales = (torch.rand(k // group, n) + 0.5).half()
    qweight = _packed_along_columns(_turned(q), IN_ORDER).t().contiguous()
    qzeros = _packed_along_columns(stored, IN_ORDER)
    g_idx = torch.tensor([i // group for i in range(k)], dtype=torch.int32)
    layer = tkernels.repack_gptq(
        qweight.to(dev), qzeros.to(dev), scales.to(dev), g_idx.to(dev), zero_offset=zero_offset
    )
    _assert_same_layer(q, zero, scales, group, layer, dev)


def _assert_same_layer(
    q: list[list[int]],
    zero: list[list[int]],
    scales: torch.Tensor,
    group: int,
    layer: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None],
    dev: torch.device,
) -> None:
    """(q - zero) * scale of [K, N], by definition; and a product with them."""
    dense = torch.tensor(
        [
            [
                (q[k][n] - zero[k // group][n]) * float(scales[k // group][n])
                for n in range(len(q[0]))
            ]
            for k in range(len(q))
        ]
    )
    weight, scale, zeros = layer
    assert torch.equal(dequantize_w4(*layer).cpu(), dense.t())
    x = torch.randn(5, len(q)).half().to(dev)
    got = tkernels.w4a16_gemm(x, weight, scale, weight_zero=zeros)
    assert_close(got, x.float() @ dense.to(dev), what="product")


def test_refused_formats() -> None:
    qweight, qzeros = torch.zeros(8, 16, dtype=torch.int32), torch.zeros(2, 2, dtype=torch.int32)
    scales = torch.ones(2, 16).half()
    shuffled = torch.arange(64).flip(0) // 32
    with pytest.raises(ValueError, match=r"^repack_gptq: g_idx must be k // 32 for 64 inputs"):
        tkernels.repack_gptq(qweight, qzeros, scales, shuffled)
    with pytest.raises(ValueError, match=r"^repack_gptq: qzeros must have shape \[2, 2\]"):
        tkernels.repack_gptq(qweight, qzeros[:1], scales)
    with pytest.raises(ValueError, match=r"^repack_gptq: qweight must be int32"):
        tkernels.repack_gptq(qweight.long(), qzeros, scales)
    with pytest.raises(ValueError, match=r"^repack_gptq: zero_offset must be 0 or 1"):
        tkernels.repack_gptq(qweight, qzeros, scales, zero_offset=2)
    with pytest.raises(ValueError, match=r"^repack_awq: scales must have shape"):
        tkernels.repack_awq(qweight, qzeros, scales)  # 8 inputs are no 2 groups
    with pytest.raises(ValueError, match=r"^unpack_zero_points: packed must be int32 \[3, K/group"):
        tkernels.unpack_zero_points(qzeros, 17)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"weight": torch.zeros(N, K // 8, dtype=torch.int8)}, "weight must be int32, got int8"),
        ({"weight": torch.zeros(N, K, dtype=torch.int32)}, r"weight must have shape .*K/8=64\]"),
        ({"weight_scale": torch.ones(N, 32)}, "weight_scale must have shape .* a power of two"),
        ({"weight_scale": torch.ones(N, 3)}, "weight_scale must have shape .* a power of two"),
        ({"weight_scale": torch.ones(N)}, "weight_scale must have shape"),
        ({"weight_scale": torch.ones(N, 4).half()}, "weight_scale must be bfloat16 or float32"),
        ({"weight_zero": torch.zeros(N, 2, dtype=torch.int8)}, r"weight_zero must have .*groups=4"),
        ({"weight_zero": torch.zeros(N, 4, dtype=torch.int32)}, "weight_zero must be int8"),
        ({"bias": torch.zeros(N + 1)}, r"bias must have shape \[N=24\]"),
        ({"x": torch.zeros(M, 12).bfloat16()}, "x must have shape .* K a multiple of 8"),
    ],
)
def test_refusals(changes: dict[str, Any], words: str, dev: torch.device) -> None:
    inputs = w4_inputs(w4_problem(M, N, K), dev)
    moved = {n: v.to(dev) for n, v in changes.items()}
    with pytest.raises((ValueError, TypeError), match=rf"^w4a16_gemm: {words}"):
        tkernels.w4a16_gemm(**{**inputs, **moved})
