"""Run a launch on the CPU from its Ascend lowering, with every argument fenced.

Each tensor's storage is copied into memory of its own, between guard bands; what the kernel may
not touch (the bands, and the gaps of strided tensors) holds 0xFF bytes, which is NaN to a float and
-1 to an integer. A write there fails by name. A read there shows in the result, or, past the end of
the storage, ends a second run in which that memory does not exist.

Programs run one after another, in a child process: races are not seen, a crash is only reported.
"""

from __future__ import annotations

import ctypes
import dataclasses
import faulthandler
import mmap
import os
import signal
import time
import traceback
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from tkernels.offline import Launch, variant_of
from tkernels.offline_ascend import lower

from .cpu_build import HostKernel, build

_PAGE = mmap.PAGESIZE
_BAND = 16 * _PAGE
_POISON = 0xFF
_LIBC = ctypes.CDLL(None, use_errno=True)


class ExecutionError(AssertionError):
    """The kernel crashed, hung, or wrote outside its tensors."""


@dataclasses.dataclass
class _Fenced:
    """A storage's stand-in: its bytes in shared memory, and which of them the kernel may use."""

    memory: mmap.mmap
    first: int  # offset of the storage's first byte
    usable: np.ndarray[Any, Any]  # bool, a byte each
    bytes: np.ndarray[Any, Any]  # view of the whole memory
    names: str

    @property
    def address(self) -> int:
        """Where the storage's first byte is."""
        return int(self.bytes.ctypes.data) + self.first

    @property
    def storage(self) -> np.ndarray[Any, Any]:
        """The storage's bytes, between the bands."""
        return self.bytes[self.first : self.first + len(self.usable)]


def execute(launch: Launch, timeout: float = 60) -> None:
    """Run all programs of ``launch``, then put the results into its tensors."""
    variant = variant_of(launch)
    kernel = build(lower(variant))
    arguments = {name: launch.args[name] for name, _ in variant.signature}
    tensors = {n: a for n, a in arguments.items() if isinstance(a, torch.Tensor)}
    for flush in (False, True):  # writes are named by the first run, reads stop the second
        fenced = _fence(tensors, flush)
        _run_in_child(kernel, launch, arguments, fenced, timeout)
        _check_fences(launch, fenced.values())
    for tensor in tensors.values():
        stand_in = fenced[tensor.untyped_storage().data_ptr()]
        target = _storage_bytes(tensor)
        target[stand_in.usable] = stand_in.storage[stand_in.usable]


def _storage_bytes(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """All bytes of the tensor's storage, as a view."""
    storage = tensor.untyped_storage()
    flat = torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),), (1,))
    return flat.numpy()


