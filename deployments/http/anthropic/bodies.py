"""Bodies of /v1/messages and its count_tokens: Anthropic's API for text models."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PlainValidator,
    WithJsonSchema,
    model_validator,
)

from remora.deployments.http.core.body_limits import AtMost, check_pieces, check_size
from remora.deployments.http.core.fields import (
    Body,
    Count,
    Label,
    StopTexts,
    fault,
    only,
    unsupported_part,
)
from remora.deployments.http.generation.bodies import TemplateKwargs
from remora.deployments.http.generation.messages import CallId, ToolName

# Required fields of a block by type.
_REQUIRED: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "text": ("text",),
        "thinking": ("thinking",),
        "redacted_thinking": (),
        "tool_use": ("id", "name", "input"),
        "tool_result": ("tool_use_id",),
    }
)
_BY_ROLE: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "user": ("text", "tool_result"),
        "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
        "system": ("text",),
    }
)


def _check_block_type(value: Any) -> str:
    if isinstance(value, str) and value in _REQUIRED:
        return value
    raise unsupported_part(f"only blocks of these types are supported: {', '.join(_REQUIRED)}")


def _check_result(value: Any) -> str:
    """Return the text of a tool result."""
    if value is None or isinstance(value, str):
        return value or ""
    if not isinstance(value, list):
        raise fault("must be a text or a list of blocks of text")
    check_size("max_parts", value)
    return "\n".join(_check_result_part(part, index) for index, part in enumerate(value))


def _check_result_part(part: Any, index: int) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if isinstance(kind, str) and kind != "text":
        raise unsupported_part(f"block [{index}] is no text, and this model takes text only")
    if kind is None or not isinstance(part.get("text"), str):
        raise fault(f'block [{index}] must be {{"type": "text", "text": ...}}')
    text: str = part["text"]
    return text


def _as_blocks(value: Any) -> Any:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


class Block(Body):
    """A content block: text, reasoning, a tool call, or a tool result."""

    type: Annotated[
        str,
        PlainValidator(_check_block_type),
        WithJsonSchema({"type": "string", "enum": list(_REQUIRED)}),
    ]
    text: str | None = None
    thinking: str | None = None
    id: CallId | None = None
    name: ToolName | None = None
    input: dict[str, Any] | None = None
    tool_use_id: CallId | None = None
    content: Annotated[
        str, PlainValidator(_check_result), WithJsonSchema({"type": ["string", "array"]})
    ] = ""
    is_error: bool | None = None
    # Fields of Anthropic's own service, without effect here.
    signature: str | None = None
    data: str | None = None
    cache_control: Any = None
    citations: Any = None
    caller: Any = None
    toolset_name: Any = None

    @model_validator(mode="after")
    def _check_kind(self) -> Self:
        for name in _REQUIRED[self.type]:
            if getattr(self, name) is None:
                raise fault(f"is required in a block of the type {self.type}", param=name)
        return self


Blocks = Annotated[
    list[Block], Field(fail_fast=True), AtMost("max_parts"), BeforeValidator(_as_blocks)
]


def _check_system(blocks: list[Block] | None) -> list[Block] | None:
    if any(block.type != "text" for block in blocks or ()):
        raise fault("must be a text or a list of blocks of text")
    return blocks


class Turn(Body):
    """One message of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: Blocks

    @model_validator(mode="after")
    def _check_blocks(self) -> Self:
        for index, block in enumerate(self.content):
            if block.type not in _BY_ROLE[self.role]:
                message = f"{block.type} is no block of a message of the {self.role}"
                raise fault(message, param=f"content[{index}].type")
        return self


def _check_tool_type(value: Any) -> Any:
    if value not in (None, "custom"):
        raise unsupported_part("only tools of the client's own are supported")
    return value


class ToolParam(Body):
    """A tool available to the model."""

    type: Annotated[Any, PlainValidator(_check_tool_type), WithJsonSchema({"const": "custom"})] = (
        None
    )
    name: ToolName
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    # Hints to Anthropic's own service, without effect here.
    cache_control: Any = None
    input_examples: Any = None
    eager_input_streaming: Any = None
    defer_loading: Any = None
    allowed_callers: Any = None


class Choice(Body):
    """Tool choice: whether the model may, must or must not call a tool."""

    type: Literal["auto", "any", "tool", "none"]
    name: ToolName | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _check_name(self) -> Self:
        if self.type == "tool" and self.name is None:
            raise fault("is required in a choice of the type tool", param="name")
        return self


class ThinkingConfig(Body):
    """Reasoning switch and budget. Reasoning is always returned whole."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[Count, Field(ge=1)] | None = None
    display: Annotated[Any, only("summarized")] = None

    @model_validator(mode="after")
    def _check_budget(self) -> Self:
        if self.type == "enabled" and self.budget_tokens is None:
            raise fault("is required where thinking is enabled", param="budget_tokens")
        return self


class OutputFormat(Body):
    """Output format of the answer's text."""

    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(Body):
    """Reasoning effort and output format."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class UserMetadata(Body):
    """Client bookkeeping."""

    user_id: str | None = None


class CountTokensBody(Body):
    """Body of /v1/messages/count_tokens: the fields that make up the prompt."""

    model: Annotated[str, Field(max_length=1024)] | None = None
    messages: Annotated[
        list[Turn],
        Field(min_length=1, fail_fast=True),
        BeforeValidator(check_pieces),
        AtMost("max_messages"),
    ]
    system: Annotated[Blocks | None, AfterValidator(_check_system)] = None
    tools: Annotated[list[ToolParam], AtMost("max_tools")] | None = None
    tool_choice: Choice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None  # its place in beta versions
    chat_template_kwargs: TemplateKwargs = None
    # Hints to Anthropic's own service, without effect here.
    cache_control: Any = None
    speed: Annotated[Any, only("standard")] = None
    user_profile_id: Any = None
    workspace_id: Any = None

    @model_validator(mode="after")
    def _check_format(self) -> Self:
        if self.output_format and self.output_config and self.output_config.format:
            raise fault("cannot be combined with output_config.format", param="output_format")
        return self


class MessagesBody(CountTokensBody):
    """Body of /v1/messages."""

    max_tokens: Annotated[Count, Field(ge=1)]
    stop_sequences: StopTexts | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Count | None = None
    metadata: UserMetadata | None = None
    service_tier: Annotated[Any, only("auto", "standard_only")] = None
    container: Annotated[Any, only(None)] = None
    mcp_servers: Annotated[Any, only([])] = None
    inference_geo: Any = None
    diagnostics: Any = None
    # Extensions of Anthropic's API, as in chat completions.
    priority: int | None = None
    max_drafts: Count | None = None
    cache_salt: Label | None = None
