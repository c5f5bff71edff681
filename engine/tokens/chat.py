"""Rendering of messages by the model's chat template.

A template without tool support would drop tools silently; the system message then describes them.
Every exception of a template on a caller's messages becomes InvalidRequest with the template's
message.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateError

from remora.configs.errors import InvalidRequest
from remora.engine.tokens.chat_template import ChatTemplate
from remora.engine.tokens.plain_tools import in_plain_words

# Arguments of the renderer itself: a caller's template variables must not replace them.
RESERVED_KWARGS = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "conversations",
        "documents",
        "max_length",
        "messages",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "sanitize_control_tokens",
        "self",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    }
)
# Exceptions that templates, which are plain Python underneath, raise on unexpected messages.
TEMPLATE_FAILURES = (
    TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)


def render_chat(
    template: ChatTemplate | None,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool,
    continue_final_message: bool,
    template_kwargs: Mapping[str, Any],
    tools: Sequence[Mapping[str, Any]] | None = None,
    documents: Sequence[Mapping[str, Any]] | None = None,
) -> str:
    """Return the conversation as rendered by the template. Raises InvalidRequest."""
    _check(messages, template_kwargs)
    if add_generation_prompt and continue_final_message:
        raise InvalidRequest(
            "add_generation_prompt and continue_final_message are both set; a final message that "
            "is continued leaves no place for a new one. Set one of them to false.",
            "continue_final_message",
        )
    if template is None:
        raise InvalidRequest(
            "This model has no chat template. Send a finished prompt to the completions API.",
            "messages",
        )
    chat = _with_read_calls(messages)
    try:
        if _needs_plain_words(template, chat, tools):
            chat, tools = in_plain_words(chat, tools), None
        return template.render(
            chat,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            variables=template_kwargs,
            tools=tools or None,
            documents=documents or None,
        )
    except TEMPLATE_FAILURES as error:
        raise InvalidRequest(
            f"The model's chat template refuses these messages: {str(error)[:200]}",
            "messages",
            limit=getattr(error, "limit", None),
        ) from error


def _needs_plain_words(
    template: ChatTemplate,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
) -> bool:
    if "tools" in template.variables:
        return False
    holds_calls = any(m.get("tool_calls") or m.get("role") == "tool" for m in messages)
    return bool(tools) or (holds_calls and "tool_calls" not in template.source)


def _with_read_calls(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Copy messages and complete tool calls and results as templates expect them.

    Arguments of calls, JSON text in OpenAI's form, become objects where possible; results get the
    names of their functions.
    """
    chat: list[dict[str, Any]] = []
    names: dict[str, str] = {}
    for given in messages:
        message = dict(given)
        if message.get("tool_calls"):
            message["tool_calls"] = [_with_read_arguments(call) for call in message["tool_calls"]]
            for call in message["tool_calls"]:
                names[str(call.get("id"))] = str(call.get("function", call).get("name"))
        elif message.get("role") == "tool" and message.get("name") is None:
            message["name"] = names.get(str(message.get("tool_call_id")))
        chat.append(message)
    return chat


def _with_read_arguments(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return dict(call)
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except ValueError:
        return dict(call)
    if not isinstance(arguments, dict):
        return dict(call)
    return {**call, "function": {**function, "arguments": arguments}}


def _check(messages: Sequence[Mapping[str, Any]], template_kwargs: Mapping[str, Any]) -> None:
    if not messages:
        raise InvalidRequest("messages is empty; at least one message is needed.", "messages")
    for place, message in enumerate(messages):
        role = message.get("role")
        if not isinstance(role, str) or not role:
            raise InvalidRequest(
                f"messages[{place}] has the role {role!r}; a text such as 'user' is needed.",
                "messages",
            )
    reserved = sorted(RESERVED_KWARGS.intersection(template_kwargs))
    if reserved:
        raise InvalidRequest(
            f"chat_template_kwargs may not set {reserved[0]!r}: it is an argument of the renderer, "
            "not a variable of the template.",
            "chat_template_kwargs",
        )
