"""``python -m autotune`` end to end: on the interpreter, with planted faults, refusals."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tkernels import config, device
from tkernels.registry import get

pytest.importorskip("optuna", reason="the tuner needs optuna (tkernels[tune])")

from autotune import store
from autotune.__main__ import main
from autotune.records import Task

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
    assert "no search for interpret was interrupted" in capsys.readouterr().err


@on_interpreter
def test_interrupt_keeps_what_was_measured(tmp_path: Path) -> None:
    tuner = started(tmp_path, *FEW, trials_first=2)
    os.kill(tuner.pid, signal.SIGINT)
    assert tuner.wait(timeout=90) == 130
    assert tuner.stderr is not None
    assert tuner.stderr.read().splitlines()[-1] == (
        "autotune: stopped; all that was measured is kept, and the same command goes on"
    )
    assert len(trials(tmp_path)) >= 2
    [study] = store.all_studies(store.open_storage(str(tmp_path / ".autotune")))
    assert not store.in_work(study)  # else the next tuner would wait for it, anywhere else for ever


def test_resume_names_what_other_chips_have_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = str(tmp_path / "journal.log")
    storage = store.open_storage(where)
    for arch in ("sm90", "sm90", "sm120"):
        key = {"n": len(store.all_studies(storage))}
        store.open_study(storage, Task("rms_norm", "a case", {"n": 1}, key, arch), {}, {})
    assert main(["--resume", "--arch", "interpret", "--storage", where]) == 0
    said = capsys.readouterr().err.splitlines()[-3:]
    assert [line.split("; ")[0] for line in said] == [
        "autotune: no search for interpret was interrupted",
        "autotune: 1 for sm120 were interrupted",
        "autotune: 2 for sm90 were interrupted",
    ]


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
        ([], "expected --kernel, --resume, --status or --report, got none"),
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
