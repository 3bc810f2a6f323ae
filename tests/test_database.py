"""Several tuners on one study, in a PostgreSQL server that the test starts."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("optuna", reason="the tuner needs optuna (tkernels[tune])")
pytest.importorskip("psycopg", reason="a database needs tkernels[tune-db]")

import psycopg

from autotune import store
from autotune.records import label_of
from tests.test_autotune import COMMAND, ENVIRONMENT, FEW, LIMITS, on_interpreter

SCRIPT = Path(__file__).parent / "postgresql.sh"
NOBODY = 65534


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """Address of a fresh server's database. As it refuses to be root, root starts it as nobody."""
    found = subprocess.run(["bash", str(SCRIPT)], capture_output=True, text=True)
    if found.returncode:
        pytest.skip(f"no PostgreSQL server: {found.stderr.strip().splitlines()[-1]}")
    programs = Path(found.stdout.strip())
    home = Path(tempfile.mkdtemp(prefix="tkernels-database-"))
    who: dict[str, Any] = {}
    if os.geteuid() == 0:
        os.chown(home, NOBODY, NOBODY)
        who = {"user": NOBODY, "group": NOBODY, "extra_groups": []}
    libraries = programs.parents[4] / "usr/lib"  # where the package was unpacked, not installed
    paths = [str(p) for p in libraries.glob("*-linux-gnu")] if libraries != Path("/usr/lib") else []
    env = {**os.environ, "LD_LIBRARY_PATH": os.pathsep.join(paths), "HOME": str(home)}
    data = home / "data"
    make = [
        *(programs / "initdb", "-D", data, "-U", "tuner", "-A", "trust"),
        *("--no-sync", "-E", "UTF8", "--locale=C"),
    ]
    made = subprocess.run(make, env=env, capture_output=True, text=True, cwd=home, **who)
    assert made.returncode == 0, made.stderr
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    settings = {
        "listen_addresses": "127.0.0.1",
        "port": port,
        "unix_socket_directories": home,
        "fsync": "off",
    }
    words = [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
    with open(home / "log", "w") as log:
        running = subprocess.Popen(
            [programs / "postgres", "-D", data, *words], env=env, stdout=log, stderr=log, cwd=home,
            **who,
        )  # fmt: skip
    address = f"postgresql://tuner@127.0.0.1:{port}/postgres"
    try:
        _wait_for(address, running, home / "log")
        yield address
    finally:
        running.send_signal(signal.SIGQUIT)
        running.wait()
        shutil.rmtree(home, ignore_errors=True)


def _wait_for(address: str, running: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 60
    while True:
        assert running.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        with contextlib.suppress(psycopg.OperationalError):
            psycopg.connect(address).close()
            return
        time.sleep(0.1)


def attempts(address: str) -> list[Any]:
    """Trials of the only study that were begun with a config."""
    return attempts_in(store.open_storage(address))


def attempts_in(storage: Any) -> list[Any]:
    studies = store.all_studies(storage)
    return [t for s in studies for t in s.get_trials(deepcopy=False) if "config" in t.user_attrs]


def _at_a_hang(
    address: str, tuners: list[subprocess.Popen[str]]
) -> tuple[subprocess.Popen[str], subprocess.Popen[str]]:
    """(the tuner whose config hangs, the other one), once both have taken part."""
    deadline = time.monotonic() + 180
    storage = store.open_storage(address)
    while True:
        assert time.monotonic() < deadline, attempts(address)
        assert all(tuner.poll() is None for tuner in tuners), "one ended before the other took part"
        tried = attempts_in(storage)
        owners = {t.user_attrs["owner"]["pid"] for t in tried if "owner" in t.user_attrs}
        hanging = [
            t.user_attrs["owner"]["pid"]
            for t in tried
            if t.state.name == "RUNNING" and t.user_attrs["config"] == {"HOW": "hang"}
        ]
        if hanging and len(owners) == 2:
            return tuple(sorted(tuners, key=lambda tuner: tuner.pid != hanging[0]))  # type: ignore[return-value]
        time.sleep(0.5)  # a config hangs for 15 s


@on_interpreter
def test_two_tuners_share_a_study_and_one_is_killed(server: str, tmp_path: Path) -> None:
    arguments = [*COMMAND, *FEW, *LIMITS, "--storage", server, "--json"]
    tuners = [
        subprocess.Popen(
            [*arguments, "--export", "tuned", "--force"], cwd=tmp_path, env=ENVIRONMENT,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for _ in range(2)
    ]  # fmt: skip
    victim, survivor = _at_a_hang(server, tuners)
    victim.kill()
    victim.communicate()
    out, err = survivor.communicate(timeout=300)
    assert survivor.returncode == 1, err  # wrong configs were found
    row = json.loads(out)
    assert row["config"] == {"HOW": "fast"}

    tried = attempts(server)
    assert not [t for t in tried if t.state.name == "RUNNING"]
    lost = [t for t in tried if t.state.name == "FAIL"]
    # None where the victim gave the config up as hung just before it was killed.
    assert [t.user_attrs["message"] for t in lost] in ([], ["its tuner was killed"])
    # A config that both chose at once is given up by both before it is tried, and tells no kind.
    told = [
        label_of(t.user_attrs["config"])
        for t in tried
        if t.state.name != "FAIL" and "kind" in t.user_attrs
    ]
    assert len(told) == len(set(told)) == row["trials"] == 6
    owners = {t.user_attrs["owner"]["pid"] for t in tried}
    assert owners == {victim.pid, survivor.pid}

    # Whoever comes later finds the outcome and tries nothing: all ranks get the same config.
    later = subprocess.run(
        arguments, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, timeout=300
    )
    assert json.loads(later.stdout)["config"] == row["config"]
    assert len(attempts(server)) == len(tried)
    [entry] = json.loads((tmp_path / "tuned/interpret/planted_few.json").read_text())["entries"]
    assert entry["config"] == row["config"]
