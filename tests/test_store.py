"""Trials and tuned files survive what happens to the processes that write them."""

from __future__ import annotations

import dataclasses
import json
import math
import multiprocessing
import os
import random
import signal
import time
import unittest.mock
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("optuna", reason="the tuner needs optuna (tkernels[tune])")

import optuna

from autotune import export, store, tune
from autotune.process import WorkerError
from autotune.records import Answer, Outcome, Task, label_of
from autotune.search import Budget, Search, new_sampler
from tkernels import config, device
from tkernels.registry import get

SPEC = get("rms_norm")
CASE = SPEC.cases[0]
DEFAULT = {"A": 0, "B": 0}
SPACE = {"A": list(range(40)), "B": list(range(40))}
TASK = Task("rms_norm", "case", {"n": 1}, {"n": 1}, "sm90")
FORK = multiprocessing.get_context("fork")


def outcome(key: dict[str, Any], config: dict[str, Any] | None = None, ms: float = 0.5) -> Outcome:
    measured = {"device": "card", "num_cores": 132, "memory_gib": 80, "date": "2026-01-02"}
    return Outcome(
        task=Task(SPEC.name, CASE.name, CASE.problem, key, device.current().arch),
        config=config or SPEC.default_config(CASE.problem, device.current()),
        ms=ms,
        default_config={},
        default_ms=1.0,
        trials=3,
        failures={},
        wrong=(),
        measured=measured,
        estimate=None,
    )


def search_in(where: Path, trials: int, seed: int = 0) -> Search:
    storage = store.open_storage(str(where))
    study = store.open_study(storage, TASK, {"hash": "h"}, DEFAULT, new_sampler(seed))
    return Search(
        study, SPACE, lambda c: None, [(DEFAULT, "default")], Budget(trials), sampler="random",
        seed=seed,
    )  # fmt: skip


def tune_until_killed(where: Path, tuned: Path, seed: int) -> None:
    """A tuner that tries configs as fast as it can and exports after each."""
    search = search_in(where, 10_000, seed)
    while (proposal := search.next()) is not None:
        search.tell(proposal, Answer("ok", ms=1.0))
        export.write(tuned, outcome({"n_cols": proposal.trial.number % 50}))


def _journal_size(folder: Path) -> int:
    journal = folder / store.JOURNAL
    return journal.stat().st_size if journal.exists() else 0


def test_kills_lose_the_running_trial_at_most(tmp_path: Path) -> None:
    """Twenty kills at any moment: every trial told before is there, no file is torn."""
    rng = random.Random(0)
    before = 0
    for seed in range(20):
        child = FORK.Process(target=tune_until_killed, args=(tmp_path, tmp_path / "tuned", seed))
        child.start()
        assert child.pid is not None
        size, deadline = _journal_size(tmp_path), time.monotonic() + 30
        while _journal_size(tmp_path) == size:  # until it is at work
            assert time.monotonic() < deadline
            time.sleep(0.01)
        time.sleep(rng.random() * 0.3)
        os.kill(child.pid, signal.SIGKILL)
        child.join()
        search = search_in(tmp_path, 1)  # opens, mends, reaps
        states = [t.state.name for t in search.study.get_trials(deepcopy=False)]
        assert "RUNNING" not in states
        assert states.count("FAIL") <= seed + 1
        assert len(search.known()) >= before
        before = len(search.known())
        for file in (tmp_path / "tuned").glob("*/*.json"):
            assert json.loads(file.read_text())["schema"] == config.SCHEMA
    assert before > 20
    # Each trial had its own config, and what was lost may be tried again. (A config that a killed
    # process had queued can come twice, and is then answered from the table, without a "kind".)
    ended = search.study.get_trials(deepcopy=False)
    told = [t for t in ended if t.state.name == "COMPLETE" and "kind" in t.user_attrs]
    assert len({label_of(t.user_attrs["config"]) for t in told}) == len(told) == before


