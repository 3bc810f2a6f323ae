"""Command line: a checkpoint with its linear layers in 8 or 4 bits, for this runner and others.

The folder that is written has the ``compressed-tensors`` layout. Of the schemes

    w8a8    int8 weights with a scale an output channel; activations are quantised as the network
            runs, with a scale a token (format int-quantized)
    w8a16   the same weights, activations as they are (pack-quantized, 8 bits)
    w4a16   4-bit weights with a scale for 128 inputs, activations as they are (pack-quantized).
            Where 128 does not divide the inputs of a layer, its groups are of the largest of 64,
            32, 16 and 8 inputs that does, and the command says so

all round to the nearest code. lm_head, the embedding, norms and biases stay as they are, and so do
routers and experts, for whose product quantised weights are not known here (the command says how
many bytes that is; the experts of a layer are written in one tensor, since transformers 5 reads
them only so beside quantised layers), and the layers that --sensitive names, each with those that
are computed together with it (q, k and v; gate and up). Tensors keep the type in which the
checkpoint stores them; those of a GGUF file become bfloat16, and if they were quantised there, they
are quantised a second time.

--smooth moves the outliers of activations into weights before (SmoothQuant): channel j of a norm's
output is divided by max|x_j|^alpha / max|W_j|^(1 - alpha), rounded to a power of two so that this
loses nothing, and column j of the weights behind it multiplied by the same. x is taken from --text.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from model.checkpoint import Checkpoint
    from model.compressed import Scheme
    from model.config import ModelConfig
    from model.qwen3 import Model

SCHEMES = ("w8a8", "w8a16", "w4a16")
EXAMPLES = """examples:
  python -m model.quantize --scheme w8a8 --out smollm2-w8a8
  python -m model.quantize --model path/to/Qwen3-8B --scheme w8a8 --smooth 0.5 \\
      --sensitive sensitive_layers.json --out qwen3-8b-w8a8
  python -m model.generate --model smollm2-w8a8 --prompt "Name three rivers."
