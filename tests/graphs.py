"""A stand-in for device graphs: what a capture launches is recorded, and a replay does it again.

As on a device, everything that is not launched happens once, at the capture: Python decisions,
values the host computes, the memory that results lie in. A value that the host reads is an error.
Kernels (operations of ``ops``) are launched as a whole, wherever their code runs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten

import model.graph
from model.runner import Runner
from model.staging import Side, Staging
from tkernels import device


class Graph:
    """What was launched: (function, arguments, results)."""

    def __init__(self) -> None:
        self.launches: list[tuple[Any, Any, Any, Any]] = []
        self.replays = 0

    def launch(self, function: Any, args: Any, kwargs: Any) -> Any:
        results = function(*args, **kwargs)
        self.launches.append((function, args, kwargs, results))
        return results

    def replay(self) -> None:
        self.replays += 1
        for function, args, kwargs, results in self.launches:
            again = function(*args, **kwargs)
            for kept, made in zip(tree_flatten(results)[0], tree_flatten(again)[0], strict=True):
                if isinstance(kept, torch.Tensor) and kept.data_ptr() != made.data_ptr():
                    kept.copy_(made)


class _Recording(TorchDispatchMode):
    def __init__(self, graph: Graph) -> None:
        super().__init__()
        self.graph = graph

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        assert "_local_scalar_dense" not in name, "the host reads a value while a graph is captured"
        return self.graph.launch(func, args, kwargs or {})


class Launched:
    """Operations that a recording takes as they are."""

    def __init__(self, ops: Any) -> None:
        self.ops = ops

    def __getattr__(self, name: str) -> Any:
        operation = getattr(self.ops, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            graph = current[-1]
            if graph is None:
                return operation(*args, **kwargs)
            with _disable_current_modes():
                return graph.launch(operation, args, kwargs)

        return call


current: list[Graph | None] = [None]


class Event:
    """What stands before it is done once somebody has waited for it."""

    done = True

    def record(self) -> None:
        self.done = False

    def synchronize(self) -> None:
        self.done = True


@contextlib.contextmanager
def _capture(graph: Graph, *, pool: Any = None) -> Iterator[None]:
    assert pool == "pool"
    assert current[-1] is None, "a capture begins while another one runs"
    current.append(graph)
    try:
        with _Recording(graph):
            yield
    finally:
        current.pop()


class _NoCollector:
    """A recording collects no garbage, so none has to be out of its way."""

    collect = freeze = unfreeze = staticmethod(lambda: None)


@contextlib.contextmanager
def stand_in() -> Iterator[pytest.MonkeyPatch]:
    """The device has graphs, whichever it is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device, "new_graph", Graph)
        patch.setattr(device, "capture", _capture)
        patch.setattr(device, "graph_pool", lambda: "pool")
        patch.setattr(device, "memory_free", lambda: 0)
        patch.setattr(device, "event", Event)
        patch.setattr(model.graph, "gc", _NoCollector)
        patch.setattr(device, "pinned", lambda n: torch.empty(n, dtype=torch.uint8))
        yield patch


def spoil_inputs(staging: Staging) -> None:
    """What a step does not write itself is no place that there is."""
    device.synchronize()  # a side may be on its way yet
    with torch.inference_mode():
        for flat in (staging.flat, *(side.flat for side in staging.sides)):
            flat.fill_(0x7F)


def sides_filled(patch: pytest.MonkeyPatch) -> list[Side]:
    """The sides that steps fill from now on, in order; the device is done with each by then."""
    fill, filled = Side.fill, []

    def when_free(self: Side, *args: Any) -> None:
        assert self.event.done
        filled.append(self)
        fill(self, *args)

    patch.setattr(Side, "fill", when_free)
    return filled


def written_slots(runner: Runner) -> list[int]:
    """Slots of the first layer's keys that hold something."""
    part = runner.cache.k[0]
    codes = part if isinstance(part, torch.Tensor) else part.codes
    return codes.flatten(0, 1).flatten(1).any(1).nonzero().flatten().tolist()
