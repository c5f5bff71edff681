"""Tenants: parties that share an engine. A request names its own; see scheduler/fair_shares.py."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """Whose request it is: tenants share the engine by weight.

    name:         "" = tenants are not distinguished
    weight:       share of the engine relative to other tenants that have work
    kv_fraction:  of the KV cache that its running sequences may fill; None = no limit
    max_open:     most waiting and running sequences; None = the engine's limit
    """

    name: str = ""
    weight: float = 1.0
    kv_fraction: float | None = None
    max_open: int | None = None


EVERYONE = Tenant()


@dataclass(frozen=True, slots=True)
class TenantStats:
    """Counters and gauges of one tenant; `served_tokens_total` = computed, prompts and outputs."""

    name: str
    num_running: int
    num_waiting: int
    num_held_pages: int
    served_tokens_total: int
