"""Whether a cluster can ever hold a configuration's replicas. Pure: the nodes are an argument.

Resources in use count as free: only a configuration that could never be placed is refused.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from remora.configs.schema import ServeConfig
from remora.deployments.ranks.placement import bundles_of, strategy_of

_ROUNDING = 1e-6  # Ray counts in units of 0.0001


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One of Ray's nodes.

    resources:  in all, by Ray's names
    labels:     Ray's node labels
    """

    resources: Mapping[str, float]
    labels: Mapping[str, str]


def shortage(config: ServeConfig, nodes: Sequence[Node]) -> str | None:
    """Return why the nodes can never hold the replicas, with advice; None if they can."""
    parallel = config.parallel
    num_replicas = 1 if config.autoscaling.is_on else parallel.num_replicas
    bundles = bundles_of(config)
    strategy = strategy_of(parallel) if parallel.num_ranks > 1 else "PACK"
    room = [_room(node, bundles[0], parallel.label_selector) for node in nodes]
    if _holds(room, len(bundles), num_replicas, strategy):
        return None
    wanted = f"{num_replicas} replica{'s' * (num_replicas > 1)} of {parallel.num_ranks} rank" + (
        "s" * (parallel.num_ranks > 1)
    )
    each = ", ".join(f"{amount:g} {name}" for name, amount in bundles[0].items())
    labels = f" and the labels {dict(parallel.label_selector)}" if parallel.label_selector else ""
    spread = f" ({strategy})" if len(bundles) > 1 else ""
    return (
        f"{wanted} need{'s' * (num_replicas == 1)} {num_replicas * len(bundles)} bundles of {each}"
        f"{labels}{spread}, and Ray's {len(nodes)} node{'s' * (len(nodes) != 1)} "
        f"{'has' if len(nodes) == 1 else 'have'} room for {sum(room)}: "
        f"{'; '.join(_describe(node, bundles[0]) for node in nodes)}. {_advice(config)}"
    )


def _holds(room: Sequence[int], num_bundles: int, num_replicas: int, strategy: str) -> bool:
    match strategy:
        case "STRICT_PACK":
            return sum(places // num_bundles for places in room) >= num_replicas
        case "STRICT_SPREAD":  # a replica takes one place on each of num_bundles nodes
            return sum(min(places, num_replicas) for places in room) >= num_bundles * num_replicas
        case _:
            return sum(room) >= num_bundles * num_replicas


def _room(node: Node, bundle: Mapping[str, float], labels: Mapping[str, str]) -> int:
    if any(not _matches(node.labels.get(key), value) for key, value in labels.items()):
        return 0
    return min(
        math.floor(node.resources.get(name, 0.0) / amount + _ROUNDING)
        for name, amount in bundle.items()
    )


def _matches(found: str | None, wanted: str) -> bool:
    """Evaluate Ray's label conditions: `a`, `!a`, `in(a, b)`, `!in(a, b)`."""
    if wanted.startswith("!"):
        return not _matches(found, wanted[1:])
    if wanted.startswith("in(") and wanted.endswith(")"):
        return found in [choice.strip() for choice in wanted[3:-1].split(",")]
    return found == wanted


def _describe(node: Node, bundle: Mapping[str, float]) -> str:
    return ", ".join(f"{node.resources.get(name, 0.0):g} {name}" for name in bundle)


def _advice(config: ServeConfig) -> str:
    parallel = config.parallel
    advice = [
        f"Lower parallel.cpus_per_rank (now {parallel.cpus_per_rank:g}): Ray only counts it "
        "and reserves no core"
    ]
    if parallel.num_nodes > 1:
        advice.append(f"start Ray on {parallel.num_nodes} nodes")
    if config.engine.device == "cuda":
        advice.append("engine.device is cuda, so each rank needs a GPU")
    if parallel.num_replicas > 1:
        advice.append("lower parallel.num_replicas")
    return "; ".join(advice) + "."
