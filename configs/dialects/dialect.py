"""One dialect: a server's catalogue, and what each of its parameters means here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from remora.configs.dialects.catalogue import Parameter, System, catalogue
from remora.configs.dialects.refusals import rule_of_capability
from remora.configs.dialects.rules import Rule, Settings
from remora.configs.validation_messages import KeyPath

Flat = Mapping[str, tuple[KeyPath, Any]]


def flat(data: Mapping[str, Any]) -> Flat:
    """Return each key of a mapping without depth, where it stands, and its value."""
    return {str(key): ((key,), value) for key, value in data.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """A server whose configuration remora takes.

    rules:     what its parameters mean, by name; `refusals.py` says the rest
    defaults:  what its own defaults mean where a client would see the difference
    flatten:   from its file's data to parameters by name, with the path of each
    """

    system: System
    title: str
    rules: Mapping[str, Rule]
    defaults: Settings = field(default_factory=dict)
    flatten: Callable[[Mapping[str, Any]], Flat] = flat

    def rule(self, parameter: Parameter) -> Rule:
        """Return what a parameter means."""
        own = self.rules.get(parameter.name)
        if own is not None:
            return own
        common = rule_of_capability(parameter.capability)
        if common is None:
            raise KeyError(f"{self.system} {parameter.name}: nothing is said of it")
        return common

    @property
    def parameters(self) -> Mapping[str, Parameter]:
        """All parameters by name."""
        return catalogue(self.system)
