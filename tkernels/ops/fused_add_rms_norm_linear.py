"""Residual add, RMSNorm and the linear layer behind it, of few rows: ``skinny_linear`` with a norm.

    residual_out[m, :] = round(x[m, :] + residual[m, :])          added in fp32, rounded once
    h[m, :] = residual_out[m, :] / sqrt(mean(residual_out[m, :]^2) + eps) * norm_weight
    out     = skinny_linear(h, weight), gated or not

x, residual, residual_out: [M, K]; norm_weight: [K]; weight: [N, K] or [2 N, K]; out: [M, N]. Every
program adds and norms the rows that it multiplies, and those of the first columns store the sum: in
a decode step that is less work than a launch. So ``residual_out`` must not be ``residual``, which
other programs still read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tkernels import rows
from tkernels.check import check_own, check_positive, new_output, one_for_both
from tkernels.config import planned
from tkernels.device import Device
from tkernels.ops import skinny_linear as linear
from tkernels.ops.fused_add_rms_norm import fused_add_rms_norm
from tkernels.registry import Case, Config, Cost, KernelSpec, Problem, op, register
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

_OP = "fused_add_rms_norm_linear"


def fused_add_rms_norm_linear_ref(
    x: torch.Tensor,
    residual: torch.Tensor,
    norm_weight: torch.Tensor,
    weight: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    silu_and_mul: bool = False,
    eps: float = 1e-6,
    out: torch.Tensor | None = None,
    residual_out: torch.Tensor | None = None,
    config: Config | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """PyTorch version of ``fused_add_rms_norm_linear``."""
    total = (x.float() + residual.float()).to(x.dtype)
    h = torch.nn.functional.rms_norm(total.float(), x.shape[-1:], norm_weight.float(), eps)
    y = linear.product_ref(h, weight, bias, silu_and_mul)
    return (
        y.to(x.dtype) if out is None else out.copy_(y),
        total if residual_out is None else residual_out.copy_(total),
    )


@op
def fused_add_rms_norm_linear(
    x: torch.Tensor,
    residual: torch.Tensor,
    norm_weight: torch.Tensor,
    weight: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    silu_and_mul: bool = False,
    eps: float = 1e-6,
    out: torch.Tensor | None = None,
    residual_out: torch.Tensor | None = None,
    config: Config | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add ``residual`` to ``x``, RMS-normalise the rounded sum, and multiply it with weights.

    Matrices have contiguous columns and any row stride.

    Args:
        x: [M, K >= 1], fp32, bf16 or fp16.
        residual: shape and dtype of x.
        norm_weight: [K], contiguous, fp32, bf16 or fp16.
        weight: [N, K], or [2 N, K] with ``silu_and_mul``: gate rows, then up rows; dtype of x. With
            ``PDL`` it is read before the kernel that was launched just before has ended, so that
            one must not write it.
        bias: one number for each row of weight, dtype of x.
        silu_and_mul: the result is silu(gate) * up.
        eps: added to the mean square; > 0.
        out: [M, N] of x's dtype.
        residual_out: where the sum goes; shape and dtype of x. Neither it nor ``out`` may share
            memory with an argument.
        config: launch config; None looks it up.

    Returns:
        ``(out, residual_out)``; each is a new contiguous tensor where None was given.

    Raises:
        TypeError, ValueError: an argument of the wrong kind, shape, dtype, stride or device.
    """
    if out is None:
        out = linear.new_out(_OP, x, weight, silu_and_mul)
    else:
        check_own(_OP, "out", out, x=x, residual=residual, weight=weight)
    if residual_out is None:
        residual_out = new_output(_OP, x)
    else:
        check_own(_OP, "residual_out", residual_out, x=x, residual=residual, weight=weight)
    if residual_out is out:
        raise one_for_both(_OP, "residual_out", "out")
    tensors = (x, residual, norm_weight, weight, out, residual_out)
    plan = planned(_plan, config, tensors if bias is None else (*tensors, bias), silu_and_mul, eps)
    if plan is not None:
        launch, numbers = plan
        bias = x if bias is None else bias  # stands in for it, and is not read
        launch(x, residual, norm_weight, weight, bias, out, residual_out, *numbers, eps)
    return out, residual_out


