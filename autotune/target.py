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
    """What a new search is for; says so where it is not the device that is here."""
    here = device.current()
    asked = options.arch
    if asked == "interpret" or (asked is None and not options.offline and here.arch != "interpret"):
        _check_interpreter(asked)
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


def target_for(arch: str, offline: bool, python: str | None) -> Target:
    """What a search that is stored goes on for; raises ValueError with why it cannot, here."""
    here = device.current()
    if not offline and (here.arch != arch or here.compile_only):
        name = "no device that runs" if here.compile_only else here.arch
        raise ValueError(f"it was measured on {arch}, and here is {name}")
    dev = device.offline_facts(arch) if offline else here
    target = Target(dev, offline, python or (_python_for(dev) if offline else sys.executable))
    if target.python == sys.executable:
        device.require_triton()
    return target


def shown_device(options: argparse.Namespace) -> device.Device:
    """The device that ``--status`` is about, which needs not be here, nor its compiler."""
    here = device.current()
    _check_interpreter(options.arch)
    if options.arch is not None:
        return here if options.arch == here.arch else device.offline_facts(options.arch)
    if here.arch != "interpret":
        return here
    print(
        f"autotune: found no accelerator; this is what {BARE_ARCH} has (--arch for another)",
        file=sys.stderr,
    )
    return device.offline_facts(BARE_ARCH)


def _check_interpreter(asked: str | None) -> None:
    arch = device.current().arch
    if asked == "interpret" and arch != "interpret":
        raise ValueError(f"autotune: --arch interpret needs TKERNELS_DEVICE=cpu, got {arch}")


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


def trials_of(sampler: str, target: Target) -> int:
    """How many configs a problem is given, where the command does not say."""
    if sampler == "exhaustive":
        return 10**9
    if not target.offline:
        return TRIALS["measured"]
    return TRIALS[target.arch if target.dev.is_npu else "sm"]
