"""Command line: a checkpoint and a prompt in, streamed text and the run's figures out.

Heavy imports wait until the arguments are known to be right, so ``--help`` and mistakes answer at
once.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import model
from model.pictures import check_picture

if TYPE_CHECKING:
    from model.checkpoint import Checkpoint
    from model.loop import Reply, Times
    from model.sampler import SamplingParams

EXAMPLES = """\
examples:
  python -m model.generate --prompt "Explain what a CPU cache does."
  python -m model.generate --model path/to/Qwen3-8B --no-think --prompt "Name three rivers."
  python -m model.generate --model model.gguf --prompts questions.txt --max-tokens 64 --json
  python -m model.generate --prompts questions.jsonl --out answers.jsonl --batch-size 64
  echo "def quicksort(xs):" | python -m model.generate --model path/to/base-model --no-chat
  python -m model.generate --prompt "A poem." --temperature 0.8 --top-p 0.95 --seed 1
  python -m model.generate --prompt "A poem." --kv-cache int8_fp4
  python -m model.generate --model path/to/Qwen3-30B-A3B --prompt "A poem." --moe-stats load.png

Sampling follows the checkpoint's generation_config.json where it has one, and is greedy otherwise.
The device is the accelerator if there is one; TKERNELS_DEVICE=cpu overrides that.
"""


def main(argv: list[str] | None = None) -> int:
    """Exit codes: 0 done, 2 wrong input, 130 interrupted, 141 the reader of stdout went away."""
    try:
        return _run(_parse(argv))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as stop:
        print("; ".join(["interrupted", *map(str, stop.args)]), file=sys.stderr)
        return 130
    except BrokenPipeError:
        # Python flushes stdout once more at exit; give it somewhere to go.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m model.generate",
        description="Generate text with a Qwen3, Qwen3-MoE or Llama checkpoint.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--model",
        type=Path,
        help="Hugging Face folder or .gguf file (default: SmolLM2-135M-Instruct)",
    )
    add("--prompt", help="one prompt; without --prompt and --prompts, stdin is the prompt")
    add(
        "--prompts",
        type=Path,
        metavar="FILE",
        help='one prompt a line (blank lines are skipped), or .jsonl with a field "prompt"',
    )
    add(
        "--out",
        type=Path,
        metavar="FILE.jsonl",
        help="with --prompts: append each answer as it ends, under the prompt's field id or the "
        "number of its line; what has an answer in FILE is skipped: an interrupted run goes on",
    )
    add("--samples", type=int, default=1, help="with --out: answers to each prompt (default 1)")
    add("--kv-blocks", type=int, help="with --out: size of the KV cache in blocks of 16 tokens")
    add("--batch-size", type=int, default=8, help="prompts computed together (default 8)")
    add(
        "--prefill-chunk",
        type=int,
        default=model.PREFILL_CHUNK,
        metavar="N",
        help=f"prompt tokens at once, at most (default {model.PREFILL_CHUNK}); bounds the memory",
    )
    add_kv_options(parser)
    add(
        "--fallback",
        type=Path,
        metavar="FILE",
        help="watch requests of a w8a8 checkpoint, and take those that go bad out of int8; FILE is "
        "what python -m model.calibrate_watch wrote",
    )
    add(
        "--moe-stats",
        nargs="?",
        const=True,
        type=Path,
        metavar="FILE",
        help="tell how evenly tokens went to the experts, layer by layer; FILE is a picture of it",
    )
    add("--system", help="system message of the chat")
    switch = argparse.BooleanOptionalAction
    add("--chat", action=switch, help="use the chat template (default: if there is one)")
    add("--think", action=switch, help="thinking mode of templates that have one (Qwen3)")
    add("--max-tokens", type=int, default=256, help="new tokens at most (default 256)")
    add("--temperature", type=float, help="0 is greedy")
    add("--top-k", type=int, help="sample from the k likeliest tokens")
    add("--top-p", type=float, help="sample from the likeliest tokens that together reach p")
    add("--min-p", type=float, help="drop tokens below min-p times the likeliest")
    add("--repetition-penalty", type=float, help="above 1: fewer repeats")
    add("--seed", type=int, help="makes sampling repeatable; prompt i uses seed + i")
    add("--stop", action="append", default=[], metavar="TEXT", help="end before TEXT (repeatable)")
    add("--ignore-eos", action="store_true", help="go on to --max-tokens")
    add("--kernels", choices=("triton", "torch"), help="default: torch on a CPU, else triton")
    add(
        "--graphs",
        action=switch,
        help="capture the step that computes a token and replay it (default: on an accelerator)",
    )
    add("--dtype", choices=("float32", "bfloat16", "float16"), help="default: float32 on a CPU")
    add("--json", action="store_true", help="print replies and statistics as one JSON object")
    args = parser.parse_args(argv)
    if args.prompt is not None and args.prompts is not None:
        raise ValueError("expected one of --prompt and --prompts, got both")
    if args.system is not None and args.chat is False:
        raise ValueError("expected --system only with a chat, got --no-chat")
    if args.out is None and (args.samples != 1 or args.kv_blocks is not None):
        raise ValueError("expected --samples and --kv-blocks only with --out, got no --out")
    if args.out is not None:
        if args.prompts is None:
            raise ValueError("expected --prompts FILE with --out, got none")
        for name in ("json", "moe_stats"):
            if vars(args)[name]:
                option = name.replace("_", "-")
                raise ValueError(f"expected --out without --{option}, got both")
    for name in ("max_tokens", "batch_size", "prefill_chunk", "samples", "kv_blocks"):
        if vars(args)[name] is not None and vars(args)[name] < 1:
            raise ValueError(
                f"--{name.replace('_', '-')} must be at least 1, got {vars(args)[name]}"
            )
    if args.seed is not None and not 0 <= args.seed < 2**63:
        raise ValueError(f"--seed must be from 0 to 2^63 - 1, got {args.seed}")
    if "" in args.stop:
        raise ValueError("--stop must be a text, got an empty one")
    if isinstance(args.moe_stats, Path):
        check_picture("--moe-stats", args.moe_stats)
    return args


def add_kv_options(parser: argparse.ArgumentParser) -> None:
    """``--kv-cache`` and what belongs to it; ``model.kv_quant.choose`` says what goes together."""
    add = parser.add_argument
    add(
        "--kv-cache",
        default="none",
        metavar="MODE",
        help="none, int8, int8_static, int8_fp4 or int8_static_fp4 (default none)",
    )
    add(
        "--kv-scales",
        type=Path,
        metavar="FILE",
        help="what python -m model.calibrate_kv wrote, for modes that need or can use it",
    )
    add("--kv-tau", type=float, metavar="E", help="relative error that makes a token an outlier")


def read_prompts(args: argparse.Namespace) -> list[tuple[int | str, str]]:
    """(id, prompt as text) of all prompts: at least one, none of them empty."""
    if args.prompts is not None:
        found = prompts_file(args.prompts)
        names = [name for name, _ in found]
        if args.out is not None and len(set(names)) < len(names):
            twice = next(name for i, name in enumerate(names) if name in names[:i])
            raise ValueError(f"{args.prompts}: expected different ids, got {twice!r} twice")
        return found
    if args.prompt is None and sys.stdin.isatty():
        print("prompt (end with Ctrl-D):", file=sys.stderr)
    prompt = args.prompt if args.prompt is not None else sys.stdin.read()
    if not prompt.strip():
        raise ValueError("expected a prompt, got an empty one")
    return [(1, prompt)]


def prompts_file(path: Path) -> list[tuple[int | str, str]]:
    """(id, prompt) of each line: the id of a row of .jsonl that has one, or the line's number."""
    try:
        # Not splitlines(): JSON may hold characters such as U+2028 as they are.
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--prompts {path}: expected a text file, got {error}") from None
    prompts: list[tuple[int | str, str]] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        prompt: Any = line
        name: Any = number
        if path.suffix == ".jsonl":
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}:{number}: expected JSON, got {error}") from None
            prompt = row.get("prompt") if isinstance(row, dict) else None
            if not isinstance(prompt, str) or not prompt.strip():
                raise ValueError(f'{path}:{number}: expected a text "prompt", got {prompt!r}')
            name = row.get("id", number)
            if isinstance(name, bool) or not isinstance(name, int | str):
                raise ValueError(f'{path}:{number}: expected a number or text "id", got {name!r}')
        prompts.append((name, prompt))
    if not prompts:
        raise ValueError(f"--prompts {path}: expected at least one prompt, got none")
    return prompts


