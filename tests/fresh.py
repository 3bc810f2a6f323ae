"""Programs in processes of their own that find torch imported already: it takes most of a start.

One process imports torch and no more, and forks for each program. torch imports neither triton nor
what else tests of imports look for, and starts no thread before it computes.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

# A line in asks for a program, a line out is its exit status.
_PARENT = """
import json, os, signal, sys, traceback
import torch

def run(program, env, given, out, err):
    signal.alarm(1800)  # whatever hangs
    for stream, path in enumerate((given, out, err)):
        os.dup2(os.open(path, os.O_RDWR), stream)
    os.environ.clear()
    os.environ.update(env)
    sys.path[1:1] = [path for path in env.get("PYTHONPATH", "").split(os.pathsep) if path]
    status = 0
    try:
        exec(compile(program, "<program>", "exec"), {"__name__": "__main__"})
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)

for line in iter(sys.stdin.readline, ""):
    child = os.fork()
    if child == 0:
        run(**json.loads(line))
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@functools.cache
def _parent() -> subprocess.Popen[str]:
    env = {n: v for n, v in os.environ.items() if n not in ("PYTHONPATH", "TRITON_INTERPRET")}
    return subprocess.Popen(
        [sys.executable, "-c", _PARENT], env=env, cwd=ROOT, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip


def run(program: str, env: Mapping[str, str], given: str = "") -> subprocess.CompletedProcess[str]:
    """Run ``program`` in a new process with this environment and input, in the checkout."""
    parent = _parent()
    assert parent.stdin is not None
    assert parent.stdout is not None
    with contextlib.ExitStack() as files:
        names = ("given", "out", "err")
        made = {n: files.enter_context(tempfile.NamedTemporaryFile("w+")) for n in names}
        made["given"].write(given)
        made["given"].flush()
        asked = {"program": program, "env": dict(env), **{n: f.name for n, f in made.items()}}
        parent.stdin.write(json.dumps(asked) + "\n")
        parent.stdin.flush()
        status = int(parent.stdout.readline())
        return subprocess.CompletedProcess(program, status, made["out"].read(), made["err"].read())
