"""Which layers of a checkpoint are quantised, and how: by a scheme and by what is sensitive."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from model.compressed import Scheme
    from model.config import ModelConfig

SCHEMES = ("w8a8", "w8a16", "w4a16")
GROUPS = (128, 64, 32, 16, 8)  # inputs that share a scale in w4a16: the first that divides
LEAST_EXPERT_GROUP = 32  # of those, the smallest that fused_moe multiplies


@dataclass(frozen=True)
class Plan:
    """What happens to each linear layer of the decoder, and to the experts of each layer."""

    schemes: dict[str, Scheme]  # by name of a linear layer
    kept: tuple[str, ...]  # linear layers that stay as they are
    experts: dict[int, Scheme]  # by layer: of all matrices of its experts
    kept_experts: tuple[int, ...]  # layers whose experts stay as they are; routers always do


def joined_layers(config: ModelConfig) -> list[dict[str, tuple[int, int]]]:
    """Names and shapes [N, K] of the linear layers, those that are computed together in one.

    Routers and experts are not among them.
    """
    from model.weights import layer_table

    return [
        {name.removesuffix(".weight"): (shape[0], shape[1]) for name, shape in parameter.sources}
        for i in range(config.num_layers)
        for ours, parameter in layer_table(config, i).items()
        if ours.endswith("_proj.weight")
    ]


def expert_layers(config: ModelConfig) -> dict[int, dict[str, tuple[int, int]]]:
    """By layer: names and shapes [N, K] of the matrices of its experts; dense layers have none."""
    from model.weights import layer_table

    return {
        i: {
            name.removesuffix(".weight"): (shape[0], shape[1])
            for parameter in layer_table(config, i).values()
            if parameter.experts
            for name, shape in parameter.sources
        }
        for i in (config.mixture.layers if config.mixture else ())
    }


def all_experts(layer: int) -> str:
    """The name that stands for all experts of a layer."""
    return f"model.layers.{layer}.mlp.experts"


def make_plan(config: ModelConfig, scheme: str | None, sensitive: Collection[str]) -> Plan:
    """Schemes of all layers but ``sensitive`` ones and those computed together with them.

    All experts of a layer are computed together. w4a16 takes those whose inputs, of up and of down,
    32 divides, both in the same groups: transformers 5.24 reads no others.

    Args:
        scheme: one of ``SCHEMES``; None keeps all as they are.

    Raises:
        ValueError: a layer has inputs that do not divide by 4 (w8a16) or 8 (w4a16).
    """
    schemes: dict[str, Scheme] = {}
    kept: list[str] = []
    experts: dict[int, Scheme] = {}
    kept_experts: list[int] = []
    for group in joined_layers(config):
        if scheme is None or any(name in sensitive for name in group):
            kept += group
        else:
            schemes |= {name: _scheme(scheme, name, inputs) for name, (_, inputs) in group.items()}
    for layer, matrices in expert_layers(config).items():
        named = all_experts(layer) in sensitive or any(name in sensitive for name in matrices)
        common = math.gcd(*(k for _, k in matrices.values()))
        if scheme is None or named or (scheme == "w4a16" and common % LEAST_EXPERT_GROUP):
            kept_experts.append(layer)
        elif scheme == "w4a16":
            experts[layer] = _scheme(scheme, all_experts(layer), common)
        else:
            (experts[layer],) = {_scheme(scheme, name, k) for name, (_, k) in matrices.items()}
    return Plan(schemes, tuple(kept), experts, tuple(kept_experts))


def _scheme(scheme: str, name: str, inputs: int) -> Scheme:
    """Of one matrix."""
    from model.compressed import INT, PACKED, Scheme

    if scheme == "w8a8":
        return Scheme(INT, 8, None, True)
    if scheme == "w8a16":
        if inputs % 4:
            raise ValueError(f"w8a16 needs inputs that divide by 4, got {inputs} of {name}")
        return Scheme(PACKED, 8, None, False)
    size = next((size for size in GROUPS if inputs % size == 0), None)
    if size is None:
        raise ValueError(f"w4a16 needs inputs that divide by 8, got {inputs} of {name}")
    return Scheme(PACKED, 4, size, False)


def describe_plan(plan: Plan) -> dict[str, Any]:
    """The ``quantization_config`` of a plan; routers, lm_head and what is kept are ignored."""
    from model.compressed import describe

    by_scheme: dict[Scheme, list[str]] = {}
    for scheme in plan.experts.values():
        by_scheme[scheme] = [r"experts\.\d+\.\w+"]
    for name, scheme in plan.schemes.items():
        kinds = by_scheme.setdefault(scheme, [])
        # A dense layer's down_proj has other inputs than an expert's.
        kind = r"\.".join(name.split(".")[-2 if plan.experts else -1 :])
        if kind not in kinds:
            kinds.append(kind)
    groups: list[tuple[list[str], Scheme]] = [(["Linear"], scheme) for scheme in by_scheme]
    if len(groups) > 1:  # groups of other sizes: inputs of a kind are the same in all layers
        groups = [
            ([rf"re:.*\.({'|'.join(kinds)})$"], scheme) for scheme, kinds in by_scheme.items()
        ]
    ignore = ["lm_head"]
    if plan.experts or plan.kept_experts:
        ignore.append(r"re:.*\.mlp\.gate$")
    if plan.kept_experts:
        layers = "|".join(map(str, plan.kept_experts))
        ignore.append(rf"re:.*\.layers\.({layers})\.mlp\.experts\..*")
    found: dict[str, Any] = describe(groups, [*ignore, *plan.kept])
    return found


def read_sensitive(path: Path, config: ModelConfig) -> set[str]:
    """The layers that a file of ``python -m model.sensitivity`` flags.

    It may name matrices of experts too, or all experts of a layer (``all_experts``).

    Raises:
        ValueError: no such file, another format, or the layers of another model.
    """
    from model.config import read_json

    if not path.is_file():
        raise ValueError(f"--sensitive {path}: expected a file, got none")
    found = read_json(path)
    form, version = found.get("format"), found.get("version")
    if (form, version) != ("tkernels.sensitive_layers", 1):
        raise ValueError(
            f"--sensitive {path}: expected format 'tkernels.sensitive_layers' version 1, got "
            f"{form!r} version {version!r}"
        )
    layers = found.get("layers")
    if not isinstance(layers, dict):
        raise ValueError(f"--sensitive {path}: expected an object of layers, got {layers!r}")
    ours = {name for group in joined_layers(config) for name in group}
    experts = expert_layers(config)
    also = {all_experts(i) for i in experts}.union(*experts.values())
    for names, what in (
        (sorted(layers.keys() - ours - also), "more, which the model lacks"),
        (sorted(ours - layers.keys()), "a file without some"),
    ):
        if names:
            raise ValueError(
                f"--sensitive {path}: expected the {len(ours)} linear layers of this model, got "
                f"{what}: {names[0]} ({len(names)} in all)"
            )
    flagged = set()
    for name, facts in layers.items():
        value = facts.get("sensitive") if isinstance(facts, dict) else facts
        if not isinstance(value, bool):
            raise ValueError(
                f"--sensitive {path}: expected sensitive to be true or false for {name}, got "
                f"{value!r}"
            )
        if value:
            flagged.add(name)
    return flagged
