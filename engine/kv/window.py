"""The page pool of layers with a sliding window, freed behind the window.

Each computed page of the other layers ("full page") has a window page here. Once no future token
can see it, its sequence releases it: it becomes free, or stays cached as long as its full page is
cached and the memory is not needed. Early window pages of a cached prefix may therefore be gone;
the prefix can be continued where the last `window` tokens still have theirs.

A page is free, cached (for a page of the prefix cache, without users) or held by its users:
free + cached + held == num_pages. Cached pages are evicted in the order of their release. Knows
page ids; no tokens, tensors or time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from remora.configs.errors import InvariantViolated
from remora.engine.kv.pages import DUMP_PAGE, PagePool, pages_needed

NO_PAGE = DUMP_PAGE  # in place of a released page, which is not read


class WindowPages:
    """Pages of the window layers.

    window:     tokens that the widest window sees, the newest included
    row_pages:  most pages of a sequence while its prompt is computed; `most_decoding`: afterwards
    """

    def __init__(self, num_pages: int, *, window: int, page_size: int, row_pages: int) -> None:
        self.num_pages = num_pages
        self.num_locked = 0  # pages of cached full pages that have users
        self.num_evicted = 0
        self.most_decoding = pages_needed(window, page_size) + 1
        self.most_extending = row_pages
        self._window = window
        self._page_size = page_size
        self._pool = PagePool(num_pages)
        self._by_full: dict[int, int] = {}  # full page of the prefix cache -> page
        self._full = [NO_PAGE] * (num_pages + 1)  # page -> full page of the prefix cache
        self._users = [0] * (num_pages + 1)
        self._idle: dict[int, None] = {}  # cached pages without users, in the order of release

    @property
    def num_free(self) -> int:
        """Pages that hold nothing."""
        return self._pool.num_free

    @property
    def num_cached(self) -> int:
        """Pages kept for reuse, which eviction can free."""
        return len(self._idle)

    @property
    def num_held(self) -> int:
        """Pages in use by sequences."""
        return self.num_pages - self.num_free - self.num_cached

    def first_needed(self, num_computed: int) -> int:
        """Return the first page of a sequence that tokens from `num_computed` on see."""
        return max(0, num_computed - self._window + 1) // self._page_size

    def usable(self, full_pages: Sequence[int]) -> int:
        """Return after how many leading pages a cached prefix can be continued."""
        end = index = len(full_pages)
        while index > self.first_needed(end * self._page_size):
            index -= 1
            if full_pages[index] not in self._by_full:
                end = index
        return end

    def borrow(self, full_pages: Iterable[int]) -> list[int]:
        """Return the window pages of cached full pages, in use until `leave`."""
        pages = [self._by_full[full] for full in full_pages]
        for page in pages:
            if self._users[page] == 0:
                del self._idle[page]
                self.num_locked += 1
            self._users[page] += 1
        return pages

    def has(self, count: int, *, evicting: bool = True) -> bool:
        """Return whether `take` could return `count` pages, if it may evict cached ones or not."""
        return count <= self.num_free + (self.num_cached if evicting else 0)

    def take(self, count: int) -> list[int]:
        """Return new pages, evicting cached ones if need be. Check `has` first."""
        while self._pool.num_free < count and self._idle:
            page = next(iter(self._idle))
            self._detach(page)
            self.num_evicted += 1
        pages = self._pool.try_allocate(count)
        if pages is None:
            raise InvariantViolated("more window pages were taken than there are")
        for page in pages:
            self._users[page] = 1
        return pages

    def leave(self, pages: Iterable[int]) -> None:
        """Release pages of one sequence."""
        for page in pages:
            self._users[page] -= 1
            if self._users[page] > 0:
                continue
            if self._full[page] == NO_PAGE:
                self._pool.release([page])
            else:
                self._idle[page] = None
                self.num_locked -= 1

    def keep(self, full_pages: Sequence[int], pages: Sequence[int]) -> None:
        """Cache held pages for cached full pages that have none.

        pages:  [len(full_pages)], NO_PAGE = none
        """
        for full, page in zip(full_pages, pages, strict=True):
            if page != NO_PAGE and self._full[page] == NO_PAGE and full not in self._by_full:
                self._by_full[full], self._full[page] = page, full
                self.num_locked += 1

    def forget(self, full_pages: Iterable[int]) -> None:
        """Drop the window pages of full pages that the prefix cache evicts."""
        for full in full_pages:
            page = self._by_full.get(full)
            if page is not None:
                self._detach(page)

    def _detach(self, page: int) -> None:
        """Separate a page from its full page; it becomes free if it has no users."""
        del self._by_full[self._full[page]]
        self._full[page] = NO_PAGE
        if self._users[page] > 0:
            self.num_locked -= 1
        else:
            del self._idle[page]
            self._pool.release([page])

    def check_users(self, users: Mapping[int, int]) -> None:
        """Raise InvariantViolated unless each page has this number of users."""
        if any(count != users.get(page, 0) for page, count in enumerate(self._users)):
            raise InvariantViolated("a window page's count of users is wrong")

    def check_integrity(self) -> None:
        """Raise InvariantViolated unless every page is accounted for exactly once."""
        self._pool.check_integrity()
        held = [page for page in range(1, self.num_pages + 1) if self._users[page] > 0]
        if len(held) != self.num_held or any(self._users[page] for page in self._idle):
            raise InvariantViolated(
                f"window pages: {self.num_free} free + {self.num_cached} cached + {len(held)} held"
                f" is not {self.num_pages}"
            )
        if any(self._full[page] != full for full, page in self._by_full.items()):
            raise InvariantViolated("a window page belongs to two full pages")
        locked = [page for page in held if self._full[page] != NO_PAGE]
        if len(locked) != self.num_locked or len(self._by_full) != len(locked) + len(self._idle):
            raise InvariantViolated("the counts of cached window pages are wrong")
