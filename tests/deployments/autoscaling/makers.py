"""Loads, facts and a clock for tests of the policy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from ray.serve._private.common import DeploymentID, ReplicaID
from ray.serve.config import AutoscalingContext

from remora.deployments.autoscaling.facts import Facts, ReplicaLoad, Targets
from remora.deployments.autoscaling.policy import Decision, PolicyState, begin, decide

TARGETS = Targets(
    requests=10.0,
    ttft_s=1.0,
    itl_s=0.1,
    upscale_delay_s=5.0,
    downscale_delay_s=60.0,
    to_zero_delay_s=100.0,
)
IDLE = ReplicaLoad(
    num_running=0.0,
    num_waiting=0.0,
    queued_tokens=0.0,
    kv_usage=0.0,
    tokens_per_s=1000.0,
    finished_per_s=2.0,
    base_itl_s=0.02,
)


def make_load(**values: float | None) -> ReplicaLoad:
    return replace(IDLE, **values)


def make_facts(loads: Iterable[ReplicaLoad] = (), **values: Any) -> Facts:
    """Return facts of ready replicas, as many as wanted unless said otherwise."""
    replicas = {f"r{number}": load for number, load in enumerate(loads)}
    running = sum((load.num_running or 0) + (load.num_waiting or 0) for load in replicas.values())
    defaults = {
        "now": 0.0,
        "target": len(replicas),
        "num_ready": len(replicas),
        "min_replicas": 1,
        "max_replicas": 20,
        "total_requests": running,
    }
    return Facts(**{**defaults, **values, "replicas": replicas})


class Decider:
    """Decides again and again, once a second, and does what it has decided."""

    def __init__(self, target: int, targets: Targets = TARGETS, **facts: Any) -> None:
        self.target, self.ready, self.now = target, target, 0.0
        self._targets, self._facts = targets, facts
        self._state: PolicyState | None = None

    def decide(self, load: ReplicaLoad, seconds: float = 1.0, **facts: Any) -> Decision:
        """Let all ready replicas be loaded alike for some seconds; return the last decision."""
        for _ in range(round(seconds)):
            self.now += 1.0
            given = make_facts([load] * self.ready, **{**self._facts, **facts})
            seen = replace(given, now=self.now, target=self.target, num_ready=self.ready)
            decision, self._state = decide(seen, self._targets, self._state or begin(seen))
            self.target = decision.replicas
        return decision

    def start_all(self) -> None:
        """Make everything that is wanted ready, or gone."""
        self.ready = self.target


DEPLOYMENT = DeploymentID(name="LLMServer", app_name="app")


def make_context(
    replicas: Iterable[ReplicaID], metrics: Mapping[str, Any], **values: Any
) -> AutoscalingContext:
    """Return what Serve tells a policy; `metrics` holds the reports by name and replica."""
    ids = list(replicas)
    defaults: dict[str, Any] = {
        "deployment_id": DEPLOYMENT,
        "deployment_name": DEPLOYMENT.name,
        "app_name": DEPLOYMENT.app_name,
        "current_num_replicas": len(ids),
        "target_num_replicas": len(ids),
        "running_replicas": ids,
        "total_num_requests": 0.0,
        "total_queued_requests": 0.0,
        "aggregated_metrics": None,
        "raw_metrics": metrics,
        "capacity_adjusted_min_replicas": 0,
        "capacity_adjusted_max_replicas": 8,
        "policy_state": {},
        "last_scale_up_time": None,
        "last_scale_down_time": None,
        "config": None,
    }
    return AutoscalingContext(**{**defaults, **values})
