"""From signals to a number of replicas: when to follow them, and how far.

A pure function of numbers and of what it remembers. All delays are kept here, and nowhere else:
Serve's own are set to none. The rules:

- More: as many as the signals have asked for all through `upscale_delay_s` (the least of it), at
  most GROWTH times what is ready at once, so that what has come is seen before more is asked for.
  Replicas that are starting count as there.
- Fewer: as few as would have done all through `downscale_delay_s` (the most of it), with a margin
  of three tenths, and half of them at most.
- None: after `to_zero_delay_s` without any request. One again: at once, with the first request.
- Whoever takes away too soon learns: when more is wanted soon after fewer were enough, the next
  time takes twice as long, up to MAX_PATIENCE times.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil

from remora.deployments.autoscaling.facts import Facts, Targets, given
from remora.deployments.autoscaling.signals import Wish, wishes

SHARE_DOWN = 0.7  # of each target, that the load must fit into before replicas are taken away
GROWTH, MIN_GROWTH = 2, 2
MAX_PATIENCE = 16
FIRST_STARTUP_S = 30.0  # until one has been seen
STARTUP_WEIGHT = 0.5  # of the latest start among those seen
TOLERANCE = 1e-6  # of times and of fractions of a replica


@dataclass(frozen=True, slots=True)
class Phase:
    """A time through which another number of replicas has been enough, or wanted.

    replicas:  the least that was asked for (more wanted), or the most (fewer enough)
    """

    since: float
    replicas: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """What is carried from one decision to the next.

    more, fewer:      running phases, at most one of them
    num_ready:        replicas at the last decision, and since when as many
    raised_at:        when the replicas that are starting now were asked for
    lowered_at:       when replicas were last taken away
    patience:         how many times the downscale delay must pass
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
    more: Phase | None = None
    fewer: Phase | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Pending:
    """A change that waits for its delay."""

    replicas: int
    since_s: float
    delay_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """How many replicas there should be, and why.

    winner:   signal that asks for most
    wanted:   what the signals ask for now, within bounds
    enough:   what would do with a margin
    reason:   of the number, in words
    """

    replicas: int
    wanted: int
    enough: int
    winner: str
    reason: str
    wishes: tuple[Wish, ...]
    pending: Pending | None
    idle_s: float
    startup_s: float
    patience: int


def begin(facts: Facts) -> Memory:
    """Return the memory of one who sees the deployment for the first time."""
    return Memory(
        target=facts.target,
        num_ready=facts.num_ready,
        ready_since=facts.now,
        last_request_at=facts.now,
    )


def decide(facts: Facts, targets: Targets, memory: Memory) -> tuple[Decision, Memory]:
    """Return the decision for this moment, and what to remember for the next."""
    memory = _observe(facts, memory)
    idle_s = facts.now - memory.last_request_at
    is_settled = facts.num_starting == 0 and facts.now - memory.ready_since >= targets.look_back_s
    up = wishes(facts, targets, share=1.0, startup_s=memory.startup_s, is_settled=is_settled)
    down = wishes(
        facts, targets, share=SHARE_DOWN, startup_s=memory.startup_s, is_settled=is_settled
    )
    is_idle = idle_s >= targets.to_zero_delay_s - TOLERANCE and not facts.has_requests
    low = 0 if is_idle or (facts.target == 0 and not facts.has_requests) else 1
    low = max(low, facts.min_replicas)
    cap = max(facts.num_ready * GROWTH, facts.num_ready + MIN_GROWTH, facts.target)
    wanted = _within(facts, low, min(_most(facts, up), cap))
    enough = _within(facts, low, max(_most(facts, down), wanted))
    replicas, reason, memory = _follow(facts, targets, memory, wanted, enough)
    winner = max(up, key=lambda wish: wish.replicas)
    decision = Decision(
        replicas=replicas,
        wanted=wanted,
        enough=enough,
        winner=winner.signal if winner.replicas > 0 else "none",
        reason=reason,
        wishes=up,
        pending=_pending(facts, targets, memory),
        idle_s=idle_s,
        startup_s=memory.startup_s,
        patience=memory.patience,
    )
    return decision, memory


