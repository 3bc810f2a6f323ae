"""``fused_qk_norm_rope`` and ``append_paged_kv`` in one launch, for attention that reads the pages.

    q[t, h, :] = rotate(norm(q head h of token t), position of t)
    k_cache[slot // block_size, slot % block_size, h, :] = rotate(norm(k head h), position of t)
    v_cache[slot // block_size, slot % block_size, h, :] = v head h        slot = slot_mapping[t]

The heads are those of a packed projection qkv [T, (Hq + 2 Hk) D], the caches [num_blocks,
block_size, Hk, D]. As in the two operations, k is rounded once, to the dtype of its cache. A token
whose slot is below 0 or past the end of the pool gets its q, and writes nothing else.

A program takes a token and a share of its q, k and v heads, as in ``rope``. All its loads stand
before its first store, and of the stores only those to the caches wait for the slot. In a decode
step of one sequence each of the two takes little longer than an empty launch: one is saved.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from tkernels import check, rotary
from tkernels.check import check_dtype, check_last_contiguous, check_shape, check_tensor
from tkernels.config import planned, resolve
from tkernels.device import Device, bind, cdiv, next_power_of_2, tl, triton
from tkernels.ops import append_paged_kv as append
from tkernels.ops import fused_qk_norm_rope as norm_rope
from tkernels.ops.paged_attn import _has_pdl, _let_next_kernel_start, _wait_for_earlier_kernels
from tkernels.ops.rope import load_factors, load_pairs, store_rotated
from tkernels.registry import Case, Config, Cost, KernelSpec, Problem, op, register

_OP = "fused_qk_norm_rope_append"
_T = TypeVar("_T")


def fused_qk_norm_rope_append_ref(
    qkv: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    positions: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    num_heads: int,
    num_kv_heads: int,
    eps: float = 1e-6,
    interleaved: bool = False,
    q_out: torch.Tensor | None = None,
    config: Config | None = None,
) -> torch.Tensor:
    """PyTorch version of ``fused_qk_norm_rope_append``."""
    heads = qkv.view(qkv.shape[0], num_heads + 2 * num_kv_heads, q_weight.shape[0])
    q, k = norm_rope.fused_qk_norm_rope_ref(
        qkv,
        q_weight,
        k_weight,
        cos_sin_cache,
        positions,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        eps=eps,
        interleaved=interleaved,
        q_out=q_out,
    )
    append.append_paged_kv_ref(k, heads[:, -num_kv_heads:], k_cache, v_cache, slot_mapping)
    return q


# ---- kernels ---------------------------------------------------------------------------------
# fmt: off


@triton.jit
def _load_heads(
    rows, rows_ok, N_ROWS: tl.constexpr, HALF: tl.constexpr, TAIL: tl.constexpr,
    INTERLEAVED: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_TAIL: tl.constexpr,
):
    """Pairs of the rotation, and what lies behind them (zeros where nothing does); all fp32."""
    a, b = load_pairs(rows, rows_ok, N_ROWS, HALF, BLOCK_HALF, INTERLEAVED)
    tail = tl.zeros([N_ROWS, BLOCK_TAIL], tl.float32)
    if TAIL > 0:
        column = tl.arange(0, BLOCK_TAIL)[None, :]
        ok = rows_ok & (column < TAIL)
        tail = tl.load(rows + 2 * HALF + column, mask=ok, other=0.0).to(tl.float32)
    return a, b, tail


@triton.jit
def _store_normed(
    rows, rows_ok, a, b, tail, weight_a, weight_b, weight_tail, cos, sin, eps,
    HALF: tl.constexpr, TAIL: tl.constexpr, INTERLEAVED: tl.constexpr,
    BLOCK_HALF: tl.constexpr, BLOCK_TAIL: tl.constexpr,
):
    """Norm the heads that ``_load_heads`` gave, rotate them, and store them to ``rows``."""
    squares = tl.sum(a * a + b * b, axis=1)
    if TAIL > 0:
        squares += tl.sum(tail * tail, axis=1)
    scale = tl.rsqrt(squares / (2 * HALF + TAIL) + eps)[:, None]
    a, b = a * scale * weight_a, b * scale * weight_b
    store_rotated(rows, rows_ok, a, b, cos, sin, HALF, BLOCK_HALF, INTERLEAVED)
    if TAIL > 0:
        column = tl.arange(0, BLOCK_TAIL)[None, :]
        ok = rows_ok & (column < TAIL)
        tl.store(rows + 2 * HALF + column, tail * scale * weight_tail, mask=ok)


@triton.jit
def _norm_rope_append_tile(
    tile, qkv_ptr, q_weight_ptr, k_weight_ptr, cos_sin_ptr, positions_ptr, k_cache_ptr,
    v_cache_ptr, slot_ptr, q_out_ptr, stride_xt, stride_kcb, stride_kcs, stride_kch, stride_vcb,
    stride_vcs, stride_vch, stride_qot, stride_qoh, max_pos, n_slots, eps,
    Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, HALF: tl.constexpr, TAIL: tl.constexpr,
    INTERLEAVED: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_HEADS: tl.constexpr,
    BLOCK_KV_HEADS: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_TAIL: tl.constexpr,
    BLOCK_D: tl.constexpr, EARLY_LOADS: tl.constexpr,
):
    n_shares: tl.constexpr = (Q_HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS
    head_dim: tl.constexpr = 2 * HALF + TAIL
    token = tl.cast(tile // n_shares, tl.int64)
    share = tile % n_shares
    q_heads = share * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)[:, None]
    k_heads = share * BLOCK_KV_HEADS + tl.arange(0, BLOCK_KV_HEADS)[:, None]  # and those of v
    q_ok, k_ok = q_heads < Q_HEADS, k_heads < K_HEADS
    columns = tl.arange(0, BLOCK_D)[None, :]
    v_ok = k_ok & (columns < head_dim)
    x_row = qkv_ptr + token * stride_xt

    # Only slot and position are data: all but the factors is on its way at once.
    slot = tl.load(slot_ptr + token).to(tl.int64)
    position = tl.load(positions_ptr + token)
    q_a, q_b, q_tail = _load_heads(
        x_row + q_heads * head_dim, q_ok, BLOCK_HEADS, HALF, TAIL, INTERLEAVED, BLOCK_HALF,
        BLOCK_TAIL)
    k_a, k_b, k_tail = _load_heads(
        x_row + (Q_HEADS + k_heads) * head_dim, k_ok, BLOCK_KV_HEADS, HALF, TAIL, INTERLEAVED,
        BLOCK_HALF, BLOCK_TAIL)
    v = tl.load(x_row + (Q_HEADS + K_HEADS + k_heads) * head_dim + columns, mask=v_ok)
    one_row = tl.full([1, 1], 1, tl.int1)
    q_weight_a, q_weight_b, q_weight_tail = _load_heads(
        q_weight_ptr, one_row, 1, HALF, TAIL, INTERLEAVED, BLOCK_HALF, BLOCK_TAIL)
    k_weight_a, k_weight_b, k_weight_tail = _load_heads(
        k_weight_ptr, one_row, 1, HALF, TAIL, INTERLEAVED, BLOCK_HALF, BLOCK_TAIL)
    if EARLY_LOADS:
        tl.debug_barrier()  # see rope
    cos, sin = load_factors(cos_sin_ptr, position, max_pos, HALF, BLOCK_HALF)

    q_rows = q_out_ptr + token * stride_qot + q_heads.to(tl.int64) * stride_qoh
    _store_normed(
        q_rows, q_ok, q_a, q_b, q_tail, q_weight_a, q_weight_b, q_weight_tail, cos, sin, eps,
        HALF, TAIL, INTERLEAVED, BLOCK_HALF, BLOCK_TAIL)
    if (slot >= 0) & (slot < n_slots):
        block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
        heads = k_heads.to(tl.int64)
        k_rows = k_cache_ptr + block * stride_kcb + offset * stride_kcs + heads * stride_kch
        v_rows = v_cache_ptr + block * stride_vcb + offset * stride_vcs + heads * stride_vch
        tl.store(v_rows + columns, v, mask=v_ok)
        _store_normed(
            k_rows, k_ok, k_a, k_b, k_tail, k_weight_a, k_weight_b, k_weight_tail, cos, sin, eps,
            HALF, TAIL, INTERLEAVED, BLOCK_HALF, BLOCK_TAIL)


@triton.jit(do_not_specialize=["max_pos", "n_slots", "n_tiles"])
def _fused_qk_norm_rope_append_kernel(
    qkv_ptr, q_weight_ptr, k_weight_ptr, cos_sin_ptr, positions_ptr, k_cache_ptr, v_cache_ptr,
    slot_ptr, q_out_ptr, stride_xt, stride_kcb, stride_kcs, stride_kch, stride_vcb, stride_vcs,
    stride_vch, stride_qot, stride_qoh, max_pos, n_slots, n_tiles, eps,
    Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr,
    HALF: tl.constexpr,  # rotary_dim / 2
    TAIL: tl.constexpr,  # head_dim - rotary_dim
    INTERLEAVED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,  # tokens a cache block; a constant, because it divides
    BLOCK_HEADS: tl.constexpr,  # q heads of a program
    BLOCK_KV_HEADS: tl.constexpr,  # k heads of a program, and v heads
    BLOCK_HALF: tl.constexpr, BLOCK_TAIL: tl.constexpr, BLOCK_D: tl.constexpr,
    ONE_TILE: tl.constexpr,  # a program has one tile, so it need not loop
    PDL: tl.constexpr,
    EARLY_LOADS: tl.constexpr = False,  # start all loads of heads before any of them is used
):
    if PDL:
        _let_next_kernel_start()
        _wait_for_earlier_kernels()
    if ONE_TILE:
        _norm_rope_append_tile(
            tl.program_id(0), qkv_ptr, q_weight_ptr, k_weight_ptr, cos_sin_ptr, positions_ptr,
            k_cache_ptr, v_cache_ptr, slot_ptr, q_out_ptr, stride_xt, stride_kcb, stride_kcs,
            stride_kch, stride_vcb, stride_vcs, stride_vch, stride_qot, stride_qoh, max_pos,
            n_slots, eps, Q_HEADS, K_HEADS, HALF, TAIL, INTERLEAVED, BLOCK_SIZE, BLOCK_HEADS,
            BLOCK_KV_HEADS, BLOCK_HALF, BLOCK_TAIL, BLOCK_D, EARLY_LOADS)
    else:
        for tile in range(tl.program_id(0), n_tiles, tl.num_programs(0)):
            _norm_rope_append_tile(
                tile, qkv_ptr, q_weight_ptr, k_weight_ptr, cos_sin_ptr, positions_ptr,
                k_cache_ptr, v_cache_ptr, slot_ptr, q_out_ptr, stride_xt, stride_kcb, stride_kcs,
                stride_kch, stride_vcb, stride_vcs, stride_vch, stride_qot, stride_qoh, max_pos,
                n_slots, eps, Q_HEADS, K_HEADS, HALF, TAIL, INTERLEAVED, BLOCK_SIZE, BLOCK_HEADS,
                BLOCK_KV_HEADS, BLOCK_HALF, BLOCK_TAIL, BLOCK_D, EARLY_LOADS)


# fmt: on


@op
def fused_qk_norm_rope_append(
    qkv: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    positions: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    num_heads: int,
    num_kv_heads: int,
    eps: float = 1e-6,
    interleaved: bool = False,
    q_out: torch.Tensor | None = None,
    config: Config | None = None,
) -> torch.Tensor:
    """Norm and rotate the q and k heads of a projection, and put its k and v into a paged cache.

    Networks without norms of q and k call ``rope`` and ``append_paged_kv``.

    Args:
        qkv: [T, (num_heads + 2 * num_kv_heads) * D], fp32, bf16 or fp16, columns contiguous, any
            token stride: q heads, k heads, v heads.
        q_weight: [D], contiguous, fp32, bf16 or fp16 (it may differ from ``qkv``).
        k_weight: [D], the dtype of ``q_weight``.
        cos_sin_cache: fp32 [max_pos, rotary_dim], contiguous; cosines, then sines. rotary_dim is
            even and <= D; dimensions behind it are normed but not rotated.
        positions: [T], int32 or int64, contiguous, each in [0, max_pos). Others give the factors of
            the nearest valid position; TKERNELS_DEBUG refuses them.
        k_cache: [num_blocks, block_size, num_kv_heads, D] of the dtype of ``qkv``; any strides but
            the last. Written.
        v_cache: shape and dtype of ``k_cache``, own strides. Written.
        slot_mapping: [T], int32 or int64: block * block_size + offset. A negative slot is skipped,
            and so is one >= num_blocks * block_size, which is an error (and found out) only under
            TKERNELS_DEBUG=1. No two tokens may share a slot: either could win.
        num_heads: q heads, >= 1.
        num_kv_heads: k heads (and v heads), >= 1.
        eps: added to the mean square; > 0.
        interleaved: pair dimension 2i with 2i + 1 (GPT-J) instead of i with i + rotary_dim / 2.
        q_out: [T, num_heads, D], dtype of ``qkv``, own strides. May be the view of q in ``qkv``
            itself; no other overlap is allowed.
        config: launch config; None looks it up.

    Returns:
        ``q_out``, of skipped tokens too; a new contiguous tensor where None was given.

    Raises:
        TypeError, ValueError: an argument of the wrong kind, shape, dtype, stride or device.
    """
    if q_out is None:
        q_out = _own(norm_rope._new_heads, qkv, q_weight, "num_heads", num_heads)
    if k_cache is v_cache:
        raise check.one_for_both(_OP, "v_cache", "k_cache")
    caches = (k_cache, v_cache, slot_mapping)
    tensors = (qkv, q_weight, k_weight, cos_sin_cache, positions, *caches, q_out)
    plan = planned(_plan, config, tensors, num_heads, num_kv_heads, eps, interleaved)
    if plan is not None:
        if check.DEBUG:
            rotary.check_positions(_OP, positions, cos_sin_cache.shape[0])
            _own(append._check_slots, slot_mapping, k_cache.shape[0] * k_cache.shape[1])
        launch, numbers = plan
        launch(*tensors, *numbers, eps)
    return q_out


def _own(function: Callable[..., _T], *given: Any) -> _T:
    """``function(*given)`` of one of the two operations, its refusals under this one's name."""
    return under_name(_OP, function, *given)


