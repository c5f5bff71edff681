"""Convert settings to another server's parameters, and report what is lost.

Losses are exact: the parameters are translated back, and the settings compared.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from remora.configs.dialects.command_line import write_command_line
from remora.configs.dialects.dialect import Dialect
from remora.configs.dialects.ray_serve_llm.files import serve_file
from remora.configs.dialects.rules import Settings
from remora.configs.dialects.translate import translate
from remora.configs.dialects.values import WrongValue, coerce


@dataclass(frozen=True, slots=True, kw_only=True)
class Converted:
    """Settings as another server's parameters.

    values:  catalogue name -> value
    lost:    key -> (value, value after the conversion), for settings that are not preserved
    """

    values: Mapping[str, Any]
    lost: Mapping[str, tuple[Any, Any]]


def convert(dialect: Dialect, settings: Settings) -> Converted:
    """Convert `settings`, by dotted key including http.host and http.port, to a dialect."""
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
    """Return nested args as dotted key -> value."""
    return {
        f"{section}.{key}": value
        for section, values in args.items()
        if isinstance(values, Mapping)
        for key, value in values.items()
    }


def written(dialect: Dialect, values: Mapping[str, Any]) -> str:
    """Return `values` in the server's format: a command line, JSON, or a Serve config file.

    A command line leaves out switches that are off and that it can only turn on.
    """
    if dialect.system == "ray_serve_llm":
        return yaml.safe_dump(serve_file(values), sort_keys=False).rstrip()
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
