"""SwiGLU's activation and int8 codes of its rows, in one pass over the row.

    out[r, c] = round(silu(x[r, c]) * x[r, n_cols + c])        silu(a) = a / (1 + exp(-a))
    scale_out[r] = max_c |out[r, c]| / 127
    q_out[r, :] = round_half_even(out[r, :] / scale_out[r])

x: [n_rows, 2 * n_cols] as a packed gate|up projection leaves it. out: [n_rows, n_cols], int8 q_out
of the same shape, scale_out: fp32 [n_rows]; rows anywhere in memory, columns contiguous. That is
``silu_and_mul`` and ``quantize_per_token`` one after the other, to the last bit: the rounding in
between is done here too. ``out`` is written where ``keep`` asks for it (a layer some of whose rows
run high reads it).

A scale needs the whole row, so unlike in ``silu_and_mul`` a program has whole rows: a row that fits
one tile is read once, a wider one twice, in column blocks.
"""

from __future__ import annotations

from typing import Any

import torch

from tkernels import quantized_rows, rows
from tkernels.check import check_tensor, describe
from tkernels.config import planned
from tkernels.device import Device, tl, triton
from tkernels.ops.paged_attn import _let_next_kernel_start, _wait_for_earlier_kernels
from tkernels.ops.quantize_per_token import quantize_per_token, quantize_per_token_ref
from tkernels.ops.silu_and_mul import silu_and_mul, silu_and_mul_ref
from tkernels.quantized_rows import (
    as_stored,
    collect,
    scales_of,
    scales_of_collected,
    store_codes,
)
from tkernels.registry import Config, Cost, KernelSpec, Problem, op, register

_OP = "silu_and_mul_quantized"


