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
_WIDTH = 96  # outputs in a table row: narrow, so that a bag is read from one stretch of memory
_embedding_bag = torch.ops.quantized.embedding_bag_byte_rowwise_offsets.default
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
    """A matrix [N, K] as an embedding table of C chunks of 96 outputs, N padded to 96 C.

    ``table`` is uint8 [K / 32, C, 32, 96 + 8] in memory: one bag after the other. ``scale`` and
    ``low`` are fp32 [K / 32, 96 C].
    """

    shape: tuple[int, int]
    table: torch.Tensor  # uint8 [K * C, 96 + 8]
    offset: int
    scale: torch.Tensor
    low: torch.Tensor | None

    @property
    def nbytes(self) -> int:
        low = 0 if self.low is None else self.low.nbytes
        return self.table.nbytes + self.scale.nbytes + low

    def _codes(self) -> torch.Tensor:
        """[K / 32, C, 32, 96], a view."""
        return self.table.view(self.scale.shape[0], -1, GROUP, _WIDTH + _TAIL)[..., :_WIDTH]

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, K] -> x W^T [T, N], all fp32."""
        tokens = x.shape[0]
        if tokens > _MAX_TOKENS:
            return x @ self.values().t()
        groups, padded = self.scale.shape
        grouped = x.view(tokens, groups, 1, GROUP)
        rows, bags = _all_rows(self.table.shape[0], tokens)
        weights = grouped.expand(tokens, groups, padded // _WIDTH, GROUP).reshape(-1)
        # Positional: scale_grad_by_freq, mode, pruned_weights. Names cost as much as an operation.
        sums: torch.Tensor = _embedding_bag(self.table, rows, bags, False, 0, False, weights)
        sums = sums.view(tokens, groups, padded).mul_(self.scale)  # P
        if self.low is not None:
            sums.addcmul_(grouped.sum(-1), self.low)
        y = sums.sum(1)
        return y if padded == self.shape[0] else y[:, : self.shape[0]]

    def values(self) -> torch.Tensor:
        """Dequantised: fp32 [N, K], the transpose of a contiguous tensor."""
        n, k = self.shape
        groups, padded = self.scale.shape
        codes = self._codes().transpose(1, 2).reshape(groups, GROUP, padded)
        return _values(codes, self).view(k, padded)[:, :n].t()

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows of the matrix, as an embedding looks them up: ids [T] -> fp32 [T, K]."""
        values = self._codes()[:, ids // _WIDTH, :, ids % _WIDTH].float()  # [T, K / 32, 32]
        values.add_(self.offset).mul_(self.scale.t()[ids][..., None])
        if self.low is not None:
            values.add_(self.low.t()[ids][..., None])
        return values.flatten(1)


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
    chunks = -(-n // _WIDTH)

    def joined(tensors: list[torch.Tensor]) -> torch.Tensor:
        """[rows, 96 C]."""
        whole = tensors[0] if len(tensors) == 1 else torch.cat(tensors, dim=1)
        return torch.nn.functional.pad(whole, (0, chunks * _WIDTH - n))

    offset = parts[0].offset
    table = torch.empty(k // GROUP, chunks, GROUP, _WIDTH + _TAIL, dtype=torch.uint8)
    codes = joined([p.codes for p in parts]).view(-1, GROUP, chunks, _WIDTH)
    table[..., :_WIDTH] = codes.transpose(1, 2)
    table[..., _WIDTH:] = torch.tensor([1.0, offset]).view(torch.uint8)
    lows = [p.low for p in parts if p.low is not None]
    return BlockMatrix(
        shape=(n, k),
        table=table.view(-1, _WIDTH + _TAIL),
        offset=offset,
        scale=joined([p.scale for p in parts]),
        low=joined(lows) if lows else None,
    )
