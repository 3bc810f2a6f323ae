"""A linear layer with weights of 8 bits and activations of 16, and scales for groups: W8A16.

    out[m, n] = (sum over k of x[m, k] * code[n, k] * scale[n, k // group]) + bias[n]

x, out: [M, K] and [M, N], bf16 or fp16; weight: int8 or float8_e4m3fn [N, K]; weight_scale:
[N, K/group]. ``tkernels/w8_format.py`` makes that of scales for blocks.

Codes are exact in 16 bits, sums are fp32, and a group's sum is scaled in fp32: what is rounded is
what a product of x with exact weights would round. Kernels see bytes: not every device has a type
of FP8. An e4m3 number is the same bits, three places up, in an fp16 number of 2^-8 of it.

A step of the loop over K has columns of one group. Few tiles do not fill a chip: then SPLIT_K
programs share the K of a tile, each leaves its sum (fp32) in a workspace, and a second kernel adds
these in order. ``variant`` "core", for few rows on Hopper, and "wide", for more, are
``integer_weights_few`` and ``integer_weights_many``, as ``w8a16_gemm_hopper`` has them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tkernels import device, integer_weights_few, w8a16_gemm_hopper
from tkernels.check import (
    check_dtype,
    check_last_contiguous,
    check_no_overlap,
    check_own,
    check_shape,
    check_tensor,
    describe,
)
from tkernels.config import planned, resolve, why_no_room
from tkernels.device import Device, bind, cdiv, next_power_of_2, tl, triton
from tkernels.ops.paged_attn import _has_pdl, _let_next_kernel_start, _wait_for_earlier_kernels
from tkernels.ops.w4a16_gemm import _bind_adding
from tkernels.registry import Config, KernelSpec, Problem, op, register
from tkernels.w4_format import group_of
from tkernels.w8_format import CODES, dequantize_w8
from tkernels.w8a16_cases import W8_CASES, w8_cost, w8_inputs, w8_peers, w8_shape

_OP = "w8a16_gemm"
_SCALES = (torch.float32, torch.bfloat16, torch.float16)


def w8a16_gemm_ref(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    config: Config | None = None,
) -> torch.Tensor:
    """PyTorch version of ``w8a16_gemm``: weights in fp32, and a product."""
    y = x.float() @ dequantize_w8(weight, weight_scale).t()
    if bias is not None:
        y = y + bias.float()
    return y.to(x.dtype) if out is None else out.copy_(y)


# ---- kernels ---------------------------------------------------------------------------------
# fmt: off


@triton.jit
def _numbers_of_bytes(codes, DTYPE: tl.constexpr, FP8: tl.constexpr):
    """Codes, int8, as numbers of DTYPE: exact."""
    if FP8:
        bits = codes.to(tl.int16)
        bits = (bits & -32768) | ((bits & 127) << 7)  # the sign is there: int8 has it
        numbers = bits.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    else:
        numbers = codes.to(tl.float32)
    return numbers.to(DTYPE)


@triton.jit(do_not_specialize=["n_rows", "n_m", "n_n", "n_tiles"])
def _w8a16_gemm_kernel(
    x_ptr, w_ptr, s_ptr, bias_ptr, out_ptr, part_ptr,
    stride_x, stride_w, stride_s, stride_o,
    n_cols, n_inner, split_k,  # columns of x that a program takes
    n_rows, n_m, n_n, n_tiles,
    GROUP: tl.constexpr,  # columns with one scale, STEP or a multiple of it; 0: a row has one
    FP8: tl.constexpr, HAS_BIAS: tl.constexpr, EVEN_K: tl.constexpr, PDL: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STEP: tl.constexpr, SPLIT_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    if PDL:
        _let_next_kernel_start()
        _wait_for_earlier_kernels()
    GROUP_M: tl.constexpr = 8  # tiles of rows go through the columns together
    for tile in range(tl.program_id(0), n_tiles, tl.num_programs(0)):
        split = tile % SPLIT_K
        place = tile // SPLIT_K
        first_m = place // (GROUP_M * n_n) * GROUP_M
        width = tl.minimum(n_m - first_m, GROUP_M)
        within = place % (GROUP_M * n_n)
        rows = (first_m + within % width) * BLOCK_M + tl.arange(0, BLOCK_M)
        cols = within // width * BLOCK_N + tl.arange(0, BLOCK_N)
        row_ok = rows < n_rows
        col_ok = cols < n_cols
        row64 = rows.to(tl.int64)
        col64 = cols.to(tl.int64)
        k = tl.arange(0, STEP)
        x_tile = x_ptr + row64[:, None] * stride_x + k[None, :]
        w_tile = w_ptr + col64[:, None] * stride_w + k[None, :]
        s_tile = s_ptr + col64 * stride_s
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        first = split * split_k
        for at in tl.range(first, tl.minimum(first + split_k, n_inner), STEP, num_stages=STAGES):
            x_ok = row_ok[:, None]
            w_ok = col_ok[:, None]
            if not EVEN_K:
                there = (k < n_inner - at)[None, :]
                x_ok = x_ok & there
                w_ok = w_ok & there
            x = tl.load(x_tile + at, mask=x_ok, other=0.0)
            codes = tl.load(w_tile + at, mask=w_ok, other=0)
            w = _numbers_of_bytes(codes, x.dtype, FP8)
            if GROUP > 0:
                scale = tl.load(s_tile + at // GROUP, mask=col_ok, other=0.0).to(tl.float32)
                part = tl.dot(x, tl.trans(w), input_precision="ieee")
                acc += part * scale[None, :]
            else:
                acc = tl.dot(x, tl.trans(w), acc, input_precision="ieee")
        if GROUP == 0:
            acc = acc * tl.load(s_tile, mask=col_ok, other=0.0).to(tl.float32)[None, :]
        ok = row_ok[:, None] & col_ok[None, :]
        if SPLIT_K > 1:
            parts = part_ptr + (row64 + tl.cast(split, tl.int64) * n_rows)[:, None] * n_cols
            tl.store(parts + cols[None, :], acc, mask=ok)
        else:
            if HAS_BIAS:
                bias = tl.load(bias_ptr + cols, mask=col_ok, other=0.0)
                acc = acc + bias.to(tl.float32)[None, :]
            outs = out_ptr + row64[:, None] * stride_o + cols[None, :]
            tl.store(outs, acc.to(out_ptr.dtype.element_ty), mask=ok)


# fmt: on


@op
def w8a16_gemm(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    config: Config | None = None,
) -> torch.Tensor:
    """x @ W^T + bias with weights of 8 bits: W[n, k] = code * scale of column k's group.

    Matrices have contiguous columns and any row stride; bias is contiguous.

    Args:
        x: [M, K], bf16 or fp16.
        weight: int8 or float8_e4m3fn [N, K]. NaN codes (0x7f and 0xff) need not give NaN: they
            count as 480 and -480. With ``PDL`` weight and weight_scale are read before kernels of
            this library that were launched before have ended, so those must not write them.
        weight_scale: [N, K/group], fp32, bf16 or fp16. group is a power of two from 32 on, or K
            (a scale a row). ``tkernels.expand_block_scales`` makes it of scales for blocks.
        bias: [N], fp32 or x's dtype.
        out: [M, N] of x's dtype, written and returned; it may not share memory with an argument.
        config: launch config; None looks it up.

    Returns:
        [M, N] of x's dtype: products of x and codes are exact, sums fp32, and so is what multiplies
        a group's by its scale. Activations that are NaN or infinite spoil their own rows alone.

    Raises:
        TypeError, ValueError: an argument of the wrong kind, shape, dtype, stride or device.
    """
    if out is None:
        for name, t in (("x", x), ("weight", weight)):
            check_tensor(_OP, name, t)
        if weight.dim() != 2:
            raise ValueError(f"{_OP}: weight must have shape [N, K], got {describe(weight)}")
        out = torch.empty((*x.shape[:-1], len(weight)), dtype=x.dtype, device=x.device)
    else:
        check_own(_OP, "out", out, x=x)
    tensors: tuple[torch.Tensor, ...] = (x, weight, weight_scale, out)
    if bias is not None:
        tensors = (*tensors, bias)
    run = planned(_plan, config, tensors, bias is not None)
    if run is not None:
        run(x, weight, weight_scale, out, bias)
    return out


_Run = Callable[..., None]


def _plan(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    out: torch.Tensor,
    *rest: Any,
    config: Config | None,
) -> _Run | None:
    """What runs such a call, given all its tensors; None where there is nothing to do."""
    *more, has_bias = rest
    given = {"bias": more[0]} if has_bias else {}
    _check(x, weight, weight_scale, out, given)
    (m, k), n = x.shape, len(weight)
    if m == 0:
        return None
    group = group_of(k, weight_scale)
    values = (m, n, k, x.dtype, weight.dtype, group, weight_scale.dtype)
    cfg, max_programs = resolve(SPEC, values, config)
    strides = (x.stride(0), weight.stride(0), weight_scale.stride(0), out.stride(0))
    facts = {
        "GROUP": 0 if group == k else group,
        "FP8": weight.dtype == torch.float8_e4m3fn,
        "HAS_BIAS": has_bias,
    }
    if cfg["variant"] == "portable":
        return _bind_portable((m, n, k), facts, strides, cfg, max_programs)
    problem = dict(zip(SPEC.problem_fields, values, strict=True))
    other = _portable_config(problem, device.current())
    del other["programs_per_core"]
    every = device.current().max_programs  # the limit that is given is the other body's
    portable = _bind_portable((m, n, k), facts, strides, other, every)
    if not w8a16_gemm_hopper.fits(cfg["variant"], (strides[0] if m > 1 else 0, *strides[1:])):
        return portable
    chosen = _bind_hopper((m, n, k), facts, strides, cfg, max_programs)
    addressable = not device.current().compile_only
    core = cfg["variant"] == "core"

    def by_address(x: torch.Tensor, weight: torch.Tensor, *others: Any) -> None:
        # Codes, and x by "core", are copied 16 bytes at a time.
        odd = addressable and (weight.data_ptr() % 16 or (core and x.data_ptr() % 16))
        (portable if odd else chosen)(x, weight, *others)

    return by_address


def _bind_hopper(
    sizes: tuple[int, int, int],
    facts: dict[str, Any],
    strides: tuple[int, ...],
    config: Config,
    max_programs: int,
) -> _Run:
    """What runs ``w8a16_gemm_hopper``'s bodies, given all tensors of a call like this one."""
    m, n, _ = sizes
    cfg = integer_weights_few.with_slices(config) if config["variant"] == "core" else config
    splits, has_bias = cfg["SPLIT_K"], facts["HAS_BIAS"]
    theirs = {"GROUP": facts["GROUP"], "HAS_ZERO": False, "HAS_BIAS": has_bias}
    x_w_s_z_o = (*strides[:3], 0, strides[3])
    bound = w8a16_gemm_hopper.bound[config["variant"]]
    multiply = bound(sizes, theirs, x_w_s_z_o, cfg, max_programs, fp8=facts["FP8"])
    add = integer_weights_few.bound_adding(m, n, has_bias, strides[3], cfg)

    def run(
        x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, out: torch.Tensor, bias: Any
    ) -> None:
        part = out
        if add is not None:
            part = torch.empty(splits * m * n, dtype=torch.float32, device=out.device)
        bias = scale if bias is None else bias  # not read
        multiply(x, weight.view(torch.int8), scale, scale, bias, out, part)
        if add is not None:
            add(bias, out, part)

    return run


