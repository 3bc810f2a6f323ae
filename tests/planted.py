"""A kernel with planted faults, for the tuner's tests: ``python -m autotune --import planted``.

It doubles its argument in plain PyTorch. Its one config key says how: right at various speeds, or
in one of the ways in which real configs go wrong.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import time

import torch

from tkernels.device import Device
from tkernels.registry import Case, Config, Cost, KernelSpec, Problem, op, register

RIGHT = {"slow": 0.006, "default": 0.004, "fast": 0.002}  # seconds that a call takes
FAULTS = (
    *("wrong", "partial", "outside", "spoils", "flaky"),
    *("hang", "abort", "exit", "killed", "memory", "raises"),
)
_kept: list[torch.Tensor] = []


@op
def planted(
    x: torch.Tensor, *, out: torch.Tensor | None = None, config: Config | None = None
) -> torch.Tensor:
    """Twice ``x`` [N]."""
    how = (config or {"HOW": "default"})["HOW"]
    out = torch.empty_like(x) if out is None else out
    if how in RIGHT:
        time.sleep(RIGHT[how])
        out.copy_(2 * x)
    elif how == "wrong":
        out.copy_(2 * x + 1)
    elif how == "partial":  # right wherever an earlier config wrote to the same memory
        out[:-1].copy_(2 * x[:-1])
    elif how == "outside":
        out.copy_(2 * x)
        if out.storage_offset() > 0:
            out.as_strided((1,), (1,), out.storage_offset() - 1).zero_()
    elif how == "spoils":
        out.copy_(2 * x)
        x[0] = 7
    elif how == "flaky":  # the fastest, and right until it has run many times
        _kept.append(x)
        out.copy_(2 * x + (len(_kept) > 40))
    elif how == "hang":
        time.sleep(3600)
    elif how == "abort":
        os.abort()
    elif how == "exit":
        raise SystemExit(3)
    elif how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "memory":
        torch.empty(2**50, dtype=torch.uint8)
    else:
        raise RuntimeError("no kernel image is available")
    return out


def planted_ref(x: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """The same without faults."""
    return 2 * x if out is None else out.copy_(2 * x)


def _make_inputs(problem: Problem, dev: torch.device) -> dict[str, torch.Tensor]:
    return {"x": torch.arange(problem["n"], dtype=torch.float32, device=dev)}


def _space(dev: Device) -> dict[str, list[str]]:
    return {"HOW": [*RIGHT, *FAULTS, "illegal"]}


def _default(problem: Problem, dev: Device) -> Config:
    return {"HOW": "default"}


def _why_illegal(config: Config, problem: Problem, dev: Device) -> str | None:
    return "HOW must not be illegal" if config["HOW"] == "illegal" else None


SPEC = register(
    KernelSpec(
        name="planted",
        launch=planted,
        reference=planted_ref,
        problem_fields=("n",),
        make_inputs=_make_inputs,
        cases=(Case("n-5", {"n": 5}, frozenset({"smoke", "bench"})),),
        tuning_key=lambda problem: {"n": problem["n"]},
        space=_space,
        default_config=_default,
        why_illegal=_why_illegal,
        cost=lambda problem: Cost(problem["n"], 8 * problem["n"]),
        outputs=("out",),
    )
)


@op
def planted_few(
    x: torch.Tensor, *, out: torch.Tensor | None = None, config: Config | None = None
) -> torch.Tensor:
    """``planted`` with few ways to go wrong."""
    return planted(x, out=out, config=config)


SPEC_FEW = register(
    dataclasses.replace(
        SPEC,
        name="planted_few",
        launch=planted_few,
        space=lambda dev: {"HOW": [*RIGHT, "wrong", "hang", "raises"]},
    )
)
