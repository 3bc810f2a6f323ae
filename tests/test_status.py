"""--status: what it says of tuned files; and the hash that tells when a kernel changed."""

from __future__ import annotations

import ast
import copy
import dataclasses
import datetime
import importlib
import io
import json
import linecache
import shutil
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("optuna", reason="the tuner needs optuna (tkernels[tune])")
pytest.importorskip("rich", reason="the tuner needs rich (tkernels[tune])")

from autotune import command, fingerprint, status
from autotune.options import parser
from autotune.target import Target
from tkernels import device
from tkernels.registry import KernelSpec, all_kernels, get

DEV = device.sm_facts(90)
SPEC = get("rms_norm")
CASES = [case for case in SPEC.cases if "bench" in case.tags]
TODAY = datetime.date(2026, 11, 28)
FACTS = {
    "device": "NVIDIA H100 80GB HBM3",
    "num_cores": 132,
    "memory_gib": 79,
    "driver": "580.1",
    "triton": "3.6.0",
    "torch": "2.11.0",
}


def measured(place: int = 0, **changed: Any) -> dict[str, Any]:
    """An entry as the tuner writes it for a bench case; ``changed`` are facts of its record."""
    problem = CASES[place].problem
    record = {
        **FACTS,
        "case": CASES[place].name,
        "kernel_hash": fingerprint.kernel_hash(SPEC),
        "date": "2026-11-20",
        "noise": 0.01,
        **changed,
    }
    return {
        "key": SPEC.tuning_key(problem),
        "config": SPEC.default_config(problem, DEV),
        "ms": 0.04,
        "default_ms": 0.05,
        "trials": 60,
        "measured": record,
    }


def estimated(place: int = 0) -> dict[str, Any]:
    entry = measured(place)
    record = {"case": CASES[place].name, "us": 40.0, "default_us": 44.0, "date": "2026-11-27"}
    return {
        "key": entry["key"],
        "config": entry["config"],
        "trials": 90,
        "measured": False,
        "estimate": {**record, "kernel_hash": fingerprint.kernel_hash(SPEC)},
    }


def write(folder: Path, *entries: Any, schema: int = 1, arch: str = "sm90") -> Path:
    path = folder / arch / "rms_norm.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    document = {"schema": schema, "kernel": "rms_norm", "arch": arch, "entries": list(entries)}
    path.write_text(json.dumps(document))
    return path


def rows(*folders: Path, facts: dict[str, Any] = FACTS) -> list[status.Row]:
    return status.status(folders, [SPEC], DEV, facts, TODAY)


def test_each_case_has_a_row(tmp_path: Path) -> None:
    path = write(tmp_path, measured(0), estimated(1))
    first, second, *others = rows(tmp_path)
    assert (first.case, first.state, first.gain, first.age_days) == (
        CASES[0].name,
        "measured",
        1.25,
        8,
    )
    assert (first.file, first.stale, first.config) == (str(path), (), measured(0)["config"])
    assert (second.state, second.gain, second.age_days, second.stale) == ("offline", 1.1, 1, ())
    assert [row.case for row in others] == [case.name for case in CASES[2:]]
    assert {row.state for row in others} == {"missing"}
    assert status.summary(rows(tmp_path)) == (
        f"2 of {len(CASES)} cases tuned (1 measured, 1 offline), {len(CASES) - 2} missing, "
        "0 stale, median gain 1.175x"
    )


