"""Problems, inputs, costs and configs of ``skinny_linear``."""

from __future__ import annotations

from typing import Any

import torch

from tkernels import masked_gemm_stream, skinny_linear_hopper, skinny_linear_rows
from tkernels.config import why_no_launch
from tkernels.device import Device, cdiv, next_power_of_2
from tkernels.ops.paged_attn import _has_pdl
from tkernels.registry import Config, Cost, Problem


def linear_problem(
    m: int,
    n: int,
    k: int,
    dtype: torch.dtype = torch.bfloat16,
    *,
    gated: bool = False,
    normed: bool = False,
    bias: bool = False,
    residual: bool = False,
) -> dict[str, Any]:
    """Problem of ``m`` rows of ``k`` columns to ``n``."""
    return {
        "m": m,
        "n": n,
        "k": k,
        "dtype": dtype,
        "gated": gated,
        "normed": normed,
        "aligned": k % 8 == 0,
        "bias": bias,
        "residual": residual,
    }


def linear_shape(
    *,
    tokens: int,
    outputs: int,
    inputs: int,
    silu_and_mul: bool = False,
    normed: bool = False,
    residual: bool = False,
    dtype: torch.dtype = torch.bfloat16,
) -> Problem:
    """``tokens`` rows through a layer of ``inputs`` to ``outputs`` columns of the result."""
    more = {"gated": silu_and_mul, "normed": normed, "residual": residual}
    return linear_problem(tokens, outputs, inputs, dtype, **more)


def linear_inputs(problem: Problem, dev: torch.device) -> dict[str, Any]:
    """Seeded operands, such that results are about 1."""
    p = problem
    generator = torch.Generator(dev).manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=dev)

    rows = p["n"] * (2 if p["gated"] else 1)
    inputs: dict[str, Any] = {
        "x": random(p["m"], p["k"]).to(p["dtype"]),
        "weight": (random(rows, p["k"]) * p["k"] ** -0.5).to(p["dtype"]),
    }
    if p["bias"]:
        inputs["bias"] = random(rows).to(p["dtype"])
    if p["normed"]:
        inputs["norm_weight"] = (1 + 0.1 * random(p["k"])).to(p["dtype"])
    if p["residual"]:
        inputs["residual"] = random(p["m"], p["n"]).to(p["dtype"])
    if p["gated"]:
        inputs["silu_and_mul"] = True
    return inputs


def linear_cost(problem: Problem) -> Cost:
    """Weights once, rows in and out once."""
    p = problem
    m, n, k, size = p["m"], p["n"], p["k"], p["dtype"].itemsize
    rows = n * (2 if p["gated"] else 1)
    moved = rows * k + m * k + m * n * (2 if p["residual"] else 1)
    moved += (rows if p["bias"] else 0) + (k if p["normed"] else 0)
    return Cost(flops=2 * m * rows * k, bytes=moved * size)


# ---- configs ----------------------------------------------------------------------------------

FIELDS = ("m", "n", "k", "dtype", "gated", "normed", "residual", "aligned")


def linear_tuning_key(problem: Problem) -> dict[str, Any]:
    """Rows up to 1, 8, 16, 32, ... 1024; the weight by its exact size.

    A residual makes a difference to several rows: not all bodies for these add one.
    """
    p = problem
    rows = 1 if p["m"] == 1 else min(max(8, next_power_of_2(p["m"])), 1024)
    return {
        "rows_up_to": rows,
        "n": p["n"],
        "k": p["k"],
        "gated": p["gated"],
        "normed": p["normed"],
        **({"residual": p["residual"]} if rows > 1 else {}),
        "aligned": p["aligned"],
        "itemsize": p["dtype"].itemsize,
    }


def linear_space(dev: Device) -> dict[str, list[Any]]:
    """Search space."""
    space: dict[str, list[Any]] = {
        "BLOCK_M": [1, 8, 16, 32, 64],
        "BLOCK_N": [1, 2, 4, 8, 16, 32, 64, 128],
        "BLOCK_K": [32, 64, 128, 256, 512, 1024, 2048, 4096],
        "programs_per_core": [0, 1, 2, 4, 8],
        "variant": ["vector", "dot"],
    }
    if dev.is_npu:
        return {**space, "programs_per_core": [1]}
    if dev.arch == "sm90":
        space["variant"] = ["vector", "dot", "hopper", "core", "stream"]
        space["programs_per_core"] = [0, 1, 2, 3, 4, 6, 8]
        space["BLOCK_N"] = sorted({*space["BLOCK_N"], *masked_gemm_stream.PARTS})
    return {
        **space,
        "SPLIT_K": [1, 2, 3, 4, 6, 8] if dev.arch == "sm90" else [1],
        "SWAP": [False, True],
        "AHEAD": [False, True],
        "PDL": [False, True] if _has_pdl(dev) else [False],
        "num_warps": [1, 2, 4, 8],
        "num_stages": list(range(1, 13)) if dev.arch == "sm90" else [1, 2, 3, 4, 5, 6, 8],
    }


