"""Which problems are tuned: bench cases, sizes given by hand, or what a model launches."""

from __future__ import annotations

import contextlib
import difflib
import inspect
import itertools
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from autotune.model_facts import read_facts
from autotune.model_launches import PREFILL_CHUNK, launches
from autotune.records import Task
from tkernels import device
from tkernels.offline import replaced_run
from tkernels.registry import KernelSpec, Problem

_DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}
_WORDS = {"true": True, "false": False}
_MOST = 2**31 - 1  # of a size
_MOST_TOKENS = 2**26  # of a batch of prompts, which are gone through step by step
_MOST_BYTES = 2**46  # far beyond any device, and far below where sizes overflow


def bench_tasks(spec: KernelSpec, arch: str) -> list[Task]:
    """The bench cases of a kernel; on the interpreter, which is slow, the smoke ones."""
    tag = "smoke" if arch == "interpret" else "bench"
    cases = [case for case in spec.cases if tag in case.tags]
    return _largest_of_each_key(spec, [(case.name, case.problem) for case in cases], arch)


def _largest_of_each_key(
    spec: KernelSpec, named: Iterable[tuple[str, Problem]], arch: str
) -> list[Task]:
    """A task for each key, in the order in which keys first come: the problem with most work."""
    kept: dict[str, tuple[tuple[int, int], Task]] = {}
    for name, problem in named:
        task = Task(spec.name, name, problem, spec.tuning_key(problem), arch)
        cost = spec.cost(problem)
        work = (cost.bytes, cost.flops)
        if task.label not in kept or work > kept[task.label][0]:
            kept[task.label] = work, task
    return [task for _, task in kept.values()]


# ---- sizes given by hand -------------------------------------------------------------------------


def shape_tasks(specs: Sequence[KernelSpec], texts: Sequence[str], arch: str) -> list[Task]:
    """Problems of ``--shape batch=1:16,context=4096``: the product of the values of each name.

    Raises ValueError for names that a kernel does not have, values that are no sizes, and problems
    that the kernel itself refuses.
    """
    tasks = []
    for spec in specs:
        combinations = [values for text in texts for values in _combinations(spec, text)]
        with _asked_by("--shape", spec):
            named = [_named(spec, values) for values in combinations]
            for name, problem in named:
                _check(spec, name, problem)
        tasks += _largest_of_each_key(spec, named, arch)
    return tasks


def _combinations(spec: KernelSpec, text: str) -> list[dict[str, Any]]:
    if spec.shape is None:
        raise ValueError(
            f"autotune: --shape needs a kernel whose spec has a shape, got {spec.name}, which has "
            "none"
        )
    known = inspect.signature(spec.shape).parameters
    given: dict[str, list[Any]] = {}
    for part in text.split(","):
        name, equals, value = part.strip().partition("=")
        if not equals or name in given:
            raise ValueError(
                f"autotune: --shape must be name=value,... with each name once, got {text!r}"
            )
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ValueError(
                f"autotune: --shape of {spec.name} takes {_described(known)}, got {name!r}{hint}"
            )
        given[name] = [_value(spec, known[name], word) for word in value.split(":")]
    missing = [n for n, p in known.items() if p.default is p.empty and n not in given]
    if missing:
        raise ValueError(
            f"autotune: --shape of {spec.name} must give {', '.join(missing)}, got {text!r}"
        )
    return [dict(zip(given, values, strict=True)) for values in itertools.product(*given.values())]


def _described(parameters: Mapping[str, inspect.Parameter]) -> str:
    """The names that a shape takes, with the values of those that may be left out."""
    return ", ".join(
        name if p.default is p.empty else f"{name}={_word(p.default)}"
        for name, p in parameters.items()
    )


def _word(value: Any) -> str:
    names = {dtype: name for name, dtype in reversed(_DTYPES.items())}
    return names[value] if value in names else str(value).lower()


def _value(spec: KernelSpec, parameter: inspect.Parameter, word: str) -> Any:
    name, default = parameter.name, parameter.default
    if isinstance(default, torch.dtype):
        if word.lower() in _DTYPES:
            return _DTYPES[word.lower()]
        expected = "one of bf16, fp16, fp32"
    elif isinstance(default, bool):
        if word.lower() in _WORDS:
            return _WORDS[word.lower()]
        expected = "true or false"
    elif isinstance(default, str):
        return word
    else:
        least = 0 if default == 0 else 1
        if word.isdecimal() and least <= int(word) <= _MOST:
            return int(word)
        expected = f"a whole number from {least} to {_MOST}"
    raise ValueError(f"autotune: --shape of {spec.name}: {name} must be {expected}, got {word!r}")


