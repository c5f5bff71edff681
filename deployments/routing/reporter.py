"""The replica's side of routing: makes reports of its load, cached pages and adapters.

Serve's controller requests a report every `routing.stats_period_s` and sends it to all routers if
it differs from the last. An idle replica therefore repeats its last report.
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

# A report does not wait longer for a step; it then repeats the last pages.
MAX_WAIT_S = 0.25


class Reporter:
    """Makes the reports of one replica.

    resident:  returns the names of the adapters in host memory; the first MAX_ADAPTERS count
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
        self._lookup: asyncio.Task[bytes] | None = None
        self._seen: EngineStats | None = None
        self._last = Report(made_at_s=clock())

    @classmethod
    def configured(
        cls,
        client: EngineClient,
        config: ServeConfig,
        resident: Callable[[], Sequence[str]] = lambda: (),
    ) -> Reporter:
        """Return the reporter of a replica.

        It reports pages for the policy prefix, and adapters (`resident`) for lora.
        """
        routing = config.routing
        return cls(
            client,
            max_pages=routing.max_reported_pages * (routing.policy == "prefix"),
            resident=resident if routing.policy == "lora" else lambda: (),
        )

    async def stats(self) -> dict[str, Any]:
        """Return the newest report as Serve's routing stats."""
        made_at_s, stats = self._clock(), self._client.stats()
        pages = await self._pages()
        # Sorted, so that the order of use does not change the report.
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
        if self._lookup is None:
            self._lookup = asyncio.create_task(self._client.page_hashes(self._max_pages))
        lookup = self._lookup  # perhaps started by another call
        done, _ = await asyncio.wait({lookup}, timeout=MAX_WAIT_S)
        if not done:
            return self._last.page_hashes
        if self._lookup is lookup:
            self._lookup = None
        return lookup.result()
