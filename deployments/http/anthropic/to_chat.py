"""Converts a body of /v1/messages to a chat body; errors name the fields of /v1/messages."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from remora.deployments.http.anthropic.blocks import Block
from remora.deployments.http.anthropic.bodies import (
    Choice,
    CountTokensBody,
    ThinkingConfig,
    ToolParam,
    Turn,
)
from remora.deployments.http.core.field_names import Renames, in_callers_words, renames
from remora.deployments.http.core.fields import parse
from remora.deployments.http.generation.bodies import ChatBody

RENAMES = renames(
    (r"^messages.*", "messages"),
    (r"^stop(?=\[|$)", "stop_sequences"),
    (r"^thinking_token_budget", "thinking.budget_tokens"),
    (r"^reasoning_effort", "thinking"),
    (r"^response_format(\.json_schema)?", "output_config.format"),
    (r"^(tools\[\d+\])\.function\.parameters", r"\1.input_schema"),
    (r"^(tools\[\d+\])\.function", r"\1"),
)
_BETA_RENAMES = renames((r"^response_format(\.json_schema)?", "output_format"))
# Fields with the same meaning in both bodies.
_SAME = (
    "model",
    "max_tokens",
    "stream",
    "temperature",
    "top_p",
    "top_k",
    "priority",
    "max_drafts",
    "cache_salt",
)
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
# Template variables that enable reasoning.
_THINKING_ON = {"enable_thinking": True, "thinking": True}


def renames_of(body: CountTokensBody) -> Renames:
    """Return the rules that rename fields of the chat body to fields of `body`."""
    return RENAMES if body.output_format is None else _BETA_RENAMES + RENAMES


def chat_body(body: CountTokensBody, *, knows_efforts: bool) -> ChatBody:
    """Return the chat body of a request.

    knows_efforts:  whether the model's chat template distinguishes reasoning efforts
    Raises InvalidRequest.
    """
    chat: dict[str, Any] = {name: getattr(body, name, None) for name in _SAME}
    chat["messages"] = _messages(body)
    chat["stop"] = getattr(body, "stop_sequences", None)
    if body.tools:
        chat["tools"] = [_tool(tool) for tool in body.tools]
    if body.tool_choice is not None:
        chat |= _choice(body.tool_choice)
    chat["chat_template_kwargs"] = body.chat_template_kwargs
    chat["response_format"] = _format(body)
    if body.output_config is not None:
        chat["reasoning_effort"] = body.output_config.effort if knows_efforts else None
    if body.thinking is not None:
        chat |= _thinking(body.thinking, body.chat_template_kwargs or {})
    if _is_begun(body.messages[-1]):
        chat["continue_final_message"] = True
    given = {name: value for name, value in chat.items() if value is not None}
    with in_callers_words(renames_of(body)):
        return parse(ChatBody, given)


def _tool(tool: ToolParam) -> dict[str, Any]:
    function = {
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.input_schema,
        "strict": tool.strict,
    }
    return {"type": "function", "function": function}


def _choice(choice: Choice) -> dict[str, Any]:
    chosen: Any = _CHOICES.get(choice.type)
    if chosen is None:
        chosen = {"type": "function", "function": {"name": choice.name}}
    return {
        "tool_choice": chosen,
        "parallel_tool_calls": False if choice.disable_parallel_tool_use else None,
    }


def _format(body: CountTokensBody) -> dict[str, Any] | None:
    given = body.output_format or (body.output_config and body.output_config.format)
    if not given:
        return None
    return {
        "type": "json_schema",
        "json_schema": {"name": "output", "schema": given.schema_, "strict": True},
    }


def _thinking(config: ThinkingConfig, given: dict[str, Any]) -> dict[str, Any]:
    if config.type == "disabled":
        return {"reasoning_effort": "none"}
    if config.type == "enabled":
        return {
            "thinking_token_budget": config.budget_tokens,
            "chat_template_kwargs": _THINKING_ON | given,
        }
    return {}


def _is_begun(turn: Turn) -> bool:
    """Whether the turn is the beginning of the answer, which the model continues."""
    kinds = {block.type for block in turn.content}
    return turn.role == "assistant" and "text" in kinds and "tool_use" not in kinds


def _messages(body: CountTokensBody) -> list[dict[str, Any]]:
    """Return the turns as messages; consecutive turns of one role are joined, as by Anthropic."""
    messages: list[dict[str, Any]] = []
    if body.system is not None:
        messages.append({"role": "system", "content": _text(body.system)})
    for turn in body.messages:
        written = [_assistant(turn.content)] if turn.role == "assistant" else _others(turn)
        for message in written:
            if messages and _can_join(messages[-1], message):
                messages[-1]["content"] += "\n" + message["content"]
            else:
                messages.append(message)
    return messages


def _can_join(one: dict[str, Any], other: dict[str, Any]) -> bool:
    plain = {"role", "content"}
    return one.keys() == other.keys() == plain and one["role"] == other["role"]


def _assistant(blocks: list[Block]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": _text(blocks, between="")}
    reasoning = [block.thinking for block in blocks if block.thinking is not None]
    if reasoning:
        message["reasoning"] = "\n".join(reasoning)
    calls = [_call(block) for block in blocks if block.type == "tool_use"]
    if calls:
        message["tool_calls"] = calls
    return message


def _call(block: Block) -> dict[str, Any]:
    function = {"name": block.name, "arguments": block.input}
    return {"id": block.id, "type": "function", "function": function}


def _others(turn: Turn) -> list[dict[str, Any]]:
    """Return the messages of a user or system turn, tool results included, in order."""
    messages: list[dict[str, Any]] = []
    for block in turn.content:
        if block.type == "tool_result":
            result = block.content or ""
            text = f"Error: {result}" if block.is_error else result
            messages.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": text})
        elif messages and messages[-1]["role"] == turn.role:
            messages[-1]["content"] += f"\n{block.read_text}"
        else:
            messages.append({"role": turn.role, "content": block.read_text})
    return messages or [{"role": turn.role, "content": ""}]


def _text(blocks: Iterable[Block], *, between: str = "\n") -> str:
    return between.join(block.text for block in blocks if block.text is not None)