def _named(spec: KernelSpec, values: Mapping[str, Any]) -> tuple[str, Problem]:
    """The problem of some sizes, and a name that ``--shape`` would take for it."""
    assert spec.shape is not None
    usual = inspect.signature(spec.shape).parameters
    name = ",".join(f"{n}={_word(v)}" for n, v in values.items() if v != usual[n].default)
    return name, spec.shape(**values)


def _check(spec: KernelSpec, name: str, problem: Problem) -> None:
    """Raise ValueError where the kernel refuses the problem."""
    moved = spec.cost(problem).bytes
    if moved > _MOST_BYTES:
        raise ValueError(f"{name} moves {moved / 2**40:.0f} TiB")
    try:
        _launch_on_fakes(spec, problem)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{name}: {' '.join(str(error).split())[:300]}") from None


@contextlib.contextmanager
def _asked_by(option: str, spec: KernelSpec) -> Iterator[None]:
    """A refusal names the option that asked for the problem."""
    try:
        yield
    except ValueError as error:
        raise ValueError(
            f"autotune: {option} must give what {spec.name} takes, got {error}"
        ) from None


def _launch_on_fakes(spec: KernelSpec, problem: Problem) -> None:
    """Raise what the kernel says to the problem; nothing is allocated and nothing runs."""
    # A RuntimeError says that an address or a value was wanted, which these tensors lack: checks
    # stand before addresses.
    with (
        contextlib.suppress(RuntimeError),
        warnings.catch_warnings(),
        FakeTensorMode(),
        replaced_run(lambda *args, **kwargs: None),
    ):
        warnings.simplefilter("ignore")  # or torch warns of the address
        spec.launch(**spec.make_inputs(problem, device.tensor_device()))


# ---- what fits -----------------------------------------------------------------------------------


def why_too_large(spec: KernelSpec, problem: Problem) -> str | None:
    """Why ``problem`` cannot be measured on this machine's device, or None; allocates nothing."""
    if sets_that_fit(spec, problem) >= 2:  # the inputs and a copy, which the check works on
        return None
    needed, memory = 2 * input_bytes(spec, problem), _memory_bytes()
    return f"it needs {needed / 2**30:.1f} GiB or more, got a device with {memory / 2**30:.1f}"


def sets_that_fit(spec: KernelSpec, problem: Problem) -> int:
    """How many sets of inputs the device has memory for, many if that is not known."""
    try:
        return _memory_bytes() // max(input_bytes(spec, problem), 1)
    except RuntimeError:  # it makes inputs in a way that needs their values
        return 2**31


def _memory_bytes() -> int:
    return device.memory_bytes() or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def input_bytes(spec: KernelSpec, problem: Problem) -> int:
    """Bytes of one set of inputs, found without allocating them; what shares memory counts once."""
    with FakeTensorMode():
        inputs = spec.make_inputs(problem, torch.device("cpu"))
        storages = [t.untyped_storage() for t in inputs.values() if isinstance(t, torch.Tensor)]
        return sum({s._cdata: s.nbytes() for s in storages}.values())


# ---- what a model launches -----------------------------------------------------------------------


def model_tasks(
    specs: Sequence[KernelSpec],
    path: Path,
    batches: Iterable[int],
    contexts: Iterable[int],
    arch: str,
    *,
    chunk: int = PREFILL_CHUNK,
) -> list[Task]:
    """Problems that the model at ``path`` launches with those numbers of sequences and tokens.

    For each batch and context: a decode step of that many sequences with that many tokens, and the
    prefill of such prompts in chunks. Kernels that the model does not launch have none.
    """
    facts = read_facts(path)
    pairs = list(itertools.product(batches, contexts))
    if (most := max(batch * context for batch, context in pairs)) > _MOST_TOKENS:
        raise ValueError(
            f"autotune: --batch times --context must be at most {_MOST_TOKENS}, got {most}"
        )
    shapes: dict[str, dict[tuple[Any, ...], dict[str, Any]]] = {}
    here = device.current()
    dev = here if here.arch == arch else device.offline_facts(arch)
    for pair in pairs:
        for kernel, values in launches(facts, *pair, chunk, dev=dev):
            shapes.setdefault(kernel, {})[tuple(values.items())] = values
    tasks = []
    for spec in specs:
        with _asked_by("--model", spec):
            named = [_named(spec, values) for values in shapes.get(spec.name, {}).values()]
            found = _largest_of_each_key(spec, named, arch)
            for task in found:
                _check(spec, task.case, task.problem)
        tasks += found
    if not tasks:
        names = ", ".join(spec.name for spec in specs)
        hint = " (its linear layers are quantised: --shape gives those)" if facts.quantised else ""
        raise ValueError(
            f"autotune: --model must launch the kernels that are asked for, got one that launches "
            f"{', '.join(shapes)} and not {names}{hint}"
        )
    return tasks
