"""``python -m autotune`` end to end: on the interpreter, with planted faults, refusals."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tkernels import config, device
from tkernels.registry import get

pytest.importorskip("optuna", reason="the tuner needs optuna (tkernels[tune])")

from autotune import fingerprint, process, store, target, tune
from autotune.__main__ import main
from autotune.problems import bench_tasks, input_bytes
from autotune.records import Answer, Task
from autotune.search import Budget

SPEC = get("rms_norm")
CASE = SPEC.cases[0]
ROOT = Path(__file__).parents[1]
PLANTED = ["--kernel", "planted", "--import", "planted"]
FEW = ["--kernel", "planted_few", "--import", "planted"]
LIMITS = ["--trial-timeout", "15", "--compile-timeout", "15"]
on_interpreter = pytest.mark.skipif(
    device.KIND != "cpu", reason="tunes with the interpreter; this machine has a device"
)


COMMAND = [sys.executable, "-m", "autotune", "--arch", "interpret"]
PATHS = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
ENVIRONMENT = {**os.environ, "PYTHONPATH": PATHS, "TKERNELS_DEVICE": "cpu"}


def autotune(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments], cwd=folder, env=ENVIRONMENT, capture_output=True, text=True
    )


def started(folder: Path, *arguments: str, trials_first: int) -> subprocess.Popen[str]:
    """A tuner in the background that has tried some configs already."""
    tuner = subprocess.Popen(
        [*COMMAND, *arguments], cwd=folder, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 180
    while len(trials(folder)) < trials_first:
        if time.monotonic() > deadline or tuner.poll() is not None:
            tuner.kill()
            raise AssertionError(f"{len(trials(folder))} trials, exit status {tuner.poll()}")
        time.sleep(0.1)
    return tuner


def trials(folder: Path) -> list[Any]:
    if not (folder / ".autotune").exists():
        return []
    studies = store.all_studies(store.open_storage(str(folder / ".autotune")))
    return [t for s in studies for t in s.get_trials(deepcopy=False) if "kind" in t.user_attrs]


def children_of(pid: int) -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(stat.read_text().rpartition(")")[2].split()[1]) == pid:
                found.append(int(stat.parent.name))
    return found


# ---- faults ------------------------------------------------------------------------------------


@on_interpreter
def test_planted_faults_are_told_and_never_win(tmp_path: Path) -> None:
    """Wrong values, a hang, an abort, no memory...: the study goes on and the fast one wins."""
    done = autotune(tmp_path, *PLANTED, *LIMITS, "--json", "--export", "tuned", "--force")
    assert done.returncode == 1, done.stderr  # something computed wrong values
    [row] = [json.loads(line) for line in done.stdout.splitlines()]
    assert row["config"] == {"HOW": "fast"}
    assert row["gain"] > 1.1
    assert row["failures"] == {
        "wrong": 4,
        "hung": 1,
        "crashed": 1,
        "out of memory": 2,
        "does not run": 2,
    }
    found = [line.split("'")[3] for line in row["wrong"]]
    assert found == ["wrong", "partial", "outside", "spoils", "flaky"]
    for words in (
        "WRONG: planted with {'HOW': 'wrong'}: out: largest relative error",
        "WRONG: planted with {'HOW': 'partial'}: out: NaN or infinity in the wrong places",
        "WRONG: planted with {'HOW': 'outside'}: out, beside it: 1 elements outside the tensor",
        "WRONG: planted with {'HOW': 'spoils'}: x, an input, was changed",
        "hung: planted with {'HOW': 'hang'}: compile took longer than 15 s",
        "crashed: planted with {'HOW': 'abort'}: signal SIGABRT",
        "out of memory: planted with {'HOW': 'killed'}: the system killed it",
        "out of memory: planted with {'HOW': 'memory'}: RuntimeError: ",
    ):
        assert words in done.stderr, done.stderr
    [entry] = json.loads((tmp_path / "tuned/interpret/planted.json").read_text())["entries"]
    assert entry["config"] == {"HOW": "fast"}
    assert entry["measured"]["case"] == "n-5"

    again = autotune(tmp_path, *PLANTED, "--json")  # tries nothing, and tells the same
    assert json.loads(again.stdout)["trials"] == row["trials"]
    assert "WRONG" not in again.stderr
    assert len(trials(tmp_path)) == row["trials"]


@on_interpreter
def test_workers_start_at_once_and_one_measures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It dies of one config, another takes its place, and the search goes on."""
    notes = tmp_path / "notes"
    notes.mkdir()
    monkeypatch.setitem(ENVIRONMENT, "WATCHED", str(notes))
    done = autotune(tmp_path, "--kernel", "watched", "--import", "watched", "--jobs=3", "--json")
    assert done.returncode == 0, done.stderr
    row = json.loads(done.stdout)
    assert row["config"] == {"HOW": "fast"}
    assert row["failures"] == {"crashed": 1, "does not run": 1}
    assert "crashed: watched with {'HOW': 'dies when it is measured'}: signal" in done.stderr
    told = [path.name.split(".")[:2] for path in notes.iterdir()]
    assert not [pid for what, pid in told if what == "alone"]
    begun, inputs, truths = (
        sorted(pid for what, pid in told if what == name) for name in ("begun", "inputs", "truth")
    )
    assert inputs == begun
    assert len(begun) == len(set(begun)) == 4
    assert len(truths) == len(set(truths)) == 2


