"""The quantised KV cache: int8 codes, and 4-bit residuals for the tokens that int8 treats badly.

One ``QuantizedKV`` holds K, or V, of one layer. Of a token and KV head with head_dim numbers x:

    code[c]  = round_half_even(clamp(x[c] / scale, -127, 127))
    scale    = absmax(x) / 127 of this token and head (dynamic), or one a head and channel (static)
    e        = ||x - code * scale||2 / ||x||2                     over the channels; 0 where x is 0
    residual = 4-bit block float of x / scale - code, kept where e > tau (an "outlier token")
    x       ~= (code + residual) * scale

The residual counts in steps of the code, so scales leave attention's inner loop as they do without
residuals: a token's goes to its score (K) or probability (V), a channel's to q (K) or the output
(V). Codes and residuals together have 11 significant bits at most, which fp16 holds and bf16 not.

Residuals live in a pool a KV head, beside the pages. A token's 16-bit ``slot`` says where: one
indirection, which unlike a page's bitmask and base leaves a page free to gain outliers one token at
a time, as decode does. Slots are taken from a stack by ``append_quantized_kv`` and go back when
``release_residual_slots`` frees their page. A position that has a slot keeps it until then: what is
appended there again overwrites the residual, whatever its e. Where the stack is empty the residual
is left out and counted in ``dropped``. A dynamic scale of a token that has a slot is stored below
0, and so attention knows outliers by what it reads anyway.

Block scales are e8m0 and E2M1 is FP4 as in "OCP Microscaling Formats (MX) v1.0"; E3M0 and E1M2 (a
4-bit integer with sign) are its neighbours. All arithmetic is fp32. Everything here is plain
PyTorch, and the truth for kernels: ``append_quantized_kv``, ``release_residual_slots``,
``fp4_dequant`` and ``paged_attn_quantized``.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from tkernels.check import describe

MODES = ("none", "int8", "int8_static", "int8_fp4", "int8_static_fp4")
NO_SLOT = -1  # 0xFFFF: slots are unsigned 16-bit numbers in an int16 tensor
MOST_SLOTS = 0xFFFF
# Slots a KV head where none are asked for: a share of the positions (for 4% outliers, and an eighth
# more), and of few positions so many, as outliers come in bunches: a prompt's first tokens, say.
SHARE = 0.045
LEAST_SLOTS = 32

# Mantissa bits of each 4-bit format. The lower three bits of a code are exponent and mantissa; they
# go where fp32 has its own, and times 2^126 that is the magnitude, subnormal ones included:
# E1M2 0, .25, .5, .. 1.75; E2M1 0, .5, 1, 1.5, 2, 3, 4, 6; E3M0 0, 1, 2, 4, .. 64. Bit 3: sign.
MANTISSA_BITS = {"e1m2": 2, "e2m1": 1, "e3m0": 0}
FORMATS = {bits: name for name, bits in MANTISSA_BITS.items()}
LARGEST = {"e1m2": 1.75, "e2m1": 6.0, "e3m0": 64.0}


class QuantizedKV(NamedTuple):
    """K, or V, of one layer. Without residuals the last eight fields are None."""

    codes: torch.Tensor  # int8 [num_blocks, block_size, num_kv_heads, head_dim], last contiguous
    scale: torch.Tensor  # fp32 [num_blocks, num_kv_heads, block_size], -scale where a token has a
    # slot; static [num_kv_heads, head_dim]
    slots: torch.Tensor | None = None  # int16 [num_blocks, num_kv_heads, block_size], -1 = none
    residual: torch.Tensor | None = None  # uint8 [num_kv_heads, num_slots, head_dim / 2]
    residual_scale: torch.Tensor | None = None  # uint8 [num_kv_heads, num_slots, head_dim / block]
    free_slots: torch.Tensor | None = None  # int32 [num_kv_heads, num_slots], a stack
    free_count: torch.Tensor | None = None  # int32 [num_kv_heads], its height
    dropped: torch.Tensor | None = None  # int32 [num_kv_heads], residuals that found no slot
    tau: torch.Tensor | None = None  # fp32 [num_kv_heads]
    residual_format: str = "e2m1"

    @property
    def is_static(self) -> bool:
        """Whether the scales are a channel's, from calibration."""
        return self.scale.dim() == 2

    @property
    def has_residual(self) -> bool:
        return self.slots is not None

    @property
    def mode(self) -> str:
        """The entry of ``MODES``."""
        return "int8" + "_static" * self.is_static + "_fp4" * self.has_residual

    def tensors(self) -> dict[str, torch.Tensor]:
        """The fields that are tensors, by name."""
        return {n: t for n, t in self._asdict().items() if isinstance(t, torch.Tensor)}

    def num_bytes(self) -> int:
        """All bytes held: codes, scales, slots, pool, stack, counters, tau."""
        return sum(t.numel() * t.element_size() for t in self.tensors().values())

    def bytes_per_token(self) -> float:
        """``num_bytes`` over positions and KV heads; a bf16 cache has 2 * head_dim."""
        num_blocks, block_size, num_kv_heads, _ = self.codes.shape
        return self.num_bytes() / (num_blocks * block_size * num_kv_heads)


