"""The network, top to bottom: Qwen3, dense or with experts, and the Llama family (no q/k norm).

One step takes T tokens of B sequences packed one after another: a prefill brings many tokens of a
sequence, a decode step one. Shapes: H hidden_size, I intermediate_size (of one expert where there
are E of them), Hq/Hk query and key-value heads, D head_dim, V vocab_size. Every operation that has
a kernel comes from the namespace ``ops`` (``tkernels`` or ``tkernels.reference``), so the two can
be compared on the same network.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  (its usual name)

import tkernels
from model.block_matrix import Matrix
from model.config import ModelConfig
from model.kv_cache import AttnMetadata, KVCache, SdpaIndices
from model.quantized_matrix import Int4Experts, Int8Experts, Weight, multiplies_codes, product
from tkernels import skinny_linear_rows
from tkernels.kv_format import QuantizedKV, read_positions

Tensor = torch.Tensor
# Steps of up to so many tokens take norms, activations and sums along in their projections, in
# kernels that read weights once. With four rows of a gated layer separate kernels and cuBLAS took
# less (CONTRIBUTING, measured facts).
FEW_ROWS = 1
# Steps of up to so many tokens norm and rotate q and k and write to the cache in one launch, where
# attention reads the pages.
APPENDED_ROWS = 2048
# Of these, decode steps of up to so many sequences attend in that launch, too, which hides latency
# and not bandwidth (CONTRIBUTING, measured facts).
FUSED_DECODE_ROWS = 1
# Norms and activations before layers in W8A8 make the codes that these multiply: a launch less for
# each, and 16-bit rows are neither read again nor, where no row may run high, written.
FUSED_QUANTIZATION = True
# (layer, q [T, Hq, D], k and v [T, Hk, D], rotated) -> [T, Hq, D]
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


@dataclass
class Linear:
    """A projection: ``weight`` [out, in], ``bias`` [out] or None."""

    weight: Weight
    bias: Tensor | None = None

    def __call__(self, x: Tensor, ops: Any) -> Tensor:
        if self._has_kernel(x, ops) or self._has_body(x, ops):
            y: Tensor = ops.skinny_linear(x, self.weight, bias=self.bias)
            return y
        return product(x, self.weight, ops, self.bias)

    def onto(self, residual: Tensor, x: Tensor, ops: Any) -> tuple[Tensor | None, Tensor]:
        """(what is to be added to ``residual`` yet, residual): None where that has been done."""
        if self._has_kernel(x, ops):
            return None, ops.skinny_linear(x, self.weight, bias=self.bias, residual=residual)
        return self(x, ops), residual

    def behind_norm(
        self,
        x: Tensor | None,
        residual: Tensor,
        norm_weight: Tensor,
        ops: Any,
        *,
        eps: float,
        gated: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """(projection of the normed sum of x, None for nothing, and residual, that sum).

        ``gated``: ``silu_and_mul`` of the projection.
        """
        if x is None and self._has_kernel(residual, ops):
            y: Tensor = ops.skinny_linear(
                residual,
                self.weight,
                bias=self.bias,
                norm_weight=norm_weight,
                eps=eps,
                silu_and_mul=gated,
            )
            return y, residual
        if x is not None and (normed := self.quantizing(ops, "fused_add_rms_norm")):
            codes, scale, residual, kept = normed(x, residual, norm_weight, eps=eps)
            rows = kept if len(kept) else x  # x: of that shape, and not read
            y = product(rows, self.weight, ops, self.bias, (codes, scale))
        else:
            x, residual = normed_sum(x, residual, norm_weight, ops, eps=eps)
            y = self(x, ops)
        return (ops.silu_and_mul(y) if gated else y), residual

    def quantizing(self, ops: Any, name: str) -> Callable[..., Any] | None:
        """What makes the rows of the operation ``name``, and codes of them for this projection.

        None where it does not multiply codes in all its parts, or where that operation is not the
        kernel but its reference, or somebody's who looks at its rows. Of the results the last one,
        the rows, has none where no row may run high.
        """
        # With a fallback ``ops`` looks at rows, and has quantising operations that keep them.
        taken = getattr(getattr(ops, "below", ops), name)
        if not FUSED_QUANTIZATION or taken is not getattr(tkernels, name):
            return None
        if not all(multiplies_codes(self.weight)):
            return None
        found: Callable[..., Any] = getattr(ops, f"{name}_quantized")
        return found

    def _has_kernel(self, x: Tensor, ops: Any) -> bool:
        """Few rows of plain weights, where ``ops`` are the kernels and not their references."""
        return len(x) <= FEW_ROWS and self._plain(ops) is not None

    def _has_body(self, x: Tensor, ops: Any) -> bool:
        """More rows, of which products alone are faster than PyTorch's."""
        weight = self._plain(ops)
        return weight is not None and skinny_linear_rows.takes(x, weight)

    def _plain(self, ops: Any) -> Tensor | None:
        """The weight, where ``skinny_linear`` itself is there to take it."""
        if not isinstance(self.weight, Tensor):
            return None
        kernels = getattr(ops, "skinny_linear", None) is tkernels.skinny_linear
        # On a CPU some are stored input-major.
        return self.weight if kernels and self.weight.stride(1) == 1 else None


