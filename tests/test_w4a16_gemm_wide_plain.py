"""The body of w4a16_gemm for many rows as plain Python: its ring of stages, places and orders."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tkernels
from tests.plain_gluon import block
from tests.plain_warps import WarpsMachine
from tkernels import device, w4a16_gemm_core, w4a16_gemm_wide
from tkernels.device import bind
from tkernels.ops import w4a16_gemm as op
from tkernels.registry import Config
from tkernels.w4a16_cases import w4_inputs, w4_problem

BF16, FP16 = torch.bfloat16, torch.float16


def _codes(halves: torch.Tensor) -> list[torch.Tensor]:
    return [block((halves.int() >> 4 * i & 15).double()) for i in range(4)]


def _stand_ins(dtype: torch.dtype) -> dict[str, Any]:
    """What ``integer_decoding`` promises, in the numbers that sums expect."""
    parts = 64.0 if dtype == BF16 else 1.0

    def numbers(halves: Any, zero: Any, has_zero: bool) -> tuple[Any, ...]:
        less = zero.double() if has_zero else -8.0 / parts
        return tuple((q / parts + less).to(dtype) for q in _codes(halves))

    def scaled(halves: Any, zero: Any, scale: Any, has_zero: bool) -> tuple[Any, ...]:
        return tuple(
            (t.double() * scale.double()).to(dtype) for t in numbers(halves, zero, has_zero)
        )

    return {
        "_numbers": numbers,
        "_less": lambda zeros, _: zeros.double() / -parts,
        "_scaled_numbers": scaled,
        "_scaled_steps": lambda halves, scale: tuple(
            ((q - 8) * scale.double() / 65536.0).to(dtype) for q in _codes(halves)
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
    for name in ("x", "weight", "weight_scale", "weight_zero"):  # views, with others beside them
        if name in inputs:
            t = inputs[name]
            wide = torch.full((len(t), t.shape[1] + 16), 99, dtype=t.dtype)
            wide[:, : t.shape[1]] = t
            inputs[name] = wide[:, : t.shape[1]]
    turn = w4a16_gemm_wide._turn_kernel
    for seed in range(3):
        with monkeypatch.context() as patch:
            machine = WarpsMachine(
                patch, [w4a16_gemm_wide, w4a16_gemm_core], {"w_desc", "s_ptr", "z_ptr"}, seed
            )
            patch.setattr(w4a16_gemm_wide, "_turn_kernel", turn)
            patch.setattr(w4a16_gemm_core, "bind", machine.bind)
            patch.setattr(w4a16_gemm_wide, "bind", _without_pdl)
            for name, value in _stand_ins(dtype).items():
                patch.setattr(w4a16_gemm_wide, name, value)
            out = torch.full((m, n + 3), 7.0, dtype=dtype)[:, :n]
            given = [inputs.get(name) for name in ("x", "weight", "weight_scale", "weight_zero")]
            strides = tuple(0 if t is None else t.stride(0) for t in (*given, out))
            facts = {"GROUP": 0 if group == k else group, "HAS_ZERO": zero, "HAS_BIAS": bias}
            bound = w4a16_gemm_wide.bound
            run = op._bind_hopper(bound, sizes, facts, strides, config, programs)
            run(*given[:3], out, given[3], inputs.get("bias"))
        assert torch.equal(out, tkernels.reference.w4a16_gemm(**inputs)), seed
        assert bool((out._base[:, n:] == 7.0).all())
