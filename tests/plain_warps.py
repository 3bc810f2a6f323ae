"""Groups of warps that ``gl.warp_specialize`` starts, as plain Python, in any order.

They go on one at a time; who is next is drawn wherever one touches a barrier, and so is when a tile
comes that TMA was asked for. What ``plain_gluon`` holds kernels to stays; also, a product reads
shared memory only when it is waited for, so a stage that is given back too early is poison there.
"""

from __future__ import annotations

import random
import threading
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.plain_gluon import Block, Machine, Shared, block


class Barrier:
    """Of several arrivals, and bytes."""

    def __init__(self) -> None:
        self.count, self.arrived, self.bytes, self.completed = 0, 0, 0, 0

    def arrive(self, count: int = 1) -> None:
        self.arrived += count
        assert self.arrived <= self.count, "more arrivals than a barrier has in a phase"
        self.end_phase()

    def end_phase(self) -> None:
        if self.arrived == self.count and self.bytes == 0:
            self.arrived, self.completed = 0, self.completed + 1


class _Late:
    """A product that has been asked for."""

    def __init__(self, a: Any, b: Shared, acc: Any) -> None:
        self.a, self.b, self.acc = a, b, acc
        self.shape, self.dtype = acc.shape, acc.dtype

    def value(self) -> Block:
        acc = self.acc.value() if isinstance(self.acc, _Late) else self.acc
        product = self.a.to(torch.float64) @ self.b.view().to(torch.float64)
        return block((acc.double() + product).float())


class WarpsMachine(Machine):
    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, modules: list[Any], early: set[str], seed: int
    ) -> None:
        self.draw = random.Random(seed)
        self.events: list[threading.Event] = []
        self.ready: list[Callable[[], bool] | None] = []
        self.copies: list[Callable[[], None]] = []
        self.error: BaseException | None = None
        self.here = threading.local()
        super().__init__(monkeypatch, modules, early)
        self.gl.warp_specialize = self._start
        self.gl.permute = lambda t, order: t.permute(order)
        self.gl.broadcast = lambda a, b: tuple(map(block, torch.broadcast_tensors(a, b)))
        self.gl.DotOperandLayout = lambda *_: None
        self.hopper.mbarrier = types.SimpleNamespace(
            MBarrierLayout=lambda: None, init=_set_count, wait=self._until,
            expect=self._expect, arrive=self._arrive,
        )  # fmt: skip
        self.hopper.warpgroup_mma_wait = _values

    # ---- one at a time -------------------------------------------------------------------------

    def _start(self, groups: list[Any], warps: list[int], registers: list[int]) -> None:
        assert len(groups) == len(warps) + 1 == len(registers) + 1
        self.events = [threading.Event() for _ in groups]
        self.ready, self.error = [lambda: True for _ in groups], None
        threads = [
            threading.Thread(target=self._group, args=(i, *group)) for i, group in enumerate(groups)
        ]
        for thread in threads:
            thread.start()
        self._wake_one()
        for thread in threads:
            thread.join()
        if self.error is not None:
            raise self.error
        assert not self.copies, "a program ends before what it asked for has come"

    def _group(self, i: int, function: Callable[..., None], args: tuple[Any, ...]) -> None:
        self.here.group = i
        try:
            self._wait_for_turn(i)
            function(*args)
        except BaseException as error:  # told by the thread that started this one
            self.error = self.error or error
        self.ready[i] = None
        self._wake_one()

    def _wait_for_turn(self, i: int) -> None:
        self.events[i].wait()
        self.events[i].clear()
        if self.error is not None:
            raise self.error

    def _wake_one(self) -> None:
        if self.error is not None:
            for event in self.events:
                event.set()
            return
        while True:
            able = [i for i, ready in enumerate(self.ready) if ready is not None and ready()]
            if self.copies and (not able or self.draw.random() < 0.4):
                self.copies.pop(self.draw.randrange(len(self.copies)))()
            elif able:
                self.events[self.draw.choice(able)].set()
                return
            elif any(ready is not None for ready in self.ready):
                self.error = AssertionError("all groups wait for each other")
                self._wake_one()
                return
            else:
                return

    def _pause(self, ready: Callable[[], bool] = lambda: True) -> None:
        i = self.here.group
        self.ready[i] = ready
        self._wake_one()
        self._wait_for_turn(i)

    # ---- barriers, tiles, products -------------------------------------------------------------

    def _until(self, bar: Barrier, parity: int) -> None:
        self._pause(lambda: bar.completed & 1 != parity)

    def _expect(self, bar: Barrier, count: int) -> None:
        bar.bytes += count
        bar.arrive()
        self._pause()

    def _arrive(self, bar: Barrier, count: int) -> None:
        bar.arrive(count)
        self._pause()

    def _allocate(self, dtype: Any, shape: list[int], layout: Any, value: Any = None) -> Shared:
        if dtype == torch.int64:
            return Shared([Barrier() for _ in range(shape[0])], 0, "barrier", shape)  # type: ignore[arg-type]
        return super()._allocate(dtype, shape, layout, value)

    def _bring(self, desc: Any, at: list[int], bar: Any, to: Shared, pred: bool = True) -> None:
        asked = types.SimpleNamespace(coming=[])
        super()._bring(desc, at, asked, to, pred)

        def come() -> None:
            for place, tile in asked.coming:
                place.view().copy_(tile)
                bar.bytes -= tile.numel() * tile.element_size()
                assert bar.bytes >= 0, "more bytes than a barrier was told of"
            bar.end_phase()

        self.copies.append(come)
        self._pause()

    def _product(self, a: Any, b: Shared, acc: Any, is_async: bool) -> Any:
        assert is_async
        return _Late(a, b, acc)


def _values(outstanding: int, deps: list[_Late]) -> Any:
    values = tuple(late.value() for late in deps)
    return values if len(values) > 1 else values[0]


def _set_count(bar: Barrier, count: int) -> None:
    bar.count = count