def test_only_workers_are_used_whose_inputs_fit_the_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    task = Task("rms_norm", CASE.name, CASE.problem, {}, "interpret")
    workers: list[Any] = list(range(9))
    setup = tune.Setup(device.current(), None, Budget(1), {}, workers)  # type: ignore[arg-type]
    size = input_bytes(SPEC, CASE.problem)
    for sets, used in ((100, 9), (15, 6), (7.5, 2), (6.5, 1), (1, 1)):
        monkeypatch.setattr(device, "memory_bytes", lambda sets=sets: int(size * sets))
        assert len(tune._that_fit(SPEC, task, setup)) == used
    assert tune._that_fit(SPEC, task, dataclasses.replace(setup, offline=True)) == workers


def test_who_times_is_alone_and_others_are_together() -> None:
    inside: list[str] = []

    def enter(how: Any, wait: float) -> threading.Thread:
        def use() -> None:
            with how("a device of the test"):
                inside.append(how.__name__)

        thread = threading.Thread(target=use, daemon=True)
        thread.start()
        thread.join(wait)
        return thread

    with process.beside_others_on("a device of the test"):
        waiting = [enter(process.beside_others_on, 30), enter(process.alone_on, 0.3)]
        assert inside == ["beside_others_on"]
    for thread in waiting:
        thread.join(30)
    with process.alone_on("a device of the test"):
        waiting = [enter(process.beside_others_on, 0.3)]
        assert inside == ["beside_others_on", "alone_on"]
    waiting[0].join(30)
    assert inside[2:] == ["beside_others_on"]


@pytest.mark.slow
@on_interpreter
def test_a_tuner_that_was_killed_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """SIGKILL in the middle of a hanging config; --resume finishes, without what is known."""
    tuner = started(tmp_path, *FEW, trials_first=4)
    [worker] = children_of(tuner.pid)
    os.kill(tuner.pid, signal.SIGKILL)
    tuner.wait()
    before = len(trials(tmp_path))
    assert before == 4  # the fifth hangs
    deadline = time.monotonic() + 30
    while Path(f"/proc/{worker}").exists():  # it hangs in its config, and goes with its tuner
        assert time.monotonic() < deadline
        time.sleep(0.05)
    resumed = ["--resume", "--import", "planted", "--json", *LIMITS]
    done = autotune(tmp_path, *resumed)
    assert json.loads(done.stdout)["config"] == {"HOW": "fast"}
    assert f"goes on after {before} configs" in done.stderr
    lost = [t for t in trials(tmp_path) if t.user_attrs.get("message") == "its tuner was killed"]
    assert len(lost) <= 1
    again = main(["--resume", "--arch", "interpret", "--storage", str(tmp_path / ".autotune")])
    assert again == 0
    assert "no search for interpret was interrupted, in" in capsys.readouterr().err


