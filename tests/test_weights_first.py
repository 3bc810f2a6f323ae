"""Bodies for few rows on Hopper ask for weights before they wait for the kernel before, and for
nothing else. Without a GPU they are compiled for sm_90.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from tests.compiled_for import lines_of
from tkernels import device, skinny_linear_hopper
from tkernels.masked_gemm_cases import gemm_problem
from tkernels.registry import Config, all_kernels
from tkernels.skinny_linear_facts import linear_problem
from tkernels.w4a16_cases import w4_problem
from tkernels.w8a16_cases import w8_problem

CONFIG: Config = {
    "BLOCK_M": 8,
    "BLOCK_N": 16,
    "BLOCK_K": 128,
    "SPLIT_K": 1,
    "programs_per_core": 0,
    "PDL": True,
    "num_warps": 1,
    "num_stages": 3,
}
ONE_ROW: Config = {
    "BLOCK_N": 4,
    "BLOCK_K": 512,
    "PDL": True,
    "num_warps": 1,
    "num_stages": 2,
    **skinny_linear_hopper.FIXED,
}
CONFIGS: dict[str, Config] = {
    "skinny_linear": ONE_ROW,
    "masked_gemm": {**CONFIG, "variant": "few", "GROUP_M": 1, "SWAP": False},
    "w4a16_gemm": {
        **CONFIG,
        "variant": "core",
        "BLOCK_N": 32,
        "SLICES": 4,
        "programs_per_core": 1,
        "num_warps": 8,
        "num_stages": 8,
    },
}
CONFIGS["w8a16_gemm"] = {**CONFIGS["w4a16_gemm"], "num_stages": 6}
del CONFIGS["w8a16_gemm"]["SLICES"]  # as many as fit

# In a process of its own: here Triton is an interpreter, there it must compile.
CHILD = r"""
import json, re, sys
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from tkernels import offline
from tkernels.masked_gemm_cases import gemm_problem
from tkernels.registry import all_kernels
from tkernels.skinny_linear_facts import linear_problem
from tkernels.w4a16_cases import w4_problem
from tkernels.w8a16_cases import w8_problem

configs = json.load(sys.stdin)
problems = {"masked_gemm": gemm_problem(1, 32, 1024, bias=True),
            "w4a16_gemm": w4_problem(1, 32, 1024, zero=True, bias=True),
            "w8a16_gemm": w8_problem(1, 32, 1024, bias=True),
            "skinny_linear": linear_problem(1, 32, 1024, normed=True, residual=True)}
found = {}
for name, problem in problems.items():
    spec = all_kernels()[name]
    with FakeTensorMode(), offline.record_launches() as launches:
        inputs = spec.make_inputs(problem, torch.device("cpu"))
        spec.launch(**inputs, config=configs[name])
    ptx = offline.compiled_cuda(launches[0], 90).asm["ptx"]
    found[name] = re.findall(r"griddepcontrol\.\w+|cp\.async\.cg|(?:ld|st)\.global", ptx)
print(json.dumps(found))
"""


def test_what_comes_before_the_wait() -> None:
    found = json.loads(lines_of(CHILD, given=json.dumps(CONFIGS))[-1])
    # A lane's copies of 16 bytes, ahead and behind, and its other loads ahead: of int8 a weight's
    # scale and a bias, of groups scales, of 4 bits zero points, too, of 16 bits the norm's. Behind
    # the wait come x, of groups two copies for each of two steps, and what is stored.
    counted = {
        "masked_gemm": (8, 4, 2),
        "w4a16_gemm": (2, 6, 16),
        "w8a16_gemm": (4, 8, 8),
        "skinny_linear": (16, 8, 4),
    }
    for name, (ahead, later, loads) in counted.items():
        wait = found[name].index("griddepcontrol.wait")
        before, behind = found[name][:wait], found[name][wait + 1 :]
        assert before[:2] == ["griddepcontrol.launch_dependents", "cp.async.cg"], name
        counts = {event: before.count(event) for event in before[1:]}
        assert counts == {"cp.async.cg": ahead, "ld.global": loads}, name
        assert behind.count("cp.async.cg") == later, name
        assert {"ld.global", "st.global"} <= set(behind), name


@pytest.mark.gpu
@pytest.mark.skipif(
    device.current().arch != "sm90", reason="needs an sm90 GPU; this machine has none"
)
@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_chain_is_what_it_is_one_by_one(name: str, splits: int, dev: torch.device) -> None:
    """Each product reads what the one before writes, NaN until then; no bit depends on PDL."""
    spec, size, steps = all_kernels()[name], 2048, 16
    problems: Any = {
        "masked_gemm": gemm_problem(1, size, size),
        "w4a16_gemm": w4_problem(1, size, size),
        "w8a16_gemm": w8_problem(1, size, size),
        "skinny_linear": linear_problem(1, size, size, normed=True),
    }
    split = {"BLOCK_N": 4 * splits} if name == "skinny_linear" else {"SPLIT_K": splits}
    inputs = spec.make_inputs(problems[name], dev)
    first = inputs.pop("x")
    given = {key: t for key, t in inputs.items() if "weight" in key}

    def chain(pdl: bool) -> torch.Tensor:
        rows = torch.full((steps + 1, 1, size), torch.nan, dtype=first.dtype, device=dev)
        rows[0] = first
        for i in range(steps):
            config = {**CONFIGS[name], **split, "PDL": pdl}
            spec.launch(rows[i], **given, out=rows[i + 1], config=config)
        return rows

    expected = chain(False)
    assert bool(expected.isfinite().all())
    for _ in range(5):
        assert torch.equal(chain(True), expected)
