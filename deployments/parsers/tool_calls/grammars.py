"""What holds replies to a request's tools, before anything is compiled.

A forced choice is held to one schema, whatever the model's format. A free choice with strict tools
is held to their schemas from where a call opens. A free choice beside a constraint on the answer
leaves two kinds of replies: calls, in the model's own format and with nothing before them, or an
answer that keeps to the constraint.
"""

from __future__ import annotations

import json
from typing import Any

from remora.deployments.parsers.tool_calls.forced import forced_schema
from remora.deployments.parsers.tool_calls.structural_tags import Tag, one_of_texts
from remora.deployments.parsers.tools import ToolUse
from remora.engine.grammar.constraint import Constraint, ConstraintError, ConstraintKind
from remora.engine.grammar.structural_tag import from_old_form


def forced_calls(use: ToolUse) -> Constraint:
    """Return what holds replies to a forced choice."""
    return Constraint(kind=ConstraintKind.JSON_SCHEMA, source=json.dumps(forced_schema(use)))


def from_tag(tag: Tag) -> Constraint:
    """Return a structural tag as a constraint."""
    return Constraint(kind=ConstraintKind.STRUCTURAL_TAG, source=json.dumps(tag))


def calls_or(calls: Tag, answer: Constraint) -> Constraint:
    """Return what holds replies to calls or, instead, to an answer.

    calls:  the format of a reply that is nothing but calls

    Raises ConstraintError where the answer's source cannot be read. What it says is looked at when
    the whole is compiled.
    """
    elements = [_answer_format(answer), calls]
    return from_tag({"format": {"type": "or", "elements": elements}})


def _answer_format(answer: Constraint) -> Tag:
    """Return a constraint as the format of a structural tag."""
    match answer.kind:
        case ConstraintKind.JSON_OBJECT:
            return {"type": "json_schema", "json_schema": {"type": "object"}}
        case ConstraintKind.JSON_SCHEMA:
            return {"type": "json_schema", "json_schema": _parsed(answer)}
        case ConstraintKind.REGEX:
            return {"type": "regex", "pattern": answer.source}
        case ConstraintKind.CHOICE:
            return one_of_texts(_parsed(answer))
        case ConstraintKind.EBNF:
            return {"type": "grammar", "grammar": answer.source}
        case ConstraintKind.STRUCTURAL_TAG:
            return _tag_format(_parsed(answer))


def _parsed(answer: Constraint) -> Any:
    try:
        return json.loads(answer.source)
    except (ValueError, RecursionError) as error:
        raise ConstraintError(f"it is not JSON: {error}") from None


def _tag_format(tag: Any) -> Tag:
    if not isinstance(tag, dict):
        raise ConstraintError("a structural tag must be an object")
    if "structures" in tag:
        return from_old_form(tag)
    if not isinstance(tag.get("format"), dict):
        raise ConstraintError("a structural tag needs 'format', or 'structures' and 'triggers'")
    found: Tag = tag["format"]
    return found
