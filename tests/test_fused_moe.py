"""fused_moe against its reference: routing, formats, chunks, absent experts, refusals."""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import tkernels
from tkernels import device
from tkernels.config import force_config
from tkernels.moe import chunk_of
from tkernels.moe_gemm_cases import moe_gemm_problem
from tkernels.ops.moe_gemm import SPEC
from tkernels.ops.quantize_per_token import quantize_per_token_ref
from tkernels.testing import assert_close, guarded, poisoned_memory
from tkernels.w4_format import pack_nibbles

pytestmark = pytest.mark.thin(2)

T, E, TOP_K, H, WIDE = 13, 6, 2, 32, 24


def operands(
    dev: torch.device,
    tokens: int = T,
    dtype: torch.dtype = torch.float16,
    *,
    experts: int = E,
    hidden: int = H,
    intermediate: int = WIDE,
    int8: bool = False,
    four: tuple[int, ...] = (),
    zero: bool = False,
) -> dict[str, Any]:
    """``four``: of weights of 4 bits, columns of a group, in both products."""
    generator = torch.Generator(dev).manual_seed(tokens)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=dev)

    given: dict[str, Any] = {
        "x": normal(tokens, hidden).to(dtype),
        "router_logits": normal(tokens, experts).to(dtype),
        "top_k": TOP_K,
    }
    gate_up = normal(experts, 2 * intermediate, hidden) * hidden**-0.5
    down = normal(experts, hidden, intermediate) * intermediate**-0.5
    for name, weight in (("gate_up", gate_up), ("down", down)):
        if int8:
            codes, scale = quantize_per_token_ref(weight.flatten(0, 1))
            given[f"{name}_weight"] = codes.view(weight.shape)
            given[f"{name}_scale"] = scale.view(weight.shape[:2])
        elif four:
            group = four[name == "down"]
            shape = (*weight.shape[:2], weight.shape[2] // group)
            q = normal(*weight.shape).mul(3).add(8).round().clamp(0, 15)
            given[f"{name}_weight"] = pack_nibbles(q.flatten(0, 1)).view(*weight.shape[:2], -1)
            scale = (normal(*shape).abs() + 0.5) * weight.shape[2] ** -0.5 / 3
            given[f"{name}_scale"] = scale.to(dtype)
            if zero:
                points = normal(*shape).mul(2).add(8).round().clamp(0, 15)
                given[f"{name}_zero"] = points.to(torch.int8)
        else:
            given[f"{name}_weight"] = weight.to(dtype)
    return given


def run(**given: Any) -> torch.Tensor:
    """Results that nothing was written to would be NaN."""
    with poisoned_memory():
        return tkernels.fused_moe(**given)


def assert_right(got: torch.Tensor, given: dict[str, Any]) -> None:
    """As the reference has it; what is rounded on the way may be rounded another way: twice."""
    expected = tkernels.reference.fused_moe(**given)
    assert got.dtype == expected.dtype
    # Weights of 4 bits are rounded to 16, too, where rows are many.
    factor = 3 if given["gate_up_weight"].dtype == torch.int32 else 2
    assert_close(got, expected.float(), what="fused_moe", factor=factor)


@contextlib.contextmanager
def one_config() -> Iterator[None]:
    """The same tiles for any number of rows, so that sums are added in one order."""
    problem = moe_gemm_problem(T, E, TOP_K, 2 * WIDE, H, torch.float16)
    config = SPEC.default_config(problem, device.current())
    with force_config("moe_gemm", {**config, "variant": "portable"}):
        yield


# ---- routing -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("tokens", [0, 1, T, 70])
def test_equals_the_reference(tokens: int, dtype: torch.dtype, dev: torch.device) -> None:
    given = operands(dev, tokens, dtype)
    got = run(**given)
    assert got.shape == (tokens, H)
    assert_right(got, given)


@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"score": "sigmoid"},
        {"score": "sigmoid", "biased": True, "scale": 2.5},
        {"score": "sigmoid", "biased": True, "num_groups": 3, "top_groups": 2},
        {"num_groups": 2, "top_groups": 1},
        {"top_k": 1},
        {"top_k": E},
    ],
    ids=str,
)
def test_ways_to_route(more: dict[str, Any], renormalize: bool, dev: torch.device) -> None:
    given = operands(dev) | {"renormalize": renormalize} | more
    if given.pop("biased", False):
        given["bias"] = torch.linspace(-0.3, 0.3, E, device=dev)
    ids = [torch.full((T, given["top_k"]), -7, dtype=torch.int32, device=dev) for _ in range(2)]
    got = run(**given, topk_ids_out=ids[0])
    assert_right(got, given)
    tkernels.reference.fused_moe(**given, topk_ids_out=ids[1])
    assert torch.equal(ids[0], ids[1])
    assert int(ids[0].min()) >= 0


