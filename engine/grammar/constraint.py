"""What an output can be held to, before anything has been compiled."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class ConstraintError(ValueError):
    """A constraint that cannot be held to; the message is for the caller.

    limit:       name of the limit that it is over, if it is over one
    is_passing:  whether the same constraint may well be taken another time
    """

    def __init__(self, message: str, *, limit: str | None = None, is_passing: bool = False) -> None:
        super().__init__(message)
        self.limit = limit
        self.is_passing = is_passing


class ConstraintKind(StrEnum):
    """How a constraint is written; the value is its name in messages."""

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
