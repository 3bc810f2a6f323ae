"""Command line: which linear layers of a model must not be int8, from a text.

Three figures of each linear layer of the decoder (by its Hugging Face name), all from the network
in full precision, whose layers are read, used and dropped one by one:

    kl          KL(P||Q) between histograms of its outputs, P as they are and Q in w8a8 (int8
                weights with a scale an output channel, int8 activations with a scale a token):
                one histogram a channel, 64 bins over the range of both, half a count added to each
                bin, nats, mean over channels
    dispersion  (max - min) / (Q3 - Q1) of its inputs, all tokens and channels together
    energy      largest singular value over the sum of singular values of its weight

A layer with a figure above its threshold is flagged, for ``python -m model.quantize --sensitive``
to leave it alone. ``lm_head``, the embedding, routers and experts are not looked at; of these that
command takes experts, unless the file is made to name them.
``--target-share`` searches for thresholds instead (15 ways to divide the share among the figures)
and takes those with the lowest perplexity on held-out text, in w8a8 with flagged layers left alone.
Both parts cut their text into windows of 1024 tokens.

An interrupted run goes on where it was when the same command is given again: what it has found lies
in a file beside ``--out`` whose name ends in .partial.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import hashlib
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from model.pictures import check_picture, check_place

if TYPE_CHECKING:
    import torch

    from model.layer_stream import LayerStream
    from model.threshold_search import Figures

FORMAT, VERSION = "tkernels.sensitive_layers", 1
EXAMPLES = """examples:
  python -m model.sensitivity --out sensitive_layers.json --picture layers.png
  python -m model.sensitivity --model path/to/Qwen3-8B --text prompts.txt --target-share 0.09 \\
      --out sensitive_layers.json
  python -m model.quantize --scheme w8a8 --sensitive sensitive_layers.json --out DIR