def under_name(op: str, function: Callable[..., _T], *given: Any) -> _T:
    """``function(*given)`` of another operation, its refusals under the name ``op``."""
    try:
        return function(*given)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{op}:{str(error).partition(':')[2]}") from None


def _plan(
    qkv: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    positions: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    q_out: torch.Tensor,
    num_heads: int,
    num_kv_heads: int,
    eps: float,
    interleaved: bool,
    config: Config | None,
) -> rotary.Plan | None:
    # fmt: off
    n_tokens, head_dim, rotary_dim, num_blocks, block_size = check_inputs(
        qkv, q_weight, k_weight, cos_sin_cache, positions, k_cache, v_cache, slot_mapping,
        num_heads, num_kv_heads, eps)
    # fmt: on
    rotary.check_flag(_OP, "interleaved", interleaved)
    rotary.check_output(_OP, "q_out", q_out, (n_tokens, num_heads, head_dim), qkv)
    if n_tokens == 0:
        return None
    sizes = (n_tokens, num_heads, num_kv_heads, head_dim, rotary_dim)
    values = (*sizes, interleaved, qkv.dtype, positions.dtype, block_size)
    cfg, max_programs = resolve(SPEC, values, config)
    n_shares, block_kv, block_half, block_tail = rotary.tile_sizes(*sizes[1:], cfg["BLOCK_HEADS"])
    n_tiles = n_tokens * n_shares
    programs = min(n_tiles, max_programs)
    cfg.setdefault("PDL", False)  # Ascend has none
    launch = bind(
        _fused_qk_norm_rope_append_kernel,
        (programs,),
        Q_HEADS=num_heads,
        K_HEADS=num_kv_heads,
        HALF=rotary_dim // 2,
        TAIL=head_dim - rotary_dim,
        INTERLEAVED=interleaved,
        BLOCK_SIZE=max(block_size, 1),  # an empty pool has no slots
        BLOCK_KV_HEADS=block_kv,
        BLOCK_HALF=block_half,
        BLOCK_TAIL=block_tail,
        BLOCK_D=next_power_of_2(head_dim),
        ONE_TILE=programs == n_tiles,
        **cfg,
        **({"launch_pdl": True} if cfg["PDL"] else {}),
    )
    strides = (*k_cache.stride()[:3], *v_cache.stride()[:3], *q_out.stride()[:2])
    counts = (cos_sin_cache.shape[0], num_blocks * block_size, n_tiles)
    return launch, (qkv.stride(0), *strides, *counts)


