"""Log-probabilities in the formats of the dialects.

A token's text is the decoded text of that id alone; if the bytes of a character are spread over
several tokens, their texts contain U+FFFD. JSON has no -inf: it becomes -9999.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from remora.configs.errors import InvalidRequest
from remora.deployments.http.generation.token_stream import split_tokens
from remora.engine.types import Output, SamplingParams, TokenLogprob

if TYPE_CHECKING:
    from remora.engine.tokens.tokenizer import Tokenizer

LOWEST = -9999.0
# Limit on the log-probabilities of one request: a few seconds of writing, tens of MB of JSON.
MAX_ENTRIES = 2**20
# The same limit for streams in which every event repeats all earlier log-probabilities.
MAX_REPEATED_ENTRIES = 2**15

LogprobEntry = TokenLogprob | None


def _shown(line: TokenLogprob) -> Sequence[tuple[int, float]]:
    """Return the likeliest tokens of a line, then requested ones that are not among them."""
    if not line.asked:
        return line.top
    likely = {token_id for token_id, _ in line.top}
    return [*line.top, *(entry for entry in line.asked if entry[0] not in likely)]


def finite(logprob: float) -> float:
    """Return the log-probability as a number that JSON can hold."""
    # The order of the comparison sends NaN to the second branch.
    return logprob if logprob > LOWEST else LOWEST


def check_scored(
    samplings: Sequence[SamplingParams],
    prompt_lengths: Sequence[int],
    param: str,
    *,
    is_repeated: bool = False,
) -> None:
    """Raise InvalidRequest if a request may get too many log-probabilities.

    samplings, prompt_lengths:  of each prompt
    param:                      the caller's name of `sampling.logprobs`
    is_repeated:                whether every event of a stream repeats all of them
    """
    num_tokens = top = 0
    for sampling, length in zip(samplings, prompt_lengths, strict=True):
        if sampling.logprobs is not None:
            num_tokens += sampling.n * (sampling.max_tokens or 0)
        if sampling.prompt_logprobs is not None:
            num_tokens += sampling.n * length
        likely = max(sampling.logprobs or 0, sampling.prompt_logprobs or 0)
        top = max(top, likely + len(sampling.logprob_token_ids))
    limit = MAX_REPEATED_ENTRIES if is_repeated else MAX_ENTRIES
    num_entries = num_tokens * (top + 1)
    if num_entries > limit:
        what = "of one stream" if is_repeated else "of one request"
        message = (
            f"{num_tokens} tokens with {top} likely ones each may give {num_entries} "
            f"log-probabilities; the limit {what} is {limit}. Ask for fewer likely tokens, fewer "
            "output tokens, or fewer prompts at a time."
        )
        has_output = any(sampling.logprobs is not None for sampling in samplings)
        raise InvalidRequest(message, param if has_output else "prompt_logprobs")


class TextOffsets:
    """Where the text of each token begins, in characters of a growing answer.

    A character belongs to the token that completes it; special tokens that the answer omits have no
    length.
    """

    def __init__(self, tokenizer: Tokenizer, *, shows_special: bool) -> None:
        """Start at offset 0; `shows_special` applies to the output, not to the prompt."""
        self._tokenizer = tokenizer
        self._shows_special = shows_special
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._end = 0

    def of_prompt(self, token_ids: Iterable[int], echo: str) -> list[int]:
        """Return the offsets of a prompt's tokens in `echo`, its text in the answer."""
        offsets = []
        for token_id in token_ids:
            offsets.append(min(self._end, len(echo)))
            if self._is_special(token_id) and not echo.startswith(
                self._tokenizer.token_text(token_id), self._end
            ):
                continue  # added by the tokenizer, such as a BOS
            text = self._decoder.decode(self._tokenizer.token_bytes(token_id))
            # Some tokenizers put a space before a text.
            is_added_space = self._end == 0 and text.startswith(" ") and not echo.startswith(" ")
            self._end += len(text) - is_added_space
        self._end = len(echo)
        return offsets

    def of_output(self, token_ids: Iterable[int]) -> list[int]:
        """Return the offsets of the next tokens of the output."""
        offsets = []
        for token_id in token_ids:
            offsets.append(self._end)
            if self._shows_special or not self._is_special(token_id):
                self._end += len(self._decoder.decode(self._tokenizer.token_bytes(token_id)))
        return offsets

    def _is_special(self, token_id: int) -> bool:
        return token_id in self._tokenizer.special_ids


