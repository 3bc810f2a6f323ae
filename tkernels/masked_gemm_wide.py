"""``masked_gemm`` with int8 weights and unquantised rows alone (W8A16) on Hopper (sm_90).

``integer_weights_hopper`` says how; here is which problems it takes.
"""

from __future__ import annotations

import functools

from tkernels import integer_weights_hopper as body
from tkernels.device import Device
from tkernels.registry import Config, Problem

BITS = 8
FIXED: Config = {**body.FIXED, "GROUP_M": 1, "SWAP": False}

bound = functools.partial(body.bound, BITS)


def why_unfit(problem: Problem, dev: Device) -> str | None:
    """Reason why this body cannot serve such a problem, whatever the config; None: it can."""
    if why := body.why_unfit(problem["n"], problem["k"], dev):
        return why
    if problem["path"] != "high" or problem["high_weight"]:
        return "variant wide has int8 weights and rows that run high without a mask"
    if not problem["aligned"]:
        return "variant wide needs rows that divide by 16 bytes"
    return None


def why_illegal(config: Config, problem: Problem, dev: Device) -> str | None:
    """Reason why a config of this body cannot be launched; None: it can."""
    return body.why_illegal(config, problem["k"], dev, BITS, FIXED)


def default_config(problem: Problem, dev: Device) -> Config:
    """What takes the least time by a model of the body."""
    sizes = problem["m"], problem["n"], problem["k"]
    return body.default_config(sizes, dev, BITS, FIXED, 8)
