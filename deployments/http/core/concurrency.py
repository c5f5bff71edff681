"""Limit on concurrent requests: excess requests are refused, or wait in order of arrival.

Used on one event loop. This module does not know requests.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from remora.configs.errors import QueueFull, Unavailable

RETRY_AFTER_S = 1.0


class ConcurrencyLimiter:
    """Counter of the slots in use; the limit may change at any time."""

    def __init__(self) -> None:
        self._num_taken = 0
        self._most: int | None = None
        self._waiting: deque[asyncio.Future[None]] = deque()

    @asynccontextmanager
    async def taken(self, most: int | None, *, wait_s: float | None) -> AsyncIterator[None]:
        """Hold one of `most` slots (None: any number) during the block.

        wait_s:  seconds to wait for a slot; None = do not wait

        Raises QueueFull if no slot is free, Unavailable if none is free after `wait_s`.
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
            if turn.done():  # the slot was granted: pass it on
                self._num_taken -= 1
                self._let_in(self._most)
            raise
        finally:
            if not turn.done():
                self._waiting.remove(turn)
        if not turn.done():
            message = f"Queue timeout: the request waited {wait_s:g} s (engine.queue_timeout_s)."
            raise Unavailable(message, 5.0, limit="queue_timeout_s")

    def _let_in(self, most: int | None) -> None:
        while self._waiting and (most is None or self._num_taken < most):
            self._waiting.popleft().set_result(None)
            self._num_taken += 1
