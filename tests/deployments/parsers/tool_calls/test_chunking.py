"""For every format: any chunking of any text gives the same reply, in work that grows linearly."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from remora.deployments.parsers.events import (
    CallArguments,
    CallBegun,
    ReplyEvent,
    ReplyParser,
    Text,
)
from remora.deployments.parsers.text_reader import Markers, TextReader
from remora.deployments.parsers.tool_calls.forced import forced_parser
from remora.deployments.parsers.tool_calls.formats import TOOL_FORMATS
from remora.deployments.parsers.tools import Tool, ToolChoice, ToolUse
from tests.deployments.parsers.replies import KA, KB, KE, B, E, P, cut, events_of, make_id

FORMATS = sorted({entry.name for entry in TOOL_FORMATS.values()})
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "s": {"type": "string"}, "x": {"type": "array"}},
}
TOOLS = (Tool(name="add", parameters=SCHEMA), Tool(name="now", parameters={}))
FORCED = (
    ToolUse(tools=TOOLS, choice=ToolChoice.NAMED, name="add"),
    ToolUse(tools=TOOLS, choice=ToolChoice.REQUIRED),
)
FRAGMENTS = (
    *"{}[]()\",:;=\\'\n ",
    *('"name"', ": ", '"add"', '"arguments"', '"parameters"', '{"a": 1}', "null", "'name'", "True"),
    *("[add(", "a=", "s='x'", '"""', "\\x4", "\\ud83d", '{"name": "add", "arguments": {"s": "'),
    *('{"name": "add", "parameters": ', "<function=add>", "<parameter=a>", "\n</parameter>"),
    *("</function>", "<arg_key>a</arg_key>", "functions.add:0", "function", "```json", "```"),
    *('<｜DSML｜invoke name="', "add", '">', '" string="true">', "</｜DSML｜invoke>"),
    *('<｜DSML｜parameter name="', "</｜DSML｜parameter>", "[{", "})"),
)


def make_parser(name: str) -> ReplyParser:
    return TOOL_FORMATS[name].parser(TOOLS, make_id=make_id)


def merged(events: list[ReplyEvent]) -> list[Any]:
    found: list[Any] = []
    for event in events:
        match found[-1:], event:
            case [Text(before)], Text(text):
                found[-1] = Text(before + text)
            case [CallArguments(number, before)], CallArguments(same, text) if number == same:
                found[-1] = CallArguments(number, before + text)
            case _:
                found.append(event)
    return found


def read_chunks(parser: ReplyParser, text: str, cuts: list[int]) -> list[Any]:
    return merged(events_of(parser, cut(text, [place % (len(text) + 1) for place in cuts])))


def texts(name: str) -> st.SearchStrategy[str]:
    pieces = st.sampled_from((*TOOL_FORMATS[name].markers, *FRAGMENTS)) | st.text(max_size=5)
    cut_short = pieces.map(lambda piece: piece[:-1])
    return st.lists(pieces | cut_short, max_size=24).map("".join)


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_chunking_of_any_text_gives_the_same_reply(name: str, data: st.DataObject) -> None:
    text = data.draw(texts(name))
    cuts = data.draw(st.lists(st.integers(0, 10**6), max_size=12))

    whole = read_chunks(make_parser(name), text, [])

    assert read_chunks(make_parser(name), text, cuts) == whole
    assert read_chunks(make_parser(name), text, list(range(len(text)))) == whole


@pytest.mark.parametrize("use", FORCED, ids=["named", "required"])
@settings(max_examples=60, deadline=None)
@given(text=texts("llama3"))
def test_any_chunking_of_a_forced_reply_gives_the_same_calls(use: ToolUse, text: str) -> None:
    whole = read_chunks(forced_parser(use, make_id), text, [])

    assert read_chunks(forced_parser(use, make_id), text, list(range(len(text)))) == whole


values = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**12), 10**12) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=6,
)
calls = st.tuples(
    st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,12}", fullmatch=True),
    st.dictionaries(st.from_regex(r"[a-z]\w{0,5}", fullmatch=True), values, max_size=4),
)


