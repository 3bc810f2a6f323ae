"""Residual add and RMSNorm in one pass over the row.

    residual_out[r, :] = round(x[r, :] + residual[r, :])          added in fp32, rounded once
    out[r, :] = residual_out[r, :] / sqrt(mean(residual_out[r, :]^2) + eps) * weight

x, residual, out, residual_out: [..., n_cols], each with row strides of its own. weight: [n_cols].
The norm sees the *rounded* sum, the value that the next layer reads back, so fused and unfused
models agree to the last bit of the residual. ``out=x, residual_out=residual`` works in place.

The wide-row loop reads both inputs twice instead of reading back what it stored: another thread of
the program may have written that, and no barrier would be portable.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from tkernels import rows
from tkernels.check import check_positive, new_output, one_for_both
from tkernels.config import planned
from tkernels.device import Device, tl, triton
from tkernels.registry import Config, Cost, KernelSpec, Problem, op, register


def fused_add_rms_norm_ref(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    *,
    eps: float = 1e-6,
    out: torch.Tensor | None = None,
    residual_out: torch.Tensor | None = None,
    config: Config | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """PyTorch version of ``fused_add_rms_norm``."""
    total = (x.float() + residual.float()).to(x.dtype)
    normed = torch.nn.functional.rms_norm(total.float(), x.shape[-1:], weight.float(), eps)
    return (
        normed.to(x.dtype) if out is None else out.copy_(normed),
        total if residual_out is None else residual_out.copy_(total),
    )


@triton.jit
def _fused_add_rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    residual_out_ptr,
    stride_xo,
    stride_xi,
    stride_ro,
    stride_ri,
    stride_oo,
    stride_oi,
    stride_so,
    stride_si,
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
        _fused_add_rms_norm_tile(
            tl.program_id(0), x_ptr, residual_ptr, weight_ptr, out_ptr, residual_out_ptr,
            stride_xo, stride_xi, stride_ro, stride_ri, stride_oo, stride_oi, stride_so, stride_si,
            n_inner, n_inner_tiles, eps, N_COLS, TWO_LEVELS, BLOCK_ROWS, BLOCK_N)
    else:
        for tile in range(tl.program_id(0), n_tiles, tl.num_programs(0)):
            _fused_add_rms_norm_tile(
                tile, x_ptr, residual_ptr, weight_ptr, out_ptr, residual_out_ptr,
                stride_xo, stride_xi, stride_ro, stride_ri, stride_oo, stride_oi, stride_so,
                stride_si, n_inner, n_inner_tiles, eps, N_COLS, TWO_LEVELS, BLOCK_ROWS, BLOCK_N)
    # fmt: on


@triton.jit
def _fused_add_rms_norm_tile(
    tile,
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    residual_out_ptr,
    stride_xo,
    stride_xi,
    stride_ro,
    stride_ri,
    stride_oo,
    stride_oi,
    stride_so,
    stride_si,
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
    inner64 = inner.to(tl.int64)
    x_rows = x_ptr + outer * stride_xo + inner64 * stride_xi  # [BLOCK_ROWS, 1]
    residual_rows = residual_ptr + outer * stride_ro + inner64 * stride_ri
    out_rows = out_ptr + outer * stride_oo + inner64 * stride_oi
    sum_rows = residual_out_ptr + outer * stride_so + inner64 * stride_si

    if BLOCK_N >= N_COLS:
        ok = row_ok & (cols < N_COLS)
        x = tl.load(x_rows + cols, mask=ok, other=0.0).to(tl.float32)
        residual = tl.load(residual_rows + cols, mask=ok, other=0.0).to(tl.float32)
        # Before the store, which it could not overtake: a single row then waits once.
        weight = tl.load(weight_ptr + cols, mask=cols < N_COLS, other=0.0)
        rounded = (x + residual).to(residual_out_ptr.dtype.element_ty)
        tl.store(sum_rows + cols, rounded, mask=ok)
        total = rounded.to(tl.float32)
        scale = tl.rsqrt(tl.sum(total * total, axis=1) / N_COLS + eps)
        normed = total * scale[:, None] * weight.to(tl.float32)
        tl.store(out_rows + cols, normed, mask=ok)
    else:
        squares = tl.zeros([BLOCK_ROWS, BLOCK_N], tl.float32)
        for start in range(0, N_COLS, BLOCK_N):
            ok = row_ok & (start + cols < N_COLS)
            x = tl.load(x_rows + start + cols, mask=ok, other=0.0).to(tl.float32)
            residual = tl.load(residual_rows + start + cols, mask=ok, other=0.0).to(tl.float32)
            total = (x + residual).to(residual_out_ptr.dtype.element_ty).to(tl.float32)
            squares += total * total
        scale = tl.rsqrt(tl.sum(squares, axis=1) / N_COLS + eps)
        for start in range(0, N_COLS, BLOCK_N):
            col_ok = start + cols < N_COLS
            ok = row_ok & col_ok
            x = tl.load(x_rows + start + cols, mask=ok, other=0.0).to(tl.float32)
            residual = tl.load(residual_rows + start + cols, mask=ok, other=0.0).to(tl.float32)
            rounded = (x + residual).to(residual_out_ptr.dtype.element_ty)
            tl.store(sum_rows + start + cols, rounded, mask=ok)
            weight = tl.load(weight_ptr + start + cols, mask=col_ok, other=0.0).to(tl.float32)
            total = rounded.to(tl.float32)
            tl.store(out_rows + start + cols, total * scale[:, None] * weight, mask=ok)


@op
def fused_add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    *,
    eps: float = 1e-6,
    out: torch.Tensor | None = None,
    residual_out: torch.Tensor | None = None,
    config: Config | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add ``residual`` to ``x``, and RMS-normalise the rounded sum.

    Args:
        x: [..., n_cols], fp32, bf16 or fp16; n_cols >= 1, columns contiguous.
        residual: shape and dtype of ``x``, own row strides.
        weight: [n_cols], contiguous, fp32, bf16 or fp16 (it may differ from ``x``).
        eps: added to the mean square; > 0.
        out: where the normed rows go; shape and dtype of ``x``. May be ``x`` itself.
        residual_out: where the sum goes; shape and dtype of ``x``. May be ``residual`` itself.
        config: launch config; None looks it up.

    Returns:
        ``(out, residual_out)``; each is a new contiguous tensor where None was given.

    Raises:
        TypeError, ValueError: an argument of the wrong kind, shape, dtype, stride or device.
    """
    if out is None:
        out = new_output("fused_add_rms_norm", x)
    if residual_out is None:
        residual_out = new_output("fused_add_rms_norm", x)
    if out is residual_out:
        raise one_for_both("fused_add_rms_norm", "residual_out", "out")
    plan = planned(_plan, config, (x, residual, weight, out, residual_out), eps)
    if plan is not None:
        launch, numbers = plan
        launch(x, residual, weight, out, residual_out, *numbers, eps)
    return out, residual_out


