"""Bodies of Ollama's /api/chat, /api/generate and /api/show, with their OpenAI equivalents."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PlainValidator, WithJsonSchema

from remora.deployments.http.core.body_limits import AtMost, check_pieces
from remora.deployments.http.core.field_names import Renames, renames
from remora.deployments.http.core.fields import (
    Body,
    NumLogprobs,
    Seed,
    StopTexts,
    as_list,
    fault,
    only,
)
from remora.deployments.http.generation.messages import MAX_CALLS

# Fields of the translated body -> fields of the caller's body, for error messages.
RENAMES: Renames = renames(
    (r"^messages\[(\d+)\]\.reasoning_content", r"messages[\1].thinking"),
    (r"^messages\[(\d+)\]\.name", r"messages[\1].tool_name"),
    (r"^response_format", "format"),
    (r"^reasoning_effort", "think"),
    (r"^(max_tokens|max_completion_tokens)$", "options.num_predict"),
    (r"^repetition_penalty", "options.repeat_penalty"),
    (
        r"^(temperature|top_k|top_p|min_p|typical_p|seed|stop|presence_penalty|frequency_penalty)",
        r"options.\1",
    ),
)
MAX_CONTEXT_IDS = 2**20
_DEGREES = ("low", "medium", "high", "max")


def _check_format(value: Any) -> Any:
    if value in (None, ""):
        return None
    if value == "json" or isinstance(value, dict):
        return value
    raise fault('must be "json" or a JSON schema')


def _check_keep_alive(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float | str | None):
        raise fault('must be a number of seconds, or a text such as "5m"')
    return value


def _check_think(value: Any) -> Any:
    if value is None or isinstance(value, bool) or value in _DEGREES:
        return value
    raise fault(f"must be true, false, {', '.join(_DEGREES[:-1])} or {_DEGREES[-1]}")


Anything = Annotated[Any, WithJsonSchema({})]
Format = Annotated[
    Any, PlainValidator(_check_format), WithJsonSchema({"type": ["string", "object"]})
]
KeepAlive = Annotated[
    Any, PlainValidator(_check_keep_alive), WithJsonSchema({"type": ["string", "number"]})
]
Think = Annotated[
    bool | str | None,
    PlainValidator(_check_think),
    WithJsonSchema({"anyOf": [{"type": "boolean"}, {"type": "string", "enum": [*_DEGREES]}]}),
]
NoImages = Annotated[Any, only([]), WithJsonSchema({"type": "array"})]


class OllamaOptions(Body):
    """Sampling options. Those after `num_ctx` configure model loading and have no effect here."""

    num_predict: Annotated[int, Field(ge=-2, lt=2**31)] | None = None
    temperature: float | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: Seed | None = None
    stop: Annotated[StopTexts | None, BeforeValidator(as_list)] = None
    repeat_penalty: float | None = None
    repeat_last_n: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    typical_p: float | None = None
    tfs_z: Annotated[Any, only(1, 1.0)] = None
    mirostat: Annotated[Any, only(0)] = None
    mirostat_tau: Anything = None
    mirostat_eta: Anything = None
    penalize_newline: bool | None = None
    num_ctx: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    num_keep: int | None = None
    num_batch: int | None = None
    num_gpu: int | None = None
    main_gpu: int | None = None
    num_thread: int | None = None
    numa: bool | None = None
    low_vram: bool | None = None
    f16_kv: bool | None = None
    vocab_only: bool | None = None
    use_mmap: bool | None = None
    use_mlock: bool | None = None
    logits_all: bool | None = None
    embedding_only: bool | None = None

    def as_openai(self) -> dict[str, Any]:
        """Return the options under OpenAI's names."""
        fields = {
            "temperature": self.temperature,
            "top_k": self.top_k,
            "top_p": self.top_p,
            "min_p": self.min_p,
            "typical_p": self.typical_p,
            "seed": self.seed,
            "stop": self.stop,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "repetition_penalty": self.repeat_penalty,
            "max_tokens": self.max_tokens,
        }
        if self.repeat_last_n == 0:
            fields |= {"presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0}
        return {name: value for name, value in fields.items() if value is not None}

    @property
    def max_tokens(self) -> int | None:
        """The output limit in tokens; None = as many as fit."""
        return self.num_predict if (self.num_predict or 0) > 0 else None


class OllamaFunction(Body):
    """The function and arguments of an earlier tool call."""

    name: str
    arguments: dict[str, Any] = Field(default_factory=dict)
    index: int | None = None


class OllamaCall(Body):
    """A tool call of an earlier message."""

    id: str | None = None
    type: Literal["function"] | None = None
    function: OllamaFunction


class OllamaMessage(Body):
    """One message of a conversation."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    images: NoImages = None
    tool_calls: Annotated[list[OllamaCall], Field(max_length=MAX_CALLS)] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None

    def as_openai(self) -> dict[str, Any]:
        """Return the message under OpenAI's names."""
        message: dict[str, Any] = {"role": self.role, "content": self.content or ""}
        if self.thinking:
            message["reasoning_content"] = self.thinking
        if self.tool_name is not None:
            message["name"] = self.tool_name
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        if self.tool_calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "function": {
                        "name": call.function.name,
                        "arguments": call.function.arguments,
                    },
                }
                for call in self.tool_calls
            ]
        return message


