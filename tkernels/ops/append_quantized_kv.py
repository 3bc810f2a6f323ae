"""Quantise new keys and values into two ``QuantizedKV`` caches in one pass (tkernels/kv_format.py).

    code  = round_half_even(clamp(x / scale, -127, 127))        to codes[slot // bs, slot % bs]
    scale = absmax(x) / 127 of a token and head, or a given one of a head and channel
    rest  = x / scale - code;  kept as 4-bit block floats in the pool where its share exceeds tau,
                               and then the scale is written as -scale

k, v: [n_tokens, num_kv_heads, head_dim]; codes: [num_blocks, block_size, num_kv_heads, head_dim].
``slot_mapping`` is that of ``append_paged_kv``. The launch in this file takes the tensors of both
caches one by one; ``tkernels.append_quantized_kv``, in tkernels/quantized.py, takes the caches.

A program stays with K or with V. Without residuals it takes the same tokens of several heads
(``tkernels/append_codes.py``), with them those of one head (``tkernels/append_rests.py``); Hopper
has a body of its own for numbers of 16 bits with residuals (``variant`` "hopper",
``tkernels/append_rests_hopper.py``). Pool slots come from the head's stack by atomic
subtraction: which slot a token gets depends on which program is first, and so does which token goes
without where the stack runs empty. What is read back does not, as long as it does not run empty.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import torch

from tkernels import append_rests_hopper
from tkernels.append_codes import append_codes
from tkernels.append_rests import append_rests
from tkernels.config import planned, resolve, why_no_launch
from tkernels.device import (
    Device,
    bind,
    cdiv,
    current,
    next_power_of_2,
    rounding_each_step,
    tl,
    triton,
)
from tkernels.kv_format import FORMATS, LARGEST, QuantizedKV, append_quantized_ref
from tkernels.ops.paged_attn import _has_pdl, _let_next_kernel_start, _wait_for_earlier_kernels
from tkernels.quantized_cases import (
    CASES,
    MUTATED,
    quantized_compared,
    quantized_cost,
    quantized_inputs,
    quantized_shape,
)
from tkernels.quantized_check import check_caches
from tkernels.registry import Config, KernelSpec, Problem, op, register


def append_quantized_kv_ref(
    k: torch.Tensor,
    v: torch.Tensor,
    k_codes: torch.Tensor,
    k_scale: torch.Tensor,
    k_slots: torch.Tensor,
    k_residual: torch.Tensor,
    k_residual_scale: torch.Tensor,
    k_free_slots: torch.Tensor,
    k_free_count: torch.Tensor,
    k_dropped: torch.Tensor,
    k_tau: torch.Tensor,
    v_codes: torch.Tensor,
    v_scale: torch.Tensor,
    v_slots: torch.Tensor,
    v_residual: torch.Tensor,
    v_residual_scale: torch.Tensor,
    v_free_slots: torch.Tensor,
    v_free_count: torch.Tensor,
    v_dropped: torch.Tensor,
    v_tau: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    mantissa_bits: int = 1,
    config: Config | None = None,
) -> None:
    """PyTorch version of the launch."""
    # fmt: off
    of_k = (
        k_codes, k_scale, k_slots, k_residual, k_residual_scale, k_free_slots, k_free_count,
        k_dropped, k_tau,
    )
    of_v = (
        v_codes, v_scale, v_slots, v_residual, v_residual_scale, v_free_slots, v_free_count,
        v_dropped, v_tau,
    )
    # fmt: on
    for x, tensors in ((k, of_k), (v, of_v)):
        cache = QuantizedKV(*(tensors if tensors[2].numel() else tensors[:2]))
        cache = cache._replace(residual_format=FORMATS[mantissa_bits])
        append_quantized_ref(x, cache, slot_mapping)


@triton.jit
def _append_quantized_kv_kernel(
    k_ptr,
    v_ptr,
    k_codes_ptr,
    k_scale_ptr,
    k_slots_ptr,
    k_residual_ptr,
    k_residual_scale_ptr,
    k_free_slots_ptr,
    k_free_count_ptr,
    k_dropped_ptr,
    k_tau_ptr,
    v_codes_ptr,
    v_scale_ptr,
    v_slots_ptr,
    v_residual_ptr,
    v_residual_scale_ptr,
    v_free_slots_ptr,
    v_free_count_ptr,
    v_dropped_ptr,
    v_tau_ptr,
    slot_mapping_ptr,
    stride_kt,
    stride_kh,
    stride_vt,
    stride_vh,
    n_tokens,
    n_positions,
    n_slots,
    n_tiles,
    BLOCK_SIZE: tl.constexpr,  # tokens a cache block; a constant, because it divides
    N_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    STATIC: tl.constexpr,
    RESIDUAL_BLOCK: tl.constexpr,  # channels that share a residual scale; 0: no residuals
    MANTISSA: tl.constexpr,
    LARGEST_CODE: tl.constexpr,
    ORDERED: tl.constexpr,  # a program has all tokens of a head, in order
    CLAMPED: tl.constexpr,  # addresses of masked lanes lie inside, too
    ONE_TILE: tl.constexpr,  # a program has one tile, so it need not loop
    BLOCK_D: tl.constexpr,  # channels of a row, as a power of two; with residuals of half a row
    BLOCK_T: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,  # of a program, which lie side by side; 1 with residuals or STATIC
    STAGES: tl.constexpr,  # tiles that are on their way to a program, by copies ahead; 1: no copies
    BY_TOKEN: tl.constexpr,  # residuals are made of one token at a time, which is read again
    PDL: tl.constexpr,
):
    if PDL:
        _let_next_kernel_start()
        _wait_for_earlier_kernels()
    # A program stays with its heads, of K or of V. What lies side by side is read at one time.
    groups: tl.constexpr = N_HEADS // BLOCK_HEADS
    step = tl.num_programs(0) // (2 * groups)  # programs of a group
    of_k = tl.program_id(0) % 2 == 0
    head, first = tl.program_id(0) // 2 % groups * BLOCK_HEADS, tl.program_id(0) // (2 * groups)
    # fmt: off
    if not CLAMPED:  # one code for K and V, half as much; Ascend takes no pointer that was chosen
        x_ptr = k_ptr if of_k else v_ptr
        codes_ptr = k_codes_ptr if of_k else v_codes_ptr
        scale_ptr = k_scale_ptr if of_k else v_scale_ptr
        slots_ptr = k_slots_ptr if of_k else v_slots_ptr
        residual_ptr = k_residual_ptr if of_k else v_residual_ptr
        residual_scale_ptr = k_residual_scale_ptr if of_k else v_residual_scale_ptr
        free_slots_ptr = k_free_slots_ptr if of_k else v_free_slots_ptr
        free_count_ptr = k_free_count_ptr if of_k else v_free_count_ptr
        dropped_ptr = k_dropped_ptr if of_k else v_dropped_ptr
        tau_ptr = k_tau_ptr if of_k else v_tau_ptr
        # One may be of 32 bits and the other of 64, which a choice cannot be among.
        stride_xt = tl.cast(stride_kt, tl.int64) if of_k else tl.cast(stride_vt, tl.int64)
        stride_xh = tl.cast(stride_kh, tl.int64) if of_k else tl.cast(stride_vh, tl.int64)
        _append_side(
            head, first, n_tiles, step, x_ptr, codes_ptr, scale_ptr, slots_ptr,
            residual_ptr, residual_scale_ptr, free_slots_ptr,
            free_count_ptr, dropped_ptr, tau_ptr, slot_mapping_ptr, stride_xt,
            stride_xh, n_tokens, n_positions, n_slots, BLOCK_SIZE, N_HEADS, HEAD_DIM, STATIC,
            RESIDUAL_BLOCK, MANTISSA, LARGEST_CODE, ORDERED, CLAMPED, ONE_TILE, BLOCK_D, BLOCK_T,
            BLOCK_HEADS, STAGES, BY_TOKEN)
    elif of_k:
        _append_side(
            head, first, n_tiles, step, k_ptr, k_codes_ptr, k_scale_ptr, k_slots_ptr,
            k_residual_ptr, k_residual_scale_ptr, k_free_slots_ptr,
            k_free_count_ptr, k_dropped_ptr, k_tau_ptr, slot_mapping_ptr, stride_kt,
            stride_kh, n_tokens, n_positions, n_slots, BLOCK_SIZE, N_HEADS, HEAD_DIM, STATIC,
            RESIDUAL_BLOCK, MANTISSA, LARGEST_CODE, ORDERED, CLAMPED, ONE_TILE, BLOCK_D, BLOCK_T,
            BLOCK_HEADS, STAGES, BY_TOKEN)
    else:
        _append_side(
            head, first, n_tiles, step, v_ptr, v_codes_ptr, v_scale_ptr, v_slots_ptr,
            v_residual_ptr, v_residual_scale_ptr, v_free_slots_ptr,
            v_free_count_ptr, v_dropped_ptr, v_tau_ptr, slot_mapping_ptr, stride_vt,
            stride_vh, n_tokens, n_positions, n_slots, BLOCK_SIZE, N_HEADS, HEAD_DIM, STATIC,
            RESIDUAL_BLOCK, MANTISSA, LARGEST_CODE, ORDERED, CLAMPED, ONE_TILE, BLOCK_D, BLOCK_T,
            BLOCK_HEADS, STAGES, BY_TOKEN)
    # fmt: on


@triton.jit
def _append_side(
    head,
    first,
    n_tiles,
    step,
    x_ptr,
    codes_ptr,
    scale_ptr,
    slots_ptr,
    residual_ptr,
    residual_scale_ptr,
    free_slots_ptr,
    free_count_ptr,
    dropped_ptr,
    tau_ptr,
    slot_mapping_ptr,
    stride_xt,
    stride_xh,
    n_tokens,
    n_positions,
    n_slots,
    BLOCK_SIZE: tl.constexpr,
    N_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    STATIC: tl.constexpr,
    RESIDUAL_BLOCK: tl.constexpr,
    MANTISSA: tl.constexpr,
    LARGEST_CODE: tl.constexpr,
    ORDERED: tl.constexpr,
    CLAMPED: tl.constexpr,
    ONE_TILE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    STAGES: tl.constexpr,
    BY_TOKEN: tl.constexpr,
):
    """K's part, or V's: tiles ``first``, ``first + step`` .. of the heads from ``head`` on."""
    if ONE_TILE:
        n_tiles, step = first + 1, 1
    # fmt: off
    if RESIDUAL_BLOCK == 0:
        append_codes(
            head, first, n_tiles, step, x_ptr, codes_ptr, scale_ptr, slot_mapping_ptr, stride_xt,
            stride_xh, n_tokens, n_positions, BLOCK_SIZE, N_HEADS, HEAD_DIM, STATIC, CLAMPED,
            BLOCK_D, BLOCK_T, BLOCK_HEADS, STAGES)
    else:
        append_rests(
            head, first, n_tiles, step, x_ptr, codes_ptr, scale_ptr, slots_ptr, residual_ptr,
            residual_scale_ptr, free_slots_ptr, free_count_ptr, dropped_ptr, tau_ptr,
            slot_mapping_ptr, stride_xt, stride_xh, n_tokens, n_positions, n_slots, BLOCK_SIZE,
            N_HEADS, HEAD_DIM, STATIC, RESIDUAL_BLOCK, MANTISSA, LARGEST_CODE, ORDERED, CLAMPED,
            BLOCK_D, BLOCK_T, STAGES, BY_TOKEN)
    # fmt: on


@op
def append_quantized_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_codes: torch.Tensor,
    k_scale: torch.Tensor,
    k_slots: torch.Tensor,
    k_residual: torch.Tensor,
    k_residual_scale: torch.Tensor,
    k_free_slots: torch.Tensor,
    k_free_count: torch.Tensor,
    k_dropped: torch.Tensor,
    k_tau: torch.Tensor,
    v_codes: torch.Tensor,
    v_scale: torch.Tensor,
    v_slots: torch.Tensor,
    v_residual: torch.Tensor,
    v_residual_scale: torch.Tensor,
    v_free_slots: torch.Tensor,
    v_free_count: torch.Tensor,
    v_dropped: torch.Tensor,
    v_tau: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    mantissa_bits: int = 1,
    config: Config | None = None,
) -> None:
    """The launch of ``tkernels.append_quantized_kv``, with the tensors of both caches.

    The tensors between v and slot_mapping are ``kv_format.fields(cache)`` of K's cache, then of
    V's, all contiguous, and V's of the shapes of K's; without residuals those from ``slots`` on are
    empty. All that are written must be different ones.

    Args:
        k: [n_tokens, num_kv_heads, head_dim], fp32, bf16 or fp16, any token and head strides.
        v: shape and dtype of ``k``, own strides.
        k_codes, v_codes: int8 [num_blocks, block_size, num_kv_heads, head_dim]. Written.
        k_scale, v_scale: fp32 [num_blocks, num_kv_heads, block_size], written; or, for static
            scales, [num_kv_heads, head_dim], read.
        k_slots, v_slots: int16 [num_blocks, num_kv_heads, block_size], pool slots, -1 = none.
            Written.
        k_residual, v_residual: uint8 [num_kv_heads, num_slots, head_dim / 2]. Written.
        k_residual_scale, v_residual_scale: uint8 [num_kv_heads, num_slots, head_dim / 16 or 32].
            Written.
        k_free_slots, v_free_slots: int32 [num_kv_heads, num_slots], a stack of slots.
        k_free_count, v_free_count: int32 [num_kv_heads], its height. Written.
        k_dropped, v_dropped: int32 [num_kv_heads], how many residuals found no slot. Written.
        k_tau, v_tau: fp32 [num_kv_heads]: a token whose relative error exceeds it is an outlier.
        slot_mapping: [n_tokens], int32 or int64: block * block_size + offset.
        mantissa_bits: of the 4-bit residual: 2 is E1M2, 1 is E2M1 (FP4), 0 is E3M0.
        config: launch config; None looks it up.

    Raises:
        TypeError, ValueError: an argument of the wrong kind, shape, dtype, stride or device.
    """
    tensors = (
        k, v, k_codes, k_scale, k_slots, k_residual, k_residual_scale, k_free_slots, k_free_count,
        k_dropped, k_tau, v_codes, v_scale, v_slots, v_residual, v_residual_scale, v_free_slots,
        v_free_count, v_dropped, v_tau, slot_mapping,
    )  # fmt: skip
    plan = planned(_plan, config, tensors, mantissa_bits)
    if plan is not None:
        launch, numbers = plan
        launch(*tensors, *numbers)


def _plan(*given: Any, config: Config | None) -> _Plan | None:
    """None where there is nothing to append."""
    *tensors, mantissa_bits = given
    k, v, codes = tensors[:3]
    static, residual_block = check_caches(*given)
    n_tokens, n_heads, head_dim = k.shape
    num_blocks, block_size = codes.shape[:2]
    n_positions = num_blocks * block_size
    if n_tokens == 0 or n_positions == 0:
        return None
    values = (n_tokens, n_heads, head_dim, block_size, k.dtype, static, residual_block)
    cfg, max_programs = resolve(SPEC, values, config)
    constants = {
        "BLOCK_SIZE": block_size,
        "N_HEADS": n_heads,
        "HEAD_DIM": head_dim,
        "STATIC": static,
        "RESIDUAL_BLOCK": residual_block,
        "MANTISSA": mantissa_bits,
        "LARGEST_CODE": LARGEST[FORMATS[mantissa_bits]],
    }
    counts = n_tokens, n_positions, tensors[7].shape[-1]
    if cfg.pop("variant", "portable") == "portable":
        return _bind_portable(k, v, cfg, max_programs, constants, counts)

    @functools.cache
    def portable() -> _Plan:
        problem = dict(zip(SPEC.problem_fields, values, strict=True))
        other, most = resolve(SPEC, values, _portable_config(problem, current()))
        del other["variant"]
        return _bind_portable(k, v, other, most, constants, counts)

    if not append_rests_hopper.can_address(k, v, n_positions):
        return portable()
    hopper = append_rests_hopper.bind(k, v, cfg, max_programs, constants, counts)
    return _by_address(hopper, portable)


_Plan = tuple[Callable[..., None], tuple[int, ...]]  # a launch, and numbers behind its tensors


def _bind_portable(
    k: torch.Tensor,
    v: torch.Tensor,
    config: Config,
    max_programs: int,
    constants: dict[str, Any],
    counts: tuple[int, int, int],
) -> _Plan:
    cfg = {"PDL": False, "STAGES": 1, "BY_TOKEN": False, "BLOCK_HEADS": 1, **config}
    n_heads, residual_block = constants["N_HEADS"], constants["RESIDUAL_BLOCK"]
    n_tiles = cdiv(counts[0], cfg["BLOCK_T"])
    groups = 2 * n_heads // cfg["BLOCK_HEADS"]  # of heads of K and of V
    # Ascend cannot address by what an atomic operation returns.
    ordered = residual_block > 0 and not current().registers
    of_a_group = 1 if ordered else min(n_tiles, max(1, max_programs // groups))
    if of_a_group == n_tiles:  # nothing to copy ahead
        cfg["STAGES"] = 1
    # Each step as the reference rounds it: a rest that is not exact has other 4-bit codes.
    launch = bind(
        _append_quantized_kv_kernel,
        (groups * of_a_group,),
        **constants,
        ORDERED=ordered,
        CLAMPED=not current().registers,
        ONE_TILE=of_a_group == n_tiles,
        BLOCK_D=_width(constants["HEAD_DIM"], residual_block),
        **cfg,
        **rounding_each_step(),
        **({"launch_pdl": True} if cfg["PDL"] else {}),
    )
    return launch, (*k.stride()[:2], *v.stride()[:2], *counts, n_tiles)


def _by_address(hopper: _Plan, portable: Callable[[], _Plan]) -> _Plan:
    """Pieces of 16 bytes need addresses that divide by 16: a call knows."""
    addressable = not current().compile_only

    def run(k: torch.Tensor, v: torch.Tensor, *caches: torch.Tensor) -> None:
        # Numbers, codes and residuals of both.
        pieces = (k, v, caches[0], caches[3], caches[9], caches[12])
        if addressable and functools.reduce(operator.or_, (t.data_ptr() for t in pieces)) % 16:
            launch, numbers = portable()
            launch(k, v, *caches, *numbers)
        else:
            hopper[0](k, v, *caches, *hopper[1])

    return run, ()


def _width(head_dim: int, residual_block: int) -> int:
    """Channels that are taken at once: a head's, and half of them where residuals pair halves."""
    if not residual_block:
        return next_power_of_2(head_dim)
    return next_power_of_2(head_dim // 2)


def _row(problem: Problem) -> int:
    """Channels that a token's head takes of a tile."""
    width = _width(problem["head_dim"], problem["residual_block"])
    return 2 * width if problem["residual_block"] else width


# ---- facts for tests, bench and tuner --------------------------------------------------------


def _tuning_key(problem: Problem) -> dict[str, Any]:
    bucket = 1
    while bucket < min(problem["n_tokens"], 16384):
        bucket *= 4
    return {
        "n_heads": problem["num_kv_heads"],
        "head_dim": problem["head_dim"],
        "itemsize": problem["dtype"].itemsize,
        "static": problem["static"],
        "residuals": problem["residual_block"] > 0,
        "tokens_up_to": bucket,
    }


def _space(dev: Device) -> dict[str, list[Any]]:
    space: dict[str, list[Any]] = {"BLOCK_T": [1, 2, 4, 8, 16, 32, 64]}
    if not dev.registers:  # a vector unit: no threads
        return {**space, "programs_per_core": [1]}
    hopper = ["hopper"] if append_rests_hopper.has_body(dev) else []
    return {
        **space,
        "variant": ["portable", *hopper],
        "BLOCK_HEADS": [1, 2, 4, 8],
        "programs_per_core": [0, 4, 6, 8, 12, 16, 24, 32],
        "STAGES": [1, 2, 3],
        "BY_TOKEN": [False, True],
        "PDL": [False, True] if _has_pdl(dev) else [False],
        "num_warps": [1, 2, 4, 8, 16],
    }


def _default_config(problem: Problem, dev: Device) -> Config:
    if append_rests_hopper.why_unfit(problem, dev) is None:
        return append_rests_hopper.default_config(problem, dev)
    return _portable_config(problem, dev)


def _portable_config(problem: Problem, dev: Device) -> Config:
    row = _row(problem)
    if not dev.registers:  # a vector unit: no threads
        return {"BLOCK_T": max(1, min(8, 2048 // row)), "programs_per_core": 1}
    static, residuals = problem["static"], problem["residual_block"] > 0
    # As an H200 liked it. Tiles grow until a core has `programs` of them, in these bounds.
    programs, smallest, largest = 4, 512, 4096  # channels
    most_warps, per_core = 8, 0
    if static:  # a channel's scale is divided by once
        largest, most_warps = 2048, 4
    if residuals:
        programs, smallest, most_warps = 8, 128, 2
        largest, per_core = (2048, 0) if static else (1024, 16)
    channels = 2 * problem["n_tokens"] * problem["num_kv_heads"] * row
    tile = next_power_of_2(max(1, channels // (programs * dev.num_cores)))
    rows = max(1, min(largest, max(smallest, tile)) // row)
    heads = 1
    if not static and not residuals:
        while heads < min(8, rows) and problem["num_kv_heads"] % (2 * heads) == 0:
            heads *= 2
    tokens = min(64, rows // heads)
    tile = tokens * heads * row
    # More warps than that only where a single row would not fit their registers.
    warps = max(min(most_warps, tile // 512), min(16, tile // 1024), 1)
    return {
        "BLOCK_T": tokens,
        "variant": "portable",
        "BLOCK_HEADS": heads,
        "num_warps": warps,
        "programs_per_core": per_core,
        "STAGES": 1,
        "BY_TOKEN": False,
        "PDL": _has_pdl(dev),
    }


def _why_illegal(config: Config, problem: Problem, dev: Device) -> str | None:
    if why := why_no_launch(config, dev, "BLOCK_T"):
        return why
    if config.get("PDL") and not _has_pdl(dev):
        return f"PDL needs sm90 or later, got {dev.arch}"
    heads = config.get("BLOCK_HEADS", 1)
    if heads < 1 or heads & (heads - 1) or problem["num_kv_heads"] % heads:
        return (
            f"BLOCK_HEADS={heads} is no power of two that divides {problem['num_kv_heads']} heads"
        )
    variant = config.get("variant", "portable")
    if variant == "hopper":
        return append_rests_hopper.why_illegal(config, problem, dev)
    if variant != "portable":
        return f"variant must be portable or hopper, got {variant!r}"
    if heads > 1 and (problem["static"] or problem["residual_block"]):
        return f"BLOCK_HEADS={heads} must be 1 with static scales or residuals"
    elements = config["BLOCK_T"] * heads * _row(problem)
    if not dev.registers:  # a vector unit: no threads
        if elements * 40 > dev.local_mem_bytes:  # ten arrays of fp32
            return f"{elements * 40} bytes are in use at once, UB has {dev.local_mem_bytes}"
        return None
    if config.get("BY_TOKEN") and not problem["residual_block"]:
        return "BY_TOKEN is for residuals"
    if config.get("STAGES", 1) > 1 and not config["programs_per_core"]:
        return "STAGES > 1 needs programs of several tiles, that is programs_per_core > 0"
    if config.get("BY_TOKEN") and config["BLOCK_T"] > 32:
        return f"BLOCK_T={config['BLOCK_T']} tokens have no bits in 32"
    staged = elements * problem["dtype"].itemsize * config.get("STAGES", 1)
    if config.get("STAGES", 1) > 1 and staged > dev.local_mem_bytes // 2:
        return f"{staged} bytes on their way leave no room for a second program"
    a_thread = elements // (32 * config["num_warps"])
    return f"{a_thread} channels a thread would not fit its registers" if a_thread > 32 else None


SPEC = register(
    KernelSpec(
        name="append_quantized_kv",
        launch=append_quantized_kv,
        public_module="tkernels.quantized",
        reference=append_quantized_kv_ref,
        problem_fields=(
            "n_tokens",
            "num_kv_heads",
            "head_dim",
            "block_size",
            "dtype",
            "static",
            "residual_block",
        ),
        make_inputs=quantized_inputs,
        cases=CASES,
        tuning_key=_tuning_key,
        space=_space,
        default_config=_default_config,
        why_illegal=_why_illegal,
        cost=quantized_cost,
        mutates=MUTATED,
        compared=quantized_compared,
        scalar_loop_reason="places and pool slots are scattered, one a token",
        shape=quantized_shape,
    )
)
