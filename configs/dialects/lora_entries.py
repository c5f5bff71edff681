"""Adapters in SGLang's `--lora-paths` and the backend config's `loras`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

from remora.configs.dialects.rules import UNSAID, Effect, Refusal, Settings
from remora.configs.sections.lora import ADAPTER_NAME

_PATHS = ("path", "source", "location", "lora_path")
_NAMES = ("id", "lora_id", "name", "lora_name")


def of_texts(value: Sequence[str], given: Mapping[str, Any]) -> Effect:
    """Parse adapters given as `name=path`, `path` or JSON. Raises Refusal."""
    entries, how = [], ""
    for text in value:
        if text.lstrip().startswith("{"):
            entries.append(_of_object(parsed(text)))
            continue
        name, equals, path = text.partition("=")
        if not equals:
            name, path = PurePath(text).name, text
            how = "an adapter given by its path alone gets its directory's name"
        entries.append(_entry(name, path))
    if given.get("--enable-lora") is False:
        raise Refusal("--enable-lora is false; remove one of the two")
    return Effect({"lora.adapters": entries, "lora.dynamic": True}, how)


def to_texts(settings: Settings) -> Any:
    """Write each adapter as `name=path`."""
    if not settings.get("lora.adapters") or settings.get("lora.dynamic") is not True:
        return UNSAID
    return [f"{entry['name']}={entry['path']}" for entry in settings["lora.adapters"]]


def of_objects(value: Sequence[Any], given: Mapping[str, Any]) -> Effect:
    """Parse adapters given as objects with an id and a path. Raises Refusal."""
    return Effect({"lora.adapters": [_of_object(entry) for entry in value]})


def to_objects(settings: Settings) -> Any:
    """Write each adapter as an object."""
    if not settings.get("lora.adapters"):
        return UNSAID
    return [{"id": entry["name"], "path": entry["path"]} for entry in settings["lora.adapters"]]


def parsed(text: str) -> Any:
    """Return the object that a text means. Raises Refusal."""
    try:
        return json.loads(text)
    except ValueError as error:
        raise Refusal(f"not valid JSON: {error}") from None


def _of_object(entry: Any) -> dict[str, str]:
    if not isinstance(entry, Mapping):
        raise Refusal("each adapter is an object with an id and a path")
    rest = dict(entry)
    names = [rest.pop(key) for key in _NAMES if key in rest]
    paths = [rest.pop(key) for key in _PATHS if key in rest]
    if rest.pop("pinned", False):
        raise Refusal("adapters cannot be pinned; raise lora.max_loras_per_batch instead")
    if len(names) != 1 or len(paths) != 1 or rest:
        raise Refusal(
            f"each adapter has an id ({', '.join(_NAMES)}) and a path ({', '.join(_PATHS)}); "
            f"found {', '.join(map(str, entry)) or 'nothing'}"
        )
    return _entry(str(names[0]), str(paths[0]))


def _entry(name: str, path: str) -> dict[str, str]:
    if not re.fullmatch(ADAPTER_NAME, name):
        raise Refusal(
            f"the name {name!r} is not valid; use letters, digits, dots, dashes and underscores"
        )
    return {"name": name, "path": path}