@pytest.mark.slow
def test_a_different_way_is_a_different_result(dev: torch.device) -> None:
    """The comparisons above could fail."""
    given = operands(dev)
    base = run(**given)
    bias = torch.linspace(-2, 2, E, device=dev)
    for more in (
        {"renormalize": False},
        {"score": "sigmoid"},
        {"score": "sigmoid", "bias": bias},
        {"scale": 2.0},
        {"top_k": 1},
        {"num_groups": 3, "top_groups": 1},
    ):
        assert (run(**{**given, **more}) - base).abs().max() > 0.05, more


# ---- formats -----------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["w8a8", "w8a16", "masked", "gate_up", "down"])
def test_int8_weights(way: str, dev: torch.device) -> None:
    """Both products, or one of them; a bit for each expert."""
    given = operands(dev, 40, int8=True)
    plain = operands(dev, 40)
    if way == "w8a16":
        given["high"] = True
    if way == "masked":
        given["mask"] = torch.tensor([0b101001], dtype=torch.int64, device=dev)
    if way in ("gate_up", "down"):
        other = "down" if way == "gate_up" else "gate_up"
        given[f"{other}_weight"] = plain[f"{other}_weight"]
        del given[f"{other}_scale"]
    assert_right(run(**given), given)


FOUR: dict[str, Any] = {"hidden": 64, "intermediate": 32}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize(("tokens", "groups"), [(T, (32, 32)), (1, (64, 32)), (40, (32, 32))])
def test_weights_of_4_bits(
    tokens: int, groups: tuple[int, ...], zero: bool, dtype: torch.dtype, dev: torch.device
) -> None:
    """Each product with a group of its own."""
    given = operands(dev, tokens, dtype, **FOUR, four=groups, zero=zero)
    assert_right(run(**given), given)
    assert_right(run(**given, chunk_tokens=5), given)


@pytest.mark.parametrize("of", ["gate_up", "down"])
@pytest.mark.parametrize("int8", [False, True])
def test_one_product_of_4_bits(of: str, int8: bool, dev: torch.device) -> None:
    """The other has weights of 16 bits, or of 8."""
    given = operands(dev, 20, **FOUR, four=(32, 32), zero=True)
    other = operands(dev, 20, **FOUR, int8=int8)
    other = {n: v for n, v in other.items() if not n.startswith(of)}
    given = {**other, **{n: v for n, v in given.items() if n.startswith(of)}}
    assert_right(run(**given), given)


def test_a_mask_chooses_between_both_ways(dev: torch.device) -> None:
    """Bit for bit; a token whose experts run both ways has a result of its own."""
    given = operands(dev, 40, int8=True) | {"top_k": 1}
    ids = torch.empty(40, 1, dtype=torch.int32, device=dev)
    low, high = run(**given, topk_ids_out=ids), run(**given, high=True)
    assert not (low == high).all(1).any()
    for bits in (0, 0b111111, 0b010110):
        mask = torch.tensor([bits], dtype=torch.int64, device=dev)
        runs_high = (bits >> ids.long()) & 1 == 1
        assert torch.equal(run(**given, mask=mask), torch.where(runs_high, high, low))


# ---- experts that live elsewhere ---------------------------------------------------------------


