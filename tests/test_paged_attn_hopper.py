"""The Hopper body of paged_attn for chunks: refusals, what the compiler makes of it, results.

Without a GPU it is compiled for sm_90.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tkernels import device, paged_attn_hopper
from tkernels.attention_cases import paged_problem
from tkernels.ops.paged_attn import SPEC, _by_address
from tkernels.testing import assert_right

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


def test_why_illegal() -> None:
    config = paged_attn_hopper.default_config(128, 16)
    for block_size in (16, 32, 64, 128):
        assert paged_attn_hopper.why_illegal(config, 128, block_size, SM90) is None
    said = paged_attn_hopper.why_illegal({**config, "BLOCK_N": 64}, 128, 128, SM90)
    assert said == "BLOCK_N must be whole blocks of 128, got 64"
    assert paged_attn_hopper.why_illegal({**config, "num_stages": 9}, 128, 16, SM90) is not None


@pytest.mark.parametrize(
    ("context", "q_len", "changed", "variant"),
    [
        (8192, 2048, {}, "hopper"),
        (8192, 512, {}, "hopper"),
        (8192, 256, {}, "portable"),  # 64 tiles leave half of the chip idle
        (8192, 64, {}, "portable"),
        (8192, 2048, {"window": 100}, "portable"),
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
for head_dim, n, stages, block_size, more in [
    (128, 128, 2, 16, False), (128, 128, 2, 128, True), (64, 128, 4, 16, False),
    (80, 64, 3, 32, True), (256, 64, 2, 64, False),
]:
    with FakeTensorMode(), offline.record_launches() as launches:
        q, out = (torch.empty(64, 8, head_dim, dtype=torch.bfloat16) for _ in range(2))
        cache = torch.empty(20, block_size, 2, head_dim, dtype=torch.bfloat16)
        table, lens, ends = (torch.empty(n, dtype=torch.int32) for n in ((2, 9), 2, 3))
        lse, sinks = torch.empty(64, 8), torch.empty(8) if more else None
        paged_attn_hopper.bind(
            q, cache, cache, table, out, max_seqlen_q=40, scale=0.1,
            softcap=2.0 if more else None, has_sinks=more, has_lse=True,
            config={"BLOCK_M": 128, "BLOCK_N": n, "num_stages": stages},
        )(q, cache, cache, table, lens, ends, out, lse, sinks)
    got = dataclasses.asdict(offline.compile_cuda(launches[0], 90))
    dim = flash_attn_hopper._block_dim(head_dim)
    found.append({**got, "case": [head_dim, n, stages, block_size, more],
                  "expected_shared": flash_attn_hopper._shared_bytes(n, stages, dim),
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
    assert len(found) == 5
    for case in found:
        assert case["shared_bytes"] == case["expected_shared"], case
        assert case["copies"] == case["expected_copies"], case
        # 168 of the 240 that a group asks for, and a few sizes put away between tiles.
        assert case["registers"] == 168, case
        assert case["spill_bytes"] <= 160, case


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
    config = paged_attn_hopper.default_config(q.shape[-1], block_size)
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
