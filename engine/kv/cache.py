"""Allocates, shares and frees the pages of sequences.

Joins the free list (pages.py) and the prefix cache (radix.py). A page is free, cached, or held by
exactly one sequence: free + cached + held == num_pages after every public call. Layers with a
sliding window may have a second pool (window.py), with one page for each computed page. Block
tables only grow, so the ranks receive new pages and nothing else: pages freed behind a window stay
in their tables and are not read. Knows no tensors, requests or time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from remora.configs.errors import InvariantViolated
from remora.engine.kv.pages import PagePool, pages_needed
from remora.engine.kv.radix import Listener, PrefixMatch, RadixCache, RadixNode
from remora.engine.kv.window import NO_PAGE, WindowPages
from remora.engine.types import Namespace


@dataclass(eq=False, slots=True)
class PageTable:
    """The pages of one sequence.

    pages:          block table, in order
    owned:          pages that only this sequence holds; the others belong to the prefix cache
    node:           deepest prefix-cache node that the sequence has locked
    num_matched:    leading pages found in the cache rather than computed
    num_published:  leading pages that belong to the cache: `node` ends there
    windows:        [len(pages)] the page of window layers for each of `pages`, NO_PAGE if freed or
                    never allocated; empty without a window pool
    first_window:   leading pages without a window page; all others have one
    """

    pages: list[int] = field(default_factory=list)
    owned: set[int] = field(default_factory=set)
    node: RadixNode | None = None
    num_matched: int = 0
    num_published: int = 0
    windows: list[int] = field(default_factory=list)
    first_window: int = 0


class KVCache:
    """All KV pages of one engine.

    prefix_cache:  whether pages are kept for later requests; the outputs of one request may share
                   pages without it, in a namespace of their own
    windows:       pool of layers with a sliding window, if they have one
    """

    def __init__(
        self,
        num_pages: int,
        *,
        page_size: int,
        prefix_cache: bool,
        eviction: Literal["lru", "lfu"] = "lru",
        windows: WindowPages | None = None,
    ) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.prefix_cache = prefix_cache
        self.num_owned = 0
        self.num_evicted = 0
        self.windows = windows
        self._pool = PagePool(num_pages)
        self._radix = RadixCache(page_size=page_size, eviction=eviction)

    @property
    def num_free(self) -> int:
        """Pages that hold nothing."""
        return self._pool.num_free

    @property
    def num_cached(self) -> int:
        """Pages kept for reuse, which eviction can free."""
        return self._radix.num_pages - self._radix.num_locked_pages

    @property
    def num_held(self) -> int:
        """Pages in use by sequences, owned or borrowed."""
        return self.num_owned + self._radix.num_locked_pages

    @property
    def num_locked(self) -> int:
        """Pages of the prefix cache that sequences borrow."""
        return self._radix.num_locked_pages

    @property
    def usage(self) -> float:
        """Share of the pages that sequences use, of the fuller pool."""
        usage, windows = self.num_held / self.num_pages, self.windows
        return usage if windows is None else max(usage, windows.num_held / windows.num_pages)

    def listen(self, listener: Listener) -> None:
        """Report pages that become reusable or stop to be."""
        self._radix.listen(listener)

    def newest_hashes(self, limit: int) -> bytes:
        """Return HASH_BYTES for each of up to `limit` reusable pages, latest used first."""
        return self._radix.newest_hashes(limit)

    def count_cached(self, namespace: Namespace, tokens: Sequence[int]) -> int:
        """Return how many tokens `attach_prefix` would find now."""
        if not self._shares(namespace):
            return 0
        return len(self._match(namespace, tokens).pages) * self.page_size

    def cached_end(self, namespace: Namespace, tokens: Sequence[int]) -> RadixNode:
        """Return the node at which the longest cached prefix of `tokens` ends."""
        return self._radix.match(namespace, tokens).node

    def _shares(self, namespace: Namespace) -> bool:
        """Return whether sequences of a namespace borrow each other's pages."""
        return self.prefix_cache or bool(namespace.request_id)

    def _match(self, namespace: Namespace, tokens: Sequence[int]) -> PrefixMatch:
        """Find the longest cached prefix that a sequence can continue."""
        match = self._radix.match(namespace, tokens)
        if self.windows is None:
            return match
        usable = self.windows.usable(match.pages)
        if usable == len(match.pages):
            return match
        return self._radix.match(namespace, tokens[: usable * self.page_size])

    def attach_prefix(self, table: PageTable, namespace: Namespace, tokens: Sequence[int]) -> int:
        """Borrow the longest cached prefix of `tokens` for an empty table; returns its tokens."""
        if table.pages or table.node is not None:
            raise InvariantViolated("a prefix was attached to a table in use")
        if not self._shares(namespace):
            return 0
        match = self._match(namespace, tokens)
        self._radix.lock(match.node)
        table.node, table.pages = match.node, match.pages
        count = table.num_matched = table.num_published = len(match.pages)
        if self.windows is not None:
            first = table.first_window = self.windows.first_needed(count * self.page_size)
            table.windows = [NO_PAGE] * first + self.windows.borrow(match.pages[first:])
        return count * self.page_size

    def note_hit(self, table: PageTable) -> None:
        """Count one use of the prefix that is attached to a started sequence's table."""
        if table.node is not None:
            self._radix.note_hit(table.node)

    def keep(self, namespace: Namespace, tokens: Sequence[int]) -> None:
        """Evict the cached prefix of `tokens` only after all others."""
        if self.prefix_cache:
            self._radix.keep(self._radix.match(namespace, tokens).node)

    def try_grow(
        self, table: PageTable, num_tokens: int, *, evicting: bool = True
    ) -> list[int] | None:
        """Give the table room for `num_tokens` tokens.

        evicting:  whether cached pages may be evicted for it
        Returns the new pages; None, and nothing changed, when there are too few.
        """
        if num_tokens <= len(table.pages) * self.page_size:
            return []
        count = pages_needed(num_tokens, self.page_size) - len(table.pages)
        missing = count - self._pool.num_free
        if missing > (self.num_cached if evicting else 0):
            return None
        if self.windows is not None and not self.windows.has(count, evicting=evicting):
            return None
        if missing > 0:
            evicted = self._radix.evict(missing)
            self.num_evicted += len(evicted)
            self._free(evicted)
        pages = self._pool.try_allocate(count)
        if pages is None:
            raise InvariantViolated("eviction freed fewer pages than the cache had counted")
        table.pages += pages
        table.owned.update(pages)
        self.num_owned += count
        if self.windows is not None:
            table.windows += self.windows.take(count)
        return pages

    def slide(self, table: PageTable, num_computed: int) -> None:
        """Free the window pages that tokens from `num_computed` on do not see."""
        if self.windows is None:
            return
        first = self.windows.first_needed(num_computed)
        if first > table.first_window:
            passed = slice(table.first_window, first)
            self.windows.leave(table.windows[passed])
            table.windows[passed] = [NO_PAGE] * (first - table.first_window)
            table.first_window = first

    def publish(
        self, table: PageTable, namespace: Namespace, tokens: Sequence[int], num_computed: int
    ) -> None:
        """Add the full pages of the first `num_computed` tokens to the prefix cache.

        The sequence keeps using them; its table does not change. Nothing happens if other pages of
        the same tokens are cached already: locking those too would make the sequence hold more than
        it needs, and more than admission has counted.
        """
        count = num_computed // self.page_size
        if not self._shares(namespace) or count <= table.num_published:
            return
        start = table.num_published
        node = self._radix.extend(
            table.node or self._radix.root(namespace),
            tokens[start * self.page_size : count * self.page_size],
            table.pages[start:count],
        )
        if node is None:
            self._keep_windows(table, namespace, tokens, count)
            return
        if self.windows is not None:
            self.windows.keep(table.pages[start:count], table.windows[start:count])
        if node is not table.node:
            self._radix.lock(node)
            if table.node is not None:
                self._radix.unlock(table.node)
        table.node, table.num_published = node, count
        self._disown(table, table.pages[start:count])

    def retire(
        self, table: PageTable, namespace: Namespace, tokens: Sequence[int], num_computed: int
    ) -> None:
        """Release the table; its computed pages that the cache lacks stay cached."""
        start, count = table.num_published, num_computed // self.page_size
        if self.prefix_cache and count > start:
            adopted = self._radix.insert(
                table.node or self._radix.root(namespace),
                tokens[start * self.page_size : count * self.page_size],
                table.pages[start:count],
            )
            self._disown(table, adopted)
            self._keep_windows(table, namespace, tokens, count)
        self.release(table)

    def release(self, table: PageTable) -> None:
        """Free everything that the table holds, and empty it. Never fails on a live table."""
        self._pool.release(table.owned)
        self.num_owned -= len(table.owned)
        if table.node is not None:
            self._radix.unlock(table.node)
        if self.windows is not None:
            self.windows.leave(table.windows[table.first_window :])
        table.pages, table.owned, table.node = [], set(), None
        table.num_matched = table.num_published = 0
        table.windows, table.first_window = [], 0

    def _keep_windows(
        self, table: PageTable, namespace: Namespace, tokens: Sequence[int], count: int
    ) -> None:
        """Cache the table's window pages for the cached pages of its first `count` pages.

        A cached prefix whose own window pages were evicted can then be continued again.
        """
        if self.windows is None:
            return
        start = max(table.num_published, table.first_window)
        cached = self._radix.match(namespace, tokens[: count * self.page_size]).pages
        self.windows.keep(cached[start:], table.windows[start : len(cached)])

    def _free(self, pages: Sequence[int]) -> None:
        """Free pages that the prefix cache has evicted."""
        if self.windows is not None:
            self.windows.forget(pages)
        self._pool.release(pages)

    def _disown(self, table: PageTable, pages: Sequence[int]) -> None:
        table.owned.difference_update(pages)
        self.num_owned -= len(pages)

    def drop(self, namespace: Namespace) -> None:
        """Free all pages of a namespace, which no sequence uses any more."""
        self._free(self._radix.drop(namespace))

    def flush(self) -> int:
        """Drop all cached pages that no sequence uses; returns how many."""
        pages = self._radix.clear()
        self._free(pages)
        return len(pages)

    def check_integrity(self) -> None:
        """Raise InvariantViolated unless every page is accounted for exactly once."""
        self._pool.check_integrity()
        self._radix.check_integrity()
        if self.num_free + self.num_cached + self.num_held != self.num_pages:
            raise InvariantViolated(
                f"pages: {self.num_free} free + {self.num_cached} cached + {self.num_held} held"
                f" is not {self.num_pages}"
            )
        if self.windows is not None:
            self.windows.check_integrity()
