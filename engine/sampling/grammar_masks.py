"""Token masks of constrained rows, filled while the forward pass runs.

A thread fills them: the forward pass and compiled grammars release the interpreter lock. A
constraint that fails or takes too long costs its own row and no other. Without constrained rows
there is no thread, no memory and no work.

A line behind drafts has the mask that it would have if they were output. These masks are filled
after the masks that rows need in any case; a constraint that fails or takes too long here costs its
row no more than its drafts. Where there is no mask, behind a draft that may not come, no token is
allowed, so that the line does not count. Knows no logits.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from remora.engine.sampling.constraint_thread import ConstraintThread, Work, fault_of
from remora.engine.sampling.constraints import RowConstraint, is_constrained
from remora.engine.spec.acceptance import DraftLines
from remora.engine.tokens.token_text import Spellings
from remora.engine.types import IntArray, MaskWords, RowFault, RowInit, TokenArray


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMasks:
    """Allowed tokens of the constrained rows of one step.

    lines:      [G] lines of logits that are restricted
    words:      [G, ceil(vocab_size / 32)] bit i of a line is token i; overwritten by the next step
    overruling: lines whose tokens are forced, so that no ban applies
    """

    lines: TokenArray
    words: MaskWords
    overruling: frozenset[int]


@dataclass(frozen=True, slots=True)
class ConstrainedEnds:
    """Rows that their constraints end with the newest token.

    completed:  rows whose grammar is complete
    failed:     row -> why its constraint failed
    cut:        row -> how many of its tokens count, where its constraint fails after some of them;
                the next step begins there
    """

    completed: frozenset[int] = frozenset()
    failed: dict[int, RowFault] = field(default_factory=dict)
    cut: dict[int, int] = field(default_factory=dict)


NO_ENDS = ConstrainedEnds()


@dataclass(slots=True, kw_only=True)
class _Ahead:
    """The lines of a row behind its drafts.

    place:       of the first of them among the masks
    num_filled:  masks that are filled
    """

    constraint: RowConstraint
    draft_ids: list[int]
    place: int
    num_filled: int = 0

    def fill(self, words: MaskWords, line: int, overruling: set[int]) -> None:
        """Fill masks from line `line` on, as long as drafts may come."""
        for count, _ in enumerate(self.constraint.ahead(self.draft_ids)):
            _fill_line(self.constraint, words[self.place + count], line + count, overruling)
            self.num_filled = count + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class _Filling:
    """Masks being filled: the restricted lines [G], their rows, and lines that overrule bans."""

    lines: list[int]
    rows: list[int]
    aheads: list[_Ahead]
    words: MaskWords
    overruling: set[int]
    work: Work


class RowMasks:
    """The constraints of all rows and their masks."""

    def __init__(
        self,
        *,
        max_rows: int,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        spellings: Spellings,
    ) -> None:
        self._vocab_size = vocab_size
        self._eos_token_ids = tuple(eos_token_ids)
        self._spellings = spellings
        self._max_rows = max_rows  # and masks at first
        self._constraints: dict[int, RowConstraint] = {}
        self._failed: dict[int, RowFault] = {}
        self._words: MaskWords | None = None
        self._thread = ConstraintThread()
        self._begun: _Filling | None = None

    def add_row(self, init: RowInit) -> None:
        """Start a row, or resume one whose `token_ids` hold output already."""
        self.drop_row(init.row)
        if is_constrained(init):
            fault = fault_of(partial(self._add, init), init.row)
            if fault is not None:
                self._failed[init.row] = fault

    def drop_row(self, row: int) -> None:
        """Forget a row; dropping an unknown one is harmless."""
        self._constraints.pop(row, None)
        self._failed.pop(row, None)

    def move(self, rows: Sequence[int], sources: Sequence[int], token_ids: Sequence[int]) -> None:
        """Let rows continue others, all at once, with these tokens."""
        if not (self._constraints or self._failed):
            return
        held, failed = dict(self._constraints), dict(self._failed)
        for row, source in zip(rows, sources, strict=True):
            if row == source:
                continue
            self.drop_row(row)
            if source in failed:
                self._failed[row] = failed[source]
            elif source in held:
                fault = fault_of(partial(self._continue, held[source], row), row)
                if fault is not None:
                    self._failed[row] = fault
        self.accept(np.array(rows, np.int32), np.array(token_ids, np.int64))

    def drop_rows(self) -> None:
        """Forget all rows, once masks that are being filled need them no more."""
        begun, self._begun = self._begun, None
        if begun is not None:
            self._finish(begun.work)
        self._constraints.clear()
        self._failed.clear()

    def holds(self, row: int) -> bool:
        """Return whether the row has a constraint, or had one that failed."""
        return row in self._constraints or row in self._failed

    def possible_drafts(self, drafts: Sequence[tuple[int, Sequence[int]]]) -> list[int]:
        """Return how many of each row's drafts, from the first on, its constraint lets come.

        drafts:  (row, drafts) of rows whose tokens are all known
        """
        counts = [len(draft_ids) for _, draft_ids in drafts]

        def count(place: int, constraint: RowConstraint, draft_ids: Sequence[int]) -> None:
            counts[place] = sum(1 for _ in constraint.ahead(draft_ids))

        steps = []
        for place, (row, draft_ids) in enumerate(drafts):
            if (constraint := self._constraints.get(row)) is not None:
                counts[place] = 0
                steps.append((~row, partial(count, place, constraint, draft_ids)))
        if steps:
            self._finish(self._thread.begin(steps))
        return counts

    def begin(self, rows: IntArray, drafts: DraftLines | None = None) -> None:
        """Begin to fill the masks of rows [R] to be sampled; `take` must follow.

        drafts:  as of `Sampler.choose`
        """
        self._begun = self._fill(rows, drafts) if self._constraints or self._failed else None

    def take(self, rows: IntArray, drafts: DraftLines | None = None) -> StepMasks | None:
        """Return the masks of these rows, as begun; None if no row is restricted."""
        if not (self._constraints or self._failed):
            return None
        filling, self._begun = self._begun or self._fill(rows, drafts), None
        is_left = self._finish(filling.work)
        if not filling.lines:
            return None
        words, unfilled = filling.words[: len(filling.lines)], self._unfilled(filling)
        if unfilled:
            if is_left:
                words = words.copy()  # the thread that was left may write to a line behind a draft
            words[unfilled] = 0
        return StepMasks(
            lines=np.array(filling.lines, np.int64),
            words=words,
            overruling=frozenset(filling.overruling),
        )

    def accept(
        self, rows: IntArray, token_ids: TokenArray, *, unsampled: Collection[int] = ()
    ) -> ConstrainedEnds:
        """Advance the constraints of rows [N] by their tokens [N], except rows in `unsampled`.

        A row may have several tokens, in order.
        """
        if not (self._constraints or self._failed):
            return NO_ENDS
        runs: dict[int, list[int]] = {}
        for row, token_id in zip(rows.tolist(), token_ids.tolist(), strict=True):
            if row in self._constraints and row not in unsampled:
                runs.setdefault(row, []).append(token_id)
        advanced = {row: self._constraints[row] for row in runs}
        counts: dict[int, int] = {}

        def advance(row: int) -> None:
            counts[row] = advanced[row].accept(*runs[row])

        if runs:
            self._finish(self._thread.begin([(row, partial(advance, row)) for row in runs]))
        completed = set()
        for row, constraint in advanced.items():
            if constraint.is_complete:
                completed.add(row)
            elif constraint.is_spent:
                self._constraints.pop(row, None)
        failed = {row: self._failed[row] for row in rows.tolist() if row in self._failed}
        cut = {row: count for row, count in counts.items() if count < len(runs[row])}
        return ConstrainedEnds(frozenset(completed) - failed.keys(), failed, cut)

    def close(self) -> None:
        """End the thread."""
        self._thread.close()

    def _add(self, init: RowInit, *, can_draft: bool = True) -> None:
        self._constraints[init.row] = RowConstraint(
            init, self._eos_token_ids, self._vocab_size, self._spellings, can_draft=can_draft
        )

    def _continue(self, source: RowConstraint, row: int) -> None:
        """Let a row continue the output of another one."""
        forked = source.fork(row)
        if forked is None:
            self._add(replace(source.restarted(), row=row))
        else:
            self._constraints[row] = forked

    def _fill(self, rows: IntArray, drafts: DraftLines | None) -> _Filling:
        """Begin to fill the masks of rows [R]."""
        if self._words is None or len(self._words) < len(rows):
            shape = max(self._max_rows, len(rows)), -(-self._vocab_size // 32)
            self._words = np.empty(shape, np.int32)
        lines: list[int] = []
        restricted: list[int] = []
        overruling: set[int] = set()
        aheads: list[_Ahead] = []
        steps: list[tuple[int, partial[None]]] = []
        last: list[tuple[int, partial[None]]] = []
        for line, row, draft_ids in _lines_of_rows(rows, drafts):
            constraint = self._constraints.get(row)
            if constraint is None and row not in self._failed:
                continue
            if constraint is None or constraint.restricts:
                if constraint is not None:
                    words = self._words[len(lines)]
                    steps.append((row, partial(_fill_line, constraint, words, line, overruling)))
                lines.append(line)
                restricted.append(row)
            if draft_ids and constraint is not None:
                ahead = _Ahead(constraint=constraint, draft_ids=draft_ids, place=len(lines))
                last.append((~row, partial(ahead.fill, self._words, line + 1, overruling)))
                aheads.append(ahead)
            if draft_ids:
                lines += range(line + 1, line + 1 + len(draft_ids))
                restricted += [row] * len(draft_ids)
        return _Filling(
            lines=lines,
            rows=restricted,
            aheads=aheads,
            words=self._words,
            overruling=overruling,
            work=self._thread.begin([*steps, *last]),
        )

    def _unfilled(self, filling: _Filling) -> list[int]:
        """Return the places of masks that are not filled."""
        places = [place for place, row in enumerate(filling.rows) if row in self._failed]
        for ahead in filling.aheads:
            places += range(ahead.place + ahead.num_filled, ahead.place + len(ahead.draft_ids))
        return places

    def _finish(self, work: Work) -> bool:
        """Wait for the constraints, and drop the failed ones; returns whether a thread was left.

        Work of row r is named r if the row cannot go on without it, and ~r if its drafts cannot.
        """
        faults, is_left = self._thread.finish(work)
        for name, fault in faults.items():
            if name >= 0:
                self._fail(name, fault)
        for name in faults:
            if name < 0 and (constraint := self._constraints.get(~name)) is not None:
                restart = partial(self._add, constraint.restarted(), can_draft=False)
                if (fault_again := fault_of(restart, ~name)) is not None:
                    self._fail(~name, fault_again)
        if is_left:
            self._words = None  # a thread that was left may still write there
        return is_left

    def _fail(self, row: int, fault: RowFault) -> None:
        self._failed[row] = fault
        self._constraints.pop(row, None)


def _lines_of_rows(
    rows: IntArray, drafts: DraftLines | None
) -> Iterator[tuple[int, int, list[int]]]:
    """Return the first line of each row, the row, and its drafts."""
    row_list = rows.tolist()
    if drafts is None:
        for line, row in enumerate(row_list):
            yield line, row, []
        return
    draft_ids, firsts = drafts.draft_ids.tolist(), (drafts.offsets == 0).nonzero()[0].tolist()
    for first, end in zip(firsts, [*firsts[1:], len(row_list)], strict=True):
        yield first, row_list[first], draft_ids[first : end - 1]


def _fill_line(
    constraint: RowConstraint, words: MaskWords, line: int, overruling: set[int]
) -> None:
    if constraint.overrules_bans:
        overruling.add(line)
    constraint.fill(words)
