"""How the work of a launch is dealt to its programs: what no compiled program can tell.

A launch's grid and its argument ``n_tiles`` say how many tiles a program walks. How often the loop
within a tile runs follows from shapes for row-wise kernels, and from the lengths of sequences for
attention, so those are written out here. A kernel that is not listed counts as one step a tile,
unless its constants are N_COLS and BLOCK_N.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from tkernels.device import cdiv
from tkernels.offline import Launch
from tkernels.registry import Problem


@dataclasses.dataclass(frozen=True)
class Work:
    """Steps of the inner loop in each tile, in the order of tiles."""

    tiles: int
    programs: int
    steps: tuple[int, ...]  # of each tile; one number where all are alike; 0: nothing to do
    masked: int = 0  # steps that the second of two inner loops has; the first has the others
    useful: float = 1.0  # share of the lanes of loads and stores that are not masked off
    run: int = 128  # bytes of a tile that lie together in memory

    def of_programs(self) -> dict[tuple[int, int], int]:
        """How many programs have (tiles, steps)."""
        found: dict[tuple[int, int], int] = {}
        for pair in self.in_order():
            found[pair] = found.get(pair, 0) + 1
        return found

    def in_order(self) -> Iterator[tuple[int, int]]:
        """(tiles, steps) of each program; program p has tiles p, p + programs, ..."""
        if len(self.steps) == 1:
            for p in range(self.programs):
                tiles = cdiv(self.tiles - p, self.programs)
                yield tiles, tiles * self.steps[0]
            return
        for p in range(self.programs):
            own = [n for n in self.steps[p :: self.programs] if n]
            yield len(own), sum(own)


# Their loops have lengths that nothing here counts yet: no estimate is better than a wrong one.
UNCOUNTED = (
    "masked_gemm", "moe_gemm", "moe_w4a16_gemm", "paged_attn_quantized", "w4a16_gemm",
    "w8a16_gemm",
)  # fmt: skip


def of_launch(kernel: str, problem: Problem, launch: Launch) -> Work:
    """The work of ``launch``, which the kernel called ``kernel`` made for ``problem``."""
    grid, args = launch.grid[0] * launch.grid[1] * launch.grid[2], launch.args
    tiles = int(args.get("n_tiles", grid))
    run = _run(problem, launch)
    if kernel == "paged_attn" and "BLOCK_M" in args:
        return Work(tiles, grid, _paged(problem, launch), masked=1, run=run)
    if kernel == "flash_attn":
        blocks, masked = _flash(problem, launch)
        return Work(tiles, grid, blocks, masked, run=run)
    steps, useful = 1, 1.0
    if "N_COLS" in args and "BLOCK_N" in args:
        cols, block = int(args["N_COLS"]), int(args["BLOCK_N"])
        parts = cdiv(cols, block)
        useful = cols / (parts * block)
        # Some kernels walk a row's columns in a loop, others make a tile of each part.
        rows = int(args.get("n_inner_tiles", 1)) * (problem.get("n_outer") or 1)
        steps = parts if tiles <= rows else 1
    if "n_inner" in args and "BLOCK_ROWS" in args:
        padded = cdiv(int(args["n_inner"]), int(args["BLOCK_ROWS"])) * int(args["BLOCK_ROWS"])
        useful *= int(args["n_inner"]) / padded
    return Work(tiles, grid, (steps,), useful=useful, run=run)


def _run(problem: Problem, launch: Launch) -> int:
    """By the constant that bounds a tile's last dimension."""
    for name in ("BLOCK_D", "BLOCK_HALF", "BLOCK_N"):
        if name in launch.args and "dtype" in problem:
            return min(128, int(launch.args[name]) * int(problem["dtype"].itemsize))
    return 128


def _paged(problem: Problem, launch: Launch) -> tuple[int, ...]:
    """Blocks of keys that each tile of ``paged_attn`` looks at."""
    p, args = problem, launch.args
    pack = p["num_heads"] // p["num_kv_heads"] if args["PACK_HEADS"] else 1
    head_tiles, row_tiles = p["num_heads"] // pack, int(args["row_tiles"])
    splits, share, m, n = (int(args[x]) for x in ("SPLITS", "MIN_SHARE", "BLOCK_M", "BLOCK_N"))
    steps: list[int] = []
    lengths = p["q_lens"] or [1] * p["batch"]
    for tokens, context in zip(lengths, p["contexts"], strict=True):
        base = 0 if p["window"] is None else max(context - tokens - p["window"] + 1, 0)
        used = min(max(cdiv(context - base, share), 1), splits)
        for row_tile in range(row_tiles):
            there = row_tile * m < tokens * pack
            high = min(context, context - tokens + (row_tile * m + m - 1) // pack + 1)
            low = 0
            if p["window"] is not None:
                low = max(context - tokens + row_tile * m // pack - p["window"] + 1, 0)
            blocks = cdiv(max(high, 0), n) - low // n
            for split in range(splits):
                mine = max(1, cdiv(blocks - split, used)) if there and split < used else 0
                steps += [mine] * head_tiles
    return tuple(steps)


def _flash(problem: Problem, launch: Launch) -> tuple[tuple[int, ...], int]:
    """(blocks of keys that each tile of ``flash_attn`` looks at, those among them with a mask)."""
    p, args = problem, launch.args
    m = int(args["BLOCK_M"] if "BLOCK_M" in args else args["M"])
    n = int(args["BLOCK_N"] if "BLOCK_N" in args else args["N"])
    pairs: Sequence[tuple[int, int]] = p["lengths"] or [(p["seqlen_q"], p["seqlen_k"])] * p["batch"]
    row_tiles = cdiv(max(pair[0] for pair in pairs), m)
    heads, section = p["num_heads"], int(args["section"])
    of_row = [[_flash_steps(p, row, m, n, *pair) for row in range(row_tiles)] for pair in pairs]
    steps: list[int] = []
    total = len(pairs) * heads
    for start in range(0, total, section):
        width = min(section, total - start)
        for row in reversed(range(row_tiles)):
            steps += [of_row[(start + i) // heads][row] for i in range(width)]
    return tuple(steps), (cdiv(m, n) if p["causal"] else 1)


def _flash_steps(p: Problem, row: int, m: int, n: int, queries: int, keys: int) -> int:
    if row * m >= queries:
        return 0
    position = row * m + keys - queries
    end = min(keys, max(position + m, 0)) if p["causal"] else keys
    first = 0 if p["window"] is None else max(position - p["window"] + 1, 0)
    return max(1, cdiv(end, n) - first // n)
