"""paged_attn_quantized over caches of append_quantized_kv: residuals, pools, pages, poison.

The truth is paged_attn's reference over what dequantize_cache says that the caches hold.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

import tkernels
from tkernels import device
from tkernels.kv_format import (
    MODES,
    NO_SLOT,
    QuantizedKV,
    allocate_quantized,
    dequantize_cache,
    quantize_ref,
)
from tkernels.ops.paged_attn_quantized import SPEC
from tkernels.quantized_attention_cases import problem_of
from tkernels.registry import Config
from tkernels.testing import assert_close, assert_right, clone_inputs, guarded, tensors_of

pytestmark = pytest.mark.thin(3)

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
QUANTISED = MODES[1:]
SLOW_THERE = pytest.mark.slow if device.KIND == "cpu" else ()
WITH_RESIDUALS = ("int8_fp4", "int8_static_fp4")
NOBODY = 2**31 - 1  # a block number that no pool has
BLOCK = 16


# ---- caches ----------------------------------------------------------------------------------


@dataclasses.dataclass
class Sequences:
    """Some sequences, the last tokens of which attend; what the caches hold is ``k`` and ``v``."""

    args: dict[str, Any]
    k: torch.Tensor  # fp32 [num_blocks, block_size, heads, head_dim], NaN where nobody may look
    v: torch.Tensor

    @property
    def caches(self) -> tuple[QuantizedKV, QuantizedKV]:
        return self.args["k_cache"], self.args["v_cache"]

    def run(self, **more: Any) -> tuple[torch.Tensor, ...]:
        return tensors_of(tkernels.paged_attn_quantized(**{**self.args, **more}))

    def truth(self, **more: Any) -> tuple[torch.Tensor, ...]:
        args = {**self.args, "k_cache": self.k, "v_cache": self.v, **more}
        args["q"] = args["q"].float()
        return tensors_of(tkernels.reference.paged_attn(**args))

    def check(self, **more: Any) -> None:
        config = more.pop("config", None)
        pairs = zip(self.run(config=config, **more), self.truth(**more), strict=True)
        for (got, expected), name in zip(pairs, ("out", "lse"), strict=False):
            assert_close(got, expected, what=name)


def planted(tokens: int, heads: int, dim: int, seed: int) -> torch.Tensor:
    """A channel of every third vector is large, so that its others are rounded coarsely."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, heads, dim, generator=generator)
    x[torch.arange(tokens) % 3 == seed % 3, :, 5] = 40.0
    return x


def cache_for(
    x: torch.Tensor, num_blocks: int, mode: str, *, outliers: float, share: float, **more: Any
) -> QuantizedKV:
    """An empty one in which the share ``outliers`` of ``x`` will be outliers."""
    scale = None
    if "static" in mode:
        scale = x.abs().amax(0) / 127 if len(x) else torch.ones_like(x[:0].sum(0))
    if "fp4" in mode:
        most: Any = 2.0 * (outliers == 0) - 1.0  # all errors are from 0 to 1
        if 0 < outliers < 1 and len(x):
            most = quantize_ref(x, scale)[3].quantile(1 - outliers, 0)
        more = {"tau": most, "outlier_share": share, **more}
    _, heads, dim = x.shape
    return allocate_quantized(
        num_blocks, BLOCK, heads, dim, mode=mode, static_scale=scale, device=x.device, **more
    )