@on_interpreter
def test_interrupt_keeps_what_was_measured(tmp_path: Path) -> None:
    tuner = started(tmp_path, *FEW, trials_first=2)
    os.kill(tuner.pid, signal.SIGINT)
    assert tuner.wait(timeout=90) == 130
    assert tuner.stderr is not None
    assert tuner.stderr.read().splitlines()[-1] == (
        "autotune: stopped; all that was measured is kept, and the same command, or --resume, "
        "goes on"
    )
    assert len(trials(tmp_path)) >= 2
    [study] = store.all_studies(store.open_storage(str(tmp_path / ".autotune")))
    assert not store.in_work(study)  # else the next tuner would wait for it, anywhere else for ever


def interrupt_after(count: int, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    """A command in this process that Ctrl-C ends when it is about to try another config."""
    left = itertools.count(count, -1)
    tries = tune.try_config

    def stopped(*args: Any) -> Answer:
        if next(left) <= 0:
            raise KeyboardInterrupt
        return tries(*args)

    with monkeypatch.context() as patch:
        patch.setattr(tune, "try_config", stopped)
        assert main([*arguments, "--jobs", "1"]) == 130


def rows(capsys: pytest.CaptureFixture[str]) -> tuple[list[dict[str, Any]], str]:
    """What was printed: JSON lines, and the words for people."""
    done = capsys.readouterr()
    return [json.loads(line) for line in done.out.splitlines()], done.err


ONE = ["--kernel", "rms_norm", "--case", CASE.name]


@pytest.mark.slow
@on_interpreter
@pytest.mark.parametrize(("given", "tried"), [([], 5), (["--trials", "3"], 3)])
def test_resume_goes_on_with_the_trials_of_the_search(
    given: list[str],
    tried: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    asked = ["--arch", "interpret", "--trials", "5", "--sampler", "random", "--timeout", "999"]
    interrupt_after(2, monkeypatch, *ONE, *asked)
    terms = []
    begin = tune.begin
    monkeypatch.setattr(tune, "begin", lambda *args: terms.append(args[2]) or begin(*args))
    capsys.readouterr()
    assert main(["--resume", "--json", *given]) == 0
    [row], said = rows(capsys)
    assert (row["arch"], row["trials"]) == ("interpret", tried)
    assert terms[0].sampler == "random"
    assert terms[0].budget == Budget(tried, 999.0)
    assert "going on with 1 search for interpret, on this device" in said
    assert "offline" not in said
    assert main(["--resume", "--json"]) == 0
    assert rows(capsys) == (
        [],
        f"autotune: no search was interrupted, in {Path('.autotune/journal.log')}\n",
    )


@pytest.mark.slow
@on_interpreter
def test_a_search_whose_trials_are_not_kept_gets_the_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(target.TRIALS, "measured", 4)
    interrupt_after(1, monkeypatch, *ONE, "--arch", "interpret", "--trials", "6")
    [study] = store.all_studies(store.open_storage(None))
    study.set_user_attr("terms", None)
    capsys.readouterr()
    assert main(["--resume", "--json"]) == 0
    [row], said = rows(capsys)
    assert row["trials"] == 4
    assert "1 search was begun by a version that did not keep --trials, and will try 4" in said


@pytest.mark.slow
@on_interpreter
def test_resume_goes_on_with_the_same_part_of_the_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    key, values = next((k, v) for k, v in SPEC.space(device.current()).items() if len(v) > 2)
    only = ["--only", f"{key}={values[0]},{values[1]}"]
    interrupt_after(2, monkeypatch, *ONE, "--arch", "interpret", "--trials", "5", *only)
    assert main(["--resume", "--table", "table.json"]) == 0
    default = SPEC.default_config(CASE.problem, device.current())
    configs = [row["config"] for row in json.loads(Path("table.json").read_text())]
    assert len(configs) == 5
    assert all(c[key] in values[:2] for c in configs if c != default)
    assert len(store.all_studies(store.open_storage(None))) == 1


@pytest.mark.slow
@on_interpreter
def test_resume_finishes_all_that_was_asked_for_on_all_architectures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also the problems that an interrupted command had not come to."""
    monkeypatch.chdir(tmp_path)
    offline = ["--kernel", "rms_norm", "--arch", "sm90", "--trials", "2"]
    interrupt_after(1, monkeypatch, *offline)
    interrupt_after(1, monkeypatch, *ONE, "--arch", "interpret", "--trials", "2")
    capsys.readouterr()
    assert main(["--resume", "--json"]) == 0
    found, said = rows(capsys)
    count = len(bench_tasks(SPEC, "sm90"))
    assert count > 1
    assert [row["arch"] for row in found] == ["sm90"] * count + ["interpret"]
    assert {row["trials"] for row in found} == {2}
    assert f"going on with {count} searches for sm90, offline" in said
    assert "found no accelerator" not in said


@pytest.mark.slow
@on_interpreter
def test_a_larger_search_is_interrupted_for_all_its_problems(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What a smaller one found stands until the larger one has come to its problem."""
    monkeypatch.chdir(tmp_path)
    tasks = [task.case for task in bench_tasks(SPEC, "interpret")]
    asked = ["--kernel", "rms_norm", "--arch", "interpret", "--trials"]
    assert len(tasks) > 1
    assert main([*asked, "2"]) == 0
    interrupt_after(0, monkeypatch, *asked, "3")
    capsys.readouterr()
    assert main(["--export", "tuned", "--force"]) == 0
    entries = json.loads(Path("tuned/interpret/rms_norm.json").read_text())["entries"]
    assert [entry["trials"] for entry in entries] == [2] * (len(tasks) - 1)
    assert main(["--resume", "--json"]) == 0
    assert [row["trials"] for row in rows(capsys)[0]] == [3] * len(tasks)
    assert main([*asked, "2", "--json"]) == 0  # less than is there: nothing to go on with
    assert main(["--resume"]) == 0
    assert "no search was interrupted" in capsys.readouterr().err


def test_resume_names_what_cannot_go_on_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not left out without a word: other chips, changed kernels, compilers that are missing."""

    def no_compiler(facts: device.Device) -> str:
        raise ValueError("autotune: expected an environment with triton-ascend, got none")

    monkeypatch.setattr(target, "_python_for", no_compiler)
    where = str(tmp_path / "journal.log")
    storage = store.open_storage(where)
    same = {"kernel_hash": fingerprint.kernel_hash(SPEC)}
    problems = [task.problem for task in bench_tasks(SPEC, "sm75")]
    for kernel, arch, facts, problem in (
        ("rms_norm", "sm75", same, problems[0]),
        ("rms_norm", "sm75", same, problems[1]),
        ("rms_norm", "ascend910b", {**same, "offline": True}, problems[0]),
        ("rms_norm", "sm90", {"kernel_hash": "of before"}, problems[0]),
        ("nobodys", "sm90", same, problems[0]),
    ):
        key = SPEC.tuning_key(problem)
        store.open_study(storage, Task(kernel, "a case", problem, key, arch), facts, {})
    assert main(["--resume", "--storage", where]) == 0
    said = capsys.readouterr().err.splitlines()
    assert [line.partition("autotune: ")[2] for line in said] == [
        "1 search was not gone on with (rms_norm a case for sm90): the kernel has changed since; "
        "--kernel begins anew",
        "1 search was not gone on with (nobodys a case for sm90): no kernel nobodys is registered "
        "(--import names its module)",
        "2 searches were not gone on with (rms_norm a case for sm75, rms_norm a case for sm75): it "
        f"was measured on sm75, and here is {device.current().arch}",
        "1 search was not gone on with (rms_norm a case for ascend910b): expected an environment "
        "with triton-ascend, got none",
    ]
    assert main(["--resume", "--arch", "sm120", "--storage", where]) == 0
    assert capsys.readouterr().err == (
        f"autotune: no search for sm120 was interrupted, in {where}\n"
    )


@pytest.mark.parametrize("searched_again", [False, True])
def test_a_search_under_a_key_of_before_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], searched_again: bool
) -> None:
    """No launch would find what it exports; silent where the problem was searched since."""
    where = str(tmp_path / "journal.log")
    storage = store.open_storage(where)
    facts = {"kernel_hash": fingerprint.kernel_hash(SPEC)}
    problem = bench_tasks(SPEC, "sm90")[0].problem
    key = SPEC.tuning_key(problem)
    for label in [{"n_up_to": 1}, *([key] if searched_again else [])]:
        study = store.open_study(
            storage, Task("rms_norm", "a case", problem, label, "sm90"), facts, {}
        )
        done = {"config": {}, "ms": 1.0, "default_config": {}, "default_ms": 1.0, "trials": 1}
        done |= {"failures": {}, "wrong": [], "measured": {"date": "2026-11-28"}, "estimate": None}
        study.set_user_attr("outcome", {**done, "exhausted": True, "terms": None})
    assert main(["--export", str(tmp_path), "--storage", where]) == (0 if searched_again else 2)
    said = "its tuning key has changed since; --kernel begins anew"
    assert (said in capsys.readouterr().err) is not searched_again
    if searched_again:
        entries = json.loads((tmp_path / "sm90/rms_norm.json").read_text())["entries"]
        assert [entry["key"] for entry in entries] == [key]


@on_interpreter
def test_a_search_of_another_compiler_is_not_gone_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    interrupt_after(1, monkeypatch, *ONE, "--arch", "interpret", "--trials", "3")
    facts = {**fingerprint.chip(), "triton": "9.9"}
    monkeypatch.setattr(fingerprint, "chip", lambda: facts)
    capsys.readouterr()
    assert main(["--resume"]) == 0
    assert re.search(r"not gone on with .*: triton \S+ then, 9.9 now; --kernel begins anew",
                     capsys.readouterr().err)  # fmt: skip
    assert len(store.all_studies(store.open_storage(None))) == 1


# ---- what is said ------------------------------------------------------------------------------


@pytest.mark.slow
@on_interpreter
def test_what_searches_nothing_announces_no_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(target, "_python_for", lambda facts: pytest.fail("compiles nothing"))
    interrupt_after(1, monkeypatch, *ONE, "--arch", "interpret", "--trials", "2")
    capsys.readouterr()
    for arguments in (["--status"], ["--status", "--arch", "ascend910b"], ["--report", "page"]):
        assert main(arguments) == 0
        done = capsys.readouterr()
        assert "searching" not in done.err
        assert "interpreter" not in done.err
    assert main(["--status", "--kernel", "rms_norm"]) == 0
    done = capsys.readouterr()
    assert done.err == (
        "autotune: found no accelerator; this is what sm90 has (--arch for another)\n"
    )
    assert done.out.splitlines()[-1].startswith("sm90: ")


@on_interpreter
def test_a_search_says_where_its_results_are_and_what_exports_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    kept = ["--storage", "a folder"]
    searches = [*ONE, "--arch", "interpret", *kept, "--trials"]
    assert main([*searches, "3"]) == 0
    said, _, command = capsys.readouterr().err.splitlines()[-1].partition(" tuned/: ")
    assert said == (
        "autotune: no tuned files were written; the results are kept in a folder/journal.log; "
        "this writes them below"
    )
    assert command.startswith("python -m autotune --export tuned --storage 'a folder/journal.log'")
    monkeypatch.setattr(tune, "tune", lambda *args: pytest.fail("it tries nothing"))
    assert main(shlex.split(command)[3:]) == 0
    assert capsys.readouterr().err.splitlines() == [
        "wrote tuned/interpret/rms_norm.json",
        "autotune: programs use them with TKERNELS_CONFIG_DIR=tuned",
    ]
    [entry] = json.loads(Path("tuned/interpret/rms_norm.json").read_text())["entries"]
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    assert main([*searches, "3", "--export", "own", "--force"]) == 0
    assert "no tuned files" not in capsys.readouterr().err
    assert json.loads(Path("own/interpret/rms_norm.json").read_text())["entries"] == [entry]
    assert main(["--export", "none", *kept]) == 2  # times of the interpreter
    left_out, last = capsys.readouterr().err.splitlines()
    assert "1 search was not exported (rms_norm" in left_out
    assert last == "autotune: nothing was written, as no other search ended in a folder/journal.log"
    assert main(["--export", "none", "--storage", "another"]) == 2
    assert "--export needs a search that ended" in capsys.readouterr().err
    shipped = tmp_path / "package/configs"
    monkeypatch.setattr(config, "config_folders", lambda: [shipped])
    for folder, words in (
        ("package/configs", "from now on: they are the package's own"),
        ("my own", "with TKERNELS_CONFIG_DIR='my own'"),
    ):
        assert main(["--export", folder, *kept, "--force"]) == 0
        assert capsys.readouterr().err.splitlines()[-1] == f"autotune: programs use them {words}"


# ---- a real kernel -----------------------------------------------------------------------------


@on_interpreter
def test_tunes_a_kernel_and_the_lookup_finds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = ["--kernel", "rms_norm", "--arch", "interpret", "--case", CASE.name, "--trials"]
    assert main([*arguments, "3", "--json"]) == 0
    row = json.loads(capsys.readouterr().out)
    assert (row["trials"], row["key"]) == (3, SPEC.tuning_key(CASE.problem))
    assert SPEC.why_illegal(row["config"], CASE.problem, device.current()) is None
    assert row["measured"]["device"] == device.current().name
    # A larger budget goes on, the same one does nothing but export.
    assert main([*arguments, "4", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["trials"] == 4
    again = [*arguments, "4", "--export", "tuned", "--force", "--table", "table.json"]
    assert main(again) == 0
    table = json.loads(Path("table.json").read_text())
    assert len(table) == 4
    assert all(row["ms"] > 0 for row in table if "failure" not in row)
    assert "(4 configs" in capsys.readouterr().out
    monkeypatch.setenv("TKERNELS_CONFIG_DIR", str(tmp_path / "tuned"))
    config.reload()
    try:
        path = Path("tuned/interpret/rms_norm.json")
        [entry] = json.loads(path.read_text())["entries"]
        assert config.explain(SPEC, CASE.problem) == (entry["config"], str(tmp_path / path))
    finally:
        monkeypatch.undo()
        config.reload()


@pytest.mark.slow
@on_interpreter
def test_a_part_of_the_space_is_a_search_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = ["--kernel", "rms_norm", "--arch", "interpret", "--case", CASE.name]
    key, values = next((k, v) for k, v in SPEC.space(device.current()).items() if len(v) > 2)
    chosen = values[:2]
    only = f"{key}={','.join(str(value) for value in chosen)}"
    assert main([*arguments, "--trials", "6", "--only", only, "--table", "table.json"]) == 0
    default = SPEC.default_config(CASE.problem, device.current())
    configs = [row["config"] for row in json.loads(Path("table.json").read_text())]
    assert len(configs) == 6
    assert all(c[key] in chosen for c in configs if c != default)
    capsys.readouterr()
    assert main([*arguments, "--trials", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["trials"] == 2


@on_interpreter
def test_bare_command_searches_offline(tmp_path: Path) -> None:
    """No accelerator: it says so, asks the compiler for sm90, and calls nothing a time."""
    bare = [*COMMAND[:3], "--kernel", "rms_norm", "--case", "1x4096", "--trials", "2"]
    environment = {name: v for name, v in ENVIRONMENT.items() if name != "TKERNELS_DEVICE"}
    done = subprocess.run(
        [*bare, "--export", "tuned"], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "found no accelerator; searching offline for sm90" in done.stderr
    shipped = Path(config.__file__).parent / "configs"
    assert (
        f"autotune: 1 of 1 problems have been measured ({shipped}/sm90), which a model's estimate "
        "cannot better; "
    ) in done.stderr
    assert re.match(r"rms_norm 1x4096-bf16: estimated [\d.]+ us", done.stdout), done.stdout
    [entry] = json.loads((tmp_path / "tuned/sm90/rms_norm.json").read_text())["entries"]
    assert entry["measured"] is False
    assert "ms" not in entry
    assert entry["estimate"]["us"] > 0
    assert entry["estimate"]["registers"] > 0


# ---- refusals ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--kernel", "nonsense"], "kernel must be one of .*rms_norm.*got 'nonsense'"),
        (["--kernel", "rms_norm", "--trials", "0"], "--trials must be 1 or more, got 0"),
        (["--kernel", "rms_norm", "--timeout", "0"], "--timeout must be above 0, got 0.0"),
        (["--kernel", "rms_norm", "--timeout", "nan"], "--timeout must be above 0, got nan"),
        (["--kernel", "rms_norm", "--case", "zzz"], "--case must be part of one of .*got 'zzz'"),
        (["--kernel", "rms_norm", "--arch", "sm1"], "expected a compute capability of .*got sm1"),
        (
            ["--kernel", "rms_norm", "--arch", "tpu"],
            "an architecture like sm90.*got 'tpu'",
        ),
        (["--kernel", "rms_norm", "--import", "no.such"], "--import must be a module, got no.such"),
        (["--kernel", "rms_norm", "--python", "/no/python", "--arch", "sm90"], "Python must run"),
        (["--kernel", "rms_norm", "--storage", "sqlite:///x"], "--storage must be a journal file"),
        (["--merge", "nowhere"], "--merge needs --export DIR"),
        (["--kernel", "rms_norm", "--table", "t.json"], "--table needs one problem.* got 4"),
        (["--kernel", "rms_norm", "--batch", "0", "--model", "x"], "--batch must be whole numbers"),
        (["--kernel", "rms_norm", "--model", "nowhere"], "--model must be a config.json or a fold"),
        (["--kernel", "page_attn"], "did you mean paged_attn"),
        (["--kernel", "rms_norm", "--only", "num_warps"], "KEY=VALUE,... .*got 'num_warps'"),
        (["--kernel", "rms_norm", "--only", "warps=4"], "a config key, of .*got 'warps'"),
        (["--kernel", "rms_norm", "--only", "num_warps=3"], "num_warps= must be of .*got '3'"),
        ([], "expected --kernel, --resume, --status, --report or --export, got none"),
        (["--shape", "n=1", "--export", "t"], "--shape belongs to a search, got no --kernel"),
        (["--missing", "--export", "t"], "--missing belongs to a search, got no --kernel"),
        (["--kernel", "rope", "--missing", "--shape", "n=1"], "--missing chooses among bench"),
        (["--resume", "--shape", "n=1"], "--shape and --model belong to a new search"),
    ],
)
def test_refusals(
    arguments: list[str],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert re.search(words, last), last


@on_interpreter
def test_interpreter_times_are_not_exported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = ["--kernel", "rms_norm", "--arch", "interpret", "--export", "tuned"]
    assert main(arguments) == 2
    assert "--export needs an accelerator" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
