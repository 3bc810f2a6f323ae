"""One network with one batch: its variants, made ready, timed in turn, and told in rows."""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bench.model import decode, options, peer, profile
from bench.model.decode import Prompts, Sample, Variant
from bench.model.options import Document, Target, Tell
from model.graph import DecodeGraphs
from model.qwen3 import Model
from model.runner import Runner, operations
from tkernels import device

OURS = {"graph": "triton", "eager": "triton", "torch": "torch"}  # and whose kernels they are
_SHORT = 8  # tokens that make a variant ready of which nothing more is compiled later
_PROFILED = 8  # steps


@dataclass
class Timed:
    """A variant that is ready, the tokens of its replies, and its runs so far."""

    variant: Variant
    output: int
    samples: list[Sample]


class Cell:
    """One network with one batch. ``close`` gives back what it took of the device."""

    def __init__(
        self,
        one: Target,
        model: Model,
        batch: int,
        args: argparse.Namespace,
        document: Document,
        tell: Tell,
    ) -> None:
        self.target, self.model, self.batch = one, model, batch
        self.args, self.document, self.tell = args, document, tell
        self.title = f"{one.name} batch {batch}"
        drawn, vocabulary = random.Random(f"{args.seed} {batch}"), range(model.config.vocab_size)
        self.prompts: Prompts = [drawn.choices(vocabulary, k=args.input) for _ in range(batch)]
        self._runners: dict[str, Runner] = {}
        self._graphs: DecodeGraphs | None = None
        self._network: Any = None  # of transformers

    def measure(self, names: Sequence[str]) -> None:
        """Time these variants; each becomes a row, also where Ctrl-C ends the rounds."""
        ready: list[Timed] = []
        interrupted, experts, kv_bytes = False, 0.0, 0.0
        try:
            self.tell(f"{self.title}: getting ready")
            kernels = next((OURS[name] for name in names if name in OURS), "torch")
            runner = self._runner(kernels)
            kv_bytes = runner.cache.statistics()["bytes_per_token"]
            counted = self.args.output if kernels == "triton" else self._short
            experts = decode.experts_read(runner, self.prompts, counted)
            ready += (timed for name in names if (timed := self._ready(name)) is not None)
            self._rounds(ready)
        except KeyboardInterrupt:
            interrupted = True
        done = [timed for timed in ready if timed.samples]
        for timed in done:
            self._add_row(timed, done[0], experts, kv_bytes)
        if interrupted:
            raise KeyboardInterrupt

    def close(self) -> None:
        self._runners.clear()
        self._graphs = None
        if self._network is not None:
            self._network = None
            peer.forget_compiled()
        options.free_bytes()

    @property
    def _short(self) -> int:
        return min(int(self.args.output), _SHORT)

    def _rounds(self, ready: Sequence[Timed]) -> None:
        """All variants take turns; one that fails is left out from then on."""
        failed: set[str] = set()
        for number in range(self.args.rounds):
            for timed in ready:
                name = timed.variant.name
                if name in failed:
                    continue
                self.tell(f"{self.title}: round {number + 1} of {self.args.rounds}, {name}")
                try:
                    timed.samples.append(timed.variant.run(timed.output))
                except Exception as error:  # a variant that fails must not cost the others
                    self.document.fail(f"{self.title} {name}", error)
                    failed.add(name)

    def _ready(self, name: str) -> Timed | None:
        """A variant that has run once, so kernels are compiled and graphs captured; None: failed.

        Its replies are shorter than asked for where a run would take longer than ``--patience``.
        """
        self.tell(f"{self.title}: getting {name} ready")
        try:
            variant = self._variant(name)
            found = variant.run(variant.warm)
        except Exception as error:  # as above
            self.document.fail(f"{self.title} {name}", error)
            return None
        # The last steps, as those before may have compiled something.
        step_s = statistics.median(found.seconds[len(found.seconds) // 2 :])
        most = max(self._short, int(self.args.patience / step_s))
        return Timed(variant, min(self.args.output, most), [])

    def _variant(self, name: str) -> Variant:
        prompts, whole = self.prompts, self.args.output
        if name in peer.NAMES:
            if self._network is None:
                self._network = peer.build(self.model)
            static, network = name != "transformers", self._network
            # The static cache is as long as the reply, and each length compiles anew.
            warm = whole if static else self._short
            return Variant(name, lambda n: peer.run(network, prompts, n, static=static), warm)
        runner = self._runner(OURS[name])
        if name == "graph" and self._graphs is None:
            self._graphs = decode.captured(runner, self.batch)
        graphs = self._graphs if name == "graph" else None
        # Without graphs a longer context may take other configs, which compile then.
        warm = whole if name == "eager" else self._short
        return Variant(
            name, lambda n: decode.timed(decode.replies(runner, prompts, n, graphs)), warm
        )

    def _runner(self, kernels: str) -> Runner:
        if kernels not in self._runners:
            length = self.args.input + self.args.output
            self._runners[kernels] = decode.new_runner(
                self.model, operations(kernels)[1], self.batch, length, self.target.quantization
            )
        return self._runners[kernels]

    def _add_row(self, timed: Timed, first: Timed, experts: float, kv_bytes: float) -> None:
        name, args = timed.variant.name, self.args
        found = decode.figures(
            timed.samples,
            self.model,
            args.input,
            experts=experts,
            kv_bytes=kv_bytes,
            roof=self.document.roof,
        )
        self.document.add(
            {
                "shape": self.target.name,
                "batch": self.batch,
                "variant": name,
                "input": args.input,
                "output": timed.output,
                "dtype": str(self.target.dtype).partition(".")[2],
                "kv_cache": "none" if name in peer.NAMES else args.kv_cache,
                **found,
                "same_as": first.variant.name,
                "same_replies": decode.agreement(timed.samples[-1], first.samples[-1]),
                "profile": None,
            }
        )

    def profile(self, name: str) -> dict[str, Any] | None:
        """Kernels of some decode steps of a variant of ours; None where nothing was recorded."""
        self.tell(f"{self.title}: profile of {name}")
        runner = self._runner(OURS[name])
        graphs = decode.captured(runner, self.batch) if name == "graph" else None
        output = min(self.args.output, _PROFILED + 3)
        count = output - 3
        for _ in range(2):  # the first makes ready
            steps = decode.replies(runner, self.prompts, output, graphs)
            next(steps)  # the prompts
            # With graphs each step launches the one after it, the first of them two, the last none.
            next(steps)
            with device.profiled() as intervals:
                for _ in range(count):
                    next(steps)
            steps.close()
        return profile.figures(intervals, count)