def check_inputs(
    qkv: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    positions: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    num_heads: int,
    num_kv_heads: int,
    eps: float,
) -> tuple[int, int, int, int, int]:
    """Refuse what does not fit; (tokens, head_dim, rotary_dim, num_blocks, block_size)."""
    head_dim = _own(norm_rope._check_weights, q_weight, k_weight)
    n_tokens = _own(norm_rope._check_qkv, qkv, num_heads, num_kv_heads, head_dim)
    rotary_dim = rotary.check_table(_OP, cos_sin_cache, positions, n_tokens, head_dim)
    check.check_positive(_OP, "eps", eps)
    new = qkv.view(n_tokens, num_heads + 2 * num_kv_heads, head_dim)[:, -num_kv_heads:]
    *_, num_blocks, block_size = _own(append._check, new, new, k_cache, v_cache)
    check_tensor(_OP, "slot_mapping", slot_mapping)
    check_shape(_OP, "slot_mapping", slot_mapping, tokens=n_tokens)
    check_dtype(_OP, "slot_mapping", slot_mapping, check.INDEX_DTYPES)
    check_last_contiguous(_OP, "slot_mapping", slot_mapping)
    return n_tokens, head_dim, rotary_dim, num_blocks, block_size


# ---- facts for tests, bench and tuner --------------------------------------------------------


