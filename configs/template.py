"""Write commented configuration files: `remora config init`.

A file has every key with its description; keys that the profile does not set are commented out.
"""

from __future__ import annotations

import json
import textwrap
from typing import Any

import yaml

from remora.configs.descriptions import descriptions
from remora.configs.explain import sections
from remora.configs.load import DEFAULT_HOST, DEFAULT_PORT, IMPORT_PATH
from remora.configs.profiles import PROFILES
from remora.configs.schema import BUILTIN_MODEL, ServeConfig

SCHEMA_FILE = "remora.schema.json"
_WIDTH = 100


def template(profile: str, model: str = BUILTIN_MODEL) -> str:
    """Return the text of a Serve config file for a profile of `profiles.py`."""
    lines = [
        f"# yaml-language-server: $schema={SCHEMA_FILE}",
        f"# Profile {profile}. Start with `remora serve FILE`. Commented keys show their defaults;",
        "# `remora config explain FILE` shows the values in effect.",
        "proxy_location: HeadOnly",
        "http_options:",
        f"  host: {DEFAULT_HOST}",
        f"  port: {DEFAULT_PORT}",
        "applications:",
        "  - name: remora",
        "    route_prefix: /",
        f"    import_path: {IMPORT_PATH}",
        "    args:",
    ]
    values = {section: dict(keys) for section, keys in PROFILES[profile].items()}
    values.setdefault("model", {})["path"] = model
    for section, kind in sections():
        written = values.get(section, {})
        lines += ["", *_comment(f"{kind.__doc__}", 6)]
        lines.append(f"      {'' if written else '# '}{section}:")
        for key, field in kind.model_fields.items():
            lines += _comment(descriptions(kind).get(key, ""), 8)
            if key in written:
                lines.append(f"        {key}: {_yaml(written[key])}")
            else:
                default = field.get_default(call_default_factory=True)
                lines.append(f"        # {key}: {_yaml(default)}")
    return "\n".join(lines) + "\n"


def file_schema() -> dict[str, Any]:
    """Return the JSON Schema of a whole Serve file, for editors; Ray's keys are unrestricted."""
    ours = ServeConfig.model_json_schema()
    parts = ours.pop("$defs")
    application = {
        "type": "object",
        "properties": {"import_path": {"type": "string"}},
        "if": {"properties": {"import_path": {"const": IMPORT_PATH}}},
        "then": {"properties": {"args": {"$ref": "#/$defs/Args"}}},
    }
    one = {**ours, "properties": {**ours["properties"], "profile": {"enum": list(PROFILES)}}}
    other = {
        "type": "object",
        "required": ["dialect", "args"],
        "properties": {
            "dialect": {"enum": ["sglang", "lightllm", "rtp_llm", "backend"]},
            "args": {"type": "object"},
        },
    }
    several = {
        "type": "object",
        "required": ["models"],
        "properties": {"models": {"type": "array", "items": {"type": "object"}}},
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Ray Serve config file of remora",
        "type": "object",
        "required": ["applications"],
        "properties": {"applications": {"type": "array", "items": application}},
        "$defs": {**parts, "Args": {"anyOf": [one, other, several]}},
    }


def schema_page() -> str:
    """Return `configs/remora.schema.json`."""
    return json.dumps(file_schema(), indent=1) + "\n"


def _comment(text: str, indent: int) -> list[str]:
    prefix = " " * indent + "# "
    return textwrap.wrap(
        " ".join(text.split()),
        _WIDTH,
        initial_indent=prefix,
        subsequent_indent=prefix,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _yaml(value: Any) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, width=10_000).strip()
    return text.removesuffix("...").strip()
