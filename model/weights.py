"""Checkpoint -> ``Model``: one short table says which stored tensors make each parameter.

Everything is checked by name and shape before the first byte is converted, and a number that is
not finite is refused as it is read.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from model import block_matrix
from model.block_matrix import BlockMatrix, Matrix
from model.compressed import Float8, Scheme, takes_group
from model.config import ModelConfig
from model.quantized_matrix import Int4Experts, Int8Experts, Part, Parts, Weight
from model.quantized_weights import (
    read_dequantised,
    read_experts,
    read_matrix,
    read_packed_experts,
)
from model.qwen3 import Experts, Layer, Linear, Model
from model.sources import Source
from model.threads import cpu_threads


@dataclass(frozen=True)
class Parameter:
    """One parameter: the stored tensors stacked along dim 0 and the shape of each."""

    sources: tuple[tuple[str, tuple[int, ...]], ...]
    experts: int = 0  # above 0: it becomes [experts, rows, columns]


_EXPERTS = ".mlp.experts."  # in names of their tensors
Found = Weight | Int8Experts | Int4Experts  # what a parameter becomes


def layer_table(config: ModelConfig, index: int) -> dict[str, Parameter]:
    """Our name of each parameter of a layer -> what is stored for it."""
    c, prefix = config, f"model.layers.{index}."
    H, I = c.hidden_size, c.intermediate_size  # noqa: E741
    outputs = {
        "qkv_proj": [
            ("self_attn.q_proj", c.q_size),
            ("self_attn.k_proj", c.kv_size),
            ("self_attn.v_proj", c.kv_size),
        ],
        "o_proj": [("self_attn.o_proj", H)],
    }
    if not c.is_sparse(index):
        outputs["gate_up_proj"] = [("mlp.gate_proj", I), ("mlp.up_proj", I)]
        outputs["down_proj"] = [("mlp.down_proj", H)]
    inputs = {"qkv_proj": H, "o_proj": c.q_size, "gate_up_proj": H, "down_proj": I}
    biased = {
        "qkv_proj": c.qkv_bias,
        "o_proj": c.o_bias,
        "gate_up_proj": c.mlp_bias,
        "down_proj": c.mlp_bias,
    }
    norms = {"input_layernorm": H, "post_attention_layernorm": H}
    if c.qk_norm:
        norms |= {"self_attn.q_norm": c.head_dim, "self_attn.k_norm": c.head_dim}

    table = {}
    for name, parts in outputs.items():
        table[f"{name}.weight"] = Parameter(
            tuple((f"{prefix}{part}.weight", (rows, inputs[name])) for part, rows in parts)
        )
        if biased[name]:
            table[f"{name}.bias"] = Parameter(
                tuple((f"{prefix}{part}.bias", (rows,)) for part, rows in parts)
            )
    for name, size in norms.items():
        ours = name.removeprefix("self_attn.")
        table[ours] = Parameter(((f"{prefix}{name}.weight", (size,)),))
    if c.is_sparse(index):
        table |= _expert_table(config, f"{prefix}mlp.")
    return table


def _expert_table(config: ModelConfig, prefix: str) -> dict[str, Parameter]:
    """Of a layer's experts, each of which is stored by itself; see ``model.sources``."""
    assert config.mixture is not None
    E, H, I = config.mixture.num_experts, config.hidden_size, config.mixture.intermediate_size  # noqa: E741

    def stacked(parts: tuple[str, ...], shape: tuple[int, int]) -> Parameter:
        names = [f"{prefix}experts.{e}.{part}.weight" for e in range(E) for part in parts]
        return Parameter(tuple((name, shape) for name in names), experts=E)

    return {
        "experts.router": Parameter(((f"{prefix}gate.weight", (E, H)),)),
        "experts.gate_up_proj": stacked(("gate_proj", "up_proj"), (I, H)),
        "experts.down_proj": stacked(("down_proj",), (H, I)),
    }


def outer_table(config: ModelConfig) -> dict[str, Parameter]:
    """The same for what lies outside the layers."""
    matrix = (config.vocab_size, config.hidden_size)
    table = {
        "embed_tokens": Parameter((("model.embed_tokens.weight", matrix),)),
        "norm": Parameter((("model.norm.weight", (config.hidden_size,)),)),
    }
    if not config.tie_word_embeddings:
        table["lm_head"] = Parameter((("lm_head.weight", matrix),))
    return table


