"""paged_attn on Ascend: its loop over pages stays pipelined between cube and vector cores.

Huawei's compiler overlaps the two kinds of cores, through several buffers in memory, only for loops
written in a certain way: with the condition of the score mask computed apart from what the loads
need. Then the loop over pages falls into several. Nothing else shows that it no longer does.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tkernels import device
from tkernels import offline_ascend as bisheng
from tkernels.attention_cases import paged_problem
from tkernels.device import tl, triton
from tkernels.offline import Launch, record_launches, variant_of
from tkernels.offline_ascend import lower, scalar_memory_loops
from tkernels.ops.fused_qk_norm_rope_append_attn import SPEC as STEP
from tkernels.ops.paged_attn import SPEC
from tkernels.registry import KernelSpec

BF16, FP32 = torch.bfloat16, torch.float32
PIPELINED_LOOPS = 7  # of one loop over pages; written as one, and not pipelined, it is 2


def final_ir(launch: Launch) -> tuple[str, str]:
    """(linalg, last IR) of a launch that the compiler takes without switching anything off."""
    variant = variant_of(launch)
    linalg = lower(variant)
    verdict = bisheng.check(linalg, bisheng.options_of(variant))
    assert (verdict.reason, verdict.degraded) == ("", ())
    return linalg, verdict.hivm


def attend_launch(problem: dict[str, Any], spec: KernelSpec = SPEC, **changes: Any) -> Launch:
    """The launch of the kernel that reads the pages."""
    with FakeTensorMode(), record_launches() as launches:
        inputs = spec.make_inputs(problem, torch.device("cpu"))
        config = {**spec.default_config(problem, device.current()), **changes}
        spec.launch(**inputs, config=config)
    return launches[0]


def handovers(hivm: str) -> int:
    """Signals between cube and vector cores in the text of the program."""
    return len(re.findall(r"\bhivm\.hir\.sync_block_set\b", hivm))


FEATURES = {
    "decode": paged_problem((100, 0), "32/8x128", BF16),
    "one-head": paged_problem((100, 0), "8/8x64", BF16),
    "multi-query": paged_problem((100, 0), "24/1x128", BF16),
    "page-64": paged_problem((100, 0), "32/8x128", BF16, block_size=64),
    "page-128": paged_problem((200, 0), "32/8x128", BF16, block_size=128),
    "head-256": paged_problem((100, 0), "8/2x256", BF16),
    "head-80": paged_problem((100, 0), "8/2x80", BF16),
    "window-softcap-sinks": paged_problem(
        (100, 0), "32/8x128", BF16, window=40, softcap=20.0, sinks=True, lse=True
    ),
    "fp32": paged_problem((100, 0), "8/2x64", FP32),
    "chunk": paged_problem((100, 30), "32/8x128", BF16, q_lens=(64, 3)),
    "chunk-window": paged_problem((100, 30), "8/2x64", BF16, q_lens=(64, 3), window=40, lse=True),
}


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("problem", FEATURES.values(), ids=FEATURES)
def test_page_loop_is_pipelined(problem: dict[str, Any], splits: int) -> None:
    linalg, hivm = final_ir(attend_launch(problem, SPLITS=splits, programs_per_core=0))
    assert scalar_memory_loops(linalg) == 0
    assert bisheng.scalar_loops(hivm) == 0
    assert bisheng.loops(hivm) >= PIPELINED_LOOPS
    assert handovers(hivm) >= 18


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("name", ["decode", "head-80"])
def test_page_loop_of_a_step_in_one_launch_is_pipelined(name: str, splits: int) -> None:
    """Though it stores to the caches: by arguments of their own, or there are four loops."""
    launch = attend_launch(FEATURES[name], STEP, SPLITS=splits, programs_per_core=4)
    linalg, hivm = final_ir(launch)
    assert scalar_memory_loops(linalg) == 0
    assert bisheng.scalar_loops(hivm) == 0
    assert bisheng.loops(hivm) >= PIPELINED_LOOPS
    assert handovers(hivm) >= 18


def test_several_tiles_a_program_keep_it() -> None:
    """A loop over tiles round it, as a bounded grid needs it, adds a loop on each kind of core."""
    launch = attend_launch(FEATURES["decode"], SPLITS=4, programs_per_core=1)
    one = dict(variant_of(launch).constants)["ONE_TILE"]
    _, hivm = final_ir(launch)
    assert not one
    assert bisheng.loops(hivm) >= PIPELINED_LOOPS + 2
    assert handovers(hivm) >= 18


def test_packed_rows_of_several_tokens_are_gathered_outside_the_page_loop() -> None:
    """What the default avoids: Ascend fetches such rows one by one."""
    linalg, hivm = final_ir(attend_launch(FEATURES["chunk"], PACK_HEADS=True, BLOCK_M=16))
    assert scalar_memory_loops(linalg) == 1
    assert bisheng.loops(hivm) >= PIPELINED_LOOPS


@triton.jit
def _reuses_the_index_of_its_loads(
    q_ptr, k_ptr, v_ptr, table_ptr, out_ptr, n, BLOCK_SIZE: tl.constexpr, D: tl.constexpr
):
    """Decode in the obvious way: the position that the load needs is what the mask asks for."""
    d = tl.arange(0, D)
    q = tl.load(q_ptr + tl.arange(0, 16)[:, None] * D + d[None, :])
    top = tl.full([16], -1.0e30, tl.float32)
    total = tl.zeros([16], tl.float32)
    acc = tl.zeros([16, D], tl.float32)
    for page in range(tl.cdiv(n, BLOCK_SIZE)):
        key = page * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
        seen = key < n
        place = tl.load(table_ptr + page) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
        k = tl.load(k_ptr + place[:, None] * D + d[None, :])
        v = tl.load(v_ptr + place[:, None] * D + d[None, :], mask=seen[:, None], other=0.0)
        s = tl.where(seen[None, :], tl.dot(q, tl.trans(k)), -1.0e30)
        new_top = tl.maximum(top, tl.max(s, 1))
        p = tl.exp(s - new_top[:, None])
        shrink = tl.exp(top - new_top)
        total = total * shrink + tl.sum(p, 1)
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None])
        top = new_top
    tl.store(out_ptr + tl.arange(0, 16)[:, None] * D + d[None, :], acc / total[:, None])


def test_the_obvious_way_is_not_pipelined() -> None:
    """The guard can fail: what it counts is not there in a kernel that shares one mask."""
    q, pool = torch.zeros(16, 64, dtype=BF16), torch.zeros(64, 64, dtype=BF16)
    table, out = torch.zeros(4, dtype=torch.int32), torch.zeros(16, 64)
    with record_launches() as launches:
        _reuses_the_index_of_its_loads[(1,)](q, pool, pool, table, out, 60, BLOCK_SIZE=16, D=64)
    _, hivm = final_ir(launches[0])
    assert bisheng.loops(hivm) < PIPELINED_LOOPS
    assert handovers(hivm) < 18
