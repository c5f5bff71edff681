"""Chat messages, as clients send them and as chat templates expect them."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import (
    BeforeValidator,
    Field,
    PlainValidator,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from remora.configs.errors import InvalidRequest
from remora.deployments.http.core.body_limits import AtMost, check_pieces, check_size
from remora.deployments.http.core.fields import Body, fault, unsupported_part
from remora.deployments.http.core.wire import parse_json

MAX_CALLS = 128
# OpenAI's function names, plus dots for names of MCP tools. OpenAI allows 64 characters, Anthropic
# 128: every dialect becomes a chat body, and a longer name does no harm in any.
TOOL_NAME = r"^[a-zA-Z0-9_.-]{1,128}$"

CUSTOM_INPUT = "input"  # the one argument of the function that stands for a custom tool
_TEXT_PARTS = ("text", "input_text", "output_text")
_MEDIA_PARTS = ("image_url", "input_audio", "video_url", "audio_url", "file", "image")


def _check_content(value: Any) -> str | None:
    """Return the text of a message, its parts joined by newlines."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise fault("must be a text or a list of parts, one at least")
    check_size("max_parts", value)
    return "\n".join(_check_part(part) for part in value)


def _check_part(part: Any) -> str:
    if not isinstance(part, dict) or not isinstance(part.get("type"), str):
        raise fault('each part must be an object with a "type"')
    if part["type"] in _MEDIA_PARTS:
        raise unsupported_part("this model takes text only")
    name = "refusal" if part["type"] == "refusal" else "text"
    if part["type"] not in (*_TEXT_PARTS, "refusal") or not isinstance(part.get(name), str):
        raise fault('each part must be {"type": "text", "text": ...}')
    text: str = part[name]
    return text


def _check_arguments(value: Any) -> dict[str, Any]:
    """Return the arguments of a call as an object; clients send its JSON text."""
    if isinstance(value, str):
        try:
            value = parse_json(value.encode()) if value.strip() else {}
        except (InvalidRequest, UnicodeEncodeError):
            raise fault("must be the JSON text of an object") from None
    if not isinstance(value, dict):
        raise fault("must be the JSON text of an object")
    return value


Content = Annotated[
    str | None, PlainValidator(_check_content), WithJsonSchema({"type": ["string", "array"]})
]
Arguments = Annotated[
    dict[str, Any], PlainValidator(_check_arguments), WithJsonSchema({"type": "string"})
]
ToolName = Annotated[str, Field(pattern=TOOL_NAME)]
CallId = Annotated[str, Field(max_length=256)]
# Any role, since templates decide which they take. Nothing that could end a turn's header.
Role = Annotated[str, Field(pattern=r"^[a-zA-Z][a-zA-Z0-9_.-]{0,63}$")]


class CalledFunction(Body):
    """The function and arguments of a call in an earlier turn."""

    name: ToolName
    arguments: Arguments = Field(default_factory=dict)


class CalledCustom(Body):
    """The custom tool and its input of a call in an earlier turn."""

    name: ToolName
    input: str


class MessageCall(Body):
    """A tool call of an earlier turn. That of a custom tool is kept as one of a function."""

    id: CallId | None = None
    index: int | None = None
    type: Literal["function", "custom"] | None = None
    function: CalledFunction | None = None
    custom: CalledCustom | None = None

    @model_validator(mode="after")
    def _check_kind(self) -> Self:
        kind = self.type or ("function" if self.custom is None else "custom")
        if getattr(self, kind) is None:
            raise fault(f"is required in a call of the type {kind}", param=kind)
        return self

    @property
    def called(self) -> CalledFunction:
        """The function and its arguments; of a custom tool, the stand-in for it."""
        if self.function is not None:
            return self.function
        custom = self.custom
        assert custom is not None  # as `_check_kind` has found
        return CalledFunction(name=custom.name, arguments={CUSTOM_INPUT: custom.input})

    def as_template_call(self) -> dict[str, Any]:
        """Return the call as chat templates expect it."""
        function = {"name": self.called.name, "arguments": self.called.arguments}
        call = {"type": "function", "function": function}
        return call if self.id is None else {"id": self.id, **call}


class Message(Body):
    """One turn of a conversation."""

    role: Role
    content: Content = None
    name: Annotated[str, Field(max_length=256)] | None = None
    refusal: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: Annotated[list[MessageCall], Field(max_length=MAX_CALLS)] | None = None
    function_call: CalledFunction | None = None
    tool_call_id: CallId | None = None
    # Response fields of OpenAI that clients send back.
    annotations: list[Any] | None = None
    audio: Any = None

    @field_validator("audio")
    @classmethod
    def _check_audio(cls, value: Any) -> None:
        if value is not None:
            raise unsupported_part("this model takes text only")

    @model_validator(mode="after")
    def _check_parts(self) -> Self:
        if self.role != "assistant":
            for name in ("tool_calls", "function_call"):
                if getattr(self, name):
                    raise fault("belongs to messages of the assistant", param=name)
        says_more = self.tool_calls or self.function_call or self.refusal is not None
        if self.content is None and not (
            self.role == "assistant" and (says_more or self.reasoning_text)
        ):
            raise fault("is required", param="content")
        return self

    @property
    def reasoning_text(self) -> str | None:
        """The assistant's reasoning, from either field."""
        return self.reasoning_content if self.reasoning_content is not None else self.reasoning

    @property
    def calls(self) -> list[MessageCall]:
        """The tool calls, including the deprecated `function_call`."""
        if self.function_call is not None:
            return [MessageCall(function=self.function_call)]
        return self.tool_calls or []

    def as_template_message(self) -> dict[str, Any]:
        """Return the message as chat templates expect it."""
        text = self.content if self.content is not None else self.refusal
        message: dict[str, Any] = {"role": _TEMPLATE_ROLES.get(self.role, self.role)}
        message["content"] = text
        if self.name is not None:
            message["name"] = self.name
        if self.reasoning_text is not None:
            message["reasoning_content"] = self.reasoning_text
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        if self.calls:
            message["tool_calls"] = [call.as_template_call() for call in self.calls]
        return message

    @property
    def num_chars(self) -> int:
        """The approximate number of characters in the message."""
        texts = (self.content, self.refusal, self.reasoning_text)
        num_called = sum(len(str(call.called.arguments)) for call in self.calls)
        return sum(len(text) for text in texts if text) + num_called


OWN_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_TEMPLATE_ROLES = {"developer": "system", "function": "tool"}

Messages = Annotated[
    list[Message], Field(min_length=1), BeforeValidator(check_pieces), AtMost("max_messages")
]
