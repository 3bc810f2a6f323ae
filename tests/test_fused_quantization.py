"""W8A8 layers multiply codes that the kernels before them make: the same bits, fewer launches."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from checkpoints import load_folder, make_folder

import tkernels
from model import quantize, qwen3
from model.calibrate_watch import _Tap
from model.fallback import BINS, Calibration
from model.kv_cache import SequenceState
from model.quantized_matrix import Int8Matrix, Part, Parts
from model.qwen3 import Linear, Model
from model.runner import Runner
from tkernels import device
from tkernels.offline import replaced_run

LAYERS = 2
# The projections of q, k and v but for those of the first layer, those of gate and up, and down.
FUSED = 3 * LAYERS - 1


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """Two random layers in w8a8."""
    base = make_folder(tmp_path_factory.mktemp("base") / "m", None, "llama-32")
    out = tmp_path_factory.mktemp("w8a8") / "m"
    argv = ["--model", str(base), "--scheme", "w8a8", "--out", str(out), "--json"]
    assert quantize.main(argv) == 0
    found = load_folder(out, torch.bfloat16, device.tensor_device())
    del found.layers[LAYERS:]
    return found


def run(
    model: Model, fused: bool, fallback: Calibration | None = None
) -> tuple[torch.Tensor, Counter[str], Runner]:
    """Logits of a prefill of two prompts and a decode step, and the launches of that step.

    With a fallback the second request runs in 16 bits.
    """
    names: list[str] = []
    runner = Runner(
        model, tkernels, num_blocks=4, max_positions=32, fallback=fallback, num_groups=2
    )
    sequences = [SequenceState([5, 9, 300]), SequenceState([17])]

    def launch(kernel: Any, *args: Any, **more: Any) -> Any:
        names.append(kernel.fn.__name__)
        return original(kernel, *args, **more)

    with pytest.MonkeyPatch.context() as patch, replaced_run(launch) as original:
        patch.setattr(qwen3, "FUSED_QUANTIZATION", fused)
        rows = [runner.prefill(sequences)]
        if runner.watch is not None:
            runner.watch.mask.fill_(1 << sequences[1].group)
        for s in sequences:
            s.token_ids.append(7)
        names.clear()
        rows.append(runner.decode(sequences))
    return torch.cat(rows), Counter(names), runner


def test_the_same_bits_from_fewer_launches(model: Model) -> None:
    apart, before, _ = run(model, fused=False)
    logits, after, _ = run(model, fused=True)
    assert torch.equal(logits, apart)
    assert before - after == {
        "_quantize_per_token_kernel": FUSED,
        "_fused_add_rms_norm_kernel": FUSED - LAYERS,
        "_silu_and_mul_kernel": LAYERS,
    }
    assert after - before == {
        "_fused_add_rms_norm_quantized_kernel": FUSED - LAYERS,
        "_silu_and_mul_quantized_kernel": LAYERS,
    }
    assert before.total() - after.total() == FUSED


def test_rows_that_run_high_and_watched_ones_are_kept(model: Model) -> None:
    """One of two layers is watched, and one of two requests runs in 16 bits."""
    calibration = Calibration(
        (1,), torch.tensor([[-1.0, 256.0, 0.0, 1.0]]), torch.full((1, BINS), 1 / BINS), 1e9, 1e9
    )
    apart, before, runner = run(model, False, calibration)
    logits, after, other = run(model, True, calibration)
    assert torch.equal(logits, apart)
    assert before.total() - after.total() == FUSED
    assert "_silu_and_mul_quantized_kernel" in after
    assert runner.watch is not None
    assert other.watch is not None
    for name in ("histogram", "moments", "counters", "mask"):
        assert torch.equal(getattr(runner.watch, name), getattr(other.watch, name)), name
    assert runner.watch.counters[0, :, 1].tolist() == [4, 2]
    # The request in 16 bits has other logits than without a fallback, the other one the same.
    low, _, _ = run(model, True)
    assert torch.equal(low[:3], logits[:3])
    assert not torch.equal(low[3], logits[3])


def int8(rows: int, quantized_activations: bool = True, seed: int = 0) -> Int8Matrix:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(-127, 128, (rows, 32), generator=generator, dtype=torch.int8)
    scale = torch.rand(rows, generator=generator) / 1000
    dev = device.tensor_device()
    return Int8Matrix(codes.to(dev), scale.to(dev), quantized_activations)


@pytest.mark.parametrize(
    ("kinds", "fused"), [("aa", True), ("ab", False), ("ac", False), ("b", False), ("c", False)]
)
def test_all_parts_of_a_weight_take_the_codes(kinds: str, fused: bool) -> None:
    """a: W8A8, b: W8A16, c: 16 bits. The codes of two parts are made once."""
    dev = device.tensor_device()
    of = {
        "a": int8(8),
        "b": int8(8, False),
        "c": torch.ones(8, 32, dtype=torch.bfloat16, device=dev),
    }
    parts: list[Part] = [of[kind] for kind in kinds]
    bias = torch.ones(8 * len(parts), dtype=torch.bfloat16, device=dev)
    linear = Linear(parts[0] if len(parts) == 1 else Parts(tuple(parts)), bias)
    generator = torch.Generator().manual_seed(1)
    x, residual = (torch.randn(3, 32, generator=generator).bfloat16().to(dev) for _ in range(2))
    norm = torch.ones(32, dtype=torch.bfloat16, device=dev)
    assert (linear.quantizing(tkernels, "fused_add_rms_norm") is not None) == fused
    found = linear.behind_norm(x, residual, norm, tkernels, eps=1e-5)
    rows, total = tkernels.fused_add_rms_norm(x, residual, norm, eps=1e-5)
    assert torch.equal(found[0], linear(rows, tkernels))
    assert torch.equal(found[1], total)


def test_who_looks_at_rows_gets_them() -> None:
    """References, and operations that somebody has replaced, are called as they are."""
    linear = Linear(int8(8))
    tap = _Tap(tkernels, 1, lambda layer, x: None)
    assert linear.quantizing(tap, "silu_and_mul") is None
    assert linear.quantizing(tap, "fused_add_rms_norm") is not None
    assert linear.quantizing(tkernels.reference, "silu_and_mul") is None
