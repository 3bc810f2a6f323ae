"""Rotary position embedding (Su et al., 2021, arXiv 2104.09864) on q and k, in one launch.

For each token with position p, each head and each pair i < rotary_dim / 2:

    out_a = a * cos[p, i] - b * sin[p, i]          (a, b) = (x[i], x[i + rotary_dim/2])  half-split
    out_b = b * cos[p, i] + a * sin[p, i]                or (x[2i], x[2i + 1])          interleaved

Dimensions from rotary_dim on are copied. q: [T, Hq, D], k: [T, Hk, D], each with token and head
strides of its own. cos_sin_cache: fp32 [max_pos, rotary_dim], cosines in the first half of the
columns (``build_cos_sin_cache``). fp32 between load and store.

One program takes one token and a share of its q heads *and* of its k heads, so that the row of
factors is loaded once for both and there is no branch. It loads all of a pair before it stores any
of it: in place is safe in both styles. The position is a scalar, so the row of factors is a plain
contiguous load on Ascend too, where a gather would go element by element.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from tkernels import check, rotary
from tkernels.config import planned
from tkernels.device import tl, triton
from tkernels.registry import Config, Cost, KernelSpec, Problem, op, register


def rope_ref(
    q: torch.Tensor,
    k: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    positions: torch.Tensor,
    *,
    interleaved: bool = False,
    q_out: torch.Tensor | None = None,
    k_out: torch.Tensor | None = None,
    config: Config | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """PyTorch version of ``rope``: fp32 inside, rounded once."""
    factors = factors_ref(cos_sin_cache, positions)
    heads = torch.cat((q, k), dim=1).float()  # [T, Hq + Hk, D]
    turned = rotate_ref(heads, factors, interleaved)
    q_rotated, k_rotated = turned[:, : q.shape[1]], turned[:, q.shape[1] :]
    return (
        q_rotated.to(q.dtype).contiguous() if q_out is None else q_out.copy_(q_rotated),
        k_rotated.to(k.dtype).contiguous() if k_out is None else k_out.copy_(k_rotated),
    )


def factors_ref(cos_sin_cache: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Rows of the table, [T, rotary_dim]; out of range the nearest, as in the kernel."""
    return cos_sin_cache[positions.clamp(0, cos_sin_cache.shape[0] - 1)]


