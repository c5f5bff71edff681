"""The replica's side of routing: reports of its load, its cached pages and its adapters.

Serve's controller asks each replica for one every `routing.stats_period_s` and passes it on to all
routers, if it differs from the last. So a replica where nothing happens repeats its last report.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

from remora.configs.schema import ServeConfig
from remora.deployments.routing.report import MAX_ADAPTERS, Report
from remora.engine.protocols import EngineClient
from remora.engine.types import EngineStats

# A long step must not hold the report up: then it goes without the newest pages.
MAX_WAIT_S = 0.25


class Reporter:
    """Makes the reports of one replica.

    resident:  names of the adapters in the host's memory; of more than can be told the first count
    """

    def __init__(
        self,
        client: EngineClient,
        *,
        max_pages: int,
        resident: Callable[[], Sequence[str]] = lambda: (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._max_pages = max_pages
        self._resident = resident
        self._clock = clock
        self._asking: asyncio.Task[bytes] | None = None
        self._seen: EngineStats | None = None
        self._last = Report(made_at_s=clock())

    @classmethod
    def configured(
        cls,
        client: EngineClient,
        config: ServeConfig,
        resident: Callable[[], Sequence[str]] = lambda: (),
    ) -> Reporter:
        """Return the reporter of a replica, which tells what the policy goes by.

        That is pages for prefix, and adapters (`resident`) for lora.
        """
        routing = config.routing
        return cls(
            client,
            max_pages=routing.max_reported_pages * (routing.policy == "prefix"),
            resident=resident if routing.policy == "lora" else lambda: (),
        )

    async def stats(self) -> dict[str, Any]:
        """Return the newest report as Serve carries it."""
        made_at_s, stats = self._clock(), self._client.stats()
        pages = await self._pages()
        # In an order of their own: who was used last is no news.
        adapters = tuple(sorted(self._resident()[:MAX_ADAPTERS]))
        held = self._last.page_hashes, self._last.adapters
        if stats != self._seen or (pages, adapters) != held:
            self._seen = stats
            self._last = Report(
                made_at_s=made_at_s,
                num_queued_tokens=stats.num_queued_tokens,
                num_running=stats.num_running,
                num_waiting=stats.num_waiting,
                kv_usage=round(stats.kv_usage, 3),
                page_hashes=pages,
                adapters=adapters,
            )
        return self._last.as_stats()

    async def _pages(self) -> bytes:
        """Return the cached pages, or those of the last report while the engine is busy."""
        if not self._max_pages:
            return b""
        if self._asking is None:
            self._asking = asyncio.create_task(self._client.page_hashes(self._max_pages))
        asking = self._asking  # of another call, maybe
        done, _ = await asyncio.wait({asking}, timeout=MAX_WAIT_S)
        if not done:
            return self._last.page_hashes
        if self._asking is asking:
            self._asking = None
        return asking.result()
