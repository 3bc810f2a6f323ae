"""Checkpoints in FP8, and in GPTQ's 8 bits in groups: what stays in codes, what is dequantised.

Expected is the same network with its weights dequantised here: codes of FP8 from their bits, blocks
one by one. ``test_awq_gptq`` packs GPTQ.
"""

from __future__ import annotations

import importlib.util
import json
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import CPU, load_folder, make_folder, make_hf, new_runner
from safetensors.torch import save_file
from test_awq_gptq import (
    Layout,
    change_config,
    change_tensors,
    check_logits,
    ids,
    is_linear,
    save_both,
)
from test_awq_gptq import write as write_gptq

import tkernels
from model import block_matrix, cpu_ops, float8, generate, perplexity, quantize, sensitivity
from model import config as configs
from model.block_matrix import BlockMatrix
from model.kv_cache import SequenceState
from model.perplexity import divergence, logits_of
from model.quantized_matrix import ByteMatrix, product
from model.qwen3 import Model
from model.sources import open_safetensors
from model.weights import dequantised_note, load_experts, load_layer

pytestmark = pytest.mark.thin(2)
needs_package = pytest.mark.skipif(
    importlib.util.find_spec("compressed_tensors") is None,
    reason="compressed-tensors is not installed (pip install .[dev])",
)

Q0 = "model.layers.0.self_attn.q_proj"
EXPERT = "model.layers.1.mlp.experts.3.up_proj"
# Inputs and outputs that 128 does not divide (40 to 120), and more of them than 128 (100 to 300).
DENSE, MIXTURE, WIDE = "qwen3", "qwen3_moe", "qwen3_moe-32"
# 128 divides neither 96 inputs, which a block has all, nor 160; 32 divides both.
RAGGED = "llama-32"
NAMES = (DENSE, "qwen3-128", "qwen2", RAGGED, MIXTURE)
LINEAR = {"qkv_proj", "o_proj", "gate_up_proj", "down_proj"}


@dataclass(frozen=True)
class Stored:
    """How a checkpoint stores FP8, and what config.json says of it."""

    method: str = "fp8"
    block: tuple[int, int] | str = (128, 128)  # or "channel" or "tensor"
    dtype: torch.dtype = torch.float32  # of scales
    kept: Callable[[str], bool] = lambda name: False
    more: dict[str, Any] = field(default_factory=dict)  # fields of the config

    @property
    def scale(self) -> str:
        return "weight_scale_inv" if self.method == "fp8" else "weight_scale"

    @property
    def config(self) -> dict[str, Any]:
        if self.method == "fp8":
            given = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8"}
            assert not isinstance(self.block, str)
            return {**given, "weight_block_size": list(self.block), **self.more}
        blocks = not isinstance(self.block, str)
        kind = {"num_bits": 8, "type": "float", "symmetric": True}
        weights = {
            **kind,
            "strategy": "block" if blocks else self.block,
            "block_structure": list(self.block) if blocks else None,
            "dynamic": False,
            "group_size": None,
        }
        inputs = {**kind, "strategy": "group" if blocks else "token", "dynamic": True}
        inputs["group_size"] = 128 if blocks else None
        group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
        return {
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "quantization_status": "compressed",
            "config_groups": {"group_0": group},
            "ignore": ["lm_head", r"re:.*mlp\.gate$"],
            **self.more,
        }


def value(code: int) -> float:
    """A sign, 4 bits of exponent and 3 of mantissa."""
    sign, exponent, mantissa = -1 if code & 128 else 1, code >> 3 & 15, code & 7
    if exponent == 0:
        return sign * mantissa * 2.0**-9
    return sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7)


VALUES = torch.tensor([value(code) for code in range(256)])


