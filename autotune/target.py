"""What a command tunes for, and which Python runs the trials."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import sys
from pathlib import Path

from tkernels import device

BARE_ARCH = "sm90"  # what a machine without an accelerator searches for
TRIALS = {"measured": 60, "sm": 120, "ascend910b": 400}


@dataclasses.dataclass(frozen=True)
class Target:
    """What is tuned for, and who runs the trials."""

    dev: device.Device
    offline: bool
    python: str

    @property
    def arch(self) -> str:
        return self.dev.arch


def target_of(options: argparse.Namespace) -> Target:
    here = device.current()
    asked = options.arch
    if asked == "interpret" or (asked is None and not options.offline and here.arch != "interpret"):
        if asked == "interpret" and here.arch != "interpret":
            raise ValueError(
                f"autotune: --arch interpret needs TKERNELS_DEVICE=cpu, got {here.arch}"
            )
        if here.compile_only:
            raise ValueError(
                f"autotune: the device must be able to run, got compile-only {here.arch} "
                "(--offline asks its compiler)"
            )
        if here.arch == "interpret":
            print("autotune: times of the interpreter mean nothing", file=sys.stderr)
        return Target(here, False, options.python or sys.executable)
    if asked is None and not options.offline:
        print(
            f"autotune: found no accelerator; searching offline for {BARE_ARCH}, with its compiler "
            "and a model instead of a clock (--arch ascend910b for another, --arch interpret to "
            "try the tuner itself)",
            file=sys.stderr,
        )
    arch = asked or (here.arch if here.arch != "interpret" else BARE_ARCH)
    if asked is not None and asked == here.arch and not options.offline and not here.compile_only:
        return Target(here, False, options.python or sys.executable)
    facts = device.offline_facts(arch)
    return Target(facts, True, options.python or _python_for(facts))


def _python_for(facts: device.Device) -> str:
    """The Python whose triton compiles for the chip."""
    if not facts.is_npu:
        return sys.executable
    found = [
        folder / ".venv-ascend" / "bin" / "python"
        for folder in (Path.cwd(), Path(__file__).parents[1])
    ]
    for path in found:
        if path.exists():
            return str(path)
    if importlib.util.find_spec("triton.backends.ascend") is not None:
        return sys.executable
    raise ValueError(
        f"autotune: expected an environment with triton-ascend and ascendnpu-ir, got none at "
        f"{found[0]} (make test-ascend makes it; --python names another)"
    )


def trials_of(options: argparse.Namespace, target: Target) -> int:
    """How many configs a problem is given, where the command does not say."""
    if options.sampler == "exhaustive":
        return 10**9
    if not target.offline:
        return TRIALS["measured"]
    return TRIALS[target.arch if target.dev.is_npu else "sm"]
