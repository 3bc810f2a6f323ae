"""Per-head RMSNorm of q and k, then rotary embedding, straight out of the packed projection.

    out[t, h, :] = rotate(x[t, h, :] / sqrt(mean(x[t, h, :]^2) + eps) * weight, position of t)

x are the q heads of qkv [T, (Hq + 2 Hk) D] with q_weight [D], and its k heads with k_weight [D]
(Qwen3's q_norm and k_norm). The v heads are neither read nor written. fp32 from load to store: the
normed value is not rounded before it is rotated, unlike in the three-step form.

The work is laid out as in ``rope`` (see there for the rotation): a program takes a token and a
share of its q and k heads. q_out and k_out may be views of q and k in qkv itself: a program loads
its heads whole before it stores any of them.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from tkernels import check, rotary
from tkernels.check import (
    FLOAT_DTYPES,
    check_dtype,
    check_last_contiguous,
    check_positive,
    check_shape,
    check_tensor,
    describe,
)
from tkernels.config import planned
from tkernels.device import Device, tl, triton
from tkernels.ops.rms_norm import rms_norm
from tkernels.ops.rope import (
    factors_ref,
    load_factors,
    load_pairs,
    rope,
    rotate_ref,
    store_rotated,
)
from tkernels.registry import Config, Cost, KernelSpec, Problem, op, register


def fused_qk_norm_rope_ref(
    qkv: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    positions: torch.Tensor,
    *,
    num_heads: int,
    num_kv_heads: int,
    eps: float = 1e-6,
    interleaved: bool = False,
    q_out: torch.Tensor | None = None,
    k_out: torch.Tensor | None = None,
    config: Config | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """PyTorch version of ``fused_qk_norm_rope``: fp32 inside, rounded once."""
    # Not len(), which would fix a symbolic size under torch.compile.
    heads = qkv.view(qkv.shape[0], num_heads + 2 * num_kv_heads, q_weight.shape[0])
    factors = factors_ref(cos_sin_cache, positions)

    def turned(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        x32 = x.float()
        normed = x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + eps) * weight.float()
        return rotate_ref(normed, factors, interleaved)

    q = turned(heads[:, :num_heads], q_weight)
    k = turned(heads[:, num_heads : num_heads + num_kv_heads], k_weight)
    return (
        q.to(qkv.dtype) if q_out is None else q_out.copy_(q),
        k.to(qkv.dtype) if k_out is None else k_out.copy_(k),
    )


@triton.jit
def _fused_qk_norm_rope_kernel(
    qkv_ptr,
    q_weight_ptr,
    k_weight_ptr,
    cos_sin_ptr,
    positions_ptr,
    q_out_ptr,
    k_out_ptr,
    stride_xt,
    stride_qot,
    stride_qoh,
    stride_kot,
    stride_koh,
    max_pos,
    n_tiles,
    eps,
    Q_HEADS: tl.constexpr,
    K_HEADS: tl.constexpr,
    HALF: tl.constexpr,  # rotary_dim / 2
    TAIL: tl.constexpr,  # head_dim - rotary_dim
    INTERLEAVED: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,  # q heads of a program
    BLOCK_KV_HEADS: tl.constexpr,  # k heads of a program
    BLOCK_HALF: tl.constexpr,
    BLOCK_TAIL: tl.constexpr,
    ONE_TILE: tl.constexpr,  # a program has one tile, so it need not loop
    EARLY_LOADS: tl.constexpr = False,  # start all loads of heads before any of them is used
):
    # fmt: off
    if ONE_TILE:
        _norm_rope_tile(
            tl.program_id(0), qkv_ptr, q_weight_ptr, k_weight_ptr, cos_sin_ptr, positions_ptr,
            q_out_ptr, k_out_ptr, stride_xt, stride_qot, stride_qoh, stride_kot, stride_koh,
            max_pos, eps, Q_HEADS, K_HEADS, HALF, TAIL, INTERLEAVED, BLOCK_HEADS,
            BLOCK_KV_HEADS, BLOCK_HALF, BLOCK_TAIL, EARLY_LOADS)
    else:
        for tile in range(tl.program_id(0), n_tiles, tl.num_programs(0)):
            _norm_rope_tile(
                tile, qkv_ptr, q_weight_ptr, k_weight_ptr, cos_sin_ptr, positions_ptr,
                q_out_ptr, k_out_ptr, stride_xt, stride_qot, stride_qoh, stride_kot, stride_koh,
                max_pos, eps, Q_HEADS, K_HEADS, HALF, TAIL, INTERLEAVED, BLOCK_HEADS,
                BLOCK_KV_HEADS, BLOCK_HALF, BLOCK_TAIL, EARLY_LOADS)
    # fmt: on


@triton.jit
def _norm_rope_tile(
    tile,
    qkv_ptr,
    q_weight_ptr,
    k_weight_ptr,
    cos_sin_ptr,
    positions_ptr,
    q_out_ptr,
    k_out_ptr,
    stride_xt,
    stride_qot,
    stride_qoh,
    stride_kot,
    stride_koh,
    max_pos,
    eps,
    Q_HEADS: tl.constexpr,
    K_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    TAIL: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_KV_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_TAIL: tl.constexpr,
    EARLY_LOADS: tl.constexpr,
):
    n_shares: tl.constexpr = (Q_HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS
    head_dim: tl.constexpr = 2 * HALF + TAIL
    token = tl.cast(tile // n_shares, tl.int64)
    share = tile % n_shares
    q_heads = share * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)[:, None]
    k_heads = share * BLOCK_KV_HEADS + tl.arange(0, BLOCK_KV_HEADS)[:, None]
    q_ok = q_heads < Q_HEADS
    k_ok = k_heads < K_HEADS
    x_row = qkv_ptr + token * stride_xt
    q_rows = x_row + q_heads * head_dim  # [BLOCK_HEADS, 1]
    k_rows = x_row + (Q_HEADS + k_heads) * head_dim
    q_out_rows = q_out_ptr + token * stride_qot + q_heads.to(tl.int64) * stride_qoh
    k_out_rows = k_out_ptr + token * stride_kot + k_heads.to(tl.int64) * stride_koh

    # All loads stand before the first store: they do not wait for it, and it may be in place.
    position = tl.load(positions_ptr + token)
    q_a, q_b = load_pairs(q_rows, q_ok, BLOCK_HEADS, HALF, BLOCK_HALF, INTERLEAVED)
    k_a, k_b = load_pairs(k_rows, k_ok, BLOCK_KV_HEADS, HALF, BLOCK_HALF, INTERLEAVED)
    one_row = tl.full([1, 1], 1, tl.int1)
    q_weight_a, q_weight_b = load_pairs(q_weight_ptr, one_row, 1, HALF, BLOCK_HALF, INTERLEAVED)
    k_weight_a, k_weight_b = load_pairs(k_weight_ptr, one_row, 1, HALF, BLOCK_HALF, INTERLEAVED)
    if EARLY_LOADS:
        tl.debug_barrier()  # see rope
    cos, sin = load_factors(cos_sin_ptr, position, max_pos, HALF, BLOCK_HALF)
    q_squares = tl.sum(q_a * q_a + q_b * q_b, axis=1)
    k_squares = tl.sum(k_a * k_a + k_b * k_b, axis=1)
    if TAIL > 0:
        tail = tl.arange(0, BLOCK_TAIL)[None, :]
        dims = 2 * HALF + tail
        tail_ok = tail < TAIL
        q_tail = tl.load(q_rows + dims, mask=q_ok & tail_ok, other=0.0).to(tl.float32)
        k_tail = tl.load(k_rows + dims, mask=k_ok & tail_ok, other=0.0).to(tl.float32)
        q_squares += tl.sum(q_tail * q_tail, axis=1)
        k_squares += tl.sum(k_tail * k_tail, axis=1)
    q_scale = tl.rsqrt(q_squares / head_dim + eps)[:, None]
    k_scale = tl.rsqrt(k_squares / head_dim + eps)[:, None]

    q_a, q_b = q_a * q_scale * q_weight_a, q_b * q_scale * q_weight_b
    k_a, k_b = k_a * k_scale * k_weight_a, k_b * k_scale * k_weight_b
    store_rotated(q_out_rows, q_ok, q_a, q_b, cos, sin, HALF, BLOCK_HALF, INTERLEAVED)
    store_rotated(k_out_rows, k_ok, k_a, k_b, cos, sin, HALF, BLOCK_HALF, INTERLEAVED)
    if TAIL > 0:
        q_weight = tl.load(q_weight_ptr + dims, mask=tail_ok, other=0.0).to(tl.float32)
        k_weight = tl.load(k_weight_ptr + dims, mask=tail_ok, other=0.0).to(tl.float32)
        tl.store(q_out_rows + dims, q_tail * q_scale * q_weight, mask=q_ok & tail_ok)
        tl.store(k_out_rows + dims, k_tail * k_scale * k_weight, mask=k_ok & tail_ok)


@op
def fused_qk_norm_rope(
    qkv: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    positions: torch.Tensor,
    *,
    num_heads: int,
    num_kv_heads: int,
    eps: float = 1e-6,
    interleaved: bool = False,
    q_out: torch.Tensor | None = None,
    k_out: torch.Tensor | None = None,
    config: Config | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """RMS-normalise each q and k head of a packed projection, then rotate it.

    Args:
        qkv: [T, (num_heads + 2 * num_kv_heads) * D], fp32, bf16 or fp16, columns contiguous, any
            token stride: q heads, k heads, v heads.
        q_weight: [D], contiguous, fp32, bf16 or fp16 (it may differ from ``qkv``).
        k_weight: [D], the dtype of ``q_weight``.
        cos_sin_cache: fp32 [max_pos, rotary_dim], contiguous; cosines, then sines. rotary_dim is
            even and <= D; dimensions behind it are normed but not rotated.
        positions: [T], int32 or int64, contiguous, each in [0, max_pos). Others give the factors of
            the nearest valid position; TKERNELS_DEBUG refuses them.
        num_heads: q heads, >= 1.
        num_kv_heads: k heads (and v heads), >= 1.
        eps: added to the mean square; > 0.
        interleaved: pair dimension 2i with 2i + 1 (GPT-J) instead of i with i + rotary_dim / 2.
        q_out: [T, num_heads, D], dtype of ``qkv``, own strides. May be the view of q in ``qkv``
            itself; no other overlap is allowed.
        k_out: [T, num_kv_heads, D], the same for k.
        config: launch config; None looks it up.

    Returns:
        ``(q_out, k_out)``; each is a new contiguous tensor where None was given.

    Raises:
        TypeError, ValueError: an argument of the wrong kind, shape, dtype, stride or device.
    """
    if q_out is None:
        q_out = _new_heads(qkv, q_weight, "num_heads", num_heads)
    if k_out is None:
        k_out = _new_heads(qkv, q_weight, "num_kv_heads", num_kv_heads)
    if q_out is k_out:
        raise check.one_for_both("fused_qk_norm_rope", "k_out", "q_out")
    plan = planned(
        _plan,
        config,
        (qkv, q_weight, k_weight, cos_sin_cache, positions, q_out, k_out),
        num_heads,
        num_kv_heads,
        eps,
        interleaved,
    )
    if plan is not None:
        if check.DEBUG:
            rotary.check_positions("fused_qk_norm_rope", positions, cos_sin_cache.shape[0])
        launch, numbers = plan
        launch(qkv, q_weight, k_weight, cos_sin_cache, positions, q_out, k_out, *numbers, eps)
    return q_out, k_out


def _plan(
    qkv: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    positions: torch.Tensor,
    q_out: torch.Tensor,
    k_out: torch.Tensor,
    num_heads: int,
    num_kv_heads: int,
    eps: float,
    interleaved: bool,
    config: Config | None,
) -> rotary.Plan | None:
    name = "fused_qk_norm_rope"
    head_dim = _check_weights(q_weight, k_weight)
    n_tokens = _check_qkv(qkv, num_heads, num_kv_heads, head_dim)
    rotary_dim = rotary.check_table(name, cos_sin_cache, positions, n_tokens, head_dim)
    check_positive(name, "eps", eps)
    rotary.check_flag(name, "interleaved", interleaved)
    rotary.check_output(name, "q_out", q_out, (n_tokens, num_heads, head_dim), qkv)
    rotary.check_output(name, "k_out", k_out, (n_tokens, num_kv_heads, head_dim), qkv)
    sizes = (n_tokens, num_heads, num_kv_heads, head_dim, rotary_dim)
    return rotary.plan_heads(
        SPEC,
        _fused_qk_norm_rope_kernel,
        (*sizes, interleaved, qkv.dtype, positions.dtype),
        (qkv, q_out, k_out),
        cos_sin_cache.shape[0],
        tail=head_dim - rotary_dim,
        config=config,
    )


def _new_heads(
    qkv: torch.Tensor, q_weight: torch.Tensor, argument: str, count: int
) -> torch.Tensor:
    """A new [T, count, D], after the checks that its shape needs."""
    name = "fused_qk_norm_rope"
    for other, t in (("qkv", qkv), ("q_weight", q_weight)):
        if not isinstance(t, torch.Tensor):
            raise TypeError(f"{name}: {other} must be a tensor, got {describe(t)}")
        if t.dim() < 1:
            raise ValueError(f"{name}: {other} must have dimensions, got {describe(t)}")
    _check_count(argument, count)
    shape = (qkv.shape[0], count, q_weight.shape[0])
    return torch.empty(shape, dtype=qkv.dtype, device=qkv.device)


def _check_count(argument: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(
            f"fused_qk_norm_rope: {argument} must be an int >= 1, got {describe(value)}"
        )


def _check_weights(q_weight: torch.Tensor, k_weight: torch.Tensor) -> int:
    """Both are contiguous vectors of one dtype and length; returns head_dim."""
    name = "fused_qk_norm_rope"
    check_tensor(name, "q_weight", q_weight)
    check_dtype(name, "q_weight", q_weight, FLOAT_DTYPES)
    if q_weight.dim() != 1 or q_weight.shape[0] < 2:
        raise ValueError(
            f"{name}: q_weight must have shape [head_dim >= 2], got {describe(q_weight)}"
        )
    check_last_contiguous(name, "q_weight", q_weight)
    head_dim = q_weight.shape[0]
    check_tensor(name, "k_weight", k_weight)
    check_dtype(name, "k_weight", k_weight, (q_weight.dtype,))
    check_shape(name, "k_weight", k_weight, head_dim=head_dim)
    check_last_contiguous(name, "k_weight", k_weight)
    return head_dim


def _check_qkv(qkv: torch.Tensor, num_heads: int, num_kv_heads: int, head_dim: int) -> int:
    """``qkv`` holds exactly these heads; returns the number of tokens."""
    name = "fused_qk_norm_rope"
    _check_count("num_heads", num_heads)
    _check_count("num_kv_heads", num_kv_heads)
    check_tensor(name, "qkv", qkv)
    check_dtype(name, "qkv", qkv, FLOAT_DTYPES)
    width = (num_heads + 2 * num_kv_heads) * head_dim
    if qkv.dim() != 2 or qkv.shape[1] != width:
        raise ValueError(
            f"{name}: qkv must have shape [tokens, (num_heads={num_heads} + 2 * num_kv_heads="
            f"{num_kv_heads}) * head_dim={head_dim} = {width}], got {describe(qkv)}"
        )
    check_last_contiguous(name, "qkv", qkv)
    return qkv.shape[0]


# ---- facts for tests, bench and tuner --------------------------------------------------------


def _make_inputs(problem: Problem, dev: torch.device) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    q_heads, k_heads, head_dim = (problem[n] for n in ("q_heads", "k_heads", "head_dim"))
    width = (q_heads + 2 * k_heads) * head_dim

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    return {
        "qkv": normal(problem["n_tokens"], width).to(problem["dtype"]).to(dev),
        "q_weight": (1 + 0.2 * normal(head_dim)).to(problem["dtype"]).to(dev),
        "k_weight": (1 + 0.2 * normal(head_dim)).to(problem["dtype"]).to(dev),
        **rotary.inputs(problem, dev),
        "num_heads": q_heads,
        "num_kv_heads": k_heads,
        "eps": 1e-6,
        "interleaved": problem["interleaved"],
    }


def _default_config(problem: Problem, dev: Device) -> Config:
    return rotary.default_config(problem, dev, norm=True)


def _why_illegal(config: Config, problem: Problem, dev: Device) -> str | None:
    return rotary.why_illegal(config, problem, dev, norm=True)


def _cost(problem: Problem) -> Cost:
    tokens, item = problem["n_tokens"], problem["dtype"].itemsize
    elements = tokens * (problem["q_heads"] + problem["k_heads"]) * problem["head_dim"]
    factors = tokens * (4 * problem["rotary_dim"] + problem["position_dtype"].itemsize)
    weights = 2 * problem["head_dim"] * item
    return Cost(flops=7 * elements, bytes=2 * elements * item + factors + weights)


def _providers(inputs: dict[str, Any]) -> dict[str, Any]:
    """``separate``: our own norms and rope, three launches into preallocated outputs."""
    qkv, q_weight, k_weight = (inputs[n] for n in ("qkv", "q_weight", "k_weight"))
    table, positions, interleaved = (
        inputs[n] for n in ("cos_sin_cache", "positions", "interleaved")
    )
    hq, hk, eps = inputs["num_heads"], inputs["num_kv_heads"], inputs["eps"]
    heads = qkv.view(len(qkv), hq + 2 * hk, len(q_weight))
    q, k = heads[:, :hq], heads[:, hq : hq + hk]
    q_out, k_out = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (q, k))

    def separate() -> Any:
        rms_norm(q, q_weight, eps=eps, out=q_out)
        rms_norm(k, k_weight, eps=eps, out=k_out)
        return rope(
            q_out,
            k_out,
            table,
            positions,
            interleaved=interleaved,
            q_out=q_out,
            k_out=k_out,
        )

    peers: dict[str, Any] = {"separate": separate}
    with contextlib.suppress(ImportError):
        import flashinfer
        from flashinfer.rope import apply_rope_with_cos_sin_cache_inplace

        fq, fk = q.contiguous(), k.contiguous()

        def flashinfer_separate() -> Any:
            # It has no fused form in 0.5; its norm takes heads as rows.
            flashinfer.rmsnorm(fq.flatten(0, 1), q_weight, eps, out=q_out.flatten(0, 1))
            flashinfer.rmsnorm(fk.flatten(0, 1), k_weight, eps, out=k_out.flatten(0, 1))
            apply_rope_with_cos_sin_cache_inplace(
                positions,
                q_out.flatten(1),
                k_out.flatten(1),
                q.shape[2],
                table,
                not interleaved,
            )

        peers["flashinfer-separate"] = flashinfer_separate
    return peers


SPEC = register(
    KernelSpec(
        name="fused_qk_norm_rope",
        launch=fused_qk_norm_rope,
        reference=fused_qk_norm_rope_ref,
        problem_fields=rotary.FIELDS,
        make_inputs=_make_inputs,
        cases=rotary.cases(),
        tuning_key=rotary.tuning_key,
        space=rotary.space,
        default_config=_default_config,
        why_illegal=_why_illegal,
        cost=_cost,
        outputs=("q_out", "k_out"),
        providers=_providers,
        shape=rotary.rotary_shape,
    )
)
