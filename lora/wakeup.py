"""Waiting on one event loop for a condition over state that other tasks change."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress


class Wakeup:
    """Wakes all waiting tasks after a change; each checks its own condition again."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def wake(self) -> None:
        """Let every waiting task check its condition."""
        self._event.set()
        self._event = asyncio.Event()

    async def until(
        self,
        condition: Callable[[], bool],
        timeout_s: float | None = None,
        *,
        recheck_s: float | None = None,
    ) -> bool:
        """Wait for a condition; return whether it holds.

        recheck_s:  also check this often, for changes that wake no task
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not condition():
                    with suppress(TimeoutError):
                        async with asyncio.timeout(recheck_s):
                            await self._event.wait()
                return True
        return condition()
