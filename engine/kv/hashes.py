"""Chained hashes of full pages, equal in every process.

A page's hash covers its tokens, all tokens before it and the namespace, so equal hashes mean equal
prefixes. Routers compare a prompt's hashes with replicas' reports; KV is never shared
by hash, so a collision costs a poor routing decision only. Knows tokens and namespaces, no pages.
Hashes are comparable between machines of one byte order.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

from remora.engine.types import Namespace

HASH_BYTES = 8
_TOKEN_BYTES = 8


def page_hashes(namespace: Namespace, token_ids: Sequence[int], page_size: int) -> bytes:
    """Return HASH_BYTES bytes for each full page of the tokens, in order."""
    return chain(root_hash(namespace), token_ids, page_size)


def root_hash(namespace: Namespace) -> bytes:
    """Return the hash that the first page of a namespace is chained to."""
    name = f"{namespace.lora_id}:{namespace.salt}"
    if namespace.embeddings:
        name = f"{namespace.embeddings}/{name}"  # no other name has a slash before its colon
    return blake2b(name.encode(errors="surrogatepass"), digest_size=HASH_BYTES).digest()


def chain(before: bytes, token_ids: Sequence[int], page_size: int) -> bytes:
    """Return the hashes of the full pages that follow the page whose hash is `before`."""
    data = array("q", token_ids).tobytes()
    width = page_size * _TOKEN_BYTES
    hashes = []
    for start in range(0, len(data) - width + 1, width):
        before = blake2b(before + data[start : start + width], digest_size=HASH_BYTES).digest()
        hashes.append(before)
    return b"".join(hashes)
