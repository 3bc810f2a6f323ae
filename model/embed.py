"""Embeddings: one vector a text, from the hidden states that ``lm_head`` would be applied to.

    python -m model.embed --model DIR --prompts texts.jsonl --out vectors.jsonl
    python -m model.embed --model DIR --prompts a.txt --out a.jsonl --bidirectional --pooling mean

Nothing is generated, so there is no KV cache: all keys and values of a text are at hand, and its
tokens are computed in one step, packed with those of other texts. Pooling takes the state of the
last token (which under causal attention has seen all others, as Qwen3-Embedding does it) or the
mean of all. Vectors are scaled to length 1 unless ``--no-normalize`` is given.

OUT gets one line a text, {"id": ..., "key": ..., "embedding": [...]}, in order of length; a run
that was killed goes on where it was (see model/bulk.py).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import torch

import tkernels
from model.qwen3 import Attend, Model, hidden_states
from model.threads import cpu_threads, prompt_threads

POOLINGS = ("last", "mean")
Tensor = torch.Tensor


@torch.inference_mode()
def embed(
    model: Model,
    ops: Any,
    texts: Sequence[Sequence[int]],
    *,
    pooling: str = "last",
    bidirectional: bool = False,
    normalize: bool = True,
    max_num_batched_tokens: int = 2048,
) -> Tensor:
    """fp32 [N, H] of N texts as token ids, whatever is packed together.

    Args:
        max_num_batched_tokens: of a step, at most; a longer text has a step of its own.

    Raises:
        ValueError: an empty text, one that exceeds the model's context, or no such pooling.
    """
    if pooling not in POOLINGS:
        raise ValueError(f"embed: pooling must be one of {', '.join(POOLINGS)}, got {pooling!r}")
    most = model.config.max_position_embeddings
    for ids in texts:
        if not 1 <= len(ids) <= most:
            raise ValueError(f"embed: expected texts of 1 to {most} tokens, got one of {len(ids)}")
    longest = max(map(len, texts), default=1)
    device = model.norm.device
    table = tkernels.build_cos_sin_cache(model.config.rope, longest, device=device)
    found = torch.empty(len(texts), model.config.hidden_size, device=device)
    for step in steps([len(ids) for ids in texts], max_num_batched_tokens):
        lengths = torch.tensor([len(texts[i]) for i in step])
        packed = np.concatenate([np.asarray(texts[i], dtype=np.int64) for i in step])
        positions = np.concatenate([np.arange(int(n)) for n in lengths])
        inputs, at = (torch.from_numpy(x).to(device) for x in (packed, positions))
        attend = among_themselves(ops, lengths, device, causal=not bidirectional)
        threads = prompt_threads(model, len(inputs)) if device.type == "cpu" else 1
        with cpu_threads(threads):
            states = hidden_states(model, ops, inputs, at, table, attend).float()  # [T, H]
        ends = lengths.cumsum(0).to(device)
        if pooling == "last":
            vectors = states[ends - 1]
        else:
            parts = torch.split(states, lengths.tolist())
            vectors = torch.stack([part.mean(0) for part in parts])
        found[torch.tensor(step, device=device)] = vectors
    return torch.nn.functional.normalize(found, dim=-1) if normalize else found


def steps(lengths: Sequence[int], most: int) -> list[list[int]]:
    """Texts of each step, the shortest first, so that little is padded where that is needed.

    >>> steps([5, 1, 9, 2], 8)
    [[1, 3, 0], [2]]
    """
    found: list[list[int]] = []
    room = 0
    for i in sorted(range(len(lengths)), key=lambda i: lengths[i]):
        if not found or lengths[i] > room:
            found.append([])
            room = most
        found[-1].append(i)
        room -= lengths[i]
    return found


def among_themselves(ops: Any, lengths: Tensor, device: torch.device, *, causal: bool) -> Attend:
    """Attention of whole texts, packed, each to its own tokens and to no cache."""
    longest = int(lengths.max())
    if ops is tkernels:
        bounds = torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)))
        cu_seqlens = bounds.to(device, torch.int32)
        sizes = {"max_seqlen_q": longest, "max_seqlen_k": longest, "causal": causal}

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out: Tensor = ops.flash_attn(
                q, k, v, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens, **sizes
            )
            return out

        return attend
    # PyTorch's takes texts of one length: padded ones, of which padding is not seen.
    real = (torch.arange(longest) < lengths[:, None]).to(device)  # [B, L]
    seen = real[:, None, None, :]  # [B, 1, 1, L]
    if causal:
        seen = seen & torch.ones(longest, longest, dtype=torch.bool, device=device).tril()

    def attend_padded(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (_padded(x, real) for x in (q, k, v))
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=seen, enable_gqa=True
        )
        return out.transpose(1, 2)[real]

    return attend_padded


def _padded(x: Tensor, real: Tensor) -> Tensor:
    """[T, heads, D] -> [B, heads, L, D], zeros where ``real`` [B, L] is False."""
    whole = x.new_zeros(*real.shape, *x.shape[1:])
    whole[real] = x
    return whole.transpose(1, 2)


def main(argv: list[str] | None = None) -> int:
    """Exit codes: 0 done, 2 wrong input, 130 interrupted."""
    try:
        return _run(_parse(argv))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as stop:
        print("; ".join(["interrupted", *map(str, stop.args)]), file=sys.stderr)
        return 130


EXAMPLES = """examples:
  python -m model.embed --model path/to/Qwen3-Embedding-0.6B --prompts texts.txt --out vectors.jsonl
  python -m model.embed --model DIR --prompts texts.jsonl --out vectors.jsonl --pooling mean
