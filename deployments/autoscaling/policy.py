"""The scaling rules: when to follow the signals' demands, and how far.

A pure function of facts and the policy's state. All delays are kept here; Serve's own are zero.

- Up: to the least number demanded throughout `upscale_delay_s`, at most GROWTH times the ready
  replicas at once, so that the effect shows before the next step. Starting replicas count.
- Down: to the largest number that was enough throughout `downscale_delay_s`, with a margin of three
  tenths, at most by half.
- To zero: after `to_zero_delay_s` without a request. Back to one: at once, with the first request.
- If more are wanted soon after scaling down, the next scaling down takes twice as long, up to
  MAX_PATIENCE times.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil

from remora.deployments.autoscaling.facts import Facts, Targets, known_values
from remora.deployments.autoscaling.signals import Demand, demands

SHARE_DOWN = 0.7  # part of each target that the load must fit into before scaling down
GROWTH, MIN_GROWTH = 2, 2
MAX_PATIENCE = 16
FIRST_STARTUP_S = 30.0  # until one was measured
STARTUP_WEIGHT = 0.5  # of the latest start in the moving average
TOLERANCE = 1e-6  # of times and of fractions of a replica


@dataclass(frozen=True, slots=True)
class Trend:
    """A period in which another number of replicas was wanted or enough throughout.

    replicas:  the smallest number wanted (up), or the largest that was enough (down)
    """

    since: float
    replicas: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyState:
    """The state between decisions.

    more, fewer:      current trends, at most one of them
    num_ready:        replicas at the last decision, unchanged since `ready_since`
    raised_at:        when the replicas that are starting now were requested
    lowered_at:       time of the last scaling down
    patience:         factor of the downscale delay
    last_request_at:  latest moment with a request
    """

    target: int
    num_ready: int
    ready_since: float
    last_request_at: float
    startup_s: float = FIRST_STARTUP_S
    raised_at: float | None = None
    lowered_at: float | None = None
    patience: int = 1
    more: Trend | None = None
    fewer: Trend | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Pending:
    """A change within its delay."""

    replicas: int
    since_s: float
    delay_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The number of replicas, and why.

    winner:   signal with the largest demand
    wanted:   the demand now, within bounds
    enough:   the demand with a margin
    reason:   of the number, in words
    """

    replicas: int
    wanted: int
    enough: int
    winner: str
    reason: str
    demands: tuple[Demand, ...]
    pending: Pending | None
    idle_s: float
    startup_s: float
    patience: int


def begin(facts: Facts) -> PolicyState:
    """Return the state at the first decision about a deployment."""
    return PolicyState(
        target=facts.target,
        num_ready=facts.num_ready,
        ready_since=facts.now,
        last_request_at=facts.now,
    )


def decide(facts: Facts, targets: Targets, state: PolicyState) -> tuple[Decision, PolicyState]:
    """Return the decision for this moment and the next state."""
    state = _observe(facts, state)
    idle_s = facts.now - state.last_request_at
    is_settled = facts.num_starting == 0 and facts.now - state.ready_since >= targets.look_back_s
    up = demands(facts, targets, share=1.0, startup_s=state.startup_s, is_settled=is_settled)
    down = demands(
        facts, targets, share=SHARE_DOWN, startup_s=state.startup_s, is_settled=is_settled
    )
    is_idle = idle_s >= targets.to_zero_delay_s - TOLERANCE and not facts.has_requests
    low = 0 if is_idle or (facts.target == 0 and not facts.has_requests) else 1
    low = max(low, facts.min_replicas)
    cap = max(facts.num_ready * GROWTH, facts.num_ready + MIN_GROWTH, facts.target)
    wanted = max(low, min(_most(facts, up), cap))
    enough = max(wanted, _most(facts, down))
    replicas, reason, state = _follow(facts, targets, state, wanted, enough)
    winner = max(up, key=lambda demand: demand.replicas)
    decision = Decision(
        replicas=replicas,
        wanted=wanted,
        enough=enough,
        winner=winner.signal if winner.replicas > 0 else "none",
        reason=reason,
        demands=up,
        pending=_pending(facts, targets, state),
        idle_s=idle_s,
        startup_s=state.startup_s,
        patience=state.patience,
    )
    return decision, state


