"""What is special to fused_qk_norm_rope_append: it is two operations, and writes what they do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_append_paged_kv import (
    OUTSIDE_INT32,
    OUTSIDE_INT64,
    bits,
    every_other_block,
    head_major,
    nan_pool,
    one_storage,
)
from test_fused_qk_norm_rope import inputs, parts

from tkernels import append_paged_kv, check, device, fused_qk_norm_rope, fused_qk_norm_rope_append
from tkernels.ops.fused_qk_norm_rope_append import SPEC, norm_rope_append_problem
from tkernels.testing import assert_close, guarded, poisoned_memory

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SLOTS = [6, 0, -1, 11]  # of four tokens, in four blocks of three


def cached(dev: torch.device, *, block_size: int = 3, **sizes: Any) -> dict[str, Any]:
    """Arguments of a call: four tokens of which one is skipped, caches of NaNs that all differ."""
    x = inputs(dev, **sizes)
    shape = (4, block_size, x["num_kv_heads"], len(x["q_weight"]))
    pools = [nan_pool(*shape, dtype=x["qkv"].dtype, dev=dev) for _ in range(2)]
    slots = torch.tensor(SLOTS, device=dev)[: len(x["qkv"])]
    return {**x, "k_cache": pools[0], "v_cache": pools[1], "slot_mapping": slots}


def separately(x: dict[str, Any], *, config: Any = None, **more: Any) -> torch.Tensor:
    """The two operations; writes to the caches of ``x``."""
    caches = [x[n] for n in ("k_cache", "v_cache", "slot_mapping")]
    first = {n: v for n, v in x.items() if not any(v is one for one in caches)}
    q, k = fused_qk_norm_rope(**first, **more, config=config)
    append_paged_kv(k, parts(x)[2], *caches)
    return q


def assert_same(ours: torch.Tensor, theirs: torch.Tensor, what: str) -> None:
    """Bit for bit where Triton interprets; a card's compiler may merge other products and sums."""
    if device.INTERPRETED:
        assert torch.equal(bits(ours), bits(theirs)), what
    else:
        assert_close(ours, theirs, what=what)


def assert_both_equal(x: dict[str, Any], **more: Any) -> None:
    """One launch and two, each on a copy of the caches, with equal tiles."""
    kept = {n: x[n].clone() for n in ("k_cache", "v_cache")}
    config = {"BLOCK_HEADS": 2, "EARLY_LOADS": False, "num_warps": 1, "programs_per_core": 0}
    with poisoned_memory():
        expected = separately({**x, **kept}, config=config, **more)
        got = fused_qk_norm_rope_append(**x, **more, config={**config, "PDL": False})
    assert_same(got, expected, "q")
    assert_same(x["k_cache"], kept["k_cache"], "k_cache")
    assert torch.equal(bits(x["v_cache"]), bits(kept["v_cache"]))


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(32, 32), (40, 24)])
def test_equals_the_two(
    head_dim: int, rotary_dim: int, interleaved: bool, dtype: torch.dtype, dev: torch.device
) -> None:
    x = cached(dev, head_dim=head_dim, rotary_dim=rotary_dim, dtype=dtype)
    assert_both_equal(x, interleaved=interleaved)


@pytest.mark.parametrize(("hq", "hk"), [(7, 1), (2, 5), (4, 4), (9, 3)])
def test_any_ratio_of_heads(hq: int, hk: int, dev: torch.device) -> None:
    assert_both_equal(cached(dev, hq=hq, hk=hk, head_dim=16))


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_other_slots_keep_their_bits(dtype: torch.dtype, dev: torch.device) -> None:
    """The pools lie in the middle of larger tensors that nothing may touch either."""
    x = cached(dev, head_dim=24, dtype=dtype)
    guards = {n: guarded(x[n]) for n in ("k_cache", "v_cache")}
    before = {n: bits(g.tensor).flatten(0, 1).clone() for n, g in guards.items()}
    fused_qk_norm_rope_append(**{**x, **{n: g.tensor for n, g in guards.items()}})
    other = [slot for slot in range(12) if slot not in SLOTS]
    for n, g in guards.items():
        g.check(n)
        assert torch.equal(bits(g.tensor).flatten(0, 1)[other], before[n][other])
    written = bits(guards["v_cache"].tensor).flatten(0, 1)[[6, 0, 11]]
    assert torch.equal(written, bits(parts(x)[2])[[0, 1, 3]])


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)
def test_tokens_without_a_slot_get_their_q(index: torch.dtype, dev: torch.device) -> None:
    outside = OUTSIDE_INT32 if index == torch.int32 else OUTSIDE_INT64
    for some in (outside[i : i + 4] for i in range(0, len(outside), 4)):
        x = cached(dev, tokens=len(some), head_dim=16)
        for n in ("k_cache", "v_cache"):
            x[n] = x[n][:2]  # slots 0 to 5
        before = {n: bits(x[n]).clone() for n in ("k_cache", "v_cache")}
        x["slot_mapping"] = torch.tensor(some, dtype=index, device=dev)
        with poisoned_memory():
            got = fused_qk_norm_rope_append(**x)
        assert_close(got, separately(x), what="q")
        for n, old in before.items():
            assert torch.equal(bits(x[n]), old)


