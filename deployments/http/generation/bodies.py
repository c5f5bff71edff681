"""OpenAI's request bodies, with the extra fields of vLLM and SGLang clients."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    WithJsonSchema,
    field_validator,
    model_validator,
)
from pydantic.json_schema import SkipJsonSchema

from remora.deployments.http.core.body_limits import AtMost, check_size
from remora.deployments.http.core.fields import (
    Body,
    Count,
    NumLogprobs,
    OpenAIBody,
    TaskId,
    fault,
    is_token_list,
    missing,
    only,
)
from remora.deployments.http.generation.constraints import ConstraintBody
from remora.deployments.http.generation.messages import Messages
from remora.deployments.http.generation.tools import ToolsBody
from remora.deployments.http.prompt_embeddings.prompts import (
    SentEmbeddings,
    check_rows_or_files_sent,
)

MAX_TEMPLATE_KWARGS = 32
MAX_DOCUMENTS = 512

PromptInput = str | list[int]


def check_prompt(value: Any, limit: str = "max_prompts") -> list[PromptInput]:
    """Return `prompt` as a list, from any of its four forms (text, texts, ids, lists of ids)."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise fault("must be a text, a list of texts, a list of token ids, or a list of such lists")
    if type(value[0]) is int:
        if not is_token_list(value):
            raise fault("must hold whole numbers only where it is a list of token ids")
        return [value]
    check_size(limit, value)
    if all(isinstance(item, str) for item in value):
        return value
    if all(is_token_list(item) for item in value):
        return value
    raise fault("must hold only texts, only token ids, or only lists of token ids")


def check_inputs(value: Any) -> list[PromptInput]:
    """Return inputs of pooling (a text, texts, token ids, or lists of token ids) as a list."""
    return check_prompt(value, "max_inputs")


Inputs = Annotated[
    list[PromptInput],
    PlainValidator(check_inputs),
    WithJsonSchema({"type": ["string", "array"]}),
]


def _check_prompt_or_none(value: Any) -> list[PromptInput]:
    return [] if value is None else check_prompt(value)


def _check_kwargs(value: Any) -> dict[str, Any] | None:
    if value is None:
        return None
    if not isinstance(value, dict) or len(value) > MAX_TEMPLATE_KWARGS:
        raise fault(f"must be an object of up to {MAX_TEMPLATE_KWARGS} entries")
    for name, item in value.items():
        if not (isinstance(name, str) and name.isidentifier() and len(name) <= 64):
            raise fault("must have plain names for keys")
        if not (item is None or isinstance(item, bool | int | float | str)):
            raise fault("must have texts, numbers, true or false for values")
    return value


def _check_documents(value: Any) -> list[dict[str, Any]] | None:
    if value is None:
        return None
    if not isinstance(value, list) or len(value) > MAX_DOCUMENTS:
        raise fault(f"must be a list of up to {MAX_DOCUMENTS} objects")
    if not all(isinstance(document, dict) for document in value):
        raise fault("must hold objects, such as one with a title and a text")
    return value


TemplateKwargs = Annotated[
    dict[str, Any] | None, PlainValidator(_check_kwargs), WithJsonSchema({"type": "object"})
]


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Documents = Annotated[
    list[dict[str, Any]] | None, PlainValidator(_check_documents), WithJsonSchema({"type": "array"})
]


class TemplateBody(ToolsBody):
    """Fields, other than messages, that decide how a conversation is rendered as a prompt."""

    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: TemplateKwargs = None
    documents: Documents = None
    reasoning_effort: Effort | None = None

    @model_validator(mode="after")
    def _check_continuation(self) -> Self:
        if self.add_generation_prompt and self.continue_final_message:
            raise fault(
                "cannot be true together with add_generation_prompt", param="continue_final_message"
            )
        return self

    @property
    def wants_generation_prompt(self) -> bool:
        """Whether the template opens the assistant's turn."""
        if self.add_generation_prompt is None:
            return not self.continue_final_message
        return self.add_generation_prompt


class PredictedPart(Body):
    """A part of a predicted output."""

    type: Literal["text"]
    text: str