def norm_rope_append_problem(
    n_tokens: int,
    q_heads: int,
    k_heads: int,
    head_dim: int,
    dtype: torch.dtype = torch.bfloat16,
    *,
    block_size: int = 16,
    skip_every: int = 0,
    slots: torch.dtype = torch.int64,
    **more: Any,
) -> dict[str, Any]:
    """``rotary_problem`` (which takes ``more``) with a cache: see ``append_problem``."""
    return {
        **rotary.rotary_problem(n_tokens, q_heads, k_heads, head_dim, dtype, **more),
        "block_size": block_size,
        "skip_every": skip_every,
        "slots": slots,
    }


def _shape(
    *,
    tokens: int,
    num_heads: int = 32,
    num_kv_heads: int = 8,
    head_dim: int = 128,
    rotary_dim: int = 0,
    interleaved: bool = False,
    block_size: int = 16,
    dtype: torch.dtype = torch.bfloat16,
) -> Problem:
    """Heads of ``tokens`` new tokens; a rotary_dim of 0 is the whole head."""
    sizes = (tokens, num_heads, num_kv_heads, head_dim, dtype)
    more: dict[str, Any] = {"rotary_dim": rotary_dim, "interleaved": interleaved}
    return norm_rope_append_problem(*sizes, block_size=block_size, **more)


