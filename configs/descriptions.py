"""Descriptions of configuration keys: the strings below them in the source of their sections.

Reads the source when they are shown, which few processes do; pydantic would with each import.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import pairwise


@cache
def descriptions(section: type) -> Mapping[str, str]:
    """Return key -> description for a section, with the keys of its base classes."""
    found: dict[str, str] = {}
    for cls in reversed(section.__mro__):
        if "__annotations__" in vars(cls) and cls.__module__.startswith("remora."):
            found.update(_of_class(cls))
    return found


def _of_class(cls: type) -> Iterator[tuple[str, str]]:
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(definition, ast.ClassDef)
    for key, text in pairwise(definition.body):
        if (
            isinstance(key, ast.AnnAssign)
            and isinstance(key.target, ast.Name)
            and isinstance(text, ast.Expr)
            and isinstance(text.value, ast.Constant)
        ):
            yield key.target.id, inspect.cleandoc(str(text.value.value))