def normed_sum(
    x: Tensor | None, residual: Tensor, weight: Tensor, ops: Any, *, eps: float
) -> tuple[Tensor, Tensor]:
    """(RMSNorm of the sum of x, None for nothing, and residual, that sum)."""
    if x is None:
        return ops.rms_norm(residual, weight, eps=eps), residual
    normed, total = ops.fused_add_rms_norm(x, residual, weight, eps=eps)
    return normed, total


@dataclass
class Experts:
    """The MLPs of a sparse layer: ``router`` picks ``top_k`` of E for each token.

    Where both projections are quantised, both are W8A8, or both W8A16, or both W4A16.
    """

    router: Tensor  # [E, H]
    # [E, 2 I, H]: gate_proj | up_proj of each expert
    gate_up_proj: Tensor | Int8Experts | Int4Experts
    down_proj: Tensor | Int8Experts | Int4Experts  # [E, H, I]
    top_k: int
    renormalize: bool  # the weights of a token's experts add up to 1

    def __call__(self, x: Tensor, ops: Any) -> Tensor:
        """[T, H] -> [T, H]."""
        more: dict[str, Any] = {}
        weights = []
        for name in ("gate_up", "down"):
            weight = getattr(self, f"{name}_proj")
            if isinstance(weight, Int8Experts):
                more |= {f"{name}_scale": weight.scale, "high": not weight.quantized_activations}
                weight = weight.codes
            elif isinstance(weight, Int4Experts):
                more[f"{name}_scale"] = weight.scale
                if weight.zero is not None:
                    more[f"{name}_zero"] = weight.zero
                weight = weight.packed
            weights.append(weight)
        y: Tensor = ops.fused_moe(
            x,
            F.linear(x, self.router),
            *weights,
            top_k=self.top_k,
            renormalize=self.renormalize,
            **more,
        )
        return y

    @property
    def bytes_per_token(self) -> int:
        """Of the router, and of as many experts as one token goes through."""
        stacked = self.gate_up_proj.nbytes + self.down_proj.nbytes
        return self.router.nbytes + self.top_k * stacked // len(self.router)


