"""What is special to append_quantized_kv and its pool: slots that run out, come back, are kept."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tkernels
from tests.compiled_for import lines_of
from tkernels.device import sm_facts
from tkernels.kv_format import (
    MODES,
    NO_SLOT,
    QuantizedKV,
    allocate_quantized,
    append_quantized_ref,
    dequantize_cache,
    quantize_ref,
    release_residuals_ref,
)
from tkernels.ops.append_quantized_kv import _portable_config
from tkernels.quantized_cases import quantized_problem
from tkernels.registry import get

pytestmark = pytest.mark.thin(2)

HEADS, DIM, BLOCK = 2, 64, 4
TAU = 0.0095


def cache_of(dev: torch.device, tokens: int = 16, **more: Any) -> QuantizedKV:
    if "fp4" in more.get("mode", "int8_fp4"):
        more = {"tau": TAU, "outlier_share": 1.0, **more}
    return allocate_quantized(-(-tokens // BLOCK), BLOCK, HEADS, DIM, device=dev, **more)


def outliers(dev: torch.device, tokens: int, seed: int = 0) -> torch.Tensor:
    """Every token of every head has a large channel."""
    x = torch.randn(tokens, HEADS, DIM, generator=torch.Generator().manual_seed(seed))
    x[..., 5] = 60.0
    return x.to(dev)


def copy_of(cache: QuantizedKV) -> QuantizedKV:
    return cache._replace(**{name: t.clone() for name, t in cache.tensors().items()})


def append(x: torch.Tensor, cache: QuantizedKV, places: torch.Tensor, **more: Any) -> None:
    """x as values, beside keys that nobody looks at."""
    tkernels.append_quantized_kv(2.0 - x.flip(0), x, copy_of(cache), cache, places, **more)


def release(cache: QuantizedKV, blocks: torch.Tensor) -> None:
    assert cache.slots is not None
    assert cache.free_slots is not None
    assert cache.free_count is not None
    tkernels.release_residual_slots(cache.slots, cache.free_slots, cache.free_count, blocks)


def conserved(cache: QuantizedKV) -> None:
    """Each slot is free once, or held once."""
    assert cache.slots is not None
    assert cache.free_slots is not None
    assert cache.free_count is not None
    n = cache.free_slots.shape[1]
    for head in range(HEADS):
        held = cache.slots[:, head][cache.slots[:, head] != NO_SLOT].long() & 0xFFFF
        free = cache.free_slots[head, : int(cache.free_count[head])].long()
        assert sorted([*held.tolist(), *free.tolist()]) == list(range(n))


def test_a_full_pool_drops_residuals_and_counts_them(dev: torch.device) -> None:
    cache = cache_of(dev, outlier_share=6 / 16)
    x = outliers(dev, 16)
    append(x, cache, torch.arange(16, device=dev))
    assert cache.dropped is not None
    assert cache.free_count is not None
    assert cache.slots is not None
    assert cache.dropped.tolist() == [10, 10]
    assert cache.free_count.tolist() == [0, 0]
    conserved(cache)
    exact = x.view(4, BLOCK, HEADS, DIM)
    left = (dequantize_cache(cache) - exact).square().sum(-1).transpose(1, 2)
    without = (dequantize_cache(cache, residuals=False) - exact).square().sum(-1).transpose(1, 2)
    held = cache.slots != NO_SLOT
    assert int(held.sum()) == 12
    assert bool((left[held] < 0.05 * without[held]).all())
    assert torch.equal(left[~held], without[~held])  # int8's value: never a wrong one


def test_what_is_appended_again_keeps_its_slot(dev: torch.device) -> None:
    cache, places = cache_of(dev), torch.tensor([3, 9], device=dev)
    append(outliers(dev, 2), cache, places)
    assert cache.slots is not None
    before = cache.slots.clone()
    plain = torch.randn(2, HEADS, DIM, generator=torch.Generator().manual_seed(1)).to(dev)
    append(plain, cache, places)  # no outliers, and their residuals replace those that were there
    assert torch.equal(cache.slots, before)
    _, scale, rest, _ = quantize_ref(plain)
    got = dequantize_cache(cache).flatten(0, 1)[places]
    error = (got - plain).abs().amax()
    assert float(error) < 0.2 * float((rest * scale[..., None]).abs().amax())
    conserved(cache)


def test_released_blocks_have_no_residuals_left(dev: torch.device) -> None:
    cache = cache_of(dev)
    append(outliers(dev, 16), cache, torch.arange(16, device=dev))
    release(cache, torch.tensor([2, -1, 0, 2, 99], device=dev))
    conserved(cache)
    assert cache.slots is not None
    assert bool((cache.slots[[0, 2]] == NO_SLOT).all())
    assert bool((cache.slots[[1, 3]] != NO_SLOT).all())
    plain = torch.randn(BLOCK, HEADS, DIM, generator=torch.Generator().manual_seed(2)).to(dev)
    append(plain, cache, torch.arange(BLOCK, device=dev))
    codes, scale, _, _ = quantize_ref(plain)
    assert torch.equal(dequantize_cache(cache)[0], codes * scale[..., None])


@pytest.mark.parametrize("seed", range(3))
def test_a_long_life_equals_the_reference(seed: int, dev: torch.device) -> None:
    """Appends and releases in turn, the pool empty at times."""
    generator = torch.Generator().manual_seed(seed)
    mine, theirs = (cache_of(dev, outlier_share=0.6) for _ in range(2))
    for step in range(12):
        x = torch.randn(3, HEADS, DIM, generator=generator)
        x[torch.rand(3, HEADS, generator=generator) < 0.6] *= torch.where(
            torch.arange(DIM) == 7, 40.0, 1.0
        )
        places = torch.randperm(16, generator=generator)[:3]
        blocks = torch.randint(-1, 4, (2,), generator=generator)
        # A program takes all tokens of a head here, so that both drop the same ones.
        config = {"BLOCK_T": 4, "programs_per_core": 0, "PDL": False, "num_warps": 1}
        config |= {"variant": "portable", "STAGES": 1, "BY_TOKEN": seed % 2 == 1, "BLOCK_HEADS": 1}
        append(x.to(dev), mine, places.to(dev), config=config)
        append_quantized_ref(x.to(dev), theirs, places.to(dev))
        if step % 3 == 2:
            release(mine, blocks.to(dev))
            release_residuals_ref(theirs, blocks.to(dev))
        conserved(mine)
        torch.testing.assert_close(dequantize_cache(mine), dequantize_cache(theirs))
        assert mine.dropped is not None
        assert theirs.dropped is not None
        assert torch.equal(mine.dropped, theirs.dropped)


@pytest.mark.parametrize("mode", ["int8", "int8_fp4", "int8_static", "int8_static_fp4"])
def test_zero_constant_and_extreme_vectors(mode: str, dev: torch.device) -> None:
    scale = torch.full((HEADS, DIM), 1.0) if "static" in mode else None
    cache = cache_of(dev, mode=mode, static_scale=scale)
    x = torch.zeros(6, HEADS, DIM, dtype=torch.float16)
    x[1], x[2], x[3, :, 0], x[4] = 3.0, -3.0, 65504.0, 65504.0
    x[5, :, 1] = 6e-8  # subnormal
    places = torch.tensor([0, 5, 6, 11, 12, 13], device=dev)
    append(x.to(dev), cache, places)
    reference = cache_of(dev, mode=mode, static_scale=scale)
    append_quantized_ref(x.to(dev), reference, places)
    got, expected = dequantize_cache(cache), dequantize_cache(reference)
    assert bool(got.isfinite().all())
    torch.testing.assert_close(got, expected)
    assert not bool(got.flatten(0, 1)[0].any())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_no_number_reads_as_none(value: float, dev: torch.device) -> None:
    cache = cache_of(dev, mode="int8")
    x = torch.ones(2, HEADS, DIM, device=dev)
    x[0, 1, 3] = value
    append(x, cache, torch.tensor([4, 6], device=dev))
    reference = cache_of(dev, mode="int8")
    append_quantized_ref(x, reference, torch.tensor([4, 6], device=dev))
    for one in (cache, reference):
        got = dequantize_cache(one).flatten(0, 1)
        assert bool(got[4, 1].isnan().all())
        assert bool((got[[4, 6, 6], [0, 0, 1]] - 1.0).abs().lt(1e-6).all())


def test_a_threshold_below_zero_keeps_all(dev: torch.device) -> None:
    mine, theirs = (cache_of(dev, tau=-1.0) for _ in range(2))
    x, places = torch.zeros(3, HEADS, DIM, device=dev), torch.arange(3, device=dev)
    append(x, mine, places)
    append_quantized_ref(x, theirs, places)
    assert mine.free_count is not None
    assert theirs.free_count is not None
    assert torch.equal(mine.free_count, theirs.free_count)
    assert int(mine.free_count[0]) == 13


def cache_for(x: torch.Tensor, mode: str, most: int, slots: int) -> QuantizedKV:
    """``slots`` a head, and thresholds that ``most`` tokens of x stay below."""
    scale = x.abs().amax(0) / 100 if "static" in mode else None
    _, _, _, error = quantize_ref(x, scale)
    tau = error.sort(0).values[most - 1 : most + 1].mean(0)
    more = {"tau": tau, "outlier_share": slots / 16} if "fp4" in mode else {}
    return cache_of(x.device, mode=mode, static_scale=scale, **more)


@pytest.mark.parametrize(
    ("mode", "compiled", "by_token"),
    [
        *((mode, False, False) for mode in MODES[1:]),
        *((mode, False, True) for mode in ("int8_fp4", "int8_static_fp4")),
        ("int8", True, False),
        ("int8_static_fp4", True, False),
    ],
)
def test_k_and_v_have_caches_of_their_own(
    mode: str, compiled: bool, by_token: bool, dev: torch.device
) -> None:
    """All that a cache has equals the reference's, which appends one after the other."""
    k, v = outliers(dev, 7, seed=1), outliers(dev, 14, seed=2).flip(-1)[::2]
    k[::2, 0, 5], v[1::3, :, -6] = 3.0, 1.0
    places = torch.tensor([3, 9, -1, 0, 15, 7, 11], device=dev)
    slots = 16 if compiled else 1  # several tiles agree on what is dropped where that is nothing
    mine, theirs = ([cache_for(k, mode, 5, slots), cache_for(v, mode, 1, slots)] for _ in range(2))
    for _, v_cache in (mine, theirs):
        if v_cache.free_slots is not None:
            v_cache.free_slots.copy_(v_cache.free_slots.flip(1))

    def call(k_cache: QuantizedKV, v_cache: QuantizedKV) -> None:
        # One tile, so that slots are taken in the order of tokens on any device.
        config = {"BLOCK_T": 8, "programs_per_core": 0, "PDL": False, "num_warps": 1}
        config |= {"variant": "portable", "STAGES": 1, "BY_TOKEN": by_token, "BLOCK_HEADS": 1}
        more: Any = {} if compiled else {"config": config}
        tkernels.append_quantized_kv(k, v, k_cache, v_cache, places, **more)

    if compiled:
        torch.compile(call, fullgraph=True, backend="aot_eager")(*mine)
        torch._dynamo.reset()
    else:
        call(*mine)
    tkernels.reference.append_quantized_kv(k, v, *theirs, places)
    for got, expected in zip(mine, theirs, strict=True):
        assert torch.equal(got.codes, expected.codes)
        torch.testing.assert_close(got.scale, expected.scale)
        torch.testing.assert_close(dequantize_cache(got), dequantize_cache(expected))
        for name in ("free_count", "dropped") if "fp4" in mode else ():
            assert torch.equal(getattr(got, name), getattr(expected, name)), name
        if "fp4" in mode and not compiled:
            assert torch.equal(got.slots, expected.slots)
    if "fp4" in mode:  # and K's differ from V's
        for name in ("slots", "tau") if compiled else ("slots", "tau", "dropped"):
            assert not torch.equal(getattr(mine[0], name), getattr(mine[1], name)), name


