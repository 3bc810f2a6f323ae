"""The runner over a quantised KV cache: calibration, modes, chunks, slots that come back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import CPU, make_folder, tiny

import tkernels
from model import calibrate_kv, generate, kv_quality, kv_quant, perplexity
from model.kv_cache import SequenceState, allocate_cache
from model.kv_quant import KVQuantization, choose
from model.perplexity import divergence, logits_of
from model.runner import Runner
from tkernels import device
from tkernels.kv_format import MODES, NO_SLOT

NAME = "qwen3-heads-of-32"
OPS = tkernels.reference
QUANTISED = MODES[1:]


def ids(n: int, seed: int = 0) -> list[int]:
    return torch.randint(0, 331, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.fixture(scope="module")
def calibration(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("kv") / "scales.safetensors"
    tensors, _ = calibrate_kv.calibrate(tiny(NAME).ours, OPS, ids(200, 1))
    kv_quant.save(path, tensors, share=0.04, tokens=200)
    return path


def chosen(mode: str, calibration: Path, tau: float | None = None) -> KVQuantization:
    path = None if mode == "int8" or (tau is not None and mode == "int8_fp4") else calibration
    found = choose(mode, path, tau, tiny(NAME).ours.config)
    assert found is not None
    return found


def runner(
    quantization: KVQuantization | None, chunk: int = 1000, blocks: int = 16, ops: Any = OPS
) -> Runner:
    return Runner(
        tiny(NAME).ours,
        ops,
        num_blocks=blocks,
        max_positions=256,
        prefill_chunk=chunk,
        quantization=quantization,
    )


# ---- results -----------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", QUANTISED)
def test_chunks_and_steps_do_not_change_results(mode: str, calibration: Path) -> None:
    """Attention reads what was stored, of new tokens too."""
    quantization, tokens = chosen(mode, calibration), ids(70)
    whole = runner(quantization).prefill([SequenceState(list(tokens))], all_logits=True)
    exact = runner(None).prefill([SequenceState(list(tokens))], all_logits=True)
    # A number on the edge of two codes takes the other one where it was computed in other pieces,
    # which moved logits by 2e-4 on one processor; what is quantised at all moves each row by more.
    most = 2e-3
    assert float((whole - exact)[1:].abs().amax(-1).min()) > 3 * most
    pieces = runner(quantization, chunk=17).prefill([SequenceState(list(tokens))], all_logits=True)
    torch.testing.assert_close(pieces, whole, atol=most, rtol=0)
    one, sequence = runner(quantization), SequenceState(tokens[:60])
    steps = [one.prefill([sequence])]
    for token in tokens[60:]:
        sequence.token_ids.append(token)
        steps.append(one.decode([sequence]))
    torch.testing.assert_close(torch.cat(steps), whole[59:], atol=most, rtol=0)


def test_more_is_kept_by_better_modes(calibration: Path) -> None:
    """KL to the unquantised model: residuals of outliers help, residuals of all tokens most."""
    model, tokens = tiny(NAME).ours, ids(200, 2)
    truth, _ = logits_of(model, OPS, tokens)

    def kl(mode: str, tau: float | None = None) -> float:
        logits, cache = logits_of(model, OPS, tokens, chosen(mode, calibration, tau))
        assert cache.statistics()["mode"] == mode
        return divergence(logits, truth)[0]

    assert divergence(truth, truth) == (0.0, 1.0)
    for pair in (("int8", "int8_fp4"), ("int8_static", "int8_static_fp4")):
        plain, residuals = map(kl, pair)
        assert 0 < residuals < plain < 0.05


@pytest.mark.parametrize("mode", QUANTISED)
def test_bytes_are_those_of_the_allocator(mode: str, calibration: Path) -> None:
    config, quantization = tiny(NAME).ours.config, chosen(mode, calibration)
    cache = allocate_cache(config, 64, torch.float32, CPU, quantization)
    storages = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
        for part in cache.quantized
        for t in part.tensors().values()
    }
    found = cache.statistics()
    assert found["bytes"] == sum(storages.values())
    assert found["bytes_per_token"] == found["bytes"] / (64 * 16)
    heads = 2 * config.num_layers * config.num_kv_heads
    assert found["bytes_per_token"] < heads * 2 * config.head_dim * 0.75  # small heads, fp32 scales


def test_released_sequences_leave_no_slot_behind(calibration: Path) -> None:
    one = runner(chosen("int8_fp4", calibration, tau=0.007), blocks=8)
    pools = one.cache.quantized
    full = [part.free_count.tolist() for part in pools if part.free_count is not None]
    for seed in range(3):
        sequence = SequenceState(ids(100, seed))
        one.prefill([sequence])
        assert one.cache.statistics()["residuals"] > 0
        one.release(sequence)
        assert one.cache.statistics()["residuals"] == 0
        assert [p.free_count.tolist() for p in pools if p.free_count is not None] == full
        assert all((p.slots == NO_SLOT).all() for p in pools if p.slots is not None)


@pytest.mark.parametrize("mode", [pytest.param("int8", marks=pytest.mark.slow), "int8_fp4"])
@pytest.mark.skipif(device.KIND != "cpu", reason="the tiny model lies on the CPU")
def test_kernels_and_their_references_agree(mode: str, calibration: Path) -> None:
    """Chunks, steps, and a second sequence in the pages that the first one gave back."""
    device.require_triton()
    quantization = chosen(mode, calibration, tau=0.006 if mode == "int8_fp4" else None)
    first, second, found = ids(18, 5), ids(17, 6), []
    for ops in (tkernels, OPS):
        one = runner(quantization, chunk=12, blocks=2, ops=ops)
        full = [part.free_count.tolist() for part in one.cache.quantized if part.has_residual]
        logits = []
        for tokens in (first, second):
            sequence = SequenceState(tokens[:-1])
            logits.append(one.prefill([sequence], all_logits=True))
            for token in tokens[-1:]:
                sequence.token_ids.append(token)
                logits.append(one.decode([sequence]))
            assert sorted(sequence.block_ids) == [0, 1]
            assert (one.cache.statistics()["residuals"] > 0) == (mode == "int8_fp4")
            one.release(sequence)
            assert sequence.block_ids == []
            assert one.cache.statistics()["residuals"] == 0
            assert [
                part.free_count.tolist() for part in one.cache.quantized if part.has_residual
            ] == full
        found.append(torch.cat(logits))
    # As in test_chunks_and_steps_do_not_change_results: a code may be another one.
    most = 2e-3
    exact = runner(None).prefill([SequenceState(list(first))], all_logits=True)
    assert float((found[1][: len(first)] - exact)[1:].abs().amax(-1).min()) > 3 * most
    torch.testing.assert_close(found[0], found[1], atol=most, rtol=0)


@pytest.mark.parametrize("batch", [1, 2])
def test_residuals_of_sequences_that_ended_are_told(
    batch: int, tmp_path: Path, capsys: Any
) -> None:
    """Every token is an outlier; few all find room, and leave it when their sequence ends."""
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("abc\nabcdefg\n")
    argv = ["--model", str(make_folder(tmp_path / "m", None, NAME)), "--prompts", str(prompts)]
    argv += ["--max-tokens", "3", "--ignore-eos", "--batch-size", str(batch)]
    argv += ["--kv-cache", "int8_fp4", "--kv-tau", "0"]
    assert generate.main([*argv, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    config, tokens = tiny(NAME).ours.config, [r["prompt_tokens"] for r in found["replies"]]
    kept = sum(n + 2 for n in tokens)  # of three new tokens the last is in no cache
    kept *= 2 * config.num_layers * config.num_kv_heads
    assert found["stats"]["kv_cache"]["residuals"] == kept
    assert found["stats"]["kv_cache"]["residuals_dropped"] == 0
    assert generate.main(argv) == 0
    assert f" bytes a token, residuals of {kept} vectors kept" in capsys.readouterr().err


def test_a_full_pool_is_told(calibration: Path, capsys: Any) -> None:
    one = runner(chosen("int8_fp4", calibration, tau=0.0))  # every token is an outlier
    one.prefill([SequenceState(ids(100))])
    found = one.cache.statistics()
    assert found["residuals"] > 0
    assert found["residuals_dropped"] > found["residuals"]
    words = generate._kv_summary(found)
    assert f"{found['residuals_dropped']} residuals left out" in words


# ---- calibration -------------------------------------------------------------------------------


def test_calibration_is_what_the_cache_will_see() -> None:
    """Scales are the largest magnitudes / 127; the asked share of errors lies above each tau."""
    model = tiny(NAME).ours
    tokens, seen = ids(200, 1), {"k": [], "v": []}  # type: dict[str, list[torch.Tensor]]
    tap = calibrate_kv.Tap(
        OPS, model.config.num_layers, lambda i, k, v: (seen["k"].append(k), seen["v"].append(v))
    )
    logits_of(model, tap, tokens)
    for share in (0.04, 0.2):
        tensors, errors = calibrate_kv.calibrate(model, OPS, tokens, share=share)
        assert {n: tuple(t.shape) for n, t in tensors.items()} == kv_quant.shapes(model.config)
        for x in "kv":
            largest = torch.stack([layer.abs().amax(0) for layer in seen[x]])
            torch.testing.assert_close(tensors[f"{x}_scale"] * 127, largest)
            for end in ("", "_static"):
                above = errors[x + end] > tensors[f"{x}_tau{end}"][:, None]
                assert above.float().mean(1).max() <= share + 0.005
                assert above.float().mean(1).min() >= share - 0.005


def test_calibration_command(tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    pytest.importorskip("matplotlib")
    folder, out, picture = make_folder(tmp_path / "m", None, NAME), tmp_path / "s", tmp_path / "p"
    text = tmp_path / "t.txt"
    text.write_text("letters that are their own tokens " * 6)
    argv = ["--model", str(folder), "--text", str(text), "--tokens", "150", "--out", str(out)]
    assert calibrate_kv.main([*argv, "--picture", f"{picture}.png", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["tokens"], found["share"]) == (150, 0.04)
    assert picture.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert set(kv_quant.load(out, tiny(NAME).ours.config)) == set(
        kv_quant.shapes(tiny(NAME).ours.config)
    )
    assert calibrate_kv.main(argv) == 0
    assert "4.0% of them outliers" in capsys.readouterr().out
    for more, words in (
        (["--picture", f"{tmp_path}/p.xyz"], "--picture must end in .png"),
        (["--out", str(tmp_path)], "--out must be a file in a folder"),
        (["--share", "1"], "--share must be above 0 and below 1"),
    ):
        assert calibrate_kv.main([*argv, *more]) == 2
        assert words in capsys.readouterr().err

    def stop(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    out.unlink()
    monkeypatch.setattr(calibrate_kv, "calibrate", stop)
    assert calibrate_kv.main(argv) == 130
    assert not out.exists()


# ---- commands ----------------------------------------------------------------------------------


def test_commands_over_a_quantised_cache(tmp_path: Path, calibration: Path, capsys: Any) -> None:
    folder = make_folder(tmp_path / "m", None, NAME)
    common = ["--model", str(folder), "--json", "--kv-cache"]
    scales = ["--kv-scales", str(calibration)]
    for more in (["int8"], ["int8_fp4"], ["int8_static_fp4", *scales]):
        assert generate.main([*common, *more, "--prompt", "abc", "--max-tokens", "4"]) == 0
        assert json.loads(capsys.readouterr().out)["stats"]["kv_cache"]["mode"] == more[0]
        text = tmp_path / "t.txt"
        text.write_text("some words to predict")
        assert perplexity.main([*common, *more, "--text", str(text)]) == 0
        found = json.loads(capsys.readouterr().out)
        assert 0 < found["kl"] < 0.1
        assert perplexity.main([*common[:2], *common[3:], *more, "--text", str(text)]) == 0
        assert "left out (pool full)" in capsys.readouterr().out
        assert found["perplexity"] == pytest.approx(found["unquantized_perplexity"], rel=0.1)


def test_a_head_dim_without_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match=r"head_dim divides by 32, got 20"):
        choose("int8_fp4", None, None, tiny("qwen3").ours.config)


@pytest.mark.parametrize(
    ("mode", "scales", "tau", "words"),
    [
        ("fp8", False, None, "must be one of none, int8,.* got 'fp8'"),
        ("int8_static", False, None, "needs --kv-scales FILE"),
        ("none", True, None, "--kv-scales has no use with --kv-cache none"),
        ("int8", True, None, "--kv-scales has no use with --kv-cache int8,"),
        ("int8_static", True, 0.1, "--kv-tau has no use with --kv-cache int8_static"),
        ("int8_fp4", True, 0.1, "expected one of --kv-scales and --kv-tau"),
        ("int8_fp4", False, 1.5, "--kv-tau must be from 0 to below 1, got 1.5"),
    ],
)
def test_refusals(
    mode: str, scales: bool, tau: float | None, words: str, calibration: Path
) -> None:
    with pytest.raises(ValueError, match=words):
        choose(mode, calibration if scales else None, tau, tiny(NAME).ours.config)


def test_files_that_are_no_calibration_of_this_model(tmp_path: Path, calibration: Path) -> None:
    from safetensors.torch import save_file

    config, other = tiny(NAME).ours.config, tiny("qwen3").ours.config
    with pytest.raises(ValueError, match=r"k_scale of shape \[3, 2, 20\] for this model, got"):
        kv_quant.load(calibration, other)
    with pytest.raises(ValueError, match="expected a safetensors file, got"):
        kv_quant.load(tmp_path / "absent", config)
    for name, value in (("k_tau", float("nan")), ("v_scale", 0.0)):
        spoilt = kv_quant.load(calibration, config)
        spoilt[name][0, 0] = value
        kv_quant.save(tmp_path / "spoilt", spoilt, share=0.04, tokens=1)
        with pytest.raises(ValueError, match=f"expected finite numbers above 0 in {name}"):
            kv_quant.load(tmp_path / "spoilt", config)
    save_file({"a": torch.zeros(1)}, tmp_path / "plain")
    with pytest.raises(ValueError, match="expected format tkernels-kv-scales-1, got None"):
        kv_quant.load(tmp_path / "plain", config)


def test_quality_table(tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    """Residuals lower attention's error, and by far where few tokens have outlier channels."""
    monkeypatch.setattr(kv_quality, "CALIBRATION", 128)
    folder, text = make_folder(tmp_path / "m", None, NAME), tmp_path / "t.txt"
    letters = "".join("z" if i % 40 == 7 else chr(97 + i % 20) for i in range(300))
    text.write_text(letters)
    argv = ["--model", str(folder), "--text", str(text), "--contexts", "100", "--json"]
    errors = []
    for planted in ([], ["--planted"]):
        assert kv_quality.main([*argv, *planted]) == 0
        rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert [row["mode"] for row in rows] == list(MODES)
        errors.append({row["mode"]: row.get("attention_error") for row in rows})
    for by_mode in errors:
        assert by_mode["int8_fp4"] < by_mode["int8"]
        assert by_mode["int8_static_fp4"] < by_mode["int8_static"]
    plain, planted_errors = errors
    assert planted_errors["int8"] > 1.3 * plain["int8"]
    assert planted_errors["int8_fp4"] < 0.8 * planted_errors["int8"]
    assert kv_quality.main([*argv, "--contexts", "0"]) == 2
