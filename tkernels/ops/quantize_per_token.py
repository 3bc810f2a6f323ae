"""int8 codes of activations, with a scale a token: what ``masked_gemm`` multiplies.

    scale[m] = max_k |x[m, k]| / 127
    out[m, k] = round_half_even(x[m, k] * 127 / max_k |x[m, k]|)

x: [n_rows, n_cols], rows anywhere in memory, columns contiguous. out: int8, same shape. scale_out:
fp32 [n_rows]. A row of zeros (nothing in it reaches 2^-100) gets the scale 0. A row with a NaN or
an infinity gets the scale NaN and the codes 0, so that all that is made of it reads NaN.

A row that fits one tile is read once; a wider one is read twice, in column blocks.
"""

from __future__ import annotations

from typing import Any

import torch

from tkernels import device, rows
from tkernels.check import (
    check_dtype,
    check_last_contiguous,
    check_no_overlap,
    check_shape,
    check_tensor,
)
from tkernels.config import planned, resolve
from tkernels.device import Device, bind, cdiv, tl, triton
from tkernels.ops.paged_attn import _has_pdl, _let_next_kernel_start, _wait_for_earlier_kernels
from tkernels.quantized_rows import collect, scales_of, scales_of_collected, store_codes
from tkernels.registry import Case, Config, Cost, KernelSpec, Problem, op, register

_OP = "quantize_per_token"
# Warps a core of ``quantize_ahead``. Each program waits at its end for the kernel that it runs
# beside, and who found no place till then would start only behind that.
_AHEAD_WARPS = 32


