"""A linear layer of few rows, whose weights are read once: decode steps of one or a few sequences.

    y[m, n]   = sum over k of x[m, k] * weight[n, k] + bias[n]
    out[m, n] = y[m, n]                                          or, gated,
                silu(y[m, n]) * y[m, N + n]                      of a weight of 2 N rows

x: [M, K]; weight: [N, K] or [2 N, K]; out: [M, N]; fp32, bf16 or fp16, sums in fp32. ``silu`` is
applied to the sums before they are rounded. ``fused_add_rms_norm_linear`` is the same behind an
RMSNorm, on the same kernel.

Any number of rows is right; few are fast. In ``variant`` "dot" BLOCK_M rows share what is read of
weights, in matrix instructions. In "vector" a program has one row and multiplies in fp32, element
by element: a row has no use for more, and its sums need no layout but that in which weights arrive.
It asks for its first weights before it waits for the kernel that writes x to end (``PDL``), and for
the next ones before it multiplies (``AHEAD``) or behind that.

With a norm, "vector" scales at the end: sum(w * h * g) / rms(h) needs h once. "dot" rounds
h * g / rms(h) to x's dtype first, as separate kernels do, so it goes over h twice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from tkernels.check import (
    FLOAT_DTYPES,
    check_dtype,
    check_last_contiguous,
    check_no_overlap,
    check_own,
    check_shape,
    check_tensor,
    describe,
    new_output,
)
from tkernels.config import planned, resolve
from tkernels.device import Device, bind, cdiv, tl, triton
from tkernels.ops.paged_attn import _let_next_kernel_start, _wait_for_earlier_kernels
from tkernels.registry import Case, Config, KernelSpec, Problem, op, register
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
)

_OP = "skinny_linear"


def skinny_linear_ref(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    silu_and_mul: bool = False,
    out: torch.Tensor | None = None,
    config: Config | None = None,
) -> torch.Tensor:
    """PyTorch version of ``skinny_linear``."""
    y = product_ref(x.float(), weight, bias, silu_and_mul)
    return y.to(x.dtype) if out is None else out.copy_(y)


def product_ref(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, gated: bool
) -> torch.Tensor:
    """fp32 [M, N] of fp32 x."""
    y = torch.nn.functional.linear(x, weight.float(), None if bias is None else bias.float())
    if not gated:
        return y
    gate, up = y.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


# ---- kernel ----------------------------------------------------------------------------------
# fmt: off


@triton.jit
def _added(x_rows, residual_rows, k, ok):
    """The rounded sum of x and residual at columns k."""
    h = tl.load(x_rows + k, mask=ok, other=0.0)
    h = h.to(tl.float32) + tl.load(residual_rows + k, mask=ok, other=0.0).to(tl.float32)
    return h.to(x_rows.dtype.element_ty)


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
def _finished(y, bias_ptr, cols, n_cols, HAS_BIAS: tl.constexpr):
    if HAS_BIAS:
        y += tl.load(bias_ptr + cols, mask=cols < n_cols, other=0.0).to(tl.float32)
    return y


@triton.jit
def _one_row(
    row, cols, n_put, x_ptr, residual_ptr, gain_ptr, w_ptr, up_ptr, bias_ptr, up_bias_ptr, out_ptr,
    sum_ptr, stride_x, stride_r, stride_w, stride_o, stride_s, n_cols, n_inner, eps,
    HAS_NORM: tl.constexpr, HAS_BIAS: tl.constexpr, GATED: tl.constexpr, EVEN_K: tl.constexpr,
    EVEN_N: tl.constexpr, AHEAD: tl.constexpr, PDL: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One row and BLOCK_N columns, multiplied element by element."""
    w = _weights(w_ptr, stride_w, cols, 0, n_cols, n_inner, EVEN_K, EVEN_N, BLOCK_K)
    if GATED:
        v = _weights(up_ptr, stride_w, cols, 0, n_cols, n_inner, EVEN_K, EVEN_N, BLOCK_K)
    if PDL:
        _wait_for_earlier_kernels()
        _let_next_kernel_start()
    row64 = row.to(tl.int64)
    acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    if GATED:
        up_acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    squares = tl.zeros([BLOCK_K], tl.float32)
    for start in range(0, n_inner, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        if HAS_NORM:
            added = _added(
                x_ptr + row64 * stride_x, residual_ptr + row64 * stride_r, k, k < n_inner)
            tl.store(sum_ptr + row64 * stride_s + k, added, mask=k < n_put)
            h = added.to(tl.float32)
            squares += h * h
            h *= tl.load(gain_ptr + k, mask=k < n_inner, other=0.0).to(tl.float32)
        else:
            h = tl.load(x_ptr + row64 * stride_x + k, mask=k < n_inner, other=0.0).to(tl.float32)
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
    y = _finished(y, bias_ptr, cols, n_cols, HAS_BIAS)
    if GATED:
        up = tl.sum(up_acc, 1)
        if HAS_NORM:
            up = up * scale
        up = _finished(up, up_bias_ptr, cols, n_cols, HAS_BIAS)
        y = y / (1.0 + tl.exp(-y)) * up
    tl.store(out_ptr + row64 * stride_o + cols, y.to(out_ptr.dtype.element_ty), mask=cols < n_cols)


@triton.jit
def _some_rows(
    row0, cols, n_put, x_ptr, residual_ptr, gain_ptr, w_ptr, up_ptr, bias_ptr, up_bias_ptr, out_ptr,
    sum_ptr, stride_x, stride_r, stride_w, stride_o, stride_s, n_rows, n_cols, n_inner, eps,
    HAS_NORM: tl.constexpr, HAS_BIAS: tl.constexpr, GATED: tl.constexpr, EVEN_K: tl.constexpr,
    EVEN_N: tl.constexpr, PDL: tl.constexpr, SWAP: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):
    """BLOCK_M rows and BLOCK_N columns, in matrix instructions."""
    if PDL:
        _wait_for_earlier_kernels()
        _let_next_kernel_start()
    rows = row0 + tl.arange(0, BLOCK_M)
    row_ok = (rows < n_rows)[:, None]
    row64 = rows.to(tl.int64)[:, None]
    x_rows = x_ptr + row64 * stride_x
    residual_rows = residual_ptr + row64 * stride_r
    sum_rows = sum_ptr + row64 * stride_s
    scale = tl.full([BLOCK_M, 1], 1.0, tl.float32)
    if HAS_NORM:
        squares = tl.zeros([BLOCK_M, BLOCK_K], tl.float32)
        for start in range(0, n_inner, BLOCK_K):
            k = (start + tl.arange(0, BLOCK_K))[None, :]
            ok = row_ok & (k < n_inner)
            added = _added(x_rows, residual_rows, k, ok)
            tl.store(sum_rows + k, added, mask=row_ok & (k < n_put))
            h = added.to(tl.float32)
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
        if HAS_NORM:
            gain = tl.load(gain_ptr + k, mask=k < n_inner, other=0.0).to(tl.float32)
            h = _added(x_rows, residual_rows, k, ok).to(tl.float32) * scale * gain
            h = h.to(x_ptr.dtype.element_ty)
        else:
            h = tl.load(x_rows + k, mask=ok, other=0.0)
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
    y = _finished(acc, bias_ptr, cols[None, :], n_cols, HAS_BIAS)
    if GATED:
        if SWAP:
            up_acc = tl.trans(up_acc)
        up = _finished(up_acc, up_bias_ptr, cols[None, :], n_cols, HAS_BIAS)
        y = y / (1.0 + tl.exp(-y)) * up
    outs = out_ptr + row64 * stride_o + cols[None, :]
    tl.store(outs, y.to(out_ptr.dtype.element_ty), mask=row_ok & (cols < n_cols)[None, :])


@triton.jit(do_not_specialize=["n_rows", "n_m", "n_tiles"])
def _skinny_linear_kernel(
    x_ptr, residual_ptr, gain_ptr, w_ptr, bias_ptr, out_ptr, sum_ptr,
    stride_x, stride_r, stride_w, stride_o, stride_s, n_cols, n_inner, n_rows, n_m, n_tiles, eps,
    HAS_NORM: tl.constexpr, HAS_BIAS: tl.constexpr, GATED: tl.constexpr, EVEN_K: tl.constexpr,
    EVEN_N: tl.constexpr, PDL: tl.constexpr, SWAP: tl.constexpr, AHEAD: tl.constexpr,
    DOT: tl.constexpr, ONE_TILE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    up_ptr = w_ptr + tl.cast(n_cols, tl.int64) * stride_w
    up_bias_ptr = bias_ptr + n_cols
    if ONE_TILE:
        _skinny_linear_tile(
            tl.program_id(0), x_ptr, residual_ptr, gain_ptr, w_ptr, up_ptr, bias_ptr, up_bias_ptr,
            out_ptr, sum_ptr, stride_x, stride_r, stride_w, stride_o, stride_s, n_cols, n_inner,
            n_rows, n_m, eps, HAS_NORM, HAS_BIAS, GATED, EVEN_K, EVEN_N, PDL, SWAP, AHEAD, DOT,
            BLOCK_M, BLOCK_N, BLOCK_K)
    else:
        for tile in range(tl.program_id(0), n_tiles, tl.num_programs(0)):
            _skinny_linear_tile(
                tile, x_ptr, residual_ptr, gain_ptr, w_ptr, up_ptr, bias_ptr, up_bias_ptr, out_ptr,
                sum_ptr, stride_x, stride_r, stride_w, stride_o, stride_s, n_cols, n_inner, n_rows,
                n_m, eps, HAS_NORM, HAS_BIAS, GATED, EVEN_K, EVEN_N, PDL, SWAP, AHEAD, DOT, BLOCK_M,
                BLOCK_N, BLOCK_K)


@triton.jit
def _skinny_linear_tile(
    tile, x_ptr, residual_ptr, gain_ptr, w_ptr, up_ptr, bias_ptr, up_bias_ptr, out_ptr, sum_ptr,
    stride_x, stride_r, stride_w, stride_o, stride_s, n_cols, n_inner, n_rows, n_m, eps,
    HAS_NORM: tl.constexpr, HAS_BIAS: tl.constexpr, GATED: tl.constexpr, EVEN_K: tl.constexpr,
    EVEN_N: tl.constexpr, PDL: tl.constexpr, SWAP: tl.constexpr, AHEAD: tl.constexpr,
    DOT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):
    cols = tile // n_m * BLOCK_N + tl.arange(0, BLOCK_N)
    # Columns of sums that a program stores, which all programs of a row have in common.
    n_put = tl.where(tile // n_m == 0, n_inner, 0)
    if DOT:
        _some_rows(
            tile % n_m * BLOCK_M, cols, n_put, x_ptr, residual_ptr, gain_ptr, w_ptr, up_ptr,
            bias_ptr, up_bias_ptr, out_ptr, sum_ptr, stride_x, stride_r, stride_w, stride_o,
            stride_s, n_rows, n_cols, n_inner, eps, HAS_NORM, HAS_BIAS, GATED, EVEN_K, EVEN_N, PDL,
            SWAP, BLOCK_M, BLOCK_N, BLOCK_K)
    else:
        _one_row(
            tile % n_m, cols, n_put, x_ptr, residual_ptr, gain_ptr, w_ptr, up_ptr, bias_ptr,
            up_bias_ptr, out_ptr, sum_ptr, stride_x, stride_r, stride_w, stride_o, stride_s, n_cols,
            n_inner, eps, HAS_NORM, HAS_BIAS, GATED, EVEN_K, EVEN_N, AHEAD, PDL, BLOCK_N, BLOCK_K)


# fmt: on


@op
def skinny_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    silu_and_mul: bool = False,
    out: torch.Tensor | None = None,
    config: Config | None = None,
) -> torch.Tensor:
    """x @ W^T + bias of few rows, and ``silu_and_mul`` of that.

    Args:
        x: [M, K >= 1], fp32, bf16 or fp16, contiguous columns, any row stride.
        weight: [N, K], or [2 N, K] with ``silu_and_mul``: gate rows, then up rows; dtype of x,
            contiguous columns, any row stride. With ``PDL`` it is read before the kernel that was
            launched just before has ended, so that one must not write it.
        bias: one number for each row of weight, dtype of x.
        silu_and_mul: the result is silu(gate) * up.
        out: [M, N] of x's dtype, contiguous columns, any row stride, written and returned; it may
            not share memory with an argument.
        config: launch config; None looks it up.

    Returns:
        [M, N] of x's dtype.

    Raises:
        TypeError, ValueError: an argument of the wrong kind, shape, dtype, stride or device.
    """
    if out is None:
        out = new_out(_OP, x, weight, silu_and_mul)
    else:
        check_own(_OP, "out", out, x=x, weight=weight)
    tensors = (x, weight, out) if bias is None else (x, weight, out, bias)
    plan = planned(_plan, config, tensors, silu_and_mul)
    if plan is not None:
        launch, numbers = plan
        # What is not there is stood in for by something that is, and not read.
        launch(x, x, x, weight, x if bias is None else bias, out, out, *numbers, 1.0)
    return out


def new_out(name: str, x: torch.Tensor, weight: torch.Tensor, gated: Any) -> torch.Tensor:
    check_tensor(name, "x", x)
    check_tensor(name, "weight", weight)
    for what, t in (("x", x), ("weight", weight)):
        if t.dim() != 2:
            shape = "[M, K >= 1]" if what == "x" else "[N, K]"
            raise ValueError(f"{name}: {what} must have shape {shape}, got {describe(t)}")
    return new_output(name, x, (x.shape[0], weight.shape[0] // (2 if gated is True else 1)))


Plan = tuple[Callable[..., None], tuple[int, ...]]


def _plan(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    *rest: Any,
    config: Config | None,
) -> Plan | None:
    *more, gated = rest
    bias = more[0] if more else None
    check_operands(_OP, x, weight, bias, out, gated)
    return plan_linear(SPEC, {"x": x, "weight": weight, "out": out}, bias, gated, config)


def check_operands(
    name: str,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    gated: Any,
) -> None:
    """All that metadata can tell about the arguments that both operations have."""
    if type(gated) is not bool:
        raise TypeError(f"{name}: silu_and_mul must be a bool, got {describe(gated)}")
    check_tensor(name, "x", x)
    check_dtype(name, "x", x, FLOAT_DTYPES)
    if x.dim() != 2 or x.shape[1] == 0:
        raise ValueError(f"{name}: x must have shape [M, K >= 1], got {describe(x)}")
    m, k = x.shape
    check_tensor(name, "weight", weight)
    check_dtype(name, "weight", weight, (x.dtype,))
    halves = 2 if gated else 1
    if weight.dim() != 2 or weight.shape[1] != k or not len(weight) or len(weight) % halves:
        shape = f"[2 N >= 2, K={k}]" if gated else f"[N >= 1, K={k}]"
        raise ValueError(f"{name}: weight must have shape {shape}, got {describe(weight)}")
    most = 2**31 - 2**16  # rows and columns are counted in 32 bits
    for what, t in (("x", x), ("weight", weight)):
        if max(t.shape) > most:
            raise ValueError(
                f"{name}: {what} must have at most {most} rows and columns, got {describe(t)}"
            )
    check_tensor(name, "out", out)
    check_dtype(name, "out", out, (x.dtype,))
    check_shape(name, "out", out, M=m, N=len(weight) // halves)
    check_no_overlap(name, "out", out)
    tensors = {"x": x, "weight": weight, "out": out}
    if bias is not None:
        check_tensor(name, "bias", bias)
        check_dtype(name, "bias", bias, (x.dtype,))
        check_shape(name, "bias", bias, N=len(weight))
        tensors["bias"] = bias
    for what, t in tensors.items():
        check_last_contiguous(name, what, t)


def plan_linear(
    spec: KernelSpec,
    tensors: Mapping[str, torch.Tensor],
    bias: torch.Tensor | None,
    gated: bool,
    config: Config | None,
) -> Plan | None:
    """(launch, strides and counts); None where there are no rows.

    ``tensors``: x, weight and out; with a norm residual and residual_out too.
    """
    x, weight, out = (tensors[name] for name in ("x", "weight", "out"))
    (m, k), n = x.shape, out.shape[1]
    if m == 0:
        return None
    cfg, max_programs = resolve(spec, (m, n, k, x.dtype, gated), config)
    cfg = {"PDL": False, "SWAP": False, "AHEAD": False, **cfg}  # Ascend has none of these
    n_m, n_n = cdiv(m, cfg["BLOCK_M"]), cdiv(n, cfg["BLOCK_N"])
    n_tiles = n_m * n_n
    if n_tiles > 2**31 - 2**16:
        raise ValueError(
            f"{spec.name}: x must have at most {(2**31 - 2**16) // n_n} rows with {n} columns of "
            f"the result, got {describe(x)}"
        )
    programs = min(n_tiles, max_programs)
    dot = cfg.pop("variant") == "dot"
    launch = bind(
        _skinny_linear_kernel,
        (programs,),
        HAS_NORM="residual" in tensors,
        HAS_BIAS=bias is not None,
        GATED=gated,
        EVEN_K=k % cfg["BLOCK_K"] == 0,
        EVEN_N=n % cfg["BLOCK_N"] == 0,
        ONE_TILE=programs == n_tiles,
        DOT=dot,
        **cfg,
        **({"launch_pdl": True} if cfg["PDL"] else {}),
    )
    residual, total = (tensors.get(name, x) for name in ("residual", "residual_out"))
    strides = tuple(t.stride(0) for t in (x, residual, weight, out, total))
    return launch, (*strides, n, k, m, n_m, n_tiles)


# ---- facts for tests, bench and tuner --------------------------------------------------------


def _why_illegal(config: Config, problem: Problem, dev: Device) -> str | None:
    return linear_illegal(config, problem, dev, norm=False)


def _peers(inputs: dict[str, Any]) -> dict[str, Callable[[], Any]]:
    """cuBLAS, behind which our own ``silu_and_mul`` goes where that is asked for."""
    x, weight, bias = inputs["x"], inputs["weight"], inputs.get("bias")
    linear = torch.nn.functional.linear
    if not inputs.get("silu_and_mul"):
        return {"cublas": lambda: linear(x, weight, bias)}
    from tkernels.ops.silu_and_mul import silu_and_mul

    return {"separate": lambda: silu_and_mul(linear(x, weight, bias))}


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
            Case("5x40x96-fp16", _P(5, 40, 96, _FP16, bias=True)),
            Case("1x48x64-bf16", _P(1, 48, 64, bias=True)),
            Case("gated-1x24x130-fp16", _P(1, 24, 130, _FP16, gated=True, bias=True), _EDGE),
            Case("gated-3x33x40-bf16", _P(3, 33, 40, gated=True, bias=True), _EDGE),
            Case("1x1x1-fp32", _P(1, 1, 1, _FP32), _EDGE),
            Case("1x37x257-fp32", _P(1, 37, 257, _FP32), _EDGE),
            Case("19x17x100-fp32", _P(19, 17, 100, _FP32, bias=True), _EDGE),
            Case("1x1024x2048-bf16", _P(1, 1024, 2048), _BENCH),  # Qwen3-0.6B: o_proj, down_proj
            Case("1x1024x3072-bf16", _P(1, 1024, 3072), _BENCH),
            Case("gated-1x3072x1024-bf16", _P(1, 3072, 1024, gated=True), _BENCH),
            Case("1x4096x4096-bf16", _P(1, 4096, 4096), _BENCH),  # Qwen3-8B
            Case("1x4096x12288-bf16", _P(1, 4096, 12288), _BENCH),
            Case("1x151936x4096-bf16", _P(1, 151936, 4096), _BENCH),
            Case("4x4096x4096-bf16", _P(4, 4096, 4096), _BENCH),
            Case("16x4096x4096-bf16", _P(16, 4096, 4096), _BENCH),
        ),
        tuning_key=linear_tuning_key,
        space=linear_space,
        default_config=linear_default,
        why_illegal=_why_illegal,
        cost=linear_cost,
        outputs=("out",),
        providers=_peers,
        shape=linear_shape,
    )
)
# fmt: on
