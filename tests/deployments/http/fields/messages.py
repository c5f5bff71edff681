"""Fields of Anthropic's and Cohere's chats."""

from __future__ import annotations

from typing import Any

from remora.deployments.http.anthropic.bodies import CountTokensBody, MessagesBody
from remora.deployments.http.cohere.chat_bodies import CohereChatBody
from tests.deployments.http.fields.observing import Api, Row, Rows, effect, hint, refused
from tests.deployments.http.fields.shared import CALLS, SAMPLING, SCHEMA, rich_server

_TEXT = {"type": "text", "text": "Hi"}
_ASK = {"role": "user", "content": [_TEXT]}
_USE = {"type": "tool_use", "id": "1", "name": "add", "input": {}}
_RESULT = {"type": "tool_result", "tool_use_id": "1", "content": "3"}
_DOCUMENT = {"type": "document", "source": {"type": "text", "data": "plum"}}


def _turn(role: str, *blocks: Any) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": list(blocks)}, _ASK]}


def _thought(**more: Any) -> dict[str, Any]:
    return _turn("assistant", {"type": "thinking", "thinking": "Hm.", **more}, _TEXT)


_BLOCK = "messages[0].content[0]."
BLOCKS: Rows = {
    "type": refused("image"),
    "text": effect("Ho"),
    "thinking": effect("Oh.", _thought()),
    "id": effect("2", _turn("assistant", _USE)),
    "name": effect("sub", _turn("assistant", _USE)),
    "input": effect({"a": 1}, _turn("assistant", _USE)),
    "tool_use_id": effect("2", _turn("user", _RESULT)),
    "content": effect("4", _turn("user", _RESULT)),
    "is_error": effect(True, _turn("user", _RESULT)),
    "source": effect({"type": "text", "data": "fig"}, _turn("user", _DOCUMENT)),
    "title": effect("Notes", _turn("user", _DOCUMENT)),
    "context": effect("Fruit", _turn("user", _DOCUMENT)),
    "citations": refused({"enabled": True}, _turn("user", _DOCUMENT)),
    "signature": hint("x", _thought()),
    "data": hint("y", _turn("assistant", {"type": "redacted_thinking", "data": "x"}, _TEXT)),
    "cache_control": hint({"type": "ephemeral"}),
    "caller": hint({"type": "direct"}, _turn("assistant", _USE)),
    "toolset_name": hint("a", _turn("assistant", _USE)),
}
_SYSTEM = {"system": [{"type": "text", "text": "Be brief."}]}
# Blocks of the system prompt are texts; fields of other types are refused.
_OTHERS = (
    *("thinking", "id", "name", "input", "tool_use_id", "content", "is_error", "source", "title"),
    *("context", "signature", "data", "caller", "toolset_name"),
)


def _in_system(name: str) -> Row:
    return refused(BLOCKS[name].value, _SYSTEM)


