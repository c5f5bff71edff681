"""Holds requests while a model has no replica. The check for replicas is a parameter."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from enum import StrEnum
from typing import Any

from remora.configs.errors import Unavailable
from remora.deployments.scoped_task import scoped_task

# A running replica takes a request much sooner; after this the controller is asked for the phase.
PATIENCE_S = 0.3
LOOK_S = 0.5
REPORT_S = 3.0
RETRY_AFTER_S = 5.0


class Phase(StrEnum):
    """How far the first replica has come."""

    PLACING = "placing"
    LOADING = "loading"
    READY = "ready"


class WaitQueue:
    """The requests for one model that wait for its first replica.

    look:         returns the phase of the first replica; None = unknown at the moment
    max_held:     most requests at a time; more are refused
    max_wait_s:   longest wait of a request
    """

    def __init__(
        self,
        look: Callable[[], Awaitable[Phase | None]],
        *,
        max_held: int,
        max_wait_s: float,
        patience_s: float = PATIENCE_S,
        look_s: float = LOOK_S,
        report_s: float = REPORT_S,
    ) -> None:
        self.num_held = 0
        self._look = look
        self._max_held = max_held
        self.max_wait_s = max_wait_s
        self._patience_s = patience_s
        self._look_s = look_s
        self._answer_s = max(look_s, patience_s)
        self._report_s = report_s
        self._time = asyncio.get_running_loop().time
        self._phase = Phase.READY
        self._looked_at = -look_s
        self._looking: asyncio.Task[None] | None = None

    async def phase(self) -> Phase:
        """Return the phase of the first replica, looked up at most every `look_s`."""
        if self._time() - self._looked_at >= self._look_s:
            if self._looking is None:
                self._looking = asyncio.create_task(self._look_anew())
            await asyncio.shield(self._looking)  # shared by all callers
        return self._phase

    async def _look_anew(self) -> None:
        try:
            self._phase = await self._look() or self._phase
            self._looked_at = self._time()
        finally:
            self._looking = None

    async def _phase_or_last(self, taken: asyncio.Future[None]) -> Phase:
        """Return the phase; the last one known if `taken` or the time limit ends first."""
        async with scoped_task(self.phase()) as looking:
            both: set[asyncio.Future[Any]] = {taken, looking}
            await asyncio.wait(both, timeout=self._answer_s, return_when=asyncio.FIRST_COMPLETED)
            return looking.result() if looking.done() else self._phase

    async def wait_for(
        self, taken: asyncio.Future[None], on_phase: Callable[[Phase], Awaitable[None]]
    ) -> None:
        """Wait until a replica has taken a request. Raises Unavailable, and what `taken` raises.

        on_phase:  called with the phase when the request begins to wait, and periodically
        """
        patience_s = self._patience_s if self._phase is Phase.READY else 0.0
        await asyncio.wait({taken}, timeout=patience_s)
        if not taken.done():
            # Requests for busy replicas wait in Serve's queue, not here.
            while await self._phase_or_last(taken) is Phase.READY and not taken.done():
                await asyncio.wait({taken}, timeout=self._look_s)
        if not taken.done():
            await self._hold(taken, on_phase)
        await taken

    async def _hold(
        self, taken: asyncio.Future[None], on_phase: Callable[[Phase], Awaitable[None]]
    ) -> None:
        if self.num_held >= self._max_held:
            raise Unavailable(
                f"The model has no replica yet and {self.num_held} requests wait for one. "
                "Please try again.",
                RETRY_AFTER_S,
                limit="max_held_requests",
            )
        self.num_held += 1
        deadline = self._time() + self.max_wait_s
        reported_at, reported = 0.0, None
        try:
            while not taken.done():
                now, phase = self._time(), await self._phase_or_last(taken)
                if now >= deadline:
                    message = f"No replica became ready within {self.max_wait_s:g} s."
                    raise Unavailable(message, RETRY_AFTER_S, limit="hold_timeout_s")
                if phase is not reported or now - reported_at >= self._report_s:
                    reported_at, reported = now, phase
                    await on_phase(phase)
                await asyncio.wait({taken}, timeout=min(self._look_s, deadline - now))
        finally:
            self.num_held -= 1
