"""What each scheme of ``python -m model.quantize`` costs in quality, and what it gains.

    python -m model.weight_quality --model path/to/Qwen3-0.6B --text held_out.txt

A table: bytes of the decoder's linear layers, routers and experts, perplexity, KL divergence from
the checkpoint itself (nats a token), agreement on the likeliest token, and decoded tokens a second
on the CPU. The first --tokens tokens of the text are cut into windows of --context tokens, each a
context of its own.
Every row is written by ``model.quantize`` into a temporary folder and read back. Rows are computed
in fp32; the last one shows the 16-bit checkpoint in 16 bits. --sensitive adds a row of w8a8 without
the layers that ``python -m model.sensitivity`` flagged. Of a network with experts one row of w4a16
leaves these in 16 bits.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from model.checkpoint import Checkpoint
    from model.qwen3 import Model

PROMPT, ROUNDS = 32, 3  # of the timing: tokens before the decoded ones, turns


@dataclass
class Row:
    """A checkpoint that is measured."""

    name: str
    model: Model
    linear_bytes: int  # of routers and experts too
    kept: int  # linear layers that are not quantised
    loss: float = 0.0  # sums over predicted tokens; kl over all of them
    kl: float = 0.0
    agreed: float = 0.0
    steps_s: tuple[float, ...] = ()


def make_rows(
    checkpoint: Checkpoint,
    folder: Path,
    maxima: dict[str, Any],
    sensitive: set[str] | None,
    alpha: float,
    say: Callable[[str], None],
) -> list[Row]:
    """All schemes, written below ``folder`` and loaded."""
    import torch

    from model.checkpoint import open_checkpoint
    from model.quantize_plan import all_experts, make_plan
    from model.quantize_write import write_folder
    from model.smooth import smoothing_factors
    from model.weights import load_model

    nothing: set[str] = set()
    wanted: list[tuple[str, str | None, set[str], bool]] = [
        ("16 bits", None, nothing, False),
        ("w8a8", "w8a8", nothing, False),
        (f"w8a8, smooth {alpha:g}", "w8a8", nothing, True),
        ("w8a16", "w8a16", nothing, False),
        ("w4a16", "w4a16", nothing, False),
    ]
    if checkpoint.config.mixture is not None:
        experts = {all_experts(layer) for layer in checkpoint.config.mixture.layers}
        wanted.append(("w4a16, experts in 16 bits", "w4a16", experts, False))
    if sensitive is not None:
        wanted[2:2] = [("w8a8, sensitive", "w8a8", sensitive, False)]
        wanted[4:4] = [(f"w8a8, both, smooth {alpha:g}", "w8a8", sensitive, True)]
    rows, cpu = [], torch.device("cpu")
    for index, (name, scheme, kept, smooth) in enumerate(wanted):
        say(f"writing {name}")
        plan = make_plan(checkpoint.config, scheme, kept)
        factors = smoothing_factors(checkpoint, plan, maxima, alpha) if smooth else {}
        where = folder / str(index)
        where.mkdir()
        counts = write_folder(checkpoint, where, plan, factors)
        found = open_checkpoint(where)
        dtypes = [torch.float32] if scheme else [torch.float32, torch.bfloat16]
        for dtype in dtypes:
            model = load_model(found.config, found.source, dtype=dtype, device=cpu)
            shown = name if dtype == torch.float32 else f"{name}, in bfloat16"
            size = counts["linear_bytes"] + counts["expert_bytes"]
            rows.append(Row(shown, model, size, len(plan.kept) if scheme else 0))
    rows.append(rows.pop(1))
    return rows


def decode_times(model: Model, ops: Any, ids: list[int], steps: int) -> tuple[float, ...]:
    """Seconds of ``steps`` decode steps of one sequence after a prompt."""
    from model.kv_cache import BLOCK_SIZE, SequenceState
    from model.runner import Runner

    longest = len(ids) + steps
    runner = Runner(model, ops, num_blocks=-(-longest // BLOCK_SIZE), max_positions=longest)
    sequence = SequenceState(list(ids))
    logits = runner.prefill([sequence])
    times = []
    for _ in range(steps):
        sequence.token_ids.append(int(logits.argmax()))
        begin = time.perf_counter()
        logits = runner.decode([sequence])
        times.append(time.perf_counter() - begin)
    return tuple(times)


def measure(
    rows: list[Row], truth: Model, ops: Any, windows: list[list[int]], steps: int, threads: int,
    say: Callable[[str], None],
) -> list[dict[str, Any]]:  # fmt: skip
    """The rows' figures; the times take turns."""
    from model.perplexity import divergence, logits_of, perplexity_of
    from model.threads import cpu_threads

    for number, ids in enumerate(windows, start=1):
        say(f"window {number} of {len(windows)}")
        exact, _ = logits_of(truth, ops, ids)
        for row in rows:
            logits, _ = logits_of(row.model, ops, ids)
            kl, agreed = divergence(logits, exact)
            row.loss += math.log(perplexity_of(logits, ids)) / len(windows)
            row.kl += kl / len(windows)
            row.agreed += agreed / len(windows)
    with cpu_threads(threads):
        for turn in range(ROUNDS if steps else 0):
            say(f"timing, turn {turn + 1} of {ROUNDS}")
            for row in rows:
                row.steps_s += decode_times(row.model, ops, windows[0][:PROMPT], steps)[1:]
    base = rows[0]
    return [
        {
            "name": row.name,
            "linear_bytes": row.linear_bytes,
            "share_of_16_bits": row.linear_bytes / base.linear_bytes,
            "kept_layers": row.kept,
            "perplexity": math.exp(row.loss),
            "perplexity_rise": math.exp(row.loss - base.loss) - 1,
            "kl": row.kl,
            "top1_agreement": row.agreed,
            "tokens_per_s": 1 / statistics.median(row.steps_s) if row.steps_s else None,
        }
        for row in rows
    ]


