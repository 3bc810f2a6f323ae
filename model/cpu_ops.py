"""The operations of a decode step on a CPU, in as few PyTorch calls as possible.

``tkernels.reference`` says what each operation means, in the plainest code. Here the same results
come of fewer steps where a step of the network takes one fp32 token: between two reads of weights,
which empty the caches, each call of PyTorch costs about 10 us whatever it computes, and a layer
made fifty of them. Everything else is the reference itself. The runner's inputs are trusted: slots
and positions are in range.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import torch

from model.quantized_matrix import PackedMatrix
from tkernels import reference
from tkernels.ops.masked_gemm import runs_high_ref
from tkernels.reference import (
    append_quantized_kv,
    fused_qk_norm_rope,
    quantize_per_token,
    release_residual_slots,
    rms_norm,
    silu_and_mul,
    watch_activations,
)

Tensor = torch.Tensor

__all__ = [
    "append_paged_kv",
    "append_quantized_kv",
    "fused_add_rms_norm",
    "fused_moe",
    "fused_qk_norm_rope",
    "masked_gemm",
    "quantize_per_token",
    "release_residual_slots",
    "rms_norm",
    "rope",
    "silu_and_mul",
    "watch_activations",
]


def fused_add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, *, eps: float
) -> tuple[Tensor, Tensor]:
    """As ``tkernels.fused_add_rms_norm``; one fp32 row sums its squares as a dot product."""
    if x.shape[0] != 1 or x.dtype != torch.float32:
        return reference.fused_add_rms_norm(x, residual, weight, eps=eps)
    total = x + residual
    row = total.view(-1)
    mean = torch.dot(row, row).item() / row.shape[0]
    return (total * weight).mul_((mean + eps) ** -0.5), total


def rope(
    q: Tensor, k: Tensor, cos_sin_cache: Tensor, positions: Tensor, *, q_out: Tensor, k_out: Tensor
) -> tuple[Tensor, Tensor]:
    """As ``tkernels.rope``; whole fp32 heads turn in place: x * (c, c) + (b, a) * (-s, s)."""
    half = q.shape[2] // 2
    whole = cos_sin_cache.shape[1] == q.shape[2] == 2 * half
    if not whole or q.dtype != torch.float32 or q_out is not q or k_out is not k:
        return reference.rope(q, k, cos_sin_cache, positions, q_out=q_out, k_out=k_out)
    cos, sin = _factors(cos_sin_cache, positions)
    for heads in (q, k):
        swapped = heads.roll(half, -1)
        heads.mul_(cos).addcmul_(swapped, sin)
    return q, k


@functools.lru_cache(maxsize=1)  # tensors compare by identity: all layers of a step ask the same
def _factors(cos_sin_cache: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """(c, c) and (-s, s) of each token, [T, 1, D]."""
    cos, sin = cos_sin_cache[positions].unsqueeze(1).chunk(2, dim=-1)
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def append_paged_kv(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor
) -> None:
    """As ``tkernels.append_paged_kv``; no slot is -1, and the cache is one row of slots."""
    for new, cache in ((k, k_cache), (v, v_cache)):
        cache.view(-1, *cache.shape[2:]).index_copy_(0, slot_mapping, new)


_ROWS_AT_ONCE = 1024  # a row is a token of one of its experts


def fused_moe(
    x: Tensor,
    router_logits: Tensor,
    gate_up_weight: Tensor,
    down_weight: Tensor,
    *,
    top_k: int,
    renormalize: bool = True,
    gate_up_scale: Tensor | None = None,
    down_scale: Tensor | None = None,
    gate_up_zero: Tensor | None = None,
    down_zero: Tensor | None = None,
    high: bool = False,
    topk_ids_out: Tensor | None = None,
) -> Tensor:
    """As ``tkernels.fused_moe``; products of chosen experts alone, rounded to x's dtype.

    Rows are sorted by their experts and gathered, multiplied and added to their tokens' sums
    ``_ROWS_AT_ONCE`` at a time: of all rows at once only a few numbers each are kept.
    """
    probabilities, ids = router_logits.float().softmax(-1).sort(descending=True, stable=True)
    weights, ids = probabilities[:, :top_k], ids[:, :top_k]
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    if topk_ids_out is not None:
        topk_ids_out.copy_(ids)
    chosen, order = ids.flatten().sort(stable=True)
    tokens, weights = order // top_k, weights.flatten()[order, None]
    out = torch.zeros(x.shape, dtype=torch.float32)
    for first in range(0, len(tokens), _ROWS_AT_ONCE):
        piece = slice(first, first + _ROWS_AT_ONCE)
        spans = _spans(chosen[piece].tolist())
        rows = x[tokens[piece]]
        both = x.new_empty(len(rows), gate_up_weight.shape[1])
        _multiply(rows, spans, gate_up_weight, gate_up_scale, gate_up_zero, high, both)
        _multiply(silu_and_mul(both), spans, down_weight, down_scale, down_zero, high, rows)
        out.index_add_(0, tokens[piece], rows * weights[piece])
    return out.to(x.dtype)


def _multiply(
    x: Tensor,
    spans: list[tuple[int, int, int]],
    weight: Tensor,
    scale: Tensor | None,
    zero: Tensor | None,
    high: bool,
    out: Tensor,
) -> None:
    """Rows x[begin:end] of each expert times its weight, into the same rows of ``out``."""
    for expert, begin, end in spans:
        rows, into = x[begin:end], out[begin:end]
        if scale is None:
            torch.mm(rows, weight[expert].t(), out=into)
        elif weight.dtype == torch.int32:  # codes of 4 bits
            zeros = None if zero is None else zero[expert]
            matrix = PackedMatrix(weight[expert], scale[expert], 4, 8 * weight.shape[2], zeros)
            into.copy_(rows.float() @ matrix.values(torch.float32).t())
        else:
            into.copy_(masked_gemm(rows, weight[expert], scale[expert], high=high))


def _spans(values: list[int]) -> list[tuple[int, int, int]]:
    """(value, begin, end) of each run of equal values.

    >>> _spans([4, 4, 7])
    [(4, 0, 2), (7, 2, 3)]
    """
    found, begin = [], 0
    for value, run in itertools.groupby(values):
        end = begin + sum(1 for _ in run)
        found.append((value, begin, end))
        begin = end
    return found


_MOST = torch.tensor(127.0)  # PyTorch divides a number by a tensor in two roundings


def masked_gemm(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    *,
    bias: Tensor | None = None,
    high: bool = False,
    mask: Tensor | None = None,
    row_group: Tensor | None = None,
    **others: Any,
) -> Tensor:
    """As ``tkernels.masked_gemm``; a step that is int8 throughout takes PyTorch's int8 product."""
    if high or others or not _multiplies_exactly():
        more = {"mask": mask, "row_group": row_group, **others}
        return reference.masked_gemm(x, weight, weight_scale, bias=bias, high=high, **more)
    if mask is not None and bool(mask.any()):
        # Of all rows: what one gets must not depend on which others run high.
        high_rows = reference.masked_gemm(x, weight, weight_scale, bias=bias, high=True)
        low_rows = masked_gemm(x, weight, weight_scale, bias=bias)
        chosen = runs_high_ref(mask, row_group, x.shape[0])
        return torch.where(chosen[:, None], high_rows, low_rows)
    values = x.float()
    # As quantize_per_token: the same codes and scales, in half as many steps.
    absmax = values.abs().amax(1, keepdim=True)
    codes = (values * (_MOST / absmax.clamp_min(2.0**-100))).round_()
    y = torch._int_mm(codes.to(torch.int8), weight.t()).float()
    # An infinity makes this a NaN, and a NaN stays one.
    y.mul_(absmax / _MOST + (absmax - absmax)).mul_(weight_scale)
    if bias is not None:
        y.add_(bias)
    return y.to(x.dtype)


@functools.cache
def _multiplies_exactly() -> bool:
    """Whether this processor's int8 product is exact: some saturate sums of two in 16 bits."""
    codes = torch.full((2, 64), 127, dtype=torch.int8)
    codes[1] = -127
    weight = torch.full((3, 64), 127, dtype=torch.int8)
    weight[1] = -128
    found = torch._int_mm(codes, weight.t())
    return torch.equal(found, (codes.double() @ weight.double().t()).to(torch.int32))