def _usable_bytes(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """Which bytes of its storage ``tensor`` consists of."""
    itemsize = tensor.element_size()
    elements = torch.zeros(tensor.untyped_storage().nbytes() // itemsize, dtype=torch.bool)
    sizes = [1 if step == 0 else n for n, step in zip(tensor.shape, tensor.stride(), strict=True)]
    if tensor.numel():
        elements.as_strided(sizes, tensor.stride(), tensor.storage_offset()).fill_(True)
    mask = np.zeros(tensor.untyped_storage().nbytes(), dtype=bool)
    spread = elements.numpy().repeat(itemsize)
    mask[: len(spread)] = spread
    return mask


def _fence(tensors: dict[str, torch.Tensor], flush: bool) -> dict[int, _Fenced]:
    """Stand-ins by address of the real storage; with ``flush`` no memory follows the last byte."""
    owners: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        owners.setdefault(tensor.untyped_storage().data_ptr(), []).append(name)
    fenced = {}
    for pointer, names in owners.items():
        usable = np.logical_or.reduce([_usable_bytes(tensors[name]) for name in names])
        size = len(usable)
        inner = -(-size // _PAGE) * _PAGE + _BAND + (0 if flush else _BAND)
        memory = mmap.mmap(-1, inner + 2 * _PAGE)  # shared, so that the parent sees the results
        whole = np.frombuffer(memory, dtype=np.uint8)
        whole[:] = _POISON
        first = (_PAGE + inner - size) if flush else _PAGE + _BAND
        stand_in = _Fenced(memory, first, usable, whole, ", ".join(names))
        source = _storage_bytes(tensors[names[0]])
        stand_in.storage[usable] = source[usable]
        for page in (0, _PAGE + inner):
            _forbid(int(whole.ctypes.data) + page)
        fenced[pointer] = stand_in
    return fenced


def _forbid(address: int) -> None:
    """Make one page inaccessible."""
    if _LIBC.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(_PAGE), 0) != 0:
        raise OSError(ctypes.get_errno(), "mprotect failed")


def _check_fences(launch: Launch, fenced: Iterable[_Fenced]) -> None:
    """Raise ExecutionError if a byte changed that no tensor consists of."""
    for one in fenced:
        inside = np.zeros(len(one.bytes), dtype=bool)
        inside[:_PAGE] = inside[-_PAGE:] = True  # not mapped
        inside[one.first : one.first + len(one.usable)] = one.usable
        outside = np.flatnonzero(~inside)
        touched = outside[one.bytes[outside] != _POISON]
        if len(touched):
            raise ExecutionError(
                f"{launch.fn.__name__}{list(launch.grid)} wrote {len(touched)} bytes outside "
                f"{one.names}, the first at byte {touched[0] - one.first} of a storage of "
                f"{len(one.usable)} bytes"
            )


def _run_in_child(
    kernel: HostKernel,
    launch: Launch,
    arguments: dict[str, Any],
    fenced: dict[int, _Fenced],
    timeout: float,
) -> None:
    """Run all programs in a fork; raise ExecutionError if it does not end well."""
    progress = mmap.mmap(-1, _PAGE)
    child = os.fork()
    if child == 0:
        try:
            faulthandler.disable()  # the parent reports the signal
            _run_programs(kernel, launch.grid, _c_arguments(kernel, arguments, fenced), progress)
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    status = _wait(child, timeout)
    program = "program {}, {}, {}".format(*np.frombuffer(progress, np.int32, 3))
    where = f"{launch.fn.__name__}{list(launch.grid)}, {program}"
    if status is None:
        raise ExecutionError(f"{where} ran longer than {timeout:g} s")
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        hint = (
            ": it read or wrote outside a tensor (irregular loads read masked lanes, too: "
            "clamp their index)"
            if number in (signal.SIGSEGV, signal.SIGBUS)
            else ""
        )
        raise ExecutionError(f"{where} died of {signal.Signals(number).name}{hint}")
    if os.WEXITSTATUS(status) != 0:
        raise ExecutionError(f"{where} could not be started, see the traceback on stderr")


def _wait(child: int, timeout: float) -> int | None:
    """Exit status of ``child``, or None after killing it at the timeout."""
    deadline = time.monotonic() + timeout
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return status
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return None
        time.sleep(0.001)


def _c_arguments(
    kernel: HostKernel, arguments: dict[str, Any], fenced: dict[int, _Fenced]
) -> list[Any]:
    """The kernel's C arguments up to the grid. A memref is (base, data, offset, size, stride)."""
    null = [ctypes.c_void_p(0), ctypes.c_void_p(0), *(ctypes.c_int64(n) for n in (0, 0, 1))]
    out = null * 2  # lock and workspace, which only the device's runtime provides
    for index, value in enumerate(arguments.values(), start=2):
        if isinstance(value, torch.Tensor):
            stand_in = fenced[value.untyped_storage().data_ptr()]
            start = stand_in.address + int(value.storage_offset()) * value.element_size()
            sizes = (ctypes.c_int64(n) for n in (0, value.numel(), 1))
            out += [ctypes.c_void_p(start), ctypes.c_void_p(start), *sizes]
        else:
            out.append(kernel.c_type(index)(value))
    return out


def _run_programs(
    kernel: HostKernel, grid: tuple[int, int, int], arguments: list[Any], progress: mmap.mmap
) -> None:
    """Call the kernel for each program, leaving its id in ``progress`` for the parent."""
    function = getattr(ctypes.CDLL(str(kernel.library)), kernel.name)
    function.restype = None
    current = np.frombuffer(progress, np.int32, 3)
    size = [ctypes.c_int32(n) for n in grid]
    for z in range(grid[2]):
        for y in range(grid[1]):
            for x in range(grid[0]):
                current[:] = x, y, z
                function(*arguments, *size, *(ctypes.c_int32(n) for n in (x, y, z)))
