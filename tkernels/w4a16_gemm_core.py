"""``w4a16_gemm`` of few rows on Hopper (sm_90): what ``integer_weights_few`` takes and when."""

from __future__ import annotations

import functools

from tkernels import integer_weights_few as body
from tkernels.device import Device
from tkernels.registry import Problem

BITS = 4
MOST_ROWS = 64  # for which this body is the default, where it is legal and "wide" is not

bound = functools.partial(body.bound, BITS)
bound_adding = body.bound_adding
default_config = functools.partial(body.default_config, bits=BITS)
why_illegal = functools.partial(body.why_illegal, bits=BITS)
shared_bytes = functools.partial(body.shared_bytes, bits=BITS)


def why_unfit(problem: Problem, dev: Device) -> str | None:
    """Reason why this body cannot serve such a problem, whatever the config; None: it can."""
    group, k = problem["group"], problem["k"]
    if why := body.why_unfit(k, dev):
        return why
    if k % 32:
        return f"variant core needs K to be a multiple of 32, got {k}"
    if group != k and group < 64:
        return f"variant core has groups of 64 or more, got {group}"
    return None


def fits(strides: tuple[int, ...]) -> bool:
    """Whether rows of x and of the weights, with these strides, start at multiples of 16 bytes."""
    return strides[0] % 8 == 0 and strides[1] % 4 == 0
