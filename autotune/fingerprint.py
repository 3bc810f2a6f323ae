"""What a measurement depends on: the kernel's source, the chip, the versions."""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import importlib
import importlib.util
import inspect
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tkernels import device
from tkernels.registry import KernelSpec

# What every kernel stands on, and what does not change what is launched for a given config.
_APART = frozenset(
    f"tkernels.{name}"
    for name in ("device", "registry", "config", "check", "testing", "offline", "reference")
)


def kernel_hash(spec: KernelSpec) -> str:
    """Hash of the code that a call of the kernel runs, without comments, docstrings and layout.

    That is the public function and each definition that it leads to by name, in its own file and in
    other modules of tkernels: jit functions, tile arithmetic, constants. Cases, the reference, the
    heuristic and the rest of the spec are no part of it: they do not change a tuned config's time.
    """
    digest = hashlib.sha256()
    for place, statements in sorted(reached(spec).items()):
        digest.update(f"{place}\n".encode())
        for statement in statements:
            digest.update(_meaning(statement).encode())
    return digest.hexdigest()[:16]


def reached(spec: KernelSpec) -> dict[str, list[ast.stmt]]:
    """By ``module.name``, the statements that define what a call of the kernel leads to."""
    first = inspect.unwrap(spec.launch)
    modules: dict[str, _Module] = {}
    found: dict[str, list[ast.stmt]] = {}
    queue = [(first.__module__, first.__name__)]
    while queue:
        home, name = queue.pop()
        if home in _APART or f"{home}.{name}" in found:
            continue
        if home not in modules:
            modules[home] = _read(_source(home))
        module = modules[home]
        if name in module.imported:  # a name that another module hands on
            queue.append(module.imported[name])
        if name not in module.defined:
            continue
        found[f"{home}.{name}"] = module.defined[name]
        for statement in module.defined[name]:
            queue += _leads_to(statement, home, module)
    return found


@dataclasses.dataclass(frozen=True)
class _Module:
    defined: Mapping[str, list[ast.stmt]]  # statements of the top level that bind a name
    imported: Mapping[str, tuple[str, str]]  # name here: (module of tkernels, its name there)
    modules: Mapping[str, str]  # name here: module of tkernels


def _read(source: str) -> _Module:
    tree = ast.parse(source)
    defined: dict[str, list[ast.stmt]] = {}
    imported: dict[str, tuple[str, str]] = {}
    modules: dict[str, str] = {}
    for statement in tree.body:
        for name in _bound_by(statement):
            defined.setdefault(name, []).append(statement)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tkernels"):
            for alias in node.names:
                whole, here = f"{node.module}.{alias.name}", alias.asname or alias.name
                if _path(whole) is not None:
                    modules[here] = whole
                elif _path(str(node.module)) is not None:
                    imported[here] = str(node.module), alias.name
    return _Module(defined, imported, modules)


def _bound_by(statement: ast.stmt) -> Iterator[str]:
    """Names that a statement of the top level defines; one that registers a spec defines none."""
    if _registers(statement):
        return
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield statement.name
        return
    for node in ast.walk(statement):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):  # below an if or a try
            yield node.name


def _registers(statement: ast.stmt) -> bool:
    """Whether this is ``SPEC = register(...)``, which speaks of all that a kernel has."""
    called = statement.value if isinstance(statement, ast.Assign | ast.Expr) else None
    return isinstance(called, ast.Call) and ast.unparse(called.func).endswith("register")


def _leads_to(statement: ast.stmt, home: str, module: _Module) -> Iterator[tuple[str, str]]:
    """(module, name) of what a statement speaks of; names that are defined nowhere are harmless."""
    for node in ast.walk(statement):
        if isinstance(node, ast.Name):
            yield home, node.id
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) in module.modules:
            yield module.modules[ast.unparse(node.value)], node.attr


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


def _meaning(node: Any) -> str:
    """A syntax tree as text, without docstrings; comments and layout are not in a tree anyway.

    Nor is what is empty: fields that some versions of Python have and others not (``ast.dump``
    differs between them), and a hash must not.
    """
    if isinstance(node, list):
        return "[" + ",".join(map(_meaning, node)) + "]"
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = {n: v for n, v in ast.iter_fields(node) if v is not None and v != []}
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        first = node.body[0]
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
            fields["body"] = node.body[1:]
    text = ",".join(f"{name}={_meaning(value)}" for name, value in fields.items())
    return f"{type(node).__name__}({text})"


def chip() -> dict[str, Any]:
    """The device that is measured on, as it is written into records."""
    dev = device.current()
    return {
        "device": dev.name,
        "num_cores": dev.num_cores,
        "memory_gib": round(device.memory_bytes() / 2**30),
        **device.versions(),
    }
