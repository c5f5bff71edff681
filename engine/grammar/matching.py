"""What the matchers of both backends share: the end of a sequence, and one mask per place.

A place that accepts the end may accept more as well; whether it does is seen from its mask, which
is then kept for the step that asks for it. Others wait for each mask, so a sequence has a budget of
time: an ambiguous grammar, which takes longer with each token, ends it.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TypeVar

import numpy as np

from remora.engine.grammar.vocabulary import EndMask
from remora.engine.types import MaskWords, MatcherTooSlow

T = TypeVar("T")

# Processor time that a sequence may take: so much at once, and so much more with each token.
# Schemas in use take up to 6 ms for a token with 49,000 tokens to choose from; 0.07 ms is usual.
RESERVE_S = 0.25
TOKEN_S = 0.01
TOKENS_OF_BUDGET = 50_000
TOO_SLOW = (
    "to tell which token may come next takes too long; where alternatives or repeats match the same"
    " text, leave one"
)


class BaseMatcher(ABC):
    """How far one sequence has come. Subclasses know the backend's own state."""

    def __init__(self, ends: EndMask) -> None:
        self._ends = ends
        self._has_ended = False
        self._mask: MaskWords | None = None  # of this place, once it has been worked out
        self._scale = max(1.0, ends.vocab_size / TOKENS_OF_BUDGET)
        self._left_s = RESERVE_S * self._scale

    @property
    def is_complete(self) -> bool:
        """Whether nothing but an end-of-sequence token may follow."""
        if self._has_ended:
            return True
        return self._may_end() and np.array_equal(self._current_mask(), self._ends.words)

    def fill(self, words: MaskWords) -> None:
        """Write which tokens may come next; after the end, only the end itself."""
        words[:] = self._ends.words if self._has_ended else self._current_mask()

    def accept(self, token_id: int) -> bool:
        """Go on by one token; False, and nothing changed, if the grammar does not allow it."""
        if self._has_ended:
            return token_id in self._ends.ids
        if token_id in self._ends.ids:
            self._has_ended = self._may_end()
            return self._has_ended
        if not 0 <= token_id < self._ends.vocab_size:
            return False
        if not self._in_budget(lambda: self._advance(token_id)):
            return False
        self._left_s = min(self._left_s + TOKEN_S * self._scale, RESERVE_S * self._scale)
        self._mask = None
        return True

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
        """Whether what has been accepted is a whole match."""

    @abstractmethod
    def _advance(self, token_id: int) -> bool:
        """Take a token that is no end; False, and nothing changed, if it does not fit."""

    @abstractmethod
    def _write(self, words: MaskWords) -> None:
        """Write the tokens that fit here, the ends among them where a match is whole."""
