"""The rows of the engine between steps, and one step's inputs, as flat arrays.

`InputBatch` applies the plans' deltas to each row's tokens and pages, so a plan never repeats a
prompt or a block table. Knows nothing of devices, models, requests or scheduling.

Legend: T tokens of the step, S its rows, R rows of logits.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from remora.engine.beams.moves import NO_COPIES, BeamMoves
from remora.engine.embeddings import EmbeddedTokens
from remora.engine.kv.pages import DUMP_PAGE, pages_needed
from remora.engine.types import BoolArray, IntArray, RowInit, StepPlan, TokenArray

Int64Array = npt.NDArray[np.int64]
Int32Array = npt.NDArray[np.int32]

NOTHING_GROWN: Int32Array = np.empty((4, 0), dtype=np.int32)
NO_IDS: Int32Array = np.empty(0, dtype=np.int32)
IN_FLIGHT = -1  # placeholder of a token that a step in flight will sample


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowInputs:
    """What differs for window layers with a page pool of their own.

    slots:   as in StepInputs
    tables:  as in StepInputs; entries of pages behind the window are stale, or the dump page
    """

    slots: Int64Array
    tables: Int32Array


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInputs:
    """One step's tokens, row by row; rows with one token first.

    token_ids:    [T], IN_FLIGHT where the host does not know the row's newest token yet
    positions:    [T], counted from the start of each sequence
    slots:        [T], where each token's K and V go: page_id * page_size + offset
    starts:       [S + 1] first token of each row, then T
    lengths:      [S] tokens of context, this step's included
    rows:         [S] each row's line in `tables`
    tables:       [max_rows, max_pages] page ids, a view that is valid until the next plan; entries
                  past a row's last page are the dump page
    num_decodes:  rows with one token
    logit_index:  [R] tokens whose logits are wanted: the last of a sampling row, and with drafts
                  also each token before a draft
    adapters:     [T] slot of each token's adapter, counted from 1; 0 = none
    grown:        [4, N] entries of `tables` that are new with this step: line, column, page, and
                  the page of window layers
    copies:       [2, M] pages, and the pages that their contents are copied to before all else
    windows:      for window layers with a page pool of their own; None = there are none
    embedded:     tokens whose embeddings are given, which have no ids; None = there are none
    """

    token_ids: Int64Array
    positions: Int64Array
    slots: Int64Array
    starts: Int64Array
    lengths: Int64Array
    rows: Int64Array
    tables: Int32Array
    num_decodes: int
    logit_index: Int64Array
    adapters: Int32Array
    grown: Int32Array
    copies: Int32Array = field(default_factory=lambda: NO_COPIES)
    windows: WindowInputs | None = None
    embedded: EmbeddedTokens | None = None

    @property
    def num_tokens(self) -> int:
        """T."""
        return len(self.token_ids)


class PageLog:
    """New entries of page tables, for a second model that has its own copy of them."""

    def __init__(self) -> None:
        self._pages: dict[tuple[int, int], int] = {}

    def note(self, row: int, column: int, page: int) -> None:
        """Add an entry; the latest of a place counts."""
        self._pages[row, column] = page

    def take(self) -> Int32Array:
        """Return the entries since the last call as `StepInputs.grown`, without windows."""
        if not self._pages:
            return NOTHING_GROWN
        places, pages = zip(*self._pages, strict=True), list(self._pages.values())
        self._pages = {}
        return np.array([*places, pages, [DUMP_PAGE] * len(pages)], dtype=np.int32)


class InputBatch:
    """Tokens and pages of every row.

    tables:         [max_rows, max_pages] int32
    window_tables:  the same for window layers with a page pool of their own; None = there are none
    """

    def __init__(
        self, *, max_rows: int, max_tokens: int, page_size: int, windowed: bool = False
    ) -> None:
        self._page_size = page_size
        # Zeros, because memory that is not written yet takes no space.
        self._token_ids = np.zeros((max_rows, max_tokens + 2), dtype=np.int64)
        self._num_tokens = np.zeros(max_rows, dtype=np.int64)
        max_pages = pages_needed(max_tokens, page_size)
        self.tables: Int32Array = np.full((max_rows, max_pages), DUMP_PAGE, dtype=np.int32)
        self.window_tables = np.full_like(self.tables, DUMP_PAGE) if windowed else None
        self._num_pages = np.zeros(max_rows, dtype=np.int64)
        self._adapters = np.zeros(max_rows, dtype=np.int32)
        self._grown: list[tuple[int, int, int, int]] = []
        self._copies = NO_COPIES
        self._logs: list[PageLog] = []

    def start(self, init: RowInit) -> None:
        """Start a row, replacing its previous contents."""
        row, count = init.row, len(init.token_ids)
        self._token_ids[row, :count] = init.token_ids
        self._token_ids[row, count] = IN_FLIGHT
        self._num_tokens[row] = count
        self.tables[row] = DUMP_PAGE
        if self.window_tables is not None:
            self.window_tables[row] = DUMP_PAGE
        self._num_pages[row] = 0
        self._adapters[row] = init.adapter_slot

    def add_pages(self, rows: IntArray, page_ids: IntArray, window_ids: IntArray = NO_IDS) -> None:
        """Append each page, and its page of window layers, to its row's table, in order."""
        if self.window_tables is None:
            window_ids = np.zeros_like(page_ids)
        for row, page, window_page in zip(
            rows.tolist(), page_ids.tolist(), window_ids.tolist(), strict=True
        ):
            column = int(self._num_pages[row])
            self.tables[row, column] = page
            if self.window_tables is not None:
                self.window_tables[row, column] = window_page
            self._note_page(row, column, page, window_page)
            self._num_pages[row] += 1

    def move(self, moves: BeamMoves) -> None:
        """Let rows continue others, whose pages they share; their new pages are added later."""
        rows, sources, num_kept = moves.rows, moves.sources, moves.num_kept
        width = int(self._num_tokens[sources].max()) + 1
        self._token_ids[rows, :width] = self._token_ids[sources, :width]
        self._num_tokens[rows] = self._num_tokens[sources]
        self.add_tokens(rows, moves.token_ids)
        before, tables = self.tables[rows], self.tables[sources]
        tables[np.arange(tables.shape[1]) >= num_kept[:, None]] = DUMP_PAGE
        self.tables[rows] = tables
        self._num_pages[rows] = num_kept
        self._adapters[rows] = self._adapters[sources]
        self._copies = np.concatenate((self._copies, moves.copies), axis=1)
        # What follows the kept pages is never read.
        for place, column in np.argwhere((tables != before) & (tables != DUMP_PAGE)).tolist():
            self._note_page(int(rows[place]), column, int(tables[place, column]), DUMP_PAGE)

    def _note_page(self, row: int, column: int, page: int, window_page: int) -> None:
        self._grown.append((row, column, page, window_page))
        for log in self._logs:
            log.note(row, column, page)

    def log_pages(self) -> PageLog:
        """Return a log of the pages that rows get from now on."""
        self._logs.append(PageLog())
        return self._logs[-1]

    def add_runs(self, rows: IntArray, token_ids: TokenArray) -> None:
        """Append tokens in order; a row may have several."""
        while len(rows):
            _, first = np.unique(rows, return_index=True)
            self.add_tokens(rows[first], token_ids[first])
            rows, token_ids = np.delete(rows, first), np.delete(token_ids, first)

    def add_tokens(self, rows: IntArray, token_ids: TokenArray) -> None:
        """Append one new token to each row."""
        places = self._num_tokens[rows]
        self._token_ids[rows, places] = token_ids
        self._token_ids[rows, places + 1] = IN_FLIGHT
        self._num_tokens[rows] += 1

    def inputs(self, plan: StepPlan) -> StepInputs:
        """Lay out the plan's tokens."""
        has_drafts = len(plan.draft_ids) > 0
        if has_drafts:
            self._put_drafts(plan)
        grown = NOTHING_GROWN
        if self._grown:
            grown = np.array(self._grown, dtype=np.int32).T
            self._grown = []
        copies, self._copies = self._copies, NO_COPIES
        laid = self.span(
            plan.rows.astype(np.int64),
            plan.starts.astype(np.int64),
            plan.num_tokens.astype(np.int64),
            plan.samples,
            grown=grown,
        )
        if copies.size:
            laid = replace(laid, copies=copies)
        if plan.embedded is not None:
            laid = replace(laid, embedded=plan.embedded)
        return replace(laid, logit_index=_verified(plan, laid.starts)) if has_drafts else laid

    def span(
        self,
        rows: Int64Array,
        first: Int64Array,
        counts: Int64Array,
        samples: BoolArray,
        *,
        shift: int = 0,
        grown: Int32Array = NOTHING_GROWN,
    ) -> StepInputs:
        """Lay out tokens that rows know, wherever their KV is up to.

        rows:     [S], rows with one token first
        first:    [S] position of each row's first token
        counts:   [S] tokens of each row, at least 1
        samples:  [S] whether the logits of a row's last token are wanted
        shift:    each position gets the token that is so many positions later
        """
        num_rows = len(rows)
        starts = np.zeros(num_rows + 1, dtype=np.int64)
        np.cumsum(counts, out=starts[1:])
        if starts[-1] == num_rows:  # one token each: nothing to repeat
            token_rows, positions, num_decodes = rows, first, num_rows
        else:
            token_rows = np.repeat(rows, counts)
            positions = np.arange(starts[-1]) + np.repeat(first - starts[:-1], counts)
            num_decodes = int((counts == 1).sum())
        columns, offsets = positions // self._page_size, positions % self._page_size

        def slots(tables: Int32Array) -> Int64Array:
            return tables[token_rows, columns] * np.int64(self._page_size) + offsets

        windowed = self.window_tables
        return StepInputs(
            token_ids=self._token_ids[token_rows, positions + shift],
            positions=positions,
            slots=slots(self.tables),
            starts=starts,
            lengths=first + counts,
            rows=rows,
            tables=self.tables,
            num_decodes=num_decodes,
            logit_index=(starts[1:] - 1)[samples],
            adapters=self._adapters[token_rows],
            grown=grown,
            windows=windowed
            if windowed is None
            else WindowInputs(slots=slots(windowed), tables=windowed),
        )

    def lengths(self, rows: IntArray) -> Int64Array:
        """Return the numbers of known tokens of rows."""
        lengths: Int64Array = self._num_tokens[rows]
        return lengths

    def put(self, rows: IntArray, positions: Int64Array, token_ids: TokenArray) -> None:
        """Write drafts behind the known tokens of their rows, where new tokens replace them."""
        self._token_ids[rows, positions] = token_ids

    def _put_drafts(self, plan: StepPlan) -> None:
        ends = plan.starts.astype(np.int64) + plan.num_tokens
        rows = np.repeat(plan.rows, plan.num_drafts)
        self.put(rows, _last(ends, plan.num_drafts), plan.draft_ids)


