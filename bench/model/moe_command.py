"""``python -m bench moe``: whole layers of experts, routing included, beside others' layers."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bench import report
from bench.model import moe, options
from bench.model.moe import FORMATS, ROUTINGS, Experts, Inputs, Load
from bench.model.moe_peers import PEERS
from bench.model.options import Document, Tell
from bench.model.shapes import SHAPES, config_of
from bench.roofline import Roof
from bench.rows import OURS, UsageError
from model.config import ModelConfig
from tkernels import device, testing
from tkernels.testing import Prepared

# Shapes that have experts.
_NAMES = tuple(name for name in SHAPES if "num_experts" in SHAPES[name])
# Times the usual one: they round the sum after each expert, and what they make codes of.
_PEER_TOLERANCE = {"bf16": 3, "w8a8": 6}
_OUR_TOLERANCE = 2  # what is rounded on the way may be rounded another way

_EPILOG = """\
providers: tkernels (ours), and the peers torch (torch._grouped_mm, launched operation by operation,
with the host's time), vllm and triton_kernels (where they are installed). All but torch are timed
in captured graphs. They take turns, round by round, on the same weights and inputs; a result that
differs from the reference is told, not timed.

examples:
  python -m bench moe --json moe.json
  python -m bench moe --tokens 1,64 --routing zipf --weights bf16 --peers torch,vllm
"""


@dataclass(frozen=True)
class Goal:
    """What a layer of Qwen3-30B-A3B is to reach on an H100: ``figure`` at most or at least."""

    tokens: int
    weights: str
    figure: str
    limit: float
    text: str
    at_least: bool = False

    def met(self, value: float) -> bool:
        return value >= self.limit if self.at_least else value <= self.limit


GOALS = (
    Goal(1, "bf16", "us", 45, "us"),
    Goal(64, "bf16", "roof_share", 0.86, "of copy", at_least=True),
    Goal(512, "bf16", "of_torch", 0.6, "of torch"),
    Goal(4096, "bf16", "tflops", 480, "TFLOP/s", at_least=True),
    Goal(64, "w8a8", "of_bf16", 0.58, "of bf16"),
    Goal(4096, "w8a8", "of_bf16", 0.65, "of bf16"),
)


def main(argv: Sequence[str]) -> int:
    """Exit codes: 0 done, 1 something was wrong or could not be measured, 130 interrupted."""
    args = _parser().parse_args(list(argv))
    options.check(args)
    names = options.words("--shape", args.shape, _NAMES)
    tokens = options.numbers("--tokens", args.tokens)
    routings = options.words("--routing", args.routing, ROUTINGS)
    formats = options.words("--weights", args.weights, FORMATS)
    device.require_triton()
    peers = _peers(args.peers)
    document = Document("moe", args, args.json)
    with options.progress(len(names) * len(tokens) * len(routings)) as (tell, advance):
        tell(f"copy {document.roof.bytes_per_s / 1e9:.0f} GB/s in this run")
        try:
            for name in names:
                layer = Layer.of(name, formats, peers, args, document, tell)
                for count in tokens:
                    for routing in routings:
                        layer.measure(count, routing)
                        advance()
        except KeyboardInterrupt:
            document.interrupted = True
    document.write()
    _print(document)
    if document.interrupted:
        print("bench: interrupted; the rows above are those measured before", file=sys.stderr)
        return 130
    return 1 if document.failures else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench moe",
        description="Time a layer of experts: routing, both products, the sum.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    on_cpu = device.tensor_device().type == "cpu"
    shape, tokens, rounds = ("tiny-moe", "1,5", 1) if on_cpu else (_NAMES[0], "1,64,512,4096", 20)
    usual = "(default %(default)s here)"
    add("--shape", default=shape, metavar="A,B", help=f"of {', '.join(_NAMES)} {usual}")
    add("--tokens", default=tokens, metavar="N,M", help=f"of one call {usual}")
    add("--routing", default=",".join(ROUTINGS), metavar="A,B", help=usual)
    add("--weights", default=",".join(FORMATS), metavar="A,B", help=usual)
    add(
        "--peers",
        metavar="A,B",
        help=f"of {', '.join(PEERS)}, or none (default: those that are installed)",
    )
    options.add_run_options(parser, rounds=rounds)
    return parser


def _peers(asked: str | None) -> list[str]:
    """Names of the peers to time; one that was asked for by name must be there."""
    if asked == "none":
        return []
    found = []
    for name in list(PEERS) if asked is None else options.words("--peers", asked, tuple(PEERS)):
        why_not = PEERS[name].why_not()
        if why_not is None:
            found.append(name)
        elif asked is not None:
            raise UsageError(f"bench: --peers {name} must be importable, got {why_not}")
        else:
            print(f"bench: peer {name} is left out: {why_not}", file=sys.stderr)
    return found


# ---- measuring ---------------------------------------------------------------------------------

Run = Callable[[Inputs], torch.Tensor]
Key = tuple[str, str]  # weights, provider


@dataclass
class Layer:
    """A layer of one network, its weights on the device in each format."""

    name: str
    config: ModelConfig
    experts: Mapping[str, Experts]
    peers: Sequence[str]
    args: argparse.Namespace
    document: Document
    tell: Tell

    @classmethod
    def of(
        cls,
        name: str,
        formats: Sequence[str],
        peers: Sequence[str],
        args: argparse.Namespace,
        document: Document,
        tell: Tell,
    ) -> Layer:
        tell(f"{name}: weights")
        config = config_of(name)
        plain = moe.random_experts(config, args.seed, device.tensor_device())
        made = {name: moe.in_format(plain, name) for name in formats}
        return cls(name, config, made, peers, args, document, tell)

    def measure(self, tokens: int, routing: str) -> None:
        """All providers on all formats, in turn; a row each, also where Ctrl-C ends the rounds."""
        title = f"{self.name} {tokens} tokens {routing}"
        self.tell(f"{title}: getting ready")
        given = moe.inputs(
            self.config,
            tokens,
            routing,
            count=2 if device.KIND == "cpu" else 16,
            seed=self.args.seed,
            dev=device.tensor_device(),
        )
        ready: dict[Key, Prepared] = {}
        samples: dict[Key, list[float]] = {}
        interrupted = False
        try:
            for weights in self.experts:
                ready |= self._ready(weights, given, title)
            samples = {key: [] for key in ready}
            for number in range(self.args.rounds):
                self.tell(f"{title}: round {number + 1} of {self.args.rounds}")
                for key, one in ready.items():
                    samples[key].append(1e3 * one.sample())
        except KeyboardInterrupt:
            interrupted = True
        shared = {
            "shape": self.name,
            "tokens": tokens,
            "routing": routing,
            "inputs": len(given),
            **dataclasses.asdict(Load.of(given, self.config)),
        }
        done = {key: found for key, found in samples.items() if found}
        for row in figures(done, self.experts, shared, self.document.roof):
            key = row["weights"], row["provider"]
            row |= {"method": ready[key].method, "about": _about(row["provider"])}
            self.document.add(row)
        ready.clear()  # graphs, and the memory in them
        options.free_bytes()
        if interrupted:
            raise KeyboardInterrupt

    def _ready(self, weights: str, given: Sequence[Inputs], title: str) -> dict[Key, Prepared]:
        """Providers whose result for the first input is that of the reference."""
        experts = self.experts[weights]
        truth = moe.expected(experts, given[0]).float()
        found = {}
        for name in (OURS, *(p for p in self.peers if weights in PEERS[p].formats)):
            factor = _OUR_TOLERANCE if name == OURS else _PEER_TOLERANCE[weights]
            try:
                run: Run = functools.partial(moe.ours, experts)
                if name != OURS:
                    run = PEERS[name].make(experts)
                testing.assert_close(run(given[0]), truth, what="result", factor=factor)
                calls = [functools.partial(run, one) for one in given]
                captured = name == OURS or PEERS[name].captured
                found[weights, name] = testing.prepared(calls, capture=captured)
            except Exception as error:  # one that fails must not cost the others
                self.document.fail(f"{title} {weights} {name}", error)
        return found


@functools.cache
def _about(provider: str) -> str:
    return "" if provider == OURS else PEERS[provider].about()


def figures(
    samples: Mapping[Key, Sequence[float]],
    experts: Mapping[str, Experts],
    shared: Mapping[str, Any],
    roof: Roof,
) -> list[dict[str, Any]]:
    """A row for each provider of ``samples`` (microseconds of one call)."""
    medians = {key: statistics.median(found) for key, found in samples.items()}

    def over(us: float, *other: str) -> float | None:
        weights, provider = other
        base = medians.get((weights, provider))
        return None if base is None else us / base

    rows = []
    for (weights, provider), found in samples.items():
        us = medians[weights, provider]
        num_bytes = shared["experts"] * experts[weights].expert_bytes
        flops = experts[weights].flops(shared["tokens"])
        rows.append(
            {
                **shared,
                "weights": weights,
                "provider": provider,
                "rounds": len(found),
                "us": us,
                "least_us": min(found),
                "q10_us": moe.quantile(found, 0.1),
                "q90_us": moe.quantile(found, 0.9),
                "bytes": num_bytes,
                "flops": flops,
                "gbps": num_bytes / us / 1e3,
                "tflops": flops / us / 1e6,
                "roof_share": num_bytes / roof.bytes_per_s / us * 1e6,
                "of_torch": over(us, "bf16", "torch"),
                "of_bf16": None if weights == "bf16" else over(us, "bf16", provider),
            }
        )
    return rows


# ---- what is told ------------------------------------------------------------------------------

_COLUMNS = (
    *("tokens", "routing", "experts", "weights", "provider", "us", "least", "q10..q90"),
    *("TFLOP/s", "GB/s", "of copy", "of torch", "of bf16", "method"),
)


def _print(document: Document) -> None:
    rows = document.rows
    if not rows:
        print("bench: nothing was measured")
        return
    for name in dict.fromkeys(row["shape"] for row in rows):
        print(name)
        here = [row for row in rows if row["shape"] == name]
        report.print_table(_COLUMNS, [_cells(row) for row in here], sys.stdout)
        if name == _NAMES[0]:
            _print_goals(here)
    if device.KIND == "cpu":
        print("on a CPU these times mean nothing")
    print(
        f"us: of one call, medians over {rows[0]['rounds']} rounds of the mean of "
        f"{rows[0]['inputs']} routings; experts: that have tokens; GB/s: bytes of their weights; "
        f"of copy: those over this run's own copy bandwidth, "
        f"{document.roof.bytes_per_s / 1e9:.0f} GB/s read plus written; of torch: time over "
        "that of torch with bf16; of bf16: over the same provider's"
    )
    for name in dict.fromkeys(row["provider"] for row in rows):
        if _about(name):
            print(f"{name}: {_about(name)}")


def _cells(row: dict[str, Any]) -> list[str]:
    def ratio(name: str) -> str:
        return "" if row[name] is None else f"{row[name]:.3f}"

    return [
        str(row["tokens"]),
        row["routing"],
        f"{row['experts']:.1f}",
        row["weights"],
        row["provider"],
        f"{row['us']:.2f}",
        f"{row['least_us']:.2f}",
        f"{row['q10_us']:.2f}..{row['q90_us']:.2f}",
        f"{row['tflops']:.4g}",
        f"{row['gbps']:.0f}",
        f"{row['roof_share']:.1%}",
        *(ratio(name) for name in ("of_torch", "of_bf16")),
        row["method"],
    ]


def _print_goals(rows: Sequence[dict[str, Any]]) -> None:
    for goal in GOALS:
        for row in rows:
            same = (row["tokens"], row["weights"], row["provider"])
            value = row[goal.figure]
            if same != (goal.tokens, goal.weights, OURS) or value is None:
                continue
            bound = "at least" if goal.at_least else "at most"
            met = "met" if goal.met(value) else "not met"
            print(
                f"{goal.tokens} tokens {row['routing']} {goal.weights}: {value:.4g} {goal.text}, "
                f"goal on an H100 {bound} {goal.limit:g}: {met}"
            )
