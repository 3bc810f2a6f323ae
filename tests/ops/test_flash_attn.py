"""What is special to flash_attn: who sees which keys, extreme scores, layouts, poison, refusals."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tkernels
from tkernels import check as checks
from tkernels import device
from tkernels.attention import attention_ref
from tkernels.flash_attn_cases import flash_problem
from tkernels.ops.flash_attn import SPEC
from tkernels.testing import assert_close, guarded, tensors_of

pytestmark = pytest.mark.thin(3)

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
INF, NAN = math.inf, math.nan
# Small tiles, so that short sequences have several.
TILES: dict[str, Any] = {
    "BLOCK_M": 16,
    "BLOCK_N": 16,
    "SECTION": 8,
    "variant": "portable",
    "num_warps": 4,
    "num_stages": 1,
    "programs_per_core": 0,
}
# The interpreter is slow, and there the default config differs in its tiles alone.
CONFIGS = [TILES] if device.current().arch == "interpret" else [TILES, None]
PAIRS = [(1, 1), (16, 16), (17, 17), (15, 33), (33, 15), (20, 48), (40, 3), (1, 40)]

Inputs = dict[str, Any]


def dense(
    dev: torch.device,
    pair: tuple[int, int],
    *,
    batch: int = 1,
    heads: tuple[int, int] = (2, 1),
    dim: int = 16,
    dtype: torch.dtype = BF16,
    **options: Any,
) -> Inputs:
    """q, k and v of equally long sequences; ``pair``: (queries, keys), ``heads``: (q, kv)."""
    shapes = ((pair[0], heads[0]), (pair[1], heads[1]), (pair[1], heads[1]))
    tensors = (torch.randn(batch, n, h, dim).to(dtype).to(dev) for n, h in shapes)
    return {**dict(zip("qkv", tensors, strict=True)), **options}


def packed(dev: torch.device, pairs: Sequence[tuple[int, int]], **options: Any) -> Inputs:
    """The same for sequences of these lengths, one behind the other."""
    sums = tuple(sum(pair[i] for pair in pairs) for i in (0, 1))
    inputs = dense(dev, sums, **options)
    inputs |= {name: inputs[name][0] for name in "qkv"}
    for i, name in enumerate("qk"):
        lengths = [pair[i] for pair in pairs]
        offsets = [0, *itertools.accumulate(lengths)]
        inputs[f"cu_seqlens_{name}"] = torch.tensor(offsets, dtype=torch.int32, device=dev)
        inputs[f"max_seqlen_{name}"] = max(lengths, default=0)
    return inputs


def truth(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) in fp64."""
    wide = {
        n: x.double() if isinstance(x, torch.Tensor) and x.dtype.is_floating_point else x
        for n, x in inputs.items()
    }
    out, lse = tkernels.reference.flash_attn(**wide, return_lse=True)
    return out, lse


def attend(inputs: Inputs, config: Any = TILES) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = tkernels.flash_attn(**inputs, return_lse=True, config=config)
    return out, lse


