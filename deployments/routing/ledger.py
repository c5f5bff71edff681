"""What one router knows of the replicas: their reports, and what it has sent there since.

Reports are some tenths of a second old when they come; a burst that is routed by them alone goes to
one replica. So a request counts where it was sent until a report covers it, and the pages of its
prompt and its adapter count as being there until a report shows them. Everything here is bounded:
open requests, sessions, pages and adapters per replica, and how long either is only expected.

Knows no Ray and no policy.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, TypeVar

from remora.deployments.routing.key import RouteKey, pages_of
from remora.deployments.routing.policies import UNKNOWN_TOKENS, ReplicaView
from remora.deployments.routing.report import MAX_ADAPTERS, Report

# Requests followed per router; more are open only where completions are never told.
MAX_OPEN_REQUESTS = 65_536
# Sessions whose last prompt is remembered; the latest stay.
MAX_SESSIONS = 65_536
# A prompt that is still not computed after so long is hardly worth waiting for, nor an adapter that
# is still not loaded.
EXPECTED_S = 30.0
# Where ends are not told and no report comes, a request counts no longer than this.
UNHEARD_S = 3.0
# By how much two machines' clocks may drift apart, in seconds per second.
DRIFT = 1e-4

_Thing = TypeVar("_Thing", int, str)  # a page, or an adapter


@dataclass(frozen=True, slots=True)
class _Sent:
    """A request of ours: tokens that it adds to a replica's queue, and when it was sent."""

    num_tokens: int
    at_s: float


@dataclass(eq=False, slots=True)
class _Replica:
    """One replica. Times are by our clock.

    stats:      the routing stats that `report` was read from
    covered_s:  when the report was made: it tells of what was sent before
    heard_s:    when it came
    lag_s:      smallest difference seen between its clock and ours; see Ledger.take_report
    num_open:   requests of ours that are open there
    uncounted:  those of them that the report does not know yet, by request id
    num_ended:  those that it counts although they have ended since
    pages:      of the report
    expected:   page -> when a prompt with it was last sent there
    adapters:   of the report
    expected_adapters:  adapter -> when a request for it was last sent there
    """

    stats: Mapping[str, Any] | None = None
    report: Report = field(default_factory=lambda: Report(made_at_s=0.0))
    covered_s: float = -math.inf
    heard_s: float = 0.0
    lag_s: float = math.inf
    num_open: int = 0
    uncounted: dict[str, _Sent] = field(default_factory=dict)
    num_ended: int = 0
    pages: frozenset[int] = frozenset()
    expected: dict[int, float] = field(default_factory=dict)
    adapters: frozenset[str] = frozenset()
    expected_adapters: dict[str, float] = field(default_factory=dict)

    def view(self, replica_id: str) -> ReplicaView:
        """Return what a policy may know."""
        report = self.report
        num_reported = report.num_running + report.num_waiting - self.num_ended
        return ReplicaView(
            id=replica_id,
            num_requests=max(self.num_open, num_reported + len(self.uncounted)),
            num_queued_tokens=report.num_queued_tokens
            + sum(sent.num_tokens for sent in self.uncounted.values()),
            kv_usage=report.kv_usage,
            pages=self.pages,
            expected_pages=self.expected.keys(),
            adapters=self.adapters,
            expected_adapters=self.expected_adapters.keys(),
        )


