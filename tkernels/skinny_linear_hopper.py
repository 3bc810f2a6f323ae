"""The body of ``skinny_linear`` for one row on Hopper (sm_90): ``variant`` "hopper".

Reading weights is all the time there is, so memory must not be idle, between kernels neither. A
program has BLOCK_N columns of the result, and asks for their weights by ``cp.async`` into stages of
shared memory, BLOCK_K columns of x each. With ``PDL`` programs let those of the next kernel start
at once, and fill their stages before they wait for the kernel before: while a short kernel ends,
those that follow it fill the memory of the cores with their weights. What is done behind the wait
is what a chain of kernels takes at least, so it is little: all of x is asked for at once, normed as
it comes, and put into shared memory, where all the warps find it; weights are multiplied in fp32,
element by element, and the sums of all threads meet once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tkernels import device
from tkernels import few_rows_hopper as few
from tkernels.device import Device, cdiv, next_power_of_2
from tkernels.few_rows_hopper import _commit, _load_async, _wait
from tkernels.masked_gemm_hopper import _as
from tkernels.paged_attn_quantized_hopper import (
    _let_next_kernel_start,
    _wait_for_earlier_kernels,
)
from tkernels.registry import Config, Problem

if TYPE_CHECKING:
    from tkernels import _triton as gl
    from tkernels import _triton as gluon
else:
    gl, gluon = few.gl, few.gluon

# What this body has no choice of.
FIXED: Config = {
    "variant": "hopper",
    "BLOCK_M": 1,
    "SWAP": False,
    "AHEAD": False,
    "SPLIT_K": 1,
    "programs_per_core": 0,
}

# fmt: off


@gluon.jit
def _fetch(
    w_s, w_tile, step, col_ok, n_inner, STAGES: gl.constexpr, K: gl.constexpr,
    EVEN_K: gl.constexpr, EVEN_N: gl.constexpr, tile: gl.constexpr,
):
    """Start to bring the weights of a step: [ALL, K / 8, 8]."""
    at = w_tile + step * K
    if EVEN_K and EVEN_N:
        _load_async(w_s.index(step % STAGES), at)
    else:
        ok = col_ok[:, None, None]
        if not EVEN_K:
            k = gl.arange(0, K // 8, gl.SliceLayout(0, gl.SliceLayout(2, tile)))
            ok = ok & (k * 8 < n_inner - step * K)[None, :, None]
        _load_async(w_s.index(step % STAGES), at, mask=ok)


@gluon.jit(do_not_specialize=["n_rows", "steps"])
def _skinny_linear_hopper_kernel(
    x_ptr, gain_ptr, w_ptr, bias_ptr, residual_ptr, out_ptr,
    stride_x, stride_w,  # in units of 16 bytes
    stride_r, stride_o, n_cols, n_inner, n_rows,
    steps,  # of K columns
    eps,
    HAS_NORM: gl.constexpr, HAS_BIAS: gl.constexpr, HAS_RESIDUAL: gl.constexpr,
    GATED: gl.constexpr, EVEN_K: gl.constexpr, EVEN_N: gl.constexpr, PDL: gl.constexpr,
    N: gl.constexpr, K: gl.constexpr,
    X: gl.constexpr,  # columns of x, as a power of two
    STAGES: gl.constexpr, W: gl.constexpr,
):
    ALL: gl.constexpr = N * (2 if GATED else 1)  # rows of weights: of gates, then those of ups
    DTYPE: gl.constexpr = x_ptr.dtype.element_ty
    KEPT: gl.constexpr = gl.float32 if HAS_NORM else DTYPE
    tile: gl.constexpr = gl.BlockedLayout([1, 1, 8], [1, 32, 1], [1, W, 1], [2, 1, 0])
    row: gl.constexpr = gl.SliceLayout(0, tile)
    plain3: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    plain2: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])

    if PDL:
        _let_next_kernel_start()
    r = (gl.program_id(0) % n_rows).to(gl.int64)
    col0 = gl.program_id(0) // n_rows * N

    n = gl.arange(0, ALL, gl.SliceLayout(1, gl.SliceLayout(2, tile)))
    k = gl.arange(0, K // 8, gl.SliceLayout(0, gl.SliceLayout(2, tile)))
    e = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, tile)))
    ok = n % N < n_cols - col0
    n = (col0 + n % N).to(gl.int64) + n // N * n_cols
    w_tile = w_ptr + (n * stride_w * 8)[:, None, None] + (k * 8)[None, :, None] + e[None, None, :]
    w_s = gl.allocate_shared_memory(DTYPE, [STAGES, ALL, K // 8, 8], plain3)
    for i in gl.static_range(STAGES):
        if i < steps:
            _fetch(w_s, w_tile, i, ok, n_inner, STAGES, K, EVEN_K, EVEN_N, tile)
        _commit()

    c = gl.arange(0, X // 8, gl.SliceLayout(1, row))
    e = gl.arange(0, 8, gl.SliceLayout(0, row))
    columns = (c * 8)[:, None] + e[None, :]
    there = (c * 8 < n_inner)[:, None]
    if HAS_NORM:
        gain = gl.load(gain_ptr + columns, mask=there, other=0.0).to(gl.float32)
    x_s = gl.allocate_shared_memory(KEPT, [X // K, K // 8, 8], plain2)
    if PDL:
        _wait_for_earlier_kernels()
    x = gl.load(x_ptr + r * stride_x * 8 + columns, mask=there, other=0.0)
    line: gl.constexpr = gl.BlockedLayout([1], [32], [W], [0])
    n = col0 + gl.arange(0, N, line)
    ok_out = n < n_cols
    if HAS_RESIDUAL:  # volatile: or it would be asked for where it is added, and waited for
        residual = gl.load(residual_ptr + r * stride_r + n, mask=ok_out, other=0.0, volatile=True)
    scale = 1.0
    if HAS_NORM:
        x = x.to(gl.float32)
        squares = x * x
        x = x * gain
    _as(x_s, KEPT, [X // 8, 8], plain2).store(x)
    if HAS_NORM:
        scale = gl.rsqrt(gl.sum(gl.sum(squares, 1), 0) / n_inner + eps)

    acc = gl.full([ALL, K // 8], 0.0, gl.float32, gl.SliceLayout(2, tile))
    for i in range(steps):
        _wait(STAGES - 1)
        w = w_s.index(i % STAGES).load(tile).to(gl.float32)
        acc += gl.sum(w * x_s.index(i).load(row).to(gl.float32)[None, :, :], 2)
        if i + STAGES < steps:
            _fetch(w_s, w_tile, i + STAGES, ok, n_inner, STAGES, K, EVEN_K, EVEN_N, tile)
        _commit()

    y = gl.sum(acc, 1) * scale
    if GATED:
        y, up = gl.split(gl.permute(gl.reshape(y, [2, N]), [1, 0]))
        up = gl.convert_layout(up, line)
        if HAS_BIAS:
            up = up + gl.load(bias_ptr + n_cols + n, mask=ok_out, other=0.0).to(gl.float32)
    y = gl.convert_layout(y, line)
    if HAS_BIAS:
        y = y + gl.load(bias_ptr + n, mask=ok_out, other=0.0).to(gl.float32)
    if GATED:
        y = y / (1.0 + gl.exp(-y)) * up
    if HAS_RESIDUAL:
        y = y + residual.to(gl.float32)
    gl.store(out_ptr + r * stride_o + n, y.to(DTYPE), mask=ok_out)


# fmt: on

# ---- host --------------------------------------------------------------------------------------


def fits(k: int, strides: tuple[int, ...]) -> bool:
    """Whether rows of x and weights, k columns each, start and end at multiples of 16 bytes."""
    return not any(number % 8 for number in (k, strides[0], strides[1]))


def why_unfit(problem: Problem, dev: Device) -> str | None:
    """Reason why this body cannot serve such a problem, whatever the config; None: it can."""
    if dev.arch != "sm90":
        return f"variant hopper needs an sm90 device, got {dev.arch}"
    if not device.is_there(gl):
        return "variant hopper needs a triton that has Gluon (3.6 or newer), got none"
    if problem["dtype"].itemsize != 2:
        return f"variant hopper has 16-bit numbers, got {problem['dtype']}"
    if not problem["aligned"]:
        return "variant hopper needs rows that divide by 16 bytes"
    return None


def default_config(problem: Problem, dev: Device) -> Config:
    """Small programs, of which a core holds many: from about 100 configs of 14 layers on an H200.

    Within 6% of the best of them.
    """
    k, normed = problem["k"], problem["normed"]
    block_n = 4 if problem["gated"] else 8
    wanted = (512 if problem["gated"] else 256) if normed else 1024
    warps = 1 if normed else 2 if k < 4096 else 4
    while _registers_of_x(problem, wanted, warps) > 128:
        warps, wanted = 2 * warps, max(wanted, 512 * warps)
    block_k = max(256, min(wanted, next_power_of_2(k)))
    return {
        "BLOCK_N": block_n,
        "BLOCK_K": block_k,
        "PDL": True,
        "num_warps": min(warps, block_k // 256),
        "num_stages": min(cdiv(k, block_k), max(2, 1280 // block_k) if normed else 3),
        **FIXED,
    }


def _bytes_of_x(problem: Problem, block_k: int) -> int:
    return max(block_k, next_power_of_2(problem["k"])) * (4 if problem["normed"] else 2)


def _registers_of_x(problem: Problem, block_k: int, warps: int) -> int:
    """Of a thread, while x is on its way to shared memory."""
    return _bytes_of_x(problem, block_k) // 4 // 32 // warps


def why_illegal(config: Config, problem: Problem, dev: Device) -> str | None:
    """Reason why a config of this body cannot be launched; None: it can."""
    if wrong := [f"{name} {value}" for name, value in FIXED.items() if config[name] != value]:
        return f"variant hopper has {', '.join(wrong)}"
    n, k = config["BLOCK_N"] * (2 if problem["gated"] else 1), config["BLOCK_K"]
    warps, stages = config["num_warps"], config["num_stages"]
    if config["BLOCK_N"] > 32 or not 256 <= k <= 4096:
        return f"variant hopper has BLOCK_N up to 32 and BLOCK_K of 256 to 4096, got {n} and {k}"
    if 256 * warps > k:
        return f"{warps} warps have nothing to do with {k} columns, 256 each"
    used = stages * n * k * 2 + _bytes_of_x(problem, k) + 1024
    if used > dev.local_mem_bytes:
        return f"the tiles take {used} bytes of shared memory, more than {dev.local_mem_bytes}"
    if (taken := _registers_of_x(problem, k, warps)) > 128:
        return f"x takes {taken} of 255 registers a thread"
    if (taken := (n * k // 2 + n * k // 8) // 32 // warps) > 160:
        return f"the sums and a step's weights take {taken} of 255 registers a thread"
    return None
