"""The body of append_quantized_kv with residuals for Hopper as plain Python: what it writes."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import pytest
import torch

from tests.append_outcome import check_append, copy_of
from tests.plain_gluon import Machine, block
from tkernels import append_rests_hopper
from tkernels.kv_format import FORMATS, LARGEST, NO_SLOT, QuantizedKV, allocate_quantized, fields

BF16, FP16 = torch.bfloat16, torch.float16
SEEDS = range(300, 334)
NAN = float("nan")
POISON = {"codes": 77, "scale": 5.0, "residual": 0xA5, "residual_scale": 99}


class Drawn(NamedTuple):
    n_tokens: int
    n_heads: int
    dim: int
    block_size: int
    dtype: torch.dtype
    static: bool
    residual_block: int
    mantissa: int
    taus: list[float]  # of K's heads, then of V's
    n_slots: str
    places: torch.dtype
    warps: int
    block_heads: int
    max_programs: int
    pdl: bool

    @property
    def block_tokens(self) -> int:
        return append_rests_hopper.rows_of(self.dim) // self.block_heads

    @property
    def n_tiles(self) -> int:
        return -(-self.n_tokens // self.block_tokens)

    @property
    def tiles_of_a_warp(self) -> int:
        groups = 2 * self.n_heads // self.block_heads
        return -(-self.n_tiles // (self.warps * max(1, self.max_programs // groups)))


def drawn(seed: int) -> Drawn:
    pick = random.Random(seed).choice
    dim, warps, n_heads = pick((64, 128, 256)), pick((1, 1, 2, 4)), pick((1, 2, 3, 4, 4))
    static = pick((False, False, True))
    rows = append_rests_hopper.rows_of(dim)
    fit = [n for n in (1, 2, 4) if n_heads % n == 0 and n <= rows]
    heads = 1 if static else pick([*fit[-2:], fit[-1]])
    tile = rows // heads
    return Drawn(
        n_tokens=pick((1, tile, 2 * tile + 1, 4 * tile - 1)),
        n_heads=n_heads,
        dim=dim,
        block_size=pick((1, 3, 16)),
        dtype=pick((BF16, FP16)),
        static=static,
        residual_block=pick((16, 32)),
        mantissa=pick((0, 1, 2)),
        taus=[pick((0.0125, 0.0125, 0.009, 0.0, -1.0, NAN)) for _ in range(2 * n_heads)],
        n_slots=pick(("few", "enough", "65535" if n_heads < 3 else "enough")),
        places=pick((torch.int32, torch.int64)),
        warps=warps,
        block_heads=heads,
        max_programs=pick((1, 8, 1000)),
        pdl=pick((False, True)),
    )


def numbers_of(p: Drawn, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """k, that lies between q and v of a token; v, where a head's tokens follow each other."""
    made = []
    least, end = (-14, 9) if p.dtype == FP16 else (-108, 118)
    if p.static:  # within 8 times of what scales are for
        least, end = -3, 4
    for _ in range(2):
        x = torch.randn(p.n_tokens, p.n_heads, p.dim, generator=generator)
        which = torch.rand(p.n_tokens, p.n_heads, generator=generator)
        x[which < 0.4, 5] = 60.0
        x[which > 0.9, p.dim - 2] = 30.0 if p.static else NAN
        x[(which > 0.8) & (which < 0.9)] = 0.0
        exponent = torch.randint(least, end, which.shape, generator=generator)
        made.append((x * 2.0 ** exponent[..., None]).to(p.dtype))
    packed = torch.full((p.n_tokens, 3 * p.n_heads + 1, p.dim), NAN, dtype=p.dtype)
    k = packed[:, p.n_heads : 2 * p.n_heads].copy_(made[0])
    v = made[1].transpose(0, 1).contiguous().transpose(0, 1)
    return k, v


