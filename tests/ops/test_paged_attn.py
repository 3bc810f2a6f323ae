"""What is special to paged_attn: lengths at block edges, splits, tables, poison, graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tkernels
from tkernels import device
from tkernels.attention_cases import paged_problem
from tkernels.ops.paged_attn import SPEC, _default_splits
from tkernels.registry import Config
from tkernels.testing import assert_close, assert_right, clone_inputs, guarded, tensors_of

pytestmark = pytest.mark.thin(2)

BF16, FP32 = torch.bfloat16, torch.float32
EDGES = (0, 1, 15, 16, 17, 33)  # none, one, a block less one, a block, a block and one, ...


def config_for(problem: dict[str, Any], **changes: Any) -> Config:
    """The default with ``changes``, those that this device has no key for left out."""
    default = SPEC.default_config(problem, device.current())
    chosen = {**default, **{n: v for n, v in changes.items() if n in default}}
    why = SPEC.why_illegal(chosen, problem, device.current())
    assert why is None, why
    return chosen


def call(inputs: dict[str, Any], **more: Any) -> tuple[torch.Tensor, ...]:
    return tensors_of(tkernels.paged_attn(**inputs, **more))


def assert_same_bits(a: tuple[torch.Tensor, ...], b: tuple[torch.Tensor, ...]) -> None:
    assert len(a) == len(b)
    for x, y in zip(a, b, strict=True):
        assert torch.equal(x, y)


# ---- splits ----------------------------------------------------------------------------------


@pytest.mark.parametrize("splits", [1, 2, 3, 8, 64])
def test_every_split_count(splits: int, dev: torch.device) -> None:
    """More splits than blocks leave some empty; a length of 0 leaves all of them empty."""
    problem = paged_problem((0, 1, 16, 17, 130), "2/1x16", BF16, sinks=True, lse=True)
    inputs = SPEC.make_inputs(problem, dev)
    chosen = config_for(problem, SPLITS=splits, MIN_SHARE=16, BLOCK_N=16)
    assert_right(SPEC, inputs, call(inputs, config=chosen))


@pytest.mark.parametrize("n", [1, 16])
def test_splits_of_several_tokens(n: int, dev: torch.device) -> None:
    problem = paged_problem((70, 16), "3/1x16", FP32, q_lens=(n, n), lse=True)
    inputs = SPEC.make_inputs(problem, dev)
    chosen = config_for(problem, SPLITS=4, MIN_SHARE=16, BLOCK_N=16)
    assert_right(SPEC, inputs, call(inputs, config=chosen))


@pytest.mark.parametrize("block_n", [16, 32, 64])
@pytest.mark.parametrize("window", [None, 20])
def test_steps_of_less_and_more_than_a_block(
    window: int | None, block_n: int, dev: torch.device
) -> None:
    problem = paged_problem((*EDGES, 70), "2/1x16", FP32, block_size=32, window=window)
    inputs = SPEC.make_inputs(problem, dev)
    chosen = config_for(problem, SPLITS=2, MIN_SHARE=32, BLOCK_N=block_n)
    assert_right(SPEC, inputs, call(inputs, config=chosen))


def test_split_count_follows_from_shapes() -> None:
    """Few tiles are split, more than the cores are not; there is no argument for lengths."""
    assert _default_splits(8, 4096, 132) == (32, 64)
    assert _default_splits(8, 128, 132) == (2, 64)  # no share of less than 64 keys
    assert _default_splits(128, 4096, 132)[0] == 1
    assert _default_splits(512, 4096, 132)[0] == 1
    assert _default_splits(512, 8192, 132)[0] == 4  # long tables may hold short sequences
    assert _default_splits(5000, 8192, 132)[0] == 1
    names = set(SPEC.problem_fields)
    assert not names & {"contexts", "q_lens"}


# ---- lengths and poison ----------------------------------------------------------------------


def test_padding_gives_zeros(dev: torch.device) -> None:
    problem = paged_problem((0, 17, 0), "2/1x16", BF16, lse=True)
    inputs = SPEC.make_inputs(problem, dev)
    out, lse = call(inputs, out=torch.full_like(inputs["q"], 7.0))
    for b in (0, 2):
        assert not out[b].any()
        assert (lse[b] == -torch.inf).all()
    assert out[1].isfinite().all()


def test_inputs_are_poisoned(dev: torch.device) -> None:
    """What the other tests stand on: all that is out of sight is NaN, or no block at all."""
    problem = paged_problem((5, 0, 40), "2/1x16", BF16, window=10, max_context=64)
    inputs = SPEC.make_inputs(problem, dev)
    table = inputs["block_table"].tolist()
    assert [sum(0 <= n < len(inputs["k_cache"]) for n in row) for row in table] == [1, 0, 3]
    for cache in (inputs["k_cache"], inputs["v_cache"]):
        seen = ~cache.isnan().any((2, 3))
        assert int(seen.sum()) == 5 + 10
        assert seen[table[0][0], :5].all()
        assert not seen[table[2][0]].any()  # wholly before the window
        assert seen[table[2][1], 14:].all()


@pytest.mark.parametrize("block_size", [16, 32, 64, 128])
def test_block_sizes_and_guard_bands(block_size: int, dev: torch.device) -> None:
    lengths = (1, block_size - 1, block_size, block_size + 1)
    problem = paged_problem(lengths, "2/1x16", BF16, block_size=block_size)
    inputs = SPEC.make_inputs(problem, dev)
    out = guarded(torch.full_like(inputs["q"], 7.0))
    assert_right(SPEC, inputs, call(inputs, out=out.tensor))
    out.check("out")


def test_tokens_that_no_sequence_has_are_left_alone(dev: torch.device) -> None:
    """q and out may be longer than cu_seqlens_q says: a captured graph's are."""
    problem = paged_problem((20, 9), "2/1x16", BF16, q_lens=(3, 1))
    inputs = SPEC.make_inputs(problem, dev)
    padded = {**inputs, "q": torch.cat([inputs["q"], torch.full_like(inputs["q"], torch.nan)])}
    (out,) = call(padded, out=torch.full_like(padded["q"], 7.0))
    assert_same_bits((out[:4],), call(inputs))
    assert (out[4:] == 7.0).all()


