"""What a checkpoint stores of quantised layers -> weights that are multiplied as they are.

Which layers are quantised, and how, says ``model.compressed``; ``model.weights`` asks it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from model import awq_gptq, block_matrix, compressed, float8
from model.block_matrix import BlockMatrix, Blocks
from model.compressed import Float8, Scheme, WithZeros, takes_group
from model.quantized_matrix import (
    ByteMatrix,
    Int4Experts,
    Int8Experts,
    Int8Matrix,
    PackedMatrix,
)
from model.sources import Source
from tkernels import expand_block_scales, unpack_zero_points

Sources = Sequence[tuple[str, tuple[int, ...]]]  # names of weights, and the shape of each


def read_matrix(
    sources: Sources, scheme: Scheme, source: Source, dtype: torch.dtype, device: torch.device
) -> BlockMatrix | Int8Matrix | PackedMatrix | ByteMatrix:
    """Linear layers of one scheme, stacked along N. It keeps codes.

    Raises:
        ValueError: codes or scales of another type, a scale that is not above 0, another shape.
    """
    (_, k) = sources[0][1]
    if isinstance(scheme, Float8):
        float8s = [_float8_in_rows(name, shape, scheme, source) for name, shape in sources]
        return _in_bytes(float8s, dtype, device)
    found = [_read_codes(name, shape, scheme, source, device) for name, shape in sources]
    scale = torch.cat([one["weight_scale"].float() for one in found])
    zero = _zeros(found)
    group = scheme.group or k
    if (
        not scheme.quantized_activations
        and device.type == "cpu"
        and dtype == torch.float32
        and k % block_matrix.GROUP == group % block_matrix.GROUP == 0
        and block_matrix.can_multiply()
    ):  # weights alone are quantised: PyTorch's embedding bag reads them as bytes

        def in_blocks(groups: torch.Tensor) -> torch.Tensor:
            return groups.repeat_interleave(group // block_matrix.GROUP, 1).t().contiguous()

        codes = torch.cat([_codes(one, scheme, k) for one in found])
        blocks = Blocks(
            (codes.view(torch.uint8) ^ 128).t().contiguous(),
            -128,
            in_blocks(scale),
            None if zero is None else in_blocks((8 - zero) * scale),
        )
        matrix = block_matrix.stack([blocks])
        assert matrix is not None
        return matrix
    scale = scale.to(device)
    if scheme.bits == 8 and scheme.group is None:
        codes = torch.cat([_codes(one, scheme, k) for one in found])
        return Int8Matrix(codes.to(device), scale.view(-1), scheme.quantized_activations)
    if scheme.bits == 8 and dtype != torch.float32 and (group == k or takes_group(group)):
        parts = [(_codes(one, scheme, k), one["weight_scale"]) for one in found]
        return _in_bytes(parts, dtype, device)
    packed = torch.cat([one["weight_packed"] for one in found])
    if scheme.bits == 4:
        scale = _in_dtype(scale, dtype)
    zero = None if zero is None else zero.to(device)
    return PackedMatrix(packed.to(device), scale, scheme.bits, k, zero)


def _in_bytes(
    layers: Sequence[tuple[torch.Tensor, torch.Tensor]], dtype: torch.dtype, device: torch.device
) -> ByteMatrix:
    """Of codes [N, K] and scales [N, K / group] of each layer."""
    # As bytes until they are there: not every device has a type of FP8.
    codes = torch.cat([codes.view(torch.int8) for codes, _ in layers]).to(device)
    scale = torch.cat([scale for _, scale in layers])
    if scale.dtype.itemsize != 2:  # else half as many bytes as fp32, in either type
        scale = _in_dtype(scale.float(), dtype)
    return ByteMatrix(codes.view(layers[0][0].dtype), scale.to(device))


def _float8_in_rows(
    name: str, shape: tuple[int, ...], scheme: Float8, source: Source
) -> tuple[torch.Tensor, torch.Tensor]:
    """Checked codes [N, K], and scales [N, K / group] made of those of blocks."""
    n, k = shape
    codes, scale = _read_float8(name, scheme, source)
    block = scheme.block_of(n, k)
    return codes, expand_block_scales(scale.view(-1, -(-k // block[1])), n, k, block)


def _zeros(found: Sequence[dict[str, torch.Tensor]]) -> torch.Tensor | None:
    """Those of all layers, where one has other than 8."""
    if not any("weight_zero" in one for one in found):
        return None
    eights = [torch.full_like(one["weight_scale"], 8, dtype=torch.int8) for one in found]
    return torch.cat(
        [one.get("weight_zero", zero) for one, zero in zip(found, eights, strict=True)]
    )


def _in_dtype(scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Scales in the activations' dtype where nothing of them is lost, as they mostly come.

    With such ones ``w4a16_gemm`` has a faster body for many rows. In bf16 that wants them below
    2^11 and not below 2^-110.
    """
    kept = scale.to(dtype)
    same = torch.equal(kept.float(), scale)
    return kept if same and scale.max() < 2.0**11 and scale.min() >= 2.0**-110 else scale


