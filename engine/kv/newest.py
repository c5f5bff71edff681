"""Hashes of the pages in the prefix cache, the most recently used first.

What a replica tells the routers of its cache. Hashes are made when they are first asked for and
kept with the nodes, so a report costs one hash per new page and a walk over the nodes reported.
"""

from __future__ import annotations

import heapq

from remora.engine.kv.hashes import HASH_BYTES, chain, root_hash
from remora.engine.kv.radix import RadixCache, RadixNode
from remora.engine.types import Namespace


def newest_hashes(cache: RadixCache, limit: int) -> bytes:
    """Return HASH_BYTES for each of up to `limit` pages.

    A node is used no later than its parent, so a page comes after those before it in its prefix:
    whatever the limit cuts off, the rest is found from its beginning.
    """
    hashes: list[bytes] = []
    room = limit * HASH_BYTES
    heap = [(-root.last_used, id(root), root, b"") for root in cache.roots()]
    heapq.heapify(heap)
    while heap and room > 0:
        _, _, node, before = heapq.heappop(heap)
        own = _hashes_of(node, before, cache.page_size)
        hashes.append(own[:room])
        room -= len(own)
        last = own[-HASH_BYTES:] or root_hash(node.namespace or Namespace())
        for child in node.children.values():
            heapq.heappush(heap, (-child.last_used, id(child), child, last))
    return b"".join(hashes)


def _hashes_of(node: RadixNode, before: bytes, page_size: int) -> bytes:
    """Return the hashes of a node's pages; `before` is that of the page above them."""
    done = len(node.hashes) // HASH_BYTES
    if done < len(node.pages):
        tokens = node.tokens[done * page_size :]
        node.hashes += chain(node.hashes[-HASH_BYTES:] or before, tokens, page_size)
    return node.hashes
