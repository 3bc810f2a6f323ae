"""Experts of other schemes: what one call of ``fused_moe`` takes, and what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import load_folder, tiny
from safetensors.torch import load_file, save_file
from unstacked import NAME, experts_of, hf_logits, ids, rounded, stored_weights, unstacked

import tkernels
from model import cpu_ops
from model.compressed import INT, PACKED, Scheme, describe, quantise, stored
from model.perplexity import logits_of
from model.quantized_matrix import Int4Experts, Int8Experts

W8A8, W8A16 = Scheme(INT, 8, None, True), Scheme(INT, 8, None, False)
PACKED8 = Scheme(PACKED, 8, None, False)
W4A16, W4A16_32, W4A16_64 = (Scheme(PACKED, 4, group, False) for group in (None, 32, 64))
WIDE = "qwen3_moe-32"  # inputs of 64 and 96, and the first layer dense
EXPERTS0 = "model.layers.0.mlp.experts"


def handmade(
    folder: Path, *groups: tuple[str, Scheme], ignore: tuple[str, ...] = (), name: str = NAME
) -> Path:
    """The network with only those matrices quantised whose names a group's pattern matches."""
    tensors = dict(unstacked(name).state_dict())
    hf_config = tiny(name).hf.config
    if hf_config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    for name in list(tensors):
        layer = name.removesuffix(".weight")
        for pattern, scheme in groups:
            if re.fullmatch(pattern, layer) and layer not in ignore:
                parts = stored(*quantise(tensors.pop(name), scheme, torch.float32), scheme)
                tensors |= {f"{layer}.{part}": value for part, value in parts.items()}
    hf_config.save_pretrained(folder)
    found = [describe([([f"re:{pattern}$"], scheme)], ignore) for pattern, scheme in groups]
    for one, (_, scheme) in zip(found, groups, strict=True):
        one["config_groups"]["group_0"]["format"] = scheme.format
    found[0]["config_groups"] = {i: one["config_groups"]["group_0"] for i, one in enumerate(found)}
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": found[0]}))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize(
    ("groups", "ignore", "words"),
    [
        (
            [(r".*mlp\.gate", W8A8)],
            (),
            "expected routers that are not quantised, got one of W8A8: model.layers.0.mlp.gate",
        ),
        (
            [(r".*experts.*gate_proj", Scheme(PACKED, 4, 8, False)), (r".*up_proj", PACKED8)],
            (),
            "expected experts in 16 bits, in int8 with a scale a channel (W8A8 or W8A16), or in 4 "
            "bits with a scale a channel or for 32, 64, 128.. inputs, got W4A16 in groups of 8 for "
            f"{EXPERTS0}.0.gate_proj",
        ),
        (
            [(r".*experts.*gate_proj", W4A16)],
            (),
            f"got W4A16 for {EXPERTS0}.0.gate_proj and 16 bits for {EXPERTS0}.0.up_proj",
        ),
        (
            [(r".*mlp\.gate", W4A16)],
            (),
            "expected routers that are not quantised, got one of W4A16: model.layers.0.mlp.gate",
        ),
        (
            [(r".*experts.*(gate|up)_proj", Scheme(PACKED, 8, 8, False))],
            (),
            f"for 32, 64, 128.. inputs, got W8A16 in groups of 8 for {EXPERTS0}.0.gate_proj",
        ),
        (
            [(r".*experts.*", W8A8)],
            (f"{EXPERTS0}.3.up_proj",),
            "expected the experts of a layer to be quantised alike, got W8A8 for "
            f"{EXPERTS0}.0.gate_proj and 16 bits for {EXPERTS0}.3.up_proj",
        ),
        (
            [(r".*experts\.[0-3]\..*", W8A8), (r".*experts\.4\..*", PACKED8)],
            (),
            f"got W8A8 for {EXPERTS0}.0.gate_proj and W8A16 for {EXPERTS0}.4.gate_proj",
        ),
        (
            [(r".*experts.*(gate|up)_proj", W8A8), (r".*experts.*down_proj", W8A16)],
            (),
            f"got W8A8 for {EXPERTS0}.0.gate_proj and W8A16 for {EXPERTS0}.0.down_proj",
        ),
    ],
)
def test_schemes_that_are_refused(
    groups: list[tuple[str, Scheme]], ignore: tuple[str, ...], words: str, tmp_path: Path
) -> None:
    folder = handmade(tmp_path / "m", *groups, ignore=ignore)
    with pytest.raises(ValueError, match=f"{re.escape(words)}$") as raised:
        load_folder(folder)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("groups", "words"),
    [
        (
            [(r".*experts.*gate_proj", W4A16_32), (r".*experts.*up_proj", W4A16_64)],
            "got W4A16 in groups of 32 for {0}.0.gate_proj and W4A16 in groups of 64 for "
            "{0}.0.up_proj",
        ),
        (
            [(r".*experts.*(gate|up)_proj", W4A16_32), (r".*experts.*down_proj", PACKED8)],
            "got W4A16 for {0}.0.gate_proj and W8A16 for {0}.0.down_proj",
        ),
        (
            [(r".*experts.*(gate|up)_proj", W8A8), (r".*experts.*down_proj", W4A16_32)],
            "got W8A8 for {0}.0.gate_proj and W4A16 for {0}.0.down_proj",
        ),
    ],
)
def test_four_bits_that_are_refused(
    groups: list[tuple[str, Scheme]], words: str, tmp_path: Path
) -> None:
    folder = handmade(tmp_path / "m", *groups, name=WIDE)
    message = "alike, " + words.format("model.layers.1.mlp.experts")
    with pytest.raises(ValueError, match=f"{re.escape(message)}$"):
        load_folder(folder)


