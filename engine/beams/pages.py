"""The pages of one beam search: reserved when it starts, shared between its beams.

All pages that the beams may ever need are reserved at once, so a search that has begun neither
fails for lack of memory nor is preempted. Beams share the prompt's pages, and full pages of a
common beginning; a page that tokens are still written to has one user, and others get a copy.
Knows page ids; no tokens, rows or scores.
"""

from __future__ import annotations

from collections.abc import Iterable

from remora.configs.errors import InvariantViolated
from remora.engine.kv.cache import KVCache, PageTable
from remora.engine.kv.pages import pages_needed


def own_pages(num_prompt_tokens: int, max_tokens: int, page_size: int) -> int:
    """Return the most pages that one beam needs after the full pages of the prompt.

    The KV of an output's last token is never computed.
    """
    num_tokens = num_prompt_tokens + max_tokens - 1
    return pages_needed(num_tokens, page_size) - num_prompt_tokens // page_size


def most_output_tokens(num_prompt_tokens: int, width: int, num_pages: int, page_size: int) -> int:
    """Return the longest outputs of `width` beams that fit; less than 1 = none.

    num_pages:  of an empty engine
    """
    num_full = num_prompt_tokens // page_size
    num_own = (num_pages - num_full - 1) // width  # one page: the prompt's last, until it is copied
    return (num_full + num_own) * page_size + 1 - num_prompt_tokens


class BeamPages:
    """Pages of a search of `width` beams.

    num_reserved:  pages for the outputs of all beams
    has_begun:     whether beams share the pages; before, the prompt is computed by one sequence
    tables:        that hold the pages, for `KVCache`
    """

    def __init__(
        self, *, width: int, num_prompt_tokens: int, max_tokens: int, page_size: int
    ) -> None:
        self.num_reserved = width * own_pages(num_prompt_tokens, max_tokens, page_size)
        self.has_begun = False
        self._page_size = page_size
        self._num_full = num_prompt_tokens // page_size
        self._reserved, self._prompt = PageTable(), PageTable()
        self._free: list[int] = []
        self._users: dict[int, int] = {}

    @property
    def tables(self) -> tuple[PageTable, PageTable]:
        """Tables that own pages, or lock cached ones."""
        return self._reserved, self._prompt

    def num_held(self, num_prompt_pages: int) -> int:
        """Return the pages that the search holds, or will when it starts; without cached ones.

        num_prompt_pages:  of the sequence that computes the prompt, until beams share them
        """
        if not self.has_begun:
            return self.num_reserved + num_prompt_pages
        return sum(len(table.owned) for table in self.tables)

    @property
    def num_used(self) -> int:
        """Pages that beams use, each counted once, without the prompt's full ones."""
        return len(self._users)

    def reserve(self, kv: KVCache) -> bool:
        """Reserve the pages; returns False, and changes nothing, if there are too few."""
        pages = kv.try_grow(self._reserved, self.num_reserved * self._page_size)
        if pages is None:
            return False
        self._free = pages[::-1]
        return True

    def begin(self, table: PageTable) -> PageTable:
        """Take over the pages of the sequence that has computed the prompt; returns its table."""
        self.has_begun, self._prompt = True, table
        self._use(table.pages[self._num_full :])
        return PageTable(pages=[*table.pages])

    def drop(self, table: PageTable) -> None:
        """Give back the pages of a beam that ends."""
        for page in table.pages[self._num_full :]:
            self._users[page] -= 1
            if self._users[page] == 0:
                del self._users[page]
                self._free.append(page)
        table.pages = []

    def share(
        self, table: PageTable, num_computed: int
    ) -> tuple[PageTable, tuple[int, int] | None]:
        """Return a second table of the same contents, and the page to copy to a new one, if any."""
        num_kept, num_over = divmod(num_computed, self._page_size)
        pages = table.pages[:num_kept]
        self._use(pages[self._num_full :])
        made = PageTable(pages=pages)
        return made, (table.pages[num_kept], self._grow(made)) if num_over else None

    def extend(self, table: PageTable, num_tokens: int) -> list[int]:
        """Give a beam room for this many tokens, at most one page more; returns the new page."""
        if num_tokens <= len(table.pages) * self._page_size:
            return []
        return [self._grow(table)]

    def release(self, kv: KVCache) -> None:
        """Give all pages back to the cache."""
        for table in self.tables:
            kv.release(table)
        self._free, self._users = [], {}

    def check_integrity(self, beams: Iterable[PageTable]) -> None:
        """Raise InvariantViolated unless the pages of these beams are those in use."""
        if not self.has_begun:
            return
        users: dict[int, int] = {}
        for table in beams:
            for page in table.pages[self._num_full :]:
                users[page] = users.get(page, 0) + 1
        owned = {page for table in self.tables for page in table.owned}
        unused = owned - set(self._prompt.pages[: self._num_full]) - users.keys()
        if users != self._users or unused != set(self._free) or len(unused) != len(self._free):
            raise InvariantViolated("the pages of a beam search are not those of its beams")

    def _use(self, pages: Iterable[int]) -> None:
        for page in pages:
            self._users[page] = self._users.get(page, 0) + 1

    def _grow(self, table: PageTable) -> int:
        if not self._free:
            raise InvariantViolated("a beam search has reserved fewer pages than it needs")
        page = self._free.pop()
        table.pages.append(page)
        self._users[page] = 1
        return page
