"""Command line: perplexity of a checkpoint on a text, exp of the mean loss of the next token.

The text's first ``--tokens`` tokens are one context; the first token is not predicted. With a
quantised KV cache the same tokens are also computed without one, and two figures compare the two:
the mean KL divergence of the next token's distribution from the unquantised model's, in nats, and
how often both find the same token likeliest. Without ``--text`` the text is Python's own
``pydoc_data.topics`` (its topics joined by newlines, in the order of the dict), which is the same
on every machine with the same Python.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from model import PREFILL_CHUNK

if TYPE_CHECKING:
    import torch

    from model.kv_cache import KVCache
    from model.kv_quant import KVQuantization
    from model.qwen3 import Model


def logits_of(
    model: Model,
    ops: Any,
    ids: list[int],
    quantization: KVQuantization | None = None,
    *,
    prefill_chunk: int = PREFILL_CHUNK,
) -> tuple[torch.Tensor, KVCache]:
    """(fp32 [T, V], the cache that they were computed with) of one context."""
    from model.kv_cache import BLOCK_SIZE, SequenceState
    from model.runner import Runner

    runner = Runner(
        model,
        ops,
        num_blocks=-(-len(ids) // BLOCK_SIZE),
        max_positions=len(ids),
        prefill_chunk=prefill_chunk,
        quantization=quantization,
    )
    return runner.prefill([SequenceState(list(ids))], all_logits=True), runner.cache


def perplexity_of(logits: torch.Tensor, ids: list[int]) -> float:
    """exp of the mean negative log-likelihood of ``ids[1:]``, each given all before it."""
    import torch

    targets = torch.tensor(ids[1:], device=logits.device)
    return math.exp(torch.nn.functional.cross_entropy(logits[:-1], targets).item())


def perplexity(model: Model, ops: Any, ids: list[int]) -> float:
    """Of a text, with an unquantised cache."""
    return perplexity_of(logits_of(model, ops, ids)[0], ids)


def divergence(logits: torch.Tensor, truth: torch.Tensor) -> tuple[float, float]:
    """(mean KL(truth || logits) in nats, share of rows with the same likeliest token)."""
    import torch

    total, agreed, rows = 0.0, 0, 256  # a vocabulary of probabilities a row: some at a time
    for first in range(0, len(logits), rows):
        p = truth[first : first + rows].log_softmax(-1)
        q = logits[first : first + rows].log_softmax(-1)
        total += float(torch.nn.functional.kl_div(q, p, reduction="sum", log_target=True))
        agreed += int((p.argmax(-1) == q.argmax(-1)).sum())
    return total / len(logits), agreed / len(logits)


def read_text(path: Path | None) -> str:
    """The file's text (of .jsonl: each line's "text", joined by newlines), or pydoc's topics."""
    if path is None:
        from pydoc_data.topics import topics

        return "\n".join(topics.values())
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--text {path}: expected a text file, got {error}") from None
    if path.suffix != ".jsonl":
        return text
    try:
        return "\n".join(str(json.loads(line)["text"]) for line in text.split("\n") if line)
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(
            f'--text {path}: expected objects with a "text" in each line, got {error!r}'
        ) from None


EXAMPLES = """examples:
  python -m model.perplexity --model path/to/Qwen3-0.6B --text held_out.txt
  python -m model.perplexity --kv-cache int8_fp4 --tokens 1024
"""


def main(argv: list[str] | None = None) -> int:
    """Exit codes: 0 done, 2 wrong input, 130 interrupted."""
    from model.generate import add_kv_options

    parser = argparse.ArgumentParser(
        prog="python -m model.perplexity",
        description="Perplexity of a checkpoint on a text.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--model",
        type=Path,
        help="Hugging Face folder or .gguf file (default: SmolLM2-135M-Instruct)",
    )
    add("--text", type=Path, metavar="FILE", help="default: Python's pydoc_data.topics")
    add("--tokens", type=int, default=2048, help="tokens of the text to use (default 2048)")
    add_kv_options(parser)
    add("--kernels", choices=("triton", "torch"), help="default: torch on a CPU, else triton")
    add("--dtype", choices=("float32", "bfloat16", "float16"), help="default: float32")
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
        return 0
    print(f"perplexity {found['perplexity']:.4f} over {found['tokens']} tokens")
    if "kl" in found:
        print(
            f"with the unquantised cache {found['unquantized_perplexity']:.4f}; KL "
            f"{found['kl']:.3e} nats, the same likeliest token {found['top1_agreement']:.2%}"
        )
        kept = found["kv_statistics"]
        print(
            f"{kept['mode']}: {kept['bytes_per_token']:.0f} bytes a token; residuals of "
            f"{kept['residuals']} vectors kept, {kept['residuals_dropped']} left out (pool full)"
        )
    return 0


def load_text_and_model(args: argparse.Namespace) -> tuple[Model, Any, list[int], dict[str, Any]]:
    """(model, operations, token ids, facts) of ``--model --text --tokens --kernels --dtype``."""
    if args.tokens < 2:
        raise ValueError(f"--tokens must be at least 2, got {args.tokens}")
    text = read_text(args.text)

    import torch

    import tkernels
    from model.checkpoint import default_path, open_checkpoint
    from model.kv_quant import choose
    from model.runner import choose_dtype, operations
    from model.tokenizer import encode
    from model.weights import load_model, say_dequantised

    device = tkernels.device.tensor_device()
    kernels, ops = operations(args.kernels)
    checkpoint = open_checkpoint(args.model or default_path())
    ids = encode(checkpoint.tokenizer, text)[: args.tokens]
    context = checkpoint.config.max_position_embeddings
    if not 2 <= len(ids) <= context:
        raise ValueError(f"expected 2 to {context} tokens (the context), got {len(ids)}")
    quantization = None
    if "kv_cache" in vars(args):
        quantization = choose(args.kv_cache, args.kv_scales, args.kv_tau, checkpoint.config)
    if sys.stderr.isatty() and not args.json:
        print(f"computing {len(ids)} tokens with {kernels} ...", file=sys.stderr, flush=True)
    dtype = choose_dtype(args.dtype, "float32", kernels, checkpoint.config)
    network = load_model(
        checkpoint.config, checkpoint.source, dtype=getattr(torch, dtype), device=device
    )
    say_dequantised(checkpoint.config, checkpoint.source, getattr(torch, dtype))
    return network, ops, ids, {"kernels": kernels, "dtype": dtype, "quantization": quantization}


def _measure(args: argparse.Namespace) -> dict[str, Any]:
    network, ops, ids, facts = load_text_and_model(args)
    logits, _ = logits_of(network, ops, ids)
    found = {
        "perplexity": perplexity_of(logits, ids),
        "tokens": len(ids),
        "kernels": facts["kernels"],
        "dtype": facts["dtype"],
        "kv_cache": args.kv_cache,
    }
    if facts["quantization"] is None:
        return found
    quantized, cache = logits_of(network, ops, ids, facts["quantization"])
    kl, agreement = divergence(quantized, logits)
    return found | {
        "perplexity": perplexity_of(quantized, ids),
        "unquantized_perplexity": found["perplexity"],
        "kl": kl,
        "top1_agreement": agreement,
        "kv_statistics": cache.statistics(),
    }


if __name__ == "__main__":
    sys.exit(main())
