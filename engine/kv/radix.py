"""Prefix cache: maps token prefixes to the pages that hold their KV.

A radix tree per namespace. An edge carries whole pages of tokens, so a node's length is a multiple
of the page size and children differ in their first page of tokens. A page belongs to
exactly one node; sequences borrow it by locking the deepest node they use, which locks the path to
the root. Only unlocked leaves are evicted, from their tail; the least recently used or the least
often found leaf first.

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
from remora.engine.kv.hashes import HASH_BYTES, chain, root_hash
from remora.engine.types import Namespace

PageKey = bytes
Rank = tuple[bool, int, int]


@dataclass(eq=False, slots=True)
class RadixNode:
    """A run of pages below `parent`.

    tokens:    page_size ids for each of `pages`
    num_hits:  how often a sequence started with its pages
    is_kept:   whether it is evicted only after all others
    hashes:    HASH_BYTES for each of the first of `pages`, as far as `page_hashes` made them
    """

    parent: RadixNode | None
    tokens: array[int]
    pages: list[int]
    children: dict[PageKey, RadixNode] = field(default_factory=dict)
    num_locks: int = 0
    last_used: int = 0
    num_hits: int = 0
    is_kept: bool = False
    is_offered: bool = False  # is on the eviction heap
    namespace: Namespace | None = None  # of a root
    hashes: bytes = b""

    @property
    def root_namespace(self) -> Namespace:
        """The namespace of its root."""
        node: RadixNode | None = self
        while node is not None and node.namespace is None:
            node = node.parent
        assert node is not None
        assert node.namespace is not None
        return node.namespace

    def page_hashes(self, page_size: int) -> bytes:
        """Return the hashes of all its pages, computed on first use and kept."""
        done = len(self.hashes) // HASH_BYTES
        if done < len(self.pages):
            before = self.hashes[-HASH_BYTES:]
            if not before and self.parent is not None:
                before = self.parent.page_hashes(page_size)[-HASH_BYTES:]
            tokens = self.tokens[done * page_size :]
            self.hashes += chain(before or root_hash(self.root_namespace), tokens, page_size)
        return self.hashes


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """Cached pages of a prompt's start, and the node to lock while using them."""

    node: RadixNode
    pages: list[int]