def rounded(weight: torch.Tensor, one: Stored) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(codes, scales, the weight that they stand for) of [N, K]."""
    n, k = weight.shape
    sizes = {"channel": (1, k), "tensor": (n, k)}
    rows, columns = sizes[one.block] if isinstance(one.block, str) else one.block
    codes = torch.empty(n, k, dtype=torch.float8_e4m3fn)
    scale = torch.empty(-(-n // rows), -(-k // columns), dtype=one.dtype)
    dense = torch.empty(n, k)
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            here = slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns)
            scale[i, j] = weight[here].abs().max() / 400
            step = scale[i, j].float()
            codes[here] = (weight[here] / step).to(torch.float8_e4m3fn)
            dense[here] = VALUES[codes[here].contiguous().view(torch.uint8).long()] * step
    return codes, scale.view(1) if one.block == "tensor" else scale, dense


def write(base: Path, one: Stored, out: Path) -> tuple[Path, Path]:
    """(the checkpoint quantised, and with its weights dequantised) below ``out``."""
    source = open_safetensors(base)
    stored = {name: source.read(name).clone() for name in source.shapes}
    dense = dict(stored)
    for name in source.shapes:
        layer = name.removesuffix(".weight")
        if is_linear(name) and not one.kept(layer):
            stored[name], stored[f"{layer}.{one.scale}"], dense[name] = rounded(stored[name], one)
    return save_both(base, out, stored, dense, one.config)


LAYOUTS = {
    "fp8": Stored(),
    "fp8-bf16-scales": Stored(dtype=torch.bfloat16),
    "fp8-small-blocks": Stored(block=(16, 24)),
    "channel": Stored("compressed", "channel", torch.bfloat16),
    "tensor": Stored("compressed", "tensor"),
    "block": Stored("compressed", (128, 128)),
    "small-block": Stored("compressed", (48, 32)),
}


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("bases")
    return {name: make_folder(folder / name, None, name) for name in (*NAMES, WIDE)}


# ---- what they compute ---------------------------------------------------------------------------


def same_weights(ours: Model, theirs: Model) -> set[str]:
    """Kinds of linear layers that are in codes, one a byte; they stand for the other's weights."""
    kept: dict[str, set[bool]] = {}
    for mine, other in zip(ours.layers, theirs.layers, strict=True):
        parts = LINEAR if mine.experts is None else LINEAR - {"gate_up_proj", "down_proj"}
        if mine.experts is not None:
            assert other.experts is not None
            for part in ("router", "gate_up_proj", "down_proj"):
                assert torch.equal(getattr(mine.experts, part), getattr(other.experts, part))
        for part in parts:
            weight, expected = getattr(mine, part).weight, getattr(other, part).weight
            in_codes = isinstance(weight, ByteMatrix)
            if in_codes:
                groups = weight.scale.numel() * weight.scale.dtype.itemsize
                assert weight.nbytes == expected.numel() + groups
                assert weight.codes.is_contiguous()
                weight = weight.values(expected.dtype)
            elif isinstance(weight, BlockMatrix):
                weight = weight.values()
            assert torch.equal(weight, expected)
            kept.setdefault(part, set()).add(in_codes)
    assert all(len(found) == 1 for found in kept.values())
    return {part for part, found in kept.items() if True in found}


def in_codes(name: str, layout: str) -> set[str]:
    """Linear layers whose blocks have all inputs, or so many as the kernel takes."""
    linear = LINEAR - ({"gate_up_proj", "down_proj"} if name == MIXTURE else set())
    if layout == "fp8-small-blocks" or (
        layout == "small-block" and name not in ("qwen3-128", RAGGED)
    ):
        return set()
    whole = layout in ("channel", "tensor", "small-block") or name != RAGGED
    return linear if whole else linear - {"down_proj"}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", NAMES)
def test_logits(name: str, layout: str, bases: dict[str, Path], tmp_path: Path) -> None:
    quantised, dense = write(bases[name], LAYOUTS[layout], tmp_path)
    for dtype in (torch.bfloat16, torch.float16):
        kept = same_weights(load_folder(quantised, dtype), load_folder(dense, dtype))
        assert kept == in_codes(name, layout)
    assert not same_weights(load_folder(quantised), load_folder(dense))
    check_logits(quantised, dense)


