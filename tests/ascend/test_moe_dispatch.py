"""moe_dispatch on Ascend, in blocks: what would choose them is too large to run on the CPU."""

from __future__ import annotations

import pytest
import torch

from tkernels import device
from tkernels import offline_ascend as bisheng
from tkernels.offline import record_launches, variant_of
from tkernels.offline_ascend import lower
from tkernels.ops.moe_dispatch import SPEC
from tkernels.testing import assert_right, clone_inputs, poisoned_memory, tensors_of

from .run_cpu import execute

CASES = {case.name: case.problem for case in SPEC.cases if "bench" not in case.tags}
CPU = torch.device("cpu")


@pytest.mark.parametrize("block_n", [16, 64])
@pytest.mark.parametrize("name", CASES)
def test_values_in_blocks(name: str, block_n: int) -> None:
    inputs = SPEC.make_inputs(CASES[name], CPU)
    default = SPEC.default_config(CASES[name], device.current())
    config = {**default, "BLOCK_N": block_n, "BLOCK_J": 32}
    kept = clone_inputs(inputs)
    with poisoned_memory(), record_launches(execute):
        results = tensors_of(SPEC.launch(**inputs, config=config))
    assert_right(SPEC, kept, results)


def test_default_of_many_is_in_blocks_and_accepted() -> None:
    problem = next(case.problem for case in SPEC.cases if case.name == "t4096-e128-k8")
    inputs = SPEC.make_inputs(CASES["t9-e16-k3-local4"], CPU)
    config = SPEC.default_config(problem, device.current())
    assert config["BLOCK_N"]
    with record_launches() as launches:
        SPEC.launch(**inputs, config=config)
    assert len(launches) == 2
    for launch in launches:
        variant = variant_of(launch)
        verdict = bisheng.check(lower(variant), bisheng.options_of(variant))
        assert (verdict.reason, verdict.degraded) == ("", ())
