"""The ``compressed-tensors`` layout of quantised linear layers: its config and its codes.

Of a layer X with a weight [N, K] a checkpoint stores, instead of ``X.weight`` in 16 bits,

    int-quantized    X.weight         int8  [N, K]
    pack-quantized   X.weight_packed  int32 [N, ceil(K bits / 32)], first code in the lowest bits,
                                      each with 2^(bits - 1) added
                     X.weight_zero_point int32 [ceil(N / 8), K / group], packed along N in the same
                      way, where codes of 4 bits are not symmetric: weight = (code - zero) * scale
                     X.weight_shape   int   [2]: N, K
    both             X.weight_scale   float [N, 1], or [N, K / group]: weight = code * scale

or, of format float-quantized, what ``model.float8`` tells.

``quantization_config`` in config.json says which layers have which scheme. What is not known here
is refused: other codes, zero points of 8 bits, static or other activations, transforms.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

METHOD = "compressed-tensors"
INT, PACKED = "int-quantized", "pack-quantized"
FLOAT, NAIVE = "float-quantized", "naive-quantized"  # of fp8 the same, by two names
FINE_GRAINED = "fp8"  # of ``model.float8``: a quant_method, where those above are formats
_WHERE = "config.json: quantization_config"


def takes_group(inputs: int) -> bool:
    """Whether kernels take a scale for so many inputs: a power of two from 32 on."""
    return inputs >= 32 and inputs & (inputs - 1) == 0


@dataclass(frozen=True)
class Scheme:
    """How one linear layer is stored and computed."""

    format: str  # INT or PACKED; others in classes below this one
    bits: int  # of a weight: 8 or 4
    group: int | None  # inputs that share a scale; None: all of a row
    quantized_activations: bool  # in int8, a scale a token, made as the network runs

    @property
    def words(self) -> str:
        """Such as "W4A16 in groups of 128"."""
        groups = "" if self.group is None else f" in groups of {self.group}"
        return f"W{self.bits}A{8 if self.quantized_activations else 16}{groups}"

    @property
    def scales(self) -> str:
        """Name (below that of the layer) of the scales."""
        return "weight_scale"

    def keeps_codes(self, inputs: int, dtype: torch.dtype) -> bool:
        """Whether a linear layer of so many inputs stays in codes beside activations in ``dtype``.

        If not, it becomes one of floats as it is read, since nothing multiplies it.
        """
        return True

    @property
    def keeps_experts(self) -> bool:
        """The same of experts."""
        return True

    def tensors(self, name: str, shape: tuple[int, int]) -> dict[str, tuple[int, ...]]:
        """Names (below that of the layer) and shapes of what is stored for a weight ``shape``."""
        n, k = shape
        if self.group is not None and k % self.group:
            raise ValueError(
                f"{_WHERE}: group_size must divide the inputs of {name}, got {self.group} and {k}"
            )
        scale = {"weight_scale": (n, 1 if self.group is None else k // self.group)}
        if self.format == INT:
            return {"weight": (n, k), **scale}
        packed = {"weight_packed": (n, -(-k * self.bits // 32)), "weight_shape": (2,)}
        return {**packed, **scale}

    def optional(self, shape: tuple[int, int]) -> dict[str, tuple[int, ...]]:
        """The same of what may be stored, or not."""
        return {}


@dataclass(frozen=True)
class WithZeros(Scheme):
    """A layer in 4 bits (PACKED) whose groups have zeros of their own."""

    @property
    def words(self) -> str:
        """Such as "W4A16 in groups of 128 with zero points"."""
        return f"{super().words} with zero points"

    def tensors(self, name: str, shape: tuple[int, int]) -> dict[str, tuple[int, ...]]:
        found = super().tensors(name, shape)
        return {**found, "weight_zero_point": (-(-shape[0] // 8), found["weight_scale"][1])}


@dataclass(frozen=True)
class Float8(Scheme):
    """A layer in float8_e4m3fn; ``format`` is FLOAT or FINE_GRAINED."""

    block: tuple[int, int] = (0, 0)  # outputs and inputs that share a scale; 0: all of them

    @property
    def words(self) -> str:
        """Such as "FP8 in blocks of 128x128"."""
        if self.block == (0, 0):
            return "FP8 with a scale a tensor"
        if self.block == (1, 0):
            return "FP8 with a scale a channel"
        return f"FP8 in blocks of {self.block[0]}x{self.block[1]}"

    @property
    def scales(self) -> str:
        return "weight_scale_inv" if self.format == FINE_GRAINED else "weight_scale"

    def keeps_codes(self, inputs: int, dtype: torch.dtype) -> bool:
        columns = self.block[1]
        whole = inputs % columns == 0 and takes_group(columns) if 0 < columns < inputs else True
        return whole and dtype != torch.float32

    @property
    def keeps_experts(self) -> bool:
        return False

    def block_of(self, n: int, k: int) -> tuple[int, int]:
        """Rows and columns of a block of a weight [n, k]."""
        return self.block[0] or n, self.block[1] or k

    def tensors(self, name: str, shape: tuple[int, int]) -> dict[str, tuple[int, ...]]:
        rows, columns = self.block_of(*shape)
        blocks = (-(-shape[0] // rows), -(-shape[1] // columns))
        return {"weight": shape, self.scales: (1,) if self.block == (0, 0) else blocks}


@dataclass(frozen=True)
class Quantization:
    """Which layers a checkpoint has quantised, and how."""

    groups: tuple[tuple[tuple[str, ...], Scheme], ...]  # targets, scheme
    ignore: tuple[str, ...] = ()

    def scheme_of(self, layer: str) -> Scheme | None:
        """Of a linear layer by its name; None: it is not quantised."""
        if any(_matches(layer, pattern) for pattern in self.ignore):
            return None
        # The package looks for names before it looks for the class.
        for by_class in (False, True):
            for targets, scheme in self.groups:
                if any(_matches(layer, t) for t in targets if (t == "Linear") == by_class):
                    return scheme
        return None

    @property
    def quantizes_activations(self) -> bool:
        return any(scheme.quantized_activations for _, scheme in self.groups)


def _matches(layer: str, pattern: str) -> bool:
    if pattern.startswith("re:"):
        return re.match(pattern[3:], layer) is not None
    return pattern in (layer, "Linear")


# ---- quantization_config -----------------------------------------------------------------------


def parse(config: Any) -> Quantization:
    """``quantization_config`` of a config.json.

    Raises:
        ValueError: one sentence that names the field, what was expected and what came.
    """
    method = config.get("quant_method") if isinstance(config, Mapping) else config
    if method != METHOD:
        raise ValueError(
            f"config.json: expected a checkpoint that is unquantised or of {METHOD}, awq, gptq or "
            f"fp8 (or a GGUF file), got quantization_config with quant_method={method!r}"
        )
    one_of("quantization_status", config.get("quantization_status"), "compressed", "frozen")
    one_of("kv_cache_scheme", config.get("kv_cache_scheme"), None)
    for name in ("sparsity_config", "transform_config"):
        given = config.get(name)
        if given and not (isinstance(given, Mapping) and given.get("format") == "dense"):
            raise ValueError(f"{_WHERE}: {name} must be empty, got {given!r}")
    groups = config.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise ValueError(f"{_WHERE}: config_groups must hold a group or more, got {groups!r}")
    return Quantization(
        tuple(_group(name, group, config.get("format")) for name, group in groups.items()),
        patterns("ignore", config.get("ignore") or []),
    )


def _group(name: str, group: Any, default: Any) -> tuple[tuple[str, ...], Scheme]:
    if not isinstance(group, Mapping):
        raise ValueError(f"{_WHERE}: {name} must be a scheme with targets, got {group!r}")
    targets = patterns(f"{name}.targets", group.get("targets"))
    stored = group.get("format") or default
    one_of(f"{name}.format", stored, INT, PACKED, FLOAT, NAIVE)
    one_of(f"{name}.output_activations", group.get("output_activations"), None)
    weights = group.get("weights")
    if not isinstance(weights, Mapping):
        raise ValueError(f"{_WHERE}: {name}.weights must say how weights are stored, got {weights}")
    where = f"{name}.weights"
    if stored in (FLOAT, NAIVE):
        return targets, _float8(name, weights, group.get("input_activations"))
    four = stored == PACKED and weights.get("num_bits") == 4
    _plain_int(where, weights, zeros=four)
    one_of(f"{where}.num_bits", weights.get("num_bits", 8), *((8,) if stored == INT else (8, 4)))
    one_of(f"{where}.dynamic", weights.get("dynamic", False), False)
    one_of(f"{where}.actorder", weights.get("actorder"), None, False, "weight", "static")
    size = weights.get("group_size")
    strategy = weights.get("strategy") or ("tensor" if size is None else _strategy(size))
    one_of(f"{where}.strategy", strategy, "channel", *(("group",) if stored == PACKED else ()))
    if strategy == "group" and (type(size) is not int or size < 1):
        raise ValueError(f"{_WHERE}: {where}.group_size must be 1 or more, got {size!r}")
    activations = group.get("input_activations")
    if activations is not None:
        where = f"{name}.input_activations"
        if not isinstance(activations, Mapping):
            raise ValueError(f"{_WHERE}: {where} must be null or a scheme, got {activations!r}")
        _plain_int(where, activations)
        one_of(f"{where}.num_bits", activations.get("num_bits", 8), 8)
        one_of(f"{where}.dynamic", activations.get("dynamic", False), True)
        one_of(f"{where}.strategy", activations.get("strategy"), "token")
        if strategy != "channel" or weights.get("num_bits", 8) != 8:
            raise ValueError(
                f"{_WHERE}: {where} must be null unless weights have 8 bits and a scale a channel, "
                f"got int8 with weights of {weights.get('num_bits', 8)} bits, strategy {strategy!r}"
            )
    kind = WithZeros if weights.get("symmetric") is False else Scheme
    scheme = kind(
        stored,
        weights.get("num_bits", 8),
        size if strategy == "group" else None,
        activations is not None,
    )
    return targets, scheme


def _float8(name: str, weights: Mapping[str, Any], activations: Any) -> Float8:
    where = f"{name}.weights"
    _plain(where, weights, "float")
    one_of(f"{where}.num_bits", weights.get("num_bits", 8), 8)
    one_of(f"{where}.dynamic", weights.get("dynamic", False), False)
    one_of(f"{where}.group_size", weights.get("group_size"), None)
    strategy = weights.get("strategy") or "tensor"
    one_of(f"{where}.strategy", strategy, "channel", "tensor", "block")
    block = {"channel": (1, 0), "tensor": (0, 0)}.get(strategy)
    given = weights.get("block_structure")
    if block is not None:
        one_of(f"{where}.block_structure", given, None)
    elif (
        isinstance(given, list)
        and len(given) == 2
        and all(type(size) is int and size > 0 for size in given)
    ):
        block = (given[0], given[1])
    else:
        raise ValueError(
            f"{_WHERE}: {where}.block_structure must be two integers above 0, got {given!r}"
        )
    if activations is not None:  # they stay as they are, so what shares a scale does not matter
        where = f"{name}.input_activations"
        if not isinstance(activations, Mapping):
            raise ValueError(f"{_WHERE}: {where} must be null or a scheme, got {activations!r}")
        _plain(where, activations, "float")
        one_of(f"{where}.num_bits", activations.get("num_bits", 8), 8)
        one_of(f"{where}.dynamic", activations.get("dynamic", False), True)
    return Float8(FLOAT, 8, None, False, block)


def _strategy(size: Any) -> str:
    return "channel" if size == -1 else "group"


def _plain_int(where: str, args: Mapping[str, Any], zeros: bool = False) -> None:
    """``zeros``: codes may have others than 0."""
    _plain(where, args, "int", zeros)
    one_of(f"{where}.block_structure", args.get("block_structure"), None)


def _plain(where: str, args: Mapping[str, Any], kind: str, zeros: bool = False) -> None:
    """Numbers of a kind, with a zero that is 0 or (``zeros``) one of each group."""
    one_of(f"{where}.type", args.get("type", "int"), kind)
    one_of(f"{where}.symmetric", args.get("symmetric", True), True, *((False,) if zeros else ()))


def one_of(name: str, value: Any, *allowed: Any) -> None:
    """Refuses a field of the config with another value, or one of another type."""
    if not any(value == one and type(value) is type(one) for one in allowed):
        wanted = " or ".join("null" if one is None else repr(one) for one in allowed)
        raise ValueError(f"{_WHERE}: {name} must be {wanted}, got {value!r}")


def patterns(name: str, given: Any) -> tuple[str, ...]:
    if not isinstance(given, list) or not all(isinstance(one, str) for one in given):
        raise ValueError(f"{_WHERE}: {name} must be a list of names, got {given!r}")
    for one in given:
        if one.startswith("re:"):
            try:
                re.compile(one[3:])
            except re.error as error:
                raise ValueError(
                    f"{_WHERE}: {name} must hold regular expressions after 're:', got {one!r} "
                    f"({error})"
                ) from None
    return tuple(given)


def describe(groups: Sequence[tuple[Iterable[str], Scheme]], ignore: Iterable[str]) -> Any:
    """The ``quantization_config`` that ``parse`` and other engines read."""
    (form,) = {scheme.format for _, scheme in groups}
    return {
        "quant_method": METHOD,
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {
            f"group_{i}": _description(list(targets), scheme)
            for i, (targets, scheme) in enumerate(groups)
        },
        "ignore": list(ignore),
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }


def _description(targets: list[str], scheme: Scheme) -> dict[str, Any]:
    weights: dict[str, Any] = {
        "num_bits": scheme.bits,
        "type": "int",
        "symmetric": True,
        "strategy": "channel" if scheme.group is None else "group",
        "group_size": scheme.group,
        "dynamic": False,
    }
    token = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
    return {
        "targets": targets,
        "weights": weights,
        "input_activations": token if scheme.quantized_activations else None,
        "output_activations": None,
    }


# ---- codes -------------------------------------------------------------------------------------


def quantise(
    weight: torch.Tensor, scheme: Scheme, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight [N, K] rounded to the nearest codes, with the scales as they are stored.

    A scale is the largest magnitude over half the range, 127.5 or 7.5, as the package has it:
    then the largest number is half a step off, like the worst of the others, at a smaller step.

    Returns:
        (int8 [N, K], ``dtype`` [N, K / group]). Groups of zeros have a small scale: none is 0.
    """
    n, k = weight.shape
    grouped = weight.float().contiguous().view(n, -1, scheme.group or k)
    half = 2 ** (scheme.bits - 1)
    scale = (grouped.abs().amax(-1) / (half - 0.5)).to(dtype)
    scale = torch.where(scale == 0, torch.finfo(dtype).eps, scale)
    codes = (grouped / scale.float()[..., None]).round_().clamp_(-half, half - 1)
    return codes.to(torch.int8).view(n, k), scale


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """int8 [N, K] -> int32 [N, K bits / 32]; K divides by 32 / bits."""
    if bits == 8:
        return (codes ^ -128).view(torch.int32)
    pairs = (codes + 8).view(torch.uint8).view(len(codes), -1, 2)
    return (pairs[..., 0] | (pairs[..., 1] << 4)).view(torch.int32)


def unpack(packed: torch.Tensor, bits: int, k: int) -> torch.Tensor:
    """The int8 [N, K] of ``pack``; K may end inside the last int32."""
    if bits == 8:
        return packed.contiguous().view(torch.int8)[:, :k] ^ -128
    pairs = packed.contiguous().view(torch.uint8)
    both = torch.stack((pairs & 15, pairs >> 4), dim=2)
    return both.view(torch.int8).flatten(1)[:, :k] - 8


def stored(codes: torch.Tensor, scale: torch.Tensor, scheme: Scheme) -> dict[str, torch.Tensor]:
    """The tensors of a layer, under the names of ``Scheme.tensors``."""
    if scheme.format == INT:
        return {"weight": codes, "weight_scale": scale}
    return {
        "weight_packed": pack(codes, scheme.bits),
        "weight_scale": scale,
        "weight_shape": torch.tensor(codes.shape),
    }
