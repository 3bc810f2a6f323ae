"""``generate``: prompts in, replies out, a fixed batch at a time, with the times of each phase."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from model import PREFILL_CHUNK
from model.ahead import Ahead, kind_of
from model.fallback import Calibration
from model.graph import DecodeGraphs, batch_sizes
from model.kv_cache import BLOCK_SIZE, SequenceState
from model.kv_quant import KVQuantization
from model.qwen3 import Model
from model.routing import Routing
from model.runner import Runner
from model.sampler import SamplingParams, request_key, sample
from model.threads import cpu_threads
from model.tokenizer import Detokenizer
from tkernels import device


@dataclass
class Reply:
    """What came of one prompt. ``finish_reason``: eos, stop, length, interrupted."""

    prompt_tokens: int
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str = "interrupted"


@dataclass
class Times:
    """Sums over all batches. A prefill gives each sequence one token, a decode step one more."""

    first_token_s: float | None = None  # from the call of generate to the first token of all
    prefill_s: float = 0.0
    prefill_tokens: int = 0
    decode_steps_s: list[float] = field(default_factory=list)
    decode_tokens: int = 0
    # KVCache.statistics at the end; residuals are those of sequences that have ended, too.
    kv_cache: dict[str, Any] = field(default_factory=dict)
    graphs: dict[str, Any] | None = None  # with graphs: their sizes, bytes, and time of capture
    # With a fallback: Watch.report of each prompt that has ended, by its index.
    fallback: dict[int, dict[str, Any] | None] = field(default_factory=dict)


@dataclass(frozen=True)
class Limits:
    """When a reply ends."""

    max_tokens: int
    eos_ids: frozenset[int]  # empty: never by itself
    stop: tuple[str, ...] = ()


def generate(
    model: Model,
    ops: Any,
    tokenizer: Any,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    limits: Limits,
    *,
    batch_size: int = 8,
    prefill_chunk: int = PREFILL_CHUNK,
    quantization: KVQuantization | None = None,
    fallback: Calibration | None = None,
    routing: Routing | None = None,
    graphs: bool = False,
    on_text: Callable[[int, str], None] | None = None,
    on_done: Callable[[int], None] | None = None,
    on_prefill: Callable[[int, int], None] | None = None,
) -> tuple[list[Reply], Times]:
    """Replies to token-id prompts, in order.

    Prompt i draws with seed ``params.seed + i``. Ctrl-C ends the run: what there is by then comes
    back, with ``finish_reason`` "interrupted".

    Args:
        on_text: called with (prompt index, piece of text) as text becomes certain.
        prefill_chunk: prompt tokens computed at once, at most.
        quantization: of the KV cache; None keeps it in the model's dtype.
        fallback: what requests are compared with that may leave int8; None watches nothing.
        routing: counts the experts that tokens go to; None counts nothing.
        graphs: capture the decode step and replay it (model/graph.py).
        on_done: called with the index of each finished prompt.
        on_prefill: called with (prompt tokens computed, in all) before and after each chunk.
    """
    context = model.config.max_position_embeddings
    for ids in prompts:
        check_prompt(len(ids), context)
    longest = min(max(map(len, prompts)) + limits.max_tokens, context)
    batch_size = min(batch_size, len(prompts))
    started = time.perf_counter()
    runner = Runner(
        model,
        ops,
        num_blocks=batch_size * -(-longest // BLOCK_SIZE),
        max_positions=longest,
        prefill_chunk=prefill_chunk,
        quantization=quantization,
        fallback=fallback,
        num_groups=batch_size,
        routing=routing,
    )
    replies = [Reply(len(ids)) for ids in prompts]
    times = Times()
    residuals: torch.Tensor | int = 0  # of sequences that have ended, which took them along

    def one(index: int) -> _Running:
        seed = secrets.randbits(63) if params.seed is None else params.seed + index
        return _Running(
            index,
            SequenceState(list(prompts[index])),
            replies[index],
            Detokenizer(tokenizer, limits.stop),
            request_key(seed, 0),
        )

    def chosen(running: list[_Running], logits: torch.Tensor) -> list[int]:
        with cpu_threads(1):  # one row of the vocabulary is little work
            histories = [r.sequence.token_ids for r in running]
            return sample(logits, params, histories, [r.key for r in running])

    def step(running: list[_Running], tokens: list[int]) -> list[_Running]:
        """Take a token for each sequence; those that go on."""
        nonlocal residuals
        if times.first_token_s is None:
            times.first_token_s = time.perf_counter() - started
        going = []
        for r, token in zip(running, tokens, strict=True):
            if r.take(token, limits, context, on_text):
                going.append(r)
            else:
                if runner.watch is not None:
                    times.fallback[r.index] = runner.watch.report(r.sequence)
                residuals = residuals + runner.cache.num_residuals(r.sequence.block_ids)
                runner.release(r.sequence)
                if on_done:
                    on_done(r.index)
        return going

    ahead: Ahead | None = None
    try:
        for start in range(0, len(prompts), batch_size):
            running = [one(i) for i in range(start, min(start + batch_size, len(prompts)))]
            begin = time.perf_counter()
            logits = runner.prefill([r.sequence for r in running], on_chunk=on_prefill)
            running = step(running, chosen(running, logits))
            times.prefill_s += time.perf_counter() - begin
            times.prefill_tokens += sum(map(len, prompts[start : start + batch_size]))
            if graphs and running and ahead is None:
                ahead = Ahead(runner, _captured(runner, params, batch_size, times), params)
            while running:
                begin = time.perf_counter()
                count = len(running)
                sequences = [r.sequence for r in running]
                if ahead is None:
                    tokens = chosen(running, runner.decode(sequences))
                else:
                    ending = [r.is_last(limits, context) for r in running]
                    tokens = ahead.tokens(sequences, [r.key for r in running], ending)
                running = step(running, tokens)
                times.decode_steps_s.append(time.perf_counter() - begin)
                times.decode_tokens += count
    except KeyboardInterrupt:
        pass  # the replies so far say "interrupted"
    times.kv_cache = runner.cache.statistics()
    times.kv_cache["residuals"] += int(residuals)
    return replies, times


def _captured(
    runner: Runner, params: SamplingParams, batch_size: int, times: Times
) -> DecodeGraphs:
    begin = time.perf_counter()
    graphs = DecodeGraphs(
        runner.model,
        runner.ops,
        runner.cache,
        runner.cos_sin_cache,
        sizes=batch_sizes(batch_size, device.most_graphs()),
        max_blocks=-(-runner.max_positions // BLOCK_SIZE),
        kinds=(kind_of(params),),
        watch=runner.watch,
    )
    times.graphs = {
        "sizes": graphs.sizes,
        "bytes": graphs.num_bytes,
        "capture_s": time.perf_counter() - begin,
    }
    return graphs


def check_prompt(length: int, context: int) -> None:
    """A prompt must hold something and leave room for one token."""
    if length == 0:
        raise ValueError("expected a prompt with at least one token, got an empty one")
    if length >= context:
        raise ValueError(
            f"expected a prompt of fewer tokens than the context of {context}, got {length}"
        )


@dataclass
class _Running:
    index: int
    sequence: SequenceState
    reply: Reply
    detokenizer: Detokenizer
    key: int  # of its random numbers

    def is_last(self, limits: Limits, context: int) -> bool:
        """Whether the next token ends the reply by its length, whichever it is."""
        full = len(self.sequence.token_ids) + 1 >= context
        return full or len(self.reply.token_ids) + 1 >= limits.max_tokens

    def take(
        self,
        token: int,
        limits: Limits,
        context: int,
        on_text: Callable[[int, str], None] | None,
    ) -> bool:
        """Add a token to the reply; False when that ends it."""
        last = self.is_last(limits, context)
        self.reply.token_ids.append(token)
        if token in limits.eos_ids:
            piece, reason = self.detokenizer.finish(), "eos"
        else:
            self.sequence.token_ids.append(token)
            piece, reason = self.detokenizer.push(token), ""
            if self.detokenizer.stopped:
                reason = "stop"
            elif last:
                piece, reason = piece + self.detokenizer.finish(), "length"
        self.reply.text += piece
        if piece and on_text:
            on_text(self.index, piece)
        if reason:
            self.reply.finish_reason = reason
        return not reason
