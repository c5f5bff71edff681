"""Report the support for each parameter, and the test that observes its effect.

Generated from the dialects' rules.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from remora.configs.dialects.all import DIALECTS
from remora.configs.dialects.catalogue import Parameter, System
from remora.configs.dialects.dialect import Dialect
from remora.configs.dialects.rules import Means, NoEffect, Refusal, Refused, Rule, Sets
from remora.configs.dialects.translate import State

_OBSERVED = Path(__file__).parents[1] / "observed.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One parameter.

    canonical:  its capability
    accepts:    values that are accepted, in words
    reason:     keys that it sets, the difference, or why it has no effect
    test:       id of the test that observes its effect, or None
    """

    system: System
    name: str
    canonical: str
    state: State
    accepts: str
    reason: str
    test: str | None


@cache
def observed() -> Mapping[str, str]:
    """Return key -> test that observes it, from the tests' `observes` marks."""
    found: dict[str, str] = json.loads(_OBSERVED.read_text(encoding="utf-8"))
    return found


def coverage(systems: Sequence[str] = ()) -> list[Row]:
    """Return a row for each parameter of `systems`, default all, without additional ones."""
    return [
        _row(dialect, parameter)
        for dialect in DIALECTS.values()
        if not systems or dialect.system in systems
        for parameter in dialect.parameters.values()
        if not parameter.additional
    ]


def counts_table(rows: Sequence[Row]) -> str:
    """Return the counts as a Markdown table, with a row per system and a total."""
    found: dict[str, Counter[State]] = {}
    for row in rows:
        found.setdefault(DIALECTS[row.system].title, Counter())[row.state] += 1
    total = Counter(row.state for row in rows)
    states = list(State)
    lines = [
        "| | " + " | ".join(state.value for state in states) + " | all |",
        "|---|" + "---:|" * (len(states) + 1),
    ]
    for name, count in (*found.items(), ("all", total)):
        cells = " | ".join(str(count[state]) for state in states)
        lines.append(f"| {name} | {cells} | {count.total()} |")
    return "\n".join(lines)


def parameters_page() -> str:
    """Return `docs/parameters.md`: a table for each system."""
    rows = coverage()
    parts = [_INTRODUCTION, counts_table(rows), ""]
    for dialect in DIALECTS.values():
        parts.append(f"## {dialect.name}\n")
        parts.append("| parameter | values | here | |\n|---|---|---|---|")
        for row in rows:
            if row.system == dialect.system:
                reason = row.reason.replace("|", "\\|")
                accepts = row.accepts.replace("<", "&lt;")
                parts.append(f"| `{row.name}` | {accepts} | {row.state} | {reason} |")
        parts.append("")
    return "\n".join(parts)


_INTRODUCTION = """# Parameters of other servers

<!-- Written by `remora config coverage --format markdown`; a test compares. -->

remora accepts the configuration of SGLang, LightLLM, RTP-LLM, vLLM and Ray Serve LLM and the
backend server's JSON. Each parameter is exact (same meaning), approximate (the difference is
stated), without effect here, or refused with the reason; none is silently ignored. Of a refused
parameter, the values that turn the feature off are accepted, and the other server's default.
`engine_kwargs` of Ray Serve LLM are vLLM's arguments. For usage see [dialects.md](dialects.md) and
[migrating.md](migrating.md).
"""


def _row(dialect: Dialect, parameter: Parameter) -> Row:
    rule = dialect.rule(parameter)
    state = _state(rule)
    takes_effect = state in (State.EXACT, State.APPROXIMATE)
    return Row(
        system=dialect.system,
        name=parameter.name,
        canonical=parameter.capability,
        state=state,
        accepts=_accepts(dialect, parameter, rule),
        reason=_reason(rule),
        test=_test(dialect, parameter, rule) if takes_effect else None,
    )


def _state(rule: Rule) -> State:
    if isinstance(rule, Refused):
        return State.REFUSED
    if not rule.keys and not rule.how:
        return State.NO_EFFECT
    differs = rule.how or (isinstance(rule, Sets) and rule.hows)
    return State.APPROXIMATE if differs else State.EXACT


_KINDS = {
    "bool": "true, false",
    "int": "whole number",
    "count": "whole number, also as 8k or 8K",
    "float": "number",
    "str": "text",
    "path": "path",
    "json": "JSON",
    "any": "text or JSON",
}


def _accepts(dialect: Dialect, parameter: Parameter, rule: Rule) -> str:
    """Return the accepted choices, else the kind of value; `-` = none."""
    kind, choices = parameter.type, parameter.choices
    is_list = kind.startswith("list[")
    if isinstance(rule, Refused) and choices is None:
        choices = (False,) if kind == "bool" else rule.off
    elif isinstance(rule, Sets) and rule.strict and kind != "bool":
        choices = choices or tuple(rule.table)
    elif isinstance(rule, NoEffect) and rule.only:
        choices = choices or rule.only
    if choices is None:
        return ("several: " if is_list else "") + _KINDS[kind[5:-1] if is_list else kind]
    paths = {other.name: "/path" for other in dialect.parameters.values() if other.type == "path"}
    named = [
        _word(choice)
        for choice in choices
        if choice not in (None, "")
        and any(_reads(rule, [choice] if is_list else choice, given) for given in ({}, paths))
    ]
    return ", ".join(named) or "-"


def _reads(rule: Rule, choice: Any, given: Mapping[str, Any]) -> bool:
    if isinstance(choice, str):
        choice = choice.replace("<group_size>", "32")
    try:
        rule.read(choice, given)
    except Refusal:
        return False
    return True


def _word(choice: Any) -> str:
    return str(choice).lower() if isinstance(choice, bool) else str(choice)


def _reason(rule: Rule) -> str:
    if isinstance(rule, NoEffect | Refused):
        return rule.why
    why = rule.why if isinstance(rule, Means) else ""
    keys = ", ".join(f"`{key}`" for key in rule.keys)
    single = [*_by_value(rule.hows), *_by_value(rule.refuse)] if isinstance(rule, Sets) else []
    return "; ".join(part for part in (keys, rule.how, why, *single) if part)


def _by_value(texts: Mapping[Any, str]) -> list[str]:
    """Return one text per note, with all values that it applies to."""
    values: dict[str, list[str]] = {}
    for value, text in texts.items():
        values.setdefault(text, []).append(str(value))
    return [f"{', '.join(names)}: {text}" for text, names in values.items()]


def _test(dialect: Dialect, parameter: Parameter, rule: Rule) -> str | None:
    names = (f"{dialect.system}:{parameter.name}", *rule.keys)
    return next((observed()[name] for name in names if name in observed()), None)
