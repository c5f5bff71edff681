"""Faults of tool calls that parsers report."""

from __future__ import annotations

import pytest

from remora.deployments.parsers.events import ReplyParser
from remora.deployments.parsers.tool_calls.faults import CallFault, FaultCallback
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
        ("response_template", GOOD, []),
        ("response_template", GOOD.replace("add", "sub"), [UNKNOWN]),
        ("response_template", "<tool_call>nothing</tool_call>", [MALFORMED]),
        ("forced", '{"a": 1}', []),
        ("forced", '{"a": "', [UNFINISHED]),
    ],
)
def test_faults_of_calls_are_noted(name: str, text: str, faults: list[CallFault]) -> None:
    def noted(*pieces: str) -> list[CallFault]:
        found: list[CallFault] = []
        read(make_parser(name, found.append), *pieces)
        return found

    assert noted(text) == noted(*text) == faults


def make_parser(name: str, note: FaultCallback) -> ReplyParser:
    if name == "response_template":
        return make_reader(TAGGED, note=note)
    if name == "forced":
        use = ToolUse(tools=(ADD,), choice=ToolChoice.NAMED, name="add")
        return forced_parser(use, random_id, note)
    return TOOL_FORMATS[name].parser([ADD], note=note)
