"""What is special to rope: views, tails, styles, positions, and equality with transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tkernels import check
from tkernels.ops.rope import rope, rope_ref
from tkernels.rope_table import build_cos_sin_cache
from tkernels.testing import assert_close

BF16, FP32 = torch.bfloat16, torch.float32
both_styles = pytest.mark.parametrize("interleaved", [False, True])


def table_of(rotary_dim: int, max_pos: int = 50) -> torch.Tensor:
    return build_cos_sin_cache({"head_dim": rotary_dim, "rope_theta": 1e4}, max_pos)


def inputs(
    dev: torch.device,
    *,
    tokens: int = 4,
    q_heads: int = 3,
    k_heads: int = 2,
    head_dim: int = 64,
    rotary_dim: int = 0,
    dtype: torch.dtype = BF16,
) -> dict[str, Any]:
    return {
        "q": torch.randn(tokens, q_heads, head_dim).to(dtype).to(dev),
        "k": torch.randn(tokens, k_heads, head_dim).to(dtype).to(dev),
        "cos_sin_cache": table_of(rotary_dim or head_dim).to(dev),
        "positions": torch.tensor([49, 3, 3, 0, 7, 21])[:tokens].to(dev),
    }


@both_styles
@pytest.mark.parametrize("rotary_dim", [64, 24])
def test_in_place_equals_out_of_place(
    dev: torch.device, interleaved: bool, rotary_dim: int
) -> None:
    x = inputs(dev, rotary_dim=rotary_dim)
    q, k = x["q"].clone(), x["k"].clone()
    expected = rope(**x, interleaved=interleaved)
    got = rope(**x, interleaved=interleaved, q_out=x["q"], k_out=x["k"])
    assert got[0] is x["q"]
    assert got[1] is x["k"]
    assert torch.equal(x["q"], expected[0])
    assert torch.equal(x["k"], expected[1])
    assert torch.equal(x["q"][..., rotary_dim:], q[..., rotary_dim:])
    assert torch.equal(x["k"][..., rotary_dim:], k[..., rotary_dim:])
    assert not torch.equal(x["q"][..., :rotary_dim], q[..., :rotary_dim])


@both_styles
def test_one_output_in_place_and_one_new(dev: torch.device, interleaved: bool) -> None:
    """The tail is skipped only where nothing needs it: k's must reach the new tensor."""
    x = inputs(dev, rotary_dim=24)
    expected = rope(**x, interleaved=interleaved)
    _, k = rope(**x, interleaved=interleaved, q_out=x["q"])
    assert torch.equal(x["q"], expected[0])
    assert torch.equal(k, expected[1])


@both_styles
@pytest.mark.parametrize("head_dim", [64, 80])
def test_views_of_a_packed_projection(dev: torch.device, interleaved: bool, head_dim: int) -> None:
    """q and k of qkv in place: v and everything else stays, results are those of copies."""
    hq, hk = 3, 2
    qkv = torch.randn(4, hq + 2 * hk, head_dim).to(BF16).to(dev)
    v = qkv[:, hq + hk :].clone()
    q, k = qkv[:, :hq], qkv[:, hq : hq + hk]
    x = inputs(dev, head_dim=head_dim)
    shared = {"cos_sin_cache": x["cos_sin_cache"], "positions": x["positions"]}
    expected = rope(q.contiguous(), k.contiguous(), **shared, interleaved=interleaved)
    rope(q, k, **shared, interleaved=interleaved, q_out=q, k_out=k)
    assert torch.equal(q, expected[0])
    assert torch.equal(k, expected[1])
    assert torch.equal(qkv[:, hq + hk :], v)


