"""Arguments of a matrix product that lie elsewhere: at odd addresses, or amid numbers of others."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch

# What stands beside a matrix's columns and rows, and nobody may read.
_BESIDE = {"x": math.nan, "weight": 0x77777777, "weight_scale": math.nan, "weight_zero": 99}


def at_addresses(
    given: Mapping[str, torch.Tensor],
) -> Iterator[tuple[str | None, dict[str, torch.Tensor]]]:
    """Copies of ``given`` at multiples of 16 bytes, all (None) or all but the one that is named."""
    for name in (None, *given):
        moved = {}
        for each, t in given.items():  # wherever the allocator put them
            room = torch.zeros(t.numel() + 16, dtype=t.dtype)
            past = -room.data_ptr() % 16 // t.element_size() + (each == name)
            moved[each] = room[past : past + t.numel()].view(t.shape).copy_(t)
        yield name, moved


def amid_others(inputs: Mapping[str, torch.Tensor], out: torch.Tensor) -> dict[str, torch.Tensor]:
    """``inputs`` and an ``out`` like the one given, as views of wider matrices.

    ``out`` has 5 rows and columns of 5.0 more, in its ``_base``.
    """
    amid = dict(inputs)
    for name, t in inputs.items():
        if name not in _BESIDE or t.dim() != 2:
            continue
        beside = {torch.int8: 99, torch.float8_e4m3fn: 448.0}.get(t.dtype, _BESIDE[name])
        shape = (len(t) + 3, t.shape[1] + 40)
        amid[name] = torch.full(shape, beside, dtype=t.dtype, device=t.device)[
            : len(t), : t.shape[1]
        ].copy_(t)
    m, n = out.shape
    amid["out"] = torch.full((m + 5, n + 5), 5.0, dtype=out.dtype, device=out.device)[:m, :n]
    return amid


def kept_beside(out: torch.Tensor) -> bool:
    """Whether what ``amid_others`` put beside its ``out`` is still there."""
    base = out._base
    assert base is not None
    m, n = out.shape
    return bool((base[m:] == 5.0).all() and (base[:, n:] == 5.0).all())
