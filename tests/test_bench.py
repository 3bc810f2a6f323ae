"""python -m bench: from the command line to rows, tables, saved results and README, and back."""

from __future__ import annotations

import dataclasses
import importlib.util
import io
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import host_overhead, providers, report, roofline, rows, run
from bench.__main__ import main
from tkernels import check, config, device, offline, registry, testing
from tkernels.registry import KernelSpec
from tkernels.testing import Timing

on_interpreter = pytest.mark.skipif(
    device.current().arch != "interpret", reason="is about machines without an accelerator"
)


def row(**changed: Any) -> rows.Row:
    """A row as an H100 might give it."""
    return rows.Row(
        **{
            "kernel": "rope",
            "case": "64x4096",
            "provider": "tkernels",
            "ms": 0.100,
            "p20": 0.098,
            "p80": 0.103,
            "method": "graph",
            "cache": "cold",
            "sets": 7,
            "gbps": 1500.0,
            "tflops": 0.5,
            "roof_share": 0.5,
            "config": {"BLOCK_N": 64},
            "config_source": "heuristic",
            "best_peer": "flashinfer",
            "ratio": 1.25,
            "device": "NVIDIA H100 80GB HBM3",
            "arch": "sm90",
            "versions": {"torch": "2.11.0"},
            "commit": "",
            "date": "2026-11-28T01:02:03+00:00",
            **changed,
        }
    )


