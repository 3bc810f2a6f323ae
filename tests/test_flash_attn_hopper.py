"""The Hopper body of flash_attn: what it refuses, what the compiler makes of it, and its results.

Without a GPU it is compiled for sm_90 and its launch path is run against a stand-in for Triton's.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

import tkernels
from tkernels import attention, config, device
from tkernels import flash_attn_hopper as hopper
from tkernels.ops.flash_attn import SPEC

ROOT = Path(__file__).resolve().parents[1]
SM90 = device.sm_facts(90)
BF16 = torch.bfloat16

# ---- what it refuses ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({}, None),
        ({"dtype": torch.float32}, "needs bfloat16 or float16"),
        ({"head_dim": 100}, "divides by 8, got 100"),
        ({"head_dim": 264}, "head_dim of 8 to 256"),
        ({"aligned": False}, "divide by 16 bytes"),
        ({"has_mask": True}, "no mask"),
        ({"dev": device.sm_facts(100)}, "needs an sm90 device, got sm100"),
        ({"dev": device.sm_facts(80)}, "got sm80"),
        ({"dev": device.ascend_facts()}, "got ascend910b"),
    ],
)
def test_why_unfit(changed: dict[str, Any], why: str | None) -> None:
    facts = {"dtype": BF16, "head_dim": 128, "aligned": True, "has_mask": False, "dev": SM90}
    said = hopper.why_unfit(**{**facts, **changed})
    assert said is None if why is None else why in str(said)


@pytest.mark.parametrize(
    ("changed", "head_dim", "why"),
    [
        ({"BLOCK_M": 64}, 128, "BLOCK_M 128, got 64"),
        ({"BLOCK_N": 256}, 64, "BLOCK_N of 32 to 128"),
        ({"BLOCK_N": 128}, 256, "BLOCK_N of 32 to 64"),
        ({"num_stages": 1}, 128, "num_stages of 2 or more"),
        ({"num_stages": 3}, 128, "shared memory"),
        ({"SECTION": 0}, 128, "SECTION must be 1 or more"),
    ],
)
def test_why_illegal(changed: dict[str, int], head_dim: int, why: str) -> None:
    given = hopper.default_config(head_dim)
    assert hopper.why_illegal(given, head_dim, SM90) is None
    assert why in str(hopper.why_illegal({**given, **changed}, head_dim, SM90))


def test_default_config_is_legal_for_every_head_dim() -> None:
    for head_dim in range(8, 257, 8):
        assert hopper.why_illegal(hopper.default_config(head_dim), head_dim, SM90) is None


@pytest.mark.parametrize(
    ("tiles", "n_batch_heads", "group", "head_dim", "causal", "sections"),
    [  # those within 2% of the fastest measured on an H100 at 32 query heads
        (32, 32, 4, 128, True, {32, hopper.ALL_HEADS}),
        (4, 512, 4, 128, True, {8, 16}),
        (8, 512, 4, 128, True, {8}),
        (32, 128, 4, 128, False, {8, 16, 32, hopper.ALL_HEADS}),
        (32, 64, 4, 256, True, {hopper.ALL_HEADS}),
        # By reason: keys of all these heads are too many to be read for each tile of queries.
        (32, 128, 1, 128, True, {8}),
        (1, 1, 1, 8, True, {8, 16, 32, hopper.ALL_HEADS}),
    ],
)
def test_default_section(
    tiles: int, n_batch_heads: int, group: int, head_dim: int, causal: bool, sections: set[int]
) -> None:
    assert hopper.default_section(tiles, tiles, n_batch_heads, group, head_dim, causal, 132) in (
        sections
    )


@pytest.mark.parametrize("section", [1, 3, 8, 24, 100])
@pytest.mark.parametrize("n_programs", [1, 42, 132])
def test_every_tile_is_dealt_once(
    section: int, n_programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``_tile_of`` as plain Python; and programs' shares are even where tiles go to and fro."""
    plain = types.SimpleNamespace(num_programs=lambda axis: n_programs, minimum=min)
    monkeypatch.setattr(hopper, "gl", plain)
    n_m, n_heads, n_batch_heads = 7, 8, 24
    dealt = [
        hopper._tile_of.fn(tile, n_m, n_batch_heads, section, n_heads)
        for tile in range(n_m * n_batch_heads)
    ]
    assert set(dealt) == set(itertools.product(range(n_m), range(3), range(n_heads)))
    if n_programs == 42 and section >= n_batch_heads:  # one way they would differ by 6
        assert len({sum(m for m, _, _ in dealt[i::42]) for i in range(42)}) == 1


