"""Checkpoint files, safetensors or GGUF, seen alike: tensors under Hugging Face names.

Experts are seen one by one, as published checkpoints store them (``mlp.experts.7.up_proj.weight``),
however they lie in the file: transformers 5 may stack all of a layer, gate and up joined, and GGUF
stacks each of the three. Such a tensor is read piece by piece, so nobody needs memory for it twice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from model.block_matrix import Blocks
from model.config import ModelConfig, read_json
from model.gguf_file import GgufFile, blocks, dequantised

_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class Source:
    """A checkpoint: ``shapes`` by Hugging Face name; ``read`` gives a tensor on the CPU."""

    where: Path
    shapes: dict[str, tuple[int, ...]]
    read: Callable[[str], torch.Tensor]
    # The same in the file's own blocks, or None where they are not of a kind that is multiplied.
    blocks: Callable[[str], Blocks | None] = lambda name: None


# ---- safetensors -----------------------------------------------------------------------------


def open_safetensors(folder: Path) -> Source:
    """The safetensors files of a Hugging Face folder: sharded with an index, or one file."""
    index = folder / _INDEX
    if index.exists():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ValueError(f"{index}: expected a weight_map of tensor names, got {weight_map!r}")
        files = {name: folder / file for name, file in weight_map.items()}
        for path in dict.fromkeys(files.values()):
            if not path.exists():
                raise ValueError(f"{index}: expected a file {path.name}, which it names, got none")
    elif (folder / "model.safetensors").exists():
        files = {}
    else:
        raise ValueError(
            f"{folder}: expected {_INDEX} or model.safetensors, got neither (only safetensors "
            "and GGUF are read)"
        )
    opened = {
        path: _open_file(path)
        for path in dict.fromkeys(files.values() if files else [folder / "model.safetensors"])
    }
    if not files:
        ((path, handle),) = opened.items()
        files = {name: path for name in handle.keys()}  # noqa: SIM118  (not a dict)
    shapes: dict[str, tuple[int, ...]] = {}
    pieces: dict[str, Piece] = {}
    stored = {path: frozenset(handle.keys()) for path, handle in opened.items()}
    for name, path in files.items():
        if name not in stored[path]:
            raise ValueError(
                f"{index}: expected tensor {name} in {path.name}, got none of that name there"
            )
        shape = tuple(opened[path].get_slice(name).get_shape())
        if name.endswith(_STACKED):
            found = stacked_experts(folder, name, shape)
            pieces |= found
            shapes |= {piece: (p.rows.stop - p.rows.start, shape[2]) for piece, p in found.items()}
        else:
            shapes[name] = shape

    def read(name: str) -> torch.Tensor:
        piece = pieces.get(name)
        tensor: torch.Tensor
        if piece is None:
            tensor = opened[files[name]].get_tensor(name)
        else:
            tensor = opened[files[piece.name]].get_slice(piece.name)[piece.expert, piece.rows]
        return tensor

    return Source(folder, shapes, read)


@dataclass(frozen=True)
class Piece:
    """What one expert has of a tensor of all: ``tensor[expert, rows]``."""

    name: str
    expert: int
    rows: slice


_STACKED = (".mlp.experts.gate_up_proj", ".mlp.experts.down_proj")


def stacked_experts(where: Path, name: str, shape: tuple[int, ...]) -> dict[str, Piece]:
    """The linear layers of the experts in a tensor as transformers 5 stacks them.

    ``gate_up_proj`` [E, 2 I, H] has the rows of gate_proj before those of up_proj; ``down_proj`` is
    [E, H, I].
    """
    prefix, _, part = name.rpartition(".")
    parts = ("gate_proj", "up_proj") if part == "gate_up_proj" else ("down_proj",)
    if len(shape) != 3 or shape[1] % len(parts):
        wanted = "[E, 2 I, H]" if len(parts) == 2 else "[E, H, I]"
        raise ValueError(f"{where}: expected {name} of shape {wanted}, got {list(shape)}")
    rows = shape[1] // len(parts)
    return {
        f"{prefix}.{e}.{part}.weight": Piece(name, e, slice(i * rows, (i + 1) * rows))
        for e in range(shape[0])
        for i, part in enumerate(parts)
    }


def _open_file(path: Path):  # type: ignore[no-untyped-def]
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        raise ValueError(
            f"{path}: expected a whole safetensors file, got {path.stat().st_size} bytes that do "
            f"not fit its header ({error}); truncated download?"
        ) from None


# ---- GGUF ------------------------------------------------------------------------------------

# Below "blk.<layer>." and outside the layers. Source: gguf-py, tensor_mapping.
_GGUF_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
}
_GGUF_EXPERTS = {
    "ffn_gate_exps": "gate_proj",
    "ffn_up_exps": "up_proj",
    "ffn_down_exps": "down_proj",
}
_GGUF_OUTER = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


def hf_name(gguf_name: str) -> str:
    """``blk.3.attn_q.weight`` -> ``model.layers.3.self_attn.q_proj.weight``; unknown: unchanged."""
    if gguf_name in _GGUF_OUTER:
        return _GGUF_OUTER[gguf_name]
    parts = gguf_name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in _GGUF_LAYER:
        return f"model.layers.{parts[1]}.{_GGUF_LAYER[parts[2]]}.{parts[3]}"
    return gguf_name


def open_gguf(file: GgufFile, config: ModelConfig) -> Source:
    """The tensors of a GGUF file under Hugging Face names and in Hugging Face order."""
    names: dict[str, str] = {}
    experts: dict[str, int] = {}  # of those that are part of a tensor: which
    for name, tensor in file.tensors.items():
        parts = name.split(".")
        if len(parts) == 4 and parts[2] in _GGUF_EXPERTS and len(tensor.shape) == 3:
            for e in range(tensor.shape[0]):
                part = f"model.layers.{parts[1]}.mlp.experts.{e}.{_GGUF_EXPERTS[parts[2]]}.weight"
                names[part], experts[part] = name, e
        else:
            names[hf_name(name)] = name
    shapes = {
        name: file.tensors[ours].shape[1:] if name in experts else file.tensors[ours].shape
        for name, ours in names.items()
    }
    heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}

    def rows(name: str) -> torch.Tensor:
        stored = file.tensors[names[name]]
        found = file.rows(names[name])
        if name in experts:
            return found.view(stored.shape[0], -1, found.shape[1])[experts[name]]
        part = name.split(".")[-2]
        if config.model_type != "llama" or part not in heads:
            return found
        # llama.cpp stores the q and k rows of Llama for interleaved RoPE: row 2i + half of each
        # head is row half * D/2 + i of the original. Undone on the stored bytes, row by row.
        if len(stored.shape) == 1:  # a bias: one row per number
            found = found.view(stored.shape[0], -1)
        pairs = found.view(heads[part], -1, 2, found.shape[1])  # [heads, D / 2, 2, row_bytes]
        return pairs.transpose(1, 2).reshape(found.shape)

    def read(name: str) -> torch.Tensor:
        return dequantised(rows(name), file.tensors[names[name]].kind).view(shapes[name])

    def read_blocks(name: str) -> Blocks | None:
        return blocks(rows(name), file.tensors[names[name]].kind)

    return Source(file.path, shapes, read, read_blocks)
