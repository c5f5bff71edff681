"""What rows hold between steps, against lists that keep the same by hand."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from remora.engine.runner.inputs import InputBatch, StepInputs
from remora.engine.types import StepPlan
from tests.engine.sampling.sampled import make_row

MAX_ROWS, MAX_TOKENS, PAGE_SIZE = 4, 40, 8


def make_plan(rows: list[tuple[int, int, int, bool]]) -> StepPlan:
    """Plan (row, start, count, samples) for each row."""
    numbers = np.array([row[:3] for row in rows], dtype=np.int32).reshape(-1, 3)
    return StepPlan(
        step_id=0,
        added=(),
        dropped=np.empty(0, np.int32),
        page_rows=np.empty(0, np.int32),
        page_ids=np.empty(0, np.int32),
        rows=numbers[:, 0],
        starts=numbers[:, 1],
        num_tokens=numbers[:, 2],
        samples=np.array([row[3] for row in rows], dtype=np.bool_),
    )


class InputBatchMachine(RuleBasedStateMachine):
    """Rows begin, compute some of their tokens, get new ones, and begin anew."""

    def __init__(self) -> None:
        super().__init__()
        self.table = InputBatch(max_rows=MAX_ROWS, max_tokens=MAX_TOKENS, page_size=PAGE_SIZE)
        self.tokens: dict[int, list[int]] = {}
        self.pages: dict[int, list[int]] = {}
        self.computed: dict[int, int] = {}
        self.page_ids = itertools.count(1)

    @rule(
        row=st.integers(0, MAX_ROWS - 1),
        token_ids=st.lists(st.integers(0, 2**40), min_size=1, max_size=MAX_TOKENS - 1),
    )
    def start(self, row: int, token_ids: list[int]) -> None:
        self.table.start(make_row(row, token_ids))
        self.tokens[row], self.pages[row], self.computed[row] = list(token_ids), [], 0

    @precondition(lambda self: self.waiting())
    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        rows = data.draw(st.lists(st.sampled_from(self.waiting()), min_size=1, unique=True))
        left = {row: len(self.tokens[row]) - self.computed[row] for row in rows}
        counts = {row: data.draw(st.integers(1, left[row])) for row in rows}
        rows.sort(key=lambda row: counts[row] > 1)
        samples = {row: counts[row] == left[row] for row in rows}
        self.grow(counts)

        inputs = self.table.inputs(
            make_plan([(row, self.computed[row], counts[row], samples[row]) for row in rows])
        )

        self.check(inputs, rows, counts, samples)
        for row in rows:
            self.computed[row] += counts[row]
        self.sample([row for row in rows if samples[row]], data)

    def waiting(self) -> list[int]:
        return [row for row in self.tokens if self.computed[row] < len(self.tokens[row])]

    def grow(self, counts: dict[int, int]) -> None:
        new = [
            (row, next(self.page_ids))
            for row, count in counts.items()
            for _ in range(-(-(self.computed[row] + count) // PAGE_SIZE) - len(self.pages[row]))
        ]
        for row, page in new:
            self.pages[row].append(page)
        rows, ids = np.array(new, dtype=np.int32).reshape(-1, 2).T
        self.table.add_pages(rows, ids)

    def sample(self, rows: list[int], data: st.DataObject) -> None:
        new = [data.draw(st.integers(0, 2**40)) for _ in rows]
        self.table.add_tokens(np.array(rows, dtype=np.int32), np.array(new, dtype=np.int64))
        for row, token in zip(rows, new, strict=True):
            self.tokens[row].append(token)
            if len(self.tokens[row]) > MAX_TOKENS:
                del self.tokens[row]

    def check(
        self, inputs: StepInputs, rows: list[int], counts: dict[int, int], samples: dict[int, bool]
    ) -> None:
        at = [(row, self.computed[row] + i) for row in rows for i in range(counts[row])]
        ends = list(itertools.accumulate(counts[row] for row in rows))
        assert inputs.num_tokens == len(at)
        assert inputs.token_ids.tolist() == [self.tokens[row][i] for row, i in at]
        assert inputs.positions.tolist() == [i for _, i in at]
        assert inputs.slots.tolist() == [
            self.pages[row][i // PAGE_SIZE] * PAGE_SIZE + i % PAGE_SIZE for row, i in at
        ]
        assert inputs.starts.tolist() == [0, *ends]
        assert inputs.lengths.tolist() == [self.computed[row] + counts[row] for row in rows]
        assert inputs.rows.tolist() == rows
        assert inputs.num_decodes == sum(counts[row] == 1 for row in rows)
        assert inputs.logit_index.tolist() == [
            end - 1 for row, end in zip(rows, ends, strict=True) if samples[row]
        ]
        for row in rows:
            table = inputs.tables[row].tolist()
            assert table == self.pages[row] + [0] * (len(table) - len(self.pages[row]))


InputBatchMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=25)
test_inputs_are_what_the_rows_hold = InputBatchMachine.TestCase


def test_all_arrays_are_of_the_types_that_forward_passes_read() -> None:
    table = InputBatch(max_rows=2, max_tokens=20, page_size=16)
    table.start(make_row(1, [5, 6, 7]))
    table.add_pages(np.array([1], np.int32), np.array([3], np.int32))

    for plan in (make_plan([(1, 0, 3, True)]), make_plan([(1, 0, 1, False)])):
        inputs = table.inputs(plan)
        names = ("token_ids", "positions", "slots", "starts", "lengths", "rows", "logit_index")
        assert {getattr(inputs, name).dtype for name in names} == {np.dtype(np.int64)}
        assert inputs.tables.dtype == np.int32


def test_a_page_too_many_is_an_error() -> None:
    table = InputBatch(max_rows=1, max_tokens=16, page_size=16)
    table.start(make_row(0, [1]))

    with pytest.raises(IndexError):
        table.add_pages(np.array([0, 0], np.int32), np.array([1, 2], np.int32))


def test_drafts_follow_the_known_tokens_and_are_replaced_by_new_ones() -> None:
    table = InputBatch(max_rows=MAX_ROWS, max_tokens=MAX_TOKENS, page_size=PAGE_SIZE)
    table.start(make_row(0, [10, 11]))
    table.start(make_row(1, [20, 21, 22]))
    table.add_pages(np.array([0, 1, 1], np.int32), np.array([1, 2, 3], np.int32))
    plan = replace(
        make_plan([(0, 0, 1, False), (1, 2, 3, True)]),
        num_drafts=np.array([0, 2], np.int32),
        draft_ids=np.array([7, 8]),
    )

    inputs = table.inputs(plan)

    assert inputs.token_ids.tolist() == [10, 22, 7, 8]
    assert inputs.positions.tolist() == [0, 2, 3, 4]
    assert inputs.logit_index.tolist() == [1, 2, 3]

    table.add_runs(np.array([1, 1], np.int32), np.array([7, 30]))
    assert table.inputs(make_plan([(1, 4, 1, True)])).token_ids.tolist() == [30]
