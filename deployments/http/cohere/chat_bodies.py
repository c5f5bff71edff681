"""Body of Cohere's /v2/chat, and the chat body that it stands for.

What a field asks for is done or refused by name: citations, which no model here marks, and safety
modes that the chat template does not know.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PlainValidator, WithJsonSchema

from remora.deployments.http.core.body_limits import AtMost
from remora.deployments.http.core.errors import unsupported
from remora.deployments.http.core.field_names import in_callers_words, renames
from remora.deployments.http.core.fields import Body, Count, Seed, fault, parse, unsupported_part
from remora.deployments.http.generation.bodies import ChatBody
from remora.deployments.http.generation.tools import FunctionBody

NAMES = renames(
    (r"^stop(?=\[|$)", "stop_sequences"),
    (r"^top_k$", "k"),
    (r"^top_p$", "p"),
    (r"^thinking_token_budget", "thinking.token_budget"),
    (r"^reasoning_effort", "thinking"),
    (r"^response_format.*", "response_format"),
    (r"^max_completion_tokens", "max_tokens"),
)
_THINKING_ON = {"enable_thinking": True, "thinking": True}
_CHOICES: Mapping[str, str] = MappingProxyType({"REQUIRED": "required", "NONE": "none"})
_SAFETY = "safety_mode"


def _check_citations(value: Any) -> None:
    mode = value.get("mode") if isinstance(value, dict) else value
    if mode is not None and str(mode).upper() not in ("OFF", "DISABLED"):
        raise unsupported_part("answers have no citations; use the mode OFF")


def _check_content(value: Any) -> Any:
    """Return the parts of a message: texts, and thoughts of earlier answers."""
    if value is None:
        return []
    if isinstance(value, str):
        return [{"type": "text", "text": value}]
    if not isinstance(value, list):
        raise fault("must be a text or a list of parts")
    for part in value:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in ("text", "thinking", "document"):
            raise unsupported_part("only parts of the types text, thinking and document are served")
    return value


class CoherePart(Body):
    """A part of a message."""

    type: Literal["text", "thinking", "document"]
    text: str | None = None
    thinking: str | None = None
    document: Any = None

    @property
    def written(self) -> str:
        """The text of the part; of a document, the text of its data."""
        if self.type == "document":
            data = self.document.get("data", "") if isinstance(self.document, dict) else ""
            if isinstance(data, dict):
                return "\n".join(f"{name}: {value}" for name, value in data.items())
            return str(data)
        return self.text or ""


class CohereMessage(Body):
    """A message. Its tool_plan is the text that came before its calls."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[
        list[CoherePart],
        BeforeValidator(_check_content),
        AtMost("max_parts"),
        WithJsonSchema({"type": ["string", "array"]}),
    ] = Field(default_factory=list)
    tool_calls: list[dict[str, Any]] | None = None
    tool_plan: str | None = None
    tool_call_id: str | None = None
    citations: Any = None  # of earlier answers: not shown to the model

    @property
    def as_chat(self) -> dict[str, Any]:
        """The message in OpenAI's terms."""
        texts = [part.written for part in self.content if part.type != "thinking"]
        if self.tool_plan:
            texts.insert(0, self.tool_plan)
        message: dict[str, Any] = {"role": self.role, "content": "\n".join(texts)}
        thoughts = [part.thinking for part in self.content if part.thinking]
        if thoughts:
            message["reasoning"] = "\n".join(thoughts)
        if self.tool_calls:
            message["tool_calls"] = self.tool_calls
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        return message


class CohereThinking(Body):
    """Whether the model reasons, and for how many tokens at most."""

    type: Literal["enabled", "disabled"]
    token_budget: Count | None = None


class CohereFormat(Body):
    """The form of the answer: `schema` is Cohere's name, `json_schema` its older one."""

    type: Literal["text", "json_object"]
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    json_schema: dict[str, Any] | None = None


class CohereTool(Body):
    """A function that the model may call."""

    type: Literal["function"]
    function: FunctionBody


