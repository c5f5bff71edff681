"""Replies read by a checkpoint's own response template."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers.utils.chat_parsing import parse_response

from remora.configs.errors import ConfigError
from remora.deployments.parsers.reply_reader import PartReader
from remora.deployments.parsers.response_template import MAX_CALL_CHARS, CheckpointFormat
from remora.deployments.parsers.tool_calls.ids import random_id
from tests.deployments.parsers.replies import cut, merged, read

START = "<|im_start|>assistant\n"
TAGGED: dict[str, Any] = {
    "defaults": {"role": "assistant"},
    "start_anchor": START,
    "fields": {
        "reasoning_content": {"open": "<think>", "close": "</think>", "content": "text"},
        "tool_calls": {
            "open_pattern": r"\s*<tool_call>",
            "close": "</tool_call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close_pattern": r"\s*<\|im_end\|>", "content": "text"},
    },
}
NAMED: dict[str, Any] = {
    "start_anchor": START,
    "fields": {
        "thinking": {"open": "[T]", "close": ["[/T]", "[/T]\n"], "content": "text"},
        "tool_calls": {
            "open_pattern": r"<f=(?P<name>\w+)>",
            "close": "</f>",
            "repeats": True,
            "content": "xml-inline",
            "content_args": {"tag_pattern": r"<p=(?P<key>\w+)>(?P<value>.*?)</p>"},
            "transform": {
                "type": "function",
                "function": {"name": "{name}", "arguments": "{content}"},
            },
        },
        "content": {"open": "[A]", "close": "[/A]", "content": "text"},
    },
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
        },
    }
]


def make_reader(source: dict[str, Any], prompt: str = START, **options: Any) -> PartReader:
    options = {"tools": TOOLS, "after": None, "make_id": random_id} | options
    return PartReader(CheckpointFormat(source), prompt, **options)


@pytest.mark.parametrize(
    ("text", "reasoning", "answer", "calls"),
    [
        ("Hello ", "", "Hello", []),
        ("<think>\nhm\n</think>\n\nyes<|im_end|>", "hm", "yes", []),
        ("<think>hm", "hm", "", []),
        (
            'Let me see.\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>',
            "",
            "Let me see.",
            [("add", '{"a": 1}')],
        ),
        ('<tool_call>{"name": "add", "arguments": {}}', "", "", [("add", "{}")]),
        ("<tool_call>oops</tool_call>", "", "<tool_call>oops</tool_call>", []),
        ('<tool_call>{"name": 3}</tool_call>', "", '<tool_call>{"name": 3}</tool_call>', []),
        ("a <tool_cal", "", "a <tool_cal", []),
        ("", "", "", []),
    ],
)
def test_parts_become_what_they_are_called(
    text: str, reasoning: str, answer: str, calls: list[tuple[str, str]]
) -> None:
    assert read(make_reader(TAGGED), text) == (reasoning, answer, calls)


def test_arguments_have_the_types_of_the_tool() -> None:
    text = "[T]hm[/T]\n[A]one[/A]<f=add><p=a>7</p><p=b>x</p></f>[A] two[/A]"

    assert read(make_reader(NAMED), text) == ("hm", "one two", [("add", '{"a": 7, "b": "x"}')])


def test_text_is_given_out_as_it_comes() -> None:
    reader = make_reader(TAGGED)

    assert read_now(reader, "<think>\nlet me") == ("let me", "")
    assert read_now(reader, " see</thi") == (" see", "")
    assert read_now(reader, "nk>\nyes") == ("", "yes")


def read_now(reader: PartReader, text: str) -> tuple[str, str]:
    reasoning, answer, _ = merged(reader.push(text))
    return reasoning, answer


def test_reasoning_that_the_prompt_opened_goes_on() -> None:
    prompt = f"<|im_start|>user\n<think><|im_end|>\n{START}<think>\n"

    assert read(make_reader(TAGGED, prompt), "hm</think>yes") == ("hm", "yes", [])
    assert CheckpointFormat(TAGGED).reasoning_end(prompt) == "</think>"
    assert CheckpointFormat(TAGGED).reasoning_end(START) is None


def test_what_the_prompt_holds_of_a_mark_is_no_part_of_the_reply() -> None:
    assert read(make_reader(TAGGED, f"{START}Hello \n<to"), "ol_call>x") == ("", "ol_call>x", [])
    assert read(make_reader(TAGGED, f"{START}Hello <th"), "ree") == ("", "ree", [])


CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'


def test_options_decide_what_stays_in_the_text() -> None:
    reasoning = "<think>hm</think>yes"
    long = CALL.replace("1", f'"{"a" * MAX_CALL_CHARS}"')

    assert read(make_reader(TAGGED, separate=False), reasoning) == ("", reasoning, [])
    assert read(make_reader(TAGGED, tools=None), CALL) == ("", CALL, [])
    assert read(make_reader(TAGGED, parallel=False), CALL * 2) == ("", "", [("add", '{"a": 1}')])
    assert read(make_reader(TAGGED), long) == ("", long, [])


@pytest.mark.parametrize(
    "source",
    [
        {},
        {"fields": {"content": {}}},
        {"fields": {"content": {"close_pattern": "("}}, "start_anchor": "a"},
        {"fields": {"content": 3}, "start_anchor": "a"},
        {"version": 9, "fields": {"content": {}}, "start_anchor": "a"},
    ],
)
def test_a_malformed_template_is_refused(source: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="response_template"):
        CheckpointFormat(source)


WORDS = st.sampled_from(
    [
        *("<think>", "</think>", "<tool_call>", "</tool_call>", "<|im_end|>", CALL, "[T]", "[/T]"),
        *("[A]", "[/A]", "<f=add>", "<p=a>1</p>", "</f>", "\n", "  ", "a", "é🙂", "<", "[/T", "{}"),
    ]
)
TEXTS = st.lists(WORDS, max_size=12).map("".join)


@given(
    source=st.sampled_from([TAGGED, NAMED]),
    prompt=st.sampled_from([START, START + "<think>\n", START + "[T]", "no anchor\n<"]),
    text=TEXTS,
    places=st.lists(st.integers(0, 150), max_size=12),
    separate=st.booleans(),
)
def test_any_cut_gives_the_same(
    source: dict[str, Any], prompt: str, text: str, places: list[int], separate: bool
) -> None:
    def make() -> PartReader:
        return make_reader(source, prompt, separate=separate)

    whole_reader, char_reader = make(), make()
    whole = read(whole_reader, text)

    assert read(make(), *cut(text, places)) == whole
    assert read(char_reader, *text) == whole
    assert list(char_reader.reasoning_spans) == list(whole_reader.reasoning_spans)


@given(reasoning=st.text(max_size=9), answer=st.text(max_size=9), num_calls=st.integers(0, 3))
def test_plain_replies_are_read_as_by_transformers(
    reasoning: str, answer: str, num_calls: int
) -> None:
    text = f"<think>\n{reasoning}</think>\n\n{answer}{CALL * num_calls}"

    message = parse_response(text, TAGGED, prefix=START, tools=TOOLS)

    expected = (message.get("reasoning_content", ""), message.get("content", ""))
    assert read(make_reader(TAGGED), text)[:2] == expected
    assert len(read(make_reader(TAGGED), text)[2]) == len(message.get("tool_calls", []))


def test_a_pattern_that_takes_for_ever_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("remora.deployments.parsers.response_template.SEARCH_TIMEOUT_S", 0.05)
    source = {
        "start_anchor": START,
        "fields": {
            "thinking": {"open_pattern": r"(a|a|aa)+!", "close": "</t>"},
            "content": {"content": "text"},
        },
    }

    assert read(make_reader(source), "a" * 200, "b")[1] == "a" * 200 + "b"
