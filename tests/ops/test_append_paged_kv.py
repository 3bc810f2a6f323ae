"""What is special to append_paged_kv: slots that are skipped, cache layouts, pools past 2^31."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import pytest
import torch

import tkernels
from tkernels import check, device
from tkernels.ops.append_paged_kv import SPEC, append_problem
from tkernels.testing import guarded

BITS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}


def bits(t: torch.Tensor) -> torch.Tensor:
    return t.contiguous().view(BITS[t.dtype])


def nan_pool(*shape: int, dtype: torch.dtype, dev: torch.device) -> torch.Tensor:
    """NaNs that all differ in their payload, so that any write or mix-up shows."""
    numbers = torch.arange(torch.Size(shape).numel(), dtype=torch.int64)
    if dtype == torch.float32:
        patterns = (0x7FC00000 + numbers).to(torch.int32)
    else:
        patterns = (0x7FC0 + numbers % 0x3F).to(torch.int16)
    return patterns.view(dtype).reshape(shape).to(dev)


@pytest.mark.parametrize("dtype", BITS, ids=str)
def test_unused_slots_keep_their_bits(dtype: torch.dtype, dev: torch.device) -> None:
    blocks, block_size, heads, dim = 4, 5, 2, 24
    k, v = torch.randn(2, 7, heads, dim).to(dtype).to(dev)
    pools = [nan_pool(blocks, block_size, heads, dim, dtype=dtype, dev=dev) for _ in range(2)]
    before = [pool.clone() for pool in pools]
    slots = torch.tensor([19, 0, -1, 7, 5, -1, 4], device=dev)
    tkernels.append_paged_kv(k, v, *pools, slots)
    for pool, old, new in zip(pools, before, (k, v), strict=True):
        flat, flat_old = bits(pool).flatten(0, 1), bits(old).flatten(0, 1)
        written = {int(s): t for t, s in enumerate(slots) if s >= 0}
        for slot in range(blocks * block_size):
            expected = bits(new)[written[slot]] if slot in written else flat_old[slot]
            assert torch.equal(flat[slot], expected), f"slot {slot}"


OUTSIDE_INT32 = [-1, -7, -(2**31), 6, 7, 2**31 - 1]
# 2^32 + 1 is slot 1 if only its low half is looked at.
OUTSIDE_INT64 = [*OUTSIDE_INT32, 2**31, 2**32 + 1, -(2**32) + 1, 2**63 - 1, -(2**63)]


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("index", "outside"),
    [(torch.int32, OUTSIDE_INT32), (torch.int64, OUTSIDE_INT64)],
    ids=["int32", "int64"],
)
def test_slots_outside_the_pool_are_skipped(
    index: torch.dtype, outside: list[int], dev: torch.device
) -> None:
    n = len(outside)
    k, v = torch.randn(2, n + 1, 3, 20, device=dev)
    # The pool lies in the middle of a larger tensor that nothing may touch.
    pools = [guarded(nan_pool(2, 3, 3, 20, dtype=torch.float32, dev=dev)) for _ in range(2)]
    before = [bits(g.tensor) for g in pools]
    slots = torch.tensor([*outside, 4], dtype=index, device=dev)
    tkernels.append_paged_kv(k, v, pools[0].tensor, pools[1].tensor, slots)
    for guard, old, new in zip(pools, before, (k, v), strict=True):
        guard.check("pool")
        now = bits(guard.tensor)
        assert torch.equal(now[1, 1], bits(new[n]))
        old[1, 1] = now[1, 1]
        assert torch.equal(now, old)


@pytest.mark.usefixtures("unchecked")
def test_empty_pool_and_no_tokens(dev: torch.device) -> None:
    k = torch.randn(2, 3, 8, device=dev)
    empty = torch.empty(0, 16, 3, 8, device=dev)
    tkernels.append_paged_kv(k, k, empty, empty.clone(), torch.tensor([0, -1], device=dev))
    pool = torch.full((1, 4, 3, 8), 7.0, device=dev)
    none = torch.empty(0, dtype=torch.int64, device=dev)
    tkernels.append_paged_kv(k[:0], k[:0], pool, pool.clone(), none)
    assert bool((pool == 7.0).all())


@pytest.mark.usefixtures("unchecked")
def test_debug_names_a_slot_past_the_end(
    monkeypatch: pytest.MonkeyPatch, dev: torch.device
) -> None:
    inputs = SPEC.make_inputs(append_problem(4, 2, 8, torch.float32, block_size=4), dev)
    n_slots = inputs["k_cache"].shape[0] * 4
    inputs["slot_mapping"] = torch.tensor([1, n_slots + 2, -1, n_slots], device=dev)
    SPEC.launch(**inputs)  # skipped
    monkeypatch.setattr(check, "DEBUG", True)
    expected = (
        rf"^append_paged_kv: slot_mapping must hold slots < num_blocks \* block_size={n_slots}, "
        rf"got {n_slots + 2} \(2 such of 4\)$"
    )
    with pytest.raises(ValueError, match=expected):
        SPEC.launch(**inputs)
    inputs["slot_mapping"] = torch.tensor([1, n_slots - 1, -1, -9], device=dev)
    SPEC.launch(**inputs)


def debug_in(monkeypatch: pytest.MonkeyPatch, value: str | None) -> bool:
    """``check.DEBUG`` of a process in which TKERNELS_DEBUG is ``value``."""
    if value is None:
        monkeypatch.delenv("TKERNELS_DEBUG", raising=False)
    else:
        monkeypatch.setenv("TKERNELS_DEBUG", value)
    spec = importlib.util.spec_from_file_location("fresh_check", check.__file__)
    assert spec is not None
    assert spec.loader is not None
    fresh = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fresh)
    found: bool = fresh.DEBUG
    return found


@pytest.mark.parametrize("interpreted", [True, False])
def test_debug_is_switched_by_the_environment(
    monkeypatch: pytest.MonkeyPatch, interpreted: bool
) -> None:
    """Unless it is, values are checked where a bad one could end Python: in the interpreter."""
    monkeypatch.setattr("tkernels.device.INTERPRETED", interpreted)
    for on in ("1", "yes", "true", "True", "YES"):
        assert debug_in(monkeypatch, on) is True
    for off in ("0", "no", "false", "False", "NO"):
        assert debug_in(monkeypatch, off) is False
    for unset in (None, ""):
        assert debug_in(monkeypatch, unset) is interpreted
    for odd in ("2", "on", " 1", "debug"):
        expected = f"^tkernels: TKERNELS_DEBUG must be one of 0, no, false, .*, got {odd!r}$"
        with pytest.raises(ValueError, match=expected):
            debug_in(monkeypatch, odd)


@pytest.mark.skipif(not device.INTERPRETED, reason="an index out of range ends Python there alone")
@pytest.mark.skipif("TKERNELS_DEBUG" in os.environ, reason="the test run chose for itself")
def test_the_interpreter_checks_values() -> None:
    assert check.DEBUG


def one_storage(dev: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V as the two halves of each block of one tensor."""
    return torch.zeros(3, 2, 4, 2, 16, device=dev).unbind(1)  # type: ignore[return-value]