def document_file(path: Path, *made: rows.Row) -> Path:
    path.write_text(rows.dumps(rows.Document({"copy_gbps": 3000.0}, list(made))))
    return path


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows of one small measurement through the command line."""
    path = tmp_path_factory.mktemp("bench") / "rows.json"
    case = "5x64" if device.current().arch == "interpret" else "64x4096"
    argv = ["--kernel", "rms_norm", "--case", case, "--rounds", "3", "--json", str(path)]
    assert main(argv) == 0
    return path


def test_measures_what_was_asked(measured: Path) -> None:
    document = rows.load(measured)
    by_provider = {r.provider: r for r in document.rows}
    assert {"tkernels", "reference", "torch"} <= set(by_provider)
    assert ("compile" in by_provider) == (device.tensor_device().type != "cpu")
    spec = registry.get("rms_norm")
    ours = by_provider["tkernels"]
    case = next(c for c in spec.cases if c.name == ours.case)
    for r in document.rows:
        assert 0 < r.p20 <= r.ms <= r.p80
        assert r.gbps == pytest.approx(spec.cost(case.problem).bytes / r.ms / 1e6)
        assert r.roof_share == pytest.approx(
            roofline.measured().least_ms(spec.cost(case.problem)) / r.ms
        )
        assert (r.arch, r.device) == (device.current().arch, device.current().name)
    assert set(ours.config or {}) == set(spec.default_config(case.problem, device.current()))
    peers = [r for r in document.rows if r.provider not in ("tkernels", "reference")]
    assert ours.ratio == pytest.approx(min(r.ms for r in peers) / ours.ms)
    assert document.roof["copy_gbps"] > 0
    assert document.roof["matmul_tflops"] > 0


def test_same_rows_are_within_noise(measured: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--from", str(measured), "--compare", str(measured)]) == 0
    out = capsys.readouterr().out
    count = len(rows.load(measured).rows)
    assert f"{count} rows compared" in out
    assert out.count("+0.0%  ~ noise") == count
    assert "0 new, 0 only in the old file" in out


def test_json_on_stdout_stands_alone(measured: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--from", str(measured), "--providers", "tkernels", "--json", "-"]
    assert main([*argv, "--compare", str(measured)]) == 0
    captured = capsys.readouterr()
    printed = json.loads(captured.out)
    assert [r["provider"] for r in printed["rows"]] == ["tkernels"]
    assert "rows compared" in captured.err


@on_interpreter
def test_interpreter_says_that_times_mean_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--kernel", "rms_norm", "--case", "5x64", "--rounds", "1", "--providers", "reference"]
    assert main(argv) == 0
    captured = capsys.readouterr()
    assert "times mean nothing here" in captured.err
    assert "reference" in captured.out
    assert "tkernels" not in captured.out


def test_list_names_every_kernel(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if not line.startswith(" ")] == list(registry.all_kernels())


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["--kernel", "ropes"], "kernel must be one of"),
        (["--kernel", "rms_norm", "--case", "9x9x9"], "--case must be part of"),
        (["--kernel", "rms_norm", "--providers", "tkernels,numpy"], "got 'numpy'"),
        (["--compare", "absent.json"], "absent.json must be a readable result document"),
        (["--from", "text.json"], "text.json must be a result document"),
        (["--from", "rows.json", "--compare", "old.json"], "must have schema 1, got 0"),
        (["--from", "rows.json", "--case", "7x7"], "must hold a row that was asked for"),
        (["--from", "rows.json", "--hot"], "--from must stand without"),
        (["--from", "rows.json", "--json", "text.json/x.json"], "must be a writable file"),
        (["--json", "text.json/x.json"], "must be a writable file"),
        (["--json", "."], "must be a writable file, got: a folder"),
        (["--plot", "text.json/x.png"], "must be a writable file"),
        (["--from", "rows.json", "--compare", "zero.json"], "ms of a row is 0.0, not above 0"),
        (["--from", "number.json"], "device of a row is 5, not a text"),
        (["--from", "gain.json"], "gain of a row is 'much', not a number"),
        (["--from", "interpret.json", "--save"], "--save must be given measurements of"),
        (["host", "--kernel", "ropes"], "kernel must be one of"),
    ],
)
def test_refusals_are_one_sentence(
    argv: list[str],
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    document_file(tmp_path / "rows.json", row())
    document_file(tmp_path / "interpret.json", row(arch="interpret"))
    document_file(tmp_path / "zero.json", row(ms=0.0))
    document_file(tmp_path / "number.json", row(device=5))
    document_file(tmp_path / "gain.json", row(gain="much"))
    (tmp_path / "text.json").write_text('{"schema": 1, "roof": {}, "rows": [{"kernel": 1}]}')
    (tmp_path / "old.json").write_text('{"schema": 0, "roof": {}, "rows": []}')
    assert main(argv) == 2
    error = capsys.readouterr().err
    assert sentence in error
    assert error.count("\n") == 1, error


@on_interpreter
def test_interpreter_results_are_refused_before_measuring(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["--save"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_comparison_tells_change_from_noise() -> None:
    old = [row(case=c) for c in ("slower", "faster", "noisy", "gone")]
    new = [
        row(case="slower", ms=0.110, p20=0.108, p80=0.112),
        row(case="faster", ms=0.090, p20=0.089, p80=0.092),
        row(case="noisy", ms=0.102, p20=0.097, p80=0.105),
        row(case="slower", cache="hot"),
    ]
    verdicts = {line[1]: line[-2:] for line in report.compare(old, new)}
    assert verdicts == {
        "slower": ["+10.0%", "SLOWER"],
        "faster": ["-10.0%", "faster"],
        "noisy": ["+2.0%", "~ noise"],
    }
    screen = io.StringIO()
    report.print_comparison(old, [*new, row(case="h200", device="NVIDIA H200")], screen)
    text = screen.getvalue()
    assert "3 rows compared" in text
    assert "2 new, 1 only in the old file" in text
    assert "not the same device" in text


# ---- saved results and README ----------------------------------------------------------------


def test_save_keeps_the_latest_row_of_each(tmp_path: Path) -> None:
    first = rows.Document({"copy_gbps": 1.0}, [row(case="b"), row(case="a"), row(arch="sm100")])
    assert [p.name for p in rows.save(first, tmp_path)] == ["sm100.json", "sm90.json"]
    rows.save(rows.Document({"copy_gbps": 2.0}, [row(case="b", ms=0.05)]), tmp_path)
    kept = rows.load(tmp_path / "sm90.json")
    assert [(r.case, r.ms) for r in kept.rows] == [("a", 0.1), ("b", 0.05)]
    assert kept.roof == {"copy_gbps": 2.0}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["sm100.json", "sm90.json"]


def test_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = document_file(tmp_path / "sm90.json", row())
    before = path.read_text()

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(rows.os, "replace", fail)
    with pytest.raises(rows.UsageError, match="No space left"):
        rows.save(rows.Document({}, [row(ms=9.0)]), tmp_path)
    assert path.read_text() == before
    assert [p.name for p in tmp_path.iterdir()] == ["sm90.json"]


def test_readme_table_comes_from_the_results(tmp_path: Path) -> None:
    results = tmp_path / "results"
    readme = tmp_path / "README.md"
    readme.write_text(f"# title\n{report.BEGIN}\nold\n{report.END}\ntail\n")
    report.update_readme(readme, results)
    assert "no results yet" in readme.read_text()

    peer = row(provider="flashinfer", ratio=None, best_peer="", ms=0.125)
    alone = row(case="1x64", ms=0.002, ratio=None, best_peer="")
    rows.save(rows.Document({}, [row(), peer, alone]), results)
    report.update_readme(readme, results)
    text = readme.read_text()
    assert text.startswith("# title\n")
    assert text.endswith(f"{report.END}\ntail\n")
    assert "\nold\n" not in text
    assert "**NVIDIA H100 80GB HBM3** (sm90)" in text
    lines = [line for line in text.splitlines() if line.startswith("| `")]
    assert lines == [
        "| `rope` | 1x64 | cold | 2.00 |  |  |  | 50% | 2026-11-28 |",
        "| `rope` | 64x4096 | cold | 100.00 | flashinfer | 125.00 | 1.25 | 50% | 2026-11-28 |",
    ]
    again = readme.read_text()
    report.update_readme(readme, results)
    assert readme.read_text() == again


def test_readme_without_markers_is_refused(tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text(f"{report.END} {report.BEGIN}")
    with pytest.raises(rows.UsageError, match="must hold one"):
        report.update_readme(readme, tmp_path)


def test_committed_readme_matches_committed_results() -> None:
    """``python -m bench --readme`` was run after the last --save."""
    _, inside, _ = report.readme_block(report.README.read_text())
    assert inside.strip() == report.readme_table().strip()


def test_committed_results_are_of_accelerators() -> None:
    for path in rows.RESULTS.glob("*.json"):
        for r in rows.load(path).rows:
            assert r.arch == path.stem
            assert r.arch != "interpret"


def test_plot_is_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib", reason="the chart needs matplotlib, which is optional")
    source = document_file(tmp_path / "rows.json", row(), row(provider="liger"), row(case="b"))
    assert main(["--from", str(source), "--plot", str(tmp_path / "roof.png")]) == 0
    assert (tmp_path / "roof.png").read_bytes().startswith(b"\x89PNG")
    assert main(["--from", str(source), "--plot", str(tmp_path / "roof.txt9")]) == 2
    assert "--plot must be a writable picture file" in capsys.readouterr().err


def test_plot_without_matplotlib_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = document_file(tmp_path / "rows.json", row())
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(["--from", str(source), "--plot", str(tmp_path / "roof.png")]) == 2
    assert "matplotlib" in capsys.readouterr().err


# ---- what is timed, and against what ---------------------------------------------------------


def small(spec: KernelSpec) -> registry.Case:
    return next(c for c in spec.cases if "smoke" in c.tags)


def test_a_wrong_kernel_is_not_timed() -> None:
    spec = registry.get("rms_norm")

    def off_by_little(*args: Any, out: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return out.copy_(1.03 * spec.reference(*args, **kwargs))

    def peers(inputs: dict[str, Any]) -> dict[str, Any]:
        def broken() -> None:
            raise RuntimeError("no kernel image\nsecond line")

        return {"broken": broken, "fine": lambda: inputs["x"].clone()}

    said: list[str] = []
    wrong = dataclasses.replace(spec, launch=off_by_little, providers=peers)
    outcome = run.measure([(wrong, small(spec))], rounds=1, say=said.append)
    assert {"reference", "fine"} <= {r.provider for r in outcome.rows}
    assert not {"tkernels", "broken"} & {r.provider for r in outcome.rows}
    assert len(outcome.failures) == 1
    assert "is wrong: out: largest relative error" in outcome.failures[0]
    loud = [line for line in said if "NOT TIMED" in line]
    assert len(loud) == 2
    assert loud[1].endswith("provider broken failed: RuntimeError: no kernel image")


def test_wrong_kernel_ends_the_command_with_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = run.Outcome([row()], ["rope 64x4096: is wrong"])
    monkeypatch.setattr(run, "measure", lambda *_, **__: outcome)
    assert main(["--kernel", "rms_norm"]) == 1
    assert "WRONG OR FAILED rope 64x4096: is wrong" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("touched", "per_set", "hot", "expected"),
    [
        (40_000, 40_000, False, (2500, "cold")),
        (40_000, 40_000, True, (1, "hot")),
        (60_000_000, 60_000_000, False, (2, "cold")),
        (600_000_000, 600_000_000, False, (1, "cold")),
        (1_000, 1_000, False, (8192, "warm")),  # too many sets
        (1_000_000, 1 << 30, False, (2, "warm")),  # too much memory
        (25_000_000, 20_000, False, (4, "warm")),  # one set of weights for all
        (1_340_000, 1_310_000, False, (75, "cold")),  # a table for all
    ],
)
def test_sets_exceed_twice_the_cache(
    touched: int, per_set: int, hot: bool, expected: tuple[int, str]
) -> None:
    assert testing.set_count(touched, per_set, 50_000_000, hot=hot) == expected


def test_sets_leave_room_on_a_small_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "memory_bytes", lambda: 8 << 30)
    assert testing.set_count(1_000_000, 1 << 28, 50_000_000, hot=False) == (2, "warm")
    monkeypatch.setattr(device, "memory_bytes", lambda: 80 << 30)
    assert testing.set_count(1_000_000, 1 << 28, 50_000_000, hot=False) == (8, "warm")


def test_sets_have_buffers_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = registry.get("rms_norm")
    case = small(spec)
    table = torch.zeros(1 << 20, device=device.tensor_device())

    def with_table(problem: registry.Problem, dev: torch.device) -> dict[str, Any]:
        return {**spec.make_inputs(problem, dev), "table": table}

    def reference(*args: Any, table: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        result: torch.Tensor = spec.reference(*args, **kwargs)
        return result

    monkeypatch.setattr(device, "l2_bytes", lambda: 2 * spec.cost(case.problem).bytes)
    wide = dataclasses.replace(spec, make_inputs=with_table, reference=reference)
    sets, outs, cache = providers.input_sets(wide, case, hot=False)
    assert (len(sets), len(outs), cache) == (4, 4, "cold")
    assert len({s["x"].data_ptr() for s in sets} | {o["out"].data_ptr() for o in outs}) == 8
    assert all(torch.equal(s["x"], sets[0]["x"]) for s in sets)
    assert {s["table"].data_ptr() for s in sets} == {table.data_ptr()}, "a big table is shared"


def test_absent_peers_are_named() -> None:
    def peers(inputs: dict[str, Any]) -> dict[str, Any]:
        import json.decoder

        import no_such_peer.ops

        def deeper() -> None:
            from another_absent import thing

            thing()

        return {"a": json.decoder, "b": no_such_peer, "c": deeper}

    spec = dataclasses.replace(registry.get("rms_norm"), providers=peers)
    assert providers.missing_peers(spec) == {
        "another_absent": "No module named 'another_absent'",
        "no_such_peer": "No module named 'no_such_peer'",
    }


def test_ratio_is_to_the_fastest_peer_timed_alike() -> None:
    def timing(ms: float, method: str = "graph") -> Timing:
        return Timing(ms, ms, ms, method)

    timings = {
        "tkernels": timing(2.0),
        "reference": timing(0.1),
        "compile": timing(3.0),
        "default": timing(2.1),
        "liger": timing(2.5),
        "launched": timing(1.0, "events"),
    }
    assert run.best_peer(timings) == ("liger", 1.25)
    assert run.best_peer({"tkernels": timing(2.0), "reference": timing(1.0)}) == ("", None)
    assert run.best_peer({"liger": timing(2.0)}) == ("", None)


# ---- tuned and default -----------------------------------------------------------------------


@pytest.fixture
def tuned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[registry.Case, Path]]:
    """A case of rms_norm that a tuned file serves with another config than the heuristic's."""
    spec = registry.get("rms_norm")
    case = small(spec)
    default = spec.default_config(case.problem, device.current())
    entry = {
        "key": spec.tuning_key(case.problem),
        "config": {**default, "programs_per_core": 4 if default["programs_per_core"] != 4 else 2},
        "ms": 1.0,
        "default_ms": 2.0,
        "measured": {"num_cores": 1},
    }
    path = tmp_path / device.current().arch / "rms_norm.json"
    path.parent.mkdir()
    document = {"schema": 1, "kernel": "rms_norm", "arch": path.parent.name, "entries": [entry]}
    path.write_text(json.dumps(document))
    monkeypatch.setenv("TKERNELS_CONFIG_DIR", str(tmp_path))
    config.reload()
    yield case, path
    monkeypatch.undo()
    config.reload()


