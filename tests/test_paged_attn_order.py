"""The order of programs of the Hopper bodies for decode: each place once, most keys first."""

from __future__ import annotations

import inspect
import itertools
import math
import random
import types
from typing import Any

import pytest
import torch

from tests.plain_gluon import Block, Int, block
from tkernels import paged_attn_decode_hopper, paged_attn_order
from tkernels.device import cdiv

KINDS = ("mixed", "equal", "random", "few-long", "zeros")


@pytest.fixture
def program_at(monkeypatch: pytest.MonkeyPatch) -> Any:
    """``_program_at`` as plain Python, that takes lengths for a pointer."""

    def load(at: Any, mask: Block, other: int) -> Block:
        lens, seqs = at
        return block(torch.where(mask, lens[torch.where(mask, seqs, 0).long()], other))

    class Lengths:
        def __init__(self, lens: list[int]) -> None:
            self.lens = torch.tensor(lens, dtype=torch.int32)

        def __add__(self, seqs: torch.Tensor) -> Any:
            return self.lens, seqs

    def where(condition: Any, a: Any, b: Any) -> Any:
        if isinstance(condition, torch.Tensor):
            return block(torch.where(condition, a, b))
        return a if condition else b

    def least(a: Any, b: Any) -> Any:
        return a.clamp(max=b) if isinstance(a, torch.Tensor) else Int(min(a, b))

    def most(a: Any, b: Any) -> Any:
        return a.clamp(min=b) if isinstance(a, torch.Tensor) else Int(max(a, b))

    gl = types.SimpleNamespace(
        float32=torch.float32, int32=torch.int32, BlockedLayout=lambda *args: None,
        num_warps=lambda: 2, static_range=range, load=load, where=where, minimum=least,
        maximum=most, sum=lambda t, axis: Int(t.sum()), max=lambda t, axis: Int(t.max()),
        arange=lambda first, end, layout: block(torch.arange(first, end, dtype=torch.int32)),
        associative_scan=lambda t, axis, add: block(t.cumsum(0)),
    )  # fmt: skip
    monkeypatch.setattr(paged_attn_order, "gl", gl)
    halvings = getattr(paged_attn_order._HALVINGS, "value", paged_attn_order._HALVINGS)
    monkeypatch.setattr(paged_attn_order, "_HALVINGS", halvings)
    for name in ("_add", "_shares"):
        made = getattr(paged_attn_order, name)
        monkeypatch.setattr(paged_attn_order, name, getattr(made, "fn", made))
    kernel = paged_attn_order._program_at

    def run(
        place: int, lens: list[int], splits: int, share: int, window: int | None
    ) -> tuple[int, ...]:
        lanes = paged_attn_order.lanes_of(len(lens), True)
        has_window = window is not None
        return tuple(
            getattr(kernel, "fn", kernel)(
                Int(place), Lengths(lens), len(lens), window, lanes, 16, splits, share, has_window
            )
        )

    return run


def lengths(kind: str, batch: int, rng: random.Random) -> list[int]:
    if kind == "mixed":
        return [(128, 8192)[i % 2] for i in range(batch)]
    if kind == "equal":
        return [rng.choice((1, 5, 4096))] * batch
    if kind == "random":
        return [rng.randint(0, 9000) for _ in range(batch)]
    if kind == "few-long":
        return [rng.choice((0, 3, 20, 20, 33, 20000)) for _ in range(batch)]
    return [0] * batch


def shares(context: int, splits: int, share: int, window: int | None) -> tuple[int, int]:
    """(keys from the first block in sight on, splits that they are dealt to)."""
    keys = context if window is None else context - max(context - window, 0) // 16 * 16
    return keys, min(max(cdiv(keys, share), 1), splits)


