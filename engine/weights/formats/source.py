"""Reads a quantised checkpoint: each weight as its kind, or dequantised while it is read.

Tensors are read module by module, so a weight exists in both forms only while it is converted.
Knows no format; `registry.py` has them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping

import torch
from torch import Tensor

from remora.configs.errors import ConfigError
from remora.engine.protocols import QuantisedTensor, WeightSource
from remora.engine.weights.formats.registry import format_of
from remora.engine.weights.formats.stored import Inventory, Settings, StoredWeight, matches
from remora.kernels.quantised.weight_kinds import WeightKind

MAX_LABELS = 3


class QuantisedWeights:
    """WeightSource of a quantised checkpoint, with dequantised weights under their usual names.

    settings:  the checkpoint's quantization_config
    dtype:     of dequantised weights
    """

    def __init__(self, source: WeightSource, settings: Settings, dtype: torch.dtype) -> None:
        """Find the quantised weights; reads shapes and small tensors only. Raises ConfigError."""
        self.label = source.label
        self._source, self._dtype = source, dtype
        known, inventory = format_of(settings), Inventory(source)
        known.check(settings)
        self.stored: dict[str, StoredWeight] = {}
        for weight in known.find(settings, inventory):
            if weight.name in self.stored:
                raise ConfigError(f"{weight.name} in {self.label} is stored in two formats.")
            self.stored[weight.name] = weight
        if not self.stored and not any(map(known.unused.fullmatch, source.shapes())):
            raise ConfigError(
                f"config.json has a quantization_config of {known.name}, and {self.label} holds "
                "no tensors of that format. Is the config from another checkpoint?"
            )
        self._check_list(known.kept(settings), known.name)
        self._quantised = {name: weight.as_tensor() for name, weight in self.stored.items()}
        used = {part for weight in self.stored.values() for part in weight.parts.values()}
        self._shapes = {
            name: shape
            for name, shape in source.shapes().items()
            if name not in used and not known.unused.fullmatch(name)
        } | {name: weight.shape for name, weight in self.stored.items()}

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Return the shape of every tensor, dequantised."""
        return self._shapes

    def read(self, names: Collection[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield each of these tensors, dequantised one at a time."""
        wanted = set(names)
        yield from self._source.read((wanted & self._shapes.keys()) - self.stored.keys())
        for name, kind in self.kinds(wanted):
            plain = kind.dequantised(self._dtype)
            yield name, plain.transpose(-1, -2) if self.stored[name].is_transposed else plain

    def quantised(self) -> Mapping[str, QuantisedTensor]:
        """Return the quantised weights."""
        return self._quantised

    def kinds(self, names: Collection[str]) -> Iterator[tuple[str, WeightKind]]:
        """Yield each of these weights as it is stored. Raises ConfigError for damaged ones."""
        return ((name, self.kind(name)) for name in names if name in self.stored)

    def kind(self, name: str) -> WeightKind:
        """Read one quantised weight as it is stored. Raises ConfigError if it is damaged."""
        weight = self.stored[name]
        parts = dict(self._source.read(set(weight.parts.values())))
        try:
            return weight.decode({key: parts[part] for key, part in weight.parts.items()})
        except ValueError as error:
            raise ConfigError(f"{name} in {self.label} cannot be decoded: {error}.") from error

    def description(self) -> str:
        """Return how the weights are stored, in a few words."""
        counts = Counter(weight.label for weight in self.stored.values())
        shown = [f"{number} {label}" for label, number in counts.most_common(MAX_LABELS)]
        others = counts.total() - sum(number for _, number in counts.most_common(MAX_LABELS))
        return "; ".join(shown + ([f"{others} in other ways"] if others else [])) or "no weights"

    def _check_list(self, kept: Iterable[str], name: str) -> None:
        """Raise ConfigError if a module is quantised that the settings list as unquantised."""
        entries = [str(entry) for entry in kept]
        for weight in self.stored.values():
            for entry in entries:
                if matches(entry, weight.module):
                    raise ConfigError(
                        f"{weight.module} in {self.label} is quantised ({weight.label}), and "
                        f"config.json lists {entry!r} among the modules that {name} leaves out. "
                        "Is the config from another checkpoint?"
                    )


def dequantised(source: WeightSource, settings: Settings, dtype: torch.dtype) -> WeightSource:
    """Return a source of dequantised tensors: `source` itself if there are no settings."""
    return QuantisedWeights(source, settings, dtype) if settings else source
