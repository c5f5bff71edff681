"""The replica's side of routing: reports of its load and its cached pages.

Serve's controller asks each replica for one every `routing.stats_period_s` and passes it on to all
routers, if it differs from the last. So a replica where nothing happens repeats its last report.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from remora.configs.schema import ServeConfig
from remora.deployments.routing.report import Report
from remora.engine.protocols import EngineClient
from remora.engine.types import EngineStats

# A long step must not hold the report up: then it goes without the newest pages.
MAX_WAIT_S = 0.25


class Reporter:
    """Makes the reports of one replica."""

    def __init__(
        self,
        client: EngineClient,
        *,
        max_pages: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._max_pages = max_pages
        self._clock = clock
        self._asking: asyncio.Task[bytes] | None = None
        self._seen: EngineStats | None = None
        self._last = Report(made_at_s=clock())

    @classmethod
    def configured(cls, client: EngineClient, config: ServeConfig) -> Reporter:
        """Return the reporter of a replica; pages are reported only for the policy prefix."""
        routing = config.routing
        return cls(client, max_pages=routing.max_reported_pages * (routing.policy == "prefix"))

    async def stats(self) -> dict[str, Any]:
        """Return the newest report as Serve carries it."""
        made_at_s, stats = self._clock(), self._client.stats()
        pages = await self._pages()
        if stats != self._seen or pages != self._last.page_hashes:
            self._seen = stats
            self._last = Report(
                made_at_s=made_at_s,
                num_queued_tokens=stats.num_queued_tokens,
                num_running=stats.num_running,
                num_waiting=stats.num_waiting,
                kv_usage=round(stats.kv_usage, 3),
                page_hashes=pages,
            )
        return self._last.as_stats()

    async def _pages(self) -> bytes:
        """Return the cached pages, or those of the last report while the engine is busy."""
        if not self._max_pages:
            return b""
        if self._asking is None:
            self._asking = asyncio.create_task(self._client.page_hashes(self._max_pages))
        done, _ = await asyncio.wait({self._asking}, timeout=MAX_WAIT_S)
        if not done:
            return self._last.page_hashes
        asked, self._asking = self._asking, None
        return asked.result()