def _most(facts: Facts, asked: tuple[Demand, ...]) -> int:
    most = max(demand.replicas for demand in asked)
    return ceil(min(most, facts.max_replicas) - TOLERANCE)


def _observe(facts: Facts, state: PolicyState) -> PolicyState:
    """Update the state with what happened since the last decision."""
    now = facts.now
    if (
        facts.target != state.target
    ):  # changed by Serve, which starts the first one, or a deployment
        raised = now if facts.target > state.target else None
        state = replace(state, target=facts.target, raised_at=raised, more=None, fewer=None)
    if facts.num_ready != state.num_ready:
        state = replace(state, num_ready=facts.num_ready, ready_since=now)
    if state.raised_at is not None and facts.num_starting == 0:
        took_s = now - state.raised_at
        startup_s = state.startup_s + STARTUP_WEIGHT * (took_s - state.startup_s)
        state = replace(state, raised_at=None, startup_s=startup_s)
    idle_s = known_values(load.idle_s for load in facts.loads)
    last = now if facts.has_requests else now - min(idle_s, default=float("inf"))
    return replace(state, last_request_at=max(state.last_request_at, last))


def _follow(
    facts: Facts, targets: Targets, state: PolicyState, wanted: int, enough: int
) -> tuple[int, str, PolicyState]:
    """Return the number of replicas, its reason, and the state with the current trend."""
    now, target = facts.now, facts.target
    if target == 0 and wanted > 0:
        return _raise(facts, state, targets, wanted, "a request has come")
    if facts.num_ready == 0 and enough > 0:
        return target, "none is ready yet", replace(state, more=None, fewer=None)
    if wanted > target:
        trend = state.more or Trend(now, wanted)
        trend = Trend(trend.since, min(trend.replicas, wanted))
        if now - trend.since >= targets.upscale_delay_s - TOLERANCE:
            return _raise(facts, state, targets, trend.replicas, "more were wanted long enough")
        return target, f"{wanted} are wanted", replace(state, more=trend, fewer=None)
    if enough < target:
        trend = state.fewer or Trend(now, enough)
        trend = Trend(trend.since, max(trend.replicas, enough))
        if enough == 0:  # idle for long enough
            reason = f"no request for {targets.to_zero_delay_s:g} s"
            return _lower(state, now, 0, reason)
        if now - trend.since >= targets.downscale_delay_s * state.patience - TOLERANCE:
            fewer = max(trend.replicas, ceil(target / 2))
            return _lower(state, now, fewer, "fewer were enough long enough")
        return target, f"{enough} would be enough", replace(state, more=None, fewer=trend)
    reason = "as many as wanted" if wanted == target else "fewer would leave no margin"
    return target, reason, replace(state, more=None, fewer=None)


def _raise(
    facts: Facts, state: PolicyState, targets: Targets, replicas: int, reason: str
) -> tuple[int, str, PolicyState]:
    delay_s = targets.downscale_delay_s
    patience = state.patience
    if state.lowered_at is not None and facts.target > 0:
        passed_s = facts.now - state.lowered_at
        is_soon = passed_s < 2 * patience * delay_s
        patience = min(patience * 2, MAX_PATIENCE) if is_soon else 1
    return (
        replicas,
        reason,
        replace(
            state,
            target=replicas,
            raised_at=facts.now if state.raised_at is None else state.raised_at,
            patience=patience,
            lowered_at=None,
            more=None,
            fewer=None,
        ),
    )


def _lower(
    state: PolicyState, now: float, replicas: int, reason: str
) -> tuple[int, str, PolicyState]:
    lowered = replace(state, target=replicas, raised_at=None, lowered_at=now, more=None, fewer=None)
    return replicas, reason, lowered


def _pending(facts: Facts, targets: Targets, state: PolicyState) -> Pending | None:
    """Return the change within its delay, if there is one."""
    trend, delay_s = state.more, targets.upscale_delay_s
    if trend is None:
        trend, delay_s = state.fewer, targets.downscale_delay_s * state.patience
    if trend is None:
        return None
    return Pending(replicas=trend.replicas, since_s=facts.now - trend.since, delay_s=delay_s)
