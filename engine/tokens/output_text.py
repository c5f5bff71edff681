"""The text of one output while it grows, up to the first stop text.

The caller's side shows it; beam search asks it whether a path has ended. Both therefore agree on
where an output ends. Knows tokens and text; no events, scores or rows.
"""

from __future__ import annotations

from copy import copy

from remora.engine.tokens.detokenizer import Detokenizer
from remora.engine.tokens.stops import StopTexts
from remora.engine.tokens.tokenizer import Tokenizer
from remora.engine.types import Request


class OutputText:
    """Text of an output's tokens, without or with the stop text that ends it.

    num_tokens:  so far
    stop:        the stop text that was found; nothing may be pushed or finished afterwards
    """

    def __init__(self, request: Request, tokenizer: Tokenizer | None) -> None:
        """`tokenizer`: None = no text is produced and no stop text is searched."""
        sampling = request.sampling
        self.num_tokens = 0
        self.stop: str | None = None
        self._min_tokens = sampling.min_tokens
        self._detokenizer: Detokenizer | None = None
        if tokenizer is not None:
            self._detokenizer = Detokenizer(
                tokenizer,
                request.shown_ids,
                skip_special_tokens=sampling.skip_special_tokens,
                shown_special_ids=sampling.shown_special_ids,
                heals=request.healed_id is not None,
            )
        self._stops = StopTexts(
            sampling.stop, sampling.stop_regex, include=sampling.include_stop_in_output
        )

    def push(self, token_id: int, *, is_shown: bool = True) -> str:
        """Add a token; returns the text to show now.

        is_shown:  False = the token ends the output and has no text
        """
        self.num_tokens += 1
        if self._detokenizer is None or not is_shown:
            return ""
        return self._search(self._detokenizer.push([token_id]))

    def finish(self) -> str:
        """Return the remaining text, at the end of the output; it may contain a stop text."""
        if self._detokenizer is None:
            return ""
        text = self._search(self._detokenizer.finish())
        return text if self.stop is not None else text + self._stops.finish()

    def fork(self) -> OutputText:
        """Return the text of an output that has the same tokens so far and then others."""
        other = copy(self)
        if self._detokenizer is not None:
            other._detokenizer = self._detokenizer.fork()
        other._stops = self._stops.fork()
        return other

    def _search(self, text: str) -> str:
        if not self._stops.are_any or self.num_tokens <= self._min_tokens:
            return text
        shown, self.stop = self._stops.push(text)
        return shown