def test_any_head_and_token_strides(dev: torch.device) -> None:
    """[heads, tokens, D] in memory for q, every second head and token for k and the outputs."""
    x = inputs(dev)
    expected = rope(**x)
    q = x["q"].transpose(0, 1).contiguous().transpose(0, 1)
    k = torch.full((8, 4, 64), torch.nan, dtype=BF16, device=dev)[::2, ::2]
    k.copy_(x["k"])
    q_out = torch.zeros((4, 6, 70), dtype=BF16, device=dev)[:, ::2, :64]
    k_out = torch.zeros((2, 4, 64), dtype=BF16, device=dev).transpose(0, 1)
    rope(q, k, x["cos_sin_cache"], x["positions"], q_out=q_out, k_out=k_out)
    assert torch.equal(q_out, expected[0])
    assert torch.equal(k_out, expected[1])


@pytest.mark.parametrize(("q_heads", "k_heads"), [(7, 1), (1, 5), (4, 4), (9, 3)])
def test_q_and_k_do_not_mix(dev: torch.device, q_heads: int, k_heads: int) -> None:
    """Each is what it would be with another partner, whatever the head counts."""
    x = inputs(dev, q_heads=q_heads, k_heads=k_heads)
    q, k = rope(**x)
    others = {**x, "q": torch.full_like(x["q"], torch.nan)}
    assert torch.equal(rope(**others)[1], k)
    others = {**x, "k": torch.full_like(x["k"], torch.nan)}
    assert torch.equal(rope(**others)[0], q)


def test_styles_differ_by_a_permutation(dev: torch.device) -> None:
    """Interleaving the halves first makes the interleaved style give the half-split result."""
    x = inputs(dev, dtype=FP32)
    order = torch.arange(64, device=dev).view(2, 32).T.flatten()  # 0, 32, 1, 33, ...
    q, k = rope(**x)
    mixed = {**x, "q": x["q"][..., order], "k": x["k"][..., order]}
    q_mixed, k_mixed = rope(**mixed, interleaved=True)
    assert torch.equal(q_mixed, q[..., order])
    assert torch.equal(k_mixed, k[..., order])
    assert not torch.allclose(rope(**x, interleaved=True)[0], q, atol=0.1)


def test_position_dtypes_and_repeats(dev: torch.device) -> None:
    x = inputs(dev)
    wide = rope(**x)
    narrow = rope(**{**x, "positions": x["positions"].int()})
    assert torch.equal(wide[0], narrow[0])
    assert torch.equal(wide[1], narrow[1])
    same = {**x, "q": x["q"][:1].expand(4, -1, -1)}  # the same token at 49, 3, 3, 0
    q = rope(**same)[0]
    assert torch.equal(q[1], q[2])
    assert torch.equal(q[3], x["q"][0])  # position 0 turns nothing
    assert not torch.equal(q[0], q[1])


@both_styles
def test_error_against_fp64(dev: torch.device, interleaved: bool) -> None:
    """bf16 in and out, but not between: the error is that of one rounding, at any position.

    Factors in bf16 would err by 2^-9 of each term, and angles in bf16 by whole turns.
    """
    max_pos = 40960
    base = 1e6 ** (-torch.arange(0, 64, 2, dtype=torch.float64) / 64)
    positions = torch.tensor([40959, 12345, 1000, 1])
    angles = positions.double()[:, None] * base
    exact = torch.cat((angles.cos(), angles.sin()), dim=1)
    q = torch.randn(4, 8, 64).to(BF16)
    k = torch.randn(4, 2, 64).to(BF16)
    table = build_cos_sin_cache({"head_dim": 64, "rope_theta": 1e6}, max_pos)
    got = rope(*(t.to(dev) for t in (q, k, table, positions)), interleaved=interleaved)
    for x, out in zip((q, k), got, strict=True):
        a, b = (x[..., ::2], x[..., 1::2]) if interleaved else x.chunk(2, dim=-1)
        cos, sin = (t[:, None] for t in exact.chunk(2, dim=1))
        a, b = a.double(), b.double()
        turned = (a * cos - b * sin, b * cos + a * sin)
        truth = torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)
        length = (a.square() + b.square()).sqrt()
        length = (
            torch.stack((length, length), -1).flatten(-2)
            if interleaved
            else torch.cat((length, length), -1)
        )
        error = (out.cpu().double() - truth).abs()
        # Half a unit in the last place of bf16, and fp32's own error of the angle (p * 2^-24).
        assert (error <= truth.abs() * 2**-8 / 2 * 1.001 + length * 4e-3).all()
        assert error.square().mean().sqrt() < 1.3e-3 * truth.square().mean().sqrt() * 1.5