@dataclass
class Layer:
    """Parameters of one decoder layer, under their Hugging Face names (packed ones joined).

    Either the two projections of a dense MLP are there, or ``experts``.
    """

    input_layernorm: Tensor  # [H]
    qkv_proj: Linear  # [(Hq + 2 Hk) D, H]: q_proj | k_proj | v_proj
    q_norm: Tensor | None  # [D]
    k_norm: Tensor | None  # [D]
    o_proj: Linear  # [H, Hq D]
    post_attention_layernorm: Tensor  # [H]
    gate_up_proj: Linear | None = None  # [2 I, H]: gate_proj | up_proj
    down_proj: Linear | None = None  # [H, I]
    experts: Experts | None = None

    def mlp_behind_norm(
        self, x: Tensor | None, residual: Tensor, ops: Any, *, eps: float
    ) -> tuple[Tensor | None, Tensor]:
        """MLP or experts of the normed sum of x, None for nothing, and residual: see ``onto``."""
        norm = self.post_attention_layernorm
        if self.experts is not None:
            x, residual = normed_sum(x, residual, norm, ops, eps=eps)
            return self.experts(x, ops), residual
        assert self.gate_up_proj is not None
        assert self.down_proj is not None
        activated = self.down_proj.quantizing(ops, "silu_and_mul")
        h, residual = self.gate_up_proj.behind_norm(
            x, residual, norm, ops, eps=eps, gated=activated is None
        )
        if activated is None:
            return self.down_proj.onto(residual, h, ops)
        codes, scale, kept = activated(h)
        rows = kept if len(kept) else h[:, : codes.shape[1]]  # of that shape, and not read
        down = self.down_proj
        return product(rows, down.weight, ops, down.bias, (codes, scale)), residual


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
        """Bytes of parameters that a decode step of one sequence reads.

        All but an embedding table of its own, and of the experts of a layer as many as a token goes
        through. A step of several sequences reads more of them: how many, their tokens decide.
        """
        total = self.norm.nbytes + self.lm_head.weight.nbytes
        for layer in self.layers:
            for value in vars(layer).values():
                if isinstance(value, Experts):
                    total += value.bytes_per_token
                    continue
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
        [num_logits, V], or [T, V], in the network's dtype.
    """
    attend = OverCache(ops, cache, meta)
    x = hidden_states(model, ops, input_ids, positions, cos_sin_cache, attend)
    return logits_of(model, ops, x, meta.cu_seqlens_q, num_logits=num_logits)


def logits_of(
    model: Model, ops: Any, x: Tensor, cu_seqlens_q: Tensor, *, num_logits: int | None
) -> Tensor:
    """The logits that ``forward`` returns, of ``hidden_states`` [T, H]."""
    if num_logits == 0:
        return torch.empty((0, model.config.vocab_size), dtype=x.dtype, device=x.device)
    if num_logits is not None:
        x = x[cu_seqlens_q[1 : num_logits + 1] - 1]  # [num_logits, H]
    return model.lm_head(x, ops)


def hidden_states(
    model: Model,
    ops: Any,
    input_ids: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    attend: Attend,
) -> Tensor:
    """What ``lm_head`` is applied to: [T, H] of T packed tokens."""
    eps = model.config.rms_norm_eps
    residual = _embed(model.embed_tokens, input_ids)  # [T, H]
    x = None  # what the layer before has not added to residual yet
    for i, layer in enumerate(model.layers):
        qkv, residual = layer.qkv_proj.behind_norm(x, residual, layer.input_layernorm, ops, eps=eps)
        attended = _attention(model.config, layer, ops, qkv, positions, cos_sin_cache, i, attend)
        x, residual = layer.o_proj.onto(residual, attended, ops)
        x, residual = layer.mlp_behind_norm(x, residual, ops, eps=eps)
    return normed_sum(x, residual, model.norm, ops, eps=eps)[0]


def _embed(table: Matrix, ids: Tensor) -> Tensor:
    return F.embedding(ids, table) if isinstance(table, Tensor) else table.rows(ids)


def _attention(
    config: ModelConfig,
    layer: Layer,
    ops: Any,
    qkv: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    index: int,
    attend: Attend,
) -> Tensor:
    """[T, (Hq + 2 Hk) D] -> [T, Hq D]."""
    heads = qkv.view(qkv.shape[0], -1, config.head_dim)  # [T, Hq + 2 Hk, D]
    v = heads[:, -config.num_kv_heads :]
    q_out = attend.q_out if isinstance(attend, OverCache) else None
    if layer.q_norm is not None:
        given = (qkv, layer.q_norm, layer.k_norm, cos_sin_cache, positions)
        sizes = {"num_heads": config.num_heads, "num_kv_heads": config.num_kv_heads}
        if isinstance(attend, OverCache) and attend.appends_in_passing(index, len(qkv)):
            meta, more = attend.meta, {**sizes, "eps": config.rms_norm_eps}
            pages = attend.cache.k[index], attend.cache.v[index], meta.slot_mapping
            if attend.in_one_launch(len(qkv)) and cos_sin_cache.shape[1] == config.head_dim:
                tables = meta.block_table, meta.context_lens
                out: Tensor = ops.fused_qk_norm_rope_append_attn(*given, *pages, *tables, **more)
                return out.flatten(1)
            q = ops.fused_qk_norm_rope_append(*given, *pages, **more, q_out=q_out)
            return attend.read(index, q).flatten(1)
        q, k = ops.fused_qk_norm_rope(*given, **sizes, eps=config.rms_norm_eps, q_out=q_out)
    else:
        q, k = heads[:, : config.num_heads], heads[:, config.num_heads : -config.num_kv_heads]
        q_out = q if q_out is None else q_out
        q, k = ops.rope(q, k, cos_sin_cache, positions, q_out=q_out, k_out=k)
    return attend(index, q, k, v).flatten(1)


@dataclass
class OverCache:
    """Attention of a step that puts its new K/V into a cache, and reads what that holds."""

    ops: Any
    cache: KVCache
    meta: AttnMetadata
    q_out: Tensor | None = None  # [T, Hq, D], where each layer's rotated q go; None: anywhere

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Of one layer: [T, Hq, D]."""
        ops, meta, k_cache, v_cache = self.ops, self.meta, self.cache.k[layer], self.cache.v[layer]
        if isinstance(k_cache, QuantizedKV) and isinstance(v_cache, QuantizedKV):
            ops.append_quantized_kv(k, v, k_cache, v_cache, meta.slot_mapping)
        else:
            ops.append_paged_kv(k, v, k_cache, v_cache, meta.slot_mapping)
        if meta.sdpa is not None or not meta.starts_here or isinstance(k_cache, QuantizedKV):
            return self.read(layer, q)
        # All keys are at hand, in one piece.
        lens, longest = meta.cu_seqlens_q, meta.max_seqlen_q
        sizes = {"max_seqlen_q": longest, "max_seqlen_k": longest}
        out: Tensor = ops.flash_attn(q, k, v, cu_seqlens_q=lens, cu_seqlens_k=lens, **sizes)
        return out

    def read(self, layer: int, q: Tensor, out: Tensor | None = None) -> Tensor:
        """[T, Hq, D], where the new K/V are in the cache; ``out`` is for kernels alone."""
        meta, pages = self.meta, (self.cache.k[layer], self.cache.v[layer])
        if meta.sdpa is not None:
            return sdpa_attention(q, *pages, meta.sdpa)
        plain = isinstance(pages[0], Tensor)
        attend = self.ops.paged_attn if plain else self.ops.paged_attn_quantized
        table, lens, longest = meta.block_table, meta.context_lens, meta.max_seqlen_q
        if meta.apart is None:
            starts = None if longest == 1 else meta.cu_seqlens_q
            attended: Tensor = attend(
                q, *pages, table, lens, cu_seqlens_q=starts, max_seqlen_q=longest, out=out
            )
            return attended
        out = torch.empty_like(q) if out is None else out
        ones, width = meta.apart.ones, meta.apart.num_blocks
        attend(q[:ones], *pages, table[:ones, :width], lens[:ones], max_seqlen_q=1, out=out[:ones])
        attend(
            q[ones:],
            *pages,
            table[ones:],
            lens[ones:],
            cu_seqlens_q=meta.apart.cu_seqlens_q,
            max_seqlen_q=longest,
            out=out[ones:],
        )
        return out

    def appends_in_passing(self, layer: int, num_tokens: int) -> bool:
        """Whether K/V of a layer may go to its pages as they are made, as nothing else needs them.

        Operations that watch K and V have None for the one that does it.
        """
        if num_tokens > APPENDED_ROWS or self.meta.sdpa is not None or self.meta.starts_here:
            return False
        fused = getattr(self.ops, "fused_qk_norm_rope_append", None)
        return fused is not None and isinstance(self.cache.k[layer], Tensor)

    def in_one_launch(self, num_tokens: int) -> bool:
        """Whether sequences whose K/V are appended in passing bring a token each, and few do."""
        if num_tokens > FUSED_DECODE_ROWS or self.meta.max_seqlen_q != 1:
            return False
        return getattr(self.ops, "fused_qk_norm_rope_append_attn", None) is not None


