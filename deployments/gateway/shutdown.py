"""The end of a gateway: what is open then is told so, shortly before it would be cut off.

Serve stops a gateway as it stops a replica, see `deployments/draining.py`. What the gateway carries
has until then to come to its end; the gateway stays for as long as the most patient of its models.
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


class Ending:
    """Whether a gateway is being stopped.

    is_stopping:  tells it; None where nothing does
    drain_s:      how long what is open may go on after that
    """

    def __init__(self, is_stopping: Callable[[], bool] | None, drain_s: float) -> None:
        self._is_stopping = is_stopping or (lambda: False)
        self._drain_s = drain_s
        self._over = asyncio.Event()
        self._watching = None if is_stopping is None else asyncio.create_task(self._watch())

    def check(self) -> None:
        """Raise Unavailable if nothing new should come here."""
        if self._is_stopping():
            raise Unavailable(STOPPING)

    async def before(self, work: Coroutine[Any, Any, ResultT]) -> ResultT:
        """Return what `work` returns. Raises Unavailable, and cancels it, when time is up."""
        async with scoped_task(work) as task, scoped_task(self._over.wait()) as over:
            await asyncio.wait({task, over}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise Unavailable(STOPPING)
            return task.result()

    async def _watch(self) -> None:
        while not self._is_stopping():  # noqa: ASYNC110 (Serve sets no event)
            await asyncio.sleep(POLL_S)
        log.info("stopping; what is open has %g s to end", self._drain_s)
        await asyncio.sleep(max(0.0, self._drain_s - POLL_S))
        self._over.set()
