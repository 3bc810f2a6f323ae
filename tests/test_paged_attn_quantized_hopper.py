"""The Hopper body of paged_attn_quantized: refusals, what the compiler makes of it, results.

Without a GPU it is compiled for sm_90.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tkernels import device, paged_attn_quantized_hopper
from tkernels.kv_format import NO_SLOT
from tkernels.ops import paged_attn_quantized as op
from tkernels.ops.paged_attn_quantized import SPEC
from tkernels.quantized_attention_cases import problem_of
from tkernels.registry import Config
from tkernels.testing import assert_right, clone_inputs, tensors_of

ROOT = Path(__file__).resolve().parents[1]
SM90 = device.sm_facts(90)
BF16, FP16 = torch.bfloat16, torch.float16


@pytest.mark.parametrize(
    ("heads", "mode", "changed", "why"),
    [
        ("32/8x128", "int8_fp4", {}, None),
        ("32/8x64", "int8", {}, None),
        ("16/1x128", "int8", {}, None),
        ("17/1x128", "int8", {}, "at most 16 query heads"),
        ("32/8x64", "int8_fp4", {}, "with residuals 128"),
        ("32/8x128", "int8_fp4", {"residual_block": 16}, "in blocks of 32"),
        ("32/8x96", "int8", {}, "head_dim 64 or 128"),
        ("32/8x64", "int8_static", {}, None),
        ("16/2x128", "int8_static_fp4", {}, None),
        ("18/2x128", "int8_static_fp4", {}, "at most 8 query heads"),
        ("16/1x128", "int8_static", {}, None),
        ("32/8x128", "int8", {"q_lens": (2,)}, "one query a sequence"),
    ],
)
def test_why_unfit(heads: str, mode: str, changed: dict[str, Any], why: str | None) -> None:
    said = paged_attn_quantized_hopper.why_unfit(
        problem_of((5,), heads, BF16, mode, **changed), SM90
    )
    assert said is None if why is None else why in str(said)


@pytest.mark.parametrize("mode", ["int8", "int8_static"])
@pytest.mark.parametrize("lse", [False, True])
def test_an_lse_over_static_scales_is_portable(
    lse: bool, mode: str, monkeypatch: pytest.MonkeyPatch, dev: torch.device
) -> None:
    problem = problem_of((5,), "16/2x128", BF16, mode, lse=lse)
    config = {**op._portable_config(problem, SM90), **op._HOPPER, "PDL": True, "LONG_FIRST": False}
    asked: list[str] = []
    monkeypatch.setattr(op, "resolve", lambda *_: (config, 132))
    kept = lambda make, config, tensors, *values: make(*tensors, *values, config=config)  # noqa: E731
    monkeypatch.setattr(op, "planned", kept)  # and not again
    for name in ("portable", "hopper"):
        noting = lambda *_, name=name: lambda *_: asked.append(name)  # noqa: E731
        monkeypatch.setattr(op, f"_bind_{name}", noting)
    SPEC.launch(**SPEC.make_inputs(problem, dev))
    assert asked == ["portable" if lse and mode == "int8_static" else "hopper"]


def test_why_unfit_elsewhere() -> None:
    unfit = paged_attn_quantized_hopper.why_unfit
    problem = problem_of((5,), "32/8x128", BF16, "int8")
    assert "got sm80" in str(unfit(problem, device.sm_facts(80)))
    assert "got ascend910b" in str(unfit(problem, device.ascend_facts()))
    assert "needs bfloat16 or float16" in str(unfit({**problem, "dtype": torch.float32}, SM90))


@pytest.mark.parametrize(
    ("batch", "keys", "mode", "expected"),
    [
        # All at once, or in order; some may be long, and are shared out then.
        (64, 4096, "int8", ("hopper", 32, 1, 3, False)),
        (64, 4096, "int8_fp4", ("hopper", 32, 2, 2, False)),
        (256, 4096, "int8_fp4", ("hopper", 32, 1, 2, True)),
        (64, 8192, "int8", ("hopper", 32, 3, 3, True)),
        (64, 8192, "int8_fp4", ("hopper", 32, 4, 2, True)),
        (256, 8192, "int8_fp4", ("hopper", 32, 4, 2, True)),
        (257, 8192, "int8", ("hopper", 32, 3, 3, False)),  # too many to be put in order
        (16, 8192, "int8", ("hopper", 32, 6, 3, False)),
        (1, 8192, "int8_fp4", ("hopper", 64, 64, 2, False)),
        (1, 8192, "int8", "portable"),
        (64, 4096, "int8_static", ("hopper", 32, 1, 3, False)),
        (64, 4096, "int8_static_fp4", ("hopper", 32, 2, 2, False)),
        (1, 8192, "int8_static", "portable"),
    ],
)
def test_what_the_default_is(batch: int, keys: int, mode: str, expected: Any) -> None:
    problem = problem_of([keys] * batch, "32/8x128", BF16, mode)
    for dev in (SM90, device.sm_facts(80), device.ascend_facts()):
        chosen = SPEC.default_config(problem, dev)
        assert dev.is_npu or SPEC.why_illegal(chosen, problem, dev) is None
        if dev is not SM90 or expected == "portable":
            assert chosen["variant"] == "portable"
        else:
            names = ("variant", "BLOCK_N", "SPLITS", "num_stages", "LONG_FIRST")
            assert tuple(chosen[name] for name in names) == expected


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"BLOCK_N": 128}, "BLOCK_N 32 or 64, got 128"),
        ({"num_stages": 1}, "2 or more, got 1"),
        ({"num_stages": 40}, "bytes of shared memory"),
        ({"SPLITS": 0}, "must be 1 or more"),
        ({"num_warps": 2}, "has num_warps 1"),
        ({"variant": "hoper"}, "portable, hopper or hopper_chunk, got 'hoper'"),
    ],
)
def test_why_illegal(changed: Config, why: str) -> None:
    problem = problem_of([4096] * 64, "32/8x128", BF16, "int8_fp4")
    config = SPEC.default_config(problem, SM90)
    assert SPEC.why_illegal(config, problem, SM90) is None
    assert why in str(SPEC.why_illegal({**config, **changed}, problem, SM90))


def test_what_long_first_needs() -> None:
    for batch in (256, 257):
        problem = problem_of([64] * batch, "32/8x128", BF16, "int8")
        config = {**SPEC.default_config(problem, SM90), "LONG_FIRST": True}
        assert SPEC.why_illegal(config, problem, SM90) is None
    other = problem_of([64] * 64, "32/8x96", BF16, "int8_static")
    config = {**SPEC.default_config(other, SM90), "LONG_FIRST": True}
    assert SPEC.why_illegal(config, other, SM90) == "LONG_FIRST needs variant hopper"


# In a process of its own: here Triton is an interpreter, there it must compile.
CHILD = """
import dataclasses, json
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from tkernels import device, offline
from tkernels.ops.paged_attn_quantized import SPEC
from tkernels.quantized_attention_cases import problem_of

