"""Root-mean-square layer norm (Zhang and Sennrich, 2019, arXiv 1910.07467).

    out[r, :] = x[r, :] / sqrt(mean(x[r, :]^2) + eps) * weight

x, out: [..., n_cols], rows anywhere in memory, columns contiguous. weight: [n_cols].
Everything between load and store is fp32, so fp16 rows do not overflow when squared.

A row that fits one tile is read once; a wider one is read twice (sum of squares, then scaling),
in column blocks. Small rows share a program, BLOCK_ROWS at a time.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from tkernels import rows
from tkernels.check import check_positive, new_output
from tkernels.config import planned
from tkernels.device import Device, tl, triton
from tkernels.registry import Config, Cost, KernelSpec, Problem, op, register


def rms_norm_ref(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    eps: float = 1e-6,
    out: torch.Tensor | None = None,
    config: Config | None = None,
) -> torch.Tensor:
    """PyTorch version of ``rms_norm``: fp32 inside, rounded once."""
    normed = torch.nn.functional.rms_norm(x.float(), x.shape[-1:], weight.float(), eps)
    return normed.to(x.dtype) if out is None else out.copy_(normed)


@triton.jit
def _rms_norm_kernel(
    x_ptr,
    weight_ptr,
    out_ptr,
    stride_xo,
    stride_xi,
    stride_oo,
    stride_oi,
    n_inner,
    n_inner_tiles,
    n_tiles,
    eps,
    N_COLS: tl.constexpr,
    TWO_LEVELS: tl.constexpr,  # rows have an outer stride too
    ONE_TILE: tl.constexpr,  # a program has one tile, so it need not loop
    BLOCK_ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    # fmt: off
    if ONE_TILE:
        _rms_norm_tile(
            tl.program_id(0), x_ptr, weight_ptr, out_ptr, stride_xo, stride_xi, stride_oo,
            stride_oi, n_inner, n_inner_tiles, eps, N_COLS, TWO_LEVELS, BLOCK_ROWS, BLOCK_N)
    else:
        for tile in range(tl.program_id(0), n_tiles, tl.num_programs(0)):
            _rms_norm_tile(
                tile, x_ptr, weight_ptr, out_ptr, stride_xo, stride_xi, stride_oo,
                stride_oi, n_inner, n_inner_tiles, eps, N_COLS, TWO_LEVELS, BLOCK_ROWS, BLOCK_N)
    # fmt: on


@triton.jit
def _rms_norm_tile(
    tile,
    x_ptr,
    weight_ptr,
    out_ptr,
    stride_xo,
    stride_xi,
    stride_oo,
    stride_oi,
    n_inner,
    n_inner_tiles,
    eps,
    N_COLS: tl.constexpr,
    TWO_LEVELS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    cols = tl.arange(0, BLOCK_N)[None, :]
    inner_tile, outer = tile, tl.cast(0, tl.int64)
    if TWO_LEVELS:
        inner_tile, outer = tile % n_inner_tiles, (tile // n_inner_tiles).to(tl.int64)
    inner = inner_tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    row_ok = inner < n_inner
    x_rows = x_ptr + outer * stride_xo + inner.to(tl.int64) * stride_xi  # [BLOCK_ROWS, 1]
    out_rows = out_ptr + outer * stride_oo + inner.to(tl.int64) * stride_oi

    if BLOCK_N >= N_COLS:
        ok = row_ok & (cols < N_COLS)
        x = tl.load(x_rows + cols, mask=ok, other=0.0).to(tl.float32)
        weight = tl.load(weight_ptr + cols, mask=cols < N_COLS, other=0.0)
        scale = tl.rsqrt(tl.sum(x * x, axis=1) / N_COLS + eps)
        normed = x * scale[:, None] * weight.to(tl.float32)
        tl.store(out_rows + cols, normed, mask=ok)
    else:
        squares = tl.zeros([BLOCK_ROWS, BLOCK_N], tl.float32)
        for start in range(0, N_COLS, BLOCK_N):
            ok = row_ok & (start + cols < N_COLS)
            x = tl.load(x_rows + start + cols, mask=ok, other=0.0).to(tl.float32)
            squares += x * x
        scale = tl.rsqrt(tl.sum(squares, axis=1) / N_COLS + eps)
        for start in range(0, N_COLS, BLOCK_N):
            col_ok = start + cols < N_COLS
            ok = row_ok & col_ok
            x = tl.load(x_rows + start + cols, mask=ok, other=0.0).to(tl.float32)
            weight = tl.load(weight_ptr + start + cols, mask=col_ok, other=0.0).to(tl.float32)
            tl.store(out_rows + start + cols, x * scale[:, None] * weight, mask=ok)


@op
def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    eps: float = 1e-6,
    out: torch.Tensor | None = None,
    config: Config | None = None,
) -> torch.Tensor:
    """Scale each row of ``x`` to root-mean-square 1, then by ``weight``.

    Args:
        x: [..., n_cols], fp32, bf16 or fp16; n_cols >= 1. Columns are contiguous; the leading
            dimensions may have any strides that two row levels can express.
        weight: [n_cols], contiguous, fp32, bf16 or fp16 (it may differ from ``x``).
        eps: added to the mean square; > 0.
        out: where to write, shape and dtype of ``x``, own strides; may be ``x`` itself.
        config: launch config; None looks it up.

    Returns:
        ``out``, or a new contiguous tensor.

    Raises:
        TypeError, ValueError: an argument of the wrong kind, shape, dtype, stride or device.
    """
    if out is None:
        out = new_output("rms_norm", x)
    plan = planned(_plan, config, (x, weight, out), eps)
    if plan is not None:
        launch, numbers = plan
        launch(x, weight, out, *numbers, eps)
    return out


def _plan(
    x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, eps: float, config: Config | None
) -> rows.RowPlan | None:
    n_cols = rows.check_row_input("rms_norm", "x", x)
    rows.check_weight("rms_norm", weight, n_cols)
    check_positive("rms_norm", "eps", eps)
    rows.check_row_output("rms_norm", "out", out, x)
    return rows.plan_rows(SPEC, _rms_norm_kernel, {"x": x, "out": out}, n_cols, config)


# ---- facts for tests, bench and tuner --------------------------------------------------------

_LIVE = 3  # fp32 values an element that are alive at once: x, weight, result


def _make_inputs(problem: Problem, dev: torch.device) -> dict[str, Any]:
    return {
        "x": rows.random_rows(problem, dev, seed=0),
        "weight": rows.random_weight(problem, dev),
        "eps": 1e-6,
    }


def _default_config(problem: Problem, dev: Device) -> Config:
    return rows.default_row_config(problem, dev, live=_LIVE)


def _why_illegal(config: Config, problem: Problem, dev: Device) -> str | None:
    return rows.why_illegal_rows(config, problem, dev, live=_LIVE)


def _cost(problem: Problem) -> Cost:
    n = problem["n_outer"] * problem["n_inner"] * problem["n_cols"]
    item = problem["dtype"].itemsize
    return Cost(flops=4 * n, bytes=(2 * n + problem["n_cols"]) * item)


def _providers(inputs: dict[str, Any]) -> dict[str, Any]:
    x, weight, eps = inputs["x"], inputs["weight"], inputs["eps"]
    out = torch.empty_like(x)
    peers: dict[str, Any] = {
        "torch": lambda: torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, eps)
    }
    if x.dim() == 2:
        with contextlib.suppress(ImportError):
            import flashinfer

            peers["flashinfer"] = lambda: flashinfer.rmsnorm(x, weight, eps, out=out)
    return peers


SPEC = register(
    KernelSpec(
        name="rms_norm",
        launch=rms_norm,
        reference=rms_norm_ref,
        problem_fields=rows.ROW_FIELDS,
        make_inputs=_make_inputs,
        cases=rows.norm_cases(),
        tuning_key=rows.row_tuning_key,
        space=rows.row_space,
        default_config=_default_config,
        why_illegal=_why_illegal,
        cost=_cost,
        outputs=("out",),
        providers=_providers,
        shape=rows.norm_shape,
    )
)
