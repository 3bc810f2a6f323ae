"""The layouts of weights in fp8: their configs, and their tensors as numbers.

Of a layer X with a weight [N, K] a checkpoint stores

                   fp8                                     float-quantized
    X.weight       float8_e4m3fn [N, K]                    the same
    scales         X.weight_scale_inv, float               X.weight_scale, float: [N, 1], [1], or
                   [ceil(N / 128), ceil(K / 128)]          one a block, as in fp8

    weight = code * scale, whatever the name says

The first is that of DeepSeek-V3 (``inference/fp8_cast_bf16.py``, ``weight_dequant`` in
``inference/kernel.py``) and ``FineGrainedFP8Config`` of transformers, in which Qwen publishes
Qwen3; the second that of ``compressed-tensors`` (``naive_quantized`` among its compressors). No
kernel here multiplies fp8: weights become numbers of the activations' dtype as they are read.
Activations stay as they are, where the checkpoint's makers had them rounded to fp8, too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from model.compressed import Quantization, Scheme, one_of, patterns

FP8 = "fp8"  # quant_method
FLOAT, NAIVE = "float-quantized", "naive-quantized"  # formats of compressed-tensors, alike here
_WHERE = "config.json: quantization_config"


@dataclass(frozen=True)
class Float8(Scheme):
    """A layer stored in fp8; ``format`` is FP8, FLOAT or NAIVE."""

    strategy: str = "block"  # what has a scale: "block", "channel" or "tensor"
    block: tuple[int, int] = (128, 128)  # outputs and inputs of one

    @property
    def words(self) -> str:
        each = f"{self.block[0]}x{self.block[1]}" if self.strategy == "block" else self.strategy
        return f"fp8 with a scale a {self.strategy}" + f" of {each}" * (self.strategy == "block")

    @property
    def scales(self) -> str:
        return "weight_scale_inv" if self.format == FP8 else "weight_scale"

    @property
    def is_dequantised(self) -> bool:
        return True

    def tensors(self, name: str, shape: tuple[int, int]) -> dict[str, tuple[int, ...]]:
        n, k = shape
        rows, columns = self.block
        scales = {
            "block": (-(-n // rows), -(-k // columns)),
            "channel": (n, 1),
            "tensor": (1,),
        }
        return {"weight": shape, self.scales: scales[self.strategy]}


def parse(config: Mapping[str, Any]) -> Quantization:
    """``quantization_config`` of a config.json whose ``quant_method`` is fp8.

    Raises:
        ValueError: one sentence that names the field, what was expected and what came.
    """
    one_of("activation_scheme", config.get("activation_scheme", "dynamic"), "dynamic")
    one_of("fmt", config.get("fmt"), None, "e4m3", "float8_e4m3fn")
    one_of("scale_fmt", config.get("scale_fmt"), None, "float")
    block = _block("weight_block_size", config.get("weight_block_size"))
    kept = patterns("modules_to_not_convert", config.get("modules_to_not_convert") or [])
    # As transformers has it (``should_convert_module``): a name's end, or a regular expression of
    # a name or of what it is in.
    ignore = patterns(
        "modules_to_not_convert",
        [rf"re:(?:{one})(?:(?<=\.)|(?=\.|$))" for one in kept]
        + [rf"re:.*{re.escape(one)}$" for one in kept],
    )
    scheme = Float8(FP8, 8, None, False, "block", block)
    return Quantization((((r"re:model\.layers\.",), scheme),), ignore)


def scheme_of_group(
    name: str, form: str, weights: Mapping[str, Any], activations: Mapping[str, Any] | None
) -> Float8:
    """What a group of compressed-tensors says whose format is FLOAT or NAIVE.

    Raises:
        ValueError: as ``parse``.
    """
    where = f"{name}.weights"
    one_of(f"{where}.type", weights.get("type"), "float")
    one_of(f"{where}.num_bits", weights.get("num_bits", 8), 8)
    one_of(f"{where}.symmetric", weights.get("symmetric", True), True)
    one_of(f"{where}.dynamic", weights.get("dynamic", False), False)
    one_of(f"{where}.strategy", weights.get("strategy"), "channel", "tensor", "block")
    strategy = str(weights["strategy"])
    block = (1, 1)
    if strategy == "block":
        block = _block(f"{where}.block_structure", weights.get("block_structure"))
    if activations is not None:  # left in 16 bits; one scale for all would be a tensor more
        one_of(f"{name}.input_activations.type", activations.get("type"), "float")
        one_of(f"{name}.input_activations.dynamic", activations.get("dynamic", False), True)
    return Float8(form, 8, None, False, strategy, block)


def _block(name: str, given: Any) -> tuple[int, int]:
    if not (
        isinstance(given, list)
        and len(given) == 2
        and all(type(size) is int and size > 0 for size in given)
    ):
        raise ValueError(
            f"{_WHERE}: {name} must be two sizes above 0, such as [128, 128], got {given!r}"
        )
    return given[0], given[1]


def dequantise(codes: torch.Tensor, scale: torch.Tensor, scheme: Float8) -> torch.Tensor:
    """fp32 [N, K] of codes [N, K] and their scales, as ``Float8.tensors`` has them."""
    values, scale = codes.float(), scale.float()
    if scheme.strategy != "block":
        return values.mul_(scale)
    (n, k), (rows, columns) = codes.shape, scheme.block
    across = scale.repeat_interleave(columns, 1)[:, :k]
    for row in range(len(scale)):  # scales of all numbers would take as much memory as these
        values[row * rows : min((row + 1) * rows, n)].mul_(across[row])
    return values
