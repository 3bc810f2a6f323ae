"""What the model says of each config of a measured table, as a table for ``python -m bench.rank``.

    TKERNELS_DEVICE=compile:sm90 python -m autotune.offline.table --kernel rope \\
        --case qwen3-8b-t64 measured.json > model.json

Both are JSON lists of ``{"config": {...}, "ms": 0.041}``; ``null`` says that the config fails.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from autotune.offline import model_for
from tkernels import device, registry
from tkernels.registry import Config, KernelSpec, Problem


def estimates(
    spec: KernelSpec, problem: Problem, configs: Iterable[Config]
) -> list[dict[str, Any]]:
    """A row for each config: its estimate, or null and why."""
    model = model_for(device.current())
    rows = []
    for config in configs:
        answer = model.estimate(spec, problem, config)
        row = {"config": config, "ms": answer.ms, "facts": dict(answer.facts)}
        rows.append(row if answer.ok else {**row, "failure": f"{answer.kind}: {answer.message}"})
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Exit codes: 0 done, 2 cannot be done."""
    parser = argparse.ArgumentParser(
        prog="python -m autotune.offline.table", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--kernel", required=True, metavar="NAME")
    parser.add_argument("--case", required=True, metavar="NAME", help="name of its problem")
    parser.add_argument("table", type=Path, metavar="TABLE.json")
    args = parser.parse_args(argv)
    try:
        if not device.current().compile_only:
            raise ValueError(
                f"TKERNELS_DEVICE must be compile:<arch>, got {device.current().arch} to run on"
            )
        spec = registry.get(args.kernel)
        problems = {case.name: case.problem for case in spec.cases}
        if args.case not in problems:
            raise ValueError(f"--case must be one of {', '.join(problems)}, got {args.case!r}")
        configs = [row["config"] for row in json.loads(args.table.read_text())]
    except (OSError, ValueError, KeyError, TypeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    json.dump(estimates(spec, problems[args.case], configs), sys.stdout, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
