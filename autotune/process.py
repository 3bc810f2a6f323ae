"""The parent's side of ``autotune.worker``: start it, ask it, and survive it.

A request has a time limit. A worker that exceeds it is killed ("hung"); one that dies is told by
its exit ("crashed", or "out of memory" where the system killed it); one that lost its device is
replaced. The next request finds a new worker with the same problem opened.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import fcntl
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from autotune.records import Task, encode
from tkernels import device

# Seconds. Opening imports torch and triton; a compiler is given up on long after a person would.
START_LIMIT = 180.0
DEFAULT_LIMIT = 60.0
_TAIL = 2000  # characters of what a dead worker printed


class WorkerError(Exception):
    """A request that was not answered well; ``kind`` is one of records.FAILURES."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message


class Worker:
    """One child process, made when it is first needed and again when it is gone."""

    def __init__(
        self,
        *,
        python: str = sys.executable,
        arch: str = "",
        modules: Sequence[str] = (),
        limit: float = DEFAULT_LIMIT,
    ) -> None:
        """``arch`` is that of an offline worker; ``modules`` are imported (kernels of the user)."""
        self._python = python
        self._arch = arch
        self._modules = modules
        self._limit = limit
        self._task: Task | None = None
        self._opened = False
        self.laid_out = False  # the problem that is open
        self._child: subprocess.Popen[bytes] | None = None
        self._log: Any = None
        self._answers = -1
        self._rest = b""

    def open(self, task: Task) -> None:
        """From now on requests are about ``task``; what was laid out for another is freed.

        Begins the process, if there is none, without waiting for it.
        """
        had_opened, self._task = self._opened, task
        self._opened = self.laid_out = False
        if self._child is None:
            self._begin()
        elif had_opened:
            with contextlib.suppress(WorkerError):  # it is gone, and the next request begins anew
                self._open_task()

    def start(self) -> None:
        """Wait until the process has imported, reached the device and opened the problem."""
        if self._child is None:
            self._begin()
        if self._task is not None and not self._opened:
            self._open_task()

    def ask(self, what: str, *, limit: float | None = None, **request: Any) -> dict[str, Any]:
        """The worker's answer; raises ``WorkerError`` where there is none, or a bad one."""
        self.start()
        return self._send({"do": what, **request}, limit or self._limit)

    def lay_out(self, what: str) -> None:
        """``make_inputs``, or ``lay_out`` what measuring needs, too."""
        self.ask(what, limit=START_LIMIT)
        self.laid_out = True

    def close(self) -> None:
        """End the process; a later request starts another."""
        child, self._child = self._child, None
        self._opened = self.laid_out = False
        if child is None:
            return
        with contextlib.suppress(OSError):
            os.close(self._answers)
        with contextlib.suppress(OSError):
            assert child.stdin is not None
            child.stdin.close()
        with contextlib.suppress(OSError):
            os.killpg(child.pid, signal.SIGKILL)  # compilers that it started
        child.wait()
        self._log.close()

    # ---- inside ----

    def _begin(self) -> None:
        mine, its = os.pipe()
        self._log = tempfile.TemporaryFile("a+b")  # noqa: SIM115 (closed in close)
        environment = device.child_environment(self._arch)
        root = str(Path(__file__).parents[1])
        paths = [root, os.getcwd(), environment.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
        imports = [word for name in self._modules for word in ("--import", name)]
        try:
            self._child = _started(
                [self._python, "-m", "autotune.worker", "--answers", str(its), *imports],
                stdin=subprocess.PIPE,
                stdout=self._log,
                stderr=self._log,
                pass_fds=(its,),
                env=environment,
                start_new_session=True,
            )
        except OSError as error:
            os.close(mine)
            raise ValueError(
                f"autotune: the worker's Python must run, got {self._python}: {error.strerror}"
            ) from None
        finally:
            os.close(its)
        self._answers, self._rest = mine, b""

    def _open_task(self) -> None:
        assert self._task is not None
        problem = encode(self._task.problem)
        try:
            self._send({"do": "open", "kernel": self._task.kernel, "problem": problem}, START_LIMIT)
        except WorkerError:
            self.close()  # it must not answer for the problem before
            raise
        self._opened = True

    def _send(self, request: dict[str, Any], limit: float) -> dict[str, Any]:
        child = self._child
        assert child is not None
        assert child.stdin is not None
        deadline = time.monotonic() + limit
        self._log.truncate(0)  # what it prints from here on may be its last words
        try:
            child.stdin.write(json.dumps(request).encode() + b"\n")
            child.stdin.flush()
            line = self._read_line(deadline)
        except TimeoutError:
            self._kill()
            raise WorkerError("hung", f"{request['do']} took longer than {limit:g} s") from None
        except (BrokenPipeError, EOFError):
            raise WorkerError(*self._why_dead()) from None
        try:
            answer: dict[str, Any] = json.loads(line)
            kind, message = answer["kind"], answer.get("message", "")
        except (ValueError, TypeError, KeyError):
            self._kill()
            raise WorkerError("crashed", f"it answered {line[:100]!r}") from None
        if kind != "ok":
            if kind == "device fault":
                self._kill()  # its context is gone, whatever it is asked next would fail too
            raise WorkerError(kind, message)
        return answer

    def _read_line(self, deadline: float) -> bytes:
        while b"\n" not in self._rest:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._answers], [], [], left)[0]:
                raise TimeoutError
            got = os.read(self._answers, 1 << 16)
            if not got:
                raise EOFError
            self._rest += got
        line, self._rest = self._rest.split(b"\n", 1)
        return line

    def _kill(self) -> None:
        child = self._child
        if child is not None:
            with contextlib.suppress(OSError):
                os.killpg(child.pid, signal.SIGKILL)
            self.close()

    def _why_dead(self) -> tuple[str, str]:
        assert self._child is not None
        try:
            code = self._child.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._kill()
            return "crashed", "it stopped answering"
        self._log.seek(0)
        lines = self._log.read()[-_TAIL:].decode(errors="replace").strip().splitlines()
        last = lines[-1][:300] if lines else "it printed nothing"
        self.close()
        if code == -signal.SIGKILL:
            return "out of memory", f"the system killed it ({last})"
        how = f"signal {_signal_name(-code)}" if code < 0 else f"exit status {code}"
        return "crashed", f"{how}: {last}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # those for real time have no names
        return str(number)


# A worker dies with the thread that started it (PR_SET_PDEATHSIG), so one that never ends does.
_starter = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="starts-workers")


def _started(command: list[str], **how: Any) -> subprocess.Popen[bytes]:
    def start() -> subprocess.Popen[bytes]:
        return subprocess.Popen(command, **how)

    return _starter.submit(start).result()


def alone_on(device_name: str) -> contextlib.AbstractContextManager[None]:
    """Wait until no tuner of this host uses the device, and keep them out: to time."""
    return _locked(device_name, fcntl.LOCK_EX)


def beside_others_on(device_name: str) -> contextlib.AbstractContextManager[None]:
    """Wait until no tuner of this host times on the device, and let none begin: to use it."""
    return _locked(device_name, fcntl.LOCK_SH)


@contextlib.contextmanager
def _locked(device_name: str, how: int) -> Iterator[None]:
    name = "".join(c if c.isalnum() else "-" for c in device_name)
    path = Path(tempfile.gettempdir()) / f"tkernels-{os.getuid()}-{name}.lock"
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(handle, how)
        yield
    finally:
        os.close(handle)