class CohereChatBody(Body):
    """Body of /v2/chat."""

    model: Annotated[str, Field(max_length=1024)] | None = None
    messages: Annotated[list[CohereMessage], Field(min_length=1), AtMost("max_messages")]
    stream: bool | None = None
    tools: Annotated[list[CohereTool], AtMost("max_tools")] | None = None
    strict_tools: bool | None = None
    tool_choice: Literal["REQUIRED", "NONE"] | None = None
    documents: list[Any] | None = None
    citation_options: Annotated[Any, PlainValidator(_check_citations)] = None
    response_format: CohereFormat | None = None
    safety_mode: Literal["CONTEXTUAL", "STRICT", "OFF", "NONE"] | None = None
    max_tokens: Count | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    seed: Seed | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    k: Annotated[int, Field(ge=0, le=500)] | None = None
    p: float | None = None
    logprobs: bool | None = None
    thinking: CohereThinking | None = None
    priority: Annotated[int, Field(ge=0, le=999)] | None = None


_SAME = (
    "model",
    "stream",
    "max_tokens",
    "temperature",
    "seed",
    "frequency_penalty",
    "presence_penalty",
    "logprobs",
)


def priority_of(given: int | None, *, lowest_first: bool) -> int | None:
    """Return the server's priority for Cohere's, of which smaller numbers run first.

    lowest_first:  whether that is so of the server's, too
    """
    return given if given is None or lowest_first else -given


def chat_body(
    body: CohereChatBody, variables: Collection[str], *, lowest_first: bool = False
) -> ChatBody:
    """Return the chat body of a request.

    variables:     of the model's chat template
    lowest_first:  as in `priority_of`
    Raises InvalidRequest.
    """
    if body.stream and body.logprobs:
        raise unsupported("logprobs", "logprobs: a stream of this route has none.")
    chat: dict[str, Any] = {name: getattr(body, name) for name in _SAME}
    chat |= {
        "messages": [message.as_chat for message in body.messages],
        "stop": body.stop_sequences,
        "top_k": body.k,
        "top_p": body.p,
        "response_format": _format(body.response_format),
        "priority": priority_of(body.priority, lowest_first=lowest_first),
        "documents": None if body.documents is None else list(map(_document, body.documents)),
        "chat_template_kwargs": _safety(body, variables),
    }
    if body.tools:
        chat["tools"] = [_tool(tool, is_strict=bool(body.strict_tools)) for tool in body.tools]
        chat["tool_choice"] = _CHOICES.get(body.tool_choice or "")
    elif body.tool_choice == "REQUIRED":
        raise unsupported("tool_choice", "tool_choice: REQUIRED needs tools.")
    if body.thinking is not None:
        chat |= _thinking(body.thinking, chat["chat_template_kwargs"] or {})
    given = {name: value for name, value in chat.items() if value is not None}
    with in_callers_words(NAMES):
        return parse(ChatBody, given)


def _tool(tool: CohereTool, *, is_strict: bool) -> dict[str, Any]:
    function = tool.function.model_dump(exclude_none=True)
    return {"type": "function", "function": function | ({"strict": True} if is_strict else {})}


def _format(given: CohereFormat | None) -> dict[str, Any] | None:
    if given is None or given.type == "text":
        return None
    schema = given.schema_ if given.schema_ is not None else given.json_schema
    if schema is None:
        return {"type": "json_object"}
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


def _document(given: Any) -> dict[str, Any]:
    """Return a document as templates expect it."""
    if isinstance(given, str):
        return {"text": given}
    data = given.get("data", {}) if isinstance(given, dict) else None
    if isinstance(data, str):
        data = {"text": data}
    if not isinstance(data, dict):
        raise unsupported("documents", "documents must be texts, or objects with data.")
    return {**data, **({"id": given["id"]} if "id" in given else {})}


def _safety(body: CohereChatBody, variables: Collection[str]) -> dict[str, Any] | None:
    mode = body.safety_mode
    if mode is None:
        return None
    if _SAFETY in variables:
        return {_SAFETY: mode}
    if mode in ("OFF", "NONE"):
        return None
    raise unsupported(_SAFETY, f"{_SAFETY}: the model's chat template knows none; use OFF.")


def _thinking(config: CohereThinking, given: dict[str, Any]) -> dict[str, Any]:
    if config.type == "disabled":
        return {"reasoning_effort": "none"}
    return {
        "thinking_token_budget": config.token_budget,
        "chat_template_kwargs": _THINKING_ON | given,
    }