def _bind_portable(
    sizes: tuple[int, int, int],
    facts: dict[str, Any],
    strides: tuple[int, ...],
    config: Config,
    max_programs: int,
) -> _Run:
    """What runs the kernels above, given all tensors of a call like this one."""
    m, n, k = sizes
    dev = device.current()
    cfg = {"PDL": False, **config}  # Ascend has none
    del cfg["variant"]
    step = min(cfg.pop("BLOCK_K"), facts["GROUP"] or 1 << 30)
    splits = cfg["SPLIT_K"]
    n_m, n_n = cdiv(m, cfg["BLOCK_M"]), cdiv(n, cfg["BLOCK_N"])
    n_tiles = n_m * n_n * splits
    multiply = bind(
        _w8a16_gemm_kernel,
        (min(n_tiles, max_programs * dev.num_dot_cores // dev.num_cores),),
        **facts,
        EVEN_K=k % step == 0,
        STEP=step,
        STAGES=cfg.get("num_stages", 1),
        **cfg,
        **({"launch_pdl": True} if cfg["PDL"] else {}),
    )
    split_k = cdiv(cdiv(k, step), splits) * step
    numbers = (*strides, n, k, split_k, m, n_m, n_n, n_tiles)
    add, add_numbers = _bind_adding(m, n, facts["HAS_BIAS"], strides[-1], cfg, max_programs)

    def run(
        x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, out: torch.Tensor, bias: Any
    ) -> None:
        part = out
        if add is not None:
            part = torch.empty(splits * m * n, dtype=torch.float32, device=out.device)
        bias = scale if bias is None else bias  # not read
        multiply(x, weight.view(torch.int8), scale, bias, out, part, *numbers)
        if add is not None:
            add(bias, out, part, *add_numbers)

    return run


def _check(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    out: torch.Tensor,
    given: dict[str, torch.Tensor],
) -> None:
    """All that metadata can tell about the arguments."""
    tensors = {"x": x, "weight": weight, "weight_scale": weight_scale, **given, "out": out}
    for name, t in tensors.items():
        check_tensor(_OP, name, t)
    check_dtype(_OP, "x", x, (torch.bfloat16, torch.float16))
    if x.dim() != 2 or x.shape[1] == 0:
        raise ValueError(f"{_OP}: x must have shape [M, K >= 1], got {describe(x)}")
    m, k = x.shape
    check_dtype(_OP, "weight", weight, CODES)
    if weight.dim() != 2 or weight.shape[1] != k or len(weight) == 0:
        raise ValueError(f"{_OP}: weight must have shape [N >= 1, K={k}], got {describe(weight)}")
    n = len(weight)
    most = 2**31 - 2**16  # rows and columns are counted in 32 bits
    if max(m, n, k) > most:
        raise ValueError(f"{_OP}: x must have at most {most} rows and columns, got {describe(x)}")
    if weight_scale.dim() != 2 or group_of(k, weight_scale) == 0:
        raise ValueError(
            f"{_OP}: weight_scale must have shape [N={n}, K/group], group a power of two from 32 "
            f"on, or K={k}, got {describe(weight_scale)}"
        )
    wanted: dict[str, tuple[tuple[torch.dtype, ...], dict[str, int | None]]] = {
        "weight_scale": (_SCALES, {"N": n, "n_groups": weight_scale.shape[1]}),
        "bias": ((torch.float32, x.dtype), {"N": n}),
        "out": ((x.dtype,), {"M": m, "N": n}),
    }
    for name, (dtypes, shape) in wanted.items():
        if name in tensors:
            check_dtype(_OP, name, tensors[name], dtypes)
            check_shape(_OP, name, tensors[name], **shape)
    for name, t in tensors.items():
        check_last_contiguous(_OP, name, t)
    check_no_overlap(_OP, "out", out)


# ---- facts for tests, bench and tuner --------------------------------------------------------

_FIELDS = ("m", "n", "k", "dtype", "codes", "group", "scale")


def _tuning_key(problem: Problem) -> dict[str, Any]:
    p = problem
    bucket = 8
    while bucket < min(p["m"], 4096):
        bucket *= 2
    group = p["group"]
    return {
        "fp8": p["codes"] == torch.float8_e4m3fn,
        "group": "row" if group == p["k"] else group,
        "fp32_scale": p["scale"] == torch.float32,
        "m_up_to": bucket,
        "n": p["n"],
        "k": p["k"],
    }


def _space(dev: Device) -> dict[str, list[Any]]:
    space: dict[str, list[Any]] = {
        "BLOCK_M": [16, 32, 64, 128],
        "BLOCK_N": [16, 32, 64, 128, 256],
        "BLOCK_K": [32, 64, 128, 256],
        "SPLIT_K": [1, 2, 3, 4, 6, 8, 12, 16],
        "programs_per_core": [0, 1, 2, 4],
        "variant": ["portable"],
    }
    if not dev.registers:  # a matrix unit and vector units: no threads
        return {**space, "programs_per_core": [1]}
    hopper = dev.arch == "sm90"
    if hopper:
        space |= {
            "BLOCK_M": [8, *space["BLOCK_M"], 256],
            "programs_per_core": [0, 1, 2, 3, 4, 6, 8, 16, 32],
            "variant": ["portable", "core", "wide"],
        }
    return {
        **space,
        "PDL": [False, True] if _has_pdl(dev) else [False],
        "num_warps": [1, 2, 4, 8, *([12, 16] if hopper else [])],
        "num_stages": [1, 2, 3, 4, 5, 6, 7, 8],
    }


def _default_config(problem: Problem, dev: Device) -> Config:
    """Those of the Hopper bodies, where they can."""
    chosen = w8a16_gemm_hopper.default_config(problem, dev)
    return _portable_config(problem, dev) if chosen is None else chosen


def _portable_config(problem: Problem, dev: Device) -> Config:
    p = problem
    rows = max(16, next_power_of_2(p["m"]))
    config: Config = {
        "BLOCK_M": min(64 if dev.registers else 32, rows),
        "BLOCK_N": 64,
        "BLOCK_K": 64 if p["k"] % 16 and dev.registers else 128,  # bytes one by one
        "SPLIT_K": 1,
        "variant": "portable",
        "programs_per_core": 1,
    }
    if not dev.registers:
        return config
    config |= {"programs_per_core": 0, "PDL": _has_pdl(dev), "num_warps": 4, "num_stages": 4}
    if rows > 32:
        config |= {"BLOCK_N": 128, "num_warps": 8, "num_stages": 3}
    tiles = cdiv(p["m"], config["BLOCK_M"]) * cdiv(p["n"], config["BLOCK_N"])
    if tiles < dev.num_cores:
        most = min(16, max(1, p["k"] // 256), 3 * dev.num_cores // tiles)  # two steps or more
        config["SPLIT_K"] = max(s for s in (1, 2, 3, 4, 6, 8, 12, 16) if s <= most)
    while config["num_stages"] > 1 and _shared_bytes(config, problem) > dev.local_mem_bytes:
        config["num_stages"] -= 1
    return config


def _shared_bytes(config: Config, problem: Problem) -> int:
    """Stages of codes, x and scales; codes as numbers; a tile of results on its way out."""
    m, n, k = config["BLOCK_M"], config["BLOCK_N"], min(config["BLOCK_K"], problem["group"])
    stage = n * k + 2 * m * k + 4 * n
    return int(max(config["num_stages"] * stage + 2 * n * k, m * n * 4) + 1024)


def _why_illegal(config: Config, problem: Problem, dev: Device) -> str | None:
    variant = config["variant"]
    for name, least in (
        ("BLOCK_M", 16 if variant == "portable" else 8),
        ("BLOCK_N", 16),
        ("BLOCK_K", 32),
    ):
        if config[name] < least or config[name] & (config[name] - 1):
            return f"{name} must be a power of two from {least} on, got {config[name]}"
    if not 1 <= config["SPLIT_K"] <= 64:
        return f"SPLIT_K must be 1 to 64, got {config['SPLIT_K']}"
    m, n, k = config["BLOCK_M"], config["BLOCK_N"], config["BLOCK_K"]
    if variant in ("core", "wide"):
        unfit = w8a16_gemm_hopper.why_unfit(variant, problem, dev)
        return unfit or w8a16_gemm_hopper.why_illegal(config, problem, dev)
    if variant != "portable":
        return f"variant must be portable, core or wide, got {variant!r}"
    if not dev.registers:
        # Huawei's compiler is the judge; as in w4a16_gemm, whose tiles these are.
        if m * n > 32 * 64 or n * k > 64 * 128:
            return f"tiles of {m} rows, {n} columns and {k} terms overflow UB"
        return None
    if config["PDL"] and not _has_pdl(dev):
        return f"PDL needs sm90 or later, got {dev.arch}"
    if why := why_no_room(config, dev, _shared_bytes(config, problem)):
        return why
    # Sums of a tile and of a group; a step's codes as numbers.
    taken = (2 * m * n + n * k // 2) // (config["num_warps"] * 32)
    if taken > 192:
        return f"sums and weights of a tile take {taken} of 255 registers a thread"
    return None


SPEC = register(
    KernelSpec(
        name=_OP,
        launch=w8a16_gemm,
        reference=w8a16_gemm_ref,
        problem_fields=_FIELDS,
        make_inputs=w8_inputs,
        cases=W8_CASES,
        tuning_key=_tuning_key,
        space=_space,
        default_config=_default_config,
        why_illegal=_why_illegal,
        cost=w8_cost,
        outputs=("out",),
        providers=w8_peers,
        shape=w8_shape,
    )
)