def _read(cache: Tensor | QuantizedKV, slots: Tensor | slice, dtype: torch.dtype) -> Tensor:
    if isinstance(cache, Tensor):
        return cache.flatten(0, 1)[slots]
    return read_positions(cache, slots).to(dtype)


def sdpa_attention(
    q: Tensor,
    k_cache: Tensor | QuantizedKV,
    v_cache: Tensor | QuantizedKV,
    groups: tuple[SdpaIndices, ...],
) -> Tensor:
    """Causal attention of new tokens over the paged cache, in plain PyTorch.

    Gathers the keys and values of each sequence once. Sequences may bring different numbers of new
    tokens and have contexts of different lengths; nothing beyond a sequence's own tokens is read.

    Args:
        q: [T, Hq, D]. k_cache, v_cache: [num_blocks, block_size, Hk, D], new tokens included; or
            quantised, and then what was stored is read, of new tokens too.
        groups: of sequences that are padded to one length; together all T tokens, in order.

    Returns:
        [T, Hq, D].
    """
    parts = [_sdpa_of_group(q[group.tokens], k_cache, v_cache, group) for group in groups]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _sdpa_of_group(
    q: Tensor,
    k_cache: Tensor | QuantizedKV,
    v_cache: Tensor | QuantizedKV,
    indices: SdpaIndices,
) -> Tensor:
    k, v = (_read(x, indices.kv_slots, q.dtype) for x in (k_cache, v_cache))  # [B, S, Hk, D]
    num_kv_heads = k.shape[-2]
    if isinstance(indices.kv_slots, slice):  # of one sequence: [S, Hk, D]
        k, v = k[None], v[None]
    k, v = k.transpose(1, 2), v.transpose(1, 2)  # [B, Hk, S, D]
    if indices.max_seqlen_q == 1:
        # Decode: the query heads that share a key-value head stand where query positions would.
        q = q.view(q.shape[0], num_kv_heads, -1, q.shape[2])  # [B, Hk, Hq / Hk, D]
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=indices.mask)
        return out.flatten(1, 2)
    padded = q[indices.q_rows].transpose(1, 2)  # [B, Hq, L, D]
    out = F.scaled_dot_product_attention(
        padded, k, v, attn_mask=indices.mask, is_causal=indices.mask is None, enable_gqa=True
    )
    return out.transpose(1, 2).flatten(0, 1)[indices.q_unpad]  # [B, L, Hq, D] -> [T, Hq, D]
