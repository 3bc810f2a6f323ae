"""The rows of a mixture of experts in the order of their experts: which token each one is of.

    i = t * top_k + j                       the j-th expert of token t, an assignment
    sorted_ids[p]    = i                    stable: of one expert's assignments the lower i first
    positions[t, j]  = p                    the inverse
    expert_offsets   = where each local expert's rows begin, and behind them where the last ends

topk_ids: int32 [T, top_k]; expert_offsets: int32 [E_local + 1]; sorted_ids: int32 [T * top_k];
positions: int32 [T, top_k]. ``expert_map`` [E] gives the local number of each expert, or -1 where
it lives elsewhere; without it all are local. Assignments to experts that live elsewhere, or to
none, come last: sorted_ids is -1 there, and their positions are -1.

An assignment's key is expert * n + i, so its place is the number of keys below its own, and an
expert's rows begin at the number of keys below expert * n. Everything is counted by comparing: no
atomics, no sort, no value read by the host, and the same result in any order of programs.

- One launch: each program compares its part of the assignments, and of the experts, with all keys.
- Two launches, for many assignments, in blocks: first ``counts[b, e]``, how many of block b belong
  to expert e. A row of expert e in block b then lies behind counts[b', e'] rows of each other block
  b' and lower expert e', counts[b', e] of each earlier block, and the keys below its own in its
  block. These each program finds while the counts are still being made.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tkernels import device
from tkernels.check import (
    check_dtype,
    check_last_contiguous,
    check_no_overlap,
    check_shape,
    check_tensor,
    describe,
    one_for_both,
)
from tkernels.config import planned, resolve, why_no_launch
from tkernels.device import Device, bind, cdiv, next_power_of_2, tl, triton
from tkernels.ops.paged_attn import _has_pdl, _let_next_kernel_start, _wait_for_earlier_kernels
from tkernels.ops.paged_attn_quantized import _running_sum
from tkernels.registry import Case, Config, Cost, KernelSpec, Problem, op, register

_OP = "moe_dispatch"
_MOST_EXPERTS = 2**16
_LAST = tl.constexpr(2**31 - 1)  # above all keys


def moe_dispatch_ref(
    topk_ids: torch.Tensor,
    *,
    num_experts: int,
    expert_map: torch.Tensor | None = None,
    num_local_experts: int | None = None,
    expert_offsets: torch.Tensor | None = None,
    sorted_ids: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    tickets: torch.Tensor | None = None,
    config: Config | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """PyTorch version of ``moe_dispatch``: one stable sort."""
    n_local = num_experts if num_local_experts is None else num_local_experts
    ids = topk_ids.reshape(-1).long()
    known = (ids >= 0) & (ids < num_experts)
    local = ids if expert_map is None else expert_map[ids.clamp(0, num_experts - 1)].long()
    local = torch.where(known & (local >= 0) & (local < n_local), local, n_local)
    order = local.argsort(stable=True)
    counts = torch.zeros(n_local + 1, dtype=torch.long, device=ids.device)
    counts.scatter_add_(0, local, torch.ones_like(local))
    ends = counts[:n_local].cumsum(0)
    offsets = torch.cat([torch.zeros_like(ends[:1]), ends]).int()
    numbers = torch.arange(order.shape[0], device=ids.device)
    place = torch.empty_like(order).scatter_(0, order, numbers)
    here = local < n_local
    if tickets is not None:
        tickets.zero_()
    rows = torch.where(here[order], order, -1).int()
    places = torch.where(here, place, -1).int().view(topk_ids.shape)
    return (
        offsets if expert_offsets is None else expert_offsets.copy_(offsets),
        rows if sorted_ids is None else sorted_ids.copy_(rows),
        places if positions is None else positions.copy_(places),
    )


# ---- kernels ---------------------------------------------------------------------------------
# fmt: off


@triton.jit
def _local_experts(
    i, ok, ids_ptr, map_ptr, stride_ids, TOP_K: tl.constexpr, FLAT: tl.constexpr,
    HAS_MAP: tl.constexpr, N_EXPERTS: tl.constexpr, N_LOCAL: tl.constexpr,
):
    """Local expert of each assignment, N_LOCAL where it has none."""
    if FLAT:
        place = i
    else:  # irregular, so Ascend reads for masked lanes, too
        i = tl.where(ok, i, 0)
        place = (i // TOP_K).to(tl.int64) * stride_ids + i % TOP_K
    expert = tl.load(ids_ptr + place, mask=ok, other=-1)
    known = (expert >= 0) & (expert < N_EXPERTS)
    if HAS_MAP:
        expert = tl.load(map_ptr + tl.where(known, expert, 0), mask=known, other=-1)
        known = (expert >= 0) & (expert < N_LOCAL)
    return tl.where(known, expert, N_LOCAL)


@triton.jit
def _keys_below(
    query, first, end, n_keys, ids_ptr, map_ptr, stride_ids, TOP_K: tl.constexpr,
    FLAT: tl.constexpr, HAS_MAP: tl.constexpr, N_EXPERTS: tl.constexpr, N_LOCAL: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_J: tl.constexpr,
):
    """How many assignments from first to end, n_keys at most, have a key below each query.

    A key is expert * n_keys + its number from first. The counts, [BLOCK_Q, BLOCK_J], are to be
    summed over lanes: so the loop needs nothing of another thread.
    """
    count = tl.zeros([BLOCK_Q, BLOCK_J], tl.int32)
    lane = tl.arange(0, BLOCK_J)[None, :]
    for start in range(first, end, BLOCK_J):
        ok = lane < end - start
        expert = _local_experts(
            start + lane, ok, ids_ptr, map_ptr, stride_ids, TOP_K, FLAT, HAS_MAP, N_EXPERTS,
            N_LOCAL)
        key = tl.where(ok, expert * n_keys + (start - first) + lane, _LAST)
        count += (key < query[:, None]).to(tl.int32)
    return count


@triton.jit
def _put_rows(
    i, ok, expert, place, sorted_ptr, positions_ptr, stride_pos, TOP_K: tl.constexpr,
    FLAT_POS: tl.constexpr, N_LOCAL: tl.constexpr,
):
    here = expert < N_LOCAL
    tl.store(sorted_ptr + tl.where(ok, place, 0), tl.where(here, i, -1), mask=ok)
    if FLAT_POS:
        at = i
    else:
        at = (i // TOP_K).to(tl.int64) * stride_pos + i % TOP_K
    tl.store(positions_ptr + at, tl.where(here, place, -1), mask=ok)


@triton.jit
def _set_tickets(tickets_ptr, N_TICKETS: tl.constexpr):
    if tl.program_id(0) == 0:
        number = tl.arange(0, 64)
        tl.store(tickets_ptr + number, tl.zeros([64], tl.int32), mask=number < N_TICKETS)


@triton.jit(do_not_specialize=["n", "n_tiles"])
def _moe_dispatch_kernel(
    ids_ptr, map_ptr, tickets_ptr, offsets_ptr, sorted_ptr, positions_ptr, stride_ids, stride_pos,
    n, n_tiles,
    TOP_K: tl.constexpr, FLAT: tl.constexpr, FLAT_POS: tl.constexpr, HAS_MAP: tl.constexpr,
    N_EXPERTS: tl.constexpr, N_LOCAL: tl.constexpr, N_TICKETS: tl.constexpr, PDL: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_J: tl.constexpr,
):
    """All in one launch. Queries: the n assignments, then the offsets of 0..N_LOCAL."""
    if PDL:  # in this order: the next kernel may read before it waits what earlier ones wrote
        _wait_for_earlier_kernels()
        _let_next_kernel_start()
    if N_TICKETS > 0:
        _set_tickets(tickets_ptr, N_TICKETS)
    for tile in range(tl.program_id(0), n_tiles, tl.num_programs(0)):
        i = tile * BLOCK_Q + tl.arange(0, BLOCK_Q)
        is_row = i < n
        expert = _local_experts(
            i, is_row, ids_ptr, map_ptr, stride_ids, TOP_K, FLAT, HAS_MAP, N_EXPERTS, N_LOCAL)
        is_offset = (i >= n) & (i <= n + N_LOCAL)
        offset = tl.where(is_offset, i - n, 0)
        query = tl.where(is_row, expert * n + i, offset * n)
        below = _keys_below(
            query, 0, n, n, ids_ptr, map_ptr, stride_ids, TOP_K, FLAT, HAS_MAP, N_EXPERTS, N_LOCAL,
            BLOCK_Q, BLOCK_J)
        place = tl.sum(below, 1)
        tl.store(offsets_ptr + offset, place, mask=is_offset)
        _put_rows(
            i, is_row, expert, place, sorted_ptr, positions_ptr, stride_pos, TOP_K, FLAT_POS,
            N_LOCAL)


@triton.jit(do_not_specialize=["n", "n_tiles"])
def _count_kernel(
    ids_ptr, map_ptr, tickets_ptr, counts_ptr, stride_ids, n, n_tiles,
    TOP_K: tl.constexpr, FLAT: tl.constexpr, HAS_MAP: tl.constexpr, N_EXPERTS: tl.constexpr,
    N_LOCAL: tl.constexpr, N_TICKETS: tl.constexpr, PDL: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_Q: tl.constexpr,
):
    """counts[block, e] for e of 0..N_LOCAL - 1."""
    if PDL:  # in this order: the next kernel reads ids before it waits, and the one after it more
        _wait_for_earlier_kernels()
        _let_next_kernel_start()
    if N_TICKETS > 0:
        _set_tickets(tickets_ptr, N_TICKETS)
    parts: tl.constexpr = (N_LOCAL + BLOCK_Q - 1) // BLOCK_Q
    for tile in range(tl.program_id(0), n_tiles, tl.num_programs(0)):
        block = tile // parts
        first = block * BLOCK_N
        lane = tl.arange(0, BLOCK_N)
        mine = _local_experts(
            first + lane, lane < n - first, ids_ptr, map_ptr, stride_ids, TOP_K, FLAT, HAS_MAP,
            N_EXPERTS, N_LOCAL)
        expert = tile % parts * BLOCK_Q + tl.arange(0, BLOCK_Q)
        count = tl.sum((mine[:, None] == expert[None, :]).to(tl.int32), 0)
        tl.store(
            counts_ptr + tl.cast(block, tl.int64) * N_LOCAL + expert, count, mask=expert < N_LOCAL)


@triton.jit
def _look_up(values, place, GATHER: tl.constexpr, SIZE: tl.constexpr):
    """values[place], 0 where there is no such place; by comparing where GATHER is not to be had."""
    if GATHER:
        there = (place >= 0) & (place < SIZE)
        return tl.where(there, tl.gather(values, tl.where(there, place, 0), 0), 0)
    return tl.sum(tl.where(tl.arange(0, SIZE)[:, None] == place[None, :], values[:, None], 0), 0)


@triton.jit(do_not_specialize=["n", "n_blocks"])
def _place_kernel(
    ids_ptr, map_ptr, counts_ptr, offsets_ptr, sorted_ptr, positions_ptr, stride_ids, stride_pos, n,
    n_blocks,
    TOP_K: tl.constexpr, FLAT: tl.constexpr, FLAT_POS: tl.constexpr, HAS_MAP: tl.constexpr,
    N_EXPERTS: tl.constexpr, N_LOCAL: tl.constexpr, SCAN: tl.constexpr, PDL: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_Q: tl.constexpr,
):
    """Rows of one block after the other; as if they were those of one more, the offsets."""
    if PDL:
        _let_next_kernel_start()
    for block in range(tl.program_id(0), n_blocks + 1, tl.num_programs(0)):
        first = block * BLOCK_N
        lane = tl.arange(0, BLOCK_N)
        ok = lane < n - first
        mine = _local_experts(
            first + lane, ok, ids_ptr, map_ptr, stride_ids, TOP_K, FLAT, HAS_MAP, N_EXPERTS,
            N_LOCAL)
        key = mine * BLOCK_N + lane
        place = tl.sum((key[:, None] < key[None, :]).to(tl.int32), 0)
        if PDL:  # The kernel that counts has waited for earlier ones: ids were there before it was.
            _wait_for_earlier_kernels()
        local = tl.where(mine < N_LOCAL, mine, -1)
        n_before = 0
        n_here = 0
        for e in range(0, N_LOCAL, BLOCK_Q):
            expert = e + tl.arange(0, BLOCK_Q)
            before = tl.zeros([BLOCK_Q], tl.int32)
            others = tl.zeros([BLOCK_Q], tl.int32)
            for start in range(0, n_blocks, BLOCK_B):
                row = start + tl.arange(0, BLOCK_B)[:, None]
                count = tl.load(
                    counts_ptr + row.to(tl.int64) * N_LOCAL + expert[None, :],
                    mask=(row < n_blocks) & (expert < N_LOCAL)[None, :], other=0).to(tl.int32)
                before += tl.sum(count * (row < block).to(tl.int32), 0)
                others += tl.sum(count * (row != block).to(tl.int32), 0)
            upto = n_here + _running_sum(others, SCAN)
            if block == n_blocks:
                tl.store(offsets_ptr + expert, upto - others, mask=expert < N_LOCAL)
            place += _look_up(upto - others + before, local - e, SCAN, BLOCK_Q)
            n_before += tl.sum(before, 0)
            n_here += tl.sum(others, 0)
        if block == n_blocks:
            tl.store(offsets_ptr + N_LOCAL, n_here)
        place += tl.where(mine < N_LOCAL, 0, n_here + first - n_before)
        _put_rows(
            first + lane, ok, mine, place, sorted_ptr, positions_ptr, stride_pos, TOP_K, FLAT_POS,
            N_LOCAL)


# fmt: on


@op
def moe_dispatch(
    topk_ids: torch.Tensor,
    *,
    num_experts: int,
    expert_map: torch.Tensor | None = None,
    num_local_experts: int | None = None,
    expert_offsets: torch.Tensor | None = None,
    sorted_ids: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    tickets: torch.Tensor | None = None,
    config: Config | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Order the assignments of tokens to experts by local expert.

    Args:
        topk_ids: int32 [T, top_k], contiguous columns, any row stride. A token may name an expert
            twice; numbers outside 0..num_experts-1 are none.
        num_experts: experts that ``topk_ids`` may name.
        expert_map: int32 [num_experts], contiguous: the local number of each expert, or -1 (any
            number outside 0..num_local_experts-1) where it lives elsewhere.
        num_local_experts: experts that live here; given with ``expert_map`` alone.
        expert_offsets: int32 [num_local_experts + 1], contiguous, written and returned.
        sorted_ids: int32 [T * top_k], contiguous, written and returned.
        positions: int32 [T, top_k], contiguous columns, written and returned. No two of these, nor
            one of them and another argument, may share memory.
        tickets: int32 [1 to 64], contiguous, set to 0: counters for what works through these rows
            (``moe_gemm``), which spares them a launch of their own.
        config: launch config; None looks it up.

    Returns:
        (expert_offsets, sorted_ids, positions): rows expert_offsets[e] to expert_offsets[e + 1] are
        those of expert e, row p is that of assignment sorted_ids[p] (token sorted_ids[p] // top_k),
        and assignment (t, j) has row positions[t, j]. Both are -1 for what has no row here.

    Raises:
        TypeError, ValueError: an argument of the wrong kind, shape, dtype, stride or device.
    """
    _check_ids(topk_ids)
    if expert_offsets is None:
        n_local = num_experts if num_local_experts is None else num_local_experts
        _check_count("num_experts", num_experts)
        _check_count("num_local_experts", n_local)
        expert_offsets = topk_ids.new_empty((n_local + 1,))
    elif expert_offsets is sorted_ids:
        raise one_for_both(_OP, "sorted_ids", "expert_offsets")
    if sorted_ids is None:
        sorted_ids = topk_ids.new_empty((topk_ids.numel(),))
    if positions is None:
        positions = topk_ids.new_empty(topk_ids.shape)
    tensors: tuple[Any, ...] = topk_ids, expert_offsets, sorted_ids, positions
    if expert_map is not None:
        tensors = (*tensors, expert_map)
    if tickets is not None:
        tensors = (*tensors, tickets)
    mapped, counted = expert_map is not None, tickets is not None
    launch = planned(_plan, config, tensors, mapped, counted, num_experts, num_local_experts)
    launch(topk_ids, expert_map, tickets, expert_offsets, sorted_ids, positions)
    return expert_offsets, sorted_ids, positions


