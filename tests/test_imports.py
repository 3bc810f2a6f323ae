"""Layering: who may import whom, what ``import tkernels`` needs, and where backend names may stand.

Rules about imports at run time are tried in fresh processes; rules about source are read off the
syntax tree, so that a comment or a docstring may still speak of what the code may not.
"""

from __future__ import annotations

import ast
import functools
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fresh import run

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("tkernels", "autotune", "model", "bench")
VARIABLES = {"TKERNELS_DEVICE", "TKERNELS_CONFIG_DIR", "TKERNELS_DEBUG"}
DEVICE_FILE = ROOT / "tkernels" / "device.py"
WHOLE_NETWORKS = ROOT / "bench" / "model"  # what it times is the runner
FOR_TRANSFORMERS = ROOT / "tkernels" / "transformers_attention.py"  # users import it, we do not

SOURCES = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
each_source = pytest.mark.parametrize(
    "path", SOURCES, ids=lambda path: path.relative_to(ROOT).as_posix()
)

# Put before a program, this hides packages from it as if they were not installed.
HIDE = """
import importlib.machinery, sys

class Hiding:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] in {hidden!r}:
            return None
        return importlib.machinery.PathFinder.find_spec(name, path, target)

plain = importlib.machinery.PathFinder
sys.meta_path = [Hiding if finder is plain else finder for finder in sys.meta_path]
"""


def fresh(
    program: str, *, device: str = "", interpret: str = "", path: tuple[Path, ...] = ()
) -> subprocess.CompletedProcess[str]:
    """Run ``program`` in a new process with these switches and no others."""
    dropped = (*VARIABLES, "TRITON_INTERPRET", "PYTHONPATH")
    env = {name: value for name, value in os.environ.items() if name not in dropped}
    env["PYTHONPATH"] = os.pathsep.join(map(str, (*path, ROOT)))
    if device:
        env["TKERNELS_DEVICE"] = device
    if interpret:
        env["TRITON_INTERPRET"] = interpret
    return run(program, env)


def output(program: str, *, device: str = "", interpret: str = "") -> str:
    """What ``program`` prints; it must succeed."""
    done = fresh(program, device=device, interpret=interpret)
    assert done.returncode == 0, done.stderr
    return done.stdout


def error(program: str, *, device: str = "", path: tuple[Path, ...] = ()) -> str:
    """The last line of the traceback with which ``program`` must fail."""
    done = fresh(program, device=device, path=path)
    assert done.returncode != 0, f"expected a failure, got {done.stdout!r}"
    return done.stderr.strip().splitlines()[-1]


# ---- fresh processes ---------------------------------------------------------------------------


def test_import_brings_torch_alone() -> None:
    foreign = ("optuna", "transformers", "autotune", "model", "bench", "tests")
    loaded = output(
        f"import sys, tkernels\nprint(*(name for name in {foreign!r} if name in sys.modules))"
    )
    assert loaded.split() == []


def test_bench_of_kernels_needs_no_runner() -> None:
    program = HIDE.format(hidden={"model"}) + (
        "import sys\nfrom bench.__main__ import main\n"
        "assert main(['--list']) == 0\nassert 'bench.model' not in sys.modules"
    )
    assert "rms_norm" in output(program, device="cpu")


def test_reference_works_without_triton() -> None:
    hide = HIDE.format(hidden={"triton", "optuna", "transformers"})
    program = hide + (
        "import sys, torch, tkernels\n"
        "x, w = torch.tensor([[3.0, 4.0]]), torch.ones(2)\n"
        "y = tkernels.reference.rms_norm(x, w)\n"
        "assert 'triton' not in sys.modules\n"
        "print(*(round(v, 4) for v in y[0].tolist()))"
    )
    assert output(program, device="cpu") == "0.8485 1.1314\n"


