"""One attention result from two, each over its own keys, by their log-sum-exp.

    lse[r] = log(exp(lse_a[r]) + exp(lse_b[r]))
    out[r, :] = exp(lse_a[r] - lse[r]) * out_a[r, :] + exp(lse_b[r] - lse[r]) * out_b[r, :]

A row r is a query head: out_a, out_b, out [..., n_heads, head_dim] with row strides of their own,
lse_a, lse_b, lse fp32 [..., n_heads] with any strides (so the [n_heads, T] of other libraries is
taken as a transposed view). Logarithms are natural, as those of ``flash_attn`` and ``paged_attn``;
FlashInfer's are to base 2.

The merge is exact, commutative and associative up to rounding, so keys may be split in any way:
a prefix that sequences share and the rest of each (cascade attention), pieces of a long sequence on
several devices, chunks of a prompt. From the attention state of FlashInfer (Ye et al., 2025, arXiv
2501.01005, section 2.2); flash-decoding's last step is the same sum over splits. A side that saw no
key (lse -inf) counts nothing, whatever its values; where both saw none the row is zeros and -inf.

A program takes whole rows, because their lse may be overwritten in place.
"""

from __future__ import annotations

import contextlib
import math
from typing import Any

import torch

from tkernels import rows
from tkernels.check import (
    FLOAT_DTYPES,
    check_dtype,
    check_last_contiguous,
    check_no_overlap,
    check_tensor,
    describe,
)
from tkernels.config import planned, resolve
from tkernels.device import Device, bind, cdiv, next_power_of_2, tl, triton
from tkernels.registry import Case, Config, Cost, KernelSpec, Problem, op, register

_OP = "merge_attn_states"


