"""The routing policies: the order in which replicas are tried for a request.

Pure: a function of replica views and the route key. Does not know Ray, clocks or where a view comes
from (ledger.py).

Load is counted in tokens to compute before a new request's first token. A policy prefers a replica
until its work exceeds `max_imbalance` times the work that the request would meet elsewhere, its own
prompt included: waiting must not cost more than computing the prompt again.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from remora.deployments.routing.key import RouteKey, pages_of

# A decoding request takes one token of each step that a new prompt needs, far less than a prompt.
TOKENS_PER_REQUEST = 16
# Assumed of a prompt of unknown length.
UNKNOWN_TOKENS = 256
# Prompt tokens that a replica computes in the time of loading an adapter. An estimate: about 0.2 s
# of a small model on a CPU, less on a GPU.
LOAD_TOKENS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaView:
    """A router's view of one replica.

    num_requests:       running or waiting
    num_queued_tokens:  to compute before all of them decode
    kv_usage:           part of the KV memory held by open requests (0 to 1)
    pages:              hashes of pages reported as cached
    expected_pages:     hashes of pages of requests sent to it
    adapters:           names of adapters reported as in memory
    expected_adapters:  names of adapters of requests sent to it
    """

    id: str
    num_requests: int = 0
    num_queued_tokens: int = 0
    kv_usage: float = 0.0
    pages: Set[int] = frozenset()
    expected_pages: Set[int] = frozenset()
    adapters: Set[str] = frozenset()
    expected_adapters: Set[str] = frozenset()

    @property
    def load(self) -> int:
        """Work before a new request, in tokens."""
        return self.num_queued_tokens + TOKENS_PER_REQUEST * self.num_requests

    def num_cached(self, pages: Sequence[int]) -> int:
        """Return how many leading pages of a prompt are cached or expected."""
        for count, page in enumerate(pages):
            if page not in self.pages and page not in self.expected_pages:
                return count
        return len(pages)

    def holds(self, adapter: str) -> bool:
        """Return whether an adapter is present or expected."""
        return adapter in self.adapters or adapter in self.expected_adapters

    @property
    def num_adapters(self) -> int:
        """Number of adapters present or expected."""
        return len(self.adapters | self.expected_adapters)


class Policy:
    """Orders replicas for a request.

    max_imbalance:  see the opening of this module
    page_size:      tokens in a page of the cache
    """

    def __init__(self, chance: random.Random, *, max_imbalance: float, page_size: int) -> None:
        self._chance = chance
        self._max_imbalance = max_imbalance
        self._page_size = page_size

    def rank(self, replicas: Sequence[ReplicaView], key: RouteKey) -> list[str]:
        """Return the ids of the replicas to try, the best first.

        Replicas that have failed the request are excluded, unless there are no others.
        """
        raise NotImplementedError

    def _shuffled(self, replicas: Sequence[ReplicaView], key: RouteKey) -> list[ReplicaView]:
        """Return the replicas that have not failed the request, or all if every one has."""
        usable = [replica for replica in replicas if replica.id not in key.avoid] or list(replicas)
        self._chance.shuffle(usable)
        return usable


class RoundRobin(Policy):
    """The least recently used replica first, also while replicas are added and removed."""

    def __init__(self, chance: random.Random, **limits: Any) -> None:
        super().__init__(chance, **limits)
        self._last_use: dict[str, int] = {}
        self._num_uses = 0

    def rank(self, replicas: Sequence[ReplicaView], key: RouteKey) -> list[str]:
        """Return the replicas by last use, and mark the first as used."""
        present = {replica.id for replica in replicas}
        self._last_use = {id_: use for id_, use in self._last_use.items() if id_ in present}
        # Shuffled, so that routers that start together differ.
        ids = [replica.id for replica in self._shuffled(replicas, key)]
        ids.sort(key=lambda id_: self._last_use.get(id_, 0))
        if ids:
            self._num_uses += 1
            self._last_use[ids[0]] = self._num_uses
        return ids


class PowerOfTwo(Policy):
    """The less busy of two random replicas, then the others at random."""

    def rank(self, replicas: Sequence[ReplicaView], key: RouteKey) -> list[str]:
        """Return the two, then the others."""
        usable = self._shuffled(replicas, key)
        usable[:2] = sorted(usable[:2], key=lambda replica: replica.num_requests)
        return [replica.id for replica in usable]


class ShortestQueue(Policy):
    """Fewest tokens to compute first."""

    def rank(self, replicas: Sequence[ReplicaView], key: RouteKey) -> list[str]:
        """Return the replicas by load; equals at random."""
        usable = self._shuffled(replicas, key)
        return [replica.id for replica in sorted(usable, key=lambda r: (r.load, r.kv_usage))]


class Prefix(Policy):
    """The replica with most of the prompt in its cache, unless it is too busy."""

    def rank(self, replicas: Sequence[ReplicaView], key: RouteKey) -> list[str]:
        """Return free replicas by cached pages, then busy ones by work."""
        usable = self._shuffled(replicas, key)
        pages = pages_of(key.page_hashes)
        cached = {replica.id: replica.num_cached(pages) for replica in usable}
        work = {
            replica.id: replica.load + max(0, key.num_tokens - cached[replica.id] * self._page_size)
            for replica in usable
        }
        allowed = self._max_imbalance * min(work.values(), default=0)

        def place(id_: str) -> tuple[bool, int, int]:
            is_busy = work[id_] > allowed
            return is_busy, 0 if is_busy else -cached[id_], work[id_]

        return sorted(work, key=place)


class Session(ShortestQueue):
    """The same replica for the same session, unless it is too busy.

    By rendezvous hashing: each session has its own order of replicas, so when a replica is added or
    removed only the sessions that prefer it move, and a session's overflow goes to one replica.
    """

    def rank(self, replicas: Sequence[ReplicaView], key: RouteKey) -> list[str]:
        """Return free replicas in the session's order, then busy ones by load."""
        by_load = super().rank(replicas, key)
        session = key.session
        if session is None or not by_load:
            return by_load
        load = {replica.id: replica.load for replica in replicas}
        allowed = self._max_imbalance * (load[by_load[0]] + (key.num_tokens or UNKNOWN_TOKENS))
        free = [id_ for id_ in by_load if load[id_] <= allowed]
        free.sort(key=lambda id_: _affinity(session, id_), reverse=True)
        return free + [id_ for id_ in by_load if load[id_] > allowed]


