"""Replies of one batch, token by token, timed: ours with graphs and without, and of PyTorch.

A variant is one way to compute the same replies. A run of it computes the prompts of a batch, all
together, and then a token of each sequence a step, until each reply has its tokens. Nobody stops
early, tokens are the likeliest ones. Times are those of the host, which has read a step's tokens
before it goes on: the first is the time to the first token, the others are times per token.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bench.model.shapes import step_bytes, step_flops, weight_bytes
from bench.roofline import Roof
from model.ahead import Ahead
from model.graph import DecodeGraphs
from model.kv_cache import BLOCK_SIZE, SequenceState
from model.kv_quant import KVQuantization
from model.qwen3 import Model
from model.routing import Routing
from model.runner import Runner
from model.sampler import SamplingParams, sample
from tkernels import device

_GREEDY = SamplingParams()
Prompts = Sequence[Sequence[int]]


@dataclass(frozen=True)
class Sample:
    """One run: seconds of each step, that of the prompts first, and its tokens, [steps][B]."""

    seconds: list[float]
    tokens: list[list[int]]


@dataclass(frozen=True)
class Variant:
    """``run`` computes so many tokens of each reply; ``warm`` of them make it ready to be timed."""

    name: str
    run: Callable[[int], Sample]
    warm: int


def timed(steps: Iterator[list[int]]) -> Sample:
    """Go through ``steps``, each of which gives a token of each sequence."""
    seconds, tokens = [], []
    device.synchronize()
    last = time.perf_counter()
    for found in steps:
        now = time.perf_counter()
        seconds.append(now - last)
        tokens.append(found)
        last = now
    return Sample(seconds, tokens)


def replies(
    runner: Runner, prompts: Prompts, output: int, graphs: DecodeGraphs | None = None
) -> Generator[list[int], None, None]:
    """``output`` steps by the runner, by replays where there are graphs.

    The sequences' blocks are given back at the end, also of an iterator that is closed before.
    """
    sequences = [SequenceState(list(prompt)) for prompt in prompts]
    keys = [0] * len(sequences)  # of random numbers, which nobody draws
    ahead = None if graphs is None else Ahead(runner, graphs, _GREEDY)

    def chosen(logits: torch.Tensor) -> list[int]:
        return sample(logits, _GREEDY, [s.token_ids for s in sequences], keys)

    try:
        tokens = chosen(runner.prefill(sequences))
        yield tokens
        for number in range(2, output + 1):
            for sequence, token in zip(sequences, tokens, strict=True):
                sequence.token_ids.append(token)
            if ahead is None:
                tokens = chosen(runner.decode(sequences))
            else:
                tokens = ahead.tokens(sequences, keys, [number == output] * len(sequences))
            yield tokens
    finally:
        for sequence in sequences:
            runner.release(sequence)


def new_runner(
    model: Model, ops: Any, batch: int, length: int, quantization: KVQuantization | None
) -> Runner:
    """With room for ``batch`` sequences of ``length`` tokens."""
    blocks = batch * -(-length // BLOCK_SIZE)
    return Runner(model, ops, num_blocks=blocks, max_positions=length, quantization=quantization)


def captured(runner: Runner, batch: int) -> DecodeGraphs:
    """The greedy decode step of ``batch`` sequences, as one graph."""
    return DecodeGraphs(
        runner.model,
        runner.ops,
        runner.cache,
        runner.cos_sin_cache,
        sizes=[batch],
        max_blocks=-(-runner.max_positions // BLOCK_SIZE),
    )


def experts_read(runner: Runner, prompts: Prompts, output: int) -> float:
    """Mean number of experts that the tokens of a decode step go to, summed over layers.

    One whole run by the runner without graphs, so that it also makes that one ready. 0 in a network
    without experts, of which nothing is run.
    """
    if runner.model.config.mixture is None:
        return 0.0
    routing = Routing(runner.model.config, runner.device)
    found = []
    runner.routing = routing
    try:
        for _ in replies(runner, prompts, output):
            found.append((routing.load > 0).sum())
            routing.load.zero_()
    finally:
        runner.routing = None
    return float(torch.stack(found[1:]).float().mean())


# ---- what is told of a variant -----------------------------------------------------------------


def figures(
    samples: Sequence[Sample],
    model: Model,
    prompt: int,
    *,
    experts: float,
    kv_bytes: float,
    roof: Roof,
) -> dict[str, Any]:
    """Figures of the runs of a variant over prompts of ``prompt`` tokens.

    Args:
        experts: that a step reads, see ``experts_read``.
        kv_bytes: of a token in the cache, all layers.
    """
    batch, output = len(samples[0].tokens[0]), len(samples[0].tokens)
    steps = [s for one in samples for s in one.seconds[1:]]
    token_s = statistics.median(steps)
    # A step sees its own token too, so the first one after the prompt sees prompt + 1.
    attended = batch * (prompt + output / 2)
    num_bytes = step_bytes(weight_bytes(model, experts), kv_bytes, attended)
    flops = step_flops(model.config, batch, attended)
    return {
        "rounds": len(samples),
        "tokens": batch * output,
        "ttft_ms": 1e3 * statistics.median(one.seconds[0] for one in samples),
        "token_ms": 1e3 * token_s,
        "token_p99_ms": 1e3 * percentile(steps, 0.99),
        "tokens_per_s": statistics.median(batch * output / sum(one.seconds) for one in samples),
        "decode_tokens_per_s": batch / token_s,
        "experts_read": experts or None,
        "step_bytes": num_bytes,
        "gbps": num_bytes / token_s / 1e9,
        "roof_share": num_bytes / roof.bytes_per_s / token_s,
        "step_flops": flops,
        "tflops": flops / token_s / 1e12,
    }


def percentile(values: Sequence[float], share: float) -> float:
    """The least value that ``share`` of all do not exceed.

    >>> percentile([4.0, 1.0, 3.0, 2.0], 0.5)
    2.0
    """
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def agreement(one: Sample, other: Sample) -> float:
    """Share of the replies that are the same in both, as far as the shorter ones go."""
    least = min(len(one.tokens), len(other.tokens))
    both = (zip(*some.tokens[:least], strict=True) for some in (one, other))
    pairs = zip(*both, strict=True)
    same = [a == b for a, b in pairs]
    return same.count(True) / len(same)
