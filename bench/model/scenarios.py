"""Three loads for ``model.engine.Engine``, and what is told of each.

    mixed    many requests of random lengths, all there from the start
    chunked  a long prompt arrives beside requests that decode: what it costs their tokens
    prefix   requests with a long prefix in common: the time to their first token, cold and found

Each has runs that are not counted before, in which kernels are compiled. A round has prompts of its
own, or it would find the pages of the round before. Answers are greedy and never end early.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from bench.model import options, profile
from bench.model.decode import percentile
from bench.model.options import Tell
from bench.model.shapes import expected_experts, step_bytes, weight_bytes
from bench.roofline import Roof
from bench.rows import UsageError
from model.engine import GREEDY, Answer, Engine
from model.kv_cache import BLOCK_SIZE, SequenceState, allocate_cache
from model.kv_quant import KVQuantization
from model.loop import Limits
from model.qwen3 import Model
from model.runner import Runner
from model.scheduler import Counts
from tkernels import device

_MEMORY_SHARE = 0.85  # of what is free, that caches may take: the rest is for activations


@dataclass(frozen=True)
class Setting:
    """What all scenarios share."""

    model: Model
    ops: Any
    quantization: KVQuantization | None
    graphs: bool
    seed: int
    rounds: int
    roof: Roof
    tell: Tell

    def prompts(self, number: int, lengths: Sequence[int], common: int = 0) -> list[list[int]]:
        """Random tokens of a round, the first ``common`` of which all prompts share."""
        drawn = np.random.default_rng([self.seed, number])
        vocabulary = self.model.config.vocab_size
        prefix = drawn.integers(vocabulary, size=common).tolist()
        return [prefix + drawn.integers(vocabulary, size=n).tolist() for n in lengths]

    def engine(
        self, *, tokens: int, length: int, memory: float = _MEMORY_SHARE, **more: Any
    ) -> Engine:
        """With a cache of ``tokens``, or what ``memory`` allows; a request has up to ``length``."""
        config, dtype = self.model.config, self.model.norm.dtype
        trial = allocate_cache(config, 64, dtype, self.model.norm.device, self.quantization)
        block = trial.statistics()["bytes_per_token"] * BLOCK_SIZE
        del trial
        free, least = options.free_bytes(), -(-length // BLOCK_SIZE)
        blocks = int(min(-(-tokens // BLOCK_SIZE), memory * free / block))
        if blocks < least:
            raise UsageError(
                f"bench: the device must have room for a request of {length} tokens, got "
                f"{free / 1e9:.1f} GB free"
            )
        runner = Runner(
            self.model,
            self.ops,
            num_blocks=blocks,
            max_positions=length,
            quantization=self.quantization,
        )
        return Engine(runner, graphs=self.graphs, **more)


def limits(tokens: int) -> Limits:
    """Exactly so many tokens."""
    return Limits(tokens, frozenset())


def drain(engine: Engine, numbers: Sequence[int]) -> None:
    """Cancel requests, and take their answers."""
    for number in numbers:
        engine.cancel(number)
    while engine.has_work():
        engine.step()


# ---- mixed -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mixed:
    requests: int = 256
    input: tuple[int, int] = (100, 1024)  # tokens, from and to
    output: tuple[int, int] = (100, 1024)
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    profiled_steps: int = 50  # 0: none; see ``window``

    @property
    def length(self) -> int:
        """Tokens of a request, at most."""
        return self.input[1] + self.output[1]


@dataclass
class Steps:
    """Sums over steps of an engine, and the seconds of each."""

    seconds: list[float]
    wall_s: float
    num_bytes: float  # that the steps had to read


def mixed(setting: Setting, load: Mixed) -> dict[str, Any]:
    """Throughput of the engine, and its share of what the memory's bandwidth allows."""
    begin = time.perf_counter()
    inputs, outputs = _lengths(setting, load)
    engine = _mixed_engine(setting, load)
    device.synchronize()
    capture_s = time.perf_counter() - begin
    rounds: list[Steps] = []
    before = dataclasses.replace(engine.counts)
    for number in range(setting.rounds + 1):
        what = f"round {number} of {setting.rounds}" if number else "getting ready"
        setting.tell(f"mixed: {what}")
        before = dataclasses.replace(engine.counts)
        for prompt, count in zip(setting.prompts(number, inputs), outputs, strict=True):
            engine.add(prompt, GREEDY, limits(count))
        answers, steps = _run_all(setting, engine)
        if sorted(len(a.token_ids) for a in answers) != sorted(outputs):
            raise RuntimeError("expected each answer to have the tokens asked for, got others")
        rounds.append(steps)
    counted, total = rounds[1:], sum(outputs)
    wall = statistics.median(one.wall_s for one in counted)
    last = counted[-1]
    return {
        "scenario": "mixed",
        "requests": load.requests,
        "input_tokens": sum(inputs),
        "output_tokens": total,
        "rounds": len(counted),
        "cache_tokens": engine.pool.num_pages * BLOCK_SIZE,
        "preemptions": engine.counts.preemptions - before.preemptions,
        "ready_s": capture_s,
        "wall_s": wall,
        "tokens_per_s": total / wall,
        "all_tokens_per_s": (sum(inputs) + total) / wall,
        "steps": len(last.seconds),
        "step_ms": [1e3 * s for s in last.seconds],
        "read_bytes": last.num_bytes,
        "roof_share": statistics.median(
            one.num_bytes / setting.roof.bytes_per_s / one.wall_s for one in counted
        ),
        "experts_estimated": setting.model.config.mixture is not None,
        "profile": None,
    }


