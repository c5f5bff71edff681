"""Pages of layers with a sliding window: a pool of their own, given back behind the window.

A page of tokens that is computed has a page here beside its page for the other layers. Once no
token to come can see it, a sequence lets it go: it is free, or stays cached as long as its tokens
do and nobody needs the memory. Of a cached prefix the early pages may therefore be gone; it can be
continued where the last `window` tokens are still there.

A page is free, cached (beside a page of the prefix cache, in use by nobody) or held by those who
need it: free + cached + held == num_pages. "Full page" is the one that it stands beside. Knows page
ids; no tokens, tensors or time (of cached pages the one that was left first goes first).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from remora.configs.errors import InvariantViolated
from remora.engine.kv.pages import DUMP_PAGE, PagePool, pages_needed

NO_PAGE = DUMP_PAGE  # in place of a page that was let go: nobody reads it


class WindowPages:
    """Pages of the layers with a window.

    window:     tokens that the widest of these windows sees, the newest included
    row_pages:  most that a sequence holds while its prompt is computed; `most_decoding`: after it
    """

    def __init__(self, num_pages: int, *, window: int, page_size: int, row_pages: int) -> None:
        self.num_pages = num_pages
        self.num_locked = 0  # cached pages that somebody needs
        self.num_evicted = 0
        self.most_decoding = pages_needed(window, page_size) + 1
        self.most_extending = row_pages
        self._window = window
        self._page_size = page_size
        self._pool = PagePool(num_pages)
        self._beside: dict[int, int] = {}  # full page of the prefix cache -> page
        self._full = [NO_PAGE] * (num_pages + 1)  # page -> full page of the prefix cache
        self._users = [0] * (num_pages + 1)
        self._idle: dict[int, None] = {}  # cached pages, in the order in which they were left

    @property
    def num_free(self) -> int:
        """Pages nobody uses."""
        return self._pool.num_free

    @property
    def num_cached(self) -> int:
        """Pages kept for reuse, to be had by evicting."""
        return len(self._idle)

    @property
    def num_held(self) -> int:
        """Pages that sequences need."""
        return self.num_pages - self.num_free - self.num_cached

    def first_needed(self, num_computed: int) -> int:
        """Return the first page of a sequence that tokens from `num_computed` on see."""
        return max(0, num_computed - self._window + 1) // self._page_size

    def usable(self, full_pages: Sequence[int]) -> int:
        """Return how many leading pages of a cached prefix can be continued after."""
        end = index = len(full_pages)
        while index > self.first_needed(end * self._page_size):
            index -= 1
            if full_pages[index] not in self._beside:
                end = index
        return end

    def borrow(self, full_pages: Iterable[int]) -> list[int]:
        """Return the pages beside pages of the prefix cache, which stay until `leave`."""
        pages = [self._beside[full] for full in full_pages]
        for page in pages:
            if self._users[page] == 0:
                del self._idle[page]
                self.num_locked += 1
            self._users[page] += 1
        return pages

    def has(self, count: int) -> bool:
        """Return whether `take` could give so many."""
        return count <= self.num_free + self.num_cached

    def take(self, count: int) -> list[int]:
        """Return new pages, evicting cached ones if need be. The caller has asked `has`."""
        while self._pool.num_free < count and self._idle:
            page = next(iter(self._idle))
            self._part(page)
            self.num_evicted += 1
        pages = self._pool.try_allocate(count)
        if pages is None:
            raise InvariantViolated("more pages of windows were taken than there are")
        for page in pages:
            self._users[page] = 1
        return pages

    def leave(self, pages: Iterable[int]) -> None:
        """One sequence does not need these pages any more."""
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
        """Cache held pages beside pages of the prefix cache, where those have none.

        pages:  [len(full_pages)], NO_PAGE where there is none
        """
        for full, page in zip(full_pages, pages, strict=True):
            if page != NO_PAGE and self._full[page] == NO_PAGE and full not in self._beside:
                self._beside[full], self._full[page] = page, full
                self.num_locked += 1

    def forget(self, full_pages: Iterable[int]) -> None:
        """The prefix cache gives these pages up."""
        for full in full_pages:
            page = self._beside.get(full)
            if page is not None:
                self._part(page)

    def _part(self, page: int) -> None:
        """Take a page from beside its full page; it is free if nobody needs it."""
        del self._beside[self._full[page]]
        self._full[page] = NO_PAGE
        if self._users[page] > 0:
            self.num_locked -= 1
        else:
            del self._idle[page]
            self._pool.release([page])

    def check_users(self, users: Mapping[int, int]) -> None:
        """Raise InvariantViolated unless sequences need just these pages, so many each."""
        if any(count != users.get(page, 0) for page, count in enumerate(self._users)):
            raise InvariantViolated("a page of windows is held by nobody, or by nobody known")

    def check_integrity(self) -> None:
        """Raise InvariantViolated unless every page is accounted for exactly once."""
        self._pool.check_integrity()
        held = [page for page in range(1, self.num_pages + 1) if self._users[page] > 0]
        if len(held) != self.num_held or any(self._users[page] for page in self._idle):
            raise InvariantViolated(
                f"pages of windows: {self.num_free} free + {self.num_cached} cached + {len(held)}"
                f" held is not {self.num_pages}"
            )
        if any(self._full[page] != full for full, page in self._beside.items()):
            raise InvariantViolated("a page of windows stands beside two others")
        locked = [page for page in held if self._full[page] != NO_PAGE]
        if len(locked) != self.num_locked or len(self._beside) != len(locked) + len(self._idle):
            raise InvariantViolated("the pages of windows beside cached ones were miscounted")
