"""Make Triton's interpreter compute bfloat16 as hardware does, where ``import tkernels`` needs it.

Triton keeps bfloat16 as uint16 bit patterns in its interpreter. As of 3.9, ``tl.dot`` multiplies
these patterns as integers (triton-lang/triton issue 11584), integers become patterns instead of
numbers, and float32 -> bfloat16 cuts the low bits off where every GPU and NPU rounds to nearest
even. All are patched here, not worked around in kernels.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tkernels.device import require_triton, tl


def bf16_bits(values: Any) -> Any:
    """float32 array -> uint16 bfloat16 patterns, rounded to nearest even; NaN stays NaN."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    quiet_nan = (bits >> 16) | 0x40
    return np.where((bits & 0x7FFFFFFF) > 0x7F800000, quiet_nan, rounded).astype(np.uint16)


def f32_values(patterns: Any) -> Any:
    """uint16 bfloat16 patterns -> the float32 array they stand for."""
    return (patterns.astype(np.uint32) << 16).view(np.float32)


def correct_bfloat16() -> None:
    """Patch the interpreter in this process. Safe to call twice."""
    require_triton()
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    if getattr(builder, "_tkernels_bfloat16", False):
        return
    original_cast, original_dot = builder.cast_impl, builder.create_dot

    def cast(self: Any, src: Any, dst_type: Any) -> Any:
        given, wanted = src.dtype.scalar, dst_type.scalar
        if given == wanted:
            return original_cast(self, src, dst_type)
        if wanted == tl.bfloat16:
            bits = bf16_bits(src.data.astype(np.float32)).reshape(src.data.shape)
            return interpreter.TensorHandle(bits, tl.bfloat16)
        if given == tl.bfloat16:
            values = f32_values(src.data).reshape(src.data.shape)
            src = interpreter.TensorHandle(values, tl.float32)
            return src if wanted == tl.float32 else original_cast(self, src, dst_type)
        return original_cast(self, src, dst_type)

    def widened(handle: Any) -> Any:
        if handle.dtype.scalar == tl.bfloat16:
            return interpreter.TensorHandle(f32_values(handle.data), tl.float32)
        return handle

    def dot(self: Any, a: Any, b: Any, acc: Any, *rest: Any) -> Any:
        return original_dot(self, widened(a), widened(b), acc, *rest)

    def trunc(self: Any, src: Any, dst_type: Any) -> Any:
        return self.cast_impl(src, dst_type)

    builder.cast_impl = cast
    builder.create_fp_trunc = trunc
    builder.create_fp_ext = trunc
    builder.create_dot = dot
    builder._tkernels_bfloat16 = True
