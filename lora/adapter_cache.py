"""The adapters of one replica: which it serves, which are in memory, who uses them.

A request holds its adapter from before it is loaded until it ends; what is held is never put out
of memory. Each adapter is loaded once however many wait for it, a few at a time, and an older one
leaves when the newer is there. A version that is served no longer goes with its last request.

Runs on one event loop. Knows neither files nor engines: a Loader has them.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal, Protocol

from remora.configs.errors import InvalidAdapter, NotFinite, RemoraError, Unavailable, UnknownModel
from remora.engine.protocols import AdapterFacts
from remora.lora.records import AdapterRecord, AdapterReport, Desired, State

log = logging.getLogger(__name__)

MAX_LOADS = 4
# So many requests may go before one whose adapter waits for room in memory; then they wait, too.
MAX_OVERTAKEN = 32
# A load that failed is not tried again at once.
RETRY_S = 5.0
MAX_FORMER = 4096
# So many answers in a row that hold NaN or infinity are the adapter's fault.
MAX_NOT_FINITE = 3
# Loads, uses of what was not in memory, what was put out of it, answers that were not finite.
_TOTALS = ("loads_total", "misses_total", "evictions_total", "not_finite_total")


class Loader(Protocol):
    """Brings adapters into the host's memory, at all ranks."""

    async def prepare(self, version: int, source: str) -> AdapterFacts:
        """Load. Raises InvalidAdapter for files that are at fault; leaves nothing behind then."""
        ...

    async def discard(self, version: int) -> None:
        """Forget what was loaded; nobody uses it."""
        ...

    def pin(self, version: int, *, pinned: bool) -> None:
        """Let a version stay in its slot once it lies in one, or not."""
        ...


@dataclass(eq=False, slots=True)
class _Entry:
    """One version.

    facts:     of what is in memory; None = nothing is
    work:      the load, or the leaving, that is under way, and how far it is
    failure:   of the last load, or why it is used no longer, and since when
    num_not_finite:  answers in a row that were not
    used:      grows with each use
    is_ended:  it is served no longer
    """

    record: AdapterRecord
    facts: AdapterFacts | None = None
    work: asyncio.Task[None] | None = None
    phase: Literal["waiting", "loading", "leaving"] = "waiting"
    failure: RemoraError | None = None
    failed_at: float = 0.0
    num_users: int = 0
    num_uses: int = 0
    num_loads: int = 0
    num_not_finite: int = 0
    used: int = 0
    is_ended: bool = False

    @property
    def may_leave(self) -> bool:
        """Whether it is in memory and need not be."""
        is_free = not self.num_users and not (self.record.pinned and not self.is_ended)
        return self.facts is not None and self.work is None and is_free


@dataclass(slots=True)
class _LoadTicket:
    """A load that waits for room; `num_overtaken` requests have gone before it."""

    num_overtaken: int = 0


