"""Dynamic fallback: the one request that goes bad leaves int8, alone; and what is calibrated."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import load_folder, make_folder
from safetensors import safe_open

import tkernels
from model import calibrate_watch, cpu_ops, fallback, generate, quantize
from model.fallback import Calibration
from model.kv_cache import SequenceState
from model.qwen3 import Model
from model.runner import Runner

NAME = "llama-32"
BAD, FROM = 5, 100  # the request, and the token from which it has outliers


class Fault:
    """Operations in which a decode step's row of one request has outliers."""

    def __init__(self, ops: Any, times: float, row: int = BAD) -> None:
        self._ops, self._times, self._row, self.on = ops, times, row, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def silu_and_mul(self, x: torch.Tensor, **more: Any) -> torch.Tensor:
        y: torch.Tensor = self._ops.silu_and_mul(x, **more)
        if self.on:
            y[self._row, ::16] *= self._times
        return y


def random_ids(count: int, seed: int = 0) -> list[int]:
    return torch.randint(0, 331, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random checkpoint in w8a8."""
    base = make_folder(tmp_path_factory.mktemp("base") / "m", None, NAME)
    out = tmp_path_factory.mktemp("w8a8") / "m"
    argv = ["--model", str(base), "--scheme", "w8a8", "--out", str(out), "--json"]
    assert quantize.main(argv) == 0
    return out


@pytest.fixture(scope="module")
def network(folder: Path) -> Model:
    return load_folder(folder)


@pytest.fixture(scope="module")
def calibration(network: Model) -> Calibration:
    """Of random tokens; with so few channels windows differ more than 0.02 from one another."""
    ids = random_ids(256, 1)
    made = calibrate_watch.calibrate(network, cpu_ops, ids, (0, 2))
    most = calibrate_watch.windows(network, cpu_ops, ids, made).abs().amax((1, 2)).tolist()
    return dataclasses.replace(made, kl_above=2 * most[0], skewness_above=2 * most[1])


@dataclasses.dataclass
class Run:
    """Logits of each decode step, [8, V]; reports and the mask at the end."""

    logits: list[torch.Tensor]
    reports: list[dict[str, Any] | None]
    mask: int
    set_at: int | None  # the token whose step set the mask


def replay(
    model: Model,
    calibration: Calibration | None,
    *,
    times: float = 0.0,
    tokens: int = 170,
    ops: Any = cpu_ops,
) -> Run:
    """Eight requests with given tokens: a prompt of 20, then one by one."""
    texts = [random_ids(tokens, 100 + i) for i in range(8)]
    faulty = Fault(ops, times)
    runner = Runner(
        model, faulty, num_blocks=8 * 11, max_positions=tokens, fallback=calibration, num_groups=8
    )
    sequences = [SequenceState(text[:20]) for text in texts]
    runner.prefill(sequences)
    logits, set_at = [], None
    for token in range(20, tokens):
        faulty.on = bool(times) and token >= FROM
        for s, text in zip(sequences, texts, strict=True):
            s.token_ids.append(text[token])
        logits.append(runner.decode(sequences))
        if runner.watch is not None and set_at is None and int(runner.watch.mask):
            set_at = token
    if runner.watch is None:
        return Run(logits, [], 0, None)
    reports = [runner.watch.report(s) for s in sequences]
    return Run(logits, reports, int(runner.watch.mask), set_at)


def test_only_the_faulty_request_falls_back(network: Model, calibration: Calibration) -> None:
    """Within 64 tokens; the logits of the other seven are bit for bit those without the fault."""
    whole = replay(network, calibration)
    assert whole.mask == 0
    assert whole.reports == [None] * 8
    faulty = replay(network, calibration, times=40.0)
    assert faulty.mask == 1 << BAD
    assert faulty.set_at is not None
    assert FROM <= faulty.set_at < FROM + 64
    found = faulty.reports[BAD]
    assert found is not None
    assert found["token"] == faulty.set_at + 1
    assert found["layer"] in (0, 2)
    others = [i for i in range(8) if i != BAD]
    assert [faulty.reports[i] for i in others] == [None] * 7
    for a, b in zip(whole.logits, faulty.logits, strict=True):
        assert torch.equal(a[others], b[others])
    assert not torch.equal(whole.logits[-1][BAD], faulty.logits[-1][BAD])
    # From the next step on it is in 16 bits: as the same run is without the watch, up to there.
    unwatched = replay(network, None, times=40.0)
    same = [
        torch.equal(a[BAD], b[BAD]) for a, b in zip(faulty.logits, unwatched.logits, strict=True)
    ]
    assert same == [True] * (faulty.set_at + 1 - 20) + [False] * (170 - faulty.set_at - 1)


def test_watching_changes_no_logits(network: Model, calibration: Calibration) -> None:
    watched = replay(network, calibration, tokens=40)
    plain = replay(network, None, tokens=40)
    for a, b in zip(watched.logits, plain.logits, strict=True):
        assert torch.equal(a, b)


def test_off_by_default(network: Model) -> None:
    """No state, and the very operations that were given."""
    runner = Runner(network, cpu_ops, num_blocks=4, max_positions=64)
    assert runner.watch is None
    seen = []

    class Spy:
        def __getattr__(self, name: str) -> Any:
            seen.append(name)
            return getattr(cpu_ops, name)

    runner.ops = Spy()
    runner.prefill([SequenceState([1, 2, 3])])
    assert "watch_activations" not in seen
    assert "masked_gemm" in seen


def test_a_new_request_in_the_slot_starts_clean(network: Model, calibration: Calibration) -> None:
    runner = Runner(
        network, cpu_ops, num_blocks=8, max_positions=64, fallback=calibration, num_groups=1
    )
    watch = runner.watch
    assert watch is not None
    first, second = SequenceState([1, 2, 3]), SequenceState([4, 5, 6, 7])
    runner.prefill([first])
    for state in (watch.histogram, watch.moments, watch.counters):
        state.fill_(3)
    watch.mask.fill_(1)
    with pytest.raises(ValueError, match="at most 1 requests at a time, got another"):
        runner.prefill([second])
    runner.release(first)
    assert first.group == -1
    runner.prefill([second])
    assert second.group == 0
    assert watch.mask.tolist() == [0]
    assert watch.counters[:, 0].tolist() == [[4, 4, 0, 0]] * 2
    assert watch.histogram.sum((1, 2)).tolist() == [4 * 160] * 2
    assert not watch.moments[..., 3:].any()


@pytest.mark.parametrize("slot", [0, 63, 64, 69])
def test_reset_clears_one_bit(network: Model, calibration: Calibration, slot: int) -> None:
    watch = fallback.Watch(calibration, network, 70, network.norm.device)
    watch.mask.fill_(-1)
    watch.reset(slot)
    bits = [(word >> bit) & 1 for word in watch.mask.tolist() for bit in range(64)]
    assert [i for i, bit in enumerate(bits) if not bit] == [slot]


def test_long_prompts_are_sampled(network: Model, calibration: Calibration) -> None:
    watch = fallback.Watch(calibration, network, 2, network.norm.device)
    one, other = SequenceState([1] * 600, group=1), SequenceState([1] * 5, group=0)
    step = watch.step(cpu_ops, watch.marks([one, other], [600, 5]))
    rows = step._rows.tolist()
    assert rows[:600] == [1, -1, -1] * 200  # of three tokens one
    assert rows[600:] == [0] * 5
    assert step._row_group.tolist() == [1] * 600 + [0] * 5


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_falls_back_at_once(
    network: Model, calibration: Calibration, value: float
) -> None:
    run = replay(network, calibration, times=value, tokens=FROM + 2)
    assert run.set_at == FROM
    assert run.mask == 1 << BAD
    assert run.reports[BAD] == {"token": FROM + 1, "reason": "not finite", "layer": 0}


# ---- command lines -------------------------------------------------------------------------------


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("".join(chr(97 + i % 26) for i in random_ids(700)), encoding="utf-8")
    return path


def test_calibrate_then_generate(
    folder: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "watch.safetensors"
    argv = ["--model", str(folder), "--text", str(text), "--out", str(file), "--json"]
    argv += ["--tokens", "300", "--held-out", "128"]
    assert calibrate_watch.main([*argv, "--fit", "2"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["layers"] == [0, 1, 2]
    assert found["calibration"]["windows"] == 4
    assert found["calibration"]["alarms"] == 0
    assert found["kl_above"] == pytest.approx(max(0.02, 2 * found["calibration"]["kl"][2]))
    assert found["held_out"]["windows"] == 2
    with safe_open(file, framework="pt") as stored:
        assert json.loads(stored.metadata()["found"]) == found
    again = fallback.load(file, load_folder(folder).config)
    assert again.layers == (0, 1, 2)
    assert again.kl_above == found["kl_above"]
    assert torch.allclose(again.reference.sum(1), torch.ones(3))

    argv = ["--model", str(folder), "--prompt", "abcdefgh", "--max-tokens", "70", "--ignore-eos"]
    outputs = []
    for more in ([], ["--fallback", str(file)]):
        assert generate.main([*argv, *more, "--json"]) == 0
        outputs.append(json.loads(capsys.readouterr().out))
    assert "fallback" not in outputs[0]["stats"]
    watched = outputs[1]["stats"]["fallback"]
    assert watched["watched"] == 1
    if not watched["fell_back"]:
        assert outputs[0]["replies"] == outputs[1]["replies"]
    # The same with limits that any window exceeds: a verdict after 64 tokens, with its reason.
    with_limits = dataclasses.replace(again, kl_above=1e-9)
    with_limits.save(file, {})
    assert generate.main([*argv, "--fallback", str(file), "--json"]) == 0
    [one] = json.loads(capsys.readouterr().out)["stats"]["fallback"]["fell_back"]
    assert (one["prompt"], one["token"], one["layer"]) == (0, 64, 0)
    assert one["reason"].startswith("kl")
    assert one["kl"] > 0


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--layers", "0,9"], "--layers must be numbers from 0 to 2, got '0,9'"),
        (["--layers", "x"], "--layers must be numbers from 0 to 2, got 'x'"),
        (["--tokens", "63"], "--tokens must be at least 64, got 63"),
        (["--held-out", "100000"], "expected a text of 102048 tokens"),
        (["--kl", "0"], "--kl must be above 0, got 0.0"),
        (["--out", "nowhere/watch"], "--out must be a file in a folder that is there"),
    ],
)
def test_calibrate_refuses(
    folder: Path, text: Path, tmp_path: Path, argv: list[str], message: str, capsys: Any
) -> None:
    given = ["--model", str(folder), "--text", str(text), "--out", str(tmp_path / "w"), *argv]
    assert calibrate_watch.main(given) == 2
    assert message in capsys.readouterr().err


def test_generate_refuses(
    folder: Path, calibration: Calibration, tmp_path: Path, capsys: Any
) -> None:
    """What is no calibration, another model's, or of a checkpoint that has nothing in int8."""
    file = tmp_path / "watch"
    plain = make_folder(tmp_path / "plain", None, NAME)

    def error(model: Path = folder) -> str:
        argv = ["--model", str(model), "--prompt", "a", "--fallback", str(file)]
        assert generate.main(argv) == 2
        return str(capsys.readouterr().err)

    assert "expected a safetensors file, got" in error()
    dataclasses.replace(calibration, layers=(0, 3)).save(file, {})
    assert "expected layers of this model's 3, got [0, 3]" in error()
    dataclasses.replace(calibration, facts=calibration.facts[:1]).save(file, {})
    assert "expected facts in fp32 [2, 4], got torch.float32 [1, 4]" in error()
    dataclasses.replace(calibration, facts=calibration.facts * 0).save(file, {})
    assert "expected shares, scales and limits above 0, got 0.0" in error()
    dataclasses.replace(calibration, reference=calibration.reference / 0).save(file, {})
    assert "expected finite reference, got others" in error()
    calibration.save(file, {})
    assert f"expected layers in w8a8 for --fallback, got none in {plain}" in error(plain)


@pytest.mark.gpu
def test_only_the_faulty_request_falls_back_on_the_card(folder: Path, dev: torch.device) -> None:
    model = load_folder(folder, torch.bfloat16, dev)
    ids = random_ids(256, 1)
    made = calibrate_watch.calibrate(model, tkernels, ids, (0, 2))
    most = calibrate_watch.windows(model, tkernels, ids, made).abs().amax((1, 2)).tolist()
    made = dataclasses.replace(made, kl_above=2 * most[0], skewness_above=2 * most[1])
    whole = replay(model, made, ops=tkernels)
    faulty = replay(model, made, times=40.0, ops=tkernels)
    assert (whole.mask, faulty.mask) == (0, 1 << BAD)
    assert faulty.set_at is not None
    assert FROM <= faulty.set_at < FROM + 64
    others = [i for i in range(8) if i != BAD]
    for a, b in zip(whole.logits, faulty.logits, strict=True):
        assert torch.equal(a[others], b[others])
