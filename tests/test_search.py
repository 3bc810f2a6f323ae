"""The tuner's search without a device: spaces, proposals, replays of tables, the final choice."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("optuna", reason="the tuner needs optuna (tkernels[tune])")

import optuna

from autotune import choose, store
from autotune.records import Answer, decode, encode, label_of
from autotune.search import Budget, Search, new_sampler, replay
from autotune.space import Parameters, legal_points, neighbours, plainness, points
from tkernels import device
from tkernels.registry import Config, all_kernels

SPACE = {
    "BLOCK": [16, 32, 64, 128, 256],
    "STAGES": [1, 2, 3, 4],
    "SPLIT": [False, True],
    "num_warps": [1, 2, 4, 8],
    "ROWS": [1, 2, 4, 8, 16],
}
DEFAULT = {"BLOCK": 16, "STAGES": 1, "SPLIT": False, "num_warps": 1, "ROWS": 1}


def is_small(config: Config) -> str | None:
    return "too large" if config["BLOCK"] * config["ROWS"] > 1024 else None


def cost(config: Config) -> float:
    """A bowl whose lowest point is far from the default."""
    return (
        1
        + 0.2 * abs(math.log2(config["BLOCK"]) - 7)
        + 0.1 * abs(config["STAGES"] - 3)
        + 0.1 * config["SPLIT"]
        + 0.2 * abs(math.log2(config["num_warps"]) - 2)
        + 0.1 * abs(math.log2(config["ROWS"]) - 2)
    )


def table() -> list[tuple[Config, float | None]]:
    return [(config, cost(config)) for config in points(SPACE) if is_small(config) is None]


def new_search(
    priors: list[Config] | None = None, trials: int = 60, why: Any = is_small, **given: Any
) -> Search:
    study = optuna.create_study(sampler=new_sampler(0))
    first = [(DEFAULT, "default"), *((config, "stored") for config in priors or [])]
    return Search(study, SPACE, why, first, Budget(trials), **given)


def run(search: Search) -> Iterator[tuple[Config, str]]:
    while (proposal := search.next()) is not None:
        yield proposal.config, proposal.origin
        search.tell(proposal, Answer("ok", ms=cost(proposal.config)))


# ---- spaces ------------------------------------------------------------------------------------


def test_neighbours_differ_in_one_key_by_one_step() -> None:
    found = list(neighbours({**DEFAULT, "BLOCK": 64}, SPACE))
    assert {c["BLOCK"] for c in found} == {32, 64, 128}
    assert {c["SPLIT"] for c in found} == {False, True}
    for config in found:
        assert sum(config[name] != {**DEFAULT, "BLOCK": 64}[name] for name in SPACE) == 1


def test_a_value_from_elsewhere_lies_between_its_neighbours() -> None:
    found = {c["BLOCK"] for c in neighbours({**DEFAULT, "BLOCK": 96}, SPACE)}
    assert found == {96, 64, 128}


def test_true_is_not_one() -> None:
    space = {"A": [1, 2], "B": [False, True]}
    assert Parameters(space, lambda c: None).numbers({"A": True, "B": True}) is None
    assert Parameters(space, lambda c: None).numbers({"A": 1, "B": 1}) is None


def test_values_that_no_variant_can_have_are_not_asked_for() -> None:
    """What the sampler may ask of a variant is what is legal for it."""
    space = {"variant": ["portable", "fast"], "num_warps": [1, 2, 4], "STAGES": [1, 2, 3]}

    def why_illegal(config: Config) -> str | None:
        return "warps" if config["variant"] == "fast" and config["num_warps"] != 4 else None

    parameters = Parameters(space, why_illegal)
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    seen: dict[str, set[int]] = {"portable": set(), "fast": set()}
    for _ in range(60):
        trial = study.ask()
        config = parameters.suggest(trial)
        numbers = parameters.numbers(config)
        assert numbers == trial.params
        assert list(config) == ["num_warps", "STAGES", "variant"]
        seen[config["variant"]].add(config["num_warps"])
    assert seen == {"portable": {1, 2, 4}, "fast": {4}}


def test_a_variant_without_legal_points_is_not_asked_for() -> None:
    space = {"variant": ["portable", "fast"], "num_warps": [1, 2, 4], "STAGES": [1, 2]}

    def why_illegal(config: Config) -> str | None:
        return "not here" if config["variant"] == "fast" else None

    parameters = Parameters(space, why_illegal)
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    found = [parameters.suggest(study.ask()) for _ in range(20)]
    assert {c["variant"] for c in found} == {"portable"}
    assert {c["num_warps"] for c in found} == {1, 2, 4}
    assert parameters.numbers({"variant": "portable", "num_warps": 2, "STAGES": 1}) is not None
    assert parameters.numbers({"variant": "fast", "num_warps": 2, "STAGES": 1}) is None


def test_none_leaves_a_key_out() -> None:
    space = {"A": [1], "knob": [None, True]}
    assert list(points(space)) == [{"A": 1}, {"A": 1, "knob": True}]
    assert list(neighbours({"A": 1}, space)) == [{"A": 1, "knob": True}]
    assert list(neighbours({"A": 1, "knob": True}, space)) == [{"A": 1}]


def test_legal_points_are_listed_up_to_a_limit() -> None:
    count = len(table())
    assert 0 < count < len(list(points(SPACE)))
    assert len(legal_points(SPACE, is_small, limit=count) or []) == count
    assert legal_points(SPACE, is_small, limit=count - 1) is None


@pytest.mark.parametrize("arch", ["sm90", "ascend910b"])
def test_every_kernels_default_is_a_point_of_its_space(arch: str) -> None:
    dev = device.offline_facts(arch)
    for spec in all_kernels().values():
        parameters = Parameters(spec.space(dev), lambda c: None)
        for case in spec.cases:
            default = spec.default_config(case.problem, dev)
            if parameters.numbers(default) is None:
                # Allowed (a default may know better), as long as the descent finds its way in.
                assert list(neighbours(default, spec.space(dev))), (spec.name, default)


# ---- proposals ---------------------------------------------------------------------------------


def test_priors_come_first_and_nothing_comes_twice() -> None:
    stored = {"BLOCK": 128, "STAGES": 3, "SPLIT": False, "num_warps": 4, "ROWS": 4}
    foreign = {**stored, "BLOCK": 96}  # a value that the space lacks
    tried = list(run(new_search([stored, foreign])))
    assert tried[:3] == [(DEFAULT, "default"), (stored, "stored"), (foreign, "stored")]
    assert len(tried) == 60
    assert len({label_of(config) for config, _ in tried}) == 60
    assert {"random", "sampler", "descent"} <= {origin for _, origin in tried}


def test_illegal_points_are_counted_by_reason_and_never_proposed() -> None:
    search = new_search()
    assert all(is_small(config) is None for config, _ in run(search))
    illegal = [t for t in search.study.get_trials() if "illegal" in t.user_attrs]
    assert search.rejected == {"too large": len(illegal)}


def test_all_points_are_tried_where_the_budget_covers_them() -> None:
    def few(config: Config) -> str | None:
        return None if config["BLOCK"] == 64 and config["ROWS"] == 1 else "not here"

    search = new_search(trials=500, why=few, core={**SPACE})
    tried = [config for config, _ in run(search)]
    assert len(tried) == 4 * 2 * 4
    assert search.exhausted


def test_a_space_too_large_to_exhaust_is_refused() -> None:
    """Not searched by something else without a word."""
    large = {f"K{i}": [1, 2, 4, 8, 16, 32, 64, 128] for i in range(7)}
    study = optuna.create_study()
    with pytest.raises(ValueError, match="--sampler exhaustive needs a space of at most 200000"):
        Search(study, large, lambda c: None, [], Budget(9), sampler="exhaustive")


def test_descent_leaves_the_exhausted_core() -> None:
    """Keys outside the core (compiler options) are searched from the best point of it."""
    core = {name: (values if name == "BLOCK" else values[:1]) for name, values in SPACE.items()}
    search = new_search(trials=200, core=core)
    origins = [origin for _, origin in run(search)]
    assert origins[: len(core["BLOCK"])].count("exhaustive") == len(core["BLOCK"]) - 1
    best = search.best()
    assert best is not None
    assert best[1] == min(ms for _, ms in table() if ms is not None)


def test_a_failed_default_is_tried_again_by_the_next_search() -> None:
    study = optuna.create_study(sampler=new_sampler(0))
    study.set_user_attr("default_config", DEFAULT)
    first = Search(study, SPACE, is_small, [(DEFAULT, "default")], Budget(9))
    proposal = first.next()
    assert proposal is not None
    first.tell(proposal, Answer("hung", "a busy machine"))
    assert len(first.known()) == 1
    second = Search(study, SPACE, is_small, [(DEFAULT, "default")], Budget(9))
    proposal = second.next()
    assert proposal is not None
    assert proposal.config == DEFAULT
    second.tell(proposal, Answer("ok", ms=1.0))
    assert second.known()[label_of(DEFAULT)][1].ok
    assert all(config != DEFAULT for config, _ in run(second))


def test_a_search_joins_what_another_has_found() -> None:
    """Two searches on one study share its trials, and split the work."""
    study = optuna.create_study(sampler=new_sampler(0))
    searches = [
        Search(study, SPACE, is_small, [(DEFAULT, "default")], Budget(30), seed=seed)
        for seed in (1, 2)
    ]
    tried = []
    for search in itertools.cycle(searches):
        proposal = search.next()
        if proposal is None:
            break
        tried.append(label_of(proposal.config))
        search.tell(proposal, Answer("ok", ms=cost(proposal.config)))
    assert len(tried) == len(set(tried)) == 30


def _at_reads(acts: dict[int, Callable[[], object]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each act is done between the tuner's read of a study of that number and the next read."""
    count = itertools.count()

    def then_act(read: Callable[..., Any]) -> Callable[..., Any]:
        def reads(*args: Any, **kwargs: Any) -> Any:
            found = read(*args, **kwargs)
            acts.get(next(count), lambda: None)()
            return found

        return reads

    for name in ("known", "in_work"):
        monkeypatch.setattr(store, name, then_act(getattr(store, name)))


