"""A linear layer of few rows, whose weights are read once: decode steps of one or a few sequences.

    h[m, :]   = x[m, :], or x[m, :] / sqrt(mean(x[m, :]^2) + eps) * norm_weight
    y[m, n]   = sum over k of h[m, k] * weight[n, k] + bias[n]
    y[m, n]   = silu(y[m, n]) * y[m, N + n]                      gated, of a weight of 2 N rows
    out[m, n] = y[m, n] + residual[m, n]

x: [M, K]; norm_weight: [K]; weight: [N, K] or [2 N, K]; residual, out: [M, N]; fp32, bf16 or fp16,
sums in fp32. Nothing is rounded between these steps but h, where it is said. So an MLP is two
launches: one for its norm, gate, up and activation, one for what is added to the sums that came in.
Every program norms the rows that it multiplies, which is less work than a launch.

Any number of rows is right; few are fast. In ``variant`` "dot" BLOCK_M rows share what is read of
weights, in matrix instructions. In "vector" a program has one row and multiplies in fp32, element
by element: a row has no use for more, and its sums need no layout but that in which weights arrive.
It asks for its first weights before it waits for the kernel that writes x to end (``PDL``), and for
the next ones before it multiplies (``AHEAD``) or behind that. On Hopper "hopper" does so with much
more of the weights, see ``skinny_linear_hopper``.

With a norm, "vector" scales at the end: sum(w * x * g) / rms(x) needs x once. So does "hopper",
which rounds x * g to x's dtype. "dot" rounds h, as separate kernels do, and goes over x twice.

Of 2 to 64 rows "core" and "stream" (``skinny_linear_rows``) are products alone, for Hopper.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from tkernels import device, rows, skinny_linear_hopper, skinny_linear_rows
from tkernels.check import (
    FLOAT_DTYPES,
    check_dtype,
    check_last_contiguous,
    check_no_overlap,
    check_own,
    check_positive,
    check_shape,
    check_tensor,
    describe,
    new_output,
)
from tkernels.config import planned, resolve
from tkernels.device import bind, cdiv, next_power_of_2, tl, triton
from tkernels.ops.masked_gemm import _by_address
from tkernels.ops.paged_attn import _let_next_kernel_start, _wait_for_earlier_kernels
from tkernels.registry import Case, Config, KernelSpec, op, register
from tkernels.skinny_linear_facts import (
    FIELDS,
    linear_cost,
    linear_default,
    linear_illegal,
    linear_inputs,
    linear_problem,
    linear_shape,
    linear_space,
    linear_tuning_key,
    portable_config,
)

_OP = "skinny_linear"


def skinny_linear_ref(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    silu_and_mul: bool = False,
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    config: Config | None = None,
) -> torch.Tensor:
    """PyTorch version of ``skinny_linear``."""
    h = x.float()
    if norm_weight is not None:
        h = torch.nn.functional.rms_norm(h, x.shape[-1:], norm_weight.float(), eps)
    y = torch.nn.functional.linear(h, weight.float(), None if bias is None else bias.float())
    if silu_and_mul:
        gate, up = y.chunk(2, -1)
        y = torch.nn.functional.silu(gate) * up
    if residual is not None:
        y = y + residual.float()
    return y.to(x.dtype) if out is None else out.copy_(y)


# ---- kernel ----------------------------------------------------------------------------------
# fmt: off


@triton.jit
def _weights(w_ptr, stride_w, rows, start, n_out, n_inner, EVEN_K: tl.constexpr,
             EVEN_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """[BLOCK_N, BLOCK_K] of the weights at ``rows``, of which there are n_out; 0 past the ends."""
    k = start + tl.arange(0, BLOCK_K)
    at = w_ptr + rows.to(tl.int64)[:, None] * stride_w + k[None, :]
    if EVEN_K and EVEN_N:
        w = tl.load(at)
    else:
        w = tl.load(at, mask=(rows < n_out)[:, None] & (k < n_inner)[None, :], other=0.0)
    return w


@triton.jit
def _following(
    w, w_ptr, stride_w, rows, start, n_out, n_inner, EVEN_K: tl.constexpr, EVEN_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """The weights behind those at ``start``, if there are any; else w."""
    if start + BLOCK_K < n_inner:
        w = _weights(
            w_ptr, stride_w, rows, start + BLOCK_K, n_out, n_inner, EVEN_K, EVEN_N, BLOCK_K)
    return w


@triton.jit
def _biased(y, bias_ptr, cols, n_cols, HAS_BIAS: tl.constexpr):
    if HAS_BIAS:
        y += tl.load(bias_ptr + cols, mask=cols < n_cols, other=0.0).to(tl.float32)
    return y


@triton.jit
def _put(y, at, residual_at, ok, out_ptr, HAS_RESIDUAL: tl.constexpr):
    if HAS_RESIDUAL:
        y += tl.load(residual_at, mask=ok, other=0.0).to(tl.float32)
    tl.store(at, y.to(out_ptr.dtype.element_ty), mask=ok)


@triton.jit
def _one_row(
    row, cols, x_ptr, gain_ptr, w_ptr, up_ptr, bias_ptr, up_bias_ptr, residual_ptr, out_ptr,
    stride_x, stride_w, stride_r, stride_o, n_cols, n_inner, eps,
    HAS_NORM: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    GATED: tl.constexpr, EVEN_K: tl.constexpr, EVEN_N: tl.constexpr, AHEAD: tl.constexpr,
    PDL: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):
    """One row and BLOCK_N columns, multiplied element by element."""
    if PDL:
        _let_next_kernel_start()
    w = _weights(w_ptr, stride_w, cols, 0, n_cols, n_inner, EVEN_K, EVEN_N, BLOCK_K)
    if GATED:
        v = _weights(up_ptr, stride_w, cols, 0, n_cols, n_inner, EVEN_K, EVEN_N, BLOCK_K)
    if PDL:
        _wait_for_earlier_kernels()
    row64 = row.to(tl.int64)
    if HAS_RESIDUAL:  # volatile: or it would be asked for where it is added, and waited for
        residual = tl.load(
            residual_ptr + row64 * stride_r + cols, mask=cols < n_cols, other=0.0, volatile=True)
    acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    if GATED:
        up_acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    squares = tl.zeros([BLOCK_K], tl.float32)
    for start in range(0, n_inner, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        h = tl.load(x_ptr + row64 * stride_x + k, mask=k < n_inner, other=0.0).to(tl.float32)
        if HAS_NORM:
            squares += h * h
            h *= tl.load(gain_ptr + k, mask=k < n_inner, other=0.0).to(tl.float32)
        w_now = w
        if GATED:
            v_now = v
        if AHEAD:
            w = _following(
                w, w_ptr, stride_w, cols, start, n_cols, n_inner, EVEN_K, EVEN_N, BLOCK_K)
            if GATED:
                v = _following(
                    v, up_ptr, stride_w, cols, start, n_cols, n_inner, EVEN_K, EVEN_N, BLOCK_K)
        acc += w_now.to(tl.float32) * h[None, :]
        if GATED:
            up_acc += v_now.to(tl.float32) * h[None, :]
        if not AHEAD:
            w = _following(
                w, w_ptr, stride_w, cols, start, n_cols, n_inner, EVEN_K, EVEN_N, BLOCK_K)
            if GATED:
                v = _following(
                    v, up_ptr, stride_w, cols, start, n_cols, n_inner, EVEN_K, EVEN_N, BLOCK_K)
    y = tl.sum(acc, 1)
    scale = 1.0
    if HAS_NORM:
        scale = tl.rsqrt(tl.sum(squares, 0) / n_inner + eps)
        y = y * scale
    y = _biased(y, bias_ptr, cols, n_cols, HAS_BIAS)
    if GATED:
        up = tl.sum(up_acc, 1)
        if HAS_NORM:
            up = up * scale
        up = _biased(up, up_bias_ptr, cols, n_cols, HAS_BIAS)
        y = y / (1.0 + tl.exp(-y)) * up
    if HAS_RESIDUAL:
        y += residual.to(tl.float32)
    tl.store(out_ptr + row64 * stride_o + cols, y.to(out_ptr.dtype.element_ty), mask=cols < n_cols)


@triton.jit
def _some_rows(
    row0, cols, x_ptr, gain_ptr, w_ptr, up_ptr, bias_ptr, up_bias_ptr, residual_ptr, out_ptr,
    stride_x, stride_w, stride_r, stride_o, n_rows, n_cols, n_inner, eps,
    HAS_NORM: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    GATED: tl.constexpr, EVEN_K: tl.constexpr, EVEN_N: tl.constexpr, PDL: tl.constexpr,
    SWAP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):
    """BLOCK_M rows and BLOCK_N columns, in matrix instructions."""
    if PDL:
        _let_next_kernel_start()
        _wait_for_earlier_kernels()
    rows = row0 + tl.arange(0, BLOCK_M)
    row_ok = (rows < n_rows)[:, None]
    row64 = rows.to(tl.int64)[:, None]
    x_rows = x_ptr + row64 * stride_x
    scale = tl.full([BLOCK_M, 1], 1.0, tl.float32)
    if HAS_NORM:
        squares = tl.zeros([BLOCK_M, BLOCK_K], tl.float32)
        for start in range(0, n_inner, BLOCK_K):
            k = (start + tl.arange(0, BLOCK_K))[None, :]
            ok = row_ok & (k < n_inner)
            h = tl.load(x_rows + k, mask=ok, other=0.0).to(tl.float32)
            squares += h * h
        scale = tl.rsqrt(tl.sum(squares, 1) / n_inner + eps)[:, None]
    if SWAP:
        acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        if GATED:
            up_acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    else:
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        if GATED:
            up_acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, n_inner, BLOCK_K):
        k = (start + tl.arange(0, BLOCK_K))[None, :]
        ok = row_ok & (k < n_inner)
        h = tl.load(x_rows + k, mask=ok, other=0.0)
        if HAS_NORM:
            gain = tl.load(gain_ptr + k, mask=k < n_inner, other=0.0).to(tl.float32)
            h = (h.to(tl.float32) * scale * gain).to(x_ptr.dtype.element_ty)
        w = _weights(w_ptr, stride_w, cols, start, n_cols, n_inner, EVEN_K, EVEN_N, BLOCK_K)
        if SWAP:
            acc = tl.dot(w, tl.trans(h), acc, input_precision="ieee")
        else:
            acc = tl.dot(h, tl.trans(w), acc, input_precision="ieee")
        if GATED:
            v = _weights(up_ptr, stride_w, cols, start, n_cols, n_inner, EVEN_K, EVEN_N, BLOCK_K)
            if SWAP:
                up_acc = tl.dot(v, tl.trans(h), up_acc, input_precision="ieee")
            else:
                up_acc = tl.dot(h, tl.trans(v), up_acc, input_precision="ieee")
    if SWAP:
        acc = tl.trans(acc)
    y = _biased(acc, bias_ptr, cols[None, :], n_cols, HAS_BIAS)
    if GATED:
        if SWAP:
            up_acc = tl.trans(up_acc)
        up = _biased(up_acc, up_bias_ptr, cols[None, :], n_cols, HAS_BIAS)
        y = y / (1.0 + tl.exp(-y)) * up
    _put(y, out_ptr + row64 * stride_o + cols[None, :],
         residual_ptr + row64 * stride_r + cols[None, :], row_ok & (cols < n_cols)[None, :],
         out_ptr, HAS_RESIDUAL)


@triton.jit(do_not_specialize=["n_rows", "n_m", "n_tiles"])
def _skinny_linear_kernel(
    x_ptr, gain_ptr, w_ptr, bias_ptr, residual_ptr, out_ptr,
    stride_x, stride_w, stride_r, stride_o, n_cols, n_inner, n_rows, n_m, n_tiles, eps,
    HAS_NORM: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    GATED: tl.constexpr, EVEN_K: tl.constexpr, EVEN_N: tl.constexpr, PDL: tl.constexpr,
    SWAP: tl.constexpr, AHEAD: tl.constexpr, DOT: tl.constexpr, ONE_TILE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):
    up_ptr = w_ptr + tl.cast(n_cols, tl.int64) * stride_w
    up_bias_ptr = bias_ptr + n_cols
    if ONE_TILE:
        _skinny_linear_tile(
            tl.program_id(0), x_ptr, gain_ptr, w_ptr, up_ptr, bias_ptr, up_bias_ptr, residual_ptr,
            out_ptr, stride_x, stride_w, stride_r, stride_o, n_cols, n_inner, n_rows, n_m, eps,
            HAS_NORM, HAS_BIAS, HAS_RESIDUAL, GATED, EVEN_K, EVEN_N, PDL, SWAP, AHEAD, DOT,
            BLOCK_M, BLOCK_N, BLOCK_K)
    else:
        for tile in range(tl.program_id(0), n_tiles, tl.num_programs(0)):
            _skinny_linear_tile(
                tile, x_ptr, gain_ptr, w_ptr, up_ptr, bias_ptr, up_bias_ptr, residual_ptr, out_ptr,
                stride_x, stride_w, stride_r, stride_o, n_cols, n_inner, n_rows, n_m, eps,
                HAS_NORM, HAS_BIAS, HAS_RESIDUAL, GATED, EVEN_K, EVEN_N, PDL, SWAP, AHEAD, DOT,
                BLOCK_M, BLOCK_N, BLOCK_K)


@triton.jit
def _skinny_linear_tile(
    tile, x_ptr, gain_ptr, w_ptr, up_ptr, bias_ptr, up_bias_ptr, residual_ptr, out_ptr,
    stride_x, stride_w, stride_r, stride_o, n_cols, n_inner, n_rows, n_m, eps,
    HAS_NORM: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    GATED: tl.constexpr, EVEN_K: tl.constexpr, EVEN_N: tl.constexpr, PDL: tl.constexpr,
    SWAP: tl.constexpr, AHEAD: tl.constexpr, DOT: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):
    cols = tile // n_m * BLOCK_N + tl.arange(0, BLOCK_N)
    if DOT:
        _some_rows(
            tile % n_m * BLOCK_M, cols, x_ptr, gain_ptr, w_ptr, up_ptr, bias_ptr, up_bias_ptr,
            residual_ptr, out_ptr, stride_x, stride_w, stride_r, stride_o, n_rows, n_cols, n_inner,
            eps, HAS_NORM, HAS_BIAS, HAS_RESIDUAL, GATED, EVEN_K, EVEN_N, PDL, SWAP, BLOCK_M,
            BLOCK_N, BLOCK_K)
    else:
        _one_row(
            tile % n_m, cols, x_ptr, gain_ptr, w_ptr, up_ptr, bias_ptr, up_bias_ptr, residual_ptr,
            out_ptr, stride_x, stride_w, stride_r, stride_o, n_cols, n_inner, eps, HAS_NORM,
            HAS_BIAS, HAS_RESIDUAL, GATED, EVEN_K, EVEN_N, AHEAD, PDL, BLOCK_N, BLOCK_K)


# fmt: on


@op
def skinny_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    silu_and_mul: bool = False,
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    config: Config | None = None,
) -> torch.Tensor:
    """x @ W^T + bias of few rows; behind an RMSNorm, before ``silu_and_mul``, before a sum.

    Matrices have contiguous columns and any row stride.

    Args:
        x: [M, K >= 1], fp32, bf16 or fp16.
        weight: [N, K], or [2 N, K] with ``silu_and_mul``: gate rows, then up rows; dtype of x. With
            ``PDL`` it is read before kernels of this library that were launched just before have
            ended, so those must not write it, nor ``norm_weight``.
        bias: one number for each row of weight, dtype of x.
        norm_weight: [K], contiguous, fp32, bf16 or fp16: x is RMS-normalised first.
        eps: added to the mean square; > 0.
        silu_and_mul: the result is silu(gate) * up.
        residual: [M, N] of x's dtype, added in fp32 before the result is rounded.
        out: [M, N] of x's dtype, written and returned. It may be ``residual``, and share memory
            with no other argument.
        config: launch config; None looks it up.

    Returns:
        [M, N] of x's dtype.

    Raises:
        TypeError, ValueError: an argument of the wrong kind, shape, dtype, stride or device.
    """
    if out is None:
        out = _new_out(x, weight, silu_and_mul)
    else:
        check_own(_OP, "out", out, x=x, weight=weight)
    tensors: tuple[torch.Tensor, ...] = (x, weight, out)
    names: tuple[str, ...] = ()
    # What is not there is stood in for by something that is, and not read.
    gain = x
    if norm_weight is not None:
        gain, tensors, names = norm_weight, (*tensors, norm_weight), (*names, "norm_weight")
    if bias is not None:
        tensors, names = (*tensors, bias), (*names, "bias")
    if residual is not None:
        tensors, names = (*tensors, residual), (*names, "residual")
    plan = planned(_plan, config, tensors, names, silu_and_mul, eps)
    if plan is not None:
        plan(x, gain, weight, x if bias is None else bias, x if residual is None else residual, out)
    return out


def _new_out(x: torch.Tensor, weight: torch.Tensor, gated: Any) -> torch.Tensor:
    check_tensor(_OP, "x", x)
    check_tensor(_OP, "weight", weight)
    for what, t in (("x", x), ("weight", weight)):
        if t.dim() != 2:
            shape = "[M, K >= 1]" if what == "x" else "[N, K]"
            raise ValueError(f"{_OP}: {what} must have shape {shape}, got {describe(t)}")
    return new_output(_OP, x, (x.shape[0], weight.shape[0] // (2 if gated is True else 1)))


def _check(tensors: Mapping[str, torch.Tensor], gated: Any, eps: Any) -> None:
    """All that metadata can tell about the arguments."""
    if type(gated) is not bool:
        raise TypeError(f"{_OP}: silu_and_mul must be a bool, got {describe(gated)}")
    x, weight, out = (tensors[name] for name in ("x", "weight", "out"))
    check_tensor(_OP, "x", x)
    check_dtype(_OP, "x", x, FLOAT_DTYPES)
    if x.dim() != 2 or x.shape[1] == 0:
        raise ValueError(f"{_OP}: x must have shape [M, K >= 1], got {describe(x)}")
    m, k = x.shape
    check_tensor(_OP, "weight", weight)
    check_dtype(_OP, "weight", weight, (x.dtype,))
    halves = 2 if gated else 1
    if weight.dim() != 2 or weight.shape[1] != k or not len(weight) or len(weight) % halves:
        shape = f"[2 N >= 2, K={k}]" if gated else f"[N >= 1, K={k}]"
        raise ValueError(f"{_OP}: weight must have shape {shape}, got {describe(weight)}")
    most = 2**31 - 2**16  # rows and columns are counted in 32 bits
    for what, t in (("x", x), ("weight", weight)):
        if max(t.shape) > most:
            raise ValueError(
                f"{_OP}: {what} must have at most {most} rows and columns, got {describe(t)}"
            )
    for name in ("out", "residual"):
        if name in tensors:
            check_tensor(_OP, name, tensors[name])
            check_dtype(_OP, name, tensors[name], (x.dtype,))
            check_shape(_OP, name, tensors[name], M=m, N=len(weight) // halves)
    check_no_overlap(_OP, "out", out)
    if "bias" in tensors:
        check_tensor(_OP, "bias", tensors["bias"])
        check_dtype(_OP, "bias", tensors["bias"], (x.dtype,))
        check_shape(_OP, "bias", tensors["bias"], N=len(weight))
    if "norm_weight" in tensors:
        rows.check_weight(_OP, tensors["norm_weight"], k, "norm_weight")
    check_positive(_OP, "eps", eps)
    for what, t in tensors.items():
        check_last_contiguous(_OP, what, t)


_Run = Callable[..., None]


def _plan(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    *rest: Any,
    config: Config | None,
) -> _Run | None:
    """What launches it, of (x, norm_weight, weight, bias, residual, out); None: no rows."""
    *more, names, gated, eps = rest
    tensors = {"x": x, "weight": weight, "out": out, **dict(zip(names, more, strict=True))}
    _check(tensors, gated, eps)
    (m, k), n = x.shape, out.shape[1]
    if m == 0:
        return None
    residual = tensors.get("residual", out)
    facts = {
        "HAS_NORM": "norm_weight" in tensors,
        "HAS_BIAS": "bias" in tensors,
        "HAS_RESIDUAL": "residual" in tensors,
        "GATED": gated,
    }
    strides = tuple(t.stride(0) for t in (x, weight, residual, out))
    aligned = skinny_linear_hopper.fits(k, strides)
    key = (m, n, k, x.dtype, gated, facts["HAS_NORM"], facts["HAS_RESIDUAL"], aligned)
    cfg, max_programs = resolve(SPEC, key, config)
    if cfg["variant"] in ("vector", "dot"):
        return _bind((m, n, k), facts, strides, eps, cfg, max_programs)
    dev = device.current()
    other = portable_config(dict(zip(FIELDS, key, strict=True)), dev)
    del other["programs_per_core"]
    portable = _bind((m, n, k), facts, strides, eps, other, dev.max_programs)
    if cfg["variant"] == "hopper":
        return _by_address(_bind_hopper((m, n, k), facts, strides, eps, cfg), portable)
    if not skinny_linear_rows.is_aligned(k, strides[0], strides[1]):
        return portable  # one row for all
    of = strides[0], strides[1], strides[3]
    of_rows = skinny_linear_rows.bound((m, n, k), facts["HAS_BIAS"], of, cfg, max_programs)

    def described(*tensors: torch.Tensor) -> None:
        x, _, weight, bias, _, out = tensors
        of_rows(x, weight, bias, out)

    return _by_address(described, portable)


def _bind(
    sizes: tuple[int, int, int],
    facts: dict[str, bool],
    strides: tuple[int, ...],
    eps: float,
    config: Config,
    max_programs: int,
) -> _Run:
    m, n, k = sizes
    cfg = {"PDL": False, "SWAP": False, "AHEAD": False, **config}  # Ascend has none of these
    cfg.pop("SPLIT_K", None)
    n_m, n_n = cdiv(m, cfg["BLOCK_M"]), cdiv(n, cfg["BLOCK_N"])
    n_tiles = n_m * n_n
    if n_tiles > 2**31 - 2**16:
        raise ValueError(
            f"{_OP}: x must have at most {(2**31 - 2**16) // n_n} rows with {n} columns of the "
            f"result, got {m}"
        )
    programs = min(n_tiles, max_programs)
    launch = bind(
        _skinny_linear_kernel,
        (programs,),
        **facts,
        EVEN_K=k % cfg["BLOCK_K"] == 0,
        EVEN_N=n % cfg["BLOCK_N"] == 0,
        ONE_TILE=programs == n_tiles,
        DOT=cfg.pop("variant") == "dot",
        **cfg,
        **({"launch_pdl": True} if cfg["PDL"] else {}),
    )
    numbers = (*strides, n, k, m, n_m, n_tiles, eps)
    return lambda *tensors: launch(*tensors, *numbers)


def _bind_hopper(
    sizes: tuple[int, int, int],
    facts: dict[str, bool],
    strides: tuple[int, ...],
    eps: float,
    config: Config,
) -> _Run:
    m, n, k = sizes
    block_n, block_k, warps = (config[name] for name in ("BLOCK_N", "BLOCK_K", "num_warps"))
    launch = bind(
        skinny_linear_hopper._skinny_linear_hopper_kernel,
        (m * cdiv(n, block_n),),
        **facts,
        EVEN_K=k % block_k == 0,
        EVEN_N=n % block_n == 0,
        PDL=config["PDL"],
        N=block_n,
        K=block_k,
        X=max(block_k, next_power_of_2(k)),
        STAGES=config["num_stages"],
        W=warps,
        num_warps=warps,
        **({"launch_pdl": True} if config["PDL"] else {}),
    )
    of_x, of_w, of_r, of_o = strides
    numbers = (of_x // 8, of_w // 8, of_r, of_o, n, k, m, cdiv(k, block_k), eps)
    return lambda *tensors: launch(*tensors, *numbers)


# ---- facts for tests, bench and tuner --------------------------------------------------------


def _peers(inputs: dict[str, Any]) -> dict[str, Callable[[], Any]]:
    """cuBLAS, between our own kernels of what else is asked for."""
    from tkernels.ops.fused_add_rms_norm import fused_add_rms_norm
    from tkernels.ops.silu_and_mul import silu_and_mul

    x, weight = inputs["x"], inputs["weight"]
    bias, gain = inputs.get("bias"), inputs.get("norm_weight")
    before = torch.zeros_like(x)  # a network adds and norms in one

    def separate() -> Any:
        h = x if gain is None else fused_add_rms_norm(x, before, gain)[0]
        y = torch.nn.functional.linear(h, weight, bias)
        return silu_and_mul(y) if inputs.get("silu_and_mul") else y

    return {"cublas" if gain is None and not inputs.get("silu_and_mul") else "separate": separate}


_EDGE = frozenset({"edge"})
_BENCH = frozenset({"bench"})
_BF16, _FP16, _FP32 = torch.bfloat16, torch.float16, torch.float32
_P = linear_problem

# fmt: off
SPEC = register(
    KernelSpec(
        name=_OP,
        launch=skinny_linear,
        reference=skinny_linear_ref,
        problem_fields=FIELDS,
        make_inputs=linear_inputs,
        cases=(
            Case("5x40x96-fp16", _P(5, 40, 96, _FP16, bias=True, normed=True, residual=True)),
            Case("1x48x64-bf16", _P(1, 48, 64, bias=True, residual=True)),
            Case("gated-1x24x130-fp16", _P(1, 24, 130, _FP16, gated=True, bias=True), _EDGE),
            Case("gated-3x33x40-bf16", _P(3, 33, 40, gated=True, bias=True, normed=True), _EDGE),
            Case("1x1x1-fp32", _P(1, 1, 1, _FP32, normed=True), _EDGE),
            Case("1x37x257-fp32", _P(1, 37, 257, _FP32, normed=True, residual=True), _EDGE),
            Case("19x17x100-fp32", _P(19, 17, 100, _FP32, bias=True, residual=True), _EDGE),
            Case("normed-1x40x72-bf16", _P(1, 40, 72, normed=True, gated=True), _EDGE),
            # Qwen3-0.6B, 4B and 8B: qkv_proj, o_proj, gate_up_proj, down_proj
            Case("normed-1x4096x1024-bf16", _P(1, 4096, 1024, normed=True), _BENCH),
            Case("added-1x1024x2048-bf16", _P(1, 1024, 2048, residual=True), _BENCH),
            Case("gated-1x3072x1024-bf16", _P(1, 3072, 1024, normed=True, gated=True), _BENCH),
            Case("added-1x1024x3072-bf16", _P(1, 1024, 3072, residual=True), _BENCH),
            Case("normed-1x6144x2560-bf16", _P(1, 6144, 2560, normed=True), _BENCH),
            Case("added-1x2560x4096-bf16", _P(1, 2560, 4096, residual=True), _BENCH),
            Case("gated-1x9728x2560-bf16", _P(1, 9728, 2560, normed=True, gated=True), _BENCH),
            Case("added-1x2560x9728-bf16", _P(1, 2560, 9728, residual=True), _BENCH),
            Case("normed-1x6144x4096-bf16", _P(1, 6144, 4096, normed=True), _BENCH),
            Case("added-1x4096x4096-bf16", _P(1, 4096, 4096, residual=True), _BENCH),
            Case("gated-1x12288x4096-bf16", _P(1, 12288, 4096, normed=True, gated=True), _BENCH),
            Case("added-1x4096x12288-bf16", _P(1, 4096, 12288, residual=True), _BENCH),
            Case("1x151936x4096-bf16", _P(1, 151936, 4096), _BENCH),
            Case("added-4x4096x4096-bf16", _P(4, 4096, 4096, residual=True), _BENCH),
            Case("gated-4x12288x4096-bf16", _P(4, 12288, 4096, normed=True, gated=True), _BENCH),
            Case("added-16x4096x4096-bf16", _P(16, 4096, 4096, residual=True), _BENCH),
            *(
                Case(f"{m}x{n}x{k}-bf16", _P(m, n, k), _BENCH)
                for m, n, k in (
                    (4, 1024, 3072), (4, 2560, 9728), (16, 6144, 1024), (16, 1024, 3072),
                    (16, 19456, 2560), (16, 2560, 9728), (16, 4096, 4096), (64, 19456, 2560),
                    (64, 2560, 9728),
                )
            ),
        ),
        tuning_key=linear_tuning_key,
        space=linear_space,
        default_config=linear_default,
        why_illegal=linear_illegal,
        cost=linear_cost,
        outputs=("out",),
        providers=_peers,
        shape=linear_shape,
        tolerance=1.5,  # "dot" rounds normed rows, and a gate times up has the errors of both
    )
)
# fmt: on
