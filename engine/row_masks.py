"""Masks of the rows that are guided, filled while the forward pass runs.

A thread of its own fills them: the pass lets go of the interpreter, and so do compiled grammars. A
guide that fails, in whatever way, costs its own row and no other. Where no row is guided there is
no thread, no memory and no work. Knows no logits.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from remora.engine.guides import GuideFailed, RowGuide, needs_guide
from remora.engine.tokens.spellings import Spellings
from remora.engine.types import IntArray, MaskWords, RowInit, TokenArray

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMasks:
    """What may come next in the guided rows of one step.

    lines:      [G] lines of logits that are restricted
    words:      [G, ceil(vocab_size / 32)] bit i of a line is token i; overwritten by the next step
    overruling: lines whose tokens are without alternative: no ban holds for them
    """

    lines: TokenArray
    words: MaskWords
    overruling: frozenset[int]


@dataclass(frozen=True, slots=True)
class GuidedEnds:
    """Rows that end by what their guides say of their newest tokens.

    completed:  their grammar is complete
    failed:     row -> why it cannot go on
    """

    completed: frozenset[int] = frozenset()
    failed: dict[int, str] = field(default_factory=dict)


NOBODY_ENDS = GuidedEnds()


class RowMasks:
    """The guides of the rows, and the masks that they fill."""

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
        self._guides: dict[int, RowGuide] = {}
        self._failed: dict[int, str] = {}
        self._words: MaskWords | None = None
        self._executor: ThreadPoolExecutor | None = None
        self._begun: Future[StepMasks] | None = None

    def add_row(self, init: RowInit) -> None:
        """Start a row, or resume one whose `token_ids` already hold output."""
        self.drop_row(init.row)
        if needs_guide(init):
            self._attempt(init.row, partial(self._guide, init))

    def drop_row(self, row: int) -> None:
        """Forget a row; dropping an unknown one is harmless."""
        self._guides.pop(row, None)
        self._failed.pop(row, None)

    def begin(self, rows: IntArray) -> None:
        """Begin to fill the masks of rows [R] that will be sampled; `take` must follow."""
        if not (self._guides or self._failed) or not len(rows):
            return
        if self._executor is None:
            self._executor = ThreadPoolExecutor(1, thread_name_prefix="remora-masks")
        self._begun = self._executor.submit(self._fill, rows)

    def take(self, rows: IntArray) -> StepMasks | None:
        """Return the masks of these rows, as begun; None when none of them is restricted."""
        if not (self._guides or self._failed):
            return None
        begun, self._begun = self._begun, None
        masks = self._fill(rows) if begun is None else begun.result()
        return masks if len(masks.lines) else None

    def accept(self, rows: IntArray, token_ids: TokenArray) -> GuidedEnds:
        """Tell the guides of rows [R] their new tokens [R]."""
        if not (self._guides or self._failed):
            return NOBODY_ENDS
        completed = []
        for row, token_id in zip(rows.tolist(), token_ids.tolist(), strict=True):
            guide = self._guides.get(row)
            if guide is None or row in self._failed:
                continue
            self._attempt(row, partial(guide.accept, token_id))
            if guide.is_complete:
                completed.append(row)
            elif guide.is_spent:
                del self._guides[row]
        failed = {row: self._failed[row] for row in rows.tolist() if row in self._failed}
        return GuidedEnds(frozenset(completed) - failed.keys(), failed)

    def close(self) -> None:
        """End the thread."""
        if self._executor is not None:
            self._executor.shutdown()

    def _guide(self, init: RowInit) -> None:
        self._guides[init.row] = RowGuide(
            init, self._eos_token_ids, self._vocab_size, self._spellings
        )

    def _fill(self, rows: IntArray) -> StepMasks:
        if self._words is None:
            self._words = np.empty((self._max_rows, -(-self._vocab_size // 32)), np.int32)
        lines: list[int] = []
        overruling: list[int] = []
        for line, row in enumerate(rows.tolist()):
            guide = self._guides.get(row)
            if row in self._failed:
                self._words[len(lines)] = 0
            elif guide is None or not guide.restricts:
                continue
            else:
                words = self._words[len(lines)]
                if guide.overrules_bans:
                    overruling.append(line)
                if not self._attempt(row, partial(guide.fill, words)):
                    words[:] = 0
            lines.append(line)
        return StepMasks(
            lines=np.array(lines, np.int64),
            words=self._words[: len(lines)],
            overruling=frozenset(overruling),
        )

    def _attempt(self, row: int, action: Callable[[], object]) -> bool:
        """Run what a guide does; if it fails, so has the row."""
        try:
            action()
        except GuideFailed as reason:
            self._failed[row] = str(reason)
        except Exception as error:  # a constraint's code is not ours; it may raise anything
            logger.exception("the constraint of row %d has failed", row)
            self._failed[row] = f"its constraint failed: {error}"
        return row not in self._failed