@pytest.mark.parametrize(("begins", "ends"), list(itertools.combinations(range(7), 2)))
def test_a_trial_that_another_search_begins_and_ends_meanwhile(
    begins: int, ends: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A config that is neither running any more nor known yet would be tried twice."""
    only = [{**DEFAULT, "BLOCK": 64, "STAGES": stages} for stages in (1, 2, 3)]
    study = optuna.create_study(sampler=new_sampler(0))
    one, two = (
        Search(study, SPACE, lambda c: None if c in only else "not here", [], Budget(99), seed=seed)
        for seed in (1, 2)
    )
    tried: list[Config] = []

    def tell() -> None:
        one.tell(tried_by_one, Answer("ok", ms=1.0))

    def begin() -> None:
        nonlocal tried_by_one
        with monkeypatch.context() as own:  # its own reads are not counted
            for name, read in reads.items():
                own.setattr(store, name, read)
            tried_by_one = one.next()
        tried.append(tried_by_one.config)

    tried_by_one: Any = None
    reads = {name: getattr(store, name) for name in ("known", "in_work")}
    _at_reads({begins: begin, ends: tell}, monkeypatch)
    tried += [config for config, _ in run(two)]
    assert sorted(map(label_of, tried)) == sorted(map(label_of, only))


@pytest.mark.parametrize("number", range(6))
def test_a_trial_that_begins_while_another_search_looks(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both samplers draw the same; at most one of the searches tries it."""
    study = optuna.create_study(sampler=new_sampler(0))
    one, two = (Search(study, SPACE, is_small, [], Budget(60), seed=s) for s in (1, 2))
    for _ in range(20):  # past the random start
        for search in (one, two):
            proposal = search.next()
            assert proposal is not None
            search.tell(proposal, Answer("ok", ms=cost(proposal.config)))
    drawn = next(config for config, _ in table() if label_of(config) not in one.known())
    begun: list[Any] = []
    for search in (one, two):
        monkeypatch.setattr(search, "_by_turns", lambda taken: None)
        again = iter([drawn])
        draw = search._parameters.suggest
        monkeypatch.setattr(
            search._parameters, "suggest", lambda trial, a=again, d=draw: next(a, None) or d(trial)
        )
    _at_reads({number: lambda: begun.append(two.next())}, monkeypatch)
    begun.append(one.next())
    assert len(begun) == 2
    assert None not in begun
    assert begun[0].config != begun[1].config


# ---- replays -----------------------------------------------------------------------------------


def test_ours_finds_the_best_in_few_trials_and_chance_does_not() -> None:
    rows = table()
    best = min(ms for _, ms in rows if ms is not None)

    def needed(sampler: str, seed: int) -> int:
        history = replay(SPACE, rows, DEFAULT, trials=90, seed=seed, sampler=sampler)
        return next((i for i, ms in enumerate(history, 1) if ms <= 1.02 * best), 91)

    ours = sorted(needed("tpe", seed) for seed in range(5))
    chance = sorted(needed("random", seed) for seed in range(5))
    assert ours[2] <= 0.15 * len(rows)
    assert ours[2] < chance[2]


def test_failures_teach_the_sampler_and_do_not_win() -> None:
    rows = [(c, None if c["SPLIT"] else ms) for c, ms in table()]
    history = list(replay(SPACE, rows, DEFAULT, trials=40, seed=0))
    assert len(history) == 40
    assert all(math.isfinite(ms) for ms in history)
    assert history == sorted(history, reverse=True)


# ---- the choice --------------------------------------------------------------------------------


def noisy(ms: float, count: int = 40, seed: int = 0, spread: float = 0.002) -> list[float]:
    rng = random.Random(f"{ms}{seed}")
    return [ms * (1 + rng.gauss(0, spread)) for _ in range(count)]


def test_the_default_stays_unless_it_is_beaten() -> None:
    configs = [DEFAULT, {**DEFAULT, "BLOCK": 64}]
    assert choose.by_samples(configs, [noisy(1.0), noisy(0.95)]) == 1
    assert choose.by_samples(configs, [noisy(1.0), noisy(0.995)]) == 0  # a gain not worth having
    assert choose.by_samples(configs, [noisy(1.0), noisy(1.05)]) == 0
    loud = [noisy(1.0, spread=0.3), noisy(0.97, seed=2, spread=0.3)]
    assert choose.by_samples(configs, loud) == 0  # a gain that may be chance


def test_the_simplest_of_equals_is_kept() -> None:
    far = {"BLOCK": 256, "STAGES": 4, "SPLIT": True, "num_warps": 8, "ROWS": 16}
    near = {**DEFAULT, "BLOCK": 32}
    samples = [noisy(1.0), noisy(0.9), noisy(0.9015)]
    assert choose.by_samples([DEFAULT, far, near], samples) == 2
    assert plainness(near, DEFAULT) < plainness(far, DEFAULT)
    assert choose.by_estimates([DEFAULT, far, near], [1.0, 0.9, 0.9]) == 2
    assert choose.by_estimates([DEFAULT, far, near], [1.0, 0.99, 0.985]) == 0


def test_configs_that_compile_to_one_program_are_one_leader() -> None:
    """The simplest stands for all; without a word on programs each stands for itself."""
    others = [{**DEFAULT, "STAGES": stages, "ROWS": rows} for stages in (2, 3) for rows in (4, 1)]
    for programs in ("aabb", "aaaa", None):
        answers = {
            label_of(config): (config, Answer("ok", ms=1.0, facts={"ir": ir} if programs else {}))
            for config, ir in zip(others, programs or "    ", strict=True)
        }
        found = choose.leaders(answers, DEFAULT)
        simplest = [others[1], others[3]] if programs == "aabb" else [others[1]]
        assert found[0] == DEFAULT
        assert found[1:] == simplest if programs else len(found) == 5


def test_leaders_are_timed_to_the_end() -> None:
    answers = {
        "a": Answer("ok", ms=3.0),
        "b": Answer("ok", ms=1.0, facts={"stopped_at": 4}),
        "c": Answer("wrong", "off by one"),
        "d": Answer("ok", ms=2.0),
    }
    known = {name: ({"BLOCK": name}, answer) for name, answer in answers.items()}
    assert choose.leaders(known, DEFAULT) == [DEFAULT, {"BLOCK": "d"}, {"BLOCK": "a"}]
    assert choose.leaders(known, {"BLOCK": "d"}, 1) == [{"BLOCK": "d"}, {"BLOCK": "a"}]


@pytest.mark.parametrize("spec", all_kernels().values(), ids=lambda spec: spec.name)
def test_problems_survive_json(spec: Any) -> None:
    import json

    for case in spec.cases:
        again = decode(json.loads(json.dumps(encode(case.problem))))
        assert spec.tuning_key(again) == spec.tuning_key(case.problem)
        assert dict(again) == dict(case.problem)
