"""Log-probabilities in the shapes of the dialects.

A token's text is what the tokenizer shows for the id alone; the bytes of a character may be spread
over several tokens, whose texts then hold U+FFFD. JSON has no -inf: it becomes -9999.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from remora.engine.types import TokenLogprob

if TYPE_CHECKING:
    from remora.engine.tokens.tokenizer import Tokenizer

LOWEST = -9999.0

Line = TokenLogprob | None


def finite(logprob: float) -> float:
    """Return the number as JSON can hold it."""
    # Written so that NaN takes the second branch.
    return logprob if logprob > LOWEST else LOWEST


class LogprobWriter:
    """Writes log-probabilities with a tokenizer's texts, or with ids as `token_id:N`."""

    def __init__(self, tokenizer: Tokenizer, *, as_ids: bool = False) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids

    def token(self, token_id: int) -> str:
        """Return what stands for a token."""
        return f"token_id:{token_id}" if self._as_ids else self._tokenizer.token_text(token_id)

    def chat(self, lines: Iterable[TokenLogprob]) -> dict[str, Any]:
        """Return `logprobs` of a chat choice."""
        content = [
            {
                **self._chat_entry(line.token_id, line.logprob),
                "top_logprobs": [self._chat_entry(*entry) for entry in line.top],
            }
            for line in lines
        ]
        return {"content": content, "refusal": None}

    def _chat_entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": self.token(token_id),
            "logprob": finite(logprob),
            "bytes": list(self._tokenizer.token_bytes(token_id)),
        }

    def completion(
        self, token_ids: Sequence[int], lines: Sequence[Line], *, offset: int
    ) -> tuple[dict[str, Any], int]:
        """Return `logprobs` of a text choice, and the offset at which the next ones start.

        lines:  one for each id; None where there is none (a prompt's first token)
        """
        tokens = [self.token(token_id) for token_id in token_ids]
        offsets = []
        for token_id in token_ids:
            offsets.append(offset)
            offset += len(self._tokenizer.token_text(token_id))
        value = {
            "tokens": tokens,
            "token_logprobs": [finite(line.logprob) if line else None for line in lines],
            "top_logprobs": [self._top(line) if line else None for line in lines],
            "text_offset": offsets,
        }
        return value, offset

    def _top(self, line: TokenLogprob) -> dict[str, float]:
        # Two ids can have the same text: the likelier one, which comes first, keeps its place.
        top: dict[str, float] = {}
        for token_id, logprob in line.top:
            top.setdefault(self.token(token_id), finite(logprob))
        top.setdefault(self.token(line.token_id), finite(line.logprob))
        return top

    def prompt(self, lines: Iterable[Line]) -> list[dict[str, Any] | None]:
        """Return `prompt_logprobs`: for each prompt token, id -> logprob, rank, text."""
        return [self._prompt_entry(line) if line else None for line in lines]

    def _prompt_entry(self, line: TokenLogprob) -> dict[str, Any]:
        ranked = [(id_, logprob, rank) for rank, (id_, logprob) in enumerate(line.top, start=1)]
        if all(id_ != line.token_id for id_, _, _ in ranked):
            ranked.append((line.token_id, line.logprob, line.rank))
        return {
            str(id_): {"logprob": finite(logprob), "rank": rank, "decoded_token": self.token(id_)}
            for id_, logprob, rank in ranked
        }

    def native(
        self, token_ids: Sequence[int], lines: Sequence[Line], *, with_text: bool
    ) -> list[list[Any]]:
        """Return [[logprob, id, text or None], ...]."""
        return [
            self._native_entry(id_, line.logprob if line else None, with_text=with_text)
            for id_, line in zip(token_ids, lines, strict=True)
        ]

    def native_top(self, lines: Sequence[Line], *, with_text: bool) -> list[list[Any] | None]:
        """Return the most likely tokens of each place, as `native` writes them."""
        return [
            [self._native_entry(*entry, with_text=with_text) for entry in line.top]
            if line
            else None
            for line in lines
        ]

    def _native_entry(self, token_id: int, logprob: float | None, *, with_text: bool) -> list[Any]:
        text = self._tokenizer.token_text(token_id) if with_text else None
        return [None if logprob is None else finite(logprob), token_id, text]
