"""Argument checks that answer with one sentence: op, argument, what was expected, what came.

They look at metadata only (shape, dtype, stride, device), so they never wait for the device and are
always on. Checks of values, which do wait, belong under ``if check.DEBUG``: TKERNELS_DEBUG switches
them, and unless it is set they are on where kernels run in Triton's interpreter. There is no device
to wait for there, and an index out of range may end Python without a word.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from tkernels import device

_SWITCH = {"0": False, "no": False, "false": False, "1": True, "yes": True, "true": True}


def _debug() -> bool:
    """What TKERNELS_DEBUG says, or else what suits this device."""
    asked = os.environ.get("TKERNELS_DEBUG", "")
    if not asked:
        return device.INTERPRETED
    if asked.lower() not in _SWITCH:
        raise ValueError(
            f"tkernels: TKERNELS_DEBUG must be one of {', '.join(_SWITCH)}, got {asked!r}"
        )
    return _SWITCH[asked.lower()]


DEBUG = _debug()
INDEX_DTYPES = (torch.int32, torch.int64)
FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def describe(value: object) -> str:
    """``int64 [4, 9]`` for a tensor, ``'x' (str)`` style for anything else."""
    if isinstance(value, torch.Tensor):
        return f"{_short(value.dtype)} {list(value.shape)}"
    text = " ".join(repr(value).split())  # an array's takes several lines
    return f"{text if len(text) <= 80 else text[:77] + '...'} ({type(value).__name__})"


def check_tensor(op: str, name: str, t: torch.Tensor) -> None:
    """``t`` is a tensor that a kernel launched now can reach."""
    if not isinstance(t, torch.Tensor):
        raise TypeError(f"{op}: {name} must be a tensor, got {describe(t)}")
    if t.layout is not torch.strided:
        layout = str(t.layout).removeprefix("torch.")
        raise ValueError(f"{op}: {name} must be dense, got {describe(t)} of layout {layout}")
    if t.device.type != device.tensor_device().type:
        raise ValueError(
            f"{op}: {name} must be on device type {device.tensor_device().type!r}, "
            f"got {str(t.device)!r}"
        )
    if device.MULTI_DEVICE and t.device.index != device.current_index():
        raise ValueError(
            f"{op}: {name} must be on the current device (index {device.current_index()}), got "
            f"{str(t.device)!r}; make that device current around the call"
        )


def check_dtype(op: str, name: str, t: torch.Tensor, allowed: Sequence[torch.dtype]) -> None:
    """``t.dtype`` is one of ``allowed``."""
    if t.dtype not in allowed:
        names = " or ".join(_short(d) for d in allowed)
        raise ValueError(f"{op}: {name} must be {names}, got {describe(t)}")


def check_shape(op: str, name: str, t: torch.Tensor, **dims: int | None) -> None:
    """``t`` has exactly these dimensions, in order; ``None`` accepts any size.

    >>> check_shape("rope", "q", torch.zeros(9, 32, 128), tokens=None, heads=None, head_dim=128)
    >>> check_shape("rope", "q", torch.zeros(9, 32, 64), tokens=None, heads=None, head_dim=128)
    Traceback (most recent call last):
    ...
    ValueError: rope: q must have shape [tokens, heads, head_dim=128], got float32 [9, 32, 64]
    """
    shape = t.shape
    if len(shape) == len(dims) and all(
        want is None or got == want for got, want in zip(shape, dims.values(), strict=True)
    ):
        return
    wanted = ", ".join(n if v is None else f"{n}={v}" for n, v in dims.items())
    raise ValueError(f"{op}: {name} must have shape [{wanted}], got {describe(t)}")


def check_last_contiguous(op: str, name: str, t: torch.Tensor) -> None:
    """Neighbouring elements of the last dimension are neighbours in memory."""
    shape = t.shape
    if shape and shape[-1] > 1 and t.stride(-1) != 1:
        raise ValueError(
            f"{op}: {name} must be contiguous in its last dimension (stride 1), "
            f"got strides {list(t.stride())} for shape {list(t.shape)}"
        )


def check_contiguous(op: str, name: str, t: torch.Tensor) -> None:
    """All elements lie one after the other."""
    if not t.is_contiguous():
        raise ValueError(
            f"{op}: {name} must be contiguous, "
            f"got strides {list(t.stride())} for shape {list(t.shape)}"
        )


def check_no_overlap(op: str, name: str, t: torch.Tensor) -> None:
    """``t`` will be written, so no two elements may share memory (as expand() or unfold() makes).

    Asks that each stride steps over all that the smaller ones reach.
    """
    reach = 0
    for stride, n in sorted(zip(t.stride(), t.shape, strict=True)):
        if n > 1 and stride <= reach:
            raise ValueError(
                f"{op}: {name} must not repeat memory, "
                f"got strides {list(t.stride())} for shape {list(t.shape)}"
            )
        reach += (n - 1) * stride


def one_for_both(op: str, name: str, other: str) -> ValueError:
    """The error where ``name`` and ``other`` are one tensor, and one result would be lost."""
    return ValueError(f"{op}: {name} must be another tensor than {other}, got one for both")


def check_own(op: str, name: str, t: torch.Tensor, **read: torch.Tensor) -> None:
    """The output ``t`` is none of the tensors that other programs still read."""
    for other, tensor in read.items():
        if t is tensor:
            raise ValueError(
                f"{op}: {name} must be a tensor of its own, since other programs still read "
                f"{' and '.join(read)}, got {other}"
            )


def check_positive(op: str, name: str, value: float) -> None:
    """``value`` is a number above zero that fp32 can hold."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 3e38:
        raise ValueError(f"{op}: {name} must be a number > 0, got {describe(value)}")


def new_output(
    op: str, x: torch.Tensor, shape: Sequence[int] | None = None, *, name: str = "x"
) -> torch.Tensor:
    """An uninitialised contiguous tensor like ``x``; of its shape too unless one is given."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{op}: {name} must be a tensor, got {describe(x)}")
    return torch.empty(x.shape if shape is None else shape, dtype=x.dtype, device=x.device)
