r"""Grammars compiled and matched by outlines-core: regular expressions only.

outlines searches where we match: of `yes|yes please` it would allow "yes" alone, and after a place
where a text may end it loses what does not end with the next token. A `\z` behind the pattern cures
both, but cannot stand where the text begins: so the empty text is taken out of the pattern, and
the matcher knows by itself whether it may end at once.
"""

from __future__ import annotations

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
# Tables of transitions, once loaded, against their serialised form; measured.
_LOADED_RATIO = 3


class OutlinesCompiler:
    """Turns patterns into bytes that OutlinesLoader reads. Lives in the compiler process."""

    def __init__(self, vocabulary: Vocabulary, *, is_compact: bool) -> None:
        """Read the vocabulary. Spaces are in the patterns already: `is_compact` says nothing."""
        end_id, *_ = vocabulary.end_ids
        table: dict[bytes, list[int]] = {}
        for token_id, token in enumerate(vocabulary.tokens):
            if token_id != end_id:
                # outlines measures masks by how many tokens there are, so every id must be one;
                # 0xff is in no UTF-8 text.
                table.setdefault(token or b"\xff%d" % token_id, []).append(token_id)
        self._table = TokenTable(end_id, table)

    def compile(self, source: Source) -> bytes:
        """Compile one source. Raises ConstraintError."""
        node = read_pattern(source.text, "pattern", is_ours=True)
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
    """Makes grammars of what OutlinesCompiler wrote. May be used from any thread."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._ends = EndMask(vocabulary)

    def load(self, data: bytes) -> OutlinesGrammar:
        """Read one compiled grammar."""
        return OutlinesGrammar(
            Index.from_binary(data[1:]),
            len(data) * _LOADED_RATIO,
            self._ends,
            may_be_empty=data[:1] == _MAY_BE_EMPTY,
        )


class OutlinesGrammar:
    """A compiled grammar."""

    def __init__(self, index: Index, num_bytes: int, ends: EndMask, *, may_be_empty: bool) -> None:
        self._index = index
        self._may_be_empty = may_be_empty
        self._num_bytes = num_bytes
        self._ends = ends

    @property
    def num_bytes(self) -> int:
        """Memory that it takes."""
        return self._num_bytes

    def matcher(self) -> OutlinesMatcher:
        """Return a new matcher at the start of the grammar."""
        return OutlinesMatcher(self._index, self._ends, may_be_empty=self._may_be_empty)


class OutlinesMatcher(BaseMatcher):
    """How far one sequence has come in a grammar."""

    def __init__(self, index: Index, ends: EndMask, *, may_be_empty: bool) -> None:
        super().__init__(ends)
        self._guide = Guide(index, 0)
        self._may_end_here = may_be_empty

    def _may_end(self) -> bool:
        return self._may_end_here or bool(self._guide.is_finished())

    def _advance(self, token_id: int) -> bool:
        try:
            self._guide.advance(token_id, return_tokens=False)
        except ValueError:
            return False
        self._may_end_here = False
        return True

    def _write(self, words: MaskWords) -> None:
        words.fill(0)
        self._guide.write_mask_into(words.ctypes.data, words.size, words.itemsize)
        if self._may_end():
            words |= self._ends.words
