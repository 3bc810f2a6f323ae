"""Command line: what the dynamic fallback compares a request's activations with, from a text.

Watched are the inputs of ``down_proj`` of some layers: unless ``--layers`` names them, the four
whose windows (below) have the least skewness at their worst, because some layers are skewed by
themselves, and hardly any text would pass there. The text's first ``--tokens`` tokens, in
contexts of at most 1024, are computed twice. The first pass takes mean and standard deviation, and
the range: all but one value in 1000 lie in it, the outer bins hold the others. The second makes the
histogram, with half a count added to each bin.

Then windows of 64 tokens are judged as a request's are: of the calibration text, and of
``--held-out`` tokens behind it, which says how often nothing but another text would be an alarm.
The limits that are written are 0.02 nats of KL and a skewness of 3, or what ``--kl`` and
``--skewness`` say; with ``--fit M`` each is raised to M times the largest that a window of the
calibration text has.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from model.fallback import Calibration
    from model.qwen3 import Model

EXAMPLES = """examples:
  python -m model.calibrate_watch --model DIR --fit 1.5 --out watch.safetensors
  python -m model.generate --model DIR --fallback watch.safetensors --json
"""
CONTEXT = 1024  # tokens that attend to one another, at most
KL, SKEWNESS = 0.02, 3.0
OUTSIDE = 0.0005  # of values, on either side of the range
_SAMPLE = 2**22  # values whose quantiles are taken, at most
_NEVER = 1e30  # a limit that nothing is above


def calmest(found: torch.Tensor, layers: tuple[int, ...], count: int = 4) -> tuple[int, ...]:
    """Places in ``layers`` of those whose windows are least skewed at their worst, in order."""
    worst = found[1].abs().amax(1)
    return tuple(sorted(worst.argsort(stable=True)[:count].tolist()))


class _Tap:
    """The operations ``ops``, with ``see(layer, x)`` told of the inputs of ``down_proj``."""

    skinny_linear = None  # activations that it takes along would not be seen

    def __init__(self, ops: Any, num_layers: int, see: Callable[[int, torch.Tensor], None]) -> None:
        self._ops, self._num_layers, self._see, self._calls = ops, num_layers, see, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def silu_and_mul(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self._ops.silu_and_mul(x)
        self._see(self._calls % self._num_layers, y)
        self._calls += 1
        return y


def _pass(
    model: Model,
    ops: Any,
    ids: list[int],
    see: Callable[[int, torch.Tensor], None],
    on_tokens: Callable[[int], None] | None,
) -> None:
    """Compute ``ids`` in contexts of at most ``CONTEXT``, 64 tokens a step."""
    from model.fallback import WINDOW
    from model.kv_cache import BLOCK_SIZE, SequenceState
    from model.runner import Runner

    tap = _Tap(ops, model.config.num_layers, see)
    longest = min(CONTEXT, model.config.max_position_embeddings)
    for first in range(0, len(ids), longest):
        part = ids[first : first + longest]
        runner = Runner(
            model,
            tap,
            num_blocks=-(-len(part) // BLOCK_SIZE),
            max_positions=len(part),
            prefill_chunk=WINDOW,
        )
        runner.prefill([SequenceState(list(part))])
        if on_tokens is not None:
            on_tokens(len(part))


def calibrate(
    model: Model,
    ops: Any,
    ids: list[int],
    layers: tuple[int, ...],
    on_tokens: Callable[[int], None] | None = None,
) -> Calibration:
    """The calibration of a text, with the limits ``KL`` and ``SKEWNESS``."""
    import torch

    from model.fallback import BINS, Calibration

    place = {layer: w for w, layer in enumerate(layers)}
    sample: list[list[torch.Tensor]] = [[] for _ in layers]
    sums = torch.zeros(len(layers), 3, dtype=torch.float64)
    stride = max(1, len(ids) * model.config.intermediate_size // _SAMPLE)

    def first(layer: int, x: torch.Tensor) -> None:
        if layer in place:
            values = x.float().flatten()
            sample[place[layer]].append(values[::stride].cpu())
            wide = values.double()
            found = torch.stack([wide.new_tensor(float(wide.numel())), wide.sum(), wide @ wide])
            sums[place[layer]] += found.cpu()

    _pass(model, ops, ids, first, on_tokens)
    count, total, squares = sums.unbind(1)
    mean = total / count
    std = (squares / count - mean * mean).clamp_min(0).sqrt()
    facts = torch.empty(len(layers), 4)
    for w, values in enumerate(sample):
        ordered = torch.cat(values).sort().values
        outside = int(OUTSIDE * (len(ordered) - 1))
        low, high = float(ordered[outside]), float(ordered[-1 - outside])
        if not low < high:
            raise ValueError(
                f"expected inputs of layer {layers[w]}'s down_proj that differ, got {low} alone"
            )
        facts[w] = torch.tensor([low, BINS / (high - low), float(mean[w]), 1 / float(std[w])])
    counts = torch.zeros(len(layers), BINS, dtype=torch.int64)

    def second(layer: int, x: torch.Tensor) -> None:
        if layer in place:
            low, per_bin = facts[place[layer], :2].to(x.device)
            bins = ((x.float() - low) * per_bin).clamp_(0, BINS - 1).long().flatten()
            counts[place[layer]] += torch.bincount(bins, minlength=BINS).cpu()

    _pass(model, ops, ids, second, on_tokens)
    shares = counts.double() + 0.5
    shares /= shares.sum(1, keepdim=True)
    return Calibration(layers, facts, shares.float(), KL, SKEWNESS)


def windows(
    model: Model,
    ops: Any,
    ids: list[int],
    calibration: Calibration,
    on_tokens: Callable[[int], None] | None = None,
) -> torch.Tensor:
    """fp32 [2, W, n]: KL and skewness of each whole window of 64 tokens."""
    import torch

    from model.fallback import BINS, WINDOW

    place = {layer: w for w, layer in enumerate(calibration.layers)}
    device = model.norm.device
    facts, reference = calibration.facts.to(device), calibration.reference.to(device)
    found: list[list[torch.Tensor]] = [[] for _ in calibration.layers]

    def see(layer: int, x: torch.Tensor) -> None:
        if layer not in place or x.shape[0] < WINDOW:
            return
        w = place[layer]
        moments = torch.zeros(1, 1, 5, device=device)
        ops.watch_activations(
            x[None, :WINDOW],
            torch.zeros(WINDOW, dtype=torch.int32, device=device),
            facts[w : w + 1],
            reference[w : w + 1],
            torch.zeros(1, 1, BINS, dtype=torch.int32, device=device),
            moments,
            torch.zeros(1, 1, 4, dtype=torch.int32, device=device),
            torch.zeros(1, dtype=torch.int64, device=device),
            window=WINDOW,
            kl_above=_NEVER,
            skewness_above=_NEVER,
        )
        found[w].append(moments[0, 0, 3:].cpu())

    _pass(model, ops, ids, see, on_tokens)
    if not found[0]:
        return torch.zeros(2, len(found), 0)
    return torch.stack([torch.stack(rows) for rows in found]).permute(2, 0, 1)


def summary(found: torch.Tensor, calibration: Calibration) -> dict[str, Any]:
    """Of ``windows``: how many there are, how many alarms by either limit, and each figure's spread
    (least, median, most; of skewness regardless of its sign) over all windows and layers."""
    kl, skewness = found[0], found[1].abs()
    if not kl.numel():
        return {"windows": 0}
    over = {"kl": kl > calibration.kl_above, "skewness": skewness > calibration.skewness_above}
    either = over["kl"] | over["skewness"]

    def spread(t: torch.Tensor) -> list[float]:
        return [float(t.min()), float(t.median()), float(t.max())]

    return {
        "windows": kl.shape[1],
        "alarms": int(either.any(0).sum()),
        "alarms_by": {name: int(t.any(0).sum()) for name, t in over.items()},
        "alarms_a_layer": either.sum(1).tolist(),
        "kl": spread(kl),
        "skewness": spread(skewness),
    }


def main(argv: list[str] | None = None) -> int:
    """Exit codes: 0 done, 2 wrong input, 130 interrupted."""
    parser = argparse.ArgumentParser(
        prog="python -m model.calibrate_watch",
        description="What python -m model.generate --fallback compares activations with.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--model",
        type=Path,
        help="Hugging Face folder or .gguf file (default: SmolLM2-135M-Instruct)",
    )
    add("--out", type=Path, required=True, metavar="FILE", help="safetensors file to write")
    add("--text", type=Path, metavar="FILE", help="default: Python's pydoc_data.topics")
    add("--tokens", type=int, default=2048, help="tokens to calibrate with (default 2048)")
    add("--held-out", type=int, default=2048, help="tokens behind them to judge (default 2048)")
    add("--layers", metavar="N,...", help="layers to watch (default: the four least skewed)")
    add("--kl", type=float, default=KL, help=f"limit in nats (default {KL})")
    add("--skewness", type=float, default=SKEWNESS, help=f"limit (default {SKEWNESS:g})")
    add("--fit", type=float, metavar="M", help="limits: at least M times the calibration's most")
    add("--kernels", choices=("triton", "torch"), help="default: torch on a CPU, else triton")
    add("--dtype", choices=("float32", "bfloat16", "float16"), help="default: float32")
    add("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args(argv)
    try:
        found = _calibrate(args)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; nothing was written", file=sys.stderr)
        return 130
    if args.json:
        print(json.dumps(found))
        return 0
    print(
        f"wrote {args.out}: layers {found['layers']}, KL above {found['kl_above']:.4g} or skewness "
        f"above {found['skewness_above']:.4g} is an alarm"
    )
    for name in ("calibration", "held_out"):
        row = found[name]
        if row["windows"]:
            print(
                f"  {name}: {row['alarms']} of {row['windows']} windows are alarms (KL at most "
                f"{row['kl'][2]:.4g}, skewness at most {row['skewness'][2]:.4g})"
            )
    return 0


def _layers(text: str | None, num_layers: int) -> tuple[int, ...] | None:
    """The layers that ``--layers`` names, in order."""
    if text is None:
        return None
    try:
        layers = sorted({int(word) for word in text.split(",")})
    except ValueError:
        layers = []
    if not layers or layers[0] < 0 or layers[-1] >= num_layers:
        raise ValueError(f"--layers must be numbers from 0 to {num_layers - 1}, got {text!r}")
    return tuple(layers)


def _check(args: argparse.Namespace) -> None:
    for name, least in (("tokens", 64), ("held_out", 0)):
        if vars(args)[name] < least:
            option = name.replace("_", "-")
            raise ValueError(f"--{option} must be at least {least}, got {vars(args)[name]}")
    for name in ("kl", "skewness", "fit"):
        value = vars(args)[name]
        if value is not None and not 0 < value < 1e30:
            raise ValueError(f"--{name} must be above 0, got {value}")
    if args.out.is_dir() or not args.out.resolve().parent.is_dir():
        raise ValueError(f"--out must be a file in a folder that is there, got {args.out}")


def _calibrate(args: argparse.Namespace) -> dict[str, Any]:
    _check(args)

    import torch
    from rich.console import Console
    from rich.progress import Progress

    import tkernels
    from model.checkpoint import default_path, open_checkpoint
    from model.fallback import Calibration, refuse_experts
    from model.perplexity import read_text
    from model.runner import choose_dtype, operations
    from model.tokenizer import encode
    from model.weights import load_model

    text = read_text(args.text)
    kernels, ops = operations(args.kernels)
    checkpoint = open_checkpoint(args.model or default_path())
    config = checkpoint.config
    refuse_experts(config)
    layers = _layers(args.layers, config.num_layers)
    whole = encode(checkpoint.tokenizer, text)
    ids, held_out = whole[: args.tokens], whole[args.tokens : args.tokens + args.held_out]
    if len(ids) < args.tokens or len(held_out) < args.held_out:
        raise ValueError(
            f"expected a text of {args.tokens + args.held_out} tokens (--tokens, --held-out), got "
            f"{len(whole)}"
        )
    dtype = getattr(torch, choose_dtype(args.dtype, "float32", kernels, config))
    model = load_model(
        config, checkpoint.source, dtype=dtype, device=tkernels.device.tensor_device()
    )
    quiet = args.json or not sys.stderr.isatty()
    with Progress(console=Console(stderr=True), transient=True, disable=quiet) as bar:
        row = bar.add_task("calibrating", total=3 * len(ids) + len(held_out))

        def done(tokens: int) -> None:
            bar.advance(row, tokens)

        looked_at = layers or tuple(range(config.num_layers))
        made = calibrate(model, ops, ids, looked_at, done)
        seen = windows(model, ops, ids, made, done)
        if layers is None:
            keep = list(calmest(seen, looked_at))
            chosen = tuple(looked_at[w] for w in keep)
            made = Calibration(chosen, made.facts[keep], made.reference[keep], KL, SKEWNESS)
            seen = seen[:, keep]
        limits = [args.kl, args.skewness]
        if args.fit is not None:
            most = seen.abs().amax((1, 2)).tolist()
            limits = [max(a, args.fit * b) for a, b in zip(limits, most, strict=True)]
        made = Calibration(made.layers, made.facts, made.reference, *limits)
        found = {
            "out": str(args.out),
            "model": checkpoint.path.resolve().name,
            "text": "pydoc_data.topics" if args.text is None else str(args.text),
            "tokens": len(ids),
            "layers": list(made.layers),
            "kl_above": made.kl_above,
            "skewness_above": made.skewness_above,
            "calibration": summary(seen, made),
            "held_out": summary(windows(model, ops, held_out, made, done), made),
        }
    made.save(args.out, found)
    return found


if __name__ == "__main__":
    sys.exit(main())
