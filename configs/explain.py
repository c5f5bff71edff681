"""What each key is, what it is set to, and where that came from.

The schema's own descriptions feed the table of `remora config explain` and the page
`docs/configuration.md`; there is no second text to keep in step.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from remora.configs.fields import Section
from remora.configs.live_update import IN_PLACE
from remora.configs.schema import ServeConfig
from remora.configs.validation_messages import shown


@dataclass(frozen=True, slots=True)
class Setting:
    """One key of one section. `origin` says where its value comes from; None: its default."""

    name: str
    value: Any
    origin: str | None
    description: str


def explain(config: ServeConfig, written: Mapping[str, str]) -> list[Setting]:
    """Return every key in the schema's order.

    written:  where each key comes from that has not its default, by dotted name
    """
    return [
        Setting(
            name=f"{section}.{key}",
            value=getattr(getattr(config, section), key),
            origin=written.get(f"{section}.{key}"),
            description=_one_line(field.description),
        )
        for section, model in sections()
        for key, field in model.model_fields.items()
    ]


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema of `args` in a Serve application of ours."""
    return ServeConfig.model_json_schema()


def reference_page() -> str:
    """Return `docs/configuration.md`: one table per section."""
    schemas = json_schema()["$defs"]
    parts = [_INTRODUCTION]
    for section, model in sections():
        parts.append(f"## {section}\n\n{_one_line(model.__doc__)}\n")
        properties = schemas[model.__name__]["properties"]
        rows = [
            f"| `{key}`{_mark(section, key)} | {_kind(properties[key], schemas)} | "
            f"{_default(model, key)} | "
            f"{_one_line(field.description)} |"
            for key, field in model.model_fields.items()
        ]
        parts.append("| key | value | default | meaning |\n|---|---|---|---|\n" + "\n".join(rows))
        parts.append("")
    return "\n".join(parts)


_INTRODUCTION = """# Configuration

<!-- Written by `remora config schema --markdown`; a test compares. -->

A configuration is an ordinary Ray Serve config file. What belongs to remora stands under `args` of
the application whose `import_path` is `remora.deployments.app:build`; everything else is
[Ray's](https://docs.ray.io/en/latest/serve/production-guide/config.html). Example:
`configs/smollm2.yaml`.

With a list `models` in the place of `model`, several are served at one address:
[gateway.md](gateway.md).

- `remora config check FILE` says what is wrong, with file, line and column.
- `remora config explain FILE` shows every key's value and whether the file or a default set it.
- `remora config schema` prints the JSON Schema of `args`, `remora config init` a commented file.

Instead of these keys `args` may hold another server's: [dialects.md](dialects.md), which also tells
of profiles, of `--set section.key=value` and of variables such as `REMORA_ENGINE__PAGE_SIZE`.

An unknown key is an error. A default gives way to a written value (a larger `max_running_requests`
raises `max_step_tokens`, unless that is written too); two written values that contradict each other
are refused. Sizes are bytes or texts such as `512MiB` and `2GiB`; durations are seconds.

Keys marked with * may change while replicas run, by `user_config` (docs/operations.md).

`REMORA_CACHE` names the folder in which the built-in model is kept (default
`$XDG_CACHE_HOME/remora` or `~/.cache/remora`).
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
