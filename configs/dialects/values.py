"""Convert values of other servers' parameters to the catalogue's types.

As lenient as those servers: "8" is a whole number; "True", "1" and "on" are true.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from remora.configs.dialects.catalogue import Parameter
from remora.configs.validation_messages import nearest, shown

_TRUE = frozenset({"true", "1", "yes", "on"})
_FALSE = frozenset({"false", "0", "no", "off"})
_NOTHING = frozenset({"none", "null", "nil"})
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT])(i?)B", re.IGNORECASE)
_COUNT = re.compile(r"(\d+(?:\.\d+)?)([kmgtKMGT])")
_POWERS = {"K": 1, "M": 2, "G": 3, "T": 4}


class WrongValue(Exception):
    """A value does not have its parameter's type; the message says what is expected."""


def coerce(parameter: Parameter, value: Any) -> Any:
    """Convert `value` to the parameter's type; None = nothing is set. Raises WrongValue."""
    if value is None or _says_nothing(parameter, value):
        return None
    read = _of_type(parameter, parameter.type, value)
    choices = parameter.choices
    if choices is None or parameter.type != "enum" or read in choices:
        return read
    if isinstance(read, str):
        for choice in choices:
            if isinstance(choice, str) and choice.lower() == read.lower():
                return choice
    known = [str(choice) for choice in choices if choice is not None]
    near = nearest(str(read), known)
    hint = f"; did you mean {near}?" if near is not None else ""
    raise WrongValue(f"must be one of {', '.join(known)}{hint}")


def is_bool_text(text: str) -> bool:
    """Return whether a text is a boolean."""
    return text.lower() in _TRUE | _FALSE


def _says_nothing(parameter: Parameter, value: Any) -> bool:
    if not isinstance(value, str) or value.lower() not in _NOTHING:
        return False
    return value not in (parameter.choices or ())  # "none" and "null" are values of some


def _of_type(parameter: Parameter, kind: str, value: Any) -> Any:
    if kind.startswith("list["):
        return [
            _of_type(parameter, kind[5:-1], item) for item in _items(kind, _unquoted(kind, value))
        ]
    if kind == "enum":
        numbers = all(isinstance(choice, int) for choice in parameter.choices or ("",))
        return _of_type(parameter, "int" if numbers else "str", value)
    readers: dict[str, Callable[[Any], Any]] = {
        "bool": _bool,
        "int": _int,
        "count": _count,
        "float": _float,
        "json": _json,
        "any": lambda each: each,
    }
    reader: Callable[[Any], Any] = readers.get(kind, _text)
    return reader(value)


def _unquoted(kind: str, value: Any) -> Any:
    """Parse a list written as JSON, alone or as the only item of a list."""
    text = value[0] if isinstance(value, list) and len(value) == 1 else value
    if isinstance(text, str) and text.strip().startswith("["):
        return _json(text)
    return value


def _items(kind: str, value: Any) -> list[Any]:
    if isinstance(value, list):
        return value
    if isinstance(value, str) and kind != "list[json]":
        return value.replace(",", " ").split()
    return [value]


def _bool(value: Any) -> bool:
    text = str(value).lower()
    if text in _TRUE:
        return True
    if text in _FALSE:
        return False
    raise WrongValue("expected true or false")


def _int(value: Any) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, str):
        if size := _SIZE.fullmatch(value.strip()):
            base = 1024 if size[3] else 1000
            return int(float(size[1]) * base ** _POWERS[size[2].upper()])
        try:
            return int(value.replace("_", ""))
        except ValueError:
            pass
    raise WrongValue("expected a whole number")


def _count(value: Any) -> int:
    """Read a whole number, also as 8k (thousands) or 8K (1024s); auto is -1."""
    if isinstance(value, str):
        if value.lower() == "auto":
            return -1
        if match := _COUNT.fullmatch(value.strip()):
            base = 1000 if match[2].islower() else 1024
            return int(float(match[1]) * base ** _POWERS[match[2].upper()])
    return _int(value)


def _float(value: Any) -> float:
    if isinstance(value, int | float | str) and not isinstance(value, bool):
        try:
            return float(value)
        except ValueError:
            pass
    raise WrongValue("expected a number")


def _json(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise WrongValue(f"not valid JSON: {error}") from None


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    raise WrongValue(f"expected text, found {shown(value)}")