exit codes: 0 done, 1 done but --target-share raises perplexity by 1% or more, 2 wrong input,
130 interrupted (the same command goes on)
"""
TOKENS = 2048
SAVE_SECONDS = 30.0  # between two writes of the partial results
_SHOWN = 24  # flagged layers that are printed


# ---- what is kept of an interrupted run ----------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class State:
    """``done`` layers of the scan, or of the search once ``plan`` says what is compared."""

    figures: dict[str, dict[str, float]]
    done: int
    hidden: list[torch.Tensor]  # [T, H] of the scan's tokens, or of each choice
    plan: str = ""


@dataclasses.dataclass(frozen=True)
class Partial:
    """The file of a ``State``, and the facts of the run that it belongs to."""

    path: Path
    facts: dict[str, Any]

    def load(self, device: torch.device) -> State | None:
        """What an earlier run left.

        Raises:
            ValueError: it was another run's, or the file is damaged.
        """
        from safetensors import SafetensorError, safe_open

        if not self.path.exists():
            return None
        try:
            with safe_open(self.path, framework="pt") as file:
                found = json.loads(file.metadata()["state"])
                hidden = [file.get_tensor(str(i)).to(device) for i in range(len(file.keys()))]
            facts, figures = found["facts"], found["figures"]
        except (OSError, SafetensorError, TypeError, KeyError, ValueError) as error:
            raise ValueError(
                f"{self.path}: expected the partial results of a run, got a damaged file "
                f"({error}); delete it to start anew"
            ) from None
        for name, value in self.facts.items():
            if facts.get(name) != value:
                raise ValueError(
                    f"{self.path}: expected partial results with the same {name}, got those of "
                    "another run; delete it or give another --out"
                )
        return State(figures, found["done"], hidden, found["plan"])

    def save(self, state: State) -> None:
        """Write it in one step: an interrupt leaves the old file or the new one."""
        from safetensors.torch import save_file

        found = {
            "facts": self.facts,
            "figures": state.figures,
            "done": state.done,
            "plan": state.plan,
        }
        tensors = {str(i): t.contiguous() for i, t in enumerate(state.hidden)}
        with _replacing(self.path) as path:
            save_file(tensors, path, metadata={"state": json.dumps(found)})


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """A path to write to, whose file then takes the place of ``path``.

    Raises:
        ValueError: it could not be written.
    """
    from safetensors import SafetensorError

    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield temporary
        os.replace(temporary, path)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path}: expected a file that can be written, got {error}") from None
    finally:
        temporary.unlink(missing_ok=True)


def advance(
    state: State,
    total: int,
    step: Callable[[State], State],
    keep: Partial,
    on_layer: Callable[[int], None],
) -> State:
    """Take steps until ``total`` layers are done; whatever ends that early, it is kept."""
    saved = time.monotonic()
    try:
        while state.done < total:
            state = step(state)
            on_layer(state.done)
            if time.monotonic() - saved > SAVE_SECONDS:
                keep.save(state)
                saved = time.monotonic()
    finally:
        if state.figures:
            keep.save(state)
    return state


# ---- figures of the layers -----------------------------------------------------------------------


def scan_layer(
    stream: LayerStream, index: int, hidden: torch.Tensor, bins: int
) -> tuple[dict[str, dict[str, float]], torch.Tensor]:
    """(figures of each linear layer of decoder layer ``index``, hidden states after it).

    Raises:
        ValueError: an input of a layer is not finite.
    """
    from model.layer_metrics import dispersion, energy_ratio, fake_quantised, output_kl
    from model.layer_stream import Tapped, parts

    layer, of_layer = stream.load(index), parts(stream.config, index)
    inputs: dict[str, torch.Tensor] = {}

    def tapped(field: str) -> Tapped:
        return Tapped(getattr(layer, field), lambda x: inputs.__setitem__(field, x.float()))

    fields = dict.fromkeys(part.field for part in of_layer)
    watched: dict[str, Any] = {field: tapped(field) for field in fields}
    after = stream.run(dataclasses.replace(layer, **watched), hidden)
    figures = {}
    for field in fields:
        x = inputs.pop(field)
        spread, x_quantised = dispersion(x), fake_quantised(x)
        for part in of_layer:
            if part.field != field:
                continue
            if not math.isfinite(spread):
                raise ValueError(
                    f"{part.name}: expected finite activations, got NaN or Inf (--dtype float32 "
                    "has the widest range)"
                )
            linear = getattr(layer, field)
            bias = None if linear.bias is None else linear.bias[part.rows]
            weight = linear.weight[part.rows]
            figures[part.name] = {
                "kl": output_kl(x, x_quantised, weight, bias, bins),
                "dispersion": spread,
                "energy": energy_ratio(weight),
            }
    return figures, after


def scan(
    stream: LayerStream,
    bins: int,
    keep: Partial,
    state: State | None,
    on_layer: Callable[[int], None],
) -> State:
    """Figures of all layers, going on from ``state``."""

    def step(state: State) -> State:
        found, hidden = scan_layer(stream, state.done, state.hidden[0], bins)
        return State(state.figures | found, state.done + 1, [hidden])

    if state is None:
        state = State({}, 0, [stream.embed()])
    return advance(state, stream.config.num_layers, step, keep, on_layer)


def search(
    stream: LayerStream,
    figures: Figures,
    share: float,
    facts: dict[str, Any],
    keep: Partial,
    state: State,
    on_layer: Callable[[int], None],
) -> tuple[dict[str, float], dict[str, Any]]:
    """(thresholds that flag about ``share`` of the layers, what was tried and found).

    Args:
        stream: of the held-out tokens.
        facts: of the held-out tokens, for the record and to know them again.
    """
    from model.threshold_search import DEFAULTS, MOST_RISE, divisions, flagged, run_choices

    count = max(1, round(share * len(figures)))
    tried = divisions(figures, count)
    sets = [flagged(figures, thresholds) for thresholds in tried]
    choices = [None, frozenset[str](), flagged(figures, DEFAULTS), *sets]
    plan = json.dumps([facts, [None if c is None else sorted(c) for c in choices]])
    if state.plan != plan:
        state = State(state.figures, 0, [stream.embed()] * len(choices), plan)

    def step(state: State) -> State:
        after = run_choices(stream, state.done, state.hidden, choices)
        return State(state.figures, state.done + 1, after, plan)

    state = advance(state, stream.config.num_layers, step, keep, on_layer)
    first, *others = stream.perplexities(state.hidden)

    def row(layers: frozenset[str], perplexity: float) -> dict[str, Any]:
        return {
            "flagged": len(layers),
            "share": len(layers) / len(figures),
            "perplexity": perplexity,
            "rise": perplexity / first - 1,
        }

    rows = [row(s, p) for s, p in zip(choices[1:], others, strict=True) if s is not None]
    best = min(range(len(tried)), key=lambda i: rows[2 + i]["rise"])
    return tried[best], {
        "target_share": share,
        "most_rise": MOST_RISE,
        "met": rows[2 + best]["rise"] < MOST_RISE,
        "held_out": facts,
        "perplexity": first,
        "w8a8": rows[0],
        "default_thresholds": {"thresholds": DEFAULTS, **rows[1]},
        "found": {"thresholds": tried[best], **rows[2 + best]},
        "tried": [{"thresholds": t, **r} for t, r in zip(tried, rows[2:], strict=True)],
    }


# ---- results -------------------------------------------------------------------------------------


def summary(found: dict[str, Any]) -> dict[str, Any]:
    """Shares and quartiles of what was written."""
    import numpy as np

    from model.threshold_search import METRICS

    layers = found["layers"].values()
    metrics = {}
    for metric in METRICS:
        values = [layer[metric] for layer in layers]
        metrics[metric] = {
            "threshold": found["thresholds"][metric],
            "above": sum(metric in layer["because"] for layer in layers),
            "quartiles": [float(q) for q in np.quantile(values, (0, 0.25, 0.5, 0.75, 1))],
        }
    sensitive = sum(layer["sensitive"] for layer in layers)
    return {
        "layers": len(layers),
        "sensitive": sensitive,
        "share": sensitive / len(layers),
        "metrics": metrics,
    }


def draw(path: Path, found: dict[str, Any]) -> None:
    """A map for each metric: decoder layers along, linear layers down, flagged ones crossed."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot as plt
    from matplotlib.colors import LogNorm

    from model.threshold_search import METRICS

    places = {name: name.split(".") for name in found["layers"]}
    projections = list(dict.fromkeys(words[-1] for words in places.values()))
    count = 1 + max(int(words[2]) for words in places.values())
    figure, axes = plt.subplots(
        len(METRICS), 1, figsize=(max(6.0, 2 + 0.25 * count), 7.2), constrained_layout=True
    )
    for metric, axis in zip(METRICS, axes, strict=True):
        values = [[math.nan] * count for _ in projections]
        for name, words in places.items():
            layer, row, column = found["layers"][name], projections.index(words[-1]), int(words[2])
            values[row][column] = max(layer[metric], 1e-6)  # the colours are logarithmic
            if layer["sensitive"]:
                ours = metric in layer["because"]
                axis.plot(column, row, "x" if ours else ".", color="red" if ours else "white", ms=5)
        image = axis.imshow(values, aspect="auto", norm=LogNorm(), cmap="viridis")
        figure.colorbar(image, ax=axis)
        axis.set_yticks(range(len(projections)), projections, fontsize=7)
        axis.set_title(f"{metric}, threshold {found['thresholds'][metric]:.3g}", fontsize=9)
    axes[-1].set_xlabel("decoder layer; x: flagged for this figure, dot: for another one")
    figure.savefig(path, dpi=110)
    plt.close(figure)