def test_is_aligned() -> None:
    qkv = torch.empty(2, 5, 6, 24, dtype=BF16)
    assert hopper.is_aligned(*qkv.split(2, dim=2), qkv.transpose(1, 2))
    assert hopper.is_aligned(torch.empty(1, 5, 2, 24, dtype=BF16)[:, :1, :1])
    assert not hopper.is_aligned(qkv, torch.empty(2, 5, 6, 20, dtype=BF16))
    assert not hopper.is_aligned(qkv[:, :, :1].expand(2, 5, 6, 24))  # a stride of zero


def test_spec_chooses_it_on_sm90_alone() -> None:
    problem = next(c.problem for c in SPEC.cases if "bench" in c.tags)
    assert SPEC.default_config(problem, SM90)["variant"] == "hopper"
    for other in (device.sm_facts(80), device.sm_facts(100), device.ascend_facts()):
        assert SPEC.default_config(problem, other)["variant"] == "portable"
    masked = {**problem, "has_mask": True}
    assert SPEC.default_config(masked, SM90)["variant"] == "portable"
    assert "no mask" in str(SPEC.why_illegal(SPEC.default_config(problem, SM90), masked, SM90))


# ---- its launch --------------------------------------------------------------------------------


def fake_compiled(calls: list[tuple[Any, ...]], encoded: list[int]) -> Any:
    """A compiled kernel whose launcher encodes tensor maps in a wrapper, like triton 3.6's."""
    scope: dict[str, Any] = {}
    source = """
def make_tensordesc_arg(arg, meta):
    encoded.append(arg.base.data_ptr())
    return [("map", arg.base.data_ptr(), meta), *arg.shape, *arg.strides]

def wrap(launcher, tensordesc_indices, tensordesc_meta):
    def inner(*args):
        final, metas = list(args[:13]), iter(tensordesc_meta)
        for i, arg in enumerate(args[13:]):
            final += make_tensordesc_arg(arg, next(metas)) if i in tensordesc_indices else [arg]
        return launcher(*final)
    return inner
"""
    scope["encoded"] = encoded
    exec(source, scope)

    def below(*args: Any) -> None:
        calls.append(args)

    launcher = types.SimpleNamespace(
        launch=scope["wrap"](below, {0, 1, 2}, ["a", "b", "c"]),
        global_scratch_size=0,
        profile_scratch_size=0,
        launch_cooperative_grid=False,
        launch_pdl=False,
    )

    class Compiled:
        run, function, packed_metadata = launcher, 5, (4, 1, 100)

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            head = (*grid, 77, 5, False, False, None, None, (4, 1, 100), "meta", "enter", "exit")
            return lambda *args: launcher.launch(*head, *args)

    return Compiled()


@pytest.fixture
def active_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = types.SimpleNamespace(
        get_current_device=lambda: 0, get_current_stream=lambda index: 77 + index
    )
    runtime = types.SimpleNamespace(driver=types.SimpleNamespace(active=driver))
    hooks = types.SimpleNamespace(
        launch_enter_hook=types.SimpleNamespace(calls=[]),
        launch_exit_hook=types.SimpleNamespace(calls=[]),
    )
    knobs = types.SimpleNamespace(runtime=hooks)
    monkeypatch.setattr(device, "triton", types.SimpleNamespace(runtime=runtime, knobs=knobs))


def describers(*tensors: torch.Tensor) -> tuple[Any, ...]:
    return tuple(hopper._describer(t, 64, 128) for t in tensors)


@pytest.mark.usefixtures("active_driver")
def test_tensor_maps_are_kept_by_address() -> None:
    calls: list[tuple[Any, ...]] = []
    encoded: list[int] = []
    q, k, v, out, other = (torch.empty(2, 16, 4, 128, dtype=BF16) for _ in range(5))
    compiled = fake_compiled(calls, encoded)
    describe = describers(q, k, v)
    start = device._described_start(compiled, (3, 1, 1), describe, ("constant",))
    compiled[(3, 1, 1)](*device._described(describe, (q, k, v, out, 1.5)), "constant")
    (whole,) = calls
    for tensors in ((q, k, v), (q, k, v), (other, k, v), (q, k, v)):
        start(*tensors, out, 1.5)
    assert calls[1][:10] == whole[:10]
    assert calls[1][10:13] == (None, None, None)  # no profiler waits
    for mine in (calls[1], calls[2], calls[4]):
        assert all(a is b or a == b for a, b in zip(mine[13:], whole[13:], strict=True))
    assert calls[3][13] == ("map", other.data_ptr(), "a")
    first = [t.data_ptr() for t in (q, k, v)]
    assert encoded == [*first, *first, other.data_ptr()]


