"""The adapters of one replica: which are served, which are in CPU memory, which requests use them.

A request holds its adapter from before the load until the request ends, and a held adapter is never
evicted. Each adapter is loaded once however many requests wait for it, MAX_LOADS at a time; an
older one is evicted after the newer one is loaded. An adapter that is no longer served is dropped
when its last request ends.

Runs on one event loop. Opens no files and knows no engine: a Loader does that.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
import math
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, Protocol

from remora.configs.errors import InvalidAdapter, NotFinite, RemoraError, Unavailable, UnknownModel
from remora.engine.protocols import AdapterFacts
from remora.lora.eviction import CacheEntry, choose_evictions, has_room
from remora.lora.records import AdapterRecord, AdapterReport, Desired
from remora.lora.wakeup import Wakeup

log = logging.getLogger(__name__)

MAX_LOADS = 4
# Uses of loaded adapters that may pass a load which waits for memory; then they wait, too.
MAX_SKIPPED = 32
# Minimum time between a failed load and the next attempt.
RETRY_S = 5.0
MAX_REMOVED_NAMES = 4096
# After this many consecutive answers with NaN or infinity the adapter is refused.
MAX_NOT_FINITE = 3
# Loads, uses of adapters that were not in memory, evictions, answers that were not finite.
_TOTALS = ("loads_total", "misses_total", "evictions_total", "not_finite_total")


class Loader(Protocol):
    """Loads adapters into CPU memory at all ranks."""

    async def prepare(self, lora_id: int, source: str) -> AdapterFacts:
        """Load. Raises InvalidAdapter for faulty files; keeps nothing if it raises."""
        ...

    async def discard(self, lora_id: int) -> None:
        """Free an adapter that no request uses."""
        ...

    def pin(self, lora_id: int, *, pinned: bool) -> None:
        """Keep an adapter in its slot once it has one, or allow its eviction."""
        ...


@dataclass(slots=True)
class _LoadTicket:
    """A load that waits for memory; `num_skipped` uses of loaded adapters have passed it."""

    num_skipped: int = 0


class AdapterCache:
    """The adapters of one replica. Create it on the event loop that uses it.

    max_loaded:   adapters in memory, plus one for each running load
    by_use:       evict the least recently used first; False = the first loaded
    """

    def __init__(
        self,
        loader: Loader,
        *,
        max_loaded: int,
        by_use: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._loader = loader
        self._max_loaded = max_loaded
        self._by_use = by_use
        self._clock = clock
        self._entries: dict[int, CacheEntry] = {}
        self._current: dict[str, int] = {}  # name -> lora_id
        self._removed: OrderedDict[int, str] = OrderedDict()  # lora_id -> name
        self._loads = asyncio.Semaphore(MAX_LOADS)
        self._tickets: list[_LoadTicket] = []
        self._use_numbers = itertools.count(1)
        self.num_changes = 0  # state changes that the manager may wait for
        self._totals = dict.fromkeys(_TOTALS, 0)
        self._wakeup = Wakeup()
        self._dropping: set[asyncio.Task[None]] = set()

    # -- served adapters -----------------------------------------------------------------------

    @property
    def names(self) -> list[str]:
        """Names that requests may use."""
        failures = ((name, self._entries[id_].failure) for name, id_ in self._current.items())
        return [name for name, failure in failures if not isinstance(failure, InvalidAdapter)]

    @property
    def resident(self) -> list[str]:
        """Names of the adapters in memory, the most recently used first."""
        found = (self._entries[lora_id] for lora_id in self._current.values())
        loaded = [entry for entry in found if entry.facts is not None]
        loaded.sort(key=lambda entry: -entry.used)
        return [entry.record.name for entry in loaded]

    def lora_id(self, name: str) -> int | None:
        """Return the lora_id that is served under a name; None = no such adapter."""
        return self._current.get(name)

    def source(self, name: str) -> str | None:
        """Return the folder or URL of the adapter that is served under a name; None = none."""
        lora_id = self._current.get(name)
        return None if lora_id is None else self._entries[lora_id].record.source

    def reports(self, slots: Mapping[int, int] = MappingProxyType({})) -> tuple[AdapterReport, ...]:
        """Return the state of each adapter; `slots` maps lora_ids to slots on the device."""
        return tuple(entry.report(slots.get(lora_id)) for lora_id, entry in self._entries.items())

    @property
    def stats(self) -> dict[str, int]:
        """Return counters (see _TOTALS) and gauges."""
        entries = self._entries.values()
        return {
            **self._totals,
            "loaded": sum(entry.facts is not None for entry in entries),
            "used": sum(entry.num_users > 0 for entry in entries),
            "waiting": len(self._tickets),
            "host_bytes": sum(entry.facts.num_bytes for entry in entries if entry.facts),
        }

    async def changed(self, since: int) -> None:
        """Wait until `num_changes` differs from `since`."""
        await self._wakeup.until(lambda: self.num_changes != since)

    def adopt(self, desired: Desired) -> None:
        """Serve these adapters from now on, and start the loads that they need."""
        records = {record.lora_id: record for record in (*desired.active, *desired.staged)}
        for lora_id, record in records.items():
            entry = self._entries.setdefault(lora_id, CacheEntry(record._replace(pinned=False)))
            if record.pinned != entry.record.pinned:
                self._loader.pin(lora_id, pinned=record.pinned)
            entry.record, entry.is_ended = record, False
        self._current = {record.name: record.lora_id for record in desired.active}
        for lora_id, entry in list(self._entries.items()):
            if lora_id not in records:
                self._end(entry)
        for record in self._to_preload(desired):
            self._start_load(self._entries[record.lora_id])
        self._evict_excess()
        self.num_changes += 1
        self._wakeup.wake()

    async def settled(self) -> None:
        """Wait until no load or eviction runs."""
        while works := {e.work for e in self._entries.values() if e.work} | self._dropping:
            await asyncio.wait(works)

    def failures(self) -> list[tuple[AdapterRecord, RemoraError]]:
        """Return the adapters that could not be loaded, with their errors."""
        return [(e.record, e.failure) for e in self._entries.values() if e.failure is not None]

    # -- for requests --------------------------------------------------------------------------

    @asynccontextmanager
    async def use(self, lora_id: int) -> AsyncIterator[int]:
        """Hold an adapter, loading it if necessary; yields the lora_id that is held.

        If the adapter was replaced meanwhile, that is the current one of the same name.
        Raises UnknownModel if the name is not served any more, Unavailable if the load failed.
        """
        entry = await self._admit(lora_id)
        entry.num_users += 1
        entry.num_uses += 1
        self._totals["misses_total"] += entry.facts is None
        if self._by_use:
            entry.used = next(self._use_numbers)
        try:
            self._check(entry)
            while entry.facts is None:
                await asyncio.shield(self._start_load(entry))
                self._check(entry)
            yield entry.record.lora_id
            entry.num_not_finite = 0
        except NotFinite:
            self._count_not_finite(entry)
            raise
        finally:
            entry.num_users -= 1
            if entry.is_ended:
                self._end(entry)
            self._evict_excess()
            self._wakeup.wake()

    async def _admit(self, lora_id: int) -> CacheEntry:
        """Return the entry to use, after every load that was skipped MAX_SKIPPED times."""
        entry = self._newest(lora_id)
        while starved := [each for each in self._tickets if each.num_skipped >= MAX_SKIPPED]:
            await self._wakeup.until(functools.partial(self._has_left, starved[0]))
            entry = self._newest(lora_id)
        if entry.facts is not None:
            for ticket in self._tickets:
                ticket.num_skipped += 1
        return entry

    def _has_left(self, ticket: _LoadTicket) -> bool:
        return ticket not in self._tickets

    def _newest(self, lora_id: int) -> CacheEntry:
        entry = self._entries.get(lora_id)
        if entry is not None and not entry.is_ended:
            return entry
        name = self._removed.get(lora_id) if entry is None else entry.record.name
        current = self._current.get(name or "")
        if current is None:
            raise UnknownModel(
                f"The adapter {name or lora_id!r} was unloaded while the request came.", "model"
            )
        return self._entries[current]

    def _check(self, entry: CacheEntry) -> None:
        """Raise the failure of the last load, unless it is time for another attempt."""
        retry_after_s = entry.failed_at + RETRY_S - self._clock()
        if entry.failure is None or retry_after_s <= 0:
            return
        if isinstance(entry.failure, InvalidAdapter):
            raise entry.failure
        raise Unavailable(
            f"The adapter {entry.record.name!r} could not be loaded: {entry.failure}",
            retry_after_s,
        )

    def _count_not_finite(self, entry: CacheEntry) -> None:
        """Count an answer that was not finite; refuse the adapter after MAX_NOT_FINITE in a row."""
        entry.num_not_finite += 1
        self._totals["not_finite_total"] += 1
        if entry.num_not_finite == MAX_NOT_FINITE:
            log.error("adapter %s: %d answers not finite", entry.record.name, MAX_NOT_FINITE)
            entry.failed_at = math.inf  # no further attempt
            entry.failure = InvalidAdapter(
                f"the adapter {entry.record.name!r} from {entry.record.source} made "
                f"{MAX_NOT_FINITE} consecutive answers that were not finite and is not used any "
                "more; load a corrected one under its name"
            )
            self._note_change(entry)

    # -- memory --------------------------------------------------------------------------------

    def _to_preload(self, desired: Desired) -> Iterable[AdapterRecord]:
        """Yield what to load before a request asks for it: staged, pinned, and what fits."""
        num_taken = sum(e.facts is not None or e.work is not None for e in self._entries.values())
        num_free = self._max_loaded - num_taken
        for record in (*desired.staged, *sorted(desired.active, key=lambda r: not r.pinned)):
            entry = self._entries[record.lora_id]
            if entry.facts is not None or entry.work is not None or entry.failure is not None:
                continue
            fits = num_free > 0 and not entry.num_loads
            if fits or record.pinned or record in desired.staged:
                num_free -= 1
                yield record

    def _start_load(self, entry: CacheEntry) -> asyncio.Task[None]:
        """Return the entry's running work; start a load if there is none."""
        if entry.work is None:
            self._start(entry, self._load(entry), "waiting")
        assert entry.work is not None
        return entry.work

    def _start(
        self,
        entry: CacheEntry,
        work: Coroutine[Any, Any, None],
        phase: Literal["waiting", "evicting"],
    ) -> None:
        async def done() -> None:
            try:
                await work
            finally:
                entry.work = None
                self._note_change(entry)

        entry.phase = phase
        entry.work = asyncio.create_task(done(), name=f"remora-adapter-{entry.record.lora_id}")

    async def _load(self, entry: CacheEntry) -> None:
        async with self._loads:
            await self._wait_for_room()
            record, entry.phase, entry.failure = entry.record, "loading", None
            self._note_change(entry)
            try:
                facts = await self._loader.prepare(record.lora_id, record.source)
                if record.digest not in ("", facts.digest):
                    await self._loader.discard(record.lora_id)
                    raise InvalidAdapter(
                        f"the files of {record.source} have changed since the adapter "
                        f"{record.name!r} was loaded; load it again under its name"
                    )
            except RemoraError as error:
                entry.failure, entry.failed_at = error, self._clock()
                log.warning("adapter %s: load failed: %s", record.name, error)
                return
            except Exception as error:  # a boundary: requests for the adapter get the error
                log.exception("adapter %s: load failed", record.name)
                entry.failure, entry.failed_at = Unavailable(str(error)), self._clock()
                return
        entry.facts = facts
        entry.num_loads += 1
        self._totals["loads_total"] += 1
        if not self._by_use:
            entry.used = next(self._use_numbers)
        self._evict_excess()

    async def _wait_for_room(self) -> None:
        """Wait, first come first served, until an adapter can be evicted if memory is full."""
        if self._has_room():
            return
        ticket = _LoadTicket()
        self._tickets.append(ticket)
        try:
            await self._wakeup.until(lambda: self._tickets[0] is ticket and self._has_room())
        finally:
            self._tickets.remove(ticket)
            self._wakeup.wake()

    def _has_room(self) -> bool:
        return has_room(self._entries.values(), self._max_loaded)

    def _evict_excess(self) -> None:
        for entry in choose_evictions(self._entries.values(), self._max_loaded):
            self._totals["evictions_total"] += 1
            self._evict(entry)

    def _evict(self, entry: CacheEntry) -> None:
        entry.facts = None
        self._start(entry, self._loader.discard(entry.record.lora_id), "evicting")

    def _end(self, entry: CacheEntry) -> None:
        """Stop serving an adapter; it is dropped when no request uses it."""
        lora_id = entry.record.lora_id
        entry.is_ended = True
        self._removed[lora_id] = entry.record.name
        self._removed.move_to_end(lora_id)
        while len(self._removed) > MAX_REMOVED_NAMES:
            self._removed.popitem(last=False)
        if not entry.num_users:
            dropping = asyncio.create_task(self._drop(entry))
            self._dropping.add(dropping)
            dropping.add_done_callback(self._dropping.discard)

    async def _drop(self, entry: CacheEntry) -> None:
        """Drop an ended adapter after its running work, if no request uses it then."""
        while entry.is_ended and not entry.num_users:
            if entry.work is not None:
                await asyncio.wait({entry.work})
            elif entry.facts is not None:
                self._evict(entry)
            else:
                # It may have been adopted again under the same id.
                if self._entries.get(entry.record.lora_id) is entry:
                    del self._entries[entry.record.lora_id]
                    self._note_change(entry)
                return

    def _note_change(self, entry: CacheEntry) -> None:
        """Count a state change, except evictions of served adapters, which need no report."""
        is_served = self._current.get(entry.record.name) == entry.record.lora_id
        if not is_served or entry.failure is not None:
            self.num_changes += 1
        self._wakeup.wake()