ptx, compile_it = [], device.triton.compile
def keeping(*args, **kwargs):
    compiled = compile_it(*args, **kwargs)
    ptx.append(compiled.asm["ptx"])
    return compiled
device.triton.compile = keeping

found = []
for heads, mode, n, stages, more in [
    ("8/2x128", "int8", 64, 3, {}), ("8/2x128", "int8_fp4", 64, 2, {}),
    ("8/2x128", "int8_fp4", 32, 3, {"window": 40, "softcap": 2.0, "sinks": True}),
    ("16/1x64", "int8", 32, 2, {"block_size": 128}),
    ("8/2x128", "int8_static", 32, 3, {}), ("8/2x128", "int8_static_fp4", 32, 2, {}),
    ("8/1x128", "int8_static_fp4", 64, 3, {"window": 40, "softcap": 2.0, "sinks": True}),
]:
    problem = problem_of((70, 20), heads, torch.bfloat16, mode, **more)
    config = {**SPEC.default_config(problem, device.current()), "BLOCK_N": n, "num_stages": stages}
    config = {**config, "variant": "hopper"} | {
        "BLOCK_M": 16, "OUTLIER_SPLITS": 0, "CHUNK": 256, "LIST": 16, "PACK_HEADS": True,
        "programs_per_core": 0, "num_warps": 1, "outlier_warps": 1}
    with FakeTensorMode(), offline.record_launches() as launches:
        SPEC.launch(**SPEC.make_inputs(problem, torch.device("cpu")), config=config)
    ptx.clear()
    got = dataclasses.asdict(offline.compile_cuda(launches[0], 90))
    found.append({**got, "case": [heads, mode, n, stages], "name": launches[0].fn.__name__,
                  "turned": ptx[-1].count("movmatrix"), "fetched": ptx[-1].count("ldmatrix")})