def silu_and_mul_quantized_ref(
    x: torch.Tensor,
    *,
    keep: bool = False,
    q_out: torch.Tensor | None = None,
    scale_out: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    config: Config | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """PyTorch version of ``silu_and_mul_quantized``."""
    result = silu_and_mul_ref(x)
    codes, scale = quantize_per_token_ref(result, out=q_out, scale_out=scale_out)
    kept = result if keep else result[:0]
    return codes, scale, kept if out is None else out.copy_(kept)


@triton.jit
def _silu_and_mul_quantized_kernel(
    x_ptr,
    q_ptr,
    scale_ptr,
    out_ptr,  # unused without KEEP
    stride_x,
    stride_q,
    stride_o,
    n_rows,
    n_tiles,
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
        _silu_and_mul_quantized_tile(
            tl.program_id(0), x_ptr, q_ptr, scale_ptr, out_ptr, stride_x, stride_q, stride_o,
            n_rows, N_COLS, KEEP, THREADS, ASM, FOLD, BLOCK_ROWS, BLOCK_N)
    else:
        for tile in range(tl.program_id(0), n_tiles, tl.num_programs(0)):
            _silu_and_mul_quantized_tile(
                tile, x_ptr, q_ptr, scale_ptr, out_ptr, stride_x, stride_q, stride_o,
                n_rows, N_COLS, KEEP, THREADS, ASM, FOLD, BLOCK_ROWS, BLOCK_N)
    # fmt: on


@triton.jit
def _silu_and_mul_quantized_tile(
    tile,
    x_ptr,
    q_ptr,
    scale_ptr,
    out_ptr,
    stride_x,
    stride_q,
    stride_o,
    n_rows,
    N_COLS: tl.constexpr,
    KEEP: tl.constexpr,
    THREADS: tl.constexpr,
    ASM: tl.constexpr,
    FOLD: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    cols = tl.arange(0, BLOCK_N)[None, :]
    row = tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    row_ok = (row < n_rows)[:, None]
    row64 = row.to(tl.int64)[:, None]
    gates = x_ptr + row64 * stride_x + cols
    q_rows = q_ptr + row64 * stride_q  # [BLOCK_ROWS, 1]
    out_rows = out_ptr + row64 * stride_o + cols

    if BLOCK_N >= N_COLS:
        ok = row_ok & (cols < N_COLS)
        result = _activated(gates, ok, N_COLS, ASM)
        if KEEP:
            tl.store(out_rows, result, mask=ok)
        values = result.to(tl.float32)
        scale, inverse = scales_of(values, THREADS)
        store_codes(q_rows, cols, values, inverse, ok, dtype, THREADS, FOLD, BLOCK_ROWS, BLOCK_N)
    else:
        top = tl.zeros([BLOCK_ROWS, BLOCK_N], tl.float32)
        spoilt = tl.zeros([BLOCK_ROWS, BLOCK_N], tl.float32)
        for start in range(0, N_COLS, BLOCK_N):
            ok = row_ok & (start + cols < N_COLS)
            result = _activated(gates + start, ok, N_COLS, ASM)
            top, spoilt = collect(result.to(tl.float32), top, spoilt, THREADS)
        scale, inverse = scales_of_collected(top, spoilt, THREADS)
        # Rows are written here, not above: they may take the place of the gates.
        for start in range(0, N_COLS, BLOCK_N):
            ok = row_ok & (start + cols < N_COLS)
            result = _activated(gates + start, ok, N_COLS, ASM)
            if KEEP:
                tl.store(out_rows + start, result, mask=ok)
            store_codes(
                q_rows, start + cols, result.to(tl.float32), inverse, ok, dtype,
                THREADS, FOLD, BLOCK_ROWS, BLOCK_N)  # fmt: skip
    tl.store(scale_ptr + row, scale, mask=row < n_rows)


@triton.jit
def _activated(gates, ok, N_COLS: tl.constexpr, ASM: tl.constexpr):
    """silu(gate) * up as ``silu_and_mul`` stores it."""
    gate = tl.load(gates, mask=ok, other=0.0).to(tl.float32)
    up = tl.load(gates + N_COLS, mask=ok, other=0.0).to(tl.float32)
    # The same steps as there: the bits must be.
    silu = tl.where(gate < -88.0, 0.0, gate / (1.0 + tl.exp(-gate)))
    return as_stored(silu * up, gates.dtype.element_ty, ASM)


@op
def silu_and_mul_quantized(
    x: torch.Tensor,
    *,
    keep: bool = False,
    q_out: torch.Tensor | None = None,
    scale_out: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    config: Config | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``silu(gate) * up``, where ``x`` holds gate and up side by side, and int8 codes of the rows.

    It gives what ``quantize_per_token`` makes of the result of ``silu_and_mul``. Three tensors come
    back always, because an operator's results are of a fixed number: without ``keep`` the last one
    has no rows, and nothing is written for it.

    Args:
        x: [n_rows, 2 * n_cols], fp32, bf16 or fp16; n_cols >= 1, contiguous columns, any row
            stride.
        keep: write the activated rows too.
        q_out: int8 [n_rows, n_cols], contiguous columns: where the codes go.
        scale_out: fp32 [n_rows], contiguous: where the scales go. Neither may share memory with
            another argument.
        out: where the activated rows go, [n_rows, n_cols] of the dtype of ``x``, without ``keep``
            [0, n_cols]; may be the gate half of ``x`` itself.
        config: launch config; None looks it up.

    Returns:
        ``(q_out, scale_out, out)``; each is a new contiguous tensor where None was given. A row
        whose activated values are not all finite has the scale NaN and the codes 0, a row of zeros
        the scale 0.

    Raises:
        TypeError, ValueError: an argument of the wrong kind, shape, dtype, stride or device.
    """
    if q_out is None or scale_out is None or out is None:
        check_tensor(_OP, "x", x)
        n_cols = _check_x(x)
        q_out = quantized_rows.new_codes(x, n_cols) if q_out is None else q_out
        scale_out = quantized_rows.new_scales(x) if scale_out is None else scale_out
        out = quantized_rows.new_kept(x, n_cols, keep) if out is None else out
    plan = planned(_plan, config, (x, q_out, scale_out, out), keep)
    if plan is not None:
        launch, numbers = plan
        launch(x, q_out, scale_out, out if keep else x, *numbers)
    return q_out, scale_out, out


def _check_x(x: torch.Tensor) -> int:
    """``x`` is [n_rows, 2 * n_cols]; returns n_cols."""
    quantized_rows.check_matrix(_OP, x)
    if x.shape[1] % 2:
        raise ValueError(f"{_OP}: x must have shape [n_rows, 2 * n_cols], got {describe(x)}")
    return x.shape[1] // 2


def _plan(
    x: torch.Tensor,
    q_out: torch.Tensor,
    scale_out: torch.Tensor,
    out: torch.Tensor,
    keep: bool,
    config: Config | None,
) -> rows.RowPlan | None:
    n_cols = _check_x(x)
    quantized_rows.check_results(_OP, x, n_cols, keep, out, q_out, scale_out)
    strides = (x.stride(0), q_out.stride(0), out.stride(0))
    return quantized_rows.plan(
        SPEC, _silu_and_mul_quantized_kernel, x, n_cols, keep, strides, config
    )


# ---- facts for tests, bench and tuner --------------------------------------------------------

_LIVE = 3  # fp32 values an element that are alive at once: gate, up, result


def _shape(
    *, tokens: int, intermediate: int, keep: bool = False, dtype: torch.dtype = torch.bfloat16
) -> Problem:
    """The activation of an MLP whose gate and up projection have ``intermediate`` columns each."""
    return quantized_rows.problem(tokens, intermediate, dtype, keep=keep)


def _make_inputs(problem: Problem, dev: torch.device) -> dict[str, Any]:
    """Rows whose results are nearly whole numbers of steps; the second of zeros.

    Whether results are rounded to 16 bits decides many codes of random rows, and the truth that
    codes are held against is computed without that rounding. Here ``up`` makes them whole: exactly
    beside a gate of 32, which silu leaves alone, and elsewhere up to the rounding of ``up`` and of
    the result, 2^-8 each in bf16, which leaves codes up to 60 where they are.
    """
    n_rows, n_cols, dtype = problem["n_rows"], problem["n_cols"], problem["dtype"]
    generator = torch.Generator().manual_seed(0)
    step = 2.0 ** -(torch.arange(n_rows) % 5)[:, None]
    kinds = torch.tensor([-3.0, -1.5, -0.5, 0.5, 1.0, 2.5, 9.0, 32.0])
    gate = kinds[torch.randint(0, len(kinds), (n_rows, n_cols), generator=generator)]
    codes = torch.randint(-60, 61, (n_rows, n_cols), generator=generator)
    codes = torch.where(gate == 32.0, 2 * codes + 1, codes)
    up = codes * step / torch.nn.functional.silu(gate)
    largest = (torch.arange(n_rows) * 61 % n_cols)[:, None]
    gate.scatter_(1, largest, 32.0)
    up.scatter_(1, largest, 127.0 / 32.0 * step)
    x = torch.cat([gate, up], 1)
    x[1:2] = 0
    return {"x": x.to(dtype).to(dev), "keep": problem["keep"]}


def _default_config(problem: Problem, dev: Device) -> Config:
    return quantized_rows.default_config(problem, dev, live=_LIVE)


def _why_illegal(config: Config, problem: Problem, dev: Device) -> str | None:
    return quantized_rows.why_illegal(config, problem, dev, live=_LIVE)


def _cost(problem: Problem) -> Cost:
    n = problem["n_rows"] * problem["n_cols"]
    item = problem["dtype"].itemsize
    return Cost(flops=8 * n, bytes=n * ((2 + problem["keep"]) * item + 1) + 4 * problem["n_rows"])


def _providers(inputs: dict[str, Any]) -> dict[str, Any]:
    """The two kernels that this one is."""
    x = inputs["x"]

    def unfused() -> tuple[torch.Tensor, ...]:
        result = silu_and_mul(x)
        return (*quantize_per_token(result), result)

    return {"unfused": unfused}


SPEC = register(
    KernelSpec(
        name=_OP,
        launch=silu_and_mul_quantized,
        reference=silu_and_mul_quantized_ref,
        problem_fields=quantized_rows.FIELDS,
        make_inputs=_make_inputs,
        cases=quantized_rows.cases(12288),
        tuning_key=quantized_rows.tuning_key,
        space=quantized_rows.space,
        default_config=_default_config,
        why_illegal=_why_illegal,
        cost=_cost,
        outputs=("q_out", "scale_out", "out"),
        providers=_providers,
        shape=_shape,
    )
)
