"""Weights of which some tensors are replaced by those of other files."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

from torch import Tensor

from remora.configs.errors import ConfigError
from remora.engine.models.load import TIED_HEAD
from remora.engine.protocols import WeightSource
from remora.engine.weights.loader import MAX_NAMES_SHOWN
from remora.engine.weights.safetensors import SafetensorsWeights


class PatchedWeights:
    """WeightSource over a source and folders of safetensors files that replace its tensors."""

    def __init__(self, base: WeightSource | None, folders: Sequence[str]) -> None:
        """Read the headers; base None = the folders hold all tensors.

        Raises ConfigError for tensors that the base lacks or has in another shape.
        """
        patches = [SafetensorsWeights(Path(folder)) for folder in folders]
        self.label = f"{'given tensors' if base is None else base.label}, updated"
        shapes = {} if base is None else dict(base.shapes())
        self._owners: dict[str, WeightSource] = {}
        if base is not None:
            self._owners = dict.fromkeys(shapes, base)
        for patch in patches:
            if base is not None:
                _check(patch.shapes(), shapes)
            shapes |= patch.shapes()
            self._owners |= dict.fromkeys(patch.shapes(), patch)
        self._shapes = shapes

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Return the shape of every tensor."""
        return self._shapes

    def read(self, names: Collection[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of these names, each from the last source that has it."""
        for owner in {id(owner): owner for owner in self._owners.values()}.values():
            own = {name for name in names if self._owners.get(name) is owner}
            if own:
                yield from owner.read(own)


def live_patches(folders: Sequence[str]) -> tuple[str, ...]:
    """Return the folders that have a tensor which no later one replaces."""
    kept: list[str] = []
    replaced: set[str] = set()
    for folder in reversed(folders):
        names = SafetensorsWeights(Path(folder)).shapes().keys()
        if names - replaced:
            kept.append(folder)
        replaced |= names
    return tuple(reversed(kept))


def _check(given: Mapping[str, tuple[int, ...]], known: Mapping[str, tuple[int, ...]]) -> None:
    """Raise ConfigError for tensors that cannot replace known ones; a tied head may be given."""
    given = {name: shape for name, shape in given.items() if name in known or name not in TIED_HEAD}
    unknown = sorted(name for name in given if name not in known)
    if unknown:
        shown = ", ".join(unknown[:MAX_NAMES_SHOWN])
        raise ConfigError(
            f"the checkpoint has no tensors of these names: {shown}"
            f"{' and more' if len(unknown) > MAX_NAMES_SHOWN else ''}; send tensors under the "
            "names of the served checkpoint's files"
        )
    for name, shape in given.items():
        if known[name] != shape:
            raise ConfigError(f"{name} is {list(shape)}; expected {list(known[name])}")
