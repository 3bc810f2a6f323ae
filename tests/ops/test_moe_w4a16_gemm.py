"""What is special to moe_w4a16_gemm: rows and scales of each expert, what is never read, pieces."""

from __future__ import annotations

import math
import random
import re
from typing import Any

import pytest
import torch

import tkernels
from tkernels import device, moe_w4a16_unpacked
from tkernels.config import force_config, resolve
from tkernels.device import sm_facts
from tkernels.moe_w4a16_cases import moe_w4_inputs, moe_w4_peers, moe_w4_problem
from tkernels.ops import moe_gemm
from tkernels.ops import moe_w4a16_gemm as op
from tkernels.ops.moe_w4a16_gemm import SPEC
from tkernels.registry import Config, Problem
from tkernels.testing import assert_close, guarded, poisoned_memory
from tkernels.w4_format import dequantize_w4

pytestmark = pytest.mark.thin(3)

T, E, TOP_K, N, K = 9, 5, 2, 48, 256
INTERPRETED = device.KIND == "cpu"


def problem_of(**more: Any) -> dict[str, Any]:
    sizes = {"tokens": T, "experts": E, "k_choices": TOP_K, "n": N, "k": K, "dtype": torch.float16}
    return moe_w4_problem(**{**sizes, **more})


def inputs_of(dev: torch.device, **more: Any) -> dict[str, Any]:
    return moe_w4_inputs(problem_of(**more), dev)


def exact_inputs(dev: torch.device, **more: Any) -> dict[str, Any]:
    """Sums of which every part is a small integer times a power of two: no order rounds."""
    inputs = inputs_of(dev, first=False, **more)
    generator = torch.Generator().manual_seed(1)
    x = torch.randint(-2, 3, inputs["x"].shape, generator=generator)
    powers = torch.randint(-3, 1, inputs["weight_scale"].shape, generator=generator)
    inputs["x"] = x.to(inputs["x"].dtype).to(dev)
    inputs["weight_scale"] = torch.exp2(powers.float()).to(inputs["weight_scale"].dtype).to(dev)
    del inputs["topk_weights"]
    return inputs


def dispatched(ids: list[list[int]], experts: int, dev: torch.device) -> dict[str, torch.Tensor]:
    """What ``moe_dispatch`` makes of the experts of tokens; numbers past the last are elsewhere."""
    everywhere = max(experts, 1 + max(map(max, ids)))
    here = torch.arange(everywhere, dtype=torch.int32, device=dev)
    here[experts:] = -1
    offsets, rows, _ = tkernels.reference.moe_dispatch(
        torch.tensor(ids, dtype=torch.int32, device=dev), num_experts=everywhere, expert_map=here,
        num_local_experts=experts,
    )  # fmt: skip
    return {"expert_offsets": offsets, "sorted_ids": rows}


def config_of(problem: Problem, **changes: Any) -> Config:
    """The portable default, tiled as is said; what a device has none of is left out."""
    default = op._portable_config(problem, device.current())
    space = SPEC.space(device.current())
    config = {**default, **{n: v for n, v in changes.items() if n in space}}
    if device.current().is_npu:
        config |= {"variant": "portable", "BLOCK_M": max(16, config["BLOCK_M"]), "BLOCK_K": 128}
    assert SPEC.why_illegal(config, problem, device.current()) is None, config
    return config


def run(**inputs: Any) -> torch.Tensor:
    """Results that nothing was written to would be NaN."""
    with poisoned_memory():
        return tkernels.moe_w4a16_gemm(**inputs)


def assert_right(got: torch.Tensor, inputs: dict[str, Any], rows: int | None = None) -> None:
    """Equal to the reference in fp32, in the first ``rows`` rows."""
    precise = {n: v for n, v in inputs.items() if n != "config"}
    precise["x"] = precise["x"].float()
    truth = tkernels.reference.moe_w4a16_gemm(**precise)
    factor = 1.0 if INTERPRETED else SPEC.tolerance  # on Hopper many rows have rounded weights
    assert_close(got[:rows], truth[:rows], what="moe_w4a16_gemm", factor=factor)


