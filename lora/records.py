"""Messages between the manager and the replicas. Plain values, pickled by Ray.

Each side sends what changed since its last message: the manager's registry by revision, a replica's
adapters by report number. It sends its full state if the other side lacks that message.

An adapter is identified by its lora_id, a number that is never reused: a name that is loaded again
gets a new lora_id, and with it its own namespace of the prefix cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
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
    is_missing:   whether the fault is that files are missing
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
    is_missing: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Desired:
    """The adapters that replicas serve: all of them, or the changes since a revision.

    revision:  grows with every change
    follows:   revision that `active` and `gone` are changes to; 0 = `active` is complete
    active:    at most one of each name
    gone:      names that are not served any more
    staged:    to load but not to serve yet; they are served once every replica has loaded them
    ended:     lora_ids whose requests are aborted
    asks:      the manager lacks the report that the last one follows: the next must be complete
    """

    revision: int
    follows: int = 0
    active: tuple[AdapterRecord, ...] = ()
    gone: frozenset[str] = frozenset()
    staged: tuple[AdapterRecord, ...] = ()
    ended: frozenset[int] = frozenset()
    asks: bool = False

    def applied_to(self, before: Desired) -> Desired:
        """Return the complete state; `before` is the one of revision `follows`."""
        if not self.follows:
            return self
        kept = {record.name: record for record in before.active if record.name not in self.gone}
        active = kept | {record.name: record for record in self.active}
        return replace(self, follows=0, active=tuple(active.values()), gone=frozenset())


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaReport:
    """The state of a replica: complete, or the changes since an earlier report.

    number:    of this report; grows
    follows:   number of the report that `adapters` and `gone` are changes to; 0 = complete
    revision:  of the records that the replica serves; 0 = none yet
    adapters:  state of each adapter that changed
    gone:      lora_ids that the replica has dropped
    records:   served adapters, for a manager that may have lost them; only in a complete report
    stats:     the replica's counters
    """

    number: int
    follows: int
    revision: int
    adapters: tuple[AdapterReport, ...]
    gone: frozenset[int]
    records: tuple[AdapterRecord, ...]
    stats: Mapping[str, float]
