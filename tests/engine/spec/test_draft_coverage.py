"""What a draft model is believed to have computed is what it has computed, on shared pages, too."""

from __future__ import annotations

import random

import numpy as np
import pytest

from remora.engine.sampling.params import SamplingParams
from remora.engine.spec.draft_coverage import DraftCoverage
from remora.engine.types import RowInit, StepPlan

SIZE, NUM_PAGES, NUM_ROWS, NUM_COLUMNS = 4, 40, 5, 6
NOTHING = np.empty(0, np.int32)


class Pages:
    """Rows of random lengths, whose whole pages later rows may borrow.

    target, draft:  [pages, slots] what each model has computed; every write of the target has a
                    number of its own, which the draft model copies
    """

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.tables = np.zeros((NUM_ROWS, NUM_COLUMNS), np.int32)
        self.coverage = DraftCoverage(self.tables, num_pages=NUM_PAGES, page_size=SIZE)
        self.target = np.zeros((NUM_PAGES + 1, SIZE), np.int64)
        self.draft = np.full((NUM_PAGES + 1, SIZE), -1, np.int64)
        self.lengths: dict[int, int] = {}
        self.clock = 0

    def start(self, row: int) -> RowInit:
        """Start a row with whole pages of another one, or without."""
        self.tables[row] = 0
        lenders = [other for other in self.lengths if other != row]
        borrowed: list[int] = []
        if lenders:
            lender = self.random.choice(lenders)
            count = self.random.randint(0, min(self.lengths[lender] // SIZE, NUM_COLUMNS - 1))
            borrowed = self.tables[lender, :count].tolist()
        free = sorted({*range(1, NUM_PAGES + 1)} - {*self.tables.ravel().tolist(), *borrowed})
        own = self.random.sample(free, NUM_COLUMNS - len(borrowed))
        self.tables[row] = borrowed + own
        self.lengths[row] = len(borrowed) * SIZE
        return RowInit(
            row=row,
            token_ids=np.zeros(1, np.int64),
            num_prompt_tokens=1,
            seed=0,
            sampling=SamplingParams(),
        )

    def write(self, row: int, first: int, count: int) -> None:
        for place in range(first, first + count):
            self.clock += 1
            self.target[self.tables[row, place // SIZE], place % SIZE] = self.clock

    def check(self, row: int) -> None:
        """Assert that the draft model has the covered tokens of a row."""
        covered = int(self.coverage.counts(np.array([row], np.int32))[0])
        assert covered <= self.lengths[row]
        for place in range(covered):
            at = self.tables[row, place // SIZE], place % SIZE
            assert self.draft[at] == self.target[at]

    def step(self) -> None:
        """Compute rows, draft for some of them, and refuse some of the drafts."""
        rows = sorted(self.random.sample(range(NUM_ROWS), self.random.randint(1, NUM_ROWS)))
        added, starts, counts = [], [], []
        for row in rows:
            room = NUM_COLUMNS * SIZE - self.lengths.get(row, 0)
            if row not in self.lengths or room < 2:  # ends, and another one starts
                added.append(self.start(row))
                room = NUM_COLUMNS * SIZE - self.lengths[row]
            starts.append(self.lengths[row])
            counts.append(self.random.randint(1, min(room, 6)))
        plan = StepPlan(
            step_id=1,
            added=tuple(added),
            dropped=NOTHING,
            page_rows=NOTHING,
            page_ids=NOTHING,
            rows=np.array(rows, np.int32),
            starts=np.array(starts, np.int32),
            num_tokens=np.array(counts, np.int32),
            samples=np.ones(len(rows), np.bool_),
        )
        self.coverage.begin(plan)
        for row, start, count in zip(rows, starts, counts, strict=True):
            self.check(row)
            drafts = self.random.random() < 0.5
            self.write(row, start, count)
            if drafts:  # all tokens of the step but the last, which nothing follows
                for place in range(start + count - 1):
                    at = self.tables[row, place // SIZE], place % SIZE
                    self.draft[at] = self.target[at]
                self.coverage.cover(
                    np.array([row], np.int32), np.array([start + count - 1], np.int64)
                )
            self.lengths[row] = start + self.random.randint(1, count)


@pytest.mark.parametrize("seed", range(60))
def test_covered_tokens_are_those_that_the_draft_model_computed(seed: int) -> None:
    pages = Pages(seed)
    covered = 0
    for _ in range(40):
        pages.step()
        covered += int(pages.coverage.counts(np.arange(NUM_ROWS, dtype=np.int32)).sum())
    assert covered > 0
