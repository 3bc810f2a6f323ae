"""Which config a launch uses. Nothing here tunes, waits for the device or reads a tensor's value.

Order: ``config=`` argument > ``force_config()`` > ``$TKERNELS_CONFIG_DIR/<arch>/<kernel>.json`` >
the JSON files shipped in ``tkernels/configs`` > the kernel's own heuristic.

A config given in code must be legal, or the reason is raised. A stored one that is not legal here
is left out with one warning, because a config may be slow but never wrong.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar, cast

import torch

from tkernels import device
from tkernels.ascend_options import ASCEND_OPTIONS
from tkernels.registry import Config, KernelSpec, Problem, get

SCHEMA = 1
_MEMO_LIMIT = 4096  # plans remembered an operation; token counts vary without end
_NEW = object()  # a plan may be None
_PARTS = ("key", "config")  # of an entry of a tuned file

_P = TypeVar("_P")
_forced: dict[str, Config] = {}
_plans: dict[Callable[..., Any], dict[tuple[Any, ...], Any]] = {}
_latest: dict[Callable[..., Any], tuple[tuple[Any, ...], Any]] = {}


def planned(
    make_plan: Callable[..., _P],
    config: Config | None,
    tensors: tuple[torch.Tensor, ...],
    *values: Any,
) -> _P:
    """``make_plan(*tensors, *values, config=config)``, remembered by metadata.

    A plan is all that a launcher derives from shapes, strides, dtypes, devices and plain values:
    it checks them, lays out rows, looks the config up. None of that can change while these do not,
    so a call whose metadata was seen before only pays for collecting and comparing it. Layers of a
    model repeat one metadata many times over, so the latest one is compared before the table is
    asked, which would hash it.
    """
    if config is not None or _forced:
        return make_plan(*tensors, *values, config=config)
    try:
        # Types stand before values: a tensor must not be asked whether it equals a number.
        key = _METADATA[len(tensors)](*tensors), *map(type, values), values
        latest = _latest.get(make_plan)
        if latest is not None and latest[0] == key:
            return cast(_P, latest[1])
        plans = _plans.setdefault(make_plan, {})
        plan = plans.get(key, _NEW)
    except (AttributeError, TypeError, RuntimeError):
        # Not dense tensors and plain values: make_plan says which is not.
        return make_plan(*tensors, *values, config=None)
    if plan is _NEW:  # not read back below: another thread may empty the table meanwhile
        if len(plans) >= _MEMO_LIMIT:
            plans.clear()
        plan = plans[key] = make_plan(*tensors, *values, config=None)
    _latest[make_plan] = key, plan
    return cast(_P, plan)


def _collector(count: int) -> Callable[..., tuple[Any, ...]]:
    """A function of ``count`` tensors that returns all their metadata as one flat tuple.

    It is written out by program, because this is most of what a launch costs on the host: a loop
    over the tensors takes half as long again. A contiguous tensor's shape says its strides, and
    asking for them costs twice as much as asking whether it is.
    """
    names = [f"t{i}" for i in range(count)]
    facts = [
        f"{t}.shape, {t}.is_contiguous() or {t}.stride(), {t}.dtype, {t}.get_device()"
        for t in names
    ]
    collect: Callable[..., tuple[Any, ...]] = eval(
        f"lambda {', '.join(names)}: ({', '.join(facts)})"
    )
    return collect


def _with_place(*tensors: torch.Tensor) -> tuple[Any, ...]:
    facts = [(t.shape, t.stride(), t.dtype, t.device) for t in tensors]
    return (*facts, device.current_index()) if device.MULTI_DEVICE else tuple(facts)


# get_device() is -1 for the CPU and for meta tensors alike, and the plan of one device does not
# serve another: only the common case, one accelerator, has the short form.
_METADATA: list[Callable[..., tuple[Any, ...]]] = [
    _with_place
    if device.MULTI_DEVICE or device.tensor_device().type == "cpu"
    else _collector(count)
    for count in range(22)
]


def resolve(spec: KernelSpec, values: tuple[Any, ...], config: Config | None) -> tuple[Config, int]:
    """``(keyword arguments of the launch, most programs to start)`` for one problem.

    ``values`` are the problem's values in the order of ``spec.problem_fields``.
    ``programs_per_core`` bounds the grid (0 = a program for every tile); everything else in a
    config goes to the launch.
    """
    dev = device.current()
    problem = dict(zip(spec.problem_fields, values, strict=True))
    kwargs = dict(explain(spec, problem, config)[0])
    per_core = kwargs.pop("programs_per_core", 0)
    return kwargs, min(per_core * dev.num_cores or dev.max_programs, dev.max_programs)


def explain(spec: KernelSpec, problem: Problem, config: Config | None = None) -> tuple[Config, str]:
    """The config for ``problem`` and where it came from: argument, forced, a file, or heuristic.

    A problem names ``spec.problem_fields``; ``spec.shape``, where there is one, makes it of sizes.

    >>> from tkernels.registry import get
    >>> spec = get("rms_norm")
    >>> chosen, source = explain(spec, spec.shape(tokens=64, hidden=4096))
    >>> sorted(chosen)
    ['BLOCK_N', 'BLOCK_ROWS', 'num_warps', 'programs_per_core']
    >>> source == "heuristic" or source.endswith("rms_norm.json")
    True
    >>> explain(spec, spec.cases[0].problem, {**chosen, "BLOCK": 64})
    Traceback (most recent call last):
    ...
    ValueError: rms_norm: config must be legal on ..., got ...: unknown key BLOCK (expected ...)
    """
    dev = device.current()
    for given, source in ((config, "argument"), (_forced.get(spec.name), "forced")):
        if given is None:
            continue
        why = why_unusable(spec, given, problem)
        if why:
            raise ValueError(f"{spec.name}: config must be legal on {dev.arch}, got {given}: {why}")
        return given, source
    for entry, path in stored(spec, problem):
        why = why_unusable(spec, entry["config"], problem)
        if why is None:
            return entry["config"], str(path)
        cores = chip_of(entry).get("num_cores", dev.num_cores)
        # Another chip's need not be legal here.
        if path.parent.name == dev.arch and cores == dev.num_cores:
            _warn_once(f"{spec.name}: config {entry['config']} in {path} is left out: {why}")
    return spec.default_config(problem, dev), "heuristic"


def stored(spec: KernelSpec, problem: Problem) -> Iterator[tuple[dict[str, Any], Path]]:
    """Entries of tuned files for ``problem``, with their files, in the order they are preferred.

    The folders in turn; in a file, the entry that was measured on the chip most like this one (by
    cores and memory), and estimates last. Where no file of this architecture has the kernel, those
    of the architecture with the nearest compute capability serve.
    """
    key = spec.tuning_key(problem)
    dev = device.current()
    folders = config_folders()
    arch = _arch_to_read(spec.name, dev.arch, tuple(folders))
    for folder in folders:
        path = folder / arch / f"{spec.name}.json"
        entries = _entries(path)
        matching = [entry for entry in entries if entry["key"] == key]
        if entries and all(is_of_another_version(spec, e["key"], problem) for e in entries):
            _warn_once(
                f"{path}: expected keys of {', '.join(key)}, got keys of "
                f"{', '.join(entries[0]['key'])}, of another version; left out"
            )
        if len(matching) > 1:
            matching.sort(key=_unlikeness)
        for entry in matching:
            yield entry, path


def is_of_another_version(spec: KernelSpec, key: dict[str, Any], *problems: Problem) -> bool:
    """Whether no problem of the kernel, of its cases or given, has a key of these names now."""
    known = (*problems, *(case.problem for case in spec.cases))
    return bool(known) and all(spec.tuning_key(p).keys() != key.keys() for p in known)


def nearest_arch(arch: str, others: list[str]) -> str | None:
    """Of ``others``, the NVIDIA architecture with the compute capability nearest to ``arch``'s."""
    if _capability(arch) is None:
        return None
    known = [(abs(c - _capability(arch)), name) for name in others if (c := _capability(name))]  # type: ignore[operator]
    return min(known)[1] if known else None


