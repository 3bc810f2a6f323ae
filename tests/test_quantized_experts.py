"""Experts in int8: what is written, what the network makes of it, what is refused."""

from __future__ import annotations

import copy
import dataclasses
import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import load_folder, make_folder, new_runner, tiny
from safetensors.torch import load_file, save_file
from unstacked import (
    NAME,
    experts_of,
    hf_logits,
    ids,
    rounded,
    stored_weights,
    unstacked,
    values,
)

import tkernels
from model import config as configs
from model import cpu_ops, generate, quantize, smooth, weight_quality
from model.checkpoint import open_checkpoint
from model.kv_cache import SequenceState
from model.perplexity import divergence, logits_of
from model.quantize_plan import joined_layers, make_plan
from model.quantized_matrix import Int8Experts

MIXED = "qwen3_moe-every-other"  # the middle one of three layers has 7 experts
SCHEMES = ("w8a8", "w8a16")
needs_package = pytest.mark.skipif(
    importlib.util.find_spec("compressed_tensors") is None,
    reason="compressed-tensors is not installed (pip install .[dev])",
)
each_scheme = pytest.mark.parametrize("scheme", SCHEMES)
each_ops = pytest.mark.parametrize("ops", [cpu_ops, tkernels.reference], ids=["short", "reference"])


def write(base: Path, out: Path, scheme: str, *more: object) -> Path:
    argv = ["--model", base, "--scheme", scheme, "--out", out, "--json", *more]
    assert quantize.main([str(a) for a in argv]) == 0
    return out


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("base") / "m", None, NAME)


