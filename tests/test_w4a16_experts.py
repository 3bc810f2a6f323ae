"""Experts in 4 bits: what is written, what the network makes of it, who else reads it."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import load_folder, make_folder, new_runner, tiny
from safetensors.torch import load_file, save_file
from unstacked import experts_of, hf_logits, ids, stored_weights, unstacked, values

import tkernels
from model import config as configs
from model import cpu_ops, generate, quantize, weight_quality
from model.kv_cache import SequenceState
from model.perplexity import divergence, logits_of
from model.quantize_plan import describe_plan, joined_layers, make_plan
from model.quantized_matrix import Int4Experts

NAME = "qwen3_moe-32"  # a dense layer, and two with 5 experts of 96 between 64
LAYER = "model.layers.1.mlp.experts"
needs_package = pytest.mark.skipif(
    importlib.util.find_spec("compressed_tensors") is None,
    reason="compressed-tensors is not installed (pip install .[dev])",
)
each_ops = pytest.mark.parametrize("ops", [cpu_ops, tkernels.reference], ids=["short", "reference"])


def write(base: Path, out: Path, *more: object) -> Path:
    argv = ["--model", base, "--scheme", "w4a16", "--out", out, "--json", *more]
    assert quantize.main([str(a) for a in argv]) == 0
    return out


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("base") / "m", None, NAME)


@pytest.fixture(scope="module")
def written(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(base, tmp_path_factory.mktemp("written") / "w4a16")


@pytest.fixture(scope="module")
def half(written: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with all floats in bfloat16, as checkpoints mostly have them."""
    folder = tmp_path_factory.mktemp("half")
    for path in written.iterdir():
        if path.suffix != ".safetensors":
            (folder / path.name).write_bytes(path.read_bytes())
    tensors = load_file(written / "model.safetensors")
    tensors = {n: t.bfloat16() if t.is_floating_point() else t for n, t in tensors.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


# ---- results -------------------------------------------------------------------------------------


@each_ops
def test_network_is_that_of_rounded_matrices(ops: Any, written: Path) -> None:
    """Against transformers' network with dequantised weights."""
    hf, found = unstacked(NAME), stored_weights(written)
    assert len(found) == 3 * 4 + 3 + 2 * 5 * 3
    for name, module in hf.named_modules():
        if name in found:
            group = 32 if "experts" in name else 128 if "down_proj" in name else 64
            weight = module.weight.data.view(len(module.weight), -1, group)
            error = (weight - found[name].view(weight.shape)).abs()
            assert bool((error <= weight.abs().amax(2, keepdim=True) / 14.9).all())
            module.weight.data.copy_(found[name])
    tokens = ids(40)
    logits, _ = logits_of(load_folder(written), ops, tokens)
    torch.testing.assert_close(logits, hf_logits(hf, tokens), rtol=0, atol=1e-4)
    for name, module in hf.named_modules():
        if name in found and "experts" in name:
            module.weight.data.copy_(dict(unstacked(NAME).named_parameters())[f"{name}.weight"])
    assert float((hf_logits(hf, tokens) - logits).abs().max()) > 4e-2


@pytest.mark.parametrize("four_bits", [("gate_up", "down"), ("gate_up",), ("down",)])
@pytest.mark.parametrize("zeros", [(), ("gate_up", "down")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_short_experts_equal_the_reference(
    four_bits: tuple[str, ...], zeros: tuple[str, ...], dtype: torch.dtype
) -> None:
    """One projection may be packed without the other; more rows than are taken at once."""
    generator = torch.Generator().manual_seed(0)
    x, router = torch.randn(600, 64, generator=generator).to(dtype), torch.randn(5, 64)
    more, weights = {}, []
    for name, shape in (("gate_up", (5, 64, 64)), ("down", (5, 64, 32))):
        if name in four_bits:
            words = (shape[0], shape[1], shape[2] // 8)
            low, end = -(2**31), 2**31
            packed = torch.randint(low, end, words, generator=generator, dtype=torch.int32)
            scale = torch.rand(*shape[:2], shape[2] // 32, generator=generator) / 20
            more[f"{name}_scale"] = scale.to(dtype)
            if name in zeros:
                zero = torch.randint(0, 17, scale.shape, generator=generator, dtype=torch.int8)
                more[f"{name}_zero"] = zero
            weights.append(packed)
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
    assert error < (1e-2 if dtype == torch.bfloat16 else 1e-5)  # cpu_ops rounds before the sums
    assert bool(expected.isfinite().all())
    assert float(expected.float().std()) > 0.1


def test_experts_that_nobody_chose_are_not_read() -> None:
    x = torch.randn(6, 64)
    packed = torch.randint(-(2**31), 2**31, (5, 64, 8), dtype=torch.int32)
    scale = torch.rand(5, 64, 2)
    logits = torch.zeros(6, 5)
    logits[:, [1, 3]] = 4.0
    scale[[0, 2, 4]] = torch.nan
    y = cpu_ops.fused_moe(
        x, logits, packed, packed[..., :4].contiguous(), top_k=2, gate_up_scale=scale,
        down_scale=scale[..., :1].contiguous(),
    )  # fmt: skip
    assert bool(y.isfinite().all())
    logits[0, 2] = 9.0
    y = cpu_ops.fused_moe(
        x, logits, packed, packed[..., :4].contiguous(), top_k=2, gate_up_scale=scale,
        down_scale=scale[..., :1].contiguous(),
    )  # fmt: skip
    assert bool(y[0].isnan().all())
    assert bool(y[1:].isfinite().all())


def test_decode_equals_prefill(written: Path) -> None:
    model, tokens = load_folder(written), ids(30)
    whole = new_runner(model, cpu_ops).prefill([SequenceState(list(tokens))], all_logits=True)
    runner, sequence = new_runner(model, cpu_ops), SequenceState(tokens[:25])
    steps = [runner.prefill([sequence])]
    for token in tokens[25:]:
        sequence.token_ids.append(token)
        steps.append(runner.decode([sequence]))
    torch.testing.assert_close(torch.cat(steps), whole[24:], rtol=0, atol=1e-4)


def test_triton_kernels_run_it(half: Path) -> None:
    model = load_folder(half, torch.bfloat16, tkernels.device.tensor_device())
    model = dataclasses.replace(model, layers=model.layers[1:2])
    assert isinstance(experts_of(model, 0).gate_up_proj, Int4Experts)
    results = []
    for ops in (tkernels, tkernels.reference):
        runner, sequence = new_runner(model, ops), SequenceState(ids(5))
        rows = [runner.prefill([sequence])]
        sequence.token_ids.append(9)
        rows.append(runner.decode([sequence]))
        results.append(torch.cat(rows))
    scale = float(results[1].abs().max())
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0.05 * scale)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_scales_are_in_the_dtype_of_activations_where_that_loses_nothing(
    dtype: torch.dtype, written: Path, half: Path
) -> None:
    """And bytes of a token are those of the two experts that it goes through, as they lie."""
    for folder, kept in ((written, torch.float32), (half, dtype)):
        experts = experts_of(load_folder(folder, dtype), 1)
        assert isinstance(experts.gate_up_proj, Int4Experts)
        assert isinstance(experts.down_proj, Int4Experts)
        assert experts.gate_up_proj.packed.shape == (5, 192, 8)
        assert experts.down_proj.packed.shape == (5, 64, 12)
        assert experts.gate_up_proj.scale.shape == (5, 192, 2)
        assert experts.down_proj.scale.shape == (5, 64, 3)
        scale = experts.down_proj.scale
        if dtype != torch.float16 or folder == written:  # some of bf16 may be small in fp16
            assert scale.dtype == kept
        elif scale.dtype != dtype:
            assert not torch.equal(scale.half().float(), scale)
        numbers, groups = 3 * 64 * 96, 192 * 2 + 64 * 3
        scales = 192 * 2 * experts.gate_up_proj.scale.itemsize + 64 * 3 * scale.itemsize
        assert scales <= 4 * groups
        assert experts.bytes_per_token == dtype.itemsize * 5 * 64 + 2 * (numbers // 2 + scales)


def test_generate_runs_it(written: Path, capsys: Any) -> None:
    argv = ["--model", str(written), "--prompt", "abc", "--max-tokens", "4", "--json"]
    assert generate.main([*argv, "--ignore-eos", "--moe-stats", "--kernels", "torch"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["replies"][0]["token_ids"]) == 4
    assert [sum(row["load"]) for row in found["stats"]["experts"]["layers"]] == [2 * 6] * 2


# ---- what is written -----------------------------------------------------------------------------


def test_command_says_what_it_did(base: Path, tmp_path: Path, capsys: Any) -> None:
    out = write(base, tmp_path / "out")
    facts = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (facts["quantized_layers"], facts["kept_layers"]) == (3 * 4 + 3, [])
    assert (facts["quantized_experts"], facts["kept_experts"]) == (10, 0)
    assert facts["smaller_groups"][LAYER] == 32
    tensors = load_file(out / "model.safetensors")
    sizes = sum(t.nbytes for name, t in tensors.items() if ".mlp." in name and ".0.mlp" not in name)
    assert facts["expert_bytes"] == sizes
    router = tiny(NAME).hf.model.layers[1].mlp.gate.weight
    assert torch.equal(tensors["model.layers.1.mlp.gate.weight"], router)
    assert tensors[f"{LAYER}.3.down_proj.weight_packed"].shape == (64, 12)
    assert tensors[f"{LAYER}.3.down_proj.weight_scale"].shape == (64, 3)
    argv = ["--model", base, "--scheme", "w4a16", "--out", out, "--overwrite"]
    assert quantize.main([str(a) for a in argv]) == 0
    said = capsys.readouterr().out
    assert "\n10 experts in w4a16, routers as they were; they take 0.1 MB of that" in said
    assert "groups of 32 instead of 128 inputs in 2 layers, whose" in said


def sensitive_file(path: Path, model: Path, **flagged: bool) -> Path:
    """All linear layers, none of which is sensitive, and what else is given."""
    groups = joined_layers(configs.from_folder(model))
    layers = {name: {"sensitive": False} for group in groups for name in group} | flagged
    content = {"format": "tkernels.sensitive_layers", "version": 1, "layers": layers}
    path.write_text(json.dumps(content))
    return path


def test_experts_of_a_layer_stay_together(base: Path, tmp_path: Path, capsys: Any) -> None:
    flagged = sensitive_file(tmp_path / "s.json", base, **{f"{LAYER}.4.up_proj": True})
    out = write(base, tmp_path / "out", "--sensitive", flagged)
    facts = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (facts["quantized_experts"], facts["kept_experts"]) == (5, 5)
    ours, original = load_folder(out), tiny(NAME).ours
    assert torch.equal(values(experts_of(ours, 1).down_proj), experts_of(original, 1).down_proj)
    assert isinstance(experts_of(ours, 2).down_proj, Int4Experts)


def test_all_experts_stay(base: Path, tmp_path: Path, capsys: Any) -> None:
    out = write(base, tmp_path / "out", "--keep-experts")
    facts = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (facts["quantized_layers"], facts["kept_layers"]) == (3 * 4 + 3, [])
    assert (facts["quantized_experts"], facts["kept_experts"]) == (0, 10)
    ours, original = load_folder(out), tiny(NAME).ours
    for i in (1, 2):
        for part in ("gate_up_proj", "down_proj"):
            mine, theirs = (getattr(experts_of(model, i), part) for model in (ours, original))
            assert torch.equal(mine, theirs)
    assert not isinstance(ours.layers[1].o_proj.weight, torch.Tensor)
    dense = make_folder(tmp_path / "dense", None)
    argv = ["--model", dense, "--scheme", "w4a16", "--keep-experts", "--out", tmp_path / "x"]
    assert quantize.main([str(a) for a in argv]) == 2
    said = capsys.readouterr().err
    assert said.endswith("--keep-experts: expected a network with experts, got a dense qwen3\n")


def test_experts_with_other_inputs_stay() -> None:
    config = tiny(NAME).ours.config
    assert config.mixture is not None
    for width, group in ((256, 64), (96, 32), (48, None), (40, None)):
        mixture = dataclasses.replace(config.mixture, intermediate_size=width)
        plan = make_plan(dataclasses.replace(config, mixture=mixture), "w4a16", ())
        assert {scheme.group for scheme in plan.experts.values()} == ({group} if group else set())
        assert plan.kept_experts == (() if group else (1, 2))


def test_one_group_of_layers_where_all_have_one_size() -> None:
    """What other engines ask for their experts by."""
    config = tiny(NAME).ours.config
    assert config.mixture is not None
    mixture = dataclasses.replace(config.mixture, intermediate_size=128)
    sizes = {"hidden_size": 256, "intermediate_size": 128, "num_heads": 8, "mixture": mixture}
    groups = describe_plan(make_plan(dataclasses.replace(config, **sizes), "w4a16", ()))
    ((_, one),) = groups["config_groups"].items()
    assert one["targets"] == ["Linear"]
    assert one["weights"]["group_size"] == 128


# ---- quality -------------------------------------------------------------------------------------


def test_quality_table_has_both(base: Path, tmp_path: Path, capsys: Any) -> None:
    text = tmp_path / "t.txt"
    text.write_text("".join(chr(97 + (i * i) % 23) for i in range(100)))
    argv = ["--model", str(base), "--text", str(text), "--calibration", str(text), "--json"]
    assert weight_quality.main([*argv, "--tokens", "64", "--context", "64", "--decode", "0"]) == 0
    rows = {row["name"]: row for row in map(json.loads, capsys.readouterr().out.splitlines())}
    four, kept = rows["w4a16"], rows["w4a16, experts in 16 bits"]
    assert four["share_of_16_bits"] < 0.2 < 0.5 < kept["share_of_16_bits"]  # of fp32
    assert 0 < rows["w8a16"]["kl"] < kept["kl"] < four["kl"] < 1.0


@pytest.mark.model
@pytest.mark.slow
def test_trained_model_keeps_its_quality(shared: Path, tmp_path: Path) -> None:
    from model.checkpoint import open_checkpoint
    from model.perplexity import perplexity_of, read_text
    from model.tokenizer import encode

    source = shared / "models" / "qwen3-tiny-moe"
    text = read_text(shared / "data" / "code_val.jsonl")
    tokens = encode(open_checkpoint(source).tokenizer, text)[:1024]
    exact, _ = logits_of(load_folder(source), cpu_ops, tokens)
    found = {}
    for name, more in (("all", ()), ("kept", ("--keep-experts",))):
        folder = write(source, tmp_path / name, *more)
        logits, _ = logits_of(load_folder(folder), cpu_ops, tokens)
        kl, agreed = divergence(logits, exact)
        rise = math.log(perplexity_of(logits, tokens) / perplexity_of(exact, tokens))
        found[name] = kl, agreed, rise
    assert found["kept"][0] < found["all"][0] < 0.12
    assert found["all"][1] > 0.85
    assert found["all"][2] < 0.12


# ---- other packages ------------------------------------------------------------------------------


@needs_package
def test_the_package_reads_what_is_written(written: Path) -> None:
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config

    config = json.loads((written / "config.json").read_text())["quantization_config"]
    hf = unstacked(NAME)
    apply_quantization_config(hf, QuantizationConfig.model_validate(config))
    compressor = ModelCompressor.from_pretrained_model(hf)
    compressor.compress_model(hf)
    for p in hf.parameters():
        p.data.zero_()
    missing = hf.load_state_dict(load_file(written / "model.safetensors"), strict=False)
    assert missing.unexpected_keys == []
    assert missing.missing_keys == ["lm_head.weight"]  # tied
    compressor.decompress_model(hf)
    modules, found = dict(hf.named_modules()), stored_weights(written)
    for name, value in found.items():
        torch.testing.assert_close(modules[name].weight.data, value, rtol=1e-6, atol=1e-8)
    logits, _ = logits_of(load_folder(written), cpu_ops, ids(20))
    torch.testing.assert_close(logits, hf_logits(hf, ids(20)), rtol=0, atol=1e-4)


@needs_package
@pytest.mark.parametrize("kept", [(), (LAYER,)])
def test_transformers_reads_what_is_written(
    kept: tuple[str, ...], base: Path, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    flagged = sensitive_file(tmp_path / "s.json", base, **dict.fromkeys(kept, True))
    out = write(base, tmp_path / "out", "--sensitive", flagged)
    hf = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    ours, _ = logits_of(load_folder(out), cpu_ops, ids(20))
    torch.testing.assert_close(ours, hf_logits(hf, ids(20)), rtol=0, atol=1e-4)


@pytest.mark.parametrize("down", [False, True])
def test_projections_of_two_kinds(down: bool, written: Path, tmp_path: Path) -> None:
    """gate and up with a scale a channel and zero points, down in groups, with or without them."""
    config = json.loads((written / "config.json").read_text())
    groups = config["quantization_config"]["config_groups"]
    (scheme,) = [one for one in groups.values() if one["weights"]["group_size"] == 32]
    channel = {"strategy": "channel", "group_size": None, "symmetric": False}
    of_down = scheme["weights"] | {"symmetric": not down}
    of_pairs = scheme | {"targets": ["re:.*experts.*(gate|up)_proj"]}
    config["quantization_config"]["config_groups"] = {
        "pairs": of_pairs | {"weights": scheme["weights"] | channel},
        "down": scheme | {"targets": ["re:.*experts.*down_proj"], "weights": of_down},
        **groups,
    }
    tensors = load_file(written / "model.safetensors")
    for name in [name for name in tensors if "experts" in name and name.endswith("scale")]:
        pair = "down_proj" not in name
        if pair:
            tensors[name] = tensors[name][:, :1].contiguous()
        if pair or down:
            n, groups_of_row = tensors[name].shape
            sevens = torch.full((n // 8, groups_of_row), 0x77777777, dtype=torch.int32)
            tensors[name.replace("scale", "zero_point")] = sevens
    for path in written.iterdir():
        if path.suffix != ".safetensors":
            (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    before, now = (experts_of(load_folder(folder), 2) for folder in (written, tmp_path))
    assert isinstance(now.gate_up_proj, Int4Experts)
    assert isinstance(now.down_proj, Int4Experts)
    assert now.gate_up_proj.scale.shape[2] == 1
    assert (now.down_proj.zero is not None) == down
    step = before.down_proj.scale.repeat_interleave(32, 2) if down else 0.0
    assert torch.allclose(values(now.down_proj), values(before.down_proj) + step)


@needs_package
@pytest.mark.parametrize(("group", "symmetric"), [(32, True), (None, True), (32, False)])
def test_runner_reads_what_the_package_writes(
    group: int | None, symmetric: bool, tmp_path: Path
) -> None:
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config

    hf = unstacked(NAME)
    weights: dict[str, Any] = {"num_bits": 4, "type": "int", "symmetric": symmetric}
    weights |= {"strategy": "group", "group_size": group} if group else {"strategy": "channel"}
    scheme = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    config = {"config_groups": {"group_0": scheme}, "ignore": ["lm_head"]}
    config["quantization_status"] = "frozen"
    apply_quantization_config(hf, QuantizationConfig.model_validate(config))
    for module in hf.modules():
        if (scale := getattr(module, "weight_scale", None)) is not None:
            groups = module.weight.data.view(*scale.shape, -1)
            scale.data.copy_(groups.abs().amax(2) / 7.5)
            if not symmetric:
                least = groups.amin(2)
                scale.data.copy_((groups.amax(2) - least) / 15)
                module.weight_zero_point.data.copy_((-8 - least / scale.data).round().clamp(-8, 7))
    compressor = ModelCompressor.from_pretrained_model(hf)
    compressor.compress_model(hf)
    hf.config.save_pretrained(tmp_path)
    tensors = {name: t for name, t in hf.state_dict().items() if name != "lm_head.weight"}  # tied
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    compressor.update_config(str(tmp_path))
    compressor.decompress_model(hf)
    ours = load_folder(tmp_path)
    experts = experts_of(ours, 2)
    assert isinstance(experts.gate_up_proj, Int4Experts)
    assert (experts.gate_up_proj.zero is None) == symmetric
    for e, expert in enumerate(hf.model.layers[2].mlp.experts):
        gate, up, down = (module.weight.data for module in expert.values())
        mine = values(experts.gate_up_proj)[e]
        torch.testing.assert_close(mine, torch.cat((gate, up)), rtol=1e-6, atol=1e-8)
        torch.testing.assert_close(values(experts.down_proj)[e], down, rtol=1e-6, atol=1e-8)
    logits, _ = logits_of(ours, cpu_ops, ids(20))
    torch.testing.assert_close(logits, hf_logits(hf, ids(20)), rtol=0, atol=1e-4)
