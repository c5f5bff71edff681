"""Renames a checkpoint's tensors to the model's names and splits fused ones, by `TensorRule`s.

Splits are views. Knows neither file formats nor the meaning of tensors; the rules of each family
are in `engine/models/families/`.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from remora.configs.errors import ConfigError
from remora.engine.models.config import TensorRule
from remora.engine.protocols import (
    QuantisedSource,
    QuantisedTensor,
    WeightSource,
    quantised_tensors,
)
from remora.kernels.quantised.weight_kinds import WeightKind

_SAME = TensorRule(".*", (r"\g<0>",))
_LAST_WORD = re.compile(r"(\w+)\\\.(?:weight|\(weight\|bias\))$")


class RenamingRules:
    """The `Renaming` of a model: the first matching rule applies; other names stay."""

    def __init__(self, rules: Sequence[TensorRule]) -> None:
        self._rules = [(re.compile(rule.pattern), rule) for rule in rules]

    def names(self, theirs: str) -> tuple[str, ...]:
        """Return the model's tensors that are in a tensor of the checkpoint."""
        return self._find(theirs)[1]

    def bars_updates(self, theirs: str) -> str:
        """Return why updates of a weight cannot be split; empty if they can."""
        return self._find(theirs)[0].bars_updates

    def parts(self, theirs: str, whole: Tensor) -> tuple[Tensor, ...]:
        """Split a tensor of the checkpoint into the tensors of `names`."""
        rule, names = self._find(theirs)
        return _divide(rule, names, whole.t() if rule.is_transposed else whole)

    def rows(self, theirs: str, rows: Tensor) -> tuple[Tensor, ...]:
        """Split rows [outputs, ...] that belong to a weight's outputs among `names`."""
        return _divide(*self._find(theirs), rows)

    def _find(self, theirs: str) -> tuple[TensorRule, tuple[str, ...]]:
        """Return a tensor's rule and the names that it yields."""
        for pattern, rule in self._rules:
            match = pattern.fullmatch(theirs)
            if match is not None:
                return rule, tuple(match.expand(name) for name in rule.names)
        return _SAME, (theirs,)


def _divide(rule: TensorRule, names: Sequence[str], rows: Tensor) -> tuple[Tensor, ...]:
    return (rows,) * len(names) if rule.split is None else rule.split(rows)


def module_words(rules: Sequence[TensorRule]) -> dict[str, tuple[str, ...]]:
    """Map the last part of a checkpoint's module names to that of the model's modules in them."""
    words: dict[str, set[str]] = defaultdict(set)
    for rule in rules:
        last = _LAST_WORD.search(rule.pattern)
        if last is not None:
            words[last[1]] |= {name.split(".")[-2] for name in rule.names}
    return {word: tuple(sorted(ours)) for word, ours in words.items()}


class RenamedWeights:
    """WeightSource with the model's names over one with the checkpoint's."""

    def __init__(self, source: WeightSource, rules: Sequence[TensorRule]) -> None:
        self.label = source.label
        self._source = source
        self._renaming = RenamingRules(rules)
        self._names: dict[str, tuple[str, ...]] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        for theirs, shape in source.shapes().items():
            self._names[theirs] = self._renaming.names(theirs)
            self._shapes.update(self._split_shape(theirs, shape))
        self._theirs = {name: theirs for theirs, ours in self._names.items() for name in ours}
        self._quantised = dict(self._find_quantised())

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Return the shape of every tensor, by the model's names."""
        return self._shapes

    def read(self, names: Collection[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of these names, fused ones split."""
        wanted = {self._theirs[name] for name in names if name in self._theirs}
        for theirs, whole in self._source.read(wanted):
            parts = self._renaming.parts(theirs, whole)
            for name, part in zip(self._names[theirs], parts, strict=True):
                if name in names:
                    yield name, part

    def quantised(self) -> Mapping[str, QuantisedTensor]:
        """Return the quantised weights that are rows of quantised ones in the checkpoint."""
        return self._quantised

    def kinds(self, names: Collection[str]) -> Iterator[tuple[str, WeightKind]]:
        """Yield the weights of these names, fused ones split by rows."""
        wanted = {self._theirs[name] for name in names if name in self._quantised}
        if not isinstance(self._source, QuantisedSource):
            return
        stored = self._source.quantised()
        for theirs, whole in self._source.kinds(wanted):
            rows = self._rows(theirs, stored[theirs])
            for name, part in zip(self._names[theirs], rows, strict=True):
                if name in names:
                    is_whole = torch.equal(part, torch.arange(math.prod(whole.shape[:-1])))
                    yield name, whole if is_whole else whole.select(part)

    def _find_quantised(self) -> Iterator[tuple[str, QuantisedTensor]]:
        """Yield weights with the model's names, as far as they are rows of the checkpoint's."""
        for theirs, stored in quantised_tensors(self._source).items():
            parts = self._rows(theirs, stored)
            for name, rows in zip(self._names[theirs], parts, strict=bool(parts)):
                shape = (len(rows), stored.shape[-1])
                if shape == self._shapes[name]:
                    yield name, QuantisedTensor(label=stored.label, shape=shape)

    def _rows(self, theirs: str, stored: QuantisedTensor) -> tuple[Tensor, ...]:
        """Return the rows [R] of a quantised weight that each part has; () = parts are not rows.

        An index of the rows is split as the weight is.
        """
        *rows, _ = stored.shape
        index = torch.arange(math.prod(rows)).view(*rows, 1)
        try:
            whole = index.transpose(-1, -2) if stored.is_transposed else index
            parts = self._renaming.parts(theirs, whole)
        except RuntimeError:  # it computes with values
            return ()
        if any(part.shape[1:] != (1,) or part.dtype != index.dtype for part in parts):
            return ()
        return tuple(part.flatten() for part in parts)

    def _split_shape(
        self, theirs: str, shape: tuple[int, ...]
    ) -> Iterator[tuple[str, tuple[int, ...]]]:
        try:
            parts = self._renaming.parts(theirs, torch.empty(shape, device="meta"))
        except (RuntimeError, IndexError) as error:
            raise ConfigError(
                f"{theirs} in {self.label} is {list(shape)}, which cannot be divided into "
                f"{', '.join(self._names[theirs])} of the sizes that config.json says"
            ) from error
        for name, part in zip(self._names[theirs], parts, strict=True):
            yield name, tuple(part.shape)