def _as_predicted_parts(value: Any) -> Any:
    if isinstance(value, str):
        return [{"type": "text", "text": value}]
    if not isinstance(value, list):
        raise fault("must be a text or a list of parts of the type text")
    return value


class PredictedOutput(Body):
    """What the client expects the answer to be. It can speed the answer up, and not change it."""

    type: Literal["content"]
    content: Annotated[
        list[PredictedPart],
        Field(max_length=MAX_DOCUMENTS),
        BeforeValidator(_as_predicted_parts),
        WithJsonSchema({"type": ["string", "array"]}),
    ]

    @property
    def text(self) -> str:
        """The whole text."""
        return "".join(part.text for part in self.content)


class ChatBody(OpenAIBody, TemplateBody, ConstraintBody):
    """Body of /v1/chat/completions."""

    messages: Messages
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: NumLogprobs | None = None
    echo: bool | None = None
    store: bool | None = None
    # Whether the response includes the reasoning, keeps it apart from the text, and streams it.
    include_reasoning: bool | None = None
    separate_reasoning: bool | None = None
    stream_reasoning: bool | None = None
    thinking_token_budget: Count | None = None
    prediction: PredictedOutput | None = None
    task_id: TaskId | None = None

    @property
    def echoed(self) -> str:
        """The text that the answer repeats: of a last message by the assistant, as in vLLM."""
        last = self.messages[-1]
        return last.content or "" if self.echo and last.role == "assistant" else ""


class ChatBatchBody(ChatBody):
    """Body of /v1/chat/completions/batch: several conversations, and the fields of a chat."""

    messages: Annotated[  # type: ignore[assignment]
        list[Messages], Field(min_length=1, fail_fast=True), AtMost("max_prompts")
    ]
    stream: Annotated[Any, only(False)] = None
    store: Annotated[Any, only(False)] = None
    echo: Annotated[Any, only(False)] = None


class CompletionBody(OpenAIBody, ConstraintBody):
    """Body of /v1/completions."""

    model_config = ConfigDict(json_schema_extra={"required": ["prompt"]})

    prompt: Annotated[
        list[PromptInput],
        PlainValidator(_check_prompt_or_none),
        WithJsonSchema({"type": ["string", "array"]}),
    ] = Field(default_factory=list)
    # Omitted from the schema, which requires `prompt`: it is off unless the operator turns it on.
    prompt_embeds: Annotated[
        SentEmbeddings | None, PlainValidator(check_rows_or_files_sent), SkipJsonSchema()
    ] = None
    suffix: str | None = None
    echo: bool | None = None
    task_id: TaskId | None = None
    logprobs: NumLogprobs | None = None

    @model_validator(mode="after")
    def _check_prompts(self) -> Self:
        if self.prompt_embeds is None and not self.prompt:
            raise missing("prompt")
        if self.prompt_embeds is not None and any(self.prompt):
            raise fault("cannot be combined with prompt; send one of them", param="prompt_embeds")
        return self


class TokenizeBody(TemplateBody):
    """Body of /tokenize: one or several prompts, or a conversation."""

    model: str | None = None
    prompt: Any = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _check_input(self) -> Self:
        if self.prompt is None and self.messages is None:
            raise fault("is required unless messages is given", param="prompt")
        if self.prompt is not None and self.messages is not None:
            raise fault("cannot be combined with messages; send one of them", param="prompt")
        return self

    @field_validator("prompt")
    @classmethod
    def _check_prompt(cls, value: Any) -> Any:
        texts = value if isinstance(value, list) else [value]
        check_size("max_prompts", texts)
        if not all(isinstance(text, str) for text in texts):
            raise fault("must be a text or a list of texts")
        return value


def _check_tokens(value: Any) -> Any:
    if is_token_list(value):
        return value
    if isinstance(value, list) and all(map(is_token_list, value)):
        check_size("max_prompts", value)
        return value
    raise fault("must be a list of token ids, or a list of such lists")


class DetokenizeBody(Body):
    """Body of /detokenize: one or several lists of ids."""

    model: str | None = None
    tokens: Annotated[Any, PlainValidator(_check_tokens), WithJsonSchema({"type": "array"})]
    skip_special_tokens: bool | None = None
