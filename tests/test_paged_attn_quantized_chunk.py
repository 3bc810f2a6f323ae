"""The body of paged_attn_quantized for chunks on Hopper: refusals, what it converts, results.

Without a GPU it is compiled for sm_90, and its conversion is interpreted.
"""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
import torch

from tests.compiled_for import lines_of
from tkernels import device, paged_attn_quantized_chunk
from tkernels.kv_format import (
    FORMATS,
    QuantizedKV,
    allocate_quantized,
    append_quantized_ref,
    fields,
    read_positions,
)
from tkernels.ops.paged_attn_quantized import SPEC, _portable_config
from tkernels.quantized_attention_cases import problem_of
from tkernels.registry import Config, Problem
from tkernels.testing import assert_right, bytes_of, poisoned_memory, tensors_of

SM90 = device.sm_facts(90)
BF16, FP16 = torch.bfloat16, torch.float16
TILE = paged_attn_quantized_chunk.TILE
PAGE = 64  # tokens that are converted into one
MODES = ("int8", "int8_static", "int8_fp4", "int8_static_fp4")
CACHES = [
    f"{which}_{name}"
    for which in "kv"
    for name in ("codes", "scale", "slots", "residual", "residual_scale")
]


def chunk(
    q_lens: Any, contexts: Any = (8192,), heads: str = "32/8x128", mode: str = "int8", **more: Any
) -> Problem:
    return problem_of(contexts, heads, more.pop("dtype", BF16), mode, q_lens=q_lens, **more)


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({}, None),
        ({"mode": "int8_static_fp4", "heads": "8/2x256", "window": 5}, None),
        ({"mode": "int8_fp4", "heads": "8/8x64", "residual_block": 16, "block_size": 256}, None),
        ({"q_lens": None}, "needs cu_seqlens_q"),
        ({"dtype": torch.float32}, "needs bfloat16 or float16, got torch.float32"),
        ({"dtype": FP16}, None),
        ({"dtype": FP16, "mode": "int8_fp4"}, None),  # legal, but left to the portable body
        ({"heads": "8/2x96"}, "has head_dim 64, 128 or 256, got 96"),
        ({"max_context": 131072}, None),  # 512 MiB
        ({"max_context": 131073}, "up to 536870912 bytes, got 537395200"),
        ({"dev": device.sm_facts(80)}, "got sm80"),
        ({"dev": device.ascend_facts()}, "got ascend910b"),
    ],
)
def test_why_unfit(changed: dict[str, Any], why: str | None) -> None:
    given = {"q_lens": (2048,), **changed}
    dev = given.pop("dev", SM90)
    said = paged_attn_quantized_chunk.why_unfit(chunk(**given), dev)
    assert said is None if why is None else why in str(said)


@pytest.mark.parametrize(
    ("q_len", "changed", "expected"),
    [
        (2048, {}, (1, False)),
        (2048, {"mode": "int8_static_fp4"}, (1, False)),
        (2048, {"window": 300}, (1, False)),
        (512, {}, (1, False)),
        (256, {}, (2, False)),
        (256, {"window": 300}, None),  # splits have no window
        (64, {}, (8, True)),
        (63, {}, None),
        (64, {"contexts": (8192,) * 8}, (1, True)),
        (64, {"contexts": (1024,) * 8}, None),
        (585, {"contexts": (585,) * 14}, (1, False)),
        (2048, {"dtype": torch.float32}, None),
        (2048, {"dtype": FP16}, (1, False)),
        (2048, {"dtype": FP16, "mode": "int8_fp4"}, None),
        (2048, {"dtype": FP16, "mode": "int8_static"}, None),
        (2048, {"max_context": 200000}, None),
    ],
)
def test_what_the_default_is(q_len: int, changed: dict[str, Any], expected: Any) -> None:
    contexts = changed.get("contexts", (8192,))
    problem = chunk((q_len,) * len(contexts), **changed)
    for dev in (SM90, device.sm_facts(80), device.sm_facts(100), device.ascend_facts()):
        config = SPEC.default_config(problem, dev)
        assert dev.is_npu or SPEC.why_illegal(config, problem, dev) is None
        if dev is not SM90 or expected is None:
            assert config["variant"] == "portable"
            continue
        found = config["variant"], config["SPLITS"], config["PACK_HEADS"]
        assert found == ("hopper_chunk", *expected)
        assert all(config[name] in values for name, values in SPEC.space(dev).items())


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"BLOCK_N": 64, "num_stages": 3}, None),
        ({"BLOCK_N": 16}, "needs BLOCK_N of 32 to 128"),
        ({"num_stages": 9}, "bytes of shared memory"),
        ({"SPLITS": 0}, "must be 1 or more"),
        ({"CHUNK": 64}, "has CHUNK 256"),
        ({"variant": "chunk"}, "must be portable, hopper or hopper_chunk, got 'chunk'"),
    ],
)
def test_why_illegal(changed: Config, why: str | None) -> None:
    problem = chunk((2048,))
    said = SPEC.why_illegal({**SPEC.default_config(problem, SM90), **changed}, problem, SM90)
    assert said is None if why is None else why in str(said)
    wide = chunk((2048,), window=300)
    split = {**SPEC.default_config(wide, SM90), "SPLITS": 2}
    assert "no window with SPLITS" in str(SPEC.why_illegal(split, wide, SM90))


