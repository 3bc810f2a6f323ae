"""What is special to fused_qk_norm_rope: the packed layout, its parts, equality with Qwen3."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tkernels import check
from tkernels.ops.fused_qk_norm_rope import fused_qk_norm_rope, fused_qk_norm_rope_ref
from tkernels.ops.rms_norm import rms_norm
from tkernels.ops.rope import rope
from tkernels.rope_table import build_cos_sin_cache
from tkernels.testing import assert_close

BF16, FP32 = torch.bfloat16, torch.float32
both_styles = pytest.mark.parametrize("interleaved", [False, True])


def inputs(
    dev: torch.device,
    *,
    tokens: int = 4,
    hq: int = 3,
    hk: int = 2,
    head_dim: int = 64,
    rotary_dim: int = 0,
    dtype: torch.dtype = BF16,
) -> dict[str, Any]:
    table = build_cos_sin_cache({"head_dim": rotary_dim or head_dim, "rope_theta": 1e4}, 50)
    return {
        "qkv": torch.randn(tokens, (hq + 2 * hk) * head_dim).to(dtype).to(dev),
        "q_weight": (1 + 0.3 * torch.randn(head_dim)).to(dtype).to(dev),
        "k_weight": (1 + 0.3 * torch.randn(head_dim)).to(dtype).to(dev),
        "cos_sin_cache": table.to(dev),
        "positions": torch.tensor([49, 3, 3, 0])[:tokens].to(dev),
        "num_heads": hq,
        "num_kv_heads": hk,
    }


def parts(x: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Views of q, k and v in qkv, [T, heads, D]."""
    hq, hk = x["num_heads"], x["num_kv_heads"]
    heads = x["qkv"].view(len(x["qkv"]), hq + 2 * hk, -1)
    return heads[:, :hq], heads[:, hq : hq + hk], heads[:, hq + hk :]


@both_styles
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(64, 64), (80, 32)])
def test_equals_norms_then_rope(
    dev: torch.device, interleaved: bool, head_dim: int, rotary_dim: int
) -> None:
    """In fp32, where the separate steps do not round between, up to the order of a few sums."""
    x = inputs(dev, head_dim=head_dim, rotary_dim=rotary_dim, dtype=FP32)
    q, k, _ = parts(x)
    expected = rope(
        rms_norm(q, x["q_weight"]),
        rms_norm(k, x["k_weight"]),
        x["cos_sin_cache"],
        x["positions"],
        interleaved=interleaved,
    )
    got = fused_qk_norm_rope(**x, interleaved=interleaved)
    for name, ours, separate in zip("qk", got, expected, strict=True):
        assert_close(ours, separate, what=name)


def test_is_rounded_once(dev: torch.device) -> None:
    """bf16 results are the fp32 ones rounded; three steps in bf16 would differ in many elements."""
    x = inputs(dev, tokens=4, hq=8)
    wide = {
        n: v.float() if isinstance(v, torch.Tensor) and v.dtype == BF16 else v for n, v in x.items()
    }
    for name, ours, exact in zip(
        "qk", fused_qk_norm_rope(**x), fused_qk_norm_rope_ref(**wide), strict=True
    ):
        different = (ours != exact.to(BF16)).float().mean()
        assert different < 0.01, name
    q = parts(x)[0]
    k = torch.zeros_like(parts(x)[1])
    three_steps = rope(rms_norm(q, x["q_weight"]), k, x["cos_sin_cache"], x["positions"])[0]
    assert (three_steps != fused_qk_norm_rope_ref(**wide)[0].to(BF16)).float().mean() > 0.05


@both_styles
@pytest.mark.parametrize("rotary_dim", [64, 24])
def test_in_place_equals_out_of_place(
    dev: torch.device, interleaved: bool, rotary_dim: int
) -> None:
    x = inputs(dev, rotary_dim=rotary_dim)
    expected = fused_qk_norm_rope(**x, interleaved=interleaved)
    q, k, v = parts(x)
    kept = v.clone()
    got = fused_qk_norm_rope(**x, interleaved=interleaved, q_out=q, k_out=k)
    assert got[0] is q
    assert got[1] is k
    assert torch.equal(q, expected[0])
    assert torch.equal(k, expected[1])
    assert torch.equal(v, kept)


