"""The tokenizer of a server without one: ids in, ids out, and a clear error for text."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from remora.configs.errors import InvalidRequest
from remora.engine.tokens.tokenizer import Tokenizer


class AbsentTokenizer(Tokenizer):
    """Stands in for a tokenizer; the text of all ids is empty."""

    takes_text = False

    def __init__(self, vocab_size: int, *, eos_token_ids: Sequence[int] = ()) -> None:
        self.added_tokens: Mapping[int, str] = {}
        self.response_template = None
        self.vocab_size = vocab_size
        self.special_ids = frozenset()
        self.eos_token_ids = tuple(eos_token_ids)
        self.max_token_chars = sys.maxsize
        self._templates = {}

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[list[int]]:
        """Raise InvalidRequest, unless there is nothing to encode."""
        return _refuse() if texts else []

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Return no text."""
        return ""

    def entry(self, token_id: int) -> str:
        """Return no text."""
        return ""

    def token_bytes(self, token_id: int) -> bytes:
        """Return no text."""
        return b""

    def render_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        """Raise InvalidRequest."""
        _refuse()


def _refuse() -> NoReturn:
    raise InvalidRequest(
        "This server has no tokenizer (model.skip_tokenizer): send token ids.",
        code="no_tokenizer",
    )
