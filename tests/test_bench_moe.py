"""``python -m bench moe``: figures by hand, peers on the CPU, the command on a tiny layer."""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tkernels
from bench import roofline
from bench.__main__ import main
from bench.model import moe, moe_command, moe_peers
from bench.model.moe import Experts, Inputs, Load
from bench.model.moe_peers import PEERS, Peer
from bench.model.shapes import config_of
from bench.roofline import Roof
from model import compressed
from model.threads import cpu_threads
from tkernels import device, testing

CPU = torch.device("cpu")
ROOF = Roof(bytes_per_s=2e9, flops_per_s=3e10)
cpu_defaults = pytest.mark.skipif(device.KIND != "cpu", reason="counts on the defaults of a CPU")
SMALL = ["moe", "--tokens", "3", "--routing", "zipf", "--rounds", "2"]


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A known roof; and one thread, as a second one would only be waited for."""
    monkeypatch.setattr(roofline, "measured", lambda: ROOF)
    with cpu_threads(1):
        yield


@functools.cache
def tiny(weights: str = "bf16") -> Experts:
    return moe.in_format(moe.random_experts(config_of("tiny-moe"), 0, CPU), weights)


def given(tokens: int, routing: str = "uniform", **more: Any) -> list[Inputs]:
    wanted: dict[str, Any] = {"config": config_of("tiny-moe"), "count": 1, "seed": 0, "dev": CPU}
    return moe.inputs(tokens=tokens, routing=routing, **(wanted | more))


# ---- routings and figures ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("routing", "shares"),
    [("uniform", [1 / 8] * 8), ("zipf", [1 / r / 2.717857 for r in range(1, 9)])],
)
def test_shares_of_experts(routing: str, shares: list[float]) -> None:
    (one,) = given(40000, routing)
    load = torch.bincount(one.router_logits.argmax(1), minlength=8).sort(descending=True).values
    assert (load / 40000).tolist() == pytest.approx(shares, abs=0.01)


def test_inputs_differ_from_each_other_and_not_from_run_to_run() -> None:
    some, again = given(64, "zipf", count=3), given(64, "zipf", count=3)
    for one, other in zip(some, again, strict=True):
        assert torch.equal(one.x, other.x)
        assert torch.equal(one.router_logits, other.router_logits)
    assert not torch.equal(some[0].x, some[1].x)
    busiest = {int(one.router_logits.argmax(1).bincount().argmax()) for one in given(
        64, "zipf", count=8)}  # fmt: skip
    assert len(busiest) > 1
    assert not torch.equal(given(4)[0].router_logits, given(4, seed=1)[0].router_logits)


def test_load() -> None:
    """Four tokens of two experts each: mean load 1 of eight experts."""
    logits = torch.full((4, 8), -1.0)
    logits[:, 0] = 2.0
    logits[torch.arange(4), torch.tensor([1, 2, 3, 3])] = 1.0
    one = Inputs(torch.zeros(4, 48), logits)
    assert Load.of([one], config_of("tiny-moe")) == Load(experts=4, most=4)
    all_on_two = Inputs(one.x, torch.arange(8.0).expand(4, 8))
    assert Load.of([one, all_on_two], config_of("tiny-moe")) == Load(experts=3, most=4)
    even = Inputs(one.x, torch.eye(4).repeat(1, 2))
    assert Load.of([one, even], config_of("tiny-moe")) == Load(experts=6, most=2.5)


def test_bytes_and_operations() -> None:
    assert tiny().expert_bytes == 2 * 3 * 32 * 48
    assert tiny("w8a8").expert_bytes == 3 * 32 * 48 + 4 * (2 * 32 + 48)
    assert tiny("w4a16").expert_bytes == 3 * 32 * 48 / 2 + 2 * (2 * 32 + 48)
    for weights in moe.FORMATS:
        assert tiny(weights).flops(5) == 2 * 5 * 2 * 3 * 32 * 48


def test_four_bits_are_the_same_weights() -> None:
    """In groups of 128 where that divides the inputs; the largest step is that of a group."""
    config = dataclasses.replace(config_of("tiny-moe"), hidden_size=256)
    plain = moe.random_experts(config, 0, CPU)
    found = moe.in_int4(plain)
    assert found.gate_up_scale is not None
    assert found.gate_up_scale.shape == (8, 64, 2)
    for packed, scale, weight in (
        (found.gate_up, found.gate_up_scale, plain.gate_up),
        (found.down, found.down_scale, plain.down),
    ):
        assert scale is not None
        codes = torch.stack([compressed.unpack(one, 4, weight.shape[2]) for one in packed])
        groups = codes.view(*scale.shape, -1)
        error = (groups * scale.float()[..., None]).view(weight.shape) - weight.float()
        assert bool((error.view(groups.shape).abs() <= 0.55 * scale.float()[..., None]).all())
        assert (int(codes.min()), int(codes.max())) == (-8, 7)


def test_figures_by_hand() -> None:
    shared = {"shape": "tiny-moe", "tokens": 5, "experts": 4.5}
    samples = {
        ("bf16", "tkernels"): [3.0, 1.0, 2.0, 4.0, 5.0],
        ("bf16", "torch"): [6.0],
        ("w8a8", "tkernels"): [2.0, 1.0],
    }
    rows = moe_command.figures(samples, {"bf16": tiny(), "w8a8": tiny("w8a8")}, shared, ROOF)
    ours, peer, int8 = rows
    assert (ours["us"], ours["least_us"], ours["rounds"]) == (3, 1, 5)
    assert (ours["q10_us"], ours["q90_us"]) == pytest.approx((1.4, 4.6))
    assert ours["bytes"] == 4.5 * 9216
    assert ours["gbps"] == pytest.approx(4.5 * 9216 / 3e-6 / 1e9)
    assert ours["roof_share"] == pytest.approx(4.5 * 9216 / 3e-6 / 2e9)
    assert ours["tflops"] == pytest.approx(2 * 5 * 2 * 4608 / 3e-6 / 1e12)
    assert (ours["of_torch"], ours["of_bf16"]) == (0.5, None)
    assert (peer["of_torch"], int8["of_torch"]) == (1, 0.25)
    assert int8["of_bf16"] == 0.5
    assert int8["bytes"] == 4.5 * (4608 + 448)


def test_quantile() -> None:
    assert moe.quantile([7.0], 0.9) == 7
    assert moe.quantile([3.0, 1.0, 2.0], 0.0) == 1
    assert moe.quantile([3.0, 1.0, 2.0], 1.0) == 3


def test_goals_are_told_of_our_rows(capsys: pytest.CaptureFixture[str]) -> None:
    row = dict.fromkeys(("us", "roof_share", "of_torch", "tflops", "of_bf16"))
    row |= {"tokens": 64, "routing": "zipf", "weights": "bf16", "provider": "tkernels"}
    moe_command._print_goals(
        [
            row | {"roof_share": 0.9},
            row | {"roof_share": 0.8},
            row | {"roof_share": 0.9, "provider": "vllm"},
            row | {"tokens": 1, "us": 45.0},
            row | {"tokens": 512},  # its ratio is not known
        ]
    )
    assert capsys.readouterr().out.splitlines() == [
        "1 tokens zipf bf16: 45 us, goal on an H100 at most 45: met",
        "64 tokens zipf bf16: 0.9 of copy, goal on an H100 at least 0.86: met",
        "64 tokens zipf bf16: 0.8 of copy, goal on an H100 at least 0.86: not met",
    ]


# ---- peers -------------------------------------------------------------------------------------


@pytest.mark.parametrize("renormalize", [True, False])
def test_torch_computes_the_same(renormalize: bool) -> None:
    experts = dataclasses.replace(tiny(), renormalize=renormalize)
    layer = PEERS["torch"].make(experts)
    for one in given(17, "zipf", count=2):
        expected = moe.expected(experts, one).float()
        testing.assert_close(layer(one), expected, what="torch", factor=3)


def _packages(monkeypatch: pytest.MonkeyPatch, **modules: dict[str, Any]) -> None:
    """These packages are installed; __ stands for a dot."""
    for name, contents in modules.items():
        module = types.ModuleType(name.replace("__", "."))
        module.__dict__.update(contents)
        monkeypatch.setitem(sys.modules, module.__name__, module)


def _vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    def fused_topk(x: Any, logits: Any, top_k: int, renormalize: bool) -> Any:
        return *tkernels.reference.moe_route(logits, top_k=top_k, renormalize=renormalize), None

    def fused_experts(x: Any, w1: Any, w2: Any, weights: Any, ids: Any, quant_config: Any = None):
        logits = torch.full((len(x), len(w1)), -1e9).scatter(1, ids.long(), weights.log())
        scales = quant_config or {}
        return tkernels.reference.fused_moe(
            x, logits, w1, w2, top_k=ids.shape[1], renormalize=False, **scales
        )

    def int8_config(**given: Any) -> dict[str, Any]:
        assert given["per_act_token_quant"]
        assert given["a1_scale"] is given["a2_scale"] is None
        return {"gate_up_scale": given["w1_scale"][..., 0], "down_scale": given["w2_scale"][..., 0]}

    name = "vllm__model_executor__layers__fused_moe"
    empty = {part: {} for part in ("vllm__model_executor", "vllm__model_executor__layers")}
    _packages(
        monkeypatch,
        **empty,
        vllm={"__version__": "1.2", "CARRIED": "a part of it"},
        **{name: {"fused_topk": fused_topk, "fused_experts": fused_experts}},
        **{f"{name}__config": {"int8_w8a8_moe_quant_config": int8_config}},
    )


@pytest.mark.parametrize("int8", [False, True])
def test_vllm_is_called_as_it_asks(int8: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    _vllm(monkeypatch)
    assert PEERS["vllm"].why_not() is None
    assert PEERS["vllm"].about() == "1.2: a part of it"
    (one,) = given(5)
    experts = tiny("w8a8" if int8 else "bf16")
    got = PEERS["vllm"].make(experts)(one)
    testing.assert_close(got, moe.expected(experts, one).float(), what="vllm", factor=3)


@pytest.mark.parametrize("renormalize", [True, False])
def test_triton_kernels_is_called_as_it_asks(
    renormalize: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def topk(logits: torch.Tensor, k: int, apply_softmax: bool) -> Any:
        values, ids = logits.topk(k)
        order = ids.flatten().argsort(stable=True)
        metadata = types.SimpleNamespace(
            col_sum=ids.flatten().bincount(minlength=logits.shape[1]),
            col_sorted_indx=order,
            row_sorted_indx=order.argsort(),
        )
        values = values.softmax(-1) if apply_softmax else values
        return types.SimpleNamespace(vals=values, mask_metadata=metadata)

    def matmul_ogs(
        x, w, bias, routing, gather_indx=None, scatter_indx=None, fused_activation=None, gammas=None
    ):
        gate_scal, load, n_experts, k, ragged = routing
        assert ragged == ("ragged", gate_scal.numel())
        rows = x if gather_indx is None else x[gather_indx[0] // k]
        expert = torch.arange(n_experts).repeat_interleave(load)
        y = torch.einsum("rk,rkn->rn", rows.float(), w[expert].float())
        y = y if bias is None else y + bias[expert]
        if fused_activation is not None:
            alpha, limit = fused_activation[1]
            assert limit is None
            y = y[:, ::2] * (alpha * y[:, ::2]).sigmoid() * (y[:, 1::2] + 1)
        y = (y if gammas is None else y * gammas[:, None]).to(x.dtype)
        return y if scatter_indx is None else y[scatter_indx[0]].view(-1, k, y.shape[1]).sum(1)

    pairs: Callable[..., Any] = lambda *values, **_: values  # noqa: E731
    names = ("FnSpecs", "FusedActivation", "RoutingData", "GatherIndx", "ScatterIndx")
    _packages(
        monkeypatch,
        triton_kernels={},
        triton_kernels__matmul_ogs={"matmul_ogs": matmul_ogs, **dict.fromkeys(names, pairs)},
        triton_kernels__swiglu={"swiglu_fn": None},
        triton_kernels__tensor={"make_ragged_tensor_metadata": lambda load, n: ("ragged", n)},
        triton_kernels__topk={"topk": topk},
    )
    experts = dataclasses.replace(tiny(), renormalize=renormalize)
    (one,) = given(9, "zipf")
    got = PEERS["triton_kernels"].make(experts)(one)
    testing.assert_close(got, moe.expected(experts, one).float(), what="peer", factor=3)


# ---- python -m bench moe -----------------------------------------------------------------------


@cpu_defaults
def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With our kernels in the interpreter."""
    out = tmp_path / "rows.json"
    more = ["--rounds", "1", "--peers", "torch", "--json", str(out)]
    assert main([*SMALL, *more]) == 0
    found = json.loads(out.read_text())
    assert found["command"] == "moe"
    assert found["roof"]["copy_gbps"] == 2
    rows = found["rows"]
    assert [(r["weights"], r["provider"]) for r in rows] == [
        ("bf16", "tkernels"), ("bf16", "torch"), ("w8a8", "tkernels"), ("w4a16", "tkernels")
    ]  # fmt: skip
    for row in rows:
        assert (row["shape"], row["tokens"], row["routing"]) == ("tiny-moe", 3, "zipf")
        assert (row["rounds"], row["inputs"]) == (1, 2)
        assert 2 <= row["experts"] <= 6
        assert row["least_us"] <= row["us"] <= row["q90_us"]
        assert row["bytes"] == row["experts"] * tiny(row["weights"]).expert_bytes
    assert rows[0]["of_torch"] == pytest.approx(rows[0]["us"] / rows[1]["us"])
    for row in rows[2:]:
        assert row["of_bf16"] == pytest.approx(row["us"] / rows[0]["us"])
    assert rows[1]["about"] == torch.__version__
    said = capsys.readouterr().out
    assert len([line for line in said.splitlines() if " zipf " in line]) == 4
    assert "on a CPU these times mean nothing" in said
    assert "this run's own copy bandwidth, 2 GB/s" in said