def _verified(plan: StepPlan, starts: Int64Array) -> Int64Array:
    """Return the tokens whose logits sampling rows need: 1 + drafts of each."""
    return _last(starts[1:][plan.samples], 1 + plan.num_drafts[plan.samples])


def _last(ends: Int64Array, counts: IntArray | Int64Array) -> Int64Array:
    """Join the ranges [ends - counts, ends)."""
    places = np.arange(counts.sum())
    found: Int64Array = places + np.repeat(ends - np.cumsum(counts), counts)
    return found


def dummy_step(
    num_tokens: int,
    num_rows: int,
    max_pages: int,
    *,
    windowed: bool = False,
    max_drafts: int = 0,
) -> StepInputs:
    """Return a step without requests: tokens spread evenly over rows, all on the dump page.

    windowed:    whether window layers have a page pool of their own
    max_drafts:  last tokens of a row that are drafts, where it has so many and one more
    """
    counts = np.full(num_rows, num_tokens // num_rows, dtype=np.int64)
    counts[num_rows - num_tokens % num_rows :] += 1
    starts = np.concatenate(([0], np.cumsum(counts))).astype(np.int64)
    slots = np.zeros(num_tokens, dtype=np.int64)
    tables = np.full((num_rows, max_pages), DUMP_PAGE, dtype=np.int32)
    return StepInputs(
        token_ids=np.zeros(num_tokens, dtype=np.int64),
        positions=np.arange(num_tokens) - np.repeat(starts[:-1], counts),
        slots=slots,
        starts=starts,
        lengths=counts,
        rows=np.arange(num_rows, dtype=np.int64),
        tables=tables,
        num_decodes=int((counts == 1).sum()),
        logit_index=_last(starts[1:], np.minimum(counts, 1 + max_drafts)),
        adapters=np.zeros(num_tokens, dtype=np.int32),
        grown=NOTHING_GROWN,
        windows=WindowInputs(slots=slots, tables=tables) if windowed else None,
    )
