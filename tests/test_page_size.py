"""Page size against waste: each figure by hand, and what the table says of 16 tokens."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import pytest
import torch

from bench import page_size
from bench.page_size import LinkedPages, QueuedPages
from model.pages import FreePages


def some(count: int = 60, seed: int = 0) -> torch.Tensor:
    return torch.randint(1, 90, (count,), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("size", [1, 8, 16, 37, 4096])
def test_waste_is_counted(size: int) -> None:
    lengths = some()
    places = tokens = grown_places = grown_tokens = 0
    for length in lengths.tolist():
        places += math.ceil(length / size) * size
        tokens += length
        for t in range(1, length + 1):
            grown_places += math.ceil(t / size) * size
            grown_tokens += t
    assert page_size.waste(lengths, size) == pytest.approx(1 - tokens / places)
    assert page_size.growing_waste(lengths, size) == pytest.approx(1 - grown_tokens / grown_places)
    hit = sum(length // size * size for length in lengths.tolist())
    assert page_size.hit_share(lengths, size) == pytest.approx(hit / tokens)


def test_peak_is_the_fullest_moment() -> None:
    lengths, live = some(40), 5
    gone = page_size.leaving(40, live, seed=3)
    held = lengths[:live].tolist()
    moments = [list(held)]
    for length, place in zip(lengths[live:].tolist(), gone, strict=True):
        held[place] = length
        moments.append(list(held))
    places = [sum(math.ceil(n / 16) * 16 for n in moment) for moment in moments]
    fullest = places.index(max(places))
    assert page_size.peak(lengths, 16, live, 3) == places[fullest] / sum(moments[fullest])
    assert page_size.peak(lengths[:3], 1, 64, 3) == 1.0


def test_normal_lengths_are_cut() -> None:
    found = page_size.normal_lengths(20_000, 200, 120, 4096, 0)
    assert len(found) == 20_000
    assert found.min() >= 1
    assert 210 < float(found.double().mean()) < 215  # above 200: what is below 1 is drawn again
    assert int(page_size.normal_lengths(500, 200, 120, 150, 0).max()) == 150
    with pytest.raises(page_size.UsageError, match="lengths from 1 to 10, got 900 and 1"):
        page_size.normal_lengths(5, 900, 1, 10, 0)


@pytest.mark.parametrize("make", [FreePages, LinkedPages, QueuedPages])
def test_allocators_hand_out_each_page_once(make: type) -> None:
    free, held, rng = make(70), list[int](), random.Random(0)
    for _ in range(300):
        if held and rng.random() < 0.5:
            rng.shuffle(held)
            back = [held.pop() for _ in range(rng.randrange(len(held)) + 1)]
            free.give(back)
        else:
            held += free.take(rng.randrange(71 - len(held)))
        assert len(set(held)) == len(held)
    free.give(held)
    assert sorted(free.take(70)) == list(range(70))


def test_smaller_pages_always_waste_less_and_tables_do_not_weigh() -> None:
    """No valley at 16 tokens: a page would have to cost 89 KB beside its keys and values."""
    lengths = page_size.normal_lengths(5_000, 200, 120, 4096, 0)
    rows = page_size.measure(
        lengths,
        page_size.SIZES,
        live=64,
        seed=0,
        token_bytes=page_size.TOKEN_BYTES,
        page_bytes=page_size.PAGE_BYTES,
        allocator=None,
    )
    totals = [row.total for row in rows]
    assert totals == sorted(totals)
    by_size = {row.size: row for row in rows}
    assert 0.030 < by_size[16].waste < 0.038
    assert by_size[4096].waste > 0.94
    text = page_size.report(lengths, rows, page_size.TOKEN_BYTES)
    assert "least waste and table: 8 tokens" in text
    drawn = [line.count("#") for line in text.splitlines()[2:-1]]
    assert drawn == sorted(drawn)
    heavy = page_size.measure(
        lengths,
        page_size.SIZES,
        live=64,
        seed=0,
        token_bytes=147_456,
        page_bytes=90e3,
        allocator=None,
    )
    assert min(heavy, key=lambda row: row.total).size == 16


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lengths, rows, picture = (tmp_path / name for name in ("l.txt", "rows.json", "waste.png"))
    lengths.write_text("16 17\n33\n" * 40)
    argv = ["--lengths", lengths, "--sizes", "16,1", "--json", rows, "--plot", picture]
    assert page_size.main([str(a) for a in (*argv, "--live", 8)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("120 requests, mean 22.0 tokens")
    assert "bitmap" in out
    assert "linked list" in out
    found = {row["size"]: row for row in json.loads(rows.read_text())}
    assert found[1]["waste"] == 0
    assert found[16]["waste"] == pytest.approx(1 - 66 / 96)
    assert found[16]["take_give_us"] > 0
    assert picture.stat().st_size > 1000


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ("--sizes 8,x", "--sizes must be whole numbers from 1 on, got '8,x'"),
        ("--sizes 0", "--sizes must be whole numbers from 1 on, got '0'"),
        ("--lengths none.txt", "--lengths none.txt: expected whole numbers"),
        ("--count 0", "--count, --live and --longest must be 1 or more"),
        ("--token-bytes 0", "--token-bytes must be above 0"),
        ("--allocator nothing", "--allocator must be MODULE:CLASS, got 'nothing'"),
    ],
)
def test_mistakes_are_named(argv: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert page_size.main(argv.split()) == 2
    assert words in capsys.readouterr().err
