"""Time kernels against their reference and their peers, case by case, all in turn."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from bench import providers, roofline
from bench.rows import DEFAULT, OURS, Row, UsageError
from tkernels import config, device, registry, testing
from tkernels.registry import Case, KernelSpec

Say = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Rows measured, and the sentences about providers of ours that were wrong or failed."""

    rows: list[Row]
    failures: list[str]


# ---- what to run -----------------------------------------------------------------------------


def select(kernel: str, substring: str) -> list[tuple[KernelSpec, Case]]:
    """Cases to time: those tagged bench, or the smoke ones where the interpreter stands in."""
    if device.current().compile_only:
        raise UsageError(
            "bench: TKERNELS_DEVICE must name a device that can launch kernels, got compile-only "
            f"{device.current().arch}"
        )
    tag = case_tag()
    try:
        specs = registry.all_kernels().values() if kernel == "all" else [registry.get(kernel)]
    except ValueError as error:
        raise UsageError(str(error)) from None
    chosen = [
        (spec, case)
        for spec in specs
        for case in spec.cases
        if tag in case.tags and substring in case.name
    ]
    if not chosen:
        raise UsageError(
            f"bench: --case must be part of a {tag} case's name (see --list), got {substring!r}"
        )
    return chosen


def case_tag() -> str:
    """``bench``, or ``smoke`` on the interpreter, for which bench cases are far too large."""
    return "smoke" if device.current().arch == "interpret" else "bench"


def check_providers(
    wanted: Sequence[str] | None, chosen: Sequence[tuple[KernelSpec, Case]]
) -> None:
    """Raise if a wanted provider is neither built in nor a peer of any chosen kernel here."""
    if wanted is None or set(wanted) <= set(providers.BUILT_IN):
        return
    peers: set[str] = set()
    missing: set[str] = set()
    for spec, case in chosen:  # cases of a kernel may have peers of their own
        if set(wanted) <= peers | set(providers.BUILT_IN):
            return
        missing |= set(providers.missing_peers(spec))
        if spec.providers is not None:
            peers |= set(spec.providers(spec.make_inputs(case.problem, device.tensor_device())))
    known = [*providers.BUILT_IN, *sorted(peers)]
    absent = f" (not importable here: {', '.join(sorted(missing))})" if missing else ""
    for name in wanted:
        if name not in known:
            raise UsageError(
                f"bench: provider must be one of {', '.join(known)}{absent}, got {name!r}"
            )


# ---- measuring -------------------------------------------------------------------------------


def measure(
    chosen: Sequence[tuple[KernelSpec, Case]],
    *,
    wanted: Sequence[str] | None = None,
    rounds: int = 30,
    hot: bool = False,
    say: Say,
) -> Outcome:
    """Time each chosen case; ``say`` receives progress and whatever was left out, a line each."""
    if device.current().arch == "interpret":
        device.require_triton()
        say("bench: Triton interpreter, smoke cases only; times mean nothing here")
    if device.tensor_device().type == "cpu" and (wanted is None or "compile" in wanted):
        say("bench: provider compile is left out on the CPU")
    for name, why in _all_missing([spec for spec, _ in chosen]).items():
        say(f"bench: peer {name} is left out: {why}")
    roof = roofline.measured()
    say(
        f"bench: roof {roof.bytes_per_s / 1e9:.0f} GB/s copy, "
        f"{roof.flops_per_s / 1e12:.3g} TFLOP/s bf16 matmul"
    )
    rows: list[Row] = []
    failures: list[str] = []
    for i, (spec, case) in enumerate(chosen):
        say(f"bench: [{i + 1}/{len(chosen)}] {spec.name} {case.name}")
        outcome = _measure_case(spec, case, roof, wanted=wanted, rounds=rounds, hot=hot, say=say)
        rows += outcome.rows
        failures += outcome.failures
    return Outcome(rows, failures)


