"""The controller seam: how many drafts a row may have.

Every draft adds a row to the step that verifies it, and a step's time grows with its rows. Knows
counts and seconds; it does not know tokens, proposers or models.
"""

from __future__ import annotations

from typing import Protocol


class Controller(Protocol):
    """Chooses draft lengths. Called from the engine's thread only.

    Each step calls `limit` for every row that may have drafts, then, once their tokens are known,
    `observe` for each of them, and at last `observe_step`.
    """

    def limit(self, key: int, num_rows: int) -> int:
        """Return the most drafts for a sequence in the next step; 0 = none.

        num_rows:  sequences that decode in this step, this one included
        """

    def observe(self, key: int, proposed: int, accepted: int) -> None:
        """Learn the outcome of one row, also if nothing was proposed.

        proposed:  drafts that were verified
        accepted:  how many of them, from the first on, became output
        """

    def observe_step(self, num_tokens: int, seconds: float) -> None:
        """Learn the time of a step that computed no prompt tokens, drafting included.

        num_tokens:  tokens computed: one for each row, and the drafts
        """

    def end(self, key: int) -> None:
        """Forget a sequence; unknown keys are ignored."""


class FixedController:
    """Always the same draft length."""

    def __init__(self, num_drafts: int) -> None:
        self._num_drafts = num_drafts

    def limit(self, key: int, num_rows: int) -> int:
        """Return the draft length."""
        return self._num_drafts

    def observe(self, key: int, proposed: int, accepted: int) -> None:
        """Do nothing."""

    def observe_step(self, num_tokens: int, seconds: float) -> None:
        """Do nothing."""

    def end(self, key: int) -> None:
        """Do nothing."""
