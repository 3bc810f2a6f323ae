"""``w8a16_gemm`` on Hopper (sm_90): which problems the bodies for integer weights take, and when.

``integer_weights_few`` ("core") and ``integer_weights_many`` ("wide") say how: a group's sum is
scaled in fp32 in both.
"""

from __future__ import annotations

import functools
import types
from typing import Any

from tkernels import integer_weights_few as core
from tkernels import integer_weights_many as wide
from tkernels.device import Device
from tkernels.registry import Config, Problem

BITS = 8
MOST_ROWS = 16  # for which "core" is the default, where it is legal
MORE_ROWS = 32  # the same where a core has one tile: then x is not read for several

bound = types.MappingProxyType(
    {"core": functools.partial(core.bound, BITS), "wide": functools.partial(wide.bound, BITS)}
)


def why_unfit(variant: str, problem: Problem, dev: Device) -> str | None:
    """Reason why this body cannot serve such a problem, whatever the config; None: it can."""
    n, k, group = problem["n"], problem["k"], problem["group"]
    if why := core.why_unfit(k, dev) if variant == "core" else wide.why_unfit(n, k, dev):
        return why
    if k % 16:
        return f"variant {variant} needs K to be a multiple of 16, got {k}"
    least = 64 if variant == "core" else wide.STEP
    if group != k and group < least:
        return f"variant {variant} has groups of {least} or more, got {group}"
    return None


def fits(variant: str, strides: tuple[int, ...]) -> bool:
    """Whether these strides keep what is copied 16 bytes at a time, or by a tensor map, there."""
    if variant == "wide":
        return 0 < strides[1] < 2**38 and strides[1] % 16 == 0
    return strides[0] % 8 == 0 and strides[1] % 16 == 0


def why_illegal(config: Config, problem: Problem, dev: Device) -> str | None:
    """Reason why a config of one of these bodies cannot be launched; None: it can."""
    if config["variant"] == "core":
        return core.why_illegal(core.with_slices(config), _as_core(problem), dev, BITS)
    if problem["group"] != problem["k"] and (why := wide.why_not_apart(config)):
        return why
    return wide.why_illegal(config, problem["k"], dev, BITS, wide.FIXED)


def default_config(problem: Problem, dev: Device) -> Config | None:
    """What takes the least time by models of the bodies; None where none of them can."""
    sizes = problem["m"], problem["n"], problem["k"]
    few = sizes[0] <= (MORE_ROWS if sizes[1] <= 32 * dev.num_cores else MOST_ROWS)
    wide_can = why_unfit("wide", problem, dev) is None
    few = few or (sizes[0] <= MORE_ROWS and not wide_can)
    if few and why_unfit("core", problem, dev) is None:
        config = core.default_config(_as_core(problem), dev, BITS)
        del config["SLICES"]
        if why_illegal(config, problem, dev) is None:
            return config
    if not wide_can:
        return None
    apart = problem["group"] != problem["k"]
    return wide.default_config(sizes, dev, BITS, wide.FIXED, 8, apart)


def _as_core(problem: Problem) -> dict[str, Any]:
    """The problem as "core" knows it: without zero points."""
    facts = {name: problem[name] for name in ("m", "n", "k", "group", "scale")}
    return {**facts, "zero": False}
