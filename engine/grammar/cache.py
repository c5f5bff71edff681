"""A cache bounded in bytes that evicts the least recently used entry."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

Value = TypeVar("Value")


class BoundedCache(Generic[Value]):
    """Values by key, limited to `max_bytes` in total. Not thread-safe."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._entries: OrderedDict[bytes, tuple[Value, int]] = OrderedDict()
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: bytes) -> Value | None:
        """Return a value and mark it as most recently used."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        self._entries.move_to_end(key)
        return entry[0]

    def put(self, key: bytes, value: Value, num_bytes: int) -> None:
        """Store a value, unless it is larger than the whole cache."""
        if key in self._entries:
            self.num_bytes -= self._entries.pop(key)[1]
        if num_bytes > self._max_bytes:
            return
        self._entries[key] = (value, num_bytes)
        self.num_bytes += num_bytes
        while self.num_bytes > self._max_bytes:
            _, (_, freed) = self._entries.popitem(last=False)
            self.num_bytes -= freed