print(json.dumps(found))
"""


@pytest.mark.slow
def test_compiled_for_sm90() -> None:
    env = {**os.environ, "TKERNELS_DEVICE": "compile:sm90", "PYTHONPATH": str(ROOT)}
    env.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, "-c", CHILD], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(next(x for x in done.stdout.splitlines() if x.startswith("[")))
    assert len(found) == 7
    for case in found:
        assert case["name"] == "_paged_attn_quantized_hopper_kernel", case
        assert case["spill_bytes"] == 0, case
        assert case["registers"] <= 240, case  # eight programs a core
        assert case["turned"] > 0, case  # weights change places within a warp
        assert case["fetched"] > 0, case


# ---- results, on the GPU -----------------------------------------------------------------------

gpu = pytest.mark.gpu
needs_sm90 = pytest.mark.skipif(
    device.current().arch != "sm90", reason="needs an sm90 GPU; this machine has none"
)


@gpu
@needs_sm90
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("scales", ["int8", "int8_static"])
def test_random_problems_and_configs(scales: str, seed: int, dev: torch.device) -> None:
    """What is out of sight is NaN, a slot past the pool, or no block at all."""
    rng = random.Random(seed)
    for _ in range(25):
        mode = scales + rng.choice(("", "_fp4", "_fp4"))
        lengths = (0, 1, 17, 63, 64, 65, 130, 1000, 2000)
        groups = (1, 2, 3, 4, 5, 6, 7, 8, *(() if mode == "int8_static_fp4" else (12, 16)))
        kv_heads, dim = rng.choice((1, 2, 3)), rng.choice((64, 128)) if mode == scales else 128
        problem = problem_of(
            [rng.choice(lengths) for _ in range(rng.choice((1, 2, 5)))],
            f"{kv_heads * rng.choice(groups)}/{kv_heads}x{dim}",
            rng.choice((BF16, FP16)),
            mode,
            mantissa_bits=rng.choice((0, 1, 2)),
            outliers=rng.choice((0.0, 0.04, 0.3, 1.0)),
            block_size=rng.choice((16, 32, 64, 128)),
            max_context=rng.choice((0, 100)),
            window=rng.choice((None, None, 1, 16, 40, 500)),
            softcap=rng.choice((None, None, 5.0)),
            sinks=rng.random() < 0.4,
            lse=rng.random() < 0.5 and "static" not in mode,
        )
        config = {
            **hopper_config(problem),
            "BLOCK_N": rng.choice((32, 64)),
            "num_stages": rng.choice((2, 3, 4)),
            "SPLITS": rng.choice((1, 2, 3, 8)),
            "MIN_SHARE": rng.choice((16, 64, 128)),
            "LONG_FIRST": rng.random() < 0.5,
            "PDL": rng.random() < 0.5,
        }
        assert SPEC.why_illegal(config, problem, device.current()) is None
        inputs = SPEC.make_inputs(problem, dev)
        try:
            assert_right(SPEC, inputs, tensors_of(SPEC.launch(**inputs, config=config)))
        except AssertionError as error:
            raise AssertionError(f"{problem} with {config}: {error}") from None


def hopper_config(problem: dict[str, Any]) -> Config:
    """The default of the same problem with many sequences, which is this body's."""
    config = SPEC.default_config({**problem, "batch": 64}, device.current())
    assert config["variant"] == "hopper"
    return config


def many(mode: str = "int8_fp4", **more: Any) -> dict[str, Any]:
    return problem_of([130, 1000, 64, 7] * 10, "8/2x128", BF16, mode, **more)


@gpu
@needs_sm90
@pytest.mark.parametrize("splits", [1, 5])
@pytest.mark.parametrize(
    ("heads", "mode", "more"),
    [
        ("4/2x64", "int8", {"window": 40}),
        ("8/2x128", "int8_fp4", {"sinks": True}),
        ("8/2x128", "int8_static_fp4", {}),
    ],
)
def test_long_first_changes_no_bit(
    heads: str, mode: str, more: dict[str, Any], splits: int, dev: torch.device
) -> None:
    rng = random.Random(splits)
    for batch in (1, 17, 33, 256):
        for lengths in ((20, 1500), (700,), (0, 0, 1500), range(1501)):
            contexts = [lengths[i % len(lengths)] for i in range(batch)]
            if len(lengths) > 3:
                contexts = [rng.choice(lengths) for _ in range(batch)]
            has = {"lse": "static" not in mode, **more}
            problem = problem_of(contexts, heads, BF16, mode, max_context=1500, **has)
            inputs = SPEC.make_inputs(problem, dev)
            config = {**hopper_config(problem), "SPLITS": splits, "MIN_SHARE": 64}
            plain, ordered = (
                tensors_of(
                    SPEC.launch(
                        **inputs,
                        out=torch.full_like(inputs["q"], torch.nan),
                        config={**config, "LONG_FIRST": long_first},
                    )
                )
                for long_first in (False, True)
            )
            assert all(torch.equal(a, b) for a, b in zip(plain, ordered, strict=True)), contexts
            assert not ordered[0][inputs["context_lens"] == 0].any(), contexts


