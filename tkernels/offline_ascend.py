"""Compile a recorded launch for Ascend, with no NPU and no CANN, as far as that goes.

``lower`` takes it to linalg with triton-ascend. ``check`` asks Huawei's own compiler whether it
takes that, and what it puts where on the chip: ``bishengir-compile`` (of ``ascendnpu-ir``) runs its
whole pipeline (tiling, memory plan, synchronisation) and stops where it would start ``hivmc``,
the assembler, which only CANN has. Needs both packages; importing this file needs none.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import importlib
import importlib.metadata
import importlib.util
import json
import os
import re
import signal
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from tkernels.device import ascend_facts
from tkernels.offline import Variant

CHIP = ascend_facts().name

# ---- triton-ascend: Python to linalg ----------------------------------------------------------


class LoweringError(RuntimeError):
    """triton-ascend does not take the kernel; the message is the compiler's."""


def _known_options() -> set[str]:
    ascend = importlib.import_module("triton.backends.ascend.compiler")
    return {field.name for field in dataclasses.fields(ascend.NPUOptions)}


@functools.cache
def lower(variant: Variant) -> str:
    """The linalg text of ``variant``, the last stage before Huawei's compiler takes over."""
    options = dict(variant.options)
    if unknown := set(options) - _known_options():
        raise LoweringError(
            f"{variant.fn.__name__}: launch keyword {', '.join(sorted(unknown))} is neither a "
            "parameter of the kernel nor an option of triton-ascend"
        )
    for last in (False, True):
        try:
            return _lower(variant, options)
        except subprocess.CalledProcessError as error:  # triton-adapter-opt refused or crashed
            if error.returncode < 0 and not last:
                continue  # it was seen to die of a signal, and not the next time
            text = (error.stderr or b"").decode(errors="replace").strip()
            raise LoweringError(
                f"{variant.fn.__name__}: triton-adapter-opt ended with status "
                f"{error.returncode}: {first_error(text)}"
            ) from None
        except Exception as error:  # raised by the front end while it reads the kernel's source
            raise LoweringError(
                f"{variant.fn.__name__}: {type(error).__name__}: {error}"
            ) from error
    raise AssertionError("unreachable")


def _lower(variant: Variant, options: dict[str, Any]) -> str:
    """Python source -> ttir -> linalg, in the steps that triton.compile takes."""
    ascend = importlib.import_module("triton.backends.ascend.compiler")
    compiler = importlib.import_module("triton.compiler")
    ir = importlib.import_module("triton._C.libtriton").ir
    target = importlib.import_module("triton.backends.compiler").GPUTarget(
        ascend_facts().type, CHIP, 0
    )
    backend = ascend.AscendBackend(target)
    parsed = backend.parse_options(dict(options))
    # 3.2 pairs the signature with the parameters by position, so constants must not be in it.
    source = compiler.ASTSource(variant.fn, dict(variant.signature), dict(variant.constants))
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    metadata = {"hash": "tests-ascend", "target": target, **parsed.__dict__}
    module = source.make_ir(
        parsed, backend.get_codegen_implementation(), backend.get_module_map(), context
    )
    module = ascend.make_ttir(module, metadata, parsed)
    return str(ascend.ttir_to_linalg(module, metadata, parsed, named_ops=True))


def first_error(log: str) -> str:
    """The lines of a compiler log that say what went wrong (its end, where none is marked)."""
    lines = [line for line in log.splitlines() if re.search(r"error:|Assertion", line)]
    return " | ".join(lines[:3]) or log[-300:] or "no message"


def scalar_memory_loops(linalg: str) -> int:
    """Loops that load or store one element at a time, as triton-ascend marks them."""
    return linalg.count("{ExtractedLoadOrStore}")


# ---- Huawei's compiler: linalg to what the assembler would get ---------------------------------

