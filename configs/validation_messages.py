"""Turn pydantic's errors into messages that operators can act on.

Knows nothing of files: the caller's `locate` function turns a key path into "file:line:column: " or
an empty string.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from remora.configs.errors import ConfigError

M = TypeVar("M", bound=BaseModel)

KeyPath = tuple[str | int, ...]
Locate = Callable[[KeyPath, bool], str]

_MAX_SHOWN_CHARS = 60
_EXPECTED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "int_parsing": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "string_type": "text",
    "bool_type": "true or false",
    "list_type": "a list",
    "dict_type": "a mapping of keys to values",
    "model_type": "a mapping of keys to values",
}
_LIMITS = {
    "greater_than": ("gt", "must be greater than"),
    "greater_than_equal": ("ge", "must be at least"),
    "too_short": ("min_length", "must be a list of at least this many entries:"),
    "too_long": ("max_length", "must be a list of at most this many entries:"),
    "less_than": ("lt", "must be less than"),
    "less_than_equal": ("le", "must be at most"),
}


def validated(data: Any, model: type[M], locate: Locate, prefix: KeyPath = ()) -> M:
    """Return `data` as a `model`. Raises ConfigError with one line per error.

    A line has place, key, value, reason, and the nearest key where useful.
    """
    try:
        return model.model_validate(data)
    except ValidationError as error:
        lines = (_line(each, model, locate, prefix) for each in error.errors())
        raise ConfigError("\n".join(lines)) from None


def unknown_keys(data: Any, root: type[BaseModel], locate: Locate, path: KeyPath = ()) -> list[str]:
    """Return a line for each key of `data` that `root`, or a model within it, does not define.

    For schemas that ignore unknown keys.
    """
    if isinstance(data, list):
        items: list[tuple[str | int, Any]] = list(enumerate(data))
        return [
            line
            for index, item in items
            for line in unknown_keys(item, root, locate, (*path, index))
        ]
    model = _model_at(root, path)
    if model is None or not isinstance(data, dict):
        return []
    lines = []
    for key, value in data.items():
        if key not in model.model_fields:
            lines.append(locate((*path, key), True) + _unknown_key((*path, key), value, root))
        else:
            lines += unknown_keys(value, root, locate, (*path, key))
    return lines


def shown(value: Any) -> str:
    """Return `value` as it is written in YAML, shortened."""
    is_word = value is None or isinstance(value, bool)
    text = {None: "null", True: "true", False: "false"}[value] if is_word else repr(value)
    return text if len(text) <= _MAX_SHOWN_CHARS else text[: _MAX_SHOWN_CHARS - 3] + "..."


def nearest(key: str, known: list[str]) -> str | None:
    """Return the known key most similar to `key`, or None."""
    found = difflib.get_close_matches(key.lower().replace("-", "_"), known, n=1, cutoff=0.6)
    return found[0] if found else None


def _line(error: ErrorDetails, root: type[BaseModel], locate: Locate, prefix: KeyPath) -> str:
    path: KeyPath = tuple(error["loc"])
    kind = error["type"]
    if kind == "conflict":
        key = error["ctx"]["key"]
        given = getattr(error["input"], key, None)
        if isinstance(error["input"], Mapping):
            given = error["input"].get(key)
        return _join(locate((*prefix, *path, key), False), (*path, key), given, error["msg"])
    if kind == "missing":
        place = locate((*prefix, *path[:-1]), True)
        return f"{place}{_dotted(path)}: required key is missing{_misspelt(path, error['input'])}"
    if kind == "invalid_key":
        place = locate((*prefix, *path[:-1]), True)
        return f"{place}{_dotted(path[:-1])}: the key {path[-1]} is not text; put it in quotes"
    if kind == "extra_forbidden":
        return f"{locate((*prefix, *path), True)}{_unknown_key(path, error['input'], root)}"
    return _join(locate((*prefix, *path), False), path, error["input"], _reason(error))


def _join(place: str, path: KeyPath, value: Any, why: str) -> str:
    return f"{place}{_dotted(path)} = {shown(value)}: {why}"


def _reason(error: ErrorDetails) -> str:
    kind, value = error["type"], error["input"]
    if kind == "literal_error":
        return f"must be one of {error['ctx']['expected'].replace(chr(39), '')}"
    if kind in _LIMITS:
        name, words = _LIMITS[kind]
        return f"{words} {error['ctx'][name]}"
    if kind not in _EXPECTED:
        return error["msg"][:1].lower() + error["msg"][1:]
    hint = ""
    if kind == "float_type" and isinstance(value, str) and _is_number(value):
        hint = " (YAML reads this as text; write it as 1.0e+3, without quotes)"
    elif kind == "int_type" and isinstance(value, str) and _is_number(value):
        hint = " (leave out the quotes)"
    elif kind == "string_type":
        hint = " (put it in quotes)"
    return f"expected {_EXPECTED[kind]}, found {_kind_of(value)}{hint}"


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _kind_of(value: Any) -> str:
    names: dict[type, str] = {
        bool: "true or false",
        int: "a whole number",
        float: "a fraction",
        str: "text",
        list: "a list",
        dict: "a mapping",
        type(None): "nothing",
    }
    return names.get(type(value), type(value).__name__)


def _dotted(path: KeyPath) -> str:
    parts = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return "".join(parts).removeprefix(".") or "args"


def _misspelt(path: KeyPath, section: Any) -> str:
    written = [str(key) for key in section] if isinstance(section, Mapping) else []
    near = nearest(str(path[-1]), written)
    return f" (found {near})" if near is not None else ""


def _unknown_key(path: KeyPath, value: Any, root: type[BaseModel]) -> str:
    """Explain an unknown key by its right section, the nearest key, or the list of keys."""
    *sections, last = path
    key = str(last)
    model = _model_at(root, sections)
    known = list(model.model_fields) if model is not None else []
    message = f"{_dotted(path)} = {shown(value)}: unknown key; "
    everywhere = _keys_of_sections(root)
    if key in everywhere and key not in known:
        return f"{message}did you mean {everywhere[key]}.{key}?"
    if (near := nearest(key, known)) is not None:
        return f"{message}did you mean {_dotted((*sections, near))}?"
    if (near := nearest(key, list(everywhere))) is not None:
        return f"{message}did you mean {everywhere[near]}.{near}?"
    where = _dotted(tuple(sections)) if sections else "this level"
    return f"{message}the keys of {where} are {', '.join(known)}"


def _model_at(root: type[BaseModel], sections: Sequence[str | int]) -> type[BaseModel] | None:
    model: type[BaseModel] | None = root
    for section in sections:
        if isinstance(section, int):
            continue
        field = model.model_fields.get(section) if model is not None else None
        model = _as_model(field.annotation) if field is not None else None
    return model


def _as_model(annotation: Any) -> type[BaseModel] | None:
    for candidate in (annotation, *get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None


def _keys_of_sections(root: type[BaseModel]) -> dict[str, str]:
    """Return key -> the first section that has it."""
    found: dict[str, str] = {}
    for section, field in root.model_fields.items():
        model = _as_model(field.annotation)
        for key in model.model_fields if model is not None else ():
            found.setdefault(key, section)
    return found
