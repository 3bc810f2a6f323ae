"""The body of append_quantized_kv with residuals for Hopper: refusals, what is compiled, results.

Without a GPU it is compiled for sm_90; tests/test_append_rests_plain.py runs it as plain Python.
"""

from __future__ import annotations

import json
import random
from typing import Any, NamedTuple

import pytest
import torch

import tkernels
from tests.append_outcome import check_append, copy_of
from tests.compiled_for import lines_of
from tkernels import append_rests_hopper, device
from tkernels import config as config_lookup
from tkernels.kv_format import (
    FIELDS,
    NO_SLOT,
    QuantizedKV,
    allocate_quantized,
    append_quantized_ref,
    dequantize_cache,
    fields,
    release_residuals_ref,
)
from tkernels.ops import append_quantized_kv as launcher
from tkernels.ops.append_quantized_kv import SPEC
from tkernels.quantized_cases import quantized_inputs, quantized_problem
from tkernels.registry import Config, Problem
from tkernels.testing import assert_right

SM90 = device.sm_facts(90)
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
HEADS, DIM, BLOCK = 8, 128, 16
TAU = 0.0125


def problem_of(dtype: torch.dtype = BF16, mode: str = "int8_fp4", **more: Any) -> Problem:
    sizes = {"tokens": 4096, "heads": HEADS, "head_dim": DIM, **more}
    return quantized_problem(dtype=dtype, mode=mode, **sizes)


@pytest.mark.parametrize(
    ("problem", "why"),
    [
        (problem_of(), None),
        (problem_of(FP16, head_dim=256), None),
        (problem_of(head_dim=64, residual_block=16), None),
        (problem_of(FP32), "needs bfloat16 or float16, got torch.float32"),
        (problem_of(mode="int8_static_fp4"), None),
        (problem_of(mode="int8"), "is for caches with residuals"),
        (problem_of(mode="int8_static"), "is for caches with residuals"),
        (problem_of(head_dim=96), "has head_dim 64, 128 or 256, got 96"),
    ],
)
def test_why_unfit(problem: Problem, why: str | None) -> None:
    said = append_rests_hopper.why_unfit(problem, SM90)
    assert said == (None if why is None else f"variant hopper {why}")
    chosen = SPEC.default_config(problem, SM90)
    assert chosen["variant"] == ("hopper" if why is None else "portable")
    assert SPEC.why_illegal(chosen, problem, SM90) is None


@pytest.mark.parametrize("dev", [device.sm_facts(80), device.sm_facts(100), device.ascend_facts()])
def test_why_unfit_elsewhere(dev: device.Device) -> None:
    assert f"got {dev.arch}" in str(append_rests_hopper.why_unfit(problem_of(), dev))
    assert SPEC.default_config(problem_of(), dev).get("variant", "portable") == "portable"
    assert "hopper" not in SPEC.space(dev).get("variant", [])


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"variant": "hoper"}, "variant must be portable or hopper, got 'hoper'"),
        ({"BLOCK_T": 2}, "BLOCK_T * BLOCK_HEADS of 4, got 2 * 1"),
        ({"BLOCK_HEADS": 2}, "BLOCK_T * BLOCK_HEADS of 4, got 4 * 2"),
        ({"num_warps": 8}, "programs_per_core of at most 4, got 8"),
        ({"STAGES": 2}, "variant hopper has STAGES 1"),
        ({"BY_TOKEN": True}, "variant hopper has BY_TOKEN False"),
        ({"programs_per_core": 24}, "programs_per_core of at most 8, got 24"),
        ({"BLOCK_HEADS": 16}, "BLOCK_HEADS=16 is no power of two that divides 8 heads"),
    ],
)
def test_why_illegal(changed: Config, why: str) -> None:
    base = SPEC.default_config(problem_of(), SM90)
    assert why in str(SPEC.why_illegal({**base, **changed}, problem_of(), SM90))


