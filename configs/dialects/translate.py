"""Translate another server's parameters to settings, with one report for each parameter.

Knows rules and catalogues, and nothing of command lines or files: the caller's `place` function
locates a parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from remora.configs.dialects.catalogue import Parameter, plain, spellings
from remora.configs.dialects.dialect import Dialect
from remora.configs.dialects.rules import Harmless, Refusal
from remora.configs.dialects.values import WrongValue, coerce
from remora.configs.errors import ConfigError
from remora.configs.validation_messages import nearest, shown

HTTP = "http"  # pseudo-section for Serve's http_options

_SECRET = frozenset({"http.api_key", "http.admin_api_key", "model.hub_token"})


class State(StrEnum):
    """Support for a parameter."""

    EXACT = "exact"
    APPROXIMATE = "approximate"
    NO_EFFECT = "no effect here"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterReport:
    """The result for one written parameter.

    name:      as written
    settings:  keys that it sets
    text:      the difference, or why it has no effect
    """

    name: str
    value: Any
    state: State
    settings: Mapping[str, Any]
    text: str = ""

    def __str__(self) -> str:
        keys = ", ".join(f"{key} = {shown(value)}" for key, value in self.settings.items())
        said = "; ".join(part for part in (keys, self.text) if part)
        return f"{self.name} = {shown(self.value)}: {self.state}{': ' if said else ''}{said}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Translation:
    """Translated parameters.

    args:     sections and keys of remora
    http:     host and port for Serve's http_options
    lines:    one report for each parameter
    origins:  dotted key -> name, as written, of the parameter that set it
    """

    args: dict[str, Any]
    http: dict[str, Any]
    lines: tuple[ParameterReport, ...]
    origins: Mapping[str, str]


def translate(
    dialect: Dialect,
    given: Mapping[str, Any],
    place: Callable[[str], str] = lambda _name: "",
) -> Translation:
    """Translate `given`. Raises ConfigError with one line per fault.

    given:  name, in any spelling -> value; strings are converted to the parameter's type
    place:  name in `given` -> "file:line:column: "
    """
    faults: list[str] = []
    values, names = _read_values(dialect, given, place, faults)
    settings: dict[str, Any] = {}
    origins: dict[str, str] = {}
    lines = []
    for name, value in values.items():
        written = names[name]
        parameter = dialect.parameters[name]
        try:
            line = _line(dialect, parameter, written, value, values)
        except Refusal as refusal:
            seen = "***" if parameter.capability in _SECRET else shown(value)
            faults.append(f"{place(written)}{written} = {seen}: refused: {refusal}")
            continue
        lines.append(line)
        for key, meant in line.settings.items():
            if key in settings and settings[key] != meant:
                faults.append(
                    f"{place(written)}{written} = {shown(value)}: means {key} = {shown(meant)}, "
                    f"and {origins[key]} means {shown(settings[key])}; keep one of the two"
                )
            settings.setdefault(key, meant)
            origins.setdefault(key, written)
    if faults:
        raise ConfigError("\n".join(faults))
    nested = _nested({**dialect.defaults, **settings})
    http = nested.pop(HTTP, {})
    return Translation(args=nested, http=http, lines=tuple(lines), origins=origins)


def _read_values(
    dialect: Dialect,
    given: Mapping[str, Any],
    place: Callable[[str], str],
    faults: list[str],
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return catalogue name -> value, without None, and catalogue name -> name as written."""
    values: dict[str, Any] = {}
    names: dict[str, str] = {}
    for written, raw in given.items():
        parameter = spellings(dialect.system).get(plain(str(written)))
        if parameter is None:
            faults.append(f"{place(written)}{_unknown(dialect, str(written), raw)}")
            continue
        name = parameter.name
        if name in names:
            faults.append(
                f"{place(written)}{written} = {shown(raw)}: the same as {names[name]}, which is "
                "given too; keep one of the two"
            )
            continue
        names[name] = written
        try:
            value = coerce(parameter, raw)
        except WrongValue as error:
            faults.append(f"{place(written)}{written} = {shown(raw)}: {error}")
            continue
        if value is not None:
            values[name] = value
    return values, names


def _line(
    dialect: Dialect,
    parameter: Parameter,
    written: str,
    value: Any,
    values: Mapping[str, Any],
) -> ParameterReport:
    """Apply the rule of a parameter. Raises Refusal."""
    try:
        meant = dialect.rule(parameter).read(value, values)
    except Refusal:
        if value != parameter.default or isinstance(value, bool) != isinstance(
            parameter.default, bool
        ):
            raise
        meant = Harmless(f"this is {dialect.title}'s default; it has no effect here")
    if isinstance(meant, Harmless):
        state, settings, text = State.NO_EFFECT, {}, meant.why
    else:
        exact = State.EXACT if meant.settings else State.NO_EFFECT
        state = State.APPROXIMATE if meant.how else exact
        settings, text = dict(meant.settings), meant.how
    return ParameterReport(name=written, value=value, state=state, settings=settings, text=text)


def _unknown(dialect: Dialect, written: str, value: Any) -> str:
    known = {
        name.replace("-", "_"): parameter.name
        for name, parameter in spellings(dialect.system).items()
    }
    near = nearest(plain(written), list(known))
    hint = (
        f"did you mean {known[near]}?"
        if near is not None
        else f"`remora config coverage --system {dialect.system}` lists what is known"
    )
    return f"{written} = {shown(value)}: {dialect.name} has no such parameter; {hint}"


def _nested(settings: Mapping[str, Any]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for dotted, value in settings.items():
        section, key = dotted.split(".", 1)
        nested.setdefault(section, {})[key] = value
    return nested