def sampling_params(args: argparse.Namespace, defaults: dict[str, float]) -> SamplingParams:
    """Flags over the checkpoint's defaults; a restriction without a temperature means 1."""
    from model.checkpoint import SAMPLING_FIELDS
    from model.sampler import SamplingParams

    given = {name: getattr(args, name) for name in SAMPLING_FIELDS if vars(args)[name] is not None}
    narrowing = [name for name in ("top_k", "top_p", "min_p") if name in given]
    if narrowing and given.get("temperature") == 0:
        name = narrowing[0].replace("_", "-")
        raise ValueError(f"expected --{name} only with sampling, got --temperature 0 (greedy)")
    if narrowing and "temperature" not in defaults:
        defaults = {"temperature": 1.0} | defaults
    chosen: dict[str, Any] = defaults | given
    return SamplingParams(seed=args.seed, **chosen)


def prompt_ids(
    checkpoint: Checkpoint, args: argparse.Namespace, prompts: list[str]
) -> list[list[int]]:
    """Token ids of each prompt, in the chat template if asked for or there is one."""
    from model.tokenizer import encode, encode_chat

    template = checkpoint.tokenizer.chat_template
    chat = template is not None if args.chat is None else args.chat
    if chat and template is None:
        raise ValueError(f"expected a chat template for --chat, got none in {checkpoint.path}")
    if args.system is not None and not chat:
        raise ValueError(f"expected a chat template for --system, got none in {checkpoint.path}")
    if args.think is not None and not (chat and "enable_thinking" in str(template)):
        raise ValueError(
            "expected a chat template with a thinking mode for --think/--no-think, got "
            f"{'one without' if chat else 'no chat template'}"
        )
    if not chat:
        return [encode(checkpoint.tokenizer, prompt) for prompt in prompts]
    return [
        encode_chat(checkpoint.tokenizer, prompt, system=args.system, think=args.think)
        for prompt in prompts
    ]


