"""The free list of KV pages.

Knows page ids. Knows nothing of tensors, sequences, prefixes or time. A page that is not free has
exactly one owner: a sequence or the prefix cache. Page 0 is the dump page that padding writes to;
it is never allocated.
"""

from __future__ import annotations

from collections.abc import Iterable

from remora.configs.errors import InvariantViolated

DUMP_PAGE = 0


def pages_needed(num_tokens: int, page_size: int) -> int:
    """Return how many pages `num_tokens` tokens occupy."""
    return -(-num_tokens // page_size)


class PagePool:
    """Free list over the pages 1 .. num_pages.

    The page released last is allocated first: it is the likeliest to be in the CPU's caches.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = list(range(num_pages, 0, -1))
        self._is_free = bytearray(b"\x00" + b"\x01" * num_pages)

    @property
    def num_free(self) -> int:
        """Pages that can be allocated now."""
        return len(self._free)

    def try_allocate(self, count: int) -> list[int] | None:
        """Allocate `count` pages; None, and nothing changed, when there are too few."""
        if count > len(self._free):
            return None
        if count == 0:
            return []
        taken = self._free[-count:]
        del self._free[-count:]
        for page in taken:
            self._is_free[page] = 0
        return taken

    def release(self, pages: Iterable[int]) -> None:
        """Free pages. Raises InvariantViolated for a page that is free already."""
        for page in pages:
            if not 0 < page <= self.num_pages or self._is_free[page]:
                raise InvariantViolated(f"page {page} was released twice, or never allocated")
            self._is_free[page] = 1
            self._free.append(page)

    def check_integrity(self) -> None:
        """Raise InvariantViolated unless list and marks agree."""
        if len(self._free) != sum(self._is_free) or len(set(self._free)) != len(self._free):
            raise InvariantViolated("the free list and its marks disagree")
