"""The layouts of AWQ and GPTQ: their configs, and their tensors as ``compressed-tensors`` has them.

Of a layer X with a weight [N, K] a checkpoint stores, instead of ``X.weight`` in 16 bits,

            awq                            gptq, gptq_v2
    X.qweight  int32 [K, N / 8]            int32 [K bits / 32, N]
    X.qzeros   int32 [K / group, N / 8]    int32 [K / group, N bits / 32]
    X.scales   float [K / group, N]        the same
    X.g_idx    -                           int [K]: the group of each input
    X.bias     where the network has one   there, or zeros wherever

    weight = (code - zero) * scale, both of them unsigned

AWQ packs outputs in an order of its own: AutoAWQ, awq/modules/linear/gemm.py (``from_linear``).
GPTQ packs the inputs of a code and the outputs of a zero, first in the lowest bits: AutoGPTQ,
auto_gptq/nn_modules/qlinear/qlinear_cuda_old.py (``pack``). In "gptq" a stored zero is one less
than the zero, in "gptq_v2" it is the zero: GPTQModel. ``tkernels.w4_format`` has the packing.
GPTQ's 8 bits in groups have a kernel where zeros are 128 (``sym``), and none for experts: others
are dequantised as they are read.

Which layers are quantised says ``quantization_config`` in config.json. Fields of AWQ: AutoAWQ,
awq/models/_config.py; of GPTQ: ``QuantizeConfig`` of GPTQModel, gptqmodel/quantization/config.py,
which has ``dynamic`` too (``dynamic_get``). What is not known here is refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from model.compressed import Quantization, Scheme
from tkernels import repack_awq, repack_gptq

if TYPE_CHECKING:
    from model.sources import Source  # which asks model.config, which asks this

AWQ, GPTQ, GPTQ_V2 = "awq", "gptq", "gptq_v2"
METHODS = (AWQ, GPTQ)  # of quant_method
_WHERE = "config.json: quantization_config"
_LAYERS = r"model\.layers\."  # both leave all else alone, but for a lm_head that is named


@dataclass(frozen=True)
class InputMajor(Scheme):
    """A layer stored with inputs first; ``format`` is AWQ, GPTQ or GPTQ_V2."""

    may_reorder: bool = False  # inputs have groups in another order, unless g_idx says otherwise
    symmetric: bool = True  # zeros are the middle of the codes; of 4 bits it does not matter

    @property
    def scales(self) -> str:
        return "scales"

    def keeps_codes(self, inputs: int, dtype: torch.dtype) -> bool:
        return self.bits == 4 or self.symmetric

    @property
    def keeps_experts(self) -> bool:
        return self.bits == 4 or self.group is None

    def tensors(self, name: str, shape: tuple[int, int]) -> dict[str, tuple[int, ...]]:
        n, k = shape
        group = self.group or k
        if k % group:
            raise ValueError(
                f"{_WHERE}: group_size must divide the inputs of {name}, got {group} and {k}"
            )
        a_word = 32 // self.bits
        if n % a_word or k % a_word:
            raise ValueError(
                f"{_WHERE}: bits={self.bits} wants inputs and outputs that divide by {a_word}, got "
                f"{name} with {k} and {n}"
            )
        order = {"g_idx": (k,)} if self.may_reorder else {}
        return {
            "qweight": (k, n // a_word) if self.format == AWQ else (k // a_word, n),
            "qzeros": (k // group, n // a_word),
            "scales": (k // group, n),
            **order,
        }

    def optional(self, shape: tuple[int, int]) -> dict[str, tuple[int, ...]]:
        n, k = shape
        return {} if self.format == AWQ else {"g_idx": (k,), "bias": (n,)}


# ---- quantization_config -----------------------------------------------------------------------


def parse(config: Mapping[str, Any]) -> Quantization:
    """``quantization_config`` of a config.json whose ``quant_method`` is one of ``METHODS``.

    Raises:
        ValueError: one sentence that names the field, what was expected and what came.
    """
    lm_head = _flag(config, "lm_head", False)
    heads = ("lm_head",) if lm_head else ()
    if config["quant_method"] == AWQ:
        kept = _names(config, "modules_to_not_convert")
        # AutoAWQ and vLLM look for these anywhere in a name.
        ignore = tuple(f"re:.*{re.escape(name)}" for name in kept)
        return Quantization(((("re:" + _LAYERS, *heads), _awq(config)),), ignore)
    inside = _names(config, "modules_in_block_to_quantize")
    usual = _LAYERS
    if inside:
        usual += rf"\d+\.({'|'.join(map(re.escape, inside))})$"
    groups, ignore = _dynamic(config, _LAYERS + ("|lm_head$" if lm_head else ""))
    return Quantization((*groups, (("re:" + usual, *heads), _gptq(config))), ignore)


def _awq(config: Mapping[str, Any]) -> InputMajor:
    _one_of("bits", config.get("bits", 4), 4)
    named = "format" if config.get("version") is None else "version"  # transformers knows both
    _one_of(named, _lower(config.get(named, "gemm")), "gemm")
    _flag(config, "zero_point", True)  # qzeros are there in either case
    return InputMajor(AWQ, 4, _group(config), False)


def _gptq(config: Mapping[str, Any]) -> InputMajor:
    bits = config.get("bits", 4)
    _one_of("bits", bits, 4, 8)
    # GPTQModel writes both, AutoGPTQ the first, or neither.
    named = "format" if config.get("checkpoint_format") is None else "checkpoint_format"
    form = _lower(config.get(named, GPTQ))
    _one_of(named, form, GPTQ, GPTQ_V2)
    _one_of("pack_dtype", config.get("pack_dtype", "int32"), "int32")
    _one_of("is_marlin_format", config.get("is_marlin_format", False), False)
    for name in ("adapter", "rotation"):  # of GPTQModel: a network with more in it
        _one_of(name, config.get(name), None)
    reorders = _flag(config, "desc_act", False)
    symmetric = _flag(config, "sym", True)
    group = _group(config)
    if bits == 8 and group is None and not symmetric:
        raise ValueError(f"{_WHERE}: sym must be true with bits=8 and no groups, got false")
    # g_idx tells whether they are: with desc_act a layer of several groups must have one.
    return InputMajor(form, bits, group, False, reorders and group is not None, symmetric)


def _dynamic(
    config: Mapping[str, Any], inside: str
) -> tuple[tuple[tuple[tuple[str, ...], Scheme], ...], tuple[str, ...]]:
    """Patterns of layers with a scheme of their own, and of those that stay in 16 bits.

    The first pattern that fits decides: one that leaves layers alone does not reach those that
    have been given a scheme before it.
    """
    given = config.get("dynamic") or {}
    if not isinstance(given, Mapping):
        raise ValueError(f"{_WHERE}: dynamic must be patterns of layers, got {given!r}")
    groups: list[tuple[tuple[str, ...], Scheme]] = []
    ignore: list[str] = []
    taken = ""
    for named, override in given.items():
        pattern = f"(?:{named.removeprefix('-:').removeprefix('+:')})"
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(
                f"{_WHERE}: dynamic must hold regular expressions, got {named!r} ({error})"
            ) from None
        if named.startswith("-:"):
            ignore.append(f"re:{taken}{pattern}")
            continue
        if not isinstance(override, Mapping):
            raise ValueError(f"{_WHERE}: dynamic[{named!r}] must be fields, got {override!r}")
        groups.append(((f"re:(?={inside}){pattern}",), _gptq({**config, **override})))
        taken += f"(?!{pattern})"
    return tuple(groups), tuple(ignore)


def _group(config: Mapping[str, Any]) -> int | None:
    size = config.get("group_size", 128)
    if type(size) is not int or not (size == -1 or (size >= 32 and size & (size - 1) == 0)):
        raise ValueError(
            f"{_WHERE}: group_size must be -1 or a power of two from 32 on, got {size!r}"
        )
    return None if size == -1 else size


def _one_of(name: str, value: Any, *allowed: Any) -> None:
    if not any(value == one and type(value) is type(one) for one in allowed):
        wanted = " or ".join("null" if one is None else repr(one) for one in allowed)
        raise ValueError(f"{_WHERE}: {name} must be {wanted}, got {value!r}")


def _lower(value: Any) -> Any:
    return value.lower() if isinstance(value, str) else value


def _flag(config: Mapping[str, Any], name: str, usual: bool) -> bool:
    value = config.get(name, usual)
    if not isinstance(value, bool):
        raise ValueError(f"{_WHERE}: {name} must be true or false, got {value!r}")
    return value


def _names(config: Mapping[str, Any], field: str) -> list[str]:
    """Names in a list, or in lists in it; none where it is null."""
    given = config.get(field)
    flat: list[Any] = []
    for one in given if isinstance(given, list) else []:
        flat += one if isinstance(one, list) else [one]
    if not isinstance(given, list | None) or not all(isinstance(one, str) for one in flat):
        raise ValueError(f"{_WHERE}: {field} must be a list of names, got {given!r}")
    return flat


# ---- tensors -----------------------------------------------------------------------------------


def read_codes(
    layer: str, shape: tuple[int, int], scheme: InputMajor, source: Source, device: torch.device
) -> dict[str, torch.Tensor]:
    """A layer as ``compressed-tensors`` packs it, and its zeros where one is not the middle.

    Returns:
        ``weight_packed`` int32 [N, K bits / 32] and ``weight_scale`` [N, K / group] as
        ``model.compressed`` has them, ``weight_zero`` int8 [N, K / group] where zeros are not all
        8, made on ``device``.

    Raises:
        ValueError: tensors of another type, inputs in another order, 8 bits with other zeros.
    """
    qweight, qzeros, scales = _read(layer, shape, scheme, source, device)
    offset = 1 if scheme.format == GPTQ else 0
    if scheme.format == AWQ:
        packed, scale, zero = repack_awq(qweight, qzeros, scales)
    elif scheme.bits == 4:
        packed, scale, zero = repack_gptq(qweight, qzeros, scales, zero_offset=offset)
    else:
        others = qzeros.view(torch.uint8) != 128 - offset
        if others.any():
            raise ValueError(
                f"{source.where}: expected zeros of {128 - offset} in {layer}.qzeros, as sym means "
                f"in 8 bits, got {int(others.sum())} others"
            )
        packed, scale, zero = qweight.t().contiguous(), scales.t().contiguous(), None
    made = {"weight_packed": packed, "weight_scale": scale}
    return made if zero is None else {**made, "weight_zero": zero}


def dequantised(
    layer: str, shape: tuple[int, int], scheme: InputMajor, source: Source, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """A layer of 8 bits in groups: its weight in fp32 [N, K] and its scales, on ``device``.

    Raises:
        ValueError: tensors of another type, inputs in another order.
    """
    n, k = shape
    qweight, qzeros, scales = _read(layer, shape, scheme, source, device)
    out = qweight.t().contiguous().view(torch.uint8).view(n, -1, scheme.group or k).float()
    # [N, groups, 1]
    zero = qzeros.view(torch.uint8).float().t()[..., None] + (scheme.format == GPTQ)
    return out.sub_(zero).mul_(scales.float().t()[..., None]).view(n, k), scales


def _read(
    layer: str, shape: tuple[int, int], scheme: InputMajor, source: Source, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``qweight``, ``qzeros`` and ``scales`` of the types that they have, of inputs in order."""
    n, k = shape
    found = {part: source.read(f"{layer}.{part}") for part in scheme.tensors(layer, (n, k))}
    for part in ("qweight", "qzeros"):
        if found[part].dtype != torch.int32:
            raise ValueError(
                f"{source.where}: expected {layer}.{part} in torch.int32, as {scheme.format} has "
                f"it, got {found[part].dtype}"
            )
    if not found["scales"].is_floating_point():
        raise ValueError(
            f"{source.where}: expected {layer}.scales in floats, got {found['scales'].dtype}"
        )
    if f"{layer}.g_idx" in source.shapes and scheme.format != AWQ:
        groups = source.read(f"{layer}.g_idx")
        if not torch.equal(groups.long(), torch.arange(k) // (scheme.group or k)):
            raise ValueError(
                f"{source.where}: expected inputs in their order, as without desc_act (act order), "
                f"got {layer}.g_idx that is not k // {scheme.group or k}"
            )
    return found["qweight"].to(device), found["qzeros"].to(device), found["scales"].to(device)
