"""Ray Serve LLM's files: which parts of them are configurations of models, and their fields' names.

    applications:                       a Serve config file, or
    - import_path: ray.serve.llm:build_openai_app
      args:
        llm_configs:                    the builder's arguments, or
        - model_loading_config: {...}   the configuration of one model

Entries of `llm_configs` may also be paths of files. Knows names and places, and no meanings.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from remora.configs.dialects.catalogue import System
from remora.configs.dialects.dialect import Flat, dotted
from remora.configs.errors import ConfigError
from remora.configs.positions import Document, Mark, parse_yaml, read_text
from remora.configs.validation_messages import KeyPath, shown

BUILDER = "ray.serve.llm:build_openai_app"
BUILDERS = (BUILDER, "ray.serve.llm.build_openai_app", "ray.llm.serve:build_openai_app")
CONFIGS = "llm_configs"
SYSTEM: System = "ray_serve_llm"


def flatten(data: Mapping[str, Any]) -> Flat:
    """Return the fields of one model by name. Raises ConfigError for several models."""
    found = models(data)
    if len(found) > 1:
        raise ConfigError(f"{CONFIGS}: {len(found)} models; expected one")
    return found[0]


def models(data: Mapping[str, Any]) -> list[Flat]:
    """Return the fields of each model by name: its entry's, and those of the whole."""
    if CONFIGS not in data:
        return [dict(dotted(SYSTEM, data, ()))]
    entries = data[CONFIGS]
    if not isinstance(entries, list) or not entries:
        raise ConfigError(f"{CONFIGS} = {shown(entries)}: expected a list of models")
    common = dict(dotted(SYSTEM, {key: data[key] for key in data if key != CONFIGS}, ()))
    return [{**dict(_fields(entry, (CONFIGS, i))), **common} for i, entry in enumerate(entries)]


def _fields(entry: Any, path: KeyPath) -> Iterator[tuple[str, tuple[KeyPath, Any]]]:
    if isinstance(entry, str):
        own = parse_yaml(read_text(entry, f"{CONFIGS}: "), entry).data
        if isinstance(own, Mapping):
            yield from ((name, (path, value)) for name, (_, value) in dotted(SYSTEM, own, ()))
            return
        entry = own
    if not isinstance(entry, Mapping):
        raise ConfigError(
            f"{'.'.join(map(str, path))} = {shown(entry)}: expected the fields of a model, such as "
            "model_loading_config"
        )
    yield from dotted(SYSTEM, entry, path)


def as_our_file(document: Document, import_path: str, *, is_bare: bool = False) -> Document:
    """Return a file of Ray Serve LLM as a Serve config file of this dialect; others as they are.

    import_path:  of remora's application
    is_bare:      whether a file without applications is a configuration of models
    """
    data = document.data
    if not isinstance(data, Mapping):
        return document
    if "applications" not in data and is_bare:
        application = {"import_path": import_path, "args": _in_dialect(data)}
        prefix: KeyPath = ("applications", 0, "args")
        marks = [
            {(*prefix, "args", *path): mark for path, mark in known.items()} | _root(known)
            for known in (document.keys, document.values)
        ]
        own = {"applications": [application]}
        return replace(document, data=own, keys=marks[0], values=marks[1])
    applications = data.get("applications")
    if not isinstance(applications, list):
        return document
    theirs = [i for i, one in enumerate(applications) if _is_theirs(one)]
    if not theirs:
        return document
    changed = [
        {**one, "import_path": import_path, "args": _in_dialect(one.get("args") or {})}
        if i in theirs
        else one
        for i, one in enumerate(applications)
    ]
    marks = [
        known
        | {
            (*path[:3], "args", *path[3:]): mark
            for path, mark in known.items()
            if path[0:1] == ("applications",) and path[2:3] == ("args",) and path[1] in theirs
        }
        for known in (document.keys, document.values)
    ]
    own = {**data, "applications": changed}
    return replace(document, data=own, keys=marks[0], values=marks[1])


def _root(known: Mapping[KeyPath, Mark]) -> dict[KeyPath, Mark]:
    return {(): known[()]} if () in known else {}


def _is_theirs(application: Any) -> bool:
    return isinstance(application, Mapping) and application.get("import_path") in BUILDERS


def _in_dialect(args: Mapping[str, Any]) -> dict[str, Any]:
    return {"dialect": SYSTEM, "args": dict(args)}


def serve_file(model: Mapping[str, Any]) -> dict[str, Any]:
    """Return a Serve config file for `serve run` that serves a model, by dotted names of fields."""
    nested: dict[str, Any] = {}
    for name, value in model.items():
        *parents, last = name.split(".")
        level = nested
        for parent in parents:
            level = level.setdefault(parent, {})
        level[last] = value
    application = {
        "name": "llm",
        "route_prefix": "/",
        "import_path": BUILDER,
        "args": {CONFIGS: [nested]},
    }
    return {"applications": [application]}