def test_a_key_of_another_version_is_a_doubt(tmp_path: Path) -> None:
    write(tmp_path, {**measured(0), "key": {"k_up_to": 64}})
    *cases, other = rows(tmp_path)
    assert {row.state for row in cases} == {"missing"}
    assert (other.bench, other.stale) == (False, ("not used: its key is of another version",))
    assert ", 1 stale, 1 entries of other problems" in status.summary(rows(tmp_path))


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"kernel_hash": "0" * 16}, "kernel changed"),
        ({"triton": "3.5.0"}, "triton 3.5.0 then, 3.6.0 now"),
        ({"torch": "2.10.0"}, "torch 2.10.0 then, 2.11.0 now"),
        ({"driver": "570.9"}, "driver 570.9 then, 580.1 now"),
        ({"device": "NVIDIA H200"}, "device NVIDIA H200 then, NVIDIA H100 80GB HBM3 now"),
        ({"num_cores": 114}, "cores 114 then, 132 now"),
    ],
)
def test_stale_and_why(tmp_path: Path, changed: dict[str, Any], words: str) -> None:
    write(tmp_path, measured(0, **changed))
    found = rows(tmp_path)
    assert found[0].stale == (words,)
    assert found[0].state == "measured"
    assert "1 stale" in status.summary(found)


def test_other_device_is_not_compared_with(tmp_path: Path) -> None:
    """Without the card only the source can have changed."""
    write(tmp_path, measured(0, triton="3.5.0", device="NVIDIA H200"))
    assert status.status([tmp_path], [SPEC], DEV, today=TODAY)[0].stale == ()


