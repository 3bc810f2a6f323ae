"""Page size against waste: requests of random lengths on pages of 8 to 4096 tokens.

    python -m bench.page_size
    python -m bench.page_size --lengths lengths.txt --plot waste.png

A request of L tokens on pages of s tokens takes ceil(L / s) of them. Of each size is told

    waste     share of the tokens' places in taken pages that no token is in, when requests end
    growing   the same over a request's whole life, from its first token to its last, each step
              counted (a page is taken when it is needed)
    peak      places in taken pages at the fullest moment, over tokens then: requests take their
              pages at once, ``--live`` at a time, and a random one leaves for each that comes
    table     bytes that a page costs beside its keys and values (``--page-bytes``: an entry of the
              block table, a digest and its entry in a hash table, the count of owners, a bit), over
              the bytes of keys and values of the requests' tokens
    prefix    tokens of shared prefixes that whole pages hold, where two requests share a uniformly
              random part of one: the rest, less than a page, is computed again
    take+give microseconds of the processor that ``--allocator`` needs for a page, in Python

Waste falls with s, and the table grows. Their sum is least at about s = sqrt(2 mean(L) page_bytes /
token_bytes), and the last line tells how many bytes a page would have to cost for 16 tokens to be
that size.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import math
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from bench.rows import UsageError

SIZES = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
ALLOCATOR = "model.pages:FreePages"
# Keys and values of a token in bf16: 36 layers, 8 KV heads of 128 (Qwen3-8B).
TOKEN_BYTES = 36 * 8 * 128 * 2 * 2
PAGE_BYTES = 4 + 16 + 100 + 4 + 1 / 8


@dataclasses.dataclass(frozen=True)
class Row:
    """What a page size costs; see above."""

    size: int
    waste: float
    growing: float
    peak: float
    table: float
    prefix: float
    take_give_us: float | None

    @property
    def total(self) -> float:
        """Bytes that hold no keys or values of a token, over those that do."""
        return self.waste / (1 - self.waste) + self.table


def normal_lengths(count: int, mean: float, sd: float, most: int, seed: int) -> torch.Tensor:
    """int64 [count]: rounded, and drawn again outside of 1 to ``most``."""
    generator = torch.Generator().manual_seed(seed)
    found = torch.empty(0, dtype=torch.int64)
    for _ in range(100):
        drawn = torch.normal(mean, sd, (2 * count,), generator=generator).round().long()
        found = torch.cat((found, drawn[(drawn >= 1) & (drawn <= most)]))[:count]
        if len(found) == count:
            return found
    raise UsageError(f"--mean and --sd must give lengths from 1 to {most}, got {mean:g} and {sd:g}")


def read_lengths(path: Path) -> torch.Tensor:
    """int64 [n] of a file of whole numbers."""
    try:
        found = [int(word) for word in path.read_text().split()]
    except (OSError, ValueError) as error:
        raise UsageError(f"--lengths {path}: expected whole numbers, got {error}") from None
    if not found or min(found) < 1:
        raise UsageError(f"--lengths {path}: expected lengths from 1 on, got {found[:1] or 'none'}")
    return torch.tensor(found)


def pages(lengths: torch.Tensor, size: int) -> torch.Tensor:
    """int64: pages that each request takes."""
    return (lengths + size - 1) // size


def waste(lengths: torch.Tensor, size: int) -> float:
    """Empty places over places, when requests end."""
    places = int(pages(lengths, size).sum()) * size
    return 1 - int(lengths.sum()) / places


def growing_waste(lengths: torch.Tensor, size: int) -> float:
    """Empty places over places, summed over all steps t = 1 .. L of all requests."""
    whole, rest = lengths // size, lengths % size
    tokens = lengths * (lengths + 1) // 2
    places = size * (size * whole * (whole + 1) // 2 + rest * (whole + 1))
    return 1 - int(tokens.sum()) / int(places.sum())


def hit_share(prefixes: torch.Tensor, size: int) -> float:
    """Tokens of prefixes that whole pages hold, over all."""
    return int((prefixes // size * size).sum()) / max(1, int(prefixes.sum()))


def leaving(count: int, live: int, seed: int) -> list[int]:
    """Which of the live requests leaves as each of the later ones comes: its place."""
    generator = torch.Generator().manual_seed(seed)
    places: list[int] = torch.randint(live, (max(0, count - live),), generator=generator).tolist()
    return places


def peak(lengths: torch.Tensor, size: int, live: int, seed: int) -> float:
    """Places over tokens at the moment with the most places taken."""
    count = len(lengths)
    live = min(live, count)
    places = (pages(lengths, size) * size).tolist()
    tokens = lengths.tolist()
    here = list(range(live))
    now, held = sum(places[:live]), sum(tokens[:live])
    most, then = now, held
    for new, place in enumerate(leaving(count, live, seed), start=live):
        old, here[place] = here[place], new
        now, held = now + places[new] - places[old], held + tokens[new] - tokens[old]
        if now > most:
            most, then = now, held
    return float(most / then)


def churn_us(
    make: Callable[[int], Any], lengths: torch.Tensor, size: int, live: int, seed: int
) -> float:
    """Microseconds to take and give a page back, while requests come and leave as above."""
    counts = pages(lengths, size).tolist()
    live = min(live, len(counts))
    largest = max(counts)
    free = make(live * largest)
    held = [free.take(n) for n in counts[:live]]
    gone = leaving(len(counts), live, seed)
    began = time.process_time()
    for new, place in enumerate(gone, start=live):
        free.give(held[place])
        held[place] = free.take(counts[new])
    seconds = time.process_time() - began
    return float(seconds / max(1, sum(counts[live:])) * 1e6)


class LinkedPages:
    """Free pages as a doubly linked list of records, the first in first out: for comparison."""

    def __init__(self, num_pages: int) -> None:
        self.records = [_Record(i) for i in range(-1, num_pages)]
        for left, right in zip(self.records, self.records[1:] + self.records[:1], strict=True):
            left.after, right.before = right, left
        self.ends = self.records[0]

    def take(self, count: int) -> list[int]:
        """From the front."""
        record, pages = self.ends.after, []
        for _ in range(count):
            pages.append(record.page)
            record = record.after
        self.ends.after, record.before = record, self.ends
        return pages

    def give(self, pages: Sequence[int]) -> None:
        """To the end."""
        last = self.ends.before
        for page in pages:
            record = self.records[page + 1]
            record.before, last.after = last, record
            last = record
        last.after, self.ends.before = self.ends, last


class _Record:
    __slots__ = ("after", "before", "page")

    def __init__(self, page: int) -> None:
        self.page = page
        self.before = self.after = self


class QueuedPages:
    """Free pages as numbers in a deque: for comparison."""

    def __init__(self, num_pages: int) -> None:
        self.numbers = deque(range(num_pages))
        self.give = self.numbers.extend

    def take(self, count: int) -> list[int]:
        """From the front."""
        take = self.numbers.popleft
        return [take() for _ in range(count)]


def measure(
    lengths: torch.Tensor,
    sizes: Sequence[int],
    *,
    live: int,
    seed: int,
    token_bytes: float,
    page_bytes: float,
    allocator: Callable[[int], Any] | None,
) -> list[Row]:
    """A row a size."""
    generator = torch.Generator().manual_seed(seed)
    prefixes = (lengths * torch.rand(len(lengths), generator=generator)).long()
    total = float(lengths.sum())
    return [
        Row(
            size,
            waste(lengths, size),
            growing_waste(lengths, size),
            peak(lengths, size, live, seed),
            float(pages(lengths, size).sum()) * page_bytes / (total * token_bytes),
            hit_share(prefixes, size),
            None if allocator is None else churn_us(allocator, lengths, size, live, seed),
        )
        for size in sizes
    ]


def report(lengths: torch.Tensor, rows: Sequence[Row], token_bytes: float) -> str:
    """The table, with the waste drawn beside it."""
    values = lengths.double()
    lines = [
        f"{len(lengths)} requests, mean {values.mean():.1f} tokens, sd {values.std():.1f}, "
        f"longest {int(lengths.max())}; {token_bytes:g} bytes of keys and values a token",
        f"{'page':>5} {'waste':>7} {'growing':>8} {'peak':>6} {'table':>9} {'prefix':>7} "
        f"{'take+give':>10}  waste",
    ]
    for row in rows:
        time_us = "-" if row.take_give_us is None else f"{row.take_give_us:.2f} us"
        lines.append(
            f"{row.size:5} {row.waste:7.2%} {row.growing:8.2%} {row.peak:6.2f} {row.table:9.5%} "
            f"{row.prefix:7.1%} {time_us:>10}  {'#' * max(1, round(50 * row.waste))}"
        )
    best = min(rows, key=lambda row: row.total)
    needed = 16**2 * token_bytes / (2 * float(values.mean()))
    lines.append(
        f"least waste and table: {best.size} tokens ({best.waste:.2%} + {best.table:.5%}); for 16 "
        f"to be the least, a page would have to cost {needed:,.0f} bytes beside keys and values"
    )
    return "\n".join(lines)


def compare(lengths: torch.Tensor, allocator: Callable[[int], Any], live: int, seed: int) -> str:
    """The allocator against others, on pages of 16 tokens, each three times in turn."""
    makers = {"bitmap": allocator, "linked list": LinkedPages, "deque": QueuedPages}
    times: dict[str, list[float]] = {name: [] for name in makers}
    for _ in range(3):
        for name, make in makers.items():
            times[name].append(churn_us(make, lengths, 16, live, seed))
    found = ", ".join(f"{name} {sorted(t)[1]:.3f} us" for name, t in times.items())
    return f"take and give back a page of 16 tokens, median of 3: {found}"


def plot(rows: Sequence[Row], path: Path) -> None:
    """Waste and its parts over the page size."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise UsageError("--plot needs matplotlib (extra 'plot')") from None
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    sizes = [row.size for row in rows]
    for name in ("waste", "growing", "table"):
        axes.plot(sizes, [100 * getattr(row, name) for row in rows], marker="o", label=name)
    axes.plot(sizes, [100 * (1 - row.prefix) for row in rows], marker="o", label="prefix missed")
    axes.set(xscale="log", yscale="log", xlabel="tokens of a page", ylabel="%")
    axes.set_xticks(sizes, [str(s) for s in sizes])
    axes.minorticks_off()
    axes.legend()
    figure.savefig(path, dpi=150)


