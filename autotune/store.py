"""Where trials are kept: one Optuna study for each problem, in a journal file or a database.

A journal file (the default) serves the processes of one host; any number of hosts may share a
database, ``--storage postgresql://...``. A process may be killed at any moment: it loses the trial
it was at, and whoever comes next finds that trial, sees that its owner is gone, and fails it.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import functools
import hashlib
import os
import socket
import threading
import time
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import optuna
from optuna.storages import BaseStorage, JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, TrialState

from autotune.records import Answer, Task, encode, label_of
from tkernels.registry import Config

DEFAULT = Path(".autotune")  # in the current folder
JOURNAL = "journal.log"
_BEAT_S = 10  # how often a worker says that it is alive, where a database is shared
_JOURNAL_BEAT_S = 30  # the same in a journal, where each time is a line: few trials take so long
_SILENT_S = 4 * _JOURNAL_BEAT_S  # after that a trial of another host is lost
_GRACE_S = 60
_ENDED = (TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL)


def open_storage(where: str | None) -> BaseStorage:
    """The storage at ``where``: a database's address, a journal file, or a folder for one.

    Raises ValueError, with the address but without its password, where it cannot be reached.
    """
    if where is not None and "://" in where:
        return _database(where)
    path = _journal(where)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "ab"):
            pass
        lock = _Flock(path)
        with contextlib.closing(lock):  # a file that a killed process left torn is mended
            return JournalStorage(JournalFileBackend(str(path), lock_obj=_Flock(path)))
    except OSError as error:
        raise ValueError(
            f"autotune: --storage must be a writable file or folder, got {path}: {error.strerror}"
        ) from None
    except (ValueError, KeyError, AssertionError) as error:
        raise ValueError(
            f"autotune: --storage must be a journal of Optuna, got {path}, which does not read: "
            f"{type(error).__name__}: {error}"
        ) from None


def place(where: str | None) -> str:
    """``where`` the storage is, for people: the journal's path, or the address of a database."""
    return _without_password(where) if where and "://" in where else str(_journal(where))


def _journal(where: str | None) -> Path:
    path = Path(where) if where is not None else DEFAULT
    return path / JOURNAL if path.is_dir() or path.suffix == "" else path


def _database(url: str) -> BaseStorage:
    shown = _without_password(url)
    if url.startswith("sqlite"):
        raise ValueError(
            f"autotune: --storage must be a journal file or a database server, got {shown} "
            "(SQLite loses trials when several processes write)"
        )
    # Its driver is named in the address, or psycopg 3 is taken, which tkernels[tune-db] brings.
    if url.startswith(("postgresql://", "postgres://")):
        url = "postgresql+psycopg://" + url.split("://", 1)[1]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            return RDBStorage(
                url,
                heartbeat_interval=_BEAT_S,
                grace_period=_GRACE_S,
                engine_kwargs={"pool_pre_ping": True},
            )
    except ImportError as error:
        raise ValueError(
            f"autotune: --storage {shown} needs a driver, got {error}; pip install "
            "'tkernels[tune-db]'"
        ) from None
    except Exception as error:  # each database's driver has exceptions of its own
        reason = " ".join(str(error).split())[:300]
        raise ValueError(
            f"autotune: --storage must be a database that answers, got {shown}: {reason}"
        ) from None


def _without_password(url: str) -> str:
    scheme, rest = url.split("://", 1)
    if "@" not in rest:
        return url
    who, where = rest.rsplit("@", 1)
    return f"{scheme}://{who.split(':')[0]}@{where}"


