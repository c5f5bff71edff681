"""Tokens by their bytes: which ones begin with these, which ones together spell those.

Sorted once, on first use, so that tokens with a common beginning lie side by side. Control tokens
have no place among them: no text continues into one. Knows nothing of models or rows.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from functools import cached_property


class Spellings:
    """What the tokens of a model stand for.

    token_bytes:  the bytes of an id; none for ids without text
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
        """Return the tokens that may come next where the text must go on with `prefix`.

        Those that begin with it, and those that are a beginning of it.
        """
        spellings, _ = self._sorted
        first = bisect_left(spellings, prefix)
        last = bisect_left(spellings, True, lo=first, key=lambda each: not each.startswith(prefix))
        shorter = [
            token_id for end in range(1, len(prefix)) for token_id in self._exactly(prefix[:end])
        ]
        return [*shorter, *self._sorted[1][first:last]]

    def spell(self, data: bytes) -> list[int] | None:
        """Return tokens that together stand for `data`, long ones first; None if there are none."""
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
        """Sort now rather than on first use."""
        _ = self._sorted

    def _exactly(self, spelling: bytes) -> list[int]:
        spellings, ids = self._sorted
        first = at = bisect_left(spellings, spelling)
        while at < len(spellings) and spellings[at] == spelling:
            at += 1
        return ids[first:at]

    @cached_property
    def _sorted(self) -> tuple[list[bytes], list[int]]:
        """Return the spellings, rising, and the id of each."""
        pairs = sorted(
            (spelling, token_id)
            for token_id in range(self._size)
            if token_id not in self.special_ids and (spelling := self.token_bytes(token_id))
        )
        return [spelling for spelling, _ in pairs], [token_id for _, token_id in pairs]
