"""The command lines on a mixture of experts: what they say of it, and what they refuse."""

from __future__ import annotations

import importlib.util
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import load_folder, make_folder, new_runner, tiny
from safetensors.torch import load_file

import tkernels
from model import (
    calibrate_kv,
    calibrate_watch,
    cpu_ops,
    fallback,
    generate,
    kv_quality,
    quantize,
    quantize_plan,
    sensitivity,
)
from model import config as configs
from model.kv_cache import SequenceState
from model.perplexity import logits_of, perplexity
from model.routing import Routing, figures, table
from model.runner import Runner

NAME = "qwen3_moe-every-other"  # three layers, the middle one with 3 of 7 experts a token
TEXT = "letters that are their own tokens, and some more of them: 0123456789. " * 4
ATTENTION = [f"model.layers.1.self_attn.{part}_proj" for part in "qkvo"]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("base") / "m", None, NAME)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "t.txt"
    path.write_text(TEXT)
    return path


def ids(n: int, seed: int = 0) -> list[int]:
    return torch.randint(0, 331, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


# ---- routing statistics --------------------------------------------------------------------------


def test_figures_of_known_loads() -> None:
    assert figures([5, 5, 5, 5]) == {
        "load": [5, 5, 5, 5], "imbalance": 1.0, "evenness": 1.0, "unused": 0,
    }  # fmt: skip
    two = figures([8, 0, 8, 0])  # always the same two of four
    assert (two["imbalance"], two["unused"]) == (2.0, 2)
    assert two["evenness"] == pytest.approx(math.log(2) / math.log(4))
    some = figures([6, 1, 1])
    assert some["imbalance"] == 6 / (8 / 3)
    entropy = -(0.75 * math.log(0.75) + 0.25 * math.log(0.125))
    assert some["evenness"] == pytest.approx(entropy / math.log(3))
    assert figures([7])["evenness"] == 1.0
    assert figures([0, 0])["imbalance"] is figures([0, 0])["evenness"] is None


@torch.inference_mode()
def expected_load(tokens: list[int]) -> list[int]:
    """Of the middle layer, from transformers' router."""
    found: list[torch.Tensor] = []
    hf = tiny(NAME).hf
    gate = hf.model.layers[1].mlp.gate
    hook = gate.register_forward_hook(lambda module, args, out: found.append(out[2]))
    try:
        hf(torch.tensor([tokens]))
    finally:
        hook.remove()
    return found[0].flatten().bincount(minlength=7).tolist()


@pytest.mark.parametrize("ops", [cpu_ops, tkernels.reference])
def test_loads_are_those_of_the_router(ops: Any) -> None:
    """Of a prompt in chunks and of decode steps; a second layer with experts has its own row."""
    model, tokens = tiny(NAME).ours, ids(30)
    routing = Routing(model.config, torch.device("cpu"))
    runner = Runner(model, ops, num_blocks=8, max_positions=64, prefill_chunk=11, routing=routing)
    sequence = SequenceState(tokens[:27])
    runner.prefill([sequence])
    for token in tokens[27:]:
        sequence.token_ids.append(token)
        runner.decode([sequence])
    found = routing.summary()
    (row,) = found["layers"]
    assert row["layer"] == 1
    assert row["load"] == expected_load(tokens)
    assert (found["tokens"], found["num_experts"], found["experts_per_token"]) == (30, 7, 3)
    assert found["most_imbalance"] == row["imbalance"] > 1
    assert found["least_evenness"] == row["evenness"] < 1


def test_layers_are_counted_apart_and_nothing_else_changes() -> None:
    model = tiny("qwen3_moe-dense-first").ours
    routing = Routing(model.config, torch.device("cpu"))
    runner = Runner(model, cpu_ops, num_blocks=8, max_positions=64, routing=routing)
    got = runner.prefill([SequenceState(ids(9))])
    assert torch.equal(got, new_runner(model, cpu_ops).prefill([SequenceState(ids(9))]))
    assert routing.load.tolist() == [[9] * 4] * 2  # all four of each layer
    assert [row["layer"] for row in routing.summary()["layers"]] == [1, 2]


def test_summary_of_nothing() -> None:
    found = Routing(tiny(NAME).ours.config, torch.device("cpu")).summary()
    assert (found["tokens"], found["most_imbalance"], found["least_evenness"]) == (0, None, None)
    assert table(found) == "experts: no token went through them"


def test_generate_tells_the_loads(base: Path, tmp_path: Path, capsys: Any) -> None:
    argv = ["--model", str(base), "--prompt", "abc", "--max-tokens", "6", "--ignore-eos"]
    assert generate.main([*argv, "--json"]) == 0
    plain = json.loads(capsys.readouterr().out)
    assert "experts" not in plain["stats"]
    picture = tmp_path / "load.png"
    assert generate.main([*argv, "--json", "--moe-stats", str(picture)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["replies"] == plain["replies"]
    assert found["stats"]["experts"]["tokens"] == 3 + 5  # the last token goes nowhere
    assert sum(found["stats"]["experts"]["layers"][0]["load"]) == 3 * 8
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert generate.main([*argv, "--moe-stats"]) == 0
    err = capsys.readouterr().err
    assert "experts: 3 of 7 a token, 8 tokens; imbalance (max/mean) at most" in err
    assert "  layer 1: imbalance " in err


def test_picture_shows_shares(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.axes import Axes

    from model.routing import draw

    seen: list[Any] = []
    imshow = Axes.imshow

    def noting(axis: Any, values: Any, **more: Any) -> Any:
        seen.append(values)
        return imshow(axis, values, **more)

    monkeypatch.setattr(Axes, "imshow", noting)
    rows = [{"layer": i, **figures(load)} for i, load in ((1, [6, 1, 1, 0]), (3, [0, 0, 0, 0]))]
    found = {"num_experts": 4, "experts_per_token": 1, "tokens": 8, "layers": rows}
    draw(tmp_path / "p.svg", found)
    assert seen == [[[3.0, 0.5, 0.5, 0.0], [0.0, 0.0, 0.0, 0.0]]]


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("load.txt", "--moe-stats must end in .png, .pdf or .svg, got"),
        ("absent/load.png", "--moe-stats must be a file in a folder that is there, got"),
    ],
)
def test_picture_places_are_checked_first(
    place: str, message: str, tmp_path: Path, capsys: Any
) -> None:
    assert generate.main(["--prompt", "a", "--moe-stats", str(tmp_path / place)]) == 2
    assert message in capsys.readouterr().err


def test_statistics_of_a_dense_network_are_refused(tmp_path: Path, capsys: Any) -> None:
    folder = make_folder(tmp_path / "m", None)
    assert generate.main(["--model", str(folder), "--prompt", "a", "--moe-stats"]) == 2
    err = capsys.readouterr().err
    assert "error: --moe-stats: expected a network with experts, got a dense qwen3" in err


# ---- the other tools -----------------------------------------------------------------------------


def test_four_bits_leave_experts_of_other_inputs_alone(
    base: Path, tmp_path: Path, capsys: Any
) -> None:
    out = tmp_path / "out"
    argv = ["--model", str(base), "--scheme", "w4a16", "--out", str(out)]
    assert quantize.main([*argv, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (facts["quantized_layers"], facts["kept_experts"]) == (4 * 3 + 3 * 2, 7)
    assert facts["quantized_experts"] == 0
    assert facts["expert_bytes"] == 4 * (7 * 48 + 7 * 3 * 20 * 48)
    assert quantize.main([*argv, "--overwrite"]) == 0
    line = "\n7 experts and all routers as they were; they take 0.1 MB of that"
    assert line in capsys.readouterr().out

    stored = load_file(out / "model.safetensors")
    original = tiny(NAME).ours
    experts = load_folder(out).layers[1].experts
    assert experts is not None
    assert original.layers[1].experts is not None
    assert torch.equal(experts.gate_up_proj, original.layers[1].experts.gate_up_proj)
    assert stored["model.layers.1.mlp.experts.gate_up_proj"].shape == (7, 40, 48)
    assert "model.layers.1.self_attn.q_proj.weight_scale" in stored
    whole, _ = logits_of(original, cpu_ops, ids(20))
    got, _ = logits_of(load_folder(out), cpu_ops, ids(20))
    error = (got - whole).norm() / whole.norm()
    assert 0 < error < 0.3


@pytest.mark.skipif(
    importlib.util.find_spec("compressed_tensors") is None,
    reason="compressed-tensors is not installed (pip install .[dev])",
)
@pytest.mark.parametrize("scheme", ["w8a16", "w4a16"])
def test_transformers_reads_what_is_written(scheme: str, base: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    out = tmp_path / "out"
    argv = ["--model", str(base), "--scheme", scheme, "--out", str(out), "--json"]
    assert quantize.main(argv) == 0
    hf = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    with torch.inference_mode():
        theirs = hf(torch.tensor([ids(20)])).logits[0]
    ours, _ = logits_of(load_folder(out), cpu_ops, ids(20))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_sensitivity_measures_attention_and_dense_layers(
    base: Path, text: Path, tmp_path: Path, capsys: Any
) -> None:
    out = tmp_path / "s.json"
    argv = ["--model", base, "--out", out, "--text", text, "--tokens", 64, "--target-share", 0.2]
    argv += ["--held-out", 32, "--picture", tmp_path / "s.png"]
    assert sensitivity.main([str(a) for a in argv]) in (0, 1)
    printed = capsys.readouterr().out
    assert "  7 experts and their routers were not looked at" in printed
    found = json.loads(out.read_text())
    assert found["experts_left_out"] == 7
    assert len(found["layers"]) == 4 * 3 + 3 * 2
    assert [name for name in found["layers"] if ".1." in name] == ATTENTION
    held_out = found["search"]["perplexity"]
    assert 1 < held_out < math.inf
    tokens = 64 + 32
    assert len(TEXT) >= tokens
    # The layers one by one are the network.
    from model.checkpoint import open_checkpoint
    from model.tokenizer import encode

    last = encode(open_checkpoint(base).tokenizer, TEXT)[-32:]
    assert held_out == pytest.approx(perplexity(tiny(NAME).ours, cpu_ops, last), rel=1e-5)
    flagged = quantize_plan.read_sensitive(out, configs.from_folder(base))
    assert flagged <= set(found["layers"])


def test_watching_is_refused(base: Path, text: Path, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "w.safetensors"
    argv = ["--model", base, "--out", out, "--text", text, "--tokens", 64, "--held-out", 0]
    wanted = "can be watched, got one with experts in 1 of 3 layers\n"
    assert calibrate_watch.main([str(a) for a in argv]) == 2
    assert capsys.readouterr().err.endswith(
        f"error: expected a network whose layers all have a down_proj that {wanted}"
    )
    assert not out.exists()
    config = configs.from_folder(base)
    with pytest.raises(ValueError, match="--fallback: expected a network whose layers all have"):
        fallback.load(out, config)


def test_kv_cache_is_calibrated_and_planted_outliers_stay_out_of_experts() -> None:
    model = load_folder(tiny("qwen3_moe-dense-first").folder)
    tensors, _ = calibrate_kv.calibrate(model, cpu_ops, ids(40))
    assert all(t.isfinite().all() for t in tensors.values())
    kv_quality.plant(model, ids(200))
    for layer in model.layers[1:]:
        assert layer.experts is not None
        assert not layer.experts.down_proj[:, 5].any()
        assert layer.experts.down_proj[:, 6].all()
