"""Counts the replicas that died while working on the same request, and bars such a request.

Bounded in number and time. Knows a request only by its digest.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from hashlib import sha256

MAX_KNOWN = 1024
REMEMBERED_S = 600.0


def fingerprint(path: str, body: bytes) -> bytes:
    """Return a digest that is the same when the client repeats the request."""
    return sha256(path.encode() + b"\0" + body).digest()


class CrashCounts:
    """Counts replicas that died while they worked on a request."""

    def __init__(self, *, max_crashes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._max = max_crashes
        self._clock = clock
        self._known: OrderedDict[bytes, tuple[int, float]] = OrderedDict()

    def note(self, request: bytes) -> None:
        """Count one more crash."""
        num = self.num(request) + 1
        self._known[request] = (num, self._clock())
        self._known.move_to_end(request)
        while len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)

    def forgive(self, request: bytes) -> None:
        """Forget a request's crashes: a replica has answered it, so they had another cause."""
        self._known.pop(request, None)

    def num(self, request: bytes) -> int:
        """Return how many replicas a request has crashed within REMEMBERED_S."""
        num, when = self._known.get(request, (0, 0.0))
        return num if self._clock() - when <= REMEMBERED_S else 0

    def message(self, request: bytes) -> str:
        """Return the error message for a barred request."""
        num = self.num(request)
        died = "A replica" if num == 1 else f"{num} replicas"
        return f"{died} died while working on this request; it is not tried again."

    def is_barred(self, request: bytes) -> bool:
        """Return whether a request has crashed too many replicas to be tried again."""
        return self.num(request) >= self._max