class AdapterCache:
    """The adapters of one replica. Make it on the event loop that uses it.

    max_loaded:   adapters in memory; one more for each load under way
    by_use:       whether the least recently used leaves first, not the one that came first
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
        self._entries: dict[int, _Entry] = {}
        self._current: dict[str, int] = {}
        self._former: OrderedDict[int, str] = OrderedDict()
        self._loads = asyncio.Semaphore(MAX_LOADS)
        self._turns: list[_LoadTicket] = []
        self._numbers = itertools.count(1)
        self._num_changes = 0
        self._totals = dict.fromkeys(_TOTALS, 0)
        self._woken = asyncio.Event()
        self._ending: set[asyncio.Task[None]] = set()

    # -- what is served ------------------------------------------------------------------------

    @property
    def names(self) -> list[str]:
        """What may be asked for."""
        return [name for name, version in self._current.items() if not self._is_broken(version)]

    @property
    def resident(self) -> list[str]:
        """Names of those in memory, the latest used first."""
        found = (self._entries[version] for version in self._current.values())
        loaded = [entry for entry in found if entry.facts is not None]
        loaded.sort(key=lambda entry: -entry.used)
        return [entry.record.name for entry in loaded]

    def version(self, name: str) -> int | None:
        """Return the version that a name means now; None = no adapter bears it."""
        return self._current.get(name)

    def reports(self, slots: Mapping[int, int] = MappingProxyType({})) -> tuple[AdapterReport, ...]:
        """Return what became of each version.

        slots:  of the versions that lie in one
        """
        return tuple(_report(entry, slots.get(v)) for v, entry in self._entries.items())

    @property
    def stats(self) -> dict[str, int]:
        """Return counters (see _TOTALS) and gauges."""
        entries = self._entries.values()
        return {
            **self._totals,
            "loaded": sum(entry.facts is not None for entry in entries),
            "used": sum(entry.num_users > 0 for entry in entries),
            "waiting": len(self._turns),
            "host_bytes": sum(entry.facts.num_bytes for entry in entries if entry.facts),
        }

    @property
    def num_changes(self) -> int:
        """How often something has come about that the manager may wait for."""
        return self._num_changes

    async def changed(self, since: int) -> None:
        """Wait until `num_changes` is another than `since`."""
        await self._until(lambda: self._num_changes != since)

    def adopt(self, desired: Desired) -> None:
        """Serve these from now on, and begin to load what is to be in memory."""
        records = {record.version: record for record in (*desired.active, *desired.staged)}
        for version, record in records.items():
            entry = self._entries.setdefault(version, _Entry(replace(record, pinned=False)))
            if record.pinned != entry.record.pinned:
                self._loader.pin(version, pinned=record.pinned)
            entry.record, entry.is_ended = record, False
        self._current = {record.name: record.version for record in desired.active}
        for version, entry in list(self._entries.items()):
            if version not in records:
                self._end(entry)
        for record in self._due(desired):
            self._begin(self._entries[record.version])
        self._trim()
        self._num_changes += 1
        self._wake()

    async def settled(self) -> None:
        """Wait until nothing is being loaded or put out of memory."""
        while works := {e.work for e in self._entries.values() if e.work} | self._ending:
            await asyncio.wait(works)

    def failures(self) -> list[tuple[AdapterRecord, RemoraError]]:
        """Return what could not be loaded."""
        return [(e.record, e.failure) for e in self._entries.values() if e.failure is not None]

    # -- for requests --------------------------------------------------------------------------

    @asynccontextmanager
    async def use(self, version: int) -> AsyncIterator[int]:
        """Hold an adapter, loaded first if need be; yields the version that is held.

        That is the newest of the name, should the one asked for have been replaced meanwhile.
        Raises UnknownModel once it is served no longer, Unavailable while it cannot be loaded.
        """
        entry = await self._enter(version)
        entry.num_users += 1
        entry.num_uses += 1
        self._totals["misses_total"] += entry.facts is None
        if self._by_use:
            entry.used = next(self._numbers)
        try:
            self._check(entry)
            while entry.facts is None:
                await asyncio.shield(self._begin(entry))
                self._check(entry)
            yield entry.record.version
            entry.num_not_finite = 0
        except NotFinite:
            self._distrust(entry)
            raise
        finally:
            entry.num_users -= 1
            if entry.is_ended:
                self._end(entry)
            self._trim()
            self._wake()

    async def _enter(self, version: int) -> _Entry:
        """Find the version to be used, once nobody who waits for room has waited too long."""
        entry = self._newest(version)
        while (turn := self._starved) is not None:
            await self._until(lambda turn=turn: turn not in self._turns)  # type: ignore[misc]
            entry = self._newest(version)
        if entry.facts is not None:
            for turn in self._turns:
                turn.num_overtaken += 1
        return entry

    @property
    def _starved(self) -> _LoadTicket | None:
        return next((turn for turn in self._turns if turn.num_overtaken >= MAX_OVERTAKEN), None)

    def _newest(self, version: int) -> _Entry:
        entry = self._entries.get(version)
        if entry is not None and not entry.is_ended:
            return entry
        name = self._former.get(version) if entry is None else entry.record.name
        current = self._current.get(name or "")
        if current is None:
            raise UnknownModel(
                f"The adapter {name or version!r} was unloaded while the request came.", "model"
            )
        return self._entries[current]

    def _check(self, entry: _Entry) -> None:
        """Raise why it cannot be used, unless its load is to be tried again."""
        retry_after_s = entry.failed_at + RETRY_S - self._clock()
        if entry.failure is None or retry_after_s <= 0:
            return
        if isinstance(entry.failure, InvalidAdapter):
            raise entry.failure
        raise Unavailable(
            f"The adapter {entry.record.name!r} could not be loaded: {entry.failure}",
            retry_after_s,
        )

    def _is_broken(self, version: int) -> bool:
        return isinstance(self._entries[version].failure, InvalidAdapter)

    def _distrust(self, entry: _Entry) -> None:
        """An answer was not finite: an adapter that makes one after the other is used no longer."""
        entry.num_not_finite += 1
        self._totals["not_finite_total"] += 1
        if entry.num_not_finite == MAX_NOT_FINITE:
            log.error("adapter %s makes answers that are not finite", entry.record.name)
            entry.failed_at = math.inf  # it is not tried again
            entry.failure = InvalidAdapter(
                f"the adapter {entry.record.name!r} from {entry.record.source} has made "
                f"{MAX_NOT_FINITE} answers in a row that were not finite, so it is used no longer; "
                "load another version of it under its name"
            )
            self._note(entry)

    # -- memory --------------------------------------------------------------------------------

    def _due(self, desired: Desired) -> Iterable[AdapterRecord]:
        """Return what is to be loaded without being asked for: what fits, pinned ones first."""
        num_there = sum(e.facts is not None or e.work is not None for e in self._entries.values())
        num_free = self._max_loaded - num_there
        for record in (*desired.staged, *sorted(desired.active, key=lambda r: not r.pinned)):
            entry = self._entries[record.version]
            if entry.facts is not None or entry.work is not None or entry.failure is not None:
                continue
            fits = num_free > 0 and not entry.num_loads
            if fits or record.pinned or record in desired.staged:
                num_free -= 1
                yield record

    def _begin(self, entry: _Entry) -> asyncio.Task[None]:
        """Return the work that is under way for a version; begins to load if there is none."""
        if entry.work is None:
            self._do(entry, self._load(entry), "waiting")
        assert entry.work is not None
        return entry.work

    def _do(
        self,
        entry: _Entry,
        work: Coroutine[Any, Any, None],
        phase: Literal["waiting", "leaving"],
    ) -> None:
        async def done() -> None:
            try:
                await work
            finally:
                entry.work = None
                self._note(entry)

        entry.phase = phase
        entry.work = asyncio.create_task(done(), name=f"remora-adapter-{entry.record.version}")

    async def _load(self, entry: _Entry) -> None:
        async with self._loads:
            await self._take_turn(entry)
            record, entry.phase, entry.failure = entry.record, "loading", None
            self._note(entry)
            try:
                facts = await self._loader.prepare(record.version, record.source)
                if record.digest not in ("", facts.digest):
                    await self._loader.discard(record.version)
                    raise InvalidAdapter(
                        f"the files of {record.source} have changed since the adapter "
                        f"{record.name!r} was loaded; load it again under its name"
                    )
            except RemoraError as error:
                entry.failure, entry.failed_at = error, self._clock()
                log.warning("adapter %s could not be loaded: %s", record.name, error)
                return
            except Exception as error:  # a boundary: told to whoever waits for the adapter
                log.exception("adapter %s could not be loaded", record.name)
                entry.failure, entry.failed_at = Unavailable(str(error)), self._clock()
                return
        entry.facts = facts
        entry.num_loads += 1
        self._totals["loads_total"] += 1
        if not self._by_use:
            entry.used = next(self._numbers)
        self._trim()

    async def _take_turn(self, entry: _Entry) -> None:
        """Wait until something may leave memory for this one, if it is full."""
        if self._has_room():
            return
        turn = _LoadTicket()
        self._turns.append(turn)
        try:
            await self._until(lambda: self._turns[0] is turn and self._has_room())
        finally:
            self._turns.remove(turn)
            self._wake()

    def _has_room(self) -> bool:
        loading = sum(
            entry.work is not None and entry.phase == "loading" and entry.facts is None
            for entry in self._entries.values()
        )
        staying = sum(
            entry.facts is not None and not entry.may_leave for entry in self._entries.values()
        )
        return loading + staying < self._max_loaded

    def _trim(self) -> None:
        """Put out of memory what is there beyond the limit and may leave."""
        loaded = [entry for entry in self._entries.values() if entry.facts is not None]
        spare = sorted((e for e in loaded if e.may_leave), key=lambda entry: entry.used)
        for entry in spare[: max(0, len(loaded) - self._max_loaded)]:
            self._totals["evictions_total"] += 1
            self._leave(entry)

    def _leave(self, entry: _Entry) -> None:
        entry.facts = None
        self._do(entry, self._loader.discard(entry.record.version), "leaving")

    def _end(self, entry: _Entry) -> None:
        """Serve a version no longer; it is forgotten once nobody uses it."""
        version = entry.record.version
        entry.is_ended = True
        self._former[version] = entry.record.name
        self._former.move_to_end(version)
        while len(self._former) > MAX_FORMER:
            self._former.popitem(last=False)
        if not entry.num_users:
            ending = asyncio.create_task(self._forget(entry))
            self._ending.add(ending)
            ending.add_done_callback(self._ending.discard)

    async def _forget(self, entry: _Entry) -> None:
        """Forget an ended version after whatever is under way for it, if nobody uses it then."""
        while entry.is_ended and not entry.num_users:
            if entry.work is not None:
                await asyncio.wait({entry.work})
            elif entry.facts is not None:
                self._leave(entry)
            else:
                if self._entries.get(entry.record.version) is entry:  # it may have come back since
                    del self._entries[entry.record.version]
                    self._note(entry)
                return

    # -- telling -------------------------------------------------------------------------------

    def _note(self, entry: _Entry) -> None:
        """The state of a version has changed. That one served leaves memory is nobody's news."""
        is_served = self._current.get(entry.record.name) == entry.record.version
        if not is_served or entry.failure is not None:
            self._num_changes += 1
        self._wake()

    def _wake(self) -> None:
        self._woken.set()
        self._woken = asyncio.Event()

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await self._woken.wait()


def _state(entry: _Entry) -> State:
    if entry.is_ended:
        return "ending"
    if entry.work is not None and entry.phase != "leaving":
        return entry.phase
    if entry.failure is not None:
        return "failed"
    return "known" if entry.facts is None else "loaded"


def _report(entry: _Entry, slot: int | None) -> AdapterReport:
    facts = entry.facts
    return AdapterReport(
        version=entry.record.version,
        name=entry.record.name,
        state=_state(entry),
        reason="" if entry.failure is None else str(entry.failure),
        is_fault=isinstance(entry.failure, InvalidAdapter),
        slot=slot,
        num_users=entry.num_users,
        num_uses=entry.num_uses,
        num_loads=entry.num_loads,
        num_bytes=0 if facts is None else facts.num_bytes,
        max_rank=0 if facts is None else facts.max_rank,
        digest="" if facts is None else facts.digest,
    )
