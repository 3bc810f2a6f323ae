"""Weights of 4 bits: how ``w4a16_gemm`` stores them, and how other formats become that.

    value[n, k] = (q[n, k] - zero[n, k // group]) * scale[n, k // group]       q in 0 .. 15

weight: int32 [N, K/8], q of column 8c + j in bits 4j to 4j + 3 of word c of its row. That is how
``compressed-tensors`` packs linear weights of 4 bits (format "pack-quantized",
``compressors/pack_quantized/helpers.py``, ``pack_to_int32``), which stores signed q + 8: a
symmetric weight has zero 8. zero: int8 [N, K/group], 0 to 15; scale: [N, K/group].

What is here is done once, when weights are loaded, and reads values. It goes through bytes, the
lowest of a word first, as all machines that PyTorch runs on have them.
"""

from __future__ import annotations

import torch

from tkernels.check import describe

# Which column (of 8 neighbours) is in bits 4i to 4i + 3 of a word of AWQ's: AutoAWQ,
# awq/utils/packing_utils.py, AWQ_ORDER, and awq/modules/linear/gemm.py, order_map.
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_NATURAL = tuple(range(8))


def pack_nibbles(values: torch.Tensor) -> torch.Tensor:
    """int32 [R, C/8] of integers 0 to 15 [R, C], eight neighbours a word, the first lowest."""
    if values.dim() != 2 or values.shape[1] % 8:
        raise ValueError(
            f"pack_nibbles: values must have shape [R, C], C a multiple of 8, got "
            f"{describe(values)}"
        )
    pairs = values.to(torch.uint8).contiguous().view(len(values), values.shape[1] // 2, 2) & 15
    return (pairs[..., 0] | (pairs[..., 1] << 4)).view(torch.int32)


def unpack_nibbles(words: torch.Tensor, order: tuple[int, ...] = _NATURAL) -> torch.Tensor:
    """int8 [R, 8C], 0 to 15, of int32 [R, C]; bits 4i to 4i + 3 hold neighbour ``order[i]``."""
    if words.dim() != 2 or words.dtype != torch.int32:
        raise ValueError(f"unpack_nibbles: words must be int32 [R, C], got {describe(words)}")
    pairs = words.reshape(-1).view(torch.uint8)
    found = torch.stack((pairs & 15, pairs >> 4), dim=1).view(torch.int8).view(*words.shape, 8)
    if order != _NATURAL:
        found = found[..., [order.index(j) for j in range(8)]]
    return found.flatten(1)


def unpack_zero_points(packed: torch.Tensor, n: int) -> torch.Tensor:
    """int8 [n, K/group] of compressed-tensors' ``weight_zero_point``, int32 [ceil(n/8), K/group].

    They are packed along the outputs (``packed_dim=0``), the first output lowest.
    """
    if packed.dim() != 2 or packed.dtype != torch.int32 or len(packed) != -(-n // 8):
        raise ValueError(
            f"unpack_zero_points: packed must be int32 [{-(-n // 8)}, K/group] for {n} outputs, "
            f"got {describe(packed)}"
        )
    return unpack_nibbles(packed.t())[:, :n].t().contiguous()


def group_of(k: int, scale: torch.Tensor) -> int:
    """Columns with one scale, by the last dimension: a power of two from 32 on, or K; else 0."""
    groups = scale.shape[-1] if scale.dim() else 0
    group = k // groups if groups and k % groups == 0 else 0
    return group if groups == 1 or (group >= 32 and group & (group - 1) == 0) else 0


def dequantize_w4(
    weight: torch.Tensor, weight_scale: torch.Tensor, weight_zero: torch.Tensor | None = None
) -> torch.Tensor:
    """fp32 [N, K]: what the weights stand for."""
    n_rows, n_groups = weight_scale.shape
    steps = unpack_nibbles(weight).float().reshape(n_rows, n_groups, -1)
    zero = 8.0 if weight_zero is None else weight_zero.float()[..., None]
    return ((steps - zero) * weight_scale.float()[..., None]).flatten(1)


def repack_awq(
    qweight: torch.Tensor, qzeros: torch.Tensor, scales: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """(weight, weight_scale, weight_zero) for ``w4a16_gemm`` of a layer as AWQ stores it.

    Args:
        qweight: int32 [K, N/8], eight neighbouring outputs a word, in AWQ's order.
        qzeros: int32 [K/group, N/8], packed alike.
        scales: [K/group, N].

    Returns:
        int32 [N, K/8]; scales [N, K/group]; int8 [N, K/group], or None where all are 8.
    """
    _check_packed("repack_awq", qweight, qzeros, scales, along_k=False)
    q, zero = (unpack_nibbles(t, _AWQ_ORDER).t() for t in (qweight, qzeros))
    return pack_nibbles(q), scales.t().contiguous(), _unless_symmetric(zero)


def repack_gptq(
    qweight: torch.Tensor,
    qzeros: torch.Tensor,
    scales: torch.Tensor,
    g_idx: torch.Tensor | None = None,
    *,
    zero_offset: int = 1,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """(weight, weight_scale, weight_zero) for ``w4a16_gemm`` of a layer as GPTQ stores it.

    The layout is AutoGPTQ's (auto_gptq/nn_modules/qlinear/qlinear_cuda_old.py, ``pack``).

    Args:
        qweight: int32 [K/8, N], eight neighbouring inputs a word, the first lowest.
        qzeros: int32 [K/group, N/8], eight neighbouring outputs a word, the first lowest.
        scales: [K/group, N].
        g_idx: int [K], the group of each input, which must be k // group: inputs in another order
            ("act order", desc_act) would need x in that order, too.
        zero_offset: what a stored zero point lacks: 1 in checkpoint format "gptq", 0 in "gptq_v2".

    Returns:
        int32 [N, K/8]; scales [N, K/group]; int8 [N, K/group], or None where all are 8.
    """
    op = "repack_gptq"
    if zero_offset not in (0, 1):
        raise ValueError(f"{op}: zero_offset must be 0 or 1, got {describe(zero_offset)}")
    _check_packed(op, qweight, qzeros, scales, along_k=True)
    k = 8 * len(qweight)
    if g_idx is not None:
        expected = torch.arange(k, device=g_idx.device) // (k // len(scales))
        if g_idx.shape != (k,) or not torch.equal(g_idx.long(), expected):
            raise ValueError(
                f"{op}: g_idx must be k // {k // len(scales)} for {k} inputs (no act order), got "
                f"{describe(g_idx)} of other values"
            )
    zero = unpack_nibbles(qzeros).t() + zero_offset
    return qweight.t().contiguous(), scales.t().contiguous(), _unless_symmetric(zero)


def _check_packed(
    op: str, qweight: torch.Tensor, qzeros: torch.Tensor, scales: torch.Tensor, *, along_k: bool
) -> None:
    for name, t in (("qweight", qweight), ("qzeros", qzeros), ("scales", scales)):
        if not isinstance(t, torch.Tensor) or t.dim() != 2:
            raise ValueError(f"{op}: {name} must be a matrix, got {describe(t)}")
        if (t.dtype == torch.int32) == (name == "scales"):
            wanted = "a floating-point matrix" if name == "scales" else "int32"
            raise ValueError(f"{op}: {name} must be {wanted}, got {describe(t)}")
    n_groups, n = scales.shape
    k = (8 if along_k else 1) * len(qweight)
    if n % 8 or n_groups == 0 or k % (8 * n_groups):
        raise ValueError(
            f"{op}: scales must have shape [K/group, N], N a multiple of 8, for K={k}, got "
            f"{describe(scales)}"
        )
    for name, t, shape in (
        ("qweight", qweight, (k // 8, n) if along_k else (k, n // 8)),
        ("qzeros", qzeros, (n_groups, n // 8)),
    ):
        if t.shape != shape:
            raise ValueError(f"{op}: {name} must have shape {list(shape)}, got {describe(t)}")


def _unless_symmetric(zero: torch.Tensor) -> torch.Tensor | None:
    return None if bool((zero == 8).all()) else zero.contiguous()
