"""--report: pages and pictures of made-up searches, from the smallest to the strangest."""

from __future__ import annotations

import html.parser
import json
import re
import struct
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("optuna", reason="the tuner needs optuna (tkernels[tune])")
pytest.importorskip("matplotlib", reason="the report needs matplotlib (tkernels[plot])")
pytest.importorskip("plotly", reason="the report needs plotly (tkernels[plot])")

import importlib.util

import studies
from optuna.trial import TrialState

from autotune import report
from autotune.report import drawing, pictures, pictures_of_kernel, searched
from tkernels.registry import Cost


class Page(html.parser.HTMLParser):
    """What a reader sees of a page, and whether its tags are in order."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.words: list[str] = []
        self.images: list[dict[str, str | None]] = []
        self.links: list[str] = []
        self.scripts: list[dict[str, str | None]] = []
        self.data: list[Any] = []
        self._open: list[str] = []
        self._kind = ""
        self.source = path.read_text()
        self.feed(self.source)
        assert self._open == [], "tags are left open"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        if tag == "img":
            self.images.append(found)
            self.words.append(str(found["alt"]))
        if tag == "a":
            self.links.append(str(found["href"]))
        if tag == "script":
            self.scripts.append(found)
            self._kind = str(found.get("type"))
        if tag not in ("img", "meta"):
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        inside = self._open[-1] if self._open else ""
        if inside == "script" and self._kind == "application/json":
            self.data.append(json.loads(data))
        elif inside not in ("script", "style"):
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(self.words)


def pages(folder: Path) -> dict[str, Page]:
    return {path.name: Page(path) for path in sorted(folder.glob("*.html"))}


def check_folder(folder: Path) -> dict[str, Page]:
    """What holds for every report: all links and pictures are there, described, and local."""
    found = pages(folder)
    shown = set()
    for page in found.values():
        for image in page.images:
            picture = (folder / str(image["src"])).read_bytes()
            assert picture.startswith(b"\x89PNG")
            size = struct.unpack(">II", picture[16:24])
            assert size == (int(str(image["width"])), int(str(image["height"])))
            assert len(str(image["alt"])) > 15
            shown.add(image["src"])
        for link in page.links:
            name, _, fragment = link.partition("#")
            assert not name or name in found
            assert not fragment or f'id="{fragment}"' in page.source
        sources = [script["src"] for script in page.scripts if "src" in script]
        assert sources == ["plotly.min.js"]
        assert "prefers-color-scheme: dark" in page.source
        assert not re.search(r"https?://|//cdn", page.source)
    assert (folder / "plotly.min.js").stat().st_size > 1e6
    assert {path.name for path in folder.glob("*.png")} == shown
    return found


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report of a finished search, one that just began, and one offline that goes on."""
    folder = tmp_path_factory.mktemp("report")
    done, offline = (studies.search(n, seed=n) for n in (60, 24))
    name, problem = studies.problem_of("rms_norm", place=1)
    made = [
        studies.study(done, outcome=studies.ended(done)),
        studies.study(done[:1], case=name, problem=problem),
        studies.study(offline, arch="ascend910b", offline=True),
    ]
    assert report.write_report(made, folder) == folder / "index.html"
    return folder


def test_files_of_a_report(whole: Path) -> None:
    found = check_folder(whole)
    assert set(found) == {
        "index.html",
        "rms_norm-sm90.html",
        "rms_norm-ascend910b-offline.html",
    }
    names = {path.name for path in whole.glob("rms_norm-sm90-*.png")}
    per_problem = ("history", "parallel", "importance", "slices", "pair", "failures")
    assert {f"rms_norm-sm90-1-{name}.png" for name in per_problem} <= names
    assert "rms_norm-sm90-2-history.png" in names
    assert {"rms_norm-sm90-gains.png", "rms_norm-sm90-roofline.png"} <= names
    assert (whole / "index-overview.png").exists()