def main(argv: list[str] | None = None) -> int:
    """Exit codes: 0 done, 2 wrong input, 130 interrupted."""
    parser = argparse.ArgumentParser(
        prog="python -m model.weight_quality",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--model",
        type=Path,
        help="Hugging Face folder or .gguf file (default: SmolLM2-135M-Instruct)",
    )
    add("--text", type=Path, metavar="FILE", help="held-out text; default: pydoc_data.topics")
    add("--tokens", type=int, default=4096, help="of the text (default 4096)")
    add("--context", type=int, default=1024, help="tokens of a window (default 1024)")
    add("--sensitive", type=Path, metavar="FILE", help="of python -m model.sensitivity")
    add("--smooth", type=float, default=0.5, metavar="ALPHA", help="(default 0.5)")
    add(
        "--calibration",
        type=Path,
        metavar="FILE",
        help="text for --smooth; default: pydoc_data.topics, its end where --text is its start",
    )
    add("--decode", type=int, default=64, metavar="N", help="tokens a turn to time; 0: none (64)")
    add("--threads", type=int, default=1, help="of the timing (default 1)")
    add("--json", action="store_true", help="print rows as JSON lines")
    args = parser.parse_args(argv)
    try:
        rows = _rows(args)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    if args.json:
        for row in rows:
            print(json.dumps(row))
        return 0
    print("| scheme | kept | linear MB | of 16 bits | perplexity | rise | KL | top-1 | tok/s |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    for row in rows:
        speed = "-" if row["tokens_per_s"] is None else f"{row['tokens_per_s']:.1f}"
        print(
            f"| {row['name']} | {row['kept_layers']} | {row['linear_bytes'] / 1e6:.1f} "
            f"| {row['share_of_16_bits']:.3f} | {row['perplexity']:.4f} "
            f"| {row['perplexity_rise']:+.2%} | {row['kl']:.2e} | {row['top1_agreement']:.2%} "
            f"| {speed} |"
        )
    return 0


def _rows(args: argparse.Namespace) -> list[dict[str, Any]]:
    import torch

    from model.checkpoint import default_path, open_checkpoint
    from model.perplexity import read_text
    from model.quantize_plan import read_sensitive
    from model.runner import operations
    from model.smooth import activation_maxima
    from model.tokenizer import encode
    from model.weights import load_model

    for name, least in (("tokens", 2), ("context", 2), ("decode", 0), ("threads", 1)):
        if vars(args)[name] < least:
            raise ValueError(f"--{name} must be at least {least}, got {vars(args)[name]}")
    if not 0 < args.smooth < 1:
        raise ValueError(f"--smooth must be above 0 and below 1, got {args.smooth}")
    _, ops = operations("torch")
    checkpoint = open_checkpoint(args.model or default_path())
    config = checkpoint.config
    if config.quantization is not None:
        raise ValueError(f"{args.model}: expected an unquantised checkpoint, got a quantised one")
    sensitive = None if args.sensitive is None else read_sensitive(args.sensitive, config)
    ids = encode(checkpoint.tokenizer, read_text(args.text))
    calibration = encode(checkpoint.tokenizer, read_text(args.calibration))[-2048:]
    context = min(args.context, config.max_position_embeddings)
    wanted = args.tokens - args.tokens % context
    if not 0 < wanted <= len(ids):
        raise ValueError(
            f"expected a text of {args.tokens} tokens, at least one window of {context}, got "
            f"{len(ids)}"
        )
    windows = [ids[i : i + context] for i in range(0, wanted, context)]

    def say(line: str) -> None:
        print(line, file=sys.stderr)

    truth = load_model(config, checkpoint.source, dtype=torch.float32, device=torch.device("cpu"))
    say(f"calibrating on {len(calibration)} tokens")
    maxima: dict[str, torch.Tensor] = {}
    for start in range(0, len(calibration), context):
        found = activation_maxima(truth, ops, calibration[start : start + context])
        maxima = {name: x.maximum(maxima.get(name, x)) for name, x in found.items()}
    with tempfile.TemporaryDirectory(prefix="weight-quality-") as folder:
        rows = make_rows(checkpoint, Path(folder), maxima, sensitive, args.smooth, say)
        return measure(rows, truth, ops, windows, args.decode, args.threads, say)


if __name__ == "__main__":
    sys.exit(main())
