"""Quantised checkpoints: what is written, what other packages read of it, what is refused."""

from __future__ import annotations

import copy
import importlib.util
import json
import shutil
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import CPU, load_folder, make_folder, new_runner, smollm2, tiny
from safetensors.torch import load_file, save_file

import tkernels
from model import (
    block_matrix,
    compressed,
    cpu_ops,
    generate,
    perplexity,
    quantize,
    quantize_plan,
    quantize_write,
    quantized_weights,
    smooth,
    weight_quality,
)
from model import config as configs
from model.block_matrix import BlockMatrix
from model.checkpoint import open_checkpoint
from model.compressed import INT, PACKED, Scheme, pack, quantise, unpack
from model.kv_cache import SequenceState
from model.perplexity import divergence, logits_of
from model.quantized_matrix import ByteMatrix, Int8Matrix, PackedMatrix, Parts
from model.weights import load_model

pytestmark = pytest.mark.thin(2)

NAME = "llama-32"  # 96 and 160 inputs: groups of 32
SCHEMES = quantize_plan.SCHEMES
Q0, DOWN1 = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"
needs_package = pytest.mark.skipif(
    importlib.util.find_spec("compressed_tensors") is None,
    reason="compressed-tensors is not installed (pip install .[dev])",
)


def ids(n: int, seed: int = 0) -> list[int]:
    return torch.randint(0, 331, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("base") / "m", None, NAME)


