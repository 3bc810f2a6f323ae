"""A kernel whose workers are watched, for tests of ``--jobs``: ``--import watched``.

What each worker does is a file in the folder $WATCHED, named by the worker's process.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import sys
import time
from pathlib import Path
from typing import Any

import planted
import torch

from tkernels.registry import Config, Problem, op, register

FOLDER = Path(os.environ["WATCHED"])
JOBS = 3
DYING = "dies when it is measured"
_count = itertools.count()


def _note(what: str) -> None:
    if Path(sys.argv[0]).stem == "worker":
        (FOLDER / f"{what}.{os.getpid()}.{next(_count)}").touch()


@op
def watched(
    x: torch.Tensor, *, out: torch.Tensor | None = None, config: Config | None = None
) -> torch.Tensor:
    """``planted``, where one config survives being compiled and no more."""
    if config == {"HOW": DYING}:
        if out is not None:
            os.abort()
        config = None
    return planted.planted(x, out=out, config=config)


def watched_ref(x: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """The same without faults."""
    _note("truth")
    return planted.planted_ref(x, out=out)


def _make_inputs(problem: Problem, dev: torch.device) -> dict[str, Any]:
    _note("inputs")
    return planted.SPEC.make_inputs(problem, dev)


SPEC = register(
    dataclasses.replace(
        planted.SPEC,
        name="watched",
        launch=watched,
        reference=watched_ref,
        make_inputs=_make_inputs,
        space=lambda dev: {"HOW": ["default", DYING, "raises", "slow", "fast"]},
    )
)

# No worker is done importing until all have begun to.
_note("begun")
_deadline = time.monotonic() + 60
while Path(sys.argv[0]).stem == "worker" and len(list(FOLDER.glob("begun.*"))) < JOBS:
    if time.monotonic() > _deadline:
        _note("alone")
        break
    time.sleep(0.05)
