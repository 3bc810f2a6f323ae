"""A mixture of experts, from router logits to the layer's output: the MoE kernels in a row.

    weights, ids = top-k of softmax(router_logits)                      (``moe_route``)
    rows         = tokens in the order of their experts                 (``moe_dispatch``)
    h[row]       = silu(x[row] Wg[e]^T) * (x[row] Wu[e]^T)              (``moe_gemm``)
    y[row]       = weights[row] * (h[row] Wd[e]^T)                      (``moe_gemm``)
    out[token]   = sum over the token's k rows of y                     (``moe_combine``)

Of weights of 4 bits both products are ``moe_w4a16_gemm``.

That is the layer of Qwen3-MoE and Mixtral (Jiang et al., 2024, arXiv 2401.04088); shapes: T tokens,
E experts, top_k of them a token, H hidden_size, I intermediate_size of one expert.

Tokens go through in chunks: h and y have top_k rows a token, and the memory of a long prompt would
be mostly theirs.
"""

from __future__ import annotations

import torch

from tkernels.check import (
    FLOAT_DTYPES,
    check_dtype,
    check_last_contiguous,
    check_no_overlap,
    check_shape,
    check_tensor,
    describe,
)
from tkernels.ops.moe_combine import moe_combine
from tkernels.ops.moe_dispatch import moe_dispatch
from tkernels.ops.moe_gemm import moe_gemm
from tkernels.ops.moe_route import moe_route, moe_route_ref
from tkernels.ops.moe_w4a16_gemm import moe_w4a16_gemm
from tkernels.ops.quantize_per_token import quantize_ahead, quantize_per_token_ref
from tkernels.w4_format import dequantize_w4, group_of

_OP = "fused_moe"
_CHUNK_BYTES = 512 << 20  # of h and y at a time: enough tokens to fill any chip


