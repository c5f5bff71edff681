"""Body of /v1/responses: OpenAI's Responses API for text models."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PlainValidator,
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
    TokenIds,
    as_list,
    fault,
    only,
    unsupported_part,
)
from remora.deployments.http.generation.bodies import TemplateKwargs
from remora.deployments.http.responses.items import Item
from remora.deployments.http.responses.tools import ChoiceParam, ClientTool

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
    verbosity: Literal["low", "medium", "high"] | None = None  # a hint, without effect here


class ReasoningConfig(Body):
    """Reasoning effort. Reasoning is returned whole, never as a summary."""

    effort: str | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


def _absent(message: str, *harmless: Any) -> PlainValidator:
    """Return a validator for a field that is refused for a reason."""

    def check(value: Any) -> Any:
        if value is not None and value not in harmless:
            raise unsupported_part(message)
        return value

    return PlainValidator(check)


_KEPT_CONVERSATION = "conversations are not kept here; use previous_response_id, or send all items"
_KEPT_PROMPT = "prompts are not kept here; send their text as instructions and input"
_OWN_COMPACTION = (
    "the context is not compacted by itself; use /v1/responses/compact, or truncation auto"
)
ServiceTier = Literal["auto", "default", "flex", "fast", "scale", "priority"]


def _check_includable(value: str) -> str:
    if value not in _INCLUDABLE:
        raise unsupported_part("this output is not available")
    return value


Items = Annotated[
    list[Item],
    Field(fail_fast=True),
    BeforeValidator(check_pieces),
    AtMost("max_messages"),
    BeforeValidator(_as_items),
]


def _none_as_empty(value: Any) -> Any:
    return [] if value is None else value


class CacheOptions(Body):
    """Hints for OpenAI's prompt cache, without effect here."""

    mode: Literal["implicit", "explicit"] | None = None
    ttl: str | None = None
    comparison_response_id: str | None = None
    prewarm: Annotated[Any, only(False)] = None


class ConversationBody(Body):
    """Fields that name the model and the conversation so far."""

    model: Annotated[str, Field(max_length=1024)] | None = None
    input: Annotated[Items, BeforeValidator(_none_as_empty)] = Field(default_factory=list)
    instructions: str | None = None
    previous_response_id: Label | None = None
    chat_template_kwargs: TemplateKwargs = None
    cache_salt: Label | None = None
    priority: int | None = None
    # Hints to OpenAI's service, without effect here.
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: CacheOptions | None = None
    service_tier: ServiceTier | None = None
    # Objects that only OpenAI's service keeps.
    conversation: Annotated[Any, _absent(_KEPT_CONVERSATION)] = None
    image: Annotated[Any, only(None)] = None


class PromptBody(ConversationBody):
    """Body of /v1/responses/input_tokens: the fields that make up the prompt."""

    text: TextConfig | None = None
    tools: Annotated[list[ClientTool], AtMost("max_tools")] | None = None
    tool_choice: ChoiceParam = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningConfig | None = None
    truncation: Literal["auto", "disabled"] | None = None
    personality: Annotated[Any, only(None)] = None


class ResponsesBody(PromptBody):
    """Body of /v1/responses."""

    input: Items
    store: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    background: bool | None = None
    max_output_tokens: Annotated[Count, Field(ge=1)] | None = None
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
    stop_token_ids: TokenIds | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    include_reasoning: bool | None = None
    # Client bookkeeping, and fields that only matter to tools that run on a server.
    user: str | None = None
    metadata: Metadata = None
    safety_identifier: str | None = None
    max_tool_calls: Count | None = None
    # Objects and services of OpenAI alone.
    prompt: Annotated[Any, _absent(_KEPT_PROMPT)] = None
    context_management: Annotated[Any, _absent(_OWN_COMPACTION, [])] = None
    moderation: Annotated[Any, only(None)] = None
    access_programs: Annotated[Any, only(None)] = None

    @property
    def wants_logprobs(self) -> bool:
        """Whether the answer includes log-probabilities."""
        return self.top_logprobs is not None or LOGPROBS in (self.include or ())
