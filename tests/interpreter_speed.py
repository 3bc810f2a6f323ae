"""Triton's interpreter without work whose result it throws away or has had: about half of the time.

As of 3.9 it replaces the functions of ``triton.language`` not only for a launch but again for each
call of a jit function in it, and tests every sum of integers for an overflow, which it reports only
where ``InterpreterOptions.debug`` is set. With each value that it makes it derives anew what
follows from its type: the block's shape, size and name, the shape once more as constants with a
type each, numpy's dtype out of a table that it builds for the look-up. None of this changes what a
kernel computes.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any


def make_faster() -> None:
    """Patch the interpreter in this process."""
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    _patch_once_a_launch(interpreter)
    _find_builtins_once(interpreter)
    _remember_dtypes(interpreter)
    _share_what_follows_from_a_type(interpreter.tl.core)
    _compare_the_same_at_once(interpreter.tl.core)
    _unwrap_plain_values_at_once(interpreter.tl)


def _patch_once_a_launch(interpreter: Any) -> None:
    patch_lang, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    modules = (interpreter.tl, interpreter.tl.core)
    replaced: list[set[int]] = []  # of each launch under way: the modules that are done
    needed: dict[Any, set[int]] = {}  # by each jit function: the modules that it sees

    def patch_once(fn: Any) -> Any:
        seen = needed.get(fn)
        if seen is None:
            values = fn.__globals__.values()
            seen = needed[fn] = {id(v) for v in values if any(v is m for m in modules)}
        if replaced and seen <= replaced[-1]:
            return None
        if replaced:
            replaced[-1] |= seen
        return patch_lang(fn)

    def launch_once(self: Any, *args: Any, **kwargs: Any) -> None:
        replaced.append(set())
        try:
            launch(self, *args, **kwargs)
        finally:
            replaced.pop()

    interpreter._patch_lang = patch_once
    interpreter.GridExecutor.__call__ = launch_once


def _find_builtins_once(interpreter: Any) -> None:
    """The functions to replace are looked up once, and called without the wrapper that asks for
    the keyword ``_semantic``, which is always given here."""
    core = interpreter.tl.core
    asking = core.builtin(_find_builtins_once).__code__
    semantic = interpreter.TritonSemantic(interpreter.interpreter_builder)
    found: dict[Any, list[tuple[str, Any]]] = {}

    def interpreted(member: Any) -> Any:
        inner = member.__wrapped__ if member.__code__ is asking else member

        def call(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = semantic
            return inner(*args, **kwargs)

        return call

    def patch(pkg: Any, builder: Any, scope: Any) -> None:
        assert builder is semantic.builder
        if pkg not in found:
            members = inspect.getmembers(pkg)
            found[pkg] = [(name, interpreted(m)) for name, m in members if core.is_builtin(m)]
        for name, call in found[pkg]:
            scope.set_attr(pkg, name, call)

    interpreter._patch_builtin = patch


def _remember_dtypes(interpreter: Any) -> None:
    np_dtype: Callable[[Any], Any] = interpreter._get_np_dtype
    known: dict[str, Any] = {}

    def remembered(ty: Any) -> Any:
        found = known.get(ty.name)
        if found is None:
            found = known[ty.name] = np_dtype(ty)
        return found

    semantic = interpreter.TritonSemantic
    promote: Callable[..., Any] = semantic.computation_type_impl
    promoted: dict[tuple[Any, ...], Any] = {}

    def remembered_promotion(self: Any, a: Any, *rest: Any) -> Any:
        a_is_scalar, b, b_is_scalar, div_or_mod = rest
        key = a.name, a_is_scalar, b.name, b_is_scalar, div_or_mod
        found = promoted.get(key)
        if found is None:
            found = promoted[key] = promote(self, a, *rest)
        return found

    interpreter._get_np_dtype = remembered
    semantic.computation_type_impl = remembered_promotion


def _share_what_follows_from_a_type(core: Any) -> None:
    """Shapes and sizes are made once for all values of a type."""
    block_type, tensor = core.block_type, core.tensor
    init_type = block_type.__init__
    known: dict[tuple[Any, ...], tuple[Any, ...]] = {}
    shapes: dict[tuple[int, ...], tuple[Any, ...]] = {}
    of_scalars = core.tuple([]), core.constexpr(1)

    def of_block(self: Any, element_ty: Any, shape: Any) -> None:
        key = (element_ty.name, *[getattr(n, "value", n) for n in shape])
        found = known.get(key)
        if found is None:
            init_type(self, element_ty, shape)
            sizes = core.tuple([core.constexpr(n) for n in self.shape])
            of_values = sizes, core.constexpr(self.numel)
            # The same object whatever the elements are: shapes are often compared.
            shared = shapes.setdefault(tuple(self.shape), (self.shape, self.numel, of_values))
            found = known[key] = self.name, shared
        self.element_ty = element_ty
        self.name, (self.shape, self.numel, self.of_values) = found

    def of_tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle = handle
        self.shape, self.numel = type.of_values if type.is_block() else of_scalars
        self.type = type
        self.dtype = type.scalar

    block_type.__init__, tensor.__init__ = of_block, of_tensor


def _compare_the_same_at_once(core: Any) -> None:
    for kind in (core.dtype, core.block_type, core.pointer_type):
        kind.__eq__ = _same_or(kind.__eq__, True)
    core.tuple.__eq__ = _same_or(core.tuple.__eq__, core.constexpr(True))


def _same_or(equal: Callable[[Any, Any], Any], yes: Any) -> Callable[[Any, Any], Any]:
    def same_or_equal(self: Any, other: Any) -> Any:
        return yes if self is other else equal(self, other)

    return same_or_equal


def _unwrap_plain_values_at_once(tl: Any) -> None:
    core = tl.core
    unwrap: Callable[[Any], Any] = core._unwrap_if_constexpr
    plain = {int, bool, float, str, type(None), core.dtype, core.block_type, core.tensor}

    def unwrapped(o: Any) -> Any:
        kind = type(o)
        if kind in plain:
            return o
        return o.value if kind is core.constexpr else unwrap(o)

    tl._unwrap_if_constexpr = core._unwrap_if_constexpr = unwrapped
