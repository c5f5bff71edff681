"""A replica and the manager: what is wanted comes, what became of it goes, at every change.

Reports tell what has changed since the last one, and everything to a manager that lacks that one.

While the manager is away the replica serves what it has, and asks again until there is one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress

from remora.configs.errors import ConfigError, InvalidAdapter
from remora.deployments.adapters.manager_handle import Manager
from remora.deployments.scoped_task import scoped_task
from remora.lora.adapter_cache import AdapterCache
from remora.lora.records import AdapterReport, Desired, ReplicaReport

log = logging.getLogger(__name__)

RETRY_S = 1.0
# States that pass at once are not worth telling of one by one.
GATHER_S = 0.02
SOON_S = 0.05


class AdapterSync:
    """Keeps a catalogue as the manager wants it.

    replica:  its name
    slots:    asks the engine which version lies in which slot
    end:      aborts the requests of a version
    """

    def __init__(
        self,
        adapter_cache: AdapterCache,
        manager: Manager,
        replica: str,
        *,
        slots: Callable[[], Awaitable[Mapping[int, int]]],
        end: Callable[[int], Awaitable[None]],
    ) -> None:
        self._adapter_cache = adapter_cache
        self._manager = manager
        self._replica = replica
        self._slots = slots
        self._end = end
        self._desired = Desired(revision=0)
        # What the manager has been told of each version, and when, by the catalogue's changes.
        self._told: Mapping[int, AdapterReport] = {}
        self._told_at = 0
        self._number = 0
        self._is_known = False
        self._running: asyncio.Task[None] | None = None

    async def begin(self) -> None:
        """Take up what is wanted, load what fits, and go on from there.

        Raises ConfigError if an adapter of the configuration cannot be served.
        """
        await self._take_up(await self._exchange(waits=False))
        await self._adapter_cache.settled()
        faults = [
            str(failure)
            for record, failure in self._adapter_cache.failures()
            if record.owner == "config" and isinstance(failure, InvalidAdapter)
        ]
        if faults:
            raise ConfigError("\n".join(faults))
        self._running = asyncio.create_task(self._run(), name="remora-adapters")

    def check(self) -> None:
        """Raise what has ended the exchange, which nothing should."""
        if self._running is not None and self._running.done():
            self._running.result()

    def close(self) -> None:
        """End the exchange; from any thread."""
        if self._running is not None:
            with suppress(RuntimeError):  # the event loop has been closed
                self._running.get_loop().call_soon_threadsafe(self._running.cancel)

    async def _run(self) -> None:
        while True:
            # What is soon done is told together with what is known already.
            with suppress(TimeoutError):
                async with asyncio.timeout(SOON_S):
                    await self._adapter_cache.settled()
            async with scoped_task(self._exchange(waits=True)) as hearing:
                await self._tell_until(hearing)
                await self._take_up(hearing.result())

    async def _tell_until(self, hearing: asyncio.Task[Desired]) -> None:
        """Tell what comes about here that the manager may wait for, until that has news."""
        while not hearing.done():
            async with scoped_task(self._adapter_cache.changed(self._told_at)) as changing:
                await asyncio.wait({hearing, changing}, return_when=asyncio.FIRST_COMPLETED)
            if not hearing.done():
                await asyncio.sleep(GATHER_S)
                if self._told_at != self._adapter_cache.num_changes:
                    await self._exchange(waits=False)

    async def _exchange(self, *, waits: bool) -> Desired:
        """Tell what is here, and hear what is wanted; waits for a manager that is away.

        waits:  whether an answer without news may take its time
        """
        while True:
            report = await self._report()
            try:
                desired = await self._manager.sync(self._replica, report, waits=waits)
            except Exception as error:  # a boundary: another manager is being started
                log.warning("the LoRAManager does not answer: %s", error)
                await asyncio.sleep(RETRY_S)
                continue
            if not desired.asks:
                return desired
            self._told, self._is_known = {}, False

    async def _report(self) -> ReplicaReport:
        """Return what has changed since the last report, or everything."""
        self._told_at = self._adapter_cache.num_changes
        slots = await self._slots()
        now = {each.version: each for each in self._adapter_cache.reports(slots)}
        report = ReplicaReport(
            number=self._number + 1,
            follows=self._number if self._is_known else 0,
            revision=self._desired.revision,
            adapters=tuple(each for v, each in now.items() if self._told.get(v) != each),
            gone=frozenset(self._told.keys() - now.keys()),
            records=() if self._is_known else self._desired.active,
            stats=self._adapter_cache.stats,
        )
        self._number, self._is_known = report.number, True
        self._told = now
        return report

    async def _take_up(self, desired: Desired) -> None:
        if desired.revision != self._desired.revision:
            self._desired = desired.since(self._desired)
            self._adapter_cache.adopt(self._desired)
        for version in desired.ended:
            await self._end(version)
