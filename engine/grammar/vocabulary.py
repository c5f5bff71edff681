"""The model's tokens as grammar compilers see them."""

from __future__ import annotations

import base64
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from remora.configs.errors import EngineError
from remora.engine.tokens.tokenizer import Tokenizer
from remora.engine.types import MaskWords


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """The bytes of each token id of a model.

    tokens:   [vocab_size] bytes; empty for ids that no grammar allows: control tokens, end tokens,
              and ids that only pad the model's matrix
    end_ids:  ids that end a sequence
    """

    tokens: tuple[bytes, ...]
    end_ids: tuple[int, ...]

    @classmethod
    def of(
        cls,
        tokenizer: Tokenizer,
        *,
        vocab_size: int,
        end_ids: Collection[int],
        marker_ids: Collection[int] = (),
    ) -> Self:
        """Read it from a tokenizer.

        vocab_size:  of the model; the tokenizer's may be smaller or larger
        marker_ids:  control tokens that a grammar may spell by their text
        """
        hidden = (tokenizer.special_ids - frozenset(marker_ids)) | frozenset(end_ids)
        tokens = tuple(
            b""
            if token_id in hidden or token_id >= tokenizer.vocab_size
            else tokenizer.token_bytes(token_id)
            for token_id in range(vocab_size)
        )
        return cls(tokens=tokens, end_ids=tuple(i for i in end_ids if 0 <= i < vocab_size))

    @property
    def size(self) -> int:
        """Upper bound of ids."""
        return len(self.tokens)

    @property
    def num_words(self) -> int:
        """Number of 32-bit words in a mask."""
        return (self.size + 31) // 32

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON for `from_json`."""
        tokens = [base64.b64encode(token).decode() for token in self.tokens]
        return {"tokens": tokens, "end_ids": list(self.end_ids)}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Self:
        """Read the output of `to_json`."""
        tokens = tuple(base64.b64decode(token) for token in value["tokens"])
        return cls(tokens=tokens, end_ids=tuple(value["end_ids"]))


class EndMask:
    """The end-of-sequence ids as mask words. Shared by the matchers of one vocabulary.

    ids:        these
    blank_ids:  tokens without text, these included; no grammar allows the others
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        if not vocabulary.end_ids:
            raise EngineError("a grammar needs a model with an end-of-sequence token")
        self.ids = frozenset(vocabulary.end_ids)
        self.blank_ids = frozenset(at for at, text in enumerate(vocabulary.tokens) if not text)
        self.vocab_size = vocabulary.size
        flags = np.zeros(vocabulary.num_words * 32, np.bool_)
        flags[list(vocabulary.end_ids)] = True
        self.words: MaskWords = np.packbits(flags, bitorder="little").view(np.int32)
        flags[:] = False
        flags[: vocabulary.size] = True
        self._known: MaskWords = np.packbits(flags, bitorder="little").view(np.int32)

    def trim(self, words: MaskWords) -> None:
        """Clear the bits of ids that the model does not have."""
        words[-1] &= self._known[-1]
