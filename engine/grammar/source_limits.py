"""Checks before anything is compiled: size, nesting, valid JSON.

Limits that the section `grammar` does not name are fixed: compilers were tested up to them.
"""

from __future__ import annotations

import json
import re
from typing import Any

from remora.configs.sections.grammar import GrammarSection
from remora.engine.grammar.constraint import Constraint, ConstraintError, ConstraintKind

DEFAULTS = GrammarSection()
MAX_CHOICES = 1024
MAX_INTEGER_DIGITS = 64
MAX_EBNF_COPIES = 10_000
_JSON_KINDS = (ConstraintKind.JSON_SCHEMA, ConstraintKind.STRUCTURAL_TAG, ConstraintKind.CHOICE)
_EBNF_REPEAT = re.compile(r"\{[0-9, ]*\}")


def check_size(constraint: Constraint, section: GrammarSection = DEFAULTS) -> None:
    """Raise ConstraintError if the source is longer than `grammar.max_source_bytes`."""
    try:
        size = len(constraint.source.encode())
    except UnicodeEncodeError:
        raise ConstraintError("it holds half of a surrogate pair") from None
    if size > section.max_source_bytes:
        raise ConstraintError(
            f"it has {size} bytes; at most {section.max_source_bytes} are taken",
            limit="max_source_bytes",
        )


def parse_json(constraint: Constraint, section: GrammarSection = DEFAULTS) -> Any:
    """Parse the source of a constraint that is JSON. Raises ConstraintError."""
    if constraint.kind not in _JSON_KINDS:
        return None
    try:
        value = json.loads(constraint.source, parse_constant=_refuse_constant, parse_int=_integer)
    except ConstraintError:
        raise
    except RecursionError:
        raise _too_deep(section) from None
    except ValueError as error:
        raise ConstraintError(f"it is not JSON: {error}") from None
    _check_tree(value, section)
    return value


def check_choices(value: Any) -> list[str]:
    """Return the texts of a choice. Raises ConstraintError."""
    if not isinstance(value, list) or not all(isinstance(text, str) and text for text in value):
        raise ConstraintError("it must be a list of texts of at least one character")
    if not 1 <= len(value) <= MAX_CHOICES:
        raise ConstraintError(
            f"it has {len(value)} choices; 1 to {MAX_CHOICES} are taken", limit="max_choices"
        )
    return list(dict.fromkeys(value))


def check_ebnf(source: str) -> None:
    """Raise ConstraintError if a grammar has too many repeats for the compilers."""
    product = 1
    for repeat in _EBNF_REPEAT.findall(source):
        counts = [int(digits[:9]) for digits in re.findall("[0-9]+", repeat)]
        product = max(product, *counts) if counts else product
    if product > MAX_EBNF_COPIES:
        raise ConstraintError(
            f"it repeats {product} times; at most {MAX_EBNF_COPIES} are taken", limit="max_repeats"
        )


def _check_tree(root: Any, section: GrammarSection) -> None:
    num_nodes, level, depth = 0, [root], 0
    while level:
        containers = [value for value in level if isinstance(value, dict | list)]
        num_nodes += len(containers)
        depth += bool(containers)
        if depth > section.max_depth:
            raise _too_deep(section)
        if num_nodes > section.max_nodes:
            raise ConstraintError(
                f"it has more than {section.max_nodes} objects and lists", limit="max_nodes"
            )
        for text in (*(v for v in level if isinstance(v, str)), *_keys(containers)):
            if any("\ud800" <= char <= "\udfff" for char in text):
                raise ConstraintError("it holds half of a surrogate pair")
        level = [
            inner
            for value in containers
            for inner in (value.values() if isinstance(value, dict) else value)
        ]


def _too_deep(section: GrammarSection) -> ConstraintError:
    return ConstraintError(f"it nests deeper than {section.max_depth} levels", limit="max_depth")


def _keys(containers: list[Any]) -> list[str]:
    return [key for value in containers if isinstance(value, dict) for key in value]


def _refuse_constant(name: str) -> Any:
    raise ConstraintError(f"it is not JSON: {name}")


def _integer(digits: str) -> int:
    if len(digits) > MAX_INTEGER_DIGITS:
        raise ConstraintError(
            f"it holds an integer of more than {MAX_INTEGER_DIGITS} digits", limit="max_json_digits"
        )
    return int(digits)
