"""``--out``: whole lines only, and a run that was killed anywhere is completed by the next."""

from __future__ import annotations

import fcntl
import io
import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from checkpoints import make_folder

from model import bulk, generate

ROOT = Path(__file__).resolve().parents[1]
SMALL = ("--max-tokens", "6", "--ignore-eos", "--batch-size", "3")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("bulk") / "m", None)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "p.jsonl"
    rows: list[dict[str, Any]] = [{"prompt": "a longer prompt " * i + "x"} for i in range(1, 8)]
    rows[2]["id"], rows[5]["id"] = "third", 600
    path.write_text("\n\n".join(json.dumps(row) for row in rows) + "\n")
    return path


class Run:
    def __init__(self, folder: Path, prompts: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder, self.prompts, self.capsys = folder, prompts, capsys

    def __call__(self, out: Path, *more: object, code: int = 0, prompts: Path | None = None) -> str:
        argv = ("--model", self.folder, "--prompts", prompts or self.prompts, "--out", out)
        assert generate.main([str(a) for a in (*argv, *SMALL, *more)]) == code
        found = self.capsys.readouterr()
        assert found.out == ""
        return found.err.rpartition("\r")[2]


@pytest.fixture
def run(folder: Path, prompts: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    return Run(folder, prompts, capsys)


def rows(path: Path) -> dict[Any, Any]:
    found = [json.loads(line) for line in path.read_text().splitlines()]
    assert len({row["id"] for row in found}) == len(found)
    return {row["id"]: row for row in found}


def test_answers_are_those_of_a_run_without_a_file(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    err = run(tmp_path / "o.jsonl")
    assert err.startswith("7 prompts answered, 0 had an answer | 42 tokens in ")
    found = rows(tmp_path / "o.jsonl")
    assert set(found) == {1, 3, "third", 7, 9, 600, 13}  # lines, or ids
    argv = ("--model", run.folder, "--prompts", run.prompts, "--json", *SMALL)
    assert generate.main([str(a) for a in argv]) == 0
    replies = json.loads(capsys.readouterr().out)["replies"]
    for name, reply in zip((1, 3, "third", 7, 9, 600, 13), replies, strict=True):
        (answer,) = found[name]["answers"]
        assert found[name]["prompt_tokens"] == reply["prompt_tokens"]
        assert answer == {k: reply[k] for k in ("text", "token_ids", "finish_reason")}


def test_samples_and_seeds(run: Run, tmp_path: Path) -> None:
    drawn = ("--temperature", 2.0, "--seed", 4, "--samples", 3)
    run(tmp_path / "o.jsonl", *drawn)
    run(tmp_path / "again.jsonl", *drawn, "--batch-size", 2, "--kv-blocks", 12)
    found, again = rows(tmp_path / "o.jsonl"), rows(tmp_path / "again.jsonl")
    assert found == again
    texts = [tuple(a["token_ids"]) for row in found.values() for a in row["answers"]]
    assert len(set(texts)) == len(texts) == 21


def test_each_cut_is_completed(run: Run, tmp_path: Path) -> None:
    """The file cut off within its last line, at its end, and between lines."""
    whole = tmp_path / "whole.jsonl"
    run(whole)
    data = whole.read_bytes()
    ends = [i + 1 for i, byte in enumerate(data) if byte == ord("\n")]
    for cut, left in ((0, 0), (5, 0), (ends[0], 1), (ends[3] + 9, 4), (ends[6] - 1, 6)):
        out = tmp_path / f"{cut}.jsonl"
        out.write_bytes(data[:cut])
        err = run(out)
        assert err.startswith(f"{7 - left} prompts answered, {left} had an answer")
        assert rows(out) == rows(whole)
        assert out.read_bytes().startswith(data[: ends[left - 1] if left else 0])
    err = run(whole)
    assert err.startswith("0 prompts answered, 7 had an answer")
    assert whole.read_bytes() == data


def test_a_failure_in_between_leaves_whole_lines(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, written = tmp_path / "o.jsonl", []
    write = bulk.write_line

    def interrupted(file: io.FileIO, line: bytes) -> None:
        if len(written) == 3:
            file.write(line[:20])
            raise KeyboardInterrupt
        written.append(line)
        write(file, line)

    monkeypatch.setattr(bulk, "write_line", interrupted)
    err = run(out, code=130)
    assert err == f"interrupted; 3 of 7 prompts are done in {out}; the same command goes on\n"
    assert out.read_bytes().count(b"\n") == 3
    monkeypatch.undo()
    assert run(out).startswith("4 prompts answered, 3 had an answer")
    assert set(rows(out)) == {1, 3, "third", 7, 9, 600, 13}


@pytest.mark.slow
def test_killed_at_any_time(folder: Path, tmp_path: Path) -> None:
    """SIGKILL, four times, a random time after something was written; then a run to the end."""
    path, out, whole = tmp_path / "p.jsonl", tmp_path / "o.jsonl", tmp_path / "whole.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"number {i}"}) + "\n" for i in range(300)))
    argv = [sys.executable, "-m", "model.generate", "--model", str(folder), "--prompts", str(path)]
    argv += ["--max-tokens", "30", "--batch-size", "8", "--ignore-eos", "--out"]
    rng, sizes = random.Random(0), [0]
    for _ in range(4):
        process = subprocess.Popen([*argv, str(out)], cwd=ROOT, stderr=subprocess.DEVNULL)
        while not out.exists() or out.stat().st_size <= sizes[-1]:
            assert process.poll() is None
            time.sleep(0.01)
        time.sleep(rng.random() / 4)
        process.kill()
        assert process.wait() == -signal.SIGKILL  # not done before
        sizes.append(out.stat().st_size)
    subprocess.run([*argv, str(out)], cwd=ROOT, check=True, stderr=subprocess.DEVNULL)
    subprocess.run([*argv, str(whole)], cwd=ROOT, check=True, stderr=subprocess.DEVNULL)
    assert rows(out) == rows(whole)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("--max-tokens", 5), "got other settings or another prompt: id "),
        (("--kv-cache", "int8"), "got other settings or another prompt: id "),
        (("--temperature", 1), "got other settings or another prompt: id "),
        (("--samples", 2), "got other settings or another prompt: id "),
    ],
)
def test_another_runs_file_is_refused(
    run: Run, tmp_path: Path, more: tuple[object, ...], words: str
) -> None:
    out = tmp_path / "o.jsonl"
    run(out)
    before = out.read_bytes()
    assert words in run(out, *more, code=2)
    assert out.read_bytes() == before


def test_greedy_answers_do_not_depend_on_the_seed(run: Run, tmp_path: Path) -> None:
    run(tmp_path / "o.jsonl")
    assert run(tmp_path / "o.jsonl", "--batch-size", 2).startswith("0 prompts answered, 7 had")


def test_what_is_wrong_with_files_is_said(run: Run, tmp_path: Path) -> None:
    out = tmp_path / "o.jsonl"
    out.write_text('{"id": 1}\n')
    assert f"--out {out}:1: expected an answer, got b'{{\"id\": 1}}'" in run(out, code=2)
    out.write_text("[]\n")
    assert f"--out {out}:1: expected an answer" in run(out, code=2)
    out.write_text('{"id": 77, "key": "x"}\n')
    assert "got an id without a prompt: id 77" in run(out, code=2)
    assert "expected a file that can be written" in run(tmp_path / "no" / "o.jsonl", code=2)
    twice = tmp_path / "twice.jsonl"
    twice.write_text('{"prompt": "a", "id": 2}\n{"prompt": "b"}\n')
    assert "expected different ids, got 2 twice" in run(out, code=2, prompts=twice)
    twice.write_text('{"prompt": "a", "id": [2]}\n')
    assert 'expected a number or text "id", got [2]' in run(out, code=2, prompts=twice)
    out.unlink()
    assert "fit the cache's 1 blocks of 16 tokens" in run(out, "--kv-blocks", 1, code=2)
    assert out.read_bytes() == b""


def test_two_runs_do_not_write_to_one_file(run: Run, tmp_path: Path) -> None:
    out = tmp_path / "o.jsonl"
    with out.open("wb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert "expected a file that no other run writes to" in run(out, code=2)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("--out", "o", "--prompt", "x"), "expected --prompts FILE with --out, got none"),
        (("--out", "o", "--prompts", "p", "--json"), "expected --out without --json, got both"),
        (("--out", "o", "--prompts", "p", "--moe-stats"), "without --moe-stats, got both"),
        (("--samples", "2"), "--samples and --kv-blocks only with --out, got no --out"),
        (("--kv-blocks", "2"), "--samples and --kv-blocks only with --out, got no --out"),
        (("--out", "o", "--prompts", "p", "--samples", "0"), "--samples must be at least 1, got 0"),
    ],
)
def test_options_that_do_not_go_together(
    argv: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert generate.main(list(argv)) == 2
    assert words in capsys.readouterr().err


def test_a_bar_is_shown_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    for stream, shown in ((Terminal(), True), (io.StringIO(), False)):
        monkeypatch.setattr(sys, "stderr", stream)
        monkeypatch.setenv("TERM", "xterm")
        with bulk.counted(Path("o"), 9, 4) as advance:
            advance()
        assert ("5/9" in stream.getvalue()) == shown