# In a process of its own: here Triton is an interpreter, there it must compile.
CHILD = """
import dataclasses, json, warnings
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from tkernels import device, offline
from tkernels.ops.paged_attn_quantized import SPEC
from tkernels.quantized_attention_cases import problem_of

found = []
for heads, mode, dtype, q_len, more in [
    ("32/8x128", "int8", torch.bfloat16, 2048, {}),
    ("32/8x128", "int8", torch.bfloat16, 2048, {"lse": True, "window": 99}),
    ("32/8x128", "int8", torch.float16, 256, {"lse": True, "sinks": True, "softcap": 2.0}),
    ("32/8x128", "int8_fp4", torch.bfloat16, 256, {"softcap": 2.0, "sinks": True}),
    ("16/4x64", "int8_static_fp4", torch.bfloat16, 2048, {"softcap": 2.0, "window": 99}),
    ("64/8x256", "int8_static", torch.bfloat16, 2048, {"sinks": True}),
    ("32/8x128", "int8_fp4", torch.bfloat16, 2048, {"lse": True}),
    ("32/8x128", "int8_static", torch.bfloat16, 2048, {"lse": True}),
]:
    problem = problem_of((8192,), heads, dtype, mode, q_lens=(q_len,), **more)
    config = SPEC.default_config(problem, device.current())
    assert SPEC.why_illegal(config, problem, device.current()) is None
    with FakeTensorMode(), offline.record_launches() as launches:
        SPEC.launch(**SPEC.make_inputs(problem, torch.device("cpu")), config=config)
    names = [x.fn.__name__ for x in launches]
    facts = []
    if "_to_16_bits_kernel" in names:
        facts = [dataclasses.asdict(offline.compile_cuda(x, 90)) for x in launches]
    found.append([names, facts, launches[-1].args.get("SCALES"), bool(more.get("lse"))])
# A chunk among sequences with a token each.
lens = (300, *[1] * 7)
mixed = problem_of((8192,) * 8, "32/8x128", torch.bfloat16, "int8", q_lens=lens)
assert SPEC.default_config(mixed, device.current())["variant"] == "hopper_chunk"
with FakeTensorMode(), offline.record_launches() as launches:
    SPEC.launch(**SPEC.make_inputs(mixed, torch.device("cpu")))
found.append([[x.fn.__name__ for x in launches], [], None, False])
# Results in fp16 of what this body would round to 11 bits, though a tuned file has it.
warnings.simplefilter("error")
for mode in ("int8_fp4", "int8_static"):
    fp16 = problem_of((8192,), "32/8x128", torch.float16, mode, q_lens=(2048,))
    with FakeTensorMode(), offline.record_launches() as launches:
        SPEC.launch(**SPEC.make_inputs(fp16, torch.device("cpu")))
    found.append([[x.fn.__name__ for x in launches], [], None, False])
print(json.dumps(found))
"""


