"""The proposer seam: where drafts come from.

A draft is a token that may come next. The target model verifies drafts in its ordinary step and
decides every token, so drafts change how many steps an output takes and never its text. A proposer
knows tokens; it does not know pages, rows, probabilities or how many of its drafts were accepted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from remora.engine.types import Namespace


class Proposer(Protocol):
    """Proposes drafts for sequences, which callers name by keys of their choice.

    Called from the engine's thread only.
    """

    def begin(self, key: int, token_ids: Sequence[int], namespace: Namespace) -> None:
        """Add a sequence.

        token_ids:  its prompt, and the output that it already has
        namespace:  outside which its text must not have an effect
        """

    def extend(self, key: int, token_ids: Sequence[int]) -> None:
        """Append tokens that were emitted for a sequence, in the order of the output."""

    def propose(self, rows: Sequence[tuple[int, int]]) -> list[Sequence[int]]:
        """Return drafts for each row, best guess of what follows; empty = none.

        Called once per step, without rows too: a proposer may do a part of its work then.
        rows:  (key of a sequence that was added, most drafts)
        """

    def end(self, key: int) -> None:
        """Forget a sequence; unknown keys are ignored."""
