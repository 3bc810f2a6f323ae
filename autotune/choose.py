"""Which config is kept at the end: the simplest of those that are as good as the best.

The best of many noisy times is partly luck, so the leaders and the default are timed anew, taking
turns. The default stays unless it is beaten beyond doubt.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

import scipy.stats

from autotune.records import Answer
from autotune.space import plainness
from tkernels.registry import Config

LEADERS = 5
ROUNDS = 40
_TIE = 1.005  # times closer than this are taken for equal
_MEASURED_GAIN = 1.01  # a smaller gain is not worth leaving what everybody runs
_ESTIMATED_GAIN = 1.02
_DOUBT = 0.01  # chance that the default is as fast after all


def leaders(
    table: Mapping[str, tuple[Config, Answer]], default: Config, count: int = LEADERS
) -> list[Config]:
    """The default, then the ``count`` best others that were timed to the end, fastest first.

    Of equal times the simplest comes first. Configs that compile to one program, as far as their
    answers tell (``ir``, offline), are one point: the simplest stands for it.
    """
    timed = [
        (answer.ms, plainness(config, default), config, answer.facts.get("ir"))
        for config, answer in table.values()
        if answer.timed and config != default
    ]
    found: list[Config] = []
    programs: set[str] = set()
    for _, _, config, program in sorted(timed, key=lambda t: t[:2]):
        if program is None or program not in programs:
            found.append(config)
            programs.update([program] if program else [])
    return [default, *found[:count]]


def by_samples(configs: Sequence[Config], samples: Sequence[Sequence[float]]) -> int:
    """Place of the config to keep, of times taken in turns; ``configs[0]`` is the default."""
    medians = [statistics.median(times) for times in samples]
    tie = max(_TIE, 1 + noise(samples[medians.index(min(medians))]) / 4)
    near = [i for i, ms in enumerate(medians) if ms <= min(medians) * tie]
    winner = min(near, key=lambda i: plainness(configs[i], configs[0]))
    if winner == 0 or not _is_faster(samples[winner], samples[0]):
        return 0
    return winner


def _is_faster(times: Sequence[float], default_times: Sequence[float]) -> bool:
    gains = [default / max(own, 1e-12) for own, default in zip(times, default_times, strict=True)]
    if statistics.median(gains) < _MEASURED_GAIN:
        return False
    differences = [default - own for own, default in zip(times, default_times, strict=True)]
    doubt = scipy.stats.wilcoxon(differences, alternative="greater", zero_method="zsplit").pvalue
    return bool(doubt < _DOUBT)


def by_estimates(configs: Sequence[Config], times: Sequence[float]) -> int:
    """The same of a model's estimates, which repeat exactly: ties go to the simplest."""
    near = [i for i, ms in enumerate(times) if ms <= min(times) * (1 + 1e-6)]
    winner = min(near, key=lambda i: plainness(configs[i], configs[0]))
    return winner if times[0] >= times[winner] * _ESTIMATED_GAIN else 0


def noise(times: Sequence[float]) -> float:
    """Width of the middle 60% of ``times``, as a share of their median."""
    ordered = sorted(times)
    last = len(ordered) - 1
    width = ordered[round(0.8 * last)] - ordered[round(0.2 * last)]
    return width / max(statistics.median(ordered), 1e-12)