def test_numbers_on_the_pages(whole: Path) -> None:
    trials = studies.search(60, seed=60)
    outcome = studies.ended(trials)
    gain = outcome["default_ms"] / outcome["ms"]
    page = Page(whole / "rms_norm-sm90.html")
    assert f"{gain:.3f}x" in page.text
    assert drawing.number(1e3 * outcome["ms"]) in page.text
    assert "1.000x so far" in page.text  # of the search that just began
    kinds = {t.user_attrs["kind"] for t in trials} - {"ok"}
    assert len(kinds) == 4
    assert all(kind in page.text for kind in kinds)
    assert "configs computed something WRONG" in page.text
    assert "PED-ANOVA" in page.text
    assert "measured on NVIDIA H100" in page.text  # whose roof it is
    assert all(f"{name}=" in page.text for name in outcome["config"])
    index = Page(whole / "index.html")
    assert "rms_norm on sm90" in index.text
    count = len(searched.read(studies.study(trials)).tried) + 1
    assert f" {count} " in index.text  # configs of both problems together


def test_nothing_offline_is_called_time(whole: Path) -> None:
    """A number that no clock measured is an estimate in every label, alt text and figure."""
    page = Page(whole / "rms_norm-ascend910b-offline.html")
    spoken = page.text + json.dumps(page.data)
    assert not re.search(r"\b(time|timed|times|timing)\b", re.sub(r"\d times\b", "", spoken))
    assert "estimate (µs)" in page.text
    assert "Nothing on this page was run" in page.text
    measured = Page(whole / "rms_norm-sm90.html")
    assert "time (µs)" in measured.text
    assert "time of one call" in json.dumps(measured.data)
    assert "estimate" not in measured.text + json.dumps(measured.data)


def test_words_in_pictures_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    original = drawing.finished

    def watched(figure: Any, *words: str) -> drawing.Picture:
        for text in figure.findobj(match=lambda artist: hasattr(artist, "get_text")):
            said.append(text.get_text())
        return original(figure, *words)

    monkeypatch.setattr(pictures, "finished", watched)
    monkeypatch.setattr(pictures_of_kernel, "finished", watched)
    s = searched.read(studies.study(studies.search(24), offline=True))
    with drawing.style():
        drawn = pictures.of_problem(s, searched.importance(s))
        assert pictures_of_kernel.gains([s]) is not None
        assert pictures_of_kernel.roofline([s]) is not None
    assert len(drawn) == 6
    assert any("estimate" in words for words in said)
    assert not [words for words in said if re.search(r"\btimed?\b", words)]
    assert any("estimated TFLOP/s" in words for words in said)


def test_interactive_figures_have_real_values(whole: Path) -> None:
    figures = Page(whole / "rms_norm-sm90.html").data
    titles = [figure["layout"]["title"]["text"] for figure in figures]
    assert [title.rpartition(": ")[2] for title in titles] == [
        *("history", "parallel coordinates", "slices"),
    ]
    tiles = {"64", "128", "256", "512", "1024", "2048", "4096"}
    assert {str(x) for x in figures[2]["data"][0]["x"]} == tiles
    assert tiles <= set(re.findall(r"\d+", json.dumps(figures[1])))
    assert all("template" not in figure["layout"] for figure in figures)


# ---- from studies to what is shown -------------------------------------------------------------


def test_each_config_is_read_once_and_lost_trials_are_counted() -> None:
    a, b = {"BLOCK": 1}, {"BLOCK": 2}
    s = searched.read(
        studies.study(
            [
                studies.trial(a, ms=0.5, origin="default"),
                studies.trial(b, kind="crashed", state=TrialState.FAIL, message="killed"),
                studies.trial(b, ms=0.25),
                studies.trial(a, ms=0.6),
            ]
        )
    )
    assert [(t.place, t.config, t.us) for t in s.tried] == [(1, a, 500.0), (2, b, 250.0)]
    assert s.lost == 1
    assert (s.config, s.us, s.default_us, s.gain) == (b, 250.0, 500.0, 2.0)
    assert not s.finished


def test_the_outcome_is_what_counts_at_the_end() -> None:
    """The duel measured anew; the first measurements were partly luck."""
    trials = studies.search(20)
    ended = {**studies.ended(trials), "ms": 0.5, "default_ms": 0.55}
    s = searched.read(studies.study(trials, outcome=ended))
    assert (s.us, s.default_us) == (500.0, pytest.approx(550.0))
    assert s.finished


def test_stopped_and_failed_configs_are_not_ranked() -> None:
    s = searched.read(studies.study(studies.search(60)))
    assert all(t.complete and not t.stopped for t in s.ranked)
    assert len(s.ranked) < len(s.tried) - sum(s.failures.values())
    us = [t.us for t in s.ranked]
    assert us == sorted(us)
    best = pictures.leaders(s)
    assert len(best) == 10
    assert best[-1].config == s.default_config


