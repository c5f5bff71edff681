"""Tools and calls as plain text, for models whose chat template has no tool support.

    system:     You can call these functions. Each stands on a line of its own, as JSON. ...
    assistant:  its text, then its calls as a JSON list, in the requested form
    user:       The call of add (call_1) returned: 3

This is also the form of calls that a grammar enforces, so the model sees earlier calls as it would
write them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

INTRODUCTION = (
    "You can call these functions. Each stands on a line of its own, as JSON with the schema of "
    "its parameters:"
)
INSTRUCTION = (
    "To call functions, answer with a JSON list of calls and nothing else: "
    '[{"name": "<name of the function>", "parameters": {<its arguments>}}]'
)


def in_plain_words(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None
) -> list[dict[str, Any]]:
    """Return a conversation for any template: no calls, no results, tools described as text."""
    plain_messages: list[dict[str, Any]] = []
    names: dict[str, str] = {}
    previous_role = None
    for message in messages:
        for call in message.get("tool_calls") or ():
            names[str(call.get("id"))] = str((call.get("function") or {}).get("name"))
        plain = _plain_message(message, names)
        if message.get("role") == previous_role == "tool":  # results of one turn, in one message
            plain_messages[-1]["content"] += "\n" + plain["content"]
        else:
            plain_messages.append(plain)
        previous_role = message.get("role")
    return _with_system(plain_messages, describe_tools(tools)) if tools else plain_messages


def describe_tools(tools: Sequence[Mapping[str, Any]]) -> str:
    """Return the description of the functions for the model."""
    lines = [
        json.dumps(
            {
                key: function[key]
                for key in ("name", "description", "parameters")
                if function.get(key) is not None
            },
            ensure_ascii=False,
        )
        for function in (tool.get("function") or tool for tool in tools)
    ]
    return "\n".join((INTRODUCTION, *lines, "", INSTRUCTION))


def _plain_message(message: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    if message.get("role") == "tool":
        call_id = message.get("tool_call_id")
        name = message.get("name") or names.get(str(call_id)) or "a function"
        of_which = f"{name} ({call_id})" if call_id else name
        content = f"The call of {of_which} returned: {_text(message.get('content'))}"
        return {"role": "user", "content": content}
    plain = {key: value for key, value in message.items() if key != "tool_calls"}
    calls = [call.get("function") or {} for call in message.get("tool_calls") or ()]
    if calls:
        written = [
            {"name": call.get("name"), "parameters": call.get("arguments") or {}} for call in calls
        ]
        text = _text(message.get("content"))
        written_text = json.dumps(written, ensure_ascii=False)
        plain["content"] = f"{text}\n{written_text}" if text else written_text
    return plain


def _with_system(messages: list[dict[str, Any]], text: str) -> list[dict[str, Any]]:
    """Append a text to the system message, which is created if missing."""
    if not messages or messages[0].get("role") != "system":
        return [{"role": "system", "content": text}, *messages]
    said = _text(messages[0].get("content"))
    first = {**messages[0], "content": f"{said}\n\n{text}" if said else text}
    return [first, *messages[1:]]


def _text(content: Any) -> str:
    """Return the text of a message's content, or of its parts."""
    if isinstance(content, list | tuple):
        texts = (part.get("text") for part in content if isinstance(part, Mapping))
        return "\n".join(text for text in texts if isinstance(text, str))
    return content if isinstance(content, str) else ""
