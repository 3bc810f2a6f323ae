"""Weights in FP8: the layout of DeepSeek and Qwen, and the numbers that codes stand for.

Of a layer X with a weight [N, K] a checkpoint stores, instead of ``X.weight`` in 16 bits,

    fp8               X.weight            float8_e4m3fn [N, K]
                      X.weight_scale_inv  float [ceil(N / 128), ceil(K / 128)]
    float-quantized   X.weight            float8_e4m3fn [N, K]; or naive-quantized, the same
                      X.weight_scale      float [N, 1], [1] or [ceil(N / 128), ceil(K / 128)]

    weight = code * scale, which multiplies in spite of its name in the first

Linear layers stay in codes, which ``w8a16_gemm`` multiplies, with rows of scales made of blocks.
That wants activations of 16 bits, and blocks of all inputs or of 32, 64, 128.. that divide them.
Other layers, and experts, are dequantised as they are read. Activations, which both ask to round to
FP8 as the network runs, stay as they are, which is more exact.

Sources: transformers, ``FineGrainedFP8Config`` and integrations/finegrained_fp8.py; DeepSeek-V3,
inference/kernel.py (``weight_dequant``) as fp8_cast_bf16.py calls it; for float-quantized
compressed-tensors, whose config ``model.compressed`` reads.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch

from model.compressed import FINE_GRAINED, Float8, Quantization, one_of, patterns

_WHERE = "config.json: quantization_config"


def parse(config: Mapping[str, Any]) -> Quantization:
    """``quantization_config`` of a config.json whose ``quant_method`` is "fp8".

    Raises:
        ValueError: one sentence that names the field, what was expected and what came.
    """
    one_of("activation_scheme", config.get("activation_scheme", "dynamic"), "dynamic")
    one_of("fmt", config.get("fmt", "e4m3"), "e4m3")
    one_of("scale_fmt", config.get("scale_fmt", "float"), "float")
    one_of("expert_dtype", config.get("expert_dtype", "fp8"), "fp8")
    one_of("modules_to_convert", config.get("modules_to_convert"), None)
    size = config.get("weight_block_size")
    # null is a scale a tensor, a layout that no published checkpoint was there to check by.
    if (
        not isinstance(size, list)
        or len(size) != 2
        or not all(type(n) is int and n > 0 for n in size)
    ):
        raise ValueError(f"{_WHERE}: weight_block_size must be two integers above 0, got {size!r}")
    named = "modules_to_not_convert"
    if config.get(named) is None and config.get("ignored_layers") is not None:
        named = "ignored_layers"  # what some write; transformers knows both
    kept = [] if config.get(named) is None else config[named]
    if not isinstance(kept, list) or not all(isinstance(one, str) for one in kept):
        raise ValueError(f"{_WHERE}: {named} must be null or a list of names, got {kept!r}")
    # As transformers has it (``should_convert_module``): a regular expression of a name, or of what
    # it is in, or a name's end. "mlp.gate" is the router and no gate_proj.
    ignore = patterns(
        named,
        [rf"re:(?:{one})(?:(?<=\.)|(?=\.|$))" for one in kept]
        + [rf"re:.*{re.escape(one)}$" for one in kept],
    )
    scheme = Float8(FINE_GRAINED, 8, None, False, (size[0], size[1]))
    return Quantization((((r"re:model\.layers\.",), scheme),), ignore)


# ---- numbers -----------------------------------------------------------------------------------


def dequantised(codes: torch.Tensor, scale: torch.Tensor, scheme: Float8) -> torch.Tensor:
    """fp32 [N, K] of float8_e4m3fn codes, on the device of ``scale``."""
    n, k = codes.shape
    # From a table: not every device has a type of FP8.
    table = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().to(scale.device)
    indices = codes.view(torch.uint8).to(scale.device).flatten().int()
    out = table.index_select(0, indices).view(n, k)
    rows, columns = scheme.block_of(n, k)
    scale = scale.float().view(-(-n // rows), -1).repeat_interleave(rows, 0)[:n]
    for i in range(scale.shape[1]):  # column by column of blocks: no second tensor of this size
        out[:, i * columns : (i + 1) * columns] *= scale[:, i : i + 1]
    return out
