"""What is said of adapters between the manager and the replicas. Plain values, pickled by Ray.

An adapter is known by its version, a number that is never used twice: a name that is loaded anew is
another version, and so another instance in the engines and another namespace of their caches.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

Owner = Literal["config", "repo", "api"]
State = Literal["known", "waiting", "loading", "loaded", "failed", "ending"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterRecord:
    """An adapter that is to be served.

    source:  folder or address of its files
    pinned:  whether it stays loaded, and in its slot once it lies in one
    owner:   who wants it: the configuration, the watched folder or a caller of the API
    digest:  of the files that were loaded first; "" = none were yet
    """

    name: str
    version: int
    source: str
    pinned: bool
    owner: Owner
    digest: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Desired:
    """What a replica is to serve: all of it, or what has changed since a revision.

    revision:  grows with every change
    follows:   revision that `active` and `gone` build on; 0 = `active` is all
    active:    at most one of each name
    gone:      names that are served no longer
    staged:    to be loaded, but not served yet: that is for when every replica has loaded them
    ended:     versions whose requests are not waited for
    asks:      the manager lacks what the report builds on: the next one must tell everything
    """

    revision: int
    follows: int = 0
    active: tuple[AdapterRecord, ...] = ()
    gone: frozenset[str] = frozenset()
    staged: tuple[AdapterRecord, ...] = ()
    ended: frozenset[int] = frozenset()
    asks: bool = False

    def since(self, before: Desired) -> Desired:
        """Return all of it, given what it builds on."""
        if not self.follows:
            return self
        kept = {record.name: record for record in before.active if record.name not in self.gone}
        active = kept | {record.name: record for record in self.active}
        return replace(self, follows=0, active=tuple(active.values()), gone=frozenset())


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaReport:
    """What has changed at a replica since it told last, or everything.

    number:    of this report; grows
    follows:   number of the report that this one builds on; 0 = it tells everything
    revision:  of what the replica serves; 0 = of nothing yet
    adapters:  what became of versions
    gone:      versions that are there no more
    records:   what it serves, if everything is told
    stats:     its counters
    """

    number: int
    follows: int
    revision: int
    adapters: tuple[AdapterReport, ...]
    gone: frozenset[int]
    records: tuple[AdapterRecord, ...]
    stats: Mapping[str, float]


class AdapterReport(NamedTuple):
    """What became of one version at one replica. Many are made and compared: hence a tuple.

    state:        known = not in memory; waiting = for room there; ending = not served any more,
                  but requests still run with it
    reason:       why it failed
    is_fault:     whether that lies in its files, so that it will fail again
    slot:         in which it lies; None = in none
    num_users:    open requests
    num_uses:     requests so far
    num_loads:    times that it was loaded
    num_bytes:    of the host's memory
    """

    version: int
    name: str
    state: State
    reason: str = ""
    is_fault: bool = False
    slot: int | None = None
    num_users: int = 0
    num_uses: int = 0
    num_loads: int = 0
    num_bytes: int = 0
    max_rank: int = 0
    digest: str = ""
