"""Which tokens of each row a draft model has computed, given that rows share pages.

A draft model computes rows when they get drafts, and not before, so its KV is missing for some of
the tokens that the target model has computed, also on pages that the prefix cache hands to other
rows. Knows pages and counts; it computes nothing.
"""

from __future__ import annotations

import numpy as np

from remora.engine.runner.inputs import Int32Array, Int64Array
from remora.engine.types import IntArray, StepPlan


class DraftCoverage:
    """The leading tokens of each row whose draft KV is that of the row's tokens.

    tables:  [max_rows, max_pages] page ids of the rows, which change with their plans
    """

    def __init__(self, tables: Int32Array, *, num_pages: int, page_size: int) -> None:
        self._tables = tables
        self._page_size = page_size
        self._counts = np.zeros(len(tables), np.int64)
        self._marked = np.zeros(len(tables), np.int64)  # leading pages known to be complete
        self._is_complete = np.zeros(num_pages + 1, np.bool_)

    def begin(self, plan: StepPlan) -> None:
        """Take in a step that the target model is about to compute.

        Tokens from a row's start on may differ from what was drafted there.
        """
        size, tables = self._page_size, self._tables
        rows, starts = plan.rows, plan.starts.astype(np.int64)
        if plan.added:
            first = dict(zip(rows.tolist(), starts.tolist(), strict=True))
            for init in plan.added:
                pages = tables[init.row, : first[init.row] // size]
                complete = self._is_complete[pages]
                num_complete = len(pages) if complete.all() else int(complete.argmin())
                self._counts[init.row] = num_complete * size
                self._marked[init.row] = num_complete
        if plan.moves is not None:  # beams have no drafts
            self._counts[plan.moves.rows] = self._marked[plan.moves.rows] = 0
        counts = np.minimum(self._counts[rows], starts)
        self._counts[rows] = counts
        full = counts // size
        for place in (full > self._marked[rows]).nonzero()[0].tolist():
            row, last = int(rows[place]), int(full[place])
            self._is_complete[tables[row, self._marked[row] : last]] = True
            self._marked[row] = last
        columns = starts // size
        num_written = (starts + plan.num_tokens - 1) // size - columns + 1
        behind = np.repeat(columns + num_written - np.cumsum(num_written), num_written)
        written = behind + np.arange(len(behind))
        self._is_complete[tables[np.repeat(rows, num_written), written]] = False

    def counts(self, rows: IntArray) -> Int64Array:
        """Return the covered tokens of rows."""
        covered: Int64Array = self._counts[rows]
        return covered

    def cover(self, rows: IntArray, counts: Int64Array) -> None:
        """Note that the draft model has computed the first `counts` tokens of rows."""
        self._counts[rows] = counts
