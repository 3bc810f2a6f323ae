"""Give the residual slots of freed cache blocks back to their pool (tkernels/kv_format.py).

    for each head, block of ``blocks`` and position in it:  push slots[block, head, position] on
    free_slots[head]; then slots[block, head, position] = -1, "none"

slots: [num_blocks, num_kv_heads, block_size]; free_slots: [num_kv_heads, num_slots], a stack of
height free_count[head]. K and V have a pool each and are released apart.

One program serves one head and walks over the blocks in order, some at a time, so nothing races:
the stack is the same whatever the grid. A block that is named twice is released once.
"""

from __future__ import annotations

from typing import Any

import torch

from tkernels.check import (
    INDEX_DTYPES,
    check_contiguous,
    check_dtype,
    check_last_contiguous,
    check_shape,
    check_tensor,
    describe,
)
from tkernels.config import planned, resolve, why_no_launch
from tkernels.device import Device, bind, current, next_power_of_2, tl, triton
from tkernels.kv_format import MOST_SLOTS, NO_SLOT, release_slots_ref
from tkernels.registry import Case, Config, Cost, KernelSpec, Problem, op, register


def release_residual_slots_ref(
    slots: torch.Tensor,
    free_slots: torch.Tensor,
    free_count: torch.Tensor,
    blocks: torch.Tensor,
    *,
    config: Config | None = None,
) -> None:
    """PyTorch version of ``release_residual_slots``."""
    release_slots_ref(slots, free_slots, free_count, blocks)


@triton.jit
def _release_residual_slots_kernel(
    slots_ptr,
    free_slots_ptr,
    free_count_ptr,
    blocks_ptr,
    num_blocks,
    n_slots,
    n_released,
    n_tiles,
    n_heads,
    N_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_S: tl.constexpr,  # the power of two that holds it
    SCAN: tl.constexpr,
    BLOCK_B: tl.constexpr,
):
    for head in range(tl.program_id(0), n_heads, tl.num_programs(0)):
        count = tl.load(free_count_ptr + head)
        stack = free_slots_ptr + tl.cast(head, tl.int64) * n_slots
        for tile in range(n_tiles):
            # A cell is a position of a block; position by position, block by block.
            cell = tl.arange(0, BLOCK_B * BLOCK_S)
            entry, offset = tile * BLOCK_B + cell // BLOCK_S, cell % BLOCK_S
            named = tl.minimum(entry, n_released - 1)  # Ascend reads for masked lanes, too
            block = tl.load(blocks_ptr + named, mask=entry < n_released, other=-1).to(tl.int64)
            ok = (block >= 0) & (block < num_blocks) & (offset < BLOCK_SIZE)
            # Named before in this tile: left to the first. Earlier tiles left -1 behind.
            for i in range(BLOCK_B):
                other = tile * BLOCK_B + i
                twin = tl.load(blocks_ptr + tl.minimum(other, n_released - 1)).to(tl.int64)
                ok = ok & ((twin != block) | (other >= entry))
            place = (tl.where(ok, block, 0) * N_HEADS + head) * BLOCK_SIZE
            place += tl.minimum(offset, BLOCK_SIZE - 1)
            slot = tl.load(slots_ptr + place, mask=ok, other=-1).to(tl.int32)
            given = ok & (slot != -1)
            if SCAN:
                rank = tl.cumsum(given.to(tl.int32), 0) - 1
            else:  # by comparing places
                before = cell[None, :] < cell[:, None]
                rank = tl.sum(tl.where(before, given.to(tl.int32)[None, :], 0), 1)
            top = count + rank
            # More slots than there are means that the cache was spoilt: never past the stack.
            tl.store(
                stack + tl.minimum(tl.maximum(top, 0), n_slots - 1),
                slot & 0xFFFF,
                mask=given & (top < n_slots),
            )
            tl.store(slots_ptr + place, tl.full([BLOCK_B * BLOCK_S], -1, tl.int16), mask=given)
            count = tl.minimum(count + tl.sum(given.to(tl.int32)), n_slots)
            if SCAN:  # threads: the next tile may read what this one wrote
                tl.debug_barrier()
        tl.store(free_count_ptr + head, count)


_MOST_ON_NPU = 128  # positions at a time: there all are compared with all


