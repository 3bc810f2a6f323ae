"""``python -m bench engine``: the engine under three loads."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any

from bench.model import options, pictures, scenarios
from bench.model.options import Document, Target, Tell
from bench.model.scenarios import Chunked, Mixed, Prefix, Setting
from bench.model.shapes import SHAPES
from bench.rows import UsageError, positive
from model import graph
from model.runner import operations
from tkernels import device

NAMES = ("mixed", "chunked", "prefix")
# What the engine is to reach: the most that these ratios may be.
GOALS = {"chunked": 3.0, "prefix": 0.15}

_EPILOG = """\
scenarios:
  mixed    requests of random lengths: tokens a second, share of the byte roof, idle share
  chunked  a long prompt arrives beside requests that decode: p99 of their tokens, before and during
  prefix   requests that share a prefix: time to the first token, of the first and of the others

examples:
  python -m bench engine --shape qwen3-0.6b --json engine.json --plot engine.png
  python -m bench engine --shape qwen3-8b --scenario chunked --chunk 256,512,2048
  python -m bench engine --scenario prefix --kv-cache int8
"""


def main(argv: Sequence[str]) -> int:
    """Exit codes: 0 done, 1 a scenario failed, 130 interrupted."""
    args = _parser().parse_args(list(argv))
    options.check(args, args.plot)
    if args.model and args.shape:
        raise UsageError("bench: --model must stand without --shape, got both")
    wanted = NAMES if args.scenario == "all" else (args.scenario,)
    shapes = options.shapes(args.shape)
    if args.shape and len(shapes) > 1:
        raise UsageError(f"bench: --shape must be one shape, got {args.shape!r}")
    with options.as_usage():
        kernels, ops = operations(args.kernels)
    loads = _loads(args, wanted)
    why_not = graph.obstacle(ops)
    if args.graphs and why_not:
        raise UsageError(f"bench: --graphs: {why_not}")
    one = options.target(shapes[0], args, kernels)
    most = one.config.max_position_embeddings
    for load in loads:
        if load.length > most:
            raise UsageError(
                f"bench: {type(load).__name__.lower()} requests must fit the {most} positions of "
                f"{one.name}, got {load.length} tokens"
            )
    document = Document("engine", args, args.json)
    with options.progress(len(loads)) as (tell, advance):
        tell(f"copy {document.roof.bytes_per_s / 1e9:.0f} GB/s in this run")
        try:
            _run(one, ops, kernels, args, loads, document, tell, advance)
        except KeyboardInterrupt:
            document.interrupted = True
    document.write()
    _print(document)
    if args.plot and document.rows:
        pictures.scenarios(document.rows, args.plot)
    if document.interrupted:
        print("bench: interrupted; what is above was measured before", file=sys.stderr)
        return 130
    return 1 if document.failures else 0


def _run(
    one: Target,
    ops: Any,
    kernels: str,
    args: argparse.Namespace,
    loads: Sequence[Mixed | Chunked | Prefix],
    document: Document,
    tell: Tell,
    advance: Callable[[], None],
) -> None:
    """All loads, one after another, on one set of weights."""
    tell(f"{one.name}: weights")
    try:
        model = one.load(args.seed)
    except (MemoryError, RuntimeError) as error:  # of which torch's OutOfMemoryError is one
        document.fail(one.name, error)
        return
    setting = Setting(
        model=model,
        ops=ops,
        quantization=one.quantization,
        graphs=not graph.obstacle(ops) and args.graphs is not False,
        seed=args.seed,
        rounds=args.rounds,
        roof=document.roof,
        tell=tell,
    )
    shared = {
        "shape": one.name,
        "kernels": kernels,
        "graphs": setting.graphs,
        "kv_cache": args.kv_cache,
    }
    for load in loads:
        _measure(setting, load, shared, document)
        advance()
    for load in loads:
        if isinstance(load, Mixed) and load.profiled_steps:
            _add_profile(setting, load, document)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench engine",
        description="Time the engine: many requests, a long prompt, a shared prefix.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    usual = "(default %(default)s here)"
    m, c, p = (Mixed(), Chunked(), Prefix())
    if device.tensor_device().type == "cpu":
        m = Mixed(6, (4, 12), (2, 8), max_num_seqs=4, max_num_batched_tokens=32, profiled_steps=4)
        c = Chunked(long_prompt=96, decoding=3, input=6, before=8, step_tokens=24)
        p = Prefix(requests=4, prefix=64, tail=4, output=4, max_num_batched_tokens=128)
    add("--shape", help=f"one of {', '.join(SHAPES)} (default: qwen3-0.6b, on a CPU tiny)")
    add("--scenario", choices=(*NAMES, "all"), default="all", help="(default all)")
    add("--kernels", choices=("triton", "torch"), help="default: torch on a CPU, else triton")
    add(
        "--graphs",
        action=argparse.BooleanOptionalAction,
        help="capture the steps in which each request computes a token (default: where possible)",
    )
    more = parser.add_argument_group("mixed")
    add = more.add_argument
    add("--requests", type=positive, default=m.requests, help=usual)
    spans = "tokens, from LOW to HIGH at random"
    add("--input", default=_text(m.input), metavar="LOW:HIGH", help=f"{spans} {usual}")
    add("--output", default=_text(m.output), metavar="LOW:HIGH", help=f"{spans} {usual}")
    add("--max-num-seqs", type=positive, default=m.max_num_seqs, help=f"that run at once {usual}")
    add(
        "--max-num-batched-tokens",
        type=positive,
        default=m.max_num_batched_tokens,
        help=f"of a step {usual}",
    )
    add(
        "--profile-steps",
        type=int,
        default=m.profiled_steps,
        help=f"recorded for the idle share; 0: none {usual}",
    )
    more = parser.add_argument_group("chunked")
    add = more.add_argument
    add("--long-prompt", type=positive, default=c.long_prompt, help=f"tokens {usual}")
    add("--decoding", type=positive, default=c.decoding, help=f"requests beside it {usual}")
    add("--decoding-input", type=positive, default=c.input, help=f"tokens of theirs {usual}")
    add("--before", type=positive, default=c.before, help=f"steps timed before it comes {usual}")
    chunks = str(c.step_tokens) if c.step_tokens < 256 else "128,256,512,1024"
    add("--chunk", default=chunks, metavar="N,M", help=f"tokens of a step, at most, each {usual}")
    more = parser.add_argument_group("prefix")
    add = more.add_argument
    add("--prefix", type=positive, default=p.prefix, help=f"tokens in common {usual}")
    add("--prefix-requests", type=positive, default=p.requests, help=usual)
    add("--tail", type=positive, default=p.tail, help=f"tokens of each prompt of its own {usual}")
    add(
        "--prefix-output", type=positive, default=p.output, help=f"tokens that are compared {usual}"
    )
    add("--prefix-step-tokens", type=positive, default=p.max_num_batched_tokens, help=usual)
    options.add_options(parser)
    return parser


def _text(span: tuple[int, int]) -> str:
    return f"{span[0]}:{span[1]}"


def _span(option: str, text: str) -> tuple[int, int]:
    low, _, high = text.partition(":")
    if not (low.isdigit() and high.isdigit() and 1 <= int(low) <= int(high)):
        raise UsageError(f"bench: {option} must be LOW:HIGH like 100:1024, got {text!r}")
    return int(low), int(high)


def _loads(args: argparse.Namespace, wanted: Sequence[str]) -> list[Mixed | Chunked | Prefix]:
    loads: list[Mixed | Chunked | Prefix] = []
    if args.profile_steps < 0:
        raise UsageError(f"bench: --profile-steps must be 0 or more, got {args.profile_steps}")
    if args.prefix_requests < 2:
        raise UsageError("bench: --prefix-requests must be 2 or more, got 1")
    if "mixed" in wanted:
        loads.append(
            Mixed(
                args.requests,
                _span("--input", args.input),
                _span("--output", args.output),
                args.max_num_seqs,
                args.max_num_batched_tokens,
                args.profile_steps,
            )
        )
    if "chunked" in wanted:
        for tokens in options.numbers("--chunk", args.chunk):
            if tokens <= args.decoding:
                raise UsageError(
                    f"bench: --chunk must be more than --decoding={args.decoding}, got {tokens}"
                )
            loads.append(
                Chunked(args.long_prompt, args.decoding, args.decoding_input, args.before, tokens)
            )
    if "prefix" in wanted:
        sizes = args.prefix_requests, args.prefix, args.tail, args.prefix_output
        loads.append(Prefix(*sizes, args.prefix_step_tokens))
    return loads


def _measure(
    setting: Setting, load: Mixed | Chunked | Prefix, shared: dict[str, Any], document: Document
) -> None:
    try:
        row = (
            scenarios.mixed(setting, load)
            if isinstance(load, Mixed)
            else scenarios.chunked(setting, load)
            if isinstance(load, Chunked)
            else scenarios.prefix(setting, load)
        )
        document.add(shared | row)
    except Exception as error:  # whatever it is, the other scenarios are still worth measuring
        document.fail(f"{shared['shape']} {type(load).__name__.lower()}", error)
    finally:
        options.free_bytes()


def _add_profile(setting: Setting, load: Mixed, document: Document) -> None:
    """Of the mixed load, when all is timed: tracing slows launches down."""
    rows = [row for row in document.rows if row["scenario"] == "mixed"]
    if not rows or not options.start_profiler(setting.tell):
        return
    try:
        rows[0]["profile"] = scenarios.window(setting, load, rows[0]["steps"])
    except Exception as error:  # the times are worth telling without it
        document.fail("mixed profile", error)
    document.write()


# ---- what is told ------------------------------------------------------------------------------


def _print(document: Document) -> None:
    if not document.rows:
        print("bench: nothing was measured")
        return
    first = document.rows[0]
    print(
        f"{first['shape']}, kernels {first['kernels']}, graphs {'on' if first['graphs'] else 'off'}"
        f", KV cache {first['kv_cache']}"
    )
    for row in document.rows:
        print({"mixed": _mixed, "chunked": _chunked, "prefix": _prefix}[row["scenario"]](row))
    if any(row["scenario"] == "mixed" for row in document.rows):
        print(document.roof_line)


def _mixed(row: dict[str, Any]) -> str:
    p = row["profile"]
    idle = "not recorded" if p is None else f"{p['idle_share']:.1%} of {p['steps']} steps"
    estimate = " (experts: as many as even routing takes)" if row["experts_estimated"] else ""
    return (
        f"mixed    {row['requests']} requests, {row['input_tokens']} tokens in, "
        f"{row['output_tokens']} out: {row['wall_s']:.2f} s, {row['tokens_per_s']:.1f} tok/s out, "
        f"{row['all_tokens_per_s']:.1f} in and out, {row['steps']} steps, "
        f"{row['preemptions']} preemptions, {row['roof_share']:.1%} of roof{estimate}, device idle "
        f"{idle}"
    )


def _chunked(row: dict[str, Any]) -> str:
    return (
        f"chunked  {row['step_tokens']} tokens a step, a prompt of {row['long_prompt']} beside "
        f"{row['decoding']}: p99 of a token {row['before_p99_ms']:.2f} ms before, "
        f"{row['during_p99_ms']:.2f} during, ratio {row['ratio']:.2f} ({_goal(row)}); its first "
        f"token after {row['long_ttft_ms']:.1f} ms"
    )


def _prefix(row: dict[str, Any]) -> str:
    gap = "" if row["gap"] is None else f" (largest gap of logits where they part {row['gap']:.2g})"
    return (
        f"prefix   {row['requests']} requests, {row['prefix']} tokens in common: first token "
        f"{row['cold_ms']:.2f} ms cold, {row['warm_ms']:.2f} found, ratio {row['ratio']:.3f} "
        f"({_goal(row)}), {row['off_ms']:.2f} without the cache; {row['same_answers']} of "
        f"{row['requests']} answers the same with it and without{gap}"
    )


def _goal(row: dict[str, Any]) -> str:
    most = GOALS[row["scenario"]]
    return f"goal at most {most:g}: {'met' if row['ratio'] <= most else 'not met'}"
