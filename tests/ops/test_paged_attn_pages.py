"""paged_attn: where its pages and rows lie in memory, what it reads of them, and in which order."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import pytest
import torch

import tkernels
from tkernels import device
from tkernels.attention_cases import paged_problem
from tkernels.ops.paged_attn import SPEC
from tkernels.registry import Config
from tkernels.testing import assert_close, assert_right, guarded, tensors_of

pytestmark = pytest.mark.thin(2)

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
NOBODY = 2**31 - 1  # a block number that no pool has
FACTS = device.current()


def dealt_to(splits: int, **more: Any) -> Config:
    """A config that deals the keys of a sequence out to ``splits`` programs, 16 at a time."""
    default = SPEC.default_config(paged_problem([1], "2/1x16", FP32), FACTS)
    return {**default, "BLOCK_N": 16, "SPLITS": splits, "MIN_SHARE": 16, **more}


def run(inputs: dict[str, Any], **more: Any) -> tuple[torch.Tensor, ...]:
    return tensors_of(tkernels.paged_attn(**inputs, **more))


def numbers(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device.tensor_device())


# ---- memory ----------------------------------------------------------------------------------


def head_major(cache: torch.Tensor) -> torch.Tensor:
    return cache.transpose(1, 2).contiguous().transpose(1, 2)


def slots_outside(cache: torch.Tensor) -> torch.Tensor:
    """[block_size, num_blocks, ...] in memory."""
    return cache.transpose(0, 1).contiguous().transpose(0, 1)


def padded(cache: torch.Tensor) -> torch.Tensor:
    """NaN in front of, between and behind all rows."""
    return guarded(cache, padding=8).tensor


@pytest.mark.parametrize("for_v", [head_major, slots_outside, padded])
@pytest.mark.parametrize("for_k", [head_major, slots_outside, padded])
def test_layouts(for_k: Any, for_v: Any, dev: torch.device) -> None:
    """The same bits from any strides, K's and V's alike or not; q a part of a packed qkv."""
    for q_lens in (None, (3, 9)):
        inputs = SPEC.make_inputs(paged_problem([30, 40], "4/2x16", BF16, q_lens=q_lens), dev)
        expected = run(inputs)[0]
        packed = torch.full((len(inputs["q"]), 8, 16), math.nan, dtype=BF16, device=dev)
        packed[:, 2:6] = inputs["q"]
        other = {
            "q": packed[:, 2:6],
            "k_cache": for_k(inputs["k_cache"]),
            "v_cache": for_v(inputs["v_cache"]),
        }
        assert torch.equal(run({**inputs, **other})[0], expected)


@pytest.mark.parametrize("block_n", [16, 32, 128])
def test_neighbours_of_the_pool_are_not_touched(block_n: int, dev: torch.device) -> None:
    """A pool in the middle of a larger tensor; steps of one block, of some, and of all."""
    plain = SPEC.make_inputs(paged_problem([33, 1, 16], "3/1x24", FP32), dev)
    pools = {name: guarded(plain[name], padding=8) for name in ("k_cache", "v_cache")}
    out = guarded(torch.zeros_like(plain["q"]))
    inputs = {**plain, **{name: g.tensor for name, g in pools.items()}}
    run(inputs, out=out.tensor, config=dealt_to(2, BLOCK_N=block_n))
    assert_right(SPEC, plain, (out.tensor,))
    for name, g in {**pools, "out": out}.items():
        g.check(name)


def test_offsets_past_2_31_elements(dev: torch.device) -> None:
    """Blocks, rows of q and of out lie 2^30 elements apart. Few pages of memory are touched."""
    if dev.type != "cpu":
        pytest.skip("a pool of this size is really allocated on a device: test_paged_attn.py")
    stride = 2**30
    memory = torch.empty(3 * stride + 16384, dtype=FP16)
    plain = SPEC.make_inputs(paged_problem([40, 20, 3], "2/1x16", FP16, poison=False), dev)
    plain["block_table"] = numbers(2, 0, 1, 1, 2, NOBODY, 3, NOBODY, NOBODY).view(3, 3)
    plain["k_cache"], plain["v_cache"] = torch.randn(2, 4, 16, 1, 16).half()

    def far(value: torch.Tensor, place: int) -> torch.Tensor:
        strides = (stride, *value[0].contiguous().stride())
        return memory.as_strided(value.shape, strides, place).copy_(value)

    inputs = {
        **plain,
        "k_cache": far(plain["k_cache"], 0),
        "v_cache": far(plain["v_cache"], 4096),
        "q": far(plain["q"], 8192),
    }
    out = far(torch.zeros(3, 2, 16, dtype=FP16), 12288)
    run(inputs, out=out)
    assert_right(SPEC, plain, (out,))


def test_columns_out_of_sight_say_anything(dev: torch.device) -> None:
    """Behind the length and before the window: blocks may be freed, their numbers anything."""
    lengths = (100, 7, 64)
    problem = paged_problem(lengths, "2/1x16", FP32, window=20, max_context=200)
    inputs = SPEC.make_inputs(problem, dev)
    for b, n in enumerate(lengths):
        inputs["block_table"][b, : max(0, n - 20) // 16] = -NOBODY
        inputs["block_table"][b, device.cdiv(n, 16) :] = -1
    for splits, block_n in ((1, 16), (3, 16), (1, 64)):
        config = dealt_to(splits, BLOCK_N=block_n)
        assert_right(SPEC, inputs, run(inputs, config=config))


# ---- meaning ---------------------------------------------------------------------------------


def test_lse_is_natural_and_holds_the_sink_once(dev: torch.device) -> None:
    """All keys alike: the softmax is known without computing it."""
    inputs = SPEC.make_inputs(paged_problem([20], "2/1x16", FP32, sinks=True, lse=True), dev)
    inputs["k_cache"].fill_(0.5)
    inputs["v_cache"].fill_(3.0)
    inputs["q"].fill_(1.0)
    inputs["sinks"] = torch.tensor([-1.0, 4.0], device=dev)
    for config in (dealt_to(1), dealt_to(2)):
        out, lse = run(inputs, scale=0.25, config=config)
        for head, sink in enumerate((-1.0, 4.0)):
            keys = 20 * math.exp(0.25 * 8.0)
            total = keys + math.exp(sink)
            assert float(lse[0, head]) == pytest.approx(math.log(total), rel=1e-6)
            assert float(out[0, head, 0]) == pytest.approx(3.0 * keys / total, rel=1e-6)


def test_nan_in_sight_is_not_hidden(dev: torch.device) -> None:
    inputs = SPEC.make_inputs(paged_problem([20, 20], "2/1x16", FP32), dev)
    inputs["k_cache"][inputs["block_table"][0, 1].long(), 2] = math.nan
    for splits in (1, 2):
        out = run(inputs, config=dealt_to(splits))[0]
        assert bool(out[0].isnan().all())
        assert bool(out[1].isfinite().all())


def test_tokens_before_the_first_key_see_nothing(dev: torch.device) -> None:
    """The last token stands at the last key, however many there are."""
    inputs = SPEC.make_inputs(paged_problem([2, 0], "2/1x16", FP32, q_lens=[5, 3], lse=True), dev)
    for splits in (1, 2):
        out, lse = run(inputs, config=dealt_to(splits))
        assert_right(SPEC, inputs, (out, lse))
        blind = [0, 1, 2, 5, 6, 7]
        assert not out[blind].any()
        assert bool((lse[blind] == -math.inf).all())


def test_whole_sequence_is_the_merge_of_its_parts(dev: torch.device) -> None:
    """Cascade: a prefix of 48 tokens on its own, the rest on its own, merged by their lse."""
    inputs = SPEC.make_inputs(paged_problem([100], "4/2x32", FP32, lse=True), dev)
    whole = run(inputs)
    parts: list[torch.Tensor] = []
    for blocks, length in ((slice(0, 3), 48), (slice(3, 7), 52)):
        part = {"block_table": inputs["block_table"][:, blocks], "context_lens": numbers(length)}
        parts += run({**inputs, **part})
    for got, expected, name in zip(
        tkernels.merge_attn_states(*parts), whole, ("out", "lse"), strict=True
    ):
        assert_close(got, expected, what=name)


def test_one_token_either_way(dev: torch.device) -> None:
    """Decode steps may be written with cu_seqlens_q, with room for more tokens."""
    inputs = SPEC.make_inputs(paged_problem([5, 0, 40], "4/2x16", FP32, lse=True), dev)
    expected = run(inputs)
    for most in (1, 9):
        got = run({**inputs, "cu_seqlens_q": numbers(0, 1, 2, 3), "max_seqlen_q": most})
        for a, b, name in zip(got, expected, ("out", "lse"), strict=True):
            assert_close(a, b, what=name)


@pytest.mark.parametrize("seed", range(8))
def test_random_problems_and_configs(seed: int, dev: torch.device) -> None:
    """5 legal configs in the interpreter, 25 on a device, each on a problem of its own."""
    rng = random.Random(seed)
    small = dev.type == "cpu"
    dims = (16, 24, 32) if small else (64, 80, 96, 128, 192, 256)
    lengths = (0, 1, 15, 16, 17, 31, 33, 65) if small else (0, 1, 17, 63, 64, 130, 1000)
    groups = (1, 2, 5, 7) if small else (1, 2, 4, 5, 6, 7, 8, 16, 24)
    space = SPEC.space(FACTS)
    if small:  # a program without a share takes a millisecond there
        space["SPLITS"] = [n for n in space["SPLITS"] if n <= 6]
    for _ in range(5 if small else 25):
        contexts = [rng.choice(lengths) for _ in range(rng.choice((1, 2)))]
        most = rng.choice((1, 9))
        q_lens = [rng.randint(0, min(n, most)) for n in contexts] if rng.random() < 0.5 else None
        kv_heads = rng.choice((1, 2))
        heads = f"{kv_heads * rng.choice(groups)}/{kv_heads}x{rng.choice(dims)}"
        problem = paged_problem(
            contexts,
            heads,
            rng.choice((FP32, BF16, FP16)),
            q_lens=q_lens,
            block_size=rng.choice((16, 32, 64, 128)),
            max_context=rng.choice((0, 100)),
            window=rng.choice((None, None, 1, 16, 40)),
            softcap=rng.choice((None, None, 5.0)),
            sinks=rng.random() < 0.4,
            lse=rng.random() < 0.5,
        )
        config: Config = {}
        while not config or SPEC.why_illegal(config, problem, FACTS) is not None:
            config = {name: rng.choice(values) for name, values in space.items()}
        inputs = SPEC.make_inputs(problem, dev)
        try:
            assert_right(SPEC, inputs, run(inputs, config=config))
        except AssertionError as error:
            raise AssertionError(f"{problem} with {config}: {error}") from None


# ---- order, on a GPU -------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("splits", [1, 8])
def test_it_waits_for_what_was_launched_before(splits: int, dev: torch.device) -> None:
    """Lengths, table, q and caches are written by the kernels right before: no kernel that starts
    early (PDL) may see the old ones."""
    problem = paged_problem([512] * 8, "8/2x128", BF16, poison=False)
    new = SPEC.make_inputs(problem, dev)
    names = ("q", "k_cache", "v_cache", "block_table", "context_lens")
    old = {**new, **{n: torch.zeros_like(new[n]) for n in names}}
    default = SPEC.default_config(problem, FACTS)
    config = {**default, "SPLITS": splits, "MIN_SHARE": 64}
    expected = run(new, config=config)[0]
    for order in itertools.permutations(names):
        for n in names:
            old[n].zero_()
        run(old, config=config)
        for n in order:
            old[n].copy_(new[n])
        assert torch.equal(run(old, config=config)[0], expected), f"written last: {order[-1]}"


@pytest.mark.gpu
def test_calls_in_a_row_do_not_mix(dev: torch.device) -> None:
    """Each call's partial results live in memory that the next call's may reuse."""
    problem = paged_problem([700, 3000], "8/2x128", BF16, poison=False)
    sets = []
    for seed in range(8):
        inputs = SPEC.make_inputs(problem, dev)
        inputs["q"] = torch.roll(inputs["q"], seed, -1)
        sets.append(inputs)
    config = {**SPEC.default_config(problem, FACTS), "SPLITS": 16, "MIN_SHARE": 64}
    expected = []
    for inputs in sets:
        expected.append(run(inputs, config=config)[0])
        device.synchronize()
    outs = [torch.empty_like(inputs["q"]) for inputs in sets]
    graph = device.new_graph()
    with device.capture(graph):
        for inputs, out in zip(sets, outs, strict=True):
            run(inputs, out=out, config=config)
    for _ in range(20):
        graph.replay()
    device.synchronize()
    for got, want in zip(outs, expected, strict=True):
        assert torch.equal(got, want)