def test_real_values_stand_in_the_rebuilt_study() -> None:
    trials = studies.search(40)
    s = searched.read(studies.study(trials))
    rebuilt = searched.real_study(s)
    assert len(rebuilt.trials) == len(s.ranked)
    by_value = {t.value: t.params for t in rebuilt.trials}
    for t in s.ranked:
        shown = {name: t.config.get(name, "-") for name in by_value[t.us]}
        expected = {n: str(v) if isinstance(v, bool) else v for n, v in shown.items()}
        assert by_value[t.us] == expected
    many = [studies.trial({"SPLITS": n}, ms=float(n)) for n in range(1, 40)]
    wide = searched.real_study(searched.read(studies.study(many)))
    assert wide.trials[0].distributions["SPLITS"].log


def test_importance_finds_what_decides() -> None:
    """Only BLOCK decides here; IDLE does nothing and ONE never varies."""
    trials = [
        studies.trial({"BLOCK": b, "IDLE": i, "ONE": 1}, ms=float(b))
        for b in (1, 2, 4, 8)
        for i in (0, 1, 2)
    ]
    shares = searched.importance(searched.read(studies.study(trials)))
    assert set(shares) == {"BLOCK", "IDLE"}
    assert shares["BLOCK"] > 0.9
    assert sum(shares.values()) == pytest.approx(1)
    assert searched.importance(searched.read(studies.study(trials[:5]))) == {}


def test_roof_and_share() -> None:
    cost = Cost(flops=10**9, bytes=10**6)
    roof = searched.Roof(1e12, 1e15, "somewhere")
    assert roof.least_us(cost) == pytest.approx(1.0)  # both limits meet here
    assert roof.least_us(Cost(flops=0, bytes=3 * 10**6)) == pytest.approx(3.0)
    told = {"roof": {"copy_gbps": 1000.0, "matmul_tflops": 100.0}}
    found = searched.roof_of("sm90", told)
    assert found is not None
    assert (found.bytes_per_s, found.flops_per_s) == (1e12, 1e14)
    assert searched.roof_of("sm999", {}) is None
    assert searched.roof_of("sm999", {"roof": {"copy_gbps": "fast"}}) is None
    of_bench = searched.roof_of("sm90", {})
    assert of_bench is not None
    assert "measured on NVIDIA H100" in of_bench.source


def test_ticks_are_plain_numbers() -> None:
    written = [drawing.plain()(value, 0) for value in (5e-05, 0.2, 1.0, 40.0, 12345.0)]
    assert written == ["0.00005", "0.2", "1", "40", "12,345"]


# ---- small and strange studies -----------------------------------------------------------------

ONE = {"BLOCK_N": 64}


def test_one_trial(tmp_path: Path) -> None:
    made = studies.study([studies.trial(ONE, ms=0.05, origin="default")])
    report.write_report([made], tmp_path)
    found = check_folder(tmp_path)
    page = found["rms_norm-sm90.html"]
    assert "1.000x" in page.text
    assert "the default: BLOCK_N=64" in page.text
    assert {p.name.split("-")[-1] for p in tmp_path.glob("rms_norm*.png")} == {
        "history.png",
        "gains.png",
        "roofline.png",
    }


def test_only_failures(tmp_path: Path) -> None:
    made = studies.study(
        [studies.trial({"BLOCK_N": n}, kind="out of memory", message="no") for n in (64, 128)]
    )
    report.write_report([made], tmp_path)
    page = check_folder(tmp_path)["rms_norm-sm90.html"]
    assert "No config has a number yet" in page.text
    assert "2 out of memory" in page.text
    assert "2 configs that failed" in page.text


def test_no_trial_and_no_study(tmp_path: Path) -> None:
    made = studies.study([], default=ONE)
    report.write_report([made], tmp_path)
    assert "0 configs, not finished" in check_folder(tmp_path)["rms_norm-sm90.html"].text
    report.write_report([], tmp_path / "empty")
    assert "holds no search" in check_folder(tmp_path / "empty")["index.html"].text


def test_one_value_that_never_varies(tmp_path: Path) -> None:
    trials = [
        studies.trial({"BLOCK_N": n, "num_stages": 2}, ms=0.05 + n / 1e5) for n in (64, 128, 256)
    ]
    report.write_report([studies.study(trials)], tmp_path)
    page = check_folder(tmp_path)["rms_norm-sm90.html"]
    assert "The same in all: num_stages=2." in page.text


