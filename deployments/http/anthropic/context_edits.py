"""`context_management`: old results of tools and old reasoning are left out of a long prompt."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from remora.deployments.http.anthropic.blocks import Block
from remora.deployments.http.anthropic.bodies import (
    CLEAR_THINKING,
    CountTokensBody,
    Edit,
    Turn,
)

# Anthropic's defaults.
TRIGGER_TOKENS, KEPT_TOOL_USES, KEPT_THINKING_TURNS = 100_000, 3, 1
_CLEARED = "[This result was removed to save context.]"
_THINKING = ("thinking", "redacted_thinking")

BodyT = TypeVar("BodyT", bound=CountTokensBody)
CountTokens = Callable[[CountTokensBody], Awaitable[int]]


async def edited(body: BodyT, count: CountTokens) -> tuple[BodyT, list[dict[str, Any]]]:
    """Return the body with its edits applied, and Anthropic's descriptions of them.

    count:  returns the number of prompt tokens of a body
    """
    applied: list[dict[str, Any]] = []
    for edit in body.context_management.edits if body.context_management else ():
        if edit.type == CLEAR_THINKING:
            turns, num_cleared, name = _without_thinking(body.messages, edit)
        elif await _is_due(body, edit, count):
            turns, num_cleared, name = _without_results(body.messages, edit)
        else:
            continue
        if not num_cleared:
            continue
        shorter = body.model_copy(update={"messages": turns})
        saved = await count(body) - await count(shorter)
        if edit.clear_at_least is not None and saved < edit.clear_at_least.value:
            continue
        body = shorter
        applied.append({"type": edit.type, name: num_cleared, "cleared_input_tokens": saved})
    return body, applied


async def _is_due(body: CountTokensBody, edit: Edit, count: CountTokens) -> bool:
    trigger = edit.trigger
    if trigger is not None and trigger.type == "tool_uses":
        return len(_uses(body.messages)) > trigger.value
    return await count(body) > (TRIGGER_TOKENS if trigger is None else trigger.value)


def _uses(turns: Sequence[Turn]) -> list[Block]:
    return [block for turn in turns for block in turn.content if block.type == "tool_use"]


def _without_results(turns: Sequence[Turn], edit: Edit) -> tuple[list[Turn], int, str]:
    """Return the turns without old results of tools, and the number of results removed."""
    kept = KEPT_TOOL_USES if edit.keep is None else edit.keep.value
    uses = [block for block in _uses(turns) if block.name not in (edit.exclude_tools or ())]
    old = {block.id for block in uses[: max(0, len(uses) - kept)]}
    inputs = edit.clear_tool_inputs
    names = inputs if isinstance(inputs, list) else ()
    emptied = {b.id for b in uses if inputs is True or b.name in names} & old
    has_result = {b.tool_use_id for t in turns for b in t.content if b.type == "tool_result"} & old

    def clear(block: Block) -> Block:
        if block.type == "tool_result" and block.tool_use_id in old:
            return block.model_copy(update={"content": _CLEARED})
        return block.model_copy(update={"input": {}}) if block.id in emptied else block

    cleared = [
        turn.model_copy(update={"content": [clear(block) for block in turn.content]})
        for turn in turns
    ]
    return cleared, len(has_result), "cleared_tool_uses"


def _without_thinking(turns: Sequence[Turn], edit: Edit) -> tuple[list[Turn], int, str]:
    """Return the turns without old reasoning, and the number of turns that had it."""
    thinking = [place for place, turn in enumerate(turns) if _thinks(turn)]
    kept = KEPT_THINKING_TURNS if edit.keep is None else edit.keep.value
    old = thinking[: max(0, len(thinking) - kept)]
    cleared = [_plain(turn) if place in old else turn for place, turn in enumerate(turns)]
    return cleared, len(old), "cleared_thinking_turns"


def _thinks(turn: Turn) -> bool:
    return any(block.type in _THINKING for block in turn.content)


def _plain(turn: Turn) -> Turn:
    content = [block for block in turn.content if block.type not in _THINKING]
    return turn.model_copy(update={"content": content})
