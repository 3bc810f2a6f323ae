"""What is special to quantize_per_token: rounding, rows that are not numbers, tiny ones, tiles."""

from __future__ import annotations

import json
import math

import pytest
import torch

import tkernels
from tests.compiled_for import lines_of
from tkernels import device
from tkernels.ops.quantize_per_token import SPEC, quantize_problem
from tkernels.registry import Config


def tiled(dev_config: Config, **more: int) -> Config:
    small = {"num_warps": 1} if "num_warps" in SPEC.space(device.current()) else {}
    return {**dev_config, **small, **more}


def default(rows: int, cols: int) -> Config:
    return SPEC.default_config(quantize_problem(rows, cols, torch.float32), device.current())


def test_rounds_half_to_even(dev: torch.device) -> None:
    """A row whose scale is 1: codes are the numbers, halves go to the even neighbour."""
    x = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 126.49]], device=dev)
    codes, scale = tkernels.quantize_per_token(x)
    assert scale.tolist() == [1.0]
    assert codes.tolist() == [[127, 0, 2, 2, 0, -2, -2, 126]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_codes_come_back_within_half_a_step(dtype: torch.dtype, dev: torch.device) -> None:
    x = (torch.randn(9, 200, device=dev) * torch.logspace(-3, 3, 9, device=dev)[:, None]).to(dtype)
    codes, scale = tkernels.quantize_per_token(x)
    assert codes.abs().amax(1).tolist() == [127] * 9  # symmetric: -128 is no code
    error = (codes.float() * scale[:, None] - x.float()).abs()
    assert bool((error <= 0.5001 * scale[:, None]).all())


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_spoilt_row_reads_nan_and_spoils_no_other(value: float, dev: torch.device) -> None:
    for cols, block in ((40, 64), (100, 32)):  # in one tile, and in several
        x = torch.randn(5, cols, device=dev)
        config = tiled(default(5, cols), BLOCK_ROWS=4, BLOCK_N=block)
        before = tkernels.quantize_per_token(x, config=config)
        x[2, 33] = value
        codes, scale = tkernels.quantize_per_token(x, config=config)
        assert bool(scale[2].isnan())
        assert not codes[2].any()
        keep = [0, 1, 3, 4]
        assert torch.equal(codes[keep], before[0][keep])
        assert torch.equal(scale[keep], before[1][keep])


def test_zero_and_tiny_rows(dev: torch.device) -> None:
    """No division by nothing; what is too small for an inverse counts as nothing."""
    x = torch.zeros(4, 16, device=dev)
    x[1] = 2.0**-101
    x[2] = 1e-45  # the smallest number of fp32
    x[3] = 2.0**-99
    codes, scale = tkernels.quantize_per_token(x)
    assert scale[:3].tolist() == [0.0, 0.0, 0.0]
    assert not codes[:3].any()
    assert codes[3].tolist() == [127] * 16
    assert float(scale[3]) == pytest.approx(2.0**-99 / 127)


def test_largest_numbers_do_not_overflow(dev: torch.device) -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        most = torch.finfo(dtype).max
        x = torch.tensor([[most, -most, most / 2, 0.0]], device=dev).to(dtype)
        codes, scale = tkernels.quantize_per_token(x)
        assert codes[0, [0, 1, 3]].tolist() == [127, -127, 0]
        assert bool(scale.isfinite().all())


def test_tiles_do_not_change_bits(dev: torch.device) -> None:
    x = torch.randn(7, 300, device=dev).bfloat16()
    first = tkernels.quantize_per_token(x)
    for rows, block in ((1, 512), (4, 64), (2, 16)):
        again = tkernels.quantize_per_token(
            x, config=tiled(default(7, 300), BLOCK_ROWS=rows, BLOCK_N=block)
        )
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_refuses_what_does_not_fit(dev: torch.device) -> None:
    x = torch.randn(3, 8, device=dev)
    with pytest.raises(ValueError, match=r"^quantize_per_token: x must have shape \[n_rows, n_col"):
        tkernels.quantize_per_token(x[None])
    with pytest.raises(ValueError, match=r"scale_out must have shape \[n_rows=3\], got float32"):
        tkernels.quantize_per_token(x, scale_out=torch.empty(4, device=dev))


CHILD = r"""
import json
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from tkernels import offline
from tkernels.ops.quantize_per_token import SPEC, quantize_problem

with FakeTensorMode(), offline.record_launches() as launches:
    problem = quantize_problem(32768, 768, torch.bfloat16)
    SPEC.launch(**SPEC.make_inputs(problem, torch.device("cpu")))
ptx = offline.compiled_cuda(launches[0], 90).asm["ptx"]
spills = offline.compile_cuda(launches[0], 90).spill_bytes
names = ("ld.global.v4.b32", "ld.global", "cvt.rzi")
print(json.dumps([spills, *(ptx.count(name) for name in names)]))
"""


def test_many_narrow_rows_cost_no_conversions() -> None:
    """Compiled for sm_90: reads of 16 bytes, and the low byte of a sum for each code."""
    spills, wide, loads, conversions = json.loads(lines_of(CHILD)[-1])
    assert (spills, wide, conversions) == (0, loads, 0)


BESIDE = r"""
import json
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from tkernels import device, offline
from tkernels.ops.quantize_per_token import quantize_ahead, quantize_per_token

with FakeTensorMode(), offline.record_launches() as launches:
    for rows in (64, 4096, 32768):
        x = torch.empty(rows, 2048, dtype=torch.bfloat16)
        codes, scale = torch.empty(rows, 2048, dtype=torch.int8), torch.empty(rows)
        quantize_ahead(x, codes, scale)
        quantize_per_token(x, out=codes, scale_out=scale)
print(json.dumps([device.current().num_cores, *(launch.grid[0] for launch in launches)]))
"""


def test_what_runs_beside_another_kernel_has_a_place_at_once() -> None:
    """Its programs wait at their ends: those without a place would come behind what they should run
    beside."""
    cores, *programs = json.loads(lines_of(BESIDE)[-1])
    ahead, behind = programs[::2], programs[1::2]
    assert ahead[0] == behind[0] == 64
    assert all(
        count <= 8 * cores < other for count, other in zip(ahead[1:], behind[1:], strict=True)
    )
