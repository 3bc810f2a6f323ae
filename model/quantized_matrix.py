"""Weights of linear layers and of experts as integers, multiplied as such.

``ops`` is the namespace whose kernels multiply: ``tkernels``, its reference, or ``model.cpu_ops``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  (its usual name)

from model.block_matrix import BlockMatrix
from model.compressed import takes_group, unpack
from tkernels.w8_format import dequantize_w8

# Of x [T, K], as ``quantize_per_token`` makes them: int8 [T, K] and fp32 [T].
Codes = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Int8Matrix:
    """[N, K]: weight[n, k] = codes[n, k] * scale[n]."""

    codes: torch.Tensor  # int8 [N, K]
    scale: torch.Tensor  # fp32 [N]
    quantized_activations: bool  # W8A8, or W8A16

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scale.nbytes

    def multiply(
        self, x: torch.Tensor, ops: Any, bias: torch.Tensor | None, codes: Codes | None = None
    ) -> torch.Tensor:
        """x [T, K] -> x W^T + bias [T, N], of x's dtype."""
        # With a fallback ``ops`` adds a mask of the rows that run in 16 bits (model/fallback.py).
        high = not self.quantized_activations
        given = {} if codes is None else {"x_q": codes[0], "x_scale": codes[1]}
        y: torch.Tensor = ops.masked_gemm(x, self.codes, self.scale, bias=bias, high=high, **given)
        return y


@dataclass(frozen=True)
class Int8Experts:
    """[E, N, K], a matrix an expert: weight[e, n, k] = codes[e, n, k] * scale[e, n]."""

    codes: torch.Tensor  # int8 [E, N, K]
    scale: torch.Tensor  # fp32 [E, N]
    quantized_activations: bool  # W8A8, or W8A16

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scale.nbytes


@dataclass(frozen=True)
class Int4Experts:
    """[E, N, K], a matrix an expert: weight[e, n, k] = code[e, n, k] * scale[e, n, k // group].

    With zeros it is (code[e, n, k] + 8 - zero[e, n, k // group]) * scale[e, n, k // group].
    """

    packed: torch.Tensor  # int32 [E, N, K / 8], as model.compressed.pack has it
    scale: torch.Tensor  # [E, N, K / group], fp32 or the activations' dtype
    zero: torch.Tensor | None = None  # int8 [E, N, K / group], 0 to 16; None: all 8

    @property
    def nbytes(self) -> int:
        zeros = 0 if self.zero is None else self.zero.nbytes
        return self.packed.nbytes + self.scale.nbytes + zeros


@dataclass(frozen=True)
class PackedMatrix:
    """[N, K]: weight[n, k] = code[n, k] * scale[n, k // group], 8 or 4 bits a code.

    With zeros it is (code[n, k] + 8 - zero[n, k // group]) * scale[n, k // group], of 4 bits.
    """

    packed: torch.Tensor  # int32 [N, ceil(K bits / 32)], as model.compressed.pack has it
    scale: torch.Tensor  # [N, K / group], fp32 or the activations' dtype
    bits: int
    columns: int  # K
    zero: torch.Tensor | None = None  # int8 [N, K / group], 0 to 16; None: all 8

    @property
    def nbytes(self) -> int:
        zeros = 0 if self.zero is None else self.zero.nbytes
        return self.packed.nbytes + self.scale.nbytes + zeros

    def values(self, dtype: torch.dtype) -> torch.Tensor:
        """Dequantised: [N, K]."""
        n, groups = self.scale.shape
        codes = unpack(self.packed, self.bits, self.columns).view(n, groups, -1)
        if self.zero is not None:
            codes = codes - (self.zero - 8)[..., None]
        return (codes.float() * self.scale[..., None]).view(n, -1).to(dtype)

    def multiply(self, x: torch.Tensor, ops: Any, bias: torch.Tensor | None) -> torch.Tensor:
        """x [T, K] -> x W^T + bias [T, N], of x's dtype."""
        return multiply_packed(x, self, ops, bias)


def multiply_packed(
    x: torch.Tensor, weight: PackedMatrix, ops: Any, bias: torch.Tensor | None
) -> torch.Tensor:
    """x [T, K] -> x W^T + bias [T, N]: ``w4a16_gemm`` where that can, else dequantised weights."""
    groups = weight.scale.shape[1]
    fits = groups == 1 or takes_group(weight.columns // groups)
    if weight.bits == 4 and fits and x.dtype != torch.float32 and hasattr(ops, "w4a16_gemm"):
        y: torch.Tensor = ops.w4a16_gemm(
            x, weight.packed, weight.scale, weight_zero=weight.zero, bias=bias
        )
        return y
    return F.linear(x, weight.values(x.dtype), bias)


@dataclass(frozen=True)
class ByteMatrix:
    """[N, K]: weight[n, k] = code[n, k] * scale[n, k // group], a code a byte."""

    codes: torch.Tensor  # int8 or float8_e4m3fn [N, K], no NaN
    scale: torch.Tensor  # [N, K / group], fp32 or of 16 bits; group is one that kernels take, or K

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scale.nbytes

    def values(self, dtype: torch.dtype) -> torch.Tensor:
        """Dequantised: [N, K]."""
        return dequantize_w8(self.codes, self.scale).to(dtype)

    def multiply(self, x: torch.Tensor, ops: Any, bias: torch.Tensor | None) -> torch.Tensor:
        """x [T, K] -> x W^T + bias [T, N]: ``w8a16_gemm`` where that is, else as ``values``."""
        if x.dtype == torch.float32 or not hasattr(ops, "w8a16_gemm"):
            return F.linear(x, self.values(x.dtype), bias)
        y: torch.Tensor = ops.w8a16_gemm(x, self.codes, self.scale, bias=bias)
        return y


Part = torch.Tensor | BlockMatrix | Int8Matrix | PackedMatrix | ByteMatrix  # [N, K]


@dataclass(frozen=True)
class Parts:
    """Stacked along N: what is joined, but not quantised alike."""

    parts: tuple[Part, ...]

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    def multiply(
        self, x: torch.Tensor, ops: Any, bias: torch.Tensor | None, codes: Codes | None = None
    ) -> torch.Tensor:
        """x [T, K] -> x W^T + bias [T, N]: a product for each part."""
        y = torch.cat([product(x, part, ops, None, codes) for part in self.parts], dim=1)
        return y if bias is None else y + bias


Weight = Part | Parts  # [out, in]


def multiplies_codes(weight: Weight) -> list[bool]:
    """Of each part of a weight: whether int8 codes of x are what it is multiplied with (W8A8)."""
    parts = weight.parts if isinstance(weight, Parts) else (weight,)
    return [isinstance(part, Int8Matrix) and part.quantized_activations for part in parts]


def product(
    x: torch.Tensor,
    weight: Weight,
    ops: Any,
    bias: torch.Tensor | None = None,
    codes: Codes | None = None,
) -> torch.Tensor:
    """x [T, K] times a weight [N, K] of any kind, + bias [N]: [T, N].

    ``codes`` are those of x, where all parts of the weight multiply codes; None makes them here.
    """
    if isinstance(weight, torch.Tensor):
        return F.linear(x, weight, bias)
    if isinstance(weight, BlockMatrix):
        y = weight.multiply(x)
        return y if bias is None else y + bias
    if isinstance(weight, PackedMatrix | ByteMatrix):
        return weight.multiply(x, ops, bias)
    return weight.multiply(x, ops, bias, codes)
