"""Which (sequence, split) a program of a Hopper body for decode has: those with most keys first.

A sequence may be much longer than the others, and one that is short leaves most of its SPLITS
without keys. Programs that start in the order of sequences then end at different times: what starts
last may be long, and what has nothing to do stands between. Here each program reads all lengths and
finds which one stands at its place: the keys of a program fall, in steps of 1/16 of the most that
any has; within a step sequences keep their order; programs without keys come last. Each warp does
the same, without shared memory or barriers. Where a result comes from changes, no bit of it does.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from tkernels import flash_attn_hopper as flash
from tkernels.device import next_power_of_2

if TYPE_CHECKING:
    from tkernels import _triton as gl
    from tkernels import _triton as gluon
else:
    gl, gluon = flash.gl, flash.gluon

MOST_SEQUENCES = 256  # 8 lengths a lane
_HALVINGS = gl.constexpr(4)

# fmt: off


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _shares(
    context_len, window, BLOCK_SIZE: gl.constexpr, SPLITS: gl.constexpr, MIN_SHARE: gl.constexpr,
    HAS_WINDOW: gl.constexpr,
):
    """(keys of sequences, from the first block in sight on, how many splits they use)."""
    keys = context_len
    if HAS_WINDOW:
        keys = context_len - gl.maximum(context_len - window, 0) // BLOCK_SIZE * BLOCK_SIZE
    used = gl.minimum(gl.maximum((keys + MIN_SHARE - 1) // MIN_SHARE, 1), SPLITS)
    return gl.maximum(keys, 0), used


@gluon.jit
def _program_at(
    place, lens_ptr, batch, window, E: gl.constexpr, BLOCK_SIZE: gl.constexpr,
    SPLITS: gl.constexpr, MIN_SHARE: gl.constexpr, HAS_WINDOW: gl.constexpr,
):
    """(sequence, split, context length) at ``place`` of ``batch`` * SPLITS, and how many have work.

    These are splits that have keys, and one of each sequence that has none; past them the split is
    SPLITS. E >= batch.
    """
    layout: gl.constexpr = gl.BlockedLayout([E // 32], [32], [gl.num_warps()], [0])
    seqs = gl.arange(0, E, layout)
    there = seqs < batch
    lens = gl.load(lens_ptr + seqs, mask=there, other=0)
    keys, used = _shares(lens, window, BLOCK_SIZE, SPLITS, MIN_SHARE, HAS_WINDOW)
    each = keys  # of a program
    if SPLITS > 1:
        each = (keys.to(gl.float32) / used.to(gl.float32)).to(gl.int32)
    used = gl.where(there, used, 0)
    seq, split, context_len = place * 0, place * 0 + SPLITS, place * 0
    total = gl.sum(used, 0)
    if place < total:
        # Between which numbers of keys this program's lies, and how many programs have more.
        low, high, more = place * 0, gl.max(each, 0) + 1, place * 0
        for _ in gl.static_range(_HALVINGS):
            middle = (low + high) // 2
            from_middle = gl.sum(gl.where(each >= middle, used, 0), 0)
            before = place < from_middle
            more = gl.where(before, more, from_middle)
            high = gl.where(before, high, middle)
            low = gl.where(before, middle, low)
        alike = gl.where((each >= low) & (each < high), used, 0)
        upto = gl.associative_scan(alike, 0, _add)
        rest = place - more
        here = (upto - alike <= rest) & (rest < upto)
        seq = gl.sum(gl.where(here, seqs, 0), 0)
        split = rest - gl.sum(gl.where(here, upto - alike, 0), 0)
        context_len = gl.sum(gl.where(here, lens, 0), 0)
    return seq, split, context_len, total


# fmt: on


def splits_of(tiles: int, keys: int, at_once: int) -> int:
    """Into how many parts the keys of a sequence, at most ``keys``, go where tiles are many.

    8 parts of 2048 keys at most, so that one long sequence among short ones is no straggler; a
    quarter fewer where the programs of long ones fill the last turn of those that run ``at_once``
    better.
    """
    most = 1 if keys <= 4096 else min(8, keys // 2048)

    def filled(splits: int) -> float:
        turns = tiles * splits / at_once
        return round(turns / math.ceil(turns), 2)

    return max(range(most - most // 4, most + 1), key=lambda splits: (filled(splits), splits))


def lanes_of(batch: int, long_first: bool) -> int:
    """E of ``_program_at``; 0 where programs stay in the order of sequences.

    A tuned config may have LONG_FIRST and serve a batch that is too large to be put in order, as
    keys know sequences times heads. No result depends on the order.
    """
    return max(32, next_power_of_2(batch)) if long_first and batch <= MOST_SEQUENCES else 0
