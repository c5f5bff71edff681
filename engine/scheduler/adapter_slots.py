"""Assigns adapters to the slots of the model's memory, and evicts them.

An adapter is identified by its lora_id: reloading a name makes a new id. Slots that running
sequences use and slots of pinned adapters are never evicted; of the others the least recently used
one is, or the one filled first. Pure book-keeping: knows no tensors, names or files.
"""

from __future__ import annotations

from typing import Literal

from remora.configs.errors import InvariantViolated

Eviction = Literal["lru", "fifo"]


class AdapterSlots:
    """Slots 1 to `num_slots`."""

    def __init__(self, num_slots: int, *, eviction: Eviction = "lru") -> None:
        self.num_loads = 0
        self.num_evicted = 0
        self._by_use = eviction == "lru"
        self._free = list(range(num_slots, 0, -1))
        self._slots: dict[int, int] = {}  # lora_id -> slot, in the order of eviction
        self._users: dict[int, int] = {}  # lora_id -> running sequences
        self._pinned: set[int] = set()

    @property
    def by_lora_id(self) -> dict[int, int]:
        """The slot of each adapter that has one."""
        return dict(self._slots)

    def has_room(self, lora_id: int) -> bool:
        """Return whether `acquire` would succeed."""
        return lora_id in self._slots or bool(self._free) or self._victim() is not None

    def acquire(self, lora_id: int) -> tuple[int, bool]:
        """Take a slot for one more sequence; returns it and whether it must be filled first."""
        is_new = lora_id not in self._slots
        slot = self._take() if is_new else self._slots[lora_id]
        if is_new or self._by_use:
            self._slots.pop(lora_id, None)
            self._slots[lora_id] = slot
        self.num_loads += is_new
        self._users[lora_id] = self._users.get(lora_id, 0) + 1
        return slot, is_new

    def release(self, lora_id: int) -> None:
        """Count one sequence less; the adapter keeps its slot."""
        if self._users.get(lora_id, 0) < 1:
            raise InvariantViolated(f"adapter {lora_id} was released more often than acquired")
        self._users[lora_id] -= 1
        if not self._users[lora_id]:
            del self._users[lora_id]

    def pin(self, lora_id: int, *, pinned: bool) -> None:
        """Keep an adapter in its slot, or stop to; at least one slot must stay unpinned."""
        if pinned:
            self._pinned.add(lora_id)
        else:
            self._pinned.discard(lora_id)

    def forget(self, lora_id: int) -> None:
        """Free the slot of an unused adapter, and unpin it."""
        if lora_id in self._users:
            raise InvariantViolated(f"adapter {lora_id} is in use and cannot be forgotten")
        self._pinned.discard(lora_id)
        slot = self._slots.pop(lora_id, None)
        if slot is not None:
            self._free.append(slot)

    def clear(self) -> None:
        """Free all slots, whose contents are lost, while no sequence runs; pins stay."""
        if self._users:
            raise InvariantViolated(f"adapters {list(self._users)} are in use")
        self._free += self._slots.values()
        self._slots.clear()

    def check_integrity(self, users: dict[int, int]) -> None:
        """Raise InvariantViolated unless slots are consistent.

        users:  running sequences by lora_id
        """
        taken = [*self._slots.values(), *self._free]
        if sorted(taken) != list(range(1, len(taken) + 1)):
            raise InvariantViolated(f"a slot is both free and taken, or neither: {taken}")
        if users != self._users:
            raise InvariantViolated(f"adapter users are {users}, but {self._users} were counted")
        if not users.keys() <= self._slots.keys():
            raise InvariantViolated("a sequence runs with an adapter that has no slot")

    def _take(self) -> int:
        if self._free:
            return self._free.pop()
        victim = self._victim()
        if victim is None:
            raise InvariantViolated("no adapter slot can be freed")
        self.num_evicted += 1
        return self._slots.pop(victim)

    def _victim(self) -> int | None:
        kept = self._users.keys() | self._pinned
        return next((lora_id for lora_id in self._slots if lora_id not in kept), None)
