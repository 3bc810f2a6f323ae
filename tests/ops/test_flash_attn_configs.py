"""Configs of flash_attn: which body and tiles serve which problem, and what they may not change."""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
from typing import Any

import pytest
import torch

import tkernels
from tests.compiled_for import lines_of
from tkernels import config, device
from tkernels.flash_attn_cases import flash_problem
from tkernels.ops import flash_attn as module
from tkernels.ops.flash_attn import SPEC
from tkernels.registry import Config, Problem
from tkernels.testing import assert_close, assert_right, tensors_of

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
PLAIN = flash_problem(2, 512, "8/2x128", BF16)
GLUON = device.is_there(device.triton_part("triton.experimental.gluon.language"))


def small_tiles(problem: Problem) -> Config:
    base = module._portable_config(problem, device.current())
    return {**base, "BLOCK_M": 16, "BLOCK_N": 16, "programs_per_core": 1}


# ---- what a config must not change ---------------------------------------------------------------


def test_same_bits_in_any_company(dev: torch.device) -> None:
    """A sequence's result depends neither on what else is in the batch nor on its place there."""
    problem = flash_problem(3, 33, "2/1x16", BF16, lse=True)
    inputs, tiles = SPEC.make_inputs(problem, dev), small_tiles(problem)
    everyone = tensors_of(tkernels.flash_attn(**inputs, config=tiles))
    lengths = torch.arange(0, 100, 33, dtype=torch.int32, device=dev)
    offsets = {"cu_seqlens_q": lengths, "cu_seqlens_k": lengths}
    longest = {"max_seqlen_q": 33, "max_seqlen_k": 33}
    flat = {n: v.flatten(0, 1) if isinstance(v, torch.Tensor) else v for n, v in inputs.items()}
    packed = tensors_of(tkernels.flash_attn(**flat, **offsets, **longest, config=tiles))
    for b in range(3):
        alone = {n: v[b : b + 1] if isinstance(v, torch.Tensor) else v for n, v in inputs.items()}
        single = tensors_of(tkernels.flash_attn(**alone, config=tiles))
        for own, together, in_line in zip(single, everyone, packed, strict=True):
            assert torch.equal(together[b], own[0])
            assert torch.equal(in_line[33 * b : 33 * (b + 1)], own[0])


def test_more_random_legal_configs(dev: torch.device) -> None:
    """With those of test_configs forty in the interpreter."""
    rng = random.Random(7)
    space = SPEC.space(device.current())
    cases = [case for case in SPEC.cases if "bench" not in case.tags]
    seen = 0
    while seen < 28:
        case = rng.choice(cases)
        chosen = {name: rng.choice(values) for name, values in space.items()}
        if SPEC.why_illegal(chosen, case.problem, device.current()) is not None:
            continue
        inputs = SPEC.make_inputs(case.problem, dev)
        results = tensors_of(tkernels.flash_attn(**inputs, config=chosen))
        try:
            assert_right(SPEC, inputs, results)
        except AssertionError as error:
            raise AssertionError(f"{case.name} with {chosen}: {error}") from None
        seen += 1


def test_fp32_is_multiplied_whole(dev: torch.device) -> None:
    """Matrix units cut fp32 to 10 bits (TF32) where they are let: 2049 would become 2048."""
    q = torch.ones(1, 16, 1, 16, device=dev)
    k = torch.zeros(1, 16, 1, 16, device=dev)
    k[..., 0] = 2048.0
    k[0, 3, 0, 0] = 2049.0
    v = 2048.0 + torch.arange(16.0, device=dev).view(1, 16, 1, 1).repeat(1, 1, 1, 16)
    options: dict[str, Any] = {"causal": False, "scale": 1.0}
    out = tkernels.flash_attn(q, k, v, **options)
    truth = SPEC.reference(q.double(), k.double(), v.double(), **options)
    assert_close(out, truth, what="out")