@pytest.mark.parametrize(
    ("group", "words"),
    [
        (64, "group_size must divide the inputs of {}, got 64 and 96"),
        (16, "32, 64, 128.. inputs, got W4A16 in groups of 16 for {}"),
        (48, "32, 64, 128.. inputs, got W4A16 in groups of 48 for {}"),
        (24, "32, 64, 128.. inputs, got W4A16 in groups of 24 for {}"),
    ],
)
def test_groups_that_are_refused(group: int, words: str, tmp_path: Path) -> None:
    folder = handmade(tmp_path / "m", (r".*experts.*down_proj", W4A16_32), name=WIDE)
    config = json.loads((folder / "config.json").read_text())
    (scheme,) = config["quantization_config"]["config_groups"].values()
    scheme["weights"]["group_size"] = group
    (folder / "config.json").write_text(json.dumps(config))
    message = words.format("model.layers.1.mlp.experts.0.down_proj")
    with pytest.raises(ValueError, match=f"{re.escape(message)}$"):
        load_folder(folder)


def test_inputs_that_no_word_ends_with(tmp_path: Path) -> None:
    folder = handmade(tmp_path / "m", (r".*experts.*down_proj", PACKED8))
    config = json.loads((folder / "config.json").read_text())
    (scheme,) = config["quantization_config"]["config_groups"].values()
    scheme["weights"]["num_bits"] = 4
    (folder / "config.json").write_text(json.dumps(config))
    message = "expected experts in 4 bits to have inputs that divide by 8, got 28 for "
    with pytest.raises(ValueError, match=f"{message}{EXPERTS0}.0.down_proj$"):
        load_folder(folder)


