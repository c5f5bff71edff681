"""Converts a body of /v1/responses to a chat body; errors name the fields of /v1/responses."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from remora.deployments.http.core.field_names import in_callers_words, renames
from remora.deployments.http.core.fields import parse
from remora.deployments.http.generation.bodies import ChatBody
from remora.deployments.http.generation.tools import custom_arguments
from remora.deployments.http.responses.archive import ItemIds
from remora.deployments.http.responses.bodies import PromptBody, ResponsesBody, TextFormat
from remora.deployments.http.responses.items import COMPACTION, Item
from remora.deployments.http.responses.tools import chat_choice

RENAMES = renames(
    (r"^messages.*", "input"),
    (r"^max_completion_tokens", "max_output_tokens"),
    (r"^response_format\.json_schema", "text.format"),
    (r"^response_format", "text.format"),
    (r"^reasoning_effort", "reasoning.effort"),
    (r"^(tools\[\d+\])\.function", r"\1"),
)
# Fields with the same meaning in both bodies.
_SAME = (
    "model",
    "stream",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "stop",
    "stop_token_ids",
    "skip_special_tokens",
    "include_stop_str_in_output",
    "seed",
    "ignore_eos",
    "min_tokens",
    "max_drafts",
    "chat_template_kwargs",
    "priority",
    "cache_salt",
    "parallel_tool_calls",
)


def chat_body(body: PromptBody, earlier: Iterable[Item]) -> ChatBody:
    """Return the chat body of a request.

    earlier:  earlier items of the conversation
    Raises InvalidRequest.
    """
    chat: dict[str, Any] = {name: getattr(body, name, None) for name in _SAME}
    chat["messages"] = _messages(body.instructions, [*earlier, *body.input])
    if body.tools:
        chat["tools"] = [tool.as_function() for tool in body.tools]
    chat["tool_choice"] = chat_choice(body.tool_choice)
    if body.text is not None:
        chat["response_format"] = _format(body.text.format)
    if body.reasoning is not None:
        chat["reasoning_effort"] = body.reasoning.effort
    if isinstance(body, ResponsesBody):
        chat["max_completion_tokens"] = body.max_output_tokens
        if body.wants_logprobs:
            chat |= {"logprobs": True, "top_logprobs": body.top_logprobs or 0}
    given = {name: value for name, value in chat.items() if value is not None}
    with in_callers_words(RENAMES):
        return parse(ChatBody, given)


def _format(text_format: TextFormat | None) -> dict[str, Any] | None:
    if text_format is None or text_format.type != "json_schema":
        return None if text_format is None else {"type": text_format.type}
    schema = {
        "name": text_format.name,
        "description": text_format.description,
        "schema": text_format.schema_,
        "strict": text_format.strict,
    }
    return {"type": "json_schema", "json_schema": schema}


def _messages(instructions: str | None, items: Iterable[Item]) -> list[dict[str, Any]]:
    """Return the messages of items.

    Consecutive assistant reasoning, text and calls become one message. Instructions and the system
    message after them also become one, since many templates accept no second system message.
    """
    messages: list[dict[str, Any]] = []
    if instructions is not None:
        messages.append({"role": "system", "content": instructions})
    for item in items:
        if item.type in _RESULTS:
            output = _text(item.output)
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": output})
        elif item.type == "message" and item.role != "assistant":
            _add_message(messages, item)
        else:
            _add_to_turn(messages, item)
    for message in messages:
        if message["role"] == "assistant" and not message.keys() & {"content", "tool_calls"}:
            message["content"] = ""
    return messages


def _add_message(messages: list[dict[str, Any]], item: Item) -> None:
    role = "system" if item.role == "developer" else item.role
    text = _text(item.content)
    if role == "system" and len(messages) == 1 and messages[0]["role"] == "system":
        messages[0]["content"] += "\n\n" + text
    else:
        messages.append({"role": role, "content": text})


# Order of items within one assistant message; an item out of order begins another message.
_TURN = {"reasoning": 0, "message": 1, COMPACTION: 1, "function_call": 2, "custom_tool_call": 2}
_RESULTS = frozenset({"function_call_output", "custom_tool_call_output"})


def _add_to_turn(messages: list[dict[str, Any]], item: Item) -> None:
    last = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
    if last is None or _progress(last) > _TURN[item.type]:
        last = {"role": "assistant"}
        messages.append(last)
    if item.type == "reasoning":
        last["reasoning"] = last.get("reasoning", "") + _text(item.content or item.summary)
    elif item.type in ("message", COMPACTION):
        is_message = item.type == "message"
        text = _text(item.content, between="") if is_message else item.compacted_text
        said = [last["content"]] if "content" in last else []
        last["content"] = "\n".join([*said, text])
    else:
        arguments = item.arguments if item.input is None else custom_arguments(item.input)
        function = {"name": item.name, "arguments": arguments}
        call = {"id": item.call_id, "type": "function", "function": function}
        last.setdefault("tool_calls", []).append(call)


def _progress(message: dict[str, Any]) -> int:
    if "tool_calls" in message:
        return _TURN["function_call"]
    return _TURN["message" if "content" in message else "reasoning"]


def _text(texts: tuple[str, ...] | None, *, between: str = "\n") -> str:
    return between.join(texts or ())


def as_written(item: Item, ids: ItemIds) -> dict[str, Any]:
    """Return an input item in the form that is stored and returned."""
    written: dict[str, Any] = {"id": item.id or ids.new(item.type), "type": item.type}
    if item.type == "message":
        kind = "output_text" if item.role == "assistant" else "input_text"
        more: dict[str, Any] = {"annotations": []} if item.role == "assistant" else {}
        content = [{"type": kind, "text": text} | more for text in item.content or ()]
        return written | {"role": item.role, "content": content, "status": "completed"}
    if item.type == "reasoning":
        content = [{"type": "reasoning_text", "text": text} for text in item.content or ()]
        summary = [{"type": "summary_text", "text": text} for text in item.summary or ()]
        return written | {"summary": summary, "content": content}
    if item.type == "function_call":
        called = {"call_id": item.call_id, "name": item.name, "arguments": item.arguments}
        return written | called | {"status": "completed"}
    if item.type == "custom_tool_call":
        called = {"call_id": item.call_id, "name": item.name, "input": item.input}
        return written | called | {"status": "completed"}
    if item.type == COMPACTION:
        return written | {"encrypted_content": item.encrypted_content}
    output = _text(item.output)
    return written | {"call_id": item.call_id, "output": output, "status": "completed"}