@pytest.mark.usefixtures("active_driver")
def test_a_profiler_sees_launches() -> None:
    calls: list[tuple[Any, ...]] = []
    q, k, v = (torch.empty(2, 16, 4, 128, dtype=BF16) for _ in range(3))
    start = device._described_start(fake_compiled(calls, []), (3, 1, 1), describers(q, k, v), ())
    device.triton.knobs.runtime.launch_enter_hook.calls.append(print)
    start(q, k, v)
    assert calls[0][10:13] == ("meta", "enter", "exit")


@pytest.mark.usefixtures("active_driver")
def test_another_triton_is_launched_its_own_way() -> None:
    calls: list[tuple[Any, ...]] = []
    q, k, v = (torch.empty(2, 16, 4, 128, dtype=BF16) for _ in range(3))
    compiled = fake_compiled(calls, [])
    inner = compiled.run.launch
    compiled.run.launch = lambda *args: inner(*args)
    device._described_start(compiled, (3, 1, 1), describers(q, k, v), ())(q, k, v)
    assert calls[0][10:13] == ("meta", "enter", "exit")


@pytest.mark.usefixtures("active_driver")
def test_few_tensor_maps_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "_MAPS_LIMIT", 2)
    calls: list[tuple[Any, ...]] = []
    encoded: list[int] = []
    q, k, v = (torch.empty(2, 16, 4, 128, dtype=BF16) for _ in range(3))
    start = device._described_start(
        fake_compiled(calls, encoded), (3, 1, 1), describers(q, k, v), ()
    )
    for t in (q, k, v, q):
        start(t, k, v)
    addresses = [t.data_ptr() for t in (q, k, v)]
    assert encoded == [*addresses, addresses[1], addresses[2], addresses[0]]
    assert [call[13][1] for call in calls] == [*addresses, addresses[0]]


def test_description_of_odd_shapes() -> None:
    packed = torch.empty(7, 6, 96, dtype=BF16)[:, 1:3]
    made = hopper._describer(packed, 64, 128)(packed)
    assert (made.shape, made.block_shape) == ([1, 7, 2, 96], [1, 64, 1, 128])
    assert made.strides == [8 * 576, 576, 96, 1]
    one = torch.empty(3, 5, 7, 8, dtype=BF16).as_strided((1, 5, 1, 8), (3, 56, 5, 1))
    made = hopper._describer(one, 64, 64)(one)
    assert made.strides == [24, 56, 40, 1]  # odd ones, never stepped over, are made to divide


# ---- what the compiler makes of it -------------------------------------------------------------

