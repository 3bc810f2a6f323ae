"""What each mode of the KV cache costs in quality, and what residuals give back.

    python -m model.kv_quality --model path/to/Qwen3-0.6B --planted

A table: perplexity, KL divergence from the unquantised model (nats), agreement on the likeliest
token, and the error of attention's output, for every mode and context. That error is of one layer
at a time, with the same queries: ||out - exact||2 / ||exact||2 over all layers and tokens, where
only K and V have been quantised. Calibrated on another part of the text. ``--planted`` puts outlier
channels into the model first: tokens that make up about 3.5% of the text get values with a channel
hundreds of times as large as usual.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tkernels.kv_format import MODES, allocate_quantized, append_quantized_ref, read_positions

CALIBRATION = 2048  # tokens after those that are measured
PLANTED_SHARE = 0.035
PLANTED_SIZE = 300.0  # times what is usual, where the hidden state is all in that coordinate
_COORDINATE, _CHANNEL = 5, 3


def plant(model: Any, ids: list[int]) -> None:
    """Give common tokens that make up ``PLANTED_SHARE`` of ``ids`` outliers in V (and K).

    One coordinate of the hidden state is taken for it: embeddings of those tokens have it, nothing
    else writes it, and only a channel of each head's V reads it, with a large factor; what comes of
    that channel is dropped. So the network computes almost what it did, over values with an
    outlier. K gets one too where no norm of its own would shrink the rest of it.
    """
    chosen: list[int] = []
    left = PLANTED_SHARE * len(ids)
    for token, count in Counter(ids).most_common():
        if count <= left:
            chosen.append(token)
            left -= count
    table, config = model.embed_tokens, model.config
    table[:, _COORDINATE] = 0
    table[chosen, _COORDINATE] = table.norm(dim=1).mean()
    model.norm[_COORDINATE] = 0
    for layer in model.layers:
        layer.input_layernorm[_COORDINATE] = 1
        layer.post_attention_layernorm[_COORDINATE] = 0
        layer.o_proj.weight[_COORDINATE] = 0
        if layer.experts is None:
            layer.down_proj.weight[_COORDINATE] = 0
        else:
            layer.experts.down_proj[:, _COORDINATE] = 0
        layer.o_proj.weight.view(table.shape[1], -1, config.head_dim)[:, :, _CHANNEL] = 0
        heads = layer.qkv_proj.weight.view(-1, config.head_dim, table.shape[1])
        usual = heads[-config.num_kv_heads :].norm(dim=2).mean()  # v of a normed state, roughly
        heads[:, :, _COORDINATE] = 0
        first = config.num_heads if layer.k_norm is None else config.num_heads + config.num_kv_heads
        heads[first:, _CHANNEL] = 0
        heads[first:, _CHANNEL, _COORDINATE] = PLANTED_SIZE * usual / math.sqrt(table.shape[1])
        if layer.k_norm is None:
            heads[: config.num_heads, _CHANNEL] = 0


class AttentionErrors:
    """Operations of a pass over one context that also quantise its K and V in each mode."""

    fused_qk_norm_rope_append = None  # its K would not be seen

    def __init__(self, ops: Any, config: Any, modes: dict[str, Any]) -> None:
        self._ops, self._config, self._modes = ops, config, modes
        self._layer, self._q = 0, torch.empty(0)
        self.squares = {mode: torch.zeros(2, dtype=torch.float64) for mode in modes}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def rope(self, *args: Any, **kwargs: Any) -> Any:
        found = self._ops.rope(*args, **kwargs)
        self._q = found[0]
        return found

    def fused_qk_norm_rope(self, *args: Any, **kwargs: Any) -> Any:
        found = self._ops.fused_qk_norm_rope(*args, **kwargs)
        self._q = found[0]
        return found

    def append_paged_kv(self, k: Any, v: Any, *rest: Any) -> None:
        self._ops.append_paged_kv(k, v, *rest)
        exact = _attention(self._q, k, v)
        for mode, quantization in self._modes.items():
            kept = [
                _stored(x, i, self._layer, quantization, self._config) for i, x in enumerate((k, v))
            ]
            error = _attention(self._q, *kept) - exact
            both = torch.stack([error.double().square().sum(), exact.double().square().sum()])
            self.squares[mode] += both
        self._layer += 1


def _attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    q, k, v = (x.transpose(0, 1)[None].float() for x in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=True, enable_gqa=True
    )


def _stored(x: torch.Tensor, which: int, layer: int, quantization: Any, config: Any) -> Any:
    """x [T, Hk, D] as the cache gives it back."""
    blocks = -(-len(x) // 16)
    cache = allocate_quantized(
        blocks,
        16,
        config.num_kv_heads,
        config.head_dim,
        **quantization.of_layer(which, layer),
    )
    append_quantized_ref(x, cache, torch.arange(len(x)))
    return read_positions(cache, slice(0, len(x)))


def measure(
    model: Any, ops: Any, ids: list[int], contexts: list[int], say: Callable[[str], None]
) -> list[dict[str, Any]]:
    """One row a context and mode."""
    from model.calibrate_kv import calibrate
    from model.kv_quant import KVQuantization
    from model.perplexity import divergence, logits_of, perplexity_of

    longest = max(contexts)
    say(f"calibrating on {len(ids) - longest} tokens")
    found, _ = calibrate(model, ops, ids[longest:])
    modes = {}
    for mode in MODES[1:]:
        end = "_static" if "static" in mode else ""
        modes[mode] = KVQuantization(
            mode,
            (found["k_scale"], found["v_scale"]) if end else None,
            (found[f"k_tau{end}"], found[f"v_tau{end}"]) if "fp4" in mode else None,
        )
    rows = []
    for context in contexts:
        say(f"context {context}")
        mine = ids[:context]
        errors = AttentionErrors(ops, model.config, modes)
        truth, _ = logits_of(model, errors, mine, prefill_chunk=len(mine))
        rows.append({"context": context, "mode": "none", "perplexity": perplexity_of(truth, mine)})
        for mode, quantization in modes.items():
            logits, cache = logits_of(model, ops, mine, quantization)
            kl, agreement = divergence(logits, truth)
            lost, whole = errors.squares[mode].tolist()
            kept = cache.statistics()
            rows.append(
                {
                    "context": context,
                    "mode": mode,
                    "perplexity": perplexity_of(logits, mine),
                    "kl": kl,
                    "top1_agreement": agreement,
                    "attention_error": math.sqrt(lost / whole),
                    "residuals": kept["residuals"],
                    "residuals_dropped": kept["residuals_dropped"],
                }
            )
    return rows


def main(argv: list[str] | None = None) -> int:
    """Exit codes: 0 done, 2 wrong input, 130 interrupted."""
    parser = argparse.ArgumentParser(
        prog="python -m model.kv_quality",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--model",
        type=Path,
        help="Hugging Face folder or .gguf file (default: SmolLM2-135M-Instruct)",
    )
    add("--text", type=Path, metavar="FILE", help="default: Python's pydoc_data.topics")
    add("--contexts", default="256,1024,2048", metavar="N,...", help="(256,1024,2048)")
    add("--planted", action="store_true", help="put outlier channels into the model first")
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
    print("| context | mode | perplexity | KL | top-1 | attention error | residuals left out |")
    print("| ---: | --- | ---: | ---: | ---: | ---: | ---: |")
    for row in rows:
        more = "| - | - | - | - |"
        if "kl" in row:
            more = (
                f"| {row['kl']:.2e} | {row['top1_agreement']:.2%} | {row['attention_error']:.4f} "
                f"| {row['residuals_dropped']} |"
            )
        print(f"| {row['context']} | {row['mode']} | {row['perplexity']:.4f} {more}")
    return 0


def _rows(args: argparse.Namespace) -> list[dict[str, Any]]:
    from model.checkpoint import default_path, open_checkpoint
    from model.perplexity import read_text
    from model.runner import operations
    from model.tokenizer import encode
    from model.weights import load_model

    words = args.contexts.split(",")
    if not all(word.strip().isdecimal() and int(word) > 1 for word in words):
        raise ValueError(f"--contexts must be numbers above 1 with commas, got {args.contexts!r}")
    contexts = sorted(map(int, words))
    _, ops = operations("torch")
    checkpoint = open_checkpoint(args.model or default_path())
    wanted = contexts[-1] + CALIBRATION
    ids = encode(checkpoint.tokenizer, read_text(args.text))[:wanted]
    most = checkpoint.config.max_position_embeddings
    if len(ids) < wanted or most < max(contexts[-1], CALIBRATION):
        raise ValueError(
            f"expected a text of {wanted} tokens and a model with a context of "
            f"{max(contexts[-1], CALIBRATION)}, got {len(ids)} and {most}"
        )
    model = load_model(
        checkpoint.config, checkpoint.source, dtype=torch.float32, device=torch.device("cpu")
    )
    if args.planted:
        blocks = not isinstance(model.embed_tokens, torch.Tensor)
        if blocks or model.config.quantization is not None:
            raise ValueError(
                f"--planted needs a folder of unquantised safetensors, got {checkpoint.path}"
            )
        plant(model, ids)
    return measure(model, ops, ids, contexts, lambda line: print(line, file=sys.stderr))


if __name__ == "__main__":
    sys.exit(main())
