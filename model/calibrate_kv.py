"""Command line: what a quantised KV cache needs to know of a model, from a text.

Two passes over the text. The first takes each channel's largest |k| and |v|, which make the static
scales, and each token's relative error with dynamic ones; the second, its error with static scales.
A layer and head's tau is the error that ``--share`` of its tokens exceed: they are the outliers,
whose error the FP4 modes keep. Memory does not grow with the text but by one number a token, layer
and head.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from model.kv_quant import SHARE

if TYPE_CHECKING:
    import torch

    from model.qwen3 import Model

EXAMPLES = """examples:
  python -m model.calibrate_kv --out kv.safetensors --picture kv.png
  python -m model.calibrate_kv --model path/to/Qwen3-8B --text prompts.txt --out kv.safetensors
  python -m model.generate --kv-cache int8_static_fp4 --kv-scales kv.safetensors
"""
CHUNK = 256  # tokens between two moves of the bar


class Tap:
    """The operations ``ops``, with ``see(layer, k, v)`` told of all K and V that are appended."""

    fused_qk_norm_rope_append = None  # its K would not be seen

    def __init__(self, ops: Any, num_layers: int, see: Any) -> None:
        self._ops, self._num_layers, self._see, self._calls = ops, num_layers, see, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def append_paged_kv(self, k: Any, v: Any, *rest: Any) -> None:
        self._see(self._calls % self._num_layers, k, v)
        self._calls += 1
        self._ops.append_paged_kv(k, v, *rest)


def calibrate(
    model: Model, ops: Any, ids: list[int], *, share: float = SHARE, on_tokens: Any = None
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """(tensors of ``model.kv_quant.save``, errors) of a text.

    Args:
        share: of tokens that shall be outliers, above 0 and below 1.
        on_tokens: called with (done, total) tokens over both passes.

    Returns:
        The errors are fp32 [L, tokens, Hk], under "k", "v", "k_static" and "v_static".
    """
    import torch

    from tkernels.kv_format import quantize_ref

    config = model.config
    shape = (config.num_layers, config.num_kv_heads, config.head_dim)
    most = {x: torch.zeros(shape, device=model.norm.device) for x in "kv"}
    errors: dict[str, list[list[torch.Tensor]]] = {
        name: [[] for _ in range(config.num_layers)] for name in ("k", "v", "k_static", "v_static")
    }

    def first(layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        for name, x in (("k", k), ("v", v)):
            most[name][layer] = most[name][layer].maximum(x.float().abs().amax(0))
            errors[name][layer].append(quantize_ref(x)[3])

    _pass(model, Tap(ops, config.num_layers, first), ids, on_tokens, 0)
    # A channel that is always 0 still needs a scale.
    scales = {x: (m / 127).clamp_min(2.0**-100) for x, m in most.items()}

    def second(layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        for name, x in (("k", k), ("v", v)):
            errors[f"{name}_static"][layer].append(quantize_ref(x, scales[name][layer])[3])

    _pass(model, Tap(ops, config.num_layers, second), ids, on_tokens, len(ids))
    found = {name: torch.stack([torch.cat(e) for e in by]).cpu() for name, by in errors.items()}
    tensors = {f"{x}_scale": scale.cpu() for x, scale in scales.items()}
    for name, e in found.items():
        x, _, end = name.partition("_")
        tensors[f"{x}_tau{'_' * bool(end)}{end}"] = torch.quantile(e, 1 - share, dim=1)
    return tensors, found


def _pass(model: Model, ops: Any, ids: list[int], on_tokens: Any, before: int) -> None:
    from model.kv_cache import BLOCK_SIZE, SequenceState
    from model.runner import Runner

    blocks = -(-len(ids) // BLOCK_SIZE)
    runner = Runner(model, ops, num_blocks=blocks, max_positions=len(ids), prefill_chunk=CHUNK)
    runner.prefill(
        [SequenceState(list(ids))],
        on_chunk=None if on_tokens is None else lambda n, _: on_tokens(before + n, 2 * len(ids)),
    )


def draw(path: Path, errors: dict[str, torch.Tensor], tensors: dict[str, torch.Tensor]) -> None:
    """A picture: how large errors are, where tau lies, and how many tokens are outliers a layer."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(2, 2, figsize=(10, 6.4), constrained_layout=True)
    for row, end in enumerate(("", "_static")):
        kind = "static scales" if end else "dynamic scales"
        histogram, layers = axes[row]
        for x, colour in (("k", "tab:blue"), ("v", "tab:orange")):
            e, tau = errors[x + end], tensors[f"{x}_tau{end}"]
            histogram.hist(
                e.flatten().numpy(), bins=120, histtype="step", color=colour, label=x.upper()
            )
            histogram.axvline(float(tau.mean()), color=colour, linestyle=":", label="mean tau")
            over = (e > 3 * e.mean(1, keepdim=True)).float().mean((1, 2))
            layers.plot(tau.mean(1).numpy(), color=colour, marker=".", label=f"{x.upper()}: tau")
            layers.plot(e.mean((1, 2)).numpy(), color=colour, alpha=0.5, label="mean error")
            layers.plot(
                over.numpy(), color=colour, linestyle="--", label="share above 3 x the mean"
            )
        histogram.set(xlabel=f"relative error of a token, {kind}", ylabel="tokens", yscale="log")
        layers.set(xlabel="layer", title=kind)
        histogram.legend(fontsize=7)
        layers.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.01, 1))
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main(argv: list[str] | None = None) -> int:
    """Exit codes: 0 done, 2 wrong input, 130 interrupted."""
    parser = argparse.ArgumentParser(
        prog="python -m model.calibrate_kv",
        description="Scales and outlier thresholds of a quantised KV cache, from a text.",
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
    add("--tokens", type=int, default=2048, help="tokens of the text to use (default 2048)")
    add(
        "--share",
        type=float,
        default=SHARE,
        help=f"of tokens that shall be outliers (default {SHARE})",
    )
    add("--picture", type=Path, metavar="PNG", help="also draw errors and thresholds")
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
    print(f"wrote {args.out}: {found['tokens']} tokens, {found['share']:.1%} of them outliers")
    for name, row in found["errors"].items():
        print(
            f"  {name:9s} mean error {row['mean']:.4f}, tau {row['tau']:.4f}, "
            f"above three times the mean: {row['above_three_means']:.2%}"
        )
    return 0


def _calibrate(args: argparse.Namespace) -> dict[str, Any]:
    from model.perplexity import load_text_and_model

    if not 0 < args.share < 1:
        raise ValueError(f"--share must be above 0 and below 1, got {args.share}")
    for option, path in (("--out", args.out), ("--picture", args.picture)):
        if path is not None and (path.is_dir() or not path.resolve().parent.is_dir()):
            raise ValueError(f"{option} must be a file in a folder that is there, got {path}")
    if args.picture is not None and args.picture.suffix not in (".png", ".pdf", ".svg"):
        raise ValueError(f"--picture must end in .png, .pdf or .svg, got {args.picture}")
    if args.picture is not None and importlib.util.find_spec("matplotlib") is None:
        raise ValueError("--picture needs matplotlib (pip install .[plot]), got none")
    network, ops, ids, _ = load_text_and_model(args)
    from rich.console import Console
    from rich.progress import Progress

    from model import kv_quant

    quiet = args.json or not sys.stderr.isatty()
    with Progress(console=Console(stderr=True), transient=True, disable=quiet) as bar:
        row = bar.add_task("calibrating", total=2 * len(ids))
        tensors, errors = calibrate(
            network,
            ops,
            ids,
            share=args.share,
            on_tokens=lambda done, total: bar.update(row, completed=done),
        )
    kv_quant.save(args.out, tensors, share=args.share, tokens=len(ids))
    if args.picture is not None:
        draw(args.picture, errors, tensors)
    return {
        "out": str(args.out),
        "tokens": len(ids),
        "share": args.share,
        "errors": {
            name: {
                "mean": float(e.mean()),
                "tau": float(tensors[name[0] + "_tau" + name[1:]].mean()),
                "above_three_means": float((e > 3 * e.mean(1, keepdim=True)).float().mean()),
            }
            for name, e in errors.items()
        },
    }


if __name__ == "__main__":
    sys.exit(main())