def places_of(p: Drawn, n_places: int, generator: torch.Generator) -> torch.Tensor:
    """Different ones, some of them none; with 64 bits also such as are some in 32 bits."""
    places = torch.randperm(n_places, generator=generator)[: p.n_tokens].to(p.places)
    none = [-1, n_places, n_places + 1, 2**31 - 1, -(2**31)]
    if p.places == torch.int64:
        none += [2**32, 2**32 + n_places // 2, -(2**32) + 1, 2**63 - 1]
    for i in range(0 if p.n_tokens > 1 else 1, p.n_tokens, 3):
        places[i] = none[int(torch.randint(len(none), (1,), generator=generator))]
    return places


def caches_of(p: Drawn, n_blocks: int, generator: torch.Generator) -> list[QuantizedKV]:
    """Of K, of V."""
    n_places = n_blocks * p.block_size
    n_slots = {"few": 3, "enough": n_places, "65535": 0xFFFF}[p.n_slots]
    caches = []
    for taus in (p.taus[: p.n_heads], p.taus[p.n_heads :]):
        steps = torch.randint(1, 9, (p.n_heads, p.dim), generator=generator) / 127
        cache = allocate_quantized(
            n_blocks, p.block_size, p.n_heads, p.dim, tau=torch.tensor(taus),
            mode="int8_static_fp4" if p.static else "int8_fp4",
            static_scale=steps if p.static else None,
            outlier_share=n_slots / n_places, residual_format=FORMATS[p.mantissa],
            residual_block=p.residual_block,
        )  # fmt: skip
        for name, value in POISON.items():
            if name != "scale" or not p.static:
                cache.tensors()[name].fill_(value)
        caches.append(cache)
    return caches


def append(
    p: Drawn, k: torch.Tensor, v: torch.Tensor, caches: list[QuantizedKV], places: torch.Tensor
) -> None:
    n_blocks = caches[0].codes.shape[0]
    constants = {
        "BLOCK_SIZE": p.block_size, "N_HEADS": p.n_heads, "HEAD_DIM": p.dim,
        "STATIC": p.static, "RESIDUAL_BLOCK": p.residual_block, "MANTISSA": p.mantissa,
        "LARGEST_CODE": LARGEST[FORMATS[p.mantissa]],
    }  # fmt: skip
    config = {
        "BLOCK_T": p.block_tokens, "BLOCK_HEADS": p.block_heads, "PDL": p.pdl,
        "num_warps": p.warps,
    }  # fmt: skip
    assert caches[0].free_slots is not None
    counts = p.n_tokens, n_blocks * p.block_size, caches[0].free_slots.shape[1]
    launch, more = append_rests_hopper.bind(k, v, config, p.max_programs, constants, counts)
    launch(k, v, *fields(caches[0]), *fields(caches[1]), places, *more)


@pytest.mark.parametrize("seed", SEEDS)
def test_random_problems_match_the_reference(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice, so that places have slots already; programs and atomic operations in any order."""
    p, generator = drawn(seed), torch.Generator().manual_seed(seed)
    machine = Machine(monkeypatch, [append_rests_hopper], early=set())
    machine.order = random.Random(seed)
    n_blocks = -(-(p.n_tokens + 5) // p.block_size)
    caches = caches_of(p, n_blocks, generator)
    for _ in range(2):
        k, v = numbers_of(p, generator)
        places = places_of(p, n_blocks * p.block_size, generator)
        before = [copy_of(cache) for cache in caches]
        append(p, k, v, caches, places)
        for was, cache, x in zip(before, caches, (k, v), strict=True):
            check_append(was, cache, x, places)
    assert machine.triggers == p.pdl


def test_wrong_slots_and_counts_stay_inside_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a place that has a slot past the pool, and of a stack that is said to be too high."""
    p = drawn(0)._replace(n_tokens=4, n_heads=1, block_heads=1, taus=[-1.0, -1.0], n_slots="few")
    Machine(monkeypatch, [append_rests_hopper], early=set())
    generator = torch.Generator().manual_seed(0)
    caches = caches_of(p, 16, generator)
    for cache in caches:
        assert cache.slots is not None
        assert cache.free_count is not None
        cache.slots.view(-1)[0] = 3
        cache.slots.view(-1)[1] = -2
        cache.free_count.fill_(100)
    k, v = numbers_of(p, generator)
    append(p, k, v, caches, torch.arange(4, dtype=p.places))
    for cache in caches:
        assert cache.slots is not None
        assert cache.slots.view(-1)[:5].tolist() == [3, -2, 2, 2, NO_SLOT]


def test_random_problems_have_what_matters() -> None:
    problems = [drawn(seed) for seed in SEEDS]
    wanted: dict[str, set[Any]] = {
        "dim": {64, 128, 256},
        "block_size": {1, 3, 16},
        "dtype": {BF16, FP16},
        "static": {False, True},
        "residual_block": {16, 32},
        "mantissa": {0, 1, 2},
        "n_slots": {"few", "enough", "65535"},
        "places": {torch.int32, torch.int64},
        "warps": {1, 2, 4},
        "block_heads": {1, 2, 4},
        "pdl": {False, True},
    }
    for name, values in wanted.items():
        for value in values:
            assert sum(getattr(p, name) == value for p in problems) > 1, (name, value)
    assert sum(p.tiles_of_a_warp > 2 for p in problems) > 3
    assert sum(p.tiles_of_a_warp == 1 for p in problems) > 3
    assert sum(p.n_tokens % p.block_tokens > 0 for p in problems) > 3
    assert sum(len({str(tau) for tau in p.taus}) > 1 for p in problems) > 10


def sizes_of(what: str) -> torch.Tensor:
    """As fp32, from 2^-100 on, where such sizes are not 0 to an append."""
    if what == "fp32":
        generator = torch.Generator().manual_seed(0)
        bits = torch.randint(27 << 23, 255 << 23, (100_000,), generator=generator)
        return bits.to(torch.int32).view(torch.float32)
    dtype = BF16 if what == "bf16" else FP16
    sizes = torch.arange(1 << 15).to(torch.int16).view(dtype).float()
    return sizes[(sizes >= 2.0**-100) & sizes.isfinite()]


@pytest.mark.parametrize("ulps", [-1, 0, 1])
@pytest.mark.parametrize("what", ["bf16", "fp16", "fp32"])
def test_the_division_is_exact(what: str, ulps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All sizes of 16 bits and some of 32, whichever neighbour of 1 / x the chip gives.

    The chip is said to be within 1 ulp of 1 / x; here it is within that of the nearest number.
    """
    machine = Machine(monkeypatch, [append_rests_hopper], early=set())
    machine.ulps = ulps
    sizes = sizes_of(what)
    assert len(sizes) == {"bf16": 228 * 128, "fp16": 0x7BFF, "fp32": 100_000}[what]
    found = append_rests_hopper._inverse(block(sizes))
    assert torch.equal(found, torch.full_like(sizes, 127.0) / sizes)