def check(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of small tiles; they and those of the default config equal the truth."""
    want = truth(inputs)
    results = [attend(inputs, config) for config in CONFIGS]
    for config, got in zip(CONFIGS, results, strict=True):
        assert got[0].dtype == inputs["q"].dtype
        for name, actual, expected in zip(("out", "lse"), got, want, strict=True):
            assert_close(actual, expected, what=f"{name} of config {config}")
    return results[0]


def equal(a: tuple[torch.Tensor, ...], b: tuple[torch.Tensor, ...]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


# ---- the truth itself ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"causal": True},
        {"causal": False, "softcap": 1.5},
        {"causal": True, "window": 3, "softcap": 0.7},
    ],
    ids=str,
)
def test_reference_is_the_definition(options: dict[str, Any]) -> None:
    """Against the formula, one query, head and key at a time."""
    n, m, dim, scale = 6, 5, 3, 0.9
    q, k, v = (torch.randn(s, h, dim).double() for s, h in ((n, 4), (m, 2), (m, 2)))
    mask, sinks = torch.rand(4, n, m) < 0.8, torch.randn(4)
    mask[1, 3] = False
    for given_mask, given_sinks in ((None, None), (mask, None), (mask, sinks)):
        out, lse = attention_ref(
            q, k, v, scale=scale, mask=given_mask, sinks=given_sinks, **options
        )
        assert out.dtype == lse.dtype == torch.float64
        for i, h in itertools.product(range(n), range(4)):
            p = i + m - n
            seen = [
                j
                for j in range(m)
                if (not options["causal"] or j <= p)
                and j > p - options.get("window", 100)
                and (given_mask is None or bool(mask[h, i, j]))
            ]
            scores = [scale * float(q[i, h] @ k[j, h // 2]) for j in seen]
            if cap := options.get("softcap"):
                scores = [cap * math.tanh(s / cap) for s in scores]
            weights = [math.exp(s) for s in scores]
            total = sum(weights) + (0.0 if given_sinks is None else math.exp(sinks[h]))
            assert float(lse[i, h]) == pytest.approx(math.log(total) if total else -INF)
            want = sum(
                (w / total * v[j, h // 2] for w, j in zip(weights, seen, strict=True)), 0 * q[0, 0]
            )
            torch.testing.assert_close(out[i, h], want)


# ---- heads, dimensions, lengths ------------------------------------------------------------------


@pytest.mark.parametrize(
    "heads",
    [(2, 2), (4, 2), (8, 2), (10, 2), (12, 2), (14, 2), (8, 1), (16, 1), (24, 1), (48, 2)],
    ids=lambda heads: f"{heads[0]}/{heads[1]}",
)
def test_heads_share_keys(heads: tuple[int, int], dev: torch.device) -> None:
    """Ratios 1, 2, 4, 5, 6, 7, 8, 16 and 24, multi-query among them."""
    check(dense(dev, (3, 18), heads=heads))


@pytest.mark.parametrize("dim", [1, 16, 24, 64, 80, 96, 100, 128, 192, 256])
def test_head_dims(dim: int, dev: torch.device) -> None:
    for dtype in (BF16, FP32):
        inputs = dense(dev, (18, 20), heads=(1, 1), dim=dim, dtype=dtype)
        out = guarded(torch.zeros_like(inputs["q"]), padding=1)
        assert_close(attend({**inputs, "out": out.tensor})[0], truth(inputs)[0], what="out")
        out.check("out")
    check(inputs)


@pytest.mark.parametrize("causal", [True, False])
def test_lengths(causal: bool, dev: torch.device) -> None:
    """Fewer queries than keys, as many, and more, of which the first see nothing."""
    out, lse = check(packed(dev, PAIRS, causal=causal, dtype=FP16))
    at = 0
    for n, m in PAIRS:
        nothing = max(n - m, 0) if causal else 0
        assert lse[at : at + n].isneginf().sum() == 2 * nothing
        assert not out[at : at + nothing].any()
        at += n
    for pair in PAIRS[3:6]:
        check(dense(dev, pair, batch=2, causal=causal))


@pytest.mark.parametrize("window", [1, 2, 5, 16, 17, 100, 2**31 - 1])
def test_window(window: int, dev: torch.device) -> None:
    inputs = packed(dev, [(40, 40), (20, 45), (45, 20), (1, 30)], window=window, dtype=FP32)
    got = check(inputs)
    if window >= 45:
        assert equal(got, attend({**inputs, "window": None}))
    check(dense(dev, (33, 33), window=window))


@pytest.mark.parametrize("window", [None, 1, 15, 16, 17, 31, 33])
def test_every_place_of_the_diagonal_in_a_tile(window: int | None, dev: torch.device) -> None:
    """The edges of what is seen fall on each key of a block, and beside it."""
    pairs = [(18, 18 + more) for more in range(-2, 19)]
    check(packed(dev, pairs, window=window, heads=(1, 1), dtype=FP32))


def test_window_of_one_is_the_key_itself(dev: torch.device) -> None:
    inputs = dense(dev, (20, 20), heads=(2, 2), window=1)
    assert torch.equal(attend(inputs)[0], inputs["v"])


# ---- masks ---------------------------------------------------------------------------------------


def _blind_row(mask: torch.Tensor) -> torch.Tensor:
    mask[..., 3, :] = False
    return mask


MASKS = {
    "[1, 1, Sq, Sk]": lambda m: _blind_row(m[:1, :1]),
    "[B, 1, 1, Sk]": lambda m: m[:, :1, :1],
    "[B, Hq, Sq, Sk]": _blind_row,
    "[Sq, Sk]": lambda m: _blind_row(m[0, 0]),
    "[Hq, 1, Sk]": lambda m: m[0, :, :1],
    "[Sq, 1]": lambda m: m[0, 0, :, :1],
    "expanded": lambda m: m[:, :1, :1].expand(2, 4, 18, 35),
    "transposed": lambda m: m.transpose(2, 3).contiguous().transpose(2, 3),
    "sliced": lambda m: torch.cat([m, ~m], 3)[..., 5:40],
    "one True": lambda m: torch.ones_like(m[0, 0, 0, 0]),
    "all False": torch.zeros_like,
}


@pytest.mark.parametrize("made", MASKS.values(), ids=MASKS)
def test_masks(made: Any, dev: torch.device) -> None:
    inputs = dense(dev, (18, 35), batch=2, heads=(4, 2))
    inputs["mask"] = made(torch.rand(2, 4, 18, 35, device=dev) < 0.3)
    out, lse = check({**inputs, "causal": False})
    blind = lse.isneginf()
    assert not out[blind].any()
    full = inputs["mask"].expand(2, 4, 18, 35)
    assert torch.equal(blind, ~full.any(3).transpose(1, 2))


def test_mask_with_causal_window_and_the_rest(dev: torch.device) -> None:
    inputs = dense(
        dev, (20, 35), heads=(4, 2), softcap=2.0, window=19, sinks=torch.randn(4).to(dev)
    )
    mask = _blind_row(torch.rand(1, 1, 20, 35, device=dev) < 0.5)
    out, lse = check({**inputs, "mask": mask})
    assert not out[:, 3].any()
    assert_close(lse[0, 3], inputs["sinks"].double(), what="lse of a row that sees its sink alone")


# ---- scores --------------------------------------------------------------------------------------


@pytest.mark.parametrize("softcap", [0.5, 30.0, None])
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_scores_that_overflow_exp(
    softcap: float | None, dtype: torch.dtype, dev: torch.device
) -> None:
    """Up to 1e9, whose exponential no float holds: not by itself, and not inside a tanh."""
    inputs = dense(dev, (20, 20), dtype=dtype, softcap=softcap)
    for name in "qk":
        inputs[name] *= 1e4
    assert float(truth({**inputs, "softcap": None})[1].abs().max()) > 1e8
    out, lse = check(inputs)
    assert out.isfinite().all()
    assert lse.isfinite().all()


@pytest.mark.parametrize("softcap", [1e-3, 1.0, 50.0, 1000.0])
def test_softcap(softcap: float, dev: torch.device) -> None:
    """To fp32's precision also where the cap is far from the scores."""
    check(dense(dev, (20, 20), dtype=FP32, softcap=softcap))
    check(dense(dev, (20, 20), dtype=BF16, softcap=softcap, scale=1.7))


@pytest.mark.parametrize("scale", [1e-6, 0.3, 20])
def test_scale(scale: float, dev: torch.device) -> None:
    check(dense(dev, (20, 20), dtype=FP32, scale=scale))


def test_sinks(dev: torch.device) -> None:
    sinks = torch.tensor([-INF, -1e4, 0.0, 60.0], device=dev)
    inputs = dense(dev, (33, 20), heads=(4, 2), sinks=sinks, dtype=FP32)
    out, lse = check(inputs)
    alone = sinks.double().expand(1, 13, 4)
    assert_close(lse[:, :13], alone, what="lse of rows that see the sink alone")
    without = attend({**inputs, "sinks": None})
    for mine, other in zip((out, lse), without, strict=True):
        assert torch.equal(mine[0, :, 0], other[0, :, 0])
    assert float(out[0, :, 3].abs().max()) < 1e-15


def test_lse_merges_halves(dev: torch.device) -> None:
    """lse is the natural logarithm that merge_attn_states takes."""
    inputs = dense(dev, (5, 40), causal=False, dtype=FP32)
    halves = [
        attend({**inputs, "k": inputs["k"][:, keys], "v": inputs["v"][:, keys]})
        for keys in (slice(0, 13), slice(13, 40))
    ]
    merged = tkernels.merge_attn_states(*halves[0], *halves[1])
    for name, got, want in zip(("out", "lse"), merged, truth(inputs), strict=True):
        assert_close(got, want, what=name, factor=2.0)  # rounded to fp32 three times


# ---- what must not be read -----------------------------------------------------------------------


@pytest.mark.parametrize("bad", [NAN, INF])
@pytest.mark.parametrize("options", [{}, {"causal": False}, {"window": 3}], ids=str)
def test_poisoned_neighbours(options: dict[str, Any], bad: float, dev: torch.device) -> None:
    """A sequence's result is, to the bit, that of finite neighbours, and nobody else's rows."""
    pairs = [(20, 20), (5, 5), (3, 19), (9, 9), (20, 7), (4, 4)]
    inputs = packed(dev, pairs, **options)
    for name in "qkv":  # behind the last sequence, too
        inputs[name] = torch.cat([inputs[name], inputs[name][:9]])
    clean = attend(inputs)
    spoilt = {**inputs, **{name: inputs[name].clone() for name in "qkv"}}
    kept_rows = torch.ones(len(inputs["q"]), dtype=torch.bool)
    for i, name in enumerate("qkk"):
        ends = [0, *itertools.accumulate(pair[min(i, 1)] for pair in pairs)]
        for tensor in ("q", "k", "v")[i : i + 1]:
            for b in (1, 3, 5):
                spoilt[tensor][ends[b] : ends[b + 1]] = bad
            spoilt[tensor][ends[-1] :] = bad
        if name == "q":
            for b in (1, 3, 5):
                kept_rows[ends[b] : ends[b + 1]] = False
            kept_rows[ends[-1] :] = False
    out = torch.full_like(inputs["q"], 77.0)
    got = attend({**spoilt, "out": out})
    for mine, want in zip(got, clean, strict=True):
        assert torch.equal(mine[kept_rows], want[kept_rows])
    assert (out[-9:] == 77.0).all()  # rows of no sequence are left as they were


def test_blocks_that_nobody_sees_are_not_read(dev: torch.device) -> None:
    inputs = dense(dev, (64, 64), heads=(1, 1))
    clean = attend(inputs)[0]
    for name in "kv":
        inputs[name][:, 32:] = NAN
    assert torch.equal(attend(inputs)[0][:, :32], clean[:, :32])
    inputs = dense(dev, (64, 64), heads=(1, 1), window=17)
    clean = attend(inputs)[0]
    for name in "kv":
        inputs[name][:, :32] = NAN
    assert torch.equal(attend(inputs)[0][:, 48:], clean[:, 48:])


# ---- layouts -------------------------------------------------------------------------------------


def _by_heads(t: torch.Tensor) -> torch.Tensor:
    """The same values with memory laid out [batch, heads, seqlen, head_dim]."""
    return t.transpose(1, 2).contiguous().transpose(1, 2)


def test_views(dev: torch.device) -> None:
    inputs = dense(dev, (20, 20), batch=2, heads=(4, 2))
    want = check(inputs)
    q, k, v = (inputs[name] for name in "qkv")
    qkv = torch.cat([q, k, v], dim=2)
    split = dict(zip("qkv", qkv.split([4, 2, 2], dim=2), strict=True))
    by_heads = {name: _by_heads(inputs[name]) for name in "qkv"}
    mixed = {"k": torch.stack([k, v])[0], "v": torch.cat([v, v], 3)[..., :16]}  # of two strides
    for views in (split, by_heads, mixed, {"k": _by_heads(k)}):
        assert equal(attend({**inputs, **views}), want)


def test_packed_views(dev: torch.device) -> None:
    inputs = packed(dev, [(20, 20), (7, 7)], heads=(4, 2))
    want = check(inputs)
    qkv = torch.cat([inputs[name] for name in "qkv"], dim=1)
    split = dict(zip("qkv", qkv.split([4, 2, 2], dim=1), strict=True))
    assert equal(attend({**inputs, **split}), want)


def test_one_key_for_all(dev: torch.device) -> None:
    """Strides of zero in what is only read."""
    inputs = dense(dev, (5, 1), batch=2)
    for name in "kv":
        inputs[name] = inputs[name][:1].expand(2, 20, 1, 16)
    inputs["q"] = inputs["q"][:, :1].expand(2, 5, 2, 16)
    check(inputs)


def test_out_is_where_the_result_goes(dev: torch.device) -> None:
    inputs = dense(dev, (20, 20), batch=2)
    want = attend(inputs)
    room = torch.full((2, 3, 22, 24), 77.0, dtype=BF16, device=dev)
    out = room[:, 1:, 1:21, 4:20].transpose(1, 2)
    got = tkernels.flash_attn(**inputs, out=out, config=TILES)
    assert got is out
    assert torch.equal(out, want[0])
    out.fill_(77.0)
    assert (room == 77.0).all()


def test_strides_past_2_31_elements(dev: torch.device) -> None:
    """Token numbers and strides fit 32 bits, their products do not. Few pages are ever touched."""
    inputs = dense(dev, (3, 20), heads=(1, 1), dtype=FP16)
    step = 9 * 2**24
    assert 15 * step > 2**31  # the last key of a tile is that far from its first
    memory = torch.empty(19 * step + 4096, dtype=FP16, device=dev)
    for keys, stride in ((20, step), (18, step - 8)):
        far = {
            name: memory[64 * place :].as_strided((1, keys, 1, 16), (0, stride, 0, 1))
            for place, name in enumerate("kv")
        }
        near = {name: inputs[name][:, :keys] for name in "kv"}
        for name in "kv":
            far[name].copy_(near[name])
        assert equal(attend({**inputs, **far}), attend({**inputs, **near}))
        check({**inputs, **far})


# ---- nothing to do, or little --------------------------------------------------------------------


@pytest.mark.parametrize(("batch", "n", "m"), [(0, 5, 5), (2, 0, 5), (2, 0, 0), (2, 5, 0)])
@pytest.mark.parametrize("causal", [True, False])
def test_sizes_of_zero(batch: int, n: int, m: int, causal: bool, dev: torch.device) -> None:
    inputs = dense(dev, (n, m), batch=batch, causal=causal)
    for more in ({}, {"mask": torch.ones(n, m, dtype=torch.bool, device=dev)}):
        out, lse = check({**inputs, **more})
        assert out.shape == (batch, n, 2, 16)
        assert lse.shape == (batch, n, 2)
        assert not out.any()
        assert lse.isneginf().all()
    sinks = torch.randn(2).to(dev)
    _, lse = check({**inputs, "sinks": sinks})
    assert_close(lse, sinks.double().expand(lse.shape), what="lse")


def test_empty_sequences(dev: torch.device) -> None:
    check(packed(dev, [(0, 0), (5, 0), (0, 5), (20, 20), (0, 0)]))
    out, lse = check(packed(dev, [(5, 0), (2, 0)]))
    assert not out.any()
    assert lse.isneginf().all()
    for pairs in ([], [(0, 0), (0, 4)]):
        out, lse = attend(packed(dev, pairs))
        assert (out.shape, lse.shape) == ((0, 2, 16), (0, 2))


def test_longest_may_be_overstated(dev: torch.device) -> None:
    inputs = packed(dev, [(20, 20), (3, 40), (0, 0)], window=30)
    want = check(inputs)
    for more in (1, 16, 2**31 - 50):
        longer = {name: inputs[name] + more for name in ("max_seqlen_q", "max_seqlen_k")}
        assert equal(attend({**inputs, **longer}), want)
        assert equal(
            attend({**inputs, **longer, "window": 2**31 - 1}), attend({**inputs, "window": 40})
        )


# ---- configurations, operators -------------------------------------------------------------------


@pytest.mark.parametrize("changed", [{"SECTION": n} for n in (1, 2, 3, 5, 32)], ids=str)
def test_order_of_tiles_changes_nothing(changed: dict[str, int], dev: torch.device) -> None:
    inputs = packed(dev, [(40, 40), (17, 17), (0, 0), (3, 33)], heads=(3, 1))
    want = attend(inputs)
    for programs in (0, 1, 2):
        config = {**TILES, **changed, "programs_per_core": programs}
        assert equal(attend(inputs, config), want)


@pytest.mark.parametrize(("m", "n"), [(16, 64), (64, 16), (128, 32), (32, 128)])
def test_tiles(m: int, n: int, dev: torch.device) -> None:
    inputs = packed(dev, [(40, 40), (33, 65)], window=20, heads=(1, 1), dtype=FP32)
    want = truth(inputs)
    got = attend(inputs, {**TILES, "BLOCK_M": m, "BLOCK_N": n})
    for name, actual, expected in zip(("out", "lse"), got, want, strict=True):
        assert_close(actual, expected, what=name)


@pytest.mark.parametrize("return_lse", [False, True])
def test_fullgraph_compile(return_lse: bool, dev: torch.device) -> None:
    sinks = torch.randn(2).to(dev)
    for inputs in (
        dense(dev, (5, 18), sinks=sinks, softcap=3.0),
        packed(dev, [(5, 18), (3, 3)], window=4),
    ):
        tensors = {n: x for n, x in inputs.items() if isinstance(x, torch.Tensor)}
        plain = {n: x for n, x in inputs.items() if n not in tensors}

        def call(given_tensors: Inputs, plain: Inputs = plain) -> Any:
            return tkernels.flash_attn(**given_tensors, **plain, return_lse=return_lse)

        got = torch.compile(call, fullgraph=True, backend="aot_eager")(tensors)
        assert isinstance(got, torch.Tensor) is not return_lse
        assert equal(tensors_of(got), attend(inputs, None)[: 1 + return_lse])
        torch._dynamo.reset()


@pytest.mark.gpu
def test_captured_packed_batch_of_other_lengths(dev: torch.device) -> None:
    """Lengths are read by the kernel alone: a graph serves any that its maximum covers."""
    inputs = packed(dev, [(70, 70), (30, 90)], heads=(4, 2), dim=64)
    out = torch.empty_like(inputs["q"])
    attend({**inputs, "out": out}, None)
    graph = device.new_graph()
    with device.capture(graph):
        _, lse = attend({**inputs, "out": out}, None)
    other = packed(dev, [(40, 75), (60, 85)], heads=(4, 2), dim=64)
    for name in ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k"):
        inputs[name].copy_(other[name])
    graph.replay()
    for name, actual, expected in zip(("out", "lse"), (out, lse), truth(other), strict=True):
        assert_close(actual, expected, what=name)


@dataclasses.dataclass(frozen=True)
class Problem:
    """One drawn combination of features."""

    pairs: tuple[tuple[int, int], ...]
    varlen: bool
    heads: tuple[int, int]
    dim: int
    dtype: torch.dtype
    causal: bool
    window: int | None
    softcap: float | None
    sinks: bool
    mask: tuple[bool, bool, bool, bool] | None  # which dimensions have their full size
    tiles: tuple[int, int]


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    pair = st.tuples(st.integers(0, 40), st.integers(0, 40))
    varlen, causal = draw(st.booleans()), draw(st.booleans())
    kv_heads = draw(st.integers(1, 2))
    flags = st.tuples(*[st.booleans()] * 4)
    return Problem(
        pairs=tuple(draw(st.lists(pair, min_size=1, max_size=3 if varlen else 1))),
        varlen=varlen,
        heads=(kv_heads * draw(st.integers(1, 3)), kv_heads),
        dim=draw(st.sampled_from([8, 16, 20, 32])),
        dtype=draw(st.sampled_from([BF16, FP16, FP32])),
        causal=causal,
        window=draw(st.none() | st.integers(1, 45)) if causal else None,
        softcap=draw(st.none() | st.floats(0.5, 50)),
        sinks=draw(st.booleans()),
        mask=None if varlen else draw(st.none() | flags),
        tiles=(draw(st.sampled_from([16, 32])), draw(st.sampled_from([16, 32]))),
    )


@given(problem=problems())
@settings(max_examples=25, deadline=None, derandomize=True)
def test_any_combination(problem: Problem) -> None:
    p, dev = problem, device.tensor_device()
    torch.manual_seed(1)
    options: Inputs = {"causal": p.causal, "window": p.window, "softcap": p.softcap}
    options |= {"heads": p.heads, "dim": p.dim, "dtype": p.dtype}
    if p.sinks:
        options["sinks"] = torch.randn(p.heads[0]).to(dev)
    if p.varlen:
        inputs = packed(dev, p.pairs, **options)
    else:
        inputs = dense(dev, p.pairs[0], batch=2, **options)
    if p.mask is not None:
        full = (2, p.heads[0], *p.pairs[0])
        shape = [n if whole else 1 for n, whole in zip(full, p.mask, strict=True)]
        inputs["mask"] = (torch.rand(shape) < 0.7).to(dev)
    want = truth(inputs)
    got = attend(inputs, {**TILES, "BLOCK_M": p.tiles[0], "BLOCK_N": p.tiles[1]})
    for name, actual, expected in zip(("out", "lse"), got, want, strict=True):
        assert_close(actual, expected, what=f"{name} of {p}")


# ---- refusals ------------------------------------------------------------------------------------

I32, BOOL = torch.int32, torch.bool


def _zeros(shape: tuple[int, ...], dtype: torch.dtype = BF16) -> Any:
    """A tensor to be made on the device of the test."""
    return lambda dev: torch.zeros(shape, dtype=dtype, device=dev)


DENSE: Inputs = {"q": _zeros((2, 5, 4, 16)), "k": _zeros((2, 7, 2, 16)), "v": _zeros((2, 7, 2, 16))}
PACKED: Inputs = {
    "q": _zeros((9, 4, 16)),
    "k": _zeros((11, 2, 16)),
    "v": _zeros((11, 2, 16)),
    "cu_seqlens_q": _zeros((3,), I32),
    "cu_seqlens_k": _zeros((3,), I32),
    "max_seqlen_q": 9,
    "max_seqlen_k": 11,
}
# changes of the arguments (None: as if not given), then what is said behind "flash_attn: "
REFUSED_DENSE: list[tuple[Inputs, str]] = [
    ({"q": _zeros((5, 4, 16))}, "q must have shape [batch, seqlen, num_heads, head_dim] without "
     "cu_seqlens_q, got bfloat16 [5, 4, 16]"),
    ({"q": _zeros((4, 16))}, "q must have shape [..., num_heads, head_dim] with head_dim 1 to 256, "
     "got bfloat16 [4, 16]"),
    ({"q": _zeros((2, 5, 4, 257))}, "q must have shape [..., num_heads, head_dim] with head_dim 1 "
     "to 256, got bfloat16 [2, 5, 4, 257]"),
    ({"q": _zeros((2, 5, 4, 16), torch.float64)}, "q must be float32 or bfloat16 or float16, got "
     "float64 [2, 5, 4, 16]"),
    ({"k": _zeros((2, 7, 2, 16), FP16)}, "k must be bfloat16, got float16 [2, 7, 2, 16]"),
    ({"k": _zeros((3, 7, 2, 16))}, "k must have shape [2, seqlen, num_kv_heads, 16], got bfloat16 "
     "[3, 7, 2, 16]"),
    ({"k": _zeros((2, 7, 2, 32))}, "k must have head_dim 16, got bfloat16 [2, 7, 2, 32]"),
    ({"k": _zeros((2, 7, 3, 16))}, "k must have a number of heads that divides the 4 of q, got "
     "bfloat16 [2, 7, 3, 16]"),
    ({"k": _zeros((2, 7, 0, 16))}, "k must have a number of heads that divides the 4 of q, got "
     "bfloat16 [2, 7, 0, 16]"),
    ({"k": lambda _: torch.zeros(2, 7, 2, 16, dtype=BF16, device="meta")}, "k must be on device "
     f"type '{device.tensor_device().type}', got 'meta'"),
    ({"v": _zeros((2, 8, 2, 16))}, "v must have shape [2, 7, 2, 16] as k has, got bfloat16 "
     "[2, 8, 2, 16]"),
    ({"v": _zeros((2, 7, 1, 16))}, "v must have shape [2, 7, 2, 16] as k has, got bfloat16 "
     "[2, 7, 1, 16]"),
    ({"v": [1.0]}, "v must be a tensor, got [1.0] (list)"),
    ({"mask": _zeros((2, 4, 5, 7))}, "mask must be bool, got bfloat16 [2, 4, 5, 7]"),
    ({"mask": _zeros((2, 4, 7, 5), BOOL)}, "mask must be broadcastable to [2, 4, 5, 7], got bool "
     "[2, 4, 7, 5]"),
    ({"mask": _zeros((1, 2, 4, 5, 7), BOOL)}, "mask must be broadcastable to [2, 4, 5, 7], got "
     "bool [1, 2, 4, 5, 7]"),
    ({"sinks": _zeros((4,))}, "sinks must be float32, got bfloat16 [4]"),
    ({"sinks": _zeros((2,), FP32)}, "sinks must have shape [num_heads=4], got float32 [2]"),
    ({"out": _zeros((2, 5, 4, 8))}, "out must have shape [2, 5, 4, 16], got bfloat16 [2, 5, 4, 8]"),
    ({"out": _zeros((2, 5, 4, 16), FP32)}, "out must be bfloat16, got float32 [2, 5, 4, 16]"),
    ({"out": lambda dev: torch.zeros(1, 5, 4, 16, dtype=BF16, device=dev).expand(2, 5, 4, 16)},
     "out must not repeat memory, got strides [0, 64, 16, 1] for shape [2, 5, 4, 16]"),
    ({"window": 3, "causal": False}, "window must be None where causal is False, got 3"),
    ({"window": 0}, "window must be an int >= 1 or None, got 0 (int)"),
    ({"window": True}, "window must be an int >= 1 or None, got True (bool)"),
    ({"window": 2.0}, "window must be an int >= 1 or None, got 2.0 (float)"),
    ({"window": 2**31}, "window must be an int >= 1 or None, got 2147483648 (int)"),
    ({"causal": 1}, "causal must be True or False, got 1 (int)"),
    ({"scale": 0.0}, "scale must be a number > 0, got 0.0 (float)"),
    ({"scale": NAN}, "scale must be a number > 0, got nan (float)"),
    ({"softcap": -1.0}, "softcap must be a number > 0, got -1.0 (float)"),
    ({"softcap": 0}, "softcap must be a number > 0, got 0 (int)"),
    ({"max_seqlen_q": 5}, "max_seqlen_q and max_seqlen_k must be None without cu_seqlens, got 5 "
     "and None"),
    ({"cu_seqlens_q": _zeros((3,), I32)}, "q must have shape [tokens, num_heads, head_dim] with "
     "cu_seqlens_q, got bfloat16 [2, 5, 4, 16]"),
]  # fmt: skip
REFUSED_PACKED: list[tuple[Inputs, str]] = [
    ({"cu_seqlens_k": None}, "cu_seqlens_k must be given with the other, got None"),
    ({"cu_seqlens_q": None}, "cu_seqlens_q must be given with the other, got None"),
    ({"cu_seqlens_q": _zeros((4,), I32)}, "cu_seqlens_k must have shape [4], got int32 [3]"),
    ({"cu_seqlens_q": _zeros((3,), torch.int64)}, "cu_seqlens_q must be int32, got int64 [3]"),
    ({"cu_seqlens_k": _zeros((0,), I32)}, "cu_seqlens_k must have shape [num_sequences + 1], got "
     "int32 [0]"),
    ({"cu_seqlens_q": _zeros((1, 3), I32)}, "cu_seqlens_q must have shape [num_sequences + 1], got "
     "int32 [1, 3]"),
    ({"max_seqlen_q": None}, "max_seqlen_q must be an int >= 0 with cu_seqlens, got None "
     "(NoneType)"),
    ({"max_seqlen_k": -1}, "max_seqlen_k must be an int >= 0 with cu_seqlens, got -1 (int)"),
    ({"max_seqlen_k": True}, "max_seqlen_k must be an int >= 0 with cu_seqlens, got True (bool)"),
    ({"mask": _zeros((9, 11), BOOL)}, "mask must be None with cu_seqlens, got bool [9, 11]"),
    ({"k": _zeros((2, 11, 2, 16))}, "k must have shape [tokens, num_kv_heads, 16], got bfloat16 "
     "[2, 11, 2, 16]"),
    ({"v": _zeros((10, 2, 16))}, "v must have shape [11, 2, 16] as k has, got bfloat16 "
     "[10, 2, 16]"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("base", "changes", "words"),
    [(DENSE, *one) for one in REFUSED_DENSE] + [(PACKED, *one) for one in REFUSED_PACKED],
)
def test_refused(base: Inputs, changes: Inputs, words: str, dev: torch.device) -> None:
    inputs = {n: x(dev) if callable(x) else x for n, x in {**base, **changes}.items()}
    with pytest.raises((ValueError, TypeError), match=f"^flash_attn: {re.escape(words)}$"):
        tkernels.flash_attn(**inputs)


@pytest.mark.parametrize("base", [DENSE, PACKED], ids=["dense", "packed"])
def test_what_is_refused_is_otherwise_taken(base: Inputs, dev: torch.device) -> None:
    inputs = {n: x(dev) if callable(x) else x for n, x in base.items()}
    assert tkernels.flash_attn(**inputs).shape == inputs["q"].shape


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"BLOCK_M": 8}, "BLOCK_M must be a power of two from 16 on, got 8"),
        ({"BLOCK_N": 48}, "BLOCK_N must be a power of two from 16 on, got 48"),
        ({"SECTION": 0}, "SECTION must be 1 or more, got 0"),
        ({"variant": "other"}, "variant must be portable or hopper, got 'other'"),
        ({"num_warps": 3}, "num_warps must be 1 to 16 and num_stages 1 or more, got 3 and 1"),
        ({"BLOCK_M": 1024, "BLOCK_N": 1024}, "bytes of shared memory, more than"),
        ({"BLOCK_M": 128, "num_warps": 1}, "registers a thread"),
    ],
)
def test_illegal_config_is_refused(changed: Any, why: str, dev: torch.device) -> None:
    inputs = dense(dev, (5, 5), dim=64)
    with pytest.raises(ValueError, match=f"^flash_attn: config must be .*{re.escape(why)}"):
        attend(inputs, {**TILES, **changed})


