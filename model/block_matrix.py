"""Weights that stay in the 4- or 8-bit blocks of a GGUF file and are multiplied there, on the CPU.

Decode is bound by the bytes of the weights. A block format stores W[n, k] = scale[g, n] * q[n, k] +
low[g, n], where g = k // 32 and q is a small integer, so that

    y[n] = sum_g ( scale[g, n] * P[g, n] + low[g, n] * S[g] ),
    P[g, n] = sum_{k in g} x[k] q[n, k],    S[g] = sum_{k in g} x[k].

P is what a weighted "embedding bag" computes: row k of the table holds q[:, k] as bytes, group g is
a bag of 32 rows, x are the weights. PyTorch's quantised embedding bag does that in vectorised code
(FBGEMM) with fp32 activations and sums, so nothing is rounded that fp32 weights would not round,
and a quarter of their bytes is read. Many tokens at once are faster with dequantised weights.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

GROUP = 32
_TAIL = 8  # each table row ends in its own fp32 scale and bias: here 1 and the codes' offset
_MAX_WIDTH = 3072  # columns of a table; wider matrices are cut so that a bag's sums stay in cache
_MAX_TOKENS = 8  # above this a step dequantises and multiplies as usual


@dataclass(frozen=True)
class Blocks:
    """A stored matrix [N, K]: (codes + offset) * scale + low."""

    codes: torch.Tensor  # uint8 [K, N]
    offset: int
    scale: torch.Tensor  # fp32 [K / 32, N]
    low: torch.Tensor | None  # fp32 [K / 32, N]

    def values(self) -> torch.Tensor:
        """fp32 [N, K], the transpose of a contiguous tensor."""
        k, n = self.codes.shape
        return _values(self.codes.view(-1, GROUP, n), self).view(k, n).t()


def _values(codes: torch.Tensor, b: Blocks | BlockMatrix) -> torch.Tensor:
    """fp32 from codes [..., groups, 32, n]; the order of operations is ggml's."""
    values = codes.float()
    if b.offset:
        values.add_(b.offset)
    values.mul_(b.scale.unsqueeze(-2))
    return values if b.low is None else values.add_(b.low.unsqueeze(-2))


@dataclass(frozen=True)
class BlockMatrix:
    """A matrix [N, K] as an embedding table, cut into C chunks of ``width`` outputs (padded).

    ``scale`` and ``low`` are fp32 [C, K / 32, width].
    """

    shape: tuple[int, int]
    table: torch.Tensor  # uint8 [C * K, width + 8]
    offset: int
    scale: torch.Tensor
    low: torch.Tensor | None

    @property
    def nbytes(self) -> int:
        low = 0 if self.low is None else self.low.nbytes
        return self.table.nbytes + self.scale.nbytes + low

    def _codes(self) -> torch.Tensor:
        """[C, K, width], a view."""
        return self.table.view(len(self.scale), self.shape[1], -1)[..., :-_TAIL]

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, K] -> x W^T [T, N], all fp32."""
        tokens, (n, k) = x.shape[0], self.shape
        if tokens > _MAX_TOKENS:
            return x @ self.values().t()
        chunks, groups, width = self.scale.shape
        weights = (x if chunks == 1 else x.repeat(1, chunks)).view(-1)  # [T * C * K]
        rows, bags = _all_rows(chunks * k, tokens)
        sums: torch.Tensor = torch.ops.quantized.embedding_bag_byte_rowwise_offsets.default(
            self.table, rows, bags, per_sample_weights=weights
        ).view(tokens, chunks, groups, width)  # P
        sums.mul_(self.scale)
        if self.low is not None:
            sums.addcmul_(x.view(tokens, 1, groups, GROUP).sum(-1, keepdim=True), self.low)
        return sums.sum(2).view(tokens, -1)[:, :n]

    def values(self) -> torch.Tensor:
        """Dequantised: fp32 [N, K], the transpose of a contiguous tensor."""
        n, k = self.shape
        chunks, groups, width = self.scale.shape
        values = _values(self._codes().reshape(chunks, groups, GROUP, width), self)
        return values.view(chunks, k, width).transpose(0, 1).reshape(k, -1)[:, :n].t()

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows of the matrix, as an embedding looks them up: ids [T] -> fp32 [T, K]."""
        width = self.scale.shape[2]
        chunk, column = ids // width, ids % width
        values = self._codes()[chunk, :, column].float().add_(self.offset)  # [T, K]
        values = values.view(len(ids), -1, GROUP)
        values.mul_(self.scale[chunk, :, column][..., None])
        if self.low is not None:
            values.add_(self.low[chunk, :, column][..., None])
        return values.view(len(ids), -1)


@functools.lru_cache(maxsize=64)  # a network has few shapes
def _all_rows(count: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Every row of a table, once a token, and where each bag of 32 begins: int32."""
    rows = torch.arange(count, dtype=torch.int32).repeat(tokens)
    return rows, torch.arange(0, count * tokens, GROUP, dtype=torch.int32)


Matrix = torch.Tensor | BlockMatrix  # [out, in]


def can_multiply() -> bool:
    """Whether this build of PyTorch has the vectorised embedding bag (FBGEMM, x86)."""
    return "fbgemm" in torch.backends.quantized.supported_engines


def stack(parts: Sequence[Blocks]) -> BlockMatrix | None:
    """The parts as one matrix, stacked along N; None where their formats differ."""
    if len({(p.offset, p.low is None) for p in parts}) > 1:
        return None
    n, k = sum(p.codes.shape[1] for p in parts), parts[0].codes.shape[0]
    chunks = -(-n // _MAX_WIDTH)
    width = -(-n // chunks)

    def cut(tensors: list[torch.Tensor]) -> torch.Tensor:
        """[rows, N] -> [C, rows, width]."""
        whole = tensors[0] if len(tensors) == 1 else torch.cat(tensors, dim=1)
        padded = torch.nn.functional.pad(whole, (0, chunks * width - n))
        return padded.view(len(whole), chunks, width).transpose(0, 1)

    offset = parts[0].offset
    table = torch.empty(chunks, k, width + _TAIL, dtype=torch.uint8)
    table[..., :width] = cut([p.codes for p in parts])
    table[..., width:] = torch.tensor([1.0, offset]).view(torch.uint8)
    lows = [p.low for p in parts if p.low is not None]
    return BlockMatrix(
        shape=(n, k),
        table=table.view(chunks * k, -1),
        offset=offset,
        scale=cut([p.scale for p in parts]).contiguous(),
        low=cut(lows).contiguous() if lows else None,
    )