class _Flock:
    """Optuna's own locks are files that a killed process leaves behind; the kernel frees this one.

    Whoever takes it cuts off a last line without an end, which only a killed process leaves, and
    to which the next line would be glued.
    """

    def __init__(self, journal: Path) -> None:
        self._journal = journal
        self._held = threading.local()
        self._path = f"{journal}.lock"

    def acquire(self) -> bool:
        handle = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
        fcntl.flock(handle, fcntl.LOCK_EX)
        self._held.handle = handle
        _cut_torn_line(self._journal)
        return True

    def release(self) -> None:
        os.close(self._held.handle)

    def close(self) -> None:
        """Take and free the lock once, for what taking it mends."""
        self.acquire()
        self.release()


def _cut_torn_line(path: Path) -> None:
    with open(path, "rb+") as file:
        end = file.seek(0, os.SEEK_END)
        if end == 0:
            return
        file.seek(end - 1)
        if file.read(1) == b"\n":
            return
        file.seek(0)
        kept = file.read().rfind(b"\n") + 1
        file.truncate(kept)


# ---- studies -----------------------------------------------------------------------------------


def fingerprint_label(fingerprint: Mapping[str, Any]) -> str:
    """Short text for what must be equal for two measurements to stand in one study."""
    return hashlib.sha256(label_of(fingerprint).encode()).hexdigest()[:8]


def study_name(task: Task, fingerprint: Mapping[str, Any]) -> str:
    """One study a problem and fingerprint: times of another kernel or card are not comparable."""
    return f"{task.kernel}/{task.arch}/{task.label}/{fingerprint_label(fingerprint)}"


def open_study(
    storage: BaseStorage,
    task: Task,
    fingerprint: Mapping[str, Any],
    default_config: Config,
    sampler: optuna.samplers.BaseSampler | None = None,
    pruner: optuna.pruners.BasePruner | None = None,
) -> optuna.Study:
    """The study of ``task``, made if it is new. Trials whose owner is gone are failed."""
    study = optuna.create_study(
        storage=storage,
        study_name=study_name(task, fingerprint),
        sampler=sampler,
        pruner=pruner,
        load_if_exists=True,
    )
    written = study.user_attrs
    if "kernel" not in written:
        facts = {
            "arch": task.arch,
            "case": task.case,
            "key": task.key,
            "problem": encode(task.problem),
            "default_config": default_config,
            "fingerprint": dict(fingerprint),
            "kernel": task.kernel,  # last: who has it has all, though its maker may be killed
        }
        for name, value in facts.items():
            study.set_user_attr(name, value)
    reap(study)
    return study


def all_studies(storage: BaseStorage) -> list[optuna.Study]:
    """Every study in ``storage`` that this tuner made, oldest first."""
    summaries = optuna.get_all_study_summaries(storage, include_best_trial=False)
    return [
        optuna.load_study(study_name=s.study_name, storage=storage)
        for s in summaries
        if "kernel" in s.user_attrs
    ]


# ---- owners ------------------------------------------------------------------------------------


def owner() -> dict[str, Any]:
    """What tells whether this process still lives: pids are used again, start times are not."""
    return {"host": _host(), "pid": os.getpid(), "started": _started(os.getpid())}


@functools.cache
def _host() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()[:8]
    except OSError:
        boot = ""
    return f"{socket.gethostname()}/{boot}/{_namespace()}"


def _namespace() -> str:
    """Processes of two containers of one host do not see each other."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _started(pid: int) -> str:
    """The start time of a process, "" where it does not live (or where /proc is not there)."""
    try:
        after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    state, start = after_name[0], after_name[19]
    return "" if state in "ZX" else start


def reap(study: optuna.Study) -> int:
    """Fail the trials that nobody works on any more; returns how many.

    On this host a process is looked up; of other hosts the heartbeat is asked: a database has one,
    and in a journal, which may have been carried here from another machine, ``alive`` writes it.
    """
    storage = study._storage
    in_journal = not isinstance(storage, RDBStorage)
    gone = 0
    for trial in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
        if _is_gone(trial) or (in_journal and _is_silent(trial)):
            gone += _fail(storage, trial, kind="crashed", message="its tuner was killed")
    if isinstance(storage, RDBStorage):
        before = len(study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)))
        optuna.storages.fail_stale_trials(study)
        gone += before - len(study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)))
    return gone


def let_go(study: optuna.Study) -> int:
    """Fail this process's own trials, for it stops; returns how many. They can be tried again."""
    mine = owner()
    return sum(
        _fail(study._storage, trial)
        for trial in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
        if trial.user_attrs.get("owner") == mine
    )