def read_experts(
    sources: Sources, schemes: Sequence[Scheme], experts: int, source: Source, device: torch.device
) -> Int8Experts:
    """Linear layers of all experts, read one by one: nobody needs memory for them twice.

    Args:
        sources: those of an expert in a row.
        schemes: of each, 8 bits and a scale a channel; all have int8 activations, or none.

    Raises:
        ValueError: as ``read_matrix``.
    """
    rows = sum(shape[0] for _, shape in sources)
    (_, k) = sources[0][1]
    codes = torch.empty(rows, k, dtype=torch.int8, device=device)
    scale = torch.empty(rows, dtype=torch.float32, device=device)
    row = 0
    for (name, shape), scheme in zip(sources, schemes, strict=True):
        found = _read_codes(name, shape, scheme, source, device)
        here = slice(row, row + shape[0])
        codes[here].copy_(_codes(found, scheme, k))
        scale[here].copy_(found["weight_scale"].view(-1))
        row += shape[0]
    return Int8Experts(
        codes.view(experts, -1, k), scale.view(experts, -1), schemes[0].quantized_activations
    )


def read_packed_experts(
    sources: Sources,
    schemes: Sequence[Scheme],
    experts: int,
    source: Source,
    dtype: torch.dtype,
    device: torch.device,
) -> Int4Experts:
    """As ``read_experts``, of 4 bits: all matrices have groups of one size, and 8 divides inputs.

    Zeros are there where a matrix has other than 8.

    Raises:
        ValueError: as ``read_matrix``.
    """
    rows = sum(shape[0] for _, shape in sources)
    (_, k) = sources[0][1]
    packed = torch.empty(rows, k // 8, dtype=torch.int32, device=device)
    groups = k // (schemes[0].group or k)
    scale = torch.empty(rows, groups, dtype=torch.float32, device=device)
    zero: torch.Tensor | None = None
    row = 0
    for (name, shape), scheme in zip(sources, schemes, strict=True):
        found = _read_codes(name, shape, scheme, source, device)
        here = slice(row, row + shape[0])
        packed[here].copy_(found["weight_packed"])
        scale[here].copy_(found["weight_scale"])
        if "weight_zero" in found:
            if zero is None:
                zero = torch.full((rows, groups), 8, dtype=torch.int8, device=device)
            zero[here].copy_(found["weight_zero"])
        row += shape[0]
    return Int4Experts(
        packed.view(experts, -1, k // 8),
        _in_dtype(scale, dtype).view(experts, -1, groups),
        None if zero is None else zero.view(experts, -1, groups),
    )


def read_dequantised(
    name: str,
    shape: tuple[int, ...],
    scheme: Scheme,
    source: Source,
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    """A layer that is multiplied as one of floats: ``dtype`` [N, K].

    Raises:
        ValueError: codes or scales of another type or not finite, a scale that is not above 0, a
            weight that ``dtype`` cannot hold.
    """
    layer, size = name.removesuffix(".weight"), (shape[0], shape[1])
    if isinstance(scheme, awq_gptq.InputMajor):
        exact, scale = awq_gptq.dequantised(layer, size, scheme, source, device)
        _check_scale(layer, scale, scheme, source)
    else:
        assert isinstance(scheme, Float8)
        codes, scale = _read_float8(name, scheme, source)
        exact = float8.dequantised(codes, scale.to(device), scheme)
    out = exact.to(dtype)
    if not torch.isfinite(out.sum(dtype=torch.float32)) and not torch.isfinite(out).all():
        bad = int((~torch.isfinite(out)).sum())
        raise ValueError(
            f"{source.where}: expected weights that {dtype} holds, got {bad} beyond its range in "
            f"{name}, dequantised from {scheme.words}"
        )
    return out


def _read_float8(name: str, scheme: Float8, source: Source) -> tuple[torch.Tensor, torch.Tensor]:
    """Checked codes, and scales as they are stored."""
    layer = name.removesuffix(".weight")
    codes, scale = source.read(name), source.read(f"{layer}.{scheme.scales}")
    if codes.dtype != torch.float8_e4m3fn:
        raise ValueError(
            f"{source.where}: expected {name} in torch.float8_e4m3fn, as {scheme.format} has it, "
            f"got {codes.dtype}"
        )
    if scale.dtype.itemsize == 1:  # float8_e8m0fnu, which scale_fmt would name
        raise ValueError(
            f"{source.where}: expected {layer}.{scheme.scales} in 16 or 32 bits, got {scale.dtype}"
        )
    _check_scale(layer, scale, scheme, source)
    # 127 is NaN, with either sign; there is no infinity.
    bad = int(((codes.view(torch.uint8) & 127) == 127).sum())
    if bad:
        raise ValueError(f"{source.where}: expected finite weights, got {bad} NaN in {name}")
    return codes, scale


def _codes(found: dict[str, torch.Tensor], scheme: Scheme, k: int) -> torch.Tensor:
    """int8 [N, K]."""
    if scheme.format == compressed.INT:
        return found["weight"]
    return compressed.unpack(found["weight_packed"], scheme.bits, k)


def _read_codes(
    name: str, shape: tuple[int, ...], scheme: Scheme, source: Source, device: torch.device
) -> dict[str, torch.Tensor]:
    """The checked tensors of a quantised layer, under the names that ``model.compressed`` has.

    Those of AWQ and GPTQ become that on the device. ``weight_zero`` int8 [N, K / group], 0 to 15,
    are zeros as ``model.quantized_matrix`` has them.
    """
    layer = name.removesuffix(".weight")
    if isinstance(scheme, awq_gptq.InputMajor):
        found = awq_gptq.read_codes(layer, (shape[0], shape[1]), scheme, source, device)
        _check_scale(layer, found["weight_scale"], scheme, source)
        return found
    found = {
        part: source.read(f"{layer}.{part}") for part in scheme.tensors(layer, (shape[0], shape[1]))
    }
    codes, wanted = (
        ("weight", torch.int8)
        if scheme.format == compressed.INT
        else ("weight_packed", torch.int32)
    )
    if found[codes].dtype != wanted:
        raise ValueError(
            f"{source.where}: expected {layer}.{codes} in {wanted}, as {scheme.format} has it, got "
            f"{found[codes].dtype}"
        )
    if "weight_shape" in found and found["weight_shape"].tolist() != list(shape):
        raise ValueError(
            f"{source.where}: expected {layer}.weight_shape to be {list(shape)}, got "
            f"{found['weight_shape'].tolist()}"
        )
    _check_scale(layer, found["weight_scale"], scheme, source)
    if isinstance(scheme, WithZeros):
        packed = found.pop("weight_zero_point")
        if packed.dtype != torch.int32:
            raise ValueError(
                f"{source.where}: expected {layer}.weight_zero_point in torch.int32, eight of a "
                f"group in one, got {packed.dtype}"
            )
        found["weight_zero"] = unpack_zero_points(packed, shape[0])
    return found


def _check_scale(layer: str, scale: torch.Tensor, scheme: Scheme, source: Source) -> None:
    name = f"{layer}.{scheme.scales}"
    if not scale.is_floating_point():
        raise ValueError(f"{source.where}: expected {name} in floats, got {scale.dtype}")
    scale = scale.float()  # as it is used; of 8 bits there is no comparison
    bad = scale[~(scale.isfinite() & (scale > 0))]
    if len(bad):
        raise ValueError(
            f"{source.where}: expected finite scales above 0 in {name}, got {len(bad)} others, "
            f"the first {bad[0].item()}"
        )
