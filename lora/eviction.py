"""Decides which adapters stay in a replica's CPU memory and which are evicted first.

Pure functions over entries. `AdapterCache` starts the loads and evictions; slots on the device are
evicted by `engine/scheduler/adapter_slots.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from remora.configs.errors import AdapterNotFound, InvalidAdapter, RemoraError
from remora.engine.protocols import AdapterFacts
from remora.lora.records import AdapterRecord, AdapterReport, State


@dataclass(eq=False, slots=True)
class CacheEntry:
    """One adapter as a replica has it.

    facts:     of the copy in memory; None = not in memory
    work:      the running load or eviction; `phase` is its progress
    failure:   of the last load, or the reason why requests are refused, and its time
    num_not_finite:  consecutive answers with NaN or infinity
    used:      grows with each use; the smallest is evicted first
    is_ended:  not served any more
    """

    record: AdapterRecord
    facts: AdapterFacts | None = None
    work: asyncio.Task[None] | None = None
    phase: Literal["waiting", "loading", "evicting"] = "waiting"
    failure: RemoraError | None = None
    failed_at: float = 0.0
    num_users: int = 0
    num_uses: int = 0
    num_loads: int = 0
    num_not_finite: int = 0
    used: int = 0
    is_ended: bool = False

    @property
    def is_evictable(self) -> bool:
        """Whether it is in memory, unused, and not pinned."""
        is_free = not self.num_users and not (self.record.pinned and not self.is_ended)
        return self.facts is not None and self.work is None and is_free

    @property
    def state(self) -> State:
        """Its state as reports name it."""
        if self.is_ended:
            return "ending"
        if self.work is not None and self.phase != "evicting":
            return self.phase
        if self.failure is not None:
            return "failed"
        return "known" if self.facts is None else "loaded"

    def report(self, slot: int | None) -> AdapterReport:
        """Return its state for the manager; `slot` is its slot on the device."""
        facts = self.facts
        return AdapterReport(
            lora_id=self.record.lora_id,
            name=self.record.name,
            state=self.state,
            reason="" if self.failure is None else str(self.failure),
            is_fault=isinstance(self.failure, InvalidAdapter),
            is_missing=isinstance(self.failure, AdapterNotFound),
            slot=slot,
            num_users=self.num_users,
            num_uses=self.num_uses,
            num_loads=self.num_loads,
            num_bytes=0 if facts is None else facts.num_bytes,
            max_rank=0 if facts is None else facts.max_rank,
            digest="" if facts is None else facts.digest,
        )


def has_room(entries: Iterable[CacheEntry], max_loaded: int) -> bool:
    """Return whether one more load fits, once everything evictable is evicted."""
    num_taken = sum(
        not entry.is_evictable
        if entry.facts is not None
        else entry.work is not None and entry.phase == "loading"
        for entry in entries
    )
    return num_taken < max_loaded


def choose_evictions(entries: Iterable[CacheEntry], max_loaded: int) -> list[CacheEntry]:
    """Return the entries to evict so that at most `max_loaded` stay, if so many are evictable."""
    loaded = [entry for entry in entries if entry.facts is not None]
    evictable = sorted((e for e in loaded if e.is_evictable), key=lambda entry: entry.used)
    return evictable[: max(0, len(loaded) - max_loaded)]
