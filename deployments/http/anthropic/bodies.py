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

from remora.deployments.http.anthropic.blocks import BY_ROLE, Block
from remora.deployments.http.core.body_limits import AtMost, check_pieces
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
from remora.deployments.http.generation.messages import ToolName


def _as_blocks(value: Any) -> Any:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


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
            if block.type not in BY_ROLE[self.role]:
                message = f"{block.type} is no block of a message of the {self.role}"
                raise fault(message, param=f"content[{index}].type")
        return self


def _check_tool_type(value: Any) -> Any:
    if value not in (None, "custom"):
        raise unsupported_part(
            f"{str(value)[:64]!r} found, but only the client's own tools are supported: leave the "
            "type out, or send custom"
        )
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
    """Reasoning switch and budget. Reasoning is returned whole, or omitted."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[Count, Field(ge=1)] | None = None
    display: Literal["summarized", "omitted"] | None = None

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
    task_budget: Annotated[Any, only(None)] = None


_ALL = 2**31 - 1
CLEAR_TOOL_USES, CLEAR_THINKING = "clear_tool_uses_20250919", "clear_thinking_20251015"


class Threshold(Body):
    """A number of tokens, of tool uses, or of turns with reasoning."""

    type: Literal["input_tokens", "tool_uses", "thinking_turns"]
    value: Count


def _all_as_number(value: Any) -> Any:
    return {"type": "thinking_turns", "value": _ALL} if value == "all" else value


def _check_inputs(value: Any) -> bool | list[str] | None:
    is_names = isinstance(value, list) and all(isinstance(name, str) for name in value)
    if value is None or isinstance(value, bool) or is_names:
        found: bool | list[str] | None = value
        return found
    raise fault("must be true, false, or a list of names of tools")


# Fields of edits with a threshold -> the types that it may have, by the type of the edit.
_THRESHOLDS: Mapping[str, Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        CLEAR_TOOL_USES: {
            "trigger": ("input_tokens", "tool_uses"),
            "keep": ("tool_uses",),
            "clear_at_least": ("input_tokens",),
        },
        CLEAR_THINKING: {"keep": ("thinking_turns",)},
    }
)


def _check_edit_type(value: Any) -> str:
    if value in (CLEAR_TOOL_USES, CLEAR_THINKING):
        return str(value)
    raise unsupported_part(
        f"{str(value)[:64]!r} found, but only {CLEAR_TOOL_USES} and {CLEAR_THINKING} are supported"
    )


class Edit(Body):
    """What is left out of a conversation, and when."""

    type: Annotated[str, PlainValidator(_check_edit_type), WithJsonSchema({"type": "string"})]
    trigger: Threshold | None = None
    keep: Annotated[Threshold | None, BeforeValidator(_all_as_number)] = None
    clear_at_least: Threshold | None = None
    exclude_tools: list[str] | None = None
    clear_tool_inputs: Annotated[
        bool | list[str] | None,
        PlainValidator(_check_inputs),
        WithJsonSchema({"type": ["boolean", "array"]}),
    ] = None

    @model_validator(mode="after")
    def _check_thresholds(self) -> Self:
        known = _THRESHOLDS[self.type]
        for name in ("trigger", "keep", "clear_at_least"):
            given: Threshold | None = getattr(self, name)
            types = known.get(name, ())
            if given is not None and name in known and given.type not in types:
                raise fault(
                    f"is {given.type!r}; in an edit of the type {self.type} it must be "
                    f"{' or '.join(types)}",
                    param=f"{name}.type",
                )
        others = ("trigger", "clear_at_least", "exclude_tools", "clear_tool_inputs")
        for name in others if self.type == CLEAR_THINKING else ():
            if getattr(self, name) is not None:
                raise fault(f"belongs to edits of the type {CLEAR_TOOL_USES}", param=name)
        return self


class ContextManagement(Body):
    """Edits of the conversation, in order."""

    edits: Annotated[list[Edit], Field(max_length=8)] = Field(default_factory=list)


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
    context_management: ContextManagement | None = None
    mcp_servers: Annotated[Any, only([])] = None
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
    fallbacks: Annotated[Any, only([])] = None
    inference_geo: Any = None
    diagnostics: Any = None
    # Extensions of Anthropic's API, as in chat completions.
    priority: int | None = None
    max_drafts: Count | None = None
    cache_salt: Label | None = None