def test_a_tuned_case_is_timed_with_the_default_too(tuned: tuple[registry.Case, Path]) -> None:
    case, path = tuned
    seen: list[Any] = []
    spec = registry.get("rms_norm")

    def watched(*args: Any, config: Any = None, **kwargs: Any) -> Any:
        seen.append(config)
        return spec.launch(*args, config=config, **kwargs)

    outcome = run.measure(
        [(dataclasses.replace(spec, launch=watched), case)],
        wanted=["tkernels", "default", "torch"],
        rounds=3,
        say=lambda line: None,
    )
    by_provider = {r.provider: r for r in outcome.rows}
    ours, default = by_provider["tkernels"], by_provider["default"]
    expected = spec.default_config(case.problem, device.current())
    stored = json.loads(path.read_text())["entries"][0]["config"]
    assert (ours.config, ours.config_source) == (stored, "TKERNELS_CONFIG_DIR")
    assert (default.config, default.config_source) == (expected, "heuristic")
    assert ours.gain == pytest.approx(default.ms / ours.ms)
    assert (default.gain, default.ratio, default.best_peer) == (None, None, "")
    assert ours.best_peer == "torch"
    assert {json.dumps(config) for config in seen} == {"null", json.dumps(expected)}
    assert rows.Row(**json.loads(rows.dumps(rows.Document({}, [ours])))["rows"][0]) == ours


