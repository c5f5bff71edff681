"""The measured time of a step by its number of tokens.

One value for each number that occurred: the median of the newest measurements, which a single slow
step does not move. More tokens never count as less time, which noise and old measurements would
else suggest. Numbers between two measured ones are interpolated; beyond them, the nearest
value is scaled by an assumed slope.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from statistics import median

_NUM_SAMPLES = 9  # measurements per number of tokens
_MAX_TOKENS = 1024  # larger steps are not measured; their cost is extrapolated
_SLOPE = 0.1  # assumed cost of a token on top of the first, in times of a step with one


class StepCost:
    """Seconds of a step with a number of tokens."""

    def __init__(self) -> None:
        self._samples: dict[int, deque[float]] = {}
        self._seconds: dict[int, float] = {}  # never less than those of fewer tokens
        self._medians: dict[int, float] = {}
        self._measured: list[int] = []  # numbers of tokens, ascending

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Add a measurement."""
        if not 0 < num_tokens <= _MAX_TOKENS or not seconds > 0:
            return
        if num_tokens not in self._samples:
            self._samples[num_tokens] = deque(maxlen=_NUM_SAMPLES)
            insort(self._measured, num_tokens)
        samples = self._samples[num_tokens]
        samples.append(seconds)
        self._medians[num_tokens] = median(samples)
        most = 0.0
        for number in self._measured:
            self._seconds[number] = most = max(most, self._medians[number])

    def seconds(self, num_tokens: int) -> float:
        """Return the time of a step, in units of a one-token step if nothing was measured."""
        if (found := self._seconds.get(num_tokens)) is not None:
            return found
        if not self._measured:
            return _assumed(num_tokens)
        place = bisect_left(self._measured, num_tokens)
        below = self._measured[place - 1] if place > 0 else None
        above = self._measured[place] if place < len(self._measured) else None
        if below is not None and above is not None:
            share = (num_tokens - below) / (above - below)
            return self._seconds[below] + share * (self._seconds[above] - self._seconds[below])
        nearest = below if below is not None else self._measured[0]
        return self._seconds[nearest] * _assumed(num_tokens) / _assumed(nearest)


def _assumed(num_tokens: int) -> float:
    return 1 + _SLOPE * (num_tokens - 1)
