"""The body of w4a16_gemm for many rows: weights as they are unpacked, and outputs in pieces."""

from __future__ import annotations

import pytest
import torch

import tkernels
from tkernels import device, w4a16_gemm_unpacked
from tkernels.device import sm_facts
from tkernels.ops.w4a16_gemm import SPEC
from tkernels.registry import Config
from tkernels.testing import assert_close
from tkernels.w4_format import dequantize_w4
from tkernels.w4a16_cases import w4_inputs, w4_problem

pytestmark = pytest.mark.thin(4)


def config_of(block_n: int = 16, block_k: int = 64) -> Config:
    tile = {"BLOCK_N": block_n, "BLOCK_K": block_k, "num_warps": 1}
    config = {**w4a16_gemm_unpacked.FIXED, **tile}
    space = SPEC.space(device.current())
    return {name: value for name, value in config.items() if name in space}


@pytest.fixture(autouse=True)
def _on_a_gpu() -> None:
    if device.current().is_npu:
        pytest.skip("variant unpacked needs an NVIDIA device")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize(
    ("n", "k", "group"), [(5, 96, 32), (17, 256, 64), (40, 128, 128), (16, 200, 200), (1, 8, 8)]
)
def test_weights_are_those_of_the_format(
    n: int, k: int, group: int, zero: bool, dtype: torch.dtype, dev: torch.device
) -> None:
    """x is the unit matrix, so that the results are the weights, bit by bit."""
    scale = torch.float32 if n % 2 == 0 and dtype == torch.bfloat16 else dtype
    inputs = w4_inputs(w4_problem(k, n, k, dtype, group=group, zero=zero, scale=scale), dev)
    inputs["x"] = torch.eye(k, dtype=dtype, device=dev)
    got = tkernels.w4a16_gemm(**inputs, config=config_of())
    dense = dequantize_w4(inputs["weight"], inputs["weight_scale"], inputs.get("weight_zero"))
    assert torch.equal(got.t(), dense.to(dtype))


@pytest.mark.parametrize("piece", [1, 7, 16, 40])
@pytest.mark.parametrize("bias", [None, torch.bfloat16, torch.float32])
def test_pieces_of_the_outputs(
    piece: int, bias: torch.dtype | None, monkeypatch: pytest.MonkeyPatch, dev: torch.device
) -> None:
    """Each has its weights, scales, zero points and bias; what is beside out stays."""
    monkeypatch.setattr(w4a16_gemm_unpacked, "outputs_at_once", lambda *_: piece)
    inputs = w4_inputs(w4_problem(9, 40, 128, zero=True), dev)
    if bias is not None:
        inputs["bias"] = torch.randn(40, generator=torch.Generator().manual_seed(3)).to(bias)
        inputs["bias"] = inputs["bias"].to(dev)
    wide = torch.full((9, 48), 7.0, dtype=torch.bfloat16, device=dev)
    tkernels.w4a16_gemm(**inputs, out=wide[:, 4:44], config=config_of(block_n=16, block_k=128))
    expected = tkernels.reference.w4a16_gemm(**inputs)
    assert_close(wide[:, 4:44], expected.float(), what="pieces")
    assert bool((wide[:, :4] == 7).all())
    assert bool((wide[:, 44:] == 7).all())


def test_a_piece_fits_the_workspace() -> None:
    at_once, room = w4a16_gemm_unpacked.outputs_at_once, w4a16_gemm_unpacked.WORKSPACE
    assert at_once(12288, 4096) == 12288
    assert at_once(24576, 4096) == 12288  # two alike
    assert at_once(151936, 4096) == 15360
    assert at_once(100, 64) == 100
    for n in (1, 8, 300, 4096, 24577, 151936):
        for k in (8, 128, 4096, 53248, 10**6):
            piece = at_once(n, k)
            assert piece == n or piece % 256 == 0
            assert 2 * piece * k <= room or piece == min(n, 256)
            assert 1 <= piece <= n


