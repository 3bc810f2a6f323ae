"""``w4a16_gemm`` of many rows on Hopper (sm_90): what ``integer_weights_many`` takes and when."""

from __future__ import annotations

import functools

from tkernels import integer_weights_many as body
from tkernels.device import Device
from tkernels.registry import Config, Problem

BITS = 4
LEAST_ROWS = 33  # from which on it is the default
MOST_ROWS = 2048  # for which it is the default: unpacked weights took 632 us of 4096 rows, it 665
FIXED: Config = {**body.FIXED, "SLICES": 1}

bound = functools.partial(body.bound, BITS)
shared_bytes = functools.partial(body.shared_bytes, bits=BITS)


def why_unfit(problem: Problem, dev: Device) -> str | None:
    """Reason why this body cannot serve such a problem, whatever the config; None: it can."""
    n, k = problem["n"], problem["k"]
    if why := body.why_unfit(n, k, dev):
        return why
    if k % 32:
        return f"variant wide needs K to be a multiple of 32, got {k}"
    if problem["group"] != k and problem["scale"] != problem["dtype"]:
        return f"variant wide has scales of x's dtype, got {problem['scale']}"
    return None


def fits(strides: tuple[int, ...]) -> bool:
    """Whether a tensor map can express the weights' stride: a multiple of 16 bytes, not of 0."""
    return 0 < strides[1] < 2**38 and strides[1] % 4 == 0


def why_illegal(config: Config, problem: Problem, dev: Device) -> str | None:
    """Reason why a config of this body cannot be launched; None: it can."""
    if config["BLOCK_M"] < 32:
        return f"variant wide has BLOCK_M of 32 or more, got {config['BLOCK_M']}"
    return body.why_illegal(config, problem["k"], dev, BITS, FIXED)


def default_config(problem: Problem, dev: Device) -> Config:
    """What takes the least time by a model; of 32 rows twice, weights are decoded twice."""
    sizes = problem["m"], problem["n"], problem["k"]
    return body.default_config(sizes, dev, BITS, FIXED, 32 if sizes[0] <= 32 else 64)
