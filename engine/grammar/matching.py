"""Shared by the matchers of both backends: the end of a sequence, a mask per position, going back.

A position that accepts the end may accept more as well; its mask tells, and is kept for the step
that asks for it. Other requests wait for each mask, so a sequence has a time budget: an ambiguous
grammar that takes longer with each token ends the sequence.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TypeVar, cast

import numpy as np

from remora.engine.grammar.vocabulary import EndMask
from remora.engine.types import MaskWords, MatcherTooSlow

T = TypeVar("T")
_Position = tuple[int, bool, "MaskWords | None", float]

# Processor time of a sequence: a reserve, and an allowance per token. Common schemas take up to 6
# ms per token for a vocabulary of 49,000 tokens; 0.07 ms is typical.
RESERVE_S = 0.25
TOKEN_S = 0.01
TOKENS_OF_BUDGET = 50_000
TOO_SLOW = (
    "computing the next tokens takes too long; where alternatives or repeats match the same"
    " text, leave one"
)


class BaseMatcher(ABC):
    """Progress of one sequence in a grammar. Subclasses hold the backend's state."""

    def __init__(self, ends: EndMask) -> None:
        self._ends = ends
        self._num_tokens = 0  # accepted, without ends
        self._has_ended = False
        self._mask: MaskWords | None = None  # of this position, once computed
        self._scale = max(1.0, ends.vocab_size / TOKENS_OF_BUDGET)
        self._left_s = RESERVE_S * self._scale

    @property
    def is_complete(self) -> bool:
        """Whether nothing but an end-of-sequence token may follow."""
        if self._has_ended:
            return True
        return self._may_end() and np.array_equal(self._current_mask(), self._ends.words)

    def fill(self, words: MaskWords) -> None:
        """Write which tokens may come next; after the end, only end tokens."""
        words[:] = self._ends.words if self._has_ended else self._current_mask()

    def accept(self, token_id: int) -> bool:
        """Advance by one token; False, without a change, if the grammar does not allow it."""
        if self._has_ended:
            return token_id in self._ends.ids
        if token_id in self._ends.ids:
            self._has_ended = self._may_end()
            return self._has_ended
        if not 0 <= token_id < self._ends.vocab_size or token_id in self._ends.blank_ids:
            return False
        if not self._in_budget(lambda: self._advance(token_id)):
            return False
        self._left_s = min(self._left_s + TOKEN_S * self._scale, RESERVE_S * self._scale)
        self._num_tokens += 1
        self._mask = None
        return True

    def save(self) -> object:
        """Return the current position, for `restore`."""
        position: _Position = self._num_tokens, self._has_ended, self._mask, self._left_s
        return position

    def restore(self, position: object) -> None:
        """Go back to a position; the time spent since is not the sequence's."""
        newest = self._num_tokens
        self._num_tokens, self._has_ended, self._mask, self._left_s = cast("_Position", position)
        if self._num_tokens < newest:
            self._undo(newest - self._num_tokens)

    def _current_mask(self) -> MaskWords:
        if self._mask is None:
            mask = np.empty_like(self._ends.words)
            self._in_budget(lambda: self._write(mask))
            self._ends.trim(mask)
            self._mask = mask
        return self._mask

    def _in_budget(self, work: Callable[[], T]) -> T:
        started_s = time.thread_time()
        value = work()
        self._left_s -= time.thread_time() - started_s
        if self._left_s < 0:
            raise MatcherTooSlow(TOO_SLOW)
        return value

    @abstractmethod
    def _may_end(self) -> bool:
        """Whether the accepted tokens are a complete match."""

    @abstractmethod
    def _advance(self, token_id: int) -> bool:
        """Advance by a token that is not an end; False, without a change, if it does not fit."""

    @abstractmethod
    def _undo(self, num_tokens: int) -> None:
        """Take back the last tokens, one at least."""

    @abstractmethod
    def _write(self, words: MaskWords) -> None:
        """Write the tokens that may come next, including end tokens after a complete match."""
