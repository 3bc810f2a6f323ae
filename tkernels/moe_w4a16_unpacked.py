"""The body of ``moe_w4a16_gemm`` for many rows: ``variant`` "unpacked".

A product that reads 4 bits decodes each weight once for every BLOCK_M rows of its expert. Here the
weights of some experts are decoded once, into 16 bits, and ``moe_gemm`` multiplies those experts'
rows; then those of the next. See ``w4a16_gemm_unpacked``, whose kernel decodes them.

Rounding weights to x's dtype is what this has beyond the other bodies, whose products are of exact
weights. In fp16 what is beyond its range is lost, so scales in fp32 beside x in fp16 are left to
the others. Weights of experts without rows are decoded as well, and multiply nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tkernels import moe_gemm_hopper
from tkernels import w4a16_gemm_unpacked as layer
from tkernels.config import resolve
from tkernels.device import Device, bind, cdiv
from tkernels.ops import moe_gemm
from tkernels.registry import Config, Problem
from tkernels.w4a16_gemm_unpacked import _unpack_kernel

WORKSPACE = layer.WORKSPACE  # bytes of 16-bit weights at once
LEAST_ROWS = 128  # an expert, on average, from which on this is the default; not measured

# What this body has no choice of.
FIXED: Config = {
    "variant": "unpacked",
    "BLOCK_M": 16,
    "SLICES": 1,
    "programs_per_core": 0,
    "SWAP": False,
    "num_stages": 1,
    "PDL": False,
}


def why_unfit(problem: Problem, dev: Device) -> str | None:
    """Reason why this body cannot serve such a problem, whatever the config; None: it can."""
    return layer.why_unfit(problem, dev)


def default_config(problem: Problem) -> Config:
    """Tiles of 8192 weights, as those of a linear layer."""
    tile = layer.default_config(problem)
    return {**FIXED, **{name: tile[name] for name in ("BLOCK_N", "BLOCK_K", "num_warps")}}


def why_illegal(config: Config, dev: Device) -> str | None:
    """Reason why a config of this body cannot be launched; None: it can."""
    if wrong := [f"{n} {v}" for n, v in FIXED.items() if config[n] != v]:
        return f"variant unpacked has {', '.join(wrong)}"
    return layer.why_illegal({**config, **layer.FIXED}, dev)


def experts_at_once(experts: int, n: int, k: int) -> int:
    """Experts of a piece: all, or as many as make pieces alike of at most WORKSPACE bytes.

    Fours, so that their offsets begin at multiples of 16 bytes, unless fewer fit.
    """
    most = max(1, WORKSPACE // (2 * n * k))
    if most >= experts:
        return experts
    if most < 4:
        return most
    most = most // 4 * 4
    alike = cdiv(experts, cdiv(experts, most))
    return cdiv(alike, 4) * 4


def bound(
    sizes: tuple[int, int, int, int, int],
    facts: dict[str, Any],
    strides: tuple[int, int],
    dtype: torch.dtype,
    config: Config,
) -> Callable[..., None]:
    """``run(x, weight, scale, offsets, ids, out, zero, weights)`` of tensors of such sizes.

    ``sizes``: rows, experts, N, K, rows of x; ``strides``: of rows of x and of out.
    """
    r, e, n, k, n_sources = sizes
    piece = experts_at_once(e, n, k)
    firsts = range(0, e, piece)
    block_n, block_k = config["BLOCK_N"], config["BLOCK_K"]
    n_wide = cdiv(k, block_k)
    groups = k // facts["GROUP"] if facts["GROUP"] else 1
    launches = []
    for first in firsts:
        experts = min(piece, e - first)
        unpack = bind(
            _unpack_kernel,
            (n_wide * cdiv(experts * n, block_n),),
            GROUP=facts["GROUP"] // 8,
            HAS_ZERO=facts["HAS_ZERO"],
            BLOCK_N=block_n,
            BLOCK_K=block_k,
            num_warps=config["num_warps"],
        )
        multiply = _product((r, experts, n, k, n_sources), e, facts, strides, dtype)
        launches.append((first, experts, unpack, multiply))

    def run(
        x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, offsets: torch.Tensor,
        ids: torch.Tensor, out: torch.Tensor, zero: Any, weights: Any,
    ) -> None:  # fmt: skip
        dense = torch.empty((piece, n, k), dtype=x.dtype, device=x.device)
        tickets = torch.zeros((len(launches), 4), dtype=torch.int32, device=x.device)
        zero = scale if zero is None else zero  # not read
        for i, (first, experts, unpack, multiply) in enumerate(launches):
            unpack(
                weight, scale, zero, dense, k // 8, groups, groups, first * n, experts * n, k // 8,
                n_wide,
            )  # fmt: skip
            multiply(
                x, dense, offsets[first : first + experts + 1], ids, out, None, None, None, weights,
                None, tickets[i, :1],
            )  # fmt: skip

    return run


def _product(
    sizes: tuple[int, int, int, int, int],
    experts: int,
    facts: dict[str, Any],
    strides: tuple[int, int],
    dtype: torch.dtype,
) -> Callable[..., None]:
    """What runs ``moe_gemm``'s kernel for some of all ``experts``, by the config of their share."""
    r, e, n, k, n_sources = sizes
    stride_x, stride_o = strides
    aligned = k % 16 == 0 and stride_x % 8 == 0 and stride_x > 0
    silu, top_k = facts["SILU"], facts["TOP_K"]
    share = max(1, r * e // experts)
    values = (share, e, n, k, dtype, "high", False, silu, top_k, aligned)
    cfg, max_programs = resolve(moe_gemm.SPEC, values, None)
    given = {
        "LOW": False,
        "HIGH": True,
        "W_SCALE": False,
        "SILU": silu,
        "ROW_WEIGHT": facts["ROW_WEIGHT"],
        "TOP_K": top_k,
    }
    every = (r, e, n, k, n_sources, dtype.itemsize)
    steps = (k, k, stride_x, stride_o)
    if cfg["variant"] == "portable":
        return moe_gemm._bind(every, given, steps, cfg, max_programs)
    if cfg["variant"] == "hopper":
        fast = moe_gemm_hopper.bind(every, given, steps, cfg)
        plain = {**cfg, **moe_gemm_hopper.PLAIN}
    else:
        fast = moe_gemm._bind(every, given, steps, cfg, max_programs)
        plain = {**cfg, "variant": "portable"}
    return moe_gemm._by_address(fast, moe_gemm._bind(every, given, steps, plain, max_programs))
