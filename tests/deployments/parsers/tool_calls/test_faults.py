"""Faults of tool calls that parsers report."""

from __future__ import annotations

import pytest

from remora.deployments.parsers.tool_calls.faults import CallFault
from remora.deployments.parsers.tool_calls.forced import forced_parser
from remora.deployments.parsers.tool_calls.formats import TOOL_FORMATS
from remora.deployments.parsers.tool_calls.ids import random_id
from remora.deployments.parsers.tools import Tool, ToolChoice, ToolUse
from tests.deployments.parsers.replies import read
from tests.deployments.parsers.test_response_template import TAGGED, make_reader

ADD = Tool(name="add", parameters={})
MALFORMED, UNFINISHED, UNKNOWN = CallFault.MALFORMED, CallFault.UNFINISHED, CallFault.UNKNOWN_TOOL
GOOD = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'


@pytest.mark.parametrize(
    ("name", "text", "faults"),
    [
        ("hermes", f"Hello. {GOOD}\n{GOOD}", []),
        ("hermes", "<tool_call> is how a call begins", [MALFORMED]),
        ("hermes", '<tool_call>{"nome": "add"}</tool_call>' + GOOD, [MALFORMED]),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": [1</tool_call>', [MALFORMED]),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1', [UNFINISHED]),
        ("hermes", '<tool_call>{"na', [UNFINISHED]),
        ("hermes", GOOD.replace("add", "sub") + GOOD.replace("add", "mul"), [UNKNOWN, UNKNOWN]),
        ("hermes", '<tool_call>{"name": "add", "arguments": [1]}</tool_call>', [MALFORMED]),
        ("hermes", '<tool_call>{"name": "add", "arguments": "x"}</tool_call>', [MALFORMED]),
        ("hermes", '<tool_call>{"name": "add", "arguments": "{}"}</tool_call>', []),
        ("hermes", "a < b <tool_c", []),
        ("llama3", "Hello.", []),
        ("llama3", '{"answer": 1}', []),
        ("llama3", '{"name": "sub", "parameters": {}}', [UNKNOWN]),
        ("llama3", '{"name": "add", "parameters": {"a"', [UNFINISHED]),
        ("llama4", "[1, 2]", []),
        ("llama4", "[add(a=1), sub(", [UNFINISHED]),
        ("qwen3_coder", "<tool_call>\n<function=sub></function>\n</tool_call>", [UNKNOWN]),
        ("kimi_k2", "<|tool_calls_section_begin|>nothing", [MALFORMED]),
    ],
)
def test_faults_of_calls_are_noted(name: str, text: str, faults: list[CallFault]) -> None:
    noted: list[CallFault] = []
    chars: list[CallFault] = []

    read(TOOL_FORMATS[name].parser([ADD], note=noted.append), text)
    read(TOOL_FORMATS[name].parser([ADD], note=chars.append), *text)

    assert noted == chars == faults


def test_a_forced_reply_that_is_cut_off_is_unfinished() -> None:
    use = ToolUse(tools=(ADD,), choice=ToolChoice.NAMED, name="add")
    noted: list[CallFault] = []

    read(forced_parser(use, random_id, noted.append), '{"a": 1}')
    read(forced_parser(use, random_id, noted.append), '{"a": "')

    assert noted == [UNFINISHED]


@pytest.mark.parametrize(
    ("text", "faults"),
    [
        ('<tool_call>{"name": "add", "arguments": {}}</tool_call>', []),
        ('<tool_call>{"name": "sub", "arguments": {}}</tool_call>', [UNKNOWN]),
        ("<tool_call>nothing</tool_call>", [MALFORMED]),
    ],
)
def test_faults_of_calls_in_a_checkpoints_own_format_are_noted(
    text: str, faults: list[CallFault]
) -> None:
    noted: list[CallFault] = []

    read(make_reader(TAGGED, note=noted.append), text)

    assert noted == faults
