"""OpenAI's request bodies, with the extra fields that vLLM and SGLang clients send."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import (
    Field,
    PlainValidator,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from remora.deployments.http.fields import (
    MAX_PROMPTS,
    MAX_TOP_LOGPROBS,
    Body,
    Count,
    OpenAIBody,
    fault,
    is_token_list,
    unsupported_part,
)

MAX_MESSAGES, MAX_PARTS = 2048, 512
MAX_TEMPLATE_KWARGS = 32

PromptInput = str | list[int]


def check_prompt(value: Any) -> list[PromptInput]:
    """Bring the four forms of `prompt` (text, texts, ids, lists of ids) into one: a list."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise fault("must be a text, a list of texts, a list of token ids, or a list of such lists")
    if type(value[0]) is int:
        if not is_token_list(value):
            raise fault("a list of token ids must hold whole numbers only")
        return [value]
    if len(value) > MAX_PROMPTS:
        raise fault(f"holds {len(value)} prompts; at most {MAX_PROMPTS} are allowed")
    if all(isinstance(item, str) for item in value):
        return value
    if all(is_token_list(item) for item in value):
        return value
    raise fault("must hold only texts, only token ids, or only lists of token ids")


def _check_content(value: Any) -> str | None:
    """Return the text of a message; parts are joined by newlines."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list) or not value or len(value) > MAX_PARTS:
        raise fault(f"must be a text or a list of 1 to {MAX_PARTS} parts")
    return "\n".join(_check_part(part) for part in value)


def _check_part(part: Any) -> str:
    if not isinstance(part, dict) or not isinstance(part.get("type"), str):
        raise fault('each part must be an object with a "type"')
    if part["type"] in ("image_url", "input_audio", "video_url", "audio_url", "file", "image"):
        raise unsupported_part("this model takes text only")
    if part["type"] not in ("text", "input_text") or not isinstance(part.get("text"), str):
        raise fault('each part must be {"type": "text", "text": ...}')
    text: str = part["text"]
    return text


def _check_kwargs(value: Any) -> dict[str, Any] | None:
    if value is None:
        return None
    if not isinstance(value, dict) or len(value) > MAX_TEMPLATE_KWARGS:
        raise fault(f"must be an object of up to {MAX_TEMPLATE_KWARGS} entries")
    for name, item in value.items():
        if not (isinstance(name, str) and name.isidentifier() and len(name) <= 64):
            raise fault("its keys must be plain names")
        if not (item is None or isinstance(item, bool | int | float | str)):
            raise fault("its values must be texts, numbers, true or false")
    return value


Content = Annotated[
    str | None, PlainValidator(_check_content), WithJsonSchema({"type": ["string", "array"]})
]
TemplateKwargs = Annotated[
    dict[str, Any] | None, PlainValidator(_check_kwargs), WithJsonSchema({"type": "object"})
]


class Message(Body):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Content = None
    name: Annotated[str, Field(max_length=256)] | None = None
    refusal: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: Any = None
    function_call: Any = None
    tool_call_id: Any = None

    @field_validator("role")
    @classmethod
    def _check_role(cls, role: str) -> str:
        if role in ("tool", "function"):
            raise unsupported_part("tool results are not supported yet")
        return role

    @field_validator("tool_calls", "function_call", "tool_call_id")
    @classmethod
    def _check_tools(cls, value: Any) -> Any:
        if value not in (None, []):
            raise unsupported_part("tool calls are not supported yet")
        return value

    @model_validator(mode="after")
    def _check_text(self) -> Self:
        if self.content is None and (self.role != "assistant" or self.refusal is None):
            raise fault("is required", param="content")
        return self

    def as_template_message(self) -> dict[str, Any]:
        """Return the message as chat templates expect it."""
        role = "system" if self.role == "developer" else self.role
        text = self.content if self.content is not None else self.refusal
        message: dict[str, Any] = {"role": role, "content": text}
        if self.name is not None:
            message["name"] = self.name
        reasoning = self.reasoning_content or self.reasoning
        if reasoning is not None:
            message["reasoning_content"] = reasoning
        return message


Messages = Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]


class TemplateBody(Body):
    """How messages become a prompt."""

    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: TemplateKwargs = None

    @model_validator(mode="after")
    def _check_continuation(self) -> Self:
        if self.add_generation_prompt and self.continue_final_message:
            raise fault(
                "cannot be true beside add_generation_prompt", param="continue_final_message"
            )
        return self

    @property
    def wants_generation_prompt(self) -> bool:
        """Whether the template opens the assistant's turn."""
        if self.add_generation_prompt is None:
            return not self.continue_final_message
        return self.add_generation_prompt


class ChatBody(OpenAIBody, TemplateBody):
    """Body of /v1/chat/completions."""

    messages: Messages
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    echo: Literal[False] | None = None


class CompletionBody(OpenAIBody):
    """Body of /v1/completions."""

    prompt: Annotated[
        list[PromptInput],
        PlainValidator(check_prompt),
        WithJsonSchema({"type": ["string", "array"]}),
    ]
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None


class TokenizeBody(TemplateBody):
    """Body of /tokenize: a prompt (or several), or a conversation."""

    model: str | None = None
    prompt: Any = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _check_input(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise fault("one of prompt and messages is required", param="prompt")
        return self

    @field_validator("prompt")
    @classmethod
    def _check_prompt(cls, value: Any) -> Any:
        texts = value if isinstance(value, list) else [value]
        if len(texts) > MAX_PROMPTS or not all(isinstance(text, str) for text in texts):
            raise fault(f"must be a text or a list of up to {MAX_PROMPTS} texts")
        return value


def _check_tokens(value: Any) -> Any:
    if is_token_list(value):
        return value
    if isinstance(value, list) and len(value) <= MAX_PROMPTS and all(map(is_token_list, value)):
        return value
    raise fault("must be a list of token ids, or a list of such lists")


class DetokenizeBody(Body):
    """Body of /detokenize: ids, or several lists of them."""

    model: str | None = None
    tokens: Annotated[Any, PlainValidator(_check_tokens), WithJsonSchema({"type": "array"})]
    skip_special_tokens: bool | None = None
