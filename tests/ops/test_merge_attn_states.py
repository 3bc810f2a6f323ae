"""What is special to merge_attn_states: it is attention over all keys, whoever saw which."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import tkernels
from tkernels import device
from tkernels.ops.merge_attn_states import SPEC, _problem
from tkernels.testing import assert_close, assert_right, clone_inputs, guarded

INF, NAN = math.inf, math.nan
State = tuple[torch.Tensor, torch.Tensor]


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> State:
    """[T, H, D] over k, v [S, H, D] in fp64: (out, lse), an empty row of keys included."""
    scores = torch.einsum("thd,shd->ths", q, k) / math.sqrt(q.shape[-1])
    lse = scores.logsumexp(-1) if len(k) else torch.full(q.shape[:-1], -INF, dtype=q.dtype)
    shares = (scores - lse.masked_fill(lse == -INF, 0.0)[..., None]).exp()
    return torch.einsum("ths,shd->thd", shares, v), lse


def on_device(state: State, dtype: torch.dtype, dev: torch.device) -> State:
    return state[0].to(dtype).to(dev), state[1].float().to(dev)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("cut", [0, 1, 13, 40])
def test_equals_attention_over_all_keys(cut: int, dtype: torch.dtype, dev: torch.device) -> None:
    q, k, v = (torch.randn(n, 3, 48, dtype=torch.float64) for n in (5, 40, 40))
    a = on_device(attention(3 * q, k[:cut], v[:cut]), dtype, dev)
    b = on_device(attention(3 * q, k[cut:], v[cut:]), dtype, dev)
    out, lse = tkernels.merge_attn_states(*a, *b)
    truth, truth_lse = attention(3 * q, k, v)
    assert_close(out, truth, what="out")
    assert_close(lse, truth_lse, what="lse")


def test_order_and_grouping_do_not_matter(dev: torch.device) -> None:
    """((a b) c) d = (a b) (c d) = d (b (c a)), with sides of very different weight."""
    merge = tkernels.merge_attn_states
    q = torch.randn(6, 2, 32, dtype=torch.float64)
    parts = [
        on_device(attention(scale * q, *torch.randn(2, n, 2, 32).double()), torch.float32, dev)
        for n, scale in ((7, 1), (1, 20), (0, 1), (30, 5))
    ]
    a, b, c, d = parts
    ways = [
        merge(*merge(*merge(*a, *b), *c), *d),
        merge(*merge(*a, *b), *merge(*c, *d)),
        merge(*d, *merge(*b, *merge(*c, *a))),
    ]
    for out, lse in ways[1:]:
        assert_close(out, ways[0][0], what="out", factor=2.0)  # three roundings to fp32 a side
        assert_close(lse, ways[0][1], what="lse")
    for x, y in zip(merge(*a, *b), merge(*b, *a), strict=True):  # one product is fused with the sum
        assert_close(x, y, what="either order")


@pytest.mark.parametrize("head_dim", [16, 5000])
def test_sides_that_saw_nothing(head_dim: int, dev: torch.device) -> None:
    """Their values are not looked at, so that they may be NaN; nothing at all is zeros and -inf."""
    lse_a = torch.tensor([[0.5, -INF, -INF, -100.0]], device=dev)
    lse_b = torch.tensor([[-INF, 2.0, -INF, 100.0]], device=dev)
    out_a, out_b = torch.full((2, 1, 4, head_dim), NAN, device=dev)
    out_a[0, 0], out_a[0, 3] = 7.0, 1.0
    out_b[0, 1], out_b[0, 3] = 9.0, 4.0
    out, lse = tkernels.merge_attn_states(out_a, lse_a, out_b, lse_b)
    assert lse.tolist() == [[0.5, 2.0, -INF, 100.0]]
    assert [sorted(set(row)) for row in out[0].tolist()] == [[7.0], [9.0], [0.0], [4.0]]


@pytest.mark.parametrize("bad", [NAN, INF])
def test_what_is_no_lse_shows(bad: float, dev: torch.device) -> None:
    for other in (1.0, -INF, bad):
        for pair in ((bad, other), (other, bad)):
            lses = [torch.full((3, 2), x, device=dev) for x in pair]
            ones = torch.ones(3, 2, 8, device=dev)
            out, lse = tkernels.merge_attn_states(ones, lses[0], ones, lses[1])
            assert out.isnan().all()
            assert lse.isnan().all()


def test_large_lse_does_not_overflow(dev: torch.device) -> None:
    """exp(lse) itself would be infinite, or zero."""
    for level in (-3e4, 3e4):
        lse_a = torch.full((2, 3), level, device=dev)
        ones = torch.ones(2, 3, 20, device=dev)
        out, lse = tkernels.merge_attn_states(ones, lse_a, 3 * ones, lse_a)
        assert_close(out, 2 * ones, what="out")
        assert_close(lse, lse_a.double() + math.log(2), what="lse")


IN_PLACE: dict[str, dict[str, str]] = {
    "into a": {"out": "out_a", "lse_out": "lse_a"},
    "into b": {"out": "out_b", "lse_out": "lse_b"},
    "crossed": {"out": "out_a", "lse_out": "lse_b"},
    "out alone": {"out": "out_b"},
    "lse alone": {"lse_out": "lse_a"},
}


@pytest.mark.parametrize("targets", IN_PLACE.values(), ids=IN_PLACE)
@pytest.mark.parametrize("head_dim", [64, 5000])
def test_in_place(targets: dict[str, str], head_dim: int, dev: torch.device) -> None:
    """A head_dim of one block and of several, which read an lse that the last one overwrites."""
    problem = _problem((7, 3), head_dim, torch.bfloat16)
    inputs = SPEC.make_inputs(problem, dev)
    expected = tkernels.merge_attn_states(**clone_inputs(inputs))
    given = {name: inputs[source] for name, source in targets.items()}
    results = tkernels.merge_attn_states(**inputs, **given)
    for name, result, truth in zip(SPEC.outputs, results, expected, strict=True):
        assert result is given.get(name, result)
        assert torch.equal(result, truth)


@pytest.mark.gpu
def test_in_place_again_and_again(dev: torch.device) -> None:
    """Threads that share a row's lse: none of them reads what another has already written."""
    problem = _problem((2048, 32), 256, torch.bfloat16)
    inputs = SPEC.make_inputs(problem, dev)
    expected = tkernels.merge_attn_states(**clone_inputs(inputs))
    for _ in range(50):
        own = clone_inputs(inputs)
        got = tkernels.merge_attn_states(**own, out=own["out_a"], lse_out=own["lse_a"])
        for result, truth in zip(got, expected, strict=True):
            assert torch.equal(result, truth)