def _check_ids(topk_ids: torch.Tensor) -> None:
    check_tensor(_OP, "topk_ids", topk_ids)
    if topk_ids.dim() != 2 or topk_ids.shape[1] < 1:
        raise ValueError(
            f"{_OP}: topk_ids must have shape [T, top_k >= 1], got {describe(topk_ids)}"
        )
    check_dtype(_OP, "topk_ids", topk_ids, (torch.int32,))
    check_last_contiguous(_OP, "topk_ids", topk_ids)


def _check_count(name: str, count: int) -> None:
    if type(count) is not int or not 1 <= count <= _MOST_EXPERTS:
        raise ValueError(
            f"{_OP}: {name} must be an int from 1 to {_MOST_EXPERTS}, got {describe(count)}"
        )


def _check_tickets(tickets: torch.Tensor) -> None:
    check_tensor(_OP, "tickets", tickets)
    check_dtype(_OP, "tickets", tickets, (torch.int32,))
    if tickets.dim() != 1 or not 1 <= len(tickets) <= 64:
        raise ValueError(f"{_OP}: tickets must have shape [1 to 64], got {describe(tickets)}")
    check_last_contiguous(_OP, "tickets", tickets)


def _check_map(
    expert_map: torch.Tensor | None, num_experts: int, num_local_experts: int | None
) -> None:
    if expert_map is None:
        if num_local_experts is not None:
            raise ValueError(f"{_OP}: expert_map must be given with num_local_experts, got None")
        return
    if num_local_experts is None:
        raise ValueError(f"{_OP}: num_local_experts must be given with expert_map, got None")
    _check_count("num_local_experts", num_local_experts)
    check_tensor(_OP, "expert_map", expert_map)
    check_dtype(_OP, "expert_map", expert_map, (torch.int32,))
    check_shape(_OP, "expert_map", expert_map, num_experts=num_experts)
    check_last_contiguous(_OP, "expert_map", expert_map)