def fused_moe_ref(
    x: torch.Tensor,
    router_logits: torch.Tensor,
    gate_up_weight: torch.Tensor,
    down_weight: torch.Tensor,
    *,
    top_k: int,
    renormalize: bool = True,
    score: str = "softmax",
    bias: torch.Tensor | None = None,
    num_groups: int = 1,
    top_groups: int = 1,
    scale: float = 1.0,
    expert_map: torch.Tensor | None = None,
    gate_up_scale: torch.Tensor | None = None,
    down_scale: torch.Tensor | None = None,
    gate_up_zero: torch.Tensor | None = None,
    down_zero: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    high: bool = False,
    chunk_tokens: int | None = None,
    topk_ids_out: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """PyTorch version of ``fused_moe``: expert by expert, rounded where the kernels round."""
    weights, ids = moe_route_ref(
        router_logits, top_k=top_k, renormalize=renormalize, score=score, bias=bias,
        num_groups=num_groups, top_groups=top_groups, scale=scale,
    )  # fmt: skip
    if topk_ids_out is not None:
        topk_ids_out.copy_(ids)
    if expert_map is not None:
        ids = expert_map[ids.long()]

    def product(
        rows: torch.Tensor,
        e: int,
        weight: torch.Tensor,
        ws: torch.Tensor | None,
        zero: torch.Tensor | None,
    ) -> torch.Tensor:
        if weight.dtype == torch.int32:
            assert ws is not None
            of_one = dequantize_w4(weight[e], ws[e], None if zero is None else zero[e])
            return rows.float() @ of_one.t()
        if ws is None:
            return rows.float() @ weight[e].float().t()
        if high or (mask is not None and bool((mask[e >> 6] >> (e & 63)) & 1)):
            return (rows.float() @ weight[e].float().t()) * ws[e]
        codes, scales = quantize_per_token_ref(rows)
        sums = codes.double() @ weight[e].double().t()  # exact
        return sums.float() * scales[:, None] * ws[e]

    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for e in range(len(gate_up_weight)):
        token, slot = (ids == e).nonzero(as_tuple=True)
        if len(token) == 0:
            continue
        gate, up = product(x[token], e, gate_up_weight, gate_up_scale, gate_up_zero).chunk(2, -1)
        h = (torch.nn.functional.silu(gate.clamp_min(-1e4)) * up).to(x.dtype)
        y = product(h, e, down_weight, down_scale, down_zero) * weights[token, slot, None]
        total.index_add_(0, token, y.to(x.dtype).float())
    return total.to(x.dtype) if out is None else out.copy_(total)


def chunk_of(top_k: int, hidden: int, intermediate: int, dtype: torch.dtype) -> int:
    """Tokens at a time that ``fused_moe`` takes unless it is told."""
    row = (intermediate + hidden) * dtype.itemsize
    return max(256, _CHUNK_BYTES // (top_k * row))


def _columns(weight: torch.Tensor, **size: int) -> dict[str, int]:
    """Columns of a weight, or words of its rows, by name."""
    if weight.dtype != torch.int32:
        return size
    return {f"{name}/8": columns // 8 for name, columns in size.items()}


def _check_groups(
    name: str,
    t: torch.Tensor,
    weight: torch.Tensor,
    dtypes: tuple[torch.dtype, ...],
    like: torch.Tensor | None = None,
) -> None:
    """Scales or zero points of weights of 4 bits; ``like``: zero points have the scales' shape."""
    check_tensor(_OP, name, t)
    check_dtype(_OP, name, t, dtypes)
    e, n, words = weight.shape
    k = 8 * words
    if t.dim() != 3 or t.shape[:2] != (e, n) or group_of(k, t) == 0:
        raise ValueError(
            f"{_OP}: {name} must have shape [E={e}, N={n}, K/group], group a power of two from 32 "
            f"on, or K={k}, got {describe(t)}"
        )
    if like is not None and t.shape != like.shape:
        raise ValueError(f"{_OP}: {name} must have the scales' shape, got {describe(t)}")
    if not t.is_contiguous():
        raise ValueError(f"{_OP}: {name} must be contiguous, got {describe(t)}")


def fused_moe(
    x: torch.Tensor,
    router_logits: torch.Tensor,
    gate_up_weight: torch.Tensor,
    down_weight: torch.Tensor,
    *,
    top_k: int,
    renormalize: bool = True,
    score: str = "softmax",
    bias: torch.Tensor | None = None,
    num_groups: int = 1,
    top_groups: int = 1,
    scale: float = 1.0,
    expert_map: torch.Tensor | None = None,
    gate_up_scale: torch.Tensor | None = None,
    down_scale: torch.Tensor | None = None,
    gate_up_zero: torch.Tensor | None = None,
    down_zero: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    high: bool = False,
    chunk_tokens: int | None = None,
    topk_ids_out: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The output of a layer of experts: each token's top_k experts, weighted and added.

    No value is read on the host: a captured graph serves any routing. A token's result does not
    depend on the others of its batch beyond the order of sums that a launch config has.

    Args:
        x: [T, H], bf16, fp16 or fp32.
        router_logits: [T, E of the router]; with ``score`` ("softmax" or "sigmoid"), ``bias``,
            ``num_groups``, ``top_groups``, ``renormalize`` and ``scale`` as in ``moe_route``.
        gate_up_weight: [E, 2 I, H], gate rows before up rows, contiguous; of x's dtype, or int8; or
            int32 [E, 2 I, H/8], 4 bits a weight as in ``moe_w4a16_gemm`` (x in bf16 or fp16).
        down_weight: [E, H, I], or int32 [E, H, I/8], like it.
        expert_map: int32 [E of the router]: which of the E experts here each one is, or -1 where it
            lives elsewhere and its share is left out.
        gate_up_scale, down_scale: fp32 [E, 2 I] and [E, H], with int8 weights; with weights of 4
            bits [E, 2 I, H/group] and [E, H, I/group], fp32 or of x's dtype, each with its group.
        gate_up_zero, down_zero: int8, like such scales, with weights of 4 bits; None: 8.
        mask, high: as in ``moe_gemm``: which experts, or that all, have 16-bit activations with
            int8 weights; without any they must be left out.
        chunk_tokens: tokens at a time; None takes as many as need 512 MiB of intermediate results.
        topk_ids_out: int32 [T, top_k], receives each token's experts, the likeliest first.
        out: [T, H] of x's dtype, written and returned.

    Returns:
        [T, H] of x's dtype.

    Raises:
        TypeError, ValueError: an argument of the wrong kind, shape, dtype, stride or device.
    """
    for name, t in (("x", x), ("gate_up_weight", gate_up_weight), ("down_weight", down_weight)):
        check_tensor(_OP, name, t)
    if x.dim() != 2:
        raise ValueError(f"{_OP}: x must have shape [T, H], got {describe(x)}")
    check_dtype(_OP, "x", x, FLOAT_DTYPES)
    check_last_contiguous(_OP, "x", x)
    n_tokens, hidden = x.shape
    if gate_up_weight.dim() != 3 or gate_up_weight.shape[1] % 2:
        raise ValueError(
            f"{_OP}: gate_up_weight must have shape [E, 2 I, H], got {describe(gate_up_weight)}"
        )
    n_experts, both, _ = gate_up_weight.shape
    check_shape(
        _OP, "gate_up_weight", gate_up_weight, E=n_experts, gate_up=both,
        **_columns(gate_up_weight, H=hidden),
    )  # fmt: skip
    check_shape(
        _OP, "down_weight", down_weight, E=n_experts, H=hidden, **_columns(down_weight, I=both // 2)
    )
    check_tensor(_OP, "router_logits", router_logits)
    check_shape(_OP, "router_logits", router_logits, T=n_tokens, E=None)
    if expert_map is None and router_logits.shape[1] != n_experts:
        raise ValueError(
            f"{_OP}: router_logits must have E={n_experts} columns without an expert_map, got "
            f"{describe(router_logits)}"
        )
    if type(top_k) is not int or top_k < 1:
        raise ValueError(f"{_OP}: top_k must be an int from 1 on, got {describe(top_k)}")
    if type(high) is not bool:
        raise TypeError(f"{_OP}: high must be a bool, got {describe(high)}")
    four = torch.int32 in (gate_up_weight.dtype, down_weight.dtype)
    if four or (gate_up_scale is None and down_scale is None):
        without = "with weights of 4 bits" if four else "without int8 weights"
        if mask is not None:
            raise ValueError(f"{_OP}: mask must be None {without}, got {describe(mask)}")
        if high:
            raise ValueError(f"{_OP}: high must be False {without}, got True")
    for name, weight, ws, zero in (
        ("gate_up", gate_up_weight, gate_up_scale, gate_up_zero),
        ("down", down_weight, down_scale, down_zero),
    ):
        if weight.dtype == torch.int32:
            if ws is None:
                raise ValueError(
                    f"{_OP}: {name}_scale must be given with weights of 4 bits, got None"
                )
            check_dtype(_OP, "x", x, (torch.bfloat16, torch.float16))
            _check_groups(f"{name}_scale", ws, weight, (x.dtype, torch.float32))
            if zero is not None:
                _check_groups(f"{name}_zero", zero, weight, (torch.int8,), like=ws)
        elif zero is not None:
            raise ValueError(
                f"{_OP}: {name}_zero must be None without weights of 4 bits, got {describe(zero)}"
            )
    if chunk_tokens is None:
        chunk_tokens = chunk_of(top_k, hidden, both // 2, x.dtype)
    if type(chunk_tokens) is not int or chunk_tokens < 1:
        raise ValueError(
            f"{_OP}: chunk_tokens must be None or an int from 1 on, got {describe(chunk_tokens)}"
        )
    if out is not None:
        check_tensor(_OP, "out", out)
        check_dtype(_OP, "out", out, (x.dtype,))
        check_shape(_OP, "out", out, T=n_tokens, H=hidden)
        check_last_contiguous(_OP, "out", out)
        check_no_overlap(_OP, "out", out)
    weights, ids = moe_route(
        router_logits, top_k=top_k, renormalize=renormalize, score=score, bias=bias,
        num_groups=num_groups, top_groups=top_groups, scale=scale, topk_ids=topk_ids_out,
    )  # fmt: skip
    if out is None:
        out = torch.empty((n_tokens, hidden), dtype=x.dtype, device=x.device)
    tickets = torch.empty(2, dtype=torch.int32, device=x.device)  # of the two products
    for start in range(0, n_tokens, chunk_tokens):
        here = slice(start, start + chunk_tokens)
        chosen, part = ids[here], x[here]
        x_q: torch.Tensor | None = None
        x_scale: torch.Tensor | None = None
        if gate_up_scale is not None and gate_up_weight.dtype != torch.int32 and not high:
            # Here, as memory that moe_dispatch has had is not to be written beside it.
            x_q = torch.empty(part.shape, dtype=torch.int8, device=x.device)
            x_scale = torch.empty(part.shape[:1], dtype=torch.float32, device=x.device)
        offsets, sorted_ids, positions = moe_dispatch(
            chosen,
            num_experts=router_logits.shape[1],
            expert_map=expert_map,
            num_local_experts=None if expert_map is None else n_experts,
            tickets=tickets,
        )
        if x_q is not None and x_scale is not None:
            quantize_ahead(part, x_q, x_scale)
        if gate_up_weight.dtype == torch.int32:
            assert gate_up_scale is not None
            h = moe_w4a16_gemm(
                part, gate_up_weight, gate_up_scale, offsets, sorted_ids, weight_zero=gate_up_zero,
                top_k=top_k, silu_and_mul=True,
            )  # fmt: skip
        else:
            h = moe_gemm(
                part, gate_up_weight, offsets, sorted_ids, weight_scale=gate_up_scale, x_q=x_q,
                x_scale=x_scale, mask=None if gate_up_scale is None else mask, top_k=top_k,
                silu_and_mul=True, high=high and gate_up_scale is not None, tickets=tickets[:1],
            )  # fmt: skip
        if down_weight.dtype == torch.int32:
            assert down_scale is not None
            y = moe_w4a16_gemm(
                h, down_weight, down_scale, offsets, sorted_ids, weight_zero=down_zero,
                topk_weights=weights[here],
            )  # fmt: skip
        else:
            y = moe_gemm(
                h, down_weight, offsets, sorted_ids, weight_scale=down_scale,
                topk_weights=weights[here],
                mask=None if down_scale is None else mask, high=high and down_scale is not None,
                tickets=tickets[1:],
            )  # fmt: skip
        moe_combine(y, positions, out=out[here])
    return out
