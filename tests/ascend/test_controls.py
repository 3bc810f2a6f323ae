"""Kernels that must fail: if one of them passes, the check has stopped checking."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest
import torch

from tkernels import offline_ascend as bisheng
from tkernels.device import tl, triton
from tkernels.offline import record_launches, variant_of
from tkernels.offline_ascend import LoweringError, lower, scalar_memory_loops
from tkernels.testing import assert_close

from . import table
from .cpu_build import BuildError, build
from .run_cpu import ExecutionError, execute


@triton.jit
def _add(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < n)
    y = tl.load(y_ptr + i, mask=i < n)
    tl.store(out_ptr + i, x + y, mask=i < n)


@triton.jit
def _add_in_loop(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
    for start in range(tl.program_id(0) * BLOCK, n, tl.num_programs(0) * BLOCK):
        i = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + i, mask=i < n)
        y = tl.load(y_ptr + i, mask=i < n)
        tl.store(out_ptr + i, x + y, mask=i < n)


@triton.jit
def _add_one_too_many(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < n)
    y = tl.load(y_ptr + i, mask=i < n)
    tl.store(out_ptr + i, x + y, mask=i <= n)


@triton.jit
def _subtract(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < n)
    y = tl.load(y_ptr + i, mask=i < n)
    tl.store(out_ptr + i, x - y, mask=i < n)


@triton.jit
def _two_masked_stride_2_stores(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < n)
    tl.store(out_ptr + 2 * i, x, mask=i < n)
    tl.store(out_ptr + 2 * i + 1, x, mask=i < n)


@triton.jit
def _copy_without_padding(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out_ptr + i, tl.load(x_ptr + i, mask=i < n, care_padding=False))


@triton.jit
def _sort(x_ptr, out_ptr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out_ptr + i, tl.sort(tl.load(x_ptr + i)))


@triton.jit
def _gather(x_ptr, index_ptr, out_ptr, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    where = tl.load(index_ptr + i, mask=i < n, other=10000)  # as a masked lane may well have
    tl.store(out_ptr + i, tl.load(x_ptr + where, mask=i < n), mask=i < n)


def _launch_of(fn: Any, *args: Any, grid: int = 1, **kwargs: Any) -> Any:
    """The one launch that ``fn`` makes with these arguments."""
    with record_launches() as launches:
        fn[(grid,)](*args, **kwargs)
    return launches[0]


def _linalg(fn: Any, *args: Any, **kwargs: Any) -> str:
    """Its lowered text."""
    return lower(variant_of(_launch_of(fn, *args, **kwargs)))


def _vectors(n: int) -> list[torch.Tensor]:
    """x, y and an output that holds NaN."""
    x = torch.linspace(-3, 5, n)
    return [x, x.flip(0) * 2, torch.full_like(x, float("nan"))]


def test_a_right_kernel_passes_all_stages() -> None:
    x, y, out = _vectors(1000)
    launch = _launch_of(_add, x, y, out, 1000, grid=4, BLOCK=256)
    verdict = bisheng.check(lower(variant_of(launch)))
    assert (verdict.reason, verdict.ub) == ("", 2 * 256 * 4)  # 8 bytes an element
    execute(launch)
    assert_close(out, x + y, what="add")


def test_lowering_refuses_two_masked_stride_2_stores() -> None:
    x, _, _ = _vectors(512)
    with pytest.raises(LoweringError, match="InterleaveOptimization"):
        _linalg(_two_masked_stride_2_stores, x, torch.empty(1024), 500, BLOCK=512)


def test_unknown_launch_keyword_is_refused() -> None:
    with pytest.raises(LoweringError, match="num_wraps is neither a parameter"):
        _linalg(_add, *_vectors(64), 64, BLOCK=64, num_wraps=4)


def test_tile_overflows_ub() -> None:
    verdict = bisheng.check(_linalg(_add, *_vectors(64), 64, BLOCK=32768))
    assert verdict.reason == "ub overflow, requires 2097152 bits while 1572864 bits available"


def test_fall_back_to_single_buffers_is_seen() -> None:
    verdict = bisheng.check(_linalg(_add_in_loop, *_vectors(64), 64, BLOCK=16384))
    assert verdict.reason == ""
    assert "enable-auto-multi-buffer to false" in verdict.degraded


def test_int32_sort_is_refused() -> None:
    x = torch.arange(64, dtype=torch.int32)
    verdict = bisheng.check(_linalg(_sort, x, x.clone(), BLOCK=64))
    assert "vsort" in verdict.reason
    accepted = bisheng.check(_linalg(_sort, x.float(), x.float(), BLOCK=64))
    assert accepted.reason == ""


@pytest.mark.parametrize("text", ["module {\n}\n", "", "not IR"])
def test_no_kernel_is_no_success(text: str) -> None:
    assert bisheng.check(text).reason != ""
    with pytest.raises(BuildError):
        build(text)


def test_scalar_gather_is_flagged() -> None:
    x, _, out = _vectors(64)
    linalg = _linalg(_gather, x, torch.zeros(64, dtype=torch.int32), out, 60, BLOCK=64)
    assert scalar_memory_loops(linalg) == 1
    assert bisheng.scalar_loops(bisheng.check(linalg).hivm) == 1


def test_scalar_loop_over_a_buffer_is_flagged() -> None:
    """int64 addition has no vector instruction: nothing in linalg shows it, the final IR does."""
    x = torch.arange(64)
    linalg = _linalg(_add, x, x, x.clone(), 64, BLOCK=64)
    assert scalar_memory_loops(linalg) == 0
    assert bisheng.scalar_loops(bisheng.check(linalg).hivm) == 1


def test_vector_loop_is_not_flagged() -> None:
    verdict = bisheng.check(_linalg(_add_in_loop, *_vectors(64), 64, BLOCK=64))
    assert (verdict.reason, bisheng.loops(verdict.hivm)) == ("", 1)
    assert bisheng.scalar_loops(verdict.hivm) == 0


def test_wrong_values_do_not_match() -> None:
    x, y, out = _vectors(1000)
    execute(_launch_of(_subtract, x, y, out, 1000, grid=4, BLOCK=256))
    with pytest.raises(AssertionError, match="largest relative error"):
        assert_close(out, x + y, what="add")


def test_unwritten_elements_do_not_match() -> None:
    x, y, out = _vectors(1000)
    execute(_launch_of(_add, x, y, out, 1000, grid=3, BLOCK=256))
    with pytest.raises(AssertionError, match="NaN"):
        assert_close(out, x + y, what="add")


def test_use_of_an_unwritten_buffer_is_seen() -> None:
    x, _, out = _vectors(64)
    execute(_launch_of(_copy_without_padding, x, out, 60, BLOCK=64))
    assert torch.equal(out[:60], x[:60])
    assert out[60:].isnan().all()


def test_write_behind_the_end_is_seen() -> None:
    with pytest.raises(
        ExecutionError, match="wrote 4 bytes outside out_ptr, the first at byte 400"
    ):
        execute(_launch_of(_add_one_too_many, *_vectors(100), 100, BLOCK=128))


def test_write_into_the_gap_of_a_strided_tensor_is_seen() -> None:
    x, y, _ = _vectors(100)
    out = torch.zeros(2, 200)[:, :100]
    with pytest.raises(ExecutionError, match="wrote 4 bytes outside out_ptr"):
        execute(_launch_of(_add_one_too_many, x, y, out, 100, BLOCK=128))
    assert torch.equal(out, torch.zeros(2, 100))


def test_read_through_a_masked_lane_is_seen() -> None:
    """Irregular loads read masked lanes too on Ascend, so their index must be clamped."""
    x, _, out = _vectors(64)
    index = torch.arange(64, dtype=torch.int32)
    execute(_launch_of(_gather, x, index, out, 64, BLOCK=64))
    assert torch.equal(out, x)
    with pytest.raises(ExecutionError, match="SIGSEGV"):
        execute(_launch_of(_gather, x, index, out, 60, BLOCK=64))


def test_hang_is_ended() -> None:
    @triton.jit
    def forever(flag_ptr):
        while tl.load(flag_ptr) == 0:
            tl.store(flag_ptr, 0)

    with pytest.raises(ExecutionError, match="ran longer than"):
        execute(_launch_of(forever, torch.zeros(1, dtype=torch.int32)), timeout=0.5)


def test_grown_table_row_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    variant = variant_of(_launch_of(_add, *_vectors(64), 64, BLOCK=64))
    linalg = lower(variant)
    row = table.row("add", "n64", variant, table.figures_of(linalg, bisheng.check(linalg)))
    monkeypatch.setattr(table, "load", lambda: (table.versions(), [row]))
    assert table.differences("add", [row]) == []
    assert table.differences("add", [{**row, "ub": 1024}])[0].endswith("(case n64): ub 512 -> 1024")
    assert table.differences("add", [])[0].startswith("gone: add: _add(")
    other = {**row, "constants": {"BLOCK": 128}}
    assert [line.split(":")[0] for line in table.differences("add", [row, other])] == ["new"]


@pytest.mark.parametrize("changed", ["nothing", "text", "compiler", "options"])
def test_only_the_same_text_is_known(changed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the same kernel, compiled with the same options by the same compilers."""
    variant = variant_of(_launch_of(_add, *_vectors(64), 64, BLOCK=64))
    linalg = lower(variant)
    figures = table.figures_of(linalg, bisheng.check(linalg))
    row = table.row("add", "n64", variant, figures)
    versions = table.versions()
    if changed == "compiler":
        versions |= {"ascendnpu-ir": "0"}
    if changed == "options":
        row |= {"options": {"multibuffer": False}}
    monkeypatch.setattr(table, "load", lambda: (versions, [row]))
    table.known_rows.cache_clear()
    found = table.known(variant, linalg.replace("64", "65") if changed == "text" else linalg)
    table.known_rows.cache_clear()
    assert found == (figures if changed == "nothing" else None)


@pytest.mark.parametrize(("status", "tries"), [(-11, 2), (1, 1)])
def test_a_lowering_that_died_is_tried_once_more(
    status: int, tries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a signal, that is; a refusal is one, and so is a second death."""
    variant = variant_of(_launch_of(_add, *_vectors(64), 64, BLOCK=32))
    real, calls = bisheng._lower, []

    def dies(*args: Any) -> str:
        calls.append(args)
        raise subprocess.CalledProcessError(status, "triton-adapter-opt", stderr=b"error: no")

    monkeypatch.setattr(bisheng, "_lower", dies)
    bisheng.lower.cache_clear()
    with pytest.raises(bisheng.LoweringError, match=f"ended with status {status}: error: no"):
        lower(variant)
    assert len(calls) == tries

    def dies_once(*args: Any) -> str:
        calls.append(args)
        return real(*args) if len(calls) > tries + 1 else dies(*args)

    monkeypatch.setattr(bisheng, "_lower", dies_once)
    if status < 0:
        assert "func" in lower(variant)