def test_debug_refuses_a_place_that_two_tokens_share(
    dev: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    k_cache, v_cache = cache_of(dev), cache_of(dev)
    x = outliers(dev, 4)
    monkeypatch.setattr("tkernels.check.DEBUG", True)
    past = k_cache.codes.shape[:2].numel()
    for skipped in (-1, past):  # nobody writes there
        places = torch.tensor([3, skipped, 0, skipped], device=dev)
        tkernels.append_quantized_kv(x, x, k_cache, v_cache, places)
    before = k_cache.codes.clone()
    with pytest.raises(
        ValueError, match=r"^append_quantized_kv: slot_mapping must hold .*, got 3 more than once"
    ):
        tkernels.append_quantized_kv(
            2 * x.flip(0), x, k_cache, v_cache, torch.tensor([3, 1, 3, 2], device=dev)
        )
    assert torch.equal(k_cache.codes, before)
    with pytest.raises(TypeError, match="slot_mapping must be a tensor, got"):
        tkernels.append_quantized_kv(x, x, k_cache, v_cache, [3, 3, 3, 3])  # type: ignore[arg-type]


def test_arguments_that_do_not_go_together(dev: torch.device) -> None:
    k_cache, v_cache, places = cache_of(dev), cache_of(dev), torch.arange(1, device=dev)
    x = outliers(dev, 1)

    def refused(words: str, v: torch.Tensor = x, **caches: Any) -> None:
        given = {"k_cache": k_cache, "v_cache": v_cache, **caches}
        with pytest.raises((TypeError, ValueError), match=f"^append_quantized_kv: {words}"):
            tkernels.append_quantized_kv(x, v, **given, slot_mapping=places)

    refused("v_cache must be another cache than k_cache, got one for both", v_cache=k_cache)
    refused(r"k_cache must be a QuantizedKV, got .*\(list\)", k_cache=[k_cache])
    other = cache_of(dev, residual_format="e3m0")
    refused("v_cache must have residual_format 'e2m1' as k_cache has, got 'e3m0'", v_cache=other)
    refused(
        "k_cache must have a residual_format of e1m2, e2m1, e3m0, got 'e4m3'",
        k_cache=k_cache._replace(residual_format="e4m3"),
    )
    refused(
        r"v_slots must be int16 \[4, 2, 4\] as k_slots is, got int16 \[0\]",
        v_cache=cache_of(dev, mode="int8"),
    )
    refused(r"v_codes must be int8 \[4, 4, 2, 64\] as k_codes is", v_cache=cache_of(dev, 12))
    refused(r"v must be float32 \[1, 2, 64\] as k is, got float16 \[1, 2, 64\]", v=x.half())
    for name, one in (("dropped", "free_count"), ("free_count", "free_count")):
        refused(
            f"v_{name} must be another tensor than k_{one}, got one for both",
            v_cache=v_cache._replace(**{name: getattr(k_cache, one)}),
        )
    refused(
        r"k_cache must have a residual_format of e1m2, e2m1, e3m0, got \['e2m1'\]",
        k_cache=k_cache._replace(residual_format=["e2m1"]),
    )
    for mode in ("int8", "int8_fp4"):
        refused(
            r"v_cache.codes must be a tensor, got None \(NoneType\)",
            v_cache=cache_of(dev, mode=mode)._replace(codes=None),
        )
    none = torch.empty(0, dtype=torch.int16, device=dev)
    refused(
        r"k_slots must have shape .* where k_residual is given",
        k_cache=k_cache._replace(slots=none),
    )


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"tau": torch.zeros(3)}, "tau must be a number or fp32"),
        ({"outlier_share": -1.0}, "outlier_share must be a number above 0, got -1.0"),
        ({"outlier_share": float("nan")}, "outlier_share must be a number above 0, got nan"),
    ],
)
def test_what_cannot_be_allocated(more: dict[str, Any], words: str, dev: torch.device) -> None:
    with pytest.raises(ValueError, match=f"allocate_quantized: {words}"):
        cache_of(dev, **more)
    with pytest.raises(ValueError, match="head_dim must divide by 32 for mode int8_fp4, got 80"):
        allocate_quantized(2, 4, 2, 80, tau=0.1)


