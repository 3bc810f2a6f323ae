"""The model of an H100: its arithmetic, and what it says of real programs, in a child process."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import pytest

from autotune.offline.nvidia import (
    H100,
    Bounds,
    Footprint,
    deciding,
    joined,
    occupancy,
    spans,
    time_of,
    too_much,
)
from autotune.offline.nvidia_work import UNCOUNTED, Work
from autotune.offline.sass import Walk
from tests.compiled_for import lines_of
from tkernels.registry import all_kernels

# ---- arithmetic --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("registers", "shared", "warps", "expected"),
    [
        (32, 0, 4, 16),  # 64 warps
        (16, 0, 1, 32),  # 32 programs
        (128, 0, 8, 2),  # 65536 registers
        (129, 0, 8, 1),  # registers come in portions of 8 a thread: 136
        (255, 0, 8, 1),
        (64, 113 * 1024, 4, 2),  # 228 KiB of shared memory, of which each takes 1 more
        (64, 114 * 1024, 4, 1),
        (168, 49152, 4, 3),  # by registers; shared memory has room for 4
    ],
)
def test_occupancy(registers: int, shared: int, warps: int, expected: int) -> None:
    assert occupancy(Footprint(registers, shared, warps)) == expected


@pytest.mark.parametrize(
    ("need", "word"),
    [
        (Footprint(32, 227 * 1024 + 1, 4), "shared memory"),
        (Footprint(65, 0, 32), "registers"),
        (Footprint(32, 0, 64), "threads"),
    ],
)
def test_what_fits_no_core_is_named(need: Footprint, word: str) -> None:
    assert word in (too_much(need) or "")
    assert occupancy(need) == 0


def test_what_just_fits() -> None:
    assert too_much(Footprint(64, 227 * 1024, 32)) is None


def seconds(
    one: Walk, need: Footprint | None = None, programs: int = 5000, exposed: float = 0.6
) -> float:
    return time_of(
        need or Footprint(64, 0, 4),
        one,
        ramp_cycles=one.cycles,
        exposed=exposed,
        programs=programs,
        uneven=(1.0, 1.0),
        needed_bytes=programs * 128 * (one.loaded + one.stored),
        useful=1.0,
        overlapped=False,
    ).seconds


ROW = Walk(cycles=3000, issued=300, loaded=32, stored=16)  # of a row-wise kernel


@pytest.mark.parametrize("need", [Footprint(64, 0, 4), Footprint(255, 0, 8)])
@pytest.mark.parametrize("programs", [1, 132, 5000])
def test_spills_are_never_faster(need: Footprint, programs: int) -> None:
    times = [
        seconds(dataclasses.replace(ROW, spilled=spilled), need, programs)
        for spilled in (0, 8, 64, 512, 4096)
    ]
    assert times == sorted(times)
    assert times[-1] > times[0] or programs == 1


@pytest.mark.parametrize(
    "field", ["cycles", "issued", "loaded", "stored", "mma", "wgmma", "shared"]
)
def test_more_work_takes_longer(field: str) -> None:
    more = dataclasses.replace(ROW, **{field: getattr(ROW, field) + 5000})
    assert seconds(more) > seconds(ROW)


def test_fewer_resident_programs_hide_less_latency() -> None:
    times = [seconds(ROW, Footprint(registers, 0, 4)) for registers in (32, 64, 128, 255)]
    assert times == sorted(times)
    assert times[-1] > 1.02 * times[0]


def test_copies_that_run_ahead_hide_latency() -> None:
    few = Footprint(255, 0, 4)
    assert seconds(ROW, few, exposed=0.0) < seconds(ROW, few)


def test_a_program_alone_on_its_core_hides_less() -> None:
    one, two = Footprint(64, 150 * 1024, 4), Footprint(64, 100 * 1024, 4)
    assert (occupancy(one), occupancy(two)) == (1, 2)
    assert seconds(ROW, one) > 1.2 * seconds(ROW, two)


def test_bounds_join_between_their_maximum_and_their_sum() -> None:
    assert joined(1.0, 3.0, 4.0) == pytest.approx(7.0)
    assert joined(2.0, 3.0, 4.0) == pytest.approx(5.0)
    assert joined(60.0, 3.0, 4.0) == pytest.approx(4.0)
    assert joined(2.0, 0.0, 0.0) == 0.0


def test_the_bound_that_decides_is_that_of_all_launches() -> None:
    memory = Bounds(memory=5.0, compute=1.0, latency=1.0, ramp=0.5, launch=1.0)
    small = Bounds(memory=0.0, compute=0.0, latency=0.0, ramp=5.0, launch=2.0)
    assert deciding([memory]) == "memory"
    assert deciding([small]) == "latency"
    assert deciding([memory, small]) == "latency"
    assert deciding([Bounds(0.1, 0.1, 0.0, 0.1, 1.0)]) == "launch"


def test_places_take_the_next_program_as_they_get_free() -> None:
    assert spans([1.0] * 132, 132) == 1.0
    assert spans([1.0] * 133, 132) == 2.0
    assert spans([8.0, 1.0, 1.0, 1.0, 1.0], 2) == 8.0
    assert spans([1.0, 1.0, 1.0, 1.0, 8.0], 2) == 10.0


def test_programs_share_tiles_as_a_grid_stride_loop_deals_them() -> None:
    work = Work(tiles=7, programs=3, steps=(5, 1, 1, 5, 0, 1, 5))
    assert list(work.in_order()) == [(3, 15), (1, 1), (2, 2)]
    assert list(Work(tiles=7, programs=3, steps=(2,)).in_order()) == [(3, 6), (2, 4), (2, 4)]


# ---- real programs -----------------------------------------------------------------------------

CHILD = """
import collections, dataclasses, importlib, json
from autotune.offline import nvidia as nvidia_model
from tkernels import device, offline
from tkernels.config import why_unusable
from tkernels.registry import all_kernels

