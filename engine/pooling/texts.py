"""Tokenize texts and pairs with their special tokens, and truncate them to a maximum length.

A text is truncated before special tokens are added, so that these are kept. Of a pair, the longer
text is truncated first. Thread-safe.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from tokenizers import Encoding

from remora.configs.sections.pooling import PoolingSection
from remora.engine.pooling.facts import YES_NO, PoolingFacts
from remora.engine.pooling.row import Row
from remora.engine.tokens.tokenizer import Tokenizer

Side = Literal["head", "tail"]
DIRECTIONS = {"head": "left", "tail": "right"}

QWEN_RERANKER = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and "
    'the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
    "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
)
QWEN_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"


@dataclass(frozen=True, slots=True)
class PairTemplate:
    """A template for a query and a document.

    before, after:  text around the document, with {query} and {instruction}
    instruction:    default for requests without one
    """

    before: str
    after: str
    instruction: str

    @classmethod
    def of(cls, facts: PoolingFacts, section: PoolingSection) -> PairTemplate | None:
        """Return the configured template, or the default of generating rerankers, or None."""
        is_generating = any(stage.name == YES_NO for stage in facts.stages)
        source = section.pair_template or (QWEN_RERANKER if is_generating else None)
        if source is None:
            return None
        before, _, after = source.partition("{document}")
        instruction = section.instruction
        return cls(before, after, QWEN_INSTRUCTION if instruction is None else instruction)

    def parts(self, query: str, instruction: str | None) -> tuple[str, str]:
        """Return the text before the document and after it."""
        values = {
            "{query}": query,
            "{instruction}": self.instruction if instruction is None else instruction,
        }
        # In one pass, so that inserted text is not substituted again.
        before, after = (
            re.sub(r"\{(query|instruction)\}", lambda found: values[found[0]], part)
            for part in (self.before, self.after)
        )
        return before, after


class Framer:
    """Tokenizes texts into rows with special tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._backend = tokenizer.backend
        self._frame = self._backend.num_special_tokens_to_add(False)
        self._pair_frame = self._backend.num_special_tokens_to_add(True)

    def rows(
        self,
        texts: Sequence[str],
        *,
        max_tokens: int | None = None,
        drops: Side = "tail",
        is_framed: bool = True,
    ) -> list[Row]:
        """Return a row for each text.

        max_tokens:  truncate longer rows; None = keep everything
        drops:       the side to truncate
        is_framed:   whether rows have the tokenizer's special tokens
        """
        frame = self._frame if is_framed else 0
        room = None if max_tokens is None else max(1, max_tokens - frame)
        rows = []
        for encoding in self._encode(texts):
            if room is not None and len(encoding) > room:
                encoding.truncate(room, direction=DIRECTIONS[drops])
            rows.append(Row(self._backend.post_process(encoding, None, is_framed).ids))
        return rows

    def pairs(
        self,
        pairs: Sequence[tuple[str, str]],
        *,
        max_tokens: int | None = None,
        drops: Side = "tail",
    ) -> list[Row]:
        """Return a row for each pair of texts; `max_tokens` and `drops` as in `rows`."""
        first = self._encode([one for one, _ in pairs])
        second = self._encode([other for _, other in pairs])
        rows = []
        for one, other in zip(first, second, strict=True):
            if max_tokens is not None:
                kept = _shares(len(one), len(other), max(2, max_tokens - self._pair_frame))
                one.truncate(kept[0], direction=DIRECTIONS[drops])
                other.truncate(kept[1], direction=DIRECTIONS[drops])
            framed = self._backend.post_process(one, other, True)
            types = framed.type_ids
            rows.append(Row(framed.ids, types.index(1) if 1 in types else None))
        return rows

    def written(
        self,
        pairs: Sequence[tuple[str, str]],
        template: PairTemplate,
        instruction: str | None,
        *,
        max_tokens: int | None = None,
        drops: Side = "tail",
    ) -> list[Row]:
        """Return a row for each pair, written by a template; long documents are truncated.

        The template contains all special tokens. The text around a document is kept whole, even if
        it alone exceeds `max_tokens`.
        """
        around = [template.parts(query, instruction) for query, _ in pairs]
        texts = [b + text + a for (b, a), (_, text) in zip(around, pairs, strict=True)]
        rows = []
        for encoding, (before, after), (_, text) in zip(
            self._encode(texts), around, pairs, strict=True
        ):
            ids = encoding.ids
            if max_tokens is not None and len(ids) > max_tokens:
                first, middle, last = (one.ids for one in self._encode([before, text, after]))
                room = max(0, max_tokens - len(first) - len(last))
                ids = first + cut(middle, room, drops) + last
            rows.append(Row(ids))
        return rows

    def clipped(self, texts: Sequence[str], max_tokens: int) -> list[str]:
        """Return the beginnings of texts that have up to `max_tokens` tokens."""
        return [
            self._clipped(text, encoding, max_tokens)
            for text, encoding in zip(texts, self._encode(texts), strict=True)
        ]

    def _clipped(self, text: str, encoding: Encoding, max_tokens: int) -> str:
        while len(encoding) > max_tokens and text:
            # A beginning may have other tokens than the whole had, and even more of them.
            text = text[: min(encoding.offsets[max_tokens - 1][1], len(text) - 1)]
            (encoding,) = self._encode([text])
        return text

    def _encode(self, texts: Sequence[str]) -> list[Encoding]:
        encodings: list[Encoding] = self._backend.encode_batch(
            list(texts), add_special_tokens=False
        )
        return encodings


def cut(ids: list[int], max_tokens: int, drops: Side) -> list[int]:
    """Truncate ids to `max_tokens`."""
    if len(ids) <= max_tokens:
        return ids
    return ids[:max_tokens] if drops == "tail" else ids[len(ids) - max_tokens :]


def _shares(first: int, second: int, room: int) -> tuple[int, int]:
    """Return the kept lengths of two texts, truncating the longer one first."""
    if first + second <= room:
        return first, second
    if min(first, second) > room // 2:
        return room - room // 2, room // 2
    return (first, room - first) if first < second else (room - second, second)
