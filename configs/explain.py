"""Explain each key: its meaning, its value, and the origin of the value.

`remora config explain` and `docs/configuration.md` are generated from the schema's descriptions.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from remora.configs.descriptions import descriptions
from remora.configs.fields import Section
from remora.configs.live_update import IN_PLACE
from remora.configs.schema import ServeConfig
from remora.configs.validation_messages import shown


@dataclass(frozen=True, slots=True)
class Setting:
    """One key of one section. `origin` is where its value comes from; None = the default."""

    name: str
    value: Any
    origin: str | None
    description: str


def explain(config: ServeConfig, written: Mapping[str, str]) -> list[Setting]:
    """Return every key in the schema's order.

    written:  dotted name -> origin, for keys that do not have their default
    """
    return [
        Setting(
            name=f"{section}.{key}",
            value=getattr(getattr(config, section), key),
            origin=written.get(f"{section}.{key}"),
            description=_one_line(descriptions(model).get(key)),
        )
        for section, model in sections()
        for key in model.model_fields
    ]


def reference_page() -> str:
    """Return `docs/configuration.md`: one table per section."""
    schemas = ServeConfig.model_json_schema()["$defs"]
    parts = [_INTRODUCTION]
    for section, model in sections():
        parts.append(f"## {section}\n\n{_one_line(model.__doc__)}\n")
        properties = schemas[model.__name__]["properties"]
        rows = [
            f"| `{key}`{_mark(section, key)} | {_kind(properties[key], schemas)} | "
            f"{_default(model, key)} | "
            f"{_one_line(descriptions(model).get(key))} |"
            for key in model.model_fields
        ]
        parts.append("| key | value | default | meaning |\n|---|---|---|---|\n" + "\n".join(rows))
        parts.append("")
    return "\n".join(parts)


_INTRODUCTION = """# Configuration

<!-- Written by `remora config schema --markdown`; a test compares. -->

A configuration is an ordinary Ray Serve config file. The keys below are the `args` of the
application whose `import_path` is `remora.deployments.app:build`; for all other keys see
[Ray Serve's documentation](https://docs.ray.io/en/latest/serve/production-guide/config.html).
Example: `configs/smollm2.yaml`. A list `models` instead of `model` serves several models at one
address: [gateway.md](gateway.md).

- `remora config check FILE` validates a file and reports faults with line and column, and files
  that are missing on this machine.
- `remora config explain FILE` shows the value, origin and meaning of every key.
- `remora config init` prints a commented file with every key.
- `remora config schema` prints the JSON Schema of `args`.

`args` may also hold another server's parameters: see [dialects.md](dialects.md), which also
describes profiles, `--set section.key=value` and variables such as `REMORA_ENGINE__PAGE_SIZE`.

An unknown key is an error. A default gives way to a written value: a larger `max_running_requests`
raises `max_step_tokens`, unless that is written too. Two written values that contradict each other
are an error. Sizes are bytes or strings such as `512MiB` and `2GiB`; durations are seconds.

Keys marked with * can change while replicas run, through `user_config`
([operations.md](operations.md)).

The environment variable `REMORA_CACHE` sets the directory of the built-in model, compiled kernels,
downloaded adapters and packed weights (default: `$XDG_CACHE_HOME/remora` or `~/.cache/remora`).
"""


def sections() -> Iterator[tuple[str, type[BaseModel]]]:
    """Return the sections of a configuration by name, in the schema's order."""
    for name, field in ServeConfig.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            yield name, field.annotation


def _mark(section: str, key: str) -> str:
    return " *" if key in IN_PLACE.get(section, ()) else ""


def _one_line(text: str | None) -> str:
    return " ".join((text or "").split())


def _default(model: type[BaseModel], key: str) -> str:
    field = model.model_fields[key]
    if field.is_required():
        return "required"
    return f"`{shown(field.get_default(call_default_factory=True))}`".replace("'", "")


def _kind(schema: Mapping[str, Any], schemas: Mapping[str, Any]) -> str:
    """Return allowed values in words, from a property's JSON schema.

    schemas:  of the sections and of what they hold, by name
    """
    if "$ref" in schema:
        parts = schemas[schema["$ref"].rpartition("/")[-1]]["properties"]
        return "{" + ", ".join(f"`{part}`" for part in parts) + "}"
    if "enum" in schema:
        return ", ".join(f"`{choice}`" for choice in schema["enum"])
    if "anyOf" in schema:
        return " or ".join(_kind(choice, schemas) for choice in schema["anyOf"])
    if schema.get("pattern"):
        return "size such as `2GiB`"
    if schema["type"] == "array":
        most = f" of at most {schema['maxItems']}" if "maxItems" in schema else ""
        return f"list{most}: {_kind(schema['items'], schemas)}"
    name = {
        "integer": "whole number",
        "number": "number",
        "string": "text",
        "null": "null",
        "boolean": "true or false",
        "object": "mapping",
    }[schema["type"]]
    limits = [
        f"{sign} {json.dumps(schema[key])}"
        for key, sign in (
            ("exclusiveMinimum", ">"),
            ("minimum", "≥"),
            ("exclusiveMaximum", "<"),
            ("maximum", "≤"),
        )
        if key in schema
    ]
    return f"{name} {', '.join(limits)}".strip()