@pytest.mark.parametrize("ops", [cpu_ops, tkernels.reference], ids=["short", "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("groups", "quantised"),
    [
        ([(r".*experts.*", W4A16_32)], ("gate_up_proj", "down_proj")),
        ([(r".*experts.*", W4A16)], ("gate_up_proj", "down_proj")),
        (  # one scale a channel, said as a group of all inputs
            [(r".*experts.*down_proj", Scheme(PACKED, 4, 96, False))],
            ("down_proj",),
        ),
        (
            [(r".*experts.*(gate|up)_proj", W4A16_64), (r".*experts.*down_proj", W4A16_32)],
            ("gate_up_proj", "down_proj"),
        ),
        ([(r".*experts.*(gate|up)_proj", W4A16_32)], ("gate_up_proj",)),
        (  # layers by themselves
            [(r".*layers\.1\..*experts.*", W8A8), (r".*layers\.2\..*experts.*", W4A16_32)],
            ("gate_up_proj", "down_proj"),
        ),
    ],
)
def test_four_bits_that_one_call_takes(
    groups: list[tuple[str, Scheme]],
    quantised: tuple[str, ...],
    dtype: torch.dtype,
    ops: Any,
    tmp_path: Path,
) -> None:
    """Against transformers' network with weights that were dequantised."""
    folder = handmade(tmp_path / "m", *groups, name=WIDE)
    model, found, hf = load_folder(folder, dtype), stored_weights(folder), unstacked(WIDE)
    for part in ("gate_up_proj", "down_proj"):
        weight = getattr(experts_of(model, 2), part)
        assert isinstance(weight, Int4Experts) == (part in quantised)
    for name, module in hf.named_modules():
        if name in found:
            module.weight.data.copy_(found[name])
            if groups[0][1].quantized_activations and "layers.1." in name:
                module.register_forward_pre_hook(rounded)
    tokens = ids(30)
    expected = hf_logits(hf, tokens)
    logits, _ = logits_of(model, ops, tokens)
    if dtype == torch.float32:
        close = 2e-2 if groups[0][1].quantized_activations else 1e-5
        torch.testing.assert_close(logits, expected, rtol=0, atol=close)
    else:  # a token whose experts are near to each other may take another one
        error = (logits - expected).norm(dim=1) / expected.norm(dim=1)
        assert float(error.median()) < 0.03
    difference = (expected - hf_logits(unstacked(WIDE), tokens)).abs().max()
    assert float(difference) > 5e-2  # what is left out would show


@pytest.mark.parametrize(
    ("groups", "int8"),
    [
        ([(r".*experts.*(gate|up)_proj", W8A8)], ("gate_up_proj",)),
        ([(r".*experts.*down_proj", PACKED8)], ("down_proj",)),
        (  # the same codes, stored in two ways
            [(r".*experts.*(gate|up)_proj", W8A16), (r".*experts.*down_proj", PACKED8)],
            ("gate_up_proj", "down_proj"),
        ),
        (
            [(r".*experts.*gate_proj", W8A16), (r".*experts.*up_proj", PACKED8)],
            ("gate_up_proj",),
        ),
    ],
)
def test_schemes_that_one_call_takes(
    groups: list[tuple[str, Scheme]], int8: tuple[str, ...], tmp_path: Path
) -> None:
    folder = handmade(tmp_path / "m", *groups)
    model, found, hf = load_folder(folder), stored_weights(folder), unstacked()
    for part in ("gate_up_proj", "down_proj"):
        weight = getattr(experts_of(model, 0), part)
        assert isinstance(weight, Int8Experts) == (part in int8)
    for name, module in hf.named_modules():
        if name in found:
            module.weight.data.copy_(found[name])
            if groups[0][1].quantized_activations:
                module.register_forward_pre_hook(rounded)
    logits, _ = logits_of(model, tkernels.reference, ids(30))
    torch.testing.assert_close(logits, hf_logits(hf, ids(30)), rtol=0, atol=2e-2)


@pytest.mark.parametrize(
    ("scheme", "part", "change", "words"),
    [
        (W8A8, "weight", torch.Tensor.float, r"3\.up_proj\.weight in torch.int8, .*float32"),
        (W8A8, "weight_scale", lambda s: s * 0, r"above 0 in .*3\.up_proj.*, got 28 others"),
        (W8A8, "weight_scale", lambda s: s[:9], r"up_proj\.weight_scale of shape \[28, 1\], got"),
        (W8A8, "weight_scale", lambda s: None, r"alike, got W8A8 for .* and 16 bits for .*3\.up"),
        (
            W4A16_32,
            "weight_packed",
            torch.Tensor.float,
            r"1\.up_proj\.weight_packed in torch.int32",
        ),
        (W4A16_32, "weight_packed", lambda s: s[:, 1:].clone(), r"_packed of shape \[96, 8\], got"),
        (W4A16_32, "weight_scale", lambda s: s - s, r"above 0 in .*1\.up_proj.*, got 192 others"),
        (W4A16_32, "weight_shape", lambda s: s + 1, r"1\.up_proj\.weight_shape to be \[96, 64\]"),
        (PACKED8, "weight_packed", lambda s: None, r"expected tensor .*3\.up_proj\.weight_packed"),
        (PACKED8, "weight_shape", lambda s: s + 1, r"3\.up_proj\.weight_shape to be \[28, 72\]"),
    ],
)
def test_files_that_do_not_fit(
    scheme: Scheme, part: str, change: Any, words: str, tmp_path: Path
) -> None:
    four_bits = scheme.bits == 4
    folder = handmade(tmp_path / "m", (r".*experts.*", scheme), name=WIDE if four_bits else NAME)
    tensors = load_file(folder / "model.safetensors")
    where = "model.layers.2.mlp.experts.1" if four_bits else f"{EXPERTS0}.3"
    name = f"{where}.up_proj.{part}"
    new = change(tensors.pop(name))
    more = {} if new is None else {name: new}
    save_file(tensors | more, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=words):
        load_folder(folder)


def test_stacked_codes_are_refused(tmp_path: Path) -> None:
    """No layout of compressed-tensors has them."""
    folder = handmade(tmp_path / "m", (r".*experts.*", W8A8))
    tensors = load_file(folder / "model.safetensors")
    kept = {name: t for name, t in tensors.items() if not name.startswith(EXPERTS0)}
    for part, shape in (("gate_up_proj", (5, 56, 72)), ("down_proj", (5, 72, 28))):
        kept[f"{EXPERTS0}.{part}"] = torch.ones(shape, dtype=torch.int8)
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        ValueError, match=r"expected floats in .*experts\.0\.gate_proj\.weight, which"
    ):
        load_folder(folder)
    kept[f"{EXPERTS0}.down_proj_scale"] = torch.ones(5, 72)
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"1 more, the first .*experts\.down_proj_scale"):
        load_folder(folder)
