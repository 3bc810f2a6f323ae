"""``skinny_linear`` of 2 to 64 rows in 16 bits on Hopper (sm_90), where it is a product alone.

Weights are what is read, so two bodies that were made for that serve, without anything to decode:
up to 16 rows ``integer_weights_few`` (``variant`` "core"), more ``masked_gemm_stream`` ("stream").
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from tkernels import device
from tkernels import integer_weights_few as core
from tkernels import masked_gemm_hopper as large
from tkernels import masked_gemm_stream as stream
from tkernels.device import Device, cdiv, next_power_of_2
from tkernels.registry import Config, Problem

BITS = 16
MOST_ROWS = {"core": 16, "stream": 64}  # for which each is the default
MOST_BYTES = 256 << 20  # of weights: of more cuBLAS reads 98% as fast as they are copied

# What these bodies have no choice of, of what others have.
_FIXED: Config = {"SWAP": False, "AHEAD": False}


def takes(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether x [M, K] @ weight [N, K]^T has one of these bodies, for whom may have PyTorch's too.

    On an H200 the best forms of those took 0.42 to 0.99 of cuBLAS' time (CONTRIBUTING, "Measured
    facts").
    """
    # Prompts have any number of rows: each would take a place that a decode step's could have.
    return len(x) <= MOST_ROWS["stream"] and _takes(
        len(x), weight.shape[0], weight.shape[1], x.dtype, x.stride(0), weight.stride(0)
    )


@functools.lru_cache(maxsize=4096)
def _takes(m: int, n: int, k: int, dtype: torch.dtype, of_x: int, of_w: int) -> bool:
    return takes_product(m, n, k, dtype, device.current()) and is_aligned(k, of_x, of_w)


def takes_product(m: int, n: int, k: int, dtype: torch.dtype, dev: Device) -> bool:
    """The same of sizes, where rows start at multiples of 16 bytes."""
    alone = dict.fromkeys(("gated", "normed", "residual"), False)
    problem = {"m": m, "n": n, "k": k, "dtype": dtype, **alone, "aligned": k % 8 == 0}
    return 2 * n * k <= MOST_BYTES and default_config(problem, dev) is not None


def is_aligned(k: int, *strides: int) -> bool:
    """Whether rows of x and weights, k columns each, start and end at multiples of 16 bytes; and a
    tensor map can express their strides, of which 0 is none."""
    return not any(number % 8 or not 0 < number < 2**39 for number in (k, *strides))


def why_unfit(variant: str, problem: Problem, dev: Device) -> str | None:
    """Reason why this body cannot serve such a problem, whatever the config; None: it can."""
    p = problem
    if variant == "core":
        why = core.why_unfit(p["k"], dev)
    else:
        why = large.why_unfit(True, dev)
        why = None if why is None else why.replace("variant hopper", "variant stream")
    if why:
        return why
    if p["m"] < 2:
        return f"variant {variant} has two rows or more, got {p['m']}"
    if p["normed"] or p["gated"] or p["residual"]:
        return f"variant {variant} has products alone, and a bias"
    if p["dtype"].itemsize != 2:
        return f"variant {variant} has 16-bit numbers, got {p['dtype']}"
    if not p["aligned"]:
        return f"variant {variant} needs rows that divide by 16 bytes"
    if variant == "core" and p["k"] % 16:  # or ends of rows are not known to be ends of copies
        return f"variant core needs K to be a multiple of 16, got {p['k']}"
    return None


def why_illegal(config: Config, problem: Problem, dev: Device) -> str | None:
    """Reason why a config of one of these bodies cannot be launched; None: it can."""
    variant = config["variant"]
    if wrong := [f"{name} {v}" for name, v in _FIXED.items() if config[name] != v]:
        return f"variant {variant} has {', '.join(wrong)}"
    if not 1 <= config["SPLIT_K"] <= 64:
        return f"SPLIT_K must be 1 to 64, got {config['SPLIT_K']}"
    if variant == "core":
        return core.why_illegal(core.with_slices(config), _as_core(problem), dev, BITS)
    return stream.why_illegal(_as_stream(config), _as_masked(problem), dev)


def default_config(problem: Problem, dev: Device) -> Config | None:
    """What takes the least time by a model of what an H200 took; None: neither body serves."""
    if not 2 <= problem["m"] <= MOST_ROWS["stream"]:
        return None
    variant = "core" if problem["m"] <= MOST_ROWS["core"] else "stream"
    if why_unfit(variant, problem, dev):
        return None
    facts = tuple(sorted((name, value) for name, value in problem.items()))
    chosen = _chosen(variant, facts, dev)
    return None if chosen is None else dict(chosen)


@functools.lru_cache(maxsize=1024)
def _chosen(variant: str, facts: tuple[tuple[str, Any], ...], dev: Device) -> Config | None:
    problem = dict(facts)
    ways = _core_ways(problem, dev) if variant == "core" else _stream_ways(problem, dev)
    legal = [way for way in ways if why_illegal(way, problem, dev) is None]
    return min(legal, key=lambda way: _us(way, problem, dev), default=None)