def rotate_ref(x: torch.Tensor, factors: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """Rotate heads [T, H, D] by ``factors`` [T, rotary_dim] (cos | sin); the tail is kept."""
    rotary_dim = factors.shape[1]
    cos, sin = factors[:, None, :].chunk(2, dim=-1)
    turning, tail = x[..., :rotary_dim], x[..., rotary_dim:]
    if interleaved:
        a, b = turning[..., 0::2], turning[..., 1::2]
        turned = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
    else:
        a, b = turning.chunk(2, dim=-1)
        turned = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
    return turned if rotary_dim == x.shape[-1] else torch.cat((turned, tail), dim=-1)


@triton.jit
def load_pairs(
    rows,
    rows_ok,
    N_ROWS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """Both members of each pair, fp32 [N_ROWS, BLOCK_HALF]; ``rows`` [N_ROWS, 1] point at x[0]."""
    if INTERLEAVED:
        # One contiguous load; two of stride 2 would use half of each memory transaction.
        dims = tl.arange(0, 2 * BLOCK_HALF)[None, :]
        x = tl.load(rows + dims, mask=rows_ok & (dims < 2 * HALF), other=0.0).to(tl.float32)
        a, b = tl.split(tl.reshape(x, [N_ROWS, BLOCK_HALF, 2]))
    else:
        pairs = tl.arange(0, BLOCK_HALF)[None, :]
        ok = rows_ok & (pairs < HALF)
        a = tl.load(rows + pairs, mask=ok, other=0.0).to(tl.float32)
        b = tl.load(rows + HALF + pairs, mask=ok, other=0.0).to(tl.float32)
    return a, b


@triton.jit
def store_rotated(
    rows,
    rows_ok,
    a,
    b,
    cos,
    sin,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """Rotate the pairs (a, b) [heads, BLOCK_HALF] by cos and sin [1, BLOCK_HALF], and store."""
    out_a = a * cos - b * sin
    out_b = b * cos + a * sin
    if INTERLEAVED:
        dims = tl.arange(0, 2 * BLOCK_HALF)[None, :]
        tl.store(rows + dims, tl.interleave(out_a, out_b), mask=rows_ok & (dims < 2 * HALF))
    else:
        pairs = tl.arange(0, BLOCK_HALF)[None, :]
        ok = rows_ok & (pairs < HALF)
        tl.store(rows + pairs, out_a, mask=ok)
        tl.store(rows + HALF + pairs, out_b, mask=ok)


@triton.jit
def load_factors(cos_sin_ptr, position, max_pos, HALF: tl.constexpr, BLOCK_HALF: tl.constexpr):
    """cos and sin [1, BLOCK_HALF]; a position out of range is moved to the nearest in range."""
    position = tl.minimum(tl.maximum(position.to(tl.int64), 0), max_pos - 1)
    pairs = tl.arange(0, BLOCK_HALF)[None, :]
    row = cos_sin_ptr + position * (2 * HALF) + pairs
    cos = tl.load(row, mask=pairs < HALF, other=0.0)
    sin = tl.load(row + HALF, mask=pairs < HALF, other=0.0)
    return cos, sin


@triton.jit
def _rope_kernel(
    q_ptr,
    k_ptr,
    cos_sin_ptr,
    positions_ptr,
    q_out_ptr,
    k_out_ptr,
    stride_qt,
    stride_qh,
    stride_kt,
    stride_kh,
    stride_qot,
    stride_qoh,
    stride_kot,
    stride_koh,
    max_pos,
    n_tiles,
    Q_HEADS: tl.constexpr,
    K_HEADS: tl.constexpr,
    HALF: tl.constexpr,  # rotary_dim / 2
    TAIL: tl.constexpr,  # dimensions to copy behind rotary_dim; 0 where there is nothing to do
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
        _rope_tile(
            tl.program_id(0), q_ptr, k_ptr, cos_sin_ptr, positions_ptr, q_out_ptr, k_out_ptr,
            stride_qt, stride_qh, stride_kt, stride_kh, stride_qot, stride_qoh, stride_kot,
            stride_koh, max_pos, Q_HEADS, K_HEADS, HALF, TAIL, INTERLEAVED, BLOCK_HEADS,
            BLOCK_KV_HEADS, BLOCK_HALF, BLOCK_TAIL, EARLY_LOADS)
    else:
        for tile in range(tl.program_id(0), n_tiles, tl.num_programs(0)):
            _rope_tile(
                tile, q_ptr, k_ptr, cos_sin_ptr, positions_ptr, q_out_ptr, k_out_ptr,
                stride_qt, stride_qh, stride_kt, stride_kh, stride_qot, stride_qoh, stride_kot,
                stride_koh, max_pos, Q_HEADS, K_HEADS, HALF, TAIL, INTERLEAVED, BLOCK_HEADS,
                BLOCK_KV_HEADS, BLOCK_HALF, BLOCK_TAIL, EARLY_LOADS)
    # fmt: on


@triton.jit
def _rope_tile(
    tile,
    q_ptr,
    k_ptr,
    cos_sin_ptr,
    positions_ptr,
    q_out_ptr,
    k_out_ptr,
    stride_qt,
    stride_qh,
    stride_kt,
    stride_kh,
    stride_qot,
    stride_qoh,
    stride_kot,
    stride_koh,
    max_pos,
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
    token = tl.cast(tile // n_shares, tl.int64)
    share = tile % n_shares
    q_heads = share * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)[:, None]
    k_heads = share * BLOCK_KV_HEADS + tl.arange(0, BLOCK_KV_HEADS)[:, None]
    q_ok = q_heads < Q_HEADS
    k_ok = k_heads < K_HEADS
    q_heads, k_heads = q_heads.to(tl.int64), k_heads.to(tl.int64)
    q_rows = q_ptr + token * stride_qt + q_heads * stride_qh  # [BLOCK_HEADS, 1]
    k_rows = k_ptr + token * stride_kt + k_heads * stride_kh
    q_out_rows = q_out_ptr + token * stride_qot + q_heads * stride_qoh
    k_out_rows = k_out_ptr + token * stride_kot + k_heads * stride_koh

    position = tl.load(positions_ptr + token)
    q_a, q_b = load_pairs(q_rows, q_ok, BLOCK_HEADS, HALF, BLOCK_HALF, INTERLEAVED)
    k_a, k_b = load_pairs(k_rows, k_ok, BLOCK_KV_HEADS, HALF, BLOCK_HALF, INTERLEAVED)
    if EARLY_LOADS:
        # Only ptxas needs it: it would put the loads of k off until it has rotated q.
        tl.debug_barrier()
    cos, sin = load_factors(cos_sin_ptr, position, max_pos, HALF, BLOCK_HALF)
    store_rotated(q_out_rows, q_ok, q_a, q_b, cos, sin, HALF, BLOCK_HALF, INTERLEAVED)
    store_rotated(k_out_rows, k_ok, k_a, k_b, cos, sin, HALF, BLOCK_HALF, INTERLEAVED)
    if TAIL > 0:
        tail = tl.arange(0, BLOCK_TAIL)[None, :]
        dims = 2 * HALF + tail
        q_tail = tl.load(q_rows + dims, mask=q_ok & (tail < TAIL))
        k_tail = tl.load(k_rows + dims, mask=k_ok & (tail < TAIL))
        tl.store(q_out_rows + dims, q_tail, mask=q_ok & (tail < TAIL))
        tl.store(k_out_rows + dims, k_tail, mask=k_ok & (tail < TAIL))


@op
def rope(
    q: torch.Tensor,
    k: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    positions: torch.Tensor,
    *,
    interleaved: bool = False,
    q_out: torch.Tensor | None = None,
    k_out: torch.Tensor | None = None,
    config: Config | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate the heads of ``q`` and ``k`` by the angles of their tokens' positions.

    Args:
        q: [T, Hq, D], fp32, bf16 or fp16; D contiguous, any token and head strides (so it may be a
            view into a packed projection).
        k: [T, Hk, D], dtype of ``q``; Hk is free.
        cos_sin_cache: fp32 [max_pos, rotary_dim], contiguous; cosines, then sines. rotary_dim is
            even and <= D.
        positions: [T], int32 or int64, contiguous, each in [0, max_pos). Others give the factors of
            the nearest valid position; TKERNELS_DEBUG refuses them.
        interleaved: pair dimension 2i with 2i + 1 (GPT-J) instead of i with i + rotary_dim / 2.
        q_out: where rotated q goes, shape and dtype of ``q``, own strides. May be ``q`` itself (the
            dimensions behind rotary_dim are then not touched); no other overlap is allowed.
        k_out: the same for ``k``.
        config: launch config; None looks it up.

    Returns:
        ``(q_out, k_out)``; each is a new contiguous tensor where None was given.

    Raises:
        TypeError, ValueError: an argument of the wrong kind, shape, dtype, stride or device.
    """
    q_out = check.new_output("rope", q, name="q") if q_out is None else q_out
    k_out = check.new_output("rope", k, name="k") if k_out is None else k_out
    if q_out is k_out:
        raise check.one_for_both("rope", "k_out", "q_out")
    untouched = q_out is q and k_out is k
    plan = planned(
        _plan, config, (q, k, cos_sin_cache, positions, q_out, k_out), interleaved, untouched
    )
    if plan is not None:
        if check.DEBUG:
            rotary.check_positions("rope", positions, cos_sin_cache.shape[0])
        launch, numbers = plan
        launch(q, k, cos_sin_cache, positions, q_out, k_out, *numbers)
    return q_out, k_out


def _plan(
    q: torch.Tensor,
    k: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    positions: torch.Tensor,
    q_out: torch.Tensor,
    k_out: torch.Tensor,
    interleaved: bool,
    untouched: bool,  # dimensions behind rotary_dim are in place already
    config: Config | None,
) -> rotary.Plan | None:
    n_tokens, q_heads, head_dim = rotary.check_heads("rope", "q", q)
    k_heads = rotary.check_heads("rope", "k", k, like=q)[1]
    rotary_dim = rotary.check_table("rope", cos_sin_cache, positions, n_tokens, head_dim)
    rotary.check_flag("rope", "interleaved", interleaved)
    rotary.check_output("rope", "q_out", q_out, tuple(q.shape), q)
    rotary.check_output("rope", "k_out", k_out, tuple(k.shape), k)
    sizes = (n_tokens, q_heads, k_heads, head_dim, rotary_dim)
    return rotary.plan_heads(
        SPEC,
        _rope_kernel,
        (*sizes, interleaved, q.dtype, positions.dtype),
        (q, k, q_out, k_out),
        cos_sin_cache.shape[0],
        tail=0 if untouched else head_dim - rotary_dim,
        config=config,
    )


# ---- facts for tests, bench and tuner --------------------------------------------------------


def _make_inputs(problem: Problem, dev: torch.device) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)

    def heads(count: int) -> torch.Tensor:
        shape = (problem["n_tokens"], count, problem["head_dim"])
        return torch.randn(shape, generator=generator).to(problem["dtype"]).to(dev)

    return {
        "q": heads(problem["q_heads"]),
        "k": heads(problem["k_heads"]),
        **rotary.inputs(problem, dev),
        "interleaved": problem["interleaved"],
    }


def _cost(problem: Problem) -> Cost:
    tokens = problem["n_tokens"]
    heads = tokens * (problem["q_heads"] + problem["k_heads"])
    moved = 2 * heads * problem["head_dim"] * problem["dtype"].itemsize
    factors = tokens * (4 * problem["rotary_dim"] + problem["position_dtype"].itemsize)
    return Cost(flops=3 * heads * problem["rotary_dim"], bytes=moved + factors)


def _providers(inputs: dict[str, Any]) -> dict[str, Any]:
    q, k, table, positions = (inputs[n] for n in ("q", "k", "cos_sin_cache", "positions"))
    peers: dict[str, Any] = {}
    with contextlib.suppress(ImportError):
        from flashinfer.rope import apply_rope_with_cos_sin_cache_inplace

        # In place by design: it works on copies, which it turns further at each call.
        fq, fk = (t.clone().flatten(1) for t in (q, k))
        neox = not inputs["interleaved"]
        peers["flashinfer"] = lambda: apply_rope_with_cos_sin_cache_inplace(
            positions, fq, fk, q.shape[2], table, neox
        )
    return peers


SPEC = register(
    KernelSpec(
        name="rope",
        launch=rope,
        reference=rope_ref,
        problem_fields=rotary.FIELDS,
        make_inputs=_make_inputs,
        cases=rotary.cases(),
        tuning_key=rotary.tuning_key,
        space=rotary.space,
        default_config=rotary.default_config,
        why_illegal=rotary.why_illegal,
        cost=_cost,
        outputs=("q_out", "k_out"),
        providers=_providers,
        shape=rotary.rotary_shape,
    )
)
