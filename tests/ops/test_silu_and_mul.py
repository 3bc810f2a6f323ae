"""What is special to silu_and_mul: extreme gates, odd widths, layouts of its two halves."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import tkernels
from tkernels import device
from tkernels.ops.silu_and_mul import SPEC
from tkernels.rows import row_problem
from tkernels.testing import assert_right, clone_inputs, guarded

INF, NAN = math.inf, math.nan


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_extreme_gates(dtype: torch.dtype, dev: torch.device) -> None:
    gates = [-INF, -60000.0, -104.0, -89.0, -88.0, -30.0, -0.0, 0.0, 30.0, 89.0, 60000.0, INF, NAN]
    expected = [g / (1 + math.exp(min(-g, 700))) if abs(g) < INF else g for g in gates]
    expected[0] = 0.0
    x = torch.tensor([gates, [1.0] * len(gates)], device=dev).flatten().to(dtype)
    got = tkernels.silu_and_mul(x).double().cpu()
    truth = torch.tensor(expected, dtype=torch.float64)
    # fp32 has no room for silu(-88) and below, fp16 none below 6e-8: what stands there is as small.
    least = 6e-8 if dtype == torch.float16 else 1e-30
    torch.testing.assert_close(got, truth, rtol=1.6e-2, atol=least, equal_nan=True)


def test_infinite_up(dev: torch.device) -> None:
    x = torch.tensor([1.0, -1.0, 0.0, NAN, INF, -INF, INF, 1.0], device=dev)
    got = tkernels.silu_and_mul(x).tolist()
    assert got[:2] == [INF, INF]  # silu(1) * inf, silu(-1) * -inf
    assert math.isnan(got[2])  # 0 * inf
    assert math.isnan(got[3])


def test_fp16_does_not_overflow_inside(dev: torch.device) -> None:
    """The product is formed in fp32: only a result above 65504 becomes infinite."""
    x = torch.tensor([[60000.0, 300.0, 300.0, 1.0, 200.0, 300.0]], device=dev).half()
    assert tkernels.silu_and_mul(x).tolist() == [[60000.0, 60000.0, INF]]


@pytest.mark.parametrize("n_cols", [1, 2, 3, 127, 129, 1023, 1025])
def test_widths(n_cols: int, dev: torch.device) -> None:
    inputs = SPEC.make_inputs(row_problem(3, n_cols, torch.bfloat16), dev)
    out = guarded(torch.zeros(3, n_cols, dtype=torch.bfloat16, device=dev), padding=1)
    kept = clone_inputs(inputs)
    assert_right(SPEC, kept, (tkernels.silu_and_mul(**inputs, out=out.tensor),))
    out.check("out")


@pytest.mark.parametrize("n_cols", [8, 100])
def test_in_place_in_the_gate_half(n_cols: int, dev: torch.device) -> None:
    x = torch.randn(5, 2 * n_cols, device=dev)
    up = x[:, n_cols:].clone()
    expected = tkernels.silu_and_mul(x.clone())
    got = tkernels.silu_and_mul(x, out=x[:, :n_cols])
    assert got.data_ptr() == x.data_ptr()
    assert torch.equal(x[:, :n_cols], expected)
    assert torch.equal(x[:, n_cols:], up)


def test_strides_of_x_and_out_are_independent(dev: torch.device) -> None:
    x = torch.randn(3, 4, 40, device=dev)[:, 1:, 2:34]  # [3, 3, 32]
    out = torch.full((3, 3, 24), 7.0, device=dev).transpose(0, 1)[..., 5:21]
    got = tkernels.silu_and_mul(x, out=out)
    assert got is out
    torch.testing.assert_close(out, tkernels.reference.silu_and_mul(x.clone()))
    assert out._base is not None
    assert int((out._base == 7.0).sum()) == 3 * 3 * 8


def test_shapes(dev: torch.device) -> None:
    for shape in ((6,), (0, 6), (2, 6), (2, 0, 6), (2, 3, 6), (2, 1, 3, 6)):
        got = tkernels.silu_and_mul(torch.randn(shape, device=dev))
        assert got.shape == (*shape[:-1], 3)
        assert got.is_contiguous()


@pytest.mark.parametrize(
    ("x", "out", "words"),
    [
        ((2, 3), None, r"x must have shape \[..., 2 \* n_cols\], got float32 \[2, 3\]"),
        ((2, 0), None, r"x must have shape \[..., n_cols >= 1\], got float32 \[2, 0\]"),
        ((), None, r"x must have shape .*, got float32 \[\]"),
        ((2, 6), (2, 6), r"out must be float32 \[2, 3\], got float32 \[2, 6\]"),
        ((2, 6), (3, 3), r"out must be float32 \[2, 3\], got float32 \[3, 3\]"),
        ((2, 6), (3,), r"out must be float32 \[2, 3\], got float32 \[3\]"),
    ],
)
def test_refused(x: Any, out: Any, words: str, dev: torch.device) -> None:
    out_tensor = None if out is None else torch.empty(out, device=dev)
    with pytest.raises(ValueError, match=rf"^silu_and_mul: {words}$"):
        tkernels.silu_and_mul(torch.zeros(x, device=dev), out=out_tensor)


def test_out_that_repeats_memory_is_refused(dev: torch.device) -> None:
    with pytest.raises(ValueError, match=r"^silu_and_mul: out must not repeat memory"):
        tkernels.silu_and_mul(
            torch.zeros(2, 6, device=dev), out=torch.zeros(3, device=dev).expand(2, 3)
        )


@pytest.mark.parametrize(
    "facts", [device.sm_facts(90), device.ascend_facts()], ids=lambda d: d.arch
)
def test_one_row_is_spread_over_the_cores(facts: device.Device) -> None:
    """Decoding a single token leaves no core with more than a small piece of the row."""
    config = SPEC.default_config(row_problem(1, 12288, torch.bfloat16), facts)
    assert config["BLOCK_ROWS"] == 1
    assert config["BLOCK_N"] <= (256 if facts.type == "cuda" else 2048)
