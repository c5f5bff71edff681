"""The times of one request, read as its outputs arrive: in the queue, of the prompt, of the output.

Knows no API: each shows these times under names of its own.
"""

from __future__ import annotations

import time

from remora.engine.types import Output


class ReplyClock:
    """Times of a request, in milliseconds.

    started_ns:  arrival of the request, on the monotonic clock
    """

    def __init__(self, started_ns: int) -> None:
        self._started_ns = started_ns
        self._queue_ns = 0.0
        self._first_ns: int | None = None
        self._last_ns = 0

    def note(self, output: Output) -> None:
        """Take the time of an output that arrives now."""
        self._last_ns = time.monotonic_ns()
        if self._first_ns is None:
            self._first_ns, self._queue_ns = self._last_ns, max(0.0, output.queue_s * 1e9)

    @property
    def queue_ms(self) -> float:
        """Time before the first step."""
        return self._queue_ns / 1e6

    @property
    def first_ms(self) -> float:
        """Time from the arrival to the first output; 0 before it."""
        return 0.0 if self._first_ns is None else (self._first_ns - self._started_ns) / 1e6

    @property
    def prompt_ms(self) -> float:
        """Time to the first output, without the time in the queue."""
        return max(0.0, self.first_ms - self.queue_ms)

    @property
    def output_ms(self) -> float:
        """Time from the first output to the last one so far."""
        return 0.0 if self._first_ns is None else (self._last_ns - self._first_ns) / 1e6
