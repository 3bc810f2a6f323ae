"""What is special to watch_activations: who falls back, when and why, and who does not."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import tkernels
from tkernels import device, reference
from tkernels.ops.watch_activations import BINS, SPEC, watch_problem
from tkernels.testing import assert_close

KL, SKEWNESS, NOT_FINITE = 1, 2, 4
COLS = 96


def gaussian(rows: int, *, seed: int = 0, cols: int = COLS) -> torch.Tensor:
    return torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed))


def state(dev: torch.device, *, slots: int = 8, watches: int = 1) -> dict[str, torch.Tensor]:
    """Nothing seen, and a normal distribution to compare with."""
    shares = torch.special.ndtr(torch.linspace(-4, 4, BINS + 1)).diff() + 1e-6
    found = {
        "calibration": torch.tensor([[-4.0, BINS / 8, 0.0, 1.0]]).repeat(watches, 1),
        "reference": (shares / shares.sum()).repeat(watches, 1),
        "histogram": torch.zeros(watches, slots, BINS, dtype=torch.int32),
        "moments": torch.zeros(watches, slots, 5),
        "counters": torch.zeros(watches, slots, 4, dtype=torch.int32),
        "mask": torch.zeros(-(-slots // 64), dtype=torch.int64),
    }
    return {name: t.to(dev) for name, t in found.items()}


def see(
    x: torch.Tensor,
    slots: list[int],
    kept: dict[str, torch.Tensor],
    ops: Any = tkernels,
    **more: Any,
) -> None:
    """A step of one watch, x [n_rows, n_cols]."""
    dev = kept["mask"].device
    given = {"kl_above": 0.1, **more}  # 64 rows of 96 normal values differ from their law by 0.04
    ops.watch_activations(
        x.to(dev)[None], torch.tensor(slots, dtype=torch.int32, device=dev), **kept, **given
    )


@pytest.mark.parametrize("ops", [tkernels, reference], ids=["kernel", "reference"])
def test_the_one_that_goes_bad_falls_back_within_64_tokens(ops: Any, dev: torch.device) -> None:
    """Four requests decode; one has outliers from token 100 on; the state of others is unmoved."""
    plain, spoilt = state(dev), state(dev)
    fell_at = None
    slots = [*range(4)] * 4  # four tokens a step
    for token in range(0, 140, 4):
        x = gaussian(16, seed=token)
        see(x, slots, plain, ops)
        if token >= 100:
            x[2::4, ::16] *= 40
        see(x, slots, spoilt, ops)
        if fell_at is None and int(spoilt["mask"]):
            fell_at = token
    assert fell_at == 124  # with the end of its second window, 28 tokens on
    assert int(plain["mask"]) == 0
    assert int(spoilt["mask"]) == 1 << 2
    assert spoilt["counters"][0, 2].tolist() == [0, 128, KL, 128]
    others = [0, 1, 3]
    for name in ("histogram", "moments", "counters"):
        assert torch.equal(spoilt[name][:, others], plain[name][:, others]), name
    assert plain["counters"][0, 2].tolist() == [12, 140, 0, 0]


def test_a_bit_stays_set_and_the_verdict_is_the_first(dev: torch.device) -> None:
    kept = state(dev)
    for token in range(64):
        see(gaussian(1, seed=token) + 3, [2], kept)
    first = {name: t.clone() for name, t in kept.items()}
    assert first["counters"][0, 2].tolist() == [0, 64, KL, 64]
    for token in range(7):
        see(gaussian(10, seed=token), [2] * 10, kept)
    for name, before in first.items():
        assert torch.equal(kept[name], before), name


@pytest.mark.parametrize("sign", [1, -1])
def test_skewness_of_either_sign(sign: int, dev: torch.device) -> None:
    """A few far values on one side: the distribution hardly differs, its third moment does."""
    kept = state(dev)
    x = gaussian(64)
    x[::8, 7] = sign * 30.0
    see(x, [1] * 64, kept)
    assert kept["counters"][0, 1].tolist() == [0, 64, SKEWNESS, 64]
    values = x.double()
    third = ((values - values.mean()) / values.std(correction=0)).pow(3).mean()
    assert abs(float(third)) > 3
    assert_close(kept["moments"][0, 1, 4:].cpu(), third[None], what="skewness", factor=10)


def test_kl_is_that_of_the_histograms(dev: torch.device) -> None:
    kept = state(dev)
    x = gaussian(64) * 1.5
    see(x, [0] * 64, kept, skewness_above=1e30, kl_above=1e30)
    p = torch.histc(x.clamp(-4, 4 - 1e-4).double(), BINS, -4, 4) / x.numel()
    q = kept["reference"][0].cpu().double()
    kl = torch.where(p > 0, p * (p / q).log(), 0).sum()
    assert kl > 0.1
    assert_close(kept["moments"][0, 0, 3:4].cpu(), kl[None], what="KL", factor=10)
    assert not kept["moments"][0, 0, :3].any()
    assert not kept["histogram"].any()
    assert int(kept["mask"]) == 0


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_row_that_is_not_finite_falls_back_at_once(value: float, dev: torch.device) -> None:
    kept, plain = state(dev), state(dev)
    x = gaussian(4)
    see(x, [0, 1, 2, 3], plain)
    x[2, 95] = value
    see(x, [0, 1, 2, 3], kept)
    assert kept["counters"][0, :4, 2].tolist() == [0, 0, NOT_FINITE, 0]
    assert kept["counters"][0, 2].tolist() == [0, 1, NOT_FINITE, 1]
    assert int(kept["mask"]) == 1 << 2
    for name in ("histogram", "moments", "counters"):
        assert torch.equal(kept[name][:, [0, 1, 3]], plain[name][:, [0, 1, 3]]), name


def test_without_calibration_nothing_happens(dev: torch.device) -> None:
    kept = state(dev, watches=2)
    kept["calibration"][0] = 0
    before = {name: t.clone() for name, t in kept.items()}
    x = torch.full((2, 3, COLS), torch.nan, device=dev)
    slots = torch.tensor([0, 1, 2], dtype=torch.int32, device=dev)
    tkernels.watch_activations(
        x[:1], slots, **{n: t[:1] for n, t in kept.items() if n != "mask"}, mask=kept["mask"]
    )
    for name, t in kept.items():
        assert torch.equal(t, before[name]), name
    tkernels.watch_activations(x, slots, **kept)  # the other watch has one
    assert kept["counters"][..., 2].tolist() == [[0] * 8, [4, 4, 4, 0, 0, 0, 0, 0]]


def test_slots_that_are_not_there_and_rows_of_nobody(dev: torch.device) -> None:
    kept = state(dev, slots=3)
    see(gaussian(5).fill_(torch.nan), [-1, 3, 2**31 - 1, -(2**31), 64], kept)
    assert not kept["counters"].any()
    assert int(kept["mask"]) == 0


def test_the_last_bit_of_a_word_and_the_next_word(dev: torch.device) -> None:
    kept = state(dev, slots=70)
    kept["mask"][0] = 1  # set by someone else: stays
    see(torch.full((3, COLS), torch.nan), [63, 64, 69], kept)
    assert kept["mask"].tolist() == [-(2**63) + 1, 1 + 2**5]


def test_a_prompt_is_the_same_as_its_tokens_one_by_one(dev: torch.device) -> None:
    """Verdicts fall inside a step; sums are taken in the same order."""
    at_once, singly = state(dev), state(dev)
    x = gaussian(150)
    x[70:] += 1
    see(x, [4] * 150, at_once)
    for row in x:
        see(row[None], [4], singly)
    for name in at_once:
        assert torch.equal(at_once[name], singly[name]), name
    assert at_once["counters"][0, 4].tolist() == [0, 128, KL, 128]


def test_order_of_rows_and_grid_do_not_matter(dev: torch.device) -> None:
    kept = [state(dev) for _ in range(3)]
    x, slots = gaussian(40), [i % 8 for i in range(40)]
    default = SPEC.default_config(watch_problem(40, 8, COLS, torch.float32), device.current())
    see(x, slots, kept[0])
    order = sorted(range(40), key=lambda i: slots[i])  # each slot's own order stays
    see(x[order], [slots[i] for i in order], kept[1], config={**default, "BLOCK_R": 16})
    see(x, slots, kept[2], config={**default, "programs_per_core": 1})
    for other in kept[1:]:
        for name, t in kept[0].items():
            assert torch.equal(t, other[name]), name


def test_outer_bins_hold_what_lies_outside(dev: torch.device) -> None:
    kept = state(dev)
    see(torch.tensor([[-1e30, -4.0, 3.999, 4.0, 1e30, 0.0]]), [0], kept)
    counts = kept["histogram"][0, 0]
    assert (int(counts[0]), int(counts[BINS - 1]), int(counts[BINS // 2])) == (2, 3, 1)
    assert bool(kept["moments"].isfinite().all())


def test_the_bit_is_the_one_that_masked_gemm_reads(dev: torch.device) -> None:
    """Six requests of one layer: after the verdict, that request's row is the high result."""
    kept = state(dev)
    weight, scale = reference.quantize_per_token(gaussian(32, seed=9, cols=64))
    weight, scale = weight.to(dev), scale.to(dev)
    slots = torch.arange(6, dtype=torch.int32, device=dev)
    x = gaussian(6, cols=64).to(torch.bfloat16).to(dev)

    def layer() -> torch.Tensor:
        return tkernels.masked_gemm(x, weight, scale, mask=kept["mask"], row_group=slots)

    low = layer()
    see(torch.full((1, COLS), torch.inf), [3], kept)
    mixed = layer()
    high = tkernels.masked_gemm(x, weight, scale, high=True)
    assert torch.equal(mixed[3], high[3])
    assert not torch.equal(mixed[3], low[3])
    keep = [0, 1, 2, 4, 5]
    assert torch.equal(mixed[keep], low[keep])


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            {"window": 0},
            r"window must be an int of at least 1, and .* got 0 \(int\) and 96 columns",
        ),
        ({"window": 2**31 // COLS + 1}, "window must be an int"),
        ({"window": 64.0}, "window must be an int"),
        ({"kl_above": 0.0}, "kl_above must be a number > 0"),
        ({"skewness_above": math.nan}, "skewness_above must be a number > 0"),
    ],
)
def test_wrong_numbers_are_refused(more: dict[str, Any], message: str, dev: torch.device) -> None:
    with pytest.raises((ValueError, TypeError), match=f"^watch_activations: {message}"):
        see(gaussian(1), [0], state(dev), **more)