def test_strides_of_input_and_outputs_are_independent(dev: torch.device) -> None:
    x = inputs(dev)
    expected = fused_qk_norm_rope(**x)
    wide = torch.full((8, 7 * 64 + 5), torch.nan, dtype=BF16, device=dev)
    x["qkv"] = wide[::2, : 7 * 64].copy_(x["qkv"])
    q_out = torch.zeros((3, 4, 64), dtype=BF16, device=dev).transpose(0, 1)
    k_out = torch.zeros((4, 5, 70), dtype=BF16, device=dev)[:, 1:4:2, :64]
    got = fused_qk_norm_rope(**x, q_out=q_out, k_out=k_out)
    assert got[0] is q_out
    for name, ours, other in zip("qk", got, expected, strict=True):
        assert_close(ours, other, what=name)  # another alignment may sum in another order


@pytest.mark.parametrize(("hq", "hk"), [(7, 1), (1, 5), (4, 4), (9, 3)])
def test_parts_do_not_mix(dev: torch.device, hq: int, hk: int) -> None:
    """q sees neither k nor its weight nor v, and so round; v is not even read."""
    x = inputs(dev, hq=hq, hk=hk)
    q, k = fused_qk_norm_rope(**x)
    for spoil_q in (False, True):
        y = {**x, "qkv": x["qkv"].clone()}
        y_q, y_k, y_v = parts(y)
        y_v.fill_(torch.nan)
        (y_q if spoil_q else y_k).fill_(torch.nan)
        weight = "q_weight" if spoil_q else "k_weight"
        y[weight] = torch.full_like(x[weight], torch.nan)
        got = fused_qk_norm_rope(**y)
        assert torch.equal(got[1], k) if spoil_q else torch.equal(got[0], q)
        assert bool(got[0 if spoil_q else 1].isnan().all())


def test_a_head_of_zeros_and_a_huge_one(dev: torch.device) -> None:
    """eps keeps zeros zero; squares of fp16 values above 256 do not overflow."""
    x = inputs(dev, dtype=torch.float16)
    q, _, _ = parts(x)
    q[0, 0], q[1, 1] = 0.0, 6e4
    got = fused_qk_norm_rope(**x)[0]
    assert bool((got[0, 0] == 0).all())
    assert bool(got.isfinite().all())
    assert 0.5 < float(got[1, 1].float().pow(2).mean().sqrt()) < 2


def test_weights_may_be_wider_than_the_projection(dev: torch.device) -> None:
    x = inputs(dev)
    wide = {**x, "q_weight": x["q_weight"].float(), "k_weight": x["k_weight"].float()}
    for ours, expected in zip(fused_qk_norm_rope(**wide), fused_qk_norm_rope(**x), strict=True):
        assert torch.equal(ours, expected)


def test_no_tokens(dev: torch.device) -> None:
    x = inputs(dev, tokens=0)
    q, k = fused_qk_norm_rope(**x)
    assert q.shape == (0, 3, 64)
    assert k.shape == (0, 2, 64)


