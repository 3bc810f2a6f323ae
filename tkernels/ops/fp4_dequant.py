"""int8 codes and the 4-bit residuals of vectors back to numbers (tkernels/kv_format.py).

    out[n] = (codes[n] + residual[n]) * |scale[n]|      (a cache keeps -scale beside residuals)
    residual[n] = 4-bit codes * 2^(exponent - 127)

codes: int8 [N, D]; scale: fp32 [N]; residual: uint8 [N, D / 2], byte j has channel j in its low
half and channel j + D / 2 in its high half; residual_scale: uint8 [N, D / 16 or 32], biased
exponents.

E2M1 and powers of two as block scales are FP4 of "OCP Microscaling Formats (MX) v1.0". A code is
not looked up: its exponent and mantissa are put where fp32 has its own and multiplied by 2^126.
"""

from __future__ import annotations

from typing import Any

import torch

from tkernels import check
from tkernels.check import (
    FLOAT_DTYPES,
    check_dtype,
    check_last_contiguous,
    check_shape,
    check_tensor,
    describe,
)
from tkernels.config import planned, resolve, why_no_launch
from tkernels.device import Device, bind, cdiv, next_power_of_2, tl, triton
from tkernels.kv_format import FORMATS, fp4_dequantize_ref, fp4_quantize_ref, quantize_ref
from tkernels.registry import Case, Config, Cost, KernelSpec, Problem, op, register


def fp4_dequant_ref(
    codes: torch.Tensor,
    scale: torch.Tensor,
    residual: torch.Tensor,
    residual_scale: torch.Tensor,
    *,
    dtype: torch.dtype,
    mantissa_bits: int = 1,
    out: torch.Tensor | None = None,
    config: Config | None = None,
) -> torch.Tensor:
    """PyTorch version of ``fp4_dequant``."""
    rest = fp4_dequantize_ref(residual, residual_scale, residual_format=FORMATS[mantissa_bits])
    result = ((codes.float() + rest) * scale.float().abs()[:, None]).to(dtype)
    return result if out is None else out.copy_(result)


