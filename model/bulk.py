"""Prompts of a file to answers in a file, through the engine; a killed run goes on where it was.

OUT.jsonl gets one line a prompt, when all its samples have ended, in that order:

    {"id": 3, "key": "5be0...", "prompt_tokens": 7, "answers": [{"text": ..., "token_ids": [...],
     "finish_reason": "eos"}]}

With a fallback an answer also has the key "fallback": null, or why it left int8 ({"token": ...}).
A line is written at once and whole; one that a kill cut off has no end, and the next run removes
it. ``key`` is a digest of the prompt and of all settings that decide about the answer: an answer
that stands there under the same id and another key is an error, and nothing is mixed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import io
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from model.engine import Answer, Engine
from model.fallback import Calibration
from model.kv_quant import KVQuantization
from model.loop import Limits
from model.qwen3 import Model
from model.runner import Runner
from model.sampler import SamplingParams
from model.scheduler import pages_of

Name = int | str


@dataclass(frozen=True)
class Settings:
    """All that decides about answers, beside the prompts. Prompt i draws with seed ``seed + i``."""

    params: SamplingParams
    limits: Limits
    samples: int
    cache: str
    model: str
    kernels: str
    fallback: str

    def key(self, index: int, prompt: Sequence[int]) -> str:
        """A digest of these settings and a prompt."""
        limits = dataclasses.asdict(self.limits) | {"eos_ids": sorted(self.limits.eos_ids)}
        fields = dataclasses.asdict(self) | {"limits": limits}
        drawn = index if self.params.temperature > 0 else 0  # greedy answers have no seed
        text = json.dumps([fields, drawn, list(prompt)], sort_keys=True)
        return blake2b(text.encode(), digest_size=8).hexdigest()


def engine_for(
    model: Model,
    ops: Any,
    tokenizer: Any,
    longest: int,
    *,
    batch_size: int,
    prefill_chunk: int,
    kv_blocks: int | None,
    quantization: KVQuantization | None,
    fallback: Calibration | None = None,
    graphs: bool = False,
) -> Engine:
    """An engine for requests of at most ``longest`` tokens, by default with room for a batch."""
    runner = Runner(
        model,
        ops,
        num_blocks=kv_blocks or batch_size * pages_of(longest),
        max_positions=longest,
        quantization=quantization,
        fallback=fallback,
        num_groups=batch_size,
    )
    tokens = max(prefill_chunk, batch_size)
    return Engine(
        runner,
        max_num_seqs=batch_size,
        max_num_batched_tokens=tokens,
        tokenizer=tokenizer,
        graphs=graphs,
    )


def answer_file(
    engine: Engine, prompts: Mapping[Name, Sequence[int]], settings: Settings, path: Path
) -> str:
    """Answer all prompts that have no answer in the file yet: a summary in one line.

    Raises:
        ValueError: the file is another run's, or another process writes to it; or a prompt could
            never run.
        KeyboardInterrupt: as it comes, with what the file has by then, in words.
    """
    keys = {name: settings.key(i, ids) for i, (name, ids) in enumerate(prompts.items())}
    with opened(path) as file:
        done = finished(file, path, keys)
        started, waiting, fell = time.perf_counter(), {}, 0
        for index, (name, ids) in enumerate(prompts.items()):
            if name in done:
                continue
            seed = settings.params.seed
            params = dataclasses.replace(
                settings.params, seed=None if seed is None else seed + index
            )
            number = engine.add(ids, params, settings.limits, n=settings.samples)
            waiting[number] = (name, list[Answer]())
        with counted(path, len(prompts), len(done)) as advance:
            while engine.has_work():
                for answer in engine.step():
                    name, answers = waiting[answer.id]
                    answers.append(answer)
                    fell += answer.fallback is not None
                    if len(answers) == settings.samples:
                        write_line(
                            file, _line(name, keys[name], answers, engine.watched is not None)
                        )
                        advance()
    counts, seconds = engine.counts, time.perf_counter() - started
    dropped = engine.runner.cache.statistics()["residuals_dropped"]
    lost = f" | {dropped} residuals left out (their pool was full)" if dropped else ""
    if engine.watched is not None:
        lost += f" | {fell} of {len(waiting) * settings.samples} answers fell back"
    return (
        f"{len(waiting)} prompts answered, {len(done)} had an answer | {counts.new_tokens} tokens "
        f"in {seconds:.1f} s, {counts.new_tokens / seconds:.1f} tok/s | {counts.steps} steps, "
        f"{counts.computed_tokens} tokens computed, {counts.found_tokens} found in the cache, "
        f"{counts.preemptions} preemptions{lost}"
    )


def finished(file: io.FileIO, path: Path, keys: Mapping[Name, str]) -> set[Name]:
    """Ids that have an answer in the file. A last line without an end is removed.

    Raises:
        ValueError: the file is no output of this run.
    """
    held = file.readall()
    whole = held[: held.rfind(b"\n") + 1]
    found: set[Name] = set()
    for number, line in enumerate(whole.splitlines(), start=1):
        try:
            row = json.loads(line)
            name, key = row["id"], row["key"]
        except (ValueError, KeyError, TypeError):
            raise ValueError(
                f"--out {path}:{number}: expected an answer, got {line[:60]!r}"
            ) from None
        if keys.get(name) != key:
            known = "other settings or another prompt" if name in keys else "an id without a prompt"
            raise ValueError(
                f"--out {path}:{number}: expected answers to these prompts with these settings "
                f"(or a new file), got {known}: id {name!r}"
            )
        found.add(name)
    file.truncate(len(whole))
    return found


@contextlib.contextmanager
def opened(path: Path) -> Iterator[io.FileIO]:
    """The file, locked, to be read from its start and written at its end."""
    try:
        file = io.FileIO(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666), "r+")
    except OSError as error:
        raise ValueError(
            f"--out {path}: expected a file that can be written, got {error}"
        ) from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"--out {path}: expected a file that no other run writes to, got one that is in use"
            ) from None
        yield file


def _line(name: Name, key: str, answers: list[Answer], watched: bool) -> bytes:
    def told(a: Answer) -> dict[str, Any]:
        row = {"text": a.text, "token_ids": a.token_ids, "finish_reason": a.finish_reason}
        return {**row, "fallback": a.fallback} if watched else row

    row = {
        "id": name,
        "key": key,
        "prompt_tokens": answers[0].prompt_tokens,
        "answers": [told(a) for a in sorted(answers, key=lambda a: a.sample)],
    }
    # Half a surrogate pair, which an id may hold, becomes the escape that it has in JSON.
    return json.dumps(row, ensure_ascii=False).encode(errors="backslashreplace") + b"\n"


def write_line(file: io.FileIO, line: bytes) -> None:
    """All of a line; the system may take it in parts."""
    while line:
        line = line[file.write(line) or 0 :]


@contextlib.contextmanager
def counted(path: Path, total: int, done: int) -> Iterator[Callable[[], None]]:
    """What to call as each of ``total`` prompts ends, of which ``done`` had. Ctrl-C is passed on
    with words: what the file has by then."""
    with _bar(total, done) as show:

        def advance() -> None:
            nonlocal done
            done += 1
            show()

        try:
            yield advance
        except KeyboardInterrupt:
            raise KeyboardInterrupt(
                f"{done} of {total} prompts are done in {path}; the same command goes on"
            ) from None


@contextlib.contextmanager
def _bar(total: int, done: int) -> Iterator[Callable[[], None]]:
    """A bar of prompts on stderr, if that is a terminal, and what moves it on."""
    if not sys.stderr.isatty():
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    columns = ("prompts", BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("prompts", total=total, completed=done)
        yield lambda: progress.advance(task)