def _make_inputs(problem: Problem, dev: torch.device) -> dict[str, Any]:
    """Inputs of the two operations; k and v of the second are of no use here."""
    sizes = [problem[n] for n in ("n_tokens", "k_heads", "head_dim", "dtype")]
    more = {n: problem[n] for n in ("block_size", "skip_every", "slots")}
    pools = append._make_inputs(append.append_problem(*sizes, **more), dev)
    given = {n: pools[n] for n in ("k_cache", "v_cache", "slot_mapping")}
    return norm_rope._make_inputs(problem, dev) | given


def _space(dev: Device) -> dict[str, list[Any]]:
    space = rotary.space(dev)
    return space if dev.is_npu else {**space, "PDL": [False, True] if _has_pdl(dev) else [False]}


def _default_config(problem: Problem, dev: Device) -> Config:
    config = norm_rope._default_config(problem, dev)
    if dev.is_npu:
        while config["BLOCK_HEADS"] > 1 and _why_illegal(config, problem, dev):
            config["BLOCK_HEADS"] //= 2
        return config
    config["PDL"] = _has_pdl(dev)
    tokens, q_heads, most = problem["n_tokens"], problem["q_heads"], 8 * dev.num_cores
    heads = 1
    while heads < 4 and tokens * cdiv(q_heads, heads) > most:
        heads *= 2
    # Few tokens: a warp a program, so that no sum crosses warps, of few heads. The tuner found that
    # for fused_qk_norm_rope on an H100 (64 tokens: 1.62 us instead of 2.06).
    few = {**config, "BLOCK_HEADS": heads, "EARLY_LOADS": True, "num_warps": 1}
    fits = tokens * cdiv(q_heads, heads) <= most and _why_illegal(few, problem, dev) is None
    return few if fits else config


