"""Residual add, RMSNorm and int8 codes of the normed rows, in one pass over the row.

    residual_out[r, :] = round(x[r, :] + residual[r, :])          added in fp32, rounded once
    out[r, :] = round(residual_out[r, :] / sqrt(mean(residual_out[r, :]^2) + eps) * weight)
    scale_out[r] = max_c |out[r, c]| / 127
    q_out[r, :] = round_half_even(out[r, :] / scale_out[r])

x, residual, out, residual_out: [n_rows, n_cols], each with a row stride of its own. weight:
[n_cols]. q_out: int8 [n_rows, n_cols]. scale_out: fp32 [n_rows]. That is ``fused_add_rms_norm``
and ``quantize_per_token`` one after the other, with the rounding in between: the bits are the same
where ``fused_add_rms_norm`` adds the squares in the same order, as it does with the same tile of
rows that begin at multiples of 16 bytes. ``out`` is written where ``keep`` asks for it (for a layer
some of whose rows run high).

A row that fits one tile is read once. A wider one is read three times, for the mean square, for the
largest normed value and for the codes: nothing is read back that was stored here.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from tkernels import quantized_rows, rows
from tkernels.check import check_positive, check_tensor, new_output, one_for_both
from tkernels.config import planned
from tkernels.device import Device, tl, triton
from tkernels.ops.fused_add_rms_norm import fused_add_rms_norm, fused_add_rms_norm_ref
from tkernels.ops.paged_attn import _let_next_kernel_start, _wait_for_earlier_kernels
from tkernels.ops.quantize_per_token import quantize_per_token, quantize_per_token_ref
from tkernels.quantized_rows import (
    as_stored,
    collect,
    scales_of,
    scales_of_collected,
    store_codes,
)
from tkernels.registry import Config, Cost, KernelSpec, Problem, op, register

_OP = "fused_add_rms_norm_quantized"


def fused_add_rms_norm_quantized_ref(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    *,
    eps: float = 1e-6,
    keep: bool = False,
    q_out: torch.Tensor | None = None,
    scale_out: torch.Tensor | None = None,
    residual_out: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    config: Config | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """PyTorch version of ``fused_add_rms_norm_quantized``."""
    normed, total = fused_add_rms_norm_ref(x, residual, weight, eps=eps)
    codes, scale = quantize_per_token_ref(normed, out=q_out, scale_out=scale_out)
    kept = normed if keep else normed[:0]
    return (
        codes,
        scale,
        total if residual_out is None else residual_out.copy_(total),
        kept if out is None else out.copy_(kept),
    )


@triton.jit
def _fused_add_rms_norm_quantized_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    q_ptr,
    scale_ptr,
    residual_out_ptr,
    out_ptr,  # unused without KEEP
    stride_x,
    stride_r,
    stride_q,
    stride_s,
    stride_o,
    n_rows,
    n_tiles,
    eps,
    N_COLS: tl.constexpr,
    KEEP: tl.constexpr,
    ONE_TILE: tl.constexpr,  # a program has one tile, so it need not loop
    THREADS: tl.constexpr,
    ASM: tl.constexpr,
    FOLD: tl.constexpr,
    PDL: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    if PDL:
        _let_next_kernel_start()
        _wait_for_earlier_kernels()
    # fmt: off
    if ONE_TILE:
        _fused_add_rms_norm_quantized_tile(
            tl.program_id(0), x_ptr, residual_ptr, weight_ptr, q_ptr, scale_ptr, residual_out_ptr,
            out_ptr, stride_x, stride_r, stride_q, stride_s, stride_o, n_rows, eps,
            N_COLS, KEEP, THREADS, ASM, FOLD, BLOCK_ROWS, BLOCK_N)
    else:
        for tile in range(tl.program_id(0), n_tiles, tl.num_programs(0)):
            _fused_add_rms_norm_quantized_tile(
                tile, x_ptr, residual_ptr, weight_ptr, q_ptr, scale_ptr, residual_out_ptr,
                out_ptr, stride_x, stride_r, stride_q, stride_s, stride_o, n_rows, eps,
                N_COLS, KEEP, THREADS, ASM, FOLD, BLOCK_ROWS, BLOCK_N)
    # fmt: on


@triton.jit
def _fused_add_rms_norm_quantized_tile(
    tile,
    x_ptr,
    residual_ptr,
    weight_ptr,
    q_ptr,
    scale_ptr,
    residual_out_ptr,
    out_ptr,
    stride_x,
    stride_r,
    stride_q,
    stride_s,
    stride_o,
    n_rows,
    eps,
    N_COLS: tl.constexpr,
    KEEP: tl.constexpr,
    THREADS: tl.constexpr,
    ASM: tl.constexpr,
    FOLD: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    dtype: tl.constexpr = residual_out_ptr.dtype.element_ty
    cols = tl.arange(0, BLOCK_N)[None, :]
    row = tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    row_ok = (row < n_rows)[:, None]
    row64 = row.to(tl.int64)[:, None]
    x_rows = x_ptr + row64 * stride_x  # [BLOCK_ROWS, 1]
    residual_rows = residual_ptr + row64 * stride_r
    q_rows = q_ptr + row64 * stride_q
    sum_rows = residual_out_ptr + row64 * stride_s
    out_rows = out_ptr + row64 * stride_o

    if BLOCK_N >= N_COLS:
        ok = row_ok & (cols < N_COLS)
        x = tl.load(x_rows + cols, mask=ok, other=0.0).to(tl.float32)
        residual = tl.load(residual_rows + cols, mask=ok, other=0.0).to(tl.float32)
        # Before the store, which it could not overtake: a single row then waits once.
        weight = tl.load(weight_ptr + cols, mask=cols < N_COLS, other=0.0)
        rounded = (x + residual).to(dtype)
        tl.store(sum_rows + cols, rounded, mask=ok)
        total = rounded.to(tl.float32)
        rms = tl.rsqrt(tl.sum(total * total, axis=1) / N_COLS + eps)
        normed = as_stored(total * rms[:, None] * weight.to(tl.float32), dtype, ASM)
        if KEEP:
            tl.store(out_rows + cols, normed, mask=ok)
        values = normed.to(tl.float32)
        scale, inverse = scales_of(values, THREADS)
        store_codes(q_rows, cols, values, inverse, ok, dtype, THREADS, FOLD, BLOCK_ROWS, BLOCK_N)
    else:
        squares = tl.zeros([BLOCK_ROWS, BLOCK_N], tl.float32)
        for start in range(0, N_COLS, BLOCK_N):
            ok = row_ok & (start + cols < N_COLS)
            x = tl.load(x_rows + start + cols, mask=ok, other=0.0).to(tl.float32)
            residual = tl.load(residual_rows + start + cols, mask=ok, other=0.0).to(tl.float32)
            total = (x + residual).to(dtype).to(tl.float32)
            squares += total * total
        rms = tl.rsqrt(tl.sum(squares, axis=1) / N_COLS + eps)
        top = tl.zeros([BLOCK_ROWS, BLOCK_N], tl.float32)
        spoilt = tl.zeros([BLOCK_ROWS, BLOCK_N], tl.float32)
        for start in range(0, N_COLS, BLOCK_N):
            col_ok = start + cols < N_COLS
            ok = row_ok & col_ok
            x = tl.load(x_rows + start + cols, mask=ok, other=0.0).to(tl.float32)
            residual = tl.load(residual_rows + start + cols, mask=ok, other=0.0).to(tl.float32)
            weight = tl.load(weight_ptr + start + cols, mask=col_ok, other=0.0).to(tl.float32)
            total = (x + residual).to(dtype).to(tl.float32)
            normed = as_stored(total * rms[:, None] * weight, dtype, ASM)
            top, spoilt = collect(normed.to(tl.float32), top, spoilt, THREADS)
        scale, inverse = scales_of_collected(top, spoilt, THREADS)
        # All that is written to rows is written here: it may take the place of what is read.
        for start in range(0, N_COLS, BLOCK_N):
            col_ok = start + cols < N_COLS
            ok = row_ok & col_ok
            x = tl.load(x_rows + start + cols, mask=ok, other=0.0).to(tl.float32)
            residual = tl.load(residual_rows + start + cols, mask=ok, other=0.0).to(tl.float32)
            weight = tl.load(weight_ptr + start + cols, mask=col_ok, other=0.0).to(tl.float32)
            rounded = (x + residual).to(dtype)
            tl.store(sum_rows + start + cols, rounded, mask=ok)
            normed = as_stored(rounded.to(tl.float32) * rms[:, None] * weight, dtype, ASM)
            if KEEP:
                tl.store(out_rows + start + cols, normed, mask=ok)
            store_codes(
                q_rows, start + cols, normed.to(tl.float32), inverse, ok, dtype,
                THREADS, FOLD, BLOCK_ROWS, BLOCK_N)  # fmt: skip
    tl.store(scale_ptr + row, scale, mask=row < n_rows)


@op
def fused_add_rms_norm_quantized(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    *,
    eps: float = 1e-6,
    keep: bool = False,
    q_out: torch.Tensor | None = None,
    scale_out: torch.Tensor | None = None,
    residual_out: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    config: Config | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Add ``residual`` to ``x``, RMS-normalise the rounded sum, and quantise the normed rows.

    It gives what ``quantize_per_token`` makes of the result of ``fused_add_rms_norm``. Four tensors
    come back always, because an operator's results are of a fixed number: without ``keep`` the last
    one has no rows, and nothing is written for it.

    Args:
        x: [n_rows, n_cols], fp32, bf16 or fp16; n_cols >= 1, columns contiguous, any row stride.
        residual: shape and dtype of ``x``, own row stride.
        weight: [n_cols], contiguous, fp32, bf16 or fp16 (it may differ from ``x``).
        eps: added to the mean square; > 0.
        keep: write the normed rows too.
        q_out: int8 [n_rows, n_cols], contiguous columns: where the codes go.
        scale_out: fp32 [n_rows], contiguous: where the scales go. Neither may share memory with
            another argument.
        residual_out: where the sum goes; shape and dtype of ``x``. May be ``residual`` itself.
        out: where the normed rows go; shape and dtype of ``x``, without ``keep`` [0, n_cols]. May
            be ``x`` itself.
        config: launch config; None looks it up.

    Returns:
        ``(q_out, scale_out, residual_out, out)``; each is a new contiguous tensor where None was
        given. A row whose normed values are not all finite has the scale NaN and the codes 0, a row
        of zeros the scale 0.

    Raises:
        TypeError, ValueError: an argument of the wrong kind, shape, dtype, stride or device.
    """
    if q_out is None or scale_out is None or residual_out is None or out is None:
        check_tensor(_OP, "x", x)
        quantized_rows.check_matrix(_OP, x)
        n_cols = x.shape[1]
        q_out = quantized_rows.new_codes(x, n_cols) if q_out is None else q_out
        scale_out = quantized_rows.new_scales(x) if scale_out is None else scale_out
        residual_out = new_output(_OP, x) if residual_out is None else residual_out
        out = quantized_rows.new_kept(x, n_cols, keep) if out is None else out
    if out is residual_out:
        raise one_for_both(_OP, "out", "residual_out")
    tensors = (x, residual, weight, q_out, scale_out, residual_out, out)
    plan = planned(_plan, config, tensors, eps, keep)
    if plan is not None:
        launch, numbers = plan
        rows_out = out if keep else residual_out
        launch(x, residual, weight, q_out, scale_out, residual_out, rows_out, *numbers, eps)
    return q_out, scale_out, residual_out, out


