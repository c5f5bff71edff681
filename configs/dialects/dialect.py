"""A dialect: another server's parameters, and a rule for each of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from remora.configs.dialects.catalogue import Parameter, System, catalogue, release
from remora.configs.dialects.refusals import rule_of_capability
from remora.configs.dialects.rules import Rule, Settings
from remora.configs.validation_messages import KeyPath

Flat = Mapping[str, tuple[KeyPath, Any]]


def flat(data: Mapping[str, Any]) -> Flat:
    """Return key -> (path, value) of a mapping without nesting."""
    return {str(key): ((key,), value) for key, value in data.items()}


def dotted(
    system: System, data: Mapping[str, Any], path: KeyPath
) -> Iterator[tuple[str, tuple[KeyPath, Any]]]:
    """Yield dotted name, path and value of nested data at `path`.

    Objects without known keys are values. Names do not begin with `path`.
    """
    yield from _below(system, data, path, "")


def _below(
    system: System, data: Mapping[str, Any], path: KeyPath, prefix: str
) -> Iterator[tuple[str, tuple[KeyPath, Any]]]:
    for key, value in data.items():
        name = f"{prefix}{key}"
        has_parts = any(known.startswith(f"{name}.") for known in catalogue(system))
        if isinstance(value, Mapping) and has_parts:
            yield from _below(system, value, (*path, key), f"{name}.")
        else:
            yield name, ((*path, key), value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """A server whose configuration remora takes.

    rules:     by parameter name; `refusals.py` has rules for the others
    defaults:  settings for the server's own defaults where clients would notice a difference
    flatten:   converts the data of its file to name -> (path, value)
    split:     does so for each model of a file that may have several; None = there is one
    """

    system: System
    title: str
    rules: Mapping[str, Rule]
    defaults: Settings = field(default_factory=dict)
    flatten: Callable[[Mapping[str, Any]], Flat] = flat
    split: Callable[[Mapping[str, Any]], list[Flat]] | None = None

    def models(self, data: Mapping[str, Any]) -> list[Flat]:
        """Return name -> (path, value) for each model. Raises ConfigError."""
        return [self.flatten(data)] if self.split is None else self.split(data)

    @property
    def name(self) -> str:
        """The server, with the release that its catalogue describes if it is known."""
        return f"{self.title} {release(self.system)}".rstrip()

    def rule(self, parameter: Parameter) -> Rule:
        """Return the rule of a parameter."""
        own = self.rules.get(parameter.name)
        if own is not None:
            return own
        common = rule_of_capability(parameter.capability)
        if common is None:
            raise KeyError(f"{self.system} {parameter.name} has no rule")
        return common

    @property
    def parameters(self) -> Mapping[str, Parameter]:
        """All parameters by name."""
        return catalogue(self.system)
