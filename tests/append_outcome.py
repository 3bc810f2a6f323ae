"""What an append with residuals may make of a cache, whichever token gets which pool slot."""

from __future__ import annotations

import torch

from tkernels.kv_format import NO_SLOT, QuantizedKV, append_quantized_ref


def copy_of(cache: QuantizedKV) -> QuantizedKV:
    return cache._replace(**{name: t.clone() for name, t in cache.tensors().items()})


def check_append(
    before: QuantizedKV, got: QuantizedKV, x: torch.Tensor, places: torch.Tensor
) -> None:
    """``got`` is what ``append_quantized_ref`` makes of ``before``, but for the choice of slots.

    Which tokens go without where the pool runs empty is a choice, too.
    """
    expected, ample = copy_of(before), _with_ample_pool(before)
    for cache in (expected, ample):
        append_quantized_ref(x, cache, places)
    for name in ("codes", "dropped", "free_count", "tau", "free_slots"):
        _equal(name, got, expected)
    had, has, wants = (_held(cache) for cache in (before, got, ample))
    assert not bool((has & ~wants).any())
    assert torch.equal(has.sum((0, 2)), _held(expected).sum((0, 2)))
    assert got.slots is not None
    assert before.slots is not None
    assert torch.equal(got.slots[had], before.slots[had])
    read = has
    if got.scale.dim() == 2:  # of channels, and read
        assert torch.equal(got.scale, before.scale), "scale"
    else:
        size = expected.scale.abs()
        scale = torch.where(has, -size, size)
        assert torch.equal(got.scale.nan_to_num(7.0), scale.nan_to_num(7.0)), "scale"
        read = has & ~scale.isnan()  # others are not read back, whatever their rests are
    for name in ("residual", "residual_scale"):
        assert torch.equal(_rows(got, name, read), _rows(ample, name, read)), name
    _check_pool(before, got)


def _equal(name: str, got: QuantizedKV, expected: QuantizedKV) -> None:
    a, b = got.tensors()[name], expected.tensors()[name]
    assert torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)), name


def _held(cache: QuantizedKV) -> torch.Tensor:
    assert cache.slots is not None
    return cache.slots != NO_SLOT


def _rows(cache: QuantizedKV, name: str, where: torch.Tensor) -> torch.Tensor:
    """Of the pool, for places [num_blocks, num_kv_heads, block_size]."""
    assert cache.slots is not None
    head = where.nonzero()[:, 1]
    return cache.tensors()[name][head, cache.slots[where].long() & 0xFFFF]


def _with_ample_pool(cache: QuantizedKV) -> QuantizedKV:
    """The same, with a free slot for each place beside those that are held."""
    held = _held(cache)
    n_heads, n_places = held.shape[1], held[:, 0].numel()
    assert 2 * n_places < 0x7FFF
    number = torch.arange(n_places, dtype=torch.int16, device=held.device)
    number = number.view(held.shape[0], 1, held.shape[2]).expand_as(held)
    pools = {}
    for name in ("residual", "residual_scale"):
        pool = cache.tensors()[name]
        pools[name] = pool.new_zeros(n_heads, 2 * n_places, pool.shape[-1])
        pools[name][held.nonzero()[:, 1], number[held].long()] = _rows(cache, name, held)
    free = torch.arange(n_places, 2 * n_places, dtype=torch.int32, device=held.device)
    made = copy_of(cache)._replace(
        **pools,
        slots=torch.where(held, number, NO_SLOT),
        free_slots=free.repeat(n_heads, 1),
    )
    assert made.free_count is not None
    made.free_count.fill_(n_places)
    return made


def _check_pool(before: QuantizedKV, got: QuantizedKV) -> None:
    """Each slot is free once or held once, and the rows of those that are free are as before."""
    assert got.slots is not None
    assert got.free_slots is not None
    assert got.free_count is not None
    n_slots = got.free_slots.shape[1]
    for head, count in enumerate(got.free_count.tolist()):
        held = got.slots[:, head][_held(got)[:, head]].long() & 0xFFFF
        free = got.free_slots[head, :count].long()
        found = torch.cat((held, free)).sort().values
        assert torch.equal(found, torch.arange(n_slots, device=found.device))
        for name in ("residual", "residual_scale"):
            a, b = got.tensors()[name][head], before.tensors()[name][head]
            assert torch.equal(a[free], b[free]), name
