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
from remora.configs.dialects.faults import Faults
from remora.configs.dialects.rules import Harmless, Refusal
from remora.configs.dialects.values import WrongValue, coerce
from remora.configs.validation_messages import nearest, shown

HTTP = "http"  # pseudo-section for Serve's http_options

_SECRET = frozenset({"http.api_key", "http.admin_api_key", "model.hub_token"})
_HIDDEN = "***"


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
    lines:    one report for each parameter, left-out ones included
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
    faults: Faults | None = None,
) -> Translation:
    """Translate `given`. Raises ConfigError with one line per fault.

    given:   name, in any spelling -> value; strings are converted to the parameter's type
    place:   name in `given` -> "file:line:column: "
    faults:  gathers the faults instead of raising them; the rest is translated
    """
    found = faults if faults is not None else Faults()
    values, names, dropped = _read_values(dialect, given, place, found)
    lines, refused = _apply(dialect, values, names)
    while refused and found.skips:
        # Others may have been read together with these.
        dropped += [_dropped(dialect, names[name], values[name], why) for name, why in refused]
        values = {name: value for name, value in values.items() if name not in dict(refused)}
        lines, refused = _apply(dialect, values, names)
    for name, why in refused:
        written = names[name]
        is_secret = dialect.parameters[name].capability in _SECRET
        seen = _HIDDEN if is_secret else shown(values[name])
        found.add(f"{place(written)}{written} = {seen}: refused: {why} [{dialect.name}]")
    settings, origins = _merged(lines, place, found)
    if faults is None:
        found.check()
    nested = _nested({**dialect.defaults, **settings})
    http = nested.pop(HTTP, {})
    return Translation(args=nested, http=http, lines=(*lines, *dropped), origins=origins)


def _apply(
    dialect: Dialect, values: Mapping[str, Any], names: Mapping[str, str]
) -> tuple[list[ParameterReport], list[tuple[str, str]]]:
    """Return the reports of parameters, and names and reasons of refused ones."""
    lines, refused = [], []
    for name, value in values.items():
        try:
            lines.append(_line(dialect, dialect.parameters[name], names[name], value, values))
        except Refusal as refusal:
            refused.append((name, str(refusal)))
    return lines, refused


def _merged(
    lines: list[ParameterReport], place: Callable[[str], str], faults: Faults
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the settings of all parameters, and the name of the first one for each key."""
    settings: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for line in lines:
        for key, meant in line.settings.items():
            if key in settings and settings[key] != meant:
                faults.add(
                    f"{place(line.name)}{line.name} = {shown(line.value)}: means {key} = "
                    f"{shown(meant)}, and {origins[key]} means {shown(settings[key])}; keep one "
                    "of the two"
                )
            settings.setdefault(key, meant)
            origins.setdefault(key, line.name)
    return settings, origins


def _read_values(
    dialect: Dialect,
    given: Mapping[str, Any],
    place: Callable[[str], str],
    faults: Faults,
) -> tuple[dict[str, Any], dict[str, str], list[ParameterReport]]:
    """Return values without None and names as written, by catalogue name; and what is dropped."""
    values: dict[str, Any] = {}
    names: dict[str, str] = {}
    dropped = []
    for written, raw in given.items():
        parameter = spellings(dialect.system).get(plain(str(written)))
        if parameter is None:
            why = _unknown(dialect, str(written))
            if faults.skips:
                dropped.append(_dropped(dialect, str(written), raw, why))
            else:
                faults.add(f"{place(written)}{written} = {shown(raw)}: {why}")
            continue
        name = parameter.name
        if name in names:
            faults.add(
                f"{place(written)}{written} = {shown(raw)}: the same as {names[name]}, which is "
                "given too; keep one of the two"
            )
            continue
        names[name] = written
        try:
            value = coerce(parameter, raw)
        except WrongValue as error:
            faults.add(f"{place(written)}{written} = {shown(raw)}: {error} [{dialect.name}]")
            continue
        if value is not None:
            values[name] = value
    return values, names, dropped


def _dropped(dialect: Dialect, written: str, value: Any, why: str) -> ParameterReport:
    parameter = spellings(dialect.system).get(plain(written))
    is_secret = parameter is not None and parameter.capability in _SECRET
    return ParameterReport(
        name=written,
        value=_HIDDEN if is_secret else value,
        state=State.REFUSED,
        settings={},
        text=f"left out: {why}",
    )


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


def _unknown(dialect: Dialect, written: str) -> str:
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
    return f"{dialect.name} has no such parameter; {hint}"


def _nested(settings: Mapping[str, Any]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for dotted, value in settings.items():
        section, key = dotted.split(".", 1)
        nested.setdefault(section, {})[key] = value
    return nested
