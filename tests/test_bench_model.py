"""``python -m bench model`` and ``engine``: figures by hand, both commands on a tiny network."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from graphs import Launched, stand_in
from unstacked import experts_of, values

import tkernels
from bench import roofline
from bench.__main__ import main
from bench.model import cell, decode, engine_command, options, peer, profile, scenarios, shapes
from bench.model.decode import Sample
from bench.roofline import Roof
from model import graph
from model.engine import GREEDY, Engine
from model.quantize_plan import SCHEMES
from model.quantized_matrix import Int4Experts, Int8Experts, Int8Matrix, PackedMatrix
from model.qwen3 import Model
from model.runner import Runner
from model.threads import cpu_threads
from tkernels import device

CPU = torch.device("cpu")
ROOF = Roof(bytes_per_s=2e9, flops_per_s=3e10)
cpu_defaults = pytest.mark.skipif(device.KIND != "cpu", reason="counts on the defaults of a CPU")
stand_in_graphs = pytest.mark.skipif(
    device.KIND != "cpu", reason="the stand-in's tensors are on the CPU"
)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A known roof; and one thread, as a second one would only be waited for."""
    monkeypatch.setattr(roofline, "measured", lambda: ROOF)
    with cpu_threads(1):
        yield


@functools.cache
def tiny(name: str = "tiny", seed: int = 0) -> Model:
    config = shapes.config_of(name)
    return shapes.random_model(config, seed=seed, dtype=torch.float32, device=CPU)


def reply(runner: Runner, prompts: list[list[int]], output: int, graphs: Any = None) -> Any:
    return decode.timed(decode.replies(runner, prompts, output, graphs)).tokens


# ---- sizes -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "millions", "untied"),
    [
        ("qwen3-0.6b", 596, 751),
        ("qwen3-4b", 4022, 4411),
        ("qwen3-8b", 8191, 8191),
        ("qwen3-30b-a3b", 30532, 30532),
    ],
)
def test_published_sizes(name: str, millions: int, untied: int) -> None:
    """As the model cards and the files' indices have them."""
    config = shapes.config_of(name)
    count = shapes.parameters(config)
    assert count == pytest.approx(1e6 * millions, rel=1e-3)
    table = config.vocab_size * config.hidden_size
    assert count + config.tie_word_embeddings * table == pytest.approx(1e6 * untied, rel=1e-3)
    assert config.max_position_embeddings > 32768
    assert config.qk_norm


def test_active_parameters_of_the_mixture() -> None:
    """3.3 billion a token, as its name says, without the embedding table."""
    flops = shapes.step_flops(shapes.config_of("qwen3-30b-a3b"), 1, 0)
    assert flops / 2 == pytest.approx(3.04e9, rel=0.01)


def test_random_weights() -> None:
    config = shapes.config_of("tiny")
    again = shapes.random_model(config, seed=0, dtype=torch.float32, device=CPU)
    model, other = tiny(), tiny(seed=1)
    layer = model.layers[0]
    assert torch.equal(layer.input_layernorm, torch.ones(48))
    weight = layer.qkv_proj.weight
    assert isinstance(weight, torch.Tensor)
    assert weight.shape == (128, 48)
    assert float(weight.std()) == pytest.approx(0.02, rel=0.1)
    assert torch.equal(weight, again.layers[0].qkv_proj.weight)
    assert not torch.equal(weight, other.layers[0].qkv_proj.weight)


