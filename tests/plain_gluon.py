"""Run a Gluon kernel that has tensor maps and barriers as plain Python, a program after the other.

Layouts mean nothing here, and products are torch's. What is held to are places and orders: a tile
that TMA brings is poison from the moment at which it is asked for until its barrier has been waited
for; a barrier wants the bytes that it was told; and what an earlier kernel may write is not read,
and nothing stored, before the wait for earlier kernels.
"""

from __future__ import annotations

import inspect
import types
from typing import Any

import pytest
import torch

from tkernels import device

POISON = 0x5A


class Int(int):
    """A scalar as kernels have it."""

    def to(self, dtype: Any) -> Int:
        return self


def _wrapped(name: str) -> Any:
    def operation(self: Int, other: Any) -> Any:
        result = getattr(int, name)(self, other)
        return Int(result) if type(result) is int else result

    return operation


for _name in ("add", "sub", "mul", "floordiv", "mod", "and", "or", "xor", "rshift", "lshift"):
    for _side in ("", "r"):
        setattr(Int, f"__{_side}{_name}__", _wrapped(f"__{_side}{_name}__"))


class Block(torch.Tensor):
    """A tensor as kernels have it."""

    type = types.SimpleNamespace(layout=None)  # type: ignore[assignment]

    def to(self, dtype: Any, bitcast: bool = False) -> Any:  # type: ignore[override]
        return self.view(dtype) if bitcast else super().to(dtype)


def block(tensor: torch.Tensor) -> Block:
    return tensor.as_subclass(Block)


