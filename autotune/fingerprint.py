"""What a measurement depends on: the kernel's source, the chip, the versions."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import inspect
from pathlib import Path
from typing import Any

from tkernels import device
from tkernels.registry import KernelSpec

# Modules that kernels import and that do not change what is launched for a given config.
_APART = frozenset(
    f"tkernels.{name}"
    for name in (
        *("device", "registry", "config", "check", "testing", "offline", "reference"),
        *("flash_attn_cases", "attention_cases"),
    )
)


def kernel_hash(spec: KernelSpec) -> str:
    """Hash of the kernel's file and of what it imports from tkernels, without comments and docs."""
    digest = hashlib.sha256()
    for module in sorted(_modules(inspect.getmodule(spec.launch).__name__)):  # type: ignore[union-attr]
        digest.update(_meaning(_source(module)).encode())
    return digest.hexdigest()[:16]


def _modules(first: str) -> set[str]:
    """``first`` and the tkernels modules that it imports, directly or not."""
    found: set[str] = set()
    queue = [first]
    while queue:
        name = queue.pop()
        if name in found or name in _APART:
            continue
        found.add(name)
        queue += [n for n in _imported(_source(name)) if n.startswith("tkernels.")]
    return found


def _imported(source: str) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return {name for name in names if _path(name) is not None}


def _path(module: str) -> Path | None:
    if not module.startswith("tkernels."):
        return None
    try:
        spec = importlib.util.find_spec(module)
    except ModuleNotFoundError:  # a name inside a module
        return None
    return Path(spec.origin) if spec is not None and spec.origin else None


def _source(module: str) -> str:
    path = _path(module)
    if path is not None:
        return path.read_text()
    return inspect.getsource(importlib.import_module(module))  # a kernel of the user


def _meaning(source: str) -> str:
    """The syntax tree without docstrings: comments and layout are not in it anyway."""
    tree = ast.parse(source)
    tree.body = [node for node in tree.body if not _is_spec(node)]
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                node.body = node.body[1:] or [ast.Pass()]
    return ast.dump(tree)


def _is_spec(node: ast.stmt) -> bool:
    """``SPEC = register(...)``: another bench case or peer does not change the kernel."""
    return isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "SPEC"


def chip() -> dict[str, Any]:
    """The device that is measured on, as it is written into records."""
    dev = device.current()
    return {
        "device": dev.name,
        "num_cores": dev.num_cores,
        "memory_gib": round(device.memory_bytes() / 2**30),
        **device.versions(),
    }
