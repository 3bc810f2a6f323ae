"""The Hopper body of paged_attn for chunks: refusals, what the compiler makes of it, results.

Without a GPU it is compiled for sm_90.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

import tkernels
from tests.compiled_for import lines_of
from tkernels import device, flash_attn_hopper, paged_attn_hopper
from tkernels.attention_cases import paged_problem
from tkernels.device import cdiv
from tkernels.ops.paged_attn import SPEC, _by_address
from tkernels.registry import Config
from tkernels.testing import assert_right, bytes_of, poisoned_memory, tensors_of

ROOT = Path(__file__).resolve().parents[1]
SM90 = device.sm_facts(90)
BF16 = torch.bfloat16


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({}, None),
        ({"dtype": torch.float32}, "needs bfloat16 or float16"),
        ({"head_dim": 100}, "divides by 8, got 100"),
        ({"aligned": False}, "divide by 16 bytes"),
        ({"window": 5}, "no window"),
        ({"dev": device.sm_facts(80)}, "got sm80"),
        ({"dev": device.ascend_facts()}, "got ascend910b"),
    ],
)
def test_why_unfit(changed: dict[str, Any], why: str | None) -> None:
    facts = {"dtype": BF16, "head_dim": 128, "aligned": True, "window": None, "dev": SM90}
    said = paged_attn_hopper.why_unfit(**{**facts, **changed})
    assert said is None if why is None else why in str(said)


def config_of(head_dim: int = 128, block_size: int = 16, **changes: Any) -> Config:
    body = paged_attn_hopper.default_config(head_dim, block_size)
    rest = {"PACK_HEADS": False, "SPLITS": 1, "MIN_SHARE": 256, "PDL": False, "num_warps": 4}
    rest |= {"variant": "hopper", "PEEL": False, "LONG_FIRST": False, "programs_per_core": 0}
    return {**rest, **body, **changes}


def test_why_illegal() -> None:
    def said(config: Config, block_size: int = 16, group: int = 4) -> str | None:
        return paged_attn_hopper.why_illegal(config, 128, block_size, group, SM90)

    for block_size in (16, 32, 64, 128):
        assert said(config_of(block_size=block_size), block_size) is None
    assert said(config_of(BLOCK_N=64), 128) == "BLOCK_N must be whole blocks of 128, got 64"
    assert said(config_of(num_stages=9)) is not None
    for group in (1, 2, 4, 8, 64):
        assert said(config_of(PACK_HEADS=True, SPLITS=5, PDL=True), group=group) is None
    for group in (3, 5, 24, 128):
        assert said(config_of(SPLITS=5), group=group) is None
        why = f"PACK_HEADS needs a number of heads that divides 64, got {group}"
        assert said(config_of(PACK_HEADS=True), group=group) == why
    for name in ("SPLITS", "MIN_SHARE"):
        assert said(config_of(**{name: 0})) == "SPLITS and MIN_SHARE must be 1 or more"
    assert said(config_of(PDL=True)) == "variant hopper has PDL for SPLITS alone"


@pytest.mark.parametrize(
    ("context", "q_len", "changed", "variant"),
    [
        (8192, 2048, {}, "hopper"),
        (8192, 512, {}, "hopper"),
        (8192, 256, {}, "hopper"),  # 64 tiles leave half of the chip idle, but for splits
        (8192, 32, {}, "hopper"),  # with the heads that share keys 128 rows
        (8192, 31, {}, "portable"),
        (8192, 64, {}, "hopper"),
        (1024, 64, {}, "portable"),
        (8192, 2048, {"window": 100}, "portable"),
        (8192, 256, {"window": 5000}, "portable"),
        (8192, 2048, {"dtype": torch.float32}, "portable"),
        (8192, 2048, {"block_size": 128}, "hopper"),
        (8192, 2048, {"block_size": 256}, "portable"),
    ],
)
def test_what_the_default_is(
    context: int, q_len: int, changed: dict[str, Any], variant: str
) -> None:
    given = {"dtype": BF16, **changed}
    problem = paged_problem((context,), "32/8x128", given.pop("dtype"), q_lens=(q_len,), **given)
    for dev in (SM90, device.sm_facts(100), device.ascend_facts()):
        chosen = SPEC.default_config(problem, dev)
        assert chosen["variant"] == (variant if dev is SM90 else "portable")
        assert dev.is_npu or SPEC.why_illegal(chosen, problem, dev) is None
    unaligned = {**problem, "aligned": False}
    assert SPEC.default_config(unaligned, SM90)["variant"] == "portable"


@pytest.mark.parametrize(
    ("heads", "q_len", "context", "packed", "splits"),
    [
        ("16/8x128", 96, 32768, False, 8),  # 16 tiles either way
        ("16/8x128", 224, 32768, False, 4),  # 32
        ("16/8x128", 256, 8192, False, 4),
        ("16/8x128", 512, 8192, False, 2),
        ("16/8x128", 64, 32768, True, 16),  # 8
        ("32/8x128", 96, 32768, True, 5),  # 24 instead of 32
        ("32/8x128", 224, 32768, True, 7),  # 56 instead of 64
        ("32/8x128", 512, 8192, False, 1),
        ("32/8x128", 2048, 32768, False, 1),
        ("24/8x128", 100, 32768, False, 5),  # 3 heads fill no tile
        ("32/8x128", 96, 2048, True, 4),
    ],
)
def test_default_splits(heads: str, q_len: int, context: int, packed: bool, splits: int) -> None:
    """Programs for all cores, about once; few of them where that is as good."""
    problem = paged_problem((context,), heads, BF16, q_lens=(q_len,))
    chosen = SPEC.default_config(problem, SM90)
    assert (chosen["variant"], chosen["PACK_HEADS"], chosen["SPLITS"]) == ("hopper", packed, splits)
    assert chosen["PDL"] == (splits > 1)
    assert all(chosen[n] in values for n, values in SPEC.space(SM90).items() if n in chosen)
    # The lengths of a call do not matter, what its table has room for does.
    short = {**problem, "contexts": (q_len,)}
    assert SPEC.default_config(short, SM90) == chosen


@pytest.mark.parametrize("tiles", [1, 8, 16, 24, 31, 48, 64, 78])
@pytest.mark.parametrize("keys", [2048, 8192, 32768, 10**6])
def test_splits_share_the_work_out(tiles: int, keys: int) -> None:
    """At least 256 keys each, and not much longer than what all cores would take together."""
    splits = paged_attn_hopper.default_splits(tiles, keys, 132)
    assert splits == 1 or splits * 256 <= keys
    if keys >= 32768 and tiles >= 8:
        blocks = cdiv(tiles * splits, 132) * cdiv(keys // 128, splits)
        assert blocks <= 1.3 * tiles * keys / 128 / 132


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Functions that deal tiles and keys as plain Python."""
    numbers = types.SimpleNamespace(minimum=min, maximum=max, num_programs=lambda axis: 5)
    monkeypatch.setattr(flash_attn_hopper, "gl", numbers)
    for name in ("_tile_of", "_split_of", "_used"):
        monkeypatch.setattr(flash_attn_hopper, name, getattr(flash_attn_hopper, name).fn)


