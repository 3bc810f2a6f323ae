"""Inputs of captured steps in one buffer: where fields lie, and what a step leaves in them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from graphs import stand_in

from model import graph, pieces, prompt_graphs
from model.staging import ALIGNMENT, Field, Layout, Side, Staging, bytes_of

BLOCKS = 5
PROMPTS = ((2, 0), (7, 2), (64, 9))  # tokens, and sequences beside
LAYOUTS = {
    **{f"graph-{n}": graph._layout(n, BLOCKS) for n in (1, 3, 64)},
    **{f"pieces-{n}": pieces._layout(n, 3, BLOCKS) for n in (16, 48)},
    **{f"prompt-{n}-{beside}": prompt_graphs._layout(n, beside, BLOCKS) for n, beside in PROMPTS},
}


@pytest.fixture(autouse=True)
def _host() -> Iterator[None]:
    with stand_in():
        yield


def new_staging(layouts: dict[int, Layout]) -> Staging:
    return Staging(layouts, torch.zeros(bytes_of(layouts), dtype=torch.uint8))


@pytest.mark.parametrize("name", LAYOUTS)
def test_fields_lie_apart_and_aligned(name: str) -> None:
    """What one holds of a buffer is nobody else's."""
    layout = LAYOUTS[name]
    flat = torch.zeros(layout.num_bytes + 8, dtype=torch.uint8)
    views = layout.views(flat)
    assert list(views) == list(layout.fields)
    for field, view in views.items():
        assert view.is_contiguous()
        assert (view.dtype, view.shape) == (layout.fields[field].dtype, layout.fields[field].shape)
        assert (view.data_ptr() - flat.data_ptr()) % ALIGNMENT == 0 or view.numel() == 0
        assert not flat.any()
        view.view(torch.uint8).fill_(1)
        assert int(flat.sum()) == view.nbytes
        flat.zero_()
    for view in views.values():
        view.view(torch.uint8).add_(1)
    assert int(flat.max()) == 1
    assert not flat[layout.num_bytes :].any()
    assert layout.num_bytes % ALIGNMENT == 0


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_copy_may_end_behind_any_row(name: str) -> None:
    layout = LAYOUTS[name]
    for field, (dtype, shape) in ((n, (f.dtype, f.shape)) for n, f in layout.fields.items()):
        for rows in {0, 1, shape[0]} - ({1} if shape[0] < 1 else set()):
            flat = torch.zeros(layout.num_bytes, dtype=torch.uint8)
            flat[: layout.end_of(field, rows)] = 1
            view = layout.views(flat)[field].view(torch.uint8)
            assert int(view.sum()) == rows * dtype.itemsize * int(np.prod(shape[1:]))
            assert view[:rows].all()


def layout_of(rows: int) -> Layout:
    return Layout(
        {
            "ids": Field(torch.int64, (rows,)),
            "slots": Field(torch.int64, (rows,), -1),
            "share": Field(torch.float32, (rows,), 1),
            "table": Field(torch.int32, (rows, 3), None),
        }
    )


def step_of(rows: int, columns: int, value: int) -> dict[str, Any]:
    return {
        "ids": np.full(rows, value),
        "slots": np.full(rows, value + 1),
        "share": np.full(rows, value + 0.5, np.float32),
        "table": np.full((rows, columns), value + 2, np.int32),
    }


@pytest.mark.parametrize(
    ("wide", "narrow"), [*itertools.product((2, 4, 7), repeat=2)], ids=lambda n: str(n)
)
def test_nothing_of_a_wider_step_is_left_in_a_narrower(wide: int, narrow: int) -> None:
    """Of the same size or another: what a step does not give is padding, on the device too."""
    staging = new_staging({n: layout_of(n) for n in (2, 4, 7)})
    for side in staging.sides:
        side.fill(wide, step_of(wide, 3, 40))
        staging.copy(side, staging.layouts[wide].num_bytes)
    for number, rows in enumerate((1, 0, narrow)):
        side = staging.side(number)
        side.fill(narrow, step_of(rows, 2, 8))
        staging.copy(side, staging.layouts[narrow].num_bytes)
        at, behind = staging.inputs[narrow], narrow - rows
        assert at["ids"].tolist() == [8] * rows + [0] * behind
        assert at["slots"].tolist() == [9] * rows + [-1] * behind
        assert at["share"].tolist() == [8.5] * rows + [1] * behind
        assert at["table"][:rows, :2].tolist() == [[10, 10]] * rows
    side.fill(narrow, {"ids": np.full(1, 3)})  # a field that is not given at all
    assert side.arrays[narrow]["slots"].tolist() == [-1] * narrow
    assert side.arrays[narrow]["ids"].tolist() == [3] + [0] * (narrow - 1)


def test_padding_for_a_capture_fills_tables_too() -> None:
    staging = new_staging({n: layout_of(n) for n in (7, 2)})
    staging.flat.fill_(9)
    for side in staging.sides:
        side.flat.fill_(9)
    staging.pad(2)
    padding = {"ids": [0, 0], "slots": [-1, -1], "share": [1, 1], "table": [[0] * 3] * 2}
    assert {name: t.tolist() for name, t in staging.inputs[2].items()} == padding
    assert set(staging.flat[staging.layouts[2].num_bytes :].tolist()) == {9}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_side_has_what_the_device_has(name: str) -> None:
    """Each field of the host goes to the same field of the device, in one copy, and no further."""
    layout = LAYOUTS[name]
    staging = Staging({1: layout}, torch.full((layout.num_bytes + 64,), 5, dtype=torch.uint8))
    side = staging.side(0)
    for number, array in enumerate(side.arrays[1].values()):
        array[:] = number + 1
    staging.copy(side, layout.num_bytes)
    for number, t in enumerate(staging.inputs[1].values()):
        assert (t == number + 1).all()
    assert (staging.flat[layout.num_bytes :] == 5).all()
    assert not staging.sides[1].flat.any()


def test_sides_take_turns_and_wait() -> None:
    staging = new_staging({2: layout_of(2)})
    first, second = staging.side(0), staging.side(1)
    assert first is not second
    first.event.record()
    second.event.record()
    assert staging.side(2) is first
    assert (first.event.done, second.event.done) == (True, False)
    assert staging.side(3) is second
    assert second.event.done


def test_more_than_a_field_holds_is_refused() -> None:
    side = Side({2: layout_of(2)}, layout_of(2).num_bytes)
    for given in ({"ids": np.arange(3)}, {"table": np.zeros((2, 4))}, {"table": np.zeros((3, 3))}):
        with pytest.raises(ValueError, match="broadcast"):
            side.fill(2, given)
