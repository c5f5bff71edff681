"""The engine's counters and gauges. Plain numbers; nothing here knows how they are counted."""

from __future__ import annotations

from dataclasses import dataclass

from remora.engine.spec.counts import DraftCounts
from remora.engine.tenants import TenantStats


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Counters and gauges at one moment. `*_total` only grow; times are in seconds.

    num_queued_tokens:  tokens to compute before every open sequence decodes: of waiting sequences
                        tokens missing in the prefix cache at arrival, of running ones the rest of
                        the prompt. Future output is not included.
    num_window_pages:   of window layers with a page pool of their own; pages that are neither free
                        nor held are cached
    draft_tokens_total, accepted_drafts_total:  drafted tokens, and how many of them were right
    drafted_rows_total: rows of steps that had drafts
    drafts_by_source:   the same three numbers of each source of drafts
    draft_time_total_s: spent by draft models and heads
    verify_steps_total, verify_time_total_s:  steps in which a row had drafts, and what their
                        forward passes and sampling took, all tokens included
    tried_drafts, right_drafts:  by position in their row: drafts whose predecessors were right, and
                        how many of them were right, too
    tenants:            in alphabetical order; empty = tenants are not distinguished
    """

    num_running: int
    num_waiting: int
    num_queued_tokens: int
    num_pages: int
    num_free_pages: int
    num_cached_pages: int
    num_held_pages: int
    prompt_tokens_total: int
    cached_tokens_total: int
    generated_tokens_total: int
    preemptions_total: int
    evicted_pages_total: int
    aborted_total: int
    finished_total: int
    steps_total: int
    step_time_total_s: float
    last_step_s: float
    num_window_pages: int = 0
    num_free_window_pages: int = 0
    num_held_window_pages: int = 0
    evicted_window_pages_total: int = 0
    draft_tokens_total: int = 0
    accepted_drafts_total: int = 0
    drafted_rows_total: int = 0
    drafts_by_source: tuple[tuple[str, DraftCounts], ...] = ()
    draft_time_total_s: float = 0.0
    verify_steps_total: int = 0
    verify_time_total_s: float = 0.0
    tried_drafts: tuple[int, ...] = ()
    right_drafts: tuple[int, ...] = ()
    tenants: tuple[TenantStats, ...] = ()

    @property
    def kv_usage(self) -> float:
        """Share of the KV pages in use by sequences (0 to 1), of the fuller pool."""
        usage = self.num_held_pages / self.num_pages if self.num_pages else 0.0
        if self.num_window_pages:
            usage = max(usage, self.num_held_window_pages / self.num_window_pages)
        return usage