def test_launch_without_triton_says_what_is_missing() -> None:
    program = HIDE.format(hidden={"triton"}) + (
        "import torch, tkernels\ntkernels.rms_norm(torch.ones(2, 8), torch.ones(8))"
    )
    assert error(program, device="cpu") == (
        "tkernels.device.UnsupportedError: tkernels: expected triton to be installed to launch a "
        "kernel, got none; install tkernels[cuda] or tkernels[npu], or call tkernels.reference "
        "for the PyTorch version"
    )


def test_triton_first_on_a_cpu_machine_is_refused() -> None:
    said = error("import triton.language, tkernels", device="cpu")
    assert said.startswith("ImportError: tkernels: expected to be imported before triton"), said
    assert said.endswith("move 'import tkernels' up or set TRITON_INTERPRET=1")


@pytest.mark.slow
def test_triton_first_with_the_interpreter_on_is_fine() -> None:
    program = "import triton.language, tkernels; print(tkernels.device.current().arch)"
    assert output(program, device="cpu", interpret="1") == "interpret\n"


def test_import_alone_makes_bfloat16_right_in_the_interpreter() -> None:
    program = (
        "import torch, tkernels\n"
        "x, scale = torch.full((1, 16), 1.0078125, dtype=torch.bfloat16), torch.ones(1)\n"
        "w = torch.ones(1, 16, dtype=torch.int8)\n"
        "print(tkernels.masked_gemm(x, w, scale, high=True).item())\n"
        "print(tkernels.masked_gemm(0 * x, w, scale, bias=torch.full((1,), 1.013)).item())"
    )
    # The sum of products of numbers, not of their bits; and rounded, not cut off.
    assert output(program, device="cpu") == "16.125\n1.015625\n"


def fake_distribution(folder: Path, name: str) -> None:
    info = folder / f"{name.replace('-', '_')}-3.2.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 3.2.0\n")


def test_both_tritons_in_one_environment_are_refused(tmp_path: Path) -> None:
    fake_distribution(tmp_path, "triton")
    fake_distribution(tmp_path, "triton-ascend")
    said = error("import tkernels", path=(tmp_path,), device="cpu")
    assert said.startswith(
        "ImportError: tkernels: expected one of triton and triton-ascend, got both installed"
    ), said


@pytest.mark.slow
def test_both_tritons_in_different_folders_are_fine(tmp_path: Path) -> None:
    fake_distribution(tmp_path / "a", "triton")
    fake_distribution(tmp_path / "b", "triton-ascend")
    done = fresh("import tkernels", path=(tmp_path / "a", tmp_path / "b"), device="cpu")
    assert done.returncode == 0, done.stderr


# ---- source ------------------------------------------------------------------------------------


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), filename=str(path))


def imported(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, top-level package) of each import statement, wherever it stands."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name.partition(".")[0]) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.lineno, node.module.partition(".")[0]


def docstrings(tree: ast.Module) -> set[ast.AST]:
    """Bare strings: docstrings, and strings used as comments."""
    return {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}


