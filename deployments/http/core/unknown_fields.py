"""Fields of a body that no API defines: named in response headers and in the log, or refused.

A body's model keeps them (`model_extra`). Known fields that are not supported are the matter of
`unsupported_fields.py`. Names come from clients: what is shown of them is short and printable. The
log has those only that resemble a known name, as other ones may be private, each once and up to a
limit.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice

from remora.configs.errors import InvalidRequest
from remora.configs.validation_messages import nearest
from remora.deployments.http.core.fields import Body
from remora.deployments.http.core.unsupported_fields import FIELDS

IGNORED_HEADER = "x-remora-ignored-fields"
SUGGESTED_HEADER = "x-remora-suggested-fields"
MAX_LOGGED = 100  # names
_MAX_REPORTED = 20  # of one body
_MAX_NAME_CHARS = 64
_INDEX = re.compile(r"\[\d+\]")

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class IgnoredFields:
    """Unknown fields of one body.

    nearest:  name, nested ones as `a.b` -> the most similar name that the body may have, or None
    """

    nearest: Mapping[str, str | None] = field(default_factory=dict)

    @property
    def headers(self) -> dict[str, str]:
        """The response headers that report them."""
        if not self.nearest:
            return {}
        names = {_header_safe(name): known for name, known in self.nearest.items()}
        hints = [f"{name}={known}" for name, known in names.items() if known is not None]
        suggested = {SUGGESTED_HEADER: ", ".join(hints)} if hints else {}
        return {IGNORED_HEADER: ", ".join(names), **suggested}


def find_ignored(body: Body, *also: str, reject: bool) -> IgnoredFields:
    """Return the unknown fields of a body; with `reject`, raise InvalidRequest for the first one.

    also:  names of known fields that have no effect on this server
    """
    found = dict(islice(_unknown(body, ""), _MAX_REPORTED))
    if reject and found:
        name, known = next(iter(found.items()))
        hint = "." if known is None else f"; did you mean {known}?"
        raise InvalidRequest(f"{name} is not a known field{hint}", name, "unknown_field")
    return IgnoredFields(found | dict.fromkeys(also))


def _unknown(body: Body, prefix: str) -> Iterator[tuple[str, str | None]]:
    for name in body.model_extra or {}:
        if name not in FIELDS:
            short = name[:_MAX_NAME_CHARS]
            known = _nearest(type(body), short)
            yield prefix + short, None if known is None else prefix + known
    for name, value in body:
        if isinstance(value, Body):
            yield from _unknown(value, f"{prefix}{name}.")
        elif isinstance(value, list) and value and isinstance(value[0], Body):
            for index, item in enumerate(value):
                yield from _unknown(item, f"{prefix}{name}[{index}].")


@lru_cache(maxsize=1024)
def _nearest(model: type[Body], name: str) -> str | None:
    return nearest(name, [info.alias or key for key, info in model.model_fields.items()])


def _header_safe(name: str) -> str:
    return "".join(c if "!" <= c <= "~" and c not in ",=" else "?" for c in name[:_MAX_NAME_CHARS])


class UnknownFieldLog:
    """Logs each misspelt name once, so that repeated requests do not fill the log.

    max_names:  that are logged; later ones are not, since a client may send any number of names
    """

    def __init__(self, max_names: int = MAX_LOGGED) -> None:
        self._max_names = max_names
        self._logged: set[str] = set()

    def note(self, ignored: IgnoredFields) -> None:
        """Log the names that have not been logged."""
        for name, known in ignored.nearest.items():
            place = _INDEX.sub("", name)
            if known is None or place in self._logged or len(self._logged) >= self._max_names:
                continue
            self._logged.add(place)
            meant = _INDEX.sub("", known)
            log.warning("fields: ignored %s; did you mean %s?", _header_safe(place), meant)
            if len(self._logged) == self._max_names:
                log.warning("fields: further unknown fields are not logged")