def test_a_mask_too_short_is_refused(dev: torch.device) -> None:
    kept = state(dev, slots=65)
    kept["mask"] = kept["mask"][:1]
    with pytest.raises(ValueError, match=r"mask must have 2 or more words for 65 slots, got int64"):
        see(gaussian(1), [0], kept)


@pytest.mark.gpu
def test_works_in_a_captured_graph(dev: torch.device) -> None:
    """64 replays of one graph, whose rows are written between them, set the bit."""
    kept = state(dev)
    slots = torch.tensor([0, 1], dtype=torch.int32, device=dev)
    x = gaussian(2).to(dev)[None]
    tkernels.watch_activations(x, slots, **kept, kl_above=0.1)
    for t in kept.values():
        if not t.is_floating_point():
            t.zero_()
    kept["moments"].zero_()
    graph = device.new_graph()
    with device.capture(graph):
        tkernels.watch_activations(x, slots, **kept, kl_above=0.1)
    for token in range(64):
        step = gaussian(2, seed=token)
        step[1] *= 3
        x.copy_(step.to(dev)[None])
        graph.replay()
    device.synchronize()
    assert kept["counters"][0, :2].tolist() == [[0, 64, 0, 0], [0, 64, KL, 64]]
    assert int(kept["mask"]) == 2