def test_a_wrong_default_is_a_failure_of_ours(tuned: tuple[registry.Case, Path]) -> None:
    case, _ = tuned
    spec = registry.get("rms_norm")

    def launch(*args: Any, out: torch.Tensor, config: Any = None, **kwargs: Any) -> torch.Tensor:
        return out.copy_(spec.reference(*args, **kwargs) * (1 if config is None else 2))

    wrong = dataclasses.replace(spec, launch=launch)
    outcome = run.measure([(wrong, case)], rounds=1, say=lambda line: None)
    assert "tkernels" in {r.provider for r in outcome.rows}
    assert "default" not in {r.provider for r in outcome.rows}
    assert len(outcome.failures) == 1
    assert "is wrong: out" in outcome.failures[0]


def test_without_a_tuned_config_there_is_no_default() -> None:
    spec, said = registry.get("rms_norm"), []
    wanted = ["tkernels", "default"]
    outcome = run.measure([(spec, small(spec))], wanted=wanted, rounds=1, say=said.append)
    assert [(r.provider, r.gain) for r in outcome.rows] == [("tkernels", None)]
    assert any("provider default is left out: no tuned config" in line for line in said)


def test_tables_show_the_gain_where_there_is_one(tmp_path: Path) -> None:
    screen = io.StringIO()
    report.print_rows([row()], screen)
    assert "vs default" not in screen.getvalue()
    made = [row(gain=1.1, config_source="shipped"), row(provider="default", ms=0.11, ratio=None)]
    report.print_rows(made, screen)
    header, first, second = screen.getvalue().splitlines()[-3:]
    assert header.index("vs default") < header.index("vs best peer")
    assert "1.100x" in first
    assert "1.100x" not in second

    rows.save(rows.Document({}, [*made, row(case="1x64")]), tmp_path)
    table = report.readme_table(tmp_path)
    assert "| us | default us | gain | best peer |" in table
    assert "gain: default us over us" in table
    lines = [line for line in table.splitlines() if line.startswith("| `")]
    ours = "100.00 | 110.00 | 1.100 | flashinfer | 125.00 | 1.25 | 50% | 2026-11-28 |"
    assert f"| `rope` | 64x4096 | cold | {ours}" in lines
    assert f"| `rope` | 1x64 | cold | {ours.replace('110.00 | 1.100', ' | ')}" in lines
    assert len(lines) == 2
    bars = [line.count("|") for line in table.splitlines() if line.startswith("|")]
    assert len(set(bars)) == 1


