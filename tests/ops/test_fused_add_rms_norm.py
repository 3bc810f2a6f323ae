"""What is special to fused_add_rms_norm: four layouts, aliasing, the rounded sum."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tkernels
from tkernels import device
from tkernels.ops.fused_add_rms_norm import SPEC
from tkernels.registry import Config
from tkernels.rows import row_problem
from tkernels.testing import assert_close, assert_right, guarded

N_COLS = 96
TILES = {"one-pass": {"BLOCK_N": 128}, "wide": {"BLOCK_N": 32}}
each_tile = pytest.mark.parametrize("tile", TILES.values(), ids=TILES)
each_dtype = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str
)


def tiled(tile: Config, rows: int = 4) -> Config:
    problem = row_problem(rows, N_COLS, torch.float32)
    small = {"BLOCK_ROWS": rows, **tile}
    if "num_warps" in SPEC.space(device.current()):
        small["num_warps"] = 1
    return {**SPEC.default_config(problem, device.current()), **small}


def make(rows: int, dtype: torch.dtype, dev: torch.device) -> list[torch.Tensor]:
    """x, residual, weight."""
    x, residual = torch.randn(2, rows, N_COLS, device=dev).to(dtype)
    return [x, residual, torch.rand(N_COLS, device=dev).to(dtype)]


@each_tile
@each_dtype
def test_in_place_gives_the_same_bits(tile: Config, dtype: torch.dtype, dev: torch.device) -> None:
    x, residual, weight = make(7, dtype, dev)
    apart = tkernels.fused_add_rms_norm(x, residual, weight, config=tiled(tile))
    in_place = tkernels.fused_add_rms_norm(
        x, residual, weight, out=x, residual_out=residual, config=tiled(tile)
    )
    assert in_place[0] is x
    assert in_place[1] is residual
    assert torch.equal(x, apart[0])
    assert torch.equal(residual, apart[1])


@each_tile
def test_outputs_may_swap_places(tile: Config, dev: torch.device) -> None:
    """The sum over x and the normed rows over the residual."""
    x, residual, weight = make(5, torch.bfloat16, dev)
    apart = tkernels.fused_add_rms_norm(x, residual, weight, config=tiled(tile))
    tkernels.fused_add_rms_norm(
        x, residual, weight, out=residual, residual_out=x, config=tiled(tile)
    )
    assert torch.equal(residual, apart[0])
    assert torch.equal(x, apart[1])


@each_tile
@each_dtype
def test_sum_is_rounded_once(tile: Config, dtype: torch.dtype, dev: torch.device) -> None:
    x, residual, weight = make(6, dtype, dev)
    _, total = tkernels.fused_add_rms_norm(x, residual, weight, config=tiled(tile))
    assert torch.equal(total, (x.float() + residual.float()).to(dtype))


@each_tile
@pytest.mark.parametrize(
    ("dtype", "big"), [(torch.bfloat16, 256.0), (torch.float16, 2048.0)], ids=["bf16", "fp16"]
)
def test_norm_is_of_the_rounded_sum(
    tile: Config, dtype: torch.dtype, big: float, dev: torch.device
) -> None:
    """big + 1 is stored as big. Next to big itself the norm is 1, of the exact sums it is not."""
    x = torch.full((2, N_COLS), big, dtype=dtype, device=dev)
    residual = torch.ones_like(x)
    residual[:, 7] = 0.0
    weight = torch.ones(N_COLS, dtype=dtype, device=dev)
    exact = x.float() + residual.float()
    wrong = (exact * torch.rsqrt(exact.pow(2).mean(-1, keepdim=True))).to(dtype)
    assert wrong[0, 7].item() != 1.0  # the case tells the two apart
    normed, total = tkernels.fused_add_rms_norm(x, residual, weight, config=tiled(tile))
    assert bool((total == big).all())
    assert bool((normed == 1.0).all())


@each_tile
def test_four_independent_layouts(tile: Config, dev: torch.device) -> None:
    x = torch.randn(9, N_COLS + 11, device=dev)[::2, 3 : N_COLS + 3]
    residual = torch.randn(5, N_COLS + 2, device=dev)[:, 1 : N_COLS + 1]
    weight = torch.rand(N_COLS, device=dev)
    out = guarded(torch.zeros(5, N_COLS, device=dev), padding=17)
    residual_out = guarded(torch.zeros(5, N_COLS, device=dev), padding=1)
    got = tkernels.fused_add_rms_norm(
        x,
        residual,
        weight,
        out=out.tensor,
        residual_out=residual_out.tensor,
        config=tiled(tile),
    )
    out.check("out")
    residual_out.check("residual_out")
    expected = tkernels.reference.fused_add_rms_norm(x, residual, weight)
    assert_close(got[0], expected[0], what="out")
    assert torch.equal(got[1], expected[1])


def test_one_output_given(dev: torch.device) -> None:
    x, residual, weight = make(3, torch.float32, dev)
    expected = tkernels.fused_add_rms_norm(x, residual, weight)
    for name in SPEC.outputs:
        mine = torch.zeros_like(x)
        got = tkernels.fused_add_rms_norm(x, residual, weight, **{name: mine})
        assert got[SPEC.outputs.index(name)] is mine
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@each_tile
def test_fp16_above_256_does_not_overflow(tile: Config, dev: torch.device) -> None:
    x = (300.0 + 32000.0 * torch.rand(4, N_COLS, device=dev)).half()
    residual = (300.0 + 27000.0 * torch.rand(4, N_COLS, device=dev)).half()
    x[0], residual[0] = 30000.0, 30000.0
    ones = torch.ones(N_COLS, dtype=torch.float16, device=dev)
    normed, total = tkernels.fused_add_rms_norm(x, residual, ones, config=tiled(tile))
    assert bool(total.isfinite().all())
    assert bool((normed[0] == 1.0).all())
    assert_close(normed, tkernels.reference.rms_norm(total.float(), ones), what="out")


@each_tile
def test_nan_and_infinity_stay_in_their_row(tile: Config, dev: torch.device) -> None:
    x, residual, weight = make(4, torch.float32, dev)
    clean = tkernels.fused_add_rms_norm(x, residual, weight, config=tiled(tile))
    x[1, 5], residual[2, 90] = torch.nan, torch.inf
    got = tkernels.fused_add_rms_norm(x, residual, weight, config=tiled(tile))
    for a, b in zip(got, clean, strict=True):
        assert torch.equal(a[[0, 3]], b[[0, 3]])
    assert bool(got[0][1].isnan().all())
    assert bool(got[0][2, 90].isnan())
    # The sum itself is only wrong in the one element.
    assert int((~got[1].isfinite()).sum()) == 2


@pytest.mark.parametrize("n_cols", [1, 2, 3, 127, 129, 1023, 16384])
def test_widths(n_cols: int, dev: torch.device) -> None:
    inputs = SPEC.make_inputs(row_problem(3, n_cols, torch.bfloat16), dev)
    empty = torch.zeros(3, n_cols, dtype=torch.bfloat16, device=dev)
    outs = {name: guarded(empty, padding=1) for name in SPEC.outputs}
    got = tkernels.fused_add_rms_norm(**inputs, **{n: g.tensor for n, g in outs.items()})
    assert_right(SPEC, inputs, got)
    for name, g in outs.items():
        g.check(name)


def test_weight_may_be_fp32(dev: torch.device) -> None:
    x, residual, _ = make(4, torch.bfloat16, dev)
    weight = torch.rand(N_COLS, device=dev)
    normed, total = tkernels.fused_add_rms_norm(x, residual, weight)
    assert normed.dtype == total.dtype == torch.bfloat16
    assert_close(normed, tkernels.reference.rms_norm(total.float(), weight), what="out")


@pytest.mark.parametrize("shape", [(8,), (0, 8), (3, 0, 8), (2, 3, 8)])
def test_shapes(shape: Any, dev: torch.device) -> None:
    x, residual = torch.randn(2, *shape, device=dev)
    weight = torch.rand(8, device=dev)
    got = tkernels.fused_add_rms_norm(x, residual, weight)
    expected = tkernels.reference.fused_add_rms_norm(x, residual, weight)
    for a, b in zip(got, expected, strict=True):
        assert a.shape == shape
        assert_close(a, b, what=str(shape))


@pytest.mark.parametrize("name", SPEC.outputs)
def test_output_that_repeats_memory_is_refused(name: str, dev: torch.device) -> None:
    x, residual, weight = make(3, torch.float32, dev)
    repeated = torch.empty(N_COLS, device=dev).expand(3, N_COLS)
    with pytest.raises(ValueError, match=rf"^fused_add_rms_norm: {name} must not repeat memory"):
        tkernels.fused_add_rms_norm(x, residual, weight, **{name: repeated})


@each_tile
def test_eps_is_added_to_the_mean_square(tile: Config, dev: torch.device) -> None:
    x = torch.full((4, N_COLS), 5e-4, device=dev)
    got = tkernels.fused_add_rms_norm(
        x, x, torch.ones(N_COLS, device=dev), eps=3e-6, config=tiled(tile)
    )[0]
    torch.testing.assert_close(got, torch.full_like(got, 0.5))  # 1e-3 / sqrt(1e-6 + 3e-6)