def _core_ways(problem: Problem, dev: Device) -> Iterator[Config]:
    rows = max(8, next_power_of_2(problem["m"]))
    base: Config = {**_FIXED, "variant": "core", "BLOCK_M": rows, "PDL": True, "num_warps": 8}
    tiles = itertools.product((32, 64, 16), (64, 128), (1, 2, 3, 4, 6), (1, 2, 3, 4, 6, 8))
    for block_n, block_k, splits, in_turn in tiles:
        way = {**base, "BLOCK_N": block_n, "BLOCK_K": block_k, "SPLIT_K": splits}
        way |= {"programs_per_core": in_turn, "num_stages": 12}
        if block_k == 128 and (rows > 8 or core_tiles(way, problem, dev) > 1):
            continue
        as_core = _as_core(problem)
        while way["num_stages"] > 2:
            if core.shared_bytes(core.with_slices(way), as_core, dev, BITS) <= core.MOST_BYTES:
                break
            way["num_stages"] -= 1
        yield way


def core_tiles(config: Config, problem: Problem, dev: Device) -> int:
    """Tiles of a program of "core"."""
    programs = config["programs_per_core"] * dev.num_cores
    return core.tiles_of(config, problem["m"], problem["n"], programs)


def _stream_ways(problem: Problem, dev: Device) -> Iterator[Config]:
    base: Config = {**_FIXED, "variant": "stream", "BLOCK_M": 64, "PDL": True, "num_warps": 4}
    for block_n, splits in itertools.product((192, 128, 96, 64), (1, 2, 3, 4, 6, 8)):
        way = {**base, "BLOCK_N": block_n, "BLOCK_K": 256, "SPLIT_K": splits}
        way |= {"programs_per_core": 0, "num_stages": 11}
        while stream.shared_bytes(_as_stream(way), _as_masked(problem)) > dev.local_mem_bytes:
            way["num_stages"] -= 1
        yield way


def _us(config: Config, problem: Problem, dev: Device) -> float:
    """Microseconds: all weights from memory, or what a program has, in rounds of programs."""
    m, n, k = problem["m"], problem["n"], problem["k"]
    splits, block_n = config["SPLIT_K"], config["BLOCK_N"]
    if config["variant"] == "core":
        step = config["BLOCK_K"] * core.with_slices(config)["SLICES"]
        outputs, rate = block_n * core_tiles(config, problem, dev), 41e3
        beside = config["BLOCK_M"] // 2  # of x, from L2
        shallow = config["num_stages"] < 3
    else:
        step, outputs, rate, beside, shallow = config["BLOCK_K"] // 2, block_n, 60e3, 32, False
    columns = cdiv(cdiv(k, step), splits) * step
    programs = cdiv(m, config["BLOCK_M"]) * cdiv(n, outputs) * splits
    a_program = columns * 2 * (outputs + beside) / rate * (1.4 if shallow else 1)
    rounds = cdiv(programs, dev.num_cores)
    adding = 1.6 + 0.1 * splits if splits > 1 else 0.0
    return float(max(2 * n * k / 4.25e6, rounds * a_program) + 0.3 * rounds + adding)


def bound(
    sizes: tuple[int, int, int],
    has_bias: bool,
    strides: tuple[int, ...],
    config: Config,
    programs: int,
) -> Callable[..., None]:
    """``launch(x, weight, bias, out)``; ``strides``: of x, weight and out, in numbers."""
    m, n, _ = sizes
    splits = config["SPLIT_K"]
    add = core.bound_adding(m, n, has_bias, strides[2], config)
    if config["variant"] == "core":
        facts = {"GROUP": 0, "HAS_ZERO": False, "HAS_BIAS": has_bias}
        of = (strides[0], strides[1], 0, 0, strides[2])
        few = core.bound(BITS, sizes, facts, of, core.with_slices(config), programs)

        def multiply(x: Any, w: Any, bias: Any, out: Any, part: Any) -> None:
            few(x, w, x, x, bias, out, part)  # no scales, no zero points
    else:
        known = dict.fromkeys(("LOW", "HIGH_SCALE", "HAS_GROUP", "ONE_WORD"), False)
        known |= {"HIGH": True, "HAS_BIAS": has_bias}
        of = (strides[1], strides[0], strides[1], strides[0], strides[2])
        many = stream.bind(sizes, known, of, 0, config)

        def multiply(x: Any, w: Any, bias: Any, out: Any, part: Any) -> None:
            sums = part.view(torch.int32) if splits > 1 else out
            many(w, w, x, w, w, x, x, x, bias, x, x, out, sums)  # no scales, mask, groups

    def launch(x: torch.Tensor, weight: torch.Tensor, bias: Any, out: torch.Tensor) -> None:
        part = out
        if splits > 1:
            part = torch.empty(splits * m * n, dtype=torch.float32, device=out.device)
        multiply(x, weight, bias, out, part)
        if add is not None:
            add(bias, out, part)

    return launch


def _as_core(problem: Problem) -> dict[str, Any]:
    """The problem as "core" knows it."""
    facts = {name: problem[name] for name in ("m", "n", "k")}
    return {**facts, "group": problem["k"], "zero": False, "scale": problem["dtype"]}


def _as_stream(config: Config) -> Config:
    """The config as ``masked_gemm`` has it."""
    return {**config, "GROUP_M": 1}


def _as_masked(problem: Problem) -> dict[str, Any]:
    """The problem as ``masked_gemm`` has it: all rows run high, with weights of their own."""
    facts = {name: problem[name] for name in ("m", "n", "k", "dtype")}
    return {**facts, "path": "high", "high_weight": True, "aligned": True}