@pytest.mark.parametrize(
    "offsets", [[0, 25, 23], [0, 20, 24], [1, 20, 23], [0, 21, 23], [0, -1, 23]], ids=str
)
def test_debug_reads_offsets(
    offsets: list[int], monkeypatch: pytest.MonkeyPatch, dev: torch.device
) -> None:
    inputs = packed(dev, [(20, 20), (3, 3)])
    monkeypatch.setattr(checks, "DEBUG", True)
    attend(inputs)
    for name in ("cu_seqlens_q", "cu_seqlens_k"):
        bad = torch.tensor(offsets, dtype=I32, device=dev)
        with pytest.raises(
            ValueError, match=rf"^flash_attn: {name} must rise from 0 to at most 23"
        ):
            attend({**inputs, name: bad})


# ---- facts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pair", "options"),
    [
        ((7, 7), {}),
        ((3, 9), {}),
        ((9, 3), {}),
        ((9, 9), {"window": 4}),
        ((3, 9), {"window": 2}),
        ((9, 3), {"window": 2}),
        ((5, 8), {"causal": False}),
    ],
    ids=str,
)
def test_cost_counts_what_is_seen(pair: tuple[int, int], options: dict[str, Any]) -> None:
    """4 * head_dim operations for each query and key that it sees, as the truth sees them."""
    n, m = pair
    problem = flash_problem(2, n, "6/2x16", BF16, seqlen_k=m, **options)
    # Keys of equal score: lse is the logarithm of how many are seen.
    zeros = torch.zeros(n, 1, 1), torch.zeros(m, 1, 1)
    given_options = {"causal": True, **options}
    _, lse = attention_ref(zeros[0], zeros[1], zeros[1], scale=1.0, **given_options)
    assert SPEC.cost(problem).flops == 4 * 16 * 6 * 2 * round(float(lse.exp().sum()))