class OllamaBody(Body):
    """Fields that /api/chat and /api/generate share."""

    model: Annotated[str, Field(max_length=1024)] | None = None
    stream: bool | None = None
    format: Format = None
    options: OllamaOptions | None = None
    think: Think = None
    keep_alive: KeepAlive = None
    logprobs: bool | None = None
    top_logprobs: NumLogprobs | None = None
    truncate: bool | None = None
    # An answer ends where the context does; earlier tokens are never dropped to continue it.
    shift: Annotated[Any, only(False)] = None

    @property
    def num_ctx(self) -> int | None:
        """The context length of this request, if it limits it."""
        return (self.options.num_ctx or None) if self.options else None

    def shared(self) -> dict[str, Any]:
        """Return the fields that OpenAI's chats and completions share."""
        fields = {} if self.options is None else self.options.as_openai()
        if self.format == "json":
            fields["response_format"] = {"type": "json_object"}
        elif self.format is not None:
            schema = {"name": "format", "schema": self.format}
            fields["response_format"] = {"type": "json_schema", "json_schema": schema}
        return fields

    @property
    def streams(self) -> bool:
        """Whether the client wants a stream, which is the default."""
        return self.stream is not False


class OllamaChatBody(OllamaBody):
    """Body of /api/chat."""

    messages: (
        Annotated[list[OllamaMessage], BeforeValidator(check_pieces), AtMost("max_messages")] | None
    ) = None
    tools: Annotated[list[dict[str, Any]], AtMost("max_tools")] | None = None


class OllamaGenerateBody(OllamaBody):
    """Body of /api/generate."""

    prompt: str | None = None
    system: str | None = None
    raw: bool | None = None
    images: NoImages = None
    suffix: str | None = None
    template: Annotated[Any, only("")] = None
    context: Annotated[list[int], Field(max_length=MAX_CONTEXT_IDS)] | None = None


class PullBody(Body):
    """Body of /api/pull."""

    model: Annotated[str, Field(max_length=1024)] | None = None
    name: Annotated[str, Field(max_length=1024)] | None = None
    stream: bool | None = None
    insecure: bool | None = None


class ShowBody(Body):
    """Body of /api/show."""

    model: Annotated[str, Field(max_length=1024)] | None = None
    name: Annotated[str, Field(max_length=1024)] | None = None
    verbose: bool | None = None


class EmbedBody(Body):
    """Body of /api/embed.

    truncate:  whether texts that are too long are truncated
    """

    model: Annotated[str, Field(max_length=1024)] | None = None
    input: Annotated[str | list[str], WithJsonSchema({"type": ["string", "array"]})]
    truncate: bool | None = None
    dimensions: Annotated[int, Field(ge=1, le=2**20)] | None = None
    options: OllamaOptions | None = None
    keep_alive: KeepAlive = None


class EmbedPromptBody(Body):
    """Body of /api/embeddings, the older path, which takes one text."""

    model: Annotated[str, Field(max_length=1024)] | None = None
    prompt: str
    options: OllamaOptions | None = None
    keep_alive: KeepAlive = None
