"""Next-token choice: greedy, temperature, top-k, top-p, min-p, repetition penalty.

Each step of the chain is what ``transformers`` calls a logits processor, in its order: repetition
penalty, temperature, top-k, top-p, min-p. Every request draws from a generator of its own, so its
tokens do not depend on what else is in the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class SamplingParams:
    """How to choose a token. ``temperature`` 0 is greedy; the other defaults change nothing."""

    temperature: float = 0.0
    top_k: int = 0  # keep the k likeliest; 0: all
    top_p: float = 1.0  # keep the likeliest that together reach p
    min_p: float = 0.0  # drop what is less likely than min_p times the likeliest
    repetition_penalty: float = 1.0  # > 1: tokens seen before (prompt included) become less likely
    seed: int | None = None

    def __post_init__(self) -> None:
        limits = {
            "temperature": (self.temperature >= 0, "at least 0"),
            "top_k": (self.top_k >= 0, "at least 0"),
            "top_p": (0 < self.top_p <= 1, "above 0 and at most 1"),
            "min_p": (0 <= self.min_p <= 1, "from 0 to 1"),
            "repetition_penalty": (self.repetition_penalty > 0, "above 0"),
        }
        for name, (fine, expected) in limits.items():
            if not fine:
                raise ValueError(f"sampling: {name} must be {expected}, got {getattr(self, name)}")


def new_generator(seed: int | None, device: torch.device) -> torch.Generator:
    """A request's generator: seeded, or from the system's entropy where ``seed`` is None."""
    generator = torch.Generator(device=device)
    if seed is None:
        generator.seed()
    else:
        generator.manual_seed(seed)
    return generator


def sample(
    logits: torch.Tensor,
    params: SamplingParams,
    histories: Sequence[Sequence[int]],
    generators: Sequence[torch.Generator],
) -> list[int]:
    """One token for each sequence.

    Args:
        logits: fp32 [B, V].
        histories: tokens of each sequence so far, prompt included (for the repetition penalty).
        generators: one a sequence, not used when greedy.
    """
    if params.repetition_penalty != 1.0:
        logits = logits.clone()
        for row, history in zip(logits, histories, strict=True):
            penalise_repetition(row, history, params.repetition_penalty)
    if params.temperature == 0:
        return [int(t) for t in logits.argmax(dim=-1).tolist()]
    kept = restrict(logits, params)
    drawn = [
        torch.multinomial(row.softmax(dim=-1), 1, generator=generator)
        for row, generator in zip(kept, generators, strict=True)
    ]
    return [int(t) for t in torch.cat(drawn).tolist()]


def penalise_repetition(row: torch.Tensor, history: Sequence[int], penalty: float) -> None:
    """Divide positive and multiply negative logits of seen tokens (arXiv 1909.05858), in place."""
    seen = torch.tensor(sorted(set(history)), device=row.device)
    values = row[seen]
    row[seen] = torch.where(values > 0, values / penalty, values * penalty)


def restrict(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Scale [B, V] by temperature, then set to -inf what top-k, top-p and min-p drop."""
    scores = logits / params.temperature
    if 0 < params.top_k < scores.shape[-1]:
        least = scores.topk(params.top_k, dim=-1).values[:, -1:]
        scores = scores.masked_fill(scores < least, -torch.inf)
    if params.top_p < 1:
        # Ascending, so that the tail to drop is where the running sum is still <= 1 - p.
        ascending, order = scores.sort(dim=-1)
        tail = ascending.softmax(dim=-1).cumsum(dim=-1) <= 1 - params.top_p
        tail[:, -1] = False  # the likeliest always stays
        scores = scores.masked_fill(tail.scatter(1, order, tail), -torch.inf)
    if params.min_p > 0:
        probs = scores.softmax(dim=-1)
        scores = scores.masked_fill(
            probs < params.min_p * probs.amax(dim=-1, keepdim=True), -torch.inf
        )
    return scores
