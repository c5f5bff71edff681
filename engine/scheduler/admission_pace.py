"""How often a busy engine admits waiting sequences: at intervals of steps and seconds.

Longer intervals interrupt running outputs less, and prompts start in larger groups.
"""

from __future__ import annotations

from collections.abc import Callable


class AdmissionPace:
    """Counts steps and seconds since the last admission."""

    def __init__(
        self, *, interval_steps: int, interval_s: float, clock: Callable[[], float]
    ) -> None:
        self._interval_steps = interval_steps
        self._interval_s = interval_s
        self._clock = clock
        self._num_steps = 0
        self._last_s = clock()

    def is_due(self, *, is_busy: bool) -> bool:
        """Return whether this step admits; call it once a step. An idle engine always admits."""
        self._num_steps += 1
        if is_busy and self._num_steps < self._interval_steps:
            return False
        if self._interval_s:
            now = self._clock()
            if is_busy and now - self._last_s < self._interval_s:
                return False
            self._last_s = now
        self._num_steps = 0
        return True
