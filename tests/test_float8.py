"""Checkpoints in fp8: what they compute, and what is refused.

Expected are the logits of the same network with its weights dequantised here, number by number.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import load_folder, make_folder, make_hf
from safetensors.torch import load_file, save_file
from unstacked import experts_of

from model import compressed, cpu_ops, float8, generate, quantize, weights
from model import config as configs
from model.perplexity import logits_of
from model.sources import open_safetensors
from model.weights import load_layer

pytestmark = pytest.mark.thin(2)

DENSE, MOE = "qwen3-128", "qwen3_moe-32"
Q0 = "model.layers.0.self_attn.q_proj"
E4M3 = torch.float8_e4m3fn
needs_package = pytest.mark.skipif(
    importlib.util.find_spec("compressed_tensors") is None,
    reason="compressed-tensors is not installed (pip install .[dev])",
)


def ids(n: int) -> list[int]:
    return torch.randint(0, 331, (n,), generator=torch.Generator().manual_seed(0)).tolist()


def of_block(size: int) -> dict[str, Any]:
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [size, size],
        "modules_to_not_convert": ["lm_head", "mlp.gate", "model.layers.1.self_attn.o_proj"],
    }


def of_group(strategy: str, **more: Any) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}
    given = {"num_bits": 8, "type": "float", "dynamic": True, "strategy": "token"}
    group = {
        "targets": ["Linear"],
        "weights": {**weights, "strategy": strategy, **more},
        "input_activations": given,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", "re:.*mlp.gate$", "model.layers.1.self_attn.o_proj"],
    }


LAYOUTS = {
    "fp8-128": (of_block(128), (128, 128)),
    "fp8-48": (of_block(48), (48, 48)),  # blocks at the edges are smaller
    "channel": (of_group("channel"), (1, 0)),
    "tensor": (of_group("tensor"), (0, 0)),
    "block": (of_group("block", block_structure=[40, 56]), (40, 56)),
}
each = pytest.mark.parametrize(("config", "block"), LAYOUTS.values(), ids=LAYOUTS)


def rounded(
    weight: torch.Tensor, block: tuple[int, int]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(codes, scales, what they stand for) of [N, K]; 0 in ``block``: all there are."""
    n, k = weight.shape
    rows, columns = block[0] or n, block[1] or k
    codes, values = torch.empty(n, k, dtype=E4M3), torch.empty(n, k)
    scales = torch.empty(-(-n // rows), -(-k // columns))
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            here = (
                slice(i * rows, min((i + 1) * rows, n)),
                slice(j * columns, min((j + 1) * columns, k)),
            )
            scales[i, j] = weight[here].abs().max() / 448
            codes[here] = (weight[here] / scales[i, j]).to(E4M3)
            values[here] = codes[here].float() * scales[i, j]
    return codes, scales, values


def write(
    base: Path, config: dict[str, Any], block: tuple[int, int], out: Path
) -> tuple[Path, Path]:
    """(the checkpoint in fp8, and with its weights dequantised) below ``out``."""
    source = open_safetensors(base)
    stored: dict[str, torch.Tensor] = {}
    dense: dict[str, torch.Tensor] = {}
    suffix = "weight_scale_inv" if config["quant_method"] == "fp8" else "weight_scale"
    for name in source.shapes:
        tensor = source.read(name)
        stored[name] = dense[name] = tensor
        layer = name.removesuffix(".weight")
        if layer.endswith("_proj") and layer != "model.layers.1.self_attn.o_proj":
            codes, scales, dense[name] = rounded(tensor.float(), block)
            stored[name] = codes
            stored[f"{layer}.{suffix}"] = scales.flatten() if block == (0, 0) else scales
    folders = out / "quantised", out / "dense"
    for folder, tensors in zip(folders, (stored, dense), strict=True):
        shutil.copytree(base, folder, ignore=shutil.ignore_patterns("*.safetensors*"))
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    change_config(folders[0], lambda found: found.update(quantization_config=config))
    return folders


def change_config(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("bases")
    return {name: make_folder(folder / name, None, name) for name in (DENSE, MOE)}


# ---- what they compute ---------------------------------------------------------------------------


@each
@pytest.mark.parametrize("name", [DENSE, MOE])
def test_logits(
    name: str,
    config: dict[str, Any],
    block: tuple[int, int],
    bases: dict[str, Path],
    tmp_path: Path,
) -> None:
    quantised, dense = (load_folder(f) for f in write(bases[name], config, block, tmp_path))
    expected, _ = logits_of(dense, cpu_ops, ids(20))
    got, _ = logits_of(quantised, cpu_ops, ids(20))
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


@each
def test_the_very_numbers(
    config: dict[str, Any], block: tuple[int, int], bases: dict[str, Path], tmp_path: Path
) -> None:
    folders = write(bases[MOE], config, block, tmp_path)
    ours, theirs = (load_folder(folder, torch.bfloat16) for folder in folders)
    for part in ("gate_up_proj", "down_proj"):
        a, b = (getattr(experts_of(model, 1), part) for model in (ours, theirs))
        assert torch.equal(a, b)
    assert torch.equal(ours.layers[0].qkv_proj.weight, theirs.layers[0].qkv_proj.weight)  # type: ignore[arg-type]
    (alone, there) = (
        load_layer(
            configs.from_folder(folder),
            open_safetensors(folder),
            0,
            dtype=torch.bfloat16,
            device=torch.device("cpu"),
        )
        for folder in folders
    )
    assert torch.equal(alone.o_proj.weight, there.o_proj.weight)  # type: ignore[arg-type]


def test_the_command_runs_it_and_says_what_it_does(
    bases: dict[str, Path], tmp_path: Path, capsys: Any
) -> None:
    folder, _ = write(bases[DENSE], *LAYOUTS["fp8-128"], tmp_path)
    weights._say_dequantised.cache_clear()  # it is said once a process
    argv = ["--model", str(folder), "--prompt", "a b", "--max-tokens", "3", "--kernels", "torch"]
    assert generate.main(argv) == 0
    said = capsys.readouterr().err
    assert said.count("weights of fp8 with a scale a block of 128x128 are dequantised to fl") == 1
    assert quantize.main(["--model", str(folder), "--scheme", "w8a8", "--out", "x"]) == 2
    assert "expected an unquantised checkpoint" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("kept", "left"),
    [
        ("lm_head", ""),
        ("mlp.gate", ""),  # a router, and no gate_proj
        ("q_proj", "q_proj"),
        ("model.layers.1", "layers.1."),
        ("model.layers.1.self_attn.o_proj", "layers.1.self_attn.o_proj"),
        (r"model.layers.*.down_proj", "down_proj"),
    ],
)
def test_names_of_layers_that_stay(kept: str, left: str) -> None:
    found = float8.parse({**of_block(128), "modules_to_not_convert": [kept]})
    parts = ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj")
    for layer in (f"model.layers.{i}.{part}" for i in (0, 1, 11) for part in parts):
        assert (found.scheme_of(layer) is None) == (bool(left) and left in layer), layer


def test_transformers_has_the_same_numbers() -> None:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    weight = torch.randn(256, 384, generator=torch.Generator().manual_seed(0))
    codes, scales, _ = rounded(weight, (128, 128))
    (scheme,) = (s for _, s in float8.parse(of_block(128)).groups)
    assert isinstance(scheme, float8.Float8)
    theirs = Fp8Dequantize(None)._dequantize_one(codes, scales, torch.float32)
    assert torch.equal(float8.dequantise(codes, scales, scheme), theirs)


@needs_package
@pytest.mark.parametrize("strategy", ["channel", "tensor", "block"])
def test_what_the_package_writes(strategy: str, tmp_path: Path) -> None:
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config

    hf = make_hf(DENSE)
    config, _ = LAYOUTS[strategy]
    block = {"channel": (1, 0), "tensor": (0, 0), "block": (32, 64)}[strategy]
    (group,) = config["config_groups"].values()
    given = {"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True}
    if strategy == "block":
        given["block_structure"] = list(block)
    scheme = {"targets": ["Linear"], "weights": given}
    if strategy != "block":
        scheme["input_activations"] = group["input_activations"]
    whole = {"config_groups": {"group_0": scheme}, "ignore": ["lm_head"]}
    whole["quantization_status"] = "frozen"
    apply_quantization_config(hf, QuantizationConfig.model_validate(whole))
    for module in hf.modules():
        if (scale := getattr(module, "weight_scale", None)) is not None:
            _, scales, _ = rounded(module.weight.data.float(), block)
            scale.data.copy_(scales.view(scale.shape))
    compressor = ModelCompressor.from_pretrained_model(hf)
    compressor.compress_model(hf)
    hf.config.save_pretrained(tmp_path)
    tensors = {name: t for name, t in hf.state_dict().items() if name != "lm_head.weight"}  # tied
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    compressor.update_config(str(tmp_path))
    written = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    # With activations in 16 bits the package has another name for the same layout.
    assert written["format"] == ("naive" if strategy == "block" else "float") + "-quantized"
    compressor.decompress_model(hf)
    ours = load_folder(tmp_path)
    theirs = dict(hf.named_modules())
    values = theirs["model.layers.1.mlp.down_proj"].weight.data
    torch.testing.assert_close(ours.layers[1].down_proj.weight, values, rtol=1e-6, atol=1e-8)


# ---- refused -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("base", "changed", "says"),
    [
        ("fp8", {"activation_scheme": "static"}, "activation_scheme must be 'dynamic', got 'st"),
        ("fp8", {"fmt": "e5m2"}, "fmt must be null or 'e4m3' or 'float8_e4m3fn', got 'e5m2'"),
        ("fp8", {"scale_fmt": "ue8m0"}, "scale_fmt must be null or 'float', got 'ue8m0'"),
        ("fp8", {"weight_block_size": None}, r"two sizes above 0, such as \[128, 128\], got None"),
        ("fp8", {"weight_block_size": [128, 0]}, r"two sizes above 0, .* got \[128, 0\]"),
        ("fp8", {"modules_to_not_convert": "lm_head"}, "must be a list of names, got 'lm_head'"),
        ("fp8", {"modules_to_not_convert": ["("]}, "modules_to_not_convert must hold regular"),
        ("ct", {"strategy": "group"}, "strategy must be 'channel' or 'tensor' or 'block', got 'g"),
        ("ct", {"type": "int"}, "weights.type must be 'float', got 'int'"),
        ("ct", {"num_bits": 4}, "weights.num_bits must be 8, got 4"),
        ("ct", {"strategy": "block"}, "weights.block_structure must be two sizes"),
    ],
)
def test_configs_that_are_not_known(base: str, changed: dict[str, Any], says: str) -> None:
    config = of_block(128) if base == "fp8" else of_group("channel")
    (config if base == "fp8" else config["config_groups"]["group_0"]["weights"]).update(changed)
    with pytest.raises(ValueError, match=f"^config.json: quantization_config: .*{says}"):
        (float8.parse if base == "fp8" else compressed.parse)(config)


def test_activations_with_a_scale_of_their_own() -> None:
    config = of_group("tensor")
    config["config_groups"]["group_0"]["input_activations"]["dynamic"] = False
    with pytest.raises(ValueError, match=r"input_activations.dynamic must be True, got False"):
        compressed.parse(config)


@pytest.mark.parametrize(
    ("part", "change", "says"),
    [
        ("weight_scale_inv", None, "expected tensor .*weight_scale_inv, got none of that name"),
        ("input_scale", lambda _: torch.ones(1), "got 1 more, the first .*input_scale"),
        ("weight", lambda t: t.to(torch.float8_e5m2), "weight in torch.float8_e4m3fn, as fp8 has"),
        ("weight", lambda t: t.float(), "weight in torch.float8_e4m3fn, as fp8 has it, got"),
        ("weight", lambda t: torch.full_like(t.float(), float("nan")).to(E4M3), "finite weights"),
        ("weight_scale_inv", lambda t: -t, "finite scales above 0 in .*_scale_inv"),
        ("weight_scale_inv", lambda t: t * float("inf"), "finite scales above 0 in .*_scale_inv"),
        ("weight_scale_inv", lambda t: t.to(torch.int32), "_scale_inv in floats, got torch.int32"),
        ("weight_scale_inv", lambda t: t.t()[:1].contiguous(), "weight_scale_inv of shape"),
    ],
)
def test_files_that_do_not_fit(
    part: str, change: Any, says: str, bases: dict[str, Path], tmp_path: Path
) -> None:
    folder, _ = write(bases[DENSE], *LAYOUTS["fp8-48"], tmp_path)

    def apply(tensors: dict[str, torch.Tensor]) -> None:
        old = tensors.pop(f"{Q0}.{part}", None)
        if change is not None:
            tensors[f"{Q0}.{part}"] = change(old)

    change_tensors(folder, apply)
    with pytest.raises(ValueError, match=says) as raised:
        load_folder(folder)
    assert "\n" not in str(raised.value)