def test_missing_is_what_is_not_sure_to_be_tuned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stale, estimated or absent: all but the first."""
    monkeypatch.setattr(command.config, "config_folders", list)  # what is shipped does not count
    stale = measured(2, kernel_hash="0" * 16)
    write(tmp_path, measured(0), estimated(1), stale)
    words = ["--kernel", "rms_norm", "--missing", "--export", str(tmp_path)]
    options = parser().parse_args(words)
    target = Target(DEV, offline=False, python="")
    found = [task.case for task in command._tasks(options, [SPEC], target)]
    assert found == [case.name for case in CASES[1:]]
    offline = dataclasses.replace(target, offline=True)
    found = [task.case for task in command._tasks(options, [SPEC], offline)]
    assert found == [case.name for case in CASES[2:]]


def test_what_is_missing_is_shown_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command.config, "config_folders", list)
    monkeypatch.setattr(command, "shown_device", lambda _: DEV)
    write(tmp_path, measured(0), measured(1, kernel_hash="0" * 16))
    words = ["--kernel", "rms_norm", "--status", "--missing", "--export", str(tmp_path)]
    assert command._run(parser().parse_args(words)) == 0
    printed = capsys.readouterr().out
    assert [case.name in printed for case in CASES] == [False] + [True] * (len(CASES) - 1)
    assert f"2 of {len(CASES)} cases tuned" in printed


def test_nothing_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, *(measured(i) for i in range(len(CASES))))
    words = ["--kernel", "rms_norm", "--missing", "--export", str(tmp_path)]
    target = Target(DEV, offline=False, python="")
    assert command._tasks(parser().parse_args(words), [SPEC], target) == []
    assert "nothing is missing or stale for sm90" in capsys.readouterr().err


def test_illegal_today(tmp_path: Path) -> None:
    broken = measured(0)
    broken["config"] = {**broken["config"], "num_warps": "many"}
    write(tmp_path, broken)
    (why,) = rows(tmp_path)[0].stale
    assert why.startswith("not legal now, the heuristic serves: num_warps must be of type int")
    del broken["config"]["num_warps"]
    write(tmp_path, broken)
    assert "missing key num_warps" in rows(tmp_path)[0].stale[0]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"schema": 2, "entries": []}', " is left out: expected schema 1, got 2"),
        ('{"schema":\n 2', " is left out: line 2, column 3: expected JSON ("),
        ("[]", " is left out: expected a tuned-config file"),
        ('{"schema": 1, "entries": [{"key": 5}]}', "expected a key and a config in each entry"),
        ('{"schema": 1, "kernel": "rope", "entries": []}', "expected kernel 'rms_norm', as its"),
        ('{"schema": 1, "arch": "sm80", "entries": []}', "expected arch 'sm90', as its path has"),
        (
            '{"schema": 1, "entries": [{"key": {}, "config": {}, "measured": true}]}',
            " is not as the tuner writes it: ",
        ),
    ],
)
def test_files_that_are_refused_are_named(tmp_path: Path, text: str, words: str) -> None:
    path = write(tmp_path)
    path.write_text(text)
    for row in rows(tmp_path):
        assert row.state == "missing"
        assert len(row.stale) == 1
        assert str(path) in row.stale[0]
        assert words in row.stale[0]


def test_the_first_folder_with_a_legal_entry_serves(tmp_path: Path) -> None:
    broken = measured(0)
    broken["config"] = {}
    write(tmp_path / "own", broken)
    second = write(tmp_path / "shipped", measured(0))
    served = rows(tmp_path / "own", tmp_path / "shipped")[0]
    assert served.file == str(second)
    (why,) = served.stale  # a launch would warn of it
    assert why.startswith(f"an entry in {tmp_path}/own/sm90/rms_norm.json is left out: missing key")
    assert rows(tmp_path / "shipped", tmp_path / "own")[0].file == str(second)
    assert rows(tmp_path / "shipped", tmp_path / "own")[0].stale == ()
    assert "missing key" in rows(tmp_path / "own")[0].stale[0]


def test_an_entry_of_another_chip_is_passed_over_without_a_word(tmp_path: Path) -> None:
    other = measured(0, num_cores=114)
    other["config"] = {}
    write(tmp_path / "own", other)
    write(tmp_path / "shipped", measured(0))
    assert rows(tmp_path / "own", tmp_path / "shipped")[0].stale == ()


def test_files_that_no_lookup_reads_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("rope", "sm90/rope", "sm90/rms", "interpret/rope", "hopper/rope"):
        path = tmp_path / f"{name}.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text("{}")
    monkeypatch.setenv("TKERNELS_CONFIG_DIR", str(tmp_path))
    assert command._run(parser().parse_args(["--status", "--kernel", "rms_norm"])) == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if "not read" in line]
    assert lines == [
        f"autotune: {tmp_path}/hopper/rope.json is not read: expected a folder named as an "
        "architecture: sm90, ascend910b, ...",
        f"autotune: {tmp_path}/rope.json is not read: expected it in a folder of its "
        "architecture: <arch>/<kernel>.json",
        f"autotune: {tmp_path}/sm90/rms.json is not read: expected the name of a kernel (--import "
        "registers those of your own)",
    ]


def test_the_entry_of_the_likest_chip_serves(tmp_path: Path) -> None:
    small = measured(0, num_cores=16, memory_gib=8)
    write(tmp_path, small, estimated(0), measured(0))
    assert rows(tmp_path)[0].stale == ()
    write(tmp_path, estimated(0), small)
    assert rows(tmp_path)[0].stale == ("cores 16 then, 132 now", "GiB of memory 8 then, 79 now")


def test_a_neighbouring_architecture_serves_and_is_named(tmp_path: Path) -> None:
    write(tmp_path, measured(0), arch="sm100")
    assert rows(tmp_path)[0].stale == ("tuned for sm100",)


def test_entries_of_other_problems_are_listed(tmp_path: Path) -> None:
    other = measured(0)
    other["key"] = {**other["key"], "n_cols": 12345}
    other["measured"]["case"] = "n_cols=12345"
    write(tmp_path, other)
    *cases, last = rows(tmp_path)
    assert {row.state for row in cases} == {"missing"}
    assert (last.case, last.bench, last.state) == ("n_cols=12345", False, "measured")
    assert "1 entries of other problems" in status.summary([*cases, last])


def test_all_kernels_without_files(tmp_path: Path) -> None:
    found = status.status([tmp_path], list(all_kernels().values()), DEV)
    assert {row.kernel for row in found} == set(all_kernels())
    assert {row.state for row in found} == {"missing"}


def test_what_is_printed(tmp_path: Path) -> None:
    write(tmp_path, measured(0, triton="3.5.0"), estimated(1))
    screen = io.StringIO()
    status.show(rows(tmp_path), file=screen)
    text = screen.getvalue()
    assert CASES[0].name in text
    assert "1.250x" in text
    assert "1.100x (estimate)" in text
    assert "triton 3.5.0 then, 3.6.0 now" in text
    assert text.splitlines()[-1] == f"sm90: {status.summary(rows(tmp_path))}"
    lines = io.StringIO()
    status.show(rows(tmp_path), as_json=True, file=lines)
    parsed = [json.loads(line) for line in lines.getvalue().splitlines()]
    assert [row["case"] for row in parsed] == [case.name for case in CASES]
    assert parsed[0]["stale"] == ["triton 3.5.0 then, 3.6.0 now"]


# ---- the hash of a kernel ----------------------------------------------------------------------

ROWS = "tkernels.rows"
OWN = "tkernels.ops.rms_norm"


@pytest.fixture
def hash_with(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """The hash of rms_norm where the source of modules is edited: ``hash_with(module=edit)``."""
    read = fingerprint._source

    def hashed(module: str, edit: Callable[[str], str]) -> str:
        def edited(name: str) -> str:
            text = read(name)
            changed = edit(text) if name == module else text
            assert name != module or changed != text, "the edit changes nothing"
            return changed

        with monkeypatch.context() as patch:
            patch.setattr(fingerprint, "_source", edited)
            return fingerprint.kernel_hash(SPEC)

    return hashed


def uncommented(source: str) -> str:
    """The same program in another layout, without comments and with other docstrings."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.Module) and ast.get_docstring(node):
            node.body[0] = ast.Expr(ast.Constant("Other words."))
    return ast.unparse(ast.fix_missing_locations(tree))


