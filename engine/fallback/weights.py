"""Converts a checkpoint's tensors to the names and shapes of transformers' current classes.

Checkpoints keep the names of their time; transformers renames, joins and splits tensors on loading,
by rules that it keeps for each model. Those rules are applied here tensor by tensor, so that only
the tensors of one join are in memory. Knows neither files nor ranks.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from remora.configs.errors import ConfigError
from remora.engine.protocols import WeightSource


@dataclass(slots=True)
class _Join:
    """Tensors of a checkpoint that are converted together.

    first:     transformers' name of the join
    rule:      transformers' converter
    patterns:  of the rule, by which each tensor was found
    targets:   shapes of the results
    """

    first: str
    rule: Any
    patterns: dict[str, str] = field(default_factory=dict)
    targets: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def run(self, model: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the converted tensors. Raises transformers' errors."""
        rule = deepcopy(self.rule)
        for name in sorted(self.patterns, key=_natural):
            rule.add_tensor(self.first, name, self.patterns[name], tensors[name])
        made = rule.convert(self.first, model=model, config=model.config)
        return {name: one[0] if isinstance(one, list) else one for name, one in made.items()}


class ConvertedWeights:
    """WeightSource with the names of a model of transformers over a checkpoint's."""

    def __init__(self, source: WeightSource, model: Any) -> None:
        """Read the rules for the model.

        model:  of transformers, on any device; its weights are not read
        """
        self.label = source.label
        self._source = source
        self._model = model
        self._names: dict[str, str] = {}
        self._joins: dict[str, _Join] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._resolve()

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Return the shape of every tensor, without reading any."""
        return self._shapes

    def read(self, names: Collection[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of these names; those of a join after all its tensors are read."""
        wanted = {ours for ours, name in self._names.items() if name in names}
        joins = [join for join in self._joins.values() if not join.targets.keys().isdisjoint(names)]
        of_tensor = {part: join for join in joins for part in join.patterns}
        gathered: dict[str, dict[str, Tensor]] = {join.first: {} for join in joins}
        for ours, tensor in self._source.read(wanted | of_tensor.keys()):
            if ours in wanted:
                yield self._names[ours], tensor
                continue
            join = of_tensor[ours]
            parts = gathered[join.first]
            parts[ours] = tensor
            if len(parts) == len(join.patterns):
                made = join.run(self._model, gathered.pop(join.first))
                yield from ((name, one) for name, one in made.items() if name in names)

    def _resolve(self) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import (
            WeightConverter,
            WeightRenaming,
            rename_source_key,
        )

        rules = get_model_conversion_mapping(self._model)
        renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
        converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
        by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
        known, prefix = self._model.state_dict(), self._model.base_model_prefix
        found = self._source.shapes()
        for ours in sorted(found, key=_natural):
            name, pattern = rename_source_key(ours, renamings, converters, prefix, known)
            if name not in known and ours in known:
                name, pattern = rename_source_key(ours, [], [], prefix, known)
            if pattern is None or name not in known:
                self._names[ours] = name
                continue
            join = self._joins.setdefault(name, _Join(name, by_pattern[pattern]))
            join.patterns[ours] = pattern
        self._prefer_untied(known)
        self._shapes = {name: tuple(found[ours]) for ours, name in self._names.items()}
        for join in self._joins.values():
            join.targets = self._targets(join, found)
            self._shapes |= join.targets
        ignored = [re.compile(one) for one in self._model._keys_to_ignore_on_load_unexpected or ()]
        for name in set(self._shapes) - set(known):
            if any(pattern.search(name) for pattern in ignored):
                del self._shapes[name]

    def _prefer_untied(self, known: Mapping[str, Tensor]) -> None:
        """Let a tensor that is tied to one which is not in the checkpoint stand for it."""
        tied: Mapping[str, str] = self._model.all_tied_weights_keys
        there = set(self._names.values()) | self._joins.keys()
        for ours, name in list(self._names.items()):
            other = tied.get(name)
            if other is not None and other in known and other not in there:
                self._names[ours] = other
                there.add(other)

    def _targets(
        self, join: _Join, found: Mapping[str, tuple[int, ...]]
    ) -> dict[str, tuple[int, ...]]:
        parts = {name: torch.empty(found[name], device="meta") for name in join.patterns}
        try:
            made = join.run(self._model, parts)
        except Exception as error:
            raise ConfigError(
                f"the weights in {self.label} cannot be brought into the form that transformers' "
                f"{type(self._model).__name__} has: {join.first}: {error}. Is a file missing?"
            ) from error
        return {name: tuple(one.shape) for name, one in made.items()}


def _natural(name: str) -> list[tuple[bool, int, str]]:
    """Order numbers in names by their value."""
    return [(word.isdigit(), int(word) if word.isdigit() else 0, word) for word in name.split(".")]