ADD = {"name": "add", "input_schema": SCHEMA}
_ONE = {"tools": [ADD]}
_SCHEMA_OF = {"type": "json_schema", "schema": SCHEMA}
_EDITED = "context_management.edits[0]."
_USES = [
    one
    for number in "1234"
    for one in (
        {"role": "assistant", "content": [_USE | {"id": number, "input": {"a": 1}}]},
        {"role": "user", "content": [_RESULT | {"tool_use_id": number, "content": "a" * 200}]},
    )
]
_CLEARS = {
    "messages": _USES,
    "context_management": {
        "edits": [
            {
                "type": "clear_tool_uses_20250919",
                "trigger": {"type": "tool_uses", "value": 2},
                "keep": {"type": "tool_uses", "value": 2},
                "clear_at_least": {"type": "input_tokens", "value": 1},
            }
        ]
    },
}
COUNT: Rows = {
    "model": refused("other"),
    "messages[0].role": effect("assistant"),
    **{f"{_BLOCK}{name}": row for name, row in BLOCKS.items()},
    "system[0].type": refused("image", _SYSTEM),
    "system[0].text": effect("Be kind.", _SYSTEM),
    "system[0].cache_control": hint({"type": "ephemeral"}, _SYSTEM),
    "system[0].citations": refused({"enabled": True}, _SYSTEM),
    **{f"system[0].{name}": _in_system(name) for name in _OTHERS},
    "tools[0].type": refused("web_search_20250305", _ONE),
    "tools[0].name": effect("sub", _ONE),
    "tools[0].description": effect("Adds", _ONE),
    "tools[0].input_schema": effect({"type": "object"}, _ONE),
    "tools[0].cache_control": hint({"type": "ephemeral"}, _ONE),
    "tools[0].input_examples": hint([{"a": 1}], _ONE),
    "tools[0].eager_input_streaming": hint(True, _ONE),
    "tools[0].defer_loading": hint(True, _ONE),
    "tools[0].allowed_callers": hint(["direct"], _ONE),
    "tool_choice.type": effect("none", {**_ONE, "tool_choice": {"type": "auto"}}),
    "thinking.type": effect("disabled"),
    "output_config.task_budget": refused({"type": "tokens"}),
    "chat_template_kwargs": effect({"enable_thinking": False}),
    f"{_EDITED}type": refused("compact_20260112"),
    f"{_EDITED}trigger.type": effect("input_tokens", _CLEARS),
    f"{_EDITED}trigger.value": effect(200, _CLEARS),
    f"{_EDITED}keep.type": refused("input_tokens", _CLEARS),
    f"{_EDITED}keep.value": effect(1, _CLEARS),
    f"{_EDITED}clear_at_least.type": refused("tool_uses", _CLEARS),
    f"{_EDITED}clear_at_least.value": effect(5000, _CLEARS),
    f"{_EDITED}exclude_tools": effect(["add"], _CLEARS),
    f"{_EDITED}clear_tool_inputs": effect(True, _CLEARS),
    "mcp_servers": refused([{"type": "url"}]),
    "cache_control": hint({"type": "ephemeral"}),
    "speed": refused("fast"),
    "user_profile_id": hint("a"),
    "workspace_id": hint("a"),
}
MESSAGE: Rows = {
    **COUNT,
    "tools[0].strict": effect(True, _ONE),
    "tool_choice.name": effect(
        "sub",
        {"tools": [ADD, ADD | {"name": "sub"}], "tool_choice": {"type": "tool", "name": "add"}},
        says="<think>Hm.</think>{}",
    ),
    "tool_choice.disable_parallel_tool_use": effect(
        True, {**_ONE, "tool_choice": {"type": "auto"}}, says=CALLS
    ),
    "thinking.budget_tokens": effect(
        1025, {"thinking": {"type": "enabled", "budget_tokens": 1024}}
    ),
    "thinking.display": effect("omitted", {"thinking": {"type": "adaptive"}}),
    "output_config.effort": effect("low"),
    "output_config.format.type": refused("xml", {"output_config": {"format": _SCHEMA_OF}}),
    "output_config.format.schema": effect(
        {"type": "object"}, {"output_config": {"format": _SCHEMA_OF}}
    ),
    "output_format.type": refused("xml", {"output_format": _SCHEMA_OF}),
    "output_format.schema": effect({"type": "object"}, {"output_format": _SCHEMA_OF}),
    "max_tokens": effect(3),
    "stop_sequences": effect(["x"]),
    "stream": effect(True),
    **{name: SAMPLING[name] for name in ("temperature", "top_p", "top_k", "max_drafts")},
    "metadata.user_id": hint("me"),
    "service_tier": hint("standard_only"),
    "container": refused("a"),
    "fallbacks": refused(["a"]),
    "inference_geo": hint("us"),
    "diagnostics": hint({"a": 1}),
    "priority": effect(3),
    "cache_salt": effect("a"),
}
# Only what templates show decides the number of tokens.
COUNTED: Rows = {
    **COUNT,
    **{
        name: MESSAGE[name]._replace(kind="hint")
        for name in (
            "tools[0].strict",
            "tool_choice.name",
            "tool_choice.disable_parallel_tool_use",
            "thinking.budget_tokens",
            "thinking.display",
            "output_config.format.schema",
            "output_format.schema",
        )
    },
    **{
        name: MESSAGE[name]
        for name in ("output_config.effort", "output_config.format.type", "output_format.type")
    },
}

