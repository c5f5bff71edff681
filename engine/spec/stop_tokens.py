"""Tokens that end each row, which no draft may be: acceptance takes runs as they are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from remora.engine.runner.inputs import Int64Array
from remora.engine.types import IntArray, StepPlan, TokenArray


class StopTokens:
    """The tokens that end rows, each with the draft that takes its place."""

    def __init__(self, eos_token_ids: Iterable[int], vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._eos_token_ids = frozenset(eos_token_ids)
        self._of_all = _replacements(self._eos_token_ids, vocab_size)
        self._of_rows: dict[int, Mapping[int, int]] = {}

    def begin(self, plan: StepPlan) -> None:
        """Take in the rows that start with a step."""
        for init in plan.added:
            own = self._eos_token_ids.union(init.sampling.stop_token_ids)
            is_usual = len(own) == len(self._eos_token_ids)
            self._of_rows[init.row] = (
                self._of_all if is_usual else _replacements(own, self._vocab_size)
            )

    def avoid(self, rows: IntArray, token_ids: TokenArray) -> TokenArray:
        """Replace the tokens [S] that would end their rows, in place."""
        for place, (row, token_id) in enumerate(
            zip(rows.tolist(), token_ids.tolist(), strict=True)
        ):
            token_ids[place] = self._of_rows[row].get(token_id, token_id)
        return token_ids

    def pairs(self, rows: IntArray) -> Int64Array:
        """Return all tokens that end rows [S], as [3, N]: place in `rows`, token, replacement."""
        of_rows = [self._of_rows[row] for row in rows.tolist()]
        return np.array(
            [
                np.repeat(np.arange(len(rows)), [len(each) for each in of_rows]),
                [token_id for each in of_rows for token_id in each],
                [other for each in of_rows for other in each.values()],
            ],
            np.int64,
        )

    def other_than(self, row: int, token_id: int) -> int:
        """Return the next token that does not end the row."""
        following = (token_id + 1) % self._vocab_size
        return self._of_rows[row].get(following, following)


def _replacements(token_ids: Iterable[int], vocab_size: int) -> dict[int, int]:
    """Return for each token the next one that is none of them; if there is none, any."""
    known = {token_id for token_id in token_ids if token_id < vocab_size}
    first = next((other for other in range(vocab_size) if other not in known), 0)
    others: dict[int, int] = {}
    for token_id in sorted(known, reverse=True):
        following = token_id + 1
        others[token_id] = others.get(following, following if following < vocab_size else first)
    return others