def test_nothing_else_of_the_cache_is_touched(dev: torch.device) -> None:
    """All that is unused is poisoned: codes of other places, residual rows of other slots."""
    cache = cache_of(dev)
    assert cache.residual is not None
    assert cache.residual_scale is not None
    cache.codes.fill_(-128)
    cache.scale.fill_(float("nan"))
    cache.residual.fill_(0xA5)
    cache.residual_scale.fill_(0xFF)
    places = torch.tensor([2, -1, 15, 16, 7], device=dev)
    append(outliers(dev, 5), cache, places)
    used = torch.zeros(16, dtype=torch.bool)
    used[[2, 15, 7]] = True
    codes = cache.codes.flatten(0, 1).cpu()
    assert bool((codes[~used] == -128).all())
    assert bool((codes[used] != -128).all())
    nan = cache.scale.transpose(1, 2).flatten(0, 1).isnan().cpu()
    assert torch.equal(nan, ~used[:, None].expand(-1, HEADS))
    assert bool((cache.residual_scale == 0xFF).all(-1).sum(1).eq(13).all())
    assert bool((cache.residual == 0xA5).all(-1).sum(1).eq(13).all())


@pytest.mark.parametrize("heads", [1, 2, 4, 8])
@pytest.mark.parametrize("tokens", [1, 5, 11])
def test_heads_of_a_program(heads: int, tokens: int, dev: torch.device) -> None:
    """Heads that a program takes together: each row's place, with gaps, tails and odd strides."""
    generator = torch.Generator().manual_seed(tokens)
    wide = torch.randn(tokens, 10, 3 * 40, generator=generator).to(dev)
    k, v = wide[:, :8, :40], wide.flip(1)[:, 1:9, 41:81]
    places = torch.randperm(18, generator=generator)[:tokens].to(dev)
    places[2::4] = -1
    caches = []
    for x in (k, v):
        cache = allocate_quantized(6, 3, 8, 40, mode="int8", device=dev)
        cache.codes.fill_(-128)
        cache.scale.fill_(float("nan"))
        caches.append((x, cache, copy_of(cache)))
    config = {"BLOCK_T": 4, "programs_per_core": 0, "PDL": False, "num_warps": 4}
    config |= {"variant": "portable", "STAGES": 1, "BY_TOKEN": False, "BLOCK_HEADS": heads}
    tkernels.append_quantized_kv(k, v, caches[0][1], caches[1][1], places, config=config)
    for x, got, expected in caches:
        append_quantized_ref(x, expected, places)
        assert torch.equal(got.codes, expected.codes)
        assert torch.equal(got.scale.nan_to_num(-1.0), expected.scale.nan_to_num(-1.0))