_HELLO = {"role": "user", "content": [{"type": "text", "text": "Hi"}]}
_FUNCTION = {"type": "function", "function": {"name": "add", "parameters": SCHEMA}}
_CALLED = {"id": "1", "type": "function", "function": {"name": "add", "arguments": "{}"}}


def _cohere(*parts: Any, **message: Any) -> dict[str, Any]:
    return {"messages": [{"role": "assistant", "content": list(parts), **message}, _HELLO]}


_FORM = {"response_format": {"type": "json_object"}}
COHERE: Rows = {
    "model": refused("other"),
    "messages[0].role": effect("system"),
    "messages[0].content[0].type": refused("image_url", named="messages[0].content"),
    "messages[0].content[0].text": effect("Ho"),
    "messages[0].content[0].thinking": effect(
        "Hm.", _cohere({"type": "thinking", "thinking": "Oh."}, {"type": "text", "text": "a"})
    ),
    "messages[0].content[0].document": effect(
        {"data": "fig"}, {"messages": [{"role": "user", "content": [
            {"type": "document", "document": {"data": "plum"}}]}]}
    ),
    "messages[0].tool_calls": effect([_CALLED], _cohere()),
    "messages[0].tool_plan": effect("I add.", _cohere(tool_calls=[_CALLED])),
    "messages[0].tool_call_id": effect("1", {"messages[0].role": "tool"}),
    "messages[0].citations": hint([], _cohere({"type": "text", "text": "a"})),
    "stream": effect(True),
    "tools[0].type": refused("web_search", {"tools": [_FUNCTION]}),
    "tools[0].function.name": effect("sub", {"tools": [_FUNCTION]}),
    "tools[0].function.description": effect("Adds", {"tools": [_FUNCTION]}),
    "tools[0].function.parameters": effect({"type": "object"}, {"tools": [_FUNCTION]}),
    "tools[0].function.strict": effect(True, {"tools": [_FUNCTION]}),
    "strict_tools": effect(True, {"tools": [_FUNCTION]}),
    "tool_choice": effect("REQUIRED", {"tools": [_FUNCTION]}),
    "documents": effect(["plum"]),
    "citation_options": refused({"mode": "FAST"}),
    "response_format.type": effect("json_object", {"response_format": {"type": "text"}}),
    "response_format.schema": effect(SCHEMA, _FORM),
    "response_format.json_schema": effect(SCHEMA, _FORM),
    "safety_mode": refused("STRICT"),
    "max_tokens": effect(3),
    "stop_sequences": effect(["x"]),
    **{name: SAMPLING[name] for name in ("temperature", "frequency_penalty", "presence_penalty")},
    "seed": effect(3),
    "k": effect(5),
    "p": effect(0.5),
    "logprobs": effect(True),
    "thinking.type": effect("disabled"),
    "thinking.token_budget": effect(3, {"thinking": {"type": "enabled"}}),
    "priority": effect(3),
}  # fmt: skip

_BODY = {"messages": [_ASK]}
APIS = {
    "anthropic": Api(
        MessagesBody,
        "/v1/messages",
        _BODY | {"max_tokens": 400},
        MESSAGE,
        rich_server("reasoning_effort"),
    ),
    "anthropic count": Api(
        CountTokensBody,
        "/v1/messages/count_tokens",
        _BODY,
        COUNTED,
        rich_server("reasoning_effort"),
    ),
    "cohere": Api(CohereChatBody, "/v2/chat", {"messages": [_HELLO]}, COHERE, rich_server()),
}