def test_a_torn_line_is_cut_off(tmp_path: Path) -> None:
    search = search_in(tmp_path, 3)
    proposal = search.next()
    assert proposal is not None
    search.tell(proposal, Answer("ok", ms=1.0))
    journal = tmp_path / store.JOURNAL
    whole = journal.read_bytes()
    journal.write_bytes(whole + b'{"op_code": 4, "study_id": 0, "par')
    assert len(search_in(tmp_path, 3).known()) == 1
    assert journal.read_bytes().startswith(whole)
    for line in journal.read_bytes().splitlines():
        json.loads(line)


@pytest.mark.parametrize("written", range(8))
def test_a_kill_while_a_study_is_made_leaves_a_study_that_can_be_used(
    written: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make() -> None:
        done = iter(range(written))
        whole = optuna.Study.set_user_attr

        def set_or_die(study: optuna.Study, name: str, value: Any) -> None:
            if next(done, None) is None:
                os.kill(os.getpid(), signal.SIGKILL)
            whole(study, name, value)

        optuna.Study.set_user_attr = set_or_die  # type: ignore[method-assign]
        search_in(tmp_path, 3)

    child = FORK.Process(target=make)
    child.start()
    child.join()
    for study in store.all_studies(store.open_storage(str(tmp_path))):
        assert "fingerprint" in study.user_attrs
    attrs = search_in(tmp_path, 3).study.user_attrs
    assert {"kernel", "arch", "case", "key", "problem", "default_config"} <= attrs.keys()


@pytest.mark.parametrize("ms", [math.nan, math.inf, -1.0, 0.0, None])
def test_a_time_that_is_none_is_a_failure(ms: float | None, tmp_path: Path) -> None:
    search = search_in(tmp_path, 3)
    for _ in range(3):
        proposal = search.next()
        assert proposal is not None
        search.tell(proposal, Answer("ok", ms=ms))
    assert search.next() is None
    assert search.best() is None
    assert {answer.kind for _, answer in search.known().values()} == {"does not run"}


@pytest.mark.parametrize(
    "changes",
    [
        {"ms": 0},
        {"ms": "fast"},
        {"default_ms": None},
        {"measured": True},
        {"measured": False},
        {"measured": {"date": 5}},
        {"config": "x"},
        {"key": []},
    ],
)
def test_an_entry_edited_into_another_form_is_not_merged(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    file = tmp_path / "a/sm90/rms_norm.json"
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps({"schema": 1, "entries": [{**entry(1.0), **changes}]}))
    with pytest.raises(ValueError, match="must be a tuned file to add to"):
        export.merge(tmp_path / "a", tmp_path / "b")


def test_only_trials_whose_owner_is_gone_are_failed(tmp_path: Path) -> None:
    search = search_in(tmp_path, 5)
    mine = search.next()
    assert mine is not None
    assert store.reap(search.study) == 0

    def take() -> None:
        search_in(tmp_path, 5, seed=1).next()

    child = FORK.Process(target=take)
    child.start()
    child.join()
    assert store.reap(search.study) == 1
    search.tell(mine, Answer("ok", ms=1.0))
    assert len(search.known()) == 1


def test_a_pid_that_was_used_again_is_no_owner(tmp_path: Path) -> None:
    search = search_in(tmp_path, 5)
    mine = search.next()
    assert mine is not None
    mine.trial.set_user_attr("owner", {**store.owner(), "started": "12345"})
    assert store.reap(search.study) == 1
    search.tell(mine, Answer("ok", ms=1.0))  # too late, and no error


def test_a_trial_of_another_machine_is_lost_once_it_is_silent(tmp_path: Path) -> None:
    """A journal is carried to a new machine in the middle of a search."""
    search = search_in(tmp_path, 5)
    theirs = search.next()
    assert theirs is not None
    theirs.trial.set_user_attr("owner", {**store.owner(), "host": "elsewhere"})
    assert store.reap(search.study) == 0  # it may be at it
    later = time.time() + 1000
    theirs.trial.set_user_attr("beat", later)
    with unittest.mock.patch("time.time", return_value=later + 60):
        assert store.reap(search.study) == 0
    with unittest.mock.patch("time.time", return_value=later + 600):
        assert store.reap(search.study) == 1
    assert not store.in_work(search.study)


def test_a_long_trial_in_a_journal_is_heard_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "_JOURNAL_BEAT_S", 0.01)
    search = search_in(tmp_path, 5)
    mine = search.next()
    assert mine is not None
    with store.alive(search.study, mine.trial):
        until = time.monotonic() + 20
        while time.monotonic() < until and "beat" not in search.study.trials[-1].user_attrs:
            time.sleep(0.01)
    assert abs(search.study.trials[-1].user_attrs["beat"] - time.time()) < 30


