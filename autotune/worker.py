"""The tuner's child process: ``python -m autotune.worker``, driven by ``autotune.process``.

It reads one request a line (JSON) and writes one answer a line. It may abort, hang or lose the
device: that is why it is a process of its own. It imports neither optuna nor rich, so that an
environment without them (the one with Huawei's compiler) can run it.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from typing import Any, TextIO

from autotune.records import decode

# Names of exceptions, or words of their messages, that tell what kind of failure it was.
_SIGNS = (
    ("out of resources", ("OutOfResources", "out of resource")),
    (
        "out of memory",
        ("OutOfMemoryError", "MemoryError", "can't allocate memory", "out of memory"),
    ),
    (
        "device fault",
        ("AcceleratorError", "CUDA error", "illegal memory access", "launch failure", "ACL error"),
    ),
    (
        "does not compile",
        (
            "CompilationError",
            "CompileTimeAssertionFailure",
            "PassManager",
            "PTXASError",
            "ptxas",
            "MLIRCompilationError",
            "UnsupportedLanguageConstruct",
        ),
    ),
)


def classify(error: BaseException) -> tuple[str, str]:
    """(kind of failure, one line) of what a compiler, a launch or a comparison raised."""
    name, text = type(error).__name__, str(error)
    line = " ".join(text.split())[:500]
    if isinstance(error, AssertionError):
        return "wrong", line
    for kind, signs in _SIGNS:
        if any(sign == name or sign in text for sign in signs):
            return kind, f"{name}: {line}"
    return "does not run", f"{name}: {line}"


class Session:
    """What a worker holds between requests: the opened problem and the captured candidate."""

    def __init__(self) -> None:
        self.spec: Any = None
        self.problem: Any = None
        self.inputs: Any = None
        self.bench: Any = None
        self.candidate: Any = None

    def open(self, request: dict[str, Any]) -> dict[str, Any]:
        """Take on one problem; memory of the one before goes back to the device."""
        import torch

        from tkernels import device, registry

        self.inputs = self.bench = self.candidate = None
        device.empty_cache()
        torch.rand(1, device=device.tensor_device())  # makes the context, while nobody waits
        self.spec = registry.get(request["kernel"])
        self.problem = decode(request["problem"])
        return {"device": device.current().name}

    def make_inputs(self, request: dict[str, Any]) -> dict[str, Any]:
        """Allocate what compiling needs: copies, for their strides are what will be measured."""
        from tkernels import device
        from tkernels.testing import clone_inputs

        self.inputs = clone_inputs(self.spec.make_inputs(self.problem, device.tensor_device()))
        device.empty_cache()
        return {}

    def lay_out(self, request: dict[str, Any]) -> dict[str, Any]:
        """Allocate the inputs and compute what is right."""
        from autotune import measure

        self.bench = measure.lay_out(self.spec, self.problem)
        self.inputs = self.bench.sets[0]
        return {"sets": len(self.bench.sets)}

    def compile(self, request: dict[str, Any]) -> dict[str, Any]:
        from autotune import measure

        return {"facts": measure.compile_only(self.spec, self.inputs, request["config"])}

    def check(self, request: dict[str, Any]) -> dict[str, Any]:
        from autotune import measure

        measure.check(self.bench, request["config"])
        return {}

    def begin(self, request: dict[str, Any]) -> dict[str, Any]:
        """Capture a config for timing; answers with one first sample."""
        from autotune import measure

        self.candidate = None  # frees the graph of the one before
        self.candidate = measure.ready(self.bench, request["config"])
        return {"ms": self.candidate.sample(), "method": self.candidate.method}

    def block(self, request: dict[str, Any]) -> dict[str, Any]:
        from autotune import measure

        return {"ms": measure.block(self.candidate)}

    def duel(self, request: dict[str, Any]) -> dict[str, Any]:
        from autotune import measure

        return {"samples": measure.duel(self.bench, request["configs"], request["rounds"])}

    def health(self, request: dict[str, Any]) -> dict[str, Any]:
        from tkernels import device

        return {"facts": device.health()}

    def estimate(self, request: dict[str, Any]) -> dict[str, Any]:
        """Ask the architecture's compiler and model about a config."""
        from autotune.offline import model_for
        from tkernels import device

        answer = model_for(device.current()).estimate(self.spec, self.problem, request["config"])
        return {
            "kind": answer.kind,
            "message": answer.message,
            "ms": answer.ms,
            "facts": dict(answer.facts),
        }

    def compilers(self, request: dict[str, Any]) -> dict[str, Any]:
        """Versions of what ``estimate`` asks."""
        from autotune.offline import model_for
        from tkernels import device

        return {"facts": model_for(device.current()).compilers()}


DOES = frozenset(name for name in vars(Session) if not name.startswith("_"))


def serve(requests: TextIO, answers: TextIO) -> None:
    """Answer requests until there are none; what goes wrong is an answer, too."""
    session = Session()
    for line in requests:
        request = json.loads(line)
        began = time.monotonic()
        try:
            assert request["do"] in DOES, request
            answer = {"kind": "ok", **getattr(session, request["do"])(request)}
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # a compiler may raise anything, SystemExit too
            traceback.print_exc()
            kind, message = classify(error)
            answer = {"kind": kind, "message": message}
        answer["seconds"] = round(time.monotonic() - began, 3)
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def _die_with_parent() -> None:
    """The kernel kills this process when the tuner dies, however that happens (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m autotune.worker", description=__doc__)
    parser.add_argument("--answers", type=int, required=True, metavar="FD", help="where to answer")
    parser.add_argument("--import", action="append", default=[], dest="modules", metavar="MODULE")
    options = parser.parse_args(argv)
    _die_with_parent()
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C goes to the whole group; the tuner decides
    # What kernels and compilers print must not end up among the answers.
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    import tkernels  # noqa: F401 (before triton, which a module of the user may import)

    for name in options.modules:
        importlib.import_module(name)
    with os.fdopen(options.answers, "w") as answers:
        serve(sys.stdin, answers)
    return 0


if __name__ == "__main__":
    sys.exit(main())
