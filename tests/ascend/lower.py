"""Lower a kernel for Ascend as far as linalg, with triton-ascend and without CANN or an NPU."""

from __future__ import annotations

import dataclasses
import functools
import re
import subprocess
from typing import Any

from triton._C.libtriton import ir
from triton.backends.ascend.compiler import (
    AscendBackend,
    NPUOptions,
    make_ttir,
    ttir_to_linalg,
)
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tkernels.offline import Variant

CHIP = "Ascend910B3"
_KNOWN_OPTIONS = {field.name for field in dataclasses.fields(NPUOptions)}


class LoweringError(RuntimeError):
    """triton-ascend does not take the kernel; the message is the compiler's."""


@functools.cache
def lower(variant: Variant) -> str:
    """The linalg text of ``variant``, the last stage before Huawei's compiler takes over."""
    options = dict(variant.options)
    if unknown := set(options) - _KNOWN_OPTIONS:
        raise LoweringError(
            f"{variant.fn.__name__}: launch keyword {', '.join(sorted(unknown))} is neither a "
            "parameter of the kernel nor an option of triton-ascend"
        )
    try:
        return _lower(variant, options)
    except subprocess.CalledProcessError as error:  # triton-adapter-opt refused or crashed
        text = (error.stderr or b"").decode(errors="replace").strip()
        raise LoweringError(
            f"{variant.fn.__name__}: triton-adapter-opt ended with status {error.returncode}: "
            f"{first_error(text)}"
        ) from None
    except Exception as error:  # raised by the front end while it reads the kernel's source
        raise LoweringError(f"{variant.fn.__name__}: {type(error).__name__}: {error}") from error


def _lower(variant: Variant, options: dict[str, Any]) -> str:
    """Python source -> ttir -> linalg, in the steps that triton.compile takes."""
    target = GPUTarget("npu", CHIP, 0)
    backend = AscendBackend(target)
    parsed = backend.parse_options(dict(options))
    # 3.2 pairs the signature with the parameters by position, so constants must not be in it.
    source = ASTSource(variant.fn, dict(variant.signature), dict(variant.constants))
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    metadata = {"hash": "tests-ascend", "target": target, **parsed.__dict__}
    module = source.make_ir(
        parsed, backend.get_codegen_implementation(), backend.get_module_map(), context
    )
    module = make_ttir(module, metadata, parsed)
    return str(ttir_to_linalg(module, metadata, parsed, named_ops=True))


def first_error(log: str) -> str:
    """The lines of a compiler log that say what went wrong (its end, where none is marked)."""
    lines = [line for line in log.splitlines() if re.search(r"error:|Assertion", line)]
    return " | ".join(lines[:3]) or log[-300:] or "no message"


def scalar_memory_loops(linalg: str) -> int:
    """Loops that load or store one element at a time, as triton-ascend marks them."""
    return linalg.count("{ExtractedLoadOrStore}")
