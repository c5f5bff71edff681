"""Keeps a replica's adapters as the manager wants them, and reports their state at every change.

Each call sends what changed at the replica since the last report and receives what changed in the
registry. A manager that lacks the last report asks for the complete state. While the manager is
away the replica serves what it has, and calls again until the manager answers.
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
# Changes within GATHER_S share one report; loads that end within SOON_S need none of their own.
GATHER_S = 0.02
SOON_S = 0.05


class AdapterSync:
    """Keeps an AdapterCache in sync with the manager.

    replica:  its name
    slots:    returns the engine's slot of each lora_id that has one
    end:      aborts the requests of a lora_id
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
        # The adapters as last reported; None = the manager needs a complete report.
        self._reported: Mapping[int, AdapterReport] | None = None
        self._reported_at = 0  # num_changes of the cache at the last report
        self._num_reports = 0
        self._running: asyncio.Task[None] | None = None

    async def begin(self) -> None:
        """Adopt the manager's adapters, load what fits, and keep in sync from then on.

        Raises ConfigError if an adapter of the configuration cannot be served.
        """
        await self._adopt(await self._exchange(waits=False))
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
        """Raise the error that ended the synchronisation, if one did."""
        if self._running is not None and self._running.done():
            self._running.result()

    def close(self) -> None:
        """Stop; from any thread."""
        if self._running is not None:
            with suppress(RuntimeError):  # the event loop has been closed
                self._running.get_loop().call_soon_threadsafe(self._running.cancel)

    async def _run(self) -> None:
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(SOON_S):
                    await self._adapter_cache.settled()
            async with scoped_task(self._exchange(waits=True)) as exchange:
                await self._report_until(exchange)
                await self._adopt(exchange.result())

    async def _report_until(self, exchange: asyncio.Task[Desired]) -> None:
        """Report changes that the manager may wait for, until the long poll is answered."""
        while not exchange.done():
            async with scoped_task(self._adapter_cache.changed(self._reported_at)) as changing:
                await asyncio.wait({exchange, changing}, return_when=asyncio.FIRST_COMPLETED)
            if not exchange.done():
                await asyncio.sleep(GATHER_S)
                if self._reported_at != self._adapter_cache.num_changes:
                    await self._exchange(waits=False)

    async def _exchange(self, *, waits: bool) -> Desired:
        """Report changes and return the registry's; retry while the manager is away.

        waits:  whether the manager may delay the answer until it has a change
        """
        while True:
            report = await self._report()
            try:
                desired = await self._manager.sync(self._replica, report, waits=waits)
            except Exception as error:  # a boundary: another manager is being started
                log.warning("LoRAManager: no answer: %s", error)
                await asyncio.sleep(RETRY_S)
                continue
            if not desired.asks:
                return desired
            self._reported = None

    async def _report(self) -> ReplicaReport:
        """Return what changed since the last report, or the complete state."""
        self._reported_at = self._adapter_cache.num_changes
        slots = await self._slots()
        current = {each.lora_id: each for each in self._adapter_cache.reports(slots)}
        is_complete = self._reported is None
        reported = self._reported or {}
        report = ReplicaReport(
            number=self._num_reports + 1,
            follows=0 if is_complete else self._num_reports,
            revision=self._desired.revision,
            adapters=tuple(each for each in current.values() if reported.get(each.lora_id) != each),
            gone=frozenset(reported.keys() - current.keys()),
            records=self._desired.active if is_complete else (),
            stats=self._adapter_cache.stats,
        )
        self._num_reports, self._reported = report.number, current
        return report

    async def _adopt(self, desired: Desired) -> None:
        if desired.revision != self._desired.revision:
            self._desired = desired.applied_to(self._desired)
            self._adapter_cache.adopt(self._desired)
        for lora_id in desired.ended:
            await self._end(lora_id)