@pytest.mark.parametrize(
    ("mode", "heads", "words"),
    [
        ("int8", 3, "BLOCK_HEADS=3 is no power of two that divides 8 heads"),
        ("int8", 16, "BLOCK_HEADS=16 is no power of two that divides 8 heads"),
        ("int8_static", 2, "BLOCK_HEADS=2 must be 1 with static scales or residuals"),
        ("int8_fp4", 2, "BLOCK_HEADS=2 must be 1 with static scales or residuals"),
    ],
)
def test_heads_that_a_program_cannot_take(mode: str, heads: int, words: str) -> None:
    spec = get("append_quantized_kv")
    problem = quantized_problem(64, 8, 128, torch.bfloat16, mode)
    config = _portable_config(problem, sm_facts(90)) | {"BLOCK_HEADS": heads}
    why = spec.why_illegal(config, problem, sm_facts(90))
    assert why is not None
    assert words in why


@pytest.mark.parametrize(
    ("mode", "changes", "words"),
    [
        ("int8", {"BY_TOKEN": True}, "BY_TOKEN is for residuals"),
        ("int8_fp4", {"STAGES": 2, "programs_per_core": 0}, "STAGES > 1 needs programs of several"),
    ],
)
def test_configs_that_would_say_nothing(mode: str, changes: dict[str, Any], words: str) -> None:
    spec = get("append_quantized_kv")
    problem = quantized_problem(64, 8, 128, torch.bfloat16, mode)
    config = _portable_config(problem, sm_facts(90)) | changes
    why = spec.why_illegal(config, problem, sm_facts(90))
    assert why is not None
    assert words in why