# What is left to call, with all tensors of a call.
_Run = Callable[..., None]


def _plan(
    topk_ids: torch.Tensor,
    expert_offsets: torch.Tensor,
    sorted_ids: torch.Tensor,
    positions: torch.Tensor,
    *more: Any,
    config: Config | None,
) -> _Run:
    """What makes the launches of a call like this one."""
    *optional, mapped, counted, num_experts, num_local_experts = more
    expert_map = optional[0] if mapped else None
    tickets = optional[-1] if counted else None
    _check_ids(topk_ids)
    _check_count("num_experts", num_experts)
    _check_map(expert_map, num_experts, num_local_experts)
    n_local = num_experts if num_local_experts is None else num_local_experts
    n_tokens, top_k = topk_ids.shape
    n = n_tokens * top_k
    wanted: tuple[tuple[str, torch.Tensor, dict[str, int | None]], ...] = (
        ("expert_offsets", expert_offsets, {"num_local_experts_plus_1": n_local + 1}),
        ("sorted_ids", sorted_ids, {"T*top_k": n}),
        ("positions", positions, {"T": n_tokens, "top_k": top_k}),
    )
    for name, t, shape in wanted:
        check_tensor(_OP, name, t)
        check_dtype(_OP, name, t, (torch.int32,))
        check_shape(_OP, name, t, **shape)
        check_last_contiguous(_OP, name, t)
        check_no_overlap(_OP, name, t)
    if tickets is not None:
        _check_tickets(tickets)
    most = 2**31 - 2**17  # assignments are counted in 32 bits, and the offsets behind them
    if n > most:
        raise ValueError(
            f"{_OP}: topk_ids must have at most {most} numbers, got {describe(topk_ids)}"
        )
    if n == 0:
        return _nothing
    cfg, max_programs = resolve(SPEC, (n_tokens, top_k, num_experts, n_local), config)
    constants = {
        "TOP_K": top_k,
        "FLAT": n_tokens == 1 or topk_ids.stride(0) == top_k,
        "HAS_MAP": expert_map is not None,
        "N_EXPERTS": num_experts,
        "N_LOCAL": n_local,
        "N_TICKETS": 0 if tickets is None else len(tickets),
    }
    flat_pos = n_tokens == 1 or positions.stride(0) == top_k
    strides = topk_ids.stride(0), positions.stride(0)
    cfg.setdefault("PDL", False)  # Ascend has none
    if cfg["PDL"]:
        constants["launch_pdl"] = True
    bind_launches = _bind_blocks if cfg["BLOCK_N"] else _bind_one
    return bind_launches(n, strides, flat_pos, constants, cfg, max_programs)


