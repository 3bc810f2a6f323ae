"""Next-token choice: greedy, temperature, top-k, top-p, min-p, repetition penalty.

Each step of the chain is what ``transformers`` calls a logits processor, in its order: repetition
penalty, temperature, top-k, top-p, min-p. Every request draws from random numbers of its own, so
its tokens do not depend on what else is in the batch.

There is no generator: the number that belongs to (the request's key, the token's position, the
candidate) is computed from these three. ``sample_rows`` serves a row of parameters a request, all
rows in the same operations, so that it may stand in a captured graph (model/graph.py); ``sample``
serves requests of one ``SamplingParams``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

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


def sample(
    logits: torch.Tensor,
    params: SamplingParams,
    histories: Sequence[Sequence[int]],
    keys: Sequence[int],
) -> list[int]:
    """One token for each sequence.

    Args:
        logits: fp32 [B, V].
        histories: tokens of each sequence so far, prompt included.
        keys: of ``request_key``, one a sequence; not used when greedy.
    """
    if params.repetition_penalty != 1.0:
        logits = logits.clone()
        for row, history in zip(logits, histories, strict=True):
            penalise_repetition(row, history, params.repetition_penalty)
    rows = alike(params, keys, [len(history) for history in histories], logits.device)
    return [int(t) for t in sample_rows(logits, rows).tolist()]


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


# ---- a row of parameters a request -------------------------------------------------------------


@dataclass
class SamplingRows:
    """Parameters of B requests, [B] each. ``any_*`` are known on the host: what all rows leave out
    is not computed."""

    temperature: torch.Tensor  # fp32; 0: greedy
    top_k: torch.Tensor  # int64; 0: all
    top_p: torch.Tensor  # fp32
    min_p: torch.Tensor  # fp32
    key: torch.Tensor  # int64, of ``request_key``
    position: torch.Tensor  # int64, of the token that is drawn
    any_drawn: bool = True
    any_narrowed: bool = True


def alike(
    params: SamplingParams, keys: Sequence[int], positions: Sequence[int], device: torch.device
) -> SamplingRows:
    """Rows of one ``SamplingParams``."""
    both = torch.tensor([list(keys), list(positions)]).to(device, non_blocking=True)

    def full(value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.full((len(keys),), value, dtype=dtype, device=device)

    return SamplingRows(
        full(params.temperature), full(params.top_k, torch.int64), full(params.top_p),
        full(params.min_p), both[0], both[1],
        any_drawn=params.temperature > 0,
        any_narrowed=params.top_k > 0 or params.top_p < 1 or params.min_p > 0,
    )  # fmt: skip


def request_key(seed: int, sample: int) -> int:
    """63 bits that look random, of a request's seed and the number of one of its samples."""
    text = f"{seed} {sample}".encode()
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "little") >> 1


def sample_rows(
    logits: torch.Tensor, rows: SamplingRows, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """One token a row: int64 [B] of logits fp32 [B, V]; nothing is read back to the host.

    A token is drawn as the candidate with the largest score - log(-log(1 - u)), u uniform: it has
    the probability that softmax gives it (Gumbel's trick), and no sum over candidates is rounded.
    """
    return torch.argmax(draw_scores(logits, rows), dim=-1, out=out)


def draw_scores(logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    """fp32 [B, V]: the candidate with the largest one is taken. Of greedy rows the logits."""
    if not rows.any_drawn:
        return logits
    drawn = rows.temperature > 0
    scores = logits / torch.where(drawn, rows.temperature, 1.0)[:, None]
    if rows.any_narrowed:
        scores = _narrow(scores, rows)
    # The numbers near 0 decide, and there fp32 is fine; 1 would be infinite.
    u = uniform(rows.key, rows.position, logits.shape[-1]).clamp_max_(1 - 2.0**-24)
    noise = torch.log(-torch.log1p(-u))
    return torch.where(drawn[:, None], scores - noise, logits)


def _narrow(scores: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    """-inf instead of what top-k, top-p and min-p drop. Of equal scores all stay, or none."""
    most = scores.shape[-1]
    ordered = scores.sort(dim=-1, descending=True).values
    last = torch.where((rows.top_k > 0) & (rows.top_k < most), rows.top_k, most) - 1
    ordered = ordered.masked_fill(ordered < ordered.gather(1, last[:, None]), -torch.inf)
    probs = ordered.softmax(dim=-1)
    # Of what is likelier; a p of 1 keeps all, come what may. CUDA sums one row alone by another
    # algorithm, whose order varies from run to run.
    several = probs if len(probs) > 1 else probs.expand(2, -1)
    before = several.cumsum(dim=-1)[: len(probs)] - probs
    kept = (before < rows.top_p[:, None]) | (rows.top_p >= 1)[:, None]
    kept &= (probs >= rows.min_p[:, None] * probs[:, :1]) & (ordered > -torch.inf)
    kept[:, 0] = True  # the likeliest always stays
    least = ordered.masked_fill(~kept, torch.inf).amin(dim=-1, keepdim=True)
    return scores.masked_fill(scores < least, -torch.inf)


_LOW = 0xFFFFFFFF


def _mix(x: torch.Tensor) -> torch.Tensor:
    """A permutation of 32-bit numbers (kept in int64) in which every bit moves every other.

    The constants are those that Wellons and Chisholm's search found ("hash prospector", 2018 on).
    """
    x = (x ^ x >> 16) * 0x21F0AAAD & _LOW
    x = (x ^ x >> 15) * 0x735A2D97 & _LOW
    return x ^ x >> 15


def uniform(key: torch.Tensor, position: torch.Tensor, count: int) -> torch.Tensor:
    """fp32 [B, count] in (0, 1], the same for the same key, position and column."""
    row = _mix(_mix(key & _LOW) ^ (position & _LOW))
    other = _mix(row ^ (key >> 32 & _LOW))
    column = torch.arange(count, device=key.device) * 0x9E3779B9
    bits = _mix(_mix((column + row[:, None]) & _LOW) ^ other[:, None])
    return (bits.float() + 0.5) * 2.0**-32
