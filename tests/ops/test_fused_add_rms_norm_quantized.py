"""What is special to fused_add_rms_norm_quantized: the bits of the two kernels that it is."""

from __future__ import annotations

import math
import random

import pytest
import torch

import tkernels
from tkernels import device
from tkernels.ops.fused_add_rms_norm_quantized import SPEC
from tkernels.quantized_rows import problem
from tkernels.registry import Config, get
from tkernels.testing import bytes_of, guarded, poisoned_memory

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
CONFIGS = 20 if device.KIND == "cuda" else 4


def random_inputs(
    rows: int, cols: int, dtype: torch.dtype, dev: torch.device, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gaussian rows of different sizes, one of them zero, and a weight of another dtype."""
    generator = torch.Generator().manual_seed(seed)
    size = torch.logspace(-2, 2, rows)[:, None]
    x, residual = (torch.randn(rows, cols, generator=generator) * size for _ in range(2))
    x[rows // 2] = residual[rows // 2] = 0
    weight = 1 + 0.3 * torch.randn(cols, generator=generator)
    other = torch.float32 if dtype != torch.float32 else torch.bfloat16
    return x.to(dtype).to(dev), residual.to(dtype).to(dev), weight.to(other).to(dev)


def drawn(rng: random.Random, rows: int, cols: int, dtype: torch.dtype) -> Config:
    """A random legal config; on the CPU, where each block takes its time, of few blocks a row."""
    facts = device.current()
    space = SPEC.space(facts)
    while True:
        config = {name: rng.choice(values) for name, values in space.items()}
        few = device.KIND == "cuda" or cols // 16 <= config["BLOCK_N"] <= 4 * cols
        if few and SPEC.why_illegal(config, problem(rows, cols, dtype), facts) is None:
            return config


def unfused_config(config: Config, rows: int, cols: int, dtype: torch.dtype) -> Config:
    """The same tile for ``fused_add_rms_norm``, so that it sums the squares in the same order."""
    spec = get("fused_add_rms_norm")
    facts = device.current()
    given = {"n_outer": 1, "n_inner": rows, "n_cols": cols, "dtype": dtype}
    same = {**spec.default_config(given, facts), **config}
    return {name: value for name, value in same.items() if name in spec.space(facts)}


def unfused(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, config: Config
) -> tuple[torch.Tensor, ...]:
    same = unfused_config(config, *x.shape, x.dtype)
    normed, total = tkernels.fused_add_rms_norm(x, residual, weight, eps=1e-5, config=same)
    return (*tkernels.quantize_per_token(normed), total, normed)


def assert_same_bits(got: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]) -> None:
    for name, a, b in zip(SPEC.outputs, got, expected, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(bytes_of(a), bytes_of(b)), name


def small(cols: int, **more: int) -> Config:
    """A config of one warp, in tiles of the sizes given."""
    facts = device.current()
    config = {**SPEC.default_config(problem(8, cols), facts), **more}
    return {**config, "num_warps": 1} if "num_warps" in config else config


@each_dtype
@pytest.mark.parametrize("cols", [1, 48, 320])
def test_bits_of_the_two_kernels(cols: int, dtype: torch.dtype, dev: torch.device) -> None:
    """With one tile for both; rows divide by 16 bytes, or a GPU may add squares in two orders."""
    rng = random.Random(f"{cols} {dtype}")
    for i in range(CONFIGS):
        rows = rng.choice([1, 3, 7])
        x, residual, weight = random_inputs(rows, cols, dtype, dev, seed=i)
        config = drawn(rng, rows, cols, dtype)
        expected = unfused(x, residual, weight, config)
        call = {"eps": 1e-5, "config": config}
        with poisoned_memory():
            kept = tkernels.fused_add_rms_norm_quantized(x, residual, weight, keep=True, **call)
            plain = tkernels.fused_add_rms_norm_quantized(x, residual, weight, **call)
        assert_same_bits(kept, expected)
        assert_same_bits(plain, (*expected[:3], expected[3][:0]))


def test_codes_go_to_masked_gemm(dev: torch.device) -> None:
    x, residual, norm = random_inputs(5, 64, torch.bfloat16, dev)
    # By PyTorch: masked_gemm may read weights before a kernel of this library has ended.
    made = torch.randn(32, 64, device=dev)
    weight, weight_scale = tkernels.reference.quantize_per_token(made)
    codes, scale, _, normed = tkernels.fused_add_rms_norm_quantized(x, residual, norm, keep=True)
    given = tkernels.masked_gemm(normed, weight, weight_scale, x_q=codes, x_scale=scale)
    assert torch.equal(given, tkernels.masked_gemm(normed, weight, weight_scale))


@pytest.mark.parametrize("block", [64, 16])  # in one tile, and in several
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_spoilt_row_reads_nan_and_spoils_no_other(
    value: float, block: int, dev: torch.device
) -> None:
    x, residual, weight = random_inputs(5, 40, torch.bfloat16, dev)
    config = small(40, BLOCK_ROWS=4, BLOCK_N=block)
    call = {"keep": True, "config": config}
    before = tkernels.fused_add_rms_norm_quantized(x, residual, weight, **call)
    for spoilt in (x, residual):
        at = spoilt[3, 33].item()
        spoilt[3, 33] = value
        codes, scale, total, normed = tkernels.fused_add_rms_norm_quantized(
            x, residual, weight, **call
        )
        assert bool(scale[3].isnan())
        assert not codes[3].any()
        assert bool(normed[3].isnan().any())
        others = [0, 1, 2, 4]
        assert_same_bits(
            tuple(t[others] for t in (codes, scale, total, normed)),
            tuple(t[others] for t in before),
        )
        spoilt[3, 33] = at


def test_values_that_leave_fp16_spoil_their_row(dev: torch.device) -> None:
    """The rounding to fp16 makes infinities of numbers that fp32 still holds."""
    x = torch.ones(3, 16, dtype=torch.float16, device=dev)
    x[1] = 0
    weight = torch.full((16,), 7e4, device=dev)
    for block in (16, 4):
        codes, scale, _, _ = tkernels.fused_add_rms_norm_quantized(
            x, torch.zeros_like(x), weight, config=small(16, BLOCK_ROWS=1, BLOCK_N=block)
        )
        assert scale.isnan().tolist() == [True, False, True]
        assert float(scale[1]) == 0.0
        assert not codes.any()


@pytest.mark.parametrize("block", [64, 16])
def test_works_in_place(block: int, dev: torch.device) -> None:
    x, residual, weight = random_inputs(5, 40, torch.bfloat16, dev)
    config = small(40, BLOCK_ROWS=2, BLOCK_N=block)
    expected = tkernels.fused_add_rms_norm_quantized(x, residual, weight, keep=True, config=config)
    got = tkernels.fused_add_rms_norm_quantized(
        x, residual, weight, keep=True, out=x, residual_out=residual, config=config
    )
    assert got[2] is residual
    assert got[3] is x
    assert_same_bits(got, expected)


def test_without_keep_no_rows_are_written(dev: torch.device) -> None:
    """Rows of results have guards on all sides; without ``keep`` there are three results."""
    x, residual, weight = random_inputs(5, 40, torch.bfloat16, dev)
    expected = tkernels.fused_add_rms_norm_quantized(x, residual, weight)
    outs = {
        name: guarded(torch.full_like(t, 77))
        for name, t in zip(SPEC.outputs[:3], expected[:3], strict=True)
    }
    given = {name: g.tensor for name, g in outs.items()}
    got = tkernels.fused_add_rms_norm_quantized(x, residual, weight, **given)
    assert_same_bits(got, expected)
    assert got[3].shape == (0, 40)
    for name, g in outs.items():
        g.check(name)


def test_refuses_what_does_not_fit(dev: torch.device) -> None:
    x = torch.randn(3, 8, device=dev)
    call = tkernels.fused_add_rms_norm_quantized
    weight = torch.ones(8, device=dev)
    name = "^fused_add_rms_norm_quantized: "
    with pytest.raises(ValueError, match=rf"{name}x must have shape \[n_rows, n_cols\], got"):
        call(x[None], x[None], weight)
    with pytest.raises(ValueError, match=rf"{name}out must have shape \[n_rows=0, n_cols=8\], got"):
        call(x, x, weight, out=torch.empty_like(x))
    with pytest.raises(TypeError, match=rf"{name}keep must be a bool, got 1 \(int\)"):
        call(x, x, weight, keep=1)  # type: ignore[arg-type]
    same = torch.empty_like(x)
    with pytest.raises(ValueError, match=rf"{name}out must be another tensor than residual_out"):
        call(x, x, weight, keep=True, out=same, residual_out=same)