class Lora(ShortestQueue):
    """A replica that holds the adapter, unless it is too busy.

    Several holders are ranked by rendezvous hashing rather than by load: requests then share the
    adapter's slot and prefix cache, and a copy made during a burst is evicted again. Without a
    holder all replicas are ranked so, and independent routers load the adapter once.
    """

    def rank(self, replicas: Sequence[ReplicaView], key: RouteKey) -> list[str]:
        """Return free holders of the adapter, then the others by work.

        Among others with the same work, the one with the fewest adapters is first.
        """
        adapter = key.adapter
        if adapter is None:
            return super().rank(replicas, key)
        usable = self._shuffled(replicas, key)
        num_tokens = key.num_tokens or UNKNOWN_TOKENS
        holders = {replica.id for replica in usable if replica.holds(adapter)}
        work = {
            replica.id: replica.load + num_tokens + (replica.id not in holders) * LOAD_TOKENS
            for replica in sorted(usable, key=lambda r: r.num_adapters)
        }
        allowed = self._max_imbalance * min(work.values(), default=0)
        by_work = sorted(work, key=lambda id_: work[id_])
        wanted = holders or work.keys()
        preferred = [id_ for id_ in by_work if id_ in wanted and work[id_] <= allowed]
        preferred.sort(key=lambda id_: _affinity(adapter, id_), reverse=True)
        return preferred + [id_ for id_ in by_work if id_ not in preferred]


POLICIES: Mapping[str, type[Policy]] = {
    "power_of_two": PowerOfTwo,
    "round_robin": RoundRobin,
    "shortest_queue": ShortestQueue,
    "prefix": Prefix,
    "session": Session,
    "lora": Lora,
}


def make_policy(
    name: str, *, max_imbalance: float, page_size: int, chance: random.Random | None = None
) -> Policy:
    """Return the policy of a configuration's `routing.policy`."""
    return POLICIES[name](
        chance or random.Random(), max_imbalance=max_imbalance, page_size=page_size
    )


def _affinity(name: str, replica_id: str) -> bytes:
    text = f"{replica_id}\n{name}".encode(errors="surrogatepass")
    return blake2b(text, digest_size=8).digest()
