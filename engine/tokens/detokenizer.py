"""Incremental detokenisation: pieces of text that add up to the text of the whole.

A token alone has no text of its own: it may be part of a character, and decoders treat the start of
a text specially. So a window of the last tokens is decoded with and without the new ones, and the
difference is the new text, unless it ends within a character. The window starts in the prompt.

Alternative considered: the `tokenizers` library's decode stream. It raises on some byte sequences,
and if a prompt ends within a character, its first piece may repeat the prompt.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import copy
from functools import lru_cache

from remora.engine.tokens.tokenizer import Tokenizer

# Enough of the prompt to be past the start of its text and any incomplete character at its end.
PROMPT_TAIL_TOKENS = 8
# From this many held tokens on, decoding is tried at growing distances only; see `push`.
PATIENT_FROM_TOKENS = 16

# Windows are mostly one token long, and tokens recur: a few MB of cached texts.
CACHED_TOKENS = 2**14

REPLACEMENT = "\ufffd"


class Detokenizer:
    """Text of one sequence's output, in the context of its prompt.

    shown_special_ids:  control tokens that are shown even if `skip_special_tokens` hides others
    heals:              the output starts by generating the prompt's last token again

    The pieces of `push` and `finish` add up to text(prompt tail + output) without the common prefix
    with text(prompt tail). No piece of `push` ends in U+FFFD, because the character may still be
    completed.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int],
        *,
        skip_special_tokens: bool,
        shown_special_ids: frozenset[int] = frozenset(),
        heals: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        # Left out here, not by the decoder: a run of them would let the window grow.
        self._hidden_ids = frozenset[int]()
        if skip_special_tokens:
            self._hidden_ids = tokenizer.special_ids - shown_special_ids
        # Invariant: the text of _shown, and of nothing in _held, has been returned.
        tail = prompt_ids[-PROMPT_TAIL_TOKENS:]
        self._shown = self._visible(tail[:-1] if heals else tail)
        self._held: list[int] = []
        self._shown_text = self._text(self._visible(tail))
        self._next_try = 0

    def push(self, ids: Iterable[int]) -> str:
        """Add ids; return the text that they complete, often that of one token."""
        self._held += self._visible(ids)
        # Invalid bytes may continue for ever. Waiting until their number has doubled before
        # decoding again keeps the total work linear.
        if len(self._held) < max(1, self._next_try):
            return ""
        text = self._text(self._shown + self._held)
        start = _shared_length(self._shown_text, text)
        if start == len(text) or text.endswith(REPLACEMENT):
            num_held = len(self._held)
            self._next_try = 2 * num_held if num_held >= PATIENT_FROM_TOKENS else 0
            return ""
        self._shown, self._held, self._next_try = self._held, [], 0
        self._shown_text = (
            _text_alone(self._tokenizer, self._shown[0])
            if len(self._shown) == 1
            else self._text(self._shown)
        )
        return text[start:]

    def fork(self) -> Detokenizer:
        """Return the text of an output that has the same tokens so far."""
        other = copy(self)
        other._held = [*self._held]  # `_shown` is replaced, never changed
        return other

    def finish(self) -> str:
        """Return the remaining text. Nothing may be pushed afterwards."""
        text = self._text(self._shown + self._held)
        return text[_shared_length(self._shown_text, text) :]

    def _visible(self, ids: Iterable[int]) -> list[int]:
        return [token_id for token_id in ids if token_id not in self._hidden_ids]

    def _text(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)


@lru_cache(maxsize=CACHED_TOKENS)
def _text_alone(tokenizer: Tokenizer, token_id: int) -> str:
    return tokenizer.decode([token_id], skip_special_tokens=False)


def _shared_length(first: str, second: str) -> int:
    if second.startswith(first):
        return len(first)
    return next(place for place, char in enumerate(first) if second[place : place + 1] != char)
