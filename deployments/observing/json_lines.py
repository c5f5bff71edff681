"""Serialises request logs and dumps as lines of JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import orjson

from remora.engine.types import SamplingParams

_DEFAULTS = SamplingParams()


def non_default(sampling: SamplingParams) -> dict[str, Any]:
    """Return the parameters that differ from their defaults."""
    found = {field.name: getattr(sampling, field.name) for field in fields(sampling)}
    return {name: value for name, value in found.items() if value != getattr(_DEFAULTS, name)}


def as_json(line: Mapping[str, Any]) -> bytes:
    """Return one line, without its newline."""
    return orjson.dumps(line, default=_plain, option=orjson.OPT_NON_STR_KEYS)


def _plain(value: Any) -> Any:
    """Convert a value of a type that orjson does not know."""
    if isinstance(value, Mapping):
        return dict(value)
    return list(value) if isinstance(value, set | frozenset) else str(value)