@pytest.mark.parametrize("module", [OWN, ROWS])
def test_comments_and_layout_do_not_change_the_hash(
    hash_with: Callable[..., str], module: str
) -> None:
    assert hash_with(module, uncommented) == fingerprint.kernel_hash(SPEC)
    assert hash_with(module, lambda s: s + "\n\n# a comment\n") == fingerprint.kernel_hash(SPEC)


def test_what_a_launch_does_not_run_does_not_change_the_hash(
    hash_with: Callable[..., str],
) -> None:
    """A further case, another reference, another registry: no config gets slower by them."""
    same = fingerprint.kernel_hash(SPEC)
    assert hash_with(ROWS, lambda s: s.replace("def norm_cases", "A = 1\ndef norm_cases")) == same
    assert hash_with(OWN, lambda s: s.replace("cases=rows.norm_cases()", "cases=()")) == same
    assert hash_with(OWN, lambda s: s.replace("flops=4 * n", "flops=5 * n")) == same


def jit_functions(spec: KernelSpec) -> list[str]:
    tree = ast.parse(fingerprint._source(spec.launch.__module__))
    return [
        f"{spec.launch.__module__}.{node.name}"
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
        and any("jit" in ast.unparse(decorator) for decorator in node.decorator_list)
    ]


@pytest.mark.parametrize("name", list(all_kernels()))
def test_every_jit_function_of_a_kernel_is_hashed(name: str) -> None:
    functions = jit_functions(get(name))
    assert functions
    assert set(functions) <= set(fingerprint.reached(get(name)))


def test_code_changes_the_hash(hash_with: Callable[..., str]) -> None:
    hashes = [
        fingerprint.kernel_hash(SPEC),
        hash_with(OWN, lambda s: s.replace("tl.sum(", "tl.max(", 1)),
        hash_with(ROWS, lambda s: s.replace("return (1, shape[0]", "return (2, shape[0]", 1)),
    ]
    assert len(set(hashes)) == len(hashes)


def test_each_jit_statement_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """An edit of any one of its jit functions changes the hash of a kernel."""
    for spec in map(get, ("rms_norm", "merge_attn_states", "paged_attn")):
        places = fingerprint.reached(spec)
        before = fingerprint.kernel_hash(spec)
        for name in jit_functions(spec):
            edited = {**places, name: copy.deepcopy(places[name])}
            function = edited[name][0]
            assert isinstance(function, ast.FunctionDef)
            function.body.append(ast.parse("tl.debug_barrier()").body[0])
            monkeypatch.setattr(fingerprint, "reached", lambda _, edited=edited: edited)
            assert fingerprint.kernel_hash(spec) != before, name
            monkeypatch.undo()


