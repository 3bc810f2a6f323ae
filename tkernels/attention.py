"""What attention means here: the truth for one sequence, and checks that both kernels share.

    s[h, i, j] = scale * q[i, h] . k[j, h // group]          (softcap c: c * tanh(s / c))
    out[i, h]  = sum_j exp(s[h, i, j] - lse[i, h]) * v[j, h // group],  over the keys that i may see
    lse[i, h]  = log(sum_j exp(s[h, i, j]) + exp(sinks[h]))

Query i of Sq stands at position i + Sk - Sq: the last query at the last key. Causal: it sees keys
up to its position p; with a window, keys p - window + 1 to p. A sink is a logit that takes its
share of the softmax and has no value (gpt-oss). A row that sees nothing is zeros, its lse -inf (or
the sink).
"""

from __future__ import annotations

import itertools
import math

import torch

from tkernels.check import (
    FLOAT_DTYPES,
    check_dtype,
    check_last_contiguous,
    check_positive,
    check_shape,
    check_tensor,
    describe,
)

MAX_HEAD_DIM = 256
_ROWS = 2048  # queries at once: scores of a long sequence need not all be in memory


def attention_ref(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float,
    causal: bool,
    window: int | None = None,
    softcap: float | None = None,
    mask: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of one sequence, in fp32 (fp64 where the inputs are).

    Args:
        q: [Sq, Hq, D]. k, v: [Sk, Hk, D], Hq a multiple of Hk.
        mask: bool, broadcastable to [Hq, Sq, Sk], True = may be seen.
        sinks: [Hq].

    Returns:
        out [Sq, Hq, D] and lse [Sq, Hq].
    """
    dtype = torch.promote_types(q.dtype, torch.float32)
    (n, heads, _), (m, kv_heads, _) = q.shape, k.shape
    out, lse = q.new_empty(q.shape, dtype=dtype), q.new_empty((n, heads), dtype=dtype)
    for g, first in itertools.product(range(kv_heads), range(0, n, _ROWS)):
        mine = slice(g * heads // kv_heads, (g + 1) * heads // kv_heads)
        rows = slice(first, min(first + _ROWS, n))
        s = torch.einsum("qhd,kd->hqk", q[rows, mine].to(dtype), k[:, g].to(dtype)) * scale
        if softcap is not None:
            s = softcap * torch.tanh(s / softcap)
        if causal:
            s = s.masked_fill(~_seen(rows, m, m - n, window, q.device), -math.inf)
        if mask is not None:
            s = s.masked_fill(~mask.expand(heads, n, m)[mine, rows], -math.inf)
        # Not by exp(s - logsumexp(s)): of huge scores the sum's logarithm is lost in rounding.
        top = s.amax(-1) if m else s.new_full((heads // kv_heads, len(s[0])), -math.inf)
        if sinks is not None:
            top = top.maximum(sinks[mine, None].to(dtype))
        base = top.masked_fill(top == -math.inf, 0.0)
        weights = torch.exp(s - base[..., None])  # [heads, rows, keys]
        total = weights.sum(-1)
        if sinks is not None:
            total = total + torch.exp(sinks[mine, None].to(dtype) - base)
        weights = weights / total.masked_fill(total == 0, 1.0)[..., None]
        out[rows, mine] = torch.einsum("hqk,kd->qhd", weights, v[:, g].to(dtype))
        lse[rows, mine] = (base + total.log()).t()
    return out, lse


def _seen(
    rows: slice, m: int, shift: int, window: int | None, device: torch.device
) -> torch.Tensor:
    """bool [rows, m]: which keys a causal query may see; query i stands at i + ``shift``."""
    position = torch.arange(rows.start, rows.stop, device=device)[:, None] + shift
    key = torch.arange(m, device=device)
    seen = key <= position
    return seen if window is None else seen & (key > position - window)


# ---- checks ----------------------------------------------------------------------------------


def check_query(op: str, q: torch.Tensor) -> None:
    """q is [..., num_heads, head_dim] of a kind that the kernels compute in."""
    check_tensor(op, "q", q)
    if q.dim() < 3 or not 1 <= q.shape[-1] <= MAX_HEAD_DIM:
        raise ValueError(
            f"{op}: q must have shape [..., num_heads, head_dim] with head_dim 1 to "
            f"{MAX_HEAD_DIM}, got {describe(q)}"
        )
    check_dtype(op, "q", q, FLOAT_DTYPES)
    check_last_contiguous(op, "q", q)


def check_keys(op: str, name: str, t: torch.Tensor, q: torch.Tensor, heads_at: int) -> None:
    """Keys or values that suit ``q``: dtype, head_dim, and heads that divide its heads.

    ``heads_at``: which dimension of ``t`` counts heads.
    """
    check_dtype(op, name, t, (q.dtype,))
    check_last_contiguous(op, name, t)
    if t.shape[-1] != q.shape[-1]:
        raise ValueError(f"{op}: {name} must have head_dim {q.shape[-1]}, got {describe(t)}")
    heads, kv_heads = q.shape[-2], t.shape[heads_at]
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(
            f"{op}: {name} must have a number of heads that divides the {heads} of q, got "
            f"{describe(t)}"
        )


def check_options(
    op: str, scale: float | None, window: int | None, softcap: float | None, causal: bool
) -> None:
    """The plain values that decide what a score is and which are seen."""
    if not isinstance(causal, bool):
        raise ValueError(f"{op}: causal must be True or False, got {describe(causal)}")
    if scale is not None:
        check_positive(op, "scale", scale)
    if softcap is not None:
        check_positive(op, "softcap", softcap)
    if window is None:
        return
    if isinstance(window, bool) or not isinstance(window, int) or not 1 <= window < 2**31:
        raise ValueError(f"{op}: window must be an int >= 1 or None, got {describe(window)}")
    if not causal:
        raise ValueError(f"{op}: window must be None where causal is False, got {window}")


def check_sinks(op: str, sinks: torch.Tensor, num_heads: int) -> None:
    """One fp32 logit a query head."""
    check_tensor(op, "sinks", sinks)
    check_dtype(op, "sinks", sinks, (torch.float32,))
    check_shape(op, "sinks", sinks, num_heads=num_heads)
    check_last_contiguous(op, "sinks", sinks)


def check_offsets(op: str, name: str, t: torch.Tensor) -> None:
    """int32 [num_sequences + 1], contiguous."""
    check_tensor(op, name, t)
    check_dtype(op, name, t, (torch.int32,))
    if t.dim() != 1 or t.shape[0] < 1:
        raise ValueError(f"{op}: {name} must have shape [num_sequences + 1], got {describe(t)}")
    check_last_contiguous(op, name, t)


def check_offset_values(
    op: str, name: str, offsets: torch.Tensor, n_tokens: int, longest: int
) -> None:
    """Offsets rise from 0 to at most ``n_tokens`` by at most ``longest``: ``max_seqlen_*``.

    It reads values: for TKERNELS_DEBUG only.
    """
    ends = offsets.tolist()
    steps = [after - before for before, after in itertools.pairwise(ends)]
    if ends[0] != 0 or ends[-1] > n_tokens or any(not 0 <= n <= longest for n in steps):
        raise ValueError(
            f"{op}: {name} must rise from 0 to at most {n_tokens} tokens, by 0 to {longest} a "
            f"sequence, got {describe(ends)}"
        )


def check_result(op: str, out: torch.Tensor, q: torch.Tensor) -> None:
    """``out`` can take what has the shape of ``q``."""
    check_tensor(op, "out", out)
    check_dtype(op, "out", out, (q.dtype,))
    if out.shape != q.shape:
        raise ValueError(f"{op}: out must have shape {list(q.shape)}, got {describe(out)}")
    check_last_contiguous(op, "out", out)
