"""The running Ray cluster's nodes, and whether they can hold a configuration."""

from __future__ import annotations

from remora.configs.errors import ConfigError
from remora.configs.schema import ServeConfig
from remora.deployments.ranks.capacity import Node, shortage


def check_room(config: ServeConfig) -> None:
    """Raise ConfigError if the running cluster can never hold the replicas; Ray would wait."""
    import ray

    nodes = [
        Node(resources=node["Resources"], labels=node.get("Labels") or {})
        for node in ray.nodes()
        if node["Alive"]
    ]
    reason = shortage(config, nodes)
    if reason is not None:
        raise ConfigError(reason)
