"""Continuous batching: requests come at any time, each step computes a token of all that run.

A step takes one token of every request whose prompt is computed, and fills what is left of
``max_num_batched_tokens`` with chunks of prompts, in one call of the network. Requests start in
order of (priority, arrival), a lower priority first; none overtakes.

    pages       16 tokens each, shared where prefixes agree (model/pages.py). A request starts when
                all pages are there that it is expected to need, beside those that the running ones
                still will: its prompt's and ``reserve`` times those of its remaining tokens. A
                reserve of 1 preempts nobody for want of pages; less packs more requests.
    preemption  where pages run out, or a request of a better priority waits, the last request in
                the order gives its pages back and waits again. Its tokens stay, and are computed
                again as a prompt is; full pages that are still in the cache are found.
    n samples   of a prompt share its full pages. Of the last, partly filled page each sample gets a
                copy; in a cache with residuals, which belong to one page alone, its tokens, 15 at
                most, are computed again.
    prefixes    a page is found as soon as a step is going to fill it, also by a request that starts
                in that step: keys and values are written before they are read, layer by layer.

A greedy answer does not depend on what else runs, but for rounding: steps of other sizes sum in
another order, so two tokens whose logits agree to the last bits may change places. Drawn tokens
depend on the request's seed and their position alone, in the same sense. What holds for a quantised
cache is said in CONTRIBUTING.md, "The engine", what for a runner with fallback in
model/watched_requests.py: with one no request finds another's pages, whose keys may be of 16 bits.
"""

from __future__ import annotations

import dataclasses
import itertools
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from model.batch import Batch
from model.graph import DecodeGraphs, Step, batch_sizes
from model.kv_cache import BLOCK_SIZE, Ints, StepArrays
from model.loop import Limits, check_prompt
from model.pages import PagePool
from model.runner import Runner
from model.sampler import SamplingParams, penalise_repetition, sample_rows
from model.scheduler import OnToken, Request, Scheduler, pages_of
from model.threads import cpu_threads
from model.tokenizer import Detokenizer
from model.watched_requests import WatchedRequests
from tkernels import device

GREEDY = SamplingParams()

Told = tuple[OnToken, int, int, str]


@dataclass
class Answer:
    """One sample of a request. ``finish_reason``: eos, stop, length, cancelled."""

    id: int
    sample: int
    prompt_tokens: int
    token_ids: list[int]
    finish_reason: str
    text: str = ""  # where the engine has a tokeniser
    fallback: dict[str, Any] | None = None  # why it left int8, as ``Watch.told`` says it


@dataclass(frozen=True)
class Early:
    """A step that was launched before the tokens of the one before it were read."""

    step: Step
    rows: Ints  # of the batch
    entries: Ints  # whose stay in these rows it was
    positions: Ints

    def places(self, batch: Batch, rows: Ints) -> Ints | None:
        """Where it computes the next token of ``rows``; None where it does not for all of them."""
        at = np.full(len(batch.entry), -1)
        at[self.rows] = np.arange(len(self.rows))
        places: Ints = at[rows]
        same = self.entries[places] == batch.entry[rows]
        same &= self.positions[places] == batch.num_computed[rows]
        return places if bool((same & (places >= 0)).all()) else None


