"""The configuration of adapter slots."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class LoRASlotConfig:
    """Memory for adapters that are not merged into the weights.

    num_slots:  most adapters in one step
    max_rank:   largest rank of an adapter
    targets:    modules that adapters may change, by the last part of their names
    """

    num_slots: int
    max_rank: int
    targets: tuple[str, ...]
    eviction: Literal["lru", "fifo"] = "lru"

    def with_remora_names(self, module_words: Mapping[str, tuple[str, ...]]) -> LoRASlotConfig:
        """Return the slots with remora's module names as targets.

        module_words:  checkpoint's name -> remora's names, where they differ
        """
        words = {ours for word in self.targets for ours in module_words.get(word, (word,))}
        return replace(self, targets=tuple(sorted(words)))
