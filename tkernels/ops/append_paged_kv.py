"""Write new keys and values into a paged cache (vLLM's ``slot_mapping``, arXiv 2309.06180).

    slot = slot_mapping[t]
    k_cache[slot // block_size, slot % block_size] = k[t]          the same for v

k, v: [n_tokens, num_kv_heads, head_dim], usually views of a packed qkv projection.
k_cache, v_cache: [num_blocks, block_size, num_kv_heads, head_dim], any strides but the last, so a
[num_blocks, num_kv_heads, block_size, head_dim] pool is served through its permuted view.

A slot below 0 is skipped (padding of a captured batch), and so is one past the end of the pool:
nothing is ever written out of bounds. One program copies one token, or a part of it, so that every
address follows from one scalar slot; Ascend would do a gather over a tile of slots row by row.
Where the heads of a token are neighbours in all four tensors they are copied as one row.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch

from tkernels import check
from tkernels.check import (
    FLOAT_DTYPES,
    INDEX_DTYPES,
    check_dtype,
    check_last_contiguous,
    check_no_overlap,
    check_shape,
    check_tensor,
    describe,
)
from tkernels.config import planned, resolve, why_no_launch
from tkernels.device import Device, bind, cdiv, next_power_of_2, tl, triton
from tkernels.registry import Case, Config, Cost, KernelSpec, Problem, op, register


def append_paged_kv_ref(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    config: Config | None = None,
) -> None:
    """PyTorch version of ``append_paged_kv``."""
    block_size = k_cache.shape[1]
    kept = (slot_mapping >= 0) & (slot_mapping < k_cache.shape[0] * block_size)
    (tokens,) = kept.nonzero(as_tuple=True)
    slots = slot_mapping[tokens].long()
    block, offset = slots // block_size, slots % block_size
    k_cache[block, offset] = k[tokens]
    v_cache[block, offset] = v[tokens]


@triton.jit
def _append_paged_kv_kernel(
    k_ptr,
    v_ptr,
    k_cache_ptr,
    v_cache_ptr,
    slot_ptr,
    stride_kt,
    stride_kh,
    stride_vt,
    stride_vh,
    stride_kcb,
    stride_kcs,
    stride_kch,
    stride_vcb,
    stride_vcs,
    stride_vch,
    n_slots,
    n_tiles,
    BLOCK_SIZE: tl.constexpr,  # tokens a cache block; a constant, because it divides
    N_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ONE_TILE: tl.constexpr,  # a program has one tile, so it need not loop
    BLOCK_HEADS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    # fmt: off
    if ONE_TILE:
        _append_tile(
            tl.program_id(0), k_ptr, v_ptr, k_cache_ptr, v_cache_ptr, slot_ptr,
            stride_kt, stride_kh, stride_vt, stride_vh, stride_kcb, stride_kcs, stride_kch,
            stride_vcb, stride_vcs, stride_vch, n_slots,
            BLOCK_SIZE, N_HEADS, HEAD_DIM, BLOCK_HEADS, BLOCK_D)
    else:
        for tile in range(tl.program_id(0), n_tiles, tl.num_programs(0)):
            _append_tile(
                tile, k_ptr, v_ptr, k_cache_ptr, v_cache_ptr, slot_ptr,
                stride_kt, stride_kh, stride_vt, stride_vh, stride_kcb, stride_kcs, stride_kch,
                stride_vcb, stride_vcs, stride_vch, n_slots,
                BLOCK_SIZE, N_HEADS, HEAD_DIM, BLOCK_HEADS, BLOCK_D)
    # fmt: on


@triton.jit
def _append_tile(
    tile,
    k_ptr,
    v_ptr,
    k_cache_ptr,
    v_cache_ptr,
    slot_ptr,
    stride_kt,
    stride_kh,
    stride_vt,
    stride_vh,
    stride_kcb,
    stride_kcs,
    stride_kch,
    stride_vcb,
    stride_vcs,
    stride_vch,
    n_slots,
    BLOCK_SIZE: tl.constexpr,
    N_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    n_head_tiles: tl.constexpr = (N_HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS
    n_col_tiles: tl.constexpr = (HEAD_DIM + BLOCK_D - 1) // BLOCK_D
    head_tile = tile // n_col_tiles
    token = head_tile // n_head_tiles
    # Only the slot is data; everything that it multiplies is wide because it is.
    slot = tl.load(slot_ptr + token).to(tl.int64)
    heads = (head_tile % n_head_tiles) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)[:, None]
    cols = (tile % n_col_tiles) * BLOCK_D + tl.arange(0, BLOCK_D)[None, :]
    ok = (heads < N_HEADS) & (cols < HEAD_DIM)
    token64, heads64 = token.to(tl.int64), heads.to(tl.int64)
    # Read before the slot is known to be one, so that the loads do not wait for each other.
    k = tl.load(k_ptr + token64 * stride_kt + heads64 * stride_kh + cols, mask=ok)
    v = tl.load(v_ptr + token64 * stride_vt + heads64 * stride_vh + cols, mask=ok)
    if (slot >= 0) & (slot < n_slots):
        block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
        k_rows = k_cache_ptr + block * stride_kcb + offset * stride_kcs + heads64 * stride_kch
        v_rows = v_cache_ptr + block * stride_vcb + offset * stride_vcs + heads64 * stride_vch
        tl.store(k_rows + cols, k, mask=ok)
        tl.store(v_rows + cols, v, mask=ok)


@op
def append_paged_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    config: Config | None = None,
) -> None:
    """Copy each token's key and value to its slot of the cache, in place.

    Args:
        k: [n_tokens, num_kv_heads, head_dim], fp32, bf16 or fp16, any token and head strides.
        v: shape and dtype of ``k``, own strides.
        k_cache: [num_blocks, block_size, num_kv_heads, head_dim] of the dtype of ``k``; any strides
            but the last. Written.
        v_cache: shape and dtype of ``k_cache``, own strides. Written.
        slot_mapping: [n_tokens], int32 or int64: block * block_size + offset. A negative slot is
            skipped, and so is one >= num_blocks * block_size, which is an error (and found out)
            only under TKERNELS_DEBUG. No two tokens may share a slot: either could win.
        config: launch config; None looks it up.

    Raises:
        TypeError, ValueError: an argument of the wrong kind, shape, dtype, stride or device.
    """
    if k_cache is v_cache:
        raise check.one_for_both("append_paged_kv", "v_cache", "k_cache")
    plan = planned(_plan, config, (k, v, k_cache, v_cache, slot_mapping))
    if check.DEBUG:
        _check_slots(slot_mapping, k_cache.shape[0] * k_cache.shape[1])
    if plan is not None:
        launch, numbers = plan
        launch(k, v, k_cache, v_cache, slot_mapping, *numbers)


def _plan(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    config: Config | None,
) -> tuple[Callable[..., None], tuple[int, ...]] | None:
    """(launch, strides and counts); None where there is nothing to copy."""
    name = "append_paged_kv"
    n_tokens, n_heads, head_dim, num_blocks, block_size = _check(k, v, k_cache, v_cache)
    check_tensor(name, "slot_mapping", slot_mapping)
    check_shape(name, "slot_mapping", slot_mapping, n_tokens=n_tokens)
    check_dtype(name, "slot_mapping", slot_mapping, INDEX_DTYPES)
    check_last_contiguous(name, "slot_mapping", slot_mapping)
    n_slots = num_blocks * block_size
    if n_tokens == 0 or n_slots == 0:
        return None
    strides = (*k.stride()[:2], *v.stride()[:2], *k_cache.stride()[:3], *v_cache.stride()[:3])
    one_row = n_heads == 1 or all(strides[i] == head_dim for i in (1, 3, 6, 9))
    values = (n_tokens, n_heads, head_dim, one_row, block_size, k.dtype)
    cfg, max_programs = resolve(SPEC, values, config)
    if one_row:
        n_heads, head_dim = 1, n_heads * head_dim
    n_tiles = n_tokens * cdiv(n_heads, cfg["BLOCK_HEADS"]) * cdiv(head_dim, cfg["BLOCK_D"])
    programs = min(n_tiles, max_programs)
    constants = {
        "BLOCK_SIZE": block_size,
        "N_HEADS": n_heads,
        "HEAD_DIM": head_dim,
        "ONE_TILE": programs == n_tiles,
    }
    launch = bind(_append_paged_kv_kernel, (programs,), **constants, **cfg)
    return launch, (*strides, n_slots, n_tiles)


def _check(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor
) -> tuple[int, ...]:
    """Refuse what the kernel cannot take; (n_tokens, heads, head_dim, num_blocks, block_size)."""
    name = "append_paged_kv"
    for argument, t in (("k", k), ("v", v), ("k_cache", k_cache), ("v_cache", v_cache)):
        check_tensor(name, argument, t)
    if k.dim() != 3 or 0 in k.shape[1:]:
        raise ValueError(
            f"{name}: k must have shape [n_tokens, num_kv_heads >= 1, head_dim >= 1], "
            f"got {describe(k)}"
        )
    check_dtype(name, "k", k, FLOAT_DTYPES)
    n_tokens, n_heads, head_dim = k.shape
    if v.shape != k.shape or v.dtype != k.dtype:
        raise ValueError(f"{name}: v must be {describe(k)} as k is, got {describe(v)}")
    check_shape(
        name,
        "k_cache",
        k_cache,
        num_blocks=None,
        block_size=None,
        num_kv_heads=n_heads,
        head_dim=head_dim,
    )
    check_dtype(name, "k_cache", k_cache, (k.dtype,))
    num_blocks, block_size = k_cache.shape[:2]
    if v_cache.shape != k_cache.shape or v_cache.dtype != k_cache.dtype:
        raise ValueError(
            f"{name}: v_cache must be {describe(k_cache)} as k_cache is, got {describe(v_cache)}"
        )
    for argument, t in (("k", k), ("v", v), ("k_cache", k_cache), ("v_cache", v_cache)):
        check_last_contiguous(name, argument, t)
    check_no_overlap(name, "k_cache", k_cache)
    check_no_overlap(name, "v_cache", v_cache)
    return n_tokens, n_heads, head_dim, num_blocks, block_size


def _check_slots(slot_mapping: torch.Tensor, n_slots: int) -> None:
    """Wait for the device and raise if a slot lies past the end of the pool."""
    beyond = slot_mapping[slot_mapping >= n_slots]
    if beyond.numel():
        raise ValueError(
            f"append_paged_kv: slot_mapping must hold slots < num_blocks * block_size={n_slots}, "
            f"got {int(beyond[0])} ({beyond.numel()} such of {slot_mapping.numel()})"
        )


# ---- facts for tests, bench and tuner --------------------------------------------------------


def append_problem(
    tokens: int,
    heads: int,
    head_dim: int,
    dtype: torch.dtype,
    *,
    block_size: int = 16,
    one_row: bool = True,
    skip_every: int = 0,
    slots: torch.dtype = torch.int64,
) -> dict[str, Any]:
    """Problem of ``tokens`` new tokens. The last two only concern the inputs made from it:
    every ``skip_every``-th token has slot -1, and ``slots`` is the dtype of slot_mapping."""
    return {
        "n_tokens": tokens,
        "num_kv_heads": heads,
        "head_dim": head_dim,
        "one_row": one_row,  # the heads of a token are neighbours in all four tensors
        "block_size": block_size,
        "dtype": dtype,
        "skip_every": skip_every,
        "slots": slots,
    }


def _shape(
    *,
    tokens: int,
    num_kv_heads: int = 8,
    head_dim: int = 128,
    block_size: int = 16,
    dtype: torch.dtype = torch.bfloat16,
) -> Problem:
    """Keys and values of ``tokens`` new tokens."""
    return append_problem(tokens, num_kv_heads, head_dim, dtype, block_size=block_size)


def _make_inputs(problem: Problem, dev: torch.device) -> dict[str, Any]:
    """k and v as views of a packed qkv, a half-full pool of random values, shuffled slots."""
    tokens, heads, dim = problem["n_tokens"], problem["num_kv_heads"], problem["head_dim"]
    block_size, skip_every = problem["block_size"], problem.get("skip_every", 0)
    num_blocks = cdiv(2 * tokens, block_size)
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(problem["dtype"]).to(dev)

    qkv = random(tokens, 4 * heads, dim)
    k, v = qkv[:, 2 * heads : 3 * heads], qkv[:, 3 * heads :]
    # Head-major pools ([num_blocks, num_kv_heads, block_size, head_dim]) come as permuted views.
    shape = (block_size, heads) if problem["one_row"] else (heads, block_size)
    pools = [random(num_blocks, *shape, dim) for _ in range(2)]
    if not problem["one_row"]:
        pools = [pool.transpose(1, 2) for pool in pools]
    slots = torch.randperm(num_blocks * block_size, generator=generator)[:tokens]
    if skip_every:
        slots[::skip_every] = -1
    return {
        "k": k,
        "v": v,
        "k_cache": pools[0],
        "v_cache": pools[1],
        "slot_mapping": slots.to(problem.get("slots", torch.int64)).to(dev),
    }


def _tile_shape(problem: Problem) -> tuple[int, int]:
    """(heads, columns) of one token as the kernel sees it."""
    heads, dim = problem["num_kv_heads"], problem["head_dim"]
    return (1, heads * dim) if problem["one_row"] else (heads, dim)


def _tuning_key(problem: Problem) -> dict[str, Any]:
    heads, dim = _tile_shape(problem)
    bucket = 1
    while bucket < min(problem["n_tokens"], 16384):
        bucket *= 4
    itemsize = problem["dtype"].itemsize
    return {"n_heads": heads, "n_cols": dim, "itemsize": itemsize, "tokens_up_to": bucket}


def _space(dev: Device) -> dict[str, list[Any]]:
    space = {
        "BLOCK_HEADS": [1, 2, 4, 8, 16, 32],
        "BLOCK_D": [1 << i for i in range(15)],
        "programs_per_core": [0, 4, 8, 16, 32],
    }
    if not dev.registers:  # a vector unit: no threads
        return {**space, "programs_per_core": [1]}
    return {**space, "num_warps": [1, 2, 4, 8, 16]}


def _default_config(problem: Problem, dev: Device) -> Config:
    heads, dim = _tile_shape(problem)
    # A whole token if it fits: 4096 elements are 16 KiB of K and V in fp32.
    block_d = min(next_power_of_2(dim), 4096)
    block_heads = min(next_power_of_2(heads), 32, max(1, 4096 // block_d))
    config = {"BLOCK_HEADS": block_heads, "BLOCK_D": block_d}
    if not dev.registers:  # a vector unit: no threads
        return {**config, "programs_per_core": 1}
    # 16 bytes of K and 16 of V a thread.
    warps = block_heads * block_d * problem["dtype"].itemsize // (16 * 32)
    return {**config, "num_warps": max(1, min(16, warps)), "programs_per_core": 0}


def _why_illegal(config: Config, problem: Problem, dev: Device) -> str | None:
    if why := why_no_launch(config, dev, "BLOCK_HEADS", "BLOCK_D"):
        return why
    elements = config["BLOCK_HEADS"] * config["BLOCK_D"]
    size = 2 * elements * problem["dtype"].itemsize  # K and V
    if not dev.registers:  # a vector unit: no threads
        if 2 * size > dev.local_mem_bytes:  # the compiler doubles the buffers of a loop
            return f"two buffers of K and V need {2 * size} bytes, UB has {dev.local_mem_bytes}"
        return None
    warps = config["num_warps"]
    registers = size // 4 // (warps * 32)
    if registers > 128:
        return f"about {registers} of 255 registers a thread would hold K and V alone"
    if elements < warps * 32 and warps > 1:
        return f"{warps} warps have nothing to do with {elements} elements"
    return None


def _cost(problem: Problem) -> Cost:
    row = problem["num_kv_heads"] * problem["head_dim"] * problem["dtype"].itemsize
    return Cost(flops=0, bytes=problem["n_tokens"] * (4 * row + 8))


def _providers(inputs: dict[str, Any]) -> dict[str, Any]:
    k, v, k_cache, v_cache, slots = (
        inputs[n] for n in ("k", "v", "k_cache", "v_cache", "slot_mapping")
    )
    if bool((slots < 0).any()):
        return {}  # no peer skips tokens
    block_size = k_cache.shape[1]
    block, offset = slots.long() // block_size, slots.long() % block_size

    def torch_index_put() -> None:
        k_cache[block, offset] = k
        v_cache[block, offset] = v

    peers: dict[str, Any] = {"torch": torch_index_put}
    with contextlib.suppress(ImportError):
        import flashinfer

        # Each token as a request of one page that holds it at ``offset``.
        first = torch.arange(len(slots) + 1, dtype=torch.int32, device=slots.device)
        requests, pages, positions = first[:-1], block.int(), offset.int()
        last_page_len = positions + 1
        peers["flashinfer"] = lambda: flashinfer.append_paged_kv_cache(
            k, v, requests, positions, (k_cache, v_cache), pages, first, last_page_len
        )
    return peers


_EDGE = frozenset({"edge"})
_BENCH = frozenset({"bench"})  # Qwen3 8B: 8 heads x 128

SPEC = register(
    KernelSpec(
        name="append_paged_kv",
        launch=append_paged_kv,
        reference=append_paged_kv_ref,
        problem_fields=("n_tokens", "num_kv_heads", "head_dim", "one_row", "block_size", "dtype"),
        make_inputs=_make_inputs,
        cases=(
            Case("9x2x64-bf16", append_problem(9, 2, 64, torch.bfloat16, skip_every=4)),
            Case(
                "5x3x32-head-major-fp16",
                append_problem(5, 3, 32, torch.float16, one_row=False, skip_every=3),
            ),
            Case(
                "7x1x80-block3-int32-fp32",
                append_problem(7, 1, 80, torch.float32, block_size=3, slots=torch.int32),
                _EDGE,
            ),
            Case("1x1x1-block1-bf16", append_problem(1, 1, 1, torch.bfloat16, block_size=1), _EDGE),
            Case("3x5x33-bf16", append_problem(3, 5, 33, torch.bfloat16, skip_every=1), _EDGE),
            Case(
                "2x40x136-head-major-bf16",
                append_problem(2, 40, 136, torch.bfloat16, one_row=False),
                _EDGE,
            ),
            Case("2x40x136-bf16", append_problem(2, 40, 136, torch.bfloat16), _EDGE),
            Case("64x8x128-bf16", append_problem(64, 8, 128, torch.bfloat16), _BENCH),
            Case("4096x8x128-bf16", append_problem(4096, 8, 128, torch.bfloat16), _BENCH),
        ),
        tuning_key=_tuning_key,
        space=_space,
        default_config=_default_config,
        why_illegal=_why_illegal,
        cost=_cost,
        mutates=("k_cache", "v_cache"),
        providers=_providers,
        shape=_shape,
    )
)
