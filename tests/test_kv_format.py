"""The format of the quantised KV cache: codes, rounding, slots, and how many bytes it takes."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

import tkernels
from tkernels import kv_format
from tkernels.kv_format import (
    LARGEST,
    MANTISSA_BITS,
    MODES,
    NO_SLOT,
    QuantizedKV,
    allocate_quantized,
    append_quantized_ref,
    dequantize_cache,
    fp4_dequantize_ref,
    fp4_quantize_ref,
    quantize_ref,
    release_slots_ref,
)

VALUES = {
    "e2m1": [0, 0.5, 1, 1.5, 2, 3, 4, 6],
    "e1m2": [0, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75],
    "e3m0": [0, 1, 2, 4, 8, 16, 32, 64],
}
each_format = pytest.mark.parametrize("name", VALUES)


def cache_of(tokens: int, heads: int = 2, dim: int = 64, **more: Any) -> QuantizedKV:
    if "fp4" in more.get("mode", "int8_fp4"):
        more = {"tau": 0.013, "outlier_share": 1.0, **more}
    return allocate_quantized(-(-tokens // 4), 4, heads, dim, **more)


def with_outliers(*shape: int, every: int = 5) -> torch.Tensor:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    x[::every, :, 7] += 60.0
    return x


@each_format
def test_codes_mean_what_the_format_says(name: str) -> None:
    codes = torch.arange(16, dtype=torch.uint8)
    packed = (codes | codes.flip(0) << 4)[:, None]
    scale = torch.full((16, 1), 127 + 3, dtype=torch.uint8)
    low, high = fp4_dequantize_ref(packed, scale, residual_format=name).unbind(1)
    signed = torch.tensor(VALUES[name] + [-v for v in VALUES[name]])
    assert torch.equal(low, signed * 8)
    assert torch.equal(high, low.flip(0))


@each_format
@pytest.mark.parametrize("block", [16, 32])
def test_quantise_takes_the_nearest_code(name: str, block: int) -> None:
    x = torch.randn(200, 128, generator=torch.Generator().manual_seed(1)) * 2.0 ** (
        torch.arange(200)[:, None] % 17 - 8
    )
    packed, scale = fp4_quantize_ref(x, residual_format=name, block=block)
    got = fp4_dequantize_ref(packed, scale, residual_format=name).view(200, -1, block)
    unit = 2.0 ** (scale.double() - 127)
    amax = x.view(200, -1, block).abs().amax(-1)
    assert bool((amax <= LARGEST[name] * unit).all())
    assert bool((amax > LARGEST[name] * unit / 2).all())
    grid = torch.tensor(VALUES[name] + [-v for v in VALUES[name]], dtype=torch.float64)
    exact = x.view(200, -1, block, 1).double() - grid * unit[..., None, None]
    best = exact.abs().amin(-1)
    assert torch.equal((x.view(200, -1, block).double() - got.double()).abs(), best)


@pytest.mark.parametrize("name", ["e2m1", "e1m2"])
def test_the_middle_goes_to_the_even_code(name: str) -> None:
    middles = [(a + b) / 2 for a, b in itertools.pairwise(VALUES[name])]
    x = torch.tensor(middles + [LARGEST[name]] * 25)
    packed, scale = fp4_quantize_ref(x, residual_format=name)
    assert scale.tolist() == [127]
    assert (torch.cat([packed & 15, packed >> 4])[:7] % 2).tolist() == [0] * 7


def test_zeros_and_extremes_are_finite() -> None:
    rows = [0.0, 1e-45, 1e-30, 6.1e-5, 65504.0, 3.3e38]
    x = torch.tensor(rows)[:, None, None] * torch.tensor([1.0, -0.5, 0.25, -1.0] * 16)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        y = x.to(dtype)
        y = torch.where(y.isinf(), 0.0, y)
        codes, scale, rest, error = quantize_ref(y)
        assert bool(error.isfinite().all())
        assert bool(scale.isfinite().all())
        back = codes.double() * scale[..., None].double()
        step = scale[..., None].double()
        assert bool(((back - y.double()).abs() <= 0.5001 * step + kv_format.LEAST_ABSMAX).all())
        assert bool((rest.abs() <= 0.5001).all())
        packed, exponent = fp4_quantize_ref(rest)
        assert bool(fp4_dequantize_ref(packed, exponent).isfinite().all())


def test_a_static_scale_saturates_and_the_residual_mends_it() -> None:
    x = torch.full((1, 1, 64), 100.0)
    x[..., 3] = 400.0
    codes, scale, rest, error = quantize_ref(x, torch.full((1, 64), 1.0))
    assert codes[0, 0, 3] == 127
    assert rest[0, 0, 3] == 273.0
    assert abs(float(error) - 273 / float(x.norm())) < 1e-6
    cache = cache_of(4, 1, mode="int8_static_fp4", static_scale=torch.full((1, 64), 1.0))
    append_quantized_ref(x, cache, torch.tensor([2]))
    assert abs(float(dequantize_cache(cache)[0, 2, 0, 3]) - 400) < 40
    assert scale.shape == (1, 64)


@pytest.mark.parametrize("mode", MODES[1:])
def test_bytes_are_those_of_the_storage(mode: str) -> None:
    static = torch.ones(8, 128) if "static" in mode else None
    tau = 0.01 if "fp4" in mode else None
    cache = allocate_quantized(512, 16, 8, 128, mode=mode, tau=tau, static_scale=static)
    assert cache.mode == mode
    stored = sum(t.untyped_storage().nbytes() for t in cache if isinstance(t, torch.Tensor))
    assert cache.num_bytes() == stored
    assert cache.bytes_per_token() == stored / (512 * 16 * 8)
    # 4% outliers and an eighth more slots than that: 0.54 of bf16's 256 bytes.
    assert cache.bytes_per_token() <= 0.54 * 256


def test_bytes_by_hand() -> None:
    cache = allocate_quantized(1000, 16, 1, 128, tau=0.01, outlier_share=0.04)
    slots = 640
    assert cache.num_bytes() == 16000 * (128 + 4 + 2) + slots * (64 + 4 + 4) + 4 + 4 + 4


@pytest.mark.parametrize(
    ("blocks", "slots"), [(1, 16), (2, 32), (3, 32), (44, 32), (46, 33), (1000, 720)]
)
def test_slots_unless_a_share_is_given(blocks: int, slots: int) -> None:
    """4.5% of few positions would be next to none, and outliers come in bunches."""
    cache = allocate_quantized(blocks, 16, 2, 64, tau=0.01)
    assert cache.residual is not None
    assert cache.free_count is not None
    assert cache.residual.shape[1] == slots
    assert cache.free_count.tolist() == [slots, slots]
    asked = allocate_quantized(blocks, 16, 2, 64, tau=0.01, outlier_share=1 / 16)
    assert asked.residual is not None
    assert asked.residual.shape[1] == blocks


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"mode": "none"}, "mode must be one of int8, .*got 'none'"),
        ({"tau": None}, "tau must be given for mode int8_fp4, got None"),
        ({"mode": "int8_static"}, r"static_scale must be fp32 \[num_kv_heads=2, .* got None"),
        ({"residual_format": "e4m3"}, "residual_format must be one of .*, got 'e4m3'"),
        ({"residual_block": 8}, "residual_block must be 16 or 32 and divide .* = 32, got 8"),
        ({"residual_block": 0}, "residual_block must be 16 or 32 and divide .* = 32, got 0"),
        ({"tau": "0.01"}, r"tau must be a number or fp32 \[num_kv_heads=2\], got '0.01' \(str\)"),
        ({"tau": [0.1, 0.1]}, r"tau must be a number or fp32 .*, got \[0.1, 0.1\] \(list\)"),
        ({"outlier_share": "all"}, "outlier_share must be a number above 0, got 'all'"),
        (
            {"mode": "int8_static", "static_scale": 1.0},
            r"static_scale must be fp32 .* got 1.0 \(float\)",
        ),
    ],
)
def test_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=f"^allocate_quantized: {words}"):
        cache_of(8, **change)


@pytest.mark.parametrize("mode", MODES[1:])
@pytest.mark.parametrize(
    ("argument", "value", "users"),
    [
        ("static_scale", torch.ones(2, 64), "a static"),
        ("tau", 0.0, "an fp4"),
        ("tau", torch.zeros(2), "an fp4"),
        ("outlier_share", 0.1, "an fp4"),
        ("residual_format", "e2m1", "an fp4"),
        ("residual_block", 32, "an fp4"),
    ],
)
def test_what_a_mode_does_not_use_is_refused(
    mode: str, argument: str, value: Any, users: str
) -> None:
    wanted = {"static_scale": torch.ones(2, 64)} if "static" in mode else {}
    wanted |= {"tau": 0.1} if "fp4" in mode else {}
    given = {**wanted, "mode": mode, argument: value}
    if users.split()[1] in mode:
        assert allocate_quantized(2, 4, 2, 64, **given).mode == mode
        return
    words = f"^allocate_quantized: {argument} must be None for mode {mode}, as only {users} mode "
    with pytest.raises(ValueError, match=f"{words}uses it, got "):
        allocate_quantized(2, 4, 2, 64, **given)


@pytest.mark.parametrize("place", range(4))
@pytest.mark.parametrize("size", [-1, 2.0, "2", True])
def test_sizes_that_are_none_are_refused(place: int, size: Any) -> None:
    sizes: list[Any] = [2, 4, 2, 64]
    sizes[place] = size
    name = ("num_blocks", "block_size", "num_kv_heads", "head_dim")[place]
    words = f"^allocate_quantized: {name} must be an int from {int(place > 0)} on, got {size!r}$"
    with pytest.raises(ValueError, match=words):
        allocate_quantized(*sizes, tau=0.1)
    if place:
        sizes[place] = 0
        with pytest.raises(ValueError, match=f"{name} must be an int from 1 on, got 0"):
            allocate_quantized(*sizes, tau=0.1)


def test_a_cache_without_blocks() -> None:
    assert allocate_quantized(0, 4, 2, 64, tau=0.1).codes.shape == (0, 4, 2, 64)


def test_static_scales_are_multiplied_by_their_inverse() -> None:
    """1 / 3 is rounded, and so is the product with it; what is too small to invert counts as 0."""
    scale = torch.tensor([[3.0, 3.0, 0.0, 1e-40]])
    codes, _, rest, _ = quantize_ref(torch.tensor([[1.0, 10.0, 5.0, 5.0]]), scale)
    third = torch.tensor(1.0) / torch.tensor(3.0)
    assert codes[0].tolist() == [0, 3, 0, 0]
    assert rest[0].tolist() == [float(third), float(10.0 * third - 3.0), 0.0, 0.0]


@pytest.mark.parametrize("dim", [40, 80])
def test_heads_without_whole_blocks_are_refused(dim: int) -> None:
    with pytest.raises(ValueError, match=r"^allocate_quantized: head_dim must divide by 32"):
        cache_of(8, dim=dim)


def test_more_slots_than_16_bits_can_name_are_not_made() -> None:
    cache = allocate_quantized(70000, 2, 1, 32, tau=0.0, outlier_share=1.0)
    assert cache.free_slots is not None
    assert cache.free_slots.shape == (1, 65535)


def test_outliers_and_they_alone_get_residuals() -> None:
    x = with_outliers(21, 2, 64)
    cache = cache_of(24)
    places = torch.randperm(24, generator=torch.Generator().manual_seed(2))[:21]
    append_quantized_ref(x, cache, places)
    assert cache.slots is not None
    held = (cache.slots != NO_SLOT).transpose(1, 2).flatten(0, 1)[places]
    assert torch.equal(held, (torch.arange(21) % 5 == 0)[:, None].expand(21, 2))
    plain = dequantize_cache(cache, residuals=False).flatten(0, 1)[places]
    mended = dequantize_cache(cache).flatten(0, 1)[places]
    assert torch.equal(plain[~held], mended[~held])
    left = (mended - x)[held].norm() / (plain - x)[held].norm()
    assert 0.05 < float(left) < 0.15


def test_e2m1_is_the_better_of_the_two() -> None:
    """Why it is the default: it leaves half of what E3M0 leaves, and blocks of 16 gain nothing."""
    rest = quantize_ref(with_outliers(200, 2, 128, every=1))[2]
    left = {}
    for name, block in itertools.product(MANTISSA_BITS, (16, 32)):
        packed, scale = fp4_quantize_ref(rest, residual_format=name, block=block)
        back = fp4_dequantize_ref(packed, scale, residual_format=name)
        left[name, block] = float((back - rest).norm() / rest.norm())
    assert left["e2m1", 32] < 0.6 * left["e3m0", 32]
    assert left["e2m1", 32] < left["e1m2", 32]
    assert left["e2m1", 16] > 0.9 * left["e2m1", 32]


def test_a_full_pool_drops_and_counts() -> None:
    x = with_outliers(20, 2, 64, every=2)
    cache = cache_of(20, outlier_share=0.2)  # 4 slots for 10 outliers a head
    append_quantized_ref(x, cache, torch.arange(20))
    assert cache.dropped is not None
    assert cache.free_count is not None
    assert cache.slots is not None
    assert cache.dropped.tolist() == [6, 6]
    assert cache.free_count.tolist() == [0, 0]
    held = (cache.slots != NO_SLOT).transpose(1, 2).flatten(0, 1)
    assert held.sum(0).tolist() == [4, 4]
    both = dequantize_cache(cache).flatten(0, 1), dequantize_cache(cache, residuals=False)
    assert torch.equal(both[0][~held], both[1].flatten(0, 1)[~held])


def test_release_gives_all_back() -> None:
    cache = cache_of(20)
    append_quantized_ref(with_outliers(20, 2, 64), cache, torch.arange(20))
    assert cache.slots is not None
    assert cache.free_slots is not None
    assert cache.free_count is not None
    release_slots_ref(
        cache.slots, cache.free_slots, cache.free_count, torch.tensor([-1, 3, 0, 9, 1, 2, 4])
    )
    assert bool((cache.slots == NO_SLOT).all())
    assert cache.free_count.tolist() == [20, 20]
    assert cache.free_slots.sort(1).values.tolist() == [list(range(20))] * 2


def test_it_is_public() -> None:
    assert tkernels.QuantizedKV is QuantizedKV
    assert tkernels.allocate_quantized is allocate_quantized