SMALL = {"BLOCK_N": 16, "BLOCK_K": 128, "num_warps": 1, "num_stages": 2, "variant": "portable"}
UNPACKED = {**moe_w4a16_unpacked.FIXED, "BLOCK_N": 16, "BLOCK_K": 128, "num_warps": 1}
WAYS: dict[str, dict[str, Any]] = {
    "default": {},
    "eight": {**SMALL, "BLOCK_M": 8, "SWAP": True},
    "sixteen": {**SMALL, "BLOCK_M": 16, "SWAP": False},
    "turned": {**SMALL, "BLOCK_M": 32, "BLOCK_K": 256, "SWAP": True},
    "persistent": {**SMALL, "BLOCK_M": 8, "SWAP": True, "programs_per_core": 1},
    "unpacked": UNPACKED,
}
each_way = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
each_product = pytest.mark.parametrize("first", [True, False], ids=["gate_up", "down"])


# ---- the product -------------------------------------------------------------------------------


@each_way
@pytest.mark.parametrize(
    ("zero", "dtype"), [(False, torch.bfloat16), (True, torch.float16)], ids=["bf16", "zeros-fp16"]
)
@pytest.mark.parametrize("group", [32, 128, K])
def test_exact_sums_are_exact(
    way: dict[str, Any], zero: bool, group: int, dtype: torch.dtype, dev: torch.device
) -> None:
    """Bit for bit: each nibble meets its own column of x, its group's scale and its expert."""
    more = {"group": group, "zero": zero, "dtype": dtype}
    inputs = exact_inputs(dev, **more)
    problem = problem_of(first=False, **more)
    got = run(**inputs, config=config_of(problem, **way))
    assert torch.equal(got, tkernels.reference.moe_w4a16_gemm(**inputs))