def test_imported_modules_are_followed() -> None:
    """paged_attn takes a jit function of flash_attn; flash_attn its Hopper body."""
    assert "tkernels.ops.flash_attn._capped" in fingerprint.reached(get("paged_attn"))
    hopper = "tkernels.flash_attn_hopper._flash_attn_hopper_kernel"
    assert hopper in fingerprint.reached(get("flash_attn"))
    assert not any(".device." in place for place in fingerprint.reached(get("flash_attn")))


def pythons() -> list[Path]:
    """Other Pythons beside the one that runs this, which have no packages of ours."""
    beside = Path(sys.base_prefix).parent.glob("3.1[0-9]*/bin/python3")
    found = [*beside, *(Path(p) for v in range(10, 16) if (p := shutil.which(f"python3.{v}")))]
    return [path for path in found if _runs(path)]


def _runs(python: Path) -> bool:
    done = subprocess.run([python, "-c", "match 1:\n case 1: pass"], capture_output=True)
    return done.returncode == 0


def test_every_python_gives_one_hash() -> None:
    """A file that was tuned under another Python is not stale."""
    own = ast.parse(Path(fingerprint.__file__).read_text())
    (function,) = [s for s in own.body if isinstance(s, ast.FunctionDef) and s.name == "_meaning"]
    program = "import ast, sys\nfrom typing import Any\n" + ast.unparse(function)
    program += "\nprint(_meaning(ast.parse(sys.stdin.read())))"
    source = fingerprint._source("tkernels.ops.flash_attn")
    expected = fingerprint._meaning(ast.parse(source))
    others = pythons()
    if not others:
        pytest.skip("no other Python is installed here")
    for python in others:
        done = subprocess.run(
            [python, "-c", program], input=source, capture_output=True, text=True, check=True
        )
        assert done.stdout.strip() == expected, python


def test_fields_that_are_empty_do_not_count() -> None:
    """Newer Pythons have more of them, such as type_params."""
    tree = ast.parse("@op\ndef f(x):\n    return None\n")
    before = fingerprint._meaning(tree)
    function = tree.body[0]
    function._fields = (*function._fields, "of_tomorrow", "and_after")
    function.of_tomorrow, function.and_after = [], None  # type: ignore[attr-defined]
    assert fingerprint._meaning(tree) == before
    assert fingerprint._meaning(ast.parse("@op\ndef f(x):\n    return 0\n")) != before


def test_a_kernel_of_the_user_has_a_hash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = "CONSTANT = 1\ndef mine(x):\n    return x + CONSTANT\ndef other():\n    return 2\n"
    hashes = []
    for text in (body, body.replace("= 1", "= 3"), body.replace("return 2", "return 5")):
        (tmp_path / "users_kernel.py").write_text(text)
        monkeypatch.syspath_prepend(tmp_path)
        sys.modules.pop("users_kernel", None)
        importlib.invalidate_caches()
        monkeypatch.setattr(sys, "dont_write_bytecode", True)
        linecache.clearcache()
        module = importlib.import_module("users_kernel")
        spec: Any = types.SimpleNamespace(name="mine", launch=module.mine)
        hashes.append(fingerprint.kernel_hash(spec))
    sys.modules.pop("users_kernel", None)
    assert hashes[0] != hashes[1]
    assert hashes[0] == hashes[2]


def test_facts_of_the_device_are_json() -> None:
    facts = fingerprint.chip()
    assert {"device", "num_cores", "memory_gib", "triton", "torch"} <= set(facts)
    assert json.loads(json.dumps(facts)) == facts
    assert set(device.health()) <= {"clock_mhz", "temperature_c", "driver"}