def _named(text: str) -> Callable[[int], Any]:
    module, _, name = text.partition(":")
    try:
        found: Callable[[int], Any] = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise UsageError(f"--allocator must be MODULE:CLASS, got {text!r}: {error}") from None
    return found


def _sizes(text: str) -> list[int]:
    try:
        found = sorted({int(word) for word in text.split(",")})
    except ValueError:
        found = []
    if not found or found[0] < 1:
        raise UsageError(f"--sizes must be whole numbers from 1 on, got {text!r}")
    return found


EXAMPLES = """examples:
  python -m bench.page_size --count 10000
  python -m bench.page_size --lengths lengths.txt --sizes 8,16,32 --plot waste.png
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Exit codes: 0 done, 2 cannot be done."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.page_size",
        description=(__doc__ or "").split("\n")[0],
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--lengths",
        type=Path,
        metavar="FILE",
        help="whole numbers (default: a normal distribution)",
    )
    add("--count", type=int, default=100_000, help="requests (default 100000)")
    add("--mean", type=float, default=200.0, help="tokens (default 200)")
    add("--sd", type=float, default=120.0, help="tokens (default 120)")
    add(
        "--longest",
        type=int,
        default=4096,
        help="tokens; what is outside of 1 to this is drawn again",
    )
    add(
        "--sizes",
        default=",".join(map(str, SIZES)),
        help="tokens of a page (default 8,16,...,4096)",
    )
    add("--live", type=int, default=64, help="requests at a time (default 64)")
    add(
        "--token-bytes", type=float, default=TOKEN_BYTES, help="of keys and values (Qwen3-8B, bf16)"
    )
    add(
        "--page-bytes", type=float, default=PAGE_BYTES, help=f"beside them (default {PAGE_BYTES:g})"
    )
    add("--allocator", default=ALLOCATOR, metavar="MODULE:CLASS", help="'' times none")
    add("--seed", type=int, default=0)
    add("--plot", type=Path, metavar="FILE.png")
    add("--json", type=Path, metavar="FILE", help="write the rows")
    args = parser.parse_args(argv)
    try:
        if min(args.count, args.live, args.longest) < 1 or not args.sd > 0:
            raise UsageError(
                "--count, --live and --longest must be 1 or more, --sd above 0, got "
                f"{args.count}, {args.live}, {args.longest} and {args.sd:g}"
            )
        if not (args.token_bytes > 0 and args.page_bytes >= 0 and math.isfinite(args.mean)):
            raise UsageError(
                "--token-bytes must be above 0, --page-bytes 0 or more, --mean a number"
            )
        sizes = _sizes(args.sizes)
        if args.lengths is not None:
            lengths = read_lengths(args.lengths)
        else:
            lengths = normal_lengths(args.count, args.mean, args.sd, args.longest, args.seed)
        allocator = _named(args.allocator) if args.allocator else None
        rows = measure(
            lengths,
            sizes,
            live=args.live,
            seed=args.seed,
            token_bytes=args.token_bytes,
            page_bytes=args.page_bytes,
            allocator=allocator,
        )
        print(report(lengths, rows, args.token_bytes))
        if allocator is not None:
            print(compare(lengths, allocator, args.live, args.seed))
        if args.plot:
            plot(rows, args.plot)
        if args.json:
            args.json.write_text(
                json.dumps([dataclasses.asdict(row) for row in rows], indent=1) + "\n"
            )
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