@pytest.mark.parametrize("section", [1, 3, 6])
@pytest.mark.parametrize("splits", [1, 2, 7])
def test_every_split_of_every_tile_is_dealt_once(splits: int, section: int, plain: None) -> None:
    found = []
    for item in range(3 * 6 * splits):
        tile, split = flash_attn_hopper._split_of(item, 3 * 6, splits)
        found.append((*flash_attn_hopper._tile_of(tile, 3, 6, section, 2), split))
    assert sorted(found) == sorted(itertools.product(range(3), range(3), range(2), range(splits)))
    # Those of one split lie together: what runs at a time shares keys.
    assert [x[-1] for x in found] == sorted(x[-1] for x in found)


@pytest.mark.parametrize("splits", [2, 3, 8])
@pytest.mark.parametrize("keys", [0, 1, 255, 256, 257, 1000, 2047, 2048, 2049, 5000])
def test_every_block_of_keys_is_dealt_once(keys: int, splits: int, plain: None) -> None:
    """Runs that differ by a block at most; a split without one looks past all keys, and at none."""
    used = flash_attn_hopper._used(keys, splits, 256)
    assert used == min(max(cdiv(keys, 256), 1), splits)
    last = max(cdiv(keys, 128), 1)
    for first, end in {(0, last), (0, 1), (last // 2, last), (last - 1, last)}:
        dealt, counts = [], []
        for split in range(used):
            start, stop = flash_attn_hopper._share.fn(first, end, split, keys, 128, splits, 256)
            if start * 128 >= keys and keys > 0:
                assert stop == start + 1
                start = stop
            counts.append(stop - start)
            dealt += range(start, stop)
        assert dealt == list(range(first, end))
        assert max(counts) - min(counts) <= 1


@pytest.mark.parametrize("odd", [None, "q", "k", "v", "out"])
def test_an_odd_address_takes_the_portable_body(odd: str | None) -> None:
    """Each body gets its arguments in its own order."""
    names = ("q", "k", "v", "table", "lens", "out", "lse", "cu", "sinks")
    given = {name: torch.zeros(64)[name == odd :] for name in names}
    assert odd is None or given[odd].data_ptr() % 16
    calls: list[tuple[str, dict[str, Any]]] = []

    def hopper(q: Any, k: Any, v: Any, table: Any, lens: Any, cu: Any, *rest: Any) -> None:
        out, lse, sinks = rest
        calls.append(
            ("hopper", dict(zip(names, (q, k, v, table, lens, out, lse, cu, sinks), strict=True)))
        )

    def portable(*args: Any) -> None:
        calls.append(("portable", dict(zip(names, args, strict=True))))

    _by_address(hopper, portable)(*given.values())
    ((body, got),) = calls
    assert body == ("hopper" if odd is None else "portable")
    assert all(got[name] is given[name] for name in names)


# In a process of its own: here Triton is an interpreter, there it must compile.
CHILD = """
import dataclasses, json, re
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from tkernels import device, flash_attn_hopper, offline, paged_attn_hopper

ptx, compile_it = [], device.triton.compile
def keeping(*args, **kwargs):
    compiled = compile_it(*args, **kwargs)
    ptx.append(compiled.asm["ptx"])
    return compiled
device.triton.compile = keeping

found = []
for head_dim, n, stages, block_size, more, pack, splits in [
    (128, 128, 2, 16, False, False, 1), (128, 128, 2, 128, True, False, 1),
    (64, 128, 4, 16, False, False, 1), (80, 64, 3, 32, True, False, 1),
    (256, 64, 2, 64, False, False, 1), (128, 128, 2, 16, True, True, 1),
    (128, 128, 2, 16, False, True, 4), (128, 128, 2, 16, True, False, 4),
    (64, 128, 4, 16, False, True, 3), (80, 64, 3, 32, True, False, 3),
    (256, 64, 2, 64, False, True, 2),
]:
    with FakeTensorMode(), offline.record_launches() as launches:
        q, out = (torch.empty(64, 8, head_dim, dtype=torch.bfloat16) for _ in range(2))
        cache = torch.empty(20, block_size, 2, head_dim, dtype=torch.bfloat16)
        table, lens, ends = (torch.empty(n, dtype=torch.int32) for n in ((2, 9), 2, 3))
        results = out, torch.empty(64, 8), torch.empty(8) if more else None
        if splits > 1:
            results = torch.empty(64 * 8 * splits * (head_dim + 1)), None, None
        paged_attn_hopper.bind(
            q, cache, cache, table, out, max_seqlen_q=40, scale=0.1,
            softcap=2.0 if more else None, has_sinks=more, has_lse=True,
            config={"BLOCK_M": 128, "BLOCK_N": n, "num_stages": stages, "PACK_HEADS": pack,
                    "SPLITS": splits, "MIN_SHARE": 256, "PDL": splits > 1},
        )(q, cache, cache, table, lens, ends, *results)
    got = dataclasses.asdict(offline.compile_cuda(launches[0], 90))
    dim = flash_attn_hopper._block_dim(head_dim)
    found.append({**got, "case": [head_dim, n, stages, block_size, more, pack, splits],
                  "splits": splits,
                  "most_shared": flash_attn_hopper._shared_bytes(n, stages, dim),
                  "waits": ptx[-1].count("griddepcontrol.wait"),
                  "copies": ptx[-1].count("cp.async.bulk.tensor"),
                  "expected_copies": dim // 64 * (2 + 2 * n // block_size)})
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
    assert len(found) == 11
    for case in found:
        if case["splits"] == 1:
            assert case["shared_bytes"] == case["most_shared"], case
        else:  # results leave as they lie
            assert case["shared_bytes"] < case["most_shared"], case
        assert case["waits"] == (case["splits"] > 1), case
        assert case["copies"] == case["expected_copies"], case
        # 168 of the 240 that a group asks for, and a few sizes put away between tiles.
        assert case["registers"] == 168, case
        assert case["spill_bytes"] <= 176, case


LAUNCHES = """
import json
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from tkernels import offline
from tkernels.attention_cases import paged_problem
from tkernels.ops.paged_attn import SPEC

found = []
for q_len, sinks in ((224, False), (96, True), (2048, False)):
    problem = paged_problem((8192,) * 2, "16/8x128", torch.bfloat16, q_lens=(q_len, 1), sinks=sinks,
                            lse=True)
    with FakeTensorMode(), offline.record_launches() as launches:
        SPEC.launch(**SPEC.make_inputs(problem, torch.device("cpu")))
    found.append([[x.fn.__name__, x.grid[0], x.args["SPLITS"], x.args.get("SINKS"),
                   x.args.get("HAS_SINKS"), x.options.get("launch_pdl", False)] for x in launches])
print(json.dumps(found))
"""


@pytest.mark.slow
def test_what_a_call_launches() -> None:
    """Results of splits are merged, by a kernel that has the sinks; else they are whole."""
    hopper, merging = "_paged_attn_hopper_kernel", "_combine_kernel"
    chunk, more, whole = json.loads(lines_of(LAUNCHES)[-1])
    assert chunk == [
        [hopper, 128, 2, False, None, True],
        [merging, 32 * 132, 2, None, False, True],  # of 7168 rows: 32 programs a core
    ]
    assert more == [
        [hopper, 128, 4, False, None, True],
        [merging, 2 * 96 * 16, 4, None, True, True],
    ]
    assert whole == [[hopper, 132, 1, False, None, False]]


# ---- results, on the GPU -----------------------------------------------------------------------

needs_sm90 = pytest.mark.skipif(
    device.current().arch != "sm90", reason="needs an sm90 GPU; this machine has none"
)
LENGTHS = [
    ((300, 129, 0, 128, 700), (300, 1, 0, 128, 130)),
    ((2048,), (1000,)),
    ((5, 0, 100), (9, 3, 100)),  # more tokens than keys, and no key at all
]


@pytest.mark.gpu
@needs_sm90
@pytest.mark.parametrize("more", [{}, {"softcap": 3.0, "sinks": True}], ids=["plain", "more"])
@pytest.mark.parametrize(("contexts", "q_lens"), LENGTHS)
@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize("heads", ["8/2x128", "4/4x64", "5/1x80", "4/2x256"])
def test_results(
    heads: str, block_size: int, contexts: Any, q_lens: Any, more: Any, dev: torch.device
) -> None:
    """What is out of sight is NaN, or no block at all; q is longer than the sequences are."""
    sizes = {"block_size": block_size, "max_context": 900}
    problem = paged_problem(contexts, heads, BF16, q_lens=q_lens, lse=True, **sizes, **more)
    inputs = SPEC.make_inputs(problem, dev)
    q = torch.cat([inputs["q"], torch.full_like(inputs["q"][:3], torch.nan)])
    out, lse = torch.full_like(q, 7.0), torch.full(q.shape[:2], 7.0, device=dev)
    config = config_of(q.shape[-1], block_size)
    launch = paged_attn_hopper.bind(
        q,
        inputs["k_cache"],
        inputs["v_cache"],
        inputs["block_table"],
        out,
        max_seqlen_q=inputs["max_seqlen_q"],
        scale=q.shape[-1] ** -0.5,
        softcap=inputs.get("softcap"),
        has_sinks="sinks" in inputs,
        has_lse=True,
        config=config,
    )
    names = ("k_cache", "v_cache", "block_table", "context_lens", "cu_seqlens_q")
    for _ in range(2):
        launch(q, *(inputs[n] for n in names), out, lse, inputs.get("sinks"))
        assert_right(SPEC, inputs, (out[:-3], lse[:-3]))
        assert bool((out[-3:] == 7.0).all())
        assert bool((lse[-3:] == 7.0).all())


def run(inputs: dict[str, Any], **more: Any) -> tuple[torch.Tensor, ...]:
    with poisoned_memory():  # partial results that nobody wrote are NaN
        return tensors_of(tkernels.paged_attn(**inputs, **more))


@pytest.mark.gpu
@needs_sm90
@pytest.mark.parametrize("seed", range(16))
def test_random_splits(seed: int, dev: torch.device) -> None:
    """Lengths around where shares begin, more splits than keys, sequences without tokens or keys;
    the same bits from each run, and alone as among others."""
    rng = random.Random(seed)
    kv_heads, group = rng.choice((1, 2)), rng.choice((1, 2, 3, 4, 8))
    dim, block_size = rng.choice((64, 80, 128, 256)), rng.choice((16, 32, 64))
    given = {
        "dtype": rng.choice((BF16, torch.float16)),
        "block_size": block_size,
        "max_context": 4096,
        "softcap": rng.choice((None, None, 5.0)),
        "sinks": rng.random() < 0.4,
        "lse": rng.random() < 0.7,
    }
    config = config_of(
        dim,
        block_size,
        SPLITS=rng.choice((2, 3, 4, 5, 7, 8, 16, 32)),
        MIN_SHARE=rng.choice((64, 128, 256, 512)),
        PDL=rng.random() < 0.5,
        PACK_HEADS=64 % group == 0 and rng.random() < 0.6,
    )
    for _ in range(8):
        step = rng.choice((config["BLOCK_N"], config["MIN_SHARE"]))
        contexts = [
            min(4096, max(0, rng.choice((0, 1, 2, 3, config["SPLITS"])) * step + near))
            for near in (rng.choice((-1, 0, 1, 60)) for _ in range(rng.choice((1, 2, 3))))
        ]
        q_lens = [min(rng.choice((1, 63, 64, 65, 130, 300)), n + 9) for n in contexts]
        if len(q_lens) > 1:
            q_lens[rng.randrange(len(q_lens))] *= rng.choice((0, 1))
        problem = paged_problem(
            contexts, f"{kv_heads * group}/{kv_heads}x{dim}", q_lens=q_lens, **given
        )
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
        longest = max(range(len(q_lens)), key=q_lens.__getitem__)
        start = sum(q_lens[:longest])
        rows = slice(start, start + q_lens[longest])
        alone = {
            **inputs,
            "q": inputs["q"][rows],
            "block_table": inputs["block_table"][longest : longest + 1],
            "context_lens": inputs["context_lens"][longest : longest + 1],
            "cu_seqlens_q": torch.tensor([0, q_lens[longest]], dtype=torch.int32, device=dev),
        }
        for a, b in zip(got, run(alone, config=config), strict=True):
            assert torch.equal(bytes_of(a[rows]), bytes_of(b)), what


@pytest.mark.gpu
@needs_sm90
@pytest.mark.parametrize("heads", ["16/8x128", "32/8x128", "8/1x64"])
@pytest.mark.parametrize("q_len", [65, 96, 224, 256])
def test_default_of_chunks(q_len: int, heads: str, dev: torch.device) -> None:
    """What is launched for a chunk at the end of many keys, into rows that lie apart."""
    problem = paged_problem((5000,), heads, BF16, q_lens=(q_len,), max_context=8192, lse=True)
    config = SPEC.default_config(problem, device.current())
    assert (config["variant"], config["SPLITS"] > 1) == ("hopper", True)
    inputs = SPEC.make_inputs(problem, dev)
    got = run(inputs)
    assert_right(SPEC, inputs, got)
    wide = torch.full((len(inputs["q"]) + 2, *inputs["q"].shape[1:-1], 136), 7.0, dtype=BF16)
    wide = wide.to(dev)
    out = wide[1:-1, :, 8 : 8 + inputs["q"].shape[-1]]
    run(inputs, out=out)
    assert torch.equal(out, got[0])
    out.fill_(7.0)
    assert bool((wide == 7.0).all())


@pytest.mark.gpu
@needs_sm90
@pytest.mark.parametrize("pack", [False, True])
def test_whole_results_of_packed_heads(pack: bool, dev: torch.device) -> None:
    problem = paged_problem(
        (300, 129, 0, 700), "8/2x128", BF16, q_lens=(300, 1, 0, 130), sinks=True, lse=True
    )
    inputs = SPEC.make_inputs(problem, dev)
    assert_right(SPEC, inputs, run(inputs, config=config_of(PACK_HEADS=pack)))


@pytest.mark.gpu
@needs_sm90
def test_one_graph_for_all_lengths(dev: torch.device) -> None:
    """A step's tensors hold other sequences each time: some splits have no keys, or all of them."""
    problem = paged_problem(
        (4096, 3000), "16/8x128", BF16, q_lens=(224, 20), lse=True, poison=False
    )
    inputs = SPEC.make_inputs(problem, dev)
    assert SPEC.default_config(problem, device.current())["SPLITS"] > 1
    out = torch.empty_like(inputs["q"])
    run(inputs, out=out)
    graph = device.new_graph()
    with device.capture(graph):
        lse = tkernels.paged_attn(**inputs, out=out)[1]
    for contexts, ends in (
        ((224, 20), (0, 224, 244)),
        ((0, 0), (0, 0, 0)),
        ((1, 4096), (0, 1, 225)),
        ((300, 257), (0, 100, 100)),
        ((4096, 513), (0, 224, 244)),
    ):
        for name, numbers in (("context_lens", contexts), ("cu_seqlens_q", ends)):
            inputs[name].copy_(torch.tensor(numbers, dtype=torch.int32))
        inputs["q"].normal_()
        out.fill_(7.0)
        lse.fill_(7.0)
        graph.replay()
        want, want_lse = SPEC.reference(**inputs)
        last = ends[-1]
        torch.testing.assert_close(lse[:last], want_lse[:last], atol=2e-3, rtol=1e-3)
        torch.testing.assert_close(out[:last], want[:last], atol=8e-3, rtol=2e-2)
        assert bool((out[last:] == 7.0).all())
        assert bool((lse[last:] == 7.0).all())


@pytest.mark.gpu
@needs_sm90
def test_splits_wait_for_what_was_launched_before(dev: torch.device) -> None:
    """Lengths, table, q and caches are written by the kernels right before."""
    problem = paged_problem((512,) * 3, "8/2x128", BF16, q_lens=(70,) * 3, poison=False)
    new = SPEC.make_inputs(problem, dev)
    names = ("q", "k_cache", "v_cache", "block_table", "context_lens", "cu_seqlens_q")
    old = {**new, **{n: torch.zeros_like(new[n]) for n in names}}
    config = config_of(SPLITS=4, MIN_SHARE=64, PDL=True, PACK_HEADS=True)
    expected = run(new, config=config)[0]
    for last in names:
        for n in names:
            old[n].zero_()
        run(old, config=config)
        for n in (*(n for n in names if n != last), last):
            old[n].copy_(new[n])
        assert torch.equal(run(old, config=config)[0], expected), f"written last: {last}"


@pytest.mark.gpu
@needs_sm90
def test_calls_with_splits_in_a_row_do_not_mix(dev: torch.device) -> None:
    """Each call's partial results live in memory that the next call's may reuse."""
    problem = paged_problem((700, 3000), "8/2x128", BF16, q_lens=(96, 130), poison=False)
    inputs = SPEC.make_inputs(problem, dev)
    config = config_of(SPLITS=8, MIN_SHARE=64, PDL=True)
    sets = [{**inputs, "q": torch.roll(inputs["q"], seed, -1)} for seed in range(8)]
    expected = [run(each, config=config)[0] for each in sets]
    outs = [torch.empty_like(inputs["q"]) for _ in sets]
    graph = device.new_graph()
    with device.capture(graph):
        for each, out in zip(sets, outs, strict=True):
            tkernels.paged_attn(**each, out=out, config=config)
    for _ in range(20):
        graph.replay()
    device.synchronize()
    for got, want in zip(outs, expected, strict=True):
        assert torch.equal(got, want)
