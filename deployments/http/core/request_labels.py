"""Metric labels that a request brings in a header: a JSON object of texts.

Only names allowed by the operator count, and the number of label sets is limited, in all and for
each API key: each set is a series of its own, about 13 KB of /metrics, which needs no key.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import orjson

MAX_LABEL_SETS = 256
MAX_SETS_PER_KEY = 64
MAX_VALUE_CHARS = 64
OTHER = "other"


class RequestLabels:
    """Reader of the labels in request headers.

    names:  allowed label names; none = requests bring no labels
    """

    def __init__(self, header: str, names: Sequence[str]) -> None:
        self._header = header.lower().encode()
        self._names = tuple(names)
        self._seen: set[tuple[str, ...]] = set()
        self._num_by_owner = Counter[str]()

    def read(self, headers: Sequence[tuple[bytes, bytes]], owner: str) -> tuple[str, ...]:
        """Return the label values in a request's headers, in the order of the names.

        owner:  of the request's key, who may add MAX_SETS_PER_KEY sets; "" = there are no keys
        """
        if not self._names:
            return ()
        given = next((value for name, value in headers if name == self._header), b"{}")
        try:
            found = orjson.loads(given)
        except orjson.JSONDecodeError:
            found = {}
        if not isinstance(found, dict):
            found = {}
        values = tuple(_text(found.get(name, "")) for name in self._names)
        if values not in self._seen:
            most = MAX_SETS_PER_KEY if owner else MAX_LABEL_SETS
            if len(self._seen) >= MAX_LABEL_SETS or self._num_by_owner[owner] >= most:
                return (OTHER,) * len(self._names)
            self._seen.add(values)
            self._num_by_owner[owner] += 1
        return values


def _text(value: object) -> str:
    is_plain = isinstance(value, str | int | float) and not isinstance(value, bool)
    return str(value)[:MAX_VALUE_CHARS] if is_plain else ""
