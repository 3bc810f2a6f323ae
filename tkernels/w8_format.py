"""Weights of 8 bits with scales for groups of columns: how ``w8a16_gemm`` has them.

    value[n, k] = code[n, k] * scale[n, k // group]

weight: int8 or float8_e4m3fn [N, K]; scale: [N, K/group], group a power of two from 32 on, or K.
What is here is done once, when weights are loaded.
"""

from __future__ import annotations

import torch

from tkernels.check import describe

CODES = (torch.int8, torch.float8_e4m3fn)


def numbers_of_codes(weight: torch.Tensor) -> torch.Tensor:
    """fp32 of the codes, by arithmetic on bytes: not every device has a type of FP8.

    Codes that are NaN (0x7f and 0xff) count as 480 and -480, as in the kernels.
    """
    if weight.dtype != torch.float8_e4m3fn:
        return weight.float()
    bits = weight.view(torch.uint8).short()
    # The same number times 2^-8 in fp16, whose exponents start 8 lower; numbers below the normal
    # ones are below them there, too.
    return (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).view(torch.float16).float() * 256.0


def dequantize_w8(weight: torch.Tensor, weight_scale: torch.Tensor) -> torch.Tensor:
    """fp32 [N, K]: what the weights stand for."""
    n_rows, n_groups = weight_scale.shape
    codes = numbers_of_codes(weight).reshape(n_rows, n_groups, -1)
    return (codes * weight_scale.float()[..., None]).flatten(1)


def expand_block_scales(
    scale: torch.Tensor, n: int, k: int, block: tuple[int, int] = (128, 128)
) -> torch.Tensor:
    """[n, K/columns] for ``w8a16_gemm`` of a scale for each block of rows and columns.

    Args:
        scale: [ceil(n / rows), ceil(k / columns)].
        n, k: of the weight.
        block: rows and columns with one scale.

    Returns:
        [n, groups], contiguous; [n, 1] where a block has all the columns. Where columns do not
        divide k, or are no power of two from 32 on, groups are those of the largest power of two
        that divides both.

    Raises:
        ValueError: another shape, or blocks that no such groups make up.
    """
    op, (rows, columns) = "expand_block_scales", block
    if rows < 1 or columns < 1:
        raise ValueError(f"{op}: block must be two integers above 0, got {describe(block)}")
    shape = (-(-n // rows), -(-k // columns))
    if tuple(scale.shape) != shape:
        raise ValueError(f"{op}: scale must have shape {list(shape)}, got {describe(scale)}")
    by_rows = scale.repeat_interleave(rows, 0)[:n]
    if shape[1] == 1:
        return by_rows.contiguous()
    group = columns & -columns
    while k % group:
        group //= 2
    if group < 32:
        raise ValueError(
            f"{op}: block must have columns that groups of 32 or more make up, as they must K={k}, "
            f"got {describe(block)}"
        )
    return by_rows.repeat_interleave(columns // group, 1)[:, : k // group].contiguous()