def _fail(storage: BaseStorage, trial: FrozenTrial, **attrs: str) -> bool:
    """Whether ``trial`` was still running, and is now failed."""
    with contextlib.suppress(optuna.exceptions.UpdateFinishedTrialError, KeyError):
        for name, value in attrs.items():
            storage.set_trial_user_attr(trial._trial_id, name, value)
        return bool(storage.set_trial_state_values(trial._trial_id, TrialState.FAIL))
    return False


def _is_gone(trial: FrozenTrial) -> bool:
    its = trial.user_attrs.get("owner")
    if its is None:  # killed between the trial's first two lines, or just about to write the second
        begun = trial.datetime_start or datetime.datetime.min
        return (datetime.datetime.now() - begun).total_seconds() > _GRACE_S
    return bool(its["host"] == _host() and _started(its["pid"]) != its["started"])


def _is_silent(trial: FrozenTrial) -> bool:
    """Whether another host has not been heard of for so long that it must have gone."""
    its = trial.user_attrs.get("owner")
    if its is None or its["host"] == _host():
        return False
    begun = trial.datetime_start.timestamp() if trial.datetime_start else 0.0
    heard = max(begun, float(trial.user_attrs.get("beat", 0.0)))
    return abs(time.time() - heard) > _SILENT_S  # a clock far ahead says nothing


@contextlib.contextmanager
def alive(study: optuna.Study, trial: optuna.Trial) -> Iterator[None]:
    """Say now and then that ``trial`` is worked on, where other hosts may ask."""
    storage, number = study._storage, trial._trial_id
    done = threading.Event()

    def beat() -> None:
        if isinstance(storage, RDBStorage):
            while not done.is_set():
                with contextlib.suppress(Exception):  # the database may be away for a moment
                    storage.record_heartbeat(number)
                done.wait(_BEAT_S)
        while not done.wait(_JOURNAL_BEAT_S):
            with contextlib.suppress(Exception):  # failed by another who took it for lost
                storage.set_trial_user_attr(number, "beat", time.time())

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


# ---- the table of what is known ------------------------------------------------------------------


def answer_of(trial: FrozenTrial) -> Answer | None:
    """What a trial found about its config; None for one that was lost or never began."""
    attrs = trial.user_attrs
    if trial.state not in _ENDED or "kind" not in attrs:
        return None
    blocks = tuple(trial.intermediate_values[step] for step in sorted(trial.intermediate_values))
    return Answer(
        attrs["kind"], attrs.get("message", ""), attrs.get("ms"), blocks, attrs.get("facts", {})
    )


def known(study: optuna.Study) -> dict[str, tuple[Config, Answer]]:
    """By label, every config that was tried and what came of it.

    A trial that was lost with its tuner says nothing of its config; duplicates repeat an answer.
    """
    table: dict[str, tuple[Config, Answer]] = {}
    for trial in study.get_trials(deepcopy=False, states=_ENDED):
        if trial.state == TrialState.FAIL or "config" not in trial.user_attrs:
            continue
        answer = answer_of(trial)
        if answer is not None:
            config = trial.user_attrs["config"]
            table[label_of(config)] = config, answer  # the latest, where one was tried again
    return table


def in_work(study: optuna.Study, *, but: int = -1) -> set[str]:
    """Labels of the configs that someone is at, trial number ``but`` left out."""
    running = study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
    return {
        label_of(trial.user_attrs["config"])
        for trial in running
        if "config" in trial.user_attrs and trial.number != but
    }
