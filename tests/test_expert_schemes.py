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
from model.compressed import INT, PACKED, Scheme, describe, quantise, stored
from model.perplexity import logits_of
from model.quantized_matrix import Int8Experts

W8A8, W8A16 = Scheme(INT, 8, None, True), Scheme(INT, 8, None, False)
PACKED8 = Scheme(PACKED, 8, None, False)
EXPERTS0 = "model.layers.0.mlp.experts"


def handmade(folder: Path, *groups: tuple[str, Scheme], ignore: tuple[str, ...] = ()) -> Path:
    """The network with only those matrices quantised whose names a group's pattern matches."""
    tensors = dict(unstacked().state_dict())
    for name in list(tensors):
        layer = name.removesuffix(".weight")
        for pattern, scheme in groups:
            if re.fullmatch(pattern, layer) and layer not in ignore:
                parts = stored(*quantise(tensors.pop(name), scheme, torch.float32), scheme)
                tensors |= {f"{layer}.{part}": value for part, value in parts.items()}
    tiny(NAME).hf.config.save_pretrained(folder)
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
            "expected experts in 16 bits or in int8 with a scale a channel (W8A8 or W8A16), got "
            f"W4A16 in groups of 8 for {EXPERTS0}.0.gate_proj",
        ),
        (
            [(r".*experts.*(gate|up)_proj", Scheme(PACKED, 8, 8, False))],
            (),
            f"(W8A8 or W8A16), got W8A16 in groups of 8 for {EXPERTS0}.0.gate_proj",
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
        (PACKED8, "weight_packed", lambda s: None, r"expected tensor .*3\.up_proj\.weight_packed"),
        (PACKED8, "weight_shape", lambda s: s + 1, r"3\.up_proj\.weight_shape to be \[28, 72\]"),
    ],
)
def test_files_that_do_not_fit(
    scheme: Scheme, part: str, change: Any, words: str, tmp_path: Path
) -> None:
    folder = handmade(tmp_path / "m", (r".*experts.*", scheme))
    tensors = load_file(folder / "model.safetensors")
    name = f"{EXPERTS0}.3.up_proj.{part}"
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
