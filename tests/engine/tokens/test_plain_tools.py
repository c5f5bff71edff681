"""Tools for models whose chat template knows none."""

from __future__ import annotations

import json
from typing import Any

from remora.engine.tokens.plain_tools import INSTRUCTION, describe_tools, in_plain_words

ADD = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object"}, "strict": True},
}
USER: dict[str, Any] = {"role": "user", "content": "1 + 2?"}
CALL: dict[str, Any] = {
    "role": "assistant",
    "content": "Let me see.",
    "tool_calls": [{"id": "call_1", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}],
}
RESULT: dict[str, Any] = {"role": "tool", "tool_call_id": "call_1", "content": "3"}


def test_the_model_is_told_of_its_tools() -> None:
    text = describe_tools([ADD])

    assert json.dumps({"name": "add", "parameters": {"type": "object"}}) in text.splitlines()
    assert text.endswith(INSTRUCTION)


def test_tools_stand_at_the_end_of_the_systems_message() -> None:
    system = {"role": "system", "content": "Be brief."}

    alone, with_system = in_plain_words([USER], [ADD]), in_plain_words([system, USER], [ADD])

    assert alone == [{"role": "system", "content": describe_tools([ADD])}, USER]
    assert with_system[0]["content"] == f"Be brief.\n\n{describe_tools([ADD])}"
    assert with_system[1:] == [USER]


def test_calls_and_results_become_text() -> None:
    told = in_plain_words([USER, CALL, RESULT], None)

    assert told == [
        USER,
        {
            "role": "assistant",
            "content": 'Let me see.\n[{"name": "add", "parameters": {"a": 1, "b": 2}}]',
        },
        {"role": "user", "content": "The call of add (call_1) returned: 3"},
    ]


def test_results_of_one_turn_share_a_message() -> None:
    other = {"role": "tool", "tool_call_id": "x", "content": [{"type": "text", "text": "4"}]}

    told = in_plain_words([USER, CALL, RESULT, other, USER], None)

    assert [message["role"] for message in told] == ["user", "assistant", "user", "user"]
    assert told[2]["content"].splitlines() == [
        "The call of add (call_1) returned: 3",
        "The call of a function (x) returned: 4",
    ]


def test_what_was_given_stays_as_it_was() -> None:
    given = [dict(USER), dict(CALL), dict(RESULT), dict(RESULT)]

    in_plain_words(given, [ADD])

    assert given == [USER, CALL, RESULT, RESULT]
