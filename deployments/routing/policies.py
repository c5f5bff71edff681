"""Which replica a request should go to: the policies.

Pure: from what is known of the replicas and of the request to an order in which to try them.
Knows nothing of Ray, clocks or how the knowledge was come by (ledger.py).

Load is counted in tokens that must be computed before a newcomer's first one. Where a policy
prefers a replica, the preference ends when that replica has more than `max_imbalance` times the
work that the request would meet elsewhere, its own prompt included: waiting in a queue must not
cost more than computing the prompt anew.
"""

from __future__ import annotations

import random
from collections.abc import Sequence, Set
from dataclasses import dataclass
from hashlib import blake2b
from typing import Protocol

from remora.deployments.routing.key import RouteKey, pages_of

# A request that is being answered computes one token in each step that a newcomer's prompt needs;
# so it counts, but far less than a prompt.
TOKENS_PER_REQUEST = 16
# Assumed of a prompt of unknown length.
UNKNOWN_TOKENS = 256
# What a replica would compute of a prompt while it loads an adapter. A guess: some 0.2 s of a small
# model on a CPU, less on a GPU.
LOAD_TOKENS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaView:
    """What a router knows of one replica when it must choose.

    num_requests:       open there, running or waiting
    num_queued_tokens:  still to be computed before all of them decode
    kv_usage:           part of its KV memory that open requests hold (0 to 1)
    pages:              hashes of pages that it has reported as cached
    expected_pages:     hashes of pages that it will have, by what was sent to it
    adapters:           names of adapters that it has reported as being in its memory
    expected_adapters:  names of adapters that it will have, by what was sent to it
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
        """Work before a newcomer's turn, in tokens."""
        return self.num_queued_tokens + TOKENS_PER_REQUEST * self.num_requests

    def num_cached(self, pages: Sequence[int]) -> int:
        """Return how many of a prompt's pages are there, from its beginning on."""
        for count, page in enumerate(pages):
            if page not in self.pages and page not in self.expected_pages:
                return count
        return len(pages)

    def holds(self, adapter: str) -> bool:
        """Return whether an adapter is there, or soon will be."""
        return adapter in self.adapters or adapter in self.expected_adapters

    @property
    def num_adapters(self) -> int:
        """How many adapters it holds."""
        return len(self.adapters | self.expected_adapters)


class Policy(Protocol):
    """Orders replicas for a request."""

    def rank(self, replicas: Sequence[ReplicaView], key: RouteKey) -> list[str]:
        """Return the ids of all replicas that may be tried, the best first.

        Those that have failed the request are left out, unless there are no others.
        """
        ...


class RoundRobin:
    """Whose turn came longest ago. Replicas may come and go without anybody losing a turn."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._turns: dict[str, int] = {}
        self._num_turns = 0

    def rank(self, replicas: Sequence[ReplicaView], key: RouteKey) -> list[str]:
        """Return the replicas by turn; the first has had it then."""
        present = {replica.id for replica in replicas}
        self._turns = {id_: turn for id_, turn in self._turns.items() if id_ in present}
        ids = [replica.id for replica in _usable(replicas, key)]
        self._chance.shuffle(ids)  # routers that start together must not march in step
        ids.sort(key=lambda id_: self._turns.get(id_, 0))
        if ids:
            self._num_turns += 1
            self._turns[ids[0]] = self._num_turns
        return ids


class PowerOfTwo:
    """The one with fewer requests of two taken at random; then the others, at random."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance

    def rank(self, replicas: Sequence[ReplicaView], key: RouteKey) -> list[str]:
        """Return the two, then the others."""
        usable = _usable(replicas, key)
        self._chance.shuffle(usable)
        usable[:2] = sorted(usable[:2], key=lambda replica: replica.num_requests)
        return [replica.id for replica in usable]


