"""Any legal config is right; an illegal one is refused with the reason; stored ones are found."""

from __future__ import annotations

import json
import random
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from tkernels import config, device
from tkernels.registry import Config, KernelSpec, Problem, all_kernels
from tkernels.testing import assert_right, clone_inputs, tensors_of

SPECS = list(all_kernels().values())
each_spec = pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.name)
DEVICES = [device.sm_facts(90), device.sm_facts(80), device.sm_facts(120), device.ascend_facts()]
# On a GPU each config is compiled, which workers can do side by side: 10 draws of 20.
DRAWS, SAMPLES = (10, 20) if device.KIND == "cuda" else (1, 6)


def sample(spec: KernelSpec, problem: Problem, dev: device.Device, rng: random.Random) -> Config:
    """A random legal config; asserts that the space is not nearly empty."""
    space = spec.space(dev)
    for _ in range(2000):
        candidate = {name: rng.choice(values) for name, values in space.items()}
        if spec.why_illegal(candidate, problem, dev) is None:
            return candidate
    raise AssertionError(f"{spec.name}: no legal config in 2000 draws for {problem}")


@each_spec
@pytest.mark.parametrize("draw", range(DRAWS))
def test_random_legal_configs_match(spec: KernelSpec, draw: int, dev: torch.device) -> None:
    rng = random.Random(draw)
    cases = [c for c in spec.cases if c.tags & {"smoke", "edge"}]
    for _ in range(SAMPLES):
        case = rng.choice(cases)
        chosen = sample(spec, case.problem, device.current(), rng)
        inputs = spec.make_inputs(case.problem, dev)
        kept = clone_inputs(inputs)
        results = tensors_of(spec.launch(**inputs, config=chosen))
        try:
            assert_right(spec, kept, (*results, *(inputs[n] for n in spec.mutates)))
        except AssertionError as error:
            raise AssertionError(f"{case.name} with {chosen}: {error}") from None


@each_spec
@pytest.mark.parametrize("facts", DEVICES, ids=lambda d: d.arch)
def test_default_is_legal_everywhere(spec: KernelSpec, facts: device.Device) -> None:
    for case in spec.cases:
        default = spec.default_config(case.problem, facts)
        assert spec.why_illegal(default, case.problem, facts) is None, (case.name, default)
        space = spec.space(facts)
        assert set(default) == set(space)
        for name, value in default.items():
            assert value in space[name], (case.name, name, value)


@each_spec
def test_space_holds_illegal_points(spec: KernelSpec) -> None:
    """The legality rule rejects something, with words; a rule that cannot fail guards nothing."""
    rng = random.Random(1)
    reasons = set()
    for facts in DEVICES:
        space = spec.space(facts)
        for case in spec.cases:
            for _ in range(50):
                point = {name: rng.choice(values) for name, values in space.items()}
                reasons.add(spec.why_illegal(point, case.problem, facts))
    assert any(reasons - {None})
    assert all(reason is None or len(reason) > 10 for reason in reasons)


def _without(config: Config, name: str) -> Config:
    return {n: value for n, value in config.items() if n != name}


def _some(spec: KernelSpec, name: str) -> str:
    return ", ".join(map(str, spec.space(device.current())[name]))


@each_spec
def test_explicit_illegal_config_is_refused(spec: KernelSpec, dev: torch.device) -> None:
    case = spec.cases[0]
    inputs = spec.make_inputs(case.problem, dev)
    default = spec.default_config(case.problem, device.current())
    wrong: list[tuple[Any, str]] = [
        ({**default, "BLOCK_TYPO": 1}, "unknown key BLOCK_TYPO"),
        ({}, "missing key"),
        *(
            (_without(default, n), rf"missing key {n} \(such as {_some(spec, n)}\)")
            for n in default
        ),
        (5, "expected a dict, got int"),
        ({**default, next(iter(default)): [1]}, "must be an int, a bool or a name, got "),
        ({**default, next(iter(default)): "64"}, "must be of type int, got '64'"),
        ({**default, next(iter(default)): True}, "must be of type int, got True"),
    ]
    for bad, words in wrong:
        with pytest.raises(ValueError, match=rf"{spec.name}: config must be legal .*{words}"):
            spec.launch(**clone_inputs(inputs), config=bad)


@each_spec
def test_a_grid_below_zero_is_refused(spec: KernelSpec, dev: torch.device) -> None:
    """It would launch nothing and leave the results as they were allocated."""
    case = spec.cases[0]
    default = spec.default_config(case.problem, device.current())
    for below in (-1, -(10**6)):
        with pytest.raises(ValueError, match=f"programs_per_core must be 0 or more, got {below}"):
            spec.launch(
                **spec.make_inputs(case.problem, dev),
                config={**default, "programs_per_core": below},
            )


