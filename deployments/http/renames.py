"""Faults of a translated body, told in the words of the body that the caller sent."""

from __future__ import annotations

import re
from collections.abc import Generator, Iterable
from contextlib import contextmanager

from remora.configs.errors import RequestError

Renames = tuple[tuple[re.Pattern[str], str], ...]


def renames(*pairs: tuple[str, str]) -> Renames:
    """Return rules: the beginning of a field's path, as an expression, and what it becomes."""
    return tuple((re.compile(pattern), replacement) for pattern, replacement in pairs)


@contextmanager
def in_callers_words(rules: Renames) -> Generator[None, None, None]:
    """Raise a RequestError of the block again, with its field named as the rules say."""
    try:
        yield
    except RequestError as error:
        if error.param is None:
            raise
        param = _renamed(error.param, rules)
        message = error.message.replace(error.param, param)
        raise type(error)(message, param, error.code) from None


def _renamed(param: str, rules: Iterable[tuple[re.Pattern[str], str]]) -> str:
    for pattern, replacement in rules:
        renamed, num_matches = pattern.subn(replacement, param, count=1)
        if num_matches:
            return renamed
    return param