@pytest.fixture(scope="module")
def written(base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The checkpoint in each scheme."""
    folder = tmp_path_factory.mktemp("written")
    return {scheme: write(base, folder / scheme, scheme) for scheme in SCHEMES}


def test_unstacked_experts_are_the_network() -> None:
    torch.testing.assert_close(
        hf_logits(unstacked(), ids(20)), hf_logits(tiny(NAME).hf, ids(20)), rtol=0, atol=1e-5
    )


# ---- results -------------------------------------------------------------------------------------


@each_ops
@each_scheme
def test_network_is_that_of_rounded_matrices(
    scheme: str, ops: Any, written: dict[str, Path]
) -> None:
    """Against transformers' network with rounded weights, and in w8a8 rounded inputs."""
    hf, found = unstacked(), stored_weights(written[scheme])
    assert len(found) == 3 * (4 + 5 * 3)
    for name, module in hf.named_modules():
        if name in found:
            error = (module.weight.data - found[name]).abs().amax(1)
            assert bool((error <= module.weight.data.abs().amax(1) / 250).all())
            module.weight.data.copy_(found[name])
            if scheme == "w8a8":
                module.register_forward_pre_hook(rounded)
    tokens = ids(40)
    expected = hf_logits(hf, tokens)
    logits, _ = logits_of(load_folder(written[scheme]), ops, tokens)
    # A number on the edge of two codes may take the other one.
    close = 2e-2 if scheme == "w8a8" else 1e-4
    torch.testing.assert_close(logits, expected, rtol=0, atol=close)
    for experts_alone in (False, True):  # what is left out would show
        for name, module in hf.named_modules():
            if name in found and ("experts" in name) == experts_alone:
                module._forward_pre_hooks.clear()
                module.weight.data.copy_(dict(unstacked().named_parameters())[f"{name}.weight"])
        assert float((hf_logits(hf, tokens) - logits).abs().max()) > 4e-2


@each_scheme
@pytest.mark.parametrize("int8", [("gate_up", "down"), ("gate_up",), ("down",)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_short_experts_equal_the_reference(
    scheme: str, int8: tuple[str, ...], dtype: torch.dtype
) -> None:
    """One projection may be int8 without the other; more rows than are taken at once."""
    generator = torch.Generator().manual_seed(0)
    x, router = torch.randn(600, 24, generator=generator).to(dtype), torch.randn(5, 24)
    more: dict[str, Any] = {"high": scheme == "w8a16"}
    weights = []
    for name, shape in (("gate_up", (5, 32, 24)), ("down", (5, 24, 16))):
        if name in int8:
            codes = torch.randint(-128, 128, shape, generator=generator, dtype=torch.int8)
            more[f"{name}_scale"] = torch.rand(shape[:2], generator=generator) / 200
            weights.append(codes)
        else:
            weights.append((torch.randn(shape, generator=generator) / 4).to(dtype))
    calls = []
    for ops in (cpu_ops, tkernels.reference):
        chosen = torch.empty(600, 2, dtype=torch.int32)
        logits = x @ router.to(dtype).t()
        y = ops.fused_moe(x, logits, *weights, top_k=2, topk_ids_out=chosen, **more)
        calls.append((y, chosen))
    assert torch.equal(calls[0][1], calls[1][1])
    (got, _), (expected, _) = calls
    assert got.dtype == dtype
    error = (got - expected).float().norm() / expected.float().norm()
    # cpu_ops rounds to dtype before the activation, and a code may then be another one.
    assert error < (1e-2 if dtype == torch.bfloat16 else 2e-3 if scheme == "w8a8" else 1e-5)
    assert bool(expected.isfinite().all())
    assert float(expected.float().std()) > 0.1


@each_scheme
def test_decode_equals_prefill(scheme: str, written: dict[str, Path]) -> None:
    model, tokens = load_folder(written[scheme]), ids(30)
    whole = new_runner(model, cpu_ops).prefill([SequenceState(list(tokens))], all_logits=True)
    runner, sequence = new_runner(model, cpu_ops), SequenceState(tokens[:25])
    steps = [runner.prefill([sequence])]
    for token in tokens[25:]:
        sequence.token_ids.append(token)
        steps.append(runner.decode([sequence]))
    torch.testing.assert_close(torch.cat(steps), whole[24:], rtol=0, atol=2e-2)


@each_scheme
def test_triton_kernels_run_it(scheme: str, tmp_path: Path) -> None:
    device, name = tkernels.device.tensor_device(), "qwen3_moe-one-of-three"
    out = write(make_folder(tmp_path / "m", None, name), tmp_path / "out", scheme)
    model = load_folder(out, torch.bfloat16, device)
    model = dataclasses.replace(model, layers=model.layers[:1])
    assert isinstance(experts_of(model, 0).gate_up_proj, Int8Experts)
    results = []
    for ops in (tkernels, tkernels.reference):
        runner, sequence = new_runner(model, ops), SequenceState(ids(5))
        rows = [runner.prefill([sequence])]
        sequence.token_ids.append(9)
        rows.append(runner.decode([sequence]))
        results.append(torch.cat(rows))
    scale = float(results[1].abs().max())
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0.05 * scale)


def test_bytes_of_a_token(written: dict[str, Path]) -> None:
    """Of the two experts that it goes through, codes and scales."""
    for folder in written.values():
        for dtype, size in ((torch.float32, 4), (torch.bfloat16, 2)):
            experts = experts_of(load_folder(folder, dtype), 0)
            codes, scales = 3 * 28 * 72, 2 * 28 + 72
            assert experts.bytes_per_token == size * 5 * 72 + 2 * (codes + 4 * scales)


@each_scheme
def test_generate_runs_it(scheme: str, written: dict[str, Path], capsys: Any) -> None:
    argv = ["--model", str(written[scheme]), "--prompt", "abc", "--max-tokens", "4", "--json"]
    assert generate.main([*argv, "--ignore-eos", "--moe-stats", "--kernels", "torch"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["replies"][0]["token_ids"]) == 4
    assert [sum(row["load"]) for row in found["stats"]["experts"]["layers"]] == [2 * 6] * 3


# ---- what is written -----------------------------------------------------------------------------


@each_scheme
def test_command_says_what_it_did(scheme: str, base: Path, tmp_path: Path, capsys: Any) -> None:
    out = write(base, tmp_path / "out", scheme)
    facts = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (facts["quantized_layers"], facts["kept_layers"]) == (3 * 4, [])
    assert (facts["quantized_experts"], facts["kept_experts"]) == (15, 0)
    tensors = load_file(out / "model.safetensors")
    sizes = sum(t.nbytes for name, t in tensors.items() if ".mlp." in name)
    assert facts["expert_bytes"] == sizes
    assert tensors["model.layers.0.mlp.gate.weight"].dtype == torch.float32
    router = tiny(NAME).hf.model.layers[0].mlp.gate.weight
    assert torch.equal(tensors["model.layers.0.mlp.gate.weight"], router)
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    assert config["ignore"] == ["lm_head", r"re:.*\.mlp\.gate$"]
    argv = ["--model", base, "--scheme", scheme, "--out", out, "--overwrite"]
    assert quantize.main([str(a) for a in argv]) == 0
    line = f"\n15 experts in {scheme}, routers as they were; they take 0.1 MB of that"
    assert line in capsys.readouterr().out


def sensitive_file(path: Path, model: Path, **flagged: bool) -> Path:
    """All linear layers, none of which is sensitive, and what else is given."""
    groups = joined_layers(configs.from_folder(model))
    layers = {name: {"sensitive": False} for group in groups for name in group} | flagged
    content = {"format": "tkernels.sensitive_layers", "version": 1, "layers": layers}
    path.write_text(json.dumps(content))
    return path


@pytest.mark.parametrize("name", ["model.layers.1.mlp.experts", ".3.up_proj"])
def test_experts_of_a_layer_are_sensitive_together(
    name: str, base: Path, tmp_path: Path, capsys: Any
) -> None:
    name = name if name.startswith("model") else f"model.layers.1.mlp.experts{name}"
    more = {name: True, "model.layers.2.mlp.experts.0.down_proj": False}
    flagged = sensitive_file(tmp_path / "s.json", base, **more)
    out = write(base, tmp_path / "out", "w8a16", "--sensitive", flagged)
    facts = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (facts["quantized_experts"], facts["kept_experts"]) == (10, 5)
    ours, original = load_folder(out), tiny(NAME).ours
    for part in ("gate_up_proj", "down_proj"):
        kinds = [isinstance(getattr(experts_of(ours, i), part), Int8Experts) for i in range(3)]
        assert kinds == [True, False, True]
        kept = getattr(experts_of(ours, 1), part)
        assert torch.equal(kept, getattr(experts_of(original, 1), part))
    stray = sensitive_file(tmp_path / "s.json", base, **{"model.layers.3.mlp.experts": True})
    argv = ["--model", base, "--scheme", "w8a8", "--out", tmp_path / "x", "--sensitive", stray]
    assert quantize.main([str(a) for a in argv]) == 2
    assert "the model lacks: model.layers.3.mlp.experts (1 in all)" in capsys.readouterr().err


def test_experts_alone_are_quantised(base: Path, tmp_path: Path) -> None:
    names = [name for group in joined_layers(configs.from_folder(base)) for name in group]
    flagged = sensitive_file(tmp_path / "s.json", base, **dict.fromkeys(names, True))
    model = load_folder(write(base, tmp_path / "out", "w8a8", "--sensitive", flagged))
    assert isinstance(model.layers[0].o_proj.weight, torch.Tensor)
    assert isinstance(experts_of(model, 0).down_proj, Int8Experts)


def test_inputs_of_experts_that_do_not_divide() -> None:
    config = tiny(NAME).ours.config
    assert config.mixture is not None
    mixture = dataclasses.replace(config.mixture, intermediate_size=30)
    config = dataclasses.replace(config, mixture=mixture)
    message = r"w8a16 needs inputs that divide by 4, got 30 of model.layers.0.mlp.experts.0.down"
    with pytest.raises(ValueError, match=message):
        make_plan(config, "w8a16", ())
    assert len(make_plan(config, "w8a8", ()).experts) == 3


def test_quality_table_counts_experts(base: Path, tmp_path: Path, capsys: Any) -> None:
    text = tmp_path / "t.txt"
    text.write_text("".join(chr(97 + (i * i) % 23) for i in range(100)))
    argv = ["--model", str(base), "--text", str(text), "--calibration", str(text), "--json"]
    assert weight_quality.main([*argv, "--tokens", "64", "--context", "64", "--decode", "0"]) == 0
    rows = {row["name"]: row for row in map(json.loads, capsys.readouterr().out.splitlines())}
    assert rows["w8a8"]["share_of_16_bits"] < 0.31  # of fp32
    assert 0 < rows["w8a16"]["kl"] < rows["w8a8"]["kl"] < 0.1


# ---- SmoothQuant ---------------------------------------------------------------------------------


@pytest.fixture
def outliers(base: Path, tmp_path: Path) -> Path:
    """The checkpoint with two channels before experts that are 60 times as large as usual."""
    folder = Path(shutil.copytree(base, tmp_path / "outliers"))
    for path in folder.glob("*.safetensors"):
        tensors = load_file(path)
        for name, tensor in tensors.items():
            if "post_attention_layernorm" in name:
                tensor[[3, 50]] *= 60.0
            if "mlp.gate" in name or "gate_proj" in name or "up_proj" in name:
                tensor[..., [3, 50]] /= 60.0
        save_file(tensors, path, metadata={"format": "pt"})
    return folder


def test_smoothing_takes_router_and_experts_along(outliers: Path, tmp_path: Path) -> None:
    tokens, text = ids(100), tmp_path / "t.txt"
    text.write_text("".join(map(chr, range(33, 127))) * 3)
    model = load_folder(outliers)
    exact, _ = logits_of(model, cpu_ops, tokens)
    more = ("--smooth", 0.5, "--text", text, "--tokens", 256)
    smoothed = load_folder(write(outliers, tmp_path / "smooth", "w8a8", *more))
    kl = {}
    for name, found in (
        ("plain", load_folder(write(outliers, tmp_path / "plain", "w8a8"))),
        ("smooth", smoothed),
    ):
        kl[name] = divergence(logits_of(found, cpu_ops, tokens)[0], exact)[0]
    assert kl["smooth"] < 0.3 * kl["plain"]
    # Norms and routers of the one and experts of the other, their columns multiplied: the same.
    for i, layer in enumerate(model.layers):
        other = smoothed.layers[i].post_attention_layernorm
        factor = layer.post_attention_layernorm / other
        assert torch.equal(factor.log2().frac(), torch.zeros_like(factor))
        assert float(factor[[3, 50]].min()) >= 8 * float(factor.median())
        layer.post_attention_layernorm = other
        experts = experts_of(model, i)
        experts.router = experts_of(smoothed, i).router
        assert isinstance(experts.gate_up_proj, torch.Tensor)
        experts.gate_up_proj = experts.gate_up_proj * factor
        inside = values(experts_of(smoothed, i).gate_up_proj)
        step = experts.gate_up_proj.abs().amax(-1, keepdim=True) / 250
        assert bool(((inside - experts.gate_up_proj).abs() <= step).all())
    torch.testing.assert_close(logits_of(model, cpu_ops, tokens)[0], exact, rtol=0, atol=1e-4)


def test_norms_before_experts_that_stay_are_not_smoothed(base: Path) -> None:
    checkpoint = open_checkpoint(base)
    maxima = smooth.activation_maxima(tiny(NAME).ours, cpu_ops, ids(50))
    plan = make_plan(checkpoint.config, "w8a8", ["model.layers.1.mlp.experts"])
    factors = smooth.smoothing_factors(checkpoint, plan, maxima, 0.5)
    norms = {name for name in factors if "post_attention" in name}
    assert norms == {f"model.layers.{i}.post_attention_layernorm.weight" for i in (0, 2)}
    routers = {name for name in factors if name.endswith("mlp.gate.weight")}
    assert routers == {f"model.layers.{i}.mlp.gate.weight" for i in (0, 2)}
    assert not any("layers.1.mlp" in name or "down_proj" in name for name in factors)
    # What counts are the largest weights of all experts.
    factor = factors["model.layers.0.post_attention_layernorm.weight"]
    columns = values(experts_of(tiny(NAME).ours, 0).gate_up_proj).abs().amax((0, 1))
    most = maxima["model.layers.0.post_attention_layernorm.weight"]
    assert torch.equal(factor, (most / columns).sqrt().log2().round().exp2())


# ---- other packages ------------------------------------------------------------------------------


@needs_package
@each_scheme
def test_the_package_reads_what_is_written(scheme: str, written: dict[str, Path]) -> None:
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config

    config = json.loads((written[scheme] / "config.json").read_text())["quantization_config"]
    hf = unstacked()
    apply_quantization_config(hf, QuantizationConfig.model_validate(config))
    compressor = ModelCompressor.from_pretrained_model(hf)
    compressor.compress_model(hf)
    for p in hf.parameters():
        p.data.zero_()
    hf.load_state_dict(load_file(written[scheme] / "model.safetensors"), strict=True)
    compressor.decompress_model(hf)
    modules, found = dict(hf.named_modules()), stored_weights(written[scheme])
    for name, value in found.items():
        torch.testing.assert_close(modules[name].weight.data, value, rtol=1e-6, atol=1e-8)
    tokens = ids(20)
    logits, _ = logits_of(load_folder(written[scheme]), cpu_ops, tokens)
    if scheme == "w8a8":  # the package takes another scale for activations
        assert divergence(logits, hf_logits(hf, tokens))[0] < 0.03
    else:
        torch.testing.assert_close(logits, hf_logits(hf, tokens), rtol=0, atol=1e-4)


@needs_package
def test_transformers_reads_experts_beside_those_that_stay(base: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    flagged = sensitive_file(tmp_path / "s.json", base, **{"model.layers.1.mlp.experts": True})
    out = write(base, tmp_path / "out", "w8a16", "--sensitive", flagged)
    hf = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    ours, _ = logits_of(load_folder(out), cpu_ops, ids(20))
    torch.testing.assert_close(ours, hf_logits(hf, ids(20)), rtol=0, atol=1e-4)


CHANNEL = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
TOKEN = {"num_bits": 8, "type": "int", "strategy": "token", "symmetric": True, "dynamic": True}


def by_the_package(hf: Any, folder: Path, ignore: list[str], inputs: Any = TOKEN) -> Path:
    """The linear layers of a network in 8 bits, rounded and saved by the package."""
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config

    scheme = {"targets": ["Linear"], "weights": CHANNEL, "input_activations": inputs}
    config = {"config_groups": {"group_0": scheme}, "ignore": ["lm_head", *ignore]}
    config["quantization_status"] = "frozen"
    apply_quantization_config(hf, QuantizationConfig.model_validate(config))
    for module in hf.modules():
        if (scale := getattr(module, "weight_scale", None)) is not None:
            scale.data.copy_(module.weight.data.abs().amax(1, keepdim=True) / 127.5)
    compressor = ModelCompressor.from_pretrained_model(hf)
    compressor.compress_model(hf)
    hf.config.save_pretrained(folder)
    tensors = {name: t for name, t in hf.state_dict().items() if name != "lm_head.weight"}  # tied
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    compressor.update_config(str(folder))
    compressor.decompress_model(hf)
    return folder


@needs_package
@each_scheme
def test_runner_reads_what_the_package_writes(scheme: str, tmp_path: Path) -> None:
    """A linear layer an expert; in another class the router is not quantised, ignored or not."""
    hf = unstacked(MIXED)
    by_the_package(hf, tmp_path, [r"re:.*q_proj"], TOKEN if scheme == "w8a8" else None)
    ours = load_folder(tmp_path)
    experts = experts_of(ours, 1)
    assert isinstance(experts.gate_up_proj, Int8Experts)
    assert experts.gate_up_proj.quantized_activations == (scheme == "w8a8")
    for e, expert in enumerate(hf.model.layers[1].mlp.experts):
        gate, up, down = (module.weight.data for module in expert.values())
        mine = values(experts.gate_up_proj)[e]
        torch.testing.assert_close(mine, torch.cat((gate, up)), rtol=1e-6, atol=1e-8)
        torch.testing.assert_close(values(experts.down_proj)[e], down, rtol=1e-6, atol=1e-8)
    logits, _ = logits_of(ours, cpu_ops, ids(20))
    if scheme == "w8a8":
        assert divergence(logits, hf_logits(hf, ids(20)))[0] < 0.03
    else:
        torch.testing.assert_close(logits, hf_logits(hf, ids(20)), rtol=0, atol=1e-4)


@needs_package
def test_stacked_experts_are_no_linear_layers(tmp_path: Path) -> None:
    """Those of transformers 5, which a config that says Linear does not mean."""
    hf = copy.deepcopy(tiny(MIXED).hf)
    by_the_package(hf, tmp_path, [], None)
    ours = load_folder(tmp_path)
    assert isinstance(experts_of(ours, 1).gate_up_proj, torch.Tensor)
    assert not isinstance(ours.layers[1].o_proj.weight, torch.Tensor)
    logits, _ = logits_of(ours, cpu_ops, ids(20))
    torch.testing.assert_close(logits, hf_logits(hf, ids(20)), rtol=0, atol=1e-4)


def test_quantised_experts_are_not_quantised_again(
    written: dict[str, Path], tmp_path: Path, capsys: Any
) -> None:
    argv = ["--model", written["w8a8"], "--scheme", "w8a8", "--out", tmp_path / "x"]
    assert quantize.main([str(a) for a in argv]) == 2
    assert "expected an unquantised checkpoint, got a quantised one" in capsys.readouterr().err
