"""The shutdown of a gateway: open requests may end, then the rest gets an error.

Serve stops a gateway as it stops a replica, see `deployments/draining.py`. Its drain time is the
longest of its models.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from remora.configs.errors import Unavailable
from remora.deployments.draining import POLL_S
from remora.deployments.scoped_task import scoped_task

STOPPING = "This server is being stopped. Please try again."

log = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")


class GatewayShutdown:
    """Ends a gateway's open requests in time.

    is_stopping:  returns whether Serve is stopping the gateway; None = unknown, so never
    drain_s:      time for open requests after that
    """

    def __init__(self, is_stopping: Callable[[], bool] | None, drain_s: float) -> None:
        self._is_stopping = is_stopping or (lambda: False)
        self._drain_s = drain_s
        self._over = asyncio.Event()
        self._watching = None if is_stopping is None else asyncio.create_task(self._watch())

    def check(self) -> None:
        """Raise Unavailable if the gateway is being stopped."""
        if self._is_stopping():
            raise Unavailable(STOPPING)

    async def before(self, work: Coroutine[Any, Any, ResultT]) -> ResultT:
        """Return the result of `work`. Cancels it and raises Unavailable after the drain time."""
        async with scoped_task(work) as task, scoped_task(self._over.wait()) as over:
            await asyncio.wait({task, over}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise Unavailable(STOPPING)
            return task.result()

    async def _watch(self) -> None:
        while not self._is_stopping():  # noqa: ASYNC110 (Serve sets no event)
            await asyncio.sleep(POLL_S)
        log.info("gateway: stopping; open requests have %g s to end", self._drain_s)
        await asyncio.sleep(max(0.0, self._drain_s - POLL_S))
        self._over.set()