def head_major(dev: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(2, 3, 2, 4, 16, device=dev).transpose(2, 3).unbind(0)  # type: ignore[return-value]


def mixed(dev: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Heads are neighbours in K's pool only."""
    v_cache = torch.zeros(4, 3, 2, 16, device=dev).permute(1, 0, 2, 3)
    return torch.zeros(3, 4, 2, 16, device=dev), v_cache[..., :16]


def every_other_block(dev: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(6, 4, 2, 16, device=dev)[::2], torch.zeros(3, 8, 3, 20, device=dev)[
        :, ::2, 1:, 3:19
    ]


@pytest.mark.parametrize("layout", [one_storage, head_major, mixed, every_other_block])
@pytest.mark.parametrize("packed", [True, False], ids=["packed-qkv", "separate"])
def test_layouts(layout: Any, packed: bool, dev: torch.device) -> None:
    tokens, heads, dim = 5, 2, 16
    if packed:
        qkv = torch.randn(tokens, 4 * heads * dim, device=dev)
        _, k, v = (p.unflatten(1, (-1, dim)) for p in qkv.split([2 * 32, 32, 32], dim=1))
    else:
        k = torch.randn(heads, tokens, dim, device=dev).transpose(0, 1)
        v = torch.randn(tokens, heads, 2 * dim, device=dev)[..., 1 : dim + 1]
    slots = torch.tensor([11, 3, -1, 0, 6], device=dev)
    k_cache, v_cache = layout(dev)
    whole = [t._base if t._base is not None else t for t in (k_cache, v_cache)]
    tkernels.append_paged_kv(k, v, k_cache, v_cache, slots)
    expected_k, expected_v = layout(dev)
    tkernels.reference.append_paged_kv(k, v, expected_k, expected_v, slots)
    assert torch.equal(k_cache, expected_k)
    assert torch.equal(v_cache, expected_v)
    for t, e in zip(whole, (expected_k, expected_v), strict=True):  # gaps of the pool, too
        assert torch.equal(t, e._base if e._base is not None else e)


@pytest.mark.parametrize(
    ("argument", "change", "words"),
    [
        ("k_cache", lambda t: t.to(torch.int8), r"be float32, got int8 \["),
        ("k_cache", lambda t: t.half(), r"be float32, got float16 \["),
        ("v_cache", lambda t: t.half(), r"as k_cache is, got float16 \["),
        ("v", lambda t: t.half(), r"as k is, got float16 \["),
        ("slot_mapping", lambda t: t[:-1], r"have shape \[n_tokens=9\], got int64 \[8\]"),
        ("slot_mapping", lambda t: t[:, None], r"have shape \[n_tokens=9\], got int64 \[9, 1\]"),
        ("k_cache", lambda t: t[:, :, :1], r"num_kv_heads=2, head_dim=64\], got float32 \["),
        ("k_cache", lambda t: t[..., :32], r"num_kv_heads=2, head_dim=64\], got float32 \["),
        ("v_cache", lambda t: t[:1], r"as k_cache is, got float32 \["),
        ("k", lambda t: t[:, :0], r"num_kv_heads >= 1, head_dim >= 1\], got float32 \[9, 0, 64\]"),
        ("v_cache", lambda t: t[:1].expand_as(t), r"not repeat memory"),
    ],
)
def test_refused(argument: str, change: Any, words: str, dev: torch.device) -> None:
    inputs = SPEC.make_inputs(append_problem(9, 2, 64, torch.float32), dev)
    inputs[argument] = change(inputs[argument])
    before = inputs["k_cache"].clone()
    with pytest.raises(ValueError, match=rf"^append_paged_kv: {argument} must (.* )?{words}"):
        SPEC.launch(**inputs)
    assert torch.equal(inputs["k_cache"], before)


@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)
def test_addresses_past_2_31_elements(index: torch.dtype, dev: torch.device) -> None:
    """Slot numbers and strides fit 32 bits, their product does not. Few pages are ever touched."""
    if dev.type != "cpu":
        pytest.skip("a pool of this size is really allocated on a device: see the next test")
    stride = 2**30
    memory = torch.empty(3 * stride + 8192, dtype=torch.float16)
    shape, strides = (3, 2, 2, 32), (stride, 128, 64, 1)
    k_cache = memory.as_strided(shape, strides)
    v_cache = memory.as_strided(shape, strides, storage_offset=2048)
    for cache in (k_cache, v_cache):
        cache.fill_(-1.0)
    # Tokens lie as far apart, in the same memory.
    k, v = (
        memory.as_strided((4, 2, 32), (stride, 64, 1), storage_offset=offset).copy_(
            torch.randn(4, 2, 32)
        )
        for offset in (4096, 6144)
    )
    slots = torch.tensor([5, 4, -1, 1], dtype=index)
    tkernels.append_paged_kv(k, v, k_cache, v_cache, slots)
    for cache, new in ((k_cache, k), (v_cache, v)):
        rows = cache.reshape(6, 2, 32)
        assert torch.equal(rows[[5, 4, 1]], new[[0, 1, 3]])
        assert bool((rows[[0, 2, 3]] == -1.0).all())


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)
def test_real_pool_past_2_31_elements(index: torch.dtype, dev: torch.device) -> None:
    blocks, block_size, heads, dim = 131_200, 16, 8, 128
    n_slots = blocks * block_size
    assert n_slots * heads * dim > 2**31
    pools = [
        torch.zeros(blocks, block_size, heads, dim, dtype=torch.bfloat16, device=dev)
        for _ in range(2)
    ]
    edge = 2**31 // (heads * dim)  # the first slot that starts at element 2^31
    slots = torch.tensor([n_slots - 1, edge, edge - 1, -1, 0, n_slots], dtype=index, device=dev)
    k, v = torch.rand(2, 6, heads, dim, device=dev).add_(1).to(torch.bfloat16)
    tkernels.append_paged_kv(k, v, *pools, slots)
    device.synchronize()
    used = [0, 1, 2, 4]
    for pool, new in zip(pools, (k, v), strict=True):
        rows = pool.view(n_slots, heads, dim)
        assert torch.equal(rows[slots[used].long()], new[used])
        touched = sum(int(part.count_nonzero()) for part in pool.split(8192))
        assert touched == len(used) * heads * dim
