"""The tools of a chat body, from `tools` or the deprecated `functions`.

The model sees a custom tool, whose input is one free text, as a function with one text parameter.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any, Self

from pydantic import PlainValidator, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

from remora.configs.errors import InvalidRequest
from remora.deployments.http.core.body_limits import AtMost, check_size
from remora.deployments.http.core.fields import Body, fault, unsupported_part
from remora.deployments.http.core.wire import dumps, parse_json
from remora.deployments.http.generation.messages import CUSTOM_INPUT, ToolName
from remora.deployments.parsers.tools import NO_TOOLS, Tool, ToolChoice, ToolUse

NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}}


@dataclass(frozen=True, slots=True)
class Chosen:
    """A tool choice, and the names of the tools that it is limited to; none = all."""

    choice: ToolChoice
    names: tuple[str, ...] = ()


class FunctionBody(Body):
    """A function offered to the model."""

    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def as_tool(self) -> Tool:
        """Return the function as a tool for the parsers."""
        return Tool(
            name=self.name,
            description=self.description,
            parameters=self.parameters or NO_PARAMETERS,
            strict=bool(self.strict),
        )


TOOL_TYPES = (FUNCTION, CUSTOM) = ("function", "custom")
# Parameters of the function that stands for a custom tool.
TEXT_INPUT: Mapping[str, Any] = MappingProxyType(
    {
        "type": "object",
        "properties": {CUSTOM_INPUT: {"type": "string"}},
        "required": [CUSTOM_INPUT],
        "additionalProperties": False,
    }
)


def _check_type(value: Any) -> Any:
    if value not in TOOL_TYPES:
        raise unsupported_part("only tools of the types function and custom are supported")
    return value


def _check_input_format(value: Any) -> Any:
    kind = value.get("type") if isinstance(value, dict) else None
    if value is not None and kind != "text":
        raise unsupported_part("only the format text of a custom tool's input is supported")
    return value


InputFormat = Annotated[
    Any, PlainValidator(_check_input_format), WithJsonSchema({"type": "object"})
]


class CustomBody(Body):
    """A custom tool offered to the model, whose input is one text."""

    name: ToolName
    description: str | None = None
    format: InputFormat = None

    def as_function(self) -> FunctionBody:
        """Return the function that stands for the tool."""
        return FunctionBody(
            name=self.name, description=self.description, parameters=dict(TEXT_INPUT)
        )


class ToolBody(Body):
    """One entry of `tools`."""

    type: Annotated[
        str,
        PlainValidator(_check_type),
        WithJsonSchema({"type": "string", "enum": list(TOOL_TYPES)}),
    ]
    function: FunctionBody | None = None
    custom: CustomBody | None = None

    @model_validator(mode="after")
    def _check_kind(self) -> Self:
        if getattr(self, self.type) is None:
            raise PydanticCustomError("missing", "is required", {"param": self.type})
        return self

    @property
    def offered(self) -> FunctionBody:
        """The function that the model sees."""
        if self.type == CUSTOM and self.custom is not None:
            return self.custom.as_function()
        assert self.function is not None  # as `_check_kind` has found
        return self.function


def custom_arguments(text: str) -> str:
    """Return the arguments of the function that stands for a custom tool."""
    return dumps({CUSTOM_INPUT: text}).decode()


def custom_input(arguments: str) -> str:
    """Return the input of a call of a custom tool; a call that is cut off has its raw arguments."""
    try:
        value = parse_json(arguments.encode())
    except (InvalidRequest, UnicodeEncodeError):
        return arguments
    text = value.get(CUSTOM_INPUT) if isinstance(value, dict) else None
    return text if isinstance(text, str) else arguments


def _name_in(value: Any) -> str:
    """Return the name in {"type": "function", "function": {"name": ...}}; custom likewise."""
    kind = value.get("type", FUNCTION) if isinstance(value, dict) else None
    if kind in TOOL_TYPES:
        tool = value.get(kind)
        name = tool.get("name") if isinstance(tool, dict) else None
        if isinstance(name, str):
            return name
    raise fault('must be {"type": "function", "function": {"name": ...}}')


def _check_choice(value: Any) -> Chosen | None:
    if value is None:
        return None
    if isinstance(value, str):
        if value in ("none", "auto", "required"):
            return Chosen(ToolChoice(value))
        return Chosen(ToolChoice.NAMED, (value,))
    if isinstance(value, dict) and value.get("type") == "allowed_tools":
        return _check_allowed(value.get("allowed_tools"))
    return Chosen(ToolChoice.NAMED, (_name_in(value),))


def _check_allowed(value: Any) -> Chosen:
    tools = value.get("tools") if isinstance(value, dict) else None
    if not isinstance(tools, list) or not tools:
        raise fault("allowed_tools must hold a list of tools")
    check_size("max_tools", tools)
    if value.get("mode") not in ("auto", "required"):
        raise fault("allowed_tools must have the mode auto or required")
    names = tuple(_name_in(tool) for tool in tools)
    return Chosen(ToolChoice(value["mode"]), names)


def _check_function_call(value: Any) -> Chosen | None:
    if value is None:
        return None
    if value in ("none", "auto"):
        return Chosen(ToolChoice(value))
    if isinstance(value, dict) and isinstance(value.get("name"), str):
        return Chosen(ToolChoice.NAMED, (value["name"],))
    raise fault('must be none, auto, or {"name": ...}')


_CHOICE_SCHEMA = WithJsonSchema({"type": ["string", "object"]})


class ToolsBody(Body):
    """Fields about tools."""

    tools: Annotated[list[ToolBody], AtMost("max_tools")] | None = None
    tool_choice: Annotated[Chosen | None, PlainValidator(_check_choice), _CHOICE_SCHEMA] = None
    parallel_tool_calls: bool | None = None
    functions: Annotated[list[FunctionBody], AtMost("max_tools")] | None = None
    function_call: Annotated[
        Chosen | None, PlainValidator(_check_function_call), _CHOICE_SCHEMA
    ] = None

    @property
    def custom_names(self) -> frozenset[str]:
        """The names of the custom tools."""
        return frozenset(t.custom.name for t in self.tools or () if t.type == CUSTOM and t.custom)

    @property
    def is_old(self) -> bool:
        """Whether the request uses `functions`, the predecessor of `tools`."""
        return bool(self.functions)


def tool_use_of(body: ToolsBody) -> ToolUse:
    """Return the tools of a body and the choice between them. Raises InvalidRequest."""
    if body.tools and body.functions:
        raise InvalidRequest("functions cannot be combined with tools.", "functions")
    if body.tool_choice is not None and body.function_call is not None:
        raise InvalidRequest("function_call cannot be combined with tool_choice.", "function_call")
    list_name = "functions" if body.is_old else "tools"
    choice_name = "tool_choice" if body.function_call is None else "function_call"
    chosen = body.tool_choice or body.function_call or Chosen(ToolChoice.AUTO)
    given = body.functions or [tool.offered for tool in body.tools or ()]
    tools = tuple(function.as_tool() for function in given)
    if not tools:
        return _no_tools(chosen, choice_name)
    _check_tools(tools, list_name)
    _check_names(chosen.names, {tool.name for tool in tools}, choice_name, list_name)
    is_named = chosen.choice is ToolChoice.NAMED
    if chosen.names and not is_named:
        tools = tuple(tool for tool in tools if tool.name in chosen.names)
    return ToolUse(
        tools=tools,
        choice=chosen.choice,
        name=chosen.names[0] if is_named else None,
        parallel=body.parallel_tool_calls is not False and not body.is_old,
    )


def _no_tools(chosen: Chosen, param: str) -> ToolUse:
    if chosen.choice not in (ToolChoice.NONE, ToolChoice.AUTO) or chosen.names:
        raise InvalidRequest(f"{param} needs tools to choose from.", param)
    return NO_TOOLS


def _check_tools(tools: Iterable[Tool], param: str) -> None:
    seen: set[str] = set()
    for tool in tools:
        if tool.name in seen:
            raise InvalidRequest(f"{param} holds two tools named {tool.name!r}.", param)
        seen.add(tool.name)
        if tool.parameters.get("type", "object") != "object":
            message = f"{param}: the parameters of {tool.name!r} must be the schema of an object."
            raise InvalidRequest(message, param)


def _check_names(names: Iterable[str], known: set[str], param: str, list_name: str) -> None:
    for name in names:
        if name not in known:
            message = f"{param} names {name[:128]!r}, which is not among the {list_name}."
            raise InvalidRequest(message, param)


def template_tools(use: ToolUse) -> list[dict[str, Any]] | None:
    """Return the tools as chat templates expect them; None = the model sees no tools."""
    if not use.tools or use.choice is ToolChoice.NONE:
        return None
    return [{"type": "function", "function": _function(tool)} for tool in use.tools]


def _function(tool: Tool) -> dict[str, Any]:
    described = {} if tool.description is None else {"description": tool.description}
    return {"name": tool.name, **described, "parameters": dict(tool.parameters)}
