"""Command line: a checkpoint with its linear layers in 8 or 4 bits, for this runner and others.

The folder that is written has the ``compressed-tensors`` layout. Of the schemes

    w8a8    int8 weights with a scale an output channel; activations are quantised as the network
            runs, with a scale a token (format int-quantized)
    w8a16   the same weights, activations as they are (pack-quantized, 8 bits)
    w4a16   4-bit weights with a scale for 128 inputs, activations as they are (pack-quantized).
            Where 128 does not divide the inputs of a layer, its groups are of the largest of 64,
            32, 16 and 8 inputs that does, and the command says so

all round to the nearest code. lm_head, the embedding, norms, biases and routers stay as they are,
and so do the layers that --sensitive names, each with those that are computed together with it (q,
k and v; gate and up; all experts of a layer: a file may name one of their matrices, such as
model.layers.3.mlp.experts.7.up_proj, or model.layers.3.mlp.experts). --keep-experts leaves all
experts alone. w4a16 does so with experts some of whose inputs 32 does not divide: their product has
no smaller groups. Quantised experts are written one by one; those of a layer that stay as they are
in one tensor, since transformers 5 reads them only so beside quantised layers. Of experts in w8a8
it reads none, of those in w8a16 and w4a16 all. Tensors keep the type in which the checkpoint stores
them; those of a GGUF file become bfloat16, and if they were quantised there, they are quantised a
second time.

--smooth moves the outliers of activations into weights before (SmoothQuant): channel j of a norm's
output is divided by max|x_j|^alpha / max|W_j|^(1 - alpha), rounded to a power of two so that this
loses nothing, and column j of the weights behind it (the router's too) multiplied by the same. x is
taken from --text.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from model.quantize_plan import GROUPS, SCHEMES, all_experts, make_plan, read_sensitive
from model.quantize_write import check_out, replacing, write_folder
from model.smooth import activation_maxima, smoothing_factors

if TYPE_CHECKING:
    import torch

EXAMPLES = """examples:
  python -m model.quantize --scheme w8a8 --out smollm2-w8a8
  python -m model.quantize --model path/to/Qwen3-8B --scheme w8a8 --smooth 0.5 \\
      --sensitive sensitive_layers.json --out qwen3-8b-w8a8
  python -m model.generate --model smollm2-w8a8 --prompt "Name three rivers."