def _most(facts: Facts, asked: tuple[Wish, ...]) -> int:
    most = max(wish.replicas for wish in asked)
    return ceil(min(most, facts.max_replicas) - TOLERANCE)


def _within(facts: Facts, low: int, replicas: int) -> int:
    return max(low, min(replicas, facts.max_replicas))


def _observe(facts: Facts, memory: Memory) -> Memory:
    """Take in what has happened since the last decision."""
    now = facts.now
    if facts.target != memory.target:  # by Serve, which starts the first one, or by a deployment
        raised = now if facts.target > memory.target else None
        memory = replace(memory, target=facts.target, raised_at=raised, more=None, fewer=None)
    if facts.num_ready != memory.num_ready:
        memory = replace(memory, num_ready=facts.num_ready, ready_since=now)
    if memory.raised_at is not None and facts.num_starting == 0:
        took_s = now - memory.raised_at
        startup_s = memory.startup_s + STARTUP_WEIGHT * (took_s - memory.startup_s)
        memory = replace(memory, raised_at=None, startup_s=startup_s)
    idle_s = given(load.idle_s for load in facts.loads)
    last = now if facts.has_requests else now - min(idle_s, default=float("inf"))
    return replace(memory, last_request_at=max(memory.last_request_at, last))


def _follow(
    facts: Facts, targets: Targets, memory: Memory, wanted: int, enough: int
) -> tuple[int, str, Memory]:
    """Return the number of replicas, the reason for it, and the memory with the phase begun."""
    now, target = facts.now, facts.target
    if target == 0 and wanted > 0:
        return _raise(facts, memory, targets, wanted, "a request has come")
    if facts.num_ready == 0 and enough > 0:
        return target, "none is ready yet", replace(memory, more=None, fewer=None)
    if wanted > target:
        phase = memory.more or Phase(now, wanted)
        phase = Phase(phase.since, min(phase.replicas, wanted))
        if now - phase.since >= targets.upscale_delay_s - TOLERANCE:
            return _raise(facts, memory, targets, phase.replicas, "more were wanted long enough")
        return target, f"{wanted} are wanted", replace(memory, more=phase, fewer=None)
    if enough < target:
        phase = memory.fewer or Phase(now, enough)
        phase = Phase(phase.since, max(phase.replicas, enough))
        if enough == 0:  # it has been idle for long enough
            reason = f"no request for {targets.to_zero_delay_s:g} s"
            return _lower(memory, now, 0, reason)
        if now - phase.since >= targets.downscale_delay_s * memory.patience - TOLERANCE:
            fewer = max(phase.replicas, ceil(target / 2))
            return _lower(memory, now, fewer, "fewer were enough long enough")
        return target, f"{enough} would be enough", replace(memory, more=None, fewer=phase)
    reason = "as many as wanted" if wanted == target else "fewer would leave no margin"
    return target, reason, replace(memory, more=None, fewer=None)


def _raise(
    facts: Facts, memory: Memory, targets: Targets, replicas: int, reason: str
) -> tuple[int, str, Memory]:
    delay_s = targets.downscale_delay_s
    patience = memory.patience
    if memory.lowered_at is not None and facts.target > 0:
        passed_s = facts.now - memory.lowered_at
        is_soon = passed_s < 2 * patience * delay_s
        patience = min(patience * 2, MAX_PATIENCE) if is_soon else 1
    return (
        replicas,
        reason,
        replace(
            memory,
            target=replicas,
            raised_at=facts.now if memory.raised_at is None else memory.raised_at,
            patience=patience,
            lowered_at=None,
            more=None,
            fewer=None,
        ),
    )


def _lower(memory: Memory, now: float, replicas: int, reason: str) -> tuple[int, str, Memory]:
    lowered = replace(
        memory, target=replicas, raised_at=None, lowered_at=now, more=None, fewer=None
    )
    return replicas, reason, lowered


def _pending(facts: Facts, targets: Targets, memory: Memory) -> Pending | None:
    """Return the change that waits for its delay, if one does."""
    phase, delay_s = memory.more, targets.upscale_delay_s
    if phase is None:
        phase, delay_s = memory.fewer, targets.downscale_delay_s * memory.patience
    if phase is None:
        return None
    return Pending(replicas=phase.replicas, since_s=facts.now - phase.since, delay_s=delay_s)