def quantize_per_token_ref(
    x: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    scale_out: torch.Tensor | None = None,
    config: Config | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """PyTorch version of ``quantize_per_token``: the same bits."""
    values = x.float()
    finite = values.isfinite().all(1)
    absmax = values.abs().amax(1)
    absmax = torch.where(absmax < 2.0**-100, 0.0, absmax)
    most = torch.full_like(absmax, 127.0)  # by a number, torch multiplies on some devices
    scale = torch.where(finite, absmax / most, torch.nan)
    some = finite & (absmax > 0)
    inverse = torch.where(some, most / torch.where(some, absmax, 1.0), 0.0)
    steps = torch.where(some[:, None], values * inverse[:, None], 0.0)
    codes = steps.clamp(-127.0, 127.0).round().to(torch.int8)
    return (
        codes if out is None else out.copy_(codes),
        scale if scale_out is None else scale_out.copy_(scale),
    )


@triton.jit
def _quantize_per_token_kernel(
    x_ptr,
    out_ptr,
    scale_ptr,
    stride_x,
    stride_o,
    n_rows,
    n_tiles,
    N_COLS: tl.constexpr,
    ONE_TILE: tl.constexpr,  # a program has one tile, so it need not loop
    AHEAD: tl.constexpr,  # x was there before the kernel launched last was, and nothing reads out
    PDL: tl.constexpr,
    THREADS: tl.constexpr,  # the chip has some
    FOLD: tl.constexpr,  # numbers of a row that become int8 at once; 0: all
    BLOCK_ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    if PDL:
        _let_next_kernel_start()
        if not AHEAD:
            _wait_for_earlier_kernels()
    # fmt: off
    if ONE_TILE:
        tile = tl.program_id(0)
        if THREADS:  # The rows written last, by most kernels, are in cache yet.
            tile = n_tiles - 1 - tile
        _quantize_tile(
            tile, x_ptr, out_ptr, scale_ptr, stride_x, stride_o, n_rows,
            N_COLS, THREADS, FOLD, BLOCK_ROWS, BLOCK_N)
    else:
        for tile in range(tl.program_id(0), n_tiles, tl.num_programs(0)):
            _quantize_tile(
                tile, x_ptr, out_ptr, scale_ptr, stride_x, stride_o, n_rows,
                N_COLS, THREADS, FOLD, BLOCK_ROWS, BLOCK_N)
    # fmt: on
    if PDL and AHEAD:  # who waits for this kernel must not run before the earlier ones have ended
        _wait_for_earlier_kernels()


@triton.jit
def _quantize_tile(
    tile,
    x_ptr,
    out_ptr,
    scale_ptr,
    stride_x,
    stride_o,
    n_rows,
    N_COLS: tl.constexpr,
    THREADS: tl.constexpr,
    FOLD: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    row = tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    row_ok = row < n_rows
    row64 = row.to(tl.int64)[:, None]
    column = tl.arange(0, BLOCK_N)[None, :]
    xs = x_ptr + row64 * stride_x + column
    out_rows = out_ptr + row64 * stride_o  # [BLOCK_ROWS, 1]
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    if N_COLS <= BLOCK_N:
        ok = row_ok[:, None] & (column < N_COLS)
        x = tl.load(xs, mask=ok, other=0.0).to(tl.float32)
        scale, inverse = scales_of(x, THREADS)
        store_codes(out_rows, column, x, inverse, ok, dtype, THREADS, FOLD, BLOCK_ROWS, BLOCK_N)
    else:
        top = tl.zeros([BLOCK_ROWS, BLOCK_N], tl.float32)
        spoilt = tl.zeros([BLOCK_ROWS, BLOCK_N], tl.float32)
        for start in range(0, N_COLS, BLOCK_N):
            ok = row_ok[:, None] & (column < N_COLS - start)
            x = tl.load(xs + start, mask=ok, other=0.0).to(tl.float32)
            top, spoilt = collect(x, top, spoilt, THREADS)
        scale, inverse = scales_of_collected(top, spoilt, THREADS)
        for start in range(0, N_COLS, BLOCK_N):
            ok = row_ok[:, None] & (column < N_COLS - start)
            x = tl.load(xs + start, mask=ok, other=0.0).to(tl.float32)
            store_codes(
                out_rows, start + column, x, inverse, ok, dtype, THREADS, FOLD, BLOCK_ROWS, BLOCK_N
            )
    tl.store(scale_ptr + row, scale, mask=row_ok)


@op
def quantize_per_token(
    x: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    scale_out: torch.Tensor | None = None,
    config: Config | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """int8 codes of each row of x and its scale: x is about codes * scale.

    Args:
        x: [n_rows, n_cols], fp32, bf16 or fp16, contiguous columns, any row stride.
        out: int8 [n_rows, n_cols], contiguous columns, any row stride, written and returned.
        scale_out: fp32 [n_rows], contiguous, written and returned. Neither may share memory with x
            or the other.
        config: launch config; None looks it up.

    Returns:
        (codes, scale). A row with a NaN or an infinity has the scale NaN and the codes 0, a row of
        zeros the scale 0.

    Raises:
        TypeError, ValueError: an argument of the wrong kind, shape, dtype, stride or device.
    """
    if out is None or scale_out is None:
        check_tensor(_OP, "x", x)
        _check_x(x)
        if out is None:
            out = torch.empty(x.shape, dtype=torch.int8, device=x.device)
        if scale_out is None:
            scale_out = torch.empty(x.shape[:1], dtype=torch.float32, device=x.device)
    plan = planned(_plan, config, (x, out, scale_out))
    if plan is not None:
        launch, numbers = plan
        launch(x, out, scale_out, *numbers)
    return out, scale_out


def quantize_ahead(x: torch.Tensor, out: torch.Tensor, scale_out: torch.Tensor) -> None:
    """``quantize_per_token`` beside the kernel that was launched last, not behind it.

    That kernel must let the next one start no sooner than all before it have ended, x must come
    from one of these, and it must not touch ``out`` or ``scale_out``.
    """
    if torch.compiler.is_compiling():  # who knows what a compiler launches last
        quantize_per_token(x, out=out, scale_out=scale_out)
        return
    plan = planned(_plan_ahead, None, (x, out, scale_out))
    if plan is not None:
        launch, numbers = plan
        launch(x, out, scale_out, *numbers)


def _check_x(x: torch.Tensor) -> None:
    rows.check_row_input(_OP, "x", x)
    check_shape(_OP, "x", x, n_rows=None, n_cols=None)


def _plan_ahead(
    x: torch.Tensor, out: torch.Tensor, scale_out: torch.Tensor, config: Config | None
) -> rows.RowPlan | None:
    return _plan(x, out, scale_out, config, ahead=True)


def _plan(
    x: torch.Tensor,
    out: torch.Tensor,
    scale_out: torch.Tensor,
    config: Config | None,
    *,
    ahead: bool = False,
) -> rows.RowPlan | None:
    _check_x(x)
    n_rows, n_cols = x.shape
    for name, t in (("out", out), ("scale_out", scale_out)):
        check_tensor(_OP, name, t)
    check_dtype(_OP, "out", out, (torch.int8,))
    check_shape(_OP, "out", out, n_rows=n_rows, n_cols=n_cols)
    check_last_contiguous(_OP, "out", out)
    check_no_overlap(_OP, "out", out)
    check_dtype(_OP, "scale_out", scale_out, (torch.float32,))
    check_shape(_OP, "scale_out", scale_out, n_rows=n_rows)
    check_last_contiguous(_OP, "scale_out", scale_out)
    check_no_overlap(_OP, "scale_out", scale_out)
    rows.row_layout(_OP, ["x", "out"], [x, out])  # not more rows than 32 bits count
    if n_rows == 0:
        return None
    cfg, max_programs = resolve(SPEC, (n_rows, n_cols, x.dtype), config)
    n_tiles = cdiv(n_rows, cfg["BLOCK_ROWS"])
    dev = device.current()
    if ahead:
        per_core = max(1, _AHEAD_WARPS // cfg.get("num_warps", _AHEAD_WARPS))
        max_programs = min(max_programs, per_core * dev.num_cores)
    programs = min(n_tiles, max_programs)
    cfg.setdefault("PDL", False)  # Ascend has none
    launch = bind(
        _quantize_per_token_kernel,
        (programs,),
        N_COLS=n_cols,
        ONE_TILE=programs == n_tiles,
        AHEAD=ahead,
        THREADS=dev.registers > 0,
        FOLD=64 if dev.is_npu and cfg["BLOCK_N"] >= 64 else 0,
        **cfg,
        **({"launch_pdl": True} if cfg["PDL"] else {}),
    )
    return launch, (x.stride(0), out.stride(0), n_rows, n_tiles)


# ---- facts for tests, bench and tuner --------------------------------------------------------

_LIVE = 2  # fp32 values an element that are alive at once: x, its code


def quantize_problem(n_rows: int, n_cols: int, dtype: torch.dtype) -> dict[str, Any]:
    """Problem of a matrix of activations."""
    return {"n_rows": n_rows, "n_cols": n_cols, "dtype": dtype}


def _shape(*, tokens: int, hidden: int, dtype: torch.dtype = torch.bfloat16) -> Problem:
    """``tokens`` rows of ``hidden`` activations."""
    return quantize_problem(tokens, hidden, dtype)


def _row_problem(problem: Problem) -> dict[str, Any]:
    return rows.row_problem(problem["n_rows"], problem["n_cols"], problem["dtype"])


def _make_inputs(problem: Problem, dev: torch.device) -> dict[str, Any]:
    """Gaussian rows, the second of zeros."""
    x = rows.random_rows(_row_problem(problem), dev, seed=0)
    x[1:2] = 0
    return {"x": x}


def _tuning_key(problem: Problem) -> dict[str, Any]:
    return rows.row_tuning_key(_row_problem(problem))


def _space(dev: Device) -> dict[str, list[Any]]:
    space: dict[str, list[Any]] = {**rows.row_space(dev)}
    return {**space, "PDL": [False, True] if _has_pdl(dev) else [False]} if dev.registers else space


def _default_config(problem: Problem, dev: Device) -> Config:
    config = rows.default_row_config(_row_problem(problem), dev, live=_LIVE)
    if dev.registers:
        # Many narrow rows: a warp has two, and nothing to exchange with others.
        if config["BLOCK_N"] <= 1024 and problem["n_rows"] >= 16 * dev.num_cores:
            config |= {"BLOCK_ROWS": 2, "num_warps": 1}
        return {**config, "PDL": _has_pdl(dev)}
    return {**config, "BLOCK_ROWS": min(config["BLOCK_ROWS"], 4, max(1, 4096 // config["BLOCK_N"]))}


def _why_illegal(config: Config, problem: Problem, dev: Device) -> str | None:
    if config.get("PDL") and not _has_pdl(dev):
        return f"PDL needs sm90 or later, got {dev.arch}"
    if dev.is_npu and (config["BLOCK_ROWS"] > 4 or config["BLOCK_ROWS"] * config["BLOCK_N"] > 4096):
        # Measured by Huawei's compiler: how it makes int8 of more takes several times their bytes.
        return f"a tile has at most 4 rows and 4096 numbers on an NPU, got {config}"
    return rows.why_illegal_rows(config, _row_problem(problem), dev, live=_LIVE)


def _cost(problem: Problem) -> Cost:
    n = problem["n_rows"] * problem["n_cols"]
    return Cost(flops=3 * n, bytes=n * (problem["dtype"].itemsize + 1) + 4 * problem["n_rows"])


_EDGE = frozenset({"edge"})
_BENCH = frozenset({"bench"})
_P = quantize_problem
_BF16, _FP16, _FP32 = torch.bfloat16, torch.float16, torch.float32

SPEC = register(
    KernelSpec(
        name=_OP,
        launch=quantize_per_token,
        reference=quantize_per_token_ref,
        problem_fields=("n_rows", "n_cols", "dtype"),
        make_inputs=_make_inputs,
        cases=(
            Case("5x64-bf16", _P(5, 64, _BF16)),
            Case("3x1000-fp32", _P(3, 1000, _FP32)),
            Case("2x1-fp16", _P(2, 1, _FP16), _EDGE),
            Case("1x33-bf16", _P(1, 33, _BF16), _EDGE),
            Case("2x4097-fp32", _P(2, 4097, _FP32), _EDGE),
            Case("2x20000-fp16", _P(2, 20000, _FP16), _EDGE),
            *(
                Case(f"{t}x{h}-bf16", _P(t, h, _BF16), _BENCH)
                for t, h in ((1, 4096), (64, 4096), (4096, 4096), (16384, 5120), (32768, 768))
            ),
        ),
        tuning_key=_tuning_key,
        space=_space,
        default_config=_default_config,
        why_illegal=_why_illegal,
        cost=_cost,
        outputs=("out", "scale_out"),
        shape=_shape,
    )
)