# ---- command -------------------------------------------------------------------------------------


def main(argv: list[str] | None = None) -> int:
    """Exit codes: 0 done, 1 --target-share was not met, 2 wrong input, 130 interrupted."""
    parser = argparse.ArgumentParser(
        prog="python -m model.sensitivity",
        description=__doc__.partition(":")[2].strip(),
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--model",
        type=Path,
        help="Hugging Face folder or .gguf file (default: SmolLM2-135M-Instruct)",
    )
    add("--out", type=Path, required=True, metavar="FILE", help="JSON file to write")
    add("--text", type=Path, metavar="FILE", help="default: Python's pydoc_data.topics")
    add("--tokens", type=int, default=TOKENS, help=f"first tokens of the text ({TOKENS})")
    add("--bins", type=int, default=64, help="of a histogram (64); more bins give a larger KL")
    add("--kl", type=float, metavar="X", help="flag above this (0.02)")
    add("--dispersion", type=float, metavar="X", help="flag above this (15)")
    add("--energy", type=float, metavar="X", help="flag above this (0.42)")
    add(
        "--target-share",
        type=float,
        metavar="X",
        help="search for thresholds that flag this share, such as 0.09",
    )
    add(
        "--held-out",
        type=int,
        default=TOKENS,
        metavar="N",
        help=f"last tokens of the text, for the search ({TOKENS})",
    )
    add("--held-out-text", type=Path, metavar="FILE", help="another text for them")
    add("--picture", type=Path, metavar="PNG", help="also draw all figures, flagged ones marked")
    add("--kernels", choices=("triton", "torch"), help="default: torch on a CPU, else triton")
    add("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    add("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args(argv)
    try:
        found = _find(args)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        there = _partial_path(args.out).exists()
        what = f"{_partial_path(args.out)} keeps what was found" if there else "nothing was written"
        print(f"interrupted; {what}", file=sys.stderr)
        return 130
    facts = summary(found)
    searched = found.get("search")
    if args.json:
        print(json.dumps({"out": str(args.out), **facts, "search": searched}))
    else:
        _print(args.out, found, facts)
    return 1 if searched and not searched["met"] else 0


def _print(out: Path, found: dict[str, Any], facts: dict[str, Any]) -> None:
    print(
        f"wrote {out}: {facts['sensitive']} of {facts['layers']} linear layers are sensitive "
        f"({facts['share']:.1%}); {found['prompts']['tokens']} tokens"
    )
    for metric, row in facts["metrics"].items():
        least, q1, median, q3, most = row["quartiles"]
        print(
            f"  {metric:10s} {row['above']:4d} above {row['threshold']:.4g}; least {least:.4g}, "
            f"quartiles {q1:.4g}, {median:.4g}, {q3:.4g}, most {most:.4g}"
        )
    if "search" in found:
        searched = found["search"]
        for words, row in (
            ("all in w8a8", searched["w8a8"]),
            ("default thresholds", searched["default_thresholds"]),
            (f"best of {len(searched['tried'])} choices", searched["found"]),
        ):
            print(
                f"  {words}: {row['flagged']} left alone ({row['share']:.1%}), perplexity "
                f"{row['perplexity']:.4f}, {row['rise']:+.3%} of {searched['perplexity']:.4f}"
            )
        if not searched["met"]:
            print(
                f"  no choice of {searched['target_share']:.1%} keeps the rise below "
                f"{searched['most_rise']:.0%}; the file holds the best one"
            )
    if "experts_left_out" in found:
        print(f"  {found['experts_left_out']} experts and their routers were not looked at")
    names = [name for name, layer in found["layers"].items() if layer["sensitive"]]
    for name in names[:_SHOWN]:
        layer = found["layers"][name]
        print(f"  {name}: {', '.join(f'{m} {layer[m]:.4g}' for m in layer['because'])}")
    if len(names) > _SHOWN:
        print(f"  and {len(names) - _SHOWN} more in the file")


def _partial_path(out: Path) -> Path:
    return out.with_name(f"{out.name}.partial")


def _thresholds(args: argparse.Namespace) -> dict[str, float]:
    from model.threshold_search import DEFAULTS

    given = {name: getattr(args, name) for name in DEFAULTS if getattr(args, name) is not None}
    for name, value in given.items():
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(f"--{name} must be a number of at least 0, got {value}")
        if args.target_share is not None:
            raise ValueError(
                f"expected --target-share, which chooses thresholds, or --{name}, got both"
            )
    return DEFAULTS | given


def _check(args: argparse.Namespace) -> None:
    for option in ("tokens", "held_out", "bins"):
        value = getattr(args, option)
        if value < 2:
            raise ValueError(f"--{option.replace('_', '-')} must be at least 2, got {value}")
    if args.target_share is not None and not 0 < args.target_share < 1:
        raise ValueError(f"--target-share must be above 0 and below 1, got {args.target_share}")
    if args.held_out_text is not None and args.target_share is None:
        raise ValueError("--held-out-text has no use without --target-share")
    check_place("--out", args.out)
    if args.picture is not None:
        check_picture("--picture", args.picture)


def _texts(args: argparse.Namespace, tokenizer: Any) -> tuple[list[int], list[int]]:
    """Ids to scan with, and those that are held out for a search."""
    from model.perplexity import read_text
    from model.tokenizer import encode

    whole = encode(tokenizer, read_text(args.text))
    ids = whole[: args.tokens]
    if len(ids) < 2:
        raise ValueError(f"--text: expected at least 2 tokens, got {len(ids)}")
    if args.target_share is None:
        return ids, []
    rest = whole[len(ids) :]
    if args.held_out_text is not None:
        try:
            rest = encode(tokenizer, read_text(args.held_out_text))
        except ValueError as error:
            raise ValueError(str(error).replace("--text", "--held-out-text")) from None
    if len(rest) < args.held_out:
        raise ValueError(
            f"expected {args.held_out} tokens of held-out text, got {len(rest)} (--held-out, "
            "--tokens and --held-out-text change that)"
        )
    return ids, rest[-args.held_out :]


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


def _files(path: Path) -> list[Any]:
    """What changes when a checkpoint does, without reading its weights."""
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    return [(f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in files if f.is_file()]


def _find(args: argparse.Namespace) -> dict[str, Any]:
    _check(args)
    thresholds = _thresholds(args)

    import torch

    import tkernels
    from model.checkpoint import default_path, open_checkpoint
    from model.layer_stream import LayerStream
    from model.runner import operations
    from model.threshold_search import reasons

    kernels, ops = operations(args.kernels)
    checkpoint = open_checkpoint(args.model or default_path())
    if checkpoint.config.quantization is not None:
        raise ValueError(f"{args.model}: expected an unquantised checkpoint, got a quantised one")
    ids, held_out = _texts(args, checkpoint.tokenizer)
    text = "pydoc_data.topics" if args.text is None else str(args.text)
    device = tkernels.device.tensor_device()

    def stream(tokens: list[int]) -> LayerStream:
        return LayerStream(
            checkpoint.config,
            checkpoint.source,
            ops,
            tokens,
            dtype=getattr(torch, args.dtype),
            device=device,
        )

    facts = {
        "model": _digest([str(checkpoint.path.resolve()), _files(checkpoint.path)]),
        "text and --tokens": _digest(ids),
        "--bins": args.bins,
        "--dtype": args.dtype,
        "kernels": f"{kernels} on {device.type}",
    }
    keep = Partial(_partial_path(args.out), facts)
    with torch.inference_mode(), _bar(args.json) as on_layer:
        state = keep.load(device)
        if state is not None:
            where = "the search" if state.plan else "the scan"
            print(f"{keep.path}: {where} goes on after {state.done} layers", file=sys.stderr)
        layers = checkpoint.config.num_layers
        if state is None or not state.plan:
            state = scan(
                stream(ids), args.bins, keep, state, lambda n: on_layer("scanning", n, layers)
            )
        searched = None
        if args.target_share is not None:
            where = text if args.held_out_text is None else str(args.held_out_text)
            thresholds, searched = search(
                stream(held_out),
                state.figures,
                args.target_share,
                {"text": where, "tokens": len(held_out), "ids": _digest(held_out)},
                keep,
                state,
                lambda n: on_layer("searching", n, layers),
            )
    because = reasons(state.figures, thresholds)
    found: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "model": checkpoint.path.resolve().name,
        "prompts": {"text": text, "tokens": len(ids)},
        "scheme": "w8a8",
        "bins": args.bins,
        "thresholds": thresholds,
        "layers": {
            name: {**row, "sensitive": bool(because[name]), "because": because[name]}
            for name, row in state.figures.items()
        },
    }
    if checkpoint.config.mixture is not None:
        found["experts_left_out"] = checkpoint.config.mixture.total
    if searched is not None:
        found["search"] = searched
    with _replacing(args.out) as path:
        path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if args.picture is not None:
        draw(args.picture, found)
    keep.path.unlink(missing_ok=True)
    return found


@contextlib.contextmanager
def _bar(as_json: bool) -> Iterator[Callable[[str, int, int], None]]:
    """A bar on stderr, if that is a terminal: what is done, layers of how many."""
    from rich.console import Console
    from rich.progress import Progress

    quiet = as_json or not sys.stderr.isatty()
    with Progress(console=Console(stderr=True), transient=True, disable=quiet) as bar:
        row = bar.add_task("reading", total=None)
        yield lambda what, done, total: bar.update(
            row, description=f"{what} layers", completed=done, total=total
        )


if __name__ == "__main__":
    sys.exit(main())
