"""From settings of ours to another server's parameters, and what of it is lost.

What is lost is not guessed: the parameters are read back, and the two are compared.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from remora.configs.dialects.command_line import write_command_line
from remora.configs.dialects.dialect import Dialect
from remora.configs.dialects.rules import Settings
from remora.configs.dialects.translate import translate
from remora.configs.dialects.values import WrongValue, coerce


@dataclass(frozen=True, slots=True, kw_only=True)
class Converted:
    """Settings in another server's words.

    values:  by the names of its catalogue
    lost:    settings that it cannot say, or that it says otherwise: (ours, what it means instead)
    """

    values: Mapping[str, Any]
    lost: Mapping[str, tuple[Any, Any]]


def convert(dialect: Dialect, settings: Settings) -> Converted:
    """Say `settings`, by dotted key (http.host and http.port among them), in a dialect."""
    values = {}
    for name, parameter in dialect.parameters.items():
        rule = dialect.rule(parameter)
        if not rule.keys or all(settings.get(key) is None for key in rule.keys):
            continue
        possible = [v for v in rule.write(settings) if _is_possible(dialect, name, v)]
        if possible:
            values[name] = possible[0]
    said = settings_of(translate(dialect, values).args) | {
        f"http.{key}": value for key, value in translate(dialect, values).http.items()
    }
    lost = {
        key: (value, said.get(key))
        for key, value in settings.items()
        if value is not None and said.get(key) != value
    }
    return Converted(values=values, lost=lost)


def settings_of(args: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested args by dotted key."""
    return {
        f"{section}.{key}": value
        for section, values in args.items()
        if isinstance(values, Mapping)
        for key, value in values.items()
    }


def written(dialect: Dialect, values: Mapping[str, Any]) -> str:
    """Return `values` as their server reads them: a command line, or JSON.

    Switches that a command line can only turn on are left out where they are off.
    """
    if dialect.system != "backend":
        return shlex.join(write_command_line(dialect.system, values))
    nested: dict[str, Any] = {}
    for name, value in values.items():
        *parents, last = name.split(".")
        level = nested
        for parent in parents:
            level = level.setdefault(parent, {})
        level[last] = value
    return json.dumps(nested, indent=2)


def _is_possible(dialect: Dialect, name: str, value: Any) -> bool:
    parameter = dialect.parameters[name]
    try:
        return bool(coerce(parameter, value) == value)
    except WrongValue:
        return False
