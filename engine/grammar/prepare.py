"""From a caller's constraint to the source for a compiler process.

Decides what is enforced and what is refused. The result is small, canonical (equal constraints have
equal sources) and within the limits that compilers were tested with. The order of an object's
properties is kept: they are generated in this order.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from remora.configs.sections.grammar import GrammarSection
from remora.engine.grammar import source_limits
from remora.engine.grammar.characters import union
from remora.engine.grammar.constraint import Constraint, ConstraintError, ConstraintKind
from remora.engine.grammar.json_schema.schema import plain_schema
from remora.engine.grammar.json_schema.to_regex import schema_regex
from remora.engine.grammar.regex import Chars, Choice, Node, Repeat, Series, literal, render
from remora.engine.grammar.regex_reader import read_pattern
from remora.engine.grammar.structural_tag import plain_tag

# Unlimited whitespace lets small models write nothing else.
MAX_SPACES = 8
_ONLY_XGRAMMAR = (ConstraintKind.JSON_OBJECT, ConstraintKind.EBNF, ConstraintKind.STRUCTURAL_TAG)


class SourceKind(StrEnum):
    """Kind of a source."""

    SCHEMA = "schema"
    REGEX = "regex"
    EBNF = "ebnf"
    TAG = "tag"


@dataclass(frozen=True, slots=True)
class Source:
    """One source to compile.

    text:  schema, tag: JSON in the plain form; regex: as `regex.render` writes it
    """

    kind: SourceKind
    text: str


def prepare(constraint: Constraint, section: GrammarSection) -> Source:
    """Check a constraint and rewrite it. Raises ConstraintError."""
    try:
        return _source_of(constraint, section)
    except RecursionError:
        raise ConstraintError("a constraint of this size and shape nests too deep") from None


def _source_of(constraint: Constraint, section: GrammarSection) -> Source:
    is_outlines = section.backend == "outlines"
    kind = constraint.kind
    if is_outlines and kind in _ONLY_XGRAMMAR:
        raise ConstraintError(
            f"a constraint of the kind {kind} cannot be enforced by the backend outlines; set"
            " grammar.backend to xgrammar"
        )
    source_limits.check_size(constraint, section)
    value = source_limits.parse_json(constraint, section)
    if kind is ConstraintKind.REGEX:
        return Source(SourceKind.REGEX, render(read_pattern(constraint.source, "the pattern")))
    if kind is ConstraintKind.CHOICE:
        texts = [literal(text) for text in source_limits.check_choices(value)]
        return Source(SourceKind.REGEX, render(Choice(tuple(texts))))
    if kind is ConstraintKind.EBNF:
        source_limits.check_ebnf(constraint.source)
        return Source(SourceKind.EBNF, constraint.source)
    if kind is ConstraintKind.STRUCTURAL_TAG:
        spaces = 1 if section.json_compact else MAX_SPACES
        return Source(SourceKind.TAG, _json(plain_tag(value, max_spaces=spaces)))
    plain = plain_schema({"type": "object"} if kind is ConstraintKind.JSON_OBJECT else value)
    if is_outlines:
        return Source(SourceKind.REGEX, render(schema_regex(plain, _space(section))))
    return Source(SourceKind.SCHEMA, _json(plain))


def _space(section: GrammarSection) -> Node:
    """Return the pattern of whitespace between the parts of a JSON text."""
    if section.json_compact:
        return Series(())
    if section.json_whitespace_pattern is not None:
        return read_pattern(section.json_whitespace_pattern, "grammar.json_whitespace_pattern")
    return Repeat(Chars(union(((9, 10), (13, 13), (32, 32)))), 0, MAX_SPACES)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
