"""Read a GGUF file: metadata, tensor table, tensors as fp32.

The header is parsed here, not by ``gguf.GGUFReader``, which makes several NumPy views for each of
the 100,000 strings of a tokenizer and takes seconds over it; one pass with ``struct`` takes tenths
of a second. Type codes, block sizes and all but the commonest dequantisation are the ``gguf``
package's. Format: docs/gguf.md of ggml.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize

from model.block_matrix import Blocks

# Value types of the specification, as codes of the struct module.
_SCALARS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True)
class GgufTensor:
    """Where one tensor lies. ``shape`` is in PyTorch's order (GGUF writes it reversed)."""

    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    start: int
    row_bytes: int


@dataclass(frozen=True)
class GgufFile:
    """An open file: ``metadata`` as plain Python values, ``tensors`` by name, bytes mapped."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]
    data: torch.Tensor  # uint8 view of the whole file

    def rows(self, name: str) -> torch.Tensor:
        """The stored bytes of a tensor: uint8 [rows, row_bytes], no copy."""
        t = self.tensors[name]
        n_rows = 1
        for size in t.shape[:-1]:
            n_rows *= size
        return self.data[t.start : t.start + n_rows * t.row_bytes].view(n_rows, t.row_bytes)


class _Cursor:
    """Reads values in file order."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self.data, self.path, self.at = data, path, 0

    def take(self, code: str) -> Any:
        try:
            (value,) = struct.unpack_from("<" + code, self.data, self.at)
        except struct.error:
            raise ValueError(
                f"{self.path}: expected a whole GGUF header, got a truncated file"
            ) from None
        self.at += struct.calcsize(code)
        return value

    def text(self) -> str:
        length = self.take("Q")
        end = self.at + length
        if end > len(self.data):
            raise ValueError(f"{self.path}: expected a whole GGUF header, got a truncated file")
        raw = self.data[self.at : end]
        self.at = end
        return raw.decode("utf-8", errors="replace")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            return self.array()
        if kind not in _SCALARS:
            raise ValueError(f"{self.path}: expected a GGUF value type of 0 to 12, got {kind}")
        return self.take(_SCALARS[kind])

    def array(self) -> list[Any]:
        kind, length = self.take("I"), self.take("Q")
        code = _SCALARS.get(kind)
        if code is None:
            return [self.value(kind) for _ in range(length)]
        if self.at + length * struct.calcsize(code) > len(self.data):
            raise ValueError(f"{self.path}: expected a whole GGUF header, got a truncated file")
        values = list(struct.unpack_from(f"<{length}{code}", self.data, self.at))
        self.at += length * struct.calcsize(code)
        return values


def read_gguf(path: Path) -> GgufFile:
    """Open a GGUF file (version 2 or 3, little-endian, in one piece).

    Raises:
        ValueError: not a GGUF file, truncated, split, or of a version or type not known here.
    """
    if path.stat().st_size < 24:
        raise ValueError(f"{path}: expected a GGUF file, got {path.stat().st_size} bytes")
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    cursor = _Cursor(mapped, path)
    magic = cursor.take("4s")
    if magic != b"GGUF":
        raise ValueError(f"{path}: expected a file that starts with 'GGUF', got {magic!r}")
    version = cursor.take("I")
    if version not in (2, 3):
        raise ValueError(f"{path}: expected GGUF version 2 or 3 (little-endian), got {version}")
    n_tensors, n_fields = cursor.take("Q"), cursor.take("Q")
    metadata: dict[str, Any] = {}
    for _ in range(n_fields):
        key = cursor.text()
        metadata[key] = cursor.value(cursor.take("I"))
    if metadata.get("split.count", 1) > 1:
        raise ValueError(
            f"{path}: expected a GGUF in one file, got part of {metadata['split.count']}"
        )
    tensors = _tensor_table(cursor, n_tensors, metadata.get("general.alignment", 32))
    return GgufFile(path, metadata, tensors, torch.frombuffer(mapped, dtype=torch.uint8))


