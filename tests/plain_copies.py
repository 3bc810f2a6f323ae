"""Kernels that copy by ``cp.async`` into a ring of stages, as plain Python.

What ``plain_gluon`` holds kernels to stays. A place that is copied to is poison from the moment at
which it is asked for until its group of copies has been waited for; lanes that are masked off bring
zeros. Shared memory may be read as slices, permuted and reshaped.
"""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch

from tests.plain_gluon import POISON, Block, Machine, Pointer, block, plain


class Tile:
    """Shared memory, or a part of it."""

    def __init__(self, data: torch.Tensor) -> None:
        self.data = data

    @property
    def shape(self) -> list[int]:
        return list(self.data.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.data.dtype

    def index(self, i: int) -> Tile:
        assert 0 <= i < self.shape[0]
        return Tile(self.data[int(i)])

    def slice(self, start: int, length: int, dim: int) -> Tile:
        return Tile(self.data.narrow(dim, int(start), length))

    def reshape(self, shape: list[int]) -> Tile:
        return Tile(self.data.view(shape))

    def permute(self, order: list[int]) -> Tile:
        return Tile(self.data.permute(order))

    def load(self, layout: Any) -> Block:
        return block(self.data.clone())

    def store(self, value: torch.Tensor) -> None:
        assert value.dtype == self.dtype
        assert list(value.shape) == self.shape
        self.data.copy_(plain(value))

    def spoil(self) -> None:
        self.data.copy_(torch.full(self.data.shape, POISON, dtype=torch.uint8).to(self.dtype))
        if self.dtype.is_floating_point:
            self.data.fill_(torch.nan)


class CopiesMachine(Machine):
    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, modules: list[Any], early: set[str]
    ) -> None:
        self.asked: list[tuple[Tile, torch.Tensor]] = []
        self.groups: list[list[tuple[Tile, torch.Tensor]]] = []
        super().__init__(monkeypatch, modules, early)
        self.gl.permute = lambda t, order: t.permute(order)
        self.gl.broadcast = lambda a, b: tuple(map(block, torch.broadcast_tensors(a, b)))
        self.gl.DotOperandLayout = lambda *_: None
        stand_ins = {
            "ampere": types.SimpleNamespace(mma_v2=_product), "_as": _as,
            "_load_async": self._ask, "_commit": self._commit, "_wait": self._until,
        }  # fmt: skip
        for module in modules:
            for name, value in stand_ins.items():
                if hasattr(module, name):
                    monkeypatch.setattr(module, name, value)

    def _allocate(self, dtype: Any, shape: list[int], layout: Any, value: Any = None) -> Any:
        tile = Tile(torch.empty(shape, dtype=dtype))
        tile.spoil()
        return tile

    def _ask(self, to: Tile, at: Pointer, mask: Any = None) -> None:
        self._may_read(at)
        at.check(mask)
        numbers, places = at.numbers(), at.places()
        there = torch.ones_like(places, dtype=torch.bool) if mask is None else mask
        places, there = torch.broadcast_tensors(places, there)
        first = at.tensor.storage_offset()
        read = numbers[torch.where(plain(there), plain(places), first).long()]
        assert list(read.shape) == to.shape
        to.spoil()
        self.asked.append((to, torch.where(plain(there), read, torch.zeros_like(read))))

    def _commit(self) -> None:
        self.groups.append(self.asked)
        self.asked = []

    def _until(self, outstanding: int) -> None:
        """All groups but the last ``outstanding`` are there."""
        while len(self.groups) > outstanding:
            for to, values in self.groups.pop(0):
                to.data.copy_(values)

    def ended(self) -> None:
        """To be asked behind a program: nothing is on its way."""
        assert not self.asked
        assert not any(self.groups), "a program ends before what it asked for has come"


def _as(tile: Tile, dtype: Any, shape: list[int], layout: Any) -> Tile:
    return Tile(tile.data.view(dtype).view(shape))


def _product(a: torch.Tensor, b: torch.Tensor, acc: torch.Tensor) -> Block:
    assert a.dtype == b.dtype
    return block((plain(acc).double() + plain(a).double() @ plain(b).double()).float())
