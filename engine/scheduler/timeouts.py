"""Which sequences have waited, or run, for longer than the operator allows.

Each sequence's own clock starts when it is first seen waiting or running. A preempted sequence
waits anew, and its running time goes on. Knows no requests, steps or text.
"""

from __future__ import annotations

from collections.abc import Iterable

from remora.engine.scheduler.sequence import Sequence
from remora.engine.types import RowFault

CHECK_INTERVAL_S = 0.05


class Timeouts:
    """The clocks of waiting and running sequences.

    waiting_s, running_s:  limits in seconds; None = no limit
    """

    def __init__(self, waiting_s: float | None, running_s: float | None) -> None:
        self._waiting_s = waiting_s
        self._running_s = running_s
        self._waiting: dict[Sequence, float] = {}
        self._running: dict[Sequence, float] = {}
        self._checked_s: float | None = None

    def restart(self) -> None:
        """Start all clocks anew, after a pause."""
        self._waiting, self._running, self._checked_s = {}, {}, None

    def expired(
        self, waiting: Iterable[Sequence], running: Iterable[Sequence], now_s: float
    ) -> list[tuple[Sequence, RowFault]]:
        """Return the sequences over a limit, each with the reason for which it ends."""
        if self._checked_s is not None and now_s - self._checked_s < CHECK_INTERVAL_S:
            return []
        self._checked_s = now_s
        found: list[tuple[Sequence, RowFault]] = []
        queue = list(waiting)
        if self._waiting_s is not None:
            self._waiting = {seq: self._waiting.get(seq, now_s) for seq in queue}
            found += _over(self._waiting, self._waiting_s, now_s, "waited", "waiting_timeout_s")
        if self._running_s is not None:
            preempted = [seq for seq in queue if seq in self._running]
            started = [*running, *preempted]
            self._running = {seq: self._running.get(seq, now_s) for seq in started}
            found += _over(self._running, self._running_s, now_s, "ran", "running_timeout_s")
        return found


def _over(
    since: dict[Sequence, float], limit_s: float, now_s: float, verb: str, name: str
) -> list[tuple[Sequence, RowFault]]:
    fault = RowFault(f"the request {verb} for {limit_s:g} s (limits.{name})", limit=name)
    return [(seq, fault) for seq, start_s in since.items() if now_s - start_s > limit_s]