@pytest.mark.parametrize("mode", MODES[1:])
def test_the_default_is_legal_for_wide_heads(mode: str) -> None:
    spec, chip = get("append_quantized_kv"), sm_facts(90)
    for dim in (1, 33, 128, 256, 1024, 4096, 8192, 16384):
        if "fp4" in mode and dim % 32:
            continue
        for tokens in (1, 64, 4096):
            problem = quantized_problem(tokens, 8, dim, torch.bfloat16, mode)
            for choose in (spec.default_config, _portable_config):
                config = choose(problem, chip)
                assert spec.why_illegal(config, problem, chip) is None, (dim, tokens, config)


@pytest.mark.parametrize("mode", ["int8", "int8_static", "int8_fp4"])
def test_strides_of_32_and_of_64_bits_compile(mode: str) -> None:
    """One code runs for K and V, whose strides may be of two types."""
    program = f"""
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from tkernels import offline, registry
from tkernels.quantized_cases import quantized_problem
spec = registry.get("append_quantized_kv")
with FakeTensorMode(), offline.record_launches() as launches:
    given = spec.make_inputs(
        quantized_problem(1, 8, 128, torch.bfloat16, "{mode}"), torch.device("cpu"))
    for name, strides in (("k", (2**31, 128, 1)), ("v", (2**31, 2**31, 1))):
        wide = torch.as_strided(given[name].clone(), (1, 8, 128), strides)
        spec.launch(**given | {{name: wide}})
for launch in launches:
    offline.compiled_cuda(launch, 90)
print(len(launches))
"""
    assert lines_of(program)[-1:] == ["2"]