here = device.current()

def told(answer):
    return {"kind": answer.kind, "ms": answer.ms, "message": answer.message, **answer.facts}

found = {"default": {}, "measured": [], "ptxas": []}
for name, spec in all_kernels().items():
    benched = [case for case in spec.cases if "bench" in case.tags]
    case = min(benched, key=lambda case: spec.cost(case.problem).bytes)
    config = spec.default_config(case.problem, here)
    found["default"][name] = told(nvidia_model.estimate(spec, case.problem, config))
    compiled = len(nvidia_model._programs)
    assert told(nvidia_model.estimate(spec, case.problem, config)) == found["default"][name]
    assert len(nvidia_model._programs) == compiled

def problem_of(spec, case_name):
    return next(case.problem for case in spec.cases if case.name == case_name)

def at(spec, case_name, config):
    return nvidia_model.estimate(spec, problem_of(spec, case_name), config)

rows = json.load(open("bench/results/sm90.json"))["rows"]
asked = collections.Counter()  # a few of each kernel: a compilation takes its time
for row in rows:
    spec = all_kernels().get(row["kernel"])
    known = spec is not None and any(case.name == row["case"] for case in spec.cases)
    known = known and "H100" in row["device"]  # which is what the model describes
    if row["provider"] == "tkernels" and row["cache"] == "cold" and known:
        if why_unusable(spec, row["config"], problem_of(spec, row["case"])):
            continue  # timed before its kernel got more keys
        asked[row["kernel"]] += 1
        if asked[row["kernel"]] > 2:
            continue
        answer = at(spec, row["case"], row["config"])
        if answer.ok:
            found["measured"].append([answer.ms, row["ms"]])

# Its formula lets no config through that the compiler or a core would refuse.
norm = importlib.import_module("tkernels.ops.rms_norm")
flash = importlib.import_module("tkernels.ops.flash_attn")
for module in (norm, flash):
    module.SPEC = dataclasses.replace(module.SPEC, why_illegal=lambda *_: None)