@pytest.mark.parametrize("softcap", [1e-3, 30.0])
def test_large_logits_under_a_softcap(softcap: float, dev: torch.device) -> None:
    """exp of a score overflows; tanh of it is 1."""
    problem = paged_problem((33, 5), "2/1x16", FP32, softcap=softcap, lse=True)
    inputs = SPEC.make_inputs(problem, dev)
    inputs["q"] *= 1e4
    assert_right(SPEC, inputs, call(inputs))


def test_large_logits_without_a_softcap(dev: torch.device) -> None:
    inputs = SPEC.make_inputs(paged_problem((33, 5), "2/1x16", BF16), dev)
    inputs["q"] *= 100
    out = call(inputs)[0]
    assert out.isfinite().all()
    assert_right(SPEC, inputs, (out,))


# ---- tables and layouts ----------------------------------------------------------------------


def test_shared_blocks(dev: torch.device) -> None:
    """Two sequences with one prefix may have it in the same blocks."""
    inputs = SPEC.make_inputs(paged_problem((40, 40), "2/1x16", BF16), dev)
    table = inputs["block_table"]
    for cache in (inputs["k_cache"], inputs["v_cache"]):
        cache[table[1, :2].long()] = cache[table[0, :2].long()]
    apart = call(inputs)
    table[1, :2] = table[0, :2]
    assert_same_bits(call(inputs), apart)
    assert_right(SPEC, inputs, apart)


def test_permuted_pool(dev: torch.device) -> None:
    """[num_blocks, num_kv_heads, block_size, head_dim] as a view; k and v laid out differently."""
    inputs = SPEC.make_inputs(paged_problem(EDGES, "4/2x16", BF16), dev)
    expected = call(inputs)
    for name in ("k_cache", "v_cache"):
        inputs[name] = inputs[name].transpose(1, 2).contiguous().transpose(1, 2)
        assert_same_bits(call(inputs), expected)
    both = torch.stack([inputs["k_cache"], inputs["v_cache"]], 1)
    assert_same_bits(call({**inputs, "k_cache": both[:, 0], "v_cache": both[:, 1]}), expected)


# ---- same results ----------------------------------------------------------------------------


def test_chunked_equals_whole(dev: torch.device) -> None:
    """Tokens one by one, in chunks, or all at once."""
    problem = paged_problem((37,), "4/2x16", FP32, q_lens=(37,), window=20, lse=True)
    inputs = SPEC.make_inputs(problem, dev)
    # The window's poison is that of the last chunk only, if the first chunk begins at 0.
    whole = call(inputs)
    for step in (1, 16, 30):
        for start in range(0, 37, step):
            n = min(step, 37 - start)
            piece = {**inputs, "q": inputs["q"][start : start + n]}
            piece["context_lens"] = torch.full_like(inputs["context_lens"], start + n)
            piece["cu_seqlens_q"] = inputs["cu_seqlens_q"].clone()
            piece["cu_seqlens_q"][1] = n
            piece["max_seqlen_q"] = n
            for got, all_of_it in zip(call(piece), whole, strict=True):
                assert_close(got, all_of_it[start : start + n], what=f"{n} tokens from {start}")