def test_which_rows_are_many() -> None:
    for n, k, least in ((4096, 4096, 65), (12288, 4096, 129), (24576, 4096, 257)):
        assert w4a16_gemm_unpacked.least_rows(n, k) == least
        for m in (1, 64, least - 1, least, 2049, 4096):
            for arch in (80, 90):
                # Where there is another body for many rows, and where that does not fit.
                for scale in (torch.bfloat16, torch.float32):
                    problem = w4_problem(m, n, k, scale=scale)
                    config = SPEC.default_config(problem, sm_facts(arch))
                    from_here = 2049 if arch == 90 and scale == torch.bfloat16 else least
                    assert (config["variant"] == "unpacked") == (m >= from_here), (m, arch, scale)
                    assert SPEC.why_illegal(config, problem, sm_facts(arch)) is None


def test_fp16_of_fp32_scales_is_left_to_others(dev: torch.device) -> None:
    """Weights of 70000 and of 3e-9 have no fp16, results of them may."""
    problem = w4_problem(300, 16, 256, torch.float16, group=256, scale=torch.float32)
    for arch in (80, 90):
        assert SPEC.default_config(problem, sm_facts(arch))["variant"] != "unpacked"
    why = SPEC.why_illegal(config_of(), problem, sm_facts(90))
    assert why is not None
    assert "scales in fp32 may not fit" in why
    inputs = w4_inputs(w4_problem(70, 16, 256, torch.float16, group=256, scale=torch.float32), dev)
    for x, scale in ((1e-3, 1e4), (1e4, 3.3e-9)):
        inputs["x"].fill_(x)
        inputs["weight_scale"].fill_(scale)
        got = tkernels.w4a16_gemm(**inputs)
        assert_close(got, tkernels.reference.w4a16_gemm(**inputs).float(), what=str(scale))


@pytest.mark.parametrize("bias", [torch.bfloat16, torch.float32])
def test_parameters_are_read_without_gradients(bias: torch.dtype, dev: torch.device) -> None:
    inputs = w4_inputs(w4_problem(9, 40, 128), dev)
    expected = tkernels.w4a16_gemm(**inputs, bias=torch.ones(40, dtype=bias, device=dev),
                                   config=config_of())  # fmt: skip
    inputs["bias"] = torch.nn.Parameter(torch.ones(40, dtype=bias, device=dev))
    inputs["x"] = torch.nn.Parameter(inputs["x"])
    got = tkernels.w4a16_gemm(**inputs, config=config_of())
    assert not got.requires_grad
    assert torch.equal(got, expected)


def test_what_it_has_no_choice_of() -> None:
    problem = w4_problem(4096, 4096, 4096)
    config = SPEC.default_config(problem, sm_facts(90))
    for changes, words in (
        ({"SPLIT_K": 2}, "variant unpacked has"),
        ({"PDL": True}, "variant unpacked has"),
        ({"num_warps": 0}, "num_warps=0 is not of"),
        ({"num_warps": 3}, "num_warps=3 is not of"),
        ({"BLOCK_N": 256, "BLOCK_K": 1024, "num_warps": 1}, "would not fit its registers"),
    ):
        why = SPEC.why_illegal({**config, **changes}, problem, sm_facts(90))
        assert why is not None
        assert words in why


@pytest.mark.gpu
def test_large_ones_in_a_captured_graph(dev: torch.device) -> None:
    """Several pieces; the graph owns the workspace, and each replay unpacks anew."""
    inputs = w4_inputs(w4_problem(4096, 24576, 4096, zero=True), dev)
    expected = tkernels.w4a16_gemm(**inputs)
    reference = tkernels.reference.w4a16_gemm(**inputs)
    assert_close(expected, reference.float(), what="24576 outputs")
    weight = inputs["weight"].clone()
    graph = device.new_graph()
    with device.capture(graph):
        got = tkernels.w4a16_gemm(**inputs)
    inputs["weight"].zero_()
    graph.replay()
    device.synchronize()
    assert not torch.equal(got, expected)
    inputs["weight"].copy_(weight)
    graph.replay()
    device.synchronize()
    assert torch.equal(got, expected)