@pytest.mark.slow
@pytest.mark.parametrize("far_axis", [0, 1])
@pytest.mark.parametrize("far", [2**30 + 256, 2**31 + 512])
def test_offsets_past_2_to_the_31(dev: torch.device, far_axis: int, far: int) -> None:
    """Tokens, then heads, that far apart: the stride itself, or only its product with the index,
    needs more than 32 bits. What lies between is not touched."""
    count = 3 if far < 2**31 else 2
    x = inputs(dev, tokens=count, q_heads=count, k_heads=count)
    memory = torch.empty((count - 1) * far + 4096, dtype=BF16, device=dev)
    strides = (far, 64, 1) if far_axis == 0 else (64, far, 1)
    q, k, q_out, k_out = (
        memory.as_strided((count, count, 64), strides, 256 * place) for place in range(4)
    )
    q.copy_(x["q"])
    k.copy_(x["k"])
    expected = rope(**x)
    rope(**{**x, "q": q, "k": k}, q_out=q_out, k_out=k_out)
    assert torch.equal(q_out, expected[0])
    assert torch.equal(k_out, expected[1])
    rope(**{**x, "q": q, "k": k}, q_out=q, k_out=k)
    assert torch.equal(q, expected[0])
    assert torch.equal(k, expected[1])


def test_no_tokens(dev: torch.device) -> None:
    x = inputs(dev, tokens=0)
    q, k = rope(**x)
    assert q.shape == (0, 3, 64)
    assert k.shape == (0, 2, 64)
    assert rope(**x, q_out=x["q"])[0] is x["q"]


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_equals_transformers(dev: torch.device, family: str) -> None:
    if family == "llama":
        from transformers.models.llama import modeling_llama as theirs
        from transformers.models.llama.configuration_llama import LlamaConfig as Config
    else:
        from transformers.models.qwen3 import modeling_qwen3 as theirs
        from transformers.models.qwen3.configuration_qwen3 import Qwen3Config as Config
    fields = {
        "hidden_size": 192,
        "num_attention_heads": 3,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": 256,
        "rope_theta": 1e6,
    }
    embedding = getattr(
        theirs, "LlamaRotaryEmbedding" if family == "llama" else "Qwen3RotaryEmbedding"
    )
    positions = torch.tensor([255, 0, 17, 17, 100])
    q, k = torch.randn(5, 3, 64), torch.randn(5, 2, 64)
    cos, sin = embedding(Config(**fields))(q, positions[None])
    expected = theirs.apply_rotary_pos_emb(q[None], k[None], cos, sin, unsqueeze_dim=2)
    table = build_cos_sin_cache(fields, 256)
    got = rope(*(t.to(dev) for t in (q, k, table, positions)))
    for name, ours, other in zip("qk", got, expected, strict=True):
        assert_close(ours, other[0], what=name)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"q": [1]}, r"q must be a tensor, got \[1\] \(list\)"),
        (
            {"q": torch.zeros(4, 64)},
            r"q must have shape \[tokens, heads >= 1, head_dim >= 2\], got float32 \[4, 64\]",
        ),
        (
            {"q": torch.zeros(4, 3, 64, dtype=torch.int32)},
            "q must be float32 or bfloat16 or float16, got int32",
        ),
        ({"k": torch.zeros(4, 2, 64)}, r"k must be bfloat16, got float32 \[4, 2, 64\]"),
        (
            {"k": torch.zeros(3, 2, 64, dtype=BF16)},
            r"k must have shape \[tokens=4, heads, head_dim=64\], got bfloat16 \[3, 2, 64\]",
        ),
        (
            {"q": torch.zeros(4, 64, 3, dtype=BF16).mT},
            r"q must be contiguous in its last dimension \(stride 1\), got strides \[192, 1, 3\]",
        ),
        (
            {"cos_sin_cache": torch.zeros(9, 64, dtype=BF16)},
            r"cos_sin_cache must be float32, got bfloat16 \[9, 64\]",
        ),
        (
            {"cos_sin_cache": torch.zeros(9, 66)},
            r"an even rotary_dim in \[2, head_dim=64\], got float32 \[9, 66\]",
        ),
        (
            {"cos_sin_cache": torch.zeros(9, 33)},
            r"an even rotary_dim in \[2, head_dim=64\], got float32 \[9, 33\]",
        ),
        (
            {"cos_sin_cache": torch.zeros(9, 80)[:, :64]},
            r"cos_sin_cache must be contiguous, got strides \[80, 1\]",
        ),
        ({"cos_sin_cache": torch.zeros(0, 64)}, r"\[max_pos >= 1, rotary_dim\]"),
        ({"positions": torch.zeros(4)}, "positions must be int32 or int64, got float32"),
        (
            {"positions": torch.zeros(5, dtype=torch.int64)},
            r"positions must have shape \[tokens=4\], got int64 \[5\]",
        ),
        (
            {"positions": torch.zeros(8, dtype=torch.int64)[::2]},
            "positions must be contiguous in its last dimension",
        ),
        ({"interleaved": "gptj"}, r"interleaved must be True or False, got 'gptj' \(str\)"),
        (
            {"q_out": torch.zeros(4, 2, 64, dtype=BF16)},
            r"q_out must be bfloat16 \[4, 3, 64\], got bfloat16 \[4, 2, 64\]",
        ),
        ({"k_out": torch.zeros(4, 2, 64)}, r"k_out must be bfloat16 \[4, 2, 64\], got float32"),
        (
            {"q_out": torch.zeros(1, 3, 64, dtype=BF16).expand(4, 3, 64)},
            r"q_out must not repeat memory",
        ),
        (
            {"q": torch.zeros(4, 3, 64, dtype=BF16, device="meta")},
            "q must be on device type '.*', got 'meta'",
        ),
    ],
)
def test_errors(dev: torch.device, change: dict[str, Any], words: str) -> None:
    def place(value: Any) -> Any:
        is_real = isinstance(value, torch.Tensor) and value.device.type != "meta"
        # Moving a view may make it contiguous, which would take the error away.
        if not is_real or value.device.type == dev.type:
            return value
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=dev)

    change = {name: place(value) for name, value in change.items()}
    with pytest.raises((ValueError, TypeError), match=f"^rope: .*{words}"):
        rope(**{**inputs(dev), **change})


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("position", [-1, 50, 2**31, 2**40])
def test_positions_out_of_range_are_harmless(
    dev: torch.device, position: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without TKERNELS_DEBUG nothing waits for the values; they are moved into the table."""
    x = inputs(dev)
    x["positions"][1] = position
    near = {**x, "positions": x["positions"].clamp(0, 49)}
    for fn in (rope, rope_ref):
        for ours, expected in zip(fn(**x), fn(**near), strict=True):
            assert torch.equal(ours, expected)
    monkeypatch.setattr(check, "DEBUG", True)
    with pytest.raises(
        ValueError, match=rf"positions must be in \[0, max_pos=50\), got values .*{position}"
    ):
        rope(**x)
    rope(**near)


def test_reference_has_the_same_signature_and_writes_in_place() -> None:
    x = inputs(torch.device("cpu"))
    expected = rope_ref(**x)
    q, k = rope_ref(**x, q_out=x["q"], k_out=x["k"])
    assert q is x["q"]
    assert k is x["k"]
    assert torch.equal(q, expected[0])
    assert torch.equal(k, expected[1])
