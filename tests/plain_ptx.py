"""Run the few lines of PTX that kernels have as plain Python, on tensors of a number a lane."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch


def run(
    text: str, given: list[torch.Tensor], reciprocal: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """What $0 has in the end; ``reciprocal``: what the chip's approximate one gives."""
    operations = {
        "mov.b32": lambda a: a,
        "prmt.b32": _permuted,
        "max.NaN.xorsign.abs.bf16x2": lambda a, b: _larger_sizes(a, b, 0x7F80),
        "max.NaN.xorsign.abs.f16x2": lambda a, b: _larger_sizes(a, b, 0x7C00),
        "rcp.approx.ftz.f32": reciprocal,
    }
    registers: dict[str, Any] = {f"${i}": numbers for i, numbers in enumerate(given, 1)}
    for statement in re.sub(r"//.*|[{}]", "", text).split(";"):
        words = statement.replace(",", " ").split()
        if words and words[0] != ".reg":
            name, to, *sources = words
            values = [registers[s] if s in registers else int(s, 0) for s in sources]
            registers[to] = operations[name](*values)
    return registers["$0"]


def _permuted(a: torch.Tensor, b: torch.Tensor, selector: int) -> torch.Tensor:
    """Each byte is one of the four of a, or of the four of b."""
    result = torch.zeros_like(a)
    for i in range(4):
        which = selector >> 4 * i & 15
        assert which < 8
        byte = (a, b)[which // 4] >> 8 * (which % 4) & 0xFF
        result = result | byte << 8 * i
    return result


def _larger_sizes(a: torch.Tensor, b: torch.Tensor, infinity: int) -> torch.Tensor:
    """Of pairs of numbers of 16 bits: the larger size, the signs' product; NaN where one is."""
    result = torch.zeros_like(a)
    for shift in (0, 16):
        x, y = a >> shift & 0xFFFF, b >> shift & 0xFFFF
        size = torch.maximum(x & 0x7FFF, y & 0x7FFF)
        result = result | torch.where(size > infinity, 0x7FFF, size | (x ^ y) & 0x8000) << shift
    return result


def near_reciprocal(x: torch.Tensor, ulps: Any) -> torch.Tensor:
    """1 / x, rounded and moved by ``ulps``; what is subnormal is 0, before and after (``.ftz``)."""
    tiny = torch.finfo(torch.float32).tiny
    near = 1.0 / torch.where(x.abs() < tiny, x * 0.0, x)
    moved = (near.view(torch.int32) + ulps).view(torch.float32)
    moved = torch.where(near.isfinite(), moved, near)
    return torch.where(moved.abs() < tiny, moved * 0.0, moved)
