"""The Ray resources that a replica reserves: its ranks' bundles. Pure; opens nothing.

A replica of one rank is an ordinary actor. One of several is a placement group with a bundle per
rank, or per node where `num_nodes` is set; Serve puts the replica itself, which is rank 0, into
bundle 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from remora.configs.schema import ServeConfig
from remora.configs.sections.parallel import ParallelSection

# Ray rejects empty bundles.
LEAST_CPU = 0.001
ACCELERATOR_SHARE = 0.001


def placement_options(config: ServeConfig) -> Mapping[str, Any]:
    """Return the Serve options that place a replica.

    A rank takes one of Ray's CPUs by default: they are only counted, and requiring all of them
    would keep a small machine from starting.
    """
    parallel = config.parallel
    if parallel.num_ranks == 1:
        labels = {"label_selector": parallel.label_selector} if parallel.label_selector else {}
        return {"ray_actor_options": {**rank_options(config), **labels}}
    bundles = bundles_of(config)
    selectors = [parallel.label_selector] * len(bundles)
    return {
        "ray_actor_options": rank_options(config),
        "placement_group_bundles": bundles,
        "placement_group_strategy": strategy_of(parallel),
        **({"placement_group_bundle_label_selector": selectors} if selectors[0] else {}),
    }


def rank_options(config: ServeConfig) -> dict[str, Any]:
    """Return the resources of one rank as actor options."""
    parallel = config.parallel
    options: dict[str, Any] = {"num_cpus": parallel.cpus_per_rank}
    if config.engine.device == "cuda":
        options["num_gpus"] = 1
    if parallel.memory_per_rank is not None:
        options["memory"] = parallel.memory_per_rank
    if parallel.accelerator_type is not None:
        kind = f"accelerator_type:{parallel.accelerator_type}"
        options["resources"] = {kind: ACCELERATOR_SHARE}
    return options


def bundles_of(config: ServeConfig) -> list[dict[str, float]]:
    """Return the bundles of one replica, one per rank or per node."""
    parallel = config.parallel
    ranks = parallel.num_ranks // parallel.num_nodes if parallel.num_nodes > 1 else 1
    options = rank_options(config)
    each = {
        "CPU": max(LEAST_CPU, options["num_cpus"]),
        "GPU": options.get("num_gpus", 0),
        "memory": options.get("memory", 0),
        **options.get("resources", {}),
    }
    bundle = {name: amount * ranks for name, amount in each.items() if amount}
    return [dict(bundle) for _ in range(parallel.num_ranks // ranks)]


def bundle_index(parallel: ParallelSection, rank: int) -> int:
    """Return the bundle of a rank; the ranks of a pipeline stage are consecutive."""
    return rank * parallel.num_nodes // parallel.num_ranks if parallel.num_nodes > 1 else rank


def strategy_of(parallel: ParallelSection) -> str:
    """Return the placement group's strategy."""
    if parallel.placement != "auto":
        return parallel.placement
    return "STRICT_SPREAD" if parallel.num_nodes > 1 else "PACK"
