"""Single tokens with their texts, for dialects that stream tokens instead of pieces of text."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass
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


def _is_special(tokenizer: Tokenizer, token_id: int) -> bool:
    return token_id in tokenizer.special_ids
