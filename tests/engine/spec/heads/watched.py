"""What the drafter of a running engine drafts."""

from __future__ import annotations

from collections.abc import Set
from typing import Any

from remora.engine.engine import Engine
from remora.engine.spec.heads.drafter import HeadDrafter
from remora.engine.types import StepPlan
from tests.engine.spec.heads.plain import PlainHead


class Watched:
    """Remembers the drafts of every step, by the text that they continue."""

    def __init__(self, engine: Engine) -> None:
        self.drafts: dict[tuple[int, ...], list[int]] = {}
        runner: Any = engine._runner
        drafter, self._table = runner._drafter, runner._table
        assert isinstance(drafter, HeadDrafter)
        self._drafter = drafter
        runner._drafter = self

    def complete(self, step: StepPlan) -> StepPlan:
        completed = self._drafter.complete(step)
        ends = completed.num_drafts.cumsum().tolist()
        for row, start, count, end in zip(
            step.rows.tolist(), step.starts.tolist(), step.num_drafts.tolist(), ends, strict=False
        ):
            if count:
                known = tuple(self._table._token_ids[row, : start + 1].tolist())
                self.drafts[known] = completed.draft_ids[end - count : end].tolist()
        return completed

    def drop_rows(self) -> None:
        self._drafter.drop_rows()

    def close(self) -> None:
        self._drafter.close()

    def check(self, head: PlainHead, stops: Set[int]) -> None:
        """Compare with what a plain head drafts, but for texts that a draft would end."""
        wrong = []
        for known, drafts in self.drafts.items():
            expected = head.drafts(list(known), len(drafts))
            if stops.isdisjoint(expected) and drafts != expected:
                wrong.append((len(known), drafts, expected))
        assert not wrong, wrong[:3]
