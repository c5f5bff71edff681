"""Counts of verified drafts, of one sequence or of one source of drafts."""

from __future__ import annotations

from typing import NamedTuple


class DraftCounts(NamedTuple):
    """Drafts that were verified.

    num_rows:      steps of a row that had drafts; each yields one token more than right drafts
    num_drafts:    drafts in them
    num_accepted:  drafts that were right
    """

    num_rows: int = 0
    num_drafts: int = 0
    num_accepted: int = 0

    def with_row(self, num_drafts: int, num_accepted: int) -> DraftCounts:
        """Return the counts with one step of a row more."""
        return DraftCounts(
            self.num_rows + 1, self.num_drafts + num_drafts, self.num_accepted + num_accepted
        )

    @property
    def acceptance_rate(self) -> float:
        """Share of the drafts that were right; 0 without drafts."""
        return self.num_accepted / max(1, self.num_drafts)

    @property
    def tokens_per_row(self) -> float:
        """Mean tokens that a verified row yields; 0 without verified rows."""
        return 1 + self.num_accepted / self.num_rows if self.num_rows else 0.0


NONE_VERIFIED = DraftCounts()