class Engine:
    """Requests in, answers out. Takes all blocks of the runner's cache.

    Args:
        max_num_seqs: requests that run at once, at most.
        max_num_batched_tokens: tokens of a step, at most.
        prompt_tokens_beside: of those, tokens of prompts in a step in which others decode, whose
            next token waits for them; None: as many as fit. The longer prompts are, the more each
            of their tokens costs.
        prefix_cache: whether requests find the pages of others that begin like them; with a runner
            with fallback they never do.
        reserve: share of a request's remaining tokens for which pages are kept when it starts.
        tokenizer: for text; without one there are tokens only, and no ``Limits.stop``.
        graphs: capture steps in which each request computes one token (model/graph.py), those with
            a prompt (model/prompt_graphs.py) and, in pieces, those with several (model/pieces.py),
            which waits until kernels are compiled.
    """

    def __init__(
        self,
        runner: Runner,
        *,
        max_num_seqs: int = 64,
        max_num_batched_tokens: int = 2048,
        prompt_tokens_beside: int | None = None,
        prefix_cache: bool = True,
        reserve: float = 1.0,
        tokenizer: Any = None,
        graphs: bool = False,
    ) -> None:
        if not 1 <= max_num_seqs <= max_num_batched_tokens:
            raise ValueError(
                "engine: expected max_num_seqs from 1 to max_num_batched_tokens = "
                f"{max_num_batched_tokens}, got {max_num_seqs}"
            )
        if prompt_tokens_beside is not None and prompt_tokens_beside < 1:
            raise ValueError(
                "engine: expected prompt_tokens_beside to be None or 1 or more, got "
                f"{prompt_tokens_beside}"
            )
        if not 0 <= reserve <= 1:
            raise ValueError(f"engine: expected a reserve from 0 to 1, got {reserve}")
        runner.blocks.grow([], runner.num_blocks * BLOCK_SIZE)  # nobody else may use them
        self.runner, self.tokenizer = runner, tokenizer
        shares = prefix_cache and runner.watch is None
        self.pool = PagePool(runner.num_blocks, prefix_cache=shares)
        self.batch = Batch(max_num_seqs, runner.max_positions, max_num_batched_tokens)
        self.graphs = _captured(runner, max_num_seqs) if graphs else None
        if graphs:
            runner.capture_prompts(max_num_batched_tokens, max_num_seqs)
        self._scheduler = Scheduler(
            self.pool, self.batch, max_num_batched_tokens, reserve, prompt_tokens_beside
        )
        self.counts = self._scheduler.counts
        self.watched: WatchedRequests | None = None
        if runner.watch is not None:
            self.watched = WatchedRequests(
                runner.watch, max_num_seqs, max_num_batched_tokens, self._scheduler.of_row
            )
        self._live: dict[int, list[Request]] = {}
        self._ended: list[Answer] = []  # and not returned yet
        self._early: Early | None = None
        self._arrivals = itertools.count()
        self._broken = False

    # ---- what callers do -----------------------------------------------------------------------

    def add(
        self,
        prompt: Sequence[int],
        params: SamplingParams = GREEDY,
        limits: Limits | None = None,
        *,
        n: int = 1,
        priority: int = 0,
        on_token: OnToken | None = None,
    ) -> int:
        """A new request, which starts with a later step: its number.

        Args:
            params: how its tokens are drawn; without a seed the system's entropy chooses one.
            limits: when it ends; without them after 16 tokens or the model's end of sequence.
            n: samples of the prompt, each with random numbers of its own.
            priority: a lower number goes first, and may preempt a higher one.
            on_token: called with each token as it comes.

        Raises:
            ValueError: the request could never run.
        """
        config, pool = self.runner.model.config, self.pool.num_pages
        limits = limits or Limits(16, frozenset(config.eos_token_ids))
        most = self.runner.max_positions
        check_prompt(len(prompt), most)
        tokens = np.array(prompt, dtype=np.int64)
        if not 0 <= tokens.min() <= tokens.max() < config.vocab_size:
            raise ValueError(
                f"engine: expected token ids from 0 to {config.vocab_size - 1}, got "
                f"{tokens.min()} to {tokens.max()}"
            )
        if n < 1 or limits.max_tokens < 1:
            raise ValueError(
                f"engine: expected n and max_tokens of 1 or more, got {n} and {limits.max_tokens}"
            )
        if limits.stop and self.tokenizer is None:
            raise ValueError("engine: expected a tokenizer for stop texts, got none")
        end = min(len(prompt) + limits.max_tokens, most)
        if pages_of(end - 1) > pool:  # the last token is not put into the cache
            raise ValueError(
                f"engine: expected a prompt and new tokens that fit the cache's {pool} blocks of "
                f"{BLOCK_SIZE} tokens, got {len(prompt)} and up to {end - len(prompt)}"
            )
        number = next(self._arrivals)
        seed = secrets.randbits(63) if params.seed is None else params.seed
        request = Request(
            priority, number, 0, tokens.astype(np.int32), len(prompt), params, limits, end, seed, n,
            self._detokenizer(limits, on_token), on_token,
        )  # fmt: skip
        self._live[number] = [request]
        self._scheduler.wait(request)
        return number

    def cancel(self, number: int) -> None:
        """End a request: the next step returns what its samples have. One that ended stays so.

        Samples that have not begun, as the prompt is not computed yet, give no answer.
        """
        for request in list(self._live.get(number, ())):
            self._ended.append(self._finish(request, "cancelled"))

    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._live or self._ended)

    @torch.inference_mode()
    def step(self) -> list[Answer]:
        """Compute a token of each running request: the answers that ended.

        Raises:
            RuntimeError: a step before failed (out of memory, say): the cache lacks what it was to
                compute.
        """
        if self._broken:
            raise RuntimeError("engine: expected a new engine after a step that failed, got a step")
        rows, new = self._scheduler.schedule()
        if len(rows):
            self._compute(rows, new)
        ended, self._ended = self._ended, []
        return ended

    def _compute(self, rows: Ints, new: Ints) -> None:
        self._broken = True  # until all that was scheduled is computed
        self._release_residuals()
        batch = self.batch
        # All but the last have a token to draw: chunks take what is left of the step in order.
        ended = batch.num_computed[rows] + new == batch.num_tokens[rows]
        drawing = int(ended.sum())
        assert ended[:drawing].all()
        arrays, drawn, logits = batch.step(rows, new), None, None
        one_each, marks = drawing == len(rows) == len(arrays.input_ids), None
        if self.watched is not None:
            marks = self.watched.marks(rows, new, arrays.positions)
            one_each = one_each and bool((marks == rows).all())  # graphs watch all their tokens
        self.counts.steps += 1
        self.counts.computed_tokens += int(new.sum())
        self.counts.attended_tokens += int(arrays.context_lens.sum())
        early, self._early = self._early, None
        if self.graphs is None or not one_each:
            logits = self.runner.step(arrays, drawing, marks)
            batch.num_computed[rows] += new
        else:
            places = None if early is None else early.places(batch, rows)
            if early is None or places is None:  # nobody foresaw this step
                places = np.arange(len(rows))
                step = self._launch(
                    rows, arrays, None if marks is None else marks[0], self._wants_logits(rows)
                )
            else:
                step = early.step
            batch.num_computed[rows] += new
            if step.kind == "logits":
                logits = step.logits()
            else:
                self._early = self._launch_early(rows, places)
                drawn = np.array(step.ids())[places]
        told = self._draw(rows[:drawing], logits, drawn) if drawing else []
        self._broken = False
        for listener, sample, token, piece in told:  # last, as listeners may cancel requests
            listener(sample, token, piece)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] = GREEDY,
        limits: Limits | None = None,
        *,
        n: int = 1,
    ) -> list[Answer]:
        """Answers to prompts, in order; the samples of one prompt follow one another."""
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else params
        numbers = [self.add(p, one, limits, n=n) for p, one in zip(prompts, each, strict=True)]
        answers: dict[int, list[Answer]] = {number: [] for number in numbers}
        others: list[Answer] = []
        while any(number in self._live for number in numbers):
            for answer in self.step():
                answers.get(answer.id, others).append(answer)
        self._ended += others  # of requests that were added before: a step returns them
        return [a for i in numbers for a in sorted(answers[i], key=lambda a: a.sample)]

    # ---- what comes of a step ------------------------------------------------------------------

    def _launch(self, rows: Ints, arrays: StepArrays, groups: Ints | None, logits: bool) -> Step:
        assert self.graphs is not None
        return self.graphs.decode(
            arrays.input_ids,
            arrays.positions,
            arrays.slot_mapping,
            arrays.block_table,
            arrays.context_lens,
            self.batch.choice(rows),
            groups=groups,
            logits=logits,
        )

    def _launch_early(self, rows: Ints, places: Ints) -> Early | None:
        """The step behind the one on its way, which computes ``rows`` in its rows ``places``.

        Its tokens are not known yet, so the device takes those that it has just chosen. Where the
        host comes to another step than was foreseen, nothing of this one is used: what it writes is
        written again, or lies in pages whose next owner writes before it reads.
        """
        if self.watched is not None or self._wants_logits(rows):
            return None
        going = self._scheduler.look_ahead(rows)
        if not len(going):
            return None
        self._release_residuals()
        arrays = self.batch.step(going, np.ones(len(going), np.int64))
        arrays.input_ids[:] = -1 - places[np.isin(rows, going, assume_unique=True)]
        step = self._launch(going, arrays, None, logits=False)
        return Early(step, going, self.batch.entry[going], arrays.positions.copy())

    def _release_residuals(self) -> None:
        """Of pages that were given back."""
        self.runner.release_residuals(self.pool.stale)
        self.pool.stale.clear()

    def _wants_logits(self, rows: Ints) -> bool:
        """Whether a graph cannot choose: seen tokens count, or one prompt gets several tokens."""
        special = (self._scheduler.of_row(row) for row in rows[self.batch.special[rows]])
        return any(r.params.repetition_penalty != 1 or r.samples > 1 for r in special)

    def _draw(
        self, rows: Ints, logits: torch.Tensor | None, drawn: Ints | None = None
    ) -> list[Told]:
        """A token for each row, and for the other samples of a prompt that is computed now.

        Args:
            drawn: the tokens, where a graph chose them; there are no logits then.

        Returns:
            What listeners have to be told.
        """
        batch = self.batch
        special = {
            i: self._scheduler.of_row(rows[i]) for i in np.flatnonzero(batch.special[rows]).tolist()
        }
        children: list[tuple[int, Request]] = []
        for i, request in special.items():
            penalty = request.params.repetition_penalty
            if penalty != 1 and logits is not None:
                penalise_repetition(logits[i], batch.tokens_of(rows[i]).tolist(), penalty)
            children += [(i, child) for child in self._children(request)]
        own, keys = rows, batch.key[rows]
        if children and logits is not None:
            parents = np.array([i for i, _ in children])
            rows = np.concatenate((rows, rows[parents]))
            keys = np.concatenate((keys, np.array([c.key for _, c in children], np.int64)))
            logits = torch.cat((logits, logits[torch.from_numpy(parents).to(logits.device)]))
        if logits is not None:
            with cpu_threads(1):  # a row of the vocabulary is little work
                drawn = sample_rows(logits, batch.sampling(rows, keys, logits.device)).cpu().numpy()
        assert drawn is not None
        self.counts.new_tokens += len(drawn)
        eos = (drawn[:, None] == batch.eos_ids[rows]).any(axis=1)
        full = batch.num_tokens[rows] + 1 >= batch.end[rows]
        told: list[Told] = []

        def reason(i: int, request: Request) -> str:
            return self._take(request, int(drawn[i]), bool(eos[i]), bool(full[i]), told)

        for i, (at, child) in enumerate(children, start=len(own)):
            self._fork(self._scheduler.of_row(own[at]), child, int(drawn[i]), reason(i, child))
        batch.tokens[own, batch.num_tokens[own]] = drawn[: len(own)]
        batch.num_tokens[own] += 1
        for i in np.flatnonzero((eos | full)[: len(own)] | batch.special[own]).tolist():
            request = self._scheduler.of_row(own[i])
            if why := reason(i, request):
                self._ended.append(self._finish(request, why))
        return told

    def _children(self, request: Request) -> list[Request]:
        """The other samples of a request whose prompt has been computed, if there are any."""
        made = [
            dataclasses.replace(
                request,
                sample=sample,
                samples=1,
                names=request.names[: request.prompt_tokens // BLOCK_SIZE],
                detokenizer=self._detokenizer(request.limits, request.on_token),
                row=-1,
            )
            for sample in range(1, request.samples)
        ]
        if made:
            self._live[request.arrival] += made
            request.samples = 1
            row = request.row
            self.batch.special[row] = request.special
            self.batch.target_blocks[row] = self._scheduler.target(request)
        return made

    def _fork(self, parent: Request, child: Request, token: int, why: str) -> None:
        """Another sample goes on from the prompt that its parent has just computed."""
        prompt = parent.prompt_tokens
        child.tokens = np.append(self.batch.tokens[parent.row, :prompt], np.int32(token))
        if self.watched is not None:
            self.watched.fork(parent, child)
        if why:
            self._ended.append(self._finish(child, why))
            return
        page = self._scheduler.fork(parent, child)
        if page is not None and not self.runner.cache.has_residuals:
            source = self.batch.blocks_of(parent.row)[prompt // BLOCK_SIZE]
            self.runner.cache.copy_block(source, page)
            self.batch.num_computed[child.row] = prompt

    def _take(
        self,
        request: Request,
        token: int,
        eos: bool,
        full: bool,
        told: list[Told],
    ) -> str:
        """A request's new token becomes text: why it ends here, if it does."""
        why, piece, text = "eos" if eos else "", "", request.detokenizer
        if text is not None:
            piece = text.finish() if eos else text.push(token)
            why = "stop" if text.stopped else why
        if full and not why:
            why = "length"
            piece += text.finish() if text is not None else ""
        request.text += piece
        if request.on_token is not None:
            told.append((request.on_token, request.sample, token, piece))
        return why

    def _finish(self, request: Request, why: str) -> Answer:
        fell = None if self.watched is None else self.watched.leave(request)
        if request.row >= 0:
            self._scheduler.leave(request)
        request.over = True
        live = self._live[request.arrival]
        live.remove(request)
        if not live:
            del self._live[request.arrival]
        ids = request.tokens[request.prompt_tokens :].tolist()
        text = request.text
        if request.detokenizer is None and self.tokenizer is not None:
            whole = Detokenizer(self.tokenizer)
            whole.ids = ids[:-1] if why == "eos" else ids
            text = whole.finish()
        elif request.detokenizer is not None and why == "cancelled":
            text += request.detokenizer.finish()
        return Answer(request.arrival, request.sample, request.prompt_tokens, ids, why, text, fell)

    def _detokenizer(self, limits: Limits, on_token: OnToken | None) -> Detokenizer | None:
        """For requests whose text is wanted token by token; others get it at the end."""
        if self.tokenizer is None or not (limits.stop or on_token):
            return None
        return Detokenizer(self.tokenizer, limits.stop)


def _captured(runner: Runner, max_num_seqs: int) -> DecodeGraphs:
    kinds, limit = ("greedy", "narrowed", "logits"), device.most_graphs()
    return DecodeGraphs(
        runner.model,
        runner.ops,
        runner.cache,
        runner.cos_sin_cache,
        sizes=batch_sizes(max_num_seqs, None if limit is None else limit // len(kinds)),
        max_blocks=-(-runner.max_positions // BLOCK_SIZE),
        kinds=kinds,
        watch=runner.watch,
    )