@pytest.mark.slow
def test_compiled_for_sm90() -> None:
    *whole, fp4, static, mixed, fp16_fp4, fp16_static = json.loads(lines_of(CHILD)[-1])
    assert len(whole) == 6
    for names, facts, _, _ in whole:
        assert names[:2] == ["_to_16_bits_kernel", "_paged_attn_hopper_kernel"]
        assert names[2:] in ([], ["_combine_kernel"])
        assert facts[0]["spill_bytes"] == 0
        assert facts[0]["registers"] <= 80, facts  # 24 warps a core, and more
        assert facts[1]["registers"] == 168, facts
        assert facts[1]["spill_bytes"] <= 64, facts
    # Of keys, where a log-sum-exp is asked for or q is fp16; else of blocks, or of channels.
    assert [scales for names, _, scales, _ in whole if len(names) == 2] == [3, 1, 2, 2]
    # What lse and fp16 cannot have of this body, and tokens that are too few, the other takes.
    for names, *_ in (fp4, static, mixed, fp16_fp4, fp16_static):
        assert "_paged_attn_quantized_kernel" in names
        assert "_to_16_bits_kernel" not in names


# ---- what is converted -------------------------------------------------------------------------


def numbers_of(
    inputs: dict[str, Any], which: str, b: int, seen: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """What is made of a sequence's keys ``seen``, [n, head, dim], and their scales or units."""
    place = inputs["block_table"][b, seen // 16].long() * 16 + seen % 16
    codes, scale, *pool = (inputs[name] for name in CACHES if name.startswith(which))
    ones = torch.ones(codes.shape[2:], device=codes.device)
    cache = QuantizedKV(codes, ones, *(pool if pool[0].numel() else ()))
    cache = cache._replace(residual_format=FORMATS[inputs["mantissa_bits"]])
    numbers = read_positions(cache, place)  # code + residual
    if scale.dim() == 2:
        return numbers.to(FP16), scale
    of_token = scale.abs().transpose(1, 2).flatten(0, 1)[place]
    if which == "v":
        return (numbers * of_token[..., None]).to(dtype), of_token
    if dtype == FP16:
        return numbers.to(FP16), of_token
    # In units of the largest power of two that is no more than the largest scale of a page.
    units = torch.ones_like(of_token)
    for page in (seen // PAGE).unique():
        of_page = seen // PAGE == page
        units[of_page] = 2.0 ** (torch.frexp(of_token[of_page].amax(0))[1] - 1)
    return (numbers * (of_token / units)[..., None]).to(FP16), units


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_conversion(mode: str, dtype: torch.dtype, window: int | None, dev: torch.device) -> None:
    """Of what is in sight each number, once; around it zeros; what nobody sees is not looked at."""
    contexts, q_lens, page = (150, 40, 0, 77, 300), (5, 0, 0, 9, 150), PAGE
    whole = dtype == BF16 and "static" not in mode
    problem = chunk(
        q_lens, contexts, "4/2x64", mode, dtype=dtype, window=window, residual_block=16,
        mantissa_bits=0, max_context=400,
    )  # fmt: skip
    inputs = SPEC.make_inputs(problem, dev)
    if "fp4" in mode:  # one number of a slot is past the pool
        first = int(inputs["block_table"][4, 17])
        n_slots = inputs["k_residual"].shape[1]
        inputs["k_slots"][first, 1, 3] = n_slots + 7
        if "static" not in mode:
            inputs["k_scale"][first, 1, 3] = -1.0
        exact = {**inputs, "k_slots": inputs["k_slots"].clone()}
        exact["k_slots"][first, 1, 3] = n_slots - 1
        inputs["k_residual_scale"][1, n_slots - 1] = 120
    else:
        exact = inputs
    convert = paged_attn_quantized_chunk.bind_conversion(
        inputs["k_codes"],
        inputs["block_table"],
        page=page,
        window=window,
        static="static" in mode,
        n_slots=inputs["k_residual"].shape[1] if "fp4" in mode else 0,
        residual_block=problem["residual_block"],
        mantissa_bits=0,
        whole=whole,
        pdl=False,
    )
    columns = 400 // page + 1
    made = [
        torch.full((5 * columns, 2, page, 64), torch.nan, dtype=t, device=dev)
        for t in (FP16, FP16 if "static" in mode else dtype)
    ]
    scales = torch.full((5, 2, columns * (1 if whole else page)), torch.nan, device=dev)
    caches = [inputs[name] for name in CACHES]
    lens, ends = inputs["context_lens"], inputs["cu_seqlens_q"]
    convert(*caches, inputs["block_table"], lens, ends, *made, scales)
    token = torch.arange(columns * page, device=dev)
    for which, got in zip("kv", made, strict=True):
        got = got.view(5, columns, 2, page, 64).transpose(2, 3).reshape(5, columns * page, 2, 64)
        for b, (n, new) in enumerate(zip(contexts, q_lens, strict=True)):
            low = 0 if window is None else max(n - new - window + 1, 0)
            base, end = low // page * page, device.cdiv(n, TILE) * TILE
            if new == 0:
                base = end = low = n = 0
            seen = token[low:n]
            wanted, of_them = numbers_of(exact, which, b, seen, dtype)
            assert torch.equal(bytes_of(got[b, low:n]), bytes_of(wanted)), (which, b)
            assert not bool(got[b, base:low].any())
            assert not bool(got[b, n:end].any())
            assert bool(got[b, :base].isnan().all())
            assert bool(got[b, end:].isnan().all())
            if which == "k" and "static" not in mode:
                found = scales[b, :, seen // page] if whole else scales[b, :, low:n]
                assert torch.equal(found, of_them.T)
                assert whole or not bool(scales[b, :, base:low].any())
    if "static" in mode:
        assert bool(scales.isnan().all())


@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_numbers_far_beyond_static_scales(sign: float, dev: torch.device) -> None:
    """A channel of which calibration saw nothing: its numbers are the largest of fp16, not inf."""
    scale = torch.full((1, 64), 0.02)
    scale[0, 5] = 2.0**-100
    cache = allocate_quantized(
        4, 16, 1, 64, mode="int8_static_fp4", tau=0.0, device=dev, residual_block=32,
        outlier_share=1.0, static_scale=scale,
    )  # fmt: skip
    x = torch.randn(40, 1, 64, generator=torch.Generator().manual_seed(0)).to(dev)
    x[:, 0, 5] = sign
    append_quantized_ref(x, cache, torch.arange(40, device=dev))
    assert bool((read_positions(cache, torch.arange(40, device=dev))[:, 0, 5] * sign > 0.5).all())
    table = torch.arange(4, dtype=torch.int32, device=dev)[None]
    assert cache.residual is not None
    convert = paged_attn_quantized_chunk.bind_conversion(
        cache.codes, table, page=PAGE, window=None, static=True, n_slots=cache.residual.shape[1],
        residual_block=32, mantissa_bits=1, whole=False, pdl=False,
    )  # fmt: skip
    made = [torch.full((1, 1, PAGE, 64), torch.nan, dtype=FP16, device=dev) for _ in "kv"]
    lens = torch.tensor([40], dtype=torch.int32, device=dev)
    ends = torch.tensor([0, 40], dtype=torch.int32, device=dev)
    convert(*fields(cache)[:5] * 2, table, lens, ends, *made, torch.empty(1, device=dev))
    for got in made:
        assert bool((got[0, 0, :40, 5] == sign * 65504).all())
        assert bool(got[0, 0, :40].isfinite().all())


# ---- results, on the GPU -----------------------------------------------------------------------

gpu = pytest.mark.gpu
needs_sm90 = pytest.mark.skipif(
    device.current().arch != "sm90", reason="needs an sm90 GPU; this machine has none"
)


def config_of(head_dim: int = 128, **changes: Any) -> Config:
    problem = chunk((2048,), heads=f"8/2x{head_dim}")
    config = {**SPEC.default_config({**problem, "num_heads": 32, "num_kv_heads": 8}, SM90)}
    assert (config["variant"], config["SPLITS"]) == ("hopper_chunk", 1)
    return {**config, **changes}


def run(inputs: dict[str, Any], **more: Any) -> tuple[torch.Tensor, ...]:
    with poisoned_memory():  # what nobody has written is NaN
        return tensors_of(SPEC.launch(**{**inputs, **more}))


@gpu
@needs_sm90
@pytest.mark.parametrize("seed", range(28))
def test_random_problems_and_configs(seed: int, dev: torch.device) -> None:
    """What is out of sight is NaN, a slot past the pool, or no block at all; the same bits again.

    A log-sum-exp is asked for where this body gives it.
    """
    rng = random.Random(seed)
    mode, dim, window = MODES[seed % 4], (64, 128, 256)[seed % 3], rng.choice((None, None, 1, 300))
    kv_heads, group = rng.choice((1, 2)), rng.choice((1, 2, 3, 4, 8))
    given = {
        "mode": mode,
        "heads": f"{kv_heads * group}/{kv_heads}x{dim}",
        "dtype": rng.choice((BF16, FP16)) if mode == "int8" else BF16,
        "block_size": rng.choice((16, 32, 128, 256)),
        "residual_block": rng.choice((16, 32)),
        "mantissa_bits": rng.choice((0, 1, 2)),
        "outliers": rng.choice((0.0, 0.04, 0.3, 1.0)),
        "max_context": 3000,
        "window": window,
        "softcap": rng.choice((None, None, 5.0)),
        "sinks": rng.random() < 0.4,
        "lse": mode == "int8" and rng.random() < 0.7,
    }
    block_n = rng.choice((32, 64)) if dim == 256 else rng.choice((32, 64, 128))
    config = config_of(
        dim,
        BLOCK_N=block_n,
        num_stages=2 if dim == 256 else rng.choice((2, 3)) if block_n < 128 or dim == 64 else 2,
        SPLITS=1 if window else rng.choice((1, 1, 2, 5, 16)),
        MIN_SHARE=rng.choice((64, 128, 256)),
        PACK_HEADS=64 % group == 0 and rng.random() < 0.5,
        PDL=rng.random() < 0.5,
    )
    for _ in range(6):
        contexts = [
            rng.choice((0, 1, 15, 16, 127, 128, 129, 1000, 1025, 3000))
            for _ in range(rng.choice((1, 2, 4)))
        ]
        q_lens = [min(rng.choice((1, 63, 64, 65, 130, 300)), n + 9) for n in contexts]
        if len(q_lens) > 1:
            q_lens[rng.randrange(len(q_lens))] *= rng.choice((0, 1))
        problem = chunk(q_lens, contexts, **given)
        assert SPEC.why_illegal(config, problem, device.current()) is None
        inputs = SPEC.make_inputs(problem, dev)
        what = f"{problem} with {config}"
        got = run(inputs, config=config)
        try:
            assert_right(SPEC, inputs, got)
        except AssertionError as error:
            raise AssertionError(f"{what}: {error}") from None
        for a, b in zip(got, run(inputs, config=config), strict=True):
            assert torch.equal(bytes_of(a), bytes_of(b)), what


@gpu
@needs_sm90
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("q_len", [256, 2048])
def test_default_of_chunks(q_len: int, mode: str, dev: torch.device) -> None:
    """At the end of many keys, into rows that lie apart; with lse by whichever body has it."""
    problem = chunk((q_len,), (5000,), mode=mode, max_context=8192, outliers=0.04)
    config = SPEC.default_config(problem, device.current())
    assert (config["variant"], config["SPLITS"] > 1) == ("hopper_chunk", q_len == 256)
    inputs = SPEC.make_inputs(problem, dev)
    got = run(inputs, config=config)
    assert_right(SPEC, inputs, got)
    wide = torch.full((q_len + 2, 32, 136), 7.0, dtype=BF16, device=dev)
    out = wide[1:-1, :, 8:]
    run(inputs, out=out, config=config)
    assert torch.equal(out, got[0])
    out.fill_(7.0)
    assert bool((wide == 7.0).all())
    with_lse = run(inputs, config=config, return_lse=True)
    if mode == "int8":
        assert_right(SPEC, {**inputs, "return_lse": True}, with_lse)
        return
    portable = _portable_config(problem, device.current())
    for a, b in zip(with_lse, run(inputs, config=portable, return_lse=True), strict=True):
        assert torch.equal(a, b)


@gpu
@needs_sm90
@pytest.mark.parametrize("size", [1e-30, 1e-6, 1e4, 1e30])
@pytest.mark.parametrize(("mode", "lse"), [("int8", False), ("int8", True), ("int8_static", False)])
def test_sizes_of_queries(mode: str, lse: bool, size: float, dev: torch.device) -> None:
    """fp16 holds none of these; scales of keys take the size away again."""
    inputs = SPEC.make_inputs(chunk((100, 30), (700, 30), "8/2x128", mode), dev)
    inputs["q"] = (inputs["q"].float() * size).to(BF16)
    inputs["k_scale"] = inputs["k_scale"] / size
    inputs["return_lse"] = lse
    assert_right(SPEC, inputs, run(inputs, config=config_of()))


@gpu
@needs_sm90
@pytest.mark.parametrize("splits", [1, 5])
@pytest.mark.parametrize("mode", MODES)
def test_sequences_without_keys(mode: str, splits: int, dev: torch.device) -> None:
    """Nothing is converted for them, and what memory held before must not show."""
    problem = chunk((9, 70, 0, 200), (0, 300, 0, 0), "8/2x128", mode, max_context=3000)
    inputs = SPEC.make_inputs(problem, dev)
    out = run(inputs, config=config_of(SPLITS=splits, MIN_SHARE=64))
    assert_right(SPEC, inputs, out)
    assert not bool(out[0][:9].any())
    assert not bool(out[0][79:].any())


@gpu
@needs_sm90
@pytest.mark.parametrize("lse", [False, True])
def test_scales_of_keys_far_apart(lse: bool, dev: torch.device) -> None:
    """From 2^-20 to 1 in any order, and pages of tiny ones only, or of zeros."""
    inputs = SPEC.make_inputs(chunk((300,), (1500,), "8/2x128", lse=lse), dev)
    generator = torch.Generator(dev).manual_seed(3)
    power = torch.randint(
        -20, 1, inputs["k_scale"].shape, generator=generator, device=dev, dtype=torch.int32
    )
    inputs["k_scale"] = torch.ldexp(inputs["k_scale"], power)
    pages = inputs["block_table"][0].long()
    inputs["k_scale"][pages[:8]] *= 2.0**-100
    inputs["k_scale"][pages[16:24]] = 0.0
    assert_right(SPEC, inputs, run(inputs, config=config_of()))


@gpu
@needs_sm90
@pytest.mark.parametrize("splits", [1, 5])
@pytest.mark.parametrize(
    ("q", "k"), [(0.0, 0.0), (0.0, 2.0**-30), (1.0, 0.0), (2.0**-60, 2.0**-90)]
)
def test_queries_and_keys_near_zero(q: float, k: float, splits: int, dev: torch.device) -> None:
    """As of heads that are padding. What is out of sight stays so, where all scores are 0."""
    inputs = SPEC.make_inputs(chunk((300,), (700,), "8/2x128"), dev)
    inputs["q"] *= q
    inputs["k_scale"] *= k
    got = run(inputs, config=config_of(SPLITS=splits, MIN_SHARE=64))
    assert_right(SPEC, inputs, got)


@gpu
@needs_sm90
@pytest.mark.parametrize("spoilt", [torch.nan, torch.inf])
def test_a_row_that_is_no_number_spoils_itself_alone(spoilt: float, dev: torch.device) -> None:
    inputs = SPEC.make_inputs(chunk((200,), (700,), "8/2x128"), dev)
    clean = run(inputs, config=config_of())[0]
    inputs["q"][77, 2, 5] = spoilt
    got = run(inputs, config=config_of())[0]
    assert bool(got[77, 2].isnan().any())
    got[77, 2] = clean[77, 2]
    assert torch.equal(got, clean)


@gpu
@needs_sm90
@pytest.mark.parametrize("which", ["k", "v"])
def test_a_scale_that_is_no_number_spoils_who_sees_it(which: str, dev: torch.device) -> None:
    inputs = SPEC.make_inputs(chunk((200, 100), (700, 300), "8/2x128"), dev)
    clean = run(inputs, config=config_of())[0]
    block = int(inputs["block_table"][0, 600 // 16])
    inputs[f"{which}_scale"][block, 1, 600 % 16] = torch.nan
    got = run(inputs, config=config_of())[0]
    assert bool(got[100:200, 4:].isnan().all())  # of token 600 on, the heads that share this one
    # A value's weight for those before it is zero, in the same tile, and zero times NaN is NaN.
    first = 100 if which == "k" else 0
    got[first:200, 4:] = clean[first:200, 4:]
    assert torch.equal(got, clean)


@gpu
@needs_sm90
def test_it_reads_whatever_lies_at_odd_addresses(dev: torch.device) -> None:
    """Codes, scales, residuals, q or out that do not lie at 16 bytes take the portable body."""
    inputs = SPEC.make_inputs(chunk((100,), (700,), "8/2x128", "int8_fp4"), dev)
    inputs["out"] = torch.empty_like(inputs["q"])
    for name in ("q", "out", "k_codes", "v_scale", "v_residual"):
        kept = inputs[name]
        step = 4 // kept.element_size()
        buffer = torch.zeros(kept.numel() + step, dtype=kept.dtype, device=dev)
        moved = buffer[step:].view(kept.shape)
        moved.copy_(kept)
        assert moved.data_ptr() % 16
        moved_inputs = {**inputs, name: moved}
        got = run(moved_inputs, config=config_of())
        assert_right(SPEC, {n: t for n, t in moved_inputs.items() if n != "out"}, got)
    apart = torch.empty(100, 8, 129, dtype=BF16, device=dev)[..., :128]
    apart.copy_(inputs["q"])
    given = {**{n: t for n, t in inputs.items() if n != "out"}, "q": apart}
    assert_right(SPEC, given, run(given, config=config_of()))


@gpu
@needs_sm90
@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("mode", MODES)
def test_one_graph_for_all_lengths(mode: str, splits: int, dev: torch.device) -> None:
    """A step's tensors hold other sequences, tables and caches each time."""
    config = config_of(SPLITS=splits, MIN_SHARE=64)

    def made(contexts: Any, q_lens: Any) -> dict[str, Any]:
        problem = chunk(
            q_lens, contexts, "8/2x128", mode, max_context=2000, poison=False, lse=mode == "int8"
        )
        return SPEC.make_inputs({**problem, "max_seqlen_q": 224}, dev)

    inputs = made((2000, 1999, 700), (224, 20, 200))
    out = torch.empty_like(inputs["q"])
    run(inputs, out=out, config=config)
    graph = device.new_graph()
    with device.capture(graph):
        results = tensors_of(SPEC.launch(**inputs, out=out, config=config))
    for contexts, q_lens in (
        ((2000, 1999, 700), (224, 20, 200)),
        ((0, 0, 0), (0, 0, 0)),
        ((1, 2000, 0), (1, 224, 0)),
        ((300, 257, 64), (100, 0, 64)),
        ((2000, 513, 1025), (224, 220, 0)),
    ):
        new = made(contexts, q_lens)
        for name, value in new.items():
            if isinstance(value, torch.Tensor):
                inputs[name][tuple(slice(n) for n in value.shape)].copy_(value)
        for result in results:
            result.fill_(7.0)
        graph.replay()
        n = sum(q_lens)
        assert_right(SPEC, new, [t[:n] for t in results])
        assert all(bool((t[n:] == 7.0).all()) for t in results)


@gpu
@needs_sm90
@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("mode", ["int8_fp4", "int8_static_fp4"])
def test_it_waits_for_what_was_launched_before(mode: str, splits: int, dev: torch.device) -> None:
    """All that it reads is written by the kernels right before, and no call's numbers by others."""
    problem = chunk((70,) * 3, (512,) * 3, "8/2x128", mode, poison=False)
    new = SPEC.make_inputs(problem, dev)
    names = [n for n, t in new.items() if isinstance(t, torch.Tensor)]
    old = {n: torch.zeros_like(t) if n in names else t for n, t in new.items()}
    config = config_of(SPLITS=splits, MIN_SHARE=64)
    expected = run(new, config=config)[0]
    for last in names:
        for n in names:
            old[n].zero_()
        run(old, config=config)
        for n in [*(n for n in names if n != last), last]:
            old[n].copy_(new[n])
        assert torch.equal(run(old, config=config)[0], expected), f"written last: {last}"
    sets = [{**new, "q": torch.roll(new["q"], i, -1)} for i in range(8)]
    wanted = [run(each, config=config)[0] for each in sets]
    outs = [torch.empty_like(new["q"]) for _ in sets]
    graph = device.new_graph()
    with device.capture(graph):
        for each, out in zip(sets, outs, strict=True):
            SPEC.launch(**each, out=out, config=config)
    for _ in range(20):
        graph.replay()
    device.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(outs, wanted, strict=True))


@gpu
@needs_sm90
@pytest.mark.parametrize("mode", MODES)
def test_pages_that_sequences_share(mode: str, dev: torch.device) -> None:
    inputs = SPEC.make_inputs(chunk((200, 180), (700, 600), "8/2x128", mode, poison=False), dev)
    inputs["block_table"][1, :30] = inputs["block_table"][0, :30]
    assert_right(SPEC, inputs, run(inputs, config=config_of()))