@triton.jit
def _fp4_dequant_kernel(
    codes_ptr,
    scale_ptr,
    residual_ptr,
    residual_scale_ptr,
    out_ptr,
    stride_c,
    stride_r,
    stride_e,
    stride_o,
    n_rows,
    n_tiles,
    HALF: tl.constexpr,  # channels of half a vector
    RESIDUAL_BLOCK: tl.constexpr,
    MANTISSA: tl.constexpr,
    BLOCK_H: tl.constexpr,  # the power of two that holds them
    BLOCK_ROWS: tl.constexpr,
):
    for tile in range(tl.program_id(0), n_tiles, tl.num_programs(0)):
        rows = tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        column = tl.arange(0, BLOCK_H)[None, :]
        ok = (rows < n_rows)[:, None] & (column < HALF)
        row = rows.to(tl.int64)[:, None]
        scale = tl.abs(tl.load(scale_ptr + rows, mask=rows < n_rows, other=0.0))[:, None]
        packed = tl.load(residual_ptr + row * stride_r + column, mask=ok, other=0).to(tl.int32)
        # A load a block scale, spread over the channels that share it.
        which = tl.arange(0, BLOCK_H // RESIDUAL_BLOCK)[None, :]
        ok_scale = (rows < n_rows)[:, None] & (which < HALF // RESIDUAL_BLOCK)
        exponents = residual_scale_ptr + row * stride_e + which
        codes = codes_ptr + row * stride_c + column
        outs = out_ptr + row * stride_o + column
        # Twice the same, and not a loop: the halves differ in their shift.
        low_unit = tl.load(exponents, mask=ok_scale, other=0)
        low = _values(packed & 15, low_unit, MANTISSA, RESIDUAL_BLOCK)
        code = tl.load(codes, mask=ok, other=0).to(tl.float32)
        tl.store(outs, ((code + low) * scale).to(out_ptr.dtype.element_ty), mask=ok)
        high_unit = tl.load(exponents + HALF // RESIDUAL_BLOCK, mask=ok_scale, other=0)
        high = _values(packed >> 4, high_unit, MANTISSA, RESIDUAL_BLOCK)
        code = tl.load(codes + HALF, mask=ok, other=0).to(tl.float32)
        tl.store(outs + HALF, ((code + high) * scale).to(out_ptr.dtype.element_ty), mask=ok)


@triton.jit
def _values(code, exponent, MANTISSA: tl.constexpr, RESIDUAL_BLOCK: tl.constexpr):
    """fp32 [R, C] of 4-bit codes (int32) with biased block exponents [R, C / RESIDUAL_BLOCK]."""
    # 2^126 lifts the exponent of the code to where it counts from 0.
    size = ((code & 7) << (23 - MANTISSA)).to(tl.float32, bitcast=True) * 8.507059173023462e37
    unit = (exponent.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    signed = tl.where(code > 7, -size, size)
    blocks = tl.reshape(signed, (code.shape[0], exponent.shape[1], RESIDUAL_BLOCK))
    return tl.reshape(blocks * unit[:, :, None], code.shape)


@op
def fp4_dequant(
    codes: torch.Tensor,
    scale: torch.Tensor,
    residual: torch.Tensor,
    residual_scale: torch.Tensor,
    *,
    dtype: torch.dtype,
    mantissa_bits: int = 1,
    out: torch.Tensor | None = None,
    config: Config | None = None,
) -> torch.Tensor:
    """Numbers of int8 codes with 4-bit residuals. ``kv_format.fp4_quantize_ref`` makes those.

    Args:
        codes: int8 [n_rows, head_dim], head_dim divisible by 32, any row stride.
        scale: fp32 [n_rows].
        residual: uint8 [n_rows, head_dim / 2], any row stride.
        residual_scale: uint8 [n_rows, head_dim / 16 or 32], any row stride.
        dtype: of the result, fp32, bf16 or fp16.
        mantissa_bits: 2 is E1M2, 1 is E2M1 (FP4), 0 is E3M0.
        out: [n_rows, head_dim] of ``dtype``, written and returned.
        config: launch config; None looks it up.

    Returns:
        [n_rows, head_dim] of ``dtype``.

    Raises:
        TypeError, ValueError: an argument of the wrong kind, shape, dtype, stride or device.
    """
    if dtype not in FLOAT_DTYPES:
        raise ValueError(f"fp4_dequant: dtype must be float32, bfloat16 or float16, got {dtype}")
    if out is None:
        check_tensor("fp4_dequant", "codes", codes)
        out = torch.empty(codes.shape, dtype=dtype, device=codes.device)
    tensors = codes, scale, residual, residual_scale, out
    plan = planned(_plan, config, tensors, dtype, mantissa_bits)
    if plan is not None:
        launch, numbers = plan
        launch(*tensors, *numbers)
    return out


def _plan(*given: Any, config: Config | None) -> Any:
    """(launch, strides and counts); None where there is nothing to do."""
    *tensors, dtype, mantissa_bits = given
    codes, _, residual, residual_scale, out = tensors
    residual_block = _check(*given)
    n_rows, dim = codes.shape
    if n_rows == 0:
        return None
    cfg, max_programs = resolve(SPEC, (n_rows, dim, residual_block, dtype), config)
    n_tiles = cdiv(n_rows, cfg["BLOCK_ROWS"])
    constants = {
        "HALF": dim // 2,
        "RESIDUAL_BLOCK": residual_block,
        "MANTISSA": mantissa_bits,
        "BLOCK_H": max(next_power_of_2(dim // 2), residual_block),
    }
    launch = bind(_fp4_dequant_kernel, (min(n_tiles, max_programs),), **constants, **cfg)
    rows = (codes, residual, residual_scale, out)
    return launch, (*(t.stride(0) for t in rows), n_rows, n_tiles)


def _check(*given: Any) -> int:
    """Refuse what the kernel cannot take; the channels of a residual block."""
    name = "fp4_dequant"
    codes, scale, residual, residual_scale, out, dtype, mantissa_bits = given
    tensors = {
        "codes": codes, "scale": scale, "residual": residual, "residual_scale": residual_scale,
        "out": out,
    }  # fmt: skip
    for argument, t in tensors.items():
        check_tensor(name, argument, t)
    if codes.dim() != 2 or not codes.shape[1] or codes.shape[1] % 32:
        raise ValueError(
            f"{name}: codes must have shape [n_rows, head_dim that divides by 32], "
            f"got {describe(codes)}"
        )
    wanted = {
        "codes": torch.int8, "scale": torch.float32, "residual": torch.uint8,
        "residual_scale": torch.uint8, "out": dtype,
    }  # fmt: skip
    for argument, kind in wanted.items():
        check_dtype(name, argument, tensors[argument], (kind,))
    n_rows, dim = codes.shape
    check_shape(name, "scale", scale, n_rows=n_rows)
    check_shape(name, "residual", residual, n_rows=n_rows, half_head_dim=dim // 2)
    shapes = [[n_rows, dim // block] for block in (16, 32) if dim % (2 * block) == 0]
    if list(residual_scale.shape) not in shapes:
        raise ValueError(
            f"{name}: residual_scale must have shape {' or '.join(map(str, shapes))}, "
            f"got {describe(residual_scale)}"
        )
    check_shape(name, "out", out, n_rows=n_rows, head_dim=dim)
    for argument, t in tensors.items():
        check_last_contiguous(name, argument, t)
    check.check_no_overlap(name, "out", out)
    if type(mantissa_bits) is not int or mantissa_bits not in FORMATS:
        raise ValueError(f"{name}: mantissa_bits must be 0, 1 or 2, got {mantissa_bits!r}")
    return int(dim // residual_scale.shape[1])


# ---- facts for tests, bench and tuner --------------------------------------------------------


def dequant_problem(
    rows: int,
    head_dim: int,
    dtype: torch.dtype,
    *,
    residual_block: int | None = None,
    mantissa_bits: int = 1,
) -> dict[str, Any]:
    """Problem of ``rows`` vectors."""
    return {
        "n_rows": rows,
        "head_dim": head_dim,
        "residual_block": residual_block or (32 if head_dim % 64 == 0 else 16),
        "dtype": dtype,
        "mantissa_bits": mantissa_bits,
    }


def _shape(*, rows: int, head_dim: int = 128, dtype: torch.dtype = torch.bfloat16) -> Problem:
    """``rows`` vectors, all with residuals."""
    return dequant_problem(rows, head_dim, dtype)


def _make_inputs(problem: Problem, dev: torch.device) -> dict[str, Any]:
    """Gaussian vectors, quantised."""
    bits = problem.get("mantissa_bits", 1)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(problem["n_rows"], problem["head_dim"], generator=generator)
    codes, scale, rest, _ = quantize_ref(x)
    residual, residual_scale = fp4_quantize_ref(
        rest, residual_format=FORMATS[bits], block=problem["residual_block"]
    )
    return {
        "codes": codes.to(dev),
        "scale": scale.to(dev),
        "residual": residual.to(dev),
        "residual_scale": residual_scale.to(dev),
        "dtype": problem["dtype"],
        "mantissa_bits": bits,
    }


def _tuning_key(problem: Problem) -> dict[str, Any]:
    bucket = 1
    while bucket < min(problem["n_rows"], 65536):
        bucket *= 4
    return {
        "head_dim": problem["head_dim"],
        "itemsize": problem["dtype"].itemsize,
        "rows_up_to": bucket,
    }


def _space(dev: Device) -> dict[str, list[Any]]:
    space: dict[str, list[Any]] = {"BLOCK_ROWS": [1, 2, 4, 8, 16, 32, 64, 128]}
    if not dev.registers:  # a vector unit: no threads
        return {**space, "programs_per_core": [1]}
    return {**space, "programs_per_core": [0, 4, 8, 16], "num_warps": [1, 2, 4, 8]}


def _elements(problem: Problem, block_rows: int) -> int:
    return block_rows * 2 * next_power_of_2(problem["head_dim"] // 2)


def _default_config(problem: Problem, dev: Device) -> Config:
    most = 1024 if dev.registers else 2048  # numbers a tile; an H100 liked few
    rows = max(1, most // _elements(problem, 1))
    rows = min(rows, 32, next_power_of_2(max(1, problem["n_rows"] // dev.num_cores)))
    if not dev.registers:
        return {"BLOCK_ROWS": rows, "programs_per_core": 1}
    warps = max(1, min(8, _elements(problem, rows) // 1024))
    return {"BLOCK_ROWS": rows, "num_warps": warps, "programs_per_core": 0}


def _why_illegal(config: Config, problem: Problem, dev: Device) -> str | None:
    if why := why_no_launch(config, dev, "BLOCK_ROWS"):
        return why
    elements = _elements(problem, config["BLOCK_ROWS"])
    if not dev.registers:  # a vector unit: no threads
        if elements * 24 > dev.local_mem_bytes:  # six arrays of half the channels, twice
            return f"{elements * 24} bytes are in use at once, UB has {dev.local_mem_bytes}"
        return None
    a_thread = elements // (32 * config["num_warps"])
    return f"{a_thread} channels a thread would not fit its registers" if a_thread > 64 else None


def _cost(problem: Problem) -> Cost:
    dim = problem["head_dim"]
    each = dim * (1 + problem["dtype"].itemsize) + dim // 2 + dim // problem["residual_block"] + 4
    return Cost(flops=3 * problem["n_rows"] * dim, bytes=problem["n_rows"] * each)


_EDGE = frozenset({"edge"})
_BENCH = frozenset({"bench"})
_P = dequant_problem

SPEC = register(
    KernelSpec(
        name="fp4_dequant",
        launch=fp4_dequant,
        reference=fp4_dequant_ref,
        problem_fields=("n_rows", "head_dim", "residual_block", "dtype"),
        make_inputs=_make_inputs,
        cases=(
            Case("9x64-bf16", _P(9, 64, torch.bfloat16)),
            Case("5x96-e3m0-fp16", _P(5, 96, torch.float16, mantissa_bits=0)),
            Case("1x32-e1m2-fp32", _P(1, 32, torch.float32, mantissa_bits=2), _EDGE),
            Case("17x128-b16-bf16", _P(17, 128, torch.bfloat16, residual_block=16), _EDGE),
            Case("2x160-fp32", _P(2, 160, torch.float32), _EDGE),
            Case("32768x128-bf16", _P(32768, 128, torch.bfloat16), _BENCH),
        ),
        tuning_key=_tuning_key,
        space=_space,
        default_config=_default_config,
        why_illegal=_why_illegal,
        cost=_cost,
        outputs=("out",),
        shape=_shape,
    )
)