def stored_tensors(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(name, shape) of each tensor that a checkpoint of this network stores unquantised."""
    for table in _tables(config):
        for parameter in table.values():
            yield from parameter.sources


def _tables(config: ModelConfig) -> list[dict[str, Parameter]]:
    return [outer_table(config), *(layer_table(config, i) for i in range(config.num_layers))]


def load_model(
    config: ModelConfig, source: Source, *, dtype: torch.dtype, device: torch.device
) -> Model:
    """Read all parameters as ``dtype`` on ``device``.

    In fp32 on the CPU, matrices that a GGUF file stores in 4- or 8-bit blocks stay so. Layers that
    the config calls quantised stay so everywhere, but for those whose scheme does not keep codes.

    Raises:
        ValueError: a tensor is missing, unexpected, of a wrong shape or not finite; a scale is not
            above 0; a router is quantised, or experts are in a way that ``fused_moe`` does not
            take; a file is missing or truncated; config and file disagree about tied embeddings.
    """
    check_names(config, source)

    def read(table: dict[str, Parameter]) -> dict[str, Found]:
        return {
            # Routers and experts are not in blocks, which fused_moe does not take.
            name: _read(config, p, source, dtype, device, not name.startswith("experts."))
            for name, p in table.items()
        }

    with cpu_threads(1):  # small tensors: threads would wait for each other more than they work
        top = read(outer_table(config))
        embed_tokens = top["embed_tokens"]
        assert isinstance(embed_tokens, Matrix)  # no embedding is quantised in a folder
        _check_tie(config, source, embed_tokens)
        return Model(
            config=config,
            embed_tokens=embed_tokens,
            layers=[_layer(config, read(layer_table(config, i))) for i in range(config.num_layers)],
            norm=_vector(top["norm"]),
            lm_head=Linear(_weight(top.get("lm_head", embed_tokens))),
        )


def load_layer(
    config: ModelConfig, source: Source, index: int, *, dtype: torch.dtype, device: torch.device
) -> Layer:
    """One decoder layer, for those who go through a network layer by layer; no matrix in blocks."""
    table = layer_table(config, index)
    with cpu_threads(1):
        found = {n: _read(config, p, source, dtype, device, False) for n, p in table.items()}
        return _layer(config, found)


def load_outer(
    config: ModelConfig, source: Source, name: str, *, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """``embed_tokens``, ``norm`` or ``lm_head`` (the embedding, where the two are tied)."""
    table = outer_table(config)
    parameter = table.get(name, table["embed_tokens"])
    return _vector(_read(config, parameter, source, dtype, device, False))


def load_experts(
    config: ModelConfig, source: Source, index: int, *, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """The experts of a layer on the CPU, under the names that transformers 5 has when stacked."""
    table, cpu = layer_table(config, index), torch.device("cpu")
    names = {part: f"experts.{part}" for part in ("gate_up_proj", "down_proj")}
    return {
        f"model.layers.{index}.mlp.experts.{part}": _vector(
            _read_plain(config, table[ours], source, dtype, cpu, keep_blocks=False)
        )
        for part, ours in names.items()
    }


def _layer(config: ModelConfig, p: dict[str, Found]) -> Layer:
    def vector(name: str) -> torch.Tensor | None:
        return _vector(p[name]) if name in p else None

    def linear(name: str) -> Linear:
        return Linear(_weight(p[f"{name}.weight"]), vector(f"{name}.bias"))

    mlp: dict[str, Any]
    if "experts.router" in p:
        assert config.mixture is not None
        mixture = config.mixture
        experts = Experts(
            router=_vector(p["experts.router"]),
            gate_up_proj=_stack(p["experts.gate_up_proj"]),
            down_proj=_stack(p["experts.down_proj"]),
            top_k=mixture.num_experts_per_tok,
            renormalize=mixture.norm_topk_prob,
        )
        mlp = {"experts": experts}
    else:
        mlp = {name: linear(name) for name in ("gate_up_proj", "down_proj")}
    return Layer(
        input_layernorm=_vector(p["input_layernorm"]),
        qkv_proj=linear("qkv_proj"),
        q_norm=vector("q_norm"),
        k_norm=vector("k_norm"),
        o_proj=linear("o_proj"),
        post_attention_layernorm=_vector(p["post_attention_layernorm"]),
        **mlp,
    )


def _vector(parameter: Found) -> torch.Tensor:
    assert isinstance(parameter, torch.Tensor)  # matrices of linear layers alone are quantised
    return parameter


def _weight(parameter: Found) -> Weight:
    assert not isinstance(parameter, Int8Experts | Int4Experts)
    return parameter


def _stack(parameter: Found) -> torch.Tensor | Int8Experts | Int4Experts:
    assert isinstance(parameter, torch.Tensor | Int8Experts | Int4Experts)
    return parameter


def empty_matrix(rows: int, cols: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Uninitialised [rows, cols]; on the CPU in the order in which fp32 decode multiplies fastest.

    A decode step multiplies one vector by each matrix. With at least as many outputs as inputs
    MKL does that on all cores if the matrix is stored input-major (a transposed [cols, rows]) and
    on one core if not: 6.6 against 12.7 ms for 49152 x 576. With fewer outputs the usual order is
    faster (0.26 against 0.37 ms for 576 x 1536), and half precision, which goes to oneDNN, always
    wants it. Measured with torch 2.13 on two cores of an AMD EPYC (Zen 3).
    """
    if device.type == "cpu" and dtype == torch.float32 and rows >= cols:
        return torch.empty(cols, rows, dtype=dtype).t()
    return torch.empty(rows, cols, dtype=dtype, device=device)


def _read(
    config: ModelConfig,
    parameter: Parameter,
    source: Source,
    dtype: torch.dtype,
    device: torch.device,
    keep_blocks: bool = True,
) -> Found:
    """The stored tensors of one parameter, stacked, converted and moved."""

    def read(part: Parameter, scheme: Scheme | None) -> Part:
        if scheme is None:
            return _read_plain(config, part, source, dtype, device, keep_blocks)
        return read_matrix(part.sources, scheme, source, dtype, device)

    schemes = []
    for name, shape in parameter.sources:
        scheme = _scheme(config, source, name, shape)
        schemes.append(scheme if _keeps_codes(scheme, name, shape, dtype) else None)
    quantised = [scheme for scheme in schemes if scheme is not None]
    if parameter.experts and quantised:
        if quantised[0].bits == 4:  # then all are, in groups of one size
            return read_packed_experts(
                parameter.sources, quantised, parameter.experts, source, dtype, device
            )
        return read_experts(parameter.sources, quantised, parameter.experts, source, device)
    if len(set(schemes)) == 1:
        return read(parameter, schemes[0])
    pairs = zip(parameter.sources, schemes, strict=True)
    return Parts(tuple(read(Parameter((one,)), scheme) for one, scheme in pairs))


def named_scheme(config: ModelConfig, name: str, shape: tuple[int, ...]) -> Scheme | None:
    """What the config says of a stored tensor; biases, norms and embeddings are left alone."""
    if config.quantization is None or len(shape) != 2 or "embed_tokens" in name:
        return None
    return config.quantization.scheme_of(name.removesuffix(".weight"))


def _keeps_codes(
    scheme: Scheme | None, name: str, shape: tuple[int, ...], dtype: torch.dtype
) -> bool:
    """Whether a stored tensor stays in codes; if not it becomes one of floats, or is stored so."""
    if scheme is None:
        return False
    return scheme.keeps_experts if _EXPERTS in name else scheme.keeps_codes(shape[1], dtype)


def _scheme(
    config: ModelConfig, source: Source, name: str, shape: tuple[int, ...]
) -> Scheme | None:
    """How a stored tensor is quantised.

    Raises:
        ValueError: a router is quantised, or an expert in another way than ``fused_moe`` takes.
    """
    layer = name.removesuffix(".weight")
    scheme = named_scheme(config, name, shape)
    router = layer.endswith(".mlp.gate")
    if scheme is None or not (router or _EXPERTS in layer):
        return scheme
    if f"{layer}.{scheme.scales}" not in source.shapes:
        # transformers 5 has classes for both; a config that says Linear means neither. A weight in
        # FP8 has the name of one in 16 bits: without scales it must not pass for that.
        return None if router or not isinstance(scheme, Float8) else scheme
    if router:
        raise ValueError(
            f"{source.where}: expected routers that are not quantised, got one of {scheme.words}: "
            f"{layer}"
        )
    if not scheme.keeps_experts:
        return scheme
    if not _takes_experts(scheme, shape[1]):
        raise ValueError(
            f"{source.where}: expected experts in 16 bits, in int8 with a scale a channel (W8A8 or "
            "W8A16), or in 4 bits with a scale a channel or for 32, 64, 128.. inputs, got "
            f"{scheme.words} for {layer}"
        )
    if scheme.bits == 4 and shape[1] % 8:
        raise ValueError(
            f"{source.where}: expected experts in 4 bits to have inputs that divide by 8, got "
            f"{shape[1]} for {layer}"
        )
    return scheme


def _takes_experts(scheme: Scheme, inputs: int) -> bool:
    """Whether ``fused_moe`` multiplies experts with codes and scales like these."""
    size = inputs if scheme.group is None else scheme.group
    if scheme.bits == 8:
        return scheme.group is None
    return size == inputs or takes_group(size)


def _check_experts(config: ModelConfig, source: Source, table: dict[str, Parameter]) -> None:
    """Refuses a layer whose experts one call of ``fused_moe`` cannot take."""
    # Words of a scheme: the first matrix in it. Two projections may have groups of two sizes.
    quantised: dict[str, str] = {}
    for parameter in table.values():
        if not parameter.experts:
            continue
        kinds: dict[str, str] = {}
        for name, shape in parameter.sources:
            scheme = _scheme(config, source, name, shape)
            if scheme is not None and not scheme.keeps_experts:
                scheme = None
            words = "16 bits" if scheme is None else scheme.words
            kinds.setdefault(words, name.removesuffix(".weight"))
            if scheme is not None:
                quantised.setdefault(words.partition(" ")[0], kinds[words])
        for several in (kinds, quantised):
            if len(several) > 1:
                (one, first), (other, second) = list(several.items())[:2]
                raise ValueError(
                    f"{source.where}: expected the experts of a layer to be quantised alike, got "
                    f"{one} for {first} and {other} for {second}"
                )


def _read_plain(
    config: ModelConfig,
    parameter: Parameter,
    source: Source,
    dtype: torch.dtype,
    device: torch.device,
    keep_blocks: bool,
) -> Matrix:
    (_, first) = parameter.sources[0]
    if (
        keep_blocks
        and len(first) == 2
        and device.type == "cpu"
        and dtype == torch.float32
        and block_matrix.can_multiply()
    ):
        matrix = _read_blocks(parameter, source)
        if matrix is not None:
            return matrix
    rows = sum(shape[0] for _, shape in parameter.sources)
    if len(first) == 1:
        out = torch.empty(rows, dtype=dtype, device=device)
    elif parameter.experts:
        out = torch.empty(rows, first[1], dtype=dtype, device=device)
    else:
        out = empty_matrix(rows, first[1], dtype, device)
    row = 0
    for name, shape in parameter.sources:
        scheme = _scheme(config, source, name, shape)
        if scheme is not None:
            part = read_dequantised(name, shape, scheme, source, dtype, device)
        else:
            part = source.read(name)
            if not part.is_floating_point() or part.dtype.itemsize == 1:  # FP8 has scales
                raise ValueError(
                    f"{source.where}: expected floats in {name}, which config.json does not call "
                    f"quantised, got {part.dtype}"
                )
            check_finite(source, name, part)
        out[row : row + shape[0]].copy_(part)
        row += shape[0]
    return out.view(parameter.experts, -1, first[1]) if parameter.experts else out


def _read_blocks(parameter: Parameter, source: Source) -> BlockMatrix | None:
    """The parameter in the blocks of its file, where all of it is stored in one such format."""
    parts = []
    for name, _ in parameter.sources:
        found = source.blocks(name)
        if found is None:
            return None
        check_finite(source, name, found.scale)
        if found.low is not None:
            check_finite(source, name, found.low)
        parts.append(found)
    return block_matrix.stack(parts)


def dequantised_note(config: ModelConfig, source: Source, dtype: torch.dtype) -> str | None:
    """One line about the layers that take more memory than their checkpoint; None: there are none.

    Bytes are those of the codes, without scales.
    """
    words: list[str] = []
    codes = weights = 0
    for name, shape in stored_tensors(config):
        scheme = _scheme(config, source, name, shape)
        if scheme is not None and not _keeps_codes(scheme, name, shape, dtype):
            kind = f"{'experts' if _EXPERTS in name else 'linear layers'} of {scheme.words}"
            if kind not in words:
                words.append(kind)
            codes += shape[0] * shape[1] * scheme.bits // 8
            weights += shape[0] * shape[1] * dtype.itemsize
    if not words:
        return None
    kind = str(dtype).removeprefix("torch.")
    return (
        f"{' and '.join(words)}, for which there is no kernel in {kind}, are dequantised: "
        f"{weights / 1e9:.3g} GB instead of {codes / 1e9:.3g}"
    )


def say_dequantised(config: ModelConfig, source: Source, dtype: torch.dtype) -> None:
    """``dequantised_note`` to whoever runs a command."""
    note = dequantised_note(config, source, dtype)
    if note is not None:
        print(note, file=sys.stderr, flush=True)


def check_finite(source: Source, name: str, values: torch.Tensor) -> None:
    """Refuses NaN and Inf in what was read as ``name``."""
    # A sum is NaN or Inf if any term is, and costs no second tensor; only then look closer.
    if not torch.isfinite(values.sum(dtype=torch.float32)) and not torch.isfinite(values).all():
        bad = int((~torch.isfinite(values)).sum())
        raise ValueError(f"{source.where}: expected finite weights, got {bad} NaN or Inf in {name}")


def check_names(config: ModelConfig, source: Source) -> None:
    """Every tensor that the network needs is there in its shape, and no other."""
    for table in _tables(config):
        _check_experts(config, source, table)
    wanted: dict[str, tuple[int, ...]] = {}
    optional: dict[str, tuple[int, ...]] = {}
    for name, shape in stored_tensors(config):
        scheme = _scheme(config, source, name, shape)
        if scheme is None:
            wanted[name] = shape
        else:
            layer = name.removesuffix(".weight")
            stored = scheme.tensors(layer, (shape[0], shape[1]))
            wanted |= {f"{layer}.{part}": size for part, size in stored.items()}
            for part, size in scheme.optional((shape[0], shape[1])).items():
                if f"{layer}.{part}" in source.shapes:
                    optional[f"{layer}.{part}"] = size
    missing = [name for name in wanted if name not in source.shapes]
    if missing == ["lm_head.weight"]:
        raise ValueError(
            f"{source.where}: expected lm_head.weight because tie_word_embeddings is false, got "
            "none; if the checkpoint ties them, set tie_word_embeddings to true in config.json"
        )
    if missing:
        raise ValueError(
            f"{source.where}: expected tensor {missing[0]}, got none of that name "
            f"({len(missing)} of {len(wanted)} tensors are missing)"
        )
    biases = [name for name in optional if name.endswith(".bias") and name not in wanted]
    wanted |= optional
    for name, shape in wanted.items():
        if source.shapes[name] != shape:
            raise ValueError(
                f"{source.where}: expected {name} of shape {list(shape)}, got "
                f"{list(source.shapes[name])}"
            )
    # Old Llama checkpoints store the rotary frequencies, which follow from the config.
    extra = [
        name
        for name in source.shapes
        if name not in wanted and name != "lm_head.weight" and "rotary_emb.inv_freq" not in name
    ]
    if extra:
        raise ValueError(
            f"{source.where}: expected the {len(wanted)} tensors of a {config.model_type} network "
            f"of {config.num_layers} layers, got {len(extra)} more, the first {extra[0]}"
        )
    for name in biases:
        if source.read(name).any():
            raise ValueError(
                f"{source.where}: expected zeros in {name}, as a {config.model_type} network with "
                "this config has no bias there, got others"
            )


def _check_tie(config: ModelConfig, source: Source, embed_tokens: Matrix) -> None:
    """A tied network may store its lm_head too, but then it must be the embedding."""
    if not config.tie_word_embeddings or "lm_head.weight" not in source.shapes:
        return
    head, embed_tokens = source.read("lm_head.weight"), _vector(embed_tokens)
    if head.shape != embed_tokens.shape or not torch.equal(
        head.to(embed_tokens.dtype), embed_tokens.cpu()
    ):
        raise ValueError(
            f"{source.where}: expected lm_head.weight to equal model.embed_tokens.weight because "
            "tie_word_embeddings is true, got a different one; one of the two is wrong"
        )
