"""What the matchers of both backends share: the end of a sequence, and one mask per place.

A place that accepts the end may accept more as well; whether it does is seen from its mask, which
is then kept for the step that asks for it. Whatever takes a backend far too long ends the sequence:
others wait for each mask.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from remora.engine.grammar.vocabulary import EndMask
from remora.engine.types import MaskWords

# Of processor time; ten times what a grammar may take when it is tried out.
MAX_STEP_S = 0.25


class GrammarTooSlow(RuntimeError):
    """One step in a grammar took so long that no other is to be waited for."""


class BaseMatcher(ABC):
    """How far one sequence has come. Subclasses know the backend's own state."""

    def __init__(self, ends: EndMask) -> None:
        self._ends = ends
        self._has_ended = False
        self._mask: MaskWords | None = None  # of this place, once it has been worked out

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
        with _in_time():
            is_taken = self._advance(token_id)
        if not is_taken:
            return False
        self._mask = None
        return True

    def _current_mask(self) -> MaskWords:
        if self._mask is None:
            mask = np.empty_like(self._ends.words)
            with _in_time():
                self._write(mask)
            self._ends.trim(mask)
            self._mask = mask
        return self._mask

    @abstractmethod
    def _may_end(self) -> bool:
        """Whether what has been accepted is a whole match."""

    @abstractmethod
    def _advance(self, token_id: int) -> bool:
        """Take a token that is no end; False, and nothing changed, if it does not fit."""

    @abstractmethod
    def _write(self, words: MaskWords) -> None:
        """Write the tokens that fit here, the ends among them where a match is whole."""


@contextmanager
def _in_time() -> Iterator[None]:
    started_s = time.thread_time()
    yield
    took_s = time.thread_time() - started_s
    if took_s > MAX_STEP_S:
        raise GrammarTooSlow(f"one step in its grammar took {took_s:.1f} s")
