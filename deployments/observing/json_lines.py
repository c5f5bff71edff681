"""What is written of requests, as lines of JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import orjson

from remora.engine.types import SamplingParams

_UNSET = SamplingParams()


def changed(sampling: SamplingParams) -> dict[str, Any]:
    """Return the parameters that are not as they are where nobody says anything."""
    found = {field.name: getattr(sampling, field.name) for field in fields(sampling)}
    return {name: value for name, value in found.items() if value != getattr(_UNSET, name)}


def as_json(line: Mapping[str, Any]) -> bytes:
    """Return one line, without its end."""
    return orjson.dumps(line, default=_plain, option=orjson.OPT_NON_STR_KEYS)


def _plain(value: Any) -> Any:
    """Return what orjson can write in the place of what it cannot."""
    if isinstance(value, Mapping):
        return dict(value)
    return list(value) if isinstance(value, set | frozenset) else str(value)