tile = {"SECTION": 8, "variant": "portable", "programs_per_core": 0}
case = "causal-4x4096-32/8x128-bf16"
large = {"BLOCK_M": 16, "BLOCK_N": 128, "num_warps": 4, "num_stages": 6, **tile}
found["large"] = told(at(flash.SPEC, case, large))
row = {"BLOCK_ROWS": 1, "BLOCK_N": 4096, "num_warps": 8, "programs_per_core": 0}
found["odd"] = told(at(norm.SPEC, "1x4096-bf16", {**row, "BLOCK_N": 3000}))
found["illegal"] = told(at(all_kernels()["rope"], "qwen3-8b-t64", {
    "BLOCK_HEADS": 3, "EARLY_LOADS": True, "num_warps": 4, "programs_per_core": 0}))
# Half a row of registers a thread: it spills.
spilling = {**row, "BLOCK_N": 16384, "num_warps": 2}
for config in (row, spilling):
    problem = {"n_outer": 1, "n_inner": 64, "n_cols": 16384, "dtype": norm.torch.bfloat16}
    answer = nvidia_model.estimate(norm.SPEC, problem, config)
    launch, = nvidia_model._launches(norm.SPEC, problem, config)
    said = dataclasses.asdict(offline.compile_cuda(launch, 90))
    found["ptxas"].append({"said": said, "read": told(answer)})
found["compilers"] = nvidia_model.compilers()
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return dict(json.loads(lines_of(CHILD)[-1]))


@pytest.mark.parametrize("name", all_kernels())
def test_a_default_has_an_estimate(name: str, found: dict[str, Any]) -> None:
    told = found["default"][name]
    if name in UNCOUNTED:
        assert told["kind"] == "not estimated"
        assert told["message"] == f"how long the loops of {name} are is not modelled"
        return
    assert told["kind"] == "ok", told
    assert math.isfinite(told["ms"])
    assert 1e3 * told["ms"] > 1e6 * H100.start_overlapped
    assert told["occupancy"] >= 1
    assert told["waves"] > 0
    assert told["bound"] in ("memory", "compute", "latency", "launch")
    assert told["model"] == "nvidia-roofline-1"


def test_the_order_of_measured_times_is_kept(found: dict[str, Any]) -> None:
    scipy_stats = pytest.importorskip("scipy.stats", reason="scipy (extra 'tune') is missing")
    pairs = found["measured"]
    assert len(pairs) >= 10
    assert scipy_stats.spearmanr(*zip(*pairs, strict=True))[0] > 0.95
    errors = sorted(abs(told / ms - 1) for told, ms in pairs)
    assert errors[len(errors) // 2] < 0.1, errors


def test_too_much_shared_memory_is_out_of_resources(found: dict[str, Any]) -> None:
    assert found["large"]["kind"] == "out of resources", found["large"]
    assert "shared memory" in found["large"]["message"]


def test_what_triton_refuses_does_not_compile(found: dict[str, Any]) -> None:
    assert found["odd"]["kind"] == "does not compile", found["odd"]
    assert "power of 2" in found["odd"]["message"]


def test_what_the_formula_refuses_is_illegal(found: dict[str, Any]) -> None:
    assert found["illegal"]["kind"] == "illegal"
    assert "BLOCK_HEADS" in found["illegal"]["message"]


def test_machine_code_is_read_as_ptxas_reports_it(found: dict[str, Any]) -> None:
    plain, spilling = found["ptxas"]
    for one in (plain, spilling):
        assert one["read"]["registers"] == one["said"]["registers"]
        assert one["read"]["shared_bytes"] == one["said"]["shared_bytes"]
        assert one["read"]["spill_bytes"] == pytest.approx(one["said"]["spill_bytes"], rel=0.1)
    assert plain["read"]["spill_bytes"] == 0 < spilling["read"]["spill_bytes"]
    assert spilling["read"]["ms"] > plain["read"]["ms"]


def test_compilers_are_named(found: dict[str, Any]) -> None:
    assert set(found["compilers"]) == {"triton", "ptxas"}
    assert all(version[0].isdigit() for version in found["compilers"].values())
