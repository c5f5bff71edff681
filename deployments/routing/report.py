"""A replica's report to the routers: its load and cached pages, as a dict of plain values.

Writer and reader are in one module. The reader ignores unknown and missing fields: during a rolling
update replicas of two versions report.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# Most adapters that a report names.
MAX_ADAPTERS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """One replica at one moment.

    made_at_s:          by the replica's monotonic clock; only differences are meaningful elsewhere
    num_queued_tokens:  to compute before every open request decodes
    num_running, num_waiting:  sequences
    kv_usage:           part of the KV memory held by open requests (0 to 1)
    page_hashes:        PAGE_HASH_BYTES for each reported cached page, the latest used first
    adapters:           names of the adapters in host memory
    """

    made_at_s: float
    num_queued_tokens: int = 0
    num_running: int = 0
    num_waiting: int = 0
    kv_usage: float = 0.0
    page_hashes: bytes = b""
    adapters: tuple[str, ...] = ()

    def as_stats(self) -> dict[str, Any]:
        """Return the report as `record_routing_stats` returns it."""
        return {name: getattr(self, name) for name in _FIELDS}

    @classmethod
    def of_stats(cls, stats: Mapping[str, Any]) -> Report | None:
        """Return the report in a replica's routing stats, None if there is none."""
        if "made_at_s" not in stats:
            return None
        return cls(**{name: stats[name] for name in _FIELDS if name in stats})


_FIELDS = tuple(Report.__dataclass_fields__)
