"""``generate``: prompts in, replies out, a fixed batch at a time, with the times of each phase."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from model import PREFILL_CHUNK
from model.fallback import Calibration
from model.kv_cache import BLOCK_SIZE, SequenceState
from model.kv_quant import KVQuantization
from model.qwen3 import Model
from model.runner import Runner
from model.sampler import SamplingParams, new_generator, sample
from model.threads import cpu_threads
from model.tokenizer import Detokenizer


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
    kv_cache: dict[str, Any] = field(default_factory=dict)  # KVCache.statistics at the end
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
    )
    replies = [Reply(len(ids)) for ids in prompts]
    times = Times()

    def one(index: int) -> _Running:
        seed = None if params.seed is None else params.seed + index
        return _Running(
            index,
            SequenceState(list(prompts[index])),
            replies[index],
            Detokenizer(tokenizer, limits.stop),
            new_generator(seed, runner.device),
        )

    def step(running: list[_Running], logits: torch.Tensor) -> list[_Running]:
        """Sample a token for each sequence; those that go on."""
        with cpu_threads(1):  # one row of the vocabulary is little work
            tokens = sample(
                logits,
                params,
                [r.sequence.token_ids for r in running],
                [r.generator for r in running],
            )
        if times.first_token_s is None:
            times.first_token_s = time.perf_counter() - started
        going = []
        for r, token in zip(running, tokens, strict=True):
            if r.take(token, limits, context, on_text):
                going.append(r)
            else:
                if runner.watch is not None:
                    times.fallback[r.index] = runner.watch.report(r.sequence)
                runner.release(r.sequence)
                if on_done:
                    on_done(r.index)
        return going

    try:
        for start in range(0, len(prompts), batch_size):
            running = [one(i) for i in range(start, min(start + batch_size, len(prompts)))]
            begin = time.perf_counter()
            logits = runner.prefill([r.sequence for r in running], on_chunk=on_prefill)
            running = step(running, logits)
            times.prefill_s += time.perf_counter() - begin
            times.prefill_tokens += sum(map(len, prompts[start : start + batch_size]))
            while running:
                begin = time.perf_counter()
                count = len(running)
                running = step(running, runner.decode([r.sequence for r in running]))
                times.decode_steps_s.append(time.perf_counter() - begin)
                times.decode_tokens += count
    except KeyboardInterrupt:
        pass  # the replies so far say "interrupted"
    times.kv_cache = runner.cache.statistics()
    return replies, times


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
    generator: torch.Generator

    def take(
        self,
        token: int,
        limits: Limits,
        context: int,
        on_text: Callable[[int, str], None] | None,
    ) -> bool:
        """Add a token to the reply; False when that ends it."""
        self.reply.token_ids.append(token)
        if token in limits.eos_ids:
            piece, reason = self.detokenizer.finish(), "eos"
        else:
            self.sequence.token_ids.append(token)
            piece, reason = self.detokenizer.push(token), ""
            full = len(self.sequence.token_ids) >= context
            if self.detokenizer.stopped:
                reason = "stop"
            elif full or len(self.reply.token_ids) >= limits.max_tokens:
                piece, reason = piece + self.detokenizer.finish(), "length"
        self.reply.text += piece
        if piece and on_text:
            on_text(self.index, piece)
        if reason:
            self.reply.finish_reason = reason
        return not reason