def test_static_scales_are_of_one_head() -> None:
    problem = problem_of(mode="int8_static_fp4")
    changed = {**SPEC.default_config(problem, SM90), "BLOCK_T": 2, "BLOCK_HEADS": 2}
    assert "BLOCK_HEADS 1 with static scales, got 2" in str(
        SPEC.why_illegal(changed, problem, SM90)
    )
    assert SPEC.why_illegal(changed, problem_of(), SM90) is None


@pytest.mark.parametrize("mode", ["int8_fp4", "int8_static_fp4"])
@pytest.mark.parametrize("heads", [1, 2, 3, 4, 6, 8, 12, 16, 32])
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("tokens", [1, 64, 512, 4096])
def test_the_default_is_legal_for_all_heads(heads: int, dim: int, tokens: int, mode: str) -> None:
    problem = problem_of(heads=heads, head_dim=dim, tokens=tokens, mode=mode)
    chosen = SPEC.default_config(problem, SM90)
    assert chosen["variant"] == "hopper"
    assert SPEC.why_illegal(chosen, problem, SM90) is None


@pytest.mark.parametrize(
    ("tokens", "expected"),  # warps, heads, programs of a core
    [(1, (2, 4, 8)), (64, (2, 4, 8)), (512, (2, 4, 8)), (4096, (4, 1, 8))],
)
def test_what_the_default_is(tokens: int, expected: tuple[int, ...]) -> None:
    """As measured: CONTRIBUTING, "Measured facts"."""
    chosen = SPEC.default_config(problem_of(tokens=tokens), SM90)
    names = ("num_warps", "BLOCK_HEADS", "programs_per_core")
    assert tuple(chosen[name] for name in names) == expected


class Strided(NamedTuple):
    """What is asked of k and of v."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def stride(self) -> tuple[int, ...]:
        return self.strides

    def element_size(self) -> int:
        return 2


@pytest.mark.parametrize(
    ("shape", "strides", "can"),
    [
        ((100, 8, 128), (1024, 128, 1), True),
        ((100, 8, 128), (128, 12800, 1), True),
        ((100, 8, 128), (0, 128, 1), False),
        ((100, 8, 128), (1024, 0, 1), False),
        ((100, 8, 128), (-1024, 128, 1), False),
        ((100, 8, 128), (1025, 128, 1), False),
        ((100, 8, 128), (1024, 132, 1), False),
        ((100, 8, 128), (2**31 - 8, 128, 1), True),
        ((100, 8, 128), (2**31, 128, 1), False),
        ((100, 8, 128), (1024, 2**31, 1), False),
        ((1, 8, 128), (2**31, 128, 1), False),
        ((1, 8, 128), (1025, 128, 1), True),  # a stride that is not stepped
        ((100, 1, 128), (128, 1025, 1), True),
        ((715_827_626, 1, 128), (128, 128, 1), True),  # three times that and 256, below 2^31
        ((715_827_627, 1, 128), (128, 128, 1), False),
        ((2**30, 1, 128), (128, 128, 1), False),
    ],
)
def test_can_address(shape: tuple[int, ...], strides: tuple[int, ...], can: bool) -> None:
    usual: Any = Strided(shape, (shape[1] * 128, 128, 1))
    odd: Any = Strided(shape, strides)
    for k, v in ((odd, usual), (usual, odd)):
        assert append_rests_hopper.can_address(k, v, 1000) is can


def test_can_address_places() -> None:
    x: Any = Strided((100, 8, 128), (1024, 128, 1))
    assert append_rests_hopper.can_address(x, x, 2**28 - 1)
    assert not append_rests_hopper.can_address(x, x, 2**28)


def shifted(tensor: torch.Tensor, numbers: int) -> torch.Tensor:
    """A copy that begins so many numbers behind an address that divides by 16."""
    made = torch.empty(tensor.numel() + numbers, dtype=tensor.dtype, device=tensor.device)
    assert made.data_ptr() % 16 == 0
    return made[numbers:].view(tensor.shape).copy_(tensor)


GIVEN = ("k", "v", *(f"{which}_{field}" for which in "kv" for field in FIELDS), "slot_mapping")


@pytest.mark.parametrize("remembered", [False, True])
@pytest.mark.parametrize("numbers", [1, 3, 4])
def test_addresses_choose_the_body(
    numbers: int, remembered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At each call, also where the plan is remembered; six tensors are read or stored in pieces."""
    ran: list[str] = []
    bound: list[str] = []

    def stub(variant: str) -> Any:
        def launch(*args: Any) -> None:
            assert all(a is b for a, b in zip(args, given.values(), strict=False))
            assert args[len(given) :] == (variant,)
            ran.append(variant)

        def bind(*args: Any) -> Any:
            bound.append(variant)
            return launch, (variant,)

        return bind

    def resolve(spec: Any, values: Any, config: Config | None) -> tuple[Config, int]:
        return {"variant": "hopper" if config is None else "portable"}, 1

    monkeypatch.setattr(launcher, "resolve", resolve)
    monkeypatch.setattr(launcher, "_bind_portable", stub("portable"))
    monkeypatch.setattr(append_rests_hopper, "bind", stub("hopper"))
    for memory in ("_plans", "_latest"):
        monkeypatch.setattr(config_lookup, memory, {})
    k, places = torch.zeros(2, 2, 64, dtype=BF16), torch.arange(2)
    caches = [allocate_quantized(2, 3, 2, 64, tau=TAU) for _ in range(2)]
    tensors = (k, k.clone(), *fields(caches[0]), *fields(caches[1]), places)
    aligned = {name: shifted(t, 0) for name, t in zip(GIVEN, tensors, strict=True)}
    in_pieces = {"k", "v", "k_codes", "v_codes", "k_residual", "v_residual"}
    for name, tensor in aligned.items():
        for given in (aligned, aligned | {name: shifted(tensor, numbers)}, aligned):
            if not remembered:
                config_lookup._plans.clear()
                config_lookup._latest.clear()
            SPEC.launch(**given)
        assert ran == ["hopper", "portable" if name in in_pieces else "hopper", "hopper"], name
        ran.clear()
    if remembered:
        assert bound == ["hopper", "portable"]


