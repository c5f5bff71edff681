"""Events of the prefix cache: pages stored and removed, by their hashes.

A page's hash is that of hashes.py, as a number: it covers all tokens up to the page's end, the
adapter and the salt. A subscriber of all events knows what is cached; the message number shows
whether one was missed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from remora.engine.kv.hashes import HASH_BYTES
from remora.engine.kv.radix import RadixNode


@dataclass(frozen=True, slots=True, kw_only=True)
class PagesStored:
    """Pages that are cached from now on.

    parent:   hash of the page before them; None = they begin a prompt
    tokens:   page_size ids for each of `hashes`
    lora_id:  of the adapter; 0 = the base model
    """

    hashes: tuple[int, ...]
    parent: int | None
    tokens: tuple[int, ...]
    page_size: int
    lora_id: int


@dataclass(frozen=True, slots=True)
class PagesRemoved:
    """Pages that are no longer cached."""

    hashes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class AllCleared:
    """No page is cached any more."""


KVEvent = PagesStored | PagesRemoved | AllCleared


class CacheEvents:
    """Converts changes of the tree to events; a Listener for `RadixCache.listen`.

    Pages of prompts given as embeddings have no token ids, and are left out.

    emit:  receives each event
    """

    def __init__(self, emit: Callable[[KVEvent], object], page_size: int) -> None:
        self._emit = emit
        self._page_size = page_size

    def stored(self, node: RadixNode, first: int) -> None:
        """Emit the pages of a node from its `first` on as stored."""
        if node.root_namespace.embeddings:
            return
        hashes, parent = node.page_hashes(self._page_size), node.parent
        before = hashes[(first - 1) * HASH_BYTES : first * HASH_BYTES] if first else b""
        if not first and parent is not None:
            before = parent.page_hashes(self._page_size)[-HASH_BYTES:]
        self._emit(
            PagesStored(
                hashes=_numbers(hashes[first * HASH_BYTES :]),
                parent=int.from_bytes(before) if before else None,
                tokens=tuple(node.tokens[first * self._page_size :]),
                page_size=self._page_size,
                lora_id=node.root_namespace.lora_id,
            )
        )

    def removed(self, node: RadixNode, first: int) -> None:
        """Emit the pages of a node from its `first` on as removed."""
        if node.root_namespace.embeddings:
            return
        hashes = node.page_hashes(self._page_size)
        self._emit(PagesRemoved(_numbers(hashes[first * HASH_BYTES :])))

    def cleared(self) -> None:
        """Emit that no page is cached."""
        self._emit(AllCleared())


def _numbers(hashes: bytes) -> tuple[int, ...]:
    return tuple(
        int.from_bytes(hashes[at : at + HASH_BYTES]) for at in range(0, len(hashes), HASH_BYTES)
    )
