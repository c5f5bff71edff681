"""Merges one adapter into the weights while they load, so that it costs nothing per step.

The merged weights are a WeightSource over the checkpoint: a rank reads its shard, and quantisation
follows, as for any weights. Sums are computed in float32 and rounded once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from torch import Tensor

from remora.configs.errors import ConfigError, InvalidAdapter
from remora.engine.protocols import (
    QuantisedSource,
    QuantisedTensor,
    Renaming,
    WeightEdit,
    WeightSource,
    quantised_tensors,
)
from remora.kernels.quantised.weight_kinds import WeightKind
from remora.lora.adapter import Adapter, read_adapter
from remora.lora.files import resolved

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


class MergedWeights:
    """WeightSource of a base model with an adapter merged in."""

    def __init__(self, base: WeightSource, adapter: Adapter) -> None:
        self.label = f"{base.label} with {adapter.label}"
        self._base = base
        self._adapter = adapter

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Return the base's shapes."""
        return self._base.shapes()

    def read(self, names: Collection[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield each tensor, updated in float32 where the adapter changes it."""
        for name, tensor in self._base.read(names):
            kept = self._adapter.replaced.get(name, tensor)
            update = self._adapter.updates.get(name)
            yield name, kept if update is None else update.updated(kept)

    def quantised(self) -> Mapping[str, QuantisedTensor]:
        """Return the base's quantised weights that the adapter leaves as they are."""
        changed = self._adapter.updates.keys() | self._adapter.replaced.keys()
        stored = quantised_tensors(self._base)
        return {name: stored[name] for name in stored.keys() - changed}

    def kinds(self, names: Collection[str]) -> Iterator[tuple[str, WeightKind]]:
        """Yield the base's weights."""
        assert isinstance(self._base, QuantisedSource)
        return self._base.kinds(self.quantised().keys() & set(names))


def merging(folder: Path) -> WeightEdit:
    """Return a WeightEdit that merges the adapter in `folder`.

    It raises ConfigError if the adapter is broken or does not fit the model.
    """

    def merge(base: WeightSource, renaming: Renaming) -> WeightSource:
        shapes = base.shapes()
        try:
            adapter = read_adapter(resolved(folder), shapes, renaming)
        except InvalidAdapter as error:
            raise ConfigError(str(error)) from error
        if _HEAD not in shapes and _EMBEDDING in adapter.updates.keys() | adapter.replaced.keys():
            raise ConfigError(
                f"the adapter {folder} changes the embedding, which this model shares with the "
                "head (tie_word_embeddings): merging would change both"
            )
        return MergedWeights(base, adapter)

    return merge
