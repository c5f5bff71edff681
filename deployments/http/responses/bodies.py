"""Body of /v1/responses: OpenAI's Responses API for text models."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PlainValidator,
    WithJsonSchema,
    model_validator,
)

from remora.deployments.http.core.body_limits import AtMost, check_pieces
from remora.deployments.http.core.fields import (
    Biases,
    Body,
    Count,
    Label,
    Metadata,
    NumLogprobs,
    Seed,
    StopTexts,
    StreamOptions,
    as_list,
    fault,
    only,
    unsupported_part,
)
from remora.deployments.http.generation.bodies import TemplateKwargs
from remora.deployments.http.generation.messages import ToolName
from remora.deployments.http.responses.items import Item

LOGPROBS = "message.output_text.logprobs"
# Accepted because some clients always send them; only the first has output here.
_INCLUDABLE = (
    LOGPROBS,
    "reasoning.encrypted_content",  # reasoning is returned unencrypted
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
)


def _as_items(value: Any) -> Any:
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, list):
        raise fault("must be a text or a list of items")
    return value


def _check_tool_type(value: Any) -> str:
    if value != "function":
        raise unsupported_part("only tools of the type function are supported")
    return "function"


class FunctionTool(Body):
    """A function tool available to the model."""

    type: Annotated[
        str,
        PlainValidator(_check_tool_type),
        WithJsonSchema({"type": "string", "enum": ["function"]}),
    ]
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


def _check_choice(value: Any) -> Any:
    if value is None or value in ("none", "auto", "required"):
        return value
    if not isinstance(value, dict):
        raise fault("must be none, auto, required, or an object that names a tool")
    if value.get("type") == "allowed_tools":
        tools = value.get("tools")
        if not isinstance(tools, list) or not all(map(_names_function, tools)):
            raise fault('must hold a list of tools {"type": "function", "name": ...}')
        return value
    if value.get("type") != "function":
        raise unsupported_part("only tools of the type function are supported")
    if not _names_function(value):
        raise fault('must be {"type": "function", "name": ...}')
    return value


def _names_function(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and value.get("type") == "function"
        and isinstance(value.get("name"), str)
    )


class TextFormat(Body):
    """Output format of the answer's text."""

    type: Literal["text", "json_object", "json_schema"]
    name: Label | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None

    @model_validator(mode="after")
    def _check_schema(self) -> Self:
        if self.type == "json_schema" and self.schema_ is None:
            raise fault("is required in a json_schema", param="schema")
        return self


class TextConfig(Body):
    """Format and verbosity of the answer's text."""

    format: TextFormat | None = None
    verbosity: str | None = None


class ReasoningConfig(Body):
    """Reasoning effort. Reasoning is returned whole, never as a summary."""

    effort: str | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


def _check_includable(value: str) -> str:
    if value not in _INCLUDABLE:
        raise unsupported_part("this output is not available")
    return value


class ResponsesBody(Body):
    """Body of /v1/responses."""

    model: Annotated[str, Field(max_length=1024)] | None = None
    input: Annotated[
        list[Item],
        Field(fail_fast=True),
        BeforeValidator(check_pieces),
        AtMost("max_messages"),
        BeforeValidator(_as_items),
    ]
    instructions: str | None = None
    previous_response_id: Label | None = None
    store: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_output_tokens: Annotated[Count, Field(ge=1)] | None = None
    text: TextConfig | None = None
    tools: Annotated[list[FunctionTool], AtMost("max_tools")] | None = None
    tool_choice: Annotated[
        Any, PlainValidator(_check_choice), WithJsonSchema({"type": ["string", "object"]})
    ] = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningConfig | None = None
    include: (
        Annotated[
            list[Annotated[str, AfterValidator(_check_includable)]],
            Field(max_length=len(_INCLUDABLE)),
        ]
        | None
    ) = None
    top_logprobs: NumLogprobs | None = None
    temperature: float | None = None
    top_p: float | None = None
    # Extensions of OpenAI's API, as in chat completions.
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Biases = None
    stop: Annotated[StopTexts | None, BeforeValidator(as_list)] = None
    seed: Seed | None = None
    ignore_eos: bool | None = None
    min_tokens: Count | None = None
    max_drafts: Count | None = None
    chat_template_kwargs: TemplateKwargs = None
    priority: int | None = None
    cache_salt: Label | None = None
    # Client bookkeeping, and fields that only matter to tools that run on a server.
    user: str | None = None
    metadata: Metadata = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    max_tool_calls: Count | None = None
    background: Annotated[Any, only(False)] = None
    truncation: Annotated[Any, only("disabled")] = None
    service_tier: Annotated[Any, only("auto", "default")] = None
    conversation: Annotated[Any, only(None)] = None
    prompt: Annotated[Any, only(None)] = None
    context_management: Annotated[Any, only(None)] = None
    moderation: Annotated[Any, only(None)] = None
    access_programs: Annotated[Any, only(None)] = None
    image: Annotated[Any, only(None)] = None

    @property
    def wants_logprobs(self) -> bool:
        """Whether the answer includes log-probabilities."""
        return self.top_logprobs is not None or LOGPROBS in (self.include or ())
