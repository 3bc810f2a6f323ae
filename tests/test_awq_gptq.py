"""Checkpoints of AWQ and GPTQ: what they compute, and what is refused.

Expected are the logits of the same network with its weights dequantised here, in fp32. Tensors are
packed here, number by number, as AutoAWQ and AutoGPTQ define them (``model.awq_gptq`` says where).
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from checkpoints import load_folder, make_folder, new_runner
from safetensors.torch import load_file, save_file
from unstacked import experts_of, values

import tkernels
from autotune.model_facts import facts_of
from model import block_matrix, cpu_ops, generate, perplexity, quantize, sensitivity
from model import config as configs
from model.block_matrix import BlockMatrix
from model.kv_cache import SequenceState
from model.perplexity import divergence, logits_of
from model.quantized_matrix import Int4Experts, Int8Experts, Int8Matrix, PackedMatrix, Parts
from model.qwen3 import Model
from model.sources import open_safetensors

pytestmark = pytest.mark.thin(2)

NAMES = ("qwen3-128", "qwen2-128", "llama-128")  # tied; biases of q, k and v; of all
Q0, DOWN1 = (f"model.layers.{part}" for part in ("0.self_attn.q_proj", "1.mlp.down_proj"))
QKV = ("q_proj", "k_proj", "v_proj")
Array = npt.NDArray[Any]

# Column of a word's eight in bits 4i to 4i + 3.
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
IN_ORDER = (0, 1, 2, 3, 4, 5, 6, 7)


# ---- a checkpoint --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Layout:
    """How a checkpoint is quantised, and what config.json says of it."""

    method: str
    group: int = 32  # -1: a scale a channel
    symmetric: bool = False
    bits: int = 4
    v2: bool = False  # of GPTQ
    dtype: torch.dtype = torch.float16  # of scales
    g_idx: bool = True
    zero_biases: bool = False  # where the network has none, as AutoGPTQ writes
    kept: Callable[[str], bool] = lambda name: False  # layers left alone
    more: dict[str, Any] = field(default_factory=dict)  # fields of the config

    @property
    def config(self) -> dict[str, Any]:
        given = {"quant_method": self.method, "bits": self.bits, "group_size": self.group}
        if self.method == "awq":
            own = {"version": "gemm", "zero_point": not self.symmetric}
            return {**given, **own, "modules_to_not_convert": None, **self.more}
        form = "gptq_v2" if self.v2 else "gptq"
        own = {"desc_act": False, "sym": self.symmetric, "checkpoint_format": form}
        return {**given, **own, "damp_percent": 0.01, "true_sequential": True, **self.more}


def rounded(weight: Array, one: Layout) -> tuple[Array, Array, Array, Array]:
    """(codes [N, K], zeros [N, G], scales [N, G], the weight that they stand for) of [N, K]."""
    n, k = weight.shape
    grouped = weight.reshape(n, -1, k if one.group == -1 else one.group)
    most = 2**one.bits - 1
    if one.symmetric:
        scale = 2 * np.abs(grouped).max(-1) / most
        zero = np.full(scale.shape, (most + 1) // 2)
    else:
        low, high = np.minimum(grouped.min(-1), 0), np.maximum(grouped.max(-1), 0)
        scale = (high - low) / most
        # 0 is stored as -1 in "gptq", which has no 4 bits.
        zero = np.clip(np.round(-low / scale), 1, most).astype(int)
    scale = torch.from_numpy(scale).to(one.dtype).float().numpy()
    codes = np.clip(np.round(grouped / scale[..., None]) + zero[..., None], 0, most).astype(int)
    dense = (codes - zero[..., None]).astype(np.float32) * scale[..., None]
    return codes.reshape(n, k), zero, scale, dense.reshape(n, k)


def words(values: Array, bits: int, order: tuple[int, ...]) -> torch.Tensor:
    """int32 [R, C bits / 32] of [R, C]."""
    step = 32 // bits
    found = np.zeros((values.shape[0], values.shape[1] // step), np.uint32)
    for word in range(found.shape[1]):
        for i in range(step):
            column = values[:, step * word + order[i]].astype(np.uint32)
            found[:, word] |= column << np.uint32(bits * i)
    return torch.from_numpy(found.view(np.int32).copy())


def packed(weight: torch.Tensor, one: Layout) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """(what is stored of a weight [N, K], its values)."""
    codes, zero, scale, dense = rounded(weight.float().numpy(), one)
    order = AWQ_ORDER if one.method == "awq" else IN_ORDER
    scales = torch.from_numpy(scale.T.copy()).to(one.dtype)
    if one.method == "awq":
        tensors = {"qweight": words(codes.T, 4, order), "qzeros": words(zero.T, 4, order)}
        return {**tensors, "scales": scales}, torch.from_numpy(dense)
    less = 0 if one.v2 else 1
    tensors = {
        "qweight": words(codes, one.bits, order).t().contiguous(),
        "qzeros": words(zero.T - less, one.bits, order),
        "scales": scales,
    }
    if one.g_idx:
        size = weight.shape[1] if one.group == -1 else one.group
        tensors["g_idx"] = (torch.arange(weight.shape[1]) // size).int()
    if one.zero_biases:
        tensors["bias"] = torch.zeros(len(weight)).half()
    return tensors, torch.from_numpy(dense)


def is_linear(name: str) -> bool:
    return name.startswith("model.layers.") and name.endswith("_proj.weight")


def write(base: Path, one: Layout, out: Path) -> tuple[Path, Path]:
    """(the checkpoint quantised, and with its weights dequantised) below ``out``."""
    source = open_safetensors(base)
    stored: dict[str, torch.Tensor] = {}
    dense: dict[str, torch.Tensor] = {}
    for name in source.shapes:
        tensor = source.read(name)
        layer = name.removesuffix(".weight")
        dense[name] = tensor
        if not is_linear(name) or one.kept(layer):
            stored[name] = tensor
            continue
        tensors, dense[name] = packed(tensor, one)
        for part, value in tensors.items():
            if part == "bias" and f"{layer}.bias" in source.shapes:
                continue
            stored[f"{layer}.{part}"] = value
    return save_both(base, out, stored, dense, one.config)


def save_both(
    base: Path,
    out: Path,
    stored: dict[str, torch.Tensor],
    dense: dict[str, torch.Tensor],
    quantization: dict[str, Any],
) -> tuple[Path, Path]:
    folders = out / "quantised", out / "dense"
    for folder, tensors in zip(folders, (stored, dense), strict=True):
        shutil.copytree(base, folder, ignore=shutil.ignore_patterns("*.safetensors*"))
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    change_config(folders[0], lambda config: config.update(quantization_config=quantization))
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


def replace_weight(
    quantised: Path, dense: Path, layer: str, weight: torch.Tensor, one: Layout
) -> None:
    """What ``write`` has made of a layer's weight, made of that weight in that layout."""
    tensors, value = packed(weight, one)
    stored = {f"{layer}.{part}": tensor for part, tensor in tensors.items()}
    change_tensors(quantised, lambda found: found.update(stored))
    change_tensors(dense, lambda found: found.update({f"{layer}.weight": value}))


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("bases")
    return {name: make_folder(folder / name, None, name) for name in NAMES}