def in_16_bits(
    quantised: Path, dense: Path, dtype: torch.dtype, ops: Any, device: torch.device = CPU
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits of a prompt of 4 tokens and a step behind it; of the dequantised network, in fp32 and
    in 16 bits.
    """
    exact, _ = logits_of(load_folder(dense), cpu_ops, ids(5))
    usual, _ = logits_of(load_folder(dense, dtype), tkernels.reference, ids(5))
    runner, sequence = new_runner(load_folder(quantised, dtype, device), ops), SequenceState(ids(4))
    rows = [runner.prefill([sequence])]
    sequence.token_ids.append(ids(5)[-1])
    got = torch.cat([*rows, runner.decode([sequence])]).cpu().float()
    return got, exact[3:], usual[3:].float()


@pytest.mark.parametrize("layout", ["fp8", "channel", "tensor", "small-block"])
@pytest.mark.parametrize("name", ["qwen3-128", RAGGED])
def test_logits_in_16_bits_of_the_reference(
    name: str, layout: str, bases: dict[str, Path], tmp_path: Path
) -> None:
    """Products of the CPU are those of the dequantised weights, those of the reference as exact."""
    quantised, dense = write(bases[name], LAYOUTS[layout], tmp_path)
    for dtype in (torch.bfloat16, torch.float16):
        expected = in_16_bits(dense, dense, dtype, cpu_ops)[0]
        assert torch.equal(in_16_bits(quantised, dense, dtype, cpu_ops)[0], expected)
        got, exact, usual = in_16_bits(quantised, dense, dtype, tkernels.reference)
        error, allowed = ((x - exact).abs().max() for x in (got, usual))
        assert error < 2 * allowed
        assert divergence(got, exact)[0] < 0.01


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("name", "layout"), [("qwen3-128", "fp8"), ("qwen3-128", "small-block"), (RAGGED, "channel")]
)
def test_kernels_run_it(
    name: str, layout: str, dtype: torch.dtype, bases: dict[str, Path], tmp_path: Path
) -> None:
    """Held to fp32 as the dequantised network in 16 bits is: its weights are rounded."""
    quantised, dense = write(bases[name], LAYOUTS[layout], tmp_path)
    device = tkernels.device.tensor_device()
    got, exact, usual = in_16_bits(quantised, dense, dtype, tkernels, device)
    error, allowed = ((x - exact).abs().max() for x in (got, usual))
    assert error < 2 * allowed
    assert divergence(got, exact)[0] < 0.01


@pytest.mark.parametrize("bias", [False, True])
def test_what_multiplies(bias: bool) -> None:
    """The kernel's arguments in 16 bits; in fp32, or without a kernel, weights in x's dtype."""
    codes, scale, dense = rounded(torch.randn(40, 128), Stored(block=(16, 32)))
    weight = ByteMatrix(codes, scale.repeat_interleave(16, 0)[:40])
    assert torch.equal(weight.values(torch.float32), dense)
    offset = torch.randn(40) if bias else None
    calls = []

    def gemm(*args: Any, **more: Any) -> torch.Tensor:
        calls.append((args, more))
        return torch.zeros(3, 40)

    ops = types.SimpleNamespace(w8a16_gemm=gemm)
    x = torch.randn(3, 128)
    expected = torch.nn.functional.linear(x, dense, offset)
    assert torch.equal(product(x, weight, ops, offset), expected)
    assert not calls
    half, offset = x.half(), None if offset is None else offset.half()
    expected = torch.nn.functional.linear(half, dense.half(), offset)
    assert torch.equal(product(half, weight, cpu_ops, offset), expected)
    assert not product(half, weight, ops, offset).any()
    ((args, more),) = calls
    assert args[0] is half
    assert args[1:] == (weight.codes, weight.scale)
    assert more == {"bias": offset}


def test_dtype_of_scales(bases: dict[str, Path], tmp_path: Path) -> None:
    """16 bits stay, 32 go to those of the activations where nothing is lost."""
    coarse = Stored(dtype=torch.float32)
    cases = (
        ("fp8", torch.float16, torch.float32),
        ("fp8-bf16-scales", torch.bfloat16, torch.bfloat16),
        ("fp8-bf16-scales", torch.float16, torch.bfloat16),
    )
    for i, (layout, dtype, wanted) in enumerate(cases):
        folder, _ = write(bases[DENSE], LAYOUTS[layout], tmp_path / str(i))
        for layer in load_folder(folder, dtype).layers:
            assert layer.qkv_proj.weight.scale.dtype == wanted
    folder, _ = write(bases[DENSE], coarse, tmp_path / "coarse")

    def coarsen(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.endswith("_scale_inv")]:
            tensors[name] = tensors[name].bfloat16().float()

    change_tensors(folder, coarsen)
    assert load_folder(folder, torch.bfloat16).layers[0].o_proj.weight.scale.dtype == torch.bfloat16


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("v2", [True, False])
@pytest.mark.parametrize(("name", "group"), [("qwen3-128", 128), ("qwen3-128", 32), (WIDE, 32)])
def test_gptq_of_8_bits_in_groups(
    name: str, group: int, v2: bool, symmetric: bool, bases: dict[str, Path], tmp_path: Path
) -> None:
    one = Layout("gptq", group, bits=8, symmetric=symmetric, v2=v2)
    quantised, dense = write_gptq(bases[name], one, tmp_path)
    blocks = isinstance(load_folder(quantised).layers[0].o_proj.weight, BlockMatrix)
    assert blocks == (symmetric and block_matrix.can_multiply())
    same_weights(load_folder(quantised), load_folder(dense))
    check_logits(quantised, dense)
    for dtype in (torch.bfloat16, torch.float16):
        models = [load_folder(folder, dtype) for folder in (quantised, dense)]
        # Of a mixture the first layer has no experts.
        assert same_weights(*models) == (LINEAR if symmetric else set())
        expected = in_16_bits(dense, dense, dtype, cpu_ops)[0]
        assert torch.equal(in_16_bits(quantised, dense, dtype, cpu_ops)[0], expected)
    source = open_safetensors(quantised)
    note = dequantised_note(configs.from_folder(quantised), source, torch.bfloat16)
    words = f"W8A16 in groups of {group}, for which there is no kernel in bfloat16"
    if not symmetric:
        assert note is not None
        assert note.startswith("linear layers of ")
        assert words in note
    elif name == WIDE:
        assert note is not None
        assert note.startswith(f"experts of {words}")
    else:
        assert note is None


def test_other_zeros_than_the_config_tells(bases: dict[str, Path], tmp_path: Path) -> None:
    one = Layout("gptq", 32, bits=8, symmetric=False)
    folder, _ = write_gptq(bases["qwen3-128"], one, tmp_path)
    change_config(folder, lambda config: config["quantization_config"].update(sym=True))
    with pytest.raises(ValueError, match=rf"expected zeros of 127 in .*{Q0}\.qzeros, as sym means"):
        load_folder(folder, torch.bfloat16)


def test_gptq_of_8_bits_by_the_kernel(bases: dict[str, Path], tmp_path: Path) -> None:
    one = Layout("gptq", 32, bits=8, symmetric=True)
    quantised, dense = write_gptq(bases["qwen3-128"], one, tmp_path)
    device = tkernels.device.tensor_device()
    got, exact, usual = in_16_bits(quantised, dense, torch.bfloat16, tkernels, device)
    error, allowed = ((x - exact).abs().max() for x in (got, usual))
    assert error < 2 * allowed


@pytest.mark.parametrize("one", ["fp8", "channel"])
def test_layers_and_experts_by_themselves(one: str, bases: dict[str, Path], tmp_path: Path) -> None:
    found = []
    for folder in write(bases[MIXTURE], LAYOUTS[one], tmp_path):
        config, source = configs.from_folder(folder), open_safetensors(folder)
        layer = load_layer(config, source, 1, dtype=torch.bfloat16, device=CPU)
        assert layer.experts is not None
        experts = load_experts(config, source, 1, dtype=torch.bfloat16)
        weight = layer.qkv_proj.weight
        if isinstance(weight, ByteMatrix):
            weight = weight.values(torch.bfloat16)
        found.append([weight, layer.experts.down_proj, *experts.values()])
    for ours, theirs in zip(*found, strict=True):
        assert isinstance(ours, torch.Tensor)
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("kept", "more"),
    [
        (".0.mlp.experts", {"modules_to_not_convert": ["lm_head", "model.layers.0.mlp"]}),
        (".k_proj", {"modules_to_not_convert": ["k_proj"]}),
        (".k_proj", {"ignored_layers": ["k_proj", "model.layers.0.mlp.gate"]}),
        (
            ".1.self_attn",
            {"modules_to_not_convert": ["model.layers.1.self_attn", "model.layers.0.mlp.gate"]},
        ),
        ("none", {"modules_to_not_convert": None}),
    ],
)
def test_layers_left_alone(
    kept: str, more: dict[str, Any], bases: dict[str, Path], tmp_path: Path
) -> None:
    one = Stored(kept=lambda name: kept in name, more=more)
    quantised, dense = (load_folder(folder) for folder in write(bases[MIXTURE], one, tmp_path))
    same_weights(quantised, dense)


def test_gate_is_not_gate_proj(bases: dict[str, Path], tmp_path: Path) -> None:
    one = Stored(more={"modules_to_not_convert": [f"model.layers.{i}.mlp.gate" for i in range(3)]})
    quantised, dense = (load_folder(folder) for folder in write(bases[DENSE], one, tmp_path))
    same_weights(quantised, dense)


# ---- refused -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"activation_scheme": "static"}, "activation_scheme must be 'dynamic', got 'static'"),
        ({"fmt": "e5m2"}, "fmt must be 'e4m3', got 'e5m2'"),
        ({"scale_fmt": "ue8m0"}, "scale_fmt must be 'float', got 'ue8m0'"),
        ({"expert_dtype": "fp4"}, "expert_dtype must be 'fp8', got 'fp4'"),
        ({"modules_to_convert": ["x"]}, "modules_to_convert must be null"),
        ({"weight_block_size": None}, "weight_block_size must be two integers above 0, got None"),
        ({"weight_block_size": [128]}, r"two integers above 0, got \[128\]"),
        ({"weight_block_size": [128, 0]}, r"two integers above 0, got \[128, 0\]"),
        ({"modules_to_not_convert": "lm_head"}, "null or a list of names, got 'lm_head'"),
    ],
)
def test_configs_of_fp8(changed: dict[str, Any], says: str, bases: dict[str, Path]) -> None:
    config = json.loads((bases[DENSE] / "config.json").read_text())
    with pytest.raises(ValueError, match=f"^config.json: quantization_config: .*{says}"):
        configs.from_hf({**config, "quantization_config": {**Stored().config, **changed}})


@pytest.mark.parametrize(
    ("part", "changed", "says"),
    [
        ("weights", {"num_bits": 4}, "weights.num_bits must be 8, got 4"),
        ("weights", {"type": "int"}, "weights.type must be 'float', got 'int'"),
        ("weights", {"symmetric": False}, "weights.symmetric must be True"),
        ("weights", {"dynamic": True}, "weights.dynamic must be False"),
        ("weights", {"strategy": "group"}, "strategy must be 'channel' or 'tensor' or 'block'"),
        ("weights", {"strategy": "block"}, "block_structure must be two integers .* None"),
        ("weights", {"block_structure": [1, 1]}, r"block_structure must be null, got \[1, 1\]"),
        ("input_activations", {"dynamic": False}, "input_activations.dynamic must be True"),
        ("input_activations", {"type": "int"}, "input_activations.type must be 'float'"),
    ],
)
def test_configs_of_compressed(
    part: str, changed: dict[str, Any], says: str, bases: dict[str, Path]
) -> None:
    stored = LAYOUTS["channel"].config
    stored["config_groups"]["group_0"][part].update(changed)
    config = json.loads((bases[DENSE] / "config.json").read_text())
    with pytest.raises(ValueError, match=f"^config.json: quantization_config: .*{says}"):
        configs.from_hf({**config, "quantization_config": stored})


def nan_codes(codes: torch.Tensor) -> torch.Tensor:
    bits = codes.view(torch.uint8).clone()
    bits[0, 0], bits[1, 1] = 127, 255
    return bits.view(torch.float8_e4m3fn)


@pytest.mark.parametrize("layer", [Q0, EXPERT])
@pytest.mark.parametrize("one", ["fp8", "channel"])
@pytest.mark.parametrize(
    ("part", "change", "says"),
    [
        ("scale", None, "expected tensor {layer}.{scale}, got none of that name"),
        ("weight", None, "expected tensor {layer}.weight, got none of that name"),
        ("scale", lambda t: t[:, :0].clone(), r"expected {layer}.{scale} of shape "),
        ("scale", lambda t: t * 0, "expected finite scales above 0 in {layer}.{scale}, got"),
        ("scale", lambda t: t / 0, "expected finite scales above 0 in {layer}.{scale}, got"),
        ("scale", lambda t: -t, "expected finite scales above 0 in {layer}.{scale}, got"),
        ("scale", lambda t: t.int(), "expected {layer}.{scale} in floats, got torch.int32"),
        (
            "scale",
            lambda t: t.to(torch.float8_e5m2),
            "expected {layer}.{scale} in 16 or 32 bits, got torch.float8_e5m2",
        ),
        ("weight", nan_codes, "expected finite weights, got 2 NaN in {layer}.weight"),
        ("weight", lambda t: t.float(), "expected {layer}.weight in torch.float8_e4m3fn"),
        ("other_scale", lambda _: torch.ones(1), "got 1 more, the first {layer}.other_scale"),
        ("input_scale", lambda _: torch.ones(1), "got 1 more, the first {layer}.input_scale"),
    ],
)
def test_files_that_do_not_fit(
    part: str,
    change: Any,
    says: str,
    one: str,
    layer: str,
    bases: dict[str, Path],
    tmp_path: Path,
) -> None:
    scale = LAYOUTS[one].scale
    folder, _ = write(bases[MIXTURE], LAYOUTS[one], tmp_path)
    name = f"{layer}.{scale if part == 'scale' else part}"

    def apply(tensors: dict[str, torch.Tensor]) -> None:
        old = tensors.pop(name, None)
        if change is not None:
            tensors[name] = change(old)

    change_tensors(folder, apply)
    with pytest.raises(ValueError, match=says.format(layer=layer, scale=scale)) as raised:
        load_folder(folder)
    assert str(folder) in str(raised.value)
    assert "\n" not in str(raised.value)


def test_weights_that_fp16_cannot_hold(bases: dict[str, Path], tmp_path: Path) -> None:
    folder, _ = write(bases[MIXTURE], LAYOUTS["fp8"], tmp_path)
    name = f"{EXPERT}.weight_scale_inv"
    change_tensors(folder, lambda tensors: tensors.update({name: torch.full((1, 1), 1e3)}))
    load_folder(folder, torch.bfloat16)
    with pytest.raises(ValueError, match=rf"that torch.float16 holds, got .* {EXPERT}\.weight,"):
        load_folder(folder, torch.float16)


def test_codes_that_the_config_does_not_tell_of(bases: dict[str, Path], tmp_path: Path) -> None:
    """They do not pass for numbers: without scales, in a layer left alone or in all of them."""
    folder, _ = write(bases[DENSE], LAYOUTS["fp8"], tmp_path)

    def without_scales(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.endswith("_scale_inv")]:
            del tensors[name]

    change_tensors(folder, without_scales)
    change_config(folder, lambda config: config.pop("quantization_config"))
    with pytest.raises(ValueError, match=r"expected floats in .*, got torch\.float8_e4m3fn"):
        load_folder(folder)


# ---- commands ------------------------------------------------------------------------------------


def test_commands_say_so(bases: dict[str, Path], tmp_path: Path, capsys: Any) -> None:
    folder, dense = write(bases["qwen3-128"], LAYOUTS["fp8"], tmp_path)
    said = "linear layers of FP8 in blocks of 128x128, for which there is no kernel in float32, are"
    for dtype in ("float32", "bfloat16"):
        argv = ["--prompt", "abc", "--max-tokens", "3", "--json", "--dtype", dtype]
        replies = []
        for path in (folder, dense):
            assert generate.main(["--model", str(path), *argv]) == 0
            out, err = capsys.readouterr()
            replies.append(json.loads(out)["replies"])
            assert (said in err) == (path == folder and dtype == "float32")
            assert ("dequantised" in err) == (said in err)
        assert replies[0] == replies[1]
    text = tmp_path / "text"
    text.write_text("a b c d e f g h " * 6)
    found = []
    for path in (folder, dense):
        assert perplexity.main(["--model", str(path), "--text", str(text), "--json"]) == 0
        out, err = capsys.readouterr()
        found.append(json.loads(out)["perplexity"])
        assert (said in err) == (path == folder)
    assert found[0] == found[1]
    config, source = configs.from_folder(folder), open_safetensors(folder)
    weights = sum(shape[0] * shape[1] for name, shape in source.shapes.items() if is_linear(name))
    note = dequantised_note(config, source, torch.float32)
    assert note is not None
    assert note.endswith(f"dequantised: {4 * weights / 1e9:.3g} GB instead of {weights / 1e9:.3g}")
    assert dequantised_note(config, source, torch.bfloat16) is None


@pytest.mark.parametrize(
    ("name", "parts", "kind"),
    [(MIXTURE, ".experts.", "experts"), (RAGGED, ".down_proj", "linear layers")],
)
def test_only_what_is_dequantised_is_said(
    name: str, parts: str, kind: str, bases: dict[str, Path], tmp_path: Path
) -> None:
    folder, _ = write(bases[name], LAYOUTS["fp8"], tmp_path)
    config, source = configs.from_folder(folder), open_safetensors(folder)
    shapes = {name: shape for name, shape in source.shapes.items() if is_linear(name)}
    weights = sum(n * k for layer, (n, k) in shapes.items() if parts in layer)
    assert 0 < weights < sum(n * k for n, k in shapes.values())
    note = dequantised_note(config, source, torch.bfloat16)
    assert note is not None
    assert note.startswith(f"{kind} of FP8 in blocks of 128x128, for which")
    assert note.endswith(f": {2 * weights / 1e9:.3g} GB instead of {weights / 1e9:.3g}")


def test_commands_that_want_16_bits(bases: dict[str, Path], tmp_path: Path, capsys: Any) -> None:
    folder, _ = write(bases[DENSE], LAYOUTS["channel"], tmp_path)
    argv = ["--model", str(folder), "--out", str(tmp_path / "out")]
    for main, more in ((quantize.main, ["--scheme", "w8a8"]), (sensitivity.main, [])):
        assert main([*argv, *more]) == 2
        assert "expected an unquantised checkpoint, got a quantised one" in capsys.readouterr().err


def test_compressed_tensors_reads_its_config() -> None:
    """What the tests above write is a config of the package, and shapes are its own."""
    package = pytest.importorskip("compressed_tensors.quantization")
    initialize = pytest.importorskip("compressed_tensors.quantization.lifecycle.initialize")
    for name in ("channel", "tensor", "block"):
        one = LAYOUTS[name]
        scheme = package.QuantizationConfig(**one.config).config_groups["group_0"]
        linear = torch.nn.Linear(256, 200, bias=False)
        initialize.initialize_module_for_quantization(linear, scheme)
        _, scale, _ = rounded(torch.randn(200, 256), one)
        assert linear.weight_scale.shape == scale.shape


@needs_package
@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("strategy", ["channel", "tensor", "block"])
def test_what_the_package_writes(strategy: str, given: bool, tmp_path: Path) -> None:
    """With activations in fp8, or in 16 bits, for which it has another name of the same layout."""
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config

    one = Stored("compressed", (32, 64) if strategy == "block" else strategy)
    hf = make_hf("qwen3-128")
    (group,) = one.config["config_groups"].values()
    group = {name: value for name, value in group.items() if given or name != "input_activations"}
    group["weights"] = {n: value for n, value in group["weights"].items() if value is not None}
    whole = {"config_groups": {"group_0": group}, "ignore": ["lm_head"]}
    whole["quantization_status"] = "frozen"
    apply_quantization_config(hf, QuantizationConfig.model_validate(whole))
    for module in hf.modules():
        if (scale := getattr(module, "weight_scale", None)) is not None:
            _, scales, _ = rounded(module.weight.data.float(), one)
            scale.data.copy_(scales.view(scale.shape))
    compressor = ModelCompressor.from_pretrained_model(hf)
    compressor.compress_model(hf)
    hf.config.save_pretrained(tmp_path)
    tensors = {name: t for name, t in hf.state_dict().items() if name != "lm_head.weight"}  # tied
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    compressor.update_config(str(tmp_path))
    written = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert written["format"] == ("float" if given else "naive") + "-quantized"
    compressor.decompress_model(hf)
    modules = dict(hf.named_modules())
    for part in ("o_proj", "down_proj"):
        name = f"model.layers.1.{'self_attn' if part == 'o_proj' else 'mlp'}.{part}"
        ours = getattr(load_folder(tmp_path).layers[1], part).weight
        torch.testing.assert_close(ours, modules[name].weight.data, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(
    ("kept", "left"),
    [
        ("lm_head", ""),
        ("mlp.gate", ""),  # a router, and no gate_proj
        ("model.layers.1", "layers.1."),  # and not 11
        (r"model.layers.*.down_proj", "down_proj"),
    ],
)
def test_names_of_layers_that_stay(kept: str, left: str) -> None:
    found = float8.parse(Stored(more={"modules_to_not_convert": [kept]}).config)
    parts = ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj")
    for layer in (f"model.layers.{i}.{part}" for i in (0, 1, 11) for part in parts):
        assert (found.scheme_of(layer) is None) == (bool(left) and left in layer), layer
    with pytest.raises(ValueError, match=r"modules_to_not_convert must hold regular expressions"):
        float8.parse(Stored(more={"modules_to_not_convert": ["("]}).config)


def test_transformers_has_the_same_numbers() -> None:
    """Of ``weight_scale_inv`` in blocks that do not divide the weight."""
    module = pytest.importorskip("transformers.integrations.finegrained_fp8")
    codes, scale, dense = rounded(torch.randn(200, 300), Stored())
    linear = module.FP8Linear(300, 200, block_size=(128, 128))
    assert linear.weight_scale_inv.shape == scale.shape
    theirs = module._dequantize_fp8_weight(codes, scale, [128, 128], torch.float32)
    torch.testing.assert_close(theirs, dense)


def test_logits_depend_on_scales(bases: dict[str, Path], tmp_path: Path) -> None:
    """A test of the tests: other scales are seen."""
    folder, dense = write(bases[DENSE], LAYOUTS["fp8"], tmp_path)
    name = "model.layers.0.self_attn.o_proj.weight_scale_inv"  # a norm undoes that of q_proj
    change_tensors(folder, lambda tensors: tensors.update({name: tensors[name] * 2}))
    got, expected = (logits_of(load_folder(path), cpu_ops, ids(9))[0] for path in (folder, dense))
    assert float((got - expected).abs().max()) > 1e-3 * float(expected.abs().max())
