"""What kernels share that quantise the rows that they have just computed, as they would be stored.

Codes and scales are those of ``quantize_per_token``, of rows that are rounded to the dtype of x
first: the bits are those of the two kernels one after the other. The 16-bit rows themselves are
written only where ``keep`` asks for them. An operator returns the same number of tensors always, so
without ``keep`` the result ``out`` has no rows.
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
    describe,
)
from tkernels.config import resolve
from tkernels.device import Device, Kernel, bind, cdiv, tl, triton
from tkernels.ops.paged_attn import _has_pdl
from tkernels.registry import Case, Config, KernelSpec, Problem

FIELDS = ("n_rows", "n_cols", "dtype", "keep")
# Absolute maxima below this count as 0: 127 / absmax would leave fp32.
_SMALLEST = tl.constexpr(2.0**-100)


# ---- in kernels ------------------------------------------------------------------------------


@triton.jit
def _bits(values):
    """Magnitudes of fp32 as integers of the same order, in which NaN is above infinity."""
    return tl.abs(values).to(tl.int32, bitcast=True)


@triton.jit
def as_stored(values, dtype: tl.constexpr, ASM: tl.constexpr):
    """``values`` of fp32 rounded to ``dtype``, two in one instruction where they are not stored."""
    if ASM and dtype == tl.bfloat16:
        rounded = tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [values], dtype=tl.bfloat16, is_pure=True,
            pack=2)  # fmt: skip
    elif ASM and dtype == tl.float16:
        rounded = tl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [values], dtype=tl.float16, is_pure=True,
            pack=2)  # fmt: skip
    else:
        rounded = values.to(dtype)
    return rounded


@triton.jit
def _scales(absmax, spoilt):
    """(scale, its inverse) of rows; ``spoilt`` is NaN where a value is NaN or infinite, else 0."""
    absmax = tl.where(absmax < _SMALLEST, 0.0, absmax)
    scale = tl.div_rn(absmax, 127.0) + spoilt
    some = (absmax > 0) & (spoilt == 0)
    return scale, tl.where(some, tl.div_rn(127.0, tl.where(some, absmax, 1.0)), 0.0)


@triton.jit
def _codes(
    x, inverse, FOLD: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """int8 codes, half to even: adding 1.5 * 2^23 rounds."""
    steps = x * inverse[:, None]
    steps = tl.where(steps == steps, steps, 0.0)  # of a spoilt row
    steps = tl.minimum(tl.maximum(steps, -127.0), 127.0)
    rounded = (steps + 12582912.0) - 12582912.0
    if FOLD > 0:  # Ascend turns the tile for this, and pads what were its rows to 32 bytes
        folded = tl.reshape(rounded, (BLOCK_ROWS * BLOCK_N // FOLD, FOLD))
        codes = tl.reshape(folded.to(tl.int8), (BLOCK_ROWS, BLOCK_N))
    else:
        codes = rounded.to(tl.int8)
    return codes


@triton.jit
def scales_of(values, THREADS: tl.constexpr):
    """(scale, its inverse) of rows of fp32."""
    if THREADS:  # one reduction, of integers, in place of two
        absmax = tl.max(_bits(values), 1).to(tl.float32, bitcast=True)
        spoilt = absmax * 0.0
    else:
        absmax = tl.max(tl.abs(values), 1)  # maxima pass NaN by; sums do not
        spoilt = tl.sum(values * 0.0, 1)
    return _scales(absmax, spoilt)


@triton.jit
def collect(values, top, spoilt, THREADS: tl.constexpr):
    """``top`` and ``spoilt``, zeros at first, with one more block of the rows in them."""
    if THREADS:
        top = tl.maximum(_bits(top), _bits(values)).to(tl.float32, bitcast=True)
    else:
        top = tl.maximum(top, tl.abs(values))
        spoilt += values * 0.0
    return top, spoilt


@triton.jit
def scales_of_collected(top, spoilt, THREADS: tl.constexpr):
    """What ``scales_of`` gives for all blocks that ``collect`` has seen."""
    if THREADS:
        scale, inverse = scales_of(top, THREADS)
    else:
        scale, inverse = _scales(tl.max(top, 1), tl.sum(spoilt, 1))
    return scale, inverse


@triton.jit
def store_codes(
    rows,  # pointers [BLOCK_ROWS, 1]
    cols,
    values,
    inverse,
    ok,
    dtype: tl.constexpr,
    THREADS: tl.constexpr,
    FOLD: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Write the codes of rows of ``dtype``, which are those of ``quantize_per_token``."""
    pointers = rows + cols
    if THREADS:
        # No product is above 127.00002 or below its opposite; of a spoilt row, whose inverse is 0,
        # what is not 0 is NaN, and minima pass that by. Adding 1.5 * 2^23 rounds, and leaves the
        # code in the low byte.
        most = tl.where(inverse > 0, 127.0, 0.0)
        steps = tl.minimum(values * inverse[:, None], most[:, None])
        bits = (steps + 12582912.0).to(tl.int32, bitcast=True)
        # Nothing is below 0 here, but ptxas 12.8 makes a conversion from float, which saturates, of
        # a byte that is stored right from a sum.
        codes = tl.maximum(bits, 0).to(tl.int8)
        # Bytes by the 16 would deal the columns out to threads in another way than 16 bytes of
        # the rows, and sums, which depend on that, would not be those of the kernels in 16 bits.
        pointers = tl.max_contiguous(pointers, [1, 128 // dtype.primitive_bitwidth])
    else:
        codes = _codes(values, inverse, FOLD, BLOCK_ROWS, BLOCK_N)
    tl.store(pointers, codes, mask=ok)


# ---- in launchers ----------------------------------------------------------------------------


def check_matrix(op: str, x: torch.Tensor) -> None:
    """``x`` is [n_rows, n_cols] of floats with contiguous columns."""
    rows.check_row_input(op, "x", x)
    check_shape(op, "x", x, n_rows=None, n_cols=None)


def new_codes(x: torch.Tensor, n_cols: int) -> torch.Tensor:
    """int8 codes for the rows of ``x``."""
    return torch.empty((x.shape[0], n_cols), dtype=torch.int8, device=x.device)


def new_scales(x: torch.Tensor) -> torch.Tensor:
    """A scale for each row of ``x``."""
    return torch.empty((x.shape[0],), dtype=torch.float32, device=x.device)


def new_kept(x: torch.Tensor, n_cols: int, keep: bool) -> torch.Tensor:
    """The rows that are kept: all or none."""
    return torch.empty((x.shape[0] if keep else 0, n_cols), dtype=x.dtype, device=x.device)


def check_results(
    op: str,
    x: torch.Tensor,
    n_cols: int,
    keep: bool,
    out: torch.Tensor,
    q_out: torch.Tensor,
    scale_out: torch.Tensor,
) -> None:
    """What is written fits ``x`` and rows of ``n_cols``."""
    if type(keep) is not bool:
        raise TypeError(f"{op}: keep must be a bool, got {describe(keep)}")
    n_rows = x.shape[0]
    matrices = (("out", out, x.dtype, n_rows if keep else 0), ("q_out", q_out, torch.int8, n_rows))
    for name, t, dtype, count in matrices:
        check_tensor(op, name, t)
        check_dtype(op, name, t, (dtype,))
        check_shape(op, name, t, n_rows=count, n_cols=n_cols)
    check_tensor(op, "scale_out", scale_out)
    check_dtype(op, "scale_out", scale_out, (torch.float32,))
    check_shape(op, "scale_out", scale_out, n_rows=n_rows)
    for name, t in (("out", out), ("q_out", q_out), ("scale_out", scale_out)):
        check_last_contiguous(op, name, t)
        check_no_overlap(op, name, t)


def plan(
    spec: KernelSpec,
    kernel: Kernel,
    x: torch.Tensor,
    n_cols: int,
    keep: bool,
    strides: tuple[int, ...],
    config: Config | None,
) -> rows.RowPlan | None:
    """Launch, and the ``strides`` and counts of its call; None where there are no rows.

    The kernel takes ``n_rows, n_tiles`` behind the strides, and the constants N_COLS, KEEP,
    ONE_TILE, THREADS (the chip has some), ASM and FOLD besides its config.
    """
    rows.row_layout(spec.name, ["x"], [x])  # not more rows than 32 bits count
    n_rows = x.shape[0]
    if n_rows == 0:
        return None
    cfg, max_programs = resolve(spec, (n_rows, n_cols, x.dtype, keep), config)
    n_tiles = cdiv(n_rows, cfg["BLOCK_ROWS"])
    programs = min(n_tiles, max_programs)
    dev = device.current()
    cfg.setdefault("PDL", False)  # Ascend has none
    launch = bind(
        kernel,
        (programs,),
        N_COLS=n_cols,
        KEEP=keep,
        ONE_TILE=programs == n_tiles,
        THREADS=dev.registers > 0,
        ASM=dev.registers > 0 and dev.arch != "interpret" and cfg["BLOCK_N"] > 1,  # two at once
        FOLD=64 if dev.is_npu and cfg["BLOCK_N"] >= 64 else 0,
        **cfg,
        **({"launch_pdl": True} if cfg["PDL"] else {}),
    )
    return launch, (*strides, n_rows, n_tiles)


# ---- facts for tests, bench and tuner --------------------------------------------------------


def problem(
    n_rows: int, n_cols: int, dtype: torch.dtype = torch.bfloat16, *, keep: bool = False
) -> dict[str, Any]:
    """Problem of ``n_rows`` results of ``n_cols``."""
    return {"n_rows": n_rows, "n_cols": n_cols, "dtype": dtype, "keep": keep}


def cases(columns: int) -> tuple[Case, ...]:
    """Odd problems for tests, and rows of ``columns`` for the bench."""
    edge, bench = frozenset({"edge"}), frozenset({"bench"})
    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    return (
        Case("5x64-keep-bf16", problem(5, 64, bf16, keep=True)),
        Case("5x64-bf16", problem(5, 64, bf16)),
        Case("3x1000-keep-fp32", problem(3, 1000, fp32, keep=True)),
        Case("2x1-fp16", problem(2, 1, fp16), edge),
        Case("1x33-keep-bf16", problem(1, 33, bf16, keep=True), edge),
        Case("2x4097-fp32", problem(2, 4097, fp32), edge),
        Case("2x20000-keep-fp16", problem(2, 20000, fp16, keep=True), edge),
        *(
            Case(f"{t}x{columns}-{'keep-' * keep}bf16", problem(t, columns, keep=keep), bench)
            for keep in (False, True)
            for t in ((1, 16, 64, 4096), (16, 4096))[keep]
        ),
    )


def row_problem(problem: Problem) -> dict[str, Any]:
    """The same rows for the functions of ``rows``."""
    return rows.row_problem(problem["n_rows"], problem["n_cols"], problem["dtype"])


def tuning_key(problem: Problem) -> dict[str, Any]:
    """Columns, bytes an element, rows up to a power of four, and whether rows are kept."""
    return {**rows.row_tuning_key(row_problem(problem)), "keep": problem["keep"]}


def space(dev: Device) -> dict[str, list[Any]]:
    """That of rows, and programmatic dependent launch where the chip has it."""
    found: dict[str, list[Any]] = {**rows.row_space(dev)}
    return {**found, "PDL": [False, True] if _has_pdl(dev) else [False]} if dev.registers else found


def default_config(problem: Problem, dev: Device, *, live: int) -> Config:
    """Heuristic tile of rows that keep ``live`` fp32 values an element."""
    config = rows.default_row_config(row_problem(problem), dev, live=live)
    if dev.registers:
        return {**config, "PDL": _has_pdl(dev)}
    fits = max(1, _NPU_TILE // config["BLOCK_N"])
    return {**config, "BLOCK_ROWS": min(config["BLOCK_ROWS"], _NPU_ROWS, fits)}


# Measured by Huawei's compiler: how it makes int8 of more takes several times their bytes.
_NPU_ROWS, _NPU_TILE = 4, 4096


def why_illegal(config: Config, problem: Problem, dev: Device, *, live: int) -> str | None:
    """Reason why a tile does not fit ``dev``, or None."""
    if config.get("PDL") and not _has_pdl(dev):
        return f"PDL needs sm90 or later, got {dev.arch}"
    block_rows, block_n = config["BLOCK_ROWS"], config["BLOCK_N"]
    if dev.is_npu and (block_rows > _NPU_ROWS or block_rows * block_n > _NPU_TILE):
        return (
            f"a tile has at most {_NPU_ROWS} rows and {_NPU_TILE} numbers on an NPU, got {config}"
        )
    if dev.registers and block_n == 1 and problem["n_cols"] > 1:
        return "a loop over tiles of one column is not compiled by Triton 3.6"
    return rows.why_illegal_rows(config, row_problem(problem), dev, live=live)
