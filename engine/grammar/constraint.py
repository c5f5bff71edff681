"""Constraints on an output, before they are compiled."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class ConstraintError(ValueError):
    """A constraint that cannot be enforced; the message is for the caller.

    limit:       name of the exceeded limit, if any
    is_passing:  whether the same constraint may succeed later
    """

    def __init__(self, message: str, *, limit: str | None = None, is_passing: bool = False) -> None:
        super().__init__(message)
        self.limit = limit
        self.is_passing = is_passing


class ConstraintKind(StrEnum):
    """Kind of a constraint; the value is its name in messages."""

    JSON_OBJECT = "json_object"
    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    CHOICE = "choice"
    EBNF = "ebnf"
    STRUCTURAL_TAG = "structural_tag"


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraint:
    """One constraint on a whole output.

    source:  json_object: empty; json_schema, structural_tag: JSON text; choice: a JSON list of
             texts; regex: the pattern, which the whole output must match; ebnf: a grammar in
             GBNF's notation, with a rule `root`
    """

    kind: ConstraintKind
    source: str = ""
