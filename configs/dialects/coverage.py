"""Report the support for each of the 471 parameters, and the test that observes its effect.

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
from remora.configs.dialects.rules import Means, NoEffect, Refused, Rule, Sets
from remora.configs.dialects.translate import State

_OBSERVED = Path(__file__).parents[1] / "observed.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One parameter.

    canonical:  its capability
    reason:     keys that it sets, the difference, or why it has no effect
    test:       id of the test that observes its effect, or None
    """

    system: System
    name: str
    canonical: str
    state: State
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
        parts.append(f"## {dialect.title}\n")
        parts.append("| parameter | here | |\n|---|---|---|")
        for row in rows:
            if row.system == dialect.system:
                reason = row.reason.replace("|", "\\|")
                parts.append(f"| `{row.name}` | {row.state} | {reason} |")
        parts.append("")
    return "\n".join(parts)


_INTRODUCTION = """# Parameters of other servers

<!-- Written by `remora config coverage --format markdown`; a test compares. -->

remora accepts the configuration of SGLang, LightLLM and RTP-LLM and the backend server's JSON. Each
parameter is exact (same meaning), approximate (the difference is stated), without effect here, or
refused with the reason; none is silently ignored. For usage see [dialects.md](dialects.md).
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
        reason=_reason(rule),
        test=_test(dialect, parameter, rule) if takes_effect else None,
    )


def _state(rule: Rule) -> State:
    if isinstance(rule, Refused):
        return State.REFUSED
    if isinstance(rule, NoEffect) or (isinstance(rule, Means) and not rule.effective):
        return State.NO_EFFECT
    differs = rule.how or (isinstance(rule, Sets) and rule.hows)
    return State.APPROXIMATE if differs else State.EXACT


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