def _plan(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    q_out: torch.Tensor,
    scale_out: torch.Tensor,
    residual_out: torch.Tensor,
    out: torch.Tensor,
    eps: float,
    keep: bool,
    config: Config | None,
) -> rows.RowPlan | None:
    quantized_rows.check_matrix(_OP, x)
    n_cols = x.shape[1]
    rows.check_row_like(_OP, "residual", residual, x)
    rows.check_weight(_OP, weight, n_cols)
    check_positive(_OP, "eps", eps)
    rows.check_row_output(_OP, "residual_out", residual_out, x)
    quantized_rows.check_results(_OP, x, n_cols, keep, out, q_out, scale_out)
    strides = tuple(t.stride(0) for t in (x, residual, q_out, residual_out, out))
    return quantized_rows.plan(
        SPEC, _fused_add_rms_norm_quantized_kernel, x, n_cols, keep, strides, config
    )


# ---- facts for tests, bench and tuner --------------------------------------------------------

_LIVE = 4  # fp32 values an element that are alive at once: x, residual, sum, weight


def _shape(
    *, tokens: int, hidden: int, keep: bool = False, dtype: torch.dtype = torch.bfloat16
) -> Problem:
    """The norm of ``tokens`` rows of ``hidden``."""
    return quantized_rows.problem(tokens, hidden, dtype, keep=keep)