def _plan(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    residual_out: torch.Tensor,
    eps: float,
    config: Config | None,
) -> rows.RowPlan | None:
    name = "fused_add_rms_norm"
    n_cols = rows.check_row_input(name, "x", x)
    rows.check_row_like(name, "residual", residual, x)
    rows.check_weight(name, weight, n_cols)
    check_positive(name, "eps", eps)
    rows.check_row_output(name, "out", out, x)
    rows.check_row_output(name, "residual_out", residual_out, x)
    tensors = {"x": x, "residual": residual, "out": out, "residual_out": residual_out}
    return rows.plan_rows(SPEC, _fused_add_rms_norm_kernel, tensors, n_cols, config)


# ---- facts for tests, bench and tuner --------------------------------------------------------

_LIVE = 4  # fp32 values an element that are alive at once: x, residual, sum, weight


def _make_inputs(problem: Problem, dev: torch.device) -> dict[str, Any]:
    return {
        "x": rows.random_rows(problem, dev, seed=0),
        "residual": rows.random_rows(problem, dev, seed=1),
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
    return Cost(flops=5 * n, bytes=(4 * n + problem["n_cols"]) * item)


def _providers(inputs: dict[str, Any]) -> dict[str, Any]:
    x, residual, weight, eps = (inputs[n] for n in ("x", "residual", "weight", "eps"))
    peers: dict[str, Any] = {}
    if x.dim() != 2:
        return peers
    with contextlib.suppress(ImportError):
        import flashinfer

        # In place by design: it works on copies, so that every call does the same work.
        fx, fr = x.clone(), residual.clone()
        peers["flashinfer"] = lambda: flashinfer.fused_add_rmsnorm(fx, fr, weight, eps)
    with contextlib.suppress(ImportError):
        from liger_kernel.ops.fused_add_rms_norm import fused_add_rms_norm_forward

        peers["liger"] = lambda: fused_add_rms_norm_forward(x, residual, weight, eps, 0.0, "llama")
    return peers


SPEC = register(
    KernelSpec(
        name="fused_add_rms_norm",
        launch=fused_add_rms_norm,
        reference=fused_add_rms_norm_ref,
        problem_fields=rows.ROW_FIELDS,
        make_inputs=_make_inputs,
        cases=rows.norm_cases(),
        tuning_key=rows.row_tuning_key,
        space=rows.row_space,
        default_config=_default_config,
        why_illegal=_why_illegal,
        cost=_cost,
        outputs=("out", "residual_out"),
        providers=_providers,
        shape=rows.norm_shape,
    )
)