def _capability(arch: str) -> int | None:
    digits = arch.removeprefix("sm")
    return int(digits) if arch.startswith("sm") and digits.isdecimal() else None


@functools.cache  # a file that is not there is not looked for again at each new token count
def _arch_to_read(kernel: str, arch: str, folders: tuple[Path, ...]) -> str:
    """``arch`` where a folder has the kernel for it, else the nearest that one has."""
    found = [file.parent.name for folder in folders for file in folder.glob(f"*/{kernel}.json")]
    return arch if arch in found else nearest_arch(arch, found) or arch


def chip_of(entry: dict[str, Any]) -> dict[str, Any]:
    """What the chip of a measured entry is told apart by; nothing for an estimate."""
    measured = entry.get("measured")
    facts = measured if isinstance(measured, dict) else {}
    return {
        name: facts[name]
        for name in ("num_cores", "memory_gib")
        if isinstance(facts.get(name), int | float)  # whatever a hand wrote must not raise here
    }


def _unlikeness(entry: dict[str, Any]) -> float:
    """How far this chip is from the entry's: a factor of two in cores or memory counts one."""
    chip = chip_of(entry)
    if not chip:
        return 100.0
    own = {"num_cores": device.current().num_cores, "memory_gib": device.memory_bytes() / 2**30}
    return sum(abs(math.log2(max(own[n], 1) / max(chip[n], 1))) for n in chip)


