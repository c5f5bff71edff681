"""Tools of /v1/responses: functions, and custom tools, whose input is one free text.

The model sees a custom tool as a function with a single text parameter.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Annotated, Any, Self

from pydantic import Field, PlainValidator, WithJsonSchema, model_validator

from remora.deployments.http.core.fields import Body, fault, only, unsupported_part
from remora.deployments.http.generation.messages import ToolName
from remora.deployments.http.generation.tools import (
    CUSTOM,
    FUNCTION,
    TEXT_INPUT,
    TOOL_TYPES,
    InputFormat,
)

_CLIENT_RUNS = (
    "only tools of the types function and custom, which the client runs, are supported: define one "
    "of these in its place"
)


def _check_type(value: Any) -> str:
    if isinstance(value, str) and value in TOOL_TYPES:
        return value
    raise unsupported_part(f"{str(value)[:64]!r} found; {_CLIENT_RUNS}")


class ClientTool(Body):
    """A tool that the client runs."""

    type: Annotated[
        str,
        PlainValidator(_check_type),
        WithJsonSchema({"type": "string", "enum": list(TOOL_TYPES)}),
    ]
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    format: InputFormat = None
    allowed_callers: Annotated[Any, only(["direct"])] = None
    defer_loading: Annotated[Any, only(False)] = None
    is_async: Annotated[Any, only(False), Field(alias="async")] = None
    output_schema: Any = None  # of the tool's results, which the model does not see

    @model_validator(mode="after")
    def _check_kind(self) -> Self:
        if self.type == CUSTOM and self.parameters is not None:
            raise fault("belongs to tools of the type function", param="parameters")
        if self.type == FUNCTION and self.format is not None:
            raise fault("belongs to tools of the type custom", param="format")
        return self

    def as_function(self) -> dict[str, Any]:
        """Return the tool in the form of a chat body."""
        function = {
            "name": self.name,
            "description": self.description,
            "parameters": dict(TEXT_INPUT) if self.type == CUSTOM else self.parameters,
            "strict": self.strict,
        }
        return {"type": FUNCTION, "function": function}

    def show(self) -> dict[str, Any]:
        """Return the tool as a response repeats it."""
        shown = {"type": self.type, "name": self.name, "description": self.description}
        if self.type == CUSTOM:
            return shown | {"format": self.format or {"type": "text"}}
        return shown | {"parameters": self.parameters, "strict": self.strict}


def custom_names(tools: Collection[ClientTool] | None) -> frozenset[str]:
    """Return the names of the custom tools."""
    return frozenset(tool.name for tool in tools or () if tool.type == CUSTOM)


def _check_choice(value: Any) -> Any:
    if value is None or value in ("none", "auto", "required"):
        return value
    if not isinstance(value, dict):
        raise fault("must be none, auto, required, or an object that names a tool")
    if value.get("type") == "allowed_tools":
        tools = value.get("tools")
        if not isinstance(tools, list) or not all(map(_names_tool, tools)):
            raise fault('must hold a list of tools {"type": "function", "name": ...}')
        return value
    if value.get("type") not in TOOL_TYPES:
        raise unsupported_part(f"{str(value.get('type'))[:64]!r} found; {_CLIENT_RUNS}")
    if not _names_tool(value):
        raise fault(f'must be {{"type": "{value["type"]}", "name": ...}}')
    return value


def _names_tool(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and value.get("type") in TOOL_TYPES
        and isinstance(value.get("name"), str)
    )


ChoiceParam = Annotated[
    Any, PlainValidator(_check_choice), WithJsonSchema({"type": ["string", "object"]})
]


def chat_choice(choice: Any) -> Any:
    """Return a tool choice in the form of a chat body."""
    if not isinstance(choice, dict):
        return choice
    if choice["type"] != "allowed_tools":
        return _named(choice)
    allowed = {"mode": choice.get("mode"), "tools": [_named(tool) for tool in choice["tools"]]}
    return {"type": "allowed_tools", "allowed_tools": allowed}


def _named(tool: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": FUNCTION, "function": {"name": tool["name"]}}
