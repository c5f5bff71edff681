"""Errors of a translated body, with the field names of the body that the caller sent."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager

from remora.configs.errors import RequestError

Renames = tuple[tuple[re.Pattern[str], str], ...]
# A field's path, or something quoted, which is the caller's own.
_FIELD = re.compile(r"(?<!\w)'[^']*'|[A-Za-z_]\w*(?:\[\d+\]|\.\w+)*")


def renames(*pairs: tuple[str, str]) -> Renames:
    """Return rules: the beginning of a field's path, as an expression, and what it becomes."""
    return tuple((re.compile(pattern), replacement) for pattern, replacement in pairs)


def retold(error: RequestError, rename: Callable[[str], str]) -> RequestError:
    """Return an error with the fields of its parameter and message renamed."""

    def renamed(match: re.Match[str]) -> str:
        name = match[0]
        if name.startswith("'"):
            return name
        # Elsewhere a plain word may be just a word: "stop", "messages".
        return rename(name) if name == error.param or not name.isalpha() else name

    param = None if error.param is None else rename(error.param)
    return type(error)(_FIELD.sub(renamed, error.message), param, error.code, limit=error.limit)


@contextmanager
def in_callers_words(rules: Renames) -> Generator[None, None, None]:
    """Raise a RequestError of the block again, with fields named as the rules say."""
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