def test_equals_qwen3_attention(dev: torch.device) -> None:
    from transformers.models.qwen3 import modeling_qwen3 as theirs
    from transformers.models.qwen3.configuration_qwen3 import Qwen3Config

    fields = {
        "hidden_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": 256,
        "rope_theta": 1e6,
        "rms_norm_eps": 1e-5,
    }
    config = Qwen3Config(**fields)
    attention = theirs.Qwen3Attention(config, layer_idx=0)
    with torch.no_grad():
        attention.q_norm.weight.normal_(1, 0.3)
        attention.k_norm.weight.normal_(1, 0.3)
        hidden, positions = torch.randn(1, 5, 96), torch.tensor([255, 0, 17, 17, 100])
        q = attention.q_norm(attention.q_proj(hidden).view(1, 5, 4, 64))
        k = attention.k_norm(attention.k_proj(hidden).view(1, 5, 2, 64))
        cos, sin = theirs.Qwen3RotaryEmbedding(config)(hidden, positions[None])
        expected = theirs.apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=2)
        qkv = torch.cat(
            [p(hidden[0]) for p in (attention.q_proj, attention.k_proj, attention.v_proj)], 1
        )
        tensors = (
            qkv,
            attention.q_norm.weight,
            attention.k_norm.weight,
            build_cos_sin_cache(fields, 256),
            positions,
        )
        got = fused_qk_norm_rope(
            *(t.detach().to(dev) for t in tensors), num_heads=4, num_kv_heads=2, eps=1e-5
        )
    for name, ours, other in zip("qk", got, expected, strict=True):
        assert_close(ours, other[0], what=name)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"qkv": None}, "qkv must be a tensor, got None"),
        (
            {"qkv": torch.zeros(4, 6 * 64, dtype=BF16)},
            r"qkv must have shape \[tokens, \(num_heads=3 \+ 2 \* num_kv_heads=2\) \* head_dim=64 "
            r"= 448\], got bfloat16 \[4, 384\]",
        ),
        ({"qkv": torch.zeros(4, 7, 64, dtype=BF16)}, r"qkv must have shape .*\[4, 7, 64\]"),
        ({"qkv": torch.zeros(4, 448, dtype=torch.int8)}, "qkv must be float32 or .*, got int8"),
        ({"qkv": torch.zeros(448, 4, dtype=BF16).mT}, "qkv must be contiguous in its last"),
        ({"q_weight": torch.zeros(1, 64)}, r"q_weight must have shape \[head_dim >= 2\], got"),
        ({"q_weight": torch.zeros(64, dtype=torch.int64)}, "q_weight must be float32 or"),
        ({"k_weight": torch.zeros(64)}, r"k_weight must be bfloat16, got float32 \[64\]"),
        (
            {"k_weight": torch.zeros(32, dtype=BF16)},
            r"k_weight must have shape \[head_dim=64\], got bfloat16 \[32\]",
        ),
        ({"cos_sin_cache": torch.zeros(9, 66)}, r"in \[2, head_dim=64\], got float32 \[9, 66\]"),
        ({"positions": torch.zeros(3, dtype=torch.int32)}, r"positions must have shape \[tokens=4"),
        ({"num_heads": 0}, r"num_heads must be an int >= 1, got 0 \(int\)"),
        ({"num_kv_heads": 2.0}, r"num_kv_heads must be an int >= 1, got 2.0 \(float\)"),
        ({"eps": 0}, "eps must be a number > 0, got 0"),
        ({"interleaved": 1.5}, r"interleaved must be True or False, got 1.5 \(float\)"),
        (
            {"q_out": torch.zeros(4, 2, 64, dtype=BF16)},
            r"q_out must be bfloat16 \[4, 3, 64\], got bfloat16 \[4, 2, 64\]",
        ),
        ({"k_out": torch.zeros(4, 2, 64)}, r"k_out must be bfloat16 \[4, 2, 64\], got float32"),
    ],
)
def test_errors(dev: torch.device, change: dict[str, Any], words: str) -> None:
    def place(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.device.type == dev.type:
            return value
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=dev)

    change = {name: place(value) for name, value in change.items()}
    with pytest.raises((ValueError, TypeError), match=f"^fused_qk_norm_rope: .*{words}"):
        fused_qk_norm_rope(**{**inputs(dev), **change})


@pytest.mark.parametrize("far_axis", [0, 1])
def test_offsets_past_2_to_the_31(dev: torch.device, far_axis: int) -> None:
    """Tokens (and heads of the results) 2^30 elements apart: only products need 64 bits."""
    x = inputs(dev, tokens=3, hk=3)
    expected = fused_qk_norm_rope(**x)
    far = 2**30 + 256
    memory = torch.empty(2 * far + 4096, dtype=BF16, device=dev)
    qkv = memory.as_strided(x["qkv"].shape, (far, 1), 2048)
    qkv.copy_(x["qkv"])
    outs = [
        memory.as_strided(e.shape, (far, 64, 1) if far_axis == 0 else (64, far, 1), 256 * place)
        for place, e in enumerate(expected)
    ]
    fused_qk_norm_rope(**{**x, "qkv": qkv}, q_out=outs[0], k_out=outs[1])
    for out, e in zip(outs, expected, strict=True):
        assert torch.equal(out, e)


@pytest.mark.usefixtures("unchecked")
def test_positions_out_of_range(dev: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    x = inputs(dev)
    x["positions"][2] = 1000
    near = {**x, "positions": x["positions"].clamp(0, 49)}
    for fn in (fused_qk_norm_rope, fused_qk_norm_rope_ref):
        for ours, expected in zip(fn(**x), fn(**near), strict=True):
            assert torch.equal(ours, expected)
    monkeypatch.setattr(check, "DEBUG", True)
    with pytest.raises(ValueError, match=r"^fused_qk_norm_rope: positions must be in .* to 1000"):
        fused_qk_norm_rope(**x)
