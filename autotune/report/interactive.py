"""Optuna's own figures of one search, for browsers with JavaScript."""

from __future__ import annotations

import json
from typing import Any

from autotune.report.page import escape
from autotune.report.searched import Searched, real_study, varied


def plotly_js() -> str:
    """The library that draws them, as it lies beside the pages."""
    from plotly.offline import get_plotlyjs

    return str(get_plotlyjs())


def figures(s: Searched, here: str) -> str:
    """Folds with figures of the complete configs, which are drawn when they are opened."""
    keys = list(varied(s))
    if len(s.ranked) < 2:
        return ""
    import optuna.visualization as v  # and with it plotly, which is optional

    study = real_study(s)
    target = f"{s.noun} of one call (µs)"
    drawn = {"history": v.plot_optimization_history(study, target_name=target)}
    if keys:
        drawn["parallel coordinates"] = v.plot_parallel_coordinate(
            study, params=keys, target_name=target
        )
        drawn["slices"] = v.plot_slice(study, params=keys, target_name=target)
    parts = []
    for i, (name, figure) in enumerate(drawn.items()):
        figure.update_layout(title={"text": f"{s.kernel}, {s.case}: {name}"})
        place = f"{here}-plotly-{i}"
        parts.append(
            f'<details class="interactive" data-for="{escape(place)}"><summary>Interactive: '
            f'{escape(name)}</summary><div id="{escape(place)}" class="plot"></div>'
            f'<script type="application/json" id="{escape(place)}-data">{_json(figure)}</script>'
            "</details>"
        )
    return "".join(parts)


def _json(figure: Any) -> str:
    """A figure as JSON that cannot end the script element it stands in."""
    found = json.loads(figure.to_json())
    found["layout"].pop("template", None)  # 7 kB of colours that the page sets itself
    text = json.dumps(found, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