def linear_default(problem: Problem, dev: Device) -> Config:
    """Heuristic: the body for Hopper where it fits, unless columns are few.

    Where they are, the registers of all cores hold all the weights.
    """
    p = problem
    if (rows := skinny_linear_rows.default_config(p, dev)) is not None:
        return rows
    fits = p["m"] == 1 and skinny_linear_hopper.why_unfit(p, dev) is None
    if not fits:
        return portable_config(p, dev)
    chosen = skinny_linear_hopper.default_config(p, dev)
    if skinny_linear_hopper.why_illegal(chosen, p, dev):  # all of x would be in shared memory
        return portable_config(p, dev)
    if p["n"] <= 8 * dev.num_cores and not p["normed"] and 1024 < p["k"] <= 4096:
        few = {"variant": "vector", "BLOCK_N": 4, "BLOCK_K": 2048, "num_warps": 8, "num_stages": 1}
        return {**chosen, **few}
    return chosen


def portable_config(problem: Problem, dev: Device) -> Config:
    """Heuristic of the other bodies."""
    p = problem
    columns, size = max(32, next_power_of_2(p["k"])), p["dtype"].itemsize
    outputs = next_power_of_2(p["n"])
    if dev.is_npu:
        if p["m"] == 1:
            block_k = min(columns, 1024)
            halves = 2 if p["gated"] else 1
            block_n = min(outputs, max(1, dev.local_mem_bytes // 24 // block_k // halves))
            block_n = 1 << (block_n.bit_length() - 1)
            one = {"BLOCK_M": 1, "BLOCK_N": block_n, "BLOCK_K": block_k}
            return {**one, "variant": "vector", "programs_per_core": 1}
        block_n = max(16, min(64, outputs))
        dot = {"BLOCK_M": 16, "BLOCK_N": block_n, "BLOCK_K": min(columns, 128)}
        return {**dot, "variant": "dot", "programs_per_core": 1}
    pdl = {"PDL": _has_pdl(dev), "programs_per_core": 0, "SPLIT_K": 1}
    if p["m"] == 1:
        # A warp reads 16 bytes a lane of a row of weights. Programs are small, so that all the
        # cores have some and the first loads of many are on their way while others multiply.
        block_k = min(columns, 2048 // size)
        warps = max(1, min(4, block_k * size // 512))
        block_n = 8 if not p["gated"] else 4
        while block_n > 1 and cdiv(p["n"], block_n) < 2 * dev.num_cores:
            block_n //= 2
        block_n = min(block_n, outputs)
        one = {"BLOCK_M": 1, "BLOCK_N": block_n, "BLOCK_K": block_k, "SWAP": False}
        one["AHEAD"] = not p["gated"] and block_k < p["k"]  # which takes registers
        return {**one, **pdl, "variant": "vector", "num_warps": warps, "num_stages": 1}
    swap = p["dtype"] != torch.float32
    rows = min(32, max(8 if swap else 16, next_power_of_2(p["m"])))
    block_k = min(columns, 256 // size)
    few: Config = {"BLOCK_M": rows, "BLOCK_N": 64 if swap else 16, "BLOCK_K": block_k, "SWAP": swap}
    few |= {**pdl, "AHEAD": False, "variant": "dot", "num_warps": 4, "num_stages": 4 if swap else 2}
    while few["num_stages"] > 1 and _shared_bytes(few, problem) > dev.local_mem_bytes:
        few["num_stages"] -= 1
    return few


def _shared_bytes(config: Config, problem: Problem) -> int:
    """Stages of rows and weights, and the sums, which change their layout."""
    m, n, k = (int(config[name]) for name in ("BLOCK_M", "BLOCK_N", "BLOCK_K"))
    halves = 2 if problem["gated"] else 1
    size: int = problem["dtype"].itemsize
    return int(config["num_stages"]) * (m + n * halves) * k * size + m * n * 4


def linear_illegal(config: Config, problem: Problem, dev: Device) -> str | None:
    """Reason why a config cannot run on ``dev``, or None."""
    others = () if config["variant"] == "stream" else ("BLOCK_N",)  # whose tiles may be of 96
    if why := why_no_launch(config, dev, "BLOCK_M", *others, "BLOCK_K"):
        return why
    m, n, k = (config[name] for name in ("BLOCK_M", "BLOCK_N", "BLOCK_K"))
    size, halves = problem["dtype"].itemsize, 2 if problem["gated"] else 1
    dot = config["variant"] == "dot"
    if config["variant"] == "hopper":
        unfit = skinny_linear_hopper.why_unfit(problem, dev)
        return unfit or skinny_linear_hopper.why_illegal(config, problem, dev)
    if config["variant"] in ("core", "stream"):
        unfit = skinny_linear_rows.why_unfit(config["variant"], problem, dev)
        return unfit or skinny_linear_rows.why_illegal(config, problem, dev)
    if config["variant"] not in ("vector", "dot"):
        names = "vector, dot, hopper, core or stream"
        return f"variant must be {names}, got {config['variant']!r}"
    if config.get("SPLIT_K", 1) != 1:
        return f"SPLIT_K is for variants core and stream, got {config['SPLIT_K']}"
    if dot == (m == 1):
        return f"variant vector has BLOCK_M=1 and dot more, got {config['variant']} and {m}"
    if dev.is_npu:
        return _illegal_on_ascend(config, size, halves, dev.local_mem_bytes)
    if config["PDL"] and not _has_pdl(dev):
        return f"PDL needs sm90 or later, got {dev.arch}"
    threads = 32 * config["num_warps"]
    if not dot:
        if config["SWAP"] or config["num_stages"] > 1:
            return "SWAP and num_stages are for variant dot"
        held = 2 if config["AHEAD"] else 1  # of weights, beside their fp32 sums
        registers = n * k * halves * (4 + size * held) // 4 // threads + k // threads * 6
        if registers > 200:
            return f"about {registers} of 255 registers a thread would hold the tile alone"
        if n * k < threads * 4 and config["num_warps"] > 1:
            return f"{config['num_warps']} warps have nothing to do with {n * k} weights"
        return None
    if config["AHEAD"]:
        return "AHEAD is for variant vector"
    if config["SWAP"] and (n < 64 or n % (16 * config["num_warps"])):
        return f"SWAP needs BLOCK_N of 64 or more and of 16 a warp, got {n}"
    if config["SWAP"] and size == 4:
        return "SWAP is for 16-bit numbers"
    if not config["SWAP"] and (m < 16 or n < 16):
        return f"tiles of variant dot have 16 rows and columns or more, got {m} and {n}"
    registers = m * n * halves // threads + (m * k * 2 // threads if problem["normed"] else 0)
    if registers > 160:
        return f"about {registers} of 255 registers a thread would hold the sums alone"
    # A step's rows and weights go through registers, all at once: compiled for sm_90 the bench
    # cases spill little up to 224, and from 256 on hundreds of bytes, in up to half a minute.
    registers += (m + n * halves) * k * size // 4 // threads
    if registers > 224:
        return f"about {registers} of 255 registers a thread would hold the tile alone"
    if size == 4 and m * n * k > 1024 * threads:
        return f"a product of {m} x {n} x {k} in fp32 would be unrolled into too much code"
    if (shared := _shared_bytes(config, problem)) > dev.local_mem_bytes:
        return f"about {shared} bytes of shared memory, {dev.local_mem_bytes} available"
    return None


def _illegal_on_ascend(config: Config, size: int, halves: int, available: int) -> str | None:
    m, n, k = (config[name] for name in ("BLOCK_M", "BLOCK_N", "BLOCK_K"))
    if config["variant"] == "dot":
        if m < 16 or n < 16:
            return f"tiles of variant dot have 16 rows and columns or more, got {m} and {n}"
        need = m * k * (8 + size) + m * n * 4 * (1 + halves)
    else:
        need = n * k * halves * (8 + 2 * size)
    if need > available:
        return f"the tile needs about {need} bytes of UB, {available} available"
    return None