def _plan(
    x: torch.Tensor,
    residual: torch.Tensor,
    norm_weight: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    residual_out: torch.Tensor,
    *rest: Any,
    config: Config | None,
) -> linear.Plan | None:
    *more, gated, eps = rest
    bias = more[0] if more else None
    linear.check_operands(_OP, x, weight, bias, out, gated)
    rows.check_row_like(_OP, "residual", residual, x)
    rows.check_weight(_OP, norm_weight, x.shape[1], "norm_weight")
    rows.check_row_output(_OP, "residual_out", residual_out, x)
    check_positive(_OP, "eps", eps)
    tensors = {"x": x, "residual": residual, "weight": weight, "out": out}
    tensors["residual_out"] = residual_out
    return linear.plan_linear(SPEC, tensors, bias, gated, config)


# ---- facts for tests, bench and tuner --------------------------------------------------------


def _make_inputs(problem: Problem, dev: torch.device) -> dict[str, Any]:
    given = linear_inputs(problem, dev)
    generator = torch.Generator(dev).manual_seed(1)
    residual = torch.randn(given["x"].shape, generator=generator, device=dev)
    gain = 1 + 0.1 * torch.randn(problem["k"], generator=generator, device=dev)
    residual, gain = residual.to(problem["dtype"]), gain.to(problem["dtype"])
    return {"x": given.pop("x"), "residual": residual, "norm_weight": gain, **given}


def _why_illegal(config: Config, problem: Problem, dev: Device) -> str | None:
    return linear_illegal(config, problem, dev, norm=True)


def _cost(problem: Problem) -> Cost:
    return linear_cost(problem, norm=True)


def _peers(inputs: dict[str, Any]) -> dict[str, Callable[[], Any]]:
    """Our own norm, cuBLAS and, where it is asked for, our own ``silu_and_mul``."""
    from tkernels.ops.silu_and_mul import silu_and_mul

    x, residual, gain, weight = (inputs[n] for n in ("x", "residual", "norm_weight", "weight"))

    def separate() -> Any:
        h, total = fused_add_rms_norm(x, residual, gain)
        y = torch.nn.functional.linear(h, weight, inputs.get("bias"))
        return (silu_and_mul(y) if inputs.get("silu_and_mul") else y), total

    return {"separate": separate}


_EDGE = frozenset({"edge"})
_BENCH = frozenset({"bench"})
_BF16, _FP16, _FP32 = torch.bfloat16, torch.float16, torch.float32
_P = linear_problem

# fmt: off
SPEC = register(
    KernelSpec(
        name=_OP,
        launch=fused_add_rms_norm_linear,
        reference=fused_add_rms_norm_linear_ref,
        problem_fields=FIELDS,
        make_inputs=_make_inputs,
        cases=(
            Case("5x40x96-fp16", _P(5, 40, 96, _FP16, bias=True)),
            Case("1x48x64-bf16", _P(1, 48, 64, bias=True)),
            Case("gated-1x24x130-fp16", _P(1, 24, 130, _FP16, gated=True), _EDGE),
            Case("gated-3x33x40-bf16", _P(3, 33, 40, gated=True, bias=True), _EDGE),
            Case("1x1x1-fp32", _P(1, 1, 1, _FP32), _EDGE),
            Case("1x37x257-fp32", _P(1, 37, 257, _FP32), _EDGE),
            Case("19x17x100-fp32", _P(19, 17, 100, _FP32), _EDGE),
            Case("1x4096x1024-bf16", _P(1, 4096, 1024), _BENCH),  # Qwen3-0.6B: qkv, gate and up
            Case("gated-1x3072x1024-bf16", _P(1, 3072, 1024, gated=True), _BENCH),
            Case("1x6144x4096-bf16", _P(1, 6144, 4096), _BENCH),  # Qwen3-8B
            Case("gated-1x12288x4096-bf16", _P(1, 12288, 4096, gated=True), _BENCH),
            Case("gated-4x12288x4096-bf16", _P(4, 12288, 4096, gated=True), _BENCH),
        ),
        tuning_key=linear_tuning_key,
        space=linear_space,
        default_config=linear_default,
        why_illegal=_why_illegal,
        cost=_cost,
        outputs=("out", "residual_out"),
        providers=_peers,
        shape=linear_shape,
        tolerance=2.0,  # "dot" rounds what it multiplies, as separate kernels do: twice in all
    )
)
# fmt: on