def test_what_was_stopped_is_not_waited_for(tmp_path: Path) -> None:
    search = search_in(tmp_path, 5)
    assert search.next() is not None
    search.let_go()
    assert not store.in_work(search.study)
    assert len(search_in(tmp_path, 5).known()) == 0
    again = search_in(tmp_path, 5).next()
    assert again is not None
    assert again.origin == "default"


def test_a_trial_that_another_took_for_lost_does_not_end_the_search(tmp_path: Path) -> None:
    search = search_in(tmp_path, 5)
    mine = search.next()
    assert mine is not None
    assert store.let_go(search.study) == 1

    class Slow:
        def ask(self, *_: Any, **__: Any) -> dict[str, Any]:
            mine.trial.report(1.0, 0)  # as a timing does
            raise AssertionError("expected a trial that was failed to refuse a report")

    setup = unittest.mock.Mock(offline=True)
    answer = tune.try_config(Slow(), mine, search, setup)  # type: ignore[arg-type]
    assert answer.kind == "crashed"
    search.tell(mine, answer)
    assert search.next() is not None


@pytest.mark.parametrize(
    ("at", "kind", "tried"),
    [
        ("lay_out", "out of memory", "ok"),
        ("lay_out", "crashed", "ok"),
        ("compile", "out of memory", "ok"),
        ("compile", "crashed", "crashed"),
        ("compile", "does not compile", "does not compile"),
    ],
)
def test_what_may_be_no_fault_of_a_config_is_left_to_who_measures(
    at: str, kind: str, tried: str, tmp_path: Path
) -> None:
    class Measures:
        laid_out = True

        def start(self) -> None: ...

        def ask(self, what: str, **_: Any) -> dict[str, Any]:
            return {"facts": {}, "ms": 1.0, "method": "graph"}

    class Compiles(Measures):
        laid_out = False

        def lay_out(self, what: str) -> None:
            if at == "lay_out":
                raise WorkerError(kind, "planted")

        def ask(self, what: str, **_: Any) -> dict[str, Any]:
            raise WorkerError(kind, "planted")

    search = search_in(tmp_path, 5)
    proposal = search.next()
    assert proposal is not None
    workers: list[Any] = [Measures(), Compiles()]
    setup = tune.Setup(device.current(), search.study._storage, search.budget, {}, workers)
    assert tune.try_config(workers[1], proposal, search, setup).kind == tried


def test_planned_is_what_there_is_where_all_is_tried(tmp_path: Path) -> None:
    study = search_in(tmp_path, 1).study
    for trials, planned in ((10**9, 1600), (2, 2)):
        search = Search(study, SPACE, lambda c: None, [], Budget(trials), sampler="exhaustive")
        assert search.planned == planned


def test_studies_of_other_kernels_or_cards_are_apart() -> None:
    one = store.study_name(TASK, {"kernel_hash": "a", "device": "x"})
    assert one != store.study_name(TASK, {"kernel_hash": "b", "device": "x"})
    assert one != store.study_name(TASK, {"kernel_hash": "a", "device": "y"})
    assert one == store.study_name(TASK, {"device": "x", "kernel_hash": "a"})


