"""What is special to silu_and_mul_quantized: the bits of the two kernels that it is."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest
import torch

import tkernels
from tests.compiled_for import lines_of
from tkernels import device
from tkernels.ops.silu_and_mul_quantized import SPEC
from tkernels.quantized_rows import problem
from tkernels.registry import Config
from tkernels.testing import bytes_of, guarded, poisoned_memory

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
CONFIGS = 20 if device.KIND == "cuda" else 4


def random_rows(
    rows: int, cols: int, dtype: torch.dtype, dev: torch.device, seed: int = 0
) -> torch.Tensor:
    """Gaussian rows of different sizes, one of them zero."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 2 * cols, generator=generator) * torch.logspace(-2, 2, rows)[:, None]
    x[rows // 2] = 0
    return x.to(dtype).to(dev)


def drawn(rng: random.Random, rows: int, cols: int, dtype: torch.dtype) -> Config:
    """A random legal config; on the CPU, where each block takes its time, of few blocks a row."""
    facts = device.current()
    space = SPEC.space(facts)
    while True:
        config = {name: rng.choice(values) for name, values in space.items()}
        few = device.KIND == "cuda" or cols // 16 <= config["BLOCK_N"] <= 4 * cols
        if few and SPEC.why_illegal(config, problem(rows, cols, dtype), facts) is None:
            return config


def unfused(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    result = tkernels.silu_and_mul(x)
    return (*tkernels.quantize_per_token(result), result)


def assert_same_bits(got: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]) -> None:
    for name, a, b in zip(SPEC.outputs, got, expected, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(bytes_of(a), bytes_of(b)), name


def small(cols: int, **more: int) -> Config:
    """A config of one warp, in tiles of the sizes given."""
    facts = device.current()
    config = {**SPEC.default_config(problem(8, cols), facts), **more}
    return {**config, "num_warps": 1} if "num_warps" in config else config


@each_dtype
@pytest.mark.parametrize("cols", [1, 40, 300])
def test_bits_of_the_two_kernels(cols: int, dtype: torch.dtype, dev: torch.device) -> None:
    """Whatever the configs of both: a maximum knows no order."""
    rng = random.Random(f"{cols} {dtype}")
    for i in range(CONFIGS):
        rows = rng.choice([1, 3, 7])
        x = random_rows(rows, cols, dtype, dev, seed=i)
        config = drawn(rng, rows, cols, dtype)
        expected = unfused(x)
        with poisoned_memory():
            kept = tkernels.silu_and_mul_quantized(x, keep=True, config=config)
            plain = tkernels.silu_and_mul_quantized(x, config=config)
        assert_same_bits(kept, expected)
        assert_same_bits(plain, (*expected[:2], expected[2][:0]))


@pytest.mark.parametrize("block", [64, 16])  # in one tile, and in several
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("half", [0, 40], ids=["gate", "up"])
def test_a_spoilt_row_reads_nan_and_spoils_no_other(
    half: int, value: float, block: int, dev: torch.device
) -> None:
    x = random_rows(5, 40, torch.bfloat16, dev)
    config = small(40, BLOCK_ROWS=4, BLOCK_N=block)
    before = tkernels.silu_and_mul_quantized(x, keep=True, config=config)
    x[3, half + 33] = value
    codes, scale, result = tkernels.silu_and_mul_quantized(x, keep=True, config=config)
    if half == 0 and value == -math.inf:  # a gate that is shut
        assert float(result[3, 33]) == 0.0
        assert bool(scale[3].isfinite())
    else:
        assert bool(scale[3].isnan())
        assert not codes[3].any()
        assert not bool(result[3, 33].isfinite())
    others = [0, 1, 2, 4]
    assert_same_bits(
        (codes[others], scale[others], result[others]), tuple(t[others] for t in before)
    )


def test_products_that_leave_fp16_spoil_their_row(dev: torch.device) -> None:
    """The rounding to fp16 makes infinities of numbers that fp32 still holds."""
    x = torch.full((3, 32), 300.0, dtype=torch.float16, device=dev)
    x[1] = 200.0
    for block in (16, 4):
        codes, scale, _ = tkernels.silu_and_mul_quantized(
            x, config=small(16, BLOCK_ROWS=1, BLOCK_N=block)
        )
        assert scale.isnan().tolist() == [True, False, True]
        assert codes.tolist() == [[0] * 16, [127] * 16, [0] * 16]


@pytest.mark.parametrize("block", [64, 16])
def test_rows_may_take_the_place_of_the_gates(block: int, dev: torch.device) -> None:
    x = random_rows(5, 40, torch.bfloat16, dev)
    config = small(40, BLOCK_ROWS=2, BLOCK_N=block)
    expected = tkernels.silu_and_mul_quantized(x, keep=True, config=config)
    got = tkernels.silu_and_mul_quantized(x, keep=True, out=x[:, :40], config=config)
    assert_same_bits(got, expected)
    assert torch.equal(x[:, :40], expected[2])


def test_without_keep_no_rows_are_written(dev: torch.device) -> None:
    """Rows of results have guards on all sides; without ``keep`` there are two results."""
    x = random_rows(5, 40, torch.bfloat16, dev)
    expected = tkernels.silu_and_mul_quantized(x)
    outs = {
        name: guarded(torch.full_like(t, 77))
        for name, t in zip(SPEC.outputs[:2], expected[:2], strict=True)
    }
    got = tkernels.silu_and_mul_quantized(x, **{name: g.tensor for name, g in outs.items()})
    assert_same_bits(got, expected)
    assert got[2].shape == (0, 40)
    for name, g in outs.items():
        g.check(name)


def test_refuses_what_does_not_fit(dev: torch.device) -> None:
    x = torch.randn(3, 8, device=dev)
    call = tkernels.silu_and_mul_quantized
    name = "^silu_and_mul_quantized: "
    with pytest.raises(ValueError, match=rf"{name}x must have shape \[n_rows, n_cols\], got"):
        call(x[None])
    with pytest.raises(ValueError, match=rf"{name}x must have shape \[n_rows, 2 \* n_cols\], got"):
        call(x[:, :7])
    with pytest.raises(ValueError, match=rf"{name}out must have shape \[n_rows=0, n_cols=4\], got"):
        call(x, out=torch.empty(3, 4, device=dev))
    with pytest.raises(ValueError, match=rf"{name}scale_out must have shape \[n_rows=3\], got"):
        call(x, scale_out=torch.empty(4, device=dev))
    with pytest.raises(TypeError, match=rf"{name}keep must be a bool, got 1 \(int\)"):
        call(x, keep=1)  # type: ignore[arg-type]


STORES_BYTES = """
import subprocess
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from tkernels import device, offline
from tkernels.ops.silu_and_mul_quantized import SPEC
from tkernels.quantized_rows import problem

config = SPEC.default_config(problem(8, 40), device.current())
config = {**config, "BLOCK_ROWS": 2, "BLOCK_N": 64, "num_warps": 1}
with FakeTensorMode(), offline.record_launches() as launches:
    x = torch.empty(5, 80, dtype=torch.bfloat16)
    SPEC.launch(x, keep=True, out=x[:, :40], config=config)
with open(given + "/x.cubin", "wb") as file:
    file.write(offline.compiled_cuda(launches[0], 90).asm["cubin"])
tool = device.triton.knobs.nvidia.cuobjdump.path
print(subprocess.run([tool, "-sass", given + "/x.cubin"], capture_output=True, text=True).stdout)
"""


@pytest.mark.slow
def test_bytes_are_not_converted_from_sums(tmp_path: Path) -> None:
    """ptxas 12.8, which Triton 3.6 has, took the low byte of a sum for a saturating conversion
    where each byte is stored alone; newer ones do not."""
    code = "\n".join(lines_of(f"given = {str(tmp_path)!r}\n" + STORES_BYTES))
    assert "STS.U8" in code or "STG.E.U8" in code
    assert "F2I" not in code