CHILD = r"""
import json, re, sys
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from tkernels import device, offline
from tkernels.ops.append_quantized_kv import SPEC
from tkernels.quantized_cases import quantized_problem
for dtype, dim, residual_block, bits, mode in json.loads(sys.stdin.read()):
    problem = quantized_problem(
        4096, 8, dim, getattr(torch, dtype), mode, residual_block=residual_block,
        mantissa_bits=bits)
    with FakeTensorMode(), offline.record_launches() as launches:
        inputs = SPEC.make_inputs(problem, torch.device("cpu"))
        SPEC.launch(**inputs, config=SPEC.default_config(problem, device.current()))
    (launch,) = launches
    built = offline.compiled_cuda(launch, 90)
    ptx = built.asm["ptx"]
    print(json.dumps({
        "name": re.search(r"\.entry (\w+)", ptx).group(1),
        "grid": launch.grid[0],
        "wide": len(re.findall(r"ld\.global\.v4\.b32", ptx)),
        "codes": len(re.findall(r"st\.global\.v4\.b32", ptx)),
        "votes": len(re.findall(r"redux\.sync\.or\.b32", ptx)),
        "most": re.search(r"\.maxnreg (\d+)", ptx).group(1),
        "barriers": len(re.findall(r"bar\.sync|barrier\.sync", ptx)),
        "shared": built.metadata.shared,
    }))
"""


