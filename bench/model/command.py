"""``python -m bench model``: time to the first token and per token of whole networks."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import tkernels
from bench import report
from bench.model import options, peer, pictures
from bench.model.cell import OURS, Cell
from bench.model.options import Document, Target, Tell
from bench.model.shapes import SHAPES, kv_bytes_per_token
from bench.rows import UsageError, positive
from model import graph
from tkernels import device

_SPARE_BYTES = 6 << 30  # for activations, graphs, and the libraries' own

_EPILOG = """\
variants: graph (our kernels, the step captured and replayed), eager (our kernels, no graph), torch
(the PyTorch reference of each kernel, no graph), and with --peer transformers its generate with its
own cache and with a static one, whose step it compiles. They take turns, round by round.

examples:
  python -m bench model                                  all shapes that fit this device
  python -m bench model --shape qwen3-8b --batch 1,64 --kv-cache int8 --json now.json
  python -m bench model --shape qwen3-8b --weights w4a16
  python -m bench model --shape qwen3-0.6b --peer transformers --plot roof.png --profile step.png
  python -m bench model --model PATH                     a checkpoint instead of random weights
"""


def main(argv: Sequence[str]) -> int:
    """Exit codes: 0 done, 1 something could not be measured, 130 interrupted."""
    args = _parser().parse_args(list(argv))
    options.check(args, args.plot, args.profile)
    if args.model and args.shape:
        raise UsageError("bench: --model must stand without --shape, got both")
    if args.weights and args.peer:
        raise UsageError("bench: --peer takes weights of 16 bits, got --weights too")
    least = 4 if args.profile else 2
    if args.output < least:
        raise UsageError(
            f"bench: --output must be {least} or more to time or profile a token, got {args.output}"
        )
    batches = options.numbers("--batch", args.batch)
    names = _variants(args)
    kernels = "triton" if any(OURS.get(name) == "triton" for name in names) else "torch"
    targets = [options.target(name, args, kernels) for name in _names(args)]
    for one in targets:
        most = one.config.max_position_embeddings
        if args.input + args.output > most:
            raise UsageError(
                f"bench: --input and --output must fit the {most} positions of {one.name}, got "
                f"{args.input} and {args.output}"
            )
    document = Document("model", args, args.json)
    total = len(targets) * len(batches)
    with options.progress(total) as (tell, advance):
        tell(f"copy {document.roof.bytes_per_s / 1e9:.0f} GB/s in this run")
        try:
            for one in targets:
                _measure_target(one, batches, names, args, document, tell, advance)
            if args.profile:
                _profile_all(targets, batches, args, document, tell)
        except KeyboardInterrupt:
            document.interrupted = True
    document.write()
    print_rows(document)
    if args.plot and document.rows:
        pictures.roof(document.as_dict(), args.plot)
    profiled = [row for row in document.rows if row["profile"]]
    if args.profile and profiled:
        pictures.kernels([(_title(row), row["profile"]) for row in profiled], args.profile)
    if document.interrupted:
        print("bench: interrupted; the rows above are those measured before", file=sys.stderr)
        return 130
    return 1 if document.failures else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench model",
        description="Time networks of random weights: first token, tokens, share of the roof.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    on_cpu = device.tensor_device().type == "cpu"
    batches, tokens_in, tokens_out = ("1,2", 8, 8) if on_cpu else ("1,16,64", 128, 256)
    usual = "(default %(default)s here)"
    add("--shape", metavar="A,B", help=f"of {', '.join(SHAPES)} (default: all that fit)")
    add("--batch", metavar="N,M", default=batches, help=f"sequences computed together {usual}")
    add("--input", type=positive, default=tokens_in, help=f"prompt tokens {usual}")
    add("--output", type=positive, default=tokens_out, help=f"new tokens {usual}")
    add("--variants", metavar="A,B", help=f"of {', '.join(OURS)} (default: all possible here)")
    add("--peer", choices=("transformers",), help="time it too, on the same weights")
    add(
        "--patience",
        type=positive,
        default=60,
        metavar="SECONDS",
        help="a variant whose run would take longer gets shorter replies (default 60)",
    )
    add(
        "--profile",
        type=Path,
        metavar="FILE.png",
        help="when all is timed, draw the time of each kernel in a step of the first variant",
    )
    options.add_options(parser)
    return parser


def _names(args: argparse.Namespace) -> list[str]:
    """Shapes to measure, or one that stands for the checkpoint."""
    return ["checkpoint"] if args.model else options.shapes(args.shape)


def _variants(args: argparse.Namespace) -> list[str]:
    """What to time, ours first; the interpreter of kernels only where it is asked for by name."""
    on_cpu = device.tensor_device().type == "cpu"
    why_not = graph.obstacle(tkernels)
    if args.variants:
        names = options.words("--variants", args.variants, tuple(OURS))
        if "graph" in names and why_not:
            raise UsageError(f"bench: --variants graph: {why_not}")
    else:
        names = ["torch"] if on_cpu else [n for n in OURS if n != "graph" or not why_not]
    if any(OURS[name] == "triton" for name in names):
        device.require_triton()
    if args.peer:
        peer.check()
        names += [name for name in peer.NAMES if not on_cpu or name == "transformers"]
        if on_cpu:
            print(
                "bench: transformers-compile is left out: transformers compiles nothing on a CPU",
                file=sys.stderr,
            )
    return names


# ---- measuring ---------------------------------------------------------------------------------


def _measure_target(
    one: Target,
    batches: Sequence[int],
    names: Sequence[str],
    args: argparse.Namespace,
    document: Document,
    tell: Tell,
    advance: Callable[[], None],
) -> None:
    """All batches of one network; what does not fit the device is said and left out."""
    kernels = len({OURS[name] for name in names if name in OURS}) + any(
        n in peer.NAMES for n in names
    )
    token = kv_bytes_per_token(one.config, one.dtype) * (args.input + args.output)
    fitting = [
        n
        for n in batches
        if one.weight_bytes + kernels * n * token + _SPARE_BYTES <= options.free_bytes()
    ]
    for n in batches:
        if n not in fitting:
            tell(f"{one.name} with {n} sequences is left out: this device has too little memory")
            advance()
    if not fitting:
        return
    tell(f"{one.name}: weights")
    try:
        model = one.load(args.seed)
    except (MemoryError, RuntimeError) as error:  # of which torch's OutOfMemoryError is one
        document.fail(one.name, error)
        return
    for n in fitting:
        cell = Cell(one, model, n, args, document, tell)
        try:
            cell.measure(names)
        except Exception as error:  # whatever it is, the next batch is still worth measuring
            document.fail(cell.title, error)
        finally:
            cell.close()
        advance()


def _profile_all(
    targets: Sequence[Target],
    batches: Sequence[int],
    args: argparse.Namespace,
    document: Document,
    tell: Tell,
) -> None:
    """Add a profile to the first row of each network and batch.

    After all times have been taken, on weights made once more: tracing slows launches down.
    """
    if not options.start_profiler(tell):
        return
    for one in targets:
        rows = {
            n: row
            for row in reversed(document.rows)
            for n in batches
            if (row["shape"], row["batch"]) == (one.name, n) and row["variant"] in OURS
        }
        if not rows:
            continue
        tell(f"{one.name}: weights")
        model = one.load(args.seed)
        for n, row in sorted(rows.items()):
            cell = Cell(one, model, n, args, document, tell)
            try:
                row["profile"] = cell.profile(row["variant"])
            except Exception as error:  # the times are worth telling without it
                document.fail(f"{cell.title} profile", error)
            finally:
                cell.close()
            if row["profile"] is None:
                tell(f"{cell.title}: no profile: nothing was recorded")
            document.write()


# ---- what is told ------------------------------------------------------------------------------

_COLUMNS = (
    *("shape", "batch", "variant", "out", "TTFT ms", "ms/token", "p99 ms", "tok/s"),
    *("GB/s", "of roof", "same"),
)


def print_rows(document: Document) -> None:
    """The table, and what its columns mean."""
    if not document.rows:
        print("bench: nothing was measured")
        return
    report.print_table(_COLUMNS, [_cells(row) for row in document.rows], sys.stdout)
    first = document.rows[0]
    print(
        f"{first['input']} tokens in, out: those of each reply; all prompts at once; TTFT: until "
        "the first token of all; ms/token: median of all steps after it; tok/s: of whole runs; "
        f"same: replies like those of the first variant\n{document.roof_line}"
    )
    for row in document.rows:
        if row["profile"]:
            p = row["profile"]
            print(
                f"{_title(row)}: {p['busy_us']:.0f} us of kernels a step, "
                f"device idle {p['idle_share']:.1%}"
            )


def _cells(row: dict[str, Any]) -> list[str]:
    return [
        row["shape"],
        str(row["batch"]),
        row["variant"],
        str(row["output"]),
        *(f"{row[name]:.2f}" for name in ("ttft_ms", "token_ms", "token_p99_ms")),
        *(f"{row[name]:.1f}" for name in ("tokens_per_s", "gbps")),
        f"{row['roof_share']:.1%}",
        f"{row['same_replies']:.0%}",
    ]


def _title(row: dict[str, Any]) -> str:
    return f"{row['shape']}, batch {row['batch']}, {row['variant']}"