def _all_missing(specs: Sequence[KernelSpec]) -> dict[str, str]:
    return {name: why for spec in specs for name, why in providers.missing_peers(spec).items()}


def _measure_case(
    spec: KernelSpec,
    case: Case,
    roof: roofline.Roof,
    *,
    wanted: Sequence[str] | None,
    rounds: int,
    hot: bool,
    say: Say,
) -> Outcome:
    sets, outs, cache = providers.input_sets(spec, case, hot)
    dev = device.current()
    chosen, source = config.explain(spec, case.problem)
    default = spec.default_config(case.problem, dev)
    is_tuned = source.endswith(".json")
    calls, wrong = providers.provider_calls(spec, sets, outs, wanted, default if is_tuned else None)
    if wanted is not None and DEFAULT in wanted and not is_tuned:
        say(f"bench: {spec.name} {case.name}: provider {DEFAULT} is left out: no tuned config")
    for name, why in wrong.items():
        say(f"bench: NOT TIMED {spec.name} {case.name}: provider {name} {why}")
    failures = [f"{spec.name} {case.name}: {wrong[n]}" for n in (OURS, DEFAULT) if n in wrong]
    if not calls:
        return Outcome([], failures)
    timings = testing.time_ms(calls, rounds=rounds)
    if len({t.method for t in timings.values()}) > 1:
        methods = ", ".join(f"{name} by {t.method}" for name, t in timings.items())
        say(f"bench: {spec.name} {case.name}: only like is compared with like: {methods}")
    best, ratio = best_peer(timings)
    cost = spec.cost(case.problem)
    used = {OURS: (chosen, _source_word(source)), DEFAULT: (default, "heuristic")}
    rows = [
        Row(
            kernel=spec.name,
            case=case.name,
            provider=name,
            ms=t.ms,
            p20=t.p20,
            p80=t.p80,
            method=t.method,
            cache=cache,
            sets=len(sets),
            gbps=cost.bytes / t.ms / 1e6,
            tflops=cost.flops / t.ms / 1e9,
            roof_share=roof.least_ms(cost) / t.ms,
            config=used[name][0] if name in used else None,
            config_source=used[name][1] if name in used else "",
            best_peer=best if name == OURS else "",
            ratio=ratio if name == OURS else None,
            device=dev.name,
            arch=dev.arch,
            versions=device.versions(),
            commit=commit(),
            date=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            gain=gain(timings) if name == OURS else None,
        )
        for name, t in timings.items()
    ]
    return Outcome(rows, failures)


def best_peer(timings: Mapping[str, testing.Timing]) -> tuple[str, float | None]:
    """Fastest provider but the eager reference, and its time over ours.

    Only those timed as ours was: a peer that could not be captured also pays for its launches.
    """
    ours = timings.get(OURS)
    if ours is None:
        return "", None
    peers = {
        name: t.ms
        for name, t in timings.items()
        if name not in (OURS, DEFAULT, "reference") and t.method == ours.method
    }
    if not peers:
        return "", None
    best = min(peers, key=lambda name: peers[name])
    return best, peers[best] / ours.ms


def gain(timings: Mapping[str, testing.Timing]) -> float | None:
    """Time of ours with the heuristic's config over that with the tuned one, both timed alike."""
    ours, default = timings.get(OURS), timings.get(DEFAULT)
    if ours is None or default is None or ours.method != default.method:
        return None
    return default.ms / ours.ms


def _source_word(source: str) -> str:
    """Where a config came from, without this machine's paths."""
    if not source.endswith(".json"):
        return source
    shipped = Path(config.__file__).parent / "configs"
    return "shipped" if shipped in Path(source).parents else "TKERNELS_CONFIG_DIR"


@functools.cache
def commit() -> str:
    """Short hash of the checkout, ``-dirty`` where it was changed; "" outside a checkout."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    with contextlib.suppress(OSError):
        done = subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False
        )
        return done.stdout.strip() if done.returncode == 0 else ""
    return ""
