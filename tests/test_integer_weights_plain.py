"""The bodies for weights of 4, 8 and 16 bits as plain Python: rings of stages, places, orders."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import tkernels
from tests.plain_copies import CopiesMachine
from tests.plain_gluon import block
from tests.plain_warps import WarpsMachine
from tkernels import (
    device,
    few_rows_hopper,
    integer_decoding,
    integer_weights_few,
    integer_weights_many,
    masked_gemm_w8a16,
    w4a16_gemm_wide,
)
from tkernels.device import bind
from tkernels.masked_gemm_cases import gemm_inputs, gemm_problem
from tkernels.ops import masked_gemm as masked
from tkernels.ops import w4a16_gemm as op
from tkernels.ops import w8a16_gemm
from tkernels.registry import Config
from tkernels.w4a16_cases import w4_inputs, w4_problem
from tkernels.w8_format import numbers_of_codes

BF16, FP16, FP8 = torch.bfloat16, torch.float16, torch.float8_e4m3fn


def _codes(halves: torch.Tensor) -> list[torch.Tensor]:
    return [block((halves.int() >> 4 * i & 15).double()) for i in range(4)]


def _stand_ins(dtype: torch.dtype) -> dict[str, Any]:
    """What ``integer_decoding`` promises, in the numbers that sums expect."""
    parts = 64.0 if dtype == BF16 else 1.0
    parts_of_fp8 = 64.0 if dtype == BF16 else 256.0

    def numbers(halves: Any, zero: Any, has_zero: bool) -> tuple[Any, ...]:
        less = zero.double() if has_zero else -8.0 / parts
        return tuple((q / parts + less).to(dtype) for q in _codes(halves))

    def scaled(halves: Any, zero: Any, scale: Any, has_zero: bool) -> tuple[Any, ...]:
        return tuple(
            (t.double() * scale.double()).to(dtype) for t in numbers(halves, zero, has_zero)
        )

    return {
        "_numbers": numbers,
        "_less": lambda zeros, _: block((zeros.double() / -parts).to(dtype)),
        "_scaled_numbers": scaled,
        "_scaled_steps": lambda halves, scale: tuple(
            ((q - 8) * scale.double() / 65536.0).to(dtype) for q in _codes(halves)
        ),
        "_numbers_of_bytes": lambda halves, _: tuple(
            (block(byte.double()) / parts).to(dtype)
            for byte in ((halves.int() & 255 ^ 128) - 128, halves.int() >> 8)
        ),
        "_numbers_of_fp8": lambda halves, _: tuple(
            (block(numbers_of_codes(byte.to(torch.uint8).view(FP8)).double()) / parts_of_fp8).to(
                dtype
            )
            for byte in (halves.int() & 255, halves.int() >> 8 & 255)
        ),
        "UNIT": 65536.0,
    }


def _without_pdl(kernel: Any, grid: tuple[int, ...], **kwargs: Any) -> Any:
    """``bind`` of what turns x: the interpreter has no PTX."""
    return bind(kernel, grid, **{**kwargs, "PDL": False})


@pytest.mark.skipif(not device.INTERPRETED, reason="x is turned by Triton's interpreter")
@pytest.mark.parametrize(
    ("sizes", "group", "changed", "dtype", "zero", "bias"),
    [
        ((40, 200, 416), 32, {"programs": 1}, BF16, False, True),
        ((33, 129, 416), 32, {"programs": 3, "SPLIT_K": 3}, BF16, True, True),
        ((70, 400, 576), 64, {"programs": 2, "num_warps": 12, "num_stages": 3}, FP16, True, False),
        ((1, 1, 32), 32, {}, BF16, False, False),
        ((2, 1, 64), 64, {"PDL": False}, FP16, False, True),
        ((65, 65, 96), 32, {"BLOCK_M": 64}, BF16, True, False),
        ((65, 65, 96), 96, {"BLOCK_M": 64, "num_stages": 8}, FP16, False, True),
        ((33, 130, 1280), 256, {"programs": 4, "SPLIT_K": 8}, FP16, False, True),
        ((40, 130, 896), 128, {"programs": 2, "SPLIT_K": 2}, BF16, False, False),
    ],
)
def test_as_plain_python(
    sizes: tuple[int, int, int],
    group: int,
    changed: Config,
    dtype: torch.dtype,
    zero: bool,
    bias: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    m, n, k = sizes
    config = {
        **w4a16_gemm_wide.FIXED, "BLOCK_M": 32, "SPLIT_K": 1, "PDL": True, "num_warps": 8,
        "num_stages": 2, **changed,
    }  # fmt: skip
    programs = config.pop("programs", 132)
    inputs = w4_inputs(
        w4_problem(m, n, k, dtype, group=group, zero=zero, bias=bias), torch.device("cpu")
    )
    # Exact sums: nothing depends on the order in which they are added.
    generator = torch.Generator().manual_seed(1)
    inputs["x"] = torch.randint(-2, 3, (m, k), generator=generator).to(dtype)
    powers = torch.randint(-3, 1, inputs["weight_scale"].shape, generator=generator)
    inputs["weight_scale"] = torch.exp2(powers.float()).to(dtype)
    for name in ("x", "weight", "weight_scale", "weight_zero"):
        if name in inputs:
            inputs[name] = beside_others(inputs[name])
    given = [inputs.get(name) for name in ("x", "weight", "weight_scale", "weight_zero")]
    facts = {"GROUP": 0 if group == k else group, "HAS_ZERO": zero, "HAS_BIAS": bias}

    def run(out: torch.Tensor) -> None:
        strides = tuple(0 if t is None else t.stride(0) for t in (*given, out))
        bound = op._bind_hopper(w4a16_gemm_wide.bound, sizes, facts, strides, config, programs)
        bound(*given[:3], out, given[3], inputs.get("bias"))

    as_plain_python(run, tkernels.reference.w4a16_gemm(**inputs), monkeypatch)


@pytest.mark.skipif(not device.INTERPRETED, reason="x is turned by Triton's interpreter")
@pytest.mark.parametrize(
    ("sizes", "changed", "dtype", "bias"),
    [
        ((5, 200, 416), {"BLOCK_M": 8, "programs": 1}, BF16, True),
        ((33, 129, 400), {"programs": 3, "SPLIT_K": 3}, FP16, True),  # ends within a step
        ((70, 400, 576), {"programs": 2, "num_warps": 12, "num_stages": 3}, BF16, False),
        ((1, 1, 16), {"BLOCK_M": 8}, FP16, False),
        ((17, 65, 1040), {"BLOCK_M": 16, "SPLIT_K": 8, "PDL": False}, BF16, False),
    ],
)
def test_eight_bits_as_plain_python(
    sizes: tuple[int, int, int],
    changed: Config,
    dtype: torch.dtype,
    bias: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    m, n, k = sizes
    config = {
        **masked_gemm_w8a16.FIXED, "variant": "wide", "BLOCK_M": 32, "SPLIT_K": 1, "PDL": True,
        "num_warps": 8, "num_stages": 2, **changed,
    }  # fmt: skip
    programs = config.pop("programs", 132)
    inputs = gemm_inputs(gemm_problem(m, n, k, dtype, path="high", bias=bias), torch.device("cpu"))
    generator = torch.Generator().manual_seed(1)
    inputs["x"] = beside_others(torch.randint(-2, 3, (m, k), generator=generator).to(dtype))
    inputs["weight"] = beside_others(inputs["weight"])
    inputs["weight"][0, :4] = torch.tensor([-128, 127, -1, 0][: min(4, k)], dtype=torch.int8)
    inputs["weight_scale"] = torch.exp2(torch.randint(-3, 1, (n,), generator=generator).float())
    x, weight, scale = (inputs[name] for name in ("x", "weight", "weight_scale"))
    facts = {"LOW": False, "HIGH": True, "HIGH_SCALE": True, "HAS_BIAS": bias}

    def run(out: torch.Tensor) -> None:
        strides = (weight.stride(0), k, weight.stride(0), x.stride(0), out.stride(0))
        bound = masked._bind_w8a16(sizes, facts, strides, config, programs)
        bound(x, weight, scale, out, None, None, None, inputs.get("bias"), None, None)

    as_plain_python(run, tkernels.reference.masked_gemm(**inputs), monkeypatch)


@pytest.mark.skipif(not device.INTERPRETED, reason="x is turned by Triton's interpreter")
@pytest.mark.parametrize(
    ("sizes", "group", "codes", "changed", "dtype", "bias"),
    [
        ((5, 200, 384), 128, FP8, {"BLOCK_M": 8, "programs": 1}, BF16, True),
        ((33, 129, 768), 256, torch.int8, {"programs": 3, "SPLIT_K": 3}, FP16, True),
        ((70, 400, 512), 128, FP8, {"num_warps": 12, "num_stages": 3}, FP16, False),
        ((17, 65, 400), 400, FP8, {"BLOCK_M": 16, "SPLIT_K": 2, "PDL": False}, FP16, False),
    ],
)
def test_groups_of_eight_bits_as_plain_python(
    sizes: tuple[int, int, int],
    group: int,
    codes: torch.dtype,
    changed: Config,
    dtype: torch.dtype,
    bias: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A step's sum is scaled."""
    m, n, k = sizes
    config = {
        **integer_weights_many.FIXED, "BLOCK_M": 32, "SPLIT_K": 1, "PDL": True, "num_warps": 8,
        "num_stages": 2, **changed,
    }  # fmt: skip
    programs = config.pop("programs", 132)
    generator = torch.Generator().manual_seed(1)
    x = beside_others(torch.randint(-2, 3, (m, k), generator=generator).to(dtype))
    values = torch.randint(-3, 4, (n, k), generator=generator).float().to(codes)
    weight = beside_others(values.view(torch.int8)).view(codes)
    powers = torch.randint(-3, 1, (n, k // group), generator=generator)
    scale = beside_others(torch.exp2(powers.float()))
    offset = torch.randint(-9, 10, (n,), generator=generator).to(dtype) if bias else None
    facts = {"GROUP": 0 if group == k else group, "FP8": codes == FP8, "HAS_BIAS": bias}

    def run(out: torch.Tensor) -> None:
        strides = tuple(t.stride(0) for t in (x, weight, scale, out))
        bound = w8a16_gemm._bind_hopper(sizes, facts, strides, config, programs)
        bound(x, weight, scale, out, offset)

    expected = tkernels.reference.w8a16_gemm(x, weight, scale, bias=offset)
    as_plain_python(run, expected, monkeypatch)


def beside_others(t: torch.Tensor) -> torch.Tensor:
    """The same numbers as a view, with others beside them."""
    wide = torch.full((len(t), t.shape[1] + 16), 99, dtype=t.dtype)
    wide[:, : t.shape[1]] = t
    return wide[:, : t.shape[1]]


def as_plain_python(
    run: Callable[[torch.Tensor], None], expected: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``run(out)`` writes what is expected, in three orders, and nothing beside it."""
    (m, n), dtype = expected.shape, expected.dtype
    turn = integer_weights_many._turn_kernel
    for seed in range(3):
        with monkeypatch.context() as patch:
            machine = WarpsMachine(
                patch,
                [integer_weights_many, integer_weights_few],
                {"w_desc", "s_ptr", "z_ptr"},
                seed,
            )
            patch.setattr(integer_weights_many, "_turn_kernel", turn)
            patch.setattr(integer_weights_few, "bind", machine.bind)
            patch.setattr(integer_weights_many, "bind", _without_pdl)
            for name, value in _stand_ins(dtype).items():
                patch.setattr(integer_weights_many, name, value)
            out = torch.full((m, n + 3), 7.0, dtype=dtype)[:, :n]
            run(out)
        assert torch.equal(out, expected), seed
        assert bool((out._base[:, n:] == 7.0).all())


# ---- the body for few rows ---------------------------------------------------------------------


@pytest.mark.skipif(not device.is_there(integer_weights_few.gl), reason="this triton has no Gluon")
@pytest.mark.parametrize(
    ("bits", "sizes", "group", "changed", "dtype", "zero", "bias"),
    [
        (4, (5, 70, 640), 128, {}, BF16, False, True),
        (4, (13, 100, 1184), 0, {"SPLIT_K": 2, "num_stages": 3}, FP16, True, False),
        (4, (17, 33, 1536), 64, {"BLOCK_M": 16, "BLOCK_K": 128, "programs": 4}, BF16, True, True),
        (4, (3, 200, 1024), 512, {"programs": 3, "SLICES": 8, "BLOCK_K": 64}, FP16, False, False),
        (4, (8, 40, 1024), 512, {"programs": 2}, BF16, False, False),  # slices of one group
        (8, (5, 70, 656), 0, {}, BF16, False, True),  # ends within a step
        (8, (13, 100, 1200), 0, {"SPLIT_K": 3, "programs": 6}, FP16, False, False),
        (8, (17, 33, 1552), 0, {"BLOCK_M": 16, "BLOCK_K": 128, "PDL": False}, BF16, False, True),
        (8, (1, 1, 16), 0, {"num_stages": 5}, FP16, False, True),
        (8, (5, 70, 640), 128, {}, BF16, False, True),
        (8, (13, 100, 1280), 256, {"SPLIT_K": 3, "programs": 6}, FP16, False, False),
        (8, (17, 33, 1536), 64, {"BLOCK_M": 16, "BLOCK_K": 128}, BF16, False, True),
        (8, (5, 70, 656), 0, {"fp8": True}, BF16, False, True),
        (8, (13, 100, 1280), 128, {"fp8": True, "SPLIT_K": 2, "programs": 6}, FP16, False, False),
        (
            8,
            (3, 200, 1024),
            512,
            {"fp8": True, "programs": 3, "SLICES": 8, "num_warps": 8},
            BF16,
            False,
            False,
        ),
        (16, (5, 70, 656), 0, {}, BF16, False, True),
        (16, (13, 100, 1200), 0, {"SPLIT_K": 3, "programs": 6}, FP16, False, False),
        (
            16,
            (17, 33, 1552),
            0,
            {"BLOCK_M": 16, "BLOCK_K": 128, "num_stages": 3},
            BF16,
            False,
            True,
        ),
        (16, (2, 1, 16), 0, {"num_stages": 5, "PDL": False}, FP16, False, False),
    ],
)
def test_few_rows_as_plain_python(
    bits: int,
    sizes: tuple[int, int, int],
    group: int,
    changed: Config,
    dtype: torch.dtype,
    zero: bool,
    bias: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rings of stages, tiles of a program, slices of a step, scales in their order, parts of K."""
    m, n, k = sizes
    config = {
        "variant": "core", "BLOCK_M": 8, "BLOCK_N": 16, "BLOCK_K": 64, "SPLIT_K": 1, "SLICES": 4,
        "programs_per_core": 1, "PDL": True, "num_warps": 4, "num_stages": 2, **changed,
    }  # fmt: skip
    programs, fp8 = config.pop("programs", 132), config.pop("fp8", False)
    generator = torch.Generator().manual_seed(1)
    x = beside_others(torch.randint(-2, 3, (m, k), generator=generator).to(dtype))
    offset = torch.randint(-9, 10, (n,), generator=generator).to(dtype) if bias else None
    facts = {"GROUP": group, "HAS_ZERO": zero, "HAS_BIAS": bias}
    scale, zeros = x, None
    if bits == 4:
        inputs = w4_inputs(w4_problem(m, n, k, dtype, group=group or k, zero=zero), x.device)
        weight, zeros = beside_others(inputs["weight"]), inputs.get("weight_zero")
        powers = torch.randint(-3, 1, inputs["weight_scale"].shape, generator=generator)
        scale = beside_others(torch.exp2(powers.float()).to(dtype))
        expected = tkernels.reference.w4a16_gemm(x, weight, scale, weight_zero=zeros, bias=offset)
    elif bits == 8 and (group or fp8):
        values = torch.randint(-3, 4, (n, k), generator=generator)
        codes = values.float().to(FP8).view(torch.int8) if fp8 else values.to(torch.int8)
        weight = beside_others(codes)
        powers = torch.randint(-3, 1, (n, k // (group or k)), generator=generator)
        scale = beside_others(torch.exp2(powers.float()))
        as_codes = weight.view(FP8) if fp8 else weight
        expected = tkernels.reference.w8a16_gemm(x, as_codes, scale, bias=offset)
    elif bits == 8:
        weight = beside_others(torch.randint(-128, 128, (n, k), generator=generator).to(torch.int8))
        scale = torch.exp2(torch.randint(-9, 1, (n,), generator=generator).float())
        expected = tkernels.reference.masked_gemm(x, weight, scale, bias=offset, high=True)
    else:
        weight = beside_others(torch.randint(-3, 4, (n, k), generator=generator).to(dtype))
        expected = tkernels.reference.skinny_linear(x, weight, bias=offset)
    modules = [integer_weights_few, few_rows_hopper, integer_decoding]
    machine = CopiesMachine(monkeypatch, modules, {"w_ptr", "s_ptr", "z_ptr"})
    monkeypatch.setattr(integer_weights_few, "bind", machine.bind)
    for name, value in _stand_ins(dtype).items():
        if hasattr(integer_weights_few, name):
            monkeypatch.setattr(integer_weights_few, name, value)
    out = torch.full((m, n + 3), 7.0, dtype=dtype)[:, :n]
    of_scale = 1 if scale.dim() == 1 else scale.stride(0)
    strides = (x.stride(0), weight.stride(0), of_scale, 0 if zeros is None else zeros.stride(0))
    run = integer_weights_few.bound(
        bits, sizes, facts, (*strides, out.stride(0)), config, programs, fp8
    )
    add = integer_weights_few.bound_adding(m, n, bias, out.stride(0), config)
    splits = config["SPLIT_K"]
    part = torch.full((splits * m * n,), torch.nan) if splits > 1 else out
    given = scale if offset is None else offset
    run(x, weight, scale, scale if zeros is None else zeros, given, out, part)
    machine.ended()
    if add is not None:
        add(given, out, part)
    assert torch.equal(out, expected)
    assert bool((out._base[:, n:] == 7.0).all())
