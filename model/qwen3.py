"""The network, top to bottom: Qwen3 dense, and the Llama family (no q/k norm, optional bias).

One step takes T tokens of B sequences packed one after another: a prefill brings many tokens of a
sequence, a decode step one. Shapes: H hidden_size, I intermediate_size, Hq/Hk query and key-value
heads, D head_dim, V vocab_size. Every operation that has a kernel comes from the namespace ``ops``
(``tkernels`` or ``tkernels.reference``), so the two can be compared on the same network.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  (its usual name)

from model.block_matrix import Matrix
from model.config import ModelConfig
from model.kv_cache import AttnMetadata, KVCache, SdpaIndices
from model.quantized_matrix import Weight, product
from tkernels.kv_format import QuantizedKV, read_positions

Tensor = torch.Tensor


@dataclass
class Linear:
    """A projection: ``weight`` [out, in], ``bias`` [out] or None."""

    weight: Weight
    bias: Tensor | None = None

    def __call__(self, x: Tensor, ops: Any) -> Tensor:
        return product(x, self.weight, ops, self.bias)


@dataclass
class Layer:
    """Parameters of one decoder layer, under their Hugging Face names (packed ones joined)."""

    input_layernorm: Tensor  # [H]
    qkv_proj: Linear  # [(Hq + 2 Hk) D, H]: q_proj | k_proj | v_proj
    q_norm: Tensor | None  # [D]
    k_norm: Tensor | None  # [D]
    o_proj: Linear  # [H, Hq D]
    post_attention_layernorm: Tensor  # [H]
    gate_up_proj: Linear  # [2 I, H]: gate_proj | up_proj
    down_proj: Linear  # [H, I]


@dataclass
class Model:
    """All parameters of a network and its config."""

    config: ModelConfig
    embed_tokens: Matrix  # [V, H]
    layers: list[Layer]
    norm: Tensor  # [H]
    lm_head: Linear  # [V, H]; the same tensor as embed_tokens where the config ties them

    @property
    def bytes_per_step(self) -> int:
        """Bytes of parameters that a decode step reads: all but an embedding table of its own."""
        total = self.norm.nbytes + self.lm_head.weight.nbytes
        for layer in self.layers:
            for value in vars(layer).values():
                parts = (value.weight, value.bias) if isinstance(value, Linear) else (value,)
                total += sum(part.nbytes for part in parts if part is not None)
        return total


def forward(
    model: Model,
    ops: Any,
    input_ids: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    cache: KVCache,
    meta: AttnMetadata,
    *,
    num_logits: int | None,
) -> Tensor:
    """One step: write the new K/V into the cache and return logits.

    Args:
        input_ids, positions: int64 [T], the new tokens of all sequences, packed.
        cos_sin_cache: fp32 [max_pos, rotary_dim].
        meta: which tokens belong to which sequence and where their K/V go.
        num_logits: of how many sequences, the first ones, the last token's logits are wanted; None
            is all T tokens.

    Returns:
        fp32 [num_logits, V], or [T, V].
    """
    eps = model.config.rms_norm_eps
    residual = _embed(model.embed_tokens, input_ids)  # [T, H]
    x = ops.rms_norm(residual, model.layers[0].input_layernorm, eps=eps)
    for i, layer in enumerate(model.layers):
        x = _attention(model.config, layer, ops, x, positions, cos_sin_cache, cache, i, meta)
        x, residual = ops.fused_add_rms_norm(x, residual, layer.post_attention_layernorm, eps=eps)
        x = layer.down_proj(ops.silu_and_mul(layer.gate_up_proj(x, ops)), ops)  # [T, I] -> [T, H]
        after = model.layers[i + 1].input_layernorm if i + 1 < len(model.layers) else model.norm
        x, residual = ops.fused_add_rms_norm(x, residual, after, eps=eps)
    if num_logits == 0:
        return torch.empty((0, model.config.vocab_size), device=x.device)
    if num_logits is not None:
        x = x[meta.cu_seqlens_q[1 : num_logits + 1] - 1]  # [num_logits, H]
    return model.lm_head(x, ops).float()


def _embed(table: Matrix, ids: Tensor) -> Tensor:
    return F.embedding(ids, table) if isinstance(table, Tensor) else table.rows(ids)


def _attention(
    config: ModelConfig,
    layer: Layer,
    ops: Any,
    x: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    cache: KVCache,
    index: int,
    meta: AttnMetadata,
) -> Tensor:
    """[T, H] -> [T, H]."""
    qkv = layer.qkv_proj(x, ops)  # [T, (Hq + 2 Hk) D]
    heads = qkv.view(qkv.shape[0], -1, config.head_dim)  # [T, Hq + 2 Hk, D]
    v = heads[:, -config.num_kv_heads :]
    if layer.q_norm is not None:
        q, k = ops.fused_qk_norm_rope(
            qkv,
            layer.q_norm,
            layer.k_norm,
            cos_sin_cache,
            positions,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            eps=config.rms_norm_eps,
        )
    else:
        q, k = heads[:, : config.num_heads], heads[:, config.num_heads : -config.num_kv_heads]
        q, k = ops.rope(q, k, cos_sin_cache, positions, q_out=q, k_out=k)
    k_cache, v_cache = cache.k[index], cache.v[index]
    if isinstance(k_cache, QuantizedKV) and isinstance(v_cache, QuantizedKV):
        ops.append_quantized_kv(k, v, k_cache, v_cache, meta.slot_mapping)
    else:
        ops.append_paged_kv(k, v, k_cache, v_cache, meta.slot_mapping)
    if meta.sdpa is not None:
        out = sdpa_attention(q, k_cache, v_cache, meta.sdpa, meta.max_seqlen_q)
    elif meta.starts_here and isinstance(k_cache, Tensor):  # all keys are at hand, in one piece
        lens, longest = meta.cu_seqlens_q, meta.max_seqlen_q
        sizes = {"max_seqlen_q": longest, "max_seqlen_k": longest}
        out = ops.flash_attn(q, k, v, cu_seqlens_q=lens, cu_seqlens_k=lens, **sizes)
    else:
        attend = ops.paged_attn if isinstance(k_cache, Tensor) else ops.paged_attn_quantized
        out = attend(
            q,
            k_cache,
            v_cache,
            meta.block_table,
            meta.context_lens,
            cu_seqlens_q=None if meta.max_seqlen_q == 1 else meta.cu_seqlens_q,
            max_seqlen_q=meta.max_seqlen_q,
        )
    return layer.o_proj(out.flatten(1), ops)


def _read(cache: Tensor | QuantizedKV, slots: Tensor | slice, dtype: torch.dtype) -> Tensor:
    if isinstance(cache, Tensor):
        return cache.flatten(0, 1)[slots]
    return read_positions(cache, slots).to(dtype)


def sdpa_attention(
    q: Tensor,
    k_cache: Tensor | QuantizedKV,
    v_cache: Tensor | QuantizedKV,
    indices: SdpaIndices,
    max_seqlen_q: int,
) -> Tensor:
    """Causal attention of new tokens over the paged cache, in plain PyTorch.

    Gathers the keys and values of each sequence once. Sequences may bring different numbers of new
    tokens and have contexts of different lengths; nothing beyond a sequence's own tokens is read.

    Args:
        q: [T, Hq, D]. k_cache, v_cache: [num_blocks, block_size, Hk, D], new tokens included; or
            quantised, and then what was stored is read, of new tokens too.

    Returns:
        [T, Hq, D].
    """
    k, v = (_read(x, indices.kv_slots, q.dtype) for x in (k_cache, v_cache))  # [B, S, Hk, D]
    num_kv_heads = k.shape[-2]
    if isinstance(indices.kv_slots, slice):  # of one sequence: [S, Hk, D]
        k, v = k[None], v[None]
    k, v = k.transpose(1, 2), v.transpose(1, 2)  # [B, Hk, S, D]
    if max_seqlen_q == 1:
        # Decode: the query heads that share a key-value head stand where query positions would.
        q = q.view(q.shape[0], num_kv_heads, -1, q.shape[2])  # [B, Hk, Hq / Hk, D]
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=indices.mask)
        return out.flatten(1, 2)
    padded = q[indices.q_rows].transpose(1, 2)  # [B, Hq, L, D]
    out = F.scaled_dot_product_attention(
        padded, k, v, attn_mask=indices.mask, is_causal=indices.mask is None, enable_gqa=True
    )
    return out.transpose(1, 2).flatten(0, 1)[indices.q_unpad]  # [B, L, Hq, D] -> [T, Hq, D]
