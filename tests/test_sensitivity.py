"""Which linear layers int8 would hurt: figures, flags, the search, streaming, interrupts."""

from __future__ import annotations

import functools
import json
import math
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import CPU, make_folder, smollm2, tiny

import tkernels
from model import layer_metrics, layer_stream, sensitivity, threshold_search, weights
from model.checkpoint import open_checkpoint
from model.perplexity import perplexity
from model.sources import Source, open_safetensors

NAME = "qwen3-heads-of-32"
TEXT = "letters that are their own tokens, and some more of them: 0123456789. " * 5
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def ids(n: int, seed: int = 0) -> list[int]:
    return torch.randint(0, 331, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


# ---- figures -----------------------------------------------------------------------------------


def plain_w8a8(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """A linear layer in int8 by its definition, one number at a time where rounding matters."""

    def codes(t: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scale = t.abs().amax(1, keepdim=True).double() / 127
        return (t.double() / scale).round(), scale

    (cx, sx), (cw, sw) = codes(x), codes(w)
    return (cx @ cw.T) * sx * sw.T


def plain_kl(p: np.ndarray, q: np.ndarray, bins: int) -> float:
    found = []
    for a, b in zip(p.T, q.T, strict=True):
        edges = (min(a.min(), b.min()), max(a.max(), b.max()))
        counts = [np.histogram(c, bins, edges)[0] + layer_metrics.SMOOTHING for c in (a, b)]
        u, v = (c / c.sum() for c in counts)
        found.append(float((u * np.log(u / v)).sum()))
    return float(np.mean(found))


def outlier_layer() -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs of which channel 3 is 200 times as large as the others, and a weight."""
    x, w = torch.randn(400, 48), torch.randn(40, 48)
    x[:, 3] *= 200
    return x, w


def kl_of(x: torch.Tensor, w: torch.Tensor, bins: int = 64) -> float:
    return layer_metrics.output_kl(x, layer_metrics.fake_quantised(x), w, None, bins)


@pytest.mark.parametrize("bins", [16, 64])
def test_kl_is_that_of_histograms(bins: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x, w = outlier_layer()
    expected = plain_kl((x @ w.T).numpy(), plain_w8a8(x, w).numpy(), bins)
    # A value on the edge of two bins may fall into the other one.
    assert kl_of(x, w, bins) == pytest.approx(expected, rel=0.01)
    monkeypatch.setattr(layer_metrics, "_AT_ONCE", 7 * len(x))  # 40 channels in six pieces
    assert kl_of(x, w, bins) == pytest.approx(expected, rel=0.01)


def test_kl_tells_a_layer_with_an_outlier_channel() -> None:
    x, w = outlier_layer()
    w[:, 3] = 0  # what is large is not used, so all that is left is its rounding error
    usual = torch.randn(400, 48)
    assert kl_of(x, w) > 10 * kl_of(usual, w)
    assert kl_of(usual, w) < 0.02 < kl_of(x, w)
    assert layer_metrics.dispersion(x) > 15 > layer_metrics.dispersion(usual)


def test_kl_of_what_is_constant_or_exact() -> None:
    one, other = torch.ones(50, 3), torch.ones(50, 3)
    assert layer_metrics.histogram_kl(one, other).tolist() == [0, 0, 0]
    other[:, 1] += 1
    found = layer_metrics.histogram_kl(one, other).tolist()
    assert found[0] == found[2] == 0
    assert found[1] > 1
    assert kl_of(torch.zeros(50, 8), torch.randn(4, 8)) == 0
    x = torch.randint(-127, 128, (50, 8)).float()
    x[:, 0] = 127  # int8 holds these exactly
    assert kl_of(x, torch.eye(8)) == 0


def test_dispersion_is_numpys() -> None:
    for x in (torch.randn(31, 7), torch.randn(4, 5) ** 9, torch.arange(10.0)[None]):
        q1, q3 = np.quantile(x.double().numpy(), (0.25, 0.75))
        expected = float(x.max() - x.min()) / (q3 - q1)
        assert layer_metrics.dispersion(x) == pytest.approx(expected, rel=1e-5)
    assert layer_metrics.dispersion(torch.full((3, 3), 2.0)) == 0
    spike = torch.zeros(100, 9)
    spike[0, 0] = 5  # no quartile sees it
    assert layer_metrics.dispersion(spike) == layer_metrics.MOST_DISPERSION
    for bad in (math.nan, math.inf):
        assert math.isnan(layer_metrics.dispersion(torch.tensor([[1.0, bad, 2.0, 3.0]])))


@pytest.mark.parametrize("shape", [(30, 50), (50, 30), (1, 9)])
def test_energy_is_that_of_singular_values(shape: tuple[int, int]) -> None:
    for w in (torch.randn(shape), torch.randn(shape).to(torch.bfloat16), torch.randn(shape).t()):
        sigma = torch.linalg.svdvals(w.double())
        expected = float(sigma.max() / sigma.sum())
        assert layer_metrics.energy_ratio(w) == pytest.approx(expected, rel=1e-9)
    rank_one = torch.randn(shape[0], 1) @ torch.randn(1, shape[1])
    assert layer_metrics.energy_ratio(rank_one) == pytest.approx(1, abs=1e-4)
    assert layer_metrics.energy_ratio(torch.zeros(shape)) == 0


# ---- a network, layer by layer -----------------------------------------------------------------


def stream(source: Source | None = None, tokens: list[int] | None = None) -> Any:
    found = tiny(NAME)
    return layer_stream.LayerStream(
        found.ours.config,
        source or open_safetensors(found.folder),
        tkernels.reference,
        tokens or ids(90),
        dtype=torch.float32,
        device=CPU,
    )


def through(one: Any) -> torch.Tensor:
    hidden = one.embed()
    for i in range(one.config.num_layers):
        hidden = one.run(one.load(i), hidden)
    return hidden


@torch.inference_mode()
@pytest.mark.parametrize("name", ["qwen3", "llama-bias", "llama-tied-llama3"])
def test_stream_computes_the_network(name: str) -> None:
    found = tiny(name)
    one = layer_stream.LayerStream(
        found.ours.config,
        open_safetensors(found.folder),
        tkernels.reference,
        ids(90),
        dtype=torch.float32,
        device=CPU,
    )
    expected = perplexity(found.ours, tkernels.reference, ids(90))
    assert one.perplexities([through(one)]) == [pytest.approx(expected, rel=1e-5)]


@torch.inference_mode()
def test_windows_do_not_see_one_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_stream, "WINDOW", 40)
    monkeypatch.setattr(layer_stream, "_ROWS", 7)
    one = stream()
    assert [len(w) for w in one.windows] == [40, 40, 10]
    losses = 0.0
    for window in one.windows:
        found = perplexity(tiny(NAME).ours, tkernels.reference, window)
        losses += math.log(found) * (len(window) - 1)
    expected = math.exp(losses / (90 - 3))
    assert one.perplexities([through(one)]) == [pytest.approx(expected, rel=1e-5)]


@torch.inference_mode()
def test_scan_measures_each_layer_as_the_checkpoint_names_it() -> None:
    """Against inputs that hooks take from transformers' own network."""
    hf, one, inputs = tiny(NAME).hf, stream(), {}
    for name, module in hf.named_modules():
        if name.endswith("_proj"):
            module.register_forward_hook(
                lambda m, args, out, name=name: inputs.__setitem__(name, args[0][0])
            )
    hf(torch.tensor([ids(90)]))
    for module in hf.modules():
        module._forward_hooks.clear()
    figures, hidden = {}, one.embed()
    for i in range(one.config.num_layers):
        found, hidden = sensitivity.scan_layer(one, i, hidden, 64)
        figures |= found
    assert set(figures) == set(inputs)
    assert len(figures) == 7 * one.config.num_layers
    for name, row in figures.items():
        x, w = inputs[name], hf.get_submodule(name).weight
        assert row["dispersion"] == pytest.approx(layer_metrics.dispersion(x), rel=1e-3)
        assert row["energy"] == pytest.approx(layer_metrics.energy_ratio(w), rel=1e-5)
        assert row["kl"] == pytest.approx(kl_of(x, w), rel=0.1, abs=2e-3)


def planted_source(changes: dict[str, Any]) -> Source:
    """The tiny checkpoint with some tensors changed as they are read."""
    source = open_safetensors(tiny(NAME).folder)

    def read(name: str) -> torch.Tensor:
        found = source.read(name)
        return changes[name](found) if name in changes else found

    return Source(source.where, source.shapes, read)


@torch.inference_mode()
def test_planted_layers_are_flagged() -> None:
    """An outlier channel shows in kl and dispersion where it is, a rank of one in energy."""

    def outlier(norm: torch.Tensor) -> torch.Tensor:
        norm[5] *= 400
        return norm

    def unused(w: torch.Tensor) -> torch.Tensor:
        w[:, 5] *= 0.001
        return w

    def rank_one(w: torch.Tensor) -> torch.Tensor:
        return w[:, :1] @ w[:1]

    name = "model.layers.{}.{}.weight".format
    changes = {name(1, "input_layernorm"): outlier, name(2, "self_attn.k_proj"): rank_one}
    changes |= {name(1, f"self_attn.{p}_proj"): unused for p in "qkv"}
    one, figures = stream(planted_source(changes)), {}
    hidden = one.embed()
    for i in range(one.config.num_layers):
        found, hidden = sensitivity.scan_layer(one, i, hidden, 64)
        figures |= found
    attention = {f"model.layers.1.self_attn.{p}_proj" for p in "qkv"}
    for metric, planted in (
        ("kl", attention),
        ("dispersion", attention),
        ("energy", {"model.layers.2.self_attn.k_proj"}),
    ):
        by_size = sorted(figures, key=lambda n: -figures[n][metric])
        assert set(by_size[: len(planted)]) == planted
        least, next_one = (figures[by_size[len(planted) + i]][metric] for i in (-1, 0))
        assert least > 1.5 * next_one
    thresholds = {"kl": 1e9, "dispersion": 1e9, "energy": 0.42}
    because = threshold_search.reasons(figures, thresholds)
    assert {n: why for n, why in because.items() if why} == {
        "model.layers.2.self_attn.k_proj": ["energy"]
    }


@torch.inference_mode()
def test_weights_of_one_layer_are_alive_and_each_is_read_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    reads: list[str] = []
    source = open_safetensors(tiny(NAME).folder)
    recorded = Source(
        source.where, source.shapes, lambda name: (reads.append(name), source.read(name))[1]
    )
    alive: list[weakref.ref[Any]] = []
    load = weights.load_layer

    def watched(*args: Any, **kwargs: Any) -> Any:
        assert not [ref for ref in alive if ref() is not None], "a layer before is still held"
        layer = load(*args, **kwargs)
        values = [getattr(v, "weight", v) for v in vars(layer).values() if v is not None]
        alive[:] = [weakref.ref(v) for v in values]
        return layer

    monkeypatch.setattr(weights, "load_layer", watched)
    one, keep = stream(recorded), sensitivity.Partial(tmp_path / "p", {})
    state = sensitivity.scan(one, 64, keep, None, lambda done: None)
    assert not [ref for ref in alive if ref() is not None]
    assert reads[0] == "model.embed_tokens.weight"
    assert len(reads) == len(set(reads))
    numbers = [int(name.split(".")[2]) for name in reads[1:]]
    assert numbers == sorted(numbers)
    assert set(numbers) == set(range(one.config.num_layers))
    reads.clear()
    # The search holds all choices at once and reads each weight once, too.
    sensitivity.search(one, state.figures, 0.2, {}, keep, state, lambda done: None)
    assert sum(name.startswith("model.layers.") for name in reads) == len(
        {name for name in reads if name.startswith("model.layers.")}
    )


# ---- thresholds --------------------------------------------------------------------------------


def figures_of(n: int, seed: int = 0) -> dict[str, dict[str, float]]:
    rows = torch.rand(n, 3, generator=torch.Generator().manual_seed(seed)).tolist()
    metrics = threshold_search.METRICS
    return {f"layer.{i}": dict(zip(metrics, row, strict=True)) for i, row in enumerate(rows)}


def test_flags_are_strictly_above() -> None:
    figures = {
        "at": {"kl": 0.02, "dispersion": 15.0, "energy": 0.42},
        "kl": {"kl": 0.0201, "dispersion": 1.0, "energy": 0.1},
        "two": {"kl": 0.0, "dispersion": 15.1, "energy": 0.43},
    }
    found = threshold_search.reasons(figures, threshold_search.DEFAULTS)
    assert found == {"at": [], "kl": ["kl"], "two": ["dispersion", "energy"]}
    assert threshold_search.flagged(figures, threshold_search.DEFAULTS) == {"kl", "two"}


@pytest.mark.parametrize(("n", "count"), [(50, 5), (210, 19), (7, 1), (7, 7)])
def test_divisions_flag_about_as_many_as_asked(n: int, count: int) -> None:
    figures = figures_of(n)
    found = threshold_search.divisions(figures, count)
    sets = [threshold_search.flagged(figures, thresholds) for thresholds in found]
    assert len(set(sets)) == len(sets) <= 15
    assert all(abs(len(names) - count) <= 2 for names in sets)
    if count < n:
        for metric in threshold_search.METRICS:  # each figure alone is one of the choices
            largest = sorted(figures, key=lambda name: -figures[name][metric])
            assert frozenset(largest[:count]) in sets
    same = {name: dict.fromkeys(threshold_search.METRICS, 1.0) for name in figures}
    assert all(  # figures that are all alike cannot be divided
        len(threshold_search.flagged(same, t)) in (0, n)
        for t in threshold_search.divisions(same, count)
    )


@torch.inference_mode()
def test_choices_are_networks_with_some_layers_in_int8() -> None:
    """Against a network whose modules were replaced one by one."""
    one, hf = stream(), tiny(NAME).hf
    config = one.config
    of_layers = [layer_stream.parts(config, i) for i in range(config.num_layers)]
    names = [part.name for of_layer in of_layers for part in of_layer]
    assert [name.rpartition(".")[2] for name in names[:7]] == list(PROJECTIONS)
    high = frozenset({names[0], names[6], names[9], *names[14:]})
    choices = [None, frozenset[str](), high, frozenset(names)]
    states = [one.embed()] * len(choices)
    for i in range(one.config.num_layers):
        states = threshold_search.run_choices(one, i, states, choices)
    plain, low, some, every = one.perplexities(states)
    assert plain == pytest.approx(every, rel=1e-6)

    def logits(left_alone: frozenset[str]) -> torch.Tensor:
        kept = {}
        for name in set(names) - left_alone:
            module = hf.get_submodule(name)
            kept[name] = module.forward
            module.forward = functools.partial(
                lambda x, w: plain_w8a8(x[0], w).float()[None], w=module.weight
            )
        try:
            return hf(torch.tensor([ids(90)])).logits[0]
        finally:
            for name in kept:
                del hf.get_submodule(name).forward

    for found, left_alone in ((low, frozenset[str]()), (some, high)):
        loss = torch.nn.functional.cross_entropy(logits(left_alone)[:-1], torch.tensor(ids(90)[1:]))
        # One code more or less in a deep layer moves all that follows a little.
        assert math.log(found) == pytest.approx(float(loss), rel=2e-3)
        assert abs(found - plain) > 5e-4


# ---- the command -------------------------------------------------------------------------------


@pytest.fixture
def argv(tmp_path: Path) -> list[str]:
    folder, text = make_folder(tmp_path / "m", None, NAME), tmp_path / "t.txt"
    text.write_text(TEXT)
    out = tmp_path / "s.json"
    return ["--model", str(folder), "--text", str(text), "--tokens", "150", "--out", str(out)]


SEARCH = ["--target-share", "0.2", "--held-out", "60"]


def test_command(tmp_path: Path, argv: list[str], capsys: Any) -> None:
    pytest.importorskip("matplotlib")
    out, picture = tmp_path / "s.json", tmp_path / "p.png"
    assert sensitivity.main([*argv, "--kl", "0.005", "--picture", str(picture)]) == 0
    words = capsys.readouterr().out
    found = json.loads(out.read_text())
    assert (found["format"], found["version"]) == ("tkernels.sensitive_layers", 1)
    assert (found["model"], found["prompts"]["tokens"]) == ("m", 150)
    assert found["thresholds"] == {"kl": 0.005, "dispersion": 15.0, "energy": 0.42}
    names = {
        f"model.layers.{i}.{'self_attn' if p[0] in 'qkvo' else 'mlp'}.{p}"
        for i in range(3)
        for p in PROJECTIONS
    }
    assert set(found["layers"]) == names
    for layer in found["layers"].values():
        above = [m for m, most in found["thresholds"].items() if layer[m] > most]
        assert (layer["because"], layer["sensitive"]) == (above, bool(above))
    sensitive = sum(layer["sensitive"] for layer in found["layers"].values())
    assert f"{sensitive} of 21 linear layers are sensitive" in words
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert not list(tmp_path.glob("*.partial")) + list(tmp_path.glob(".*"))


def test_command_searches(tmp_path: Path, argv: list[str], capsys: Any, monkeypatch: Any) -> None:
    assert sensitivity.main([*argv, *SEARCH, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    found = json.loads((tmp_path / "s.json").read_text())
    searched = found["search"]
    assert printed["search"] == searched
    assert printed["sensitive"] == searched["found"]["flagged"]
    assert abs(printed["sensitive"] - 4) <= 2
    assert searched["found"]["rise"] == min(row["rise"] for row in searched["tried"])
    assert found["thresholds"] == searched["found"]["thresholds"]
    assert (searched["held_out"]["tokens"], searched["met"]) == (60, True)
    monkeypatch.setattr(threshold_search, "MOST_RISE", -1.0)  # no choice can do that
    assert sensitivity.main([*argv, *SEARCH]) == 1
    assert "no choice of 20.0% keeps the rise below" in capsys.readouterr().out
    assert not json.loads((tmp_path / "s.json").read_text())["search"]["met"]


@pytest.mark.parametrize(("function", "call"), [("load", 2), ("load", 5), ("perplexities", 1)])
def test_interrupted_run_goes_on(
    function: str, call: int, tmp_path: Path, argv: list[str], capsys: Any, monkeypatch: Any
) -> None:
    """In the scan, in the search and at its end: the same file as in one go, no layer twice."""
    out = tmp_path / "s.json"
    assert sensitivity.main([*argv, *SEARCH]) == 0
    expected = out.read_bytes()
    out.unlink()
    calls: list[Any] = []
    plain = getattr(layer_stream.LayerStream, function)

    def stop(self: Any, *args: Any) -> Any:
        calls.append(args)
        if len(calls) == call:
            raise KeyboardInterrupt
        return plain(self, *args)

    monkeypatch.setattr(layer_stream.LayerStream, function, stop)
    assert sensitivity.main([*argv, *SEARCH]) == 130
    assert f"{out}.partial keeps what was found" in capsys.readouterr().err
    assert not out.exists()
    assert not list(tmp_path.glob(".*"))
    assert sensitivity.main([*argv, *SEARCH]) == 0
    assert "goes on after" in capsys.readouterr().err
    assert out.read_bytes() == expected
    assert not list(tmp_path.glob("*.partial"))
    if function == "load":  # 3 layers of the scan, 3 of the search, and the interrupted one
        assert len(calls) == 7


def test_nothing_is_left_of_a_run_that_found_nothing(
    tmp_path: Path, argv: list[str], capsys: Any, monkeypatch: Any
) -> None:
    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(layer_stream.LayerStream, "embed", stop)
    assert sensitivity.main(argv) == 130
    assert "nothing was written" in capsys.readouterr().err
    assert not list(tmp_path.glob("s.json*"))


def test_partial_results_of_another_run_are_refused(
    tmp_path: Path, argv: list[str], capsys: Any, monkeypatch: Any
) -> None:
    plain = layer_stream.LayerStream.load

    def stop(self: Any, index: int) -> Any:
        if index == 1:
            raise KeyboardInterrupt
        return plain(self, index)

    monkeypatch.setattr(layer_stream.LayerStream, "load", stop)
    assert sensitivity.main(argv) == 130
    monkeypatch.undo()
    partial = tmp_path / "s.json.partial"
    kept = partial.read_bytes()
    for more, what in ((["--bins", "32"], "--bins"), (["--tokens", "140"], "text and --tokens")):
        assert sensitivity.main([*argv, *more]) == 2
        assert f"with the same {what}, got those of another run" in capsys.readouterr().err
    (tmp_path / "m" / "generation_config.json").write_text("{}")
    assert sensitivity.main(argv) == 2
    assert "with the same model" in capsys.readouterr().err
    assert partial.read_bytes() == kept
    partial.write_bytes(kept[:100])
    assert sensitivity.main(argv) == 2
    assert "got a damaged file" in capsys.readouterr().err


def test_an_interrupted_write_leaves_what_was_there(tmp_path: Path, monkeypatch: Any) -> None:
    keep = sensitivity.Partial(tmp_path / "p", {"a": 1})
    keep.save(sensitivity.State({"x": {"kl": 0.5}}, 1, [torch.ones(2)]))

    def half(tensors: Any, path: Path, metadata: Any) -> None:
        path.write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr("safetensors.torch.save_file", half)
    with pytest.raises(KeyboardInterrupt):
        keep.save(sensitivity.State({}, 2, [torch.zeros(2)]))
    found = keep.load(CPU)
    assert found is not None
    assert (found.figures, found.done, found.hidden[0].tolist()) == ({"x": {"kl": 0.5}}, 1, [1, 1])
    assert [path.name for path in tmp_path.iterdir()] == ["p"]


def test_a_file_that_cannot_be_written(argv: list[str], capsys: Any, monkeypatch: Any) -> None:
    def full(*_: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(sensitivity.os, "replace", full)
    assert sensitivity.main(argv) == 2
    assert "expected a file that can be written, got no space left" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--tokens", "1"], "--tokens must be at least 2, got 1"),
        (["--bins", "1"], "--bins must be at least 2, got 1"),
        (["--kl", "nan"], "--kl must be a number of at least 0, got nan"),
        (["--energy", "-1"], "--energy must be a number of at least 0"),
        (["--target-share", "1"], "--target-share must be above 0 and below 1"),
        ([*SEARCH, "--dispersion", "3"], "or --dispersion, got both"),
        (["--target-share", "0.1"], "expected 2048 tokens of held-out text, got 200"),
        (["--held-out-text", "x"], "--held-out-text has no use without --target-share"),
        ([*SEARCH, "--held-out-text", "/none"], "--held-out-text /none: expected a text file"),
        (["--picture", "p.xyz"], "--picture must end in .png"),
        (["--out", "/"], "--out must be a file in a folder"),
        (["--model", "/none"], "/none: expected a folder or a .gguf file"),
        (["--text", "/none"], "--text /none: expected a text file"),
    ],
)
def test_wrong_options(more: list[str], words: str, argv: list[str], capsys: Any) -> None:
    assert sensitivity.main([*argv, *more]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1


def test_unknown_option_and_help(argv: list[str], capsys: Any) -> None:
    with pytest.raises(SystemExit) as stopped:
        sensitivity.main([*argv, "--target", "0.1", "--threshold", "2"])
    assert stopped.value.code == 2
    assert "unrecognized arguments" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        sensitivity.main(["--help"])
    assert "python -m model.sensitivity --out sensitive_layers.json" in capsys.readouterr().out


def test_activations_that_are_not_finite(tmp_path: Path) -> None:
    name = "model.layers.1.post_attention_layernorm.weight"
    one = stream(planted_source({name: lambda norm: norm * 1e38}))
    keep = sensitivity.Partial(tmp_path / "p", {})
    with torch.inference_mode(), pytest.raises(ValueError, match=r"layers\.1\.mlp.*finite"):
        sensitivity.scan(one, 64, keep, None, lambda done: None)
    assert keep.load(CPU) is not None  # layer 0 is kept


@pytest.mark.model
def test_layers_of_a_gguf_file() -> None:
    checkpoint = open_checkpoint(smollm2())
    one = layer_stream.LayerStream(
        checkpoint.config,
        checkpoint.source,
        tkernels.reference,
        list(range(100, 164)),
        dtype=torch.float32,
        device=CPU,
    )
    with torch.inference_mode():
        found, _ = sensitivity.scan_layer(one, 0, one.embed(), 64)
    w = checkpoint.source.read("model.layers.0.self_attn.k_proj.weight")
    sigma = torch.linalg.svdvals(w.double())
    energy = found["model.layers.0.self_attn.k_proj"]["energy"]
    assert energy == pytest.approx(float(sigma[0] / sigma.sum()), rel=1e-6)
    assert all(0 < row["kl"] < 1 for row in found.values())