def _tensor_table(cursor: _Cursor, n_tensors: int, alignment: int) -> dict[str, GgufTensor]:
    entries = []
    for _ in range(n_tensors):
        name = cursor.text()
        shape = tuple(cursor.take("Q") for _ in range(cursor.take("I")))[::-1]
        code, offset = cursor.take("I"), cursor.take("Q")
        try:
            kind = GGMLQuantizationType(code)
        except ValueError:
            raise ValueError(f"{cursor.path}: tensor {name} has unknown type {code}") from None
        entries.append((name, shape, kind, offset))
    base = -(-cursor.at // alignment) * alignment
    tensors = {}
    for name, shape, kind, offset in entries:
        per_block, block_bytes = GGML_QUANT_SIZES[kind]
        if shape[-1] % per_block:
            raise ValueError(
                f"{cursor.path}: rows of {name} must be a multiple of {per_block} for "
                f"{kind.name}, got {shape[-1]}"
            )
        row_bytes = shape[-1] // per_block * block_bytes
        size = row_bytes
        for n in shape[:-1]:
            size *= n
        if base + offset + size > len(cursor.data):
            raise ValueError(
                f"{cursor.path}: expected {base + offset + size} bytes for tensor {name}, got a "
                f"file of {len(cursor.data)} (truncated?)"
            )
        tensors[name] = GgufTensor(shape, kind, base + offset, row_bytes)
    return tensors


def blocks(rows: torch.Tensor, kind: GGMLQuantizationType) -> Blocks | None:
    """Stored rows, uint8 [R, row_bytes], as integer codes with scales; None for other formats.

    Bytes are transposed first, so that every later step runs along R with one scale a row.
    """
    n_rows = rows.shape[0]
    if kind.name == "Q8_0":  # fp16 scale, 32 int8
        block = rows.view(n_rows, -1, 34)
        codes = block[..., 2:].reshape(n_rows, -1).t().contiguous()  # [C, R]
        return Blocks(codes.bitwise_xor_(0x80), -128, _heads(block, 1)[0], None)  # unsigned
    if kind.name not in ("Q4_0", "Q4_1"):  # fp16 scale (and minimum), 32 4-bit: low halves first
        return None
    n_heads = 1 if kind.name == "Q4_0" else 2
    block = rows.view(n_rows, -1, 2 * n_heads + 16)
    packed = block[..., 2 * n_heads :].reshape(n_rows, -1).t().contiguous()
    packed = packed.view(-1, 1, 16, n_rows)  # [n_blocks, 1, 16, R]
    codes = torch.cat((packed & 15, packed >> 4), dim=1).view(-1, n_rows)
    heads = _heads(block, n_heads)
    return Blocks(codes, *((-8, heads[0], None) if n_heads == 1 else (0, heads[0], heads[1])))


def _heads(block: torch.Tensor, count: int) -> torch.Tensor:
    """The ``count`` fp16 numbers that head each block: fp32 [count, n_blocks, R]."""
    heads = block[..., : 2 * count].contiguous().view(torch.float16)  # [R, n_blocks, count]
    return heads.permute(2, 1, 0).float().contiguous()


def dequantised(rows: torch.Tensor, kind: GGMLQuantizationType) -> torch.Tensor:
    """Stored rows as values: uint8 [R, row_bytes] -> fp32 [R, C], exactly what ggml gives.

    The commonest formats run in PyTorch, the rest in NumPy.
    """
    if kind.name == "F32":
        return rows.view(torch.float32)
    if kind.name in ("F16", "BF16"):
        return rows.view(torch.float16 if kind.name == "F16" else torch.bfloat16).float()
    found = blocks(rows, kind)
    if found is not None:
        return found.values()
    try:
        return torch.from_numpy(dequantize(rows.numpy(), kind))
    except NotImplementedError:
        raise ValueError(
            f"GGUF: expected a type that can be dequantised, got {kind.name}"
        ) from None