def _make_inputs(problem: Problem, dev: torch.device) -> dict[str, Any]:
    """Rows whose normed values are whole numbers of steps; the second of zeros.

    Whether normed values are rounded to 16 bits decides many codes of random rows, and the truth
    that results are held against is computed without that rounding. Here all rows are one row of
    whole numbers up to 127, rolled, whose squares add up exactly in any order, and ``eps`` makes
    their mean a power of four: normed values are whole multiples of a power of two, as each dtype
    has them.
    """
    n_rows, n_cols, dtype = problem["n_rows"], problem["n_cols"], problem["dtype"]
    generator = torch.Generator().manual_seed(0)
    numbers = [127, *((37 * c) % 81 - 40 for c in range(1, n_cols))]
    mean = sum(n * n for n in numbers) / n_cols
    base = torch.tensor(numbers, dtype=torch.float32)
    column = torch.arange(n_cols)[None, :] + 61 * torch.arange(n_rows)[:, None]
    total = base[column % n_cols]
    total[1:2] = 0
    residual = torch.randint(-64, 65, (n_rows, n_cols), generator=generator).float()
    weight = 0.5 - torch.randint(0, 2, (n_cols,), generator=generator).float()
    return {
        "x": (total - residual).to(dtype).to(dev),
        "residual": residual.to(dtype).to(dev),
        "weight": weight.to(dtype).to(dev),
        "eps": 4.0 ** math.ceil(math.log(mean + 1, 4)) - mean,
        "keep": problem["keep"],
    }


