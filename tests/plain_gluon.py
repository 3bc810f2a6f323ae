"""Run a Gluon kernel as plain Python, a program after the other, tensor maps and barriers included.

Layouts mean nothing here, and products are torch's. What is held to are places and orders: a tile
that TMA brings is poison from the moment at which it is asked for until its barrier has been waited
for; a barrier wants the bytes that it was told; and what an earlier kernel may write is not read,
and nothing stored, before the wait for earlier kernels. Nothing is read or stored beyond a tensor,
and a lane that is masked off has poison, where the kernel does not say what else. Where warps go
their own ways (``lone_warps_hopper``), each runs the program.
"""

from __future__ import annotations

import inspect
import random
import types
from typing import Any

import pytest
import torch

from tests import plain_ptx
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

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:  # as torch's own, in half the time
        with torch._C.DisableTorchFunctionSubclass():
            result = function(*args, **(kwargs or {}))
        return block(result) if type(result) is torch.Tensor else result

    def __iadd__(self, other: Any) -> Any:  # makes another block, which may be larger
        return self + other


def block(tensor: torch.Tensor) -> Block:
    return tensor.as_subclass(Block)


def plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.as_subclass(torch.Tensor)


class Pointer:
    """Numbers of a tensor's storage; ``early``: no earlier kernel writes them."""

    def __init__(self, tensor: torch.Tensor, early: bool, offset: Any = 0) -> None:
        self.tensor, self.early, self.offset = tensor, early, offset
        self.dtype = types.SimpleNamespace(element_ty=tensor.dtype)

    def __add__(self, other: Any) -> Pointer:
        other = other.long() if isinstance(other, torch.Tensor) else other
        return Pointer(self.tensor, self.early, self.offset + other)

    def __getitem__(self, places: Any) -> Pointer:
        return Pointer(self.tensor, self.early, self.offset[places])

    def to(self, dtype: torch.dtype, bitcast: bool = True) -> Pointer:
        """To the same bytes; ``dtype`` is what ``pointer_type`` made of it."""
        assert bitcast
        assert isinstance(self.offset, int)
        assert self.offset == 0
        flat = self.tensor.as_strided((self.extent(),), (1,))
        return Pointer(flat.view(dtype), self.early)

    def extent(self) -> int:
        """Numbers from the first to the last one that the tensor has."""
        t = self.tensor
        steps = ((n - 1) * stride for n, stride in zip(t.shape, t.stride(), strict=True))
        return 1 + sum(steps) if t.numel() else 0

    def check(self, mask: Any = None) -> None:
        """No lane that is on is beyond the tensor."""
        if isinstance(self.offset, int):
            assert 0 <= self.offset < self.extent(), "beyond the tensor"
            return
        outside = (self.offset < 0) | (self.offset >= self.extent())
        assert not bool((outside if mask is None else outside & mask).any()), "beyond the tensor"

    def numbers(self) -> torch.Tensor:
        t = self.tensor
        return t.as_strided((t.untyped_storage().nbytes() // t.element_size(),), (1,), 0)

    def places(self) -> Any:
        return self.offset + self.tensor.storage_offset()


class Shared:
    """Shared memory: ``shape`` numbers from byte ``at`` on."""

    def __init__(self, memory: torch.Tensor, at: int, dtype: torch.dtype, shape: list[int]) -> None:
        self.memory, self.at, self.dtype, self.shape = memory, at, dtype, shape
        self.turned, self.layout = False, None

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
        self.programs, self.warps, self.warp = 0, 0, 0
        self.order: random.Random | None = None  # of programs, and of lanes of an atomic operation
        self.lone_warps = False
        self.ulps: int | None = None  # of the approximate reciprocal; None: drawn lane by lane
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
            uint8=torch.uint8, int16=torch.int16, float16=torch.float16, bfloat16=torch.bfloat16,
            pointer_type=lambda dtype: dtype, tuple=tuple,
            SliceLayout=nothing, BlockedLayout=nothing, SwizzledSharedLayout=nothing,
            NVMMADistributedLayout=nothing, NVMMASharedLayout=nothing, static_range=range,
            arange=lambda first, end, layout: block(torch.arange(first, end, dtype=torch.int32)),
            zeros=lambda shape, dtype, layout: block(torch.zeros(shape, dtype=dtype)),
            full=lambda shape, value, dtype, layout: block(torch.full(shape, value, dtype=dtype)),
            full_like=lambda t, value: block(torch.full_like(t, value)),
            program_id=lambda axis: Int(self.program),
            num_programs=lambda axis: Int(self.programs), num_warps=lambda: self.warps,
            where=_where, minimum=_least, maximum=_most, abs=torch.abs, fma=_fma,
            associative_scan=_scan, exp=torch.exp,
            sum=_sum, max=lambda t, axis: _reduce(t, axis, _most), reduce=_reduce,
            reshape=lambda t, shape: t.reshape(shape), expand_dims=torch.unsqueeze,
            split=_split, join=lambda a, b: block(torch.stack((a, b), -1)),
            convert_layout=lambda t, layout, assert_trivial=False: t,
            load=self._load, store=self._store, atomic_add=self._atomic_add,
            static_assert=_asserted, div_rn=lambda a, b: a / b,
            allocate_shared_memory=self._allocate, inline_asm_elementwise=self._assembly,
        )  # fmt: skip
        for module in modules:
            for name, value in list(vars(module).items()):
                if hasattr(value, "arg_names") and hasattr(value, "fn"):
                    monkeypatch.setattr(module, name, value.fn)
                elif type(value).__name__ == "constexpr":
                    monkeypatch.setattr(module, name, value.value)
            stand_ins = {
                "gl": self.gl, "hopper": self.hopper, "_as": _as, "_barrier": nothing,
                "_load_tile": self._bring, "_wait_for_earlier_kernels": self._wait,
                "_let_next_kernel_start": self._trigger,
            }  # fmt: skip
            if hasattr(module, "_warp"):
                self.lone_warps = True
                stand_ins |= self._of_lone_warps()
            for name, value in stand_ins.items():
                if hasattr(module, name):
                    monkeypatch.setattr(module, name, value)
        monkeypatch.setattr(device, "bind_described", self.bind_described)
        monkeypatch.setattr(device, "bind", self.bind)

    def bind(self, kernel: Any, grid: tuple[int, ...], **kwargs: Any) -> Any:
        """In the place of ``device.bind``."""
        return self.bind_described(kernel, grid, (), **kwargs)

    def bind_described(
        self, kernel: Any, grid: tuple[int, ...], describe: Any, **kwargs: Any
    ) -> Any:
        """In the place of ``device.bind_described``."""
        parameters = list(inspect.signature(kernel).parameters)
        constants = {name: value for name, value in kwargs.items() if name in parameters}

        def start(*args: Any) -> None:
            self.pdl, self.programs = constants["PDL"], grid[0]
            self.warps = kwargs.get("num_warps", 4)
            given: list[Any] = []
            for i, (name, value) in enumerate(zip(parameters, args, strict=False)):
                if i < len(describe):
                    made = describe[i](value)
                    made.early = name in self.early
                    given.append(made)
                elif isinstance(value, torch.Tensor):
                    given.append(Pointer(value, name in self.early))
                else:
                    given.append(value if isinstance(value, float) else Int(value))
            warps = self.warps if self.lone_warps else 1
            programs = [(program, warp) for program in range(grid[0]) for warp in range(warps)]
            if self.order is not None:
                self.order.shuffle(programs)
            for self.program, self.warp in programs:
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

    def _load(self, at: Pointer, mask: Any = None, other: Any = None) -> Any:
        self._may_read(at)
        at.check(mask)
        numbers, places = at.numbers(), at.places()
        if isinstance(places, int):
            return Int(numbers[places])
        if mask is None:
            return block(numbers[places.long()])
        read = numbers[torch.where(mask, places, at.tensor.storage_offset()).long()]
        beside = _poison(read) if other is None else torch.tensor(other, dtype=read.dtype)
        return block(torch.where(mask, read, beside))

    def _store(self, at: Pointer, value: torch.Tensor, mask: torch.Tensor) -> None:
        assert self.waited or not self.pdl, "stored before earlier kernels have ended"
        at.check(mask)
        places, value, mask = torch.broadcast_tensors(at.places(), value, mask)
        assert value.dtype == at.tensor.dtype
        at.numbers()[places[mask].long()] = plain(value[mask])

    def _of_lone_warps(self) -> dict[str, Any]:
        """What stands for the functions of ``lone_warps_hopper``."""
        return {
            "_warp": lambda: Int(self.warp), "_put": self._put,
            "_put_16_bytes": self._put_16_bytes,
            "_of_other": lambda x, lane: x.reshape(-1)[lane.long()],
            "_first_bit": lambda x: Int((int(x) & -int(x)).bit_length() - 1),
            "_take_32_bytes": self._take_32_bytes,
            "_take_short": lambda at, mask: self._load(at, mask, -1).to(torch.int32),
            "_take_one": lambda at, mask: self._atomic_add(at, *_ones(at, mask, -1), "relaxed"),
            "_add_one": lambda at, mask: self._atomic_add(at, *_ones(at, mask, 1), "relaxed"),
        }  # fmt: skip

    def _put(self, to: Pointer, x: torch.Tensor, mask: torch.Tensor, kind: str) -> None:
        assert kind == f"b{8 * to.tensor.element_size()}"
        dtype = to.tensor.dtype
        self._store(to, x if x.dtype == dtype else block(plain(x).to(dtype)), mask)

    def _put_16_bytes(self, to: Pointer, *given: torch.Tensor) -> None:
        """Four int32 to bytes that follow each other."""
        *words, mask = given
        words = [word.to(torch.int32) for word in words]
        numbers = block(torch.stack([plain(w) for w in words], -1).view(to.tensor.dtype))
        to = Pointer(to.tensor, to.early, to.offset[..., None]) + torch.arange(16)
        assert not bool((plain(to.places()[..., 0]) % 16)[plain(mask).expand(words[0].shape)].any())
        self._store(to, numbers, mask[..., None])

    def _take_32_bytes(self, at: Pointer, mask: torch.Tensor) -> tuple[Block, ...]:
        """Eight int32 that follow each other."""
        assert at.tensor.dtype == torch.int32
        assert not bool((plain(at.places()) * 4 % 16)[plain(mask).expand(at.offset.shape)].any())
        mask = mask.expand(at.offset.shape)
        return tuple(self._load(at + i, mask) for i in range(8))

    def _atomic_add(self, at: Pointer, value: torch.Tensor, mask: torch.Tensor, sem: str) -> Block:
        """Lane by lane, in any order."""
        assert self.waited or not self.pdl, "stored before earlier kernels have ended"
        at.check(mask)
        places, value, mask = torch.broadcast_tensors(at.places(), value, mask)
        assert value.dtype == at.tensor.dtype
        numbers, before = at.numbers(), _poison(value)
        lanes = mask.nonzero().tolist()
        if self.order is not None:
            self.order.shuffle(lanes)
        for lane in map(tuple, lanes):
            before[lane] = numbers[places[lane]]
            numbers[places[lane]] += value[lane].item()
        return block(before)

    def _assembly(
        self, text: str, constraints: str, given: Any, dtype: Any, is_pure: bool, pack: int
    ) -> Block:
        assert pack == 1
        assert constraints == ",".join(["=r", *("r" for _ in given)])

        def reciprocal(x: torch.Tensor) -> torch.Tensor:
            ulps = (
                torch.randint(-1, 2, x.shape, dtype=torch.int32) if self.ulps is None else self.ulps
            )
            return plain_ptx.near_reciprocal(x, ulps)

        result = plain_ptx.run(text, [plain(t) for t in given], reciprocal)
        assert result.dtype == dtype
        return block(result)

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


def _ones(at: Pointer, mask: torch.Tensor, value: int) -> tuple[Block, torch.Tensor]:
    return block(torch.full(mask.shape, value, dtype=at.tensor.dtype)), mask


def _asserted(holds: bool) -> None:
    assert holds


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
    return _chosen(a, b, torch.fmin, torch.minimum, min)


def _most(a: Any, b: Any, propagate_nan: Any = None) -> Any:
    of_floats = torch.fmax if propagate_nan is None else torch.maximum
    return _chosen(a, b, of_floats, torch.maximum, max)


def _chosen(a: Any, b: Any, of_floats: Any, of_integers: Any, of_scalars: Any) -> Any:
    if not isinstance(a, torch.Tensor):
        return Int(of_scalars(a, b))
    b = b if isinstance(b, torch.Tensor) else torch.tensor(b, dtype=a.dtype)
    return block((of_floats if a.dtype.is_floating_point else of_integers)(a, b))


def _poison(like: torch.Tensor) -> torch.Tensor:
    size = like.dtype.itemsize
    return torch.full((*like.shape, size), POISON, dtype=torch.uint8).view(like.dtype)[..., 0]


def _split(t: torch.Tensor) -> tuple[Block, Block]:
    assert t.shape[-1] == 2
    return block(t[..., 0]), block(t[..., 1])


def _reduce(t: torch.Tensor, axis: int, combine: Any) -> Block:
    """By halves, as lanes do."""
    while t.shape[axis] > 1:
        t = combine(*(block(half) for half in t.chunk(2, axis)))
    return block(t.squeeze(axis))


def _scan(t: torch.Tensor, axis: int, combine: Any) -> Block:
    parts = [block(part) for part in t.unbind(axis)]
    for i in range(1, len(parts)):
        parts[i] = combine(parts[i - 1], parts[i])
    return block(torch.stack(parts, axis))


def _fma(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> Block:
    """a * b + c of fp32, rounded once.

    The product is exact in fp64. The sum is rounded to fp64 so that its last bit is 1 where it is
    not exact, and then rounding to fp32 does as if it had all bits (Boldo and Melquiond, 2008).
    """
    product, c = plain(a).double() * plain(b).double(), plain(c).double()
    total = product + c
    of_c = total - product
    lost = (product - (total - of_c)) + (c - of_c)
    bits = total.view(torch.int64)
    even = lost.isfinite() & (lost != 0) & (bits & 1 == 0)
    outward = (lost > 0) == (total > 0)
    bits = torch.where(even, torch.where(outward, bits + 1, bits - 1), bits)
    return block(bits.view(torch.float64).float())
