"""A search space: config keys with their allowed values, and moves from one config to another.

To the sampler each key is a place in its list of values. A list of numbers has an order, which the
sampler learns from; names and switches have none. Where a kernel has variants, a key belongs to one
variant, with the values that are legal for it: what is good for one says nothing of another.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import optuna

from autotune.records import label_of
from tkernels.registry import Config

Space = Mapping[str, list[Any]]
WhyIllegal = Callable[[Config], str | None]

VARIANT = "variant"
MOST_POINTS_READ = 200_000  # legality of more than that takes too long to look at one by one


def points(space: Space) -> Iterator[Config]:
    """Every combination, in the order of the lists. A value of None leaves its key out."""
    for values in itertools.product(*space.values()):
        yield config_of(dict(zip(space, values, strict=True)))


def restricted(space: Space, only: Mapping[str, Sequence[str]]) -> dict[str, list[Any]]:
    """``space`` with, of the keys in ``only``, the values that are written so (``str(value)``).

    Raises ValueError for a key or a value that ``space`` does not have.
    """
    found = {name: list(values) for name, values in space.items()}
    for name, words in only.items():
        if name not in found:
            raise ValueError(
                f"autotune: --only must name a config key, of {', '.join(found)}, got {name!r}"
            )
        written = {str(value).lower(): value for value in found[name]}
        for word in words:
            if word.lower() not in written:
                raise ValueError(
                    f"autotune: --only {name}= must be of {', '.join(written)}, got {word!r}"
                )
        allowed = {word.lower() for word in words}
        found[name] = [value for word, value in written.items() if word in allowed]
    return found


def has_all(space: Space, config: Config) -> bool:
    """Whether each value of ``config`` is one of ``space``."""
    return all(any(same(config[n], v) for v in space.get(n, [])) for n in config)


def size(space: Space) -> int:
    """Number of combinations, legal or not."""
    return math.prod(len(values) for values in space.values())


def config_of(values: Mapping[str, Any]) -> Config:
    """``values`` without the keys that are left to the compiler (None)."""
    return {name: value for name, value in values.items() if value is not None}


def legal_points(space: Space, why_illegal: WhyIllegal, *, limit: int) -> list[Config] | None:
    """All legal points, or None where they are more than ``limit`` (or too many to look at)."""
    found: list[Config] = []
    if size(space) > MOST_POINTS_READ:
        return None
    for config in points(space):
        if why_illegal(config) is None:
            found.append(config)
            if len(found) > limit:
                return None
    return found


def has_order(values: list[Any]) -> bool:
    """Whether a step to the next value means something: ascending numbers."""
    numbers = all(type(value) is int for value in values)
    return numbers and values == sorted(values)


def neighbours(config: Config, space: Space) -> Iterator[Config]:
    """Configs that differ from ``config`` in one key: the next number on both sides, or any name.

    A value that the space does not have (a config from elsewhere) counts as lying between its two.
    """
    for name, values in space.items():
        own = config.get(name)
        for value in _beside(own, values):
            yield config_of({**config, name: value})


def _beside(own: Any, values: list[Any]) -> list[Any]:
    if not has_order(values) or type(own) is not int:
        return [value for value in values if value != own or type(value) is not type(own)]
    below = [value for value in values if value < own]
    above = [value for value in values if value > own]
    return below[-1:] + above[:1]


def distance(a: Config, b: Config) -> int:
    """In how many keys two configs differ."""
    return sum(a.get(name) != b.get(name) for name in {*a, *b})


def plainness(config: Config, default: Config) -> tuple[int, float, str]:
    """Sorts the simplest first: near the default, then few warps, stages and small tiles."""
    numbers = [value for value in config.values() if type(value) is int and value > 0]
    return distance(config, default), math.prod(numbers), label_of(config)


# ---- what Optuna sees --------------------------------------------------------------------------


class Parameters:
    """The parameters of a study over ``space``: how a trial's numbers become a config and back."""

    def __init__(self, space: Space, why_illegal: WhyIllegal) -> None:
        self._space = dict(space)
        variants = self._space.pop(VARIANT, [None])
        self._variants: dict[Any, dict[str, list[Any]]] = {
            v: {VARIANT: [v], **self._space} if v is not None else self._space for v in variants
        }
        if len(variants) > 1:
            useful = {v: _useful(own, why_illegal) for v, own in self._variants.items()}
            # One without a legal point is no choice: there is no value to suggest for it.
            legal = {v: own for v, own in useful.items() if all(own.values())}
            self._variants = legal or self._variants

    def suggest(self, trial: optuna.Trial) -> Config:
        """The config that a trial stands for."""
        variants = list(self._variants)
        variant = variants[0]
        if len(variants) > 1:
            variant = trial.suggest_categorical(VARIANT, variants)
        values: dict[str, Any] = {VARIANT: variant}
        for name, allowed in self._variants[variant].items():
            if name != VARIANT:
                values[name] = allowed[self._suggest(trial, self._name(variant, name), allowed)]
        return config_of({name: values.get(name) for name in [*self._order(), *values]})

    def numbers(self, config: Config) -> dict[str, Any] | None:
        """The trial's numbers that stand for ``config``; None where the space lacks a value."""
        variants = list(self._variants)
        variant = config.get(VARIANT, variants[0] if len(variants) == 1 else None)
        if variant not in self._variants:
            return None
        found: dict[str, Any] = {VARIANT: variant} if len(variants) > 1 else {}
        for name, allowed in self._variants[variant].items():
            if name == VARIANT:
                continue
            places = [i for i, value in enumerate(allowed) if same(value, config.get(name))]
            if not places:
                return None
            if len(allowed) > 1:
                found[self._name(variant, name)] = places[0]
        return found

    def _order(self) -> list[str]:
        return list(self._space)

    def _name(self, variant: Any, name: str) -> str:
        return name if len(self._variants) == 1 else f"{variant}.{name}"

    @staticmethod
    def _suggest(trial: optuna.Trial, name: str, allowed: list[Any]) -> int:
        if len(allowed) == 1:
            return 0
        if has_order(allowed):
            return int(trial.suggest_int(name, 0, len(allowed) - 1))
        return int(trial.suggest_categorical(name, list(range(len(allowed)))))


def same(a: Any, b: Any) -> bool:
    """Equality that tells True from 1."""
    return type(a) is type(b) and bool(a == b)


def _useful(space: Space, why_illegal: WhyIllegal) -> dict[str, list[Any]]:
    """``space`` without the values that no legal point has."""
    if size(space) > MOST_POINTS_READ:
        return dict(space)
    seen: dict[str, list[Any]] = {name: [] for name in space}
    for config in points(space):
        if all(config.get(n) in seen[n] for n in space) or why_illegal(config) is not None:
            continue
        for name in space:
            seen[name].append(config.get(name))
    return {
        name: [value for value in values if any(same(value, s) for s in seen[name])]
        for name, values in space.items()
    }
