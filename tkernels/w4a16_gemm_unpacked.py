"""The body of ``w4a16_gemm`` for many rows: ``variant`` "unpacked".

A product that reads 4 bits decodes each weight once for every BLOCK_M rows. Of many rows that is
what bounds it: 4096 rows of 12288 x 4096 took 1590 us, 2.8 times as long as cuBLAS in 16 bits (on
an H200, one run). So weights are decoded once, into 16 bits, and PyTorch's product (cuBLAS) reads
those: 615 us, of which 45 are the decoding.

    w = round(float32(q - zero) * scale)        to x's dtype, as dequantised weights would be
    out = x @ w^T + bias

Rounding weights, and a bias in fp32, to x's dtype is what this has beyond the other bodies, whose
products are of exact weights: half a step of bf16 (2^-9) a weight, as of any layer in 16 bits. In
fp16 what is beyond its range is lost, so scales in fp32 beside x in fp16 are left to the others.
Outputs are taken in pieces of at most WORKSPACE bytes of weights, or of _PIECE outputs; the
workspace is PyTorch's to give and to take back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tkernels.config import why_no_launch
from tkernels.device import Device, bind, cdiv, next_power_of_2, tl, triton
from tkernels.registry import Config, Problem

WORKSPACE = 128 * 2**20  # bytes of 16-bit weights at once; of 32 to 192 MiB none was much faster
_PIECE = 256  # outputs of which a piece has a multiple: a tile of cuBLAS, about

# What this body has no choice of.
FIXED: Config = {
    "variant": "unpacked",
    "BLOCK_M": 16,
    "SPLIT_K": 1,
    "SLICES": 1,
    "programs_per_core": 0,
    "num_stages": 1,
    "PDL": False,
}


@triton.jit(do_not_specialize=["first", "n_rows", "n_words", "n_wide"])
def _unpack_kernel(
    w_ptr,
    s_ptr,
    z_ptr,
    out_ptr,
    stride_w,
    stride_s,
    stride_z,
    first,  # row of the weights that is the first of out
    n_rows,
    n_words,
    n_wide,  # tiles side by side in a row
    GROUP: tl.constexpr,  # words with one scale; 0: a row has one
    HAS_ZERO: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """out [n_rows, 8 * n_words] = (q - zero) * scale of rows ``first`` on; a program a tile."""
    WORDS: tl.constexpr = BLOCK_K // 8
    row = tl.program_id(0) // n_wide * BLOCK_N + tl.arange(0, BLOCK_N)
    word = tl.program_id(0) % n_wide * WORDS + tl.arange(0, WORDS)
    ok = (row < n_rows)[:, None] & (word < n_words)[None, :]
    row64 = row.to(tl.int64)
    given = row64 + first
    words = tl.load(w_ptr + given[:, None] * stride_w + word[None, :], mask=ok, other=0)
    group = word * 0
    if GROUP > 0:
        group = word // GROUP
    scale = tl.load(s_ptr + given[:, None] * stride_s + group[None, :], mask=ok, other=0.0)
    zero = tl.full([BLOCK_N, WORDS], 8.0, tl.float32)
    if HAS_ZERO:
        zero = tl.load(z_ptr + given[:, None] * stride_z + group[None, :], mask=ok, other=0)
        zero = zero.to(tl.float32)
    nibble = tl.arange(0, 8)[None, None, :]
    # Beside 2^23 a whole number's bits are the last ones: no conversion, which a core has few of.
    bits = ((words[:, :, None] >> (4 * nibble)) & 15) | 0x4B000000
    steps = bits.to(tl.float32, bitcast=True) - (zero + 8388608.0)[:, :, None]
    values = steps * scale.to(tl.float32)[:, :, None]
    at = row64[:, None] * (n_words * 8) + word[None, :] * 8
    values = values.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + at[:, :, None] + nibble, values, mask=ok[:, :, None])


# ---- host --------------------------------------------------------------------------------------


def least_rows(n: int, k: int) -> int:
    """From how many rows on this is the default: the more weights, the later (as an H200 had it).

    us, this and the portable body: 96 rows of 4096 x 4096 30 and 40, of 12288 x 4096 76 and 73;
    128 of it 75 and 80, of 24576 x 4096 144 and 116; 256 of that 160 and 168. Keys of configs end
    at these rows, too.
    """
    size = 2 * n * k
    return 65 if size <= 32 * 2**20 else 129 if size <= WORKSPACE else 257


def why_unfit(problem: Problem, dev: Device) -> str | None:
    """Reason why this body cannot serve such a problem, whatever the config; None: it can."""
    if not dev.registers:
        return f"variant unpacked needs an NVIDIA device, got {dev.arch}"
    if problem["dtype"] == torch.float16 and problem["scale"] == torch.float32:
        return "variant unpacked has weights in fp16, which scales in fp32 may not fit"
    return None


def default_config(problem: Problem) -> Config:
    """Tiles of 8192 weights."""
    columns = min(512, max(64, next_power_of_2(problem["k"])))
    return {**FIXED, "BLOCK_N": 8192 // columns, "BLOCK_K": columns, "num_warps": 8}


def why_illegal(config: Config, dev: Device) -> str | None:
    """Reason why a config of this body cannot be launched; None: it can."""
    if why := why_no_launch(config, dev, "BLOCK_N", "BLOCK_K"):
        return why
    if wrong := [f"{n} {v}" for n, v in FIXED.items() if config[n] != v]:
        return f"variant unpacked has {', '.join(wrong)}"
    a_thread = config["BLOCK_N"] * config["BLOCK_K"] // (32 * config["num_warps"])
    return f"{a_thread} weights a thread would not fit its registers" if a_thread > 128 else None


def outputs_at_once(n: int, k: int) -> int:
    """Outputs of a piece: all, or as many as make pieces alike of at most WORKSPACE bytes."""
    most = max(_PIECE, WORKSPACE // (2 * k) // _PIECE * _PIECE)
    pieces = cdiv(n, most)
    return n if pieces == 1 else cdiv(cdiv(n, pieces), _PIECE) * _PIECE


def bound(
    sizes: tuple[int, int, int], facts: dict[str, Any], strides: tuple[int, ...], config: Config
) -> Callable[..., None]:
    """``run(x, weight, scale, out, zero, bias)`` of tensors of such sizes and strides."""
    _, n, k = sizes
    piece = outputs_at_once(n, k)
    block_n, block_k = config["BLOCK_N"], config["BLOCK_K"]
    n_wide = cdiv(k, block_k)

    def unpacking(rows: int) -> Callable[..., None]:
        return bind(
            _unpack_kernel,
            (n_wide * cdiv(rows, block_n),),
            GROUP=facts["GROUP"] // 8,
            HAS_ZERO=facts["HAS_ZERO"],
            BLOCK_N=block_n,
            BLOCK_K=block_k,
            num_warps=config["num_warps"],
        )

    pieces = [(first, min(piece, n - first)) for first in range(0, n, piece)]
    launches = [(first, rows, unpacking(rows)) for first, rows in pieces]

    @torch.no_grad()  # as no kernel of this library has gradients
    def run(
        x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, out: torch.Tensor, zero: Any,
        bias: Any,
    ) -> None:  # fmt: skip
        dense = torch.empty((piece, k), dtype=x.dtype, device=x.device)
        zero = scale if zero is None else zero  # not read
        bias = None if bias is None else bias.to(x.dtype)
        for first, rows, unpack in launches:
            unpack(weight, scale, zero, dense, *strides[1:4], first, rows, k // 8, n_wide)
            part, result = dense[:rows].t(), out[:, first : first + rows]
            if bias is None:
                torch.mm(x, part, out=result)
            else:
                torch.addmm(bias[first : first + rows], x, part, out=result)

    return run
