"""flash_attn on Ascend: cube and vector cores work on different blocks of keys at the same time.

Huawei's compiler overlaps the two kinds of cores, through four buffers in memory, only for loops
whose score mask is computed apart from what the loads need. Such a loop then takes four blocks a
step on both kinds of cores, with a short loop inside for each stage. Nothing else shows that it no
longer does.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tkernels import device
from tkernels import offline_ascend as bisheng
from tkernels.flash_attn_cases import flash_problem
from tkernels.offline import record_launches, variant_of
from tkernels.offline_ascend import lower, scalar_memory_loops
from tkernels.ops.flash_attn import SPEC

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
LENGTHS = ((200, 300), (500, 500))


def final_ir(problem: dict[str, Any], **changes: Any) -> str:
    """The compiler's last IR; it takes the kernel whole, and no loop goes element by element."""
    with FakeTensorMode(), record_launches() as launches:
        inputs = SPEC.make_inputs(problem, torch.device("cpu"))
        config = {**SPEC.default_config(problem, device.current()), **changes}
        SPEC.launch(**inputs, config=config)
    (launch,) = launches
    assert launch.grid[0] <= device.current().num_dot_cores  # a program takes a cube core
    variant = variant_of(launch)
    linalg = lower(variant)
    verdict = bisheng.check(linalg, bisheng.options_of(variant))
    assert (verdict.reason, verdict.degraded) == ("", ())
    assert scalar_memory_loops(linalg) == bisheng.scalar_loops(verdict.hivm) == 0
    return verdict.hivm


def key_loops(hivm: str) -> tuple[int, int]:
    """Loops over blocks of keys: (pipelined, not pipelined) on a cube and a vector core together.

    Their bounds are not constants, as those of the loops inside are.
    """
    steps = re.findall(r"scf\.for %\w+ = %\w+ to %\w+ step %c(\d+)_i32\b", hivm)
    return steps.count("4"), steps.count("1")


# What is asked, loops over keys as they are written, and those of them that are not pipelined.
FEATURES: dict[str, tuple[dict[str, Any], int, int]] = {
    "causal": (flash_problem(2, 512, "4/2x128", BF16), 2, 0),
    "causal 64": (flash_problem(2, 512, "4/2x64", FP16), 2, 0),
    "causal 80": (flash_problem(2, 512, "4/2x80", BF16), 2, 0),
    "causal 256": (flash_problem(2, 512, "4/2x256", BF16), 2, 0),
    "causal fp32": (flash_problem(2, 512, "4/2x128", FP32), 2, 0),
    "causal fp32 256": (flash_problem(2, 512, "4/2x256", FP32), 2, 0),
    "softcap": (flash_problem(2, 512, "4/2x128", BF16, softcap=30.0, lse=True), 2, 0),
    "window, all": (
        flash_problem(
            2, 512, "4/2x128", BF16, window=100, softcap=30.0, sinks=True, lse=True
        ),
        3,
        0,
    ),
    "packed": (flash_problem(0, 0, "4/2x128", BF16, lengths=LENGTHS, lse=True), 2, 0),
    "mask": (flash_problem(2, 512, "4/2x128", BF16, mask=True, causal=False), 1, 0),
    "mask, causal": (flash_problem(2, 512, "4/2x128", BF16, mask=True, sinks=True), 1, 0),
    # The last block, the only one to be masked, asks of scores and loads the same.
    "full": (flash_problem(2, 512, "4/2x128", BF16, causal=False), 2, 1),
}  # fmt: skip


@pytest.mark.parametrize("name", FEATURES)
def test_loops_over_keys_are_pipelined(name: str) -> None:
    problem, written, alone = FEATURES[name]
    hivm = final_ir(problem)
    assert key_loops(hivm) == (2 * (written - alone), 2 * alone)
    # Each pipelined loop: one over fours of blocks and two inside it, on both kinds of cores; and
    # one over the halves of a tile on the vector cores, where it is as large as the default's.
    assert bisheng.loops(hivm) >= 6 * (written - alone) + 2 * alone + 2
    assert hivm.count("hivm.hir.sync_block_set") >= 18 * (written - alone) + 9 * alone


@pytest.mark.parametrize(("m", "n"), [(64, 128), (64, 64), (32, 128), (16, 16)])
def test_tiles_of_other_shapes(m: int, n: int) -> None:
    problem = flash_problem(2, 512, "4/2x128", BF16, softcap=5.0, sinks=True, lse=True)
    assert key_loops(final_ir(problem, BLOCK_M=m, BLOCK_N=n)) == (4, 0)


@pytest.mark.parametrize(
    ("heads", "m", "n"), [("4/2x128", 128, 128), ("4/2x64", 128, 128), ("4/2x256", 64, 64)]
)
def test_what_legality_refuses_does_not_fit(
    heads: str, m: int, n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even without features; so the rule does not merely narrow the tuner's search."""
    problem = flash_problem(2, 512, heads, BF16)
    config = {**SPEC.default_config(problem, device.current()), "BLOCK_M": m, "BLOCK_N": n}
    assert "overflow" in str(SPEC.why_illegal(config, problem, device.current()))
    monkeypatch.setitem(SPEC.__dict__, "why_illegal", lambda *_: None)
    with FakeTensorMode(), record_launches() as launches:
        SPEC.launch(**SPEC.make_inputs(problem, torch.device("cpu")), config=config)
    verdict = bisheng.check(lower(variant_of(launches[0])))
    assert re.match("ub overflow, requires", verdict.reason)
