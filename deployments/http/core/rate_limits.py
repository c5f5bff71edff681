"""Limits per minute, and how headers show them. Knows neither requests nor tenants."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime

MINUTE_S = 60.0


class RateLimit:
    """A bucket that holds up to `per_minute` units and is refilled as many times a minute.

    clock:  returns seconds
    """

    def __init__(self, per_minute: int, clock: Callable[[], float]) -> None:
        self.per_minute = per_minute
        self._clock = clock
        self._level, self._filled_at = float(per_minute), clock()

    @property
    def level(self) -> float:
        """Units that are left; negative = overdrawn."""
        now = self._clock()
        gained = (now - self._filled_at) * self.per_minute / MINUTE_S
        self._level, self._filled_at = min(self.per_minute, self._level + gained), now
        return self._level

    def wait_s(self, num: int) -> float:
        """Return the seconds until `num` units can be taken: a full bucket suffices for any."""
        return self._seconds_until(min(num, self.per_minute))

    @property
    def reset_s(self) -> float:
        """Seconds until the bucket is full, if nothing is taken."""
        return self._seconds_until(self.per_minute)

    def take(self, num: int) -> None:
        """Take units, also more than are left."""
        self._level = self.level - num

    def headers(self, what: str) -> dict[str, str]:
        """Return OpenAI's headers. what: `requests` or `tokens`."""
        return {
            f"x-ratelimit-limit-{what}": str(self.per_minute),
            f"x-ratelimit-remaining-{what}": str(max(0, int(self.level))),
            f"x-ratelimit-reset-{what}": show_duration(self.reset_s),
        }

    def anthropic_headers(self, what: str) -> dict[str, str]:
        """Return Anthropic's headers. what: `requests` or `tokens`."""
        name, reset = f"anthropic-ratelimit-{what}", time.time() + self.reset_s
        return {
            f"{name}-limit": str(self.per_minute),
            f"{name}-remaining": str(max(0, int(self.level))),
            f"{name}-reset": datetime.fromtimestamp(reset, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        }

    def _seconds_until(self, level: float) -> float:
        return max(0.0, level - self.level) * MINUTE_S / self.per_minute


def show_duration(seconds: float) -> str:
    """Return a duration as OpenAI's headers show it: `120ms`, `2.5s`, `1m3s`; never too short."""
    milliseconds = -int(-seconds * 1000 // 1)
    if milliseconds < 1000:
        return f"{milliseconds}ms"
    if milliseconds < 60_000:
        return f"{milliseconds / 1000:g}s"
    minutes, rest = divmod(-(-milliseconds // 1000), 60)
    return f"{minutes}m{rest}s"