def test_compiles_for_hopper() -> None:
    """With loads and stores of 16 bytes, and registers for as many programs as are started.

    Warps go their own ways: none waits for another but where static scales are laid down.
    """
    cases = [
        ("bfloat16", 128, 32, 1, "int8_fp4"),
        ("float16", 128, 16, 0, "int8_fp4"),
        ("bfloat16", 64, 16, 2, "int8_fp4"),
        ("float16", 256, 32, 1, "int8_fp4"),
        ("bfloat16", 128, 32, 1, "int8_static_fp4"),
        ("float16", 64, 16, 1, "int8_static_fp4"),
        ("bfloat16", 256, 32, 1, "int8_static_fp4"),
    ]
    lines = [json.loads(line) for line in lines_of(CHILD, given=json.dumps(cases))]
    for (_, dim, _, _, mode), line in zip(cases, lines, strict=True):
        assert line["name"] == "_append_rests_hopper_kernel"
        assert line["grid"] == 8 * 132
        assert line["wide"] == 4  # of the first tile and of the next
        assert line["codes"] == 1
        assert line["most"] == "64"
        assert line["votes"] == 3  # which rows have rests, want slots, have got some
        static = "static" in mode
        assert line["shared"] == static * 2 * dim * 4
        assert line["barriers"] == static


# ---- on the device -----------------------------------------------------------------------------

gpu = pytest.mark.gpu
needs_sm90 = pytest.mark.skipif(
    device.current().arch != "sm90", reason="needs an sm90 GPU; this machine has none"
)


def random_problem(seed: int) -> tuple[Problem, Config]:
    pick = random.Random(seed).choice
    dim, mode = pick((64, 128, 128, 256)), pick(("int8_fp4", "int8_fp4", "int8_static_fp4"))
    problem = quantized_problem(
        pick((1, 2, 7, 64, 301, 2500)),
        pick((1, 2, 3, 8, 12)),
        dim,
        pick((BF16, FP16)),
        mode,
        block_size=pick((1, 3, 16, 32)),
        residual_block=pick((16, 32)),
        skip_every=pick((0, 3, 5)),
        mantissa_bits=pick((0, 1, 2)),
        outlier_every=pick((1, 2, 25, 10_000)),
        scattered=pick((False, True)),
    )
    warps = pick((1, 2, 2, 4, 16))
    rows = append_rests_hopper.rows_of(dim)
    heads = pick([h for h in (1, 2, 4, 8) if problem["num_kv_heads"] % h == 0 and h <= rows])
    if problem["static"]:
        heads = 1
    config = {
        **SPEC.default_config(problem, SM90),
        "BLOCK_T": rows // heads,
        "BLOCK_HEADS": heads,
        "num_warps": warps,
        "programs_per_core": pick([n for n in (1, 2, 4, 8, 16, 32) if n * warps <= 32]),
        "PDL": pick((False, True)),
    }
    assert SPEC.why_illegal(config, problem, SM90) is None
    return problem, config