CHILD = """
import dataclasses, itertools, json
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from tkernels import flash_attn_hopper as hopper, offline

found = []
for head_dim, block_n, stages, causal, varlen, more in [
    (128, 128, 2, True, True, False), (128, 64, 3, False, True, False),
    (64, 128, 4, True, True, True), (96, 32, 4, False, False, True),
    (256, 64, 2, True, False, False), (128, 128, 2, True, False, True),
]:
    with FakeTensorMode(), offline.record_launches() as launches:
        shape = (lambda h: (64, h, head_dim)) if varlen else (lambda h: (2, 32, h, head_dim))
        q, k, v, out = (torch.empty(shape(h), dtype=torch.bfloat16) for h in (8, 2, 2, 8))
        lse = torch.empty(q.shape[:-1])
        ends = torch.zeros(3, dtype=torch.int32) if varlen else None
        config = {"BLOCK_M": 128, "BLOCK_N": block_n, "num_stages": stages, "SECTION": 8}
        hopper.bind(
            q, k, v, out, lse, n_sequences=2 if varlen else None, max_seqlen_q=32, max_seqlen_k=32,
            causal=causal, window=5 if more and causal else None, scale=0.1,
            softcap=2.0 if more else None, has_sinks=more, config=config,
        )(q, k, v, out, lse, torch.zeros(8) if more else None, ends, ends)
    got = dataclasses.asdict(offline.compile_cuda(launches[0], 90))
    dim = hopper._block_dim(head_dim)
    found.append({**got, "case": [head_dim, block_n, stages, causal, varlen, more],
                  "expected_shared": hopper._shared_bytes(block_n, stages, dim)})
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
    assert len(found) == 6
    for case in found:
        assert case["shared_bytes"] == case["expected_shared"], case
        # 168 of the 240 that a group asks for. A few sizes may be put away between tiles, but the
        # 64 scores and 64 results a thread may not.
        assert case["registers"] == 168, case
        assert case["spill_bytes"] <= 64, case


# ---- results, on the GPU -----------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Options:
    causal: bool = True
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False


OPTIONS = [
    Options(),
    Options(causal=False),
    Options(window=100),
    Options(softcap=3.0),
    Options(sinks=True),
    Options(window=1, softcap=3.0, sinks=True),
]


def check(
    out: torch.Tensor, lse: torch.Tensor, q: Any, k: Any, v: Any, given: dict[str, Any]
) -> None:
    want, want_lse = attention.attention_ref(
        q.float(), k.float(), v.float(), scale=q.shape[-1] ** -0.5, **given
    )
    bound = 6e-3 if q.dtype == BF16 else 1e-3  # weights and result are rounded to q's dtype
    assert torch.isfinite(out).all()
    assert (out.float() - want).norm() <= bound * want.norm()
    torch.testing.assert_close(lse, want_lse, atol=1e-3, rtol=1e-4)


def keywords(options: Options, n_heads: int, dev: torch.device) -> dict[str, Any]:
    given = dataclasses.asdict(options)
    given["sinks"] = torch.randn(n_heads, device=dev) if options.sinks else None
    return given


needs_sm90 = pytest.mark.skipif(
    device.current().arch != "sm90", reason="needs an sm90 GPU; this machine has none"
)


@pytest.mark.gpu
@needs_sm90
@pytest.mark.parametrize("head_dim", [64, 128, 256, 80])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_dense(head_dim: int, options: Options, dev: torch.device) -> None:
    for n_q, n_k, heads, kv_heads in ((129, 129, 6, 2), (40, 300, 4, 4), (300, 40, 8, 1)):
        sizes = ((n_q, heads), (n_k, kv_heads), (n_k, kv_heads))
        # Rows, heads and columns that are not the sequence's are poison.
        q, k, v = (
            torch.full((2, n + 3, h + 1, head_dim + 8), torch.nan, dtype=BF16, device=dev)
            for n, h in sizes
        )
        q, k, v = (
            t[:, :n, :h, :head_dim].normal_() for t, (n, h) in zip((q, k, v), sizes, strict=True)
        )
        given = keywords(options, heads, dev)
        guarded = torch.full((2, n_q + 3, heads + 1, head_dim + 8), 777.0, dtype=BF16, device=dev)
        inside = guarded[:, :n_q, :heads, :head_dim]
        out, lse = tkernels.flash_attn(q, k, v, **given, out=inside, return_lse=True)
        for b in range(2):
            check(out[b], lse[b], q[b], k[b], v[b], given)
        again = tkernels.flash_attn(q, k, v, **given)
        assert torch.equal(again, out)
        inside.fill_(777.0)
        assert (guarded == 777.0).all()


@pytest.mark.gpu
@needs_sm90
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_packed_beside_poison(dtype: torch.dtype, options: Options, dev: torch.device) -> None:
    """Sequences whose neighbours, and the room behind the last, are NaN or infinite."""
    n_q, n_k = [5, 130, 0, 33, 200, 64, 300, 70], [5, 40, 9, 77, 200, 64, 130, 0]
    ends_q, ends_k = ([0, *itertools.accumulate(n)] for n in (n_q, n_k))
    q = torch.randn(ends_q[-1] + 9, 8, 128, device=dev).to(dtype)
    k, v = (torch.randn(ends_k[-1] + 200, 2, 128, device=dev).to(dtype) for _ in range(2))
    for t, ends in ((q, ends_q), (k, ends_k), (v, ends_k)):
        t[ends[-1] :] = torch.nan
        t[ends[1] : ends[2]] = torch.nan
        t[ends[4] : ends[5]] = torch.inf
    given = keywords(options, 8, dev)
    out = torch.full_like(q, 777.0)
    out, lse = tkernels.flash_attn(
        q,
        k,
        v,
        cu_seqlens_q=torch.tensor(ends_q, dtype=torch.int32, device=dev),
        cu_seqlens_k=torch.tensor(ends_k, dtype=torch.int32, device=dev),
        max_seqlen_q=max(n_q),
        max_seqlen_k=max(n_k),
        **given,
        out=out,
        return_lse=True,
    )
    for b in (0, 3, 5, 6, 7):
        rows, keys = slice(ends_q[b], ends_q[b + 1]), slice(ends_k[b], ends_k[b + 1])
        check(out[rows], lse[rows], q[rows], k[keys], v[keys], given)
    assert (out[ends_q[-1] :] == 777.0).all()


@pytest.mark.gpu
@needs_sm90
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("dtype", "exponent"),
    [(BF16, n) for n in (0, 6, 10, 12, 13, 20, 50)] + [(torch.float16, n) for n in (6, 11, 12)],
)
def test_huge_scores(
    dtype: torch.dtype, exponent: int, causal: bool, sinks: bool, dev: torch.device
) -> None:
    """Scores beyond where fp32 tells their differences, up to 1e36: small integers, scaled."""
    q = torch.randint(-8, 9, (1, 300, 4, 64), device=dev).to(dtype) * 2.0**exponent
    k = torch.randint(-8, 9, (1, 500, 2, 64), device=dev).to(dtype) * 2.0**exponent
    v = torch.randn(1, 500, 2, 64, device=dev).to(dtype)
    given: dict[str, Any] = {"causal": causal, "sinks": None}
    if sinks:
        given["sinks"] = torch.randn(4, device=dev) * 100 * 4.0**exponent
    out, lse = tkernels.flash_attn(q, k, v, scale=0.1, return_lse=True, **given)
    want, want_lse = attention.attention_ref(
        q[0].double(), k[0].double(), v[0].double(), scale=0.1, **given
    )
    assert torch.isfinite(out).all()
    bound = 6e-3 if dtype == BF16 else 1e-3
    assert (out[0].double() - want).norm() <= bound * want.norm()
    torch.testing.assert_close(lse[0].double(), want_lse, atol=1e-3, rtol=1e-6)


@pytest.mark.gpu
@needs_sm90
def test_every_config(dev: torch.device) -> None:
    q, k, v = (torch.randn(2, 700, h, 64, device=dev).to(BF16) for h in (6, 3, 3))
    want = torch.stack(
        [
            attention.attention_ref(
                q[b].float(), k[b].float(), v[b].float(), scale=0.125, causal=True
            )[0]
            for b in range(2)
        ]
    )
    space, tried = SPEC.space(SM90), 0
    for values in itertools.product(*(space[n] for n in ("BLOCK_N", "SECTION", "num_stages"))):
        given = dict(zip(("BLOCK_N", "SECTION", "num_stages"), values, strict=True))
        given |= {"BLOCK_M": 128, "variant": "hopper", "programs_per_core": 0, "num_warps": 4}
        if hopper.why_illegal(given, 64, SM90) is None:
            out = tkernels.flash_attn(q, k, v, config=given)
            assert (out.float() - want).norm() <= 6e-3 * want.norm(), given
            tried += 1
    assert tried > 20


@pytest.mark.gpu
@needs_sm90
def test_graph_keeps_its_tensor_maps(dev: torch.device) -> None:
    q, k, v = (torch.randn(2, 200, h, 128, device=dev).to(BF16) for h in (8, 2, 2))
    out = tkernels.flash_attn(q, k, v)
    graph = device.new_graph()
    with device.capture(graph):
        tkernels.flash_attn(q, k, v, out=out)
    for t in (q, k, v):
        t.normal_()
    config.reload()  # its plan, and with it the maps that the host keeps, are gone
    graph.replay()
    assert torch.equal(out, tkernels.flash_attn(q, k, v))


@pytest.mark.gpu
@needs_sm90
def test_odd_addresses_take_the_portable_body(dev: torch.device) -> None:
    q = torch.randn(2 * 200 * 8 * 128 + 8, device=dev).to(BF16)[1:-7].view(2, 200, 8, 128)
    assert q.data_ptr() % 16
    k, v = (torch.randn(2, 200, 2, 128, device=dev).to(BF16) for _ in range(2))
    out, lse = tkernels.flash_attn(q, k, v, return_lse=True)
    for b in range(2):
        check(out[b], lse[b], q[b], k[b], v[b], {"causal": True})
    # Results, too, are stored 16 bytes at a time, by a kernel that is remembered.
    q = q.clone()
    for odd in (False, True, False):
        own = torch.empty(q.numel() + 8, dtype=BF16, device=dev)[odd * 4 :][: q.numel()]
        _, lse = tkernels.flash_attn(q, k, v, out=own.view(q.shape), return_lse=True)
        for b in range(2):
            check(own.view(q.shape)[b], lse[b], q[b], k[b], v[b], {"causal": True})