class LogprobWriter:
    """Writes log-probabilities with the texts of the tokens, or with `token_id:N` for each."""

    def __init__(self, tokenizer: Tokenizer, *, as_ids: bool = False) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids

    def token(self, token_id: int) -> str:
        """Return the text or `token_id:N` of a token."""
        return f"token_id:{token_id}" if self._as_ids else self._tokenizer.token_text(token_id)

    def chat(self, lines: Iterable[TokenLogprob]) -> dict[str, Any]:
        """Return `logprobs` of a chat choice."""
        content = [
            {
                **self._chat_entry(line.token_id, line.logprob),
                "top_logprobs": [self._chat_entry(*entry) for entry in _shown(line)],
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

    def split(self, output: Output) -> list[Output]:
        """Return an output as outputs of one token each; their texts join to its text."""
        return split_tokens(self._tokenizer, output)

    def offsets(self, *, shows_special: bool) -> TextOffsets:
        """Return a TextOffsets for a new answer, to use with `completion`."""
        return TextOffsets(self._tokenizer, shows_special=shows_special)

    def completion(
        self, token_ids: Iterable[int], lines: Sequence[LogprobEntry], offsets: list[int]
    ) -> dict[str, Any]:
        """Return `logprobs` of a text choice.

        lines:    one for each id; None = not available (a prompt's first token)
        offsets:  where the text of each id begins
        """
        return {
            "tokens": [self.token(token_id) for token_id in token_ids],
            "token_logprobs": [finite(line.logprob) if line else None for line in lines],
            "top_logprobs": [self._top(line) if line else None for line in lines],
            "text_offset": offsets,
        }

    def _top(self, line: TokenLogprob) -> dict[str, float]:
        """Return the chosen token, then likely ones; of equal texts the later ones are ids."""
        top = {self.token(line.token_id): finite(line.logprob)}
        for token_id, logprob in _shown(line):
            if token_id != line.token_id:
                text = self.token(token_id)
                top[f"token_id:{token_id}" if text in top else text] = finite(logprob)
        return top

    def prompt(self, lines: Iterable[LogprobEntry]) -> list[dict[str, Any] | None]:
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
        self, token_ids: Sequence[int], lines: Sequence[LogprobEntry], *, with_text: bool
    ) -> list[list[Any]]:
        """Return [[logprob, id, text or None], ...]."""
        return [
            self._native_entry(id_, line.logprob if line else None, with_text=with_text)
            for id_, line in zip(token_ids, lines, strict=True)
        ]

    def native_top(
        self, lines: Sequence[LogprobEntry], *, with_text: bool
    ) -> list[list[Any] | None]:
        """Return the most likely tokens at each position, in the format of `native`."""
        return [
            [self._native_entry(*entry, with_text=with_text) for entry in line.top]
            if line
            else None
            for line in lines
        ]

    def native_asked(
        self, lines: Sequence[LogprobEntry], *, with_text: bool
    ) -> list[list[Any] | None]:
        """Return the tokens that were asked for at each position, in the format of `native`."""
        return [
            [self._native_entry(*entry, with_text=with_text) for entry in line.asked]
            if line
            else None
            for line in lines
        ]

    def _native_entry(self, token_id: int, logprob: float | None, *, with_text: bool) -> list[Any]:
        text = self._tokenizer.token_text(token_id) if with_text else None
        return [None if logprob is None else finite(logprob), token_id, text]