@pytest.mark.parametrize("head_dim", [1, 2, 63, 80, 96, 100, 192, 256, 257])
def test_head_dims(head_dim: int, dev: torch.device) -> None:
    inputs = SPEC.make_inputs(_problem((3, 4), head_dim, torch.float16), dev)
    out = guarded(torch.zeros(3, 4, head_dim, dtype=torch.float16, device=dev), padding=1)
    lse = guarded(torch.zeros(3, 4, device=dev), padding=1)
    kept = clone_inputs(inputs)
    results = tkernels.merge_attn_states(**inputs, out=out.tensor, lse_out=lse.tensor)
    assert_right(SPEC, kept, results)
    out.check("out")
    lse.check("lse_out")


def test_lse_laid_out_by_heads(dev: torch.device) -> None:
    """[n_heads, T] as a transposed view, for arguments and result alike."""
    inputs = SPEC.make_inputs(_problem((5, 3), 32, torch.float32), dev)
    by_heads = {n: inputs[n].t().contiguous() for n in ("lse_a", "lse_b")}
    lse_out = torch.zeros(3, 5, device=dev)
    views = {n: t.t() for n, t in by_heads.items()}
    out, lse = tkernels.merge_attn_states(**{**inputs, **views}, lse_out=lse_out.t())
    expected = tkernels.merge_attn_states(**inputs)
    assert torch.equal(out, expected[0])
    assert torch.equal(lse_out.t(), expected[1])
    assert lse.data_ptr() == lse_out.data_ptr()


def test_rows_past_2_31_elements(dev: torch.device) -> None:
    """Row numbers and strides fit 32 bits, their products do not. Few pages are ever touched."""
    plain = SPEC.make_inputs(_problem((3, 2), 32, torch.float16), dev)
    memory = torch.empty(2**31 + 4096, dtype=torch.float16, device=dev)
    far = {
        name: memory.as_strided((3, 2, 32), (2**30, 100, 1), 500 * place)
        for place, name in enumerate(("out_a", "out_b", "out"))
    }
    inputs = {**plain, **{n: far[n].copy_(plain[n]) for n in ("out_a", "out_b")}}
    assert_right(SPEC, plain, tkernels.merge_attn_states(**inputs, out=far["out"]))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"out_a": (4, 8)}, r"lse_a must be float32 \[4\] \(out_a without head_dim\), got .*"),
        ({"out_a": (8,)}, r"out_a must have shape \[\.\.\., n_heads, head_dim >= 1\], got .*\[8\]"),
        ({"out_b": (4, 3, 9)}, r"out_b must be float32 \[4, 3, 8\], got float32 \[4, 3, 9\]"),
        ({"lse_b": (3, 4)}, r"lse_b must be float32 \[4, 3\] .*, got float32 \[3, 4\]"),
        ({"out": (4, 3)}, r"out must be float32 \[4, 3, 8\], got float32 \[4, 3\]"),
        ({"lse_out": (4, 3, 1)}, r"lse_out must be float32 \[4, 3\] .*, got float32 \[4, 3, 1\]"),
    ],
)
def test_refused(changes: dict[str, Any], words: str, dev: torch.device) -> None:
    shapes = {"out_a": (4, 3, 8), "lse_a": (4, 3), "out_b": (4, 3, 8), "lse_b": (4, 3)} | changes
    with pytest.raises(ValueError, match=rf"^merge_attn_states: {words}$"):
        tkernels.merge_attn_states(**{n: torch.zeros(s, device=dev) for n, s in shapes.items()})


def test_sides_of_two_dtypes_are_refused(dev: torch.device) -> None:
    half = torch.zeros(4, 3, 8, device=dev, dtype=torch.bfloat16)
    lse = torch.zeros(4, 3, device=dev)
    with pytest.raises(ValueError, match=r"out_b must be bfloat16 \[4, 3, 8\], got float32"):
        tkernels.merge_attn_states(half, lse, half.float(), lse)


def test_few_rows_are_spread_over_the_cores() -> None:
    """64 tokens of 32 heads: a program for each core, not a sixteenth of them."""
    facts = device.sm_facts(90)
    problem = _problem((64, 32), 128, torch.bfloat16)
    chosen = SPEC.default_config(problem, facts)
    assert device.cdiv(problem["n_rows"], chosen["BLOCK_ROWS"]) >= facts.num_cores
