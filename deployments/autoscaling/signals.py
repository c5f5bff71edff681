"""How many replicas each signal asks for.

A signal compares what is with what is meant to be and returns a number of replicas, with a
fraction. What replicas share evenly (requests, KV) scales by proportion; the part of a latency
that load is to blame for does too; a backlog asks for as many more replicas as clear it in the
time that a new one takes to start, since what is gone by then needed none. That keeps a queue that
has grown while replicas start from being answered with ten times as many.

Knows nothing of delays: these are in policy.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median_low

from remora.deployments.autoscaling.facts import Facts, ReplicaLoad, Targets, given

# Most that one signal asks for, as a multiple of the replicas whose latencies it saw.
TTFT_GROWTH, ITL_GROWTH = 1.5, 2.0
NO_WAIT = 0.1  # of the wait that is allowed
OUT_OF_REACH = 0.95  # of the time between tokens that is allowed


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What one signal asks for.

    value, target:  what is and what is meant to be, in the signal's unit; None = not known, none
    replicas:       as many as would bring them together
    note:           why the signal says nothing, or less than one would think
    """

    signal: str
    value: float | None
    target: float | None
    replicas: float
    note: str = ""


def wishes(
    facts: Facts, targets: Targets, *, share: float, startup_s: float, is_settled: bool
) -> tuple[Wish, ...]:
    """Return what each signal asks for.

    share:       part of each target that is to be used (1 when asking for more replicas)
    startup_s:   what a new replica takes to start
    is_settled:  whether the latencies seen are those of the replicas that there are now
    """
    return (
        _requests(facts, targets, share),
        _kv(facts, targets, share),
        _backlog(facts, targets, share, startup_s),
        _ttft(facts, targets, share, is_settled),
        _itl(facts, targets, share),
    )


def _requests(facts: Facts, targets: Targets, share: float) -> Wish:
    note = ""
    if facts.loads:
        requests = facts.total(lambda load: load.num_running) + facts.held_requests
        if not _rates(facts):
            requests += facts.total(lambda load: load.num_waiting)
    else:
        requests, note = facts.total_requests, "no reports from replicas: all open requests"
    return Wish(
        signal="requests",
        value=requests,
        target=targets.requests * max(facts.num_ready, 1),
        replicas=requests / (targets.requests * share),
        note=note,
    )


def _kv(facts: Facts, targets: Targets, share: float) -> Wish:
    usage = facts.mean(lambda load: load.kv_usage)
    total = facts.total(lambda load: load.kv_usage)
    return Wish(
        signal="kv_usage",
        value=usage,
        target=targets.kv_usage,
        replicas=total / (targets.kv_usage * share),
    )


def _rates(facts: Facts) -> bool:
    """Return whether any replica knows how fast it is."""
    return any(load.tokens_per_s or load.finished_per_s for load in facts.loads)


def _backlog_s(facts: Facts, load: ReplicaLoad) -> float | None:
    """Return the seconds that a replica takes for what waits at it; None = not known.

    By tokens, and by requests: prompts can be short and answers long.
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
    """Return the seconds that the next request would wait; None = not known.

    What waits at a replica stays there: where half of them are free, more would help nobody.
    """
    waits = given(_backlog_s(facts, load) for load in facts.loads)
    return median_low(waits) if waits else None


def _backlog(facts: Facts, targets: Targets, share: float, startup_s: float) -> Wish:
    wait_s = _wait_s(facts)
    if wait_s is None:
        return Wish(signal="backlog", value=None, target=targets.wait_s, replicas=0.0)
    if wait_s > targets.wait_s:
        horizon_s = max(startup_s, targets.look_back_s, targets.wait_s)
        replicas = facts.num_ready * (1 + wait_s / horizon_s)
    else:
        replicas = facts.num_ready * min(wait_s / (targets.wait_s * share), 1)
    return Wish(signal="backlog", value=wait_s, target=targets.wait_s, replicas=replicas)


def _is_contended(facts: Facts) -> bool:
    """Return whether requests share a replica: one that is alone gains nothing from more."""
    open_sequences = facts.total(lambda load: (load.num_running or 0) + (load.num_waiting or 0))
    return open_sequences > facts.num_ready


def _ttft(facts: Facts, targets: Targets, share: float, is_settled: bool) -> Wish:
    target, seen = targets.ttft_s, facts.mean(lambda load: load.ttft_p90_s)
    wish, note = 0.0, ""
    if target is not None and seen is not None and seen > target * share:
        wish = float(facts.num_ready)
        if not _is_contended(facts):
            wish, note = 0.0, "nobody shares a replica: more would not help"
        elif not is_settled:
            note = "seen before the latest replicas had their part"
        elif (wait_s := _wait_s(facts)) is not None and wait_s < target * NO_WAIT:
            note = "of requests that have waited; the next one will not"
        elif seen > target:
            wish *= min(seen / target, TTFT_GROWTH)
    return Wish(signal="ttft_p90_s", value=seen, target=target, replicas=wish, note=note)


def _itl(facts: Facts, targets: Targets, share: float) -> Wish:
    target, seen = targets.itl_s, facts.mean(lambda load: load.itl_p90_s)
    wish, note = 0.0, ""
    if target is not None and seen is not None:
        base = min(facts.mean(lambda load: load.base_itl_s) or 0.0, seen)
        if base >= target * OUT_OF_REACH:
            note = f"a token takes {base:.3g} s without any load: no number of replicas helps"
        elif not _is_contended(facts):
            note = "nobody shares a replica: more would not help"
        else:
            # Only what exceeds the base is shared; half of the room is always allowed for.
            room = max(target * share, (target + base) / 2) - base
            # A sum, and not the mean times their number: who has made no token yet has room.
            wish = facts.total(
                lambda load: min(max((load.itl_p90_s or 0.0) - base, 0.0) / room, ITL_GROWTH)
            )
    return Wish(signal="itl_p90_s", value=seen, target=target, replicas=wish, note=note)
