"""A replica and the manager: what is wanted comes, what became of it goes, at every change.

While the manager is away the replica serves what it has, and asks again until there is one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import replace

from remora.configs.errors import ConfigError, InvalidAdapter
from remora.deployments.adapters.handle import Manager
from remora.lora.catalogue import Catalogue
from remora.lora.records import Desired, ReplicaReport

log = logging.getLogger(__name__)

RETRY_S = 1.0
# States that pass at once are not worth telling of one by one.
GATHER_S = 0.02


class AdapterSync:
    """Keeps a catalogue as the manager wants it.

    replica:  its name
    slots:    asks the engine which version lies in which slot
    end:      aborts the requests of a version
    """

    def __init__(
        self,
        catalogue: Catalogue,
        manager: Manager,
        replica: str,
        *,
        slots: Callable[[], Awaitable[Mapping[int, int]]],
        end: Callable[[int], Awaitable[None]],
    ) -> None:
        self._catalogue = catalogue
        self._manager = manager
        self._replica = replica
        self._slots = slots
        self._end = end
        self._desired = Desired(revision=0)
        self._running: asyncio.Task[None] | None = None

    async def begin(self) -> None:
        """Take up what is wanted, load what fits, and go on from there.

        Raises ConfigError if an adapter of the configuration cannot be served.
        """
        await self._take_up(await self._ask(waits=False))
        await self._catalogue.settled()
        faults = [
            str(failure)
            for record, failure in self._catalogue.failures()
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
            # One exchange always comes to its end, however fast things change here.
            seen = self._catalogue.num_changes
            await self._take_up(await self._ask(waits=False))
            waiting = asyncio.create_task(self._ask(waits=True))
            changing = asyncio.create_task(self._catalogue.changed(seen))
            try:
                await asyncio.wait({waiting, changing}, return_when=asyncio.FIRST_COMPLETED)
                if waiting.done():
                    await self._take_up(waiting.result())
                else:
                    await asyncio.sleep(GATHER_S)
            finally:
                waiting.cancel()
                changing.cancel()

    async def _ask(self, *, waits: bool) -> Desired:
        """Tell what is here, and hear what is wanted; waits for a manager that is away.

        waits:  whether an answer without news may take its time
        """
        while True:
            try:
                return await self._manager.sync(self._replica, await self._report(), waits=waits)
            except Exception as error:  # a boundary: another manager is being started
                log.warning("the LoRAManager does not answer: %s", error)
                await asyncio.sleep(RETRY_S)

    async def _report(self) -> ReplicaReport:
        slots = await self._slots()
        adapters = self._catalogue.reports()
        return ReplicaReport(
            revision=self._desired.revision,
            adapters=tuple(replace(each, slot=slots.get(each.version)) for each in adapters),
            records=self._desired.active,
            stats=self._catalogue.stats,
        )

    async def _take_up(self, desired: Desired) -> None:
        if desired.revision != self._desired.revision:
            self._desired = desired
            self._catalogue.adopt(desired)
        for version in desired.ended:
            await self._end(version)
