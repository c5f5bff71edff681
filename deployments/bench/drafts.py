"""Figures of speculative decoding in a run, from totals of an engine or a server around it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from remora.engine.types import EngineStats

NOTE = "prompts are random and ends ignored: acceptance of real text differs"


@dataclass(frozen=True, slots=True)
class DraftTotals:
    """Totals of an engine since its start.

    rows:          rows of steps that had drafts
    steps:         steps in which a row had drafts
    tried, right:  by position in their row: drafts whose predecessors were right, and how many of
                   them were right, too
    drafting_s:    time of draft models and heads
    verifying_s:   time of forward passes and sampling in such steps
    """

    rows: int
    drafts: int
    accepted: int
    steps: int
    tried: tuple[int, ...]
    right: tuple[int, ...]
    drafting_s: float
    verifying_s: float

    @classmethod
    def of_stats(cls, stats: EngineStats) -> DraftTotals | None:
        """Return the totals of an engine; None without speculation."""
        if not stats.drafts_by_source:
            return None
        return cls(
            rows=stats.drafted_rows_total,
            drafts=stats.draft_tokens_total,
            accepted=stats.accepted_drafts_total,
            steps=stats.verify_steps_total,
            tried=stats.tried_drafts,
            right=stats.right_drafts,
            drafting_s=stats.draft_time_total_s,
            verifying_s=stats.verify_time_total_s,
        )

    @classmethod
    def of_server(cls, info: Mapping[str, Any]) -> DraftTotals | None:
        """Return the totals in /server_info; None without speculation, and of other servers."""
        found: Any = info.get("speculation")
        try:
            return cls(
                rows=int(found["verified_rows"]),
                drafts=int(found["draft_tokens"]),
                accepted=int(found["accepted_drafts"]),
                steps=int(found["verify_steps"]),
                tried=tuple(map(int, found["tried_by_position"])),
                right=tuple(map(int, found["right_by_position"])),
                drafting_s=float(found["draft_time_s"]),
                verifying_s=float(found["verify_time_s"]),
            )
        except (KeyError, TypeError, ValueError):
            return None


def draft_figures(before: DraftTotals | None, after: DraftTotals | None) -> dict[str, float]:
    """Return the figures of what happened in between; nothing if no drafts were verified.

    Positions that no draft reached have no figure.
    """
    if before is None or after is None or after.rows <= before.rows:
        return {}
    rows, drafts = after.rows - before.rows, after.drafts - before.drafts
    accepted = after.accepted - before.accepted
    figures = {
        "draft_rows": float(rows),
        "draft_tokens": float(drafts),
        "verify_steps": float(after.steps - before.steps),
        "tokens_per_verified_row": 1 + accepted / rows,
        "accepted_share": accepted / max(1, drafts),
        "drafting_s": after.drafting_s - before.drafting_s,
        "verifying_s": after.verifying_s - before.verifying_s,
    }
    for position in range(len(after.tried)):
        tried = after.tried[position] - before.tried[position]
        if tried:
            right = after.right[position] - before.right[position]
            figures[f"accepted_{position + 1}_share"] = right / tried
    return figures