@pytest.mark.filterwarnings("ignore:overflow encountered in exp2")  # it gives tanh its 1
@pytest.mark.parametrize("softcap", [0.1, 1.0, 30.0])
def test_softcap_is_tanh_all_over(softcap: float, dev: torch.device) -> None:
    """The two formulas of tanh and where they meet: scores from far below to far above the cap."""
    q = torch.zeros(1, 64, 1, 16, device=dev)
    q[0, :, 0, 0] = torch.linspace(-6, 6, 64, device=dev) * softcap
    k = torch.ones(1, 1, 1, 16, device=dev)
    options: dict[str, Any] = {"causal": False, "softcap": softcap, "scale": 1.0}
    # One key: its score is the lse.
    _, lse = tkernels.flash_attn(q, k, k, return_lse=True, **options)
    truth = softcap * torch.tanh(q[..., 0].double() / softcap)
    assert_close(lse, truth, what=f"softcap {softcap}")


# ---- problems and bodies -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "problem",
    [
        *(case.problem for case in SPEC.cases if "bench" not in case.tags),
        flash_problem(2, 3, "2/1x16", FP32, seqlen_k=0),
        flash_problem(0, 0, "2/1x20", BF16, lengths=((3, 9), (0, 2))),
        flash_problem(1, 9, "2/1x12", FP16, window=4, packed_qkv=True),
    ],
    ids=str,
)
def test_problem_is_what_the_launch_sees(
    problem: Problem, dev: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tuned config is stored under the problem of its case: both must name the same facts."""
    seen = []

    def spy(spec: Any, values: tuple[Any, ...], given: Config | None) -> Any:
        seen.append(values)
        return config.resolve(spec, values, given)

    monkeypatch.setattr(module, "resolve", spy)
    config.reload()
    tkernels.flash_attn(**SPEC.make_inputs(problem, dev))
    config.reload()
    assert seen == [tuple(problem[name] for name in SPEC.problem_fields)]


@pytest.mark.skipif(not GLUON, reason="this triton has no Gluon, in which the body is written")
def test_hopper_body_where_it_fits() -> None:
    facts = device.sm_facts(90)
    hopper = SPEC.default_config(PLAIN, facts)
    assert hopper["variant"] == "hopper"
    assert SPEC.default_config(PLAIN, device.sm_facts(80))["variant"] == "portable"
    for change in ({"dtype": FP32}, {"has_mask": True}, {"aligned": False}, {"head_dim": 20}):
        problem = {**PLAIN, **change}
        assert SPEC.default_config(problem, facts)["variant"] == "portable", change
        assert "variant hopper " in str(SPEC.why_illegal(hopper, problem, facts))
    for name, value in (("num_warps", 8), ("programs_per_core", 1)):
        assert SPEC.why_illegal({**hopper, name: value}, PLAIN, facts) == (
            "variant hopper has num_warps 4 and programs_per_core 0"
        )
    assert "needs an sm90 device" in str(SPEC.why_illegal(hopper, PLAIN, device.sm_facts(80)))


def test_hopper_body_steps_aside_for_odd_addresses(
    dev: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensor maps and wide stores cannot begin anywhere; only the call knows where tensors do."""
    taken: list[tuple[str, int]] = []
    choose = module._by_address(
        lambda *tensors: taken.append(("hopper", len(tensors))),
        lambda *tensors: taken.append(("portable", len(tensors))),
    )
    all_four = [torch.zeros(32, dtype=BF16, device=dev) for _ in range(4)]  # q, k, v, out
    rest = [None] * 5  # lse, mask, sinks, cu_seqlens: the body takes no mask
    choose(*all_four, *rest)
    for odd in range(4):
        choose(*(t[i == odd :] for i, t in enumerate(all_four)), *rest)
    assert taken == [("hopper", 8), *[("portable", 9)] * 4]


@pytest.mark.parametrize("capability", [80, 86, 90, 100, 120])
@pytest.mark.parametrize("head_dim", [16, 64, 80, 128, 192, 256])
def test_portable_default_fits(capability: int, head_dim: int) -> None:
    facts = device.sm_facts(capability)
    for n, dtype, mask in itertools.product((1, 17, 128, 5000), (BF16, FP32), (False, True)):
        problem = flash_problem(1, n, f"8/2x{head_dim}", dtype, mask=mask)
        default = module._portable_config(problem, facts)
        assert SPEC.why_illegal(default, problem, facts) is None, (problem, default)
        assert 16 <= default["BLOCK_M"] < 2 * max(16, n)  # no tile twice as long as the queries


def test_tuning_keys_meet_in_buckets() -> None:
    """Lengths that differ little share a config; those that differ much do not."""

    def key(n: int) -> dict[str, Any]:
        return SPEC.tuning_key(flash_problem(1, n, "8/2x128", BF16))

    assert key(3000) == key(4096) != key(4097)
    assert key(1) == key(16)
    assert key(16384) == key(100_000)


# ---- what an sm_90 compiler makes of the portable body -------------------------------------------

COMPILED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # problem, changes of the default
    "128": ({}, {}),
    "128 packed, all": (
        {"lengths": ((900, 900),), "window": 300, "softcap": 30.0, "sinks": True, "lse": True},
        {},
    ),
    "64": ({"heads": "8/2x64"}, {}),
    "256": ({"heads": "8/2x256"}, {}),
    "fp32 64": ({"dtype": FP32, "heads": "8/2x64"}, {}),
    "fp32 128": ({"dtype": FP32}, {}),
    "fp32 256": ({"dtype": FP32, "heads": "8/2x256", "causal": False}, {}),
    "mask": ({"mask": True}, {}),
    "mask, few keys": ({"mask": True, "heads": "8/2x256"}, {"BLOCK_N": 32, "num_warps": 8}),
    "three stages": ({}, {"BLOCK_N": 128, "num_warps": 8, "num_stages": 3}),
}