def ids(n: int) -> list[int]:
    return torch.randint(0, 331, (n,), generator=torch.Generator().manual_seed(0)).tolist()


LAYOUTS = {
    "awq": Layout("awq"),
    "awq-64": Layout("awq", 64),
    "awq-128": Layout("awq", 128),
    "awq-channel": Layout("awq", -1),
    "awq-symmetric": Layout("awq", 128, symmetric=True),
    "awq-bf16": Layout("awq", 64, dtype=torch.bfloat16),
    "gptq": Layout("gptq", 128, symmetric=True),
    "gptq-zeros": Layout("gptq"),
    "gptq-channel": Layout("gptq", -1),
    "gptq-v2": Layout("gptq", 64, v2=True),
    "gptq-v2-symmetric": Layout("gptq", 32, v2=True, symmetric=True),
    "gptq-no-g-idx": Layout("gptq", 64, g_idx=False),
    "gptq-biases": Layout("gptq", 128, zero_biases=True),
    "gptq-8-bits": Layout("gptq", -1, symmetric=True, bits=8),
    "gptq-8-bits-v2": Layout("gptq", -1, symmetric=True, bits=8, v2=True),
}
each = pytest.mark.parametrize("one", LAYOUTS.values(), ids=LAYOUTS)


# ---- what they compute ---------------------------------------------------------------------------


@each
@pytest.mark.parametrize("name", NAMES)
def test_logits_in_fp32(name: str, one: Layout, bases: dict[str, Path], tmp_path: Path) -> None:
    quantised, dense = (load_folder(folder) for folder in write(bases[name], one, tmp_path))
    expected, _ = logits_of(dense, cpu_ops, ids(40))
    got, _ = logits_of(quantised, cpu_ops, ids(40))
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))
    runner, sequence = new_runner(quantised, cpu_ops), SequenceState(ids(39))
    runner.prefill([sequence])
    sequence.token_ids.append(ids(40)[-1])
    step = runner.decode([sequence])  # one row goes another way than 40
    atol = 1e-5 * float(expected.abs().max())
    torch.testing.assert_close(step, expected[-1:], rtol=0, atol=atol)


