"""Inputs of a captured step: named fields in one buffer, which a copy brings to the device.

    arrays of a step -> side, on the host -> one copy -> buffer on the device -> graph

A graph reads where its inputs lay at its capture, so the device has one buffer, made once, in which
each size of step has its fields at places of their own. Sizes share the bytes: what a step neither
gives nor pads is what an earlier one of any size left there.

The host has two sides, which take turns, so that one is filled while the device may still read the
other. Whoever launches steps records a side's event behind the last that the device does with it;
``Staging.side`` waits for that before the side is filled again. All copies and replays go to one
stream, which orders them. A step allocates no memory.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt
import torch

from tkernels import device

Array = npt.NDArray[Any]

ALIGNMENT = 64  # bytes between which fields begin; Triton wants 16


@dataclass(frozen=True)
class Field:
    """An input. ``padding`` is written behind what a step gives; None: nothing, nor is it read."""

    dtype: torch.dtype
    shape: tuple[int, ...]  # its rows first
    padding: int | None = 0

    @property
    def row_bytes(self) -> int:
        return math.prod(self.shape[1:]) * self.dtype.itemsize


class Layout:
    """Where the fields of a size begin in a buffer of bytes: in order, each at 64 bytes.

    Attributes:
        num_bytes: of all fields, a multiple of 64.
    """

    def __init__(self, fields: Mapping[str, Field]) -> None:
        self.fields, self.num_bytes = dict(fields), 0
        self._places: dict[str, tuple[int, int]] = {}  # where a field begins, bytes of its rows
        for name, field in fields.items():
            self._places[name] = self.num_bytes, field.row_bytes
            self.num_bytes += -(-field.shape[0] * field.row_bytes // ALIGNMENT) * ALIGNMENT

    def end_of(self, name: str, rows: int) -> int:
        """Bytes from the buffer's beginning to the end of a field's first ``rows`` rows."""
        begin, row_bytes = self._places[name]
        return begin + rows * row_bytes

    def views(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """The fields in a buffer, uint8 [num_bytes or more]."""
        return {
            name: flat[self.end_of(name, 0) : self.end_of(name, field.shape[0])]
            .view(field.dtype)
            .view(field.shape)
            for name, field in self.fields.items()
        }


class Side:
    """Host memory of one step's inputs.

    Attributes:
        flat: uint8, pinned.
        event: to be recorded behind the last that the device does with it.
        arrays: the fields of each size in ``flat``.
    """

    def __init__(self, layouts: Mapping[int, Layout], num_bytes: int) -> None:
        self.flat = device.pinned(num_bytes).zero_()
        self.event = device.event()
        self.arrays: dict[int, dict[str, Array]] = {
            size: {name: t.numpy() for name, t in layout.views(self.flat).items()}
            for size, layout in layouts.items()
        }
        self._fields = {
            size: {
                name: (array, array.ndim == 2, len(array), layouts[size].fields[name].padding)
                for name, array in arrays.items()
            }
            for size, arrays in self.arrays.items()
        }

    def fill(self, size: int, given: Mapping[str, Array]) -> None:
        """Write what a step gives to the front of each field, and padding behind it.

        Args:
            given: up to as many rows as the field has, and columns, which are not padded. A field
                that is not given is padding.
        """
        fields = self._fields[size]
        for name, values in given.items():
            array, is_table, rows, padding = fields[name]
            count = len(values)
            if is_table:
                array[:count, : values.shape[1]] = values
            else:
                array[:count] = values
            if count < rows and padding is not None:
                array[count:] = padding
        if len(given) < len(fields):
            for name, (array, _, _, padding) in fields.items():
                if padding is not None and name not in given:
                    array[:] = padding

    def pad(self, size: int) -> None:
        """Write padding to all of each field, 0 where it has none."""
        for array, _, _, padding in self._fields[size].values():
            array[:] = padding or 0


class Staging:
    """Inputs of steps of several sizes.

    Args:
        layouts: of each size.
        flat: uint8 on the device, for the largest of them (``bytes_of``).

    Attributes:
        inputs: the fields of each size on the device.
    """

    def __init__(self, layouts: Mapping[int, Layout], flat: torch.Tensor) -> None:
        self.layouts, self.flat = layouts, flat
        self.inputs = {size: layout.views(flat) for size, layout in layouts.items()}
        self.sides = [Side(layouts, len(flat)) for _ in range(2)]

    def side(self, number: int) -> Side:
        """The side of the step of that number, once the step before the last is done with it."""
        side = self.sides[number % 2]
        side.event.synchronize()
        return side

    def copy(self, side: Side, num_bytes: int) -> None:
        """Launch the copy of a side's first bytes to the device."""
        self.flat[:num_bytes].copy_(side.flat[:num_bytes], non_blocking=True)

    def pad(self, size: int) -> None:
        """Bring padding alone to the device, and wait: for captures, before the first step."""
        side, num_bytes = self.sides[0], self.layouts[size].num_bytes
        side.pad(size)
        self.flat[:num_bytes].copy_(side.flat[:num_bytes])


def bytes_of(layouts: Mapping[int, Layout]) -> int:
    """Of a buffer that holds any of them."""
    return max(layout.num_bytes for layout in layouts.values())