def test_random_problems_differ_in_what_matters() -> None:
    drawn = [random_problem(seed) for seed in range(64)]
    assert sum(p["n_tokens"] % c["BLOCK_T"] > 0 for p, c in drawn) > 8
    assert sum(c["BLOCK_HEADS"] > 1 for _, c in drawn) > 8
    assert sum(p["static"] for p, _ in drawn) > 8
    several = 0
    for p, c in drawn:
        groups = 2 * p["num_kv_heads"] // c["BLOCK_HEADS"]
        programs = max(1, c["programs_per_core"] * SM90.num_cores // groups)
        several += -(-p["n_tokens"] // c["BLOCK_T"]) > programs * c["num_warps"]
    assert several > 3  # go through several tiles


@gpu
@needs_sm90
@pytest.mark.parametrize("seed", range(64))
def test_random_problems_match_the_reference(seed: int, dev: torch.device) -> None:
    problem, config = random_problem(seed)
    inputs = quantized_inputs(problem, dev)
    kept = {name: inputs[name].clone() for name in SPEC.mutates}
    SPEC.launch(**inputs, config=config)
    got = [inputs[name] for name in SPEC.mutates]
    assert_right(SPEC, {**inputs, **kept}, got)


def cache_of(dev: torch.device, tokens: int, **more: Any) -> QuantizedKV:
    if "fp4" in more.get("mode", "int8_fp4"):
        more = {"tau": TAU, "outlier_share": 1.0, **more}
    return allocate_quantized(-(-tokens // BLOCK), BLOCK, HEADS, DIM, device=dev, **more)


def append(
    k: torch.Tensor, v: torch.Tensor, k_cache: QuantizedKV, v_cache: QuantizedKV, places: Any
) -> None:
    """By this body, whatever is stored for such a problem."""
    mode = "int8_static_fp4" if k_cache.scale.dim() == 2 else "int8_fp4"
    config = SPEC.default_config(problem_of(k.dtype, mode, tokens=len(k)), SM90)
    assert config["variant"] == "hopper"
    tkernels.append_quantized_kv(k, v, k_cache, v_cache, places, config=config)


def numbers(tokens: int, dev: torch.device, seed: int, share: float = 0.1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, HEADS, DIM, generator=generator)
    x[torch.rand(tokens, HEADS, generator=generator) < share, 5 + seed % 7] = 60.0
    return x.to(BF16).to(dev)


def equal_caches(got: QuantizedKV, expected: QuantizedKV) -> None:
    """In all that they hold; in which slots of the pool is the device's choice."""
    for name, a in got.tensors().items():
        if name in ("codes", "scale", "dropped", "free_count"):
            b = expected.tensors()[name]
            assert torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)), name
    assert got.slots is not None
    assert expected.slots is not None
    assert torch.equal(got.slots != NO_SLOT, expected.slots != NO_SLOT)
    read, right = dequantize_cache(got), dequantize_cache(expected)
    assert torch.equal(read.nan_to_num(7.0), right.nan_to_num(7.0))


@gpu
@needs_sm90
def test_a_long_life(dev: torch.device) -> None:
    """Appends over each other and releases in turn."""
    generator = torch.Generator().manual_seed(3)
    mine, theirs = ([cache_of(dev, 256) for _ in range(2)] for _ in range(2))
    for step in range(12):
        k, v = numbers(100, dev, step, share=0.2), numbers(100, dev, 50 + step, share=0.4)
        places = torch.randperm(256, generator=generator)[:100].to(dev)
        places[::9] = -1
        append(k, v, *mine, places)
        append_quantized_ref(k, theirs[0], places)
        append_quantized_ref(v, theirs[1], places)
        if step % 3 == 2:
            blocks = torch.randperm(16, generator=generator)[:5].to(dev)
            for cache in mine:
                tkernels.release_residual_slots(
                    cache.slots, cache.free_slots, cache.free_count, blocks
                )
            for cache in theirs:
                release_residuals_ref(cache, blocks)
        for got, expected in zip(mine, theirs, strict=True):
            equal_caches(got, expected)
            assert got.slots is not None
            assert got.free_slots is not None
            assert got.free_count is not None
            for head in range(HEADS):  # each slot is free once, or held once
                held = got.slots[:, head][got.slots[:, head] != NO_SLOT].tolist()
                free = got.free_slots[head, : int(got.free_count[head])].tolist()
                assert sorted([*held, *free]) == list(range(got.free_slots.shape[1]))


@gpu
@needs_sm90
def test_a_pool_that_runs_empty(dev: torch.device) -> None:
    mine, theirs = ([cache_of(dev, 512, outlier_share=0.1) for _ in range(2)] for _ in range(2))
    k, v = numbers(512, dev, 0, share=0.5), numbers(512, dev, 1, share=0.6)
    places = torch.arange(512, device=dev)
    append(k, v, *mine, places)
    for x, got, expected in zip((k, v), mine, theirs, strict=True):
        append_quantized_ref(x, expected, places)
        assert got.slots is not None
        assert expected.slots is not None
        assert got.dropped is not None
        assert expected.dropped is not None
        assert got.free_count is not None
        assert not bool(got.free_count.any())
        assert bool((got.dropped > 100).all())
        assert torch.equal(got.dropped, expected.dropped)
        assert torch.equal(got.codes, expected.codes)
        held = (got.slots != NO_SLOT).transpose(1, 2).reshape(512, HEADS)
        assert torch.equal(held.sum(0), (expected.slots != NO_SLOT).sum((0, 2)))
        # Without a residual a token has int8's value, and with one a better value.
        read = dequantize_cache(got).flatten(0, 1)
        plain = dequantize_cache(got, residuals=False).flatten(0, 1)
        assert torch.equal(read[~held], plain[~held])
        error, without = (((t - x).square().sum(-1)) for t in (read, plain))
        assert bool((error[held] < 0.1 * without[held]).all())


@gpu
@needs_sm90
@pytest.mark.parametrize("mode", ["int8_fp4", "int8_static_fp4"])
def test_strides_thresholds_and_places_of_all_kinds(mode: str, dev: torch.device) -> None:
    """K lies between Q and V, and V's heads apart; heads have thresholds of their own; places are
    of 32 bits, some beyond the end; slots are 65534 and those below."""
    tau = torch.tensor([TAU, -1.0, 0.0, float("nan"), 0.009, 1e30, TAU, TAU])
    places = torch.randperm(256, generator=torch.Generator().manual_seed(0))[:70].int().to(dev)
    places[::7], places[1::14], places[2::14] = -1, 256, 2**31 - 1
    # Steps of channels differ, and some are too small for what comes.
    steps = torch.rand(HEADS, DIM, generator=torch.Generator().manual_seed(1)) * 8 / 127 + 2.0**-127
    more = {"mode": mode, "static_scale": steps if "static" in mode else None}
    k_cache, v_cache = (
        cache_of(dev, 256, tau=tau, outlier_share=65535 / 256, **more) for _ in range(2)
    )
    assert k_cache.free_slots is not None
    assert k_cache.free_slots[:, -1].tolist() == [65534] * HEADS
    for step in range(2):  # then into slots that places have
        packed = numbers(3 * 70, dev, step, share=0.3).view(70, 3 * HEADS, DIM)
        k = packed[:, HEADS : 2 * HEADS]
        v = numbers(70, dev, 2 + step, share=0.3).transpose(0, 1).contiguous().transpose(0, 1)
        assert k.stride() == (3 * HEADS * DIM, DIM, 1)
        assert v.stride() == (DIM, 70 * DIM, 1)
        before = copy_of(k_cache), copy_of(v_cache)
        append(k, v, k_cache, v_cache, places)
        check_append(before[0], k_cache, k, places)
        check_append(before[1], v_cache, v, places)


@gpu
@needs_sm90
@pytest.mark.parametrize("tau", [-1.0, 0.0, TAU, 1e30])
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_numbers_of_all_sizes(tau: float, dtype: torch.dtype, dev: torch.device) -> None:
    """Zeros, single numbers, the largest and the least, NaN and infinite ones."""
    top = torch.finfo(dtype).max
    exponents = torch.arange(-148, 128).clamp(max=15 if dtype == FP16 else 127)
    x = torch.randn(exponents.numel(), HEADS, DIM, generator=torch.Generator().manual_seed(0))
    x = (x.double() * 2.0 ** exponents[:, None, None].double()).clamp(-top, top).to(dtype)
    x[0] = 0.0
    x[1], x[2, :, 7] = 3.0, top
    x[3], x[4, :, 1:] = top, 0.0
    x[5, 1, 3], x[6, 2, 127], x[7, 3, 64], x[8] = float("nan"), float("inf"), -float("inf"), -top
    k, tokens = x.to(dev), x.shape[0]
    v = k.flip(1)
    places = torch.randperm(tokens, generator=torch.Generator().manual_seed(1)).to(dev)
    mine, theirs = ([cache_of(dev, tokens, tau=tau) for _ in range(2)] for _ in range(2))
    append(k, v, *mine, places)
    clean = torch.ones(tokens, dtype=torch.bool, device=dev)
    clean[5:8] = False
    for x, got, expected in zip((k, v), mine, theirs, strict=True):
        append_quantized_ref(x, expected, places)
        rows, right = (dequantize_cache(c).flatten(0, 1)[places] for c in (got, expected))
        assert torch.equal(rows[clean], right[clean])
        assert torch.equal(rows[5:8].isnan(), right[5:8].isnan())
        codes, right = (c.codes.flatten(0, 1)[places] for c in (got, expected))
        assert torch.equal(codes[clean], right[clean])


@gpu
@needs_sm90
@pytest.mark.parametrize("numbers_behind", [0, 1, 4])
@pytest.mark.parametrize("of", [0, 1])
@pytest.mark.parametrize("what", ["address", "stride", "codes", "residual"])
def test_what_does_not_divide_by_16_bytes(
    what: str, of: int, numbers_behind: int, dev: torch.device
) -> None:
    """Of K (0) or of V (1): has the portable body, and equals the reference."""
    given = [numbers(70, dev, seed) for seed in range(2)]
    places = torch.arange(70, device=dev)
    mine, theirs = ([cache_of(dev, 70) for _ in range(2)] for _ in range(2))
    x = given[of]
    if what == "address":
        given[of] = shifted(x, numbers_behind)
    elif what == "stride":
        wide = torch.empty(70, HEADS, DIM + numbers_behind, dtype=x.dtype, device=dev)
        given[of] = wide[..., :DIM].copy_(x)
    else:
        moved = shifted(mine[of].tensors()[what], numbers_behind)
        mine[of] = mine[of]._replace(**{what: moved})
    append(*given, *mine, places)
    for x, got, expected in zip(given, mine, theirs, strict=True):
        append_quantized_ref(x, expected, places)
        equal_caches(got, expected)


@gpu
@needs_sm90
def test_nothing_else_is_touched(dev: torch.device) -> None:
    """Codes, scales and slots of other places, and rows of slots that are free, keep what they
    had; a captured launch does as the one before."""
    caches = [cache_of(dev, 256) for _ in range(2)]
    k, v = numbers(50, dev, 0, share=0.3), numbers(50, dev, 1, share=0.3)
    places = torch.randperm(256, generator=torch.Generator().manual_seed(0))[:50].to(dev)
    others = torch.ones(256, dtype=torch.bool, device=dev)
    others[places] = False
    poison = {"codes": 77, "scale": float("nan"), "residual": 0xA5, "residual_scale": 0xFF}
    for cache in caches:
        for name, value in poison.items():
            cache.tensors()[name].fill_(value)
    append(k, v, *caches, places)
    for cache in caches:
        assert cache.slots is not None
        codes = cache.codes.flatten(0, 1)
        scale, slots = (t.transpose(1, 2).flatten(0, 1) for t in (cache.scale, cache.slots))
        assert bool((codes[others] == 77).all())
        assert bool(scale[others].isnan().all())
        assert bool((slots[others] == NO_SLOT).all())
        assert bool(scale[places].isfinite().all())
        for head in range(HEADS):
            free = free_of(cache, head)
            assert 0 < int((~free).sum()) < 50
            for name in ("residual", "residual_scale"):
                assert bool((cache.tensors()[name][head][free] == poison[name]).all())
    before = [copy_of(cache) for cache in caches]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        append(k, v, *caches, places)
    for cache in caches:
        cache.codes[places // BLOCK, places % BLOCK] = 0
        cache.scale[places // BLOCK, :, places % BLOCK] = 0.0
        for head in range(HEADS):
            for name in ("residual", "residual_scale"):
                cache.tensors()[name][head][~free_of(cache, head)] = 0
    graph.replay()
    for cache, was in zip(caches, before, strict=True):
        for name, t in cache.tensors().items():
            assert torch.equal(t.nan_to_num(7.0), was.tensors()[name].nan_to_num(7.0)), name


def free_of(cache: QuantizedKV, head: int) -> torch.Tensor:
    """Which slots of a head no place has."""
    assert cache.slots is not None
    assert cache.residual is not None
    held = cache.slots[:, head][cache.slots[:, head] != NO_SLOT].long()
    free = torch.ones(cache.residual.shape[1], dtype=torch.bool, device=held.device)
    free[held] = False
    return free
