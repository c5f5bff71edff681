"""Lookup of tokens by their bytes: by prefix, and sequences that spell given bytes.

Sorted once, on first use, so that tokens with a common prefix are adjacent. Control tokens are
excluded: no text continues into one. Knows nothing of models or rows.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from functools import cached_property


class Spellings:
    """The bytes of a model's tokens.

    token_bytes:  the bytes of an id; empty for ids without text
    special_ids:  control tokens
    """

    def __init__(
        self,
        size: int,
        token_bytes: Callable[[int], bytes],
        special_ids: frozenset[int] = frozenset(),
    ) -> None:
        self.token_bytes = token_bytes
        self._size = size
        self.special_ids = special_ids

    def starting(self, prefix: bytes) -> list[int]:
        """Return the tokens that may come next if the text must continue with `prefix`.

        These are tokens that start with it, and tokens that are a prefix of it.
        """
        spellings, _ = self._sorted
        first = bisect_left(spellings, prefix)
        last = bisect_left(spellings, True, lo=first, key=lambda each: not each.startswith(prefix))
        shorter = [
            token_id for end in range(1, len(prefix)) for token_id in self._exactly(prefix[:end])
        ]
        return [*shorter, *self._sorted[1][first:last]]

    def spell(self, data: bytes) -> list[int] | None:
        """Return tokens that together spell `data`, long ones first; None if there are none."""
        spelled: list[int] = []
        while data:
            for end in range(len(data), 0, -1):
                if ids := self._exactly(data[:end]):
                    spelled.append(ids[0])
                    data = data[end:]
                    break
            else:
                return None
        return spelled

    def prepare(self) -> None:
        """Sort now instead of on first use."""
        _ = self._sorted

    def _exactly(self, spelling: bytes) -> list[int]:
        spellings, ids = self._sorted
        first = at = bisect_left(spellings, spelling)
        while at < len(spellings) and spellings[at] == spelling:
            at += 1
        return ids[first:at]

    @cached_property
    def _sorted(self) -> tuple[list[bytes], list[int]]:
        """Return the sorted byte strings, and the id of each."""
        pairs = sorted(
            (spelling, token_id)
            for token_id in range(self._size)
            if token_id not in self.special_ids and (spelling := self.token_bytes(token_id))
        )
        return [spelling for spelling, _ in pairs], [token_id for _, token_id in pairs]