@each
def test_weights_without_blocks(
    one: Layout, bases: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The very numbers, as kernels get them."""
    monkeypatch.setattr(block_matrix, "can_multiply", lambda: False)
    quantised, dense = (load_folder(folder) for folder in write(bases["qwen3-128"], one, tmp_path))
    for ours, theirs in zip(quantised.layers, dense.layers, strict=True):
        for part in ("qkv_proj", "o_proj", "gate_up_proj", "down_proj"):
            weight, expected = getattr(ours, part).weight, getattr(theirs, part).weight
            if one.bits == 8:
                assert isinstance(weight, Int8Matrix)
                assert not weight.quantized_activations
                values = weight.codes.float() * weight.scale[:, None]
            else:
                assert isinstance(weight, PackedMatrix)
                assert (weight.zero is None) == one.symmetric
                values = weight.values(torch.float32)
            assert torch.equal(values, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("name", "one"),
    [
        ("qwen3-128", LAYOUTS["awq-128"]),
        ("qwen2-128", LAYOUTS["awq-channel"]),
        ("qwen2-128", LAYOUTS["gptq-zeros"]),
        ("llama-128", LAYOUTS["gptq"]),
        ("qwen3-128", LAYOUTS["gptq-8-bits"]),
    ],
)
def test_kernels_run_it(
    dtype: torch.dtype, name: str, one: Layout, bases: dict[str, Path], tmp_path: Path
) -> None:
    """Held to fp32 as the dense network in 16 bits is: its weights are rounded, ours are not."""
    device = tkernels.device.tensor_device()
    quantised, dense = write(bases[name], one, tmp_path)
    exact, _ = logits_of(load_folder(dense), cpu_ops, ids(5))
    model = load_folder(quantised, dtype, device)
    runner, sequence = new_runner(model, tkernels), SequenceState(ids(4))
    rows = [runner.prefill([sequence])]
    sequence.token_ids.append(ids(5)[-1])
    got = torch.cat([*rows, runner.decode([sequence])]).cpu()
    usual = logits_of(load_folder(dense, dtype, device), tkernels.reference, ids(5))[0][3:].cpu()
    error, allowed = ((x.float() - exact[3:]).abs().max() for x in (got, usual))
    assert error < 2 * allowed
    assert divergence(got.float(), exact[3:])[0] < 0.01


def test_scales_keep_their_dtype_where_nothing_is_lost(
    bases: dict[str, Path], tmp_path: Path
) -> None:
    folder, _ = write(bases["qwen3-128"], LAYOUTS["awq"], tmp_path)
    for dtype, kept in ((torch.float16, torch.float16), (torch.bfloat16, torch.float32)):
        assert load_folder(folder, dtype).layers[0].o_proj.weight.scale.dtype == kept
    folder, _ = write(bases["qwen3-128"], LAYOUTS["awq-bf16"], tmp_path / "bf16")
    weight = load_folder(folder, torch.bfloat16).layers[0].o_proj.weight
    assert weight.scale.dtype == torch.bfloat16
    expected = weight.packed.nbytes + weight.scale.nbytes + weight.zero.nbytes
    assert weight.nbytes == expected


def test_joined_layers_with_zeros_and_without(bases: dict[str, Path], tmp_path: Path) -> None:
    """All zeros of q are 8, those of k are not."""
    one = LAYOUTS["awq"]
    folder, dense = write(bases["qwen2-128"], one, tmp_path)
    before = load_file(dense / "model.safetensors")[f"{Q0}.weight"]
    replace_weight(folder, dense, Q0, before, Layout("awq", symmetric=True))
    weight = load_folder(folder, torch.float16).layers[0].qkv_proj.weight
    assert isinstance(weight, PackedMatrix)
    assert (weight.zero[:128] == 8).all()
    assert not (weight.zero[128:192] == 8).all()
    expected, _ = logits_of(load_folder(dense), cpu_ops, ids(20))
    got, _ = logits_of(load_folder(folder), cpu_ops, ids(20))
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize(
    ("method", "more", "kept"),
    [
        ("awq", {"modules_to_not_convert": ["k_proj", "layers.1.mlp"]}, r"k_proj$|layers\.1\.mlp"),
        ("awq", {"modules_to_not_convert": ["lm_head"], "version": "GEMM"}, "nothing"),
        ("awq", {"modules_to_not_convert": [], "version": None, "format": "gemm"}, "nothing"),
        ("gptq", {"dynamic": {"-:.*k_proj": {}}}, "k_proj"),
        ("gptq", {"dynamic": {"+:.*k_proj": {"sym": True}, "-:.*_proj": {}}}, "[^k]_proj"),
        (
            "gptq",
            {"modules_in_block_to_quantize": [["self_attn.q_proj", "self_attn.k_proj"],
                                              ["mlp.down_proj"]]},
            r"(v|o|gate|up)_proj",
        ),
        ("gptq", {"modules_in_block_to_quantize": ["mlp.up_proj"]}, r"(v|o|k|q|gate|down)_proj"),
        ("gptq", {"dynamic": {}, "modules_in_block_to_quantize": None, "lm_head": False}, "none"),
    ],
)  # fmt: skip
def test_layers_left_alone(
    method: str, more: dict[str, Any], kept: str, bases: dict[str, Path], tmp_path: Path
) -> None:
    one = Layout(method, kept=lambda name: re.search(kept, name) is not None, more=more)
    quantised, dense = (load_folder(f) for f in write(bases["qwen2-128"], one, tmp_path))
    expected, _ = logits_of(dense, cpu_ops, ids(20))
    got, _ = logits_of(quantised, cpu_ops, ids(20))
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))
    first = quantised.layers[0].qkv_proj.weight
    alike = {re.search(kept, Q0.replace("q_proj", part)) is None for part in QKV}
    assert isinstance(first, Parts) == (len(alike) > 1)


def test_groups_of_one_layer_differ(bases: dict[str, Path], tmp_path: Path) -> None:
    """The first pattern that fits decides."""
    other = {"+:.*q_proj": {"group_size": 64}, "-:.*(q|down)_proj": {}}
    one = Layout("gptq", more={"dynamic": other}, kept=lambda name: name.endswith("down_proj"))
    folder, dense = write(bases["qwen3-128"], one, tmp_path)
    base = load_file(dense / "model.safetensors")
    for layer in (Q0, Q0.replace("0", "1", 1)):
        replace_weight(folder, dense, layer, base[f"{layer}.weight"], Layout("gptq", 64))
    expected, _ = logits_of(load_folder(dense), cpu_ops, ids(20))
    got, _ = logits_of(load_folder(folder), cpu_ops, ids(20))
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


def test_lm_head_may_be_quantised(bases: dict[str, Path], tmp_path: Path) -> None:
    """Where it says so: 331 outputs make no words, so that fails, and names it."""
    one = Layout("gptq", more={"lm_head": True})
    folder, _ = write(bases["qwen2-128"], one, tmp_path)
    with pytest.raises(
        ValueError, match=r"inputs and outputs that divide by 8, got lm_head with 128"
    ):
        load_folder(folder)


def test_order_of_inputs_that_is_none(bases: dict[str, Path], tmp_path: Path) -> None:
    """desc_act is taken where inputs are in their order all the same."""
    one = Layout("gptq", -1, more={"desc_act": True})
    quantised, dense = (load_folder(f) for f in write(bases["qwen3-128"], one, tmp_path))
    assert isinstance(quantised.layers[0].o_proj.weight, BlockMatrix | PackedMatrix)
    expected, _ = logits_of(dense, cpu_ops, ids(9))
    got, _ = logits_of(quantised, cpu_ops, ids(9))
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


def test_order_of_inputs_that_nothing_tells(bases: dict[str, Path], tmp_path: Path) -> None:
    """With desc_act and several groups g_idx must be there; of one group there is no order."""
    for group in (32, -1):
        one = Layout("gptq", group, g_idx=False, more={"desc_act": True})
        folder, _ = write(bases["qwen3-128"], one, tmp_path / str(group))
        if group == -1:
            load_folder(folder)
            continue
        with pytest.raises(ValueError, match=rf"expected tensor {Q0}\.g_idx, got none"):
            load_folder(folder)


MIXTURE = "qwen3_moe-one-of-three"


def test_experts(tmp_path: Path) -> None:
    """Those in 8 bits with a scale a channel, and those left alone; routers always are."""
    base = make_folder(tmp_path / "base", None, MIXTURE)
    alone = Layout(
        "awq", kept=lambda n: "experts" in n, more={"modules_to_not_convert": ["mlp.experts"]}
    )
    for number, one in enumerate((LAYOUTS["gptq-8-bits"], alone)):
        found = write(base, one, tmp_path / str(number))
        quantised, dense = (load_folder(folder) for folder in found)
        assert isinstance(quantised.layers[0].experts.down_proj, Int8Experts) == (number == 0)
        expected, _ = logits_of(dense, cpu_ops, ids(20))
        got, _ = logits_of(quantised, cpu_ops, ids(20))
        atol = 1e-5 * float(expected.abs().max())
        torch.testing.assert_close(got, expected, rtol=0, atol=atol)


# ---- experts in 4 bits ---------------------------------------------------------------------------

WIDE = "qwen3_moe-32"  # a dense layer, and two with 5 experts of 96 between 64
EXPERTS1 = "model.layers.1.mlp.experts"
PARTS = ("gate_up_proj", "down_proj")
FOUR_BITS = {
    name: LAYOUTS[name]
    for name in ("awq", "awq-channel", "gptq-zeros", "gptq-channel", "gptq-v2-symmetric")
} | {
    "awq-symmetric": Layout("awq", symmetric=True),
    "awq-bf16": Layout("awq", dtype=torch.bfloat16),
    "gptq": Layout("gptq", symmetric=True, zero_biases=True),  # as Qwen publishes them
    "gptq-v2": Layout("gptq", v2=True, g_idx=False),
}


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("wide") / "m", None, WIDE)


def check_logits(quantised: Path, dense: Path, n: int = 20) -> None:
    """Of a prompt, and of a step behind it."""
    expected, _ = logits_of(load_folder(dense), cpu_ops, ids(n))
    runner, sequence = new_runner(load_folder(quantised), cpu_ops), SequenceState(ids(n)[:-1])
    rows = [runner.prefill([sequence], all_logits=True)]
    sequence.token_ids.append(ids(n)[-1])
    got = torch.cat([*rows, runner.decode([sequence])])
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("one", FOUR_BITS.values(), ids=FOUR_BITS)
def test_experts_in_4_bits(one: Layout, wide: Path, tmp_path: Path) -> None:
    """The very numbers, and what comes of them."""
    quantised, dense = write(wide, one, tmp_path)
    models = [load_folder(folder) for folder in (quantised, dense)]
    for layer in (1, 2):
        ours, theirs = (experts_of(model, layer) for model in models)
        assert torch.equal(ours.router, theirs.router)
        for part, n, k in ((PARTS[0], 192, 64), (PARTS[1], 64, 96)):
            weight, expected = getattr(ours, part), getattr(theirs, part)
            assert isinstance(weight, Int4Experts)
            groups = 1 if one.group == -1 else k // one.group
            assert (weight.packed.dtype, weight.packed.shape) == (torch.int32, (5, n, k // 8))
            assert weight.scale.shape == (5, n, groups)
            assert (weight.zero is None) == one.symmetric
            zeros = 0
            if weight.zero is not None:
                assert (weight.zero.dtype, weight.zero.shape) == (torch.int8, (5, n, groups))
                zeros = weight.zero.nbytes
            assert weight.nbytes == weight.packed.nbytes + weight.scale.nbytes + zeros
            assert torch.equal(values(weight), expected)
    check_logits(quantised, dense)


def test_some_matrices_of_experts_have_zeros(wide: Path, tmp_path: Path) -> None:
    """All zeros of the others are 8."""
    others = [f"{EXPERTS1}.3.up_proj", f"{EXPERTS1}.4.down_proj"]
    even = Layout("awq", symmetric=True)
    quantised, dense = write(wide, even, tmp_path)
    base = open_safetensors(wide)
    for name in others:
        replace_weight(quantised, dense, name, base.read(f"{name}.weight"), LAYOUTS["awq"])
    first, second = (experts_of(load_folder(quantised), layer) for layer in (1, 2))
    for part, rows in ((PARTS[0], (3, slice(96, 192))), (PARTS[1], (4, slice(0, 64)))):
        zero = getattr(first, part).zero
        assert (zero[rows] != 8).float().mean() > 0.5
        zero[rows] = 8
        assert (zero == 8).all()
        assert getattr(second, part).zero is None
    check_logits(quantised, dense)


def test_one_projection_has_zeros(wide: Path, tmp_path: Path) -> None:
    """And another size of groups: a scheme of its own."""
    down = {"group_size": -1, "sym": True}
    one = Layout("gptq", more={"dynamic": {r"+:.*experts\.\d+\.down_proj": down}})
    quantised, dense = write(wide, one, tmp_path)
    base = open_safetensors(wide)
    for name in (f"model.layers.{i}.mlp.experts.{e}.down_proj" for i in (1, 2) for e in range(5)):
        other = Layout("gptq", -1, symmetric=True)
        replace_weight(quantised, dense, name, base.read(f"{name}.weight"), other)
    experts = experts_of(load_folder(quantised), 2)
    assert isinstance(experts.gate_up_proj, Int4Experts)
    assert isinstance(experts.down_proj, Int4Experts)
    assert experts.gate_up_proj.zero is not None
    assert experts.down_proj.zero is None
    assert experts.down_proj.scale.shape == (5, 64, 1)
    check_logits(quantised, dense)


@pytest.mark.parametrize(
    ("method", "more", "kept"),
    [
        ("awq", {"modules_to_not_convert": ["mlp.gate", "self_attn"]}, "self_attn|0.mlp.gate_"),
        ("awq", {"modules_to_not_convert": ["layers.1.mlp"]}, r"layers\.1\.mlp"),
        ("gptq", {"dynamic": {r"-:.*mlp\.gate$": {}, "-:.*self_attn": {}}}, "self_attn"),
        ("gptq", {"dynamic": {r"-:.*\.2\.mlp\.": {}}}, r"layers\.2\.mlp"),
    ],
)
def test_routers_and_experts_left_alone(
    method: str, more: dict[str, Any], kept: str, wide: Path, tmp_path: Path
) -> None:
    one = Layout(method, kept=lambda name: re.search(kept, name) is not None, more=more)
    quantised, dense = write(wide, one, tmp_path)
    model = load_folder(quantised)
    for layer in (1, 2):
        alone = one.kept(f"model.layers.{layer}.mlp.experts.0.up_proj")
        assert isinstance(experts_of(model, layer).down_proj, torch.Tensor) == alone
    check_logits(quantised, dense)


@pytest.mark.parametrize("one", ["awq", "gptq-channel"])
def test_triton_kernels_run_experts(one: str, wide: Path, tmp_path: Path) -> None:
    folder, _ = write(wide, FOUR_BITS[one], tmp_path)
    model = load_folder(folder, torch.float16, tkernels.device.tensor_device())
    model = replace(model, layers=model.layers[1:2])
    experts = experts_of(model, 0)
    assert isinstance(experts.down_proj, Int4Experts)
    assert experts.down_proj.scale.dtype == torch.float16  # nothing of them is lost

    def run(ops: Any, model: Model) -> torch.Tensor:
        runner, sequence = new_runner(model, ops), SequenceState(ids(5))
        rows = [runner.prefill([sequence])]
        sequence.token_ids.append(9)
        return torch.cat([*rows, runner.decode([sequence])])

    expected, got = (run(ops, model) for ops in (tkernels.reference, tkernels))
    scale = float(expected.abs().max())
    torch.testing.assert_close(got, expected, rtol=0, atol=0.01 * scale)
    without = replace(experts, gate_up_proj=replace(experts.gate_up_proj, zero=None))
    other = replace(model, layers=[replace(model.layers[0], experts=without)])
    assert float((run(tkernels, other) - expected).abs().max()) > 0.05 * scale


@pytest.mark.parametrize(
    ("method", "part", "change", "says"),
    [
        ("awq", "3.up_proj.scales", None, r"alike, got W4A16 .* and 16 bits for .*3\.up_proj$"),
        ("awq", "3.up_proj.qzeros", None, r"expected tensor .*3\.up_proj\.qzeros, got none"),
        ("awq", "3.up_proj.scales", lambda t: t * 0, r"above 0 in .*\.3\.up_proj\.scales, got 192"),
        ("gptq", "3.up_proj.bias", lambda t: torch.ones(96), r"zeros in .*\.3\.up_proj\.bias, as"),
        (
            "gptq",
            "3.down_proj.g_idx",
            lambda t: t.flip(0).clone(),
            r"desc_act .*3\.down_proj.g_idx",
        ),
        (
            "gptq",
            "gate.scales",
            lambda t: torch.ones(2, 5),
            r"routers that are not quantised, got one of W4A16 in .*32: model.layers.1.mlp.gate$",
        ),
    ],
)
def test_files_of_experts_that_do_not_fit(
    method: str, part: str, change: Any, says: str, wide: Path, tmp_path: Path
) -> None:
    folder, _ = write(wide, Layout(method), tmp_path)
    prefix = "model.layers.1.mlp." if part.startswith("gate.") else f"{EXPERTS1}."
    change_tensors(folder, with_tensor(f"{prefix}{part}", change))
    with pytest.raises(ValueError, match=says) as raised:
        load_folder(folder)
    assert str(folder) in str(raised.value)


# ---- refused: what config.json says --------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "changed", "says"),
    [
        ("awq", {"bits": 8}, "bits must be 4, got 8"),
        ("awq", {"bits": "4"}, "bits must be 4, got '4'"),
        ("awq", {"version": "gemv"}, "version must be 'gemm', got 'gemv'"),
        ("awq", {"version": "marlin"}, "version must be 'gemm', got 'marlin'"),
        ("awq", {"version": None, "format": "llm-awq"}, "format must be 'gemm', got 'llm-awq'"),
        ("awq", {"zero_point": 1}, "zero_point must be true or false, got 1"),
        ("awq", {"group_size": 48}, "group_size must be -1 or a power of two from 32 on, got 48"),
        ("awq", {"group_size": 16}, "from 32 on, got 16"),
        ("awq", {"group_size": 0}, "from 32 on, got 0"),
        ("awq", {"group_size": None}, "from 32 on, got None"),
        (
            "awq",
            {"group_size": 512},
            "group_size must divide the inputs of model.layers.0.*512 and",
        ),
        ("awq", {"modules_to_not_convert": "lm_head"}, "must be a list of names, got 'lm_head'"),
        ("awq", {"modules_to_not_convert": [3]}, r"must be a list of names, got \[3\]"),
        ("gptq", {"bits": 3}, "bits must be 4 or 8, got 3"),
        (
            "gptq",
            {"bits": 8, "group_size": -1},
            "sym must be true with bits=8 and no .*, got false",
        ),
        ("gptq", {"group_size": 24}, "from 32 on, got 24"),
        ("gptq", {"checkpoint_format": "marlin"}, "checkpoint_format must be 'gptq' or 'gptq_v2'"),
        ("gptq", {"checkpoint_format": None, "format": "bitblas"}, "format must be 'gptq' or"),
        ("gptq", {"is_marlin_format": True}, "is_marlin_format must be False, got True"),
        ("gptq", {"pack_dtype": "int16"}, "pack_dtype must be 'int32', got 'int16'"),
        ("gptq", {"rotation": "hadamard"}, "rotation must be null, got 'hadamard'"),
        ("gptq", {"adapter": {"rank": 8}}, "adapter must be null, got"),
        ("gptq", {"desc_act": None}, "desc_act must be true or false, got None"),
        ("gptq", {"sym": "yes"}, "sym must be true or false, got 'yes'"),
        ("gptq", {"lm_head": 0}, "lm_head must be true or false, got 0"),
        ("gptq", {"dynamic": ["-:x"]}, r"dynamic must be patterns of layers, got \['-:x'\]"),
        ("gptq", {"dynamic": {"+:(": {}}}, r"dynamic must hold regular expressions, got '\+:\('"),
        ("gptq", {"dynamic": {"q_proj": False}}, r"dynamic\['q_proj'\] must be fields, got False"),
        ("gptq", {"dynamic": {".*": {"bits": 2}}}, "bits must be 4 or 8, got 2"),
        ("gptq", {"modules_in_block_to_quantize": [[1]]}, "must be a list of names"),
    ],
)
def test_configs_that_are_not_known(
    method: str, changed: dict[str, Any], says: str, bases: dict[str, Path], tmp_path: Path
) -> None:
    folder, _ = write(bases["qwen3-128"], Layout(method), tmp_path)
    change_config(folder, lambda config: config["quantization_config"].update(changed))
    with pytest.raises(ValueError, match=f"^config.json: quantization_config: .*{says}") as raised:
        load_folder(folder)
    assert "\n" not in str(raised.value)


# ---- refused: what files hold --------------------------------------------------------------------


def with_tensor(name: str, change: Any) -> Callable[[dict[str, torch.Tensor]], None]:
    """Another tensor of that name; None: none."""

    def apply(tensors: dict[str, torch.Tensor]) -> None:
        old = tensors.pop(name, None)
        if change is not None:
            tensors[name] = change(old)

    return apply


@pytest.mark.parametrize(
    ("one", "part", "change", "says"),
    [
        ("awq", "qweight", None, "expected tensor .*qweight, got none of that name"),
        ("awq", "qzeros", None, "expected tensor .*qzeros, got none of that name"),
        ("gptq", "scales", None, "expected tensor .*scales, got none of that name"),
        (
            "awq",
            "qweight",
            lambda t: t[:, 1:].clone(),
            r"qweight of shape \[256, 16\], got \[256, 15",
        ),
        (
            "gptq",
            "qweight",
            lambda t: t.t().contiguous(),
            r"qweight of shape \[32, 128\], got \[128, 32",
        ),
        ("awq", "qzeros", lambda t: t[:1].clone(), r"qzeros of shape \[8, 16\], got \[1, 16\]"),
        (
            "awq",
            "scales",
            lambda t: t.t().contiguous(),
            r"scales of shape \[8, 128\], got \[128, 8\]",
        ),
        ("gptq", "g_idx", lambda t: t[1:].clone(), r"g_idx of shape \[256\], got \[255\]"),
        ("gptq", "g_idx", lambda t: t.flip(0).clone(), r"without desc_act .*k // 128"),
        ("awq", "g_idx", lambda t: torch.zeros(256).int(), "got 1 more, the first .*g_idx"),
        (
            "awq",
            "qweight",
            lambda t: t.long(),
            "qweight in torch.int32, as awq has it, got .*int64",
        ),
        ("gptq", "qzeros", lambda t: t.float(), "qzeros in torch.int32, as gptq has it, got"),
        ("awq", "scales", lambda t: t.int(), "scales in floats, got torch.int32"),
        ("awq", "scales", lambda t: t * 0, "finite scales above 0 in .*scales, got 1024 others"),
        (
            "gptq",
            "scales",
            lambda t: t * float("nan"),
            "finite scales above 0 in .*, the first nan",
        ),
        ("gptq", "bias", lambda t: torch.ones(128).half(), "expected zeros in .*bias, as a qwen3"),
        ("gptq", "bias", lambda t: torch.zeros(9).half(), r"bias of shape \[128\], got \[9\]"),
        ("awq", "bias", lambda t: torch.zeros(128).half(), "got 1 more, the first .*bias"),
        ("awq", "weight", lambda t: torch.zeros(128, 256), "got 1 more, the first .*weight"),
        (
            "gptq-8-bits",
            "qzeros",
            lambda t: t + 1,
            r"zeros of 127 in .*qzeros, as sym .* 32 others",
        ),
    ],
)
def test_files_that_do_not_fit(
    one: str, part: str, change: Any, says: str, bases: dict[str, Path], tmp_path: Path
) -> None:
    folder, _ = write(bases["qwen3-128"], LAYOUTS[one], tmp_path)
    change_tensors(folder, with_tensor(f"{DOWN1}.{part}", change))
    with pytest.raises(ValueError, match=says) as raised:
        load_folder(folder)
    assert str(folder) in str(raised.value)
    assert "\n" not in str(raised.value)


def test_weights_of_a_layer_that_is_named(bases: dict[str, Path], tmp_path: Path) -> None:
    """A layer that config.json leaves alone is quantised."""
    folder, _ = write(bases["qwen3-128"], LAYOUTS["awq"], tmp_path)
    more = {"modules_to_not_convert": ["down_proj"]}
    change_config(folder, lambda config: config["quantization_config"].update(more))
    with pytest.raises(
        ValueError, match=r"expected tensor model.layers.0.mlp.down_proj.weight, got"
    ):
        load_folder(folder)


# ---- commands ------------------------------------------------------------------------------------


@pytest.mark.parametrize("one", ["awq", "gptq", "gptq-8-bits"])
def test_commands_run_it(one: str, bases: dict[str, Path], tmp_path: Path, capsys: Any) -> None:
    folder, dense = write(bases["qwen3-128"], LAYOUTS[one], tmp_path)
    text = tmp_path / "t.jsonl"
    text.write_text('{"text": "some words"}\n{"text": "to predict"}\n')
    found = []
    same = ["--json", "--text", str(text), "--kernels", "torch", "--dtype", "float32"]
    for path in (folder, dense):
        assert perplexity.main(["--model", str(path), *same]) == 0
        found.append(json.loads(capsys.readouterr().out)["perplexity"])
    assert found[0] == pytest.approx(found[1], rel=1e-4)
    argv = ["--model", str(folder), "--prompt", "abc", "--max-tokens", "3", "--json"]
    assert generate.main(argv) == 0
    assert json.loads(capsys.readouterr().out)["replies"]


def test_commands_that_want_16_bits(bases: dict[str, Path], tmp_path: Path, capsys: Any) -> None:
    folder, _ = write(bases["qwen3-128"], LAYOUTS["awq"], tmp_path)
    argv = ["--model", str(folder), "--out", str(tmp_path / "out")]
    for main, more in ((quantize.main, ["--scheme", "w8a8"]), (sensitivity.main, [])):
        assert main([*argv, *more]) == 2
        assert "expected an unquantised checkpoint, got a quantised one" in capsys.readouterr().err
    config = json.loads((folder / "config.json").read_text())
    assert facts_of(config).quantised
    assert configs.from_folder(folder).quantization is not None