@pytest.fixture
def _by_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moe, "ours", moe.expected)


@cpu_defaults
@pytest.mark.usefixtures("_by_reference")
def test_what_is_wrong_or_fails_is_told_and_not_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(experts: Experts) -> moe_peers.Layer:
        raise RuntimeError("no such thing")

    peers = {
        "wrong": Peer(lambda e: lambda one: one.x, "torch"),
        "broken": Peer(broken, "torch"),
        "torch": PEERS["torch"],
    }
    monkeypatch.setattr(moe_command, "PEERS", peers)
    out = tmp_path / "rows.json"
    assert main([*SMALL, "--weights", "bf16", "--json", str(out)]) == 1
    found = json.loads(out.read_text())
    assert [row["provider"] for row in found["rows"]] == ["tkernels", "torch"]
    wrong, failed = found["failures"]
    assert wrong.startswith("tiny-moe 3 tokens zipf bf16 wrong: AssertionError: result: largest")
    assert failed == "tiny-moe 3 tokens zipf bf16 broken: RuntimeError: no such thing"
    assert "FAILED tiny-moe 3 tokens zipf bf16 wrong" in capsys.readouterr().err


@cpu_defaults
@pytest.mark.usefixtures("_by_reference")
def test_peers_of_several_formats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _vllm(monkeypatch)
    out = tmp_path / "rows.json"
    assert main([*SMALL, "--peers", "vllm", "--json", str(out)]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert [(r["weights"], r["provider"]) for r in rows] == [
        ("bf16", "tkernels"), ("bf16", "vllm"), ("w8a8", "tkernels"), ("w8a8", "vllm"),
        ("w4a16", "tkernels"),
    ]  # fmt: skip
    assert rows[3]["of_bf16"] == pytest.approx(rows[3]["us"] / rows[1]["us"])
    assert rows[3]["about"] == "1.2: a part of it"


@cpu_defaults
@pytest.mark.usefixtures("_by_reference")
def test_missing_peers(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Left out with a word, unless they were asked for."""
    for name in ("vllm", "triton_kernels"):
        monkeypatch.setitem(sys.modules, name, None)
    assert main([*SMALL, "--weights", "bf16"]) == 0
    said = capsys.readouterr()
    assert "bench: peer vllm is left out: ModuleNotFoundError:" in said.err
    assert "bench: peer triton_kernels is left out: ModuleNotFoundError:" in said.err
    assert [line.split()[4] for line in said.out.splitlines() if " zipf " in line] == [
        "tkernels", "torch"
    ]  # fmt: skip
    assert main([*SMALL, "--peers", "vllm"]) == 2
    assert "--peers vllm must be importable, got ModuleNotFoundError" in capsys.readouterr().err


@cpu_defaults
@pytest.mark.usefixtures("_by_reference")
def test_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in the second round: what the first one gave is told and kept."""
    calls: list[int] = []
    real = moe.expected

    def ours(experts: Experts, one: Inputs) -> torch.Tensor:
        calls.append(1)
        if len(calls) == 4:  # the comparison, getting ready, round 1, round 2
            raise KeyboardInterrupt
        return real(experts, one)

    monkeypatch.setattr(moe, "ours", ours)
    out = tmp_path / "rows.json"
    more = ["--tokens", "3,4", "--weights", "bf16", "--peers", "none", "--json", str(out)]
    assert main([*SMALL, *more]) == 130
    found = json.loads(out.read_text())
    assert found["interrupted"]
    assert [(row["tokens"], row["rounds"]) for row in found["rows"]] == [(3, 1)]


@cpu_defaults
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--shape qwen3-8b", "--shape must be of qwen3-30b-a3b, tiny-moe, got 'qwen3-8b'"),
        ("--tokens 0", "--tokens must be whole numbers >= 1 like 1,16, got '0'"),
        ("--routing even", "--routing must be of uniform, zipf, got 'even'"),
        ("--weights fp8", "--weights must be of bf16, w8a8, w4a16, got 'fp8'"),
        ("--peers cutlass", "--peers must be of torch, vllm, triton_kernels, got"),
        ("--seed -1", "--seed must be 0 or more, got -1"),
        ("--json /proc/none/rows.json", "/proc/none/rows.json must be a writable file"),
    ],
)
def test_refused(options: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["moe", *options.split()]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("bench: ")
    assert words in line


@pytest.mark.gpu
def test_command_on_a_gpu(tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    more = ["--shape", "tiny-moe", "--peers", "torch", "--json", str(out)]
    assert main([*SMALL, *more]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert [(r["weights"], r["provider"], r["method"]) for r in rows] == [
        ("bf16", "tkernels", "graph"), ("bf16", "torch", "events"),
        ("w8a8", "tkernels", "graph"), ("w4a16", "tkernels", "graph"),
    ]  # fmt: skip