@pytest.mark.parametrize("mode", MODES[1:])
def test_the_default_has_few_programs(mode: str) -> None:
    """A program of any size takes a chip about 1.2 ns to start, and its tokens little more."""
    spec, chip = get("append_quantized_kv"), sm_facts(90)
    for tokens in (1, 7, 64, 256, 300, 512, 1024, 4096):
        for heads in (1, 2, 4, 8, 10):
            problem = quantized_problem(tokens, heads, 128, torch.bfloat16, mode)
            moved = spec.cost(problem).bytes / 3e6  # us, of an H100's memory
            for choose in (spec.default_config, _portable_config):
                config = choose(problem, chip)
                rows = config["BLOCK_T"] * config["BLOCK_HEADS"]
                if config["variant"] == "hopper":  # a warp's
                    rows *= config["num_warps"]
                programs = -(-2 * tokens * heads // rows)
                starts = 1.2e-3 * programs
                assert starts < 1.3 * max(1.3, moved), (tokens, heads, config)


@pytest.mark.gpu
@pytest.mark.slow
def test_a_pool_of_more_than_2_to_the_31_codes(dev: torch.device) -> None:
    blocks = 2**31 // (16 * 8 * 128) + 8
    cache = allocate_quantized(blocks, 16, 8, 128, mode="int8", device=dev)
    x = torch.randn(2, 8, 128, device=dev)
    places = torch.tensor([blocks * 16 - 1, 5], device=dev)
    append(x, cache, places)
    codes, scale, _, _ = quantize_ref(x)
    got = cache.codes.view(-1, 8, 128)[places].int()
    assert int((got - codes).abs().max()) <= 1
    torch.testing.assert_close(cache.scale[-1, :, -1], scale[0])