@pytest.mark.parametrize(
    ("where", "words"),
    [
        (
            "sqlite:///trials.db",
            "must be a journal file or a database server, got sqlite:///trials.db",
        ),
        ("nonsense://host/db", "must be a database that answers, got nonsense://host/db"),
        (
            "postgresql://me:secret@127.0.0.1:1/db",
            r"must be a database that answers, got postgresql://me@127.0.0.1:1/db: .*refused",
        ),
        ("{tmp}/file/journal.log", "must be a writable file or folder, got .*File exists"),
        ("{tmp}/other.log", "must be a journal of Optuna, got .*other.log, which does not read"),
    ],
)
def test_storage_that_cannot_be_used(where: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "other.log").write_text('{"a": 1}\n')
    with pytest.raises(ValueError, match=f"^autotune: --storage {words}") as caught:
        store.open_storage(where.format(tmp=tmp_path))
    assert "secret" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_read_only_folder(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    folder = Path("/sys/kernel") if os.geteuid() == 0 else tmp_path  # root may write elsewhere
    with pytest.raises(ValueError, match="--storage must be a writable file or folder"):
        store.open_storage(str(folder / "trials"))
    with pytest.raises(ValueError, match="--export must be a writable folder"):
        export.check_writable(folder, ["rms_norm"], "sm90")


# ---- tuned files -------------------------------------------------------------------------------


def test_an_exported_entry_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    default = SPEC.default_config(CASE.problem, device.current())
    chosen = {**default, "programs_per_core": 4}
    key = SPEC.tuning_key(CASE.problem)
    other = {**key, "n_cols": key["n_cols"] + 1}
    export.write(tmp_path, outcome(other, chosen))
    path = export.write(tmp_path, outcome(key, chosen))
    stored = json.loads(path.read_text())
    assert [entry["key"] for entry in stored["entries"]] == [key, other]
    monkeypatch.setenv("TKERNELS_CONFIG_DIR", str(tmp_path))
    config.reload()
    try:
        assert config.explain(SPEC, CASE.problem) == (chosen, str(path))
    finally:
        monkeypatch.undo()
        config.reload()
    assert not list(tmp_path.rglob("*.tmp"))


def write_one(folder: Path, n: int) -> None:
    export.write(folder, outcome({"n_cols": n}))


def test_processes_that_export_at_once_keep_each_others_entries(tmp_path: Path) -> None:
    workers = [FORK.Process(target=write_one, args=(tmp_path, n)) for n in range(16)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    [path] = tmp_path.rglob("*.json")
    stored = json.loads(path.read_text())["entries"]
    assert sorted(e["key"]["n_cols"] for e in stored) == list(range(16))
    assert not list(tmp_path.rglob("*.tmp"))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "must be a tuned file"),
        ("[]", "must be a tuned file"),
        ("{}", "must be a tuned file"),
        (
            '{"schema": 9, "entries": []}',
            "must be a tuned file to add to: expected schema 1, got 9",
        ),
    ],
)
def test_a_file_that_is_not_tuned_is_not_overwritten(tmp_path: Path, text: str, words: str) -> None:
    arch = device.current().arch
    path = tmp_path / arch / f"{SPEC.name}.json"
    path.parent.mkdir()
    path.write_text(text)
    with pytest.raises(ValueError, match=f"^autotune: .*{words}"):
        export.check_writable(tmp_path, [SPEC.name], arch)
    with pytest.raises(ValueError, match=f"^autotune: .*{words}"):
        write_one(tmp_path, 1)
    with pytest.raises(ValueError, match=f"^autotune: .*{words}"):
        export.merge(tmp_path, tmp_path / "to")
    assert path.read_text() == text


def test_export_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    words = r"--export must be a writable folder, got .*Not a dir"
    with pytest.raises(ValueError, match=words):
        export.check_writable(tmp_path / "file", [SPEC.name], "sm90")
    with pytest.raises(ValueError, match=words):
        write_one(tmp_path / "file", 1)