"""
# What a folder is copied with, beside its weights and config.json.
_COPIED = (
    "tokenizer*", "vocab.*", "merges.txt", "special_tokens_map.json", "added_tokens.json",
    "chat_template.*", "generation_config.json", "LICENSE*", "NOTICE*",
)  # fmt: skip
_SHARD_BYTES = 4 * 2**30
_GROUPS = (128, 64, 32, 16, 8)
_EXPERTS = (r"re:.*\.mlp\.gate$", r"re:.*\.mlp\.experts\..*")  # what a config ignores for them


# ---- which layers, and how -----------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """What happens to each linear layer of the decoder, by its name."""

    schemes: dict[str, Scheme]
    kept: tuple[str, ...]  # sensitive ones
    num_experts: int = 0  # of all layers; they and their routers are never quantised


def joined_layers(config: ModelConfig) -> list[dict[str, tuple[int, int]]]:
    """Names and shapes [N, K] of the linear layers, those that are computed together in one.

    Routers and experts are not among them.
    """
    from model.weights import layer_table

    return [
        {name.removesuffix(".weight"): (shape[0], shape[1]) for name, shape in parameter.sources}
        for i in range(config.num_layers)
        for ours, parameter in layer_table(config, i).items()
        if ours.endswith("_proj.weight")
    ]


def make_plan(config: ModelConfig, scheme: str | None, sensitive: Collection[str]) -> Plan:
    """Schemes of all layers but ``sensitive`` ones and those computed together with them.

    Args:
        scheme: one of ``SCHEMES``; None keeps all as they are.

    Raises:
        ValueError: w4a16, and a layer has inputs that do not divide by 8.
    """
    from model.compressed import INT, PACKED, Scheme

    schemes, kept = {}, []
    for group in joined_layers(config):
        if scheme is None or any(name in sensitive for name in group):
            kept += list(group)
            continue
        for name, (_, inputs) in group.items():
            if scheme != "w4a16":
                form = INT if scheme == "w8a8" else PACKED
                if form == PACKED and inputs % 4:
                    raise ValueError(f"w8a16 needs inputs that divide by 4, got {inputs} of {name}")
                schemes[name] = Scheme(form, 8, None, scheme == "w8a8")
                continue
            size = next((size for size in _GROUPS if inputs % size == 0), None)
            if size is None:
                raise ValueError(f"w4a16 needs inputs that divide by 8, got {inputs} of {name}")
            schemes[name] = Scheme(PACKED, 4, size, False)
    return Plan(schemes, tuple(kept), 0 if config.mixture is None else config.mixture.total)


def describe_plan(plan: Plan) -> dict[str, Any]:
    """The ``quantization_config`` of a plan; what is kept and lm_head are ignored."""
    from model.compressed import describe

    by_scheme: dict[Scheme, list[str]] = {}
    for name, scheme in plan.schemes.items():
        kinds = by_scheme.setdefault(scheme, [])
        if (kind := name.rpartition(".")[2]) not in kinds:
            kinds.append(kind)
    groups: list[tuple[list[str], Scheme]] = [(["Linear"], scheme) for scheme in by_scheme]
    if len(groups) > 1:  # groups of other sizes: inputs of a kind are the same in all layers
        groups = [
            ([rf"re:.*\.({'|'.join(kinds)})$"], scheme) for scheme, kinds in by_scheme.items()
        ]
    experts = _EXPERTS if plan.num_experts else ()
    found: dict[str, Any] = describe(groups, ["lm_head", *experts, *plan.kept])
    return found


def read_sensitive(path: Path, config: ModelConfig) -> set[str]:
    """The layers that a file of ``python -m model.sensitivity`` flags.

    Raises:
        ValueError: no such file, another format, or the layers of another model.
    """
    from model.config import read_json

    if not path.is_file():
        raise ValueError(f"--sensitive {path}: expected a file, got none")
    found = read_json(path)
    form, version = found.get("format"), found.get("version")
    if (form, version) != ("tkernels.sensitive_layers", 1):
        raise ValueError(
            f"--sensitive {path}: expected format 'tkernels.sensitive_layers' version 1, got "
            f"{form!r} version {version!r}"
        )
    layers = found.get("layers")
    if not isinstance(layers, dict):
        raise ValueError(f"--sensitive {path}: expected an object of layers, got {layers!r}")
    ours = {name for group in joined_layers(config) for name in group}
    for names, what in (
        (sorted(layers.keys() - ours), "more, which the model lacks"),
        (sorted(ours - layers.keys()), "a file without some"),
    ):
        if names:
            raise ValueError(
                f"--sensitive {path}: expected the {len(ours)} linear layers of this model, got "
                f"{what}: {names[0]} ({len(names)} in all)"
            )
    flagged = set()
    for name, facts in layers.items():
        value = facts.get("sensitive") if isinstance(facts, dict) else facts
        if not isinstance(value, bool):
            raise ValueError(
                f"--sensitive {path}: expected sensitive to be true or false for {name}, got "
                f"{value!r}"
            )
        if value:
            flagged.add(name)
    return flagged


# ---- SmoothQuant ---------------------------------------------------------------------------------


class _NormTap:
    """The operations ``ops``; keeps the largest magnitude of each channel of each norm's output."""

    def __init__(self, ops: Any, num_norms: int) -> None:
        self._ops, self._num_norms, self._calls = ops, num_norms, 0
        self.most: dict[int, torch.Tensor] = {}  # of the norms in order, fp32 [H]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def _see(self, x: torch.Tensor) -> None:
        index = self._calls % self._num_norms
        self._calls += 1
        most = x.abs().amax(0).float()
        self.most[index] = most if index not in self.most else self.most[index].maximum(most)

    def rms_norm(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        x: torch.Tensor = self._ops.rms_norm(*args, **kwargs)
        self._see(x)
        return x

    def fused_add_rms_norm(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        x, residual = self._ops.fused_add_rms_norm(*args, **kwargs)
        self._see(x)
        return x, residual


def activation_maxima(
    model: Model, ops: Any, ids: list[int], on_tokens: Callable[[int, int], None] | None = None
) -> dict[str, torch.Tensor]:
    """The largest magnitude of each channel behind the norms, by the norm's stored name.

    Returns:
        fp32 [H] on the CPU, of both norms of each layer.

    Raises:
        ValueError: an activation is NaN or infinite.
    """
    from model.kv_cache import BLOCK_SIZE, SequenceState
    from model.runner import Runner

    layers = model.config.num_layers
    tap = _NormTap(ops, 2 * layers + 1)  # the last one is before lm_head
    runner = Runner(
        model, tap, num_blocks=-(-len(ids) // BLOCK_SIZE), max_positions=len(ids), prefill_chunk=256
    )
    runner.prefill([SequenceState(list(ids))], on_chunk=on_tokens)
    found = {}
    for index in range(2 * layers):
        norm = "post_attention_layernorm" if index % 2 else "input_layernorm"
        name = f"model.layers.{index // 2}.{norm}.weight"
        found[name] = tap.most[index].cpu()
        if not found[name].isfinite().all():
            raise ValueError(f"--smooth: expected finite activations, got others behind {name}")
    return found


def smoothing_factors(
    checkpoint: Checkpoint, plan: Plan, maxima: Mapping[str, torch.Tensor], alpha: float
) -> dict[str, torch.Tensor]:
    """By a tensor's name: what norms are divided and the columns behind them multiplied by.

    Norms before layers that are not quantised are left out.

    Returns:
        fp32 powers of two, [H]; channels that are always 0 have 1.
    """
    import torch

    factors = {}
    for group in joined_layers(checkpoint.config):
        layer, _, block = next(iter(group)).rpartition(".")[0].rpartition(".")
        kind = next(iter(group)).rpartition(".")[2]
        if kind not in ("q_proj", "gate_proj") or not any(name in plan.schemes for name in group):
            continue
        norm = "input_layernorm" if block == "self_attn" else "post_attention_layernorm"
        most = maxima[f"{layer}.{norm}.weight"]
        weights = [checkpoint.source.read(f"{name}.weight").float() for name in group]
        columns = torch.stack([w.abs().amax(0) for w in weights]).amax(0)
        wanted = most**alpha / columns ** (1 - alpha)
        usable = (most > 0) & (columns > 0)
        factor = wanted.where(usable, 1.0).log2().round().clamp(-20, 20).exp2()
        factors[f"{layer}.{norm}.weight"] = factor
        factors |= {f"{name}.weight": factor for name in group}
    return factors


# ---- the folder ----------------------------------------------------------------------------------


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
    import torch

    from model.compressed import quantise, stored

    source = checkpoint.source
    linear = {name for group in joined_layers(checkpoint.config) for name in group}
    names = ("linear_bytes", "linear_weights", "expert_bytes", "bytes")
    shards, counts = _Shards(folder), dict.fromkeys(names, 0)
    for name in source.shapes:
        if ".mlp.experts." in name:
            continue  # below, those of a layer in one
        tensor = _read(checkpoint, name)
        if not checkpoint.path.is_dir() and tensor.is_floating_point():
            tensor = tensor.to(torch.bfloat16)
        dtype = tensor.dtype
        if name in factors:
            factor = factors[name]
            values = tensor.float()
            tensor = (values / factor if tensor.dim() == 1 else values * factor).to(dtype)
        layer = name.removesuffix(".weight")
        parts = {name: tensor}
        if name.endswith(".weight") and (scheme := plan.schemes.get(layer)) is not None:
            parts = {
                f"{layer}.{part}": value
                for part, value in stored(*quantise(tensor, scheme, dtype), scheme).items()
            }
        for part, value in parts.items():
            shards.add(part, value.contiguous())
            counts["bytes"] += value.nbytes
            if layer in linear and name.endswith(".weight"):
                counts["linear_bytes"] += value.nbytes
        if layer in linear and name.endswith(".weight"):
            counts["linear_weights"] += tensor.numel()
        if layer.endswith(".mlp.gate"):
            counts["expert_bytes"] += tensor.nbytes
        on_tensor()
    for name, tensor in _experts(checkpoint, on_tensor):
        shards.add(name, tensor)
        counts["bytes"] += tensor.nbytes
        counts["expert_bytes"] += tensor.nbytes
    shards.close()
    _write_json(folder / "config.json", _config(checkpoint, plan))
    _write_rest(checkpoint, folder)
    return counts


def _experts(
    checkpoint: Checkpoint, on_tensor: Callable[[], None]
) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of all experts, stacked, and their names."""
    import torch

    from model.weights import load_experts

    config, source = checkpoint.config, checkpoint.source
    if config.mixture is None:
        return
    for layer in config.mixture.layers:
        dtype = torch.bfloat16
        if checkpoint.path.is_dir():
            dtype = source.read(f"model.layers.{layer}.mlp.experts.0.down_proj.weight").dtype
        yield from load_experts(config, source, layer, dtype=dtype).items()
        for _ in range(3 * config.mixture.num_experts):  # as they are read
            on_tensor()


def _read(checkpoint: Checkpoint, name: str) -> torch.Tensor:
    from model.weights import check_finite

    tensor = checkpoint.source.read(name)
    if tensor.is_floating_point():
        check_finite(checkpoint.source, name, tensor)
    return tensor


def _config(checkpoint: Checkpoint, plan: Plan) -> dict[str, Any]:
    from model.config import read_json, to_hf

    if checkpoint.path.is_dir():
        config = read_json(checkpoint.path / "config.json")
    else:
        config = to_hf(checkpoint.config) | {"dtype": "bfloat16"}
    return config | ({"quantization_config": describe_plan(plan)} if plan.schemes else {})


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


# ---- command -------------------------------------------------------------------------------------


def main(argv: list[str] | None = None) -> int:
    """Exit codes: 0 done, 2 wrong input, 130 interrupted."""
    parser = argparse.ArgumentParser(
        prog="python -m model.quantize",
        description=__doc__.partition(":")[2].strip(),
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--model", type=Path, help="Hugging Face folder or .gguf file (default: SmolLM2-135M)")
    add("--scheme", choices=SCHEMES, required=True)
    add("--out", type=Path, required=True, metavar="DIR", help="folder to write")
    add("--overwrite", action="store_true", help="replace the checkpoint that is in --out")
    add(
        "--sensitive",
        type=Path,
        metavar="FILE",
        help="leave alone the layers that python -m model.sensitivity flagged in it",
    )
    add("--smooth", type=float, metavar="ALPHA", help="w8a8: above 0 and below 1, such as 0.5")
    add(
        "--text",
        type=Path,
        metavar="FILE",
        help="for --smooth; default: Python's pydoc_data.topics",
    )
    add("--tokens", type=int, default=2048, help="of the text, for --smooth (default 2048)")
    add("--kernels", choices=("triton", "torch"), help="default: torch on a CPU, else triton")
    add("--dtype", choices=("float32", "bfloat16", "float16"), help="for --smooth (float32)")
    add("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args(argv)
    try:
        found = _quantize(args)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: --out {args.out}: expected room to write to, got {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; nothing was written", file=sys.stderr)
        return 130
    print(json.dumps(found) if args.json else _summary(found))
    return 0


def _quantize(args: argparse.Namespace) -> dict[str, Any]:
    if args.smooth is not None and args.scheme != "w8a8":
        raise ValueError(
            f"--smooth has no use where activations stay as they are, got --scheme {args.scheme}"
        )
    if args.smooth is not None and not 0 < args.smooth < 1:
        raise ValueError(f"--smooth must be above 0 and below 1, got {args.smooth}")

    from model.checkpoint import default_path, open_checkpoint
    from model.weights import check_names

    args.model = args.model or default_path()
    check_out(args.out, args.model, args.overwrite)
    checkpoint = open_checkpoint(args.model)
    config, source = checkpoint.config, checkpoint.source
    if config.quantization is not None:
        raise ValueError(f"{args.model}: expected an unquantised checkpoint, got a quantised one")
    check_names(config, source)
    sensitive = set() if args.sensitive is None else read_sensitive(args.sensitive, config)
    plan = make_plan(config, args.scheme, sensitive)
    if not plan.schemes:
        raise ValueError(f"--sensitive {args.sensitive}: expected layers to quantise, got none")

    from rich.console import Console
    from rich.progress import Progress

    quiet = args.json or not sys.stderr.isatty()
    with Progress(console=Console(stderr=True), transient=True, disable=quiet) as bar:
        factors: dict[str, torch.Tensor] = {}
        if args.smooth is not None:
            row = bar.add_task("tokens", total=None)
            maxima = calibration_maxima(
                args, lambda done, total: bar.update(row, completed=done, total=total)
            )
            factors = smoothing_factors(checkpoint, plan, maxima, args.smooth)
        row = bar.add_task("tensors", total=len(source.shapes))
        with replacing(args.out) as folder:
            counts = write_folder(checkpoint, folder, plan, factors, lambda: bar.advance(row))
    groups = {name: scheme.group for name, scheme in plan.schemes.items() if scheme.group}
    return {
        "out": str(args.out),
        "scheme": args.scheme,
        "smooth": args.smooth,
        "quantized_layers": len(plan.schemes),
        "kept_layers": list(plan.kept),
        "kept_experts": plan.num_experts,
        "smaller_groups": {name: size for name, size in groups.items() if size != _GROUPS[0]},
        **counts,
    }


def calibration_maxima(
    args: argparse.Namespace, on_tokens: Callable[[int, int], None] | None = None
) -> dict[str, torch.Tensor]:
    """``activation_maxima`` of ``--model --text --tokens --kernels --dtype``."""
    from model.perplexity import load_text_and_model

    network, ops, ids, _ = load_text_and_model(args)
    return activation_maxima(network, ops, ids, on_tokens)


def _summary(found: dict[str, Any]) -> str:
    bits = 8 * found["linear_bytes"] / found["linear_weights"]
    lines = [
        f"wrote {found['out']}: {found['quantized_layers']} linear layers in {found['scheme']}, "
        f"{len(found['kept_layers'])} as they were; linear layers take "
        f"{found['linear_bytes'] / 1e6:.1f} MB ({bits:.2f} bits a weight), all "
        f"{found['bytes'] / 1e6:.1f} MB"
    ]
    if found["kept_experts"]:
        lines.append(
            f"{found['kept_experts']} experts and their routers stay as they were, "
            f"{found['expert_bytes'] / 1e6:.1f} MB of that"
        )
    smaller = found["smaller_groups"]
    for size in sorted(set(smaller.values()), reverse=True):
        names = [name for name, mine in smaller.items() if mine == size]
        lines.append(
            f"groups of {size} instead of {_GROUPS[0]} inputs in {len(names)} layers, whose inputs "
            f"{_GROUPS[0]} does not divide, the first {names[0]}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
