"""What is special to rms_norm: layouts of rows, aliasing, range of fp16, odd widths."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tkernels
from tkernels import device
from tkernels.ops.rms_norm import SPEC
from tkernels.registry import Config
from tkernels.rows import row_layout, row_problem
from tkernels.testing import assert_close, assert_right, guarded

# (columns, launch config changes): a row in one tile, and a row in several column blocks.
TILES = {"one-pass": (96, {"BLOCK_N": 128}), "wide": (96, {"BLOCK_N": 32})}
each_tile = pytest.mark.parametrize(("n_cols", "tile"), TILES.values(), ids=TILES)


def tiled(tile: Config, rows: int = 4) -> Config:
    problem = row_problem(rows, 96, torch.float32)
    small = {"BLOCK_ROWS": rows, **tile}
    if "num_warps" in SPEC.space(device.current()):
        small["num_warps"] = 1
    return {**SPEC.default_config(problem, device.current()), **small}


@each_tile
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_in_place_gives_the_same_bits(
    n_cols: int, tile: Config, dtype: torch.dtype, dev: torch.device
) -> None:
    x = torch.randn(7, n_cols, device=dev).to(dtype)
    weight = torch.rand(n_cols, device=dev).to(dtype)
    apart = tkernels.rms_norm(x, weight, config=tiled(tile))
    got = tkernels.rms_norm(x, weight, out=x, config=tiled(tile))
    assert got is x
    assert torch.equal(x, apart)


@each_tile
def test_nan_and_infinity_stay_in_their_row(n_cols: int, tile: Config, dev: torch.device) -> None:
    x = torch.randn(4, n_cols, device=dev)
    weight = torch.rand(n_cols, device=dev)
    clean = tkernels.rms_norm(x, weight, config=tiled(tile))
    x[1, 5], x[2, 90] = torch.nan, torch.inf
    got = tkernels.rms_norm(x, weight, config=tiled(tile))
    assert torch.equal(got[[0, 3]], clean[[0, 3]])
    assert bool(got[1].isnan().all())
    assert bool(got[2, 90].isnan())
    assert bool((got[2, :90] == 0).all())


@each_tile
def test_strides_of_x_and_out_are_independent(n_cols: int, tile: Config, dev: torch.device) -> None:
    x = torch.randn(9, n_cols + 11, device=dev)[::2, 3 : n_cols + 3]
    out = guarded(torch.zeros(5, n_cols, device=dev), padding=17)
    weight = torch.rand(n_cols, device=dev)
    got = tkernels.rms_norm(x, weight, out=out.tensor, config=tiled(tile))
    assert got is out.tensor
    out.check("out")
    assert_close(got, tkernels.reference.rms_norm(x, weight), what="out")


@each_tile
def test_fp16_above_256_does_not_overflow(n_cols: int, tile: Config, dev: torch.device) -> None:
    x = (300.0 + 59700.0 * torch.rand(4, n_cols, device=dev)).half()
    x[0], x[1] = 60000.0, 300.0
    ones = torch.ones(n_cols, dtype=torch.float16, device=dev)
    got = tkernels.rms_norm(x, ones, config=tiled(tile))
    assert bool((got[:2] == 1.0).all())
    assert_close(got, tkernels.reference.rms_norm(x.float(), ones), what="out")


@pytest.mark.parametrize("n_cols", [1, 2, 3, 127, 129, 1023, 16384])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_widths(n_cols: int, dtype: torch.dtype, dev: torch.device) -> None:
    inputs = SPEC.make_inputs(row_problem(3, n_cols, dtype), dev)
    out = guarded(torch.zeros(3, n_cols, dtype=dtype, device=dev), padding=1)
    got = tkernels.rms_norm(**inputs, out=out.tensor)
    assert_right(SPEC, inputs, (got,))
    out.check("out")


def test_heads_of_a_packed_projection(dev: torch.device) -> None:
    """Per-head rows of q, k and v, read in place from [tokens, (q + k + v heads) * head_dim]."""
    tokens, dim = 5, 16
    qkv = torch.randn(tokens, 7 * dim, device=dev)
    weight = torch.rand(dim, device=dev)
    for part in qkv.split([4 * dim, 2 * dim, dim], dim=1):
        heads = part.unflatten(1, (-1, dim))
        before = qkv.clone()
        got = tkernels.rms_norm(heads, weight)
        assert_close(got, tkernels.reference.rms_norm(heads, weight), what="heads")
        assert torch.equal(qkv, before)
        tkernels.rms_norm(heads, weight, out=heads)  # in place, the other heads untouched
        assert torch.equal(heads, got)
        others = (qkv != before).view(tokens, 7, dim).any(-1).sum(1)
        assert others.tolist() == [heads.shape[1]] * tokens
        qkv.copy_(before)


def test_rows_collapse_to_as_few_levels_as_their_strides_allow() -> None:
    x = torch.empty(2, 3, 5, 8)
    assert row_layout("norm", ["x"], [x]) == (1, 30, 0, 8)
    assert row_layout("norm", ["x"], [x.expand(2, 3, 5, 8)[:, :, :4]]) == (6, 4, 40, 8)
    assert row_layout("norm", ["x"], [x[:, :2]]) == (2, 10, 120, 8)
    x = torch.empty(2, 3, 4, 5, 8)  # three levels that are one, then a gap
    assert row_layout("norm", ["x"], [x[..., :3, :]]) == (24, 3, 40, 8)
    assert row_layout("norm", ["x", "out"], [x, x]) == (1, 120, 0, 8, 0, 8)


def test_rows_that_two_strides_cannot_reach_are_refused(dev: torch.device) -> None:
    x = torch.zeros(4, 5, 6, 8, device=dev)[:, :4, :5]
    with pytest.raises(ValueError, match=r"^rms_norm: rows must be reachable .* got strides of x"):
        tkernels.rms_norm(x, torch.ones(8, device=dev))


def test_weight_may_be_fp32(dev: torch.device) -> None:
    """A weight finer than bf16 is used as it is, not rounded to the dtype of x first."""
    x = torch.ones(2, 64, dtype=torch.bfloat16, device=dev)
    weight = torch.full((64,), 1 + 2.0**-8, device=dev)  # bf16 rounds it to 1
    got = tkernels.rms_norm(x, weight * 1.5)
    assert got.dtype == torch.bfloat16
    # 1.5 * (1 + 2^-8) = 1.505859375 rounds up to 1.5078125; 1.5 * 1 would stay 1.5.
    assert got[0, 1].item() == 1.5078125
    assert_close(got, tkernels.reference.rms_norm(x, weight * 1.5), what="out")


def test_one_dimension(dev: torch.device) -> None:
    x, weight = torch.randn(33, device=dev), torch.rand(33, device=dev)
    got = tkernels.rms_norm(x, weight)
    assert got.shape == (33,)
    assert torch.equal(got, tkernels.rms_norm(x[None], weight)[0])


@pytest.mark.parametrize("shape", [(0, 8), (3, 0, 8), (0, 3, 8)])
def test_zero_rows(shape: Any, dev: torch.device) -> None:
    out = torch.empty(shape, device=dev)
    weight = torch.ones(8, device=dev)
    assert tkernels.rms_norm(torch.empty(shape, device=dev), weight).shape == shape
    assert tkernels.rms_norm(torch.empty(shape, device=dev), weight, out=out) is out


def test_out_that_repeats_memory_is_refused(dev: torch.device) -> None:
    x, weight = torch.randn(3, 8, device=dev), torch.ones(8, device=dev)
    with pytest.raises(ValueError, match=r"rms_norm: out must not repeat memory, got strides"):
        tkernels.rms_norm(x, weight, out=torch.empty(8, device=dev).expand(3, 8))
    # Reading the same memory for every row is fine.
    got = tkernels.rms_norm(x[:1].expand(3, 8), weight)
    assert torch.equal(got, tkernels.rms_norm(x[:1], weight).expand(3, 8))


@each_tile
def test_eps_bounds_a_row_of_zeros(n_cols: int, tile: Config, dev: torch.device) -> None:
    x, weight = torch.zeros(1, n_cols, device=dev), torch.ones(n_cols, device=dev)
    assert bool((tkernels.rms_norm(x, weight, config=tiled(tile)) == 0).all())
    x += 1e-3
    got = tkernels.rms_norm(
        x, weight, eps=3e-6, config=tiled(tile)
    )  # 1e-3 / sqrt(1e-6 + 3e-6) = 0.5
    torch.testing.assert_close(got, torch.full_like(got, 0.5))


def test_out_whose_rows_overlap_is_refused(dev: torch.device) -> None:
    """Windows of 8 that start 4 apart: each row would be half overwritten by the next."""
    windows = torch.zeros(20, device=dev).unfold(0, 8, 4)
    with pytest.raises(ValueError, match=r"out must not repeat memory, got strides \[4, 1"):
        tkernels.rms_norm(torch.ones(4, 8, device=dev), torch.ones(8, device=dev), out=windows)
