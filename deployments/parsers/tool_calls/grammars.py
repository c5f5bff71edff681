"""Constraints that a request's tools put on its replies, before compilation.

A forced choice has one schema, whatever the model's format. A free choice with strict tools follows
their schemas from the opening of a call. A free choice with a constrained answer allows two kinds
of replies: calls only, in the model's format, or an answer that follows the constraint.
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
    """Return the constraint of a forced choice."""
    return Constraint(kind=ConstraintKind.JSON_SCHEMA, source=json.dumps(forced_schema(use)))


def from_tag(tag: Tag) -> Constraint:
    """Return a structural tag as a constraint."""
    return Constraint(kind=ConstraintKind.STRUCTURAL_TAG, source=json.dumps(tag))


def calls_or(calls: Tag, answer: Constraint) -> Constraint:
    """Return the constraint of replies that are either calls or an answer.

    calls:  the format of a reply of calls only

    Raises ConstraintError if the answer's source cannot be parsed; its content is checked at
    compilation.
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
        raise ConstraintError(f"the source is not JSON: {error}") from None


def _tag_format(tag: Any) -> Tag:
    if not isinstance(tag, dict):
        raise ConstraintError("a structural tag must be an object")
    if "structures" in tag:
        return from_old_form(tag)
    if not isinstance(tag.get("format"), dict):
        raise ConstraintError("a structural tag needs 'format', or 'structures' and 'triggers'")
    found: Tag = tag["format"]
    return found
