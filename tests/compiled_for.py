"""Run a program where Triton compiles for a chip that is not here: this process may interpret."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def lines_of(program: str, *, arch: str = "sm90", given: str = "") -> list[str]:
    """What ``program`` prints in a process of its own that compiles for ``arch``."""
    env = {**os.environ, "TKERNELS_DEVICE": f"compile:{arch}", "PYTHONPATH": str(ROOT)}
    env.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, "-c", program],
        input=given,
        env=env,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()
