"""Events of the prefix cache: which pages it has taken in and given up, by their hashes.

A page's hash is the one of hashes.py, as a number: it stands for all tokens up to the page's end,
and for adapter and salt. Whoever hears all events knows what is cached; one that is missed is seen
by its number in the stream.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from remora.engine.kv.hashes import HASH_BYTES, chain, root_hash
from remora.engine.kv.radix import RadixNode
from remora.engine.types import Namespace


@dataclass(frozen=True, slots=True, kw_only=True)
class PagesStored:
    """Pages that can be found from now on.

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
    """Pages that are gone."""

    hashes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class AllCleared:
    """Nothing is cached any more."""


KVEvent = PagesStored | PagesRemoved | AllCleared


class CacheEvents:
    """Makes events of what happens to the tree; called by it (`RadixCache.listen`).

    emit:  takes each event, at once
    """

    def __init__(self, emit: Callable[[KVEvent], object], page_size: int) -> None:
        self._emit = emit
        self._page_size = page_size

    def stored(self, node: RadixNode, first: int) -> None:
        """A node has pages from its `first` on that are new."""
        before, namespace = self._above(node)
        hashes = self._hashes(node)
        if first:
            before = hashes[(first - 1) * HASH_BYTES : first * HASH_BYTES]
        self._emit(
            PagesStored(
                hashes=_numbers(hashes[first * HASH_BYTES :]),
                parent=int.from_bytes(before) if before else None,
                tokens=tuple(node.tokens[first * self._page_size :]),
                page_size=self._page_size,
                lora_id=namespace.lora_id,
            )
        )

    def removed(self, node: RadixNode, first: int) -> None:
        """A node is about to lose its pages from its `first` on."""
        self._emit(PagesRemoved(_numbers(self._hashes(node)[first * HASH_BYTES :])))

    def cleared(self) -> None:
        """The tree has become empty."""
        self._emit(AllCleared())

    def _above(self, node: RadixNode) -> tuple[bytes, Namespace]:
        """Return the hash of the page before a node, if there is one, and its namespace."""
        parent = node.parent
        before = b""
        if parent is not None and parent.parent is not None:
            before = self._hashes(parent)[-HASH_BYTES:]
        while parent is not None and parent.parent is not None:
            parent = parent.parent
        return before, (parent and parent.namespace) or Namespace()

    def _hashes(self, node: RadixNode) -> bytes:
        """Return the hashes of all pages of a node, kept with it."""
        done = len(node.hashes) // HASH_BYTES
        if done < len(node.pages):
            above, namespace = self._above(node)
            before = node.hashes[-HASH_BYTES:] or above or root_hash(namespace)
            node.hashes += chain(before, node.tokens[done * self._page_size :], self._page_size)
        return node.hashes


def _numbers(hashes: bytes) -> tuple[int, ...]:
    return tuple(
        int.from_bytes(hashes[at : at + HASH_BYTES]) for at in range(0, len(hashes), HASH_BYTES)
    )
