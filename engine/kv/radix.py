"""Prefix cache: which pages hold the KV of which token prefixes.

A radix tree per namespace. An edge carries whole pages of tokens, so a node's length is a multiple
of the page size and children are told apart by their first page of tokens. A page belongs to
exactly one node; sequences borrow it by locking the deepest node they use, which locks the path to
the root. Only unlocked leaves are evicted, the least recently used or the least often found first,
from their tail.

Knows page ids and token ids. Knows nothing of tensors, sequences or wall time ("recent" is a
counter). After every public call: `num_pages` is the sum over nodes, `num_locked_pages` the sum
over nodes with locks, and a node's lock count is at least each child's.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from remora.configs.errors import InvariantViolated
from remora.engine.kv.hashes import HASH_BYTES
from remora.engine.types import Namespace

PageKey = bytes
Rank = tuple[bool, int, int]


@dataclass(eq=False, slots=True)
class RadixNode:
    """A run of pages below `parent`.

    num_hits:  how often a sequence started with its pages
    is_kept:   whether it leaves after all that are not
    tokens:  page_size ids for each of `pages`
    hashes:  HASH_BYTES for each of the first of `pages`, as far as newest.py has made them
    """

    parent: RadixNode | None
    tokens: array[int]
    pages: list[int]
    children: dict[PageKey, RadixNode] = field(default_factory=dict)
    num_locks: int = 0
    last_used: int = 0
    num_hits: int = 0
    is_kept: bool = False
    is_offered: bool = False  # stands on the eviction heap
    namespace: Namespace | None = None  # of a root
    hashes: bytes = b""


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """Cached pages of a prompt's start, and the node to lock while they are in use."""

    node: RadixNode
    pages: list[int]


class Listener(Protocol):
    """Who is told what happens to pages of the tree."""

    def stored(self, node: RadixNode, first: int) -> None:
        """A node has pages from its `first` on that are new."""
        ...

    def removed(self, node: RadixNode, first: int) -> None:
        """A node is about to lose its pages from its `first` on."""
        ...

    def cleared(self) -> None:
        """The tree has become empty, all at once."""
        ...


