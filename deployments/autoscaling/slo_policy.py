"""The policy as Serve calls it: in the controller, ten times a second.

Serve pickles this module by value and imports its imports where the controller runs, so remora must
be installed on Ray's head node. The state lives in the policy object, which Serve keeps until the
deployment's configuration changes or the controller is replaced; then delays start again.
"""

from __future__ import annotations

import logging
import weakref
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from remora.deployments.autoscaling import explain
from remora.deployments.autoscaling.facts import Facts, ReplicaLoad, Targets, known
from remora.deployments.autoscaling.policy import Decision, PolicyState, begin, decide

if TYPE_CHECKING:
    from ray.serve.config import AutoscalingContext

MAX_HISTORY = 20
# Reports arrive about every second. A replica whose report is older than this and than look_back_s
# hangs or cannot reach the controller.
STALE_S = 10.0
# Averaged over the values that Serve keeps; of others the newest counts.
AVERAGED = frozenset({"num_running", "kv_usage"})

log = logging.getLogger("ray.serve")


class SloPolicy:
    """Serve's `policy_function`; its keyword arguments are those of Targets."""

    def __init__(self, **targets: Any) -> None:
        self._targets = Targets(**targets)
        self._state: PolicyState | None = None
        self._history: deque[dict[str, Any]] = deque(maxlen=MAX_HISTORY)
        self._written_at = 0.0
        self._name: tuple[str, str] | None = None

    def __call__(self, ctx: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        """Return the number of replicas. The state stays here, not in Serve."""
        facts, ages = facts_of(ctx, self._targets)
        state = self._state or begin(facts)
        changed_by_others = facts.target != state.target
        if changed_by_others:
            self._note(ctx, state.target, facts.target, "not this policy: Serve or a deployment")
        decision, self._state = decide(facts, self._targets, state)
        if decision.replicas != facts.target:
            is_more = decision.replicas > facts.target
            reason = decision.reason + (f" ({decision.winner})" if is_more else "")
            self._note(ctx, facts.target, decision.replicas, reason)
            log.info(
                "autoscaling: %s: %d replicas, were %d: %s",
                ctx.deployment_id,
                decision.replicas,
                facts.target,
                reason,
            )
        is_news = changed_by_others or decision.replicas != facts.target
        if is_news or facts.now - self._written_at >= explain.WRITE_PERIOD_S:
            self._write(ctx, facts, ages, decision)
        return decision.replicas, {}

    def _note(self, ctx: AutoscalingContext, before: int, after: int, reason: str) -> None:
        change = {"time": ctx.current_time, "from": before, "to": after, "reason": reason}
        self._history.append(change)

    def _write(
        self, ctx: AutoscalingContext, facts: Facts, ages: Mapping[str, float], decision: Decision
    ) -> None:
        """Publish the decision; scaling continues if that fails."""
        self._written_at = facts.now
        name = (ctx.app_name or "", ctx.deployment_name)
        record = self._record(ctx, facts, ages, decision)
        try:
            explain.publish(*name, record)
        except Exception:  # boundary: Serve's controller
            log.exception("autoscaling: cannot publish the decision of %s", name)
        if self._name is None:
            self._name = name
            weakref.finalize(self, explain.retract, *name).atexit = False

    def _record(
        self, ctx: AutoscalingContext, facts: Facts, ages: Mapping[str, float], decision: Decision
    ) -> dict[str, Any]:
        return {
            "app": ctx.app_name,
            "deployment": ctx.deployment_name,
            "time": ctx.current_time,
            "replicas": {
                "target": decision.replicas,
                "ready": facts.num_ready,
                "starting": max(decision.replicas - facts.num_ready, 0),
                "wanted": decision.wanted,
                "enough": decision.enough,
                "min": facts.min_replicas,
                "max": facts.max_replicas,
            },
            "reason": decision.reason,
            "winner": decision.winner,
            "pending": None if decision.pending is None else asdict(decision.pending),
            "signals": [asdict(demand) for demand in decision.demands],
            "requests": {"total": facts.total_requests, "held": facts.held_requests},
            "idle_s": decision.idle_s,
            "startup_s": decision.startup_s,
            "patience": decision.patience,
            "targets": asdict(self._targets),
            "reports": {
                name: {"age_s": ages[name], **asdict(load)} for name, load in facts.replicas.items()
            },
            "history": list(self._history),
        }


def facts_of(ctx: AutoscalingContext, targets: Targets) -> tuple[Facts, dict[str, float]]:
    """Return Serve's numbers as Facts, and the age of each replica's report in seconds."""
    now = ctx.current_time or 0.0
    oldest = now - max(STALE_S, targets.look_back_s)
    values: dict[str, dict[str, float]] = {}
    ages: dict[str, float] = {}
    for name, of_replicas in (ctx.raw_metrics or {}).items():
        for replica, series in of_replicas.items():
            if not series or series[-1].timestamp < oldest:
                continue
            of_replica = values.setdefault(replica.unique_id, {})
            if name in AVERAGED:
                of_replica[name] = sum(point.value for point in series) / len(series)
            else:
                of_replica[name] = series[-1].value
            age_s = max(now - series[-1].timestamp, 0.0)
            ages[replica.unique_id] = min(age_s, ages.get(replica.unique_id, age_s))
    facts = Facts(
        now=now,
        target=ctx.target_num_replicas,
        num_ready=ctx.current_num_replicas,
        min_replicas=ctx.capacity_adjusted_min_replicas,
        max_replicas=ctx.capacity_adjusted_max_replicas,
        total_requests=known(ctx.total_num_requests) or 0.0,
        held_requests=known(ctx.total_queued_requests) or 0.0,
        replicas={name: ReplicaLoad.of(load) for name, load in sorted(values.items())},
    )
    return facts, ages
