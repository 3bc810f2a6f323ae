"""The experts of each token: the best of the router's scores, and how much each one counts.

    score[t]  = softmax(logits[t]), or sigmoid(logits[t])
    choice[t] = score[t] + bias        (the order is that of the logits where there is no bias)
    ids[t]    = the top_k best of choice[t], best first, of two equal ones the lower
    w[t]      = score[t, ids[t]], divided by their sum if ``renormalize``, times ``scale``

router_logits: [T, E]; topk_weights: fp32 [T, top_k]; topk_ids: int32 [T, top_k]. All is computed in
fp32. Softmax over all experts and then the best ones is the order of Qwen3-MoE and Mixtral.

With ``num_groups`` only experts of the ``top_groups`` best groups may be chosen. A group is worth
its best expert, or with a bias the sum of its two best (DeepSeek-V2, arXiv 2405.04434, and
DeepSeek-V3, arXiv 2412.19437, whose ``e_score_correction_bias`` is ``bias``).

Whatever the logits are, the ids of a token are distinct and within 0..E-1. A NaN in them makes the
weights of this token NaN, as does +inf, or -inf for all experts, with softmax.

A choice is compared as an int32 of the same order, so that a round of the selection is two integer
reductions, each one instruction of a warp on NVIDIA: the largest, and the lowest place that has it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tkernels.check import (
    FLOAT_DTYPES,
    check_dtype,
    check_last_contiguous,
    check_no_overlap,
    check_positive,
    check_shape,
    check_tensor,
    describe,
)
from tkernels.config import planned, resolve, why_no_launch
from tkernels.device import Device, bind, cdiv, next_power_of_2, tl, triton
from tkernels.ops.paged_attn import _has_pdl, _let_next_kernel_start, _wait_for_earlier_kernels
from tkernels.registry import Case, Config, Cost, KernelSpec, Problem, op, register

_OP = "moe_route"
_MOST_EXPERTS = 1024
# Scores that sum to less are not renormalised: sigmoid's can all be 0.
_SMALLEST = tl.constexpr(2.0**-100)
_TAKEN = tl.constexpr(-(2**31))  # below the order of any number, -inf included


def moe_route_ref(
    router_logits: torch.Tensor,
    *,
    top_k: int,
    renormalize: bool = True,
    score: str = "softmax",
    bias: torch.Tensor | None = None,
    num_groups: int = 1,
    top_groups: int = 1,
    scale: float = 1.0,
    topk_weights: torch.Tensor | None = None,
    topk_ids: torch.Tensor | None = None,
    config: Config | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """PyTorch version of ``moe_route``: stable sorts, so that ties stay in order."""
    logits = router_logits.float()
    scores = logits.softmax(-1) if score == "softmax" else logits.sigmoid()
    choice = _nan_last(logits if bias is None else scores + bias)
    order = choice.argsort(dim=-1, descending=True, stable=True)
    if num_groups > 1:
        allowed = _allowed_ref(choice, bias is not None, num_groups, top_groups).gather(-1, order)
        order = order.gather(-1, allowed.int().argsort(dim=-1, descending=True, stable=True))
    ids = order[:, :top_k]
    weights = scores.gather(-1, ids)
    if renormalize:
        total = weights.sum(-1, keepdim=True)
        weights = weights / torch.where(total < 2.0**-100, 1.0, total)
    weights = torch.where(logits.isnan().any(-1, keepdim=True), torch.nan, weights * scale)
    ids = ids.int()
    return (
        weights if topk_weights is None else topk_weights.copy_(weights),
        ids if topk_ids is None else topk_ids.copy_(ids),
    )


def _nan_last(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x.isnan(), -torch.inf, x)


def _allowed_ref(
    choice: torch.Tensor, has_bias: bool, num_groups: int, top_groups: int
) -> torch.Tensor:
    """bool, as ``choice``: the experts of each token's best groups."""
    groups = choice.reshape(-1, num_groups, choice.shape[1] // num_groups)
    best = groups.topk(min(2 if has_bias else 1, groups.shape[-1]), -1).values.sum(-1)
    chosen = _nan_last(best).argsort(dim=-1, descending=True, stable=True)[:, :top_groups]
    allowed = torch.zeros_like(best, dtype=torch.bool).scatter(-1, chosen, True)
    return allowed.repeat_interleave(groups.shape[-1], -1)


# ---- kernels ---------------------------------------------------------------------------------
# fmt: off


@triton.jit
def _order_of(x):
    """int32 in the order of fp32 ``x``; -0 is 0, and NaN is -inf."""
    x = tl.where(x == x, x, float("-inf"))
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _number_of(order):
    """The fp32 that ``_order_of`` made this of."""
    return tl.where(order < 0, order ^ 0x7FFFFFFF, order).to(tl.float32, bitcast=True)


@triton.jit
def _best(order, place, N: tl.constexpr):
    """(largest of each row, the lowest place that has it); N is above all places."""
    top = tl.max(order, 1)
    return top, tl.min(tl.where(order == top[:, None], place, N), 1)


@triton.jit
def _without_other_groups(
    order, expert, HAS_BIAS: tl.constexpr, NUM_GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr,
    GROUP: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_G: tl.constexpr, N: tl.constexpr,
):
    """``order``, and what is taken already where the group of an expert is not of the best."""
    group = tl.arange(0, BLOCK_G)[None, :]
    worth = tl.full([BLOCK_T, BLOCK_G], _TAKEN, tl.int32)
    for g in range(NUM_GROUPS):
        mine = tl.where((expert >= g * GROUP) & (expert < (g + 1) * GROUP), order, _TAKEN)
        top, at = _best(mine, expert, N)
        if HAS_BIAS and GROUP > 1:
            second = tl.max(tl.where(expert == at[:, None], _TAKEN, mine), 1)
            top = _order_of(_number_of(top) + _number_of(second))
        worth = tl.where(group == g, top[:, None], worth)
    kept = tl.full(order.shape, _TAKEN, tl.int32)
    for _ in range(TOP_GROUPS):
        top, at = _best(worth, group, BLOCK_G)
        worth = tl.where(group == at[:, None], _TAKEN, worth)
        first = at[:, None] * GROUP
        kept = tl.where((expert >= first) & (expert < first + GROUP), order, kept)
    return kept


@triton.jit
def _moe_route_tile(
    tile, logits_ptr, bias_ptr, weights_ptr, ids_ptr, stride_l, stride_w, stride_i, scale, n_tokens,
    E: tl.constexpr, TOP_K: tl.constexpr, RENORMALIZE: tl.constexpr, SOFTMAX: tl.constexpr,
    HAS_BIAS: tl.constexpr, NUM_GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_T: tl.constexpr,
):
    token = tile * BLOCK_T + tl.arange(0, BLOCK_T)
    token64 = token.to(tl.int64)[:, None]
    token_ok = (token < n_tokens)[:, None]
    expert = tl.arange(0, BLOCK_E)[None, :]
    there = expert < E
    x = tl.load(
        logits_ptr + token64 * stride_l + expert, mask=token_ok & there, other=float("-inf")
    ).to(tl.float32)
    if SOFTMAX:
        most = tl.max(x, 1)
        scores = tl.exp(x - most[:, None])
    else:
        most = tl.zeros([BLOCK_T], tl.float32)  # not read
        scores = tl.where(there, _sigmoid(x), 0.0)
    total = tl.sum(scores, 1)  # NaN if a logit is
    if HAS_BIAS:
        if SOFTMAX:
            scores = scores / total[:, None]
        bias = tl.load(bias_ptr + expert, mask=there, other=0.0)
        order = _order_of(scores + bias)
        bits = scores.to(tl.int32, bitcast=True)
    else:
        order = _order_of(x)
        bits = order
    order = tl.where(there, order, _TAKEN)
    if NUM_GROUPS > 1:
        order = _without_other_groups(
            order, expert, HAS_BIAS, NUM_GROUPS, TOP_GROUPS, E // NUM_GROUPS, BLOCK_T, BLOCK_G,
            BLOCK_E)
    place = tl.arange(0, BLOCK_K)[None, :]
    ids = tl.zeros([BLOCK_T, BLOCK_K], tl.int32)
    chosen = tl.zeros([BLOCK_T, BLOCK_K], tl.int32)
    for j in range(TOP_K):
        top, at = _best(order, expert, BLOCK_E)
        mine = expert == at[:, None]
        order = tl.where(mine, _TAKEN, order)
        ids = tl.where(place == j, at[:, None], ids)
        if HAS_BIAS:  # scores are not negative, so the largest of it and zeros is it
            top = tl.max(tl.where(mine, bits, 0), 1)
        chosen = tl.where(place == j, top[:, None], chosen)
    if HAS_BIAS:
        w = chosen.to(tl.float32, bitcast=True)
    elif SOFTMAX:
        w = tl.exp(_number_of(chosen) - most[:, None]) / total[:, None]
    else:
        w = _sigmoid(_number_of(chosen))
    if RENORMALIZE:
        share = tl.sum(tl.where(place < TOP_K, w, 0.0), 1)
        w = w / tl.where(share < _SMALLEST, 1.0, share)[:, None]
    w = tl.where((total == total)[:, None], w * scale, float("nan"))
    ok = token_ok & (place < TOP_K)
    tl.store(weights_ptr + token64 * stride_w + place, w, mask=ok)
    tl.store(ids_ptr + token64 * stride_i + place, ids, mask=ok)


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit(do_not_specialize=["n_tokens", "n_tiles"])
def _moe_route_kernel(
    logits_ptr, bias_ptr, weights_ptr, ids_ptr, stride_l, stride_w, stride_i, scale, n_tokens,
    n_tiles,
    E: tl.constexpr, TOP_K: tl.constexpr, RENORMALIZE: tl.constexpr, SOFTMAX: tl.constexpr,
    HAS_BIAS: tl.constexpr, NUM_GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_G: tl.constexpr,
    ONE_TILE: tl.constexpr,  # a program has one tile, so it need not loop
    PDL: tl.constexpr, BLOCK_T: tl.constexpr,
):
    if PDL:
        _let_next_kernel_start()
        _wait_for_earlier_kernels()
    if ONE_TILE:
        _moe_route_tile(
            tl.program_id(0), logits_ptr, bias_ptr, weights_ptr, ids_ptr, stride_l, stride_w,
            stride_i, scale, n_tokens, E, TOP_K, RENORMALIZE, SOFTMAX, HAS_BIAS, NUM_GROUPS,
            TOP_GROUPS, BLOCK_E, BLOCK_K, BLOCK_G, BLOCK_T)
    else:
        for tile in range(tl.program_id(0), n_tiles, tl.num_programs(0)):
            _moe_route_tile(
                tile, logits_ptr, bias_ptr, weights_ptr, ids_ptr, stride_l, stride_w, stride_i,
                scale, n_tokens, E, TOP_K, RENORMALIZE, SOFTMAX, HAS_BIAS, NUM_GROUPS, TOP_GROUPS,
                BLOCK_E, BLOCK_K, BLOCK_G, BLOCK_T)


# fmt: on


@op
def moe_route(
    router_logits: torch.Tensor,
    *,
    top_k: int,
    renormalize: bool = True,
    score: str = "softmax",
    bias: torch.Tensor | None = None,
    num_groups: int = 1,
    top_groups: int = 1,
    scale: float = 1.0,
    topk_weights: torch.Tensor | None = None,
    topk_ids: torch.Tensor | None = None,
    config: Config | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Experts of each token, best first, and their weights.

    Args:
        router_logits: [T, E], fp32, bf16 or fp16, contiguous columns, any row stride; at most 1024
            experts.
        top_k: experts a token, 1 to E (of ``top_groups`` groups, to as many as these have).
        renormalize: whether the weights of a token are divided by their sum; a sum below 2^-100,
            which sigmoid can give, is let be.
        score: "softmax" (over all E) or "sigmoid".
        bias: fp32 [E], added to the scores for the choice only. An expert whose sum is NaN comes
            last.
        num_groups: equal groups that the experts are in, in order.
        top_groups: how many groups, the best ones, a token may choose from.
        scale: factor on the weights, applied last.
        topk_weights: fp32 [T, top_k], contiguous columns, written and returned.
        topk_ids: int32 [T, top_k], contiguous columns, written and returned. Neither may share
            memory with another argument.
        config: launch config; None looks it up.

    Returns:
        (topk_weights, topk_ids). Of experts with equal scores, and of equal groups, the lower comes
        first. A token with a NaN among its logits has NaN weights, as has with softmax one with
        +inf, or with nothing but -inf (with sigmoid that gives zeros); its ids are distinct and
        within 0..E-1 nevertheless. Other tokens do not notice.

    Raises:
        TypeError, ValueError: an argument of the wrong kind, shape, dtype, stride or device.
    """
    if topk_weights is None or topk_ids is None:
        _check_logits(router_logits)
        _check_top_k(top_k, router_logits.shape[1])
        shape, device = (router_logits.shape[0], top_k), router_logits.device
        if topk_weights is None:
            topk_weights = torch.empty(shape, dtype=torch.float32, device=device)
        if topk_ids is None:
            topk_ids = torch.empty(shape, dtype=torch.int32, device=device)
    tensors: tuple[Any, ...] = router_logits, topk_weights, topk_ids
    if bias is not None:
        tensors = (*tensors, bias)
    plan = planned(_plan, config, tensors, top_k, renormalize, score, num_groups, top_groups, scale)
    if plan is not None:
        launch, numbers = plan
        bias_or_any = topk_weights if bias is None else bias
        launch(router_logits, bias_or_any, topk_weights, topk_ids, *numbers)
    return topk_weights, topk_ids


def _check_logits(router_logits: torch.Tensor) -> None:
    check_tensor(_OP, "router_logits", router_logits)
    shape = router_logits.shape
    if len(shape) != 2 or not 1 <= shape[1] <= _MOST_EXPERTS:
        raise ValueError(
            f"{_OP}: router_logits must have shape [T, 1 <= E <= {_MOST_EXPERTS}], got "
            f"{describe(router_logits)}"
        )
    check_dtype(_OP, "router_logits", router_logits, FLOAT_DTYPES)
    check_last_contiguous(_OP, "router_logits", router_logits)


def _check_top_k(top_k: int, most: int) -> None:
    if type(top_k) is not int or not 1 <= top_k <= most:
        raise ValueError(f"{_OP}: top_k must be an int from 1 to {most}, got {describe(top_k)}")


def _check_plain(
    n_experts: int,
    top_k: int,
    renormalize: bool,
    score: str,
    num_groups: int,
    top_groups: int,
    scale: float,
) -> None:
    """All arguments that are not tensors."""
    if type(renormalize) is not bool:
        raise TypeError(f"{_OP}: renormalize must be a bool, got {describe(renormalize)}")
    if score not in ("softmax", "sigmoid"):
        raise ValueError(f"{_OP}: score must be 'softmax' or 'sigmoid', got {describe(score)}")
    if type(num_groups) is not int or num_groups < 1 or n_experts % num_groups:
        raise ValueError(
            f"{_OP}: num_groups must be an int that divides {n_experts} experts, got "
            f"{describe(num_groups)}"
        )
    if type(top_groups) is not int or not 1 <= top_groups <= num_groups:
        raise ValueError(
            f"{_OP}: top_groups must be an int from 1 to {num_groups}, got {describe(top_groups)}"
        )
    _check_top_k(top_k, n_experts // num_groups * top_groups)
    check_positive(_OP, "scale", scale)


def _plan(
    router_logits: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    *more: Any,
    config: Config | None,
) -> tuple[Callable[..., None], tuple[Any, ...]] | None:
    """(launch, strides and counts); None where there are no tokens."""
    bias = more[0] if len(more) == 7 else None
    top_k, renormalize, score, num_groups, top_groups, scale = more[-6:]
    _check_logits(router_logits)
    n_tokens, n_experts = router_logits.shape
    if bias is not None:
        check_tensor(_OP, "bias", bias)
        check_dtype(_OP, "bias", bias, (torch.float32,))
        check_shape(_OP, "bias", bias, E=n_experts)
        check_last_contiguous(_OP, "bias", bias)
    _check_plain(n_experts, top_k, renormalize, score, num_groups, top_groups, scale)
    wanted = (("topk_weights", topk_weights, torch.float32), ("topk_ids", topk_ids, torch.int32))
    for name, t, dtype in wanted:
        check_tensor(_OP, name, t)
        check_dtype(_OP, name, t, (dtype,))
        check_shape(_OP, name, t, T=n_tokens, top_k=top_k)
        check_last_contiguous(_OP, name, t)
        check_no_overlap(_OP, name, t)
    most = 2**31 - 2**16  # tokens are counted in 32 bits
    if n_tokens > most:
        raise ValueError(
            f"{_OP}: router_logits must have at most {most} rows, got {describe(router_logits)}"
        )
    if n_tokens == 0:
        return None
    values = (n_tokens, n_experts, top_k, num_groups, router_logits.dtype)
    cfg, max_programs = resolve(SPEC, values, config)
    n_tiles = cdiv(n_tokens, cfg["BLOCK_T"])
    programs = min(n_tiles, max_programs)
    cfg.setdefault("PDL", False)  # Ascend has none
    launch = bind(
        _moe_route_kernel,
        (programs,),
        E=n_experts,
        TOP_K=top_k,
        RENORMALIZE=renormalize,
        SOFTMAX=score == "softmax",
        HAS_BIAS=bias is not None,
        NUM_GROUPS=num_groups,
        TOP_GROUPS=top_groups,
        BLOCK_E=_width(n_experts),
        BLOCK_K=_width(top_k),
        BLOCK_G=_width(num_groups),
        ONE_TILE=programs == n_tiles,
        **cfg,
        **({"launch_pdl": True} if cfg["PDL"] else {}),
    )
    strides = (router_logits.stride(0), topk_weights.stride(0), topk_ids.stride(0))
    return launch, (*strides, float(scale), n_tokens, n_tiles)


def _width(n: int) -> int:
    """The power of two that holds n; not 1, which Ascend's compiler takes for a scalar."""
    return max(2, next_power_of_2(n))


# ---- facts for tests, bench and tuner --------------------------------------------------------


def route_problem(
    n_tokens: int,
    n_experts: int,
    top_k: int,
    dtype: torch.dtype = torch.float32,
    *,
    num_groups: int = 1,
    top_groups: int = 1,
    **more: Any,
) -> dict[str, Any]:
    """Problem of a router; ``more`` is passed on, and ``bias=True`` makes one."""
    sizes = {"n_tokens": n_tokens, "n_experts": n_experts, "top_k": top_k, "dtype": dtype}
    return {
        **sizes,
        "num_groups": num_groups,
        "top_groups": top_groups,
        "more": tuple(more.items()),
    }


def _shape(
    *,
    tokens: int,
    experts: int = 128,
    top_k: int = 8,
    dtype: torch.dtype = torch.float32,
    v3: bool = False,
) -> Problem:
    """``tokens`` tokens that choose ``top_k`` of ``experts`` experts; ``v3``: as DeepSeek-V3's."""
    more = _V3 if v3 else {}
    return route_problem(tokens, experts, top_k, dtype, **more)


# 4 of 8 groups, sigmoid scores and a bias.
_V3: dict[str, Any] = {
    "num_groups": 8,
    "top_groups": 4,
    "score": "sigmoid",
    "bias": True,
    "scale": 2.5,
}


def _make_inputs(problem: Problem, dev: torch.device) -> dict[str, Any]:
    """Gaussian logits, coarse ones (with ties) in the second token, constant ones in the third."""
    p = problem
    generator = torch.Generator().manual_seed(0)
    logits = 2.0 * torch.randn(p["n_tokens"], p["n_experts"], generator=generator)
    logits[1:2] = logits[1:2].round()
    logits[2:3] = 0.5
    more = dict(p["more"])
    if more.pop("bias", False):
        more["bias"] = 0.1 * torch.randn(p["n_experts"], generator=generator).to(dev)
    groups = {"num_groups": p["num_groups"], "top_groups": p["top_groups"]}
    return {"router_logits": logits.to(p["dtype"]).to(dev), "top_k": p["top_k"], **groups, **more}


def _tuning_key(problem: Problem) -> dict[str, Any]:
    bucket = 1
    while bucket < min(problem["n_tokens"], 16384):
        bucket *= 4
    return {
        "n_experts": problem["n_experts"],
        "top_k": problem["top_k"],
        "num_groups": problem["num_groups"],
        "itemsize": problem["dtype"].itemsize,
        "tokens_up_to": bucket,
    }


def _space(dev: Device) -> dict[str, list[Any]]:
    space: dict[str, list[Any]] = {"BLOCK_T": [1, 2, 4, 8, 16, 32]}
    if dev.is_npu:
        return {**space, "programs_per_core": [1]}
    return {
        **space,
        "programs_per_core": [0, 1, 2, 4, 8],
        "num_warps": [1, 2, 4, 8],
        "PDL": [False, True] if _has_pdl(dev) else [False],
    }


def _default_config(problem: Problem, dev: Device) -> Config:
    p = problem
    widest = max(_width(p["n_experts"]), _width(p["top_k"]))
    tokens = next_power_of_2(p["n_tokens"])
    if dev.is_npu:
        block = max(1, min(16, 2048 // widest, tokens))
        return {"BLOCK_T": block, "programs_per_core": 1}
    # A warp a program: what it reduces never passes through shared memory. Its tokens do so side by
    # side, of which there is more than one only where all cores have some.
    block = 1
    while block < 4 and p["n_tokens"] >= 16 * block * dev.num_cores and 2 * block * widest <= 1024:
        block *= 2
    return {
        "BLOCK_T": block,
        "programs_per_core": 0,
        "num_warps": 1 if widest <= 512 else 4,
        "PDL": _has_pdl(dev),
    }


def _why_illegal(config: Config, problem: Problem, dev: Device) -> str | None:
    if why := why_no_launch(config, dev, "BLOCK_T"):
        return why
    widest = max(_width(problem["n_experts"]), _width(problem["top_k"]))
    numbers = config["BLOCK_T"] * widest
    if dev.is_npu:
        if numbers > 4096:
            return f"a tile of {numbers} scores takes more than UB has"
        return None
    if config["PDL"] and not _has_pdl(dev):
        return f"PDL needs sm90 or later, got {dev.arch}"
    if numbers > 32 * 32 * config["num_warps"]:
        return f"{config['num_warps']} warps hold at most 1024 scores each, got {numbers}"
    return None


def _cost(problem: Problem) -> Cost:
    p = problem
    n = p["n_tokens"] * p["n_experts"]
    has_bias = dict(p["more"]).get("bias", False)
    moved = n * p["dtype"].itemsize + 8 * p["n_tokens"] * p["top_k"]
    return Cost(flops=4 * n, bytes=moved + 4 * p["n_experts"] * has_bias)


def _peers(inputs: dict[str, Any]) -> dict[str, Callable[[], Any]]:
    """What a model in PyTorch does, where it is softmax and nothing else."""
    x, top_k = inputs["router_logits"], inputs["top_k"]
    if set(inputs) - {"router_logits", "top_k", "num_groups", "top_groups"}:
        return {}
    if inputs["num_groups"] > 1:
        return {}

    def route() -> Any:
        weights, ids = torch.softmax(x, -1, dtype=torch.float32).topk(top_k, -1)
        return weights / weights.sum(-1, keepdim=True), ids

    return {"torch": route}


_EDGE = frozenset({"edge"})
_BENCH = frozenset({"bench"})
_P = route_problem
_BF16, _FP16, _FP32 = torch.bfloat16, torch.float16, torch.float32

# fmt: off
SPEC = register(
    KernelSpec(
        name=_OP,
        launch=moe_route,
        reference=moe_route_ref,
        problem_fields=("n_tokens", "n_experts", "top_k", "num_groups", "dtype"),
        make_inputs=_make_inputs,
        cases=(
            Case("t5-e16-k4-v3", _P(
                5, 16, 4, num_groups=4, top_groups=2, score="sigmoid", bias=True, scale=2.5)),
            Case("t7-e128-k8-bf16", _P(7, 128, 8, _BF16)),
            Case("t1-e1-k1", _P(1, 1, 1), _EDGE),
            Case("t1-e128-k1-fp16", _P(1, 128, 1, _FP16), _EDGE),
            Case("t3-e60-k60", _P(3, 60, 60, renormalize=False, scale=16.0), _EDGE),
            Case("t9-e160-k6-v2-bf16", _P(
                9, 160, 6, _BF16, num_groups=8, top_groups=3, renormalize=False), _EDGE),
            Case("t4-e512-k10", _P(4, 512, 10), _EDGE),
            Case("t4-e48-k3-groups-of-1", _P(
                4, 48, 3, num_groups=48, top_groups=5, bias=True), _EDGE),
            Case("t6-e33-k5-sigmoid-fp16", _P(6, 33, 5, _FP16, score="sigmoid"), _EDGE),
            *(Case(f"t{t}-e128-k8", _P(t, 128, 8), _BENCH) for t in (1, 64, 512, 4096)),
            Case("t64-e256-k8-v3", _P(64, 256, 8, **_V3), _BENCH),
        ),
        tuning_key=_tuning_key,
        space=_space,
        default_config=_default_config,
        why_illegal=_why_illegal,
        cost=_cost,
        outputs=("topk_weights", "topk_ids"),
        providers=_peers,
        shape=_shape,
    )
)
# fmt: on
