"""Which linear layers are sensitive: thresholds on their figures, given or searched for.

The search divides a share of layers among the metrics. With weights a : b : c of quarters, the
layers with the largest figures of each metric are taken in that proportion, until their union is as
large as asked; the thresholds lie halfway to the next smaller figure. That gives 15 choices, fewer
where some flag the same layers. Each is a network in int8 whose flagged layers were left alone, and
what it costs is measured on held-out text, all choices in one pass over the weights.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from model.layer_metrics import fake_quantised
from model.layer_stream import LayerStream, Part, parts
from model.qwen3 import Layer, Linear

METRICS = ("kl", "dispersion", "energy")
DEFAULTS = {"kl": 0.02, "dispersion": 15.0, "energy": 0.42}
MOST_RISE = 0.01  # of perplexity
_STEPS = 4  # a metric's weight is a multiple of 1 / _STEPS

Figures = Mapping[str, Mapping[str, float]]  # of each layer, each metric


def reasons(figures: Figures, thresholds: Mapping[str, float]) -> dict[str, list[str]]:
    """For each layer the metrics above their thresholds: sensitive if there are any."""
    return {
        name: [metric for metric in METRICS if found[metric] > thresholds[metric]]
        for name, found in figures.items()
    }


def flagged(figures: Figures, thresholds: Mapping[str, float]) -> frozenset[str]:
    """Names of the sensitive layers."""
    return frozenset(name for name, why in reasons(figures, thresholds).items() if why)


def divisions(figures: Figures, count: int) -> list[dict[str, float]]:
    """Thresholds that flag about ``count`` layers, one mapping for each set of layers."""
    ordered = {m: sorted((f[m] for f in figures.values()), reverse=True) for m in METRICS}

    def thresholds(taken: Mapping[str, int]) -> dict[str, float]:
        found = {}
        for metric, values in ordered.items():
            n = taken[metric]
            if n == 0:
                found[metric] = values[0]  # the largest: none lies above it
            elif n < len(values):
                found[metric] = (values[n - 1] + values[n]) / 2
            else:
                found[metric] = values[-1] / 2
        return found

    by_layers: dict[frozenset[str], dict[str, float]] = {}
    for a in range(_STEPS + 1):
        for b in range(_STEPS + 1 - a):
            weights = dict(zip(METRICS, (a, b, _STEPS - a - b), strict=True))
            best: tuple[int, dict[str, float], frozenset[str]] | None = None
            for size in range(1, _STEPS * len(figures) + 1):
                taken = {m: min(len(figures), w * size // _STEPS) for m, w in weights.items()}
                found = thresholds(taken)
                names = flagged(figures, found)
                away = abs(len(names) - count)
                if best is None or away < best[0]:
                    best = (away, found, names)
                if len(names) >= count:
                    break
            assert best is not None
            by_layers.setdefault(best[2], best[1])
    return list(by_layers.values())


class Mixed(Linear):
    """A projection in w8a8 but for ``high``, runs of its outputs that are left as they were."""

    def __init__(self, linear: Linear, fake: torch.Tensor, runs: Sequence[tuple[slice, bool]]):
        super().__init__(linear.weight, linear.bias)
        self._fake, self._runs = fake, runs

    def __call__(self, x: torch.Tensor, ops: Any) -> torch.Tensor:
        assert isinstance(self.weight, torch.Tensor)
        low = None if all(high for _, high in self._runs) else fake_quantised(x)
        found = []
        for rows, high in self._runs:
            bias = None if self.bias is None else self.bias[rows]
            weight = self.weight if high else self._fake
            source = x if high or low is None else low
            found.append(torch.nn.functional.linear(source, weight[rows], bias))
        return found[0] if len(found) == 1 else torch.cat(found, dim=-1)


def mixed(
    layer: Layer, fakes: Mapping[str, torch.Tensor], of_layer: Sequence[Part], high: frozenset[str]
) -> Layer:
    """``layer`` in w8a8, the linear layers named in ``high`` left alone."""
    changed: dict[str, Any] = {}
    for field, fake in fakes.items():
        runs = [(part.rows, part.name in high) for part in of_layer if part.field == field]
        changed[field] = Mixed(getattr(layer, field), fake, runs)
    return dataclasses.replace(layer, **changed)


def run_choices(
    stream: LayerStream, index: int, states: Sequence[torch.Tensor], choices: Sequence[Any]
) -> list[torch.Tensor]:
    """Hidden states after layer ``index`` of each choice: names left alone, or None for all."""
    layer, of_layer = stream.load(index), parts(stream.config, index)
    fakes = {
        field: fake_quantised(getattr(layer, field).weight)
        for field in dict.fromkeys(part.field for part in of_layer)
    }
    return [
        stream.run(layer if high is None else mixed(layer, fakes, of_layer, high), state)
        for state, high in zip(states, choices, strict=True)
    ]