"""


def main(argv: list[str] | None = None) -> int:
    """Exit codes: 0 done, 2 wrong input, 130 interrupted."""
    parser = argparse.ArgumentParser(
        prog="python -m model.quantize",
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
    add("--scheme", choices=SCHEMES, required=True)
    add("--out", type=Path, required=True, metavar="DIR", help="folder to write")
    add("--overwrite", action="store_true", help="replace the checkpoint that is in --out")
    add(
        "--sensitive",
        type=Path,
        metavar="FILE",
        help="leave alone the layers that python -m model.sensitivity flagged in it",
    )
    add("--keep-experts", action="store_true", help="leave experts alone, quantise all else")
    add("--smooth", type=float, metavar="ALPHA", help="w8a8: above 0 and below 1, such as 0.5")
    add(
        "--text",
        type=Path,
        metavar="FILE",
        help="for --smooth; default: Python's pydoc_data.topics",
    )
    add("--tokens", type=int, default=2048, help="of the text, for --smooth (default 2048)")
    add("--kernels", choices=("triton", "torch"), help="default: torch on a CPU, else triton")
    add("--dtype", choices=("float32", "bfloat16", "float16"), help="for --smooth (float32)")
    add("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args(argv)
    try:
        found = _quantize(args)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: --out {args.out}: expected room to write to, got {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; nothing was written", file=sys.stderr)
        return 130
    print(json.dumps(found) if args.json else _summary(found))
    return 0


def _quantize(args: argparse.Namespace) -> dict[str, Any]:
    if args.smooth is not None and args.scheme != "w8a8":
        raise ValueError(
            f"--smooth has no use where activations stay as they are, got --scheme {args.scheme}"
        )
    if args.smooth is not None and not 0 < args.smooth < 1:
        raise ValueError(f"--smooth must be above 0 and below 1, got {args.smooth}")

    from model.checkpoint import default_path, open_checkpoint
    from model.weights import check_names

    args.model = args.model or default_path()
    check_out(args.out, args.model, args.overwrite)
    checkpoint = open_checkpoint(args.model)
    config, source = checkpoint.config, checkpoint.source
    if config.quantization is not None:
        raise ValueError(f"{args.model}: expected an unquantised checkpoint, got a quantised one")
    check_names(config, source)
    sensitive = set() if args.sensitive is None else read_sensitive(args.sensitive, config)
    if args.keep_experts:
        if config.mixture is None:
            raise ValueError(
                f"--keep-experts: expected a network with experts, got a dense {config.model_type}"
            )
        sensitive |= {all_experts(layer) for layer in config.mixture.layers}
    plan = make_plan(config, args.scheme, sensitive)
    if not plan.schemes and not plan.experts:
        raise ValueError(f"--sensitive {args.sensitive}: expected layers to quantise, got none")

    from rich.console import Console
    from rich.progress import Progress

    quiet = args.json or not sys.stderr.isatty()
    with Progress(console=Console(stderr=True), transient=True, disable=quiet) as bar:
        factors: dict[str, torch.Tensor] = {}
        if args.smooth is not None:
            row = bar.add_task("tokens", total=None)
            maxima = calibration_maxima(
                args, lambda done, total: bar.update(row, completed=done, total=total)
            )
            factors = smoothing_factors(checkpoint, plan, maxima, args.smooth)
        row = bar.add_task("tensors", total=len(source.shapes))
        with replacing(args.out) as folder:
            counts = write_folder(checkpoint, folder, plan, factors, lambda: bar.advance(row))
    num_experts = config.mixture.num_experts if config.mixture else 0
    groups = {name: scheme.group for name, scheme in plan.schemes.items() if scheme.group}
    groups |= {all_experts(i): scheme.group for i, scheme in plan.experts.items() if scheme.group}
    return {
        "out": str(args.out),
        "scheme": args.scheme,
        "smooth": args.smooth,
        "quantized_layers": len(plan.schemes),
        "kept_layers": list(plan.kept),
        "quantized_experts": len(plan.experts) * num_experts,
        "kept_experts": len(plan.kept_experts) * num_experts,
        "smaller_groups": {name: size for name, size in groups.items() if size != GROUPS[0]},
        **counts,
    }


def calibration_maxima(
    args: argparse.Namespace, on_tokens: Callable[[int, int], None] | None = None
) -> dict[str, torch.Tensor]:
    """``activation_maxima`` of ``--model --text --tokens --kernels --dtype``."""
    from model.perplexity import load_text_and_model

    network, ops, ids, _ = load_text_and_model(args)
    return activation_maxima(network, ops, ids, on_tokens)


def _summary(found: dict[str, Any]) -> str:
    bits = 8 * found["linear_bytes"] / found["linear_weights"]
    lines = [
        f"wrote {found['out']}: {found['quantized_layers']} linear layers in {found['scheme']}, "
        f"{len(found['kept_layers'])} as they were; linear layers take "
        f"{found['linear_bytes'] / 1e6:.1f} MB ({bits:.2f} bits a weight), all "
        f"{found['bytes'] / 1e6:.1f} MB"
    ]
    quantised, kept = found["quantized_experts"], found["kept_experts"]
    if quantised or kept:
        words = f"{kept} experts and all routers" if kept else "routers"
        if quantised:
            words = f"{quantised} experts in {found['scheme']}, {words}"
        lines.append(
            f"{words} as they were; they take {found['expert_bytes'] / 1e6:.1f} MB of that"
        )
    smaller = found["smaller_groups"]
    for size in sorted(set(smaller.values()), reverse=True):
        names = [name for name, mine in smaller.items() if mine == size]
        lines.append(
            f"groups of {size} instead of {GROUPS[0]} inputs in {len(names)} layers, whose inputs "
            f"{GROUPS[0]} does not divide, the first {names[0]}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
