"""A step whose result is not known yet: its plan, and the sequences that its rows belong to.

Knows sequences and plans; nothing of pages or of scheduling policy.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass

from remora.engine.scheduler.sequence import Sequence
from remora.engine.spec.speculation import Speculation
from remora.engine.types import StepPlan, StepResult


@dataclass(frozen=True, slots=True)
class InFlightStep:
    """A step in flight: its plan, and each row's sequence and `num_starts`."""

    plan: StepPlan
    rows: Mapping[int, tuple[Sequence, int]]

    def note_start(self, now_s: float) -> None:
        """Record the queue time of sequences that run for the first time."""
        for init in self.plan.added:
            seq, _ = self.rows[init.row]
            if seq.queue_s is None:
                seq.queue_s = now_s - seq.arrived_s

    def ended_rows(self) -> frozenset[int]:
        """Return the rows that their sequences have left since."""
        return frozenset(row for row, (seq, start) in self.rows.items() if not holds(seq, start))

    def settle_drafts(
        self,
        speculation: Speculation,
        result: StepResult,
        runs: Mapping[int, tuple[int, ...]],
        counts: list[int],
    ) -> Container[int]:
        """Report new tokens to `speculation`, and forget refused drafts.

        runs:    new tokens of each row that got any
        counts:  [num_rows] tokens of each row; refused drafts are subtracted
        Returns the rows that had drafts.
        """
        num_drafts = self.plan.num_drafts.tolist() or [0] * len(counts)
        num_tokens = sum(counts)
        drafted = set()
        for place, (row, (seq, start)) in enumerate(self.rows.items()):
            run = runs.get(row)
            if run is None or not holds(seq, start):
                continue
            speculation.observe(seq, num_drafts[place], run)
            if num_drafts[place]:
                num_refused = num_drafts[place] + 1 - len(run)
                counts[place] -= num_refused
                seq.num_in_flight_tokens -= num_refused
                drafted.add(row)
        speculation.observe_step(
            num_tokens,
            result.forward_s + result.sample_s,
            num_drafts=sum(num_drafts),
            draft_s=result.draft_s,
            # Prompts of one token cost what a decoding row does.
            pure=num_tokens == len(counts) + sum(num_drafts),
        )
        return drafted


def holds(seq: Sequence, start: int) -> bool:
    """Return whether a sequence still has the row of this start."""
    return seq.row is not None and seq.num_starts == start
