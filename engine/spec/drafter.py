"""The drafter seam: drafts that are made when a step begins, from what ranks know of its rows.

A scheduler plans how many drafts a row has, and PENDING stands for each; the drafter replaces them
before the target model computes the step. So a drafter knows rows, pages and the states of the step
before, which a proposer (`proposer.py`) does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from remora.engine.types import Namespace, StepPlan

PENDING = -2
"""A draft that the drafter makes when its step begins."""


class Drafter(Protocol):
    """Makes the drafts of steps, which are completed in order."""

    def complete(self, plan: StepPlan) -> StepPlan:
        """Return the plan of the next step with its PENDING drafts replaced.

        Called for every step, once the plan's changes of rows were applied.
        """

    def drop_rows(self) -> None:
        """Forget all rows; steps that have begun will have no result."""

    def close(self) -> None:
        """Free what was started; further calls do nothing."""


class PendingProposer:
    """Proposer whose drafts a drafter makes."""

    def begin(self, key: int, token_ids: Sequence[int], namespace: Namespace) -> None:
        """Do nothing."""

    def extend(self, key: int, token_ids: Sequence[int]) -> None:
        """Do nothing."""

    def propose(self, rows: Sequence[tuple[int, int]]) -> list[Sequence[int]]:
        """Return as many drafts as are allowed, all of them PENDING."""
        return [(PENDING,) * most for _, most in rows]

    def end(self, key: int) -> None:
        """Do nothing."""
