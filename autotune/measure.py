"""What a tuner's child process does with one config on its device: compile, check, time.

Nothing that one config leaves behind may serve another: results go to fresh buffers full of NaN
between guard bands, memory that a launch allocates for itself starts as NaN, and arguments that a
kernel changes are restored before each check.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tkernels import device
from tkernels.offline import replaced_run
from tkernels.registry import Config, KernelSpec, Problem
from tkernels.testing import (
    Prepared,
    assert_close,
    bytes_of,
    clone_inputs,
    guarded,
    poisoned_memory,
    prepared,
    result_names,
    rotating_sets,
    tensors_of,
    truth_of,
    written_by,
)

_MOST_SETS = 1024  # the bench has more of small ones; here each config captures a launch of each
_SAMPLES = 5  # of a block
_BLOCK_S = 0.5  # a block of slow calls has fewer
_DUEL_S = 30.0
_FEWEST_ROUNDS = 5
_BAND = 7.25  # stands round outputs; they are NaN themselves, and a NaN written outside must show


@dataclasses.dataclass(frozen=True)
class Bench:
    """One problem laid out on the device, and what is right for it."""

    spec: KernelSpec
    inputs: dict[str, Any]  # no config sees these: one that spoils its inputs would blame the next
    sets: list[dict[str, Any]]  # equal inputs that take turns, as python -m bench has them
    truth: tuple[torch.Tensor, ...]


def lay_out(spec: KernelSpec, problem: Problem) -> Bench:
    """Inputs of ``problem``, copies that leave the cache as those of the bench do, its truth."""
    first = spec.make_inputs(problem, device.tensor_device())
    truth = truth_of(spec, first)
    sets, _ = rotating_sets(spec, problem, clone_inputs(first), truth, most=_MOST_SETS)
    return Bench(spec, first, sets, truth)


def compile_only(spec: KernelSpec, inputs: dict[str, Any], config: Config) -> dict[str, Any]:
    """Compile what ``config`` launches, and load it onto the device; nothing runs.

    Several processes may do so at once while another one times. Returns registers, spills and
    shared memory where the compiler tells them.
    """
    compiled: list[Any] = []

    def compile_it(kernel: Any, *args: Any, **kwargs: Any) -> Any:
        kernel_run = originals[0]
        compiled.append(kernel_run(kernel, *args, **{**kwargs, "warmup": True}))
        return compiled[-1]

    originals: list[Any] = []
    with replaced_run(compile_it) as original:
        originals.append(original)
        spec.launch(**inputs, config=config)
    return device.resources_of([one for one in compiled if one is not None])


def check(bench: Bench, config: Config) -> None:
    """Raise AssertionError where ``config`` computes something wrong or writes outside."""
    spec, inputs = bench.spec, bench.inputs
    own = clone_inputs(inputs)
    results = bench.truth[: len(bench.truth) - len(written_by(spec, inputs))]
    outs = {}
    if spec.outputs:
        with poisoned_memory():  # the first run tells the dtypes
            shapes = tensors_of(spec.launch(**clone_inputs(inputs), config=config))
        assert len(shapes) == len(results), (spec.name, len(shapes), len(results))
        outs = {
            name: guarded(_unwritten(like), padding=0, fill=_BAND)
            for name, like in zip(spec.outputs, shapes, strict=False)
        }
    with poisoned_memory():
        written = {name: buffer.tensor for name, buffer in outs.items()}
        got = tensors_of(spec.launch(**own, **written, config=config))
        device.synchronize()
    for result, (name, tensor) in zip(got, written.items(), strict=False):
        assert result.data_ptr() == tensor.data_ptr(), f"{name}= was given and not written to"
    got = (*got, *written_by(spec, own))
    names = result_names(spec, inputs)
    for name, actual, expected in zip(names, got, bench.truth, strict=True):
        assert_close(actual, expected, what=name, factor=spec.tolerance)
    for name, buffer in outs.items():
        buffer.check(f"{name}, beside it")
    for name, tensor in inputs.items():
        if isinstance(tensor, torch.Tensor) and name not in spec.mutates:
            # As bytes: NaN equals NaN, and -0 is another value than 0.
            now, then = (bytes_of(t) for t in (own[name], tensor))
            assert torch.equal(now, then), f"{name}, an input, was changed"


def _unwritten(like: torch.Tensor) -> torch.Tensor:
    """Of the shape of ``like``, full of what no kernel writes: NaN, or the lowest integer."""
    lowest = torch.nan if like.dtype.is_floating_point else torch.iinfo(like.dtype).min
    return torch.full_like(like, lowest)


def _restore(bench: Bench) -> None:
    """Undo what timing or a wrong config did to the inputs."""
    restored: set[int] = set()  # sets share large tables
    for inputs in bench.sets:
        for name, kept in bench.inputs.items():
            if isinstance(kept, torch.Tensor) and id(inputs[name]) not in restored:
                restored.add(id(inputs[name]))
                inputs[name].copy_(kept)


def ready(bench: Bench, config: Config) -> Prepared:
    """``config`` captured in a graph over all sets of inputs; each set keeps its latest result."""
    _restore(bench)
    return prepared([_keeping(bench.spec, inputs, config) for inputs in bench.sets])


def _keeping(spec: KernelSpec, inputs: dict[str, Any], config: Config) -> Callable[[], None]:
    launch = functools.partial(spec.launch, **inputs, config=config)
    kept: list[Any] = [None]  # or the next call would write to the memory of this one's result

    def call() -> None:
        kept[0] = launch()

    return call


def block(candidate: Prepared) -> float:
    """Milliseconds of one call: the median of a few samples."""
    began, samples = time.monotonic(), [candidate.sample()]
    while len(samples) < _SAMPLES and time.monotonic() - began < _BLOCK_S:
        samples.append(candidate.sample())
    return statistics.median(samples)


def duel(bench: Bench, configs: Sequence[Config], rounds: int) -> list[list[float]]:
    """Milliseconds of each config, ``rounds`` times (slow ones fewer), all of them taking turns."""
    candidates = [ready(bench, config) for config in configs]
    samples: list[list[float]] = [[] for _ in configs]
    began = time.monotonic()
    for i in range(rounds):
        if i >= _FEWEST_ROUNDS and time.monotonic() - began > _DUEL_S:
            break
        # Whoever comes first in a round may find the clock higher.
        for j in range(len(candidates)):
            place = (i + j) % len(candidates)
            samples[place].append(candidates[place].sample())
    return samples