@pytest.fixture(scope="module")
def written(base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The checkpoint in each scheme."""
    folder = tmp_path_factory.mktemp("written")
    for scheme in SCHEMES:
        argv = ["--model", str(base), "--scheme", scheme, "--out", str(folder / scheme), "--json"]
        assert quantize.main(argv) == 0
    return {scheme: folder / scheme for scheme in SCHEMES}


def sensitive_file(path: Path, flagged: set[str], model: Path, **changes: Any) -> Path:
    groups = quantize_plan.joined_layers(configs.from_folder(model))
    layers = {
        name: {"kl": 0.0, "dispersion": 1.0, "energy": 0.1, "sensitive": name in flagged}
        for group in groups
        for name in group
    }
    content = {"format": "tkernels.sensitive_layers", "version": 1, "layers": layers} | changes
    path.write_text(json.dumps(content))
    return path


def dense(weight: Any) -> torch.Tensor:
    """The values of a weight of any kind."""
    if isinstance(weight, Int8Matrix):
        return weight.codes.float() * weight.scale[:, None]
    if isinstance(weight, PackedMatrix | ByteMatrix):
        return weight.values(torch.float32)
    if isinstance(weight, BlockMatrix):
        return weight.values()
    if isinstance(weight, Parts):
        return torch.cat([dense(part) for part in weight.parts])
    assert isinstance(weight, torch.Tensor)
    return weight


def our_layers(model: Any) -> dict[str, torch.Tensor]:
    """Values of all linear layers by their stored names."""
    found = {}
    for i, layer in enumerate(model.layers):
        joined = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
        groups = quantize_plan.joined_layers(model.config)[4 * i : 4 * i + 4]
        for field, group in zip(joined, groups, strict=True):
            sizes = [shape[0] for shape in group.values()]
            parts = dense(getattr(layer, field).weight).split(sizes)
            found |= dict(zip(group, parts, strict=True))
    return found


# ---- codes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("bits", "k"), [(4, 8), (4, 40), (8, 4), (8, 100)])
def test_packing_comes_back(bits: int, k: int) -> None:
    half = 2 ** (bits - 1)
    codes = torch.randint(-half, half, (3, k), dtype=torch.int8)
    packed = pack(codes, bits)
    assert (packed.dtype, packed.shape) == (torch.int32, (3, k * bits // 32))
    assert int(packed[0, 0]) & (2**bits - 1) == int(codes[0, 0]) + half  # the first is lowest
    assert torch.equal(unpack(packed, bits, k), codes)


@needs_package
@pytest.mark.parametrize(("bits", "k"), [(4, 40), (8, 100), (4, 36), (8, 30)])
def test_packing_is_that_of_the_package(bits: int, k: int) -> None:
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

    codes = torch.randint(-(2 ** (bits - 1)), 2 ** (bits - 1), (3, k), dtype=torch.int8)
    theirs = pack_to_int32(codes, bits)
    assert torch.equal(unpack(theirs, bits, k), codes)  # also where K ends inside a word
    if k * bits % 32 == 0:
        assert torch.equal(pack(codes, bits), theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("bits", "group"), [(8, None), (4, 16)])
def test_codes_are_the_nearest(dtype: torch.dtype, bits: int, group: int | None) -> None:
    weight = torch.randn(5, 48).to(dtype)
    weight[2] = 0
    codes, scale = quantise(weight, Scheme(PACKED, bits, group, False), dtype)
    assert (scale.dtype, scale.shape) == (dtype, (5, 48 // (group or 48)))
    assert bool((scale > 0).all())  # of a row of zeros, too
    assert not codes[2].any()
    step = scale.float().repeat_interleave(group or 48, 1)
    error = (codes.float() * step - weight.float()).abs()
    # The largest number of a group may pass the last code by what rounding its scale took.
    most = 0.5 + (2 ** (bits - 1)) * 2 * torch.finfo(dtype).eps
    assert bool((error <= most * step).all())
    assert float((error / step).mean()) == pytest.approx(0.25, abs=0.06)  # or all were nearer


# ---- what is written, read by others -------------------------------------------------------------


@needs_package
@pytest.mark.parametrize("scheme", SCHEMES)
def test_transformers_reads_what_is_written(
    scheme: str, base: Path, tmp_path: Path, capsys: Any
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    flagged = sensitive_file(tmp_path / "s.json", {Q0, DOWN1}, base)
    out = tmp_path / "out"
    argv = ["--model", str(base), "--scheme", scheme, "--out", str(out), "--json"]
    assert quantize.main([*argv, "--sensitive", str(flagged)]) == 0
    facts = json.loads(capsys.readouterr().out)
    others = [Q0.replace("q_proj", f"{x}_proj") for x in "kv"]  # computed together with q
    assert facts["kept_layers"] == [Q0, *others, DOWN1]
    hf = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    stored = hf.model.layers[0].mlp.up_proj.state_dict()
    assert ("weight_packed" in stored) == (scheme != "w8a8")
    tokens = ids(20)
    with torch.no_grad():
        theirs = hf(torch.tensor([tokens])).logits[0]
    ours = load_folder(out)
    modules = dict(hf.named_modules())
    layers = our_layers(ours)
    assert len(layers) == 3 * 7
    original = our_layers(tiny(NAME).ours)
    for name, value in layers.items():
        torch.testing.assert_close(value, modules[name].weight.data, rtol=1e-6, atol=1e-8)
        kept = name in facts["kept_layers"]
        assert torch.equal(value, original[name]) == kept
    logits, _ = logits_of(ours, tkernels.reference, tokens)
    if scheme == "w8a8":  # the package takes another scale for activations
        assert divergence(logits, theirs)[0] < 0.01
    else:
        torch.testing.assert_close(logits, theirs, rtol=1e-4, atol=1e-4)
    text = "Three rivers."
    mine = AutoTokenizer.from_pretrained(out)(text).input_ids
    assert mine == AutoTokenizer.from_pretrained(base)(text).input_ids


@needs_package
def test_config_is_one_of_the_package(written: dict[str, Path]) -> None:
    from compressed_tensors.compressors.format import infer_module_format
    from compressed_tensors.quantization import QuantizationConfig

    for folder in written.values():
        given = json.loads((folder / "config.json").read_text())["quantization_config"]
        theirs = QuantizationConfig.model_validate(given)
        assert theirs.quantization_status.value == "compressed"
        for scheme in theirs.config_groups.values():
            # vLLM goes by the format, and this is the one the package would choose.
            assert infer_module_format(torch.nn.Linear, scheme).value == given["format"]


# ---- what others write ---------------------------------------------------------------------------

CHANNEL = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
TOKEN = {"num_bits": 8, "type": "int", "strategy": "token", "symmetric": True, "dynamic": True}
ZEROS = {"num_bits": 4, "symmetric": False}
THEIRS: dict[str, dict[str, Any]] = {
    "w8a8": {"weights": CHANNEL, "input_activations": TOKEN},
    "w8a16": {"weights": CHANNEL},
    "w8a16-groups": {"weights": CHANNEL | {"strategy": "group", "group_size": 32}},
    "w4a16": {"weights": CHANNEL | {"num_bits": 4, "strategy": "group", "group_size": 32}},
    "w4a16-8": {"weights": CHANNEL | {"num_bits": 4, "strategy": "group", "group_size": 8}},
    "w4a16-channel": {"weights": CHANNEL | {"num_bits": 4}},
    "w4a16-zeros": {"weights": CHANNEL | ZEROS | {"strategy": "group", "group_size": 32}},
    "w4a16-zeros-8": {"weights": CHANNEL | ZEROS | {"strategy": "group", "group_size": 8}},
    "w4a16-zeros-channel": {"weights": CHANNEL | ZEROS},
}  # fmt: skip


@needs_package
@pytest.mark.parametrize("kind", THEIRS)
def test_runner_reads_what_the_package_writes(kind: str, tmp_path: Path) -> None:
    """Of q, k and v, q is not quantised; of gate and up, neither."""
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config

    hf = copy.deepcopy(tiny(NAME).hf)
    apply_quantization_config(
        hf,
        QuantizationConfig.model_validate(
            {
                "config_groups": {"group_0": {"targets": ["Linear"], **THEIRS[kind]}},
                "ignore": ["lm_head", "re:.*q_proj", "re:.*layers.1.mlp.(gate|up)_proj"],
                "quantization_status": "frozen",
            }
        ),
    )
    for module in hf.modules():
        scale = getattr(module, "weight_scale", None)
        if scale is not None:
            args = module.quantization_scheme.weights
            groups = module.weight.data.view(len(scale), scale.shape[1], -1)
            if args.symmetric:
                scale.data.copy_(groups.abs().amax(-1) / (2**args.num_bits / 2 - 0.5))
            else:
                least, most = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
                scale.data.copy_((most - least) / 15)
                zero = (-8 - least / scale.data).round().clamp(-8, 7)
                assert zero.any()
                module.weight_zero_point.data.copy_(zero)
    compressor = ModelCompressor.from_pretrained_model(hf)
    compressor.compress_model(hf)
    hf.save_pretrained(tmp_path)
    compressor.update_config(str(tmp_path))
    ours = load_folder(tmp_path)
    assert isinstance(ours.layers[0].qkv_proj.weight, Parts)
    assert isinstance(ours.layers[1].gate_up_proj.weight, torch.Tensor)
    assert not isinstance(ours.layers[0].gate_up_proj.weight, torch.Tensor)
    compressor.decompress_model(hf)
    modules = dict(hf.named_modules())
    for name, value in our_layers(ours).items():
        torch.testing.assert_close(value, modules[name].weight.data, rtol=1e-6, atol=1e-8)
    in_16_bits = load_folder(tmp_path, torch.bfloat16)  # as kernels get it
    multiplied = {"w8a8": Int8Matrix, "w8a16": Int8Matrix, "w8a16-groups": ByteMatrix}
    for layer in in_16_bits.layers:
        for linear in (layer.o_proj, layer.down_proj):
            assert linear is not None
            assert type(linear.weight) is multiplied.get(kind, PackedMatrix)
    for name, value in our_layers(in_16_bits).items():
        exact = modules[name].weight.data
        atol = float(exact.abs().max()) / 200
        torch.testing.assert_close(value.float(), exact, rtol=0, atol=atol)
    tokens = ids(20)
    with torch.no_grad():
        theirs = hf(torch.tensor([tokens])).logits[0]
    logits, _ = logits_of(ours, tkernels.reference, tokens)
    if kind == "w8a8":
        assert divergence(logits, theirs)[0] < 0.01
    else:
        torch.testing.assert_close(logits, theirs, rtol=1e-4, atol=1e-4)


# ---- results -------------------------------------------------------------------------------------


@pytest.mark.parametrize("ops", [cpu_ops, tkernels.reference], ids=["short", "reference"])
def test_w8a8_is_int8_activations_times_int8_weights(written: dict[str, Path], ops: Any) -> None:
    """transformers' model with both rounded in front of each linear layer."""
    model = load_folder(written["w8a8"])
    layers = our_layers(model)
    hf = copy.deepcopy(tiny(NAME).hf)

    def rounded(_: Any, inputs: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        (x,) = inputs
        codes, scale = tkernels.reference.quantize_per_token(x.flatten(0, -2))
        return ((codes.float() * scale[:, None]).view(x.shape),)

    for name, module in hf.named_modules():
        if name in layers:
            module.weight.data.copy_(layers[name])
            module.register_forward_pre_hook(rounded)
    tokens = ids(40)
    with torch.no_grad():
        expected = hf(torch.tensor([tokens])).logits[0]
    logits, _ = logits_of(model, ops, tokens)
    # A number on the edge of two codes may take the other one.
    torch.testing.assert_close(logits, expected, rtol=0, atol=2e-2)
    exact, _ = logits_of(tiny(NAME).ours, ops, tokens)
    assert float((logits - exact).abs().amax(1).min()) > 5e-2


def test_fewer_bits_cost_more(written: dict[str, Path]) -> None:
    tokens = ids(100)
    exact, _ = logits_of(tiny(NAME).ours, cpu_ops, tokens)
    kl = {}
    for scheme in SCHEMES:
        logits, _ = logits_of(load_folder(written[scheme]), cpu_ops, tokens)
        kl[scheme] = divergence(logits, exact)[0]
    assert 0 < kl["w8a16"] < kl["w8a8"] < kl["w4a16"] < 1.0


@pytest.mark.parametrize("scheme", SCHEMES)
def test_decode_equals_prefill(scheme: str, written: dict[str, Path]) -> None:
    model, tokens = load_folder(written[scheme]), ids(30)
    whole = new_runner(model, cpu_ops).prefill([SequenceState(list(tokens))], all_logits=True)
    runner, sequence = new_runner(model, cpu_ops), SequenceState(tokens[:25])
    steps = [runner.prefill([sequence])]
    for token in tokens[25:]:
        sequence.token_ids.append(token)
        steps.append(runner.decode([sequence]))
    torch.testing.assert_close(torch.cat(steps), whole[24:], rtol=0, atol=2e-2)


def test_weights_stay_small(written: dict[str, Path]) -> None:
    """Also in 16 bits and where PyTorch's blocks are not used."""
    numbers = sum(
        n * k
        for group in quantize_plan.joined_layers(tiny(NAME).ours.config)
        for n, k in group.values()
    )
    for scheme, bits in (("w8a8", 8.5), ("w8a16", 8.5), ("w4a16", 5.5)):
        model = load_folder(written[scheme], torch.bfloat16)
        fields = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
        weights = [getattr(layer, field).weight for layer in model.layers for field in fields]
        assert {type(w) for w in weights} == {PackedMatrix if scheme == "w4a16" else Int8Matrix}
        assert sum(w.nbytes for w in weights) < numbers * bits / 8
        assert sum(w.nbytes for w in weights) <= model.bytes_per_step
        # The same numbers as fp32 reads them.
        for a, b in zip(weights, [
            getattr(layer, field).weight
            for layer in load_folder(written[scheme]).layers
            for field in fields
        ], strict=True):  # fmt: skip
            torch.testing.assert_close(dense(a), dense(b), rtol=1e-6, atol=1e-8)


def test_blocks_of_weights_alone(written: dict[str, Path]) -> None:
    """In fp32 on the CPU, PyTorch's embedding bag reads them, where the processor has it."""
    if not block_matrix.can_multiply():
        pytest.skip("this build of PyTorch has no FBGEMM")
    for scheme in ("w8a16", "w4a16"):
        model = load_folder(written[scheme])
        assert isinstance(model.layers[0].down_proj.weight, BlockMatrix)
    assert isinstance(load_folder(written["w8a8"]).layers[0].down_proj.weight, Int8Matrix)


@pytest.mark.parametrize(
    ("bits", "group", "dtype", "called"),
    [
        (4, 32, torch.bfloat16, True),
        (4, 160, torch.bfloat16, True),  # a scale a row
        (4, 16, torch.bfloat16, False),
        (8, 32, torch.bfloat16, False),
        (4, 32, torch.float32, False),
    ],
)
def test_what_multiplies_packed_weights(
    bits: int, group: int, dtype: torch.dtype, called: bool
) -> None:
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(-7, 8, (6, 160), generator=generator, dtype=torch.int8)
    scale = torch.rand(6, 160 // group, generator=generator) + 0.5
    matrix = PackedMatrix(pack(codes, bits), scale, bits, 160)
    x, bias = torch.randn(3, 160, generator=generator).to(dtype), torch.ones(6, dtype=dtype)
    calls: list[Any] = []

    def gemm(*args: Any, **more: Any) -> torch.Tensor:
        calls.append(args)
        result: torch.Tensor = tkernels.reference.w4a16_gemm(*args, **more)
        return result

    y = matrix.multiply(x, types.SimpleNamespace(w4a16_gemm=gemm), bias)
    assert bool(calls) == called
    wide = (codes.view(6, -1, group) * scale[..., None]).view(6, 160)
    expected = x.double() @ wide.double().t() + 1
    torch.testing.assert_close(y.double(), expected, rtol=0.02, atol=0.3)
    assert matrix.multiply(x, types.SimpleNamespace(), bias).shape == (3, 6)


BF16, FP16 = torch.bfloat16, torch.float16


@pytest.mark.parametrize(
    ("values", "dtype", "kept"),
    [
        ([0.0078125, 0.00433349609375], BF16, BF16),
        ([0.0078125, 0.00433349609375], FP16, FP16),
        ([0.0078125, 0.0043], BF16, torch.float32),
        ([1 + 2.0**-10], FP16, FP16),
        ([1 + 2.0**-10], BF16, torch.float32),
        ([2.0**-24], FP16, FP16),  # below what is normal in fp16, and still exact
        ([2.0**-25], FP16, torch.float32),
        ([70000.0], FP16, torch.float32),
        ([2040.0, 2.0**-110], BF16, BF16),
        ([2.0**11], BF16, torch.float32),
        ([2.0**-111], BF16, torch.float32),
        ([0.3], torch.float32, torch.float32),
    ],
)
def test_dtype_of_packed_scales(values: list[float], dtype: torch.dtype, kept: torch.dtype) -> None:
    """Of the activations, where each is one of theirs and none is beyond what kernels take."""
    scale = torch.tensor(values)[:, None]
    got = quantized_weights._in_dtype(scale, dtype)
    assert got.dtype == kept
    assert torch.equal(got.float(), scale)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_triton_kernels_run_it(scheme: str, written: dict[str, Path]) -> None:
    device = tkernels.device.tensor_device()
    model = load_folder(written[scheme], torch.bfloat16, device)
    results = []
    for ops in (tkernels, tkernels.reference):
        runner, sequence = new_runner(model, ops), SequenceState(ids(5))
        rows = [runner.prefill([sequence])]
        sequence.token_ids.append(9)
        rows.append(runner.decode([sequence]))
        results.append(torch.cat(rows))
    scale = float(results[1].abs().max())
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0.05 * scale)
    assert divergence(results[0], results[1])[0] < 0.02


def test_commands_run_it(written: dict[str, Path], tmp_path: Path, capsys: Any) -> None:
    text = tmp_path / "t.jsonl"
    text.write_text('{"text": "some words"}\n{"text": "to predict"}\n')
    for scheme, folder in written.items():
        argv = ["--model", str(folder), "--json"]
        assert perplexity.main([*argv, "--text", str(text)]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["tokens"] == len("some words\nto predict")
        assert generate.main([*argv, "--prompt", "abc", "--max-tokens", "3"]) == 0
        stats = json.loads(capsys.readouterr().out)["stats"]
        assert stats["dtype"] == "float32" or tkernels.device.KIND != "cpu", scheme
    argv = ["--model", str(written["w8a8"]), "--kernels", "triton", "--prompt", "ab", "--json"]
    assert generate.main([*argv, "--max-tokens", "2", "--ignore-eos"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["stats"]["dtype"] == "bfloat16"
    assert len(found["replies"][0]["token_ids"]) == 2
    assert generate.main([*argv, "--dtype", "float32"]) == 2
    assert "must be bfloat16 or float16 with --kernels triton" in capsys.readouterr().err


@pytest.mark.parametrize(("m", "n", "k"), [(1, 7, 5), (3, 33, 100), (40, 64, 2000)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_short_gemm_equals_the_reference(m: int, n: int, k: int, dtype: torch.dtype) -> None:
    x, bias = torch.randn(m, k).to(dtype), torch.randn(n).to(dtype)
    x[0, 1] = 40.0
    weight = torch.randint(-128, 128, (n, k), dtype=torch.int8)
    weight[0] = -128  # the products that 16 bits would cut off
    scale = torch.rand(n) + 0.1
    for more in ({}, {"bias": bias}, {"high": True}, {"mask": torch.tensor([1])}):
        got = cpu_ops.masked_gemm(x, weight, scale, **more)
        assert got.dtype == dtype
        torch.testing.assert_close(got, tkernels.reference.masked_gemm(x, weight, scale, **more))


def test_short_gemm_spoils_bad_rows_alone() -> None:
    x, weight = torch.randn(4, 16), torch.randint(-9, 9, (6, 16), dtype=torch.int8)
    good = cpu_ops.masked_gemm(x, weight, torch.ones(6))
    x[1, 3], x[2] = torch.inf, 0
    x[3, 0] = torch.nan
    got = cpu_ops.masked_gemm(x, weight, torch.ones(6))
    assert torch.equal(got[0], good[0])
    assert bool(got[1].isnan().all() and got[3].isnan().all())
    assert not got[2].any()


# ---- SmoothQuant ---------------------------------------------------------------------------------


@pytest.fixture
def outliers(base: Path, tmp_path: Path) -> Path:
    """The checkpoint with two channels of each norm that are 60 times as large as usual."""
    folder = Path(shutil.copytree(base, tmp_path / "outliers"))
    for path in folder.glob("*.safetensors"):
        tensors = load_file(path)
        for name, tensor in tensors.items():
            if "layernorm" in name:
                tensor[[3, 50]] *= 60.0
            if any(part in name for part in ("q_proj", "k_proj", "v_proj", "gate_", "up_")):
                tensor[:, [3, 50]] /= 60.0
        save_file(tensors, path, metadata={"format": "pt"})
    return folder


def test_folding_changes_nothing_and_smoothing_helps(outliers: Path, tmp_path: Path) -> None:
    tokens = ids(100)
    checkpoint = open_checkpoint(outliers)
    model = load_folder(outliers)
    exact, _ = logits_of(model, cpu_ops, tokens)
    maxima = smooth.activation_maxima(model, cpu_ops, ids(300, 1))
    kl = {}
    for name, factors in (
        ("plain", {}),
        ("smooth", smooth.smoothing_factors(
            checkpoint, quantize_plan.make_plan(checkpoint.config, "w8a8", ()), maxima, 0.5)),
    ):  # fmt: skip
        for scheme in (None, "w8a8"):
            folder = tmp_path / f"{name}-{scheme}"
            folder.mkdir()
            plan = quantize_plan.make_plan(checkpoint.config, scheme, ())
            quantize_write.write_folder(checkpoint, folder, plan, factors)
            logits, _ = logits_of(load_folder(folder), cpu_ops, tokens)
            if scheme is None:
                torch.testing.assert_close(logits, exact, rtol=0, atol=1e-4)
            else:
                kl[name] = divergence(logits, exact)[0]
    assert len(factors) == 3 * (2 + 5)
    assert {float(f.log2().frac().abs().max()) for f in factors.values()} == {0.0}
    norm = factors["model.layers.0.input_layernorm.weight"]
    assert float(norm[[3, 50]].min()) >= 8 * float(norm.median())  # outliers are what is divided
    assert kl["smooth"] < 0.3 * kl["plain"]


def test_maxima_are_those_of_the_norms(base: Path) -> None:
    """Against transformers' modules, over several chunks."""
    tokens, hf = ids(200), tiny(NAME).hf
    seen: dict[str, torch.Tensor] = {}
    hooks = [
        module.register_forward_hook(
            lambda _, __, y, name=name: seen.__setitem__(name, y.abs().amax((0, 1)))
        )
        for name, module in hf.named_modules()
        if name.endswith("layernorm")
    ]
    with torch.no_grad():
        hf(torch.tensor([tokens]))
    for hook in hooks:
        hook.remove()
    found = smooth.activation_maxima(tiny(NAME).ours, cpu_ops, tokens)
    assert found.keys() == {f"{name}.weight" for name in seen}
    for name, value in seen.items():
        torch.testing.assert_close(found[f"{name}.weight"], value, rtol=1e-3, atol=1e-3)


# ---- refused: what a config says -----------------------------------------------------------------


def changed(config: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    found = copy.deepcopy(config)
    *way, last = path.split(".")
    at = found
    for step in way:
        at = at[step]
    at[last] = value
    return found


WEIGHTS, INPUTS = "config_groups.group_0.weights", "config_groups.group_0.input_activations"


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (
            "quant_method",
            "fbgemm_fp8",
            r"unquantised or of compressed-tensors, awq, gptq or fp8 .*method='fbgemm_fp8'",
        ),
        ("quant_method", "bitsandbytes", r"quant_method='bitsandbytes'"),
        ("quantization_status", "initialized", r"quantization_status must be 'compressed'"),
        ("kv_cache_scheme", {"num_bits": 8}, r"kv_cache_scheme must be null"),
        ("transform_config", {"config_groups": {}}, r"transform_config must be empty"),
        ("sparsity_config", {"format": "sparse-bitmask"}, r"sparsity_config must be empty"),
        ("format", "marlin-24", r"group_0\.format must be 'int-quantized' or"),
        ("format", "nvfp4-pack-quantized", r"got 'nvfp4-pack-quantized'"),
        ("config_groups", {"W8A8": ["Linear"]}, r"W8A8 must be a scheme with targets"),
        ("config_groups", {}, r"config_groups must hold a group or more"),
        ("config_groups.group_0.targets", ["re:("], r"regular expressions after 're:'"),
        ("config_groups.group_0.weights", None, r"group_0\.weights must say"),
        ("config_groups.group_0.output_activations", TOKEN, r"output_activations must be null"),
        (f"{WEIGHTS}.type", "float", r"weights\.type must be 'int', got 'float'"),
        (f"{WEIGHTS}.symmetric", False, r"weights\.symmetric must be True, got False"),
        (f"{WEIGHTS}.num_bits", 4, r"weights\.num_bits must be 8, got 4"),
        (f"{WEIGHTS}.strategy", "tensor", r"weights\.strategy must be 'channel', got 'tensor'"),
        (f"{WEIGHTS}.strategy", "block", r"got 'block'"),
        (f"{WEIGHTS}.block_structure", [128, 128], r"block_structure must be null"),
        (f"{WEIGHTS}.actorder", "group", r"weights\.actorder must be .*got 'group'"),
        (f"{WEIGHTS}.dynamic", True, r"weights\.dynamic must be False, got True"),
        (f"{INPUTS}.dynamic", False, r"input_activations\.dynamic must be True, got False"),
        (f"{INPUTS}.strategy", "tensor", r"input_activations\.strategy must be 'token'"),
        (f"{INPUTS}.symmetric", False, r"input_activations\.symmetric must be True"),
        (f"{INPUTS}.type", "float", r"input_activations\.type must be 'int'"),
        ("ignore", "lm_head", r"ignore must be a list of names, got 'lm_head'"),
    ],
)
def test_configs_that_are_not_known(
    path: str, value: Any, words: str, written: dict[str, Path]
) -> None:
    config = json.loads((written["w8a8"] / "config.json").read_text())
    assert configs.from_hf(config).quantization is not None
    config = changed(config, f"quantization_config.{path}", value)
    with pytest.raises(ValueError, match=f"^config.json: .*{words}") as raised:
        configs.from_hf(config)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (f"{WEIGHTS}.num_bits", 3, r"num_bits must be 8 or 4, got 3"),
        (WEIGHTS, CHANNEL | {"symmetric": False}, r"weights\.symmetric must be True, got False"),
        (WEIGHTS, CHANNEL | ZEROS | {"symmetric": 0}, r"must be True or False, got 0"),
        (f"{WEIGHTS}.group_size", 0, r"group_size must be 1 or more, got 0"),
        (f"{WEIGHTS}.strategy", "tensor_group", r"must be 'channel' or 'group'"),
        (INPUTS, TOKEN, r"input_activations must be null unless weights have 8 bits"),
    ],
)
def test_packed_configs_that_are_not_known(
    path: str, value: Any, words: str, written: dict[str, Path]
) -> None:
    config = json.loads((written["w4a16"] / "config.json").read_text())["quantization_config"]
    with pytest.raises(ValueError, match=words):
        compressed.parse(changed(config, path, value))


def test_names_come_before_the_class() -> None:
    eight, four = Scheme(INT, 8, None, True), Scheme(PACKED, 4, 32, False)
    found = compressed.Quantization(
        ((("Linear",), eight), ((DOWN1, r"re:.*\.o_proj$"), four)), ("lm_head", r"re:.*q_proj")
    )
    assert found.scheme_of(DOWN1) == four
    assert found.scheme_of("model.layers.2.self_attn.o_proj") == four
    assert found.scheme_of("model.layers.2.mlp.down_proj") == eight
    assert found.scheme_of(Q0) is None
    assert found.scheme_of("lm_head") is None


def test_other_files_of_older_packages() -> None:
    """Fields that say nothing, and the old word for the same."""
    config = {
        "quant_method": "compressed-tensors", "format": "pack-quantized",
        "quantization_status": "frozen", "sparsity_config": {"format": "dense"},
        "config_groups": {"group_0": {
            "targets": ["Linear"], "output_activations": None, "input_activations": None,
            "weights": {"num_bits": 4, "type": "int", "symmetric": True, "group_size": 128,
                        "strategy": "group", "observer": "minmax", "observer_kwargs": {},
                        "actorder": "weight", "block_structure": None, "dynamic": False},
        }},
    }  # fmt: skip
    assert compressed.parse(config).scheme_of(Q0) == Scheme(PACKED, 4, 128, False)


# ---- refused: what files hold --------------------------------------------------------------------


def edit(folder: Path, to: Path, name: str, value: Any) -> Path:
    """A copy in which a tensor is another one, or (None) not there."""
    shutil.copytree(folder, to)
    path = to / "model.safetensors"
    tensors = load_file(path)
    old = tensors.pop(name, None)
    new = value(old) if callable(value) else value
    if new is not None:
        tensors[name] = new
    save_file(tensors, path, metadata={"format": "pt"})
    return to


def with_number(value: float) -> Any:
    def change(scale: torch.Tensor) -> torch.Tensor:
        scale[2, 0] = value
        return scale

    return change


@pytest.mark.parametrize(
    ("scheme", "part", "value", "words"),
    [
        ("w8a8", "weight_scale", None, r"expected tensor .*weight_scale, got none of that name"),
        ("w4a16", "weight_scale", None, r"expected tensor .*weight_scale, got none of that name"),
        ("w4a16", "weight_packed", None, r"expected tensor .*weight_packed, got none"),
        ("w8a8", "weight_scale", with_number(0.0), r"above 0 in .*, got 1 others, the first 0.0"),
        ("w8a8", "weight_scale", with_number(-1.0), r"above 0 in .*, the first -1.0"),
        ("w4a16", "weight_scale", with_number(float("nan")), r"above 0 in .*, the first nan"),
        ("w8a16", "weight_scale", with_number(float("inf")), r"above 0 in .*, the first inf"),
        ("w8a8", "weight_scale", torch.ones(96), r"weight_scale of shape \[96, 1\], got \[96\]"),
        ("w8a8", "weight_scale", lambda s: s.double() + 1e300, r"above 0 in .*, got 96 others"),
        ("w8a8", "weight_scale", torch.ones(96, 1).int(), r"weight_scale in floats, got .*int32"),
        ("w8a8", "weight", lambda w: w.float(), r"\.weight in torch.int8, .* got torch.float32"),
        ("w4a16", "weight_packed", lambda w: w.float(), r"weight_packed in torch.int32"),
        ("w4a16", "weight_shape", torch.tensor([96, 161]), r"weight_shape to be \[96, 160\]"),
        ("w8a8", "weight_zero_point", torch.zeros(96, 1), r"got 1 more, the first .*zero_point"),
    ],
)
def test_files_that_do_not_fit(
    scheme: str, part: str, value: Any, words: str, written: dict[str, Path], tmp_path: Path
) -> None:
    folder = edit(written[scheme], tmp_path / "m", f"{DOWN1}.{part}", value)
    with pytest.raises(ValueError, match=words):
        load_folder(folder)


def test_zero_points_that_do_not_fit(written: dict[str, Path], tmp_path: Path) -> None:
    """One is missing, then all are the middle, then one has a number for each group."""
    name = f"{DOWN1}.weight_zero_point"
    config = json.loads((written["w4a16"] / "config.json").read_text())
    config = changed(config, f"quantization_config.{WEIGHTS}.symmetric", False)
    tensors = load_file(written["w4a16"] / "model.safetensors")
    for scale in [name for name in tensors if name.endswith("weight_scale")]:
        n, groups = tensors[scale].shape
        middle = torch.full((n // 8, groups), 0x88888888 - 2**32).int()
        tensors[scale.replace("scale", "zero_point")] = middle
    shutil.copytree(written["w4a16"], tmp_path / "m")
    (tmp_path / "m/config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "m/model.safetensors", metadata={"format": "pt"})
    found, expected = (our_layers(load_folder(f)) for f in (tmp_path / "m", written["w4a16"]))
    for layer, value in expected.items():
        assert torch.equal(found[layer], value)
    for i, (value, words) in enumerate(
        [
            (None, r"expected tensor .*\.weight_zero_point, got none of that name"),
            (torch.zeros(96, 5, dtype=torch.int8), r"zero_point of shape \[12, 5\], got \[96, 5\]"),
            (lambda zero: zero.long(), r"zero_point in torch.int32, eight .* got torch.int64"),
        ]
    ):
        with pytest.raises(ValueError, match=words):
            load_folder(edit(tmp_path / "m", tmp_path / str(i), name, value))


@pytest.mark.parametrize("scheme", ["w8a8", "w4a16"])
def test_scales_of_other_floats(scheme: str, written: dict[str, Path], tmp_path: Path) -> None:
    """Powers of two, which all of them have."""

    def found(dtype: torch.dtype) -> Any:
        name, to = f"{DOWN1}.weight_scale", tmp_path / str(dtype)
        folder = edit(written[scheme], to, name, lambda s: torch.full(s.shape, 0.25).to(dtype))
        return load_folder(folder).layers[1].down_proj.weight.scale

    expected = found(torch.float32)
    for dtype in (torch.float64, torch.float8_e4m3fn, torch.float8_e5m2):
        assert torch.equal(found(dtype), expected)


def test_codes_where_none_are_expected(written: dict[str, Path], tmp_path: Path) -> None:
    folder = edit(written["w8a8"], tmp_path / "m", f"{DOWN1}.weight_scale", None)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["ignore"].append(DOWN1)
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"expected floats in .*down_proj\.weight, which config"):
        load_folder(folder)


def test_groups_that_do_not_divide(written: dict[str, Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(written["w4a16"], tmp_path / "m"))
    config = json.loads((folder / "config.json").read_text())
    config = changed(config, f"quantization_config.{WEIGHTS}.group_size", 128)
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"group_size must divide the inputs of .*got 128 and 96"):
        load_folder(folder)


# ---- the command ---------------------------------------------------------------------------------


class Run:
    """Calls ``python -m model.quantize`` in this process."""

    def __init__(self, base: Path, out: Path, capsys: Any) -> None:
        self.base, self.out, self.capsys = base, out, capsys

    def __call__(self, *more: object, scheme: str = "w8a8", code: int = 0) -> tuple[str, str]:
        argv = ["--model", self.base, "--scheme", scheme, "--out", self.out, *more]
        self.capsys.readouterr()  # transformers' own progress bars
        assert quantize.main([str(a) for a in argv]) == code
        found = self.capsys.readouterr()
        return found.out, found.err

    def error(self, *more: object, scheme: str = "w8a8") -> str:
        out, err = self(*more, scheme=scheme, code=2)
        assert out == ""
        assert err.startswith("error: ")
        assert err.count("\n") == 1
        return err


@pytest.fixture
def run(base: Path, tmp_path: Path, capsys: Any) -> Iterator[Run]:
    yield Run(base, tmp_path / "out", capsys)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_summary_says_what_was_done(run: Run) -> None:
    out, _ = run(scheme="w4a16")
    assert "21 linear layers in w4a16, 0 as they were" in out
    assert "bits a weight" in out
    assert "groups of 32 instead of 128 inputs in 21 layers" in out
    assert {path.name for path in run.out.iterdir()} >= {
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
    }  # fmt: skip


def test_smooth_from_a_text(run: Run, tmp_path: Path) -> None:
    text = tmp_path / "t.txt"
    text.write_text("words " * 20)
    facts = json.loads(run("--smooth", 0.5, "--text", text, "--json")[0])
    assert (facts["smooth"], facts["quantized_layers"]) == (0.5, 21)
    stored = load_file(run.out / "model.safetensors")["model.layers.0.input_layernorm.weight"]
    original = tiny(NAME).ours.layers[0].input_layernorm
    ratio = (original / stored).log2()
    torch.testing.assert_close(ratio, ratio.round())
    assert ratio.abs().max() > 0


def test_existing_folders(run: Run) -> None:
    run()
    before = (run.out / "config.json").read_text()
    assert "must not be there without --overwrite" in run.error(scheme="w8a16")
    assert (run.out / "config.json").read_text() == before
    run("--overwrite", scheme="w8a16")
    assert "pack-quantized" in (run.out / "config.json").read_text()
    (run.out / "config.json").unlink()
    assert "must be empty or a checkpoint" in run.error("--overwrite")
    assert (run.out / "model.safetensors").exists()


def test_a_link_stays_one(run: Run, tmp_path: Path) -> None:
    """It may point to a folder, or to where there will be one."""
    whole, run.out = tmp_path / "whole", tmp_path / "link"
    run.out.symlink_to(whole)
    run()
    run("--overwrite", scheme="w8a16")
    assert run.out.is_symlink()
    assert "pack-quantized" in (whole / "config.json").read_text()
    assert {path.name for path in tmp_path.iterdir()} == {"whole", "link"}


def test_places_that_cannot_be_written(run: Run, base: Path, tmp_path: Path) -> None:
    run.out = tmp_path / "absent" / "out"
    assert "--out must be a folder in one that is there" in run.error()
    run.out = tmp_path / "file"
    run.out.write_text("")
    assert "--out must be a folder, got a file" in run.error("--overwrite")
    run.out = base
    assert "must be another folder than that of --model" in run.error("--overwrite")
    run.out = base.parent
    assert "must be another folder than that of --model" in run.error("--overwrite")


def test_wrong_options(run: Run, written: dict[str, Path], tmp_path: Path) -> None:
    assert "no use where activations stay" in run.error("--smooth", 0.5, scheme="w4a16")
    assert "--smooth must be above 0 and below 1, got 1.0" in run.error("--smooth", 1)
    assert "--tokens must be at least 2" in run.error("--smooth", 0.5, "--tokens", 1)
    run.base = written["w8a8"]
    assert "expected an unquantised checkpoint, got a quantised one" in run.error()
    run.base = tmp_path / "none"
    assert "got nothing there" in run.error()


def test_inputs_that_do_not_divide(run: Run, tmp_path: Path) -> None:
    run.base = make_folder(tmp_path / "m", None, "qwen3")  # 72, 120 and 100 inputs
    assert "w4a16 needs inputs that divide by 8, got 100 of" in run.error(scheme="w4a16")
    run(scheme="w8a16")
    assert isinstance(load_folder(run.out).layers[0].down_proj.weight, Int8Matrix)


def test_sensitive_files(run: Run, base: Path, tmp_path: Path) -> None:
    def error(**changes: Any) -> str:
        path = sensitive_file(tmp_path / "s.json", {DOWN1}, base, **changes)
        return run.error("--sensitive", path)

    whole = json.loads(sensitive_file(tmp_path / "s.json", set(), base).read_text())["layers"]
    assert "got more, which the model lacks: model.layers.9.x (1 in all)" in error(
        layers=whole | {"model.layers.9.x": {"sensitive": True}}
    )
    lacking = {name: facts for name, facts in whole.items() if name != Q0}
    assert f"got a file without some: {Q0} (1 in all)" in error(layers=lacking)
    assert "sensitive to be true or false" in error(layers=whole | {Q0: {"sensitive": "yes"}})
    assert "sensitive to be true or false" in error(layers=whole | {Q0: {}})
    assert "version 1, got 'tkernels.sensitive_layers' version 2" in error(version=2)
    assert "got 'other' version 1" in error(format="other")
    assert "expected an object of layers" in error(layers=[Q0])
    assert "expected layers to quantise, got none" in error(
        layers={name: {"sensitive": True} for name in whole}
    )
    assert "expected a file, got none" in run.error("--sensitive", tmp_path / "absent")
    (tmp_path / "s.json").write_text("{")
    assert "expected valid JSON" in run.error("--sensitive", tmp_path / "s.json")


def test_interrupt_leaves_what_was_there(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run()
    before = (run.out / "model.safetensors").read_bytes()
    real, calls = compressed.quantise, iter(range(100))

    def stop(*args: Any) -> Any:
        if next(calls) == 5:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(compressed, "quantise", stop)
    out, err = run("--overwrite", code=130)
    assert (out, err) == ("", "interrupted; nothing was written\n")
    assert (run.out / "model.safetensors").read_bytes() == before


def test_full_disk_is_one_sentence(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(quantize_write, "_write_json", full)
    assert "No space left on device" in run.error()
    assert not run.out.exists()


def test_several_shards_are_one_checkpoint(
    run: Run, written: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantize_write, "_SHARD_BYTES", 100_000)
    run()
    assert (run.out / "model.safetensors.index.json").exists()
    names = sorted(path.name for path in run.out.glob("*.safetensors"))
    assert len(names) > 2
    assert names[0] == f"model-00001-of-{len(names):05d}.safetensors"
    whole = load_file(written["w8a8"] / "model.safetensors")
    parts = {k: v for name in names for k, v in load_file(run.out / name).items()}
    assert parts.keys() == whole.keys()
    assert all(torch.equal(parts[name], value) for name, value in whole.items())


def test_weights_that_are_not_finite(run: Run, tmp_path: Path) -> None:
    run.base = Path(shutil.copytree(run.base, tmp_path / "bad"))
    path = sorted(run.base.glob("*.safetensors"))[1]
    tensors = load_file(path)
    name = next(name for name, t in tensors.items() if t.dim() == 2)
    tensors[name][0, 0] = torch.nan
    save_file(tensors, path, metadata={"format": "pt"})
    assert f"got 1 NaN or Inf in {name}" in run.error()


def test_help_has_examples_and_needs_no_torch() -> None:
    import subprocess
    import sys

    program = (
        "import sys, model.quantize as q\n"
        "try: q.main(['--help'])\n"
        "except SystemExit as e: print(e.code, 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=Path(__file__).resolve().parents[1],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "python -m model.quantize --scheme w8a8" in done.stdout
    assert done.stdout.endswith("0 False\n")


# ---- quality -------------------------------------------------------------------------------------


def test_quality_table(base: Path, tmp_path: Path, capsys: Any) -> None:
    flagged = sensitive_file(tmp_path / "s.json", {DOWN1}, base)
    text = tmp_path / "t.txt"
    text.write_text("".join(chr(97 + (i * i) % 23) for i in range(400)))
    argv = ["--model", str(base), "--text", str(text), "--calibration", str(text)]
    argv += ["--tokens", "256", "--context", "128", "--decode", "3", "--sensitive", str(flagged)]
    assert weight_quality.main([*argv, "--json"]) == 0
    rows = {row["name"]: row for row in map(json.loads, capsys.readouterr().out.splitlines())}
    assert list(rows) == [
        "16 bits", "w8a8", "w8a8, sensitive", "w8a8, smooth 0.5", "w8a8, both, smooth 0.5",
        "w8a16", "w4a16", "16 bits, in bfloat16",
    ]  # fmt: skip
    assert rows["16 bits"]["kl"] == pytest.approx(0, abs=1e-6)
    assert rows["w8a8, sensitive"]["kept_layers"] == 1
    assert rows["w8a16"]["kl"] < rows["w8a8"]["kl"] < rows["w4a16"]["kl"]
    bytes_of = {name: row["linear_bytes"] for name, row in rows.items()}
    assert bytes_of["w4a16"] < bytes_of["w8a8"] < bytes_of["w8a8, sensitive"] < bytes_of["16 bits"]
    assert all(row["tokens_per_s"] > 0 for row in rows.values())
    assert weight_quality.main([*argv, "--decode", "0"]) == 0
    assert "| w8a8, sensitive | 1 |" in capsys.readouterr().out
    for more, words in (
        (["--tokens", "9999"], "expected a text of 9999 tokens"),
        (["--smooth", "0"], "--smooth must be above 0"),
        (["--context", "1"], "--context must be at least 2"),
    ):
        assert weight_quality.main([*argv, *more]) == 2
        assert words in capsys.readouterr().err


# ---- trained checkpoints -------------------------------------------------------------------------


@pytest.mark.model
@pytest.mark.slow
def test_a_gguf_file_becomes_a_folder(tmp_path: Path, capsys: Any) -> None:
    from transformers import AutoConfig

    out, path = tmp_path / "out", smollm2()
    argv = ["--model", str(path), "--scheme", "w8a16", "--out", str(out), "--json"]
    assert quantize.main(argv) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["linear_bytes"] < facts["linear_weights"] * 1.01
    gguf, ours = open_checkpoint(path), open_checkpoint(out)
    text = "<|im_start|>user\nWho wrote 'Faust', in 1808?<|im_end|>\n"
    tokens = gguf.tokenizer(text).input_ids
    assert ours.tokenizer(text).input_ids == tokens
    assert ours.tokenizer.chat_template == gguf.tokenizer.chat_template
    assert ours.config.eos_token_ids == gguf.config.eos_token_ids
    theirs = AutoConfig.from_pretrained(out)
    assert theirs.rope_parameters["rope_theta"] == 100000.0
    assert theirs.head_dim == 64
    logits = []
    for checkpoint in (gguf, ours):
        model = load_model(checkpoint.config, checkpoint.source, dtype=torch.float32, device=CPU)
        logits.append(logits_of(model, cpu_ops, tokens)[0])
    kl, agreed = divergence(logits[1], logits[0])
    assert kl < 0.01
    assert agreed > 0.85


@pytest.mark.model
@pytest.mark.slow
def test_trained_model_keeps_its_quality(shared: Path, tmp_path: Path, capsys: Any) -> None:
    argv = ["--model", str(shared / "models" / "qwen3-tiny-dense"), "--decode", "0", "--json"]
    argv += ["--text", str(shared / "data" / "code_val.jsonl"), "--tokens", "1024"]
    assert weight_quality.main(argv) == 0
    rows = {row["name"]: row for row in map(json.loads, capsys.readouterr().out.splitlines())}
    assert rows["w8a16"]["perplexity_rise"] < 0.003
    assert rows["w8a8"]["perplexity_rise"] < 0.01
    assert rows["w4a16"]["share_of_16_bits"] < 0.27
    assert 0.01 < rows["w4a16"]["perplexity_rise"] < 0.15
