"""What a routing policy may know of a request.

Made where the request's body is read (a gateway), passed along with the call, and read by the
router. Knows nothing of bodies, replicas or Ray: it is pickled once per request and imported
wherever a router runs.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

PAGE_HASH_BYTES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteKey:
    """One request, as far as choosing its replica goes. The empty key: by load alone.

    session:      whose conversation it belongs to; None = unknown
    page_hashes:  PAGE_HASH_BYTES for each full page of the prompt, in order, as `engine.kv.hashes`
                  makes them; empty = unknown, or the prompt is shorter than a page
    num_tokens:   tokens of the prompt, or a guess; 0 = unknown
    adapter:      name of the adapter that it asks for, whether or not there is one; None = the base
                  model, or unknown
    avoid:        replicas that have failed this request and must not get it again, by Serve's
                  unique id (`ReplicaID.unique_id`, `get_replica_context().replica_tag`)
    """

    session: str | None = None
    page_hashes: bytes = b""
    num_tokens: int = 0
    adapter: str | None = None
    avoid: frozenset[str] = frozenset()


def pages_of(hashes: bytes) -> tuple[int, ...]:
    """Return hashes as numbers, which sets hold and find faster than bytes."""
    count = len(hashes) // PAGE_HASH_BYTES
    return struct.unpack(f"<{count}Q", hashes[: count * PAGE_HASH_BYTES])