class Pointer:
    """Numbers of a tensor's storage; ``early``: no earlier kernel writes them."""

    def __init__(self, tensor: torch.Tensor, early: bool, offset: Any = 0) -> None:
        self.tensor, self.early, self.offset = tensor, early, offset
        self.dtype = types.SimpleNamespace(element_ty=tensor.dtype)

    def __add__(self, other: Any) -> Pointer:
        return Pointer(self.tensor, self.early, self.offset + other)

    def numbers(self) -> torch.Tensor:
        t = self.tensor
        return t.as_strided((t.untyped_storage().nbytes() // t.element_size(),), (1,), 0)

    def places(self) -> Any:
        return self.offset + self.tensor.storage_offset()


class Shared:
    """Shared memory: ``shape`` numbers from byte ``at`` on."""

    def __init__(self, memory: torch.Tensor, at: int, dtype: torch.dtype, shape: list[int]) -> None:
        self.memory, self.at, self.dtype, self.shape = memory, at, dtype, shape
        self.turned = False

    def view(self) -> torch.Tensor:
        size = self.dtype.itemsize
        for length in self.shape:
            size *= length
        assert self.at + size <= len(self.memory), "past the end of shared memory"
        view = self.memory[self.at : self.at + size].view(self.dtype).view(self.shape)
        return view.t() if self.turned else view

    def index(self, i: int) -> Any:
        assert 0 <= i < self.shape[0]
        if self.dtype == "barrier":
            return self.memory[i]
        size = self.dtype.itemsize
        for length in self.shape[1:]:
            size *= length
        return Shared(self.memory, self.at + int(i) * size, self.dtype, self.shape[1:])

    def permute(self, order: list[int]) -> Shared:
        assert order == [1, 0]
        assert len(self.shape) == 2
        made = Shared(self.memory, self.at, self.dtype, self.shape)
        made.turned = not self.turned
        return made

    def load(self, layout: Any) -> Block:
        return block(self.view().clone())

    def store(self, value: torch.Tensor) -> None:
        self.view().copy_(value)


class Barrier:
    """Of one arrival, and bytes."""

    def __init__(self) -> None:
        self.completed, self.armed, self.bytes = 0, False, 0
        self.coming: list[tuple[Shared, torch.Tensor]] = []

    def expect(self, count: int) -> None:
        assert not self.armed, "a barrier is told of a second step before the first has come"
        self.armed, self.bytes = True, count

    def wait(self, parity: int) -> None:
        if self.completed & 1 != parity:
            return
        there = sum(tile.numel() * tile.element_size() for _, tile in self.coming)
        assert self.armed, "nobody told this barrier of anything: it would wait for ever"
        assert there == self.bytes, f"the barrier expects {self.bytes} bytes, {there} come"
        for place, tile in self.coming:
            place.store(tile)
        self.completed, self.armed, self.coming = self.completed + 1, False, []


class Machine:
    """What stands for ``gl`` and ``hopper`` in the modules of a kernel."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, modules: list[Any], early: set[str]
    ) -> None:
        """``early``: arguments that may be read ahead of the wait for earlier kernels."""
        self.early, self.program, self.waited = early, 0, False
        self.pdl, self.triggers = False, 0
        nothing = lambda *args, **kwargs: None  # noqa: E731
        barrier = types.SimpleNamespace(
            MBarrierLayout=nothing, init=lambda bar, count: None,
            expect=lambda bar, count, pred=True: bar.expect(count) if pred else None,
            wait=lambda bar, parity: bar.wait(parity),
        )  # fmt: skip
        self.hopper = types.SimpleNamespace(
            mbarrier=barrier, fence_async_shared=nothing,
            warpgroup_mma=self._product, warpgroup_mma_wait=_deps,
        )  # fmt: skip
        self.gl = types.SimpleNamespace(
            int8=torch.int8, int32=torch.int32, int64=torch.int64, float32=torch.float32,
            SliceLayout=nothing, BlockedLayout=nothing, SwizzledSharedLayout=nothing,
            NVMMADistributedLayout=nothing, NVMMASharedLayout=nothing, static_range=range,
            arange=lambda first, end, layout: block(torch.arange(first, end, dtype=torch.int32)),
            zeros=lambda shape, dtype, layout: block(torch.zeros(shape, dtype=dtype)),
            full=lambda shape, value, dtype, layout: block(torch.full(shape, value, dtype=dtype)),
            program_id=lambda axis: Int(self.program),
            where=_where, minimum=_least, maximum=_most,
            sum=_sum, reshape=lambda t, shape: t.reshape(shape),
            convert_layout=lambda t, layout: t,
            load=self._load, store=self._store, allocate_shared_memory=self._allocate,
        )  # fmt: skip
        for module in modules:
            for name, value in list(vars(module).items()):
                if hasattr(value, "arg_names") and hasattr(value, "fn"):
                    monkeypatch.setattr(module, name, value.fn)
            stand_ins = {
                "gl": self.gl, "hopper": self.hopper, "_as": _as, "_barrier": nothing,
                "_load_tile": self._bring, "_wait_for_earlier_kernels": self._wait,
                "_let_next_kernel_start": self._trigger,
            }  # fmt: skip
            for name, value in stand_ins.items():
                if hasattr(module, name):
                    monkeypatch.setattr(module, name, value)
        monkeypatch.setattr(device, "bind_described", self.bind_described)

    def bind_described(
        self, kernel: Any, grid: tuple[int, ...], describe: Any, **kwargs: Any
    ) -> Any:
        """In the place of ``device.bind_described``."""
        parameters = list(inspect.signature(kernel).parameters)
        constants = {name: value for name, value in kwargs.items() if name in parameters}
        self.pdl = constants["PDL"]

        def start(*args: Any) -> None:
            given: list[Any] = []
            for i, (name, value) in enumerate(zip(parameters, args, strict=False)):
                if i < len(describe):
                    made = describe[i](value)
                    made.early = name in self.early
                    given.append(made)
                elif isinstance(value, torch.Tensor):
                    given.append(Pointer(value, name in self.early))
                else:
                    given.append(Int(value))
            for self.program in range(grid[0]):
                self.waited, self.triggers = False, 0
                kernel(*given, **constants)

        return start

    def _wait(self) -> None:
        assert self.pdl
        self.waited = True

    def _trigger(self) -> None:
        assert self.pdl
        self.triggers += 1

    def _may_read(self, source: Any) -> None:
        assert self.waited or source.early or not self.pdl, "read before earlier kernels have ended"

    def _load(self, at: Pointer, mask: Any = None, other: Any = 0) -> Any:
        self._may_read(at)
        numbers, places = at.numbers(), at.places()
        if isinstance(places, int):
            return Int(numbers[places])
        ok = block(torch.ones_like(places, dtype=torch.bool)) if mask is None else mask
        read = numbers[torch.where(ok, places, 0).long()]
        return block(torch.where(ok, read, torch.tensor(other, dtype=read.dtype)))

    def _store(self, at: Pointer, value: torch.Tensor, mask: torch.Tensor) -> None:
        assert self.waited or not self.pdl, "stored before earlier kernels have ended"
        places, value, mask = torch.broadcast_tensors(at.places(), value, mask)
        assert value.dtype == at.tensor.dtype
        at.numbers()[places[mask].long()] = value[mask].as_subclass(torch.Tensor)

    def _allocate(self, dtype: Any, shape: list[int], layout: Any, value: Any = None) -> Shared:
        if dtype == torch.int64:  # barriers
            made = Shared([Barrier() for _ in range(shape[0])], 0, "barrier", shape)  # type: ignore[arg-type]
            return made
        size = dtype.itemsize
        for length in shape:
            size *= length
        made = Shared(torch.full((size,), POISON, dtype=torch.uint8), 0, dtype, list(shape))
        if value is not None:
            made.store(value)
        return made

    def _bring(self, desc: Any, at: list[int], bar: Barrier, to: Shared, pred: bool = True) -> None:
        if not pred:
            return
        self._may_read(desc)
        assert to.shape == desc.block_shape
        assert to.dtype == desc.base.dtype
        tile = torch.zeros(desc.block_shape, dtype=desc.base.dtype)
        source = desc.base.as_strided(desc.shape, desc.strides, desc.base.storage_offset())
        part = source[tuple(slice(i, i + n) for i, n in zip(at, tile.shape, strict=True))]
        tile[tuple(slice(n) for n in part.shape)] = part
        to.view().view(torch.uint8).fill_(POISON)
        bar.coming.append((to, tile))

    def _product(self, a: Shared, b: Shared, acc: torch.Tensor, is_async: bool) -> Block:
        wide = torch.float64 if acc.dtype.is_floating_point else torch.int32
        return block((acc + a.view().to(wide) @ b.view().to(wide)).to(acc.dtype))


def _as(shared: Shared, dtype: Any, shape: list[int], layout: Any) -> Shared:
    return Shared(shared.memory, shared.at, dtype, list(shape))


def _deps(outstanding: int, deps: list[Any]) -> Any:
    return deps[0] if len(deps) == 1 else tuple(deps)


def _sum(t: torch.Tensor, axis: int) -> Any:
    return Int(t.sum()) if t.dim() == 1 else block(t.sum(axis, dtype=t.dtype))


def _where(condition: Any, a: Any, b: Any) -> Any:
    if isinstance(condition, torch.Tensor):
        return block(torch.where(condition, a, b))
    return a if condition else b


def _least(a: Any, b: Any) -> Any:
    return a.clamp(max=b) if isinstance(a, torch.Tensor) else Int(min(a, b))


def _most(a: Any, b: Any) -> Any:
    return a.clamp(min=b) if isinstance(a, torch.Tensor) else Int(max(a, b))
