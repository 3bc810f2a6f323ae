"""Which problems are tuned: bench cases, sizes given by hand, or what a model launches."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import itertools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from autotune.model_facts import ModelFacts, read_facts
from autotune.records import Task
from tkernels import device
from tkernels.offline import replaced_run
from tkernels.registry import KernelSpec

# Prompt tokens that the runner (model.generate) computes at once.
PREFILL_CHUNK = 2048
_DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}
_WORDS = {"true": True, "false": False}


def bench_tasks(spec: KernelSpec, arch: str) -> list[Task]:
    """The bench cases of a kernel; on the interpreter, which is slow, the smoke ones."""
    tag = "smoke" if arch == "interpret" else "bench"
    return [
        Task(spec.name, c.name, c.problem, spec.tuning_key(c.problem), arch)
        for c in spec.cases
        if tag in c.tags
    ]


# ---- sizes given by hand -------------------------------------------------------------------------


def shape_tasks(specs: Sequence[KernelSpec], texts: Sequence[str], arch: str) -> list[Task]:
    """Problems of ``--shape batch=1:16,context=4096``: the product of the values of each name.

    Raises ValueError for names that a kernel does not have, values that are no sizes, and problems
    that the kernel itself refuses.
    """
    tasks = [
        _task(spec, values, arch)
        for spec in specs
        for text in texts
        for values in _combinations(spec, text)
    ]
    return without_repeats(tasks)


def _combinations(spec: KernelSpec, text: str) -> list[dict[str, Any]]:
    if spec.shape is None:
        raise ValueError(f"autotune: --shape must be of a kernel that has one, got {spec.name}")
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
        if word in _DTYPES:
            return _DTYPES[word]
        expected = "one of bf16, fp16, fp32"
    elif isinstance(default, bool):
        if word.lower() in _WORDS:
            return _WORDS[word.lower()]
        expected = "true or false"
    else:
        least = 1 if default is parameter.empty or default > 0 else 0
        if word.isdecimal() and int(word) >= least:
            return int(word)
        expected = f"a whole number >= {least}"
    raise ValueError(f"autotune: --shape of {spec.name}: {name} must be {expected}, got {word!r}")


def _task(spec: KernelSpec, values: Mapping[str, Any], arch: str) -> Task:
    assert spec.shape is not None
    problem = spec.shape(**values)
    name = "-".join(f"{name}{_word(value)}" for name, value in values.items())
    _check(spec, problem, name)
    return Task(spec.name, name, problem, spec.tuning_key(problem), arch)


def _check(spec: KernelSpec, problem: Mapping[str, Any], name: str) -> None:
    """Raise what the kernel says to the problem; nothing is allocated and nothing runs."""
    try:
        with FakeTensorMode(), replaced_run(lambda *args, **kwargs: None):
            spec.launch(**spec.make_inputs(problem, device.tensor_device()))
    except (ValueError, TypeError) as error:
        line = " ".join(str(error).split())[:300]
        raise ValueError(
            f"autotune: --shape must be one that {spec.name} takes, got {name}: {line}"
        ) from None
    except Exception:
        return  # a tensor without memory is not enough to tell: the first trial will


def input_bytes(spec: KernelSpec, problem: Mapping[str, Any]) -> int:
    """Bytes of one set of inputs, found without allocating them."""
    with FakeTensorMode():
        inputs = spec.make_inputs(problem, torch.device("cpu"))
    return sum(t.nbytes for t in inputs.values() if isinstance(t, torch.Tensor))


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
    prefill of such prompts in chunks. Kernels that a model does not launch have none.
    """
    facts = read_facts(path)
    shapes: dict[str, list[dict[str, Any]]] = {}
    for batch, context in itertools.product(batches, contexts):
        for kernel, values in launches(facts, batch, context, chunk):
            shapes.setdefault(kernel, []).append(values)
    return without_repeats(
        [_task(spec, values, arch) for spec in specs for values in shapes.get(spec.name, [])]
    )


def launches(
    facts: ModelFacts, batch: int, context: int, chunk: int = PREFILL_CHUNK
) -> list[tuple[str, dict[str, Any]]]:
    """(kernel, shape) of what a step of decode and the steps of a prefill launch."""
    heads = {"num_heads": facts.num_heads, "num_kv_heads": facts.num_kv_heads}
    size = {"head_dim": facts.head_dim, "dtype": facts.dtype}
    found: list[tuple[str, dict[str, Any]]] = []
    at_once = max(1, min(batch, chunk // context))  # prompts that share a step
    prompt = min(context, chunk)
    for tokens in (batch, at_once * prompt):
        hidden = {"tokens": tokens, "hidden": facts.hidden_size, "dtype": facts.dtype}
        rotary = {"tokens": tokens, **heads, **size, "rotary_dim": facts.rotary_dim}
        mlp = {"tokens": tokens, "intermediate": facts.intermediate_size, "dtype": facts.dtype}
        found += [
            ("rms_norm", hidden),
            ("fused_add_rms_norm", hidden),
            ("silu_and_mul", mlp),
            ("fused_qk_norm_rope" if facts.qk_norm else "rope", rotary),
            ("append_paged_kv", {"tokens": tokens, "num_kv_heads": facts.num_kv_heads, **size}),
        ]
    found.append(("flash_attn", {"batch": at_once, "seqlen": prompt, **heads, **size}))
    found.append(("paged_attn", {"batch": batch, "context": context, **heads, **size}))
    if context > chunk:
        found.append(
            ("paged_attn", {"batch": 1, "context": context, "query": chunk, **heads, **size})
        )
    return found


def without_repeats(tasks: Iterable[Task]) -> list[Task]:
    """One task for each kernel and key: the last, which is the largest where sizes ascend."""
    kept: dict[tuple[str, str], Task] = {}
    for task in tasks:
        kept[task.kernel, task.label] = task
    return [dataclasses.replace(task) for task in kept.values()]
