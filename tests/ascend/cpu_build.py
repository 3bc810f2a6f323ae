"""Compile lowered linalg for the host with stock MLIR/LLVM 19, to run what Ascend would run."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

_LLVM = Path("usr/lib/llvm-19/bin")  # where Debian's packages and LLVM's own put it
_UNPACKED = Path(sys.prefix) / "llvm-19"  # where setup.sh unpacks it, if the system has none

_BUFFERIZE = (
    "--allow-unregistered-dialect",
    "--inline",
    "--convert-elementwise-to-linalg",
    "--eliminate-empty-tensors",
    "--empty-tensor-to-alloc-tensor",
    "--one-shot-bufferize=allow-return-allocs-from-loops=true",
    "--canonicalize",
    "--convert-bufferization-to-memref",
)
_TO_LLVM = (
    "--allow-unregistered-dialect",
    "--convert-linalg-to-loops",
    "--expand-strided-metadata",
    "--lower-affine",
    "--convert-scf-to-cf",
    "--arith-expand=include-bf16=true",
    "--memref-expand",
    "--convert-math-to-llvm",
    "--convert-math-to-libm",
    "--convert-complex-to-llvm",
    "--convert-vector-to-llvm",
    "--convert-index-to-llvm",
    "--finalize-memref-to-llvm",
    "--convert-func-to-llvm",
    "--convert-cf-to-llvm",
    "--lower-affine",  # the lowering of memrefs makes new affine.apply
    "--convert-arith-to-llvm",
    "--reconcile-unrealized-casts",
)
# x86's conversions to and from fp16; without them LLVM calls compiler-rt, which is not loaded.
_CPU = ("-mattr=+f16c",) if platform.machine() == "x86_64" else ()
# Local buffers start as NaN (0xFF bytes), so that one read before it is written shows.
_POISONED_MALLOC = """
declare void @llvm.memset.p0.i64(ptr, i8, i64, i1)
define internal ptr @poisoned_malloc(i64 %size) {
  %buffer = call ptr @malloc(i64 %size)
  call void @llvm.memset.p0.i64(ptr %buffer, i8 -1, i64 %size, i1 false)
  ret ptr %buffer
}
"""
# The scalar types a kernel may take. Pointers arrive as memref and become five values.
_C_TYPES = {
    "i1": ctypes.c_bool,
    "i8": ctypes.c_int8,
    "i16": ctypes.c_int16,
    "i32": ctypes.c_int32,
    "i64": ctypes.c_int64,
    "f32": ctypes.c_float,
}


class BuildError(RuntimeError):
    """The host tools do not take the lowered kernel; the message is theirs."""


@dataclasses.dataclass(frozen=True)
class HostKernel:
    """A shared library, the function in it and the types of its arguments as the IR lists them.

    Arguments: lock, workspace, the kernel's run-time arguments, grid (x, y, z), program (x, y, z).
    """

    library: Path
    name: str
    types: tuple[str, ...]  # "memref" or a key of _C_TYPES

    def c_type(self, index: int) -> type:
        """The ctypes type of a scalar argument."""
        return _C_TYPES[self.types[index]]


def missing_tools() -> list[str]:
    """Names of the host tools that are not there."""
    return [name for name in ("mlir-opt", "mlir-translate", "llc", "ld") if _find(name) is None]


@functools.cache
def _find(tool: str) -> str | None:
    """Path of a host tool, of the system or else of the unpacked packages."""
    folder = Path("usr/bin") if tool == "ld" else _LLVM  # not usr/bin/llc, of another LLVM maybe
    return shutil.which(tool, path=f"/{folder}{os.pathsep}{_UNPACKED / folder}")


@functools.cache
def _environment() -> dict[str, str]:
    """Environment of the host tools; unpacked ones find their libraries by it."""
    unpacked = sorted(map(str, _UNPACKED.glob("usr/lib/*-linux-gnu")))
    if not unpacked:
        return dict(os.environ)
    return {**os.environ, "LD_LIBRARY_PATH": os.pathsep.join(unpacked)}


@functools.cache
def _build_folder() -> tempfile.TemporaryDirectory[str]:
    """Where the libraries lie for as long as this process lives."""
    return tempfile.TemporaryDirectory(prefix="ascend-host-")  # removed when the process ends


@functools.cache
def build(linalg: str) -> HostKernel:
    """Compile one kernel; equal text is compiled once."""
    name, types = _entry(linalg)
    stem = Path(_build_folder().name) / hashlib.sha256(linalg.encode()).hexdigest()[:16]
    step = {s: stem.with_suffix(f".{s}") for s in ("in", "buf", "mlir", "ll", "o", "so")}
    step["in"].write_text(re.sub(r" attributes \{SyncBlockLockArgIdx[^}]*\}", "", linalg))
    _run("mlir-opt", step["in"], *_BUFFERIZE, "-o", step["buf"])
    # memref.copy would become a call into MLIR's runtime library; linalg.copy becomes loops.
    step["buf"].write_text(
        re.sub(
            r"memref\.copy (%\S+), (%\S+) : (memref<.*>) to (memref<.*>)",
            r"linalg.copy ins(\1 : \3) outs(\2 : \4)",
            step["buf"].read_text(),
        )
    )
    _run("mlir-opt", step["buf"], *_TO_LLVM, "-o", step["mlir"])
    _run("mlir-translate", "--mlir-to-llvmir", step["mlir"], "-o", step["ll"])
    text = step["ll"].read_text().replace("call ptr @malloc(", "call ptr @poisoned_malloc(")
    step["ll"].write_text(text + (_POISONED_MALLOC if "@malloc(" in text else ""))
    _run("llc", "-O2", *_CPU, "-filetype=obj", "-relocation-model=pic", step["ll"], "-o", step["o"])
    # Undefined names (malloc, expf, half conversions) are found in what Python has loaded.
    _run("ld", "-shared", step["o"], "-o", step["so"])
    return HostKernel(step["so"], name, types)


def _entry(linalg: str) -> tuple[str, tuple[str, ...]]:
    """Name and argument types of the kernel function."""
    header = re.search(r"func\.func @(\w+)\((.*?)\) attributes \{SyncBlockLockArgIdx", linalg)
    if header is None:
        raise BuildError("the lowered module has no kernel function")
    kinds = re.findall(r"%arg\d+: (memref<|\w+)", header.group(2))
    return header.group(1), tuple(k.rstrip("<") for k in kinds)


def _run(tool: str, *arguments: str | Path) -> None:
    """Run one tool; raise BuildError with what it complains about."""
    command = [_find(tool) or tool, *map(str, arguments)]
    done = subprocess.run(command, env=_environment(), capture_output=True, text=True)
    if done.returncode != 0:
        raise BuildError(f"{tool}: {done.stderr.strip()[:1500]}")
