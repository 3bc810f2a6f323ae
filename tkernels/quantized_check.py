"""What the launch of ``append_quantized_kv`` refuses, which takes the tensors of two caches."""

from __future__ import annotations

from typing import Any

import torch

from tkernels.check import (
    FLOAT_DTYPES,
    INDEX_DTYPES,
    check_contiguous,
    check_dtype,
    check_last_contiguous,
    check_shape,
    check_tensor,
    describe,
    one_for_both,
)
from tkernels.kv_format import FIELDS, FORMATS, MOST_SLOTS, POOL
from tkernels.quantized_cases import MUTATED


def check_caches(*given: Any) -> tuple[bool, int]:
    """Refuse what the kernel cannot take, given the launch's arguments in order.

    Returns:
        (static scales, channels of a residual block or 0)
    """
    name = "append_quantized_kv"
    k, v, *tensors, slot_mapping, mantissa_bits = given
    names = [f"{which}_{field}" for which in "kv" for field in FIELDS]
    cache = dict(zip(names, tensors, strict=True))
    for argument, t in {"k": k, "v": v, **cache, "slot_mapping": slot_mapping}.items():
        check_tensor(name, argument, t)
    written: dict[int, str] = {}
    for argument in MUTATED:
        other = written.setdefault(id(cache[argument]), argument)
        # Caches without residuals share empty tensors, and static scales are only read.
        t, static = cache[argument], argument == "v_scale" and cache[argument].dim() == 2
        if other != argument and t.numel() and not static:
            raise one_for_both(name, argument, other)
    if k.dim() != 3 or 0 in k.shape[1:]:
        raise ValueError(
            f"{name}: k must have shape [n_tokens, num_kv_heads >= 1, head_dim >= 1], "
            f"got {describe(k)}"
        )
    check_dtype(name, "k", k, FLOAT_DTYPES)
    if v.shape != k.shape or v.dtype != k.dtype:
        raise ValueError(f"{name}: v must be {describe(k)} as k is, got {describe(v)}")
    n_tokens, n_heads, head_dim = k.shape
    for field, dtype in FIELDS.items():
        check_dtype(name, f"k_{field}", cache[f"k_{field}"], (dtype,))
    static, residual_block = _check_cache(name, cache, n_heads, head_dim)
    for field in FIELDS:
        of_k, of_v = cache[f"k_{field}"], cache[f"v_{field}"]
        if of_v.shape != of_k.shape or of_v.dtype != of_k.dtype:
            raise ValueError(
                f"{name}: v_{field} must be {describe(of_k)} as k_{field} is, got {describe(of_v)}"
            )
    for argument in ("k", "v"):
        check_last_contiguous(name, argument, {"k": k, "v": v}[argument])
    for argument, t in cache.items():
        check_contiguous(name, argument, t)
    if type(mantissa_bits) is not int or mantissa_bits not in FORMATS:
        raise ValueError(f"{name}: mantissa_bits must be 0, 1 or 2, got {mantissa_bits!r}")
    check_shape(name, "slot_mapping", slot_mapping, n_tokens=n_tokens)
    check_dtype(name, "slot_mapping", slot_mapping, INDEX_DTYPES)
    check_last_contiguous(name, "slot_mapping", slot_mapping)
    return static, residual_block


def _check_cache(
    name: str, cache: dict[str, torch.Tensor], n_heads: int, head_dim: int
) -> tuple[bool, int]:
    """The shapes of K's cache; (static scales, channels of a residual block or 0)."""
    codes, scale, slots = cache["k_codes"], cache["k_scale"], cache["k_slots"]
    check_shape(
        name, "k_codes", codes,
        num_blocks=None, block_size=None, num_kv_heads=n_heads, head_dim=head_dim,
    )  # fmt: skip
    a_place = {"num_blocks": codes.shape[0], "num_kv_heads": n_heads, "block_size": codes.shape[1]}
    static = scale.dim() == 2
    of_scale = {"num_kv_heads": n_heads, "head_dim": head_dim} if static else a_place
    check_shape(name, "k_scale", scale, **of_scale)
    if slots.numel() or slots.dim() == 3:
        return static, _check_pool(name, cache, a_place, head_dim)
    held = [field for field in POOL if cache[f"k_{field}"].numel()]
    if held:
        raise ValueError(
            f"{name}: k_slots must have shape [num_blocks, num_kv_heads, block_size] where "
            f"k_{held[0]} is given, got {describe(slots)}"
        )
    return static, 0


def _check_pool(
    name: str, cache: dict[str, torch.Tensor], a_place: dict[str, int], head_dim: int
) -> int:
    """The channels of a residual block."""
    residual, residual_scale = cache["k_residual"], cache["k_residual_scale"]
    n_heads = a_place["num_kv_heads"]
    check_shape(name, "k_slots", cache["k_slots"], **a_place)
    if head_dim % 32:
        raise ValueError(
            f"{name}: k must have a head_dim that divides by 32 for residuals, got {head_dim}"
        )
    check_shape(
        name, "k_residual", residual,
        num_kv_heads=n_heads, num_slots=None, half_head_dim=head_dim // 2,
    )  # fmt: skip
    num_slots = residual.shape[1]
    if not 1 <= num_slots <= MOST_SLOTS:
        raise ValueError(
            f"{name}: k_residual must have from 1 to {MOST_SLOTS} slots, got {num_slots}"
        )
    sizes = [b for b in (16, 32) if head_dim % (2 * b) == 0]
    shapes = [[n_heads, num_slots, head_dim // b] for b in sizes]
    if list(residual_scale.shape) not in shapes:
        raise ValueError(
            f"{name}: k_residual_scale must have shape {' or '.join(map(str, shapes))}, "
            f"got {describe(residual_scale)}"
        )
    free_slots = cache["k_free_slots"]
    check_shape(name, "k_free_slots", free_slots, num_kv_heads=n_heads, num_slots=num_slots)
    for field in ("free_count", "dropped", "tau"):
        check_shape(name, f"k_{field}", cache[f"k_{field}"], num_kv_heads=n_heads)
    return head_dim // residual_scale.shape[-1]
