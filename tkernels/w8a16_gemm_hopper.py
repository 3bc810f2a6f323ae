"""``w8a16_gemm`` on Hopper (sm_90): which problems the bodies for integer weights take, and when.

``integer_weights_few`` ("core") says how: weights are what is read, and a group's sum is scaled in
fp32.
"""

from __future__ import annotations

import functools
from typing import Any

from tkernels import integer_weights_few as core
from tkernels.device import Device
from tkernels.registry import Config, Problem

BITS = 8
MOST_ROWS = 32  # for which "core" is the default, where it is legal

core_bound = functools.partial(core.bound, BITS)


def why_unfit(variant: str, problem: Problem, dev: Device) -> str | None:
    """Reason why this body cannot serve such a problem, whatever the config; None: it can."""
    k, group = problem["k"], problem["group"]
    if why := core.why_unfit(k, dev):
        return why
    if k % 16:
        return f"variant {variant} needs K to be a multiple of 16, got {k}"
    if group != k and group < 64:
        return f"variant core has groups of 64 or more, got {group}"
    return None


def fits(strides: tuple[int, ...]) -> bool:
    """Whether rows of x and of the weights, with these strides, start at multiples of 16 bytes."""
    return strides[0] % 8 == 0 and strides[1] % 16 == 0


def why_illegal(config: Config, problem: Problem, dev: Device) -> str | None:
    """Reason why a config of one of these bodies cannot be launched; None: it can."""
    return core.why_illegal(core.with_slices(config), _as_core(problem), dev, BITS)


def default_config(problem: Problem, dev: Device) -> Config | None:
    """What takes the least time by models of the bodies; None where none of them can."""
    if problem["m"] <= MOST_ROWS and why_unfit("core", problem, dev) is None:
        config = core.default_config(_as_core(problem), dev, BITS)
        del config["SLICES"]
        if why_illegal(config, problem, dev) is None:
            return config
    return None


def _as_core(problem: Problem) -> dict[str, Any]:
    """The problem as "core" knows it: without zero points."""
    facts = {name: problem[name] for name in ("m", "n", "k", "group", "scale")}
    return {**facts, "zero": False}