@each_spec
def test_sizes_and_parts_below_one_are_refused(spec: KernelSpec) -> None:
    """Of no parts of K, say, a grid would have no programs; or something is divided by 0."""
    dev = device.sm_facts(90)
    for case in spec.cases:
        default = spec.default_config(case.problem, dev)
        for name, value in default.items():
            least = min((v for v in spec.space(dev)[name] if type(v) is int), default=0)
            if type(value) is not int or least < 1 or name == "programs_per_core":
                continue
            for below in (0, -1):
                why = config.why_unusable(spec, {**default, name: below}, case.problem, dev)
                assert why == f"{name} must be 1 or more, got {below}"


def test_force_config_names_a_kernel() -> None:
    with (
        pytest.raises(ValueError, match=r"kernel must be one of .*, got 'rmsnorm'"),
        config.force_config("rmsnorm", {}),
    ):
        pass
    assert not config._forced


def test_force_config_nests_and_survives_errors(dev: torch.device) -> None:
    spec = all_kernels()["rms_norm"]
    problem = spec.cases[0].problem
    outer = {**spec.default_config(problem, device.current()), "programs_per_core": 4}
    with config.force_config("rms_norm", outer):
        with (
            pytest.raises(ValueError, match="missing key"),
            config.force_config("rms_norm", {}),
        ):
            spec.launch(**spec.make_inputs(problem, dev))
        assert config.explain(spec, problem) == (outer, "forced")
    assert config.explain(spec, problem)[1] != "forced"


def test_missing_folder_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = all_kernels()["rms_norm"]
    monkeypatch.setenv("TKERNELS_CONFIG_DIR", str(tmp_path / "tuend"))
    config.reload()
    try:
        with pytest.warns(UserWarning, match=r"TKERNELS_CONFIG_DIR must be a .* got .*tuend"):
            config.explain(spec, spec.cases[0].problem)
    finally:
        config.reload()


def test_folder_in_place_of_a_file_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = all_kernels()["rms_norm"]
    _path(tmp_path, spec).mkdir(parents=True)
    monkeypatch.setenv("TKERNELS_CONFIG_DIR", str(tmp_path))
    config.reload()
    try:
        with pytest.warns(UserWarning, match="expected a tuned-config file, got IsADirectory"):
            config.explain(spec, spec.cases[0].problem)
    finally:
        config.reload()


class _Emptied(dict[Any, Any]):
    """A table that another thread empties at once."""

    def __setitem__(self, key: Any, value: Any) -> None:
        pass


def test_plan_survives_a_table_emptied_meanwhile(dev: torch.device) -> None:
    def make_plan(*given: Any, config: Config | None) -> Any:
        return given[-1]

    config._plans[make_plan] = _Emptied()
    tensors = torch.randn(3, 8, device=dev), torch.ones(8, device=dev)
    assert [config.planned(make_plan, None, tensors, n) for n in (1, 2, 1)] == [1, 2, 1]
    config.reload()


def _store(folder: Path, spec: KernelSpec, key: dict[str, Any], chosen: Config) -> None:
    path = folder / device.current().arch / f"{spec.name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"schema": 1, "entries": [{"key": key, "config": chosen}]}))


def test_lookup_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = all_kernels()["rms_norm"]
    problem = spec.cases[0].problem
    stored = {**spec.default_config(problem, device.current()), "programs_per_core": 2}
    _store(tmp_path, spec, spec.tuning_key(problem), stored)
    monkeypatch.setenv("TKERNELS_CONFIG_DIR", str(tmp_path))
    config.reload()
    try:
        assert config.explain(spec, problem) == (stored, str(_path(tmp_path, spec)))
        forced = {**stored, "programs_per_core": 4}
        with config.force_config("rms_norm", forced):
            assert config.explain(spec, problem) == (forced, "forced")
            given = {**stored, "programs_per_core": 8}
            assert config.explain(spec, problem, given) == (given, "argument")
        monkeypatch.delenv("TKERNELS_CONFIG_DIR")
        config.reload()
        assert config.explain(spec, problem)[1] == "heuristic"
    finally:
        config.reload()


def _path(folder: Path, spec: KernelSpec) -> Path:
    return folder / device.current().arch / f"{spec.name}.json"


