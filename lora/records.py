"""Messages between the manager and the replicas. Plain values, pickled by Ray.

Each side sends its full state: the manager its registry, unless the replica has that revision
already, and a replica the state of its adapters.

An adapter is identified by its lora_id, a number that is never reused: a name that is loaded again
gets a new lora_id, and with it its own namespace of the prefix cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

Owner = Literal["config", "repo", "api"]
State = Literal["known", "waiting", "loading", "loaded", "failed", "ending"]


class AdapterRecord(NamedTuple):
    """An adapter to serve. A tuple, because thousands are pickled.

    source:  folder or URL of its files
    pinned:  whether it stays loaded, and in its slot once it has one
    owner:   where it was named: in the configuration, the watched repository or an API request
    digest:  of the files at the first load; "" = not loaded yet
    """

    name: str
    lora_id: int
    source: str
    pinned: bool
    owner: Owner
    digest: str = ""


class AdapterReport(NamedTuple):
    """The state of one adapter at one replica. A tuple, because thousands are pickled.

    state:        known = not in memory; waiting = for memory; ending = not served any more, but
                  requests still use it
    reason:       of a failure
    is_fault:     whether the files are faulty, so that another load fails as well
    slot:         on the device; None = in no slot
    num_users:    open requests
    num_uses:     requests so far
    num_loads:    loads so far
    num_bytes:    CPU memory
    """

    lora_id: int
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Desired:
    """The adapters that replicas serve.

    revision:  grows with every change
    active:    at most one of each name; empty if the replica has this revision already
    staged:    to load but not to serve yet; they are served once every replica has loaded them
    ended:     lora_ids whose requests are aborted
    asks:      the manager does not know the replica: the next report must carry `records`
    """

    revision: int
    active: tuple[AdapterRecord, ...] = ()
    staged: tuple[AdapterRecord, ...] = ()
    ended: frozenset[int] = frozenset()
    asks: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaReport:
    """The state of a replica.

    number:    of this report; grows
    revision:  of the records that the replica serves; 0 = none yet
    adapters:  state of each adapter
    stats:     the replica's counters
    records:   served adapters, for a manager that may have lost them; None = not asked for
    """

    number: int
    revision: int
    adapters: tuple[AdapterReport, ...]
    stats: Mapping[str, float]
    records: tuple[AdapterRecord, ...] | None = None
