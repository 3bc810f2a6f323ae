"""What is special to moe_combine: rows that are not there, the order of the sum, far rows."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import tkernels
from tkernels import device
from tkernels.ops.moe_combine import SPEC, combine_problem
from tkernels.testing import guarded, poisoned_memory


def combine(y: torch.Tensor, positions: torch.Tensor, **given: Any) -> torch.Tensor:
    """Results that nothing was written to would be NaN."""
    with poisoned_memory():
        return tkernels.moe_combine(y, positions, **given)


@pytest.mark.parametrize("top_k", [2, 17])  # written out, and in a loop
def test_rows_without_a_position_are_not_read(top_k: int, dev: torch.device) -> None:
    """NaN in rows that nobody names, in the first one too, and round y."""
    values = torch.randn(8, 50, device=dev)
    values[[0, 3, 7]] = math.nan
    y = guarded(values)
    positions = torch.full((4, top_k), -1, dtype=torch.int32, device=dev)
    positions[0, 0], positions[1, 1], positions[2, 0], positions[2, 1] = 5, 2, 1, 6
    config = SPEC.default_config(combine_problem(4, top_k, 50), device.current())
    for block in (16, 64):
        out = combine(y.tensor, positions, config={**config, "BLOCK_H": block, "num_warps": 1})
        expected = [values[5], values[2], values[1] + values[6], torch.zeros(50, device=dev)]
        assert torch.equal(out, torch.stack(expected))


@pytest.mark.parametrize("stray", [-1, -2, -(2**31), 8, 2**31 - 1])
def test_positions_of_no_row_are_absent(stray: int, dev: torch.device) -> None:
    y = torch.randn(8, 33, device=dev)
    positions = torch.tensor([[7, stray, 0], [stray, stray, stray]], device=dev).int()
    out = combine(guarded(y).tensor, positions)
    assert torch.equal(out[0], y[7] + y[0])
    assert out[1].tolist() == [0.0] * 33


def test_no_rows_at_all(dev: torch.device) -> None:
    out = combine(torch.empty(0, 20, device=dev), torch.zeros(3, 2, device=dev).int())
    assert torch.equal(out, torch.zeros(3, 20, device=dev))


def test_the_order_of_the_sum(dev: torch.device) -> None:
    """j = 0, 1, 2..: 1e8 + 1 - 1e8 is 0 in fp32, 1e8 - 1e8 + 1 is 1; and one is named twice."""
    y = torch.tensor([[1e8], [1.0], [-1e8]], device=dev)
    positions = torch.tensor([[0, 1, 2], [0, 2, 1], [1, 1, 1]], device=dev).int()
    assert combine(y, positions).flatten().tolist() == [0.0, 1.0, 3.0]


def test_rounded_once(dev: torch.device) -> None:
    """In bf16, 256 + 1 is 256; added in fp32 and rounded at the end, eight of them count."""
    y = torch.tensor([[256.0], [1.0]], device=dev, dtype=torch.bfloat16)
    positions = torch.tensor([[0, *[1] * 8]], device=dev).int()
    assert combine(y, positions).item() == 264.0


def test_a_spoilt_row_spoils_its_tokens_alone(dev: torch.device) -> None:
    y = torch.ones(4, 16, device=dev)
    y[2] = math.nan
    out = combine(y, torch.tensor([[0, 1], [2, 3], [3, 0]], device=dev).int())
    assert bool(out[1].isnan().all())
    assert torch.equal(out[[0, 2]], torch.full((2, 16), 2.0, device=dev))


def test_rows_past_2_31_elements(dev: torch.device) -> None:
    """Row numbers and strides fit 32 bits, their products do not. Few pages are ever touched."""
    memory = torch.empty(2**31 + 4096, dtype=torch.float16, device=dev)
    y = memory.as_strided((3, 32), (2**30, 1))
    y.copy_(torch.arange(96).view(3, 32))
    out = memory.as_strided((3, 32), (2**30, 1), 64)
    positions = torch.tensor([[2, 1], [1, -1], [0, 2]], device=dev).int()
    assert combine(y, positions, out=out) is out
    rows = torch.arange(96, device=dev).view(3, 32)
    expected = torch.stack([rows[2] + rows[1], rows[1], rows[0] + rows[2]])
    assert torch.equal(out, expected.half())
