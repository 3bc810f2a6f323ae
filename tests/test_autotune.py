"""The tuner: a tiny search end to end, wrong and failing configs, files that the lookup finds."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tkernels import config, device
from tkernels.registry import get

pytest.importorskip("optuna", reason="the tuner needs optuna (tkernels[tune])")

from autotune import export, search
from autotune.__main__ import main

SPEC = get("rms_norm")
CASE = SPEC.cases[0]


def no_words(line: str) -> None:
    raise AssertionError(f"nothing was to be said, got: {line}")


def test_finds_a_legal_config() -> None:
    outcome = search.tune(SPEC, CASE, trials=4, seed=0, said=no_words)
    assert SPEC.why_illegal(outcome.config, CASE.problem, device.current()) is None
    assert outcome.tally.measured == 4
    assert outcome.key == SPEC.tuning_key(CASE.problem)
    assert 0 < outcome.ms <= outcome.default_ms


def test_wrong_or_failing_configs_never_win() -> None:
    """Only the default is right here: others are off by 1, or do not launch."""
    default = SPEC.default_config(CASE.problem, device.current())

    def launch(x: torch.Tensor, weight: torch.Tensor, *, eps: float, config: Any) -> torch.Tensor:
        if config["num_warps"] != default["num_warps"]:
            raise RuntimeError("out of resource: shared memory")
        return SPEC.reference(x, weight, eps=eps) + (config != default)

    lines: list[str] = []
    liar = dataclasses.replace(SPEC, launch=launch)
    outcome = search.tune(liar, CASE, trials=12, seed=0, said=lines.append)
    assert outcome.config == default
    assert outcome.tally.measured == 1
    assert outcome.tally.failed > 0
    assert len(outcome.tally.wrong) > 0
    assert any(line.startswith("WRONG rms_norm") for line in lines)
    assert any("out of resource: shared memory" in line for line in lines)


def test_exported_file_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    default = SPEC.default_config(CASE.problem, device.current())
    chosen = {**default, "programs_per_core": 4}
    key = SPEC.tuning_key(CASE.problem)
    other = {**key, "n_cols": key["n_cols"] + 1}
    outcomes = [
        search.Outcome(CASE.name, k, chosen, 0.5, 1.0, search.Tally(measured=3))
        for k in (key, other)
    ]
    export.write(tmp_path, SPEC.name, outcomes[1:])
    path = export.write(tmp_path, SPEC.name, outcomes[:1])
    assert [e["key"] for e in json.loads(path.read_text())["entries"]] == [key, other]
    monkeypatch.setenv("TKERNELS_CONFIG_DIR", str(tmp_path))
    config.reload()
    try:
        assert config.explain(SPEC, CASE.problem) == (chosen, str(path))
    finally:
        monkeypatch.undo()
        config.reload()
    assert not list(tmp_path.rglob("*.tmp"))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--kernel", "nonsense"], "kernel must be one of .*rms_norm.*got 'nonsense'"),
        (["--kernel", "rms_norm", "--trials", "0"], "--trials must be 1 or more, got 0"),
        (["--kernel", "rms_norm", "--case", "zzz"], "--case must be part of one of .*got 'zzz'"),
    ],
)
def test_refusals(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert re.search(words, last), last


def _outcome(n_cols: int) -> search.Outcome:
    key = {**SPEC.tuning_key(CASE.problem), "n_cols": n_cols}
    default = SPEC.default_config(CASE.problem, device.current())
    return search.Outcome(CASE.name, key, default, 0.5, 1.0, search.Tally(measured=3))


def _export(folder: Path, n_cols: int) -> None:
    export.write(folder, SPEC.name, [_outcome(n_cols)])


def test_processes_that_export_at_once_keep_each_others_entries(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=_export, args=(tmp_path, n)) for n in range(16)]
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
        ('{"schema": 9, "entries": []}', "must have schema 1, got 9"),
    ],
)
def test_a_file_that_is_not_tuned_is_not_overwritten(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / device.current().arch / f"{SPEC.name}.json"
    path.parent.mkdir()
    path.write_text(text)
    with pytest.raises(ValueError, match=f"^autotune: .*{words}"):
        export.check_writable(tmp_path, [SPEC.name])
    with pytest.raises(ValueError, match=f"^autotune: .*{words}"):
        _export(tmp_path, 1)
    assert path.read_text() == text


def test_export_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"--export must be a writable folder, got .*Not a dir"):
        export.check_writable(tmp_path / "file", [SPEC.name])
    with pytest.raises(ValueError, match=r"--export must be a writable folder, got .*Not a dir"):
        _export(tmp_path / "file", 1)


def test_interrupt_ends_all_cases_and_keeps_what_was_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = 0

    def measure(*args: Any) -> float:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyboardInterrupt
        args[3].measured += 1
        return float(calls)

    monkeypatch.setattr(search, "_measure", measure)
    assert main(["--kernel", "rms_norm", "--trials", "5"]) == 130
    printed = capsys.readouterr()
    assert printed.out.count("rms_norm ") == 1  # the first case alone, with two configs
    assert "2 measured" in printed.out
    assert "stopped after 2 configs" in printed.err


@pytest.mark.skipif(device.KIND != "cpu", reason="the interpreter's refusal, not a device's")
def test_interpreter_times_are_not_exported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--kernel", "rms_norm", "--export", str(tmp_path)]) == 2
    assert "--export needs an accelerator" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