@pytest.mark.parametrize("same", [True, False])
def test_an_entry_of_another_chip_need_not_be_legal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, same: bool
) -> None:
    """Of this one it is said that it is left out; tiles may depend on the number of cores."""
    spec = all_kernels()["rms_norm"]
    problem, dev = spec.cases[0].problem, device.current()
    default = spec.default_config(problem, dev)
    _store(tmp_path, spec, spec.tuning_key(problem), {**default, "BLOCK_N": 48})
    path = _path(tmp_path, spec)
    stored = json.loads(path.read_text())
    stored["entries"][0]["measured"] = {"num_cores": dev.num_cores + (not same), "memory_gib": 80}
    path.write_text(json.dumps(stored))
    monkeypatch.setenv("TKERNELS_CONFIG_DIR", str(tmp_path))
    config.reload()
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            assert config.explain(spec, problem) == (default, "heuristic")
        assert ["is left out" in str(w.message) for w in said] == [True] * same
    finally:
        config.reload()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", r"rms_norm.json: line 1, column 2: expected JSON \(Expecting .*\); left out"),
        ('{"schema": 1,\n "entries": [oops]}', "rms_norm.json: line 2, column 14: expected JSON"),
        ("[]", "expected a tuned-config file, got TypeError"),
        ('{"schema": 1}', "expected a tuned-config file, got KeyError"),
        ('{"schema": 9, "entries": []}', "expected schema 1, got 9"),
        ('{"schema": 9}', "expected schema 1, got 9"),
        (
            '{"schema": 1, "kernel": "rope", "entries": []}',
            "rms_norm.json: expected kernel 'rms_norm', as its path has, got 'rope'; left out",
        ),
        (
            '{"schema": 1, "kernel": "rms_norm", "arch": "sm70", "entries": []}',
            "expected arch '[a-z0-9]+', as its path has, got 'sm70'; left out",
        ),
        ('{"schema": 1, "entries": [{"key": {}}]}', "expected a tuned-config file, got KeyError"),
        (
            '{"schema": 1, "entries": [{"key": [], "config": {}}]}',
            "expected a key and a config in each entry, got another form",
        ),
        (None, "is left out: "),
    ],
)
def test_bad_stored_config_warns_and_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None, words: str
) -> None:
    spec = all_kernels()["rms_norm"]
    problem = spec.cases[0].problem
    default = spec.default_config(problem, device.current())
    _store(tmp_path, spec, spec.tuning_key(problem), {**default, "BLOCK_N": 48})
    if text is not None:
        _path(tmp_path, spec).write_text(text)
    monkeypatch.setenv("TKERNELS_CONFIG_DIR", str(tmp_path))
    config.reload()
    try:
        with pytest.warns(UserWarning, match=words):
            assert config.explain(spec, problem) == (default, "heuristic")
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # said once, not at every launch
            config.explain(spec, problem)
    finally:
        config.reload()


def test_a_file_with_keys_of_another_version_warns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = all_kernels()["rms_norm"]
    problem = spec.cases[0].problem
    key, default = spec.tuning_key(problem), spec.default_config(problem, device.current())
    monkeypatch.setenv("TKERNELS_CONFIG_DIR", str(tmp_path))
    _store(tmp_path, spec, {"k_up_to": 64}, default)
    config.reload()
    try:
        with pytest.warns(UserWarning, match="got keys of k_up_to, of another version; left out"):
            assert config.explain(spec, problem) == (default, "heuristic")
        assert config.is_of_another_version(spec, {"k_up_to": 64})
        assert not config.is_of_another_version(spec, {**key, "rows_up_to": 0})
        _store(tmp_path, spec, {**key, "rows_up_to": 0}, default)  # of another problem
        config.reload()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert config.explain(spec, problem) == (default, "heuristic")
    finally:
        config.reload()


def test_shipped_files_are_valid() -> None:
    names = all_kernels()
    shipped = Path(config.__file__).parent / "configs"
    for path in shipped.glob("*/*.json"):
        facts = device.offline_facts(path.parent.name)
        spec = names[path.stem]
        stored = json.loads(path.read_text())
        assert stored["schema"] == config.SCHEMA
        assert stored["kernel"] == spec.name
        assert stored["arch"] == facts.arch
        kept = [(e["key"], config.chip_of(e)) for e in stored["entries"]]
        keys = [json.dumps(pair, sort_keys=True) for pair in kept]
        assert len(keys) == len(set(keys)), f"{path.name} holds a key twice for one chip"
        for entry in stored["entries"]:
            served = [c for c in spec.cases if spec.tuning_key(c.problem) == entry["key"]]
            assert served, f"{path.name}: no case has the key {entry['key']}"
            for case in served:
                assert config.why_unusable(spec, entry["config"], case.problem, facts) is None


def test_an_arch_without_files_takes_those_of_the_nearest() -> None:
    others = ["sm80", "sm90", "sm120", "ascend910b"]
    assert config.nearest_arch("sm89", others) == "sm90"
    assert config.nearest_arch("sm103", others) == "sm90"
    assert config.nearest_arch("sm90", ["ascend910b"]) is None
    assert config.nearest_arch("ascend910b", others) is None
    assert config.nearest_arch("interpret", others) is None


def test_the_entry_of_the_likest_chip_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of three entries for a key: cores and memory decide, and an estimate comes last."""
    spec = all_kernels()["rms_norm"]
    problem = spec.cases[0].problem
    default, key = spec.default_config(problem, device.current()), spec.tuning_key(problem)
    cores = device.current().num_cores
    entries = [
        {"key": key, "config": {**default, "programs_per_core": n}, "measured": measured}
        for n, measured in (
            (1, False),
            (2, {"num_cores": 64 * cores, "memory_gib": 1}),
            (4, {"num_cores": cores, "memory_gib": 1}),
        )
    ]
    document = {"schema": config.SCHEMA, "kernel": spec.name, "entries": entries}
    path = _path(tmp_path, spec)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document))
    monkeypatch.setenv("TKERNELS_CONFIG_DIR", str(tmp_path))
    config.reload()
    try:
        found = [entry["config"]["programs_per_core"] for entry, _ in config.stored(spec, problem)]
    finally:
        monkeypatch.undo()
        config.reload()
    assert found == [4, 2, 1]
