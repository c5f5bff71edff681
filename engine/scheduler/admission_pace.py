"""How often a busy engine admits waiting sequences: at intervals of steps and seconds.

Longer intervals interrupt running outputs less, and prompts start in larger groups. A refusal for
lack of memory holds for some steps, because the estimate reads all running sequences.
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


class Refusal:
    """That the first waiting sequence lacked memory, which only time or a change of queues mends.

    It is forgotten when a sequence arrives or leaves its row, and after RETRY_STEPS: the reserve
    for outputs of running sequences decays.
    """

    RETRY_STEPS = 16

    def __init__(self) -> None:
        self._until_step = 0

    def note(self, num_steps: int) -> None:
        """Refuse from now on, after `num_steps` steps."""
        self._until_step = num_steps + self.RETRY_STEPS

    def forget(self) -> None:
        """Let the next step try again."""
        self._until_step = 0

    def holds(self, num_steps: int) -> bool:
        """Return whether it is too early to try again."""
        return num_steps < self._until_step
