"""Counting trials and judging a model's order, on tables whose answers are known."""

from __future__ import annotations

import itertools
import json
import math
import statistics
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench import rank, search_cost, tables
from bench.rows import UsageError
from bench.tables import Table

SPACE = {"BLOCK": [1, 2, 4, 8, 16, 32, 64, 128], "num_warps": [1, 2, 4, 8], "FAST": [True, False]}


def a_bowl() -> Table:
    """64 configs whose times fall towards one corner; two of them fail."""
    entries = []
    for values in itertools.product(*SPACE.values()):
        config = dict(zip(SPACE, values, strict=True))
        ms: float | None = 1.0 + abs(math.log2(values[0]) - 5) + abs(math.log2(values[1]) - 2)
        ms = None if values[0] == 1 and values[1] == 8 else ms + 0.03 * values[2]
        entries.append((config, ms))
    return Table("bowl", tuple(entries), entries[0][0])


def write(path: Path, table: Table) -> Path:
    rows = [
        {"config": config, "ms": ms, "default": config == table.default}
        for config, ms in table.entries
    ]
    path.write_text(json.dumps(rows))
    return path


def test_a_table_is_read_as_it_was_written(tmp_path: Path) -> None:
    table = a_bowl()
    read = tables.read(write(tmp_path / "bowl.json", table))
    assert read == table
    assert read.space == SPACE
    assert read.best == 1.0


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[]",
        '[{"config": {"A": 1}}]',
        '[{"config": {"A": 1}, "ms": null}]',
        '[{"config": {"A": 1}, "ms": -1}]',
        '[{"config": {"A": 1}, "ms": 1}, {"config": {"A": 1}, "ms": 2}]',
    ],
)
def test_what_is_no_table_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text(text)
    with pytest.raises(UsageError, match=r"t\.json must"):
        tables.read(path)


def test_trials_are_counted_to_the_first_config_within_the_slack() -> None:
    table = a_bowl()
    times = [ms for _, ms in table.entries]
    (within5,) = (
        cost.trials
        for cost in search_cost.costs(
            table, "", search_cost.curves(search_cost.brute_force, table, len(times), 1)
        )
        if cost.slack == 0.05
    )
    first = next(i for i, ms in enumerate(times, 1) if ms is not None and ms <= 1.05)
    assert within5 == (first,)


def test_only_one_config_is_within_two_percent() -> None:
    table = a_bowl()
    runs = search_cost.curves(search_cost.at_random, table, len(table.entries), 400)
    five, two = search_cost.costs(table, "random", runs)
    # Of 64 places in random order, one is in the middle on average, the first of two at a third.
    assert statistics.mean(two.trials) == pytest.approx(65 / 2, rel=0.1)
    assert statistics.mean(five.trials) == pytest.approx(65 / 3, rel=0.1)
    assert two.median <= two.p90 <= 64


def test_a_search_that_gives_up_never_gets_there() -> None:
    table = a_bowl()

    def lazy(space: object, entries: object, default: object, *, trials: int, seed: int):
        yield from [math.inf, 3.0][:trials]

    found = search_cost.costs(
        table, "ours", search_cost.curves(search_cost.ours(lazy), table, 64, 3)
    )
    assert [cost.median for cost in found] == [math.inf, math.inf]
    assert "never" in search_cost.report(table, found)
    assert "100%" in search_cost.report(table, found)


def replay(
    space: dict[str, list], entries: list, default: dict, *, trials: int, seed: int
) -> Iterator[float]:
    """A search that looks the answer up."""
    assert space == SPACE
    yield math.inf
    yield min(ms for _, ms in entries if ms is not None)


def test_the_command_prints_and_plots_and_keeps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib (extra 'plot') is not installed")
    path, picture, kept = (tmp_path / n for n in ("bowl.json", "cost.png", "cost.json"))
    write(path, a_bowl())
    options = ["--ours", f"{__name__}:replay", "--seeds", "9"]
    code = search_cost.main([str(path), *options, "--plot", str(picture), "--json", str(kept)])
    out = capsys.readouterr().out
    assert code == 0
    assert picture.read_bytes()[:4] == b"\x89PNG"
    assert "64 configs, 2 of them fail" in out
    (line,) = (line for line in out.splitlines() if line.startswith("ours") and "2%" in line)
    assert line.split()[2] == "2"
    found = {(c["strategy"], c["slack"]): c["trials"] for c in json.loads(kept.read_text())["bowl"]}
    assert found["ours", 0.02] == [2] * 9
    assert len(found["random", 0.05]) == 9


def test_a_search_that_is_not_there_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "bowl.json", a_bowl())
    assert search_cost.main([str(path), "--ours", "bench.rank:nothing"]) == 2
    assert "--ours must be MODULE:FUNCTION" in capsys.readouterr().err


# ---- the model's order -------------------------------------------------------------------------


def test_a_model_with_the_right_order_has_no_regret() -> None:
    measured = a_bowl()
    model = [(config, None if ms is None else ms**3) for config, ms in measured.entries]
    found = rank.rank(model, measured.entries, measured.default)
    assert found.spearman == pytest.approx(1.0)
    assert (found.regret, found.regret_of_five) == (0.0, 0.0)
    assert found.default_regret == pytest.approx(measured.entries[0][1] - 1.0)
    assert (found.configs, found.unseen_failures, found.false_failures) == (62, 0, 0)


def test_a_reversed_model_chooses_the_worst() -> None:
    measured = a_bowl()
    times = [ms for _, ms in measured.entries if ms is not None]
    model = [(config, 1 / (ms or 99)) for config, ms in measured.entries]
    found = rank.rank(model, measured.entries)
    assert found.spearman == pytest.approx(-1.0)
    assert found.regret == pytest.approx(max(times) / min(times) - 1)
    assert found.unseen_failures == 2
    assert math.isnan(found.default_regret)


def test_what_a_model_cannot_tell_apart_counts_on_average() -> None:
    assert rank.expected_best([(1, 5.0), (1, 7.0), (2, 1.0)], 1) == pytest.approx(6.0)
    assert rank.expected_best([(1, 5.0), (2, 7.0), (2, 1.0)], 2) == pytest.approx((5 + 1) / 2)
    assert rank.expected_best([(1, 3.0), (1, 1.0), (1, 2.0)], 2) == pytest.approx((1 + 1 + 2) / 3)
    assert rank.expected_best([(1, 4.0)], 5) == 4.0
    flat = rank.rank([({"A": i}, 1.0) for i in range(4)], [({"A": i}, 1.0 + i) for i in range(4)])
    assert math.isnan(flat.spearman)
    assert flat.regret == pytest.approx(1.5)


def test_false_failures_are_counted() -> None:
    measured = a_bowl()
    model = [(config, None if config["BLOCK"] == 32 else ms) for config, ms in measured.entries]
    found = rank.rank(model, measured.entries)
    assert found.false_failures == 8


def test_rank_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "bowl.json", a_bowl())
    assert rank.main(["--measured", str(path), "--model", str(path)]) == 0
    assert "62 configs, Spearman 1.000, first choice +0.0%" in capsys.readouterr().out
    tiny = tmp_path / "tiny.json"
    tiny.write_text('[{"config": {"BLOCK": 3}, "ms": 1}]')
    assert rank.main(["--measured", str(path), "--model", str(tiny)]) == 2
    assert "must share 3 configs" in capsys.readouterr().err