def entry(ms: float, **changes: Any) -> dict[str, Any]:
    """A measured entry; ``case``, ``date`` and so on go among its facts."""
    facts = {"case": "c", "num_cores": 132, "memory_gib": 80, "date": "2026-01-02"}
    return {
        "key": {"n": 1},
        "config": changes.pop("config", {"A": 1}),
        "ms": ms,
        "default_ms": changes.pop("default_ms", 1.0),
        "trials": 1,
        "measured": {**facts, **changes},
    }


def estimated(us: float, **changes: Any) -> dict[str, Any]:
    facts = {"us": us, "default_us": 9.0, "case": "c", "model": "m", "date": "2026-01-02"}
    return {"key": {"n": 1}, "config": {"A": us}, "measured": False, "estimate": facts | changes}


@pytest.mark.parametrize(
    ("loser", "winner"),
    [
        (estimated(0.001, date="2027-01-01"), entry(5.0)),  # what was measured stays
        (entry(0.5, config={"A": 2}), entry(0.4)),  # the faster one
        (entry(0.4), entry(0.5, date="2026-02-01")),  # one config: what is newer
        (entry(0.4, case="d", config={"A": 2}), entry(0.9, default_ms=3.0)),  # gains compare
        # Another version of the kernel took the time: what is newer.
        (
            entry(0.4, kernel_hash="a"),
            entry(0.5, config={"A": 2}, kernel_hash="b", date="2026-02-01"),
        ),
        (estimated(5.0), estimated(4.0)),
        (estimated(1.0), estimated(4.0, model="n", date="2026-02-01")),  # models do not compare
    ],
)
def test_the_better_entry_stays(loser: dict[str, Any], winner: dict[str, Any]) -> None:
    assert export.better(loser, winner) is winner
    assert export.better(winner, loser) is winner


def test_exports_of_two_machines_are_merged(tmp_path: Path) -> None:
    """The better one of one key and chip; another chip's beside it; estimates nowhere above."""
    key, other = {"n_cols": 1}, {"n_cols": 2}
    here, there = tmp_path / "here", tmp_path / "there"
    export.write(here, outcome(key, {"A": 1}, ms=0.5))
    export.write(here, outcome(other, {"A": 1}, ms=0.3))
    export.write(there, outcome(key, {"A": 2}, ms=0.4))
    export.write(there, outcome(other, {"A": 2}, ms=0.6))
    small = outcome(key, {"A": 3}, ms=0.9)
    small = dataclasses.replace(small, measured={**(small.measured or {}), "num_cores": 78})
    export.write(there, small)
    [path] = export.merge(there, here)
    entries = json.loads(path.read_text())["entries"]
    found = sorted(
        (e["key"]["n_cols"], e["measured"]["num_cores"], e["config"]["A"]) for e in entries
    )
    assert found == [(1, 78, 3), (1, 132, 2), (2, 132, 1)]
    guess = dataclasses.replace(outcome(key, {"A": 4}), measured=None, estimate={"model": "m"})
    export.write(here, guess)
    export.write(here, outcome({"n_cols": 3}, {"A": 5}))
    found = [e["config"]["A"] for e in json.loads(path.read_text())["entries"]]
    assert 5 in found
    with pytest.raises(ValueError, match=r"--merge must be a folder with <arch>/<kernel>\.json"):
        export.merge(tmp_path / "nowhere", here)


def test_an_estimate_does_not_displace_a_measurement_on_export(tmp_path: Path) -> None:
    measured = outcome({"n_cols": 1}, {"A": 1})
    measured = dataclasses.replace(measured, measured={"date": "2026-01-01"})  # no chip told
    export.write(tmp_path, measured)
    guess = dataclasses.replace(measured, config={"A": 2}, measured=None, estimate={"model": "m"})
    path = export.write(tmp_path, guess)
    [kept] = json.loads(path.read_text())["entries"]
    assert kept["config"] == {"A": 1}
