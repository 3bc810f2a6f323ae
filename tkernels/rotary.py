"""Host code shared by ``rope`` and ``fused_qk_norm_rope``: checks, tiles, problems and configs.

Both split their work in the same way. A program takes one token and a share of its heads:
BLOCK_HEADS q heads and, so that all shares are alike, BLOCK_KV_HEADS k heads that follow from it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

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
from tkernels.config import resolve, why_no_launch
from tkernels.device import Device, Kernel, bind, cdiv, next_power_of_2
from tkernels.registry import Case, Config, KernelSpec, Problem
from tkernels.rope_table import build_cos_sin_cache

# The values of resolve() for a rotary kernel.
FIELDS = (
    "n_tokens",
    "q_heads",
    "k_heads",
    "head_dim",
    "rotary_dim",
    "interleaved",
    "dtype",
    "position_dtype",
)


def check_heads(
    name: str, argument: str, t: torch.Tensor, like: torch.Tensor | None = None
) -> tuple[int, int, int]:
    """``t`` is [T, heads, D] of floats with contiguous D (``like``: its T, D and dtype)."""
    check_tensor(name, argument, t)
    if t.dim() != 3 or t.shape[1] < 1 or t.shape[2] < 2:
        raise ValueError(
            f"{name}: {argument} must have shape [tokens, heads >= 1, head_dim >= 2], "
            f"got {describe(t)}"
        )
    if like is None:
        check_dtype(name, argument, t, FLOAT_DTYPES)
    else:
        check_shape(name, argument, t, tokens=like.shape[0], heads=None, head_dim=like.shape[2])
        check_dtype(name, argument, t, (like.dtype,))
    check_last_contiguous(name, argument, t)
    return t.shape[0], t.shape[1], t.shape[2]


def check_table(
    name: str, cos_sin_cache: torch.Tensor, positions: torch.Tensor, n_tokens: int, head_dim: int
) -> int:
    """The table fits the heads and the positions fit the tokens; returns rotary_dim."""
    check_tensor(name, "cos_sin_cache", cos_sin_cache)
    check_dtype(name, "cos_sin_cache", cos_sin_cache, (torch.float32,))
    if (
        cos_sin_cache.dim() != 2
        or cos_sin_cache.shape[0] < 1
        or cos_sin_cache.shape[1] < 2
        or cos_sin_cache.shape[1] % 2
        or cos_sin_cache.shape[1] > head_dim
    ):
        raise ValueError(
            f"{name}: cos_sin_cache must have shape [max_pos >= 1, rotary_dim] with an even "
            f"rotary_dim in [2, head_dim={head_dim}], got {describe(cos_sin_cache)}"
        )
    if not cos_sin_cache.is_contiguous():
        raise ValueError(
            f"{name}: cos_sin_cache must be contiguous, got strides "
            f"{list(cos_sin_cache.stride())} for shape {list(cos_sin_cache.shape)}"
        )
    check_tensor(name, "positions", positions)
    check_dtype(name, "positions", positions, INDEX_DTYPES)
    check_shape(name, "positions", positions, tokens=n_tokens)
    check_last_contiguous(name, "positions", positions)
    return cos_sin_cache.shape[1]


def check_positions(name: str, positions: torch.Tensor, max_pos: int) -> None:
    """Every position has a row of factors. It reads values: for TKERNELS_DEBUG only."""
    low, high = int(positions.min()), int(positions.max())
    if low < 0 or high >= max_pos:
        raise ValueError(
            f"{name}: positions must be in [0, max_pos={max_pos}), got values from {low} to {high}"
        )


def check_flag(name: str, argument: str, value: bool) -> None:
    """``value`` is a bool (a truthy string would select a rotation style by accident)."""
    if not isinstance(value, bool):
        raise TypeError(f"{name}: {argument} must be True or False, got {describe(value)}")


def check_output(
    name: str, argument: str, out: torch.Tensor, shape: tuple[int, ...], like: torch.Tensor
) -> None:
    """``out`` has this shape, the dtype of ``like``, contiguous D and no element twice."""
    check_tensor(name, argument, out)
    if tuple(out.shape) != shape or out.dtype != like.dtype:
        expected = str(like.dtype).removeprefix("torch.")
        raise ValueError(
            f"{name}: {argument} must be {expected} {list(shape)}, got {describe(out)}"
        )
    check_last_contiguous(name, argument, out)
    check_no_overlap(name, argument, out)


# What is left to call, with the tensors first: (launch, strides and counts).
Plan = tuple[Callable[..., None], tuple[int, ...]]


def plan_heads(
    spec: KernelSpec,
    kernel: Kernel,
    values: tuple[Any, ...],
    strided: tuple[torch.Tensor, ...],
    max_pos: int,
    *,
    tail: int,
    config: Config | None,
) -> Plan | None:
    """Launch of a rotary kernel on a problem of ``values`` (see FIELDS); None without tokens.

    The kernel takes token and head stride of each tensor in ``strided`` (of a matrix: the token
    stride), then ``max_pos, n_tiles``, and the constants below besides its config.
    """
    n_tokens, q_heads, k_heads, head_dim, rotary_dim, interleaved = values[:6]
    if n_tokens == 0:
        return None
    cfg, max_programs = resolve(spec, values, config)
    n_shares, block_kv, block_half, block_tail = tile_sizes(
        q_heads, k_heads, head_dim, rotary_dim, cfg["BLOCK_HEADS"]
    )
    n_tiles = n_tokens * n_shares
    programs = min(n_tiles, max_programs)
    launch = bind(
        kernel,
        (programs,),
        Q_HEADS=q_heads,
        K_HEADS=k_heads,
        HALF=rotary_dim // 2,
        TAIL=tail,
        INTERLEAVED=interleaved,
        BLOCK_KV_HEADS=block_kv,
        BLOCK_HALF=block_half,
        BLOCK_TAIL=block_tail,
        ONE_TILE=programs == n_tiles,
        **cfg,
    )
    return launch, (*(s for t in strided for s in t.stride()[:-1]), max_pos, n_tiles)


def tile_sizes(
    q_heads: int, k_heads: int, head_dim: int, rotary_dim: int, block_heads: int
) -> tuple[int, int, int, int]:
    """(shares of a token's heads, BLOCK_KV_HEADS, BLOCK_HALF, BLOCK_TAIL)."""
    n_shares = cdiv(q_heads, block_heads)
    return (
        n_shares,
        next_power_of_2(cdiv(k_heads, n_shares)),
        next_power_of_2(rotary_dim // 2),
        next_power_of_2(head_dim - rotary_dim) if head_dim > rotary_dim else 1,
    )


# ---- problems, inputs and configs ---------------------------------------------------------------


def rotary_problem(
    n_tokens: int,
    q_heads: int,
    k_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    *,
    rotary_dim: int = 0,
    interleaved: bool = False,
    position_dtype: torch.dtype = torch.int64,
) -> dict[str, Any]:
    """A problem of either rotary kernel; the whole head turns unless ``rotary_dim`` is given."""
    return {
        "n_tokens": n_tokens,
        "q_heads": q_heads,
        "k_heads": k_heads,
        "head_dim": head_dim,
        "rotary_dim": rotary_dim or head_dim,
        "interleaved": interleaved,
        "dtype": dtype,
        "position_dtype": position_dtype,
    }


def rotary_shape(
    *,
    tokens: int,
    num_heads: int = 32,
    num_kv_heads: int = 8,
    head_dim: int = 128,
    rotary_dim: int = 0,
    interleaved: bool = False,
    dtype: torch.dtype = torch.bfloat16,
) -> Problem:
    """Problem of the heads of ``tokens`` tokens; a rotary_dim of 0 is the whole head."""
    sizes = (tokens, num_heads, num_kv_heads, head_dim)
    return rotary_problem(*sizes, dtype, rotary_dim=rotary_dim, interleaved=interleaved)


def cases() -> tuple[Case, ...]:
    """Head sizes of Qwen3 and Llama (128, 64), Phi-2 (80, partial) and odd counts of heads."""
    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    edge, bench = frozenset({"edge"}), frozenset({"bench"})
    p = rotary_problem
    return (
        Case("5x4+2x128-bf16", p(5, 4, 2, 128, bf16)),
        Case("4x9+3x64-fp32-int32", p(4, 9, 3, 64, fp32, position_dtype=torch.int32)),
        Case("5x4+2x64-bf16-interleaved", p(5, 4, 2, 64, bf16, interleaved=True)),
        Case("3x2+2x80-partial32-fp16", p(3, 2, 2, 80, fp16, rotary_dim=32)),
        Case("1x7+1x96-bf16", p(1, 7, 1, 96, bf16), edge),
        Case("3x1+1x2-fp32", p(3, 1, 1, 2, fp32), edge),
        Case("2x3+5x80-bf16-int32", p(2, 3, 5, 80, bf16, position_dtype=torch.int32), edge),
        Case(
            "3x4+2x96-partial24-interleaved-fp32",
            p(3, 4, 2, 96, fp32, rotary_dim=24, interleaved=True),
            edge,
        ),
        Case("2x2+1x192-interleaved-fp16", p(2, 2, 1, 192, fp16, interleaved=True), edge),
        Case("qwen3-8b-t64", p(64, 32, 8, 128, bf16), bench),
        Case("qwen3-8b-t8192", p(8192, 32, 8, 128, bf16), bench),
    )


def inputs(problem: Problem, dev: torch.device) -> dict[str, Any]:
    """``cos_sin_cache`` and ``positions`` of a problem.

    Few tokens are decoding ones: any positions, repeated and in no order. Many are a prompt.
    """
    n_tokens, rotary_dim = problem["n_tokens"], problem["rotary_dim"]
    max_pos = 97 if n_tokens <= 16 else 40960
    table = build_cos_sin_cache({"head_dim": rotary_dim, "rope_theta": 1e6}, max_pos)
    if n_tokens <= 64:
        generator = torch.Generator().manual_seed(7)
        positions = torch.randint(0, max_pos, (n_tokens,), generator=generator)
        positions[:1], positions[-1:] = max_pos - 1, 0
    else:
        positions = torch.arange(n_tokens) % max_pos
    return {
        "cos_sin_cache": table.to(dev),
        "positions": positions.to(problem["position_dtype"]).to(dev),
    }


def tuning_key(problem: Problem) -> dict[str, Any]:
    """Everything that shapes a program's tile, and the token count bucketed to powers of four."""
    bucket = 1
    while bucket < min(problem["n_tokens"], 16384):
        bucket *= 4
    names = ("q_heads", "k_heads", "head_dim", "rotary_dim", "interleaved")
    return {
        **{name: problem[name] for name in names},
        "itemsize": problem["dtype"].itemsize,
        "tokens_up_to": bucket,
    }


def space(dev: Device) -> dict[str, list[Any]]:
    """Search space of either rotary kernel."""
    block_heads = [1, 2, 4, 8, 16, 32, 64]
    if dev.is_npu:
        return {"BLOCK_HEADS": block_heads, "programs_per_core": [1]}
    return {
        "BLOCK_HEADS": block_heads,
        "EARLY_LOADS": [False, True],
        "num_warps": [1, 2, 4, 8, 16],
        "programs_per_core": [0, 2, 4, 8, 16, 32],
    }


def _pairs_and_tail(problem: Problem, block_heads: int) -> tuple[int, int]:
    """(pairs, elements behind rotary_dim) of a program, padding included."""
    head_dim, rotary_dim = problem["head_dim"], problem["rotary_dim"]
    _, block_kv, block_half, block_tail = tile_sizes(
        problem["q_heads"], problem["k_heads"], head_dim, rotary_dim, block_heads
    )
    heads = block_heads + block_kv
    tail = heads * block_tail if head_dim > rotary_dim else 0
    return heads * block_half, tail


def _npu_bytes(problem: Problem, block_heads: int, norm: bool) -> int:
    """UB bytes of a program, fitted from above to what Huawei's compiler reports; it is the judge.

    Double buffers in and out, and fp32 values. Interleaving adds copies of the tile.
    """
    pairs, tail = _pairs_and_tail(problem, block_heads)
    extra = 14 if norm else 0
    a_pair = (92 if problem["interleaved"] else 34) + extra
    return pairs * a_pair + tail * (2 * int(problem["dtype"].itemsize) + extra)


def default_config(problem: Problem, dev: Device, *, norm: bool = False) -> Config:
    """Heuristic: a token a program, split into shares where there are few tokens.

    ``norm`` says that heads are normed too, which keeps more values alive.
    """
    block_heads = min(64, next_power_of_2(problem["q_heads"]))
    if dev.is_npu:
        while block_heads > 1 and _npu_bytes(problem, block_heads, norm) > dev.local_mem_bytes:
            block_heads //= 2
        return {"BLOCK_HEADS": block_heads, "programs_per_core": 1}
    block_half = next_power_of_2(problem["rotary_dim"] // 2)

    def vectors() -> int:
        """16-byte loads that one member of each pair takes."""
        return _pairs_and_tail(problem, block_heads)[0] * int(problem["dtype"].itemsize) // 16

    while block_heads > 1 and vectors() > 512:
        block_heads //= 2
    while (
        vectors() > 256
        and block_heads > 1
        and (problem["n_tokens"] * cdiv(problem["q_heads"], block_heads) < dev.num_cores)
    ):
        block_heads //= 2
    # More threads than factors in a row: Triton then loads the row in the layout of the heads
    # instead of moving it, and the heads, through shared memory.
    warps = 1
    while warps < 16 and (warps * 32 <= block_half or warps * 128 < vectors()):
        warps *= 2
    while warps > 1 and _pairs_and_tail(problem, block_heads)[0] < warps * 32:
        warps //= 2
    return {
        "BLOCK_HEADS": block_heads,
        "EARLY_LOADS": not norm,  # with the norm, its arithmetic fills the wait already
        "num_warps": warps,
        "programs_per_core": 0,
    }


def why_illegal(config: Config, problem: Problem, dev: Device, *, norm: bool = False) -> str | None:
    """Reason why a rotary tile does not fit ``dev``, or None."""
    if why := why_no_launch(config, dev, "BLOCK_HEADS"):
        return why
    block_heads = config["BLOCK_HEADS"]
    if block_heads > next_power_of_2(problem["q_heads"]):
        return f"BLOCK_HEADS={block_heads} is more than {problem['q_heads']} q heads need"
    if dev.is_npu:
        need = _npu_bytes(problem, block_heads, norm)
        if need > dev.local_mem_bytes:
            return f"the tile needs about {need} bytes of UB, {dev.local_mem_bytes} available"
        return None
    warps = config["num_warps"]
    pairs, tail = _pairs_and_tail(problem, block_heads)
    registers = ((3 if norm else 2) * pairs + tail) // (warps * 32)
    if registers > 150:
        return f"about {registers} of 255 registers a thread would hold the tile alone"
    if pairs < warps * 32 and warps > 1:
        return f"{warps} warps have nothing to do with {pairs} pairs"
    return None
