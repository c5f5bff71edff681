"""Where the value of a key comes from: the command line, the environment, the file, a profile.

    --set engine.page_size=32             the command line
    REMORA_ENGINE__PAGE_SIZE=32           the environment
    args: {engine: {page_size: 32}}       the file
    args: {profile: gpu}                  a profile (`profiles.py`)

Each wins over those below it. Values of the first two are read as YAML. Two underscores tell such
variables from others of ours; they count for `remora serve` and `remora config`, not for Ray's own
`serve run`, whose replicas may start in another environment.
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

    source:  how it was written, for messages: `--set engine.page_size`, REMORA_ENGINE__PAGE_SIZE
    """

    section: str
    key: str
    value: Any
    source: str

    @property
    def name(self) -> str:
        """The dotted key."""
        return f"{self.section}.{self.key}"


def of_environment(environ: Mapping[str, str]) -> list[Override]:
    """Return what variables such as REMORA_ENGINE__PAGE_SIZE say. Raises ConfigError."""
    return [
        _override(name.removeprefix(_PREFIX).lower().replace("__", ".", 1), text, name)
        for name, text in sorted(environ.items())
        if name.startswith(_PREFIX) and "__" in name.removeprefix(_PREFIX).strip("_")
    ]


def of_options(options: Sequence[str]) -> list[Override]:
    """Return what `--set section.key=value` options say. Raises ConfigError."""
    found = []
    for option in options:
        name, equals, text = option.partition("=")
        if not equals:
            raise ConfigError(f"--set {option}: expected section.key=value, as engine.page_size=32")
        found.append(_override(name.strip(), text, f"--set {name.strip()}"))
    return found


def over(args: Mapping[str, Any], overrides: Sequence[Override]) -> dict[str, Any]:
    """Return `args`, in our own words, with the overrides in them; later ones win."""
    merged = dict(args)
    for one in overrides:
        below = merged.get(one.section)
        base = dict(below) if isinstance(below, Mapping) else {}
        merged[one.section] = {**base, one.key: one.value}
    return merged


def over_sections(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sections of `below` with the keys of `above` over them."""
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
        hint = f"did you mean {near}?" if near else f"there are {', '.join(sections)}"
        wrong = f"{section} is no section; {hint}" if dot else "expected section.key=value"
        raise ConfigError(f"{source} = {shown(text)}: {wrong}")
    try:
        value = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        problem = error.problem if isinstance(error, yaml.MarkedYAMLError) else None
        why = problem or type(error).__name__
        raise ConfigError(
            f"{source} = {shown(text)}: not readable as YAML: {why}; put it between quotes"
        ) from None
    return Override(section=section, key=key, value=value, source=source)