def _lengths(setting: Setting, load: Mixed) -> tuple[list[int], list[int]]:
    """Tokens of each prompt and of its answer."""
    drawn = np.random.default_rng(setting.seed)
    inputs, outputs = (
        drawn.integers(low, high + 1, load.requests).tolist()
        for low, high in (load.input, load.output)
    )
    return inputs, outputs


def _mixed_engine(setting: Setting, load: Mixed) -> Engine:
    """With pages for all requests at once, if there is memory for them."""
    lengths = [i + o for i, o in zip(*_lengths(setting, load), strict=True)]
    return setting.engine(
        tokens=sum(-(-n // BLOCK_SIZE) * BLOCK_SIZE for n in lengths),
        length=load.length,
        max_num_seqs=load.max_num_seqs,
        max_num_batched_tokens=max(load.max_num_batched_tokens, load.max_num_seqs),
    )


def _run_all(setting: Setting, engine: Engine) -> tuple[list[Answer], Steps]:
    answers: list[Answer] = []
    seconds: list[float] = []
    num_bytes = 0.0
    kv_bytes = engine.runner.cache.statistics()["bytes_per_token"]
    device.synchronize()
    begin = last = time.perf_counter()
    while engine.has_work():
        before = dataclasses.replace(engine.counts)
        answers += engine.step()
        now = time.perf_counter()
        seconds.append(now - last)
        last = now
        num_bytes += read_bytes(setting.model, kv_bytes, before, engine.counts)
    return answers, Steps(seconds, last - begin, num_bytes)


def read_bytes(model: Model, kv_bytes: float, before: Counts, after: Counts) -> float:
    """What the steps between two counts, one or none, had to read."""
    if after.steps == before.steps:
        return 0.0
    experts = expected_experts(model.config, after.computed_tokens - before.computed_tokens)
    attended = after.attended_tokens - before.attended_tokens
    return step_bytes(weight_bytes(model, experts), kv_bytes, attended)


def window(setting: Setting, load: Mixed, steps: int) -> dict[str, Any] | None:
    """Kernels of ``load.profiled_steps`` steps, a third into a round of about ``steps``.

    With an engine of its own, whose graphs are captured when tracing has begun. None where nothing
    was recorded.
    """
    setting.tell("mixed: profile")
    inputs, outputs = _lengths(setting, load)
    engine = _mixed_engine(setting, load)
    for number in range(2):  # the first makes ready
        pairs = zip(setting.prompts(number, inputs), outputs, strict=True)
        numbers = [engine.add(prompt, GREEDY, limits(count)) for prompt, count in pairs]
        for _ in range(steps // 3):
            engine.step()
        count = 0
        with device.profiled() as intervals:
            while count < load.profiled_steps and engine.has_work():
                engine.step()
                count += 1
        drain(engine, numbers)
    return profile.figures(intervals, count)


# ---- chunked -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Chunked:
    long_prompt: int = 32768
    decoding: int = 32
    input: int = 128  # tokens of the prompts of those that decode
    before: int = 128  # steps that are timed before the long prompt comes
    step_tokens: int = 2048  # of a step, at most: what is left by the others is the chunk

    @property
    def steps_to_begin(self) -> int:
        """Until a step computes a token of each of those that decode, at most."""
        beside = self.step_tokens - self.decoding  # for prompts, once nearly all decode
        return -(-self.decoding * self.input // beside) + 4

    @property
    def steps(self) -> int:
        """Of one of those that decode: until all have begun, before, and beside the chunks."""
        chunks = -(-self.long_prompt // (self.step_tokens - self.decoding))
        return self.steps_to_begin + self.before + chunks + 4

    @property
    def length(self) -> int:
        """Tokens of a request, at most."""
        return max(self.input + self.steps, self.long_prompt + 1)


def chunked(setting: Setting, load: Chunked) -> dict[str, Any]:
    """What a long prompt costs those that decode beside it."""
    own = load.input + load.steps
    engine = setting.engine(
        tokens=load.decoding * (own + BLOCK_SIZE) + load.long_prompt + 2 * BLOCK_SIZE,
        length=load.length,
        max_num_seqs=load.decoding + 1,
        max_num_batched_tokens=load.step_tokens,
    )
    before_s: list[float] = []
    during_s: list[float] = []
    first_s: list[float] = []
    for number in range(setting.rounds + 1):
        what = f"round {number} of {setting.rounds}" if number else "getting ready"
        setting.tell(f"chunked, {load.step_tokens} tokens a step: {what}")
        *others, long = setting.prompts(number, [load.input] * load.decoding + [load.long_prompt])
        numbers = [engine.add(prompt, GREEDY, limits(load.steps)) for prompt in others]
        if not any(_new_tokens(engine) == load.decoding for _ in range(load.steps_to_begin)):
            raise RuntimeError("expected all requests to decode at once, got too small a cache")
        before = [_step_s(engine)[0] for _ in range(load.before)]
        asked = engine.add(long, GREEDY, limits(1))
        during, done = [], False
        while not done:
            seconds, answers = _step_s(engine)
            during.append(seconds)
            if any(a.id in numbers for a in answers):
                raise RuntimeError("expected requests to decode until the long prompt is computed")
            done = any(a.id == asked for a in answers)
        drain(engine, numbers)
        if number:
            before_s += before
            during_s += during
            first_s.append(sum(during))
    before_p99, during_p99 = percentile(before_s, 0.99), percentile(during_s, 0.99)
    return {
        "scenario": "chunked",
        **dataclasses.asdict(load),
        "rounds": setting.rounds,
        "steps_during": len(during_s) // setting.rounds,
        "before_ms": 1e3 * statistics.median(before_s),
        "before_p99_ms": 1e3 * before_p99,
        "during_ms": 1e3 * statistics.median(during_s),
        "during_p99_ms": 1e3 * during_p99,
        "ratio": during_p99 / before_p99,
        "long_ttft_ms": 1e3 * statistics.median(first_s),
    }


def _new_tokens(engine: Engine) -> int:
    before = engine.counts.new_tokens
    engine.step()
    return engine.counts.new_tokens - before


def _step_s(engine: Engine) -> tuple[float, list[Answer]]:
    """A step that gives tokens, so that the host has waited for it, and its seconds."""
    begin = time.perf_counter()
    answers = engine.step()
    return time.perf_counter() - begin, answers


# ---- prefix ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Prefix:
    requests: int = 64
    prefix: int = 2000
    tail: int = 32  # tokens of each prompt of its own
    output: int = 32  # of the answers that are compared
    max_num_batched_tokens: int = 2048

    @property
    def length(self) -> int:
        """Tokens of a request, at most."""
        return self.prefix + self.tail + self.output


def prefix(setting: Setting, load: Prefix) -> dict[str, Any]:
    """First tokens of requests that come one after another, with the prefix cache and without."""
    lengths = [load.tail] * load.requests
    engines = {
        on: setting.engine(
            tokens=load.requests * (load.length + 2 * BLOCK_SIZE),
            length=load.length,
            memory=_MEMORY_SHARE / (1 + on),
            max_num_seqs=load.requests,
            max_num_batched_tokens=max(load.max_num_batched_tokens, load.requests),
            prefix_cache=on,
        )
        for on in (True, False)
    }
    times: dict[bool, list[list[float]]] = {True: [], False: []}
    found = 0
    for number in range(setting.rounds + 1):
        what = f"round {number} of {setting.rounds}" if number else "getting ready"
        setting.tell(f"prefix: {what}")
        prompts = setting.prompts(number, lengths, load.prefix)
        for on, engine in engines.items():
            before = engine.counts.found_tokens
            seconds = [_first_token_s(engine, prompt) for prompt in prompts]
            if on:
                found = engine.counts.found_tokens - before
            if number:
                times[on].append(seconds)
    on_s, off_s = (
        [statistics.median(one[i] for one in times[on]) for i in range(load.requests)]
        for on in (True, False)
    )
    warm = statistics.median(on_s[1:])
    prompts = setting.prompts(setting.rounds + 1, lengths, load.prefix)
    setting.tell("prefix: answers with the cache and without")
    answers = {
        on: [a.token_ids for a in engine.generate(prompts, GREEDY, limits(load.output))]
        for on, engine in engines.items()
    }
    same = sum(a == b for a, b in zip(answers[True], answers[False], strict=True))
    engines.clear()
    return {
        "scenario": "prefix",
        **dataclasses.asdict(load),
        "rounds": setting.rounds,
        "found_tokens": found,
        "cold_ms": 1e3 * on_s[0],
        "warm_ms": 1e3 * warm,
        "warm_p99_ms": 1e3 * percentile(on_s[1:], 0.99),
        "ratio": warm / on_s[0],
        "off_ms": 1e3 * statistics.median(off_s[1:]),
        "ttft_ms": [1e3 * s for s in on_s],
        "off_ttft_ms": [1e3 * s for s in off_s],
        "same_answers": same,
        "gap": _largest_gap(setting, prompts, answers[True], answers[False]),
    }


def _first_token_s(engine: Engine, prompt: list[int]) -> float:
    device.synchronize()
    begin = time.perf_counter()
    engine.add(prompt, GREEDY, limits(1))
    while not engine.step():
        pass
    return time.perf_counter() - begin


_COMPARED = 8  # answers that differ, at most, each of which costs a prefill


def _largest_gap(
    setting: Setting,
    prompts: Sequence[list[int]],
    some: Sequence[list[int]],
    others: Sequence[list[int]],
) -> float | None:
    """How far apart the logits of two answers' tokens are where they part: the most of a few.

    Sums of other sizes round otherwise, so tokens whose logits are about equal may change places;
    a large gap is a mistake. None where all answers are the same.
    """
    differing = [i for i, (a, b) in enumerate(zip(some, others, strict=True)) if a != b]
    gaps = []
    for i in differing[:_COMPARED]:
        a, b = some[i], others[i]
        at = next(j for j, (x, y) in enumerate(zip(a, b, strict=True)) if x != y)
        logits = _logits(setting, prompts[i] + a[:at])
        gaps.append(abs(float(logits[a[at]] - logits[b[at]])))
    return max(gaps, default=None)


def _logits(setting: Setting, tokens: list[int]) -> torch.Tensor:
    """Fp32 [V] after these tokens."""
    runner = Runner(
        setting.model,
        setting.ops,
        num_blocks=-(-len(tokens) // BLOCK_SIZE),
        max_positions=len(tokens),
        quantization=setting.quantization,
    )
    return runner.prefill([SequenceState(tokens)])[0]
