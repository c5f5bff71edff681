"""Errors of a translated body, renamed to the field names of the client's body."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager

from remora.configs.errors import RequestError

Renames = tuple[tuple[re.Pattern[str], str], ...]
# A field's path, or a quoted text, which comes from the client.
_FIELD = re.compile(r"(?<!\w)'[^']*'|[A-Za-z_]\w*(?:\[\d+\]|\.\w+)*")


def renames(*pairs: tuple[str, str]) -> Renames:
    """Return rename rules from pairs (pattern of a path's beginning, replacement)."""
    return tuple((re.compile(pattern), replacement) for pattern, replacement in pairs)


def retold(error: RequestError, rename: Callable[[str], str]) -> RequestError:
    """Return the error with the fields in its parameter and message renamed."""

    def renamed(match: re.Match[str]) -> str:
        name = match[0]
        if name.startswith("'"):
            return name
        # A plain word may be prose instead of a field: "stop", "messages".
        return rename(name) if name == error.param or not name.isalpha() else name

    param = None if error.param is None else rename(error.param)
    return type(error)(_FIELD.sub(renamed, error.message), param, error.code, limit=error.limit)


@contextmanager
def in_callers_words(rules: Renames) -> Generator[None, None, None]:
    """Re-raise a RequestError of the block with its fields renamed by the rules."""
    try:
        yield
    except RequestError as error:
        raise retold(error, lambda name: _renamed(name, rules)) from None


def _renamed(param: str, rules: Iterable[tuple[re.Pattern[str], str]]) -> str:
    for pattern, replacement in rules:
        renamed, num_matches = pattern.subn(replacement, param, count=1)
        if num_matches:
            return renamed
    return param