def test_the_definition_in_plain_python(dev: torch.device) -> None:
    """One row, one column of weights, all that the formula names, without torch."""
    inputs = exact_inputs(dev, zero=True, group=64)
    got = run(**inputs)
    p, n = 7, 11
    ends = inputs["expert_offsets"].tolist()
    e = next(i for i in range(E) if ends[i] <= p < ends[i + 1])
    words, x = inputs["weight"][e, n].tolist(), inputs["x"][p].tolist()
    scale, zero = inputs["weight_scale"][e, n].tolist(), inputs["weight_zero"][e, n].tolist()
    total = 0.0
    for k in range(K):
        q = (words[k // 8] & 0xFFFFFFFF) >> (4 * (k % 8)) & 15
        total += x[k] * (q - zero[k // 64]) * scale[k // 64]
    assert got[p, n].cpu() == torch.tensor(total).to(got.dtype)


def test_random_configs(dev: torch.device) -> None:
    """Of the whole space, for problems of any shape."""
    rng = random.Random(3)
    dev_facts, space = device.current(), SPEC.space(device.current())
    for _ in range(12 if INTERPRETED else 200):
        group, groups = rng.choice([32, 64, 128, 256]), rng.choice([1, 2, 3])
        dtype = rng.choice([torch.bfloat16, torch.float16])
        problem = moe_w4_problem(
            rng.choice([1, 3, 20, 70]), rng.choice([4, 7]), rng.choice([1, 2, 4]),
            2 * rng.randint(1, 40), group * groups, dtype, first=rng.random() < 0.5, group=group,
            zero=rng.random() < 0.5, scale=rng.choice([dtype, torch.float32]),
            routing=rng.choice(["uniform", "one"]),
        )  # fmt: skip
        while True:
            config = {name: rng.choice(values) for name, values in space.items()}
            if config.get("variant") == "unpacked":
                config |= moe_w4a16_unpacked.FIXED
            if SPEC.why_illegal(config, problem, dev_facts) is None:
                break
        inputs = moe_w4_inputs(problem, dev)
        try:
            assert_right(run(**inputs, config=config), inputs)
        except AssertionError as error:
            raise AssertionError(f"{problem} with {config}: {error}") from None


@pytest.mark.gpu
@each_product
@pytest.mark.parametrize("tokens", [1, 16, 64, 512, 4096])
@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_large_ones(
    tokens: int, zero: bool, dtype: torch.dtype, first: bool, dev: torch.device
) -> None:
    sizes = (1536, 2048) if first else (2048, 768)
    inputs = moe_w4_inputs(
        moe_w4_problem(tokens, 32, 4, *sizes, dtype, first=first, zero=zero), dev
    )
    assert_right(run(**inputs), inputs)


def test_the_peer_multiplies_the_same_weights(dev: torch.device) -> None:
    inputs = inputs_of(dev, dtype=torch.bfloat16, zero=True)
    expected = tkernels.reference.moe_w4a16_gemm(**inputs).float()
    assert_close(moe_w4_peers(inputs)["bf16"](), expected, what="bf16", factor=2)
    assert moe_w4_peers(inputs_of(dev)) == {}


# ---- which rows --------------------------------------------------------------------------------


@each_way
@each_product
def test_rows_of_no_expert_are_left_alone(
    way: dict[str, Any], first: bool, dev: torch.device
) -> None:
    """Whatever stands in sorted_ids there, and round out."""
    problem = problem_of(first=first)
    ids = [[t % 9, (t + 4) % 9] for t in range(T)]  # experts 5 to 8 live elsewhere
    inputs = {**moe_w4_inputs(problem, dev), **dispatched(ids, E, dev)}
    there = int(inputs["expert_offsets"][-1])
    assert E < there < T * TOP_K
    strays = torch.tensor([-1, 2**31 - 1, -(2**31), T * TOP_K], device=dev).int()
    inputs["sorted_ids"][there:] = strays.repeat(5)[: T * TOP_K - there]
    if not first:
        inputs["x"][there:] = math.nan
    out = guarded(torch.full((T * TOP_K, N // 2 if first else N), 77.0, device=dev).half())
    got = run(**inputs, out=out.tensor, config=config_of(problem, **way))
    assert got is out.tensor
    out.check("out")
    assert bool((got[there:] == 77).all())
    assert_right(got, inputs, there)


@each_product
def test_numbers_of_no_assignment_spoil_their_rows_alone(first: bool, dev: torch.device) -> None:
    """Nothing is read where they would lie."""
    inputs = inputs_of(dev, first=first)
    right = run(**inputs)
    inputs["sorted_ids"][[0, 3]] = torch.tensor([2**30, -5], device=dev).int()
    got = run(**inputs)
    others = [p for p in range(len(right)) if p not in (0, 3)]
    assert torch.equal(got[others], right[others])


@each_way
@pytest.mark.parametrize("expert", [0, 2, E - 1])
def test_all_on_one_expert(expert: int, way: dict[str, Any], dev: torch.device) -> None:
    """More rows than a tile has, for one; for the others, whose scales are NaN, none."""
    problem = problem_of(tokens=37, k_choices=1)
    inputs = {**moe_w4_inputs(problem, dev), **dispatched([[expert]] * 37, E, dev)}
    inputs["weight_scale"][[e for e in range(E) if e != expert]] = math.nan
    assert_right(run(**inputs, config=config_of(problem, **way)), inputs)


def test_no_tokens(dev: torch.device) -> None:
    inputs = inputs_of(dev)
    none = {
        "x": inputs["x"][:0],
        "sorted_ids": inputs["sorted_ids"][:0],
        "expert_offsets": torch.zeros_like(inputs["expert_offsets"]),
    }
    out = torch.empty(0, N // 2, dtype=torch.float16, device=dev)
    assert tkernels.moe_w4a16_gemm(**{**inputs, **none}, out=out) is out
    assert tkernels.moe_w4a16_gemm(**{**inputs, **none}).shape == (0, N // 2)


@each_way
def test_no_token_for_these_experts(way: dict[str, Any], dev: torch.device) -> None:
    problem = problem_of()
    inputs = moe_w4_inputs(problem, dev) | dispatched([[7, 8]] * T, E, dev)
    out = torch.full((T * TOP_K, N // 2), 77.0, dtype=torch.float16, device=dev)
    assert bool((run(**inputs, out=out, config=config_of(problem, **way)) == 77).all())


# ---- which numbers -----------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:invalid value")  # of NumPy, in the interpreter
@each_way
@each_product
@pytest.mark.parametrize(("value", "group"), [(math.nan, 32), (math.inf, 128)])
def test_bad_numbers_stay_in_their_rows(
    value: float, group: int, first: bool, way: dict[str, Any], dev: torch.device
) -> None:
    problem = problem_of(first=first, group=group)
    inputs, config = moe_w4_inputs(problem, dev), config_of(problem, **way)
    before = run(**inputs, config=config)
    inputs["x"][4, 77] = value
    got = run(**inputs, config=config)
    ids = inputs["sorted_ids"]
    bad = ids // TOP_K == 4 if first else torch.arange(len(ids), device=dev) == 4
    assert torch.equal(got[~bad], before[~bad])
    assert not got[bad].isfinite().all(1).any()


@each_way
@pytest.mark.parametrize("group", [32, 72])
def test_what_is_beside_the_matrices_is_not_read(
    group: int, way: dict[str, Any], dev: torch.device
) -> None:
    """Padded rows of x and out; behind the weights' last rows NaN, and columns that end in a step.

    A step reads scales of groups that are not there unless it is kept from it: of the next row,
    and, in the last one of all, behind the tensor.
    """
    k = 96 if group == 32 else 72
    problem = problem_of(n=34, k=k, group=group, first=False, dtype=torch.bfloat16)
    inputs, config = moe_w4_inputs(problem, dev), config_of(problem, **way)
    expected = run(**inputs, config=config)
    assert_right(expected, inputs)
    inputs["x"] = guarded(inputs["x"]).tensor
    for name, spoilt in (("weight", 0x77777777), ("weight_scale", math.nan)):
        t = inputs[name]
        memory = torch.full((t.numel() + 4096,), spoilt, dtype=t.dtype, device=dev)
        memory[: t.numel()] = t.flatten()
        inputs[name] = memory[: t.numel()].view(t.shape)
    out = guarded(torch.full_like(expected, 77.0))
    assert torch.equal(run(**inputs, config=config, out=out.tensor), expected)
    out.check("out")


@each_way
def test_scales_of_odd_addresses(way: dict[str, Any], dev: torch.device) -> None:
    """Weights, scales and x may begin at any number of their kind."""
    problem = problem_of()
    inputs, config = moe_w4_inputs(problem, dev), config_of(problem, **way)
    expected = run(**inputs, config=config)
    for name in ("x", "weight", "weight_scale"):
        t = inputs[name]
        memory = torch.empty(t.numel() + 1, dtype=t.dtype, device=dev)
        inputs[name] = memory[1:].view(t.shape).copy_(t)
    assert_close(run(**inputs, config=config), expected.float(), what="odd addresses")


# ---- weights unpacked --------------------------------------------------------------------------


def gpu_only() -> None:
    if device.current().is_npu:
        pytest.skip("variant unpacked needs an NVIDIA device")


@each_product
@pytest.mark.parametrize("piece", [1, 2, 4])
def test_pieces_of_the_experts(
    piece: int, first: bool, monkeypatch: pytest.MonkeyPatch, dev: torch.device
) -> None:
    """Each has its weights, scales, zero points and rows; rows of none stay."""
    gpu_only()
    monkeypatch.setattr(moe_w4a16_unpacked, "experts_at_once", lambda *_: piece)
    problem = problem_of(tokens=30, first=first, zero=True, group=64)
    ids = [[t % 7, (t * t + 3) % 7] for t in range(30)]
    inputs = {**moe_w4_inputs(problem, dev), **dispatched(ids, E, dev)}
    there = int(inputs["expert_offsets"][-1])
    out = guarded(torch.full((60, N // 2 if first else N), 77.0, device=dev).half())
    got = run(**inputs, out=out.tensor, config=config_of(problem, **UNPACKED))
    out.check("out")
    assert bool((got[there:] == 77).all())
    assert_right(got, inputs, there)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize(("n", "k", "group"), [(5, 96, 32), (17, 256, 64), (1, 8, 8)])
def test_unpacked_weights_are_those_of_the_format(
    n: int, k: int, group: int, zero: bool, dtype: torch.dtype, dev: torch.device
) -> None:
    """x is the unit matrix, once for each expert, so that results are weights, bit by bit."""
    gpu_only()
    problem = moe_w4_problem(3 * k, 3, 1, n, k, dtype, first=False, group=group, zero=zero)
    inputs = moe_w4_inputs(problem, dev) | dispatched(
        [[e] for e in range(3) for _ in range(k)], 3, dev
    )
    del inputs["topk_weights"]
    inputs["x"] = torch.eye(k, dtype=dtype, device=dev).repeat(3, 1)
    got = run(**inputs, config=config_of(problem, **UNPACKED)).view(3, k, n)
    for e in range(3):
        zero_e = inputs["weight_zero"][e] if zero else None
        dense = dequantize_w4(inputs["weight"][e], inputs["weight_scale"][e], zero_e)
        assert torch.equal(got[e].t(), dense.to(dtype))


def test_a_piece_fits_the_workspace() -> None:
    at_once, room = moe_w4a16_unpacked.experts_at_once, moe_w4a16_unpacked.WORKSPACE
    assert at_once(128, 1536, 2048) == 20
    assert at_once(128, 2048, 768) == 32  # four alike
    assert at_once(5, 48, 256) == 5
    for e in (1, 3, 5, 60, 128, 4096):
        for n in (1, 300, 3072, 28672):
            for k in (8, 768, 7168):
                piece = at_once(e, n, k)
                assert 1 <= piece <= e
                assert 2 * piece * n * k <= room or piece == 1
                assert piece == e or piece < 4 or piece % 4 == 0


def test_many_rows_are_of_unpacked_weights() -> None:
    """Where they can be; elsewhere they go by the products of exact weights."""
    ampere = sm_facts(80)
    for tokens, variant in ((1023, "portable"), (1024, "unpacked")):
        problem = moe_w4_problem(tokens * 2, 128, 8, 1536, 2048)
        assert SPEC.default_config(problem, ampere)["variant"] == variant
    fp32 = moe_w4_problem(4096, 128, 8, 1536, 2048, torch.float16, scale=torch.float32)
    assert SPEC.default_config(fp32, ampere)["variant"] == "portable"


def test_a_piece_has_the_config_of_its_share(
    monkeypatch: pytest.MonkeyPatch, dev: torch.device
) -> None:
    """That of moe_gemm for as many rows as these experts have of all, on average."""
    gpu_only()
    asked: list[tuple[int, int]] = []

    def noting(spec: Any, values: tuple[Any, ...], config: Config | None) -> Any:
        asked.append(values[:2])
        return resolve(spec, values, config)

    monkeypatch.setattr(moe_w4a16_unpacked, "experts_at_once", lambda *_: 2)
    monkeypatch.setattr(moe_w4a16_unpacked, "resolve", noting)
    problem = problem_of(tokens=40)
    inputs = moe_w4_inputs(problem, dev)
    default = moe_gemm.SPEC.default_config(
        {**problem, "path": "high", "int8": False}, device.current()
    )
    config = {**default, "BLOCK_M": 16, "BLOCK_N": 16, "BLOCK_K": 32, "variant": "portable"}
    with force_config("moe_gemm", config):
        assert_right(run(**inputs, config=config_of(problem, **UNPACKED)), inputs)
    assert asked == [(32, 2), (32, 2), (16, 1)]


# ---- captured, refused -------------------------------------------------------------------------


@pytest.mark.gpu
@each_way
def test_a_captured_graph_serves_any_routing(way: dict[str, Any], dev: torch.device) -> None:
    problem = problem_of(tokens=50, zero=True)
    inputs, config = moe_w4_inputs(problem, dev), config_of(problem, **way)
    run(**inputs, config=config)
    graph = device.new_graph()
    with device.capture(graph):
        got = tkernels.moe_w4a16_gemm(**inputs, config=config)
    rng = random.Random(0)
    for _ in range(4):
        ids = [rng.sample(range(E), TOP_K) for _ in range(50)]
        for name, value in dispatched(ids, E, dev).items():
            inputs[name].copy_(value)
        graph.replay()
        device.synchronize()
        assert_right(got, inputs)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"x": torch.zeros(T, K)}, "x must be bfloat16 or float16, got float32"),
        ({"x": torch.zeros(T, 12).half()}, "x must have shape .* K a multiple of 8"),
        ({"weight": torch.zeros(E, N, K // 8).half()}, "weight must be int32, got float16"),
        ({"weight": torch.zeros(E, N, K).int()}, r"weight must have shape .*K/8=32\]"),
        ({"weight": torch.zeros(E, N - 1, K // 8).int()}, "weight must have gate and up rows"),
        ({"weight": torch.zeros(N, K // 8).int()}, r"weight must have shape \[E, N, K/8\]"),
        ({"weight_scale": torch.ones(E, N, 16)}, "weight_scale must have shape .* a power of two"),
        ({"weight_scale": torch.ones(E, N, 3)}, "weight_scale must have shape .* a power of two"),
        ({"weight_scale": torch.ones(E, N)}, "weight_scale must have shape"),
        ({"weight_scale": torch.ones(E, N + 1, 2)}, "weight_scale must have shape"),
        ({"weight_scale": torch.ones(E, N, 2).bfloat16()}, "weight_scale must be float16 or fl"),
        ({"weight_scale": torch.ones(E, 2, N).mT}, "weight_scale must be contiguous"),
        ({"weight_zero": torch.zeros(E, N, 1).char()}, r"weight_zero must have .*groups=2"),
        ({"weight_zero": torch.zeros(E, N, 2).int()}, "weight_zero must be int8"),
        ({"weight_zero": torch.zeros(E, 2 * N, 2).char()[:, ::2]}, "weight_zero must be cont"),
        ({"expert_offsets": torch.zeros(E).int()}, r"expert_offsets must have shape \[E\+1=6\]"),
        ({"sorted_ids": torch.zeros(T * TOP_K).long()}, "sorted_ids must be int32"),
        ({"topk_weights": torch.zeros(T)}, "topk_weights must be contiguous with R=18 elements"),
        ({"topk_weights": torch.tensor(1.0)}, "topk_weights must be contiguous with R=18 elements"),
        ({"topk_weights": torch.zeros(T, 2).half()}, "topk_weights must be float32"),
        ({"top_k": 3}, "top_k must be 0, or R=18 rows divided by the 9 of x, got 3"),
        ({"top_k": 2.0}, "top_k must be an int"),
        ({"silu_and_mul": 1}, "silu_and_mul must be a bool"),
        ({"out": torch.zeros(T * TOP_K, N).half()}, r"out must have shape \[R=18, N=24\]"),
    ],
)  # fmt: skip
def test_refusals(changes: dict[str, Any], words: str, dev: torch.device) -> None:
    moved = {n: v.to(dev) if isinstance(v, torch.Tensor) else v for n, v in changes.items()}
    with pytest.raises((ValueError, TypeError), match=rf"^moe_w4a16_gemm: {words}") as caught:
        tkernels.moe_w4a16_gemm(**{**inputs_of(dev), **moved})
    assert "\n" not in str(caught.value)


def test_illegal_configs() -> None:
    dev = sm_facts(90)
    problem = moe_w4_problem(64, 128, 8, 1536, 2048)
    config = op._portable_config(problem, dev)
    for changes, words in (
        ({"BLOCK_M": 24}, "BLOCK_M must be a power of two from 8 on"),
        ({"BLOCK_M": 8, "SWAP": False}, "BLOCK_M 8 needs SWAP"),
        ({"BLOCK_K": 64}, "variant portable has BLOCK_K of 128 or more"),
        ({"SLICES": 2}, "variant portable has SLICES 1"),
        ({"variant": "direct"}, "variant must be portable, unpacked, core or wide"),
        ({"variant": "unpacked"}, "variant unpacked has "),
        ({"BLOCK_M": 64, "BLOCK_K": 128, "num_warps": 1}, "the sums of a tile and of a group"),
        ({"BLOCK_M": 64, "BLOCK_N": 128, "num_warps": 8, "BLOCK_K": 512, "num_stages": 6},
         "the tiles take .* bytes of shared memory"),
    ):  # fmt: skip
        why = SPEC.why_illegal({**config, **changes}, problem, dev)
        assert why is not None
        assert re.match(words, why), (changes, why)