@pytest.mark.parametrize("int8", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_two_halves_add_up(int8: bool, dev: torch.device) -> None:
    """Weights of absent experts are not there; a token may have none of its experts here."""
    given = operands(dev, 30, torch.float32, int8=int8)
    whole = run(**given)
    parts = []
    for here in ([4, 0, 1], [2, 5, 3]):  # which experts of the router, in the order of weights
        table = torch.full((E,), -1, dtype=torch.int32, device=dev)
        table[here] = torch.arange(3, dtype=torch.int32, device=dev)
        part = {
            n: v[here].contiguous() if n.startswith(("gate_up", "down")) else v
            for n, v in given.items()
        }
        parts.append(run(**part, expert_map=table))
        assert_right(parts[-1], {**part, "expert_map": table})
    idle = [(part == 0).all(1) for part in parts]
    assert any(bool(rows.any()) for rows in idle)
    assert_close(parts[0] + parts[1], whole, what="the sum", factor=2)


def test_no_expert_is_here(dev: torch.device) -> None:
    given = operands(dev)
    table = torch.full((E,), -1, dtype=torch.int32, device=dev)
    for name in ("gate_up_weight", "down_weight"):
        given[name] = torch.full_like(given[name], math.nan)
    assert not run(**given, expert_map=table).any()


# ---- chunks ------------------------------------------------------------------------------------


@pytest.mark.parametrize("int8", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_every_chunk_size_gives_the_same_bits(int8: bool, dev: torch.device) -> None:
    given = operands(dev, int8=int8)
    ids = torch.empty(T, TOP_K, dtype=torch.int32, device=dev)
    with one_config():
        whole = run(**given, topk_ids_out=ids)
        for chunk in (1, 5, T - 1, 1000):
            again = torch.empty_like(ids)
            assert torch.equal(run(**given, chunk_tokens=chunk, topk_ids_out=again), whole), chunk
            assert torch.equal(again, ids)


def test_a_token_does_not_depend_on_the_others(dev: torch.device) -> None:
    given = operands(dev)
    with one_config():
        whole = run(**given)
        for t in (0, T - 1):
            one = {n: v[t : t + 1] if n in ("x", "router_logits") else v for n, v in given.items()}
            assert torch.equal(run(**one), whole[t : t + 1])


def test_chunks_are_bounded() -> None:
    """Of Qwen3-30B-A3B: 512 MiB of h and y; a wide layer still gets 256 tokens."""
    tokens = chunk_of(8, 2048, 768, torch.bfloat16)
    assert tokens * 8 * (2048 + 768) * 2 <= 512 << 20 < (tokens + 1) * 8 * (2048 + 768) * 2
    assert chunk_of(64, 16384, 65536, torch.float32) == 256


def test_a_long_prompt_goes_in_chunks(dev: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """No more than the asked number of tokens has rows at a time."""
    seen: list[int] = []
    original = tkernels.moe.moe_dispatch

    def noting(ids: torch.Tensor, **more: Any) -> Any:
        seen.append(len(ids))
        return original(ids, **more)

    monkeypatch.setattr(tkernels.moe, "moe_dispatch", noting)
    given = operands(dev)
    run(**given, chunk_tokens=5)
    run(**given)
    assert seen == [5, 5, 3, T]


# ---- what is written, and bad numbers ----------------------------------------------------------


@pytest.mark.parametrize("chunk", [None, 4])
def test_results_are_written_and_nothing_else(chunk: int | None, dev: torch.device) -> None:
    given = operands(dev)
    out = guarded(torch.full((T, H), 77.0, device=dev).half())
    ids = guarded(torch.full((T, TOP_K), 77, dtype=torch.int32, device=dev))
    padded = {n: guarded(given[n]) for n in ("x", "router_logits")}
    inputs = {**given, **{n: g.tensor for n, g in padded.items()}}
    got = run(**inputs, out=out.tensor, topk_ids_out=ids.tensor, chunk_tokens=chunk)
    assert got is out.tensor
    assert_right(got, given)
    for name, band in {**padded, "out": out, "topk_ids_out": ids}.items():
        band.check(name)
    for name, band in padded.items():
        assert torch.equal(band.tensor, given[name])


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_bad_token_stays_alone(value: float, int8: bool, dev: torch.device) -> None:
    given = operands(dev, int8=int8)
    before = run(**given)
    given["x"][5, 3] = value
    got = run(**given)
    others = [t for t in range(T) if t != 5]
    assert torch.equal(got[others], before[others])
    assert not got[5].isfinite().all()


def test_weights_of_unchosen_experts_are_not_read(dev: torch.device) -> None:
    given = operands(dev, 1)
    ids = torch.empty(1, TOP_K, dtype=torch.int32, device=dev)
    expected = run(**given, topk_ids_out=ids)
    idle = [e for e in range(E) if e not in ids[0].tolist()]
    given["gate_up_weight"][idle] = given["down_weight"][idle] = math.nan
    assert torch.equal(run(**given), expected)


# ---- compiled, captured ------------------------------------------------------------------------


@pytest.mark.parametrize("int8", [pytest.param(False, marks=pytest.mark.slow), True])
def test_traces_without_a_break(int8: bool, dev: torch.device) -> None:
    given = operands(dev, int8=int8)
    eager = tkernels.fused_moe(**given)
    compiled = torch.compile(
        lambda kwargs: tkernels.fused_moe(**kwargs), fullgraph=True, backend="aot_eager"
    )
    assert torch.equal(compiled(given), eager)
    out, ids = torch.zeros_like(eager), torch.zeros(T, TOP_K, dtype=torch.int32, device=dev)
    more = {"out": out, "topk_ids_out": ids, "chunk_tokens": 5}
    got = compiled({**given, **more})
    assert torch.equal(got, tkernels.fused_moe(**given, chunk_tokens=5))
    assert torch.equal(out, got)
    expected = torch.empty_like(ids)
    tkernels.fused_moe(**given, topk_ids_out=expected)
    assert torch.equal(ids, expected)
    torch._dynamo.reset()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [{}, {"int8": True}, {"four": (128, 64)}], ids=str)
@pytest.mark.parametrize(("tokens", "chunk"), [(1, None), (40, None), (300, 128), (2000, None)])
def test_a_captured_graph_serves_any_routing(
    tokens: int, chunk: int | None, kind: dict[str, Any], dev: torch.device
) -> None:
    given = operands(dev, tokens, torch.bfloat16, experts=20, hidden=256, intermediate=128, **kind)
    given |= {"chunk_tokens": chunk}
    tkernels.fused_moe(**given)
    graph = device.new_graph()
    with device.capture(graph):
        got = tkernels.fused_moe(**given)
    for i in range(5):
        logits = torch.randn_like(given["router_logits"])
        if i == 3:  # all tokens on the same experts
            logits[:] = logits[:1]
        given["router_logits"].copy_(logits)
        given["x"].copy_(torch.randn_like(given["x"]))
        graph.replay()
        device.synchronize()
        assert torch.equal(got, tkernels.fused_moe(**given))
        assert_right(got, given)


# ---- refusals ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"x": None}, "fused_moe: x must be a tensor, got None"),
        ({"x": torch.zeros(T)}, r"fused_moe: x must have shape \[T, H\], got float32 \[13\]"),
        ({"x": torch.zeros(T, 8, dtype=torch.int32)}, "fused_moe: x must be .*, got int32"),
        ({"x": torch.zeros(T, 16)[:, ::2]}, "fused_moe: x must be contiguous in its last"),
        ({"router_logits": torch.zeros(T + 1, E)}, r"fused_moe: router_logits must have shape \[T"),
        ({"router_logits": torch.zeros(T, 8)}, "fused_moe: router_logits must have E=6 columns wi"),
        ({"gate_up_weight": torch.zeros(E, 47, H).half()}, r"fused_moe: gate_up_weight must have "),
        ({"gate_up_weight": torch.zeros(E, 48, H + 1).half()}, "fused_moe: gate_up_weight must ha"),
        ({"gate_up_weight": torch.zeros(E, 48, H)}, "moe_gemm: weight must be float16 or int8, go"),
        ({"down_weight": torch.zeros(E, H, WIDE + 1).half()}, "fused_moe: down_weight must have s"),
        ({"down_weight": torch.zeros(E - 1, H, WIDE).half()}, "fused_moe: down_weight must have s"),
        ({"top_k": 0}, r"fused_moe: top_k must be an int from 1 on, got 0"),
        ({"top_k": "2"}, "fused_moe: top_k must be an int from 1 on, got '2'"),
        ({"top_k": E + 1}, "moe_route: top_k must be "),
        ({"score": "tanh"}, "moe_route: score must be "),
        ({"mask": torch.zeros(1).long()}, "fused_moe: mask must be None without int8 weights, got"),
        ({"high": True}, "fused_moe: high must be False without int8 weights, got True"),
        ({"high": 1}, "fused_moe: high must be a bool, got 1"),
        ({"gate_up_scale": torch.zeros(E, 2 * WIDE)}, "moe_gemm: weight_scale must be given with "),
        ({"gate_up_zero": torch.zeros(E, 48, 1).char()}, "fused_moe: gate_up_zero must be None wi"),
        ({"chunk_tokens": 0}, "fused_moe: chunk_tokens must be None or an int from 1 on, got 0"),
        ({"chunk_tokens": 2.0}, r"fused_moe: chunk_tokens must be None or an int from 1 on, got 2"),
        ({"out": torch.zeros(T + 1, H).half()}, r"fused_moe: out must have shape \[T=13, H=32\], "),
        ({"out": torch.zeros(T, H)}, "fused_moe: out must be float16, got float32"),
        ({"out": torch.zeros(1, H).half().expand(T, H)}, "fused_moe: out must "),
        ({"topk_ids_out": torch.zeros(T, 3).int()}, "moe_route: topk_ids must have shape "),
        ({"expert_map": torch.zeros(5).int()}, "moe_dispatch: expert_map must have shape "),
    ],
)  # fmt: skip
def test_refusals(changes: dict[str, Any], words: str, dev: torch.device) -> None:
    given = operands(dev)
    moved = {n: v.to(dev) if isinstance(v, torch.Tensor) else v for n, v in changes.items()}
    if isinstance(out := moved.get("out"), torch.Tensor):
        out.zero_()
    with pytest.raises((ValueError, TypeError), match=rf"^{words}") as caught:
        tkernels.fused_moe(**{**given, **moved})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"mask": torch.zeros(1).long()}, "fused_moe: mask must be None with weights of 4 bits, "),
        ({"high": True}, "fused_moe: high must be False with weights of 4 bits, got True"),
        ({"down_scale": None}, "fused_moe: down_scale must be given with weights of 4 bits, got N"),
        ({"gate_up_weight": torch.zeros(E, 64, 7).int()}, r"fused_moe: gate_up_.* \[.*, H/8=8\], "),
        ({"down_weight": torch.zeros(E, 64, 5).int()}, r"fused_moe: down_weigh.* \[.*, I/8=4\], "),
        ({"down_weight": torch.zeros(E, 64, 32).half(), "down_scale": None},
         "fused_moe: down_zero must be None without weights of 4 bits, got int8"),
        ({"gate_up_scale": torch.zeros(E, 64, 4)}, r"fused_moe: \w+_scale must have shape "),
        ({"x": torch.zeros(T, 64)}, "fused_moe: x must be bfloat16 or float16, got float32"),
        ({"x": torch.zeros(0, 64), "router_logits": torch.zeros(0, E)}, "fused_moe: x must be bf"),
        ({"down_zero": torch.zeros(E, 64, 3).char()}, "fused_moe: down_zero must have shape "),
        ({"down_zero": torch.zeros(E, 64, 1)}, "fused_moe: down_zero must be int8, got float32"),
    ],
)  # fmt: skip
def test_refusals_of_4_bits(changes: dict[str, Any], words: str, dev: torch.device) -> None:
    given = operands(dev, **FOUR, four=(32, 32), zero=True)
    moved = {n: v.to(dev) if isinstance(v, torch.Tensor) else v for n, v in changes.items()}
    with pytest.raises((ValueError, TypeError), match=rf"^{words}") as caught:
        tkernels.fused_moe(**{**given, **moved})
    assert "\n" not in str(caught.value)


def test_the_reference_has_the_same_signature() -> None:
    public, reference = (
        inspect.signature(f) for f in (tkernels.fused_moe, tkernels.reference.fused_moe)
    )
    assert public == reference