@pytest.mark.parametrize("name", ["tiny", "tiny-moe"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_random_quantised_weights(name: str, scheme: str) -> None:
    """As ``model.quantize`` has them, and of the deviation that matrices of 16 bits have."""
    config = shapes.quantised(shapes.config_of(name), scheme)
    model, again = (
        shapes.random_model(config, seed=0, dtype=torch.bfloat16, device=CPU) for _ in range(2)
    )
    weight, other = (m.layers[0].qkv_proj.weight for m in (model, again))
    if scheme == "w4a16":
        assert isinstance(weight, PackedMatrix)
        assert isinstance(other, PackedMatrix)
        assert torch.equal(weight.packed, other.packed)
        values = weight.values(torch.float32)
    else:
        assert isinstance(weight, Int8Matrix)
        assert weight.quantized_activations == (scheme == "w8a8")
        values = weight.codes * weight.scale[:, None]
    assert values.shape == (128, 48)
    assert float(values.std()) == pytest.approx(0.02, rel=0.1)
    experts = model.layers[0].experts
    if experts is not None:  # those stay in 16 bits beside 4-bit attention: 32 does not divide 48
        assert isinstance(experts.gate_up_proj, Int8Experts) == (scheme != "w4a16")
    assert model.bytes_per_step < tiny(name).bytes_per_step / 2


def test_random_experts_in_four_bits() -> None:
    plain = dataclasses.replace(shapes.config_of("tiny-moe"), hidden_size=64)
    config = shapes.quantised(plain, "w4a16")
    model = shapes.random_model(config, seed=0, dtype=torch.bfloat16, device=CPU)
    found = experts_of(model, 1)
    assert isinstance(found.gate_up_proj, Int4Experts)
    assert isinstance(found.down_proj, Int4Experts)
    assert found.gate_up_proj.packed.shape == (8, 2 * 32, 64 // 8)
    assert found.gate_up_proj.scale.dtype == torch.bfloat16
    for weight in (found.gate_up_proj, found.down_proj):
        assert float(values(weight).std()) == pytest.approx(0.02, rel=0.1)
    one = 3 * 32 * 64 // 2 + 2 * 3 * 32 * 64 // 32
    assert shapes.expert_bytes(model) == one
    assert found.bytes_per_token == 2 * 8 * 64 + 2 * one
    everything = shapes.weight_bytes(model, 16)
    assert everything == model.bytes_per_step + 12 * one
    # What it computes is what it was, of numbers in 16 bits.
    assert shapes.step_flops(config, 1, 5) == shapes.step_flops(plain, 1, 5)


def test_published_experts_have_groups_of_128() -> None:
    config = shapes.quantised(shapes.config_of("qwen3-30b-a3b"), "w4a16")
    assert config.quantization is not None
    for name in ("experts.0.up_proj", "experts.127.down_proj"):
        scheme = config.quantization.scheme_of(f"model.layers.47.mlp.{name}")
        assert scheme is not None
        assert scheme.words == "W4A16 in groups of 128"
    assert config.quantization.scheme_of("model.layers.47.mlp.gate") is None


# ---- figures by hand ---------------------------------------------------------------------------

# Of the tiny network, in fp32. A layer: q, k and v of 64 + 32 + 32 rows, o, an MLP of 96, norms.
LAYER = 128 * 48 + 48 * 64 + 2 * 96 * 48 + 48 * 96 + 2 * 48 + 2 * 16
WEIGHT_BYTES = 4 * (2 * LAYER + 48 + 320 * 48)
KV_BYTES = 4 * 2 * 2 * 32  # of a token: K and V, two layers of two heads of 16


def test_roofline_by_hand() -> None:
    """Three replies of four tokens to prompts of eight: steps see 9, 10 and 11 tokens of each."""
    samples = [
        Sample([0.5, 0.010, 0.020, 0.030], [[1, 2, 3]] * 4),
        Sample([0.7, 0.020, 0.020, 0.040], [[1, 2, 3]] * 4),
    ]
    found = decode.figures(samples, tiny(), 8, experts=0.0, kv_bytes=KV_BYTES, roof=ROOF)
    assert found["tokens"] == 12
    assert found["ttft_ms"] == pytest.approx(600)
    assert found["token_ms"] == pytest.approx(20)
    assert found["token_p99_ms"] == pytest.approx(40)
    assert found["tokens_per_s"] == pytest.approx((12 / 0.56 + 12 / 0.78) / 2)
    assert found["decode_tokens_per_s"] == pytest.approx(3 / 0.020)
    num_bytes = WEIGHT_BYTES + KV_BYTES * 3 * 10
    assert found["step_bytes"] == num_bytes == 262336
    assert found["gbps"] == pytest.approx(num_bytes / 0.020 / 1e9)
    assert found["roof_share"] == pytest.approx(num_bytes / 2e9 / 0.020)
    norms = 2 * (2 * 48 + 2 * 16) + 48
    products = 2 * 3 * (WEIGHT_BYTES // 4 - norms) + 4 * 64 * 2 * 30
    assert found["step_flops"] == products
    assert found["tflops"] == pytest.approx(products / 0.020 / 1e12)


def test_weights_of_experts() -> None:
    model = tiny("tiny-moe")
    one = 4 * 3 * 32 * 48
    assert shapes.expert_bytes(model) == one
    assert shapes.weight_bytes(model, 4) == model.bytes_per_step  # two in each of two layers
    everything = shapes.weight_bytes(model, 16)
    assert everything == model.bytes_per_step + 12 * one == 4 * shapes.parameters(model.config)
    assert shapes.expected_experts(model.config, 1) == pytest.approx(4)
    assert shapes.expected_experts(model.config, 2) == pytest.approx(16 * (1 - 0.75**2))


def test_experts_are_counted() -> None:
    model = tiny("tiny-moe")
    runner = decode.new_runner(model, tkernels.reference, 6, 16, None)
    assert decode.experts_read(runner, [[5, 6, 7]], 4) == 4  # of one token: top_k in each layer
    prompts = torch.randint(320, (6, 3)).tolist()
    assert 4 < decode.experts_read(runner, prompts, 4) <= 16
    assert runner.routing is None
    dense = decode.new_runner(tiny(), tkernels.reference, 1, 16, None)
    assert decode.experts_read(dense, [[5, 6]], 4) == 0


def test_agreement() -> None:
    some = Sample([], [[1, 2], [3, 4], [5, 6]])
    assert decode.agreement(some, some) == 1
    assert decode.agreement(some, Sample([], [[1, 2], [3, 9]])) == 0.5
    assert decode.agreement(some, Sample([], [[1, 2]])) == 1


def test_busy_and_idle() -> None:
    intervals = [("a", 10.0, 20.0), ("b", 15.0, 30.0), ("a", 40.0, 50.0), ("c", 41.0, 42.0)]
    assert profile.busy_until(intervals) == [10, 20, 22, 30]
    found = profile.figures(intervals, 2)
    assert found is not None
    assert (found["busy_us"], found["span_us"]) == (15, 20)
    assert found["idle_share"] == pytest.approx(0.25)
    assert found["kernels"][0] == {"name": "a", "us": 9, "launches": 1}
    assert [k["name"] for k in found["kernels"]] == ["a", "b", "c"]
    # Kernels of a chain that begin at once and wait for each other.
    chain = [("x", 0.0, 4.0), ("y", 1.0, 6.0), ("x", 1.0, 9.0), ("z", 12.0, 13.0)]
    waited = profile.figures(chain, 1)
    assert waited is not None
    assert {k["name"]: k["us"] for k in waited["kernels"]} == {"x": 7, "y": 2, "z": 1}
    assert waited["busy_us"] == 10
    assert profile.figures([], 2) is None


def test_recorded_operators() -> None:
    """Each once, not those that it calls; nothing of before or after."""
    if device.KIND != "cpu":
        pytest.skip("operators are recorded on the CPU, kernels elsewhere")
    x = torch.ones(8, 8)
    x.exp()
    with device.profiled() as found:
        x.matmul(x)
        x.sin()
        assert found == []
    x.cos()
    assert [name for name, _, _ in found] == ["aten::matmul", "aten::sin"]
    assert found[0][1] < found[0][2] <= found[1][1] < found[1][2]


# ---- variants ----------------------------------------------------------------------------------


@stand_in_graphs
@pytest.mark.parametrize("name", ["tiny", "tiny-moe"])
def test_graphs_give_the_replies_of_plain_steps(name: str) -> None:
    model, prompts = tiny(name), [[1, 2, 3], [4, 5, 6]]
    expected = reply(decode.new_runner(model, tkernels.reference, 2, 9, None), prompts, 6)
    assert [len(step) for step in expected] == [2] * 6
    with stand_in():
        runner = decode.new_runner(model, Launched(tkernels.reference), 2, 9, None)
        graphs = decode.captured(runner, 2)
        assert reply(runner, prompts, 6, graphs) == expected
        assert graphs.launched == 5
        assert runner.blocks.free.count == runner.num_blocks
        assert reply(runner, prompts, 6, graphs) == expected


def test_blocks_come_back_from_replies_given_up() -> None:
    runner = decode.new_runner(tiny(), tkernels.reference, 1, 9, None)
    steps = decode.replies(runner, [[1, 2, 3]], 6)
    next(steps)
    assert runner.blocks.free.count < runner.num_blocks
    steps.close()
    assert runner.blocks.free.count == runner.num_blocks


@pytest.mark.parametrize("name", ["tiny", "tiny-moe"])
def test_transformers_computes_the_same_on_the_same_tensors(name: str) -> None:
    model, prompts = tiny(name), [[1, 2, 3], [4, 5, 6]]
    expected = reply(decode.new_runner(model, tkernels.reference, 2, 9, None), prompts, 6)
    network = peer.build(model)
    embedding = network.model.embed_tokens.weight
    assert embedding.data_ptr() == model.embed_tokens.data_ptr()  # type: ignore[union-attr]
    assert network.lm_head.weight.data_ptr() == embedding.data_ptr()
    for static in (False, True):
        found = peer.run(network, prompts, 6, static=static)
        assert found.tokens == expected
        assert len(found.seconds) == 6


def test_transformers_refuses_quantised_weights() -> None:
    model = tiny.__wrapped__()  # one of its own, to be spoilt
    model.layers[1].o_proj.weight = object()  # type: ignore[assignment]
    with pytest.raises(ValueError, match="transformers: expected weights of floats, got object"):
        peer.build(model)


# ---- python -m bench model ---------------------------------------------------------------------

SMALL = ["model", "--batch", "1,3", "--input", "3", "--output", "4", "--rounds", "2"]


@cpu_defaults
def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, plot, kernels = tmp_path / "rows.json", tmp_path / "roof.png", tmp_path / "kernels.png"
    shown = ["--json", str(out), "--plot", str(plot), "--profile", str(kernels)]
    assert main([*SMALL, "--rounds", "1", "--shape", "tiny,tiny-moe", *shown]) == 0
    for picture in (plot, kernels):
        assert picture.read_bytes().startswith(b"\x89PNG")
    found = json.loads(out.read_text())
    assert found["roof"]["copy_gbps"] == 2
    assert not found["interrupted"]
    rows = found["rows"]
    assert [(r["shape"], r["batch"]) for r in rows] == [
        ("tiny", 1), ("tiny", 3), ("tiny-moe", 1), ("tiny-moe", 3)
    ]  # fmt: skip
    for row in rows:
        assert row["tokens"] == row["batch"] * 4
        assert row["rounds"] == 1
        assert row["same_replies"] == 1
        assert row["roof_share"] == pytest.approx(row["step_bytes"] / 2e9 / row["token_ms"] * 1e3)
        assert 0 <= row["profile"]["idle_share"] < 1
        assert row["ttft_ms"] > 0
        assert 0 < row["token_ms"] <= row["token_p99_ms"]
    assert rows[0]["step_bytes"] == WEIGHT_BYTES + KV_BYTES * 5
    assert rows[1]["step_bytes"] == WEIGHT_BYTES + KV_BYTES * 15
    said = capsys.readouterr()
    assert len([line for line in said.out.splitlines() if line.startswith("tiny")]) == 8
    assert "this run's own copy bandwidth, 2 GB/s" in said.out


@cpu_defaults
@pytest.mark.parametrize("weights", ["w4a16", "fp8"])
def test_command_with_quantised_weights(weights: str, tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    more = ["--rounds", "1", "--shape", "tiny", "--weights", weights, "--json", str(out)]
    dtype = ["--dtype", "bfloat16"] if weights == "fp8" else []  # in fp32 it is dequantised
    assert main([*SMALL, "--batch", "1", *more, *dtype]) == 0
    (row,) = json.loads(out.read_text())["rows"]
    assert row["shape"] == f"tiny-{weights}"
    # The table of embeddings stays as it is.
    size = 2 if dtype else 4
    assert row["step_bytes"] < (0.8 if dtype else 0.6) * WEIGHT_BYTES * size / 4


@cpu_defaults
def test_command_with_kernels_and_a_quantised_cache(tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    small = ["model", "--batch", "1", "--input", "2", "--output", "2", "--rounds", "1"]
    more = ["--variants", "eager,torch", "--kv-cache", "int8", "--json", str(out)]
    assert main([*small, *more]) == 0
    eager, torch_row = json.loads(out.read_text())["rows"]
    assert (eager["variant"], torch_row["variant"]) == ("eager", "torch")
    assert torch_row["same_as"] == "eager"
    # A code a number, and a scale a head, instead of four bytes a number.
    assert eager["step_bytes"] == WEIGHT_BYTES + 2 * 2 * 2 * (16 + 4) * 3


@cpu_defaults
def test_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in the second round: what the first one gave is told and kept."""
    out, calls = tmp_path / "rows.json", []
    real = decode.timed

    def timed(steps: Any) -> Sample:
        calls.append(1)
        if len(calls) == 3:  # getting ready, round 1, round 2
            raise KeyboardInterrupt
        return real(steps)

    monkeypatch.setattr(decode, "timed", timed)
    assert main([*SMALL, "--json", str(out)]) == 130
    found = json.loads(out.read_text())
    assert found["interrupted"]
    assert [(r["batch"], r["rounds"]) for r in found["rows"]] == [(1, 1)]


@cpu_defaults
def test_a_variant_that_fails_does_not_cost_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def build(model: Model) -> Any:
        raise RuntimeError("no such thing\nsecond line")

    monkeypatch.setattr(peer, "build", build)
    out = tmp_path / "rows.json"
    assert main([*SMALL, "--batch", "1", "--peer", "transformers", "--json", str(out)]) == 1
    found = json.loads(out.read_text())
    assert [row["variant"] for row in found["rows"]] == ["torch"]
    assert found["failures"] == ["tiny batch 1 transformers: RuntimeError: no such thing"]
    assert "FAILED tiny batch 1 transformers" in capsys.readouterr().err


@cpu_defaults
def test_slow_variants_get_shorter_replies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    real = decode.timed

    def slow(steps: Any) -> Sample:
        found = real(steps)
        return Sample([2.0] * len(found.seconds), found.tokens)

    monkeypatch.setattr(decode, "timed", slow)
    monkeypatch.setattr(cell, "_SHORT", 3)
    out = tmp_path / "rows.json"
    more = ["--batch", "2", "--output", "20", "--patience", "10", "--json", str(out)]
    assert main([*SMALL, *more]) == 0
    (row,) = json.loads(out.read_text())["rows"]
    assert (row["output"], row["tokens"]) == (5, 10)


@cpu_defaults
def test_what_does_not_fit_is_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    room = 6 * 2**30 + 4 * shapes.parameters(shapes.config_of("tiny")) + KV_BYTES * 7
    monkeypatch.setattr(options, "free_bytes", lambda: room)
    assert main(SMALL) == 0
    said = capsys.readouterr()
    assert "tiny with 3 sequences is left out: this device has too little memory" in said.err
    assert len([line for line in said.out.splitlines() if line.startswith("tiny")]) == 1


@cpu_defaults
@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("model --shape qwen", "--shape must be of qwen3-0.6b, qwen3-4b,"),
        ("model --batch 1,0", "--batch must be whole numbers >= 1 like 1,16, got '1,0'"),
        ("model --output 1", "--output must be 2 or more to time or profile a token, got 1"),
        ("model --input 5000", "must fit the 4096 positions of tiny, got 5000 and 8"),
        ("model --variants fast", "--variants must be of graph, eager, torch, got 'fast'"),
        ("model --variants graph", "--variants graph: expected an accelerator, got the CPU"),
        ("model --kv-cache int3", "--kv-cache must be one of none, int8,"),
        ("model --kv-cache int8_fp4", "needs a model whose head_dim divides by 32, got 16"),
        ("model --model /nowhere", "/nowhere: expected a folder or a .gguf file"),
        ("model --model /nowhere --shape tiny", "--model must stand without --shape, got both"),
        ("model --weights w4a16 --model /nowhere", "--weights must stand without --model, whose"),
        (
            "model --weights w8a8 --peer transformers",
            "--peer takes weights of 16 bits, got --weights",
        ),
        ("model --seed -1", "--seed must be 0 or more, got -1"),
        ("model --json /proc/none/rows.json", "/proc/none/rows.json must be a writable file"),
        ("engine --shape tiny,tiny-moe", "--shape must be one shape, got 'tiny,tiny-moe'"),
        ("engine --input 9", "--input must be LOW:HIGH like 100:1024, got '9'"),
        ("engine --output 9:3", "--output must be LOW:HIGH like 100:1024, got '9:3'"),
        ("engine --chunk 3", "--chunk must be more than --decoding=3, got 3"),
        ("engine --graphs", "--graphs: expected an accelerator, got the CPU"),
        ("engine --prefix-requests 1", "--prefix-requests must be 2 or more, got 1"),
        ("engine --profile-steps -1", "--profile-steps must be 0 or more, got -1"),
        ("engine --long-prompt 4096", "chunked requests must fit the 4096 positions of tiny, got"),
    ],
)
def test_refused(command: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command.split()) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("bench: ")
    assert words in line


def test_compile_only_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "current", lambda: device.offline_facts("sm90"))
    assert main(["model"]) == main(["engine"]) == 2


@pytest.fixture
def _graphs_here(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The commands find a device that has graphs, and kernels that are the references."""
    ops = "triton", Launched(tkernels.reference)
    for module in (cell, engine_command):
        monkeypatch.setattr(module, "operations", lambda kernels: ops)
    monkeypatch.setattr(graph, "obstacle", lambda ops: None)
    with stand_in():
        yield


@pytest.mark.slow
@stand_in_graphs
@pytest.mark.usefixtures("_graphs_here")
def test_command_with_graphs(tmp_path: Path) -> None:
    out, kernels = tmp_path / "rows.json", tmp_path / "kernels.png"
    more = ["--batch", "2", "--output", "6", "--variants", "graph,eager"]
    assert main([*SMALL, *more, "--profile", str(kernels), "--json", str(out)]) == 0
    captured, eager = json.loads(out.read_text())["rows"]
    assert (captured["variant"], eager["variant"]) == ("graph", "eager")
    assert captured["same_replies"] == eager["same_replies"] == 1
    found = captured["profile"]
    assert found["steps"] == 3
    # Not one step more was recorded than is counted: two layers of four products, and the logits.
    products = [k for k in found["kernels"] if k["name"] in ("aten::linear", "aten::mm")]
    assert sum(k["launches"] for k in products) == 9


@pytest.mark.slow
@stand_in_graphs
@pytest.mark.usefixtures("_graphs_here")
def test_engine_command_with_graphs(tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    small = "engine --scenario mixed --rounds 1 --requests 3 --profile-steps 2 --kernels triton"
    assert main([*small.split(), "--json", str(out)]) == 0
    (row,) = json.loads(out.read_text())["rows"]
    assert row["graphs"]
    assert row["profile"]["steps"] == 2


@pytest.mark.gpu
def test_command_on_a_gpu(tmp_path: Path) -> None:
    out, kernels = tmp_path / "rows.json", tmp_path / "kernels.png"
    more = ["--shape", "tiny,tiny-moe", "--output", "12", "--profile", str(kernels)]
    assert main([*SMALL, *more, "--json", str(out)]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert [r["variant"] for r in rows] == ["graph", "eager", "torch"] * 4
    for row in rows[::3]:
        assert 0 <= row["profile"]["idle_share"] < 1
        # As many of each as the layers have: no more steps were recorded than were counted.
        assert all(float(k["launches"]).is_integer() for k in row["profile"]["kernels"])
    assert kernels.read_bytes().startswith(b"\x89PNG")


# ---- python -m bench engine --------------------------------------------------------------------


def setting(ops: Any = tkernels.reference, **more: Any) -> scenarios.Setting:
    sizes: dict[str, Any] = {"quantization": None, "graphs": False, "seed": 0, "rounds": 1}
    sizes |= {"roof": ROOF, "tell": lambda text: None, "model": tiny()}
    return scenarios.Setting(ops=ops, **(sizes | more))


@cpu_defaults
def test_engine_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, plot = tmp_path / "rows.json", tmp_path / "engine.png"
    assert main(["engine", "--rounds", "1", "--json", str(out), "--plot", str(plot)]) == 0
    assert plot.read_bytes().startswith(b"\x89PNG")
    mixed, chunked, prefix = json.loads(out.read_text())["rows"]
    assert mixed["tokens_per_s"] == pytest.approx(mixed["output_tokens"] / mixed["wall_s"])
    assert len(mixed["step_ms"]) == mixed["steps"]
    assert mixed["roof_share"] == pytest.approx(mixed["read_bytes"] / 2e9 / mixed["wall_s"])
    assert mixed["read_bytes"] > mixed["steps"] * WEIGHT_BYTES
    assert 0 <= mixed["profile"]["idle_share"] < 1
    assert chunked["ratio"] == pytest.approx(chunked["during_p99_ms"] / chunked["before_p99_ms"])
    assert chunked["steps_during"] == -(-96 // (24 - 3))
    assert prefix["found_tokens"] == 3 * 64
    assert prefix["same_answers"] == 4
    assert prefix["gap"] is None
    assert prefix["ratio"] == pytest.approx(prefix["warm_ms"] / prefix["cold_ms"])
    said = capsys.readouterr().out
    assert "on a CPU these times mean nothing" in said
    assert "device idle" in said
    assert "(goal at most 3: " in said
    assert "4 of 4 answers the same" in said


@pytest.mark.gpu
def test_engine_command_on_a_gpu(tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    small = (
        "engine --shape tiny --rounds 1 --requests 6 --input 4:12 --output 8:16 --max-num-seqs 4 "
        "--max-num-batched-tokens 32 --profile-steps 4 --long-prompt 96 --decoding 3 --before 8 "
        "--decoding-input 6 --chunk 24 --prefix 64 --prefix-requests 4 --tail 4 --prefix-output 4"
    )
    assert main([*small.split(), "--json", str(out)]) == 0
    mixed, _, prefix = json.loads(out.read_text())["rows"]
    assert mixed["graphs"]
    assert mixed["profile"]["kernels"]
    assert prefix["found_tokens"] == 3 * 64


def test_bytes_that_an_engine_reads() -> None:
    """A prompt of five in one step, then three steps of a token, which see 6, 7 and 8."""
    engine = setting().engine(tokens=64, length=32, max_num_seqs=2, max_num_batched_tokens=16)
    engine.add([1, 2, 3, 4, 5], GREEDY, scenarios.limits(4))
    answers, steps = scenarios._run_all(setting(), engine)
    assert [len(a.token_ids) for a in answers] == [4]
    assert steps.num_bytes == 4 * WEIGHT_BYTES + KV_BYTES * (5 + 6 + 7 + 8)
    assert engine.counts.attended_tokens == 26


@stand_in_graphs
def test_engine_with_graphs() -> None:
    load = scenarios.Mixed(5, (2, 5), (3, 6), max_num_seqs=4, max_num_batched_tokens=8)
    plain = scenarios.mixed(setting(), load)
    with stand_in():
        captured = scenarios.mixed(setting(Launched(tkernels.reference), graphs=True), load)
    same = ("output_tokens", "steps", "read_bytes", "preemptions")
    assert [captured[name] for name in same] == [plain[name] for name in same]


@pytest.mark.slow
@cpu_defaults
def test_a_scenario_that_fails_does_not_cost_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Engine.step

    def failing(engine: Engine) -> Any:
        if len(engine.batch.num_tokens) == 4 and engine.pool.prefix_cache:  # chunked: 3 and 1
            raise RuntimeError("out of memory")
        return step(engine)

    monkeypatch.setattr(Engine, "step", failing)
    out = tmp_path / "rows.json"
    small = ["--requests", "2", "--max-num-seqs", "2", "--prefix-requests", "3", "--rounds", "1"]
    assert main(["engine", *small, "--profile-steps", "0", "--json", str(out)]) == 1
    found = json.loads(out.read_text())
    assert [row["scenario"] for row in found["rows"]] == ["mixed", "prefix"]
    assert found["failures"] == ["tiny chunked: RuntimeError: out of memory"]


def test_the_gap_where_answers_part() -> None:
    """Of the two tokens' logits, after what both have in common."""
    one = setting()
    prompt = [1, 2, 3]
    logits = scenarios._logits(one, [*prompt, 4])
    gap = scenarios._largest_gap(one, [prompt], [[4, 5, 6]], [[4, 7, 8]])
    assert gap == pytest.approx(abs(float(logits[5] - logits[7])))
    assert scenarios._largest_gap(one, [prompt], [[4, 5]], [[4, 5]]) is None