class ShortestQueue:
    """Fewest tokens to compute first."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance

    def rank(self, replicas: Sequence[ReplicaView], key: RouteKey) -> list[str]:
        """Return the replicas by load; equals at random."""
        usable = _usable(replicas, key)
        self._chance.shuffle(usable)
        return [replica.id for replica in sorted(usable, key=lambda r: (r.load, r.kv_usage))]


class Prefix:
    """Who has most of the prompt in its cache, unless it is too busy."""

    def __init__(self, chance: random.Random, *, max_imbalance: float, page_size: int) -> None:
        self._chance = chance
        self._max_imbalance = max_imbalance
        self._page_size = page_size

    def rank(self, replicas: Sequence[ReplicaView], key: RouteKey) -> list[str]:
        """Return those not too busy by what they have cached, then the busy ones by work."""
        usable = _usable(replicas, key)
        self._chance.shuffle(usable)
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


class Session:
    """The same replica for the same session, unless it is too busy.

    By rendezvous hashing: each session has an order of its own over all replicas, so when one comes
    or goes only the sessions that prefer it move, and overflow of a session goes to one place.
    """

    def __init__(self, chance: random.Random, *, max_imbalance: float) -> None:
        self._by_load = ShortestQueue(chance)
        self._max_imbalance = max_imbalance

    def rank(self, replicas: Sequence[ReplicaView], key: RouteKey) -> list[str]:
        """Return those not too busy in the session's order, then the busy ones by load."""
        by_load = self._by_load.rank(replicas, key)
        session = key.session
        if session is None or not by_load:
            return by_load
        load = {replica.id: replica.load for replica in replicas}
        allowed = self._max_imbalance * (load[by_load[0]] + (key.num_tokens or UNKNOWN_TOKENS))
        free = [id_ for id_ in by_load if load[id_] <= allowed]
        free.sort(key=lambda id_: _affinity(session, id_), reverse=True)
        return free + [id_ for id_ in by_load if load[id_] > allowed]


class Lora:
    """Who holds the adapter, unless it is too busy.

    Several that hold it are taken in the adapter's own order, by rendezvous hashing, rather than by
    load: then its requests share a place on the device and what is cached of prompts under it, and
    a copy that a rush has made elsewhere falls out of use and leaves. While nobody holds it, the
    order is over all, so that routers which know nothing of each other load it once.
    """

    def __init__(self, chance: random.Random, *, max_imbalance: float) -> None:
        self._chance = chance
        self._by_load = ShortestQueue(chance)
        self._max_imbalance = max_imbalance

    def rank(self, replicas: Sequence[ReplicaView], key: RouteKey) -> list[str]:
        """Return those that hold the adapter and are not too busy, then the others by work.

        Of others with the same work that which holds fewest adapters goes first.
        """
        adapter = key.adapter
        if adapter is None:
            return self._by_load.rank(replicas, key)
        usable = _usable(replicas, key)
        self._chance.shuffle(usable)
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


def make_policy(
    name: str, *, max_imbalance: float, page_size: int, chance: random.Random | None = None
) -> Policy:
    """Return the policy of a configuration's `routing.policy`."""
    chance = chance or random.Random()
    match name:
        case "round_robin":
            return RoundRobin(chance)
        case "shortest_queue":
            return ShortestQueue(chance)
        case "prefix":
            return Prefix(chance, max_imbalance=max_imbalance, page_size=page_size)
        case "session":
            return Session(chance, max_imbalance=max_imbalance)
        case "lora":
            return Lora(chance, max_imbalance=max_imbalance)
        case _:
            return PowerOfTwo(chance)


def _usable(replicas: Sequence[ReplicaView], key: RouteKey) -> list[ReplicaView]:
    """Return the replicas that have not failed the request; all, if every one has."""
    return [replica for replica in replicas if replica.id not in key.avoid] or list(replicas)


def _affinity(name: str, replica_id: str) -> bytes:
    text = f"{replica_id}\n{name}".encode(errors="surrogatepass")
    return blake2b(text, digest_size=8).digest()