POOL = {
    "slots": torch.int16,
    "residual": torch.uint8,
    "residual_scale": torch.uint8,
    "free_slots": torch.int32,
    "free_count": torch.int32,
    "dropped": torch.int32,
    "tau": torch.float32,
}
FIELDS = {"codes": torch.int8, "scale": torch.float32, **POOL}


def fields(cache: QuantizedKV) -> tuple[torch.Tensor, ...]:
    """The nine tensors of ``cache`` in order, empty ones for those that it does without."""
    if cache.slots is not None:
        return cache[:9]  # type: ignore[return-value]  # all there, or none but two
    where = cache.codes.device
    # Tensors of a trace must not outlive it.
    lasting = type(cache.codes) is torch.Tensor and not torch.compiler.is_compiling()
    rest = _nothing.get(where) if lasting else None
    if rest is None:
        rest = tuple(torch.empty(0, dtype=dtype, device=where) for dtype in POOL.values())
        if lasting:
            _nothing[where] = rest
    return (cache.codes, cache.scale, *rest)


_nothing: dict[torch.device, tuple[torch.Tensor, ...]] = {}


def allocate_quantized(
    num_blocks: int,
    block_size: int,
    num_kv_heads: int,
    head_dim: int,
    *,
    mode: str = "int8_fp4",
    tau: float | torch.Tensor | None = None,
    static_scale: torch.Tensor | None = None,
    outlier_share: float | None = None,
    residual_format: str | None = None,
    residual_block: int | None = None,
    device: torch.device | str | None = None,
) -> QuantizedKV:
    """An empty cache.

    Args:
        num_blocks: blocks of ``block_size`` tokens; 0 is an empty cache.
        block_size, num_kv_heads, head_dim: 1 or more; head_dim divides by 32 for residuals.
        mode: what a token and KV head has, head_dim codes of 8 bits in each:
            int8: a scale of its own, from its largest number;
            int8_static: none, as each channel has one from calibration;
            int8_fp4: as int8, and the rounding errors in 4 bits where they are large;
            int8_static_fp4: as int8_static, and such errors.
            ("none", the fifth of ``MODES``, is a cache that is not quantised, which is none.)
        tau: for residuals, how large an error e is large: a number, or [num_kv_heads] of them, from
            calibration.
        static_scale: for static modes: fp32 [num_kv_heads, head_dim], all above 0 (which would have
            to be waited for, and is not looked at), copied.
        outlier_share: slots in the pool, as a share of positions; at most 65535 a KV head. None is
            0.045, and at least 32 slots, or one a position where there are fewer.
        residual_format: of ``MANTISSA_BITS``; None is e2m1.
        residual_block: channels that share a scale, 16 or 32; None is 32 where head_dim / 2 has
            whole blocks of it, and 16 elsewhere.

    Raises:
        ValueError: a value out of range, one that the mode wants and that is missing, or one that
            it does not use.
    """
    name = "allocate_quantized"
    if mode not in MODES[1:]:
        raise ValueError(f"{name}: mode must be one of {', '.join(MODES[1:])}, got {mode!r}")
    _check_used(
        mode,
        {"static_scale": static_scale},
        {
            "tau": tau,
            "outlier_share": outlier_share,
            "residual_format": residual_format,
            "residual_block": residual_block,
        },
    )
    sizes = {"block_size": block_size, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
    for argument, size in {"num_blocks": num_blocks, **sizes}.items():
        least = 0 if argument == "num_blocks" else 1
        if type(size) is not int or size < least:
            raise ValueError(f"{name}: {argument} must be an int from {least} on, got {size!r}")
    shape = (num_blocks, num_kv_heads, block_size)
    codes = torch.zeros(
        (num_blocks, block_size, num_kv_heads, head_dim), dtype=torch.int8, device=device
    )
    if "static" in mode:
        wanted = (num_kv_heads, head_dim)
        if not isinstance(static_scale, torch.Tensor) or static_scale.shape != wanted:
            raise ValueError(
                f"{name}: static_scale must be fp32 [num_kv_heads={num_kv_heads}, "
                f"head_dim={head_dim}] for mode {mode}, got {describe(static_scale)}"
            )
        scale = static_scale.to(codes.device, torch.float32, copy=True)
    else:
        scale = torch.zeros(shape, dtype=torch.float32, device=device)
    if "fp4" not in mode:
        return QuantizedKV(codes, scale)
    if tau is None:
        raise ValueError(f"{name}: tau must be given for mode {mode}, got None")
    if isinstance(tau, torch.Tensor):
        good = tau.dim() <= 1 and tau.numel() in (1, num_kv_heads)
    else:
        good = _is_number(tau)
    if not good:
        raise ValueError(
            f"{name}: tau must be a number or fp32 [num_kv_heads={num_kv_heads}], "
            f"got {describe(tau)}"
        )
    if outlier_share is not None and not (
        _is_number(outlier_share) and 0 < outlier_share < math.inf
    ):
        raise ValueError(f"{name}: outlier_share must be a number above 0, got {outlier_share!r}")
    if head_dim % 32:
        raise ValueError(f"{name}: head_dim must divide by 32 for mode {mode}, got {head_dim}")
    residual_format = "e2m1" if residual_format is None else residual_format
    if residual_format not in MANTISSA_BITS:
        raise ValueError(
            f"{name}: residual_format must be one of {', '.join(MANTISSA_BITS)}, "
            f"got {residual_format!r}"
        )
    block = residual_block
    if block is None:
        block = 32 if head_dim % 64 == 0 else 16
    if block not in (16, 32) or head_dim % (2 * block):
        raise ValueError(
            f"{name}: residual_block must be 16 or 32 and divide head_dim / 2 = {head_dim / 2:g}, "
            f"got {block}"
        )
    n = _num_slots(outlier_share, num_blocks * block_size)
    threshold = tau if isinstance(tau, torch.Tensor) else torch.tensor(float(tau))
    taus = torch.empty(num_kv_heads, dtype=torch.float32, device=device)
    return QuantizedKV(
        codes,
        scale,
        slots=torch.full(shape, NO_SLOT, dtype=torch.int16, device=device),
        residual=torch.zeros(num_kv_heads, n, head_dim // 2, dtype=torch.uint8, device=device),
        residual_scale=torch.zeros(
            num_kv_heads, n, head_dim // block, dtype=torch.uint8, device=device
        ),
        free_slots=torch.arange(n, dtype=torch.int32, device=device).repeat(num_kv_heads, 1),
        free_count=torch.full((num_kv_heads,), n, dtype=torch.int32, device=device),
        dropped=torch.zeros(num_kv_heads, dtype=torch.int32, device=device),
        tau=taus.copy_(threshold.expand(num_kv_heads)),
        residual_format=residual_format,
    )


def _check_used(mode: str, static: dict[str, object], residual: dict[str, object]) -> None:
    """Raise ValueError where an argument is given that only other modes look at."""
    for part, words, given in (("static", "a static", static), ("fp4", "an fp4", residual)):
        for argument, value in given.items():
            if value is not None and part not in mode:
                raise ValueError(
                    f"allocate_quantized: {argument} must be None for mode {mode}, as only "
                    f"{words} mode uses it, got {describe(value)}"
                )


def _num_slots(share: float | None, positions: int) -> int:
    """Slots in the pool of a KV head."""
    least = min(LEAST_SLOTS, positions) if share is None else 1
    wanted = round((SHARE if share is None else share) * positions)
    return min(MOST_SLOTS, max(1, least, wanted))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


# ---- int8 ------------------------------------------------------------------------------------


LEAST_ABSMAX = 2.0**-100  # below it 127 / absmax could overflow: such a vector counts as zero
LEAST_SCALE = 2.0**-126  # below it 1 / scale could overflow: all of such a channel counts as zero


def quantize_ref(
    x: torch.Tensor, static_scale: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """``(codes int8, scale, rest, error)`` of x [..., num_kv_heads, head_dim].

    scale is [..., num_kv_heads] where it is dynamic, else ``static_scale`` [num_kv_heads,
    head_dim]. ``rest`` is x / scale - code, fp32, and ``error`` e, fp32 [..., num_kv_heads].

    x / scale is computed as x * (127 / absmax) where the scale is dynamic, and as x * (1 / scale)
    where it is static, each quotient and each product rounded to fp32: a division a vector, or a
    channel, and none a number.
    """
    x = x.float()
    if static_scale is None:
        absmax = x.abs().amax(-1, keepdim=True)
        absmax = torch.where(absmax < LEAST_ABSMAX, 0.0, absmax)
        full = absmax * (1.0 / 127.0)
        scale = full[..., 0] + (x * 0.0).sum(-1)  # NaN where a number is infinite or none
        most = torch.full_like(absmax, 127.0)  # a number / tensor is a product in torch
        steps = x * torch.where(absmax > 0, most / absmax, 0.0)
    else:
        scale = full = static_scale
        usable = scale >= LEAST_SCALE
        one = torch.ones_like(scale, dtype=torch.float32)
        steps = x * torch.where(usable, one / torch.where(usable, scale, one), 0.0)
    rounded = steps.clamp(-127.0, 127.0).round()  # half to even
    rest = steps - rounded
    # A dynamic scale cancels, and so do sizes whose squares would leave fp32.
    lost, whole = (rest, steps) if static_scale is None else (rest * full, x)
    square = whole.square().sum(-1)
    error = torch.where(square > 0, (lost.square().sum(-1) / square).sqrt(), 0.0)
    return rounded.to(torch.int8), scale, rest, error


# ---- 4-bit block floats ----------------------------------------------------------------------


def _bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.int32)


def _float(bits: torch.Tensor) -> torch.Tensor:
    return bits.to(torch.int32).view(torch.float32)


def fp4_quantize_ref(
    x: torch.Tensor, *, residual_format: str = "e2m1", block: int = 32
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(packed uint8 [..., D / 2], scale uint8 [..., D / block])`` of x [..., D].

    Byte j holds channel j in its low half and channel j + D / 2 in its high half. A block's scale
    is the least power of two with which its largest magnitude does not exceed the format's.
    Values go to the nearest code, and to the even one from the middle (E3M0: to the larger one).
    """
    x = x.float()
    blocks = x.reshape(*x.shape[:-1], x.shape[-1] // block, block)
    amax = blocks.abs().amax(-1)
    exponent = ((_bits(amax * (1.0 / LARGEST[residual_format])) + 0x7FFFFF) >> 23).clamp(1, 253)
    small = blocks.abs() * _float((254 - exponent) << 23)[..., None]
    small = small.clamp_max(LARGEST[residual_format])
    magnitude = _encode(small, residual_format)
    code = torch.where(blocks < 0, magnitude | 8, magnitude).flatten(-2)
    low, high = code.chunk(2, dim=-1)
    return (low | high << 4).to(torch.uint8), exponent.to(torch.uint8)


def _encode(a: torch.Tensor, residual_format: str) -> torch.Tensor:
    """Magnitude codes 0..7 of a >= 0, at most the format's largest."""
    mantissa = MANTISSA_BITS[residual_format]
    if mantissa == 0:
        nearest = ((_bits(a) + 0x400000) >> 23) - 126
        return torch.where(a > 0.5, nearest.clamp_min(1), 0)
    # Steps double with the exponent; below 1 they stay (subnormal numbers).
    exponent = (_bits(a) >> 23).clamp_min(127)
    magic = (exponent + (23 - mantissa)) << 23  # a float whose last bit is one step
    steps = _bits(a + _float(magic)) - magic
    return ((exponent - 127) << mantissa) + steps


def fp4_dequantize_ref(
    packed: torch.Tensor, scale: torch.Tensor, *, residual_format: str = "e2m1"
) -> torch.Tensor:
    """fp32 [..., D] of ``fp4_quantize_ref``'s results."""
    code = torch.cat([packed & 15, packed >> 4], dim=-1).int()
    magnitude = _float((code & 7) << (23 - MANTISSA_BITS[residual_format]))
    magnitude = magnitude * 2.0**126
    value = torch.where(code & 8 != 0, -magnitude, magnitude)
    block = code.shape[-1] // scale.shape[-1]
    return value * _float(scale.int() << 23).repeat_interleave(block, dim=-1)


# ---- the cache -------------------------------------------------------------------------------


def append_quantized_ref(x: torch.Tensor, cache: QuantizedKV, slot_mapping: torch.Tensor) -> None:
    """Write x [n_tokens, num_kv_heads, head_dim] to positions ``slot_mapping`` [n_tokens].

    Positions below 0 and past the pool are skipped, the others must differ. Pool slots are taken in
    the order of tokens.
    """
    num_blocks, block_size = cache.codes.shape[:2]
    kept = (slot_mapping >= 0) & (slot_mapping < num_blocks * block_size)
    positions = slot_mapping[kept].long()
    block, offset = positions // block_size, positions % block_size
    static = cache.scale if cache.is_static else None
    codes, scale, rest, error = quantize_ref(x[kept], static)
    cache.codes[block, offset] = codes
    if static is None:
        cache.scale[block, :, offset] = scale
    if cache.slots is None:
        return
    assert cache.residual is not None
    assert cache.residual_scale is not None
    assert cache.free_slots is not None
    assert cache.free_count is not None
    assert cache.dropped is not None
    assert cache.tau is not None
    residual_block = codes.shape[-1] // cache.residual_scale.shape[-1]
    packed, packed_scale = fp4_quantize_ref(
        rest, residual_format=cache.residual_format, block=residual_block
    )
    for head in range(codes.shape[1]):
        slot = cache.slots[block, head, offset].int()
        wanted = (error[:, head] > cache.tau[head]) & (slot == NO_SLOT)
        found, free = wanted.nonzero()[:, 0], int(cache.free_count[head])
        taken = found[:free]
        top = free - torch.arange(len(taken), device=found.device) - 1
        slot[taken] = cache.free_slots[head, top]
        cache.free_count[head] -= len(taken)
        cache.dropped[head] += len(found) - len(taken)
        cache.slots[block, head, offset] = slot.to(torch.int16)
        rows = slot != NO_SLOT
        if static is None:
            cache.scale[block, head, offset] = torch.where(rows, -scale[:, head], scale[:, head])
        row = slot[rows].long() & 0xFFFF
        cache.residual[head, row] = packed[rows, head]
        cache.residual_scale[head, row] = packed_scale[rows, head]


def release_slots_ref(
    slots: torch.Tensor, free_slots: torch.Tensor, free_count: torch.Tensor, blocks: torch.Tensor
) -> None:
    """Give the pool slots of ``blocks`` [n_blocks] (-1 = none) back."""
    inside = blocks[(blocks >= 0) & (blocks < slots.shape[0])]
    freed = inside.new_tensor(sorted(set(inside.tolist())), dtype=torch.int64)
    for head in range(slots.shape[1]):
        given = slots[freed, head].flatten()
        given = given[given != NO_SLOT].int() & 0xFFFF
        count = int(free_count[head])
        free_slots[head, count : count + len(given)] = given
        free_count[head] += len(given)
        slots[freed, head] = NO_SLOT


def release_residuals_ref(cache: QuantizedKV, blocks: torch.Tensor) -> None:
    """``release_slots_ref`` of a cache; one without residuals has nothing to give back."""
    if cache.slots is not None and cache.free_slots is not None and cache.free_count is not None:
        release_slots_ref(cache.slots, cache.free_slots, cache.free_count, blocks)


def dequantize_cache(cache: QuantizedKV, *, residuals: bool = True) -> torch.Tensor:
    """fp32 [num_blocks, block_size, num_kv_heads, head_dim]: what attention reads."""
    values = read_positions(cache, slice(None), residuals=residuals)
    return values.view(cache.codes.shape)


def read_positions(
    cache: QuantizedKV, positions: torch.Tensor | slice, *, residuals: bool = True
) -> torch.Tensor:
    """fp32 [..., num_kv_heads, head_dim] of positions [...]: block * block_size + place in it."""
    values = cache.codes.flatten(0, 1)[positions].float()
    if residuals and cache.slots is not None:
        assert cache.residual is not None
        assert cache.residual_scale is not None
        slots = cache.slots.transpose(1, 2).flatten(0, 1)[positions]
        held = slots != NO_SLOT
        if not cache.is_static:
            held &= cache.scale.transpose(1, 2).flatten(0, 1)[positions] < 0
        row = torch.where(held, slots.long() & 0xFFFF, 0)
        head = torch.arange(row.shape[-1], device=row.device)
        rows = fp4_dequantize_ref(
            cache.residual[head, row],
            cache.residual_scale[head, row],
            residual_format=cache.residual_format,
        )
        values = torch.where(held[..., None], values + rows, values)  # stale rows may be NaN
    if cache.is_static:
        return values * cache.scale
    return values * cache.scale.abs().transpose(1, 2).flatten(0, 1)[positions][..., None]
