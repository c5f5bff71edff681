"""One adapter as a part of the weights: merged while they load, so that it costs nothing later.

It stands between a checkpoint and the model as a source of weights like any other. So everything
that holds for weights holds for merged ones: a rank reads its share, quantisation comes after.
Sums are made in float32 and rounded once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from torch import Tensor

from remora.configs.errors import ConfigError, InvalidAdapter
from remora.engine.protocols import Renaming, WeightEdit, WeightSource
from remora.lora.adapter import Adapter, read_adapter

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


class MergedWeights:
    """WeightSource of a base model with an adapter in it."""

    def __init__(self, base: WeightSource, adapter: Adapter) -> None:
        self.label = f"{base.label} with {adapter.label}"
        self._base = base
        self._adapter = adapter

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Return the shape of every tensor; the base's."""
        return self._base.shapes()

    def read(self, names: Collection[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield each of these tensors, updated in float32 where the adapter changes it."""
        for name, tensor in self._base.read(names):
            kept = self._adapter.replaced.get(name, tensor)
            update = self._adapter.updates.get(name)
            yield name, kept if update is None else update.updated(kept)


def merging(folder: Path) -> WeightEdit:
    """Return what merges the adapter in `folder` into a model's weights as they are opened.

    It raises ConfigError if the adapter is broken or does not fit the model.
    """

    def merge(base: WeightSource, renaming: Renaming) -> WeightSource:
        shapes = base.shapes()
        try:
            adapter = read_adapter(folder, shapes, renaming)
        except InvalidAdapter as error:
            raise ConfigError(str(error)) from error
        if _HEAD not in shapes and _EMBEDDING in adapter.updates.keys() | adapter.replaced.keys():
            raise ConfigError(
                f"the adapter {folder} changes the embedding, which in this model is the head's "
                "weight too (tie_word_embeddings): merged, it would change both"
            )
        return MergedWeights(base, adapter)

    return merge
