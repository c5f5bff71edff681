"""A checkpoint's tensors under our names.

Goes by a model's `TensorRule`s: of a tensor that holds several of ours, each is a view. Knows
nothing of file formats or of what the tensors mean.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from remora.configs.errors import ConfigError
from remora.engine.models.config import TensorRule
from remora.engine.protocols import WeightSource


class RenamedWeights:
    """WeightSource over another one, whose names and shapes are the checkpoint's."""

    def __init__(self, source: WeightSource, rules: Sequence[TensorRule]) -> None:
        self.label = source.label
        self._source = source
        self._rules: dict[str, TensorRule] = {}
        self._names: dict[str, tuple[str, ...]] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        patterns = [(re.compile(rule.pattern), rule) for rule in rules]
        for theirs, shape in source.shapes().items():
            for pattern, rule in patterns:
                match = pattern.fullmatch(theirs)
                if match is not None:
                    self._rules[theirs] = rule
                    self._names[theirs] = tuple(match.expand(name) for name in rule.names)
                    break
            else:
                self._names[theirs] = (theirs,)
            self._shapes.update(self._split_shape(theirs, shape))

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Return the shape of every tensor, by our names."""
        return self._shapes

    def read(self, names: Collection[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of these names; what the checkpoint has in one comes one by one."""
        wanted = {
            theirs for theirs, ours in self._names.items() if any(name in names for name in ours)
        }
        for theirs, whole in self._source.read(wanted):
            for name, part in zip(self._names[theirs], self._split(theirs, whole), strict=True):
                if name in names:
                    yield name, part

    def _split_shape(
        self, theirs: str, shape: tuple[int, ...]
    ) -> Iterator[tuple[str, tuple[int, ...]]]:
        if theirs not in self._rules or self._rules[theirs].split is None:
            yield from ((name, shape) for name in self._names[theirs])
            return
        try:
            parts = self._split(theirs, torch.empty(shape, device="meta"))
        except (RuntimeError, IndexError) as error:
            raise ConfigError(
                f"{theirs} in {self.label} is {list(shape)}, which cannot be divided into "
                f"{', '.join(self._names[theirs])} of the sizes that config.json says"
            ) from error
        for name, part in zip(self._names[theirs], parts, strict=True):
            yield name, tuple(part.shape)

    def _split(self, theirs: str, whole: Tensor) -> tuple[Tensor, ...]:
        rule = self._rules.get(theirs)
        if rule is None or rule.split is None:
            return (whole,) * len(self._names[theirs])
        return rule.split(whole)