def _run(args: argparse.Namespace) -> int:
    named = read_prompts(args)
    prompts = [text for _, text in named]

    import torch

    import tkernels
    from model import fallback, graph, routing
    from model.checkpoint import default_path, open_checkpoint
    from model.kv_quant import choose
    from model.loop import Limits, check_prompt, generate
    from model.progress import progress
    from model.runner import choose_dtype, operations
    from model.weights import load_model, say_dequantised

    device = tkernels.device.tensor_device()
    kernels, ops = operations(args.kernels)
    path = args.model or default_path()
    if sys.stderr.isatty() and not args.json:
        print(f"loading {path.name} ...", file=sys.stderr, flush=True)
    checkpoint = open_checkpoint(path)
    config = checkpoint.config
    params = sampling_params(args, checkpoint.sampling)
    ids = prompt_ids(checkpoint, args, prompts)
    for one in ids:
        check_prompt(len(one), config.max_position_embeddings)
    on_cpu = device.type == "cpu"
    stored = config.dtype if config.dtype in ("bfloat16", "float16") else "bfloat16"
    dtype = choose_dtype(args.dtype, "float32" if on_cpu else stored, kernels, config)
    quantization = choose(args.kv_cache, args.kv_scales, args.kv_tau, config)
    calibration = None if args.fallback is None else fallback.load(args.fallback, config)
    counted = None if args.moe_stats is None else routing.Routing(config, device)
    why_not = graph.obstacle(ops, routing=counted is not None)
    if why_not and args.graphs:
        raise ValueError(f"--graphs: {why_not}")
    if why_not and args.graphs is None and not on_cpu:
        print(f"steps are not captured: {why_not}", file=sys.stderr)
    graphs = not why_not and args.graphs is not False
    network = load_model(config, checkpoint.source, dtype=getattr(torch, dtype), device=device)
    say_dequantised(config, checkpoint.source, getattr(torch, dtype))
    if calibration is not None and not fallback.multiplies_in_int8(network):
        raise ValueError(f"expected layers in w8a8 for --fallback, got none in {checkpoint.path}")
    load_s = time.perf_counter() - model.STARTED
    limits = Limits(
        args.max_tokens,
        frozenset() if args.ignore_eos else frozenset(config.eos_token_ids),
        tuple(args.stop),
    )
    if args.out is not None:
        from model.bulk import Settings, answer_file, engine_for

        settings = Settings(
            params=params,
            limits=limits,
            samples=args.samples,
            cache=f"{args.kv_cache} {args.kv_scales} {args.kv_tau}",
            model=str(path.resolve()),
            kernels=f"{kernels} {dtype}",
            fallback=str(args.fallback),
        )
        engine = engine_for(
            network,
            ops,
            checkpoint.tokenizer,
            min(max(map(len, ids)) + args.max_tokens, config.max_position_embeddings),
            batch_size=args.batch_size,
            prefill_chunk=args.prefill_chunk,
            kv_blocks=args.kv_blocks,
            quantization=quantization,
            fallback=calibration,
            graphs=graphs,
        )
        answers = {name: one for (name, _), one in zip(named, ids, strict=True)}
        print(answer_file(engine, answers, settings, args.out), file=sys.stderr)
        return 0
    streaming = len(ids) == 1 and not args.json
    with progress([len(one) for one in ids], args.prefill_chunk) as (on_done, on_prefill):
        replies, times = generate(
            network,
            ops,
            checkpoint.tokenizer,
            ids,
            params,
            limits,
            batch_size=args.batch_size,
            prefill_chunk=args.prefill_chunk,
            quantization=quantization,
            fallback=calibration,
            routing=counted,
            graphs=graphs,
            on_text=_print_piece if streaming else None,
            on_done=on_done,
            on_prefill=on_prefill,
        )
    stats = run_figures(times, load_s, network.bytes_per_step) | {
        "peak_memory_bytes": tkernels.device.memory_peak(),
        "kv_cache": times.kv_cache,
        "graphs": times.graphs,
        "kernels": kernels,
        "dtype": dtype,
        "device": tkernels.device.current().name if kernels == "triton" else device.type,
        "threads": torch.get_num_threads(),
    }
    if calibration is not None:
        fell = {i: found for i, found in sorted(times.fallback.items()) if found is not None}
        stats["fallback"] = {
            "watched": len(times.fallback),
            "fell_back": [{"prompt": i, **found} for i, found in fell.items()],
        }
    if counted is not None:
        stats["experts"] = counted.summary()
        if isinstance(args.moe_stats, Path):
            routing.draw(args.moe_stats, stats["experts"])
    _print_replies(replies, prompts, stats, args.json, streaming)
    print(_summary(stats), file=sys.stderr)
    if counted is not None and not args.json:
        print(routing.table(stats["experts"]), file=sys.stderr)
    return 130 if any(r.finish_reason == "interrupted" for r in replies) else 0


