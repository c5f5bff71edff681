"""How many replicas each signal demands.

A signal compares a measured value with its target and returns a number of replicas, with a
fraction. Load that replicas share evenly (requests, KV) scales by proportion, and so does the part
of a latency that load causes. A backlog demands as many more replicas as clear it in the time that
a new one takes to start: work that is done by then needs none. Otherwise a queue that grows while
replicas start would demand ten times too many.

Does not know delays: these are in policy.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median_low

from remora.deployments.autoscaling.facts import Facts, ReplicaLoad, Targets, known_values

# Most replicas that a latency demands, as a multiple of the replicas that reported it.
TTFT_GROWTH, ITL_GROWTH = 1.5, 2.0
NO_WAIT = 0.1  # of the allowed wait
OUT_OF_REACH = 0.95  # of the allowed time between tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """The demand of one signal.

    value, target:  measured and wanted, in the signal's unit; None = unknown, none
    replicas:       the number that would reach the target
    note:           why the demand is zero or smaller than the values suggest
    """

    signal: str
    value: float | None
    target: float | None
    replicas: float
    note: str = ""


def demands(
    facts: Facts, targets: Targets, *, share: float, startup_s: float, is_settled: bool
) -> tuple[Demand, ...]:
    """Return the demand of each signal.

    share:       part of each target to use (1 when deciding on more replicas)
    startup_s:   start-up time of a new replica
    is_settled:  whether the latencies were measured with the current replicas
    """
    return (
        _requests(facts, targets, share),
        _kv(facts, targets, share),
        _backlog(facts, targets, share, startup_s),
        _ttft(facts, targets, share, is_settled),
        _itl(facts, targets, share),
    )


def _requests(facts: Facts, targets: Targets, share: float) -> Demand:
    note = ""
    if facts.loads:
        requests = facts.total(lambda load: load.num_running) + facts.held_requests
        if not _rates(facts):
            requests += facts.total(lambda load: load.num_waiting)
    else:
        requests, note = facts.total_requests, "no reports from replicas: all open requests"
    return Demand(
        signal="requests",
        value=requests,
        target=targets.requests * max(facts.num_ready, 1),
        replicas=requests / (targets.requests * share),
        note=note,
    )


def _kv(facts: Facts, targets: Targets, share: float) -> Demand:
    usage = facts.mean(lambda load: load.kv_usage)
    total = facts.total(lambda load: load.kv_usage)
    return Demand(
        signal="kv_usage",
        value=usage,
        target=targets.kv_usage,
        replicas=total / (targets.kv_usage * share),
    )


def _rates(facts: Facts) -> bool:
    """Return whether any replica reports its speed."""
    return any(load.tokens_per_s or load.finished_per_s for load in facts.loads)


def _backlog_s(facts: Facts, load: ReplicaLoad) -> float | None:
    """Return the seconds that a replica needs for its queue; None = unknown.

    The longer of two estimates, by tokens and by requests: prompts can be short and answers long.
    """
    tokens_per_s = load.tokens_per_s or facts.mean(lambda other: other.tokens_per_s)
    finished_per_s = load.finished_per_s or facts.mean(lambda other: other.finished_per_s)
    times = []
    if tokens_per_s and load.queued_tokens is not None:
        times.append(load.queued_tokens / tokens_per_s)
    if finished_per_s and load.num_waiting is not None:
        times.append(load.num_waiting / finished_per_s)
    return max(times, default=None)


def _wait_s(facts: Facts) -> float | None:
    """Return the seconds that the next request would wait; None = unknown.

    The median, as a request stays at its replica: while half of them are free, more do not help.
    """
    waits = known_values(_backlog_s(facts, load) for load in facts.loads)
    return median_low(waits) if waits else None


def _backlog(facts: Facts, targets: Targets, share: float, startup_s: float) -> Demand:
    wait_s = _wait_s(facts)
    if wait_s is None:
        return Demand(signal="backlog", value=None, target=targets.wait_s, replicas=0.0)
    if wait_s > targets.wait_s:
        horizon_s = max(startup_s, targets.look_back_s, targets.wait_s)
        replicas = facts.num_ready * (1 + wait_s / horizon_s)
    else:
        replicas = facts.num_ready * min(wait_s / (targets.wait_s * share), 1)
    return Demand(signal="backlog", value=wait_s, target=targets.wait_s, replicas=replicas)


def _is_contended(facts: Facts) -> bool:
    """Return whether requests share a replica; otherwise more replicas do not help."""
    open_sequences = facts.total(lambda load: (load.num_running or 0) + (load.num_waiting or 0))
    return open_sequences > facts.num_ready


def _ttft(facts: Facts, targets: Targets, share: float, is_settled: bool) -> Demand:
    target, seen = targets.ttft_s, facts.mean(lambda load: load.ttft_p90_s)
    demand, note = 0.0, ""
    if target is not None and seen is not None and seen > target * share:
        demand = float(facts.num_ready)
        if not _is_contended(facts):
            demand, note = 0.0, "no requests share a replica: more would not help"
        elif not is_settled:
            note = "measured before the latest replicas took requests"
        elif (wait_s := _wait_s(facts)) is not None and wait_s < target * NO_WAIT:
            note = "of earlier requests; the next one will not wait"
        elif seen > target:
            demand *= min(seen / target, TTFT_GROWTH)
    return Demand(signal="ttft_p90_s", value=seen, target=target, replicas=demand, note=note)


def _itl(facts: Facts, targets: Targets, share: float) -> Demand:
    target, seen = targets.itl_s, facts.mean(lambda load: load.itl_p90_s)
    demand, note = 0.0, ""
    if target is not None and seen is not None:
        base = min(facts.mean(lambda load: load.base_itl_s) or 0.0, seen)
        if base >= target * OUT_OF_REACH:
            note = f"a token takes {base:.3g} s without any load: no number of replicas helps"
        elif not _is_contended(facts):
            note = "no requests share a replica: more would not help"
        else:
            # Load causes only the excess over the base; at least half of the room is allowed.
            room = max(target * share, (target + base) / 2) - base
            # A sum, not a scaled mean: a replica without tokens yet has room.
            demand = facts.total(
                lambda load: min(max((load.itl_p90_s or 0.0) - base, 0.0) / room, ITL_GROWTH)
            )
    return Demand(signal="itl_p90_s", value=seen, target=target, replicas=demand, note=note)
