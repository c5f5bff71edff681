"""What the engine asks of a compiled grammar, whichever library compiled it.

Knows masks and tokens; no library, source text or row.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

MaskWords = npt.NDArray[np.int32]


class MatcherTooSlow(Exception):
    """A grammar takes more time than one row may cost the others."""


class Matcher(Protocol):
    """A sequence's position in its grammar. May raise MatcherTooSlow."""

    @property
    def is_complete(self) -> bool:
        """Whether only an end-of-sequence token may follow."""

    def fill(self, words: MaskWords) -> None:
        """Write the allowed tokens: bit i of `words` [ceil(vocab_size / 32)] is token i."""

    def accept(self, token_id: int) -> bool:
        """Advance by one token; returns False, and changes nothing, if it is not allowed."""


@runtime_checkable
class Reversible(Protocol):
    """What a matcher has to have for drafts: it can be advanced by them, and go back."""

    def save(self) -> object:
        """Return the current position, for `restore`."""

    def restore(self, position: object) -> None:
        """Go back to a position, of which nothing that came later counts; time does not either."""


@runtime_checkable
class Forkable(Protocol):
    """What a matcher has that another row can continue without reading the output again."""

    def fork(self) -> Matcher:
        """Return a matcher at the same position, which goes its own way."""


class Grammar(Protocol):
    """A compiled constraint on output. Immutable; sequences may share it."""

    @property
    def num_bytes(self) -> int:
        """Size in memory."""

    def matcher(self) -> Matcher:
        """Return a new matcher at the start of the grammar."""
