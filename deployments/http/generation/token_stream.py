"""Single tokens with their texts, for dialects that stream tokens instead of pieces of text."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from remora.engine.tokens.tokenizer import Tokenizer
    from remora.engine.types import Output


@dataclass(frozen=True, slots=True)
class TextToken:
    """A token and its text. `is_special`: the text is not part of the output's text."""

    id: int
    text: str
    is_special: bool


def tokens_of(tokenizer: Tokenizer, token_ids: Sequence[int], text: str) -> list[TextToken]:
    """Return tokens whose texts, without special ones, join to `text`.

    A character belongs to the token that completes it; text that was held back belongs to the last
    token. The text of a special token is its name.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    tokens: list[TextToken] = []
    start = 0
    plain = [place for place, id_ in enumerate(token_ids) if not _is_special(tokenizer, id_)]
    last = plain[-1] if plain else -1
    for place, token_id in enumerate(token_ids):
        if _is_special(tokenizer, token_id):
            tokens.append(TextToken(token_id, tokenizer.token_text(token_id), is_special=True))
            continue
        end = start + len(decoder.decode(tokenizer.token_bytes(token_id)))
        part = text[start:] if place == last else text[start:end]
        tokens.append(TextToken(token_id, part, is_special=False))
        start = end
    if text and last < 0 and tokens:
        tokens[0] = TextToken(tokens[0].id, text, is_special=False)
    return tokens


def tokens_of_output(tokenizer: Tokenizer, output: Output) -> list[TextToken]:
    """Return the tokens of one output; at least one if it is the last of its sequence."""
    tokens = tokens_of(tokenizer, output.token_ids, output.text)
    if not tokens and output.finish_reason is not None:
        return [TextToken(0, output.text, is_special=not output.text)]
    return tokens


def split_tokens(tokenizer: Tokenizer, output: Output) -> list[Output]:
    """Return an output as outputs of one token each; their texts join to its text."""
    num = len(output.token_ids)
    if num < 2:
        return [output]
    texts = texts_of(tokenizer, output.token_ids, output.text)
    lines = output.logprobs
    outputs = []
    for place, text in enumerate(texts):
        one = replace(
            output,
            token_ids=output.token_ids[place : place + 1],
            text=text,
            logprobs=None if lines is None else lines[place : place + 1],
            prompt_logprobs=output.prompt_logprobs if place == 0 else None,
            num_output_tokens=output.num_output_tokens - num + 1 + place,
        )
        if place < num - 1:
            one = replace(one, finish_reason=None, stop_reason=None, hidden_states=None, score=None)
        outputs.append(one)
    return outputs


def texts_of(tokenizer: Tokenizer, token_ids: Sequence[int], text: str) -> list[str]:
    """Return a part of the text for each token. Parts of special tokens are usually empty."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    parts: list[str] = []
    start = 0
    for token_id in token_ids[:-1]:
        piece = decoder.decode(tokenizer.token_bytes(token_id))
        end = start + len(piece)
        is_hidden = _is_special(tokenizer, token_id) and text[start:end] != piece
        parts.append("" if is_hidden else text[start:end])
        start = start if is_hidden else end
    return [*parts, text[start:]]


def _is_special(tokenizer: Tokenizer, token_id: int) -> bool:
    return token_id in tokenizer.special_ids