@pytest.mark.usefixtures("unchecked")
def test_no_slots_and_no_tokens(dev: torch.device) -> None:
    for shape in ((0, 3, 2, 16), (4, 0, 2, 16)):
        x = cached(dev, head_dim=16)
        empty = torch.empty(shape, dtype=BF16, device=dev)
        x |= {"k_cache": empty, "v_cache": empty.clone()}
        assert_close(fused_qk_norm_rope_append(**x), separately(x), what="q")
    x = cached(dev, tokens=0, head_dim=16)
    before = bits(x["k_cache"]).clone()
    assert fused_qk_norm_rope_append(**x).shape == (0, 3, 16)
    assert torch.equal(bits(x["k_cache"]), before)


def test_tokens_that_are_alike(dev: torch.device) -> None:
    """One value, position and all, in several tokens: the same keys and values in their slots."""
    x = cached(dev, head_dim=16)
    x["qkv"][1:] = x["qkv"][0]
    x["positions"][:] = 7
    assert_both_equal(x)
    for n in ("k_cache", "v_cache"):
        rows = bits(x[n]).flatten(0, 1)[[6, 0, 11]]
        assert torch.equal(rows, rows[:1].expand_as(rows))


def test_parts_do_not_mix(dev: torch.device) -> None:
    """NaN in the heads of one part and in its weight reaches all that is made of it, no more."""
    for spoilt in range(3):
        x = cached(dev, head_dim=16)
        parts(x)[spoilt].fill_(torch.nan)
        if spoilt < 2:
            x["qk"[spoilt] + "_weight"].fill_(torch.nan)
        q = fused_qk_norm_rope_append(**x)
        rows = [x[n].flatten(0, 1)[[6, 0, 11]] for n in ("k_cache", "v_cache")]
        for i, found in enumerate((q, *rows)):
            assert bool(found.isnan().all() if i == spoilt else found.isfinite().all()), (spoilt, i)


@pytest.mark.parametrize("layout", [head_major, one_storage, every_other_block])
def test_strides(layout: Any, dev: torch.device) -> None:
    """Of the projection, of both caches and of q."""
    x = cached(dev, hq=4, head_dim=16, dtype=FP32, block_size=4)
    wide = torch.full((8, 8 * 16 + 5), torch.nan, device=dev)
    x["qkv"] = wide[::2, : 8 * 16].copy_(x["qkv"])
    x["slot_mapping"] = torch.tensor([7, 0, -1, 10], device=dev)
    theirs, caches = layout(dev), layout(dev)
    x |= {"k_cache": theirs[0], "v_cache": theirs[1]}
    expected = separately(x)
    q_out = torch.zeros(4, 4, 20, device=dev).transpose(0, 1)[..., 2:18]
    x |= {"k_cache": caches[0], "v_cache": caches[1], "q_out": q_out}
    assert fused_qk_norm_rope_append(**x) is q_out
    assert_close(q_out, expected, what="q")
    for ours, one in zip(caches, theirs, strict=True):
        assert ours._base is not None
        assert one._base is not None
        assert_close(ours._base, one._base, what="pool with its gaps")


def test_q_in_place(dev: torch.device) -> None:
    """q_out may be q in the projection; its k and v are left as they were."""
    x = cached(dev, head_dim=16)
    expected = separately({**x, "k_cache": x["k_cache"].clone(), "v_cache": x["v_cache"].clone()})
    q, *others = parts(x)
    kept = [t.clone() for t in others]
    assert fused_qk_norm_rope_append(**x, q_out=q) is q
    assert_close(q, expected, what="q")
    for now, then in zip(others, kept, strict=True):
        assert torch.equal(now, then)