@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize(
    ("batch", "splits", "share"),
    [(1, 1, 64), (1, 4, 100), (2, 3, 100), (17, 8, 2048), (33, 3, 100), (64, 4, 2048),
     (256, 2, 2048)],
)  # fmt: skip
@pytest.mark.parametrize("kind", KINDS)
def test_each_program_has_one_place(
    kind: str, batch: int, splits: int, share: int, window: int | None, program_at: Any
) -> None:
    rng = random.Random(f"{kind}-{batch}-{splits}-{window}")
    lens = lengths(kind, batch, rng)
    facts = [shares(n, splits, share, window) for n in lens]
    total = sum(used for _, used in facts)
    found = [program_at(place, lens, splits, share, window) for place in range(batch * splits)]
    assert {places for *_, places in found} == {total}
    assert [split for _, split, *_ in found[total:]] == [splits] * (batch * splits - total)
    assert all(0 <= seq < batch for seq, *_ in found)
    there = [(seq, split) for seq, split, *_ in found[:total]]
    expected = {(seq, split) for seq, (_, used) in enumerate(facts) for split in range(used)}
    assert len(there) == len(set(there))
    assert set(there) == expected
    assert all(context == lens[seq] for seq, _, context, _ in found[:total])
    # Splits of a sequence are neighbours, in order.
    for before, after in itertools.pairwise(there):
        assert (after[0] == before[0] and after[1] == before[1] + 1) or after[1] == 0
    # Most keys first, to a sixteenth of the most; alike ones by number.
    each = [facts[seq][0] // facts[seq][1] for seq, _ in there]
    step = math.ceil((max(each) + 1) / 16)
    assert all(after < before + step for before, after in itertools.pairwise(each))
    if kind == "equal":
        assert there == sorted(expected)
    if kind == "mixed":
        assert each == sorted(each, reverse=True)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("batch", "splits", "started", "window"),
    [(1, 4, 1, None), (3, 8, 5, None), (17, 3, 18, 300), (17, 3, 50, None), (64, 8, 100, None),
     (64, 8, 1, 300)],
)  # fmt: skip
def test_programs_go_on_while_there_is_work(
    kind: str, batch: int, splits: int, started: int, window: int | None, program_at: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Fewer programs than places do each split of each KV head once, and no round for nothing."""
    module, kv_heads, n_heads = paged_attn_decode_hopper, 3, 60  # 2 tiles of 16 and 4 heads each
    lens = lengths(kind, batch, random.Random(f"{kind}-{batch}"))
    used = [shares(n, splits, 100, window)[1] for n in lens]
    done: list[tuple[int, ...]] = []
    rounds: list[int] = []

    def find(place: Int, *rest: Any) -> Any:
        rounds[-1] += 1
        assert rest[1] == batch
        return program_at(place, lens, splits, 100, window)

    def attend(seq: int, split: int, context_len: int, kv_head: int, within: int, *_: Any) -> None:
        if split < splits:
            assert context_len == lens[seq]
            done.append((seq, split, kv_head, within))

    n_programs = started * 2 * kv_heads
    stand_ins = {
        "_program_at": find, "_attend": attend, "_barrier": lambda: None,
        "gl": types.SimpleNamespace(
            int64=torch.int64, program_id=lambda axis: Int(len(rounds) - 1),
            num_programs=lambda axis: n_programs,
        ),
    }  # fmt: skip
    for name, value in stand_ins.items():
        monkeypatch.setattr(module, name, value)
    kernel = module._paged_attn_decode_hopper_kernel
    kernel = getattr(kernel, "fn", kernel)
    given: dict[str, Any] = dict.fromkeys(inspect.signature(kernel).parameters, Int(1))
    given |= {
        "n_parts": Int(batch * n_heads * splits), "N_HEADS": n_heads, "N_KV_HEADS": kv_heads,
        "R": 16, "SPLITS": splits, "ROUNDS": True, "PDL": False,
    }  # fmt: skip
    for _ in range(n_programs):
        rounds.append(0)
        kernel(**given)
    tiles = [(kv_head, within) for kv_head in range(kv_heads) for within in (0, 16)]
    expected = [(seq, i, *tile) for seq in range(batch) for i in range(used[seq]) for tile in tiles]
    assert sorted(done) == sorted(expected)
    least, more = divmod(sum(used), started)
    places = [max(1, least + (place < more)) for place in range(started)]
    assert rounds == [count for count in places for _ in tiles]


def test_lanes() -> None:
    """A batch that is too large stays in the order of sequences, whatever the config says."""
    lanes = {n: paged_attn_order.lanes_of(n, True) for n in (1, 32, 33, 64, 256, 257)}
    assert lanes == {1: 32, 32: 32, 33: 64, 64: 64, 256: 256, 257: 0}
    assert paged_attn_order.lanes_of(64, False) == 0


@pytest.mark.parametrize(
    ("tiles", "keys", "at_once", "splits"),
    [
        (512, 4096, 396, 1),
        (512, 8192, 396, 3),  # 1.94 turns where half of the sequences are long; 4 make 2.6
        (512, 8192, 512, 4),
        (2048, 40960, 396, 8),
        (512, 16384, 396, 6),
        (8, 6000, 396, 2),
    ],
)
def test_splits(tiles: int, keys: int, at_once: int, splits: int) -> None:
    assert paged_attn_order.splits_of(tiles, keys, at_once) == splits