# In a process of its own: here Triton may be an interpreter, there it must compile.
CHILD = """
import dataclasses, json, sys
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from tkernels import offline
from tkernels.ops.flash_attn import SPEC

for problem, config in eval(sys.stdin.read(), {"torch": torch}):
    with FakeTensorMode(), offline.record_launches() as launches:
        SPEC.launch(**SPEC.make_inputs(problem, torch.device("cpu")), config=config)
    print(json.dumps(dataclasses.asdict(offline.compile_cuda(launches[0], 90))))
"""


@dataclasses.dataclass(frozen=True)
class Asked:
    problem: Problem
    config: Config


def _asked(name: str) -> Asked:
    options, changes = COMPILED[name]
    given = {"batch": 1, "seqlen_q": 1024, "heads": "8/2x128", "dtype": BF16, **options}
    problem = flash_problem(**given)
    return Asked(problem, module._portable_config(problem, device.sm_facts(90)) | changes)


@pytest.fixture(scope="module")
def compiled() -> dict[str, dict[str, int]]:
    asked = [dataclasses.astuple(_asked(name)) for name in COMPILED]
    lines = [json.loads(line) for line in lines_of(CHILD, given=repr(asked))]
    return dict(zip(COMPILED, lines, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("name", COMPILED)
def test_portable_body_on_sm90(name: str, compiled: dict[str, dict[str, int]]) -> None:
    """No thread spills a register, and shared memory is no more than legality counts."""
    used, one = compiled[name], _asked(name)
    assert used["spill_bytes"] == 0, used
    counted = module._shared_bytes(one.config, one.problem)
    assert counted / 4 < used["shared_bytes"] <= counted, (used, counted)


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("exponent", [6, 13, 50])
def test_huge_scores(exponent: int, sinks: bool, dev: torch.device) -> None:
    """Scores beyond where fp32 tells their differences: a row's largest still has weight 1."""
    n = 64 if dev.type == "cpu" else 300
    problem = flash_problem(1, n, "4/2x16", BF16)
    q = torch.randint(-8, 9, (1, n, 4, 16), device=dev).to(BF16) * 2.0**exponent
    k = torch.randint(-8, 9, (1, n, 2, 16), device=dev).to(BF16) * 2.0**exponent
    v = torch.randn(1, n, 2, 16, device=dev).to(BF16)
    given: dict[str, Any] = {"scale": 0.1, "sinks": None}
    if sinks:
        given["sinks"] = torch.randn(4, device=dev) * 100 * 4.0**exponent
    out, lse = tkernels.flash_attn(q, k, v, **given, return_lse=True, config=small_tiles(problem))
    assert isinstance(lse, torch.Tensor)
    truth, truth_lse = SPEC.reference(q.double(), k.double(), v.double(), **given, return_lse=True)
    assert_close(out, truth, what="out")
    torch.testing.assert_close(lse.double(), truth_lse.double(), atol=1e-3, rtol=1e-6)
