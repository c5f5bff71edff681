r"""Grammars compiled and matched by outlines-core: regular expressions only.

outlines searches instead of matching: for `yes|yes please` it would allow "yes" only, and after a
position where a text may end it loses texts that do not end with the next token. A `\z` after the
pattern cures both, but does not work at the start of the text: so the empty text is removed from
the pattern, and the matcher itself knows whether the text may be empty.
"""

from __future__ import annotations

from dataclasses import dataclass

from outlines_core import Guide, Index
from outlines_core import Vocabulary as TokenTable

from remora.engine.grammar.constraint import ConstraintError
from remora.engine.grammar.matching import BaseMatcher
from remora.engine.grammar.prepare import Source
from remora.engine.grammar.regex import lengths, render, without_empty
from remora.engine.grammar.regex_reader import read_pattern
from remora.engine.grammar.vocabulary import EndMask, Vocabulary
from remora.engine.types import MaskWords

_IS_FILLED, _MAY_BE_EMPTY = b"\0", b"\1"
# Memory of loaded transition tables relative to their serialised form; measured.
_LOADED_RATIO = 3
# Tokens that a guide remembers; no more drafts than that can be taken back.
_MOST_UNDONE = 128


class OutlinesCompiler:
    """Compiles patterns to bytes for OutlinesLoader. Runs in the compiler process."""

    def __init__(self, vocabulary: Vocabulary, *, is_compact: bool) -> None:
        """Read the vocabulary. Patterns contain whitespace, so `is_compact` has no effect."""
        end_id, *_ = vocabulary.end_ids
        table: dict[bytes, list[int]] = {}
        for token_id, token in enumerate(vocabulary.tokens):
            if token_id != end_id:
                # outlines sizes masks by the number of tokens, so every id needs a token; 0xff
                # occurs in no UTF-8 text.
                table.setdefault(token or b"\xff%d" % token_id, []).append(token_id)
        self._table = TokenTable(end_id, table)

    def compile(self, source: Source) -> bytes:
        """Compile one source. Raises ConstraintError."""
        node = read_pattern(source.text, "pattern", is_generated=True)
        filled = without_empty(node)
        if filled is None:
            raise ConstraintError("only the empty text matches it")
        try:
            index = Index(f"(?:{render(filled)})\\z", self._table)
        except ValueError as error:
            raise ConstraintError(str(error)[:300]) from None
        data: bytes = index.__reduce__()[1][0]
        return (_MAY_BE_EMPTY if lengths(node)[0] == 0 else _IS_FILLED) + data


class OutlinesLoader:
    """Loads grammars compiled by OutlinesCompiler. Thread-safe."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._ends = EndMask(vocabulary)

    def load(self, data: bytes) -> OutlinesGrammar:
        """Load one compiled grammar."""
        index = Index.from_binary(data[1:])
        may_be_empty = data[:1] == _MAY_BE_EMPTY
        return OutlinesGrammar(index, len(data) * _LOADED_RATIO, self._ends, may_be_empty)


@dataclass(frozen=True, slots=True)
class OutlinesGrammar:
    """A compiled grammar.

    num_bytes:  in memory
    """

    index: Index
    num_bytes: int
    ends: EndMask
    may_be_empty: bool

    def matcher(self) -> OutlinesMatcher:
        """Return a new matcher at the start of the grammar."""
        return OutlinesMatcher(self.index, self.ends, may_be_empty=self.may_be_empty)


class OutlinesMatcher(BaseMatcher):
    """Progress of one sequence in a grammar."""

    def __init__(self, index: Index, ends: EndMask, *, may_be_empty: bool) -> None:
        super().__init__(ends)
        self._guide = Guide(index, _MOST_UNDONE)
        self._may_be_empty = may_be_empty

    def _may_end(self) -> bool:
        is_empty = self._num_tokens == 0
        return (is_empty and self._may_be_empty) or bool(self._guide.is_finished())

    def _advance(self, token_id: int) -> bool:
        try:
            self._guide.advance(token_id, return_tokens=False)
        except ValueError:
            return False
        return True

    def _undo(self, num_tokens: int) -> None:
        self._guide.rollback_state(num_tokens)

    def _write(self, words: MaskWords) -> None:
        words.fill(0)
        self._guide.write_mask_into(words.ctypes.data, words.size, words.itemsize)
        if self._may_end():
            words |= self._ends.words