def _print_piece(index: int, piece: str) -> None:
    print(piece, end="", flush=True)


def run_figures(times: Times, load_s: float, bytes_per_step: int) -> dict[str, Any]:
    """The figures of a run. A figure that nothing was measured for is None."""
    steps, decode = len(times.decode_steps_s), sum(times.decode_steps_s)
    return {
        "load_s": load_s,
        "first_token_s": times.first_token_s,
        "prefill_tokens": times.prefill_tokens,
        "prefill_s": times.prefill_s,
        "decode_steps": steps,
        "decode_tokens": times.decode_tokens,
        "decode_s": decode,
        "ms_per_token": decode / steps * 1e3 if steps else None,
        "median_step_ms": statistics.median(times.decode_steps_s) * 1e3 if steps else None,
        "tokens_per_s": times.decode_tokens / decode if steps else None,
        "weight_bytes": bytes_per_step,
        "weight_gb_per_s": bytes_per_step * steps / decode / 1e9 if steps else None,
    }


def _summary(s: dict[str, Any]) -> str:
    def show(name: str, form: str) -> str:
        return "-" if s[name] is None else format(s[name], form)

    return (
        f"[{s['device']}, {s['kernels']}, {s['dtype']}] load {s['load_s']:.2f} s | "
        f"first token {show('first_token_s', '.3f')} s ({s['prefill_tokens']} prompt tokens) | "
        f"{show('ms_per_token', '.2f')} ms per token | {show('tokens_per_s', '.1f')} tok/s "
        f"({s['decode_tokens']} tokens) | weights {show('weight_gb_per_s', '.1f')} GB/s | "
        f"peak memory {s['peak_memory_bytes'] / 1e9:.2f} GB"
        + _kv_summary(s["kv_cache"])
        + _graph_summary(s.get("graphs"))
        + _fallback_summary(s.get("fallback"))
    )


def _kv_summary(kv: dict[str, Any]) -> str:
    if kv["mode"] == "none":
        return ""
    text = f" | KV cache {kv['mode']}, {kv['bytes_per_token']:.0f} bytes a token"
    if "fp4" in kv["mode"]:
        text += f", residuals of {kv['residuals']} vectors kept"
    if kv["residuals_dropped"]:
        text += f", {kv['residuals_dropped']} residuals left out (their pool was full)"
    return text


def _graph_summary(graphs: dict[str, Any] | None) -> str:
    if graphs is None:
        return ""
    sizes = len(graphs["sizes"])
    return (
        f" | {sizes} graph{'s'[: sizes != 1]} captured in {graphs['capture_s']:.2f} s, "
        f"{graphs['bytes'] / 1e6:.0f} MB"
    )


def _fallback_summary(found: dict[str, Any] | None) -> str:
    if found is None:
        return ""
    return f" | {len(found['fell_back'])} of {found['watched']} requests fell back"


def _print_replies(
    replies: list[Reply],
    prompts: list[str],
    stats: dict[str, Any],
    as_json: bool,
    streaming: bool,
) -> None:
    if as_json:
        print(json.dumps({"replies": [vars(r) for r in replies], "stats": stats}))
    elif streaming:
        print(flush=True)
    else:
        for number, (reply, prompt) in enumerate(zip(replies, prompts, strict=True), start=1):
            print(f"--- {number}: {prompt}\n{reply.text}")
        sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