def merge_attn_states_ref(
    out_a: torch.Tensor,
    lse_a: torch.Tensor,
    out_b: torch.Tensor,
    lse_b: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    lse_out: torch.Tensor | None = None,
    config: Config | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """PyTorch version of ``merge_attn_states``: fp32 inside, rounded once."""
    empty = (lse_a == -math.inf) & (lse_b == -math.inf)
    base = torch.maximum(lse_a, lse_b).masked_fill(empty, 0.0)
    weights = (lse_a - base).exp(), (lse_b - base).exp()
    total = weights[0] + weights[1]
    lse = base + total.log()
    merged = torch.zeros_like(out_a, dtype=torch.float32)
    for values, own, weight in ((out_a, lse_a, weights[0]), (out_b, lse_b, weights[1])):
        share = weight / total.masked_fill(empty, 1.0)
        seen = values.float().masked_fill((own == -math.inf)[..., None], 0.0)
        merged = merged + share[..., None] * seen
    return (
        merged.to(out_a.dtype) if out is None else out.copy_(merged),
        lse if lse_out is None else lse_out.copy_(lse),
    )


@triton.jit
def _merge_attn_states_kernel(
    out_a_ptr,
    lse_a_ptr,
    out_b_ptr,
    lse_b_ptr,
    out_ptr,
    lse_ptr,
    stride_ao,
    stride_ai,
    stride_lao,
    stride_lai,
    stride_bo,
    stride_bi,
    stride_lbo,
    stride_lbi,
    stride_oo,
    stride_oi,
    stride_lo,
    stride_li,
    n_inner,
    n_inner_tiles,
    n_tiles,
    HEAD_DIM: tl.constexpr,
    TWO_LEVELS: tl.constexpr,  # rows have an outer stride too
    ONE_TILE: tl.constexpr,  # a program has one tile, so it need not loop
    THREADS: tl.constexpr,  # a program is many threads, of which each loads what it needs
    BLOCK_ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    # fmt: off
    if ONE_TILE:
        _merge_attn_states_tile(
            tl.program_id(0), out_a_ptr, lse_a_ptr, out_b_ptr, lse_b_ptr, out_ptr, lse_ptr,
            stride_ao, stride_ai, stride_lao, stride_lai, stride_bo, stride_bi, stride_lbo,
            stride_lbi, stride_oo, stride_oi, stride_lo, stride_li, n_inner, n_inner_tiles,
            HEAD_DIM, TWO_LEVELS, THREADS, BLOCK_ROWS, BLOCK_N)
    else:
        for tile in range(tl.program_id(0), n_tiles, tl.num_programs(0)):
            _merge_attn_states_tile(
                tile, out_a_ptr, lse_a_ptr, out_b_ptr, lse_b_ptr, out_ptr, lse_ptr,
                stride_ao, stride_ai, stride_lao, stride_lai, stride_bo, stride_bi, stride_lbo,
                stride_lbi, stride_oo, stride_oi, stride_lo, stride_li, n_inner, n_inner_tiles,
                HEAD_DIM, TWO_LEVELS, THREADS, BLOCK_ROWS, BLOCK_N)
    # fmt: on


@triton.jit
def _merge_attn_states_tile(
    tile,
    out_a_ptr,
    lse_a_ptr,
    out_b_ptr,
    lse_b_ptr,
    out_ptr,
    lse_ptr,
    stride_ao,
    stride_ai,
    stride_lao,
    stride_lai,
    stride_bo,
    stride_bi,
    stride_lbo,
    stride_lbi,
    stride_oo,
    stride_oi,
    stride_lo,
    stride_li,
    n_inner,
    n_inner_tiles,
    HEAD_DIM: tl.constexpr,
    TWO_LEVELS: tl.constexpr,
    THREADS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    cols = tl.arange(0, BLOCK_N)[None, :]
    inner_tile, outer = tile, tl.cast(0, tl.int64)
    if TWO_LEVELS:
        inner_tile, outer = tile % n_inner_tiles, (tile // n_inner_tiles).to(tl.int64)
    row = inner_tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    row_ok = row < n_inner
    inner = row.to(tl.int64)  # [BLOCK_ROWS, 1]
    a_rows = out_a_ptr + outer * stride_ao + inner * stride_ai
    b_rows = out_b_ptr + outer * stride_bo + inner * stride_bi
    out_rows = out_ptr + outer * stride_oo + inner * stride_oi
    lse_rows = lse_ptr + outer * stride_lo + inner * stride_li

    lse_a = tl.load(lse_a_ptr + outer * stride_lao + inner * stride_lai, mask=row_ok, other=0.0)
    lse_b = tl.load(lse_b_ptr + outer * stride_lbo + inner * stride_lbi, mask=row_ok, other=0.0)
    if BLOCK_N >= HEAD_DIM:
        ok = row_ok & (cols < HEAD_DIM)
        a = tl.load(a_rows + cols, mask=ok, other=0.0)
        b = tl.load(b_rows + cols, mask=ok, other=0.0)
        if THREADS:
            # The threads of a row have all read its lse when one of them writes it in place.
            tl.debug_barrier()
        share_a, share_b, lse = _shares(lse_a, lse_b)
        tl.store(out_rows + cols, _mix(a, lse_a, share_a, b, lse_b, share_b), mask=ok)
    else:
        if THREADS:
            tl.debug_barrier()
        share_a, share_b, lse = _shares(lse_a, lse_b)
        for start in range(0, HEAD_DIM, BLOCK_N):
            ok = row_ok & (start + cols < HEAD_DIM)
            a = tl.load(a_rows + start + cols, mask=ok, other=0.0)
            b = tl.load(b_rows + start + cols, mask=ok, other=0.0)
            mixed = _mix(a, lse_a, share_a, b, lse_b, share_b)
            tl.store(out_rows + start + cols, mixed, mask=ok)
    tl.store(lse_rows, lse, mask=row_ok)


@triton.jit
def _shares(lse_a, lse_b):
    """(weight of a, weight of b, lse of both); zeros and -inf where neither saw a key.

    A NaN compares false and comes out as one.
    """
    empty = (lse_a == float("-inf")) & (lse_b == float("-inf"))
    base = tl.where(empty, 0.0, tl.maximum(lse_a, lse_b))  # -inf - -inf would be NaN
    weight_a, weight_b = tl.exp(lse_a - base), tl.exp(lse_b - base)
    total = tl.where(empty, 1.0, weight_a + weight_b)
    lse = tl.where(empty, float("-inf"), base + tl.log(total))
    return weight_a / total, weight_b / total, lse


@triton.jit
def _mix(a, lse_a, share_a, b, lse_b, share_b):
    """What a side that saw nothing holds is no number to rely on: 0 times it may be NaN."""
    a = tl.where(lse_a == float("-inf"), 0.0, a.to(tl.float32))
    b = tl.where(lse_b == float("-inf"), 0.0, b.to(tl.float32))
    return share_a * a + share_b * b


@op
def merge_attn_states(
    out_a: torch.Tensor,
    lse_a: torch.Tensor,
    out_b: torch.Tensor,
    lse_b: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    lse_out: torch.Tensor | None = None,
    config: Config | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over the keys of both ``a`` and ``b``, from the results over each.

    Args:
        out_a: [..., n_heads, head_dim], fp32, bf16 or fp16; head_dim >= 1 is contiguous, the
            leading dimensions (at least one) may have any strides that two row levels can express.
        lse_a: fp32 [..., n_heads], any strides: the natural logarithm of the sum of exp(scores).
        out_b: shape and dtype of ``out_a``, own strides.
        lse_b: as ``lse_a``.
        out: where to write, shape and dtype of ``out_a``; may be ``out_a`` or ``out_b`` itself.
        lse_out: where to write, shape and dtype of ``lse_a``; may be ``lse_a`` or ``lse_b`` itself.
        config: launch config; None looks it up.

    Returns:
        ``(out, lse)``, those given or new contiguous tensors. A side of lse -inf counts nothing,
        whatever it holds; both: zeros and -inf. An lse of inf (FlashAttention 2 writes that for a
        row without keys) or NaN gives NaN.

    Raises:
        TypeError, ValueError: an argument of the wrong kind, shape, dtype, stride or device.
    """
    given = [t for t in (out, lse_out) if t is not None]
    has_out, has_lse = out is not None, lse_out is not None
    plan = planned(_plan, config, (out_a, lse_a, out_b, lse_b, *given), has_out, has_lse)
    if out is None:
        out = torch.empty(out_a.shape, dtype=out_a.dtype, device=out_a.device)
    if lse_out is None:
        lse_out = torch.empty(lse_a.shape, dtype=torch.float32, device=lse_a.device)
    if plan is not None:
        launch, numbers = plan
        launch(out_a, lse_a, out_b, lse_b, out, lse_out, *numbers)
    return out, lse_out


def _plan(
    out_a: torch.Tensor,
    lse_a: torch.Tensor,
    out_b: torch.Tensor,
    lse_b: torch.Tensor,
    *rest: Any,
    config: Config | None,
) -> rows.RowPlan | None:
    """Launch and numbers, or None where there are no rows."""
    *given, has_out, has_lse = rest
    check_tensor(_OP, "out_a", out_a)
    if out_a.dim() < 2 or out_a.shape[-1] < 1:
        raise ValueError(
            f"{_OP}: out_a must have shape [..., n_heads, head_dim >= 1], got {describe(out_a)}"
        )
    check_dtype(_OP, "out_a", out_a, FLOAT_DTYPES)
    check_last_contiguous(_OP, "out_a", out_a)
    _check_lse("lse_a", lse_a, out_a)
    rows.check_row_like(_OP, "out_b", out_b, out_a)
    _check_lse("lse_b", lse_b, out_a)
    out = given.pop(0) if has_out else out_a.new_empty(out_a.shape, device="meta")
    lse = given.pop(0) if has_lse else lse_a.new_empty(lse_a.shape, device="meta")
    if has_out:
        rows.check_row_output(_OP, "out", out, out_a)
    if has_lse:
        _check_lse("lse_out", lse, out_a)
        check_no_overlap(_OP, "lse_out", lse)
    if out_a.numel() == 0:
        return None
    tensors = {"out_a": out_a, "lse_a": lse_a[..., None], "out_b": out_b}
    tensors |= {"lse_b": lse_b[..., None], "out": out, "lse_out": lse[..., None]}
    outer, n_inner, *strides = rows.row_layout(_OP, list(tensors), list(tensors.values()))
    head_dim = out_a.shape[-1]
    cfg, max_programs = resolve(SPEC, (outer * n_inner, head_dim, out_a.dtype), config)
    n_inner_tiles = cdiv(n_inner, cfg["BLOCK_ROWS"])
    n_tiles = outer * n_inner_tiles
    programs = min(n_tiles, max_programs)
    constants = {
        "HEAD_DIM": head_dim,
        "TWO_LEVELS": outer > 1,
        "ONE_TILE": programs == n_tiles,
        "THREADS": "num_warps" in cfg,
    }
    launch = bind(_merge_attn_states_kernel, (programs,), **constants, **cfg)
    return launch, (*strides, n_inner, n_inner_tiles, n_tiles)


def _check_lse(name: str, lse: torch.Tensor, out_a: torch.Tensor) -> None:
    check_tensor(_OP, name, lse)
    if lse.shape != out_a.shape[:-1] or lse.dtype != torch.float32:
        raise ValueError(
            f"{_OP}: {name} must be float32 {list(out_a.shape[:-1])} (out_a without head_dim), "
            f"got {describe(lse)}"
        )


# ---- facts for tests, bench and tuner --------------------------------------------------------

_LIVE = 3  # fp32 values an element that are alive at once: a, b, result


def _problem(
    leading: tuple[int, ...], head_dim: int, dtype: torch.dtype, *, plain: bool = False
) -> Problem:
    """``leading`` is [..., n_heads]; ``plain``: heads lie packed, and each has seen keys."""
    return {
        "n_rows": math.prod(leading),
        "head_dim": head_dim,
        "dtype": dtype,
        "leading": leading,
        "plain": plain,
    }


def _shape(
    *, tokens: int, num_heads: int = 32, head_dim: int = 128, dtype: torch.dtype = torch.bfloat16
) -> Problem:
    """Two results of attention for ``tokens`` tokens."""
    return _problem((tokens, num_heads), head_dim, dtype, plain=True)


def _make_inputs(problem: Problem, dev: torch.device) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    (*tokens, n_heads), inputs = problem["leading"], {}
    gap = 1 if tokens and not problem["plain"] else 0  # so that rows really need two strides
    for side, every in (("a", 3), ("b", 4)):  # so a row in twelve saw no key on either side
        values = torch.randn(*tokens, n_heads + gap, problem["head_dim"], generator=generator)
        lse = 4.0 + 3.0 * torch.randn(*tokens, n_heads, generator=generator)
        if not problem["plain"]:
            lse.flatten()[::every] = -math.inf
        inputs[f"out_{side}"] = values.to(problem["dtype"]).to(dev)[..., :n_heads, :]
        inputs[f"lse_{side}"] = lse.to(dev)
    return inputs


def _tuning_key(problem: Problem) -> dict[str, Any]:
    as_rows = {"n_outer": 1, "n_inner": problem["n_rows"], "n_cols": problem["head_dim"]}
    key = rows.row_tuning_key({**as_rows, "dtype": problem["dtype"]})
    return {"head_dim": key.pop("n_cols"), **key}


def _default_config(problem: Problem, dev: Device) -> Config:
    n_rows, vector = problem["n_rows"], 16 // problem["dtype"].itemsize
    if dev.is_npu:
        as_rows = {**problem, "n_inner": n_rows, "n_cols": problem["head_dim"]}
        return rows.default_row_config(as_rows, dev, live=_LIVE)
    block_n = min(next_power_of_2(problem["head_dim"]), 4096)
    # One 16-byte vector of each side a thread, four warps; fewer rows where cores would idle.
    block_rows = min(32, max(1, 128 * vector // block_n), next_power_of_2(n_rows))
    while block_rows > 1 and cdiv(n_rows, block_rows) < dev.num_cores:
        block_rows //= 2
    warps = 1
    while warps < 16 and warps * 32 * vector < block_rows * block_n:
        warps *= 2
    return {
        "BLOCK_ROWS": block_rows,
        "BLOCK_N": block_n,
        "num_warps": warps,
        "programs_per_core": 0,
    }


def _why_illegal(config: Config, problem: Problem, dev: Device) -> str | None:
    return rows.why_illegal_rows(config, problem, dev, live=_LIVE)


def _cost(problem: Problem) -> Cost:
    n_rows, n = problem["n_rows"], problem["n_rows"] * problem["head_dim"]
    return Cost(flops=3 * n + 8 * n_rows, bytes=3 * (n * problem["dtype"].itemsize + 4 * n_rows))


def _providers(inputs: dict[str, Any]) -> dict[str, Any]:
    peers: dict[str, Any] = {}
    with contextlib.suppress(ImportError):
        import flashinfer

        # Its logarithms are to base 2 and its tensors three-dimensional.
        lse_a, lse_b = (inputs[name] / math.log(2) for name in ("lse_a", "lse_b"))
        peers["flashinfer"] = lambda: flashinfer.merge_state(
            inputs["out_a"], lse_a, inputs["out_b"], lse_b
        )
    return peers


_EDGE, _BENCH = frozenset({"edge"}), frozenset({"bench"})

SPEC = register(
    KernelSpec(
        name="merge_attn_states",
        launch=merge_attn_states,
        reference=merge_attn_states_ref,
        problem_fields=("n_rows", "head_dim", "dtype"),
        make_inputs=_make_inputs,
        cases=(
            Case("5x3x64-bf16", _problem((5, 3), 64, torch.bfloat16)),
            Case("2x7x2x80-fp32", _problem((2, 7, 2), 80, torch.float32)),
            Case("13x1x128-fp16", _problem((13, 1), 128, torch.float16)),
            Case("12x1-fp32", _problem((12,), 1, torch.float32), _EDGE),
            Case("1x33-fp16", _problem((1,), 33, torch.float16, plain=True), _EDGE),
            Case("2x3x1001-bf16", _problem((2, 3), 1001, torch.bfloat16), _EDGE),
            Case("3x4097-fp32", _problem((3,), 4097, torch.float32), _EDGE),
            *(
                Case(  # heads of Qwen3 8B
                    f"{tokens}x32x128-bf16",
                    _problem((tokens, 32), 128, torch.bfloat16, plain=True),
                    _BENCH,
                )
                for tokens in (64, 4096)
            ),
        ),
        tuning_key=_tuning_key,
        space=rows.row_space,
        default_config=_default_config,
        why_illegal=_why_illegal,
        cost=_cost,
        outputs=("out", "lse_out"),
        providers=_providers,
        shape=_shape,
    )
)
