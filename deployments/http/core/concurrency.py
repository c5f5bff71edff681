"""Places for calls that run at once: who finds none is refused, or waits in order of arrival.

Used on one event loop. Knows no requests.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from remora.configs.errors import QueueFull, Unavailable

RETRY_AFTER_S = 1.0


class ConcurrencyLimiter:
    """As many as there may be at the moment; the number may change while some are taken."""

    def __init__(self) -> None:
        self._num_taken = 0
        self._most: int | None = None
        self._waiting: deque[asyncio.Future[None]] = deque()

    @asynccontextmanager
    async def taken(self, most: int | None, *, wait_s: float | None) -> AsyncIterator[None]:
        """Hold one of at most so many places (None: any number) during the block.

        wait_s:  seconds to wait for one; None = not at all
        Raises QueueFull without a place, Unavailable after having waited in vain.
        """
        if most is not None:
            self._most = most
        await self._enter(most, wait_s)
        try:
            yield
        finally:
            self._num_taken -= 1
            self._let_in(self._most)

    async def _enter(self, most: int | None, wait_s: float | None) -> None:
        if most is None or (self._num_taken < most and not self._waiting):
            self._num_taken += 1
            return
        if wait_s is None:
            raise QueueFull(
                f"{self._num_taken} requests are being answered; the limit is {most}.",
                RETRY_AFTER_S,
                limit="max_concurrent_requests",
            )
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            await asyncio.wait({turn}, timeout=wait_s)
        except asyncio.CancelledError:
            if turn.done():  # it was ours, and is the next one's
                self._num_taken -= 1
                self._let_in(self._most)
            raise
        finally:
            if not turn.done():
                self._waiting.remove(turn)
        if not turn.done():
            message = f"The request waited for {wait_s:g} s without its turn."
            raise Unavailable(message, 5.0, limit="queue_timeout_s")

    def _let_in(self, most: int | None) -> None:
        while self._waiting and (most is None or self._num_taken < most):
            self._waiting.popleft().set_result(None)
            self._num_taken += 1