class Ledger:
    """Reports and open requests of one router.

    max_pages:   most pages that are expected of one replica at a time
    hears_ends:  whether `ended` is told of each request; if not, one counts until a report covers
                 it, and reports say the rest
    """

    def __init__(
        self,
        *,
        max_pages: int,
        hears_ends: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_pages = max_pages
        self._hears_ends = hears_ends
        self._clock = clock
        self._replicas: dict[str, _Replica] = {}
        self._places: dict[str, str] = {}  # open request -> replica
        self._sessions: dict[str, tuple[str, int]] = {}  # -> replica and tokens of the last prompt

    def views(self, replica_ids: Iterable[str]) -> list[ReplicaView]:
        """Return what a policy may know of these replicas."""
        self._forget_unheard()
        return [self._replicas.get(id_, _NOTHING).view(id_) for id_ in replica_ids]

    def keep(self, replica_ids: Iterable[str]) -> None:
        """Forget all replicas but these, and begin to follow new ones."""
        known = self._replicas
        self._replicas = {id_: known.get(id_) or _Replica() for id_ in replica_ids}

    def take_report(self, replica_id: str, stats: Mapping[str, Any] | None) -> None:
        """Take in a replica's routing stats; nothing happens if they are the last ones.

        A report carries the replica's clock. The smallest difference between that and its arrival
        here is the difference of the clocks, plus the shortest way that a report has taken; neither
        clock needs to be right, or to agree with the other.
        """
        replica = self._replicas.get(replica_id)
        report = Report.of_stats(stats or {})
        if replica is None or report is None or stats == replica.stats:
            return
        now = self._clock()
        allowed_s = replica.lag_s + DRIFT * (now - replica.heard_s)
        replica.lag_s = min(now - report.made_at_s, allowed_s)
        replica.stats, replica.report, replica.heard_s = stats, report, now
        replica.covered_s = report.made_at_s + replica.lag_s
        replica.num_ended = 0
        covered = [id_ for id_, sent in replica.uncounted.items() if sent.at_s <= replica.covered_s]
        for id_ in covered:
            if self._hears_ends:
                del replica.uncounted[id_]
            else:
                self.ended(id_)
        replica.pages = frozenset(pages_of(report.page_hashes))
        replica.adapters = frozenset(report.adapters)
        replica.expected = _still_expected(replica.expected, replica.pages, now)
        replica.expected_adapters = _still_expected(
            replica.expected_adapters, replica.adapters, now
        )

    def sent(self, request_id: str, replica_id: str, key: RouteKey) -> None:
        """Count a request at a replica: it was chosen just now, or has gone there instead."""
        replica = self._replicas.get(replica_id)
        if replica is None or self._places.get(request_id) == replica_id:
            return
        self.ended(request_id)
        if len(self._places) >= MAX_OPEN_REQUESTS:
            self.ended(next(iter(self._places)))
        pages = pages_of(key.page_hashes)
        num_tokens = self._num_uncached(replica_id, key, pages)
        self._places[request_id] = replica_id
        replica.num_open += 1
        now = self._clock()
        replica.uncounted[request_id] = _Sent(num_tokens, now)
        _expect(replica.expected, pages[: self._max_pages], now, self._max_pages)
        if key.adapter is not None:
            _expect(replica.expected_adapters, (key.adapter,), now, MAX_ADAPTERS)

    def has(self, request_id: str) -> bool:
        """Return whether a request is counted."""
        return request_id in self._places

    def ended(self, request_id: str, replica_id: str | None = None) -> None:
        """Count a request no more; if a replica is named, only if it is counted there."""
        place = self._places.get(request_id)
        if place is None or replica_id not in (None, place):
            return
        del self._places[request_id]
        replica = self._replicas.get(place)
        if replica is None:
            return
        replica.num_open -= 1
        if replica.uncounted.pop(request_id, None) is None:
            replica.num_ended += 1

    def _forget_unheard(self) -> None:
        """Count no more what is old, where nobody would say that it has ended.

        A request that never reaches the engine, a refused one say, changes no report.
        """
        if self._hears_ends:
            return
        oldest_s = self._clock() - UNHEARD_S
        while self._places:
            request_id, place = next(iter(self._places.items()))  # the one sent first
            replica = self._replicas.get(place, _NOTHING)
            sent = replica.uncounted.get(request_id)
            if sent is not None and sent.at_s > oldest_s:
                break
            self.ended(request_id)

    def _num_uncached(self, replica_id: str, key: RouteKey, pages: tuple[int, ...]) -> int:
        """Return how many tokens of a prompt the replica will probably compute.

        Where pages are not known, a session's prompt begins with its last one.
        """
        num_tokens = key.num_tokens or UNKNOWN_TOKENS
        if pages:
            num_cached = self._replicas[replica_id].view(replica_id).num_cached(pages)
            return num_tokens * (len(pages) - num_cached) // len(pages)
        if key.session is None:
            return num_tokens
        place, num_before = self._sessions.pop(key.session, (replica_id, 0))
        self._sessions[key.session] = replica_id, num_tokens
        if len(self._sessions) > MAX_SESSIONS:
            del self._sessions[next(iter(self._sessions))]
        return max(0, num_tokens - num_before) if place == replica_id else num_tokens


def _expect(
    expected: dict[_Thing, float], things: Iterable[_Thing], now_s: float, max_things: int
) -> None:
    """Note what has been asked of a replica now; the latest stand last, and stay."""
    for thing in things:
        expected.pop(thing, None)
        expected[thing] = now_s
    num_over = max(0, len(expected) - max_things)
    for thing in list(islice(expected, num_over)):
        del expected[thing]


def _still_expected(
    expected: dict[_Thing, float], there: frozenset[_Thing], now_s: float
) -> dict[_Thing, float]:
    """Return what is neither there yet nor given up."""
    return {
        thing: at_s
        for thing, at_s in expected.items()
        if thing not in there and now_s - at_s < EXPECTED_S
    }


_NOTHING = _Replica()