def test_equal_and_tiny_times(tmp_path: Path) -> None:
    trials = [studies.trial({"A": a, "B": a % 2}, ms=1e-6) for a in range(12)]
    report.write_report([studies.study(trials)], tmp_path)
    assert "1.000x" in check_folder(tmp_path)["rms_norm-sm90.html"].text


def test_slow_configs_without_a_complete_one(tmp_path: Path) -> None:
    trials = [studies.trial({"A": a}, kind="slow", ms=3.0, message="9 times") for a in (1, 2)]
    report.write_report([studies.study(trials)], tmp_path)
    assert "slow" in check_folder(tmp_path)["rms_norm-sm90.html"].text


def test_a_kernel_that_is_not_registered_here_has_no_roofline(tmp_path: Path) -> None:
    made = studies.study([studies.trial(ONE, ms=0.05)], kernel="of_a_user", problem={"n": 3})
    report.write_report([made], tmp_path)
    check_folder(tmp_path)
    assert not list(tmp_path.glob("*roofline.png"))


def test_a_copy_has_a_roofline_over_bytes(tmp_path: Path) -> None:
    with drawing.style():
        name, problem = studies.problem_of("append_paged_kv")
        made = studies.study(
            [studies.trial(ONE, ms=0.05)], kernel="append_paged_kv", case=name, problem=problem
        )
        picture = pictures_of_kernel.roofline([searched.read(made)])
    assert picture is not None
    assert name in picture.alt


NASTY = "<script>alert('x')</script>&\"$x^2$ \\frac 100%"


def test_everything_is_escaped(tmp_path: Path) -> None:
    trials = [studies.trial({"NAME": NASTY, "A</script>": a}, ms=0.05 + a / 100) for a in range(12)]
    trials.append(studies.trial({"NAME": "x"}, kind="does not run", message=NASTY))
    made = studies.study(
        trials,
        kernel=f"../{NASTY}",
        arch="sm/90",
        case=NASTY,
        problem={"n": 1},
        fingerprint={"triton": NASTY},
    )
    report.write_report([made], tmp_path / "here")
    found = check_folder(tmp_path / "here")
    assert [path.name for path in tmp_path.iterdir()] == ["here"]
    assert len(found) == 2
    for page in found.values():
        assert "<script>alert" not in page.source
        assert NASTY in page.text


def test_two_kernels_whose_file_names_are_equal(tmp_path: Path) -> None:
    made = [
        studies.study([studies.trial(ONE, ms=0.05)], kernel=name, problem={"n": 3})
        for name in ("a/b", "a b")
    ]
    report.write_report(made, tmp_path)
    found = check_folder(tmp_path)
    assert len(found) == 3
    assert len(set(found["index.html"].links)) == 2


# ---- refusals ----------------------------------------------------------------------------------


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"^autotune: --report must be a writable folder, got .*"):
        report.write_report([], tmp_path / "file")
    with pytest.raises(ValueError, match="--report must be a writable folder"):
        report.check_ready(tmp_path / "file" / "below")


def test_looking_whether_a_folder_can_be_written_leaves_it_alone(tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text("of an earlier report")
    report.check_ready(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["index.html"]
    assert (tmp_path / "index.html").read_text() == "of an earlier report"


def test_interpreted_times_are_marked(tmp_path: Path) -> None:
    made = studies.study([studies.trial(ONE, ms=0.05)], arch="interpret")
    report.write_report([made], tmp_path)
    assert "say nothing of any device" in pages(tmp_path)["rms_norm-interpret.html"].text


@pytest.mark.parametrize("missing", ["matplotlib", "plotly"])
def test_a_library_that_is_missing(
    missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == missing else original(name)
    )
    with pytest.raises(ValueError, match=rf"--report needs {missing}, got none; pip install"):
        report.write_report([], tmp_path)
    assert not list(tmp_path.iterdir())


# ---- numbers for people ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (41.25, "41.2"), (5.0, "5.00"), (1234.5, "1,234"), (0.00123, "0.00123")],
)
def test_numbers(value: float, text: str) -> None:
    assert drawing.number(value) == text


def test_long_names_are_cut_in_the_middle() -> None:
    assert drawing.short("short") == "short"
    cut = drawing.short("begin-" + "x" * 80 + "-end", 20)
    assert len(cut) == 20
    assert cut.startswith("begin-")
    assert cut.endswith("-end")
