"""The part of a request that a routing policy uses.

Made by a gateway or a routing service, which read the body; passed with the call; used by the
router. Does not know bodies, replicas or Ray: it is pickled once per request and imported in every
process with a router.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

PAGE_HASH_BYTES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteKey:
    """The routing properties of one request. The empty key routes by load alone.

    session:      id of its conversation; None = unknown
    page_hashes:  PAGE_HASH_BYTES for each full page of the prompt, in order, as `engine.kv.hashes`
                  makes them; empty = unknown, or the prompt is shorter than a page
    num_tokens:   tokens of the prompt, or a guess; 0 = unknown
    adapter:      adapter name in the request, whether or not it exists; None = the base model, or
                  unknown
    avoid:        replicas that have failed this request, by Serve's unique id
                  (`ReplicaID.unique_id`, `get_replica_context().replica_tag`)
    """

    session: str | None = None
    page_hashes: bytes = b""
    num_tokens: int = 0
    adapter: str | None = None
    avoid: frozenset[str] = frozenset()


def pages_of(hashes: bytes) -> tuple[int, ...]:
    """Return hashes as integers, which are faster in sets than bytes."""
    count = len(hashes) // PAGE_HASH_BYTES
    return struct.unpack(f"<{count}Q", hashes[: count * PAGE_HASH_BYTES])