class Listener(Protocol):
    """Receives changes of the tree's pages."""

    def stored(self, node: RadixNode, first: int) -> None:
        """Receive a node whose pages from `first` on are new."""

    def removed(self, node: RadixNode, first: int) -> None:
        """Receive a node that is about to lose its pages from `first` on."""

    def cleared(self) -> None:
        """Receive that the whole tree was dropped at once."""


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
        """Return the root of a namespace, which enters the tree with its first pages."""
        root = self._roots.get(namespace)
        return root or RadixNode(parent=None, tokens=array("q"), pages=[], namespace=namespace)

    def match(self, namespace: Namespace, tokens: Sequence[int]) -> PrefixMatch:
        """Find the longest cached prefix, in whole pages. May split a node; locks nothing."""
        node, _ = self._descend(self.root(namespace), array("q", tokens))
        path = [ancestor.pages for ancestor in self._path(node)]
        return PrefixMatch(node, [page for pages in reversed(path) for page in pages])

    def newest_hashes(self, limit: int) -> bytes:
        """Return HASH_BYTES for each of up to `limit` pages, the most recently used first.

        A node is used no later than its parent, so a page follows all pages of its prefix. Costs
        one hash per new page and a walk over the nodes returned. Pages that only one request can
        find are not among them.
        """
        hashes: list[bytes] = []
        room = limit * HASH_BYTES
        heap = [
            (-root.last_used, id(root), root)
            for namespace, root in self._roots.items()
            if not namespace.request_id
        ]
        heapq.heapify(heap)
        while heap and room > 0:
            _, _, node = heapq.heappop(heap)
            own = node.page_hashes(self.page_size)
            hashes.append(own[:room])
            room -= len(own)
            for child in node.children.values():
                heapq.heappush(heap, (-child.last_used, id(child), child))
        return b"".join(hashes)

    # -- borrowing ---------------------------------------------------------------------------

    def lock(self, node: RadixNode) -> None:
        """Protect `node` and its ancestors from eviction until `unlock`."""
        self._clock += 1
        for ancestor in self._path(node):
            ancestor.last_used = self._clock
            ancestor.num_locks += 1
            if ancestor.num_locks == 1:
                self.num_locked_pages += len(ancestor.pages)

    def unlock(self, node: RadixNode) -> None:
        """Undo one `lock`, which counts as a use. The pages stay cached."""
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
        """Count a sequence that started with the pages up to `node`, which it has locked."""
        for ancestor in self._path(node):
            ancestor.num_hits += 1

    def keep(self, node: RadixNode) -> None:
        """Evict the pages up to `node` only after all others."""
        for ancestor in self._path(node):
            ancestor.is_kept = True

    # -- change ------------------------------------------------------------------------------

    def extend(
        self, node: RadixNode, tokens: Sequence[int], pages: Sequence[int]
    ) -> RadixNode | None:
        """Adopt pages that follow `node`, which the caller has locked once or is a fresh root.

        tokens:  page_size ids for each of `pages`
        Returns the node that now ends with them; None, and nothing changed, if other pages of these
        tokens are cached already.
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
        """Adopt the pages that follow `node` whose tokens are not cached yet.

        Arguments as in `extend`. Returns the adopted pages; the others stay the caller's.
        """
        key = array("q", tokens)
        node, position = self._descend(self._rooted(node), key)
        adopted = list(pages[position // self.page_size :])
        if adopted:
            self._add_leaf(node, key[position:], adopted)
        return adopted

    def evict(self, count: int) -> list[int]:
        """Evict up to `count` pages, least used first; returns them."""
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
        """Evict every page that is not locked; returns them."""
        if self._listener is None or self.num_locked_pages:
            return self.evict(self.num_pages)
        listener, self._listener = self._listener, None
        freed = self.evict(self.num_pages)
        self._listener = listener
        listener.cleared()
        return freed

    def drop(self, namespace: Namespace) -> list[int]:
        """Remove all pages of a namespace, none of which is locked; returns them."""
        root = self._roots.get(namespace)
        if root is None:
            return []
        if root.num_locks:
            raise InvariantViolated("a namespace was dropped while its pages were locked")
        del self._roots[namespace]
        freed: list[int] = []
        stack = [*root.children.values()]
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            if self._listener is not None:
                self._listener.removed(node, 0)
            freed += node.pages
            node.parent, node.children = None, {}  # its entry on the eviction heap is stale
        self.num_pages -= len(freed)
        return freed

    def listen(self, listener: Listener) -> None:
        """Report changes from now on."""
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
                raise InvariantViolated("a page is in the prefix cache twice, or a node is empty")
            if len(node.tokens) != len(node.pages) * self.page_size:
                raise InvariantViolated("a node's tokens and pages disagree")
            if parent is None or parent.children.get(self._first_page(node.tokens, 0)) is not node:
                raise InvariantViolated("a node is not its parent's child by its tokens")
            if parent.num_locks < node.num_locks:
                raise InvariantViolated("a node is locked more often than its parent")
            if parent.last_used < node.last_used or len(node.hashes) > len(pages) * HASH_BYTES:
                raise InvariantViolated("a node was used after its parent, or has too many hashes")
            seen |= pages
            locked += len(node.pages) if node.num_locks else 0
        if len(seen) != self.num_pages or locked != self.num_locked_pages:
            raise InvariantViolated("the prefix cache's page counts are wrong")

    # -- inside ------------------------------------------------------------------------------

    def _rooted(self, node: RadixNode) -> RadixNode:
        """Return `node`; for a root, the tree's root of its namespace, which `node` may become.

        Namespaces contain callers' salts: roots without pages must not accumulate.
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
        """Follow `key` in whole pages; returns the last node and its end in `key`."""
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

        upper [0, cut)  replaces the node below its parent, with the same locks
        node  [cut, n)  becomes its child; locks on `node` still cover the whole path
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
        """Drop a root without children and locks."""
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
        """Push a leaf that may be evicted on the heap; stale entries are skipped when popped."""
        if self._is_evictable(node) and not node.is_offered:
            node.is_offered = True
            heapq.heappush(self._leaves, (self._rank(node), id(node), node))

    def _rank(self, node: RadixNode) -> Rank:
        """Return the sort key of eviction, smallest first."""
        return (node.is_kept, node.num_hits if self._by_hits else 0, node.last_used)
