"""The adapters that a simulated replica holds in its memory, and what it takes to get there."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

Later = Callable[[float, Callable[[], None]], None]


class AdapterMemory:
    """Holds a few adapters: the least recently used leaves for another, one in use never does.

    load_s:  what a load takes; several go on at a time, and each is of one adapter
    later:   lets something happen after so many seconds
    """

    def __init__(self, capacity: int, *, load_s: float, later: Later) -> None:
        self.num_loads = 0
        self._capacity = capacity
        self._load_s = load_s
        self._later = later
        self._num_users: dict[str, int] = {}  # of those that are here, the latest used last
        self._waiting: dict[str, list[Callable[[], None]]] = {}  # by whose turn it is
        self._loading: set[str] = set()

    @property
    def resident(self) -> tuple[str, ...]:
        """Who is here."""
        return tuple(sorted(self._num_users))

    def use(self, name: str, then: Callable[[], None]) -> None:
        """Hold an adapter until `release`; `then` happens as soon as it is here."""
        if name in self._num_users:
            self._num_users[name] = self._num_users.pop(name) + 1
            then()
            return
        self._waiting.setdefault(name, []).append(then)
        self._begin()

    def release(self, name: str) -> None:
        """Hold an adapter no more."""
        self._num_users[name] -= 1
        self._begin()

    def _begin(self) -> None:
        """Load what is waited for, as far as there is room."""
        for name in self._waiting:
            if name in self._loading:
                continue
            if not self._has_room():
                return
            self._loading.add(name)
            self.num_loads += 1
            self._later(self._load_s, partial(self._take, name))

    def _has_room(self) -> bool:
        if len(self._num_users) + len(self._loading) < self._capacity:
            return True
        oldest = next((name for name, users in self._num_users.items() if not users), None)
        if oldest is None:
            return False
        del self._num_users[oldest]
        return True

    def _take(self, name: str) -> None:
        self._loading.remove(name)
        waiting = self._waiting.pop(name)
        self._num_users[name] = len(waiting)
        for then in waiting:
            then()
