"""``masked_gemm`` with int8 weights and unquantised rows alone (W8A16) on Hopper (sm_90).

``integer_weights_few`` ("core") and ``integer_weights_many`` ("wide") say how; here is which
problems they take. With W8A16 weights are what is read, as with W4A16, and twice as much.
"""

from __future__ import annotations

import functools
import types
from typing import Any

import torch

from tkernels import integer_weights_few as core
from tkernels import integer_weights_many as wide
from tkernels.device import Device
from tkernels.registry import Config, Problem

BITS = 8
MOST_ROWS = 16  # for which "core" is the default, where it is legal
MORE_ROWS = 32  # the same where a core has one tile: then x is not read for several
OTHERS: Config = {"GROUP_M": 1, "SWAP": False}  # what neither has a choice of
FIXED: Config = {**wide.FIXED, **OTHERS}  # of "wide"

bound = types.MappingProxyType(
    {"core": functools.partial(core.bound, BITS), "wide": functools.partial(wide.bound, BITS)}
)


def why_unfit(variant: str, problem: Problem, dev: Device) -> str | None:
    """Reason why this body cannot serve such a problem, whatever the config; None: it can."""
    n, k = problem["n"], problem["k"]
    if why := core.why_unfit(k, dev) if variant == "core" else wide.why_unfit(n, k, dev):
        return why
    if problem["path"] != "high" or problem["high_weight"]:
        return f"variant {variant} has int8 weights and rows that all run high, without a mask"
    if not problem["aligned"]:
        return f"variant {variant} needs rows that divide by 16 bytes"
    return None


def why_illegal(config: Config, problem: Problem, dev: Device) -> str | None:
    """Reason why a config of one of these bodies cannot be launched; None: it can."""
    if config["variant"] == "wide":
        return wide.why_illegal(config, problem["k"], dev, BITS, FIXED)
    if wrong := [f"{name} {v}" for name, v in OTHERS.items() if config[name] != v]:
        return f"variant core has {', '.join(wrong)}"
    return core.why_illegal(core.with_slices(config), _as_core(problem), dev, BITS)


def default_config(problem: Problem, dev: Device) -> Config:
    """What takes the least time by models of the bodies."""
    sizes = problem["m"], problem["n"], problem["k"]
    if sizes[0] <= (MORE_ROWS if sizes[1] <= 32 * dev.num_cores else MOST_ROWS):
        config = core.default_config(_as_core(problem), dev, BITS)
        del config["SLICES"]
        config |= OTHERS
        if why_illegal(config, problem, dev) is None:
            return config
    return wide.default_config(sizes, dev, BITS, FIXED, 8)


def _as_core(problem: Problem) -> dict[str, Any]:
    """The problem as "core" knows it: a scale a row."""
    facts = {name: problem[name] for name in ("m", "n", "k")}
    return {**facts, "group": problem["k"], "zero": False, "scale": torch.float32}
