"""One step of the network over the paged cache; the caller chooses which sequences take part."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

import tkernels
from model import PREFILL_CHUNK, cpu_ops
from model.config import ModelConfig
from model.fallback import Calibration, Watch
from model.kv_cache import (
    BLOCK_SIZE,
    BlockAllocator,
    Ints,
    SequenceState,
    StepArrays,
    allocate_cache,
    metadata,
    step_arrays,
)
from model.kv_quant import KVQuantization
from model.pieces import StepPieces, most_tokens, token_sizes
from model.prompt_graphs import PromptGraphs
from model.qwen3 import Model, forward
from model.routing import Routing
from model.threads import cpu_threads, prompt_threads
from tkernels import build_cos_sin_cache


def operations(kernels: str | None) -> tuple[str, Any]:
    """(``triton`` or ``torch``, the namespace of that name), by default what suits the device.

    Where kernels will run in Triton's interpreter it says so, on stderr.

    Raises:
        ValueError: kernels are asked for, and triton is not installed or nothing can run them.
    """
    on_cpu = tkernels.device.tensor_device().type == "cpu"
    name = kernels or ("torch" if on_cpu else "triton")
    if name == "torch":
        return name, cpu_ops if on_cpu else tkernels.reference
    try:
        tkernels.device.require_triton()
    except tkernels.UnsupportedError as error:
        raise ValueError(f"--kernels triton: {error}") from None
    if tkernels.device.current().compile_only:
        raise ValueError(
            "--kernels triton: expected a device to run on, got facts of "
            f"{tkernels.device.current().arch} alone (TKERNELS_DEVICE)"
        )
    if tkernels.device.INTERPRETED:
        _say_interpreted()
    return name, tkernels


@functools.cache
def _say_interpreted() -> None:
    """Once a process: whoever waits for the first token should know why."""
    print(
        "kernels run in Triton's interpreter, as there is no accelerator: seconds a token, even of "
        "a small model (--kernels torch does without it)",
        file=sys.stderr,
        flush=True,
    )


def choose_dtype(asked: str | None, usual: str, kernels: str, config: ModelConfig) -> str:
    """What ``--dtype`` asks for; without it ``usual``, or 16 bits where kernels want that.

    Raises:
        ValueError: fp32 is asked for, and the kernels of a quantised checkpoint have none.
    """
    if kernels != "triton" or config.quantization is None:
        return asked or usual
    if asked == "float32":
        raise ValueError(
            "--dtype must be bfloat16 or float16 with --kernels triton and a quantised checkpoint, "
            "got float32"
        )
    return asked or (config.dtype if config.dtype in ("bfloat16", "float16") else "bfloat16")


class Runner:
    """A model with its cache. ``ops`` is ``tkernels`` or ``tkernels.reference``.

    ``num_blocks`` blocks of the cache are shared by all sequences; positions go up to
    ``max_positions`` - 1. A prefill takes at most ``prefill_chunk`` tokens a step, so that its
    memory does not grow with the prompts. ``tkernels`` brings its own attention; with any other
    namespace it is PyTorch's. With ``quantization`` attention reads what the cache holds of new
    tokens too, so that results do not depend on the chunks. With ``fallback`` up to ``num_groups``
    sequences at a time are watched, and layers in w8a8 leave int8 for those that go bad. With
    ``routing`` the experts are counted that tokens go to.
    """

    def __init__(
        self,
        model: Model,
        ops: Any,
        *,
        num_blocks: int,
        max_positions: int,
        prefill_chunk: int = PREFILL_CHUNK,
        quantization: KVQuantization | None = None,
        fallback: Calibration | None = None,
        num_groups: int = 64,
        routing: Routing | None = None,
    ) -> None:
        self.model, self.ops, self.routing = model, ops, routing
        self.prefill_chunk = prefill_chunk
        self.device = model.norm.device
        self.cache = allocate_cache(
            model.config, num_blocks, model.norm.dtype, self.device, quantization
        )
        self.num_blocks = num_blocks
        self.blocks = BlockAllocator(num_blocks)
        self.max_positions = max_positions
        self.cos_sin_cache = build_cos_sin_cache(
            model.config.rope, max_positions, device=self.device
        )
        self.watch = None if fallback is None else Watch(fallback, model, num_groups, self.device)
        self.pieces: StepPieces | None = None
        self.prompts: PromptGraphs | None = None

    def capture_prompts(self, max_tokens: int, max_seqs: int) -> None:
        """From now on, replay steps with prompts of up to so many tokens and sequences.

        Whole, where there is one prompt (model/prompt_graphs.py), else in pieces (model/pieces.py).
        Only those of fewer tokens than keep the device busy longer than the host; none where
        something looks at the rows of a step, or the device keeps few graphs.
        """
        looks = self.watch is not None or self.routing is not None
        if looks or tkernels.device.most_graphs() is not None:
            return
        sizes = token_sizes(min(max_tokens, most_tokens(self.model)))
        max_blocks = -(-self.max_positions // BLOCK_SIZE)
        over = self.model, self.ops, self.cache, self.cos_sin_cache
        self.pieces = StepPieces(*over, sizes=sizes, max_seqs=max_seqs, max_blocks=max_blocks)
        self.prompts = PromptGraphs(
            *over, sizes=sizes, max_beside=max_seqs - 1, max_blocks=max_blocks
        )

    @torch.inference_mode()
    def prefill(
        self,
        sequences: Sequence[SequenceState],
        *,
        all_logits: bool = False,
        on_chunk: Callable[[int, int], None] | None = None,
    ) -> torch.Tensor:
        """Compute all tokens of each sequence that are not in the cache yet, chunk after chunk.

        Args:
            on_chunk: called with (tokens computed, tokens in all) before each chunk and at the end.

        Returns:
            Logits fp32 [B, V] of the last token of each sequence; with ``all_logits`` [T, V].
        """
        missing = [len(s.token_ids) - s.num_computed for s in sequences]
        if min(missing) < 1:
            raise ValueError("prefill: expected at least one new token in each sequence, got 0")
        self._make_room(sequences)
        done, parts = 0, []
        for chunk in split_prefill(missing, self.prefill_chunk):
            if on_chunk:
                on_chunk(done, sum(missing))
            step, new = [sequences[i] for i, _ in chunk], [n for _, n in chunk]
            lengths = zip(step, new, strict=True)
            ended = sum(s.num_computed + n == len(s.token_ids) for s, n in lengths)
            parts.append(self._step(step, new, None if all_logits else ended))
            done += sum(new)
        if on_chunk:
            on_chunk(done, done)
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    @torch.inference_mode()
    def decode(self, sequences: Sequence[SequenceState]) -> torch.Tensor:
        """Compute the one new token of each sequence: logits fp32 [B, V]."""
        for s in sequences:
            if len(s.token_ids) != s.num_computed + 1:
                raise ValueError(
                    "decode: expected one new token in each sequence, got "
                    f"{len(s.token_ids) - s.num_computed}"
                )
        self._make_room(sequences)
        return self._step(sequences, [1] * len(sequences), len(sequences))

    def release(self, sequence: SequenceState) -> None:
        """Give a sequence's blocks back, and the residuals that tokens in them have."""
        self.release_residuals(sequence.block_ids)
        self.blocks.release(sequence.block_ids)
        if self.watch is not None:
            self.watch.release(sequence)

    def _make_room(self, sequences: Sequence[SequenceState]) -> None:
        for s in sequences:
            if len(s.token_ids) > self.max_positions:
                raise ValueError(
                    f"runner: expected at most {self.max_positions} tokens in a sequence, got "
                    f"{len(s.token_ids)}"
                )
            self.blocks.grow(s.block_ids, len(s.token_ids))
            if self.watch is not None:
                self.watch.take(s)

    @torch.inference_mode()
    def step(
        self, arrays: StepArrays, num_logits: int | None, marks: Ints | None = None
    ) -> torch.Tensor:
        """One step of whatever sequences: logits in fp32; see ``forward`` for ``num_logits``.

        The caller knows which blocks of the cache belong to whom, and, with a fallback, which slots
        (``marks``, see ``Watch.step``).
        """
        for graphs in (self.prompts, self.pieces):
            if graphs is not None and graphs.fits(arrays):
                return graphs.logits(arrays, num_logits).float()
        watching = None
        if self.watch is not None and marks is not None:
            watching = self.watch.step(self.ops, marks)
        ops = watching or self.ops
        if self.routing is not None:
            ops = self.routing.step(ops)
        ids, positions = (
            torch.from_numpy(x).to(self.device, non_blocking=True)
            for x in (arrays.input_ids, arrays.positions)
        )
        meta = metadata(arrays, self.device, sdpa=self.ops is not tkernels)
        with cpu_threads(self._cpu_threads(len(arrays.context_lens), len(ids))):
            logits = forward(
                self.model,
                ops,
                ids,
                positions,
                self.cos_sin_cache,
                self.cache,
                meta,
                num_logits=num_logits,
            )
        if watching is not None:
            watching.end()
        return logits.float()

    def release_residuals(self, blocks: Sequence[int]) -> None:
        """Give the residuals back that tokens in these blocks have, if the cache has any."""
        parts = [part for part in self.cache.quantized if part.has_residual]
        if parts and blocks:
            named = torch.tensor(blocks, dtype=torch.int32, device=self.device)
            for part in parts:
                self.ops.release_residual_slots(part.slots, part.free_slots, part.free_count, named)

    def _step(
        self, sequences: Sequence[SequenceState], new: list[int], num_logits: int | None
    ) -> torch.Tensor:
        """The next ``new[i]`` tokens of sequence i; see ``forward`` for ``num_logits``."""
        arrays = step_arrays(sequences, new)
        marks = None if self.watch is None else self.watch.marks(sequences, new)
        logits = self.step(arrays, num_logits, marks)
        for s, n in zip(sequences, new, strict=True):
            s.num_computed += n
        return logits

    def _cpu_threads(self, num_sequences: int, num_tokens: int) -> int:
        """A number that sizes alone decide: logits differ in their last bits with it."""
        if self.device.type == "cpu" and num_tokens > num_sequences:
            return prompt_threads(self.model, num_tokens)
        return torch.get_num_threads()


def split_prefill(missing: Sequence[int], limit: int) -> list[list[tuple[int, int]]]:
    """Steps of at most ``limit`` tokens that compute ``missing[i]`` tokens of sequence i.

    In order: one sequence after the other, each in as few pieces as that allows. So at most one
    sequence of a step, its last, goes on in the next.

    Returns:
        For each step its (sequence, tokens).

    >>> split_prefill([5, 2, 3], 4)
    [[(0, 4)], [(0, 1), (1, 2), (2, 1)], [(2, 2)]]
    """
    steps: list[list[tuple[int, int]]] = []
    room = 0
    for i, count in enumerate(missing):
        while count:
            if room == 0:
                steps.append([])
                room = limit
            taken = min(count, room)
            steps[-1].append((i, taken))
            count, room = count - taken, room - taken
    return steps