def sequences(
    dev: torch.device,
    contexts: Sequence[int],
    mode: str,
    dtype: torch.dtype = FP32,
    *,
    q_lens: Sequence[int] | None = None,
    heads: tuple[int, int] = (2, 1),
    dim: int = 32,
    outliers: float = 0.3,
    share: float = 1.0,
    shared_blocks: int = 0,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    poison: bool = True,
    ops: Any = tkernels.reference,
    **more: Any,
) -> Sequences:
    """Keys and values of all sequences, one after the other, appended in one call of ``ops``.

    All sequences have their first ``shared_blocks`` blocks in one place.
    """
    counts = [device.cdiv(n, BLOCK) for n in contexts]
    num_blocks = sum(counts) + 2
    generator = torch.Generator().manual_seed(3)
    free = torch.randperm(num_blocks, generator=generator).tolist()
    table = torch.full((len(counts), max([*counts, 1]) + 1), NOBODY, dtype=torch.int32)
    places: list[int] = []
    for b, (n, count) in enumerate(zip(contexts, counts, strict=True)):
        blocks = [int(table[0, i]) if b and i < shared_blocks else free.pop() for i in range(count)]
        table[b, :count] = torch.tensor(blocks, dtype=torch.int32)
        own = [blocks[p // BLOCK] * BLOCK + p % BLOCK for p in range(n)]
        places += [-1 if b and p < shared_blocks * BLOCK else place for p, place in enumerate(own)]
    n = len(places)
    k = planted(n, heads[1], dim, 0) if k is None else k
    v = planted(n, heads[1], dim, 1) if v is None else v
    k, v = k.to(dev, dtype), v.to(dev, dtype)
    k_cache, v_cache = (
        cache_for(x.float(), num_blocks, mode, outliers=outliers, share=share, **more)
        for x in (k, v)
    )
    if n:
        ops.append_quantized_kv(k, v, k_cache, v_cache, torch.tensor(places).to(dev))
    new = list(q_lens or [1] * len(contexts))
    q = torch.randn(sum(new), heads[0], dim, generator=generator)
    q[..., 5] = 0.0  # or the large channel alone would decide
    args: dict[str, Any] = {
        "q": q.to(dev, dtype),
        "k_cache": k_cache,
        "v_cache": v_cache,
        "block_table": table.to(dev),
        "context_lens": torch.tensor(contexts, dtype=torch.int32, device=dev),
    }
    if q_lens is not None:
        ends = torch.tensor([0, *new]).cumsum(0).int()
        args |= {"cu_seqlens_q": ends.to(dev), "max_seqlen_q": max(new)}
    used = torch.zeros(num_blocks * BLOCK, dtype=torch.bool, device=dev)
    used[[p for p in places if p >= 0]] = True
    exact = []
    for cache in (k_cache, v_cache):
        held = dequantize_cache(cache)
        held[~used.view(num_blocks, BLOCK)] = torch.nan
        exact.append(held)
        if poison:
            spoil(cache, ~used.view(num_blocks, BLOCK))
    return Sequences(args, *exact)


def spoil(cache: QuantizedKV, unused: torch.Tensor) -> None:
    """What no token has: NaN scales and exponents, and slots out of the pool."""
    cache.codes[unused] = -128
    by_head = unused[:, None, :].expand(-1, cache.codes.shape[2], -1)
    if not cache.is_static:
        cache.scale[by_head] = torch.nan
    if cache.slots is None:
        return
    assert cache.residual is not None
    assert cache.residual_scale is not None
    cache.slots[by_head] = 0x7FFE
    for head in range(cache.codes.shape[2]):
        slots = cache.slots[:, head][~unused].long() & 0xFFFF
        free = torch.ones(cache.residual.shape[1], dtype=torch.bool, device=unused.device)
        free[slots[slots != NO_SLOT & 0xFFFF]] = False
        cache.residual[head, free] = 0xFF
        cache.residual_scale[head, free] = 0xFF


def held(cache: QuantizedKV) -> int:
    """How many pool slots tokens have."""
    assert cache.free_count is not None
    assert cache.free_slots is not None
    return int((cache.free_slots.shape[1] - cache.free_count).sum())


def config_for(splits: int, outlier_splits: int, **more: Any) -> Config:
    """Keys dealt out 16 at a time, so that short sequences have splits too."""
    problem = problem_of([1], "2/1x32", FP32, "int8_fp4" if outlier_splits else "int8")
    default = SPEC.default_config(problem, device.current())
    chosen = {"SPLITS": splits, "OUTLIER_SPLITS": outlier_splits, "BLOCK_N": BLOCK}
    chosen |= {"MIN_SHARE": BLOCK, "CHUNK": BLOCK}
    return {**default, **chosen, **more}


def assert_same_bits(a: Sequence[torch.Tensor], b: Sequence[torch.Tensor]) -> None:
    assert len(a) == len(b)
    for x, y in zip(a, b, strict=True):
        assert torch.equal(x, y)


# ---- from append to attention ----------------------------------------------------------------


@pytest.mark.parametrize("q_lens", [None, (5, 0, 7)], ids=["decode", "chunk"])
@pytest.mark.parametrize(
    "dtype",
    [pytest.param(FP32, marks=SLOW_THERE), BF16, pytest.param(FP16, marks=SLOW_THERE)],
    ids=str,
)
@pytest.mark.parametrize("mode", QUANTISED)
def test_what_was_appended_is_attended_to(
    mode: str, dtype: torch.dtype, q_lens: Any, dev: torch.device
) -> None:
    s = sequences(dev, (20, 1, 7), mode, dtype, q_lens=q_lens, heads=(4, 2), ops=tkernels)
    if "fp4" in mode:
        assert all(8 < held(cache) < 28 for cache in s.caches)
    out, lse = s.run(return_lse=True)
    true_out, true_lse = s.truth(return_lse=True)
    assert_close(out, true_out, what="out")
    assert_close(lse, true_lse, what="lse")


@pytest.mark.parametrize("mode", WITH_RESIDUALS)
@pytest.mark.parametrize("which", ["k", "v"])
def test_residuals_of_each_cache_count_once(which: str, mode: str, dev: torch.device) -> None:
    """Neither left out nor added twice: both are far from what comes out."""
    s = sequences(dev, (37,), mode, poison=False)
    cache, exact = s.args[f"{which}_cache"], getattr(s, which)
    without = dequantize_cache(cache, residuals=False)
    out = s.run()[0]
    assert_close(out, s.truth()[0], what="residuals once")
    for wrong, what in ((without, "left out"), (2 * exact - without, "twice")):
        other = dataclasses.replace(s, **{which: wrong}).truth()[0]
        with pytest.raises(AssertionError, match="largest relative error"):
            assert_close(out, other, what=what, factor=50.0)


@pytest.mark.parametrize("residual_format", ["e1m2", "e2m1", "e3m0"])
@pytest.mark.parametrize("residual_block", [16, 32])
def test_formats_of_residuals(residual_block: int, residual_format: str, dev: torch.device) -> None:
    kinds = {"residual_block": residual_block, "residual_format": residual_format}
    sequences(dev, (20,), "int8_fp4", BF16, dim=64, **kinds).check()


@pytest.mark.parametrize("outliers", [0.0, 1.0])
@pytest.mark.parametrize("mode", WITH_RESIDUALS)
def test_no_outliers_and_only_outliers(mode: str, outliers: float, dev: torch.device) -> None:
    s = sequences(dev, (40, 3), mode, outliers=outliers)
    assert [held(cache) for cache in s.caches] == [43 * outliers] * 2
    s.check(return_lse=True)


def test_more_outliers_than_a_list_holds(dev: torch.device) -> None:
    s = sequences(dev, (70,), "int8_fp4", outliers=1.0)
    s.check(config=config_for(1, 1, CHUNK=64, LIST=16))


def test_residuals_that_a_full_pool_left_out(dev: torch.device) -> None:
    s = sequences(dev, (37,), "int8_fp4", outliers=1.0, share=5 / 80)
    for cache in s.caches:
        assert cache.dropped is not None
        assert cache.dropped.tolist() == [32]
        assert held(cache) == 5
    s.check()


# ---- unusual vectors -------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [FP32, FP16], ids=str)
@pytest.mark.parametrize("mode", QUANTISED)
def test_zero_constant_and_extreme_vectors(
    mode: str, dtype: torch.dtype, dev: torch.device
) -> None:
    """Static scales, which come from the same vectors, are then as far apart."""
    k, v = planted(20, 1, 32, 0), planted(20, 1, 32, 1)
    for x in (k, v):
        x[1], x[2], x[3], x[5:9] = 0.0, 3.0, -3.0, 0.0
        x[4], x[6, :, 1] = 6e-8, 6e-8  # subnormal in fp16
    v[7, :, 2], v[8], v[8, :, ::2] = 60000.0, 60000.0, -60000.0
    s = sequences(dev, (20,), mode, dtype, k=k, v=v)
    assert bool(s.run()[0].isfinite().all())
    s.check()


@pytest.mark.parametrize("mode", QUANTISED)
def test_scores_of_huge_keys(mode: str, dev: torch.device) -> None:
    """One key has all the weight, or none."""
    k = planted(20, 1, 32, 0)
    k[7], k[8] = 60000.0, -60000.0
    s = sequences(dev, (20,), mode, FP16, k=k)
    out = s.run()[0]
    assert bool(out.isfinite().all())
    assert_close(out, s.truth()[0], what="out")


@pytest.mark.parametrize("mode", ["int8", "int8_fp4"])
@pytest.mark.parametrize("which", ["k", "v"])
def test_a_vector_with_nan_spoils_its_own_sequence_alone(
    which: str, mode: str, dev: torch.device
) -> None:
    x = planted(40, 1, 32, 2)
    x[7, 0, 3] = torch.nan
    thresholds = {"tau": 0.0095} if "fp4" in mode else {}
    s = sequences(dev, (20, 20), mode, **{which: x}, **thresholds)
    out = s.run()[0]
    assert bool(out[0].isnan().all())
    assert_close(out[1], s.truth()[0][1], what="the other sequence")


# ---- pages -----------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", WITH_RESIDUALS)
def test_pages_used_again_have_no_old_residuals(mode: str, dev: torch.device) -> None:
    """A sequence of outliers ends, and one without any comes to its pages."""
    s = sequences(dev, (32,), mode, outliers=1.0, poison=False)
    blocks = s.args["block_table"][0, :2]
    for cache in s.caches:
        assert held(cache) == 32
        tkernels.release_residual_slots(cache.slots, cache.free_slots, cache.free_count, blocks)
        assert held(cache) == 0
        assert cache.tau is not None
        cache.tau.fill_(2.0)
        cache.residual_scale.fill_(0xFF)
    k, v = (x.flip(0).to(dev) for x in (planted(20, 1, 32, 0), planted(20, 1, 32, 1)))
    places = (blocks[:, None] * BLOCK + torch.arange(BLOCK, device=dev)).flatten()[:20].long()
    tkernels.append_quantized_kv(k, v, *s.caches, places)
    s.args["context_lens"].fill_(20)
    for x, cache, name in ((k, s.caches[0], "k"), (v, s.caches[1], "v")):
        codes, scale, _, _ = quantize_ref(x, cache.scale if cache.is_static else None)
        whole = codes * (scale if cache.is_static else scale[..., None])
        getattr(s, name).flatten(0, 1)[places] = whole
    s.check()


def test_sequences_share_the_pages_of_a_prefix(dev: torch.device) -> None:
    s = sequences(dev, (37, 40), "int8_fp4", shared_blocks=2, heads=(4, 2))
    table = s.args["block_table"]
    assert torch.equal(table[0, :2], table[1, :2])
    assert int(table[0, 2]) != int(table[1, 2])
    s.check(return_lse=True)


@pytest.mark.parametrize("mode", WITH_RESIDUALS)
def test_more_residual_slots_than_int16_counts(mode: str, dev: torch.device) -> None:
    """Slot 65534 is -2 in the int16 tensor."""
    blocks = 65535 // BLOCK + 1
    k, v = (planted(20, 1, 32, seed).to(dev) for seed in range(2))
    s = sequences(dev, (20,), mode, poison=False)
    caches = [cache_for(x, blocks, mode, outliers=0.3, share=1.0) for x in (k, v)]
    places = s.args["block_table"][0, :2, None] * BLOCK + torch.arange(BLOCK, device=dev)
    tkernels.append_quantized_kv(k, v, *caches, places.flatten()[:20].long())
    assert caches[0].slots is not None
    slots = caches[0].slots[caches[0].slots != NO_SLOT]
    assert bool((slots < 0).all())
    assert int(slots.max()) == -2
    args = {**s.args, "k_cache": caches[0], "v_cache": caches[1]}
    Sequences(args, *map(dequantize_cache, caches)).check()


@pytest.mark.parametrize("mode", ["int8", "int8_fp4"])
def test_caches_at_odd_addresses(mode: str, dev: torch.device) -> None:
    """Where two codes cannot be read at once."""
    s = sequences(dev, (20, 5), mode, BF16)
    for name, cache in zip(("k_cache", "v_cache"), s.caches, strict=True):
        moved = {}
        for field, t in cache.tensors().items():
            if t.itemsize == 1:
                moved[field] = t.new_empty(t.numel() + 1)[1:].view(t.shape).copy_(t)
                assert moved[field].data_ptr() % 2 == 1
        s.args[name] = cache._replace(**moved)
    s.check()


def test_nothing_around_the_result_is_written(dev: torch.device) -> None:
    s = sequences(dev, (37, 5), "int8_fp4", BF16, heads=(3, 1))
    before = [{n: t.clone() for n, t in cache.tensors().items()} for cache in s.caches]
    out = guarded(torch.full_like(s.args["q"], 7.0))
    assert s.run(out=out.tensor)[0] is out.tensor
    out.check("out")
    assert_close(out.tensor, s.truth()[0], what="out")
    for cache, kept in zip(s.caches, before, strict=True):
        for name, t in cache.tensors().items():
            assert torch.equal(t.nan_to_num(7.0), kept[name].nan_to_num(7.0)), name


# ---- options and splits ----------------------------------------------------------------------


@pytest.mark.parametrize("q_lens", [None, (9, 3)], ids=["decode", "chunk"])
@pytest.mark.parametrize("mode", WITH_RESIDUALS)
def test_window_softcap_and_sinks(mode: str, q_lens: Any, dev: torch.device) -> None:
    s = sequences(dev, (40, 20), mode, q_lens=q_lens)
    sinks = torch.tensor([0.5, -1.0], device=dev)
    s.check(window=11, return_lse=True)
    s.check(softcap=1.5, scale=0.4, return_lse=True)
    s.check(window=7, softcap=1.5, sinks=sinks, return_lse=True)


@pytest.mark.parametrize("outlier_splits", [1, 2])
@pytest.mark.parametrize("splits", [1, 2, 8])
def test_splits_do_not_change_the_answer(
    splits: int, outlier_splits: int, dev: torch.device
) -> None:
    s = sequences(dev, (70, 0, 17), "int8_fp4")
    sinks = torch.tensor([0.5, -1.0], device=dev)
    s.check(sinks=sinks, return_lse=True, config=config_for(splits, outlier_splits))


@pytest.mark.parametrize("mode", ["int8", "int8_fp4"])
@pytest.mark.parametrize("q_lens", [None, (2, 3)], ids=["decode", "chunk"])
def test_empty_sequences(mode: str, q_lens: Any, dev: torch.device) -> None:
    s = sequences(dev, (0, 18), mode, BF16, q_lens=q_lens)
    n = 1 if q_lens is None else q_lens[0]
    out, lse = s.run(out=torch.full_like(s.args["q"], 7.0), return_lse=True)
    assert not bool(out[:n].any())
    assert bool((lse[:n] == -torch.inf).all())
    assert_close(out, s.truth()[0], what="out")
    s = sequences(dev, (0, 0), mode, q_lens=q_lens)
    assert not bool(s.run()[0].any())


@pytest.mark.parametrize("mode", WITH_RESIDUALS)
def test_the_rest_of_the_batch_does_not_matter(mode: str, dev: torch.device) -> None:
    s = sequences(dev, (40, 0, 17), mode, BF16)
    config = config_for(2, 1)
    whole = s.run(config=config, return_lse=True)
    assert_same_bits(s.run(config=config, return_lse=True), whole)  # and the same bits each time
    for b in range(3):
        names = ("q", "block_table", "context_lens")
        alone = {n: s.args[n][b : b + 1] for n in names}
        got = s.run(config=config, return_lse=True, **alone)
        assert_same_bits(got, [t[b : b + 1] for t in whole])


def test_chunks_are_steps(dev: torch.device) -> None:
    """The tokens of a chunk, one by one."""
    s = sequences(dev, (20,), "int8_fp4", q_lens=(4,))
    whole = s.run(return_lse=True)
    for i in range(4):
        one = {"q": s.args["q"][i : i + 1], "cu_seqlens_q": None, "max_seqlen_q": None}
        one["context_lens"] = torch.full_like(s.args["context_lens"], 17 + i)
        for got, expected in zip(s.run(return_lse=True, **one), whole, strict=True):
            assert_close(got, expected[i : i + 1], what=f"token {i}")


def test_traced(dev: torch.device) -> None:
    for mode in ("int8", "int8_static_fp4"):
        s = sequences(dev, (20, 5), mode, BF16)
        expected = s.run(return_lse=True)

        def call(args: dict[str, Any]) -> Any:
            out, lse = tkernels.paged_attn_quantized(**args, return_lse=True)
            return out * 2, lse + 1

        out, lse = torch.compile(call, fullgraph=True, backend="aot_eager")(s.args)
        torch._dynamo.reset()
        assert torch.equal(out, 2 * expected[0])
        assert torch.equal(lse, expected[1] + 1)


@pytest.mark.parametrize("seed", range(4))
def test_random_problems_and_configs(seed: int, dev: torch.device) -> None:
    """3 legal configs in the interpreter, 25 on a device, each on a problem of its own."""
    rng = random.Random(seed)
    small, facts = dev.type == "cpu", device.current()
    lengths = (0, 1, 15, 16, 17, 33, 65) if small else (0, 1, 17, 63, 64, 130, 1000)
    space = SPEC.space(facts)
    if small:  # a program without a share takes a millisecond there
        space["SPLITS"] = [n for n in space["SPLITS"] if n <= 6]
        space["OUTLIER_SPLITS"] = [0, 1, 2, 4]
    for _ in range(3 if small else 25):
        mode, most = rng.choice(QUANTISED), rng.choice((1, 9))
        contexts = [rng.choice(lengths) for _ in range(rng.choice((1, 2)))]
        q_lens = [rng.randint(0, min(n, most)) for n in contexts] if rng.random() < 0.5 else None
        kv_heads = rng.choice((1, 2))
        dims = (32, 64, 96) if "fp4" in mode else (16, 22, 32, 80)
        dim = rng.choice(dims if small else (*dims, 128, 192, 256))
        problem = problem_of(
            contexts,
            f"{kv_heads * rng.choice((1, 2, 5))}/{kv_heads}x{dim}",
            rng.choice((FP32, BF16, FP16)),
            mode,
            residual_block=rng.choice((0, 16)),
            mantissa_bits=rng.choice((0, 1, 2)),
            outliers=rng.choice((0.04, 0.3, 1.0)),
            q_lens=q_lens,
            block_size=rng.choice((16, 32, 64)),
            max_context=rng.choice((0, 100)),
            window=rng.choice((None, None, 1, 16, 40)),
            softcap=rng.choice((None, None, 5.0)),
            sinks=rng.random() < 0.4,
        )
        config: Config = {}
        while not config or SPEC.why_illegal(config, problem, facts) is not None:
            config = {name: rng.choice(values) for name, values in space.items()}
        inputs = SPEC.make_inputs(problem, dev)
        try:
            assert_right(SPEC, inputs, tensors_of(SPEC.launch(**inputs, config=config)))
        except AssertionError as error:
            raise AssertionError(f"{problem} with {config}: {error}") from None


# ---- cost ------------------------------------------------------------------------------------


def test_cost_by_hand() -> None:
    """Two sequences, 64 keys of one head of 64: 128 vectors, a quarter of them outliers."""
    rest = 2 * (2 * 2 * 64 * 2) + 4 * (1 + 3) + 4 * 2  # q and out; table; lengths
    codes = 128 * 64
    for mode, expected in (
        ("int8", codes + 128 * 4),
        ("int8_static", codes + 2 * 64 * 4),
        ("int8_fp4", codes + 128 * 4 + 32 * (32 + 2 + 2)),  # 4 bits each, exponents, slot
        ("int8_static_fp4", codes + 2 * 64 * 4 + 128 * 2 + 32 * (32 + 2)),  # slots of all
    ):
        cost = SPEC.cost(problem_of((16, 48), "2/1x64", BF16, mode))
        assert cost.bytes == expected + rest, mode
        assert cost.flops == 4 * 64 * 2 * 64


def test_inputs_are_poisoned(dev: torch.device) -> None:
    """What the shared tests of all kernels stand on."""
    problem = problem_of((5, 0, 40), "2/1x64", BF16, "int8_fp4", window=10, max_context=64)
    inputs = SPEC.make_inputs(problem, dev)
    for which in "kv":
        scale, slots = inputs[f"{which}_scale"], inputs[f"{which}_slots"]
        seen = ~scale.isnan()
        assert int(seen.sum()) == 5 + 10
        assert bool((slots[~seen] == 0x7FFE).all())
        assert torch.equal(scale[seen] < 0, slots[seen] != NO_SLOT)
        assert bool((inputs[f"{which}_residual_scale"][:, -2:] == 255).all())


# ---- arguments -------------------------------------------------------------------------------


def test_arguments_that_do_not_go_together(dev: torch.device) -> None:
    s = sequences(dev, (5, 20), "int8_fp4", BF16, dim=64)
    other = {mode: sequences(dev, (5, 20), mode, BF16, dim=64).caches for mode in QUANTISED}

    def refused(words: str, **change: Any) -> None:
        with pytest.raises((TypeError, ValueError), match=f"^paged_attn_quantized: {words}") as e:
            s.run(**change)
        message = str(e.value)
        assert "\n" not in message
        assert not message.endswith(".")

    k, v = s.caches
    refused("v_cache must be another cache than k_cache, got one for both", v_cache=k)
    refused(r"k_cache must be a QuantizedKV, got .*\(list\)", k_cache=[k])
    refused("v_cache must be a QuantizedKV, got int8", v_cache=v.codes)
    refused(
        "v_cache must have residual_format 'e2m1' as k_cache has, got 'e3m0'",
        v_cache=v._replace(residual_format="e3m0"),
    )
    # One has residuals, the other none, either way.
    refused(r"v_slots must have shape .* as k_slots has, got int16 \[0\]", v_cache=other["int8"][1])
    refused(r"v_slots must have shape \[0\] as k_slots has", k_cache=other["int8"][0])
    refused(
        r"v_scale must have shape .* as k_scale has, got float32 \[1, 64\]",
        v_cache=other["int8_static_fp4"][1],
    )
    refused(r"v_scale must have shape \[1, 64\] as k_scale has", k_cache=other["int8_static"][0])
    small = allocate_quantized(3, BLOCK, 1, 64, tau=0.1, device=dev)
    refused(r"v_codes must have shape .* as k_codes has, got int8 \[3, 16, 1, 64\]", v_cache=small)
    fewer = allocate_quantized(len(v.codes), BLOCK, 1, 64, tau=0.1, outlier_share=0.1, device=dev)
    refused(r"v_residual must have shape .* as k_residual has", v_cache=fewer)
    blocks = allocate_quantized(
        len(v.codes), BLOCK, 1, 64, tau=0.1, outlier_share=1.0, residual_block=16, device=dev
    )
    refused(r"v_residual_scale must have shape .* as k_residual_scale has", v_cache=blocks)
    ends = torch.tensor([0, 1, 2], dtype=torch.int32, device=dev)
    refused("max_seqlen_q must be an int >= 0 with cu_seqlens_q, got None", cu_seqlens_q=ends)
    refused("max_seqlen_q must be 1 without cu_seqlens_q, got 2", max_seqlen_q=2)
    refused("q must be .*float32.*, got float64", q=s.args["q"].double())
    refused(
        r"k_codes must have shape .*head_dim=32.*, got int8 \[5, 16, 1, 64\]",
        q=s.args["q"][..., :32].contiguous(),
    )
    refused(
        "k_codes must have a number of heads that divides the 3 of q",
        q=torch.zeros(2, 3, 64, dtype=BF16, device=dev),
        k_cache=wide_cache(dev, 2),
        v_cache=wide_cache(dev, 2),
    )
    refused("window must be an int >= 1 or None, got 0", window=0)
    refused("v_codes must be int8, got uint8", v_cache=v._replace(codes=v.codes.view(torch.uint8)))
    assert k.residual is not None
    strided = k.residual.mT.contiguous().mT
    refused("k_residual must be contiguous", k_cache=k._replace(residual=strided))


def wide_cache(dev: torch.device, heads: int) -> QuantizedKV:
    return allocate_quantized(5, BLOCK, heads, 64, tau=0.1, device=dev)


@pytest.mark.parametrize(
    ("block_size", "dim", "words"),
    [
        (8, 32, "k_codes must have a block_size that is a power of two from 16 on, got int8"),
        (24, 32, "k_codes must have a block_size that is a power of two from 16 on, got int8"),
        (16, 15, r"q must have an even head_dim, got float32 \[1, 2, 15\]"),
        (16, 258, "q must have .*256"),
    ],
)
def test_sizes_that_are_refused(block_size: int, dim: int, words: str, dev: torch.device) -> None:
    k_cache, v_cache = (
        allocate_quantized(2, block_size, 1, dim, mode="int8", device=dev) for _ in range(2)
    )
    table = torch.zeros(1, 1, dtype=torch.int32, device=dev)
    lens = torch.ones(1, dtype=torch.int32, device=dev)
    with pytest.raises(ValueError, match=f"^paged_attn_quantized: {words}"):
        tkernels.paged_attn_quantized(
            torch.zeros(1, 2, dim, device=dev), k_cache, v_cache, table, lens
        )


def test_values_are_checked_in_debug(dev: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tkernels.check.DEBUG", True)
    s = sequences(dev, (5, 20), "int8_fp4")
    s.check()
    lens = torch.tensor([5, 99], dtype=torch.int32, device=dev)
    with pytest.raises(ValueError, match="context_lens must be from 0 to 48, got 99 at 1"):
        s.run(context_lens=lens)


# ---- on a GPU --------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("mode", QUANTISED)
def test_graph_serves_other_lengths(mode: str, dev: torch.device) -> None:
    """Captured once, replayed with other lengths, tables and caches in the same tensors."""

    def made(lengths: Sequence[int]) -> dict[str, Any]:
        problem = problem_of(
            lengths, "8/2x128", BF16, mode, lse=True, max_context=2000, poison=False
        )
        return SPEC.make_inputs(problem, dev)

    all_lengths = ((2000, 1999, 3, 700), (1, 0, 2000, 16), (0, 0, 0, 0), (64, 65, 1000, 1))
    inputs = made(all_lengths[0])
    tensors_of(SPEC.launch(**inputs))
    graph = device.new_graph()
    with device.capture(graph):
        results = tensors_of(SPEC.launch(**inputs))
    for lengths in all_lengths:
        for name, value in made(lengths).items():
            if isinstance(value, torch.Tensor):
                inputs[name][tuple(slice(n) for n in value.shape)].copy_(value)
        graph.replay()
        assert_right(SPEC, clone_inputs(inputs), results)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("mode", ["int8_fp4", "int8_static"])
def test_pool_past_two_to_the_31(mode: str, dev: torch.device) -> None:
    """Blocks whose first code has a number that 32 bits cannot hold."""
    block = 16 * 2 * 128
    num_blocks = 2**31 // block + 64
    problem = problem_of((100, 40), "4/2x128", BF16, mode, lse=True, poison=False)
    inputs = SPEC.make_inputs(problem, dev)
    expected = tensors_of(SPEC.launch(**inputs))
    assert_right(SPEC, inputs, expected)
    small = len(inputs["k_codes"])
    for name in ("k_codes", "k_scale", "k_slots", "v_codes", "v_scale", "v_slots"):
        if len(inputs[name]) == small:
            pool = inputs[name].new_zeros(num_blocks, *inputs[name].shape[1:])
            pool[-small:] = inputs[name]
            inputs[name] = pool
    inputs["block_table"] += num_blocks - small
    assert int(inputs["block_table"].min()) * block > 2**31
    assert_same_bits(tensors_of(SPEC.launch(**inputs)), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", WITH_RESIDUALS)
def test_it_waits_for_what_was_launched_before(mode: str, dev: torch.device) -> None:
    """All that it reads is written by the kernels right before; the launch of residuals and the
    main one start early (PDL) and beside each other."""
    problem = problem_of([512] * 8, "8/2x128", BF16, mode, poison=False)
    new = SPEC.make_inputs(problem, dev)
    names = [n for n, t in new.items() if isinstance(t, torch.Tensor)]
    old = {n: torch.zeros_like(t) if n in names else t for n, t in new.items()}
    expected = tensors_of(SPEC.launch(**new))
    for last in names:
        for n in names:
            old[n].zero_()
        SPEC.launch(**old)
        for n in [*(n for n in names if n != last), last]:
            old[n].copy_(new[n])
        assert_same_bits(tensors_of(SPEC.launch(**old)), expected)


@pytest.mark.gpu
def test_calls_in_a_row_do_not_mix(dev: torch.device) -> None:
    """Append and attention in turn: each attention sees what was appended right before it."""
    s = sequences(dev, (300, 700), "int8_fp4", BF16, heads=(8, 2), dim=128, poison=False)
    table = s.args["block_table"]
    last = [
        int(table[b, (n - 1) // BLOCK]) * BLOCK + (n - 1) % BLOCK for b, n in ((0, 300), (1, 700))
    ]
    places = torch.tensor(last, device=dev)
    for seed in range(20):
        x = planted(4, 2, 128, seed).to(dev, BF16)
        tkernels.append_quantized_kv(x[:2], x[2:], *s.caches, places)
        out = s.run()[0]
        s.k, s.v = map(dequantize_cache, s.caches)
        assert_close(out, s.truth()[0], what=f"step {seed}")