def _default_config(problem: Problem, dev: Device) -> Config:
    return quantized_rows.default_config(problem, dev, live=_LIVE)


def _why_illegal(config: Config, problem: Problem, dev: Device) -> str | None:
    return quantized_rows.why_illegal(config, problem, dev, live=_LIVE)


def _cost(problem: Problem) -> Cost:
    n_rows, n_cols, item = problem["n_rows"], problem["n_cols"], problem["dtype"].itemsize
    n = n_rows * n_cols
    return Cost(
        flops=8 * n, bytes=n * ((3 + problem["keep"]) * item + 1) + n_cols * item + 4 * n_rows
    )


def _providers(inputs: dict[str, Any]) -> dict[str, Any]:
    """The two kernels that this one is."""
    x, residual, weight, eps = (inputs[n] for n in ("x", "residual", "weight", "eps"))

    def unfused() -> tuple[torch.Tensor, ...]:
        normed, total = fused_add_rms_norm(x, residual, weight, eps=eps)
        return (*quantize_per_token(normed), total, normed)

    return {"unfused": unfused}


SPEC = register(
    KernelSpec(
        name=_OP,
        launch=fused_add_rms_norm_quantized,
        reference=fused_add_rms_norm_quantized_ref,
        problem_fields=quantized_rows.FIELDS,
        make_inputs=_make_inputs,
        cases=quantized_rows.cases(4096),
        tuning_key=quantized_rows.tuning_key,
        space=quantized_rows.space,
        default_config=_default_config,
        why_illegal=_why_illegal,
        cost=_cost,
        outputs=("q_out", "scale_out", "residual_out", "out"),
        providers=_providers,
        shape=_shape,
    )
)
