"""The folder of a quantised checkpoint, written tensor by tensor; it takes its place at the end."""

from __future__ import annotations

import contextlib
import json
import math
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from model.quantize_plan import Plan, describe_plan, expert_layers, joined_layers

if TYPE_CHECKING:
    import torch

    from model.checkpoint import Checkpoint
    from model.compressed import Scheme

# What a folder is copied with, beside its weights and config.json.
_COPIED = (
    "tokenizer*", "vocab.*", "merges.txt", "special_tokens_map.json", "added_tokens.json",
    "chat_template.*", "generation_config.json", "LICENSE*", "NOTICE*",
)  # fmt: skip
_SHARD_BYTES = 4 * 2**30


class _Shards:
    """Safetensors files of at most about 4 GiB, with an index where there are several."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.files = folder, list[dict[str, int]]()
        self.waiting: dict[str, torch.Tensor] = {}

    def add(self, name: str, tensor: torch.Tensor) -> None:
        self.waiting[name] = tensor
        if sum(t.nbytes for t in self.waiting.values()) >= _SHARD_BYTES:
            self._write()

    def _write(self) -> None:
        from safetensors.torch import save_file

        path = self.folder / f"part-{len(self.files)}"
        save_file(self.waiting, path, metadata={"format": "pt"})
        path.chmod(0o644)  # it comes readable by its owner alone
        self.files.append({name: t.nbytes for name, t in self.waiting.items()})
        self.waiting = {}

    def close(self) -> None:
        if self.waiting:
            self._write()
        count, names = len(self.files), dict[str, str]()
        for i, tensors in enumerate(self.files):
            stem = "model" if count == 1 else f"model-{i + 1:05d}-of-{count:05d}"
            (self.folder / f"part-{i}").rename(self.folder / f"{stem}.safetensors")
            names |= {name: f"{stem}.safetensors" for name in tensors}
        if count > 1:
            total = sum(sum(tensors.values()) for tensors in self.files)
            index = {"metadata": {"total_size": total}, "weight_map": names}
            _write_json(self.folder / "model.safetensors.index.json", index)


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def write_folder(
    checkpoint: Checkpoint,
    folder: Path,
    plan: Plan,
    factors: Mapping[str, torch.Tensor],
    on_tensor: Callable[[], None] = lambda: None,
) -> dict[str, int]:
    """A quantised checkpoint in an empty folder, read and written tensor by tensor.

    Args:
        factors: of ``smoothing_factors``, or none.
        on_tensor: called after each stored tensor.

    Returns:
        linear_bytes: of the decoder's linear layers, scales included; linear_weights: their
        numbers; expert_bytes: of routers and experts; bytes: of all tensors.
    """
    config, source = checkpoint.config, checkpoint.source
    linear = {name for group in joined_layers(config) for name in group}
    names = ("linear_bytes", "linear_weights", "expert_bytes", "bytes")
    shards, counts = _Shards(folder), dict.fromkeys(names, 0)

    def put(parts: Mapping[str, torch.Tensor], *kinds: str) -> None:
        for part, value in parts.items():
            shards.add(part, value.contiguous())
            for kind in (*kinds, "bytes"):
                counts[kind] += value.nbytes

    for name, shape in source.shapes.items():
        if ".mlp.experts." in name:
            continue  # below, those of a layer in one
        layer = name.removesuffix(".weight")
        parts = _parts(checkpoint, name, plan.schemes.get(layer), factors)
        if layer in linear:
            put(parts, "linear_bytes")
            counts["linear_weights"] += math.prod(shape)
        else:
            put(parts, *(["expert_bytes"] if layer.endswith(".mlp.gate") else []))
        on_tensor()
    for index, matrices in expert_layers(config).items():
        scheme = plan.experts.get(index)
        if scheme is None:
            put(_stacked(checkpoint, index), "expert_bytes")
        for matrix in matrices:
            if scheme is not None:
                put(_parts(checkpoint, f"{matrix}.weight", scheme, factors), "expert_bytes")
            on_tensor()
    shards.close()
    _write_json(folder / "config.json", _config(checkpoint, plan))
    _write_rest(checkpoint, folder)
    return counts


def _parts(
    checkpoint: Checkpoint,
    name: str,
    scheme: Scheme | None,
    factors: Mapping[str, torch.Tensor],
) -> dict[str, torch.Tensor]:
    """What is stored of a tensor, by name: smoothed, then quantised."""
    from model.compressed import quantise, stored

    tensor = _read(checkpoint, name)
    dtype = tensor.dtype
    if (factor := factors.get(name)) is not None:
        values = tensor.float()
        tensor = (values / factor if tensor.dim() == 1 else values * factor).to(dtype)
    if scheme is None:
        return {name: tensor}
    parts = stored(*quantise(tensor, scheme, dtype), scheme)
    return {f"{name.removesuffix('.weight')}.{part}": value for part, value in parts.items()}


def _stacked(checkpoint: Checkpoint, layer: int) -> dict[str, torch.Tensor]:
    """The experts of a layer as they are, all in one tensor or two."""
    from model.weights import load_experts

    some = f"model.layers.{layer}.mlp.experts.0.down_proj.weight"
    dtype = _read(checkpoint, some).dtype
    return load_experts(checkpoint.config, checkpoint.source, layer, dtype=dtype)


def _read(checkpoint: Checkpoint, name: str) -> torch.Tensor:
    """A finite tensor, in the type that it is stored in; what GGUF has in blocks is bfloat16."""
    import torch

    from model.weights import check_finite

    tensor = checkpoint.source.read(name)
    if tensor.is_floating_point():
        check_finite(checkpoint.source, name, tensor)
        if not checkpoint.path.is_dir():
            tensor = tensor.to(torch.bfloat16)
    return tensor


def _config(checkpoint: Checkpoint, plan: Plan) -> dict[str, Any]:
    from model.config import read_json, to_hf

    if checkpoint.path.is_dir():
        config = read_json(checkpoint.path / "config.json")
    else:
        config = to_hf(checkpoint.config) | {"dtype": "bfloat16"}
    quantised = plan.schemes or plan.experts
    return config | ({"quantization_config": describe_plan(plan)} if quantised else {})


def _write_rest(checkpoint: Checkpoint, folder: Path) -> None:
    """The tokeniser, and what generation needs to know."""
    if checkpoint.path.is_dir():
        for pattern in _COPIED:
            for path in checkpoint.path.glob(pattern):
                if path.is_file():
                    shutil.copyfile(path, folder / path.name)
        return
    checkpoint.tokenizer.save_pretrained(folder)
    if checkpoint.config.eos_token_ids:
        ids = list(checkpoint.config.eos_token_ids)
        _write_json(folder / "generation_config.json", {"eos_token_id": ids})


@contextlib.contextmanager
def replacing(out: Path) -> Iterator[Path]:
    """A new folder beside ``out`` that takes its place at the end, or vanishes on an error."""
    out = out.resolve()  # of a link, what it points to: the link stays
    temporary = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    temporary.chmod(0o755)
    try:
        yield temporary
        if out.exists():
            old = temporary.with_name(f"{temporary.name}-old")
            out.rename(old)
            try:
                temporary.rename(out)
            except BaseException:
                old.rename(out)
                raise
            shutil.rmtree(old)
        else:
            temporary.rename(out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def check_out(out: Path, model: Path, overwrite: bool) -> None:
    """Refuses a place that cannot, or should not, be written to."""
    if not out.resolve().parent.is_dir() or not out.name:
        raise ValueError(f"--out must be a folder in one that is there, got {out}")
    if not out.exists():
        return
    if not out.is_dir():
        raise ValueError(f"--out must be a folder, got a file {out}")
    if out.resolve() in (model.resolve(), *model.resolve().parents):
        raise ValueError(f"--out must be another folder than that of --model, got {out}")
    if not overwrite:
        raise ValueError(f"--out must not be there without --overwrite, got {out}")
    if any(out.iterdir()) and not (out / "config.json").exists():
        raise ValueError(f"--out must be empty or a checkpoint to be overwritten, got {out}")