# Launch option of triton-ascend -> flag of the compiler, as triton-ascend's backend maps them.
_FLAGS = {
    "multibuffer": "enable-auto-multi-buffer",
    "enable_auto_bind_sub_block": "enable-auto-bind-sub-block",
    "enable_hivm_auto_cv_balance": "enable-hivm-auto-cv-balance",
    "sync_solver": "enable-hivm-graph-sync-solver",
    "unit_flag": "enable-hivm-unit-flag-sync",
    "inject_barrier_all": "enable-hivm-inject-barrier-all-sync",
    "inject_block_all": "enable-hivm-inject-block-all-sync",
}
_FLAGS |= {  # those whose flag has the same name
    name: name.replace("_", "-")
    for name in (
        "disable_auto_inject_block_sync",
        "limit_auto_multi_buffer_of_local_buffer",
        "limit_auto_multi_buffer_only_for_local_buffer",
        "set_workspace_multibuffer",
        "tile_mix_cube_loop",
        "tile_mix_vector_loop",
    )
}
_DEFAULTS = {"multibuffer": True, "enable_auto_bind_sub_block": True}
_LAST_PASS = "convert-hivm-to-std"  # what it reads is what hivmc would get
_HANDED_OVER = "External hivmc run fails, returning module before running external compiler"
_SCOPES = {"ub": "ub", "cbuf": "l1", "cc": "l0c"}  # the compiler's names of the buffers


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What the compiler said; ``reason`` is "" if it took the kernel. Bytes: highest one in use."""

    reason: str
    degraded: tuple[str, ...] = ()  # what it switched off by itself to make the kernel fit
    ub: int = 0
    l1: int = 0
    l0c: int = 0
    double_buffered: int = 0  # local buffers that exist more than once, to overlap copy and compute
    hivm: str = dataclasses.field(default="", repr=False)  # its last IR


def options_of(variant: Variant) -> tuple[tuple[str, object], ...]:
    """The launch options of ``variant`` that reach the compiler."""
    return tuple((k, v) for k, v in variant.options if k in _FLAGS)


@functools.cache
def check(
    linalg: str, options: tuple[tuple[str, object], ...] = (), timeout: float = 120
) -> Verdict:
    """Compile ``linalg`` for the 910B3 up to the hand-over to the assembler."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "kernel.mlir").write_text(linalg)
        try:
            code, log = _run(_command({**_DEFAULTS, **dict(options)}), folder, timeout)
        except subprocess.TimeoutExpired:
            return Verdict(f"no answer within {timeout:g} s")
        log, _, hivm = log.partition("// -----// IR Dump Before")
        tail = hivm or log
        degraded = tuple(re.findall(r"overflow detected; automatically set (\S+ to \w+)", log))
        if "hacc.entry" not in hivm or not (code == 0 or _HANDED_OVER in tail):
            return Verdict(_reason(code, log), degraded)
        return Verdict("", degraded, **_memory(Path(folder)), hivm=hivm)


def _command(options: dict[str, object]) -> list[str]:
    """Command line, as triton-ascend's backend makes it for A2 chips."""
    found = importlib.util.find_spec("ascendnpuir")
    assert found is not None
    assert found.origin is not None
    return [
        str(Path(found.origin).parent / "bin" / "bishengir-compile"),
        "kernel.mlir",
        f"--target={CHIP}",
        *(f"--{_FLAGS[name]}={value}" for name, value in options.items() if value is not None),
        "--enable-hfusion-compile=true",
        "--enable-hivm-compile=true",
        "--enable-triton-kernel-compile=true",
        "--mlir-disable-threading",  # with threads it crashes now and then
        "--enable-memory-display",
        f"--mlir-print-ir-before={_LAST_PASS}",
        "-o",
        "kernel",
    ]


def _run(command: list[str], folder: str, timeout: float) -> tuple[int, str]:
    """Exit status and output; at a timeout the whole process group goes."""
    process = subprocess.Popen(
        command,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        log = process.communicate(timeout=timeout)[0]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise
    return process.returncode, log


def _reason(code: int, log: str) -> str:
    """What the compiler complained about, in one line."""
    overflow = re.findall(r"\w+ overflow, requires \d+ bits while \d+ bits available", log)
    if overflow:
        return "; ".join(dict.fromkeys(overflow))
    if code < 0:
        return f"the compiler died of signal {-code}: {first_error(log)}"
    return first_error(log)


def _memory(folder: Path) -> dict[str, int]:
    """Bytes in use a scope, from the memory plan that the compiler leaves in its folder."""
    peak: collections.Counter[str] = collections.Counter({"ub": 0, "l1": 0, "l0c": 0})
    copies: set[tuple[str, tuple[int, ...]]] = set()
    for plan in folder.glob("memory_info_*.json"):
        for record in json.loads(plan.read_text())["Record"]:
            scope = _SCOPES[record["scope"]]
            for buffer in record["memory_info_array"]:
                end = (
                    max(buffer["offset"]) + buffer["extent"] // 8
                )  # offset in bytes, extent in bits
                peak[scope] = max(peak[scope], end)
                if len(buffer["offset"]) > 1:
                    copies.add((scope, tuple(buffer["offset"])))
    return {**peak, "double_buffered": len(copies)}


def loops(hivm: str) -> int:
    """Loops in the final IR; a pipelined cube kernel has more of them than it was written with."""
    return len(re.findall(r"\bscf\.(?:for|while)\b", hivm))


def scalar_loops(hivm: str) -> int:
    """Innermost loops that touch a local buffer of more than one element, one element at a time."""
    found: set[int] = set()
    open_blocks: list[int] = []  # line of the loop that opened the block, -1 for any other block
    for number, line in enumerate(hivm.splitlines()):
        text = line.strip()
        if text.startswith("}") and open_blocks:
            open_blocks.pop()
        inside = [start for start in open_blocks if start >= 0]
        if inside and re.search(r"\bmemref\.(?:load|store)\b.*address_space<ub>", text):
            shape = re.search(r": memref<((?:[\d?]+x)*)", text)
            assert shape is not None, text
            if any(size not in ("", "1") for size in shape.group(1).split("x")):
                found.add(inside[-1])
        if text.endswith("{"):
            open_blocks.append(number if re.search(r"\bscf\.(?:for|while)\b", text) else -1)
    return len(found)


def compilers() -> dict[str, str]:
    """Versions of the two packages."""
    return {name: importlib.metadata.version(name) for name in ("triton-ascend", "ascendnpu-ir")}
