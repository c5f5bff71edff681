"""Sources of a key's value, in order of precedence.

    --set engine.page_size=32             command line
    REMORA_ENGINE__PAGE_SIZE=32           environment
    args: {engine: {page_size: 32}}       file
    args: {profile: gpu}                  profile (`profiles.py`)

Values of the first two are parsed as YAML. Variables with two underscores set keys, for `remora
serve` and `remora config` only: with Ray's `serve run`, replicas may start in another environment.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from remora.configs.errors import ConfigError
from remora.configs.schema import ServeConfig
from remora.configs.validation_messages import nearest, shown

_PREFIX = "REMORA_"


@dataclass(frozen=True, slots=True, kw_only=True)
class Override:
    """A value from the command line or the environment.

    source:  for messages: `--set engine.page_size` or REMORA_ENGINE__PAGE_SIZE
    """

    section: str
    key: str
    value: Any
    source: str


def of_environment(environ: Mapping[str, str]) -> list[Override]:
    """Return the overrides in variables such as REMORA_ENGINE__PAGE_SIZE. Raises ConfigError."""
    return [
        _override(name.removeprefix(_PREFIX).lower().replace("__", ".", 1), text, name)
        for name, text in sorted(environ.items())
        if name.startswith(_PREFIX) and "__" in name.removeprefix(_PREFIX).strip("_")
    ]


def of_options(options: Sequence[str]) -> list[Override]:
    """Return the overrides in `--set section.key=value` options. Raises ConfigError."""
    found = []
    for option in options:
        name, equals, text = option.partition("=")
        if not equals:
            raise ConfigError(
                f"--set {option}: expected section.key=value, such as engine.page_size=32"
            )
        found.append(_override(name.strip(), text, f"--set {name.strip()}"))
    return found


def over(args: Mapping[str, Any], overrides: Sequence[Override]) -> dict[str, Any]:
    """Return `args` with the overrides applied; later ones win."""
    merged = dict(args)
    for one in overrides:
        merged = over_sections(merged, {one.section: {one.key: one.value}})
    return merged


def over_sections(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sections of `below` with the keys of `above` applied."""
    merged = dict(below)
    for section, values in above.items():
        base = merged.get(section)
        both = isinstance(values, Mapping) and isinstance(base, Mapping)
        merged[section] = {**base, **values} if both else values  # type: ignore[dict-item]
    return merged


def _override(dotted: str, text: str, source: str) -> Override:
    section, dot, key = dotted.partition(".")
    if not dot or section not in ServeConfig.model_fields:
        sections = list(ServeConfig.model_fields)
        near = nearest(section, sections)
        hint = f"did you mean {near}?" if near else f"the sections are {', '.join(sections)}"
        wrong = f"no section {section}; {hint}" if dot else "expected section.key=value"
        raise ConfigError(f"{source} = {shown(text)}: {wrong}")
    try:
        value = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        problem = error.problem if isinstance(error, yaml.MarkedYAMLError) else None
        why = problem or type(error).__name__
        raise ConfigError(
            f"{source} = {shown(text)}: not valid YAML: {why}; put it in quotes"
        ) from None
    return Override(section=section, key=key, value=value, source=source)
