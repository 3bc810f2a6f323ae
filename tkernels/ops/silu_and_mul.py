"""SwiGLU's activation (Shazeer, 2020, arXiv 2002.05202): the gate half times the up half.

    out[r, c] = silu(x[r, c]) * x[r, n_cols + c]        silu(a) = a / (1 + exp(-a))

x: [..., 2 * n_cols] as a packed gate|up projection leaves it; out: [..., n_cols]. Rows may lie
anywhere in memory, columns are contiguous. Between load and store everything is fp32.

Element-wise, so a program takes a tile of BLOCK_ROWS x BLOCK_N elements and needs no whole row: a
single wide row is spread over the cores, and narrow rows share a program.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from tkernels import rows
from tkernels.check import describe
from tkernels.config import planned, resolve
from tkernels.device import Device, bind, cdiv, next_power_of_2, tl, triton
from tkernels.registry import Case, Config, Cost, KernelSpec, Problem, op, register


def silu_and_mul_ref(
    x: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    config: Config | None = None,
) -> torch.Tensor:
    """PyTorch version of ``silu_and_mul``: fp32 inside, rounded once."""
    gate, up = x.float().chunk(2, dim=-1)
    # torch's own silu(-inf) is NaN; the limit is 0, which it also gives far before that.
    result = torch.nn.functional.silu(gate.clamp_min(-1e4)).mul_(up)
    return result.to(x.dtype) if out is None else out.copy_(result)


@triton.jit
def _silu_and_mul_kernel(
    x_ptr,
    out_ptr,
    stride_xo,
    stride_xi,
    stride_oo,
    stride_oi,
    n_inner,
    n_inner_tiles,
    n_tiles,
    N_COLS: tl.constexpr,
    TWO_LEVELS: tl.constexpr,  # rows have an outer stride too
    ONE_TILE: tl.constexpr,  # a program has one tile, so it need not loop
    BLOCK_ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    # fmt: off
    if ONE_TILE:
        _silu_and_mul_tile(
            tl.program_id(0), x_ptr, out_ptr, stride_xo, stride_xi, stride_oo, stride_oi,
            n_inner, n_inner_tiles, N_COLS, TWO_LEVELS, BLOCK_ROWS, BLOCK_N)
    else:
        for tile in range(tl.program_id(0), n_tiles, tl.num_programs(0)):
            _silu_and_mul_tile(
                tile, x_ptr, out_ptr, stride_xo, stride_xi, stride_oo, stride_oi,
                n_inner, n_inner_tiles, N_COLS, TWO_LEVELS, BLOCK_ROWS, BLOCK_N)
    # fmt: on


@triton.jit
def _silu_and_mul_tile(
    tile,
    x_ptr,
    out_ptr,
    stride_xo,
    stride_xi,
    stride_oo,
    stride_oi,
    n_inner,
    n_inner_tiles,
    N_COLS: tl.constexpr,
    TWO_LEVELS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    n_col_tiles: tl.constexpr = (N_COLS + BLOCK_N - 1) // BLOCK_N
    cols = (tile % n_col_tiles) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    inner_tile, outer = tile // n_col_tiles, tl.cast(0, tl.int64)
    if TWO_LEVELS:
        outer = (inner_tile // n_inner_tiles).to(tl.int64)
        inner_tile = inner_tile % n_inner_tiles
    inner = inner_tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    ok = (inner < n_inner) & (cols < N_COLS)
    x_rows = x_ptr + outer * stride_xo + inner.to(tl.int64) * stride_xi  # [BLOCK_ROWS, 1]
    out_rows = out_ptr + outer * stride_oo + inner.to(tl.int64) * stride_oi

    gate = tl.load(x_rows + cols, mask=ok, other=0.0).to(tl.float32)
    up = tl.load(x_rows + N_COLS + cols, mask=ok, other=0.0).to(tl.float32)
    # Below -88 exp(-gate) leaves fp32; the true value is under 1e-36, and -inf / inf is NaN.
    # A NaN compares false and passes through.
    silu = tl.where(gate < -88.0, 0.0, gate / (1.0 + tl.exp(-gate)))
    tl.store(out_rows + cols, silu * up, mask=ok)


@op
def silu_and_mul(
    x: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    config: Config | None = None,
) -> torch.Tensor:
    """``silu(gate) * up`` where ``x`` holds gate and up side by side.

    Args:
        x: [..., 2 * n_cols], fp32, bf16 or fp16; n_cols >= 1. Columns are contiguous; the leading
            dimensions may have any strides that two row levels can express.
        out: where to write, [..., n_cols] of the dtype of ``x``, own row strides; may be the gate
            half of ``x`` itself.
        config: launch config; None looks it up.

    Returns:
        ``out``, or a new contiguous tensor. silu(-inf) is 0, silu(inf) is inf, NaN stays NaN.

    Raises:
        TypeError, ValueError: an argument of the wrong kind, shape, dtype, stride or device.
    """
    out_shape, plan = planned(_plan, config, (x,) if out is None else (x, out))
    if out is None:
        out = torch.empty(out_shape, dtype=x.dtype, device=x.device)
    if plan is not None:
        launch, numbers = plan
        launch(x, out, *numbers)
    return out


def _plan(
    x: torch.Tensor, out: torch.Tensor | None = None, *, config: Config | None
) -> tuple[tuple[int, ...], rows.RowPlan | None]:
    """(shape of the result, launch and numbers or None where there are no rows)."""
    both = rows.check_row_input("silu_and_mul", "x", x)
    if both % 2:
        raise ValueError(f"silu_and_mul: x must have shape [..., 2 * n_cols], got {describe(x)}")
    n_cols = both // 2
    shape = (*x.shape[:-1], n_cols)
    if out is None:
        out = torch.empty(shape, dtype=x.dtype, device="meta")  # for its strides
    else:
        rows.check_row_output("silu_and_mul", "out", out, x[..., :n_cols])
    if x.numel() == 0:
        return shape, None
    outer, inner, *strides = rows.row_layout("silu_and_mul", ("x", "out"), (x, out))
    cfg, max_programs = resolve(SPEC, (outer, inner, n_cols, x.dtype), config)
    inner_tiles = cdiv(inner, cfg["BLOCK_ROWS"])
    n_tiles = outer * inner_tiles * cdiv(n_cols, cfg["BLOCK_N"])
    programs = min(n_tiles, max_programs)
    constants = {"N_COLS": n_cols, "TWO_LEVELS": outer > 1, "ONE_TILE": programs == n_tiles}
    launch = bind(_silu_and_mul_kernel, (programs,), **constants, **cfg)
    return shape, (launch, (*strides, inner, inner_tiles, n_tiles))


# ---- facts for tests, bench and tuner --------------------------------------------------------

_LIVE = 3  # fp32 values an element that are alive at once: gate, up, result


def _shape(*, tokens: int, intermediate: int, dtype: torch.dtype = torch.bfloat16) -> Problem:
    """The activation of an MLP whose gate and up projection have ``intermediate`` columns each."""
    return rows.row_problem(tokens, intermediate, dtype)


def _make_inputs(problem: Problem, dev: torch.device) -> dict[str, Any]:
    # Outer groups with a gap behind each, so that rows really need two strides.
    outer, gap = problem["n_outer"], 1 if problem["n_outer"] > 1 else 0
    apart = {**problem, "n_inner": problem["n_inner"] + gap}
    x = rows.random_rows(apart, dev, seed=0, cols=2 * problem["n_cols"])
    return {"x": x[:, : problem["n_inner"]] if outer > 1 else x}


def _default_config(problem: Problem, dev: Device) -> Config:
    if not dev.registers:  # a vector unit: no threads
        return rows.default_row_config(problem, dev, live=_LIVE)
    n_rows, n_cols = problem["n_outer"] * problem["n_inner"], problem["n_cols"]
    width = next_power_of_2(n_cols)
    vector = 16 // problem["dtype"].itemsize
    # One 16-byte vector of each half a thread. Few rows are cut finer, so that all cores help.
    block_n = min(width, 128 * vector)
    while block_n > 32 * vector and n_rows * cdiv(n_cols, block_n) < dev.num_cores:
        block_n //= 2
    block_rows = min(32, max(1, 128 * vector // block_n), next_power_of_2(problem["n_inner"]))
    if n_rows * cdiv(n_cols, block_n) <= 8 * dev.num_cores:
        block_rows = 1
    warps = max(1, min(4, block_rows * block_n // (32 * vector)))
    return {
        "BLOCK_ROWS": block_rows,
        "BLOCK_N": block_n,
        "num_warps": warps,
        "programs_per_core": 0,
    }


def _why_illegal(config: Config, problem: Problem, dev: Device) -> str | None:
    return rows.why_illegal_rows(config, problem, dev, live=_LIVE)


def _cost(problem: Problem) -> Cost:
    n = problem["n_outer"] * problem["n_inner"] * problem["n_cols"]
    return Cost(flops=5 * n, bytes=3 * n * problem["dtype"].itemsize)


def _providers(inputs: dict[str, Any]) -> dict[str, Any]:
    x = inputs["x"]
    gate, up = x.chunk(2, dim=-1)
    out = torch.empty_like(gate, memory_format=torch.contiguous_format)
    peers: dict[str, Any] = {"torch": lambda: torch.nn.functional.silu(gate) * up}
    with contextlib.suppress(ImportError):
        import flashinfer

        peers["flashinfer"] = lambda: flashinfer.silu_and_mul(x, out)
    return peers


SPEC = register(
    KernelSpec(
        name="silu_and_mul",
        launch=silu_and_mul,
        reference=silu_and_mul_ref,
        problem_fields=rows.ROW_FIELDS,
        make_inputs=_make_inputs,
        cases=(
            Case("5x64-bf16", rows.row_problem(5, 64, torch.bfloat16)),
            Case("3x1000-fp32", rows.row_problem(3, 1000, torch.float32)),
            Case("2x1-fp16", rows.row_problem(2, 1, torch.float16), frozenset({"edge"})),
            Case("1x33-bf16", rows.row_problem(1, 33, torch.bfloat16), frozenset({"edge"})),
            Case("7x3x24-fp16", rows.row_problem(3, 24, torch.float16, outer=7)),
            Case("1x5003-bf16", rows.row_problem(1, 5003, torch.bfloat16), frozenset({"edge"})),
            Case("2x4097-fp32", rows.row_problem(2, 4097, torch.float32), frozenset({"edge"})),
            *(
                Case(  # the MLP of Qwen3 8B
                    f"{tokens}x12288-bf16",
                    rows.row_problem(tokens, 12288, torch.bfloat16),
                    frozenset({"bench"}),
                )
                for tokens in (1, 64, 4096)
            ),
        ),
        tuning_key=rows.row_tuning_key,
        space=rows.row_space,
        default_config=_default_config,
        why_illegal=_why_illegal,
        cost=_cost,
        outputs=("out",),
        providers=_providers,
        shape=_shape,
    )
)
