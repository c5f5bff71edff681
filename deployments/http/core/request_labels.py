"""Metric labels that a request brings in a header: a JSON object of texts.

Only names allowed by the operator count, and the number of label sets is limited: each set is a
series of its own, and a client could otherwise create any number of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar

import orjson

MAX_LABEL_SETS = 1000
MAX_VALUE_CHARS = 64
OTHER = "other"
_values: ContextVar[tuple[str, ...]] = ContextVar("_values", default=())


def current_labels() -> tuple[str, ...]:
    """Return the label values of the running task's request, in the order of the names."""
    return _values.get()


class RequestLabels:
    """Reader of the labels in request headers.

    names:  allowed label names; none = requests bring no labels
    """

    def __init__(self, header: str, names: Sequence[str]) -> None:
        self._header = header.lower().encode()
        self._names = tuple(names)
        self._seen: set[tuple[str, ...]] = set()

    def note(self, headers: Sequence[tuple[bytes, bytes]]) -> None:
        """Set the labels of the running task from the request's headers."""
        if self._names:
            _values.set(self._read(headers))

    def _read(self, headers: Sequence[tuple[bytes, bytes]]) -> tuple[str, ...]:
        given = next((value for name, value in headers if name == self._header), b"{}")
        try:
            found = orjson.loads(given)
        except orjson.JSONDecodeError:
            found = {}
        if not isinstance(found, dict):
            found = {}
        values = tuple(_text(found.get(name, "")) for name in self._names)
        if values not in self._seen and len(self._seen) >= MAX_LABEL_SETS:
            return (OTHER,) * len(self._names)
        self._seen.add(values)
        return values


def _text(value: object) -> str:
    is_plain = isinstance(value, str | int | float) and not isinstance(value, bool)
    return str(value)[:MAX_VALUE_CHARS] if is_plain else ""
