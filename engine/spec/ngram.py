"""The n-gram proposer: what followed the last tokens when they occurred before.

Each sequence is searched on its own, prompt and output, so no text reaches another request. The
longest suffix that occurred before decides, its newest occurrence first. See gram_index.py for the
limits of time and memory.
"""

from __future__ import annotations

from collections.abc import Sequence

from remora.engine.spec.gram_index import GramIndex


class NgramProposer:
    """Proposes the continuation of an earlier occurrence.

    shortest, longest:  tokens of the suffixes that are looked up
    max_bytes:          memory of the index of all sequences
    """

    def __init__(self, *, shortest: int, longest: int, max_bytes: int) -> None:
        self._longest = longest
        self._index = GramIndex(shortest, longest, max_bytes)

    def begin(self, key: int, token_ids: Sequence[int]) -> None:
        """Add a sequence; `propose` indexes it a part at a time."""
        self._index.add(key, token_ids)

    def extend(self, key: int, token_ids: Sequence[int]) -> None:
        """Append and index emitted tokens."""
        self._index.extend(key, token_ids)

    def propose(self, rows: Sequence[tuple[int, int]]) -> list[Sequence[int]]:
        """Return for each row what followed its last tokens before."""
        self._index.work()
        return [self._propose(key, most) for key, most in rows]

    def end(self, key: int) -> None:
        """Forget a sequence."""
        self._index.remove(key)

    def _propose(self, key: int, most: int) -> Sequence[int]:
        text = self._index.get(key)
        if text is None or most <= 0:
            return ()
        start = text.find(text.token_ids[-self._longest :])
        return () if start is None else continuation(text.token_ids, start, most)


def continuation(token_ids: Sequence[int], start: int, count: int) -> list[int]:
    """Return `count` tokens from `start` on, as if the text repeated itself from there.

    What follows the text's end is what follows `start`: the text ends with what precedes it.
    """
    period = len(token_ids) - start
    found = list(token_ids[start : start + count])
    while len(found) < count:
        found.append(found[-period])
    return found
