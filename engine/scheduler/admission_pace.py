"""When a busy engine looks at those that wait: every so many steps, and seconds.

Looking seldom leaves running outputs in peace; whoever waits gathers with others meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable


class AdmissionPace:
    """Counts steps and seconds since the last look."""

    def __init__(
        self, *, interval_steps: int, interval_s: float, clock: Callable[[], float]
    ) -> None:
        self._interval_steps = interval_steps
        self._interval_s = interval_s
        self._clock = clock
        self._num_steps = 0
        self._last_look = clock()

    def is_due(self, *, is_busy: bool) -> bool:
        """Return whether this step looks; asked once a step. Nobody waits for an idle engine."""
        self._num_steps += 1
        if is_busy and self._num_steps < self._interval_steps:
            return False
        if self._interval_s:
            now = self._clock()
            if is_busy and now - self._last_look < self._interval_s:
                return False
            self._last_look = now
        self._num_steps = 0
        return True