def test_gain_is_of_times_taken_alike() -> None:
    alike = {"tkernels": Timing(2.0, 2.0, 2.0, "graph"), "default": Timing(3.0, 3.0, 3.0, "graph")}
    assert run.gain(alike) == 1.5
    assert run.gain({**alike, "default": Timing(3.0, 3.0, 3.0, "events")}) is None
    assert run.gain({"tkernels": alike["tkernels"]}) is None


# ---- host cost -------------------------------------------------------------------------------


def test_recorded_launches_do_the_work_of_the_call() -> None:
    spec = registry.get("rms_norm")
    inputs = spec.make_inputs(small(spec).problem, device.tensor_device())
    out = torch.empty_like(inputs["x"])
    launches = host_overhead.recorded_launches(lambda: spec.launch(**inputs, out=out))
    expected = out.clone()
    out.zero_()
    assert len(launches) == 1
    launches[0]()
    device.synchronize()
    assert torch.equal(out, expected)


def test_host_command_reports_every_kernel(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["host", "--calls", "600", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [o["kernel"] for o in found] == list(registry.all_kernels())
    for o in found:
        assert o["launches"] >= 1
        assert o["public_us"] > 0
        assert o["bare_us"] > 0


@on_interpreter
def test_host_times_are_without_checks_of_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which are on in the interpreter, and off where a launch is worth timing."""
    monkeypatch.setattr(check, "DEBUG", True)
    calls: list[object] = []
    monkeypatch.setattr("tkernels.rotary.check_positions", lambda *given: calls.append(given))
    host_overhead.measure(*host_overhead.smallest_cases("rope")[0], calls=600)
    assert len(calls) == 2  # compiled, recorded
    assert check.DEBUG


@on_interpreter
@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("name", registry.all_kernels())
def test_python_above_a_launch_is_bounded(name: str) -> None:
    """Checks and lookup of a call whose metadata was seen before, in calls of functions.

    Their number is the same on every machine, however busy; what they cost is for an accelerator:
    ``python -m bench host``. A lookup that is not remembered makes hundreds.
    """
    ((spec, case),) = host_overhead.smallest_cases(name)
    public = host_overhead.public_call(spec, case)
    public()  # metadata is seen
    launches = host_overhead.recorded_launches(public)
    with offline.replaced_run(lambda *args, **kwargs: None):
        public()  # the new launch too
        extra = function_calls(public) - sum(function_calls(launch) for launch in launches)
    problem = spec.make_inputs(case.problem, device.tensor_device())
    tensors = sum(isinstance(value, torch.Tensor) for value in problem.values())
    assert 0 < extra <= 20 + tensors, f"{name}: {extra} function calls above the launch"


def function_calls(fn: Callable[[], Any]) -> int:
    """How many functions, of Python or C, run when ``fn`` is called."""
    count = 0

    def event(frame: Any, kind: str, arg: Any) -> None:
        nonlocal count
        count += kind in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(event)
    try:
        fn()
    finally:
        sys.setprofile(before)
    return count


def test_a_mistyped_command_is_answered_with_the_right_ones(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["modl"]) == 2
    assert "expected host, model, engine, moe or options (see --help), got 'modl'" in (
        capsys.readouterr().err
    )
