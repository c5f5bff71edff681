"""A catalogue over a loader that only remembers, and what must hold of both at any time."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field

from remora.engine.protocols import AdapterFacts
from remora.lora.records import AdapterRecord, Desired


@dataclass(eq=False)
class FakeLoader:
    """Loads in an instant, or when `gate` opens.

    faults:  what a source raises
    """

    loaded: set[int] = field(default_factory=set)
    prepared: Counter[int] = field(default_factory=Counter)
    num_loading: int = 0
    most_loading: int = 0
    pinned: set[int] = field(default_factory=set)
    faults: dict[str, Exception] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)
    gate: asyncio.Event | None = None

    async def prepare(self, lora_id: int, source: str) -> AdapterFacts:
        assert lora_id not in self.loaded, "loaded twice"
        self.prepared[lora_id] += 1
        self.num_loading += 1
        self.most_loading = max(self.most_loading, self.num_loading)
        try:
            await asyncio.sleep(0)
            if self.gate is not None:
                await self.gate.wait()
            if source in self.faults:
                raise self.faults[source]
        finally:
            self.num_loading -= 1
        self.loaded.add(lora_id)
        digest = self.digests.get(source, source)
        return AdapterFacts(max_rank=4, num_bytes=100, digest=digest)

    async def discard(self, lora_id: int) -> None:
        assert lora_id in self.loaded, "what is not there was discarded"
        await asyncio.sleep(0)
        self.loaded.remove(lora_id)

    def pin(self, lora_id: int, *, pinned: bool) -> None:
        (self.pinned.add if pinned else self.pinned.discard)(lora_id)


def record(lora_id: int, name: str | None = None, *, pinned: bool = False) -> AdapterRecord:
    name = name or f"a{lora_id}"
    return AdapterRecord(
        name=name, lora_id=lora_id, source=f"/{name}/{lora_id}", pinned=pinned, owner="api"
    )


def wanted(*records: AdapterRecord, revision: int = 1, staged: tuple[int, ...] = ()) -> Desired:
    return Desired(
        revision=revision, active=records, staged=tuple(record(lora_id) for lora_id in staged)
    )