def _nothing(
    ids: torch.Tensor, table: Any, tickets: torch.Tensor | None, offsets: torch.Tensor, *outs: Any
) -> None:
    """Where there are no tokens."""
    offsets.zero_()
    if tickets is not None:
        tickets.zero_()


def _bind_one(
    n: int,
    strides: tuple[int, int],
    flat_pos: bool,
    constants: dict[str, Any],
    config: Config,
    max_programs: int,
) -> _Run:
    """One launch, in which everything is compared with everything."""
    config = {name: value for name, value in config.items() if name != "BLOCK_N"}
    n_tiles = cdiv(n + constants["N_LOCAL"] + 1, config["BLOCK_Q"])
    programs = min(n_tiles, max_programs)
    launch = bind(_moe_dispatch_kernel, (programs,), FLAT_POS=flat_pos, **constants, **config)

    def run(ids: Any, table: Any, tickets: Any, *outs: Any) -> None:
        # What is not there is stood in for by something that is, and not touched.
        table = ids if table is None else table
        tickets = ids if tickets is None else tickets
        launch(ids, table, tickets, *outs, *strides, n, n_tiles)

    return run


def _bind_blocks(
    n: int,
    strides: tuple[int, int],
    flat_pos: bool,
    constants: dict[str, Any],
    config: Config,
    max_programs: int,
) -> _Run:
    """Two launches, with a workspace between them."""
    n_local, block_q = constants["N_LOCAL"], config["BLOCK_Q"]
    n_blocks = cdiv(n, config["BLOCK_N"])
    n_tiles = n_blocks * cdiv(n_local, block_q)
    if n_tiles >= 2**31 or n_blocks * n_local >= 2**40:
        raise ValueError(
            f"{_OP}: config must make at most 2^31 tiles of {n} assignments, got {config}"
        )
    on_gpu = not device.current().is_npu
    # A load's way is long: on a GPU the counts of all blocks are asked for together; and every
    # program reads them all, so they are small.
    at_once, dtype = (2048 * config["num_warps"], torch.int16) if on_gpu else (4096, torch.int32)
    config = {name: value for name, value in config.items() if name != "BLOCK_J"}
    count = bind(_count_kernel, (min(n_tiles, max_programs),), **constants, **config)
    del constants["N_TICKETS"]  # the first launch has set them
    place = bind(
        _place_kernel,
        (min(n_blocks + 1, max_programs),),
        FLAT_POS=flat_pos,
        SCAN=on_gpu,
        BLOCK_B=max(2, min(next_power_of_2(n_blocks), at_once // block_q)),
        **constants,
        **config,
    )

    def run(ids: Any, table: Any, tickets: Any, *outs: Any) -> None:
        counts = torch.empty(n_blocks * n_local, dtype=dtype, device=ids.device)
        table = ids if table is None else table
        tickets = ids if tickets is None else tickets
        count(ids, table, tickets, counts, strides[0], n, n_tiles)
        place(ids, table, counts, *outs, *strides, n, n_blocks)

    return run


# ---- facts for tests, bench and tuner --------------------------------------------------------


def dispatch_problem(
    n_tokens: int,
    n_experts: int,
    top_k: int,
    *,
    n_local: int | None = None,
    mapped: bool = False,
    routing: str = "random",
) -> dict[str, Any]:
    """Problem of a routing: "random", "one" (all to one expert) or "stray" (numbers of none)."""
    return {
        "n_tokens": n_tokens,
        "top_k": top_k,
        "n_experts": n_experts,
        "n_local": n_experts if n_local is None else n_local,
        "mapped": mapped or n_local is not None,
        "routing": routing,
    }


def _shape(*, tokens: int, experts: int = 128, top_k: int = 8) -> Problem:
    """``tokens`` tokens that chose ``top_k`` of ``experts`` experts."""
    return dispatch_problem(tokens, experts, top_k)


def _make_inputs(problem: Problem, dev: torch.device) -> dict[str, Any]:
    """Distinct experts a token, but for those of a routing that says otherwise."""
    p = problem
    generator = torch.Generator().manual_seed(0)
    shape = p["n_tokens"], p["top_k"]
    if p["routing"] == "random" and p["top_k"] <= p["n_experts"]:
        order = torch.rand(p["n_tokens"], p["n_experts"], generator=generator).argsort(-1)
        ids = order[:, : p["top_k"]].contiguous()
    elif p["routing"] == "one":
        ids = torch.full(shape, p["n_experts"] - 1)
    else:
        ids = torch.randint(-2, p["n_experts"] + 2, shape, generator=generator)
    inputs: dict[str, Any] = {"topk_ids": ids.int().to(dev), "num_experts": p["n_experts"]}
    if p["mapped"]:  # every other one lives here, until all places are taken; the last goes first
        table = torch.full((p["n_experts"],), -1, dtype=torch.int32)
        here = table[::2][: p["n_local"]]
        here.copy_(torch.arange(p["n_local"] - 1, p["n_local"] - 1 - len(here), -1))
        inputs |= {"expert_map": table.to(dev), "num_local_experts": p["n_local"]}
    return inputs


def _tuning_key(problem: Problem) -> dict[str, Any]:
    bucket = 1
    while bucket < min(problem["n_tokens"] * problem["top_k"], 2**18):
        bucket *= 4
    return {"local_experts_up_to": next_power_of_2(problem["n_local"]), "rows_up_to": bucket}


def _space(dev: Device) -> dict[str, list[Any]]:
    space: dict[str, list[Any]] = {
        # Assignments of a program; in blocks, experts whose counts it makes or adds up at once.
        "BLOCK_Q": [4, 8, 16, 32, 64, 128],
        # One launch: assignments that they are compared with at once.
        "BLOCK_J": [16, 32, 64, 128, 256, 512, 1024],
        "BLOCK_N": [0, 32, 64, 128, 256, 512],  # assignments of a block; 0: one launch
        "programs_per_core": [0, 1, 2, 4],
    }
    if dev.is_npu:
        return {**space, "programs_per_core": [1]}
    return {
        **space,
        "num_warps": [1, 2, 4, 8, 16],
        "PDL": [False, True] if _has_pdl(dev) else [False],
    }


_MOST_AT_ONCE = 2**15  # assignments of one launch: as many squared are compared


def _default_config(problem: Problem, dev: Device) -> Config:
    n = problem["n_tokens"] * problem["top_k"]
    # A second launch costs a microsecond or two, and comparing 4096 assignments with all, four.
    block_n = 0
    if n > 2048 or (problem["n_local"] + 2) * (n + 1) >= 2**31:
        block_n = 128 if n <= 8192 else 256 if n <= 2**16 else 512
    block_j = min(1024, max(16, next_power_of_2(n)))
    if dev.is_npu:
        if block_n:
            chosen = {"BLOCK_Q": 64, "BLOCK_J": 64, "BLOCK_N": 64}
        else:
            chosen = {"BLOCK_Q": 4 if n <= 64 else 8, "BLOCK_J": min(block_j, 256), "BLOCK_N": 0}
        return {**chosen, "programs_per_core": 1}
    if block_n:
        # A thread for each assignment: so keys go to others through shared memory, read once.
        # Of experts 64 at a time, where registers do not hold what 128 take (equally fast).
        most = 128 if block_n == 128 else 64
        block_q = min(most, max(16, next_power_of_2(problem["n_local"])))
        chosen = {"BLOCK_Q": block_q, "BLOCK_J": 64, "num_warps": block_n // 32}
    else:
        # Few queries a program, so that all cores have some; keys enough for all loads at once.
        block_j = min(block_j, 256)
        chosen = {"BLOCK_Q": 4, "BLOCK_J": block_j, "num_warps": max(1, min(8, block_j // 32))}
    return {**chosen, "BLOCK_N": block_n, "programs_per_core": 0, "PDL": _has_pdl(dev)}


def _why_illegal(config: Config, problem: Problem, dev: Device) -> str | None:
    if why := why_no_launch(config, dev, "BLOCK_Q", "BLOCK_J"):
        return why
    n, block_n = problem["n_tokens"] * problem["top_k"], config["BLOCK_N"]
    if block_n < 0 or block_n & (block_n - 1) or block_n == 1:
        return f"BLOCK_N={block_n} is neither 0 nor a power of two"
    if min(config["BLOCK_Q"], config["BLOCK_J"]) < 2:
        return "BLOCK_Q and BLOCK_J must be 2 or more"
    keys = (problem["n_local"] + 2) * ((block_n or n) + 1)
    if keys + config["BLOCK_Q"] * (block_n or n) >= 2**31:
        return f"keys of {block_n or n} assignments do not fit 32 bits"
    if not block_n and n > _MOST_AT_ONCE:
        return f"one launch compares all of {n} assignments; more than {_MOST_AT_ONCE} need blocks"
    block_q = config["BLOCK_Q"]
    compared = block_n * max(block_n, block_q) if block_n else block_q * config["BLOCK_J"]
    if dev.is_npu:
        if block_n:  # there experts are looked up, and their counts added up, by comparing, too
            compared = max(compared, block_q * block_q)
        most = 4096  # of int32, of which UB must hold several
        return f"{compared} comparisons at a time are more than {most}" if compared > most else None
    if config["PDL"] and not _has_pdl(dev):
        return f"PDL needs sm90 or later, got {dev.arch}"
    most = 512 if block_n else 128  # in blocks a comparison is added up at once
    if compared > most * 32 * config["num_warps"]:
        return f"{config['num_warps']} warps make at most {most} each thread, got {compared}"
    return None


def _cost(problem: Problem) -> Cost:
    p = problem
    n = p["n_tokens"] * p["top_k"]
    return Cost(flops=0, bytes=4 * (3 * n + p["n_local"] + 1 + p["n_experts"] * p["mapped"]))


def _peers(inputs: dict[str, Any]) -> dict[str, Callable[[], Any]]:
    """What a model in PyTorch does, without a map."""
    ids, n_experts = inputs["topk_ids"], inputs["num_experts"]
    if "expert_map" in inputs:
        return {}

    def dispatch() -> Any:
        flat = ids.reshape(-1)
        order = flat.argsort(stable=True)
        counts = torch.zeros(n_experts, dtype=torch.int32, device=flat.device)
        counts.scatter_add_(0, flat.long(), torch.ones_like(flat))
        return counts.cumsum(0), order, order.argsort()

    return {"torch": dispatch}


_EDGE = frozenset({"edge"})
_BENCH = frozenset({"bench"})
_P = dispatch_problem

# fmt: off
SPEC = register(
    KernelSpec(
        name=_OP,
        launch=moe_dispatch,
        reference=moe_dispatch_ref,
        problem_fields=("n_tokens", "top_k", "n_experts", "n_local"),
        make_inputs=_make_inputs,
        cases=(
            Case("t9-e16-k3-local4", _P(9, 16, 3, n_local=4)),
            Case("t33-e60-k4", _P(33, 60, 4)),
            Case("t1-e1-k1", _P(1, 1, 1), _EDGE),
            Case("t1-e128-k8-plain", _P(1, 128, 8), _EDGE),
            Case("t40-e8-k2-one", _P(40, 8, 2, routing="one"), _EDGE),
            Case("t17-e5-k7-stray", _P(17, 5, 7, routing="stray"), _EDGE),
            Case("t3-e160-k160", _P(3, 160, 160), _EDGE),
            Case("t16-e512-k16-local256", _P(16, 512, 16, n_local=256), _EDGE),
            Case("t257-e6-k1-stray-mapped", _P(
                257, 6, 1, n_local=3, routing="stray"), _EDGE),
            *(Case(f"t{t}-e128-k8", _P(t, 128, 8), _BENCH) for t in (1, 64, 512, 4096)),
        ),
        tuning_key=_tuning_key,
        space=_space,
        default_config=_default_config,
        why_illegal=_why_illegal,
        cost=_cost,
        counters=("tickets",),
        outputs=("expert_offsets", "sorted_ids", "positions"),
        providers=_peers,
        scalar_loop_reason="rows go where their ranks say, one by one",
        shape=_shape,
    )
)
# fmt: on