@pytest.mark.parametrize("heads_lie_far_apart", [False, True])
def test_addresses_past_2_31_elements(heads_lie_far_apart: bool, dev: torch.device) -> None:
    """Numbers and strides fit 32 bits, their products do not. Few pages are ever touched."""
    if dev.type != "cpu":
        pytest.skip("memory of this size is really allocated on a device")
    x, far = cached(dev, tokens=3, hk=3, head_dim=16, dtype=FP16, block_size=2), 2**30
    x["slot_mapping"] = torch.tensor([7, 0, -1])
    expected = separately(x)
    memory = torch.empty(3 * far + 8192, dtype=FP16)
    cache = (128, 64, far, 1) if heads_lie_far_apart else (far, 64, 16, 1)
    views = {
        name: memory.as_strided(x[name].shape, strides, 2048 * place).copy_(x[name])
        for place, (name, strides) in enumerate(
            {"k_cache": cache, "v_cache": cache, "qkv": (far, 1)}.items()
        )
    }
    for n in ("k_cache", "v_cache"):
        views[n].fill_(-1.0)
    strides = (64, far, 1) if heads_lie_far_apart else (far, 16, 1)
    q_out = memory.as_strided((3, 3, 16), strides, 6144)
    assert_close(fused_qk_norm_rope_append(**{**x, **views}, q_out=q_out), expected, what="q")
    for n in ("k_cache", "v_cache"):
        ours, theirs = views[n].reshape(8, 3, 16), x[n].flatten(0, 1)
        assert_close(ours[[7, 0]], theirs[[7, 0]], what=n)
        assert bool((ours[1:7] == -1.0).all())


@pytest.mark.usefixtures("unchecked")
def test_debug_reads_slots_and_positions(
    monkeypatch: pytest.MonkeyPatch, dev: torch.device
) -> None:
    x = cached(dev, head_dim=16)
    beyond = {**x, "slot_mapping": torch.tensor([1, 14, -1, 12], device=dev)}
    far = {**x, "positions": torch.tensor([1, 50, 0, 3], device=dev)}
    for one in (x, beyond, far):
        fused_qk_norm_rope_append(**one)
    monkeypatch.setattr(check, "DEBUG", True)
    fused_qk_norm_rope_append(**x)
    name = "^fused_qk_norm_rope_append: "
    with pytest.raises(ValueError, match=rf"{name}slot_mapping must hold .*=12, got 14 \(2 such"):
        fused_qk_norm_rope_append(**beyond)
    with pytest.raises(ValueError, match=rf"{name}positions must be in .* from 0 to 50$"):
        fused_qk_norm_rope_append(**far)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"qkv": torch.zeros(4, 6 * 16)}, r"qkv must have shape \[tokens, .*= 112\], got float32 "),
        ({"k_weight": torch.zeros(8)}, r"k_weight must have shape \[head_dim=16\], got float32"),
        ({"cos_sin_cache": torch.zeros(9, 18)}, r"cos_sin_cache must .*\[2, head_dim=16\], got"),
        ({"k_cache": torch.zeros(4, 3, 1, 16)}, r"k_cache must .*num_kv_heads=2, .*, got float32"),
        ({"k_cache": torch.zeros(4, 3, 2, 16).half()}, "k_cache must be float32, got float16"),
        ({"v_cache": torch.zeros(4, 4, 2, 16)}, r"v_cache must .* as k_cache is, got float32"),
        ({"v_cache": torch.zeros(1, 3, 2, 16).expand(4, 3, 2, 16)}, "v_cache must not repeat mem"),
        (
            {"slot_mapping": torch.zeros(3).long()},
            r"slot_mapping must have shape \[tokens=4\]",
        ),
        ({"slot_mapping": torch.zeros(4)}, "slot_mapping must be int32 or int64, got float32"),
        ({"num_kv_heads": True}, r"num_kv_heads must be an int >= 1, got True \(bool\)"),
        ({"eps": 0}, "eps must be a number > 0, got 0"),
        ({"interleaved": 1}, r"interleaved must be True or False, got 1 \(int\)"),
        ({"q_out": torch.zeros(4, 2, 16)}, r"q_out must be float32 \[4, 3, 16\], got float32"),
    ],
)
def test_errors(change: dict[str, Any], words: str, dev: torch.device) -> None:
    """In its own name, whichever operation the check is of."""
    x = cached(dev, head_dim=16, dtype=FP32)
    change = {n: v.to(dev) if isinstance(v, torch.Tensor) else v for n, v in change.items()}
    with pytest.raises((ValueError, TypeError), match=f"^fused_qk_norm_rope_append: {words}"):
        fused_qk_norm_rope_append(**{**x, **change})


def test_few_tokens_get_small_tiles() -> None:
    """Unless a program would have more heads of k than registers."""
    h100, a100 = device.sm_facts(90), device.sm_facts(80)
    chosen = [
        SPEC.default_config(norm_rope_append_problem(*sizes, 128), h100)
        for sizes in ((1, 32, 8), (64, 32, 8), (2048, 32, 8), (1, 1, 64))
    ]
    assert [(c["BLOCK_HEADS"], c["num_warps"] == 1) for c in chosen] == [
        (1, True),
        (2, True),
        (32, False),
        (1, False),
    ]
    problem = norm_rope_append_problem(1, 32, 8, 128)
    assert SPEC.default_config(problem, a100) == {**chosen[0], "PDL": False}
    assert SPEC.why_illegal(chosen[0], problem, h100) is None
    assert SPEC.why_illegal(chosen[0], problem, a100) == "PDL needs sm90 or later, got sm80"