def _why_illegal(config: Config, problem: Problem, dev: Device) -> str | None:
    if why := norm_rope._why_illegal(config, problem, dev):
        return why
    p, block_heads = problem, config["BLOCK_HEADS"]
    sizes = (p["q_heads"], p["k_heads"], p["head_dim"], p["rotary_dim"])
    v_bytes = rotary.tile_sizes(*sizes, block_heads)[1] * next_power_of_2(p["head_dim"])
    v_bytes *= p["dtype"].itemsize
    if dev.is_npu:
        # The compiler doubles the buffers of a loop.
        need = rotary._npu_bytes(problem, block_heads, norm=True) + 2 * v_bytes
        if need > dev.local_mem_bytes:
            return f"the tile needs about {need} bytes of UB, {dev.local_mem_bytes} available"
        return None
    if config["PDL"] and not _has_pdl(dev):
        return f"PDL needs sm90 or later, got {dev.arch}"
    if (registers := v_bytes // (128 * config["num_warps"])) > 64:
        return f"about {registers} of 255 registers a thread would hold v beside the rest"
    return None


def _cost(problem: Problem) -> Cost:
    p, one = problem, norm_rope._cost(problem)
    v = p["n_tokens"] * p["k_heads"] * p["head_dim"] * p["dtype"].itemsize
    return Cost(flops=one.flops, bytes=one.bytes + 2 * v + 8 * p["n_tokens"])


def _providers(inputs: dict[str, Any]) -> dict[str, Any]:
    """``separate``: our own two operations, q and k preallocated."""
    caches = ("k_cache", "v_cache", "slot_mapping")
    given = {n: v for n, v in inputs.items() if n not in caches}
    hq, hk = inputs["num_heads"], inputs["num_kv_heads"]
    heads = inputs["qkv"].view(-1, hq + 2 * hk, len(inputs["q_weight"]))
    q, k, v = heads[:, :hq], heads[:, hq:-hk], heads[:, -hk:]
    given |= {"q_out": torch.empty_like(q), "k_out": torch.empty_like(k)}

    def separate() -> Any:
        q, k = norm_rope.fused_qk_norm_rope(**given)
        append.append_paged_kv(k, v, *(inputs[n] for n in caches))
        return q

    return {"separate": separate}


def _empty_q(qkv: torch.Tensor, q_weight: torch.Tensor, num_heads: int, **_: Any) -> torch.Tensor:
    return qkv.new_empty((qkv.shape[0], num_heads, q_weight.shape[0]))


_EDGE, _BENCH = frozenset({"edge"}), frozenset({"bench"})
_FP16, _FP32 = torch.float16, torch.float32
_P = norm_rope_append_problem

# fmt: off
SPEC = register(
    KernelSpec(
        name=_OP,
        launch=fused_qk_norm_rope_append,
        reference=fused_qk_norm_rope_append_ref,
        problem_fields=(*rotary.FIELDS, "block_size"),
        make_inputs=_make_inputs,
        cases=(
            Case("5x4+2x128-block4-bf16", _P(5, 4, 2, 128, block_size=4, skip_every=3)),
            Case("4x9+3x64-block3-int32-fp32", _P(
                4, 9, 3, 64, _FP32, block_size=3, position_dtype=torch.int32, slots=torch.int32)),
            Case("3x2+2x80-partial32-fp16", _P(3, 2, 2, 80, _FP16, rotary_dim=32)),
            Case("5x4+2x64-interleaved-bf16", _P(5, 4, 2, 64, interleaved=True), _EDGE),
            Case("1x7+1x96-bf16", _P(1, 7, 1, 96), _EDGE),
            Case("3x1+1x2-block1-fp32", _P(3, 1, 1, 2, _FP32, block_size=1), _EDGE),
            Case("2x3+5x80-all-skipped-bf16", _P(2, 3, 5, 80, skip_every=1), _EDGE),
            Case("3x4+2x96-partial24-interleaved-fp32", _P(
                3, 4, 2, 96, _FP32, rotary_dim=24, interleaved=True, skip_every=2), _EDGE),
            Case("qwen3-0.6b-t1", _P(1, 16, 8, 128), _BENCH),
            Case("qwen3-8b-t1", _P(1, 32, 8, 128), _BENCH),
            Case("qwen3-8b-t64", _P(64, 32, 8, 128), _BENCH),
            Case("qwen3-8b-t2048", _P(2048, 32, 8, 128), _BENCH),
        ),
        tuning_key=rotary.tuning_key,
        space=_space,
        default_config=_default_config,
        why_illegal=_why_illegal,
        cost=_cost,
        outputs=("q_out",),
        mutates=("k_cache", "v_cache"),
        empty_results=_empty_q,
        providers=_providers,
        shape=_shape,
    )
)
# fmt: on
