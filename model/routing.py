"""Which experts the tokens of a run go to: how often each is chosen, and how evenly.

    load[l, e]    how many tokens chose expert e of layer l; all experts of a layer together have
                  tokens * top_k
    imbalance[l]  max over e of load / mean over e: 1 where all are chosen alike, E / top_k where
                  the same ones always are
    evenness[l]   entropy of the shares load / sum, over log E: 1 where all are chosen alike,
                  log top_k / log E where the same ones always are

The ids of the chosen experts come from ``fused_moe`` itself (``topk_ids_out``) and are counted on
the device, without waiting for it: figures are made at the end.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from model.config import ModelConfig


class Routing:
    """``load``: int64 [layers with experts, E], of all steps since the start.

    Raises:
        ValueError: the network has no experts.
    """

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        if config.mixture is None:
            raise ValueError(
                f"--moe-stats: expected a network with experts, got a dense {config.model_type}"
            )
        self.mixture = config.mixture
        sizes = len(self.mixture.layers), self.mixture.num_experts
        self.load = torch.zeros(sizes, dtype=torch.int64, device=device)

    def step(self, ops: Any) -> Step:
        """The operations of one step of the network."""
        return Step(ops, self.load)

    def summary(self) -> dict[str, Any]:
        """Figures of each layer, and the worst of them; None stands for no tokens."""
        rows = self.load.tolist()
        layers = [
            {"layer": layer, **figures(row)}
            for layer, row in zip(self.mixture.layers, rows, strict=True)
        ]
        seen = any(map(sum, rows))
        return {
            "num_experts": self.mixture.num_experts,
            "experts_per_token": self.mixture.num_experts_per_tok,
            "tokens": sum(rows[0]) // self.mixture.num_experts_per_tok,
            "most_imbalance": max(row["imbalance"] for row in layers) if seen else None,
            "least_evenness": min(row["evenness"] for row in layers) if seen else None,
            "layers": layers,
        }


class Step:
    """Operations whose ``fused_moe``, which the layers call in order, counts what is chosen."""

    def __init__(self, ops: Any, load: torch.Tensor) -> None:
        self._ops, self._load, self._calls = ops, load, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def fused_moe(self, x: torch.Tensor, *rest: Any, top_k: int, **more: Any) -> torch.Tensor:
        ids = torch.empty((x.shape[0], top_k), dtype=torch.int32, device=x.device)
        y: torch.Tensor = self._ops.fused_moe(x, *rest, top_k=top_k, topk_ids_out=ids, **more)
        chosen = ids.flatten().long()
        self._load[self._calls].scatter_add_(0, chosen, torch.ones_like(chosen))
        self._calls += 1
        return y


def figures(load: list[int]) -> dict[str, Any]:
    """Of one layer."""
    total, count = sum(load), len(load)
    shares = [n / total for n in load if n]  # none where nothing was counted
    entropy = -sum(p * math.log(p) for p in shares)
    return {
        "load": load,
        "imbalance": max(load) * count / total if total else None,
        "evenness": (entropy / math.log(count) if count > 1 else 1.0) if total else None,
        "unused": load.count(0),
    }


def table(found: dict[str, Any]) -> str:
    """A line for each layer of a ``summary``."""
    if found["most_imbalance"] is None:
        return "experts: no token went through them"
    lines = [
        f"experts: {found['experts_per_token']} of {found['num_experts']} a token, "
        f"{found['tokens']} tokens; imbalance (max/mean) at most {found['most_imbalance']:.2f}, "
        f"evenness (entropy) at least {found['least_evenness']:.3f}"
    ]
    for row in found["layers"]:
        busiest = row["load"].index(max(row["load"]))
        lines.append(
            f"  layer {row['layer']}: imbalance {row['imbalance']:.2f} (expert {busiest}), "
            f"evenness {row['evenness']:.3f}, {row['unused']} unused"
        )
    return "\n".join(lines)


def draw(path: Path, found: dict[str, Any]) -> None:
    """A map of loads over the mean of their layer: experts along, layers with experts down."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot as plt

    rows = found["layers"]
    shares = [
        [n * len(row["load"]) / max(1, sum(row["load"])) for n in row["load"]] for row in rows
    ]
    size = max(6.0, 2 + 0.09 * found["num_experts"]), max(3.0, 1.6 + 0.2 * len(rows))
    figure, axis = plt.subplots(figsize=size, constrained_layout=True)
    image = axis.imshow(shares, aspect="auto", vmin=0, cmap="viridis", interpolation="nearest")
    figure.colorbar(image, ax=axis, label="load / mean load of the layer")
    axis.set_yticks(range(len(rows)), [str(row["layer"]) for row in rows], fontsize=7)
    axis.set_ylabel("layer")
    axis.set_xlabel("expert")
    axis.set_title(
        f"{found['tokens']} tokens, {found['experts_per_token']} of {found['num_experts']} experts "
        "each",
        fontsize=9,
    )
    figure.savefig(path, dpi=110)
    plt.close(figure)
