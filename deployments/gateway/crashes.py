"""Which requests replicas have died over, so that none of them brings down one after another.

Bounded in number and time. Knows a request by its digest only.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from hashlib import sha256

MAX_KNOWN = 1024
REMEMBERED_S = 600.0


def fingerprint(path: str, body: bytes) -> bytes:
    """Return the digest by which a request is known again when its caller repeats it."""
    return sha256(path.encode() + b"\0" + body).digest()


class Crashes:
    """Counts replicas that died while they worked on a request."""

    def __init__(self, *, max_crashes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._max = max_crashes
        self._clock = clock
        self._known: OrderedDict[bytes, tuple[int, float]] = OrderedDict()

    def note(self, request: bytes) -> None:
        """Count one more."""
        num = self.num(request) + 1
        self._known[request] = (num, self._clock())
        self._known.move_to_end(request)
        while len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)

    def forgive(self, request: bytes) -> None:
        """Count none any more: a replica has answered it, so something else was to blame."""
        self._known.pop(request, None)

    def num(self, request: bytes) -> int:
        """Return how many have died over a request lately."""
        num, when = self._known.get(request, (0, 0.0))
        return num if self._clock() - when <= REMEMBERED_S else 0

    def verdict(self, request: bytes) -> str:
        """Return what a caller is told whose request is barred."""
        num = self.num(request)
        died = "A replica" if num == 1 else f"{num} replicas"
        return f"{died} died while working on this request; it is not tried again."

    def is_barred(self, request: bytes) -> bool:
        """Return whether the request is not to be given to any replica again."""
        return self.num(request) >= self._max