def strings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, text) of each string that the code computes with."""
    bare = docstrings(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in bare:
            yield node.lineno, node.value


@each_source
def test_imports_go_one_way(path: Path) -> None:
    package = path.relative_to(ROOT).parts[0]
    forbidden = {*PACKAGES, "tests"} - {package, "tkernels"}
    if WHOLE_NETWORKS in path.parents:
        forbidden -= {"model"}
    if package == "tkernels":
        forbidden |= {"optuna"} if path == FOR_TRANSFORMERS else {"optuna", "transformers"}
    wrong = [f"line {line}: {name}" for line, name in imported(tree_of(path)) if name in forbidden]
    assert not wrong, f"{package} may not import {wrong}"


def test_nothing_imports_the_file_for_transformers() -> None:
    """Its name stands in no other file, so whoever imports us need not have transformers."""
    name = FOR_TRANSFORMERS.stem
    assert [path for path in SOURCES if name in path.read_text() and path.stem != name] == []


@pytest.mark.slow
def test_transformers_absent_is_said_by_its_own_file() -> None:
    program = HIDE.format(hidden={"transformers"}) + "import tkernels.transformers_attention"
    assert error(program, device="cpu") == (
        "ImportError: tkernels.transformers_attention: expected transformers to be installed "
        "(tkernels[transformers]), got none"
    )


def backend_names(tree: ast.Module) -> list[str]:
    """What only tkernels/device.py may hold: backend strings, torch_npu, TRITON_INTERPRET."""
    found = [
        f"line {line}: {text!r}"
        for line, text in strings(tree)
        if re.fullmatch(r"(cuda|npu)(:\d+)?", text)
        or "torch_npu" in text
        or "TRITON_INTERPRET" in text
    ]
    found += [f"line {line}: import {name}" for line, name in imported(tree) if name == "torch_npu"]
    return found


@each_source
def test_one_file_knows_the_backend(path: Path) -> None:
    if path == DEVICE_FILE:
        assert backend_names(tree_of(path)), "the check finds nothing even where the names must be"
        return
    assert backend_names(tree_of(path)) == []


def is_environ(node: ast.expr) -> bool:
    return ast.unparse(node) in ("os.environ", "environ")


def is_getenv(node: ast.expr) -> bool:
    return ast.unparse(node) in ("os.getenv", "getenv")


def names_read(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, name) of each environment variable read; a name that is computed counts as itself."""
    for node in ast.walk(tree):
        name: ast.expr | None = None
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
            from_environ = node.func.attr in ("get", "pop", "setdefault")
            if (from_environ and is_environ(node.func.value)) or is_getenv(node.func):
                name = node.args[0]
        elif isinstance(node, ast.Subscript) and is_environ(node.value):
            name = node.slice if isinstance(node.ctx, ast.Load) else None
        elif isinstance(node, ast.Compare) and is_environ(node.comparators[0]):
            name = node.left
        if name is not None:
            known = isinstance(name, ast.Constant)
            yield name.lineno, str(ast.literal_eval(name)) if known else ast.unparse(name)


def test_environment_reads_are_found() -> None:
    program = (
        "import os\nos.environ.get('A')\nos.environ['B']\nos.getenv('C')\n'D' in os.environ\n"
        "os.environ['E'] = '1'\nos.getenv(name)\n"
    )
    assert [name for _, name in names_read(ast.parse(program))] == ["A", "B", "C", "D", "name"]


@each_source
def test_only_three_environment_variables(path: Path) -> None:
    other = [f"line {n}: {name}" for n, name in names_read(tree_of(path)) if name not in VARIABLES]
    assert not other, f"expected only {sorted(VARIABLES)} to be read, got {other}"


def test_each_package_has_sources() -> None:
    """The checks above walk over files; they must not pass because there are none."""
    seen = {path.relative_to(ROOT).parts[0] for path in SOURCES}
    assert seen == set(PACKAGES)


@pytest.mark.thin(4)
@pytest.mark.parametrize(
    ("command", "code", "words"),
    [
        ("bench --list", 0, ""),
        ("bench --kernel rope --rounds 1", 2, "expected triton to be installed"),
        ("bench model --variants eager", 2, "expected triton to be installed"),
        ("bench engine --kernels triton", 2, "expected triton to be installed"),
        ("bench moe", 2, "expected triton to be installed"),
        ("autotune --kernel rope --trials 1", 2, "expected triton to be installed"),
        ("model.generate --kernels triton --prompt hi", 2, "expected triton to be installed"),
    ],
)
def test_commands_without_triton_answer_with_a_sentence(
    command: str, code: int, words: str
) -> None:
    module, *arguments = command.split()
    program = (
        HIDE.format(hidden={"triton"})
        + f"import runpy, sys\nsys.argv = {[module, *arguments]!r}\n"
        + f"runpy.run_module({module!r}, run_name='__main__')\n"
    )
    done = fresh(program, device="cpu")
    assert done.returncode == code, done.stderr[-500:]
    assert words in done.stderr
    assert "Traceback" not in done.stderr
