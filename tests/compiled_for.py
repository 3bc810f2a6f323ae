"""Run a program where Triton compiles for a chip that is not here: this process may interpret."""

from __future__ import annotations

import os

from tests.fresh import ROOT, run


def lines_of(program: str, *, arch: str = "sm90", given: str = "") -> list[str]:
    """What ``program`` prints in a process of its own that compiles for ``arch``."""
    env = {**os.environ, "TKERNELS_DEVICE": f"compile:{arch}", "PYTHONPATH": str(ROOT)}
    env.pop("TRITON_INTERPRET", None)
    done = run(program, env, given)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()