def test_equals_flash_attn(dev: torch.device) -> None:
    """A prompt in blocks is a prompt."""
    problem = paged_problem((37,), "4/2x16", FP32, q_lens=(37,), softcap=3.0, lse=True)
    inputs = SPEC.make_inputs(problem, dev)
    blocks = inputs["block_table"][0].long()
    k, v = (inputs[name][blocks].flatten(0, 1)[None, :37] for name in ("k_cache", "v_cache"))
    out, lse = tkernels.flash_attn(inputs["q"][None], k, v, softcap=3.0, return_lse=True)
    for got, same in zip(call(inputs), (out, lse), strict=True):
        assert_close(got, same[0], what="paged_attn")


def test_the_rest_of_the_batch_does_not_matter(dev: torch.device) -> None:
    problem = paged_problem((70, 3, 0, 40), "4/2x16", BF16, lse=True)
    inputs = SPEC.make_inputs(problem, dev)
    chosen = config_for(problem, SPLITS=3, MIN_SHARE=16, BLOCK_N=16)
    whole = call(inputs, config=chosen)
    for b in range(4):
        alone = {n: inputs[n][b : b + 1] for n in ("q", "block_table", "context_lens")}
        got = call({**inputs, **alone}, config=chosen)
        assert_same_bits(got, tuple(t[b : b + 1] for t in whole))


def test_same_bits_whoever_ends_first(dev: torch.device) -> None:
    problem = paged_problem((130, 70), "4/2x16", BF16, lse=True)
    inputs = SPEC.make_inputs(problem, dev)
    chosen = config_for(problem, SPLITS=8, MIN_SHARE=16, BLOCK_N=16)
    first = call(inputs, config=chosen)
    for _ in range(20 if device.KIND == "cuda" else 1):
        assert_same_bits(call(inputs, config=chosen), first)