def why_unusable(
    spec: KernelSpec, config: Any, problem: Problem, dev: device.Device | None = None
) -> str | None:
    """Why ``config`` cannot serve ``problem`` on ``dev`` (default: here), keys included."""
    dev = dev or device.current()
    if not isinstance(config, dict):
        return f"expected a dict, got {type(config).__name__}"
    if odd := [n for n, v in config.items() if not isinstance(v, int | str | bool)]:
        return f"{odd[0]} must be an int, a bool or a name, got {config[odd[0]]!r}"
    space = full_space(spec, dev)
    known = set(space)
    if unknown := set(config) - known:
        return f"unknown key {', '.join(sorted(unknown))} (expected {', '.join(sorted(known))})"
    if missing := set(spec.default_config(problem, dev)) - set(config):
        words = (f"{n} (such as {', '.join(map(str, space[n]))})" for n in sorted(missing))
        return f"missing key {', '.join(words)}"
    for name, value in config.items():
        kinds = {type(v).__name__: None for v in space[name] if v is not None}
        if type(value).__name__ not in kinds:
            return f"{name} must be of type {' or '.join(kinds)}, got {value!r}"
        if dev.is_npu and name in ASCEND_OPTIONS and value not in space[name]:
            return f"{name} must be one of {space[name][1:]}, got {value!r}"
    # A grid of none, or below zero, is no error to a launch: nothing runs.
    if config.get("programs_per_core", 0) < 0:
        return f"programs_per_core must be 0 or more, got {config['programs_per_core']}"
    for name, value in config.items():
        numbers = [v for v in space[name] if type(v) is int]
        if name != "programs_per_core" and numbers and value < 1 <= min(numbers):
            return f"{name} must be 1 or more, got {value}"
    return spec.why_illegal(config, problem, dev)