"""


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m model.embed",
        description=(__doc__ or "").split("\n")[0],
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--model", type=Path, required=True, help="Hugging Face folder or .gguf file")
    add("--prompts", type=Path, required=True, metavar="FILE", help="as model.generate has it")
    add("--out", type=Path, required=True, metavar="FILE.jsonl")
    add("--pooling", choices=POOLINGS, default="last", help="(default last)")
    add("--bidirectional", action="store_true", help="each token sees all; default: causal")
    add(
        "--normalize",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="length 1 (default)",
    )
    add("--batch-tokens", type=int, default=2048, help="tokens of a step (default 2048)")
    add("--kernels", choices=("triton", "torch"), help="default: torch on a CPU, else triton")
    add("--dtype", choices=("float32", "bfloat16", "float16"), help="default: float32 on a CPU")
    args = parser.parse_args(argv)
    if args.batch_tokens < 1:
        raise ValueError(f"--batch-tokens must be at least 1, got {args.batch_tokens}")
    return args


def _run(args: argparse.Namespace) -> int:
    from model.bulk import counted, finished, opened, write_line
    from model.checkpoint import open_checkpoint
    from model.generate import read_prompts
    from model.runner import choose_dtype, operations
    from model.tokenizer import encode
    from model.weights import load_model, say_dequantised

    texts = dict(read_prompts(args))
    device = tkernels.device.tensor_device()
    kernels, ops = operations(args.kernels)
    checkpoint = open_checkpoint(args.model)
    config = checkpoint.config
    stored = config.dtype if config.dtype in ("bfloat16", "float16") else "bfloat16"
    usual = "float32" if device.type == "cpu" else stored
    dtype = choose_dtype(args.dtype, usual, kernels, config)
    model = load_model(config, checkpoint.source, dtype=getattr(torch, dtype), device=device)
    say_dequantised(config, checkpoint.source, getattr(torch, dtype))
    how = [str(args.model.resolve()), args.pooling, args.bidirectional, args.normalize]
    ids = {name: encode(checkpoint.tokenizer, text) for name, text in texts.items()}

    def key(name: int | str) -> str:
        what = json.dumps([*how, kernels, dtype, ids[name]])
        return blake2b(what.encode(), digest_size=8).hexdigest()

    keys = {name: key(name) for name in ids}
    with opened(args.out) as file:
        done = finished(file, args.out, keys)
        left = [name for name in ids if name not in done]
        with counted(args.out, len(ids), len(done)) as advance:
            for step in steps([len(ids[name]) for name in left], args.batch_tokens):
                part = [left[i] for i in step]
                vectors = embed(
                    model,
                    ops,
                    [ids[name] for name in part],
                    pooling=args.pooling,
                    bidirectional=args.bidirectional,
                    normalize=args.normalize,
                    max_num_batched_tokens=args.batch_tokens,
                )
                for name, vector in zip(part, vectors.tolist(), strict=True):
                    row = {"id": name, "key": keys[name], "embedding": vector}
                    write_line(file, json.dumps(row).encode() + b"\n")
                    advance()
    print(f"{len(left)} texts embedded, {len(done)} had a vector", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