@gpu
@needs_sm90
@pytest.mark.parametrize("size", [1e-30, 1e-6, 1e4, 1e30])
@pytest.mark.parametrize("mode", ["int8", "int8_fp4", "int8_static", "int8_static_fp4"])
def test_sizes_of_queries(mode: str, size: float, dev: torch.device) -> None:
    """fp16 holds none of these; scales of keys take the size away again."""
    problem = many(mode)
    inputs = SPEC.make_inputs(problem, dev)
    inputs["q"] = (inputs["q"].float() * size).to(BF16)
    inputs["k_scale"] = inputs["k_scale"] / size
    config = hopper_config(problem)
    assert_right(SPEC, inputs, tensors_of(SPEC.launch(**inputs, config=config)))


@gpu
@needs_sm90
@pytest.mark.parametrize("splits", [1, 3])
def test_scales_of_values_far_apart(splits: int, dev: torch.device) -> None:
    """From 2^-12 to 2^4, in any order, and one sequence with tiny ones only."""
    problem = many()
    inputs = SPEC.make_inputs(problem, dev)
    generator = torch.Generator(dev).manual_seed(3)
    power = torch.randint(
        -12, 5, inputs["v_scale"].shape, generator=generator, device=dev, dtype=torch.int32
    )
    inputs["v_scale"] = torch.ldexp(inputs["v_scale"], power)
    pages = inputs["block_table"][0, : (130 + 15) // 16].long()
    inputs["v_scale"][pages] *= 2.0**-100
    config = {**hopper_config(problem), "SPLITS": splits, "MIN_SHARE": 64}
    assert_right(SPEC, inputs, tensors_of(SPEC.launch(**inputs, config=config)))


@gpu
@needs_sm90
@pytest.mark.parametrize("mode", ["int8_static", "int8_static_fp4"])
@pytest.mark.parametrize("side", ["k", "v"])
@pytest.mark.parametrize("size", [1e-12, 1.0, 1e12])
def test_static_scales_over_three_decades(
    size: float, side: str, mode: str, dev: torch.device
) -> None:
    problem = many(mode)
    inputs = SPEC.make_inputs(problem, dev)
    generator = torch.Generator(dev).manual_seed(1)
    spread = 10.0 ** (3 * torch.rand(2, 128, generator=generator, device=dev) - 3)
    inputs[f"{side}_scale"] = spread / 16 * size
    if side == "k":
        inputs["q"] = (inputs["q"].float() / size).to(BF16)
    config = hopper_config(problem)
    assert_right(SPEC, inputs, tensors_of(SPEC.launch(**inputs, config=config)))


@gpu
@needs_sm90
@pytest.mark.parametrize("mantissa", [0, 1, 2])
@pytest.mark.parametrize("side", ["k", "v"])
def test_residuals_of_what_static_scales_clip(side: str, mantissa: int, dev: torch.device) -> None:
    """Units of up to 2^12 codes, as of numbers beyond what a scale was made for."""
    problem = many("int8_static_fp4", mantissa_bits=mantissa)
    inputs = SPEC.make_inputs(problem, dev)
    units = inputs[f"{side}_residual_scale"]
    generator = torch.Generator(dev).manual_seed(2)
    beyond = torch.rand(units.shape[:2], generator=generator, device=dev) < 0.2
    drawn = torch.randint(124, 140, units[beyond].shape, generator=generator, device=dev)
    units[beyond] = drawn.to(torch.uint8)
    if side == "k":  # so that it takes more than one key to make a result
        inputs["k_scale"] = inputs["k_scale"] * 2.0 ** (-10 if mantissa else -13)
    config = hopper_config(problem)
    assert_right(SPEC, inputs, tensors_of(SPEC.launch(**inputs, config=config)))


@gpu
@needs_sm90
@pytest.mark.parametrize("mantissa", [0, 1, 2])
def test_the_largest_weight_times_the_largest_unit(mantissa: int, dev: torch.device) -> None:
    """One key of a scale just below a power of two, whose rests fill half a step of a code."""
    more = {"outliers": 1.0, "mantissa_bits": mantissa}
    problem = problem_of([1] * 9, "16/2x128", BF16, "int8_fp4", **more)
    inputs = SPEC.make_inputs(problem, dev)
    inputs["v_scale"].copy_(torch.where(inputs["v_scale"] < 0, -1.0, 1.0) * (1 - 2.0**-20))
    largest = {0: 127 - 7, 1: 127 - 3, 2: 127 - 1}[mantissa]  # LARGEST of kv_format times it >= 1/2
    inputs["v_residual_scale"].fill_(largest)
    got = tensors_of(SPEC.launch(**inputs, config=hopper_config(problem)))
    assert all(bool(t.isfinite().all()) for t in got)
    assert_right(SPEC, inputs, got)


@gpu
@needs_sm90
@pytest.mark.parametrize("mode", ["int8_fp4", "int8_static_fp4"])
def test_a_full_pool_and_all_tokens_outliers(mode: str, dev: torch.device) -> None:
    problem = problem_of([8192] * 9, "4/1x128", BF16, mode, outliers=1.0)
    inputs = SPEC.make_inputs(problem, dev)
    assert inputs["k_residual"].shape[1] == 0xFFFF
    config = hopper_config(problem)
    assert_right(SPEC, inputs, tensors_of(SPEC.launch(**inputs, config=config)))


@gpu
@needs_sm90
@pytest.mark.parametrize("mode", ["int8_fp4", "int8_static_fp4"])
@pytest.mark.parametrize("block_n", [32, 64])
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_lists_of_any_length(
    dtype: torch.dtype, block_n: int, mode: str, dev: torch.device
) -> None:
    """None, half a list and one more, a list and one more, all: of K, of V or of both."""
    counts = (0, 1, 7, 8, 9, 15, 16, 17, 31, 32)
    heads = "24/2x128" if mode == "int8_fp4" else "16/2x128"
    rng = random.Random(block_n)
    for _ in range(4):
        steps = rng.sample(counts, len(counts))
        has = {"outliers": 1.0, "lse": "static" not in mode}
        problem = problem_of([block_n * len(steps)] * 3, heads, dtype, mode, **has)
        inputs = SPEC.make_inputs(problem, dev)
        for pages in inputs["block_table"].tolist():
            for step, count in enumerate(steps):
                held = set(rng.sample(range(block_n), count))
                for key in range(block_n):
                    block, token = divmod(block_n * step + key, 16)
                    both = rng.choice(("k", "v", "kv")) if key in held else ""
                    for side in set("kv") - set(both):
                        inputs[f"{side}_slots"][pages[block], :, token] = NO_SLOT
                        if mode == "int8_fp4":
                            inputs[f"{side}_scale"][pages[block], :, token].abs_()
        config = {**hopper_config(problem), "BLOCK_N": block_n, "SPLITS": 1}
        assert_right(SPEC, inputs, tensors_of(SPEC.launch(**inputs, config=config)))


@gpu
@needs_sm90
@pytest.mark.parametrize("mode", ["int8_fp4", "int8_static_fp4"])
@pytest.mark.parametrize("spoilt", [torch.nan, torch.inf])
def test_a_head_that_is_no_number_spoils_itself_alone(
    spoilt: float, mode: str, dev: torch.device
) -> None:
    problem = many(mode)
    inputs = SPEC.make_inputs(problem, dev)
    config = hopper_config(problem)
    clean = SPEC.launch(**inputs, config=config)
    other = clone_inputs(inputs)
    other["q"][1, 2, 5] = spoilt
    got = SPEC.launch(**other, config=config)
    assert bool(got[1, 2].isnan().any())
    got[1, 2] = clean[1, 2]
    # The heads of a KV head share a power of two, which fp16 takes in without a difference.
    assert torch.equal(got, clean)


@gpu
@needs_sm90
@pytest.mark.parametrize("mode", ["int8_fp4", "int8_static_fp4"])
def test_it_reads_whatever_lies_at_odd_addresses(mode: str, dev: torch.device) -> None:
    """Codes, scales, residuals or q that do not lie at 16 bytes take the portable body."""
    problem = many(mode)
    inputs = SPEC.make_inputs(problem, dev)
    config = hopper_config(problem)
    for name in ("q", "k_codes", "v_scale", "k_slots", "v_residual", "k_residual_scale"):
        kept = inputs[name]
        step = 4 // kept.element_size() if name != "k_slots" else 2
        buffer = torch.zeros(kept.numel() + step, dtype=kept.dtype, device=dev)
        moved = buffer[step:].view(kept.shape)
        moved.copy_(kept)
        assert moved.data_ptr() % 16
        moved_inputs = {**inputs, name: moved}
        assert_right(SPEC, moved_inputs, tensors_of(SPEC.launch(**moved_inputs, config=config)))
