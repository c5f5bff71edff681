"""An application of a test's own in the Ray that all tests share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.deployments.lifecycle.leftovers import in_ray, until_gone


@contextmanager
def deployed(name: str, args: dict[str, Any]) -> Iterator[None]:
    """Run an application; what it had with Ray must be gone afterwards."""
    from ray import serve

    from remora.deployments.app import build

    before = in_ray()
    try:
        serve.run(build(args), name=name, route_prefix=f"/{name}")
        yield
    finally:
        serve.delete(name)
        assert until_gone(lambda: in_ray() - before) == []


def num_running(name: str, deployment: str) -> int:
    """Return how many replicas of a deployment are ready."""
    from ray import serve

    states = serve.status().applications[name].deployments[deployment].replica_states
    return states.get("RUNNING", 0) if set(states) == {"RUNNING"} else 0
