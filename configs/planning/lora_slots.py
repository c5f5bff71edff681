"""Room for adapters beside the weights: how many, of which rank, and what they may change."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class LoRASlotConfig:
    """Room for adapters beside the weights.

    num_slots:  adapters that rows of one step may use
    max_rank:   largest rank of an update
    targets:    last words of the names of the modules that adapters may change
    eviction:   lru or fifo
    """

    num_slots: int
    max_rank: int
    targets: tuple[str, ...]
    eviction: Literal["lru", "fifo"] = "lru"

    def in_our_words(self, module_words: Mapping[str, tuple[str, ...]]) -> LoRASlotConfig:
        """Return the room with targets by our names.

        module_words:  of ours that a checkpoint's words stand for; others are ours already
        """
        words = {ours for word in self.targets for ours in module_words.get(word, (word,))}
        return replace(self, targets=tuple(sorted(words)))
