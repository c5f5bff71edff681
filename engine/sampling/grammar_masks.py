"""Token masks of constrained rows, filled while the forward pass runs.

A thread fills them: the forward pass and compiled grammars release the interpreter lock. A
constraint that fails or takes too long costs its own row and no other. Without constrained rows
there is no thread, no memory and no work. Knows no logits.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from remora.engine.sampling.constraint_thread import ConstraintThread, Work, fault_of
from remora.engine.sampling.constraints import RowConstraint, is_constrained
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
    """

    completed: frozenset[int] = frozenset()
    failed: dict[int, RowFault] = field(default_factory=dict)


NO_ENDS = ConstrainedEnds()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Filling:
    """Masks being filled: the restricted lines [G], their rows, and lines that overrule bans."""

    lines: list[int]
    rows: list[int]
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
        self._max_rows = max_rows
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

    def holds(self, row: int) -> bool:
        """Return whether the row has a constraint, or had one that failed."""
        return row in self._constraints or row in self._failed

    def begin(self, rows: IntArray) -> None:
        """Begin to fill the masks of rows [R] to be sampled; `take` must follow."""
        self._begun = self._fill(rows) if self._constraints or self._failed else None

    def take(self, rows: IntArray) -> StepMasks | None:
        """Return the masks of these rows, as begun; None if no row is restricted."""
        if not (self._constraints or self._failed):
            return None
        filling, self._begun = self._begun or self._fill(rows), None
        self._finish(filling.work)
        for line, row in enumerate(filling.rows):
            if row in self._failed:
                filling.words[line] = 0
        if not filling.lines:
            return None
        return StepMasks(
            lines=np.array(filling.lines, np.int64),
            words=filling.words[: len(filling.lines)],
            overruling=frozenset(filling.overruling),
        )

    def accept(
        self, rows: IntArray, token_ids: TokenArray, *, unsampled: Collection[int] = ()
    ) -> ConstrainedEnds:
        """Advance the constraints of rows [R] by their tokens [R], except rows in `unsampled`."""
        if not (self._constraints or self._failed):
            return NO_ENDS
        advanced = {
            row: (constraint, token_id)
            for row, token_id in zip(rows.tolist(), token_ids.tolist(), strict=True)
            if row not in unsampled and (constraint := self._constraints.get(row)) is not None
        }
        steps = [
            (row, partial(constraint.accept, token))
            for row, (constraint, token) in advanced.items()
        ]
        if steps:
            self._finish(self._thread.begin(steps))
        completed = set()
        for row, (constraint, _) in advanced.items():
            if constraint.is_complete:
                completed.add(row)
            elif constraint.is_spent:
                self._constraints.pop(row, None)
        failed = {row: self._failed[row] for row in rows.tolist() if row in self._failed}
        return ConstrainedEnds(frozenset(completed) - failed.keys(), failed)

    def close(self) -> None:
        """End the thread."""
        self._thread.close()

    def _add(self, init: RowInit) -> None:
        self._constraints[init.row] = RowConstraint(
            init, self._eos_token_ids, self._vocab_size, self._spellings
        )

    def _fill(self, rows: IntArray) -> _Filling:
        """Begin to fill the masks of rows [R]."""
        if self._words is None:
            self._words = np.empty((self._max_rows, -(-self._vocab_size // 32)), np.int32)
        lines: list[int] = []
        restricted: list[int] = []
        overruling: set[int] = set()
        steps: list[tuple[int, partial[None]]] = []
        for line, row in enumerate(rows.tolist()):
            constraint = self._constraints.get(row)
            if row not in self._failed and (constraint is None or not constraint.restricts):
                continue
            if constraint is not None:
                fill = partial(_fill_line, constraint, self._words[len(lines)], line, overruling)
                steps.append((row, fill))
            lines.append(line)
            restricted.append(row)
        return _Filling(
            lines=lines,
            rows=restricted,
            words=self._words,
            overruling=overruling,
            work=self._thread.begin(steps),
        )

    def _finish(self, work: Work) -> None:
        """Wait for the constraints, and drop the failed ones."""
        faults, is_left = self._thread.finish(work)
        for row, fault in faults.items():
            self._failed[row] = fault
            self._constraints.pop(row, None)
        if is_left:
            self._words = None  # a thread that was left may still write there


def _fill_line(
    constraint: RowConstraint, words: MaskWords, line: int, overruling: set[int]
) -> None:
    if constraint.overrules_bans:
        overruling.add(line)
    constraint.fill(words)
