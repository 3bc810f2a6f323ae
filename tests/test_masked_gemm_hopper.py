"""The Hopper body of masked_gemm: what it refuses, and what the compiler makes of it.

Without a GPU it is compiled for sm_90; ``tests/ops/test_masked_gemm.py`` runs it on one.
"""

from __future__ import annotations

import json
import types
from typing import Any

import pytest
import torch

from tests.compiled_for import lines_of
from tkernels import device
from tkernels import masked_gemm_hopper as hopper
from tkernels.masked_gemm_cases import gemm_problem
from tkernels.ops.masked_gemm import SPEC

SM90 = device.sm_facts(90)
LARGE = gemm_problem(8192, 8192, 8192)


@pytest.mark.parametrize(
    ("aligned", "facts", "why"),
    [
        (True, SM90, None),
        (False, SM90, "divide by 16 bytes"),
        (True, device.sm_facts(100), "needs an sm90 device, got sm100"),
        (True, device.ascend_facts(), "got ascend910b"),
    ],
)
def test_why_unfit(aligned: bool, facts: device.Device, why: str | None) -> None:
    said = hopper.why_unfit(aligned, facts)
    assert said is None if why is None else why in str(said)


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({}, None),
        ({"BLOCK_M": 64}, "has BLOCK_M 128 and BLOCK_K 128"),
        ({"BLOCK_K": 256}, "has BLOCK_M 128 and BLOCK_K 128"),
        ({"BLOCK_N": 64}, "BLOCK_N 128 or 256, got 64"),
        ({"num_stages": 1}, "num_stages of 2 or more"),
        ({"num_stages": 5}, "shared memory"),
        ({"SPLIT_K": 2}, "variant hopper has SPLIT_K 1"),
        ({"SWAP": True}, "variant hopper has SWAP False"),
        ({"PDL": True}, "variant hopper has PDL False"),
    ],
)
def test_why_illegal(changed: dict[str, Any], why: str | None) -> None:
    default = SPEC.default_config(LARGE, SM90)
    assert default["variant"] == "hopper"
    said = SPEC.why_illegal({**default, **changed}, LARGE, SM90)
    assert said is None if why is None else why in str(said)


def test_large_aligned_problems_go_there_on_sm90_alone() -> None:
    for path in ("int8", "high", "masked"):
        large = {**LARGE, "path": path}
        alone = path == "high"  # and int8 weights
        assert SPEC.default_config(large, SM90)["variant"] == ("wide" if alone else "hopper")
        of_16_bits = SPEC.default_config({**large, "high_weight": True}, SM90)
        assert of_16_bits["variant"] == "hopper"
        for other in (device.sm_facts(80), device.sm_facts(120), device.ascend_facts()):
            assert SPEC.default_config(large, other)["variant"] != "hopper"
        for unfit in ({"m": 64}, {"aligned": False}):
            assert SPEC.default_config({**large, **unfit}, SM90)["variant"] != "hopper"


# In a process of its own: here Triton is an interpreter, there it must compile.
CHILD = """
import json, re
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from tkernels import device, offline
from tkernels.masked_gemm_cases import gemm_inputs, gemm_problem
from tkernels.ops.masked_gemm import SPEC

for path, high_weight in (("int8", False), ("high", False), ("high", True), ("masked", False),
                          ("masked", True)):
    problem = gemm_problem(8192, 8192, 8192, path=path, high_weight=high_weight)
    config = None
    if path == "high" and not high_weight:  # whose default is another body
        config = SPEC.default_config({**problem, "path": "masked"}, device.current())
    with FakeTensorMode(), offline.record_launches() as launches:
        SPEC.launch(**gemm_inputs(problem, torch.device("cpu")), config=config)
    [launch] = launches
    ptx = offline.compiled_cuda(launch, 90).asm["ptx"]
    found = {
        "kernel": launch.fn.__name__,
        "spills": offline.compile_cuda(launch, 90).spill_bytes,
        "int8": len(re.findall(r"wgmma[.]mma_async\\S*s32[.]s8[.]s8", ptx)),
        "bf16": len(re.findall(r"wgmma[.]mma_async\\S*bf16[.]bf16", ptx)),
        "ahead": len(re.findall(r"wgmma[.]wait_group[.]sync[.]aligned 1", ptx)),
        "loads": len(re.findall(r"cp[.]async[.]bulk[.]tensor", ptx)),
    }
    print(json.dumps([path, high_weight, found]))
"""


@pytest.fixture(scope="module")
def compiled() -> dict[tuple[str, bool], dict[str, Any]]:
    rows = [json.loads(line) for line in lines_of(CHILD) if line.startswith("[")]
    return {(path, high_weight): found for path, high_weight, found in rows}


@pytest.mark.slow
def test_multiplies_ahead_and_spills_nothing(
    compiled: dict[tuple[str, bool], dict[str, Any]],
) -> None:
    """Both groups multiply with wgmma in int8, a step ahead; what only high rows need is apart."""
    assert len(compiled) == 5
    for (path, high_weight), found in compiled.items():
        assert found["kernel"] == "_masked_gemm_hopper_kernel"
        assert found["spills"] == 0, (path, high_weight, found)
        assert (found["int8"] > 0) is (path != "high")
        assert (found["bf16"] > 0) is (path != "int8")
        assert found["loads"] == (6 if path == "masked" else 3)
        # Weights that come from registers are waited for at once.
        assert found["ahead"] == 2 * ((path != "high") + (path != "int8" and high_weight))


@pytest.mark.parametrize("group_m", [1, 4, 16])
def test_every_tile_is_dealt_once(group_m: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """``_place`` as plain Python."""
    monkeypatch.setattr(hopper, "gl", types.SimpleNamespace(minimum=min))
    n_m, n_n = 7, 5
    places = [hopper._place.fn(i, n_m, n_n, group_m, 128, 256) for i in range(n_m * n_n)]
    assert set(places) == {(128 * m, 256 * n) for m in range(n_m) for n in range(n_n)}
    together = places[: min(group_m, n_m)]
    assert {column for _, column in together} == {0}


def test_steps_leave_out_the_way_that_no_row_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """``_steps`` as plain Python, for a layer's bit."""
    plain = types.SimpleNamespace(minimum=min, where=lambda c, a, b: a if c else b, int32=int)
    monkeypatch.setattr(hopper, "gl", plain)

    def steps(word: int, *, low: bool = True, high: bool = True) -> tuple[int, int]:
        found = hopper._steps.fn(
            None, None, _Word(word), 1, 0, 100, 200, 128, 4, low, high, False, True
        )
        return int(found[0]), int(found[1])

    assert steps(0) == (2, 0)
    assert steps(1) == (0, 4)
    assert steps(-2) == (2, 0)
    assert steps(0, high=False)[0] == 2
    assert steps(0, low=False)[1] == 4


class _Word(int):
    """An int64 as the kernel has it."""

    def __and__(self, other: int) -> _Word:
        return _Word(int(self) & other)

    def to(self, kind: type) -> int:
        return int(self)


@pytest.mark.skipif(not device.is_there(hopper.gl), reason="this triton has no Gluon")
def test_describes_what_it_reads() -> None:
    describe = hopper._describer((300, 96, 112), 128, 64, 16, 128)
    made = describe(torch.empty(300, 112, dtype=torch.bfloat16)[:, :96])
    assert (made.shape, made.strides, made.block_shape) == ([300, 96], [112, 1], [128, 64])
    assert made.layout.swizzle_byte_width == 128