class RadixCache:
    """Pages kept after use, found again by (namespace, tokens)."""

    def __init__(self, *, page_size: int, eviction: Literal["lru", "lfu"] = "lru") -> None:
        self.page_size = page_size
        self.num_pages = 0
        self.num_locked_pages = 0
        self._listener: Listener | None = None
        self._by_hits = eviction == "lfu"
        self._roots: dict[Namespace, RadixNode] = {}
        self._clock = 0
        self._leaves: list[tuple[Rank, int, RadixNode]] = []

    # -- lookup ------------------------------------------------------------------------------

    def root(self, namespace: Namespace) -> RadixNode:
        """Return the root of a namespace; nothing is kept of it until it has pages."""
        root = self._roots.get(namespace)
        return root or RadixNode(parent=None, tokens=array("q"), pages=[], namespace=namespace)

    def match(self, namespace: Namespace, tokens: Sequence[int]) -> PrefixMatch:
        """Find the longest cached prefix, in whole pages. May split a node; locks nothing."""
        node, _ = self._descend(self.root(namespace), array("q", tokens))
        path = [ancestor.pages for ancestor in self._path(node)]
        return PrefixMatch(node, [page for pages in reversed(path) for page in pages])

    def roots(self) -> Iterator[RadixNode]:
        """Yield the roots below which there are pages."""
        yield from self._roots.values()

    # -- borrowing ---------------------------------------------------------------------------

    def lock(self, node: RadixNode) -> None:
        """Keep `node` and its ancestors from being evicted until `unlock`."""
        self._clock += 1
        for ancestor in self._path(node):
            ancestor.last_used = self._clock
            ancestor.num_locks += 1
            if ancestor.num_locks == 1:
                self.num_locked_pages += len(ancestor.pages)

    def unlock(self, node: RadixNode) -> None:
        """Undo one `lock`. The pages stay cached; the most recent use is now."""
        self._clock += 1
        for ancestor in self._path(node):
            if ancestor.num_locks == 0:
                raise InvariantViolated("a prefix-cache node was unlocked more often than locked")
            ancestor.last_used = self._clock
            ancestor.num_locks -= 1
            if ancestor.num_locks == 0:
                self.num_locked_pages -= len(ancestor.pages)
                self._offer(ancestor)
                self._drop_if_bare(ancestor)

    def note_hit(self, node: RadixNode) -> None:
        """Count that a sequence has started with the pages up to `node`, which it has locked."""
        for ancestor in self._path(node):
            ancestor.num_hits += 1

    def keep(self, node: RadixNode) -> None:
        """Let the pages up to `node` leave only when there are no others."""
        for ancestor in self._path(node):
            ancestor.is_kept = True

    # -- change ------------------------------------------------------------------------------

    def extend(
        self, node: RadixNode, tokens: Sequence[int], pages: Sequence[int]
    ) -> RadixNode | None:
        """Adopt pages that follow `node`, which the caller has locked once or is a fresh root.

        tokens:  page_size ids for each of `pages`
        Returns the node that now ends with them; None, and nothing changed, if the tree has other
        pages for these tokens already.
        """
        node, key = self._rooted(node), array("q", tokens)
        if self._first_page(key, 0) in node.children:
            return None
        is_own = node.parent is not None and node.num_locks == 1 and not node.children
        if is_own and not node.is_kept:
            node.tokens += key
            node.pages += pages
            self.num_pages += len(pages)
            self.num_locked_pages += len(pages)
            if self._listener is not None:
                self._listener.stored(node, len(node.pages) - len(pages))
            return node
        return self._add_leaf(node, key, list(pages))

    def insert(self, node: RadixNode, tokens: Sequence[int], pages: Sequence[int]) -> list[int]:
        """Adopt those of the pages that follow `node` whose tokens the tree does not have yet.

        Arguments as in `extend`. Returns the pages adopted; the others stay the caller's.
        """
        key = array("q", tokens)
        node, position = self._descend(self._rooted(node), key)
        adopted = list(pages[position // self.page_size :])
        if adopted:
            self._add_leaf(node, key[position:], adopted)
        return adopted

    def evict(self, count: int) -> list[int]:
        """Forget up to `count` pages, least used first; returns those given up."""
        freed: list[int] = []
        while len(freed) < count and self._leaves:
            rank, _, node = heapq.heappop(self._leaves)
            node.is_offered = False
            if not self._is_evictable(node):
                continue
            if rank != self._rank(node):
                self._offer(node)
                continue
            cut = max(0, len(node.pages) - (count - len(freed)))
            if self._listener is not None:
                self._listener.removed(node, cut)
            freed += node.pages[cut:]
            self.num_pages -= len(node.pages) - cut
            if cut:
                del node.pages[cut:], node.tokens[cut * self.page_size :]
                node.hashes = node.hashes[: cut * HASH_BYTES]
                self._offer(node)
            else:
                self._remove(node)
        return freed

    def clear(self) -> list[int]:
        """Forget every page that is not locked."""
        if self._listener is None or self.num_locked_pages:
            return self.evict(self.num_pages)
        listener, self._listener = self._listener, None
        freed = self.evict(self.num_pages)
        self._listener = listener
        listener.cleared()
        return freed

    def listen(self, listener: Listener) -> None:
        """Tell somebody what happens from now on."""
        self._listener = listener

    # -- checks ------------------------------------------------------------------------------

    def nodes(self) -> Iterator[RadixNode]:
        """Yield every node but the roots."""
        stack = [child for root in self._roots.values() for child in root.children.values()]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def check_integrity(self) -> None:
        """Raise InvariantViolated unless the counts and the structure hold."""
        seen: set[int] = set()
        locked = 0
        for node in self.nodes():
            pages = set(node.pages)
            parent = node.parent
            if not pages or len(pages) != len(node.pages) or pages & seen:
                raise InvariantViolated(
                    "a page stands in the prefix cache twice, or a node is empty"
                )
            if len(node.tokens) != len(node.pages) * self.page_size:
                raise InvariantViolated("a node's tokens and pages disagree")
            if parent is None or parent.children.get(self._first_page(node.tokens, 0)) is not node:
                raise InvariantViolated("a node is not where its tokens say")
            if parent.num_locks < node.num_locks:
                raise InvariantViolated("a node is locked more often than its parent")
            if parent.last_used < node.last_used or len(node.hashes) > len(pages) * HASH_BYTES:
                raise InvariantViolated("a node was used after its parent, or has too many hashes")
            seen |= pages
            locked += len(node.pages) if node.num_locks else 0
        if len(seen) != self.num_pages or locked != self.num_locked_pages:
            raise InvariantViolated("the prefix cache has lost count of its pages")

    # -- inside ------------------------------------------------------------------------------

    def _rooted(self, node: RadixNode) -> RadixNode:
        """Return `node`; for a root, the one in the table, which it may enter only now.

        Namespaces hold callers' salts: a root without pages must not stay behind.
        """
        if node.namespace is None:
            return node
        return self._roots.setdefault(node.namespace, node)

    def _add_leaf(self, parent: RadixNode, tokens: array[int], pages: list[int]) -> RadixNode:
        self._clock += 1
        for ancestor in self._path(parent):
            ancestor.last_used = self._clock
        leaf = RadixNode(parent=parent, tokens=tokens, pages=pages, last_used=self._clock)
        parent.children[self._first_page(tokens, 0)] = leaf
        self.num_pages += len(pages)
        self._offer(leaf)
        if self._listener is not None:
            self._listener.stored(leaf, 0)
        return leaf

    def _descend(self, node: RadixNode, key: array[int]) -> tuple[RadixNode, int]:
        """Follow `key` in whole pages; returns the last node on the way and its end in `key`."""
        position = 0
        while child := node.children.get(self._first_page(key, position)):
            shared = self._shared_pages(child, key, position)
            node = child if shared == len(child.pages) else self._split(child, shared)
            position += shared * self.page_size
        return node, position

    def _first_page(self, key: array[int], position: int) -> PageKey:
        page = key[position : position + self.page_size]
        return page.tobytes() if len(page) == self.page_size else b""

    def _shared_pages(self, node: RadixNode, key: array[int], position: int) -> int:
        """Return how many of the node's pages `key[position:]` starts with (at least one)."""
        step = self.page_size
        most = min(len(node.pages), (len(key) - position) // step)
        if node.tokens[: most * step] == key[position : position + most * step]:
            return most
        low, high = 1, most  # pages [0, low) are equal, some page before `high` differs
        while high - low > 1:
            middle = (low + high) // 2
            begin, end = low * step, middle * step
            if node.tokens[begin:end] == key[position + begin : position + end]:
                low = middle
            else:
                high = middle
        return low

    def _split(self, node: RadixNode, num_pages: int) -> RadixNode:
        """Cut `node` after `num_pages` pages; returns the new upper half.

        upper [0, cut)  takes the node's place below its parent, with the same locks
        node  [cut, n)  hangs below upper; whoever locked `node` still holds the whole path
        """
        cut = num_pages * self.page_size
        parent = node.parent
        if parent is None:
            raise InvariantViolated("a root cannot be split")
        upper = RadixNode(
            parent=parent,
            tokens=node.tokens[:cut],
            pages=node.pages[:num_pages],
            num_locks=node.num_locks,
            last_used=node.last_used,
            num_hits=node.num_hits,
            is_kept=node.is_kept,
            hashes=node.hashes[: num_pages * HASH_BYTES],
        )
        node.hashes = node.hashes[num_pages * HASH_BYTES :]
        parent.children[self._first_page(node.tokens, 0)] = upper
        node.parent, node.tokens, node.pages = upper, node.tokens[cut:], node.pages[num_pages:]
        upper.children[self._first_page(node.tokens, 0)] = node
        return upper

    def _remove(self, node: RadixNode) -> None:
        parent = node.parent
        if parent is None:
            raise InvariantViolated("a root cannot be evicted")
        del parent.children[self._first_page(node.tokens, 0)]
        self._offer(parent)
        self._drop_if_bare(parent)

    def _drop_if_bare(self, node: RadixNode) -> None:
        """Forget a root below which nothing is left."""
        if node.namespace is None or node.children or node.num_locks:
            return
        if self._roots.get(node.namespace) is node:
            del self._roots[node.namespace]

    @staticmethod
    def _path(node: RadixNode) -> Iterator[RadixNode]:
        current: RadixNode | None = node
        while current is not None:
            yield current
            current = current.parent

    @staticmethod
    def _is_evictable(node: RadixNode) -> bool:
        return node.parent is not None and not node.children and node.num_locks == 0

    def _offer(self, node: RadixNode) -> None:
        """Put a leaf that may be evicted on the heap; stale entries are skipped when popped."""
        if self._is_evictable(node) and not node.is_offered:
            node.is_offered = True
            heapq.heappush(self._leaves, (self._rank(node), id(node), node))

    def _rank(self, node: RadixNode) -> Rank:
        """Return by what leaves are evicted, the smallest first."""
        return (node.is_kept, node.num_hits if self._by_hits else 0, node.last_used)