@op
def release_residual_slots(
    slots: torch.Tensor,
    free_slots: torch.Tensor,
    free_count: torch.Tensor,
    blocks: torch.Tensor,
    *,
    config: Config | None = None,
) -> None:
    """Release the residual slots of freed cache blocks, before the blocks are used again.

    Args:
        slots: int16 [num_blocks, num_kv_heads, block_size], contiguous, -1 = none. Written.
        free_slots: int32 [num_kv_heads, num_slots], contiguous. Written.
        free_count: int32 [num_kv_heads]. Written.
        blocks: [n_blocks], int32 or int64. Numbers below 0 and past the cache are skipped.
        config: launch config; None looks it up.

    Raises:
        TypeError, ValueError: an argument of the wrong kind, shape, dtype, stride or device.
    """
    tensors = slots, free_slots, free_count, blocks
    plan = planned(_plan, config, tensors)
    if plan is not None:
        launch, numbers = plan
        launch(*tensors, *numbers)


def _plan(
    slots: torch.Tensor,
    free_slots: torch.Tensor,
    free_count: torch.Tensor,
    blocks: torch.Tensor,
    config: Config | None,
) -> Any:
    """(launch, counts); None where there is nothing to release."""
    _check(slots, free_slots, free_count, blocks)
    num_blocks, n_heads, block_size = slots.shape
    if not blocks.shape[0] or not num_blocks:
        return None
    values = (blocks.shape[0], n_heads, block_size)
    cfg, max_programs = resolve(SPEC, values, config)
    constants = {
        "N_HEADS": n_heads,
        "BLOCK_SIZE": block_size,
        "BLOCK_S": max(2, next_power_of_2(block_size)),  # one cell crashes triton-ascend 3.2
        "SCAN": current().registers > 0,
    }
    launch = bind(_release_residual_slots_kernel, (min(n_heads, max_programs),), **constants, **cfg)
    n_tiles = -(-blocks.shape[0] // cfg["BLOCK_B"])
    return launch, (num_blocks, free_slots.shape[1], blocks.shape[0], n_tiles, n_heads)


def _check(
    slots: torch.Tensor, free_slots: torch.Tensor, free_count: torch.Tensor, blocks: torch.Tensor
) -> None:
    name = "release_residual_slots"
    given = {"slots": slots, "free_slots": free_slots, "free_count": free_count, "blocks": blocks}
    for argument, t in given.items():
        check_tensor(name, argument, t)
    if slots.dim() != 3 or 0 in slots.shape[1:]:
        raise ValueError(
            f"{name}: slots must have shape [num_blocks, num_kv_heads >= 1, block_size >= 1], "
            f"got {describe(slots)}"
        )
    check_dtype(name, "slots", slots, (torch.int16,))
    if not current().registers and slots.shape[2] > _MOST_ON_NPU:
        raise ValueError(
            f"{name}: slots must have a block_size of at most {_MOST_ON_NPU} on an NPU, "
            f"got {describe(slots)}"
        )
    n_heads = slots.shape[1]
    check_shape(name, "free_slots", free_slots, num_kv_heads=n_heads, num_slots=None)
    if not 1 <= free_slots.shape[1] <= MOST_SLOTS:
        raise ValueError(
            f"{name}: free_slots must have from 1 to {MOST_SLOTS} slots, got {describe(free_slots)}"
        )
    check_shape(name, "free_count", free_count, num_kv_heads=n_heads)
    for argument in ("free_slots", "free_count"):
        check_dtype(name, argument, given[argument], (torch.int32,))
    for argument in ("slots", "free_slots", "free_count"):
        check_contiguous(name, argument, given[argument])
    check_shape(name, "blocks", blocks, n_blocks=None)
    check_dtype(name, "blocks", blocks, INDEX_DTYPES)
    check_last_contiguous(name, "blocks", blocks)


# ---- facts for tests, bench and tuner --------------------------------------------------------


def release_problem(
    blocks: int, heads: int, *, block_size: int = 16, held_every: int = 25
) -> dict[str, Any]:
    """Problem of ``blocks`` freed blocks, of whose positions one in ``held_every`` has a slot."""
    return {
        "n_blocks": blocks,
        "num_kv_heads": heads,
        "block_size": block_size,
        "held_every": held_every,
    }


def _shape(*, blocks: int, num_kv_heads: int = 8, block_size: int = 16) -> Problem:
    """Residuals of ``blocks`` freed blocks."""
    return release_problem(blocks, num_kv_heads, block_size=block_size)


def _make_inputs(problem: Problem, dev: torch.device) -> dict[str, Any]:
    """Twice as many blocks as are freed; some entries are none, past the end, or repeat one."""
    n, heads, block_size = problem["n_blocks"], problem["num_kv_heads"], problem["block_size"]
    generator = torch.Generator().manual_seed(0)
    num_blocks = 2 * n + 1
    cells = num_blocks * block_size
    held = torch.arange(cells)[:: problem.get("held_every", 25)]
    n_slots = min(MOST_SLOTS, 2 * len(held))
    slots = torch.full((heads, cells), NO_SLOT, dtype=torch.int16)
    free_slots = torch.zeros(heads, n_slots, dtype=torch.int32)
    held = held[: n_slots // 2]
    for head in range(heads):
        order = torch.randperm(n_slots, generator=generator)
        slots[head, held] = order[: len(held)].to(torch.int16)
        free_slots[head, : n_slots - len(held)] = order[len(held) :].int()
    blocks = torch.randperm(num_blocks, generator=generator)[:n]
    if n > 4:
        blocks[1], blocks[2], blocks[-1] = -1, num_blocks + 3, blocks[0]
    return {
        "slots": slots.view(heads, num_blocks, block_size).transpose(0, 1).contiguous().to(dev),
        "free_slots": free_slots.to(dev),
        "free_count": torch.full((heads,), n_slots - len(held), dtype=torch.int32, device=dev),
        "blocks": blocks.int().to(dev),
    }


def _compared(written: Any) -> tuple[torch.Tensor, ...]:
    """The slots that are free, in whatever order they lie on the stack."""
    top = torch.arange(written["free_slots"].shape[1], device=written["free_count"].device)
    free = top < written["free_count"][:, None]
    stack = torch.where(free, written["free_slots"], -1).sort(1).values
    return written["slots"], written["free_count"], stack


def _tuning_key(problem: Problem) -> dict[str, Any]:
    bucket = 1
    while bucket < min(problem["n_blocks"], 4096):
        bucket *= 4
    return {
        "n_heads": problem["num_kv_heads"],
        "block_size": problem["block_size"],
        "blocks_up_to": bucket,
    }


def _space(dev: Device) -> dict[str, list[Any]]:
    space: dict[str, list[Any]] = {"BLOCK_B": [1, 4, 8, 16, 32, 64, 128], "programs_per_core": [1]}
    return {**space, "num_warps": [1, 2, 4, 8]} if dev.registers else space


def _default_config(problem: Problem, dev: Device) -> Config:
    most = 256 if dev.registers else 64  # positions at a time
    fits = max(1, most // next_power_of_2(problem["block_size"]))
    wanted = min(next_power_of_2(problem["n_blocks"]), fits, 64)
    block_b = max(b for b in _space(dev)["BLOCK_B"] if b <= max(1, wanted))
    config = {"BLOCK_B": block_b, "programs_per_core": 1}
    return {**config, "num_warps": 8} if dev.registers else config


def _why_illegal(config: Config, problem: Problem, dev: Device) -> str | None:
    if why := why_no_launch(config, dev, "BLOCK_B"):
        return why
    cells = config["BLOCK_B"] * max(2, next_power_of_2(problem["block_size"]))
    most = 16384 if dev.registers else _MOST_ON_NPU
    return f"{cells} positions at a time are more than {most}" if cells > most else None


def _cost(problem: Problem) -> Cost:
    cells = problem["n_blocks"] * problem["num_kv_heads"] * problem["block_size"]
    return Cost(flops=0, bytes=2 * cells + 4 * problem["n_blocks"] + 8 * problem["num_kv_heads"])


_EDGE = frozenset({"edge"})

SPEC = register(
    KernelSpec(
        name="release_residual_slots",
        launch=release_residual_slots,
        reference=release_residual_slots_ref,
        problem_fields=("n_blocks", "num_kv_heads", "block_size"),
        make_inputs=_make_inputs,
        cases=(
            Case("9x2x16", release_problem(9, 2, held_every=3)),
            Case("70x3x16", release_problem(70, 3, held_every=5)),
            Case("7x1-block3", release_problem(7, 1, block_size=3, held_every=1), _EDGE),
            Case("1x1-block1", release_problem(1, 1, block_size=1, held_every=1), _EDGE),
            Case("65x2-block64", release_problem(65, 2, block_size=64, held_every=9), _EDGE),
            Case("256x8x16", release_problem(256, 8), frozenset({"bench"})),
        ),
        tuning_key=_tuning_key,
        space=_space,
        default_config=_default_config,
        why_illegal=_why_illegal,
        cost=_cost,
        mutates=("slots", "free_slots", "free_count"),
        compared=_compared,
        scalar_loop_reason="blocks are named one by one, and a block's slots are few",
        shape=_shape,
    )
)
