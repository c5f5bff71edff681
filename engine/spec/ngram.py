"""The n-gram proposer: what followed the last tokens when they occurred before.

A sequence's own text, prompt and output, is searched first, and where nothing is found, if asked
for, the texts of earlier requests of its namespace. The longest suffix that occurred before
decides, its newest occurrence first. See gram_index.py and gram_store.py for the limits of time and
memory.
"""

from __future__ import annotations

from collections.abc import Sequence

from remora.engine.spec.gram_index import GRAMS_PER_WORK, GramIndex
from remora.engine.spec.gram_store import GramStore
from remora.engine.types import Namespace


class NgramProposer:
    """Proposes the continuation of an earlier occurrence.

    shortest, longest:  tokens of the suffixes that are looked up
    max_bytes:          memory of the index of all sequences
    max_shared_bytes:   memory of texts of earlier requests; None = these are not searched
    """

    def __init__(
        self, *, shortest: int, longest: int, max_bytes: int, max_shared_bytes: int | None = None
    ) -> None:
        self._longest = longest
        self._index = GramIndex(shortest, longest, max_bytes)
        self._store = (
            None if max_shared_bytes is None else GramStore(shortest, longest, max_shared_bytes)
        )
        self._namespaces: dict[int, Namespace] = {}

    def begin(self, key: int, token_ids: Sequence[int], namespace: Namespace) -> None:
        """Add a sequence; `propose` indexes it a part at a time."""
        self._index.add(key, token_ids)
        self._namespaces[key] = namespace

    def extend(self, key: int, token_ids: Sequence[int]) -> None:
        """Append and index emitted tokens."""
        self._index.extend(key, token_ids)

    def propose(self, rows: Sequence[tuple[int, int]]) -> list[Sequence[int]]:
        """Return for each row what followed its last tokens before."""
        done = self._index.work()
        if self._store is not None and done < GRAMS_PER_WORK:
            self._store.work(GRAMS_PER_WORK - done)
        return [self._propose(key, most) for key, most in rows]

    def end(self, key: int) -> None:
        """Forget a sequence, whose text becomes one of an earlier request."""
        text = self._index.get(key)
        self._index.remove(key)
        namespace = self._namespaces.pop(key, None)
        if self._store is not None and text is not None and namespace is not None:
            self._store.add(namespace, text.token_ids)

    def _propose(self, key: int, most: int) -> Sequence[int]:
        text = self._index.get(key)
        if text is None or most <= 0:
            return ()
        tail = text.token_ids[-self._longest :]
        start = text.find(tail)
        if start is not None:
            return continuation(text.token_ids, start, most)
        return () if self._store is None else self._store.find(self._namespaces[key], tail, most)


def continuation(token_ids: Sequence[int], start: int, count: int) -> list[int]:
    """Return `count` tokens from `start` on, as if the text repeated itself from there.

    What follows the text's end is what follows `start`: the text ends with what precedes it.
    """
    period = len(token_ids) - start
    found = list(token_ids[start : start + count])
    while len(found) < count:
        found.append(found[-period])
    return found