def write_json_call(name: str, tool: str, arguments: str) -> str:
    return {
        "hermes": f'<tool_call>\n{{"name": "{tool}", "arguments": {arguments}}}\n</tool_call>',
        "llama3": f'{{"name": "{tool}", "parameters": {arguments}}};',
        "mistral": f"[TOOL_CALLS]{tool}[ARGS]{arguments}",
        "deepseek_v3": f"{B}function{P}{tool}\n```json\n{arguments}\n```{E}",
        "deepseek_v31": f"{B}{tool}{P}{arguments}{E}",
        "kimi_k2": f"{KB}functions.{tool}:0{KA}{arguments}{KE}",
    }[name]


@pytest.mark.parametrize(
    "name", ["hermes", "llama3", "mistral", "deepseek_v3", "deepseek_v31", "kimi_k2"]
)
@settings(max_examples=60, deadline=None)
@given(
    made=st.lists(calls, min_size=1, max_size=3),
    cuts=st.lists(st.integers(0, 10**6), max_size=6),
    indent=st.none() | st.just(2),
    ascii_only=st.booleans(),
)
def test_calls_in_json_come_back_character_for_character(
    name: str,
    made: list[tuple[str, dict[str, Any]]],
    cuts: list[int],
    indent: int | None,
    ascii_only: bool,
) -> None:
    written = [
        (tool, json.dumps(arguments, indent=indent, ensure_ascii=ascii_only))
        for tool, arguments in made
    ]
    text = "\n".join(write_json_call(name, *call) for call in written)

    events = read_chunks(make_parser(name), text, cuts)

    names = [event.name for event in events if isinstance(event, CallBegun)]
    found = [event.text for event in events if isinstance(event, CallArguments)]
    assert list(zip(names, found, strict=True)) == written
    assert not any(isinstance(event, Text) for event in events)


@settings(max_examples=60, deadline=None)
@given(
    made=st.lists(calls, min_size=1, max_size=3), cuts=st.lists(st.integers(0, 10**6), max_size=6)
)
def test_calls_in_python_keep_their_values(
    made: list[tuple[str, dict[str, Any]]], cuts: list[int]
) -> None:
    written = [
        f"{tool}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"
        for tool, arguments in made
    ]

    events = read_chunks(make_parser("llama4"), f"[{', '.join(written)}]", cuts)

    found = [json.loads(event.text) for event in events if isinstance(event, CallArguments)]
    assert found == [arguments for _, arguments in made]


@settings(max_examples=60, deadline=None)
@given(
    number=st.integers(-(10**9), 10**9),
    text=st.text(max_size=12).filter(lambda text: not re.search(r"[<\r]|\n\Z", text)),
    items=st.lists(values, max_size=3),
    cuts=st.lists(st.integers(0, 10**6), max_size=6),
)
def test_calls_in_tags_keep_values_and_types(
    number: int, text: str, items: list[Any], cuts: list[int]
) -> None:
    arguments = {"a": number, "s": text, "x": items}
    written = {"a": str(number), "s": text, "x": json.dumps(items)}
    tags = "".join(f"<parameter={key}>\n{v}\n</parameter>\n" for key, v in written.items())
    reply = f"<tool_call>\n<function=add>\n{tags}</function>\n</tool_call>"

    events = read_chunks(make_parser("qwen3_coder"), reply, cuts)

    assert json.loads(events[1].text) == arguments
    assert len(events) == 2


class CountingMarkers(Markers):
    """Counts the characters that are held for the next piece, which will be looked at again."""

    num_held = 0

    def held_len(self, text: str, start: int) -> int:
        held = super().held_len(text, start)
        type(self).num_held += held
        return held


@pytest.mark.parametrize("unit", ["<", "<tool_", "a<tool_callx", "<tool_call<tool_call", "{"])
def test_little_is_looked_at_twice(unit: str) -> None:
    text = unit * (20_000 // len(unit))
    CountingMarkers.num_held = 0
    markers, reader, passed = CountingMarkers("<tool_call>"), TextReader(), list[str]()
    steps = reader.until(markers, passed.append)

    for char in text:
        reader.feed(char)
        next(steps, None)
        assert len(reader._text) <= len("<tool_call>")
    reader.end()
    next(steps, None)

    assert "".join(passed) == text
    assert CountingMarkers.num_held <= len(text) * len("<tool_call>")