def why_no_launch(config: Config, dev: device.Device, *sizes: str) -> str | None:
    """What no kernel can be launched with: ``sizes`` name the config's tile sizes."""
    for name in sizes:
        if config[name] < 1 or config[name] & (config[name] - 1):
            return f"{name}={config[name]} is not a power of two"
    if dev.registers and config["num_warps"] not in (1, 2, 4, 8, 16, 32):
        return f"num_warps={config['num_warps']} is not of 1, 2, 4, 8, 16, 32"
    if not dev.registers and config["programs_per_core"] < 1:  # a vector unit: no threads
        return "programs_per_core must be 1 or more on an NPU (the grid is bounded)"
    return None


def why_no_room(config: Config, dev: device.Device, shared_bytes: int) -> str | None:
    """Reason why tiles that take so much shared memory cannot run in these warps, or None."""
    warps, stages = config["num_warps"], config["num_stages"]
    if warps not in (1, 2, 4, 8, 16) or stages < 1:
        return f"num_warps must be 1 to 16 and num_stages 1 or more, got {warps} and {stages}"
    if shared_bytes > dev.local_mem_bytes:
        return (
            f"the tiles take {shared_bytes} bytes of shared memory, more than {dev.local_mem_bytes}"
        )
    return None


def full_space(spec: KernelSpec, dev: device.Device) -> dict[str, list[Any]]:
    """``spec.space(dev)``, and the options that any config for an Ascend chip may set."""
    return {**spec.space(dev), **(ASCEND_OPTIONS if dev.is_npu else {})}


@contextlib.contextmanager
def force_config(kernel: str, config: Config) -> Iterator[None]:
    """Every call of ``kernel`` inside the block, in any thread, uses ``config``."""
    get(kernel)  # raises where there is no such kernel, which would force nothing
    before = _forced.get(kernel)
    _forced[kernel] = config
    try:
        yield
    finally:
        if before is None:
            del _forced[kernel]
        else:
            _forced[kernel] = before


def config_folders() -> list[Path]:
    """Folders that hold ``<arch>/<kernel>.json``, first match first."""
    own = os.environ.get("TKERNELS_CONFIG_DIR")
    shipped = Path(__file__).parent / "configs"
    if not own:
        return [shipped]
    if not os.path.isdir(own):
        _warn_once(f"TKERNELS_CONFIG_DIR must be a readable folder, got {own!r}; left out")
    return [Path(own), shipped]


def reload() -> None:
    """Forget what was read and resolved, after a tuned file or TKERNELS_CONFIG_DIR changed."""
    _plans.clear()
    _latest.clear()
    _entries.cache_clear()
    _arch_to_read.cache_clear()
    _warn_once.cache_clear()


@functools.cache
def _entries(path: Path) -> list[dict[str, Any]]:
    if not os.path.exists(path):
        return []
    try:
        return read_file(path)
    except ValueError as error:
        _warn_once(f"{path}: {error}; left out")
        return []


def read_file(path: Path) -> list[dict[str, Any]]:
    """Entries of the tuned file ``<arch>/<kernel>.json``: each a dict with a key and a config.

    Raises:
        ValueError: what was expected of it and what came; the path is left to the caller to say.
    """
    try:
        document = json.loads(path.read_text())
        if document["schema"] != SCHEMA:
            raise ValueError(f"expected schema {SCHEMA}, got {document['schema']!r}")
        for name, wanted in (("kernel", path.stem), ("arch", path.parent.name)):
            if document.get(name, wanted) != wanted:
                raise ValueError(
                    f"expected {name} {wanted!r}, as its path has, got {document[name]!r}"
                )
        entries = list(document["entries"])
        if not all(isinstance(entry[part], dict) for entry in entries for part in _PARTS):
            raise ValueError("expected a key and a config in each entry, got another form")
        return entries
    except json.JSONDecodeError as error:
        raise ValueError(
            f"line {error.lineno}, column {error.colno}: expected JSON ({error.msg})"
        ) from None
    except (OSError, UnicodeDecodeError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"expected a tuned-config file, got {error!r}") from None


@functools.cache
def _warn_once(message: str) -> None:
    warnings.warn(message, stacklevel=2)
