"""Command line: perplexity of a checkpoint on a text, exp of the mean loss of the next token.

The text's first ``--tokens`` tokens are one context, computed by one prefill; the first token is
not predicted. Without ``--text`` the text is Python's own ``pydoc_data.topics`` (its topics joined
by newlines, in the order of the dict), which is the same on every machine with the same Python.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from model.qwen3 import Model


def perplexity(model: Model, ops: Any, ids: list[int]) -> float:
    """exp of the mean negative log-likelihood of ``ids[1:]``, each given all before it."""
    import torch

    from model.kv_cache import BLOCK_SIZE, SequenceState
    from model.runner import Runner

    runner = Runner(model, ops, num_blocks=-(-len(ids) // BLOCK_SIZE), max_positions=len(ids))
    logits = runner.prefill([SequenceState(list(ids))], all_logits=True)  # [T, V]
    targets = torch.tensor(ids[1:], device=logits.device)
    loss = torch.nn.functional.cross_entropy(logits[:-1], targets)
    return math.exp(loss.item())


def read_text(path: Path | None) -> str:
    """The file's text, or the topics of pydoc."""
    if path is None:
        from pydoc_data.topics import topics

        return "\n".join(topics.values())
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--text {path}: expected a text file, got {error}") from None


def main(argv: list[str] | None = None) -> int:
    """Exit codes: 0 done, 2 wrong input, 130 interrupted."""
    parser = argparse.ArgumentParser(
        prog="python -m model.perplexity", description="Perplexity of a checkpoint on a text."
    )
    add = parser.add_argument
    add("--model", type=Path, help="Hugging Face folder or .gguf file (default: SmolLM2-135M)")
    add("--text", type=Path, metavar="FILE", help="default: Python's pydoc_data.topics")
    add("--tokens", type=int, default=2048, help="tokens of the text to use (default 2048)")
    add("--kernels", choices=("triton", "torch"), help="default: torch on a CPU, else triton")
    add("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    add("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args(argv)
    try:
        found = _measure(args)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    if args.json:
        print(json.dumps(found))
    else:
        print(f"perplexity {found['perplexity']:.4f} over {found['tokens']} tokens")
    return 0


def _measure(args: argparse.Namespace) -> dict[str, Any]:
    if args.tokens < 2:
        raise ValueError(f"--tokens must be at least 2, got {args.tokens}")
    text = read_text(args.text)

    import torch

    import tkernels
    from model.checkpoint import default_path, open_checkpoint
    from model.runner import operations
    from model.tokenizer import encode
    from model.weights import load_model

    device = tkernels.device.tensor_device()
    kernels, ops = operations(args.kernels)
    checkpoint = open_checkpoint(args.model or default_path())
    ids = encode(checkpoint.tokenizer, text)[: args.tokens]
    context = checkpoint.config.max_position_embeddings
    if not 2 <= len(ids) <= context:
        raise ValueError(f"expected 2 to {context} tokens (the context), got {len(ids)}")
    if sys.stderr.isatty() and not args.json:
        print(f"computing {len(ids)} tokens with {kernels} ...", file=sys.stderr, flush=True)
    network = load_model(
        checkpoint.config, checkpoint.source, dtype=getattr(torch, args.dtype), device=device
    )
    return {
        "perplexity": perplexity(network, ops, ids),
        "tokens": len(ids),
        "kernels": kernels,
        "dtype": args.dtype,
    }


if __name__ == "__main__":
    sys.exit(main())