# ---- arguments -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"max_seqlen_q": 2}, "max_seqlen_q must be 1 without cu_seqlens_q, got 2"),
        ({"max_seqlen_q": 1.0}, "max_seqlen_q must be an int >= 0, got 1.0"),
        (
            {"cu_seqlens_q": torch.tensor([0, 1, 2]).int()},
            "max_seqlen_q must be an int >= 0 with cu_seqlens_q, got None",
        ),
        ({"window": 0}, "window must be an int >= 1 or None, got 0"),
        ({"softcap": 0.0}, "softcap must be a number > 0, got 0.0"),
        ({"scale": -1.0}, "scale must be a number > 0, got -1.0"),
        ({"sinks": torch.zeros(3)}, r"sinks must have shape \[num_heads=2\], got float32 \[3\]"),
        ({"sinks": torch.zeros(2).double()}, r"sinks must be float32, got float64 \[2\]"),
        (
            {"cu_seqlens_q": torch.zeros(2).int(), "max_seqlen_q": 1},
            r"cu_seqlens_q must have shape \[batch \+ 1 = 3",
        ),
        (
            {"cu_seqlens_q": torch.zeros(3).long(), "max_seqlen_q": 1},
            r"cu_seqlens_q must be int32, got int64 \[3\]",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_refused(change: dict[str, Any], words: str, dev: torch.device) -> None:
    inputs = SPEC.make_inputs(paged_problem((5, 20), "2/1x16", BF16), dev)
    moved = {n: v.to(dev) if isinstance(v, torch.Tensor) else v for n, v in change.items()}
    with pytest.raises((TypeError, ValueError), match=f"^paged_attn: {words}"):
        tkernels.paged_attn(**{**inputs, **moved})


@pytest.mark.parametrize("block_size", [8, 24])
def test_odd_block_sizes_are_refused(block_size: int, dev: torch.device) -> None:
    inputs = SPEC.make_inputs(paged_problem((5,), "1/1x16", BF16, block_size=block_size), dev)
    with pytest.raises(ValueError, match="k_cache must have a block_size that is a power of two"):
        tkernels.paged_attn(**inputs)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"context_lens": [5, 99]}, "context_lens must be from 0 to 32, got 99 at 1"),
        ({"context_lens": [-1, 5]}, "context_lens must be from 0 to 32, got -1 at 0"),
        ({"block_table": [[9, 9], [0, 1]]}, "block_table must hold blocks from 0 to 4"),
        ({"cu_seqlens_q": [0, 2, 1]}, "cu_seqlens_q must rise from 0 on to at most 2 by at most"),
        ({"cu_seqlens_q": [0, 2, 2]}, "cu_seqlens_q must rise from 0 on to at most 2 by at most"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_values_are_checked_in_debug(
    change: dict[str, Any], words: str, dev: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tkernels.check.DEBUG", True)
    inputs = SPEC.make_inputs(paged_problem((5, 20), "1/1x16", BF16, q_lens=(1, 1)), dev)
    call(inputs)
    values = {n: torch.tensor(v, dtype=torch.int32, device=dev) for n, v in change.items()}
    with pytest.raises(ValueError, match=f"^paged_attn: {words}"):
        call({**inputs, **values})


# ---- on a GPU --------------------------------------------------------------------------------


@pytest.mark.gpu
def test_graph_serves_other_lengths(dev: torch.device) -> None:
    """Captured once, replayed with other lengths and tables in the same tensors."""
    most = paged_problem((2000, 1999, 3, 700), "8/2x128", BF16, lse=True, poison=False)
    inputs = SPEC.make_inputs(most, dev)
    call(inputs)
    graph = device.new_graph()
    with device.capture(graph):
        results = call(inputs)
    for lengths in ((2000, 1999, 3, 700), (1, 0, 2000, 16), (0, 0, 0, 0), (64, 65, 1000, 1)):
        other = paged_problem(lengths, "8/2x128", BF16, lse=True, max_context=2000, poison=False)
        made = SPEC.make_inputs(other, dev)
        inputs["q"].copy_(made["q"])
        inputs["context_lens"].copy_(made["context_lens"])
        inputs["block_table"].copy_(made["block_table"])
        for cache in ("k_cache", "v_cache"):
            inputs[cache][: len(made[cache])].copy_(made[cache])
        graph.replay()
        assert_right(SPEC, clone_inputs(inputs), results)


@pytest.mark.gpu
@pytest.mark.parametrize("q_lens", [None, 9], ids=["decode", "chunks"])
def test_the_rest_of_a_large_batch_does_not_matter(q_lens: int | None, dev: torch.device) -> None:
    """With as many splits: how many programs merge follows from how many results there are."""
    lengths = [(13 * i) % 900 + 9 for i in range(40)]
    each = None if q_lens is None else [q_lens] * 40
    problem = paged_problem(lengths, "8/2x128", BF16, lse=True, q_lens=each)
    inputs = SPEC.make_inputs(problem, dev)
    chosen = {**SPEC.default_config(problem, device.current()), "SPLITS": 8, "MIN_SHARE": 32}
    whole = call(inputs, config=chosen)
    count = q_lens or 1
    for b in (0, 7, 23):
        rows = slice(b * count, (b + 1) * count)
        alone = {n: inputs[n][b : b + 1] for n in ("block_table", "context_lens")}
        if q_lens is not None:
            alone["cu_seqlens_q"] = inputs["cu_seqlens_q"][:2]
        got = call({**inputs, **alone, "q": inputs["q"][rows]}, config=chosen)
        assert_same_bits(got, tuple(t[rows] for t in whole))


@pytest.mark.gpu
@pytest.mark.slow
def test_pool_past_two_to_the_31(dev: torch.device) -> None:
    """Blocks whose first element has a number that 32 bits cannot hold; 9 GiB."""
    block = 16 * 2 * 128
    num_blocks = 2**31 // block + 64
    problem = paged_problem((100, 40), "4/2x128", BF16, lse=True, poison=False)
    inputs = SPEC.make_inputs(problem, dev)
    expected = call(inputs)
    small = len(inputs["k_cache"])
    for name in ("k_cache", "v_cache"):
        pool = torch.empty(num_blocks, *inputs[name].shape[1:], dtype=BF16, device=dev)
        pool[-small:] = inputs[name]
        inputs[name] = pool
    inputs["block_table"] += num_blocks - small
    assert int(inputs["block_table"].min()) * block > 2**31
    assert_same_bits(call(inputs), expected)


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("exponent", [6, 13, 50])
def test_huge_scores(exponent: int, splits: int, dev: torch.device) -> None:
    """Scores beyond where fp32 tells their differences: a row's largest still has weight 1."""
    problem = paged_problem((90, 40), "4/2x16", BF16, q_lens=(9, 17), sinks=True, lse=True)
    inputs = SPEC.make_inputs(problem, dev)
    for name in ("q", "k_cache"):
        small = torch.randint(-8, 9, inputs[name].shape, device=dev)
        inputs[name] = small.to(BF16) * 2.0**exponent
    inputs["scale"] = 0.1
    inputs["sinks"] = torch.randn(4, device=dev) * 100 * 4.0**exponent
    chosen = config_for(problem, SPLITS=splits, MIN_SHARE=16, BLOCK_N=16, PEEL=True)
    out, lse = call(inputs, config=chosen)
    exact = {n: inputs[n].double() for n in ("q", "k_cache", "v_cache")}
    truth, truth_lse = SPEC.reference(**{**inputs, **exact})
    assert_close(out, truth, what="out")
    torch.testing.assert_close(lse.double(), truth_lse.double(), atol=1e-3, rtol=1e-6)
