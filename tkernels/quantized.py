"""The quantised cache as its users call it, with ``QuantizedKV`` where launches take tensors."""

from __future__ import annotations

import torch

from tkernels import check
from tkernels.check import describe
from tkernels.kv_format import MANTISSA_BITS, QuantizedKV, append_quantized_ref, fields
from tkernels.ops.append_quantized_kv import append_quantized_kv as _launch_append
from tkernels.ops.paged_attn_quantized import paged_attn_quantized as _launch_attention
from tkernels.ops.paged_attn_quantized import paged_attn_quantized_ref as _attention_ref
from tkernels.registry import Config


def append_quantized_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: QuantizedKV,
    v_cache: QuantizedKV,
    slot_mapping: torch.Tensor,
    *,
    config: Config | None = None,
) -> None:
    """Quantise each token's key and value into its place of the caches, in place.

    Args:
        k: [n_tokens, num_kv_heads, head_dim], fp32, bf16 or fp16, any token and head strides. A
            vector with a NaN or infinity gets the scale NaN, so that it reads as NaN; static scales
            have no place for that, and its codes there mean nothing.
        v: shape and dtype of ``k``, own strides.
        k_cache: of ``allocate_quantized``, for num_kv_heads and head_dim of ``k``. Written.
        v_cache: another one of the mode, sizes and residual format of ``k_cache``. Written.
        slot_mapping: [n_tokens], int32 or int64: block * block_size + offset. Places below 0 and
            past the cache are skipped; no two tokens may share one, nor may two launches write
            one place at a time: its pool slot is then undefined, and a launch on a GPU may hang.
            TKERNELS_DEBUG refuses places that two tokens share.
        config: launch config; None looks it up.

    Raises:
        TypeError, ValueError: an argument of the wrong kind, shape, dtype, stride or device. A
            tensor of a cache is called by both names: ``v_codes`` is ``v_cache.codes``.
    """
    bits = _mantissa_bits("append_quantized_kv", k_cache, v_cache)
    debug = check.DEBUG and not torch.compiler.is_compiling()
    if debug and isinstance(slot_mapping, torch.Tensor):  # else the launch says so
        _check_places(slot_mapping, k_cache.codes.shape[:2].numel())
    of_k, of_v = fields(k_cache), fields(v_cache)  # nine tensors each
    _launch_append(k, v, *of_k, *of_v, slot_mapping, mantissa_bits=bits, config=config)  # type: ignore


def append_quantized_kv_ref(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: QuantizedKV,
    v_cache: QuantizedKV,
    slot_mapping: torch.Tensor,
    *,
    config: Config | None = None,
) -> None:
    """PyTorch version of ``append_quantized_kv``."""
    _mantissa_bits("append_quantized_kv", k_cache, v_cache)
    append_quantized_ref(k, k_cache, slot_mapping)
    append_quantized_ref(v, v_cache, slot_mapping)


def paged_attn_quantized(
    q: torch.Tensor,
    k_cache: QuantizedKV,
    v_cache: QuantizedKV,
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    *,
    cu_seqlens_q: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    return_lse: bool = False,
    config: Config | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """``paged_attn`` over quantised caches: of keys and values (codes + residual) * scale.

    Decode and chunked prefill, in any mode of ``allocate_quantized``. Nothing is written back; but
    on Hopper calls with chunks put what they read into 16 bits first, in memory that they take for
    as many tokens as ``block_table`` has room for, 512 MiB at most.

    Args:
        q: [n_tokens, num_heads, head_dim], fp32, bf16 or fp16; head_dim even, up to 256.
        k_cache, v_cache: of ``allocate_quantized``, of one mode, size and residual format;
            block_size a power of two from 16 on, num_kv_heads divides num_heads.
        block_table, context_lens, cu_seqlens_q, max_seqlen_q, scale, window, softcap, sinks, out,
            return_lse, config: as of ``paged_attn``.

    Returns:
        As ``paged_attn``.

    Raises:
        TypeError, ValueError: an argument of the wrong kind, shape, dtype, stride or device. A
            tensor of a cache is called by both names: ``v_codes`` is ``v_cache.codes``.
    """
    bits = _mantissa_bits("paged_attn_quantized", k_cache, v_cache)
    of_k, of_v = fields(k_cache)[:5], fields(v_cache)[:5]
    return _launch_attention(
        q, *of_k, *of_v, block_table, context_lens,  # type: ignore[arg-type,misc]
        cu_seqlens_q=cu_seqlens_q, max_seqlen_q=max_seqlen_q, scale=scale, window=window,
        softcap=softcap, sinks=sinks, mantissa_bits=bits, out=out, return_lse=return_lse,
        config=config,
    )  # fmt: skip


def paged_attn_quantized_ref(
    q: torch.Tensor,
    k_cache: QuantizedKV,
    v_cache: QuantizedKV,
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    *,
    cu_seqlens_q: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    return_lse: bool = False,
    config: Config | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """PyTorch version of ``paged_attn_quantized``, in fp32. It reads lengths."""
    bits = _mantissa_bits("paged_attn_quantized", k_cache, v_cache)
    of_k, of_v = fields(k_cache)[:5], fields(v_cache)[:5]
    return _attention_ref(
        q, *of_k, *of_v, block_table, context_lens,  # type: ignore[arg-type,misc]
        cu_seqlens_q=cu_seqlens_q, max_seqlen_q=max_seqlen_q, scale=scale, window=window,
        softcap=softcap, sinks=sinks, mantissa_bits=bits, out=out, return_lse=return_lse,
    )  # fmt: skip


def _check_places(slot_mapping: torch.Tensor, n_places: int) -> None:
    """Wait for the device and raise if two tokens have one place of the cache."""
    used = slot_mapping[(slot_mapping >= 0) & (slot_mapping < n_places)].sort().values
    shared = used[1:][used[1:] == used[:-1]]
    if shared.numel():
        raise ValueError(
            "append_quantized_kv: slot_mapping must hold a place of its own for each token, got "
            f"{int(shared[0])} more than once"
        )


def _mantissa_bits(name: str, k_cache: QuantizedKV, v_cache: QuantizedKV) -> int:
    """Of the residuals of both."""
    for argument, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        if not isinstance(cache, QuantizedKV):
            raise TypeError(f"{name}: {argument} must be a QuantizedKV, got {describe(cache)}")
        if not isinstance(cache.codes, torch.Tensor):
            raise TypeError(
                f"{name}: {argument}.codes must be a tensor, got {describe(cache.codes)}"
            )
    wanted, given = k_cache.residual_format, v_cache.residual_format
    if not isinstance(wanted, str) or wanted not in MANTISSA_BITS:
        raise ValueError(
            f"{name}: k_cache must have a residual_format of {', '.join(MANTISSA_BITS)}, "
            f"got {wanted!r}"
        )
    if given != wanted:
        raise ValueError(
            f"{name}: v_cache must have residual_format {wanted!r} as k_cache has, got {given!r}"
        )
    if v_cache.codes is k_cache.codes:
        raise ValueError(f"{name}: v_cache must be another cache than k_cache, got one for both")
    return MANTISSA_BITS[wanted]
