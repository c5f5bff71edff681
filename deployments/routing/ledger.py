"""What one router knows of the replicas: their reports, and the requests that it has sent since.

A report is some tenths of a second old when it arrives, so a burst routed by reports alone would go
to one replica. A request therefore counts where it was sent until a report covers it, and the pages
of its prompt and its adapter are expected there until a report shows them. Everything is bounded:
open requests, sessions, pages and adapters per replica, and how long a page or adapter is expected.

Does not know Ray or the policy.
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

# Open requests per router; more are counted only where completions are not seen.
MAX_OPEN_REQUESTS = 65_536
# Sessions whose last prompt is remembered; the oldest is dropped first.
MAX_SESSIONS = 65_536
# A page or an adapter that no report has shown by then is no longer expected.
EXPECTED_S = 30.0
# Where completions are not seen and no report arrives, a request counts this long.
UNCONFIRMED_S = 3.0
# Drift between two machines' clocks, in seconds per second.
DRIFT = 1e-4

_Item = TypeVar("_Item", int, str)  # a page, or an adapter


@dataclass(frozen=True, slots=True)
class _Sent:
    """A request: the tokens that it adds to a replica's queue, and when it was sent."""

    num_tokens: int
    at_s: float


@dataclass(eq=False, slots=True)
class _Replica:
    """One replica. Times are by this process's clock.

    stats:      routing stats that `report` was read from
    covered_s:  when the report was made; it includes requests sent before
    received_s: when it arrived
    lag_s:      smallest difference seen between its clock and this one; see Ledger.take_report
    num_open:   requests sent there and not ended
    uncounted:  of them, not in the report yet, by request id
    num_ended:  requests that the report includes and that have ended since
    pages:      of the report
    expected:   page -> when a prompt with it was last sent there
    adapters:   of the report
    expected_adapters:  adapter -> when a request for it was last sent there
    """

    stats: Mapping[str, Any] | None = None
    report: Report = field(default_factory=lambda: Report(made_at_s=0.0))
    covered_s: float = -math.inf
    received_s: float = 0.0
    lag_s: float = math.inf
    num_open: int = 0
    uncounted: dict[str, _Sent] = field(default_factory=dict)
    num_ended: int = 0
    pages: frozenset[int] = frozenset()
    expected: dict[int, float] = field(default_factory=dict)
    adapters: frozenset[str] = frozenset()
    expected_adapters: dict[str, float] = field(default_factory=dict)

    def view(self, replica_id: str) -> ReplicaView:
        """Return the policy's view of this replica."""
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

    max_pages:         most pages expected of one replica at a time
    sees_completions:  whether `ended` is called for each request; if not, a request counts until a
                       report covers it
    """

    def __init__(
        self,
        *,
        max_pages: int,
        sees_completions: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_pages = max_pages
        self._sees_completions = sees_completions
        self._clock = clock
        self._replicas: dict[str, _Replica] = {}
        self._replica_of: dict[str, str] = {}  # open request -> replica
        self._sessions: dict[str, tuple[str, int]] = {}  # -> replica and tokens of the last prompt

    def views(self, replica_ids: Iterable[str]) -> list[ReplicaView]:
        """Return the policy's view of each of these replicas."""
        self._forget_unconfirmed()
        return [self._replicas.get(id_, _UNKNOWN).view(id_) for id_ in replica_ids]

    def keep(self, replica_ids: Iterable[str]) -> None:
        """Forget all replicas but these, and add new ones."""
        known = self._replicas
        self._replicas = {id_: known.get(id_) or _Replica() for id_ in replica_ids}

    def take_report(self, replica_id: str, stats: Mapping[str, Any] | None) -> None:
        """Take a replica's routing stats; the same stats again change nothing.

        A report carries the replica's clock. The smallest difference between that and its arrival
        is the clocks' difference plus the fastest delivery of a report; neither clock needs to be
        right, or to agree with the other.
        """
        replica = self._replicas.get(replica_id)
        report = Report.of_stats(stats or {})
        if replica is None or report is None or stats == replica.stats:
            return
        now = self._clock()
        allowed_s = replica.lag_s + DRIFT * (now - replica.received_s)
        replica.lag_s = min(now - report.made_at_s, allowed_s)
        replica.stats, replica.report, replica.received_s = stats, report, now
        replica.covered_s = report.made_at_s + replica.lag_s
        replica.num_ended = 0
        covered = [id_ for id_, sent in replica.uncounted.items() if sent.at_s <= replica.covered_s]
        for id_ in covered:
            if self._sees_completions:
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
        """Count a request at a replica, and no longer at the one where it was counted before."""
        replica = self._replicas.get(replica_id)
        if replica is None or self._replica_of.get(request_id) == replica_id:
            return
        self.ended(request_id)
        if len(self._replica_of) >= MAX_OPEN_REQUESTS:
            self.ended(next(iter(self._replica_of)))
        pages = pages_of(key.page_hashes)
        num_tokens = self._num_uncached(replica_id, key, pages)
        self._replica_of[request_id] = replica_id
        replica.num_open += 1
        now = self._clock()
        replica.uncounted[request_id] = _Sent(num_tokens, now)
        _expect(replica.expected, pages[: self._max_pages], now, self._max_pages)
        if key.adapter is not None:
            _expect(replica.expected_adapters, (key.adapter,), now, MAX_ADAPTERS)

    def has(self, request_id: str) -> bool:
        """Return whether a request is counted."""
        return request_id in self._replica_of

    def ended(self, request_id: str, replica_id: str | None = None) -> None:
        """Stop counting a request; if a replica is named, only if it is counted there."""
        counted_at = self._replica_of.get(request_id)
        if counted_at is None or replica_id not in (None, counted_at):
            return
        del self._replica_of[request_id]
        replica = self._replicas.get(counted_at)
        if replica is None:
            return
        replica.num_open -= 1
        if replica.uncounted.pop(request_id, None) is None:
            replica.num_ended += 1

    def _forget_unconfirmed(self) -> None:
        """Stop counting old requests that no report has covered, if completions are not seen.

        A request that never reaches the engine, such as a refused one, changes no report.
        """
        if self._sees_completions:
            return
        oldest_s = self._clock() - UNCONFIRMED_S
        while self._replica_of:
            request_id, counted_at = next(iter(self._replica_of.items()))  # the oldest
            replica = self._replicas.get(counted_at, _UNKNOWN)
            sent = replica.uncounted.get(request_id)
            if sent is not None and sent.at_s > oldest_s:
                break
            self.ended(request_id)

    def _num_uncached(self, replica_id: str, key: RouteKey, pages: tuple[int, ...]) -> int:
        """Return how many tokens of a prompt the replica will probably compute.

        Where pages are not known, a session's prompt is taken to begin with its last one.
        """
        num_tokens = key.num_tokens or UNKNOWN_TOKENS
        if pages:
            num_cached = self._replicas[replica_id].view(replica_id).num_cached(pages)
            return num_tokens * (len(pages) - num_cached) // len(pages)
        if key.session is None:
            return num_tokens
        last_replica, num_before = self._sessions.pop(key.session, (replica_id, 0))
        self._sessions[key.session] = replica_id, num_tokens
        if len(self._sessions) > MAX_SESSIONS:
            del self._sessions[next(iter(self._sessions))]
        return max(0, num_tokens - num_before) if last_replica == replica_id else num_tokens


def _expect(
    expected: dict[_Item, float], items: Iterable[_Item], now_s: float, max_items: int
) -> None:
    """Expect pages or adapters of a replica from now on; the oldest are dropped first."""
    for item in items:
        expected.pop(item, None)
        expected[item] = now_s
    num_over = max(0, len(expected) - max_items)
    for item in list(islice(expected, num_over)):
        del expected[item]


def _still_expected(
    expected: dict[_Item, float], present: frozenset[_Item], now_s: float
) -> dict[_Item, float]:
    """Return what is neither present yet nor too old."""
    return {
        item: at_s
        for item, at_s in expected.items()
        if item not in present and now_s - at_s < EXPECTED_S
    }


_UNKNOWN = _Replica()
