"""What the tests of several bodies of matrix products hold them to, on a GPU."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from tkernels import device
from tkernels.registry import Config, KernelSpec, Problem
from tkernels.testing import assert_right, tensors_of


def are_right(spec: KernelSpec, drawn: Iterable[tuple[Problem, Config]], dev: torch.device) -> None:
    """Each problem by its config; what fails is named."""
    for problem, config in drawn:
        inputs = spec.make_inputs(problem, dev)
        try:
            assert_right(spec, inputs, tensors_of(spec.launch(**inputs, config=config)))
        except AssertionError as error:
            raise AssertionError(f"{problem} with {config}: {error}") from None


def spoils_its_row_alone(
    spec: KernelSpec, inputs: Mapping[str, Any], config: Config, value: float
) -> None:
    """``value`` in row 5 of x: all of that row is bad, and no bit of another is a different one."""
    before = spec.launch(**inputs, config=config)
    inputs["x"][5, 77] = value
    got = spec.launch(**inputs, config=config)
    others = [r for r in range(len(got)) if r != 5]
    assert not got[5].isfinite().any()
    assert torch.equal(got[others], before[others])


def has_the_same_bits_again(spec: KernelSpec, inputs: Mapping[str, Any], config: Config) -> None:
    """Also by a captured graph, whose kernels follow one another at once."""
    first = spec.launch(**inputs, config=config)
    out = torch.full_like(first, math.nan)
    graph = device.new_graph()
    with device.capture(graph):
        for _ in range(20):
            spec.launch(**inputs, config=config, out=out)
    graph.replay()
    assert torch.equal(first, out)
    inputs["x"].copy_(inputs["x"].flip(0))
    graph.replay()
    assert torch.equal(first.flip(0), out)
